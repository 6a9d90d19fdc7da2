// implicit_gemm_sm90.cu: convolution as a matrix product on Hopper's tensor cores, fp32 results from fp16 limbs.
//
//   y[n, k, pixel] = scale_n[n] * scale_k[k] * sum over taps and c of w[k, tap, c] * x[n, pixel + tap, c], and epilogue.cuh
//   gemm m: output channel | gemm n: pixel (n,o,p,q) of the batch | gemm k: (tap, c), c fastest, in blocks of LOAD_CHANNELS channels
//
// pack.cu packed both operands: channels last, 16 bits, in LIMBS. PRODUCTS = 3 multiplies hi.hi, hi.lo and lo.hi for fp32 accuracy. The tensor
// core's own sum truncates, so the kernel adds it to fp32 registers every 64 of k (promotion). The two cross products are 2^-11 of the result and
// stay in the tensor core. PRODUCTS = 1 multiplies the first limb alone, or arrays that have 16 bits to begin with. Method: Ootomo and Yokota,
// 2022 (doi 10.1177/10943420221090256).
//
// Mapping  block: persistent, one a multiprocessor; takes tiles blockIdx.x, + gridDim.x, ... of BLOCK_M channels x BLOCK_N pixels.
//          Tile order, fastest first: channels, split, pixels, group. So blocks that share pixels run together.
//          warpgroup 0: one thread, the producer, issues the loads of w and x. Two consumer warpgroups multiply:
//          64 channels x BLOCK_N each (BLOCK_M = 128), or 64 channels x BLOCK_N / 2 (BLOCK_M = 64).
//          PINGPONG: the consumers take whole tiles in turn, so that one multiplies while the other stores (BLOCK_M = 128, one product).
//          turn[consumer] completes when the other consumer has taken all stages of its tile. Until then the parity of later stages is ambiguous.
// Shared   a ring of STAGES stages (ring.cuh). A stage holds 64 of k as sub-tiles of LOAD_CHANNELS channels, whose rows of 2 * LOAD_CHANNELS bytes are
//          swizzled as wgmma wants them: of w [64 rows each][sub][limb][64], of x [limb][sub][BLOCK_N]. Behind the ring lie the consumers' staging
//          tiles, which turn sums into rows of y, and the scales of their pixels; with INTERLEAVE_COLUMNS the pixels' offsets in y too. A warp's
//          staging tile is 16 channels x 32 pixels, pitch 40 floats, or [32 pixels][16 channels], pitch 20 (no bank conflicts). With TENSOR_STORE a
//          consumer has two tiles of 32 pixels x 64 channels, swizzled.
// y        NCHW, three products: finished sums have registers of their own (total), and are written while the next tile's first stages are multiplied.
//          Until they are written nothing can be promoted. So only the first stage's hi.hi is multiplied then; that of the second stage follows.
//          Channels last: TMA writes whole rows of channels (TENSOR_STORE), if their pitch is a multiple of 16 bytes.
// Halo     PATCH_ROWS > 0 is for filters of several taps, without stride, and float32 NCHW results that whole patches fill. A consumer's pixels are
//          a patch of an image, 8 columns x PATCH_ROWS rows, and x is loaded once for all taps. (Otherwise each pixel is loaded once for each tap,
//          which bounds filters of 64 channels.) x has a ring of its own, of x_stages stages. A stage is the halo of the patches in 64 channels, halo_w
//          pixels wide and halo_h high. A tap's pixels begin at the tap's offset in the halo, and wgmma steps from row to row of a patch by halo_w
//          pixels. Stages of the main ring hold w alone, and gemm k runs through the taps first. Each thread writes two neighbours of y straight
//          from its sums; four threads write a sector. Here the finished sums of one product, too, have registers of their own, and are written while
//          the next tile is multiplied. Windows (pack.cu) have no stride left: a row of taps is one pixel's channels.
// Raw      FUSED_SPLIT: the kernel reads unpacked images of up to 64 channels for such patches (BLOCK_M = 64). It reads a tile's halo once and stores
//          its limbs in the ring of x, with a scale of the patch's own. The scale is guessed from what is read first. If the extremes of the whole
//          halo show that the guess was wrong, the halo is split again with their scale. CONVERTERS warps do this: the first warpgroup's idle ones
//          and a fourth warpgroup. Each takes some rows of 8 channels at a time, by tensor loads into raw_stages slots of its own, and a lane
//          converts one pixel of them. unit_scales and unit_flags (pack.cu) have one entry a patch.
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
// Mending  The consumers look at the flags of images and channels of w (pack.cu) while the first loads are under way. If any is set, they compute
//          the flagged results of the block's tiles in plain fp32 after its last tile: mend.cuh. direct_gemm.cu does that for split sums that another
//          launch adds, and for FUSED_SPLIT.
// Split    splits > 1 cuts gemm k for problems of few tiles. Each part goes to a workspace [splits][size of y] in fp32. JOINS: after its last tile a
//          block takes a ticket for each of its tiles. The block that gets a tile's last ticket adds the tile's parts in their order, finishes and
//          mends them. pack.cu sets tickets to zero first; they count to splits and wrap to zero. One block would read many parts for too long:
//          then joins is 0, and direct_reduce.cu adds them, as it adds those of 16-bit results.
// Phases   dgrad with a stride is a set of phases: stride-1 convolutions with some of the taps (tap_base, tap_*), each of which writes
//          every out_h-th row and out_w-th column. A launch computes some of them, in turn, tile by tile. All count the same number of tiles: in a
//          phase of fewer pixels those past its end are empty. The launch is told of at most PHASES, and of their repeats (repeats.cuh): phases
//          that read the same pixels, and whose y and taps begin a fixed distance further along each axis. INTERLEAVE_COLUMNS, for a
//          stride of 2 along w: a block takes the same tile of two phases, of even and odd columns, one after the other. So a thread has neighbours
//          in y at the same place of its sums. The first phase's sums are kept in shared memory, and those of both are turned into rows of y.
//
// By hand: nvcc -cubin -arch=sm_90a cu/implicit_gemm_sm90.cu
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
#define PATCH_ROWS 0  // rows of a consumer's patch where x is loaded once for all taps; else 0
#define FUSED_SPLIT 0  // the kernel splits x into limbs itself
#define INTERLEAVE_COLUMNS 0  // phases of even and odd columns are written together
#endif
#define WGMMA_MN_MAJOR_B "0"
#define WITH_MAP_W (PRODUCTS == 1 && NHWC)  // 16-bit filters may be read as they lie
#if W_MN_MAJOR
#define WGMMA_MN_MAJOR_A "1"
#else
#define WGMMA_MN_MAJOR_A "0"
#endif
#if BF16
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif
#if FUSED_SPLIT
#include "limbs.cuh"
#endif
#define MENDS (OUT == 32 && !BF16 && !FUSED_SPLIT)  // blocks compute their flagged results once more at their end: where SCALED
#define JOINS (OUT == 32 && !BF16 && !PATCH_ROWS && !PINGPONG)  // blocks add the parts of split sums if they are told to
#ifdef LAYER
#define ADDS_PARTS false  // launches that add parts have a text without LAYER, so that the texts with LAYER compile without this code
#else
#define ADDS_PARTS JOINS
#endif
// the text can note moments: forward, whole sums of common layers, where they leave registers
#define NOTES (DENSE && VEC == 4 && LOAD_CHANNELS == 64 && !PATCH_ROWS && !W_MN_MAJOR && !(BF16 && OUT == 32) && (PRODUCTS == 1 || WGMMA_N <= 128))
#include "finish.cuh"
#include "truncation.cuh"
#include "repeats.cuh"
#include "ring.cuh"
#if MENDS
#include "mend.cuh"
#endif

constexpr bool SCALED = OUT == 32 && !BF16;  // operands may have scales: limbs have them; sums of 16-bit operands in parts do not
constexpr int LIMBS = PRODUCTS == 3 ? 2 : 1, SUB_TILES = 64 / LOAD_CHANNELS, SPAN = 2 * LOAD_CHANNELS;
constexpr int A_BLOCK = 64 * SPAN, A_SUB = LIMBS * A_BLOCK, A_BYTES = LIMBS * BLOCK_M * 128;  // 64 rows of one limb; of all limbs; w of a stage
constexpr int B_BYTES = BLOCK_N * 128, STAGE_BYTES = A_BYTES + (PATCH_ROWS ? 0 : LIMBS * B_BYTES);
constexpr int CONSUMERS = 2, CHUNK = 32;  // warpgroups; pixels of a staging tile
[[maybe_unused]] constexpr int STORED = 3;  // the named barrier behind which the consumers have stored all
[[maybe_unused]] constexpr int CONVERTERS = 7;  // warps
constexpr int THREADS = 128 * (1 + CONSUMERS + FUSED_SPLIT);
static_assert(!W_MN_MAJOR || (LOAD_CHANNELS == 64 && !PATCH_ROWS), "whole blocks of 64 channels");
static_assert(!PATCH_ROWS || (LOAD_CHANNELS == 64 && DENSE && OUT == 32 && !NHWC), "patches of float32 planes");
static_assert(!PATCH_ROWS || BLOCK_N == 8 * PATCH_ROWS * (BLOCK_M == 128 ? 1 : 2), "whole patches");
static_assert(!FUSED_SPLIT || (PATCH_ROWS && BLOCK_M == 64), "patches");
static_assert(!PINGPONG || (PRODUCTS == 1 && BLOCK_M == 128 && !PATCH_ROWS && !INTERLEAVE_COLUMNS), "a consumer has all sums of a tile");
[[maybe_unused]] constexpr bool OVERLAP = PATCH_ROWS || (PRODUCTS == 3 && !TENSOR_STORE);  // one product's sums leave no registers for a second tile's
// a patch is stored in so many parts, each while a stage of the next patch is multiplied
[[maybe_unused]] constexpr int PARTS = PRODUCTS == 3 ? (PATCH_ROWS < 3 ? PATCH_ROWS : 3) : PATCH_ROWS % 2 ? PATCH_ROWS : PATCH_ROWS / 2;
[[maybe_unused]] constexpr int EARLY = 2;  // stages of the next tile that three products multiply while a tile is stored
static_assert(!PATCH_ROWS || PRODUCTS == 1 || STAGES > EARLY, "those stages are held");
static_assert(!TENSOR_STORE || (NHWC && WGMMA_N % CHUNK == 0), "whole chunks of pixels");
static_assert(WGMMA_N == (BLOCK_M == 128 ? BLOCK_N : BLOCK_N / 2) && WGMMA_N % 8 == 0, "a consumer takes 64 channels");
static_assert(PHASES == 1 || (PHASES == 4 && !PATCH_ROWS), "a block meets all phases");

typedef element<OUT> out_t;

// bytes of a consumer
[[maybe_unused]] constexpr int INTERLEAVED_PIECE = 8 * CHUNK * 4, INTERLEAVED = 16 * WGMMA_N * 4 + INTERLEAVED_PIECE;  // with INTERLEAVE_COLUMNS, of a warp
constexpr int STAGING = TENSOR_STORE ? 2 * CHUNK * 64 * (int)sizeof(out_t) : INTERLEAVE_COLUMNS ? 4 * INTERLEAVED : PATCH_ROWS ? 0 : 4 * 32 * 20 * 4;

// A phase of the launch. by_n is the divisor n, prepared (division.cuh).
struct GemmPhase {
  long long tiles;                                         // all tiles of a phase
  long long tiles_m, by_tiles_m;                           // along the channels of a group
  long long splits, by_splits, split_stages;               // splits of gemm k; stages of the ring in one split
  long long tiles_pixels, by_tiles_pixels;                 // along the pixels
  long long image_tiles, by_image_tiles;                   // tiles along the pixels of one image: PATCH_ROWS
  long long across, by_across;                             // patches side by side in an image: PATCH_ROWS
  long long blocks, channel_blocks, by_channel_blocks;     // blocks of LOAD_CHANNELS along gemm k, and how many of them belong to one tap
  long long rows_group, rows;                              // output channels of a group, and of all groups
  long long w_lies;                                        // whether w is read as it lies, by map_w: WITH_MAP_W
  long long blocks_group, row_blocks;                      // of w: blocks of 64 rows of a group, and blocks of LOAD_CHANNELS channels of 64 rows
  long long channels_group, channels;                      // packed input channels of a group, and of all groups
  long long tap_r, by_tap_r, tap_s, by_tap_s;              // taps along r and s
  long long tap_base, tap_step_t, tap_step_r, tap_step_s;  // number in w of the first tap, and steps from one to the next
  long long dilation_d, dilation_h, dilation_w;            // offset in x from one tap to the next
  long long pixels, limb_images;                           // pixels of the launch; images to skip in x's map to reach the second limb
  long long rank;                                          // spatial axes of the loads
  long long load_plane, by_load_plane;                     // pixels of an image, as x is loaded,
  long long load_pq, by_load_pq, load_q, by_load_q;        // of a slice and of a row
  long long stride_d, stride_h, stride_w;                  // x of pixel (o, p, q), tap 0: o * stride_d + low_d and so on
  long long low_d, low_h, low_w;
  long long plane, by_plane, pq, by_pq, q, by_q;           // pixels of an image, a slice and a row, as y is written
  long long out_size, out_base, out_d, out_h, out_w;       // elements of a plane of y, of the first pixel, and from one to the next
  long long out_image, out_row;                            // elements of y from one image, and from one channel, to the next; NCHW
  long long out_part;                                      // and from one part of a split sum to the next
  long long scaled;                                        // 1: there are scales, SCALED; 2: moments are written, NOTES; or 3, both
  long long x_tiles;                                       // tiles of x to clear, and 2^32 times those of w, which was packed as images are
  long long has_bias, has_scale, has_residual, activation, slope, eps;        // what finishes a sum; slope, eps: a float's bits
  long long halo_w, by_halo_w, halo_h;                     // PATCH_ROWS: the halo's width and height in pixels of x;
  long long x_stages, halo_bytes;                          // stages of the ring of x, and bytes of a limb in one
  long long groups, x_channels, x_h, x_w;                  // FUSED_SPLIT: groups of x, channels of a group, and x's size;
  long long slack, raw_stages, raw_rounds;                 // slack of a patch's limbs (pack.cu); slots of a converter; its items of a patch;
  long long raw_rows, raw_run;                             // rows of an item, and pixels of the halo in them;
  long long raw_shift, raw_pitch, raw_channel;             // floats in shared memory: before an item's first pixel, from row to row, from channel to channel
};

// No residual is added where moments are noted, where columns are interleaved, and in the widest tiles.
constexpr bool MAY_ADD = !INTERLEAVE_COLUMNS && (WGMMA_N <= 128 || (PRODUCTS == 1 && !PINGPONG));
template <class Phase> DEVICE bool adds(const Phase& shape) { return MAY_ADD && has_residual(shape); }
DEVICE bool scaled(const GemmPhase& shape) { return SCALED && (PRODUCTS == 3 || shape.scaled & 1); }

struct Shapes {
  GemmPhase of[PHASES];
#if PHASES > 1
  Repeats repeats;
#endif
};
struct Maps {
  CUtensorMap of[PHASES];
};
#if JOINS
// Split sums: whether the product adds their parts (joins), and what finishes them then.
struct JoinArguments {
  long long joins, has_bias, has_scale, has_residual, activation, slope, eps;
};
#endif
#if MENDS
struct Mends {
  MendPhase of[PHASES];
  MendArrays arrays;
};
__shared__ int any_flag;  // whether anything is flagged: consumers write it while the first loads are under way, and read it behind a barrier
#endif
// Tiles of all phases of the launch, and the phase of tile number `tile`. The grid and the number of phases (or of pairs of phases) have no common
// factor, so a block meets all phases.
#if PHASES > 1
DEVICE int all_tiles(const Shapes& shapes) { return (int)(shapes.of[0].tiles * shapes.repeats.turns); }
DEVICE int inside_phase(const Shapes& shapes, int tile) { return divided(tile, shapes.repeats.by_turns); }
DEVICE int turn_of(const Shapes& shapes, int tile) { return Divided(tile, shapes.repeats.turns, shapes.repeats.by_turns).rest; }
DEVICE int phase_of(const Shapes& shapes, int tile) { return Divided(turn_of(shapes, tile), shapes.repeats.phases, shapes.repeats.by_phases).rest; }
DEVICE int repeat_of(const Shapes& shapes, int tile) { return divided(turn_of(shapes, tile), shapes.repeats.by_phases); }
DEVICE int taps_apart(const Shapes& shapes, int tile) { return taps_apart(shapes.repeats, repeat_of(shapes, tile)); }
DEVICE long long y_apart(const Shapes& shapes, int tile) { return y_apart(shapes.repeats, repeat_of(shapes, tile)); }
DEVICE long long w_apart(const Shapes& shapes, int tile) { return w_apart(shapes.repeats, repeat_of(shapes, tile)); }
#else
DEVICE int all_tiles(const Shapes& shapes) { return (int)shapes.of[0].tiles; }
DEVICE int inside_phase(const Shapes&, int tile) { return tile; }
DEVICE int turn_of(const Shapes&, int) { return 0; }
DEVICE int phase_of(const Shapes&, int) { return 0; }
DEVICE int taps_apart(const Shapes&, int) { return 0; }
DEVICE int y_apart(const Shapes&, int) { return 0; }
DEVICE int w_apart(const Shapes&, int) { return 0; }
#endif
DEVICE int first_tile() { return INTERLEAVE_COLUMNS ? 2 * blockIdx.x : blockIdx.x; }
DEVICE int next_tile(int tile) { return !INTERLEAVE_COLUMNS ? tile + gridDim.x : tile % 2 ? tile - 1 + 2 * gridDim.x : tile + 1; }

struct Tile {
  int m, pixel, end, group, split;  // pixels of the tile below `end` are real; a patch's end is that of its image
  [[maybe_unused]] int patch, row, column;
  DEVICE Tile(const GemmPhase& shape, int tile) {
    const Divided down(tile, shape.tiles_m, shape.by_tiles_m);
    m = down.rest * BLOCK_M;
    const Divided parts(down.quotient, shape.splits, shape.by_splits);  // PATCH_ROWS: one
    split = parts.rest;
    const Divided along(parts.quotient, shape.tiles_pixels, shape.by_tiles_pixels);
    group = along.quotient;
    tile = along.rest;
    if (PATCH_ROWS) {
      const Divided of_image(tile, shape.image_tiles, shape.by_image_tiles), place(of_image.rest, shape.across, shape.by_across);
      patch = tile;
      column = place.rest * 8;
      row = place.quotient * (BLOCK_N / 8);
      pixel = of_image.quotient * (int)shape.plane;
      end = pixel + (int)shape.plane;
    } else {
      pixel = tile * BLOCK_N;
      end = (int)shape.pixels;
    }
  }
  DEVICE int image(const GemmPhase& shape) const { return divided(pixel, shape.by_plane); }
};

// The stages of gemm k of a tile's split: [first, last).
struct Range {
  int first, last;
  DEVICE Range(const GemmPhase& shape, const Tile& of) {
    const int stages = ((int)shape.blocks + SUB_TILES - 1) / SUB_TILES, each = (int)shape.split_stages;
    first = min(of.split * each, stages);
    last = PHASES > 1 && of.pixel >= of.end ? first : min(first + each, stages);
  }
};

typedef StageRing<STAGES, STAGE_BYTES> Ring;
typedef Ring::Position Position;

// A place in the ring of x, as Position in the main ring; its number of stages is no constant.
struct XPosition {
  int stage = 0, parity = 0;
  DEVICE void next(const GemmPhase& shape) {
    if (++stage == (int)shape.x_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The tap of the stage that comes next, along s first.
struct Tap {
  int s = 0, r = 0, number = 0;
  // to the next one; whether that was the last
  DEVICE bool next(const GemmPhase& shape) {
    ++number;
    if (++s < (int)shape.tap_s) return false;
    s = 0;
    if (++r < (int)shape.tap_r) return false;
    r = number = 0;
    return true;
  }
};

// The main ring, the ring of x and the slots of raw images where there are any, and the barriers of PINGPONG.
struct Rings : Ring {
  using Ring::Ring;
  uint32_t x, x_full, x_empty;
  uint32_t raw, raw_full;
  uint32_t turn;
};

// ---- the producer

// Whether w has 64 rows behind the first 64 of a tile. If not, the first ones are loaded twice, and sums of the missing rows are not stored.
DEVICE bool next_rows(const Tile& of, const GemmPhase& shape) { return of.m / 64 + 1 < (int)shape.blocks_group; }

#if PATCH_ROWS
// One thread loads the filter, tap by tap, ...
DEVICE void produce(const uint8_t* w, const GemmPhase& shape, const Rings& rings) {
  Position at;
  for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x) {
    const Tile of(shape, tile);
    const long long w_block = shape.row_blocks * A_SUB, w_next = next_rows(of, shape) ? w_block : 0;
    const uint8_t* const w_tile = w + (of.group * shape.blocks_group + of.m / 64) * w_block;
    for (int c = 0; c < (int)shape.channel_blocks; ++c) {
      Tap tap;
      do {
        const uint32_t stage = rings.stage(at), arrived = rings.arrived(at);
        const long long number = shape.tap_base + tap.r * shape.tap_step_r + tap.s * shape.tap_step_s;
        rings.wait_empty(at);
        barrier_expect(arrived, STAGE_BYTES);
#pragma unroll
        for (int rows = 0; rows < BLOCK_M / 64; ++rows)
          load_bytes(stage + rows * A_SUB, w_tile + rows * w_next + (number * shape.channel_blocks + c) * A_SUB, A_SUB, arrived);
        at.next();
      } while (!tap.next(shape));
    }
  }
}

#if !FUSED_SPLIT
// ... and another loads the halos of x.
DEVICE void produce_halos(const CUtensorMap* map_x, const GemmPhase& shape, const Rings& rings) {
  prefetch_map(map_x);
  XPosition at;
  for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x) {
    const Tile of(shape, tile);
    const int image = of.image(shape);
    for (int c = 0; c < (int)shape.channel_blocks; ++c) {
      barrier_wait(rings.x_empty + 8 * at.stage, at.parity ^ 1);
      barrier_expect(rings.x_full + 8 * at.stage, LIMBS * (int)(shape.halo_w * shape.halo_h) * 128);
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb)
        load_box(rings.x + (at.stage * LIMBS + limb) * (int)shape.halo_bytes, map_x, rings.x_full + 8 * at.stage,
                 of.group * (int)shape.channels_group + c * LOAD_CHANNELS, of.column + (int)shape.low_w, of.row + (int)shape.low_h,
                 image + limb * (int)shape.limb_images);
      at.next(shape);
    }
  }
}
#else
// ... and the converters split the halos of x.
DEVICE void convert(const CUtensorMap* map_x, const float* __restrict__ x, float* __restrict__ unit_scales, int* __restrict__ unit_flags,
                    const GemmPhase& shape, const Rings& rings, uint8_t* dynamic, float* scales) {
  const int slots = (int)shape.raw_stages, slot_bytes = 32 * (int)shape.raw_channel, halo_bytes = (int)shape.halo_bytes;
  const int run = (int)shape.raw_run, rounds = (int)shape.raw_rounds, slack = (int)shape.slack;
  __shared__ MagnitudeRange of_warps[2][2][CONVERTERS];  // by the stage of the ring of x
  const int warp = threadIdx.x / 32 < 4 ? threadIdx.x / 32 - 1 : threadIdx.x / 32 - 4 * CONSUMERS - 1, lane = threadIdx.x % 32;
  auto is_met = [&](int pixel) { return lane < run && pixel < (int)(shape.halo_w * shape.halo_h); };
  uint8_t* const x_ring = dynamic + (rings.x - shared_address(dynamic));
  const uint32_t raw = rings.raw + warp * slots * slot_bytes, arrived = rings.raw_full + warp * slots * 8;
  const Divided of_lane(lane, shape.halo_w, shape.by_halo_w);
  const uint8_t* const raw_pixel = dynamic + (raw - shared_address(dynamic)) + (of_lane.quotient * (int)shape.raw_pitch + of_lane.rest + (int)shape.raw_shift) * 4;

  // what is loaded next: item (run of rows, 8 channels) number next_round * CONVERTERS + warp of tile `next`
  int next = blockIdx.x, next_round = 0, row, column, unit;
  // `slot` holds the item that comes next; once that has been taken, the next load goes there. `parity` is that of the slot's round, after a first
  // round of loads alone
  int slot = 0, parity = 1;
  auto begin = [&] {
    const Tile of(shape, next);
    row = of.row + (int)shape.low_h;
    column = of.column + (int)(shape.low_w - shape.raw_shift);  // loads begin at multiples of 16 bytes
    unit = of.image(shape) * (int)shape.groups + of.group;
  };
  auto load = [&] {
    if (next < (int)shape.tiles && lane == 0) {
      const int item = next_round * CONVERTERS + warp;
      barrier_expect(arrived + 8 * slot, slot_bytes);
      load_box(raw + slot * slot_bytes, map_x, arrived + 8 * slot, column, row + item / 8 * (int)shape.raw_rows, item % 8 * 8, unit);
    }
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
    if (++next_round == rounds) {
      next_round = 0;
      next += gridDim.x;
      if (next < (int)shape.tiles) begin();
    }
  };
  // 8 channels of this lane's pixel of the item that comes next; undefined from lane `run` on
  auto take = [&](float(&v)[8]) {
    barrier_wait(arrived + 8 * slot, parity);
    const float* const of_slot = (const float*)(raw_pixel + slot * slot_bytes);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = of_slot[e * (int)shape.raw_channel];
  };
  // the extremes of all of a warp's lanes, to its entry of `room`
  auto together = [&](MagnitudeRange mine, MagnitudeRange(&room)[CONVERTERS]) {
    mine.over_warp();
    if (lane == 0) room[warp] = mine;
  };
  auto combined = [&](const MagnitudeRange(&room)[CONVERTERS]) {
    MagnitudeRange all = room[0];
#pragma unroll
    for (int i = 1; i < CONVERTERS; ++i) all.add(room[i]);
    return all;
  };

  // the extremes of the item that comes next, if there is a tile `number`: the scale of that tile is guessed from them
  auto sample = [&](int number) {
    MagnitudeRange found = {0, ~0u};
    if (number >= (int)shape.tiles) return found;
    float v[8];
    take(v);
    if (lane < run) found.add(v);
    return found;
  };

  prefetch_map(map_x);
  begin();
#pragma unroll 1
  for (int i = 0; i < slots; ++i) load();
  XPosition at;
  together(sample(blockIdx.x), of_warps[1][1]);
  named_barrier(3, 32 * CONVERTERS);
  int guess = combined(of_warps[1][1]).guess();
  for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x, at.next(shape)) {
    // the first limbs of 8 channels of a pixel, swizzled as wgmma wants them; further limbs lie halo_bytes behind one another
    auto place = [&](int pixel, int chunk) { return x_ring + at.stage * LIMBS * halo_bytes + pixel * 128 + ((chunk ^ pixel % 8) << 4); };
    auto store = [&](const float(&v)[8], float scale, int pixel, int chunk) {
      uint32_t limbs[LIMBS][4];
      split<__half>(v, scale, limbs);
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb) *(uint4*)(place(pixel, chunk) + limb * halo_bytes) = piece_of(limbs[limb]);
    };
    float scale = power_of_two(guess);
    MagnitudeRange found = {0, ~0u};
    barrier_wait(rings.x_empty + 8 * at.stage, at.parity ^ 1);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      float v[8];
      take(v);
      const int item = round * CONVERTERS + warp, pixel = item / 8 * run + lane;
      if (is_met(pixel)) {
        found.add(v);
        store(v, scale, pixel, item % 8);
      }
      // Every lane must have stored its limbs before the slot is loaded again: nothing orders TMA's writes after a lane's loads that were
      // issued and not yet used, which may wait for long behind the consumers' stores.
      __syncwarp();
      load();
    }
    together(found, of_warps[at.stage][0]);
    together(sample(tile + gridDim.x), of_warps[at.stage][1]);
    named_barrier(3, 32 * CONVERTERS);
    const MagnitudeRange all = combined(of_warps[at.stage][0]);
    const bool guessed = all.fits(guess, slack);
    if (!guessed && all.usable()) {
      const Tile of(shape, tile);
      const int channels = (int)shape.x_channels, high = (int)shape.x_h, wide = (int)shape.x_w;
      const float* const image = x + (of.image(shape) * (int)shape.groups + of.group) * ((long long)channels * high * wide);
      scale = all.scale();
#pragma unroll 1
      for (int item = warp; item < rounds * CONVERTERS; item += CONVERTERS) {
        const int pixel = item / 8 * run + lane;
        const Divided inside(pixel, shape.halo_w, shape.by_halo_w);
        const int at_h = of.row + (int)shape.low_h + inside.quotient, at_w = of.column + (int)shape.low_w + inside.rest;
        const bool there = (unsigned)at_h < (unsigned)high && (unsigned)at_w < (unsigned)wide;
        if (is_met(pixel)) {
          float v[8];
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const int c = item % 8 * 8 + e;
            v[e] = there && c < channels ? image[((long long)c * high + at_h) * wide + at_w] : 0;
          }
          store(v, scale, pixel, item % 8);
        }
      }
    }
    if (warp == 0 && lane == 0) {
      const Tile of(shape, tile);
      const int unit = of.group * (int)shape.tiles_pixels + of.patch;
      scales[at.stage] = unit_scales[unit] = 1 / scale;
      unit_flags[unit] = guessed ? all.flag(guess, slack) : all.flag(slack);
    }
    guess = combined(of_warps[at.stage][1]).guess();
    fence_for_bulk();
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.x_full + 8 * at.stage);
  }
}
#endif
#else
template <int rank>
DEVICE void produce_ranked(const uint8_t* w, [[maybe_unused]] const CUtensorMap* map_w, const Maps& maps, const Shapes& shapes, const Rings& rings) {
  if (WITH_MAP_W) prefetch_map(map_w);
#pragma unroll
  for (int phase = 0; phase < PHASES; ++phase) prefetch_map(maps.of + phase);
  Position at;
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const CUtensorMap* const map_x = maps.of + phase_of(shapes, tile);
    const Tile of(shape, inside_phase(shapes, tile));
    const Range range(shape, of);
    const LoadBase base(shape, of.pixel);
    const int first_tap = (int)shape.tap_base + taps_apart(shapes, tile);
    const int channel = of.group * (int)shape.channels_group, limb_images = (int)shape.limb_images;
    const int blocks = (int)shape.blocks, channel_blocks = (int)shape.channel_blocks;
    const long long w_block = shape.row_blocks * A_SUB;  // bytes of 64 rows
    [[maybe_unused]] const long long w_next = next_rows(of, shape) ? w_block : 0;
    [[maybe_unused]] const uint8_t* const w_tile = w + (of.group * shape.blocks_group + of.m / 64) * w_block;
    int block = range.first * SUB_TILES;
    const Divided of_tap(block, channel_blocks, shape.by_channel_blocks), of_row(of_tap.quotient, shape.tap_s, shape.by_tap_s);
    const Divided of_slice(of_row.quotient, shape.tap_r, shape.by_tap_r);
    int c = of_tap.rest, s = of_row.rest, r = of_slice.rest, t = of_slice.quotient;
    int tap, x_s, x_r, x_t;  // the tap's number in w and its offsets in x: computed once a tap, since the producer thread takes long to compute them
    auto begin_tap = [&] {
      tap = first_tap + t * (int)shape.tap_step_t + r * (int)shape.tap_step_r + s * (int)shape.tap_step_s;
      x_s = s * (int)shape.dilation_w;
      x_r = r * (int)shape.dilation_h;
      x_t = t * (int)shape.dilation_d;
    };
    begin_tap();
    for (int step = range.first; step < range.last; ++step) {
      const uint32_t stage = rings.stage(at), arrived = rings.arrived(at);
      rings.wait_empty(at);
      barrier_expect(arrived, STAGE_BYTES);
#pragma unroll
      for (int sub = 0; sub < SUB_TILES; ++sub) {
        // blocks past the end fill the last stage: with the zeros at the end of w, and with channels of x past the last one, which arrive as zeros
        const bool real = SUB_TILES == 1 || block < blocks;
        const uint8_t* const from = w_tile + (real ? (long long)tap * channel_blocks + c : shape.row_blocks - 1) * A_SUB;
#pragma unroll
        for (int rows = 0; rows < BLOCK_M / 64; ++rows)
          if (W_MN_MAJOR) {
            load_box(stage + rows * A_SUB, map_w, arrived, of.m + 64 * rows, tap, channel + c * LOAD_CHANNELS);
          } else if (WITH_MAP_W && shape.w_lies) {
            load_box(stage + (rows * SUB_TILES + sub) * A_SUB, map_w, arrived, real ? c * LOAD_CHANNELS : (int)shape.channels, tap,
                     of.group * (int)shape.rows_group + of.m + 64 * rows);
          } else {
            load_bytes(stage + (rows * SUB_TILES + sub) * A_SUB, from + rows * w_next, A_SUB, arrived);
          }
#pragma unroll
        for (int limb = 0; limb < LIMBS; ++limb)
          load_im2col<rank>(stage + A_BYTES + limb * B_BYTES + sub * BLOCK_N * SPAN, map_x, arrived,
                            real ? channel + c * LOAD_CHANNELS : (int)shape.channels, base.w, base.h, base.d,
                            base.image + limb * limb_images, real ? x_s : 0, real ? x_r : 0, real ? x_t : 0);
        ++block;
        if (++c == channel_blocks) {
          c = 0;
          next_tap(t, r, s, (int)shape.tap_r, (int)shape.tap_s);
          begin_tap();
        }
      }
      at.next();
    }
  }
}
DEVICE void produce(const uint8_t* w, const CUtensorMap* map_w, const Maps& maps, const Shapes& shapes, const Rings& rings) {
  const int rank = (int)shapes.of[0].rank;
  if (rank == 1) produce_ranked<1>(w, map_w, maps, shapes, rings);
  if (rank == 2) produce_ranked<2>(w, map_w, maps, shapes, rings);
  if (rank == 3) produce_ranked<3>(w, map_w, maps, shapes, rings);
}
#endif

// ---- a tile's sums, scaled and so on, to y

// What a thread has to know to store its sums: where its consumer's channels and pixels begin, and what finishes the sums of
// its two channels. It is loaded while the tile is multiplied.
struct Rows {
  int m, pixel, end, group, split;
  [[maybe_unused]] int patch;      // the patch's number
  [[maybe_unused]] bool real[2];   // whether a thread's two channels exist
  [[maybe_unused]] long long at;   // offset in y of the thread's first pixel
  [[maybe_unused]] float scale_x;  // of the image, or of the patch
  float scale_w[2];                // of the packed filter
  Finish<SCALED> finish[2];
  DEVICE Rows(const GemmPhase& shape, const Tile& of, int consumer, const float* scale_n, const float* scale_k, const Scales<out_t> scales, const out_t* biases)
      : m(of.m + (BLOCK_M == 128 ? 64 * consumer : 0)), pixel(of.pixel + (BLOCK_M == 128 ? 0 : WGMMA_N * consumer)),
        end(of.end), group(of.group), split(of.split) {
    if (PATCH_ROWS) {
      patch = BLOCK_M == 128 ? of.patch : 2 * of.patch + consumer;
      const int image = of.image(shape), lane = threadIdx.x % 32;
      const int row = of.row + (BLOCK_M == 128 ? 0 : PATCH_ROWS * consumer), column = of.column + 2 * (lane % 4);
      const int first = m + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
      scale_x = FUSED_SPLIT ? 0 : SCALED ? scale_n[image] : 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) real[half] = first + 8 * half < (int)shape.rows_group;
      at = image * shape.out_image + (group * (int)shape.rows_group + first) * shape.out_row + row * (int)shape.q + column;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = min(group * (int)shape.rows_group + m + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4 + 8 * half, (int)shape.rows - 1);
      scale_w[half] = scaled(shape) ? scale_k[k] : 1;
      finish[half].of = ScaleAndBias(shape, scales, biases, k);
    }
  }
};

#if INTERLEAVE_COLUMNS
// Keeps the sums of a pair's first phase, or writes them with those of the second. A warp keeps one piece for each half of its channels and CHUNK
// pixels, behind one piece of free room: once a piece has been read, its own room and that before it hold rows of y.
template <class Phase>
DEVICE void store_pair(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, bool second, uint8_t* kept, const float* scales,
                       const long long* output_offsets, out_t* y) {
  struct alignas(2 * sizeof(out_t)) Vector {
    out_t v[2];
  };
  const int lane = threadIdx.x % 32, m = rows.m + threadIdx.x % 128 / 32 * 16;
  y += rows.split * shape.out_part + (rows.group * (int)shape.rows_group + m) * shape.out_row;
  __syncwarp();  // the last pair has been read
  for_all<(WGMMA_N + CHUNK - 1) / CHUNK>([&](auto chunk) {
    constexpr int base = decltype(chunk)::value * CHUNK, width = WGMMA_N - base < CHUNK ? WGMMA_N - base : CHUNK, SIZE = 8 * width * 4;
    const bool real = lane < width && rows.pixel + base + lane < rows.end;
    out_t* const to = y + (real ? output_offsets[base + lane] - 1 : 0);  // the second phase's offsets, which are those of odd columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint8_t* const piece = kept + INTERLEAVED_PIECE + base * 64 + half * SIZE;
      // neighbouring rows lie in different banks, 16 bytes by 16 bytes
      float4* const turned = (float4*)(piece - SIZE);
      auto place = [](int row, int at) { return row * (width / 2) + (width % 16 ? at : at ^ row % 2 * 4); };
      float value[width / 4];
      float2 before[width / 8];
#pragma unroll
      for (int i = 0; i < width / 8; ++i) {
        const int at = 4 * (base / 8 + i) + 2 * half;
        const float2 scale = SCALED ? *(const float2*)(scales + base + 8 * i + 2 * (lane % 4)) : make_float2(1, 1);
        value[2 * i] = rows.finish[half].shifted(shape, sum[at], scale.x * rows.scale_w[half]);
        value[2 * i + 1] = rows.finish[half].shifted(shape, sum[at + 1], scale.y * rows.scale_w[half]);
      }
      activate(shape, value);
#pragma unroll
      for (int i = 0; i < width / 8; ++i) {
        float2& slot = ((float2*)piece)[32 * i + lane];
        if (second) {
          before[i] = slot;
        } else {
          slot = make_float2(value[2 * i], value[2 * i + 1]);
        }
      }
      if (second) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < width / 8; ++i) turned[place(lane / 4, 4 * i + lane % 4)] = make_float4(before[i].x, value[2 * i], before[i].y, value[2 * i + 1]);
        __syncwarp();
#pragma unroll
        for (int row = 0; row < 8; ++row) {
          if (!real || m + 8 * half + row >= (int)shape.rows_group) continue;
          const float2 both = ((const float2*)(turned + place(row, lane / 2)))[lane % 2];
          const Vector out = {from_float<out_t>(both.x), from_float<out_t>(both.y)};
          store_word(to + (8 * half + row) * shape.out_row, *(const word<Vector>*)&out);
        }
      }
    }
  });
}
#elif PATCH_ROWS
// Some rows of a consumer's patch. Four lanes write a row of 8 pixels of a channel.
template <int first, int last, class Phase>
DEVICE void store_rows(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, const out_t* residual, out_t* y) {
  struct alignas(2 * sizeof(out_t)) Vector {
    out_t v[2];
  };
  const int wide = (int)shape.q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long at = rows.at + first * wide + 8 * half * shape.out_row;
    const float factor = rows.scale_x * rows.scale_w[half];
    Vector added[last - first] = {};
    if (adds(shape) && rows.real[half]) {
#pragma unroll
      for (int i = first; i < last; ++i) added[i - first] = *(const Vector*)(residual + at + (i - first) * wide);
    }
    float v[2 * (last - first)];
#pragma unroll
    for (int i = first; i < last; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        v[2 * (i - first) + e] = rows.finish[half].whole(shape, sum[4 * i + 2 * half + e], factor, adds(shape) ? to_float(added[i - first].v[e]) : -0.f);
    activate(shape, v);
#pragma unroll
    for (int i = first; i < last; ++i) {
      const Vector out = {from_float<out_t>(v[2 * (i - first)]), from_float<out_t>(v[2 * (i - first) + 1])};
      if (rows.real[half]) store_word(y + at + (i - first) * wide, *(const word<Vector>*)&out);
    }
  }
}
#elif !TENSOR_STORE
// Stores a warp's sums of CHUNK pixels from `base` on: its part of shared memory transposes them, so that neighbours are written together.
template <int base, class Phase>
DEVICE void store_chunk(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, float* staging, const float* scales, const out_t* residual,
                        out_t* y) {
  constexpr int PITCH = NHWC ? 20 : 40;
  constexpr int width = WGMMA_N - base < CHUNK ? WGMMA_N - base : CHUNK;
  const int lane = threadIdx.x % 32;
  __syncwarp();  // the last chunk has been read
#pragma unroll
  for (int i = 0; i < width / 8; ++i) {
    const int column = 8 * i + 2 * (lane % 4);
    const float2 scale = SCALED ? *(const float2*)(scales + base + column) : make_float2(1, 1);
    float v[4];  // [half of the rows][neighbouring pixels]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (base / 8 + i) + 2 * half;
      v[2 * half] = rows.finish[half].shifted(shape, sum[at], scale.x * rows.scale_w[half]);
      v[2 * half + 1] = rows.finish[half].shifted(shape, sum[at + 1], scale.y * rows.scale_w[half]);
    }
    if (!MAY_ADD) activate(shape, v);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (NHWC) {
        staging[column * PITCH + row] = v[2 * half];
        staging[(column + 1) * PITCH + row] = v[2 * half + 1];
      } else {
        *(float2*)(staging + row * PITCH + column) = make_float2(v[2 * half], v[2 * half + 1]);
      }
    }
  }
  __syncwarp();
  constexpr int ACROSS = (NHWC ? 16 : CHUNK) / VEC, DOWN = NHWC ? CHUNK : 16, STEP = 32 / ACROSS;
  const int across = lane % ACROSS * VEC, down = lane / ACROSS, pixel0 = rows.pixel + base;
  const int m0 = rows.m + threadIdx.x % 128 / 32 * 16, k0 = rows.group * (int)shape.rows_group + m0;  // this warp's channels
  y += rows.split * shape.out_part;
  struct alignas(VEC * sizeof(out_t)) Vector {
    out_t v[VEC];
  };
#if NHWC
  const int last = m0 + across < (int)shape.rows_group ? min(width, rows.end - pixel0) : 0;
  const int first = k0 + across;
#else
  const int pixel = pixel0 + across;
  const int last = across < width && pixel < rows.end ? (int)shape.rows_group - m0 : 0;
  const Divided of_image(pixel, shape.plane, shape.by_plane);
  const long long first = of_image.quotient * shape.out_image + (k0 + down) * shape.out_row + plane_offset<DENSE>(shape, of_image.rest);
#endif
  y += first;
  residual += first;
  auto place = [&](int i) -> long long {  // offset of this thread's vector number i
#if NHWC
    const int pixel = pixel0 + down + i * STEP;
    if (DENSE) return pixel * shape.rows;
    const Divided of_image(pixel, shape.plane, shape.by_plane);
    return (of_image.quotient * shape.out_size + plane_offset<DENSE>(shape, of_image.rest)) * shape.rows;
#else
    return i * STEP * shape.out_row;
#endif
  };
  // loads of the residual under way together: they take the registers of sums that have gone to shared memory; more would spill
  constexpr int COUNT = DOWN / STEP, MOST = DENSE ? 8 : 4, BATCH = COUNT < MOST ? COUNT : MOST;
  Vector added[BATCH] = {};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (adds(shape) && i % BATCH == 0)
#pragma unroll
      for (int j = i; j < i + BATCH; ++j) added[j - i] = down + j * STEP < last ? *(const Vector*)(residual + place(j)) : Vector();
    const float* const from = staging + (down + i * STEP) * PITCH + across;
    float v[VEC];
    Vector out;
#pragma unroll
    for (int e = 0; e < VEC; ++e) v[e] = MAY_ADD ? from[e] + (adds(shape) ? to_float(added[i % BATCH].v[e]) : -0.f) : from[e];
    if (MAY_ADD) activate(shape, v);
#pragma unroll
    for (int e = 0; e < VEC; ++e) out.v[e] = from_float<out_t>(v[e]);
    if (down + i * STEP < last) store_word(y + place(i), *(const word<Vector>*)&out);
  }
}
#else

// The byte at which 16-byte piece `piece` of row `row` lies in a tile of swizzled rows of 128 bytes.
DEVICE int swizzled(int row, int piece) { return row * 128 + ((piece ^ row % 8) << 4); }

// Stores a consumer's sums of CHUNK pixels from `base` on by TMA: its 128 threads fill a tile of `staging` together.
template <int base, class Phase>
DEVICE void store_chunk_by_tensor(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, int consumer, uint8_t* staging,
                                  const float* scales, const out_t* residual, const CUtensorMap* map_y) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  uint8_t* const tile = staging + base / CHUNK % 2 * (STAGING / 2);
  out_t added[CHUNK / 8][2][2] = {};
  // a warp reads 8 channels of 4 pixels at once, and the 8 channels next to them; all loads are issued before the first wait
  if (adds(shape)) {
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int m = rows.m + 16 * warp + lane / 4 + 8 * half, pixel = rows.pixel + base + 8 * i + 2 * (lane % 4) + e;
          if (m < (int)shape.rows_group && pixel < rows.end) added[i][half][e] = residual[pixel * shape.rows + rows.group * (int)shape.rows_group + m];
        }
  }
  // the store before last has read this tile; if a consumer's chunks are odd in number, the first tile's last store is the very last one
  if (thread == 0) bulk_wait_read<base == 0 && WGMMA_N / CHUNK % 2 ? 0 : 1>();
  named_barrier(1 + consumer, 128);
#pragma unroll
  for (int i = 0; i < CHUNK / 8; ++i) {
    float v[4];  // [half of the rows][neighbouring pixels]
    const int column = 8 * i + 2 * (lane % 4);
    const float2 scale = SCALED ? *(const float2*)(scales + base + column) : make_float2(1, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (base / 8 + i) + 2 * half;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        v[2 * half + e] =
            rows.finish[half].whole(shape, sum[at + e], (e ? scale.y : scale.x) * rows.scale_w[half], adds(shape) ? to_float(added[i][half][e]) : -0.f);
    }
    activate(shape, v);
#if OUT == 32
    // two boxes of 32 channels
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 16 * warp + lane / 4 + 8 * half;
        *(float*)(tile + row / 32 * (CHUNK * 128) + swizzled(column + e, row % 32 / 4) + row % 4 * 4) = v[2 * half + e];
      }
#else
    // 8 x 8 blocks of 16-bit numbers, transposed, one row of 8 channels a lane
    const uint32_t packed[2] = {word_of(from_float<out_t>(v[0]), from_float<out_t>(v[1])), word_of(from_float<out_t>(v[2]), from_float<out_t>(v[3]))};
    store_turned(shared_address(tile) + swizzled(8 * i + lane % 8, 2 * warp + lane / 8 % 2), packed);
#endif
  }
  fence_for_bulk();
  named_barrier(1 + consumer, 128);
  if (thread == 0) {
#pragma unroll
    for (int part = 0; part < (int)sizeof(out_t) / 2; ++part)
      store_box(map_y, shared_address(tile) + part * CHUNK * 128, rows.m + part * 32, rows.group, rows.pixel + base, rows.split);
    bulk_commit();
  }
}
#endif

#if NOTES
// Four lanes share a channel's pixels.
DEVICE void store_moments(const float (&sum)[WGMMA_N / 2], const Rows& rows, const GemmPhase& shape, const float* scales, float* moments) {
  const int lane = threadIdx.x % 32, count = min(rows.end - rows.pixel, WGMMA_N);
  if (count <= 0) return;
  const int slice = rows.pixel / WGMMA_N;
  // if all pixels are real and have one scale, which is common, the raw sums' moments are scaled at the end
  bool alike = OUT == 32 && count == WGMMA_N;
  auto scale_of = [&](int pixel) { return SCALED ? scales[pixel] : 1; };
#pragma unroll
  for (int i = 0; i < WGMMA_N; i += 32) alike &= scale_of(min(i + lane, WGMMA_N - 1)) == scale_of(0);
  alike = __all_sync(~0u, alike);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = scale_of(0) * rows.scale_w[half];
    auto value = [&](int i, int e) {  // as it is stored
      return to_float(from_float<out_t>(rows.finish[half].shifted(shape, sum[4 * i + 2 * half + e], scale_of(8 * i + 2 * (lane % 4) + e) * rows.scale_w[half])));
    };
    const float first = __shfl_sync(~0u, alike ? sum[2 * half] : value(0, 0), lane & ~3);
    Deviations of;
    if (alike) {
#pragma unroll
      for (int i = 0; i < WGMMA_N / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) of.add(sum[4 * i + 2 * half + e] - first);
    } else {
#pragma unroll
      for (int i = 0; i < WGMMA_N / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) of.add(8 * i + 2 * (lane % 4) + e < count ? value(i, e) - first : 0);
    }
    of.add_lanes<1, 4>();
    const int m = rows.m + (int)threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * half;
    if (lane % 4 == 0 && m < (int)shape.rows_group) {
      float mean = of.mean(first, count), square = of.off_mean(count);
      if (alike) {
        mean = rows.finish[half].shifted(shape, mean, factor);
        square *= factor;
        square *= factor;
        square *= rows.finish[half].of.scale * rows.finish[half].of.scale;
      }
      float* const to = moments + (long long)slice * 2 * shape.rows + rows.group * (int)shape.rows_group + m;
      to[0] = mean;
      to[shape.rows] = square;
    }
  }
}
#endif

#if !PATCH_ROWS
// Stores a consumer's 64 channels of a tile.
template <class Phase>
DEVICE void store_tile(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, [[maybe_unused]] int tile, [[maybe_unused]] int consumer,
                       uint8_t* staging, const float* scales, [[maybe_unused]] const long long* output_offsets, const out_t* residual,
                       const CUtensorMap* map_y, out_t* y) {
#if INTERLEAVE_COLUMNS
  store_pair(sum, rows, shape, tile % 2, staging + threadIdx.x % 128 / 32 * INTERLEAVED, scales, output_offsets, y);
#else
  for_all<(WGMMA_N + CHUNK - 1) / CHUNK>([&](auto chunk) {
    constexpr int base = decltype(chunk)::value * CHUNK;
#if TENSOR_STORE
    store_chunk_by_tensor<base>(sum, rows, shape, consumer, staging, scales, residual, map_y);
#else
    store_chunk<base>(sum, rows, shape, (float*)staging + threadIdx.x % 128 / 32 * (32 * 20), scales, residual, y);
#endif
  });
#endif
}

// Stores a consumer's sums, and notes their moments.
DEVICE void store_sums(const float (&sum)[WGMMA_N / 2], const Rows& rows, const GemmPhase& shape, int tile, int consumer, uint8_t* staging,
                       const float* scales, const long long* output_offsets, const out_t* residual, const CUtensorMap* map_y,
                       [[maybe_unused]] float* moments, out_t* y) {
#if NOTES
  if (OF_LAYER(NOTED, shape.scaled & 2)) store_moments(sum, rows, shape, scales, moments);
#endif
  if (is_plain(shape)) {
    store_tile(sum, rows, as_plain(shape), tile, consumer, staging, scales, output_offsets, residual, map_y, y);
  } else {
    store_tile(sum, rows, shape, tile, consumer, staging, scales, output_offsets, residual, map_y, y);
  }
}

// Puts into shared memory what the stores of a tile need of a consumer's pixels: scales, and with INTERLEAVE_COLUMNS offsets in y.
DEVICE void stage_output_offsets(const Rows& rows, const GemmPhase& shape, int consumer, float* scales, long long* output_offsets, const float* scale_n) {
  if (!SCALED && !INTERLEAVE_COLUMNS) return;
  named_barrier(1 + consumer, 128);  // the last tile's have been read
  for (int i = threadIdx.x % 128; i < WGMMA_N; i += 128) {
    const Divided of_image(min(rows.pixel + i, rows.end - 1), shape.plane, shape.by_plane);
    if (SCALED) scales[i] = scaled(shape) ? scale_n[of_image.quotient] : 1;
    if (INTERLEAVE_COLUMNS) output_offsets[i] = of_image.quotient * shape.out_image + plane_offset<false>(shape, of_image.rest);
  }
  named_barrier(1 + consumer, 128);
}
#endif

// ---- the multiplication

// The descriptors of what a stage holds of w and x.
DEVICE uint64_t w_descriptor(uint32_t place) { return W_MN_MAJOR ? wgmma_mn_major_descriptor(place) : wgmma_descriptor<SPAN>(place); }
DEVICE uint64_t x_descriptor(uint32_t place, [[maybe_unused]] int halo_w = 0) {
  return wgmma_descriptor<SPAN>(place, PATCH_ROWS ? halo_w * SPAN : 8 * SPAN);
}

// The products of 64 of k, 16 at a time; `fresh` begins new sums.
DEVICE void multiply(float (&d)[WGMMA_N / 2], uint64_t a, uint64_t b, bool fresh) {
#pragma unroll
  for (int k = 0; k < 64; k += 16) {
    const int sub = k / LOAD_CHANNELS, inner = 2 * (k % LOAD_CHANNELS);
    wgmma(d, a + (W_MN_MAJOR ? k * 128 : sub * A_SUB + inner) / 16, b + (sub * BLOCK_N * SPAN + inner) / 16, !(fresh && k == 0));
  }
}

// Prefetches a consumer's share of a tile's residual: the channels of each pixel. The stores' loads then wait for the L2 cache alone, not for
// memory chunk by chunk.
DEVICE void prefetch_residual(const Shapes& shapes, int tile, int consumer, const out_t* residual) {
#if TENSOR_STORE
  if (tile >= all_tiles(shapes)) return;
  const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
  if (!adds(shape)) return;
  const Tile of(shape, inside_phase(shapes, tile));
  constexpr int LINE = 128 / (int)sizeof(out_t), CHANNELS = PINGPONG ? BLOCK_M : 64;
  const int m = of.m + (BLOCK_M == 128 && !PINGPONG ? 64 * consumer : 0), first = of.pixel + (BLOCK_M == 128 ? 0 : WGMMA_N * consumer);
  const int end = min(of.end, first + WGMMA_N), channels = min(m + CHANNELS, (int)shape.rows_group);
  for (int pixel = first + (int)threadIdx.x % 128; pixel < end; pixel += 128)
    for (int c = m; c < channels; c += LINE) prefetch_line(residual + pixel * shape.rows + of.group * (int)shape.rows_group + c);
#endif
}

#if PINGPONG
DEVICE void consume(const Shapes& shapes, const Rings& rings, int consumer, uint8_t* staging, float* scales, long long* output_offsets, const float* scale_n,
                    const float* scale_k, const out_t* bias, const Scales<out_t> scale, const out_t* residual, const CUtensorMap* map_y, float* moments, out_t* y) {
  Position at;
  float sum[2][WGMMA_N / 2];
  bool mine = consumer == 0;
  int parity = consumer == 0;  // the first turn is free
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile), mine = !mine) {
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const Tile of(shape, inside_phase(shapes, tile));
    const Range range(shape, of);
    if (!mine) {
      at.skip(range.last - range.first);
      continue;
    }
    prefetch_residual(shapes, tile, consumer, residual);
    barrier_wait(rings.turn + 8 * consumer, parity);
    parity ^= 1;
    for (int step = range.first; step < range.last; ++step) {
      const uint32_t stage = rings.stage(at);
      rings.wait_full(at);
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply(sum[half], w_descriptor(stage + half * SUB_TILES * A_SUB), x_descriptor(stage + A_BYTES), step == range.first);
      rings.commit<1>(at, step > range.first);
    }
    if (threadIdx.x % 32 == 0) barrier_arrive(rings.turn + 8 * (1 - consumer));
    wgmma_wait<0>();
    wgmma_arrived(sum[0]);
    wgmma_arrived(sum[1]);
    const bool any = range.first < range.last;
    if (any) rings.give_back(at, 1);
    [[maybe_unused]] const float part = lost_in(4 * (range.last - range.first));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < WGMMA_N / 2; ++i) {
        sum[half][i] = any ? sum[half][i] : 0;
        if (SCALED) sum[half][i] = with_lost(sum[half][i], part);
      }
      const Rows rows(shape, of, half, scale_n, scale_k, scale, bias);
      if (half == 0) stage_output_offsets(rows, shape, consumer, scales, output_offsets, scale_n);
      const auto apart = y_apart(shapes, tile);
      store_sums(sum[half], rows, shape, tile, consumer, staging, scales, output_offsets, residual + apart, map_y, moments, y + apart);
    }
  }
#if TENSOR_STORE
  if (threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive what is read from it
#endif
}
#else
DEVICE void consume(const Shapes& shapes, const Rings& rings, int consumer, [[maybe_unused]] uint8_t* staging, float* scales,
                    [[maybe_unused]] long long* output_offsets, const float* scale_n, const float* scale_k, const out_t* bias, const Scales<out_t> scale,
                    const out_t* residual, const CUtensorMap* map_y, [[maybe_unused]] float* moments, out_t* y) {
#if PATCH_ROWS
  const int halo_w = (int)shapes.of[0].halo_w, halo_bytes = (int)shapes.of[0].halo_bytes;
#else
  constexpr int halo_w = 0, halo_bytes = 0;
#endif
  // where a consumer's share of w and x begins; an MN-major block of 64 channels takes as many bytes as 64 rows
  const uint32_t a0 = rings.stages + (BLOCK_M == 128 ? SUB_TILES * A_SUB * consumer : 0);
  const uint32_t b0 = PATCH_ROWS ? rings.x + (BLOCK_M == 128 ? 0 : PATCH_ROWS * halo_w * SPAN * consumer)
                                 : rings.stages + A_BYTES + (BLOCK_M == 128 ? 0 : WGMMA_N * SPAN * consumer);
  Position at;  // the stage to multiply next
  float main[WGMMA_N / 2];
#if PRODUCTS == 3
  float cross[WGMMA_N / 2], total[WGMMA_N / 2];
#elif PATCH_ROWS
  float total[WGMMA_N / 2];
#else
  auto& total = main;
#endif
#if PATCH_ROWS
  XPosition x_at;
  Tap tap;
  const int dilation_h = (int)shapes.of[0].dilation_h, dilation_w = (int)shapes.of[0].dilation_w;
#endif
  auto arrived = [&] {  // wait for the stage to multiply next
#if PATCH_ROWS
    if (tap.r == 0 && tap.s == 0) barrier_wait(rings.x_full + 8 * x_at.stage, x_at.parity);
#endif
    rings.wait_full(at);
  };
  auto advance = [&] {
    at.next();
#if PATCH_ROWS
    if (tap.next(shapes.of[0])) x_at.next(shapes.of[0]);
#endif
  };
  // where the stage that comes next lies
  struct Place {
    uint32_t w, x;
  };
  auto place = [&] {
    Place of;
    of.w = a0 + at.stage * STAGE_BYTES;
#if PATCH_ROWS
    of.x = b0 + x_at.stage * LIMBS * halo_bytes + (tap.r * dilation_h * halo_w + tap.s * dilation_w) * SPAN;
#else
    of.x = b0 + at.stage * STAGE_BYTES;
#endif
    return of;
  };
  // the products of a stage and one pair of limbs
  auto multiply_limbs = [&](float(&d)[WGMMA_N / 2], const Place& of, int limb_a, int limb_b, bool fresh) {
    multiply(d, w_descriptor(of.w + limb_a * A_BLOCK), x_descriptor(of.x + limb_b * (PATCH_ROWS ? halo_bytes : B_BYTES), halo_w), fresh);
  };
  // give the stage that was multiplied `ago` stages ago (1 to 3) back to the producer
  auto give_back = [&](int ago) {
    if (threadIdx.x % 32 != 0) return;
    barrier_arrive(rings.empty + 8 * ((at.stage + STAGES - ago) % STAGES));
#if PATCH_ROWS
    if (tap.number == ago - 1)  // that stage was of the last tap, of at least 3
      barrier_arrive(rings.x_empty + 8 * ((x_at.stage ? x_at.stage : (int)shapes.of[0].x_stages) - 1));
#endif
  };
  [[maybe_unused]] int stored = first_tile();  // the tile that total and rows belong to
  Rows rows(shapes.of[phase_of(shapes, stored)], Tile(shapes.of[phase_of(shapes, stored)], inside_phase(shapes, stored)), consumer, scale_n, scale_k, scale, bias);
#if PRODUCTS == 3
  // Multiplies the first or second stage of a tile while `total` still holds the tile before. The second stage's main product and half of its
  // cross products are put off: a main sum over two stages would lose more to truncation, and nothing can be promoted yet.
  auto multiply_early = [&](auto number) {
    constexpr int n = decltype(number)::value;
    arrived();
    wgmma_fence();
    const Place of = place();
    if (n == 0) multiply_limbs(main, of, 0, 0, true);
    multiply_limbs(cross, of, 0, 1, n == 0);
    if (n == 0) multiply_limbs(cross, of, 1, 0, false);
    wgmma_commit();
    advance();
    if (n == 1) {  // the first stage may be loaded again while the tile before is stored
      wgmma_wait<1>();
      give_back(2);
    }
  };
  // where the tile's second stage lies, before the third one is multiplied
  auto second = [&] {
    const int stage = at.stage ? at.stage - 1 : STAGES - 1;
    Place of;
    of.w = a0 + stage * STAGE_BYTES;
#if PATCH_ROWS
    of.x = b0 + x_at.stage * LIMBS * halo_bytes + (shapes.of[0].tap_s > 1 ? dilation_w : dilation_h * halo_w) * SPAN;  // there are 3 taps or more
#else
    of.x = b0 + stage * STAGE_BYTES;
#endif
    return of;
  };
#else
  // multiplies the stage that comes next; `fresh` begins new sums
  auto multiply_stage = [&](bool fresh) {
    arrived();
    wgmma_fence();
    multiply_limbs(main, place(), 0, 0, fresh);
    wgmma_commit();
    advance();
  };
#endif
#if PATCH_ROWS
  auto store_part = [&](auto part) {
    constexpr int number = decltype(part)::value;
    constexpr int first = number * PATCH_ROWS / PARTS, last = (number + 1) * PATCH_ROWS / PARTS;
    if (is_plain(shapes.of[0])) {
      store_rows<first, last>(total, rows, as_plain(shapes.of[0]), residual, y);
    } else {
      store_rows<first, last>(total, rows, shapes.of[0], residual, y);
    }
  };
  auto store = [&] { for_all<PARTS>(store_part); };
#else
  auto store = [&] {
    const auto apart = y_apart(shapes, stored);
    store_sums(total, rows, shapes.of[phase_of(shapes, stored)], stored, consumer, staging, scales, output_offsets, residual + apart, map_y, moments, y + apart);
  };
#endif
  bool pending = false;  // total holds the tile before, which is not stored yet
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    prefetch_residual(shapes, next_tile(tile), consumer, residual);
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
#if PATCH_ROWS
    // One part of the tile before is stored beside each of the first stages. What this tile's stores need is loaded beside them too for one
    // product, and after them for three, whose registers are full.
    const Range range(shape, Tile(shape, tile));
    int step = range.first;
#if FUSED_SPLIT
    const int x_stage = x_at.stage;
    auto look_ahead = [&] {
      Rows next(shape, Tile(shape, tile), consumer, nullptr, scale_k, scale, bias);
      next.scale_x = scales[x_stage];
      return next;
    };
#else
    auto look_ahead = [&] { return Rows(shape, Tile(shape, tile), consumer, scale_n, scale_k, scale, bias); };
#endif
#if PRODUCTS == 1
    multiply_stage(true);
    ++step;
    const Rows next = look_ahead();
    for_all<PARTS>([&](auto part) {
      if (pending) store_part(part);
      const bool more = step < range.last;
      if (more) multiply_stage(false);
      wgmma_wait<1>();  // the stage before this one has been read
      if (more) give_back(2);
      step += more;
    });
    rows = next;
#else
    for_all<PARTS>([&](auto part) {
      constexpr int number = decltype(part)::value;
      if (number < EARLY && step < range.last) {
        multiply_early(part);
        ++step;
      }
      if (pending) store_part(part);
    });
    rows = look_ahead();
#endif
    const bool any = range.first < range.last;  // always true here; a compiler that knew would give main and total a fourth set of registers, and spill
#else
    const Tile of(shape, inside_phase(shapes, tile));
    const Range range(shape, of);
    const bool any = range.first < range.last;
    int step = range.first;
    auto look_ahead = [&] {  // loads what this tile's stores need; the tile before has been stored
      rows = Rows(shape, of, consumer, scale_n, scale_k, scale, bias);
      stored = tile;
      stage_output_offsets(rows, shape, consumer, scales, output_offsets, scale_n);
    };
#if PRODUCTS == 3
    if (MAY_ADD && !OVERLAP) {  // both are overwritten, but the compiler would keep their registers while the tile before is stored
#pragma unroll
      for (int i = 0; i < WGMMA_N / 2; ++i) main[i] = cross[i] = 0;
    }
    // two stages at once, while the tile before is stored; from then on total belongs to this tile
    for_all<EARLY>([&](auto number) {
      if (step < range.last) {
        multiply_early(number);
        ++step;
      }
    });
    if (OVERLAP && pending) store();
#endif
    look_ahead();
#endif
#if PRODUCTS == 3
    wgmma_wait<0>();
    wgmma_arrived(main);
    wgmma_arrived(cross);
    const int early = step - range.first;
    if (early == 1) give_back(1);
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) {
      total[i] = any ? main[i] : 0;
      cross[i] = any ? cross[i] : 0;
    }
    // Multiplies a stage and two pairs of limbs, or with `both` all three. The main sum is added to the total while the cross products are under way.
    auto multiply_and_add = [&](const Place& of, bool both) {
      wgmma_fence();
      multiply_limbs(main, of, 0, 0, true);
      wgmma_commit();
      if (both) multiply_limbs(cross, of, 0, 1, false);
      multiply_limbs(cross, of, 1, 0, false);
      wgmma_commit();
      if (both) advance();
      wgmma_wait<1>();
      wgmma_arrived(main);
#pragma unroll
      for (int i = 0; i < WGMMA_N / 2; ++i) total[i] += main[i];
      wgmma_wait<0>();
      wgmma_arrived(cross);
      give_back(1);
    };
    if (early == 2) multiply_and_add(second(), false);  // what multiply_early put off
    for (; step < range.last; ++step) {
      arrived();
      multiply_and_add(place(), true);
    }
    const Promoted promoted(range.last - range.first, 2048);
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) total[i] = fmaf(promoted.with_lost(cross[i], total[i], main[i]), 0x1p-11f, total[i]);
#else
    for (; step < range.last; ++step) {
      multiply_stage(step == range.first);
      wgmma_wait<1>();  // the stage before this one has been read
      if (step > range.first) give_back(2);
    }
    wgmma_wait<0>();
    wgmma_arrived(main);
    if (any) give_back(1);
    [[maybe_unused]] const float part = scaled(shape) ? lost_in(4 * (range.last - range.first)) : 0;  // 0 for 16-bit operands: their rounding hides what is lost
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) {
      total[i] = any ? main[i] : 0;
      if (SCALED) total[i] = with_lost(total[i], part);
    }
#endif
    pending = true;
    if (!OVERLAP) store();
  }
  if (OVERLAP && pending) store();
#if TENSOR_STORE
  if (threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive what is read from it
#endif
}
#endif

#if MENDS
// Whether this thread of the consumers finds a flagged image or channel.
DEVICE bool any_of_flags(const GemmPhase& shape, const int* __restrict__ x_flags, const int* __restrict__ w_flags) {
  const int images = divided((int)shape.pixels, shape.by_plane), rows = (int)shape.rows;
  int found = 0;
#pragma unroll 4
  for (int i = threadIdx.x - 128; i < max(images, rows); i += 128 * CONSUMERS) found |= x_flags[min(i, images - 1)] | w_flags[min(i, rows - 1)];
  return found != 0;
}

// Computes a tile that the block stored once more where its limbs did not fit. The consumers' warps share it.
__device__ __noinline__ void mend_tile(const Shapes& shapes, int tile, const MendFinish& what, const Mends& mends, MendOperands operands,
                                       [[maybe_unused]] int* redone, out_t* y) {
  const int phase = phase_of(shapes, tile);
  const GemmPhase& shape = shapes.of[phase];
  const Tile of(shape, inside_phase(shapes, tile));
  const auto apart = y_apart(shapes, tile);
  y += apart;
  operands.residual += apart;
  operands.w += w_apart(shapes, tile);
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
#pragma unroll 1  // results are seldom computed again, and unrolled code would lengthen every compilation
  for (int strip = warp; strip < BLOCK_M / MENDED * ((BLOCK_N + 31) / 32); strip += 4 * CONSUMERS) {
    const int m = of.m + strip % (BLOCK_M / MENDED) * MENDED, inside = strip / (BLOCK_M / MENDED) * 32 + lane;
    if (m >= (int)shape.rows_group) continue;
    const int pixel = PATCH_ROWS ? of.pixel + (of.row + inside / 8) * (int)shape.q + of.column + inside % 8 : of.pixel + inside;
    const int mended = inside < BLOCK_N && pixel < of.end ? pixel : -1;
    [[maybe_unused]] const bool again = mend<NHWC, DENSE>(shape, what, mends.arrays, mends.of[phase], operands, y, of.group, m, mended);
    if (NOTES && redone && again && lane == 0) redone[blockIdx.x] = 1;
  }
}

__device__ __noinline__ void mend_tiles(const Shapes& shapes, const Mends& mends, const MendOperands& operands, int* redone, out_t* y) {
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    mend_tile(shapes, tile, MendFinish(shapes.of[phase_of(shapes, tile)]), mends, operands, redone, y);
  }
}
#endif

#if ADDS_PARTS
// Adds and finishes the parts of a tile. A thread takes VEC neighbours at a time, and RUNS such vectors at once: their loads wait for memory
// together.
DEVICE void add_parts(const GemmPhase& shape, const JoinArguments& join, const Tile& of, const float* parts, const out_t* bias, const Scales<out_t> scale,
                      const float* residual, float* y) {
  constexpr int ACROSS = (NHWC ? BLOCK_M : BLOCK_N) / VEC, ALL = BLOCK_M * BLOCK_N / VEC, APART = 128 * CONSUMERS, RUNS = VEC == 4 ? 4 : 8;
  struct alignas(VEC * 4) Vector {
    float v[VEC];
  };
  for (int first = threadIdx.x - 128; first < ALL; first += RUNS * APART) {
    long long at[RUNS];  // offsets in y; -1 where there is nothing
    int k[RUNS];
    float v[RUNS][VEC] = {};
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const int i = first + run * APART, across = i % ACROSS * VEC, down = i / ACROSS;
      const int m = of.m + (NHWC ? across : down), pixel = of.pixel + (NHWC ? down : across);
      k[run] = of.group * (int)shape.rows_group + m;
      const Divided of_image(pixel, shape.plane, shape.by_plane);
      const long long inside = plane_offset<DENSE>(shape, of_image.rest);
      at[run] = NHWC ? (of_image.quotient * shape.out_size + inside) * shape.rows + k[run] : of_image.quotient * shape.out_image + k[run] * shape.out_row + inside;
      if (i >= ALL || m >= (int)shape.rows_group || pixel >= of.end) at[run] = -1;
    }
    const float* from = parts;
#pragma unroll 2
    for (int part = 0; part < (int)shape.splits; ++part) {
      float more[RUNS][VEC];
#pragma unroll
      for (int run = 0; run < RUNS; ++run)
        if (at[run] >= 0) {
          if constexpr (VEC == 4) *(float4*)more[run] = __ldcg((const float4*)(from + at[run]));
          else more[run][0] = __ldcg(from + at[run]);
        }
#pragma unroll
      for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int e = 0; e < VEC; ++e) v[run][e] += more[run][e];
      from += shape.out_part;
    }
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      if (at[run] < 0) continue;
      Vector added = {}, out;
      if (has_residual(join)) added = *(const Vector*)(residual + at[run]);
#pragma unroll
      for (int e = 0; e < VEC; ++e) {
        const Finish<false> finish{ScaleAndBias(join, scale, bias, k[run] + (NHWC ? e : 0))};
        v[run][e] = finish.whole(join, v[run][e], 1, has_residual(join) ? added.v[e] : -0.f);
      }
      activate(join, v[run]);
#pragma unroll
      for (int e = 0; e < VEC; ++e) out.v[e] = v[run][e];
      *(Vector*)(y + at[run]) = out;
    }
  }
}

struct JoinOperands {
  const float* parts;
  unsigned* tickets;
  const void* bias;
  Scales<out_t> scale;
  const void* residual;
  void* y;
};

// Adds the parts of those tiles whose last part this block stored. Only the consumers' threads come here, once all that they stored is visible.
__device__ __noinline__ void join_tiles(const Shapes& shapes, const JoinArguments& join, const JoinOperands& operands
#if MENDS
                                        , const Mends& mends, const MendOperands& flagged
#endif
) {
  __shared__ bool last;
  __threadfence();
  named_barrier(STORED, 128 * CONSUMERS);
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    const int number = inside_phase(shapes, tile), turns = all_tiles(shapes) / (int)shapes.of[0].tiles;
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const Tile of(shape, number);
    const Divided down(number, shape.tiles_m, shape.by_tiles_m);
    const int whole = (divided(down.quotient, shape.by_splits) * (int)shape.tiles_m + down.rest) * turns + turn_of(shapes, tile);
    if (threadIdx.x == 128) last = atomicInc(operands.tickets + whole, (unsigned)shape.splits - 1) == (unsigned)shape.splits - 1;
    named_barrier(STORED, 128 * CONSUMERS);
    const bool mine = last;
    if (mine) {
      __threadfence();
      const auto apart = y_apart(shapes, tile);
      add_parts(shape, join, of, operands.parts + apart, (const out_t*)operands.bias, operands.scale, (const out_t*)operands.residual + apart,
                (out_t*)operands.y + apart);
    }
    named_barrier(STORED, 128 * CONSUMERS);
#if MENDS
    if (mine && any_flag) mend_tile(shapes, tile, MendFinish(join), mends, flagged, nullptr, (out_t*)operands.y);
#endif
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if FUSED_SPLIT
    implicit_gemm_sm90(const __grid_constant__ Maps maps_x, const float* __restrict__ x, float* __restrict__ unit_scales,
                       int* __restrict__ unit_flags, const uint8_t* __restrict__ w,
#else
    implicit_gemm_sm90(const __grid_constant__ Maps maps_x,
#if WITH_MAP_W
                       const __grid_constant__ CUtensorMap map_w,
#endif
#if TENSOR_STORE
                       const __grid_constant__ CUtensorMap map_y,
#endif
                       const uint8_t* __restrict__ w, const float* __restrict__ scale_n,
#endif
                       const float* __restrict__ scale_k, const out_t* __restrict__ bias, const Scales<out_t> scale, const out_t* residual,
                       out_t* __restrict__ y,
#if NOTES
                       float* __restrict__ moments,
#endif
#if MENDS
                       const float* __restrict__ raw_x, const float* __restrict__ raw_w, const int* __restrict__ x_flags, const int* __restrict__ w_flags,
#if NOTES
                       int* __restrict__ redone,
#endif
#endif
#if JOINS
                       void* __restrict__ joined, unsigned* __restrict__ tickets,
#endif
#if !FUSED_SPLIT
                       uint4* __restrict__ x_tiles,
#if PHASES == 1
                       uint4* __restrict__ w_tiles,
#endif
#endif
                       const __grid_constant__ Shapes shapes
#if MENDS
                       , const __grid_constant__ Mends mends
#endif
#if JOINS
                       , const __grid_constant__ JoinArguments join
#endif
                       ) {
  extern __shared__ uint8_t dynamic[];
  constexpr int X_STAGES = PATCH_ROWS ? 4 : 0;  // the most there can be
  __shared__ alignas(8) uint64_t barriers[2 * (STAGES + X_STAGES) + CONSUMERS];
  Rings rings(dynamic, barriers);
  rings.x_full = rings.empty + 8 * STAGES;
  rings.x_empty = rings.x_full + 8 * X_STAGES;
  rings.turn = rings.x_empty + 8 * X_STAGES;
  rings.x = rings.stages + STAGES * STAGE_BYTES;
  rings.raw = rings.x + (PATCH_ROWS ? (int)(shapes.of[0].x_stages * shapes.of[0].halo_bytes) * LIMBS : 0);
#if FUSED_SPLIT
  const int raw_slots = CONVERTERS * (int)shapes.of[0].raw_stages;
  rings.raw_full = rings.raw + raw_slots * 32 * (int)shapes.of[0].raw_channel;
  uint8_t* const staging = dynamic + (rings.raw_full + 8 * raw_slots - shared_address(dynamic));
#else
  uint8_t* const staging = dynamic + (rings.raw - shared_address(dynamic));
#endif
  float* const scales = (float*)(staging + CONSUMERS * STAGING);
  [[maybe_unused]] long long* const output_offsets = (long long*)(scales + CONSUMERS * WGMMA_N);
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i) {
      barrier_init(rings.x_full + 8 * i, FUSED_SPLIT ? CONVERTERS : 1);
      barrier_init(rings.x_empty + 8 * i, 4 * CONSUMERS);
    }
#if FUSED_SPLIT
    for (int i = 0; i < raw_slots; ++i) barrier_init(rings.raw_full + 8 * i, 1);
#endif
    for (int i = 0; PINGPONG && i < CONSUMERS; ++i) barrier_init(rings.turn + 8 * i, 4);
    rings.init(1, PINGPONG ? 4 : 4 * CONSUMERS);
  }
#if MENDS
#if ADDS_PARTS
  const bool mends_own = shapes.of[0].splits == 1 || join.joins;  // else the launch that adds the parts mends them
#else
  const bool mends_own = !JOINS || shapes.of[0].splits == 1;
#endif
  if (threadIdx.x == 0) any_flag = 0;
#endif
  __syncthreads();
  AFTER_LAST_LAUNCH
  if (FUSED_SPLIT) NEXT_LAUNCH_MAY_COME  // the next launch's few blocks mostly find nothing to do
#if !NOTES
  float* const moments = nullptr;
#endif
  const int warpgroup = threadIdx.x / 128;
#if FUSED_SPLIT
  if (warpgroup % (1 + CONSUMERS) == 0) {
    registers_down<56>();
    if (threadIdx.x / 32 > 0) {
      convert(maps_x.of, x, unit_scales, unit_flags, shapes.of[0], rings, dynamic, scales);
    } else if (threadIdx.x == 0) {
      produce(w, shapes.of[0], rings);
    }
  } else {
    registers_up<200>();
    consume(shapes, rings, warpgroup - 1, nullptr, scales, nullptr, nullptr, scale_k, bias, scale, residual, nullptr, moments, y);
  }
#else
  if (warpgroup == 0) {
    registers_down<PINGPONG ? 24 : 40>();
#if PATCH_ROWS
    if (threadIdx.x == 0) produce(w, shapes.of[0], rings);
    if (threadIdx.x == 32) produce_halos(maps_x.of, shapes.of[0], rings);
#else
#if WITH_MAP_W
    const CUtensorMap* const filters = &map_w;
#else
    const CUtensorMap* const filters = nullptr;
#endif
    if (threadIdx.x == 0) produce(w, filters, maps_x, shapes, rings);
#endif
  } else {
    registers_up<PINGPONG ? 240 : 232>();
    const int thread = blockIdx.x * 128 * CONSUMERS + threadIdx.x - 128, threads = gridDim.x * 128 * CONSUMERS;
    clear_packed_tiles(x_tiles, (int)shapes.of[0].x_tiles, thread, threads);
#if PHASES == 1
    clear_packed_tiles(w_tiles, (int)(shapes.of[0].x_tiles >> 32), thread, threads);
#endif
#if MENDS
    if (mends_own && scaled(shapes.of[0]) && any_of_flags(shapes.of[0], x_flags, w_flags)) any_flag = 1;  // while the first loads are under way
#endif
#if TENSOR_STORE
    const CUtensorMap* const to = &map_y;
#else
    const CUtensorMap* const to = nullptr;
#endif
    const int consumer = warpgroup - 1;
    consume(shapes, rings, consumer, staging + consumer * STAGING, scales + consumer * WGMMA_N, output_offsets + consumer * WGMMA_N, scale_n, scale_k, bias, scale,
            residual, to, moments, y);
#if MENDS
#if NOTES
    if (!OF_LAYER(NOTED, shapes.of[0].scaled & 2)) redone = nullptr;
    if (redone && threadIdx.x == 128) redone[blockIdx.x] = 0;
#else
    int* const redone = nullptr;
#endif
    if (!mends_own) return;
#if TENSOR_STORE
    if (threadIdx.x % 128 == 0) bulk_wait<0>();
#endif
    const MendOperands operands = {raw_x, raw_w, bias, scale, residual, x_flags, w_flags, scale_n, scale_k};
#endif
#if ADDS_PARTS
    if (join.joins) {
#if TENSOR_STORE && !MENDS
      if (threadIdx.x % 128 == 0) bulk_wait<0>();
#endif
      join_tiles(shapes, join, {y, tickets, bias, scale, residual, joined}
#if MENDS
                 , mends, operands
#endif
      );
      return;
    }
#endif
#if MENDS
    named_barrier(STORED, 128 * CONSUMERS);
    if (any_flag) mend_tiles(shapes, mends, operands, redone, y);
#endif
  }
#endif
}
