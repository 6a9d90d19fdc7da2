// wgrad_fragments.cuh: how other tiles of float32 of hopper/wgrad.cu multiply: mma.sync on fragments, by one product of TF32 or, LIMBS = 2, by three.
#pragma once
#include "hopper/tf32_limbs.cuh"

// The sums of a warp's 32 rows and of its half of the consumer's columns: 32 of each block, in fragments of 16 x 8.
constexpr int WARP_BLOCKS = WGMMA_N / 64;
typedef float Sums[WARP_BLOCKS][2][4][4];

DEVICE Tf32Pair pair_of(uint32_t word) { return tf32_pair<LARGER>(__uint_as_float(word), below_infinity(rounded_tf32(word))); }

// Multiplies a step of a block of 32 x 32.
DEVICE void multiply_limbs(float (&main)[2][4][4], float (&cross)[2][4][4], const uint32_t (&a)[2][4], const uint32_t (&b)[4][2]) {
  uint32_t a_high[2][4], a_low[2][4], b_high[4][2], b_low[4][2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Tf32Pair of_a = pair_of(a[i / 4][i % 4]), of_b = pair_of(b[i / 2][i % 2]);
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

// Multiplies all stages.
DEVICE void multiply_stages(Sums& sums, const StageRange& range, const Ring& ring) {
  const int consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // the block of this warp's rows, and the first block of its columns; the offsets of a lane's channels of its two positions in a block's first eight rows
  const int dy_block = 2 * consumer + warp % 2, x_block = warp / 2 * WARP_BLOCKS;
  uint32_t place[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) place[i] = (2 * (lane % 4) + i) * 128 + (lane / 4 ^ (2 * (lane % 4) + i)) * 16;
  [[maybe_unused]] Sums main, cross;
  clear(sums);
  if (LIMBS == 2) clear(cross);
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
    if (LIMBS == 2) clear(main);
#pragma unroll
    for (int number = 0; number < STEPS * WARP_BLOCKS; ++number) {
      if (number + 1 < STEPS * WARP_BLOCKS) load(number + 1);
      const uint4(&right)[2] = x[number % 2];
      const uint32_t b[4][2] = {{right[0].x, right[1].x}, {right[0].y, right[1].y}, {right[0].z, right[1].z}, {right[0].w, right[1].w}};
      const uint4(&left)[2] = dy[number / WARP_BLOCKS % 2];
      const uint32_t a[2][4] = {{left[0].x, left[0].y, left[1].x, left[1].y}, {left[0].z, left[0].w, left[1].z, left[1].w}};
      if constexpr (LIMBS == 2) {
        multiply_limbs(main[number % WARP_BLOCKS], cross[number % WARP_BLOCKS], a, b);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) multiply<float>(sums[number % WARP_BLOCKS][i / 4][i % 4], a[i / 4], b[i % 4][0], b[i % 4][1]);
      }
    }
    if (LIMBS == 2) each(sums, main, [](float& sum, float more) { sum += more; });
    __syncwarp();
    ring.give_back(at);
    at.next();
  }
  if (LIMBS == 2) add_cross(sums, cross);
  else end_sums<true>(sums, true, lost_in(STEPS * range.count()));
}

DEVICE void leave(const Sums& sums, float* to) {
  const int consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float* const first = to + (64 * consumer + 32 * (warp % 2) + 4 * (lane / 4)) * PITCH + (warp / 2 * WARP_BLOCKS * 32 + 8 * (lane % 4));
#pragma unroll
  for (int block = 0; block < WARP_BLOCKS; ++block)
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // a row of a pair, of a half, and four columns
      const float(&of)[4][4] = sums[block][i / 4];
      const int e = i % 4;
      *(float4*)(first + (2 * (i / 4) + e / 2) * PITCH + 32 * block + 4 * (e % 2)) = make_float4(of[0][e], of[1][e], of[2][e], of[3][e]);
    }
}
