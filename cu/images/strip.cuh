// images/strip.cuh: a filter along rows and then one along columns, by blocks that walk down strips of an image: the body of separable.cu and of sum.cu.
#pragma once
#include "images/registers.cuh"

template <class F> WITHIN_KERNEL void each(acc_t (&sums)[8][LANES], const F& change) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) sums[i][lane] = change(i, lane, sums[i][lane]);
}

// With SUM there are arg.t such filters, of as many taps each, whose results are added; with arg.square their squares are, and with arg.root y is the root of that.
template <bool SUM>
WITHIN_KERNEL void filter_strip(const in_t* RESTRICT x, const acc_t* RESTRICT filters, const acc_t* previous, out_t* RESTRICT y,
                                const WindowArguments& arg, acc_t* room) {
  const Tile at = tile_of(arg, (int)GID_0);
  const int taps_h = (int)arg.r, taps_w = (int)arg.s, more = taps_h ? taps_h - 1 : 0, step = (int)arg.step, pitch = (int)arg.pitch, wide = (int)arg.wide;
  const int tile_q = (int)arg.tile_q, colours = (int)arg.colours, width = (int)arg.q - at.q < tile_q ? (int)arg.q - at.q : tile_q;
  const int end = (int)arg.p - at.p < (int)arg.tile_p ? (int)arg.p : at.p + (int)arg.tile_p;
  const int terms = SUM ? (int)arg.t : 1, size_h = (taps_h + 7) / 8 * 8, size_w = (taps_w + 7) / 8 * 8, region = (more + step) * wide;
  acc_t* const f_h = room;
  acc_t* const f_w = f_h + terms * size_h;
  acc_t* const across = f_w + terms * size_w;
  acc_t* const loaded = across + terms * region;
  const in_t* const image = x + at.x + at.o * (index_t)arg.x_d;
  const Columns columns = columns_of(image, arg, at.q, width + (taps_w ? taps_w - 1 : 0) * colours);
  const bool fours = arg.y_fours && is_aligned(y, LANES * (int)sizeof(out_t));

  for (int term = 0; term < terms; ++term) {
    for (int i = LID_0; i < taps_h; i += THREADS) f_h[term * size_h + i] = filters[term * (taps_h + taps_w) + i];
    for (int i = LID_0; i < taps_w; i += THREADS) f_w[term * size_w + i] = filters[term * (taps_h + taps_w) + taps_h + i];
  }

  const int total = more + end - at.p;  // rows of the window; the first r - 1 give no results yet
  auto rows_from = [&](int first) { const int left = (first < more ? more : total) - first; return left < step ? left : step; };

  for (int done = 0, count = 0;;) {  // `count` rows that were loaded before stand behind `done` others
    const int to = done < more ? done : more, next = done + count;
    copies_arrived();
    local_barrier();
    if (taps_w && count) {
      for (int term = 0; term < terms; ++term)
        if (colours == 1) {
          filter_rows<true>(loaded + columns.shift, across + term * region + to * wide, f_w + term * size_w, arg, count);
        } else {
          filter_rows<false>(loaded + columns.shift, across + term * region + to * wide, f_w + term * size_w, arg, count);
        }
      local_barrier();
    }
    if (taps_w && next < total) load_rows<false>(image, loaded, pitch, arg, columns, false, at.p - (int)arg.pad_h + next, rows_from(next));
    if (next > more) {
      const int p = at.p + done - more;
      for (int task = LID_0; task < (step >> 3) * (tile_q / LANES); task += THREADS) {
        const int eight = divided(task, arg.by_quarter_q), q = (task - eight * (tile_q / LANES)) * LANES, down = 8 * eight;
        if (down >= count || q >= width) continue;
        const index_t there = at.y + (p + down) * (index_t)arg.y_h + at.q + q;
        const acc_t* from = across + down * wide + q;
        auto take = [&](int i, acc_t(&v)[LANES]) { *(Lanes*)v = *(const Lanes*)(from + i * wide); };
        acc_t sums[8][LANES];
        if (!SUM && !taps_h) {
#pragma unroll
          for (int i = 0; i < 8; ++i) take(i, sums[i]);
        } else {
          slide(sums, f_h, taps_h, take);
        }
        if (SUM) {
          if (arg.square) each(sums, [](int, int, acc_t v) { return v * v; });
#pragma unroll 1
          for (int term = 1; term < terms; ++term) {
            from += region;
            acc_t more_sums[8][LANES];
            slide(more_sums, f_h + term * size_h, taps_h, take);
            each(sums, [&](int i, int lane, acc_t v) { return v + more_sums[i][lane] * (arg.square ? more_sums[i][lane] : 1); });
          }
          if (arg.root) each(sums, [](int, int, acc_t v) { return (acc_t)sqrt(v); });
          store_rows<8, false>(y, previous, arg, there, (index_t)arg.y_h, count - down, width - q, fours, sums);
        } else {
          store_rows(y, previous, arg, there, (index_t)arg.y_h, count - down, width - q, fours, sums);
        }
      }
      if (next == total) return;
      local_barrier();
      for (int first = 0; first < more; first += step) {  // the last r - 1 rows move up
        const int numbers = (more - first < step ? more - first : step) * (wide / LANES);
        for (int term = 0; term < terms; ++term) {
          Lanes* const above = (Lanes*)(across + term * region + first * wide);
          for (int i = LID_0; i < numbers; i += THREADS) above[i] = above[i + step * (wide / LANES)];
        }
        local_barrier();
      }
    }
    if (!taps_w) load_rows<true>(image, across + (next < more ? next : more) * wide, wide, arg, columns, false, at.p - (int)arg.pad_h + next, rows_from(next));
    done = next;
    count = rows_from(next);
  }
}
