// ptx.cuh: the PTX of the Hopper kernels: barriers in shared memory, tensor (TMA) loads and stores, fences, registers.
#pragma once
#include "core/packed.cuh"
#include "core/shapes.cuh"

// ---- mbarriers: `count` arrivals and all expected bytes complete a phase; waiters give the phase's parity

DEVICE void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE bool barrier_try(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
// no __trap() for a wait that never ends: with one in the loop ptxas silently ignores setmaxnreg
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_try(barrier, parity)) {
  }
}
// a barrier among `threads` threads of the block; 0 is __syncthreads()
DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- bulk loads: contiguous bytes, a multiple of 16 of them, from and to multiples of 16

DEVICE void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// ---- tensor loads: a box of a tensor map to shared memory; elements outside the tensor arrive as zeros

DEVICE void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
template <class... Maps> DEVICE void prefetch_maps(const Maps*... maps) { (prefetch_map(maps), ...); }
// prefetches a line of memory to the L2 cache
DEVICE void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

DEVICE void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

DEVICE void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

DEVICE void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w, int v) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v) : "memory");
}

// im2col mode: the map's number of consecutive output pixels from the base (w, h, d, n) on, each shifted by the tap's offsets
template <int axes>
DEVICE void load_im2col(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c, int w, int h, int d, int n, int s, int r, int t) {
  if constexpr (axes == 1) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2], {%6};"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(n), "h"((uint16_t)s) : "memory");
  } else if constexpr (axes == 2) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"((uint16_t)s), "h"((uint16_t)r) : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"((uint16_t)s), "h"((uint16_t)r), "h"((uint16_t)t) : "memory");
  }
}

// Where the loads of an output pixel begin; `shape` is a LoadedPixels.
struct LoadBase {
  int image, w, h, d;
  template <class Shape> DEVICE LoadBase(const Shape& shape, int pixel) {
    const Divided plane(pixel, shape.load_plane, shape.by_load_plane), slice(plane.rest, shape.load_pq, shape.by_load_pq);
    const Divided row(slice.rest, shape.load_q, shape.by_load_q);
    image = plane.quotient;
    w = row.rest * (int)shape.stride_w + (int)shape.low_w;
    h = row.quotient * (int)shape.stride_h + (int)shape.low_h;
    d = slice.quotient * (int)shape.stride_d + (int)shape.low_d;
  }
};
// The same for 1 to 3 axes; with 0 axes all images are one row of pixels, and the load is a box of these.
template <class Base> DEVICE void load_im2col(int axes, uint32_t to, const CUtensorMap* map, uint32_t barrier, int c, const Base& base, int s, int r, int t) {
  if (axes == 0) load_box(to, map, barrier, c, base.w, 0);
  if (axes == 1) load_im2col<1>(to, map, barrier, c, base.w, base.h, base.d, base.image, s, r, t);
  if (axes == 2) load_im2col<2>(to, map, barrier, c, base.w, base.h, base.d, base.image, s, r, t);
  if (axes == 3) load_im2col<3>(to, map, barrier, c, base.w, base.h, base.d, base.image, s, r, t);
}

// ---- tensor stores: a box of shared memory to a tensor map; elements outside the tensor are not written

// orders ordinary stores to shared memory before the bulk copies, and wgmma's reads, that a barrier starts
DEVICE void fence_for_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void store_box(const CUtensorMap* map, uint32_t from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// waits until all but the last `groups` commits of this thread have read their shared memory
template <int groups> DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory"); }
// waits until all but the last `groups` commits of this thread are written and visible to it
template <int groups> DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(groups) : "memory"); }

// Stores what a warpgroup, the `consumer`, has: `fill` leaves it in a room of shared memory, which stores of before may still read, all but the last
// `pending` of them; `store` then stores its boxes.
template <int pending, class Fill, class Store> DEVICE void store_through_room(int consumer, const Fill& fill, const Store& store) {
  const bool stores = threadIdx.x % 128 == 0;
  if (stores) bulk_wait_read<pending>();
  named_barrier(1 + consumer, 128);  // what the room held has been read
  fill();
  fence_for_bulk();
  named_barrier(1 + consumer, 128);  // all of them are there
  if (!stores) return;
  store();
  bulk_commit();
}

// ---- two 8 x 8 blocks of 16-bit numbers from a warp's registers, transposed; lanes 0 to 15 give the rows' addresses

DEVICE void store_transposed(uint32_t row, const uint32_t (&v)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(v[0]), "r"(v[1]) : "memory");
}

// ---- registers between warpgroups: the launch gives each thread the same number, and producers hand most of theirs over

template <int count> DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count> DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }
