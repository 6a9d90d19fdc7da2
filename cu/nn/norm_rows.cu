// norm_rows.cu: norms of rows of neighbours, and an activation behind them: norm.cuh has the formula. A row is a group of an image of an NCHW array, or what
// a layer or RMS norm normalises.
//
//   norm_rows          all of it in one launch, with the numbers in registers, for rows that fit a block's
//   norm_rows_moments  parts[row][slice][mean less the row's first number, squared deviations], which norm_finish (norm_planes.cu) combines
//   norm_rows_apply    out = activation((x - mean) * rstd * gamma + beta)
//
// Layout   x, out: [rows][pixels]. gamma, beta: of the arrays' type or float; number e of a row takes member (row mod groups) * each + e / plane.
// Mapping  norm_rows: `width` threads, a power of two -> a row, THREADS / width rows of a block at once; a block takes one set of them after
//          another, and loads the next while it computes. The others: block -> (row, slice). Thread -> VEC neighbours at a time.
//          apply begins with the last blocks, which are in the L2 cache.
// Memory   registers: UNROLL items under way; ITEMS of a row, and of the next. shared: what warps add.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/nn/norm_rows.cu
#include "nn/norm.cuh"

constexpr int UNROLL = VEC * sizeof(data_t) < 16 ? 8 : 4;
constexpr int ITEMS = 4;      // the most of a thread in norm_rows, VEC numbers each
constexpr int STAGED = 4096;  // the most numbers of a row whose gamma and beta norm_rows keeps in shared memory

struct alignas(VEC % 4 == 0 ? 16 : 4) Floats {
  float v[VEC];
};

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
  extern __shared__ __align__(16) float parameters[];  // gamma and beta, if they are those of all rows
  __shared__ float2 room[2][WARPS];
  const int width = (int)shape.width, own = threadIdx.x & (width - 1), at_once = THREADS / width, numbers = (int)shape.pixels;
  const Parameter factor = gamma_of(gamma, shape), summand = beta_of(beta, shape);
  const bool staged = shape.plane == 1 && shape.groups == 1 && numbers <= STAGED;
  if (staged) {
    for (int i = threadIdx.x; i < numbers; i += THREADS) parameters[i] = factor.at(i, 1), parameters[numbers + i] = summand.at(i, 0);
    __syncthreads();
  }
  const float n = (float)shape.pixels;
  raw_t ahead[ITEMS] = {};
  auto fetch = [&](long long row) {
#pragma unroll
    for (int u = 0; u < ITEMS; ++u)
      if (row < shape.images && (u * width + own) * VEC < numbers) ahead[u] = load(x + row * numbers + (u * width + own) * VEC);
  };
  int turn = 0;
  // adds some(v) of the numbers of each item over the row
  auto add = [&](const raw_t(&raw)[ITEMS], auto some) {
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int u = 0; u < ITEMS; ++u)
      if ((u * width + own) * VEC < numbers) {
        float v[VEC];
        floats_of(v, raw[u]);
        const float2 more = some(v);
        sum.x += more.x, sum.y += more.y;
      }
    return add_row(sum, room[turn ^= 1], width);
  };
  constexpr bool EARLY = THREADS < 1024;  // registers hold the next row, too
  if (EARLY) fetch((long long)blockIdx.x * at_once + threadIdx.x / width);
  for (long long first = (long long)blockIdx.x * at_once; first < shape.images; first += (long long)gridDim.x * at_once) {
    const long long row = first + threadIdx.x / width;
    if (!EARLY) fetch(row);
    raw_t raw[ITEMS];
#pragma unroll
    for (int u = 0; u < ITEMS; ++u) raw[u] = ahead[u];
    if (EARLY) fetch(row + (long long)gridDim.x * at_once);
    float near = 0;  // the mean but for rounding
    if (!shape.rms)
      near = add(raw, [](const float(&v)[VEC]) {
        float some = 0;
#pragma unroll
        for (int i = 0; i < VEC; ++i) some += v[i];
        return make_float2(some, 0);
      }).x / n;
    const float2 off = add(raw, [&](const float(&v)[VEC]) {
      float2 some = make_float2(0, 0);
      if (shape.rms) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) some.y = fmaf(v[i], v[i], some.y);
        return some;
      }
#pragma unroll
      for (int i = 0; i < VEC; ++i) some.x += v[i] - near, some.y = fmaf(v[i] - near, v[i] - near, some.y);
      return some;
    });
    const Moments m = moments_of(n, near, shape.rms ? 0 : off.x, off.y);
    const float rstd = rstd_of(m.squares, n, shape);
    if (row >= shape.images) continue;
    if (stats && own == 0) stats[row] = make_float2(m.mean, rstd);
    const int base = shape.groups == 1 ? 0 : (int)(row - divided((int)row, shape.by_groups) * shape.groups) * (int)shape.each;
#pragma unroll
    for (int u = 0; u < ITEMS; ++u)
      if ((u * width + own) * VEC < numbers) {
        float v[VEC];
        floats_of(v, raw[u]);
        const int at = (u * width + own) * VEC;
        Floats a, b;
        if (staged) {
          a = *(const Floats*)(parameters + at), b = *(const Floats*)(parameters + numbers + at);
        } else {
          parameters_of(a.v, b.v, factor, summand, shape, base, at);
        }
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = fmaf((v[i] - m.mean) * rstd, a.v[i], b.v[i]);
        activate((int)shape.activation, v);
        store(out + row * numbers + (u * width + own) * VEC, v);
      }
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
  // the mean of the slice, and the deviations from it: a thread's own are from its own first number
  __shared__ float2 room[2][WARPS];
  const float mean = add_row(make_float2(count > 0 ? fmaf(count, first - near, all) : 0, 0), room[0], THREADS).x / (float)(end - start), off = first - near - mean;
  const float square = add_row(make_float2(count > 0 ? fmaf(off, fmaf(count, off, 2 * all), squares) : 0, 0), room[1], THREADS).x;
  if (threadIdx.x) return;
  parts[2 * blockIdx.x] = mean;
  parts[2 * blockIdx.x + 1] = square < 0 ? 0 : square;  // a NaN stays one
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
