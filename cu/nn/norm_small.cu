// norm_small.cu: group and instance norms of small planes with the channels last, and an activation behind them, in one launch: norm.cuh has the formula.
//
// Layout   x, out: [N][P][C]; gamma, beta: [C], of the arrays' type or float; stats, if given: [N][groups] of mean and rstd.
// Mapping  cluster -> (image, tile of columns) with whole groups of channels; its blocks have a slice of the pixels each. Thread -> VEC neighbours of a
//          pixel, a column; `width` threads side by side read neighbours, `down` such rows of threads read pixels. VEC divides a group's channels.
// Method   all numbers stay in registers. A block adds them, then their deviations from that mean and the squares of these; the blocks of a cluster read
//          one another's moments and combine them.
// Memory   registers: ITEMS items, which is all that a thread has. shared: what warps add, and the block's moments.
// Limits   up to 32 columns a block.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/nn/norm_small.cu
#include "nn/norm.cuh"

#ifndef ITEMS
#define ITEMS 4
#endif
constexpr int WARPS = THREADS / 32;

// Adds, over the threads of a block that have columns of the same group, two numbers each; all of them get the sums. Each warp leaves its own
// in `room`, [WARPS][32], and a column's first thread adds those of all warps.
DEVICE float2 add_group(float2 v, float2* room, int own, int width, int first, int count) {
  for (int mask = 16; mask >= width; mask /= 2) {
    v.x += __shfl_xor_sync(~0u, v.x, mask);
    v.y += __shfl_xor_sync(~0u, v.y, mask);
  }
  __syncthreads();  // `room` has been read
  if (threadIdx.x % 32 < width) room[threadIdx.x / 32 * 32 + own] = v;
  __syncthreads();
  if (threadIdx.x < width) {
    v = room[own];
    for (int w = 1; w < WARPS; ++w) v.x += room[w * 32 + own].x, v.y += room[w * 32 + own].y;
    room[own] = v;
  }
  __syncthreads();
  v = room[first];
  for (int i = 1; i < count; ++i) v.x += room[first + i].x, v.y += room[first + i].y;
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER_DIMS
    norm_small(const data_t* __restrict__ x, const void* __restrict__ gamma, const void* __restrict__ beta, data_t* __restrict__ out,
                      float2* __restrict__ stats, const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  // the blocks of a cluster are slices of an image; tiles come after them
  const int rank = cluster_rank(), width = (int)shape.width, channels = (int)shape.channels;
  const Divided of_tile(blockIdx.x / CLUSTER, shape.tiles, shape.by_tiles);
  const Stand at(shape, (of_tile.quotient * CLUSTER + rank) * (int)shape.tiles + of_tile.rest);
  const int each = (int)shape.each / VEC, group = at.inside ? divided(at.column * VEC, shape.by_each) : 0;
  const int first = at.inside ? group * each - at.tile * (int)shape.across : 0;  // the group's first column in the block
  const long long offset = at.first_pixel(x, shape) - x;
  const data_t* const from = x + offset;
  raw_t raw[ITEMS];
#pragma unroll
  for (int u = 0; u < ITEMS; ++u)
    if (at.start + at.lane + u * at.down < at.end) raw[u] = load(from + (long long)(at.start + at.lane + u * at.down) * channels);
  const Parameter factor = {gamma, (bool)(shape.wide & 1)}, summand = {beta, (bool)(shape.wide & 2)};
  float a[VEC], b[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    const int channel = at.inside ? at.column * VEC + i : 0;
    a[i] = factor.at(channel, 1);
    b[i] = summand.at(channel, 0);
  }
  __shared__ float2 room[WARPS * 32];
#if CLUSTER > 1
  __shared__ alignas(16) float4 noted[32];
#endif
  const float n = (float)(min((int)shape.per, max((int)shape.pixels - at.start, 0)) * (int)shape.each);
  // the group's first number of the image, which all blocks of the cluster know
  const float known = shape.rms ? 0 : to_float(x[at.image * shape.pixels * channels + group * (int)shape.each]);
  float sum = 0;
#pragma unroll
  for (int u = 0; u < ITEMS; ++u)
    if (at.start + at.lane + u * at.down < at.end) {
      float v[VEC];
      floats_of(v, raw[u]);
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum += v[i] - known;
    }
  float near = 0;  // the block's mean less `known`, but for rounding
  if (!shape.rms) near = n > 0 ? add_group(make_float2(sum, 0), room, at.own, width, first, each).x / n : 0;
  float2 off = make_float2(0, 0);
#pragma unroll
  for (int u = 0; u < ITEMS; ++u)
    if (at.start + at.lane + u * at.down < at.end) {
      float v[VEC];
      floats_of(v, raw[u]);
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float rest = v[i] - known - near;
        off.x += rest;
        off.y = fmaf(rest, rest, off.y);
      }
    }
  off = add_group(off, room, at.own, width, first, each);
  Moments m = moments_of(n, near, shape.rms ? 0 : off.x, off.y);
#if CLUSTER > 1
  if (threadIdx.x < width) noted[at.own] = make_float4(m.n, m.mean, m.squares, 0);
  cluster_barrier();
  m = Moments();
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    const float4 there = load_of_rank(shared_address(noted + at.own), r);
    Moments more;
    more.n = there.x, more.mean = there.y, more.squares = there.z;
    m.add(more);
  }
  cluster_arrive();
#endif
  const float mean = known + m.mean, rstd = rstd_of(m.squares, m.n, shape);
  if (stats && at.inside && at.lane == 0 && rank == 0 && at.own == first) stats[at.image * (int)shape.groups + group] = make_float2(mean, rstd);
#pragma unroll
  for (int i = 0; i < VEC; ++i) a[i] *= rstd;
  data_t* const to = out + offset;
#pragma unroll
  for (int u = 0; u < ITEMS; ++u)
    if (at.start + at.lane + u * at.down < at.end) {
      float v[VEC];
      floats_of(v, raw[u]);
#pragma unroll
      for (int i = 0; i < VEC; ++i) v[i] = fmaf(v[i] - mean, a[i], b[i]);
      activate(v);
      store(to + (long long)(at.start + at.lane + u * at.down) * channels, v);
    }
#if CLUSTER > 1
  cluster_wait();  // nobody reads this block's shared memory any more
#endif
}
