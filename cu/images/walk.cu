// walk.cu: short filters of images without shared memory: along rows and columns, or of both at once.
//
//   y[n, p, q] = sum over r of f_h[r] * (sum over s of f_w[s] * x[n, p + r - pad_h, q + s - pad_w])       or, with arg.dense,
//   y[n, p, q] = sum over r,s of f[r, s] * x[n, p + r - pad_h, q + s - pad_w]
//
// A warp walks down a strip of 128 columns. Of each row a thread loads four numbers, the neighbours' come by shuffles, and what the last rows gave stays in
// registers. Rows are loaded AHEAD of their turn; no warp waits for another.
//
// Mapping  warp -> tile_p rows of 128 columns of one slice of one image; THREADS / 32 * GID_0 + warp = ((image * slices + slice) * strips down + strip) * strips
//          across + column of strips. lane -> four neighbouring columns; lanes 0 and 31 load the neighbours beyond the strip, too.
// Memory   registers: the filters, each in 2 REACH + 1 places, of which some may be 0; a row for each of these places, filtered, or of a filter of both axes
//          with the neighbours beside it; AHEAD rows as they lie.
//
// A place without a tap is multiplied by 0. Where that leaves NaN, in windows that are not finite, the result is summed again of the filter's own taps,
// of a filter of both axes of those that are not 0: see correlate.cu, as which its taps come.
//
// By hand: nvcc -cubin -I cu cu/images/walk.cu
#include "images/registers.cuh"

#define AHEAD 3
typedef decltype(load_quad((const in_t*)0)) Quad;
typedef struct Row {
  Quad own, beyond;  // a lane's four columns; of lane 0 those before the strip, of lane 31 those behind it
  in_t shown[4];     // the same of a lane whose columns are not all inside of the image, found one by one
} Row;

template <int REACH, bool DENSE> WITHIN_KERNEL void walk(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous, out_t* RESTRICT y,
                                             const WindowArguments& arg, const Tile& at) {
  const int PLACES = 2 * REACH + 1, WIDTH = DENSE ? 4 + 2 * REACH : 4;
  const int lane = LID_0 & 31, q = at.q + 4 * lane, h = (int)arg.h, w = (int)arg.w, joins = (int)(arg.square | arg.add | arg.root);
  const bool own = q < w;
  const in_t* const image = x + at.x + at.o * (index_t)arg.x_d;
  auto tap = [&](int r, int s) { return filters[(s / LANES * (int)arg.r + r) * LANES + s % LANES]; };
  acc_t f_h[PLACES], f_w[PLACES], f[PLACES][PLACES];
#pragma unroll
  for (int k = 0; k < PLACES; ++k) {
    const int s = k - REACH + (int)arg.pad_w;
    const bool there = s >= 0 && s < (int)arg.s;
    if (DENSE) {
#pragma unroll
      for (int r = 0; r < PLACES; ++r) f[r][k] = there && r < (int)arg.r ? tap(r, s) : 0;
    } else {
      f_h[k] = k < (int)arg.r ? filters[k] : 0;
      f_w[k] = there ? filters[arg.r + s] : 0;
    }
  }
  // Far columns: of lane 0 those before the strip, of lane 31 those behind it, and of a lane beyond the image's edge its own. A strip at an edge finds them.
  const int first = lane == 0 ? q - 4 : own ? q + 4 : q;
  const bool at_edge = at.q == 0 || at.q + 128 >= w, far = lane == 0 || lane == 31 || !own, inside = far && first >= 0 && first < w;
  int source[4];
  bool outside[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    source[j] = MAPPED(first + j, w, w);
    outside[j] = IS_OUTSIDE(first + j, w, w);
  }
  const int top = at.p - (int)arg.pad_h, end = (int)arg.p - at.p < (int)arg.tile_p ? (int)arg.p - at.p : (int)arg.tile_p, total = end + 2 * REACH;
  const int most = top + end + (int)arg.r - 2;  // the last row that a tap meets
  const bool strange_rows = arg.outside_h && (top < 0 || most >= h);
  const bool aligned = is_aligned(x, 4 * (int)sizeof(in_t)) && arg.y_fours && is_aligned(y, 4 * (int)sizeof(out_t));
  auto fetch = [&](Row& to, int i) {
    const int wanted = top + i < most ? top + i : most, row = (unsigned)wanted < (unsigned)h ? wanted : MAPPED(wanted, h, h);
    const in_t* const line = image + row * (index_t)arg.x_h;
    if (own) to.own = load_quad(line + q);
    if (inside) to.beyond = load_quad(line + first);
    if (at_edge && far && !inside) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to.shown[j] = line[source[j]];
    }
  };
  Row ahead[AHEAD];
  acc_t rows[PLACES][WIDTH], strange = 0;  // NaN once a result was NaN or infinite
  if (aligned) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(ahead[i], i);
  }

  for (int begin = 0; aligned && begin < total; begin += PLACES) {
#pragma unroll
    for (int k = 0; k < PLACES; ++k) {
      const int i = begin + k;
      if (i >= total) break;
      acc_t v[12], four[4], beyond[4];  // v[4 + j] is the number of column q + j
      to_four(four, ahead[k % AHEAD].own, x);
      to_four(beyond, ahead[k % AHEAD].beyond, x);
      if (at_edge) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (!inside) beyond[j] = outside[j] ? OUTSIDE_VALUE : (acc_t)ahead[k % AHEAD].shown[j];
          four[j] = own ? four[j] : beyond[j];
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[4 + j] = four[j];
        if (j >= 4 - REACH) {
          v[j] = __shfl_up_sync(0xffffffffu, four[j], 1);
          v[j] = lane == 0 ? beyond[j] : v[j];
        }
        if (j < REACH) {
          v[8 + j] = __shfl_down_sync(0xffffffffu, four[j], 1);
          v[8 + j] = lane == 31 ? beyond[j] : v[8 + j];
        }
      }
      if (strange_rows && IS_OUTSIDE(top + i < most ? top + i : most, h, h)) {
#pragma unroll
        for (int j = 4 - REACH; j < 8 + REACH; ++j) v[j] = OUTSIDE_VALUE;
      }
      fetch(ahead[k % AHEAD], i + AHEAD);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        acc_t sum = v[4 - REACH + j];
        if (!DENSE) {
          sum *= f_w[0];
#pragma unroll
          for (int s = 1; s < PLACES; ++s) sum = v[4 - REACH + (j + s) % (4 + 2 * REACH)] * f_w[s] + sum;  // j + s is never beyond
        }
        rows[k][j] = sum;
      }
      if (i < 2 * REACH || !own) continue;
      acc_t sums[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[j] = 0;
#pragma unroll
        for (int r = 0; r < PLACES; ++r) {
          if (DENSE) {
#pragma unroll
            for (int s = 0; s < PLACES; ++s) sums[j] = rows[(k + 1 + r) % PLACES][(j + s) % WIDTH] * f[r][s] + sums[j];
          } else {
            sums[j] = r ? rows[(k + 1 + r) % PLACES][j] * f_h[r] + sums[j] : rows[(k + 1) % PLACES][j] * f_h[0];
          }
        }
        strange = sums[j] * 0 + strange;
      }
      const index_t there = at.y + (at.p + i - 2 * REACH) * (index_t)arg.y_h + q;
      if (joins) {
        store_lanes<true>(y, previous, arg, there, 4, true, sums);
      } else {
        store_whole(y + there, sums);
      }
    }
  }
  if (!own || (aligned && strange == 0)) return;

  // Again, of the filters' own taps in the same order; and first, if rows do not lie as they are read.
#pragma unroll 1
  for (int p = at.p; p < at.p + end; ++p) {
    acc_t sums[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int r = 0; r < (int)arg.r; ++r) {
      const int row = p + r - (int)arg.pad_h;
      const in_t* const line = image + MAPPED(row, h, h) * (index_t)arg.x_h;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        acc_t sum = 0;
#pragma unroll 1
        for (int s = 0; s < (int)arg.s; ++s) {
          const int column = q + j + s - (int)arg.pad_w;
          const acc_t met = IS_OUTSIDE(row, h, h) || IS_OUTSIDE(column, w, w) ? OUTSIDE_VALUE : (acc_t)line[MAPPED(column, w, w)];
          if (!DENSE) {
            sum += filters[arg.r + s] * met;
          } else if (tap(r, s) != 0) {
            sums[j] += tap(r, s) * met;
          }
        }
        if (!DENSE) sums[j] += filters[r] * sum;
      }
    }
    store_lanes<true>(y, previous, arg, at.y + p * (index_t)arg.y_h + q, 4, aligned, sums);
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 4) void images_walk(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous, out_t* RESTRICT y,
                                                  const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  const int strip = THREADS / 32 * (int)GID_0 + (LID_0 >> 5);
  if (strip >= (int)arg.strips) return;
  const Tile at = tile_of(arg, strip);
  if (arg.dense) {
    walk<1, true>(x, filters, previous, y, arg, at);
  } else if (arg.reach == 1) {
    walk<1, false>(x, filters, previous, y, arg, at);
  } else {
    walk<4, false>(x, filters, previous, y, arg, at);
  }
}
