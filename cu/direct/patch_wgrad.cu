// patch_wgrad.cu: wgrad as a matrix product over pixels, for few channels in and many out: first layers, raw audio.
//
//   dw[k,c,t,r,s] = sum over n,o,p,q of dy[n,k,o,p,q] * x[n, g*cg + c, o*stride_d - pad_d + t*dil_d, p*stride_h - pad_h + r*dil_h,
//                                                         q*stride_w - pad_w + s*dil_w],   g = k / kg
//   gemm m: k of a group | gemm n: column (c,t,r,s), the tap fastest; with CHANNELS_LAST (t,r,s,c) | gemm k: pixel (n,o,p,q) of dy
//
// direct/gemm.cu computes the same, but neighbouring lanes have neighbouring columns, which lie in many rows of x. Here a warp loads the
// neighbouring pixels of one column, which are neighbours in x.
//
// Sizes    They are arguments: the text depends on the tile, the type and the layout alone.
// Mapping  block -> BLOCK_M k x BLOCK_N columns x a run of pixels; GID_0 = ((slice * groups + g) * n_tiles + n tile) * m_tiles + m tile:
//          blocks that share pixels are neighbours.
//          loading: thread -> one of BLOCK_K pixels, every LANES-th four of the tile's k and columns. Neighbouring threads have neighbouring pixels, or
//          with CHANNELS_LAST fours. multiplying: warp -> 4 x 8 threads, thread -> THREAD_M x THREAD_N sums, in groups of four neighbours,
//          4 * threads-along-the-axis apart, as in direct/gemm.cu.
// Memory   shared: two buffers of dy, BLOCK_K x (BLOCK_M + PAD), and of x, BLOCK_K x (BLOCK_N + PAD); PAD spreads the stores of fours over
//          the banks. And the offset of each column. While one buffer is multiplied the next BLOCK_K pixels wait in registers.
// Sums     In fp32 the BLOCK_K products of a step are added first, and then go to the sum of the steps before: a longer chain of sums would
//          lose more digits. With slices > 1 each slice writes its part to a workspace [slices][size of dw], and direct/reduce.cu adds them.
//
// By hand: nvcc -cubin -I cu cu/direct/patch_wgrad.cu
#include "core/portable.cuh"

#ifndef BLOCK_M
#define BLOCK_M 64
#define BLOCK_N 64
#define BLOCK_K 16
#define THREAD_M 8
#define THREAD_N 4
#define CHANNELS_LAST 0
#endif

#define THREADS_M (BLOCK_M / THREAD_M)
#define THREADS_N (BLOCK_N / THREAD_N)
#define THREADS (THREADS_M * THREADS_N)
#define MIN_BLOCKS (DTYPE == 64 ? 1 : THREADS > 32 ? 512 / THREADS : 12)
#define LANES (THREADS / BLOCK_K)  // threads that share a pixel
#define A_LOADS (BLOCK_M / 4 / LANES)
#define B_LOADS (BLOCK_N / 4 / LANES)
#define PAD (DTYPE == 64 ? 2 : 4)
#define A_PITCH (BLOCK_M + PAD)
#define B_PITCH (BLOCK_N + PAD)
#define IN_STEPS (DTYPE != 64)  // whether a step's products are added first

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct PatchWgradArguments {
  long_t slices, groups, by_groups, m_tiles, by_m_tiles, n_tiles, by_n_tiles;
  long_t total, run;                              // pixels of all images of dy; of a slice, fewer in the last one
  long_t kg, columns, cg, by_cg, taps, by_taps;   // a group's k, columns and channels; t * r * s
  long_t rs, by_rs, r, s, by_s;
  long_t plane, by_plane, pq, by_pq, p, q, by_q;  // pixels of an image of dy: o * p * q
  long_t d, h, w;                                 // size of x
  long_t stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w;
  long_t x_image, x_channel, x_pixel, y_image, y_channel, y_pixel;  // strides in elements of x and of dy
  long_t y_vec;                                   // whether four k of dy may be loaded at once
  long_t part_size;                               // elements of dw
} PatchWgradArguments;

// A column's offset from the first element that a pixel reads.
typedef struct ALIGNED Column {
  int d, h, w;
  index_t x;
} Column;
#define NOWHERE (1 << 30)  // the d of a column past the end, outside every image

#if DTYPE < 32
#define STORE_SUM(at, v)                                             \
  {                                                                  \
    if (arg.slices > 1) ((GLOBAL_MEM acc_t*)dw)[at] = (v);           \
    else STORE(dw, at, v);                                           \
  }
#else
#define STORE_SUM(at, v) STORE(dw, at, v);
#endif

// Loads this thread's fours of the pixel `at`, on their way to shared memory.
#define LOAD_STEP(at)                                                                                               \
  {                                                                                                                 \
    const index_t number = (at) + load_k;                                                                           \
    const bool there = number < last;                                                                               \
    const index_t n = DIVIDED(number, arg.plane, arg.by_plane);                                                     \
    const int pixel = (int)(number - n * (index_t)arg.plane);                                                       \
    const int o = divided(pixel, arg.by_pq), row = divided(pixel, arg.by_q);                                        \
    const int d0 = o * (int)arg.stride_d - (int)arg.pad_d, h0 = (row - o * (int)arg.p) * (int)arg.stride_h - (int)arg.pad_h; \
    const int w0 = (pixel - row * (int)arg.q) * (int)arg.stride_w - (int)arg.pad_w;                                 \
    const index_t y_at = y_first + n * (index_t)arg.y_image + pixel * (index_t)arg.y_pixel;                         \
    const index_t x_at = x_first + n * (index_t)arg.x_image + ((d0 * (index_t)h_end + h0) * w_end + w0) * (index_t)arg.x_pixel; \
    int table = 0; /* the compiler would keep the table in registers */                                             \
    HIDE(table)                                                                                                     \
    _Pragma("unroll") for (int i = 0; i < A_LOADS; ++i) {                                                           \
      const int m = (load_four + i * LANES) * 4;                                                                    \
      _Pragma("unroll") for (int v = 0; v < 4; ++v) a_next[i * 4 + v] = 0;                                          \
      if (CHANNELS_LAST && four_at_once) {                                                                          \
        if (there && m0 + m < kg) LOAD_VEC(a_next + i * 4, dy, y_at + m)                                            \
      } else {                                                                                                      \
        _Pragma("unroll") for (int v = 0; v < 4; ++v)                                                               \
          if (there && m0 + m + v < kg) a_next[i * 4 + v] = LOAD(dy, y_at + (m + v) * (index_t)arg.y_channel);      \
      }                                                                                                             \
    }                                                                                                               \
    _Pragma("unroll") for (int i = 0; i < B_LOADS; ++i)                                                             \
    _Pragma("unroll") for (int v = 0; v < 4; ++v) {                                                                 \
      const Column column = columns[table + (load_four + i * LANES) * 4 + v];                                       \
      b_next[i * 4 + v] = 0;                                                                                        \
      if (there && (unsigned)(d0 + column.d) < (unsigned)d_end && (unsigned)(h0 + column.h) < (unsigned)h_end &&    \
          (unsigned)(w0 + column.w) < (unsigned)w_end)                                                              \
        b_next[i * 4 + v] = LOAD(x, x_at + column.x);                                                               \
    }                                                                                                               \
  }

#define TO_SHARED(buffer)                                                                                                  \
  _Pragma("unroll") for (int i = 0; i < A_LOADS; ++i)                                                                      \
    LOCAL_STORE_VEC(&a_tile[buffer][load_k * A_PITCH + (load_four + i * LANES) * 4], a_next + i * 4)                       \
  _Pragma("unroll") for (int i = 0; i < B_LOADS; ++i)                                                                      \
    LOCAL_STORE_VEC(&b_tile[buffer][load_k * B_PITCH + (load_four + i * LANES) * 4], b_next + i * 4)

KERNEL LAUNCH_BOUNDS(THREADS, MIN_BLOCKS) void patch_wgrad(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT dy,
                                                  GLOBAL_MEM data_t* RESTRICT dw, const PatchWgradArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t ALIGNED a_tile[2][BLOCK_K * A_PITCH];
  LOCAL_MEM acc_t ALIGNED b_tile[2][BLOCK_K * B_PITCH];
  LOCAL_MEM Column columns[BLOCK_N];
  const int d_end = (int)arg.d, h_end = (int)arg.h, w_end = (int)arg.w, kg = (int)arg.kg;
  const int of_m = divided((int)GID_0, arg.by_m_tiles), m0 = ((int)GID_0 - of_m * (int)arg.m_tiles) * BLOCK_M;
  const int of_n = divided(of_m, arg.by_n_tiles), n0 = (of_m - of_n * (int)arg.n_tiles) * BLOCK_N;
  const int slice = divided(of_n, arg.by_groups), g = of_n - slice * (int)arg.groups;
  for (int i = LID_0; i < BLOCK_N; i += THREADS) {
    const int at = n0 + i;
    const int c = CHANNELS_LAST ? at - divided(at, arg.by_cg) * (int)arg.cg : divided(at, arg.by_taps);
    const int tap = CHANNELS_LAST ? divided(at, arg.by_cg) : at - c * (int)arg.taps;
    const int t = divided(tap, arg.by_rs), row = divided(tap, arg.by_s);
    Column column;
    column.d = t * (int)arg.dil_d;
    column.h = (row - t * (int)arg.r) * (int)arg.dil_h;
    column.w = (tap - row * (int)arg.s) * (int)arg.dil_w;
    column.x = c * (index_t)arg.x_channel + ((column.d * (index_t)h_end + column.h) * w_end + column.w) * (index_t)arg.x_pixel;
    if (at >= (int)arg.columns) column.d = NOWHERE;
    columns[i] = column;
  }
  local_barrier();

  // loading
  const int load_k = CHANNELS_LAST ? LID_0 / LANES : LID_0 % BLOCK_K, load_four = CHANNELS_LAST ? LID_0 % LANES : LID_0 / BLOCK_K;
  const bool four_at_once = arg.y_vec != 0;
  const index_t y_first = (g * (index_t)kg + m0) * (index_t)arg.y_channel, x_first = g * (index_t)arg.cg * (index_t)arg.x_channel;
  const index_t first = slice * (index_t)arg.run;
  const index_t last = (index_t)arg.total - first < (index_t)arg.run ? (index_t)arg.total : first + (index_t)arg.run;
  acc_t a_next[A_LOADS * 4], b_next[B_LOADS * 4];

  // multiplying: this thread's rows and columns of the tile
  const int warp = LID_0 / 32, lane = LID_0 % 32;
  const int ty = (warp / (THREADS_N / 8) * 4 + lane / 8) * 4, tx = (warp % (THREADS_N / 8) * 8 + lane % 8) * 4;
  acc_t sum[THREAD_M][THREAD_N];
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) sum[i][j] = 0;

  LOAD_STEP(first)
  TO_SHARED(0)
  local_barrier();
  int buffer = 0;
  for (index_t at = first; at < last; at += BLOCK_K) {
    if (at + BLOCK_K < last) LOAD_STEP(at + BLOCK_K)
    acc_t part[THREAD_M][THREAD_N];
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) part[i][j] = IN_STEPS ? 0 : sum[i][j];
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      acc_t a[THREAD_M], b[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; i += 4) LOCAL_LOAD_VEC(a + i, &a_tile[buffer][k * A_PITCH + i * THREADS_M + ty])
#pragma unroll
      for (int j = 0; j < THREAD_N; j += 4) LOCAL_LOAD_VEC(b + j, &b_tile[buffer][k * B_PITCH + j * THREADS_N + tx])
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) part[i][j] = IN_STEPS && k == 0 ? a[i] * b[j] : part[i][j] + a[i] * b[j];
    }
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) sum[i][j] = IN_STEPS ? sum[i][j] + part[i][j] : part[i][j];
    buffer = 1 - buffer;
    if (at + BLOCK_K < last) {
      TO_SHARED(buffer)
    }
    local_barrier();
  }

#pragma unroll
  for (int j = 0; j < THREAD_N; ++j) {
    const int column = n0 + j / 4 * 4 * THREADS_N + tx + j % 4;
    const int tap = CHANNELS_LAST ? divided(column, arg.by_cg) : 0;
    const int in_filter = CHANNELS_LAST ? (column - tap * (int)arg.cg) * (int)arg.taps + tap : column;
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
      const int m = m0 + i / 4 * 4 * THREADS_M + ty + i % 4;
      if (m < kg && column < (int)arg.columns)
        STORE_SUM(slice * (index_t)arg.part_size + (g * kg + m) * (index_t)arg.columns + in_filter, sum[i][j])
    }
  }
}
