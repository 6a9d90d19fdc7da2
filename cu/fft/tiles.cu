// tiles.cu: transforms of pairs of tiles: forwards, backwards, or both. fft.cuh says what a tile and a pair are.
//
//   FORWARD  spectrum[channel][pair] = transform of the two tiles of x, or of a filter alone, times `gain`
//   BACKWARD  y = epilogue(inverse transform of spectrum[k][pair])
//   WHOLE    y = epilogue(inverse transform of (transform of the tiles * spectrum of filter k)), if a group has one channel of x
//
// Where CHECKED, transforms are double and results are not. The error of a transform is at most u * log2(FREQUENCIES) times the norms of the pair and of the
// filter, with u = 2^-53. A result that is at least 2^24 times as large is right to half of a float's rounding. Others are listed and summed.
//
// Results that fft/range.cu's map names, and all results of a filter that it has flagged, are not taken from the transform. They are listed in shared
// memory, and the block's threads compute one each: 0, or a sum of products, without the parts of the tile that are zeros.
//
// A tile's transform is one of its columns, then one of its rows. With LINEAR the tile is one line, row after row, and numbers are rotated by
// their row and column in between, which makes it a transform of the line (Bailey 1990, the four-step method). A column of TILE_H = RADIX_H * REST_H
// numbers takes two steps: RADIX_H numbers that are REST_H apart are transformed in registers, and rotated; then REST_H neighbours. The inverse
// transform takes the same steps backwards. Nothing is ever put in order: each place holds whatever frequency comes to it.
//
// Mapping  block -> a pair of tiles of a channel. thread -> in each step some columns, or rows, of RADIX or REST numbers each. Neighbouring
//          threads have neighbouring columns, and rows an odd number of numbers apart: no two use the same bank.
// Memory   shared: the pair as complex numbers, rows TILE_W + 1 apart; the rotations of a row and of a column. The first step reads its numbers from
//          global memory, the last one writes them there. Then the list of other results takes the pair's place.
//
// By hand: nvcc -cubin -I cu cu/fft/tiles.cu
#include "core/portable.cuh"

#ifndef TILE_H
#define TILE_H 64
#define TILE_W 64
#define LINEAR 0
#define THREADS 256
#define MODE 2
#endif

#include "fft/fft.cuh"

#define FORWARD 0
#define BACKWARD 1
#define WHOLE 2

#define LONGEST (TILE_H > TILE_W ? TILE_H : TILE_W)
#define RADIX_OF(size) ((size) >= 128 ? 16 : 8)
#define RADIX_H RADIX_OF(TILE_H)
#define RADIX_W RADIX_OF(TILE_W)
#define REST_H (TILE_H / RADIX_H)
#define REST_W (TILE_W / RADIX_W)
#define PITCH (TILE_W + 1)
#define FREQUENCIES (TILE_H * TILE_W)
// of fft/range.cu
#if LINEAR
#define PARTS_W PARTS
#define PART_H 1
#define PART_W (FREQUENCIES / PARTS)
#else
#define PARTS_W 32
#define PART_H (TILE_H / 32)
#define PART_W (TILE_W / 32)
#endif

// cos and sin of pi * i / 8
#define COS_8(i) ((wide_t)((i) == 1 ? 0.92387953251128675613 : (i) == 2 ? 0.70710678118654752440 : (i) == 3 ? 0.38268343236508977173 : \
    (i) == 5 ? -0.38268343236508977173 : (i) == 6 ? -0.70710678118654752440 : -0.92387953251128675613))
#define SIN_8(i) COS_8((i) < 4 ? 4 - (i) : (i) - 4)

// v rotated by -pi * i / 8, for a constant i from 0 to 7
WITHIN_KERNEL complex_t turned(complex_t v, const int i) {
  if (i == 0) return v;
  if (i == 4) return COMPLEX(v.y, -v.x);
  return times_conjugate(v, COMPLEX(COS_8(i), SIN_8(i)));
}
WITHIN_KERNEL complex_t turned_back(complex_t v, const int i) {
  if (i == 0) return v;
  if (i == 4) return COMPLEX(-v.y, v.x);
  return times(v, COMPLEX(COS_8(i), SIN_8(i)));
}

// The frequency at place i of `count`, a power of 2.
WITHIN_KERNEL int frequency_at(int i, const int count) {
  int reversed = 0;
#pragma unroll
  for (int bit = 1; bit < count; bit *= 2) {
    reversed = 2 * reversed + (i & 1);
    i >>= 1;
  }
  return reversed;
}

// The transform of COUNT numbers in registers; and its inverse, times COUNT.
#define TRANSFORM(v, COUNT)                                                    \
  _Pragma("unroll") for (int half_ = (COUNT) / 2; half_; half_ /= 2)           \
    _Pragma("unroll") for (int i_ = 0; i_ < (COUNT) / 2; ++i_) {               \
      const int in_ = i_ & (half_ - 1), at_ = 2 * i_ - in_;                    \
      const complex_t a_ = v[at_], b_ = v[at_ + half_];                        \
      v[at_] = COMPLEX(a_.x + b_.x, a_.y + b_.y);                              \
      v[at_ + half_] = turned(COMPLEX(a_.x - b_.x, a_.y - b_.y), in_ * (8 / half_)); \
    }
#define TRANSFORM_BACK(v, COUNT)                                               \
  _Pragma("unroll") for (int half_ = 1; half_ < (COUNT); half_ *= 2)           \
    _Pragma("unroll") for (int i_ = 0; i_ < (COUNT) / 2; ++i_) {               \
      const int in_ = i_ & (half_ - 1), at_ = 2 * i_ - in_;                    \
      const complex_t a_ = v[at_], b_ = turned_back(v[at_ + half_], in_ * (8 / half_)); \
      v[at_] = COMPLEX(a_.x + b_.x, a_.y + b_.y);                              \
      v[at_ + half_] = COMPLEX(a_.x - b_.x, a_.y - b_.y);                      \
    }
#define EACH(count) _Pragma("unroll") for (int i = 0; i < (count); ++i)
#define RESIDUAL_IF(there, at) ((there) ? RESIDUAL_AT(at) : NOTHING)
#define EACH_OF_PART(l) _Pragma("unroll") for (int l = part_w; l < part_w + PART_W; ++l)
#define ALL(number) for (int at = LID_0; at < (number); at += THREADS)

#if CHECKED
#define FEW 1024  // results of a pair that are listed; where there are more that may be off, all are summed
// Puts a place on the list; the value is 1.
WITHIN_KERNEL int few_at(int number, LOCAL_MEM_POINTER int* few, int place) {
  if (number < FEW) few[number] = place;
  return 1;
}
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void fft_tiles(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                                                const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                                                const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* y, const GLOBAL_MEM wide_t* spectra,
                                                GLOBAL_MEM wide_t* written, const GLOBAL_MEM wide_t* flags, const GLOBAL_MEM wide_t* filter_flags,
                                                const FftArguments arg) {
  AFTER_LAST_LAUNCH
#ifdef __OPENCL_VERSION__
  LOCAL_MEM complex_t z[TILE_H * PITCH];
  LOCAL_MEM int* listed = (LOCAL_MEM int*)z;
#define NEXT(count) atomic_inc(&(count))
#else
  extern __shared__ complex_t z[];
  int* listed = (int*)z;
#define NEXT(count) atomicAdd(&(count), 1)
#endif
  LOCAL_MEM int listed_count;
#if CHECKED && MODE != FORWARD
  LOCAL_MEM int few[FEW], few_count;
  if (LID_0 == 0) few_count = 0;
#endif
  LOCAL_MEM complex_t turns[LONGEST];  // e^(-2 pi i at / LONGEST)
#define TURN_H(at) turns[(at) * (LONGEST / TILE_H)]
#define TURN_W(at) turns[(at) * (LONGEST / TILE_W)]
  ALL(LONGEST) {
    wide_t s, c;
    TURN(at * ((wide_t)2 / LONGEST), s, c)
    turns[at] = COMPLEX(c, -s);
  }
  const int channel = divided((int)GID_0, arg.by_pairs), pair = (int)GID_0 - channel * (int)arg.pairs;
#if MODE == FORWARD
  const int group = divided(channel, arg.by_channels), c = channel - group * (int)arg.channels;
#else
  const int group = divided(channel, arg.by_per_group), c = 0;
#endif
  const int number0 = (int)arg.at_once * pair, alone = arg.at_once == 1 || number0 + 1 == (int)arg.all_tiles, number1 = alone ? number0 : number0 + 1;
  const Tile tile0 = tile_of(&arg, number0), tile1 = tile_of(&arg, number1);
  const GLOBAL_MEM data_t* plane = x + (group * (index_t)arg.group_stride + c * (index_t)arg.channel_stride);
  const GLOBAL_MEM data_t *from0 = plane + tile0.image * (index_t)arg.image_stride, *from1 = plane + tile1.image * (index_t)arg.image_stride;
  local_barrier();

#if MODE != BACKWARD
  {  // columns, from global memory
    const wide_t gain = BITS_TO_WIDE(arg.gain);
    const int row0 = (int)(arg.first_h + tile0.row * arg.used_h), column0 = (int)(arg.first_w + tile0.column * arg.used_w);
    const int row1 = (int)(arg.first_h + tile1.row * arg.used_h), column1 = (int)(arg.first_w + tile1.column * arg.used_w);
    ALL(REST_H * TILE_W) {
      const int j = at / TILE_W, column = at % TILE_W;
      complex_t v[RADIX_H];
      EACH(RADIX_H) {
        const int row = j + i * REST_H;
#if LINEAR
        const acc_t re = element(from0, &arg, 1, row0, column0 + row * TILE_W + column);
        const acc_t im = element(from1, &arg, !alone, row1, column1 + row * TILE_W + column);
#else
        const acc_t re = element(from0, &arg, 1, row0 + row, column0 + column);
        const acc_t im = element(from1, &arg, !alone, row1 + row, column1 + column);
#endif
        v[i] = COMPLEX(FITTING(re) * gain, FITTING(im) * gain);
      }
      TRANSFORM(v, RADIX_H)
      EACH(RADIX_H) z[(j + i * REST_H) * PITCH + column] = times(v[i], TURN_H(j * frequency_at(i, RADIX_H)));
    }
  }
  local_barrier();
  ALL(RADIX_H * TILE_W) {
    const int j = at / TILE_W, column = at % TILE_W;
    complex_t v[REST_H];
    EACH(REST_H) v[i] = z[(j * REST_H + i) * PITCH + column];
    TRANSFORM(v, REST_H)
    EACH(REST_H) {
#if LINEAR
      wide_t s, c;
      TURN((column * (frequency_at(j, RADIX_H) + RADIX_H * frequency_at(i, REST_H))) * ((wide_t)2 / FREQUENCIES), s, c)
      v[i] = times(v[i], COMPLEX(c, -s));
#endif
      z[(j * REST_H + i) * PITCH + column] = v[i];
    }
  }
  local_barrier();
  ALL(REST_W * TILE_H) {  // rows
    const int j = at / TILE_H, row = at % TILE_H;
    complex_t v[RADIX_W];
    EACH(RADIX_W) v[i] = z[row * PITCH + j + i * REST_W];
    TRANSFORM(v, RADIX_W)
    EACH(RADIX_W) z[row * PITCH + j + i * REST_W] = times(v[i], TURN_W(j * frequency_at(i, RADIX_W)));
  }
  local_barrier();
#endif

  {  // the spectrum is at [column][row], as neighbouring threads have it
#if MODE == FORWARD
    GLOBAL_MEM complex_t* to = (GLOBAL_MEM complex_t*)(written + arg.written_at) + (long_t)GID_0 * FREQUENCIES;
#elif MODE == BACKWARD
    const GLOBAL_MEM complex_t* spectrum = (const GLOBAL_MEM complex_t*)(spectra + arg.read_at) + (long_t)GID_0 * FREQUENCIES;
#else
    const GLOBAL_MEM complex_t* spectrum = (const GLOBAL_MEM complex_t*)(spectra + arg.read_at) + (long_t)channel * FREQUENCIES;
#endif
    ALL(RADIX_W * TILE_H) {
      const int j = at / TILE_H, row = at % TILE_H, first = j * REST_W * TILE_H + row;
      complex_t v[REST_W];
#if MODE != BACKWARD
      EACH(REST_W) v[i] = z[row * PITCH + j * REST_W + i];
      TRANSFORM(v, REST_W)
#endif
#if MODE == FORWARD
      EACH(REST_W) to[first + i * TILE_H] = v[i];
#else
#if MODE == BACKWARD
      EACH(REST_W) v[i] = spectrum[first + i * TILE_H];
#else
      EACH(REST_W) v[i] = times(v[i], spectrum[first + i * TILE_H]);
#endif
      TRANSFORM_BACK(v, REST_W)
      EACH(REST_W) z[row * PITCH + j * REST_W + i] = v[i];
#endif
    }
  }

#if MODE != FORWARD
  local_barrier();
  ALL(REST_W * TILE_H) {
    const int j = at / TILE_H, row = at % TILE_H;
    complex_t v[RADIX_W];
    EACH(RADIX_W) v[i] = times_conjugate(z[row * PITCH + j + i * REST_W], TURN_W(j * frequency_at(i, RADIX_W)));
    TRANSFORM_BACK(v, RADIX_W)
    EACH(RADIX_W) z[row * PITCH + j + i * REST_W] = v[i];
  }
  local_barrier();
  ALL(RADIX_H * TILE_W) {
    const int j = at / TILE_W, column = at % TILE_W;
    complex_t v[REST_H];
    EACH(REST_H) {
      v[i] = z[(j * REST_H + i) * PITCH + column];
#if LINEAR
      wide_t s, c;
      TURN((column * (frequency_at(j, RADIX_H) + RADIX_H * frequency_at(i, REST_H))) * ((wide_t)2 / FREQUENCIES), s, c)
      v[i] = times(v[i], COMPLEX(c, s));
#endif
    }
    TRANSFORM_BACK(v, REST_H)
    EACH(REST_H) z[(j * REST_H + i) * PITCH + column] = v[i];
  }
  local_barrier();

  EPILOGUE_FLAGS
  const int p = (int)arg.p, q = (int)arg.q, used_h = (int)arg.used_h, used_w = (int)arg.used_w, r = (int)arg.r, s = (int)arg.s;
  const int fits = filter_flags[arg.filter_flags_at + channel] == 0;
  const acc_t factor = SCALE_OF(channel), summand = BIAS_OF(channel);
  // planes of the result
  const index_t result0 = (tile0.image * (index_t)arg.k + channel) * (p * q), result1 = (tile1.image * (index_t)arg.k + channel) * (p * q);
  // rows and columns of results
  const int rows0 = SMALLER(used_h, p - tile0.row * used_h), columns0 = SMALLER(used_w, q - tile0.column * used_w);
  const int rows1 = alone ? 0 : SMALLER(used_h, p - tile1.row * used_h), columns1 = SMALLER(used_w, q - tile1.column * used_w);
  // the maps' entries count only for tiles with a flag
  const index_t in_flags = group * (index_t)arg.all_tiles;
  const GLOBAL_MEM wide_t* flag = flags + arg.flags_at + in_flags;
  const GLOBAL_MEM unsigned char* map0 = (const GLOBAL_MEM unsigned char*)(flags + arg.maps_at) + (in_flags + number0) * PARTS;
  const GLOBAL_MEM unsigned char* map1 = map0 + (number1 - number0) * PARTS;
  const int asked0 = flag[number0] != 0 ? BY_SUM | ZERO : 0, asked1 = flag[number1] != 0 ? BY_SUM | ZERO : 0;
#if CHECKED
  const wide_t least = BITS_TO_WIDE(arg.least) * filter_flags[arg.filter_norms_at + channel];
  const wide_t least0 = least * flags[arg.norms_at + in_flags + number0], least1 = least * flags[arg.norms_at + in_flags + number1];
#define MAY_BE_OFF(v, least, h, in_w, second)                                                                                    \
  (!(fabs(v) >= (least)) && few_at(NEXT(few_count), few, (second)*FREQUENCIES + (LINEAR ? (in_w) : (h)*TILE_W + (in_w))))
#else
#define MAY_BE_OFF(v, least, h, in_w, second) 0
#endif
#define IN_MAP(h, w) ((h) / PART_H * PARTS_W + (w) / PART_W)
  const index_t corner0 = result0 + (tile0.row * used_h * q + tile0.column * used_w), corner1 = result1 + (tile1.row * used_h * q + tile1.column * used_w);
  ALL(REST_H * TILE_W) {
    const int j = at / TILE_W, column = at % TILE_W;
    complex_t v[RADIX_H];
    EACH(RADIX_H) v[i] = times_conjugate(z[(j + i * REST_H) * PITCH + column], TURN_H(j * frequency_at(i, RADIX_H)));
    TRANSFORM_BACK(v, RADIX_H)
    EACH(RADIX_H) {
      // the result of the tile: a circular convolution is right behind its first r - 1 rows and s - 1 columns
#if LINEAR
      const int h = 0, in_w = (j + i * REST_H) * TILE_W + column - (s - 1);
#else
      const int h = j + i * REST_H - (r - 1), in_w = column - (s - 1);
#endif
      const int stored0 = fits && (unsigned)h < (unsigned)rows0 && (unsigned)in_w < (unsigned)columns0 &&
                          !(asked0 && map0[IN_MAP(h, in_w)] & asked0) && !MAY_BE_OFF(v[i].x, least0, h, in_w, 0);
      const int stored1 = fits && (unsigned)h < (unsigned)rows1 && (unsigned)in_w < (unsigned)columns1 &&
                          !(asked1 && map1[IN_MAP(h, in_w)] & asked1) && !MAY_BE_OFF(v[i].y, least1, h, in_w, 1);
      const index_t at0 = corner0 + (h * q + in_w), at1 = corner1 + (h * q + in_w);
      acc_t both[2] = {(acc_t)v[i].x, (acc_t)v[i].y};
      FINISH(both[0], factor, summand, RESIDUAL_IF(stored0, at0))
      FINISH(both[1], factor, summand, RESIDUAL_IF(stored1, at1))
      ACTIVATE(both, 2)
      if (stored0) STORE(y, at0, both[0]);
      if (stored1) STORE(y, at1, both[1]);
    }
  }

#if CHECKED
  local_barrier();
  const int count = few_count, all = count > FEW;
#else
  const int count = 0, all = 0;
#endif
  if (fits && !asked0 && !asked1 && !count) return;
  // lists a result's place in its tile, and whether that is the second tile
  local_barrier();
  if (LID_0 == 0) listed_count = all ? 0 : count;
#if CHECKED
  if (!all) ALL(count) listed[at] = few[at];
#endif
  local_barrier();
  ALL(2 * FREQUENCIES) {
    const int second = at / FREQUENCIES, in_tile = at % FREQUENCIES, h = LINEAR ? 0 : in_tile / TILE_W, in_w = LINEAR ? in_tile : in_tile % TILE_W;
    const int asked = second ? asked1 : asked0;
    if (h < (second ? rows1 : rows0) && in_w < (second ? columns1 : columns0) &&
        (!fits || all || (asked && (second ? map1 : map0)[IN_MAP(h, in_w)] & asked)))
      listed[NEXT(listed_count)] = at;
  }
  local_barrier();
  const int in_group = channel - group * (int)arg.per_group;
  const GLOBAL_MEM data_t* filter = w + (group * (index_t)arg.f_group + in_group * (index_t)arg.f_written);
  ALL(listed_count) {
    const int second = listed[at] / FREQUENCIES, in_tile = listed[at] % FREQUENCIES;
    const int h = LINEAR ? 0 : in_tile / TILE_W, in_w = LINEAR ? in_tile : in_tile % TILE_W;
    const Tile tile = second ? tile1 : tile0;
    const GLOBAL_MEM data_t* from = second ? from1 : from0;
    const GLOBAL_MEM unsigned char* map = second ? map1 : map0;
    const int mapped = fits && (second ? asked1 : asked0);  // a filter's Inf and NaN reach every result, where x is zero too
    const int first_h = (int)arg.first_h + tile.row * used_h, first_w = (int)arg.first_w + tile.column * used_w;
    // pixels of the tile that lie in the window and in the image
    const int top = h < -first_h ? -first_h : h, left = in_w < -first_w ? -first_w : in_w;
    const int bottom = SMALLER(h + r, (int)arg.h - first_h), right = SMALLER(in_w + s, (int)arg.w - first_w);
    wide_t total = 0;
    for (int part_h = top / PART_H * PART_H; part_h < bottom; part_h += PART_H)
      for (int part_w = left / PART_W * PART_W; part_w < right; part_w += PART_W) {
        if (mapped && map[IN_MAP(part_h, part_w)] & NOTHING_THERE) continue;
        const int end_h = SMALLER(part_h + PART_H, bottom);
        wide_t part = 0;
        for (int c = 0; c < (int)arg.channels; ++c) {
          const GLOBAL_MEM data_t* image = from + c * (index_t)arg.channel_stride;
          const GLOBAL_MEM data_t* taps = filter + c * (index_t)arg.f_read;
          for (int i = part_h < top ? top : part_h; i < end_h; ++i)
            EACH_OF_PART(l) {
              const int tap = (i - h) * s + l - in_w;
              if (l >= left && l < right) part += (wide_t)LOAD(image, (first_h + i) * (int)arg.w + first_w + l) * LOAD(taps, arg.flipped ? r * s - 1 - tap : tap);
            }
        }
        total += part;
      }
    acc_t sum = (acc_t)total;
    const index_t to = (second ? corner1 : corner0) + (h * q + in_w);
    FINISH(sum, factor, summand, RESIDUAL_AT(to))
    ACTIVATE(&sum, 1)
    STORE(y, to, sum);
  }
#endif
}
