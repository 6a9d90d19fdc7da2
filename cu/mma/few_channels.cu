// few_channels.cu: fprop and dgrad with few channels in their result, on tensor cores that warps feed themselves.
//
//   y[n,k,p,q] = sum over r, s and c of x[n, c, row(p, r), column(q, s)] * w[k,c,r,s], and epilogue.cuh
//   u[p,column,(s,k)] = sum over r and c of x[n, c, row(p, r), column] * w[k,c,r,s]     a product of matrices
//   y[n,k,p,q] = sum over s of u[p, column(q, s), (s,k)]                                added from shared memory
//   gemm m: column of x | gemm n: (s,k), k fastest | gemm k: (r,c), in steps of 64 bytes of channels
//
// The tensor core's columns are taps times channels, so even few channels fill them, and each number that it makes is added once. x is read as it
// lies, from memory to registers. Each of its rows is multiplied at once for all rows of y that read it.
//
// Rows     In fprop row p reads p * stride - pad + r * dilation; in dgrad row (p + pad - r * dilation) / stride, if that is whole.
//          Rows of y that are `row_phases` apart read rows of x that are `row_step` apart, by the same taps: row j of a phase reads
//          first + row_step * (rows_apart * j + t), t = 0 ... taps - 1. A block computes rows of one phase.
// Slices   A slice of y is an image of its own. It adds what the slices of x give by the taps that reach them, one after the other.
// Columns  A block's columns of x are neighbours; a table says which of them, and which taps, a column of y adds.
// Mapping  block -> a phase, `chunk` channels of y, and one tile of an image after another. A tile has warps_h * ROWS rows of the phase, tile_q
//          columns of y, and warps_w * COLUMNS columns of x. warp -> ROWS x COLUMNS sums of all gemm n, in registers, over one of `parts` parts of
//          the channels of x; warps_w * warps_h * parts is 4. When the sums are added up: thread -> one element of y after another, neighbours in y.
//          A lane has 16 bytes of neighbours of a step's channels, in rows lane / 4 and lane / 4 + 8 of the matrix, which are columns of x. The
//          tensor core wants other channels there, but any order will do if the filter has the same.
// Memory   shared: the filter [slice][t][step][8 of gemm n][lane][16 bytes of channels], as the tensor core takes it; u [gemm n][part][row][column],
//          with 4 floats between its planes, so that a warp writes to and reads from all banks; the table of columns.
// Sums     PRODUCTS = 3: x and w are split into two TF32 numbers each, and three of their products are added. After each step the sum is added to
//          a float32 sum, because the tensor core truncates its own. Results that are not finite are computed once more, in plain float32.
//          The order of sums is the same for all tiles with the same number of parts.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/mma/few_channels.cu
#ifndef TYPE
#define TYPE 16          // of the arrays: 32 float, 16 half, 17 bfloat16
#define PRODUCTS 1       // 3: float32 arithmetic
#define COLUMN_TILES 1   // eights of gemm n
#define ROWS 6           // rows of y of a warp
#define PIXEL_TILES 2    // sixteens of columns of x of a warp
#define WIDE_LOADS 1     // a lane's channels are neighbours in memory, and may be loaded at once
#endif
#define MOMENTS 0
#include "core/finish.cuh"
#include "core/tf32.cuh"
#include "core/truncation.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, COLUMNS = 16 * PIXEL_TILES;
typedef element<TYPE> data_t;
constexpr int LANE = 16 / sizeof(data_t), STEP = 4 * LANE;  // channels of a lane, and of a step
constexpr int STEP_BYTES = COLUMN_TILES * 32 * 16;  // bytes of the filter, of a step and tap
static_assert(PRODUCTS == 1 || TYPE == 32, "three products are for float32");

// A divisor's prepared form, see division.cuh, is called by_...
struct FewChannelsArguments {
  long long workers, by_workers;                 // blocks that share the tiles of a phase and chunk
  long long chunks, by_chunks, chunk, by_chunk;  // chunks of channels of y
  long long tiles, tiles_h, by_tiles_h, tiles_w, by_tiles_w;
  long long warps_w, by_warps_w, warps_h, by_warps_h, parts, part_steps;  // steps of a part; the last parts may have fewer
  long long tile_q, by_tile_q, tile_rows, by_tile_rows;
  long long first_w, tile_w;                     // the first column of x of the first tile, and from one tile to the next
  long long gradient;
  long long k, c, by_c, channel_steps;           // channels of y and of x; steps of the latter
  long long d, h, w, o, by_o, p, q;              // sizes of x and y
  long long taps_t, taps_r, taps_s, by_taps_s;
  long long stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dil_d, dil_h, dil_w;
  long long every_h, every_w;                    // dgrad meets every every_h-th tap of a column and every every_w-th of a row
  long long row_phases, rows_apart, row_step;
  long long column_step;                         // columns of x from one tap's to the next; negative in dgrad
  long long w_k, w_c, w_tap;                     // elements of the filter from one k, c and tap to the next
  long long x_image, x_slice, x_row, x_pixel, x_channel, y_image, y_pixel, y_channel, channels_last;
  long long u_at, table_at;                      // offsets in shared memory in bytes
  long long has_bias, has_scale, has_residual, activation, slope;
};

// The taps of an axis that a row or a column of y meets: `first`, and those a fixed number further each; the first one reads `at`.
struct Taps {
  int first, count, at;
  DEVICE Taps(bool gradient, int out, int taps, int stride, int pad, int dilation, int every) : first(0), count(taps), at(out * stride - pad) {
    if (!gradient) return;
    while (first < taps && first < every && (out + pad - first * dilation) % stride != 0) ++first;
    count = first < taps && first < every ? (taps - first + every - 1) / every : 0;
    at = count ? (out + pad - first * dilation) / stride : 0;
  }
};

// The slice of x that slice `out` of y meets by tap t; there may be none of this number.
DEVICE int slice_of(const FewChannelsArguments& arg, int out, int t) {
  return arg.gradient ? out + (int)(arg.pad_d - t * arg.dil_d) : (int)(out * arg.stride_d - arg.pad_d + t * arg.dil_d);
}

struct Column {
  int from, count;  // offset in u; number of taps
};

// ---- products: d[0], d[1] are row lane / 4, columns 2 * (lane % 4) and the next; d[2], d[3] are 8 rows below

#if TYPE == 32
DEVICE void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#else
#if TYPE == 16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
DEVICE void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

// A lane's channels as they lie.
struct Channels {
  uint32_t words[4];
  Channels() = default;
  DEVICE explicit Channels(const uint4& v) : words{v.x, v.y, v.z, v.w} {}
};

[[maybe_unused]] constexpr int LARGER = 4096;  // tf32.cuh; results that are not finite are computed once more
// The part of itself that a sum of steps of 16 channels loses in the mean: two truncations, less what the rounding of second numbers gives. See truncation.cuh.
[[maybe_unused]] constexpr float LOST = 0.42e-7f * 16 / 15;

// Channels as factors: for three products as two TF32 numbers each.
struct Factors {
  uint32_t high[4];
#if PRODUCTS == 3
  uint32_t low[4];
#endif
  Factors() = default;
  DEVICE Factors(const Channels& channels, bool rounded) {  // rounded: to TF32 numbers
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if TYPE == 32
      const float v = __uint_as_float(channels.words[i]);
      high[i] = rounded ? channels.words[i] : to_tf32(v);
#if PRODUCTS == 3
      low[i] = to_tf32(__uint_as_float(tf32_rest<LARGER>(v, high[i])));
#endif
#else
      high[i] = channels.words[i];
#endif
    }
  }
};

// sum += 16 columns of x times 8 of gemm n, over a step's channels; x: a lane's two columns.
DEVICE void multiply_step(float (&sum)[4], const Factors (&x)[2], const Factors& w) {
#if PRODUCTS == 3
  float main[4] = {}, cross[4] = {};
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    multiply(main, x[0].high[i], x[1].high[i], x[0].high[i + 1], x[1].high[i + 1], w.high[i], w.high[i + 1]);
    multiply(cross, x[0].low[i], x[1].low[i], x[0].low[i + 1], x[1].low[i + 1], w.high[i], w.high[i + 1]);
    multiply(cross, x[0].high[i], x[1].high[i], x[0].high[i + 1], x[1].high[i + 1], w.low[i], w.low[i + 1]);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] += fmaf(cross[e], 1.f / LARGER, main[e]);
#else
#pragma unroll
  for (int i = 0; i < 4; i += 2) multiply(sum, x[0].high[i], x[1].high[i], x[0].high[i + 1], x[1].high[i + 1], w.high[i], w.high[i + 1]);
#endif
}

// ---- loads

DEVICE void load_shared(Channels& to, uint32_t at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3]) : "r"(at));
}

// A lane's columns of x, for a step.
struct Pixels {
  Channels of[PIXEL_TILES][2];
};

// Loads from `first`, the lane's first column of x and its channel c; the others are 8 columns apart. `there`: a bit for each real column.
DEVICE void load(Pixels& to, const FewChannelsArguments& arg, const data_t* first, int c, unsigned there) {
  if (c >= (int)arg.c) there = 0;
#pragma unroll
  for (int i = 0; i < PIXEL_TILES; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Channels& channels = to.of[i][half];
      const bool is_there = there >> (2 * i + half) & 1;
      const data_t* const pixel = first + (2 * i + half) * 8 * (int)arg.x_pixel;
#if WIDE_LOADS
      channels = Channels(is_there ? *(const uint4*)pixel : make_uint4(0, 0, 0, 0));
#else
      data_t each[LANE];
#pragma unroll
      for (int e = 0; e < LANE; ++e) each[e] = is_there && c + e < (int)arg.c ? pixel[e * (int)arg.x_channel] : data_t();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#if TYPE == 32
        channels.words[e] = __float_as_uint(each[e]);
#else
        channels.words[e] = each[2 * e].bits | (uint32_t)each[2 * e + 1].bits << 16;
#endif
      }
#endif
    }
}

// ---- results that are not finite, computed once more

#if PRODUCTS == 3
static __device__ __noinline__ float recompute_fp32(const FewChannelsArguments& arg, const data_t* image, const data_t* w, int o, int p, int q) {
  const bool gradient = arg.gradient != 0;
  const int down = gradient ? (int)arg.every_h * (int)arg.dil_h / (int)arg.stride_h : (int)arg.dil_h;
  const Taps rows(gradient, p, arg.taps_r, arg.stride_h, arg.pad_h, arg.dil_h, arg.every_h);
  const Taps columns(gradient, q, arg.taps_s, arg.stride_w, arg.pad_w, arg.dil_w, arg.every_w);
  float sum = 0;
  for (int tr = 0; tr < (int)arg.taps_t * rows.count; ++tr)
    for (int s = 0; s < columns.count; ++s) {
      const int t = tr / rows.count, r = tr - t * rows.count, slice = slice_of(arg, o, t);
      const int row = rows.at + (gradient ? -r : r) * down, column = columns.at + s * (int)arg.column_step;
      const bool is_there = (unsigned)slice < (unsigned)arg.d && (unsigned)row < (unsigned)arg.h && (unsigned)column < (unsigned)arg.w;
      const int tap = (t * (int)arg.taps_r + rows.first + r * (int)arg.every_h) * (int)arg.taps_s + columns.first + s * (int)arg.every_w;
      const data_t *from = image + slice * arg.x_slice + row * arg.x_row + column * arg.x_pixel, *by = w + tap * arg.w_tap;
      for (int c = 0; c < (int)arg.c; ++c) sum = fmaf(is_there ? to_float(from[c * arg.x_channel]) : 0, to_float(by[c * arg.w_c]), sum);
    }
  return sum;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, PRODUCTS == 1 && WIDE_LOADS ? 4 : 3)
    few_channels(const data_t* __restrict__ x, const data_t* __restrict__ w, const data_t* __restrict__ bias, const data_t* __restrict__ scale,
                 const data_t* residual, data_t* __restrict__ y, const __grid_constant__ FewChannelsArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) uint4 dynamic[];
  data_t* const filter = (data_t*)dynamic;
  float* const u = (float*)((char*)dynamic + arg.u_at);
  Column* const table = (Column*)((char*)dynamic + arg.table_at);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = (int)arg.channel_steps, chunk = (int)arg.chunk;
  const bool gradient = arg.gradient != 0;

  // the phase and the chunk of this block
  const Divided of_worker(blockIdx.x, arg.workers, arg.by_workers), of_chunk(of_worker.quotient, arg.chunks, arg.by_chunks);
  const int worker = of_worker.rest, phase = of_chunk.quotient, k0 = of_chunk.rest * chunk, ks = min(chunk, (int)arg.k - k0);
  const Taps rows(gradient, phase, arg.taps_r, arg.stride_h, arg.pad_h, arg.dil_h, arg.every_h);
  const int taps = rows.count, phase_rows = ((int)arg.p - phase + (int)arg.row_phases - 1) / (int)arg.row_phases;
  const int first_h = gradient ? rows.at - (int)arg.row_step * (taps - 1) : rows.at;

  // the table, and the filter
  const int tile_columns = (int)arg.warps_w * COLUMNS, plane = (int)(arg.parts * arg.tile_rows) * tile_columns + 4;
  for (int i = threadIdx.x; i < (int)arg.tile_q; i += THREADS) {
    const Taps columns(gradient, i, arg.taps_s, arg.stride_w, arg.pad_w, arg.dil_w, arg.every_w);
    table[i] = {columns.first * chunk * plane + columns.at - (int)arg.first_w, columns.count};
  }
  const int slice_taps = taps * steps * COLUMN_TILES * 32;  // words of 16 bytes that the filter has of a slice
  for (int i = threadIdx.x; i < (int)arg.taps_t * slice_taps; i += THREADS) dynamic[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  constexpr int AT_ONCE = PRODUCTS == 3 ? 4 : 8;  // as many as registers hold
#pragma unroll AT_ONCE
  for (int i = threadIdx.x; i < (int)arg.taps_t * taps * chunk * (int)(arg.c * arg.taps_s); i += THREADS) {
    const Divided of_c(i, arg.taps_s, arg.by_taps_s), of_k(of_c.quotient, arg.c, arg.by_c), of_t(of_k.quotient, arg.chunk, arg.by_chunk);
    const int s = of_c.rest, c = of_k.rest, kk = of_t.rest, n = s * chunk + kk, slice = of_t.quotient / taps, t = of_t.quotient - slice * taps;
    const int r = slice * (int)arg.taps_r + rows.first + (gradient ? taps - 1 - t : t) * (int)arg.every_h;
    data_t v = data_t();
    if (kk < ks) v = w[(k0 + kk) * (int)arg.w_k + c * (int)arg.w_c + (r * (int)arg.taps_s + s) * (int)arg.w_tap];
#if TYPE == 32 && PRODUCTS == 1
    v = __uint_as_float(to_tf32(v));
#endif
    filter[(((of_t.quotient * steps + c / STEP) * COLUMN_TILES + n / 8) * 32 + n % 8 * 4 + c % STEP / LANE) * LANE + c % LANE] = v;
  }
  __syncthreads();

  const Divided of_warps_w(warp, arg.warps_w, arg.by_warps_w), of_warps_h(of_warps_w.quotient, arg.warps_h, arg.by_warps_h);
  const int warp_w = of_warps_w.rest, warp_h = of_warps_h.rest, part = of_warps_h.quotient, area = (int)arg.tile_rows * tile_columns;
  const int begin = part * (int)arg.part_steps, end = min(begin + (int)arg.part_steps, steps);  // there may be none
  const int used = (int)arg.taps_s * chunk;  // columns of gemm n that are used
  uint32_t filter_lane = (uint32_t)__cvta_generic_to_shared(dynamic) + lane * 16;
  asm volatile("" : "+r"(filter_lane));  // else the compiler would compute it again for each product
  for (int tile = worker; tile < (int)arg.tiles; tile += (int)arg.workers) {
    const Divided of_row(tile, arg.tiles_w, arg.by_tiles_w), of_slice(of_row.quotient, arg.tiles_h, arg.by_tiles_h);
    const Divided of_image(of_slice.quotient, arg.o, arg.by_o);
    const int n = of_image.quotient, o = of_image.rest, j0 = of_slice.rest * (int)arg.tile_rows, q0 = of_row.rest * (int)arg.tile_q;

    // the rows of x that this warp's rows of y read, and this lane's columns
    const int j = j0 + warp_h * ROWS, valid = min(phase_rows - j, ROWS), top = first_h + (int)(arg.row_step * arg.rows_apart) * j;
    const int count = valid > 0 && taps > 0 ? ((int)arg.rows_apart * (valid - 1) + taps) * max(end - begin, 0) : 0;
    const int column = (int)arg.first_w + of_row.rest * (int)arg.tile_w + warp_w * COLUMNS + lane / 4;
    unsigned there = 0;
#pragma unroll
    for (int i = 0; i < 2 * PIXEL_TILES; ++i) there |= (unsigned)((unsigned)(column + i * 8) < (unsigned)arg.w) << i;

    // Products, slice by slice of x: loads are DEEP steps ahead. From a row's last step they go on to the next row's first.
    constexpr int DEEP = PRODUCTS == 1 && WIDE_LOADS && COLUMN_TILES < 6 ? 2 / PIXEL_TILES : 1;  // as many as registers hold
    float sums[ROWS][COLUMN_TILES][PIXEL_TILES][4] = {};
    Pixels ring[DEEP];
    const int row_bytes = steps * STEP_BYTES, y_row_bytes = (int)arg.rows_apart * row_bytes, next_step = STEP * (int)arg.x_channel;
    const int next_row = (int)(arg.row_step * arg.x_row) - (end - begin) * next_step;
    for (int t = 0; t < (int)arg.taps_t; ++t) {
      const int slice = slice_of(arg, o, t);
      const unsigned rows_there = (unsigned)slice < (unsigned)arg.d ? (unsigned)arg.h : 0;
      int row_now = 0, row_ahead = top, step_now = begin, channel_ahead = begin * STEP + lane % 4 * LANE;
      uint32_t filter_now = filter_lane + t * slice_taps * 16 + begin * STEP_BYTES;  // for the tap by which the warp's first row of y reads this row
      const data_t* ahead = x + n * arg.x_image + slice * arg.x_slice + top * arg.x_row + column * arg.x_pixel + channel_ahead * arg.x_channel;
      auto load_next = [&](Pixels& to) {
        load(to, arg, ahead, channel_ahead, (unsigned)row_ahead < rows_there ? there : 0);
        ahead += next_step;
        if ((channel_ahead += STEP) >= end * STEP) {
          ahead += next_row;
          channel_ahead -= (end - begin) * STEP;
          row_ahead += (int)arg.row_step;
        }
      };
#pragma unroll
      for (int i = 0; i < DEEP; ++i)
        if (i < count) load_next(ring[i]);
      for (int at = 0; at < count; at += DEEP) {
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
          if (at + i < count) {
            Factors pixels[PIXEL_TILES][2];
#pragma unroll
            for (int tile = 0; tile < PIXEL_TILES; ++tile)
#pragma unroll
              for (int half = 0; half < 2; ++half) pixels[tile][half] = Factors(ring[i].of[tile][half], false);
            if (at + i + DEEP < count) load_next(ring[i]);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
              const int tap = row_now - row * (int)arg.rows_apart;
              if ((unsigned)tap < (unsigned)taps) {
                const uint32_t by = filter_now - row * y_row_bytes;
#pragma unroll
                for (int column = 0; column < COLUMN_TILES; ++column) {
                  Channels channels;
                  load_shared(channels, by + column * 512);
                  const Factors factor(channels, PRODUCTS == 1);
#pragma unroll
                  for (int tile = 0; tile < PIXEL_TILES; ++tile) multiply_step(sums[row][column][tile], pixels[tile], factor);
                }
              }
            }
            filter_now += STEP_BYTES;
            if (++step_now == end) {
              step_now = begin;
              ++row_now;
              filter_now += row_bytes - (end - begin) * STEP_BYTES;
            }
          }
        }
      }
    }

    __syncthreads();  // u of the tile before has been read
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
        for (int tile = 0; tile < PIXEL_TILES; ++tile)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int m = column * 8 + lane % 4 * 2 + e % 2;
            float v = sums[row][column][tile][e];
            if (PRODUCTS == 3) v = with_lost(v, LOST);
            if (m < used) u[m * plane + part * area + (warp_h * ROWS + row) * tile_columns + warp_w * COLUMNS + tile * 16 + e / 2 * 8 + lane / 4] = v;
          }
    __syncthreads();

    // from sums to y
    const int next = (int)arg.every_w * chunk * plane + (int)arg.column_step;
    for (int i = threadIdx.x; i < (int)(arg.tile_rows * arg.tile_q) * chunk; i += THREADS) {
      int row, q, kk;
      if (arg.channels_last) {
        const Divided of_pixel(i, arg.chunk, arg.by_chunk), of_row(of_pixel.quotient, arg.tile_q, arg.by_tile_q);
        kk = of_pixel.rest, q = of_row.rest, row = of_row.quotient;
      } else {
        const Divided of_row(i, arg.tile_q, arg.by_tile_q), of_channel(of_row.quotient, arg.tile_rows, arg.by_tile_rows);
        q = of_row.rest, row = of_channel.rest, kk = of_channel.quotient;
      }
      const int p = phase + (j0 + row) * (int)arg.row_phases;
      if (kk >= ks || j0 + row >= phase_rows || q0 + q >= (int)arg.q) continue;
      const Column column = table[q];
      const float* from = u + kk * plane + row * tile_columns + column.from;
      float v[1] = {0};
      for (int part = 0; part < (int)arg.parts; ++part, from += area)
#pragma unroll 2
        for (int s = 0; s < column.count; ++s) v[0] += from[s * next];
#if PRODUCTS == 3
      if ((__float_as_uint(v[0]) & 0x7f800000) == 0x7f800000) v[0] = recompute_fp32(arg, x + n * arg.x_image, w + (k0 + kk) * arg.w_k, o, p, q0 + q);
#endif
      const int k = k0 + kk;
      const long long at = n * arg.y_image + k * arg.y_channel + ((o * arg.p + p) * arg.q + q0 + q) * arg.y_pixel;
      const Finish<false> finish{ScaleAndBias(arg, scale, bias, k)};
      v[0] = finish.whole(arg, v[0], 1, has_residual(arg) ? to_float(residual[at]) : -0.f);
      activate(arg, v);
      y[at] = from_float<data_t>(v[0]);
    }
  }
}
