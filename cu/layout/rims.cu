// rims.cu: what a border of the image's own pixels adds to the gradient by the input.
//
//   dx[pixel] += sum over the places outside that show the pixel, and over the taps that lead from there to a pixel j of dy, of w[tap] * dy[j]
//
// dx has the gradient of the same convolution with zeros around its image, from an earlier launch: only the few rows and columns that the border
// shows are touched. Borders go on no further than to the image's other end (core/near_border.cuh).
//
// Mapping  thread -> a pixel of the rims, in ITEMS planes; with channels last VECTOR neighbouring channels in ITEMS images. VECTOR is 1 but where each
//          channel is a group. Pixels come region by region: first the columns in rims of rows that are in none, at last the corners.
// Memory   no shared memory: neighbours read neighbouring rows of dy, which are in the caches mostly.
// Sums     places from the image's front to its end, the nearest to dx's own first, then taps, then channels of dy: always in the same order.
//
// By hand: nvcc -cubin -I cu cu/layout/rims.cu
#include "core/portable.cuh"
#include "core/near_border.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef NHWC
#define NHWC 0
#endif
#ifndef VECTOR
#define VECTOR 1
#endif
#define ITEMS (VECTOR > 1 ? 4 : 8)
#if VECTOR == 8
#define LOAD_CHANNELS LOAD_VEC8
#define STORE_CHANNELS STORE_VEC8
#elif VECTOR == 4
#define LOAD_CHANNELS LOAD_VEC
#define STORE_CHANNELS STORE_VEC
#else
#define LOAD_CHANNELS(d, p, i) (d)[0] = LOAD(p, i);
#define STORE_CHANNELS(p, i, s) STORE(p, i, (s)[0]);
#endif

// by_n is the divisor n, prepared (core/division.cuh).
typedef struct RimsArguments {
  long_t size, rims, by_rims, outer;                              // threads; pixels of an image's rims; planes, or with channels last images
  long_t channels, by_channels, chunks, by_chunks;                // of dx, and as many times VECTOR as they are
  long_t c, by_c, k;                                              // channels of a group, of dx and of dy
  long_t d, h, w, o, p, q, t, r, s;                               // sizes of dx, of dy, and of the filter
  long_t dx_image, dx_channel, dx_pixel, dy_image, dy_channel, dy_pixel, w_k, w_c, w_tap;  // elements from one to the next
  long_t before_d, before_h, before_w, after_d, after_h, after_w;  // of the border
  long_t side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;
  long_t shift_d, shift_h, shift_w;                               // from a place of the image with its border to what tap 0 meets in dy, times the stride
  long_t stride_d, by_stride_d, stride_h, by_stride_h, stride_w, by_stride_w, dilation_d, dilation_h, dilation_w;
  long_t low_d, low_h, low_w, lows_d, lows_h, lows_w, high_d, high_h, high_w;  // rims: `lows` pixels from `low` on, and those from `high` on
  long_t rim_d, by_rim_d, rim_h, by_rim_h, rim_w, by_rim_w, plain_d, plain_h, by_plain_h, plain_w, by_plain_w;  // pixels in rims, and the others
} RimsArguments;

// A pixel of an axis by its number among those in the rims, or among the others.
#define PIXEL_OF(number, in_rim, axis)                                                                          \
  ((in_rim) ? (number) < (int)arg.lows_##axis ? (int)arg.low_##axis + (number) : (int)arg.high_##axis + (number) - (int)arg.lows_##axis \
            : (number) + ((number) >= (int)arg.low_##axis ? (int)arg.lows_##axis : 0) +                         \
                  ((number) + (int)arg.lows_##axis >= (int)arg.high_##axis ? (int)arg.rim_##axis - (int)arg.lows_##axis : 0))
#define SHOWN_OF(i, axis) \
  shown_of(i, (int)arg.axis, (int)arg.before_##axis, (int)arg.after_##axis, arg.side_##axis, arg.last_side_##axis)
// For each place of an axis and each tap from which it meets a pixel of dy: `pixel`.
#define EACH_TAP(place, of, tap, taps, pixel, pixels, axis)                                                     \
  for (int place = 0; place < (of).count; ++place)                                                              \
    for (int tap = 0, met_##pixel = shown_place(of, place) + (int)arg.shift_##axis, pixel = divided(met_##pixel, arg.by_stride_##axis); \
         tap < (int)arg.taps && met_##pixel >= 0;                                                               \
         ++tap, met_##pixel -= (int)arg.dilation_##axis, pixel = met_##pixel < 0 ? 0 : divided(met_##pixel, arg.by_stride_##axis)) \
      if (pixel < (int)arg.pixels && pixel * (int)arg.stride_##axis == met_##pixel)

KERNEL LAUNCH_BOUNDS(THREADS, 2) void border_rims(
    const GLOBAL_MEM data_t* RESTRICT dy, const GLOBAL_MEM data_t* RESTRICT w, GLOBAL_MEM data_t* RESTRICT dx, const RimsArguments arg) {
  AFTER_LAST_LAUNCH
  const index_t number = (index_t)GID_0 * THREADS + LID_0;
  if (number >= (index_t)arg.size) return;
  const index_t at = DIVIDED(number, arg.chunks, arg.by_chunks), block = DIVIDED(at, arg.rims, arg.by_rims);
  int channel = (int)(number - at * (index_t)arg.chunks) * VECTOR, rest = (int)(at - block * (index_t)arg.rims), region = 0, width, height;
  for (;;) {  // bits: in the rims of w, of h, of d
    ++region;
    width = (int)(region & 1 ? arg.rim_w : arg.plain_w);
    height = (int)(region & 2 ? arg.rim_h : arg.plain_h);
    const int all = (int)(region & 4 ? arg.rim_d : arg.plain_d) * height * width;
    if (rest < all) break;
    rest -= all;
  }
  const int line = divided(rest, region & 1 ? arg.by_rim_w : arg.by_plain_w), slice = divided(line, region & 2 ? arg.by_rim_h : arg.by_plain_h);
  const int pixel_d = PIXEL_OF(slice, region & 4, d), pixel_h = PIXEL_OF(line - slice * height, region & 2, h);
  const int pixel_w = PIXEL_OF(rest - line * width, region & 1, w);
  const Shown of_d = SHOWN_OF(pixel_d, d), of_h = SHOWN_OF(pixel_h, h), of_w = SHOWN_OF(pixel_w, w);
  const index_t first = block * ITEMS;
  const int some = (index_t)arg.outer - first < ITEMS ? (int)((index_t)arg.outer - first) : ITEMS;
  index_t from[ITEMS], to[ITEMS], filter[ITEMS];
  acc_t sum[ITEMS][VECTOR];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const index_t item = first + (i < some ? i : 0);
    index_t image = item;
    if (!NHWC) {
      image = DIVIDED(item, arg.channels, arg.by_channels);
      channel = (int)(item - image * (index_t)arg.channels);
    }
    const int group = divided(channel, arg.by_c);
    from[i] = image * (index_t)arg.dy_image + group * ((index_t)arg.k * (index_t)arg.dy_channel);
    filter[i] = group * ((index_t)arg.k * (index_t)arg.w_k) + (channel - group * (index_t)arg.c) * (index_t)arg.w_c;
    to[i] = image * (index_t)arg.dx_image + channel * (index_t)arg.dx_channel +
            ((pixel_d * (index_t)arg.h + pixel_h) * (index_t)arg.w + pixel_w) * (index_t)arg.dx_pixel;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum[i][j] = 0;
  }
  EACH_TAP(a, of_d, t_, t, o, o, d)
  EACH_TAP(b, of_h, r_, r, p, p, h)
  EACH_TAP(c_, of_w, s_, s, q, q, w)
  if (a | b | c_) {
    const index_t place = ((o * (index_t)arg.p + p) * (index_t)arg.q + q) * (index_t)arg.dy_pixel;
    const index_t tap = ((t_ * (index_t)arg.r + r_) * (index_t)arg.s + s_) * (index_t)arg.w_tap;
    for (int k = 0; k < (int)arg.k; ++k) {
      acc_t v[ITEMS][VECTOR], taps[ITEMS][VECTOR];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) LOAD_CHANNELS(v[i], dy, from[i] + place + k * (index_t)arg.dy_channel)
#pragma unroll
      for (int i = 0; i < (NHWC ? 1 : ITEMS); ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) taps[i][j] = LOAD(w, filter[i] + tap + (k + j) * (index_t)arg.w_k);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[i][j] += v[i][j] * taps[NHWC ? 0 : i][j];
    }
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < some) {
      acc_t v[VECTOR];
      LOAD_CHANNELS(v, dx, to[i])
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) v[j] += sum[i][j];
      STORE_CHANNELS(dx, to[i], v)
    }
}
