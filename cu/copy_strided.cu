// copy_strided.cu: a strided array of up to five axes into C order; what the other kernels read is contiguous.
//
//   dst[i] = src[sum over axes of index_a(i) * stride_a]
//
// Mapping  thread -> one element of dst; GID_0 -> THREADS neighbours, so writes are coalesced, reads as the strides allow.
// Memory   registers only. Sizes and strides (in elements, 0 for a repeated axis) come at run time: one build serves all.
//
// By hand: nvcc -cubin cu/copy_strided.cu
#include "portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void copy_strided(
    const GLOBAL_MEM data_t* RESTRICT src, GLOBAL_MEM data_t* RESTRICT dst, const long_t size, const long_t n0, const long_t n1,
    const long_t n2, const long_t n3, const long_t n4, const long_t s0, const long_t s1, const long_t s2, const long_t s3, const long_t s4) {
  AFTER_LAST_LAUNCH
  long_t i = (long_t)GID_0 * THREADS + LID_0;
  if (i < size) {
    const long_t to = i;
    long_t from = i % n4 * s4;
    i /= n4;
    from += i % n3 * s3;
    i /= n3;
    from += i % n2 * s2;
    i /= n2;
    from += i % n1 * s1 + i / n1 % n0 * s0;
    STORE(dst, to, LOAD(src, from));
  }
}
