// skeleton.cuh: what the kernels for Hopper do alike. Producers load what a tile needs, stage by stage, into a ring in shared memory (ring.cuh).
// Consumer warpgroups multiply the stages and store the sums.
//
// A kernel's consumers are the first warpgroups of its block; behind them are the producers. What the tile of a block is, which stages it sums, and where
// these lie in memory, is the kernel's own: it gives these functions what loads a stage, and what multiplies one.
#pragma once
#include "core/truncation.cuh"
#include "hopper/ring.cuh"

// Begins a block of so many `consumers`: its ring, of whose stages each is full after `producers` arrivals; and the launch before it in the stream.
// The first thread behind the consumers calls `prefetch`, for tensor maps.
template <class Ring, class Prefetch> DEVICE void begin_block(const Ring& ring, int producers, int consumers, const Prefetch& prefetch) {
  if (threadIdx.x == 0) ring.init(producers, 4 * consumers);
  if (threadIdx.x == 128 * consumers) prefetch();
  __syncthreads();
  AFTER_LAST_LAUNCH
}

// The producer's loop over the stages [first, last) of a sum: `load(step, stage, arrived)` loads a step, and tells the stage's barrier how many bytes it expects.
template <class Ring, class Load> DEVICE void fill_stages(const Ring& ring, typename Ring::Position& at, int first, int last, const Load& load) {
  for (int step = first; step < last; ++step) {
    const uint32_t stage = ring.stage(at), arrived = ring.arrived(at);
    ring.wait_empty(at);
    load(step, stage, arrived);
    at.next();
  }
}

// The consumers' loop over the same stages: `multiply(stage, fresh)` issues the products of a stage, and begins new sums if it is `fresh`. The products of
// `behind` stages, 0 or 1, may still run while the next stage is waited for. Afterwards the sums are there; the last stage is to be given back if `behind` is 1.
template <int behind, class Ring, int count, int length, class Multiply>
DEVICE void multiply_stages(const Ring& ring, typename Ring::Position& at, int first, int last, float (&sums)[count][length], const Multiply& multiply) {
  for (int step = first; step < last; ++step) {
    const uint32_t stage = ring.stage(at);
    ring.wait_full(at);
    multiply(stage, step == first);
    ring.template commit<behind>(at, step > first);
  }
  wgmma_wait<0>();
  wgmma_arrived(sums);
}

// Ends sums: zeros if no stage was summed. `raises`: adds `lost` of each, what truncating it took; the rounding to 16 bits hides that.
template <bool raises, class Sums> DEVICE void end_sums(Sums& sums, bool any, float lost) {
  each(sums, [&](float& one) {
    one = any ? one : 0;
    if (raises) one = with_lost(one, lost);
  });
}

// A block that takes tile after tile: its producer loads the next one's stages while its consumers store. A kernel is a struct with
//   CONSUMERS        how many warpgroups multiply; behind them one thread loads
//   UP, DOWN         registers of a consumer's thread and of a producer's, if a launch gives too few to each; or 0
//   Ring, Sums       StageRing<...>; float[count][length]
//   arg              the launch's arguments; of these the loops read how many `tiles` there are, and `steps`, the stages of a sum
//   Tile(kernel, number)                                     what a tile's number means
//   prefetch(), load(tile, step, stage, arrived)             what the producer does
//   multiply(sums, stage, fresh), finish(sums, tile)         and the consumers: the products of a stage, and the stores of a tile
template <class Kernel> constexpr int THREADS_OF = 128 * Kernel::CONSUMERS + (Kernel::DOWN > 0 ? 128 : 32);  // registers change hands between warpgroups

template <class Kernel> DEVICE void run_tiles(Kernel& kernel, const typename Kernel::Ring& ring) {
  begin_block(ring, 1, Kernel::CONSUMERS, [&] { kernel.prefetch(); });
  typename Kernel::Ring::Position at;
  if (threadIdx.x < 128 * Kernel::CONSUMERS) {
    if constexpr (Kernel::UP > 0) registers_up<Kernel::UP>();
    typename Kernel::Sums sums;
    for (int number = blockIdx.x; number < (int)kernel.arg.tiles; number += gridDim.x) {
      const typename Kernel::Tile tile(kernel, number);
      multiply_stages<1>(ring, at, 0, (int)kernel.arg.steps, sums, [&](uint32_t stage, bool fresh) { kernel.multiply(sums, stage, fresh); });
      ring.give_back(at, 1);
      kernel.finish(sums, tile);
    }
    bulk_wait<0>();  // what TMA stores, if it does, has left shared memory
  } else {
    if constexpr (Kernel::DOWN > 0) registers_down<Kernel::DOWN>();
    if (threadIdx.x != 128 * Kernel::CONSUMERS) return;
    for (int number = blockIdx.x; number < (int)kernel.arg.tiles; number += gridDim.x) {
      const typename Kernel::Tile tile(kernel, number);
      fill_stages(ring, at, 0, (int)kernel.arg.steps, [&](int step, uint32_t stage, uint32_t arrived) { kernel.load(tile, step, stage, arrived); });
    }
  }
}
