// nhwc_strips.cu: depthwise convolutions of channels-last arrays, by threads that walk down the image.
//
//   y[n,p,q,k] = sum over r,s of x[n, p*STRIDE - pad_h + r, q*STRIDE - pad_w + s, k / multiplier] * w[k,r,s]
//   with flip: w[k, R-1-r, S-1-s] instead, which is dgrad of a convolution of stride 1.
//
// depthwise/nhwc.cu computes the same by tiles, and adds the same numbers in the same order. Here a thread loads each row of x that its
// strip needs once, and uses it for all rows of y that need it. Threads above and below one another share next to nothing.
//
// Sizes    They are arguments. R x S filters of stride STRIDE without dilation have a text.
// Mapping  thread -> V channels of TILE_Q neighbouring columns of y, in a strip of `rows` rows: from the top down, one row of x a step.
//          block -> lanes_c threads along channels, then lanes_u threads along units: the columns' tiles of all images, in order. The
//          block's last threads, which would begin another unit, are idle.
//          GID_0 = (units * strips + strip) * blocks of channels + channels.
// Border   BORDERED texts find the pixel that stands outside the image, no further than its other end; rows and columns inside of it are loaded as in the
//          others.
// Memory   registers: the sums of the LIVE rows of y that one row of x meets, the oldest first; the row of x; AHEAD rows to come. When the
//          oldest row of sums is complete and stored, the others take its place: a sum is added to in one register and written to another.
//          Shared: the block's taps, scale and bias, [R * S + 2][PITCH].
//
// By hand: nvcc -cubin -I cu cu/depthwise/nhwc_strips.cu
#include "core/portable.cuh"
#include "core/border.cuh"

#ifndef V
#define V 4
#define R 3
#define S 3
#define STRIDE 1
#endif
#ifndef BORDERED
#define BORDERED 0
#endif
#include "core/channels.cuh"

#define THREADS 128
#define TILE_Q 4
#define PITCH 64                                                            // the most channels of a block
#define COLUMNS ((TILE_Q - 1) * STRIDE + S)                                 // of x, that a row of a thread's results reads
#define LIVE ((R - 1) / STRIDE + 1)
#define WIDER (DTYPE == 32 && R == 3 && V == 4 && STRIDE == 1)              // more loads under way gain more than a fourth block
#define AHEAD ((DTYPE < 32 && R == 3) || WIDER ? 2 : 1)                     // as registers allow
#define SKIPS (R == 5 && V == 4)                                            // rows of sums outside the strip are left out, by a branch for each
#define TURN (STRIDE > AHEAD ? STRIDE : AHEAD)                              // steps after which all values are in the same registers again
#define BLOCKS (R == 7 || DTYPE == 64 || INDEX_64 || R * V > 12 || WIDER ? 3 : 4)  // blocks of a multiprocessor at once

// For step i = m modulo STRIDE: the filter row that meets the k-th row of sums, the last k, and whether the first row is complete.
#define NEWEST(m) ((R - 1 - (m)) / STRIDE)
#define FILTER_ROW(m, k) ((m) + STRIDE * (NEWEST(m) - (k)))
#define COMPLETES(m) ((R - 1 - (m)) % STRIDE == 0)

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct DepthwiseStripsArguments {
  long_t lanes_c, by_lanes_c, lanes_u;                                           // threads of a block
  long_t blocks_c, by_blocks_c, strips, by_strips, tiles_q, by_tiles_q, rows;
  long_t n, c, k, multiplier, by_multiplier;                                     // images; channels of x and y; channels of y for each of x
  long_t h, w, p, q;                                                             // sizes of a plane of x and y
  long_t pad_h, pad_w, flip;
  long_t bordered, value;                                                        // whether x has a border other than zeros; an acc_t's bits
  long_t near_h, last_near_h, step_h, near_w, last_near_w, step_w;
  long_t fills_h, fills_w;                                                       // border.cuh
  long_t has_scale, has_bias, has_residual, activation, slope;                                 // the epilogue; slope: an acc_t's bits
} DepthwiseStripsArguments;

// Loads row i of the strip's rows of x; zeros outside the image or below the strip.
#if BORDERED
#define LOAD_ROW(i, row)                                                                                            \
  {                                                                                                                 \
    const int h = h0 + (i), wanted = mine && (i) < steps;                                                           \
    int of_row = h, filled = 0;                                                                                     \
    const GLOBAL_MEM data_t* line = from;                                                                           \
    if ((unsigned)h >= (unsigned)(int)arg.h) { /* alike for all of the block's threads */                           \
      TO_NEAR_PIXEL(of_row, (int)arg.h, h)                                                                          \
      line = from + (long_t)(of_row - h) * x_row;                                                                   \
    }                                                                                                               \
    if (wanted && !filled && inside) { /* most threads */                                                           \
      _Pragma("unroll") for (int j = 0; j < COLUMNS; ++j) (row)[j] = CHANNELS(line, j * c_all);                      \
    } else { /* what stands there is found once more for each row: no registers keep it */                          \
      _Pragma("unroll") for (int j = 0; j < COLUMNS; ++j) {                                                         \
        int col = w0 + j, shows = filled;                                                                           \
        {                                                                                                           \
          int filled = shows;                                                                                       \
          TO_NEAR_PIXEL(col, w_end, w)                                                                              \
          shows = filled;                                                                                           \
        }                                                                                                           \
        (row)[j] = shows == 1 ? filled_channels(BITS_TO_ACC(arg.value)) : NO_CHANNELS;                              \
        if (wanted && !shows) (row)[j] = CHANNELS(line, (col - w0) * c_all);                                        \
      }                                                                                                             \
    }                                                                                                               \
    from += x_row;                                                                                                  \
  }
#else
#define LOAD_ROW(i, row)                                                                                            \
  {                                                                                                                 \
    const int h = h0 + (i), there = mine && h >= 0 && h < h_stop;                                                   \
    LOAD_COLUMNS(row, COLUMNS, from, c_all, there && (unsigned)(w0 + j) < (unsigned)w_end)                          \
    from += x_row;                                                                                                  \
  }
#endif

KERNEL LAUNCH_BOUNDS(THREADS, BLOCKS) void depthwise_nhwc_strips(const GLOBAL_MEM data_t* RESTRICT x,
                        const GLOBAL_MEM data_t* RESTRICT w, const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                        const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y, const DepthwiseStripsArguments arg) {
  AFTER_LAST_LAUNCH
  const int c_all = (int)arg.c, k_all = (int)arg.k, w_end = (int)arg.w, p_end = (int)arg.p, q_end = (int)arg.q;
  const int above_c = divided((int)GID_0, arg.by_blocks_c), chunk = (int)GID_0 - above_c * (int)arg.blocks_c;
  const int units = divided(above_c, arg.by_strips), strip = above_c - units * (int)arg.strips;
  const int lane_u = divided(LID_0, arg.by_lanes_c), lane_c = LID_0 - lane_u * (int)arg.lanes_c;
  const int unit = units * (int)arg.lanes_u + lane_u, n = divided(unit, arg.by_tiles_q), q0 = (unit - n * (int)arg.tiles_q) * TILE_Q;
  const int first_k = chunk * (int)arg.lanes_c * V, k = first_k + lane_c * V;
  const int mine = lane_u < (int)arg.lanes_u && n < (int)arg.n && k < k_all;
  const int c = V > 1 ? k : divided(k, arg.by_multiplier);  // several channels a thread: then x and y have the same channels

  const int p0 = strip * (int)arg.rows, rows = p_end - p0 < (int)arg.rows ? p_end - p0 : (int)arg.rows, steps = (rows - 1) * STRIDE + R;
  const int h0 = p0 * STRIDE - (int)arg.pad_h, w0 = q0 * STRIDE - (int)arg.pad_w;
#if BORDERED
  const int inside = w0 >= 0 && w0 + COLUMNS <= w_end;
#else
  const int h_stop = h0 + steps < (int)arg.h ? h0 + steps : (int)arg.h;
#endif
  const index_t y_row = (index_t)q_end * k_all;
  const long_t x_row = (long_t)w_end * c_all;
  // the next row to load, which may be far above the image, and the next to store
  const GLOBAL_MEM data_t* from = x + (((long_t)n * (int)arg.h + h0) * x_row + (long_t)w0 * c_all + c);
  index_t to = ((index_t)n * p_end + p0) * y_row + (index_t)q0 * k_all + k;
  Channels coming[AHEAD][COLUMNS];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) LOAD_ROW(i, coming[i])

  EPILOGUE_FLAGS
  LOCAL_MEM acc_t taps[(R * S + 2) * PITCH];
  const int channels = (int)arg.lanes_c * V;
  STAGE_TAPS(taps, PITCH, first_k, channels)
  for (int i = LID_0; i < channels; i += THREADS)
    if (first_k + i < k_all) {
      taps[R * S * PITCH + i] = SCALE_OF(first_k + i);
      taps[(R * S + 1) * PITCH + i] = BIAS_OF(first_k + i);
    }
  local_barrier();
  if (!mine) return;

  acc_t sum[LIVE][TILE_Q][V];
#pragma unroll
  for (int i = 0; i < LIVE; ++i)
#pragma unroll
    for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
      for (int v = 0; v < V; ++v) sum[i][j][v] = 0;

  int own = lane_c * V;  // this thread's first tap
  for (int i0 = 0; i0 < steps; i0 += TURN) {
#pragma unroll
    for (int turn = 0; turn < TURN; ++turn) {
      const int i = i0 + turn, m = turn % STRIDE;
      HIDE(own)  // else the compiler would keep all taps in registers
      acc_t read[COLUMNS][V];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) UNPACK_CHANNELS(read[j], coming[turn % AHEAD][j])
      LOAD_ROW(i + AHEAD, coming[turn % AHEAD])
#pragma unroll
      for (int row = 0; row <= NEWEST(m); ++row) {
        // rows of sums above the strip or below it only move up
        if (SKIPS && (unsigned)(i - FILTER_ROW(m, row)) >= (unsigned)(rows * STRIDE)) {
          if (COMPLETES(m) && row)
#pragma unroll
            for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
              for (int v = 0; v < V; ++v) sum[row - 1][j][v] = sum[row][j][v];
          continue;
        }
        acc_t part[TILE_Q][V];  // of one row of the filter: short sums lose less
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) part[j][v] = DTYPE < 32 ? sum[row][j][v] : 0;
#pragma unroll
        for (int s = 0; s < S; ++s) {
          const LOCAL_MEM_POINTER acc_t* const tap = taps + (FILTER_ROW(m, row) * S + s) * PITCH + own;
          acc_t factor[V];
#pragma unroll
          for (int v = 0; v < V; ++v) factor[v] = tap[v];
#pragma unroll
          for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
            for (int v = 0; v < V; ++v) part[j][v] += read[j * STRIDE + s][v] * factor[v];
        }
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const acc_t all = DTYPE < 32 ? part[j][v] : sum[row][j][v] + part[j][v];
            if (COMPLETES(m) && row) sum[row - 1][j][v] = all;
            else sum[row][j][v] = all;
          }
        if (COMPLETES(m) && row == 0 && (SKIPS || (i >= R - 1 && i < steps))) {
          acc_t times[V], plus[V];
#pragma unroll
          for (int v = 0; v < V; ++v) {
            times[v] = taps[R * S * PITCH + own + v];
            plus[v] = taps[(R * S + 1) * PITCH + own + v];
          }
          STORE_COLUMNS(y, to, TILE_Q, sum[0], q0 + j < q_end)
          to += y_row;
        }
      }
      if (COMPLETES(m)) {
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) sum[NEWEST(m)][j][v] = 0;
      }
    }
  }
}
