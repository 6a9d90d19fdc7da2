// depthwise_planes.cu: depthwise layers of small filters, NCHW: contiguous planes are read and written as runs of memory.
//
// The sum, the layouts and the uses are those of direct_tile.cu, for filters of R x S taps without dilation. There a block reads a window number by
// number, and for each number computes an address and checks four borders. Here a block reads whole planes, or a band of whole rows of one. Either is
// a run of memory, read and written by vectors of 16 bytes, whatever the sizes are. A thread checks once for each row of x what part of it
// lies outside the image. Each row of the filter has a sum of its own, unless the result has 16 bits, because short sums lose less.
//
// Sizes    They are arguments; R, S and STRIDE are defined. With LAYER, the layer's channels and epilogue are constants.
// Mapping  block -> a unit: `planes` planes of y, or `band` rows of one plane. GID_0 = group of planes * bands + band.
//          thread -> tasks, THREADS apart: ROWS pixels of a column, one below the other; task = (plane * strips + strip) * q + column.
//          A task walks the rows of x that it reads from the top down. It loads S numbers of each into registers, which also hold the
//          filter's rows.
// Memory   shared (LOCAL_ROOM), in acc_t: the filters of the planes, `filters` numbers; the run of y, `y_room` numbers, which begins as far
//          behind a vector's beginning as it does in memory; the run of x, likewise.
//          A block issues all its loads at once. Several blocks of a multiprocessor load, multiply and store in turn.
//
// By hand: nvcc -cubin cu/depthwise_planes.cu
#include "portable.cuh"

#ifndef R
#define R 3
#define S 3
#define STRIDE 1
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct DepthwisePlanesArguments {
  long_t planes, all_planes;                  // planes of y: of a unit, of the launch
  long_t band, bands, by_bands;               // rows of y of a unit; units of a plane, 1 if a unit has several planes
  long_t strips, by_strips;                   // tasks below one another in a unit
  long_t k, by_k, multiplier, by_multiplier;  // channels of y; channels of y for each of x
  long_t h, w, p, q, by_q;                    // sizes of a plane of x and y
  long_t pad_h, pad_w;
  long_t flipped;                             // whether the filter's last tap comes first
  long_t filters, y_room;                     // numbers of shared memory
  long_t x_size;                              // elements of x
  long_t has_scale, has_bias, has_residual, activation, slope;  // the epilogue; slope: an acc_t's bits
} DepthwisePlanesArguments;

#define THREADS 128
#define ROWS 8
#define VECTOR (DTYPE >= 32 ? 4 : 8)  // elements
#define AT_ONCE (DTYPE >= 32 ? 4 : 2)    // vectors that a thread loads before it stores any
#define MEETS ((ROWS - 1) * STRIDE + R)  // rows of x of a task
#define RESIDENT (DTYPE == 64 ? (R * S <= 9 ? 4 : 2) : R * S <= 9 ? 7 : R * S <= 25 ? 6 : 4)

#if DTYPE >= 32
#define LOAD_RUN LOAD_VEC
#define STORE_RUN STORE_VEC
#define LOCAL_STORE_RUN(p, s) LOCAL_STORE_VEC(p, s)
#define LOCAL_LOAD_RUN(d, p) LOCAL_LOAD_VEC(d, p)
#else
#define LOAD_RUN LOAD_VEC8
#define STORE_RUN STORE_VEC8
#define LOCAL_STORE_RUN(p, s) { LOCAL_STORE_VEC(p, s) LOCAL_STORE_VEC((p) + 4, (s) + 4) }
#define LOCAL_LOAD_RUN(d, p) { LOCAL_LOAD_VEC(d, p) LOCAL_LOAD_VEC((d) + 4, (p) + 4) }
#endif

KERNEL LAUNCH_BOUNDS(THREADS, RESIDENT) void depthwise_planes(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                        const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                        const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* RESTRICT y, const DepthwisePlanesArguments arg) {
  AFTER_LAST_LAUNCH

  LOCAL_ROOM(room);
  // the unit: planes of y from `first` on, and of each the rows from `p0` on; its parts of x and y begin at elements
  // `x_begin` and `y_begin`
  const int group = divided((int)GID_0, arg.by_bands), p0 = ((int)GID_0 - group * (int)arg.bands) * (int)arg.band;
  const int first = group * (int)arg.planes, left = (int)arg.all_planes - first, planes = left < (int)arg.planes ? left : (int)arg.planes;
  const int rows = (int)arg.p - p0 < (int)arg.band ? (int)arg.p - p0 : (int)arg.band;
  const int k_all = OF_LAYER(K, k), flipped = OF_LAYER(FLIPPED, flipped), pad_h = OF_LAYER(PAD_H, pad_h), pad_w = OF_LAYER(PAD_W, pad_w);
  const int w_end = (int)arg.w, q_end = (int)arg.q, x_plane = (int)arg.h * w_end, y_plane = (int)arg.p * q_end;
  const int top = p0 * STRIDE - pad_h, below = top + (rows - 1) * STRIDE + R;
  const int h0 = top > 0 ? top : 0, h_end = below < (int)arg.h ? below : (int)arg.h;
  const int x_first = OVER(first, OF_LAYER(MULTIPLIER, multiplier), by_multiplier);
  const int x_last = OVER(first + planes - 1, OF_LAYER(MULTIPLIER, multiplier), by_multiplier);
  const index_t x_begin = x_first * (index_t)x_plane + h0 * w_end, y_begin = first * (index_t)y_plane + p0 * q_end;
  const int x_shift = (int)(x_begin & (VECTOR - 1)), y_shift = (int)(y_begin & (VECTOR - 1));
  const int x_run = (x_last - x_first) * x_plane + (h_end - h0) * w_end, y_run = (planes - 1) * y_plane + rows * q_end;

  LOCAL_MEM_POINTER acc_t* const filter = room;
  LOCAL_MEM_POINTER acc_t* const out = room + (int)arg.filters;
  LOCAL_MEM_POINTER acc_t* const in = out + (int)arg.y_room;
  for (int i = LID_0; i < planes * (R * S); i += THREADS) {
    const int plane = i / (R * S), tap = i - plane * (R * S), k = first + plane - divided(first + plane, arg.by_k) * k_all;
    filter[i] = LOAD(w, (index_t)k * (R * S) + (flipped ? R * S - 1 - tap : tap));
  }
  {
    const index_t from = x_begin - x_shift;
    const int count = x_shift + x_run;
    for (int start = LID_0 * VECTOR; start < count; start += AT_ONCE * THREADS * VECTOR) {
      acc_t v[AT_ONCE][VECTOR];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int i = start + j * THREADS * VECTOR;
        if (i < count && from + i + VECTOR <= (index_t)arg.x_size) LOAD_RUN(v[j], x, from + i)
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int i = start + j * THREADS * VECTOR;
        if (i >= count) continue;
        if (from + i + VECTOR <= (index_t)arg.x_size) LOCAL_STORE_RUN(in + i, v[j])
        else  // the array ends within the vector
          for (int e = 0; from + i + e < (index_t)arg.x_size; ++e) in[i + e] = LOAD(x, from + i + e);
      }
    }
  }
  local_barrier();

  EPILOGUE_FLAGS
  const int strips = (int)arg.strips, tasks = ((planes - 1) * strips + (rows + ROWS - 1) / ROWS) * q_end;
  for (int task = LID_0; task < tasks; task += THREADS) {
    const int row = divided(task, arg.by_q), column = task - row * q_end, plane = divided(row, arg.by_strips), p = p0 + (row - plane * strips) * ROWS;
    const int k = first + plane - divided(first + plane, arg.by_k) * k_all, h = p * STRIDE - pad_h, left_w = column * STRIDE - pad_w;
    const int of_x = OVER(first + plane, OF_LAYER(MULTIPLIER, multiplier), by_multiplier) - x_first;
    acc_t taps[R * S], sum[ROWS];
#pragma unroll
    for (int i = 0; i < R * S; ++i) taps[i] = filter[plane * (R * S) + i];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) sum[i] = 0;
    int at = x_shift + of_x * x_plane + (h - h0) * w_end + left_w;
#pragma unroll
    for (int j = 0; j < MEETS; ++j) {  // row h + j of x
      if (h + j >= 0 && h + j < h_end) {
        acc_t v[S];
#pragma unroll
        for (int s = 0; s < S; ++s) v[s] = left_w + s >= 0 && left_w + s < w_end ? in[at + s] : (acc_t)0;
#pragma unroll
        for (int r = 0; r < R; ++r)
          if (j >= r && (j - r) % STRIDE == 0 && (j - r) / STRIDE < ROWS) {
#if DTYPE >= 32
            acc_t part = v[0] * taps[r * S];
#pragma unroll
            for (int s = 1; s < S; ++s) part += v[s] * taps[r * S + s];
            sum[(j - r) / STRIDE] += part;
#else  // rounding the result loses more
#pragma unroll
            for (int s = 0; s < S; ++s) sum[(j - r) / STRIDE] += v[s] * taps[r * S + s];
#endif
          }
      }
      at += w_end;
    }
    const acc_t times = SCALE_OF(k), plus = BIAS_OF(k);
    const int place = plane * y_plane + (p - p0) * q_end + column;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const acc_t r = p + i < p0 + rows ? RESIDUAL_AT(y_begin + place + i * q_end) : NOTHING;
      FINISH(sum[i], times, plus, r)
    }
    ACTIVATE(sum, ROWS)
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      if (p + i < p0 + rows) out[y_shift + place + i * q_end] = sum[i];
  }
  local_barrier();

  const index_t to = y_begin - y_shift;
  for (int i = LID_0 * VECTOR; i < y_shift + y_run; i += THREADS * VECTOR) {
    if (i >= y_shift && i + VECTOR <= y_shift + y_run) {
      acc_t v[VECTOR];
      LOCAL_LOAD_RUN(v, out + i)
      STORE_RUN(y, to + i, v)
    } else {  // the rest of the vector belongs to others
      for (int e = 0; e < VECTOR; ++e)
        if (i + e >= y_shift && i + e < y_shift + y_run) STORE(y, to + i + e, out[i + e]);
    }
  }
}
