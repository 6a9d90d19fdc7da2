// pointwise_limbs.cuh: float32 as two TF32 numbers, for hopper/pointwise.cu: the product ignores the last 13 bits of each number.
#pragma once
#include "hopper/tf32_limbs.cuh"

// An element of A, ties to even. Of a limb that would be Inf the largest number is left, and so it is of Inf, whose rest is Inf. The rest of NaN,
// 0x7fffffff + 0x1000, is next to 0.
DEVICE Tf32Pair pair_of_a(float v) {
  uint32_t bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return tf32_pair<LARGER, true>(v, below_infinity(bits));
}
// An element of B: rounded, unless that gives Inf, so that the products of second limbs, which are left out, have both signs.
DEVICE Tf32Pair pair_of_b(float v) {
  if (LIMBS == 1) return {to_tf32(v), 0};
  const uint32_t bits = __float_as_uint(v);
  return tf32_pair<LARGER, true>(v, ((bits & 0x7fffffff) < 0x7f7ff000 ? bits + 0x1000 : bits) & ~0x1fffu);
}

#if WGRAD
// All consumers split B into limbs, once it has arrived.
DEVICE void make_limbs(uint8_t* b) {
#pragma unroll
  for (int i = 0; i < BLOCK_N * 8 / (128 * CONSUMERS); ++i) {
    uint8_t* const place = b + (i * 128 * CONSUMERS + threadIdx.x - 128) * 16;
    const float4 v = *(const float4*)place;
    const Tf32Pair split[4] = {pair_of_b(v.x), pair_of_b(v.y), pair_of_b(v.z), pair_of_b(v.w)};
    *(uint4*)place = make_uint4(split[0].high, split[1].high, split[2].high, split[3].high);
    if (LIMBS == 2) *(uint4*)(place + B_BYTES) = make_uint4(split[0].low, split[1].low, split[2].low, split[3].low);
  }
  fence_for_bulk();  // wgmma reads shared memory as bulk copies do
  named_barrier(1, 128 * CONSUMERS);
}
#endif
