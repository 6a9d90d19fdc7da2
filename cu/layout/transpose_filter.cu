// transpose_filter.cu: a filter with its axes in another order, so that a product's channels are neighbours:
//
//   transposed[row][tap][channel] = w[row, tap, channel], where w has any strides, and transposed's rows a pitch
//
// Mapping  block: 64 rows x 64 channels of a tap, 16 a thread, all loads under way at once. If w's rows lie closer together than its
//          channels, lanes read along the rows.
// Shared   the tile, pitch 65: no bank conflicts either way.
//
// By hand: nvcc -cubin -I cu cu/layout/transpose_filter.cu
#include "core/packed.cuh"

#ifndef BYTES
#define BYTES 2  // of an element: 2 or 4
#endif

typedef WordOf<BYTES>::type element_t;
constexpr int TILE = 64, THREADS = 256, EACH = TILE * TILE / THREADS;

struct TransposedFilter {
  long long rows, taps, by_taps, channels;     // size of the transposed filter; by_: a prepared divisor (division.cuh)
  long long tiles_c, by_tiles_c;               // tiles along the channels
  long long row_step, tap_step, channel_step;  // elements of w from one to the next
  long long pitch;                             // elements of the transposed filter from one row to the next
};

extern "C" __global__ void __launch_bounds__(THREADS)
    transpose_filter(const element_t* __restrict__ w, element_t* __restrict__ transposed, const TransposedFilter of) {
  __shared__ element_t tile[TILE][TILE + 1];
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Divided across(blockIdx.x, of.tiles_c, of.by_tiles_c), down(across.quotient, of.taps, of.by_taps);
  const int channel0 = across.rest * TILE, tap = down.rest, row0 = down.quotient * TILE;
  const bool along_rows = of.row_step < of.channel_step;
  auto there = [&](int row, int channel) { return row0 + row < (int)of.rows && channel0 + channel < (int)of.channels; };
  element_t v[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int lane = threadIdx.x % TILE, line = threadIdx.x / TILE + i * (THREADS / TILE), row = along_rows ? lane : line, channel = along_rows ? line : lane;
    if (there(row, channel)) v[i] = w[(row0 + row) * of.row_step + tap * of.tap_step + (channel0 + channel) * of.channel_step];
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int lane = threadIdx.x % TILE, line = threadIdx.x / TILE + i * (THREADS / TILE);
    tile[along_rows ? lane : line][along_rows ? line : lane] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int lane = threadIdx.x % TILE, line = threadIdx.x / TILE + i * (THREADS / TILE);
    if (there(line, lane)) transposed[(row0 + line) * of.pitch + tap * of.channels + channel0 + lane] = tile[line][lane];
  }
}
