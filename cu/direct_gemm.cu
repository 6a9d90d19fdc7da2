// direct_gemm.cu, step 4 of the ladder: step 3 blocked for registers, an implicit matrix product on the plain cores.
//
//   y[m, pixel] = bias[m] + sum over k of A[m, k] * B[k, pixel]
//   gemm m: output channel of the group | gemm n: pixel (n,o,p,q) of the batch | gemm k: (c,t,r,s), tap fastest
//   A[m, (c,t,r,s)]     = w[W_BASE + g*W_G + m*W_M + c*W_C + t*W_T + r*W_R + s*W_S]
//   B[(c,t,r,s), pixel] = x[n, g, c, o*STRIDE_D - PAD_D + t*DIL_D, p*STRIDE_H - PAD_H + r*DIL_H, q*STRIDE_W - PAD_W + s*DIL_W]
//
// B is never stored: its elements are found in x as the tiles are loaded. Each thread multiplies THREAD_M values of A
// by THREAD_N of B for every k, so one value from shared memory serves 4 to 8 multiplications instead of one.
//
// The gradient of the input uses the same kernel: the pixels h = a (mod STRIDE_H) form a phase, which is a stride-1
// convolution of y with every STRIDE_H-th filter row, backwards (W_R, DIL_H < 0 then say so), and OUT_H > 1 spreads
// the results. One launch a phase.
//
// Mapping  block -> BLOCK_M channels x BLOCK_N pixels; GID_0 = ((pixel tile * GROUPS + g) * SPLIT_K + split) * M_TILES + m tile:
//          blocks that share pixels are neighbours. warp -> 4 x 8 threads. thread -> THREAD_M x THREAD_N sums, in
//          groups of four neighbours, 4 * threads-along-the-axis apart, so that its reads of shared memory are 16 bytes
//          wide and free of bank conflicts.
// Memory   shared: two buffers of A, BLOCK_K x (BLOCK_M + 4), and of B, BLOCK_K x BLOCK_N; the + 4 spreads the
//          transposing stores of A over the banks. While one buffer is multiplied the next tile waits in registers.
//          Global loads of A are 16 bytes wide (A_VEC = 4) when k runs contiguously in w, those of B (B_VEC = 4) when
//          four neighbouring pixels are neighbours in x: 1x1 filters without stride or padding.
// Layout   X_* and Y_* are the elements from one image, group, channel of a group and pixel to the next: NCHW, channels last, or
//          with the first two axes exchanged. That is how the gradient of the filter is this kernel too: x's channels are the
//          images, its images the channels, dy the filter, and y is dw (ConvProblem.launched).
// Guarded  GUARDED = 1 mends what the tensor-core kernels wrote to y (CUDA only): a few blocks look at every tile in turn, and leave
//          at once in the usual case that pack.cu flagged no image (PATCH_ROWS: the product no patch of one) or channel. A tile is
//          computed again if one that belongs to it is flagged with 2, or with 1 and a result is so small that what its operands'
//          limbs lost can be seen in it. Limbs are off by
//          at most 2^-36 where the largest is below 2^15, so that a sum of GEMM_K products, scaled back by scale_n * scale_k, is off by
//          GEMM_K * 2^-20 * scale_n * scale_k at most: less than 2^-21 sqrt(GEMM_K) of a result of 2 sqrt(GEMM_K) * scale_n * scale_k.
//          A smaller one is a suspect, and mostly the small difference of large summands: where their magnitudes make 4 GEMM_K or more,
//          what was lost is 2^-22 of that, as much as any sum in fp32 loses. A few suspects of a tile are looked at so; of many, most
//          are in earnest. FOLLOWED: the next launch mends another phase, and mostly has as little to do as this one.
// Split    SPLIT_K > 1 cuts the sum over k for problems of few tiles: every split writes its part to a workspace
//          [SPLIT_K][size of y] of acc_t and direct_reduce.cu adds the parts in order.
//
// By hand: nvcc -cubin cu/direct_gemm.cu
#include "portable.cuh"

#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define BLOCK_K 8
#define THREAD_M 8
#define THREAD_N 8
#define MIN_BLOCKS 1
#define A_VEC 4
#define B_VEC 1
#define OUT_VEC 4
#define SPLIT_K 1
#define GROUPS 1
#define M 64
#define CRED 64
#define D 1
#define H 56
#define W 56
#define T 1
#define R 3
#define S 3
#define EMPTY 0
#define O 1
#define P 56
#define Q 56
#define STRIDE_D 1
#define STRIDE_H 1
#define STRIDE_W 1
#define PAD_D 0
#define PAD_H 1
#define PAD_W 1
#define DIL_D 1
#define DIL_H 1
#define DIL_W 1
#define CHECK_D 0
#define CHECK_H 1
#define CHECK_W 1
#define W_BASE 0
#define W_G 0
#define W_M 576
#define W_C 9
#define W_T 9
#define W_R 3
#define W_S 1
#define OUT_SIZE 3136
#define OUT_BASE 0
#define OUT_D 3136
#define OUT_H 56
#define OUT_W 1
#define X_IMAGE 200704
#define X_GROUP 200704
#define X_CHANNEL 3136
#define X_PIXEL 1
#define Y_IMAGE 200704
#define Y_GROUP 200704
#define Y_CHANNEL 3136
#define Y_PIXEL 1
#define HAS_BIAS 0
#define HAS_SCALE 0
#define HAS_RESIDUAL 0
#define RELU 0
#define GUARDED 0
#define NOTED 0
#define PATCH_ROWS 0
#define FOLLOWED 0
#endif

#define THREADS_M (BLOCK_M / THREAD_M)
#define THREADS_N (BLOCK_N / THREAD_N)
#define THREADS (THREADS_M * THREADS_N)
#define M_TILES ((M + BLOCK_M - 1) / BLOCK_M)
#define TAPS (T * R * S)
#define GEMM_K (EMPTY ? 0 : CRED * TAPS)  // EMPTY: a phase without taps, whose sums are zero
#define K_STEPS ((GEMM_K + BLOCK_K - 1) / BLOCK_K)
#define SPLIT_STEPS ((K_STEPS + SPLIT_K - 1) / SPLIT_K)
#define A_PITCH (BLOCK_M + 4)
#define A_LOADS (BLOCK_M * BLOCK_K / A_VEC / THREADS)
#define A_COLUMNS (BLOCK_K / A_VEC)         // threads along k in a load of A
#define B_LOADS (BLOCK_K * BLOCK_N / B_VEC / THREADS)
#define B_COLUMNS (BLOCK_N / B_VEC)         // threads along the pixels in a load of B
#define B_ROWS (THREADS / B_COLUMNS)

// What has a scale and a flag, of pixel number `out` of image n and of group g: the image, or a patch of 8 columns and PATCH_ROWS rows.
#if PATCH_ROWS
#define UNITS_IMAGE (P / PATCH_ROWS * (Q / 8))
#define UNITS (GROUPS * (n_pixels / (O * P * Q)) * UNITS_IMAGE)
#define UNIT(n, g, out) (((g) * (n_pixels / (O * P * Q)) + (n)) * UNITS_IMAGE + (out) / Q / PATCH_ROWS * (Q / 8) + (out) % Q / 8)
#else
#define UNITS (n_pixels / (O * P * Q))
#define UNIT(n, g, out) (n)
#endif

#define LOOKS (THREADS / BLOCK_N)
#define SUSPECTS 64
#define KNOWN (!HAS_SCALE && !HAS_RESIDUAL && !RELU)  // the sums can be told from the results

#if SPLIT_K > 1 && OUT_VEC == 4 && DTYPE < 32
#error "parts of a split sum are floats: OUT_VEC must be 1 for 16-bit arrays"
#endif
#if SPLIT_K > 1
typedef acc_t out_t;
#define OUT_STORE(p, i, v) ((p)[i] = (v))
#else
typedef data_t out_t;
#define OUT_STORE STORE
#endif

// 16 bytes, or 4 elements, of A or B on their way from global to shared memory
#define LOAD_A(step)                                                                                             \
  _Pragma("unroll") for (int i = 0; i < A_LOADS; ++i) {                                                          \
    const int m = a_m + i * (THREADS / A_COLUMNS), k = (step)*BLOCK_K + a_k;                                     \
    for (int v = 0; v < A_VEC; ++v) a_next[i * A_VEC + v] = 0;                                                   \
    if (m0 + m < M && k < GEMM_K) {                                                                              \
      LOAD_A_AT(w_group + (index_t)(m0 + m) * W_M, k)                                                            \
    }                                                                                                            \
  }
#if A_VEC == 4
#define LOAD_A_AT(row, k) LOAD_VEC(a_next + i * 4, w, (row) + (k))
#else
#define LOAD_A_AT(row, k) a_next[i] = LOAD(w, (row) + (index_t)((k) / TAPS) * W_C + (k) / (R * S) % T * W_T + (k) / S % R * W_R + (k) % S * W_S);
#endif

#define LOAD_B(step)                                                                                             \
  _Pragma("unroll") for (int i = 0; i < B_LOADS; ++i) {                                                          \
    const int k = (step)*BLOCK_K + b_k + i * B_ROWS;                                                             \
    const int c = k / TAPS, t = k / (R * S) % T, r = k / S % R, s = k % S;                                       \
    bool ok = pixel_ok && k < GEMM_K;                                                                            \
    if (CHECK_D) ok = ok && (unsigned)(d0 + t * DIL_D) < D;                                                      \
    if (CHECK_H) ok = ok && (unsigned)(h0 + r * DIL_H) < H;                                                      \
    if (CHECK_W) ok = ok && (unsigned)(w0 + s * DIL_W) < W;                                                      \
    for (int v = 0; v < B_VEC; ++v) b_next[i * B_VEC + v] = 0;                                                   \
    if (ok) {                                                                                                    \
      LOAD_B_AT(x_pixel + (index_t)c * X_CHANNEL + (index_t)(((t * DIL_D) * H + r * DIL_H) * W + s * DIL_W) * X_PIXEL) \
    }                                                                                                            \
  }
#if B_VEC == 4
#define LOAD_B_AT(at) LOAD_VEC(b_next + i * 4, x, at)
#else
#define LOAD_B_AT(at) b_next[i] = LOAD(x, at);
#endif

#define TO_SHARED(buffer)                                                                                        \
  _Pragma("unroll") for (int i = 0; i < A_LOADS; ++i)                                                            \
  _Pragma("unroll") for (int v = 0; v < A_VEC; ++v)                                                              \
    a_tile[buffer][(a_k + v) * A_PITCH + a_m + i * (THREADS / A_COLUMNS)] = a_next[i * A_VEC + v];               \
  _Pragma("unroll") for (int i = 0; i < B_LOADS; ++i)                                                            \
  _Pragma("unroll") for (int v = 0; v < B_VEC; ++v)                                                              \
    b_tile[buffer][(b_k + i * B_ROWS) * BLOCK_N + b_n + v] = b_next[i * B_VEC + v];

KERNEL LAUNCH_BOUNDS(THREADS, MIN_BLOCKS) void direct_gemm(
    const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w, const GLOBAL_MEM data_t* RESTRICT bias,
    const GLOBAL_MEM data_t* RESTRICT scale, const GLOBAL_MEM data_t* residual, GLOBAL_MEM out_t* RESTRICT y,
#if GUARDED
    const int* unit_flags, const int* filter_flags, const float* unit_scales, const float* filter_scales,
#if NOTED
    int* redone,  // [blocks]: whether the block computed a tile
#endif
    const long_t n_pixels, const long_t n_blocks) {
#if FOLLOWED
  NEXT_LAUNCH_MAY_COME
#endif
  AFTER_LAST_LAUNCH
  // the usual case first: nothing is flagged
  int any = 0, of_filters = 0;
  for (long_t n = LID_0; n < UNITS; n += THREADS) any |= unit_flags[n];
  for (int m = LID_0; m < GROUPS * M; m += THREADS) of_filters |= filter_flags[m];
  of_filters = __syncthreads_or(of_filters);
  any = __syncthreads_or(any | of_filters);
#if NOTED
  if (LID_0 == 0) redone[GID_0] = 0;
#endif
  if (!any) return;
#else
    const long_t n_pixels) {
  AFTER_LAST_LAUNCH
#endif
  LOCAL_MEM acc_t ALIGNED a_tile[2][BLOCK_K * A_PITCH];
  LOCAL_MEM acc_t ALIGNED b_tile[2][BLOCK_K * BLOCK_N];
#if GUARDED
  __shared__ int suspects, suspect[SUSPECTS];  // results that look as if something were lost
  __shared__ int row_flags[BLOCK_M];
  __shared__ float row_least[BLOCK_M];  // of a result where x's scale is 1
  for (long_t block = GID_0; block < n_blocks; block += gridDim.x) {
#else
  const long_t block = GID_0;
#endif
  const int m0 = (int)(block % M_TILES) * BLOCK_M, split = (int)(block / M_TILES % SPLIT_K);
  const int g = (int)(block / (M_TILES * SPLIT_K) % GROUPS);
  const long_t pixel0 = block / (M_TILES * SPLIT_K * GROUPS) * BLOCK_N;
#if GUARDED
  if (!of_filters) {  // mostly none of the tile's images is flagged
    const long_t end = pixel0 + BLOCK_N < n_pixels ? pixel0 + BLOCK_N : n_pixels;
    int flags = 0;
#if PATCH_ROWS
    const long_t pixel = pixel0 + LID_0 % BLOCK_N;
    flags = __syncthreads_or(pixel < end ? unit_flags[UNIT(pixel / (O * P * Q), g, (int)(pixel % (O * P * Q)))] : 0);
#else
    for (long_t n = pixel0 / (O * P * Q); n * (O * P * Q) < end; ++n) flags |= unit_flags[n];
#endif
    if (!flags) continue;
  }
  any = 0;
  if (LID_0 == 0) suspects = 0;
  for (int m = LID_0; m < BLOCK_M && m0 + m < M; m += THREADS) {
    row_flags[m] = filter_flags[g * M + m0 + m];
    row_least[m] = 2 * sqrtf((float)GEMM_K) * filter_scales[g * M + m0 + m];
  }
  __syncthreads();
  {
    // a thread looks at one pixel and every LOOKS-th channel, 32 results on their way at once
    const long_t pixel = pixel0 + LID_0 % BLOCK_N, n = pixel < n_pixels ? pixel / (O * P * Q) : 0;
    const int out = (int)(pixel % (O * P * Q)), unit_flag = unit_flags[UNIT(n, g, out)];
    const int last = pixel < n_pixels && (unit_flag || of_filters) ? min(M - m0, BLOCK_M) : 0;
    const float unit_scale = unit_scales[UNIT(n, g, out)];
    const GLOBAL_MEM out_t* const column = y + n * Y_IMAGE + (long_t)g * Y_GROUP + (long_t)m0 * Y_CHANNEL +
        ((long_t)OUT_BASE + (long_t)(out / (P * Q)) * OUT_D + out / Q % P * OUT_H + out % Q * OUT_W) * Y_PIXEL;
    constexpr int BATCH = 32;
    for (int first = LID_0 / BLOCK_N; first < last; first += BATCH * LOOKS) {
      float found[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) found[i] = KNOWN ? LOAD(column, (long_t)min(first + i * LOOKS, last - 1) * Y_CHANNEL) : 0;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int m = first + i * LOOKS, flag = m < last ? unit_flag | row_flags[m] : 0;
        any |= flag > 1 || (flag && !KNOWN);
        if (KNOWN && flag == 1 && !(fabsf(HAS_BIAS ? found[i] - LOAD(bias, g * M + m0 + m) : found[i]) >= unit_scale * row_least[m])) {
          const int number = atomicAdd(&suspects, 1);
          if (number < SUSPECTS) suspect[number] = m * BLOCK_N + LID_0 % BLOCK_N;
        }
      }
    }
  }
  if (!__syncthreads_or(any) && suspects <= SUSPECTS) {
    // a warp looks at one suspect: at the size of its summands, as the limbs hold them
    for (int i = LID_0 / 32; i < suspects; i += THREADS / 32) {
      const int m = m0 + suspect[i] / BLOCK_N;
      const long_t pixel = pixel0 + suspect[i] % BLOCK_N, n = pixel / (O * P * Q);
      const int out = (int)(pixel % (O * P * Q));
      const int at_d = out / (P * Q) * STRIDE_D - (PAD_D), at_h = out / Q % P * STRIDE_H - (PAD_H), at_w = out % Q * STRIDE_W - (PAD_W);
      const float to_x = 1 / unit_scales[UNIT(n, g, out)], to_w = 1 / filter_scales[g * M + m];
      float size = 0;
      int some = 0;
#pragma unroll 4
      for (int k = LID_0 % 32; k < GEMM_K; k += 32) {
        const int c = k / TAPS, t = k / (R * S) % T, r = k / S % R, s = k % S;
        const int d = at_d + t * DIL_D, h = at_h + r * DIL_H, v = at_w + s * DIL_W;
        if ((unsigned)d < D && (unsigned)h < H && (unsigned)v < W) {
          const float a = LOAD(w, W_BASE + (index_t)g * W_G + (index_t)m * W_M + (index_t)c * W_C + t * W_T + r * W_R + s * W_S);
          const float b = LOAD(x, (index_t)n * X_IMAGE + (index_t)g * X_GROUP + (index_t)c * X_CHANNEL + (((index_t)d * H + h) * W + v) * X_PIXEL);
          size += fabsf(a * to_w * (b * to_x));
          some |= a != 0 && b != 0;
        }
      }
      for (int half = 16; half > 0; half /= 2) size += __shfl_xor_sync(~0u, size, half);
      any |= some && !(size >= 4.f * GEMM_K);
    }
    if (!__syncthreads_or(any)) continue;
  }
#if NOTED
  if (LID_0 == 0) redone[GID_0] = 1;
#endif
#endif

  // loading: this thread's place in the tiles of A and of B; its pixel never changes
  const int a_k = LID_0 % A_COLUMNS * A_VEC, a_m = LID_0 / A_COLUMNS;
  const int b_n = LID_0 % B_COLUMNS * B_VEC, b_k = LID_0 / B_COLUMNS;
  const index_t w_group = W_BASE + (index_t)g * W_G;
  const bool pixel_ok = pixel0 + b_n < n_pixels;
  const index_t image = (index_t)((pixel0 + b_n) / ((long_t)O * P * Q));
  const int opq = (int)((pixel0 + b_n) % ((long_t)O * P * Q));
  const int d0 = opq / (P * Q) * STRIDE_D - (PAD_D), h0 = opq / Q % P * STRIDE_H - (PAD_H), w0 = opq % Q * STRIDE_W - (PAD_W);
  const index_t x_pixel = image * X_IMAGE + (index_t)g * X_GROUP + (((index_t)d0 * H + h0) * W + w0) * X_PIXEL;
  acc_t a_next[A_LOADS * A_VEC], b_next[B_LOADS * B_VEC];

  // multiplying: this thread's rows and columns of the tile
  const int warp = LID_0 / 32, lane = LID_0 % 32;
  const int ty = (warp / (THREADS_N / 8) * 4 + lane / 8) * 4, tx = (warp % (THREADS_N / 8) * 8 + lane % 8) * 4;
  acc_t sum[THREAD_M][THREAD_N];
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) sum[i][j] = 0;

  const int first = split * SPLIT_STEPS, last = first + SPLIT_STEPS < K_STEPS ? first + SPLIT_STEPS : K_STEPS;
  if (first < last) {
    LOAD_A(first)
    LOAD_B(first)
    TO_SHARED(0)
  }
  local_barrier();
  for (int step = first; step < last; ++step) {
    const int buffer = (step - first) % 2;
    if (step + 1 < last) {
      LOAD_A(step + 1)
      LOAD_B(step + 1)
    }
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      acc_t a[THREAD_M], b[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; i += 4) LOCAL_LOAD_VEC(a + i, &a_tile[buffer][k * A_PITCH + i * THREADS_M + ty])
#pragma unroll
      for (int j = 0; j < THREAD_N; j += 4) LOCAL_LOAD_VEC(b + j, &b_tile[buffer][k * BLOCK_N + j * THREADS_N + tx])
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sum[i][j] += a[i] * b[j];
    }
    if (step + 1 < last) {
      TO_SHARED(1 - buffer)
    }
    local_barrier();
  }

  // store: columns are pixels, rows are channels
#if SPLIT_K > 1
  y += (index_t)split * (index_t)(n_pixels / (O * P * Q) * (GROUPS * M)) * OUT_SIZE;
#endif
#pragma unroll
  for (int j = 0; j < THREAD_N; j += OUT_VEC) {
    const long_t pixel = pixel0 + j / 4 * 4 * THREADS_N + tx + j % 4;
    if (pixel < n_pixels) {
      const index_t n = (index_t)(pixel / ((long_t)O * P * Q));
      const int out = (int)(pixel % ((long_t)O * P * Q));
      const index_t at = n * Y_IMAGE + (index_t)g * Y_GROUP +
                         (OUT_BASE + (index_t)(out / (P * Q)) * OUT_D + out / Q % P * OUT_H + out % Q * OUT_W) * Y_PIXEL;
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
        const int m = m0 + i / 4 * 4 * THREADS_M + ty + i % 4;
#if GUARDED
        if (m < M && (unit_flags[UNIT(n, g, out)] || filter_flags[g * M + m])) {
#else
        if (m < M) {
#endif
          const index_t to = at + (index_t)m * Y_CHANNEL;
          const acc_t s = HAS_SCALE ? LOAD(scale, g * M + m) : 1, b = HAS_BIAS ? LOAD(bias, g * M + m) : 0;
          acc_t r[OUT_VEC];
#if HAS_RESIDUAL && OUT_VEC == 4
          LOAD_VEC(r, residual, to)
#elif HAS_RESIDUAL
          r[0] = LOAD(residual, to);
#endif
#pragma unroll
          for (int v = 0; v < OUT_VEC; ++v) EPILOGUE(sum[i][j + v], s, b, r[v])
#if OUT_VEC == 4
          STORE_VEC(y, to, sum[i] + j);
#else
          OUT_STORE(y, to, sum[i][j]);
#endif
        }
      }
    }
  }
#if GUARDED
  }
#endif
}
