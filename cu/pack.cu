// pack.cu: the operands of the implicit GEMM kernels: channels last, 16 bits, float32 as two fp16 limbs.
//
//   hi = fp16(x * s),  lo = fp16((x * s - hi) * 2^11): 22 bits of x, where s is a power of two that brings the largest
//   magnitude of an image (of an output channel's filter) to [2^14, 2^15)
//
// Values 2^(28 + SLACK) below the largest, or more, would lose too many bits; such an image or channel, and one that holds
// Inf or NaN or lies outside 2^-60 .. 2^60, is flagged, and direct_gemm.cu computes what depends on it in plain fp32.
// SLACK is half the bits of gemm k: what the rounding of a sum of that length may lose anyway.
//
// scan_images   largest and smallest non-zero magnitude of every image, as bit patterns, which are ordered as the values are.
//               block -> a slice of an image; parts[image][block of it]. Memory: registers, 64 bytes shared.
// pack_images   x to [limb][image][pixel][channel]. block -> PIXELS pixels x 8 * CHUNKS channels of one image;
//               a thread reads 8 channels of a pixel, 32 neighbouring pixels a warp, and turns them to whole rows of channels
//               in shared memory: [limb][pixel][chunk of 8], chunks swizzled so that neither side meets a bank conflict.
//               Channels last input needs no turning. Folded taps (below) read shifted pixels.
// pack_filter   w to [limb][m][tap][channel], m the output channel. block -> one m.
//
// Folding  where a tensor load can't make the taps of the innermost axes (stride over 8, three channels), packing does: packed
//          channel (tap, c) of pixel i is x[c] at i * stride - pad + tap * dilation. `fold_*` taps; 1 where an axis is not folded.
// Groups   every group starts at a multiple of channels_group, zeros fill it up.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#ifndef IN
#define IN 32        // elements of x and w: 32 float, 16 half, 17 bfloat16
#define LIMBS 2      // 2; 1 keeps hi alone, or 16-bit elements as they are
#define NHWC 0       // layout of x
#define CHUNKS 8     // 8 channels each, of a block of pack_images: 1, 2, 4 or 8
#define SLACK 4
#endif

#if IN == 32
typedef float in_t;
typedef __half limb_t;
__device__ float to_float(in_t v) { return v; }
__device__ limb_t to_limb(float v) { return __float2half_rn(v); }
#elif IN == 16
typedef __half in_t;
typedef __half limb_t;
__device__ float to_float(in_t v) { return __half2float(v); }
__device__ limb_t to_limb(float v) { return __float2half_rn(v); }
#else
typedef __nv_bfloat16 in_t;
typedef __nv_bfloat16 limb_t;
__device__ float to_float(in_t v) { return __bfloat162float(v); }
__device__ limb_t to_limb(float v) { return __float2bfloat16_rn(v); }
#endif

constexpr int THREADS = 256, UNITS = 16;            // units of 32 pixels x 8 channels in a block of pack_images, two a warp
constexpr int PIXELS = 32 * UNITS / CHUNKS;
constexpr unsigned INFINITE = 0x7f800000;
constexpr int LARGEST = 60, COVERED = 28 + SLACK;   // exponents

// Everything that only moves addresses; 64 bits each so that the host can pack it without knowing types.
struct Shape {
  long long images, slices;                          // of scan_images: slices of an image
  long long image_size;                              // elements of an image of x
  long long groups, channels_group, packed_group;    // channels of a group, in x and packed
  long long d, h, w;                                 // x
  long long packed_d, packed_h, packed_w;            // pixels of a packed image
  long long fold_t, fold_r, fold_s;                  // folded taps
  long long stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w;
  long long rows_group, w_group, w_m, w_c;           // of pack_filter: output channels of a group; elements of w from one group, m, c to the next
  long long taps, folded;                            // taps of the packed filter, and folded ones: (tap, folded tap) counts through w
};

struct Extremes {
  unsigned largest, smallest;  // magnitudes as bits; smallest of none: ~0
  __device__ void add(float v) {
    const unsigned bits = __float_as_uint(v) & 0x7fffffff;
    largest = max(largest, bits);
    smallest = min(smallest, bits - 1);  // zero becomes the largest there is
  }
  __device__ void add(const Extremes& other) {
    largest = max(largest, other.largest);
    smallest = min(smallest, other.smallest);
  }
  __device__ bool covered() const {
    const int e = exponent(), least = (int)((smallest + 1) >> 23) - 127;
    return largest == 0 || (largest < INFINITE && abs(e) <= LARGEST && least >= e - COVERED);
  }
  __device__ int exponent() const { return (int)(largest >> 23) - 127; }
  __device__ float scale() const { return largest && covered() ? __uint_as_float((127 + 14 - exponent()) << 23) : 1; }
};

// The extremes of the whole block, to every thread.
__device__ Extremes over_block(Extremes mine) {
  __shared__ Extremes warps[THREADS / 32];
  mine.largest = __reduce_max_sync(~0u, mine.largest);
  mine.smallest = __reduce_min_sync(~0u, mine.smallest);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  Extremes all = warps[0];
  for (int i = 1; i < THREADS / 32; ++i) all.add(warps[i]);
  return all;
}

extern "C" __global__ void __launch_bounds__(THREADS) scan_images(const in_t* __restrict__ x, Extremes* __restrict__ parts, const Shape shape) {
  const long long image = blockIdx.x / shape.slices, slice = blockIdx.x % shape.slices;
  // slices start at multiples of four elements of the image
  const long long quads = (shape.image_size + 3) / 4, first = quads * slice / shape.slices * 4;
  const long long last = min(quads * (slice + 1) / shape.slices * 4, shape.image_size);
  x += image * shape.image_size;
  Extremes found = {0, ~0u};
#if IN == 32
  if (shape.image_size % 4 == 0) {
#pragma unroll 4
    for (long long i = first + 4 * threadIdx.x; i < last; i += 4 * THREADS) {
      const float4 v = *(const float4*)(x + i);
      found.add(v.x);
      found.add(v.y);
      found.add(v.z);
      found.add(v.w);
    }
  } else
#endif
  {
#pragma unroll 8
    for (long long i = first + threadIdx.x; i < last; i += THREADS) found.add(to_float(x[i]));
  }
  found = over_block(found);
  if (threadIdx.x == 0) parts[blockIdx.x] = found;
}

// 8 values as 16 bytes of each limb
__device__ void split(const float (&v)[8], float scale, uint4 (&limbs)[LIMBS]) {
  limb_t parts[LIMBS][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scaled = v[i] * scale;
    parts[0][i] = to_limb(scaled);
#if LIMBS == 2
    parts[1][i] = to_limb((scaled - to_float(parts[0][i])) * 2048);
#endif
  }
#pragma unroll
  for (int limb = 0; limb < LIMBS; ++limb) limbs[limb] = *(const uint4*)parts[limb];
}

// `parts` may be null: then nothing is scaled. scales[image] undoes the scale.
extern "C" __global__ void __launch_bounds__(THREADS) pack_images(const in_t* __restrict__ x, const Extremes* __restrict__ parts,
                                                                  uint4* __restrict__ packed, float* __restrict__ scales,
                                                                  int* __restrict__ flags, const Shape shape) {
  const int pixels = (int)(shape.packed_d * shape.packed_h * shape.packed_w), chunks = (int)(shape.groups * shape.packed_group / 8);
  const int tiles_c = (chunks + CHUNKS - 1) / CHUNKS, tiles_p = (pixels + PIXELS - 1) / PIXELS;
  const int chunk0 = (int)(blockIdx.x % tiles_c) * CHUNKS, pixel0 = (int)(blockIdx.x / tiles_c % tiles_p) * PIXELS;
  const long long image = blockIdx.x / tiles_c / tiles_p;
  float scale = 1;
#if IN == 32
  Extremes found = {0, ~0u};
  for (int i = threadIdx.x; i < shape.slices; i += THREADS) found.add(parts[image * shape.slices + i]);
  found = over_block(found);
  scale = found.scale();
  if (blockIdx.x % (tiles_c * tiles_p) == 0 && threadIdx.x == 0) {
    scales[image] = 1 / scale;
    flags[image] = !found.covered();
  }
#endif
  x += image * shape.image_size;
  const long long limb_size = shape.images * pixels * (long long)chunks;
  packed += image * pixels * (long long)chunks;
  const int cg = (int)shape.channels_group, pg = (int)shape.packed_group;
  const long long plane = shape.d * shape.h * shape.w;
#if NHWC
  // a thread takes one chunk of a pixel, neighbours the next: they read and write neighbouring bytes
#pragma unroll 2
  for (int i = threadIdx.x; i < PIXELS * CHUNKS; i += THREADS) {
    const int pixel = pixel0 + i / CHUNKS, chunk = chunk0 + i % CHUNKS;
    if (pixel >= pixels || chunk >= chunks) continue;
#else
  __shared__ uint4 turned[LIMBS][PIXELS * CHUNKS];
#pragma unroll
  for (int unit = threadIdx.x / 32; unit < UNITS; unit += THREADS / 32) {
    const int inside = unit / CHUNKS * 32 + threadIdx.x % 32, pixel = pixel0 + inside, chunk = chunk0 + unit % CHUNKS;
#endif
    float v[8];
    const int g = 8 * chunk / pg, j0 = 8 * chunk % pg;  // packed_group is a multiple of 8
    const bool inner = pixel < pixels && chunk < chunks;
#if FOLDED
    const int q = pixel % (int)shape.packed_w, p = pixel / (int)shape.packed_w % (int)shape.packed_h, o = pixel / (int)(shape.packed_w * shape.packed_h);
#endif
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int j = j0 + e;
#if FOLDED
      const int tap = j / cg, c = j % cg;
      const int s = tap % (int)shape.fold_s, r = tap / (int)shape.fold_s % (int)shape.fold_r, t = tap / (int)(shape.fold_s * shape.fold_r);
      const int at_w = q * (int)shape.stride_w - (int)shape.pad_w + s * (int)shape.dilation_w;
      const int at_h = p * (int)shape.stride_h - (int)shape.pad_h + r * (int)shape.dilation_h;
      const int at_d = o * (int)shape.stride_d - (int)shape.pad_d + t * (int)shape.dilation_d;
      const bool ok = inner && t < shape.fold_t && (unsigned)at_w < shape.w && (unsigned)at_h < shape.h && (unsigned)at_d < shape.d;
      const long long at = (at_d * shape.h + at_h) * shape.w + at_w;
#else
      const int c = j;
      const bool ok = inner && c < cg;
      const long long at = pixel;
#endif
      const int channel = g * cg + c;
      v[e] = ok ? to_float(NHWC ? x[at * (shape.groups * cg) + channel] : x[channel * plane + at]) : 0;
    }
    uint4 limbs[LIMBS];
    split(v, scale, limbs);
#pragma unroll
    for (int limb = 0; limb < LIMBS; ++limb) {
#if NHWC
      packed[limb * limb_size + (long long)pixel * chunks + chunk] = limbs[limb];
#else
      turned[limb][inside * CHUNKS + ((unit % CHUNKS) ^ (inside % CHUNKS))] = limbs[limb];
#endif
    }
  }
#if !NHWC
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < PIXELS * CHUNKS; i += THREADS) {
    const int inside = i / CHUNKS, at = i % CHUNKS, pixel = pixel0 + inside, chunk = chunk0 + at;
    if (pixel < pixels && chunk < chunks) {
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb)
        packed[limb * limb_size + (long long)pixel * chunks + chunk] = turned[limb][inside * CHUNKS + (at ^ (inside % CHUNKS))];
    }
  }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_filter(const in_t* __restrict__ w, limb_t* __restrict__ packed,
                                                                  float* __restrict__ scales, int* __restrict__ flags, const Shape shape) {
  const int m = blockIdx.x, cg = (int)shape.channels_group, pg = (int)shape.packed_group;
  const int taps = (int)shape.taps, folded = (int)shape.folded;
  w += m / shape.rows_group * shape.w_group + m % shape.rows_group * shape.w_m;
  float scale = 1;
#if IN == 32
  Extremes found = {0, ~0u};
  for (int i = threadIdx.x; i < cg * taps * folded; i += THREADS) found.add(w[i / (taps * folded) * shape.w_c + i % (taps * folded)]);
  found = over_block(found);
  scale = found.scale();
  if (threadIdx.x == 0) {
    scales[m] = 1 / scale;
    flags[m] = !found.covered();
  }
#endif
  const long long limb_size = (long long)gridDim.x * taps * pg;
  packed += (long long)m * taps * pg;
  for (int i = threadIdx.x; i < taps * pg; i += THREADS) {
    const int tap = i / pg, j = i % pg, c = j % cg, fold = j / cg;
    const float v = fold < folded ? to_float(w[c * shape.w_c + tap * folded + fold]) * scale : 0;
    const limb_t hi = to_limb(v);
    packed[i] = hi;
#if LIMBS == 2
    packed[limb_size + i] = to_limb((v - to_float(hi)) * 2048);
#endif
  }
}
