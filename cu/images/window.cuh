// images/window.cuh: what the kernels for images share: types of pixels, borders, the window of a tile in shared memory, and how results are stored.
//
// An array is seen as images [outer][middle][inner] of slices (d), rows (h) and columns (w) with `colours` numbers each. Columns are neighbours in memory; all
// other strides are arguments. A window is what the results of a tile read of one slice: halo_p rows of halo_q numbers.
//
// Borders  Five numbers an axis map any index i >= -bias to one inside, whatever the border and however far outside:
//
//   t = max(i + bias, 0);   t -= period * (t / period);   t = t >= n ? high + sign * t : t
//
//          With `outside` set, an index that is not inside stands for `value` instead. pycuda_conv/engines/images/window.py makes the numbers.
// Types    IN and OUT: 64 double, 32 float, 8 uint8, 9 int8, 10 uint16, 11 int16. Sums are acc_t. Integers are rounded to the nearest, halves to even, and clipped;
//          NaN becomes 0.
// Joins    A result may be joined with what an earlier launch left in `previous`, which lies as y does:
//          `square` squares the sum, `add` adds the previous result, `root` takes the square root of that.
#pragma once

#ifndef IN
#define IN 32
#define OUT 32
#endif
#ifndef THREADS
#define THREADS 256
#endif
#include "core/portable.cuh"

#ifdef __OPENCL_VERSION__
typedef char schar;
#else
typedef signed char schar;
typedef unsigned char uchar;
typedef unsigned short ushort;
#endif
#define PIXEL_8 uchar
#define PIXEL_9 schar
#define PIXEL_10 ushort
#define PIXEL_11 short
#define PIXEL_32 float
#define PIXEL_64 double
#define PIXEL_OF(code) PIXEL_JOINED(code)
#define PIXEL_JOINED(code) PIXEL_##code
typedef PIXEL_OF(IN) in_t;
typedef PIXEL_OF(OUT) out_t;
#if OUT == 8
#define LEAST 0
#define MOST 255
#elif OUT == 9
#define LEAST -128
#define MOST 127
#elif OUT == 10
#define LEAST 0
#define MOST 65535
#elif OUT == 11
#define LEAST -32768
#define MOST 32767
#endif

// by_n is the divisor n, prepared (core/division.cuh).
typedef struct WindowArguments {
  long_t tiles_p, by_tiles_p, tiles_q, by_tiles_q, o, by_o, inner, by_inner, middle, by_middle;  // tiles down and across; slices of y; images
  long_t x_outer, x_middle, x_inner, x_d, x_h, y_outer, y_middle, y_inner, y_d, y_h;             // strides in elements
  long_t d, h, w, p, q, colours, by_colours;            // sizes of x and y; w and q count numbers: columns times colours
  long_t pad_d, pad_h, pad_w;                           // before the axes; pad_w in columns
  long_t t, r, s;                                       // taps along d, h and w; 0: nothing is done along that axis
  long_t tile_p, by_tile_p, tile_q, by_tile_q;          // of a block; tile_q is a multiple of 8 * colours
  long_t halo_p, by_halo_p, halo_q, by_halo_q, pitch, wide;  // the window; elements from row to row, in the window and in its filtered rows
  long_t bias_d, period_d, by_period_d, high_d, sign_d, outside_d;
  long_t bias_h, period_h, by_period_h, high_h, sign_h, outside_h;
  long_t bias_w, period_w, by_period_w, high_w, sign_w, outside_w;
  long_t value;              // of what lies outside: bits of an acc_t
  long_t square, add, root;  // joins
  long_t box_h, box_w;       // whether all taps along an axis are equal and the sums are made by doubling; OpenCL alone looks
} WindowArguments;

WITHIN_KERNEL int border_of(int i, int n, int bias, int period, divider_t by_period, int high, int sign) {
  int t = i + bias;
  t = t > 0 ? t : 0;
  t -= period * divided(t, by_period);
  return t >= n ? high + sign * t : t;
}
#define MAPPED(i, n, axis) \
  border_of(i, n, (int)arg.bias_##axis, (int)arg.period_##axis, arg.by_period_##axis, (int)arg.high_##axis, (int)arg.sign_##axis)
#define IS_OUTSIDE(i, n, axis) (arg.outside_##axis && (unsigned)(i) >= (unsigned)(n))

// A block's tile: where its image and slice begin in x and y, its first row and column.
typedef struct Tile {
  index_t x, y;
  int o, p, q;
} Tile;

WITHIN_KERNEL Tile tile_of(const WindowArguments arg, int block) {
  Tile at;
  const int row = divided(block, arg.by_tiles_q), slice = divided(row, arg.by_tiles_p), image = divided(slice, arg.by_o);
  const int line = divided(image, arg.by_inner), outer = divided(line, arg.by_middle);
  const int inner = image - line * (int)arg.inner, middle = line - outer * (int)arg.middle;
  at.q = (block - row * (int)arg.tiles_q) * (int)arg.tile_q;
  at.p = (row - slice * (int)arg.tiles_p) * (int)arg.tile_p;
  at.o = slice - image * (int)arg.o;
  at.x = outer * (index_t)arg.x_outer + middle * (index_t)arg.x_middle + inner * (index_t)arg.x_inner;
  at.y = outer * (index_t)arg.y_outer + middle * (index_t)arg.y_middle + inner * (index_t)arg.y_inner + at.o * (index_t)arg.y_d;
  return at;
}

// A number from the bits of a value that stands for what is outside.
#define OUTSIDE_VALUE BITS_TO_ACC(arg.value)

#ifdef __OPENCL_VERSION__
// The window of slice `depth`. One work-item is a block; only what lies beyond the image is mapped number by number.
WITHIN_KERNEL void load_window(const GLOBAL_MEM in_t* RESTRICT x, LOCAL_MEM_POINTER acc_t* RESTRICT window, const WindowArguments arg, const Tile at, int depth) {
  const int h_end = (int)arg.h, w_end = (int)arg.w, colours = (int)arg.colours, halo_p = (int)arg.halo_p, halo_q = (int)arg.halo_q;
  const int h0 = at.p - (int)arg.pad_h, w0 = divided(at.q, arg.by_colours) - (int)arg.pad_w, from = w0 * colours;
  const int begin = from >= 0 ? 0 : -from < halo_q ? -from : halo_q, rest = w_end - from, end = rest < begin ? begin : rest < halo_q ? rest : halo_q;
  const index_t slice = at.x + MAPPED(depth, (int)arg.d, d) * (index_t)arg.x_d;
  for (int down = 0; down < halo_p; ++down) {
    LOCAL_MEM_POINTER acc_t* const row = window + down * (int)arg.pitch;
    if (IS_OUTSIDE(depth, arg.d, d) || IS_OUTSIDE(h0 + down, h_end, h)) {
      for (int i = 0; i < halo_q; ++i) row[i] = OUTSIDE_VALUE;
      continue;
    }
    const GLOBAL_MEM in_t* const line = x + slice + MAPPED(h0 + down, h_end, h) * (index_t)arg.x_h;
    for (int i = begin; i < end; ++i) row[i] = (acc_t)line[from + i];
    for (int i = 0; i < halo_q; ++i) {
      if (i == begin) i = end;
      if (i >= halo_q) break;
      const int column = divided(i, arg.by_colours), colour = i - column * colours;
      row[i] = arg.outside_w ? OUTSIDE_VALUE : (acc_t)line[MAPPED(w0 + column, divided(w_end, arg.by_colours), w) * colours + colour];
    }
  }
}

#if DTYPE == 64
#define LANES 4
typedef double4 lanes_t;
#define LOAD_LANES vload4
#define STORE_LANES vstore4
#else
#define LANES 8
typedef float8 lanes_t;
#define LOAD_LANES vload8
#define STORE_LANES vstore8
#endif
#define NO_SUMS {(lanes_t)(0), (lanes_t)(0), (lanes_t)(0), (lanes_t)(0)}
#define OUT_8 convert_uchar8
#define OUT_9 convert_char8
#define OUT_10 convert_ushort8
#define OUT_11 convert_short8
#define OUT_CONVERTED_BY(code) OUT_JOINED(code)
#define OUT_JOINED(code) OUT_##code

// Finishes LANES neighbouring sums and stores those that are inside.
WITHIN_KERNEL void store_lanes(GLOBAL_MEM out_t* y, const GLOBAL_MEM acc_t* previous, const WindowArguments arg, index_t at, int count, lanes_t v) {
  if (arg.square) v *= v;
  if (arg.add) {
    acc_t before[LANES];
    for (int i = 0; i < LANES; ++i) before[i] = i < count ? previous[at + i] : 0;
    v += LOAD_LANES(0, before);
  }
  if (arg.root) v = sqrt(v);
#ifdef MOST
  v = isnan(v) ? (lanes_t)(0) : clamp(rint(v), (lanes_t)(LEAST), (lanes_t)(MOST));
#define OUT_VECTOR(v) OUT_CONVERTED_BY(OUT)(convert_int8(v))
#else
#define OUT_VECTOR(v) (v)
#endif
  if (count >= LANES) {
    STORE_LANES(OUT_VECTOR(v), 0, y + at);
  } else {
    out_t made[LANES];
    STORE_LANES(OUT_VECTOR(v), 0, made);
    for (int i = 0; i < count; ++i) y[at + i] = made[i];
  }
}

// sums[i] += sum over j < count of the LANES numbers at from + j * apart + LANES * i, times taps[j * taps_apart]: eight taps are summed by themselves, which keeps
// more digits. With `skip`, taps of 0 meet nothing.
#define ADD_PRODUCTS(sums, from, apart, taps, taps_apart, count, skip)                                    \
  for (int first_ = 0; first_ < (count); first_ += 8) {                                                  \
    const int end_ = first_ + 8 < (count) ? first_ + 8 : (count);                                        \
    lanes_t part_[4] = NO_SUMS;                                                                          \
    for (int j_ = first_; j_ < end_; ++j_) {                                                             \
      const acc_t tap_ = (taps)[j_ * (taps_apart)];                                                      \
      if ((skip) && tap_ == 0) continue;                                                                 \
      const LOCAL_MEM_POINTER acc_t* const v_ = (from) + j_ * (apart);                                   \
      part_[0] += LOAD_LANES(0, v_) * tap_;                                                              \
      part_[1] += LOAD_LANES(1, v_) * tap_;                                                              \
      part_[2] += LOAD_LANES(2, v_) * tap_;                                                              \
      part_[3] += LOAD_LANES(3, v_) * tap_;                                                              \
    }                                                                                                    \
    for (int i_ = 0; i_ < 4; ++i_) (sums)[i_] += part_[i_];                                              \
  }
#else
// The window of slice `depth`. Tiles whose window is inside check nothing.
WITHIN_KERNEL void load_window(const GLOBAL_MEM in_t* RESTRICT x, LOCAL_MEM_POINTER acc_t* RESTRICT window, const WindowArguments& arg, const Tile at, int depth) {
  const int h_end = (int)arg.h, w_end = (int)arg.w, colours = (int)arg.colours, halo_p = (int)arg.halo_p, halo_q = (int)arg.halo_q, pitch = (int)arg.pitch;
  const int h0 = at.p - (int)arg.pad_h, w0 = divided(at.q, arg.by_colours) - (int)arg.pad_w, from = w0 * colours, columns = divided(w_end, arg.by_colours);
  const bool hidden = IS_OUTSIDE(depth, arg.d, d);
  const index_t slice = at.x + MAPPED(depth, (int)arg.d, d) * (index_t)arg.x_d;
  if (!hidden && h0 >= 0 && from >= 0 && h0 + halo_p <= h_end && from + halo_q <= w_end) {
#pragma unroll 8
    for (int i = LID_0; i < halo_p * halo_q; i += THREADS) {
      const int down = divided(i, arg.by_halo_q), right = i - down * halo_q;
      window[down * pitch + right] = (acc_t)x[slice + (h0 + down) * (index_t)arg.x_h + from + right];
    }
    return;
  }
#pragma unroll 4
  for (int i = LID_0; i < halo_p * halo_q; i += THREADS) {
    const int down = divided(i, arg.by_halo_q), right = i - down * halo_q, column = divided(right, arg.by_colours), colour = right - column * colours;
    const bool out = hidden || IS_OUTSIDE(h0 + down, h_end, h) || IS_OUTSIDE(w0 + column, columns, w);
    const acc_t v = (acc_t)x[slice + MAPPED(h0 + down, h_end, h) * (index_t)arg.x_h + MAPPED(w0 + column, columns, w) * colours + colour];
    window[down * pitch + right] = out ? OUTSIDE_VALUE : v;
  }
}

WITHIN_KERNEL void store_one(GLOBAL_MEM out_t* RESTRICT y, const GLOBAL_MEM acc_t* previous, const WindowArguments& arg, index_t at, acc_t v) {
  if (arg.square) v *= v;
  if (arg.add) v += previous[at];
  if (arg.root) v = sqrt(v);
#ifdef MOST
  v = rint(v);
  y[at] = (out_t)(v == v ? (int)(v > LEAST ? (v < MOST ? v : MOST) : LEAST) : 0);
#else
  y[at] = v;
#endif
}

// sums[i] += sum over j < count of from[(i + j) * apart] * taps[j * taps_apart] for eight i. Eight taps at a time are summed by themselves, which keeps more digits;
// no number outside the window is multiplied, not even by 0. With `skip`, taps of 0 meet nothing.
#define ADD_PRODUCTS(sums, from, apart, taps, taps_apart, count, skip)                                                        \
  {                                                                                                                           \
    acc_t v_[15];                                                                                                             \
    int j_ = 0;                                                                                                               \
    _Pragma("unroll") for (int i_ = 0; i_ < 7; ++i_) v_[i_] = (from)[i_ * (apart)];                                           \
    for (; j_ + 8 <= (count); j_ += 8) {                                                                                      \
      acc_t part_[8] = {0, 0, 0, 0, 0, 0, 0, 0};                                                                              \
      _Pragma("unroll") for (int i_ = 7; i_ < 15; ++i_) v_[i_] = (from)[(j_ + i_) * (apart)];                                 \
      _Pragma("unroll") for (int t_ = 0; t_ < 8; ++t_) {                                                                      \
        const acc_t tap_ = (taps)[(j_ + t_) * (taps_apart)];                                                                  \
        if (!(skip) || tap_ != 0) {                                                                                           \
          _Pragma("unroll") for (int i_ = 0; i_ < 8; ++i_) part_[i_] += v_[i_ + t_] * tap_;                                   \
        }                                                                                                                     \
      }                                                                                                                       \
      _Pragma("unroll") for (int i_ = 0; i_ < 8; ++i_) (sums)[i_] += part_[i_];                                               \
      _Pragma("unroll") for (int i_ = 0; i_ < 7; ++i_) v_[i_] = v_[i_ + 8];                                                   \
    }                                                                                                                         \
    acc_t rest_[8] = {0, 0, 0, 0, 0, 0, 0, 0};                                                                                \
    _Pragma("unroll") for (int t_ = 0; t_ < 7; ++t_)                                                                          \
      if (j_ + t_ < (count)) {                                                                                                \
        const acc_t tap_ = (taps)[(j_ + t_) * (taps_apart)];                                                                  \
        v_[t_ + 7] = (from)[(j_ + t_ + 7) * (apart)];                                                                         \
        if (!(skip) || tap_ != 0) {                                                                                           \
          _Pragma("unroll") for (int i_ = 0; i_ < 8; ++i_) rest_[i_] += v_[i_ + t_] * tap_;                                   \
        }                                                                                                                     \
      }                                                                                                                       \
    _Pragma("unroll") for (int i_ = 0; i_ < 8; ++i_) (sums)[i_] += rest_[i_];                                                 \
  }
#endif
