// few_pixels.cu: fprop and dgrad with few pixels and many channels, NCHW arrays as they lie, on tensor cores that warps feed themselves.
//
//   y[n,k,p,q] = sum over c, r and s of x[n, c, p * stride_h + low_h + r * step_h, q * stride_w + low_w + s * step_w] * w[k,c,tap(r,s)], and finish.cuh
//   gemm m: output channel | gemm n: pixel (n,p,q) of the batch | gemm k: (c, tap), in steps of a unit of channels and a tap
//
// The filter is most of the traffic, so each block reads its part once. What its pixels read of x lies in shared memory, from where every tap reads it.
// Nothing is packed, and there is one launch.
//
// Mapping  block: a tile of 32 * warps_m channels and BLOCK_N pixels. CLUSTER blocks share a tile; each sums its part of the channels, units of 32 bytes.
//          warp: 32 channels, all pixels; the 8 / warps_m warps with the same channels take steps in turn.
// Shared   a ring of STAGES slots, of stage_units units of channels each.
//          w: in lines of neighbours as in memory: in fprop a line is a channel of y, in dgrad a channel of x. row_step and channel_step are chosen
//          so that a warp's loads use all banks once.
//          x: [unit][word % 4][position][word / 4], where a word is one 32-bit channel or two 16-bit ones. Positions are the rows and columns of an image
//          that the tile's taps read, with the zeros around them, image after image. `flat`: with one tap they are the tile's pixels.
//          When all is multiplied, the sums of all warps take the ring's place, [warps with the same channels][channel][pixel].
// Sums     PRODUCTS = 3: x and w are split into two TF32 numbers each, and three of their products are added. After two steps the main product's sum is
//          added to a float32 sum, because the tensor core truncates its own. Results that are not finite are computed once more, in plain float32.
//          The order: a warp's steps; the warps with the same channels; the blocks of the cluster.
// Phases   dgrad with a stride is a set of stride phases, each a stride-1 convolution with some of the taps. A launch takes up to four.
//
// By hand: nvcc -cubin -arch=sm_90 -I cu cu/mma/few_pixels.cu
#ifndef TYPE
#define TYPE 32        // of the arrays: 32 float, 16 half, 17 bfloat16
#define PRODUCTS 3     // of TF32 numbers for one of float32; or 1
#define BLOCK_N 56     // pixels of a tile
#define CLUSTER 8      // blocks that share a tile
#define PHASES 1       // of the launch: 1, or up to 4
#endif
#define MOMENTS 0
#include "mma/async_copy.cuh"
#include "core/cluster.cuh"
#include "core/finish.cuh"
#include "mma/fragments.cuh"
#include "core/tf32.cuh"
#include "core/truncation.cuh"

typedef element<TYPE> data_t;
#if TYPE == 32
typedef uint32_t data_bits;
#else
typedef uint16_t data_bits;
#endif

constexpr int WARPS = 8, THREADS = 32 * WARPS, WARP_M = 32, EIGHTS = BLOCK_N / 8, STAGES = 4, MOST_STEPS = 128;
constexpr bool AHEAD = BLOCK_N < 56;  // a step's operands are loaded beside the products before, if registers hold them
constexpr int NOWHERE = -2;  // a position outside x
constexpr int SIZE = sizeof(data_t), WORD = 4 / SIZE, UNIT = 8 * WORD, VECTOR = 16 / SIZE;  // channels of a word and of a unit; elements of 16 bytes
constexpr int PITCH = (BLOCK_N + 23) / 32 * 32 + 8;                                         // floats of a row of sums
static_assert(PRODUCTS == 1 || TYPE == 32, "three products are for float32");

// A phase of the launch. by_n is the divisor n, prepared (division.cuh).
struct FewPixelsPhase {
  long long tiles, tiles_m, by_tiles_m;                        // all tiles; those along channels
  long long warps_m, by_warps_m;
  long long rows, channels;                                    // channels of y, and of x
  long long units, part, stage_units;                          // units of channels: all, of one of CLUSTER parts, of a stage
  long long gradient;
  long long pieces, line_bytes, line_step;                     // 16-byte pieces of a line; from one line to the next: bytes in shared memory, elements in memory
  long long line_threads, by_line_threads, lines_at_once;      // threads that copy a line
  long long row_step, channel_step;                            // elements in shared memory
  long long w_taps;                                            // taps of the filter
  long long steps;                                             // steps of a stage
  long long taps, by_taps, taps_s, by_taps_s;                  // taps of the phase
  long long tap_base, tap_step_r, tap_step_s, step_h, step_w;  // steps from tap to tap: in w; in x
  long long pixels, images, plane, by_plane, q, by_q;          // pixels of the phase; images; pixels of an image and of a row
  long long stride_h, stride_w, low_h, low_w;
  long long h, w, x_image, x_channel;
  long long flat, positions, chunks;                           // positions: all, and 32s of them
  long long slot, by_slot, width, by_width, pitch;             // positions of an image, of a row; from one pair of words to the next
  long long ring_at, slot_bytes, x_at;                         // bytes of shared memory: before the ring; of a slot; before x in a slot
  long long y_image, y_channel, out_base, out_h, out_w;
  long long has_bias, has_scale, has_residual, activation, slope;
};

struct Shapes {
  FewPixelsPhase of[PHASES];
};

struct Tables {
  int2 step[MOST_STEPS + 2 * WARPS];  // for each step of a stage, a unit's taps side by side: offsets in a slot of its part of w and of x; some more for loads ahead
  int start[BLOCK_N];   // of a pixel: the position that its first tap reads
  int place[BLOCK_N];   // of a pixel: its offset in y, or -1
};

// A tile's first channel and pixel, and that pixel's image and row.
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

// The offset of a position in x; -1 where there is a zero.
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
  for (int i = threadIdx.x; i < (int)shape.chunks * 32; i += THREADS) from[i] = i < (int)shape.positions ? place_in_x(shape, of, i) : NOWHERE;
  for (int i = THREADS - 1 - threadIdx.x; i < BLOCK_N; i += THREADS) {  // other warps
    const bool there = of.pixel + i < (int)shape.pixels;
    const Pixel at(shape, there ? of.pixel + i : of.pixel);
    const int slot = at.image - of.image, row = (at.p - (slot == 0 ? of.first_p : 0)) * (int)shape.stride_h;
    tables.start[i] = shape.flat ? i : slot * (int)shape.slot + row * (int)shape.width + at.q * (int)shape.stride_w;
    tables.place[i] = there ? at.image * (int)shape.y_image + (int)(shape.out_base + at.p * shape.out_h + at.q * shape.out_w) : -1;
  }
  for (int i = (threadIdx.x + THREADS / 2) % THREADS; i < (int)shape.steps + 2 * WARPS; i += THREADS) {
    const Divided of_unit(min(i, max((int)shape.steps - 1, 0)), shape.taps, shape.by_taps), of_row(of_unit.rest, shape.taps_s, shape.by_taps_s);
    const int unit = of_unit.quotient, r = of_row.quotient, s = of_row.rest;
    const int tap = (int)shape.tap_base + r * (int)shape.tap_step_r + s * (int)shape.tap_step_s;
    tables.step[i].x = (unit * UNIT * (int)shape.channel_step + tap) * SIZE;
    tables.step[i].y = (int)shape.x_at + (unit * 4 * (int)shape.pitch + r * (int)shape.step_h * (int)shape.width + s * (int)shape.step_w) * 8;
  }
}

// ---- loads

// Loads a stage of the filter, from channel `first` to `end`, the end of the block's channels. Neighbouring threads share a line.
DEVICE void fetch_w(const FewPixelsPhase& shape, const Tile& of, const data_t* w, uint32_t slot, int first, int end) {
  const int taps = (int)shape.w_taps, step = (int)shape.line_step, pieces = (int)shape.pieces, line_bytes = (int)shape.line_bytes;
  const int rows = min(WARP_M * (int)shape.warps_m, (int)shape.rows - of.row), channels = min((int)shape.stage_units * UNIT, end - first);
  const int lines = shape.gradient ? channels : rows, all = shape.gradient ? (int)shape.stage_units * UNIT : WARP_M * (int)shape.warps_m;
  const int there = (shape.gradient ? rows : channels) * taps / VECTOR;  // real pieces of a line
  const data_t* const begin = w + (shape.gradient ? first * step + of.row * taps : of.row * step + first * taps);
  const int each = (int)shape.line_threads;
  const Divided own(threadIdx.x, each, shape.by_line_threads);
  for (int line = own.quotient; line < all; line += (int)shape.lines_at_once) {
    const bool real = line < lines;
    const data_t* from = begin + (real ? line * step : 0) + own.rest * VECTOR;
    uint32_t to = slot + line * line_bytes + own.rest * 16;
#pragma unroll 4
    for (int piece = own.rest; piece < pieces; piece += each) {
      copy_or_zero<16>(to, from, real && piece < there);
      from += each * VECTOR;
      to += each * 16;
    }
  }
}

[[maybe_unused]] DEVICE void store_shared(uint32_t at, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

// Loads what the tile reads of x: `units` units of channels from channel `first` on. A warp has a word of each unit, a lane every 32nd position.
DEVICE void fetch_x(const FewPixelsPhase& shape, const data_t* x, uint32_t slot, const int* from, int first, int units) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = (int)shape.x_channel, channels = (int)shape.channels, chunks = (int)shape.chunks;
  static_assert(WARPS == 8, "words of a unit");
  from += lane;
  slot += (warp % 4 * (int)shape.pitch + lane) * 8 + warp / 4 * 4;
  const int begin = first + warp * WORD, next_unit = 32 * (int)shape.pitch;
#if TYPE == 32
  const int real = (channels - begin + UNIT - 1) / UNIT;  // units with a real channel
#pragma unroll 2
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int place = from[chunk * 32], there = place >= 0 ? real : 0;
    const data_t* source = x + (place >= 0 ? place + begin * channel : 0);
    uint32_t to = slot + chunk * 256;
    if (place == NOWHERE) continue;
#pragma unroll 4
    for (int unit = 0; unit < units; ++unit) {
      copy_or_zero<4>(to, source, unit < there);
      source += UNIT * channel;
      to += next_unit;
    }
  }
#else
  constexpr int AT_ONCE = 8;  // loads under way at once
  int c = begin, chunk = 0;
  for (int unit = 0; unit < units;) {
    int place[AT_ONCE], channel_of[AT_ONCE];
    uint32_t to[AT_ONCE], found[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      place[i] = unit < units ? from[chunk * 32] : NOWHERE;
      channel_of[i] = c;
      to[i] = slot + chunk * 256;
      const bool next = ++chunk == chunks;
      chunk = next ? 0 : chunk;
      unit += next;
      c += next ? UNIT : 0;
      slot += next ? next_unit : 0;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool some = place[i] >= 0 && channel_of[i] < channels;
      const data_t* const source = x + (some ? place[i] + channel_of[i] * channel : 0);
      const uint32_t low = some ? source->bits : 0, high = some && channel_of[i] + 1 < channels ? source[channel].bits : 0;
      found[i] = low | high << 16;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (place[i] != NOWHERE) store_shared(to[i], found[i]);
  }
#endif
}

// ---- products

[[maybe_unused]] constexpr int LARGER = 4096;  // tf32.cuh; results that are not finite are computed once more
// A number as factors: for three products as two TF32 numbers.
DEVICE Tf32Pair pair_of(uint32_t word) {
#if PRODUCTS == 3
  return tf32_pair<LARGER>(__uint_as_float(word), rounded_tf32(word));
#elif TYPE == 32
  return {to_tf32(__uint_as_float(word)), 0};
#else
  return {word, 0};
#endif
}

DEVICE void load_shared(uint32_t& v, uint32_t at) { asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at)); }
DEVICE void load_shared(uint16_t& v, uint32_t at) { asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(at)); }
DEVICE void load_shared(uint32_t& v, uint32_t& next, uint32_t at) { asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v), "=r"(next) : "r"(at)); }

// A lane's operands of w and of x for a step, as they lie.
struct Operands {
  data_bits w[2][4][WORD];
  uint32_t x[EIGHTS][2];
  // w_at, x_at: the lane's first words; row, channel: bytes from one row and one channel of w to the next
  DEVICE void load(uint32_t w_at, uint32_t x_at, int row, int channel, const int (&start)[EIGHTS]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int i = 0; i < WORD; ++i) load_shared(w[half][e][i], w_at + (2 * half + e % 2) * 8 * row + (e / 2 * 4 * WORD + i) * channel);
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) load_shared(x[j][0], x[j][1], x_at + start[j]);
  }
  DEVICE Tf32Pair factor_of_w(int half, int e) const {
#if TYPE == 32
    return pair_of(w[half][e][0]);
#else
    return pair_of(w[half][e][0] | (uint32_t)w[half][e][1] << 16);
#endif
  }
};

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

// A warp's sums; for three products the float32 sum, and the tensor core's own sums of the main and of the other products.
struct Totals {
  Sums sum;
#if PRODUCTS == 3
  Sums main, cross;
#endif
  int steps = 0;
  DEVICE Totals() {
    sum.clear();
#if PRODUCTS == 3
    main.clear();
    cross.clear();
#endif
  }
  DEVICE void multiply_step(const Operands& of) {
    Tf32Pair a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e) a[half][e] = of.factor_of_w(half, e);
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
      const Tf32Pair b0 = pair_of(of.x[j][0]), b1 = pair_of(of.x[j][1]);
      const uint32_t high[2][4] = {{a[0][0].high, a[0][1].high, a[0][2].high, a[0][3].high}, {a[1][0].high, a[1][1].high, a[1][2].high, a[1][3].high}};
#if PRODUCTS == 3
      const uint32_t low[2][4] = {{a[0][0].low, a[0][1].low, a[0][2].low, a[0][3].low}, {a[1][0].low, a[1][1].low, a[1][2].low, a[1][3].low}};
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply<data_t>(cross.of[half][j], low[half], b0.high, b1.high);
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply<data_t>(main.of[half][j], high[half], b0.high, b1.high);
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply<data_t>(cross.of[half][j], high[half], b0.low, b1.low);
#else
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply<data_t>(sum.of[half][j], high[half], b0.high, b1.high);
#endif
    }
    ++steps;
#if PRODUCTS == 3
    if (steps % 2 == 0) promote();
#endif
  }
#if PRODUCTS == 3
  DEVICE void promote() {
    sum.add(main, 1);
    main.clear();
  }
#endif
};

#if PRODUCTS == 3
// Computes a result that is not finite once more.
static __device__ __noinline__ float recompute_fp32(const FewPixelsPhase& shape, const data_t* x, const data_t* w, int row, int pixel) {
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
// The part of itself that a sum of two steps loses in the mean: two truncations, less what rounding gives. See truncation.cuh.
constexpr float LOST = 0.47e-7f * 16 / 15;
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, PRODUCTS == 3 ? 1 : 2)
    mma_few_pixels(const data_t* __restrict__ x, const data_t* __restrict__ w, const data_t* __restrict__ bias, const data_t* __restrict__ scale,
                    const data_t* residual, data_t* __restrict__ y, const __grid_constant__ Shapes shapes) {
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ Tables tables;
  int phase = 0, number = blockIdx.x / CLUSTER;
  while (phase + 1 < PHASES && number >= (int)shapes.of[phase].tiles) number -= (int)shapes.of[phase++].tiles;
  const FewPixelsPhase& shape = shapes.of[PHASES == 1 ? 0 : phase];
  const Tile of(shape, number);
  const int rank = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = min(rank * (int)shape.part, (int)shape.units), units = min(first + (int)shape.part, (int)shape.units) - first;
  const int begin = first * UNIT, end = min((first + units) * UNIT, (int)shape.channels), stages = (units + (int)shape.stage_units - 1) / (int)shape.stage_units;
  int* const from = (int*)dynamic;

  auto slot_of = [&](int stage) { return dynamic + (int)shape.ring_at + stage % STAGES * (int)shape.slot_bytes; };
  auto fetch_stage_w = [&](int stage) {
    if (stage < stages) fetch_w(shape, of, w, shared_address(slot_of(stage)), begin + stage * (int)shape.stage_units * UNIT, end);
  };
  auto fetch_stage_x = [&](int stage) {
    const int done = stage * (int)shape.stage_units;
    if (stage < stages) fetch_x(shape, x, shared_address(slot_of(stage)) + (int)shape.x_at, from, begin + done * UNIT, min((int)shape.stage_units, units - done));
  };
  AFTER_LAST_LAUNCH
  fetch_stage_w(0);  // under way while the tables are made
  write_tables(shape, of, tables, from);
  __syncthreads();
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (stage > 0) fetch_stage_w(stage);
    if (TYPE == 32) fetch_stage_x(stage);
    copies_commit();
  }
  for (int stage = 0; TYPE != 32 && stage < STAGES - 1; ++stage) fetch_stage_x(stage);

  // this warp's channels, and which steps it takes
  const Divided of_group(warp, shape.warps_m, shape.by_warps_m);
  const int group = of_group.quotient, groups = WARPS / (int)shape.warps_m, warp_row = of_group.rest * WARP_M;
  const int row = (int)shape.row_step * SIZE, channel = (int)shape.channel_step * SIZE;
  uint32_t w_lane = (warp_row + lane / 4) * row + lane % 4 * WORD * channel, x_lane = lane % 4 * (int)shape.pitch * 8,
           first_step = shared_address(tables.step + group);
  asm volatile("" : "+r"(w_lane), "+r"(x_lane), "+r"(first_step));  // else the compiler would compute them again for each step
  int start[EIGHTS];
#pragma unroll
  for (int j = 0; j < EIGHTS; ++j) start[j] = tables.start[8 * j + lane / 4] * 8;

  Totals totals;
  for (int stage = 0; stage < stages; ++stage) {
    copies_wait<STAGES - 2>();
    __syncthreads();
    fetch_stage_w(stage + STAGES - 1);
    fetch_stage_x(stage + STAGES - 1);
    copies_commit();
    const int count = min((int)shape.stage_units, units - stage * (int)shape.stage_units) * (int)shape.taps;
    const uint32_t slot = shared_address(slot_of(stage)), w_slot = slot + w_lane, x_slot = slot + x_lane;
    // loads are a step ahead of the products, and the table's entries one more
    uint32_t in_w, in_x, at = first_step;
    auto look_up = [&] {
      load_shared(in_w, in_x, at);
      at += groups * 8;
    };
    auto load = [&](Operands& to) {
      to.load(w_slot + in_w, x_slot + in_x, row, channel, start);
      look_up();
    };
    Operands even, odd;
    look_up();
    load(even);
    for (int left = (count - group + groups - 1) * (int)shape.warps_m / WARPS; left > 0; left -= 1 + AHEAD) {
      if (AHEAD) load(odd);
      totals.multiply_step(even);
      if (!AHEAD || left > 1) load(even);
      if (AHEAD && left > 1) totals.multiply_step(odd);
    }
  }
#if PRODUCTS == 3
  totals.promote();
  totals.sum.add(totals.cross, 1.f / LARGER);
  const float lost = LOST;
#else
  const float lost = lost_in(totals.steps);
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
        float2 v = make_float2(totals.sum.of[half][j][2 * down], totals.sum.of[half][j][2 * down + 1]);
        if (TYPE == 32) {  // the rounding to 16 bits hides it
          v.x = with_lost(v.x, lost);
          v.y = with_lost(v.y, lost);
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
      if ((__float_as_uint(v[0]) & 0x7f800000) == 0x7f800000) v[0] = recompute_fp32(shape, x, w, channel, of.pixel + column + e);
#endif
      v[0] = finish.whole(shape, v[0], 1, has_residual(shape) ? to_float(residual[at]) : -0.f);
      activate(shape, v);
      y[at] = from_float<data_t>(v[0]);
    }
  }
  cluster_barrier_relaxed();  // shared memory must outlive what other blocks read from it
}
