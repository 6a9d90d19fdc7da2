// direct_dgrad.cu, step 5 of the ladder: the gradient of the input, which is the transposed convolution.
//
//   x[n,c,d,h,w] = bias[c] + sum over k,t,r,s of y[n,k,o,p,q] * w[k,c,t,r,s]
//                  where o*stride_d = d + pad_d - t*dil_d, p*stride_h = h + pad_h - r*dil_h, q*stride_w = w + pad_w - s*dil_w
//
// The forward pass scatters x[h] into every p that reads it; turned round, one would add with atomics, in an order
// that changes from run to run. Here each thread gathers instead: it looks up which outputs p,q its own input pixel
// fed and adds their gradients in a fixed order, so the result is the same bits every time.
//
// Sizes    They are arguments. R, S, STRIDE_H and STRIDE_W may be defined. With LAYER, all numbers but the batch, the sizes of
//          images and what follows from these are constants; AXES is their number then.
// Layout   y (the operand) [n][groups*kg][o][p][q], w [groups*kg][cg][t][r][s], x (the result) [n][groups*cg][d][h][w].
// Mapping  block -> THREADS consecutive pixels of the batch, n*d*h*w + d*h*w + h*w + w, times BLOCK_C channels of one
//          group; GID_0 = (pixel tile * groups + g) * c_tiles + c tile. thread -> one pixel times BLOCK_C channels.
// Memory   shared: ROOM elements, the weights of block_k filters, [block_k*t*r*s][BLOCK_C]. Registers: BLOCK_C sums.
//
// By hand: nvcc -cubin cu/direct_dgrad.cu
#include "portable.cuh"

#ifndef THREADS
#define THREADS 128
#define BLOCK_C 8
#define ROOM 1536
#define HAS_RESIDUAL 0
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct DgradArguments {
  long_t n_pixels, plane, by_plane, by_hw, h, w, by_w;  // pixels of the batch, of an image of x (d * h * w) and its rows
  long_t groups, by_groups, cg, kg, c_tiles, by_c_tiles;
  long_t block_k;                                       // filters whose weights are in shared memory at once
  long_t o, p, q;                                       // an image of y
  long_t t, r, s, by_taps, by_filters;                  // the filter's taps; t * r * s, and that times BLOCK_C, as divisors
  long_t stride_d, by_stride_d, stride_h, by_stride_h, stride_w, by_stride_w;
  long_t pad_d, pad_h, pad_w, dil_d, dil_h, dil_w;
  long_t has_scale, has_bias, relu;                     // the epilogue
} DgradArguments;

#ifdef R
#define OVER_STRIDE_H(n) ((n) / STRIDE_H)
#define OVER_STRIDE_W(n) ((n) / STRIDE_W)
#else
#define R ((int)arg.r)
#define S ((int)arg.s)
#define STRIDE_H ((int)arg.stride_h)
#define STRIDE_W ((int)arg.stride_w)
#define OVER_STRIDE_H(n) ((n) < 0 ? 0 : divided(n, arg.by_stride_h))
#define OVER_STRIDE_W(n) ((n) < 0 ? 0 : divided(n, arg.by_stride_w))
#endif
#ifdef LAYER
#if R * S <= 64
#define UNROLL_TAPS _Pragma("unroll")
#endif
#endif
#ifndef UNROLL_TAPS
#define UNROLL_TAPS
#endif
#ifndef AXES
#define AXES 3
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_dgrad(const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM data_t* RESTRICT w,
                         const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                         const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT x, const DgradArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t filter[ROOM];
  const int groups = OF_LAYER(GROUPS, groups), cg = OF_LAYER(CG, cg), kg = OF_LAYER(KG, kg), c_tiles = OF_LAYER(C_TILES, c_tiles);
  const int o_end = AXES < 3 ? 1 : (int)arg.o, p_end = AXES < 2 ? 1 : (int)arg.p, q_end = (int)arg.q, t_end = OF_LAYER(T, t);
  const int stride_d = OF_LAYER(STRIDE_D, stride_d), dil_d = OF_LAYER(DIL_D, dil_d), dil_h = OF_LAYER(DIL_H, dil_h), dil_w = OF_LAYER(DIL_W, dil_w);
  const int taps = t_end * R * S, block_k = OF_LAYER(BLOCK_K, block_k);
  const int tile = OVER((int)GID_0, c_tiles, by_c_tiles), c0 = ((int)GID_0 - tile * c_tiles) * BLOCK_C;
  const int n_tile = OVER(tile, groups, by_groups), g = tile - n_tile * groups;
  const index_t pixel = (index_t)n_tile * THREADS + LID_0;
  const bool inside = pixel < (index_t)arg.n_pixels;
  const index_t n = DIVIDED(pixel, arg.plane, arg.by_plane);
  const int number = (int)(pixel - n * (index_t)arg.plane);
  const int d = AXES < 3 ? 0 : divided(number, arg.by_hw), row = AXES < 2 ? 0 : divided(number, arg.by_w);
  const int h = row - d * (int)arg.h, v_w = number - row * (int)arg.w;
  const int d0 = d + OF_LAYER(PAD_D, pad_d), h0 = h + OF_LAYER(PAD_H, pad_h), w0 = v_w + OF_LAYER(PAD_W, pad_w);
  const index_t y_image = (n * (index_t)groups + g) * kg * ((index_t)o_end * p_end * q_end);

  acc_t sum[BLOCK_C];
  for (int j = 0; j < BLOCK_C; ++j) sum[j] = 0;

  for (int k0 = 0; k0 < kg; k0 += block_k) {
    for (int i = LID_0; i < block_k * taps * BLOCK_C; i += THREADS) {
      const int k = OVER(i, taps * BLOCK_C, by_filters), rest = i - k * (taps * BLOCK_C), c = OVER(rest, taps, by_taps), tap = rest - c * taps;
      acc_t v = 0;
      if (k0 + k < kg && c0 + c < cg) v = LOAD(w, ((index_t)(g * kg + k0 + k) * cg + c0 + c) * taps + tap);
      filter[(k * taps + tap) * BLOCK_C + c] = v;
    }
    local_barrier();
    if (inside) {
      for (int k = 0; k < block_k && k0 + k < kg; ++k)
        for (int t = 0; t < t_end; ++t) {
          const int od = d0 - t * dil_d, o = od < 0 ? 0 : OVER(od, stride_d, by_stride_d);  // o * stride_d = od where tap t meets an output
          if (od >= 0 && o * stride_d == od && o < o_end) {
            const index_t y_plane = y_image + ((k0 + k) * (index_t)o_end + o) * (p_end * q_end);
            UNROLL_TAPS
            for (int r = 0; r < R; ++r) {
              const int ph = h0 - r * dil_h, p = OVER_STRIDE_H(ph);
              if (ph >= 0 && p * STRIDE_H == ph && p < p_end) {
                const index_t y_row = y_plane + p * q_end;
                UNROLL_TAPS
                for (int s = 0; s < S; ++s) {
                  const int qw = w0 - s * dil_w, q = OVER_STRIDE_W(qw);
                  if (qw >= 0 && q * STRIDE_W == qw && q < q_end) {
                    const acc_t v = LOAD(y, y_row + q);
#pragma unroll
                    for (int j = 0; j < BLOCK_C; ++j) sum[j] += v * filter[((k * t_end + t) * R * S + r * S + s) * BLOCK_C + j];
                  }
                }
              }
            }
          }
        }
    }
    local_barrier();
  }

  if (inside) {
    EPILOGUE_FLAGS
#pragma unroll
    for (int j = 0; j < BLOCK_C; ++j)
      if (c0 + j < cg) {
        const int c = g * cg + c0 + j;
        const index_t at = (n * (index_t)groups * cg + c) * (index_t)arg.plane + number;
        FINISH_AT(sum[j], c, at)
        STORE(x, at, sum[j]);
      }
  }
}
