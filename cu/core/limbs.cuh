// limbs.cuh: float32 as fp16 limbs, and their scales and flags. pack.cu explains these, and `slack`.
#pragma once
#include "core/packed.cuh"

DEVICE __half2 from_floats(float a, float b, __half) { return __floats2half2_rn(a, b); }
DEVICE __nv_bfloat162 from_floats(float a, float b, __nv_bfloat16) { return __floats2bfloat162_rn(a, b); }
DEVICE float2 to_floats(__half2 v) { return __half22float2(v); }
DEVICE float2 to_floats(__nv_bfloat162 v) { return __bfloat1622float2(v); }

// Splits `values` values into `count` limbs, two to a word: words[limb].
template <class T, int count, int values> DEVICE void split(const float (&v)[values], float scale, uint32_t (&words)[count][values / 2]) {
#pragma unroll
  for (int i = 0; i < values / 2; ++i) {
    const float a = v[2 * i] * scale, b = v[2 * i + 1] * scale;
    const auto high = from_floats(a, b, T());
    words[0][i] = *(const uint32_t*)&high;
    if (count == 2) {
      const float2 rounded = to_floats(high);
      const auto low = from_floats((a - rounded.x) * 2048, (b - rounded.y) * 2048, T());
      words[count - 1][i] = *(const uint32_t*)&low;
    }
  }
}
DEVICE uint4 piece_of(const uint32_t (&words)[4]) { return make_uint4(words[0], words[1], words[2], words[3]); }

// ---- extremes, scales, flags

constexpr unsigned INFINITE = 0x7f800000;
constexpr int LARGEST = 60, COVERED = 28;  // exponents: the largest that may be scaled; those below it that limbs cover
constexpr int GUESS = 9;  // the exponent of the scale for numbers of which nothing is known

__device__ float power_of_two(int exponent) { return __uint_as_float((127 + exponent) << 23); }

// The largest and the smallest magnitude of some floats, as bits.
struct MagnitudeRange {
  unsigned largest, smallest;  // smallest: less one, so that zero wraps to the largest; ~0: of none
  DEVICE void add(float a, float b) {
    const unsigned first = __float_as_uint(a) & 0x7fffffff, second = __float_as_uint(b) & 0x7fffffff;
    largest = __vimax3_u32(largest, first, second);
    smallest = __viaddmin_u32(second, ~0u, __viaddmin_u32(first, ~0u, smallest));
  }
  template <int count> DEVICE void add(const float (&v)[count]) {
#pragma unroll
    for (int i = 0; i < count; i += 2) add(v[i], v[i + 1]);
  }
  DEVICE void over_warp() {
    largest = __reduce_max_sync(~0u, largest);
    smallest = __reduce_min_sync(~0u, smallest);
  }
  __device__ void add(const MagnitudeRange& other) {
    largest = max(largest, other.largest);
    smallest = min(smallest, other.smallest);
  }
  __device__ int exponent() const { return (int)(largest >> 23) - 127; }
  __device__ int least() const { return (int)((smallest + 1) >> 23) - 127; }
  __device__ bool usable() const { return largest == 0 || (largest < INFINITE && abs(exponent()) <= LARGEST); }
  __device__ int flag(int slack) const { return !usable() ? 2 : largest && least() < exponent() - COVERED - slack ? 1 : 0; }
  // whether something is so small that 2^guess loses too many of its bits
  __device__ bool loses(int guess, int slack) const { return largest && least() < -14 - guess - slack; }
  // Whether 2^guess will do. The largest must use most of the limbs' bits: if all numbers were as small as the slack allows, all would be rounded so.
  // If it uses nearly all bits, another scale would lose as much: direct/gemm.cu then computes what is lost
  __device__ bool fits(int guess, int slack) const {
    return largest == 0 || (exponent() < 15 - guess && exponent() >= (loses(guess, slack) ? 10 : -2) - guess);
  }
  // the flag of an image that was split with 2^guess
  __device__ int flag(int guess, int slack) const { return loses(guess, slack) ? 1 : 0; }
  // the guess for numbers of which these are a sample: 2^guess brings their largest to [2^11, 2^12)
  __device__ int guess() const { return largest && usable() ? 11 - exponent() : GUESS; }
  __device__ float scale() const { return largest && usable() ? power_of_two(14 - exponent()) : 1; }
};
