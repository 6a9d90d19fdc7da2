// rims.cu: the results of a convolution that a border of the image's own pixels changes, where an earlier launch has computed all with zeros around the image.
//
//   forward   y[n, k, j] = epilogue(sum over taps and channels of x[n, c, pixel that stands there] * w[k, c, tap]), once more
//   ADDS      y[n, c, i] += sum over the places outside that show pixel i, and over the taps by which they meet a pixel j of x, of w[k, c, tap] * x[n, k, j]
//   ANEW      y[n, c, i] = that sum over all places that show pixel i, its own among them, once more
//
// So only few rows and columns are touched. Borders go on no further than to the image's other end.
//
// Mapping  thread -> a result of the rims (rims.cuh), in ITEMS planes; with channels last VECTOR neighbouring channels in ITEMS images. VECTOR is 1 but where
//          each channel is a group.
// Memory   no shared memory: neighbours read neighbouring rows of x, which are in the caches mostly.
// Order    with the launch before, which computes all results: this one's blocks may begin before that has ended, and wait for it before they store.
// Sums     a gradient's places from its own on, in the order of near_border.cuh; then taps, then channels: always in the same order.
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
#ifndef ITEMS
#define ITEMS 8
#endif
#ifndef ALONE
#define ALONE 0  // whether each channel is a group
#endif
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
    const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w, const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
    const GLOBAL_MEM data_t* RESTRICT residual, GLOBAL_MEM data_t* RESTRICT y, const RimsArguments arg) {
  READS_EARLIER
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
  const int at_d = RESULT_OF(slice, region & 4, d), at_h = RESULT_OF(line - slice * height, region & 2, h), at_w = RESULT_OF(rest - line * width, region & 1, w);
  const Places of_d = PLACES_OF(at_d, d), of_h = PLACES_OF(at_h, h), of_w = PLACES_OF(at_w, w);
  const index_t first = block * ITEMS;
  const int some = (index_t)arg.outer - first < ITEMS ? (int)((index_t)arg.outer - first) : ITEMS;
  index_t from[ITEMS], to[ITEMS], filter[ITEMS];
  int of_channel[ITEMS];
  acc_t sum[ITEMS][VECTOR];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const index_t item = first + (i < some ? i : 0);
    index_t image = item;
    if (!NHWC) {
      image = DIVIDED(item, arg.channels, arg.by_channels);
      channel = (int)(item - image * (index_t)arg.channels);
    }
    const int group = divided(channel, arg.by_made);
    of_channel[i] = channel;
    from[i] = image * (index_t)arg.x_image + group * ((index_t)arg.read * (index_t)arg.x_channel);
    filter[i] = channel * (index_t)arg.w_made;
    if (GRADIENT) filter[i] = group * ((index_t)arg.read * (index_t)arg.w_read) + (channel - group * (index_t)arg.made) * (index_t)arg.w_made;
    to[i] = image * (index_t)arg.y_image + channel * (index_t)arg.y_channel +
            ((at_d * (index_t)arg.y_h + at_h) * (index_t)arg.y_w + at_w) * (index_t)arg.y_pixel;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum[i][j] = 0;
  }
  EACH_TAP(a, of_d, t_, t, d_, d)
  EACH_TAP(b, of_h, r_, r, h_, h)
  for (int c = GRADIENT == ADDS && !(a | b) ? 1 : 0; c < of_w.count; ++c) {
#pragma unroll 4
    for (int s_ = 0; s_ < (int)arg.s; ++s_) {  // without branches, so that no load waits for another
      const int w_ = MET(of_w, c, s_, w), there = w_ >= 0;
      const index_t place = ((d_ * (index_t)arg.x_h + h_) * (index_t)arg.x_w + (there ? w_ : 0)) * (index_t)arg.x_pixel;
      const index_t tap = ((t_ * (index_t)arg.r + r_) * (index_t)arg.s + s_) * (index_t)arg.w_tap;
#pragma unroll 4
      for (int k = 0; k < (ALONE ? 1 : (int)arg.read); ++k) {
        acc_t v[ITEMS][VECTOR], taps[ITEMS][VECTOR];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) LOAD_CHANNELS(v[i], x, from[i] + place + k * (index_t)arg.x_channel)
#pragma unroll
        for (int i = 0; i < (NHWC ? 1 : ITEMS); ++i)
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) taps[i][j] = LOAD(w, filter[i] + tap + k * (index_t)arg.w_read + j * (index_t)(GRADIENT ? arg.w_read : arg.w_made));
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) sum[i][j] += there ? v[i][j] * taps[NHWC ? 0 : i][j] : 0;
      }
    }
  }
  AFTER_LAST_LAUNCH
  EPILOGUE_FLAGS
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i < some) {
      acc_t v[VECTOR];
      if (GRADIENT == ADDS) {
        LOAD_CHANNELS(v, y, to[i])
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) v[j] += sum[i][j];
      } else {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          v[j] = sum[i][j];
          FINISH_AT(v[j], of_channel[i] + j, to[i] + j)
        }
      }
      STORE_CHANNELS(y, to[i], v)
    }
}
