// norm_gradients.cu: gradients of group, instance, layer and RMS norms and of the activation behind them.
//
//   xhat = (x - mean) * rstd,   g = dout * activation'(xhat * gamma + beta), which is computed again
//   dbeta = sum g,  dgamma = sum g * xhat   of a channel
//   dx = rstd * (gamma * g - (S + xhat * T) / M) + more,   S = sum gamma * g,  T = sum gamma * g * xhat   over the M numbers of a group. An RMS norm has no S.
//   `more` is the gradient of what else reads x, if it is given: not of rows.
//
//   norm_planes_sums   parts[image][slice][sum g, sum g * xhat][channel], of arrays with the channels last
//   norm_image_sums    the same of NCHW arrays
//   norm_fold          sums[image][2][channel] of the slices, and S / M and T / M of each group
//   norm_planes_dx     dx, with the channels last. Its first blocks compute dgamma and dbeta
//   norm_image_dx      the same of NCHW arrays
//   norm_layer_dx      dx of a layer or RMS norm in one launch, and parts[block][2][channel]
//   norm_parameters    dgamma and dbeta from those parts
//
// Mapping  planes: as norm_planes.cu. image: block -> (image, channel, slice of the plane). layer: `width` threads, a power of two -> a row, and every block
//          takes rows in turn. fold: block -> (image, group), warp -> channels of it. parameters: four threads -> a channel.
// Memory   registers: UNROLL items of x and dout under way; layer: ITEMS items of both, and the sums of their channels. shared: what warps add.
// Sums     float32, of blocks' parts as well, always in the same order.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/nn/norm_gradients.cu
#include "nn/norm.cuh"

constexpr int UNROLL = 2, ITEMS = VEC == 8 ? 2 : 4;

// A thread's channels: what their numbers are normalised by.
struct Channels {
  float mean[VEC], rstd[VEC], gamma[VEC], beta[VEC];
  DEVICE Channels(const Stand& at, const NormShape& shape, const float2* stats, const void* of_gamma, const void* of_beta) {
    const Parameter factor = gamma_of(of_gamma, shape), summand = beta_of(of_beta, shape);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const int channel = at.inside ? at.column * VEC + i : 0;
      const float2 s = stats[at.image * (int)shape.groups + divided(channel, shape.by_each)];
      mean[i] = s.x, rstd[i] = s.y, gamma[i] = factor.at(channel, 1), beta[i] = summand.at(channel, 0);
    }
  }
  // xhat, and g from dout
  DEVICE void pass(int activation, float (&x)[VEC], float (&g)[VEC]) const {
    float v[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      x[i] = (x[i] - mean[i]) * rstd[i];
      v[i] = fmaf(x[i], gamma[i], beta[i]);
    }
    through_activation(activation, g, v);
  }
};

// gamma's and beta's gradients of the channels of a block, from `images` sets of [2][channels], added in their order: each channel has four threads that
// take sets in turn. They are float where gamma and beta are.
DEVICE void parameters(const float* sums, void* dgamma, void* dbeta, const NormShape& shape, int block) {
  const int lane = threadIdx.x % 32, channels = (int)shape.channels, channel = (block * WARPS + threadIdx.x / 32) * 8 + lane % 8;
  float2 all = make_float2(0, 0);
  if (channel < channels)
#pragma unroll 8
    for (long long set = lane / 8; set < shape.images; set += 4) {
      all.x += sums[set * 2 * channels + channel];
      all.y += sums[(set * 2 + 1) * channels + channel];
    }
  for (int mask = 16; mask >= 8; mask /= 2) {
    all.x += __shfl_xor_sync(~0u, all.x, mask);
    all.y += __shfl_xor_sync(~0u, all.y, mask);
  }
  if (channel >= channels || lane >= 8) return;
  auto write = [&](void* to, bool wide, float v) {
    if (to && wide) ((float*)to)[channel] = v;
    if (to && !wide) ((data_t*)to)[channel] = from_float<data_t>(v);
  };
  write(dgamma, shape.wide & 1, all.y);
  write(dbeta, shape.wide & 2, all.x);
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    norm_planes_sums(const data_t* __restrict__ x, const data_t* __restrict__ dout, const float2* __restrict__ stats, const void* __restrict__ gamma,
                     const void* __restrict__ beta, float* __restrict__ parts, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Stand at(shape, blockIdx.x);
  const int width = (int)shape.width, channels = (int)shape.channels;
  const Channels by(at, shape, stats, gamma, beta);
  const long long offset = at.first_pixel(x, shape) - x;
  float sums[VEC] = {}, products[VEC] = {};
  for (int pixel = at.start + at.lane; pixel < at.end; pixel += at.down * UNROLL) {
    raw_t xs[UNROLL], gs[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * at.down < at.end) {
        const long long here = offset + (long long)(pixel + u * at.down) * channels;
        xs[u] = load(x + here), gs[u] = load(dout + here);
      }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * at.down < at.end) {
        float v[VEC], g[VEC];
        floats_of(v, xs[u]);
        floats_of(g, gs[u]);
        by.pass((int)shape.activation, v, g);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums[i] += g[i], products[i] = fmaf(g[i], v[i], products[i]);
      }
  }
  __shared__ float2 noted[WARPS][VEC][32];
  const int warp = threadIdx.x / 32, beside = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    for (int mask = 16; mask >= width; mask /= 2) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], mask);
      products[i] += __shfl_xor_sync(~0u, products[i], mask);
    }
    if (beside < width) noted[warp][i][beside] = make_float2(sums[i], products[i]);
  }
  __syncthreads();
  float* const to = parts + ((long long)at.image * shape.slices + at.slice) * 2 * channels;
  for (int j = threadIdx.x; j < width * VEC; j += THREADS) {
    const int own = j / VEC, i = j % VEC, channel = (at.tile * (int)shape.across + own) * VEC + i;
    if (own >= (int)shape.across || channel >= channels) continue;
    float2 all = noted[0][i][own];
    for (int w = 1; w < WARPS; ++w) all.x += noted[w][i][own].x, all.y += noted[w][i][own].y;
    to[channel] = all.x;
    to[channels + channel] = all.y;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    norm_planes_dx(const data_t* __restrict__ x, const data_t* __restrict__ dout, const float2* __restrict__ stats, const float2* __restrict__ folded,
                   const void* __restrict__ gamma, const void* __restrict__ beta, const data_t* __restrict__ more, const float* __restrict__ sums,
                   data_t* __restrict__ dx, void* __restrict__ dgamma, void* __restrict__ dbeta, const __grid_constant__ NormShape shape,
                   const long long first) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  if (blockIdx.x < first) {
    parameters(sums, dgamma, dbeta, shape, blockIdx.x);
    return;
  }
  const Stand at(shape, gridDim.x - 1 - blockIdx.x);  // from the end
  const int channels = (int)shape.channels;
  const Channels by(at, shape, stats, gamma, beta);
  float s[VEC], t[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    const float2 own = folded[at.image * (int)shape.groups + divided(at.inside ? at.column * VEC + i : 0, shape.by_each)];
    s[i] = own.x, t[i] = own.y;
  }
  const long long offset = at.first_pixel(x, shape) - x;
  for (int pixel = at.start + at.lane; pixel < at.end; pixel += at.down * UNROLL) {
    raw_t xs[UNROLL], gs[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * at.down < at.end) {
        const long long here = offset + (long long)(pixel + u * at.down) * channels;
        xs[u] = load_last(x + here), gs[u] = load_last(dout + here);
      }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * at.down < at.end) {
        float v[VEC], g[VEC];
        floats_of(v, xs[u]);
        floats_of(g, gs[u]);
        by.pass((int)shape.activation, v, g);
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = by.rstd[i] * (by.gamma[i] * g[i] - fmaf(v[i], t[i], s[i]));
        const long long here = offset + (long long)(pixel + u * at.down) * channels;
        others_of(g, more, here);
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] += g[i];
        store(dx + here, v);
      }
  }
}

// The slice of a plane that a block has, and what its numbers are normalised by.
struct PlaneSlice {
  int image, channel, group, start, end, slice;
  float mean, rstd, gamma, beta;
  DEVICE PlaneSlice(const NormShape& shape, int block, const float2* stats, const void* of_gamma, const void* of_beta) {
    const Divided of_slice(block, shape.slices, shape.by_slices), of_channel(of_slice.quotient, shape.channels, shape.by_channels);
    image = of_channel.quotient, channel = of_channel.rest, slice = of_slice.rest;
    group = image * (int)shape.groups + divided(channel, shape.by_each);
    start = slice * (int)shape.per, end = min(start + (int)shape.per, (int)shape.pixels);
    const float2 s = stats[group];
    mean = s.x, rstd = s.y, gamma = gamma_of(of_gamma, shape).at(channel, 1), beta = beta_of(of_beta, shape).at(channel, 0);
  }
  DEVICE void pass(int activation, float (&x)[VEC], float (&g)[VEC]) const {
    float v[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      x[i] = (x[i] - mean) * rstd;
      v[i] = fmaf(x[i], gamma, beta);
    }
    through_activation(activation, g, v);
  }
  DEVICE long long base(const NormShape& shape) const { return ((long long)image * shape.channels + channel) * shape.pixels; }
};

// Adds two numbers over a warp; all lanes get the sums.
DEVICE float2 add_warp(float2 v) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    v.x += __shfl_xor_sync(~0u, v.x, mask);
    v.y += __shfl_xor_sync(~0u, v.y, mask);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    norm_image_sums(const data_t* __restrict__ x, const data_t* __restrict__ dout, const float2* __restrict__ stats, const void* __restrict__ gamma,
                    const void* __restrict__ beta, float* __restrict__ parts, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const PlaneSlice at(shape, blockIdx.x, stats, gamma, beta);
  const long long base = at.base(shape);
  float2 sums = make_float2(0, 0);
  for (int i = at.start + threadIdx.x * VEC; i < at.end; i += THREADS * VEC) {
    float v[VEC], g[VEC];
    floats_of(v, load(x + base + i));
    floats_of(g, load(dout + base + i));
    at.pass((int)shape.activation, v, g);
#pragma unroll
    for (int j = 0; j < VEC; ++j) sums.x += g[j], sums.y = fmaf(g[j], v[j], sums.y);
  }
  __shared__ float2 noted[WARPS];
  sums = add_warp(sums);
  if (threadIdx.x % 32 == 0) noted[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < WARPS; ++w) sums.x += noted[w].x, sums.y += noted[w].y;
  float* const to = parts + ((long long)at.image * shape.slices + at.slice) * 2 * shape.channels + at.channel;
  to[0] = sums.x;
  to[shape.channels] = sums.y;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    norm_image_dx(const data_t* __restrict__ x, const data_t* __restrict__ dout, const float2* __restrict__ stats, const float2* __restrict__ folded,
                  const void* __restrict__ gamma, const void* __restrict__ beta, const data_t* __restrict__ more, const float* __restrict__ sums,
                  data_t* __restrict__ dx, void* __restrict__ dgamma, void* __restrict__ dbeta, const __grid_constant__ NormShape shape,
                   const long long first) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  if (blockIdx.x < first) {
    parameters(sums, dgamma, dbeta, shape, blockIdx.x);
    return;
  }
  const PlaneSlice at(shape, gridDim.x - 1 - blockIdx.x, stats, gamma, beta);
  const long long base = at.base(shape);
  const float2 own = folded[at.group];
  for (int i = at.start + threadIdx.x * VEC; i < at.end; i += THREADS * VEC) {
    float v[VEC], g[VEC];
    floats_of(v, load(x + base + i));
    floats_of(g, load(dout + base + i));
    at.pass((int)shape.activation, v, g);
#pragma unroll
    for (int j = 0; j < VEC; ++j) v[j] = at.rstd * (at.gamma * g[j] - fmaf(v[j], own.y, own.x));
    others_of(g, more, base + i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) v[j] += g[j];
    store(dx + base + i, v);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_fold(const float* __restrict__ parts, const void* __restrict__ gamma, float* __restrict__ sums, float2* __restrict__ folded,
              const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Divided of_image(blockIdx.x, shape.groups, shape.by_groups);
  const int each = (int)shape.each, channels = (int)shape.channels, slices = (int)shape.slices, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float2 all = make_float2(0, 0);
  for (int c = warp; c < each; c += WARPS) {
    const int channel = of_image.rest * each + c;
    const float* const from = parts + (long long)of_image.quotient * slices * 2 * channels + channel;
    float2 own = make_float2(0, 0);
    for (int slice = lane; slice < slices; slice += 32) {
      own.x += from[(long long)slice * 2 * channels];
      own.y += from[(long long)slice * 2 * channels + channels];
    }
    own = add_warp(own);
    const float factor = gamma_of(gamma, shape).at(channel, 1);
    all.x = fmaf(factor, own.x, all.x), all.y = fmaf(factor, own.y, all.y);
    if (lane == 0) {
      sums[(long long)of_image.quotient * 2 * channels + channel] = own.x;
      sums[((long long)of_image.quotient * 2 + 1) * channels + channel] = own.y;
    }
  }
  __shared__ float2 noted[WARPS];
  if (lane == 0) noted[warp] = all;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < WARPS; ++w) all.x += noted[w].x, all.y += noted[w].y;
  const float n = (float)shape.pixels * each;
  folded[blockIdx.x] = make_float2(shape.rms ? 0 : all.x / n, all.y / n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_parameters(const float* __restrict__ sums, void* __restrict__ dgamma, void* __restrict__ dbeta, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  parameters(sums, dgamma, dbeta, shape, blockIdx.x);
}

// ---- rows, whose numbers are channels

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_layer_dx(const data_t* __restrict__ x, const data_t* __restrict__ dout, const float2* __restrict__ stats, const void* __restrict__ gamma,
                  const void* __restrict__ beta, data_t* __restrict__ dx, float* __restrict__ parts, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  __shared__ float2 room[WARPS];
  __shared__ float noted[THREADS * VEC];
  const int width = (int)shape.width, rows = THREADS / width, own = threadIdx.x & (width - 1), slot = threadIdx.x / width, numbers = (int)shape.pixels;
  const float n = (float)numbers;
  float sums[ITEMS][VEC] = {}, products[ITEMS][VEC] = {};
  for (long long first = (long long)blockIdx.x * rows; first < shape.images; first += (long long)gridDim.x * rows) {
    const long long row = first + slot;
    const int end = row < shape.images ? numbers : 0;
    const float2 s = end ? stats[row] : make_float2(0, 0);
    raw_t xs[ITEMS], gs[ITEMS];
#pragma unroll
    for (int u = 0; u < ITEMS; ++u)
      if ((own + u * width) * VEC < end) {
        const long long here = row * numbers + (own + u * width) * VEC;
        xs[u] = load(x + here), gs[u] = load(dout + here);
      }
    float2 all = make_float2(0, 0);
    float v[ITEMS][VEC], g[ITEMS][VEC];  // xhat, and gamma * g
#pragma unroll
    for (int u = 0; u < ITEMS; ++u)
      if ((own + u * width) * VEC < end) {
        floats_of(v[u], xs[u]);
        floats_of(g[u], gs[u]);
        float at[VEC], factor[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const int channel = (own + u * width) * VEC + i;
          factor[i] = gamma_of(gamma, shape).at(channel, 1);
          v[u][i] = (v[u][i] - s.x) * s.y;
          at[i] = fmaf(v[u][i], factor[i], beta_of(beta, shape).at(channel, 0));
        }
        through_activation((int)shape.activation, g[u], at);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          sums[u][i] += g[u][i];
          products[u][i] = fmaf(g[u][i], v[u][i], products[u][i]);
          g[u][i] *= factor[i];
          all.x += g[u][i], all.y = fmaf(g[u][i], v[u][i], all.y);
        }
      }
    for (int mask = min(width, 32) / 2; mask; mask /= 2) {
      all.x += __shfl_xor_sync(~0u, all.x, mask);
      all.y += __shfl_xor_sync(~0u, all.y, mask);
    }
    if (width > 32) {
      const int warp = threadIdx.x / 32, of = warp / (width / 32) * (width / 32);
      __syncthreads();
      if (threadIdx.x % 32 == 0) room[warp] = all;
      __syncthreads();
      all = room[of];
      for (int w = 1; w < width / 32; ++w) all.x += room[of + w].x, all.y += room[of + w].y;
    }
    const float mean_g = shape.rms ? 0 : all.x / n, mean_product = all.y / n;
#pragma unroll
    for (int u = 0; u < ITEMS; ++u)
      if ((own + u * width) * VEC < end) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[u][i] = s.y * (g[u][i] - fmaf(v[u][i], mean_product, mean_g));
        store(dx + row * numbers + (own + u * width) * VEC, v[u]);
      }
  }
  float* const to = parts + (long long)blockIdx.x * 2 * numbers;
#pragma unroll
  for (int u = 0; u < ITEMS; ++u)
#pragma unroll
    for (int which = 0; which < 2; ++which) {  // the block's rows, one after the other
      __syncthreads();
#pragma unroll
      for (int i = 0; i < VEC; ++i) noted[slot * width * VEC + own * VEC + i] = which ? products[u][i] : sums[u][i];
      __syncthreads();
      for (int j = threadIdx.x; j < width * VEC; j += THREADS) {
        const int channel = u * width * VEC + j;
        if (channel >= numbers) continue;
        float all = noted[j];
        for (int r = 1; r < rows; ++r) all += noted[r * width * VEC + j];
        to[which * numbers + channel] = all;
      }
    }
}
