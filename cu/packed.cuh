// packed.cuh: what the kernels on packed operands share: element types, the scale that is guessed, places in the result, the epilogue.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include "epilogue.cuh"
#include "launch.cuh"

#define DEVICE __device__ __forceinline__

// ---- element types, as defines name them: 32 float, 16 half, 17 bfloat16

template <int code> struct ElementOf;
template <> struct ElementOf<32> { typedef float type; };
template <> struct ElementOf<16> { typedef __half type; };
template <> struct ElementOf<17> { typedef __nv_bfloat16 type; };
template <int code> using element = typename ElementOf<code>::type;

DEVICE float to_float(float v) { return v; }
DEVICE float to_float(__half v) { return __half2float(v); }
DEVICE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <class T> DEVICE T from_float(float v);
template <> DEVICE float from_float<float>(float v) { return v; }
template <> DEVICE __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// ---- neighbours that are stored at once, as a word of their bytes. Left to itself nvcc takes some of such stores apart.

template <int bytes> struct WordOf;
template <> struct WordOf<2> { typedef uint16_t type; };
template <> struct WordOf<4> { typedef uint32_t type; };
template <> struct WordOf<8> { typedef uint2 type; };
template <> struct WordOf<16> { typedef uint4 type; };
template <class Neighbours> using word = typename WordOf<sizeof(Neighbours)>::type;

DEVICE void store_word(void* to, uint16_t v) { *(uint16_t*)to = v; }
DEVICE void store_word(void* to, uint32_t v) { asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(v) : "memory"); }
DEVICE void store_word(void* to, uint2 v) { asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory"); }
DEVICE void store_word(void* to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ---- limbs: see pack.cu

constexpr int GUESS = 9;  // the exponent of the scale with which images are split before their extremes are known

DEVICE __half2 from_floats(float a, float b, __half) { return __floats2half2_rn(a, b); }
DEVICE __nv_bfloat162 from_floats(float a, float b, __nv_bfloat16) { return __floats2bfloat162_rn(a, b); }
DEVICE float2 to_floats(__half2 v) { return __half22float2(v); }
DEVICE float2 to_floats(__nv_bfloat162 v) { return __bfloat1622float2(v); }

// Some values as limbs, two to a word: words[limb].
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

// The largest and the smallest magnitude of some floats, as bits.
struct Magnitudes {
  unsigned largest, smallest;  // smallest: less one, so that zero is the largest there is; ~0 of none
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
};

// ---- where pixel number `inside` of an image of a launch lies in a plane of y; dense: there too it is number `inside`

template <bool dense, class Shape> DEVICE int plane_offset(const Shape& shape, int inside) {
  if (dense) return inside;
  return (int)(shape.out_base + inside / (int)shape.pq * shape.out_d + inside % (int)shape.pq / (int)shape.q * shape.out_h + inside % (int)shape.q * shape.out_w);
}
