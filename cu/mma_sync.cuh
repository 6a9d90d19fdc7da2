// mma_sync.cuh: tensor cores that warps feed themselves, from Ampere on: copies to shared memory, and fragments.cuh.
#pragma once
#include "fragments.cuh"

// 16 bytes to shared memory, some time later: of `from`, or zeros
DEVICE void copy_or_zero(uint32_t to, const uint4* from, bool copy) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copy ? 16 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// until all but the last `groups` committed groups have arrived
template <int groups> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory"); }

// four matrices of 8 rows x 16 bytes; lane l names row l % 8 of matrix l / 8 and gets 4 bytes, number l % 4, of row l / 4 of each
DEVICE void load_matrices(uint32_t (&v)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from) : "memory");
}
