// cast.cu: float32 arrays rounded to 16 bits, to nearest even, and 16-bit arrays in float32.
//
//   narrow   to[i] = from[i]
//   widen    to[i] = from[i]
//   widen_filter   to[k][tap][c] = from[k][c][tap]: the gradient of a filter whose channels are last
//
// Mapping  thread -> 4 neighbours; in widen_filter one element of `to`. A block has THREADS of them.
// Memory   registers only. Sizes are arguments: one build serves all.
//
// By hand: nvcc -cubin cu/cast.cu
#ifndef DTYPE
#define DTYPE 17  // of the narrow array: 16 half, 17 bfloat16
#endif
#include "portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void narrow(const GLOBAL_MEM acc_t* RESTRICT from, GLOBAL_MEM data_t* RESTRICT to, const long_t size) {
  AFTER_LAST_LAUNCH
  const long_t i = 4 * ((long_t)GID_0 * THREADS + LID_0);
  if (i + 4 <= size) {
    acc_t v[4];
    LOCAL_LOAD_VEC(v, from + i)
    STORE_VEC(to, i, v)
  } else {
    for (long_t j = i; j < size; ++j) STORE(to, j, from[j]);
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 1) void widen(const GLOBAL_MEM data_t* RESTRICT from, GLOBAL_MEM acc_t* RESTRICT to, const long_t size) {
  AFTER_LAST_LAUNCH
  const long_t i = 4 * ((long_t)GID_0 * THREADS + LID_0);
  if (i + 4 <= size) {
    acc_t v[4];
    LOAD_VEC(v, from, i)
    LOCAL_STORE_VEC(to + i, v)
  } else {
    for (long_t j = i; j < size; ++j) to[j] = LOAD(from, j);
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 1) void widen_filter(
    const GLOBAL_MEM data_t* RESTRICT from, GLOBAL_MEM acc_t* RESTRICT to, const long_t size, const long_t taps, const long_t channels) {
  AFTER_LAST_LAUNCH
  const long_t i = (long_t)GID_0 * THREADS + LID_0;
  if (i < size) {
    const long_t row = i / channels, c = i - row * channels, k = row / taps, tap = row - k * taps;
    to[i] = LOAD(from, (k * channels + c) * taps + tap);
  }
}
