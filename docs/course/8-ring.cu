// 8-ring.cu: the same product, fed by TMA through a ring: y[m, n] = sum over k of a[m, k] * b[n, k].
//
// One thread, the producer, asks the Tensor Memory Accelerator for boxes of a and b. They arrive swizzled, and what lies outside arrives as zeros. It
// works ahead: while the consumers multiply a stage of the ring, the next ones are under way. Each stage has two barriers: full, when its bytes have
// arrived, and empty, when all consumers have read it (hopper/ring.cuh).
//
// Mapping  block -> BLOCK_M x BLOCK_N of y; a consumer warpgroup for each 64 rows, and behind them a warp, of which one thread loads.
// Shared   a ring of STAGES stages of 64 of k: BLOCK_M rows of a, then BLOCK_N rows of b, 128 bytes each, swizzled.
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define STAGES 4
#define TYPE 16  // 16 half, 17 bfloat16
#endif
#define WGMMA_N BLOCK_N
#include "hopper/skeleton.cuh"

constexpr int CONSUMERS = BLOCK_M / 64, THREADS = 128 * CONSUMERS + 32;
constexpr int A_BYTES = 128 * BLOCK_M, STAGE_BYTES = A_BYTES + 128 * BLOCK_N;
typedef StageRing<STAGES, STAGE_BYTES> Ring;

struct Product {
  long long m, n, steps, tiles_m, tiles, each;  // rows of a and of b; stages of k; tiles along m, and all; the stages of a part
};

struct Tile {
  int row, column, part, first, last;  // stages [first, last) of k
  DEVICE Tile(const Product& arg) : part(blockIdx.x / (int)arg.tiles), first(0), last((int)arg.steps) {
    const int tile = blockIdx.x % (int)arg.tiles;
    row = tile % (int)arg.tiles_m * BLOCK_M;
    column = tile / (int)arg.tiles_m * BLOCK_N;
    // exercise: blocks of other parts compute the same tile, each `each` stages of k; set `first` and `last`
  }
};

DEVICE void produce(const CUtensorMap* map_a, const CUtensorMap* map_b, const Ring& ring, const Tile& of) {
  Ring::Position at;
  fill_stages(ring, at, of.first, of.last, [&](int step, uint32_t stage, uint32_t arrived) {
    barrier_expect(arrived, STAGE_BYTES);
    load_box(stage, map_a, arrived, 64 * step, of.row, 0);
    load_box(stage + A_BYTES, map_b, arrived, 64 * step, of.column, 0);
  });
}

DEVICE void consume(const Product& arg, const Ring& ring, const Tile& of, float* y) {
  Ring::Position at;
  float sums[1][BLOCK_N / 2];
  multiply_stages<1>(ring, at, of.first, of.last, sums, [&](uint32_t stage, bool fresh) {
    const uint64_t a = wgmma_descriptor<128>(stage + threadIdx.x / 128 * 64 * 128), b = wgmma_descriptor<128>(stage + A_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<TYPE, 0, 0>(sums[0], a + 2 * k, b + 2 * k, !(fresh && k == 0));
  });
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) {
    const int m = of.row + threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8, n = of.column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (m < (int)arg.m && n < (int)arg.n) y[(of.part * arg.m + m) * arg.n + n] = sums[0][i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fed_by_a_ring(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, float* __restrict__ y,
                  const __grid_constant__ Product arg) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Ring ring(dynamic, barriers);
  const Tile of(arg);
  begin_block(ring, 1, CONSUMERS, [&] {
    prefetch_map(&map_a);
    prefetch_map(&map_b);
  });
  if (threadIdx.x < 128 * CONSUMERS) consume(arg, ring, of, y);
  else if (threadIdx.x == 128 * CONSUMERS) produce(&map_a, &map_b, ring, of);
}
