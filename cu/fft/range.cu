// range.cu: finds results that a transform would spoil: flags[group][tile] is 1 if a tile has some, and maps[group][tile][part] then says where.
//
// The error of a result is relative to the norm of its pair of tiles. A result's window is the pixels that it is computed from. If the window's norm is
// less than 1 / RANGE of the pair's, the result is computed without a transform. Values that are not finite, or whose squares are near the end of the
// type, count as zeros, here and in transforms, and results whose windows may have one are computed without a transform. So are all results of a
// pair if the square of its norm is near the ends of the type. The map's entry holds for all windows that begin in a part of a tile: BY_SUM, or ZERO if
// they have nothing but zeros. It also says which parts are all zeros: NOTHING_THERE.
//
// A window's norm is bounded from below: by that of the parts of the tile that lie wholly in the window. A window that reaches over
// an edge of the image counts as the nearest one that does not. Norms are over all channels of a group.
//
// Mapping  block -> a pair of tiles of a group; thread -> one of PARTS parts of each tile, part_h x part_w pixels, of all channels.
// Memory   shared: the sum of squares of each part, then of boxes of parts; and what each part holds.
//
// By hand: nvcc -cubin -I cu cu/fft/range.cu
#include "core/portable.cuh"
#include "fft/fft.cuh"

#define RANGE 256
#define MOST_PIXELS 16  // of a part: the largest tile has 1 << 14
// what a part, or a box of parts, holds
#define SOMETHING 1
#define LOST 2
#if WIDE || DTYPE == 64
#define LEAST 1e-200
#define MOST 1e200
#define SMALL 1e-300
#else
#define LEAST 1e-30f
#define MOST 1e37f
#define SMALL 1e-37f
#endif

WITHIN_KERNEL int clamped(int v, int most) { return v < 0 ? 0 : v > most ? most : v; }

// The first part that lies wholly in the window of result `v` of a tile, along one axis. The tile begins at `first`. A window that reaches over an edge of the
// image counts as that of the tile's nearest result that does not, or does so least; `most` is the tile's last result, `last` where the last window begins.
WITHIN_KERNEL int whole_part(int v, int size, int first, int most, int last) {
  const int a = clamped(-first, most), b = clamped(last - first, most), least = a < b ? a : b, greatest = a < b ? b : a;
  return ((v < least ? least : v > greatest ? greatest : v) + size - 1) / size;
}

KERNEL LAUNCH_BOUNDS(PARTS, 1) void fft_range(const GLOBAL_MEM data_t* RESTRICT x, GLOBAL_MEM wide_t* flags, const FftArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM wide_t squares[2][PARTS];
  LOCAL_MEM wide_t rows[PARTS];
  LOCAL_MEM unsigned char has[2][PARTS], some[PARTS];
  LOCAL_MEM int spoilt[2];
  const int group = divided((int)GID_0, arg.by_pairs), first = ((int)GID_0 - group * (int)arg.pairs) * (int)arg.at_once;
  const int parts_w = (int)arg.parts_w, parts_h = PARTS / parts_w, a = divided(LID_0, arg.by_parts_w), b = LID_0 - a * parts_w;
  const int part_h = (int)arg.part_h, part_w = (int)arg.part_w, pixels = part_h * part_w;
  for (int i = 0; i < 2; ++i) {
    wide_t sum = 0;
    int found = 0;
    if (i < (int)arg.at_once && first + i < (int)arg.all_tiles) {
      const Tile tile = tile_of(&arg, first + i);
      const GLOBAL_MEM data_t* plane = x + (tile.image * (index_t)arg.image_stride + group * (index_t)arg.group_stride);
      const int row0 = (int)(arg.first_h + tile.row * arg.used_h) + a * part_h, column0 = (int)(arg.first_w + tile.column * arg.used_w) + b * part_w;
      for (int c = 0; c < (int)arg.channels; ++c) {
        const GLOBAL_MEM data_t* channel = plane + c * (index_t)arg.channel_stride;
#pragma unroll
        for (int j = 0; j < MOST_PIXELS; ++j) {  // the compiler has to know the count, so that all loads are under way at once
          const int down = divided(j, arg.by_part_w);
          const acc_t v = element(channel, &arg, j < pixels, row0 + down, column0 + j - down * part_w);
          const wide_t fitting = FITTING(v);
          sum += fitting * fitting + (fitting != 0 ? (wide_t)SMALL : 0);  // so that only zeros add up to 0
          found |= (v == 0 ? 0 : SOMETHING) | (fitting == v ? 0 : LOST);
        }
      }
    }
    squares[i][LID_0] = sum;
    has[i][LID_0] = (unsigned char)found;
  }
  local_barrier();
  rows[LID_0] = squares[0][LID_0] + squares[1][LID_0];
  for (int count = PARTS / 2; count; count /= 2) {
    local_barrier();
    if (LID_0 < count) rows[LID_0] += rows[LID_0 + count];
  }
  local_barrier();
  const wide_t total = rows[0];
  const int no_norm = total != 0 && !(total >= (wide_t)LEAST && total <= (wide_t)MOST);
  const int touched_h = (part_h + (int)arg.r - 2) / part_h + 1, touched_w = (part_w + (int)arg.s - 2) / part_w + 1;
  if (LID_0 < 2) spoilt[LID_0] = no_norm && !arg.box_h;
  for (int i = 0; i < (int)arg.at_once && first + i < (int)arg.all_tiles; ++i) {
    local_barrier();
    if (!arg.box_h) {  // a filter
      if (has[i][LID_0] & LOST) spoilt[i] = 1;  // all writers write the same
      continue;
    }
    // boxes of parts, first along rows: those that lie in every window, and those that any window touches
    wide_t sum = 0;
    int found = 0;
    for (int j = 0; j < (int)arg.box_w && b + j < parts_w; ++j) sum += squares[i][LID_0 + j];
    for (int j = 0; j < touched_w && b + j < parts_w; ++j) found |= has[i][LID_0 + j];
    rows[LID_0] = sum;
    some[LID_0] = (unsigned char)found;
    local_barrier();
    sum = 0;
    found = 0;
    for (int j = 0; j < (int)arg.box_h && a + j < parts_h; ++j) sum += rows[LID_0 + j * parts_w];
    for (int j = 0; j < touched_h && a + j < parts_h; ++j) found |= some[LID_0 + j * parts_w];
    const int too_small = no_norm || !(sum * ((wide_t)RANGE * RANGE) >= total);
    local_barrier();
    some[LID_0] = (unsigned char)too_small;
    local_barrier();
    const Tile tile = tile_of(&arg, first + i);
    const int row = tile.row * (int)arg.used_h, column = tile.column * (int)arg.used_w, h = a * part_h, w = b * part_w;
    const int most_h = SMALLER((int)arg.p - row, (int)arg.used_h) - 1, most_w = SMALLER((int)arg.q - column, (int)arg.used_w) - 1;
    int verdict = has[i][LID_0] ? 0 : NOTHING_THERE;
    if (h <= most_h && w <= most_w) {  // the first and the last result whose windows begin in the part
      const int first_h = (int)arg.first_h + row, first_w = (int)arg.first_w + column, last_h = (int)(arg.h - arg.r), last_w = (int)(arg.w - arg.s);
      const int h0 = whole_part(h, part_h, first_h, most_h, last_h) * parts_w, w0 = whole_part(w, part_w, first_w, most_w, last_w);
      const int h1 = whole_part(SMALLER(h + part_h - 1, most_h), part_h, first_h, most_h, last_h) * parts_w;
      const int w1 = whole_part(SMALLER(w + part_w - 1, most_w), part_w, first_w, most_w, last_w);
      if (!found) verdict |= ZERO;
      else if (found & LOST || some[h0 + w0] || some[h0 + w1] || some[h1 + w0] || some[h1 + w1]) verdict |= BY_SUM;
      if (verdict & (found ? BY_SUM : total != 0 ? ZERO : 0)) spoilt[i] = 1;
    }
    const index_t map = (group * (index_t)arg.all_tiles + first + i) * PARTS + LID_0;
    local_barrier();
    if (spoilt[i]) ((GLOBAL_MEM unsigned char*)(flags + arg.maps_at))[map] = (unsigned char)verdict;
  }
  local_barrier();
  if (LID_0 < (int)arg.at_once && first + LID_0 < (int)arg.all_tiles) {
    flags[arg.flags_at + group * (index_t)arg.all_tiles + first + LID_0] = spoilt[LID_0];
#if CHECKED
    flags[arg.norms_at + group * (index_t)arg.all_tiles + first + LID_0] = sqrt(total);
#endif
  }
}
