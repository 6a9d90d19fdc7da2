// depthwise_nhwc_wgrad.cu: the gradient of a depthwise convolution's filter, from arrays with their channels last.
//
//   w[k,r,s] = sum over n,p,q of y[n,p,q,k] * x[n, p*stride_h - pad_h + r*dil_h, q*stride_w - pad_w + s*dil_w, k / multiplier]
//
// y is the gradient of the convolution's result. The sum over its pixels is cut into parts, so that long sums for few channels fill the
// machine; direct_reduce.cu adds the parts, always in the same order.
//
// Sizes    They are arguments. STRIDE may be defined, for filters without dilation: then a loaded value of x meets all of a thread's
//          pixels and taps that need it.
// Mapping  block -> CHUNK channels, TAPS_R x TAPS_S taps, one of `parts` runs of row pieces: TILE_Q neighbouring pixels of y;
//          GID_0 = ((part * chunks of rows of taps + row) * chunks across + column) * blocks of channels + channels.
//          thread -> V of the channels, and every so many-th piece of the run.
// Memory   registers: TAPS_R * TAPS_S * V sums, a piece of y and what a row of taps meets of x. Shared: sums of AT_ONCE taps of all
//          threads, added by channel and tap at the end.
//
// By hand: nvcc -cubin cu/depthwise_nhwc_wgrad.cu
#include "portable.cuh"

#ifndef V
#define V 4
#define CHUNK 64
#define TAPS_R 3
#define TAPS_S 3
#define STRIDE 1
#endif
#include "channels.cuh"

#define THREADS 128
#define TILE_Q 4
#define AT_ONCE (DTYPE == 64 ? 4 : 8)
#define LANES_C (CHUNK / V)
#define LANES (THREADS / LANES_C)
#define TAPS (TAPS_R * TAPS_S)

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct DepthwiseWgradArguments {
  long_t blocks_c, by_blocks_c, blocks_s, by_blocks_s, blocks_r, by_blocks_r, parts;
  long_t pieces, pieces_q, by_pieces_q;  // of all rows of y, and of one
  long_t c, k, multiplier, by_multiplier;            // channels of x and y; y's of one of x
  long_t h, w, p, by_p, q;               // sizes of a plane of x and y
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

KERNEL LAUNCH_BOUNDS(THREADS, TAPS* V <= 36 ? 4 : 3) void depthwise_nhwc_wgrad(const GLOBAL_MEM data_t* RESTRICT x,
    const GLOBAL_MEM data_t* RESTRICT y, GLOBAL_MEM data_t* RESTRICT w, const DepthwiseWgradArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[AT_ONCE * V * THREADS];
  const int c_all = (int)arg.c, k_all = (int)arg.k, h_end = (int)arg.h, w_end = (int)arg.w, q_end = (int)arg.q;
  const int above_c = divided((int)GID_0, arg.by_blocks_c), chunk = (int)GID_0 - above_c * (int)arg.blocks_c;
  const int above_s = divided(above_c, arg.by_blocks_s), s0 = (above_c - above_s * (int)arg.blocks_s) * TAPS_S;
  const int part = divided(above_s, arg.by_blocks_r), r0 = (above_s - part * (int)arg.blocks_r) * TAPS_R;
  const int lane = LID_0 / LANES_C, k = chunk * CHUNK + LID_0 % LANES_C * V, c = V > 1 ? k : divided(k, arg.by_multiplier);
  const int stride_w = (int)arg.stride_w, dil_w = (int)arg.dil_w;

  acc_t sum[TAPS_R][TAPS_S][V];
#pragma unroll
  for (int r = 0; r < TAPS_R; ++r)
#pragma unroll
    for (int s = 0; s < TAPS_S; ++s)
#pragma unroll
      for (int v = 0; v < V; ++v) sum[r][s][v] = 0;

  const int last = k < k_all ? (int)(arg.pieces * (part + 1) / arg.parts) : 0;
  for (int piece = (int)(arg.pieces * part / arg.parts) + lane; piece < last; piece += LANES) {
    const int row = divided(piece, arg.by_pieces_q), q0 = (piece - row * (int)arg.pieces_q) * TILE_Q;
    const int n = divided(row, arg.by_p), p = row - n * (int)arg.p;
    acc_t grad[TILE_Q][V];
#pragma unroll
    for (int j = 0; j < TILE_Q; ++j) {
#pragma unroll
      for (int v = 0; v < V; ++v) grad[j][v] = 0;
      if (q0 + j < q_end) LOAD_CHANNELS(grad[j], y, ((index_t)row * q_end + q0 + j) * k_all + k)
    }
    const int h0 = p * (int)arg.stride_h - (int)arg.pad_h + r0 * (int)arg.dil_h;
    const int w0 = q0 * stride_w - (int)arg.pad_w + s0 * dil_w;
#pragma unroll
    for (int r = 0; r < TAPS_R; ++r) {
      const int h = h0 + r * (int)arg.dil_h, row_there = (unsigned)h < (unsigned)h_end;
      const index_t line = ((index_t)n * h_end + h) * w_end;
#ifdef STRIDE
      acc_t read[(TILE_Q - 1) * STRIDE + TAPS_S][V];
#pragma unroll
      for (int j = 0; j < (TILE_Q - 1) * STRIDE + TAPS_S; ++j) {
#pragma unroll
        for (int v = 0; v < V; ++v) read[j][v] = 0;
        if (row_there && (unsigned)(w0 + j) < (unsigned)w_end) LOAD_CHANNELS(read[j], x, (line + w0 + j) * c_all + c)
      }
#endif
#pragma unroll
      for (int s = 0; s < TAPS_S; ++s)
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j) {
          if (q0 + j >= q_end) continue;  // the row ends before: a zero of y must not meet an Inf of x
#ifdef STRIDE
#pragma unroll
          for (int v = 0; v < V; ++v) sum[r][s][v] += grad[j][v] * read[j * STRIDE + s][v];
#else
          const int col = w0 + j * stride_w + s * dil_w;
          acc_t read[V];
#pragma unroll
          for (int v = 0; v < V; ++v) read[v] = 0;
          if (row_there && (unsigned)col < (unsigned)w_end) LOAD_CHANNELS(read, x, (line + col) * c_all + c)
#pragma unroll
          for (int v = 0; v < V; ++v) sum[r][s][v] += grad[j][v] * read[v];
#endif
        }
    }
  }

#pragma unroll
  for (int first = 0; first < TAPS; first += AT_ONCE) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (first + i < TAPS) sums[(i * LANES + lane) * CHUNK + LID_0 % LANES_C * V + v] = sum[(first + i) / TAPS_S][(first + i) % TAPS_S][v];
    local_barrier();
    for (int i = LID_0; i < AT_ONCE * CHUNK; i += THREADS) {
      const int tap = first + i / CHUNK, r = r0 + tap / TAPS_S, s = s0 + tap % TAPS_S, to = chunk * CHUNK + i % CHUNK;
      if (tap < TAPS && r < (int)arg.r && s < (int)arg.s && to < k_all) {
        acc_t all = 0;
        for (int j = 0; j < LANES; ++j) all += sums[(i / CHUNK * LANES + j) * CHUNK + i % CHUNK];
        const index_t at = (((index_t)part * k_all + to) * (int)arg.r + r) * (int)arg.s + s;
        STORE_SUM(at, all)
      }
    }
    local_barrier();
  }
}
