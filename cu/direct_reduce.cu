// direct_reduce.cu: the second half of products that leave parts of their sums in a workspace.
//
//   y[i] = bias[channel of i] + sum over split of parts[split][i], always in the same order; and the rest of epilogue.cuh
//
// Mapping  thread -> one element of y; GID_0 -> THREADS neighbours. Memory: registers only.
//
// By hand: nvcc -cubin cu/direct_reduce.cu
#include "portable.cuh"

#ifndef THREADS
#define THREADS 256
#define SPLIT_K 4
#define CHANNELS 64
#define OUT_SIZE 49
#define HAS_BIAS 0
#define HAS_SCALE 0
#define HAS_RESIDUAL 0
#define RELU 0
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_reduce(const GLOBAL_MEM acc_t* RESTRICT parts, const GLOBAL_MEM data_t* RESTRICT bias,
                                                    const GLOBAL_MEM data_t* RESTRICT scale, const GLOBAL_MEM data_t* residual,
                                                    GLOBAL_MEM data_t* RESTRICT y, const long_t size) {
  AFTER_LAST_LAUNCH
  const long_t i = (long_t)GID_0 * THREADS + LID_0;
  if (i < size) {
    acc_t sum = 0;
#pragma unroll
    for (int split = 0; split < SPLIT_K; ++split) sum += parts[(index_t)split * (index_t)size + (index_t)i];
    EPILOGUE(sum, LOAD(scale, (int)(i / OUT_SIZE % CHANNELS)), LOAD(bias, (int)(i / OUT_SIZE % CHANNELS)), LOAD(residual, (index_t)i))
    STORE(y, (index_t)i, sum);
  }
}
