// nhwc_wgrad.cu: depthwise wgrad from channels-last arrays.
//
//   w[k,r,s] = sum over n,p,q of y[n,p,q,k] * x[n, p*stride_h - pad_h + r*dil_h, q*stride_w - pad_w + s*dil_w, k / multiplier]
//
// y is the gradient of the convolution's result. The sum over its pixels is cut into parts, so that long sums for few channels fill the
// GPU; direct/reduce.cu adds the parts, always in the same order.
//
// Sizes    They are arguments. STRIDE may be defined, for filters without dilation: then a thread keeps the rows of x that a row of y
//          reads, and loads each of them once.
// Mapping  block -> lanes_c threads along channels, and lanes_u along units; TAPS_R x TAPS_S taps; one of `parts` of the units. A unit is TILE_Q columns
//          of y in `rows` of its rows; units are ordered image, strip of rows, columns. Each thread takes `rounds` units one after another.
//          The block's last threads, which would begin another unit, are idle.
//          GID_0 = ((part * chunks of rows of taps + row) * chunks across + column) * blocks of channels + channels.
//          thread -> V of the channels; it walks down each of its units, one row of y a step.
// Memory   registers: TAPS_R * TAPS_S * V sums; with STRIDE the rows of x that the taps meet, a ring, and what the next AHEAD steps need;
//          else a row of y. Shared: sums of AT_ONCE taps of all threads, added by channel and tap at the end.
//
// By hand: nvcc -cubin -I cu cu/depthwise/nhwc_wgrad.cu
#include "core/portable.cuh"

#ifndef V
#define V 2
#define TAPS_R 3
#define TAPS_S 3
#define STRIDE 1
#endif
#include "core/channels.cuh"

#define THREADS 128
#define TILE_Q 4
#define AT_ONCE (DTYPE == 64 ? 4 : 8)
#define TAPS (TAPS_R * TAPS_S)
#define SUM_REGISTERS (TAPS * V * (DTYPE == 64 ? 2 : 1))
#define BLOCKS (SUM_REGISTERS <= 36 ? 4 : SUM_REGISTERS <= 64 ? 3 : 2)  // blocks of a multiprocessor at once
#ifdef STRIDE
#define COLUMNS ((TILE_Q - 1) * STRIDE + TAPS_S)                  // of x, that a thread's pixels of a row of y read
#define LIVE ((TAPS_R - 1) / STRIDE + 1)
#define AHEAD (DTYPE < 32 && TAPS_R == 3 && STRIDE == 1 ? 2 : 1)  // 16 bits need more loads under way
#define TURN (STRIDE > AHEAD ? STRIDE : AHEAD)                    // steps after which all values are in the same registers again
// For step i = m modulo STRIDE: the last row of y that is kept and met, row k's tap, and whether the first row is met no more.
#define NEWEST(m) ((TAPS_R - 1 - (m)) / STRIDE)
#define TAP_ROW(m, k) ((m) + STRIDE * (NEWEST(m) - (k)))
#define COMPLETES(m) ((TAPS_R - 1 - (m)) % STRIDE == 0)
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct DepthwiseWgradArguments {
  long_t lanes_c, by_lanes_c, lanes_u, channels, by_channels;  // threads of a block, its channels
  long_t blocks_c, by_blocks_c, blocks_s, by_blocks_s, blocks_r, by_blocks_r, parts;
  long_t units, rounds, tiles_q, by_tiles_q, strips, by_strips, rows;
  long_t c, k, multiplier, by_multiplier;  // channels of x and y; channels of y for each of x
  long_t h, w, p, q;                       // sizes of a plane of x and y
  long_t r, s, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w;
} DepthwiseWgradArguments;

#if DTYPE < 32
#define STORE_SUM(at, v)                                             \
  {                                                                  \
    if (arg.parts > 1) ((GLOBAL_MEM acc_t*)w)[at] = (v);             \
    else STORE(w, at, v);                                            \
  }
#else
#define STORE_SUM(at, v) STORE(w, at, v);
#endif

#ifdef STRIDE
// Loads row i of the unit's rows of x, and with it the row of y whose first tap it meets. `turn` is i modulo a multiple of STRIDE.
#define LOAD_ROWS(i, turn, x_to, y_to)                                                                \
  {                                                                                                   \
    const int h = h0 + (i), there = h >= 0 && h < h_stop;                                             \
    LOAD_COLUMNS(x_to, COLUMNS, from_x, c_all, there && (unsigned)(w0 + j) < (unsigned)w_end)         \
    from_x += x_row;                                                                                  \
    if ((turn) % STRIDE == 0) {                                                                       \
      const int row_there = (i) < rows * STRIDE;                                                      \
      LOAD_COLUMNS(y_to, TILE_Q, from_y, k_all, row_there && j < columns)                             \
      from_y += y_row;                                                                                \
    }                                                                                                 \
  }
// Multiplies the row of x with the rows of y that meet it.
#define MULTIPLY(IF_ROW, IF_PIXEL)                                                                                          \
  _Pragma("unroll") for (int kept = 0; kept <= NEWEST(m); ++kept)                                                           \
    IF_ROW _Pragma("unroll") for (int j = 0; j < TILE_Q; ++j)                                                               \
      IF_PIXEL _Pragma("unroll") for (int s = 0; s < TAPS_S; ++s)                                                           \
        _Pragma("unroll") for (int v = 0; v < V; ++v)                                                                       \
          sum[TAP_ROW(m, kept)][s][v] += grad[kept][j][v] * read[j * STRIDE + s][v];
#endif

KERNEL LAUNCH_BOUNDS(THREADS, BLOCKS) void depthwise_nhwc_wgrad(const GLOBAL_MEM data_t* RESTRICT x,
    const GLOBAL_MEM data_t* RESTRICT y, GLOBAL_MEM data_t* RESTRICT w, const DepthwiseWgradArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[AT_ONCE * V * THREADS];
  const int c_all = (int)arg.c, k_all = (int)arg.k, h_end = (int)arg.h, w_end = (int)arg.w, p_end = (int)arg.p, q_end = (int)arg.q;
  const int above_c = divided((int)GID_0, arg.by_blocks_c), chunk = (int)GID_0 - above_c * (int)arg.blocks_c;
  const int above_s = divided(above_c, arg.by_blocks_s), s0 = (above_c - above_s * (int)arg.blocks_s) * TAPS_S;
  const int part = divided(above_s, arg.by_blocks_r), r0 = (above_s - part * (int)arg.blocks_r) * TAPS_R;
  const int lanes_c = (int)arg.lanes_c, lanes_u = (int)arg.lanes_u, channels = (int)arg.channels;
  const int lane_u = divided(LID_0, arg.by_lanes_c), lane_c = LID_0 - lane_u * lanes_c;
  const int first_k = chunk * channels, k = first_k + lane_c * V, c = V > 1 ? k : divided(k, arg.by_multiplier);
  const index_t x_row = (index_t)w_end * c_all, y_row = (index_t)q_end * k_all;

  acc_t sum[TAPS_R][TAPS_S][V];
#pragma unroll
  for (int r = 0; r < TAPS_R; ++r)
#pragma unroll
    for (int s = 0; s < TAPS_S; ++s)
#pragma unroll
      for (int v = 0; v < V; ++v) sum[r][s][v] = 0;

  const int rounds = lane_u < lanes_u && k < k_all ? (int)arg.rounds : 0;
  for (int round = 0; round < rounds; ++round) {
    const int unit = (part * (int)arg.rounds + round) * lanes_u + lane_u;
    if (unit >= (int)arg.units) break;
    const int above_q = divided(unit, arg.by_tiles_q), n = divided(above_q, arg.by_strips);
    const int p0 = (above_q - n * (int)arg.strips) * (int)arg.rows, q0 = (unit - above_q * (int)arg.tiles_q) * TILE_Q;
    const int rows = p_end - p0 < (int)arg.rows ? p_end - p0 : (int)arg.rows;
    int columns = q_end - q0;
    const GLOBAL_MEM data_t* from_y = y + (((long_t)n * p_end + p0) * y_row + (long_t)q0 * k_all + k);
    columns = columns < TILE_Q ? columns : TILE_Q;
#ifdef STRIDE
    const int h0 = p0 * STRIDE - (int)arg.pad_h, w0 = q0 * STRIDE - (int)arg.pad_w, steps = (rows - 1) * STRIDE + TAPS_R;
    const int h_stop = h0 + steps < h_end ? h0 + steps : h_end;
    const GLOBAL_MEM data_t* from_x = x + (((long_t)n * h_end + h0) * x_row + (long_t)w0 * c_all + c);  // may be far above the image
    Channels x_coming[AHEAD][COLUMNS], y_coming[AHEAD][TILE_Q];
    acc_t grad[LIVE][TILE_Q][V];  // the rows of y, the oldest first
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) LOAD_ROWS(i, i, x_coming[i], y_coming[i])
#pragma unroll
    for (int i = 0; i < LIVE; ++i)
#pragma unroll
      for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
        for (int v = 0; v < V; ++v) grad[i][j][v] = 0;
    for (int i0 = 0; i0 < steps; i0 += TURN) {
#pragma unroll
      for (int turn = 0; turn < TURN; ++turn) {
        const int i = i0 + turn, m = turn % STRIDE;
        acc_t read[COLUMNS][V];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) UNPACK_CHANNELS(read[j], x_coming[turn % AHEAD][j])
        if (m == 0)
#pragma unroll
          for (int j = 0; j < TILE_Q; ++j) UNPACK_CHANNELS(grad[LIVE - 1][j], y_coming[turn % AHEAD][j])
        LOAD_ROWS(i + AHEAD, turn + AHEAD, x_coming[turn % AHEAD], y_coming[turn % AHEAD])
        // zeros that stand for missing pixels must not meet an Inf of x
        if (i >= TAPS_R - 1 && i <= (rows - 1) * STRIDE && columns == TILE_Q) MULTIPLY(, )
        else MULTIPLY(if (i >= TAP_ROW(m, kept) && i - TAP_ROW(m, kept) < rows * STRIDE), if (j < columns))
        if (COMPLETES(m))
#pragma unroll
          for (int row = 1; row < LIVE; ++row)
#pragma unroll
            for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
              for (int v = 0; v < V; ++v) grad[row - 1][j][v] = grad[row][j][v];
      }
    }
#else
    const int stride_w = (int)arg.stride_w, dil_w = (int)arg.dil_w, w0 = q0 * stride_w - (int)arg.pad_w + s0 * dil_w;
    for (int i = 0; i < rows; ++i) {
      Channels row[TILE_Q];
      LOAD_COLUMNS(row, TILE_Q, from_y, k_all, j < columns)
      from_y += y_row;
#pragma unroll
      for (int r = 0; r < TAPS_R; ++r) {
        const int h = (p0 + i) * (int)arg.stride_h - (int)arg.pad_h + (r0 + r) * (int)arg.dil_h, there = h >= 0 && h < h_end;
        const index_t line = ((index_t)n * h_end + h) * x_row + c;
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j) {
          if (j >= columns) continue;  // zeros that stand for missing pixels must not meet an Inf of x
          acc_t grad[V];
          UNPACK_CHANNELS(grad, row[j])
#pragma unroll
          for (int s = 0; s < TAPS_S; ++s) {
            const int col = w0 + j * stride_w + s * dil_w;
            acc_t read[V];
#pragma unroll
            for (int v = 0; v < V; ++v) read[v] = 0;
            if (there && (unsigned)col < (unsigned)w_end) LOAD_CHANNELS(read, x, line + (index_t)col * c_all)
#pragma unroll
            for (int v = 0; v < V; ++v) sum[r][s][v] += grad[v] * read[v];
          }
        }
      }
    }
#endif
  }

#pragma unroll
  for (int first = 0; first < TAPS; first += AT_ONCE) {
    if (lane_u < lanes_u)
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
        for (int v = 0; v < V; ++v)
          if (first + i < TAPS) sums[(i * lanes_u + lane_u) * channels + lane_c * V + v] = sum[(first + i) / TAPS_S][(first + i) % TAPS_S][v];
    local_barrier();
    for (int i = LID_0; i < AT_ONCE * channels; i += THREADS) {
      const int below = divided(i, arg.by_channels), tap = first + below, channel = i - below * channels, to = first_k + channel;
      const int r = r0 + tap / TAPS_S, s = s0 + tap % TAPS_S;
      if (tap < TAPS && r < (int)arg.r && s < (int)arg.s && to < k_all) {
        acc_t all = 0;
        for (int j = 0; j < lanes_u; ++j) all += sums[(below * lanes_u + j) * channels + channel];
        const index_t at = (((index_t)part * k_all + to) * (int)arg.r + r) * (int)arg.s + s;
        STORE_SUM(at, all)
      }
    }
    local_barrier();
  }
}
