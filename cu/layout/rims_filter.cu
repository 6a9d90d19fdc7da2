// rims_filter.cu: what a border of the image's own pixels adds to the gradient by a filter, where an earlier launch has computed that with zeros around it.
//
//   dw[k, c, tap] += sum over images n and pixels j of dy that meet a place outside by the tap, of dy[n, k, j] * x[n, c, pixel that stands there]
//
// It is for groups of few channels. Borders go on no further than to the image's other end (core/near_border.cuh).
//
// Mapping  block -> a tap of LANES neighbouring k, and a c; thread -> a k, and every PIXELS-th of the pixels of all images that meet places outside:
//          whole rows of dy first, then the columns at the sides of the others. LANES is 8 with channels last, else 1.
// Memory   shared: the threads' sums.
// Sums     a thread's in the order of its pixels; then the threads', halves by halves.
//
// By hand: nvcc -cubin -I cu cu/layout/rims_filter.cu
#include "core/portable.cuh"
#include "core/near_border.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef LANES
#define LANES 1
#endif
#define PIXELS (THREADS / LANES)
#define AT_ONCE 4  // pixels that a thread loads together

// by_n is the divisor n, prepared (core/division.cuh).
typedef struct RimsFilterArguments {
  long_t images, k, c, k_group, by_k_group, blocks_k, by_blocks_k;   // channels of dy; of x in a group; of dy in a group; blocks along k
  long_t h, w, p, q, by_q, r, s, by_s, taps, by_taps;                       // sizes of x, dy and the filter
  long_t x_image, x_channel, x_pixel, dy_image, dy_channel, dy_pixel, dw_k, dw_c, dw_tap;  // elements from one to the next
  long_t pad_h, pad_w, stride_h, stride_w, by_stride_h, by_stride_w, dilation_h, dilation_w;
  long_t side_h, side_w, last_side_h, last_side_w;
} RimsFilterArguments;

// Of `pixels` pixels of dy along an axis, how many from the first on meet a place before the image of n pixels, and from which on they meet one behind it.
#define OUTSIDE_OF(low, high, tap, n, pixels, axis)                                                       \
  int low, high;                                                                                          \
  {                                                                                                       \
    const int first_ = (tap) * (int)arg.dilation_##axis - (int)arg.pad_##axis, stride_ = (int)arg.stride_##axis; \
    low = first_ < 0 ? divided(stride_ - 1 - first_, arg.by_stride_##axis) : 0;                           \
    high = first_ < (n) ? divided((n) - first_ + stride_ - 1, arg.by_stride_##axis) : 0;                  \
    low = low < (pixels) ? low : (pixels);                                                                \
    high = high < (pixels) ? high : (pixels);                                                             \
    high = high > low ? high : low;                                                                       \
  }

KERNEL LAUNCH_BOUNDS(THREADS, 1) void border_rims_filter(
    const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT dy, GLOBAL_MEM data_t* RESTRICT dw, const RimsFilterArguments arg) {
  READS_EARLIER
  LOCAL_MEM acc_t sums[THREADS];
  const int taps = (int)arg.r * (int)arg.s, block = (int)GID_0, at = divided(block, arg.by_blocks_k);
  const int c = divided(at, arg.by_taps), tap = at - c * taps;
  const int k = (block - at * (int)arg.blocks_k) * LANES + LID_0 % LANES, r = divided(tap, arg.by_s), s = tap - r * (int)arg.s;
  const int h_end = (int)arg.h, w_end = (int)arg.w, p_end = (int)arg.p, q_end = (int)arg.q;
  OUTSIDE_OF(low_p, high_p, r, h_end, p_end, h)
  OUTSIDE_OF(low_q, high_q, s, w_end, q_end, w)
  const int in_rows = (low_p + p_end - high_p) * q_end, beside = low_q + q_end - high_q, of_image = in_rows + (high_p - low_p) * beside;
  acc_t sum = 0;
  if (k < (int)arg.k && of_image > 0) {
    const index_t from_x = (divided(k, arg.by_k_group) * (index_t)arg.c + c) * (index_t)arg.x_channel, from_dy = k * (index_t)arg.dy_channel;
    int image = 0, pixel = LID_0 / LANES;
    while (image < (int)arg.images) {
      acc_t a[AT_ONCE], b[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        while (pixel >= of_image) {
          pixel -= of_image;
          ++image;
        }
        int p, q;
        if (pixel < in_rows) {
          p = divided(pixel, arg.by_q);
          q = pixel - p * q_end;
          p = p < low_p ? p : p - low_p + high_p;
        } else {
          const int rest = pixel - in_rows;
          p = rest / beside;
          q = rest - p * beside;
          p += low_p;
          q = q < low_q ? q : q - low_q + high_q;
        }
        const int h = near_pixel(p * (int)arg.stride_h + r * (int)arg.dilation_h - (int)arg.pad_h, h_end, arg.side_h, arg.last_side_h);
        const int w = near_pixel(q * (int)arg.stride_w + s * (int)arg.dilation_w - (int)arg.pad_w, w_end, arg.side_w, arg.last_side_w);
        const int there = image < (int)arg.images && h >= 0 && w >= 0;
        a[i] = there ? LOAD(x, image * (index_t)arg.x_image + from_x + (h * (index_t)w_end + w) * (index_t)arg.x_pixel) : 0;
        b[i] = there ? LOAD(dy, image * (index_t)arg.dy_image + from_dy + (p * (index_t)q_end + q) * (index_t)arg.dy_pixel) : 0;
        pixel += PIXELS;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) sum += a[i] * b[i];
    }
  }
  sums[LID_0] = sum;
  local_barrier();
  for (int more = PIXELS / 2; more > 0; more /= 2) {
    if (LID_0 < more * LANES) sums[LID_0] += sums[LID_0 + more * LANES];
    local_barrier();
  }
  AFTER_LAST_LAUNCH
  if (LID_0 < LANES && k < (int)arg.k && of_image > 0) {
    const index_t to = k * (index_t)arg.dw_k + c * (index_t)arg.dw_c + tap * (index_t)arg.dw_tap;
    STORE(dw, to, LOAD(dw, to) + sums[LID_0]);
  }
}
