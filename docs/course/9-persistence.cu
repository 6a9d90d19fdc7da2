// 9-persistence.cu: the product of step 8 by blocks that stay: y[m, n] = sum over k of a[m, k] * b[n, k].
//
// A block for each tile begins with an empty ring, and its loads stop while it stores. Here as many blocks as there are multiprocessors take tile after tile:
// the producer is some stages ahead, so it loads the next tile while the consumers store this one. `run_tiles` (hopper/skeleton.cuh) is that loop.
// The kernel is what is left: a struct with its tile, `load`, `multiply` and `finish`.
//
// Mapping  block -> tiles blockIdx.x, + gridDim.x, ... of BLOCK_M x BLOCK_N; a consumer warpgroup for each 64 rows, and behind them a warp that loads.
// Shared   a ring of STAGES stages of 64 of k: BLOCK_M rows of a, then BLOCK_N rows of b, 128 bytes each, swizzled.
// Order    tiles of the same rows run side by side, so that all but one of them find a in the L2 cache.
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 256
#define STAGES 4
#define TYPE 16  // 16 half, 17 bfloat16
#endif
#define WGMMA_N BLOCK_N
#include "hopper/skeleton.cuh"

struct Product {
  long long m, n, steps, tiles_n, each, tiles;  // rows of a and of b; stages of k; tiles along n, of a pair of matrices, and of all
};

struct Kernel {
  static constexpr int CONSUMERS = BLOCK_M / 64, UP = 0, DOWN = 0, A_BYTES = 128 * BLOCK_M, STAGE_BYTES = A_BYTES + 128 * BLOCK_N;
  typedef StageRing<STAGES, STAGE_BYTES> Ring;
  typedef float Sums[1][BLOCK_N / 2];
  const Product& arg;
  const CUtensorMap *map_a, *map_b;
  float* y;
  struct Tile {
    int row, column, batch = 0;
    DEVICE Tile(const Kernel& of, int number) {
      const int tile = number % (int)of.arg.each;
      column = tile % (int)of.arg.tiles_n * BLOCK_N;
      row = tile / (int)of.arg.tiles_n * BLOCK_M;
      // exercise: the maps have more pairs of matrices along their third axis; which one is this tile's `batch`?
    }
  };
  DEVICE void prefetch() const { prefetch_maps(map_a, map_b); }
  DEVICE void load(const Tile& of, int step, uint32_t stage, uint32_t arrived) const {
    barrier_expect(arrived, STAGE_BYTES);
    load_box(stage, map_a, arrived, 64 * step, of.row, of.batch);
    load_box(stage + A_BYTES, map_b, arrived, 64 * step, of.column, of.batch);
  }
  DEVICE void multiply(Sums& sums, uint32_t stage, bool fresh) const {  // the loop of step 8
    multiply_stage<TYPE, StageOperand<false>, StageOperand<false>>(sums, stage + threadIdx.x / 128 * 64 * 128, 0, stage + A_BYTES, fresh);
  }
  DEVICE void finish(const Sums& sums, const Tile& of) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      const int m = of.row + threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8, n = of.column + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (m < (int)arg.m && n < (int)arg.n) y[(of.batch * arg.m + m) * arg.n + n] = sums[0][i];
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS_OF<Kernel>, 1)
    tile_after_tile(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, float* __restrict__ y,
                    const __grid_constant__ Product arg) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Kernel::Ring ring(dynamic, barriers);
  Kernel kernel = {arg, &map_a, &map_b, y};
  run_tiles(kernel, ring);
}
