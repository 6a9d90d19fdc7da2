// max_pool.cu: max pooling and mean pooling, forward and backward.
//
//   max_pool            y[n,p,q,c] = max over r,s of x[n, p*stride_h - pad_h + r*dil_h, q*stride_w - pad_w + s*dil_w, c]
//                       from[n,p,q,c] = r*S + s of the first tap with the maximum; the last NaN counts, as in torch. Not written if `from` is null
//   max_pool_backward   dx = the sum of y's gradients over the windows that took x
//   max_pool_backward_of_twos  the same for windows of 3x3 with strides of 2, as most networks have them
//   mean_pool           y = the sum over a window's taps / their number, or / `divisor` if that is not 0. What is padded counts if `padded` says so, but not
//                       what lies beyond the padding. There is no dilation
//   mean_pool_backward  dx = the sum over the windows that contain x of y's gradients, each divided likewise
//
// Mapping  thread -> VEC channels of a pixel: of y forward, of x backward. With channels last these are 16 bytes. A channel of NCHW
//          arrays counts as an image of one channel. In max_pool_backward_of_twos a thread has 2x2 pixels of x, of which the first is the first tap
//          of a window: they lie in that window, the one before it, and these two of the row of windows before, and in no others.
// Memory   registers only. A maximum's tap takes a byte.
// Sums     float32, always in the same order.
// Limits   up to 255 taps, fewer than 2^31 threads; with channels last, pixels of a multiple of 16 bytes.
//
// By hand: nvcc -cubin -I cu cu/nn/max_pool.cu
#ifndef TYPE
#define TYPE 17  // of x and y: 16 half, 17 bfloat16, 32 float
#define VEC 8    // channels of a thread
#endif
#include "core/packed.cuh"

typedef element<TYPE> data_t;

constexpr int THREADS = 256, V = VEC;

struct alignas(V * sizeof(data_t)) Channels {
  data_t v[V];
};
struct alignas(V) Taps {
  uint8_t v[V];
};

// by_n is the divisor n, prepared (division.cuh).
struct PoolArguments {
  long long threads, groups, by_groups, across, by_across, down, by_down;  // groups of channels; across, down: pixels of the array that the threads make
  long long h, w, p, q;                                                    // sizes of x and y
  long long r, s, stride_h, by_stride_h, stride_w, by_stride_w, pad_h, pad_w, dil_h, by_dil_h, dil_w, by_dil_w;
  long long divisor, padded;                                               // of means
};

// A thread's channels from its sums.
DEVICE Channels rounded(const float (&v)[V]) {
  Channels made;
#pragma unroll
  for (int i = 0; i < V; ++i) made.v[i] = from_float<data_t>(v[i]);
  return made;
}

// A thread's pixel and channels.
struct Place {
  int image, row, column, group;
  DEVICE Place(const PoolArguments& arg, int thread) {
    const Divided of_group(thread, arg.groups, arg.by_groups), of_column(of_group.quotient, arg.across, arg.by_across);
    const Divided of_row(of_column.quotient, arg.down, arg.by_down);
    group = of_group.rest;
    column = of_column.rest;
    row = of_row.rest;
    image = of_row.quotient;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    max_pool(const Channels* __restrict__ x, Channels* __restrict__ y, Taps* __restrict__ from, const __grid_constant__ PoolArguments arg) {
  AFTER_LAST_LAUNCH
  const int thread = blockIdx.x * THREADS + threadIdx.x;
  if (thread >= (int)arg.threads) return;
  const Place at(arg, thread);
  const int groups = (int)arg.groups, h0 = at.row * (int)arg.stride_h - (int)arg.pad_h, w0 = at.column * (int)arg.stride_w - (int)arg.pad_w;
  float best[V];
  int tap[V];
#pragma unroll
  for (int i = 0; i < V; ++i) best[i] = -INFINITY, tap[i] = -1;
  for (int r = 0; r < (int)arg.r; ++r) {
    const int row = h0 + r * (int)arg.dil_h;
    if ((unsigned)row >= (unsigned)arg.h) continue;
    const Channels* const line = x + ((long long)at.image * (int)arg.h + row) * (int)arg.w * groups + at.group;
    for (int s = 0; s < (int)arg.s; ++s) {
      const int column = w0 + s * (int)arg.dil_w;
      if ((unsigned)column >= (unsigned)arg.w) continue;
      const Channels read = line[column * groups];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float v = to_float(read.v[i]);
        if (tap[i] < 0 || v > best[i] || v != v) best[i] = v, tap[i] = r * (int)arg.s + s;
      }
    }
  }
  Channels made;
  Taps taken;
#pragma unroll
  for (int i = 0; i < V; ++i) made.v[i] = from_float<data_t>(best[i]), taken.v[i] = tap[i];
  y[thread] = made;
  if (from) from[thread] = taken;
}

extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward(const Channels* __restrict__ dy, const Taps* __restrict__ from,
                                                                        Channels* __restrict__ dx, const __grid_constant__ PoolArguments arg) {
  AFTER_LAST_LAUNCH
  const int thread = blockIdx.x * THREADS + threadIdx.x;
  if (thread >= (int)arg.threads) return;
  const Place at(arg, thread);
  const int groups = (int)arg.groups, stride_h = (int)arg.stride_h, stride_w = (int)arg.stride_w;
  float sum[V] = {};
  const int down = at.row + (int)arg.pad_h, right = at.column + (int)arg.pad_w;
  // the windows that contain this pixel of x, from the last one backwards
  for (int p = min(divided(down, arg.by_stride_h), (int)arg.p - 1); p >= 0; --p) {
    const Divided of_r(down - p * stride_h, arg.dil_h, arg.by_dil_h);
    if (of_r.quotient >= (int)arg.r) break;
    if (of_r.rest) continue;
    const long long line = ((long long)at.image * (int)arg.p + p) * (int)arg.q * groups + at.group;
    for (int q = min(divided(right, arg.by_stride_w), (int)arg.q - 1); q >= 0; --q) {
      const Divided of_s(right - q * stride_w, arg.dil_w, arg.by_dil_w);
      if (of_s.quotient >= (int)arg.s) break;
      if (of_s.rest) continue;
      const int tap = of_r.quotient * (int)arg.s + of_s.quotient;
      const Taps taken = from[line + q * groups];
      const Channels read = dy[line + q * groups];
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += taken.v[i] == tap ? to_float(read.v[i]) : 0;
    }
  }
  dx[thread] = rounded(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_of_twos(const Channels* __restrict__ dy, const Taps* __restrict__ from,
                                                                                Channels* __restrict__ dx, const __grid_constant__ PoolArguments arg) {
  AFTER_LAST_LAUNCH
  const int thread = blockIdx.x * THREADS + threadIdx.x;
  if (thread >= (int)arg.threads) return;
  const Place at(arg, thread);
  const int groups = (int)arg.groups;
  float sum[2][2][V] = {};
  Taps taken[2][2];  // of the window of the pixels, and of those before it
  Channels read[2][2];
#pragma unroll
  for (int up = 0; up < 2; ++up)
#pragma unroll
    for (int left = 0; left < 2; ++left) {
      const int p = at.row - up, q = at.column - left;
      taken[up][left] = Taps();
      read[up][left] = Channels();
      if (p < 0 || p >= (int)arg.p || q < 0 || q >= (int)arg.q) continue;
      const long long place = (((long long)at.image * (int)arg.p + p) * (int)arg.q + q) * groups + at.group;
      taken[up][left] = from[place];
      read[up][left] = dy[place];
    }
#pragma unroll
  for (int up = 0; up < 2; ++up)
#pragma unroll
    for (int left = 0; left < 2; ++left)
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float v = to_float(read[up][left].v[i]);
#pragma unroll
        for (int row = 0; row < 2 - up; ++row)
#pragma unroll
          for (int column = 0; column < 2 - left; ++column) sum[row][column][i] += taken[up][left].v[i] == (row + 2 * up) * 3 + column + 2 * left ? v : 0;
      }
#pragma unroll
  for (int row = 0; row < 2; ++row)
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int h = 2 * at.row + row - (int)arg.pad_h, w = 2 * at.column + column - (int)arg.pad_w;
      if ((unsigned)h < (unsigned)arg.h && (unsigned)w < (unsigned)arg.w)
        dx[(((long long)at.image * (int)arg.h + h) * (int)arg.w + w) * groups + at.group] = rounded(sum[row][column]);
    }
}

// What a window's sum is multiplied by; its first tap is at (h0, w0).
DEVICE float share_of(const PoolArguments& arg, int h0, int w0) {
  const int pad_h = arg.padded ? (int)arg.pad_h : 0, pad_w = arg.padded ? (int)arg.pad_w : 0;
  const int down = min(h0 + (int)arg.r, (int)arg.h + pad_h) - max(h0, -pad_h), right = min(w0 + (int)arg.s, (int)arg.w + pad_w) - max(w0, -pad_w);
  return 1.0f / (arg.divisor ? (int)arg.divisor : max(down * right, 1));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mean_pool(const Channels* __restrict__ x, Channels* __restrict__ y, const __grid_constant__ PoolArguments arg) {
  AFTER_LAST_LAUNCH
  const int thread = blockIdx.x * THREADS + threadIdx.x;
  if (thread >= (int)arg.threads) return;
  const Place at(arg, thread);
  const int groups = (int)arg.groups, h0 = at.row * (int)arg.stride_h - (int)arg.pad_h, w0 = at.column * (int)arg.stride_w - (int)arg.pad_w;
  const int last_row = min(h0 + (int)arg.r, (int)arg.h), last_column = min(w0 + (int)arg.s, (int)arg.w);
  float sum[V] = {};
  for (int row = max(h0, 0); row < last_row; ++row) {
    const Channels* const line = x + ((long long)at.image * (int)arg.h + row) * (int)arg.w * groups + at.group;
    for (int column = max(w0, 0); column < last_column; ++column) {
      const Channels read = line[column * groups];
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += to_float(read.v[i]);
    }
  }
  const float share = share_of(arg, h0, w0);
  Channels made;
#pragma unroll
  for (int i = 0; i < V; ++i) made.v[i] = from_float<data_t>(sum[i] * share);
  y[thread] = made;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mean_pool_backward(const Channels* __restrict__ dy, Channels* __restrict__ dx, const __grid_constant__ PoolArguments arg) {
  AFTER_LAST_LAUNCH
  const int thread = blockIdx.x * THREADS + threadIdx.x;
  if (thread >= (int)arg.threads) return;
  const Place at(arg, thread);
  const int groups = (int)arg.groups, stride_h = (int)arg.stride_h, stride_w = (int)arg.stride_w;
  const int down = at.row + (int)arg.pad_h, right = at.column + (int)arg.pad_w;
  float sum[V] = {};
  for (int p = min(divided(down, arg.by_stride_h), (int)arg.p - 1); p >= 0 && down - p * stride_h < (int)arg.r; --p) {
    const long long line = ((long long)at.image * (int)arg.p + p) * (int)arg.q * groups + at.group;
    for (int q = min(divided(right, arg.by_stride_w), (int)arg.q - 1); q >= 0 && right - q * stride_w < (int)arg.s; --q) {
      const Channels read = dy[line + q * groups];
      const float share = share_of(arg, p * stride_h - (int)arg.pad_h, q * stride_w - (int)arg.pad_w);
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] = fmaf(to_float(read.v[i]), share, sum[i]);
    }
  }
  dx[thread] = rounded(sum);
}
