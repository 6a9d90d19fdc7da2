// planes.cu: 1x1 convolutions of 16-bit NCHW arrays as they lie, without stride, on Hopper's tensor cores, and their dgrad.
//
//   y[image, m, pixel] = sum over c of w[m, c] * x[image, c, pixel], and finish.cuh
//   gemm m: output channel | gemm n: pixel of an image | gemm k: input channel, in stages of 64
//
// Mapping  block: tiles of BLOCK_M channels x BLOCK_N pixels of an image. Tiles of the same pixels run side by side. A consumer warpgroup has OWN_M
//          channels of all pixels of the tile, or, if BLOCK_M is 64 and BLOCK_N is more, of half of them. Behind the consumers is one more warp.
//          One thread of that, the producer, loads x and w. Blocks are persistent: loads go on while a tile is stored. Two blocks of small
//          tiles share a multiprocessor.
//          Three consumers need more registers than a launch gives so many threads: the producer's warp is then a warpgroup, which hands over
//          most of its own.
// Shared   a ring of STAGES stages (ring.cuh): BLOCK_N / 64 blocks of x, 64 rows of 64 pixels each, then w; rows of 128 bytes, swizzled. Behind the
//          ring lie the consumers' results, in blocks of 64 channels x 64 pixels, with room for 64 channels or for twice as many: then TMA stores one
//          half while the other is filled.
// x        MN-major, which wgmma takes of 16-bit operands. Blocks of pixels past the end of an image are not loaded.
// w        K-major: 64 input channels of each output channel, as a filter of fprop lies. W_MN_MAJOR, for dgrad: 64 output channels of each
//          input channel.
// Ends     Elements past the last pixel or channel arrive as zeros, and are not stored.
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
#include "core/finish.cuh"
#include "hopper/skeleton.cuh"

typedef element<TYPE> data_t;

constexpr int BLOCK = 64 * 128, STEPS = 4;  // bytes of 64 rows; wgmma steps in a stage
constexpr int CONSUMERS = BLOCK_M / OWN_M * (BLOCK_N / WGMMA_N), CONSUMER_THREADS = 128 * CONSUMERS, ROWS = OWN_M / 64;
constexpr bool HANDS_OVER = CONSUMERS == 3;  // the producer gives registers to the consumers
constexpr int THREADS = CONSUMER_THREADS + (HANDS_OVER ? 128 : 32);
constexpr int X_BLOCKS = BLOCK_N / 64, W_BLOCKS = BLOCK_M / 64, OWN_BLOCKS = WGMMA_N / 64, STAGE_BYTES = (X_BLOCKS + W_BLOCKS) * BLOCK;
static_assert(BLOCK_M % 64 == 0 && WGMMA_N % 64 == 0 && BLOCK_N % WGMMA_N == 0, "whole blocks");
static_assert(BLOCK_M == 64 || BLOCK_N == WGMMA_N, "consumers side by side, or one below the other");

// by_n is the divisor n, prepared (division.cuh).
struct PlanesProduct {
  long long tiles, tiles_m, by_tiles_m, tiles_n, by_tiles_n;      // all tiles; those along the channels; along the pixels of an image
  long long steps, rows, plane;                                   // stages of a sum; output channels; pixels of an image
  long long has_bias, has_scale, has_residual, activation, slope;  // what finishes a sum; slope: a float's bits
};

struct Tile {
  int image, pixel, channel;
  DEVICE Tile(const PlanesProduct& arg, int tile) {
    const Divided down(tile, arg.tiles_m, arg.by_tiles_m), across(down.quotient, arg.tiles_n, arg.by_tiles_n);
    channel = down.rest * BLOCK_M;
    pixel = across.rest * BLOCK_N;
    image = across.quotient;
  }
};

typedef StageRing<STAGES, STAGE_BYTES> Ring;

DEVICE void produce(const CUtensorMap* map_x, const CUtensorMap* map_w, const PlanesProduct& arg, const Ring& ring) {
  Ring::Position at;
  for (int tile = blockIdx.x; tile < (int)arg.tiles; tile += gridDim.x) {
    const Tile of(arg, tile);
    const int x_blocks = min(((int)arg.plane - of.pixel + 63) / 64, X_BLOCKS), w_blocks = min(((int)arg.rows - of.channel + 63) / 64, W_BLOCKS);
    fill_stages(ring, at, 0, (int)arg.steps, [&](int step, uint32_t x, uint32_t arrived) {
      const uint32_t w = x + X_BLOCKS * BLOCK;
      barrier_expect(arrived, (x_blocks + w_blocks) * BLOCK);
#pragma unroll
      for (int i = 0; i < X_BLOCKS; ++i)
        if (i < x_blocks) load_box(x + i * BLOCK, map_x, arrived, of.pixel + 64 * i, 64 * step, of.image);
#pragma unroll
      for (int i = 0; i < W_BLOCKS; ++i) {
        const int channel = of.channel + 64 * i;
        if (i < w_blocks) load_box(w + i * BLOCK, map_w, arrived, W_MN_MAJOR ? channel : 64 * step, W_MN_MAJOR ? 64 * step : channel, 0);
      }
    });
  }
}

// Finishes a consumer's sums of 64 channels from `channel` on and its pixels from `pixel` on, and leaves them in shared memory. A warp's lanes use all
// banks: eight rows, whose chunks of 16 bytes are swizzled. `plain`: without an epilogue.
template <bool plain> DEVICE void stage_results(const float (&sum)[WGMMA_N / 2], const PlanesProduct& arg, int image, int channel, int pixel, uint8_t* results,
                          const data_t* scale, const data_t* bias, const data_t* residual) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + 8 * half, k = min(channel + own, (int)arg.rows - 1);
    Finish<false> finish;
    if (!plain) finish.of = ScaleAndBias(arg, scale, bias, k);
    const data_t* const added = residual + (image * arg.rows + k) * arg.plane;
#pragma unroll
    for (int i = 0; i < WGMMA_N / 8; i += 2) {
      float v[4];
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int at = pixel + 8 * (i + e / 2) + column;
        uint32_t pair = 0;
        if (!plain && has_residual(arg) && at < (int)arg.plane) pair = *(const uint32_t*)(added + at);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float one = sum[4 * (i + e / 2) + 2 * half + j];
          if (plain) v[e + j] = one;
          else v[e + j] = has_residual(arg) ? finish.whole(arg, one, 1, to_float(((const data_t*)&pair)[j])) : finish.shifted(arg, one, 1);
        }
      }
      if (!plain) activate(arg, v);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int eight = (i + e) % 8, block = (i + e) / 8;
        *(uint32_t*)(results + block * BLOCK + own * 128 + (eight ^ own % 8) * 16 + column * 2) = word_of<data_t>(v[2 * e], v[2 * e + 1]);
      }
    }
  }
}

DEVICE void consume(const PlanesProduct& arg, const Ring& ring, const CUtensorMap* map_y, uint8_t* results, const data_t* scale, const data_t* bias,
                    const data_t* residual) {
  const int consumer = threadIdx.x / 128, down = BLOCK_M == 64 ? 0 : consumer, across = BLOCK_M == 64 ? consumer : 0;
  const bool stores = threadIdx.x % 128 == 0;
  const bool plain = !has_scale(arg) && !has_bias(arg) && !has_residual(arg) && !activation(arg);
  results += consumer * RESULTS * OWN_BLOCKS * BLOCK;
  Ring::Position at;
  int turn = 0;
  float sum[ROWS][WGMMA_N / 2];
  for (int tile = blockIdx.x; tile < (int)arg.tiles; tile += gridDim.x) {
    const Tile of(arg, tile);
    multiply_stages<1>(ring, at, 0, (int)arg.steps, sum, [&](uint32_t stage, bool fresh) {
      const uint32_t w = stage + (X_BLOCKS + down * ROWS) * BLOCK;
      const uint64_t a = W_MN_MAJOR ? wgmma_mn_major_descriptor(w) : wgmma_descriptor<128>(w);
      const uint64_t b = wgmma_mn_major_descriptor(stage + across * OWN_BLOCKS * BLOCK);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
          wgmma<TYPE, W_MN_MAJOR, 1>(sum[i], a + (i * BLOCK + (W_MN_MAJOR ? BLOCK / STEPS : 32) * k) / 16, b + BLOCK / STEPS / 16 * k, !(fresh && k == 0));
    });
    ring.give_back(at, 1);
    const int pixel = of.pixel + WGMMA_N * across;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int channel = of.channel + OWN_M * down + 64 * i;
      uint8_t* const own = results + turn * OWN_BLOCKS * BLOCK;
      turn = (turn + 1) % RESULTS;
      if (stores) bulk_wait_read<RESULTS - 1>();
      named_barrier(1 + consumer, 128);  // the results whose place these take have been read
      if (plain) stage_results<true>(sum[i], arg, of.image, channel, pixel, own, scale, bias, residual);
      else stage_results<false>(sum[i], arg, of.image, channel, pixel, own, scale, bias, residual);
      fence_for_bulk();
      named_barrier(1 + consumer, 128);  // all of them are there
      if (stores) {
        for (int j = 0; j < OWN_BLOCKS; ++j)
          if (pixel + 64 * j < (int)arg.plane && channel < (int)arg.rows) store_box(map_y, shared_address(own + j * BLOCK), pixel + 64 * j, channel, of.image, 0);
        bulk_commit();
      }
    }
  }
  if (stores) bulk_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCK_M * BLOCK_N <= 64 * 128 ? 2 : 1)
    hopper_planes(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_y,
                const data_t* __restrict__ bias, const data_t* __restrict__ scale, const data_t* residual, const __grid_constant__ PlanesProduct arg) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Ring ring(dynamic, barriers);
  uint8_t* const results = dynamic + (ring.stages - shared_address(dynamic)) + STAGES * STAGE_BYTES;
  begin_block(ring, 1, CONSUMERS, [&] {
    prefetch_map(&map_x);
    prefetch_map(&map_w);
    prefetch_map(&map_y);
  });
  if (threadIdx.x < CONSUMER_THREADS) {
    if (HANDS_OVER) registers_up<160>();
    consume(arg, ring, &map_y, results, scale, bias, residual);
  } else {
    if (HANDS_OVER) registers_down<32>();
    if (threadIdx.x == CONSUMER_THREADS) produce(&map_x, &map_w, arg, ring);
  }
}
