// 10-im2col.cu: a convolution is the product of step 9 with another load: y[pixel, k] = sum over taps and c of x[pixel + tap, c] * w[k, tap, c].
//
// Channels last, 16 bits. A row of the product is a pixel of y, and its columns are the filters. A stage of the sum is 64 channels of one tap. TMA's
// im2col mode loads what a stage needs: the 64 channels of BLOCK_M neighbouring pixels of y, each moved by the tap. It walks over the ends of rows
// and images by itself, and where the window reaches beyond x it fills in zeros. So im2col is never stored: there is a load for each stage, and all
// else is as in step 9.
//
// Mapping  block -> tiles blockIdx.x, + gridDim.x, ... of BLOCK_M pixels x BLOCK_N filters; consumers and producer as in step 9.
// Shared   a ring of STAGES stages: BLOCK_M rows of 64 channels of x, then BLOCK_N rows of w, 128 bytes each, swizzled.
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 256
#define STAGES 4
#define TYPE 16  // 16 half, 17 bfloat16
#endif
#define WGMMA_N BLOCK_N
#include "hopper/skeleton.cuh"

struct Convolution {
  long long pixels, filters, channel_blocks, taps_s, steps;  // pixels of y; filters; blocks of 64 channels; columns of the filter; stages of a sum
  long long p, q, padding, dilation, tiles_n, tiles;           // rows and columns of y; tiles along the filters, and all
};

struct Kernel {
  static constexpr int CONSUMERS = BLOCK_M / 64, UP = 0, DOWN = 0, X_BYTES = 128 * BLOCK_M, STAGE_BYTES = X_BYTES + 128 * BLOCK_N;
  typedef StageRing<STAGES, STAGE_BYTES> Ring;
  typedef float Sums[1][BLOCK_N / 2];
  const Convolution& arg;
  const CUtensorMap *map_x, *map_w;
  float* y;
  struct Tile {
    int pixel, filter, image, h, w;  // where the loads of its first pixel begin, for tap (0, 0)
    DEVICE Tile(const Kernel& of, int number) {
      filter = number % (int)of.arg.tiles_n * BLOCK_N;
      pixel = number / (int)of.arg.tiles_n * BLOCK_M;
      const int row = pixel / (int)of.arg.q;
      image = row / (int)of.arg.p;
      h = row % (int)of.arg.p - (int)of.arg.padding;
      w = pixel % (int)of.arg.q - (int)of.arg.padding;
    }
  };
  DEVICE void prefetch() const { prefetch_maps(map_x, map_w); }
  DEVICE void load(const Tile& of, int step, uint32_t stage, uint32_t arrived) const {
    const int tap = step / (int)arg.channel_blocks, c = step % (int)arg.channel_blocks * 64;
    int r = tap / (int)arg.taps_s, s = tap % (int)arg.taps_s;
    // exercise: the taps are `dilation` pixels apart; by how many pixels does this one move the load?
    barrier_expect(arrived, STAGE_BYTES);
    load_im2col<2>(stage, map_x, arrived, c, of.w, of.h, 0, of.image, s, r, 0);
    load_box(stage + X_BYTES, map_w, arrived, c, tap, of.filter);
  }
  DEVICE void multiply(Sums& sums, uint32_t stage, bool fresh) const {  // the loop of step 8
    multiply_stage<TYPE, StageOperand<false>, StageOperand<false>>(sums, stage + threadIdx.x / 128 * 64 * 128, 0, stage + X_BYTES, fresh);
  }
  DEVICE void finish(const Sums& sums, const Tile& of) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      const int pixel = of.pixel + threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8, filter = of.filter + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (pixel < (int)arg.pixels && filter < (int)arg.filters) y[pixel * arg.filters + filter] = sums[0][i];
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS_OF<Kernel>, 1)
    by_im2col(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w, float* __restrict__ y,
              const __grid_constant__ Convolution arg) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Kernel::Ring ring(dynamic, barriers);
  Kernel kernel = {arg, &map_x, &map_w, y};
  run_tiles(kernel, ring);
}
