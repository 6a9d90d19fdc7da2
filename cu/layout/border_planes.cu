// border_planes.cu: what bordered.cu does, for small planes that lie one behind the other (NCHW), on a GPU.
//
//   border_planes_copy   wide[plane, i, j] = x[plane, H(i), W(j)], or a value where a side is filled. H and W say which pixel of an axis stands at
//                        a place of the wide one
//   border_planes_fold   the adjoint: dx[plane, h, w] = sum of wide[plane, i, j] over H(i) = h, W(j) = w, + residual[plane, h, w]
//
// Some planes are one piece of memory, of the image and of the wide one: both are read and written in order, whatever the length of a row.
//
// Mapping  block -> `each` planes; warp -> rows of what is written, a unit of 4 bytes a lane, or of 8 in double. For the way back a thread has a row of wide
//          first, then a warp a plane.
// Memory   shared: the planes that are read, for the way back as sums; and for each place along an axis of the wide image its pixel of x, or -1 and -2 where
//          the place is filled with the value and with 0.
// Sums     of columns, then of rows: a pixel's own place first, then the places before the image and those behind it, the nearest first.
//
// By hand: nvcc -cubin -I cu cu/layout/border_planes.cu
#include "core/portable.cuh"
#include "core/border.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#define UNIT (sizeof(data_t) == 2 ? 2 : 1)  // elements of a unit

// by_n is the divisor n, prepared (core/division.cuh).
typedef struct PlanesArguments {
  long_t planes, each;                                                         // all, and of a block
  long_t h, w, wide_h, wide_w, before_h, before_w;                             // sizes of x and of wide; places before the image
  long_t by_h, by_wide_h;
  long_t value, has_residual;                                                  // bits of an acc_t
  long_t shift_h, period_h, by_period_h, low_h, high_h, fills_h;               // the side before, and the one behind: see core/border.cuh
  long_t shift_w, period_w, by_period_w, low_w, high_w, fills_w;
  long_t last_shift_h, last_period_h, by_last_period_h, last_low_h, last_high_h, last_fills_h;
  long_t last_shift_w, last_period_w, by_last_period_w, last_low_w, last_high_w, last_fills_w;
} PlanesArguments;

// The pixel of x at each place of both axes, and the planes that are read.
WITHIN_KERNEL void find_pixels(int* pixel_h, int* pixel_w, const PlanesArguments& arg) {
  for (int i = LID_0; i < (int)(arg.wide_h + arg.wide_w); i += THREADS) {
    int filled = 0, at = i < (int)arg.wide_h ? i - (int)arg.before_h : i - (int)arg.wide_h - (int)arg.before_w;
    if (i < (int)arg.wide_h) {
      TO_PIXEL(at, (int)arg.h, h, last_)
      pixel_h[i] = filled ? -filled : at;
    } else {
      TO_PIXEL(at, (int)arg.w, w, last_)
      pixel_w[i - (int)arg.wide_h] = filled ? -filled : at;
    }
  }
}
#define WARP (LID_0 >> 5)
#define WARPS (THREADS / 32)
#define ROOM_OF_PLANES                                                                                          \
  extern __shared__ __align__(16) int pixels[];                                                                 \
  int* const pixel_h = pixels;                                                                                  \
  int* const pixel_w = pixels + (int)arg.wide_h;                                                                \
  void* const behind = pixels + ((int)(arg.wide_h + arg.wide_w) + 3) / 4 * 4;                                   \
  const index_t first = (index_t)GID_0 * (index_t)arg.each;                                                     \
  const int some = (int)arg.planes - (int)first < (int)arg.each ? (int)arg.planes - (int)first : (int)arg.each; \
  const int h = (int)arg.h, w = (int)arg.w, wide_h = (int)arg.wide_h, wide_w = (int)arg.wide_w, lane = LID_0 & 31;

// Stores a unit, or the `count` elements of it that are there; `whole`: it lies at a multiple of its bytes.
WITHIN_KERNEL void store_unit(data_t* to, const acc_t (&v)[UNIT], int count, bool whole) {
  data_t unit[UNIT];
#pragma unroll
  for (int j = 0; j < UNIT; ++j) STORE(unit, j, v[j]);
  if (UNIT == 2 && count >= 2 && whole) {
    *(unsigned*)to = *(const unsigned*)unit;
  } else {
#pragma unroll
    for (int j = 0; j < UNIT; ++j)
      if (j < count) to[j] = unit[j];
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 4) void border_planes_copy(const data_t* RESTRICT x, data_t* RESTRICT wide, const PlanesArguments arg) {
  AFTER_LAST_LAUNCH
  ROOM_OF_PLANES
  data_t* const room = (data_t*)behind;
  const acc_t value = BITS_TO_ACC(arg.value);
  find_pixels(pixel_h, pixel_w, arg);
  const data_t* const from = x + first * (h * w);
  const int size = some * h * w, sixteens = size * (int)sizeof(data_t) / 16;
  for (int i = LID_0; i < sixteens; i += THREADS) ((uint4*)room)[i] = __ldg((const uint4*)from + i);
  for (int i = sixteens * (16 / (int)sizeof(data_t)) + LID_0; i < size; i += THREADS) room[i] = from[i];
  local_barrier();
  data_t* const to = wide + first * (wide_h * wide_w);
  for (int line = WARP; line < some * wide_h; line += WARPS) {
    const int plane = divided(line, arg.by_wide_h), row = pixel_h[line - plane * wide_h];
    const data_t* const source = room + (plane * h + (row < 0 ? 0 : row)) * w;
    for (int q = UNIT * lane; q < wide_w; q += UNIT * 32) {
      acc_t v[UNIT];
#pragma unroll
      for (int j = 0; j < UNIT; ++j) {
        const int column = q + j < wide_w ? pixel_w[q + j] : 0, filled = column < 0 ? column : row;
        v[j] = LOAD(source, column < 0 ? 0 : column);
        if (filled < 0) v[j] = filled == -1 ? value : 0;
      }
      store_unit(to + line * wide_w + q, v, wide_w - q, wide_w % UNIT == 0);
    }
  }
}

// Places outside along an axis, by number: those before the image, then those behind it.
#define OUTSIDE(number, before, n) ((number) < (before) ? (before) - 1 - (number) : (number) + (n))

KERNEL LAUNCH_BOUNDS(THREADS, 4) void border_planes_fold(const data_t* RESTRICT wide, const data_t* residual, data_t* dx, const PlanesArguments arg) {
  AFTER_LAST_LAUNCH
  ROOM_OF_PLANES
  acc_t* const sums = (acc_t*)behind;
  const int before_h = (int)arg.before_h, before_w = (int)arg.before_w;
  find_pixels(pixel_h, pixel_w, arg);
  const data_t* const from = wide + first * (wide_h * wide_w);
  const int size = some * wide_h * wide_w, fours = size / 4;
  for (int i = LID_0; i < fours; i += THREADS) {
    acc_t v[4];
    LOAD_VEC(v, from, 4 * i)
    LOCAL_STORE_VEC(sums + 4 * i, v)
  }
  for (int i = 4 * fours + LID_0; i < size; i += THREADS) sums[i] = LOAD(from, i);
  local_barrier();
  for (int line = LID_0; line < some * wide_h; line += THREADS) {
    acc_t* const row = sums + line * wide_w;
    for (int s = 0; s < wide_w - w; ++s) {
      const int place = OUTSIDE(s, before_w, w), column = pixel_w[place];
      if (column >= 0) row[before_w + column] += row[place];
    }
  }
  local_barrier();
  for (int plane = WARP; plane < some; plane += WARPS) {
    acc_t* const of_plane = sums + plane * wide_h * wide_w + before_w;
    for (int r = 0; r < wide_h - h; ++r) {
      const int place = OUTSIDE(r, before_h, h), row = pixel_h[place];
      if (row < 0) continue;
      for (int q = lane; q < w; q += 32) of_plane[(before_h + row) * wide_w + q] += of_plane[place * wide_w + q];
    }
  }
  local_barrier();
  const index_t begin = first * (h * w);
  for (int line = WARP; line < some * h; line += WARPS) {
    const int plane = divided(line, arg.by_h);
    const acc_t* const row = sums + (plane * wide_h + before_h + line - plane * h) * wide_w + before_w;
    for (int q = UNIT * lane; q < w; q += UNIT * 32) {
      const index_t to = begin + line * w + q;
      acc_t v[UNIT];
#pragma unroll
      for (int j = 0; j < UNIT; ++j) {
        v[j] = q + j < w ? row[q + j] : 0;
        if (arg.has_residual && q + j < w) v[j] += LOAD(residual, to + j);
      }
      store_unit(dx + to, v, w - q, w % UNIT == 0);
    }
  }
}
