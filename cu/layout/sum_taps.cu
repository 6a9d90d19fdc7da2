// sum_taps.cu: the filter of the transposed convolution that a convolution of an upsampled image is.
//
//   v[c, k, t, r, s] = sum of w[k, c, t', r', s'] over  T-1-t+E_d <= t' < T-1-t+E_d + U_d,  and so on along each axis, inside of the filter
//
// With three taps and U = 2 these are along an axis w2, w1+w2, w0+w1, w0. E are taps of v before the others, whose sums are of nothing.
// Sums are kept in acc_t, in the order of w's taps, and rounded once.
//
// Mapping  thread -> an element of v, in the order of its memory: the stores are coalesced, the loads of neighbours meet in the L1 cache.
// Layout   v [c][k of a group][tap], or [c][tap][k of a group]; w has any steps between rows, channels and taps.
// Memory   registers only.
//
// By hand: nvcc -cubin -I cu cu/layout/sum_taps.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct SumTapsArguments {
  long_t size;                                        // elements of v
  long_t rows, by_rows, channels, by_channels;        // w's rows k and channels c of a group
  long_t taps, by_taps, r_taps, s_taps, by_r, by_s;   // v's taps: all, along h and along w
  long_t last;                                        // whether v's k come after its taps
  long_t t, r, s;                                     // w's taps
  long_t times_d, times_h, times_w;                   // U
  long_t empty_d, empty_h, empty_w;                   // E
  long_t row_step, channel_step, tap_step;            // elements of w from one to the next
} SumTapsArguments;

// The first tap of w that belongs to tap `i` of v along an axis, and the end of these.
#define FROM_TO(first, end, i, n, times, empty)                            \
  int first = (int)(n) - 1 - (i) + (int)(empty), end = first + (int)(times); \
  first = first > 0 ? first : 0;                                             \
  end = end < (int)(n) ? end : (int)(n);

KERNEL LAUNCH_BOUNDS(THREADS, 1) void sum_taps(const GLOBAL_MEM data_t* RESTRICT w, GLOBAL_MEM data_t* RESTRICT v, const SumTapsArguments arg) {
  AFTER_LAST_LAUNCH
  const index_t i = (index_t)GID_0 * THREADS + LID_0;
  if (i >= (index_t)arg.size) return;
  index_t channel;  // of all groups
  int row, tap;
  if (arg.last) {
    const index_t place = DIVIDED(i, arg.rows, arg.by_rows);
    channel = DIVIDED(place, arg.taps, arg.by_taps);
    row = (int)(i - place * (index_t)arg.rows);
    tap = (int)(place - channel * (index_t)arg.taps);
  } else {
    const index_t place = DIVIDED(i, arg.taps, arg.by_taps);
    channel = DIVIDED(place, arg.rows, arg.by_rows);
    tap = (int)(i - place * (index_t)arg.taps);
    row = (int)(place - channel * (index_t)arg.rows);
  }
  const index_t group = DIVIDED(channel, arg.channels, arg.by_channels);
  const index_t from = (group * (index_t)arg.rows + row) * (index_t)arg.row_step + (channel - group * (index_t)arg.channels) * (index_t)arg.channel_step;
  const int of_line = divided(tap, arg.by_s), of_slice = divided(of_line, arg.by_r);
  FROM_TO(t, t_end, of_slice, arg.t, arg.times_d, arg.empty_d)
  FROM_TO(r_first, r_end, of_line - of_slice * (int)arg.r_taps, arg.r, arg.times_h, arg.empty_h)
  FROM_TO(s_first, s_end, tap - of_line * (int)arg.s_taps, arg.s, arg.times_w, arg.empty_w)
  acc_t sum = 0;
  for (; t < t_end; ++t)
    for (int r = r_first; r < r_end; ++r)
      for (int s = s_first; s < s_end; ++s) sum += LOAD(w, from + (index_t)((t * (int)arg.r + r) * (int)arg.s + s) * (index_t)arg.tap_step);
  STORE(v, i, sum);
}
