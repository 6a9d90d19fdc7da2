// library_fft.cu: results from a library's transforms: each is checked, summed instead if it may be off, finished and stored.
//
//   y = epilogue(sums[i])                        if the transforms have it right
//   y = epilogue(sum over c,t,r,s of x * w)      if they may not
//
// A transform's error is relative to the norms of all that it took at once. `limits` has a number for each block of results that came from one transform. A
// result is right if the sum of its products' magnitudes reaches that number. That sum is no smaller than the result itself, so most results need no
// other look. For the others the products are added up, in pieces of rows of the filter, until their magnitudes reach the number; where they never do, the products'
// own sum is the result. A result that may be zero is always a sum, so that zeros come out as zeros. A NaN reaches no number: whatever has to do
// with Inf and NaN is a sum. -0 in `sums` says that all pixels of the window are zeros.
//
// Mapping  thread -> a result, in the order of `sums`: image, group, channel of the group, pixel.
// Memory   `sums` and `limits` are double, in the workspace. Nothing is shared. Sums of products are double too.
//
// By hand: nvcc -cubin -I cu cu/fft/library_fft.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifdef __OPENCL_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif

#define PIECE 128  // products that are added up before another look at the limit

typedef struct LibraryFftArguments {
  long_t size, by_plane, plane, by_pq, pq, q, by_q, written, by_written, groups, by_groups;  // results; of a plane, of its slices and rows; channels of a group
  long_t sums_at, limits_at;                         // doubles from the start of the workspace
  long_t blocks, blocks_h, blocks_w;                 // blocks of a plane, and along its axes
  long_t used_d, by_used_d, used_h, by_used_h, used_w, by_used_w;  // results of a block along each axis
  // pixel h meets tap r at (h * step + first + r * tap) / apart, where that is a whole number
  long_t step_d, step_h, step_w, first_d, first_h, first_w, tap_d, tap_h, tap_w, apart_d, apart_h, apart_w;
  long_t d, h, w, t, r, s, channels;                 // size of an image of x, taps, channels of a group that are read
  long_t x_image, x_group, x_channel, w_group, w_written, w_read, y_image, y_group, y_channel;
  long_t has_scale, has_bias, has_residual, activation, slope;  // the epilogue; slope: an acc_t's bits
} LibraryFftArguments;

// The pixel of an axis that a tap meets; -1 for none.
WITHIN_KERNEL int met(int at, int apart, int size) {
  if (at < 0 || (apart > 1 && at % apart)) return -1;
  at = apart > 1 ? at / apart : at;
  return at < size ? at : -1;
}

KERNEL LAUNCH_BOUNDS(THREADS, 1) void library_fft(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                                                 const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                                                 const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* y, const GLOBAL_MEM double* made,
                                                 const LibraryFftArguments arg) {
  AFTER_LAST_LAUNCH
  const index_t i = GID_0 * (index_t)THREADS + LID_0;
  if (i >= (index_t)arg.size) return;
  const index_t in_group = DIVIDED(i, arg.plane, arg.by_plane), group_at = DIVIDED(in_group, arg.written, arg.by_written);
  const int pixel = (int)(i - in_group * (index_t)arg.plane), k = (int)(in_group - group_at * (index_t)arg.written);
  const int n = (int)DIVIDED(group_at, arg.groups, arg.by_groups), g = (int)(group_at - n * (index_t)arg.groups);
  const int o = divided(pixel, arg.by_pq), row = divided(pixel, arg.by_q), p = row - o * ((int)arg.pq / (int)arg.q), q = pixel - row * (int)arg.q;
  const long_t block = (divided(o, arg.by_used_d) * arg.blocks_h + divided(p, arg.by_used_h)) * arg.blocks_w + divided(q, arg.by_used_w);
  double v = made[arg.sums_at + i];
  const double limit = made[arg.limits_at + in_group * arg.blocks + block];
  const int nothing = v == 0 && 1 / v < 0;
  if (nothing) v = 0;
  else if (!(fabs(v) >= limit)) {
    const int unsure = !(fabs(v) > limit * 0x1p-24);
    const GLOBAL_MEM data_t* image = x + (n * (index_t)arg.x_image + g * (index_t)arg.x_group);
    const GLOBAL_MEM data_t* filter = w + (g * (index_t)arg.w_group + k * (index_t)arg.w_written);
    double sum = 0, magnitude = 0;
    int right = 0;
    for (int c = 0; c < (int)arg.channels && !right; ++c)
      for (int t = 0; t < (int)arg.t && !right; ++t) {
        const int in_d = met(o * (int)arg.step_d + (int)arg.first_d + t * (int)arg.tap_d, (int)arg.apart_d, (int)arg.d);
        if (in_d < 0) continue;
        for (int r = 0; r < (int)arg.r && !right; ++r) {
          const int in_h = met(p * (int)arg.step_h + (int)arg.first_h + r * (int)arg.tap_h, (int)arg.apart_h, (int)arg.h);
          if (in_h < 0) continue;
          const GLOBAL_MEM data_t* from = image + (c * (index_t)arg.x_channel + ((index_t)in_d * (int)arg.h + in_h) * (int)arg.w);
          const GLOBAL_MEM data_t* taps = filter + (c * (index_t)arg.w_read + ((index_t)t * (int)arg.r + r) * (int)arg.s);
          for (int first = 0; first < (int)arg.s && !right; first += PIECE) {
            const int end = first + PIECE < (int)arg.s ? first + PIECE : (int)arg.s;
            double part = 0, of_part = 0;
            for (int s = first; s < end; ++s) {
              const int in_w = met(q * (int)arg.step_w + (int)arg.first_w + s * (int)arg.tap_w, (int)arg.apart_w, (int)arg.w);
              if (in_w < 0) continue;
              const double product = (double)LOAD(from, in_w) * (double)LOAD(taps, s);
              part += product;
              of_part += fabs(product);
            }
            sum += part;
            magnitude += of_part;
            right = !unsure && magnitude >= limit;
          }
        }
      }
    if (!right) v = sum;
  }
  EPILOGUE_FLAGS
  const int channel = g * (int)arg.written + k;
  const index_t at = n * (index_t)arg.y_image + g * (index_t)arg.y_group + k * (index_t)arg.y_channel + pixel;
  acc_t finished = (acc_t)v;
  FINISH_AT(finished, channel, at)
  STORE(y, at, finished);
}
