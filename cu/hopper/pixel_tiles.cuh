// pixel_tiles.cuh: consumers and stores of hopper/dense.cu and hopper/gather.cu, whose tiles are pixels x channels of channels-last arrays.
// The two kernels differ in how x reaches shared memory.
//
// A kernel defines before it includes this: BLOCK_M, BLOCK_N, STAGES, TYPE and CLUSTER; W_MN_MAJOR, PHASES and EMIT_MOMENTS, unless they are as here; and
// Phase, its arguments of a phase. Of these the code here reads tiles (those of earlier phases among them), blocks, part, rows, pixels, the offsets
// of y's pixels, and the epilogue's.
#pragma once
#ifndef PHASES
#define W_MN_MAJOR 0
#define PHASES 1
#define EMIT_MOMENTS 0  // the text can emit moments
#endif
#ifndef SEGMENTS
#define SEGMENTS 1  // 2: behind a sum's stages come those of another array, whose arguments are Shapes::behind
#endif
#define WGMMA_N BLOCK_N
#include "core/cluster.cuh"
#include "core/finish.cuh"
#include "core/repeats.cuh"
#include "hopper/skeleton.cuh"

typedef element<TYPE> data_t;

constexpr int BLOCK_K = 128 / (int)sizeof(data_t), STEPS = 4;  // channels of a stage; wgmma steps in one
constexpr int CONSUMERS = BLOCK_M / 64, CONSUMER_THREADS = 128 * CONSUMERS;
constexpr bool TURNED = W_MN_MAJOR && TYPE == 32;                     // w is MN-major in memory, K-major once a stage is full
constexpr int MN_CHANNELS = BLOCK_N < BLOCK_K ? BLOCK_N : BLOCK_K, MN_SPAN = MN_CHANNELS * (int)sizeof(data_t);  // channels of an MN-major row, and its bytes
constexpr int MN_BLOCK = BLOCK_K * MN_SPAN, MN_BLOCKS = (BLOCK_N + MN_CHANNELS - 1) / MN_CHANNELS;  // bytes of BLOCK_K such rows; blocks of a tile
constexpr int A_BYTES = BLOCK_M * 128, B_BYTES = W_MN_MAJOR ? MN_BLOCKS * MN_BLOCK : BLOCK_N * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CHUNK = 32, PITCH = 40;    // channels of a staging tile; floats of a row of it
constexpr int SUMS_PITCH = BLOCK_N + 8;  // floats of a row of a shared tile's sums, which take the ring's place
constexpr bool MAY_ADD = BLOCK_N < 256;  // the widest tile has no registers for a residual
static_assert(BLOCK_M % 64 == 0 && BLOCK_N % CHUNK == 0, "whole warpgroups and chunks");
static_assert(CLUSTER == 1 || BLOCK_M * SUMS_PITCH * 4 <= STAGES * STAGE_BYTES, "the sums take the ring's place");

struct Shapes {
  Phase of[PHASES];
#if PHASES > 1
  Repeats repeats;  // of each
#endif
#if SEGMENTS > 1
  Phase behind;  // of its stages alone; those of both are counted in of[0].blocks
#endif
};

DEVICE int first_tile() { return blockIdx.x / CLUSTER; }
DEVICE int next_tile(int tile) { return tile + gridDim.x / CLUSTER; }
DEVICE int all_tiles(const Shapes& shapes) { return (int)shapes.of[PHASES - 1].tiles; }

// A tile: its phase, the repeat of the phase, its first pixel, and its first channel.
struct Tile {
  int phase = 0, repeat = 0, pixel, channel;
  DEVICE Tile(const Shapes& shapes, int tile) {
#if PHASES > 1
#pragma unroll
    for (int step = 16; step > 0; step /= 2)  // the first phase that ends behind the tile
      if (step < PHASES && phase + step < PHASES && tile >= (int)shapes.of[phase + step - 1].tiles) phase += step;
    if (phase > 0) tile -= (int)shapes.of[phase - 1].tiles;
    const Divided turn(tile, shapes.repeats.turns, shapes.repeats.by_turns);
    tile = turn.quotient;
    repeat = turn.rest;
#endif
    const Phase& shape = shapes.of[phase];
    const Divided across(tile, shape.tiles_n, shape.by_tiles_n);
    channel = across.rest * BLOCK_N;
    pixel = across.quotient * BLOCK_M;
  }
};

// how far a tile's repeat lies from its phase: in taps, and in pixels of y
#if PHASES > 1
DEVICE int taps_apart(const Shapes& shapes, const Tile& of) { return taps_apart(shapes.repeats, of.repeat); }
DEVICE long long y_apart(const Shapes& shapes, const Tile& of) { return y_apart(shapes.repeats, of.repeat); }
#else
DEVICE int taps_apart(const Shapes&, const Tile&) { return 0; }
DEVICE int y_apart(const Shapes&, const Tile&) { return 0; }
#endif

// The stages of gemm k that this block sums.
DEVICE StageRange range_of(const Phase& shape) { return {cluster_rank(), (int)shape.part, (int)shape.blocks}; }

typedef StageRing<STAGES, STAGE_BYTES> Ring;

#include "hopper/pixel_store.cuh"

// ---- the multiplication

// Bytes of a row of a stage of `steps` steps: the span of its swizzle.
DEVICE constexpr int span_of(int steps) { return steps == 1 ? 32 : steps == 2 ? 64 : 128; }

#ifdef TAILS
// A tap's last stage has no more steps than its channels fill, and narrower rows if they are few, in texts that know the layer. In other texts it
// is like other stages, and its last steps multiply zeros.
#ifdef LAYER
constexpr int LAST = LAST_STEPS;
#else
constexpr int LAST = STEPS;
#endif
// wgmma steps of a range's stages, without those that multiply zeros.
DEVICE int steps_of(const Phase& shape, const StageRange& range) {
  const int taps = Divided(range.last, (int)shape.channel_blocks, shape.by_channel_blocks).quotient -
                   Divided(range.first, (int)shape.channel_blocks, shape.by_channel_blocks).quotient;
  return STEPS * range.count() - (STEPS - (int)shape.last_steps) * taps;
}
#else
DEVICE int steps_of(const Phase&, const StageRange& range) { return STEPS * range.count(); }
#endif

// Multiplies and stores a consumer's part of each tile. `ready` is called with the offset of the consumer's rows of x in each stage that arrives.
template <class Ready>
DEVICE void consume(const Ready& ready, const Shapes& shapes, const Ring& ring, [[maybe_unused]] float* sums, [[maybe_unused]] float* staging,
                    const Result& whole) {
  const int consumer = threadIdx.x / 128;
  Ring::Position at;
  float sums_of[1][BLOCK_N / 2], (&sum)[BLOCK_N / 2] = sums_of[0];
  [[maybe_unused]] int staged = -1;
  for (int tile = first_tile(), tiles = all_tiles(shapes); tile < tiles; tile = next_tile(tile)) {
    const Tile of(shapes, tile);
    const Phase& shape = shapes.of[of.phase];
    const StageRange range = range_of(shape);
    [[maybe_unused]] float* const own = staging + threadIdx.x / 32 * (16 * PITCH);
    const auto apart = y_apart(shapes, of);
    [[maybe_unused]] Early early;
    if (CLUSTER == 1) {  // while the first stages arrive
      early.load(shape, of, whole.residual + apart);
      stage_finish(own, staged, shape, of, whole);
    }
    auto sum_stage = [&](auto steps, int step) {
      const uint32_t stage = ring.stage(at);
      ring.wait_full(at);
      ready(at.stage * STAGE_BYTES + consumer * 64 * 128);
      constexpr int COUNT = decltype(steps)::value, SPAN = span_of(COUNT);
      typedef StageOperand<W_MN_MAJOR && !TURNED, TURNED ? 128 : W_MN_MAJOR ? MN_SPAN : SPAN> Filter;
      multiply_stage<TYPE, StageOperand<false, SPAN>, Filter, COUNT>(sums_of, stage + consumer * 64 * SPAN, 0, stage + A_BYTES, step == range.first);
      ring.template commit<1>(at, step > range.first);
    };
#ifdef TAILS
    if constexpr (LAST < STEPS) {
      // loops within a loop: where a branch chose the number of steps, ptxas would have all products wait for one another
      int step = range.first, whole = (int)shape.channel_blocks - 1 - Divided(step, (int)shape.channel_blocks, shape.by_channel_blocks).rest;
      while (step < range.last) {
        for (const int last = min(step + whole, range.last); step < last; ++step) sum_stage(Constant<STEPS>(), step);
        if (step == range.last) break;
        sum_stage(Constant<LAST>(), step++);
        whole = (int)shape.channel_blocks - 1;
      }
    } else
#endif
      for (int step = range.first; step < range.last; ++step) sum_stage(Constant<STEPS>(), step);
    wgmma_wait<0>();
    wgmma_arrived(sum);
    const bool any = range.count() > 0;
    if (any) ring.give_back(at, 1);
    end_sums<TYPE == 32>(sum, any, lost_in(steps_of(shape, range)));
#if CLUSTER > 1
    named_barrier(1, CONSUMER_THREADS);  // the ring has been read
    stage_accumulators<SUMS_PITCH>(sum, sums);
    cluster_barrier();
    add_parts(shape, of, shared_address(sums), whole.further(apart));
#else
    float* const staged_moments = staging + 4 * CONSUMERS * 16 * PITCH + consumer * 16 * CHUNK;
    store_sums(sum, shape, of, own, staged, early, staged_moments, whole.further(apart));
#endif
  }
}
