// sum_taps.cu: the filter of the transposed convolution that a convolution of an upsampled image is.
//
//   v[c, k, t, r, s] = sum of w[k, c, t', r', s'] over  T-1-t+E_d <= t' < T-1-t+E_d + U_d,  and so on along each axis, inside of the filter
//
// With three taps and U = 2 these are along an axis w2, w1+w2, w0+w1, w0. E are taps of v before the others, whose sums are of nothing.
// The gradient by w is of the same form: that by w0 is the sum of those by v2 and v3, and so on. E is then negative.
// Sums are kept in acc_t, in the order of w's taps, and rounded once.
//
// Mapping  block -> ROWS rows k of a group and `across` of its channels c, with all their taps. Its threads load that part of w in w's order, then make
//          v's in v's order: v has c and k in the other order, and both sides move whole runs.
// Layout   v [c][k of a group][tap], or [c][tap][k of a group]; w has any steps between rows, channels and taps.
// Shared   the part of w, a row after the other at an odd pitch: threads of neighbouring rows meet no bank conflicts. A filter of more than
//          MOST taps a channel is read from memory where it is summed.
//
// By hand: nvcc -cubin -I cu cu/layout/sum_taps.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#define ROWS 32
#define UNROLL 12  // elements of w that a thread loads at a time
#define MOST (DTYPE == 64 ? 72 : 144)  // elements of a row in shared memory

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct SumTapsArguments {
  long_t rows, channels;                                                // w's rows k and channels c of a group
  long_t across, by_across, tiles, by_tiles, tiles_k, by_tiles_k;       // channels of a block; tiles of channels and of rows of a group
  long_t given, by_given, taps, by_taps, r_taps, s_taps, by_r_taps, by_s_taps;  // w's taps; v's: all, along h and along w
  long_t run, by_run;                                                   // elements of w that a row of a block has
  long_t shared, last, given_last;                                      // whether it takes shared memory; whether v's k, and w's c, come after taps
  long_t r, s;                                                          // w's taps along h and w
  long_t t, times_d, times_h, times_w, empty_d, empty_h, empty_w;       // along d; U; E
  long_t row_step, channel_step, tap_step;                              // elements of w from one to the next
} SumTapsArguments;

// The first tap of w that belongs to tap `i` of v along an axis, and the end of these.
#define FROM_TO(first, end, i, n, times, empty)                              \
  int first = (int)(n) - 1 - (i) + (int)(empty), end = first + (int)(times); \
  first = first > 0 ? first : 0;                                             \
  end = end < (int)(n) ? end : (int)(n);

KERNEL LAUNCH_BOUNDS(THREADS, 1) void sum_taps(const GLOBAL_MEM data_t* RESTRICT w, GLOBAL_MEM data_t* RESTRICT v, const SumTapsArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t part[ROWS * (MOST + 1)];
  const int block = (int)GID_0, over_c = divided(block, arg.by_tiles), group = divided(over_c, arg.by_tiles_k);
  const int c0 = (block - over_c * (int)arg.tiles) * (int)arg.across, k0 = (over_c - group * (int)arg.tiles_k) * ROWS;
  const int rows = (int)arg.rows - k0 < ROWS ? (int)arg.rows - k0 : ROWS, across = (int)arg.across, given = (int)arg.given, run = (int)arg.run;
  const int channels = (int)arg.channels - c0 < across ? (int)arg.channels - c0 : across, taps = (int)arg.taps, pitch = run | 1;
  const int pairs = ROWS * channels;
  const index_t from = ((index_t)group * (index_t)arg.rows + k0) * (index_t)arg.row_step + (index_t)c0 * (index_t)arg.channel_step;
  if (arg.shared) {
    for (int begin = LID_0; begin < rows * run; begin += UNROLL * THREADS) {
      acc_t loaded[UNROLL];
      int places[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {  // all loads are under way before the first is waited for
        const int i = begin + u * THREADS, row = divided(i, arg.by_run), at = i - row * run;
        const int first = divided(at, arg.given_last ? arg.by_across : arg.by_given);
        const int c = arg.given_last ? at - first * across : first, tap = arg.given_last ? first : at - first * given;
        places[u] = row < rows && c < channels ? row * pitch + c * given + tap : -1;
        if (places[u] >= 0) loaded[u] = LOAD(w, from + row * (index_t)arg.row_step + c * (index_t)arg.channel_step + tap * (index_t)arg.tap_step);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (places[u] >= 0) part[places[u]] = loaded[u];
    }
    local_barrier();
  }
  // with k last a round of the outer loop is a tap, and its pairs of k and c, k first, are a thread's; else all pairs are, and their taps
  for (int of_all = 0; of_all < (arg.last ? taps : 1); ++of_all)
    for (int i = LID_0; i < pairs * (arg.last ? 1 : taps); i += THREADS) {
      const int pair = arg.last ? i : divided(i, arg.by_taps), tap = arg.last ? of_all : i - pair * taps, c = pair / ROWS, row = pair - c * ROWS;
      if (row >= rows) continue;
      const int of_line = divided(tap, arg.by_s_taps), of_slice = divided(of_line, arg.by_r_taps);
      FROM_TO(t, t_end, of_slice, arg.t, arg.times_d, arg.empty_d)
      FROM_TO(r_first, r_end, of_line - of_slice * (int)arg.r_taps, arg.r, arg.times_h, arg.empty_h)
      FROM_TO(s_first, s_end, tap - of_line * (int)arg.s_taps, arg.s, arg.times_w, arg.empty_w)
      const index_t line = from + row * (index_t)arg.row_step + c * (index_t)arg.channel_step;
      acc_t sum = 0;
      for (; t < t_end; ++t)
        for (int r = r_first; r < r_end; ++r)
          for (int s = s_first; s < s_end; ++s) {
            const int its = (t * (int)arg.r + r) * (int)arg.s + s;
            if (arg.shared) {
              sum += part[row * pitch + c * given + its];
            } else {
              sum += LOAD(w, line + its * (index_t)arg.tap_step);
            }
          }
      const index_t channel = (index_t)group * (index_t)arg.channels + c0 + c;
      STORE(v, arg.last ? (channel * taps + tap) * (index_t)arg.rows + k0 + row : (channel * (index_t)arg.rows + k0 + row) * taps + tap, sum);
    }
}
