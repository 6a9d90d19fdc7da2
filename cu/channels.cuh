// channels.cuh: V neighbouring elements at once, for the portable kernels whose threads have V neighbouring channels each.
//
//   Channels                    V elements as they lie in memory
//   CHANNELS(p, i)              those from p[i] on; the address must be a multiple of V elements
//   NO_CHANNELS                 zeros
//   UNPACK_CHANNELS(to, from)   V acc_t of Channels
//   LOAD_CHANNELS(to, p, i)     V acc_t from p[i] on
//   STORE_CHANNELS(p, i, from)  the way back
//   LOCAL_MEM_POINTER           what a pointer into shared memory is declared with
#pragma once
#include "portable.cuh"

#ifdef __OPENCL_VERSION__
#define LOCAL_MEM_POINTER __local
typedef struct Channels {
  acc_t of[V];
} Channels;
WITHIN_KERNEL Channels channels_at(const __global data_t* p, long_t i) {
  Channels all;
  for (int v = 0; v < V; ++v) all.of[v] = LOAD(p, i + v);
  return all;
}
WITHIN_KERNEL Channels no_channels() {
  Channels all;
  for (int v = 0; v < V; ++v) all.of[v] = 0;
  return all;
}
#define CHANNELS(p, i) channels_at(p, i)
#define NO_CHANNELS no_channels()
#define UNPACK_CHANNELS(to, from) { for (int v_ = 0; v_ < V; ++v_) (to)[v_] = (from).of[v_]; }
#define STORE_CHANNELS(p, i, from) { for (int v_ = 0; v_ < V; ++v_) STORE(p, (i) + v_, (from)[v_]); }
#else
#define LOCAL_MEM_POINTER
#if DTYPE < 32 && V > 1
#define WIDE 2  // 16-bit numbers stay pairs, one a register, until they are needed
typedef PAIR unit_t;
#define UNPACK(to, i, unit) { const float2 pair_ = PAIR_TO_FLOATS(unit); (to)[2 * (i)] = pair_.x; (to)[2 * (i) + 1] = pair_.y; }
#define PACK(from, i) FLOATS_TO_PAIR((from)[2 * (i)], (from)[2 * (i) + 1])
#else
#define WIDE 1
typedef data_t unit_t;
#define UNPACK(to, i, unit) (to)[i] = LOAD(&(unit), 0);
#define PACK(from, i) packed((from)[i])
__device__ __forceinline__ data_t packed(acc_t v) {
  data_t all;
  STORE(&all, 0, v);
  return all;
}
#endif
struct __align__(sizeof(data_t) * V) Channels {
  unit_t of[V / WIDE];
};
__device__ __forceinline__ Channels no_channels() {
  const acc_t zeros[2] = {0, 0};
  Channels all;
#pragma unroll
  for (int i = 0; i < V / WIDE; ++i) all.of[i] = PACK(zeros, 0);
  return all;
}
#define CHANNELS(p, i) (*(const Channels*)((p) + (i)))
#define NO_CHANNELS no_channels()
#define UNPACK_CHANNELS(to, from) { _Pragma("unroll") for (int v_ = 0; v_ < V / WIDE; ++v_) UNPACK(to, v_, (from).of[v_]) }
#define STORE_CHANNELS(p, i, from)                                                   \
  {                                                                                  \
    Channels all_;                                                                   \
    _Pragma("unroll") for (int v_ = 0; v_ < V / WIDE; ++v_) all_.of[v_] = PACK(from, v_); \
    *(Channels*)((p) + (i)) = all_;                                                  \
  }
#endif
#define LOAD_CHANNELS(to, p, i)              \
  {                                          \
    const Channels all_ = CHANNELS(p, i);    \
    UNPACK_CHANNELS(to, all_)                \
  }
