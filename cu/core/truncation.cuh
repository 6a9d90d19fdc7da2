// truncation.cuh: corrects the mean error of a tensor core's sum, which truncates.
//
// A step of the tensor core adds some products to the sum so far, and truncates the result to float32. Truncating a running sum of random signs takes
// 0.345e-7 of it, in the mean. So a sum of n steps comes out too small by 0.345e-7 (n + 1) / 2, whatever its size: a factor, which compounds through
// a network, where noise averages out. If all products have one sign, truncating them takes more.
// So the kernels raise a result by what its sum lost in the mean, if its last four bits are not all zero. 15 of 16 rounded sums pass that test,
// and 16/15 makes up for the others. Sums of small integers, of which nothing was truncated, stay exact.
// Published: the sum itself, bit by bit (Xie et al., MMA-Sim, arXiv 2511.10909). tests/truncation.py has that model, and tests this.
#pragma once
#include "core/numbers.cuh"

constexpr float CUT = 0.345e-7f * 16 / 15;
constexpr float STEADY = 0.5e-7f * 16 / 15;

// The relative loss of a sum of n steps.
__device__ __forceinline__ float lost_in(int n) { return CUT * 0.5f * (n + 1); }

// `to`, plus `part` of the sum if the sum was rounded. The condition must not decide whether `to` changes: if that is a sum of wgmma in flight, ptxas would
// make all wgmma wait for one another. It chooses the sum, not the part: an infinite sum has no such bits, and Inf x 0 would be NaN. So `part` must be finite.
__device__ __forceinline__ float with_lost(float to, float sum, float part) { return fmaf(__float_as_uint(sum) & 15 ? sum : 0, part, to); }
__device__ __forceinline__ float with_lost(float sum, float part) { return with_lost(sum, sum, part); }

// The same for a sum of stages of 4 steps, each promoted. A stage of positive products loses more, 1.1e-7, or 0.4e-7 if half of them are zero: its
// sum grows so large that the products beside it are truncated too. Such sums grow steadily, so the last stage's sum is near the mean of all stages: between
// zero and twice that. So is the last stage of 2 / pi atan(1 / sqrt(stages - 1)) of sums of random signs, roughly 1 in sqrt(2.467 stages - 1.467). Therefore
// steady sums get STEADY more than others, and sums of random signs get as much as before in the mean.
struct Promoted {
  float stages, steady, other;  // the parts in units of `unit`
  __device__ __forceinline__ Promoted(int n, float unit)
      : stages((float)n), steady(unit * (lost_in(4) + STEADY * (1 - rsqrtf(fmaxf(2.467f * n - 1.467f, 1))))),
        other(steady - unit * STEADY) {}
  // `to` plus what `sum` has lost; `last` is its last stage's sum.
  __device__ __forceinline__ float with_lost(float to, float sum, float last) const {
    return ::with_lost(to, sum, fabsf(fmaf(last, stages, -sum)) < fabsf(sum) ? steady : other);
  }
};
