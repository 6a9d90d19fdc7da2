// gemm_product.cuh: the products of a stage on Hopper's tensor cores, and what finishes the sums of a thread's channels.
//
// Behind gemm_tiles.cuh. BF16 and W_MN_MAJOR choose the operands' type and order.
#pragma once
#include "hopper/skeleton.cuh"
#include "core/truncation.cuh"

DEVICE uint64_t w_descriptor(uint32_t place) { return W_MN_MAJOR ? wgmma_mn_major_descriptor(place) : wgmma_descriptor<SPAN>(place); }

DEVICE uint64_t x_descriptor(uint32_t place) { return wgmma_descriptor<SPAN>(place); }

// The products of 64 of k, 16 at a time; `fresh` begins new sums.
DEVICE void multiply(float (&d)[WGMMA_N / 2], uint64_t a, uint64_t b, bool fresh) {
#pragma unroll
  for (int k = 0; k < 64; k += 16) {
    const int sub = k / LOAD_CHANNELS, inner = 2 * (k % LOAD_CHANNELS);
    wgmma<BF16 ? 17 : 16, W_MN_MAJOR, 0>(d, a + (W_MN_MAJOR ? k * 128 : sub * A_SUB + inner) / 16, b + (sub * BLOCK_N * SPAN + inner) / 16, !(fresh && k == 0));
  }
}

// What finishes sums: scales of images, of the packed filter, and of the layer, and its bias.
struct Factors {
  const float *scale_n, *scale_k;
  const out_t *scale, *bias;
};

// Where a consumer's sums go: its staging tiles, what lies behind them (stage_output_offsets), and the arrays.
struct Output {
  uint8_t* staging;
  float* scales;
  long long* offsets;
  const CUtensorMap* map_y;  // TENSOR_STORE
  float* moments;
  const out_t* residual;
  out_t* y;
  DEVICE Output further(long long apart) const { return {staging, scales, offsets, map_y, moments, residual + apart, y + apart}; }
};

// What a thread has to know to store its sums: where its consumer's channels and pixels begin, and what finishes the sums of
// its two channels. It is loaded while the tile is multiplied.
struct Rows {
  int m, pixel, end, group, split;
  float scale_w[2];  // of the packed filter
  Finish<SCALED> finish[2];
  DEVICE Rows(const GemmPhase& shape, const Tile& of, int consumer, const Factors& factors)
      : m(of.m + (BLOCK_M == 128 ? 64 * consumer : 0)), pixel(of.pixel + (BLOCK_M == 128 ? 0 : WGMMA_N * consumer)),
        end(of.end), group(of.group), split(of.split) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = min(group * (int)shape.rows_group + m + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4 + 8 * half, (int)shape.rows - 1);
      scale_w[half] = scaled(shape) ? factors.scale_k[k] : 1;
      finish[half].of = ScaleAndBias(shape, factors.scale, factors.bias, k);
    }
  }
};
