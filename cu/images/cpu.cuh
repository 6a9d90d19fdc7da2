// images/cpu.cuh: what the kernels for images have in common on OpenCL, where a block is one work-item: windows, and vectors of neighbours of a row.
#pragma once
#include "images/window.cuh"

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
