// single.cu, step 1 of the ladder: one channel, the filter staged in shared memory.
//
//   y[n,k,p,q] = bias[k] + sum over r,s of x[n, k / multiplier, p*stride_h - pad_h + r*dil_h, q*stride_w - pad_w + s*dil_w] * w[k,r,s]
//
// A cross-correlation, as everywhere in this package: the filter is not flipped; x is 0 outside [0,h) x [0,w).
// Each output plane (n,k) reads one input plane, so this serves one channel in, one out (c = k = 1) and depthwise
// convolution (c groups, multiplier = k/c filters a channel).
//
// Layout   x [n][c][h][w], w [k][r][s], y [n][k][p][q].
// Sizes    They are arguments. With LAYER they are constants, except the sizes of images and what follows from them.
// Mapping  block -> THREADS consecutive pixels (p,q) of one plane; GID_0 = plane * tiles per plane + tile.
//          thread -> one pixel; the threads of a warp write neighbours and, at stride 1, read neighbours.
// Memory   shared (LOCAL_ROOM): the r*s filter weights, all of which every thread of the block reads. Each value of x comes from global memory up to
//          r*s times, through the caches: step 2 improves on that.
//
// By hand: nvcc -cubin -I cu cu/direct/single.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 128
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct SingleArguments {
  long_t tiles, by_tiles;                       // of a plane of y
  long_t c, k, by_k, by_multiplier;             // channels of x and y
  long_t h, w, r, s, p, q, by_q;                // sizes of a plane of x, of the filter, and of a plane of y
  long_t stride_h, stride_w, pad_h, pad_w, dil_h, dil_w;
  long_t has_scale, has_bias, has_residual, activation, slope;  // the epilogue; slope: an acc_t's bits
} SingleArguments;

#if !defined(LAYER)
#define UNROLL_ROWS
#define UNROLL_TAPS _Pragma("unroll 4")
#elif R * S <= 64
#define UNROLL_ROWS _Pragma("unroll")
#define UNROLL_TAPS _Pragma("unroll")
#else
#define UNROLL_ROWS
#define UNROLL_TAPS
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_single(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                          const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                          const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y, const SingleArguments arg) {
  AFTER_LAST_LAUNCH
  EPILOGUE_FLAGS
  LOCAL_ROOM(filter);
  const int h_end = (int)arg.h, w_end = (int)arg.w, pixels = (int)(arg.p * arg.q);
  const int c_all = OF_LAYER(C, c), k_all = OF_LAYER(K, k), r_end = OF_LAYER(R, r), s_end = OF_LAYER(S, s), taps = r_end * s_end;
  const int dil_h = OF_LAYER(DIL_H, dil_h), dil_w = OF_LAYER(DIL_W, dil_w);
  const int plane = divided((int)GID_0, arg.by_tiles);                              // n*K + k
  const int pixel = ((int)GID_0 - plane * (int)arg.tiles) * THREADS + LID_0;        // p*Q + q, may lie past P*Q in the last tile
  const int n = OVER(plane, k_all, by_k), k = plane - n * k_all;

  for (int i = LID_0; i < taps; i += THREADS) filter[i] = LOAD(w, (index_t)k * taps + i);
  local_barrier();

  if (pixel < pixels) {
    const index_t x_plane = (n * (index_t)c_all + OVER(k, k_all / c_all, by_multiplier)) * (h_end * w_end);
    const int p = divided(pixel, arg.by_q);
    const int h0 = p * OF_LAYER(STRIDE_H, stride_h) - OF_LAYER(PAD_H, pad_h);
    const int w0 = (pixel - p * (int)arg.q) * OF_LAYER(STRIDE_W, stride_w) - OF_LAYER(PAD_W, pad_w);
    acc_t sum = 0;
    UNROLL_ROWS
    for (int r = 0; r < r_end; ++r)
      UNROLL_TAPS
      for (int s = 0; s < s_end; ++s) {
        const int h = h0 + r * dil_h, col = w0 + s * dil_w;
        acc_t v = 0;  // a select, not a branch: loads of several taps can be under way together
        if (h >= 0 && h < h_end && col >= 0 && col < w_end) v = LOAD(x, x_plane + (index_t)h * w_end + col);
        sum += v * filter[r * s_end + s];
      }
    const index_t at = plane * (index_t)pixels + pixel;
    FINISH_AT(sum, k, at)
    STORE(y, at, sum);
  }
}
