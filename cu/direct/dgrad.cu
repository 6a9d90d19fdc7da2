// dgrad.cu, step 5 of the ladder: dgrad, which is the transposed convolution.
//
//   x[n,c,d,h,w] = bias[c] + sum over k,t,r,s of y[n,k,o,p,q] * w[k,c,t,r,s]
//                  where o*stride_d = d + pad_d - t*dil_d, p*stride_h = h + pad_h - r*dil_h, q*stride_w = w + pad_w - s*dil_w
//
// In fprop x[h] reaches every p that reads it. A kernel that went the same way back would add with atomics, in an order that changes
// from run to run. Here each thread gathers instead: it looks up which outputs p,q its own input pixel fed, and adds their gradients in a fixed
// order, so the result has the same bits on every run. With a stride a pixel meets only every `every`-th tap. The thread visits those alone,
// and steps `back` outputs back from one to the next.
//
// Sizes    They are arguments. With UNROLLED, R, S, EVERY_H, EVERY_W and TOTALS are defined, and the loops over a plane of the filter are unrolled.
//          With LAYER, all numbers are constants, except the batch, the sizes of images and what follows from them; AXES is then the number of
//          spatial axes.
// Order    A thread has several loads under way: with UNROLLED those of a channel's taps, otherwise those of a tap's channels. It adds them in
//          that order. Short sums lose less, so it adds some separately first: in float32 those of a tap, or of a row of taps if block_k is
//          small, and with UNROLLED those of block_k filters if that costs few registers; in float64 those of a tap or of some channels.
// Layout   y (the operand) [n][groups*kg][o][p][q], w [groups*kg][cg][t][r][s], x (the result) [n][groups*cg][d][h][w].
// Mapping  block -> THREADS consecutive pixels of the batch, n*d*h*w + d*h*w + h*w + w, times BLOCK_C channels of one
//          group, and one of `split` parts of the sum over filters; GID_0 = ((pixel tile * groups + g) * split + part) * c_tiles + c tile.
//          thread -> one pixel times BLOCK_C channels.
// Memory   shared (LOCAL_ROOM): the weights of block_k filters, [block_k*t*r*s][BLOCK_C]. Registers: BLOCK_C sums, with TOTALS twice.
// Split    With split > 1 every part goes to a workspace [split][size of x] without the epilogue, and direct/reduce.cu adds them.
//
// By hand: nvcc -cubin -I cu cu/direct/dgrad.cu
#include "core/portable.cuh"
#include "core/first_tap.cuh"

#ifndef THREADS
#define THREADS 128
#define BLOCK_C 8
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct DgradArguments {
  long_t n_pixels, plane, by_plane, by_hw, h, w, by_w;  // pixels of the batch, of an image of x (d * h * w) and of its rows
  long_t groups, by_groups, cg, kg, c_tiles, by_c_tiles;
  long_t block_k;                                       // filters whose weights are in shared memory at once
  long_t split, by_split, run, part_size;               // parts of the sum over filters; filters and elements of each
  long_t o, p, q;                                       // an image of y
  long_t t, r, s, by_taps, by_filters;                  // the filter's taps; t * r * s, and that times BLOCK_C, as divisors
  long_t stride_d, stride_h, stride_w;
  long_t every_d, every_h, every_w;                     // taps from one that a pixel meets to the next: stride / gcd(stride, dil)
  long_t back_d, back_h, back_w;                        // outputs between these: dil / gcd(stride, dil)
  long_t pad_d, pad_h, pad_w, dil_d, dil_h, dil_w;
  long_t has_scale, has_bias, has_residual, activation, slope;        // the epilogue; slope: an acc_t's bits
} DgradArguments;

#ifndef R
#define R ((int)arg.r)
#define S ((int)arg.s)
#define EVERY_H ((int)arg.every_h)
#define EVERY_W ((int)arg.every_w)
#endif
#ifdef UNROLLED
#define CHANNELS_OUTSIDE for (int k = 0; k < k_end; ++k)
#define CHANNELS_INSIDE
#define END_OF_TAP
#define END_OF_ROW
#if DTYPE == 64
#define END_OF_CHANNEL if (k % 4 == 3 || k == k_end - 1) { ADD_UP }
#else
#define END_OF_CHANNEL  // float32 took a third longer with it
#endif
#define UNROLL_TAPS _Pragma("unroll")
#else
#define CHANNELS_OUTSIDE
#define CHANNELS_INSIDE _Pragma("unroll 8") for (int k = 0; k < k_end; ++k)
#if DTYPE == 64
#define END_OF_TAP ADD_UP
#define END_OF_ROW
#else
#define END_OF_TAP if (block_k >= 8) { ADD_UP }
#define END_OF_ROW if (block_k < 8) { ADD_UP }
#endif
#define END_OF_CHANNEL
#define UNROLL_TAPS
#endif
#ifndef AXES
#define AXES 3
#endif
#ifndef TOTALS
#define TOTALS (DTYPE == 64 || DTYPE == 32)
#endif

#define FIRST(at, stride, dil, every) ((every) == 1 && (stride) == 1 ? 0 : first_tap(at, stride, dil, every))

KERNEL LAUNCH_BOUNDS(THREADS, (DTYPE == 64 ? 512 : 640) / THREADS) void direct_dgrad(const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM data_t* RESTRICT w,
                         const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                         const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT x, const DgradArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_ROOM(filter);
  const int groups = OF_LAYER(GROUPS, groups), cg = OF_LAYER(CG, cg), kg = OF_LAYER(KG, kg), c_tiles = OF_LAYER(C_TILES, c_tiles);
  const int o_end = AXES < 3 ? 1 : (int)arg.o, p_end = AXES < 2 ? 1 : (int)arg.p, q_end = (int)arg.q, t_end = OF_LAYER(T, t);
  const int stride_d = OF_LAYER(STRIDE_D, stride_d), stride_h = OF_LAYER(STRIDE_H, stride_h), stride_w = OF_LAYER(STRIDE_W, stride_w);
  const int dil_d = OF_LAYER(DIL_D, dil_d), dil_h = OF_LAYER(DIL_H, dil_h), dil_w = OF_LAYER(DIL_W, dil_w);
  const int every_d = OF_LAYER(EVERY_D, every_d), back_d = OF_LAYER(BACK_D, back_d), back_h = OF_LAYER(BACK_H, back_h), back_w = OF_LAYER(BACK_W, back_w);
  const int taps = t_end * R * S, block_k = OF_LAYER(BLOCK_K, block_k);
  const int tile = OVER((int)GID_0, c_tiles, by_c_tiles), c0 = ((int)GID_0 - tile * c_tiles) * BLOCK_C;
  const int of_part = divided(tile, arg.by_split), part = tile - of_part * (int)arg.split;
  const int n_tile = OVER(of_part, groups, by_groups), g = of_part - n_tile * groups;
  const index_t pixel = (index_t)n_tile * THREADS + LID_0;
  const bool inside = pixel < (index_t)arg.n_pixels;
  const index_t n = DIVIDED(pixel, arg.plane, arg.by_plane);
  const int number = (int)(pixel - n * (index_t)arg.plane);
  const int d = AXES < 3 ? 0 : divided(number, arg.by_hw), row = AXES < 2 ? 0 : divided(number, arg.by_w);
  const int h = row - d * (int)arg.h, v_w = number - row * (int)arg.w;
  const int d0 = d + OF_LAYER(PAD_D, pad_d), h0 = h + OF_LAYER(PAD_H, pad_h), w0 = v_w + OF_LAYER(PAD_W, pad_w);
  const int first_t = FIRST(d0, stride_d, dil_d, every_d), first_r = FIRST(h0, stride_h, dil_h, EVERY_H), first_s = FIRST(w0, stride_w, dil_w, EVERY_W);
  const int first_o = first_t < t_end ? (d0 - first_t * dil_d) / stride_d : 0, first_p = first_r < R ? (h0 - first_r * dil_h) / stride_h : 0;
  const int first_q = first_s < S ? (w0 - first_s * dil_w) / stride_w : 0;
  const index_t y_plane = (index_t)o_end * p_end * q_end, y_image = (n * (index_t)groups + g) * kg * y_plane;

  acc_t sum[BLOCK_C];  // since it was added to `total`, if there is one
  for (int j = 0; j < BLOCK_C; ++j) sum[j] = 0;
#if TOTALS
  acc_t total[BLOCK_C];
  for (int j = 0; j < BLOCK_C; ++j) total[j] = 0;
#define ADD_UP                                           \
  _Pragma("unroll") for (int c = 0; c < BLOCK_C; ++c) {  \
    total[c] += sum[c];                                  \
    sum[c] = 0;                                          \
  }
#else
#define ADD_UP {}
#endif

  const int k_first = part * (int)arg.run, k_last = k_first + (int)arg.run < kg ? k_first + (int)arg.run : kg;
  for (int k0 = k_first; k0 < k_last; k0 += block_k) {
    for (int i = LID_0; i < block_k * taps * BLOCK_C; i += THREADS) {
      const int k = OVER(i, taps * BLOCK_C, by_filters), rest = i - k * (taps * BLOCK_C), c = OVER(rest, taps, by_taps), tap = rest - c * taps;
      acc_t v = 0;
      if (k0 + k < kg && c0 + c < cg) v = LOAD(w, ((index_t)(g * kg + k0 + k) * cg + c0 + c) * taps + tap);
      filter[(k * taps + tap) * BLOCK_C + c] = v;
    }
    local_barrier();
    if (inside) {
      const int k_end = k0 + block_k < k_last ? block_k : k_last - k0;
      CHANNELS_OUTSIDE {
        for (int t = first_t, o = first_o; t < t_end; t += every_d, o -= back_d)
          UNROLL_TAPS
          for (int i = 0; i < (R + EVERY_H - 1) / EVERY_H; ++i) {
            const int r = first_r + i * EVERY_H, p = first_p - i * back_h;
            UNROLL_TAPS
            for (int j = 0; j < (S + EVERY_W - 1) / EVERY_W; ++j) {
              const int s = first_s + j * EVERY_W, q = first_q - j * back_w;
              if (r < R && s < S && (unsigned)o < (unsigned)o_end && (unsigned)p < (unsigned)p_end && (unsigned)q < (unsigned)q_end) {
                const index_t y_at = y_image + k0 * y_plane + ((index_t)o * p_end + p) * q_end + q;
                const int tap = ((t * R) + r) * S + s;
                CHANNELS_INSIDE {
                  const acc_t v = LOAD(y, y_at + k * y_plane);
#pragma unroll
                  for (int c = 0; c < BLOCK_C; ++c) sum[c] += v * filter[(k * taps + tap) * BLOCK_C + c];
                }
                END_OF_TAP
              }
            }
            END_OF_ROW
          }
        END_OF_CHANNEL
      }
      ADD_UP
    }
    local_barrier();
  }

#if TOTALS
  for (int j = 0; j < BLOCK_C; ++j) sum[j] = total[j];
#endif
  if (inside) {
    EPILOGUE_FLAGS
#pragma unroll
    for (int j = 0; j < BLOCK_C; ++j)
      if (c0 + j < cg) {
        const int c = g * cg + c0 + j;
        const index_t at = (n * (index_t)groups * cg + c) * (index_t)arg.plane + number;
        if (arg.split > 1) {
          ((GLOBAL_MEM acc_t*)x)[part * (index_t)arg.part_size + at] = sum[j];
        } else {
          FINISH_AT(sum[j], c, at)
          STORE(x, at, sum[j]);
        }
      }
  }
}
