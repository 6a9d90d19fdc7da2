// direct_tile.cu, step 2 of the ladder: one channel, the input tile with its halo in shared memory as well.
//
// Same sum, layouts and uses as direct_single.cu. New: neighbouring pixels overlap in what they read, so a block
// fetches the window of its whole tile once and every thread reads it from shared memory. And what each column of the
// filter gives is added up by itself, unless the result has 16 bits: short sums lose less.
//
// Mapping  block -> TILE_P x TILE_Q pixels of one plane; GID_0 = (plane * tiles down + tile row) * tiles across + tile column.
//          thread (ty, tx) -> ROWS pixels, one below the other, in column tx; with the loops unrolled, a value of the
//          tile that several of these pixels need is loaded from shared memory once.
// Memory   shared: the filter, R*S, and the tile, HALO_H x HALO_W, where HALO_H = (TILE_P-1)*STRIDE_H + (R-1)*DIL_H + 1.
//          All global loads of a block are issued before its one barrier: the kernel waits for memory once.
//
// By hand: nvcc -cubin cu/direct_tile.cu
#include "portable.cuh"

#ifndef TILE_P
#define TILE_P 8
#define TILE_Q 32
#define ROWS 4
#define C 1
#define K 1
#define MULTIPLIER 1
#define H 5
#define W 5
#define R 3
#define S 3
#define P 3
#define Q 3
#define STRIDE_H 1
#define STRIDE_W 1
#define PAD_H 0
#define PAD_W 0
#define DIL_H 1
#define DIL_W 1
#define HAS_BIAS 0
#define HAS_SCALE 0
#define HAS_RESIDUAL 0
#define RELU 0
#endif

#define THREADS (TILE_P / ROWS * TILE_Q)
#define TILES_P ((P + TILE_P - 1) / TILE_P)
#define TILES_Q ((Q + TILE_Q - 1) / TILE_Q)
#define HALO_H ((TILE_P - 1) * STRIDE_H + (R - 1) * DIL_H + 1)
#define HALO_W ((TILE_Q - 1) * STRIDE_W + (S - 1) * DIL_W + 1)

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_tile(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                        const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                        const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t filter[R * S];
  LOCAL_MEM acc_t tile[HALO_H * HALO_W];
  const int tile_q = (int)(GID_0 % TILES_Q) * TILE_Q, tile_p = (int)(GID_0 / TILES_Q % TILES_P) * TILE_P;
  const index_t plane = (index_t)(GID_0 / (TILES_Q * TILES_P));  // n*K + k
  const int k = (int)(plane % K);
  const index_t x_plane = (plane / K * C + k / MULTIPLIER) * (index_t)(H * W);

  for (int i = LID_0; i < R * S; i += THREADS) filter[i] = LOAD(w, (index_t)k * (R * S) + i);
  const int h0 = tile_p * STRIDE_H - PAD_H, w0 = tile_q * STRIDE_W - PAD_W;
#pragma unroll 8
  for (int i = LID_0; i < HALO_H * HALO_W; i += THREADS) {
    const int h = h0 + i / HALO_W, col = w0 + i % HALO_W;
    acc_t v = 0;
    if (h >= 0 && h < H && col >= 0 && col < W) v = LOAD(x, x_plane + (index_t)h * W + col);
    tile[i] = v;
  }
  local_barrier();

  const int tx = LID_0 % TILE_Q, ty = LID_0 / TILE_Q * ROWS;
  acc_t sum[ROWS];
  for (int i = 0; i < ROWS; ++i) sum[i] = 0;
#if R * S <= 64
#pragma unroll
#endif
  for (int s = 0; s < S; ++s) {
#if DTYPE >= 32
    acc_t part[ROWS];
    for (int i = 0; i < ROWS; ++i) part[i] = 0;
#else  // rounding the result loses more
    acc_t* const part = sum;
#endif
#if R * S <= 64
#pragma unroll
#endif
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        part[i] += tile[((ty + i) * STRIDE_H + r * DIL_H) * HALO_W + tx * STRIDE_W + s * DIL_W] * filter[r * S + s];
#if DTYPE >= 32
    for (int i = 0; i < ROWS; ++i) sum[i] += part[i];
#endif
  }

  const int q = tile_q + tx;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int p = tile_p + ty + i;
    if (p < P && q < Q) {
      const index_t at = plane * (index_t)(P * Q) + p * Q + q;
      EPILOGUE(sum[i], LOAD(scale, k), LOAD(bias, k), LOAD(residual, at))
      STORE(y, at, sum[i]);
    }
  }
}
