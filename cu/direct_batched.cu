// direct_batched.cu, step 3 of the ladder: a whole batch of many channels in one launch.
//
//   y[n,k,o,p,q] = bias[k] + sum over c,t,r,s of x[n, g*CG + c, o*STRIDE_D - PAD_D + t*DIL_D, p*STRIDE_H - PAD_H + r*DIL_H,
//                                               q*STRIDE_W - PAD_W + s*DIL_W] * w[k,c,t,r,s],   g = k / KG
//
// Instead of a launch per image, output channel and input channel, as a loop around step 1 would make, the grid
// covers N, K and the pixels, and the sum over input channels stays in registers. This is the engine's general
// kernel: any rank, group count, stride, dilation and padding. A 2-d convolution has D = T = O = 1, a 1-d one
// H = R = P = 1 too; their loops vanish.
//
// Layout   x [N][GROUPS*CG][D][H][W], w [GROUPS*KG][CG][T][R][S], y [N][GROUPS*KG][O][P][Q].
// Mapping  block -> THREADS consecutive pixels of the batch, numbered n*O*P*Q + o*P*Q + p*Q + q, times BLOCK_K output
//          channels of one group; GID_0 = (pixel tile * GROUPS + g) * K_TILES + k tile: the blocks that read the
//          same pixels run side by side and meet in the L2 cache.
//          thread -> one pixel times BLOCK_K channels: each x value it loads is used BLOCK_K times.
// Memory   shared: the weights of BLOCK_C channels, [BLOCK_C*T*R*S][BLOCK_K], so that a thread reads its BLOCK_K
//          weights of a tap as neighbours and a warp reads them as a broadcast. Registers: BLOCK_K sums.
//
// By hand: nvcc -cubin cu/direct_batched.cu
#include "portable.cuh"

#ifndef THREADS
#define THREADS 128
#define BLOCK_K 8
#define BLOCK_C 4
#define GROUPS 1
#define CG 4
#define KG 8
#define D 1
#define H 5
#define W 5
#define T 1
#define R 3
#define S 3
#define O 1
#define P 5
#define Q 5
#define STRIDE_D 1
#define STRIDE_H 1
#define STRIDE_W 1
#define PAD_D 0
#define PAD_H 1
#define PAD_W 1
#define DIL_D 1
#define DIL_H 1
#define DIL_W 1
#define HAS_BIAS 1
#define HAS_SCALE 0
#define HAS_RESIDUAL 0
#define RELU 0
#endif

#define TAPS (T * R * S)
#define K_TILES ((KG + BLOCK_K - 1) / BLOCK_K)

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_batched(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                           const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                           const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y, const long_t n_pixels) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t filter[BLOCK_C * TAPS * BLOCK_K];
  const int k0 = (int)(GID_0 % K_TILES) * BLOCK_K, g = (int)(GID_0 / K_TILES % GROUPS);
  const long_t pixel = (long_t)(GID_0 / (K_TILES * GROUPS)) * THREADS + LID_0;
  const bool inside = pixel < n_pixels;
  const index_t n = (index_t)(pixel / ((long_t)O * P * Q));
  const int opq = (int)(pixel % ((long_t)O * P * Q));  // a plane has fewer than 2^31 pixels
  const int d0 = opq / (P * Q) * STRIDE_D - PAD_D, h0 = opq / Q % P * STRIDE_H - PAD_H, w0 = opq % Q * STRIDE_W - PAD_W;
  const index_t x_image = (n * GROUPS + g) * CG * ((index_t)D * H * W);

  acc_t sum[BLOCK_K];
  for (int j = 0; j < BLOCK_K; ++j) sum[j] = 0;

  for (int c0 = 0; c0 < CG; c0 += BLOCK_C) {
    // stage the weights of this channel block; channels and filters past the end count as zero
    for (int i = LID_0; i < BLOCK_C * TAPS * BLOCK_K; i += THREADS) {
      const int j = i / (BLOCK_C * TAPS), ct = i % (BLOCK_C * TAPS);
      acc_t v = 0;
      if (k0 + j < KG && c0 * TAPS + ct < CG * TAPS) v = LOAD(w, ((index_t)(g * KG + k0 + j) * CG + c0) * TAPS + ct);
      filter[ct * BLOCK_K + j] = v;
    }
    local_barrier();
    if (inside) {
      // two channels at once, so that a small problem, which has few warps to hide it, waits for memory less often
#if R * S <= 9
#pragma unroll 2
#endif
      for (int c = 0; c < BLOCK_C; ++c)
        for (int t = 0; t < T; ++t) {
          const int d = d0 + t * DIL_D;
          if (d >= 0 && d < D && (CG % BLOCK_C == 0 || c0 + c < CG)) {
#if R * S <= 64
#pragma unroll
#endif
            for (int r = 0; r < R; ++r) {
#if R * S <= 64
#pragma unroll
#endif
              for (int s = 0; s < S; ++s) {
                const int h = h0 + r * DIL_H, col = w0 + s * DIL_W;
                acc_t v = 0;
                if (h >= 0 && h < H && col >= 0 && col < W)
                  v = LOAD(x, x_image + (((index_t)(c0 + c) * D + d) * H + h) * W + col);
#pragma unroll
                for (int j = 0; j < BLOCK_K; ++j) sum[j] += v * filter[((c * T + t) * R * S + r * S + s) * BLOCK_K + j];
              }
            }
          }
        }
    }
    local_barrier();
  }

  if (inside) {
#pragma unroll
    for (int j = 0; j < BLOCK_K; ++j)
      if (k0 + j < KG) {
        const index_t at = (n * (GROUPS * KG) + g * KG + k0 + j) * ((index_t)O * P * Q) + opq;
        EPILOGUE(sum[j], LOAD(scale, g * KG + k0 + j), LOAD(bias, g * KG + k0 + j), LOAD(residual, at))
        STORE(y, at, sum[j]);
      }
  }
}
