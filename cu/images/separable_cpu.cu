// separable_cpu.cu: a filter along rows and then one along columns, of images, on the CPU. separable.cu is that for GPUs.
//
//   y[n, p, q] = sum over r of f_h[r] * (sum over s of f_w[s] * x[n, p + r - pad_h, q + s - pad_w])
//
// With r = 0 or s = 0 there is one pass alone.
//
// Mapping  block -> tile_p x tile_q numbers of one slice of one image; GID_0 = ((image * slices + slice) * tiles down + tile row) * tiles across + tile column.
//          A block is one work-item, which has four vectors of neighbours of a row at a time.
// Memory   shared: the window, halo_p x pitch; its filtered rows, halo_p x wide; the filters, f_h and then f_w.
//
// Boxes    With equal taps, sums run along rows in float64. Along columns, in float64 and where numbers are not finite, sums of 2, 4, 8, ... neighbours are made one
//          of the other, and those that make up the filter are added: 2 log2(taps) additions instead of one for each tap. Memory then holds a tile of sums more.
#include "images/cpu.cuh"

// A statement for each i < n that is a multiple of LANES, four of them at a time.
#define FOR_LANES(n, STATEMENT)                                        \
  {                                                                    \
    int i = 0;                                                         \
    for (; i + 4 * LANES <= (n); i += LANES) {                         \
      STATEMENT; i += LANES; STATEMENT; i += LANES; STATEMENT; i += LANES; STATEMENT; \
    }                                                                  \
    for (; i < (n); i += LANES) STATEMENT;                             \
  }

// to[i] = the mean, or the sum times a tap, of `count` numbers at from + i + j * apart, for i < n. What lies behind `from` is overwritten.
WITHIN_KERNEL void sum_box(LOCAL_MEM_POINTER acc_t* RESTRICT from, LOCAL_MEM_POINTER acc_t* RESTRICT to, int n, int apart, int count, acc_t tap) {
  int offset = 0, length = n + (count - 1) * apart;
  for (int step = 1; step <= count; step *= 2) {
    if (count & step) {
      const LOCAL_MEM_POINTER acc_t* const part = from + offset * apart;
      if (offset) FOR_LANES(n, STORE_LANES(LOAD_LANES(0, to + i) + LOAD_LANES(0, part + i), 0, to + i))
      else FOR_LANES(n, STORE_LANES(LOAD_LANES(0, part + i), 0, to + i))
      offset += step;
    }
    if (2 * step <= count) {
      length -= step * apart;
      FOR_LANES(length, STORE_LANES(LOAD_LANES(0, from + i) + LOAD_LANES(0, from + i + step * apart), 0, from + i))
    }
  }
  const acc_t whole = tap * count;
  if (whole > (acc_t)0.999999 && whole < (acc_t)1.000001)
    FOR_LANES(n, STORE_LANES(LOAD_LANES(0, to + i) / (lanes_t)(count), 0, to + i))
  else
    FOR_LANES(n, STORE_LANES(LOAD_LANES(0, to + i) * (lanes_t)(tap), 0, to + i))
}

#if DTYPE == 32
// The same for `rows` rows of `pitch` numbers, to rows of `wide`, by sums that run along them in float64: one number comes and one goes. False if there are
// numbers that are not finite, which would stay in the sums.
WITHIN_KERNEL int run_boxes(const LOCAL_MEM_POINTER acc_t* RESTRICT from, LOCAL_MEM_POINTER acc_t* RESTRICT to, int rows, int pitch, int wide, int n,
    int apart, int count, acc_t tap) {
  const acc_t whole = tap * count;
  const double factor = whole > (acc_t)0.999999 && whole < (acc_t)1.000001 ? 1.0 / count : (double)tap;
  double lost = 0;
  for (int first = 0; first < rows; first += 4)
    for (int colour = 0; colour < apart; ++colour) {
      const LOCAL_MEM_POINTER acc_t* in[4];
      LOCAL_MEM_POINTER acc_t* out[4];
      double sums[4] = {0, 0, 0, 0};
      for (int row = 0; row < 4; ++row) {  // four rows at a time, since each sum waits for the one before; at the end some are done twice
        const int down = first + row < rows ? first + row : rows - 1;
        in[row] = from + down * pitch + colour, out[row] = to + down * wide + colour;
      }
      for (int j = 0; j < count; ++j)
        for (int row = 0; row < 4; ++row) sums[row] += in[row][j * apart];
      int i = 0;
      for (; i + apart < n - colour; i += apart)
        for (int row = 0; row < 4; ++row) {
          out[row][i] = (acc_t)(sums[row] * factor);
          sums[row] += (double)in[row][i + count * apart] - (double)in[row][i];
        }
      for (int row = 0; row < 4; ++row) out[row][i] = (acc_t)(sums[row] * factor), lost += sums[row] * 0;
    }
  return lost == 0;
}
#else
#define run_boxes(from, to, rows, pitch, wide, n, apart, count, tap) 0
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void images_separable_cpu(const GLOBAL_MEM in_t* RESTRICT x, const GLOBAL_MEM acc_t* RESTRICT filters,
    const GLOBAL_MEM acc_t* previous,
                                                       GLOBAL_MEM out_t* RESTRICT y, const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_ROOM(room);
  const Tile at = tile_of(arg, (int)GID_0);
  const int taps_h = (int)arg.r, taps_w = (int)arg.s, halo_p = (int)arg.halo_p, pitch = (int)arg.pitch, wide = (int)arg.wide;
  const int tile_p = (int)arg.tile_p, tile_q = (int)arg.tile_q, colours = (int)arg.colours;
  LOCAL_MEM_POINTER acc_t* const across = taps_w ? room + halo_p * pitch : room;  // without a filter along rows, the window itself
  LOCAL_MEM_POINTER acc_t* const taps = across + halo_p * wide;

  for (int i = 0; i < taps_h + taps_w; ++i) taps[i] = filters[i];
  load_window(x, room, arg, at, at.o);
  const int p_rest = (int)arg.p - at.p, rows = p_rest < tile_p ? p_rest : tile_p, q_rest = (int)arg.q - at.q, columns = q_rest < tile_q ? q_rest : tile_q;
  if (taps_w && arg.box_w) {
    const int done = run_boxes(room, across, halo_p, pitch, wide, columns, colours, taps_w, taps[taps_h]);
    for (int down = 0; down < halo_p; ++down) {
      LOCAL_MEM_POINTER acc_t* const sums = across + down * wide;
      if (!done) sum_box(room + down * pitch, sums, columns, colours, taps_w, taps[taps_h]);
      if (!taps_h && down < rows)
        for (int q = 0; q < columns; q += LANES)
          store_lanes(y, previous, arg, at.y + (at.p + down) * (index_t)arg.y_h + at.q + q, columns - q, LOAD_LANES(0, sums + q));
    }
  } else if (taps_w) {
    for (int down = 0; down < halo_p; ++down)
      for (int q = 0; q < columns; q += 4 * LANES) {
        lanes_t sums[4] = NO_SUMS;
        ADD_PRODUCTS(sums, room + down * pitch + q, colours, taps + taps_h, 1, taps_w, 0)
        if (taps_h) {
          for (int i = 0; i < 4; ++i) STORE_LANES(sums[i], i, across + down * wide + q);
        } else if (down < rows) {
          for (int i = 0; i < 4; ++i)
            if (q + LANES * i < columns)
              store_lanes(y, previous, arg, at.y + (at.p + down) * (index_t)arg.y_h + at.q + q + LANES * i, columns - q - LANES * i, sums[i]);
        }
      }
  }
  if (taps_h && arg.box_h) {
    LOCAL_MEM_POINTER acc_t* const tile = taps + taps_h + taps_w;
    sum_box(across, tile, tile_p * wide, wide, taps_h, taps[0]);
    for (int down = 0; down < rows; ++down)
      for (int q = 0; q < columns; q += LANES)
        store_lanes(y, previous, arg, at.y + (at.p + down) * (index_t)arg.y_h + at.q + q, columns - q, LOAD_LANES(0, tile + down * wide + q));
  } else if (taps_h)
    for (int down = 0; down < rows; ++down)
      for (int q = 0; q < columns; q += 4 * LANES) {
        lanes_t sums[4] = NO_SUMS;
        ADD_PRODUCTS(sums, across + down * wide + q, wide, taps, 1, taps_h, 0)
        for (int i = 0; i < 4; ++i)
          if (q + LANES * i < columns)
            store_lanes(y, previous, arg, at.y + (at.p + down) * (index_t)arg.y_h + at.q + q + LANES * i, columns - q - LANES * i, sums[i]);
      }
}
