// gather_nhwc_sm90.cu: as dense_nhwc_sm90.cu, for pixels whose channels are no multiple of 128 bytes: gemm k has no gaps between the taps.
//
//   y[pixel, k] = sum over taps and c of x[pixel + tap, c] * w[k, tap, c], and finish.cuh
//   gemm m: pixel (n,o,p,q) of the batch | gemm n: output channel | gemm k: (tap, c), c fastest, in stages of 128 bytes
//
// A tensor load brings a row of one tap's channels and fills what a row of 128 bytes has more. Here threads copy: a stage's row is 128 bytes of
// (tap, c) that follow one another, whatever the taps they belong to. 24 channels of 3x3 taps in 16 bits are 4 stages instead of 9.
//
// Mapping  block: tiles of BLOCK_M pixels x BLOCK_N channels. A consumer warpgroup for each 64 pixels, and behind them four warps that copy x.
//          The first of their threads asks for w. Persistent, unless a cluster shares a tile.
// Shared   as in dense_nhwc_sm90.cu. full[stage]: the copying warps' parts have arrived, and w.
// x        copies of COPY bytes, which belong to one tap: 16, or 4 where a tap's bytes are no multiple of 16. Neighbouring lanes copy neighbours of
//          a row. Where a tap meets no pixel, zeros. A warp has BLOCK_M / 4 rows of a stage, and some stages under way. What has arrived it fences
//          for wgmma, and says so. TF32: the copying thread rounds what has arrived in its place, since wgmma cuts off.
// w        rows of gemm k by TMA, as it lies or as transpose_filter.cu made it.
// Rows     where no tap lies outside of a row of x, and taps follow one another, a row of the filter is one tap of all their channels.
// Cluster  as in dense_nhwc_sm90.cu.
//
// By hand: nvcc -cubin -arch=sm_90a cu/gather_nhwc_sm90.cu
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define STAGES 6
#define TYPE 17     // of the arrays: 32 float, 16 half, 17 bfloat16
#define COPY 16     // bytes
#define CLUSTER 1   // blocks that share a tile
#endif

// What the kernel is told. by_n is the divisor n, prepared (division.cuh).
struct GatherPhase {
  long long tiles, tiles_n, by_tiles_n;                     // all; along channels
  long long blocks, part;                                   // stages of a sum, and of one of CLUSTER parts
  long long rows, by_rows;                                  // output channels
  long long copies, tap_copies, by_tap_copies;              // of a pixel's gemm k; of a tap's channels
  long long tap_r, by_tap_r, tap_s, by_tap_s;               // taps along r and s
  long long dilation_d, dilation_h, dilation_w;             // offset in x from one tap to the next
  long long depth, height, width, channels;                 // of x
  long long pixels;                                         // of y
  long long stride_d, stride_h, stride_w;                   // x of pixel (o, p, q), tap 0: o * stride_d + low_d and so on
  long long low_d, low_h, low_w;
  long long load_plane, by_load_plane, load_pq, by_load_pq, load_q, by_load_q;  // pixels of an image, a slice and a row
  long long plane, by_plane, pq, by_pq, q, by_q;            // the same, as y is written
  long long out_size, out_base, out_d, out_h, out_w;        // pixels of an image of y, the first one, and from one to the next
  long long wide;                                           // how channels of y are written: Wide
  long long has_bias, has_scale, has_residual, activation, slope;         // what finishes a sum; slope: a float's bits
};
typedef GatherPhase Phase;
#include "pixel_tiles.cuh"

constexpr int COPYING = 128, THREADS = CONSUMER_THREADS + COPYING;
constexpr int LANES = 128 / COPY, AT_ONCE = 32 / LANES;     // copies of a row; rows that a warp copies at once
constexpr int ROWS = BLOCK_M / 4, PASSES = ROWS / AT_ONCE;  // of a warp, in a stage
constexpr int EACH = COPY / (int)sizeof(data_t);            // elements of a copy
constexpr int UNDER_WAY = STAGES < 4 ? STAGES - 2 : STAGES / 2;  // stages of a warp that have not arrived: consumers keep one until the next is there
static_assert(COPY == 16 || COPY == 4, "copies of 16 bytes, or single words");
static_assert(STAGES >= 2 && ROWS <= 32, "a lane finds a row's pixel");

// ---- the copying warps

// COPY bytes from `from`, or zeros; all that this thread copies to a stage is a group.
DEVICE void copy(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(COPY), "r"(there ? COPY : 0) : "memory");
}

#if TYPE == 32
DEVICE uint32_t rounded(float v) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return bits;
}
// What this thread copied to `at`.
DEVICE void round_copy(uint8_t* at) {
  alignas(COPY) uint32_t v[EACH];
  *(word<decltype(v)>*)v = *(const word<decltype(v)>*)at;
#pragma unroll
  for (int e = 0; e < EACH; ++e) v[e] = rounded(__uint_as_float(v[e]));
  *(word<decltype(v)>*)at = *(const word<decltype(v)>*)v;
}
#endif

// The rows of a stage that a lane copies some of.
struct Lane {
  int warp, chunk, first;  // which COPY bytes of a row; the first row
  DEVICE Lane() : warp((threadIdx.x - CONSUMER_THREADS) / 32), chunk(threadIdx.x % LANES), first(warp * ROWS + threadIdx.x % 32 / LANES) {}
  // bytes from the stage to a pass's copy: 16 bytes have changed places within eight rows, as wgmma wants them
  DEVICE uint32_t place(int pass) const {
    const int row = first + pass * AT_ONCE, at = chunk * COPY;
    return row * 128 + (at ^ row % 8 * 16);
  }
};

// Where the pixels of a lane's rows lie in x, of tap 0: the element, d, and h and w together, which are less than 2^15.
struct Rows {
  int element[PASSES], d[PASSES], hw[PASSES];
  DEVICE Rows(const Phase& shape, const Lane& lane, int pixel) {
    const int own = pixel + lane.warp * ROWS + threadIdx.x % 32;  // a lane finds one row's, and tells the others
    const LoadBase base(shape, own);
    const int all_channels = (int)shape.channels, outside = own < (int)shape.pixels ? 0 : -(1 << 29);  // which no tap brings inside
    const int at = (((base.image * (int)shape.depth + base.d) * (int)shape.height + base.h) * (int)shape.width + base.w) * all_channels;
    const int both = (int)((uint32_t)base.h << 16 | ((uint32_t)base.w & 0xffff));
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int from = threadIdx.x % 32 / LANES + pass * AT_ONCE;
      element[pass] = __shfl_sync(~0u, at, from);
      d[pass] = __shfl_sync(~0u, base.d + outside, from);
      hw[pass] = __shfl_sync(~0u, both, from);
    }
  }
};

// A stage that has arrived: it is wgmma's. `stages` is the ring.
DEVICE void hand_over(const Ring& ring, [[maybe_unused]] uint8_t* stages, Position& at, [[maybe_unused]] const Lane& lane) {
#if TYPE == 32
  __syncwarp();  // neighbours' copies have arrived too
  uint8_t* const a = stages + at.stage * STAGE_BYTES;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) round_copy(a + lane.place(pass));
#endif
  fence_for_bulk();
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.full + 8 * at.stage);
  at.next();
}

DEVICE void produce(const data_t* x, const CUtensorMap* map_w, const Shapes& shapes, const Ring& ring, uint8_t* stages) {
  const Lane lane;
  const Phase& shape = shapes.of[0];
  Position at, arriving;
  int under_way = 0;
  const Range range(shape);
  const int depth = (int)shape.depth, height = (int)shape.height, width = (int)shape.width;
  for (int tile = first_tile(); tile < (int)shape.tiles; tile = next_tile(tile)) {
    const Tile of(shapes, tile);
    const Rows rows(shape, lane, of.pixel);
    for (int step = range.first; step < range.last; ++step) {
      const uint32_t a = ring.stages + at.stage * STAGE_BYTES, arrived = ring.full + 8 * at.stage;
      barrier_wait(ring.empty + 8 * at.stage, at.parity ^ 1);
      if (threadIdx.x == CONSUMER_THREADS) {
        barrier_expect(arrived, min(BLOCK_N, (int)shape.rows) * 128);
        load_box(a + A_BYTES, map_w, arrived, step * BLOCK_K, 0, of.channel);
      }
      const int copy_number = step * LANES + lane.chunk;
      const Divided of_tap(copy_number, shape.tap_copies, shape.by_tap_copies), of_row(of_tap.quotient, shape.tap_s, shape.by_tap_s);
      const Divided of_slice(of_row.quotient, shape.tap_r, shape.by_tap_r);
      const int w = of_row.rest * (int)shape.dilation_w, h = of_slice.rest * (int)shape.dilation_h;
      const int d = copy_number < (int)shape.copies ? of_slice.quotient * (int)shape.dilation_d : -(1 << 29);
      const int element = ((of_slice.quotient * (int)shape.dilation_d * height + h) * width + w) * (int)shape.channels + of_tap.rest * EACH;
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const bool there = (unsigned)(rows.d[pass] + d) < (unsigned)depth && (unsigned)((rows.hw[pass] >> 16) + h) < (unsigned)height &&
                           (unsigned)((short)rows.hw[pass] + w) < (unsigned)width;
        copy(a + lane.place(pass), x + (there ? rows.element[pass] + element : 0), there);
      }
      commit_loads();
      at.next();
      if (++under_way > UNDER_WAY) {
        wait_for_loads<UNDER_WAY>();
        hand_over(ring, stages, arriving, lane);
        --under_way;
      }
    }
  }
  wait_for_loads<0>();
  while (under_way-- > 0) hand_over(ring, stages, arriving, lane);
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, BLOCK_M == 64 ? 2 : 1)
    gather_nhwc_sm90(const __grid_constant__ CUtensorMap map_w, const data_t* __restrict__ x, const data_t* __restrict__ bias,
                     const data_t* __restrict__ scale, const data_t* residual, data_t* __restrict__ y, const __grid_constant__ Shapes shapes) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  Ring ring;
  ring.stages = (shared_address(dynamic) + 1023) & ~1023u;  // swizzle patterns follow absolute addresses
  ring.full = shared_address(barriers);
  ring.empty = ring.full + 8 * STAGES;
  float* const sums = (float*)(dynamic + (ring.stages - shared_address(dynamic)));
  float* const staging = sums + STAGES * STAGE_BYTES / 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1 + COPYING / 32);
      barrier_init(ring.empty + 8 * i, 4 * CONSUMERS);
    }
    barrier_init_done();
  }
  if (threadIdx.x == CONSUMER_THREADS) prefetch_map(&map_w);
  __syncthreads();
  AFTER_LAST_LAUNCH
  if (threadIdx.x < CONSUMER_THREADS) {
    consume(shapes, ring, sums, staging, scale, bias, residual, y, nullptr);
  } else {
    produce(x, &map_w, shapes, ring, (uint8_t*)sums);
#if CLUSTER > 1
    __syncwarp();
    cluster_barrier();
#endif
  }
#if CLUSTER > 1
  cluster_barrier();  // shared memory must outlive what other blocks read of it
#endif
}
