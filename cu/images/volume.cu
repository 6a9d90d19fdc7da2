// volume.cu: filters along slices, rows and columns of volumes, in one launch.
//
//   y[n, o, p, q] = sum over t of f_d[t] * (sum over r of f_h[r] * (sum over s of f_w[s] * x[n, o + t - pad_d, p + r - pad_h, q + s - pad_w]))
//
// A block walks along the depth of a strip, eight slices at a time. It loads their windows, filters the rows, the columns of what that gives, and then along
// the depth what the last slices gave. So a volume is read once and written once.
//
// Mapping  block -> a strip of tile_d slices of tile_p x tile_q numbers; GID_0 = ((image * strips along the depth + strip) * tiles down + tile row) * tiles
//          across + column.
//          thread -> in the first pass 8 neighbours in four rows (float64: two), in the second 8 rows of four (two) columns of a slice, in the third as many
//          columns of 8 slices: see `slide`.
// Memory   shared: the filters, each with room for a multiple of 8; what the last t - 1 + 8 slices gave, [slice][tile_p][wide]; eight slices' filtered rows,
//          [slice][halo_p][wide]; their windows, [slice][halo_p][pitch]. After a step the last t - 1 slices move up.
//
// By hand: nvcc -cubin -I cu cu/images/volume.cu
#include "images/registers.cuh"

#define STEP 8  // slices

KERNEL LAUNCH_BOUNDS(THREADS, 3) void images_volume(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous, out_t* RESTRICT y,
    const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) acc_t room[];
  const Tile at = tile_of(arg, (int)GID_0);
  const int taps_d = (int)arg.t, taps_h = (int)arg.r, taps_w = (int)arg.s, more = taps_d - 1, pitch = (int)arg.pitch, wide = (int)arg.wide;
  const int tile_p = (int)arg.tile_p, tile_q = (int)arg.tile_q, colours = (int)arg.colours, halo_p = (int)arg.halo_p, slice = tile_p * wide;
  const int width = (int)arg.q - at.q < tile_q ? (int)arg.q - at.q : tile_q, height = (int)arg.p - at.p < tile_p ? (int)arg.p - at.p : tile_p;
  const int begin = at.o * (int)arg.tile_d, end = (int)arg.o_end - begin < (int)arg.tile_d ? (int)arg.o_end : begin + (int)arg.tile_d;
  acc_t* const f_d = room;
  acc_t* const f_h = f_d + (taps_d + 7) / 8 * 8;
  acc_t* const f_w = f_h + (taps_h + 7) / 8 * 8;
  acc_t* const slices = f_w + (taps_w + 7) / 8 * 8;
  acc_t* const across = slices + (more + STEP) * slice;
  acc_t* const loaded = across + STEP * halo_p * wide;
  const Columns columns = columns_of(x + at.x, arg, at.q, width + (taps_w - 1) * colours);
  const bool fours = arg.y_fours && is_aligned(y, LANES * (int)sizeof(out_t));
  const index_t y0 = at.y - at.o * (index_t)arg.y_d + at.p * (index_t)arg.y_h + at.q;

  for (int i = LID_0; i < taps_d; i += THREADS) f_d[i] = filters[i];
  for (int i = LID_0; i < taps_h; i += THREADS) f_h[i] = filters[taps_d + i];
  for (int i = LID_0; i < taps_w; i += THREADS) f_w[i] = filters[taps_d + taps_h + i];

  const int total = more + end - begin;  // slices of the window; the first t - 1 give no results yet
  auto slices_from = [&](int first) { const int left = (first < more ? more : total) - first; return left < STEP ? left : STEP; };

  for (int done = 0, count = 0;;) {  // `count` slices that were loaded before stand behind `done` others
    const int to = done < more ? done : more, next = done + count;
    copies_arrived();
    local_barrier();
    if (count) {
      if (colours == 1) {
        filter_rows<true>(loaded + columns.shift, across, f_w, arg, count * halo_p);
      } else {
        filter_rows<false>(loaded + columns.shift, across, f_w, arg, count * halo_p);
      }
      local_barrier();
    }
    if (next < total)
      for (int i = 0; i < slices_from(next); ++i) {
        const int depth = begin - (int)arg.pad_d + next + i;
        load_rows<false>(x + at.x + MAPPED(depth, (int)arg.d, d) * (index_t)arg.x_d, loaded + i * halo_p * pitch, pitch, arg, columns,
            IS_OUTSIDE(depth, (int)arg.d, d),
                         at.p - (int)arg.pad_h, halo_p);
      }
    for (int task = LID_0; task < count * (tile_p >> 3) * (tile_q / LANES); task += THREADS) {
      const int eight = divided(task, arg.by_quarter_q), q = (task - eight * (tile_q / LANES)) * LANES, one = eight / (tile_p >> 3),
          down = 8 * (eight - one * (tile_p >> 3));
      const acc_t* const from = across + (one * halo_p + down) * wide + q;
      acc_t sums[8][LANES];
      slide(sums, f_h, taps_h, [&](int i, acc_t(&v)[LANES]) { *(Lanes*)v = *(const Lanes*)(from + i * wide); });
#pragma unroll
      for (int i = 0; i < 8; ++i) *(Lanes*)(slices + (to + one) * slice + (down + i) * wide + q) = *(const Lanes*)sums[i];
    }
    if (next > more) {
      local_barrier();
      for (int task = LID_0; task < height * (tile_q / LANES); task += THREADS) {
        const int down = divided(task, arg.by_quarter_q), q = (task - down * (tile_q / LANES)) * LANES;
        if (q >= width) continue;
        const acc_t* const from = slices + down * wide + q;
        acc_t sums[8][LANES];
        slide(sums, f_d, taps_d, [&](int i, acc_t(&v)[LANES]) { *(Lanes*)v = *(const Lanes*)(from + i * slice); });
        const int o = begin + done - more;
        store_rows(y, previous, arg, y0 + o * (index_t)arg.y_d + down * (index_t)arg.y_h + q, (index_t)arg.y_d, count, width - q, fours, sums);
      }
      if (next == total) return;
      local_barrier();
      for (int first = 0; first < more; first += STEP) {  // the last t - 1 slices move up
        const int numbers = (more - first < STEP ? more - first : STEP) * (slice / LANES);
        Lanes* const above = (Lanes*)(slices + first * slice);
        for (int i = LID_0; i < numbers; i += THREADS) above[i] = above[i + STEP * (slice / LANES)];
        local_barrier();
      }
    }
    done = next;
    count = slices_from(next);
  }
}
