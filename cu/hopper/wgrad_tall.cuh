// wgrad_tall.cuh: how tall TF32 tiles of hopper/wgrad.cu multiply: wgmma, for which warps transpose x in shared memory; dy comes through registers.
#pragma once

#include "hopper/transpose.cuh"

typedef float Sums[2][64];

// Which four of a warp's 32 rows lanes 4 r to 4 r + 3 have: in this order 8 lanes use every bank once.
DEVICE int four(int r) { return r % 2 * 4 + r / 2; }

// Multiplies all stages. The warps transpose x for wgmma while the stage before is multiplied. dy comes through registers: a warp's rows are a block
// of it, and a lane's four channels of a position are the same element of four fragments.
DEVICE void multiply_stages(Sums& sums, const StageRange& range, const Ring& ring) {
  const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  Ring::Position at;
  auto prepare = [&](const Ring::Position& at) {
    ring.wait_full(at);
    transpose_block<1>(ring.stage(at) + (DY_BLOCKS + warp) * BLOCK_BYTES);
    fence_for_bulk();  // wgmma reads shared memory as bulk copies do
    named_barrier(2, CONSUMER_THREADS);
  };
  if (range.count() > 0) prepare(at);
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
      for (int i = 0; i < 2; ++i) wgmma_tf32(sums[i], a[k][i], x + k * 32 / 16, step > range.first || k > 0);
    wgmma_commit();
    Ring::Position coming = at;
    coming.next();
    if (step + 1 < range.last) prepare(coming);
    wgmma_wait<0>();
    ring.give_back(at);
    at = coming;
  }
  wgmma_arrived(sums);
  const float lost = lost_in(STEPS * range.count());
  each(sums, [&](float& sum) { sum = range.count() > 0 ? with_lost(sum, lost) : 0; });
}

DEVICE void leave(const Sums& sums, float* to) {
  float* const first = to + (threadIdx.x / 32 * 32 + 4 * four(threadIdx.x % 32 / 4)) * PITCH + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int row = 0; row < 4; ++row)
#pragma unroll
    for (int i = 0; i < 16; ++i)
      *(float2*)(first + row * PITCH + 8 * i) = make_float2(sums[row / 2][4 * i + 2 * (row % 2)], sums[row / 2][4 * i + 2 * (row % 2) + 1]);
}
