// norm_small.cu: group and instance norms of small planes with the channels last, and an activation behind them, in one launch: norm.cuh has the formula.
//
// Layout   x, out: [N][P][C]; gamma, beta: [C], of the arrays' type or float; stats, if given: [N][groups] of mean and rstd.
// Mapping  cluster -> (image, tile of columns) with whole groups of channels; its blocks have a slice of the pixels each. Thread -> VEC neighbours of a
//          pixel, a column; `width` threads side by side read neighbours, `down` such rows of threads read pixels. VEC divides a group's channels.
// Method   x is read once and kept in shared memory, where a thread finds its own numbers again. A block adds them, then their deviations from that mean
//          and the squares of these; the blocks of a cluster read one another's moments and combine them.
// Memory   shared: the block's numbers, what warps add, and the block's moments.
// Limits   up to 32 columns a block.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/nn/norm_small.cu
#include "nn/norm.cuh"

constexpr int UNROLL = THREADS > 512 ? 4 : 8;  // as many as registers hold

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER_DIMS
    norm_small(const data_t* __restrict__ x, const void* __restrict__ gamma, const void* __restrict__ beta, const data_t* __restrict__ added,
               data_t* __restrict__ out, float2* __restrict__ stats, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) raw_t kept[];  // [items][THREADS]
  __shared__ GroupRoom room[2];
#if CLUSTER > 1
  __shared__ alignas(16) float4 noted[32];
#endif
  // the blocks of a cluster are slices of an image; tiles come after them
  const int rank = cluster_rank(), width = (int)shape.width, channels = (int)shape.channels;
  const Divided of_tile(blockIdx.x / CLUSTER, shape.tiles, shape.by_tiles);
  const Stand at(shape, (of_tile.quotient * CLUSTER + rank) * (int)shape.tiles + of_tile.rest);
  const int each = (int)shape.each / VEC, group = at.inside ? divided(at.column * VEC, shape.by_each) : 0;
  const int first = at.inside ? group * each - at.tile * (int)shape.across : 0;  // the group's first column in the block
  const int start = at.start + at.lane, down = at.down, end = at.end;
  const long long offset = at.first_pixel(x, shape) - x;
  const data_t* const from = x + offset;
  int pixel = start;
  raw_t raw[UNROLL];
  auto fetch = [&]() {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * down < end) raw[u] = load(from + (long long)(pixel + u * down) * channels);
  };
  fetch();  // on its way while everything else is
  // the group's first number of the image, which all blocks of the cluster know: what is added is relative to it
  const data_t first_number = x[at.image * shape.pixels * channels + group * (int)shape.each];
  float a[VEC], b[VEC];
  parameters_of(a, b, gamma_of(gamma, shape), beta_of(beta, shape), at.inside ? at.column * VEC : 0);
  const float known = shape.rms ? 0 : to_float(first_number);
  float base[VEC];  // what is subtracted from a number of the array
  summands_of(base, added, (long long)at.image * channels + (at.inside ? at.column * VEC : 0));
#pragma unroll
  for (int i = 0; i < VEC; ++i) base[i] = known - base[i];
  float sum = 0;
  raw_t* to_keep = kept + threadIdx.x;
#pragma unroll 1
  while (pixel < end) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * down < end) {
        float v[VEC];
        floats_of(v, raw[u]);
        float some = 0;
#pragma unroll
        for (int i = 0; i < VEC; ++i) some += v[i] - base[i];
        sum += some;
        to_keep[u * THREADS] = raw[u];
      }
    pixel += UNROLL * down, to_keep += UNROLL * THREADS;
    fetch();
  }
  const float n = (float)(min((int)shape.per, max((int)shape.pixels - at.start, 0)) * (int)shape.each);
  float near = 0;  // the block's mean less `known`, but for rounding
  if (!shape.rms) near = n > 0 ? add_group(make_float2(sum, 0), room[0], at.own, width, first, each).x / n : 0;
  float2 off = make_float2(0, 0);
  const raw_t* of_kept = kept + threadIdx.x;
#pragma unroll 1
  for (pixel = start; pixel < end; pixel += down, of_kept += THREADS) {
    float v[VEC];
    floats_of(v, *of_kept);
    float2 some = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float rest = v[i] - base[i] - near;
      some.x += rest;
      some.y = fmaf(rest, rest, some.y);
    }
    off.x += some.x, off.y += some.y;  // VEC numbers first, so that fewer roundings meet
  }
  off = add_group(off, room[1], at.own, width, first, each);
  Moments m = moments_of(n, near, shape.rms ? 0 : off.x, off.y);
#if CLUSTER > 1
  if (threadIdx.x < width) noted[at.own] = make_float4(m.n, m.mean, m.squares, 0);
  cluster_barrier();
  float4 there[CLUSTER];
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) there[r] = load_of_rank(shared_address(noted + at.own), r);
  m = Moments();
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    Moments more;
    more.n = there[r].x, more.mean = there[r].y, more.squares = there[r].z;
    m.add(more);
  }
  cluster_arrive();
#endif
  const float mean = known + m.mean, rstd = rstd_of(m.squares, m.n, shape);
  if (stats && at.inside && at.lane == 0 && rank == 0 && at.own == first) stats[at.image * (int)shape.groups + group] = make_float2(mean, rstd);
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    a[i] *= rstd;
    base[i] += m.mean;
  }
  of_kept = kept + threadIdx.x;
  data_t* to = out + offset + (long long)start * channels;
#pragma unroll 1
  for (pixel = start; pixel < end; pixel += down, of_kept += THREADS, to += (long long)down * channels) {
    float v[VEC];
    floats_of(v, *of_kept);
#pragma unroll
    for (int i = 0; i < VEC; ++i) v[i] = fmaf(v[i] - base[i], a[i], b[i]);
    activate((int)shape.activation, v);
    store(to, v);
  }
#if CLUSTER > 1
  cluster_wait();  // nobody reads this block's shared memory any more
#endif
}
