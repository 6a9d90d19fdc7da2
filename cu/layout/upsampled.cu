// upsampled.cu: images with each pixel as often as asked along each axis (nearest upsampling by whole factors).
//
//   wide[outer, d*U + i, h*V + j, w*X + k, inner] = x[outer, d, h, w, inner]   for all i < U, j < V, k < X
//
// Layout   x [outer][d][h][w][inner], in words: an element, or as much of a pixel's channels as a load may take. inner is 1 for NCHW.
// Mapping  thread -> a word of x, which it loads once and stores U V X times. Neighbouring threads have neighbouring words, so they write
//          neighbours in each line of wide: with channels last whole runs, in NCHW every X-th element, and the stores of one word fill the gaps.
// Memory   registers only.
//
// By hand: nvcc -cubin -I cu cu/layout/upsampled.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef BYTES
#define BYTES 16  // of a word: 1, 2, 4, 8 or 16
#endif
#ifdef __OPENCL_VERSION__
typedef ulong enlarged8_t;
typedef uint4 enlarged16_t;
#else
typedef unsigned long long enlarged8_t;
typedef uint4 enlarged16_t;
#endif
#if BYTES == 1
typedef unsigned char word_t;
#elif BYTES == 2
typedef unsigned short word_t;
#elif BYTES == 4
typedef unsigned int word_t;
#elif BYTES == 8
typedef enlarged8_t word_t;
#else
typedef enlarged16_t word_t;
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct EnlargeArguments {
  long_t size;                          // words of x
  long_t inner, by_inner, line, by_line;  // words of a pixel and of a row of x
  long_t h, by_h;                       // rows of a slice
  long_t times_d, times_h, times_w;     // U, V, X
} EnlargeArguments;

KERNEL LAUNCH_BOUNDS(THREADS, 1) void enlarge(const GLOBAL_MEM word_t* RESTRICT x, GLOBAL_MEM word_t* RESTRICT wide, const EnlargeArguments arg) {
  AFTER_LAST_LAUNCH
  const index_t i = (index_t)GID_0 * THREADS + LID_0;
  if (i >= (index_t)arg.size) return;
  const word_t word = x[i];
  const index_t row = DIVIDED(i, arg.line, arg.by_line), in_row = i - row * (index_t)arg.line, pixel = DIVIDED(in_row, arg.inner, arg.by_inner);
  const index_t slice = DIVIDED(row, arg.h, arg.by_h), h = row - slice * (index_t)arg.h;
  const int times_d = (int)arg.times_d, times_h = (int)arg.times_h, times_w = (int)arg.times_w;
  const index_t rows = (index_t)arg.h * times_h, wide_line = (index_t)arg.line * times_w, inner = (index_t)arg.inner;
  const index_t in_wide_row = pixel * times_w * inner + (in_row - pixel * inner);
  for (int a = 0; a < times_d; ++a)
    for (int b = 0; b < times_h; ++b) {
      const index_t to = ((slice * times_d + a) * rows + h * times_h + b) * wide_line + in_wide_row;
      for (int c = 0; c < times_w; ++c) wide[to + c * inner] = word;
    }
}
