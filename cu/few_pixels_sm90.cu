// few_pixels_sm90.cu: convolutions and gradients by the input of few pixels and many channels, NCHW arrays as they lie, on tensor cores that warps feed
// themselves.
//
//   y[n,k,p,q] = sum over c, r and s of x[n, c, p * stride_h + low_h + r * step_h, q * stride_w + low_w + s * step_w] * w[k,c,tap(r,s)], and finish.cuh
//   gemm m: output channel | gemm n: pixel (n,p,q) of the batch | gemm k: (c, tap), in steps of a unit of channels and a tap
//
// The filter is the traffic: each block reads its part once. What its pixels meet of x lies in shared memory, from where every tap reads it. Nothing is
// packed, and there is one launch.
//
// Mapping  block: a tile of 32 * warps_m channels and BLOCK_N pixels. CLUSTER blocks share a tile; each sums its part of the channels, units of 32 bytes.
//          warp: 32 channels, all pixels; the 8 / warps_m warps with the same channels take steps by turns.
// Shared   a ring of STAGES slots, of stage_units units of channels each.
//          w: in lines of neighbours as in memory: forward a line is a channel of y, in the gradient a channel of x. row_step and channel_step are chosen
//          so that a warp's loads meet all banks once.
//          x: [word of channels][position], a word being one channel of 32 bits or two of 16. Positions are the rows and columns that the tile's taps
//          meet of an image, with the zeros around it, image after image; where there is one tap, flat, they are the tile's pixels.
//          When all is multiplied, the sums of all warps take its place, [warps with the same channels][channel][pixel].
// Sums     PRODUCTS = 3: x and w are split to two TF32 numbers each, of which three products are added, and after two steps the main one is added to a
//          float32 sum, because the tensor core's own is cut. What is not finite in the end is computed once more, in plain float32.
//          The order: a warp's steps; the warps with the same channels; the blocks of the cluster.
// Phases   the gradient with a stride is made of stride phases, each a stride-1 convolution with some of the taps. A launch takes up to four.
//
// By hand: nvcc -cubin -arch=sm_90 cu/few_pixels_sm90.cu
#ifndef TYPE
#define TYPE 32        // of the arrays: 32 float, 16 half, 17 bfloat16
#define PRODUCTS 3     // of TF32 numbers for one of float32; or 1
#define BLOCK_N 56     // pixels of a tile
#define CLUSTER 8      // blocks that share a tile
#endif
#define MOMENTS 0
#include "cluster.cuh"
#include "finish.cuh"
#include "mma_sync.cuh"
#include "truncation.cuh"

typedef element<TYPE> data_t;

constexpr int WARPS = 8, THREADS = 32 * WARPS, WARP_M = 32, EIGHTS = BLOCK_N / 8, PHASES = 4, STAGES = 4, MOST_TAPS = 64;
constexpr int SIZE = sizeof(data_t), WORD = 4 / SIZE, UNIT = 8 * WORD, VECTOR = 16 / SIZE;  // channels of a word and of a unit; elements of 16 bytes
constexpr int PITCH = (BLOCK_N + 23) / 32 * 32 + 8;                                         // floats of a row of sums
static_assert(PRODUCTS == 1 || TYPE == 32, "three products are for float32");

// What the kernel is told of a phase. by_n is the divisor n, prepared (division.cuh).
struct FewPixelsPhase {
  long long tiles, tiles_m, by_tiles_m;                        // all; along channels
  long long warps_m, by_warps_m;
  long long rows, channels;                                    // of y, of x
  long long units, part, stage_units;                          // of channels: all, of one of CLUSTER parts, of a stage
  long long gradient;
  long long pieces, by_pieces, line_bytes, line_step;          // 16 bytes of a line; bytes to the next one in shared memory, elements in memory
  long long row_step, channel_step;                            // elements in shared memory
  long long w_taps;                                            // of the filter
  long long taps, taps_s, by_taps_s;                           // of the phase
  long long tap_base, tap_step_r, tap_step_s, step_h, step_w;  // in w; in x
  long long pixels, images, plane, by_plane, q, by_q;          // of the phase, of an image, of a row
  long long stride_h, stride_w, low_h, low_w;
  long long h, w, x_image, x_channel;
  long long flat, positions, chunks, by_chunks;                // of positions: all, and 32s of them
  long long slot, by_slot, width, by_width, pitch;             // positions of an image, of a row, of a word of channels
  long long ring_at, slot_bytes, x_at;                         // bytes of shared memory: before the ring, of a slot, before x in a slot
  long long y_image, y_channel, out_base, out_h, out_w;
  long long has_bias, has_scale, has_residual, activation, slope;
};

struct Shapes {
  FewPixelsPhase of[PHASES];
};

struct Tables {
  int2 tap[MOST_TAPS];  // bytes in w and in x
  int start[BLOCK_N];   // of a pixel: the position of its first tap
  int place[BLOCK_N];   // of a pixel in y, or -1
};

// A tile's first channel and pixel, its first pixel's image and row.
struct Tile {
  int row, pixel, image, first_p;
  DEVICE Tile(const FewPixelsPhase& shape, int tile) {
    const Divided across(tile, shape.tiles_m, shape.by_tiles_m);
    row = across.rest * WARP_M * (int)shape.warps_m;
    pixel = across.quotient * BLOCK_N;
    const Divided of_image(pixel, shape.plane, shape.by_plane);
    image = of_image.quotient;
    first_p = divided(of_image.rest, shape.by_q);
  }
};

// Image, row and column of a pixel.
struct Pixel {
  int image, p, q;
  DEVICE Pixel(const FewPixelsPhase& shape, int pixel) {
    const Divided of_image(pixel, shape.plane, shape.by_plane), of_row(of_image.rest, shape.q, shape.by_q);
    image = of_image.quotient;
    p = of_row.quotient;
    q = of_row.rest;
  }
};

// ---- tables

// Where a position lies in x, or -1: there is a zero.
DEVICE int place_in_x(const FewPixelsPhase& shape, const Tile& of, int position) {
  int image, h, w;
  if (shape.flat) {
    const Pixel at(shape, min(of.pixel + position, (int)shape.pixels - 1));
    image = at.image;
    h = at.p * (int)shape.stride_h + (int)shape.low_h;
    w = at.q * (int)shape.stride_w + (int)shape.low_w;
  } else {
    const Divided of_slot(position, shape.slot, shape.by_slot), of_row(of_slot.rest, shape.width, shape.by_width);
    image = of.image + of_slot.quotient;
    h = (of_slot.quotient == 0 ? of.first_p * (int)shape.stride_h : 0) + (int)shape.low_h + of_row.quotient;
    w = (int)shape.low_w + of_row.rest;
  }
  const bool there = image < (int)shape.images && (unsigned)h < (unsigned)shape.h && (unsigned)w < (unsigned)shape.w;
  return there ? image * (int)shape.x_image + h * (int)shape.w + w : -1;
}

DEVICE void write_tables(const FewPixelsPhase& shape, const Tile& of, Tables& tables, int* from) {
  for (int i = threadIdx.x; i < (int)shape.chunks * 32; i += THREADS) from[i] = i < (int)shape.positions ? place_in_x(shape, of, i) : -1;
  for (int i = threadIdx.x; i < BLOCK_N; i += THREADS) {
    const bool there = of.pixel + i < (int)shape.pixels;
    const Pixel at(shape, there ? of.pixel + i : of.pixel);
    const int slot = at.image - of.image, row = (at.p - (slot == 0 ? of.first_p : 0)) * (int)shape.stride_h;
    tables.start[i] = shape.flat ? i : slot * (int)shape.slot + row * (int)shape.width + at.q * (int)shape.stride_w;
    tables.place[i] = there ? at.image * (int)shape.y_image + (int)(shape.out_base + at.p * shape.out_h + at.q * shape.out_w) : -1;
  }
  for (int i = threadIdx.x; i < (int)shape.taps; i += THREADS) {
    const Divided of_row(i, shape.taps_s, shape.by_taps_s);
    const int r = of_row.quotient, s = of_row.rest;
    tables.tap[i].x = ((int)shape.tap_base + r * (int)shape.tap_step_r + s * (int)shape.tap_step_s) * SIZE;
    tables.tap[i].y = (r * (int)shape.step_h * (int)shape.width + s * (int)shape.step_w) * 4;
  }
}

// ---- loads

// A stage of the filter, from channel `first` on; `end`: behind the block's last channel.
DEVICE void fetch_w(const FewPixelsPhase& shape, const Tile& of, const data_t* w, uint32_t slot, int first, int end) {
  const bool gradient = shape.gradient != 0;
  const int taps = (int)shape.w_taps, rows = min(WARP_M * (int)shape.warps_m, (int)shape.rows - of.row), channels = min((int)shape.stage_units * UNIT, end - first);
  const int lines = gradient ? channels : rows, all = gradient ? (int)shape.stage_units * UNIT : WARP_M * (int)shape.warps_m, count = (gradient ? rows : channels) * taps;
  const data_t* const begin = w + (long long)(gradient ? first : of.row) * shape.line_step + (gradient ? of.row : first) * taps;
  for (int i = threadIdx.x; i < all * (int)shape.pieces; i += THREADS) {
    const Divided of_line(i, shape.pieces, shape.by_pieces);
    const int line = of_line.quotient, element = of_line.rest * VECTOR;
    const bool there = line < lines && element < count;
    load_16_bytes(slot + line * (int)shape.line_bytes + element * SIZE, there ? begin + line * shape.line_step + element : w, there);
  }
}

// What the tile meets of x, of so many words of channels from channel `first` on.
DEVICE void fetch_x(const FewPixelsPhase& shape, const data_t* x, uint32_t* to, const int* from, int first, int words) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = words * (int)shape.chunks;
  constexpr int AT_ONCE = 8;
  for (int i = warp; i < count; i += AT_ONCE * WARPS) {
    [[maybe_unused]] uint32_t found[AT_ONCE];
    uint32_t* at[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const Divided of_word(i + j * WARPS, shape.chunks, shape.by_chunks);
      const int position = of_word.rest * 32 + lane, channel = first + of_word.quotient * WORD;
      const bool real = i + j * WARPS < count && position < (int)shape.positions;
      const int place = real ? from[position] : -1;
      const data_t* const source = x + place + (long long)channel * shape.x_channel;
      at[j] = real ? to + of_word.quotient * (int)shape.pitch + position : nullptr;
#if TYPE == 32
      if (real) load_4_bytes(shared_address(at[j]), place >= 0 && channel < (int)shape.channels ? source : x, place >= 0 && channel < (int)shape.channels);
#else
      const uint32_t low = place >= 0 && channel < (int)shape.channels ? source->bits : 0;
      const uint32_t high = place >= 0 && channel + 1 < (int)shape.channels ? source[shape.x_channel].bits : 0;
      found[j] = low | high << 16;
#endif
    }
#if TYPE != 32
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (at[j]) *at[j] = found[j];
#endif
  }
}

// ---- products

// A number as factors; with three products, the TF32 number and LARGER times what that leaves, which so is there even of subnormals. What overflows is
// computed once more.
[[maybe_unused]] constexpr float LARGER = 4096;
struct Factor {
  uint32_t high, low;
  Factor() = default;
  DEVICE explicit Factor(uint32_t word) {
#if TYPE == 32
    high = to_tf32(__uint_as_float(word));
    low = PRODUCTS == 3 ? to_tf32((__uint_as_float(word) - __uint_as_float(high)) * LARGER) : 0;
#else
    high = word;
    low = 0;
#endif
  }
};

// Two neighbouring channels of 16 bits, or one of 32.
DEVICE uint32_t word_of_w(const uint8_t* at, [[maybe_unused]] int channel_bytes) {
#if TYPE == 32
  return *(const uint32_t*)at;
#else
  return *(const uint16_t*)at | (uint32_t)*(const uint16_t*)(at + channel_bytes) << 16;
#endif
}

struct Sums {
  float of[2][EIGHTS][4];
  DEVICE void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) of[half][j][e] = 0;
  }
  DEVICE void add(const Sums& more, float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) of[half][j][e] = fmaf(more.of[half][j][e], factor, of[half][j][e]);
  }
};

#if PRODUCTS == 3
// Results that are not finite, once more.
static __device__ __noinline__ float exact(const FewPixelsPhase& shape, const data_t* x, const data_t* w, int row, int pixel) {
  const Pixel at(shape, pixel);
  const int row_step = shape.gradient ? (int)shape.w_taps : (int)shape.line_step, channel_step = shape.gradient ? (int)shape.line_step : (int)shape.w_taps;
  float sum = 0;
  for (int tap = 0; tap < (int)shape.taps; ++tap) {
    const Divided of_row(tap, shape.taps_s, shape.by_taps_s);
    const int h = at.p * (int)shape.stride_h + (int)shape.low_h + of_row.quotient * (int)shape.step_h;
    const int v = at.q * (int)shape.stride_w + (int)shape.low_w + of_row.rest * (int)shape.step_w;
    const bool there = (unsigned)h < (unsigned)shape.h && (unsigned)v < (unsigned)shape.w;
    const data_t* const from = x + at.image * shape.x_image + h * (int)shape.w + v;
    const data_t* const by = w + (long long)row * row_step + shape.tap_base + of_row.quotient * shape.tap_step_r + of_row.rest * shape.tap_step_s;
    for (int c = 0; c < (int)shape.channels; ++c) sum = fmaf(there ? from[c * shape.x_channel] : 0, by[(long long)c * channel_step], sum);
  }
  return sum;
}
// The part of itself that a sum of two steps loses in the mean: two cuts, less what the rounding of second numbers gives. See truncation.cuh.
constexpr float LOST = 0.42e-7f * 16 / 15;
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, PRODUCTS == 3 ? 1 : 2)
    few_pixels_sm90(const data_t* __restrict__ x, const data_t* __restrict__ w, const data_t* __restrict__ bias, const data_t* __restrict__ scale,
                    const data_t* residual, data_t* __restrict__ y, const __grid_constant__ Shapes shapes) {
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ Tables tables;
  int phase = 0, number = blockIdx.x / CLUSTER;
  while (phase + 1 < PHASES && number >= (int)shapes.of[phase].tiles) number -= (int)shapes.of[phase++].tiles;
  const FewPixelsPhase& shape = shapes.of[phase];
  const Tile of(shape, number);
  const int rank = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = min(rank * (int)shape.part, (int)shape.units), units = min(first + (int)shape.part, (int)shape.units) - first;
  const int begin = first * UNIT, end = min((first + units) * UNIT, (int)shape.channels), stages = (units + (int)shape.stage_units - 1) / (int)shape.stage_units;
  int* const from = (int*)dynamic;

  write_tables(shape, of, tables, from);
  AFTER_LAST_LAUNCH
  __syncthreads();
  auto slot_of = [&](int stage) { return dynamic + shape.ring_at + stage % STAGES * (int)shape.slot_bytes; };
  auto fetch_stage_w = [&](int stage) {
    if (stage < stages) fetch_w(shape, of, w, shared_address(slot_of(stage)), begin + stage * (int)shape.stage_units * UNIT, end);
  };
  auto fetch_stage_x = [&](int stage) {
    const int done = stage * (int)shape.stage_units;
    if (stage < stages) fetch_x(shape, x, (uint32_t*)(slot_of(stage) + shape.x_at), from, begin + done * UNIT, min((int)shape.stage_units, units - done) * 8);
  };
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    fetch_stage_w(stage);
    if (TYPE == 32) fetch_stage_x(stage);
    commit_loads();
  }
  for (int stage = 0; TYPE != 32 && stage < STAGES - 1; ++stage) fetch_stage_x(stage);

  // this warp's channels, and which steps it takes
  const Divided of_group(warp, shape.warps_m, shape.by_warps_m);
  const int group = of_group.quotient, groups = WARPS / (int)shape.warps_m, warp_row = of_group.rest * WARP_M;
  const int row_bytes = (int)shape.row_step * SIZE, channel_bytes = (int)shape.channel_step * SIZE, word_bytes = WORD * channel_bytes;
  const int pitch_bytes = (int)shape.pitch * 4;
  const int w_lane = (warp_row + lane / 4) * row_bytes + lane % 4 * word_bytes, x_lane = (int)shape.x_at + lane % 4 * pitch_bytes;
  int start[EIGHTS];
#pragma unroll
  for (int j = 0; j < EIGHTS; ++j) start[j] = tables.start[8 * j + lane / 4] * 4;

  Sums sum;
  sum.clear();
#if PRODUCTS == 3
  Sums main, cross;
  main.clear();
  cross.clear();
#endif
  int steps = 0;  // that this warp has taken
  for (int stage = 0; stage < stages; ++stage) {
    wait_for_loads<STAGES - 2>();
    __syncthreads();
    fetch_stage_w(stage + STAGES - 1);
    fetch_stage_x(stage + STAGES - 1);
    commit_loads();
    const int here = min((int)shape.stage_units, units - stage * (int)shape.stage_units);
    const uint8_t *const w_stage = slot_of(stage) + w_lane, *const x_stage = slot_of(stage) + x_lane;
    int unit = group, tap = 0;
    while (unit >= here) {
      unit -= here;
      ++tap;
    }
    while (tap < (int)shape.taps) {
      const int2 at = tables.tap[tap];
      const uint8_t* const a_from = w_stage + unit * 8 * word_bytes + at.x;
      const uint8_t* const b_from = x_stage + unit * 8 * pitch_bytes + at.y;
      Factor a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          a[half][e] = Factor(word_of_w(a_from + (2 * half + e % 2) * 8 * row_bytes + e / 2 * 4 * word_bytes, channel_bytes));
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) {
        const Factor b0(*(const uint32_t*)(b_from + start[j])), b1(*(const uint32_t*)(b_from + start[j] + 4 * pitch_bytes));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t high[4] = {a[half][0].high, a[half][1].high, a[half][2].high, a[half][3].high};
#if PRODUCTS == 3
          const uint32_t low[4] = {a[half][0].low, a[half][1].low, a[half][2].low, a[half][3].low};
          multiply<data_t>(main.of[half][j], high, b0.high, b1.high);
          multiply<data_t>(cross.of[half][j], low, b0.high, b1.high);
          multiply<data_t>(cross.of[half][j], high, b0.low, b1.low);
#else
          multiply<data_t>(sum.of[half][j], high, b0.high, b1.high);
#endif
        }
      }
      ++steps;
#if PRODUCTS == 3
      if (steps % 2 == 0) {
        sum.add(main, 1);
        main.clear();
      }
#endif
      unit += groups;
      while (unit >= here) {
        unit -= here;
        ++tap;
      }
    }
  }
#if PRODUCTS == 3
  sum.add(main, 1);
  sum.add(cross, 1 / LARGER);
  const float lost = LOST;
#else
  const float lost = lost_in(steps);
#endif

  // the sums of this block
  __syncthreads();  // the ring has been read
  float* const sums = (float*)dynamic;
  const int tile_rows = WARP_M * (int)shape.warps_m, size = tile_rows * PITCH;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        float2 v = make_float2(sum.of[half][j][2 * down], sum.of[half][j][2 * down + 1]);
        if (TYPE == 32) {  // the rounding of 16 bits hides it
          v.x += give_back_lost(v.x, lost);
          v.y += give_back_lost(v.y, lost);
        }
        *(float2*)(sums + group * size + (warp_row + 16 * half + 8 * down + lane / 4) * PITCH + 8 * j + lane % 4 * 2) = v;
      }
  __syncthreads();
  constexpr int FOURS = BLOCK_N / 4;
  for (int i = threadIdx.x; i < tile_rows * FOURS; i += THREADS) {
    float* const to = sums + i / FOURS * PITCH + i % FOURS * 4;
    float4 v = *(const float4*)to;
    for (int other = 1; other < groups; ++other) {
      const float4 more = *(const float4*)(to + other * size);
      v.x += more.x;
      v.y += more.y;
      v.z += more.z;
      v.w += more.w;
    }
    *(float4*)to = v;
  }
  cluster_barrier();

  // some rows of the tile, of all blocks
  const int own = tile_rows / CLUSTER;
  for (int i = threadIdx.x; i < own * FOURS; i += THREADS) {
    const int row = rank * own + i / FOURS, column = i % FOURS * 4, channel = of.row + row;
    if (channel >= (int)shape.rows) continue;
    const float4 four = add_of_ranks(shared_address(sums + row * PITCH + column));
    const float all[4] = {four.x, four.y, four.z, four.w};
    const Finish<false> finish{ScaleAndBias(shape, scale, bias, channel)};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int place = tables.place[column + e];
      if (place < 0) continue;
      const long long at = place + channel * shape.y_channel;
      float v[1] = {all[e]};
#if PRODUCTS == 3
      if ((__float_as_uint(v[0]) & 0x7f800000) == 0x7f800000) v[0] = exact(shape, x, w, channel, of.pixel + column + e);
#endif
      v[0] = finish.whole(shape, v[0], 1, has_residual(shape) ? to_float(residual[at]) : -0.f);
      activate(shape, v);
      y[at] = from_float<data_t>(v[0]);
    }
  }
  cluster_barrier();  // shared memory must outlive what other blocks read of it
}
