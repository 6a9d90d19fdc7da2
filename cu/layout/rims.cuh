// rims.cuh: which pixels of an image its border shows, and what the gradient by the input has to add to them, for rims.cu and rims_product.cu.
//
// Along an axis the pixels that the border shows make one run or two: rims. The pixels of an image that lie in a rim of any axis come region by region:
// those in rims of w alone, of h alone, of both, and so on. A place of the image with its border is met by tap i from pixel (place + shift - i * dilation) /
// stride of dy, if that is whole and there is such a pixel.
#pragma once
#include "core/division.cuh"
#include "core/near_border.cuh"

// by_n is the divisor n, prepared (core/division.cuh).
typedef struct RimsArguments {
  long_t size, rims, by_rims, outer;                              // threads; pixels of an image's rims; planes, or with channels last images
  long_t images, tiles;                                           // of rims_product.cu: images, and blocks along their rims
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
