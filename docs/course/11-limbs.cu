// 11-limbs.cu: a product of float32 by three products of 16-bit limbs: y[m, n] = sum over k of a[m, k] * b[n, k].
//
// split_limbs makes two fp16 numbers of each float v, scaled by a power of two: hi = fp16(v), and lo = fp16((v - hi) * 2^11), together 22 bits.
// Then a * b is hi hi + (hi lo + lo hi) / 2^11, and lo lo is less than the error of the rest. The tensor core cuts its sum off after each
// instruction, which is an error that grows with k. So the product of the first limbs is added to float32 registers after each stage, 64 of k: promotion.
// The others are 2^-11 of it, and may stay in the tensor core. PRODUCTS 1: hi hi alone. PROMOTES 0: all stays in the tensor core, to see what that costs.
//
// Mapping  block -> BLOCK_M x BLOCK_N of y, as in step 8. Three sums need more registers than a launch gives each thread: so the producer is a whole
//          warpgroup, which hands most of its registers over. split_limbs: thread -> a float.
// Shared   a ring of STAGES stages of 64 of k: BLOCK_M rows of a, hi, then lo, and BLOCK_N rows of b, hi, then lo; 128 bytes each, swizzled.
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define STAGES 3
#define PRODUCTS 3
#define PROMOTES 1
#endif
#define WGMMA_N BLOCK_N
#include "hopper/skeleton.cuh"

constexpr int CONSUMERS = BLOCK_M / 64, THREADS = 128 * (CONSUMERS + 1), LIMBS = PRODUCTS == 3 ? 2 : 1;
constexpr int A_LIMB = 128 * BLOCK_M, B_LIMB = 128 * BLOCK_N, STAGE_BYTES = LIMBS * (A_LIMB + B_LIMB);
typedef StageRing<STAGES, STAGE_BYTES> Ring;

struct Limbs {
  long long count, scale;  // floats; the exponent of the scale
};

extern "C" __global__ void __launch_bounds__(256) split_limbs(const float* __restrict__ v, __half* __restrict__ limbs, const __grid_constant__ Limbs arg) {
  AFTER_LAST_LAUNCH
  const long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= arg.count) return;
  const float scaled = v[i] * __uint_as_float((127 + (int)arg.scale) << 23);
  limbs[i] = __float2half_rn(scaled);
  limbs[arg.count + i] = __float2half_rn((scaled - __half2float(limbs[i])) * 2048);
}

struct Product {
  long long m, n, steps, tiles_m, scale;  // rows of a and of b; stages of k; tiles along m; the exponent of the scale of each
};

DEVICE void consume(const Product& arg, const Ring& ring, int row, int column, float* y) {
  Ring::Position at;
  float main[BLOCK_N / 2], cross[BLOCK_N / 2], total[BLOCK_N / 2];
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) main[i] = cross[i] = total[i] = 0;
  for (int step = 0; step < (int)arg.steps; ++step) {
    const uint32_t stage = ring.stage(at) + threadIdx.x / 128 * 64 * 128;
    const uint64_t a = wgmma_descriptor<128>(stage), b = wgmma_descriptor<128>(ring.stage(at) + LIMBS * A_LIMB);
    ring.wait_full(at);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<16, 0, 0>(main, a + 2 * k, b + 2 * k, !PROMOTES || k > 0);
      if (PRODUCTS == 3) wgmma<16, 0, 0>(cross, a + 2 * k, b + 2 * k + B_LIMB / 16, true);  // hi lo
      if (PRODUCTS == 3) wgmma<16, 0, 0>(cross, a + 2 * k + A_LIMB / 16, b + 2 * k, true);  // lo hi
    }
    ring.commit<0>(at, false);
    wgmma_arrived(main);
#pragma unroll
    for (int i = 0; PROMOTES && i < BLOCK_N / 2; ++i) total[i] += main[i];
  }
  wgmma_arrived(cross);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) {
    const int m = row + threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8, n = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = (PROMOTES ? total[i] : main[i]) + cross[i] / 2048;
    // exercise: both a and b were multiplied by 2^scale; take that back
    if (m < (int)arg.m && n < (int)arg.n) y[m * arg.n + n] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    by_limbs(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, float* __restrict__ y, const __grid_constant__ Product arg) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Ring ring(dynamic, barriers);
  const int row = blockIdx.x % (int)arg.tiles_m * BLOCK_M, column = blockIdx.x / (int)arg.tiles_m * BLOCK_N;
  begin_block(ring, 1, CONSUMERS, [&] { prefetch_map(&map_a); });
  if (threadIdx.x < 128 * CONSUMERS) {
    registers_up<232>();
    consume(arg, ring, row, column, y);
  } else {
    registers_down<40>();
    if (threadIdx.x > 128 * CONSUMERS) return;
    Ring::Position at;
    fill_stages(ring, at, 0, (int)arg.steps, [&](int step, uint32_t stage, uint32_t arrived) {
      barrier_expect(arrived, STAGE_BYTES);
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb) {  // the third axis of the maps
        load_box(stage + limb * A_LIMB, &map_a, arrived, 64 * step, row, limb);
        load_box(stage + LIMBS * A_LIMB + limb * B_LIMB, &map_b, arrived, 64 * step, column, limb);
      }
    });
  }
}
