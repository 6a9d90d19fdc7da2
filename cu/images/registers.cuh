// images/registers.cuh: what the kernels for images have in common on a GPU: rows of a window in shared memory, sums of numbers that slide through registers, and
// how results are stored. Memory is read and written four neighbours at a time where rows allow that.
#pragma once
#include "images/window.cuh"

#define LANES (16 / (int)sizeof(acc_t))  // sums that shared memory gives at once
typedef struct ALIGNED Lanes {
  acc_t of[LANES];
} Lanes;

// ---- four neighbours of a row of x, which begin at a multiple of four, as they lie; and as sums

WITHIN_KERNEL float4 load_quad(const float* p) { return __ldg((const float4*)p); }
WITHIN_KERNEL unsigned load_quad(const uchar* p) { return __ldg((const unsigned*)p); }
WITHIN_KERNEL unsigned load_quad(const schar* p) { return __ldg((const unsigned*)p); }
WITHIN_KERNEL uint2 load_quad(const ushort* p) { return __ldg((const uint2*)p); }
WITHIN_KERNEL uint2 load_quad(const short* p) { return __ldg((const uint2*)p); }
// 2^23 and an integer below that, whose bits are the last of a float's: a conversion at the rate of additions.
WITHIN_KERNEL acc_t from_bits(unsigned bits, float zero) { return (acc_t)(__uint_as_float(bits) - zero); }
WITHIN_KERNEL void bytes_to_four(acc_t (&v)[4], unsigned word, float zero) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = from_bits(__byte_perm(word, 0x4b000000, 0x7440 + i), zero);
}
WITHIN_KERNEL void halves_to_four(acc_t (&v)[4], uint2 words, float zero) {
  v[0] = from_bits(__byte_perm(words.x, 0x4b000000, 0x7410), zero), v[1] = from_bits(__byte_perm(words.x, 0x4b000000, 0x7432), zero);
  v[2] = from_bits(__byte_perm(words.y, 0x4b000000, 0x7410), zero), v[3] = from_bits(__byte_perm(words.y, 0x4b000000, 0x7432), zero);
}
WITHIN_KERNEL void to_four(acc_t (&v)[4], float4 quad, const float*) { v[0] = quad.x, v[1] = quad.y, v[2] = quad.z, v[3] = quad.w; }
WITHIN_KERNEL void to_four(acc_t (&v)[4], unsigned quad, const uchar*) { bytes_to_four(v, quad, 8388608.f); }
WITHIN_KERNEL void to_four(acc_t (&v)[4], unsigned quad, const schar*) { bytes_to_four(v, quad ^ 0x80808080u, 8388608.f + 128); }
WITHIN_KERNEL void to_four(acc_t (&v)[4], uint2 quad, const ushort*) { halves_to_four(v, quad, 8388608.f); }
WITHIN_KERNEL void to_four(acc_t (&v)[4], uint2 quad, const short*) {
  halves_to_four(v, make_uint2(quad.x ^ 0x80008000u, quad.y ^ 0x80008000u), 8388608.f + 32768);
}
template <class In> WITHIN_KERNEL void load_four(acc_t (&v)[4], const In* p) { to_four(v, load_quad(p), p); }
WITHIN_KERNEL void load_four(acc_t (&v)[4], const double* p) {
  const double2 a = __ldg((const double2*)p), b = __ldg((const double2*)p + 1);
  v[0] = (acc_t)a.x, v[1] = (acc_t)a.y, v[2] = (acc_t)b.x, v[3] = (acc_t)b.y;
}

// ---- results

// The last bits of v + 1.5 * 2^23 are those of v rounded to the nearest integer, halves to even.
WITHIN_KERNEL unsigned rounded(float v, float least, float most) {
  v = v == v ? v : 0;
  return __float_as_uint(fminf(fmaxf(v, least), most) + 12582912.f);
}
#ifdef MOST
#define ROUNDED(v) rounded((float)(v), LEAST, MOST)
WITHIN_KERNEL void store_one(out_t* y, acc_t v) { *y = (out_t)ROUNDED(v); }
#else
#define ROUNDED(v) 0u
WITHIN_KERNEL void store_one(out_t* y, acc_t v) { *y = (out_t)v; }
#endif
WITHIN_KERNEL void store_whole(float* y, const acc_t (&v)[LANES]) { *(Lanes*)y = *(const Lanes*)v; }
WITHIN_KERNEL void store_whole(double* y, const acc_t (&v)[LANES]) { *(Lanes*)y = *(const Lanes*)v; }
WITHIN_KERNEL unsigned two_halves(unsigned low, unsigned high) { return __byte_perm(low, high, 0x5410); }
WITHIN_KERNEL void store_whole(ushort* y, const acc_t (&v)[LANES]) {
  *(uint2*)y = make_uint2(two_halves(ROUNDED(v[0]), ROUNDED(v[1])), two_halves(ROUNDED(v[LANES - 2]), ROUNDED(v[LANES - 1])));
}
WITHIN_KERNEL void store_whole(short* y, const acc_t (&v)[LANES]) { store_whole((ushort*)y, v); }
WITHIN_KERNEL void store_whole(uchar* y, const acc_t (&v)[LANES]) {
  const unsigned low = __byte_perm(ROUNDED(v[0]), ROUNDED(v[1]), 0x0040), high = __byte_perm(ROUNDED(v[LANES - 2]), ROUNDED(v[LANES - 1]), 0x0040);
  *(unsigned*)y = two_halves(low, high);
}
WITHIN_KERNEL void store_whole(schar* y, const acc_t (&v)[LANES]) { store_whole((uchar*)y, v); }

WITHIN_KERNEL bool is_aligned(const void* p, int bytes) { return ((size_t)p & (bytes - 1)) == 0; }

// Joins neighbouring sums with earlier ones if JOINED, and stores the first `count` of them. `fours`: y may be written LANES at once.
template <bool JOINED>
WITHIN_KERNEL void store_lanes(out_t* RESTRICT y, const acc_t* previous, const WindowArguments& arg, index_t at, int count, bool fours, acc_t (&v)[LANES]) {
  if (JOINED && (arg.square || arg.add || arg.root)) {
#pragma unroll
    for (int i = 0; i < LANES; ++i) {
      if (arg.square) v[i] *= v[i];
      if (arg.add && i < count) v[i] += previous[at + i];
      if (arg.root) v[i] = sqrt(v[i]);
    }
  }
  if (fours && count >= LANES) {
    store_whole(y + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < LANES; ++i)
      if (i < count) store_one(y + at + i, v[i]);
  }
}

// The same for a thread's ROWS rows, or slices, `apart` from one another, of which the first `rows` are inside.
template <int ROWS, bool JOINED = true>
WITHIN_KERNEL void store_rows(out_t* RESTRICT y, const acc_t* previous, const WindowArguments& arg, index_t at, index_t apart, int rows, int count,
    bool fours, acc_t (&v)[ROWS][LANES]) {
  if (fours && count >= LANES && rows >= ROWS && !(JOINED && (arg.square || arg.add || arg.root))) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) store_whole(y + at + i * apart, v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      if (i < rows) store_lanes<JOINED>(y, previous, arg, at + i * apart, count, fours, v[i]);
  }
}

// ---- windows

// Whether numbers of x are sums as they are: then they go to shared memory by copies that nobody waits for until `copies_arrived`.
#define AS_THEY_ARE (IN == DTYPE)

WITHIN_KERNEL void start_copy(acc_t* to, const in_t* from) {
#if AS_THEY_ARE && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
               ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "n"((int)sizeof(acc_t)), "r"((int)sizeof(acc_t)) : "memory");
#else
  *to = (acc_t)*from;
#endif
}
WITHIN_KERNEL void copies_arrived() {
#if AS_THEY_ARE && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
#endif
}

// The columns of a tile's window in x: the first number of a row, moved to a multiple of four unless numbers are copied as they are, and how far it was moved.
typedef struct Columns {
  int from, shift, count;
  bool fours;  // x may be read four numbers at a time
} Columns;

WITHIN_KERNEL Columns columns_of(const in_t* x, const WindowArguments& arg, int q0, int count) {
  Columns at;
  const int from = q0 - (int)arg.pad_w * (int)arg.colours;
  at.from = AS_THEY_ARE ? from : from & ~3;
  at.shift = from - at.from;
  at.count = count + at.shift;
  at.fours = arg.x_fours && is_aligned(x, 4 * (int)sizeof(in_t));
  return at;
}

// Begins to load numbers `first`, first + 32, ... below `count` of rows `row` to row + rows of the slice at x; number i of a row comes from from + i, and goes to
// there + place(i) in a row of `pitch` sums. A warp has 32 neighbours of every fourth row. A column is mapped once for all its rows.
template <class Place>
WITHIN_KERNEL void load_columns(const in_t* RESTRICT x, acc_t* RESTRICT to, int pitch, const WindowArguments& arg, int from, int first, int count, bool hidden,
                                                       int row, int rows, const Place& place) {
  const int colours = (int)arg.colours, columns = divided((int)arg.w, arg.by_colours), warp = LID_0 >> 5, front = (arg.pad_w > 0 ? (int)arg.pad_w : 0) + 3;
  const bool inside = row >= 0 && row + rows <= (int)arg.h;
  for (int i = first; i < count; i += 32) {
    int source = from + i;
    bool out = hidden;
    if (source < 0 || source >= (int)arg.w) {
      const int beyond = source + front * colours, column = divided(beyond, arg.by_colours);
      out = out || IS_OUTSIDE(column - front, columns, w);
      source = MAPPED(column - front, columns, w) * colours + beyond - column * colours;
    }
    acc_t* there = to + warp * pitch + place(i);
    if (inside && !out) {
      const in_t* line = x + (row + warp) * (index_t)arg.x_h + source;
#pragma unroll 8
      for (int down = warp; down < rows; down += THREADS / 32) {
        start_copy(there, line);
        there += THREADS / 32 * pitch;
        line += THREADS / 32 * (index_t)arg.x_h;
      }
    } else {
#pragma unroll 1
      for (int down = warp; down < rows; down += THREADS / 32, there += THREADS / 32 * pitch) {
        if (out || IS_OUTSIDE(row + down, (int)arg.h, h)) {
          *there = OUTSIDE_VALUE;
        } else {
          start_copy(there, x + MAPPED(row + down, (int)arg.h, h) * (index_t)arg.x_h + source);
        }
      }
    }
  }
}

// Begins to load `count` rows of the slice at x from `row` on to rows of `pitch` sums. With FOURS these begin at a multiple of four and nothing is moved.
// Numbers that are no sums as they are come four at a time where they lie so, 32 neighbours of four rows a warp: with an odd pitch no two of its lanes use the
// same bank.
template <bool FOURS>
WITHIN_KERNEL void load_rows(const in_t* RESTRICT x, acc_t* RESTRICT to, int pitch, const WindowArguments& arg, const Columns& at, bool hidden, int row, int count) {
  const int lane = LID_0 & 31;
  int done = 0;
#if !AS_THEY_ARE
  const int warp = LID_0 >> 5, before = at.from < 0 ? (3 - at.from) & ~3 : 0, behind = ((int)arg.w - at.from) & ~3, most = (at.count + 3) & ~3,
            last = behind < most ? behind : most;
  if (at.fours && !hidden && row >= 0 && row + count <= (int)arg.h && before < last) {
    for (int down = 4 * warp + (lane >> 3); down < count; down += THREADS / 8) {
      const in_t* const line = x + (row + down) * (index_t)arg.x_h + at.from;
      acc_t* const there = to + down * pitch;
#pragma unroll 5
      for (int i = before + 4 * (lane & 7); i < last; i += 32) {
        acc_t v[4];
        load_four(v, line + i);
        if (FOURS) {
#pragma unroll
          for (int j = 0; j < 4; j += LANES) *(Lanes*)(there + i + j) = *(const Lanes*)(v + j);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) there[i + j] = v[j];
        }
      }
    }
    load_columns(x, to, pitch, arg, at.from, lane, before, hidden, row, count, [](int i) { return i; });
    done = last;
  }
#endif
  load_columns(x, to, pitch, arg, at.from, done + lane, at.count, hidden, row, count, [](int i) { return i; });
}

// ---- sums

// Up to eight taps of `slide`: with WHOLE all eight, and nothing is asked between them.
template <bool WHOLE, class Load>
WITHIN_KERNEL void slide_eight(acc_t (&sums)[8][LANES], acc_t (&v)[8][LANES], const acc_t* taps, int first, int left, const Load& load) {
  acc_t tap[8], part[8][LANES];
#pragma unroll
  for (int t = 0; t < 8; t += LANES) *(Lanes*)(tap + t) = *(const Lanes*)(taps + first + t);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    if (!WHOLE && t && t >= left) break;
    load(first + t + 7, v[(t + 7) & 7]);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) part[i][lane] = t == 0 ? v[i][lane] * tap[0] : v[(t + i) & 7][lane] * tap[t] + part[i][lane];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) sums[i][lane] += part[i][lane];
}

// sums[i][lane] += sum over t < count of taps[t] * the number that load(t + i) gives to the lane, for eight i. Eight numbers slide through registers. Eight
// taps at a time are summed by themselves, which keeps more digits. No number is multiplied that the filter does not meet. `taps` has room for a multiple of eight.
template <class Load> WITHIN_KERNEL void slide(acc_t (&sums)[8][LANES], const acc_t* taps, int count, const Load& load) {
  acc_t v[8][LANES];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) sums[i][lane] = 0;
#pragma unroll
  for (int i = 0; i < 7; ++i) load(i, v[i]);
  for (int first = 0; first < count; first += 8) {
    const int left = count - first;
    if (left >= 8) {
      slide_eight<true>(sums, v, taps, first, 8, load);
    } else {
      slide_eight<false>(sums, v, taps, first, left, load);
    }
  }
}

// Filters `count` rows of `from` to those of `to`. With GREY there is one colour.
template <bool GREY> WITHIN_KERNEL void filter_rows(const acc_t* RESTRICT from, acc_t* RESTRICT to, const acc_t* taps, const WindowArguments& arg, int count) {
  const int pitch = (int)arg.pitch, wide = (int)arg.wide, tile_q = (int)arg.tile_q, colours = GREY ? 1 : (int)arg.colours;
  const int blocks = (count + 8 * LANES - 1) / (8 * LANES);
  for (int task = LID_0; task < blocks * tile_q; task += THREADS) {
    const int group = task >> 3, block = divided(group, arg.by_eighth_q), eight = group - block * (tile_q >> 3), down = block * 8 * LANES + (task & 7);
    const int eights = GREY ? eight : divided(eight, arg.by_colours), first = eights * 8 * colours + eight - eights * colours;
    const acc_t* rows[LANES];
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) rows[lane] = from + (down + 8 * lane) * pitch + first;
    acc_t sums[8][LANES];
    slide(sums, taps, (int)arg.s, [&](int i, acc_t(&v)[LANES]) {
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) v[lane] = rows[lane][i * colours];
    });
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
      acc_t* const there = to + (down + 8 * lane) * wide + first;
      if (down + 8 * lane >= count) continue;
      if (GREY) {
#pragma unroll
        for (int i = 0; i < 8; i += LANES) {
          Lanes some;
#pragma unroll
          for (int j = 0; j < LANES; ++j) some.of[j] = sums[i + j][lane];
          *(Lanes*)(there + i) = some;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) there[i * colours] = sums[i][lane];
      }
    }
  }
}
