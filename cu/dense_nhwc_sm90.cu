// dense_nhwc_sm90.cu: convolutions of channels-last arrays as they lie, on Hopper's tensor cores: 16 bits, and float32 in TF32.
//
//   y[pixel, k] = sum over taps and c of x[pixel + tap, c] * w[k, tap, c], and finish.cuh
//   gemm m: pixel (n,o,p,q) of the batch | gemm n: output channel | gemm k: (tap, c), c fastest, in stages of 128 bytes of channels
//
// Nothing is packed: TMA brings both operands from the arrays into the form that wgmma wants. TF32: TMA rounds float32 on the way.
//
// Mapping  block: tiles of BLOCK_M pixels x BLOCK_N channels, those of the same pixels side by side. A consumer warpgroup for each 64 pixels,
//          and behind them a warp one thread of which, the producer, asks for x and w. Persistent, unless a cluster shares a tile.
// Shared   a ring of STAGES stages, 128 bytes of k each: rows of BLOCK_M pixels of x, swizzled, then BLOCK_N rows of w. full[stage]: the bytes
//          have arrived; empty[stage]: the consumer warps have read them. Behind the ring, a tile of 16 pixels x 32 channels of sums for each
//          warp, pitch 40 floats, from which it writes rows of y; and the warps' moments of two such tiles.
// x        TMA's im2col mode: one load fetches BLOCK_M consecutive output pixels, shifted by a tap, across rows and images; padding, and what
//          lies past the last image or channel, arrives as zeros.
// w        K-major, rows of gemm k, as it lies or as transpose_filter.cu made it. W_MN_MAJOR, the gradient of the input in 16 bits: rows of
//          gemm n, in blocks of 64 channels x 64 of k. What all of a row or block lies past the last channel of y is not loaded: TMA takes
//          three times as long for rows that it has to fill. Nothing is made of the sums that come of it.
// Cluster  CLUSTER blocks share a tile: each sums its part of gemm k. They leave their sums in shared memory, and each adds up some of the
//          tile's rows, of all blocks in their order.
// Moments  for a batch norm behind it (batch_norm.cu): of each channel, over the 64 pixels of a consumer, the mean of y and the sum of squares of
//          what y is off by: moments[slice][2][channel].
// Phases   the gradient of the input is made of stride phases, each a stride-1 convolution with some of the taps that writes every out_h-th row
//          and out_w-th column. A launch takes PHASES of them, one after the other, the longest first.
//
// By hand: nvcc -cubin -arch=sm_90a cu/dense_nhwc_sm90.cu
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define STAGES 4
#define TYPE 17      // of the arrays: 32 float, 16 half, 17 bfloat16
#define W_MN_MAJOR 0
#define CLUSTER 1      // blocks that share a tile
#define PHASES 1     // of a launch: 1, 2 or 4
#define MOMENTS 0    // of y's channels are written too
#endif
#define WGMMA_N BLOCK_N
#if TYPE == 32
#define WGMMA_TYPE "tf32"
#define WGMMA_TF32
#elif TYPE == 17
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif
#define WGMMA_TURNED_A "0"
#if W_MN_MAJOR
#define WGMMA_TURNED_B "1"
#else
#define WGMMA_TURNED_B "0"
#endif
#include "cluster.cuh"
#include "finish.cuh"
#include "truncation.cuh"
#include "wgmma.cuh"

typedef element<TYPE> data_t;

constexpr int BLOCK_K = 128 / (int)sizeof(data_t), STEPS = 4;  // channels of a stage; steps of the tensor core in one
constexpr int CONSUMERS = BLOCK_M / 64, CONSUMER_THREADS = 128 * CONSUMERS, THREADS = CONSUMER_THREADS + 32;
constexpr int MN_BLOCK = 64 * 128, MN_BLOCKS = (BLOCK_N + 63) / 64;  // bytes of 64 channels of 64 of k
constexpr int A_BYTES = BLOCK_M * 128, B_BYTES = W_MN_MAJOR ? MN_BLOCKS * MN_BLOCK : BLOCK_N * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CHUNK = 32, PITCH = 40, CHUNKS = BLOCK_N / CHUNK;  // channels of a staging tile; floats of a row of it
constexpr int SUMS_PITCH = BLOCK_N + 8;  // floats of a row of a shared tile's sums, which take the ring's place
static_assert(BLOCK_M % 64 == 0 && BLOCK_N % CHUNK == 0, "whole warpgroups and chunks");
static_assert(!W_MN_MAJOR || TYPE != 32, "wgmma takes 16-bit operands alone so");
static_assert(!MOMENTS || (CLUSTER == 1), "whole sums that nothing is added to");
static_assert(CLUSTER == 1 || BLOCK_M * SUMS_PITCH * 4 <= STAGES * STAGE_BYTES, "the sums take the ring's place");

// What the kernel is told of a phase. by_n is the divisor n, prepared (division.cuh).
struct DensePhase {
  long long tiles, tiles_n, by_tiles_n;                       // all; along channels
  long long blocks, part;                                     // stages of a sum, and of one of CLUSTER parts
  long long channel_blocks, by_channel_blocks;                // stages of a tap
  long long rows;                                             // output channels
  long long tap_r, by_tap_r, tap_s, by_tap_s;                 // taps along r and s
  long long tap_base, tap_step_t, tap_step_r, tap_step_s;     // number in w of the first tap, and steps from one to the next
  long long dilation_d, dilation_h, dilation_w;               // offset in x from one tap to the next
  long long pixels, rank;                                     // pixels of the phase; spatial axes of the loads
  long long load_plane, by_load_plane;                        // pixels of an image, as x is loaded,
  long long load_pq, by_load_pq, load_q, by_load_q;           // of a slice and of a row
  long long stride_d, stride_h, stride_w;                     // x of pixel (o, p, q), tap 0: o * stride_d + low_d and so on
  long long low_d, low_h, low_w;
  long long plane, by_plane, pq, by_pq, q, by_q;              // pixels of an image, a slice and a row, as y is written
  long long out_size, out_base, out_d, out_h, out_w;          // pixels of an image of y, the first one, and from one to the next
  long long wide;                                             // whether four neighbouring channels of y are written at once
  long long has_bias, has_scale, has_residual, activation, slope;           // what finishes a sum; slope: a float's bits
};

struct Shapes {
  DensePhase of[PHASES];
};
struct Maps {
  CUtensorMap of[PHASES];
};

DEVICE int first_tile() { return blockIdx.x / CLUSTER; }
DEVICE int next_tile(int tile) { return tile + gridDim.x / CLUSTER; }
DEVICE int all_tiles(const Shapes& shapes) {
  int tiles = 0;
#pragma unroll
  for (int phase = 0; phase < PHASES; ++phase) tiles += (int)shapes.of[phase].tiles;
  return tiles;
}

// A tile: its phase, its first pixel, and its first channel.
struct Tile {
  int phase = 0, pixel, channel;
  DEVICE Tile(const Shapes& shapes, int tile) {
    while (PHASES > 1 && tile >= (int)shapes.of[phase].tiles) tile -= (int)shapes.of[phase++].tiles;
    const DensePhase& shape = shapes.of[phase];
    const Divided across(tile, shape.tiles_n, shape.by_tiles_n);
    channel = across.rest * BLOCK_N;
    pixel = across.quotient * BLOCK_M;
  }
};

// the stages of gemm k that this block takes
struct Range {
  int first, last;
  DEVICE Range(const DensePhase& shape) {
    first = min(cluster_rank() * (int)shape.part, (int)shape.blocks);
    last = min(first + (int)shape.part, (int)shape.blocks);
  }
};

typedef RingPosition<STAGES> Position;

struct Ring {
  uint32_t stages, full, empty;
};

// ---- the producer

DEVICE void produce(const Maps& maps, const CUtensorMap* map_w, const Shapes& shapes, const Ring& ring) {
  Position at;
  for (int tile = first_tile(), tiles = all_tiles(shapes); tile < tiles; tile = next_tile(tile)) {
    const Tile of(shapes, tile);
    const DensePhase& shape = shapes.of[of.phase];
    const CUtensorMap* const map_x = maps.of + of.phase;
    const Range range(shape);
    const LoadBase base(shape, of.pixel);
    const int channel_blocks = (int)shape.channel_blocks, rank = (int)shape.rank;
    const Divided of_tap(range.first, channel_blocks, shape.by_channel_blocks), of_row(of_tap.quotient, shape.tap_s, shape.by_tap_s);
    const Divided of_slice(of_row.quotient, shape.tap_r, shape.by_tap_r);
    int c = of_tap.rest, s = of_row.rest, r = of_slice.rest, t = of_slice.quotient;
    int tap, x_s, x_r, x_t;  // its number in w and offsets in x, which take this thread long to make of a phase's numbers
    auto begin_tap = [&] {
      tap = (int)shape.tap_base + t * (int)shape.tap_step_t + r * (int)shape.tap_step_r + s * (int)shape.tap_step_s;
      x_s = s * (int)shape.dilation_w;
      x_r = r * (int)shape.dilation_h;
      x_t = t * (int)shape.dilation_d;
    };
    begin_tap();
#if W_MN_MAJOR
    const int filter_blocks = min(MN_BLOCKS, ((int)shape.rows - of.channel + 63) / 64), arriving = A_BYTES + filter_blocks * MN_BLOCK;
#else
    const int arriving = A_BYTES + min(BLOCK_N, (int)shape.rows) * 128;
#endif
    for (int step = range.first; step < range.last; ++step) {
      const uint32_t a = ring.stages + at.stage * STAGE_BYTES, b = a + A_BYTES, arrived = ring.full + 8 * at.stage;
      barrier_wait(ring.empty + 8 * at.stage, at.parity ^ 1);
      barrier_expect(arrived, arriving);
      load_im2col(rank, a, map_x, arrived, c * BLOCK_K, base, x_s, x_r, x_t);
#if W_MN_MAJOR
#pragma unroll
      for (int block = 0; block < MN_BLOCKS; ++block)
        if (block < filter_blocks) load_box(b + block * MN_BLOCK, map_w, arrived, of.channel + 64 * block, tap, c * BLOCK_K);
#else
      load_box(b, map_w, arrived, c * BLOCK_K, tap, of.channel);
#endif
      if (++c == channel_blocks) {
        c = 0;
        if (++s == (int)shape.tap_s) {
          s = 0;
          if (++r == (int)shape.tap_r) {
            r = 0;
            ++t;
          }
        }
        begin_tap();
      }
      at.next();
    }
  }
}

// ---- sums to y

// Which pixel of y a pixel of the phase is, or -1.
DEVICE int place_of(const DensePhase& shape, int pixel) {
  if (pixel >= (int)shape.pixels) return -1;
  const Divided of_image(pixel, shape.plane, shape.by_plane);
  return of_image.quotient * (int)shape.out_size + plane_offset<false>(shape, of_image.rest);
}

// Rows of a staging tile that a lane reads before it writes one: they don't wait for one another. Wide tiles have no registers for it.
#ifdef LAYER
constexpr int TOGETHER = BLOCK_N > 192 ? 1 : 4;
#else
constexpr int TOGETHER = BLOCK_N > 128 ? 1 : BLOCK_N < 128 ? 4 : 2;
#endif

struct alignas(4 * sizeof(data_t)) Vector {
  data_t v[4];
};

// Whether a residual is added: moments are of what nothing is added to, and the widest tile has no registers for it.
DEVICE bool adds(const DensePhase& shape) { return !MOMENTS && BLOCK_N < 256 && has_residual(shape); }

// Four neighbouring channels of y, and what finishes their sums.
struct Four {
  int first, count;  // how many there are
  Finish<false> finish[4];
  DEVICE Four(const DensePhase& shape, int channel, const data_t* scales, const data_t* biases)
      : first(channel), count(min((int)shape.rows - channel, 4)) {
#pragma unroll
    for (int e = 0; e < 4; ++e) finish[e].of = ScaleAndBias(shape, scales, biases, min(first + e, (int)shape.rows - 1));
  }
  DEVICE Vector finished(const DensePhase& shape, const float (&sum)[4], const Vector& added) const {
    Vector out;
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = finish[e].whole(shape, sum[e], 1, adds(shape) ? to_float(added.v[e]) : -0.f);
    activate(shape, v);
#pragma unroll
    for (int e = 0; e < 4; ++e) out.v[e] = from_float<data_t>(v[e]);
    return out;
  }
  DEVICE bool writes(int place) const { return place >= 0 && count > 0; }
  DEVICE void store(const DensePhase& shape, int place, const float (&sum)[4], const data_t* residual, data_t* y) const {
    if (!writes(place)) return;
    const long long at = place * shape.rows + first;
    Vector added = {};
    if (adds(shape) && shape.wide) added = *(const Vector*)(residual + at);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (adds(shape) && !shape.wide && e < count) added.v[e] = residual[at + e];
    const Vector out = finished(shape, sum, added);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!shape.wide && e < count) y[at + e] = out.v[e];
    if (shape.wide) store_word(y + at, *(const word<Vector>*)&out);
  }
};

#if MOMENTS
// The moments of a chunk: a lane has the channel `channel` of its warp's 16 pixels, and one of the consumer's warps adds up those of all four.
// `noted`: [warp][mean, squares][channel], another one for each second chunk, so that one barrier a chunk is enough.
DEVICE void note_moments(const float* staging, const DensePhase& shape, const Tile& of, int chunk, int channel, float* noted, const data_t* scale,
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
#pragma unroll
  for (int row = 0; row < 16; ++row)
    if (row < count) own.add(value(row) - first);
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

// A consumer's sums of a tile, by way of its warps' staging tiles.
DEVICE void store_sums(const float (&sum)[BLOCK_N / 2], const DensePhase& shape, const Tile& of, float* staging, [[maybe_unused]] float* noted,
                       const data_t* scale, const data_t* bias, const data_t* residual, data_t* y, [[maybe_unused]] float* moments) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own = place_of(shape, of.pixel + 16 * warp + lane % 16);
  auto place = [&](int i) { return __shfl_sync(~0u, own, 4 * i + lane / 8); };  // of the pixel of which this lane writes four channels of a chunk
  Vector added[2][4] = {};  // of a chunk and of the next one
  auto load_added = [&](int chunk) {
    const int channel = of.channel + chunk * CHUNK + 4 * (lane % 8);
    if (TOGETHER > 1 && adds(shape) && shape.wide && chunk < CHUNKS)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int to = place(i);
        if (to >= 0 && channel < (int)shape.rows) added[chunk % 2][i] = *(const Vector*)(residual + (to * shape.rows + channel));
      }
  };
  load_added(0);
  for_all<CHUNKS>([&](auto chunk) {
    constexpr int base = decltype(chunk)::value * CHUNK;
    const Four four(shape, of.channel + base + 4 * (lane % 8), scale, bias);
    load_added(base / CHUNK + 1);
    __syncwarp();  // the last chunk has been read
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * (base / 8 + i) + 2 * half;
        *(float2*)(staging + (lane / 4 + 8 * half) * PITCH + 8 * i + 2 * (lane % 4)) = make_float2(sum[at], sum[at + 1]);
      }
    __syncwarp();
    auto staged = [&](int i) { return *(const float4*)(staging + (4 * i + lane / 8) * PITCH + 4 * (lane % 8)); };
    if (TOGETHER > 1 && shape.wide) {
#pragma unroll
      for (int i = 0; i < 4; i += TOGETHER) {
        float4 v[TOGETHER];
        Vector out[TOGETHER];
        int to[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
          v[j] = staged(i + j);
          to[j] = place(i + j);
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) out[j] = four.finished(shape, {v[j].x, v[j].y, v[j].z, v[j].w}, added[base / CHUNK % 2][i + j]);
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j)
          if (four.writes(to[j])) store_word(y + (to[j] * shape.rows + four.first), *(const word<Vector>*)&out[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 v = staged(i);
        four.store(shape, place(i), {v.x, v.y, v.z, v.w}, residual, y);
      }
    }
#if MOMENTS
    note_moments(staging, shape, of, base / CHUNK, of.channel + base + lane, noted + base / CHUNK % 2 * 8 * CHUNK, scale, bias, moments);
#endif
  });
}

#if CLUSTER > 1
// This block's rows of the tile, of which all blocks have left their sums.
DEVICE void add_parts(const DensePhase& shape, const Tile& of, uint32_t sums, const data_t* scale, const data_t* bias, const data_t* residual,
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

// The products of a stage; `fresh` begins new sums.
DEVICE void multiply(float (&sum)[BLOCK_N / 2], uint32_t a, uint32_t b, bool fresh) {
  const uint64_t x = wgmma_descriptor<128>(a), w = W_MN_MAJOR ? wgmma_turned_descriptor(b) : wgmma_descriptor<128>(b);
#pragma unroll
  for (int k = 0; k < STEPS; ++k) wgmma(sum, x + 2 * k, w + (W_MN_MAJOR ? 16 * 128 / 16 : 2) * k, !(fresh && k == 0));
}

DEVICE void consume(const Shapes& shapes, const Ring& ring, [[maybe_unused]] float* sums, [[maybe_unused]] float* staging, const data_t* scale,
                    const data_t* bias, const data_t* residual, data_t* y, [[maybe_unused]] float* moments) {
  const int consumer = threadIdx.x / 128;
  Position at;
  float sum[BLOCK_N / 2];
  for (int tile = first_tile(), tiles = all_tiles(shapes); tile < tiles; tile = next_tile(tile)) {
    const Tile of(shapes, tile);
    const DensePhase& shape = shapes.of[of.phase];
    const Range range(shape);
    auto give_back = [&] {  // the stage before
      if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + 8 * ((at.stage + STAGES - 1) % STAGES));
    };
    for (int step = range.first; step < range.last; ++step) {
      const uint32_t stage = ring.stages + at.stage * STAGE_BYTES;
      barrier_wait(ring.full + 8 * at.stage, at.parity);
      wgmma_fence();
      multiply(sum, stage + consumer * 64 * 128, stage + A_BYTES, step == range.first);
      wgmma_commit();
      wgmma_wait<1>();  // the stage before this one has been read
      if (step > range.first) give_back();
      at.next();
    }
    wgmma_wait<0>();
    wgmma_arrived(sum);
    const bool any = range.first < range.last;
    if (any) give_back();
    const float part = lost_in(STEPS * (range.last - range.first));
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      sum[i] = any ? sum[i] : 0;
      if (TYPE == 32) sum[i] += give_back_lost(sum[i], part);  // the rounding of 16 bits hides it
    }
#if CLUSTER > 1
    named_barrier(1, CONSUMER_THREADS);  // the ring has been read
    leave_sums<SUMS_PITCH>(sum, sums);
    cluster_barrier();
    add_parts(shape, of, shared_address(sums), scale, bias, residual, y);
#else
    float* const noted = staging + 4 * CONSUMERS * 16 * PITCH + consumer * 16 * CHUNK;
    store_sums(sum, shape, of, staging + threadIdx.x / 32 * (16 * PITCH), noted, scale, bias, residual, y, moments);
#endif
  }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, BLOCK_M == 64 ? 2 : 1)
    dense_nhwc_sm90(const __grid_constant__ Maps maps_x, const __grid_constant__ CUtensorMap map_w, const data_t* __restrict__ bias,
                    const data_t* __restrict__ scale, const data_t* residual, data_t* __restrict__ y,
#if MOMENTS
                    float* __restrict__ moments,
#endif
                    const __grid_constant__ Shapes shapes) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  Ring ring;
  ring.stages = (shared_address(dynamic) + 1023) & ~1023u;  // swizzle patterns follow absolute addresses
  ring.full = shared_address(barriers);
  ring.empty = ring.full + 8 * STAGES;
  float* const sums = (float*)(dynamic + (ring.stages - shared_address(dynamic)));
  float* const staging = sums + STAGES * STAGE_BYTES / 4;
#if !MOMENTS
  float* const moments = nullptr;
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 4 * CONSUMERS);
    }
    barrier_init_done();
  }
  if (threadIdx.x == CONSUMER_THREADS) {
    prefetch_map(&map_w);
    for (int phase = 0; phase < PHASES; ++phase) prefetch_map(maps_x.of + phase);
  }
  __syncthreads();
  AFTER_LAST_LAUNCH
  if (threadIdx.x < CONSUMER_THREADS) {
    consume(shapes, ring, sums, staging, scale, bias, residual, y, moments);
  } else {
    if (threadIdx.x == CONSUMER_THREADS) produce(maps_x, &map_w, shapes, ring);
#if CLUSTER > 1
    __syncwarp();
    cluster_barrier();
#endif
  }
#if CLUSTER > 1
  cluster_barrier();  // shared memory must outlive what other blocks read of it
#endif
}
