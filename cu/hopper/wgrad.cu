// wgrad.cu: wgrad from channels-last arrays as they lie, on Hopper's tensor cores: 16 bits, and float32 in TF32 or by three products of TF32.
//
//   dw[k, c, tap] = sum over positions of dy[position, k] * x[position + tap, c]
//   gemm m: channel of dy | gemm n: (tap, channel of x in blocks of CHANNELS) | gemm k: position (n,o,p,q) of dy
//
// Nothing is packed: a row that TMA loads is CHANNELS channels of a position, 128 bytes. wgmma takes such 16-bit operands, whose k is not the fastest
// axis, but not TF32 operands: for those, warps load fragments from the same rows, and TMA rounds float32 on the way.
//
// Planes   PLANES: 1x1 filters without stride on NCHW arrays as they lie, 16 bits and TF32. A row that TMA loads is BLOCK_K pixels of a channel of an image,
//          so wgmma's operands are K-major, as it takes them of either type: wgrad_planes.cuh.
//
// Mapping  block -> a tile of BLOCK_M x BLOCK_N sums over one of `splits` runs of positions.
//          A block has DOWN x ACROSS consumer warpgroups, each with PRODUCTS x 64 rows of WGMMA_N columns, and behind them one more warp. One thread
//          of that, the producer, loads dy and x. If a consumer has 2 x 64 rows, the producer's warp is a whole warpgroup, which hands most of
//          its registers over.
// Shared   a ring of STAGES stages (ring.cuh) of BLOCK_K positions: blocks of CHANNELS channels of dy, rows of 128 bytes, swizzled, then such blocks
//          of x. When the ring has been read, the tile's sums take its place, pitch BLOCK_N + 8 floats, and are written from there. They may need
//          more room than the ring.
// Loads    A stage is dy at BLOCK_K consecutive positions, and x at the pixels that these meet by a block's tap: wgrad_positions.cuh.
// Border   BORDERED: of an image's own pixels. Positions come region by region, and each region has maps of its own: wgrad_regions.cuh.
// Groups   A group pack is neighbouring groups whose channels of x fit a block, or one group. Products of channels of two different groups are not
//          written.
// Ends     Blocks of channels past the last one are not loaded. What lies in their place, and channels of the next group pack, only reach sums that
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
// In parts   wgrad_positions.cuh, wgrad_planes.cuh, wgrad_regions.cuh: what a stage loads | wgrad_tall.cuh, wgrad_fragments.cuh: how float32 is multiplied
//            wgrad_store.cuh, wgrad_flipped.cuh: from sums to dw
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
#ifndef BORDERED
#define BORDERED 0   // regions of a launch: 9 or 25
#endif
#include "mma/fragments.cuh"
#include "hopper/skeleton.cuh"

typedef element<TYPE> data_t;

constexpr int CHANNELS = 128 / (int)sizeof(data_t);                                // channels of a block
constexpr int BLOCK_K = CHANNELS, STEPS = TYPE == 32 ? BLOCK_K / 8 : BLOCK_K / 16;  // positions of a stage; tensor-core steps in one
#define LAST (TYPE == 32 && !PLANES)  // float32 with its channels last, which wgmma does not take as it lies
#define TALL (LAST && BLOCK_M == 128 && BLOCK_N == 128)
constexpr int ACROSS = BLOCK_N / WGMMA_N, DOWN = BLOCK_M == 256 ? 2 : ACROSS > 1 || TALL ? 1 : BLOCK_M / 64, PRODUCTS = BLOCK_M / 64 / DOWN;
constexpr bool SHARES = TALL || (BLOCK_M == 64 && BLOCK_N <= 192);  // two blocks fit a multiprocessor
constexpr int CONSUMERS = DOWN * ACROSS, CONSUMER_THREADS = 128 * CONSUMERS, THREADS = CONSUMER_THREADS + (PRODUCTS == 2 ? 128 : 32);
constexpr int BLOCK_BYTES = BLOCK_K * 128, STEP_BYTES = PLANES ? 32 : BLOCK_BYTES / STEPS;  // bytes of CHANNELS channels of a stage, and of a step
constexpr int DY_BLOCKS = BLOCK_M / CHANNELS, X_BLOCKS = BLOCK_N / CHANNELS, STAGE_BYTES = (DY_BLOCKS + X_BLOCKS) * BLOCK_BYTES;
constexpr int ROWS_64 = 64 * 128;                               // bytes of 64 rows of a product in a stage
constexpr int BEHIND = STAGES > 2 ? 1 : 0;                      // stages whose products may still run while the next one is waited for
constexpr int PITCH = BLOCK_N + 8;                              // floats of a row of sums
constexpr int WARPS = 4 * CONSUMERS;                            // warps that write
constexpr int REGIONS = BORDERED ? BORDERED : 1;                // of the launch, each with maps of its own
static_assert(BLOCK_M % 64 == 0 && BLOCK_N % WGMMA_N == 0 && WGMMA_N % 64 == 0, "whole warpgroups and blocks of channels");
static_assert(!PLANES || !FLIPPED, "pixels of either");
static_assert(LIMBS == 1 || (LAST && WGMMA_N == 64), "three sums of a result fit the registers");
static_assert(PRODUCTS <= 2 && CONSUMERS <= 3 && (!LAST || ACROSS == 1), "as many registers as there are");

// by_n is the divisor n, prepared (division.cuh).
struct WgradNhwcArguments : LoadedPixels {
  long long tiles_m, by_tiles_m, tiles_n, by_tiles_n;         // tiles of a group pack
  long long group_packs, by_group_packs, splits;              // packs of groups; runs of positions
  long long stages, part;                                     // stages of all positions, and of a run
  long long rows, columns;                                    // channels of dy, and of x, of a group pack
  long long own_rows, own_columns, by_own_columns;            // channels of dy, and of x, of a group
  long long column_blocks;                                    // blocks of CHANNELS channels of a group pack of x, for all taps
  long long inner, by_inner, taps_inner;                      // neighbouring blocks: of the channels of a tap or, with taps_inner, of the taps of some channels
  long long taps, tap_r, by_tap_r, tap_s, by_tap_s;           // taps: all; along r and s
  long long dilation_d, dilation_h, dilation_w;               // offset in x from one tap to the next
  long long spatial_dims;                                     // spatial axes of the loads; 0: position n of dy reads pixel n of x
  long long size, taps_fastest;                               // elements of dw; whether its taps are fastest, or its channels
  long long image_stages, by_image_stages;                    // PLANES: stages of an image
};

// Maps of dy and of x, for each region.
struct Maps {
  CUtensorMap dy[REGIONS], x[REGIONS];
};

// What a block computes: of group pack `pack`, the rows from `row` on and the columns of the blocks from `block` on; dy_blocks and x_blocks are real.
struct Tile {
  int split, pack, row, block, dy_blocks, x_blocks;
  DEVICE Tile(const WgradNhwcArguments& arg) {
    const Divided across(blockIdx.x, arg.tiles_n, arg.by_tiles_n), down(across.quotient, arg.tiles_m, arg.by_tiles_m);
    const Divided of_pack(down.quotient, arg.group_packs, arg.by_group_packs);
    split = of_pack.quotient;
    pack = of_pack.rest;
    row = down.rest * BLOCK_M;
    block = across.rest * X_BLOCKS;
    dy_blocks = min(((int)arg.rows - row + CHANNELS - 1) / CHANNELS, DY_BLOCKS);
    x_blocks = min((int)arg.column_blocks - block, X_BLOCKS);
  }
};

// A block of columns: its tap, and its first channel in the group pack.
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

// How a stage is loaded. A header has what its loads need of a tap (Tap), of the launch (Loads) and of a stage (StageLoads).
#if BORDERED
#define IF_REGIONS(...) __VA_ARGS__
#include "hopper/wgrad_regions.cuh"
#elif PLANES
#include "hopper/wgrad_planes.cuh"
#else
#include "hopper/wgrad_positions.cuh"
#endif
#ifndef IF_REGIONS
#define IF_REGIONS(...)
#endif

DEVICE void produce(const Maps& maps, const WgradNhwcArguments& arg, IF_REGIONS(const Regions& regions,) const Tile& of, const StageRange& range,
                    const Ring& ring) {
  int c[X_BLOCKS];
  Tap taps[X_BLOCKS];
#pragma unroll
  for (int i = 0; i < X_BLOCKS; ++i) {
    const Column column(arg, of.block + i);
    const Divided row(column.tap, arg.tap_s, arg.by_tap_s), slice(row.quotient, arg.tap_r, arg.by_tap_r);
    c[i] = of.pack * (int)arg.columns + column.channel;
    taps[i].find(arg, row.rest, slice.rest, slice.quotient);
  }
  const int k = of.pack * (int)arg.rows + of.row;
  Loads loads{maps, arg IF_REGIONS(, regions)};
  Ring::Position at;
  fill_stages(ring, at, range.first, range.last, [&](int step, uint32_t dy, uint32_t arrived) {
    const uint32_t x = dy + DY_BLOCKS * BLOCK_BYTES;
    const StageLoads stage(loads, step);
    barrier_expect(arrived, (of.dy_blocks + of.x_blocks) * BLOCK_BYTES);
#pragma unroll
    for (int i = 0; i < DY_BLOCKS; ++i) stage.load_dy(i < of.dy_blocks, dy + i * BLOCK_BYTES, arrived, k + CHANNELS * i);
#pragma unroll
    for (int i = 0; i < X_BLOCKS; ++i) stage.load_x(i < of.x_blocks, x + i * BLOCK_BYTES, arrived, c[i], taps[i]);
  });
}

// ---- sums to dw, or to a part of it
#include "hopper/wgrad_store.cuh"
#if FLIPPED
#include "hopper/wgrad_flipped.cuh"
#endif

// ---- the multiplication

#if TALL
#include "hopper/wgrad_tall.cuh"
#elif LAST
#include "hopper/wgrad_fragments.cuh"
#else
typedef float Sums[PRODUCTS][WGMMA_N / 2];

// Multiplies all stages.
DEVICE void multiply_stages(Sums& sums, const StageRange& range, const Ring& ring) {
  const int consumer = threadIdx.x / 128, down = consumer % DOWN, across = consumer / DOWN;
  Ring::Position at;
  multiply_stages<BEHIND>(ring, at, range.first, range.last, sums, [&](uint32_t stage, bool fresh) {
    typedef StageOperand<!PLANES> Operand;
    const uint32_t x = stage + (DY_BLOCKS + across * (WGMMA_N / CHANNELS)) * BLOCK_BYTES;
    multiply_stage<TYPE, Operand, Operand>(sums, stage + down * PRODUCTS * ROWS_64, ROWS_64, x, fresh);
  });
  const float lost = lost_in(STEPS * range.count());  // long sums lose more than rounding to 16 bits hides
  each(sums, [&](float& sum) { sum = range.count() > 0 ? with_lost(sum, lost) : 0; });
}

DEVICE void leave(const Sums& sums, float* to) {
  const int consumer = threadIdx.x / 128, down = consumer % DOWN, across = consumer / DOWN;
#pragma unroll
  for (int i = 0; i < PRODUCTS; ++i) stage_accumulators<PITCH>(sums[i], to + (down * PRODUCTS + i - consumer) * 64 * PITCH + across * WGMMA_N);
}
#endif

#if FLIPPED
#define IF_FLIPPED(...) __VA_ARGS__
#else
#define IF_FLIPPED(...)
#endif

extern "C" __global__ void __launch_bounds__(THREADS, SHARES ? 2 : 1)
    hopper_wgrad(const __grid_constant__ Maps maps, void* __restrict__ to, IF_FLIPPED(const data_t* __restrict__ x, const data_t* __restrict__ dy,)
                 const __grid_constant__ WgradNhwcArguments arg IF_FLIPPED(, const __grid_constant__ FlippedArguments flip)
                 IF_REGIONS(, const __grid_constant__ Regions regions)) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Ring ring(dynamic, barriers);
  float* const sums = (float*)(dynamic + (ring.stages - shared_address(dynamic)));
  begin_block(ring, 1, CONSUMERS, [&] {
    if (!BORDERED) {
      prefetch_map(maps.dy);
      prefetch_map(maps.x);
    }
  });
  const Tile of(arg);
  const StageRange range(of.split, (int)arg.part, (int)arg.stages);
  if (threadIdx.x < CONSUMER_THREADS) {
    if constexpr (PRODUCTS == 2) registers_up<TALL ? 208 : 224>();
    Sums summed;
    multiply_stages(summed, range, ring);
    named_barrier(1, CONSUMER_THREADS);  // the ring has been read
    leave(summed, sums);
    named_barrier(1, CONSUMER_THREADS);  // all sums are there
#if FLIPPED
    auto store = [&](auto* to) { store_flipped(sums, arg, flip, of, range, x, dy, to); };
#else
    auto store = [&](auto* to) { store_rows(sums, arg, of, to); };
#endif
    if (arg.splits > 1) store((float*)to + of.split * arg.size);
    else if (!FLIPPED && arg.taps_fastest) store_taps(sums, arg, of, (data_t*)to);
    else store((data_t*)to);
  } else {
    if constexpr (PRODUCTS == 2) registers_down<TALL ? 40 : 56>();
    if (threadIdx.x != CONSUMER_THREADS) return;
    produce(maps, arg, IF_REGIONS(regions,) of, range, ring);
  }
}
