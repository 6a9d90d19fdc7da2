// gemm.cu: convolution as a matrix product on Hopper's tensor cores, fp32 results from fp16 limbs.
//
//   y[n, k, pixel] = scale_n[n] * scale_k[k] * sum over taps and c of w[k, tap, c] * x[n, pixel + tap, c], and epilogue.cuh
//   gemm m: output channel | gemm n: pixel (n,o,p,q) of the batch | gemm k: (tap, c), c fastest, in blocks of LOAD_CHANNELS channels
//
// pack.cu packed both operands: channels last, 16 bits, in LIMBS. PRODUCTS = 3 multiplies hi.hi, hi.lo and lo.hi for fp32 accuracy. The tensor
// core's own sum truncates, so the kernel adds it to fp32 registers every 64 of k (promotion). The two cross products are 2^-11 of the result and
// stay in the tensor core. PRODUCTS = 2 is for images of bytes, whose second limb is 0: it multiplies hi.hi and lo.hi. PRODUCTS = 1 multiplies the
// first limb alone, or arrays that have 16 bits to begin with. Method: Ootomo and Yokota, 2022 (doi 10.1177/10943420221090256).
//
// Mapping  block: persistent, one a multiprocessor; takes tiles blockIdx.x, + gridDim.x, ... of BLOCK_M channels x BLOCK_N pixels.
//          Tile order, fastest first: channels, split, pixels, group. So blocks that share pixels run together.
//          warpgroup 0: one thread, the producer, issues the loads of w and x. Two consumer warpgroups multiply:
//          64 channels x BLOCK_N each (BLOCK_M = 128), or 64 channels x BLOCK_N / 2 (BLOCK_M = 64).
//          PINGPONG: the consumers take whole tiles in turn, so that one multiplies while the other stores (BLOCK_M = 128, one product).
//          turn[consumer] completes when the other consumer has taken all stages of its tile. Until then the parity of later stages is ambiguous.
//          TWIN: a block has one consumer, of 64 channels x BLOCK_N, and a multiprocessor two blocks, one of which stores while the other multiplies.
// Shared   a ring of STAGES stages (ring.cuh). A stage holds 64 of k as sub-tiles of LOAD_CHANNELS channels, whose rows of 2 * LOAD_CHANNELS bytes are
//          swizzled as wgmma wants them: of w [64 rows each][sub][limb][64], of x [limb][sub][BLOCK_N]. Behind the ring lie the consumers' staging
//          tiles, which turn sums into rows of y, and the scales of their pixels; with INTERLEAVE_COLUMNS the pixels' offsets in y too. A warp's
//          staging tile is 16 channels x 32 pixels, pitch 40 floats, or [32 pixels][16 channels], pitch 20 (no bank conflicts). With TENSOR_STORE a
//          consumer has two tiles of 32 pixels x 64 channels, swizzled.
// y        NCHW, three products: finished sums have registers of their own (total), and are written while the next tile's first stages are multiplied.
//          Until they are written nothing can be promoted. So only the first stage's hi.hi is multiplied then; that of the second stage follows.
//          Channels last: TMA writes whole rows of channels (TENSOR_STORE), if their pitch is a multiple of 16 bytes.
// w        lies in memory as it will in shared memory, so that one plain bulk copy fetches 64 rows of a sub-tile with all limbs. Tensor loads would
//          make about one row in three cycles, and x needs that rate for itself.
//          A 16-bit filter with its channels last is read as it lies, by tensor loads (w_lies). In dgrad its output channels are last:
//          W_MN_MAJOR, rows of 64 of them, which wgmma transposes.
// x        TMA's im2col mode: one load fetches BLOCK_N consecutive output pixels, shifted by a tap, across rows and images;
//          padding, and what lies past the last image or channel, arrives as zeros. Pixels may overlap in memory: windows, pack.cu.
// Residual  is read where the sums are in the order of y, in vectors as wide as the stores. With TENSOR_STORE it is added while the sums are still in
//          registers; it was prefetched while the tile before was multiplied.
// Registers  of a consumer's thread: its sums, WGMMA_N / 2, once for one product and three times for three (main, cross, total).
// Moments  for a batch norm behind it (batch_norm.cu). A slice is one consumer's pixels of a tile.
//          moments[slice][2][channel] has the mean of y, and the sum of squared deviations from it.
// Mending  The consumers look at the flags of images and channels of w (pack.cu) while the first loads are under way. After a block's last tile they
//          compute its flagged results in plain fp32: gemm_recompute.cuh. direct/gemm.cu does that for split sums that another launch adds.
// Split    splits > 1 cuts gemm k for problems of few tiles. Each part goes to a workspace [splits][size of y] in fp32. JOINS: after its last tile a
//          block takes a ticket for each of its tiles. The block that gets a tile's last ticket adds the tile's parts in their order, finishes and
//          recomputes them. pack.cu sets tickets to zero first; they count to splits and wrap to zero. One block would read many parts for too long:
//          then joins is 0, and direct/reduce.cu adds them, as it adds those of 16-bit results.
// Phases   dgrad with a stride is a set of phases: stride-1 convolutions with some of the taps (tap_base, tap_*), each of which writes
//          every out_h-th row and out_w-th column. A launch computes some of them, in turn, tile by tile. All count the same number of tiles: in a
//          phase of fewer pixels those past its end are empty. The launch is told of at most PHASES, and of their repeats (repeats.cuh): phases
//          that read the same pixels, and whose y and taps begin a fixed distance further along each axis. INTERLEAVE_COLUMNS, for a
//          stride of 2 along w: a block takes the same tile of two phases, of even and odd columns, one after the other. So a thread has neighbours
//          in y at the same place of its sums. The first phase's sums are kept in shared memory, and those of both are turned into rows of y.
//
// In parts   gemm_tiles.cuh: which tile is next | gemm_load_im2col.cuh: the producer | gemm_single.cuh, gemm_promoted.cuh, gemm_pingpong.cuh: the main loops
//            gemm_store_*.cuh, gemm_moments.cuh: from registers to y | gemm_recompute.cuh, gemm_join.cuh: what follows the last tile
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/gemm.cu
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define STAGES 3
#define PRODUCTS 3
#define LOAD_CHANNELS 64  // channels a load: 64, 32 or 16
#define BF16 0       // the operands' type
#define OUT 32       // y: 32 float, 16 half, 17 bfloat16
#define NHWC 0       // layout of y
#define TENSOR_STORE 0
#define VEC 4        // without TENSOR_STORE: elements of y that a thread writes at once, 1 or 4; they must be neighbours at a multiple of VEC
#define DENSE 1      // pixel i of the launch is pixel i of y's plane
#define WGMMA_N 128  // pixels a consumer
#define PINGPONG 0   // the consumers take whole tiles in turn
#define W_MN_MAJOR 0  // w is read as it lies, with the channels of y last
#define PHASES 1     // phases that a launch can be told of: 1 or 4
#define INTERLEAVE_COLUMNS 0  // phases of even and odd columns are written together
#endif
#ifndef TWIN
#define TWIN 0  // one consumer, and two blocks a multiprocessor
#endif
#define WITH_MAP_W (PRODUCTS == 1 && NHWC)  // 16-bit filters may be read as they lie
#define RECOMPUTES (OUT == 32 && !BF16)  // blocks compute their flagged results once more at their end: where SCALED
#define JOINS (OUT == 32 && !BF16 && !PINGPONG)  // blocks add the parts of split sums if they are told to
#ifdef LAYER
#define ADDS_PARTS false  // launches that add parts have a text without LAYER, so that the texts with LAYER compile without this code
#else
#define ADDS_PARTS JOINS
#endif
// the text can emit moments: forward, whole sums of common layers, where they leave registers
#define EMIT_MOMENTS (DENSE && VEC == 4 && LOAD_CHANNELS == 64 && !W_MN_MAJOR && !(BF16 && OUT == 32) && (PRODUCTS == 1 || WGMMA_N <= 128))
// No residual is added where moments are emitted, where columns are interleaved, and in the widest tiles.
#define MAY_ADD (!INTERLEAVE_COLUMNS && (WGMMA_N <= 128 || (PRODUCTS == 1 && !PINGPONG)))
#include "hopper/gemm/gemm_tiles.cuh"
#include "hopper/gemm/gemm_product.cuh"

constexpr int B_BYTES = BLOCK_N * 128, STAGE_BYTES = A_BYTES + X_LIMBS * B_BYTES;
constexpr int CHUNK = 32;  // pixels of a staging tile
constexpr int THREADS = 128 * (1 + CONSUMERS);
static_assert(!W_MN_MAJOR || LOAD_CHANNELS == 64, "whole blocks of 64 channels");
static_assert(PHASES == 1 || PHASES == 4, "a block meets all phases");

// IF_JOINS(code) and so on: code that stands only in texts that join.
#if JOINS
// Split sums: whether the product adds their parts (joins), and what finishes them then.
struct JoinArguments {
  long long joins, has_bias, has_scale, has_residual, activation, slope;
};
#define IF_JOINS(...) __VA_ARGS__
#else
#define IF_JOINS(...)
#endif

typedef StageRing<STAGES, STAGE_BYTES> Ring;
typedef Ring::Position Position;

// The ring, and the barriers of PINGPONG.
struct Rings : Ring {
  using Ring::Ring;
  uint32_t turn;
};

#include "hopper/gemm/gemm_load_im2col.cuh"

// ---- a tile's sums, scaled and so on, to y

#if RECOMPUTES
#include "hopper/gemm/gemm_recompute.cuh"
#define IF_RECOMPUTES(...) __VA_ARGS__
#else
#define IF_RECOMPUTES(...)
#endif
#if INTERLEAVE_COLUMNS
#include "hopper/gemm/gemm_store_pairs.cuh"
#elif TENSOR_STORE
#include "hopper/gemm/gemm_store_tensor.cuh"
#else
#include "hopper/gemm/gemm_store_chunks.cuh"
#endif
#include "hopper/gemm/gemm_moments.cuh"

// Stores a consumer's sums of a tile, and notes their moments.
DEVICE void store_sums(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Shapes& shapes, int tile, int consumer, const Output& whole) {
  const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
  const Output output = whole.further(y_apart(shapes, tile));
  IF_RECOMPUTES(if (NOTES && any_flag == 1) note_small_sums(sum, rows, shape, tile);)
  IF_MOMENTS(if (OF_LAYER(WITH_MOMENTS, shape.scaled & 2)) store_moments(sum, rows, shape, output);)
  if (is_plain(shape)) store_tile(sum, rows, as_plain(shape), tile, consumer, output);
  else store_tile(sum, rows, shape, tile, consumer, output);
}

// Puts into shared memory what the stores of a tile need of a consumer's pixels: scales, and with INTERLEAVE_COLUMNS offsets in y.
DEVICE void stage_output_offsets(const Rows& rows, const GemmPhase& shape, int consumer, const Factors& factors, const Output& output) {
  if (!SCALED && !INTERLEAVE_COLUMNS) return;
  named_barrier(1 + consumer, 128);  // the last tile's have been read
  for (int i = threadIdx.x % 128; i < WGMMA_N; i += 128) {
    const Divided of_image(min(rows.pixel + i, rows.end - 1), shape.plane, shape.by_plane);
    if (SCALED) output.scales[i] = scaled(shape) ? factors.scale_n[of_image.quotient] : 1;
    if (INTERLEAVE_COLUMNS) output.offsets[i] = of_image.quotient * shape.out_image + plane_offset<false>(shape, of_image.rest);
  }
  named_barrier(1 + consumer, 128);
}

// Prefetches a consumer's share of a tile's residual: the channels of each pixel. The stores' loads then wait for the L2 cache alone, not for
// memory chunk by chunk.
DEVICE void prefetch_residual(const Shapes& shapes, int tile, int consumer, const out_t* residual) {
  if (!TENSOR_STORE || tile >= all_tiles(shapes)) return;
  const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
  if (!adds(shape)) return;
  const Tile of(shape, inside_phase(shapes, tile));
  constexpr int LINE = 128 / (int)sizeof(out_t), CHANNELS = PINGPONG ? BLOCK_M : 64;
  const int m = of.m + (BLOCK_M == 128 && !PINGPONG ? 64 * consumer : 0), first = of.pixel + (BLOCK_M == 128 ? 0 : WGMMA_N * consumer);
  const int end = min(of.end, first + WGMMA_N), channels = min(m + CHANNELS, (int)shape.rows_group);
  for (int pixel = first + (int)threadIdx.x % 128; pixel < end; pixel += 128)
    for (int c = m; c < channels; c += LINE) prefetch_line(residual + pixel * shape.rows + of.group * (int)shape.rows_group + c);
}

// ---- the multiplication

#if PINGPONG
#include "hopper/gemm/gemm_pingpong.cuh"
#elif PRODUCTS > 1
#include "hopper/gemm/gemm_promoted.cuh"
#else
#include "hopper/gemm/gemm_single.cuh"
#endif

// ---- what follows a block's last tile

#if ADDS_PARTS
#include "hopper/gemm/gemm_join.cuh"
#define IF_ADDS_PARTS(...) __VA_ARGS__
#else
#define IF_ADDS_PARTS(...)
#endif
#if WITH_MAP_W
#define IF_MAP_W(...) __VA_ARGS__
#else
#define IF_MAP_W(...)
#endif

extern "C" __global__ void __launch_bounds__(THREADS, TWIN ? 2 : 1)
    hopper_gemm(const __grid_constant__ Maps maps_x, IF_MAP_W(const __grid_constant__ CUtensorMap map_w,) IF_MAP_Y(const __grid_constant__ CUtensorMap map_y,)
                const uint8_t* __restrict__ w, const float* __restrict__ scale_n, const float* __restrict__ scale_k,
                const out_t* __restrict__ bias, const out_t* __restrict__ scale, const out_t* residual, out_t* __restrict__ y,
                IF_MOMENTS(float* __restrict__ moments,)
                IF_RECOMPUTES(const float* __restrict__ raw_x, const float* __restrict__ raw_w, const int* __restrict__ x_flags,
                              const int* __restrict__ w_flags, IF_MOMENTS(int* __restrict__ redone,))
                IF_JOINS(void* __restrict__ joined, unsigned* __restrict__ tickets,)
                uint4* __restrict__ x_tiles, IF_ONE_PHASE(uint4* __restrict__ w_tiles,)
                const __grid_constant__ Shapes shapes
                IF_RECOMPUTES(, const __grid_constant__ Recomputes recomputes) IF_JOINS(, const __grid_constant__ JoinArguments join)) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES + CONSUMERS];
  Rings rings(dynamic, barriers);
  rings.turn = rings.empty + 8 * STAGES;
  uint8_t* const staging = dynamic + (rings.stages + STAGES * STAGE_BYTES - shared_address(dynamic));
  float* const scales = (float*)(staging + CONSUMERS * STAGING);
  [[maybe_unused]] long long* const output_offsets = (long long*)(scales + CONSUMERS * WGMMA_N);
  if (threadIdx.x == 0) {
    for (int i = 0; PINGPONG && i < CONSUMERS; ++i) barrier_init(rings.turn + 8 * i, 4);
    rings.init(1, PINGPONG ? 4 : 4 * CONSUMERS);
  }
  // split sums whose parts another launch adds are recomputed by that
  IF_RECOMPUTES(
    const bool recomputes_own = !JOINS || shapes.of[0].splits == 1 IF_ADDS_PARTS(|| join.joins);
    clear_flags();
  )
  __syncthreads();
  AFTER_LAST_LAUNCH
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    registers_down<PINGPONG || TWIN ? 24 : 40>();
    const CUtensorMap* filters = nullptr;
    IF_MAP_W(filters = &map_w;)
    if (threadIdx.x == 0) produce(w, filters, maps_x, shapes, rings);
  } else {
    registers_up<PINGPONG ? 240 : 232>();
    const int thread = blockIdx.x * 128 * CONSUMERS + threadIdx.x - 128, threads = gridDim.x * 128 * CONSUMERS;
    clear_packed_tiles(x_tiles, (int)shapes.of[0].x_tiles, thread, threads);
    IF_ONE_PHASE(clear_packed_tiles(w_tiles, (int)(shapes.of[0].x_tiles >> 32), thread, threads);)
    // while the first loads are under way
    IF_RECOMPUTES(if (recomputes_own && scaled(shapes.of[0])) join_flags(shapes.of[0], x_flags, w_flags);)
    const int consumer = warpgroup - 1;
    Output output = {staging + consumer * STAGING, scales + consumer * WGMMA_N, output_offsets + consumer * WGMMA_N, nullptr, nullptr, residual, y};
    IF_MAP_Y(output.map_y = &map_y;)
    IF_MOMENTS(output.moments = moments;)
    consume(shapes, rings, consumer, {scale_n, scale_k, scale, bias}, output);
    IF_RECOMPUTES(
      int* again = nullptr;  // where it says that moments have changed
      IF_MOMENTS(
        if (OF_LAYER(WITH_MOMENTS, shapes.of[0].scaled & 2)) again = redone;
        if (again && threadIdx.x == 128) again[blockIdx.x] = 0;
      )
      if (!recomputes_own) return;
      if (TENSOR_STORE && threadIdx.x % 128 == 0) bulk_wait<0>();
      const RecomputeOperands operands = {raw_x, raw_w, bias, scale, residual, x_flags, w_flags, scale_n, scale_k};
    )
    IF_ADDS_PARTS(
      if (join.joins) {
        join_tiles(shapes, join, {y, tickets, bias, scale, residual, joined}, recomputes, operands);
        return;
      }
    )
    IF_RECOMPUTES(
      named_barrier(STORED, 128 * CONSUMERS);
      if (any_flag) recompute_tiles(shapes, recomputes, operands, again, y);
    )
  }
}
