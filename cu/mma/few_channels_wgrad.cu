// few_channels_wgrad.cu: wgrad with few channels in or out, from channels-last arrays as they lie, on tensor cores that warps feed themselves, from
// Ampere on.
//
//   dw[k,c,r,s] = sum over n, p, q of dy[n,p,q,k] * x[n, p * stride_h - pad_h + r * dilation_h, q * stride_w - pad_w + s * dilation_w, c]
//
// The array with more channels is called dense, the other one thin. If dy is thin, all strides are 1, and the same sum runs over the pixels of x:
//   dw[k,c,r,s] = sum over n, h, w of x[n,h,w,c] * dy[n, h + pad_h - r * dilation_h, w + pad_w - s * dilation_w, k]
//   gemm m: channels of the dense array | gemm n: (r,s, thin channel), the latter fastest | gemm k: pixels of the dense array
//
// Taps times few channels fill the tensor core's columns, and each element of either array is loaded about once.
//
// Mapping  block -> 16 * M_TILES channels, 8 * N_TILES * warps_n columns, and every `parts`-th tile of pixels. Order, fastest first: channels,
//          columns, parts. A tile is `rows` x `columns` pixels, in groups of 16 of a row.
//          warp -> 8 * N_TILES columns of gemm n, and every so many groups. In the end one warp of each columns adds the others' sums.
// Memory   shared: two tiles of the dense array, [row][column][channels], spaced so that no banks conflict; zeros outside the array.
//          What a tile reads of the thin array, [row][column, channel], as the tensor core takes it: one or two TF32 numbers, or a word of an element
//          and of the one that the next pixel reads by the same tap. Registers receive the next tile's while this one is multiplied.
// LIMBS 2  float32: an element is two TF32 numbers. Three products are added: that of the first numbers, 16 pixels at a time, to a float32 sum, because
//          the tensor core truncates its own; and those of first and second numbers.
// Sums     float32, in registers. Each part is stored like dw, and direct/reduce.cu adds them in order; a single float32 part is dw.
// Zeros    Zeros stand for pixels outside an array, and 0 x Inf is NaN. So a sum that is not finite is computed again without them. So is
//          one of floats whose second number overflows.
// Limits   fewer than 2^31 elements of either array.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/mma/few_channels_wgrad.cu
#ifndef TYPE
#define TYPE 17    // of x, dy: 32 float, 16 half, 17 bfloat16
#define LIMBS 1    // TF32 numbers that a float is split into
#define M_TILES 2  // sixteens of a block's channels of the dense array
#define N_TILES 3  // eights of a warp's columns of gemm n
#endif
#include "mma/grouped.cuh"
#include "core/tf32.cuh"
#include "core/truncation.cuh"

static_assert(LIMBS == 1 || TYPE == 32, "16 bits are one number");

typedef element<TYPE> data_t;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int WORDS = 12, TOGETHER = 4;                              // words of the thin array's tile that a thread has at the most, and that it loads at once
constexpr int PIXEL = 16 * M_TILES * sizeof(data_t) + (TYPE == 32 ? 32 : 16);  // bytes from one pixel of a dense tile to the next

// by_n is the divisor n, prepared (division.cuh).
struct FewChannelsWgradArguments {
  long long blocks_m, by_blocks_m, blocks_n, by_blocks_n, parts;  // blocks along channels and along columns; parts of the sum
  long long tiles, tiles_p, by_tiles_p, tiles_q, by_tiles_q;      // all tiles; along rows and columns of the dense array
  long long rows, by_rows, columns, groups, groups_q, by_groups_q;  // of a tile: pixels, groups of 16 pixels, and those of a row
  long long warps_n, by_warps_n;                                  // warps with different columns of gemm n
  long long n, p, q, dense, pixel, chunks, by_chunks;             // the dense array: images and size, channels, 16-byte chunks of a pixel, and those of a block
  long long h, w, thin, by_thin;                                  // the thin array: size and channels
  long long step_h, step_w, low_h, low_w, dilation_h, dilation_w;  // pixel p reads row p * step_h + low_h + r * dilation_h of it
  long long tile_words, tile_w, by_tile_w;                        // the part of it that a tile reads: words, and words of a row
  long long taps, tap_r, tap_s, by_tap_s, flipped;                // flipped: sums of tap (r, s) are those of (R-1-r, S-1-s)
  long long out_m, out_c, size;                                   // elements of dw: from one dense channel to the next, from one thin channel to the next, all
};

// A tile's image, first row and column of the dense array.
struct Tile {
  int image, p, q;
  DEVICE Tile(const FewChannelsWgradArguments& arg, int tile) {
    const Divided of_q(tile, arg.tiles_q, arg.by_tiles_q), of_p(of_q.quotient, arg.tiles_p, arg.by_tiles_p);
    image = of_p.quotient;
    p = of_p.rest * (int)arg.rows;
    q = of_q.rest * (int)arg.columns;
  }
};

constexpr int STEP = 32 / sizeof(data_t);   // pixels of a product
constexpr int HALF = STEP / 2;              // pixels from a lane's first word to its second
constexpr int PIXELS = 4 / sizeof(data_t);  // elements of a word
constexpr int WORD = 4 * LIMBS;             // bytes in shared memory of an element's limbs, or of two 16-bit elements

#if TYPE == 32
constexpr int LARGER = 4096;  // tf32.cuh; results that are not finite are computed once more
// The part of itself that a sum of two steps loses in the mean. See truncation.cuh.
[[maybe_unused]] constexpr float LOST = 0.42e-7f * 16 / 15;
DEVICE Tf32Pair pair_of(float v) { return tf32_pair<LARGER>(v, to_tf32(v)); }
#endif

// What a tile reads of the thin array: this thread's words as they lie. Nothing uses them before they are stored, so all loads are under way
// while a tile is multiplied. For elements outside the array the first element is loaded instead, which is as quick as no load.
struct ThinWords {
  data_t element[WORDS][PIXELS];
  uint32_t inside;  // a bit for each: whether it is inside

  DEVICE void fetch(const FewChannelsWgradArguments& arg, const Tile& tile, const data_t* __restrict__ thin) {
    const int h0 = tile.p * (int)arg.step_h + (int)arg.low_h, first = (tile.q * (int)arg.step_w + (int)arg.low_w) * (int)arg.thin;
    const int row_size = (int)(arg.w * arg.thin), beside = (int)(arg.step_w * arg.thin);
    const data_t* const image = thin + (long long)tile.image * ((int)arg.h * row_size);
    inside = 0;
    each(arg, [&](int i, int number) {
      const Divided at(number, arg.tile_w, arg.by_tile_w);
      const int h = h0 + at.quotient;
      const bool of_row = number < (int)arg.tile_words && (unsigned)h < (unsigned)arg.h;
#pragma unroll
      for (int pixel = 0; pixel < PIXELS; ++pixel) {
        const int e = first + at.rest + pixel * beside;
        const bool there = of_row && (unsigned)e < (unsigned)row_size;
        element[i][pixel] = *(there ? image + h * row_size + e : thin);
        inside |= (uint32_t)there << (i * PIXELS + pixel);
      }
    });
  }

  DEVICE void store(const FewChannelsWgradArguments& arg, uint32_t* to) const {
    const data_t zero = from_float<data_t>(0);
    auto get = [&](int i, int pixel) { return inside >> (i * PIXELS + pixel) & 1 ? element[i][pixel] : zero; };
    each(arg, [&](int i, int number) {
      if (number >= (int)arg.tile_words) return;
#if LIMBS == 2
      const Tf32Pair limbs = pair_of(get(i, 0));
      ((uint2*)to)[number] = make_uint2(limbs.high, limbs.low);
#elif TYPE == 32
      to[number] = to_tf32(get(i, 0));
#else
      to[number] = word_of(get(i, 0), get(i, 1));
#endif
    });
  }

 private:
  // Calls `word` for this thread's words and their numbers in the tile, some at once, past the tile's end too.
  template <class Word> DEVICE void each(const FewChannelsWgradArguments& arg, Word word) const {
#pragma unroll
    for (int some = 0; some < WORDS; some += TOGETHER) {
      if (some * THREADS >= (int)arg.tile_words) break;
#pragma unroll
      for (int i = some; i < some + TOGETHER; ++i) word(i, threadIdx.x + i * THREADS);
    }
  }
};

// ---- the multiplication

typedef float Sums[M_TILES][N_TILES][4];

// Calls f(m, j, e) for each sum [m][j][e].
template <class F> DEVICE void each_sum(F f) {
#pragma unroll
  for (int i = 0; i < M_TILES * N_TILES * 4; ++i) f(i / 4 / N_TILES, i / 4 % N_TILES, i % 4);
}

DEVICE uint32_t load_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
DEVICE void load_word(uint32_t (&v)[1], uint32_t from) { v[0] = load_word(from); }
DEVICE void load_word(uint32_t (&v)[2], uint32_t from) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(from) : "memory");
}

// Loads sixteen channels of the pixels of a product, whose first one is at `from`: a[..][0], a[..][1] are those of the first half of the pixels,
// a[..][2], a[..][3] those of the second.
DEVICE void load_channels(uint32_t (&a)[LIMBS][4], uint32_t from) {
  const int lane = threadIdx.x % 32;
#if TYPE == 32
  from += lane % 4 * PIXEL + lane / 4 * 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Tf32Pair limbs = pair_of(__uint_as_float(load_word(from + e / 2 * 4 * PIXEL + e % 2 * 32)));
    a[0][e] = limbs.high;
    if (LIMBS == 2) a[LIMBS - 1][e] = limbs.low;
  }
#else
  from += (lane % 8 + lane / 16 * 8) * PIXEL + lane / 8 % 2 * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0][0]), "=r"(a[0][1]), "=r"(a[0][2]), "=r"(a[0][3]) : "r"(from) : "memory");
#endif
}

// Adds a tile's groups from `group` on to `sums`; with LIMBS 2, products of first and second numbers go to `cross`. `offsets`: from the first word that
// a pixel reads to the words that this lane's columns are made of.
DEVICE void multiply_tile(const FewChannelsWgradArguments& arg, const Tile& tile, int group, int groups_apart, uint32_t dense, uint32_t thin,
                          const int (&offsets)[N_TILES], Sums& sums, Sums& cross) {
  const int lane = threadIdx.x % 32, rows = (int)arg.p - tile.p, columns = (int)arg.q - tile.q, step_w = (int)(arg.step_w * arg.thin);
  for (; group < (int)arg.groups; group += groups_apart) {
    const Divided at(group, arg.groups_q, arg.by_groups_q);
    const int row = at.quotient, column = at.rest * 16;
    if (row >= rows) break;
    if (column >= columns) continue;
    const uint32_t from = dense + (row * (int)arg.columns + column) * PIXEL;
    const uint32_t met = thin + WORD * (row * (int)(arg.step_h * arg.tile_w) + (column + lane % 4 * PIXELS) * step_w);
#if LIMBS == 2
    Sums main = {};
#else
    Sums& main = sums;
#endif
#pragma unroll
    for (int step = 0; step < 16; step += STEP) {
      uint32_t b[N_TILES][2][LIMBS];
#pragma unroll
      for (int j = 0; j < N_TILES; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) load_word(b[j][i], met + WORD * (offsets[j] + (step + i * HALF) * step_w));
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        uint32_t a[LIMBS][4];
        load_channels(a, from + step * PIXEL + m * 16 * (int)sizeof(data_t));
#pragma unroll
        for (int pair = 0; pair < 2 * LIMBS - 1; ++pair)
#pragma unroll
          for (int j = 0; j < N_TILES; ++j) multiply<data_t>((pair ? cross : main)[m][j], a[pair / 2], b[j][0][pair % 2], b[j][1][pair % 2]);
      }
    }
#if LIMBS == 2
    each_sum([&](int m, int j, int e) { sums[m][j][e] += main[m][j][e]; });
#endif
  }
}

// A column's tap: its offset in the thin array from tap (0, 0) of the product; and where the column's sums are stored.
struct Column {
  int r, s, c, tap;
  DEVICE Column(const FewChannelsWgradArguments& arg, int column) {
    const Divided of(column, arg.thin, arg.by_thin), row(of.quotient, arg.tap_s, arg.by_tap_s);
    c = of.rest;
    tap = of.quotient;
    r = arg.flipped ? (int)arg.tap_r - 1 - row.quotient : row.quotient;
    s = arg.flipped ? (int)arg.tap_s - 1 - row.rest : row.rest;
  }
};

// Computes the sum of dense channel m and a column, of this part, without pixels outside the arrays.
static __device__ __noinline__ float recompute_fp32(
    const FewChannelsWgradArguments& arg, const data_t* dense, const data_t* thin, int part, int m, const Column& of) {
  float sum = 0;
  for (int number = part; number < (int)arg.tiles; number += (int)arg.parts) {
    const Tile tile(arg, number);
    for (int p = tile.p; p < min(tile.p + (int)arg.rows, (int)arg.p); ++p) {
      const int h = p * (int)arg.step_h + (int)arg.low_h + of.r * (int)arg.dilation_h;
      if ((unsigned)h >= (unsigned)arg.h) continue;
      for (int q = tile.q; q < min(tile.q + (int)arg.columns, (int)arg.q); ++q) {
        const int w = q * (int)arg.step_w + (int)arg.low_w + of.s * (int)arg.dilation_w;
        if ((unsigned)w >= (unsigned)arg.w) continue;
        const long long at = (long long)(tile.image * (int)arg.p + p) * (int)arg.q + q, met = (long long)(tile.image * (int)arg.h + h) * (int)arg.w + w;
        sum = fmaf(to_float(dense[at * (int)arg.dense + m]), to_float(thin[met * (int)arg.thin + of.c]), sum);
      }
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    few_channels_wgrad(const data_t* __restrict__ dense, const data_t* __restrict__ thin, float* __restrict__ dw,
                       const __grid_constant__ FewChannelsWgradArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(128) uint4 dynamic[];
  const Divided of_m(blockIdx.x, arg.blocks_m, arg.by_blocks_m), of_n(of_m.quotient, arg.blocks_n, arg.by_blocks_n);
  const int m0 = of_m.rest * 16 * M_TILES, part = of_n.quotient, tile_size = (int)(arg.rows * arg.columns) * PIXEL;
  const uint32_t tiles = shared_address(dynamic), met = tiles + 2 * tile_size;

  // this warp's columns, and which of their warps it is
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Divided of_warp(warp, arg.warps_n, arg.by_warps_n);
  const int column0 = (of_n.rest * (int)arg.warps_n + of_warp.rest) * N_TILES * 8, columns = (int)(arg.taps * arg.thin);
  const int beside = divided(WARPS, arg.by_warps_n);  // warps that share columns
  int offsets[N_TILES];
#pragma unroll
  for (int j = 0; j < N_TILES; ++j) {
    const Column column(arg, min(column0 + j * 8 + lane / 4, columns - 1));  // a missing column repeats the last one, and is not stored
    offsets[j] = column.r * (int)(arg.dilation_h * arg.tile_w) + column.s * (int)(arg.dilation_w * arg.thin) + column.c;
  }

  auto load = [&](int number, int slot) {
    if (number < (int)arg.tiles) {
      const Tile tile(arg, number);
      const Window window = {(int)arg.rows, (int)arg.rows, (int)arg.columns, M_TILES * (int)sizeof(data_t), PIXEL, arg.by_rows, arg.by_chunks,
                             (int)arg.n, (int)arg.p, (int)arg.q, (int)arg.pixel};
      window.load<WARPS>((const uint4*)dense, tile.image, tile.p, tile.q, m0 * (int)sizeof(data_t) / 16, tiles + slot * tile_size);
    }
    copies_commit();
  };
  Sums sums = {}, cross = {};
  ThinWords coming;
  coming.fetch(arg, Tile(arg, part), thin);
  load(part, 0);
  int slot = 0;
  for (int number = part; number < (int)arg.tiles; number += (int)arg.parts, slot ^= 1) {
    const int next = number + (int)arg.parts;
    coming.store(arg, (uint32_t*)dynamic + 2 * tile_size / 4);
    if (next < (int)arg.tiles) coming.fetch(arg, Tile(arg, next), thin);
    load(next, slot ^ 1);
    copies_wait<1>();
    __syncthreads();  // this tile has arrived for all
    multiply_tile(arg, Tile(arg, number), of_warp.quotient, beside, tiles + slot * tile_size, met, offsets, sums, cross);
    __syncthreads();  // all have read it: its place is filled next
  }
  copies_wait<0>();
#if LIMBS == 2
  each_sum([&](int m, int j, int e) { sums[m][j][e] = fmaf(with_lost(cross[m][j][e], sums[m][j][e], LARGER * LOST), 1.f / LARGER, sums[m][j][e]); });
#endif

  // the first warp of the columns adds the others' sums, one after the other
  constexpr int ALL = M_TILES * N_TILES * 4;
  float* const left = (float*)dynamic + of_warp.rest * (ALL * 32) + lane;
  for (int other = 1; other < beside; ++other) {
    __syncthreads();
    if (of_warp.quotient == other) each_sum([&](int m, int j, int e) { left[32 * ((m * N_TILES + j) * 4 + e)] = sums[m][j][e]; });
    __syncthreads();
    if (of_warp.quotient == 0) each_sum([&](int m, int j, int e) { sums[m][j][e] += left[32 * ((m * N_TILES + j) * 4 + e)]; });
  }
  if (of_warp.quotient > 0) return;
  dw += part * arg.size;
#pragma unroll
  for (int j = 0; j < N_TILES; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int number = column0 + j * 8 + lane % 4 * 2 + e;
      if (number >= columns) continue;
      const Column column(arg, number);
#pragma unroll
      for (int i = 0; i < 2 * M_TILES; ++i) {
        const int m = m0 + lane / 4 + 8 * i;
        if (m >= (int)arg.dense) continue;
        float sum = sums[i / 2][j][e + i % 2 * 2];
        if (!(fabsf(sum) <= 3.4e38f)) sum = recompute_fp32(arg, dense, thin, part, m, column);
        dw[m * arg.out_m + column.c * arg.out_c + column.tap] = sum;
      }
    }
}
