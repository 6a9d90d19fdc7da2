// tf32.cuh: a float32 as two TF32 numbers, whose three products are those of float32 but for 2^-22: the tensor core ignores the last 13 bits of each.
//
// high is the number rounded to 11 bits, low what is left, `factor` times as large. Why a factor: what is left is 2^-12 of the number or less, so that of
// numbers below 2^-114 would be subnormal, and be lost. It has three values:
//   4096  Even subnormal numbers have a low one. That of the largest numbers may overflow, so kernels with this factor compute again what is not finite.
//   512   Every normal number has a low one, and that of no finite number overflows, if `high` did not become infinite (below_infinity).
//   1     for kernels that add all products in one sum.
// low is rounded, or else the tensor core cuts it off.
#pragma once
#include "core/packed.cuh"

// Rounds a number, as bits, to TF32. It does not check for NaN: one with all bits set becomes zero, and leaves a NaN in low.
DEVICE uint32_t rounded_tf32(uint32_t word) { return (word + 0x1000) & ~0x1fffu; }
// The largest TF32 number in place of Inf: then low is Inf where the number was. A NaN stays one.
DEVICE uint32_t below_infinity(uint32_t tf32) {
  float v;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(v) : "f"(__uint_as_float(tf32)), "f"(__uint_as_float(0x7f7fe000)));
  return __float_as_uint(v);
}
// What `high` leaves of `v`.
template <int factor, bool rounded = false> DEVICE uint32_t tf32_rest(float v, uint32_t high) {
  const uint32_t rest = __float_as_uint((v - __uint_as_float(high)) * factor);
  return rounded ? rest + 0x1000 : rest;
}

struct Tf32Pair {
  uint32_t high, low;
};
template <int factor, bool rounded = false> DEVICE Tf32Pair tf32_pair(float v, uint32_t high) { return {high, tf32_rest<factor, rounded>(v, high)}; }
