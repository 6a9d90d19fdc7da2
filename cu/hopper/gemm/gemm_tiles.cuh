// gemm_tiles.cuh: which tile a block of hopper/gemm.cu computes next, and what a phase is told.
//
// A launch computes one phase or several (dgrad with a stride), each of which may be repeated (repeats.cuh). A tile's number counts channels
// fastest, then parts of a split sum, pixels and groups. The file that includes this defines the tile (BLOCK_M, BLOCK_N), PHASES, PRODUCTS,
// LOAD_CHANNELS, INTERLEAVE_COLUMNS, the types (BF16, OUT), RECOMPUTES, and MAY_ADD.
#pragma once
#include "core/finish.cuh"
#include "core/repeats.cuh"
#include "hopper/ring.cuh"
#if RECOMPUTES
#include "core/recompute.cuh"
#endif

constexpr bool SCALED = OUT == 32 && !BF16;  // operands may have scales: limbs have them; sums of 16-bit operands in parts do not
constexpr int LIMBS = PRODUCTS > 1 ? 2 : 1, X_LIMBS = PRODUCTS == 3 ? 2 : 1;  // of w, and of x that are multiplied
constexpr int SUB_TILES = 64 / LOAD_CHANNELS, SPAN = 2 * LOAD_CHANNELS;
constexpr int A_BLOCK = 64 * SPAN, A_SUB = LIMBS * A_BLOCK, A_BYTES = LIMBS * BLOCK_M * 128;  // 64 rows of one limb; of all limbs; w of a stage
constexpr int CONSUMERS = TWIN ? 1 : 2;  // warpgroups
[[maybe_unused]] constexpr int STORED = 3;  // the named barrier behind which the consumers have stored all
static_assert(WGMMA_N == (BLOCK_M == 128 || TWIN ? BLOCK_N : BLOCK_N / 2) && WGMMA_N % 8 == 0 && !(TWIN && BLOCK_M == 128), "a consumer takes 64 channels");

typedef element<OUT> out_t;

// A phase of the launch. by_n is the divisor n, prepared (division.cuh).
struct GemmPhase : LoadedPixels, WrittenPixels, WalkedTaps, Finishing {
  long long tiles;                                         // all tiles of a phase
  long long tiles_m, by_tiles_m;                           // along the channels of a group
  long long splits, by_splits, split_stages;               // splits of gemm k; stages of the ring in one split
  long long tiles_pixels, by_tiles_pixels;                 // along the pixels
  long long blocks;                                        // blocks of LOAD_CHANNELS along gemm k
  long long rows_group, rows;                              // output channels of a group, and of all groups
  long long w_lies;                                        // whether w is read as it lies, by map_w: WITH_MAP_W
  long long blocks_group, row_blocks;                      // of w: blocks of 64 rows of a group, and blocks of LOAD_CHANNELS channels of 64 rows
  long long channels_group, channels;                      // packed input channels of a group, and of all groups
  long long pixels, limb_images;                           // pixels of the launch; images to skip in x's map to reach the second limb
  long long spatial_dims;                                  // spatial axes of the loads
  long long out_image, out_row;                            // elements of y from one image, and from one channel, to the next; NCHW
  long long out_part;                                      // and from one part of a split sum to the next
  long long scaled;                                        // 1: there are scales, SCALED; 2: moments are written, EMIT_MOMENTS; or 3, both
  long long x_tiles;                                       // tiles of x to clear, and 2^32 times those of w, which was packed as images are
};

template <class Phase> DEVICE bool adds(const Phase& shape) { return MAY_ADD && has_residual(shape); }
DEVICE bool scaled(const GemmPhase& shape) { return SCALED && (PRODUCTS > 1 || shape.scaled & 1); }

struct Shapes {
  GemmPhase of[PHASES];
#if PHASES > 1
  Repeats repeats;
#endif
};
struct Maps {
  CUtensorMap of[PHASES];
};
#if RECOMPUTES
struct Recomputes {
  RecomputePhase of[PHASES];
  RecomputeArrays arrays;
};
__shared__ int any_flag;  // all flags, joined: consumers write it while the first loads are under way, and read it behind a barrier
#endif
// Tiles of all phases of the launch, and the phase of tile number `tile`. The grid and the number of phases (or of pairs of phases) have no common
// factor, so a block meets all phases.
#if PHASES > 1
#define IF_ONE_PHASE(...)
DEVICE int all_tiles(const Shapes& shapes) { return (int)(shapes.of[0].tiles * shapes.repeats.turns); }
DEVICE int inside_phase(const Shapes& shapes, int tile) { return divided(tile, shapes.repeats.by_turns); }
DEVICE int turn_of(const Shapes& shapes, int tile) { return Divided(tile, shapes.repeats.turns, shapes.repeats.by_turns).rest; }
DEVICE int phase_of(const Shapes& shapes, int tile) { return Divided(turn_of(shapes, tile), shapes.repeats.phases, shapes.repeats.by_phases).rest; }
DEVICE int repeat_of(const Shapes& shapes, int tile) { return divided(turn_of(shapes, tile), shapes.repeats.by_phases); }
DEVICE int taps_apart(const Shapes& shapes, int tile) { return taps_apart(shapes.repeats, repeat_of(shapes, tile)); }
DEVICE long long y_apart(const Shapes& shapes, int tile) { return y_apart(shapes.repeats, repeat_of(shapes, tile)); }
DEVICE long long w_apart(const Shapes& shapes, int tile) { return w_apart(shapes.repeats, repeat_of(shapes, tile)); }
#else
#define IF_ONE_PHASE(...) __VA_ARGS__
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
  int m, pixel, end, group, split;  // pixels of the tile below `end` are real
  DEVICE Tile(const GemmPhase& shape, int tile) {
    const Divided down(tile, shape.tiles_m, shape.by_tiles_m);
    m = down.rest * BLOCK_M;
    const Divided parts(down.quotient, shape.splits, shape.by_splits);
    split = parts.rest;
    const Divided along(parts.quotient, shape.tiles_pixels, shape.by_tiles_pixels);
    group = along.quotient;
    pixel = along.rest * BLOCK_N;
    end = (int)shape.pixels;
  }
};

// The stages of gemm k of a tile's split; none of an empty tile.
DEVICE StageRange range_of(const GemmPhase& shape, const Tile& of) {
  StageRange range(of.split, (int)shape.split_stages, ((int)shape.blocks + SUB_TILES - 1) / SUB_TILES);
  if (PHASES > 1 && of.pixel >= of.end) range.last = range.first;
  return range;
}

// Whether w has 64 rows behind the first 64 of a tile. If not, the first ones are loaded twice, and sums of the missing rows are not stored.
DEVICE bool next_rows(const Tile& of, const GemmPhase& shape) { return of.m / 64 + 1 < (int)shape.blocks_group; }
