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
#include "layout/rims.cuh"

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
