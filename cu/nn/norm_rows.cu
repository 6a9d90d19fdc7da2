// norm_rows.cu: norms of rows of neighbours, and an activation behind them: norm.cuh has the formula. A row is a group of an image of an NCHW array, or what
// a layer or RMS norm normalises.
//
//   norm_rows          all of it in one launch, with the numbers in shared memory, for rows that fit a block's
//   norm_rows_moments  parts[row][slice][mean less the row's first number, squared deviations], which norm_finish (norm_planes.cu) combines
//   norm_rows_apply    out = activation((x - mean) * rstd * gamma + beta)
//
// Layout   x, out: [rows][pixels]. gamma, beta: of the arrays' type or float; number e of a row takes member (row mod groups) * each + e / plane.
// Mapping  norm_rows: `width` threads, a power of two -> a row, THREADS / width rows a block. The others: block -> (row, slice).
//          Thread -> VEC neighbours at a time. apply begins with the last blocks, which are in the L2 cache.
// Memory   registers: UNROLL items under way. shared: the numbers of norm_rows, where a thread finds its own again, and what warps add.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/nn/norm_rows.cu
#include "nn/norm.cuh"

constexpr int UNROLL = VEC * sizeof(data_t) < 16 ? 8 : 4;

// gamma and beta of VEC neighbours of a row, whose channels begin at `base`
DEVICE void parameters_of(float (&a)[VEC], float (&b)[VEC], const Parameter& gamma, const Parameter& beta, const NormShape& shape, int base, int first) {
  const int plane = (int)shape.plane;
  if (plane == 1) {
    parameters_of(a, gamma, base + first, 1);
    parameters_of(b, beta, base + first, 0);
    return;
  }
  const bool alike = plane % VEC == 0;  // VEC neighbours are of one channel
  const int channel = divided(first, shape.by_plane);
  a[0] = gamma.at(base + channel, 1), b[0] = beta.at(base + channel, 0);
#pragma unroll
  for (int i = 1; i < VEC; ++i) {
    const int own = alike ? channel : divided(first + i, shape.by_plane);
    a[i] = own == channel ? a[0] : gamma.at(base + own, 1);
    b[i] = own == channel ? b[0] : beta.at(base + own, 0);
  }
}

// Adds two numbers over the `width` threads of a row; all of them get the sums.
DEVICE float2 add_row(float2 v, float2* room, int width) {
  for (int mask = min(width, 32) / 2; mask; mask /= 2) {
    v.x += __shfl_xor_sync(~0u, v.x, mask);
    v.y += __shfl_xor_sync(~0u, v.y, mask);
  }
  if (width > 32) {
    const int own = width / 32, warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) room[warp] = v;
    __syncthreads();
    const float2* const of = room + warp / own * own;
    v = of[0];
    for (int w = 1; w < own; ++w) v.x += of[w].x, v.y += of[w].y;
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_rows(const data_t* __restrict__ x, const void* __restrict__ gamma, const void* __restrict__ beta, data_t* __restrict__ out,
              float2* __restrict__ stats, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) raw_t kept[];  // [items][THREADS]
  __shared__ float2 room[2][WARPS];
  const int width = (int)shape.width, own = threadIdx.x & (width - 1);
  const long long row = (long long)blockIdx.x * (THREADS / width) + threadIdx.x / width;
  const int numbers = row < shape.images ? (int)shape.pixels : 0;
  const data_t* const from = x + row * shape.pixels;
  const float n = (float)shape.pixels;
  float sum = 0;
  raw_t* to_keep = kept + threadIdx.x;
#pragma unroll 1
  for (int at = own * VEC; at < numbers; at += UNROLL * width * VEC, to_keep += UNROLL * THREADS) {
    raw_t raw[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (at + u * width * VEC < numbers) raw[u] = load(from + at + u * width * VEC);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (at + u * width * VEC < numbers) {
        float v[VEC];
        floats_of(v, raw[u]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += v[i];
        to_keep[u * THREADS] = raw[u];
      }
  }
  const float near = shape.rms ? 0 : add_row(make_float2(sum, 0), room[0], width).x / n;  // the mean but for rounding
  float2 off = make_float2(0, 0);
  const raw_t* of_kept = kept + threadIdx.x;
#pragma unroll 1
  for (int at = own * VEC; at < numbers; at += width * VEC, of_kept += THREADS) {
    float v[VEC];
    floats_of(v, *of_kept);
#pragma unroll
    for (int i = 0; i < VEC; ++i) off.x += v[i] - near, off.y = fmaf(v[i] - near, v[i] - near, off.y);
  }
  off = add_row(off, room[1], width);
  const Moments m = moments_of(n, near, shape.rms ? 0 : off.x, off.y);
  const float rstd = rstd_of(m.squares, n, shape);
  if (stats && own == 0 && numbers) stats[row] = make_float2(m.mean, rstd);
  const Parameter factor = gamma_of(gamma, shape), summand = beta_of(beta, shape);
  const int base = shape.groups == 1 ? 0 : (int)(row - divided((int)row, shape.by_groups) * shape.groups) * (int)shape.each;
  data_t* const to = out + row * shape.pixels;
  of_kept = kept + threadIdx.x;
#pragma unroll 1
  for (int at = own * VEC; at < numbers; at += width * VEC, of_kept += THREADS) {
    float v[VEC], a[VEC], b[VEC];
    floats_of(v, *of_kept);
    parameters_of(a, b, factor, summand, shape, base, at);
#pragma unroll
    for (int i = 0; i < VEC; ++i) v[i] = fmaf((v[i] - m.mean) * rstd, a[i], b[i]);
    activate((int)shape.activation, v);
    store(to + at, v);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    norm_rows_moments(const data_t* __restrict__ x, float* __restrict__ parts, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Divided of_slice(blockIdx.x, shape.slices, shape.by_slices);
  const data_t* const from = x + of_slice.quotient * shape.pixels;
  const int start = of_slice.rest * (int)shape.per, end = min(start + (int)shape.per, (int)shape.pixels);
  float all = 0, squares = 0, count = 0;
  int at = start + threadIdx.x * VEC;
  const float first = at < end ? to_float(from[at]) : 0, near = shape.rms ? 0 : to_float(from[0]);
  for (; at < end; at += THREADS * VEC * UNROLL) {
    raw_t raw[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (at + u * THREADS * VEC < end) raw[u] = load(from + at + u * THREADS * VEC);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (at + u * THREADS * VEC < end) {
        float v[VEC];
        floats_of(v, raw[u]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float off = v[i] - first;
          all += off;
          squares = fmaf(off, off, squares);
        }
        count += VEC;
      }
  }
  __shared__ Moments noted[WARPS];
  Moments m = moments_of(count, first - near, all, squares);
  m.add_lanes(1);
  if (threadIdx.x % 32 == 0) noted[threadIdx.x / 32] = m;
  __syncthreads();
  if (threadIdx.x) return;
  m = noted[0];
  for (int w = 1; w < WARPS; ++w) m.add(noted[w]);
  parts[2 * blockIdx.x] = m.mean;
  parts[2 * blockIdx.x + 1] = m.squares;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    norm_rows_apply(const data_t* __restrict__ x, const float2* __restrict__ stats, const void* __restrict__ gamma, const void* __restrict__ beta,
                    data_t* __restrict__ out, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const Divided of_slice(gridDim.x - 1 - blockIdx.x, shape.slices, shape.by_slices);
  const int row = of_slice.quotient;
  const float2 s = stats[row];
  const Parameter factor = gamma_of(gamma, shape), summand = beta_of(beta, shape);
  const int base = (row - divided(row, shape.by_groups) * (int)shape.groups) * (int)shape.each;
  const data_t* const from = x + row * shape.pixels;
  data_t* const to = out + row * shape.pixels;
  const int start = of_slice.rest * (int)shape.per, end = min(start + (int)shape.per, (int)shape.pixels);
  for (int at = start + threadIdx.x * VEC; at < end; at += THREADS * VEC * UNROLL) {
    raw_t raw[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (at + u * THREADS * VEC < end) raw[u] = load_last(from + at + u * THREADS * VEC);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (at + u * THREADS * VEC < end) {
        float v[VEC], a[VEC], b[VEC];
        floats_of(v, raw[u]);
        parameters_of(a, b, factor, summand, shape, base, at + u * THREADS * VEC);
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = fmaf((v[i] - s.x) * s.y, a[i], b[i]);
        activate((int)shape.activation, v);
        store(to + at + u * THREADS * VEC, v);
      }
  }
}
