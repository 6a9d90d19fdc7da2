// blocks.cuh: what the kernels of the engine of blocks share: arguments, transforms in shared memory, the layout of spectra, sums of products.
//
//   y[i] = sum over m of v[i + base - m] * f[m]     f: the filter's taps, reversed for a forward convolution; v: an image, 0 outside
//
// A block is a box of pixels of v. Its circular convolution with f is right for all pixels but the first T - 1 planes, R - 1 rows and S - 1 columns,
// so blocks overlap by that much (overlap-save). Of a line, a block is length_h * length_w pixels: row a has pixels a, a + length_h, a + 2 length_h and so
// on, and numbers are rotated between rows and columns, which makes it a transform of the line (Bailey 1990, the four-step method). Two blocks are a
// pair: one is the real part of complex numbers, the other the imaginary one. The filter is real, so the two parts of the product's inverse
// transform are the two blocks' results. Transforms are double, whatever the arrays are.
//
//   blocks_rows.cu     the rows of a pair are transformed, as are those of a filter
//   blocks_columns.cu  the columns, and in volumes the lines along their depth; the last ones of a pair times the filter's spectrum, and back
//   blocks_results.cu  the rows of a pair, back: results are checked, finished and stored
//   blocks_sums.cu     sums of products in the place of results that may be off
//
// A length is 8 * (factors of 2, 3, 4, 5, 8 or 9) * 8. A transform takes a pass for each factor, in place, in that order (decimation in frequency): LENGTH / R
// times, R numbers that are q apart are transformed in registers, and rotated. The inverse transform takes the same steps backwards. Nothing is ever put
// in order: each place holds whatever frequency comes to it. The first pass and the last one read or write global memory.
//
// Memory   A block of threads has BATCH transforms at once. Number `position` of transform `lane` lies at SLOT(position, lane) of shared memory: the BATCH numbers
//          of a position are neighbours, and all eight numbers that a quarter of a warp takes lie in different banks. A pair's numbers lie in
//          global memory as [group of BATCH columns][plane][row][column of the group], so that blocks_rows.cu writes and blocks_columns.cu reads neighbours.
#pragma once

#include "fft/complex.cuh"
#include "core/near_border.cuh"

#ifndef BATCH
#define BATCH 8
#define THREADS 256
#endif

#define TOGETHER (THREADS == 192 ? 3 : 512 / THREADS)  // blocks of threads that should fit a multiprocessor at once
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); ++i)
#define ALL(at, number) for (int at = LID_0; at < (number); at += THREADS)
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#if BATCH == 8
#define SWIZZLE(position) (((position) ^ ((position) >> 3)) & 7)
#elif BATCH == 4
#define SWIZZLE(position) ((((position) >> 1) ^ ((position) >> 3 << 1)) & 7)
#else
#define SWIZZLE(position) ((position) >> 2 & 7)
#endif
#define SLOT(position, lane) (((position) * BATCH + (lane)) ^ SWIZZLE(position))
#ifdef __OPENCL_VERSION__
#define SHARED_NUMBERS LOCAL_MEM complex_t z[ROOM];
#define OR_LOCAL(word, bits) atomic_or(&(word), bits)
#define HIGH(a, b) mul_hi(a, b)
#define NEXT_OF(count) atomic_inc((volatile GLOBAL_MEM int*)(count))
typedef ulong mask_t;
#else
#define SHARED_NUMBERS extern __shared__ complex_t z[];
#define OR_LOCAL(word, bits) atomicOr(&(word), bits)
#define HIGH(a, b) __umulhi(a, b)
#define NEXT_OF(count) atomicAdd(count, 1)
typedef unsigned long long mask_t;
#endif

// A part of a pair: the BATCH rows of one block of threads. What is known of it: MASKS words, of 64 segments of columns for each of both blocks. Bits of the
// first four words say that there is something but zeros, of the last four that there is a value that transforms can't take.
#define MASKS 8
#define SEGMENTS 64
// an entry of the list of results that may be off: where it is in y, in which pair, block and place, and what its transform gives
#define ENTRY 4      // wide_t
#define PIECE 128    // taps of a row that are added up in one piece: blocks_sums.cu
#define AT_A_TIME 8  // of these before another look at the magnitudes
#define SUMMANDS 32  // threads that share a sum

typedef struct BlocksArguments {
  // what is read, images or filters: elements from one to the next; their size, and where block 0 begins; elements from the first in memory to the first pixel,
  // and from one plane, row and column to the next: filters may be read backwards
  long_t image_stride, group_stride, d, h, w, first_d, first_h, first_w, start, plane_step, row_step, column_step;
  long_t gain;    // a double's bits: factor of what is read
  long_t linear;  // whether a block is a piece of a line
  // blocks of an image, of a plane and of a row; of all images; 2 where they are paired, 1 where each is alone; the first pair of this launch, and pairs
  // of a channel in it; results of a block in each direction, so that blocks begin so far apart
  long_t blocks, by_blocks, blocks_of_plane, by_blocks_of_plane, blocks_w, by_blocks_w, all_blocks, at_once, first_pair, pairs, by_pairs;
  long_t used_d, used_h, used_w;
  // transforms of rows: their length, an eighth of it, and the factors but the first and the last, four bits each, the first one lowest, and their number
  long_t length_h, by_length_h, length_w, eighth_w, by_eighth_w, factors_w, count_w;
  // rows of a pair that are stored; groups of BATCH columns; parts of a pair, and of a plane of it; columns of a segment
  long_t rows, groups, parts, by_parts, parts_of_plane, by_parts_of_plane, segment, by_segment;
  // blocks_columns.cu: transforms along another axis: the length, an eighth, the factors; chunks of BATCH numbers from one number to the next; groups
  // times the lines of each, these, and chunks from one to the next; rows of what is read; the first line; numbers that are there; the first that is needed on
  // the way back; what norm is noted
  long_t axis_length, axis_eighth, axis_factors, axis_count, apart, lines, by_lines, lines_of_group, by_lines_of_group, line_step;
  long_t rows_read, first_line, there, needed, notes, turns_axis;
  // blocks_results.cu: parts of what it stores of a pair, and of a plane
  long_t result_parts, by_result_parts, result_parts_of_plane, by_result_parts_of_plane;
  // what is written: channels of images, of groups; the size of a result
  long_t k, per_group, by_per_group, o, p, q;
  // the filter: elements from one group and channel to the next; taps; whether windows take the last one first
  long_t f_group, f_written, t, r, s, flipped;
  // doubles from the start of a buffer: rotations of rows; spectra that are read and written, those of filters; norms of parts of pairs, and their masks; norms of
  // pairs and of filters; the list of results that may be off, and the number of its entries
  long_t turns_w, from_at, to_at, filters_at, part_norms_at, masks_at, norms_at, filter_norms_at, list_at, count_at;
  long_t bordered, side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;  // whether the image has a border, and what stands outside: near_border.cuh
  long_t most, resets, sums_grid;  // entries that the list holds; whether this launch begins it anew; blocks of blocks_sums.cu
  long_t limit;                    // a double's bits: a result of at least so many times both norms is right
  long_t has_scale, has_bias, has_residual, activation, slope;  // the epilogue; slope: an acc_t's bits
} BlocksArguments;

// The pixel that stands at place i of an axis: nearly always the one there; outside of the axis if there is none.
#define SHOWN(i, axis, arg) ((arg)->bordered ? near_pixel(i, (int)(arg)->axis, (arg)->side_##axis, (arg)->last_side_##axis) : (i))

// The place of block number `number`.
typedef struct Block {
  int image, plane, row, column;  // its place in its image, in blocks
} Block;
WITHIN_KERNEL Block block_of(const BlocksArguments* arg, int number) {
  Block block;
  block.image = divided(number, arg->by_blocks);
  int rest = number - block.image * (int)arg->blocks;
  block.plane = divided(rest, arg->by_blocks_of_plane);
  rest -= block.plane * (int)arg->blocks_of_plane;
  block.row = divided(rest, arg->by_blocks_w);
  block.column = rest - block.row * (int)arg->blocks_w;
  return block;
}

// ---- transforms in registers: v[i] becomes the sum over k of v[k] * e^(-2 pi i k i / R)

#define ADDED(a, b) COMPLEX((a).x + (b).x, (a).y + (b).y)
#define TAKEN(a, b) COMPLEX((a).x - (b).x, (a).y - (b).y)
#define MINUS_I(a) COMPLEX((a).y, -(a).x)
#define SCALED(a, f) COMPLEX((a).x * (f), (a).y * (f))
#define HALF_ROOT ((wide_t)0.70710678118654752440)

#define TRANSFORM_2(v, a, b)                 \
  {                                          \
    const complex_t d_ = TAKEN(v[a], v[b]);  \
    v[a] = ADDED(v[a], v[b]);                \
    v[b] = d_;                               \
  }
#define TRANSFORM_4(v, a, b, c, d)                                               \
  {                                                                              \
    const complex_t s_ = ADDED(v[a], v[c]), t_ = TAKEN(v[a], v[c]);              \
    const complex_t m_ = ADDED(v[b], v[d]), n_ = TAKEN(v[b], v[d]), o_ = MINUS_I(n_); \
    v[a] = ADDED(s_, m_);                                                        \
    v[b] = ADDED(t_, o_);                                                        \
    v[c] = TAKEN(s_, m_);                                                        \
    v[d] = TAKEN(t_, o_);                                                        \
  }
#define TRANSFORM_3(v, a, b, c)                                                                      \
  {                                                                                                  \
    const complex_t s_ = ADDED(v[b], v[c]), d_ = SCALED(TAKEN(v[b], v[c]), (wide_t)0.86602540378443864676); \
    const complex_t m_ = COMPLEX(v[a].x - (wide_t)0.5 * s_.x, v[a].y - (wide_t)0.5 * s_.y), o_ = MINUS_I(d_); \
    v[a] = ADDED(v[a], s_);                                                                          \
    v[b] = ADDED(m_, o_);                                                                            \
    v[c] = TAKEN(m_, o_);                                                                            \
  }
WITHIN_KERNEL void transform_2(complex_t* v) { TRANSFORM_2(v, 0, 1) }
WITHIN_KERNEL void transform_3(complex_t* v) { TRANSFORM_3(v, 0, 1, 2) }
WITHIN_KERNEL void transform_4(complex_t* v) { TRANSFORM_4(v, 0, 1, 2, 3) }
WITHIN_KERNEL void transform_5(complex_t* v) {
  const wide_t c1 = 0.30901699437494742410, c2 = -0.80901699437494742410, s1 = 0.95105651629515357212, s2 = 0.58778525229247312917;
  const complex_t p1 = ADDED(v[1], v[4]), m1 = TAKEN(v[1], v[4]), p2 = ADDED(v[2], v[3]), m2 = TAKEN(v[2], v[3]);
  const complex_t a = COMPLEX(v[0].x + c1 * p1.x + c2 * p2.x, v[0].y + c1 * p1.y + c2 * p2.y);
  const complex_t b = COMPLEX(v[0].x + c2 * p1.x + c1 * p2.x, v[0].y + c2 * p1.y + c1 * p2.y);
  const complex_t c = COMPLEX(s1 * m1.y + s2 * m2.y, -s1 * m1.x - s2 * m2.x), d = COMPLEX(s2 * m1.y - s1 * m2.y, -s2 * m1.x + s1 * m2.x);
  v[0] = COMPLEX(v[0].x + p1.x + p2.x, v[0].y + p1.y + p2.y);
  v[1] = ADDED(a, c);
  v[4] = TAKEN(a, c);
  v[2] = ADDED(b, d);
  v[3] = TAKEN(b, d);
}
WITHIN_KERNEL void transform_8(complex_t* v) {
  TRANSFORM_2(v, 0, 4)
  TRANSFORM_2(v, 1, 5)
  TRANSFORM_2(v, 2, 6)
  TRANSFORM_2(v, 3, 7)
  v[5] = COMPLEX((v[5].x + v[5].y) * HALF_ROOT, (v[5].y - v[5].x) * HALF_ROOT);
  v[6] = MINUS_I(v[6]);
  v[7] = COMPLEX((v[7].y - v[7].x) * HALF_ROOT, -(v[7].x + v[7].y) * HALF_ROOT);
  TRANSFORM_4(v, 0, 1, 2, 3)
  TRANSFORM_4(v, 4, 5, 6, 7)
  const complex_t a = v[1], b = v[2], c = v[3];  // in order: 0 2 4 6, 1 3 5 7
  v[1] = v[4];
  v[2] = a;
  v[4] = b;
  v[3] = v[5];
  v[5] = v[6];
  v[6] = c;
}
WITHIN_KERNEL void transform_9(complex_t* v) {
  // the roots e^(-2 pi i / 9), of 1, 2 and 4
  const complex_t r1 = COMPLEX((wide_t)0.76604444311897803520, (wide_t)-0.64278760968653932632);
  const complex_t r2 = COMPLEX((wide_t)0.17364817766693034885, (wide_t)-0.98480775301220805937);
  const complex_t r4 = COMPLEX((wide_t)-0.93969262078590838405, (wide_t)-0.34202014332566873304);
  TRANSFORM_3(v, 0, 3, 6)
  TRANSFORM_3(v, 1, 4, 7)
  TRANSFORM_3(v, 2, 5, 8)
  v[4] = times(v[4], r1);
  v[5] = times(v[5], r2);
  v[7] = times(v[7], r2);
  v[8] = times(v[8], r4);
  TRANSFORM_3(v, 0, 1, 2)
  TRANSFORM_3(v, 3, 4, 5)
  TRANSFORM_3(v, 6, 7, 8)
  complex_t swapped = v[1];  // in order: from [a][b] to [b][a]
  v[1] = v[3];
  v[3] = swapped;
  swapped = v[2];
  v[2] = v[6];
  v[6] = swapped;
  swapped = v[5];
  v[5] = v[7];
  v[7] = swapped;
}
// the inverse, times R: with real and imaginary parts swapped before and after
#define SWAP_PARTS(v, R) EACH(i_, R) v[i_] = COMPLEX(v[i_].y, v[i_].x);
#define TRANSFORM(v, R) transform_##R(v);
#define TRANSFORM_BACK(v, R)  \
  SWAP_PARTS(v, R)            \
  transform_##R(v);           \
  SWAP_PARTS(v, R)

// ---- passes in shared memory

// A pass with the factor R: numbers that are q apart; `over_q` divides by q; `turn` is how far apart the rotations are.
#define PASS(R, BACK)                                                                                       \
  ALL(at, length / R * BATCH) {                                                                             \
    const int lane = at % BATCH, number = at / BATCH, part = (int)HIGH((unsigned)number, over_q);           \
    const int j = number - part * q, first = part * R * q + j;                                              \
    complex_t v[R];                                                                                         \
    EACH(i, R) v[i] = z[SLOT(first + i * q, lane)];                                                         \
    if (BACK) {                                                                                             \
      EACH(i, R) if (i) v[i] = times_conjugate(v[i], turns[i * j * turn]);                                  \
      TRANSFORM_BACK(v, R)                                                                                  \
    } else {                                                                                                \
      TRANSFORM(v, R)                                                                                       \
      EACH(i, R) if (i) v[i] = times(v[i], turns[i * j * turn]);                                            \
    }                                                                                                       \
    EACH(i, R) z[SLOT(first + i * q, lane)] = v[i];                                                         \
  }
#define MIDDLE_PASS(BACK)                       \
  switch (factor) {                             \
    case 2: PASS(2, BACK) break;                \
    case 3: PASS(3, BACK) break;                \
    case 4: PASS(4, BACK) break;                \
    case 5: PASS(5, BACK) break;                \
    case 8: PASS(8, BACK) break;                \
    default: PASS(9, BACK)                      \
  }
// 2^32 / q, rounded up: the upper half of its product with a number of less than 2^16 is that number / q
#define DIVIDER(q) (0xffffffffu / (unsigned)(q) + 1)

// All passes but the first and the last, of numbers that the first has left, each followed by a barrier; and the same backwards.
WITHIN_KERNEL void middle_passes(LOCAL_MEM_POINTER complex_t* z, const GLOBAL_MEM complex_t* turns, int length, int factors, int count) {
  int q = length / 8, turn = 8;
  for (; count; --count, factors >>= 4) {
    const int factor = factors & 15;
    q /= factor;
    const unsigned over_q = DIVIDER(q);
    MIDDLE_PASS(0)
    turn *= factor;
    local_barrier();
  }
}
WITHIN_KERNEL void middle_passes_back(LOCAL_MEM_POINTER complex_t* z, const GLOBAL_MEM complex_t* turns, int length, int factors, int count) {
  int q = 8, turn = length / 8;
  while (count--) {
    const int factor = factors >> 4 * count & 15;
    turn /= factor;
    const unsigned over_q = DIVIDER(q);
    MIDDLE_PASS(1)
    q *= factor;
    local_barrier();
  }
}

// ---- what is known of parts

#define SEGMENTS_FROM_TO(first, last) (~(mask_t)0 << (first) & ~(mask_t)0 >> (SEGMENTS - 1 - (last)))

// ---- sums of products

// A result that may be off is the transform's if the sum of its products' magnitudes reaches the limit, and it may not be zero; else it is the sum of its products.
#define MAY_BE_ZERO(value, limit) (!(fabs(value) > (limit) * 0x1p-24))
#define NO_NUMBER BITS_TO_WIDE(0x7ff8000000000000)

// What one of SUMMANDS threads adds up for the result whose window begins at pixel (front, top, left) of an image, until the magnitudes are `enough`. The window's
// rows are cut in pieces; thread `share` has every SUMMANDS-th. One thread may do it for all shares, with the same bits.
typedef struct Sum {
  double total, magnitude;
} Sum;
WITHIN_KERNEL Sum share_of_sum(const GLOBAL_MEM data_t* image, const GLOBAL_MEM data_t* filter, const BlocksArguments* arg, int front, int top, int left, int share,
                               double enough) {
  Sum sum;
  sum.total = sum.magnitude = 0;
  const int t = (int)arg->t, r = (int)arg->r, s = (int)arg->s, h = (int)arg->h, w = (int)arg->w, pieces = (s + PIECE - 1) / PIECE;
  int row = share / pieces, piece = share - row * pieces;
  const int down = SUMMANDS / pieces, along = SUMMANDS - down * pieces;
  const int step = arg->flipped ? -1 : 1, bordered = arg->bordered != 0;
  while (row < t * r && !(sum.magnitude >= enough)) {
    const int plane = row / r, z = SHOWN(front + plane, d, arg), y = SHOWN(top + row - plane * r, h, arg);
    // taps of this piece that meet the image, or its border
    const int first = bordered ? piece * PIECE : LARGER(piece * PIECE, -left), last = SMALLER(piece * PIECE + PIECE, s);
    const int end = bordered ? last : SMALLER(last, w - left);
    if ((unsigned)z < (unsigned)arg->d && (unsigned)y < (unsigned)h && first < end) {
      const GLOBAL_MEM data_t* from = image + (z * h + y) * (index_t)w;
      const GLOBAL_MEM data_t* taps = filter + (arg->flipped ? t * r * s - 1 - row * s : row * s);
      double part = 0, magnitude = 0;
      for (int i = first; i < end && !(sum.magnitude + magnitude >= enough); i += AT_A_TIME) {
        double products[AT_A_TIME];
        EACH(j, AT_A_TIME) {
          const int column = SHOWN(left + i + j, w, arg);
          products[j] = i + j < end && (unsigned)column < (unsigned)w ? (double)LOAD(from, column) * (double)LOAD(taps, (i + j) * step) : 0;
        }
        EACH(j, AT_A_TIME) {
          part += products[j];
          magnitude += fabs(products[j]);
        }
      }
      sum.total += part;
      sum.magnitude += magnitude;
    }
    row += down;
    piece += along;
    if (piece >= pieces) {
      piece -= pieces;
      ++row;
    }
  }
  return sum;
}
