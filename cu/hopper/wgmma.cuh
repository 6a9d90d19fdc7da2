// wgmma.cuh: the warpgroup's matrix product, D[64 x N] (+)= A[64 x 16] B[N x 16]^T, for the N in the tables below.
//
// A and B are 16-bit and lie swizzled in shared memory; descriptors name them. D is fp32 and lies in the registers of 128 threads:
// d[4 * i + 2 * h + e] is row 16 * warp + lane / 4 + 8 * h, column 8 * i + 2 * (lane % 4) + e.
// The instruction names its registers one by one, so the text for N is that for a smaller N with more.
//
// TF32 (float32) operands: A [64 x 8] is in registers, B [N x 8] is K-major in shared memory. a[0] and a[1] of a thread are rows lane / 4 and
// lane / 4 + 8 of column lane % 4; a[2] and a[3] are the same rows of column lane % 4 + 4. The product ignores the last 13 bits of each number.
#pragma once
#include "hopper/ptx.cuh"

// The descriptor of a K-major tile of rows of `span` bytes (128, 64 or 32), swizzled over that span; `rows8` bytes lie between 8 rows and the
// next 8. The address is in bytes. The swizzle follows absolute addresses, so a tile may begin at any row.
template <int span> DEVICE uint64_t wgmma_descriptor(uint32_t address, uint32_t rows8 = 8 * span) {
  constexpr uint64_t mode = span == 128 ? 1 : span == 64 ? 2 : 3;
  return mode << 62 | (uint64_t)(rows8 / 16) << 32 | 1ull << 16 | (address & 0x3ffff) >> 4;
}

// The descriptor of an MN-major tile: each k has a row of `span` bytes (128 or 64) of neighbours along m or n, swizzled over the row, in blocks of 64
// rows.
template <int span = 128> DEVICE uint64_t wgmma_mn_major_descriptor(uint32_t address) {
  return (span == 128 ? 1ull : 2ull) << 62 | 8ull * span / 16 << 32 | 64ull * span / 16 << 16 | (address & 0x3ffff) >> 4;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int groups> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory"); }
// the sums are in registers from here on: keeps the compiler from moving their use before the wait
template <int count> DEVICE void wgmma_arrived(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// By N: the names of the registers of the sums, these registers, and the names of the six operands behind them. Another N takes a line of each.
#define WGMMA_NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_48 WGMMA_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_64 WGMMA_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %32, %33, %34, %35"
#define WGMMA_NAMES_96 WGMMA_NAMES_72 ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_128 WGMMA_NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_160 WGMMA_NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_192 WGMMA_NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_224 WGMMA_NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_256 WGMMA_NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_SUMS_32 WGMMA_4(0), WGMMA_4(4), WGMMA_4(8), WGMMA_4(12)
#define WGMMA_SUMS_48 WGMMA_SUMS_32, WGMMA_4(16), WGMMA_4(20)
#define WGMMA_SUMS_64 WGMMA_SUMS_48, WGMMA_4(24), WGMMA_4(28)
#define WGMMA_SUMS_72 WGMMA_SUMS_64, WGMMA_4(32)
#define WGMMA_SUMS_96 WGMMA_SUMS_72, WGMMA_4(36), WGMMA_4(40), WGMMA_4(44)
#define WGMMA_SUMS_128 WGMMA_SUMS_96, WGMMA_4(48), WGMMA_4(52), WGMMA_4(56), WGMMA_4(60)
#define WGMMA_SUMS_160 WGMMA_SUMS_128, WGMMA_4(64), WGMMA_4(68), WGMMA_4(72), WGMMA_4(76)
#define WGMMA_SUMS_192 WGMMA_SUMS_160, WGMMA_4(80), WGMMA_4(84), WGMMA_4(88), WGMMA_4(92)
#define WGMMA_SUMS_224 WGMMA_SUMS_192, WGMMA_4(96), WGMMA_4(100), WGMMA_4(104), WGMMA_4(108)
#define WGMMA_SUMS_256 WGMMA_SUMS_224, WGMMA_4(112), WGMMA_4(116), WGMMA_4(120), WGMMA_4(124)
#define WGMMA_INPUTS_32 "%16", "%17", "%18", "%19", "%20", "%21"
#define WGMMA_INPUTS_48 "%24", "%25", "%26", "%27", "%28", "%29"
#define WGMMA_INPUTS_64 "%32", "%33", "%34", "%35", "%36", "%37"
#define WGMMA_INPUTS_72 "%36", "%37", "%38", "%39", "%40", "%41"
#define WGMMA_INPUTS_96 "%48", "%49", "%50", "%51", "%52", "%53"
#define WGMMA_INPUTS_128 "%64", "%65", "%66", "%67", "%68", "%69"
#define WGMMA_INPUTS_160 "%80", "%81", "%82", "%83", "%84", "%85"
#define WGMMA_INPUTS_192 "%96", "%97", "%98", "%99", "%100", "%101"
#define WGMMA_INPUTS_224 "%112", "%113", "%114", "%115", "%116", "%117"
#define WGMMA_INPUTS_256 "%128", "%129", "%130", "%131", "%132", "%133"

// The instruction with its operands: of 16-bit types, of TF32, and with A in registers.
#define WGMMA_IF(condition, text) "{.reg .pred p; setp.ne.b32 p, " condition ", 0; " text ";}"
#define WGMMA_16_BITS(text, A, B, ACCUMULATE, MAJOR_A, MAJOR_B, ...) WGMMA_IF(ACCUMULATE, text A ", " B ", p, 1, 1, " MAJOR_A ", " MAJOR_B)
#define WGMMA_TF32(text, A, B, ACCUMULATE, ...) WGMMA_IF(ACCUMULATE, text A ", " B ", p, 1, 1")
#define WGMMA_A_IN_REGISTERS(text, A0, A1, A2, A3, B, ACCUMULATE) WGMMA_IF(ACCUMULATE, text "{" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1")
#define WGMMA_WITH(OPERANDS, ...) OPERANDS(__VA_ARGS__)
#define WGMMA_ISSUE(...) WGMMA_ISSUE_(__VA_ARGS__)
#define WGMMA_ISSUE_(N, K, TYPE, OPERANDS, ...)                                                                                                  \
  asm volatile(WGMMA_WITH(OPERANDS, "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE " {" WGMMA_NAMES_##N "}, ", WGMMA_INPUTS_##N) \
               : WGMMA_SUMS_##N : __VA_ARGS__)

#ifdef WGMMA_N
// wgmma<type, mn_major_a, mn_major_b>(d, a, b, accumulate) for N = WGMMA_N, which is defined before this is included. The type is a code of element<>:
// 16 half, 17 bfloat16, 32 TF32. An operand has rows along k or, MN-major, along m or n; those of TF32 always along k.
template <int type, int mn_major_a, int mn_major_b> DEVICE void wgmma(float (&d)[WGMMA_N / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(type != 32 || !(mn_major_a || mn_major_b), "TF32 along k alone");
  if constexpr (type == 32) WGMMA_ISSUE(WGMMA_N, 8, "tf32", WGMMA_TF32, "l"(a), "l"(b), "r"(accumulate));
  else if constexpr (type == 17) WGMMA_ISSUE(WGMMA_N, 16, "bf16", WGMMA_16_BITS, "l"(a), "l"(b), "r"(accumulate), "n"(mn_major_a), "n"(mn_major_b));
  else WGMMA_ISSUE(WGMMA_N, 16, "f16", WGMMA_16_BITS, "l"(a), "l"(b), "r"(accumulate), "n"(mn_major_a), "n"(mn_major_b));
}
#endif

// The same in TF32 with A in registers and B K-major; the length of d gives N.
#define WGMMA_TF32_ISSUE(N) \
  if constexpr (count == N / 2) WGMMA_ISSUE(N, 8, "tf32", WGMMA_A_IN_REGISTERS, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
template <int count> DEVICE void wgmma_tf32(float (&d)[count], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  WGMMA_TF32_ISSUE(32);
  WGMMA_TF32_ISSUE(64);
  WGMMA_TF32_ISSUE(96);
  WGMMA_TF32_ISSUE(128);
}

// Leaves the products of the block's consumer warpgroups in shared memory, as rows of `pitch` floats: 64 rows of each warpgroup, one behind the other.
template <int pitch, int count> DEVICE void stage_accumulators(const float (&sum)[count], float* sums) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < count / 4; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *(float2*)(sums + (row + 8 * half) * pitch + 8 * i + column) = make_float2(sum[4 * i + 2 * half], sum[4 * i + 2 * half + 1]);
}
