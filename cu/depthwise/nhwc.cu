// nhwc.cu: depthwise convolutions of channels-last arrays, and their dgrad.
//
//   y[n,p,q,k] = sum over r,s of x[n, p*stride_h - pad_h + r*dil_h, q*stride_w - pad_w + s*dil_w, k / multiplier] * w[k,r,s]
//   with DGRAD: y[n,h,w,c] = sum over r,s of x[n, (h + pad_h - r*dil_h) / stride_h, (w + pad_w - s*dil_w) / stride_w, c] * w[c,r,s],
//   over the taps for which the divisions have no remainder; x is the gradient of the convolution's result, y that of its input.
//   with flip, where R is defined: the first sum with w[k,R-1-r,S-1-s], which is dgrad for a stride of 1.
//
// Neighbouring threads have neighbouring channels, which are neighbours in memory, and images are not staged: what threads beside and below one
// another both read comes from the L1 cache.
//
// Sizes    They are arguments. R, S and STRIDE may be defined, for filters without dilation: then all loops over taps are unrolled, and a
//          loaded value serves all the results of the thread that need it. Without them a loop walks the taps; along rows of
//          stride and dilation 1 each step loads one new column.
// Mapping  thread -> V channels of TILE_P x TILE_Q pixels of the result.
//          block -> 2^lanes_c threads along channels, then 2^lanes_q tiles across, 2^lanes_p tiles down, the rest along images;
//          GID_0 = ((images * blocks down + row) * blocks across + column) * blocks of channels + channels.
//          With DGRAD and STRIDE defined, which is 2 then, tiles begin where (h + pad_h) is a multiple of the stride, so that the compiler knows
//          which taps a result meets.
// Memory   registers: TILE_P * TILE_Q * V sums, one row of x. Shared, with R defined: the block's taps, [R * S][PITCH], of which it
//          fills V * 2^lanes_c of each row.
//
// By hand: nvcc -cubin -I cu cu/depthwise/nhwc.cu
#define TWO_AT_ONCE  // activations: four would spill
#include "core/portable.cuh"

#ifndef V
#define V 4
#define TILE_P 4
#define TILE_Q 4
#define DGRAD 0
#define R 3
#define S 3
#define STRIDE 1
#endif
#include "core/channels.cuh"

#define THREADS 128
#define PITCH 64  // the most channels of a block

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct DepthwiseArguments {
  long_t lanes_c, lanes_q, lanes_p;                              // threads of a block along each axis: log2
  long_t blocks_c, by_blocks_c, blocks_q, by_blocks_q, blocks_p, by_blocks_p;
  long_t n, c, k, multiplier, by_multiplier;                                 // images; channels of x and y; channels of y for each of x
  long_t h, w, p, q;                                             // sizes of a plane of x and y
  long_t r, s, stride_h, by_stride_h, stride_w, by_stride_w, pad_h, pad_w, dil_h, dil_w, flip;
  long_t has_scale, has_bias, has_residual, activation, slope;                 // the epilogue; slope: an acc_t's bits
} DepthwiseArguments;

#ifdef R
#if DGRAD
#define ROWS_READ ((TILE_P - 1) / STRIDE + (R - 1) / STRIDE + 1)
#define COLUMNS_READ ((TILE_Q - 1) / STRIDE + (S - 1) / STRIDE + 1)
// the row of the tile that meets row i of x at filter row r; it may lie outside the tile
#define TILE_ROW(i, r) (((i) - (R - 1) / STRIDE) * STRIDE + (r))
#define TILE_COLUMN(j, s) (((j) - (S - 1) / STRIDE) * STRIDE + (s))
#define MEETS(i, r) 1
#else
#define ROWS_READ ((TILE_P - 1) * STRIDE + R)
#define COLUMNS_READ ((TILE_Q - 1) * STRIDE + S)
#define TILE_ROW(i, r) (((i) - (r)) / STRIDE)
#define TILE_COLUMN(j, s) (((j) - (s)) / STRIDE)
#define MEETS(i, r) ((i) >= (r) && ((i) - (r)) % STRIDE == 0)
#endif
#if TILE_Q == 4
#define STAGE STAGE_TAPS
#define AHEAD (STRIDE > 1 ? 0 : 1)  // rows that are loaded before they are needed
#define LOAD_ROW(i)                                                                                                            \
  {                                                                                                                            \
    const int h = h0 + (i), there = mine && (unsigned)h < (unsigned)h_end;                                                     \
    const index_t line = image + (index_t)h * w_end;                                                                           \
    _Pragma("unroll") for (int j = 0; j < COLUMNS_READ; ++j)                                                                   \
      if (there && (unsigned)(w0 + j) < (unsigned)w_end) rows[i][j] = CHANNELS(x, (line + w0 + j) * c_all + c);                \
      else rows[i][j] = NO_CHANNELS;                                                                                           \
  }
#else  // few pixels: a thread waits once for all that its registers hold
#define FITTING_ROWS (72 / (COLUMNS_READ * V * (DTYPE < 32 ? 2 : 4) / 4))
#define AHEAD (FITTING_ROWS < ROWS_READ ? FITTING_ROWS : ROWS_READ)
#define LOAD_ROW(i)                                                                                                            \
  {                                                                                                                            \
    const int h = h0 + (i), there = mine && (unsigned)h < (unsigned)h_end;                                                     \
    const index_t line = image + (index_t)h * w_end;                                                                           \
    LOAD_COLUMNS(rows[i], COLUMNS_READ, x + ((line + w0) * c_all + c), c_all, there && (unsigned)(w0 + j) < (unsigned)w_end)   \
  }
#define AT_ONCE (R * S > 9 ? 13 : 5)  // taps
#define STAGE(taps, pitch, first, n)                                                                                           \
  for (int from = LID_0; from < R * S * (n); from += AT_ONCE * THREADS) {                                                      \
    acc_t found[AT_ONCE];                                                                                                      \
    _Pragma("unroll") for (int j = 0; j < AT_ONCE; ++j) {                                                                      \
      const int i = from + j * THREADS;                                                                                        \
      found[j] = 0;                                                                                                            \
      if (i < R * S * (n) && (first) + i / (R * S) < k_all) found[j] = LOAD(w, (index_t)(first) * (R * S) + i);                \
    }                                                                                                                          \
    _Pragma("unroll") for (int j = 0; j < AT_ONCE; ++j) {                                                                      \
      const int i = from + j * THREADS, channel = i / (R * S), tap = i - channel * (R * S);                                    \
      if (i < R * S * (n)) (taps)[(arg.flip ? R * S - 1 - tap : tap) * (pitch) + channel] = found[j];                          \
    }                                                                                                                          \
  }
#endif
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 4) void depthwise_nhwc(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                        const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                        const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y, const DepthwiseArguments arg) {
  AFTER_LAST_LAUNCH
  const int c_all = (int)arg.c, k_all = (int)arg.k, h_end = (int)arg.h, w_end = (int)arg.w, p_end = (int)arg.p, q_end = (int)arg.q;
  const int across = divided((int)GID_0, arg.by_blocks_c), chunk = (int)GID_0 - across * (int)arg.blocks_c;
  const int down = divided(across, arg.by_blocks_q), images = divided(down, arg.by_blocks_p);
  const int lane_c = LID_0 & ((1 << (int)arg.lanes_c) - 1), above_c = LID_0 >> (int)arg.lanes_c;
  const int lane_q = above_c & ((1 << (int)arg.lanes_q) - 1), above_q = above_c >> (int)arg.lanes_q;
  const int lane_p = above_q & ((1 << (int)arg.lanes_p) - 1), lane_n = above_q >> (int)arg.lanes_p;
  const int lanes_n = THREADS >> ((int)arg.lanes_c + (int)arg.lanes_q + (int)arg.lanes_p);
  const int first_k = chunk << (int)arg.lanes_c, k = (first_k + lane_c) * V;
  const int n = images * lanes_n + lane_n;
  const int column = ((across - down * (int)arg.blocks_q) << (int)arg.lanes_q) + lane_q;
  const int row = ((down - images * (int)arg.blocks_p) << (int)arg.lanes_p) + lane_p;

  const int mine = n < (int)arg.n && k < k_all;
  const int c = V > 1 ? k : divided(k, arg.by_multiplier);  // several channels a thread: then x and y have the same channels
  const index_t image = (index_t)n * h_end * w_end;         // pixels before it
  acc_t sum[TILE_P][TILE_Q][V];
#pragma unroll
  for (int i = 0; i < TILE_P; ++i)
#pragma unroll
    for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
      for (int v = 0; v < V; ++v) sum[i][j][v] = 0;

#ifdef R
#if DGRAD
  const int p0 = row * TILE_P - (int)arg.pad_h % STRIDE, q0 = column * TILE_Q - (int)arg.pad_w % STRIDE;
  const int h0 = (p0 + (int)arg.pad_h) / STRIDE - (R - 1) / STRIDE, w0 = (q0 + (int)arg.pad_w) / STRIDE - (S - 1) / STRIDE;
#else
  const int p0 = row * TILE_P, q0 = column * TILE_Q;
  const int h0 = p0 * STRIDE - (int)arg.pad_h, w0 = q0 * STRIDE - (int)arg.pad_w;
#endif
  // the first rows are under way while the block waits for its taps
  Channels rows[ROWS_READ][COLUMNS_READ];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) LOAD_ROW(i)
  LOCAL_MEM acc_t taps[R * S * PITCH];
  STAGE(taps, PITCH, first_k * V, V << (int)arg.lanes_c)
  local_barrier();
  if (!mine) return;
#pragma unroll
  for (int i = 0; i < ROWS_READ; ++i) {
    if (i + AHEAD < ROWS_READ) LOAD_ROW(i + AHEAD)
    acc_t read[COLUMNS_READ][V];
#pragma unroll
    for (int j = 0; j < COLUMNS_READ; ++j) UNPACK_CHANNELS(read[j], rows[i][j])
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (MEETS(i, r) && TILE_ROW(i, r) >= 0 && TILE_ROW(i, r) < TILE_P) {
        const int to = TILE_ROW(i, r);
        acc_t part[TILE_Q][V];  // of one row of the filter: short sums lose less
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) part[j][v] = DTYPE < 32 ? sum[to][j][v] : 0;
#pragma unroll
        for (int s = 0; s < S; ++s) {
          const LOCAL_MEM_POINTER acc_t* const tap = taps + (r * S + s) * PITCH + lane_c * V;
          acc_t factor[V];
#pragma unroll
          for (int v = 0; v < V; ++v) factor[v] = tap[v];
#pragma unroll
          for (int j = 0; j < COLUMNS_READ; ++j)
            if (MEETS(j, s) && TILE_COLUMN(j, s) >= 0 && TILE_COLUMN(j, s) < TILE_Q)
#pragma unroll
              for (int v = 0; v < V; ++v) part[TILE_COLUMN(j, s)][v] += read[j][v] * factor[v];
        }
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) sum[to][j][v] = DTYPE < 32 ? part[j][v] : sum[to][j][v] + part[j][v];
      }
    }
  }
#else
  if (!mine) return;
  const int p0 = row * TILE_P, q0 = column * TILE_Q;
  const int filter_h = (int)arg.r, filter_w = (int)arg.s, dil_h = (int)arg.dil_h, dil_w = (int)arg.dil_w;
  const int stride_h = (int)arg.stride_h, stride_w = (int)arg.stride_w;
  // in rows of stride and dilation 1 the pixels of a tile move one column on with each tap, to the left with DGRAD
  const int slides = stride_w == 1 && dil_w == 1, step = DGRAD ? -1 : 1;
  for (int r = 0; r < filter_h; ++r) {
    acc_t read[TILE_P][TILE_Q][V], part[TILE_P][TILE_Q][V];
#pragma unroll
    for (int i = 0; i < TILE_P; ++i)
#pragma unroll
      for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
        for (int v = 0; v < V; ++v) part[i][j][v] = read[i][j][v] = 0;
    for (int s = 0; s < filter_w; ++s) {
      acc_t factor[V];
#pragma unroll
      for (int v = 0; v < V; ++v) factor[v] = LOAD(w, ((index_t)(k + v) * filter_h + r) * filter_w + s);
#pragma unroll
      for (int i = 0; i < TILE_P; ++i) {
#if DGRAD
        const int from_h = p0 + i + (int)arg.pad_h - r * dil_h, h = from_h < 0 ? -1 : divided(from_h, arg.by_stride_h);
        const int row_there = h >= 0 && h < h_end && h * stride_h == from_h;
#else
        const int h = (p0 + i) * stride_h - (int)arg.pad_h + r * dil_h, row_there = h >= 0 && h < h_end;
#endif
        const index_t line = image + (index_t)h * w_end;
#pragma unroll
        for (int at = 0; at < TILE_Q; ++at) {
          const int j = DGRAD ? TILE_Q - 1 - at : at, next = j + step;  // in the order in which the values move
          const int newest = DGRAD ? j == 0 : j == TILE_Q - 1;
          if (slides && s && !newest) {
#pragma unroll
            for (int v = 0; v < V; ++v) read[i][j][v] = read[i][next < 0 ? 0 : next < TILE_Q ? next : j][v];
          } else {
#if DGRAD
            const int from_w = q0 + j + (int)arg.pad_w - s * dil_w, col = from_w < 0 ? -1 : divided(from_w, arg.by_stride_w);
            const int there = row_there && col >= 0 && col < w_end && col * stride_w == from_w;
#else
            const int col = (q0 + j) * stride_w - (int)arg.pad_w + s * dil_w, there = row_there && col >= 0 && col < w_end;
#endif
#pragma unroll
            for (int v = 0; v < V; ++v) read[i][j][v] = 0;
            if (there) LOAD_CHANNELS(read[i][j], x, (line + col) * c_all + c)
          }
#pragma unroll
          for (int v = 0; v < V; ++v) part[i][j][v] += read[i][j][v] * factor[v];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TILE_P; ++i)
#pragma unroll
      for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
        for (int v = 0; v < V; ++v) sum[i][j][v] += part[i][j][v];
  }
#endif

  EPILOGUE_FLAGS
  acc_t times[V], plus[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    times[v] = SCALE_OF(k + v);
    plus[v] = BIAS_OF(k + v);
  }
#pragma unroll
  for (int i = 0; i < TILE_P; ++i) {
    const index_t at = (((index_t)n * p_end + p0 + i) * q_end + q0) * k_all + k;
    STORE_COLUMNS(y, at, TILE_Q, sum[i], (unsigned)(p0 + i) < (unsigned)p_end && (unsigned)(q0 + j) < (unsigned)q_end)
  }
}
