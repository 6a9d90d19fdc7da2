// wgrad_add.cu: adds the parts of hopper/wgrad.cu if dw has their layout, channels fastest, or if its taps are fastest and the parts are many.
//
//   dw[k, tap, c] = sum over run of parts[run][k][tap][c], always in the same order
//
// If innermost taps were folded into channels (fold_channels.cu), a channel is (fold, c) in both. With its taps fastest dw is [k][c][tap][fold]. Then
// a thread's stores are scattered: hopper/wgrad_reduce.cu is better if results are many.
//
// Mapping  block -> 2^width times EACH neighbours of a part. thread -> EACH neighbours, of one of THREADS / 2^width ranges of the runs: otherwise few
//          results of many runs would have few threads. The ranges' sums are added in order, too.
// Shared   each thread's sums.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/wgrad_add.cu
#ifndef TYPE
#define TYPE 17  // of dw: 32 float, 16 half, 17 bfloat16
#define EACH 4   // neighbours of a thread: 2 or 4
#endif
#include "core/packed.cuh"

typedef element<TYPE> data_t;

constexpr int THREADS = 256;
constexpr int BATCH = 8;  // loads of a thread under way

// by_n is the divisor n, prepared (division.cuh).
struct WgradNhwcAddArguments {
  long long size, splits, width, range;  // elements of a part; runs; log2 of a block's EACHes; runs of a range, fewer in the last one
  long long pitch, by_pitch, channels;   // of a k and tap: EACHes of a part, and elements of dw, behind which a part has zeros
  long long taps_fastest, taps, by_taps, own, by_own, folds;  // of dw: taps that are not folded; channels; folded taps
};

struct alignas(4 * EACH) Sums {
  float of[EACH] = {};
  DEVICE void add(const Sums& more) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) of[i] += more.of[i];
  }
};
struct alignas(EACH * sizeof(data_t)) Results {
  data_t of[EACH];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    hopper_wgrad_add(const float* __restrict__ parts, data_t* __restrict__ dw, const __grid_constant__ WgradNhwcAddArguments arg) {
  __shared__ Sums sums[THREADS];
  AFTER_LAST_LAUNCH
  const int width = (int)arg.width, lane = threadIdx.x >> width, lanes = THREADS >> width, channels = (int)arg.channels;
  const int each = (blockIdx.x << width) + (threadIdx.x & ((1 << width) - 1));  // number among the EACHes
  const int first = lane * (int)arg.range, last = min(first + (int)arg.range, (int)arg.splits);
  const bool real = each < (int)(arg.size / EACH);
  Sums sum;
  if (real) {
    const Sums* from = (const Sums*)(parts + first * arg.size) + each;
    for (int run = first; run < last; run += BATCH, from += BATCH * (arg.size / EACH)) {
      Sums part[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) part[i] = from[min(i, last - 1 - run) * (arg.size / EACH)];  // without branches, so that all are under way at once
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (run + i < last) sum.add(part[i]);
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (lane > 0 || !real) return;
  for (int other = 1; other < lanes; ++other) sum.add(sums[threadIdx.x + (other << width)]);
  const Divided row(each, arg.pitch, arg.by_pitch);
  const int c = EACH * row.rest;
  data_t* const to = dw + (long long)row.quotient * channels + c;
  if (arg.taps_fastest) {
    const Divided k(row.quotient, arg.taps, arg.by_taps);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (c + i < channels) {
        const Divided fold(c + i, arg.own, arg.by_own);
        dw[(((long long)k.quotient * (int)arg.own + fold.rest) * (int)arg.taps + k.rest) * (int)arg.folds + fold.quotient] = from_float<data_t>(sum.of[i]);
      }
    return;
  }
  Results results;
#pragma unroll
  for (int i = 0; i < EACH; ++i) results.of[i] = from_float<data_t>(sum.of[i]);
  if (channels % EACH == 0 && c < channels) {
    store_word(to, *(const word<Results>*)&results);
  } else {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (c + i < channels) to[i] = results.of[i];
  }
}
