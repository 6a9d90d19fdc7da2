// few_inputs.cu: convolutions of channels-last arrays with few channels, as first layers are, on tensor cores that warps feed themselves.
//
//   y[pixel, k] = sum over the taps t, r, s and c of x[pixel + tap, c] * w[k, tap, c], and finish.cuh
//   gemm m: pixel | gemm n: output channel | gemm k: words of 4 bytes of x: of a row of taps the channels of all of them, which lie side by side
//
// Nothing is packed. Few channels fill no row of a tensor load, and most of a layer's bytes are y's.
//
// Mapping  block -> BLOCK_N channels of y, and of its tiles of 128 pixels, which are rows x columns of a slice of an image, one after another.
//          warp -> 32 pixels, sixteens of neighbours in a row, by all the channels. Sums are in registers.
// Memory   shared: the filter [step][8 of gemm n][lane][8 bytes], as the tensor core takes it; where each word of gemm k lies in the patch,
//          from the pixel's first on, and which of its bytes count; the patch: the rows of x that a tile's pixels meet.
// Words    With 16 bits a word is two neighbours. So a pixel must begin at a multiple of 4 bytes in the patch. Where it may not, there is a
//          second patch, one element further left, for pixels that begin at odd elements. What a word has beside a row of taps is masked:
//          the filter is zero there, and zero times Inf would be NaN.
// y        A lane's columns of 8 or 16 neighbouring columns are neighbouring channels, because the filter is laid out so: it writes 16 or 8 bytes
//          at once from its registers, and four lanes write a sector or two.
//
// By hand: nvcc -cubin -arch=sm_80 cu/few_inputs.cu
#ifndef TYPE
#define TYPE 16      // of the arrays: 32 float, 16 half, 17 bfloat16
#define BLOCK_N 64   // channels of y of a block: 16, 32, 48 or 64
#endif
#define MOMENTS 0
#include "finish.cuh"
#include "fragments.cuh"

typedef element<TYPE> data_t;

constexpr int WARPS = 4, THREADS = 32 * WARPS, SIXTEENS = 2;  // of pixels, of a warp
constexpr int COLUMN_TILES = BLOCK_N / 8;
constexpr int EACH = 4 / (int)sizeof(data_t);                     // elements of a word
constexpr int TOGETHER = EACH == 2 && COLUMN_TILES % 4 == 0 ? 4 : 2;  // eights of columns of which a lane's are neighbouring channels
constexpr int NEIGHBOURS = 2 * TOGETHER;                          // so many
constexpr int AT_ONCE = 8;                                        // elements of x that a thread loads before it keeps the first
static_assert(COLUMN_TILES % TOGETHER == 0, "whole runs of channels");

// by_n is the divisor n, prepared (division.cuh).
struct FewInputsArguments {
  long long workers, by_workers;                        // blocks that share the tiles of the same channels
  long long tiles, tiles_w, by_tiles_w, tiles_h, by_tiles_h, out_d, by_out_d;  // tiles along w, along h; slices of an image of y
  long long columns, by_columns, rows;                  // of a tile
  long long k, steps, words, row_words, by_row_words;   // channels of y; eights of words, words, and words of a row of taps
  long long run, tap_s, by_tap_s, tap_r, by_tap_r;      // elements of a row of taps; rows of taps in a row, if the columns are apart; taps along r
  long long c, by_c;                                    // channels of x
  long long w_k, w_c, w_tap, tap_first, tap_step;       // elements of the filter from one to the next; the first tap, and from one to the next
  long long depth, height, width;                       // of x
  long long patch, patch_rows, by_patch_rows, patch_columns, by_patch_columns, pitch;  // rows of all slices, of one; elements of a row; and from one to the next
  long long stride_d, stride_h, stride_w, low_d, low_h, low_w, dilation_d, dilation_h, dilation_w;
  long long p, q;                                       // of y
  long long table_at, patch_at, copy_at;                // bytes of shared memory before them; copy_at: from the patch to its copy, or 0
  long long wide;                                       // whether pixels of y begin at multiples of what a lane writes at once
  long long has_bias, has_scale, has_residual, activation, slope;
};

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

// An element as the tensor core takes it.
DEVICE data_t factor(data_t v) {
#if TYPE == 32
  return __uint_as_float(to_tf32(v));
#else
  return v;
#endif
}

// A word of gemm k: the tap that its row begins with, and the element of the row that it begins with.
struct Word {
  int t, r, s, element;
  DEVICE Word(const FewInputsArguments& arg, int number) {
    const Divided of_row(number, arg.row_words, arg.by_row_words), of_s(of_row.quotient, arg.tap_s, arg.by_tap_s);
    const Divided of_r(of_s.quotient, arg.tap_r, arg.by_tap_r);
    t = of_r.quotient, r = of_r.rest, s = of_s.rest, element = of_row.rest * EACH;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    few_inputs(const data_t* __restrict__ x, const data_t* __restrict__ w, const data_t* __restrict__ bias, const data_t* __restrict__ scale,
               const data_t* residual, data_t* __restrict__ y, const __grid_constant__ FewInputsArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) uint4 dynamic[];
  uint32_t* const filter = (uint32_t*)dynamic;
  uint4* const table = (uint4*)((char*)dynamic + arg.table_at);
  data_t* const patch = (data_t*)((char*)dynamic + arg.patch_at);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = (int)arg.steps, c = (int)arg.c, run = (int)arg.run;
  const Divided of_worker(blockIdx.x, arg.workers, arg.by_workers);
  const int first_k = of_worker.quotient * BLOCK_N;

  // the filter, and the words of gemm k
  for (int i = threadIdx.x; i < steps * COLUMN_TILES * 64; i += THREADS) {
    const int of_lane = i / 2 % 32, eight = i / 64 % COLUMN_TILES, number = i / (64 * COLUMN_TILES) * 8 + of_lane % 4 + i % 2 * 4;
    const int column = of_lane / 4;  // of the eight
    const int k = first_k + eight / TOGETHER * 8 * TOGETHER + column / 2 * NEIGHBOURS + eight % TOGETHER * 2 + column % 2;
    data_t v[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) v[e] = data_t();
    if (number < (int)arg.words && k < (int)arg.k) {
      const Word word(arg, number);
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const Divided of_tap(word.element + e, arg.c, arg.by_c);
        const int tap = (word.t * (int)arg.tap_r + word.r) * (int)(arg.tap_s * run / c) + word.s + of_tap.quotient;
        if (word.element + e < run) v[e] = factor(w[k * (int)arg.w_k + of_tap.rest * (int)arg.w_c + (int)(arg.tap_first + tap * arg.tap_step) * (int)arg.w_tap]);
      }
    }
    filter[i] = *(const uint32_t*)v;
  }
  for (int i = threadIdx.x; i < steps * 8; i += THREADS) {
    const Word word(arg, i);
    const int row = word.t * (int)arg.patch_rows + word.r * (int)arg.dilation_h;
    uint32_t at = (row * (int)arg.pitch + word.s * (int)arg.dilation_w * c + word.element) * (int)sizeof(data_t), mask = ~0u;
    if (EACH == 2 && word.element + 1 == run) mask = 0xffff;
    if (i >= (int)arg.words) at = mask = 0;
    *((uint2*)table + (i / 8 * 4 + i % 4) * 2 + i / 4 % 2) = make_uint2(at, mask);
  }

  // where this lane's pixels of a tile begin: in the patch, and in y
  uint32_t base[2 * SIXTEENS];
  int row[2 * SIXTEENS], column[2 * SIXTEENS];
#pragma unroll
  for (int i = 0; i < 2 * SIXTEENS; ++i) {
    const Divided of_row((warp * SIXTEENS + i / 2) * 16 + lane / 4 + i % 2 * 8, arg.columns, arg.by_columns);
    row[i] = of_row.quotient, column[i] = of_row.rest;
    int element = row[i] * (int)(arg.stride_h * arg.pitch) + column[i] * (int)arg.stride_w * c;
    int further = 0;
    if (EACH == 2 && element % 2 == 1) element -= 1, further = (int)arg.copy_at;
    base[i] = shared_address(patch) + element * (int)sizeof(data_t) + further;
  }
  const uint32_t table_lane = shared_address(table) + lane % 4 * 16, filter_lane = shared_address(filter) + lane * 8;
  const int row_elements = (int)(arg.width) * c;

  for (int tile = of_worker.rest; tile < (int)arg.tiles; tile += (int)arg.workers) {
    const Divided of_w(tile, arg.tiles_w, arg.by_tiles_w), of_h(of_w.quotient, arg.tiles_h, arg.by_tiles_h), of_d(of_h.quotient, arg.out_d, arg.by_out_d);
    const int p = of_h.rest * (int)arg.rows, q = of_w.rest * (int)arg.columns;
    const int d0 = of_d.rest * (int)arg.stride_d + (int)arg.low_d, h0 = p * (int)arg.stride_h + (int)arg.low_h;
    const int w0 = (q * (int)arg.stride_w + (int)arg.low_w) * c;
    __syncthreads();  // the patch before has been read
    for (int first = threadIdx.x; first < (int)(arg.patch * arg.patch_columns); first += THREADS * AT_ONCE) {
      data_t v[AT_ONCE];
      int to[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const Divided of_row(first + i * THREADS, arg.patch_columns, arg.by_patch_columns), of_slice(of_row.quotient, arg.patch_rows, arg.by_patch_rows);
        const int d = d0 + of_slice.quotient * (int)arg.dilation_d, h = h0 + of_slice.rest, element = w0 + of_row.rest;
        const bool mine = of_row.quotient < (int)arg.patch;
        const bool there = mine && (unsigned)d < (unsigned)arg.depth && (unsigned)h < (unsigned)arg.height && (unsigned)element < (unsigned)row_elements;
        v[i] = data_t();
        if (there) v[i] = x[((of_d.quotient * (int)arg.depth + d) * (int)arg.height + h) * row_elements + element];
        to[i] = mine ? of_row.quotient * (int)arg.pitch + of_row.rest : -1;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (to[i] >= 0) {
          patch[to[i]] = factor(v[i]);
          if (EACH == 2 && arg.copy_at && to[i] > 0) *(data_t*)((char*)(patch + to[i] - 1) + arg.copy_at) = v[i];
        }
    }
    __syncthreads();

    float sum[SIXTEENS][COLUMN_TILES][4] = {};
    for (int step = 0; step < steps; ++step) {
      const uint4 at = load_vector(table_lane + step * 64);
      uint32_t a[SIXTEENS][4];
#pragma unroll
      for (int i = 0; i < SIXTEENS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          a[i][half] = load_word(base[2 * i + half] + at.x) & at.y;
          a[i][2 + half] = load_word(base[2 * i + half] + at.z) & at.w;
        }
#pragma unroll
      for (int eight = 0; eight < COLUMN_TILES; ++eight) {
        const uint2 b = load_words(filter_lane + (step * COLUMN_TILES + eight) * 256);
#pragma unroll
        for (int i = 0; i < SIXTEENS; ++i) multiply<data_t>(sum[i][eight], a[i], b.x, b.y);
      }
    }

    // y
    struct alignas(NEIGHBOURS * sizeof(data_t)) Neighbours {
      data_t v[NEIGHBOURS];
    };
    const bool wide = arg.wide != 0;
    for_all<COLUMN_TILES / TOGETHER>([&](auto group) {
      constexpr int eight = decltype(group)::value * TOGETHER;
      const int k = first_k + eight * 8 + lane % 4 * NEIGHBOURS, count = min((int)arg.k - k, NEIGHBOURS);
      Finish<false> finish[NEIGHBOURS];
#pragma unroll
      for (int e = 0; e < NEIGHBOURS; ++e) finish[e].of = ScaleAndBias(arg, scale, bias, min(k + e, (int)arg.k - 1));
#pragma unroll
      for (int i = 0; i < 2 * SIXTEENS; ++i) {
        if (p + row[i] >= (int)arg.p || q + column[i] >= (int)arg.q || count <= 0) continue;
        const long long at = ((of_h.quotient * arg.p + p + row[i]) * arg.q + q + column[i]) * arg.k + k;
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
  }
}
