// images/window.cuh: what the kernels for images share: types of pixels, borders, and where a block's tile lies.
//
// An array is seen as images [outer][middle][inner] of slices (d), rows (h) and columns (w) with `colours` numbers each. Columns are neighbours in memory; all
// other strides are arguments. A window is what the results of a tile read of one slice: halo_p rows of halo_q numbers.
//
// Borders  Five numbers an axis map any index i >= -bias to one inside, whatever the border and however far outside: MAPPED of core/border.cuh.
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
#define THREADS 128
#endif
#include "core/portable.cuh"
#include "core/border.cuh"

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
  long_t tile_p, tile_q, by_tile_q;                     // of a block; tile_q is a multiple of 8 * colours
  long_t step, by_eighth_q, by_quarter_q;               // rows that a block of separable.cu has at a time; tile_q / 8, and tile_q / 4 or / 2
  long_t halo_p, halo_q, pitch, wide;                   // the window; elements from row to row, in the window and in its filtered rows
  long_t bias_d, period_d, by_period_d, high_d, sign_d, outside_d;
  long_t bias_h, period_h, by_period_h, high_h, sign_h, outside_h;
  long_t bias_w, period_w, by_period_w, high_w, sign_w, outside_w;
  long_t value;              // of what lies outside: bits of an acc_t
  long_t square, add, root;  // joins
  long_t box_h, box_w;       // whether all taps along an axis are equal and the sums are made by doubling; on the CPU
  long_t x_fours, y_fours;   // whether all rows of an image of x, and of y, begin at a multiple of four elements; on a GPU
  long_t skip;               // whether the filter has taps of 0 that must not meet a NaN; on a GPU
  long_t strips, reach, dense;  // of walk.cu: strips of all images; how far a filter may reach to each side, 1 or 4; whether it is one of both axes
} WindowArguments;

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
