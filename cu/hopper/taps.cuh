// taps.cuh: the walk over the blocks of gemm k that a tile sums, (tap, channels), channels fastest, from block number `block` on.
//
// A tap's number in w and its offsets in x are computed once a tap, since a producer's thread takes long to compute them.
#pragma once
#include "hopper/ptx.cuh"

#ifndef TAP_OFFSET  // of tap n of an axis in x; and its number in w
#define TAP_OFFSET(n, axis) ((n) * (int)shape.dilation_##axis)
#define TAP_NUMBER(n, axis) (n)
#endif

template <class Shape> struct Taps {
  const Shape& shape;
  int first, c, s, r, t;   // number in w of the phase's first tap; the block's number among those of its tap; the tap
  int tap, x_s, x_r, x_t;  // number in w; offsets in x
  DEVICE Taps(const Shape& shape, int block, int apart) : shape(shape), first((int)shape.tap_base + apart) {
    const Divided of_tap(block, (int)shape.channel_blocks, shape.by_channel_blocks), of_row(of_tap.quotient, shape.tap_s, shape.by_tap_s);
    const Divided of_slice(of_row.quotient, shape.tap_r, shape.by_tap_r);
    c = of_tap.rest;
    s = of_row.rest;
    r = of_slice.rest;
    t = of_slice.quotient;
    begin_tap();
  }
  DEVICE void begin_tap() {
    tap = first + TAP_NUMBER(t, d) * (int)shape.tap_step_t + TAP_NUMBER(r, h) * (int)shape.tap_step_r + TAP_NUMBER(s, w) * (int)shape.tap_step_s;
    x_s = TAP_OFFSET(s, w);
    x_r = TAP_OFFSET(r, h);
    x_t = TAP_OFFSET(t, d);
  }
  DEVICE void next() {
    if (++c < (int)shape.channel_blocks) return;
    c = 0;
    next_tap(t, r, s, (int)shape.tap_r, (int)shape.tap_s);
    begin_tap();
  }
};
