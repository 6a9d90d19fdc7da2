// complex.cuh: what all kernels of transforms share: the type of transforms, complex numbers, and which values of arrays a transform takes.
#pragma once

// With WIDE, transforms are double whatever the arrays are, and each result is checked: see fft/tiles.cu and fft/blocks_results.cu.
#ifndef WIDE
#define WIDE 0
#endif
#define CHECKED (WIDE && DTYPE != 64)
#if WIDE || DTYPE == 64
#ifdef __OPENCL_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
typedef double2 complex_t;
typedef double wide_t;
#else
typedef float2 complex_t;
typedef acc_t wide_t;
#endif
#ifdef __OPENCL_VERSION__
#define COMPLEX(re, im) ((complex_t)(re, im))
#define TURN(angle, s, c) { s = sinpi(angle); c = cospi(angle); }
#elif WIDE || DTYPE == 64
#define COMPLEX(re, im) make_double2(re, im)
#define TURN(angle, s, c) sincospi(angle, &s, &c);
#else
#define COMPLEX(re, im) make_float2(re, im)
#define TURN(angle, s, c) sincospif(angle, &s, &c);
#endif

// a value as transforms take it: values that are not usable would spoil more results than those they reach
#if WIDE || DTYPE == 64
#define FITTING(v) (fabs((wide_t)(v)) <= (wide_t)1e95 ? (wide_t)(v) : (wide_t)0)
#else
#define FITTING(v) (fabs(v) <= (acc_t)1e16f ? (v) : (acc_t)0)
#endif
#if WIDE || DTYPE == 64
#ifdef __OPENCL_VERSION__
#define BITS_TO_WIDE(bits) as_double(bits)
#else
#define BITS_TO_WIDE(bits) __longlong_as_double(bits)
#endif
#else
#define BITS_TO_WIDE(bits) BITS_TO_ACC(bits)
#endif

WITHIN_KERNEL complex_t times(complex_t a, complex_t b) { return COMPLEX(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x); }
WITHIN_KERNEL complex_t times_conjugate(complex_t a, complex_t b) { return COMPLEX(a.x * b.x + a.y * b.y, a.y * b.x - a.x * b.y); }
