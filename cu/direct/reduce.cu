// reduce.cu: adds the parts of sums that products leave in a workspace.
//
//   y[i] = bias[channel of i] + sum over split of parts[split][i], always in the same order; and the rest of the epilogue
//
// Mapping  block -> 2^width neighbours of y; GID_0 numbers them. thread -> one of `lanes` = THREADS / 2^width runs of the parts of an
//          element: otherwise few results of many parts would have few threads. The runs' sums are added in order, too.
// Memory   shared: with several lanes, one sum for each thread. All sizes are arguments.
//
// By hand: nvcc -cubin -I cu cu/direct/reduce.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif

typedef struct ReduceArguments {
  long_t size, split, width, run;  // elements of y; parts; log2 of the elements of a block; parts of a lane, fewer in the last one
  long_t plane, by_plane;          // neighbours of one channel in y; by_: as a prepared divisor, see division.cuh
  long_t channels, by_channels;    // of y
  long_t has_scale, has_bias, has_residual, activation, slope;  // the epilogue; slope: an acc_t's bits
} ReduceArguments;

typedef struct ReduceTwo {
  ReduceArguments of[2];
} ReduceTwo;

WITHIN_KERNEL void reduce(const GLOBAL_MEM acc_t* RESTRICT parts, const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                          const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y, const ReduceArguments arg, const index_t block,
                          LOCAL_MEM_POINTER acc_t* sums) {
  EPILOGUE_FLAGS
  const int width = (int)arg.width, lane = LID_0 >> width, lanes = THREADS >> width;
  const index_t i = (block << width) + (LID_0 - (lane << width)), size = (index_t)arg.size;
  const int first = lane * (int)arg.run, last = first + (int)arg.run < (int)arg.split ? first + (int)arg.run : (int)arg.split;
  acc_t sum = 0;
  if (i < size) {
#pragma unroll 8
    for (int part = first; part < last; ++part) sum += parts[part * size + i];
  }
  sums[LID_0] = sum;
  local_barrier();
  if (lane == 0 && i < size) {
    for (int other = 1; other < lanes; ++other) sum += sums[LID_0 + (other << width)];
    const index_t row = DIVIDED(i, arg.plane, arg.by_plane);
    const int channel = (int)(row - DIVIDED(row, arg.channels, arg.by_channels) * (index_t)arg.channels);
    FINISH_AT(sum, channel, i)
    STORE(y, i, sum);
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_reduce(const GLOBAL_MEM acc_t* RESTRICT parts, const GLOBAL_MEM data_t* RESTRICT bias,
                                                    const GLOBAL_MEM data_t* RESTRICT scale, const GLOBAL_MEM data_t* residual,
                                                    GLOBAL_MEM data_t* RESTRICT y, const ReduceArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[THREADS];
  reduce(parts, bias, scale, residual, y, arg, (index_t)GID_0, sums);
}

// Two such sums without an epilogue in one launch: the first has `blocks` blocks.
KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_reduce_two(const GLOBAL_MEM acc_t* RESTRICT parts, const GLOBAL_MEM acc_t* RESTRICT other_parts,
                                                        GLOBAL_MEM data_t* RESTRICT y, GLOBAL_MEM data_t* RESTRICT other_y,
                                                        const ReduceTwo arg, const long_t blocks) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[THREADS];
  const bool other = (index_t)GID_0 >= (index_t)blocks;
  reduce(other ? other_parts : parts, 0, 0, 0, other ? other_y : y, arg.of[other], (index_t)GID_0 - (other ? (index_t)blocks : 0), sums);
}
