// norm_planes.cu: group and instance norms of arrays with the channels last, and an activation behind them: norm.cuh has the formula.
//
//   norm_planes_moments   parts[image][slice][mean, squared deviations][channel] of the pixels of a slice; means are relative to the first number of the
//                         image's group, so that a large one costs no digits
//   norm_finish           stats[image][group] = mean, rstd of the slices' parts of a group's channels, combined in double
//   norm_planes_apply     out = activation((x - mean) * rstd * gamma + beta)
//
// Layout   x, out: [N][P][C]; gamma, beta: [C], of the arrays' type or float.
// Mapping  thread -> VEC neighbours of a pixel, a column; `width` threads side by side read neighbours, `down` such rows of threads read pixels.
//          Block -> (image, slice, tile of columns). apply begins with the last slices: the launch before has read them last, so they are in the L2
//          cache.
// Memory   registers: UNROLL items under way. shared: the moments that warps combine.
// Limits   a block sums up to 32 columns.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/nn/norm_planes.cu
#include "nn/norm.cuh"

constexpr int UNROLL = VEC * sizeof(data_t) < 16 ? 8 : 4;

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    norm_planes_moments(const data_t* __restrict__ x, const data_t* __restrict__ added, float* __restrict__ parts, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Stand at(shape, blockIdx.x);
  const int width = (int)shape.width, channels = (int)shape.channels;
  const data_t* const from = at.first_pixel(x, shape);
  data_t near[VEC];  // the group's first number of the image, which means are relative to; nobody waits for it before the end
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    const int channel = at.inside ? at.column * VEC + i : 0;
    near[i] = x[at.image * shape.pixels * channels + divided(channel, shape.by_each) * (int)shape.each];
  }
  float first[VEC] = {}, all[VEC] = {}, squares[VEC] = {};
  int pixel = at.start + at.lane, count = 0;
  const int step = at.down * UNROLL;
  for (; pixel + step - at.down < at.end; pixel += step, count += UNROLL) {
    raw_t raw[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) raw[u] = load(from + (long long)(pixel + u * at.down) * channels);
    if (count == 0) floats_of(first, raw[0]);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float v[VEC];
      floats_of(v, raw[u]);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float off = v[i] - first[i];
        all[i] += off;
        squares[i] = fmaf(off, off, squares[i]);
      }
    }
  }
  for (; pixel < at.end; pixel += at.down, ++count) {
    float v[VEC];
    floats_of(v, load(from + (long long)pixel * channels));
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      if (count == 0) first[i] = v[i];
      const float off = v[i] - first[i];
      all[i] += off;
      squares[i] = fmaf(off, off, squares[i]);
    }
  }
  // the mean of the slice, and the deviations from it: a thread's own are from its own first number
  __shared__ float room[2][WARPS][VEC][33], mean_of[VEC][32];  // 33: threads that add read other banks
  const int warp = threadIdx.x / 32, beside = threadIdx.x % 32, of_slice = min((int)shape.per, (int)shape.pixels - at.start);
  auto note = [&](float (&v)[VEC], float (&to)[WARPS][VEC][33]) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      for (int mask = 16; mask >= width; mask /= 2) v[i] += __shfl_xor_sync(~0u, v[i], mask);
      if (beside < width) to[warp][i][beside] = v[i];
    }
    __syncthreads();
  };
  const int column = threadIdx.x / VEC, part = threadIdx.x % VEC;  // a thread adds what warps have of one channel
  auto added_up = [&](const float (&of)[WARPS][VEC][33]) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += of[w][part][column];
    return sum;
  };
  float sum[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    first[i] -= shape.rms ? 0 : to_float(near[i]);
    sum[i] = count ? fmaf((float)count, first[i], all[i]) : 0;
  }
  note(sum, room[0]);
  const bool adds = column < width;
  const float mean = adds ? added_up(room[0]) / (float)of_slice : 0;
  if (adds) mean_of[part][column] = mean;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    const float off = first[i] - mean_of[i][at.own];
    sum[i] = count ? fmaf(off, fmaf((float)count, off, 2 * all[i]), squares[i]) : 0;
  }
  note(sum, room[1]);
  const int channel = (at.tile * (int)shape.across + column) * VEC + part;
  if (!adds || column >= (int)shape.across || channel >= channels) return;
  float* const to = parts + ((long long)at.image * shape.slices + at.slice) * 2 * channels;
  to[channel] = mean + (added ? to_float(added[(long long)at.image * channels + channel]) : 0);
  const float square = added_up(room[1]);
  to[channels + channel] = square < 0 ? 0 : square;  // a NaN stays one
}

// A block has as many threads as there are parts to combine. `per` numbers are in a part, `pixels - (slices - 1) * per` in the last of an image.
// `noted`: the parts are a convolution's (pixel_store.cuh), whose means are relative to nothing.
extern "C" __global__ void __launch_bounds__(1024)
    norm_finish(const data_t* __restrict__ x, const float* __restrict__ parts, float2* __restrict__ stats,
                const data_t* __restrict__ added, const __grid_constant__ NormShape shape, const long long noted) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Divided of_image(blockIdx.x, shape.groups, shape.by_groups);
  const int each = (int)shape.each, channels = (int)shape.channels, slices = (int)shape.slices, per = (int)shape.per, threads = blockDim.x;
  const int last = (int)shape.pixels - (slices - 1) * per;
  const long long first = of_image.rest * each;
  const float* const from = parts + (long long)of_image.quotient * slices * 2 * channels + first;
  const float near = shape.rms ? 0 : noted ? from[0] : to_float(x[of_image.quotient * shape.pixels * channels + first]);
  double sum = 0, square = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < slices * each; i += threads) {
    const Divided of_slice(i, each, shape.by_each);
    const float* const part = from + (long long)of_slice.quotient * 2 * channels + of_slice.rest;
    const float more = noted && added ? to_float(added[(long long)of_image.quotient * channels + first + of_slice.rest]) : 0;
    const double count = of_slice.quotient == slices - 1 ? last : per, off = (noted ? part[0] - near : part[0]) + more;
    sum += count * off;
    square += part[channels] + count * off * off;
  }
  __shared__ double sums[32], squares[32];
  for (int mask = 16; mask; mask /= 2) {
    sum += __shfl_xor_sync(~0u, sum, mask);
    square += __shfl_xor_sync(~0u, square, mask);
  }
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum, squares[threadIdx.x / 32] = square;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < threads / 32; ++w) sum += sums[w], square += squares[w];
  const double n = (double)shape.pixels * each, left = shape.rms ? square : square - sum * (sum / n);
  stats[blockIdx.x] = make_float2(shape.rms ? 0 : (float)(near + sum / n), rstd_of((float)(left < 0 ? 0 : left), (float)n, shape));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    norm_planes_apply(const data_t* __restrict__ x, const float2* __restrict__ stats, const void* __restrict__ gamma, const void* __restrict__ beta,
                      const data_t* __restrict__ added, data_t* __restrict__ out, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Stand at(shape, gridDim.x - 1 - blockIdx.x);
  const int channels = (int)shape.channels, step = at.down * UNROLL;
  const long long offset = at.first_pixel(x, shape) - x;
  const data_t* const from = x + offset;
  data_t* const to = out + offset;
  int pixel = at.start + at.lane;
  raw_t raw[UNROLL];
  auto fetch = [&]() {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * at.down < at.end) raw[u] = load_last(from + (long long)(pixel + u * at.down) * channels);
  };
  fetch();  // on its way while the parameters are
  float mean[VEC], a[VEC], b[VEC], more[VEC];
  const int first = at.inside ? at.column * VEC : 0;
  parameters_of(a, b, gamma_of(gamma, shape), beta_of(beta, shape), first);
  summands_of(more, added, (long long)at.image * channels + first);
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    const float2 s = stats[at.image * (int)shape.groups + divided(first + i, shape.by_each)];
    mean[i] = s.x - more[i];
    a[i] *= s.y;
  }
  while (pixel < at.end) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * at.down < at.end) {
        float v[VEC];
        floats_of(v, raw[u]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = fmaf(v[i] - mean[i], a[i], b[i]);
        activate((int)shape.activation, v);
        store(to + (long long)(pixel + u * at.down) * channels, v);
      }
    pixel += step;
    fetch();
  }
}
