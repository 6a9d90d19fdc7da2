// columns.cu: a filter along rows' axis, of images whose rows are long: slices of volumes, columns of images.
//
//   y[n, p, q] = sum over r of f_h[r] * x[n, p + r - pad_h, q]
//
// Nothing goes through shared memory but the filter: a thread reads what it needs, and the threads of a block, which have rows below one another, find most of
// that in the first cache. So no thread waits for others, and memory has many loads to answer.
//
// Mapping  block -> tile_p x tile_q numbers of one slice of one image; GID_0 = ((image * slices + slice) * tiles down + tile row) * tiles across + tile column.
//          warp -> 8 rows of 32 * LANES neighbouring columns; thread -> LANES of these, four in float32 and two in float64. Eight taps meet them in 64 * LANES / 2
//          multiplications: see `slide`.
// Memory   shared: the filter, with room for a multiple of 8.
//
// By hand: nvcc -cubin -I cu cu/images/columns.cu
#include "images/registers.cuh"

WITHIN_KERNEL void load_lanes(acc_t (&v)[4], const in_t* p) { load_four(v, p); }
#if DTYPE == 64
WITHIN_KERNEL void load_lanes(acc_t (&v)[2], const double* p) {
  const double2 two = __ldg((const double2*)p);
  v[0] = two.x, v[1] = two.y;
}
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 4) void images_columns(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous, out_t* RESTRICT y,
                                                     const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) acc_t taps[];
  const Tile at = tile_of(arg, (int)GID_0);
  const int count = (int)arg.r, p = at.p + 8 * (LID_0 >> 5), q = at.q + LANES * (LID_0 & 31), row = p - (int)arg.pad_h, h = (int)arg.h;
  for (int i = LID_0; i < count; i += THREADS) taps[i] = filters[i];
  local_barrier();
  if (p >= (int)arg.p || q >= (int)arg.q) return;
  const in_t* const column = x + at.x + at.o * (index_t)arg.x_d + q;
  const bool whole = is_aligned(x, LANES * (int)sizeof(in_t)), fours = arg.y_fours && is_aligned(y, LANES * (int)sizeof(out_t));
  const int left = (int)arg.p - p, most = row + count - 1 + (left < 8 ? left : 8) - 1;  // the last row that a result needs
  acc_t sums[8][LANES];
  if (whole && row >= 0 && most < h && left >= 8) {
    slide(sums, taps, count, [&](int i, acc_t(&v)[LANES]) { load_lanes(v, column + (row + i) * (index_t)arg.x_h); });
  } else {
    slide(sums, taps, count, [&](int i, acc_t(&v)[LANES]) {
      const int one = row + i < most ? row + i : most;
      const in_t* const there = column + MAPPED(one, h, h) * (index_t)arg.x_h;
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) v[lane] = IS_OUTSIDE(one, h, h) ? OUTSIDE_VALUE : (acc_t)there[lane];
    });
  }
  store_rows(y, previous, arg, at.y + p * (index_t)arg.y_h + q, (index_t)arg.y_h, left, LANES, fours, sums);
}
