// wgmma.cuh: the warpgroup's matrix product, D[64 x N] (+)= A[64 x 16] B[N x 16]^T, for every N that is a multiple of 8.
//
// A and B are 16-bit and lie swizzled in shared memory; descriptors name them. D is fp32 and lies in the registers of 128 threads:
// d[4 * i + 2 * h + e] is row 16 * warp + lane / 4 + 8 * h, column 8 * i + 2 * (lane % 4) + e.
// The instruction names its registers one by one, so the text for N is that for N - 8 with four more.
//
// TF32 (float32) operands: A [64 x 8] is in registers, B [N x 8] is K-major in shared memory. a[0] and a[1] of a thread are rows lane / 4 and
// lane / 4 + 8 of column lane % 4; a[2] and a[3] are the same rows of column lane % 4 + 4. The product ignores the last 13 bits of each number.
// fp16 operands: A [64 x 16] may be in registers too, two neighbouring columns in each: 2 * (lane % 4) and the next, then those 8 columns further.
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

#define WGMMA_REGISTERS_8 "%0, %1, %2, %3"
#define WGMMA_REGISTERS_16 WGMMA_REGISTERS_8 ", " "%4, %5, %6, %7"
#define WGMMA_REGISTERS_24 WGMMA_REGISTERS_16 ", " "%8, %9, %10, %11"
#define WGMMA_REGISTERS_32 WGMMA_REGISTERS_24 ", " "%12, %13, %14, %15"
#define WGMMA_REGISTERS_40 WGMMA_REGISTERS_32 ", " "%16, %17, %18, %19"
#define WGMMA_REGISTERS_48 WGMMA_REGISTERS_40 ", " "%20, %21, %22, %23"
#define WGMMA_REGISTERS_56 WGMMA_REGISTERS_48 ", " "%24, %25, %26, %27"
#define WGMMA_REGISTERS_64 WGMMA_REGISTERS_56 ", " "%28, %29, %30, %31"
#define WGMMA_REGISTERS_72 WGMMA_REGISTERS_64 ", " "%32, %33, %34, %35"
#define WGMMA_REGISTERS_80 WGMMA_REGISTERS_72 ", " "%36, %37, %38, %39"
#define WGMMA_REGISTERS_88 WGMMA_REGISTERS_80 ", " "%40, %41, %42, %43"
#define WGMMA_REGISTERS_96 WGMMA_REGISTERS_88 ", " "%44, %45, %46, %47"
#define WGMMA_REGISTERS_104 WGMMA_REGISTERS_96 ", " "%48, %49, %50, %51"
#define WGMMA_REGISTERS_112 WGMMA_REGISTERS_104 ", " "%52, %53, %54, %55"
#define WGMMA_REGISTERS_120 WGMMA_REGISTERS_112 ", " "%56, %57, %58, %59"
#define WGMMA_REGISTERS_128 WGMMA_REGISTERS_120 ", " "%60, %61, %62, %63"
#define WGMMA_REGISTERS_136 WGMMA_REGISTERS_128 ", " "%64, %65, %66, %67"
#define WGMMA_REGISTERS_144 WGMMA_REGISTERS_136 ", " "%68, %69, %70, %71"
#define WGMMA_REGISTERS_152 WGMMA_REGISTERS_144 ", " "%72, %73, %74, %75"
#define WGMMA_REGISTERS_160 WGMMA_REGISTERS_152 ", " "%76, %77, %78, %79"
#define WGMMA_REGISTERS_168 WGMMA_REGISTERS_160 ", " "%80, %81, %82, %83"
#define WGMMA_REGISTERS_176 WGMMA_REGISTERS_168 ", " "%84, %85, %86, %87"
#define WGMMA_REGISTERS_184 WGMMA_REGISTERS_176 ", " "%88, %89, %90, %91"
#define WGMMA_REGISTERS_192 WGMMA_REGISTERS_184 ", " "%92, %93, %94, %95"
#define WGMMA_REGISTERS_200 WGMMA_REGISTERS_192 ", " "%96, %97, %98, %99"
#define WGMMA_REGISTERS_208 WGMMA_REGISTERS_200 ", " "%100, %101, %102, %103"
#define WGMMA_REGISTERS_216 WGMMA_REGISTERS_208 ", " "%104, %105, %106, %107"
#define WGMMA_REGISTERS_224 WGMMA_REGISTERS_216 ", " "%108, %109, %110, %111"
#define WGMMA_REGISTERS_232 WGMMA_REGISTERS_224 ", " "%112, %113, %114, %115"
#define WGMMA_REGISTERS_240 WGMMA_REGISTERS_232 ", " "%116, %117, %118, %119"
#define WGMMA_REGISTERS_248 WGMMA_REGISTERS_240 ", " "%120, %121, %122, %123"
#define WGMMA_REGISTERS_256 WGMMA_REGISTERS_248 ", " "%124, %125, %126, %127"
#define WGMMA_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_SUMS_16 WGMMA_SUMS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_SUMS_24 WGMMA_SUMS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_SUMS_32 WGMMA_SUMS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_SUMS_40 WGMMA_SUMS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_SUMS_48 WGMMA_SUMS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_SUMS_56 WGMMA_SUMS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_SUMS_64 WGMMA_SUMS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_SUMS_72 WGMMA_SUMS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_SUMS_80 WGMMA_SUMS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_SUMS_88 WGMMA_SUMS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_SUMS_96 WGMMA_SUMS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_SUMS_104 WGMMA_SUMS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_SUMS_112 WGMMA_SUMS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_SUMS_120 WGMMA_SUMS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_SUMS_128 WGMMA_SUMS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_SUMS_136 WGMMA_SUMS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_SUMS_144 WGMMA_SUMS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WGMMA_SUMS_152 WGMMA_SUMS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WGMMA_SUMS_160 WGMMA_SUMS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WGMMA_SUMS_168 WGMMA_SUMS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define WGMMA_SUMS_176 WGMMA_SUMS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define WGMMA_SUMS_184 WGMMA_SUMS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WGMMA_SUMS_192 WGMMA_SUMS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WGMMA_SUMS_200 WGMMA_SUMS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define WGMMA_SUMS_208 WGMMA_SUMS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define WGMMA_SUMS_216 WGMMA_SUMS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define WGMMA_SUMS_224 WGMMA_SUMS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define WGMMA_SUMS_232 WGMMA_SUMS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define WGMMA_SUMS_240 WGMMA_SUMS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define WGMMA_SUMS_248 WGMMA_SUMS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define WGMMA_SUMS_256 WGMMA_SUMS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define WGMMA_INPUTS_8 "%4", "%5", "%6", "%7", "%8"
#define WGMMA_INPUTS_16 "%8", "%9", "%10", "%11", "%12"
#define WGMMA_INPUTS_24 "%12", "%13", "%14", "%15", "%16"
#define WGMMA_INPUTS_32 "%16", "%17", "%18", "%19", "%20"
#define WGMMA_INPUTS_40 "%20", "%21", "%22", "%23", "%24"
#define WGMMA_INPUTS_48 "%24", "%25", "%26", "%27", "%28"
#define WGMMA_INPUTS_56 "%28", "%29", "%30", "%31", "%32"
#define WGMMA_INPUTS_64 "%32", "%33", "%34", "%35", "%36"
#define WGMMA_INPUTS_72 "%36", "%37", "%38", "%39", "%40"
#define WGMMA_INPUTS_80 "%40", "%41", "%42", "%43", "%44"
#define WGMMA_INPUTS_88 "%44", "%45", "%46", "%47", "%48"
#define WGMMA_INPUTS_96 "%48", "%49", "%50", "%51", "%52"
#define WGMMA_INPUTS_104 "%52", "%53", "%54", "%55", "%56"
#define WGMMA_INPUTS_112 "%56", "%57", "%58", "%59", "%60"
#define WGMMA_INPUTS_120 "%60", "%61", "%62", "%63", "%64"
#define WGMMA_INPUTS_128 "%64", "%65", "%66", "%67", "%68"
#define WGMMA_INPUTS_136 "%68", "%69", "%70", "%71", "%72"
#define WGMMA_INPUTS_144 "%72", "%73", "%74", "%75", "%76"
#define WGMMA_INPUTS_152 "%76", "%77", "%78", "%79", "%80"
#define WGMMA_INPUTS_160 "%80", "%81", "%82", "%83", "%84"
#define WGMMA_INPUTS_168 "%84", "%85", "%86", "%87", "%88"
#define WGMMA_INPUTS_176 "%88", "%89", "%90", "%91", "%92"
#define WGMMA_INPUTS_184 "%92", "%93", "%94", "%95", "%96"
#define WGMMA_INPUTS_192 "%96", "%97", "%98", "%99", "%100"
#define WGMMA_INPUTS_200 "%100", "%101", "%102", "%103", "%104"
#define WGMMA_INPUTS_208 "%104", "%105", "%106", "%107", "%108"
#define WGMMA_INPUTS_216 "%108", "%109", "%110", "%111", "%112"
#define WGMMA_INPUTS_224 "%112", "%113", "%114", "%115", "%116"
#define WGMMA_INPUTS_232 "%116", "%117", "%118", "%119", "%120"
#define WGMMA_INPUTS_240 "%120", "%121", "%122", "%123", "%124"
#define WGMMA_INPUTS_248 "%124", "%125", "%126", "%127", "%128"
#define WGMMA_INPUTS_256 "%128", "%129", "%130", "%131", "%132"

#ifdef WGMMA_N
// wgmma<type, mn_major_a, mn_major_b>(d, a, b, accumulate) for N = WGMMA_N, which is defined before this is included. The type is a code of element<>:
// 16 half, 17 bfloat16, 32 TF32. An operand has rows along k or, MN-major, along m or n; those of TF32 always along k.
#define WGMMA_TEXT(N, K, TYPE, MAJORS) WGMMA_TEXT_(N, K, TYPE, MAJORS, WGMMA_REGISTERS_##N, WGMMA_INPUTS_##N)
#define WGMMA_TEXT_(...) WGMMA_TEXT_OF(__VA_ARGS__)
#define WGMMA_TEXT_OF(N, K, TYPE, MAJORS, D, A, B, ACCUMULATE, MAJOR_A, MAJOR_B)                                                                    \
  "{.reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE " {" D "}, " A ", " B        \
  ", p, 1, 1" MAJORS(MAJOR_A, MAJOR_B) ";}"
#define WGMMA_MAJORS(a, b) ", " a ", " b
#define WGMMA_NO_MAJORS(a, b)
#define WGMMA_ISSUE(N, K, TYPE, MAJORS) WGMMA_ISSUE_(N, K, TYPE, MAJORS)
#define WGMMA_ISSUE_(N, K, TYPE, MAJORS) \
  asm volatile(WGMMA_TEXT(N, K, TYPE, MAJORS) : WGMMA_SUMS_##N : "l"(a), "l"(b), "r"(accumulate), "n"(mn_major_a), "n"(mn_major_b))
template <int type, int mn_major_a, int mn_major_b> DEVICE void wgmma(float (&d)[WGMMA_N / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(type != 32 || !(mn_major_a || mn_major_b), "TF32 along k alone");
  if constexpr (type == 32) WGMMA_ISSUE(WGMMA_N, 8, "tf32", WGMMA_NO_MAJORS);
  else if constexpr (type == 17) WGMMA_ISSUE(WGMMA_N, 16, "bf16", WGMMA_MAJORS);
  else WGMMA_ISSUE(WGMMA_N, 16, "f16", WGMMA_MAJORS);
}
#endif

// wgmma_tf32(d, a, b, accumulate) and wgmma_f16; the length of d gives N. A is in registers, B is K-major
#define WGMMA_OF_REGISTERS(N, K, TYPE, MORE, A0, A1, A2, A3, B_AT, P_AT)                                                                        \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P_AT ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE                 \
               " {" WGMMA_REGISTERS_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B_AT ", p, 1, 1" MORE ";}"                            \
               : WGMMA_SUMS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define WGMMA_OF_REGISTERS_(K, TYPE, MORE)                                                          \
  if constexpr (count == 16) WGMMA_OF_REGISTERS(32, K, TYPE, MORE, 16, 17, 18, 19, 20, 21);         \
  if constexpr (count == 32) WGMMA_OF_REGISTERS(64, K, TYPE, MORE, 32, 33, 34, 35, 36, 37);         \
  if constexpr (count == 48) WGMMA_OF_REGISTERS(96, K, TYPE, MORE, 48, 49, 50, 51, 52, 53);         \
  if constexpr (count == 64) WGMMA_OF_REGISTERS(128, K, TYPE, MORE, 64, 65, 66, 67, 68, 69);
template <int count> DEVICE void wgmma_tf32(float (&d)[count], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  WGMMA_OF_REGISTERS_(8, "tf32", "")
}
template <int count> DEVICE void wgmma_f16(float (&d)[count], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  WGMMA_OF_REGISTERS_(16, "f16", ", 0")
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
