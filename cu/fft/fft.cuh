// fft.cuh: what the kernels of the FFT engine share: arguments, complex numbers, the layout of tiles.
//
//   y[i] = sum over m of v[i + base - m] * f[m]     f: the filter's taps, reversed for a forward convolution; v: an image, 0 outside
//
// A tile is TILE_H x TILE_W pixels of v, or, with LINEAR, TILE_H * TILE_W pixels of a line. Its circular convolution with f is right for all
// pixels but the first R - 1 rows and S - 1 columns, so tiles overlap by that much (overlap-save).
//
// A transform takes two tiles at once, a pair: one as the real part of complex numbers, the other as the imaginary one. The filter is real, so
// the two parts of the product's inverse transform are the two tiles' results, and nothing has to be separated. The tiles of a channel are
// numbered through all images, and every two neighbours are a pair.
//
// Frequencies stay in the order that the forward transform leaves, which the inverse transform expects.
#pragma once

#include "fft/complex.cuh"

#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define PARTS 1024  // of a tile: fft/range.cu
// what a map says of the windows that begin in a part, and of the part
#define BY_SUM 1
#define ZERO 2
#define NOTHING_THERE 4

typedef struct FftArguments {
  // what is read, images or filters: elements from one to the next, and channels of a group; size of a plane, and the row and column where tile 0
  // begins; elements from a plane's start to its first pixel, and from one row and column to the next: filters may be read backwards
  long_t image_stride, group_stride, channel_stride, channels, by_channels;
  long_t h, w, first_h, first_w, start, row_step, column_step;
  long_t gain;  // a wide_t's bits: factor of what is read
  // tiles of a plane, in rows of tiles_w; of all images; 2 where they are paired, 1 where each is alone; pairs of a channel;
  // results of a tile in each direction, so that tiles begin so far apart
  long_t tiles, by_tiles, tiles_w, by_tiles_w, all_tiles, at_once, pairs, by_pairs, used_h, used_w;
  // fft/range.cu: parts of a tile, their size, and parts that lie in any window of the filter
  long_t parts_w, by_parts_w, part_h, part_w, by_part_w, box_h, box_w;
  // what is written: channels of images, of groups; results of a plane
  long_t k, per_group, by_per_group, p, q;
  // the filter: elements from one group, result channel and read channel to the next; taps; whether windows take the last one first
  long_t f_group, f_written, f_read, r, s, flipped;
  // wide_t from the start of a buffer: spectra that are read and written, flags of tiles and their maps, flags of filters; norms of pairs and of filters
  long_t read_at, written_at, flags_at, maps_at, filter_flags_at, norms_at, filter_norms_at;
  long_t least;  // where CHECKED, a wide_t's bits: a result of at least so many times both norms is right
  long_t has_scale, has_bias, has_residual, activation, slope;  // the epilogue; slope: an acc_t's bits
} FftArguments;

// The place of tile number `number`.
typedef struct Tile {
  int image, row, column;  // its place in its plane, in tiles
} Tile;
WITHIN_KERNEL Tile tile_of(const FftArguments* arg, int number) {
  Tile tile;
  tile.image = divided(number, arg->by_tiles);
  const int in_plane = number - tile.image * (int)arg->tiles;
  tile.row = divided(in_plane, arg->by_tiles_w);
  tile.column = in_plane - tile.row * (int)arg->tiles_w;
  return tile;
}

// An element of a plane of the input; 0 outside, and if it is not `wanted`. A select, not a branch: several loads can be under way at once.
WITHIN_KERNEL acc_t element(const GLOBAL_MEM data_t* plane, const FftArguments* arg, int wanted, int row, int column) {
  const int inside = wanted && (unsigned)row < (unsigned)arg->h && (unsigned)column < (unsigned)arg->w;
  acc_t v = 0;
  if (inside) v = LOAD(plane, (int)arg->start + row * (int)arg->row_step + column * (int)arg->column_step);
  return v;
}
