// columns_add.cu: dgrad, second step: adds the columns that a matrix product has made.
//
//   x[n,c,d,h,w] = sum over t,r,s of columns[n, (c,t,r,s), o,p,q],  where o*stride_d = d + pad_d - t*dil_d, and so on; and the epilogue
//
// The columns are the first step's product: column (c,t,r,s) of pixel (o,p,q) is the sum over k of y[n,k,o,p,q] * w[k,c,t,r,s]. If a stride leaves
// a pixel of x few taps, there are hardly more columns than elements of x, and the product is dense, whatever the stride.
//
// Mapping  thread -> a pixel of x and CHANNELS of its channels, which meet the same taps. Neighbours are neighbours in memory: a thread's channels
//          lie apart. It adds the taps in their order, so the bits are always the same.
// Loads    In NCHW neighbours of x read different planes of columns, but other threads of the block read what lies beside in the L1 cache. With
//          channels last they read neighbours.
//
// By hand: nvcc -cubin -I cu cu/layout/columns_add.cu
#include "core/portable.cuh"
#include "core/first_tap.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#ifndef CHANNELS
#define CHANNELS 1
#endif

// A divisor's prepared form, see division.cuh, is called by_...
typedef struct ColumnsArguments {
  long_t size, channels, apart, by_apart;                                  // threads; channels, and from one of a thread's to the next
  long_t plane, by_plane, hw, by_hw, h, w, by_w;                           // pixels of an image, a slice and a row
  long_t last;                                                             // whether x has its channels last
  long_t image, channel, tap, pixel;                                       // elements of the columns from one image, channel, tap and pixel to the next
  long_t o, p, q, t, r, s;                                                 // pixels of y; taps
  long_t stride_d, by_stride_d, stride_h, by_stride_h, stride_w, by_stride_w;
  long_t every_d, every_h, every_w;                                        // taps from one that a pixel meets to the next
  long_t back_d, back_h, back_w;                                           // pixels of y between these
  long_t pad_d, pad_h, pad_w, dil_d, dil_h, dil_w;
  long_t has_scale, has_bias, has_residual, activation, slope;             // the epilogue; slope: an acc_t's bits
} ColumnsArguments;

// Of an axis: the first tap that a pixel meets, and the pixel of y that this tap reads. `at` is the pixel's place with the padding.
typedef struct Met {
  int tap, place;
} Met;

WITHIN_KERNEL Met met(int at, int stride, long_t by_stride, int dil, int every) {
  Met found;
  if (at >= 0 && dil == 1) {  // the taps that differ come one after the other
    found.place = divided(at, by_stride);
    found.tap = at - found.place * stride;
  } else {
    found.tap = first_tap(at, stride, dil, every);
    found.place = found.tap < 1 << 30 ? (at - found.tap * dil) / stride : 0;
  }
  return found;
}

KERNEL LAUNCH_BOUNDS(THREADS, 1) void columns_add(const GLOBAL_MEM data_t* RESTRICT columns, const GLOBAL_MEM data_t* RESTRICT bias,
                                                  const GLOBAL_MEM data_t* RESTRICT scale, const GLOBAL_MEM data_t* residual,
                                                  GLOBAL_MEM data_t* RESTRICT x, const ColumnsArguments arg) {
  AFTER_LAST_LAUNCH
  EPILOGUE_FLAGS
  const int i = (int)GID_0 * THREADS + LID_0;
  if (i >= (int)arg.size) return;
  const int channels = (int)arg.channels, apart = (int)arg.apart;
  int n, c, number;  // of an image, of the first channel, of a pixel in its image
  if (arg.last) {
    const int place = divided(i, arg.by_apart);
    c = i - place * apart;
    n = divided(place, arg.by_plane);
    number = place - n * (int)arg.plane;
  } else {
    const int row = divided(i, arg.by_plane);
    number = i - row * (int)arg.plane;
    n = divided(row, arg.by_apart);
    c = row - n * apart;
  }
  const int d = divided(number, arg.by_hw), row_of = divided(number, arg.by_w), h = row_of - d * (int)arg.h, v_w = number - row_of * (int)arg.w;
  const Met t_axis = met(d + (int)arg.pad_d, (int)arg.stride_d, arg.by_stride_d, (int)arg.dil_d, (int)arg.every_d);
  const Met r_axis = met(h + (int)arg.pad_h, (int)arg.stride_h, arg.by_stride_h, (int)arg.dil_h, (int)arg.every_h);
  const Met s_axis = met(v_w + (int)arg.pad_w, (int)arg.stride_w, arg.by_stride_w, (int)arg.dil_w, (int)arg.every_w);
  const int t_end = (int)arg.t, r_end = (int)arg.r, s_end = (int)arg.s, p_end = (int)arg.p, q_end = (int)arg.q;
  const index_t from = (index_t)n * (index_t)arg.image + (index_t)c * (index_t)arg.channel;
  const index_t between = (index_t)apart * (index_t)arg.channel;
  acc_t sums[CHANNELS];
  for (int e = 0; e < CHANNELS; ++e) sums[e] = 0;
  int o = t_axis.place;
  for (int t = t_axis.tap; t < t_end; t += (int)arg.every_d, o -= (int)arg.back_d) {
    int p = r_axis.place;
    for (int r = r_axis.tap; r < r_end; r += (int)arg.every_h, p -= (int)arg.back_h) {
      if ((unsigned)o >= (unsigned)arg.o || (unsigned)p >= (unsigned)p_end) continue;
      const int taps = (t * r_end + r) * s_end, line = (o * p_end + p) * q_end;
      int q = s_axis.place;
      for (int s = s_axis.tap; s < s_end; s += (int)arg.every_w, q -= (int)arg.back_w)
        if ((unsigned)q < (unsigned)q_end) {
          const index_t at = from + (index_t)(taps + s) * (index_t)arg.tap + (index_t)(line + q) * (index_t)arg.pixel;
          for (int e = 0; e < CHANNELS; ++e)
            if (CHANNELS == 1 || c + e * apart < channels) sums[e] += LOAD(columns, at + e * between);
        }
    }
  }
  const int to = arg.last ? (n * (int)arg.plane + number) * channels + c : (n * channels + c) * (int)arg.plane + number;
  for (int e = 0; e < CHANNELS; ++e) {
    const int channel = c + e * apart, at = to + e * apart * (arg.last ? 1 : (int)arg.plane);
    if (CHANNELS > 1 && channel >= channels) break;
    acc_t sum = sums[e];
    FINISH_AT(sum, channel, at)
    STORE(x, at, sum);
  }
}
