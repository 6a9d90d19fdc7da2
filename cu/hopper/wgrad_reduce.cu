// wgrad_reduce.cu: adds few parts of hopper/wgrad.cu, channels fastest, into dw with its taps fastest.
//
//   dw[k, c, tap] = sum over run of parts[run][k][tap][c], always in the same order, which is that of hopper/wgrad_add.cu
//
// If innermost taps were folded into channels (fold_channels.cu), a channel of a part is (fold, c), and a tap of dw (tap, fold).
//
// Mapping  block -> one k, `tile_taps` taps, 64 channels; a warp for each tap. thread -> two channels of a tap.
// Shared   the block's sums, [tap][channel], from which it writes neighbours of dw.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/wgrad_reduce.cu
#ifndef TYPE
#define TYPE 17  // of dw: 32 float, 16 half, 17 bfloat16
#endif
#include "core/packed.cuh"

typedef element<TYPE> data_t;

constexpr int MOST_TAPS = 16, CHANNELS = 64;  // of a block
constexpr int BATCH = 8;                      // loads of a thread under way

// by_n is the divisor n, prepared (division.cuh).
struct WgradNhwcReduceArguments {
  long long size, splits;               // elements of a part; runs
  long long taps, channels, pitch;      // of a part: taps of a k; real channels of a tap; and with the zeros behind them, an even number
  long long own, by_own, folds;         // channels of dw, of a group; taps folded into a part's channel
  long long tile_taps, by_tile_taps;    // taps of a block
  long long tiles_c, by_tiles_c, tiles_t, by_tiles_t;
};

extern "C" __global__ void __launch_bounds__(32 * MOST_TAPS)
    hopper_wgrad_reduce(const float* __restrict__ parts, data_t* __restrict__ dw, const __grid_constant__ WgradNhwcReduceArguments arg) {
  __shared__ float sums[MOST_TAPS][CHANNELS + 2];
  AFTER_LAST_LAUNCH
  const Divided across(blockIdx.x, arg.tiles_c, arg.by_tiles_c), down(across.quotient, arg.tiles_t, arg.by_tiles_t);
  const int k = down.quotient, tap0 = down.rest * (int)arg.tile_taps, c0 = across.rest * CHANNELS;
  const int taps = min((int)arg.tile_taps, (int)arg.taps - tap0), channels = min(CHANNELS, (int)arg.channels - c0);
  const int warp = threadIdx.x / 32, c = threadIdx.x % 32 * 2;
  if (warp < taps && c < channels) {
    const float* from = parts + ((long long)k * arg.taps + tap0 + warp) * arg.pitch + c0 + c;
    float2 sum = make_float2(0, 0);
    for (int first = 0; first < (int)arg.splits; first += BATCH) {
      float2 part[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i, from += arg.size) part[i] = first + i < (int)arg.splits ? *(const float2*)from : make_float2(0, 0);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        sum.x += part[i].x;
        sum.y += part[i].y;
      }
    }
    sums[warp][c] = sum.x;
    sums[warp][c + 1] = sum.y;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < CHANNELS * (int)arg.tile_taps; i += blockDim.x) {
    const Divided of(i, arg.tile_taps, arg.by_tile_taps);  // channel, and tap
    if (of.quotient < channels && of.rest < taps) {
      const Divided channel(c0 + of.quotient, arg.own, arg.by_own);  // fold, and channel of dw
      dw[(((long long)k * arg.own + channel.rest) * arg.taps + tap0 + of.rest) * arg.folds + channel.quotient] =
          from_float<data_t>(sums[of.rest][of.quotient]);
    }
  }
}
