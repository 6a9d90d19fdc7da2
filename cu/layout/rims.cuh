// rims.cuh: the results of a convolution that a border of the image's own pixels changes, for rims.cu and rims_product.cu.
//
// Along an axis these results make one run or two: rims. The results of an image that lie in a rim of any axis come region by region: those in rims of w
// alone, of h alone, of both, and so on. y is what is written, x what is read, made of `made` and `read` channels a group.
//
// Forward   y's pixel j meets by tap i what stands at place j * stride - pad + i * dilation of x, which may lie outside: near_pixel of core/near_border.cuh.
// GRADIENT  ADDS or ANEW: y is the image's gradient: x's pixel j, a result's gradient, meets by tap i place j * stride + i * dilation of the image with its border. Besides
//           its own place a pixel has those of the border that show it. Numbers of 16 bits are summed ANEW: two that were rounded may cancel.
#pragma once
#include "core/division.cuh"
#include "core/near_border.cuh"

#ifndef GRADIENT
#define GRADIENT 0
#endif
#define ADDS 1
#define ANEW 2

// by_n is the divisor n, prepared (core/division.cuh).
typedef struct RimsArguments {
  long_t size, rims, by_rims, outer;                               // threads; results of an image in rims; planes, or with channels last images
  long_t images, tiles;                                            // of rims_product.cu: images, and blocks along their rims
  long_t channels, by_channels, chunks, by_chunks;                 // of y, and how many times VECTOR they are
  long_t made, by_made, read;                                      // channels of a group of y and of x
  long_t y_d, y_h, y_w, x_d, x_h, x_w, t, r, s;                    // sizes of y, of x, and of the filter
  long_t y_image, y_channel, y_pixel, x_image, x_channel, x_pixel, w_read, w_made, w_tap;  // elements from one to the next
  long_t before_d, before_h, before_w, after_d, after_h, after_w;  // gradients: of the border
  long_t side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;
  long_t shift_d, shift_h, shift_w;                                // forward: the padding before; gradients: that without the border
  long_t stride_d, by_stride_d, stride_h, by_stride_h, stride_w, by_stride_w, dilation_d, dilation_h, dilation_w;
  long_t low_d, low_h, low_w, lows_d, lows_h, lows_w, high_d, high_h, high_w;  // rims: `lows` results from `low` on, and those from `high` on
  long_t rim_d, by_rim_d, rim_h, by_rim_h, rim_w, by_rim_w, plain_d, plain_h, by_plain_h, plain_w, by_plain_w;  // results in rims, and the others
  long_t has_scale, has_bias, has_residual, activation, slope;     // forward: the epilogue; slope: an acc_t's bits
} RimsArguments;

// A result along an axis by its number among those in the rims, or among the others.
#define RESULT_OF(number, in_rim, axis)                                                                         \
  ((in_rim) ? (number) < (int)arg.lows_##axis ? (int)arg.low_##axis + (number) : (int)arg.high_##axis + (number) - (int)arg.lows_##axis \
            : (number) + ((number) >= (int)arg.low_##axis ? (int)arg.lows_##axis : 0) +                         \
                  ((number) + (int)arg.lows_##axis >= (int)arg.high_##axis ? (int)arg.rim_##axis - (int)arg.lows_##axis : 0))

#if GRADIENT
typedef Shown Places;
#define PLACES_OF(i, axis) shown_of(i, (int)arg.y_##axis, (int)arg.before_##axis, (int)arg.after_##axis, arg.side_##axis, arg.last_side_##axis)
// The pixel of x that a place meets by a tap; -1 if there is none.
#define MET(of, place, tap, axis) \
  met_pixel((place) < (of).count ? shown_place(of, place) + (int)arg.shift_##axis - (tap) * (int)arg.dilation_##axis : -1, (int)arg.stride_##axis, \
            arg.by_stride_##axis, (int)arg.x_##axis)
DEVICE int met_pixel(int at, int stride, divider_t by_stride, int pixels) {
  const int pixel = at < 0 ? -1 : divided(at, by_stride);
  return pixel < pixels && pixel * stride == at ? pixel : -1;
}
#else
typedef struct Places {
  int first, count;
} Places;
DEVICE Places places_from(int first) {
  Places found;
  found.first = first;
  found.count = 1;
  return found;
}
#define PLACES_OF(i, axis) places_from((i) * (int)arg.stride_##axis - (int)arg.shift_##axis)
#define MET(of, place, tap, axis) \
  ((void)(place), near_pixel((of).first + (tap) * (int)arg.dilation_##axis, (int)arg.x_##axis, arg.side_##axis, arg.last_side_##axis))
#endif
// For each place of an axis and each tap from which it meets a pixel of x: `pixel`.
#define EACH_TAP(place, of, tap, taps, pixel, axis)                                  \
  for (int place = 0; place < (of).count; ++place)                                   \
    for (int tap = 0, pixel = MET(of, place, 0, axis); tap < (int)arg.taps; ++tap, pixel = MET(of, place, tap, axis)) \
      if (pixel >= 0)
