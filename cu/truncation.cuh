// truncation.cuh: what a tensor core's sum loses by cutting, given back in the mean.
//
// A step of the tensor core adds some products and the sum so far, and cuts the result towards zero to float32. The running sum's cut takes
// 0.345e-7 of a sum of random signs, in the mean. A sum of n steps so comes out too small by 0.345e-7 (n + 1) / 2, whatever its size: a
// factor, which compounds through a network where noise averages out. Products' cuts come on top where all have one sign.
// So a result is raised by what its sum lost in the mean, if its last four bits are not all zero: those of 15 of 16 sums that were rounded are
// not, and 16/15 makes up for the others. Sums of small integers, which nothing was cut from, stay exact.
// Published: the sum itself, bit by bit (Xie et al., MMA-Sim, arXiv 2511.10909). tests/truncation.py has that model, and tests this.
#pragma once
#include "numbers.cuh"

constexpr float CUT = 0.345e-7f * 16 / 15;
constexpr float STEADY = 0.5e-7f * 16 / 15;

// The part of itself that a sum of n steps lost.
__device__ __forceinline__ float lost_in(int n) { return CUT * 0.5f * (n + 1); }

// What to add to a sum: `part` of it, if it was rounded.
__device__ __forceinline__ float give_back_lost(float sum, float part) { return __float_as_uint(sum) & 15 ? sum * part : 0; }

// The same for a sum of stages of 4 steps, each promoted. A stage whose products are all positive loses more, 1.1e-7, or 0.4e-7 where half of them are zero: its
// sum grows so large that the products beside it are cut too. Such sums grow steadily, so the last stage's sum is near the mean of all. So is that of 1 in
// sqrt(4 stages - 3) sums of random signs: steady ones get STEADY more than others, and all sums of random signs as much as before in the mean.
struct Promoted {
  float stages, steady, other;
  __device__ __forceinline__ explicit Promoted(int n) : stages((float)n), steady(lost_in(4) + STEADY * (1 - rsqrtf(4.0f * n - 3))), other(steady - STEADY) {}
  // The last stage's sum and, where rounding took something, what to give back of all stages; `so_far` are the others.
  __device__ __forceinline__ float last(float so_far, float last) const {
    const float sum = so_far + last;
    const float part = fabsf(fmaf(last, stages, -sum)) < 0.5f * fabsf(sum) ? steady : other;
    return fmaf(sum, __float_as_uint(sum) & 15 ? part : 0, last);
  }
};
