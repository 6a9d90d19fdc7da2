// fft_range.cu: which tiles hold numbers that a transform would spoil: flags[group][tile], 1 for those.
//
// The error of a result is relative to the norm of its pair of tiles. So a tile is flagged if one of its windows, the pixels that a result is
// computed from, has a norm of less than 1 / RANGE of the pair's. Both tiles are flagged if the pair has Inf, NaN, or a norm whose square is near
// the ends of the type. fft_tiles.cu computes flagged tiles without transforms.
//
// A window's norm is taken from below: it is that of the parts of the tile that lie in the window as a whole. A window that reaches over
// an edge of the image counts as the nearest one that does not. Norms are of all channels of a group. Zeros alone are fine.
//
// Mapping  block -> a pair of tiles of a group; thread -> one of PARTS parts of each tile, part_h x part_w pixels, of all channels.
// Memory   shared: the sum of squares of each part, then of boxes of parts.
//
// By hand: nvcc -cubin cu/fft_range.cu
#include "portable.cuh"
#include "fft.cuh"

#define PARTS 1024
#define RANGE 256
#if DTYPE == 64
#define LEAST 1e-200
#define MOST 1e200
#define SMALL 1e-300
#else
#define LEAST 1e-30f
#define MOST 1e37f
#define SMALL 1e-37f
#endif

WITHIN_KERNEL int clamped(int v, int most) { return v < 0 ? 0 : v > most ? most : v; }

// Whether the first whole part of a window is `part`, along one axis of a tile that begins at `first`, for a window of one of its `used` results,
// of which only `left` are there. Windows that reach over an edge of the image count as the nearest that does not; the last one begins at `last`.
WITHIN_KERNEL int begins(int part, int size, int first, int used, int left, int last) {
  const int most = (left < used ? left : used) - 1, a = clamped(-first, most), b = clamped(last - first, most);
  return part >= ((a < b ? a : b) + size - 1) / size && part <= ((a < b ? b : a) + size - 1) / size;
}

KERNEL LAUNCH_BOUNDS(PARTS, 1) void fft_range(const GLOBAL_MEM data_t* RESTRICT x, GLOBAL_MEM acc_t* flags, const FftArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t squares[2][PARTS];
  LOCAL_MEM acc_t rows[PARTS];
  LOCAL_MEM int lost[2];
  const int group = divided((int)GID_0, arg.by_pairs), first = ((int)GID_0 - group * (int)arg.pairs) * (int)arg.at_once;
  const int parts_w = (int)arg.parts_w, parts_h = PARTS / parts_w, a = divided(LID_0, arg.by_parts_w), b = LID_0 - a * parts_w;
  const int part_h = (int)arg.part_h, part_w = (int)arg.part_w;
  for (int i = 0; i < 2; ++i) {
    acc_t sum = 0;
    if (i < (int)arg.at_once && first + i < (int)arg.all_tiles) {
      const Tile tile = tile_of(&arg, first + i);
      const GLOBAL_MEM data_t* plane = x + (tile.image * (index_t)arg.image_stride + group * (index_t)arg.group_stride);
      const int row0 = (int)(arg.first_h + tile.row * arg.used_h) + a * part_h, column0 = (int)(arg.first_w + tile.column * arg.used_w) + b * part_w;
      for (int c = 0; c < (int)arg.channels; ++c) {
        const GLOBAL_MEM data_t* channel = plane + c * (index_t)arg.channel_stride;
        for (int row = row0; row < row0 + part_h; ++row) {
#pragma unroll 8
          for (int column = column0; column < column0 + part_w; ++column) {
            const acc_t v = element(channel, &arg, 1, row, column);
            sum += v * v + (v != 0 ? (acc_t)SMALL : 0);  // so that nothing but zeros adds up to 0
          }
        }
      }
    }
    squares[i][LID_0] = sum;
  }
  local_barrier();
  rows[LID_0] = squares[0][LID_0] + squares[1][LID_0];
  for (int count = PARTS / 2; count; count /= 2) {
    local_barrier();
    if (LID_0 < count) rows[LID_0] += rows[LID_0 + count];
  }
  local_barrier();
  const acc_t total = rows[0];
  if (LID_0 < 2) lost[LID_0] = !(total == 0 || (total >= (acc_t)LEAST && total <= (acc_t)MOST));
  for (int i = 0; i < 2; ++i) {
    acc_t sum = 0;
    for (int j = 0; j < (int)arg.box_w && b + j < parts_w; ++j) sum += squares[i][LID_0 + j];
    local_barrier();
    rows[LID_0] = sum;
    local_barrier();
    sum = 0;
    for (int j = 0; j < (int)arg.box_h && a + j < parts_h; ++j) sum += rows[LID_0 + j * parts_w];
    const Tile tile = tile_of(&arg, first + i);
    const int row = tile.row * (int)arg.used_h, column = tile.column * (int)arg.used_w;
    const int asked = arg.box_h && begins(a, part_h, (int)arg.first_h + row, (int)arg.used_h, (int)arg.p - row, (int)(arg.h - arg.r)) &&
                      begins(b, part_w, (int)arg.first_w + column, (int)arg.used_w, (int)arg.q - column, (int)(arg.w - arg.s));
    if (asked && !(sum * ((acc_t)RANGE * RANGE) >= total)) lost[i] = 1;  // whoever writes writes the same
  }
  local_barrier();
  if (LID_0 < (int)arg.at_once && first + LID_0 < (int)arg.all_tiles) flags[arg.flags_at + group * (index_t)arg.all_tiles + first + LID_0] = lost[LID_0];
}
