// direct_single.cu, step 1 of the ladder: one channel, the filter staged in shared memory.
//
//   y[n,k,p,q] = bias[k] + sum over r,s of x[n, k / MULTIPLIER, p*STRIDE_H - PAD_H + r*DIL_H, q*STRIDE_W - PAD_W + s*DIL_W] * w[k,r,s]
//
// A cross-correlation, as everywhere in this package: the filter is not flipped; x is 0 outside [0,H) x [0,W).
// Each output plane (n,k) reads one input plane, so this serves one channel in, one out (C = K = 1) and depthwise
// convolution (C groups, MULTIPLIER = K/C filters a channel).
//
// Layout   x [N][C][H][W], w [K][R][S], y [N][K][P][Q].
// Mapping  block -> THREADS consecutive pixels (p,q) of one plane; GID_0 = plane * tiles per plane + tile.
//          thread -> one pixel; the threads of a warp write neighbours and, at stride 1, read neighbours.
// Memory   shared: the R*S filter weights, read R*S times by every thread of the block; x comes from global memory
//          and is reread up to R*S times through the caches: step 2 mends that.
//
// By hand: nvcc -cubin cu/direct_single.cu
#include "portable.cuh"

#ifndef THREADS
#define THREADS 128
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

#define TILES ((P * Q + THREADS - 1) / THREADS)

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_single(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                          const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                          const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t filter[R * S];
  const index_t plane = (index_t)(GID_0 / TILES);            // n*K + k
  const int k = (int)(plane % K);
  const int pixel = (int)(GID_0 % TILES) * THREADS + LID_0;  // p*Q + q, may lie past P*Q in the last tile

  for (int i = LID_0; i < R * S; i += THREADS) filter[i] = LOAD(w, (index_t)k * (R * S) + i);
  local_barrier();

  if (pixel < P * Q) {
    const index_t x_plane = (plane / K * C + k / MULTIPLIER) * (index_t)(H * W);
    const int h0 = pixel / Q * STRIDE_H - PAD_H, w0 = pixel % Q * STRIDE_W - PAD_W;
    acc_t sum = 0;
#if R * S <= 64
#pragma unroll
#endif
    for (int r = 0; r < R; ++r)
#if R * S <= 64
#pragma unroll
#endif
      for (int s = 0; s < S; ++s) {
        const int h = h0 + r * DIL_H, col = w0 + s * DIL_W;
        acc_t v = 0;  // a value chosen, not a branch taken: the loads of all taps can be under way together
        if (h >= 0 && h < H && col >= 0 && col < W) v = LOAD(x, x_plane + (index_t)h * W + col);
        sum += v * filter[r * S + s];
      }
    const index_t at = plane * (P * Q) + pixel;
    EPILOGUE(sum, LOAD(scale, k), LOAD(bias, k), LOAD(residual, at))
    STORE(y, at, sum);
  }
}
