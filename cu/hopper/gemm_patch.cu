// gemm_patch.cu: hopper/gemm.cu for patches of an image, whose pixels are loaded once for all taps.
//
//   y[n, k, pixel] = scale * sum over taps and c of w[k, tap, c] * x[n, pixel + tap, c], and epilogue.cuh
//
// It is for filters of several taps, without stride, and float32 NCHW results that whole patches fill. (hopper/gemm.cu loads each pixel
// once for each tap, which bounds filters of 64 channels.) Limbs, products, promotion, w, scales and mending are as there.
//
// Mapping  block: persistent, one a multiprocessor; takes tiles blockIdx.x, + gridDim.x, ... of BLOCK_M channels x BLOCK_N pixels.
//          A consumer's pixels are a patch of an image, 8 columns x PATCH_ROWS rows, and 64 channels.
//          warpgroup 0: one thread loads w, tap by tap, and another the halos of x. Two consumer warpgroups multiply.
// Shared   two rings. A stage of the main ring holds 64 of k of w alone, and gemm k runs through the taps first. A stage of the ring of x, which
//          has x_stages, is the halo of the patches in 64 channels, halo_w pixels wide and halo_h high. A tap's pixels begin at the tap's
//          offset in the halo, and wgmma steps from row to row of a patch by halo_w pixels.
// y        Each thread writes two neighbours of y straight from its sums; four threads write a sector. The finished sums have registers of their
//          own (total), and are written while the next tile is multiplied.
// Windows  (pack.cu) have no stride left: a row of taps is one pixel's channels.
// Raw      FUSED_SPLIT: the kernel reads unpacked images of up to 64 channels (BLOCK_M = 64), and its converters split them: gemm_split_patch.cuh.
//          unit_scales and unit_flags (pack.cu) have one entry a patch. direct/gemm.cu mends flagged results then.
//
// By hand: nvcc -cubin -arch=sm_90a -I cu cu/hopper/gemm_patch.cu
#ifndef BLOCK_M
#define BLOCK_M 64
#define BLOCK_N 224
#define STAGES 3
#define PRODUCTS 3
#define WGMMA_N 112   // pixels a consumer
#define PATCH_ROWS 14  // rows of a consumer's patch
#define FUSED_SPLIT 0  // the kernel splits x into limbs itself
#endif
// What patches are: of float32 planes, in loads of 64 channels. The headers know these as choices.
#define LOAD_CHANNELS 64
#define BF16 0
#define OUT 32
#define NHWC 0
#define DENSE 1
#define PHASES 1
#define INTERLEAVE_COLUMNS 0
#define W_MN_MAJOR 0
#define NOTES 0
#define WGMMA_MN_MAJOR_A "0"
#define WGMMA_MN_MAJOR_B "0"
#define WGMMA_TYPE "f16"
#define MENDS (!FUSED_SPLIT)  // blocks compute their flagged results once more at their end
#define MAY_ADD (WGMMA_N <= 128 || PRODUCTS == 1)  // the widest tiles have no registers left for a residual
#include "hopper/gemm_tiles.cuh"
#include "hopper/gemm_product.cuh"

constexpr int STAGE_BYTES = A_BYTES;
constexpr int X_STAGES = 4;  // the most there can be
[[maybe_unused]] constexpr int CONVERTERS = 7;  // warps
constexpr int THREADS = 128 * (1 + CONSUMERS + FUSED_SPLIT);
// a patch is stored in so many parts, each while a stage of the next patch is multiplied
constexpr int PARTS = PRODUCTS == 3 ? (PATCH_ROWS < 3 ? PATCH_ROWS : 3) : PATCH_ROWS % 2 ? PATCH_ROWS : PATCH_ROWS / 2;
[[maybe_unused]] constexpr int EARLY = 2;  // stages of the next tile that three products multiply while a tile is stored
static_assert(BLOCK_N == 8 * PATCH_ROWS * (BLOCK_M == 128 ? 1 : 2), "whole patches");
static_assert(!FUSED_SPLIT || BLOCK_M == 64, "the converters take registers");
static_assert(PRODUCTS == 1 || STAGES > EARLY, "those stages are held");

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

// The main ring, the ring of x, and the slots of raw images where there are any.
struct Rings : Ring {
  using Ring::Ring;
  uint32_t x, x_full, x_empty;
  uint32_t raw, raw_full;
};

// ---- the producers

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

#if FUSED_SPLIT
#include "hopper/gemm_split_patch.cuh"
#else
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
#endif

// ---- a patch's sums, scaled and so on, to y

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

// ---- the multiplication

DEVICE void consume(const GemmPhase& shape, const Rings& rings, int consumer, [[maybe_unused]] const float* scales, [[maybe_unused]] const float* scale_n,
                    const float* scale_k, const out_t* bias, const out_t* scale, const out_t* residual, out_t* y) {
  const int halo_w = (int)shape.halo_w, halo_bytes = (int)shape.halo_bytes;
  // where a consumer's share of w and x begins; an MN-major block of 64 channels takes as many bytes as 64 rows
  const uint32_t a0 = rings.stages + (BLOCK_M == 128 ? SUB_TILES * A_SUB * consumer : 0);
  const uint32_t b0 = rings.x + (BLOCK_M == 128 ? 0 : PATCH_ROWS * halo_w * SPAN * consumer);
  Position at;  // the stage to multiply next
  float main[WGMMA_N / 2];
#if PRODUCTS == 3
  float cross[WGMMA_N / 2], total[WGMMA_N / 2];
#else
  float total[WGMMA_N / 2];
#endif
  XPosition x_at;
  Tap tap;
  const int dilation_h = (int)shape.dilation_h, dilation_w = (int)shape.dilation_w;
  auto arrived = [&] {  // wait for the stage to multiply next
    if (tap.r == 0 && tap.s == 0) barrier_wait(rings.x_full + 8 * x_at.stage, x_at.parity);
    rings.wait_full(at);
  };
  auto advance = [&] {
    at.next();
    if (tap.next(shape)) x_at.next(shape);
  };
  // where the stage that comes next lies
  struct Place {
    uint32_t w, x;
  };
  auto place = [&] {
    Place of;
    of.w = a0 + at.stage * STAGE_BYTES;
    of.x = b0 + x_at.stage * LIMBS * halo_bytes + (tap.r * dilation_h * halo_w + tap.s * dilation_w) * SPAN;
    return of;
  };
  // the products of a stage and one pair of limbs
  auto multiply_limbs = [&](float(&d)[WGMMA_N / 2], const Place& of, int limb_a, int limb_b, bool fresh) {
    multiply(d, w_descriptor(of.w + limb_a * A_BLOCK), x_descriptor(of.x + limb_b * halo_bytes, halo_w), fresh);
  };
  // give the stage that was multiplied `ago` stages ago (1 to 3) back to the producer
  auto give_back = [&](int ago) {
    if (threadIdx.x % 32 != 0) return;
    barrier_arrive(rings.empty + 8 * ((at.stage + STAGES - ago) % STAGES));
    if (tap.number == ago - 1)  // that stage was of the last tap, of at least 3
      barrier_arrive(rings.x_empty + 8 * ((x_at.stage ? x_at.stage : (int)shape.x_stages) - 1));
  };
  Rows rows(shape, Tile(shape, blockIdx.x), consumer, scale_n, scale_k, scale, bias);
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
    of.x = b0 + x_at.stage * LIMBS * halo_bytes + (shape.tap_s > 1 ? dilation_w : dilation_h * halo_w) * SPAN;  // there are 3 taps or more
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
  auto store_part = [&](auto part) {
    constexpr int number = decltype(part)::value;
    constexpr int first = number * PATCH_ROWS / PARTS, last = (number + 1) * PATCH_ROWS / PARTS;
    if (is_plain(shape)) {
      store_rows<first, last>(total, rows, as_plain(shape), residual, y);
    } else {
      store_rows<first, last>(total, rows, shape, residual, y);
    }
  };
  bool pending = false;  // total holds the tile before, which is not stored yet
  for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x) {
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
  }
  if (pending) for_all<PARTS>(store_part);
}

#if MENDS
#include "hopper/gemm_mend.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm_patch(const __grid_constant__ Maps maps_x,
#if FUSED_SPLIT
                             const float* __restrict__ x, float* __restrict__ unit_scales, int* __restrict__ unit_flags, const uint8_t* __restrict__ w,
#else
                             const uint8_t* __restrict__ w, const float* __restrict__ scale_n,
#endif
                             const float* __restrict__ scale_k, const out_t* __restrict__ bias, const out_t* __restrict__ scale, const out_t* residual,
                             out_t* __restrict__ y,
#if MENDS
                             const float* __restrict__ raw_x, const float* __restrict__ raw_w, const int* __restrict__ x_flags,
                             const int* __restrict__ w_flags, uint4* __restrict__ x_tiles, uint4* __restrict__ w_tiles,
                             const __grid_constant__ Shapes shapes, const __grid_constant__ Mends mends) {
#else
                             const __grid_constant__ Shapes shapes) {
#endif
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * (STAGES + X_STAGES) + CONSUMERS];
  const GemmPhase& shape = shapes.of[0];
  Rings rings(dynamic, barriers);
  rings.x_full = rings.empty + 8 * STAGES;
  rings.x_empty = rings.x_full + 8 * X_STAGES;
  rings.x = rings.stages + STAGES * STAGE_BYTES;
#if FUSED_SPLIT
  const int raw_slots = CONVERTERS * (int)shape.raw_stages;
  rings.raw = rings.x + (int)(shape.x_stages * shape.halo_bytes) * LIMBS;
  rings.raw_full = rings.raw + raw_slots * 32 * (int)shape.raw_channel;
  float* const scales = (float*)(dynamic + (rings.raw_full + 8 * raw_slots - shared_address(dynamic)));  // of the patches in the ring of x
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i) {
      barrier_init(rings.x_full + 8 * i, FUSED_SPLIT ? CONVERTERS : 1);
      barrier_init(rings.x_empty + 8 * i, 4 * CONSUMERS);
    }
#if FUSED_SPLIT
    for (int i = 0; i < raw_slots; ++i) barrier_init(rings.raw_full + 8 * i, 1);
#endif
    rings.init(1, 4 * CONSUMERS);
  }
#if MENDS
  if (threadIdx.x == 0) any_flag = 0;
#endif
  __syncthreads();
  AFTER_LAST_LAUNCH
  if (FUSED_SPLIT) NEXT_LAUNCH_MAY_COME  // the next launch's few blocks mostly find nothing to do
  const int warpgroup = threadIdx.x / 128;
#if FUSED_SPLIT
  if (warpgroup % (1 + CONSUMERS) == 0) {
    registers_down<56>();
    if (threadIdx.x / 32 > 0) {
      convert(maps_x.of, x, unit_scales, unit_flags, shape, rings, dynamic, scales);
    } else if (threadIdx.x == 0) {
      produce(w, shape, rings);
    }
  } else {
    registers_up<200>();
    consume(shape, rings, warpgroup - 1, scales, nullptr, scale_k, bias, scale, residual, y);
  }
#else
  if (warpgroup == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) produce(w, shape, rings);
    if (threadIdx.x == 32) produce_halos(maps_x.of, shape, rings);
  } else {
    registers_up<232>();
    const int thread = blockIdx.x * 128 * CONSUMERS + threadIdx.x - 128, threads = gridDim.x * 128 * CONSUMERS;
    clear_packed_tiles(x_tiles, (int)shape.x_tiles, thread, threads);
    clear_packed_tiles(w_tiles, (int)(shape.x_tiles >> 32), thread, threads);
    if (scaled(shape) && any_of_flags(shape, x_flags, w_flags)) any_flag = 1;  // while the first loads are under way
    consume(shape, rings, warpgroup - 1, nullptr, scale_n, scale_k, bias, scale, residual, y);
    const MendOperands operands = {raw_x, raw_w, bias, scale, residual, x_flags, w_flags, scale_n, scale_k};
    named_barrier(STORED, 128 * CONSUMERS);
    if (any_flag) mend_tiles(shapes, mends, operands, nullptr, y);
  }
#endif
}
