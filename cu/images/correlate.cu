// correlate.cu: a filter of up to three axes over images or volumes.
//
//   y[n, o, p, q] = sum over t,r,s of f[t, r, s] * x[n, o + t - pad_d, p + r - pad_h, q + s - pad_w]
//
// A tap that is 0 meets nothing: a NaN or an infinity under it does not spread, as in scipy.ndimage.correlate. A tile whose window has such numbers goes tap by tap.
//
// Mapping  block -> tile_p x tile_q numbers of one slice of one image; GID_0 = ((image * slices + slice) * tiles down + tile row) * tiles across + tile column.
//          thread -> 4 rows of LANES neighbouring columns of one colour: four in float32, two in float64. LANES neighbouring taps of a row of the filter meet
//          them at a time, going down the filter: 64 multiplications, for which a thread loads 32 bytes of the window and 16 of taps.
// Memory   shared: the filter, [t][s / LANES][r][LANES], which comes so, with taps of 0 behind the last; the windows of the t slices that the tile reads,
//          [t][colour][halo_p][pitch]. Colours are taken apart, so that columns are neighbours.
//
// By hand: nvcc -cubin -I cu cu/images/correlate.cu
#include "images/registers.cuh"

// sums[i][lane] += sum over j < r, n < N of taps[j][n] * from[(i + j) * pitch + lane + n]. Four rows slide through registers; what four rows of taps give is
// summed by itself, which keeps more digits. No number is multiplied that the filter does not meet.
template <int N, bool WHOLE, class Load> WITHIN_KERNEL void add_four_rows(acc_t (&sums)[4][LANES], acc_t (&v)[4][2 * LANES], const Lanes* taps, int first,
    int left, const Load& load) {
  acc_t part[4][LANES];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (!WHOLE && j && j >= left) break;
    load(v[(j + 3) & 3], first + j + 3);
    const Lanes tap = taps[first + j];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
          const acc_t more = v[(i + j) & 3][lane + n];
          part[i][lane] = j == 0 && n == 0 ? more * tap.of[0] : more * tap.of[n] + part[i][lane];
        }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) sums[i][lane] += part[i][lane];
}

template <int N> WITHIN_KERNEL void add_taps(acc_t (&sums)[4][LANES], const acc_t* from, int pitch, const Lanes* taps, int r) {
  acc_t v[4][2 * LANES];
  auto load = [&](acc_t(&to)[2 * LANES], int row) {
    *(Lanes*)to = *(const Lanes*)(from + row * pitch);
    if (N > 1) *(Lanes*)(to + LANES) = *(const Lanes*)(from + row * pitch + LANES);
  };
#pragma unroll
  for (int i = 0; i < 3; ++i) load(v[i], i);
  for (int first = 0; first < r; first += 4) {
    if (r - first >= 4) {
      add_four_rows<N, true>(sums, v, taps, first, 4, load);
    } else {
      add_four_rows<N, false>(sums, v, taps, first, r - first, load);
    }
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 5) void images_correlate(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous, out_t* RESTRICT y,
                                                       const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) acc_t room[];
  const Tile at = tile_of(arg, (int)GID_0);
  const int taps_d = (int)arg.t, taps_h = (int)arg.r, taps_w = (int)arg.s, groups = (taps_w + LANES - 1) / LANES, pitch = (int)arg.pitch;
  const int colours = (int)arg.colours, halo_p = (int)arg.halo_p, halo_q = (int)arg.halo_q, plane = halo_p * pitch, slice = colours * plane;
  const int quarter = (int)arg.tile_q / LANES, last = (int)arg.q - at.q;
  const int h0 = at.p - (int)arg.pad_h, w0 = divided(at.q, arg.by_colours) - (int)arg.pad_w;
  acc_t* const window = room + taps_d * groups * taps_h * LANES;
  const bool fours = arg.y_fours && is_aligned(y, LANES * (int)sizeof(out_t));

  for (int i = LID_0; i < taps_d * groups * taps_h * LANES; i += THREADS) room[i] = filters[i];
  for (int t = 0; t < taps_d; ++t) {
    const int depth = at.o + t - (int)arg.pad_d;
    load_columns(x + at.x + MAPPED(depth, (int)arg.d, d) * (index_t)arg.x_d, window + t * slice, pitch, arg, w0 * colours, LID_0 & 31, halo_q,
                 IS_OUTSIDE(depth, (int)arg.d, d), h0, halo_p, [&](int i) {
                   const int column = divided(i, arg.by_colours);
                   return (i - column * colours) * plane + column;
                 });
  }
  copies_arrived();
  local_barrier();
  bool tap_by_tap = false;
  if (arg.skip) {
    acc_t nothing = 0;
    for (int down = LID_0 >> 5; down < taps_d * colours * halo_p; down += THREADS / 32)
      for (int i = LID_0 & 31; i < halo_q / colours; i += 32) nothing += window[down * pitch + i] * 0;
    tap_by_tap = __syncthreads_or(nothing != nothing);
  }

  for (int task = LID_0; task < ((int)arg.tile_p >> 2) * quarter; task += THREADS) {
    const int four = divided(task, arg.by_quarter_q), place = task - four * quarter, group = divided(place, arg.by_colours), colour = place - group * colours;
    const int down = 4 * four, column = LANES * group, q = column * colours + colour;
    if (q >= last || at.p + down >= (int)arg.p) continue;
    const acc_t* const from = window + colour * plane + down * pitch + column;
    acc_t sums[4][LANES];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) sums[i][lane] = 0;
    for (int t = 0; t < taps_d; ++t)
      for (int g = 0; g < groups; ++g) {
        const acc_t* const here = from + t * slice + g * LANES;
        const acc_t* const taps = room + (t * groups + g) * taps_h * LANES;
        const int count = taps_w - g * LANES;
        if (tap_by_tap) {
          for (int tap = 0; tap < taps_h * LANES; ++tap) {
            const int j = tap / LANES, n = tap % LANES;
            if (taps[tap] == 0) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
              for (int lane = 0; lane < LANES; ++lane) sums[i][lane] += here[(i + j) * pitch + lane + n] * taps[tap];
          }
        } else if (count >= LANES) {
          add_taps<LANES>(sums, here, pitch, (const Lanes*)taps, taps_h);
        } else if (count == 1) {
          add_taps<1>(sums, here, pitch, (const Lanes*)taps, taps_h);
        } else if (count == 2) {
          add_taps<LANES / 2>(sums, here, pitch, (const Lanes*)taps, taps_h);
        } else {
          add_taps<LANES - 1>(sums, here, pitch, (const Lanes*)taps, taps_h);
        }
      }
    const index_t to = at.y + (at.p + down) * (index_t)arg.y_h + at.q + q;
    const int rows = (int)arg.p - at.p - down;
    if (colours == 1) {
      store_rows(y, previous, arg, to, (index_t)arg.y_h, rows, last - q, fours, sums);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) {
        acc_t one[LANES] = {sums[i][lane]};
        if (i < rows && q + lane * colours < last) store_lanes<true>(y, previous, arg, to + i * (index_t)arg.y_h + lane * colours, 1, false, one);
      }
  }
}
