// norm.cuh: what the kernels of group, instance, layer and RMS norms share: neighbours of an array, moments, parameters, activations.
//
//   mean = sum x / M,  rstd = 1 / sqrt(sum (x - mean)^2 / M + eps)   over the M numbers of a group of an image; an RMS norm takes 0 for the mean,
//          and a normalised vector's (rms = 2) has the larger one of mean square and eps, not their sum
//   out  = activation((x - mean) * rstd * gamma + beta)
//
// With the channels last x may stand for x + added[image][channel], which changes means alone: no number is added.
//
// Sums are float32 and in the same order every time. Those of an image and group depend on nothing else, so a batch's size changes no bit of them.
// A thread sums deviations from its own first number, which is one of those summed. So n (first - mean)^2 is at most n times their squared deviations,
// and of a mean of a thousand standard deviations a few bits go, not all of them. Threads of a block agree on their mean, and add their deviations from
// that. What blocks have is combined by means and squared deviations: Chan, Golub, LeVeque, 'Updating formulae and a pairwise algorithm for computing
// sample variances' (1979).
#pragma once
#ifndef TYPE
#define TYPE 17  // of x and out: 16 half, 17 bfloat16, 32 float
#define VEC 8    // neighbours that a thread reads at once
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#include "core/packed.cuh"

typedef float acc_t;
#include "core/activation.cuh"
#include "core/cluster.cuh"

typedef element<TYPE> data_t;

struct alignas(VEC * sizeof(data_t)) Neighbours {
  data_t v[VEC];
};
typedef word<Neighbours> raw_t;
constexpr int WARPS = THREADS / 32;

// The shape of an array, and how a launch divides it. by_n is the divisor n, prepared (division.cuh).
struct NormShape {
  long long images, pixels, channels, by_channels;  // planes: N, P, C. rows: numbers of groups, items of a row, channels of a row
  long long groups, by_groups, each, by_each;  // of an image; channels of a group
  long long columns, across, width;          // VEC channels each: of a pixel, of a block, and the next power of two
  long long tiles, by_tiles, slices, by_slices, per;  // tiles of columns; slices of an image, and pixels of a slice
  long long plane, by_plane;                 // rows: numbers of a channel
  long long eps, rms, wide, activation;      // bits of a float; 1 or 2 if the mean counts as 0; 1 if gamma is float, 2 if beta is
};

DEVICE raw_t load(const data_t* from) { return *(const raw_t*)from; }
// by the launch that reads an array last: its lines of the L2 cache are the first to go, and not those that are still to be read
DEVICE raw_t load_last(const data_t* from) { return __ldcs((const raw_t*)from); }
DEVICE void floats_of(float (&v)[VEC], const raw_t& raw) {
  const Neighbours n = *(const Neighbours*)&raw;
#pragma unroll
  for (int i = 0; i < VEC; ++i) v[i] = to_float(n.v[i]);
}
DEVICE void store(data_t* to, const float (&v)[VEC]) {
  Neighbours n;
#pragma unroll
  for (int i = 0; i < VEC; ++i) n.v[i] = from_float<data_t>(v[i]);
  store_word(to, *(const raw_t*)&n);
}

// gamma or beta: of the arrays' type or float, or missing
struct Parameter {
  const void* of;
  bool wide;
  DEVICE float at(int channel, float missing) const {
    if (!of) return missing;
    return wide ? ((const float*)of)[channel] : to_float(((const data_t*)of)[channel]);
  }
};

DEVICE Parameter gamma_of(const void* gamma, const NormShape& shape) { return {gamma, (bool)(shape.wide & 1)}; }
DEVICE Parameter beta_of(const void* beta, const NormShape& shape) { return {beta, (bool)(shape.wide & 2)}; }
// those of VEC neighbouring channels
DEVICE void parameters_of(float (&v)[VEC], const Parameter& p, int channel, float missing) {
  if (p.of && !p.wide && (unsigned long long)p.of % 16 == 0 && channel % VEC == 0) {
    floats_of(v, load((const data_t*)p.of + channel));
  } else {
#pragma unroll
    for (int i = 0; i < VEC; ++i) v[i] = p.at(channel + i, missing);
  }
}

// gamma and beta of VEC neighbouring channels, whose loads are under way together
DEVICE void parameters_of(float (&a)[VEC], float (&b)[VEC], const Parameter& gamma, const Parameter& beta, int channel) {
  const bool whole = gamma.of && beta.of && !gamma.wide && !beta.wide && ((unsigned long long)gamma.of | (unsigned long long)beta.of) % 16 == 0;
  if (whole && channel % VEC == 0) {
    const raw_t factors = load((const data_t*)gamma.of + channel), summands = load((const data_t*)beta.of + channel);
    floats_of(a, factors);
    floats_of(b, summands);
  } else {
    parameters_of(a, gamma, channel, 1);
    parameters_of(b, beta, channel, 0);
  }
}

// what is added to the channels of an image, or zeros
DEVICE void summands_of(float (&v)[VEC], const data_t* added, long long channel) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) v[i] = added ? to_float(added[channel + i]) : 0;
}

// The activation is the same for all threads; its branch is taken once for VEC numbers.
DEVICE void activate(int activation, float (&v)[VEC]) {
  if (activation > RELU) {
    beyond_relu(activation, 0, v, VEC);
  } else if (activation) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) v[i] = v[i] < 0 ? 0 : v[i];  // a NaN stays one
  }
}

// dout times the activation's derivative at v
DEVICE void through_activation(int activation, float (&g)[VEC], float (&v)[VEC]) {
  if (activation > RELU) {
    pass_beyond_relu(activation, 0, g, v, VEC);
  } else if (activation) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) g[i] = v[i] <= 0 ? 0 : g[i];  // that of a NaN passes
  }
}

// VEC numbers of another gradient, or zeros
DEVICE void others_of(float (&v)[VEC], const data_t* more, long long at) {
  if (more) {
    floats_of(v, load(more + at));
  } else {
#pragma unroll
    for (int i = 0; i < VEC; ++i) v[i] = 0;
  }
}

// Numbers of one set: how many, their mean and their squared deviations from it.
struct Moments {
  float n = 0, mean = 0, squares = 0;
  DEVICE void add(const Moments& other) {  // an empty set changes nothing
    const float all = n + other.n, part = all > 0 ? other.n / all : 0, step = other.mean - mean;
    mean += step * part;
    squares += other.squares + step * step * n * part;
    n = all;
  }
};
// the moments of n numbers whose deviations from `first`, and their squares, sum to these
DEVICE Moments moments_of(float n, float first, float all, float squares) {
  Moments m;
  m.n = n;
  m.mean = n > 0 ? first + all / n : 0;
  m.squares = n > 0 ? squares - all * (all / n) : 0;
  m.squares = m.squares < 0 ? 0 : m.squares;  // a NaN stays one
  return m;
}

DEVICE float rstd_of(float squares, float n, const NormShape& shape) {
  const float mean_square = squares / n, eps = __int_as_float((int)shape.eps);
  const float v = shape.rms != 2 ? mean_square + eps : mean_square < eps ? eps : mean_square, r = rsqrtf(v), next = fmaf(0.5f * r, fmaf(-v * r, r, 1), r);
  return v > 0 && v < INFINITY ? next : r;  // a step of Newton's halves rsqrtf's error, which all numbers of a group share
}

// The column and the pixels of a thread, of an array with the channels last.
struct Stand {
  int image, slice, tile, own, column, lane, down, start, end;
  bool inside;
  DEVICE Stand(const NormShape& shape, int block) {
    const Divided of_tile(block, shape.tiles, shape.by_tiles), of_slice(of_tile.quotient, shape.slices, shape.by_slices);
    const int width = (int)shape.width;
    image = of_slice.quotient, slice = of_slice.rest, tile = of_tile.rest;
    own = threadIdx.x & (width - 1), lane = threadIdx.x / width, down = THREADS / width;
    column = tile * (int)shape.across + own;
    inside = own < (int)shape.across && column < (int)shape.columns;
    start = slice * (int)shape.per;
    end = inside ? min(start + (int)shape.per, (int)shape.pixels) : start;
  }
  DEVICE const data_t* first_pixel(const data_t* x, const NormShape& shape) const {
    return x + (long long)image * shape.pixels * shape.channels + (inside ? column * VEC : 0);
  }
};

// Where warps and columns leave their sums. 33: threads that add read other banks.
struct GroupRoom {
  float2 of_warp[WARPS][33], of_column[32];
};

// Adds, over the threads of a block that have columns of the same group, two numbers each; all of them get the sums.
DEVICE float2 add_group(float2 v, GroupRoom& room, int own, int width, int first, int count) {
  for (int mask = 16; mask >= width; mask /= 2) {
    v.x += __shfl_xor_sync(~0u, v.x, mask);
    v.y += __shfl_xor_sync(~0u, v.y, mask);
  }
  if (threadIdx.x % 32 < width) room.of_warp[threadIdx.x / 32][own] = v;
  __syncthreads();
  const int column = threadIdx.x / WARPS, part = threadIdx.x % WARPS;  // of the 32 columns, each with a thread for each warp
  v = column < width ? room.of_warp[part][column] : make_float2(0, 0);
  for (int mask = WARPS / 2; mask; mask /= 2) {
    v.x += __shfl_xor_sync(~0u, v.x, mask);
    v.y += __shfl_xor_sync(~0u, v.y, mask);
  }
  if (part == 0) room.of_column[column] = v;
  __syncthreads();
  v = make_float2(0, 0);
#pragma unroll 1
  for (int i = 0; i < count; ++i) v.x += room.of_column[first + i].x, v.y += room.of_column[first + i].y;
  return v;
}
