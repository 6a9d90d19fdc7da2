// channels.cuh: V neighbouring elements at once, for the portable kernels whose threads have V neighbouring channels each.
//
//   Channels                    V elements as they lie in memory
//   CHANNELS(p, i)              those from p[i] on; the address must be a multiple of V elements
//   NO_CHANNELS, filled_channels(value)   zeros, or a value in each
//   UNPACK_CHANNELS(to, from)   V acc_t of Channels
//   LOAD_CHANNELS(to, p, i)     V acc_t from p[i] on
//   LOAD_COLUMNS(to, n, p, step, there)  n Channels: number j from p[j * step] on if `there`, an expression in j, else zeros
//   STORE_CHANNELS(p, i, from)  V acc_t to p[i] on
//   STAGE_TAPS(taps, pitch, first, n)   all threads of a block: the R x S taps of n channels from `first` on, to taps[tap * pitch + channel] in
//                               shared memory; the kernel has w, k_all and arg.flip, which rotates the filter by 180 degrees
//   STORE_COLUMNS(y, at, n, sums, there)  n neighbouring pixels of the result to y[at + j * k_all], number j if `there`; the kernel has times and
//                               plus, scale and bias of the channels, and what epilogue.cuh needs
#pragma once
#include "core/portable.cuh"

#ifdef __OPENCL_VERSION__
typedef struct Channels {
  acc_t of[V];
} Channels;
WITHIN_KERNEL Channels channels_at(const __global data_t* p, long_t i) {
  Channels all;
  for (int v = 0; v < V; ++v) all.of[v] = LOAD(p, i + v);
  return all;
}
WITHIN_KERNEL Channels filled_channels(acc_t value) {
  Channels all;
  for (int v = 0; v < V; ++v) all.of[v] = value;
  return all;
}
#define CHANNELS(p, i) channels_at(p, i)
#define UNPACK_CHANNELS(to, from) { for (int v_ = 0; v_ < V; ++v_) (to)[v_] = (from).of[v_]; }
#define STORE_CHANNELS(p, i, from) { for (int v_ = 0; v_ < V; ++v_) STORE(p, (i) + v_, (from)[v_]); }
#else
#if DTYPE < 32 && V > 1
#define WIDE 2  // 16-bit numbers stay paired in words until they are used: the compiler would give each of the two a register when they arrive
typedef unsigned unit_t;
#define UNPACK(to, i, unit) { const float2 pair_ = PAIR_TO_FLOATS(*(const PAIR*)&(unit)); (to)[2 * (i)] = pair_.x; (to)[2 * (i) + 1] = pair_.y; }
#define PACK(from, i) packed((from)[2 * (i)], (from)[2 * (i) + 1])
__device__ __forceinline__ unsigned packed(float low, float high) {
  const PAIR pair = FLOATS_TO_PAIR(low, high);
  return *(const unsigned*)&pair;
}
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
__device__ __forceinline__ Channels filled_channels(acc_t value) {
  const acc_t values[2] = {value, value};
  Channels all;
#pragma unroll
  for (int i = 0; i < V / WIDE; ++i) all.of[i] = PACK(values, 0);
  return all;
}
#define CHANNELS(p, i) (*(const Channels*)((p) + (i)))
#define UNPACK_CHANNELS(to, from) { _Pragma("unroll") for (int v_ = 0; v_ < V / WIDE; ++v_) UNPACK(to, v_, (from).of[v_]) }
#define STORE_CHANNELS(p, i, from)                                                   \
  {                                                                                  \
    Channels all_;                                                                   \
    _Pragma("unroll") for (int v_ = 0; v_ < V / WIDE; ++v_) all_.of[v_] = PACK(from, v_); \
    *(Channels*)((p) + (i)) = all_;                                                  \
  }
#endif
#define NO_CHANNELS filled_channels(0)
#define LOAD_CHANNELS(to, p, i)              \
  {                                          \
    const Channels all_ = CHANNELS(p, i);    \
    UNPACK_CHANNELS(to, all_)                \
  }
#define LOAD_COLUMNS(to, n, p, step, there)              \
  {                                                      \
    _Pragma("unroll") for (int j = 0; j < (n); ++j) {    \
      (to)[j] = NO_CHANNELS;                             \
      if (there) (to)[j] = CHANNELS(p, j * (step));      \
    }                                                    \
  }
#define STAGE_TAPS(taps, pitch, first, n)                                                                                   \
  for (int i = LID_0; i < R * S * (n); i += THREADS) {                                                                      \
    const int channel = i / (R * S), tap = i - channel * (R * S), to = arg.flip ? R * S - 1 - tap : tap;                    \
    (taps)[to * (pitch) + channel] = (first) + channel < k_all ? LOAD(w, (index_t)((first) + channel) * (R * S) + tap) : 0; \
  }
#define STORE_COLUMNS(y, at, n, sums, there)                                              \
  {                                                                                       \
    acc_t also[n][V];                                                                     \
    _Pragma("unroll") for (int j = 0; j < (n); ++j) {                                     \
      _Pragma("unroll") for (int v = 0; v < V; ++v) also[j][v] = NOTHING;                 \
      if (has_residual && (there)) LOAD_CHANNELS(also[j], residual, (at) + j * k_all)     \
      _Pragma("unroll") for (int v = 0; v < V; ++v) FINISH((sums)[j][v], times[v], plus[v], also[j][v]) \
      ACTIVATE((sums)[j], V)                                                              \
    }                                                                                     \
    _Pragma("unroll") for (int j = 0; j < (n); ++j)                                       \
      if (there) STORE_CHANNELS(y, (at) + j * k_all, (sums)[j])                           \
  }
