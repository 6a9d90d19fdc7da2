// few_inputs.cu: convolutions of few input channels, as in first layers, on tensor cores that warps feed themselves. Arrays have their channels last, or
// with PLANES are NCHW.
//
//   y[pixel, k] = sum over the taps t, r, s and c of x[pixel + tap, c] * w[k, tap, c], and finish.cuh
//   gemm m: pixel | gemm n: output channel | gemm k: words of 4 bytes of x: the channels of all taps of a row of taps, which are contiguous
//   With PLANES gemm m is the output channel, gemm n the pixel, and gemm k goes over the channels' rows of taps one after another.
//
// Nothing is packed: few channels do not fill a row of a tensor load, and most of a layer's bytes are y's.
//
// Mapping  block -> BLOCK_N channels of y, and some of their tiles of 256 pixels, one after another. A tile is rows x columns of a slice of an image.
//          warp -> 32 pixels of all the block's channels, sixteen neighbours of a row at a time. Sums are in registers.
// Memory   shared: the filter as the tensor core takes it, [step][8 of gemm n][lane][8 bytes], or with PLANES [step][16 of gemm m][hi, lo][lane][16 bytes];
//          for each word of gemm k its offset in the patch from a pixel's first element, and which of its bytes count; one or two patches: the rows of x
//          that a tile's pixels read. With two, one is loaded while the other is multiplied.
// Filter   Each number is read once, in the order of memory, and put to its place among zeros, beside the first patch's loads. A table
//          says where in a channel's words each tap and channel of x goes.
// Loads    Rows of x are copied as runs of 16, 8 or 4 bytes, whichever divides a row, so a row of the patch may begin some elements before
//          its first pixel. Other rows are copied element by element.
// Border   Rows and slices outside of x are loaded from those that stand there. Columns beside x are copied within the patch, where what they show is loaded.
// Words    In 16 bits a word is two neighbours. A pixel may begin in the middle of one: then every row of taps has a word that begins one
//          element before it. If odd columns begin in the middle of a word and even ones do not, or the reverse, odd columns read a copy of the patch
//          that lies one element further left. Elements of a word outside the row of taps are masked: the filter is zero there, and 0 x Inf is NaN.
// PRODUCTS With 3 a float32 is two halves of TF32: the tensor core adds hi.hi, hi.lo and lo.hi of eight words, and then that to the sum. The plain
//          cores compute a warp's tile again if a sum is NaN, which the halves of Inf make, or if a number was so small that its lo loses bits.
// y        The filter is laid out so that a lane's columns of 8 or 16 neighbouring columns are neighbouring channels: it writes 16 or 8 bytes
//          at once from its registers, and four lanes write a sector or two. With PLANES a lane's columns of two or four eights are 16 bytes of
//          neighbouring pixels. If rows of y are no multiple of that, a warp transposes its sums in shared memory, so neighbouring lanes write neighbours.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/mma/few_inputs.cu
#ifndef TYPE
#define TYPE 16      // of the arrays: 32 float, 16 half, 17 bfloat16
#define BLOCK_N 64   // channels of y of a block: 16, 32, 48 or 64
#define PLANES 0     // whether the arrays are NCHW
#define PRODUCTS 1   // of float32: 1 or 3
#endif
#define MOMENTS 0
#include "mma/async_copy.cuh"
#include "core/finish.cuh"
#include "mma/fragments.cuh"
#include "core/tf32.cuh"
#include "core/truncation.cuh"
#include "core/near_border.cuh"

typedef element<TYPE> data_t;

constexpr int WARPS = 8, THREADS = 32 * WARPS, SIXTEENS = 2;  // SIXTEENS of pixels, of a warp
constexpr int COLUMN_TILES = BLOCK_N / 8;
constexpr int EACH = 4 / (int)sizeof(data_t);                     // elements of a word
constexpr int TOGETHER = EACH == 2 && COLUMN_TILES % 4 == 0 ? 4 : 2;  // column tiles in which a lane's columns are neighbouring channels
[[maybe_unused]] constexpr int NEIGHBOURS = 2 * TOGETHER;                          // these channels
#if PLANES
constexpr int EIGHTS = SIXTEENS * 2;                              // column tiles of pixels, of a warp
constexpr int RUN_PIXELS = 4 * EACH;                              // neighbours that a lane writes at once: 16 bytes
constexpr int RUNS_OF_LANE = 2 * EIGHTS / RUN_PIXELS;             // runs of each channel; the second begins 4 * RUN_PIXELS after the first
constexpr int EIGHTS_OF_RUN = EIGHTS / RUNS_OF_LANE;
constexpr int TRANSPOSED_PITCH = 36;                                  // floats from one channel's pixels to the next, where a warp transposes its sums
#endif
#if PLANES
constexpr int STEP_FILTER = BLOCK_N * 8 * (PRODUCTS == 3 ? 2 : 1);  // words of a step
constexpr int OF_SIXTEEN = STEP_FILTER / (BLOCK_N / 16);            // words of 16 channels; the second half are the lo
#else
constexpr int STEP_FILTER = BLOCK_N * 8;
#endif
constexpr int AT_ONCE = 8;                                        // elements that a thread loads, one by one, before it uses the first
#if defined(LAYER) || BLOCK_N < 64 || (PLANES && PRODUCTS == 1)
constexpr int BLOCKS = 2;                                         // blocks of a multiprocessor at once
#else
constexpr int BLOCKS = 1;                                         // an epilogue that is not known takes registers
#endif
static_assert(COLUMN_TILES % TOGETHER == 0, "whole runs of channels");
static_assert(PRODUCTS == 1 || TYPE == 32, "of float32");

// by_n is the divisor n, prepared (division.cuh).
struct FewInputsArguments {
  long long workers, by_workers;                        // blocks that share the tiles of the same channels
  long long tiles, tiles_w, by_tiles_w, tiles_h, by_tiles_h, out_d, by_out_d;  // tiles along w, along h; slices of an image of y
  long long column_bits, rows;                          // column_bits: log2 of a tile's columns; rows of a tile
  long long k, steps, words, row_words, by_row_words;   // channels of y of a group; steps of 8 words; words of gemm k, and of a row of taps
  long long run, lead;                                  // elements of a row of taps; those before it in its first word
  long long tap_s, by_tap_s, tap_r, by_tap_r;           // rows of taps in a row of the filter, if its columns are apart; taps along r
  long long c, pixel, slices, by_slices;                // channels of x of a group; elements of a pixel of x; with PLANES slices of a filter
  long long groups, group_chunks, by_group_chunks, w_group;  // with PLANES: blocks of channels of a group; elements of a group's filter
  long long w_k, w_c, w_tap;                            // elements of the filter from one k, c and tap to the next
  long long w_order, outer, by_outer, inner, by_inner, filters;  // FilterOrder; elements along its outermost axis, and the next one; elements of a block's filter
  long long taps, by_taps, last_tap, row_taps, by_row_taps;  // of the filter: taps; the last tap if they are taken in reverse, else -1; taps of a row
  long long channel_words;                              // with PLANES: words from one channel of x to the next
  long long depth, height, width;                       // size of x
  long long bordered, side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;  // whether it has a border, and what stands outside (near_border.cuh)
  long long patch, patch_rows, by_patch_rows, pitch;    // patch rows of all slices, and of one; elements from one row to the next
  long long unit, units, by_units, shift;               // elements of a unit that is copied at once; units of a row; elements before the first pixel
  long long stages, stage_bytes;                        // patches, and bytes of one
  long long stride_d, stride_h, stride_w, low_d, low_h, low_w, dilation_d, dilation_h, dilation_w;
  long long p, q;                                       // size of y
  long long table_at, places_at, patch_at, copy_at;     // offsets in shared memory in bytes; copy_at: from the patch to its copy, or 0
  long long wide, transposed_at;                        // wide: whether pixels of y begin at multiples of what a lane writes at once; with PLANES its
                                                        // elements; transposed_at: the offset of the sums that are transposed if these are few
  long long has_bias, has_scale, has_residual, activation, slope;
};

// The order of a filter's axes in memory, outermost first.
enum FilterOrder { K_CHANNEL_TAP, K_TAP_CHANNEL, CHANNEL_K_TAP, CHANNEL_TAP_K };

DEVICE uint32_t load_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
DEVICE uint2 load_words(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

// An element in the form that the tensor core takes.
DEVICE data_t factor(data_t v) {
#if TYPE == 32 && PRODUCTS == 1
  return __uint_as_float(to_tf32(v));
#else
  return v;
#endif
}

#if PRODUCTS == 3
// A float32 as two halves (tf32.cuh).
DEVICE Tf32Pair pair_of(uint32_t v) { return tf32_pair<1, true>(__uint_as_float(v), rounded_tf32(v)); }
// Whether rounding makes Inf of it, or it is Inf or NaN.
DEVICE bool too_large(uint32_t v) { return (v & 0x7fffffff) >= 0x7f7ff000; }
// The halves to keep of a filter's element: if it is too large, hi is the element, and lo next to nothing.
DEVICE Tf32Pair kept_pair(float v) {
  Tf32Pair of = pair_of(__float_as_uint(v));
  if (too_large(__float_as_uint(v))) of.high = __float_as_uint(v) | (v != v ? 0x400000 : 0), of.low = 0x1000;
  return of;
}
// The element that was split.
DEVICE float whole_of(uint32_t hi, uint32_t lo) { return __uint_as_float(hi) + __uint_as_float(lo - 0x1000); }
// A magnitude's bits less one, which makes zero the largest; ENOUGH is that of 2^-100, from which on no lo loses bits.
DEVICE uint32_t magnitude(uint32_t v) { return 2 * v - 1; }
constexpr uint32_t ENOUGH = 27u << 24;
// What a lane has read of x: the smallest magnitude, and whether a NaN was lost. Rounding carries a NaN with all bits set, as a GPU makes them, into the
// sign: both halves are next to zero.
struct Found {
  uint32_t least, carries;  // carries: in the highest bit
  DEVICE void add(uint32_t v, const Tf32Pair& of) {
    least = min(least, magnitude(v));
    carries |= v ^ of.high;
  }
};
// Adds what truncation lost to all sums of a lane. Returns whether the whole warp may keep its sums: none is NaN, and of all that it has read no magnitude
// is too small and no NaN was lost.
template <class EachSum> DEVICE bool sums_stand(const EachSum& each_sum, const Found& found) {
  bool good = found.least >= ENOUGH && (int)found.carries >= 0;
  each_sum([&](float& v) {
    good = good && v == v;
    v = with_lost(v, lost_in(1));
  });
  return __all_sync(~0u, good);
}
#endif

// A word of gemm k: the first tap of its row, and the element of the row that it begins with, which may be -1.
struct Word {
  int t, r, s, element;
  DEVICE Word(const FewInputsArguments& arg, int number) {
    const Divided of_row(number, arg.row_words, arg.by_row_words), of_s(of_row.quotient, arg.tap_s, arg.by_tap_s);
    const Divided of_r(of_s.quotient, arg.tap_r, arg.by_tap_r);
    t = of_r.quotient, r = of_r.rest, s = of_s.rest, element = of_row.rest * EACH - (int)arg.lead;
  }
};

// Where a tile and its patch begin.
struct Corner {
  // the image; the tile's slice, counted over all images, and its first pixel of y; the patch's first slice, row and element of x, which may lie outside
  int n, slice, p, q, d, h, element;
  DEVICE Corner(const FewInputsArguments& arg, int tile) {
    const Divided of_w(tile, arg.tiles_w, arg.by_tiles_w), of_h(of_w.quotient, arg.tiles_h, arg.by_tiles_h), of_d(of_h.quotient, arg.out_d, arg.by_out_d);
    n = of_d.quotient, slice = of_h.quotient, p = of_h.rest * (int)arg.rows, q = of_w.rest << (int)arg.column_bits;
    d = of_d.rest * (int)arg.stride_d + (int)arg.low_d, h = p * (int)arg.stride_h + (int)arg.low_h;
    element = (q * (int)arg.stride_w + (int)arg.low_w) * (int)arg.pixel - (int)arg.shift;
  }
};

// Unit i of a patch.
struct Unit {
  int from;  // offset in x, in elements
  bool mine, there;
  DEVICE Unit(const FewInputsArguments& arg, const Corner& corner, int group, int i, int row_elements) {
    const Divided of_row(i, arg.units, arg.by_units), of_slice(of_row.quotient, arg.patch_rows, arg.by_patch_rows);
    int plane = corner.n, slice = of_slice.quotient;
    if (PLANES) {
      const Divided of_channel(slice, arg.slices, arg.by_slices);
      plane = (corner.n * (int)arg.groups + group) * (int)arg.c + of_channel.quotient, slice = of_channel.rest;
    }
    int d = corner.d + slice * (int)arg.dilation_d, h = corner.h + of_slice.rest;
    const int element = corner.element + of_row.rest * (int)arg.unit;
    if (arg.bordered) {
      d = near_pixel(d, (int)arg.depth, arg.side_d, arg.last_side_d);
      h = near_pixel(h, (int)arg.height, arg.side_h, arg.last_side_h);
    }
    mine = of_row.quotient < (int)arg.patch;
    there = mine && (unsigned)d < (unsigned)arg.depth && (unsigned)h < (unsigned)arg.height && (unsigned)element < (unsigned)row_elements;
    from = ((plane * (int)arg.depth + d) * (int)arg.height + h) * row_elements + element;
  }
};

template <int bytes>
DEVICE void copy_patch(const FewInputsArguments& arg, const data_t* x, const Corner& corner, int group, uint32_t to, int row_elements) {
  for (int i = threadIdx.x; i < (int)(arg.patch * arg.units); i += THREADS) {
    const Unit unit(arg, corner, group, i, row_elements);
    copy_or_zero<bytes>(to + i * bytes, unit.there ? x + unit.from : x, unit.there);
  }
}

// Copies to the columns of a patch that lie beside x what they show of the same row.
DEVICE void show_columns(const FewInputsArguments& arg, data_t* patch, int begin, int row_elements) {
  const int pitch = (int)arg.pitch, of_pixel = (int)arg.pixel, left = min(max(-begin, 0), pitch), right = min(max(row_elements - begin, 0), pitch);
  for (int row = threadIdx.x / 32; row < (int)arg.patch; row += WARPS)
    for (int i = threadIdx.x % 32; i < left + pitch - right; i += 32) {
      const int to = i < left ? i : right + i - left, element = begin + to;
      const int column = element < 0 ? -1 - (-1 - element) / of_pixel : element / of_pixel;
      const int from = near_pixel(column, (int)arg.width, arg.side_w, arg.last_side_w) * of_pixel + element - column * of_pixel - begin;
      if (from >= left && from < right) patch[row * pitch + to] = patch[row * pitch + from];
    }
}

#if PLANES
// The offset in y of pixel `pixel` of a warp's part of a tile, in elements from the first of an image's channel; -1 outside.
DEVICE int place_of(const FewInputsArguments& arg, const Corner& corner, int pixel) {
  const int down = pixel >> (int)arg.column_bits, row = corner.p + down, column = corner.q + pixel - (down << (int)arg.column_bits);
  const int slice = corner.slice - corner.n * (int)arg.out_d;
  return row < (int)arg.p && column < (int)arg.q ? (slice * (int)arg.p + row) * (int)arg.q + column : -1;
}

// Stores a tile's results. A lane has runs of neighbouring pixels of every eighth channel.
DEVICE void store_planes(const FewInputsArguments& arg, float (&sum)[COLUMN_TILES / 2][EIGHTS][4], const data_t* bias, const data_t* scale,
                         const data_t* residual, data_t* y, const Corner& corner, int group, int first_k) {
  struct alignas(16) Run {
    data_t v[RUN_PIXELS];
  };
  const int lane = threadIdx.x % 32;
  int inside[RUNS_OF_LANE];
#pragma unroll
  for (int run = 0; run < RUNS_OF_LANE; ++run)
    inside[run] = place_of(arg, corner, threadIdx.x / 32 * SIXTEENS * 16 + (run * 4 + lane % 4) * RUN_PIXELS);
#pragma unroll
  for (int eight = 0; eight < COLUMN_TILES; ++eight) {
    const int of_group = first_k + eight * 8 + lane / 4, k = group * (int)arg.k + of_group;
    if (of_group >= (int)arg.k) return;
    Finish<false> finish;
    finish.of = ScaleAndBias(arg, scale, bias, k);
    const int channel = (corner.n * (int)(arg.groups * arg.k) + k) * (int)(arg.out_d * arg.p * arg.q);
#pragma unroll
    for (int run = 0; run < RUNS_OF_LANE; ++run) {
      if (inside[run] < 0) continue;
      const int at = channel + inside[run];
      Run added = {}, out;
      if (has_residual(arg)) added = *(const Run*)(residual + at);
      float v[RUN_PIXELS];
#pragma unroll
      for (int e = 0; e < RUN_PIXELS; ++e)
        v[e] = finish.whole(arg, sum[eight / 2][run * EIGHTS_OF_RUN + e / 2][eight % 2 * 2 + e % 2], 1, has_residual(arg) ? to_float(added.v[e]) : -0.f);
      activate(arg, v);
#pragma unroll
      for (int e = 0; e < RUN_PIXELS; ++e) out.v[e] = from_float<data_t>(v[e]);
      store_word(y + at, *(const word<Run>*)&out);
    }
  }
}

// The same if rows of y are no multiple of a run: the warp transposes its sums in its part of shared memory, so that neighbouring lanes write
// neighbouring runs of RUN pixels of a channel.
template <int RUN>
DEVICE void store_transposed(const FewInputsArguments& arg, float (&sum)[COLUMN_TILES / 2][EIGHTS][4], float* transposed, const data_t* bias,
                         const data_t* scale, const data_t* residual, data_t* y, const Corner& corner, int group, int first_k) {
  constexpr int RUNS = 32 / RUN, SOME = 4 / RUN;  // runs of a channel; runs that a lane finishes together
  struct alignas(RUN * sizeof(data_t)) Run {
    data_t v[RUN];
  };
  const int lane = threadIdx.x % 32, inside = place_of(arg, corner, threadIdx.x / 32 * SIXTEENS * 16 + lane % RUNS * RUN);
  const int plane = (int)(arg.out_d * arg.p * arg.q);
  const auto channel_of = [&](int of_group) { return corner.n * (int)(arg.groups * arg.k) + group * (int)arg.k + of_group; };
#pragma unroll
  for (int eight = 0; eight < COLUMN_TILES; ++eight) {
    if (first_k + eight * 8 >= (int)arg.k) return;
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      const auto& low = sum[eight / 2][e / 2];
      const auto& high = sum[eight / 2][e / 2 + 1];
      const int run = e / RUN_PIXELS;
      *(float4*)(transposed + lane / 4 * TRANSPOSED_PITCH + (run * 4 + lane % 4) * RUN_PIXELS + e % RUN_PIXELS) =
          make_float4(low[eight % 2 * 2], low[eight % 2 * 2 + 1], high[eight % 2 * 2], high[eight % 2 * 2 + 1]);
    }
    __syncwarp();
#pragma unroll 1  // four numbers at a time, or there would be too few registers
    for (int first = 0; first < 8 / RUN; first += SOME) {
      float v[4];
      Run added[SOME] = {};
      int at[SOME];  // a run's offset in y, or -1
#pragma unroll
      for (int i = 0; i < SOME; ++i) {
        const int of_group = first_k + eight * 8 + (first + i) * RUN + lane / RUNS;
        at[i] = inside < 0 || of_group >= (int)arg.k ? -1 : channel_of(of_group) * plane + inside;
        if (has_residual(arg) && at[i] >= 0) added[i] = *(const Run*)(residual + at[i]);
      }
#pragma unroll
      for (int i = 0; i < SOME; ++i) {
        const int of_eight = (first + i) * RUN + lane / RUNS;
        Finish<false> finish;
        finish.of = ScaleAndBias(arg, scale, bias, group * (int)arg.k + min(first_k + eight * 8 + of_eight, (int)arg.k - 1));
#pragma unroll
        for (int e = 0; e < RUN; ++e)
          v[i * RUN + e] = finish.whole(arg, transposed[of_eight * TRANSPOSED_PITCH + lane % RUNS * RUN + e], 1, has_residual(arg) ? to_float(added[i].v[e]) : -0.f);
      }
      activate(arg, v);
#pragma unroll
      for (int i = 0; i < SOME; ++i) {
        Run out;
#pragma unroll
        for (int e = 0; e < RUN; ++e) out.v[e] = from_float<data_t>(v[i * RUN + e]);
        if (at[i] >= 0) store_word(y + at[i], *(const word<Run>*)&out);
      }
    }
    __syncwarp();
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_inputs(const data_t* __restrict__ x, const data_t* __restrict__ w, const data_t* __restrict__ bias, const data_t* __restrict__ scale,
               const data_t* residual, data_t* __restrict__ y, const __grid_constant__ FewInputsArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) uint4 dynamic[];
  uint32_t* const filter = (uint32_t*)dynamic;
  uint4* const table = (uint4*)((char*)dynamic + arg.table_at);
  int* const places = (int*)((char*)dynamic + arg.places_at);
  data_t* const patch = (data_t*)((char*)dynamic + arg.patch_at);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = (int)arg.steps, c = (int)arg.c, of_pixel = (int)arg.pixel;
  const Divided of_worker(blockIdx.x, arg.workers, arg.by_workers);
#if PLANES
  const Divided of_chunk(of_worker.quotient, arg.group_chunks, arg.by_group_chunks);
  const int group = of_chunk.quotient, first_k = of_chunk.rest * BLOCK_N;
#else
  const int group = 0, first_k = of_worker.quotient * BLOCK_N;
#endif

  // the words of gemm k
  for (int i = threadIdx.x; i < steps * 8; i += THREADS) {
    const Word word(arg, i);
    const int row = word.t * (int)arg.patch_rows + word.r * (int)arg.dilation_h;
    uint32_t at = (row * (int)arg.pitch + word.s * (int)arg.dilation_w * of_pixel + word.element + (int)arg.lead) * (int)sizeof(data_t), mask = ~0u;
    if (EACH == 2 && word.element + 1 >= (int)arg.run) mask = 0xffff;
    if (word.element < 0) mask &= 0xffff0000;
    if (i >= (int)arg.words) at = mask = 0;
    *((uint2*)table + (i / 8 * 4 + i % 4) * 2 + i / 4 % 2) = make_uint2(at, mask);
  }

  // Where this lane's pixels of a tile begin in the patch: one of each sixteen, and one 8 columns further. With PLANES the first of a run, and
  // others two columns further each. Their columns are all odd or all even.
  const bool copied = EACH == 2 && arg.copy_at != 0, odd = copied && lane / 4 % 2 == 1;
  const uint32_t further = (PLANES ? 2 : 8) * (int)arg.stride_w * of_pixel * (int)sizeof(data_t);
  const auto base_of = [&](int pixel) {
    const int row = pixel >> (int)arg.column_bits, column = pixel - (row << (int)arg.column_bits);
    return (uint32_t)(row * (int)(arg.stride_h * arg.pitch) + column * (int)arg.stride_w * of_pixel + (int)(arg.shift - arg.lead) - (odd ? 1 : 0)) *
           (uint32_t)sizeof(data_t);
  };
#if PLANES
  const auto of_run = [&](int run, int column) { return base_of(warp * SIXTEENS * 16 + (run * 4 + column / 2) * RUN_PIXELS + column % 2); };
  uint32_t base[RUNS_OF_LANE];
#pragma unroll
  for (int run = 0; run < RUNS_OF_LANE; ++run) base[run] = of_run(run, lane / 4);
#else
  int first_pixel = warp * SIXTEENS * 16 + lane / 4;
  uint32_t base[SIXTEENS];
#pragma unroll
  for (int i = 0; i < SIXTEENS; ++i) base[i] = base_of(first_pixel + i * 16);
#endif
  const uint32_t table_lane = shared_address(table) + lane % 4 * 16, filter_lane = shared_address(filter) + lane * (PLANES ? 16 : 8);
  const uint32_t patches = shared_address(patch);
  const int row_elements = (int)arg.width * of_pixel, first_tile = of_worker.rest, tiles = (int)arg.tiles, workers = (int)arg.workers, stages = (int)arg.stages;
  const auto load = [&](int tile, uint32_t to) {
    const Corner corner(arg, tile);
    const int bytes = (int)arg.unit * (int)sizeof(data_t);
    if (bytes == 16) copy_patch<16>(arg, x, corner, group, to, row_elements);
    else if (bytes == 8) copy_patch<8>(arg, x, corner, group, to, row_elements);
    else if (bytes == 4) copy_patch<4>(arg, x, corner, group, to, row_elements);
    else
      for (int first = threadIdx.x; first < (int)(arg.patch * arg.units); first += THREADS * AT_ONCE) {
        data_t v[AT_ONCE];
        bool mine[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const Unit unit(arg, corner, group, first + i * THREADS, row_elements);
          v[i] = data_t(), mine[i] = unit.mine;
          if (unit.there) v[i] = x[unit.from];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
          if (mine[i]) patch[first + i * THREADS] = v[i];
      }
    copies_commit();
  };

  // the filter
#if PRODUCTS == 3
  __shared__ uint32_t small_filter[1];
  if (threadIdx.x == 0) *small_filter = ~0u;
#endif
  const int order = (int)arg.w_order, all_taps = (int)arg.taps;
  for (int i = threadIdx.x; i < steps * (STEP_FILTER / 4); i += THREADS) ((uint4*)filter)[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < c * all_taps; i += THREADS) {  // [channel][tap]
    const Divided of_channel(i, arg.taps, arg.by_taps);
    const int tap = arg.last_tap < 0 ? of_channel.rest : (int)arg.last_tap - of_channel.rest;
    const Divided row(tap, arg.row_taps, arg.by_row_taps);
    const int element = row.rest * of_pixel + (PLANES ? 0 : of_channel.quotient) + (int)arg.lead;
    const int word = (PLANES ? of_channel.quotient * (int)arg.channel_words : 0) + row.quotient * (int)arg.row_words + element / EACH;
    const int of_lane = PLANES ? 4 : 2, place = (word / 8 * STEP_FILTER + word % 4 * of_lane + word / 4 % 2 * (of_lane / 2)) * EACH + element % EACH;
    places[order == K_TAP_CHANNEL ? of_channel.rest * c + of_channel.quotient : i] = place;
  }
  if (stages > 1 && first_tile < tiles) load(first_tile, patches);
  __syncthreads();
  for (int first = threadIdx.x; first < (int)arg.filters; first += THREADS * AT_ONCE) {
    data_t v[AT_ONCE];
    int to[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int number = first + i * THREADS;
      const Divided outer(number, arg.outer, arg.by_outer);
      int k = outer.quotient, at = outer.rest, from = number;  // position in the block's filters, which begin at a multiple of a filter
      if (order >= CHANNEL_K_TAP) {
        const Divided inner(outer.rest, arg.inner, arg.by_inner);
        const int tap = order == CHANNEL_K_TAP ? inner.rest : inner.quotient;
        k = order == CHANNEL_K_TAP ? inner.quotient : inner.rest;
        at = outer.quotient * all_taps + tap;
        from = outer.quotient * (int)arg.w_c + k * (int)arg.w_k + tap * (int)arg.w_tap;
      }
      const bool mine = number < (int)arg.filters && first_k + k < (int)arg.k;
      v[i] = data_t(), to[i] = -1;
      if (mine) {
#if PLANES
        const int of_channel = k / 16 * OF_SIXTEEN + k % 8 * 16 + k / 8 % 2;
#else
        const int eight = k / (8 * TOGETHER) * TOGETHER + k % NEIGHBOURS / 2, column = k % (8 * TOGETHER) / NEIGHBOURS * 2 + k % 2;
        const int of_channel = (eight * 32 + column * 4) * 2;
#endif
        v[i] = w[group * (int)arg.w_group + first_k * (int)arg.w_k + from];
        to[i] = places[at] + of_channel * EACH;
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (to[i] >= 0) {
#if PLANES && PRODUCTS == 3
        const Tf32Pair of = kept_pair(v[i]);
        filter[to[i]] = of.high, filter[to[i] + OF_SIXTEEN / 2] = of.low;
#else
        ((data_t*)filter)[to[i]] = factor(v[i]);
#endif
#if PRODUCTS == 3
        if (magnitude(__float_as_uint(v[i])) < ENOUGH || too_large(__float_as_uint(v[i]))) *small_filter = 0;
#endif
      }
  }

  uint32_t now = 0;  // offset in bytes of the patch that is multiplied
  for (int tile = first_tile; tile < tiles; tile += workers) {
    __syncthreads();  // the patch before has been read
    if (stages == 1) load(tile, patches);
    else if (tile + workers < tiles) load(tile + workers, patches + (uint32_t)arg.stage_bytes - now);
    if (stages > 1 && tile + workers < tiles) copies_wait<1>();
    else copies_wait<0>();
    __syncthreads();
    if (arg.bordered) {
      show_columns(arg, (data_t*)((char*)patch + now), Corner(arg, tile).element, row_elements);
      __syncthreads();
    }
#if TYPE == 32 && PRODUCTS == 3
#elif TYPE == 32
    for (int i = threadIdx.x; i * 4 < (int)(arg.patch * arg.pitch); i += THREADS) {
      float4* const at = (float4*)((char*)patch + now) + i;
      *at = make_float4(factor(at->x), factor(at->y), factor(at->z), factor(at->w));
    }
    __syncthreads();
#else
    if (copied) {
      for (int i = threadIdx.x; i * 2 < (int)(arg.patch * arg.pitch); i += THREADS) {
        const uint32_t* const from = (const uint32_t*)((const char*)patch + now) + i;
        *((uint32_t*)((char*)patch + arg.copy_at) + i) = from[0] >> 16 | from[1] << 16;
      }
      __syncthreads();
    }
#endif

    const uint32_t here = patches + (odd ? (uint32_t)arg.copy_at : now);
#if PLANES
    float sum[COLUMN_TILES / 2][EIGHTS][4] = {};
#if PRODUCTS == 3
    const auto each_sum = [&](const auto& f) {
#pragma unroll
      for (int i = 0; i < COLUMN_TILES / 2 * EIGHTS * 4; ++i) f(sum[i / (EIGHTS * 4)][i / 4 % EIGHTS][i % 4]);
    };
    Found found = {*small_filter, 0};
#endif
    for (int step = 0; step < steps; ++step) {
      const uint4 at = load_vector(table_lane + step * 64);
      uint32_t b[EIGHTS][2];
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i) {
        const uint32_t from = here + base[i / EIGHTS_OF_RUN] + i % EIGHTS_OF_RUN * further;
        b[i][0] = load_word(from + at.x) & at.y;
        b[i][1] = load_word(from + at.z) & at.w;
      }
#if PRODUCTS == 3
      uint32_t lo[EIGHTS][2];
#pragma unroll
      for (int i = 0; i < 2 * EIGHTS; ++i) {
        uint32_t& v = b[i / 2][i % 2];
        const Tf32Pair of = pair_of(v);
        found.add(v, of);
        v = of.high, lo[i / 2][i % 2] = of.low;
      }
#endif
#pragma unroll
      for (int sixteen = 0; sixteen < COLUMN_TILES / 2; ++sixteen) {
        const uint32_t of_sixteen = filter_lane + (step * STEP_FILTER + sixteen * OF_SIXTEEN) * 4;
        const uint4 of = load_vector(of_sixteen);
        const uint32_t a[4] = {of.x, of.y, of.z, of.w};
#if PRODUCTS == 3
        const uint4 of_lo = load_vector(of_sixteen + OF_SIXTEEN * 2);
        const uint32_t a_lo[4] = {of_lo.x, of_lo.y, of_lo.z, of_lo.w};
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
          float part[4] = {};
          multiply<data_t>(part, a, lo[i][0], lo[i][1]);
          multiply<data_t>(part, a_lo, b[i][0], b[i][1]);
          multiply<data_t>(part, a, b[i][0], b[i][1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[sixteen][i][e] += part[e];
        }
#else
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) multiply<data_t>(sum[sixteen][i], a, b[i][0], b[i][1]);
#endif
      }
    }
#if PRODUCTS == 3
    if (!sums_stand(each_sum, found)) {
      each_sum([&](float& v) { v = 0; });
      for (int word = 0; word < (int)arg.words; ++word) {
        const uint2 at = ((const uint2*)table)[(word / 8 * 4 + word % 4) * 2 + word / 4 % 2];
        const uint32_t of_word = shared_address(filter) + (word / 8 * STEP_FILTER + (lane / 4 * 4 + word % 4) * 4 + word / 4 % 2 * 2) * 4;
        float v[EIGHTS][2];
#pragma unroll
        for (int i = 0; i < 2 * EIGHTS; ++i) {
          const uint32_t from = here + of_run(i / 2 / EIGHTS_OF_RUN, lane % 4 * 2 + i % 2) + i / 2 % EIGHTS_OF_RUN * further;
          v[i / 2][i % 2] = __uint_as_float(load_word(from + at.x) & at.y);
        }
#pragma unroll
        for (int eight = 0; eight < COLUMN_TILES; ++eight) {
          const uint32_t of_eight = of_word + (eight / 2 * OF_SIXTEEN + eight % 2) * 4;
          const float factor = whole_of(load_word(of_eight), load_word(of_eight + OF_SIXTEEN * 2));
#pragma unroll
          for (int i = 0; i < 2 * EIGHTS; ++i) {
            float& to = sum[eight / 2][i / 2][eight % 2 * 2 + i % 2];
            to = fmaf(v[i / 2][i % 2], factor, to);
          }
        }
      }
    }
#endif
    const Corner corner(arg, tile);
    float* const transposed = (float*)((char*)dynamic + arg.transposed_at) + warp * 8 * TRANSPOSED_PITCH;
    if (arg.wide == RUN_PIXELS) store_planes(arg, sum, bias, scale, residual, y, corner, group, first_k);
    else if (arg.wide == 2) store_transposed<2>(arg, sum, transposed, bias, scale, residual, y, corner, group, first_k);
    else store_transposed<1>(arg, sum, transposed, bias, scale, residual, y, corner, group, first_k);
#else
    float sum[SIXTEENS][COLUMN_TILES][4];
    const auto each_sum = [&](const auto& f) {
#pragma unroll
      for (int i = 0; i < SIXTEENS * COLUMN_TILES * 4; ++i) f(sum[i / (COLUMN_TILES * 4)][i / 4 % COLUMN_TILES][i % 4]);
    };
#if PRODUCTS == 3
    each_sum([&](float& v) { v = 0; });
    Found found = {*small_filter, 0};
    for (int step = 0; step < steps; ++step) {
      const uint4 at = load_vector(table_lane + step * 64);
      uint32_t hi[SIXTEENS][4], lo[SIXTEENS][4];
#pragma unroll
      for (int i = 0; i < SIXTEENS; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t v = load_word(here + base[i] + e % 2 * further + (e < 2 ? at.x : at.z)) & (e < 2 ? at.y : at.w);
          const Tf32Pair of = pair_of(v);
          hi[i][e] = of.high, lo[i][e] = of.low;
          found.add(v, of);
        }
#pragma unroll
      for (int eight = 0; eight < COLUMN_TILES; ++eight) {
        const uint2 b = load_words(filter_lane + (step * COLUMN_TILES + eight) * 256);
        const Tf32Pair first = pair_of(b.x), second = pair_of(b.y);
#pragma unroll
        for (int i = 0; i < SIXTEENS; ++i) {
          float part[4] = {};
          multiply<data_t>(part, lo[i], first.high, second.high);
          multiply<data_t>(part, hi[i], first.low, second.low);
          multiply<data_t>(part, hi[i], first.high, second.high);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][eight][e] += part[e];
        }
      }
    }
    if (!sums_stand(each_sum, found)) {
      each_sum([&](float& v) { v = 0; });
      for (int word = 0; word < (int)arg.words; ++word) {
        const uint2 at = ((const uint2*)table)[(word / 8 * 4 + word % 4) * 2 + word / 4 % 2];
        const uint32_t of_word = shared_address(filter) + (word / 8 * COLUMN_TILES * 64 + (lane % 4 * 8 + word % 4) * 2 + word / 4 % 2) * 4;
        float v[SIXTEENS][2];
#pragma unroll
        for (int i = 0; i < 2 * SIXTEENS; ++i) v[i / 2][i % 2] = __uint_as_float(load_word(here + base[i / 2] + i % 2 * further + at.x) & at.y);
#pragma unroll
        for (int column = 0; column < 2 * COLUMN_TILES; ++column) {
          const float factor = __uint_as_float(load_word(of_word + column / 2 * 256 + column % 2 * 32));
#pragma unroll
          for (int i = 0; i < 2 * SIXTEENS; ++i) {
            float& to = sum[i / 2][column / 2][i % 2 * 2 + column % 2];
            to = fmaf(v[i / 2][i % 2], factor, to);
          }
        }
      }
    }
#else
    each_sum([&](float& v) { v = 0; });
    for (int step = 0; step < steps; ++step) {
      const uint4 at = load_vector(table_lane + step * 64);
      uint32_t a[SIXTEENS][4];
#pragma unroll
      for (int i = 0; i < SIXTEENS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          a[i][half] = load_word(here + base[i] + half * further + at.x) & at.y;
          a[i][2 + half] = load_word(here + base[i] + half * further + at.z) & at.w;
        }
#pragma unroll
      for (int eight = 0; eight < COLUMN_TILES; ++eight) {
        const uint2 b = load_words(filter_lane + (step * COLUMN_TILES + eight) * 256);
#pragma unroll
        for (int i = 0; i < SIXTEENS; ++i) multiply<data_t>(sum[i][eight], a[i], b.x, b.y);
      }
    }
#endif

    // stores to y
    struct alignas(NEIGHBOURS * sizeof(data_t)) Neighbours {
      data_t v[NEIGHBOURS];
    };
    const bool wide = arg.wide != 0;
    asm volatile("" : "+r"(first_pixel));  // else the compiler would keep all pixels' offsets
    const Corner corner(arg, tile);
    for_all<COLUMN_TILES / TOGETHER>([&](auto group) {
      constexpr int eight = decltype(group)::value * TOGETHER;
      const int k = first_k + eight * 8 + lane % 4 * NEIGHBOURS, count = min((int)arg.k - k, NEIGHBOURS);
      Finish<false> finish[NEIGHBOURS];
#pragma unroll
      for (int e = 0; e < NEIGHBOURS; ++e) finish[e].of = ScaleAndBias(arg, scale, bias, min(k + e, (int)arg.k - 1));
#pragma unroll
      for (int i = 0; i < 2 * SIXTEENS; ++i) {
        const int pixel = first_pixel + i * 8, down = pixel >> (int)arg.column_bits, row = corner.p + down;
        const int column = corner.q + pixel - (down << (int)arg.column_bits);
        if (row >= (int)arg.p || column >= (int)arg.q || count <= 0) continue;
        const int at = ((corner.slice * (int)arg.p + row) * (int)arg.q + column) * (int)arg.k + k;
        Neighbours added = {}, out;
        float v[NEIGHBOURS];
        if (has_residual(arg)) {
          if (wide) added = *(const Neighbours*)(residual + at);
          else
#pragma unroll
            for (int e = 0; e < NEIGHBOURS; ++e)
              if (e < count) added.v[e] = residual[at + e];
        }
#pragma unroll
        for (int e = 0; e < NEIGHBOURS; ++e)
          v[e] = finish[e].whole(arg, sum[i / 2][eight + e / 2][i % 2 * 2 + e % 2], 1, has_residual(arg) ? to_float(added.v[e]) : -0.f);
        activate(arg, v);
#pragma unroll
        for (int e = 0; e < NEIGHBOURS; ++e) out.v[e] = from_float<data_t>(v[e]);
        if (wide) store_word(y + at, *(const word<Neighbours>*)&out);
        else
#pragma unroll
          for (int e = 0; e < NEIGHBOURS; ++e)
            if (e < count) y[at + e] = out.v[e];
      }
    });
#endif
    if (stages > 1) now = (uint32_t)arg.stage_bytes - now;
  }
}
