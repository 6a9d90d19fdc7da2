// wgrad.cu: wgrad from channels-last arrays as they lie, on Hopper's tensor cores: 16 bits, and float32 in TF32 or by three products of TF32.
//
//   dw[k, c, tap] = sum over positions of dy[position, k] * x[position + tap, c]
//   gemm m: channel of dy | gemm n: (tap, channel of x in blocks of CHANNELS) | gemm k: position (n,o,p,q) of dy
//
// Nothing is packed: a row that TMA loads is CHANNELS channels of a position, 128 bytes. wgmma takes such 16-bit operands, whose k is not the fastest
// axis, but not TF32 operands: for those, warps load fragments from the same rows, and TMA rounds float32 on the way.
//
// Planes   PLANES: 1x1 filters without stride on 16-bit NCHW arrays as they lie. A row that TMA loads is BLOCK_K pixels of a channel of an image, so
//          wgmma's operands are K-major. A stage belongs to one image; zeros fill up an image's last stage.
//
// Mapping  block -> a tile of BLOCK_M x BLOCK_N sums over one of `splits` runs of positions.
//          A block has DOWN x ACROSS consumer warpgroups, each with PRODUCTS x 64 rows of WGMMA_N columns, and behind them one more warp. One thread
//          of that, the producer, loads dy and x. If a consumer has 2 x 64 rows, the producer's warp is a whole warpgroup, which hands most of
//          its registers over.
// Shared   a ring of STAGES stages (ring.cuh) of BLOCK_K positions: blocks of CHANNELS channels of dy, rows of 128 bytes, swizzled, then such blocks
//          of x. When the ring has been read, the tile's sums take its place, pitch BLOCK_N + 8 floats, and are written from there. They may need
//          more room than the ring.
// Loads    of dy: boxes of BLOCK_K positions. Of x: TMA's im2col mode, as many consecutive positions, shifted by a block's tap, across rows and images.
//          Padding, and what lies behind the last position of either, arrives as zeros.
// Groups   A bundle is neighbouring groups whose channels of x fit a block, or one group. Products of channels of two different groups are not
//          written.
// Ends     Blocks of channels past the last one are not loaded. What lies in their place, and channels of the next bundle, only reach sums that
//          are not written.
// TF32     mma.sync: a warp has 32 rows of half of its consumer's columns. A lane loads four neighbouring channels of a position at once, which are
//          rows, or columns, of four fragments. A step's 8 positions are 0 2 4 6, 1 3 5 7 in the order of k, so that lanes use all banks of
//          swizzled rows. TALL, tiles of 128 x 128: wgmma; warps transpose x in shared memory, and dy comes through registers.
// LIMBS 2  float32: TMA loads it as it is. A lane splits what it has loaded into two TF32 numbers and adds three products: that of the first numbers,
//          stage by stage, into a float32 sum, because the tensor core truncates its own sum; and those of first and second numbers.
// FLIPPED  The same sums over the pixels of x, for a filter without strides: rows are channels of x, and columns (tap, channel of dy), taps in reverse.
//          Pixels outside dy are zeros then, and 0 x Inf of x is NaN: so a sum that is not finite is computed again without them.
// Result   With one run of positions it is dw, [k][c][tap] or [k][tap][c]. With more it is parts[run][k][tap][c] in fp32. hopper/wgrad_reduce.cu
//          adds few parts to [k][c][tap], hopper/wgrad_add.cu all others.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/wgrad.cu
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 192
#define WGMMA_N 192  // columns of a consumer
#define STAGES 5
#define TYPE 17    // of the arrays: 32 float, 16 half, 17 bfloat16
#define LIMBS 1    // TF32 numbers that a float is split into
#define PLANES 0   // NCHW
#define FLIPPED 0
#endif
#include "mma/fragments.cuh"
#include "hopper/skeleton.cuh"
#include "core/truncation.cuh"

typedef element<TYPE> data_t;

constexpr int CHANNELS = 128 / (int)sizeof(data_t);                                // channels of a block
constexpr int BLOCK_K = CHANNELS, STEPS = TYPE == 32 ? BLOCK_K / 8 : BLOCK_K / 16;  // positions of a stage; tensor-core steps in one
#define TALL (TYPE == 32 && BLOCK_M == 128 && BLOCK_N == 128)
constexpr int ACROSS = BLOCK_N / WGMMA_N, DOWN = BLOCK_M == 256 ? 2 : ACROSS > 1 || TALL ? 1 : BLOCK_M / 64, PRODUCTS = BLOCK_M / 64 / DOWN;
constexpr bool SHARES = TALL || (BLOCK_M == 64 && BLOCK_N <= 192);  // two blocks fit a multiprocessor
constexpr int CONSUMERS = DOWN * ACROSS, CONSUMER_THREADS = 128 * CONSUMERS, THREADS = CONSUMER_THREADS + (PRODUCTS == 2 ? 128 : 32);
constexpr int BLOCK_BYTES = BLOCK_K * 128, STEP_BYTES = PLANES ? 32 : BLOCK_BYTES / STEPS;  // bytes of CHANNELS channels of a stage, and of a step
constexpr int DY_BLOCKS = BLOCK_M / CHANNELS, X_BLOCKS = BLOCK_N / CHANNELS, STAGE_BYTES = (DY_BLOCKS + X_BLOCKS) * BLOCK_BYTES;
constexpr int BEHIND = STAGES > 2 ? 1 : 0;                      // stages whose products may still run while the next one is waited for
constexpr int PITCH = BLOCK_N + 8;                              // floats of a row of sums
constexpr int WARPS = 4 * CONSUMERS;                            // warps that write
static_assert(BLOCK_M % 64 == 0 && BLOCK_N % WGMMA_N == 0 && WGMMA_N % 64 == 0, "whole warpgroups and blocks of channels");
static_assert(!PLANES || (TYPE != 32 && !FLIPPED), "16-bit numbers, which are pixels of either");
static_assert(LIMBS == 1 || (TYPE == 32 && WGMMA_N == 64), "three sums of a result fit the registers");
static_assert(PRODUCTS <= 2 && CONSUMERS <= 3 && (TYPE != 32 || ACROSS == 1), "as many registers as there are");

// by_n is the divisor n, prepared (division.cuh).
struct WgradNhwcArguments {
  long long tiles_m, by_tiles_m, tiles_n, by_tiles_n;         // tiles of a bundle
  long long bundles, by_bundles, splits;                      // bundles; runs of positions
  long long stages, part;                                     // stages of all positions, and of a run
  long long rows, columns;                                    // channels of dy, and of x, of a bundle
  long long own_rows, own_columns, by_own_columns;            // channels of dy, and of x, of a group
  long long column_blocks;                                    // blocks of CHANNELS channels of a bundle of x, for all taps
  long long inner, by_inner, taps_inner;                      // neighbouring blocks: of the channels of a tap or, with taps_inner, of the taps of some channels
  long long taps, tap_r, by_tap_r, tap_s, by_tap_s;           // taps: all; along r and s
  long long dilation_d, dilation_h, dilation_w;               // offset in x from one tap to the next
  long long rank;                                             // spatial axes of the loads; 0: position n of dy reads pixel n of x
  long long load_plane, by_load_plane;                        // positions of an image, as x is loaded,
  long long load_pq, by_load_pq, load_q, by_load_q;           // of a slice and of a row
  long long stride_d, stride_h, stride_w;                     // x of position (o, p, q), tap 0: o * stride_d + low_d and so on
  long long low_d, low_h, low_w;
  long long size, taps_fastest;                               // elements of dw; whether its taps are fastest, or its channels
  long long image_stages, by_image_stages;                    // PLANES: stages of an image
};

#if FLIPPED
// What flipped tiles do with their sums. A channel of dy as it is loaded is (fold, channel), where innermost taps were folded into channels.
struct FlippedArguments {
  long long own, by_own, folds;                               // channels of dy, and how many taps are folded into a loaded channel
  long long out_k, out_tap, out_c;                            // elements from one k, tap and c to the next, of dw or of a part
  long long pixels, plane, by_plane, pq, by_pq, q, by_q;      // pixels of x: all, of an image, a slice and a row
  long long d, h, w, low_d, low_h, low_w;                     // size of dy; tap 0 of pixel o of x reads pixel o + low_d of dy, and so on
  long long tap_r, by_tap_r, tap_s, by_tap_s, apart_d, apart_h, apart_w;  // taps along r and s; pixels from one tap to the next
  long long folded_axes, dense, thin, size_d, size_h, size_w;  // axes folded; loaded channels of x and of dy; loaded size of dy
};
#endif

// What a block computes: of bundle `bundle`, the rows from `row` on and the columns of the blocks from `block` on; dy_blocks and x_blocks are real.
struct Tile {
  int split, bundle, row, block, dy_blocks, x_blocks;
  DEVICE Tile(const WgradNhwcArguments& arg) {
    const Divided across(blockIdx.x, arg.tiles_n, arg.by_tiles_n), down(across.quotient, arg.tiles_m, arg.by_tiles_m);
    const Divided of_bundle(down.quotient, arg.bundles, arg.by_bundles);
    split = of_bundle.quotient;
    bundle = of_bundle.rest;
    row = down.rest * BLOCK_M;
    block = across.rest * X_BLOCKS;
    dy_blocks = min(((int)arg.rows - row + CHANNELS - 1) / CHANNELS, DY_BLOCKS);
    x_blocks = min((int)arg.column_blocks - block, X_BLOCKS);
  }
};

// The stages that this block sums: [first, last).
struct Range {
  int first, last;
  DEVICE Range(const WgradNhwcArguments& arg, const Tile& of) {
    const int part = (int)arg.part;
    first = (int)min((long long)of.split * part, arg.stages);
    last = min(first + part, (int)arg.stages);
  }
};

// A block of columns: its tap, and its first channel in the bundle.
struct Column {
  int tap, channel;
  DEVICE Column(const WgradNhwcArguments& arg, int block) {
    const Divided of(block, arg.inner, arg.by_inner);
    tap = arg.taps_inner ? of.rest : of.quotient;
    channel = (arg.taps_inner ? of.quotient : of.rest) * CHANNELS;
  }
};

typedef StageRing<STAGES, STAGE_BYTES> Ring;

// ---- the producer

#if PLANES
DEVICE void produce(const CUtensorMap* map_dy, const CUtensorMap* map_x, const WgradNhwcArguments& arg, const Tile& of, const Range& range,
                    const Ring& ring) {
  const int k = of.bundle * (int)arg.rows + of.row, c = of.bundle * (int)arg.columns + of.block * CHANNELS;
  Ring::Position at;
  fill_stages(ring, at, range.first, range.last, [&](int step, uint32_t dy, uint32_t arrived) {
    const uint32_t x = dy + DY_BLOCKS * BLOCK_BYTES;
    const Divided of_image(step, arg.image_stages, arg.by_image_stages);
    const int pixel = of_image.rest * BLOCK_K, image = of_image.quotient;
    barrier_expect(arrived, (of.dy_blocks + of.x_blocks) * BLOCK_BYTES);
#pragma unroll
    for (int i = 0; i < DY_BLOCKS; ++i)
      if (i < of.dy_blocks) load_box(dy + i * BLOCK_BYTES, map_dy, arrived, pixel, k + CHANNELS * i, image);
#pragma unroll
    for (int i = 0; i < X_BLOCKS; ++i)
      if (i < of.x_blocks) load_box(x + i * BLOCK_BYTES, map_x, arrived, pixel, c + CHANNELS * i, image);
  });
}
#else
DEVICE void produce(const CUtensorMap* map_dy, const CUtensorMap* map_x, const WgradNhwcArguments& arg, const Tile& of, const Range& range,
                    const Ring& ring) {
  int c[X_BLOCKS];
  uint32_t offsets[X_BLOCKS];  // of a block's tap, packed as the loads take them: along w in 16 bits, h in 8, d in 8
#pragma unroll
  for (int i = 0; i < X_BLOCKS; ++i) {
    const Column column(arg, of.block + i);
    const Divided row(column.tap, arg.tap_s, arg.by_tap_s), slice(row.quotient, arg.tap_r, arg.by_tap_r);
    c[i] = of.bundle * (int)arg.columns + column.channel;
    offsets[i] = row.rest * (int)arg.dilation_w | slice.rest * (int)arg.dilation_h << 16 | slice.quotient * (int)arg.dilation_d << 24;
  }
  const int k = of.bundle * (int)arg.rows + of.row, rank = (int)arg.rank;
  Ring::Position at;
  fill_stages(ring, at, range.first, range.last, [&](int step, uint32_t dy, uint32_t arrived) {
    const uint32_t x = dy + DY_BLOCKS * BLOCK_BYTES;
    const LoadBase base(arg, step * BLOCK_K);
    barrier_expect(arrived, (of.dy_blocks + of.x_blocks) * BLOCK_BYTES);
#pragma unroll
    for (int i = 0; i < DY_BLOCKS; ++i)
      if (i < of.dy_blocks) load_box(dy + i * BLOCK_BYTES, map_dy, arrived, k + CHANNELS * i, step * BLOCK_K, 0);
#pragma unroll
    for (int i = 0; i < X_BLOCKS; ++i)
      if (i < of.x_blocks && rank == 0)
        load_box(x + i * BLOCK_BYTES, map_x, arrived, c[i], step * BLOCK_K, 0);
      else if (i < of.x_blocks)
        load_im2col(rank, x + i * BLOCK_BYTES, map_x, arrived, c[i], base, offsets[i] & 0xffff, offsets[i] >> 16 & 0xff, offsets[i] >> 24);
  });
}
#endif

// ---- sums to dw, or to a part of it: a warp writes every WARPS-th row

// Where a channel of x belongs: its number in its group, and the rows of the tile that belong to that group.
struct Own {
  int channel, first, end;
  DEVICE Own(const WgradNhwcArguments& arg, const Tile& of, int c) {
    const Divided group(c, arg.own_columns, arg.by_own_columns);
    channel = group.rest;
    first = group.quotient * (int)arg.own_rows - of.row;
    end = min(first + (int)arg.own_rows, BLOCK_M);
  }
};

// Stores [k][tap][c], a part or dw: a lane has EACH neighbouring channels of each block of columns, and LANES lanes fill a block's row.
template <int EACH, class T>
DEVICE void store_rows(const float* sums, const WgradNhwcArguments& arg, const Tile& of, T* to) {
  constexpr int LANES = CHANNELS / EACH, ROWS = 32 / LANES;  // lanes of a block's row; rows of a warp at once
  struct alignas(EACH * sizeof(T)) Neighbours {
    T v[EACH];
  };
  struct alignas(4 * (EACH < 4 ? EACH : 4)) Floats {
    float v[EACH];
  };
  const int lane = threadIdx.x % 32 % LANES, rows = min(BLOCK_M, (int)arg.rows - of.row);
  const long long pitch = arg.taps * arg.own_columns;
  for (int i = 0; i < of.x_blocks; ++i) {
    const Column column(arg, of.block + i);
    const int c = column.channel + EACH * lane;
    if (c >= (int)arg.columns) continue;
    const Own own(arg, of, c);
    T* const at = to + (of.bundle * arg.rows + of.row) * pitch + column.tap * arg.own_columns + own.channel;
#pragma unroll 4
    for (int down = threadIdx.x / LANES; down < rows; down += WARPS * ROWS) {
      const Floats sum = *(const Floats*)(sums + down * PITCH + CHANNELS * i + EACH * lane);
      Neighbours neighbours;
#pragma unroll
      for (int e = 0; e < EACH; ++e) neighbours.v[e] = from_float<T>(sum.v[e]);
      if (down >= own.first && down < own.end) store_word(at + down * pitch, *(const word<Neighbours>*)&neighbours);
    }
  }
}

// The same by 16 bytes, if a group's channels are a multiple of that.
template <class T> DEVICE void store_rows(const float* sums, const WgradNhwcArguments& arg, const Tile& of, T* to) {
  constexpr int WIDE = 16 / sizeof(T);
  if (arg.own_columns % WIDE == 0)
    store_rows<WIDE>(sums, arg, of, to);
  else
    store_rows<CHANNELS / 32>(sums, arg, of, to);
}

// Stores [k][c][tap]: neighbouring lanes have the same channel of the tile's blocks of columns, which are neighbouring taps of it.
DEVICE void store_taps(const float* sums, const WgradNhwcArguments& arg, const Tile& of, data_t* dw) {
  const int lane = threadIdx.x % 32, rows = min(BLOCK_M, (int)arg.rows - of.row);
  const long long pitch = arg.taps * arg.own_columns;
  for (int first = lane; first < BLOCK_N; first += 32) {
    const int block = first % X_BLOCKS, inside = first / X_BLOCKS;
    const Column column(arg, of.block + block);
    const int c = column.channel + inside;
    if (block >= of.x_blocks || c >= (int)arg.columns) continue;
    const Own own(arg, of, c);
    data_t* const at = dw + (of.bundle * arg.rows + of.row) * pitch + own.channel * arg.taps + column.tap;
#pragma unroll 4
    for (int down = threadIdx.x / 32; down < rows; down += WARPS)
      if (down >= own.first && down < own.end) at[down * pitch] = from_float<data_t>(sums[down * PITCH + CHANNELS * block + inside]);
  }
}

#if FLIPPED
// Computes one sum of this block's run without pixels outside dy: for channel `row` of x, loaded channel `channel` of dy, and tap `tap` of all.
DEVICE float sum_again(const FlippedArguments& flip, const Range& range, const data_t* x, const data_t* dy, int row, int channel, int tap) {
  const Divided s_of(tap, flip.tap_s, flip.by_tap_s), r_of(s_of.quotient, flip.tap_r, flip.by_tap_r);
  const int end = min(range.last * BLOCK_K, (int)flip.pixels);
  float sum = 0;
  for (int at = range.first * BLOCK_K; at < end; ++at) {
    const Divided image(at, flip.plane, flip.by_plane), slice(image.rest, flip.pq, flip.by_pq), line(slice.rest, flip.q, flip.by_q);
    const int d = slice.quotient + (int)flip.low_d + r_of.quotient * (int)flip.apart_d;
    int h = line.quotient + (int)flip.low_h + r_of.rest * (int)flip.apart_h, w = line.rest + (int)flip.low_w + s_of.rest * (int)flip.apart_w;
    if ((unsigned)d >= (unsigned)flip.d || (unsigned)h >= (unsigned)flip.h || (unsigned)w >= (unsigned)flip.w) continue;
    if (flip.folded_axes > 1) h = line.quotient;
    if (flip.folded_axes > 0) w = line.rest;
    const long long met = ((image.quotient * flip.size_d + d) * flip.size_h + h) * flip.size_w + w;
    sum = fmaf(to_float(x[(long long)at * flip.dense + row]), to_float(dy[met * flip.thin + channel]), sum);
    if (sum != sum) break;
  }
  return sum;
}

// Stores flipped tiles: a lane has a row and four neighbouring columns at once, a warp 32 rows.
template <class T>
DEVICE void store_flipped(const float* sums, const WgradNhwcArguments& arg, const FlippedArguments& flip, const Tile& of, const Range& range,
                          const data_t* x, const data_t* dy, T* to) {
  const int rows = min(BLOCK_M, (int)arg.rows - of.row);
  for (int first = threadIdx.x / 32 * 4; first < of.x_blocks * CHANNELS; first += 4 * WARPS) {
    const Column column(arg, of.block + first / CHANNELS);
    const int channel = column.channel + first % CHANNELS;
    for (int row = threadIdx.x % 32; row < rows; row += 32) {
      T* const at = to + (of.row + row) * flip.out_c;
      const float4 four = *(const float4*)(sums + row * PITCH + first);
      auto store = [&](int e, float sum, bool again = false) {
        const Divided fold(channel + e, flip.own, flip.by_own);
        const int tap = column.tap * (int)flip.folds + fold.quotient, taps = (int)(arg.taps * flip.folds);
        if (fold.quotient >= (int)flip.folds) return;  // past the last channel
        if (again && !(fabsf(sum) <= 3.4e38f)) sum = sum_again(flip, range, x, dy, of.row + row, channel + e, tap);
        at[fold.rest * flip.out_k + (taps - 1 - tap) * flip.out_tap] = from_float<T>(sum);
      };
      if (fabsf(four.x) + fabsf(four.y) + fabsf(four.z) + fabsf(four.w) <= 3.4e38f) {
        store(0, four.x);
        store(1, four.y);
        store(2, four.z);
        store(3, four.w);
      } else {
#pragma unroll 1
        for (int e = 0; e < 4; ++e) store(e, sums[row * PITCH + first + e], true);
      }
    }
  }
}
#endif

// ---- the multiplication

#if TALL
struct Sums {
  float of[2][64];
};

DEVICE void store_vector(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// A warp transposes a block of 32 positions x 32 channels where it lies, by quads of both: a lane loads channels 4 a to 4 a + 3 of positions 4 p to
// 4 p + 3, and stores the positions of these channels. Quads (a, p) and (p, a) are exchanged, and a ^ p is the same for 8 lanes, so these touch each
// other's quads alone. Neither their loads nor their stores use a bank twice.
DEVICE void transpose_block(uint32_t block) {
  const int lane = threadIdx.x % 32, a = lane % 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int p = a ^ (lane / 8 + 4 * i);
    const uint32_t from = block + p * 512, chunk = a ^ p % 2 * 4, to = block + a * 512, chunk_to = p ^ a % 2 * 4;
    uint4 v[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) v[m] = load_vector(from + m * 128 + (chunk ^ m) * 16);
    __syncwarp();
    store_vector(to + chunk_to * 16, v[0].x, v[1].x, v[2].x, v[3].x);
    store_vector(to + 128 + (chunk_to ^ 1) * 16, v[0].y, v[1].y, v[2].y, v[3].y);
    store_vector(to + 256 + (chunk_to ^ 2) * 16, v[0].z, v[1].z, v[2].z, v[3].z);
    store_vector(to + 384 + (chunk_to ^ 3) * 16, v[0].w, v[1].w, v[2].w, v[3].w);
  }
}

// Which four of a warp's 32 rows lanes 4 r to 4 r + 3 have: in this order 8 lanes use every bank once.
DEVICE int four(int r) { return r % 2 * 4 + r / 2; }

// Multiplies all stages. The warps transpose x for wgmma while the stage before is multiplied. dy comes through registers: a warp's rows are a block
// of it, and a lane's four channels of a position are the same element of four fragments.
DEVICE void multiply_stages(Sums& sums, const Range& range, const Ring& ring) {
  const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  Ring::Position at;
  auto prepare = [&](const Ring::Position& at) {
    ring.wait_full(at);
    transpose_block(ring.stage(at) + (DY_BLOCKS + warp) * BLOCK_BYTES);
    fence_for_bulk();  // wgmma reads shared memory as bulk copies do
    named_barrier(2, CONSUMER_THREADS);
  };
  if (range.first < range.last) prepare(at);
  for (int step = range.first; step < range.last; ++step) {
    const uint32_t stage = ring.stage(at);
    uint32_t a[STEPS][2][4];
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 v = load_vector(stage + warp * BLOCK_BYTES + (8 * k + c + 4 * j) * 128 + (four(r) ^ (c + 4 * j)) * 16);
        a[k][0][2 * j] = v.x;
        a[k][0][2 * j + 1] = v.y;
        a[k][1][2 * j] = v.z;
        a[k][1][2 * j + 1] = v.w;
      }
    const uint64_t x = wgmma_descriptor<128>(stage + DY_BLOCKS * BLOCK_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) wgmma_tf32(sums.of[i], a[k][i], x + k * 32 / 16, step > range.first || k > 0);
    wgmma_commit();
    Ring::Position coming = at;
    coming.next();
    if (step + 1 < range.last) prepare(coming);
    wgmma_wait<0>();
    ring.give_back(at);
    at = coming;
  }
  const float lost = lost_in(STEPS * (range.last - range.first));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    wgmma_arrived(sums.of[i]);
#pragma unroll
    for (int j = 0; j < 64; ++j) sums.of[i][j] = range.first < range.last ? with_lost(sums.of[i][j], lost) : 0;
  }
}

DEVICE void leave(const Sums& sums, float* to) {
  float* const first = to + (threadIdx.x / 32 * 32 + 4 * four(threadIdx.x % 32 / 4)) * PITCH + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int row = 0; row < 4; ++row)
#pragma unroll
    for (int i = 0; i < 16; ++i)
      *(float2*)(first + row * PITCH + 8 * i) = make_float2(sums.of[row / 2][4 * i + 2 * (row % 2)], sums.of[row / 2][4 * i + 2 * (row % 2) + 1]);
}
#elif TYPE == 32
// The sums of a warp's 32 rows and of its half of the consumer's columns: 32 of each block, in fragments of 16 x 8.
constexpr int WARP_BLOCKS = WGMMA_N / 64, SUMS = WARP_BLOCKS * 32;
struct Sums {
  float of[WARP_BLOCKS][2][4][4];
  DEVICE float& operator[](int i) { return of[i / 32][i / 16 % 2][i / 4 % 4][i % 4]; }
};

#if LIMBS == 2
// The second limb is kept so many times larger: then every normal number has one.
constexpr float LARGER = 512;
// Splits a float into the nearest TF32 number and LARGER times the rest, of which the tensor core takes the first bits. Neither limb of a finite number
// is Inf: a limb that would be Inf is the largest number instead. An Inf becomes that number and Inf, a NaN with all bits set becomes zero and NaN.
struct Limbs {
  uint32_t high, low;
  DEVICE explicit Limbs(uint32_t word) {
    float first;
    asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(first) : "f"(__uint_as_float((word + 0x1000) & ~0x1fffu)), "f"(__uint_as_float(0x7f7fe000)));
    high = __float_as_uint(first);
    low = __float_as_uint((__uint_as_float(word) - first) * LARGER);
  }
};
// The part of itself that a sum of 4 steps loses in the mean: what truncation loses, less what rounding gives. See truncation.cuh.
constexpr float PROMOTED = 0.67e-7f * 16 / 15;

// Multiplies a step of a block of 32 x 32.
DEVICE void multiply_limbs(float (&main)[2][4][4], float (&cross)[2][4][4], const uint32_t (&a)[2][4], const uint32_t (&b)[4][2]) {
  uint32_t a_high[2][4], a_low[2][4], b_high[4][2], b_low[4][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Limbs of_a(a[i / 4][i % 4]), of_b(b[i / 2][i % 2]);
    a_high[i / 4][i % 4] = of_a.high;
    a_low[i / 4][i % 4] = of_a.low;
    b_high[i / 2][i % 2] = of_b.high;
    b_low[i / 2][i % 2] = of_b.low;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) multiply<float>(main[i / 4][i % 4], a_high[i / 4], b_high[i % 4][0], b_high[i % 4][1]);
#pragma unroll
  for (int i = 0; i < 8; ++i) multiply<float>(cross[i / 4][i % 4], a_low[i / 4], b_high[i % 4][0], b_high[i % 4][1]);
#pragma unroll
  for (int i = 0; i < 8; ++i) multiply<float>(cross[i / 4][i % 4], a_high[i / 4], b_low[i % 4][0], b_low[i % 4][1]);
}
#endif

DEVICE void clear(Sums& sums) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0;
}

// Multiplies all stages.
DEVICE void multiply_stages(Sums& sums, const Range& range, const Ring& ring) {
  const int consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // the block of this warp's rows, and the first block of its columns; the offsets of a lane's channels of its two positions in a block's first eight rows
  const int dy_block = 2 * consumer + warp % 2, x_block = warp / 2 * WARP_BLOCKS;
  uint32_t place[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) place[i] = (2 * (lane % 4) + i) * 128 + (lane / 4 ^ (2 * (lane % 4) + i)) * 16;
  clear(sums);
#if LIMBS == 2
  Sums main, cross;
  clear(cross);
#endif
  Ring::Position at;
  for (int step = range.first; step < range.last; ++step) {
    const uint32_t stage = ring.stage(at);
    ring.wait_full(at);
    uint4 dy[2][2], x[2][2];  // four channels of two positions: of one product, and of the next one, loaded meanwhile
    auto load = [&](int number) {
      const uint32_t at = stage + number / WARP_BLOCKS * STEP_BYTES, block = (DY_BLOCKS + x_block + number % WARP_BLOCKS) * BLOCK_BYTES;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (number % WARP_BLOCKS == 0) dy[number / WARP_BLOCKS % 2][i] = load_vector(at + dy_block * BLOCK_BYTES + place[i]);
        x[number % 2][i] = load_vector(at + block + place[i]);
      }
    };
    load(0);
#if LIMBS == 2
    clear(main);
#endif
#pragma unroll
    for (int number = 0; number < STEPS * WARP_BLOCKS; ++number) {
      if (number + 1 < STEPS * WARP_BLOCKS) load(number + 1);
      const uint4(&right)[2] = x[number % 2];
      const uint32_t b[4][2] = {{right[0].x, right[1].x}, {right[0].y, right[1].y}, {right[0].z, right[1].z}, {right[0].w, right[1].w}};
      const uint4(&left)[2] = dy[number / WARP_BLOCKS % 2];
      const uint32_t a[2][4] = {{left[0].x, left[0].y, left[1].x, left[1].y}, {left[0].z, left[0].w, left[1].z, left[1].w}};
#if LIMBS == 2
      multiply_limbs(main.of[number % WARP_BLOCKS], cross.of[number % WARP_BLOCKS], a, b);
#else
#pragma unroll
      for (int i = 0; i < 8; ++i) multiply<float>(sums.of[number % WARP_BLOCKS][i / 4][i % 4], a[i / 4], b[i % 4][0], b[i % 4][1]);
#endif
    }
#if LIMBS == 2
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] += main[i];
#endif
    __syncwarp();
    ring.give_back(at);
    at.next();
  }
#if LIMBS == 2
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const float more = with_lost(cross[i], sums[i], LARGER * PROMOTED);
    if (fabsf(sums[i]) < INFINITY) sums[i] = fmaf(more, 1 / LARGER, sums[i]);  // after an Inf the cross products may have either sign
  }
#else
  const float lost = lost_in(STEPS * (range.last - range.first));
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = with_lost(sums[i], lost);
#endif
}

DEVICE void leave(const Sums& sums, float* to) {
  const int consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float* const first = to + (64 * consumer + 32 * (warp % 2) + 4 * (lane / 4)) * PITCH + (warp / 2 * WARP_BLOCKS * 32 + 8 * (lane % 4));
#pragma unroll
  for (int block = 0; block < WARP_BLOCKS; ++block)
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // a row of a pair, of a half, and four columns
      const float(&of)[4][4] = sums.of[block][i / 4];
      const int e = i % 4;
      *(float4*)(first + (2 * (i / 4) + e / 2) * PITCH + 32 * block + 4 * (e % 2)) = make_float4(of[0][e], of[1][e], of[2][e], of[3][e]);
    }
}
#else
struct Sums {
  float of[PRODUCTS][WGMMA_N / 2];
};

// Multiplies all stages.
DEVICE void multiply_stages(Sums& sums, const Range& range, const Ring& ring) {
  const int consumer = threadIdx.x / 128, down = consumer % DOWN, across = consumer / DOWN;
  Ring::Position at;
  auto& sum = sums.of;
  multiply_stages<BEHIND>(ring, at, range.first, range.last, sum, [&](uint32_t stage, bool fresh) {
    auto described = [](uint32_t at) { return PLANES ? wgmma_descriptor<128>(at) : wgmma_mn_major_descriptor(at); };
    const uint64_t dy = described(stage + down * PRODUCTS * BLOCK_BYTES);
    const uint64_t x = described(stage + (DY_BLOCKS + across * (WGMMA_N / 64)) * BLOCK_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int i = 0; i < PRODUCTS; ++i)
        wgmma<TYPE, !PLANES, !PLANES>(sum[i], dy + (i * BLOCK_BYTES + k * STEP_BYTES) / 16, x + k * STEP_BYTES / 16, !(fresh && k == 0));
  });
  const float lost = lost_in(STEPS * (range.last - range.first));  // long sums lose more than rounding to 16 bits hides
#pragma unroll
  for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
    for (int j = 0; j < WGMMA_N / 2; ++j) sum[i][j] = range.first < range.last ? with_lost(sum[i][j], lost) : 0;
}

DEVICE void leave(const Sums& sums, float* to) {
  const int consumer = threadIdx.x / 128, down = consumer % DOWN, across = consumer / DOWN;
#pragma unroll
  for (int i = 0; i < PRODUCTS; ++i) stage_accumulators<PITCH>(sums.of[i], to + (down * PRODUCTS + i - consumer) * 64 * PITCH + across * WGMMA_N);
}
#endif

#if FLIPPED
#define IF_FLIPPED(...) __VA_ARGS__
#else
#define IF_FLIPPED(...)
#endif

DEVICE void consume(const WgradNhwcArguments& arg, const Tile& of, const Range& range, const Ring& ring, float* sums,
                    void* to IF_FLIPPED(, const data_t* x, const data_t* dy, const FlippedArguments& flip)) {
  Sums summed;
  multiply_stages(summed, range, ring);
  named_barrier(1, CONSUMER_THREADS);  // the ring has been read
  leave(summed, sums);
  named_barrier(1, CONSUMER_THREADS);  // all sums are there
#if FLIPPED
  if (arg.splits > 1)
    store_flipped(sums, arg, flip, of, range, x, dy, (float*)to + of.split * arg.size);
  else
    store_flipped(sums, arg, flip, of, range, x, dy, (data_t*)to);
#else
  if (arg.splits > 1)
    store_rows(sums, arg, of, (float*)to + of.split * arg.size);
  else if (arg.taps_fastest)
    store_taps(sums, arg, of, (data_t*)to);
  else
    store_rows(sums, arg, of, (data_t*)to);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, SHARES ? 2 : 1)
    hopper_wgrad(const __grid_constant__ CUtensorMap map_dy, const __grid_constant__ CUtensorMap map_x, void* __restrict__ to,
                    IF_FLIPPED(const data_t* __restrict__ x, const data_t* __restrict__ dy,)
                    const __grid_constant__ WgradNhwcArguments arg IF_FLIPPED(, const __grid_constant__ FlippedArguments flip)) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Ring ring(dynamic, barriers);
  float* const sums = (float*)(dynamic + (ring.stages - shared_address(dynamic)));
  begin_block(ring, 1, CONSUMERS, [&] {
    prefetch_map(&map_dy);
    prefetch_map(&map_x);
  });
  const Tile of(arg);
  const Range range(arg, of);
  if (threadIdx.x < CONSUMER_THREADS) {
    if constexpr (PRODUCTS == 2) registers_up<TALL ? 208 : 224>();
    consume(arg, of, range, ring, sums, to IF_FLIPPED(, x, dy, flip));
  } else {
    if constexpr (PRODUCTS == 2) registers_down<TALL ? 40 : 56>();
    if (threadIdx.x == CONSUMER_THREADS) produce(&map_dy, &map_x, arg, of, range, ring);
  }
}
