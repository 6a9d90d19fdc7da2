// fragments.cuh: products of a warp's fragments on the tensor cores, from Ampere on.
#pragma once
#include "core/packed.cuh"

DEVICE uint4 load_vector(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// Four matrices of 8 rows x 16 bytes; lane l names row l % 8 of matrix l / 8 and gets 4 bytes, number l % 4, of row l / 4 of each
DEVICE void load_matrices(uint32_t (&v)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from) : "memory");
}

// d += a * b, with 32 bytes of k: a has 16 rows, b 8 columns. d[0], d[1] are row lane / 4, columns 2 * (lane % 4) and the next; d[2], d[3] are 8 rows
// below. a[0]: bytes 4 * (lane % 4) of row lane / 4; a[1]: 8 rows below; a[2], a[3]: 16 bytes further. b0, b1: the same of column lane / 4.
#define MMA_SYNC(SHAPE_AND_TYPES)                                                                                        \
  asm("mma.sync.aligned." SHAPE_AND_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"             \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
template <class T> DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> DEVICE void multiply<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MMA_SYNC("m16n8k16.row.col.f32.f16.f16.f32")
}
template <> DEVICE void multiply<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MMA_SYNC("m16n8k16.row.col.f32.bf16.bf16.f32")
}
// of TF32, whose lower 13 bits count for nothing
template <> DEVICE void multiply<float>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MMA_SYNC("m16n8k8.row.col.f32.tf32.tf32.f32")
}
