// near_border.cuh: borders of an image's own pixels that go on no further than to the image's other end, for kernels that read them themselves.
//
// A side of an axis of n pixels is one number, 4 * start + step + 1: place i outside, counted as the pixels are, shows pixel start + step * i. A step of 0
// repeats the pixel at the edge, -1 mirrors the image, 1 wraps it. A side of zeros is 3. pycuda_conv/engines/geometry.py makes the numbers.
#pragma once
#ifdef __OPENCL_VERSION__
#define DEVICE
typedef long side_t;
#else
#define DEVICE __device__ __forceinline__
typedef long long side_t;
#endif

// The pixel that stands at place i; -1 if it is zero, and further outside than the image's other end.
DEVICE int near_pixel(int i, int n, side_t before, side_t behind) {
  const int side = (int)(i < 0 ? before : behind), step = (side & 3) - 1;
  const int shown = (unsigned)i < (unsigned)n ? i : step == 2 ? -1 : (side >> 2) + step * i;
  return (unsigned)shown < (unsigned)n ? shown : -1;
}

// The places that show a pixel, in the image with its border, of which `before` places lie before the image and `after` behind it: its own place, then a
// run of neighbouring ones at each side, which may be empty.
typedef struct Shown {
  int own, first, last, many, count;  // the first place before the image and the first one behind it; places before it, and all
} Shown;
DEVICE Shown shown_of(int i, int n, int before, int after, side_t side, side_t last_side) {
  const int step = ((int)side & 3) - 1, start = (int)side >> 2, place = step * (i - start);
  const int last_step = ((int)last_side & 3) - 1, last_start = (int)last_side >> 2, last_place = last_step * (i - last_start);
  Shown found;
  found.own = before + i;
  found.first = step == 0 ? 0 : before + place;
  found.many = step == 0 ? (i == start ? before : 0) : place < 0 && place >= -before;
  found.last = before + (last_step == 0 ? n : last_place);
  found.count = 1 + found.many + (last_step == 0 ? (i == last_start ? after : 0) : last_place >= n && last_place < n + after);
  return found;
}
DEVICE int shown_place(Shown of, int number) {
  return number == 0 ? of.own : number <= of.many ? of.first + number - 1 : of.last + number - 1 - of.many;
}
