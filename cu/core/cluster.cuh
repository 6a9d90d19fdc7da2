// cluster.cuh: blocks of a cluster read one another's shared memory (Hopper). Those that share a tile, CLUSTER of them, each sum a part of its gemm k, and add
// these sums up together.
//
// Each block leaves its sums in its shared memory, as rows of `pitch` floats. Then each block adds some of the rows over all blocks, in their order.
// CLUSTER, a constant, is set before this is included.
#pragma once
#include "core/packed.cuh"

DEVICE int cluster_rank() { return CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER; }

// Of a kernel: its blocks are in clusters, if CLUSTER says so.
#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

#if CLUSTER > 1
DEVICE void cluster_barrier() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
// the same for a thread whose stores nobody reads: it waits for none of them
DEVICE void cluster_barrier_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// two words of block `rank`'s shared memory, at the same offset as `address` in one's own
DEVICE uint2 load_two_of_rank(uint32_t address, int rank) {
  uint2 v;
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(there) : "memory");
  return v;
}
DEVICE double double_of_rank(uint32_t address, int rank) {
  const uint2 v = load_two_of_rank(address, rank);
  return *(const double*)&v;
}
// four floats of block `rank`'s shared memory, at the same offset as `address` in one's own
DEVICE float4 load_of_rank(uint32_t address, int rank) {
  float4 v;
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there) : "memory");
  return v;
}
// the sums over all blocks of four floats
DEVICE float4 add_of_ranks(uint32_t address) {
  float4 part[CLUSTER];
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) part[rank] = load_of_rank(address, rank);
#pragma unroll
  for (int rank = 1; rank < CLUSTER; ++rank) {
    part[0].x += part[rank].x;
    part[0].y += part[rank].y;
    part[0].z += part[rank].z;
    part[0].w += part[rank].w;
  }
  return part[0];
}
#endif

// A warp that has no sums is there when the cluster's blocks have left theirs.
DEVICE void await_cluster_sums() {
#if CLUSTER > 1
  __syncwarp();
  cluster_barrier_relaxed();
#endif
}
// A kernel's last step: shared memory must outlive what other blocks read from it.
DEVICE void cluster_sync_at_exit() {
#if CLUSTER > 1
  cluster_barrier_relaxed();
#endif
}
