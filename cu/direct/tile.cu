// tile.cu, step 2 of the ladder: one channel, the input tile with its halo in shared memory as well.
//
// The sum, the layouts and the uses are those of direct/single.cu. It also computes depthwise dgrad, which is the same sum
// over dy with the filter's taps in reverse. For a layer with a stride of 2 or 4, dy's pixels lie so far apart in a tile, with zeros
// between them. Neighbouring pixels read overlapping windows, so here
// a block fetches the window of its whole tile once, and its threads read that from shared memory. Each column of the filter has a sum of
// its own, unless the result has 16 bits, because short sums lose less.
//
// Sizes    They are arguments. R, S, STRIDE_H, STRIDE_W, DIL_H and DIL_W may be defined: then the filter's loops are unrolled. With LAYER, all
//          numbers are constants, except the sizes of images and what follows from them; AXES is then the number of spatial axes.
// Mapping  block -> TILE_P x TILE_Q pixels of one plane; GID_0 = (plane * tiles down + tile row) * tiles across + tile column.
//          thread (ty, tx) -> ROWS pixels, one below the other, in column tx; with the loops unrolled, a value of the
//          tile that several of these pixels need is loaded from shared memory once.
// Border   A block whose window lies inside of x checks nothing. Others fill with zeros, or, if x has a border of its own pixels, find the pixel that
//          stands there: only for the places outside of x.
//          SHOWN texts are of a gradient by an image with a border: y's pixels in the rims get more (tile_shown.cuh).
// Types    x and y may be of integers of IN_BYTES and OUT_BYTES, which are converted as they are loaded and stored.
// Memory   shared (LOCAL_ROOM): the filter, R*S, and the tile, HALO_H x HALO_W, where HALO_H = (TILE_P-1)*STRIDE_H + (R-1)*DIL_H + 1.
//          All global loads of a block are issued before its one barrier: the kernel waits for memory once.
//
// By hand: nvcc -cubin -I cu cu/direct/tile.cu
#include "core/portable.cuh"
#include "core/border.cuh"

#ifndef TILE_P
#define TILE_P 8
#define TILE_Q 32
#define ROWS 4
#endif
#ifndef IN_BYTES
#define IN_BYTES 0   // of an integer of x; 0: data_t
#endif
#ifndef SHOWN
#define SHOWN 0      // whether y's pixels are shown by a border
#endif
#ifndef OUT_BYTES
#define OUT_BYTES 0  // of an integer of y
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct TileArguments {
  long_t tiles_p, by_tiles_p, tiles_q, by_tiles_q;  // tiles down and across a plane of y
  long_t c, k, by_k, by_multiplier;                 // channels of x and y; channels of y for each of x
  long_t h, w, p, q;                                // sizes of a plane of x and y
  long_t pad_h, pad_w;
  long_t r, s, stride_h, stride_w, dil_h, dil_w, by_halo_w;
  long_t flipped;                                   // whether the filter's taps are reversed
  long_t apart_h, apart_w;                          // log2 of the distance of x's pixels
  long_t bordered, value;                           // whether x has a border: 1 near, 2 beyond the image's other end; an acc_t's bits
  long_t near_h, last_near_h, step_h, near_w, last_near_w, step_w;
  long_t bias_h, period_h, by_period_h, high_h, sign_h, fills_h, bias_w, period_w, by_period_w, high_w, sign_w, fills_w;  // border.cuh
  long_t has_scale, has_bias, has_residual, activation, slope;    // the epilogue; slope: an acc_t's bits
  long_t in_shift, least, most;                     // of integers: by what a word is shifted to give the sign of x; what y holds
  long_t before_h, before_w, after_h, after_w, side_h, side_w, last_side_h, last_side_w;  // with SHOWN: the border, and what shows (near_border.cuh)
  long_t first_h, firsts_h, last_h, lasts_h, first_w, firsts_w, last_w, lasts_w;            // pixels that it shows: `firsts` from `first` on, `lasts` from `last`
} TileArguments;

#if IN_BYTES == 1
typedef unsigned char in_t;
#elif IN_BYTES == 2
typedef unsigned short in_t;
#else
typedef data_t in_t;
#endif
#if OUT_BYTES == 1
typedef unsigned char out_t;
#elif OUT_BYTES == 2
typedef unsigned short out_t;
#else
typedef data_t out_t;
#endif
#if IN_BYTES
#define LOAD_X(x, i) ((acc_t)((int)((unsigned)(x)[i] << in_shift) >> in_shift))
#else
#define LOAD_X(x, i) LOAD(x, i)
#endif
#if OUT_BYTES  // rounded to the nearest, halves to even, and clipped; NaN gives the least
#define STORE_Y(y, i, v)                                                                            \
  {                                                                                                 \
    const acc_t rounded_ = rint(v), least_ = (acc_t)(int)arg.least, most_ = (acc_t)(int)arg.most;   \
    (y)[i] = (out_t)(int)(rounded_ > least_ ? (rounded_ < most_ ? rounded_ : most_) : least_);      \
  }
#else
#define STORE_Y(y, i, v) STORE(y, i, v)
#endif

#ifdef R
#define HALO_ROW(i) ((i) / HALO_W)
#if R * S <= 64
#define UNROLL_TAPS _Pragma("unroll")
#endif
#else
#define R ((int)arg.r)
#define S ((int)arg.s)
#define STRIDE_H ((int)arg.stride_h)
#define STRIDE_W ((int)arg.stride_w)
#define DIL_H ((int)arg.dil_h)
#define DIL_W ((int)arg.dil_w)
#define HALO_ROW(i) divided(i, arg.by_halo_w)
#endif
#if DTYPE == 64 || INDEX_64
#define AT_ONCE 1
#elif !defined(LAYER)
#define AT_ONCE (1024 / THREADS)  // 64 registers
#elif R * S <= 25 || R * S > 64
#define AT_ONCE (1280 / THREADS)  // 48 registers are enough
#else
#define AT_ONCE (1152 / THREADS)  // 56
#endif
#ifndef AXES
#define AXES 2
#endif
#ifndef UNROLL_TAPS
#define UNROLL_TAPS
#endif

#define AT_MOST(a, b) ((a) < (b) ? (a) : (b))
#define AT_LEAST_0(a) ((a) > 0 ? (a) : 0)
#define THREADS (TILE_P / ROWS * TILE_Q)
#define HALO_H ((TILE_P - 1) * STRIDE_H + (R - 1) * DIL_H + 1)
#define HALO_W ((TILE_Q - 1) * STRIDE_W + (S - 1) * DIL_W + 1)
#if SHOWN
#include "direct/tile_shown.cuh"
#endif

KERNEL LAUNCH_BOUNDS(THREADS, AT_ONCE) void direct_tile(const GLOBAL_MEM in_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                        const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                        const GLOBAL_MEM data_t* residual, GLOBAL_MEM out_t* RESTRICT y, const TileArguments arg) {
  AFTER_LAST_LAUNCH
#if IN_BYTES
  const int in_shift = (int)arg.in_shift;
#endif

  LOCAL_ROOM(tile);
  const int filter = HALO_H * HALO_W;  // offset of the filter in shared memory
  const int row = divided((int)GID_0, arg.by_tiles_q), tile_q = ((int)GID_0 - row * (int)arg.tiles_q) * TILE_Q;
  const int plane = AXES < 2 ? row : divided(row, arg.by_tiles_p), tile_p = AXES < 2 ? 0 : (row - plane * (int)arg.tiles_p) * TILE_P;
  const int c_all = OF_LAYER(C, c), k_all = OF_LAYER(K, k);
  const int n = OVER(plane, k_all, by_k), k = plane - n * k_all;  // plane = n*K + k
  const int h_end = AXES < 2 ? 1 : (int)arg.h, w_end = (int)arg.w, p_end = AXES < 2 ? 1 : (int)arg.p, q_end = (int)arg.q;

  const int flipped = OF_LAYER(FLIPPED, flipped);
  for (int i = LID_0; i < R * S; i += THREADS) tile[filter + i] = LOAD(w, (index_t)k * (R * S) + (flipped ? R * S - 1 - i : i));
  const int h0 = tile_p * STRIDE_H - OF_LAYER(PAD_H, pad_h), w0 = tile_q * STRIDE_W - OF_LAYER(PAD_W, pad_w);
  const index_t corner = (n * (index_t)c_all + OVER(k, k_all / c_all, by_multiplier)) * (h_end * w_end) + (index_t)h0 * w_end + w0;
  const int apart_h = OF_LAYER(APART_H, apart_h), apart_w = OF_LAYER(APART_W, apart_w);
  if (apart_h | apart_w) {
    const index_t first = (n * (index_t)c_all + OVER(k, k_all / c_all, by_multiplier)) * (h_end * w_end);
#pragma unroll 8
    for (int i = LID_0; i < HALO_H * HALO_W; i += THREADS) {
      const int down = HALO_ROW(i), h = h0 + down, col = w0 + i - down * HALO_W, row_of = h >> apart_h, column = col >> apart_w;
      acc_t v = 0;
      if (row_of << apart_h == h && column << apart_w == col && row_of >= 0 && row_of < h_end && column >= 0 && column < w_end)
        v = LOAD_X(x, first + row_of * w_end + column);
      tile[i] = v;
    }
  } else if (h0 >= 0 && w0 >= 0 && h0 + HALO_H <= h_end && w0 + HALO_W <= w_end) {  // most blocks of a large image
#pragma unroll 8
    for (int i = LID_0; i < HALO_H * HALO_W; i += THREADS) tile[i] = LOAD_X(x, corner + (index_t)HALO_ROW(i) * (w_end - HALO_W) + i);
  } else if (OF_LAYER(BORDERED, bordered)) {
    const index_t first = (n * (index_t)c_all + OVER(k, k_all / c_all, by_multiplier)) * (h_end * w_end);
    const acc_t value = BITS_TO_ACC(arg.value);
    // the places outside of x that results of the plane read: rows above and below of x, and columns beside it. A thread loads its first one of each
    // before, and the others after what lies inside of x, so that nearly all loads are under way at once.
    const int wide = AT_MOST(HALO_W, (AT_MOST(TILE_Q, q_end - tile_q) - 1) * STRIDE_W + (S - 1) * DIL_W + 1);
    const int high = AT_MOST(HALO_H, (AT_MOST(TILE_P, p_end - tile_p) - 1) * STRIDE_H + (R - 1) * DIL_H + 1);
    const int above = AT_MOST(h0 < 0 ? -h0 : 0, high), before = AT_MOST(w0 < 0 ? -w0 : 0, wide);
    const int rows = AT_LEAST_0(AT_MOST(h_end - h0, high) - above), columns = AT_LEAST_0(AT_MOST(w_end - w0, wide) - before);
    const int beside = wide - columns, of_columns = rows * beside;
#define LOAD_PLACE(TO, down, right, v, place)                                  \
  {                                                                            \
    int h_ = h0 + (down), col_ = w0 + (right), filled = 0;                      \
    TO(h_, h_end, h)                                                           \
    TO(col_, w_end, w)                                                         \
    v = LOAD_X(x, first + h_ * w_end + col_); /* always inside: no load waits for a branch */ \
    v = filled ? (filled == 1 ? value : 0) : v;                                \
    place = (down) * HALO_W + (right);                                         \
  }
// Place i of the columns, row by row; and the n-th of the rows.
#define LOAD_COLUMN(TO, i, v, place)                                                                        \
  {                                                                                                         \
    const int down_ = beside == 2 ? (i) >> 1 : beside == 1 ? (i) : (i) / beside, right_ = (i) - down_ * beside; \
    LOAD_PLACE(TO, above + down_, right_ < before ? right_ : right_ + columns, v, place)                    \
  }
#define OUTER_ROW(n) ((n) < above ? (n) : (n) + rows)
    const int near = OF_LAYER(BORDERED, bordered) == 1, loads_column = near && LID_0 < of_columns, loads_row = near && LID_0 < wide && high > rows;
    acc_t of_column = 0, of_row = 0;
    int column_at = 0, row_at = 0;
    if (loads_column) LOAD_COLUMN(TO_NEAR_PIXEL, LID_0, of_column, column_at)
    if (loads_row) LOAD_PLACE(TO_NEAR_PIXEL, OUTER_ROW(0), LID_0, of_row, row_at)
#pragma unroll 8
    for (int i = LID_0; i < HALO_H * HALO_W; i += THREADS) {
      const int down = HALO_ROW(i), h = h0 + down, col = w0 + i - down * HALO_W, there = h >= 0 && h < h_end && col >= 0 && col < w_end;
      acc_t v = 0;
      if (there) v = LOAD_X(x, corner + (index_t)down * (w_end - HALO_W) + i);
      if (there) tile[i] = v;
    }
    if (loads_column) tile[column_at] = of_column;
    if (loads_row) tile[row_at] = of_row;
    for (int i = LID_0 + (near ? THREADS : 0); i < of_columns; i += THREADS) {
      if (near) LOAD_COLUMN(TO_NEAR_PIXEL, i, of_column, column_at)
      else LOAD_COLUMN(TO_MAPPED_PIXEL, i, of_column, column_at)
      tile[column_at] = of_column;
    }
    for (int n = 0; n < high - rows; ++n)
      for (int i = LID_0 + (near && n == 0 ? THREADS : 0); i < wide; i += THREADS) {
        if (near) LOAD_PLACE(TO_NEAR_PIXEL, OUTER_ROW(n), i, of_row, row_at)
        else LOAD_PLACE(TO_MAPPED_PIXEL, OUTER_ROW(n), i, of_row, row_at)
        tile[row_at] = of_row;
      }
  } else
#pragma unroll 8
  for (int i = LID_0; i < HALO_H * HALO_W; i += THREADS) {
    const int down = HALO_ROW(i), h = h0 + down, col = w0 + i - down * HALO_W;
    acc_t v = 0;
    if (h >= 0 && h < h_end && col >= 0 && col < w_end) v = LOAD_X(x, corner + (index_t)down * (w_end - HALO_W) + i);
    tile[i] = v;
  }
  local_barrier();

  const int tx = LID_0 % TILE_Q, ty = LID_0 / TILE_Q * ROWS;
  acc_t sum[ROWS];
  for (int i = 0; i < ROWS; ++i) sum[i] = 0;
  UNROLL_TAPS
  for (int s = 0; s < S; ++s) {
#if DTYPE >= 32
    acc_t part[ROWS];
    for (int i = 0; i < ROWS; ++i) part[i] = 0;
#else  // rounding the result loses more
    acc_t* const part = sum;
#endif
    UNROLL_TAPS
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        part[i] += tile[((ty + i) * STRIDE_H + r * DIL_H) * HALO_W + tx * STRIDE_W + s * DIL_W] * tile[filter + r * S + s];
#if DTYPE >= 32
    for (int i = 0; i < ROWS; ++i) sum[i] += part[i];
#endif
  }

#if SHOWN
  add_shown(sum, tile, arg, ty, tx, tile_p, tile_q, p_end, q_end, h0, w0, h_end, w_end, apart_h, apart_w);
#endif

  EPILOGUE_FLAGS
  const acc_t times = SCALE_OF(k), plus = BIAS_OF(k);
  const int q = tile_q + tx;
  if (PLAIN) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int p = tile_p + ty + i;
      if (p < p_end && q < q_end) STORE_Y(y, plane * (index_t)(p_end * q_end) + p * q_end + q, sum[i] + plus);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int p = tile_p + ty + i;
    if (p < p_end && q < q_end) {
      const index_t at = plane * (index_t)(p_end * q_end) + p * q_end + q;
      const acc_t r = RESIDUAL_AT(at);
      FINISH(sum[i], times, plus, r)
      ACTIVATE(sum + i, 1)
      STORE_Y(y, at, sum[i]);
    }
  }
}
