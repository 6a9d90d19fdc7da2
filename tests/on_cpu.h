// on_cpu.h: enough of CUDA for g++ to run the text of a kernel of float32: a thread of the host for each of a block, one block after the other.
#pragma once
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::min;

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline float __fdividef(float a, float b) { return a / b; }
inline float __int_as_float(int bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx;
inline Index gridDim;

struct Warp {
  std::barrier<> all{32};
  float kept[32];
};
inline thread_local Warp* warp_of_this_thread;
inline std::barrier<>* block_of_all;

inline void __syncthreads() { block_of_all->arrive_and_wait(); }
inline int __syncthreads_or(int v) {
  static std::atomic<int> any;
  __syncthreads();
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (v) any = 1;
  __syncthreads();
  return any;
}
inline float __shfl_xor_sync(unsigned, float v, int lanes) {
  Warp& warp = *warp_of_this_thread;
  const int lane = threadIdx.x % 32;
  warp.kept[lane] = v;
  warp.all.arrive_and_wait();
  v = warp.kept[lane ^ lanes];
  warp.all.arrive_and_wait();
  return v;
}
inline int atomicAdd(int* at, int v) { return __atomic_fetch_add(at, v, __ATOMIC_SEQ_CST); }

// kernel() by every thread of every block
template <class Kernel> void launch(unsigned blocks, unsigned threads, const Kernel& kernel) {
  gridDim.x = blocks;
  for (unsigned block = 0; block < blocks; ++block) {
    std::barrier<> all(threads);
    block_of_all = &all;
    std::vector<std::unique_ptr<Warp>> warps;
    for (unsigned i = 0; i < threads / 32; ++i) warps.emplace_back(new Warp);
    std::vector<std::thread> running;
    for (unsigned i = 0; i < threads; ++i)
      running.emplace_back([&, i] {
        threadIdx.x = i;
        blockIdx.x = block;
        warp_of_this_thread = warps[i / 32].get();
        kernel();
        all.arrive_and_drop();
      });
    for (auto& thread : running) thread.join();
  }
}
