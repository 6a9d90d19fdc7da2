// async_copy.cuh: copies from global to shared memory that a thread starts and does not wait for (cp.async), from Ampere on.
//
// A thread commits the copies that it has started as a group, and later waits until its groups have arrived. Other threads see what has
// arrived after a barrier behind that.
#pragma once
#include "core/packed.cuh"

// Copies `bytes` bytes, or, unless they are `there`, writes zeros: then nothing is read, wherever `from` points. 16 bytes bypass the L1 cache.
template <int bytes> DEVICE void copy_or_zero(uint32_t to, const void* from, bool there) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "a copy has 4, 8 or 16 bytes");
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
  else if constexpr (bytes == 8)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}
// The same for 16 bytes. The L2 cache fetches their whole line of 128 bytes.
DEVICE void copy_or_zero_by_lines(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last `groups` groups of this thread have arrived.
template <int groups> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory"); }
