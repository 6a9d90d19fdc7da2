// border_planes.cu: what bordered.cu does, for small planes that lie one behind the other (NCHW), on a GPU.
//
//   border_planes_copy   wide[plane, i, j] = x[plane, H(i), W(j)], or a value where a side is filled. H and W say which pixel of an axis stands at
//                        a place of the wide one
//   border_planes_fold   the adjoint: dx[plane, h, w] = sum of wide[plane, i, j] over H(i) = h, W(j) = w, + residual[plane, h, w]
//
// Some planes are one piece of memory, of the image and of the wide one: both are read and written in order, whatever the length of a row.
//
// Mapping  block -> `each` planes; thread -> every THREADS-th unit of 4 bytes, or of 8 in double, of what is written.
// Memory   shared: the planes that are read, as they lie; and for each place along an axis of the wide image its pixel of x, or -1 and -2 where the place is
//          filled with the value and with 0; for the way back also whether a row, or a column, of x is shown elsewhere.
// Sums     a pixel's own place first. Then come, row by row and in a row, the places before the image and then those behind it, the nearest first.
//
// By hand: nvcc -cubin -I cu cu/layout/border_planes.cu
#include "core/portable.cuh"
#include "core/border.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#define PAIR (sizeof(data_t) == 2 ? 2 : 1)  // elements of a unit

// by_n is the divisor n, prepared (core/division.cuh).
typedef struct PlanesArguments {
  long_t planes, each;                                                         // all, and of a block
  long_t h, w, wide_h, wide_w, before_h, before_w;                             // sizes of x and of wide; places before the image
  long_t by_h, by_w, by_wide_h, by_wide_w;
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
// `size` elements, of which the first lies at a multiple of 16 bytes.
WITHIN_KERNEL void load_planes(data_t* room, const data_t* RESTRICT from, int size) {
  const int whole = size * (int)sizeof(data_t) / 16;
  for (int i = LID_0; i < whole; i += THREADS) ((uint4*)room)[i] = __ldg((const uint4*)from + i);
  for (int i = whole * (16 / (int)sizeof(data_t)) + LID_0; i < size; i += THREADS) room[i] = from[i];
}
#define ROOM_OF_PLANES                                                                                          \
  extern __shared__ __align__(16) int pixels[];                                                                 \
  int* const pixel_h = pixels;                                                                                  \
  int* const pixel_w = pixels + (int)arg.wide_h;                                                                \
  data_t* const room = (data_t*)(pixels + ((int)(arg.h + arg.w + arg.wide_h + arg.wide_w) + 3) / 4 * 4);                       \
  const index_t first = (index_t)GID_0 * (index_t)arg.each;                                                     \
  const int some = (int)arg.planes - (int)first < (int)arg.each ? (int)arg.planes - (int)first : (int)arg.each;

// Where element `i` of some planes lies: its plane, row and column; and the element behind that.
typedef struct Place {
  int plane, row, column;
} Place;
WITHIN_KERNEL Place place_of(int i, int h, int w, divider_t by_h, divider_t by_w) {
  Place at;
  const int line = divided(i, by_w);
  at.column = i - line * w;
  at.plane = divided(line, by_h);
  at.row = line - at.plane * h;
  return at;
}
WITHIN_KERNEL void go_on(Place& at, int h, int w) {
  if (++at.column < w) return;
  at.column = 0;
  if (++at.row < h) return;
  at.row = 0;
  ++at.plane;
}
// Stores a unit, whose last element there may not be.
WITHIN_KERNEL void store_unit(data_t* to, const acc_t (&v)[PAIR], int count) {
  data_t unit[PAIR];
#pragma unroll
  for (int j = 0; j < PAIR; ++j) STORE(unit, j, v[j]);
  if (PAIR == 2 && count == 2) {
    *(unsigned*)to = *(const unsigned*)unit;
  } else {
    *to = unit[0];
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 4) void border_planes_copy(const data_t* RESTRICT x, data_t* RESTRICT wide, const PlanesArguments arg) {
  AFTER_LAST_LAUNCH
  ROOM_OF_PLANES
  const int h = (int)arg.h, w = (int)arg.w, wide_h = (int)arg.wide_h, wide_w = (int)arg.wide_w, size = some * wide_h * wide_w;
  const acc_t value = BITS_TO_ACC(arg.value);
  find_pixels(pixel_h, pixel_w, arg);
  load_planes(room, x + first * (h * w), some * h * w);
  local_barrier();
  data_t* const to = wide + first * (wide_h * wide_w);
  for (int i = PAIR * LID_0; i < size; i += PAIR * THREADS) {
    Place at = place_of(i, wide_h, wide_w, arg.by_wide_h, arg.by_wide_w);
    acc_t v[PAIR];
#pragma unroll
    for (int j = 0; j < PAIR; ++j) {
      v[j] = 0;
      if (i + j >= size) break;
      const int row = pixel_h[at.row], column = pixel_w[at.column], filled = column < 0 ? column : row;
      v[j] = filled < 0 ? (filled == -1 ? value : 0) : LOAD(room, at.plane * h * w + row * w + column);
      go_on(at, wide_h, wide_w);
    }
    store_unit(to + i, v, size - i < PAIR ? size - i : PAIR);
  }
}

// Places outside along an axis, by number: those before the image, then those behind it.
#define OUTSIDE(number, before, n) ((number) < (before) ? (before) - 1 - (number) : (number) + (n))

KERNEL LAUNCH_BOUNDS(THREADS, 4) void border_planes_fold(const data_t* RESTRICT wide, const data_t* residual, data_t* dx, const PlanesArguments arg) {
  AFTER_LAST_LAUNCH
  ROOM_OF_PLANES
  const int h = (int)arg.h, w = (int)arg.w, wide_h = (int)arg.wide_h, wide_w = (int)arg.wide_w, before_h = (int)arg.before_h, before_w = (int)arg.before_w;
  const int size = some * h * w;
  int* const shown_h = pixels + wide_h + wide_w;  // there is room for them behind the places
  int* const shown_w = shown_h + h;
  find_pixels(pixel_h, pixel_w, arg);
  for (int i = LID_0; i < h + w; i += THREADS) shown_h[i] = 0;
  load_planes(room, wide + first * (wide_h * wide_w), some * wide_h * wide_w);
  local_barrier();
  for (int i = LID_0; i < wide_h - h + wide_w - w; i += THREADS) {
    const bool of_rows = i < wide_h - h;
    const int number = of_rows ? i : i - (wide_h - h), pixel = of_rows ? pixel_h[OUTSIDE(number, before_h, h)] : pixel_w[OUTSIDE(number, before_w, w)];
    if (pixel >= 0) (of_rows ? shown_h : shown_w)[pixel] = 1;
  }
  local_barrier();
  const index_t begin = first * (h * w);
  for (int i = PAIR * LID_0; i < size; i += PAIR * THREADS) {
    Place at = place_of(i, h, w, arg.by_h, arg.by_w);
    acc_t v[PAIR];
#pragma unroll
    for (int j = 0; j < PAIR; ++j) {
      v[j] = 0;
      if (i + j >= size) break;
      const int plane = at.plane * wide_h * wide_w, own = before_w + at.column;
      const int rows = shown_h[at.row] ? wide_h - h : 0, columns = shown_w[at.column] ? wide_w - w : 0;
      v[j] = LOAD(room, plane + (before_h + at.row) * wide_w + own);
      if (rows || columns) {
        for (int r = -1; r < rows; ++r) {  // -1 is the pixel's own place
          const int row = r < 0 ? before_h + at.row : OUTSIDE(r, before_h, h);
          if (r >= 0 && pixel_h[row] != at.row) continue;
          if (r >= 0) v[j] += LOAD(room, plane + row * wide_w + own);
          for (int s = 0; s < columns; ++s) {
            const int column = OUTSIDE(s, before_w, w);
            if (pixel_w[column] == at.column) v[j] += LOAD(room, plane + row * wide_w + column);
          }
        }
      }
      if (arg.has_residual) v[j] += LOAD(residual, begin + i + j);
      go_on(at, h, w);
    }
    store_unit(dx + begin + i, v, size - i < PAIR ? size - i : PAIR);
  }
}
