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

// `to` and, if a sum was rounded, `part` of it. The condition must not be one of whether `to` changes: where that is a sum of wgmma in flight, ptxas would
// have all wgmma wait for one another. It chooses the sum, not the part: an infinite sum has no such bits, and infinity times 0 would be NaN. So `part` must be finite.
__device__ __forceinline__ float with_lost(float to, float sum, float part) { return fmaf(__float_as_uint(sum) & 15 ? sum : 0, part, to); }
__device__ __forceinline__ float with_lost(float sum, float part) { return with_lost(sum, sum, part); }

// The same for a sum of stages of 4 steps, each promoted. A stage whose products are all positive loses more, 1.1e-7, or 0.4e-7 where half of them are zero: its
// sum grows so large that the products beside it are cut too. Such sums grow steadily, so the last stage's sum is near the mean of all: between nothing and twice
// that. So is that of 2 / pi atan(1 / sqrt(stages - 1)) of sums of random signs, near enough 1 in sqrt(2.467 stages - 1.467): steady ones get STEADY more than
// others, and all sums of random signs as much as before in the mean.
struct Promoted {
  float stages, steady, other;  // the parts in units of `unit`
  __device__ __forceinline__ Promoted(int n, float unit) : stages((float)n), steady(unit * (lost_in(4) + STEADY * (1 - rsqrtf(fmaxf(2.467f * n - 1.467f, 1))))), other(steady - unit * STEADY) {}
  // `to` and what is given back of a sum, whose last stage's was `last`.
  __device__ __forceinline__ float with_lost(float to, float sum, float last) const {
    return ::with_lost(to, sum, fabsf(fmaf(last, stages, -sum)) < fabsf(sum) ? steady : other);
  }
};
