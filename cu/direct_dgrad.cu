// direct_dgrad.cu, step 5 of the ladder: the gradient of the input, which is the transposed convolution.
//
//   x[n,c,d,h,w] = bias[c] + sum over k,t,r,s of y[n,k,o,p,q] * w[k,c,t,r,s]
//                  where o*STRIDE_D = d + PAD_D - t*DIL_D, p*STRIDE_H = h + PAD_H - r*DIL_H, q*STRIDE_W = w + PAD_W - s*DIL_W
//
// The forward pass scatters x[h] into every p that reads it; turned round, one would add with atomics, in an order
// that changes from run to run. Here each thread gathers instead: it looks up which outputs p,q its own input pixel
// fed and adds their gradients in a fixed order, so the result is the same bits every time.
//
// Layout   y (the operand) [N][GROUPS*KG][O][P][Q], w [GROUPS*KG][CG][T][R][S], x (the result) [N][GROUPS*CG][D][H][W].
// Mapping  block -> THREADS consecutive pixels of the batch, n*D*H*W + d*H*W + h*W + w, times BLOCK_C channels of one
//          group; GID_0 = (pixel tile * GROUPS + g) * C_TILES + c tile. thread -> one pixel times BLOCK_C channels.
// Memory   shared: the weights of BLOCK_K filters, [BLOCK_K*T*R*S][BLOCK_C]. Registers: BLOCK_C sums.
//
// By hand: nvcc -cubin cu/direct_dgrad.cu
#include "portable.cuh"

#ifndef THREADS
#define THREADS 128
#define BLOCK_K 4
#define BLOCK_C 8
#define GROUPS 1
#define CG 8
#define KG 4
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
#define C_TILES ((CG + BLOCK_C - 1) / BLOCK_C)

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_dgrad(const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM data_t* RESTRICT w,
                         const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                         const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT x, const long_t n_pixels) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t filter[BLOCK_K * TAPS * BLOCK_C];
  const int c0 = (int)(GID_0 % C_TILES) * BLOCK_C, g = (int)(GID_0 / C_TILES % GROUPS);
  const long_t pixel = (long_t)(GID_0 / (C_TILES * GROUPS)) * THREADS + LID_0;
  const bool inside = pixel < n_pixels;
  const index_t n = (index_t)(pixel / ((long_t)D * H * W));
  const int dhw = (int)(pixel % ((long_t)D * H * W));
  const int d0 = dhw / (H * W) + PAD_D, h0 = dhw / W % H + PAD_H, w0 = dhw % W + PAD_W;
  const index_t y_image = (n * GROUPS + g) * KG * ((index_t)O * P * Q);

  acc_t sum[BLOCK_C];
  for (int j = 0; j < BLOCK_C; ++j) sum[j] = 0;

  for (int k0 = 0; k0 < KG; k0 += BLOCK_K) {
    for (int i = LID_0; i < BLOCK_K * TAPS * BLOCK_C; i += THREADS) {
      const int k = i / (TAPS * BLOCK_C), c = i / TAPS % BLOCK_C, tap = i % TAPS;
      acc_t v = 0;
      if (k0 + k < KG && c0 + c < CG) v = LOAD(w, ((index_t)(g * KG + k0 + k) * CG + c0 + c) * TAPS + tap);
      filter[(k * TAPS + tap) * BLOCK_C + c] = v;
    }
    local_barrier();
    if (inside) {
      for (int k = 0; k < BLOCK_K && k0 + k < KG; ++k)
        for (int t = 0; t < T; ++t) {
          const int od = d0 - t * DIL_D;  // = o * STRIDE_D where tap t meets an output
          if (od >= 0 && od % STRIDE_D == 0 && od / STRIDE_D < O)
            for (int r = 0; r < R; ++r) {
              const int ph = h0 - r * DIL_H;
              if (ph >= 0 && ph % STRIDE_H == 0 && ph / STRIDE_H < P)
                for (int s = 0; s < S; ++s) {
                  const int qw = w0 - s * DIL_W;
                  if (qw >= 0 && qw % STRIDE_W == 0 && qw / STRIDE_W < Q) {
                    const acc_t v = LOAD(y, y_image + (((index_t)(k0 + k) * O + od / STRIDE_D) * P + ph / STRIDE_H) * Q + qw / STRIDE_W);
#pragma unroll
                    for (int j = 0; j < BLOCK_C; ++j) sum[j] += v * filter[((k * T + t) * R * S + r * S + s) * BLOCK_C + j];
                  }
                }
            }
        }
    }
    local_barrier();
  }

  if (inside) {
#pragma unroll
    for (int j = 0; j < BLOCK_C; ++j)
      if (c0 + j < CG) {
        const index_t at = (n * (GROUPS * CG) + g * CG + c0 + j) * ((index_t)D * H * W) + dhw;
        EPILOGUE(sum[j], LOAD(scale, g * CG + c0 + j), LOAD(bias, g * CG + c0 + j), LOAD(residual, at))
        STORE(x, at, sum[j]);
      }
  }
}
