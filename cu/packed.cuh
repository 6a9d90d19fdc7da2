// packed.cuh: what the kernels on packed operands share: element types, the scale that is guessed, places in the result, the epilogue.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include "epilogue.cuh"

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

// ---- limbs: see pack.cu

constexpr int GUESS = 9;  // the exponent of the scale with which images are split before their extremes are known

// ---- where pixel number `inside` of an image of a launch lies in a plane of y; dense: there too it is number `inside`

template <bool dense, class Shape> DEVICE int plane_offset(const Shape& shape, int inside) {
  if (dense) return inside;
  return (int)(shape.out_base + inside / (int)shape.pq * shape.out_d + inside % (int)shape.pq / (int)shape.q * shape.out_h + inside % (int)shape.q * shape.out_w);
}
