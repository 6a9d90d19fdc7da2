// correlate_cpu.cu: a filter of up to three axes over images or volumes of one channel, on the CPU. correlate.cu is that for GPUs.
//
//   y[n, o, p, q] = sum over t,r,s of f[t, r, s] * x[n, o + t - pad_d, p + r - pad_h, q + s - pad_w]
//
// A tap that is 0 meets nothing: a NaN or an infinity under it does not spread, as in scipy.ndimage.correlate.
//
// Mapping  block -> tile_p x tile_q numbers of one slice of one image, as in separable_cpu.cu: one work-item, which has four vectors of neighbours of a row at
//          a time.
// Memory   shared: the windows of the t slices that the tile reads, [t][halo_p][pitch]; the filter, [t][s][r], which comes so.
#include "images/cpu.cuh"

KERNEL LAUNCH_BOUNDS(THREADS, 1) void images_correlate_cpu(const GLOBAL_MEM in_t* RESTRICT x, const GLOBAL_MEM acc_t* RESTRICT filters,
    const GLOBAL_MEM acc_t* previous,
                                                       GLOBAL_MEM out_t* RESTRICT y, const WindowArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_ROOM(room);
  const Tile at = tile_of(arg, (int)GID_0);
  const int taps_d = (int)arg.t, taps_h = (int)arg.r, taps_w = (int)arg.s, pitch = (int)arg.pitch, slice = (int)arg.halo_p * pitch;
  const int tile_p = (int)arg.tile_p, tile_q = (int)arg.tile_q, colours = (int)arg.colours;
  LOCAL_MEM_POINTER acc_t* const taps = room + taps_d * slice;

  for (int i = 0; i < taps_d * taps_h * taps_w; ++i) taps[i] = filters[i];
  for (int t = 0; t < taps_d; ++t) load_window(x, room + t * slice, arg, at, at.o + t - (int)arg.pad_d);
  const int p_rest = (int)arg.p - at.p, rows = p_rest < tile_p ? p_rest : tile_p, q_rest = (int)arg.q - at.q, columns = q_rest < tile_q ? q_rest : tile_q;
  for (int down = 0; down < rows; ++down)
    for (int q = 0; q < columns; q += 4 * LANES) {
      lanes_t sums[4] = NO_SUMS;
      for (int t = 0; t < taps_d; ++t)
        for (int first = 0; first < taps_w; first += 8) {  // eight columns by themselves, which keeps more digits
          const int end = first + 8 < taps_w ? first + 8 : taps_w;
          lanes_t some[4] = NO_SUMS;
          for (int s = first; s < end; ++s)
            ADD_PRODUCTS(some, room + t * slice + down * pitch + q + s * colours, pitch, taps + (t * taps_w + s) * taps_h, 1, taps_h, 1)
          for (int i = 0; i < 4; ++i) sums[i] += some[i];
        }
      for (int i = 0; i < 4; ++i)
        if (q + LANES * i < columns) store_lanes(y, previous, arg, at.y + (at.p + down) * (index_t)arg.y_h + at.q + q + LANES * i, columns - q - LANES * i, sums[i]);
    }
}
