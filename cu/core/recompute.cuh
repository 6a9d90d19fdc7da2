// recompute.cuh: a block computes the results that fp16 limbs can't give once more, in plain fp32, after it has stored them.
//
// pack.cu flags images and channels of the filter. Flag 2: one holds Inf, NaN or what no scale fits. Every result that depends on it is computed again.
// Flag 1: one has numbers that are too small. A result is computed again if it may show that: if it is small for its scales and its summands are
// small. Residual and bias are subtracted from a result first; what their rounding hides cannot be seen in the result either. Behind an
// activation the sum cannot be recovered from the result, so the summands alone decide: nearly always the first that are not zero are large enough.
//
// Mapping  a warp takes MENDED channels x 32 pixels at a time, a lane one pixel. To test a suspect, all lanes share its summands.
#pragma once
#include "core/finish.cuh"
#include "core/near_border.cuh"

constexpr int MENDED = 16;    // channels
constexpr int AT_ONCE = 4;    // summands whose loads of x are under way together
constexpr int SUSPECTS = 24;  // with more suspects it is quicker to compute all results again

// How x and w lie, and where a convolution, or each phase of dgrad, reads x: pixel (o, p, q) of y and tap t of an axis read x at
// o * stride_d - pad_d + t * dilation_d and so on.
struct RecomputeArrays {
  long long channels, d, h, w;                      // x: channels of a group, and its size,
  long long x_image, x_group, x_channel, x_pixel;   // elements from one image, group, channel and pixel to the next
  long long w_group, w_m, w_c, w_t, w_r, w_s;       // w: elements from one group, channel of y, channel of x and tap to the next
  long long stride_d, stride_h, stride_w, dilation_d, dilation_h, dilation_w;
  long long side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;  // what stands outside of x (near_border.cuh)
};
// What differs from phase to phase; a launch's arguments have room for 4 kB.
struct RecomputePhase {
  long long taps_t, taps_r, taps_s, pad_d, pad_h, pad_w;
  long long w_base;                                 // elements of w before the phase's first tap
};
// The arrays themselves.
struct RecomputeOperands {
  const float *x, *w, *bias, *scale, *residual;
  const int *x_flags, *w_flags;
  const float *x_scales, *w_scales;
};

// What finishes a sum; slope: a float's bits.
struct RecomputeFinish {
  long long has_bias, has_scale, has_residual, activation, slope;
  template <class Arguments>
  DEVICE explicit RecomputeFinish(const Arguments& of)
      : has_bias(of.has_bias), has_scale(of.has_scale), has_residual(of.has_residual), activation(of.activation), slope(of.slope) {}
};

// A summand's channel and tap; next() goes through the taps first, along s first, then some channels further.
struct Summand {
  int c, t, r, s;
  DEVICE void next(const RecomputePhase& phase, int channels) {
    if (++s < (int)phase.taps_s) return;
    s = 0;
    if (++r < (int)phase.taps_r) return;
    r = 0;
    if (++t < (int)phase.taps_t) return;
    t = 0;
    c += channels;
  }
};

DEVICE float load_stored(const float* from) {  // reads what other warps of the block have stored, some of it by TMA
  uint32_t v;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return __uint_as_float(v);
}

// Recomputes channels m0, ... of `group` of this lane's pixel of the launch (-1: none), which are stored. Returns whether results were computed again.
template <bool nhwc, bool dense, class Shape>
DEVICE bool recompute_fp32(const Shape& shape, const RecomputeFinish& what, const RecomputeArrays& arrays, const RecomputePhase& phase,
                           const RecomputeOperands& of, float* y, int group, int m0, int pixel) {
  const bool there = pixel >= 0;
  const Divided of_image(there ? pixel : 0, shape.plane, shape.by_plane), slice(of_image.rest, shape.pq, shape.by_pq);
  const Divided row(slice.rest, shape.q, shape.by_q);
  const int image = of_image.quotient, k0 = group * (int)shape.rows_group + m0, count = min(MENDED, (int)shape.rows_group - m0);
  const int lane = threadIdx.x % 32, own = k0 + min(lane, count - 1);  // a lane reads the flag of one channel
  const int x_flag = there ? of.x_flags[image] : 0, w_flag = of.w_flags[own];
  if (!__any_sync(~0u, x_flag | w_flag)) return false;
  const long long place = image * shape.out_image + (long long)plane_offset<dense>(shape, of_image.rest) * (nhwc ? (int)shape.rows : 1) + k0 * shape.out_row;
  y += place;  // of channel k0
  const bool known = !activation(what);  // the sums can be recovered from the results
  const int gemm_k = (int)arrays.channels * (int)phase.taps_t * (int)phase.taps_r * (int)phase.taps_s;
  const int channels = gemm_k ? (int)arrays.channels : 0;  // a phase may have no taps
  float found[MENDED];
#pragma unroll
  for (int i = 0; i < MENDED; ++i) found[i] = load_stored(y + min(i, count - 1) * shape.out_row);
  if (has_residual(what)) {
#pragma unroll
    for (int i = 0; i < MENDED; ++i) found[i] -= of.residual[place + min(i, count - 1) * shape.out_row];
  }
  const ScaleAndBias of_own(what, of.scale, of.bias, own);
  const float x_scale = of.x_scales[image], w_least = 2 * sqrtf((float)gemm_k) * of.w_scales[own] * fabsf(of_own.scale), w_bias = of_own.bias;
  unsigned mine = 0, suspects = 0;
  bool any = false;
#pragma unroll 1
  for (int i = 0; i < MENDED; ++i) {
    const int flag = x_flag | __shfl_sync(~0u, w_flag, i);
    const float least = x_scale * __shfl_sync(~0u, w_least, i), sum = found[i] - __shfl_sync(~0u, w_bias, i);
    if (!there || i >= count || !flag) continue;
    mine |= 1u << i;
    any |= flag > 1;
    if (known && flag == 1 && !(fabsf(sum) >= least)) suspects |= 1u << i;
  }
  any = __any_sync(~0u, any) || __reduce_add_sync(~0u, __popc(suspects)) > SUSPECTS;
  const int d0 = slice.quotient * (int)arrays.stride_d - (int)phase.pad_d, h0 = row.quotient * (int)arrays.stride_h - (int)phase.pad_h;
  const int w0 = row.rest * (int)arrays.stride_w - (int)phase.pad_w;
  // what a summand multiplies: x for pixel (d, h, v) of image n, or what stands outside of it, ...
  auto from_x = [&](int n, int d, int h, int v, const Summand& at) -> const float* {  // null where zeros stand
    d = near_pixel(d + at.t * (int)arrays.dilation_d, (int)arrays.d, arrays.side_d, arrays.last_side_d);
    h = near_pixel(h + at.r * (int)arrays.dilation_h, (int)arrays.h, arrays.side_h, arrays.last_side_h);
    v = near_pixel(v + at.s * (int)arrays.dilation_w, (int)arrays.w, arrays.side_w, arrays.last_side_w);
    const long long pixel = ((long long)d * (int)arrays.h + h) * (int)arrays.w + v;
    return (d | h | v) < 0 ? nullptr : of.x + (n * arrays.x_image + group * arrays.x_group + at.c * arrays.x_channel + pixel * arrays.x_pixel);
  };
  auto x_at = [&](int n, int d, int h, int v, const Summand& at) {
    const float* const from = from_x(n, d, h, v, at);
    return from ? *from : 0.f;
  };
  // ... and w, for channel m0 + i of y
  auto w_at = [&](int i, const Summand& at) {
    return of.w + (phase.w_base + group * arrays.w_group + (m0 + i) * arrays.w_m + at.c * arrays.w_c + at.t * arrays.w_t + at.r * arrays.w_r + at.s * arrays.w_s);
  };
  // one suspect at a time: the sum of its summands' magnitudes, as the limbs hold them
#pragma unroll 1
  for (int i = 0; !any && i < count; ++i) {
#pragma unroll 1
    for (unsigned lanes = __ballot_sync(~0u, suspects >> i & 1); lanes && !any; lanes &= lanes - 1) {
      const int from = __ffs(lanes) - 1, n = __shfl_sync(~0u, image, from);
      const int d = __shfl_sync(~0u, d0, from), h = __shfl_sync(~0u, h0, from), v = __shfl_sync(~0u, w0, from);
      const float to_x = __fdividef(1, of.x_scales[n]), to_w = __fdividef(1, of.w_scales[k0 + i]);  // scales are powers of two
      float size = 0;
      bool some = false;
#pragma unroll 1
      for (Summand at = {lane}; at.c < channels; at.next(phase, 32)) {
        const float a = *w_at(i, at), b = x_at(n, d, h, v, at);
        size += fabsf(a * to_w * (b * to_x));
        some |= a != 0 && b != 0;
      }
      for (int half = 16; half > 0; half /= 2) size += __shfl_xor_sync(~0u, size, half);
      any = __any_sync(~0u, some) && !(size >= 4.f * gemm_k);
    }
  }
  if (!known && !any) {  // each lane adds up the magnitudes of its own results' summands, until no result is small
    unsigned small = mine, some = 0;
    float size[MENDED] = {};
    const float to_x = __fdividef(1, x_scale), own_to_w = __fdividef(1, of.w_scales[own]);
#pragma unroll 1
    for (Summand at = {}; at.c < channels && __any_sync(~0u, small); at.next(phase, 1)) {
      const float b = x_at(image, d0, h0, w0, at);
      const float* a = w_at(0, at);
#pragma unroll
      for (int i = 0; i < MENDED; ++i) {
        size[i] += fabsf(*a * __shfl_sync(~0u, own_to_w, i) * (b * to_x));
        if (size[i] >= 4.f * gemm_k) small &= ~(1u << i);
        if (*a != 0 && b != 0) some |= 1u << i;
        if (i + 1 < count) a += arrays.w_m;  // else there is no next channel
      }
    }
    any = __any_sync(~0u, small & some);
  }
  if (!any) return false;
  // tap by tap, over the channels: what a tap reads lies at one pixel, so that loads of several channels are under way
  float sum[MENDED] = {};
  int apart[MENDED];  // of w, from channel m0 on
#pragma unroll
  for (int i = 0; i < MENDED; ++i) apart[i] = min(i, count - 1) * (int)arrays.w_m;
  const int taps = channels ? gemm_k / channels : 0;
  Summand at = {};
#pragma unroll 1
  for (int tap = 0; tap < taps; ++tap, at.next(phase, 0)) {
    const float *a = w_at(0, at), *const b = from_x(image, d0, h0, w0, at);
#pragma unroll 1
    for (int c = 0; c < channels; c += AT_ONCE) {
      float v[AT_ONCE];
#pragma unroll
      for (int e = 0; e < AT_ONCE; ++e) v[e] = b && c + e < channels ? b[(c + e) * arrays.x_channel] : 0.f;
#pragma unroll
      for (int e = 0; e < AT_ONCE; ++e) {
        if (c + e >= channels) break;
#pragma unroll
        for (int i = 0; i < MENDED; ++i) sum[i] = fmaf(a[apart[i]], v[e], sum[i]);
        a += arrays.w_c;
      }
    }
  }
  float kept[MENDED];  // in local memory, so that the loop below need not be unrolled
#pragma unroll
  for (int i = 0; i < MENDED; ++i) kept[i] = sum[i];
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (!(mine >> i & 1)) continue;
    Finish<false> finish;
    finish.of = ScaleAndBias(what, of.scale, of.bias, k0 + i);
    float v[] = {finish.whole(what, kept[i], 1, has_residual(what) ? of.residual[place + i * shape.out_row] : 0)};
    activate(what, v);
    y[i * shape.out_row] = v[0];
  }
  return true;
}
