// product.cu: the product over frequencies: y[k][pair] = sum over c of x[c][pair] * f[c][k], always in the same order.
//
// Mapping  block -> THREADS frequencies of COLUMNS pairs of tiles and ROWS channels of the result, of one group; thread -> one frequency
//          of each. Neighbouring threads have neighbouring frequencies.
// Memory   registers: the sums, and the frequencies of a channel c that they take. No shared memory.
//
// By hand: nvcc -cubin -I cu cu/fft/product.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 128
#define ROWS 4
#define COLUMNS 4
#define FREQUENCIES 4096
#endif

#include "fft/fft.cuh"

KERNEL LAUNCH_BOUNDS(THREADS, 1) void fft_product(const GLOBAL_MEM wide_t* x, const GLOBAL_MEM wide_t* filters, GLOBAL_MEM wide_t* y,
                                                  const FftArguments arg) {
  AFTER_LAST_LAUNCH
  const int slices = FREQUENCIES / THREADS, columns = (int)arg.pairs, channels = (int)arg.channels;
  const int of_column = (columns + COLUMNS - 1) / COLUMNS, of_row = ((int)arg.per_group + ROWS - 1) / ROWS;
  // blocks that read the same filters come one after the other
  int block = (int)GID_0;
  const int column0 = block % of_column * COLUMNS;
  block /= of_column;
  const int frequency = block % slices * THREADS + LID_0;
  block /= slices;
  const int row0 = block % of_row * ROWS, group = block / of_row;
  complex_t sums[ROWS][COLUMNS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) sums[i][j] = COMPLEX(0, 0);
  const GLOBAL_MEM complex_t* from = (const GLOBAL_MEM complex_t*)(x + arg.read_at) + frequency;
  const GLOBAL_MEM complex_t* taps = (const GLOBAL_MEM complex_t*)filters + frequency;
  for (int c = 0; c < channels; ++c) {
    const long_t channel = group * channels + c;
    complex_t f[ROWS], v[COLUMNS];
    // what lies past the end is computed from real elements, and not written
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      f[i] = taps[(channel * arg.per_group + (row0 + i < (int)arg.per_group ? row0 + i : (int)arg.per_group - 1)) * FREQUENCIES];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) v[j] = from[(channel * columns + (column0 + j < columns ? column0 + j : columns - 1)) * FREQUENCIES];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const complex_t more = times(f[i], v[j]);
        sums[i][j] = COMPLEX(sums[i][j].x + more.x, sums[i][j].y + more.y);
      }
  }
  GLOBAL_MEM complex_t* to = (GLOBAL_MEM complex_t*)(y + arg.written_at) + frequency;
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
      if (row0 + i < (int)arg.per_group && column0 + j < columns)
        to[((group * arg.per_group + row0 + i) * columns + column0 + j) * FREQUENCIES] = sums[i][j];
}
