// channels.cuh: V neighbouring elements at once, for the portable kernels whose threads have V neighbouring channels each.
//
//   LOAD_CHANNELS(to, p, i)     V acc_t from p[i] on; the address must be a multiple of V elements
//   STORE_CHANNELS(p, i, from)  the way back
//   LOCAL_MEM_POINTER           what a pointer into shared memory is declared with
#pragma once
#include "portable.cuh"

#ifdef __OPENCL_VERSION__
#define LOCAL_MEM_POINTER __local
#define LOAD_CHANNELS(to, p, i) { for (int v_ = 0; v_ < V; ++v_) (to)[v_] = LOAD(p, (i) + v_); }
#define STORE_CHANNELS(p, i, from) { for (int v_ = 0; v_ < V; ++v_) STORE(p, (i) + v_, (from)[v_]); }
#else
#define LOCAL_MEM_POINTER
struct __align__(sizeof(data_t) * V) Channels {
  data_t of[V];
};
#define LOAD_CHANNELS(to, p, i)                                        \
  {                                                                    \
    const Channels all_ = *(const Channels*)((p) + (i));               \
    _Pragma("unroll") for (int v_ = 0; v_ < V; ++v_) (to)[v_] = LOAD(all_.of, v_); \
  }
#define STORE_CHANNELS(p, i, from)                                     \
  {                                                                    \
    Channels all_;                                                     \
    _Pragma("unroll") for (int v_ = 0; v_ < V; ++v_) STORE(all_.of, v_, (from)[v_]); \
    *(Channels*)((p) + (i)) = all_;                                    \
  }
#endif
