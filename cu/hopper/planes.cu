// planes.cu: 1x1 convolutions of 16-bit NCHW arrays as they lie, without stride, on Hopper's tensor cores, and their dgrad.
//
//   y[image, m, pixel] = sum over c of w[m, c] * x[image, c, pixel], and finish.cuh
//   gemm m: output channel | gemm n: pixel of an image | gemm k: input channel, in stages of 64
//
// Mapping  block: persistent, tiles of BLOCK_M channels x BLOCK_N pixels of an image, those of the same pixels side by side. A consumer warpgroup has
//          OWN_M channels of all pixels of the tile, or, if BLOCK_M is 64 and BLOCK_N is more, of half of them. Two blocks of small tiles share a
//          multiprocessor. Three consumers need more registers than a launch gives so many threads, so the producer is a warpgroup, which hands over its own.
// Shared   a ring of STAGES stages (ring.cuh): BLOCK_N / 64 blocks of x, 64 rows of 64 pixels each, then w; rows of 128 bytes, swizzled. Behind the
//          ring lie the consumers' results (plane_store.cuh).
// x        MN-major, which wgmma takes of 16-bit operands. Blocks of pixels past the end of an image are not loaded.
// w        K-major: 64 input channels of each output channel, as a filter of fprop lies. W_MN_MAJOR, for dgrad: 64 output channels of each
//          input channel. Elements past the last pixel or channel of either arrive as zeros.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/planes.cu
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 192
#define WGMMA_N 192  // pixels of a consumer
#define STAGES 4
#define TYPE 17       // of the arrays: 16 half, 17 bfloat16
#define W_MN_MAJOR 0  // the output channels of w are neighbours
#define OWN_M 64      // channels of a consumer
#define RESULTS 2     // times 64 channels of results for which a consumer has room
#endif
#include "hopper/plane_store.cuh"
#include "hopper/skeleton.cuh"

typedef element<TYPE> data_t;

constexpr int BLOCK = 64 * 128;  // bytes of 64 rows
constexpr int X_BLOCKS = BLOCK_N / 64, W_BLOCKS = BLOCK_M / 64, ROWS = OWN_M / 64;
static_assert(BLOCK_M % OWN_M == 0 && BLOCK_N % WGMMA_N == 0 && (BLOCK_M == 64 || BLOCK_N == WGMMA_N), "consumers side by side, or one below the other");

// by_n is the divisor n, prepared (division.cuh).
struct PlanesProduct : Finishing {
  long long tiles, tiles_m, by_tiles_m, tiles_n, by_tiles_n;      // all tiles; those along the channels; along the pixels of an image
  long long steps, rows, plane;                                   // stages of a sum; output channels; pixels of an image
};

struct Planes {
  static constexpr int CONSUMERS = BLOCK_M / OWN_M * (BLOCK_N / WGMMA_N), UP = CONSUMERS == 3 ? 160 : 0, DOWN = CONSUMERS == 3 ? 32 : 0;
  typedef StageRing<STAGES, (X_BLOCKS + W_BLOCKS) * BLOCK> Ring;
  typedef float Sums[ROWS][WGMMA_N / 2];
  const PlanesProduct& arg;
  const CUtensorMap *map_x, *map_w;
  PlaneStore<data_t, WGMMA_N, RESULTS> store;
  struct Tile {
    int image, pixel, channel, x_blocks, w_blocks;  // blocks that there are of x and w
    DEVICE Tile(const Planes& of, int number) {
      const Divided down(number, of.arg.tiles_m, of.arg.by_tiles_m), across(down.quotient, of.arg.tiles_n, of.arg.by_tiles_n);
      channel = down.rest * BLOCK_M, pixel = across.rest * BLOCK_N, image = across.quotient;
      x_blocks = min(((int)of.arg.plane - pixel + 63) / 64, X_BLOCKS), w_blocks = min(((int)of.arg.rows - channel + 63) / 64, W_BLOCKS);
    }
  };
  DEVICE void prefetch() const { prefetch_maps(map_x, map_w, store.map_y); }
  DEVICE void load(const Tile& of, int step, uint32_t stage, uint32_t arrived) const {
    barrier_expect(arrived, (of.x_blocks + of.w_blocks) * BLOCK);
#pragma unroll
    for (int i = 0; i < X_BLOCKS; ++i)
      if (i < of.x_blocks) load_box(stage + i * BLOCK, map_x, arrived, of.pixel + 64 * i, 64 * step, of.image);
#pragma unroll
    for (int i = 0; i < W_BLOCKS; ++i) {
      const int channel = of.channel + 64 * i;
      if (i < of.w_blocks) load_box(stage + (X_BLOCKS + i) * BLOCK, map_w, arrived, W_MN_MAJOR ? channel : 64 * step, W_MN_MAJOR ? 64 * step : channel, 0);
    }
  }
  // a consumer's first channels and first pixels, in blocks of a tile
  static DEVICE int down() { return BLOCK_M == 64 ? 0 : threadIdx.x / 128 * ROWS; }
  static DEVICE int across() { return BLOCK_M == 64 ? threadIdx.x / 128 * (WGMMA_N / 64) : 0; }
  DEVICE void multiply(Sums& sums, uint32_t stage, bool fresh) const {
    multiply_stage<TYPE, StageOperand<W_MN_MAJOR>, StageOperand<true>>(sums, stage + (X_BLOCKS + down()) * BLOCK, BLOCK, stage + across() * BLOCK, fresh);
  }
  DEVICE void finish(const Sums& sums, const Tile& of) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) store.finish(arg, sums[i], of.image, of.channel + 64 * (down() + i), of.pixel + 64 * across());
  }
};

extern "C" __global__ void __launch_bounds__(THREADS_OF<Planes>, BLOCK_M * BLOCK_N <= 64 * 128 ? 2 : 1)
    hopper_planes(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_y,
                const data_t* __restrict__ bias, const data_t* __restrict__ scale, const data_t* residual, const __grid_constant__ PlanesProduct arg) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Planes::Ring ring(dynamic, barriers);
  Planes planes = {arg, &map_x, &map_w, {&map_y, ring.behind(dynamic), scale, bias, residual}};
  run_tiles(planes, ring);
}
