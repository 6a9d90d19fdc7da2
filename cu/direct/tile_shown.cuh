// tile_shown.cuh: what the border of an image adds to a tile of its gradient, for SHOWN texts of direct/tile.cu.
//
// The image's pixels in the rims get what the places outside that show them get. These places' windows lie in the tile, too.
#pragma once
#include "core/near_border.cuh"

// Of a run of `count` pixels from `first` on, where it begins in a tile of `size` pixels from `origin` on, and how many of it lie there.
WITHIN_KERNEL int in_tile(int at, int origin, int size) { return at < origin ? 0 : at - origin < size ? at - origin : size; }
#define RUN(begin, many, first, count, origin, size) \
  const int begin = in_tile((int)(first), origin, size), many = in_tile((int)(first) + (int)(count), origin, size) - begin;
#define WITHIN(i, begin, many) ((unsigned)((i) - (begin)) < (unsigned)(many))

// Adds to the sums of a thread's pixels, ROWS of column tx from row ty on. The tile's pixels begin at (tile_p, tile_q) of p_end x q_end, and its places at
// (h0, w0) of x, which has h_end x w_end pixels. Behind the filter in shared memory is room for a sum of each pixel.
WITHIN_KERNEL void add_shown(acc_t* sum, LOCAL_MEM_POINTER acc_t* tile, const TileArguments arg, int ty, int tx, int tile_p, int tile_q, int p_end, int q_end,
                             int h0, int w0, int h_end, int w_end, int apart_h, int apart_w) {
  RUN(above, many_above, arg.first_h, arg.firsts_h, tile_p, TILE_P)
  RUN(below, many_below, arg.last_h, arg.lasts_h, tile_p, TILE_P)
  RUN(left, many_left, arg.first_w, arg.firsts_w, tile_q, TILE_Q)
  RUN(right, many_right, arg.last_w, arg.lasts_w, tile_q, TILE_Q)
#define IN_ROWS(row) (WITHIN(row, above, many_above) || WITHIN(row, below, many_below))
#define IN_COLUMNS(col) (WITHIN(col, left, many_left) || WITHIN(col, right, many_right))
  const int last_h = (h_end - 1) << apart_h, last_w = (w_end - 1) << apart_w;  // of x's pixels in the tile's places
  const int filter = HALO_H * HALO_W, shown = filter + R * S;
  const int of_rows = (many_above + many_below) * TILE_Q, all = of_rows + (many_left + many_right) * TILE_P;
  for (int i = LID_0; i < all; i += THREADS) {  // whole rows, then columns
    int row = i < of_rows ? i / TILE_Q : (i - of_rows) % TILE_P, col = i < of_rows ? i % TILE_Q : (i - of_rows) / TILE_P;
    if (i < of_rows) row = row < many_above ? above + row : below + row - many_above;
    else col = col < many_left ? left + col : right + col - many_left;
    if (i >= of_rows && IN_ROWS(row)) continue;
    const Shown of_h = shown_of(tile_p + row, p_end, (int)arg.before_h, (int)arg.after_h, arg.side_h, arg.last_side_h);
    const Shown of_w = shown_of(tile_q + col, q_end, (int)arg.before_w, (int)arg.after_w, arg.side_w, arg.last_side_w);
    acc_t v = 0;
    for (int a = 0; a < of_h.count; ++a)
      for (int b = a ? 0 : 1; b < of_w.count; ++b) {
        const int down = shown_place(of_h, a) - (int)arg.before_h - tile_p, across = shown_place(of_w, b) - (int)arg.before_w - tile_q;
        int last_s = S - 1, first_s = 0, h, w;  // of the taps that meet pixels of x in the tile: few of those of a place outside
        while (first_s < S && (w = across + first_s * DIL_W, w < 0 || w0 + w < 0)) ++first_s;
        while (last_s >= first_s && (w = across + last_s * DIL_W, w >= HALO_W || w0 + w > last_w)) --last_s;
        for (int r = 0; r < R; ++r) {
          h = down + r * DIL_H;
          if ((unsigned)h >= (unsigned)(HALO_H) || h0 + h < 0 || h0 + h > last_h) continue;
          for (int s = first_s; s <= last_s; ++s) v += tile[h * HALO_W + across + s * DIL_W] * tile[filter + r * S + s];
        }
      }
    tile[shown + row * TILE_Q + col] = v;
  }
  local_barrier();
  for (int i = 0; i < ROWS; ++i)
    if (IN_ROWS(ty + i) || IN_COLUMNS(tx)) sum[i] += tile[shown + (ty + i) * TILE_Q + tx];
}
