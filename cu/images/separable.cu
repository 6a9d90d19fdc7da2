// separable.cu: a filter along rows and then one along columns, of images, in one launch.
//
//   y[n, p, q] = sum over r of f_h[r] * (sum over s of f_w[s] * x[n, p + r - pad_h, q + s - pad_w])
//
// A block walks down a strip of an image. It loads some rows, at the border by the formula of window.cuh, filters them, and filters the columns of what the last rows
// gave. Nothing between the two passes leaves shared memory, and nothing is rounded to a pixel's type between them. A row is filtered once a strip, whatever the
// filter's height. With r = 0 or s = 0 there is one pass alone.
//
// Mapping  block -> a strip of tile_p x tile_q numbers of one slice of one image, `step` rows at a time;
//          GID_0 = ((image * slices + slice) * strips down + strip) * strips across + column of strips.
//          thread -> in the first pass 8 neighbours of one colour in four rows (float64: two), 8 rows apart: with an odd pitch no two lanes of a warp use the same
//          bank. In the second pass 8 rows of four (two) neighbouring columns. Eight taps meet them in 256 multiplications, for which a thread loads eight times 16
//          bytes and the taps: see `slide`.
// Memory   shared: the filters, each with room for a multiple of 8; the filtered rows of which columns are made, r - 1 + step of `wide`; the rows that were loaded,
//          step of `pitch`. After a step the last r - 1 filtered rows move up.
//
// By hand: nvcc -cubin -I cu cu/images/separable.cu
#include "images/registers.cuh"

KERNEL LAUNCH_BOUNDS(THREADS, DTYPE == 64 ? 3 : 4) void images_separable(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous, out_t* RESTRICT y,
                                                                         const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) acc_t room[];
  const Tile at = tile_of(arg, (int)GID_0);
  const int taps_h = (int)arg.r, taps_w = (int)arg.s, more = taps_h ? taps_h - 1 : 0, step = (int)arg.step, pitch = (int)arg.pitch, wide = (int)arg.wide;
  const int tile_q = (int)arg.tile_q, colours = (int)arg.colours, width = (int)arg.q - at.q < tile_q ? (int)arg.q - at.q : tile_q;
  const int end = (int)arg.p - at.p < (int)arg.tile_p ? (int)arg.p : at.p + (int)arg.tile_p;
  acc_t* const f_h = room;
  acc_t* const f_w = f_h + (taps_h + 7) / 8 * 8;
  acc_t* const across = f_w + (taps_w + 7) / 8 * 8;
  acc_t* const loaded = across + (more + step) * wide;
  const in_t* const image = x + at.x + at.o * (index_t)arg.x_d;
  const Columns columns = columns_of(image, arg, at.q, width + (taps_w ? taps_w - 1 : 0) * colours);
  const bool fours = arg.y_fours && is_aligned(y, LANES * (int)sizeof(out_t));

  for (int i = LID_0; i < taps_h; i += THREADS) f_h[i] = filters[i];
  for (int i = LID_0; i < taps_w; i += THREADS) f_w[i] = filters[taps_h + i];

  const int total = more + end - at.p;  // rows of the window; the first r - 1 give no results yet
  auto rows_from = [&](int first) { const int left = (first < more ? more : total) - first; return left < step ? left : step; };

  for (int done = 0, count = 0;;) {  // `count` rows that were loaded before stand behind `done` others
    const int to = done < more ? done : more, next = done + count;
    copies_arrived();
    local_barrier();
    if (taps_w && count) {
      if (colours == 1) {
        filter_rows<true>(loaded + columns.shift, across + to * wide, f_w, arg, count);
      } else {
        filter_rows<false>(loaded + columns.shift, across + to * wide, f_w, arg, count);
      }
      local_barrier();
    }
    if (taps_w && next < total) load_rows<false>(image, loaded, pitch, arg, columns, false, at.p - (int)arg.pad_h + next, rows_from(next));
    if (next > more) {
      const int p = at.p + done - more;
      for (int task = LID_0; task < (step >> 3) * (tile_q / LANES); task += THREADS) {
        const int eight = divided(task, arg.by_quarter_q), q = (task - eight * (tile_q / LANES)) * LANES, down = 8 * eight;
        if (down >= count || q >= width) continue;
        const acc_t* const from = across + down * wide + q;
        auto take = [&](int i, acc_t(&v)[LANES]) { *(Lanes*)v = *(const Lanes*)(from + i * wide); };
        acc_t sums[8][LANES];
        if (taps_h) {
          slide(sums, f_h, taps_h, take);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) take(i, sums[i]);
        }
        store_rows(y, previous, arg, at.y + (p + down) * (index_t)arg.y_h + at.q + q, (index_t)arg.y_h, count - down, width - q, fours, sums);
      }
      if (next == total) return;
      local_barrier();
      for (int first = 0; first < more; first += step) {  // the last r - 1 rows move up
        const int numbers = (more - first < step ? more - first : step) * (wide / LANES);
        Lanes* const above = (Lanes*)(across + first * wide);
        for (int i = LID_0; i < numbers; i += THREADS) above[i] = above[i + step * (wide / LANES)];
        local_barrier();
      }
    }
    if (!taps_w) load_rows<true>(image, across + (next < more ? next : more) * wide, wide, arg, columns, false, at.p - (int)arg.pad_h + next, rows_from(next));
    done = next;
    count = rows_from(next);
  }
}
