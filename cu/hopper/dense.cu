// dense.cu: convolutions of channels-last arrays as they lie, on Hopper's tensor cores: 16 bits, and float32 in TF32.
//
//   y[pixel, k] = sum over taps and c of x[pixel + tap, c] * w[k, tap, c], and finish.cuh
//   gemm m: pixel (n,o,p,q) of the batch | gemm n: output channel | gemm k: (tap, c), c fastest, in stages of 128 bytes of channels
//
// Nothing is packed: TMA loads both operands from the arrays in the layout that wgmma wants, and rounds float32 to TF32 on the way.
//
// Mapping  block: tiles of BLOCK_M pixels x BLOCK_N channels. Tiles of the same pixels run side by side. A block has a consumer warpgroup for each 64
//          pixels, and behind them one more warp. One thread of that, the producer, loads x and w. Blocks are persistent, unless a cluster
//          shares a tile.
// Shared   a ring of STAGES stages (ring.cuh), 128 bytes of k each: rows of BLOCK_M pixels of x, swizzled, then BLOCK_N rows of w. Behind it lie
//          the warps' moments, and for each warp a tile of 16 pixels x 32 channels of sums, pitch 40 floats. From that tile a warp writes rows of
//          y if a pixel of y is no multiple of 16 bytes. Otherwise lanes exchange words of their sums, and each writes 16 bytes of a pixel.
// x        TMA's im2col mode: one load fetches BLOCK_M consecutive output pixels, shifted by a tap, across rows and images. Without a stride a tile's pixels may
//          be a box of columns, rows, slices and images instead, and a load is that box of x, shifted by a tap. Padding, and what lies past the last image or
//          channel, arrives as zeros.
// Tails    TMA takes longer for rows that it has to fill up. So in texts that know their layer, a tap's last stage has rows of 64 or 32 bytes if its
//          channels fill no more, and only these are multiplied. In other texts all rows are 128 bytes.
// Groups   a tile's channels lie in one group, and its stages are whole rows of the group's channels.
// w        K-major: rows of gemm k, as w lies or as transpose_filter.cu made it. W_MN_MAJOR, for dgrad: rows of gemm n, in
//          blocks of 128 bytes of channels, or of the 64 bytes of a narrow tile, x 128 bytes of k. Rows and blocks that lie wholly past
//          the last channel of y are not loaded, because TMA takes three times as long for rows that it has to fill. Their sums are not written.
// TF32     wgmma takes TF32 operands along k alone. So with W_MN_MAJOR, TRANSPOSERS more warps transpose the filter's blocks of 32 x 32, each in its place,
//          through registers. raw[stage] completes when the filter has arrived, full[stage] when x has arrived and all blocks are transposed.
// Cluster  CLUSTER blocks share a tile: each sums its part of gemm k. They leave their sums in shared memory, and each block adds some of the
//          tile's rows over all blocks, in their order.
// Moments  for a batch norm behind it (batch_norm.cu). A slice is the 64 pixels of a consumer. moments[slice][2][channel] has the mean of y, and
//          the sum of squared deviations from it.
// Phases   dgrad with a stride is a set of phases: stride-1 convolutions with some of the taps, each of which writes every out_h-th
//          row and out_w-th column. A launch takes PHASES of them, one after the other, those with most taps first, and the repeats of each (repeats.cuh).
// Border   of an image's own pixels: the phases of a BORDERED launch are the interior of y, and single rows and columns at its sides. Their taps have the
//          offsets of the pixels that the border shows. In dgrad rows that the border shows have the taps of all places that show them.
//
// Segments SEGMENTS = 2: behind the stages of x and w come those of another array and its filter, each with maps and taps of its own: the convolution
//          of two arrays that lie apart, as if their channels were joined; or a 1x1 of one beside a 3x3 of the other.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/dense.cu
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 128
#define STAGES 4
#define TYPE 17      // of the arrays: 32 float, 16 half, 17 bfloat16
#define W_MN_MAJOR 0
#define CLUSTER 1      // blocks that share a tile
#define PHASES 1     // of a launch: 1 or 4; if BORDERED, 9 or 25
#endif
#ifndef BORDERED
#define BORDERED 0   // taps have numbers and offsets of their own
#endif
#include "core/shapes.cuh"

// A phase of the launch. by_n is the divisor n, prepared (division.cuh).
struct DensePhase : LoadedPixels, WrittenPixels, WalkedTaps, Finishing {
  long long tiles, tiles_n, by_tiles_n;                       // all tiles, those of earlier phases among them; tiles along channels
  long long blocks, part;                                     // stages of a sum, and of one of CLUSTER parts
  long long last_steps;                                       // wgmma steps of a tap's last stage
  long long rows, by_rows;                                    // output channels
  long long group_rows, by_group_rows, group_channels;        // output channels of a group, and the channels of x over which they sum
  long long numbers_d, numbers_h, numbers_w;                  // with BORDERED: each tap's number in w, and its offset in x: bytes
  long long offsets_d, offsets_h, offsets_w;
  long long pixels, spatial_dims;                             // pixels of the phase, of whole boxes; spatial axes of the loads
  long long box_w, by_box_w, box_h, by_box_h, box_d, by_box_d, box_n;  // a box's columns, rows, slices, images; no images: tiles are neighbouring pixels
  long long boxes_w, by_boxes_w, boxes_h, by_boxes_h, boxes_d, by_boxes_d;  // boxes along each axis
  long long depth, height, images;                            // slices and rows of an image of the phase, and images
  long long store_mode;                                       // how channels of y are written: StoreMode
  long long with_moments;                                     // whether moments are written, where EMIT_MOMENTS
};
typedef DensePhase Phase;
#define EMIT_MOMENTS (CLUSTER == 1 && PHASES == 1 && !W_MN_MAJOR && BLOCK_N <= 192)  // the text can emit moments: forward, of whole sums
#define TAILS  // channel_blocks and last_steps say where a tap ends
#include "hopper/boxes.cuh"
#include "hopper/pixel_tiles.cuh"
#if BORDERED
#define TAP_OFFSET(n, axis) ((int)(shape.offsets_##axis >> 8 * (n)) & 255)
#define TAP_NUMBER(n, axis) ((int)(shape.numbers_##axis >> 8 * (n)) & 255)
#endif
#include "hopper/taps.cuh"
#include "hopper/transpose.cuh"

constexpr int TRANSPOSERS = TURNED ? 3 : 0, THREADS = CONSUMER_THREADS + 32 + 32 * TRANSPOSERS;

// An array of pixels and its filter: maps of stages with rows of 128 bytes, and of a tap's last stage.
struct Source {
  CUtensorMap of[PHASES], last[PHASES], whole_filter, last_filter;
};
struct Sources {
  Source of[SEGMENTS];
};

// Blocks that a tile has of an MN-major filter.
DEVICE int blocks_of(const Phase& shape, const Tile& of) { return min(MN_BLOCKS, ((int)shape.rows - of.channel + MN_CHANNELS - 1) / MN_CHANNELS); }

// The producer. `raw` is the first of the barriers of the filter, where it is transposed.
DEVICE void produce(const Sources& sources, const Shapes& shapes, const Ring& ring, [[maybe_unused]] uint32_t raw) {
  Ring::Position at;
  for (int tile = first_tile(), tiles = all_tiles(shapes); tile < tiles; tile = next_tile(tile)) {
    const Tile of(shapes, tile);
    const DensePhase& shape = shapes.of[of.phase];
    const StageRange range = range_of(shape);
    const int of_group = Divided(of.channel, (int)shape.group_rows, shape.by_group_rows).quotient * (int)shape.group_channels;
    [[maybe_unused]] const int filter_blocks = W_MN_MAJOR ? blocks_of(shape, of) : 0;
    // Loads the stages [first, last) of a source.
    auto load = [&](const Source& source, const DensePhase& from, int first, int last) {
      const LoadBase base(from, of.pixel);
      const InBox box(from, of.pixel);
      const int pixels = boxed(from) ? InBox::count(from) : BLOCK_M;
      Taps walk(from, first, taps_apart(shapes, of));
      const int channel_blocks = (int)from.channel_blocks, spatial_dims = (int)from.spatial_dims;
      fill_stages(ring, at, first, last, [&](int, uint32_t a, uint32_t arrived) {
        const uint32_t b = a + A_BYTES;
        const bool whole = span_of(LAST) == 128 || walk.c + 1 < channel_blocks;
        const int span = whole ? 128 : span_of(LAST);  // bytes of a row
        const CUtensorMap *const map_x = (whole ? source.of : source.last) + of.phase, *const map_w = whole ? &source.whole_filter : &source.last_filter;
        const int filter_bytes = W_MN_MAJOR ? filter_blocks * (MN_BLOCK * span / 128) : min(BLOCK_N, (int)shape.rows) * span;
        const uint32_t filter_arrived = TURNED ? raw + 8 * at.stage : arrived;
        barrier_expect(arrived, pixels * span + (TURNED ? 0 : filter_bytes));
        if (TURNED) barrier_expect(filter_arrived, filter_bytes);
        const int c = of_group + walk.c * BLOCK_K;
        if (boxed(from)) box.load(from, a, map_x, arrived, c, walk.x_s, walk.x_r, walk.x_t);
        else load_im2col(spatial_dims, a, map_x, arrived, c, base, walk.x_s, walk.x_r, walk.x_t);
        if constexpr (W_MN_MAJOR) {
#pragma unroll
          for (int block = 0; block < MN_BLOCKS; ++block)
            if (block < filter_blocks) load_box(b + block * MN_BLOCK, map_w, filter_arrived, of.channel + MN_CHANNELS * block, walk.tap, walk.c * BLOCK_K);
        } else {
          load_box(b, map_w, filter_arrived, walk.c * BLOCK_K, walk.tap, of.channel);
        }
        walk.next();
      });
    };
#if SEGMENTS > 1
    const int own = (int)shape.blocks - (int)shapes.behind.blocks;
    load(sources.of[0], shape, min(range.first, own), min(range.last, own));
    load(sources.of[1], shapes.behind, max(range.first - own, 0), max(range.last - own, 0));
#else
    load(sources.of[0], shape, range.first, range.last);
#endif
  }
}

// The warps that transpose the filter take the stages' blocks in turn, 32 rows of k x 32 channels.
DEVICE void turn(const Shapes& shapes, const Ring& ring, uint32_t raw) {
  Ring::Position at;
  int block = threadIdx.x / 32 - CONSUMER_THREADS / 32 - 1;
  for (int tile = first_tile(), tiles = all_tiles(shapes); tile < tiles; tile = next_tile(tile)) {
    const Tile of(shapes, tile);
    const StageRange range = range_of(shapes.of[of.phase]);
    const int filter_blocks = blocks_of(shapes.of[of.phase], of);
    for (int step = range.first; step < range.last; ++step) {
      barrier_wait(raw + 8 * at.stage, at.parity);  // all warps wait: one that skipped a round would mistake the round before for its own
      for (; block < MN_BLOCKS; block += TRANSPOSERS)
        if (block < filter_blocks) transpose_block<2>(ring.stage(at) + A_BYTES + block * MN_BLOCK);
      fence_for_bulk();
      __syncwarp();  // all lanes have seen this round
      if (threadIdx.x % 32 == 0) barrier_arrive(ring.arrived(at));  // without a block, too: a stage is not loaded again before all have waited
      block -= MN_BLOCKS;
      at.next();
    }
  }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCK_M == 64 ? 2 : 1)
    hopper_dense(const __grid_constant__ Sources sources, const data_t* __restrict__ bias, const data_t* __restrict__ scale, const data_t* residual,
                 data_t* __restrict__ y, IF_MOMENTS(float* __restrict__ moments,) const __grid_constant__ Shapes shapes) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[(TURNED ? 3 : 2) * STAGES];
  const uint32_t raw = shared_address(barriers) + 16 * STAGES;
  const Ring ring(dynamic, barriers);
  float* const sums = (float*)(dynamic + (ring.stages - shared_address(dynamic)));
  float* const staging = sums + STAGES * STAGE_BYTES / 4;
  float* wanted_moments = nullptr;
  IF_MOMENTS(if (OF_LAYER(WITH_MOMENTS, shapes.of[0].with_moments)) wanted_moments = moments;)
  for (int i = 0; TURNED && threadIdx.x == 0 && i < STAGES; ++i) barrier_init(raw + 8 * i, 1);
  begin_block(ring, TURNED ? 1 + TRANSPOSERS : 1, CONSUMERS, [&] {
    const bool whole = span_of(LAST) == 128 || (int)shapes.of[0].channel_blocks > 1;
    const Source& first = sources.of[0];
    prefetch_map(whole ? &first.whole_filter : &first.last_filter);
    for (int phase = 0; phase < PHASES; ++phase) prefetch_map((whole ? first.of : first.last) + phase);
  });
  if (threadIdx.x < CONSUMER_THREADS) {
    consume([](int) {}, shapes, ring, sums, staging, {scale, bias, residual, y, wanted_moments});
  } else {
    if (threadIdx.x == CONSUMER_THREADS) produce(sources, shapes, ring, raw);
    if constexpr (TURNED) {
      if (threadIdx.x >= CONSUMER_THREADS + 32) turn(shapes, ring, raw);
    }
    await_cluster_sums();
  }
  cluster_sync_at_exit();
}
