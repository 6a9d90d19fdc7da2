// batch_norm.cu: batch normalisation, the sum with a residual and an activation behind a convolution, forward and backward, and sums over channels.
//
//   over the M = N * plane values y of channel k:   mean = sum y / M,  var = sum (y - mean)^2 / M,  invstd = 1 / sqrt(var + eps)
//   out  = activation((y - mean) * a + beta + residual),  a = gamma * invstd
//   g    = dout times the activation's derivative at (y - mean) * a + beta, which is computed again. With a residual the activation is a ReLU, whose
//          mask the forward pass has written: a byte for each item. The launch that sums also writes g, which is the residual's gradient
//   dbeta = sum g,  dgamma = sum g * xhat,          xhat = (y - mean) * invstd
//   dy   = a * (g - dbeta / M - xhat * dgamma / M), or a * g where mean and invstd were given and not taken from y
//
// Each launch reads every array of pixels once, and all are bound by memory. Sums take two launches, always in the same order:
// a block sums one slice of its channels into part[slice][2][K], and a small launch adds the slices.
//
// Layout   y, residual, dout, out, g, dy: NCHW [N][K][plane] or NHWC [N*plane][K]. Statistics, parameters and sums are acc_t [K].
// Sizes    They are arguments, in the struct BatchNormShape.
// Mapping  item: VEC neighbours of a plane in NCHW (one channel), or of a pixel in NHWC (VEC channels). VEC is 4, or 8 for
//          16-bit types, if plane or K is a multiple of it, which makes loads of 16 bytes; else 4 or 1. A channel, or a row of VEC channels,
//          has `total` items, cut into slices of `per`.
//          batch_norm_forward and batch_norm_backward count items from the end. The launch before them has read or written the end last, so the
//          end is in the L2 cache; and the launch behind them finds the beginning there.
//          block -> one slice of `across` columns; GID_0 = slice * tiles + tile. A column is a channel in NCHW, where `across` is 1,
//          and VEC channels in NHWC, where up to 32 threads side by side read neighbours.
//          thread (column, lane) -> items lane, lane + DOWN, ... of the slice, UNROLL of them loaded before one is used.
// Memory   shared: what the threads of a column add, at most 3 * VEC * THREADS acc_t. Registers: UNROLL * VEC values of each array.
// Method   the variance is taken of y less the channel's first value, so that a large mean costs no digits: UNROLL items at a time in two
//          passes over registers, then combined pair by pair: Chan, Golub, LeVeque, 'Updating formulae and a pairwise algorithm
//          for computing sample variances' (1979). Batch normalisation: Ioffe and Szegedy (2015).
//
// By hand: nvcc -cubin -I cu cu/nn/batch_norm.cu
#include "core/portable.cuh"

#ifndef THREADS
#define THREADS 128
#endif
#ifndef VEC  // for launches that add slices of any shape
#define NHWC 0
#define VEC 4
#define ADDING 1
#else
#define ADDING 0
#endif
// Whether batch_norm_forward and gradient_sums have a residual, and whether the activation goes beyond ReLU. On CUDA both are defines. On OpenCL one
// text asks the arguments.
#ifdef __OPENCL_VERSION__
#define GIVEN(array) ((array) != 0)
#define BEYOND_RELU (activation > RELU)
#define FORWARD_UNROLL UNROLL_TWO
#else
#ifndef HAS_RESIDUAL
#define HAS_RESIDUAL 0
#endif
#ifndef BEYOND_RELU
#define BEYOND_RELU 0
#endif
#define GIVEN(array) HAS_RESIDUAL
#define FORWARD_UNROLL (HAS_RESIDUAL ? UNROLL_TWO : UNROLL)
#endif
#ifndef WITH_MOMENTS
#define WITH_MOMENTS 0
#endif
#ifndef CLUSTER
#define CLUSTER 1  // blocks that share the slices of a channel, with WITH_MOMENTS
#endif
#if WITH_MOMENTS
#include "core/cluster.cuh"
#else
#define CLUSTER_DIMS
#endif

#define UNROLL (VEC == 1 ? 8 : 4)
#define UNROLL_TWO (UNROLL / 2)  // if two arrays are read

// The shape of an array, and how a launch divides it.
typedef struct BatchNormShape {
  long_t channels, plane;         // K; pixels of a channel of an image
  long_t total, per;              // items of a channel, or of VEC channels; items of a slice
  long_t columns, tiles, by_tiles, across, by_across;
  long_t plane_items, by_plane_items;  // items of a plane in NCHW; by_: a prepared divisor, see division.cuh; 0 if `total` is 2^31 or more
} BatchNormShape;

#define K ((int)shape.channels)
#define PLANE ((index_t)shape.plane)
#if NHWC
#define ACROSS ((int)shape.across)
#define LANE divided(LID_0, shape.by_across)
#define OWN VEC  // channels of a thread
#define OF(e) ((e) % VEC)
#define ITEM(i) ((i) * K + column * VEC)
#define FIRST(j) (column * VEC + (j))
#define VALUES(items) (items)  // of one channel
#else
#define ACROSS 1
#define LANE LID_0
#define OWN 1
#define OF(e) 0
#define IMAGE_OF(i) (INDEX_64 && !shape.by_plane_items ? (i) / (index_t)shape.plane_items : divided((int)(i), shape.by_plane_items))
#define ITEM(i) ((IMAGE_OF(i) * (index_t)K + column) * PLANE + ((i) - IMAGE_OF(i) * (index_t)shape.plane_items) * VEC)
#define FIRST(j) (column * PLANE)
#define VALUES(items) ((items) * VEC)
#endif
#define FROM_END(i) ITEM((index_t)shape.total - 1 - (i))
typedef unsigned char mask_t;  // of an item: bit e for value e
#define DOWN (THREADS / ACROSS)
#define CHANNEL(j) (column * OWN + (j))

// The launches that add slices, few or thousands: `beside` channels side by side, a power of two, and LANES threads that share a channel's slices.
#define LANES (THREADS / (int)beside)

#if VEC == 8
#define LOAD_ITEM(d, p, i) LOAD_VEC8(d, p, i)
#define STORE_ITEM(p, i, s) STORE_VEC8(p, i, s)
#elif VEC == 4
#define LOAD_ITEM(d, p, i) LOAD_VEC(d, p, i)
#define STORE_ITEM(p, i, s) STORE_VEC(p, i, s)
#else
#define LOAD_ITEM(d, p, i) (d)[0] = LOAD(p, i)
#define STORE_ITEM(p, i, s) STORE(p, i, (s)[0])
#endif

// An item as it is loaded, and its values.
#if VEC == 8 && !defined(__OPENCL_VERSION__)
typedef uint4 item_t;  // 16-bit numbers take half of the registers until they become floats, where they are used
#define FETCH(item, p, i) item = *(const uint4*)((p) + (i))
#define VALUES_OF(d, item) FROM_WORDS(d, item)
#else
typedef struct { acc_t of[VEC]; } item_t;
#define FETCH(item, p, i) LOAD_ITEM((item).of, p, i)
#define VALUES_OF(d, item) for (int j_ = 0; j_ < VEC; ++j_) (d)[j_] = (item).of[j_]
#endif

// Blocks that a multiprocessor should hold, so that all of a launch run at once: as many as the launch has for each (engines/nn/batch_norm.py). 6 have
// 80 registers a thread. Moments, and derivatives beyond ReLU, need 96.
#define AT_ONCE (VEC == 8 ? 6 : 1)
#define FEWER_AT_ONCE (VEC == 8 ? 5 : 1)
#define GRADIENTS_AT_ONCE (BEYOND_RELU ? FEWER_AT_ONCE : AT_ONCE)

// A thread's channels and items. Threads without a column have no items, but take part in barriers.
#define STAND                                                                                                                  \
  const int tile_ = (int)GID_0 - divided((int)GID_0, shape.by_tiles) * (int)shape.tiles, lane = LANE, down = DOWN;               \
  const int column = tile_ * ACROSS + LID_0 - lane * ACROSS;                                                                   \
  const bool inside = lane < down && column < (int)shape.columns;                                                               \
  const index_t slice = divided((int)GID_0, shape.by_tiles), per = (index_t)shape.per, total = (index_t)shape.total, start = slice * per; \
  const index_t end = inside ? (start + per < total ? start + per : total) : start

// The normalisation of a thread's channels: (y - centre) * a + b. `more` is done for each channel as well.
#define PARAMETER(p, otherwise) ((p) ? (p)[CHANNEL(j)] : (otherwise))
#define NORMALISED_BY(more)                          \
  acc_t centre[OWN], a[OWN], b[OWN];                 \
  for (int j = 0; j < OWN && inside; ++j) {          \
    centre[j] = mean[CHANNEL(j)];                    \
    a[j] = PARAMETER(gamma, 1) * invstd[CHANNEL(j)]; \
    b[j] = PARAMETER(beta, 0);                       \
    more                                             \
  }

// Combines (n, mean, m2) of two sets; the caller adds n. An empty set changes nothing.
#define COMBINE(n, mean, m2, n_, mean_, m2_)                                        \
  {                                                                                 \
    const acc_t part_ = (n) + (n_) > 0 ? (n_) / ((n) + (n_)) : 0, step_ = (mean_) - (mean); \
    (mean) += step_ * part_;                                                        \
    (m2) += (m2_) + step_ * step_ * (n) * part_;                                    \
  }

// Halves the lanes of each column until one is left: `to` takes what `from` has.
#define FOLD(lanes, across, take)                                    \
  {                                                                  \
    int half_ = THREADS / 2;                                         \
    while (half_ >= (lanes)) half_ /= 2;                             \
    for (; half_ > 0; half_ /= 2) {                                  \
      local_barrier();                                               \
      if (lane < half_ && lane + half_ < (lanes)) {                  \
        const int to = LID_0, from = LID_0 + half_ * (across);       \
        take                                                         \
      }                                                              \
    }                                                                \
  }

// The moments of the block's items, left to the first lane of each column: means are relative to the channels' first values.
WITHIN_KERNEL void find_moments(
    const GLOBAL_MEM data_t* RESTRICT y, const BatchNormShape shape, const int column, const int lane, const int down, const bool inside,
    const index_t start, const index_t end, LOCAL_MEM_POINTER acc_t* counts, LOCAL_MEM_POINTER acc_t* means, LOCAL_MEM_POINTER acc_t* squares) {
  acc_t n = 0, mean[OWN], m2[OWN], shift[OWN];
  for (int j = 0; j < OWN; ++j) {
    mean[j] = m2[j] = 0;
    shift[j] = inside ? LOAD(y, FIRST(j)) : 0;
  }
  for (index_t i = start + lane; i < end; i += down * UNROLL) {
    acc_t v[UNROLL * VEC], sum[OWN], square[OWN];
    int found = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (i + u * down < end) {
        LOAD_ITEM(v + u * VEC, y, ITEM(i + u * down));
        found = u + 1;
      }
    const acc_t count = VALUES(found);
    for (int j = 0; j < OWN; ++j) sum[j] = square[j] = 0;
#pragma unroll
    for (int e = 0; e < UNROLL * VEC; ++e) {
      v[e] = e < found * VEC ? v[e] - shift[OF(e)] : 0;
      sum[OF(e)] += v[e];
    }
    for (int j = 0; j < OWN; ++j) sum[j] /= count;
#pragma unroll
    for (int e = 0; e < UNROLL * VEC; ++e)
      if (e < found * VEC) square[OF(e)] += (v[e] - sum[OF(e)]) * (v[e] - sum[OF(e)]);
    for (int j = 0; j < OWN; ++j) COMBINE(n, mean[j], m2[j], count, sum[j], square[j]);
    n += count;
  }
  counts[LID_0] = n;
  for (int j = 0; j < OWN; ++j) {
    means[j * THREADS + LID_0] = mean[j];
    squares[j * THREADS + LID_0] = m2[j];
  }
  FOLD(down, ACROSS, {
    for (int j = 0; j < OWN * THREADS; j += THREADS)
      COMBINE(counts[to], means[j + to], squares[j + to], counts[from], means[j + from], squares[j + from]);
    counts[to] += counts[from];
  })
}

// Returns 1 / sqrt(variance + eps) of a channel with m values whose squared deviations sum to m2, and writes it and the mean for the backward pass.
// Updates running statistics if there are any: by `momentum`, or with `tracked`, the number of batches so far, by the share that makes them means over
// batches. `counted` is that number too, where this launch counts the batch. At most one of the two is given.
WITHIN_KERNEL acc_t settle(
    const index_t channel, const acc_t centre, const acc_t m2, const acc_t m, const GLOBAL_MEM long_t* tracked, GLOBAL_MEM acc_t* mean,
    GLOBAL_MEM acc_t* invstd, GLOBAL_MEM acc_t* running_mean, GLOBAL_MEM acc_t* running_var, GLOBAL_MEM long_t* counted, const long_t eps,
    const long_t momentum) {
  const acc_t deviation = 1 / sqrt(m2 / m + BITS_TO_ACC(eps));
  mean[channel] = centre;
  invstd[channel] = deviation;
  if (running_mean) {
    const acc_t share = tracked ? 1 / (acc_t)tracked[0] : BITS_TO_ACC(momentum);
    running_mean[channel] = (1 - share) * running_mean[channel] + share * centre;
    running_var[channel] = (1 - share) * running_var[channel] + share * (m2 / (m - 1));
  }
  if (counted && channel == 0) counted[0] += 1;
  return deviation;
}

KERNEL LAUNCH_BOUNDS(THREADS, FEWER_AT_ONCE) void channel_moments(const GLOBAL_MEM data_t* RESTRICT y, GLOBAL_MEM acc_t* RESTRICT part,
                                                            const BatchNormShape shape) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t counts[THREADS], means[OWN * THREADS], squares[OWN * THREADS];
  STAND;
  find_moments(y, shape, column, lane, down, inside, start, end, counts, means, squares);
  if (inside && lane == 0)
    for (int j = 0; j < OWN; ++j) {
      part[slice * 2 * K + CHANNEL(j)] = means[j * THREADS + LID_0];
      part[(slice * 2 + 1) * K + CHANNEL(j)] = squares[j * THREADS + LID_0];
    }
}

// Combines the slices of channel_moments. The channels' first values are `apart` elements apart; an item has `values` values of a channel.
// WITH_MOMENTS    the convolution emitted the slices while it had its sums at hand (hopper/gemm.cu): `sets` times `total` items, slices
//          of one set each; no means are relative to first values. If `redone` says that results were computed again since, which is
//          rare (direct/gemm.cu), this launch reads all of y: `images` of `plane` pixels. Many slices are shared by the blocks of a cluster.
KERNEL CLUSTER_DIMS LAUNCH_BOUNDS(THREADS, 1) void batch_norm_statistics(
    const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM acc_t* RESTRICT part, const GLOBAL_MEM long_t* RESTRICT tracked,
    GLOBAL_MEM acc_t* RESTRICT mean, GLOBAL_MEM acc_t* RESTRICT invstd, GLOBAL_MEM acc_t* RESTRICT running_mean,
    GLOBAL_MEM acc_t* RESTRICT running_var, GLOBAL_MEM long_t* RESTRICT counted,
#if WITH_MOMENTS
    const int* redone, const long_t blocks, const long_t sets, const long_t images, const long_t plane, const long_t y_image, const long_t y_pixel,
#endif
    const long_t total, const long_t per, const long_t channels, const long_t values, const long_t apart, const long_t eps,
    const long_t momentum, const long_t beside) {
  AFTER_LAST_LAUNCH
  const int own = LID_0 & ((int)beside - 1), lane = LID_0 / (int)beside;
  const index_t channel = (index_t)(GID_0 / CLUSTER) * beside + own;
#if WITH_MOMENTS
  const int first = cluster_rank() * LANES + lane, apart_by = CLUSTER * LANES;
  // slices are many, so they are read once: relative to the first one's mean, and in double, which has digits to spare if that is far off
  acc_t shift = 0;
  double sum = 0, square = 0;
  int again = 0;
  for (long_t i = LID_0; i < blocks; i += THREADS) again |= redone[i];
  if (channel < channels) {
    const int each = (int)((total + per - 1) / per), slices = (int)sets * each, step = 2 * (int)channels;
    const GLOBAL_MEM acc_t* const parts = part + channel;
    const acc_t last = (acc_t)(total - (long_t)(each - 1) * per);
    shift = parts[0];
#pragma unroll 8
    for (int slice = first; slice < slices; slice += apart_by) {
      const double count = (slice + 1) % each ? (acc_t)per : last, off = parts[(index_t)slice * step] - shift;
      sum += count * off;
      square += parts[(index_t)slice * step + channels] + count * off * off;
    }
  }
  if (__syncthreads_or(again)) {
    sum = square = shift = 0;
    if (channel < channels)
      for (long_t i = first; i < images * plane; i += apart_by) {
        const double v = LOAD(y, i / plane * y_image + channel * apart + i % plane * y_pixel);
        sum += v;
        square += v * v;
      }
  }
  for (int mask = 16; mask >= (int)beside; mask /= 2) {  // a warp's lanes of a channel
    sum += __shfl_xor_sync(~0u, sum, mask);
    square += __shfl_xor_sync(~0u, square, mask);
  }
  __shared__ double sums[THREADS], squares[THREADS];
  if (LID_0 % 32 < (int)beside) {
    sums[LID_0 / 32 * (int)beside + own] = sum;
    squares[LID_0 / 32 * (int)beside + own] = square;
  }
  local_barrier();
  if (lane == 0) {
    sum = square = 0;
#pragma unroll 8
    for (int i = own; i < THREADS / 32 * (int)beside; i += (int)beside) {
      sum += sums[i];
      square += squares[i];
    }
  }
#if CLUSTER > 1
  __shared__ double of_block[2][32];  // at least 32 lanes a channel
  if (lane == 0) of_block[0][own] = sum, of_block[1][own] = square;
  cluster_barrier();
  if (lane == 0 && cluster_rank() == 0) {
    sum = square = 0;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
      sum += double_of_rank(shared_address(of_block[0] + own), rank);
      square += double_of_rank(shared_address(of_block[1] + own), rank);
    }
  }
  cluster_barrier();  // the first block has read the others' shared memory
  if (cluster_rank()) return;
#endif
  const double all = (double)total * sets, left = square - sum * (sum / all);
  const acc_t m = (acc_t)all, centre = (acc_t)(shift + sum / all), m2 = left < 0 ? 0 : (acc_t)left;  // a NaN stays one
#else
  LOCAL_MEM acc_t counts[THREADS], means[THREADS], squares[THREADS];
  acc_t n = 0, sum = 0, square = 0;
  if (channel < channels)
#pragma unroll 4
    for (long_t slice = lane; slice * per < total; slice += LANES) {
      const acc_t count = values * (total - slice * per < per ? total - slice * per : per);
      COMBINE(n, sum, square, count, part[slice * 2 * channels + channel], part[(slice * 2 + 1) * channels + channel]);
      n += count;
    }
  counts[LID_0] = n;
  means[LID_0] = sum;
  squares[LID_0] = square;
  FOLD(LANES, (int)beside, {
    COMBINE(counts[to], means[to], squares[to], counts[from], means[from], squares[from]);
    counts[to] += counts[from];
  })
  const acc_t m = values * total, centre = channel < channels ? means[LID_0] + LOAD(y, channel * (index_t)apart) : 0, m2 = squares[LID_0];
#endif
  if (channel < channels && lane == 0) {
    settle(channel, centre, m2, m, tracked, mean, invstd, running_mean, running_var, counted, eps, momentum);
  }
}

// out = activation((y - centre) * a + b + residual). With a residual, `mask` gets where it is above 0, unless that is null.
WITHIN_KERNEL void normalise(
    const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM data_t* RESTRICT residual, GLOBAL_MEM data_t* RESTRICT out,
    GLOBAL_MEM mask_t* RESTRICT mask, const BatchNormShape shape,
    const int column, const int lane, const int down, const index_t start, const index_t end, const acc_t* centre, const acc_t* a,
    const acc_t* b, const long_t activation, const long_t slope) {
  for (index_t i = start + lane; i < end; i += down * FORWARD_UNROLL) {
    item_t ys[FORWARD_UNROLL], residuals[FORWARD_UNROLL];
#pragma unroll
    for (int u = 0; u < FORWARD_UNROLL; ++u)
      if (i + u * down < end) {
        FETCH(ys[u], y, FROM_END(i + u * down));
        if (GIVEN(residual)) FETCH(residuals[u], residual, FROM_END(i + u * down));
      }
#pragma unroll
    for (int u = 0; u < FORWARD_UNROLL; ++u)
      if (i + u * down < end) {
        acc_t v[VEC], r[VEC];
        VALUES_OF(v, ys[u]);
        if (GIVEN(residual)) VALUES_OF(r, residuals[u]);
        for (int e = 0; e < VEC; ++e) {
          v[e] = (v[e] - centre[OF(e)]) * a[OF(e)] + b[OF(e)];
          if (GIVEN(residual)) v[e] += r[e];
          if (!BEYOND_RELU && activation && v[e] <= 0) v[e] = 0;  // a NaN stays one
        }
        if (BEYOND_RELU) beyond_relu((int)activation, BITS_TO_ACC(slope), v, VEC);
        STORE_ITEM(out, FROM_END(i + u * down), v);
        if (GIVEN(residual) && mask) {
          int above = 0;
          for (int e = 0; e < VEC; ++e) above |= !(v[e] <= 0) << e;  // a NaN counts
          mask[FROM_END(i + u * down) / VEC] = (mask_t)above;
        }
      }
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, AT_ONCE) void batch_norm_forward(
    const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM acc_t* RESTRICT mean, const GLOBAL_MEM acc_t* RESTRICT invstd,
    const GLOBAL_MEM acc_t* RESTRICT gamma, const GLOBAL_MEM acc_t* RESTRICT beta, const GLOBAL_MEM data_t* RESTRICT residual,
    GLOBAL_MEM data_t* RESTRICT out, GLOBAL_MEM mask_t* RESTRICT mask, const BatchNormShape shape, const long_t activation, const long_t slope) {
  AFTER_LAST_LAUNCH
  STAND;
  NORMALISED_BY()
  normalise(y, residual, out, mask, shape, column, lane, down, start, end, centre, a, b, activation, slope);
}

// g times the activation's derivative, given v = y - mean. A ReLU lets the gradient of a NaN pass.
#define THROUGH_ACTIVATION(g, v)                                               \
  if (BEYOND_RELU) {                                                           \
    acc_t d_[VEC];                                                             \
    for (int e = 0; e < VEC; ++e) d_[e] = (v)[e] * a[OF(e)] + b[OF(e)];        \
    pass_beyond_relu((int)activation, BITS_TO_ACC(slope), g, d_, VEC);         \
  } else if (activation) {                                                     \
    for (int e = 0; e < VEC; ++e)                                              \
      if ((v)[e] * a[OF(e)] + b[OF(e)] <= 0) (g)[e] = 0;                       \
  }

// The sums of g and g * (y - mean) over the block's items, left to the first lane of each column. With a residual there is a `mask`, and g is written
// to `masked`.
WITHIN_KERNEL void sum_gradients(
    const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM data_t* RESTRICT dout, const GLOBAL_MEM mask_t* RESTRICT mask,
    GLOBAL_MEM data_t* RESTRICT masked, const BatchNormShape shape, const int column, const int lane, const int down, const index_t start,
    const index_t end, const acc_t* centre, const acc_t* a, const acc_t* b, const long_t activation, const long_t slope,
    LOCAL_MEM_POINTER acc_t* sums) {
  acc_t sum[2 * OWN];
  for (int j = 0; j < 2 * OWN; ++j) sum[j] = 0;
  for (index_t i = start + lane; i < end; i += down * UNROLL_TWO) {
    item_t ys[UNROLL_TWO], gs[UNROLL_TWO];
    int bits[UNROLL_TWO];
#pragma unroll
    for (int u = 0; u < UNROLL_TWO; ++u)
      if (i + u * down < end) {
        FETCH(ys[u], y, ITEM(i + u * down));
        FETCH(gs[u], dout, ITEM(i + u * down));
        if (GIVEN(mask)) bits[u] = mask[ITEM(i + u * down) / VEC];
      }
#pragma unroll
    for (int u = 0; u < UNROLL_TWO; ++u)
      if (i + u * down < end) {
        acc_t v[VEC], g[VEC];
        VALUES_OF(v, ys[u]);
        VALUES_OF(g, gs[u]);
        for (int e = 0; e < VEC; ++e) v[e] -= centre[OF(e)];
        if (!GIVEN(mask)) THROUGH_ACTIVATION(g, v)
        for (int e = 0; e < VEC; ++e) {
          if (GIVEN(mask) && !(bits[u] >> e & 1)) g[e] = 0;
          sum[OF(e)] += g[e];
          sum[OWN + OF(e)] += g[e] * v[e];
        }
        if (GIVEN(mask)) STORE_ITEM(masked, ITEM(i + u * down), g);
      }
  }
  for (int j = 0; j < 2 * OWN; ++j) sums[j * THREADS + LID_0] = sum[j];
  FOLD(down, ACROSS, { for (int j = 0; j < 2 * OWN * THREADS; j += THREADS) sums[j + to] += sums[j + from]; })
}

// dbeta and dgamma of each slice.
KERNEL LAUNCH_BOUNDS(THREADS, GRADIENTS_AT_ONCE) void gradient_sums(
    const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM data_t* RESTRICT dout, const GLOBAL_MEM acc_t* RESTRICT mean,
    const GLOBAL_MEM acc_t* RESTRICT invstd, const GLOBAL_MEM acc_t* RESTRICT gamma, const GLOBAL_MEM acc_t* RESTRICT beta,
    const GLOBAL_MEM mask_t* RESTRICT mask, GLOBAL_MEM data_t* RESTRICT masked, GLOBAL_MEM acc_t* RESTRICT part, const BatchNormShape shape,
    const long_t activation, const long_t slope) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[2 * OWN * THREADS];
  STAND;
  NORMALISED_BY()
  sum_gradients(y, dout, mask, masked, shape, column, lane, down, start, end, centre, a, b, activation, slope, sums);
  if (inside && lane == 0)
    for (int j = 0; j < OWN; ++j) {
      part[slice * 2 * K + CHANNEL(j)] = sums[j * THREADS + LID_0];
      part[(slice * 2 + 1) * K + CHANNEL(j)] = sums[(OWN + j) * THREADS + LID_0] * invstd[CHANNEL(j)];
    }
}

// dy = a * g - less - rate * (y - centre). It may be written over y: one thread reads and writes each item.
WITHIN_KERNEL void spread_gradients(
    const GLOBAL_MEM data_t* y, const GLOBAL_MEM data_t* dout, GLOBAL_MEM data_t* dy, const BatchNormShape shape, const int column,
    const int lane, const int down, const index_t start, const index_t end, const acc_t* centre, const acc_t* a, const acc_t* b,
    const acc_t* less, const acc_t* rate, const long_t activation, const long_t slope) {
  for (index_t i = start + lane; i < end; i += down * UNROLL_TWO) {
    item_t ys[UNROLL_TWO], gs[UNROLL_TWO];
#pragma unroll
    for (int u = 0; u < UNROLL_TWO; ++u)
      if (i + u * down < end) {
        FETCH(ys[u], y, FROM_END(i + u * down));
        FETCH(gs[u], dout, FROM_END(i + u * down));
      }
#pragma unroll
    for (int u = 0; u < UNROLL_TWO; ++u)
      if (i + u * down < end) {
        acc_t v[VEC], g[VEC];
        VALUES_OF(v, ys[u]);
        VALUES_OF(g, gs[u]);
        for (int e = 0; e < VEC; ++e) v[e] -= centre[OF(e)];
        THROUGH_ACTIVATION(g, v)
        for (int e = 0; e < VEC; ++e) g[e] = a[OF(e)] * g[e] - less[OF(e)] - rate[OF(e)] * v[e];
        STORE_ITEM(dy, FROM_END(i + u * down), g);
      }
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, GRADIENTS_AT_ONCE) void batch_norm_backward(
    const GLOBAL_MEM data_t* y, const GLOBAL_MEM data_t* RESTRICT dout, const GLOBAL_MEM acc_t* RESTRICT mean,
    const GLOBAL_MEM acc_t* RESTRICT invstd, const GLOBAL_MEM acc_t* RESTRICT gamma, const GLOBAL_MEM acc_t* RESTRICT beta,
    const GLOBAL_MEM acc_t* RESTRICT sums, GLOBAL_MEM data_t* dy, const BatchNormShape shape, const long_t activation,
    const long_t slope, const long_t of_batch) {
  AFTER_LAST_LAUNCH
  STAND;
  acc_t less[OWN], rate[OWN];
  NORMALISED_BY({
    const acc_t share = a[j] / (acc_t)VALUES(total);
    less[j] = of_batch ? share * sums[CHANNEL(j)] : 0;  // the sums may be no numbers
    rate[j] = of_batch ? share * invstd[CHANNEL(j)] * sums[K + CHANNEL(j)] : 0;
  })
  spread_gradients(y, dout, dy, shape, column, lane, down, start, end, centre, a, b, less, rate, activation, slope);
}

// The sum over each channel of x, slice by slice: a bias's gradient.
KERNEL LAUNCH_BOUNDS(THREADS, 1) void channel_sums(const GLOBAL_MEM data_t* RESTRICT x, GLOBAL_MEM acc_t* RESTRICT part,
                                                   const BatchNormShape shape) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[OWN * THREADS];
  STAND;
  acc_t sum[OWN];
  for (int j = 0; j < OWN; ++j) sum[j] = 0;
  for (index_t i = start + lane; i < end; i += down * UNROLL) {
    acc_t v[UNROLL * VEC];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (i + u * down < end) LOAD_ITEM(v + u * VEC, x, ITEM(i + u * down));
#pragma unroll
    for (int e = 0; e < UNROLL * VEC; ++e)
      if (i + e / VEC * down < end) sum[OF(e)] += v[e];
  }
  for (int j = 0; j < OWN; ++j) sums[j * THREADS + LID_0] = sum[j];
  FOLD(down, ACROSS, { for (int j = 0; j < OWN * THREADS; j += THREADS) sums[j + to] += sums[j + from]; })
  if (inside && lane == 0)
    for (int j = 0; j < OWN; ++j) part[slice * K + CHANNEL(j)] = sums[j * THREADS + LID_0];
}

// Adds the slices: the columns of part[slices][columns]; `rounded`: to the arrays' type.
KERNEL LAUNCH_BOUNDS(THREADS, 1) void add_slices(const GLOBAL_MEM acc_t* RESTRICT part, GLOBAL_MEM void* RESTRICT sums,
                                                 const long_t columns, const long_t slices, const long_t rounded, const long_t beside) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t folded[THREADS];
  const int lane = LID_0 / (int)beside;
  const index_t column = (index_t)GID_0 * beside + (LID_0 & ((int)beside - 1));
  acc_t sum = 0;
  if (column < columns)
#pragma unroll 8
    for (index_t slice = lane; slice < slices; slice += LANES) sum += part[slice * (index_t)columns + column];
  folded[LID_0] = sum;
  FOLD(LANES, (int)beside, { folded[to] += folded[from]; })
  if (column < columns && lane == 0) {
    if (rounded) {
      STORE((GLOBAL_MEM data_t*)sums, column, folded[LID_0]);
    } else {
      ((GLOBAL_MEM acc_t*)sums)[column] = folded[LID_0];
    }
  }
}

// ---- one block for all of a channel: NCHW arrays whose channels have few items
#if !NHWC && !ADDING

// The statistics; the channel's mean and 1 / sqrt(variance + eps) go to the first elements.
WITHIN_KERNEL void whole_statistics(
    const GLOBAL_MEM data_t* RESTRICT y, const BatchNormShape shape, const int column, const int lane, const int down, const bool inside,
    const index_t start, const index_t end, const GLOBAL_MEM long_t* tracked, GLOBAL_MEM acc_t* mean, GLOBAL_MEM acc_t* invstd,
    GLOBAL_MEM acc_t* running_mean, GLOBAL_MEM acc_t* running_var, GLOBAL_MEM long_t* counted, const long_t eps, const long_t momentum,
    LOCAL_MEM_POINTER acc_t* counts, LOCAL_MEM_POINTER acc_t* means, LOCAL_MEM_POINTER acc_t* squares) {
  find_moments(y, shape, column, lane, down, inside, start, end, counts, means, squares);
  if (lane == 0) {
    means[0] += LOAD(y, FIRST(0));
    squares[0] = settle(column, means[0], squares[0], VALUES(shape.total), tracked, mean, invstd, running_mean, running_var, counted, eps, momentum);
  }
}

KERNEL LAUNCH_BOUNDS(THREADS, 1) void batch_norm_whole_statistics(
    const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM long_t* RESTRICT tracked, GLOBAL_MEM acc_t* RESTRICT mean,
    GLOBAL_MEM acc_t* RESTRICT invstd, GLOBAL_MEM acc_t* RESTRICT running_mean, GLOBAL_MEM acc_t* RESTRICT running_var,
    GLOBAL_MEM long_t* RESTRICT counted, const BatchNormShape shape, const long_t eps, const long_t momentum) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t counts[THREADS], means[THREADS], squares[THREADS];
  STAND;
  whole_statistics(y, shape, column, lane, down, inside, start, end, tracked, mean, invstd, running_mean, running_var, counted, eps, momentum,
                   counts, means, squares);
}

// Statistics and result in one launch.
KERNEL LAUNCH_BOUNDS(THREADS, 1) void batch_norm_whole_forward(
    const GLOBAL_MEM data_t* RESTRICT y, const GLOBAL_MEM long_t* RESTRICT tracked, GLOBAL_MEM acc_t* RESTRICT mean,
    GLOBAL_MEM acc_t* RESTRICT invstd, GLOBAL_MEM acc_t* RESTRICT running_mean, GLOBAL_MEM acc_t* RESTRICT running_var,
    GLOBAL_MEM long_t* RESTRICT counted, const GLOBAL_MEM acc_t* RESTRICT gamma, const GLOBAL_MEM acc_t* RESTRICT beta,
    const GLOBAL_MEM data_t* RESTRICT residual, GLOBAL_MEM data_t* RESTRICT out, GLOBAL_MEM mask_t* RESTRICT mask, const BatchNormShape shape,
    const long_t activation, const long_t slope, const long_t eps, const long_t momentum) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t counts[THREADS], means[THREADS], squares[THREADS];
  STAND;
  whole_statistics(y, shape, column, lane, down, inside, start, end, tracked, mean, invstd, running_mean, running_var, counted, eps, momentum,
                   counts, means, squares);
  local_barrier();
  const acc_t centre = means[0], a = (gamma ? gamma[column] : 1) * squares[0], b = beta ? beta[column] : 0;
  normalise(y, residual, out, mask, shape, column, lane, down, start, end, &centre, &a, &b, activation, slope);
}

// The whole backward pass in one launch. `totals` are dbeta and dgamma of all channels.
KERNEL LAUNCH_BOUNDS(THREADS, 1) void batch_norm_whole_backward(
    const GLOBAL_MEM data_t* y, const GLOBAL_MEM data_t* RESTRICT dout, const GLOBAL_MEM acc_t* RESTRICT mean,
    const GLOBAL_MEM acc_t* RESTRICT invstd, const GLOBAL_MEM acc_t* RESTRICT gamma, const GLOBAL_MEM acc_t* RESTRICT beta,
    const GLOBAL_MEM mask_t* RESTRICT mask, GLOBAL_MEM data_t* masked, GLOBAL_MEM acc_t* RESTRICT totals, GLOBAL_MEM data_t* dy,
    const BatchNormShape shape, const long_t activation, const long_t slope, const long_t of_batch) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM acc_t sums[2 * THREADS];
  STAND;
  const acc_t centre = mean[column], deviation = invstd[column];
  const acc_t a = (gamma ? gamma[column] : 1) * deviation, b = beta ? beta[column] : 0;
  sum_gradients(y, dout, mask, masked, shape, column, lane, down, start, end, &centre, &a, &b, activation, slope, sums);
  local_barrier();
  const acc_t by_beta = sums[0], by_gamma = sums[THREADS] * deviation, share = a / (acc_t)VALUES(total);
  if (lane == 0) totals[column] = by_beta, totals[K + column] = by_gamma;
  const acc_t less = of_batch ? share * by_beta : 0, rate = of_batch ? share * deviation * by_gamma : 0;  // in the order of batch_norm_backward
  const bool summed = GIVEN(mask);
  spread_gradients(y, summed ? masked : dout, dy, shape, column, lane, down, start, end, &centre, &a, &b, &less, &rate, summed ? 0 : activation, slope);
}
#endif
