// truncation.cuh: what a tensor core's sum loses by cutting, given back in the mean.
//
// A step of the tensor core adds some products and the sum so far, and cuts the result towards zero to float32. The running sum's cut takes
// 0.345e-7 of a sum of random signs, in the mean. A sum of n steps so comes out too small by 0.345e-7 (n + 1) / 2, whatever its size: a
// factor, which compounds through a network where noise averages out. Products' cuts come on top where all have one sign, and stay.
// So a result is raised by what its sum lost in the mean, if its last four bits are not all zero: those of 15 of 16 sums that were rounded are
// not, and 16/15 makes up for the others. Sums of small integers, which nothing was cut from, stay exact.
// Published: the sum itself, bit by bit (Xie et al., MMA-Sim, arXiv 2511.10909). tests/truncation.py has that model, and tests this.
#pragma once
#include "numbers.cuh"

constexpr float CUT = 0.345e-7f * 16 / 15;

// The part of itself that a sum of n steps lost.
__device__ __forceinline__ float lost_in(int n) { return CUT * 0.5f * (n + 1); }

// The same of a sum of promoted sums, of 4 steps each, but for the first one, which is of the first so many at once.
__device__ __forceinline__ float lost_in_promoted(int stages, int first) {
  return stages <= first ? lost_in(4 * stages) : CUT * (2.5f + 2 * first * (first - 1) / (float)stages);
}

// What to add to a sum: `part` of it, if it was rounded.
__device__ __forceinline__ float give_back_lost(float sum, float part) { return __float_as_uint(sum) & 15 ? sum * part : 0; }
