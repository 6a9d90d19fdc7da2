// first_tap.cuh: which taps of a filter a pixel of the input meets, when gradients of the input are gathered.
#pragma once

// The first tap that a pixel meets along an axis, of `every` that differ; none meets it if that is the result. `at` is its place with the padding.
WITHIN_KERNEL int first_tap(int at, int stride, int dil, int every) {
  int rest = at % stride, tap = 0;
  const int down = dil % stride;
  if (rest < 0) rest += stride;
  for (; tap < every && rest != 0; ++tap) {
    rest -= down;
    if (rest < 0) rest += stride;
  }
  return rest == 0 ? tap : 1 << 30;
}
