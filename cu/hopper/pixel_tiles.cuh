// pixel_tiles.cuh: consumers and stores of hopper/dense.cu and hopper/gather.cu, whose tiles are pixels x channels of channels-last arrays.
// The two kernels differ in how x reaches shared memory.
//
// A kernel defines before it includes this: BLOCK_M, BLOCK_N, STAGES, TYPE and CLUSTER; W_MN_MAJOR, PHASES and NOTES, unless they are as here; and
// Phase, its arguments of a phase. Of these the code here reads tiles, blocks, part, rows, pixels, the offsets of y's pixels, and the epilogue's.
#pragma once
#ifndef PHASES
#define W_MN_MAJOR 0
#define PHASES 1
#define NOTES 0  // the text can note moments
#endif
#define WGMMA_N BLOCK_N
#include "hopper/cluster.cuh"
#include "core/finish.cuh"
#include "core/repeats.cuh"
#include "hopper/skeleton.cuh"
#include "core/truncation.cuh"

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
};

DEVICE int first_tile() { return blockIdx.x / CLUSTER; }
DEVICE int next_tile(int tile) { return tile + gridDim.x / CLUSTER; }
DEVICE int all_tiles(const Shapes& shapes) {
  int tiles = 0;
#pragma unroll
  for (int phase = 0; phase < PHASES; ++phase) tiles += (int)shapes.of[phase].tiles;
  return tiles;
}

// A tile: its phase, the repeat of the phase, its first pixel, and its first channel.
struct Tile {
  int phase = 0, repeat = 0, pixel, channel;
  DEVICE Tile(const Shapes& shapes, int tile) {
    while (PHASES > 1 && tile >= (int)shapes.of[phase].tiles) tile -= (int)shapes.of[phase++].tiles;
#if PHASES > 1
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

// The stages of gemm k that this block sums: [first, last).
struct Range {
  int first, last;
  DEVICE Range(const Phase& shape) {
    first = min(cluster_rank() * (int)shape.part, (int)shape.blocks);
    last = min(first + (int)shape.part, (int)shape.blocks);
  }
};

typedef StageRing<STAGES, STAGE_BYTES> Ring;

// ---- sums to y

// The pixel of y that pixel `pixel` of the phase is; -1 past the end.
DEVICE int place_of(const Phase& shape, int pixel) {
  if (pixel >= (int)shape.pixels) return -1;
  const Divided of_image(pixel, shape.plane, shape.by_plane);
  return of_image.quotient * (int)shape.out_size + plane_offset<false>(shape, of_image.rest);
}

// How channels of y are written. SINGLE: one at a time. FOURS: four neighbours at once. RUN: if all channels of a pixel are in one chunk and pixels
// are contiguous, neighbours of a warp's whole run of pixels. SIXTEEN_BYTES: 16 bytes at once, from the registers of the sums.
enum Wide { SINGLE, FOURS, RUN, SIXTEEN_BYTES };
// Stores four neighbouring channels of y.
struct Four {
  int first, count;  // channels that exist
  Finish<false> finish[4];
  DEVICE Four(const Phase& shape, int channel, const data_t* scales, const data_t* biases)
      : first(channel), count(min((int)shape.rows - channel, 4)) {
#pragma unroll
    for (int e = 0; e < 4; ++e) finish[e].of = ScaleAndBias(shape, scales, biases, min(first + e, (int)shape.rows - 1));
  }
  DEVICE void store(const Phase& shape, int place, const float (&sum)[4], const data_t* residual, data_t* y) const {
    struct alignas(4 * sizeof(data_t)) Vector {
      data_t v[4];
    };
    const bool there = place >= 0 && count > 0, wide = (int)shape.wide % 2 == 1;  // FOURS or SIXTEEN_BYTES; no branch, so that several stores are issued at once
    const long long at = place * shape.rows + first;
    const bool added_to = MAY_ADD && has_residual(shape);
    Vector added = {}, out;
    float v[4];
    if (added_to && wide && there) added = *(const Vector*)(residual + at);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (added_to && !wide && there && e < count) added.v[e] = residual[at + e];
      v[e] = finish[e].whole(shape, sum[e], 1, added_to ? to_float(added.v[e]) : -0.f);
    }
    activate(shape, v);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      out.v[e] = from_float<data_t>(v[e]);
      if (!wide && there && e < count) y[at + e] = out.v[e];
    }
    if (wide && there) store_word(y + at, *(const word<Vector>*)&out);
  }
};

// Stores a warp's staging tile to a run of y, from pixel `pixel` on: a lane takes two neighbours at a time, whichever pixels they belong to.
DEVICE void store_run(const float* staging, const Phase& shape, int pixel, const data_t* scales, const data_t* biases, const data_t* residual, data_t* y) {
  struct alignas(2 * sizeof(data_t)) Pair {
    data_t v[2];
  };
  const int count = min(16, (int)shape.pixels - pixel) * (int)shape.rows;
  const long long first = (long long)pixel * shape.rows;  // 16 pixels begin at a multiple of 32 bytes
  const bool added_to = MAY_ADD && has_residual(shape);
  for (int i = threadIdx.x % 32 * 2; i < count; i += 64) {
    float v[2];
    Pair out;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Divided of_pixel(min(i + e, count - 1), shape.rows, shape.by_rows);
      Finish<false> finish;
      finish.of = ScaleAndBias(shape, scales, biases, of_pixel.rest);
      const float added = added_to && i + e < count ? to_float(residual[first + i + e]) : -0.f;
      v[e] = finish.whole(shape, staging[of_pixel.quotient * PITCH + of_pixel.rest], 1, added);
    }
    activate(shape, v);
#pragma unroll
    for (int e = 0; e < 2; ++e) out.v[e] = from_float<data_t>(v[e]);
    if (i + 1 < count) store_word(y + first + i, *(const word<Pair>*)&out);
    else y[first + i] = out.v[0];
  }
}

#if NOTES
// Notes the moments of a chunk: a lane has channel `channel` of its warp's 16 pixels, and one of the consumer's warps combines those of all four.
// `noted` is [warp][mean, squares][channel], and another one for each second chunk, so that one barrier a chunk is enough.
DEVICE void note_moments(const float* staging, const Phase& shape, const Tile& of, int chunk, int channel, float* noted, const data_t* scale,
                         const data_t* bias, float* moments) {
  const int consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, pixel = of.pixel + 64 * consumer;
  const bool real = channel < (int)shape.rows;
  Finish<false> finish;
  finish.of = ScaleAndBias(shape, scale, bias, real ? channel : 0);
  auto count_of = [&](int number) { return max(min((int)shape.pixels - pixel - 16 * number, 16), 0); };
  auto value = [&](int row) { return to_float(from_float<data_t>(finish.shifted(shape, staging[row * PITCH + lane], 1))); };  // as it is stored
  const float first = value(0);
  Deviations own;
  const int count = count_of(warp);
#pragma unroll 4
  for (int row = 0; row < count; ++row) own.add(value(row) - first);
  noted[warp * 2 * CHUNK + lane] = own.mean(first, max(count, 1));
  noted[(warp * 2 + 1) * CHUNK + lane] = own.off_mean(max(count, 1));
  named_barrier(1 + consumer, 128);
  if (warp != chunk % 4 || count_of(0) == 0 || !real) return;
  float mean = noted[lane], squares = noted[CHUNK + lane];
#pragma unroll
  for (int other = 1; other < 4; ++other) {
    const int before = count_of(0) == 16 ? 16 * other : count_of(0), more = count_of(other);
    if (more == 0) continue;
    const float off = noted[other * 2 * CHUNK + lane] - mean, share = (float)more / (before + more);
    mean = fmaf(off, share, mean);
    squares += fmaf(off * off, before * share, noted[(other * 2 + 1) * CHUNK + lane]);
  }
  float* const to = moments + (long long)(pixel / 64) * 2 * shape.rows + channel;
  to[0] = mean;
  to[shape.rows] = squares;
}
#endif

// Exchanges words of two lanes whose numbers differ in the bit `beside`: the lower lane then has both lanes' a, the upper one both lanes' b.
DEVICE void swap_words(uint32_t& a, uint32_t& b, int beside) {
  const bool upper = threadIdx.x & beside;
  const uint32_t got = __shfl_xor_sync(~0u, upper ? a : b, beside);
  a = upper ? got : a;
  b = upper ? b : got;
}

// A row of sums as wgmma leaves it to four lanes, exchanged between them into runs of 16 bytes; turn() is its own inverse.
constexpr int EIGHTS = 8 / (int)sizeof(data_t);  // groups of 8 columns in a run; a lane has two neighbours of each
struct alignas(16) Run {
  uint32_t words[4];
  DEVICE void turn() {
    if (EIGHTS == 4) {
      swap_words(words[0], words[1], 1);
      swap_words(words[2], words[3], 1);
      swap_words(words[0], words[2], 2);
      swap_words(words[1], words[3], 2);
    } else {
      swap_words(words[0], words[2], 1);
      swap_words(words[1], words[3], 1);
    }
  }
  // the first channel of this lane's run, counted from that of the four lanes
  static DEVICE int channel() { return threadIdx.x % 4 * 8 - (EIGHTS == 2 ? threadIdx.x % 4 / 2 * 12 : 0); }
};

// Stores a consumer's sums of a tile from registers, where 16 bytes of y belong to one pixel. `plain`: without an epilogue. `of_channels` has
// scale and bias of two neighbouring channels in each element, from the tile's first on.
template <bool plain>
DEVICE void store_runs(const float (&sum)[BLOCK_N / 2], const Phase& shape, const Tile& of, const float4* of_channels, const data_t* residual, data_t* y) {
  constexpr int GROUP = 8 * EIGHTS, AT_ONCE = BLOCK_N > 192 ? 2 : 2 * EIGHTS;  // as many as registers hold
  static_assert(BLOCK_N % GROUP == 0, "runs of 16 bytes");
  const bool added_to = !plain && MAY_ADD && has_residual(shape);
  const int own = place_of(shape, of.pixel + threadIdx.x / 32 * 16 + threadIdx.x % 16), first = of.channel + Run::channel();
  long long at[2];
  bool there[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = __shfl_sync(~0u, own, threadIdx.x % 32 / 4 + 8 * half);
    there[half] = place >= 0;
    at[half] = place * shape.rows + first;
  }
  for_all<BLOCK_N / GROUP>([&](auto group) {
    constexpr int base = decltype(group)::value * GROUP;
    const bool real = first + base < (int)shape.rows;
    Run added[2] = {}, out[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (added_to && there[half] && real) added[half] = *(const Run*)(residual + at[half] + base);
    if (added_to)
#pragma unroll
      for (int half = 0; half < 2; ++half) added[half].turn();
    for_all<2 * EIGHTS / AT_ONCE>([&](auto part) {
      constexpr int from = decltype(part)::value * AT_ONCE;
      Finish<false> finish[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i += 2) {
        const float4 two = plain ? make_float4(1, -0.f, 1, -0.f) : of_channels[(base + (from + i) / 2 * 8) / 2 + threadIdx.x % 4];
        finish[i].of = ScaleAndBias(two.x, two.y);
        finish[i + 1].of = ScaleAndBias(two.z, two.w);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const float one = sum[(base / 8 + (from + i) / 2) * 4 + 2 * half + i % 2];
          if (plain) v[i] = one;
          else v[i] = added_to ? finish[i].whole(shape, one, 1, to_float(((const data_t*)added[half].words)[from + i])) : finish[i].shifted(shape, one, 1);
        }
        if (!plain) activate(shape, v);
#if TYPE == 32
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) out[half].words[from + i] = __float_as_uint(v[i]);
#else
#pragma unroll
        for (int i = 0; i < AT_ONCE; i += 2) out[half].words[(from + i) / 2] = word_of<data_t>(v[i], v[i + 1]);
#endif
      }
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) out[half].turn();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (there[half] && real) store_word(y + at[half] + base, *(const uint4*)out[half].words);
  });
}

// Whether sums are stored as they are.
DEVICE bool stores_plainly(const Phase& shape) {
  return !has_scale(shape) && !has_bias(shape) && !(MAY_ADD && has_residual(shape)) && !activation(shape);
}

// Leaves scale and bias of a tile's channels in a warp's staging tile, where store_runs() reads them. `staged` is the first of the channels whose
// numbers lie there.
DEVICE void stage_finish(float* staging, int& staged, const Phase& shape, const Tile& of, const data_t* scale, const data_t* bias) {
  static_assert(BLOCK_N / 2 * 4 <= 16 * PITCH, "they fit a staging tile");
  if (staged == of.channel || (int)shape.wide != SIXTEEN_BYTES || stores_plainly(shape)) return;
  staged = of.channel;
  __syncwarp();  // what lies there has been read
#pragma unroll
  for (int i = threadIdx.x % 32; i < BLOCK_N / 2; i += 32) {
    const int channel = min(of.channel + 2 * i, (int)shape.rows - 2);  // 16 bytes of channels, so their number is even
    const ScaleAndBias one(shape, scale, bias, channel), next(shape, scale, bias, channel + 1);
    ((float4*)staging)[i] = make_float4(one.scale, one.bias, next.scale, next.bias);
  }
  __syncwarp();
}

// Stores a consumer's sums of a tile, through its warps' staging tiles or from registers; `moments` is null if they are not asked for. After
// stage_finish(), whose numbers are gone if moments are noted.
DEVICE void store_sums(const float (&sum)[BLOCK_N / 2], const Phase& shape, const Tile& of, float* staging, [[maybe_unused]] int& staged,
                       [[maybe_unused]] float* noted, const data_t* scale, const data_t* bias, const data_t* residual, data_t* y,
                       [[maybe_unused]] float* moments) {
  const bool as_runs = (int)shape.wide == SIXTEEN_BYTES;
  if (as_runs) {
    if (stores_plainly(shape)) store_runs<true>(sum, shape, of, (const float4*)staging, residual, y);
    else store_runs<false>(sum, shape, of, (const float4*)staging, residual, y);
    if (!NOTES || !moments) return;
    staged = -1;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own = place_of(shape, of.pixel + 16 * warp + lane % 16);
  for_all<BLOCK_N / CHUNK>([&](auto chunk) {
    constexpr int base = decltype(chunk)::value * CHUNK;
    __syncwarp();  // the last chunk has been read
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * (base / 8 + i) + 2 * half;
        *(float2*)(staging + (lane / 4 + 8 * half) * PITCH + 8 * i + 2 * (lane % 4)) = make_float2(sum[at], sum[at + 1]);
      }
    __syncwarp();
    if (BLOCK_N == CHUNK && (int)shape.wide == RUN) {
      store_run(staging, shape, of.pixel + 16 * warp, scale, bias, residual, y);
    } else if (!as_runs) {
      const Four four(shape, of.channel + base + 4 * (lane % 8), scale, bias);
      constexpr int BATCH = BLOCK_N > 160 ? 1 : 4;  // fours of rows that are read before the first of them is written, as registers allow
#pragma unroll(BATCH == 1 ? 1 : 4)
      for (int down = 0; down < 16; down += 4 * BATCH) {
        float4 v[BATCH];
        int place[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const int row = down + 4 * i + lane / 8;
          v[i] = *(const float4*)(staging + row * PITCH + 4 * (lane % 8));
          place[i] = __shfl_sync(~0u, own, row);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) four.store(shape, place[i], {v[i].x, v[i].y, v[i].z, v[i].w}, residual, y);
      }
    }
#if NOTES
    if (moments) note_moments(staging, shape, of, base / CHUNK, of.channel + base + lane, noted + base / CHUNK % 2 * 8 * CHUNK, scale, bias, moments);
#endif
  });
}

#if CLUSTER > 1
// Adds this block's rows of the tile, once all blocks have left their sums.
DEVICE void add_parts(const Phase& shape, const Tile& of, uint32_t sums, const data_t* scale, const data_t* bias, const data_t* residual,
                      data_t* y) {
  constexpr int ROWS = BLOCK_M / CLUSTER, ACROSS = BLOCK_N / 4;
  for (int i = threadIdx.x; i < ROWS * ACROSS; i += CONSUMER_THREADS) {
    const int row = cluster_rank() * ROWS + i / ACROSS, column = i % ACROSS * 4;
    const Four four(shape, of.channel + column, scale, bias);
    const float4 v = add_of_ranks(sums + (row * SUMS_PITCH + column) * 4);
    four.store(shape, place_of(shape, of.pixel + row), {v.x, v.y, v.z, v.w}, residual, y);
  }
}
#endif

// ---- the multiplication

// Bytes of a row of a stage of `steps` steps: the span of its swizzle.
DEVICE constexpr int span_of(int steps) { return steps == 1 ? 32 : steps == 2 ? 64 : 128; }

// The products of a stage of `steps` steps; `fresh` begins new sums.
template <int steps> DEVICE void multiply(float (&sum)[BLOCK_N / 2], uint32_t a, uint32_t b, bool fresh) {
  constexpr bool MN_MAJOR = W_MN_MAJOR && !TURNED;
  constexpr int SPAN = span_of(steps);
  const uint64_t x = wgmma_descriptor<SPAN>(a), w = MN_MAJOR ? wgmma_mn_major_descriptor<MN_SPAN>(b) : wgmma_descriptor<TURNED ? 128 : SPAN>(b);
#pragma unroll
  for (int k = 0; k < steps; ++k) wgmma<TYPE, 0, MN_MAJOR>(sum, x + 2 * k, w + (MN_MAJOR ? 16 * MN_SPAN / 16 : 2) * k, !(fresh && k == 0));
}

#ifdef TAILS
// A tap's last stage has no more steps than its channels fill, and narrower rows if they are few, in texts that know the layer. In other texts it
// is like other stages, and its last steps multiply zeros.
#ifdef LAYER
constexpr int LAST = LAST_STEPS;
#else
constexpr int LAST = STEPS;
#endif
// wgmma steps of a range's stages, without those that multiply zeros.
DEVICE int steps_of(const Phase& shape, const Range& range) {
  const int taps = Divided(range.last, (int)shape.channel_blocks, shape.by_channel_blocks).quotient -
                   Divided(range.first, (int)shape.channel_blocks, shape.by_channel_blocks).quotient;
  return STEPS * (range.last - range.first) - (STEPS - (int)shape.last_steps) * taps;
}
#else
DEVICE int steps_of(const Phase&, const Range& range) { return STEPS * (range.last - range.first); }
#endif

// Multiplies and stores a consumer's part of each tile. `ready` is called with the offset of the consumer's rows of x in each stage that arrives.
template <class Ready>
DEVICE void consume(const Ready& ready, const Shapes& shapes, const Ring& ring, [[maybe_unused]] float* sums, [[maybe_unused]] float* staging,
                    const data_t* scale,
                    const data_t* bias, const data_t* residual, data_t* y, [[maybe_unused]] float* moments) {
  const int consumer = threadIdx.x / 128;
  Ring::Position at;
  float sum[BLOCK_N / 2];
  [[maybe_unused]] int staged = -1;
  for (int tile = first_tile(), tiles = all_tiles(shapes); tile < tiles; tile = next_tile(tile)) {
    const Tile of(shapes, tile);
    const Phase& shape = shapes.of[of.phase];
    const Range range(shape);
    [[maybe_unused]] float* const own = staging + threadIdx.x / 32 * (16 * PITCH);
    if (CLUSTER == 1) stage_finish(own, staged, shape, of, scale, bias);  // while the first stages arrive
    auto multiply_stage = [&](auto steps, int step) {
      const uint32_t stage = ring.stage(at);
      ring.wait_full(at);
      ready(at.stage * STAGE_BYTES + consumer * 64 * 128);
      wgmma_fence();
      multiply<decltype(steps)::value>(sum, stage + consumer * 64 * span_of(decltype(steps)::value), stage + A_BYTES, step == range.first);
      ring.template commit<1>(at, step > range.first);
    };
#ifdef TAILS
    if constexpr (LAST < STEPS) {
      // loops within a loop: where a branch chose the number of steps, ptxas would have all products wait for one another
      int step = range.first, whole = (int)shape.channel_blocks - 1 - Divided(step, (int)shape.channel_blocks, shape.by_channel_blocks).rest;
      while (step < range.last) {
        for (const int last = min(step + whole, range.last); step < last; ++step) multiply_stage(Constant<STEPS>(), step);
        if (step == range.last) break;
        multiply_stage(Constant<LAST>(), step++);
        whole = (int)shape.channel_blocks - 1;
      }
    } else
#endif
      for (int step = range.first; step < range.last; ++step) multiply_stage(Constant<STEPS>(), step);
    wgmma_wait<0>();
    wgmma_arrived(sum);
    const bool any = range.first < range.last;
    if (any) ring.give_back(at, 1);
    const float part = lost_in(steps_of(shape, range));
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      sum[i] = any ? sum[i] : 0;
      if (TYPE == 32) sum[i] = with_lost(sum[i], part);  // the rounding to 16 bits hides it
    }
    const auto apart = y_apart(shapes, of);
#if CLUSTER > 1
    named_barrier(1, CONSUMER_THREADS);  // the ring has been read
    stage_accumulators<SUMS_PITCH>(sum, sums);
    cluster_barrier();
    add_parts(shape, of, shared_address(sums), scale, bias, residual + apart, y + apart);
#else
    float* const noted = staging + 4 * CONSUMERS * 16 * PITCH + consumer * 16 * CHUNK;
    store_sums(sum, shape, of, own, staged, noted, scale, bias, residual + apart, y + apart, moments);
#endif
  }
}
