// wgmma.cuh: the warpgroup's matrix product, D[64 x N] (+)= A[64 x 16] B[N x 16]^T, for every N that is a multiple of 8.
//
// A and B are 16-bit and lie swizzled in shared memory; descriptors name them. D is fp32 and lies in the registers of 128 threads:
// d[4 * i + 2 * h + e] is row 16 * warp + lane / 4 + 8 * h, column 8 * i + 2 * (lane % 4) + e.
// The instruction names its registers one by one, so the text for N is that for N - 8 with four more.
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
template <class Sums> DEVICE void wgmma_arrived(Sums& d) {
  each(d, [](float& one) { asm volatile("" : "+f"(one)::"memory"); });
}

// The table of N: FIRST and MORE take the number of four registers of sums and their names, LAST the names of the six operands behind all of them.
#define WGMMA_NO(...)
#define WGMMA_8(FIRST, MORE, LAST) FIRST(0, "%0, %1, %2, %3") LAST("%4", "%5", "%6", "%7", "%8", "%9")
#define WGMMA_16(FIRST, MORE, LAST) WGMMA_8(FIRST, MORE, WGMMA_NO) MORE(4, "%4, %5, %6, %7") LAST("%8", "%9", "%10", "%11", "%12", "%13")
#define WGMMA_24(FIRST, MORE, LAST) WGMMA_16(FIRST, MORE, WGMMA_NO) MORE(8, "%8, %9, %10, %11") LAST("%12", "%13", "%14", "%15", "%16", "%17")
#define WGMMA_32(FIRST, MORE, LAST) WGMMA_24(FIRST, MORE, WGMMA_NO) MORE(12, "%12, %13, %14, %15") LAST("%16", "%17", "%18", "%19", "%20", "%21")
#define WGMMA_40(FIRST, MORE, LAST) WGMMA_32(FIRST, MORE, WGMMA_NO) MORE(16, "%16, %17, %18, %19") LAST("%20", "%21", "%22", "%23", "%24", "%25")
#define WGMMA_48(FIRST, MORE, LAST) WGMMA_40(FIRST, MORE, WGMMA_NO) MORE(20, "%20, %21, %22, %23") LAST("%24", "%25", "%26", "%27", "%28", "%29")
#define WGMMA_56(FIRST, MORE, LAST) WGMMA_48(FIRST, MORE, WGMMA_NO) MORE(24, "%24, %25, %26, %27") LAST("%28", "%29", "%30", "%31", "%32", "%33")
#define WGMMA_64(FIRST, MORE, LAST) WGMMA_56(FIRST, MORE, WGMMA_NO) MORE(28, "%28, %29, %30, %31") LAST("%32", "%33", "%34", "%35", "%36", "%37")
#define WGMMA_72(FIRST, MORE, LAST) WGMMA_64(FIRST, MORE, WGMMA_NO) MORE(32, "%32, %33, %34, %35") LAST("%36", "%37", "%38", "%39", "%40", "%41")
#define WGMMA_80(FIRST, MORE, LAST) WGMMA_72(FIRST, MORE, WGMMA_NO) MORE(36, "%36, %37, %38, %39") LAST("%40", "%41", "%42", "%43", "%44", "%45")
#define WGMMA_88(FIRST, MORE, LAST) WGMMA_80(FIRST, MORE, WGMMA_NO) MORE(40, "%40, %41, %42, %43") LAST("%44", "%45", "%46", "%47", "%48", "%49")
#define WGMMA_96(FIRST, MORE, LAST) WGMMA_88(FIRST, MORE, WGMMA_NO) MORE(44, "%44, %45, %46, %47") LAST("%48", "%49", "%50", "%51", "%52", "%53")
#define WGMMA_104(FIRST, MORE, LAST) WGMMA_96(FIRST, MORE, WGMMA_NO) MORE(48, "%48, %49, %50, %51") LAST("%52", "%53", "%54", "%55", "%56", "%57")
#define WGMMA_112(FIRST, MORE, LAST) WGMMA_104(FIRST, MORE, WGMMA_NO) MORE(52, "%52, %53, %54, %55") LAST("%56", "%57", "%58", "%59", "%60", "%61")
#define WGMMA_120(FIRST, MORE, LAST) WGMMA_112(FIRST, MORE, WGMMA_NO) MORE(56, "%56, %57, %58, %59") LAST("%60", "%61", "%62", "%63", "%64", "%65")
#define WGMMA_128(FIRST, MORE, LAST) WGMMA_120(FIRST, MORE, WGMMA_NO) MORE(60, "%60, %61, %62, %63") LAST("%64", "%65", "%66", "%67", "%68", "%69")
#define WGMMA_136(FIRST, MORE, LAST) WGMMA_128(FIRST, MORE, WGMMA_NO) MORE(64, "%64, %65, %66, %67") LAST("%68", "%69", "%70", "%71", "%72", "%73")
#define WGMMA_144(FIRST, MORE, LAST) WGMMA_136(FIRST, MORE, WGMMA_NO) MORE(68, "%68, %69, %70, %71") LAST("%72", "%73", "%74", "%75", "%76", "%77")
#define WGMMA_152(FIRST, MORE, LAST) WGMMA_144(FIRST, MORE, WGMMA_NO) MORE(72, "%72, %73, %74, %75") LAST("%76", "%77", "%78", "%79", "%80", "%81")
#define WGMMA_160(FIRST, MORE, LAST) WGMMA_152(FIRST, MORE, WGMMA_NO) MORE(76, "%76, %77, %78, %79") LAST("%80", "%81", "%82", "%83", "%84", "%85")
#define WGMMA_168(FIRST, MORE, LAST) WGMMA_160(FIRST, MORE, WGMMA_NO) MORE(80, "%80, %81, %82, %83") LAST("%84", "%85", "%86", "%87", "%88", "%89")
#define WGMMA_176(FIRST, MORE, LAST) WGMMA_168(FIRST, MORE, WGMMA_NO) MORE(84, "%84, %85, %86, %87") LAST("%88", "%89", "%90", "%91", "%92", "%93")
#define WGMMA_184(FIRST, MORE, LAST) WGMMA_176(FIRST, MORE, WGMMA_NO) MORE(88, "%88, %89, %90, %91") LAST("%92", "%93", "%94", "%95", "%96", "%97")
#define WGMMA_192(FIRST, MORE, LAST) WGMMA_184(FIRST, MORE, WGMMA_NO) MORE(92, "%92, %93, %94, %95") LAST("%96", "%97", "%98", "%99", "%100", "%101")
#define WGMMA_200(FIRST, MORE, LAST) WGMMA_192(FIRST, MORE, WGMMA_NO) MORE(96, "%96, %97, %98, %99") LAST("%100", "%101", "%102", "%103", "%104", "%105")
#define WGMMA_208(FIRST, MORE, LAST) WGMMA_200(FIRST, MORE, WGMMA_NO) MORE(100, "%100, %101, %102, %103") LAST("%104", "%105", "%106", "%107", "%108", "%109")
#define WGMMA_216(FIRST, MORE, LAST) WGMMA_208(FIRST, MORE, WGMMA_NO) MORE(104, "%104, %105, %106, %107") LAST("%108", "%109", "%110", "%111", "%112", "%113")
#define WGMMA_224(FIRST, MORE, LAST) WGMMA_216(FIRST, MORE, WGMMA_NO) MORE(108, "%108, %109, %110, %111") LAST("%112", "%113", "%114", "%115", "%116", "%117")
#define WGMMA_232(FIRST, MORE, LAST) WGMMA_224(FIRST, MORE, WGMMA_NO) MORE(112, "%112, %113, %114, %115") LAST("%116", "%117", "%118", "%119", "%120", "%121")
#define WGMMA_240(FIRST, MORE, LAST) WGMMA_232(FIRST, MORE, WGMMA_NO) MORE(116, "%116, %117, %118, %119") LAST("%120", "%121", "%122", "%123", "%124", "%125")
#define WGMMA_248(FIRST, MORE, LAST) WGMMA_240(FIRST, MORE, WGMMA_NO) MORE(120, "%120, %121, %122, %123") LAST("%124", "%125", "%126", "%127", "%128", "%129")
#define WGMMA_256(FIRST, MORE, LAST) WGMMA_248(FIRST, MORE, WGMMA_NO) MORE(124, "%124, %125, %126, %127") LAST("%128", "%129", "%130", "%131", "%132", "%133")
#define WGMMA_NAMES(i, names) names
#define WGMMA_MORE_NAMES(i, names) ", " names
#define WGMMA_SUMS(i, names) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_MORE_SUMS(i, names) , WGMMA_SUMS(i, names)

// The operands behind the sums, of 16-bit types, of TF32, and with A in registers; and which of them says whether the sums go on.
#define WGMMA_16_BITS(A, B, accumulate, MAJOR_A, MAJOR_B, ...) "}, " A ", " B ", p, 1, 1, " MAJOR_A ", " MAJOR_B ";}"
#define WGMMA_TF32(A, B, ...) "}, " A ", " B ", p, 1, 1;}"
#define WGMMA_THIRD(A, B, accumulate, ...) accumulate
#define WGMMA_A_IN_REGISTERS(A0, A1, A2, A3, B, accumulate) "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1;}"
#define WGMMA_SIXTH(A0, A1, A2, A3, B, accumulate) accumulate
#define WGMMA_ISSUE(...) WGMMA_ISSUE_(__VA_ARGS__)
#define WGMMA_ISSUE_(N, K, TYPE, CONDITION, OPERANDS, ...)                                                                                \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " WGMMA_##N(WGMMA_NO, WGMMA_NO, CONDITION) ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k" #K \
               ".f32." TYPE "." TYPE " {" WGMMA_##N(WGMMA_NAMES, WGMMA_MORE_NAMES, OPERANDS)                                             \
               : WGMMA_##N(WGMMA_SUMS, WGMMA_MORE_SUMS, WGMMA_NO) : __VA_ARGS__)

#ifdef WGMMA_N
// wgmma<type, mn_major_a, mn_major_b>(d, a, b, accumulate) for N = WGMMA_N, which is defined before this is included. The type is a code of element<>:
// 16 half, 17 bfloat16, 32 TF32. An operand has rows along k or, MN-major, along m or n; those of TF32 always along k.
template <int type, int mn_major_a, int mn_major_b> DEVICE void wgmma(float (&d)[WGMMA_N / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(type != 32 || !(mn_major_a || mn_major_b), "TF32 along k alone");
  if constexpr (type == 32) WGMMA_ISSUE(WGMMA_N, 8, "tf32", WGMMA_THIRD, WGMMA_TF32, "l"(a), "l"(b), "r"(accumulate));
  else if constexpr (type == 17) WGMMA_ISSUE(WGMMA_N, 16, "bf16", WGMMA_THIRD, WGMMA_16_BITS, "l"(a), "l"(b), "r"(accumulate), "n"(mn_major_a), "n"(mn_major_b));
  else WGMMA_ISSUE(WGMMA_N, 16, "f16", WGMMA_THIRD, WGMMA_16_BITS, "l"(a), "l"(b), "r"(accumulate), "n"(mn_major_a), "n"(mn_major_b));
}

// How an operand lies in a stage, rows of `span` bytes: what describes it, and how far the next step of k is, in 16 bytes.
template <bool mn_major, int span = 128> struct StageOperand {
  static constexpr int MN_MAJOR = mn_major, STEP = mn_major ? span : 2;
  static DEVICE uint64_t descriptor(uint32_t address) { return mn_major ? wgmma_mn_major_descriptor<span>(address) : wgmma_descriptor<span>(address); }
};

// Issues the products of a stage's `steps` steps of k; `fresh` begins new sums. Each 64 rows of A lie `apart` bytes behind those before.
template <int type, class A, class B, int steps = 4, int rows>
DEVICE void multiply_stage(float (&sums)[rows][WGMMA_N / 2], uint32_t a, int apart, uint32_t b, bool fresh) {
  const uint64_t of_a = A::descriptor(a), of_b = B::descriptor(b);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < steps; ++k)
#pragma unroll
    for (int i = 0; i < rows; ++i)
      wgmma<type, A::MN_MAJOR, B::MN_MAJOR>(sums[i], of_a + i * apart / 16 + A::STEP * k, of_b + B::STEP * k, !(fresh && k == 0));
}
#endif

// The same in TF32 with A in registers and B K-major; the length of d gives N.
#define WGMMA_TF32_ISSUE(N) \
  if constexpr (count == N / 2) \
    WGMMA_ISSUE(N, 8, "tf32", WGMMA_SIXTH, WGMMA_A_IN_REGISTERS, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
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
