// lines.cu: convolutions of float32 arrays as they lie in memory, NCHW, on Hopper's tensor cores, with TF32's precision. Only the filter is packed.
//
//   D[pixel, k] = sum over lines and s of A[pixel, line, s] * B[k, line, s]
//   A line is a row of a channel that a pixel's taps read, (c, r). The taps along it read neighbours. So a thread that has a few of a line's numbers
//   in registers has operand A of all taps s: another tap is another choice of registers.
//
// In TF32 nothing is scaled, and Inf, NaN and 1e-38 are numbers like others: it takes a float32 number's exponent and, rounded, 11 bits of it.
// FP16_OPERANDS: fp16 numbers have as many bits, and their products take half the time. Converted to fp16, x is scaled by X_SCALE, and w by a
// factor of its channel. If a warp's sums are not what TF32 would give (see `store`), its block computes them again in TF32 after its last tile.
//
// Mapping  block: persistent, one a multiprocessor; has BLOCK_N channels of y and takes every (gridDim.x / across)-th tile of 4 * CONSUMERS units of
//          pixels. A unit is a warp's: WARP_TILE_W x WARP_TILE_H pixels of an image, PIXEL_QUADS * 32 of them.
//          warpgroup 0: one thread loads w, and one thread loads x for each consumer. Each consumer warpgroup has a ring of x of its own. So they drift
//          apart, and one stores while another multiplies.
// A        goes through registers, because wgmma cannot transpose 32-bit operands in shared memory. A thread has four neighbouring pixels of a row, the
//          quad lane / 4; with PIXEL_QUADS = 2 also the four below, and rows of x that both read are read once. It has every fourth line, from
//          lane % 4 on. Which row of the product a pixel is does not matter, so they are ordered so that y is written 16 bytes at once.
// Lines    are taken eight at once, with FP16_OPERANDS sixteen: so many channels of a row. FLAT, for fewer than 8 channels: all (c, r), r fastest,
//          and zeros behind the last.
// Shared   w: W_STAGES stages of CHUNKS eights or sixteens of lines, [tap][BLOCK_N][lines], rows of 32 bytes, swizzled. W_RESIDENT: all of w has
//          stages of its own, and each is loaded once. x: a ring of STAGES stages for each consumer, [warp][BOX_H][CHANNELS][BOX_W]. A stage has what
//          the taps of a unit read, from a multiple of 16 bytes on, SHIFT columns before the first. It is swizzled if rows have SPAN bytes.
//          full: the bytes have arrived; empty: the consumer's 4 warps, or for w all warps, have read them.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/lines.cu
#ifndef BLOCK_N
#define BLOCK_N 64
#define PIXEL_QUADS 1
#define CONSUMERS 2
#define STAGES 2
#define W_STAGES 1
#define W_RESIDENT 1
#define CHUNKS 1
#define FP16_OPERANDS 0
#define FLAT 0
#define CHANNELS 8   // channels of a box
#define R 3
#define S 3
#define STRIDE_H 1
#define STRIDE_W 1
#define DILATION_H 1
#define DILATION_W 1
#define WARP_TILE_W 8
#define WARP_TILE_H 4
#define BOX_W 16
#define BOX_H 6
#define SPAN 64      // bytes over which rows of x are swizzled, or 0
#define SHIFT 3
#define HAS_RESIDUAL 0
#endif
#include "core/finish.cuh"
#include "core/truncation.cuh"
#include "hopper/ring.cuh"

template <bool halves> constexpr int LINES = halves ? 16 : 8;  // lines that a product takes at once
[[maybe_unused]] constexpr float X_SCALE = 1024;
constexpr int THREADS = 128 * (1 + CONSUMERS), UNITS = 4 * CONSUMERS;
constexpr int TAPS = (FLAT ? 1 : R) * S;                              // taps of eight lines
constexpr int W_TAP = BLOCK_N * 32, W_STAGE = CHUNKS * TAPS * W_TAP;  // bytes
constexpr int CHANNEL = BOX_W * 4, ROW = CHANNELS * CHANNEL, BOX = BOX_H * ROW, BOX_BYTES = (BOX + 1023) / 1024 * 1024, STAGE = 4 * BOX_BYTES;
constexpr int LOADED = FLAT ? 1 : R + PIXEL_QUADS - 1;                // rows of a line that a thread reads
constexpr int PIECES = (SHIFT + 3 * STRIDE_W + (S - 1) * DILATION_W) / 4 + 1;  // pieces of 16 bytes that a thread's taps read of a row
constexpr int ACROSS = WARP_TILE_W / 4;                               // quads of a unit's row
// Stages of w for one stage of x: two if 32-bit numbers take the place of 16-bit ones.
template <bool halves> constexpr int W_PARTS = FP16_OPERANDS && !halves ? 2 : 1;
template <bool halves> constexpr bool RESIDENT_W = W_RESIDENT && halves == FP16_OPERANDS;
// A row is loaded beside the products of the row before, unless these still read the same registers (one row a stage), or too many registers would be
// needed.
constexpr bool BESIDE = S <= 5 && CHUNKS * LOADED > 1;
static_assert(WARP_TILE_W % 4 == 0 && WARP_TILE_W * WARP_TILE_H == 32 * PIXEL_QUADS && WARP_TILE_H % PIXEL_QUADS == 0, "a unit is a warp's");
static_assert(PIXEL_QUADS == 1 || (STRIDE_H == 1 && DILATION_H == 1 && !FLAT), "rows of x are shared");
static_assert(BLOCK_N % 32 == 0 && BLOCK_N * PIXEL_QUADS <= 128, "registers");
static_assert(!FP16_OPERANDS || (!FLAT && W_STAGES > 1), "a stage of w is given back when the next one is multiplied");
static_assert(FLAT ? CHANNELS * R <= 8 * CHUNKS : CHANNELS == LINES<FP16_OPERANDS> * CHUNKS, "a stage");

// The arguments. by_n is the divisor n, prepared (division.cuh).
struct LinesProduct {
  long long across, tiles;                    // tiles along the channels; tiles of units
  long long steps;                            // stages of lines
  long long images;
  long long unit_rows, unit_columns, by_unit_columns;  // units of an image;
  long long units, by_units;                  // all of them
  long long columns, padded;                  // channels of y, and of the packed w
  long long rows, wide;                       // P and Q
  long long image_step, plane;                // elements of y from one image, and one channel, to the next
  long long low_w, low_h;                     // x of a unit's box begins at unit * UNIT * STRIDE + low
  long long has_bias, has_scale, activation, slope;  // what finishes a sum, beside HAS_RESIDUAL; slope: a float's bits
};

// four_of: which of a unit's quads a lane has; line_of: which line is number n of the lanes with lane % 4 == c. They are chosen so that 8 lanes that load
// 16 bytes each at once use every bank once. Quads are 16 bytes or STRIDE_W times as much apart, lines BOX_W.
DEVICE int four_of(int lane) { return STRIDE_W % 2 || ACROSS < 4 ? lane / 4 : lane / 16 * 4 + lane / 4 % 2 * 2 + lane / 8 % 2; }
DEVICE int line_of(int c, int n) { return SPAN == 64 && !FLAT ? c % 2 + n % 2 * 2 + c / 2 * 4 + n / 2 * 8 : c + 4 * n; }

struct Unit {
  int image, row, column;  // in pixels
  DEVICE Unit(const LinesProduct& shape, int number) {
    const Divided of_image(number, shape.units, shape.by_units), place(of_image.rest, shape.unit_columns, shape.by_unit_columns);
    image = of_image.quotient;
    row = place.quotient * WARP_TILE_H;
    column = place.rest * WARP_TILE_W;
  }
  DEVICE int row_of(int lane) const { return row + four_of(lane) / ACROSS * PIXEL_QUADS; }
  DEVICE int column_of(int lane) const { return column + four_of(lane) % ACROSS * 4; }
  // whether quad number `four` of a lane is real
  DEVICE bool has(const LinesProduct& shape, int lane, int four) const {
    return image < (int)shape.images && row_of(lane) + four < (int)shape.rows && column_of(lane) < (int)shape.wide;
  }
};

// FP16_OPERANDS: the units that are computed again.
struct Flags {
  int* of;
  DEVICE int& at(const LinesProduct& shape, int tile, int unit) const { return of[(tile * (int)shape.across + blockIdx.x % (int)shape.across) * UNITS + unit]; }
  // whether a tile has none of them
  template <bool halves> DEVICE bool skip(const LinesProduct& shape, int tile) const {
    if (halves == FP16_OPERANDS) return false;
    int any = 0;
    for (int unit = 0; unit < UNITS; ++unit) any |= at(shape, tile, unit);
    return any == 0;
  }
};

// ---- producers

template <bool halves>
DEVICE void produce_w(const uint8_t* w, const LinesProduct& shape, const Flags& flags, uint32_t ring, uint32_t full, uint32_t empty) {
  const int across = (int)shape.across, column = blockIdx.x % across * BLOCK_N;
  const int rows = min(BLOCK_N, (int)shape.padded - column), each = (int)gridDim.x / across;
  const bool whole = BLOCK_N == shape.padded;  // then the taps of a stage are contiguous
  w += column * 32;
  RingPosition<W_STAGES> at;
  for (int tile = blockIdx.x / across; tile < (int)shape.tiles; tile += each) {
    if (flags.skip<halves>(shape, tile)) continue;
    for (int step = 0; step < (int)shape.steps * W_PARTS<halves>; ++step) {
      const uint32_t to = ring + at.stage * W_STAGE, arrived = full + 8 * at.stage;
      barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
      barrier_expect(arrived, CHUNKS * TAPS * rows * 32);
      const uint8_t* const from = w + step * (CHUNKS * TAPS) * shape.padded * 32;
      if (whole) {
        load_bytes(to, from, W_STAGE, arrived);
      } else {
        for (int tap = 0; tap < CHUNKS * TAPS; ++tap) load_bytes(to + tap * W_TAP, from + tap * shape.padded * 32, rows * 32, arrived);
      }
      at.next();
    }
    if (RESIDENT_W<halves>) return;
  }
}

template <bool halves>
DEVICE void produce_x(const CUtensorMap* map, const LinesProduct& shape, const Flags& flags, int consumer, uint32_t ring, uint32_t full, uint32_t empty) {
  prefetch_map(map);
  const int across = (int)shape.across, each = (int)gridDim.x / across;
  RingPosition<STAGES> at;
  for (int tile = blockIdx.x / across; tile < (int)shape.tiles; tile += each) {
    if (flags.skip<halves>(shape, tile)) continue;
    int image[4], row[4], column[4];
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      const Unit unit(shape, tile * UNITS + consumer * 4 + warp);
      image[warp] = unit.image;
      row[warp] = unit.row * STRIDE_H + (int)shape.low_h;
      column[warp] = unit.column * STRIDE_W + (int)shape.low_w;
    }
    for (int step = 0; step < (int)shape.steps; ++step) {
      const uint32_t to = ring + at.stage * STAGE, arrived = full + 8 * at.stage;
      barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
      barrier_expect(arrived, 4 * BOX);
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) load_box(to + warp * BOX_BYTES, map, arrived, column[warp], step * CHANNELS, row[warp], image[warp]);
      at.next();
    }
  }
}

// ---- a thread's part of A

// Rounds to the nearest number of 11 bits, halves away from zero; the product ignores the last 13 bits. (cvt.rna.tf32.f32 takes one more instruction.)
DEVICE uint32_t rounded(float v) { return __float_as_uint(v) + (fabsf(v) < INFINITY ? 0x1000 : 0); }

// Which of the four numbers of a piece a thread's taps read, as bits.
DEVICE constexpr int needed(int piece) {
  int bits = 0;
  for (int pixel = 0; pixel < 4; ++pixel)
    for (int s = 0; s < S; ++s) {
      const int at = SHIFT + pixel * STRIDE_W + s * DILATION_W;
      if (at / 4 == piece) bits |= 1 << at % 4;
    }
  return bits;
}

[[maybe_unused]] constexpr float LEAST_HALF = 0x1p-14f;  // smaller fp16 numbers lose bits
constexpr unsigned LEAST_BITS = 0x3380;                  // the upper half of LEAST_HALF / X_SCALE

// What the taps of a lane's quad read of its two lines of an eight, or twice two of a sixteen, from a multiple of 16 bytes on.
struct Window {
  uint32_t of[2][4 * PIECES];
};

// Loads row `row` of eight, or sixteen, number `chunk` of `unit`. It adds to `underflow_count` an upper bound of the numbers that have lost bits.
template <bool halves> DEVICE void load(Window& window, [[maybe_unused]] float& underflow_count, const uint8_t* unit, int chunk, int row) {
  const int lane = threadIdx.x % 32;
  const int y = four_of(lane) / ACROSS * PIXEL_QUADS * STRIDE_H + row * DILATION_H, x = four_of(lane) % ACROSS * 4 * STRIDE_W;
  [[maybe_unused]] unsigned least = ~0u;  // the smallest magnitude but 0: upper half, less 1
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    constexpr int COUNT = LINES<halves> / 8;
    float found[COUNT][4 * PIECES];
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int line = LINES<halves> * chunk + line_of(lane % 4, COUNT * j + n);
      const bool real = !FLAT || line < CHANNELS * R;
      const int place = !FLAT ? line * CHANNEL + y * ROW : real ? line / R * CHANNEL + (y + line % R * DILATION_H) * ROW : 0;
      for_all<PIECES>([&](auto number) {
        constexpr int piece = decltype(number)::value, bits = needed(piece);
        const int at = place + (x + 4 * piece) * 4;
        const uint8_t* const from = unit + (SPAN ? at ^ (at >> 3 & (SPAN - 16)) : at);
        float(&v)[4] = *(float(*)[4])(found[n] + 4 * piece);
        v[0] = v[1] = v[2] = v[3] = 0;
        if constexpr (bits == 1 || bits == 2 || bits == 4 || bits == 8) {
          constexpr int e = bits == 1 ? 0 : bits == 2 ? 1 : bits == 4 ? 2 : 3;
          v[e] = ((const float*)from)[e];
        } else if constexpr (bits == 3 || bits == 12) {
          *(float2*)(v + (bits == 3 ? 0 : 2)) = *(const float2*)(from + (bits == 3 ? 0 : 8));
        } else if constexpr (bits) {
          *(float4*)v = *(const float4*)from;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!real) v[e] = 0;
      });
    }
#pragma unroll
    for (int e = 0; e < 4 * PIECES; ++e) {
      if (needed(e / 4) >> e % 4 & 1) {
        if constexpr (halves) {
          least = __viaddmin_u16x2(__byte_perm(__float_as_uint(found[0][e]), __float_as_uint(found[1][e]), 0x7632) & 0x7fff7fff, ~0u, least);
          const __half2 both = __floats2half2_rn(found[0][e] * X_SCALE, found[1][e] * X_SCALE);
          window.of[j][e] = *(const uint32_t*)&both;
        } else {
          window.of[j][e] = rounded(found[0][e]);
        }
      }
    }
  }
  if (halves && ((least & 0xffff) < LEAST_BITS - 1 || least >> 16 < LEAST_BITS - 1)) underflow_count += 16 * PIECES;
}

// ---- the sums

struct Sums {
  float of[2 * PIXEL_QUADS][BLOCK_N / 2];
};

// Multiplies a row of an eight of lines; `w`: its taps.
template <bool halves> DEVICE void multiply(Sums& sum, const Window& window, uint64_t w, int row) {
#pragma unroll
  for (int four = 0; four < PIXEL_QUADS; ++four) {
    const int r = row - four;
    if (!FLAT && (r < 0 || r >= R)) continue;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = window.of[e / 2][SHIFT + (2 * half + e % 2) * STRIDE_W + s * DILATION_W];
        const uint64_t b = w + ((FLAT ? 0 : r) * S + s) * (W_TAP / 16);
        if constexpr (halves) {
          wgmma_f16(sum.of[2 * four + half], a, b, true);
        } else {
          wgmma_tf32(sum.of[2 * four + half], a, b, true);
        }
      }
  }
}

// ---- from sums to y

// FP16_OPERANDS: shared by the threads of a block. For each of its channels of y: the factor of a sum, and how large a sum must be if x lost no bits,
// which is 2^5 for each of the channel's numbers in w that lost bits, or NaN. And whether units are left to compute again.
struct BlockStatus {
  float scales[BLOCK_N], least[BLOCK_N];
  int left;
};

// Checks and stores a warp's sums. Returns whether all of them are what TF32 would give: finite, and so large that what numbers below 2^-14 have
// lost, 2^-25 times up to 2^15 or 2^16 of the other factor, cannot be seen. `underflow_count` is 2^4 for each such number of x.
enum { CHECK = 1, WRITE = 2 };
template <bool halves, int what>
DEVICE bool store(const Sums& sum, const LinesProduct& shape, const Unit& unit, [[maybe_unused]] const BlockStatus* status, [[maybe_unused]] float underflow_count,
                  const float* bias, const float* scale, const float* residual, float* y) {
  const int lane = threadIdx.x % 32, columns = (int)shape.columns, column0 = blockIdx.x % (int)shape.across * BLOCK_N + 2 * (lane % 4);
  const long long at = unit.image * shape.image_step + unit.row_of(lane) * (int)shape.wide + unit.column_of(lane);
  const float part = lost_in((int)shape.steps * W_PARTS<halves> * CHUNKS * TAPS);
  bool real[PIXEL_QUADS], good = true;
#pragma unroll
  for (int four = 0; four < PIXEL_QUADS; ++four) real[four] = unit.has(shape, lane, four);
  constexpr int BATCH = 8;  // loads under way at once; more would spill
  ScaleAndBias of_column[BATCH];
#pragma unroll
  for (int i = 0; i < BLOCK_N / 8; ++i) {
    if (i % (BATCH / 2) == 0 && what & WRITE)
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int column = min(column0 + 8 * (i + j / 2) + j % 2, columns - 1);
        of_column[j] = ScaleAndBias(shape, scale, bias, column);
      }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = (2 * i + e) % BATCH, column = column0 + 8 * i + e, of_block = 2 * (lane % 4) + 8 * i + e;
      const long long place = at + column * shape.plane;
      const float factor = halves ? status->scales[of_block] : 1, least = halves ? underflow_count + status->least[of_block] : 0;
      [[maybe_unused]] float4 added[PIXEL_QUADS];
#pragma unroll
      for (int four = 0; four < PIXEL_QUADS; ++four)
        if (HAS_RESIDUAL && what & WRITE && real[four] && column < columns) added[four] = *(const float4*)(residual + place + four * (int)shape.wide);
#pragma unroll
      for (int four = 0; four < PIXEL_QUADS; ++four) {
        const bool there = real[four] && column < columns;
        float v[4];
#pragma unroll
        for (int pixel = 0; pixel < 4; ++pixel) {
          v[pixel] = sum.of[2 * four + pixel / 2][4 * i + 2 * (pixel % 2) + e];
          if (what & CHECK) good &= (fabsf(v[pixel]) >= least && fabsf(v[pixel]) < INFINITY) || !there;
          if (what & WRITE) v[pixel] = with_lost(v[pixel], part);
          if (what & WRITE) v[pixel] = Finish<halves>{of_column[j]}.whole(shape, v[pixel], factor, HAS_RESIDUAL ? ((const float*)&added[four])[pixel] : -0.f);
        }
        if (what & WRITE) activate(shape, v);
        if (what & WRITE && there) store_word(y + place + four * (int)shape.wide, *(const uint4*)v);
      }
    }
  }
  return !(what & CHECK) || __all_sync(~0u, good);
}

struct Rings {
  uint32_t w, w_full, w_empty;
  uint8_t* x;
  uint32_t x_full, x_empty;
};

template <bool halves>
DEVICE void consume(const LinesProduct& shape, const Flags& flags, BlockStatus* status, int consumer, const Rings& rings, const float* bias,
                    const float* scale,
                    const float* residual, float* y) {
  const int across = (int)shape.across, each = (int)gridDim.x / across, warp = threadIdx.x / 32 % 4, number = consumer * 4 + warp;
  const uint8_t* const units = rings.x + warp * BOX_BYTES;
  RingPosition<STAGES> at;
  RingPosition<W_STAGES> w_at;
  for (int tile = blockIdx.x / across; tile < (int)shape.tiles; tile += each) {
    if (flags.skip<halves>(shape, tile)) continue;
    Sums sum;
#pragma unroll
    for (int block = 0; block < 2 * PIXEL_QUADS; ++block)
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) sum.of[block][i] = 0;
    float underflow_count = 0;
    int read = -1;  // a stage of w whose products may still run
    auto give_back_w = [&](int stage) {
      if (!RESIDENT_W<halves> && stage >= 0 && threadIdx.x % 32 == 0) barrier_arrive(rings.w_empty + 8 * stage);
    };
    for (int step = 0; step < (int)shape.steps; ++step) {
      barrier_wait(rings.x_full + 8 * at.stage, at.parity);
      const uint8_t* const unit = units + at.stage * STAGE;
#pragma unroll
      for (int part = 0; part < W_PARTS<halves>; ++part) {
        barrier_wait(rings.w_full + 8 * w_at.stage, RESIDENT_W<halves> ? 0 : w_at.parity);
        const uint64_t w = wgmma_descriptor<32>(rings.w + w_at.stage * W_STAGE);
        for_all<CHUNKS * LOADED>([&](auto which) {
          constexpr int chunk = decltype(which)::value / LOADED, row = decltype(which)::value % LOADED;
          Window window;
          load<halves>(window, underflow_count, unit, part * CHUNKS + chunk, row);
          wgmma_fence();
          multiply<halves>(sum, window, w + chunk * TAPS * (W_TAP / 16), row);
          wgmma_commit();
          wgmma_wait<BESIDE>();
          if (decltype(which)::value == 0) give_back_w(read);
        });
        if (BESIDE) {
          read = w_at.stage;
        } else {
          give_back_w(w_at.stage);
        }
        w_at.next();
      }
      __syncwarp();  // what was loaded is in all lanes' registers: it is multiplied
      if (threadIdx.x % 32 == 0) barrier_arrive(rings.x_empty + 8 * at.stage);
      at.next();
    }
    wgmma_wait<0>();
    give_back_w(read);
#pragma unroll
    for (int block = 0; block < 2 * PIXEL_QUADS; ++block) wgmma_arrived(sum.of[block]);
    const Unit unit(shape, tile * UNITS + number);
    if constexpr (halves) {
#pragma unroll
      for (int beside = 1; beside < 32; beside *= 2) underflow_count += __shfl_xor_sync(~0u, underflow_count, beside);
      // a residual may be y itself, which must not be overwritten then
      const bool good = store<true, HAS_RESIDUAL ? CHECK : CHECK | WRITE>(sum, shape, unit, status, 16 * underflow_count, bias, scale, residual, y);
      if (threadIdx.x % 32 == 0) flags.at(shape, tile, number) = !good;
      if (!good) {
        status->left = 1;
      } else if (HAS_RESIDUAL) {
        store<true, WRITE>(sum, shape, unit, status, 0, bias, scale, residual, y);
      }
    } else {
      if (FP16_OPERANDS && !flags.at(shape, tile, number)) continue;
      store<false, WRITE>(sum, shape, unit, status, 0, bias, scale, residual, y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_lines(const __grid_constant__ CUtensorMap map, const uint8_t* __restrict__ w,
#if FP16_OPERANDS
               const uint8_t* __restrict__ w_tf32, const float2* __restrict__ scale_k, int* flags_of,
#endif
               const float* __restrict__ bias, const float* __restrict__ scale, const float* residual, float* __restrict__ y,
               const __grid_constant__ LinesProduct shape) {
  extern __shared__ uint8_t dynamic[];
  constexpr int BARRIERS = 2 * (W_STAGES + CONSUMERS * STAGES);
  __shared__ alignas(8) uint64_t barriers[(1 + FP16_OPERANDS) * BARRIERS];  // the second ones for units that are computed again
#if FP16_OPERANDS
  __shared__ BlockStatus all_told;
  BlockStatus* const status = &all_told;
#else
  BlockStatus* const status = nullptr;
  int* const flags_of = nullptr;
#endif
  uint8_t* const start = dynamic + (-shared_address(dynamic) & 1023);  // swizzle patterns follow absolute addresses
  const int warpgroup = threadIdx.x / 128, consumer = warpgroup ? warpgroup - 1 : max((int)threadIdx.x / 32 - 1, 0);
  const Flags flags{flags_of};
  Rings rings;
  rings.x = start + consumer * STAGES * STAGE;
  rings.w = shared_address(start) + CONSUMERS * STAGES * STAGE;
  rings.w_full = shared_address(barriers);
  rings.w_empty = rings.w_full + 8 * W_STAGES;
  rings.x_full = rings.w_empty + 8 * W_STAGES + 16 * STAGES * consumer;
  rings.x_empty = rings.x_full + 8 * STAGES;
  if (threadIdx.x == 0) {
    if (FP16_OPERANDS) status->left = 0;
#pragma unroll
    for (int set = 0; set < 1 + FP16_OPERANDS; ++set) {
      const uint32_t first = shared_address(barriers + set * BARRIERS);
      for (int i = 0; i < 2 * W_STAGES; ++i) barrier_init(first + 8 * i, i < W_STAGES ? 1 : UNITS);
      for (int i = 0; i < 2 * CONSUMERS * STAGES; ++i) barrier_init(first + 8 * (2 * W_STAGES + i), i / STAGES % 2 ? 4 : 1);
    }
    barrier_init_done();
  }
  __syncthreads();
  AFTER_LAST_LAUNCH
#if FP16_OPERANDS
  if (threadIdx.x < BLOCK_N) {
    const float2 of = scale_k[min(blockIdx.x % (int)shape.across * BLOCK_N + (int)threadIdx.x, (int)shape.columns - 1)];
    status->scales[threadIdx.x] = of.x;
    status->least[threadIdx.x] = of.y;
  }
  __syncthreads();
  auto again = [&] {  // returns whether units are left, once all are computed
    __syncwarp();
    named_barrier(1, THREADS);
    rings.w_full += 8 * BARRIERS;
    rings.w_empty += 8 * BARRIERS;
    rings.x_full += 8 * BARRIERS;
    rings.x_empty += 8 * BARRIERS;
    return status->left != 0;
  };
#endif
  if (warpgroup == 0) {
    registers_down<CONSUMERS == 2 ? 40 : 32>();
    auto produce = [&](auto halves, const uint8_t* w) {
      if (threadIdx.x == 0) produce_w<decltype(halves)::value>(w, shape, flags, rings.w, rings.w_full, rings.w_empty);
      if (threadIdx.x % 32 == 0 && threadIdx.x / 32 > 0 && threadIdx.x / 32 <= CONSUMERS)
        produce_x<decltype(halves)::value>(&map, shape, flags, consumer, shared_address(rings.x), rings.x_full, rings.x_empty);
    };
    produce(Constant<FP16_OPERANDS>(), w);
#if FP16_OPERANDS
    if (again()) produce(Constant<0>(), w_tf32);
#endif
  } else {
    registers_up<CONSUMERS == 2 ? 232 : 160>();
    consume<FP16_OPERANDS>(shape, flags, status, consumer, rings, bias, scale, residual, y);
#if FP16_OPERANDS
    if (again()) consume<false>(shape, flags, status, consumer, rings, bias, scale, residual, y);
#endif
  }
}

// ---- the filter

struct LayFilter {
  long long rows, padded, channels;  // channels of y, the same with zeros behind them, channels of x
  long long eights;                  // eights of lines; FP16_OPERANDS: half as many sixteens
  long long row_step, channel_step;  // elements of w from one channel of y, and of x, to the next
  long long flipped;                 // whether taps are taken from the last to the first
};

// block -> a channel of y, whose elements of w all lie in shared memory; thread -> 32 bytes of [eight][tap][padded rows][8 lines],
// rounded, and with FP16_OPERANDS of [sixteen][tap][padded rows][16 lines], scaled, as a product reads them from shared memory
extern "C" __global__ void __launch_bounds__(256) lay_filter(const float* __restrict__ w, uint4* __restrict__ laid,
#if FP16_OPERANDS
                                                             uint4* __restrict__ halves, float2* __restrict__ scale_k,
#endif
                                                             const LayFilter filter) {
  extern __shared__ float of_row[];
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const int row = blockIdx.x, channels = (int)filter.channels;
  const bool real = row < (int)filter.rows;
  for (int i = threadIdx.x; i < channels * R * S; i += 256) of_row[i] = real ? w[row * filter.row_step + i / (R * S) * filter.channel_step + i % (R * S)] : 0;
  __syncthreads();
  auto element = [&](int line, int tap) {
    const int c = FLAT ? line / R : line, r = FLAT ? line % R : tap / S, number = r * S + tap % S;
    return c < channels ? of_row[c * R * S + (filter.flipped ? R * S - 1 - number : number)] : 0;
  };
  // stores the two halves of 32 bytes number `i`, swizzled
  auto put = [&](uint4* to, int i, const uint32_t(&v)[8]) {
    to += (i * filter.padded + row) * 2;
    to[row / 4 % 2] = make_uint4(v[0], v[1], v[2], v[3]);
    to[1 - row / 4 % 2] = make_uint4(v[4], v[5], v[6], v[7]);
  };
  for (int i = threadIdx.x; i < (int)filter.eights * TAPS; i += 256) {
    uint32_t v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = rounded(element(i / TAPS * 8 + line_of(k % 4, k / 4), i % TAPS)) & ~0x1fffu;
    put(laid, i, v);
  }
#if FP16_OPERANDS
  __shared__ unsigned largest;
  __shared__ int underflow_count;
  if (threadIdx.x == 0) largest = underflow_count = 0;
  __syncthreads();
  unsigned mine = 0;
  for (int i = threadIdx.x; i < channels * R * S; i += 256) mine = max(mine, __float_as_uint(fabsf(of_row[i])));
  atomicMax(&largest, __reduce_max_sync(~0u, mine));
  __syncthreads();
  const int exponent = (int)(largest >> 23) - 127;
  const bool usable = exponent >= -60 && exponent <= 60;
  const float factor = usable ? __uint_as_float((127 + 14 - exponent) << 23) : 1;  // brings the largest to 2^14 or more
  int count = 0;
  for (int i = threadIdx.x; i < channels * R * S; i += 256) count += of_row[i] != 0 && fabsf(of_row[i]) * factor < LEAST_HALF;
  atomicAdd(&underflow_count, __reduce_add_sync(~0u, count));
  for (int i = threadIdx.x; i < (int)filter.eights / 2 * TAPS; i += 256) {
    uint32_t v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const __half2 both = __floats2half2_rn(element(i / TAPS * 16 + line_of(k % 4, k / 4 * 2), i % TAPS) * factor,
                                             element(i / TAPS * 16 + line_of(k % 4, k / 4 * 2 + 1), i % TAPS) * factor);
      v[k] = *(const uint32_t*)&both;
    }
    put(halves, i, v);
  }
  __syncthreads();
  if (real && threadIdx.x == 0) scale_k[row] = make_float2(1 / (X_SCALE * factor), largest == 0 ? 0 : usable ? 32 * underflow_count : NAN);
#endif
}
