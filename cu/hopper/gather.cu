// gather.cu: the convolutions of hopper/dense.cu, for pixels whose channels are no multiple of 128 bytes: gemm k has no gaps between taps.
//
//   y[pixel, k] = sum over taps and c of x[pixel + tap, c] * w[k, tap, c], and finish.cuh
//   gemm m: pixel (n,o,p,q) of the batch | gemm n: output channel | gemm k: (tap, c), c fastest, in stages of 128 bytes
//
// A tensor load fetches one tap's channels and fills up a row of 128 bytes with zeros. Here threads copy instead: a stage's row is 128
// contiguous bytes of (tap, c), whichever taps they belong to. So 24 channels of 3x3 taps in 16 bits are 4 stages instead of 9.
//
// Mapping  block: tiles of BLOCK_M pixels x BLOCK_N channels. A block has a consumer warpgroup for each 64 pixels, and behind them a warp for each
//          16 pixels, which copies x. The first thread of these also loads w. Blocks are persistent, unless a cluster shares a tile.
// Shared   as in hopper/dense.cu. A stage is full when w and the parts of all copying warps have arrived.
// x        Threads copy COPY bytes of one tap at once: 16, or 4 if a tap's bytes are no multiple of 16. Neighbouring lanes copy
//          neighbours of a row. They write zeros where a tap lies outside x. A copying warp has 16 rows of each stage, and some stages under way.
//          It tells the consumers what has arrived, and they fence it for wgmma. For TF32 they first round it in its place, since wgmma truncates.
// w        rows of gemm k, loaded by TMA, as w lies or as transpose_filter.cu made it.
// Rows     If no tap lies outside of a row of x, and taps are neighbours, a row of the filter counts as one tap with the channels of all its taps.
// Cluster  as in hopper/dense.cu.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/gather.cu
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define STAGES 6
#define TYPE 17     // of the arrays: 32 float, 16 half, 17 bfloat16
#define COPY 16     // bytes
#define CLUSTER 1   // blocks that share a tile
#endif
#include "core/shapes.cuh"

// The arguments. by_n is the divisor n, prepared (division.cuh).
struct GatherPhase : LoadedPixels, WrittenPixels, Finishing {
  long long tiles, tiles_n, by_tiles_n;                     // all tiles; those along channels
  long long blocks, part;                                   // stages of a sum, and of one of CLUSTER parts
  long long rows, by_rows;                                  // output channels
  long long copies, tap_copies, by_tap_copies;              // copies of a pixel's gemm k; of a tap's channels
  long long tap_t, tap_r, by_tap_r, tap_s, by_tap_s;        // taps along each axis, 31 at most in all
  long long dilation_d, dilation_h, dilation_w;             // offset in x from one tap to the next
  long long depth, height, width, channels;                 // size of x
  long long pixels;                                         // of y
  long long store_mode;                                     // how channels of y are written: StoreMode
};
typedef GatherPhase Phase;
#include "mma/async_copy.cuh"
#include "hopper/pixel_tiles.cuh"

constexpr int COPYING = 2 * BLOCK_M, THREADS = CONSUMER_THREADS + COPYING;
constexpr int LANES = 128 / COPY, AT_ONCE = 32 / LANES;         // copies of a row; rows that a warp copies at once
constexpr int ROWS = 16, PASSES = ROWS / AT_ONCE;               // rows of a warp in a stage
constexpr int EACH = COPY / (int)sizeof(data_t);                // elements of a copy
constexpr int UNDER_WAY = STAGES < 4 ? STAGES - 2 : STAGES / 2;  // a warp's stages that have not arrived: consumers keep one stage until the next is there
static_assert(COPY == 16 || COPY == 4, "copies of 16 bytes, or single words");
static_assert(STAGES >= 2, "a ring");

// ---- the copying warps

// Copies COPY bytes from `from`, or zeros, to `further` bytes behind `to`. All that a thread copies to a stage is one group.
template <int further> DEVICE void copy(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0 + %1], [%2], %3, %4;" ::"r"(to), "n"(further), "l"(from), "n"(COPY), "r"(there ? COPY : 0) : "memory");
}

// A lane's copies of a stage.
struct Lane {
  int warp, chunk, first;  // which COPY bytes of a row; the first row
  DEVICE Lane() : warp((threadIdx.x - CONSUMER_THREADS) / 32), chunk(threadIdx.x % LANES), first(warp * ROWS + threadIdx.x % 32 / LANES) {}
  // Offset in a stage of the lane's copy in the row `further` rows behind its first: 16-byte pieces are swizzled over eight rows, as wgmma
  // wants them.
  DEVICE uint32_t place(int further) const {
    const int row = first + further;
    return row * 128 + (chunk * COPY ^ row % 8 * 16);
  }
};

// Bit i is set if tap i of an axis lies inside x, for a pixel whose first tap is at `at`.
DEVICE uint32_t taps_inside(int at, int size, int taps, int step) {
  uint32_t met = 0;
  for (int tap = 0; tap < taps; ++tap) met |= (uint32_t)((unsigned)(at + tap * step) < (unsigned)size) << tap;
  return met;
}

// The offsets in x of a lane's rows' pixels, at tap 0, and the taps that lie inside x: bits of s, then of r, then of t.
struct Rows {
  int element[PASSES];
  uint32_t inside[PASSES];
  DEVICE Rows(const Phase& shape, const Lane& lane, int pixel) {
    const int own = pixel + lane.warp * ROWS + threadIdx.x % ROWS;  // a lane finds one row's pixel, and tells the others
    const LoadBase base(shape, own);
    const int at = (((base.image * (int)shape.depth + base.d) * (int)shape.height + base.h) * (int)shape.width + base.w) * (int)shape.channels;
    const int s = (int)shape.tap_s, r = (int)shape.tap_r;
    uint32_t met = taps_inside(base.w, (int)shape.width, s, (int)shape.dilation_w);
    met |= taps_inside(base.h, (int)shape.height, r, (int)shape.dilation_h) << s;
    met |= taps_inside(base.d, (int)shape.depth, (int)shape.tap_t, (int)shape.dilation_d) << (s + r);
    if (own >= (int)shape.pixels) met = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int from = threadIdx.x % 32 / LANES + pass * AT_ONCE;
      element[pass] = __shfl_sync(~0u, at, from);
      inside[pass] = __shfl_sync(~0u, met, from);
    }
  }
};

DEVICE void hand_over(const Ring& ring, Ring::Position& at) {
  __syncwarp();  // all lanes' copies have arrived
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.arrived(at));
  at.next();
}

DEVICE void produce(const data_t* x, const CUtensorMap* map_w, const Shapes& shapes, const Ring& ring) {
  const Lane lane;
  const Phase& shape = shapes.of[0];
  Ring::Position at, arriving;
  int under_way = 0;
  const StageRange range = range_of(shape);
  const int height = (int)shape.height, width = (int)shape.width, tap_s = (int)shape.tap_s, tap_r = (int)shape.tap_r;
  for (int tile = first_tile(); tile < (int)shape.tiles; tile = next_tile(tile)) {
    const Tile of(shapes, tile);
    const Rows rows(shape, lane, of.pixel);
    for (int step = range.first; step < range.last; ++step) {
      const int number = step * LANES + lane.chunk;
      const Divided of_tap(number, shape.tap_copies, shape.by_tap_copies), of_row(of_tap.quotient, tap_s, shape.by_tap_s);
      const Divided of_slice(of_row.quotient, tap_r, shape.by_tap_r);
      const int w = of_row.rest * (int)shape.dilation_w, h = of_slice.rest * (int)shape.dilation_h, d = of_slice.quotient * (int)shape.dilation_d;
      const int further = ((d * height + h) * width + w) * (int)shape.channels + of_tap.rest * EACH;
      // the last bit is no tap's: behind the last tap nothing is copied
      const uint32_t tap = number < (int)shape.copies ? 1u << of_row.rest | 1u << (tap_s + of_slice.rest) | 1u << (tap_s + tap_r + of_slice.quotient) : 1u << 31;
      const uint32_t a = ring.stage(at), arrived = ring.arrived(at);
      ring.wait_empty(at);
      if (threadIdx.x == CONSUMER_THREADS) {
        barrier_expect(arrived, min(BLOCK_N, (int)shape.rows) * 128);
        load_box(a + A_BYTES, map_w, arrived, step * BLOCK_K, 0, of.channel);
      }
      for_all<PASSES>([&](auto number_of_pass) {
        constexpr int pass = decltype(number_of_pass)::value, row = pass * AT_ONCE;
        copy<row / 8 * 8 * 128>(a + lane.place(row % 8), x + (rows.element[pass] + further), (rows.inside[pass] & tap) == tap);
      });
      copies_commit();
      at.next();
      if (++under_way > UNDER_WAY) {
        copies_wait<UNDER_WAY>();
        hand_over(ring, arriving);
        --under_way;
      }
    }
  }
  copies_wait<0>();
  while (under_way-- > 0) hand_over(ring, arriving);
}

// ---- consumers fence what was copied; the copying warps don't, since their fence would wait for all copies under way

// Makes a consumer's rows of a stage readable for wgmma.
DEVICE void take_over(uint8_t* rows) {
#if TYPE == 32
#pragma unroll
  for (int i = 0; i < 64 * 128 / 16 / 128; ++i) {
    uint4* const at = (uint4*)rows + i * 128 + threadIdx.x % 128;
    const uint4 v = *at;
    *at = make_uint4(to_tf32(__uint_as_float(v.x)), to_tf32(__uint_as_float(v.y)), to_tf32(__uint_as_float(v.z)), to_tf32(__uint_as_float(v.w)));
  }
#else
  (void)rows;
#endif
  fence_for_bulk();
#if TYPE == 32
  named_barrier(2 + threadIdx.x / 128, 128);
#endif
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCK_M == 64 ? 2 : 1)
    hopper_gather(const __grid_constant__ CUtensorMap map_w, const data_t* __restrict__ x, const data_t* __restrict__ bias,
                     const data_t* __restrict__ scale, const data_t* residual, data_t* __restrict__ y, const __grid_constant__ Shapes shapes) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Ring ring(dynamic, barriers);
  float* const sums = (float*)(dynamic + (ring.stages - shared_address(dynamic)));
  float* const staging = sums + STAGES * STAGE_BYTES / 4;
  begin_block(ring, 1 + COPYING / 32, CONSUMERS, [&] { prefetch_map(&map_w); });
  if (threadIdx.x < CONSUMER_THREADS) {
    consume([&](int at) { take_over((uint8_t*)sums + at); }, shapes, ring, sums, staging, {scale, bias, residual, y, nullptr});
  } else {
    produce(x, &map_w, shapes, ring);
    await_cluster_sums();
  }
  cluster_sync_at_exit();
}
