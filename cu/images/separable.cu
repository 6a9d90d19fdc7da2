// separable.cu: a filter along rows and then one along columns, of images, in one launch.
//
//   y[n, p, q] = sum over r of f_h[r] * (sum over s of f_w[s] * x[n, p + r - pad_h, q + s - pad_w])
//
// A block walks down a strip of an image. It loads some rows, at the border by the formula of window.cuh, filters them, and filters the columns of what the
// last rows
// gave. Nothing between the two passes leaves shared memory, and nothing is rounded to a pixel's type between them. A row is filtered once a strip, whatever the
// filter's height. With r = 0 or s = 0 there is one pass alone.
//
// Mapping  block -> a strip of tile_p x tile_q numbers of one slice of one image, `step` rows at a time;
//          GID_0 = ((image * slices + slice) * strips down + strip) * strips across + column of strips.
//          thread -> in the first pass 8 neighbours of one colour in four rows (float64: two), 8 rows apart: with an odd pitch no two lanes of a warp use the same
//          bank. In the second pass 8 rows of four (two) neighbouring columns. Eight taps meet them in 256 multiplications, for which a thread loads eight times 16
//          bytes and the taps: see `slide`.
// Memory   shared: the filters, each with room for a multiple of 8; the filtered rows of which columns are made, r - 1 + step of `wide`; the rows that were loaded,
//          step of `pitch`. After a step the last r - 1 filtered rows move up.
//
// By hand: nvcc -cubin -I cu cu/images/separable.cu
#include "images/strip.cuh"

KERNEL LAUNCH_BOUNDS(THREADS, DTYPE == 64 ? 3 : 4) void images_separable(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous,
    out_t* RESTRICT y,
                                                                         const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) acc_t room[];
  filter_strip<false>(x, filters, previous, y, arg, room);
}
