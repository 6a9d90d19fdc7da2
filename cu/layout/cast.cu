// cast.cu: float32 arrays rounded to 16 bits, to nearest even, and 16-bit arrays in float32.
//
//   narrow   to[i] = from[i], for up to three arrays, a, b and c; a missing one has no elements
//   widen    likewise
//   widen_filter   to[k][tap][c] = from[k][c][tap]: a filter's gradient with its channels last
//
// Mapping  thread -> 4 neighbours; in widen_filter one element of `to`. A block has THREADS of them.
// Memory   registers only. Sizes are arguments: one build serves all.
//
// By hand: nvcc -cubin -I cu cu/layout/cast.cu
#ifndef DTYPE
#define DTYPE 17  // of the narrow array: 16 half, 17 bfloat16
#endif
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// Elements of a block, and blocks of an array.
#define EACH (4 * THREADS)
#define BLOCKS(size) (((size) + EACH - 1) / EACH)

WITHIN_KERNEL void narrow_block(const GLOBAL_MEM acc_t* RESTRICT from, GLOBAL_MEM data_t* RESTRICT to, const long_t size, const long_t block) {
  const long_t i = EACH * block + 4 * LID_0;
  if (i + 4 <= size) {
    acc_t v[4];
    LOCAL_LOAD_VEC(v, from + i)
    STORE_VEC(to, i, v)
  } else {
    for (long_t j = i; j < size; ++j) STORE(to, j, from[j]);
  }
}

WITHIN_KERNEL void widen_block(const GLOBAL_MEM data_t* RESTRICT from, GLOBAL_MEM acc_t* RESTRICT to, const long_t size, const long_t block) {
  const long_t i = EACH * block + 4 * LID_0;
  if (i + 4 <= size) {
    acc_t v[4];
    LOAD_VEC(v, from, i)
    LOCAL_STORE_VEC(to + i, v)
  } else {
    for (long_t j = i; j < size; ++j) to[j] = LOAD(from, j);
  }
}

#define EACH_ARRAY(CAST)                                                  \
  const long_t after_a = (long_t)GID_0 - BLOCKS(size_a), after_b = after_a - BLOCKS(size_b); \
  if (after_a < 0) CAST(from_a, to_a, size_a, (long_t)GID_0);             \
  else if (after_b < 0) CAST(from_b, to_b, size_b, after_a);              \
  else CAST(from_c, to_c, size_c, after_b);

KERNEL LAUNCH_BOUNDS(THREADS, 1) void narrow(
    const GLOBAL_MEM acc_t* RESTRICT from_a, GLOBAL_MEM data_t* RESTRICT to_a, const GLOBAL_MEM acc_t* RESTRICT from_b,
    GLOBAL_MEM data_t* RESTRICT to_b, const GLOBAL_MEM acc_t* RESTRICT from_c, GLOBAL_MEM data_t* RESTRICT to_c, const long_t size_a,
    const long_t size_b, const long_t size_c) {
  AFTER_LAST_LAUNCH
  EACH_ARRAY(narrow_block)
}

KERNEL LAUNCH_BOUNDS(THREADS, 1) void widen(
    const GLOBAL_MEM data_t* RESTRICT from_a, GLOBAL_MEM acc_t* RESTRICT to_a, const GLOBAL_MEM data_t* RESTRICT from_b,
    GLOBAL_MEM acc_t* RESTRICT to_b, const GLOBAL_MEM data_t* RESTRICT from_c, GLOBAL_MEM acc_t* RESTRICT to_c, const long_t size_a,
    const long_t size_b, const long_t size_c) {
  AFTER_LAST_LAUNCH
  EACH_ARRAY(widen_block)
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
