// wgrad.cu: wgrad for few channels a group, above all depthwise.
//
//   w[k,c,o,p,q] = sum over n,t,r,s of x[n, g*images + c, o*stride_d - pad_d + t*dil_d, p*stride_h - pad_h + r*dil_h,
//                                       q*stride_w - pad_w + s*dil_w] * y[n,k,t,r,s],   g = k / kg
//
// The letters are those of the convolution that it is launched as (ConvProblem.launched): y, the gradient of the result, is a
// filter of t x r x s taps there, the filter's o x p x q taps are the pixels, x's C/groups channels the images and its N = cg images
// the channels. direct/gemm.cu computes the same, but in tiles of 64 k by 64 (c,o,p,q), which a group of one channel leaves nearly empty.
//
// Sizes    They are arguments. Q may be defined, for o = 1, TAPS = p * Q and strides of 1: then no table of taps is needed. With LAYER,
//          all numbers but the sizes of x and y and what follows from these are constants, and one chunk of taps needs no table.
// Mapping  block -> FILTERS k of a group, one c, TAPS of the (o,p,q), and one of `slices` runs of the pixels of y, numbered
//          n*t*r*s + t*r*s + r*s + s; GID_0 = ((k block * images + c) * chunks of taps + chunk) * slices + slice.
//          thread -> every THREADS-th pixel of its run: FILTERS values of y meet TAPS of x, which neighbouring threads read as neighbours.
//          A run does not end with an image, so that a single large image fills the GPU, and planes of few pixels fill their blocks.
// Memory   registers: FILTERS * TAPS sums. Shared: the offset of each of TAPS, and [TAPS][THREADS] sums at the end, added in two steps, in pairs,
//          always in the same order. They lie so that threads which read at once use different banks.
//          With slices > 1 each slice writes its part to a workspace [slices][size of w] and direct/reduce.cu adds them.
// Border   BORDERED texts load the pixel that stands outside of x.
//
// By hand: nvcc -cubin -I cu cu/direct/wgrad.cu
#include "core/portable.cuh"
#include "core/near_border.cuh"

#ifndef THREADS
#define THREADS 128
#define TAPS 9
#define FILTERS 1
#endif
#ifndef BORDERED
#define BORDERED 0
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct WgradArguments {
  long_t slices, by_slices, chunks, by_chunks, images, by_images;
  long_t groups, kg, k_blocks, by_k_blocks;           // k_blocks of FILTERS k form a group
  long_t total, run;                                  // pixels of all images of y; pixels of a slice, fewer in the last one
  long_t d, h, w;                                     // size of x
  long_t pixels, by_pixels, by_rs, r, s, by_s;        // of an image of y: t * r * s
  long_t taps, by_pq, p, q, by_q;                     // of the filter: o * p * q
  long_t stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w;
  long_t side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;  // with BORDERED: what stands outside of x (near_border.cuh)
} WgradArguments;

#if defined(LAYER) && CHUNKS == 1  // tap i's offset is known
#define TAP_D(i) ((i) / (P * Q) * STRIDE_D)
#define TAP_H(i) ((i) / Q % P * STRIDE_H)
#define TAP_W(i) ((i) % Q * STRIDE_W)
#elif !defined(LAYER) && defined(Q)
#define TAP_D(i) 0
#define TAP_H(i) ((i) / Q)
#define TAP_W(i) ((i) % Q)
#endif
#ifndef AXES
#define AXES 3
#endif
#if BORDERED && defined(TAP_W) && (!defined(LAYER) || (AXES < 3 && TAPS == P * Q))  // taps are those of one slice of the filter
#define IN_ROWS
#define ACROSS Q
#endif

#define PARTS 8  // parts in which a tap's sums are added first
#define OF_PART (THREADS / PARTS)
// the offset of a thread's sum: each part is followed by one unused number
#define PLACE(tap, thread) ((tap) * (THREADS + PARTS) + (thread) + (thread) / OF_PART)
// Adds `count` numbers, a power of two, into v[0]. In pairs, log2(count) roundings follow one another; in a chain, count - 1.
#define ADD_IN_PAIRS(v, count)                                            \
  _Pragma("unroll") for (int half_ = (count) / 2; half_ > 0; half_ /= 2)  \
  _Pragma("unroll") for (int j_ = 0; j_ < half_; ++j_) (v)[j_] += (v)[j_ + half_];

// A tap's offset from the first element that a pixel of y reads.
typedef struct ALIGNED Tap {
  int d, h, w;
  index_t x;
} Tap;

#if DTYPE < 32
#define STORE_SUM(at, v)                                             \
  {                                                                  \
    if (arg.slices > 1) ((GLOBAL_MEM acc_t*)w)[at] = (v);            \
    else STORE(w, at, v);                                            \
  }
#else
#define STORE_SUM(at, v) STORE(w, at, v);
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_wgrad(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT y,
                                                   GLOBAL_MEM data_t* RESTRICT w, const WgradArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[TAPS * (THREADS + PARTS)];
  const int d_end = AXES < 3 ? 1 : (int)arg.d, h_end = AXES < 2 ? 1 : (int)arg.h, w_end = (int)arg.w, pixels = (int)arg.pixels;
  const int groups = OF_LAYER(GROUPS, groups), kg = OF_LAYER(KG, kg), images = OF_LAYER(IMAGES, images), chunks = OF_LAYER(CHUNKS, chunks);
  const int k_blocks = OF_LAYER(K_BLOCKS, k_blocks), taps = OF_LAYER(ALL_TAPS, taps);
  const int dil_d = OF_LAYER(DIL_D, dil_d), dil_h = OF_LAYER(DIL_H, dil_h), dil_w = OF_LAYER(DIL_W, dil_w);
  const int of_slice = divided((int)GID_0, arg.by_slices), slice = (int)GID_0 - of_slice * (int)arg.slices;
  const int of_chunk = OVER(of_slice, chunks, by_chunks), first_tap = (of_slice - of_chunk * chunks) * TAPS;
  const int k_block = OVER(of_chunk, images, by_images), c = of_chunk - k_block * images;
  const int g = OVER(k_block, k_blocks, by_k_blocks), k0 = (k_block - g * k_blocks) * FILTERS;  // k0: in the group
#ifndef TAP_W
  LOCAL_MEM Tap places[TAPS];
  for (int i = LID_0; i < TAPS; i += THREADS) {
    const int p_end = OF_LAYER(P, p), q_end = OF_LAYER(Q, q);
    const int tap = first_tap + i, o = OVER(tap, p_end * q_end, by_pq), row = OVER(tap, q_end, by_q);
    Tap place;
    place.d = o * OF_LAYER(STRIDE_D, stride_d);
    place.h = (row - o * p_end) * OF_LAYER(STRIDE_H, stride_h);
    place.w = (tap - row * q_end) * OF_LAYER(STRIDE_W, stride_w);
    place.x = (place.d * (index_t)h_end + place.h) * w_end + place.w;
    places[i] = place;
  }
  local_barrier();
#endif
  acc_t sum[FILTERS][TAPS];
#pragma unroll
  for (int f = 0; f < FILTERS; ++f)
#pragma unroll
    for (int i = 0; i < TAPS; ++i) sum[f][i] = 0;
  index_t k_plane[FILTERS];  // offset in an image; a filter past the end repeats the last one, and is not stored
#pragma unroll
  for (int f = 0; f < FILTERS; ++f) k_plane[f] = (g * kg + (k0 + f < kg ? k0 + f : kg - 1)) * (index_t)pixels;
  const index_t x_image = (index_t)d_end * h_end * w_end, first = slice * (index_t)arg.run;
  const index_t last = (index_t)arg.total - first < (index_t)arg.run ? (index_t)arg.total : first + (index_t)arg.run;
  for (index_t number = first + LID_0; number < last; number += THREADS) {
    const index_t n = DIVIDED(number, pixels, arg.by_pixels);
    const int pixel = (int)(number - n * pixels);
    const index_t y_pixel = n * (index_t)(groups * kg) * pixels + pixel;
    acc_t v[FILTERS];
#pragma unroll
    for (int f = 0; f < FILTERS; ++f) v[f] = LOAD(y, y_pixel + k_plane[f]);
    const int t = AXES < 3 ? 0 : divided(pixel, arg.by_rs), row = AXES < 2 ? 0 : divided(pixel, arg.by_s);
    const int d0 = t * dil_d - OF_LAYER(PAD_D, pad_d), h0 = (row - t * (int)arg.r) * dil_h - OF_LAYER(PAD_H, pad_h);
    const int w0 = (pixel - row * (int)arg.s) * dil_w - OF_LAYER(PAD_W, pad_w);
#if BORDERED
    const index_t plane = (n * (index_t)(groups * images) + g * images + c) * x_image;
#ifdef IN_ROWS  // the rows and columns that the taps read: all loads of a pixel are then under way at once
    int row_at[TAPS / ACROSS], column_at[ACROSS];
    const int shown_d = near_pixel(d0, d_end, arg.side_d, arg.last_side_d);
#pragma unroll
    for (int i = 0; i < TAPS / ACROSS; ++i) {
      const int shown = near_pixel(h0 + TAP_H(i * ACROSS), h_end, arg.side_h, arg.last_side_h);
      row_at[i] = (shown_d | shown) < 0 ? -1 : (shown_d * h_end + shown) * w_end;
    }
#pragma unroll
    for (int i = 0; i < ACROSS; ++i) column_at[i] = near_pixel(w0 + TAP_W(i), w_end, arg.side_w, arg.last_side_w);
#endif
#else
    const index_t corner = (n * (index_t)(groups * images) + g * images + c) * x_image + (d0 * (index_t)h_end + h0) * w_end + w0;
#endif
#ifndef TAP_W
    int table = 0;  // else the compiler would keep the table in registers
    HIDE(table)
#endif
#pragma unroll
    for (int i = 0; i < TAPS; ++i) {
      acc_t u = 0;
#if BORDERED && defined(IN_ROWS)
      const int shown = row_at[i / ACROSS] + column_at[i % ACROSS], there = (row_at[i / ACROSS] | column_at[i % ACROSS]) >= 0;
      u = LOAD(x, plane + (there ? shown : 0));
      u = there ? u : 0;
#elif BORDERED
#ifdef TAP_W
      const int at_d = d0 + TAP_D(i), at_h = h0 + TAP_H(i), at_w = w0 + TAP_W(i);
#else
      const int at_d = d0 + places[table + i].d, at_h = h0 + places[table + i].h, at_w = w0 + places[table + i].w;
#endif
      const int shown_d = near_pixel(at_d, d_end, arg.side_d, arg.last_side_d), shown_h = near_pixel(at_h, h_end, arg.side_h, arg.last_side_h);
      const int shown_w = near_pixel(at_w, w_end, arg.side_w, arg.last_side_w);
      if ((shown_d | shown_h | shown_w) >= 0) u = LOAD(x, plane + (shown_d * (index_t)h_end + shown_h) * w_end + shown_w);
#elif defined(TAP_W)
      const index_t x_row = corner + (TAP_D(i) * (index_t)h_end + TAP_H(i)) * w_end;
      if ((unsigned)(d0 + TAP_D(i)) < (unsigned)d_end && (unsigned)(h0 + TAP_H(i)) < (unsigned)h_end && (unsigned)(w0 + TAP_W(i)) < (unsigned)w_end)
        u = LOAD(x + TAP_W(i), x_row);
#else
      const Tap place = places[table + i];
      if ((unsigned)(d0 + place.d) < (unsigned)d_end && (unsigned)(h0 + place.h) < (unsigned)h_end && (unsigned)(w0 + place.w) < (unsigned)w_end)
        u = LOAD(x, corner + place.x);
#endif
#pragma unroll
      for (int f = 0; f < FILTERS; ++f) sum[f][i] += v[f] * u;
    }
  }
#pragma unroll
  for (int f = 0; f < FILTERS; ++f) {
#pragma unroll
    for (int i = 0; i < TAPS; ++i) sums[PLACE(i, LID_0)] = sum[f][i];
    local_barrier();
    for (int i = LID_0; i < TAPS * PARTS; i += THREADS) {
      acc_t part[OF_PART];
#pragma unroll
      for (int j = 0; j < OF_PART; ++j) part[j] = sums[i * (OF_PART + 1) + j];
      ADD_IN_PAIRS(part, OF_PART)
      sums[i * (OF_PART + 1)] = part[0];  // no other thread reads these
    }
    local_barrier();
    for (int i = LID_0; i < TAPS; i += THREADS)
      if (first_tap + i < taps && k0 + f < kg) {
        acc_t part[PARTS];
#pragma unroll
        for (int j = 0; j < PARTS; ++j) part[j] = sums[PLACE(i, j * OF_PART)];
        ADD_IN_PAIRS(part, PARTS)
        const index_t filter = (slice * (index_t)(groups * kg) + g * kg + k0 + f) * (index_t)images + c;
        STORE_SUM(filter * (index_t)taps + first_tap + i, part[0])
      }
    local_barrier();
  }
}
