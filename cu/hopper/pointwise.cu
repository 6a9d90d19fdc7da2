// pointwise.cu: 1x1 convolutions of float32 arrays as they lie in memory, and their gradients, on Hopper's tensor cores in TF32.
//
//   D[row, column] = sum over k of A[row, k] * B[column, k]
//                         row             column            k                   A     B
//   fprop and dgrad, NCHW pixel           channel of y      channel of x        x     the filter, split by split_filter
//   the same, NHWC        pixel           channel of y      channel of x        x     the same
//   WGRAD                 channel of dy   channel of x      pixel of all images dy, x: as they lie
//
// TF32 takes a float32 number's exponent and the first 11 bits of it, so nothing has to be scaled: Inf, NaN and 1e-38 are numbers
// like others. LIMBS = 2, fp32 accuracy: a number is rounded to TF32, and so is the rest; the product of two rests is left out
// (2^-24). The products of first limbs are added to fp32 registers every 32 of k, because the tensor core's sum truncates; the two cross
// products stay in the tensor core. Method: Ootomo and Yokota, 2022 (doi 10.1177/10943420221090256). LIMBS = 1: numbers rounded to TF32.
//
// Mapping  block: persistent, one a multiprocessor; takes tiles blockIdx.x, + gridDim.x, ... of 128 * BLOCKS rows x BLOCK_N columns.
//          Tile order, fastest first: columns, rows, split: blocks that share A run together.
//          warpgroup 0: one thread, the producer. Two consumer warpgroups of 64 * BLOCKS rows; each warp has 16 * BLOCKS of them. The consumers are
//          busy all the time, splitting numbers. With the producer behind them, long sums took 4% longer (H200, 2026-11-29): so it is not on run_tiles.
// A        goes through registers, because wgmma cannot transpose 32-bit operands in shared memory, and so it is split without being written once more.
// Shared   a ring of STAGES stages of 32 of k: A, [warp][16 * BLOCKS rows][32 k], NCHW [warp][32 k][32 pixels]; B, [limb][BLOCK_N][32 k].
//          Rows of 128 bytes, swizzled. full[stage]: the bytes have arrived; empty[stage]: the 8 consumer warps have read them.
//          WGRAD: the consumers make the second limb of B, or round B, once it has arrived. Forward, LIMBS = 1: the load rounds it.
//          NCHW: `busy` of the warps have a box each, so many that no round of tiles is nearly empty; the others multiply what lies there.
// NCHW     a warp's 32 pixels are neighbours in an image, and so are a thread's four. So 8 lanes write 128 bytes of a channel of y, 16 bytes
//          each: lane / 4 selects the four pixels, lane % 4 the channel. Which row of the product a pixel is does not matter.
// Split    WGRAD cuts k, many pixels for few sums: each part goes to a workspace [splits][size of dw]; direct/reduce.cu adds them in order.
// Moments  for a batch norm behind it (batch_norm.cu): for each channel, over a warp's pixels, the mean of y and the sum of squared deviations:
//          moments[slice][2][channel].
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/pointwise.cu
#ifndef BLOCK_N
#define BLOCK_N 64
#define BLOCKS 2     // of 16 rows, of a warp; 2 for NCHW
#define STAGES 4
#define LIMBS 2
#define WGRAD 0
#define NHWC 0
#define MOMENTS 0
#endif
#include "core/finish.cuh"
#include "hopper/skeleton.cuh"

constexpr bool PIXEL_QUADS = !WGRAD && !NHWC;
constexpr int CONSUMERS = 2, WARPS = 4 * CONSUMERS, WARP_ROWS = 16 * BLOCKS, ROWS = WARPS * WARP_ROWS;
constexpr int A_WARP = WARP_ROWS * 128, A_BYTES = WARPS * A_WARP, B_BYTES = BLOCK_N * 128, STAGE_BYTES = A_BYTES + LIMBS * B_BYTES;
constexpr int LOADED_BYTES = A_BYTES + (WGRAD ? 1 : LIMBS) * B_BYTES;
static_assert(!PIXEL_QUADS || BLOCKS == 2, "a thread's four rows are four neighbouring pixels");
static_assert(BLOCK_N % 32 == 0 && BLOCK_N <= 128, "see wgmma_tf32");

// The arguments of a product. by_n is the divisor n, prepared (division.cuh).
struct PointwiseProduct : Finishing {
  long long tiles, across, by_across, down, by_down;  // tiles: all, along the columns, along the rows
  long long steps, each;                              // stages of k; the most that a split takes
  long long rows, columns;                            // real rows and columns; NCHW: images instead of rows
  long long boxes, by_boxes, plane;                   // runs of 32 pixels of an image, and its pixels
  long long busy;                                     // NCHW: warps of a tile that have a box
  long long row_step, column_step, size;              // elements of y from one row, and from one column, to the next; size of y
  long long pairs;                                    // whether neighbouring columns are neighbours in y, at multiples of 2
};

struct Tile {
  int row, column, split, first, last;  // in tiles, but for column; stages of k: [first, last)
  DEVICE Tile(const PointwiseProduct& shape, int tile) {
    const Divided along(tile, shape.across, shape.by_across), part(along.quotient, shape.down, shape.by_down);
    column = along.rest * BLOCK_N;
    row = part.rest;
    split = part.quotient;
    first = min(split * (int)shape.each, (int)shape.steps);
    last = min(first + (int)shape.each, (int)shape.steps);
  }
};
typedef StageRing<STAGES, STAGE_BYTES> Ring;
typedef Ring::Position Position;

DEVICE void produce(const CUtensorMap* map_a, const CUtensorMap* map_b, const PointwiseProduct& shape, const Ring& ring) {
  prefetch_maps(map_a, map_b);
  const int busy = (int)shape.busy, boxes = (int)shape.boxes;
  Position at;
  for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x) {
    const Tile of(shape, tile);
    const Divided first(of.row * busy, boxes, shape.by_boxes);  // NCHW: image and box
    fill_stages(ring, at, of.first, of.last, [&](int step, uint32_t a, uint32_t arrived) {
      const uint32_t b = a + A_BYTES;
      barrier_expect(arrived, LOADED_BYTES - (PIXEL_QUADS ? (WARPS - busy) * A_WARP : 0));
      if (WGRAD) {
        const Divided box(step, boxes, shape.by_boxes);
        load_box(a, map_a, arrived, box.rest * 32, of.row * ROWS, box.quotient);
        load_box(b, map_b, arrived, box.rest * 32, of.column, box.quotient);
      } else {
        if (NHWC) {
          load_box(a, map_a, arrived, step * 32, of.row * ROWS, 0);
        } else {
          int image = first.quotient, box = first.rest;
#pragma unroll
          for (int warp = 0; warp < WARPS; ++warp)
            if (warp < busy) {
              load_box(a + warp * A_WARP, map_a, arrived, box * 32, step * 32, image);
              if (++box == boxes) {  // no division here: one for each box made these layers a fifth slower or more
                box = 0;
                ++image;
              }
            }
        }
#pragma unroll
        for (int limb = 0; limb < LIMBS; ++limb) load_box(b + limb * B_BYTES, map_b, arrived, step * 32, of.column, limb);
      }
    });
  }
}

#include "hopper/pointwise_limbs.cuh"

// ---- a tile's sums

typedef float Sums[BLOCKS][BLOCK_N / 2];

// NCHW: which four of a warp's 32 pixels lanes 4 r to 4 r + 3 have: in this order 8 lanes use every bank once.
DEVICE int four(int r) { return r % 2 * 4 + r / 2; }

// Loads the thread's elements of A for 8 of k: a[block] as wgmma_tf32 wants them.
DEVICE void load_a(float (&a)[BLOCKS][4], const uint8_t* of_warp, int k) {
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if constexpr (PIXEL_QUADS) {
      const float4 v = *(const float4*)(of_warp + (k + c + 4 * j) * 128 + ((four(r) ^ (c + 4 * j)) << 4));
      a[0][2 * j] = v.x;
      a[0][2 * j + 1] = v.y;
      a[1][2 * j] = v.z;
      a[1][2 * j + 1] = v.w;
    } else {
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          a[block][2 * j + half] = *(const float*)(of_warp + (16 * block + 8 * half + r) * 128 + (((k / 4 + j) ^ r) << 4) + 4 * c);
    }
  }
}

// `stages`: the beginning of the ring.
DEVICE void multiply(Sums& total, const Tile& of, uint8_t* stages, const Ring& ring, Position& at) {
  [[maybe_unused]] Sums high, cross;
  Sums& main = LIMBS == 2 ? high : total;
  clear(total);
  if (LIMBS == 2) clear(cross);
  for (int step = of.first; step < of.last; ++step) {
    ring.wait_full(at);
    uint8_t* const stage = stages + at.stage * STAGE_BYTES;
#if WGRAD
    make_limbs(stage + A_BYTES);
#endif
    const uint8_t* const of_warp = stage + (threadIdx.x / 32 - 4) * A_WARP;
    const uint64_t b = wgmma_descriptor<128>(shared_address(stage) + A_BYTES);
    constexpr int AT_ONCE = LIMBS == 1 ? 32 : MOMENTS || WGRAD ? 8 : 32 / BLOCKS;  // of k: as many as registers hold
#pragma unroll
    for (int first = 0; first < 32; first += AT_ONCE) {
      uint32_t a[AT_ONCE / 8][BLOCKS][4];
      [[maybe_unused]] uint32_t low[AT_ONCE / 8][BLOCKS][4];
#pragma unroll
      for (int i = 0; i < AT_ONCE / 8; ++i) {
        float v[BLOCKS][4];
        load_a(v, of_warp, first + 8 * i);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const Tf32Pair pair = pair_of_a(v[block][e]);
            a[i][block][e] = LIMBS == 2 ? pair.high : to_tf32(v[block][e]);
            low[i][block][e] = pair.low;
          }
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < AT_ONCE / 8; ++i)
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          const uint64_t b_high = b + (first + 8 * i) * 4 / 16;
          wgmma_tf32(main[block], a[i][block], b_high, LIMBS == 1 || first + i > 0);
          if constexpr (LIMBS == 2) {
            wgmma_tf32(cross[block], low[i][block], b_high, true);
            wgmma_tf32(cross[block], a[i][block], b_high + B_BYTES / 16, true);
          }
        }
      wgmma_commit();
      wgmma_wait<0>();
    }
    wgmma_arrived(main);
    ring.give_back(at);
    at.next();
    if (LIMBS == 2) each(total, main, [](float& sum, float more) { sum += more; });
  }
  if constexpr (LIMBS == 2) {
    wgmma_arrived(cross);
    add_cross(total, cross);
  } else {
    end_sums<true>(total, true, lost_in(4 * (of.last - of.first)));
  }
}

#include "hopper/pointwise_store.cuh"

constexpr int THREADS = 128 * (1 + CONSUMERS);
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_pointwise(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const float* __restrict__ bias,
                   const float* __restrict__ scale, const float* residual, float* __restrict__ y,
#if MOMENTS
                   float* __restrict__ moments,
#endif
                   const __grid_constant__ PointwiseProduct shape) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const Ring ring(dynamic, barriers);
  uint8_t* const stages = dynamic + (-shared_address(dynamic) & 1023);
  if (threadIdx.x == 0) ring.init(1, WARPS);
  __syncthreads();
  AFTER_LAST_LAUNCH
#if !MOMENTS
  float* const moments = nullptr;
#endif
  if (threadIdx.x < 128) {
    registers_down<24>();
    if (threadIdx.x == 0) produce(&map_a, &map_b, shape, ring);
  } else {
    registers_up<240>();
    Position at;
    for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x) {
      const Tile of(shape, tile);
      Sums sum;
      multiply(sum, of, stages, ring, at);
      store(sum, of, shape, bias, scale, residual, moments, y);
    }
  }
}

// ---- the filter

struct SplitFilter {
  long long rows, channels, padded, by_padded;  // channels of the filter, and of its limbs
  long long row_step, channel_step;  // elements of w from one row, and from one channel, to the next
};

// thread -> one element of the limbs [limb][row][channel]; elements without a channel are zeros
extern "C" __global__ void __launch_bounds__(256) split_filter(const float* __restrict__ w, uint32_t* __restrict__ limbs, const SplitFilter filter) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const int i = blockIdx.x * 256 + threadIdx.x, row = divided(i, filter.by_padded), channel = i - row * (int)filter.padded;
  if (row >= (int)filter.rows) return;
  const Tf32Pair split = pair_of_b(channel < (int)filter.channels ? w[row * filter.row_step + channel * filter.channel_step] : 0);
  limbs[i] = split.high;
  if (LIMBS == 2) limbs[filter.rows * filter.padded + i] = split.low;
}
