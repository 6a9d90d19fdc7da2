// border.cuh: which pixel of an axis stands at a place outside of it, for kernels that read images with a border of their own pixels.
//
// An axis of n pixels has at a distance of a + 1 outside the pixel at a distance of v inside: t = (a + shift) % period, v = t < low ? t : high - t.
// With these numbers a side repeats its pixel, mirrors the image or wraps it, for as far as it goes: pycuda_conv/borders.py has them. A side that
// is filled, with the value (fills = 1) or with 0 (fills = 2), counts as one that repeats its pixel, so that loads stay inside.
//
// The numbers are members of the launch's arguments: shift_h, period_h, by_period_h, low_h, high_h, fills_h for the axis h, and so on.
#pragma once

WITHIN_KERNEL int distance_inside(int a, int shift, int period, divider_t by_period, int low, int high) {
  int t = a + shift;
  t -= period * divided(t, by_period);
  return t < low ? t : high - t;
}
// `side` goes before the names of the members: nothing, or last_ where the side behind has numbers of its own.
#define DISTANCE(a, side, axis) \
  distance_inside(a, (int)arg.side##shift_##axis, (int)arg.side##period_##axis, arg.by_##side##period_##axis, (int)arg.side##low_##axis, (int)arg.side##high_##axis)
// Turns i, a place along an axis of n pixels, into the pixel that stands there. Where there is none, `filled` becomes 1 or 2, as `fills` is. Axes come
// from the outermost to the innermost: in a corner that is filled by two axes, the inner one counts.
#define FILLED_BY(fills) ((fills) ? (int)(fills) : filled)
#define TO_PIXEL(i, n, axis, last)                  \
  if (i < 0) {                                      \
    filled = FILLED_BY(arg.fills_##axis);           \
    i = DISTANCE(-1 - i, , axis);                   \
  } else if (i >= (n)) {                            \
    filled = FILLED_BY(arg.last##fills_##axis);     \
    i = (n) - 1 - DISTANCE(i - (n), last, axis);    \
  }
// The same without branches and divisions, for an axis whose sides are alike and go on no further than to the image's other end: place i shows pixel
// near + step * i before the image and last_near + step * i behind it. Places beyond that are not asked for, but lie inside, too.
#define TO_NEAR_PIXEL(i, n, axis)                                                                                                    \
  {                                                                                                                                  \
    const int shown_ = (i < 0 ? (int)arg.near_##axis : i >= (n) ? (int)arg.last_near_##axis : 0) + ((unsigned)i < (unsigned)(n) ? i : (int)arg.step_##axis * i); \
    filled = (unsigned)i < (unsigned)(n) ? filled : FILLED_BY(arg.fills_##axis);                                                     \
    i = shown_ < 0 ? 0 : shown_ >= (n) ? (n) - 1 : shown_;                                                                           \
  }
// For an axis whose sides are alike, five numbers map any index i >= -bias to one inside, whatever the border and however far outside:
//
//   t = max(i + bias, 0);   t -= period * (t / period);   t = t >= n ? high + sign * t : t
//
// A side that is filled repeats its pixel, so that loads stay inside. pycuda_conv/borders.py has these numbers, too.
WITHIN_KERNEL int border_of(int i, int n, int bias, int period, divider_t by_period, int high, int sign) {
  int t = i + bias;
  t = t > 0 ? t : 0;
  t -= period * divided(t, by_period);
  return t >= n ? high + sign * t : t;
}
#define MAPPED(i, n, axis) \
  border_of(i, n, (int)arg.bias_##axis, (int)arg.period_##axis, arg.by_period_##axis, (int)arg.high_##axis, (int)arg.sign_##axis)
// TO_PIXEL for such an axis, without a branch.
#define TO_MAPPED_PIXEL(i, n, axis)                                           \
  {                                                                           \
    filled = (unsigned)i < (unsigned)(n) ? filled : FILLED_BY(arg.fills_##axis); \
    i = MAPPED(i, n, axis);                                                   \
  }
