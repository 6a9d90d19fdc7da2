// complex.cuh: complex numbers of transforms, which are double whatever the arrays are, and which values of arrays a transform takes.
#pragma once

typedef double2 complex_t;
typedef double wide_t;
#ifdef __OPENCL_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#define COMPLEX(re, im) ((complex_t)(re, im))
#define TURN(angle, s, c) { s = sinpi(angle); c = cospi(angle); }
#define BITS_TO_WIDE(bits) as_double(bits)
#else
#define COMPLEX(re, im) make_double2(re, im)
#define TURN(angle, s, c) sincospi(angle, &s, &c);
#define BITS_TO_WIDE(bits) __longlong_as_double(bits)
#endif

// a value as transforms take it: values that are not usable would spoil more results than those they reach
#define FITTING(v) (fabs((wide_t)(v)) <= (wide_t)1e95 ? (wide_t)(v) : (wide_t)0)

WITHIN_KERNEL complex_t times(complex_t a, complex_t b) { return COMPLEX(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x); }
WITHIN_KERNEL complex_t times_conjugate(complex_t a, complex_t b) { return COMPLEX(a.x * b.x + a.y * b.y, a.y * b.x - a.x * b.y); }
