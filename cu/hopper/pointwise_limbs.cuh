// pointwise_limbs.cuh: float32 as two TF32 numbers, for hopper/pointwise.cu: the product ignores the last 13 bits of each number.
#pragma once

// The second limb is kept so many times larger, so that it is not lost unless v is subnormal.
constexpr float LARGER = 512;

// The first limb of an element of A: rounded, so that its rest has one bit less, of which TF32 takes all but 2^-24 of v. A limb that would be Inf is the
// largest number instead. So is that of Inf, whose rest is Inf. The rest of NaN, 0x7fffffff + 0x1000, is next to 0.
DEVICE float first_limb(float v) {
  uint32_t bits;
  float high;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(high) : "f"(__uint_as_float(bits)), "f"(__uint_as_float(0x7f7fe000)));
  return high;
}
DEVICE uint32_t rest(float v, float first) { return __float_as_uint((v - first) * LARGER) + 0x1000; }

// An element of B: rounded, unless that gives Inf, so that the products of second limbs, which are left out, have both signs.
struct Tf32Pair {
  uint32_t high, low;
  DEVICE Tf32Pair(float v) {
    const uint32_t bits = __float_as_uint(v);
    high = LIMBS == 1 ? to_tf32(v) : ((bits & 0x7fffffff) < 0x7f7ff000 ? bits + 0x1000 : bits) & ~0x1fffu;
    low = LIMBS == 1 ? 0 : __float_as_uint((v - __uint_as_float(high)) * LARGER) + 0x1000;
  }
};

#if MAKES_LIMBS
// All consumers split B into limbs, once it has arrived.
DEVICE void make_limbs(uint8_t* b) {
#pragma unroll
  for (int i = 0; i < BLOCK_N * 8 / (128 * CONSUMERS); ++i) {
    uint8_t* const place = b + (i * 128 * CONSUMERS + threadIdx.x - 128) * 16;
    const float4 v = *(const float4*)place;
    const Tf32Pair split[4] = {v.x, v.y, v.z, v.w};
    *(uint4*)place = make_uint4(split[0].high, split[1].high, split[2].high, split[3].high);
    if (LIMBS == 2) *(uint4*)(place + B_BYTES) = make_uint4(split[0].low, split[1].low, split[2].low, split[3].low);
  }
  fence_for_bulk();  // wgmma reads shared memory as bulk copies do
  named_barrier(1, 128 * CONSUMERS);
}
#endif
