// fold_channels.cu: channels-last arrays with more channels, as tensor loads want them:
//
//   folded[n][p][q][tap * channels + c] = x[n][p * stride_h - pad_h + r * dilation_h][q * stride_w - pad_w + s * dilation_w][c]
//
// for the taps (r, s) of the innermost axes that are folded, with zeros behind them up to a multiple of 16 bytes. Without folds it is x itself, with
// zeros behind the channels of a pixel. A tensor load of an array with few channels brings a tap, and is mostly filled up; here it brings a row of taps.
//
// Mapping  thread -> 16 bytes of channels of a pixel of `folded`; a block 256 of these, side by side.
// Memory   no shared memory. A thread loads element by element, all loads under way at once. A warp's loads meet the same sectors, in the L1 cache.
//
// By hand: nvcc -cubin cu/fold_channels.cu
#include "packed.cuh"

#ifndef BYTES
#define BYTES 2  // of an element: 2 or 4
#endif

typedef WordOf<BYTES>::type element_t;
constexpr int THREADS = 256, EACH = 16 / BYTES;  // channels of a thread

// by_n is the divisor n, prepared (division.cuh).
struct FoldChannelsArguments {
  long long words;                    // of `folded`, 16 bytes each
  long long chunks, by_chunks;        // words of a pixel
  long long h, w;                     // x; its images, or slices, follow one another
  long long p, by_p, q, by_q;         // rows and columns of `folded`
  long long channels, by_channels;    // of x
  long long folded, fold_s, by_fold_s;  // channels of `folded` that there are; taps along s
  long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    fold_channels(const element_t* __restrict__ x, uint4* __restrict__ folded, const __grid_constant__ FoldChannelsArguments arg) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (i >= arg.words) return;
  const Divided pixel((int)i, arg.chunks, arg.by_chunks), row(pixel.quotient, arg.q, arg.by_q), image(row.quotient, arg.p, arg.by_p);
  const Divided tap(EACH * pixel.rest, arg.channels, arg.by_channels), line(tap.quotient, arg.fold_s, arg.by_fold_s);
  const int y0 = image.rest * (int)arg.stride_h - (int)arg.pad_h, x0 = row.rest * (int)arg.stride_w - (int)arg.pad_w;
  const element_t* const from = x + image.quotient * arg.h * arg.w * arg.channels;
  int r = line.quotient, s = line.rest, c = tap.rest;
  union {
    element_t channel[EACH];
    uint4 word;
  } own;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int at_h = y0 + r * (int)arg.dilation_h, at_w = x0 + s * (int)arg.dilation_w;
    const bool there = EACH * pixel.rest + e < (int)arg.folded && (unsigned)at_h < (unsigned)arg.h && (unsigned)at_w < (unsigned)arg.w;
    own.channel[e] = there ? from[(at_h * arg.w + at_w) * arg.channels + c] : 0;
    if (++c == (int)arg.channels) {
      c = 0;
      if (++s == (int)arg.fold_s) {
        s = 0;
        ++r;
      }
    }
  }
  folded[i] = own.word;
}
