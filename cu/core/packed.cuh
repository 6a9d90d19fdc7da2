// packed.cuh: what the tensor-core kernels share: element types, wide stores, moments, divisions, offsets in the result.
#pragma once
#include "core/division.cuh"
#include "core/launch.cuh"
#include "core/numbers.cuh"

#define DEVICE __device__ __forceinline__

// The next tap of a filter of so many rows and columns.
DEVICE void next_tap(int& t, int& r, int& s, int rows, int columns) {
  if (++s == columns) {
    s = 0;
    if (++r == rows) {
      r = 0;
      ++t;
    }
  }
}

DEVICE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

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
// Rounds to the nearest TF32 number: products ignore the 13 bits behind it.
DEVICE uint32_t to_tf32(float v) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return bits;
}
// Two neighbours of a 16-bit type as one word; the second two round floats to that type.
DEVICE uint32_t word_of(__half low, __half high) { return low.bits | (uint32_t)high.bits << 16; }
DEVICE uint32_t word_of(__nv_bfloat16 low, __nv_bfloat16 high) { return low.bits | (uint32_t)high.bits << 16; }
template <class T> DEVICE uint32_t word_of(float low, float high);
template <> DEVICE uint32_t word_of<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *(const uint32_t*)&both;
}
template <> DEVICE uint32_t word_of<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *(const uint32_t*)&both;
}

// ---- neighbours that are stored at once, as one word. nvcc would split some of these stores.

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

// Numbers that lie side by side, and are read at once.
template <class T, int count> struct alignas((count * sizeof(T) < 16 ? count * sizeof(T) : 16)) Vec {
  T v[count];
};
// Rounds and stores some at once.
template <class T, int count> DEVICE void store_rounded(T* to, const float (&v)[count]) {
  Vec<T, count> out;
#pragma unroll
  for (int i = 0; i < count; ++i) out.v[i] = from_float<T>(v[i]);
  store_word(to, *(const word<Vec<T, count>>*)&out);
}

// ---- f(Constant<0>), ... f(Constant<count - 1>): calls with compile-time numbers, so that they can index arrays in registers

template <int n> struct Constant {
  static constexpr int value = n;
};
template <int count, int i = 0, class F> DEVICE void for_all(const F& f) {
  if constexpr (i < count) {
    f(Constant<i>());
    for_all<count, i + 1>(f);
  }
}

// ---- f of each element of an array in registers, or of two such arrays, of any rank

template <class T, int count, class F> DEVICE void each(T (&v)[count], const F& f) {
#pragma unroll
  for (int i = 0; i < count; ++i) f(v[i]);
}
template <class T, int count, int length, class F> DEVICE void each(T (&v)[count][length], const F& f) {
#pragma unroll
  for (int i = 0; i < count; ++i) each(v[i], f);
}
template <class T, class U, int count, class F> DEVICE void each(T (&v)[count], U (&w)[count], const F& f) {
#pragma unroll
  for (int i = 0; i < count; ++i) f(v[i], w[i]);
}
template <class T, class U, int count, int length, class F> DEVICE void each(T (&v)[count][length], U (&w)[count][length], const F& f) {
#pragma unroll
  for (int i = 0; i < count; ++i) each(v[i], w[i], f);
}
template <class Numbers> DEVICE void clear(Numbers& v) {
  each(v, [](auto& one) { one = 0; });
}

// ---- moments of y

// The deviations of some numbers from a first one, and their squares, summed: so a large mean costs no digits.
struct Deviations {
  float all = 0, squares = 0;
  DEVICE void add(float off) {
    all += off;
    squares = fmaf(off, off, squares);
  }
  // adds the sums of the lanes whose numbers differ in the bits from `from` up to `to`, excluded
  template <int from, int to> DEVICE void add_lanes() {
#pragma unroll
    for (int beside = from; beside < to; beside *= 2) {
      all += __shfl_xor_sync(~0u, all, beside);
      squares += __shfl_xor_sync(~0u, squares, beside);
    }
  }
  DEVICE float mean(float first, int count) const { return first + all / count; }
  DEVICE float off_mean(int count) const { return fmaxf(squares - all * (all / count), 0); }  // the sum of squared deviations from the mean
};

// ---- clears what packing blocks told one another (packed_tiles.cuh), once no launch reads it any more

DEVICE void clear_packed_tiles(uint4* tiles, int count, int first, int apart) {
  for (int i = first; i < count; i += apart) tiles[i] = make_uint4(0, 0, 0, 0);
}

// ---- quotient and remainder of a division by d, whose prepared form is `by`

struct Divided {
  int quotient, rest;
  DEVICE Divided(int n, long long d, divider_t by) : quotient(divided(n, by)), rest(n - quotient * (int)d) {}
};

// ---- the offset in a plane of y of pixel number `inside` of a phase's image; dense: the phase is the whole plane

template <bool dense, class Shape> DEVICE int plane_offset(const Shape& shape, int inside) {
  if (dense) return inside;
  const Divided slice(inside, shape.pq, shape.by_pq), row(slice.rest, shape.q, shape.by_q);
  return (int)(shape.out_base + slice.quotient * shape.out_d + row.quotient * shape.out_h + row.rest * shape.out_w);
}
