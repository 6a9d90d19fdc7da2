// device.h: what the text of a kernel needs of CUDA, for g++. Before each kernel; what it declares is in machine.cpp.
#pragma once

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("simt_shared")))
#define __CUDA_ARCH__ 900

typedef unsigned long size_t;
struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;  // of the thread that runs

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

extern "C" {
float fmaf(float, float, float) noexcept;
double fma(double, double, double) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fabsf(float) noexcept;
float sqrtf(float) noexcept;
float ldexpf(float, int) noexcept;
float exp2f(float) noexcept;
double exp(double) noexcept;
float cosf(float) noexcept;
float sinf(float) noexcept;
double erf(double) noexcept;
double fabs(double) noexcept;
double sqrt(double) noexcept;
void* memcpy(void*, const void*, unsigned long) noexcept;
int abs(int) noexcept;
}
template <class A, class B> constexpr auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B> constexpr auto max(A a, B b) { return a < b ? b : a; }

template <class To, class From> To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return __builtin_expf(v); }
inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline double rsqrt(double v) { return 1 / __builtin_sqrt(v); }
inline float exp(float v) { return __builtin_expf(v); }
inline float erf(float v) { return __builtin_erff(v); }
inline float fabs(float v) { return __builtin_fabsf(v); }
inline float sqrt(float v) { return __builtin_sqrtf(v); }
inline float rint(float v) { return __builtin_rintf(v); }
inline double __longlong_as_double(long long v) { return bits_as<double>(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return max(max(a, b), c); }
inline unsigned __viaddmin_u32(unsigned a, unsigned b, unsigned c) { return min(a + b, c); }
inline unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned c) {
  unsigned low = min((a + b) & 0xffffu, c & 0xffffu), high = min(((a >> 16) + (b >> 16)) & 0xffffu, c >> 16);
  return low | high << 16;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned v = 0;
  for (int i = 0; i < 4; ++i) v |= (unsigned)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return v;
}
template <class T> T __ldg(const T* at) { return *at; }
template <class T> T __ldcs(const T* at) { return *at; }
template <class T> T __ldcg(const T* at) { return *at; }
template <class T, class V> T atomicAdd(T* at, V v) {
  const T old = *at;
  *at = old + (T)v;
  return old;
}
template <class T, class V> T atomicOr(T* at, V v) {
  const T old = *at;
  *at = old | (T)v;
  return old;
}
template <class T> T atomicCAS(T* at, T expected, T v) {
  const T old = *at;
  if (old == expected) *at = v;
  return old;
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
  const unsigned old = *at;
  *at = old >= most ? 0 : old + 1;
  return old;
}
inline void __threadfence() {}
template <class T, class V> T atomicMax(T* at, V v) {
  const T old = *at;
  if (old < (T)v) *at = (T)v;
  return old;
}

// ---- the warp and the block

namespace simt {
unsigned long long exchange(unsigned mask, unsigned long long mine, int from, const char* what);  // what lane `from` brings
void meet(unsigned mask, const char* what);
unsigned long long gathered(int lane);  // what `lane` brought to the last exchange
int block_sum(int v);                   // of all threads, at a barrier
[[noreturn]] void fail(const char* what, ...);
extern char* dynamic;                   // shared memory of the block that runs
unsigned shared_address(const void* p);
template <class T> unsigned long long packed(T v) {
  static_assert(sizeof(T) <= 8, "a register or two");
  unsigned long long bits = 0;
  memcpy(&bits, &v, sizeof v);
  return bits;
}
template <class T> T unpacked(unsigned long long bits) {
  T v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
inline int lane() { return threadIdx.x % 32; }
}  // namespace simt
inline void __nanosleep(unsigned) { simt::fail("a block waits for blocks that come later"); }

namespace ptx {
void bar_sync(int id, int threads);
}
inline void __syncthreads() { ptx::bar_sync(0, (int)blockDim.x); }
inline int __syncthreads_or(int v) { return simt::block_sum(v != 0) != 0; }
inline int __syncthreads_and(int v) { return simt::block_sum(v == 0) == 0; }
inline int __syncthreads_count(int v) { return simt::block_sum(v != 0); }
inline void __syncwarp(unsigned mask = ~0u) { simt::meet(mask, "__syncwarp"); }
template <class T> T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  return simt::unpacked<T>(simt::exchange(mask, simt::packed(v), (simt::lane() & ~(width - 1)) | (from & (width - 1)), "__shfl_sync"));
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int lanes) {
  return simt::unpacked<T>(simt::exchange(mask, simt::packed(v), simt::lane() ^ lanes, "__shfl_xor_sync"));
}
template <class T> T __shfl_down_sync(unsigned mask, T v, int by) {
  const int from = simt::lane() + by;
  return simt::unpacked<T>(simt::exchange(mask, simt::packed(v), from < 32 ? from : simt::lane(), "__shfl_down_sync"));
}
template <class T> T __shfl_up_sync(unsigned mask, T v, int by) {
  const int from = simt::lane() - by;
  return simt::unpacked<T>(simt::exchange(mask, simt::packed(v), from < 0 ? simt::lane() : from, "__shfl_up_sync"));
}
template <class T, class F> T reduced(unsigned mask, T v, const char* what, const F& f) {
  simt::exchange(mask, simt::packed(v), simt::lane(), what);
  bool any = false;
  T all = v;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) {
      const T one = simt::unpacked<T>(simt::gathered(i));
      all = any ? f(all, one) : one;
      any = true;
    }
  return all;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  return reduced(mask, v, "__reduce_max_sync", [](unsigned a, unsigned b) { return max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  return reduced(mask, v, "__reduce_min_sync", [](unsigned a, unsigned b) { return min(a, b); });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
  return reduced(mask, v, "__reduce_add_sync", [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __ballot_sync(unsigned mask, int v) {
  return reduced(mask, (unsigned)(v != 0) << simt::lane(), "__ballot_sync", [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v) != 0; }
inline int __all_sync(unsigned mask, int v) { return __ballot_sync(mask, v) == mask; }
inline unsigned long long __cvta_generic_to_shared(const void* p) { return simt::shared_address(p); }
inline void __trap() { simt::fail("__trap()"); }

// ---- PTX, as ptx.py names it

namespace ptx {
typedef unsigned u32;
typedef unsigned long u64;
typedef unsigned short u16;

template <class T> u64 bits64(T* p) { return (u64)p; }
inline u64 bits64(u64 v) { return v; }
inline u64 bits64(unsigned long long v) { return v; }
inline u64 bits64(long long v) { return v; }
template <class T> void set_bits(T& to, u64 v) { memcpy(&to, &v, sizeof to); }

void mbarrier_init(u32 at, u32 count);
void mbarrier_init_fence();
void mbarrier_arrive(u32 at, u32 count, long bytes);  // and expects so many bytes
bool mbarrier_try_wait(u32 at, u32 parity);
void bar_arrive(int id, int threads);
void cluster_arrive();
void cluster_wait();
u32 map_rank(u32 address, u32 rank);

void bulk_load(u32 to, u64 from, u32 bytes, u32 barrier);
void bulk_store(u64 to, u32 from, u32 bytes);
struct Place {
  int count, at[5];
};
void tensor_load(u32 to, u64 map, Place place, u32 barrier);
void tensor_load_im2col(u32 to, u64 map, Place place, u32 barrier, Place offsets);
void tensor_store(u64 map, Place place, u32 from);
void bulk_commit();
void bulk_wait(int groups, bool only_read);
void async_fence();
void copy(u32 to, u64 from, int size, int read);
void copy_commit();
void copy_wait(int groups);
void check_map(u64 map);
void dependency_wait();
void reads_earlier();

void* shared(u32 address, u32 bytes, bool writes);  // of this block's or, by map_rank, of another's in the cluster
template <class T> T load_shared(u32 address, int i = 0) { return *(T*)shared(address + i * sizeof(T), sizeof(T), false); }
template <class T> void store_shared(u32 address, T v, int i = 0) { *(T*)shared(address + i * sizeof(T), sizeof(T), true) = v; }

enum Operand { F16, BF16, TF32 };
struct Product {
  int n, k;
  Operand type;
  u64 a, b;
  bool a_in_registers;
  u32 registers[4];
  bool accumulate, turned_a, turned_b;
};
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups);
void wgmma(float* const* sums, int count, const Product& product);

void load_matrices(u32* const* to, int count, u32 row, bool turned);
void store_matrices(u32 row, const u32* v, int count, bool turned);
void mma(float* const* d, const u32* a, const u32* b, Operand type);                       // m16n8k16, of TF32 m16n8k8
void mma_f64(double* const* d, int m, int k, const double* a, const double* b);  // m8n8k4, m16n8k16

float from_half(u16 v);
u16 to_half(float v);
inline float from_bfloat16(u16 v) { return __uint_as_float((u32)v << 16); }
inline u16 to_bfloat16(float v) {
  const u32 bits = __float_as_uint(v);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 to_tf32(float v) {
  const u32 bits = __float_as_uint(v);
  return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & 0xffffe000;
}
// halves to even
inline u32 to_tf32_even(float v) {
  const u32 bits = bits_as<u32>(v);
  return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000;
}
// the smaller magnitude, negative if one of both is; NaN if one is
inline float least_magnitude(float a, float b) {
  const u32 x = bits_as<u32>(a), y = bits_as<u32>(b), sizes[2] = {x & 0x7fffffff, y & 0x7fffffff};
  if (sizes[0] > 0x7f800000 || sizes[1] > 0x7f800000) return bits_as<float>(0x7fffffffu);
  return bits_as<float>((sizes[0] < sizes[1] ? sizes[0] : sizes[1]) | ((x ^ y) & 0x80000000));
}
}  // namespace ptx

// ---- the kernel, as machine.cpp takes it

namespace simt {
struct Kernel {
  void (*call)(const char* parameters);
  unsigned long bytes;  // of the parameters
  int cluster;
  unsigned align;  // of dynamic shared memory
  bool in_order;  // some blocks wait for others, which come before them
  char *shared_begin, *shared_end;
};
constexpr unsigned long after(unsigned long at, unsigned long align) { return (at + align - 1) / align * align; }
template <class... A> struct Parameters;
template <> struct Parameters<> {
  static constexpr unsigned long bytes(unsigned long at) { return at; }
  template <class F, class... Before> static void call(F kernel, const char*, unsigned long, Before&... before) { kernel(before...); }
};
template <class First, class... Rest> struct Parameters<First, Rest...> {
  static constexpr unsigned long bytes(unsigned long at) { return Parameters<Rest...>::bytes(after(at, alignof(First)) + sizeof(First)); }
  template <class F, class... Before> static void call(F kernel, const char* all, unsigned long at, Before&... before) {
    First one;
    at = after(at, alignof(First));
    memcpy((void*)&one, all + at, sizeof one);
    Parameters<Rest...>::call(kernel, all, at + sizeof one, before..., one);
  }
};
template <class... A> constexpr unsigned long bytes_of(void (*)(A...)) { return Parameters<A...>::bytes(0); }
template <class... A> void call(void (*kernel)(A...), const char* parameters) { Parameters<A...>::call(kernel, parameters, 0); }
}  // namespace simt
extern "C" char __start_simt_shared[] __attribute__((weak, visibility("hidden"))), __stop_simt_shared[] __attribute__((weak, visibility("hidden")));
