// division.cuh: quick divisions by numbers that a kernel gets as arguments.
//
// Dividing by an argument takes 24 instructions, in 64 bits 108. Dividing by a divisor that the host has prepared takes 4: a
// multiplication and a shift (Granlund and Montgomery, 'Division by invariant integers using multiplication', 1994).
//
//   floor(n / d) = (floor(n m / 2^32) + n) >> s      s = ceil(log2 d), m = floor(2^32 (2^s - d) / d) + 1
//
// It is right for 0 <= n < 2^31 and 1 <= d <= 2^31. `divider` in pycuda_conv/engines/geometry.py computes m and s; both travel in one
// argument of 64 bits, m in the lower half.
#pragma once

#ifdef __OPENCL_VERSION__
typedef long divider_t;
inline int divided(int n, divider_t by) { return (int)((mul_hi((uint)n, (uint)by) + (uint)n) >> (int)(by >> 32)); }
#else
typedef long long divider_t;
__device__ __forceinline__ int divided(int n, divider_t by) { return (int)((__umulhi(n, (unsigned)by) + n) >> (int)(by >> 32)); }
#endif
