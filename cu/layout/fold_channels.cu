// fold_channels.cu: copies channels-last arrays to more channels, as tensor loads need them:
//
//   folded[n][p][q][tap * channels + c] = x[n][p * stride_h - pad_h + r * dilation_h][q * stride_w - pad_w + s * dilation_w][c]
//
// for the taps (r, s) of the innermost axes that are folded, with zeros behind them up to a multiple of 16 bytes. Without folds it is x itself, with
// zeros behind each pixel's channels. A tensor load of an array with few channels fetches one tap and is mostly filled up; here it fetches a row of taps.
//
// Mapping  thread -> 16 bytes of channels of a pixel of `folded`; a block has 256 of these, side by side.
// Memory   no shared memory. A thread loads UNIT bytes of a tap at once, all its loads under way together. A warp's loads share sectors in the L1
//          cache.
//
// By hand: nvcc -cubin -I cu cu/layout/fold_channels.cu
#include "core/packed.cuh"

#ifndef BYTES
#define BYTES 2  // of an element: 2 or 4
#define UNIT 2   // bytes that a thread loads at once: a divisor of a tap's bytes, up to 16
#endif

typedef WordOf<UNIT>::type unit_t;
constexpr int THREADS = 256, UNITS = 16 / UNIT, EACH = UNIT / BYTES;  // units of a thread, elements of a unit

// by_n is the divisor n, prepared (division.cuh).
struct FoldChannelsArguments {
  long long words;                    // 16-byte words of `folded`
  long long chunks, by_chunks;        // words of a pixel
  long long h, w;                     // size of x; its images, or slices, follow one another
  long long p, by_p, q, by_q;         // size of `folded`
  long long channels, by_channels;    // channels of x
  long long folded, fold_s, by_fold_s;  // real channels of `folded`; taps along s
  long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    fold_channels(const unit_t* __restrict__ x, uint4* __restrict__ folded, const __grid_constant__ FoldChannelsArguments arg) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (i >= arg.words) return;
  const Divided pixel((int)i, arg.chunks, arg.by_chunks), row(pixel.quotient, arg.q, arg.by_q), image(row.quotient, arg.p, arg.by_p);
  const int first = UNITS * EACH * pixel.rest, left = (int)arg.folded - first;  // channels of `folded` left from this thread's first one on
  const Divided tap(first, arg.channels, arg.by_channels), line(tap.quotient, arg.fold_s, arg.by_fold_s);
  const int h = (int)arg.h, w = (int)arg.w, channels = (int)arg.channels, fold_s = (int)arg.fold_s;
  const int y0 = image.rest * (int)arg.stride_h - (int)arg.pad_h, x0 = row.rest * (int)arg.stride_w - (int)arg.pad_w;
  int r = line.quotient, s = line.rest, c = tap.rest;
  const unit_t* from;  // the pixel that the tap reads
  bool there;
  auto meet = [&] {
    const int at_h = y0 + r * (int)arg.dilation_h, at_w = x0 + s * (int)arg.dilation_w;
    there = (unsigned)at_h < (unsigned)h && (unsigned)at_w < (unsigned)w;
    from = x + (((long long)image.quotient * h + at_h) * w + at_w) * (channels / EACH);
  };
  meet();
  union {
    unit_t units[UNITS];
    uint4 word;
  } own;
#pragma unroll
  for (int e = 0; e < UNITS; ++e) {
    own.units[e] = there && e * EACH < left ? from[c / EACH] : unit_t();
    c += EACH;
    if (c == channels && e + 1 < UNITS) {
      c = 0;
      if (++s == fold_s) {
        s = 0;
        ++r;
      }
      meet();
    }
  }
  folded[i] = own.word;
}
