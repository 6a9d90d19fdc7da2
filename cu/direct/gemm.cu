// gemm.cu, step 4 of the ladder: step 3 blocked for registers, an implicit matrix product on the plain cores.
//
//   y[m, pixel] = bias[m] + sum over k of A[m, k] * B[k, pixel]
//   gemm m: output channel of the group | gemm n: pixel (n,o,p,q) of the batch | gemm k: (c,t,r,s), tap fastest
//   A[m, (c,t,r,s)]     = w[w_base + g*w_g + m*w_m + c*w_c + t*w_t + r*w_r + s*w_s]
//   B[(c,t,r,s), pixel] = x[n, g, c, o*stride_d - pad_d + t*dil_d, p*stride_h - pad_h + r*dil_h, q*stride_w - pad_w + s*dil_w]
//
// B is never stored: its elements are read from x as the tiles are loaded. Each thread multiplies THREAD_M values of A
// by THREAD_N of B for every k, so one value from shared memory serves 4 to 8 multiplications instead of one.
//
// dgrad uses the same kernel, with one launch a phase. The pixels h = a (mod stride) form a phase: a stride-1 convolution of
// y with every stride-th filter row, taken backwards (w_r and dil_h < 0). y_h spreads the results.
//
// Sizes    They are arguments: the text depends on the tile, the type and the width of loads alone. All threads of a block need the same k,
//          so the block keeps a table of taps in shared memory: for each k its offset in x from a pixel's first element, and its offset in
//          a row of w. BLOCK_K threads write the taps of the step after next while the tile of this step is multiplied.
// Mapping  block -> BLOCK_M channels x BLOCK_N pixels; GID_0 = ((pixel tile * groups + g) * split + part) * m_tiles + m tile:
//          blocks that share pixels are neighbours. warp -> 4 x 8 threads. thread -> THREAD_M x THREAD_N sums, in
//          groups of four neighbours, 4 * threads-along-the-axis apart, so that its reads of shared memory are 16 bytes
//          wide and free of bank conflicts.
// Memory   shared: two buffers of A, BLOCK_K x (BLOCK_M + 4), of B, BLOCK_K x BLOCK_N, and of BLOCK_K taps; the + 4 spreads the
//          transposing stores of A over the banks. While one buffer is multiplied the next tile waits in registers.
//          Global loads of A are 16 bytes wide (A_VEC = 4) when k runs contiguously in w, those of B (B_VEC = 4) when
//          four neighbouring pixels are neighbours in x: 1x1 filters without stride or padding, which need no table.
// Layout   x_* and y_* are the elements from one image, group, channel of a group, plane, row and pixel to the next. Arrays are NCHW, channels
//          last, or have their first two axes exchanged. So this kernel also computes wgrad: x's channels are the images,
//          its images are the channels, dy is the filter, and y is dw (ConvProblem.launched).
// Fix-up   RECOMPUTE = 1 recomputes what the tensor-core kernels wrote to y (CUDA only). A few blocks check every tile in turn. Usually pack.cu has
//          flagged no image and no channel, and the blocks leave at once. A tile is computed again if
//          an image or a channel of it is flagged with 2. With flag 1 it is computed again if a result is so small that it may show what its
//          operands' limbs lost. Limbs are off by at most 2^-36 if the largest is below 2^15. So a sum of gemm_k products, scaled back by
//          scale_n * scale_k, is off by at most gemm_k * 2^-20 * scale_n * scale_k: less than 2^-21 sqrt(gemm_k) of a result of
//          2 sqrt(gemm_k) * scale_n * scale_k. A smaller result is a suspect. Most suspects are small differences of large summands: if the
//          summands' magnitudes sum to 4 gemm_k or more, 2^-22 of that was lost, as much as any sum in fp32 loses. So a few suspects of a tile
//          are examined one by one. If there are many, most of them need mending, and the tile is computed again.
// Split    split > 1 cuts the sum over k for problems of few tiles: every part is written to a workspace
//          [split][size of y] of acc_t, without the epilogue, and direct/reduce.cu adds the parts in order.
//
// By hand: nvcc -cubin -I cu cu/direct/gemm.cu
#include "core/portable.cuh"
#if RECOMPUTE
#include "core/near_border.cuh"
#endif

#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define BLOCK_K 8
#define THREAD_M 8
#define THREAD_N 8
#define MIN_BLOCKS 1
#define A_VEC 4
#define B_VEC 1
#define RECOMPUTE 0
#endif

#define THREADS_M (BLOCK_M / THREAD_M)
#define THREADS_N (BLOCK_N / THREAD_N)
#define THREADS (THREADS_M * THREADS_N)
#define A_PITCH (BLOCK_M + 4)
#define A_LOADS (BLOCK_M * BLOCK_K / A_VEC / THREADS)
#define A_COLUMNS (BLOCK_K / A_VEC)         // threads along k in a load of A
#define B_LOADS (BLOCK_K * BLOCK_N / B_VEC / THREADS)
#define B_COLUMNS (BLOCK_N / B_VEC)         // threads along the pixels in a load of B
#define B_ROWS (THREADS / B_COLUMNS)
// Up to 256 products, on a CPU 32, are added separately before they go to the total: short sums lose less. Tiles of 64x64 would take 5% longer with it.
#define TOTALS (DTYPE == 32 && !RECOMPUTE && THREAD_M <= 4)
#ifdef __OPENCL_VERSION__
#define STEPS_APART (32 / BLOCK_K)
#else
#define STEPS_APART (256 / BLOCK_K)
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct GemmArguments {
  long_t n_pixels, plane, by_plane, by_pq, p, q, by_q;  // gemm n: pixels of the batch, of an image (o * p * q) and of its rows
  long_t m, m_tiles, by_m_tiles;                        // gemm m: channels of a group that are written
  long_t gemm_k, taps, by_taps, by_rs, r, s, by_s;      // gemm k: 0 in a phase without taps, whose sums are 0
  long_t groups, by_groups;
  long_t split, by_split, split_steps, part_size;  // parts of the sum over k; steps of BLOCK_K and elements of each
  long_t d, h, w;                                  // size of an image of x
  long_t stride_d, stride_h, stride_w;
  long_t pad_d, pad_h, pad_w;
  long_t dil_d, dil_h, dil_w;
  long_t x_image, x_group, x_channel, x_d, x_h, x_w;
  long_t w_base, w_g, w_m, w_c, w_t, w_r, w_s;
  long_t y_base, y_image, y_group, y_channel, y_d, y_h, y_w;
  long_t out_vec;                                  // whether four neighbouring pixels may be written at once
  long_t has_scale, has_bias, has_residual, activation, slope;   // the epilogue; slope: an acc_t's bits
  // where RECOMPUTE:
  long_t n_blocks;                                 // tiles to check
  long_t images;                                   // each has a scale and a flag
  long_t followed;                                 // the next launch recomputes another phase, and mostly has as little to do
  long_t with_moments;                                    // whether redone[block] says if the block computed a tile again
  long_t side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;  // what stands outside of x (near_border.cuh)
} GemmArguments;

// Offsets of element (t, r, s) of a channel's filter and of its channel from the first element that a pixel reads.
typedef struct ALIGNED Tap {
  int d, h, w;
  index_t x;
} Tap;

// A pixel's image in the batch, and its number in the image; coordinates of that number.
#define IMAGE_OF(pixel) DIVIDED(pixel, arg.plane, arg.by_plane)
#define NUMBER_IN(n, pixel) ((int)((pixel) - (n) * (index_t)arg.plane))
#define COORDINATES(number, o, p_, q_)                                                    \
  const int o = divided(number, arg.by_pq), row_ = divided(number, arg.by_q);             \
  const int p_ = row_ - o * (int)arg.p, q_ = (number) - row_ * (int)arg.q;
#define Y_AT(n, g, o, p_, q_)                                                                                \
  ((index_t)arg.y_base + (n) * (index_t)arg.y_image + (g) * (index_t)arg.y_group + (o) * (index_t)arg.y_d +   \
   (p_) * (index_t)arg.y_h + (q_) * (index_t)arg.y_w)
// What a block computes: its first channel and pixel, its group, its part of the sum.
#define TILE_OF(block, m0, part, g, pixel0)                                                                     \
  const int n_block_ = divided(block, arg.by_m_tiles), g_block_ = divided(n_block_, arg.by_split);              \
  const int tile_ = divided(g_block_, arg.by_groups);                                                           \
  const int m0 = ((block) - n_block_ * (int)arg.m_tiles) * BLOCK_M, part = n_block_ - g_block_ * (int)arg.split; \
  const int g = g_block_ - tile_ * (int)arg.groups;                                                             \
  const index_t pixel0 = (index_t)tile_ * BLOCK_N;
// A thread's first row and column of the tile.
#define PLACE_OF(thread, ty, tx)                                                         \
  const int warp_ = (thread) / 32, lane_ = (thread) % 32;                                \
  const int ty = (warp_ / (THREADS_N / 8) * 4 + lane_ / 8) * 4, tx = (warp_ % (THREADS_N / 8) * 8 + lane_ % 8) * 4;
// Channel and tap number k.
#define TAP_OF(k, c, t, r_, s_)                                                                                  \
  const int c = (int)DIVIDED(k, arg.taps, arg.by_taps), tap_ = (int)((k) - c * (index_t)arg.taps);               \
  const int t = divided(tap_, arg.by_rs), tap_row_ = divided(tap_, arg.by_s);                                    \
  const int r_ = tap_row_ - t * (int)arg.r, s_ = tap_ - tap_row_ * (int)arg.s;

#if RECOMPUTE
#define LOOKS (THREADS / BLOCK_N)
#define SUSPECTS 64
#endif

#if DTYPE < 32
#define STORE_SUM(at, v)                                     \
  {                                                          \
    if (arg.split > 1) ((GLOBAL_MEM acc_t*)y)[at] = (v);     \
    else STORE(y, at, v);                                    \
  }
#else
#define STORE_SUM(at, v) STORE(y, at, v);
#endif

// Writes the taps of a step into one of two buffers.
#define WRITE_TAPS(step, buffer)                                                                           \
  if (LID_0 < BLOCK_K) {                                                                                   \
    const index_t k = (index_t)(step)*BLOCK_K + LID_0;                                                     \
    TAP_OF(k, c, t, r, s)                                                                                  \
    Tap tap;                                                                                               \
    tap.d = t * (int)arg.dil_d;                                                                            \
    tap.h = r * (int)arg.dil_h;                                                                            \
    tap.w = s * (int)arg.dil_w;                                                                            \
    tap.x = c * (index_t)arg.x_channel X_OF_TAP(tap);                                                      \
    taps[buffer][LID_0] = tap;                                                                             \
    WRITE_W_TAP(buffer, c * (index_t)arg.w_c + t * (index_t)arg.w_t + r * (index_t)arg.w_r + s * (index_t)arg.w_s)        \
  }
#if RECOMPUTE  // what a tap reads outside of x depends on the pixel
#define X_OF_TAP(tap)
#else
#define X_OF_TAP(tap) + (tap).d * (index_t)arg.x_d + (tap).h * (index_t)arg.x_h + (tap).w * (index_t)arg.x_w
#endif
#if A_VEC == 4
#define WRITE_W_TAP(buffer, at)
#else
#define WRITE_W_TAP(buffer, at) w_taps[buffer][LID_0] = (at);
#endif

// loads 16 bytes, or 4 elements, of A or B, on their way from global to shared memory
#define LOAD_A(step, buffer)                                                                                     \
  {                                                                                                              \
    const index_t k = (index_t)(step)*BLOCK_K + a_k;                                                             \
    const index_t w_tap = W_TAP(k, buffer);                                                                      \
    _Pragma("unroll") for (int i = 0; i < A_LOADS; ++i) {                                                        \
      const int m = m0 + a_m + i * (THREADS / A_COLUMNS);                                                        \
      for (int v = 0; v < A_VEC; ++v) a_next[i * A_VEC + v] = 0;                                                 \
      if (m < m_end && k < gemm_k) {                                                                             \
        LOAD_A_AT(w_group + m * (index_t)arg.w_m + w_tap)                                                        \
      }                                                                                                          \
    }                                                                                                            \
  }
#if A_VEC == 4
#define W_TAP(k, buffer) (k)
#define LOAD_A_AT(at) LOAD_VEC(a_next + i * 4, w, at)
#else
#if B_VEC == 4
#define W_TAP(k, buffer) ((k) * (index_t)arg.w_c)
#else
#define W_TAP(k, buffer) w_taps[buffer][a_k]
#endif
#define LOAD_A_AT(at) a_next[i] = LOAD(w, at);
#endif

#if B_VEC == 4
#define LOAD_B(step, buffer)                                                                        \
  _Pragma("unroll") for (int i = 0; i < B_LOADS; ++i) {                                             \
    const index_t k = (index_t)(step)*BLOCK_K + b_k + i * B_ROWS;                                   \
    for (int v = 0; v < 4; ++v) b_next[i * 4 + v] = 0;                                              \
    if (pixel_ok && k < gemm_k) LOAD_VEC(b_next + i * 4, x, x_pixel + k * (index_t)arg.x_channel)   \
  }
#else
#define LOAD_B(step, buffer)                                                                        \
  _Pragma("unroll") for (int i = 0; i < B_LOADS; ++i) {                                             \
    const Tap tap = taps[buffer][b_k + i * B_ROWS];                                                 \
    b_next[i] = 0;                                                                                  \
    if (pixel_ok && (index_t)(step)*BLOCK_K + b_k + i * B_ROWS < gemm_k TAP_INSIDE(tap))            \
      LOAD_TAP(tap)                                                                                 \
  }
#if RECOMPUTE
#define TAP_INSIDE(tap)
#define LOAD_TAP(tap)                                                                                                       \
  {                                                                                                                         \
    const int d_ = near_pixel(d0 + tap.d, (int)arg.d, arg.side_d, arg.last_side_d);                                         \
    const int h_ = near_pixel(h0 + tap.h, (int)arg.h, arg.side_h, arg.last_side_h);                                         \
    const int w_ = near_pixel(w0 + tap.w, (int)arg.w, arg.side_w, arg.last_side_w);                                         \
    if ((d_ | h_ | w_) >= 0)                                                                                                \
      b_next[i] = LOAD(x, x_pixel + tap.x + d_ * (index_t)arg.x_d + h_ * (index_t)arg.x_h + w_ * (index_t)arg.x_w);         \
  }
#else
#define TAP_INSIDE(tap)                                                                                           \
  && (unsigned)(d0 + tap.d) < (unsigned)arg.d && (unsigned)(h0 + tap.h) < (unsigned)arg.h && (unsigned)(w0 + tap.w) < (unsigned)arg.w
#define LOAD_TAP(tap) b_next[i] = LOAD(x, x_pixel + tap.x);
#endif
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
    const GLOBAL_MEM data_t* RESTRICT scale, const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y,
#if RECOMPUTE
    const int* image_flags, const int* filter_flags, const float* image_scales, const float* filter_scales, int* redone,
    const GemmArguments arg) {
  if (arg.followed) {
    NEXT_LAUNCH_MAY_COME
  }
  AFTER_LAST_LAUNCH
  // the usual case first: nothing is flagged
  int any = 0, of_filters = 0;
  for (int n = LID_0; n < (int)arg.images; n += THREADS) any |= image_flags[n];
  for (int m = LID_0; m < (int)(arg.groups * arg.m); m += THREADS) of_filters |= filter_flags[m];
  of_filters = __syncthreads_or(of_filters);
  any = __syncthreads_or(any | of_filters);
  if (arg.with_moments && LID_0 == 0) redone[GID_0] = 0;
  if (!any) return;
#else
    const GemmArguments arg) {
  AFTER_LAST_LAUNCH
#endif
  LOCAL_MEM acc_t ALIGNED a_tile[2][BLOCK_K * A_PITCH];
  LOCAL_MEM acc_t ALIGNED b_tile[2][BLOCK_K * BLOCK_N];
#if B_VEC == 1
  LOCAL_MEM Tap taps[2][BLOCK_K];
#if A_VEC == 1
  LOCAL_MEM index_t w_taps[2][BLOCK_K];
#endif
#endif
  const int m_end = (int)arg.m;
  const index_t n_pixels = (index_t)arg.n_pixels, gemm_k = (index_t)arg.gemm_k;
#if RECOMPUTE
  __shared__ int suspects, suspect[SUSPECTS];  // results that may show a loss
  __shared__ int row_flags[BLOCK_M];
  __shared__ float row_least[BLOCK_M], row_bias[BLOCK_M];  // the least result that shows no loss, for a scale of x of 1
  const bool known = !arg.activation;  // the sums can be recovered from the results, without bias and residual
  for (long_t block_ = GID_0; block_ < arg.n_blocks; block_ += gridDim.x) {
  const int block = (int)block_;
#else
  const int block = (int)GID_0;
#endif
  TILE_OF(block, m0, part, g, pixel0)
#if RECOMPUTE
  if (!of_filters) {  // mostly none of the tile's images is flagged
    const index_t end = pixel0 + BLOCK_N < n_pixels ? pixel0 + BLOCK_N : n_pixels;
    int flags = 0;
    for (index_t n = IMAGE_OF(pixel0); n * (index_t)arg.plane < end; ++n) flags |= image_flags[n];
    if (!flags) continue;
  }
  any = 0;
  if (LID_0 == 0) suspects = 0;
  const int has_scale = (int)arg.has_scale, has_bias = (int)arg.has_bias;
  for (int m = LID_0; m < BLOCK_M && m0 + m < m_end; m += THREADS) {
    row_flags[m] = filter_flags[g * m_end + m0 + m];
    row_least[m] = 2 * sqrtf((float)gemm_k) * filter_scales[g * m_end + m0 + m] * fabsf(SCALE_OF(g * m_end + m0 + m));
    row_bias[m] = BIAS_OF(g * m_end + m0 + m);
  }
  __syncthreads();
  {
    // a thread checks one pixel and every LOOKS-th channel, 32 results under way at once
    const index_t pixel = pixel0 + LID_0 % BLOCK_N, n = pixel < n_pixels ? IMAGE_OF(pixel) : 0;
    const int number = pixel < n_pixels ? NUMBER_IN(n, pixel) : 0, image_flag = image_flags[n];
    COORDINATES(number, o, p, q)
    const int last = pixel < n_pixels && (image_flag || of_filters) ? min(m_end - m0, BLOCK_M) : 0;
    const float image_scale = image_scales[n];
    const index_t first_channel = Y_AT(n, g, o, p, q) + m0 * (index_t)arg.y_channel;
    const GLOBAL_MEM data_t* const column = y + first_channel;
    const GLOBAL_MEM data_t* const summand = residual + first_channel;
    constexpr int BATCH = 32;
    for (int first = LID_0 / BLOCK_N; first < last; first += BATCH * LOOKS) {
      float found[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        found[i] = known ? LOAD(column, (long_t)min(first + i * LOOKS, last - 1) * (index_t)arg.y_channel) : 0;
      if (known && arg.has_residual) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) found[i] -= LOAD(summand, (long_t)min(first + i * LOOKS, last - 1) * (index_t)arg.y_channel);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int m = first + i * LOOKS, flag = m < last ? image_flag | row_flags[m] : 0;
        any |= flag > 1 || (flag && !known);
        if (known && flag == 1 && !(fabsf(found[i] - row_bias[m]) >= image_scale * row_least[m])) {
          const int place = atomicAdd(&suspects, 1);
          if (place < SUSPECTS) suspect[place] = m * BLOCK_N + LID_0 % BLOCK_N;
        }
      }
    }
  }
  if (!__syncthreads_or(any) && suspects <= SUSPECTS) {
    // a warp checks one suspect: the sum of its summands' magnitudes, as the limbs hold them
    for (int i = LID_0 / 32; i < suspects; i += THREADS / 32) {
      const int m = m0 + suspect[i] / BLOCK_N;
      const index_t pixel = pixel0 + suspect[i] % BLOCK_N, n = IMAGE_OF(pixel);
      const int number = NUMBER_IN(n, pixel);
      COORDINATES(number, o, p, q)
      const int at_d = o * (int)arg.stride_d - (int)arg.pad_d, at_h = p * (int)arg.stride_h - (int)arg.pad_h;
      const int at_w = q * (int)arg.stride_w - (int)arg.pad_w;
      const float to_x = 1 / image_scales[n], to_w = 1 / filter_scales[g * m_end + m];
      float size = 0;
      int some = 0;
#pragma unroll 4
      for (index_t k = LID_0 % 32; k < gemm_k; k += 32) {
        TAP_OF(k, c, t, r, s)
        const int d = near_pixel(at_d + t * (int)arg.dil_d, (int)arg.d, arg.side_d, arg.last_side_d);
        const int h = near_pixel(at_h + r * (int)arg.dil_h, (int)arg.h, arg.side_h, arg.last_side_h);
        const int v = near_pixel(at_w + s * (int)arg.dil_w, (int)arg.w, arg.side_w, arg.last_side_w);
        if ((d | h | v) >= 0) {
          const float a = LOAD(w, (index_t)arg.w_base + g * (index_t)arg.w_g + m * (index_t)arg.w_m + c * (index_t)arg.w_c +
                                      t * (index_t)arg.w_t + r * (index_t)arg.w_r + s * (index_t)arg.w_s);
          const float b = LOAD(x, n * (index_t)arg.x_image + g * (index_t)arg.x_group + c * (index_t)arg.x_channel +
                                      d * (index_t)arg.x_d + h * (index_t)arg.x_h + v * (index_t)arg.x_w);
          size += fabsf(a * to_w * (b * to_x));
          some |= a != 0 && b != 0;
        }
      }
      for (int half = 16; half > 0; half /= 2) size += __shfl_xor_sync(~0u, size, half);
      any |= some && !(size >= 4.f * gemm_k);
    }
    if (!__syncthreads_or(any)) continue;
  }
  if (arg.with_moments && LID_0 == 0) redone[GID_0] = 1;
#endif

  // loading: this thread's place in the tiles of A and of B; its pixel never changes
  const int a_k = LID_0 % A_COLUMNS * A_VEC, a_m = LID_0 / A_COLUMNS;
  const int b_n = LID_0 % B_COLUMNS * B_VEC, b_k = LID_0 / B_COLUMNS;
  const index_t w_group = (index_t)arg.w_base + g * (index_t)arg.w_g;
  const bool pixel_ok = pixel0 + b_n < n_pixels;
  const index_t image = IMAGE_OF(pixel0 + b_n);
  COORDINATES(NUMBER_IN(image, pixel0 + b_n), o, p, q)
  const int d0 = o * (int)arg.stride_d - (int)arg.pad_d, h0 = p * (int)arg.stride_h - (int)arg.pad_h;
  const int w0 = q * (int)arg.stride_w - (int)arg.pad_w;
#if RECOMPUTE
  const index_t x_pixel = image * (index_t)arg.x_image + g * (index_t)arg.x_group;
#else
  const index_t x_pixel = image * (index_t)arg.x_image + g * (index_t)arg.x_group + d0 * (index_t)arg.x_d + h0 * (index_t)arg.x_h +
                          w0 * (index_t)arg.x_w;
#endif
  acc_t a_next[A_LOADS * A_VEC], b_next[B_LOADS * B_VEC];

  // multiplying: this thread's rows and columns of the tile
  PLACE_OF(LID_0, ty, tx)
  acc_t sum[THREAD_M][THREAD_N];
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) sum[i][j] = 0;
#if TOTALS
  acc_t total[THREAD_M][THREAD_N];
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) total[i][j] = 0;
#endif

  const int first = part * (int)arg.split_steps;
  const int steps = (int)((gemm_k + (BLOCK_K - 1)) / BLOCK_K), last = first + (int)arg.split_steps < steps ? first + (int)arg.split_steps : steps;
#if B_VEC == 1
  if (first < last) {
    WRITE_TAPS(first, 0)
    WRITE_TAPS(first + 1, 1)
  }
  local_barrier();
#endif
  if (first < last) {
    LOAD_A(first, 0)
    LOAD_B(first, 0)
    TO_SHARED(0)
  }
  local_barrier();
#if TOTALS
  for (int from = first; from < last; from += STEPS_APART) {
    const int until = last - from < STEPS_APART ? last : from + STEPS_APART;
  for (int step = from; step < until; ++step) {
#else
  for (int step = first; step < last; ++step) {
#endif
    const int buffer = (step - first) % 2;
    if (step + 1 < last) {
      LOAD_B(step + 1, 1 - buffer)
      LOAD_A(step + 1, 1 - buffer)
    }
#if B_VEC == 1
    WRITE_TAPS(step + 2, buffer)
#endif
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
#if TOTALS
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      total[i][j] += sum[i][j];
      sum[i][j] = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i)
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) sum[i][j] = total[i][j];
#endif

  // Stores: columns are pixels, rows are channels. The loop needs all registers, so the tile's place is computed again.
  {
  int same_block = block, thread = LID_0;
  HIDE(same_block)
  HIDE(thread)
  TILE_OF(same_block, m0, part, g, pixel0)
  PLACE_OF(thread, ty, tx)
  const int four = (int)arg.out_vec;
  EPILOGUE_FLAGS
  acc_t times[THREAD_M], plus[THREAD_M];
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const int m = m0 + i / 4 * 4 * THREADS_M + ty + i % 4;
    times[i] = m < m_end ? SCALE_OF(g * m_end + m) : 1;
    plus[i] = m < m_end ? BIAS_OF(g * m_end + m) : NOTHING;
  }
#pragma unroll
  for (int j = 0; j < THREAD_N; ++j) {
    const index_t pixel = pixel0 + j / 4 * 4 * THREADS_N + tx + j % 4;
    if (pixel < n_pixels && (j % 4 == 0 || !four)) {
      const index_t n = IMAGE_OF(pixel);
      const int number = NUMBER_IN(n, pixel);
      COORDINATES(number, o, p, q)
#if RECOMPUTE
      const int image_flag = image_flags[n];
#endif
      const index_t at = part * (index_t)arg.part_size + Y_AT(n, g, o, p, q) + (m0 + ty) * (index_t)arg.y_channel;
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
        const int ahead = i / 4 * 4 * THREADS_M + i % 4, m = m0 + ty + ahead;
        const index_t to = at + ahead * (index_t)arg.y_channel;
#if RECOMPUTE
        const bool mine = m < m_end && (image_flag || filter_flags[g * m_end + m]);
#else
        const bool mine = m < m_end;
#endif
        if (j % 4 == 0 && four) {
          acc_t r[4] = {NOTHING, NOTHING, NOTHING, NOTHING};
          if (has_residual && mine) LOAD_VEC(r, residual, to)
#pragma unroll
          for (int v = 0; v < 4; ++v) FINISH(sum[i][j + v], times[i], plus[i], r[v])
          ACTIVATE(sum[i] + j, 4)
          if (mine) STORE_VEC(y, to, sum[i] + j)
        } else {
          const acc_t r = mine ? RESIDUAL_AT(to) : NOTHING;
          FINISH(sum[i][j], times[i], plus[i], r)
          ACTIVATE(sum[i] + j, 1)
          if (mine) STORE_SUM(to, sum[i][j])
        }
      }
    }
  }
  }
#if RECOMPUTE
  }
#endif
}
