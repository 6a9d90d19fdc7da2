// numbers.cuh: integers of fixed sizes, the two 16-bit floats, and tensor maps, without a header of the system's or of CUDA's.
//
// So every kernel compiles with no include path but this folder, by nvcc and by NVRTC, which needs no toolkit, and in less time.
// The conversions are the instructions of cuda_fp16.h and cuda_bf16.h: the machine code is the same, from sm_80 on.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
#ifdef __CUDACC_RTC__
typedef unsigned long long uint64_t;
#else
typedef unsigned long uint64_t;  // as in stdint.h of Linux, which nvcc includes by itself
#endif
#ifndef INT_MIN
#define INT_MIN (-2147483647 - 1)
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

// ---- 16-bit floats: their bits; two of them make a word

struct __align__(2) __half { uint16_t bits; };
struct __align__(4) __half2 { __half x, y; };
struct __align__(2) __nv_bfloat16 { uint16_t bits; };
struct __align__(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __half half;
#define CONVERT __device__ __forceinline__

CONVERT float __half2float(__half v) {
  float f;
  asm("{  cvt.f32.f16 %0, %1;}\n" : "=f"(f) : "h"(v.bits));
  return f;
}
CONVERT __half __float2half_rn(float f) {
  __half v;
  asm("{  cvt.rn.f16.f32 %0, %1;}\n" : "=h"(v.bits) : "f"(f));
  return v;
}
CONVERT float2 __half22float2(__half2 v) {
  float2 f;
  asm("{.reg .f16 low,high;\n  mov.b32 {low,high},%1;\n  cvt.f32.f16 %0, low;}\n" : "=f"(f.x) : "r"(*(uint32_t*)&v));
  asm("{.reg .f16 low,high;\n  mov.b32 {low,high},%1;\n  cvt.f32.f16 %0, high;}\n" : "=f"(f.y) : "r"(*(uint32_t*)&v));
  return f;
}
CONVERT __half2 __floats2half2_rn(float low, float high) {
#if __CUDA_ARCH__ >= 800
  __half2 v;
  asm("{ cvt.rn.f16x2.f32 %0, %2, %1; }\n" : "=r"(*(uint32_t*)&v) : "f"(low), "f"(high));
  return v;
#else
  return {__float2half_rn(low), __float2half_rn(high)};
#endif
}

CONVERT float __bfloat162float(__nv_bfloat16 v) {
  float f;
#if __CUDA_ARCH__ >= 900
  asm("{ cvt.f32.bf16 %0, %1;}\n" : "=f"(f) : "h"(v.bits));
#else
  asm("{ mov.b32 %0, {0,%1};}\n" : "=f"(f) : "h"(v.bits));
#endif
  return f;
}
CONVERT __nv_bfloat16 __float2bfloat16_rn(float f) {
  __nv_bfloat16 v;
#if __CUDA_ARCH__ >= 800
  asm("{  cvt.rn.bf16.f32 %0, %1;}\n" : "=h"(v.bits) : "f"(f));
#else
  const uint32_t bits = __float_as_uint(f);
  v.bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
  return v;
}
CONVERT float2 __bfloat1622float2(__nv_bfloat162 v) { return make_float2(__bfloat162float(v.x), __bfloat162float(v.y)); }
CONVERT __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
#if __CUDA_ARCH__ >= 800
  __nv_bfloat162 v;
  asm("{ cvt.rn.bf16x2.f32 %0, %2, %1;}\n" : "=r"(*(uint32_t*)&v) : "f"(low), "f"(high));
  return v;
#else
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
#endif
}

// ---- a tensor map: 128 bytes that only the hardware reads

struct __align__(128) CUtensorMap { uint64_t opaque[16]; };
