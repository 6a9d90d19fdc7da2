// copy_strided.cu: copies a strided array of up to five axes into C order, since the other kernels read contiguous arrays.
//
//   dst[i] = src[sum over axes of index_a(i) * stride_a]
//
// Mapping  thread -> one element of dst; GID_0 -> THREADS neighbours, so writes are coalesced, reads as the strides allow.
// Types    with BYTES, 1 or 2, elements are integers of so many bytes.
// Memory   registers only. Sizes and strides (in elements, 0 for a repeated axis) are arguments: one build serves all.
//
// By hand: nvcc -cubin -I cu cu/layout/copy_strided.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#if defined(BYTES) && BYTES == 1
typedef unsigned char element_t;
#elif defined(BYTES)
typedef unsigned short element_t;
#else
typedef data_t element_t;
#endif

// n: sizes, of which by_ are prepared divisors, see division.cuh; s: strides.
typedef struct CopyArguments {
  long_t size;
  long_t n1, n2, n3, n4;
  long_t by_n1, by_n2, by_n3, by_n4;
  long_t s0, s1, s2, s3, s4;
} CopyArguments;

#define NEXT_AXIS(n, by, stride)                 \
  {                                              \
    const index_t outer = DIVIDED(i, n, by);     \
    from += (i - outer * (index_t)(n)) * stride; \
    i = outer;                                   \
  }

KERNEL LAUNCH_BOUNDS(THREADS, 1) void copy_strided(
    const GLOBAL_MEM element_t* RESTRICT src, GLOBAL_MEM element_t* RESTRICT dst, const CopyArguments arg) {
  AFTER_LAST_LAUNCH
  const index_t to = (index_t)GID_0 * THREADS + LID_0;
  if (to < (index_t)arg.size) {
    index_t i = to;
    long_t from = 0;
    NEXT_AXIS(arg.n4, arg.by_n4, arg.s4)
    NEXT_AXIS(arg.n3, arg.by_n3, arg.s3)
    NEXT_AXIS(arg.n2, arg.by_n2, arg.s2)
    NEXT_AXIS(arg.n1, arg.by_n1, arg.s1)
#ifdef BYTES
    dst[to] = src[from + i * arg.s0];
#else
    STORE(dst, to, LOAD(src, from + i * arg.s0));
#endif
  }
}
