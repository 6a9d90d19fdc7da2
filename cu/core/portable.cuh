// portable.cuh: the small dialect of the portable kernels, whose one text compiles as CUDA C++ (nvcc) and as OpenCL C (PoCL on a machine without
// an NVIDIA GPU).
//
// Its words are those of PyCUDA's and PyOpenCL's `_cluda` modules: KERNEL, WITHIN_KERNEL, GLOBAL_MEM, LOCAL_MEM,
// LID_0, GID_0, local_barrier(). Added here:
//   DTYPE     64, 32, 16 or 17: data_t is double, float, half or bfloat16; acc_t, in which sums are kept, is double or float
//   index_t   offset into an array: 64 bits when an array has 2^31 elements or more (INDEX_64=1), else 32
//   LAUNCH_BOUNDS(threads, blocks)  threads of a block, and blocks that should fit a multiprocessor at once
//   LOAD, STORE         one element between global memory and acc_t (16-bit ones convert on the way, rounded to nearest even)
//   LOAD_VEC, STORE_VEC four neighbours at once; the address must be a multiple of four elements
//   LOAD_VEC8, STORE_VEC8  eight of a 16-bit type, whose address must be a multiple of 16 bytes
//   FROM_WORDS          in CUDA, the eight values of a uint4
//   LOCAL_LOAD_VEC, LOCAL_STORE_VEC  four acc_t from shared memory and to it
//   LOCAL_MEM_POINTER    before the type that a pointer into shared memory points to
//   LOCAL_ROOM(name)    shared memory of as many acc_t as the launch asks for; in OpenCL, where its size would be an argument, of ROOM acc_t
//   BITS_TO_ACC         an acc_t from its bits, which come as a long_t: besides addresses, launches pass long_t alone
//   DIVIDED             an offset in an array divided by d, whose prepared form is `by`: division.cuh
//   OF_LAYER(NAME, member)  a member of the launch's arguments, `arg`; with LAYER, the constant NAME, which has the same value
//   OVER(n, d, by)      n / d for 0 <= n < 2^31 and a d from OF_LAYER; `by` is the member that holds its prepared form
//   SCALE_AND_ADD(v, factor, summand)  a statement: v becomes v * factor + summand, rounded once in CUDA
//   FINISH              what finishes a sum before it is stored: epilogue.cuh
// Every launch is one-dimensional: grids along x may have 2^31 - 1 blocks, along y and z only 65535.
#pragma once

#ifndef DTYPE
#define DTYPE 32
#endif
#ifndef INDEX_64
#define INDEX_64 0
#endif
#ifdef LAYER
#define OF_LAYER(NAME, member) (NAME)
#define OVER(n, d, by) ((int)((unsigned)(n) / (unsigned)(d)))
#else
#define OF_LAYER(NAME, member) ((int)arg.member)
#define OVER(n, d, by) divided(n, arg.by)
#endif
#include "core/division.cuh"
#include "core/epilogue.cuh"
#include "core/launch.cuh"

#ifdef __OPENCL_VERSION__
#if DTYPE == 64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
#define KERNEL __kernel
#define WITHIN_KERNEL
#define GLOBAL_MEM __global
#define LOCAL_MEM __local
#define LOCAL_MEM_POINTER __local
#ifndef ROOM
#define ROOM 4096  // for kernels whose GPU launch sets the size, when they are tried on OpenCL
#endif
#define LOCAL_ROOM(name) __local acc_t name[ROOM]
#define RESTRICT restrict
#define LAUNCH_BOUNDS(threads, blocks) __attribute__((reqd_work_group_size(threads, 1, 1)))
#define ALIGNED __attribute__((aligned(16)))
#define LID_0 ((int)get_local_id(0))
#define GID_0 (get_group_id(0) + get_global_offset(0) / get_local_size(0) - 1)  // a launch comes in parts: the first begins at offset 1 block
#define local_barrier() barrier(CLK_LOCAL_MEM_FENCE)
#define HIDE(v)
#define SCALE_AND_ADD(v, factor, summand) { (v) *= (factor); (v) += (summand); }
#if DTYPE == 64
#define BITS_TO_ACC(bits) as_double(bits)
#else
#define BITS_TO_ACC(bits) as_float((int)(bits))
#endif
typedef long long_t;
#else
#if DTYPE == 16 || DTYPE == 17
#include "core/numbers.cuh"
#endif
#define KERNEL extern "C" __global__
#define WITHIN_KERNEL __device__ __forceinline__
#define GLOBAL_MEM
#define LOCAL_MEM __shared__
#define LOCAL_MEM_POINTER
#define LOCAL_ROOM(name) extern __shared__ acc_t name[]
#define RESTRICT __restrict__
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define ALIGNED __align__(16)
#define LID_0 ((int)threadIdx.x)
#define GID_0 blockIdx.x
#define local_barrier() __syncthreads()
#define HIDE(v) asm volatile("" : "+r"(v));
#if DTYPE == 64
#define SCALE_AND_ADD(v, factor, summand) (v) = fma(v, factor, summand);
#else
#define SCALE_AND_ADD(v, factor, summand) (v) = fmaf(v, factor, summand);
#endif
#if DTYPE == 64
#define BITS_TO_ACC(bits) __longlong_as_double(bits)
#else
#define BITS_TO_ACC(bits) __int_as_float((int)(bits))
#endif
typedef long long long_t;
#endif

#if INDEX_64
typedef long_t index_t;
#define DIVIDED(n, d, by) ((n) / (index_t)(d))
#else
typedef int index_t;
#define DIVIDED(n, d, by) divided(n, by)
#endif

#if DTYPE == 64
typedef double data_t;
typedef double acc_t;
#elif DTYPE == 32
typedef float data_t;
typedef float acc_t;
#elif DTYPE == 16
typedef half data_t;
typedef float acc_t;
#else
#ifdef __OPENCL_VERSION__
typedef ushort data_t;
#else
typedef __nv_bfloat16 data_t;
#endif
typedef float acc_t;
#endif

#include "core/activation.cuh"

#ifdef __OPENCL_VERSION__
#if DTYPE == 16  // PoCL has no half arithmetic, only these conversions
#define LOAD(p, i) vload_half((i), (p))
#define STORE(p, i, v) vstore_half((v), (i), (p))
#elif DTYPE == 17  // OpenCL has no bfloat16, which is the upper half of a float
WITHIN_KERNEL float bfloat16_to_float(ushort v) { return as_float((uint)v << 16); }
WITHIN_KERNEL ushort float_to_bfloat16(float v) {
  const uint bits = as_uint(v);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // a NaN: rounding could carry it into an infinity
  return (ushort)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#define LOAD(p, i) bfloat16_to_float((p)[i])
#define STORE(p, i, v) ((p)[i] = float_to_bfloat16(v))
#else
#define LOAD(p, i) ((p)[i])
#define STORE(p, i, v) ((p)[i] = (v))
#endif
#define LOAD_VEC(d, p, i) { (d)[0] = LOAD(p, i); (d)[1] = LOAD(p, (i) + 1); (d)[2] = LOAD(p, (i) + 2); (d)[3] = LOAD(p, (i) + 3); }
#define STORE_VEC(p, i, s) { STORE(p, i, (s)[0]); STORE(p, (i) + 1, (s)[1]); STORE(p, (i) + 2, (s)[2]); STORE(p, (i) + 3, (s)[3]); }
#define LOAD_VEC8(d, p, i) { LOAD_VEC(d, p, i) LOAD_VEC((d) + 4, p, (i) + 4) }
#define STORE_VEC8(p, i, s) { STORE_VEC(p, i, s) STORE_VEC(p, (i) + 4, (s) + 4) }
#define LOCAL_LOAD_VEC(d, p) { (d)[0] = (p)[0]; (d)[1] = (p)[1]; (d)[2] = (p)[2]; (d)[3] = (p)[3]; }
#define LOCAL_STORE_VEC(p, s) LOCAL_LOAD_VEC(p, s)
#else
#if DTYPE == 16
#define LOAD(p, i) __half2float((p)[i])
#define STORE(p, i, v) ((p)[i] = __float2half_rn(v))
#define PAIR __half2
#define PAIR_TO_FLOATS __half22float2
#define FLOATS_TO_PAIR __floats2half2_rn
#elif DTYPE == 17
#define LOAD(p, i) __bfloat162float((p)[i])
#define STORE(p, i, v) ((p)[i] = __float2bfloat16_rn(v))
#define PAIR __nv_bfloat162
#define PAIR_TO_FLOATS __bfloat1622float2
#define FLOATS_TO_PAIR __floats2bfloat162_rn
#else
#define LOAD(p, i) ((p)[i])
#define STORE(p, i, v) ((p)[i] = (v))
#endif
#if DTYPE == 64
#define VEC_COPY(d, s) { double2 lo_ = ((const double2*)(s))[0], hi_ = ((const double2*)(s))[1]; (d)[0] = lo_.x; (d)[1] = lo_.y; (d)[2] = hi_.x; (d)[3] = hi_.y; }
#define LOAD_VEC(d, p, i) VEC_COPY(d, (p) + (i))
#define STORE_VEC(p, i, s) { ((double2*)((p) + (i)))[0] = make_double2((s)[0], (s)[1]); ((double2*)((p) + (i)))[1] = make_double2((s)[2], (s)[3]); }
#else
#define VEC_COPY(d, s) { float4 v_ = *(const float4*)(s); (d)[0] = v_.x; (d)[1] = v_.y; (d)[2] = v_.z; (d)[3] = v_.w; }
#if DTYPE == 32
#define LOAD_VEC(d, p, i) VEC_COPY(d, (p) + (i))
#define STORE_VEC(p, i, s) { *(float4*)((p) + (i)) = make_float4((s)[0], (s)[1], (s)[2], (s)[3]); }
#else
#define FROM_PAIRS(d, lo, hi) { float2 lo_ = PAIR_TO_FLOATS(*(PAIR*)&(lo)), hi_ = PAIR_TO_FLOATS(*(PAIR*)&(hi)); \
    (d)[0] = lo_.x; (d)[1] = lo_.y; (d)[2] = hi_.x; (d)[3] = hi_.y; }
#define LOAD_VEC(d, p, i) { uint2 u_ = *(const uint2*)((p) + (i)); FROM_PAIRS(d, u_.x, u_.y) }
#define FROM_WORDS(d, u) { FROM_PAIRS(d, (u).x, (u).y) FROM_PAIRS((d) + 4, (u).z, (u).w) }
#define LOAD_VEC8(d, p, i) { uint4 u_ = *(const uint4*)((p) + (i)); FROM_WORDS(d, u_) }
#define STORE_VEC(p, i, s) { PAIR lo_ = FLOATS_TO_PAIR((s)[0], (s)[1]), hi_ = FLOATS_TO_PAIR((s)[2], (s)[3]); \
    *(uint2*)((p) + (i)) = make_uint2(*(unsigned*)&lo_, *(unsigned*)&hi_); }
#define STORE_VEC8(p, i, s) { PAIR a_ = FLOATS_TO_PAIR((s)[0], (s)[1]), b_ = FLOATS_TO_PAIR((s)[2], (s)[3]), c_ = FLOATS_TO_PAIR((s)[4], (s)[5]), \
    d_ = FLOATS_TO_PAIR((s)[6], (s)[7]); *(uint4*)((p) + (i)) = make_uint4(*(unsigned*)&a_, *(unsigned*)&b_, *(unsigned*)&c_, *(unsigned*)&d_); }
#endif
#endif
#define LOCAL_LOAD_VEC(d, p) VEC_COPY(d, p)
#if DTYPE == 64
#define LOCAL_STORE_VEC(p, s) { ((double2*)(p))[0] = make_double2((s)[0], (s)[1]); ((double2*)(p))[1] = make_double2((s)[2], (s)[3]); }
#else
#define LOCAL_STORE_VEC(p, s) { *(float4*)(p) = make_float4((s)[0], (s)[1], (s)[2], (s)[3]); }
#endif
#endif
