// ring.cuh: a ring of stages in shared memory, which producers fill and consumer warpgroups multiply, on Hopper's tensor cores. It lets producers
// run up to a ring ahead of the products.
//
// A stage has two barriers. full[stage] completes when the stage's bytes have arrived, empty[stage] when all consumer warps have read them.
// Producers and consumers each keep a position in the ring. In its first round a producer waits for the parity of a round before, which is complete.
#pragma once
#include "hopper/wgmma.cuh"

// A position: a stage, and the parity of the round.
template <int count> struct RingPosition {
  int stage = 0, parity = 0;
  DEVICE void next() {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
  DEVICE RingPosition before() const { return {stage ? stage - 1 : count - 1, stage ? parity : parity ^ 1}; }
  DEVICE void skip(int stages) {
    stage += stages;
    parity ^= stage / count & 1;
    stage %= count;
  }
};

// The stages [first, last) of a sum of `stages`: part number `part` of those of `each`.
struct StageRange {
  int first, last;
  DEVICE StageRange(int part, int each, int stages) : first((int)min((unsigned)part * each, (unsigned)stages)), last(min(first + each, stages)) {}
  DEVICE int count() const { return last - first; }
};

// `count` stages of `bytes` bytes, the first at `stages`.
template <int count, int bytes> struct StageRing {
  typedef RingPosition<count> Position;
  uint32_t stages, full, empty;
  // `memory` is the block's dynamic shared memory. Swizzle patterns follow absolute addresses, so stages begin at multiples of 1024 bytes.
  DEVICE StageRing(const void* memory, const uint64_t* barriers)
      : stages((shared_address(memory) + 1023) & ~1023u), full(shared_address(barriers)), empty(full + 8 * count) {}
  // Called by one thread; a barrier of the block must follow. `producers` arrivals make a stage full, `consumers` arrivals make it empty.
  DEVICE void init(int producers, int consumers) const {
    for (int i = 0; i < count; ++i) {
      barrier_init(full + 8 * i, producers);
      barrier_init(empty + 8 * i, consumers);
    }
    barrier_init_done();
  }
  // what lies behind the stages in the block's dynamic shared memory `memory`
  DEVICE uint8_t* behind(uint8_t* memory) const { return memory + (stages + count * bytes - shared_address(memory)); }
  DEVICE uint32_t stage(const Position& at) const { return stages + at.stage * bytes; }
  DEVICE uint32_t arrived(const Position& at) const { return full + 8 * at.stage; }  // the barrier that loads complete
  DEVICE void wait_full(const Position& at) const { barrier_wait(full + 8 * at.stage, at.parity); }
  DEVICE void wait_empty(const Position& at) const { barrier_wait(empty + 8 * at.stage, at.parity ^ 1); }
  // Called by all threads of a warp: gives back the stage at `at`, or the one `ago` positions before it.
  DEVICE void give_back(const Position& at) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * at.stage);
  }
  DEVICE void give_back(const Position& at, int ago) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * ((at.stage + count - ago) % count));
  }
  // A consumer commits the products of the stage at `at`, all of which it has issued, and moves on. The products of `behind` stages, 0 or 1, may still
  // run while it waits for the next stage. It gives back the stage whose products are done: this one, or the one before if `follows` says there is one.
  template <int behind> DEVICE void commit(Position& at, bool follows) const {
    wgmma_commit();
    wgmma_wait<behind>();
    if (behind == 0 || follows) give_back(at, behind);
    at.next();
  }
};
