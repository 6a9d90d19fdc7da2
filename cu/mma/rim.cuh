// rim.cuh: a result in the rims (layout/rims.cuh) by its number, for mma/rims_product.cu: where it lies, and its sum in plain float32.
//
// Results come region by region; in a region by their place in the rims, then by image, so that neighbours mostly have the same places and taps.
#pragma once
#include "layout/rims.cuh"

// A result in the rims, and the places that it has.
struct Rim {
  int image, pixel;
  Places of_d, of_h, of_w;
  DEVICE Rim(const RimsArguments& arg, int number) {
    const int images = (int)arg.images;
    int region = 0, rest = number, rims, plain;
    for (;;) {
      ++region;
      rims = (region & 1 ? (int)arg.rim_w : 1) * (region & 2 ? (int)arg.rim_h : 1) * (region & 4 ? (int)arg.rim_d : 1);
      plain = (region & 1 ? 1 : (int)arg.plain_w) * (region & 2 ? 1 : (int)arg.plain_h) * (region & 4 ? 1 : (int)arg.plain_d);
      if (region == 7 || rest < rims * plain * images) break;
      rest -= rims * plain * images;
    }
    int in_plain = rest % max(plain, 1), in_rims = rest / max(plain, 1);
    image = in_rims % images;
    in_rims /= images;
    const auto next = [](int& from, int n) {
      const int at = from % max(n, 1);
      from /= max(n, 1);
      return at;
    };
    const int in_w = region & 1 ? next(in_rims, (int)arg.rim_w) : next(in_plain, (int)arg.plain_w);
    const int in_h = region & 2 ? next(in_rims, (int)arg.rim_h) : next(in_plain, (int)arg.plain_h);
    const int in_d = region & 4 ? next(in_rims, (int)arg.rim_d) : next(in_plain, (int)arg.plain_d);
    const int w = RESULT_OF(in_w, region & 1, w), h = RESULT_OF(in_h, region & 2, h), d = RESULT_OF(in_d, region & 4, d);
    pixel = (d * (int)arg.y_h + h) * (int)arg.y_w + w;
    of_d = PLACES_OF(d, d);
    of_h = PLACES_OF(h, h);
    of_w = PLACES_OF(w, w);
  }
};

#if PRODUCTS == 3
// One sum in plain float32; x and w begin at the image's and the channel's first elements.
static __device__ __noinline__ float recompute_fp32(const RimsArguments& arg, const data_t* x, const data_t* w, const Rim& rim) {
  float sum = 0;
  EACH_TAP(a, rim.of_d, t_, t, d_, d)
  EACH_TAP(b, rim.of_h, r_, r, h_, h)
  EACH_TAP(c, rim.of_w, s_, s, w_, w)
  if (GRADIENT != ADDS || (a | b | c)) {
    const data_t* from = x + ((d_ * (int)arg.x_h + h_) * (int)arg.x_w + w_) * arg.x_pixel;
    const data_t* by = w + ((t_ * (int)arg.r + r_) * (int)arg.s + s_) * arg.w_tap;
    for (int k = 0; k < (int)arg.read; ++k) sum = fmaf(from[k * arg.x_channel], by[k * arg.w_read], sum);
  }
  return sum;
}
#endif
