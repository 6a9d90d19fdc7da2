// bordered.cu: images with a border of their own pixels, and the way back; and other types than the arithmetic's on the way in and out.
//
//   border_copy   wide[outer, i, j, k, inner] = x[outer, D(i), H(j), W(k), inner], or a value where a side is filled. D, H and W say which pixel of an axis
//                 stands at a place of the wider one: the place itself inside, and outside what the side's mode says
//   border_fold   the adjoint: dx[pixel] = sum of wide over the places at which border_copy puts that pixel, + residual[pixel]; of all pixels, or of
//                 the rims alone, which the border shows, where border_copy has copied the others
//   border_round  y[i] = x[i] rounded to the nearest integer, ties to even, and clipped to what the type holds; NaN gives the least
//
// Sides    core/border.cuh says in which numbers a side goes on. Each side of each axis has its own.
// Layout   x [outer][d][h][w][inner]: inner is 1 for NCHW, and the channels for channels last.
// Mapping  border_copy: thread -> EACH neighbours of wide, 16 bytes or 32, which it stores at once. border_rows, which does the same for most images:
//          a place of a line in several rows. border_fold: a pixel of PLANES planes, or images of channels last.
// Memory   no shared memory: neighbours of wide are neighbours of x but at the rims, where lines are read from L1 once more.
// Sums     border_fold adds a pixel's own place first. Then come, axis by axis from the outermost, the places before it and behind it, the nearest of each
//          of a side's two families first: always in the same order.
//
// By hand: nvcc -cubin -I cu cu/layout/bordered.cu
#include "core/portable.cuh"
#include "core/border.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct BorderArguments {
  long_t size;                                                                 // elements of what is written
  long_t inner, by_inner, line, by_line;                                       // elements of a pixel, and of a row of what is written
  long_t d, h, w, by_d, by_h;                                                  // sizes of x
  long_t wide_d, wide_h, wide_w, by_wide_d, by_wide_h;                         // and of wide
  long_t before_d, before_h, before_w, after_d, after_h, after_w;
  long_t shift_d, period_d, by_period_d, low_d, high_d, fills_d;               // the side before
  long_t shift_h, period_h, by_period_h, low_h, high_h, fills_h;
  long_t shift_w, period_w, by_period_w, low_w, high_w, fills_w;
  long_t last_shift_d, last_period_d, by_last_period_d, last_low_d, last_high_d, last_fills_d;  // the side behind
  long_t last_shift_h, last_period_h, by_last_period_h, last_low_h, last_high_h, last_fills_h;
  long_t last_shift_w, last_period_w, by_last_period_w, last_low_w, last_high_w, last_fills_w;
  long_t near_d, step_d, last_near_d, last_step_d;                             // a border that is near: i becomes near + step * i
  long_t near_h, step_h, last_near_h, last_step_h, near_w, step_w, last_near_w, last_step_w;
  long_t near, whole;                                                          // whether all borders are near; whether pixels have whole vectors
  long_t rims, by_rims, by_of_slice, by_w, by_rim_w;                           // border_fold: pixels of an image outside of a box, or 0 for all pixels
  long_t rim_d, rim_h, rim_w, box_d, box_h, box_w, inside_d, inside_h, inside_w;  // places outside of the box; its first place, and its size
  long_t rows, rows_each, lane_bits, tiles, by_tiles, positions, vector;       // border_rows: rows of wide, and of a thread; log2 of threads along a line;
                                                                               // tiles and places of a line; elements of a place
  long_t value, type, has_residual;                                            // an acc_t's bits; the type of x: TYPE_
  long_t planes;                                                               // border_fold: planes, or images of channels last
} BorderArguments;

// Types of elements besides data_t.
#define TYPE_BOOL 1
#define TYPE_UINT8 2
#define TYPE_INT8 3
#define TYPE_UINT16 4
#define TYPE_INT16 5
#define TYPE_UINT32 6
#define TYPE_INT32 7
#define TYPE_UINT64 8
#define TYPE_INT64 9
#define TYPE_HALF 10
#define TYPE_BFLOAT16 11
#define TYPE_FLOAT 12
#define TYPE_DOUBLE 13

#ifdef __OPENCL_VERSION__
typedef ulong ulong_t;
#define FLOAT_OF_BITS(bits) as_float(bits)
#else
typedef unsigned long long ulong_t;
#define FLOAT_OF_BITS(bits) __uint_as_float(bits)
#endif
// The number of a half's bits: a float's exponent is 112 larger.
WITHIN_KERNEL float half_to_float(unsigned short bits) {
  const unsigned magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  if (magnitude >= 0x0f800000u) return FLOAT_OF_BITS(sign | 0x70000000u | magnitude);  // infinity, NaN
  return FLOAT_OF_BITS(sign | magnitude) * 5.192296858534828e33f;                      // 2^112
}
#define TYPED(type) ((const GLOBAL_MEM type*)x)
WITHIN_KERNEL acc_t load_typed(const GLOBAL_MEM data_t* x, index_t i, int type) {
  switch (type) {
    case TYPE_BOOL: return TYPED(unsigned char)[i] ? (acc_t)1 : (acc_t)0;
    case TYPE_UINT8: return (acc_t)TYPED(unsigned char)[i];
    case TYPE_INT8: return (acc_t)TYPED(signed char)[i];
    case TYPE_UINT16: return (acc_t)TYPED(unsigned short)[i];
    case TYPE_INT16: return (acc_t)TYPED(short)[i];
    case TYPE_UINT32: return (acc_t)TYPED(unsigned int)[i];
    case TYPE_INT32: return (acc_t)TYPED(int)[i];
    case TYPE_UINT64: return (acc_t)TYPED(ulong_t)[i];
    case TYPE_INT64: return (acc_t)TYPED(long_t)[i];
#if DTYPE >= 32  // filters of other floats beside integers
    case TYPE_HALF: return (acc_t)half_to_float(TYPED(unsigned short)[i]);
    case TYPE_BFLOAT16: return (acc_t)FLOAT_OF_BITS((unsigned)TYPED(unsigned short)[i] << 16);
    case TYPE_FLOAT: return (acc_t)TYPED(float)[i];
#endif
#if DTYPE == 64
    case TYPE_DOUBLE: return (acc_t)TYPED(double)[i];
#endif
  }
  return LOAD(x, i);
}

// Loads EACH elements, at places[0], ...: all of a type together, so that they are under way at once.
#define LOAD_ALL(type) { _Pragma("unroll") for (int j = 0; j < EACH; ++j) v[j] = (acc_t)TYPED(type)[places[j]]; break; }
#define LOAD_TYPED(v, places)                  \
  switch (type) {                              \
    case TYPE_UINT8: LOAD_ALL(unsigned char)   \
    case TYPE_INT8: LOAD_ALL(signed char)      \
    case TYPE_UINT16: LOAD_ALL(unsigned short) \
    case TYPE_INT16: LOAD_ALL(short)           \
    default: { _Pragma("unroll") for (int j = 0; j < EACH; ++j) v[j] = load_typed(x, places[j], type); } \
  }

// Elements of a thread of border_copy.
#if DTYPE == 16 || DTYPE == 17
#define EACH 8
#define STORE_EACH STORE_VEC8
#define LOAD_EACH LOAD_VEC8
#else
#define EACH 4
#define STORE_EACH STORE_VEC
#define LOAD_EACH LOAD_VEC
#endif

// TO_NEAR_PIXEL for an axis whose sides differ.
#define TO_NEAR_PIXEL_OF_SIDE(i, n, axis)                                                           \
  {                                                                                         \
    const int before_ = i < 0, behind_ = i >= (n);                                          \
    filled = before_ ? FILLED_BY(arg.fills_##axis) : behind_ ? FILLED_BY(arg.last_fills_##axis) : filled; \
    i = before_ ? (int)arg.near_##axis + (int)arg.step_##axis * i : behind_ ? (int)arg.last_near_##axis + (int)arg.last_step_##axis * i : i; \
  }
// Where row `row` of wide begins in x, in rows; sets `filled` as TO_PIXEL does.
#define ROW_OF(row, from, filled_by)                                                                                             \
  {                                                                                                                              \
    int filled = 0;                                                                                                              \
    const index_t slice = DIVIDED(row, arg.wide_h, arg.by_wide_h), outer = arg.wide_d == 1 ? slice : DIVIDED(slice, arg.wide_d, arg.by_wide_d); \
    int h_ = (int)((row) - slice * (index_t)arg.wide_h) - (int)arg.before_h, d_ = (int)(slice - outer * (index_t)arg.wide_d) - (int)arg.before_d; \
    TO_NEAR_PIXEL_OF_SIDE(d_, d_end, d)                                                                                                  \
    TO_NEAR_PIXEL_OF_SIDE(h_, h_end, h)                                                                                                  \
    from = (outer * d_end + d_) * h_end + h_;                                                                                    \
    filled_by = filled;                                                                                                          \
  }

KERNEL LAUNCH_BOUNDS(THREADS, 1) void border_copy(const GLOBAL_MEM data_t* RESTRICT x, GLOBAL_MEM data_t* RESTRICT wide, const BorderArguments arg) {
  AFTER_LAST_LAUNCH
  const index_t first = EACH * ((index_t)GID_0 * THREADS + LID_0), size = (index_t)arg.size, inner = (index_t)arg.inner, line = (index_t)arg.line;
  if (first >= size) return;
  const int count = size - first < EACH ? (int)(size - first) : EACH, d_end = (int)arg.d, h_end = (int)arg.h, w_end = (int)arg.w, type = (int)arg.type;
  const acc_t value = BITS_TO_ACC(arg.value);
  acc_t v[EACH];
  if (arg.near && count == EACH) {
    const index_t row = DIVIDED(first, line, arg.by_line), at = first - row * line;
    index_t from, next;
    int filled_by, filled_next;
    ROW_OF(row, from, filled_by)
    if (arg.whole) {  // a pixel has a multiple of EACH elements
      const index_t pixel = DIVIDED(at, inner, arg.by_inner);
      int w = (int)pixel - (int)arg.before_w, filled = filled_by;
      TO_NEAR_PIXEL_OF_SIDE(w, w_end, w)
      LOAD_EACH(v, x, (from * w_end + w) * inner + (at - pixel * inner))
#pragma unroll
      for (int j = 0; j < EACH; ++j) v[j] = filled ? (filled == 1 ? value : 0) : v[j];
    } else {  // of one row, or of two
      const index_t following = row + (first + EACH <= size && at + EACH > line ? 1 : 0);
      ROW_OF(following, next, filled_next)
      index_t places[EACH];
      int fills[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int over = at + j >= line;
        const index_t in_row = at + j - (over ? line : 0), pixel = inner == 1 ? in_row : DIVIDED(in_row, inner, arg.by_inner);
        int w = (int)pixel - (int)arg.before_w, filled = over ? filled_next : filled_by;
        TO_NEAR_PIXEL_OF_SIDE(w, w_end, w)
        places[j] = ((over ? next : from) * w_end + w) * inner + (in_row - pixel * inner);
        fills[j] = filled;
      }
      if (type == 0) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) v[j] = LOAD(x, places[j]);
      } else {
        LOAD_TYPED(v, places)
      }
#pragma unroll
      for (int j = 0; j < EACH; ++j) v[j] = fills[j] ? (fills[j] == 1 ? value : 0) : v[j];
    }
    STORE_EACH(wide, first, v)
    return;
  }
  for (int i = 0; i < EACH; ++i) v[i] = 0;
  for (int i = 0; i < count;) {
    const index_t row = DIVIDED(first + i, line, arg.by_line), at = first + i - row * line;
    const index_t slice = DIVIDED(row, arg.wide_h, arg.by_wide_h), outer = DIVIDED(slice, arg.wide_d, arg.by_wide_d);
    int h = (int)(row - slice * (index_t)arg.wide_h) - (int)arg.before_h, d = (int)(slice - outer * (index_t)arg.wide_d) - (int)arg.before_d;
    int filled = 0;
    TO_PIXEL(d, d_end, d, last_)
    TO_PIXEL(h, h_end, h, last_)
    const index_t from = ((outer * d_end + d) * h_end + h) * (w_end * inner);
    const index_t pixel = DIVIDED(at, inner, arg.by_inner);
    int w = (int)pixel - (int)arg.before_w;
    TO_PIXEL(w, w_end, w, last_)
    const acc_t one = filled ? (filled == 1 ? value : 0) : load_typed(x, from + w * inner + (at - pixel * inner), type);
#pragma unroll
    for (int j = 0; j < EACH; ++j) v[j] = j == i ? one : v[j];
    ++i;
  }
  if (count == EACH) {
    STORE_EACH(wide, first, v)
  } else {
    for (int i = 0; i < count; ++i) STORE(wide, first + i, v[i]);
  }
}

#define ROWS_AT_ONCE (DTYPE == 64 ? 4 : 8)
#define LOAD_ROWS(type) { _Pragma("unroll") for (int j = 0; j < ROWS_AT_ONCE; ++j) v[j] = (acc_t)TYPED(type)[places[j]]; break; }
#define SELECT_FILL(v, fills) ((fills) ? ((fills) == 1 ? value : 0) : (v))

// The same for near borders and many rows. A thread has one place of a line, or EACH neighbouring channels, in rows_each rows, one below the other.
KERNEL LAUNCH_BOUNDS(THREADS, 4) void border_rows(const GLOBAL_MEM data_t* RESTRICT x, GLOBAL_MEM data_t* RESTRICT wide, const BorderArguments arg) {
  AFTER_LAST_LAUNCH
  const int group = divided((int)GID_0, arg.by_tiles), lane_bits = (int)arg.lane_bits;
  const int position = (((int)GID_0 - group * (int)arg.tiles) << lane_bits) + (LID_0 & ((1 << lane_bits) - 1));
  if (position >= (int)arg.positions) return;
  const int each = (int)arg.vector, type = (int)arg.type, d_end = (int)arg.d, h_end = (int)arg.h, w_end = (int)arg.w, wide_d = (int)arg.wide_d,
      wide_h = (int)arg.wide_h;
  const index_t inner = (index_t)arg.inner, line = (index_t)arg.line, in_line = (index_t)position * each, x_line = w_end * inner;
  const acc_t value = BITS_TO_ACC(arg.value);
  const index_t pixel = inner == 1 ? in_line : DIVIDED(in_line, inner, arg.by_inner);
  int w = (int)pixel - (int)arg.before_w, filled_w = 0;
  {
    int filled = 0;
    TO_NEAR_PIXEL_OF_SIDE(w, w_end, w)
    filled_w = filled;
  }
  const index_t place = w * inner + (in_line - pixel * inner);
  const index_t first = ((index_t)group * (THREADS >> lane_bits) + (LID_0 >> lane_bits)) * (index_t)arg.rows_each;
  const index_t slice = DIVIDED(first, arg.wide_h, arg.by_wide_h);
  index_t outer = arg.wide_d == 1 ? slice : DIVIDED(slice, arg.wide_d, arg.by_wide_d);
  int h = (int)(first - slice * (index_t)wide_h), d = (int)(slice - outer * (index_t)wide_d);
  for (int i = 0; i < (int)arg.rows_each; i += ROWS_AT_ONCE) {
    index_t places[ROWS_AT_ONCE];
    int fills[ROWS_AT_ONCE], there = 0;
#pragma unroll
    for (int j = 0; j < ROWS_AT_ONCE; ++j) {
      int h_ = h - (int)arg.before_h, d_ = d - (int)arg.before_d, filled = 0;
      TO_NEAR_PIXEL_OF_SIDE(d_, d_end, d)
      TO_NEAR_PIXEL_OF_SIDE(h_, h_end, h)
      const int inside = first + i + j < (index_t)arg.rows;
      there += inside;
      fills[j] = filled_w ? filled_w : filled;
      places[j] = inside ? ((outer * d_end + d_) * h_end + h_) * x_line + place : 0;
      if (++h == wide_h) {
        h = 0;
        if (++d == wide_d) {
          d = 0;
          ++outer;
        }
      }
    }
    const index_t to = (first + i) * line + in_line;
    if (each == EACH) {
      acc_t v[ROWS_AT_ONCE][EACH];
#pragma unroll
      for (int j = 0; j < ROWS_AT_ONCE; ++j) LOAD_EACH(v[j], x, places[j])
#pragma unroll
      for (int j = 0; j < ROWS_AT_ONCE; ++j)
        if (j < there) {
#pragma unroll
          for (int e = 0; e < EACH; ++e) v[j][e] = SELECT_FILL(v[j][e], fills[j]);
          STORE_EACH(wide, to + j * line, v[j])
        }
    } else {
      acc_t v[ROWS_AT_ONCE];
      switch (type) {
        case 0: { _Pragma("unroll") for (int j = 0; j < ROWS_AT_ONCE; ++j) v[j] = LOAD(x, places[j]); break; }
        case TYPE_UINT8: LOAD_ROWS(unsigned char)
        case TYPE_INT8: LOAD_ROWS(signed char)
        case TYPE_UINT16: LOAD_ROWS(unsigned short)
        case TYPE_INT16: LOAD_ROWS(short)
        default: { _Pragma("unroll") for (int j = 0; j < ROWS_AT_ONCE; ++j) v[j] = load_typed(x, places[j], type); }
      }
#pragma unroll
      for (int j = 0; j < ROWS_AT_ONCE; ++j)
        if (j < there) STORE(wide, to + j * line, SELECT_FILL(v[j], fills[j]));
    }
  }
}

// Places along an axis of wide: `count` of them, `step` apart.
typedef struct Run {
  int first, step, count;
} Run;
#define RUNS 5

// A family of places outside: those at a distance of a + 1 with (a + shift) % period = t, of `padding` such distances.
WITHIN_KERNEL Run family(int t, int valid, int shift, int period, divider_t by_period, int padding, int edge, int outwards) {
  int a = t - shift;
  Run run;
  if (a < 0) a += period;
  run.first = edge + outwards * a;
  run.step = outwards * period;
  run.count = valid && a < padding ? 1 + divided(padding - 1 - a, by_period) : 0;
  return run;
}
#define TWO_FAMILIES(runs, v, side, axis, padding, edge, outwards)                                                                                \
  {                                                                                                                                               \
    const int period = (int)arg.side##period_##axis, low = (int)arg.side##low_##axis, shift = (int)arg.side##shift_##axis;                        \
    const int other = (int)arg.side##high_##axis - (v), wide_by = arg.side##fills_##axis ? 0 : (int)(padding);                                    \
    (runs)[0] = family(v, (v) < low, shift, period, arg.by_##side##period_##axis, wide_by, edge, outwards);                                       \
    (runs)[1] = family(other, other >= low && other < period, shift, period, arg.by_##side##period_##axis, wide_by, edge, outwards);              \
  }
// The places of pixel i along an axis: its own, then two families at each side; and how many they are.
#define FIND_PLACES(runs, count, i, axis)                                                                                          \
  {                                                                                                                                \
    const int n = (int)arg.axis, before = (int)arg.before_##axis;                                                                  \
    (runs)[0].first = before + (i);                                                                                                \
    (runs)[0].step = (runs)[0].count = 1;                                                                                          \
    TWO_FAMILIES((runs) + 1, i, , axis, before, before - 1, -1)                                                                    \
    TWO_FAMILIES((runs) + 3, n - 1 - (i), last_, axis, arg.after_##axis, before + n, 1)                                            \
    count *= 1 + (runs)[1].count + (runs)[2].count + (runs)[3].count + (runs)[4].count;                                            \
  }
#define EACH_PLACE(place, runs)                          \
  for (int f_##place = 0; f_##place < RUNS; ++f_##place) \
    for (int c_##place = 0, place = (runs)[f_##place].first; c_##place < (runs)[f_##place].count; ++c_##place, place += (runs)[f_##place].step)

// Element `number` of what is written: its image (and channel), its channel of channels last, and its pixel.
#define OUTSIDE(i, axis) ((i) < (int)arg.box_##axis ? (i) : (i) + (int)arg.inside_##axis)
// With `rims`, the pixels outside of a box, image by image: slices, then rows of the other slices, then columns of the other rows.
#define FIND_PIXEL \
  index_t outer, channel;                                                                            \
  int d, h, w;                                                                                       \
  if (arg.rims) {                                                                                    \
    const index_t pixel = DIVIDED(number, inner, arg.by_inner);                                      \
    channel = number - pixel * inner;                                                                \
    outer = DIVIDED(pixel, arg.rims, arg.by_rims);                                                   \
    int rest = (int)(pixel - outer * (index_t)arg.rims);                                             \
    const int width = (int)arg.w, height = (int)arg.h, rim_d = (int)arg.rim_d, rim_h = (int)arg.rim_h, rim_w = (int)arg.rim_w; \
    const int in_slices = rim_d * height * width, of_slice = rim_h * width + (height - rim_h) * rim_w; \
    if (rest < in_slices) {                                                                          \
      const int line = divided(rest, arg.by_w), slice = divided(line, arg.by_h);                     \
      w = rest - line * width;                                                                       \
      h = line - slice * height;                                                                     \
      d = OUTSIDE(slice, d);                                                                         \
    } else {                                                                                         \
      rest -= in_slices;                                                                             \
      const int slice = divided(rest, arg.by_of_slice);                                              \
      rest -= slice * of_slice;                                                                      \
      d = (int)arg.box_d + slice;                                                                    \
      if (rest < rim_h * width) {                                                                    \
        const int line = divided(rest, arg.by_w);                                                    \
        w = rest - line * width;                                                                     \
        h = OUTSIDE(line, h);                                                                        \
      } else {                                                                                       \
        rest -= rim_h * width;                                                                       \
        const int line = divided(rest, arg.by_rim_w), column = rest - line * rim_w;                  \
        h = (int)arg.box_h + line;                                                                   \
        w = OUTSIDE(column, w);                                                                      \
      }                                                                                              \
    }                                                                                                \
  } else {                                                                                           \
    const index_t row = DIVIDED(number, arg.line, arg.by_line), slice = DIVIDED(row, arg.h, arg.by_h); \
    const index_t in_row = number - row * (index_t)arg.line, pixel = DIVIDED(in_row, inner, arg.by_inner); \
    outer = DIVIDED(slice, arg.d, arg.by_d);                                                         \
    channel = in_row - pixel * inner;                                                                \
    w = (int)pixel;                                                                                  \
    h = (int)(row - slice * (index_t)arg.h);                                                         \
    d = (int)(slice - outer * (index_t)arg.d);                                                       \
  }                                                                                                 

#define PLANES 8     // images, or planes, of a thread
#define SUMMANDS 16  // of a pixel, that are found before they are added

KERNEL LAUNCH_BOUNDS(THREADS, 3) void border_fold(
    const GLOBAL_MEM data_t* RESTRICT wide, const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* dx, const BorderArguments arg) {
  AFTER_LAST_LAUNCH
  const index_t number = (index_t)GID_0 * THREADS + LID_0, inner = (index_t)arg.inner;
  if (number >= (index_t)arg.size) return;
  FIND_PIXEL
  Run of_d[RUNS], of_h[RUNS], of_w[RUNS];
  int count = 1;
  FIND_PLACES(of_d, count, d, d)
  FIND_PLACES(of_h, count, h, h)
  FIND_PLACES(of_w, count, w, w)
  if (arg.rims && count == 1) return;  // it has been copied
  const index_t first = outer * PLANES, plane = (index_t)arg.d * (index_t)arg.h * (index_t)arg.w * inner;
  const index_t wide_plane = (index_t)arg.wide_d * (index_t)arg.wide_h * (index_t)arg.wide_w * inner;
  const index_t at = ((d * (index_t)arg.h + h) * (index_t)arg.w + w) * inner + channel;
  const int some = (index_t)arg.planes - first < PLANES ? (int)((index_t)arg.planes - first) : PLANES;
  acc_t sum[PLANES];
#pragma unroll
  for (int i = 0; i < PLANES; ++i) sum[i] = 0;
  for (int done = 0; done < count; done += SUMMANDS) {  // nearly always once
    index_t summands[SUMMANDS];
    int found = 0, all = 0;
    EACH_PLACE(i, of_d) EACH_PLACE(j, of_h) EACH_PLACE(k, of_w) {
      if (all >= done && found < SUMMANDS) summands[found++] = ((i * (index_t)arg.wide_h + j) * (index_t)arg.wide_w + k) * inner + channel;
      ++all;
    }
    for (int j = 0; j < found; ++j) {  // the loads of all planes are under way at once
      acc_t v[PLANES];
#pragma unroll
      for (int i = 0; i < PLANES; ++i) v[i] = LOAD(wide, (first + (i < some ? i : 0)) * wide_plane + summands[j]);
#pragma unroll
      for (int i = 0; i < PLANES; ++i) sum[i] += v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < PLANES; ++i)
    if (i < some) {
      const index_t to = (first + i) * plane + at;
      if (arg.has_residual) sum[i] += LOAD(residual, to);
      STORE(dx, to, sum[i]);
    }
}

// Of a rounded number, what a type holds; least for NaN. `end` is the first whole number beyond.
#define CLIPPED(type, least, most, end) (v >= (acc_t)(end) ? (type)(most) : v >= (acc_t)(least) ? (type)v : (type)(least))
#define PUT(type, least, most, end) ((GLOBAL_MEM type*)y)[i] = CLIPPED(type, least, most, end); break;

KERNEL LAUNCH_BOUNDS(THREADS, 1) void border_round(
    const GLOBAL_MEM data_t* RESTRICT x, GLOBAL_MEM data_t* RESTRICT y, const long_t size, const long_t type) {
  AFTER_LAST_LAUNCH
  const long_t first = EACH * ((long_t)GID_0 * THREADS + LID_0);
  if (first >= size) return;
  const int count = size - first < EACH ? (int)(size - first) : EACH;
  acc_t rounded[EACH];
  if (count == EACH) {
    LOAD_EACH(rounded, x, first)
  } else {
    for (int j = 0; j < EACH; ++j) rounded[j] = j < count ? LOAD(x, first + j) : 0;
  }
  if (type == TYPE_UINT8 && count == EACH && EACH == 4) {
    unsigned word = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const acc_t v = rint(rounded[j]);
      word |= (unsigned)CLIPPED(unsigned char, 0, 255, 256) << 8 * j;
    }
    ((GLOBAL_MEM unsigned*)y)[first / 4] = word;
    return;
  }
#pragma unroll
  for (int j = 0; j < EACH; ++j)
    if (j < count) {
      const acc_t v = rint(rounded[j]);
      const long_t i = first + j;
      switch ((int)type) {
        case TYPE_BOOL: PUT(unsigned char, 0, 1, 1)
        case TYPE_UINT8: PUT(unsigned char, 0, 255, 256)
        case TYPE_INT8: PUT(signed char, -128, 127, 128)
        case TYPE_UINT16: PUT(unsigned short, 0, 65535, 65536)
        case TYPE_INT16: PUT(short, -32768, 32767, 32768)
        case TYPE_UINT32: PUT(unsigned int, 0, 4294967295u, 4294967296.0f)
        case TYPE_INT32: PUT(int, -2147483647 - 1, 2147483647, 2147483648.0f)
        case TYPE_UINT64: PUT(ulong_t, 0, 18446744073709551615ull, 18446744073709551616.0f)
        case TYPE_INT64: PUT(long_t, -9223372036854775807ll - 1, 9223372036854775807ll, 9223372036854775808.0f)
      }
    }
}
