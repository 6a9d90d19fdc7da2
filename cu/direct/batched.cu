// batched.cu, step 3 of the ladder: a whole batch of many channels in one launch.
//
//   y[n,k,o,p,q] = bias[k] + sum over c,t,r,s of x[n, g*cg + c, o*stride_d - pad_d + t*dil_d, p*stride_h - pad_h + r*dil_h,
//                                               q*stride_w - pad_w + s*dil_w] * w[k,c,t,r,s],   g = k / kg
//
// A loop around step 1 would make a launch for each image, output channel and input channel. Here the grid covers n, k and the pixels, and the
// sum over input channels stays in registers. This is the engine's general kernel: it takes any rank, number of groups, stride, dilation and
// padding. A 2-d convolution has d = t = o = 1, a 1-d one h = r = p = 1 too.
//
// Sizes    They are arguments. R, S and AXES, 2, may be defined, for filters without dilation: then their loops are unrolled. With LAYER, all
//          numbers are constants, except the batch, the sizes of images and what follows from them; AXES is then the number of spatial axes.
// Layout   x [n][groups*cg][d][h][w], w [groups*kg][cg][t][r][s], y [n][groups*kg][o][p][q].
// Mapping  block -> THREADS consecutive pixels of the batch, numbered n*o*p*q + o*p*q + p*q + q, times BLOCK_K output
//          channels of one group, and one of `split` parts of the sum over channels; GID_0 = ((pixel tile * groups + g) * split + part)
//          * k_tiles + k tile: the blocks that read the same pixels run side by side and share the L2 cache.
//          thread -> one pixel times BLOCK_K channels: each x value it loads is used BLOCK_K times.
// Memory   shared (LOCAL_ROOM): the weights of block_c channels, [block_c*t*r*s][BLOCK_K], so that a thread reads its BLOCK_K
//          weights of a tap as neighbours and a warp reads them as a broadcast. Registers: BLOCK_K sums.
// Split    With split > 1 every part goes to a workspace [split][size of y] without the epilogue, and direct/reduce.cu adds them.
//
// By hand: nvcc -cubin -I cu cu/direct/batched.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 128
#define BLOCK_K 8
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct BatchedArguments {
  long_t n_pixels, plane, by_plane, by_pq, p, q, by_q;  // pixels of the batch, of an image (o * p * q) and of its rows
  long_t groups, by_groups, cg, kg, k_tiles, by_k_tiles;
  long_t block_c, block_taps, by_block_taps;            // channels whose weights are in shared memory at once, and these weights
  long_t split, by_split, run, part_size;               // parts of the sum over channels; channels and elements of each
  long_t d, h, w, t, r, s;
  long_t stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w;
  long_t has_scale, has_bias, has_residual, activation, slope;        // the epilogue; slope: an acc_t's bits
} BatchedArguments;

#ifdef R
#if R * S <= 64
#define UNROLL_TAPS _Pragma("unroll")
#endif
#if R * S <= 9
// two channels at once, so that a small problem, which has few warps to hide latency, waits for memory less often
#define UNROLL_CHANNELS _Pragma("unroll 2")
#endif
#else
#define R ((int)arg.r)
#define S ((int)arg.s)
#endif
#if defined(AXES) && !defined(LAYER)
#define FLAT 1  // a filter of a plane's axes alone, without dilation
#else
#define FLAT 0
#endif
#ifndef AXES
#define AXES 3
#endif
#ifdef LAYER
#define WHOLE_BLOCKS (CG % BLOCK_C == 0)
#else
#define WHOLE_BLOCKS 0
#endif
#ifndef UNROLL_TAPS
#define UNROLL_TAPS
#endif
#ifndef UNROLL_CHANNELS
#define UNROLL_CHANNELS
#endif

// On a CPU some 32 products are added separately before they go to the total: short sums lose less. On a GPU that would take registers.
#if defined(__OPENCL_VERSION__) && DTYPE == 32
#define TOTAL(j) total[j]
#define ADD_TO_TOTALS                                  \
  for (int j = 0; j < BLOCK_K; ++j) {                  \
    total[j] += sum[j];                                \
    sum[j] = 0;                                        \
  }
#define AFTER_CHANNEL(c) if ((c) % apart == apart - 1) ADD_TO_TOTALS
#else
#define TOTAL(j) sum[j]
#define ADD_TO_TOTALS
#define AFTER_CHANNEL(c)
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_batched(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                           const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                           const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y, const BatchedArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_ROOM(filter);
  const int groups = OF_LAYER(GROUPS, groups), cg = OF_LAYER(CG, cg), kg = OF_LAYER(KG, kg), k_tiles = OF_LAYER(K_TILES, k_tiles);
  const int d_end = AXES < 3 ? 1 : (int)arg.d, h_end = AXES < 2 ? 1 : (int)arg.h, w_end = (int)arg.w;
  const int t_end = FLAT ? 1 : OF_LAYER(T, t), dil_d = OF_LAYER(DIL_D, dil_d);
  const int dil_h = FLAT ? 1 : OF_LAYER(DIL_H, dil_h), dil_w = FLAT ? 1 : OF_LAYER(DIL_W, dil_w);
  const int taps = t_end * R * S, block_c = OF_LAYER(BLOCK_C, block_c), block_taps = OF_LAYER(BLOCK_TAPS, block_taps);
  const int tile = OVER((int)GID_0, k_tiles, by_k_tiles), k0 = ((int)GID_0 - tile * k_tiles) * BLOCK_K;
  const int of_part = divided(tile, arg.by_split), part = tile - of_part * (int)arg.split;
  const int n_tile = OVER(of_part, groups, by_groups), g = of_part - n_tile * groups;
  const index_t pixel = (index_t)n_tile * THREADS + LID_0;
  const bool inside = pixel < (index_t)arg.n_pixels;
  const index_t n = DIVIDED(pixel, arg.plane, arg.by_plane);
  const int number = (int)(pixel - n * (index_t)arg.plane);
  const int o = AXES < 3 ? 0 : divided(number, arg.by_pq), row = AXES < 2 ? 0 : divided(number, arg.by_q);
  const int p = row - o * (int)arg.p, q = number - row * (int)arg.q;
  const int d0 = o * OF_LAYER(STRIDE_D, stride_d) - OF_LAYER(PAD_D, pad_d), h0 = p * OF_LAYER(STRIDE_H, stride_h) - OF_LAYER(PAD_H, pad_h);
  const int w0 = q * OF_LAYER(STRIDE_W, stride_w) - OF_LAYER(PAD_W, pad_w);
  const index_t plane = (index_t)h_end * w_end, x_image = (n * (index_t)groups + g) * cg * (d_end * plane);

  acc_t sum[BLOCK_K];
  for (int j = 0; j < BLOCK_K; ++j) sum[j] = 0;
#if defined(__OPENCL_VERSION__) && DTYPE == 32
  acc_t total[BLOCK_K];
  for (int j = 0; j < BLOCK_K; ++j) total[j] = 0;
  const int apart = taps < 32 ? 32 / taps : 1;
#endif

  const int c_first = part * (int)arg.run, c_last = c_first + (int)arg.run < cg ? c_first + (int)arg.run : cg;
  for (int c0 = c_first; c0 < c_last; c0 += block_c) {
    // stage the weights of this channel block; channels and filters past the end count as zero
    for (int i = LID_0; i < block_taps * BLOCK_K; i += THREADS) {
      const int j = OVER(i, block_taps, by_block_taps), ct = i - j * block_taps;
      acc_t v = 0;
      if (k0 + j < kg && c0 * taps + ct < cg * taps) v = LOAD(w, ((index_t)(g * kg + k0 + j) * cg + c0) * taps + ct);
      filter[ct * BLOCK_K + j] = v;
    }
    local_barrier();
    if (inside) {
      const int c_end = WHOLE_BLOCKS || c0 + block_c < c_last ? block_c : c_last - c0;
      UNROLL_CHANNELS
      for (int c = 0; c < c_end; ++c) {
        for (int t = 0; t < t_end; ++t) {
          const int d = d0 + t * dil_d;
          if (d >= 0 && d < d_end) {
            const index_t x_plane = x_image + ((c0 + c) * (index_t)d_end + d) * plane;
            UNROLL_TAPS
            for (int r = 0; r < R; ++r) {
              const int h = h0 + r * dil_h;
              const index_t x_row = x_plane + (index_t)h * w_end + w0;
              UNROLL_TAPS
              for (int s = 0; s < S; ++s) {
                const int col = w0 + s * dil_w;
                acc_t v = 0;
                if (h >= 0 && h < h_end && col >= 0 && col < w_end) v = LOAD(x, x_row + s * dil_w);
#pragma unroll
                for (int j = 0; j < BLOCK_K; ++j) sum[j] += v * filter[((c * t_end + t) * R * S + r * S + s) * BLOCK_K + j];
              }
            }
          }
        }
        AFTER_CHANNEL(c)
      }
      ADD_TO_TOTALS
    }
    local_barrier();
  }

  if (inside) {
    EPILOGUE_FLAGS
#pragma unroll
    for (int j = 0; j < BLOCK_K; ++j)
      if (k0 + j < kg) {
        const int k = g * kg + k0 + j;
        const index_t at = (n * (index_t)groups * kg + k) * (index_t)arg.plane + number;
        if (arg.split > 1) {
          ((GLOBAL_MEM acc_t*)y)[part * (index_t)arg.part_size + at] = TOTAL(j);
        } else if (PLAIN) {
          STORE(y, at, TOTAL(j) + BIAS_OF(k));
        } else {
          FINISH_AT(TOTAL(j), k, at)
          STORE(y, at, TOTAL(j));
        }
      }
  }
}
