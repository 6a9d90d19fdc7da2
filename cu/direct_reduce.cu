// direct_reduce.cu: the second half of direct_gemm.cu with SPLIT_K > 1.
//
//   y[i] = bias[channel of i] + sum over split of parts[split][i], always in the same order
//
// Mapping  thread -> one element of y; GID_0 -> THREADS neighbours. Memory: registers only.
#include "portable.cuh"

#ifndef THREADS
#define THREADS 256
#define SPLIT_K 4
#define CHANNELS 64
#define OUT_SIZE 49
#define HAS_BIAS 0
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_reduce(const GLOBAL_MEM acc_t* RESTRICT parts, const GLOBAL_MEM data_t* RESTRICT bias,
                                                    GLOBAL_MEM data_t* RESTRICT y, const long_t size) {
  const long_t i = (long_t)GID_0 * THREADS + LID_0;
  if (i < size) {
    acc_t sum = 0;
#pragma unroll
    for (int split = 0; split < SPLIT_K; ++split) sum += parts[(index_t)split * (index_t)size + (index_t)i];
#if HAS_BIAS
    sum += LOAD(bias, (int)(i / OUT_SIZE % CHANNELS));
#endif
    STORE(y, (index_t)i, sum);
  }
}
