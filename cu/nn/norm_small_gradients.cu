// norm_small_gradients.cu: gradients of group and instance norms of small planes with the channels last, and of the activation behind them:
// norm_gradients.cu has the formulas.
//
//   norm_small_dx   dx plus `more` in one launch, and parts[image][slice][sum g, sum g * xhat][channel], which norm_parameters (norm_gradients.cu) adds
//
// Layout   x, dout, dx: [N][P][C]; gamma, beta: [C], of the arrays' type or float; stats: [N][groups] of mean and rstd.
// Mapping  as norm_small.cu: cluster -> (image, tile of columns) with whole groups; its blocks have a slice of the pixels each; thread -> a column.
// Method   x and dout are read once and kept in shared memory, where a thread finds its own numbers again. A block adds g and g * xhat, weighted by gamma;
//          the blocks of a cluster read one another's sums and add them in their order.
// Memory   shared: the block's numbers of both arrays, what warps add, and the block's sums.
// Limits   up to 32 columns a block.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/nn/norm_small_gradients.cu
#include "nn/norm.cuh"

constexpr int UNROLL = 4;

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTER_DIMS
    norm_small_dx(const data_t* __restrict__ x, const data_t* __restrict__ dout, const float2* __restrict__ stats, const void* __restrict__ gamma,
                  const void* __restrict__ beta, const data_t* __restrict__ more, data_t* __restrict__ dx, float* __restrict__ parts,
                  const __grid_constant__ NormShape shape) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) raw_t kept[];  // [items][x, dout][THREADS]
  __shared__ GroupRoom room;
  __shared__ float2 noted[WARPS][VEC][32];
#if CLUSTER > 1
  __shared__ alignas(16) float4 of_block[32];
#endif
  // the blocks of a cluster are slices of an image; tiles come after them
  const int rank = cluster_rank(), width = (int)shape.width, channels = (int)shape.channels;
  const Divided of_tile(blockIdx.x / CLUSTER, shape.tiles, shape.by_tiles);
  const Stand at(shape, (of_tile.quotient * CLUSTER + rank) * (int)shape.tiles + of_tile.rest);
  const int each = (int)shape.each / VEC, group = at.inside ? divided(at.column * VEC, shape.by_each) : 0, down = at.down, end = at.end;
  const int first = at.inside ? group * each - at.tile * (int)shape.across : 0, channel = at.inside ? at.column * VEC : 0;
  const long long offset = at.first_pixel(x, shape) - x;
  int pixel = at.start + at.lane;
  raw_t xs[UNROLL], gs[UNROLL];
  auto fetch = [&]() {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * down < end) {
        const long long here = offset + (long long)(pixel + u * down) * channels;
        xs[u] = load(x + here), gs[u] = load(dout + here);
      }
  };
  fetch();  // on its way while everything else is
  const float2 s = stats[at.image * (int)shape.groups + group];
  float a[VEC], b[VEC];
  parameters_of(a, b, gamma_of(gamma, shape), beta_of(beta, shape), channel);
  // xhat, and g from dout
  auto pass = [&](float (&v)[VEC], float (&g)[VEC]) {
    float behind[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      v[i] = (v[i] - s.x) * s.y;
      behind[i] = fmaf(v[i], a[i], b[i]);
    }
    through_activation((int)shape.activation, g, behind);
  };
  float sums[VEC] = {}, products[VEC] = {};
  raw_t* to_keep = kept + threadIdx.x;
#pragma unroll 1
  while (pixel < end) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (pixel + u * down < end) {
        to_keep[2 * u * THREADS] = xs[u], to_keep[(2 * u + 1) * THREADS] = gs[u];
        float v[VEC], g[VEC];
        floats_of(v, xs[u]);
        floats_of(g, gs[u]);
        pass(v, g);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums[i] += g[i], products[i] = fmaf(g[i], v[i], products[i]);
      }
    pixel += UNROLL * down, to_keep += 2 * UNROLL * THREADS;
    fetch();
  }
  float2 all = make_float2(0, 0);
  const int warp = threadIdx.x / 32, beside = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
    all.x = fmaf(a[i], sums[i], all.x), all.y = fmaf(a[i], products[i], all.y);
    for (int mask = 16; mask >= width; mask /= 2) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], mask);
      products[i] += __shfl_xor_sync(~0u, products[i], mask);
    }
    if (beside < width) noted[warp][i][beside] = make_float2(sums[i], products[i]);
  }
  all = add_group(all, room, at.own, width, first, each);
#if CLUSTER > 1
  if (threadIdx.x < width) of_block[at.own] = make_float4(all.x, all.y, 0, 0);
  cluster_barrier();
  float4 there[CLUSTER];
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) there[r] = load_of_rank(shared_address(of_block + at.own), r);
  all = make_float2(0, 0);
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) all.x += there[r].x, all.y += there[r].y;
  cluster_arrive();
#endif
  const float n = (float)shape.pixels * (int)shape.each, mean_g = shape.rms ? 0 : all.x / n, mean_product = all.y / n;
  const raw_t* of_kept = kept + threadIdx.x;
  long long here = offset + (long long)(at.start + at.lane) * channels;
#pragma unroll 1
  for (pixel = at.start + at.lane; pixel < end; pixel += down, of_kept += 2 * THREADS, here += (long long)down * channels) {
    float v[VEC], g[VEC], besides[VEC];
    others_of(besides, more, here);
    floats_of(v, of_kept[0]);
    floats_of(g, of_kept[THREADS]);
    pass(v, g);
#pragma unroll
    for (int i = 0; i < VEC; ++i) v[i] = fmaf(s.y, a[i] * g[i] - fmaf(v[i], mean_product, mean_g), besides[i]);
    store(dx + here, v);
  }
  float* const of_image = parts + (long long)(at.image * CLUSTER + rank) * 2 * channels;
  for (int j = threadIdx.x; j < width * VEC; j += THREADS) {  // add_group has waited for all that was noted
    const int own = j / VEC, i = j % VEC, its = (at.tile * (int)shape.across + own) * VEC + i;
    if (own >= (int)shape.across || its >= channels) continue;
    float2 sum = noted[0][i][own];
    for (int w = 1; w < WARPS; ++w) sum.x += noted[w][i][own].x, sum.y += noted[w][i][own].y;
    of_image[its] = sum.x;
    of_image[channels + its] = sum.y;
  }
#if CLUSTER > 1
  cluster_wait();  // nobody reads this block's shared memory any more
#endif
}
