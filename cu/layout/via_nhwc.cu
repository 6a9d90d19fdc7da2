// via_nhwc.cu: moves the channels of images before or behind their pixels: it transposes a batch of matrices.
//
//   to[image][column][row] = from[image][row][column]
//
// NCHW to NHWC: rows are channels, columns are pixels; NHWC to NCHW the reverse. `to` may have zeros behind the rows.
//
// Mapping  block: a tile of 8 KB, 2^row_bits words of rows x as many columns as fit, at least 64. A word is a row of 4 bytes, or two
//          neighbouring rows of 2 bytes. A thread loads neighbouring columns at once: as many as divide the number of columns and make up to 16
//          bytes. All its loads are under way at once; lanes take 64 columns, side by side.
// Shared   the tile, a column's rows side by side. Eight neighbouring columns lie far apart. The columns at the same place of neighbouring
//          eights are swizzled, and so are their chunks of 16 bytes, so that stores of words and loads of chunks use all banks.
// Stores   16 bytes of a column's rows, if their number is a multiple of that; else a word of each lane. A column that begins at an odd
//          element has words of rows 1 and 2, 3 and 4, ..., and single elements at its ends.
//
// By hand: nvcc -cubin -I cu cu/layout/via_nhwc.cu
#include "core/packed.cuh"

#ifndef BYTES
#define BYTES 2  // of an element: 2 or 4
#endif

typedef WordOf<BYTES>::type element_t;
constexpr int THREADS = 256, WORDS = 2048, EACH = WORDS / THREADS, ROWS = 4 / BYTES;  // words of a tile, and of a thread; rows of a word

// by_n is the divisor n, prepared (division.cuh).
struct ViaNhwcArguments {
  long long rows, columns, pitch;                     // of a matrix; rows of `to`, with the zeros
  long long row_bits;                                 // log2 of the words of a tile's column: 4 to 32 words
  long long tiles_r, by_tiles_r, tiles_c, by_tiles_c;  // tiles of a matrix, down and across
  long long vector, wide;                             // columns that are loaded at once: 1, 2, 4, 8; whether 16 bytes are stored at once
};

// Two batches of matrices that one launch transposes.
struct ViaNhwcTwo {
  ViaNhwcArguments of[2];
};

// A tile: its first row and column, and the number of its matrix.
struct Tile {
  int row, column, row_bits, image;
  DEVICE Tile(const ViaNhwcArguments& arg, int number) : row_bits((int)arg.row_bits) {
    const Divided down(number, arg.tiles_r, arg.by_tiles_r), across(down.quotient, arg.tiles_c, arg.by_tiles_c);
    row = down.rest * (ROWS << row_bits);
    column = across.rest * columns();
    image = across.quotient;
  }
  DEVICE int columns() const { return WORDS >> row_bits; }
  // the offset of a word of a column of the tile
  DEVICE int place(int column, int word) const {
    const int eight = column / 8, number = column % 8, spread = (eight ^ number) & 7, slots = 5 - row_bits;  // 2^slots columns share a line of banks
    const int slot = (eight & ~((1 << slots) - 1)) | (spread & ((1 << slots) - 1));
    return ((number * (columns() / 8) + slot) << row_bits) + (word ^ (spread >> slots) * 4);
  }
};

template <int vector> DEVICE void load(uint32_t* shared, const element_t* __restrict__ from, const ViaNhwcArguments& arg, const Tile& tile) {
  constexpr int LANES = vector == 1 ? 32 : 64 / vector, DOWN = 32 / LANES, COUNT = EACH / vector;  // lanes along the columns; words; loads of a thread
  struct alignas(vector * BYTES) Vector {
    element_t of[vector];
  };
  const int across_bits = 11 - tile.row_bits - (vector == 1 ? 5 : 6), lane = threadIdx.x % 32;
  Vector loaded[COUNT][ROWS];
  int column[COUNT], word[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int part = i * (THREADS / 32) + threadIdx.x / 32, across = part & ((1 << across_bits) - 1), down = part >> across_bits;
    column[i] = (across * LANES + lane % LANES) * vector;
    word[i] = down * DOWN + lane / LANES;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = tile.row + ROWS * word[i] + r;
      loaded[i][r] = Vector();
      if (row < (int)arg.rows && tile.column + column[i] < (int)arg.columns)
        loaded[i][r] = *(const Vector*)(from + (tile.image * arg.rows + row) * arg.columns + tile.column + column[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
#pragma unroll
    for (int j = 0; j < vector; ++j) {
      const uint32_t low = loaded[i][0].of[j], high = loaded[i][ROWS - 1].of[j];
      shared[tile.place(column[i] + j, word[i])] = ROWS == 2 ? low | high << 16 : low;
    }
}

DEVICE void transpose(const element_t* __restrict__ from, element_t* __restrict__ to, const ViaNhwcArguments& arg, int number, uint32_t* shared) {
  const Tile tile(arg, number);
  switch ((int)arg.vector) {
#if BYTES == 2
    case 8: load<8>(shared, from, arg, tile); break;
#endif
    case 4: load<4>(shared, from, arg, tile); break;
    case 2: load<2>(shared, from, arg, tile); break;
    default: load<1>(shared, from, arg, tile);
  }
  __syncthreads();
  const int pitch = (int)arg.pitch, rows = pitch - tile.row, columns = (int)arg.columns - tile.column;
  element_t* const first = to + (tile.image * arg.columns + tile.column) * pitch + tile.row;
  if (arg.wide) {
    constexpr int PIECE = 16 / BYTES;  // rows
    const int bits = tile.row_bits - 2;
#pragma unroll
    for (int i = threadIdx.x; i < WORDS / 4; i += THREADS) {
      const int column = i >> bits, piece = i & ((1 << bits) - 1);
      if (column < columns && PIECE * piece < rows)
        store_word(first + column * pitch + PIECE * piece, *(const uint4*)(shared + tile.place(column, 4 * piece)));
    }
    return;
  }
#pragma unroll
  for (int i = threadIdx.x; i < WORDS; i += THREADS) {
    const int column = i >> tile.row_bits, word = i & ((1 << tile.row_bits) - 1), row = ROWS * word;
    if (column >= columns || row >= rows) continue;
    element_t* const at = first + column * pitch + row;
    const uint32_t own = shared[tile.place(column, word)];
    if constexpr (BYTES == 4) {
      *at = own;
    } else if ((uint64_t)at % 4 == 0) {
      if (row + 1 < rows) *(uint32_t*)at = own;
      else *at = (uint16_t)own;
    } else {
      const bool last = word + 1 == 1 << tile.row_bits;
      if (word == 0) *at = (uint16_t)own;
      if (row + 1 >= rows) continue;
      if (last || row + 2 >= rows) at[1] = (uint16_t)(own >> 16);
      else *(uint32_t*)(at + 1) = own >> 16 | shared[tile.place(column, word + 1)] << 16;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    via_nhwc(const element_t* __restrict__ from, element_t* __restrict__ to, const __grid_constant__ ViaNhwcArguments arg) {
  __shared__ alignas(16) uint32_t shared[WORDS];
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  transpose(from, to, arg, blockIdx.x, shared);
}

// Two in one launch: the first one's tiles come first.
extern "C" __global__ void __launch_bounds__(THREADS)
    via_nhwc_two(const element_t* __restrict__ from, element_t* __restrict__ to, const element_t* __restrict__ other_from, element_t* __restrict__ other_to,
                 const __grid_constant__ ViaNhwcTwo arg, const long long blocks) {
  __shared__ alignas(16) uint32_t shared[WORDS];
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const bool other = blockIdx.x >= blocks;
  transpose(other ? other_from : from, other ? other_to : to, arg.of[other], blockIdx.x - (other ? (int)blocks : 0), shared);
}
