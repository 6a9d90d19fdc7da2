// gathered_planes.cu: 1x1 convolutions of NCHW arrays as they lie, with any plane, stride and padding, on Hopper's tensor cores, and their dgrad.
// The arrays have 16 bits, or are float32 in TF32.
//
//   y[image, m, pixel] = sum over c of w[m, c] * x[image, c, pixel of x], and finish.cuh
//   gemm m: output channel | gemm n: pixel of y, of all images in their order | gemm k: input channel, in stages of 128 bytes
//
// Tensor loads need planes of a multiple of 16 bytes (hopper/planes.cu). Here threads load instead: planes may have any size, pixels may lie a stride
// apart, and tiles go on from one image to the next, so that planes of 7x7 fill them.
//
// Mapping  block: a tile of BLOCK_M channels x BLOCK_N pixels. CLUSTER blocks share a tile; each sums a part of gemm k. Tiles of the same pixels run
//          side by side. A block has a consumer warpgroup for each 64 channels, and behind them GROUPS groups of four producer warps, which fill stages
//          in turn. The first thread of a group also loads w. Two blocks of 64 channels share a multiprocessor.
// Shared   a ring of STAGES stages (ring.cuh): w, then x, a row of 128 bytes of gemm k for each channel and pixel, swizzled. When all is multiplied,
//          the sums take its place, rows of PITCH floats.
// x        A thread loads 16 bytes of gemm k of a pixel, number by number: neighbouring lanes have neighbouring pixels. It stores them at once. For TF32
//          it rounds them.
// w        by TMA: rows along gemm k, as a filter of fprop lies. W_TRANSPOSED, for dgrad: rows along the channels of y, which wgmma takes of 16-bit
//          operands. It does not take float32 so: then the threads that load x load w in the same way.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/gathered_planes.cu
#ifndef BLOCK_M
#define BLOCK_M 64
#define BLOCK_N 64
#define STAGES 6
#define TYPE 17     // of the arrays: 32 float, 16 half, 17 bfloat16
#define W_TRANSPOSED 0  // output channels of w are neighbours
#define CLUSTER 1   // blocks that share the sums of a tile
#define GROUPS 2    // of producer warps
#endif
#define WGMMA_N BLOCK_N
#define GATHERS_W (W_TRANSPOSED && TYPE == 32)
#include "core/cluster.cuh"
#include "core/finish.cuh"
#include "hopper/skeleton.cuh"

typedef element<TYPE> data_t;

constexpr int CONSUMERS = BLOCK_M / 64, CONSUMER_THREADS = 128 * CONSUMERS, THREADS = CONSUMER_THREADS + 128 * GROUPS;
constexpr int W_BYTES = 128 * BLOCK_M, X_BYTES = 128 * BLOCK_N, PITCH = BLOCK_N + 8, STEPS = 4;
constexpr int EACH = 16 / (int)sizeof(data_t), BLOCK_K = 8 * EACH;  // elements of 16 bytes, and of a stage
static_assert(BLOCK_M * PITCH * 4 <= STAGES * (W_BYTES + X_BYTES), "sums take the place of the ring");

// The arguments. by_n is the divisor n, prepared (division.cuh).
struct GatheredPlanesProduct : LoadedPixels, Finishing {
  long long tiles_m, by_tiles_m;                       // tiles along the channels
  long long steps, part;                               // stages of a sum, and of one of CLUSTER parts
  long long rows, channels;                            // channels of y, and of x
  long long depth, height, width, x_image, x_channel;  // size of x; its strides, in elements
  long long pixels;                                    // pixels of y, of all images
  long long has_dgrad_stride;  // dgrad with a stride: whether these pixels of x are divided by the following, and count only without a remainder
  long long dgrad_stride_d, by_dgrad_stride_d, dgrad_stride_h, by_dgrad_stride_h, dgrad_stride_w, by_dgrad_stride_w;
  long long y_image, y_channel;
  long long wide;   // whether pixels 2 i and 2 i + 1, and likewise rows of the filter, are neighbours in x and in w, at multiples of two
  long long pairs;  // whether pixels 2 i and 2 i + 1 are neighbours in y, at multiples of two
};

typedef StageRing<STAGES, W_BYTES + X_BYTES> Ring;

// ---- the producers

// 16 bytes of gemm k of one pixel, or of pixel `which` of two neighbours, as wgmma takes them.
#if TYPE == 32
typedef float number_t;
DEVICE float number_of(uint32_t v, int) { return __uint_as_float(v); }
DEVICE float number_of(uint2 v, int which) { return __uint_as_float(which ? v.y : v.x); }
template <class T> DEVICE uint4 packed(const T (&v)[EACH], int which) {
  auto own = [&](int e) { return to_tf32(number_of(v[e], which)); };
  return make_uint4(own(0), own(1), own(2), own(3));
}
#else
typedef uint16_t number_t;
template <class T> DEVICE uint4 packed(const T (&v)[EACH], int which) {
  auto two = [&](int e) { return __byte_perm(v[e], v[e + 1], which ? 0x7632 : 0x5410); };
  return make_uint4(two(0), two(2), two(4), two(6));
}
#endif

// What a thread has loaded of a stage and not stored yet: some 16-byte pieces of gemm k of one row, or of `wide` neighbouring rows, of `lines` rows.
template <int lines, int wide> struct Gather {
  typedef word<Vec<number_t, wide>> loaded_t;
  static constexpr int ACROSS = lines / wide, APART = 128 / ACROSS, TASKS = 8 / APART;
  loaded_t v[TASKS][EACH];
  static DEVICE int row() { return threadIdx.x % ACROSS * wide; }     // the first row
  static DEVICE int first() { return threadIdx.x % 128 / ACROSS; }  // the first of its 16-byte pieces
  // `from`: the row's first element of the stage; `step`: from one element to the next; `left`: real elements
  DEVICE void load(const number_t* from, int step, int left) {
    if (left >= BLOCK_K) load_some<true>(from, step, left);
    else load_some<false>(from, step, left);
  }
  template <bool whole> DEVICE void load_some(const number_t* from, int step, int left) {
#pragma unroll
    for (int i = 0; i < TASKS; ++i) {
      const int k = (first() + i * APART) * EACH;
      const number_t* at = from + k * step;
      asm volatile("" : "+l"(at));  // else the compiler would keep the addresses of all of them
#pragma unroll
      for (int e = 0; e < EACH; ++e) v[i][e] = whole || k + e < left ? *(const loaded_t*)(at + e * step) : loaded_t();
    }
  }
  // `there`: or zeros instead
  DEVICE void store(uint8_t* stage, bool there) const {
#pragma unroll
    for (int i = 0; i < TASKS; ++i)
#pragma unroll
      for (int j = 0; j < wide; ++j) {
        const int which = wide == 2 ? (threadIdx.x / 4 + j) % 2 : 0, own = row() + which;  // so that eight lanes' rows use all banks
        *(uint4*)(stage + own * 128 + ((first() + i * APART) ^ own % 8) * 16) = there ? packed(v[i], which) : make_uint4(0, 0, 0, 0);
      }
  }
};

// A pixel's offset in x; without `there` it reads zeros. Past the last pixel it is any offset: those sums are not stored.
struct Source {
  int element;
  bool there;
  DEVICE Source(const GatheredPlanesProduct& arg, int pixel, int wide = 1) {
    const LoadBase at(arg, min(pixel, (int)arg.pixels - wide));
    int d = at.d, h = at.h, w = at.w;
    there = true;
    if (arg.has_dgrad_stride) {
      const Divided of_d(d, arg.dgrad_stride_d, arg.by_dgrad_stride_d), of_h(h, arg.dgrad_stride_h, arg.by_dgrad_stride_h);
      const Divided of_w(w, arg.dgrad_stride_w, arg.by_dgrad_stride_w);
      there = of_d.rest == 0 && of_h.rest == 0 && of_w.rest == 0;
      d = of_d.quotient;
      h = of_h.quotient;
      w = of_w.quotient;
    }
    there = there && (unsigned)d < (unsigned)arg.depth && (unsigned)h < (unsigned)arg.height && (unsigned)w < (unsigned)arg.width;
    element = there ? at.image * (int)arg.x_image + (d * (int)arg.height + h) * (int)arg.width + w : 0;
  }
};

// A group's part: every GROUPS-th stage of gemm k from `begin` to `end`. Its next loads are under way while it waits for room.
template <int wide>
DEVICE void produce([[maybe_unused]] const CUtensorMap* map_w, [[maybe_unused]] const data_t* w, const data_t* x, const GatheredPlanesProduct& arg,
                    const Ring& ring, uint8_t* stages, int channel, int pixel, int begin, int end) {
  const int group = (threadIdx.x - CONSUMER_THREADS) / 128;
  Gather<BLOCK_N, wide> of_x;
  const Source source(arg, pixel + of_x.row(), wide);
  const number_t* const from = (const number_t*)x + source.element;
  const int step_x = (int)arg.x_channel, channels = (int)arg.channels;
#if GATHERS_W
  Gather<BLOCK_M, wide> of_w;
  const int step_w = (int)arg.rows;
  const number_t* const from_w = (const number_t*)w + min(channel + of_w.row(), step_w - wide);
#else
  const int blocks = min(((int)arg.rows - channel + 63) / 64, CONSUMERS);
#endif
  Ring::Position at;
  at.skip(group);
  auto load = [&](int step) {
    if (step >= end) return;
    const int first = step * BLOCK_K;
#if GATHERS_W
    of_w.load(from_w + first * step_w, step_w, channels - first);
#else
    if (threadIdx.x % 128 == 0) {
      ring.wait_empty(at);
      barrier_expect(ring.arrived(at), blocks * 64 * 128);
#pragma unroll
      for (int i = 0; i < CONSUMERS; ++i)
        if (i < blocks) {
          const int row = channel + 64 * i;
          load_box(ring.stage(at) + i * 64 * 128, map_w, ring.arrived(at), W_TRANSPOSED ? row : first, W_TRANSPOSED ? first : row, 0);
        }
    }
#endif
    of_x.load(from + first * step_x, step_x, channels - first);
  };
  load(begin + group);
  for (int step = begin + group; step < end; step += GROUPS) {
    uint8_t* const stage = stages + at.stage * (W_BYTES + X_BYTES);
    ring.wait_empty(at);
#if GATHERS_W
    of_w.store(stage, true);
#endif
    of_x.store(stage + W_BYTES, source.there);
    fence_for_bulk();  // wgmma reads shared memory as bulk copies do
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.arrived(at));
    at.skip(GROUPS);
    load(step + GROUPS);
  }
}

// ---- the consumers

DEVICE void consume(const Ring& ring, float* sums, int steps) {
  const int consumer = threadIdx.x / 128;
  float sums_of[1][BLOCK_N / 2], (&sum)[BLOCK_N / 2] = sums_of[0];
  clear(sum);
  Ring::Position at;
  multiply_stages<1>(ring, at, 0, steps, sums_of, [&](uint32_t stage, bool) {
    multiply_stage<TYPE, StageOperand<W_TRANSPOSED && !GATHERS_W>, StageOperand<false>>(sums_of, stage + consumer * 64 * 128, 0, stage + W_BYTES, false);
  });
  end_sums<TYPE == 32>(sum, true, lost_in(STEPS * steps));
  named_barrier(1, CONSUMER_THREADS);  // all stages have been read
  stage_accumulators<PITCH>(sum, sums);
}

// ---- from sums to y

// Stores the block's rows of sums from number `first` on. A thread has the same `wide` neighbouring pixels of some of them.
template <int wide> DEVICE void store(const GatheredPlanesProduct& arg, const float* sums, const int* places, int channel, int first, const data_t* scale,
                                      const data_t* bias, const data_t* residual, data_t* y) {
  constexpr int ACROSS = BLOCK_N / wide, DOWN = THREADS / ACROSS;
  static_assert(THREADS % ACROSS == 0, "whole rows");
  const int column = threadIdx.x % ACROSS * wide, place = places[column], last = min(first + BLOCK_M / CLUSTER, (int)arg.rows - channel);
  if (place < 0) return;
#pragma unroll 4
  for (int row = first + threadIdx.x / ACROSS; row < last; row += DOWN) {
    const int k = channel + row, at = place + k * (int)arg.y_channel;
    const Finish<false> finish{ScaleAndBias(arg, scale, bias, k)};
    float v[wide];
#pragma unroll
    for (int e = 0; e < wide; ++e)
      v[e] = finish.whole(arg, sums[row * PITCH + column + e], 1, has_residual(arg) ? to_float(residual[at + e]) : -0.f);
    activate(arg, v);
    store_rounded(y + at, v);
  }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCK_M == 64 && GROUPS == 2 ? 2 : 1)
    hopper_gathered_planes(
#if GATHERS_W
                         const data_t* __restrict__ w,
#else
                         const __grid_constant__ CUtensorMap map_w,
#endif
                         const data_t* __restrict__ x, const data_t* __restrict__ bias, const data_t* __restrict__ scale, const data_t* residual,
                         data_t* __restrict__ y, const __grid_constant__ GatheredPlanesProduct arg) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  __shared__ int places[BLOCK_N];  // offsets of pixels in y, or -1
  const Ring ring(dynamic, barriers);
  uint8_t* const stages = dynamic + (ring.stages - shared_address(dynamic));
  float* const sums = (float*)stages;
  const int rank = cluster_rank();
  const Divided tile(blockIdx.x / CLUSTER, arg.tiles_m, arg.by_tiles_m);
  const int channel = tile.rest * BLOCK_M, pixel = tile.quotient * BLOCK_N;
  if (threadIdx.x == 0) ring.init(GATHERS_W ? 4 : 5, 4 * CONSUMERS);
#if GATHERS_W
  const CUtensorMap* const of_w = nullptr;
#else
  const data_t* const w = nullptr;
  const CUtensorMap* const of_w = &map_w;
  if (threadIdx.x == CONSUMER_THREADS) prefetch_map(of_w);
#endif
  bool some = !arg.has_dgrad_stride;
  if (threadIdx.x < BLOCK_N) {
    if (!some) some = Source(arg, pixel + threadIdx.x).there;
    const Divided of(pixel + threadIdx.x, arg.load_plane, arg.by_load_plane);
    places[threadIdx.x] = pixel + (int)threadIdx.x < (int)arg.pixels ? of.quotient * (int)arg.y_image + of.rest : -1;
  }
  const int part = __syncthreads_or(some) ? (int)arg.part : 0, begin = min(rank * part, (int)arg.steps), end = min(begin + part, (int)arg.steps);
  AFTER_LAST_LAUNCH
  if (threadIdx.x < CONSUMER_THREADS) {
    consume(ring, sums, end - begin);
  } else {
    if (arg.wide) produce<2>(of_w, w, x, arg, ring, stages, channel, pixel, begin, end);
    else produce<1>(of_w, w, x, arg, ring, stages, channel, pixel, begin, end);
  }
  __syncthreads();
  constexpr int OWN = BLOCK_M / CLUSTER;
#if CLUSTER > 1
  cluster_barrier();
  for (int i = threadIdx.x; i < OWN * BLOCK_N / 4; i += THREADS) {  // no other block reads these rows
    float* const to = sums + (rank * OWN + i / (BLOCK_N / 4)) * PITCH + i % (BLOCK_N / 4) * 4;
    *(float4*)to = add_of_ranks(shared_address(to));
  }
  __syncthreads();
#endif
  if (arg.pairs) store<2>(arg, sums, places, channel, rank * OWN, scale, bias, residual, y);
  else store<1>(arg, sums, places, channel, rank * OWN, scale, bias, residual, y);
  cluster_sync_at_exit();
}
