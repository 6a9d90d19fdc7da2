// tf32_limbs.cuh: float32 by three products of TF32 numbers (core/tf32.cuh), for hopper/pointwise.cu and hopper/wgrad.cu. The product of first limbs is
// added to float32 registers stage by stage, because the tensor core truncates its own sum; the two others are small, and stay in the tensor core.
#pragma once
#include "core/tf32.cuh"
#include "core/truncation.cuh"

constexpr int LARGER = 512;  // tf32.cuh: no result is computed once more
// The part of itself that a sum of 4 steps loses in the mean: what truncation loses, less what rounding gives.
constexpr float PROMOTED = 0.67e-7f * 16 / 15;

// Adds the sums of the two others to those of first limbs.
template <class Sums> DEVICE void add_cross(Sums& total, Sums& cross) {
  each(total, cross, [](float& sum, float small) {
    const float more = with_lost(small, sum, LARGER * PROMOTED);
    // Inf x a rest of 0 is no part of the result, and after an Inf such products may have either sign
    if (fabsf(sum) < INFINITY) sum = fmaf(more, 1.f / LARGER, sum);
  });
}
