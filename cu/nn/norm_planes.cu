// norm_planes.cu: group and instance norms of arrays with the channels last, and an activation behind them: norm.cuh has the formula.
//
//   norm_planes_moments   parts[image][slice][mean, squared deviations][channel] of the pixels of a slice; means are relative to the first number of the
//                         image's group, so that a large one costs no digits
//   norm_finish           stats[image][group] = mean, rstd of the slices' parts of a group's channels, combined in double
//   norm_planes_apply     out = activation((x - mean) * rstd * gamma + beta)
//   norm_parts_apply      the same, from parts[image][slice][group] that moments writes where a block's columns are whole groups (`of_groups`): two launches
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

// The groups of a block's columns, where these are whole groups.
struct TileOfGroups {
  int each, first, count;
  DEVICE TileOfGroups(const Stand& at, const NormShape& shape) {
    const int channel = at.tile * (int)shape.across * VEC;
    each = (int)shape.each, first = divided(channel, shape.by_each);
    count = divided(min((int)shape.across * VEC, (int)shape.channels - channel), shape.by_each);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    norm_planes_moments(const data_t* __restrict__ x, const data_t* __restrict__ added, float* __restrict__ parts, const __grid_constant__ NormShape shape,
                        const long long of_groups) {
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
  __shared__ Moments noted[WARPS][VEC][32];
  const int warp = threadIdx.x / 32, beside = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    Moments m = moments_of(count, first[i] - (shape.rms ? 0 : to_float(near[i])), all[i], squares[i]);
    m.add_lanes(width);
    if (beside < width) noted[warp][i][beside] = m;
  }
  __syncthreads();
  float* const to = parts + ((long long)at.image * shape.slices + at.slice) * 2 * channels;
  for (int j = threadIdx.x; j < width * VEC; j += THREADS) {
    const int own = j / VEC, i = j % VEC, channel = (at.tile * (int)shape.across + own) * VEC + i;
    if (own >= (int)shape.across || channel >= channels) continue;
    Moments m = noted[0][i][own];
    for (int w = 1; w < WARPS; ++w) m.add(noted[w][i][own]);
    m.mean += added ? to_float(added[(long long)at.image * channels + channel]) : 0;
    if (of_groups) {
      noted[0][i][own] = m;
    } else {
      to[channel] = m.mean;
      to[channels + channel] = m.squares;
    }
  }
  if (!of_groups) return;
  __syncthreads();
  const TileOfGroups groups(at, shape);
  for (int g = threadIdx.x; g < groups.count; g += THREADS) {
    const int begin = g * groups.each;
    float mean = 0, sum = 0;
    for (int c = begin; c < begin + groups.each; ++c) mean += noted[0][c % VEC][c / VEC].mean;
    mean /= groups.each;
    for (int c = begin; c < begin + groups.each; ++c) {
      const Moments& m = noted[0][c % VEC][c / VEC];
      sum += m.squares + m.n * (m.mean - mean) * (m.mean - mean);
    }
    ((float2*)parts)[((long long)at.image * shape.slices + at.slice) * shape.groups + groups.first + g] = make_float2(mean, sum);
  }
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

// Mean and rstd of a block's groups, from the parts of their slices. `lanes` threads side by side have a group. The first block of an image notes them.
DEVICE void combine_parts(float2* of_groups, const TileOfGroups& groups, const Stand& at, const data_t* x, const float2* parts, float2* stats,
                          const NormShape& shape, int slices, int per) {
  int lanes = 32;
  while (lanes * groups.count > THREADS) lanes /= 2;
  const int own = threadIdx.x / lanes, lane = threadIdx.x % lanes, group = groups.first + own, end = own < groups.count ? slices : 0;
  const float2* const from = parts + (long long)at.image * slices * shape.groups + group;
  const float whole = (float)per * groups.each, last = (float)((int)shape.pixels - (slices - 1) * per) * groups.each, n = (float)shape.pixels * groups.each;
  float sum = 0, squares = 0;
#pragma unroll 4
  for (int s = lane; s < end; s += lanes) sum += (s == slices - 1 ? last : whole) * from[(long long)s * shape.groups].x;
  for (int mask = lanes / 2; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  const float mean = shape.rms ? 0 : sum / n;
#pragma unroll 4
  for (int s = lane; s < end; s += lanes) {
    const float2 part = from[(long long)s * shape.groups];
    squares += part.y + (s == slices - 1 ? last : whole) * (part.x - mean) * (part.x - mean);
  }
  for (int mask = lanes / 2; mask; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  if (end && lane == 0) {
    const float near = shape.rms ? 0 : to_float(x[at.image * shape.pixels * shape.channels + (long long)group * groups.each]);
    of_groups[own] = make_float2(near + mean, rstd_of(squares, n, shape));
    if (stats && at.slice == 0) stats[at.image * (int)shape.groups + group] = of_groups[own];
  }
  __syncthreads();
}

// Applies a norm to a block's pixels: `stats_of` a group are known when `prepare` has been called.
template <class Prepare, class StatsOf>
DEVICE void apply_norm(const Stand& at, const data_t* x, const void* gamma, const void* beta, const data_t* added, data_t* out, const NormShape& shape,
                       const Prepare& prepare, const StatsOf& stats_of) {
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
  prepare();
  float mean[VEC], a[VEC], b[VEC], more[VEC];
  const int first = at.inside ? at.column * VEC : 0;
  parameters_of(a, b, gamma_of(gamma, shape), beta_of(beta, shape), first);
  summands_of(more, added, (long long)at.image * channels + first);
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    const float2 s = stats_of(divided(first + i, shape.by_each));
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

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    norm_planes_apply(const data_t* __restrict__ x, const float2* __restrict__ stats, const void* __restrict__ gamma, const void* __restrict__ beta,
                      const data_t* __restrict__ added, data_t* __restrict__ out, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Stand at(shape, gridDim.x - 1 - blockIdx.x);
  apply_norm(at, x, gamma, beta, added, out, shape, [] {}, [&](int group) { return stats[at.image * (int)shape.groups + group]; });
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    norm_parts_apply(const data_t* __restrict__ x, float2* __restrict__ stats, const void* __restrict__ gamma, const void* __restrict__ beta,
                     const data_t* __restrict__ added, const float2* __restrict__ parts, data_t* __restrict__ out, const __grid_constant__ NormShape shape,
                     const long long slices, const long long per) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  __shared__ float2 of_groups[32 * VEC];
  const Stand at(shape, gridDim.x - 1 - blockIdx.x);
  const TileOfGroups groups(at, shape);
  apply_norm(
      at, x, gamma, beta, added, out, shape, [&] { combine_parts(of_groups, groups, at, x, parts, stats, shape, (int)slices, (int)per); },
      [&](int group) { return of_groups[at.inside ? group - groups.first : 0]; });
}
