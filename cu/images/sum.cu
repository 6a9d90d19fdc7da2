// sum.cu: the sum of several filters of an image, or the root of the sum of their squares, in one launch. Each is a filter along rows and then one along columns.
//
//   y[n, p, q] = sum over k, or its root, of (sum over r of f_h[k][r] * (sum over s of f_w[k][s] * x[n, p + r - pad_h, q + s - pad_w]))^1 or 2
//
// The window is loaded once for all filters, which have as many taps each: second derivatives along each axis, or the slope's parts.
//
// Mapping  as separable.cu's. A thread has its 8 rows of columns for one filter after another, and keeps their sum in registers.
// Memory   shared: as separable.cu's, with filters and filtered rows for each of the t filters.
//
// By hand: nvcc -cubin -I cu cu/images/sum.cu
#include "images/strip.cuh"

KERNEL LAUNCH_BOUNDS(THREADS, DTYPE == 64 ? 2 : 3) void images_sum(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous, out_t* RESTRICT y,
                                                                   const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) acc_t room[];
  filter_strip<true>(x, filters, previous, y, arg, room);
}
