// direct_reduce.cu: the second half of products that leave parts of their sums in a workspace.
//
//   y[i] = bias[channel of i] + sum over split of parts[split][i], always in the same order; and the rest of the epilogue
//
// Mapping  thread -> one element of y; GID_0 -> THREADS neighbours. Memory: registers only. All sizes are arguments.
//
// By hand: nvcc -cubin cu/direct_reduce.cu
#include "portable.cuh"

#ifndef THREADS
#define THREADS 256
#define HAS_RESIDUAL 0
#endif

typedef struct ReduceArguments {
  long_t size, split;            // elements of y; parts
  long_t plane, by_plane;        // neighbours of one channel in y; by_: as a prepared divisor, see division.cuh
  long_t channels, by_channels;  // of y
  long_t has_scale, has_bias, relu;
} ReduceArguments;

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_reduce(const GLOBAL_MEM acc_t* RESTRICT parts, const GLOBAL_MEM data_t* RESTRICT bias,
                                                    const GLOBAL_MEM data_t* RESTRICT scale, const GLOBAL_MEM data_t* residual,
                                                    GLOBAL_MEM data_t* RESTRICT y, const ReduceArguments arg) {
  AFTER_LAST_LAUNCH
  EPILOGUE_FLAGS
  const index_t i = (index_t)GID_0 * THREADS + LID_0, size = (index_t)arg.size;
  if (i < size) {
    acc_t sum = 0;
#pragma unroll 8
    for (int split = 0; split < (int)arg.split; ++split) sum += parts[split * size + i];
    const index_t row = DIVIDED(i, arg.plane, arg.by_plane);
    const int channel = (int)(row - DIVIDED(row, arg.channels, arg.by_channels) * (index_t)arg.channels);
    FINISH_AT(sum, channel, i)
    STORE(y, i, sum);
  }
}
