// pack.cu: the operands of the implicit GEMM kernels: channels last, 16 bits, float32 as two fp16 limbs.
//
//   hi = fp16(x * s),  lo = fp16((x * s - hi) * 2^11): 22 bits of x, where s is a power of two
//
// Images are packed at once with s = 2^GUESS, which holds everything of magnitude 2^-23 to 2^6, and their extremes are noted on
// the way: reading them once more to find the best scale would cost half as much again. settle_images looks at the extremes
// and packs those images anew that did not fit, with the scale that brings their largest magnitude to [2^14, 2^15). The filter
// of an output channel is scaled so in the first place.
// Values 2^(28 + SLACK) below the largest, or more, lose too many bits even so: such an image or channel is flagged with 1, and
// direct_gemm.cu looks for the results that this can be seen in and computes them in plain fp32. That is also what becomes of an
// image that was guessed within 5 bits of the best scale and has smaller values: as gradients behind a batch norm mostly do.
// One that holds Inf or NaN or whose largest lies outside 2^-60 .. 2^60 is flagged with 2: all that depends on it is computed so.
// Images of 16 bits are what they are; where they have flags (FLAGGED: windows, below) these are 2 if there is Inf or NaN.
// SLACK is half the bits of gemm k, what the rounding of a sum of that length may lose anyway; with one limb 2, since its products
// may lose two bits of eleven.
//
// pack           filter_rows blocks (every other one at first): one output channel m of w each, or a part of one that does not fit
//                shared memory, to [m / 64][tap][block of KC channels][limb][m % 64][KC], the rows of KC channels swizzled as in shared
//                memory: 64 of them are one bulk copy. Rows and channels are filled up with zeros; where a stage takes several blocks,
//                one of zeros follows each 64 rows', to fill it up.
//                The other blocks: PIXELS pixels x 8 * CHUNKS channels of one image each, to [limb][image][pixel][channel];
//                a thread reads 8 channels of some pixels, VECTOR neighbours at once, a warp 32 times as many, and turns them to whole rows
//                of channels in shared memory: [limb][pixel][chunk of 8], chunks swizzled so that neither side meets a bank conflict.
//                Channels last input needs no turning, unless it is folded by single channels. Extremes go to parts[image][tile].
//                With FILTER the images are the rows of a filter that is as large as images are (the gradient by a filter is the
//                convolution with dy): one tile of a row each, to the filter's place.
// settle_images  block -> a slice of an image's tiles. Writes scales and flags; packs its tiles again where the guess failed.
// Sampled  gradients, whose magnitude nobody can guess (SAMPLED): every block of an image takes the power of two that brings the largest of
//          256 elements, spread evenly, to [2^11, 2^12). guesses[image] is its exponent.
//
// Folding  where a tensor load can't make the taps of the innermost axes (stride over 8, three channels), or few of the pixels meet any
//          (1x1 with a stride), packing does: packed channel (tap, c) of pixel i is x[c] at i * stride - pad + tap * dilation.
//          `fold_*` taps; 1 where an axis is not folded.
// Windows  few channels: packed channels are those of a pixel of FOLD_R rows; a tensor load takes the pixels that a row of taps meets,
//          side by side as they lie, for one pixel with FILTER_S * WINDOW channels, and the next one's begins a stride further.
// Groups   every group starts at a multiple of packed_group, zeros fill it up.
//
// By hand: nvcc -cubin -arch=sm_80 cu/pack.cu
#ifndef IN
#define IN 32        // elements of x and w: 32 float, 16 half, 17 bfloat16
#define LIMBS 2      // 2; 1 keeps hi alone, or 16-bit elements as they are
#define NHWC 0       // layout of x
#define CHUNKS 8     // 8 channels each, of a block's tile: 1, 2, 4, 8 or 16
#define VECTOR 4     // neighbouring pixels that are read at once, 1, 2 or 4: NCHW, not folded, of planes of a multiple of so many
#define ITEMS 1      // 8 channels of VECTOR pixels each, of a thread
#define SLACK 4
#define CHANNELS 64  // of a group of x
#define KC 64        // channels of a block of the packed filter: 64, 32 or 16
#define TAPS 9       // of the packed filter: tap * FOLDS + folded tap counts through w
#define FITTING 64   // channels of a row of w that shared memory takes at a time; 0: none, its elements are read where they are needed
#define PARTS 1      // of FITTING channels, a block each, of a row of w that is too long for shared memory
#define FILTER_LAST 0  // w's channels are neighbours, its taps lie a row of them apart
#define FLAGGED 1    // extremes are noted, and flags follow: of float, and of 16 bits where a window's rows lie beyond the filter
#define SAMPLED 0    // a guess is made for each image
#define FILTER 0     // x is a filter: its images are rows, its pixels taps
#define FOLDED 0     // taps are folded: so many along t, r and s
#define FOLD_T 1
#define FOLD_R 1
#define FOLD_S 1
#define STEP_W 1     // column w of an image is written if bit (w + FIRST_W) % STEP_W of MET_W is set: no tap meets others
#define FIRST_W 0
#define MET_W 1
#define TOGETHER 0   // so many of a block's 8 * CHUNKS channels are of each tap, the same ones; 0: they are neighbours in the packed image
#define WINDOW 0     // packed channels of a pixel, where those that a tap row meets are loaded as one pixel's
#define SHIFT 0      // rows of FOLD_R before the filter's first one
#define PACKED_R 1   // taps of the packed filter along r
#define FILTER_R 1   // and of w, along r and s
#define FILTER_S 1
#endif
#include "limbs.cuh"

#define TURNED (!NHWC || (FOLDED && CHANNELS % 8))  // a tile passes through shared memory

typedef element<IN> in_t;
typedef element<IN == 17 ? 17 : 16> limb_t;

constexpr int THREADS = 256, PIXELS = VECTOR * ITEMS * THREADS / CHUNKS;
constexpr int FOLDS = FOLD_T * FOLD_R * FOLD_S;
constexpr int ALL_TAPS = WINDOW ? TAPS / PACKED_R * FILTER_R * FILTER_S : TAPS * FOLDS;  // of w
constexpr int CHANNEL_BLOCKS = ((WINDOW ? FILTER_S * WINDOW : CHANNELS * FOLDS) + KC - 1) / KC;  // of KC channels of a packed row
constexpr long long ROW_BLOCKS = (long long)TAPS * CHANNEL_BLOCKS + (KC < 64);  // of 64 packed rows: one of zeros where KC < 64

// Everything that only moves addresses; 64 bits each so that the host can pack it without knowing types.
struct Shape {
  long long filter_rows;                             // blocks of pack that take a filter's rows, or parts of rows: all of them, or none
  long long images, slices;                          // slices of an image, of settle_images
  long long groups, packed_group;                    // channels of a group, packed
  long long d, h, w;                                 // x
  long long x_image, x_group, x_channel, x_pixel;    // elements of x from one to the next
  long long packed_d, packed_h, packed_w;            // pixels of a packed image
  long long stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w;  // of the folded taps
  long long rows_group, blocks_group;                // output channels of a group, and blocks of 64 packed ones
  long long w_group, w_m, w_c;                       // elements of w from one group, m, c to the next
};

// Room in shared memory to turn a tile of an image, or as many channels of a filter's row as fit, whichever a block packs.
struct Turn {
  static constexpr int PIECES = LIMBS * PIXELS * CHUNKS, ROOM = FILTER ? 0 : FITTING * ALL_TAPS + FITTING / 8;
  uint4 pieces[PIECES * 4 > ROOM ? PIECES : (ROOM + 3) / 4];
};
__device__ Turn& turn_room() {
  __shared__ Turn room;
  return room;
}

// The extremes of the whole block, to every thread.
__device__ Extremes over_block(Extremes mine) {
  __shared__ Extremes warps[THREADS / 32];
  mine.over_warp();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  Extremes all = warps[0];
  for (int i = 1; i < THREADS / 32; ++i) all.add(warps[i]);
  return all;
}

// where piece `piece`, of 16 bytes, of row `row` of KC channels of the packed filter lies among the row's, swizzled as in shared memory
__device__ int swizzled_piece(int row, int piece) { return piece ^ (KC == 64 ? row % 8 : KC == 32 ? row / 2 % 4 : row / 4 % 2); }

#if FOLDED
// f of a chunk's number as a constant, for the first 8; of the others of -1
template <int n, class F> __device__ void with_chunk(int chunk, const F& f) {
  if constexpr (n == 8 || n * 8 >= CHANNELS * FOLDS) {
    f(Constant<-1>());
  } else if (chunk == n) {
    f(Constant<n>());
  } else {
    with_chunk<n + 1>(chunk, f);
  }
}
#endif

// Elements of x, as a word, or zeros: a condition in C would be one for each element. They are not met again, unless in other taps: the
// L2 cache had better keep what is written, which the products read next. Volatile, so that none comes before AFTER_LAST_LAUNCH.
#if FOLDED
#define READ_POLICY "evict_normal"
#else
#define READ_POLICY "evict_first"
#endif
DEVICE uint64_t read_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::" READ_POLICY ".b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void load_word(uint16_t& v, const void* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.nc.L2::cache_hint.b16 %0, [%1], %3;\n}"
      : "=&h"(v)
      : "l"(from), "r"((int)there), "l"(read_policy()));
}
DEVICE void load_word(uint32_t& v, const void* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.L2::cache_hint.b32 %0, [%1], %3;\n}"
      : "=&r"(v)
      : "l"(from), "r"((int)there), "l"(read_policy()));
}
DEVICE void load_word(uint2& v, const void* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n@p ld.global.nc.L2::cache_hint.v2.b32 {%0, %1}, [%2], %4;\n}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(from), "r"((int)there), "l"(read_policy()));
}
DEVICE void load_word(uint4& v, const void* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %6;\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"((int)there), "l"(read_policy()));
}

typedef typename WordOf<VECTOR * sizeof(in_t)>::type word_t;  // VECTOR neighbours of a channel
DEVICE in_t element_of(const word_t& v, int i) { return ((const in_t*)&v)[i]; }
#if IN != 32
// element i of two channels, side by side
DEVICE uint32_t pair_of(const word_t& a, const word_t& b, int i) {
  if (VECTOR == 1) return *(const uint16_t*)&a | (uint32_t) * (const uint16_t*)&b << 16;
  return __byte_perm(((const uint32_t*)&a)[i / 2], ((const uint32_t*)&b)[i / 2], i % 2 ? 0x7632 : 0x5410);
}
#endif

// 8 channels, so far apart.
DEVICE void read_channels(word_t (&v)[8], const in_t* __restrict__ x, long long apart, bool there) {
#if NHWC && CHANNELS % 8 == 0
  uint4 raw[sizeof(in_t) / 2];  // they are neighbours
#pragma unroll
  for (int i = 0; i < (int)sizeof(in_t) / 2; ++i) load_word(raw[i], (const uint4*)x + i, there);
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = ((const word_t*)raw)[e];
#else
#pragma unroll
  for (int e = 0; e < 8; ++e) load_word(v[e], x + e * apart, there);
#endif
}

// The 8 channels of `chunk` of VECTOR pixels of a packed image; zeros where there is nothing.
__device__ void read(word_t (&v)[8], const in_t* __restrict__ x, const Shape& shape, int pixel, int chunk, bool inner) {
  const int g = 8 * chunk / (int)shape.packed_group, j0 = 8 * chunk % (int)shape.packed_group;  // packed_group is a multiple of 8
  const long long from_pixel = NHWC ? shape.x_pixel : 1, from_channel = NHWC ? 1 : shape.x_channel;
  x += g * shape.x_group;
#if FOLDED
  const int q = pixel % (int)shape.packed_w, p = pixel / (int)shape.packed_w % (int)shape.packed_h, o = pixel / (int)(shape.packed_w * shape.packed_h);
  const int w0 = q * (int)shape.stride_w - (int)shape.pad_w, h0 = p * (int)shape.stride_h - (int)shape.pad_h, d0 = o * (int)shape.stride_d - (int)shape.pad_d;
  // where in x a tap lies, from a channel's first pixel on; -1 outside
  auto place = [&](int tap) {
    const int at_w = w0 + tap % FOLD_S * (int)shape.dilation_w, at_h = h0 + tap / FOLD_S % FOLD_R * (int)shape.dilation_h;
    const int at_d = d0 + tap / (FOLD_S * FOLD_R) * (int)shape.dilation_d;
    const bool ok = inner && tap < FOLDS && (unsigned)at_w < (unsigned)shape.w && (unsigned)at_h < (unsigned)shape.h && (unsigned)at_d < (unsigned)shape.d;
    return ok ? (at_d * (int)shape.h + at_h) * (int)shape.w + at_w : -1;
  };
#if CHANNELS % 8 == 0
  // all of one tap
  const int at = place(j0 / CHANNELS);
  read_channels(v, x + max(at, 0) * from_pixel + j0 % CHANNELS * from_channel, from_channel, at >= 0);
#else
  // which tap and channel is which element is known to the compiler once it knows the chunk, which is one for all lanes of a warp
  with_chunk<0>(j0 / 8, [&](auto known) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int j = (decltype(known)::value >= 0 ? 8 * decltype(known)::value : j0) + e, at = place(j / CHANNELS);
      load_word(v[e], x + (at * from_pixel + j % CHANNELS * from_channel), at >= 0);
    }
  });
#endif
#else
  x += pixel * from_pixel + j0 * from_channel;
#if CHANNELS % 8 == 0
  read_channels(v, x, from_channel, inner && j0 < CHANNELS);
#else
#pragma unroll
  for (int e = 0; e < 8; ++e) load_word(v[e], x + e * from_channel, inner && j0 + e < CHANNELS);
#endif
#endif
}

// The image, or row of the filter, that is packed as number `line`; rows of a group are filled up to blocks of 64: -1 is none. And back.
__device__ int row_of(const Shape& shape, int line) {
  if (!FILTER) return line;
  const int padded = (int)shape.blocks_group * 64, m = line % padded;
  return m < (int)shape.rows_group ? line / padded * (int)shape.rows_group + m : -1;
}
__device__ long long line_of(const Shape& shape, long long row) {
  return FILTER ? (int)row / (int)shape.rows_group * ((int)shape.blocks_group * 64) + (int)row % (int)shape.rows_group : row;
}

// One tile of an image, or, FILTER, of a row of the packed filter, scaled; returns the extremes of what this thread read. Its scale is
// asked for when all is on its way.
template <class Scale>
__device__ Extremes pack_tile(const in_t* __restrict__ x, uint4* __restrict__ packed, const Shape& shape, long long image, int tile, const Scale& scale_of) {
  const int pixels = (int)(shape.packed_d * shape.packed_h * shape.packed_w), chunks = (int)(shape.groups * shape.packed_group / 8);
  constexpr int OF_TAP = CHANNELS / 8;
  const int tiles_c = TOGETHER ? (OF_TAP + TOGETHER - 1) / max(TOGETHER, 1) : (chunks + CHUNKS - 1) / CHUNKS;
  const int first = tile % tiles_c * (TOGETHER ? TOGETHER : CHUNKS), pixel0 = tile / tiles_c * PIXELS;
  // the packed chunk that is number `at` of the tile, `chunks` or more where there is none
  auto chunk_of = [&](int at) {
    const int tap = at / max(TOGETHER, 1), c = first + at % max(TOGETHER, 1);
    return !TOGETHER ? first + at : tap < FOLDS && c < OF_TAP ? tap * OF_TAP + c : chunks;
  };
#if FILTER
  // pixels are taps and images rows, filled up to blocks of 64 with zeros; behind the taps the block of zeros
  constexpr int PIECES = KC / 8;
  const int from = row_of(shape, (int)image);
  const bool real = from >= 0;
  x += max(from, 0) * shape.x_image;
  const int row = (int)(image % 64), whole = pixels + (KC < 64);
  packed += image / 64 * (ROW_BLOCKS * (LIMBS * 64 * PIECES)) + row * PIECES;
  auto wanted = [&](int pixel, int chunk) { return pixel < whole && chunk < (pixel < pixels ? chunks : PIECES); };
  auto store = [&](int pixel, int chunk, int limb, uint4 value) {
    const long long block = (long long)pixel * CHANNEL_BLOCKS + chunk / PIECES;
    packed[(block * LIMBS + limb) * (64 * PIECES) + swizzled_piece(row, chunk % PIECES)] = value;
  };
#else
  constexpr bool real = true;
  x += image * shape.x_image;
  const long long limb_size = shape.images * pixels * (long long)chunks;
  packed += image * pixels * (long long)chunks;
  auto met = [&](int pixel) { return STEP_W == 1 || MET_W >> (pixel % (int)shape.packed_w + FIRST_W) % STEP_W & 1; };
  auto wanted = [&](int pixel, int chunk) { return pixel < pixels && chunk < chunks && met(pixel); };
  auto store = [&](int pixel, int chunk, int limb, uint4 value) { packed[limb * limb_size + (long long)pixel * chunks + chunk] = value; };
#endif
  // a thread's places in the tile. Channels last: neighbours take neighbouring chunks, so that they read and write
  // neighbouring bytes; else neighbouring pixels, which are what lies side by side in x
  auto place = [&](int i, int& inside, int& at) {
    const int item = threadIdx.x + i * THREADS;
    inside = TURNED ? item % (PIXELS / VECTOR) * VECTOR : item / CHUNKS;
    at = TURNED ? item / (PIXELS / VECTOR) : item % CHUNKS;
  };
  word_t v[ITEMS][8];  // all loads are under way before the first value is used
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int inside, at;
    place(i, inside, at);
    read(v[i], x, shape, pixel0 + inside, chunk_of(at), real && pixel0 + inside < pixels && chunk_of(at) < chunks);
  }
  [[maybe_unused]] const float scale = scale_of();
  Extremes found = {0, ~0u};
#if TURNED
  auto& turned = *(uint4(*)[LIMBS][PIXELS * CHUNKS])turn_room().pieces;
  auto turned_place = [](int inside, int at) { return inside * CHUNKS + (at ^ (inside / VECTOR % CHUNKS)); };
#endif
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int inside, at;
    place(i, inside, at);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      uint32_t limbs[LIMBS][4];
#if IN == 32 || FLAGGED
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = to_float(element_of(v[i][e], j));
      if (FLAGGED) found.add(values);
#endif
#if IN == 32
      split<limb_t>(values, scale, limbs);
#else
#pragma unroll
      for (int e = 0; e < 8; e += 2) limbs[0][e / 2] = pair_of(v[i][e], v[i][e + 1], j);
#endif
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb) {
#if !TURNED
        if (wanted(pixel0 + inside, chunk_of(at))) store(pixel0 + inside, chunk_of(at), limb, piece_of(limbs[limb]));
#else
        turned[limb][turned_place(inside + j, at)] = piece_of(limbs[limb]);
#endif
      }
    }
  }
#if TURNED
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < PIXELS * CHUNKS; i += THREADS) {
    const int inside = i / CHUNKS, at = i % CHUNKS;
    if (wanted(pixel0 + inside, chunk_of(at))) {
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb) store(pixel0 + inside, chunk_of(at), limb, turned[limb][turned_place(inside, at)]);
    }
  }
#endif
  return found;
}

// How many of `count` loads of a block a thread has under way: up to `most`, as many in each round of them.
__host__ __device__ constexpr int batch(int count, int most) {
  const int each = (count + THREADS - 1) / THREADS, rounds = (each + most - 1) / most;
  return rounds ? (each + rounds - 1) / rounds : 1;
}

// One row of a block of 64. scales[m] undoes the scale. Taps are neighbours in w, channels in the packed filter: turned in shared
// memory, where a whole row mostly fits, so that it is read once; else a block takes as many channels as fit. All sizes are known to the
// compiler: divisions by them took longer than the bytes.
__device__ void pack_filter(const in_t* __restrict__ w, uint4* __restrict__ packed, float* __restrict__ scales, int* __restrict__ flags, const Shape& shape,
                            int block) {
  constexpr int WIDE = 16 / sizeof(in_t);  // elements of 16 bytes
  constexpr bool whole = FITTING == CHANNELS;
  float* const turn = (float*)turn_room().pieces;
  const int part = block % PARTS;
  block /= PARTS;
  const int padded = (int)shape.blocks_group * 64, g = block / padded, row = block % padded;
  const bool real = row < shape.rows_group;
  w += g * shape.w_group + row * shape.w_m;
  // where element `tap` of channel c lies in shared memory: a word more every 8 channels, so that 8 channels' reads meet different banks
  auto place = [&](int c, int tap) { return c * ALL_TAPS + tap + c / 8; };
  // and in memory
  auto source = [&](int c, int tap) -> long long { return FILTER_LAST ? tap * CHANNELS + c : c * shape.w_c + tap; };
  // channels from c0 on to shared memory, and their extremes
  auto fetch = [&](int c0) {
    Extremes found = {0, ~0u};
    const int some = real ? max(min(FITTING, CHANNELS - c0), 0) : 0, count = FILTER_LAST && some ? FITTING * ALL_TAPS : some * ALL_TAPS;
    // element i of those, in the order of memory
    auto channel = [&](int i) { return FILTER_LAST ? i % max(FITTING, 1) : i / ALL_TAPS; };
    auto tap = [&](int i) { return FILTER_LAST ? i / max(FITTING, 1) : i % ALL_TAPS; };
    auto take = [&](int i, float v) {
      turn[FILTER_LAST ? place(channel(i), tap(i)) : i + i / ALL_TAPS / 8] = v;
      found.add(v, v);
    };
    const in_t* const from = w + source(c0, 0);
    // contiguous, and so aligned that 16 bytes are loaded at once
    const bool row_by_row = (FILTER_LAST ? whole && CHANNELS % WIDE == 0 : shape.w_c == ALL_TAPS) && (size_t)from % 16 == 0;
    const int vectors = row_by_row ? count / WIDE : 0;
    constexpr int VECTORS = batch(FITTING * ALL_TAPS / WIDE, 6), SINGLE = batch(FITTING * ALL_TAPS, 12);  // loads of a thread under way
    for (int first = threadIdx.x; first < vectors; first += VECTORS * THREADS) {
      uint4 raw[VECTORS];
#pragma unroll
      for (int u = 0; u < VECTORS; ++u)
        if (first + u * THREADS < vectors) raw[u] = ((const uint4*)from)[first + u * THREADS];
#pragma unroll
      for (int u = 0; u < VECTORS; ++u)
        if (first + u * THREADS < vectors) {
#pragma unroll
          for (int e = 0; e < WIDE; ++e) take((first + u * THREADS) * WIDE + e, to_float(((const in_t*)(raw + u))[e]));
        }
    }
    for (int first = vectors * WIDE + threadIdx.x; first < count; first += SINGLE * THREADS) {
      in_t raw[SINGLE];
#pragma unroll
      for (int u = 0; u < SINGLE; ++u) {
        const int i = first + u * THREADS;
        if (i < count && channel(i) < some) raw[u] = from[source(channel(i), tap(i))];
      }
#pragma unroll
      for (int u = 0; u < SINGLE; ++u) {
        const int i = first + u * THREADS;
        if (i < count && channel(i) < some) take(i, to_float(raw[u]));
      }
    }
    return found;
  };
  // the extremes of elements of the row that are not kept, channel by channel
  auto look = [&](Extremes& found, int first, int last) {
    if (IN != 32 || !real) return;
    const bool row_by_row = (FILTER_LAST || shape.w_c == ALL_TAPS) && first % WIDE == 0 && (size_t)w % 16 == 0;
    const int vectors = row_by_row ? last / WIDE : first / WIDE;
#pragma unroll 8
    for (int i = first / WIDE + threadIdx.x; i < vectors; i += THREADS) {
      const float4 v = ((const float4*)w)[i];
      found.add(v.x, v.y);
      found.add(v.z, v.w);
    }
#pragma unroll 8
    for (int i = (row_by_row ? vectors * WIDE : first) + threadIdx.x; i < last; i += THREADS) {
      const float v = to_float(w[FILTER_LAST ? i : source(i / ALL_TAPS, i % ALL_TAPS)]);
      found.add(v, v);
    }
  };
  constexpr int ALL = CHANNELS * ALL_TAPS;
  constexpr bool parts = !FOLDED && FITTING > 0 && !whole;
  const int c0 = part * FITTING;
  Extremes found = {0, ~0u};
  if (whole || parts) found = fetch(c0);
  if (!whole) {
    const bool around = parts && !FILTER_LAST;  // of what this block keeps; channels that are last are not kept side by side
    look(found, 0, around ? min(c0 * ALL_TAPS, ALL) : ALL);
    if (around) look(found, min((c0 + FITTING) * ALL_TAPS, ALL), ALL);
  }
  float scale = 1;
#if IN == 32
  found = over_block(found);
  if (real) {
    scale = found.scale();
    if (threadIdx.x == 0) {
      scales[g * shape.rows_group + row] = 1 / scale;
      flags[g * shape.rows_group + row] = found.flag();
    }
  }
#else
#if FLAGGED
  if (real && threadIdx.x == 0) {
    scales[g * shape.rows_group + row] = 1;
    flags[g * shape.rows_group + row] = 0;
  }
#endif
  __syncthreads();
#endif
  // 16 bytes, 8 channels, at a time: a piece of a row of KC channels
  constexpr int PIECES = KC / 8, ROW_PIECES = CHANNEL_BLOCKS * PIECES;
  const int r = row % 64;
  packed += (block / 64) * (ROW_BLOCKS * (LIMBS * 64 * PIECES));
  for (int i = TAPS * CHANNEL_BLOCKS * LIMBS * PIECES + threadIdx.x; i < ROW_BLOCKS * LIMBS * PIECES; i += THREADS)
    packed[i / PIECES * (64 * PIECES) + r * PIECES + i % PIECES] = make_uint4(0, 0, 0, 0);
  // pieces from `first` on; value(c, tap of w)
  auto write = [&](int first, int pieces, auto value) {
    for (int i = threadIdx.x; i < TAPS * pieces; i += THREADS) {
      const int tap = i / pieces, piece = first + i % pieces;
      float v[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
#if WINDOW
        const int j = piece * 8 + e, s = j / WINDOW, fold = j % WINDOW / CHANNELS, c = j % WINDOW % CHANNELS;
        const int r = tap % PACKED_R * FOLD_R + fold - SHIFT, from = (tap / PACKED_R * FILTER_R + r) * FILTER_S + s;
        const bool there = fold < FOLD_R && r >= 0 && r < FILTER_R && s < FILTER_S;
#else
        const int j = piece * 8 + e, fold = FOLDED ? j / CHANNELS : 0, c = FOLDED ? j % CHANNELS : j, from = tap * FOLDS + fold;
        const bool there = fold < FOLDS && c < CHANNELS;
#endif
        v[e] = real && there ? value(c, from) : 0;
      }
      uint32_t limbs[LIMBS][4];
      split<limb_t>(v, scale, limbs);
      uint4* const to = packed + (tap * CHANNEL_BLOCKS + piece / PIECES) * (LIMBS * 64 * PIECES) + r * PIECES + swizzled_piece(r, piece % PIECES);
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb) to[limb * 64 * PIECES] = piece_of(limbs[limb]);
    }
  };
  if constexpr (whole) {
    write(0, ROW_PIECES, [&](int c, int tap) { return turn[place(c, tap)]; });
  } else if constexpr (!parts) {
    write(0, ROW_PIECES, [&](int c, int tap) { return to_float(w[source(c, tap)]); });
  } else {
    write(c0 / 8, min(FITTING / 8, ROW_PIECES - c0 / 8), [&](int c, int tap) { return turn[place(c - c0, tap)]; });
  }
}

#if SAMPLED
// An element of an image for each thread, spread evenly over channels and pixels.
__device__ float sample(const in_t* __restrict__ x, const Shape& shape, bool there) {
  const unsigned plane = (unsigned)(shape.d * shape.h * shape.w), c = threadIdx.x * ((unsigned)shape.groups * CHANNELS) / THREADS;
  const unsigned pixel = __umulhi(threadIdx.x * 0x9e3779b9u, plane);  // multiples of the golden ratio
  uint32_t bits;
  load_word(bits, x + (c / CHANNELS * shape.x_group + c % CHANNELS * shape.x_channel + pixel * shape.x_pixel), there);
  return __uint_as_float(bits);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, FOLDED || PARTS > 1 ? 3 : 4)
    pack(const in_t* __restrict__ x, const in_t* __restrict__ w, uint4* __restrict__ x_packed, Extremes* __restrict__ parts, int* __restrict__ guesses,
         uint4* __restrict__ w_packed, float* __restrict__ w_scales, int* __restrict__ w_flags, const Shape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  // a filter's row is a chain of waits, images are a stream of bytes: by turns, as long as there are both
  const int filter_rows = (int)shape.filter_rows;
  const int blocks = gridDim.x - filter_rows;
  const bool turns = filter_rows <= blocks && blockIdx.x < 2 * filter_rows;
  const bool filter = turns ? blockIdx.x % 2 == 0 : filter_rows > blocks && blockIdx.x < filter_rows;
  if (!FILTER && filter) {
    pack_filter(w, w_packed, w_scales, w_flags, shape, turns ? blockIdx.x / 2 : blockIdx.x);
    return;
  }
  const int block = turns ? blockIdx.x / 2 : blockIdx.x - filter_rows;
  const int rows = FILTER ? (int)(shape.images / shape.rows_group * shape.blocks_group) * 64 : (int)shape.images;
  // neighbouring rows of a filter side by side: they are neighbours in the packed one
  const int line = FILTER ? block % rows : block / (blocks / rows), tile = FILTER ? block / rows : block % (blocks / rows);
  const int image = row_of(shape, line);
  const bool real = image >= 0;
#if SAMPLED
  const float sampled = sample(x + max(image, 0) * shape.x_image, shape, real);
#endif
  const Extremes found = pack_tile(x, x_packed, shape, line, tile, [&] {
    int guess = GUESS;
#if SAMPLED
    Extremes some = {0, ~0u};
    some.add(sampled, sampled);
    guess = over_block(some).guess();
    __syncthreads();  // its room is used again
    if (tile == 0 && threadIdx.x == 0 && real) guesses[image] = guess;
#endif
    return IN == 32 && real ? power_of_two(guess) : 1;
  });
#if FLAGGED
  const Extremes all = over_block(found);
  if (threadIdx.x == 0 && real) parts[image * (blocks / rows) + tile] = all;
#endif
}

#if FLAGGED
// scales[image] undoes the scale.
extern "C" __global__ void __launch_bounds__(THREADS) settle_images(const in_t* __restrict__ x, uint4* __restrict__ packed,
                                                                    const Extremes* __restrict__ parts, const int* __restrict__ guesses,
                                                                    float* __restrict__ scales, int* __restrict__ flags, const long long tiles,
                                                                    const Shape shape) {
  AFTER_LAST_LAUNCH
  const long long image = blockIdx.x / shape.slices, slice = blockIdx.x % shape.slices;
  Extremes found = {0, ~0u};
#pragma unroll 4
  for (long long i = threadIdx.x; i < tiles; i += THREADS) found.add(parts[image * tiles + i]);
  found = over_block(found);
  const int guess = IN != 32 ? 0 : SAMPLED ? guesses[image] : GUESS;
  const bool guessed = IN != 32 || found.fits(guess);
  const float scale = guessed ? power_of_two(guess) : found.scale();
  if (slice == 0 && threadIdx.x == 0) {
    scales[image] = 1 / scale;
    flags[image] = IN != 32 ? 2 * (found.largest >= INFINITE) : guessed ? found.flag(guess) : found.flag();
  }
  if (guessed || !found.usable()) return;
  for (long long tile = tiles * slice / shape.slices; tile < tiles * (slice + 1) / shape.slices; ++tile) {
    __syncthreads();  // the last tile has left shared memory
    pack_tile(x, packed, shape, line_of(shape, image), (int)tile, [&] { return scale; });
  }
}
#endif
