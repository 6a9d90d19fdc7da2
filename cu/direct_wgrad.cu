// direct_wgrad.cu: the gradient of the filter of few channels a group, a depthwise convolution's above all.
//
//   w[k,c,o,p,q] = sum over n,t,r,s of x[n, g*IMAGES + c, o*STRIDE_D - PAD_D + t*DIL_D, p*STRIDE_H - PAD_H + r*DIL_H,
//                                       q*STRIDE_W - PAD_W + s*DIL_W] * y[n,k,t,r,s],   g = k / KG
//
// The letters are those of the convolution that it is launched as (ConvProblem.launched): y, the gradient of the result, is the
// filter of T x R x S taps there, the filter's O x P x Q taps are the pixels, x's C/groups channels the IMAGES and its N = CG images
// the channels. direct_gemm.cu computes the same, but wants tiles of 64 k by 64 (c,o,p,q), which a group of one channel leaves empty.
//
// Mapping  block -> one k and c, TAPS of the (o,p,q), and one of SLICES runs of images n;
//          GID_0 = ((k * IMAGES + c) * chunks of taps + chunk) * SLICES + slice.
//          thread -> every THREADS-th pixel of y: one value of y meets TAPS of x, neighbours of what the threads beside it read.
// Memory   registers: TAPS sums. Shared: [TAPS][THREADS] of them at the end, added in two steps, always in the same order.
//          With SLICES > 1 each slice writes its part to a workspace [SLICES][size of w] and direct_reduce.cu adds them.
//
// By hand: nvcc -cubin cu/direct_wgrad.cu
#include "portable.cuh"

#ifndef THREADS
#define THREADS 128
#define TAPS 9
#define SLICES 4
#define GROUPS 64
#define CG 64
#define KG 1
#define IMAGES 1
#define D 1
#define H 56
#define W 56
#define T 1
#define R 56
#define S 56
#define O 1
#define P 3
#define Q 3
#define STRIDE_D 1
#define STRIDE_H 1
#define STRIDE_W 1
#define PAD_D 0
#define PAD_H 1
#define PAD_W 1
#define DIL_D 1
#define DIL_H 1
#define DIL_W 1
#endif

#define CHUNKS ((O * P * Q + TAPS - 1) / TAPS)
#define PARTS 8  // in which a tap's sums are added first
#define PIXELS (T * R * S)

#if SLICES > 1
typedef acc_t out_t;
#define OUT_STORE(p, i, v) ((p)[i] = (v))
#else
typedef data_t out_t;
#define OUT_STORE STORE
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_wgrad(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT y,
                                                   GLOBAL_MEM out_t* RESTRICT w) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[TAPS * THREADS];
  const int slice = (int)(GID_0 % SLICES), chunk = (int)(GID_0 / SLICES % CHUNKS);
  const int c = (int)(GID_0 / (SLICES * CHUNKS) % IMAGES), k = (int)(GID_0 / (SLICES * CHUNKS) / IMAGES);
  acc_t sum[TAPS];
#pragma unroll
  for (int i = 0; i < TAPS; ++i) sum[i] = 0;
  const int first = (int)((long_t)CG * slice / SLICES), last = (int)((long_t)CG * (slice + 1) / SLICES);
  for (int n = first; n < last; ++n) {
    const index_t x_plane = ((index_t)n * (GROUPS * IMAGES) + k / KG * IMAGES + c) * ((index_t)D * H * W);
    const index_t y_plane = ((index_t)n * (GROUPS * KG) + k) * (index_t)PIXELS;
    for (int pixel = LID_0; pixel < PIXELS; pixel += THREADS) {
      const acc_t v = LOAD(y, y_plane + pixel);
      const int d0 = pixel / (R * S) * DIL_D - PAD_D, h0 = pixel / S % R * DIL_H - PAD_H, w0 = pixel % S * DIL_W - PAD_W;
#pragma unroll
      for (int i = 0; i < TAPS; ++i) {
        const int tap = chunk * TAPS + i;
        const int d = d0 + tap / (P * Q) * STRIDE_D, h = h0 + tap / Q % P * STRIDE_H, col = w0 + tap % Q * STRIDE_W;
        acc_t u = 0;
        if ((unsigned)d < D && (unsigned)h < H && (unsigned)col < W) u = LOAD(x, x_plane + ((index_t)d * H + h) * W + col);
        sum[i] += v * u;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TAPS; ++i) sums[i * THREADS + LID_0] = sum[i];
  local_barrier();
  for (int i = LID_0; i < TAPS * PARTS; i += THREADS) {
    acc_t part = 0;
    for (int j = 0; j < THREADS / PARTS; ++j) part += sums[i * (THREADS / PARTS) + j];
    sums[i * (THREADS / PARTS)] = part;  // nobody else reads these
  }
  local_barrier();
  for (int i = LID_0; i < TAPS; i += THREADS)
    if (chunk * TAPS + i < O * P * Q) {
      acc_t all = 0;
      for (int j = 0; j < PARTS; ++j) all += sums[i * THREADS + j * (THREADS / PARTS)];
      OUT_STORE(w, ((index_t)slice * (GROUPS * KG) * IMAGES + (index_t)k * IMAGES + c) * (O * P * Q) + chunk * TAPS + i, all);
    }
}
