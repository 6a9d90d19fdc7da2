// join.cu: two arrays with the channels last as one, whose pixels have the channels of both: out[pixel] = a[pixel], b[pixel].
//
// Mapping  thread -> ITEMS words of 16 bytes of out, THREADS apart.
// Memory   registers only: all words of a thread are under way before the first is written.
// Limits   pixels of both arrays of a multiple of 16 bytes, fewer than 2^31 words.
//
// By hand: nvcc -cubin -I cu cu/nn/join.cu
#ifndef TYPE
#define TYPE 17  // words are of no type
#endif
#include "core/packed.cuh"

constexpr int THREADS = 256, ITEMS = 4;

// Words of a pixel of out, and of a; by_n is the divisor n, prepared (division.cuh).
struct JoinArguments {
  long long words, across, by_across, first;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    join(const uint4* __restrict__ a, const uint4* __restrict__ b, uint4* __restrict__ out, const __grid_constant__ JoinArguments arg) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const int begin = blockIdx.x * (THREADS * ITEMS) + threadIdx.x, first = (int)arg.first, second = (int)arg.across - first;
  uint4 word[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const Divided of_pixel(begin + i * THREADS, arg.across, arg.by_across);
    if (begin + i * THREADS >= (int)arg.words) continue;
    const bool of_a = of_pixel.rest < first;
    word[i] = of_a ? a[(long long)of_pixel.quotient * first + of_pixel.rest] : b[(long long)of_pixel.quotient * second + of_pixel.rest - first];
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (begin + i * THREADS < (int)arg.words) store_word(out + begin + i * THREADS, word[i]);
}
