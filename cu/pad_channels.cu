// pad_channels.cu: channels-last arrays of 16 bits with zeros behind the channels of each pixel, as tensor loads want them:
//
//   padded[pixel][c] = c < channels ? x[pixel][c] : 0, for c < 8 * chunks
//
// Mapping  thread -> 8 channels of a pixel of `padded`, 16 bytes; a block 256 of these, side by side.
// Memory   a warp's loads are of 2 bytes, all under way at once; they meet the same sectors one after the other.
//
// By hand: nvcc -cubin cu/pad_channels.cu
#include "packed.cuh"

constexpr int THREADS = 256;

// by_n is the divisor n, prepared (division.cuh).
struct PadChannelsArguments {
  long long pixels, channels;
  long long chunks, by_chunks;  // words of 8 channels of a pixel of `padded`
};

extern "C" __global__ void __launch_bounds__(THREADS)
    pad_channels(const uint16_t* __restrict__ x, uint4* __restrict__ padded, const __grid_constant__ PadChannelsArguments arg) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
  const Divided of((int)i, arg.chunks, arg.by_chunks);
  if (of.quotient >= (int)arg.pixels) return;
  const uint16_t* const from = x + of.quotient * arg.channels + 8 * of.rest;
  const int count = min((int)arg.channels - 8 * of.rest, 8);
  union {
    uint16_t channel[8];
    uint4 word;
  } own;
#pragma unroll
  for (int c = 0; c < 8; ++c) own.channel[c] = c < count ? from[c] : 0;
  padded[i] = own.word;
}
