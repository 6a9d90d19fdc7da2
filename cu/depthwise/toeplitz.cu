// toeplitz.cu: 16-bit depthwise layers on tensor cores that warps feed themselves. Arrays are NCHW, or with LAST have their channels last.
//
//   y[plane, p, q] = sum over r and s of x[plane, p * stride_h - pad_h + r * dil_h, q * STRIDE - pad_w + s * dil_w] * w[plane, r, s], and finish.cuh
//   For each row r of the filter: gemm m: 16 rows of y | gemm n: 8 columns of y | gemm k: STEPS times 16 columns of x
//   The factor of gemm k and n is a Toeplitz matrix: it has a tap where column k of x meets column n of y, and zeros elsewhere.
//   With GRAD y is the input's gradient of a convolution of stride 2, and x the gradient of its result:
//   y[plane, p, q] = sum over those r and s, of which (p + pad_h - r) and (q + pad_w - s) are even, of x[plane, (p + pad_h - r) / 2, (q + pad_w - s) / 2] * w
//   A task's rows of y are two apart, and meet every other row of the filter. Eight columns of x are those that sixteen of y read.
//
// Plain cores take an instruction for each tap and result, which bounds filters of 5x5 and more. Here an instruction applies a row of taps to
// 128 results, and memory bounds the layer.
//
// Mapping  block -> a unit: `planes` planes of y, or `band` rows of one plane; with LAST 16 channels of `band` rows and `columns` columns of an image.
//          GID_0 = ((group of planes or image * bands + band) * spans of columns + span) * chunks of channels + chunk: neighbours read the same lines.
//          warp -> tasks: 16 rows by TILES eights of columns of a plane. Matrices are loaded by 16 bytes, so in NCHW eights of x begin at multiples of 8
//          elements: eight t of y begins at column 8 * t + y_off, and the first lies partly outside.
// Memory   shared: for each plane, filter rows of `taps_pitch` words, each a tap and its right neighbour, among zeros; the run of y, with LAST its
//          pixels; rows of x, plane by plane, with zeros beside them, and a row of zeros, which stands for all rows outside the image.
// Loads    Rows of a multiple of 8 elements are copied by 16 bytes. Of other rows a thread loads words, and shifts them if the row begins at an odd
//          element. With LAST a warp loads 16 channels of 8 neighbouring pixels, and transposes them as it stores them (stmatrix).
// Border   BORDERED texts fill the columns beside the rows of x in shared memory with the pixels that stand there, and read rows that stand above and below.
// Zeros    0 x Inf is NaN. If a sum is NaN, its lane computes it again, tap by tap.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/depthwise/toeplitz.cu
#ifndef TYPE
#define TYPE 16   // of the arrays: 16 half, 17 bfloat16
#define STRIDE 1  // along a row
#define STEPS 1   // sixteens of columns of x that eight columns of y read
#define LAST 0    // the arrays have their channels last
#define GRAD 0    // dgrad; STRIDE and STEPS are 1 then
#endif
#ifndef BORDERED
#define BORDERED 0  // x has a border; without LAST and GRAD, for units of whole planes
#endif
#define MOMENTS 0
#include "mma/async_copy.cuh"
#include "core/near_border.cuh"
#include "core/finish.cuh"
#include "mma/fragments.cuh"

typedef element<TYPE> data_t;

constexpr int WARPS = LAST ? 8 : 4, THREADS = 32 * WARPS;
constexpr int TILES = GRAD ? 6 : STRIDE == 1 ? 5 : 3;         // eights of columns of y of a task
constexpr int UNITS = GRAD ? TILES / 2 + 1 : STRIDE * (TILES - 1) + 2 * STEPS;  // eights of columns of x that these read
constexpr int FACTORS = GRAD ? 2 : STEPS;                     // matrices of a row of the filter
constexpr int BEFORE = GRAD ? 32 : 8 * STRIDE;                // zeros before a row of taps
constexpr int NEXT_TAP = GRAD ? -2 : 1;                         // the second tap of a word, relative to its own
constexpr int ROWS_APART = GRAD ? 2 : 1;                      // rows of y of a task
// the first eight of x of task `number` of a row, and of tile `tile` of a task; the matrix of the tile in a step
DEVICE constexpr int unit_of_task(int number) { return GRAD ? number * (TILES / 2) : number * TILES * STRIDE; }
DEVICE constexpr int unit_of(int tile, int step) { return GRAD ? tile / 2 : STRIDE * tile + 2 * step; }
DEVICE constexpr int factor_of(int tile, int step) { return GRAD ? tile % 2 : step; }
[[maybe_unused]] constexpr int PIXEL = 24, ROW_PAD = 4;       // with LAST: elements from one pixel of y to the next, and behind a row: few bank conflicts
constexpr int EIGHT = 8, EIGHT_BYTES = 16, AT_ONCE = LAST ? 6 : 3;  // eights of x that a thread, or with LAST a warp, loads before it stores the first
// Blocks of a multiprocessor at once: more would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int BLOCKS = LAST ? 2 : 4;
#elif defined(LAYER)
constexpr int BLOCKS = (LAST ? 3 : 5) - HAS_RESIDUAL;
#else
constexpr int BLOCKS = LAST ? 2 : 4;  // an epilogue that is not known takes registers
#endif
#if LAST
constexpr int CHANNELS = 16;  // of a block
#endif
static_assert(UNITS % 2 == 0, "two eights are loaded at once");

// by_n is the divisor n, prepared (division.cuh).
struct DepthwiseToeplitzArguments {
  long long planes, all_planes;                   // planes of y: of a unit, of the launch
  long long band, bands, by_bands;                // rows of y of a unit; units of a plane, 1 if a unit has several planes
  long long sixteens, by_sixteens;                // of rows of y of a plane of a unit
  long long groups, by_groups;                    // of eights of columns of y
  long long k, by_k, multiplier, by_multiplier;   // channels of y; channels of y for each of x
  long long h, w, p, q;                           // sizes of a plane of x and y
  long long r, by_r, s, stride_h, pad_h, pad_w, dil_h, dil_w, by_dil_w, flipped;
  long long y_off, x_off;                         // first column of y and of x of eight 0 of a row
  long long columns, by_columns, spans, by_spans;             // columns of y of a unit; units of a row: one without LAST
  long long chunks, by_chunks;                    // of 16 channels, with LAST
  long long units, by_units, pitch, plane_pitch;  // eights of a row of x; in shared memory from row to row, from plane to plane
  long long x_rows, by_x_rows;                    // rows of x of a plane of a unit
  long long taps_pitch, by_taps_pitch;            // words of a row of taps
  long long y_at, x_at, x_size;                   // offsets in shared memory in bytes; elements of x
  long long before_w, after_w;                    // with BORDERED: columns outside of x that are read,
  long long side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;  // and what stands there (near_border.cuh)
  long long has_bias, has_scale, has_residual, activation, slope;
};

DEVICE uint32_t load_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

#if LAST
// Stores eight pixels of 16 channels, of which a lane has four channels of pixel lane / 4, as an eight of each channel; `apart`: from channel to channel.
DEVICE void keep_turned(uint4* to, int apart, uint2 v) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  // lanes 0 to 15 address the eights: the first matrix has channels 0, 1, 4, 5, ... of the sixteen, the second 2, 3, 6, 7, ...
  const int channel = lane % 8 / 2 * 4 + lane % 2 + lane / 8 % 2 * 2;
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(to + channel * apart)), "r"(v.x), "r"(v.y) : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) ((data_t*)(to + (lane % 4 * 4 + i) * apart))[lane / 4].bits = (uint16_t)((i < 2 ? v.x : v.y) >> i % 2 * 16);
#endif
}
#endif

#if !LAST
// Eight elements of x from element `from` on, of which `count` are real; the others are zeros. `words`: five words from that of `from` on, or the last ones.
DEVICE uint4 eight_of(const uint32_t (&words)[5], int from, int count, const data_t* x, int x_size) {
  uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = from % 2 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
  if (x_size % 2 && from + count == x_size && count > 0) {  // the last element, which is half a word
    const uint32_t bits = x[x_size - 1].bits;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = 2 * i == count - 1 ? bits : 2 * i + 1 == count - 1 ? (v[i] & 0xffff) | bits << 16 : v[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] &= 2 * i + 1 < count ? ~0u : 2 * i < count ? 0xffff : 0;
  return make_uint4(v[0], v[1], v[2], v[3]);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_toeplitz(const data_t* __restrict__ x, const data_t* __restrict__ w, const data_t* __restrict__ bias, const data_t* __restrict__ scale,
                       const data_t* residual, data_t* __restrict__ y, const __grid_constant__ DepthwiseToeplitzArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) uint4 dynamic[];
  uint32_t* const taps = (uint32_t*)dynamic;
  data_t* const out = (data_t*)((char*)dynamic + arg.y_at);
  uint4* const in = (uint4*)((char*)dynamic + arg.x_at);
  const int lane = threadIdx.x % 32, filter_r = (int)arg.r, filter_s = (int)arg.s, taps_pitch = (int)arg.taps_pitch;

  // the unit: planes of y from `first_plane` on, and of each the rows from `p0` on; its part of x begins with row `h0`
  const Divided of_chunk(blockIdx.x, arg.chunks, arg.by_chunks), of_span(of_chunk.quotient, arg.spans, arg.by_spans);
  const Divided of_band(of_span.quotient, arg.bands, arg.by_bands);
  const int p0 = of_band.rest * (int)arg.band, rows = min((int)arg.band, (int)arg.p - p0);
  const int height = (int)arg.h, width = (int)arg.w, q_end = (int)arg.q, pitch = (int)arg.pitch;
  [[maybe_unused]] const int x_rows = (int)arg.x_rows;
#if GRAD
  const int top = (p0 + (int)arg.pad_h - filter_r + 2) >> 1, below = (p0 + rows + 1 + (int)arg.pad_h) >> 1;
#else
  const int top = p0 * (int)arg.stride_h - (int)arg.pad_h, below = top + (rows - 1) * (int)arg.stride_h + (filter_r - 1) * (int)arg.dil_h + 1;
#endif
  const int y_column = of_span.rest * (int)arg.columns + (int)arg.y_off;
  const int x_column = of_span.rest * (GRAD ? (int)arg.columns / 2 : (int)arg.columns * STRIDE) + (int)arg.x_off;
  const int units = (int)arg.units, q_stop = min(q_end, y_column + (int)arg.columns);
#if LAST
  const int image = of_band.quotient, k_all = (int)arg.k, first_plane = of_chunk.rest * CHANNELS, planes = min(CHANNELS, k_all - first_plane), x_first = first_plane;
  const int h0 = max(top, 0), h_count = max(min(below, height) - h0, 0), none_at = CHANNELS * (int)arg.plane_pitch;

  const data_t* const x_begin = x + ((long long)image * height + h0) * width * k_all + first_plane + lane % 4 * 4;
  for (int begin = threadIdx.x / 32; begin < h_count * units; begin += WARPS * AT_ONCE) {
    uint2 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const Divided of_row(begin + i * WARPS, units, arg.by_units);
      const int column = x_column + of_row.rest * EIGHT + lane / 4;
      v[i] = make_uint2(0, 0);
      if (of_row.quotient < h_count && (unsigned)column < (unsigned)width && lane % 4 * 4 < planes)
        v[i] = *(const uint2*)(x_begin + (of_row.quotient * width + column) * k_all);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const Divided of_row(begin + i * WARPS, units, arg.by_units);
      if (of_row.quotient >= h_count) break;
      keep_turned(in + of_row.quotient * pitch + of_row.rest, (int)arg.plane_pitch, v[i]);
    }
  }
  for (int i = threadIdx.x; i < units; i += THREADS) in[none_at + i] = make_uint4(0, 0, 0, 0);
#else
  const int first_plane = of_band.quotient * (int)arg.planes, planes = min((int)arg.planes, (int)arg.all_planes - first_plane), y_plane = (int)arg.p * q_end;
  const int h0 = arg.bands == 1 ? 0 : max(top, 0), h_count = max((arg.bands == 1 ? height : min(below, height)) - h0, 0);
  const int x_first = divided(first_plane, arg.by_multiplier), x_last = divided(first_plane + planes - 1, arg.by_multiplier);
  const int x_count = h_count > 0 ? (x_last - x_first) * x_rows + h_count : 0, none_at = x_count * pitch;

  const int x_begin = (x_first * height + h0) * width, eights = (x_count + 1) * units;  // with the row of zeros
  // of eight i: where it goes, where it comes from, and how many of its elements are real
  const auto place = [&](int i, int& to, int& from, int& count) {
    const Divided of_row(i, units, arg.by_units);
    const int row = of_row.quotient, plane = divided(row, arg.by_x_rows), column = x_column + of_row.rest * EIGHT;
    const bool there = row < x_count && (unsigned)column < (unsigned)width;
    to = row * pitch + of_row.rest;
    from = there ? x_begin + (plane * height + row - plane * x_rows) * width + column : 0;
    count = there ? min(width - column, EIGHT) : 0;
  };
  if (width % EIGHT == 0) {
#pragma unroll 2
    for (int i = threadIdx.x; i < eights; i += THREADS) {
      int to, from, count;
      place(i, to, from, count);
      copy_or_zero<EIGHT_BYTES>(shared_address(in + to), x + from, count > 0);
    }
  } else {
    const uint32_t* const words = (const uint32_t*)x;
    const int last_word = max((int)arg.x_size / 2 - 1, 0);
#pragma unroll 1
    for (int begin = threadIdx.x; begin < eights; begin += AT_ONCE * THREADS) {
      uint32_t read[AT_ONCE][5];
      int to[AT_ONCE], from[AT_ONCE], count[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        place(begin + i * THREADS, to[i], from[i], count[i]);
#pragma unroll
        for (int j = 0; j < 5; ++j) read[i][j] = arg.x_size > 1 ? words[min(from[i] / 2 + j, last_word)] : 0;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (begin + i * THREADS < eights) in[to[i]] = eight_of(read[i], from[i], count[i], x, (int)arg.x_size);
    }
  }
  copies_commit();
#endif

  // the filters
#pragma unroll 1
  for (int i = threadIdx.x; i < planes * filter_r * taps_pitch; i += THREADS) {
    const Divided of_row(i, taps_pitch, arg.by_taps_pitch), of_plane(of_row.quotient, filter_r, arg.by_r);
    const int k = first_plane + of_plane.quotient - divided(first_plane + of_plane.quotient, arg.by_k) * (int)arg.k;
    uint32_t word = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = of_row.rest - BEFORE + e * NEXT_TAP;
      const Divided tap(max(at, 0), arg.dil_w, arg.by_dil_w);
      if (at < 0 || tap.rest || tap.quotient >= filter_s) continue;
      const int number = of_plane.rest * filter_s + tap.quotient, last = filter_r * filter_s - 1;
      word |= (uint32_t)w[(long long)k * (last + 1) + (arg.flipped ? last - number : number)].bits << 16 * e;
    }
    taps[i] = word;
  }
  copies_wait<0>();
  __syncthreads();
#if BORDERED
  {
    const int before = (int)arg.before_w, beside = before + (int)arg.after_w;
    for (int i = threadIdx.x; i < x_count * beside; i += THREADS) {
      const int row = i / beside, number = i - row * beside, column = number < before ? number - before : width + number - before;
      const int shown = near_pixel(column, width, arg.side_w, arg.last_side_w);
      data_t* const line = (data_t*)(in + row * pitch) - x_column;
      if (shown >= 0) line[column] = line[shown];
    }
    __syncthreads();
  }
  // the row that stands at row `at`, counted from the plane's first one; -1 if it is zero
  const auto shown_row = [&](int at) { return near_pixel(at, height, arg.side_h, arg.last_side_h); };
#else
  const auto shown_row = [](int at) { return at; };
#endif

  // computes one sum again, tap by tap
  const auto again = [&](int plane, int of_x, int row, int q) {
    float sum = 0;
#pragma unroll 1
    for (int r = 0; r < filter_r; ++r) {
      const int met = GRAD ? p0 + row + (int)arg.pad_h - r : (p0 + row) * (int)arg.stride_h - (int)arg.pad_h + r * (int)arg.dil_h;
      if (GRAD && met % 2) continue;
      const int h = BORDERED ? shown_row(met) : (GRAD ? met / 2 : met) - h0;
      const int in_row = (BORDERED || met >= 0) && (unsigned)h < (unsigned)h_count ? of_x * (int)arg.plane_pitch + h * pitch : none_at;
#pragma unroll 1
      for (int s = 0; s < filter_s; ++s) {
        const int at = s * (int)arg.dil_w, column = GRAD ? q + (int)arg.pad_w - s : q * STRIDE - (int)arg.pad_w + at;
        if (GRAD && column % 2) continue;
        data_t tap;
        tap.bits = (uint16_t)taps[(plane * filter_r + r) * taps_pitch + BEFORE + at];
        sum = fmaf(to_float(((const data_t*)(in + in_row))[(GRAD ? column / 2 : column) - x_column]), to_float(tap), sum);
      }
    }
    return sum;
  };

#if LAST
  const long long y_begin = ((long long)image * (int)arg.p + p0) * q_end;  // pixels
#else
  const long long y_begin = (long long)first_plane * y_plane + p0 * q_end;
  const int y_shift = (int)(y_begin & (EIGHT - 1)), y_run = (planes - 1) * y_plane + rows * q_end;
#endif
  const int tasks = ((planes - 1) * (int)arg.sixteens + (rows + 16 * ROWS_APART - 1) / (16 * ROWS_APART) * ROWS_APART) * (int)arg.groups;
#if GRAD
  const int own_tap = BEFORE + lane / 4 - lane % 4 * 4 + (int)arg.y_off + (int)arg.pad_w - 2 * (int)arg.x_off;  // this lane's first factor in a row of taps
#else
  const int own_tap = BEFORE + lane % 4 * 2 - lane / 4 * STRIDE - (STRIDE * (int)arg.y_off - (int)arg.x_off - (int)arg.pad_w);
#endif
  for (int task = threadIdx.x / 32; task < tasks; task += WARPS) {
    const Divided of_group(task, arg.groups, arg.by_groups), of_sixteen(of_group.quotient, arg.sixteens, arg.by_sixteens);
    const int plane = of_sixteen.quotient, number = first_plane + plane;
    const int first_row = GRAD ? of_sixteen.rest / 2 * 32 + of_sixteen.rest % 2 : of_sixteen.rest * 16;
    const int k = number - divided(number, arg.by_k) * (int)arg.k, of_x = divided(number, arg.by_multiplier) - x_first;
#if GRAD
    const int first_r = (p0 + first_row + (int)arg.pad_h) % 2, r_step = 2, h_step = -1;
    int h = (p0 + first_row + (int)arg.pad_h) / 2 + lane % 16 - h0;
#else
    const int first_r = 0, r_step = 1, h_step = (int)arg.dil_h;
    int h = (p0 + first_row + lane % 16) * (int)arg.stride_h - (int)arg.pad_h - h0;
#endif
    const uint32_t none = shared_address(in) + (none_at + lane / 16) * EIGHT_BYTES;
    uint32_t row_at = shared_address(in) + (of_x * (int)arg.plane_pitch + h * pitch + unit_of_task(of_group.rest) + lane / 16) * EIGHT_BYTES;
    uint32_t taps_at = shared_address(taps) + ((plane * filter_r + first_r) * taps_pitch + own_tap) * 4;
    float sum[TILES][4] = {};
#pragma unroll 2
    for (int r = first_r; r < filter_r; r += r_step) {
#if BORDERED
      const int shown = shown_row(h);
      const uint32_t from = shown >= 0 ? row_at + (shown - h) * pitch * EIGHT_BYTES : none;
#else
      const uint32_t from = (unsigned)h < (unsigned)h_count ? row_at : none;
#endif
      uint32_t unit[UNITS][2], factor[FACTORS][2];
#pragma unroll
      for (int i = 0; i < UNITS; i += 2) {
        uint32_t v[4];
        load_matrices(v, from + i * EIGHT_BYTES);
        unit[i][0] = v[0], unit[i][1] = v[1], unit[i + 1][0] = v[2], unit[i + 1][1] = v[3];
      }
#pragma unroll
      for (int i = 0; i < FACTORS; ++i) {
        factor[i][0] = load_word(taps_at + i * (GRAD ? 32 : 64));
        factor[i][1] = load_word(taps_at + (GRAD ? i * 32 - 64 : i * 64 + 32));
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const auto &low = unit[unit_of(tile, step)], &high = unit[unit_of(tile, step) + 1], &b = factor[factor_of(tile, step)];
          const uint32_t a[4] = {low[0], low[1], high[0], high[1]};
          multiply<data_t>(sum[tile], a, b[0], b[1]);
        }
      h += h_step, row_at += h_step * pitch * EIGHT_BYTES, taps_at += r_step * taps_pitch * 4;
    }

    Finish<false> finish;
    finish.of = ScaleAndBias(arg, scale, bias, k);
    // a lane has two rows of each eight, and two neighbours in each
    const int first_q = y_column + of_group.rest * TILES * EIGHT + lane % 4 * 2;
    const auto row_of = [&](int half) { return first_row + (lane / 4 + half * 8) * ROWS_APART; };
    const auto place_of_row = [&](int row) {
#if LAST
      return out + row * ((int)arg.columns * PIXEL + ROW_PAD) + (first_q - y_column) * PIXEL + plane;
#else
      return out + y_shift + plane * y_plane + row * q_end + first_q;
#endif
    };
    data_t *const upper = place_of_row(row_of(0)), *const lower = place_of_row(row_of(1));
    const int upper_stop = row_of(0) < rows ? q_stop : 0, lower_stop = row_of(1) < rows ? q_stop : 0;
    const auto place_of = [&](int i) { return i / 2 % 2 ? lower : upper; };
    const auto is_there = [&](int i) { return (unsigned)(first_q + i / 4 * EIGHT + i % 2) < (unsigned)(i / 2 % 2 ? lower_stop : upper_stop); };
    const auto beside = [&](int i) { return (i / 4 * EIGHT + i % 2) * (LAST ? PIXEL : 1); };
    const auto residual_of = [&](int i) {
#if LAST
      return to_float(residual[(y_begin + row_of(i / 2 % 2) * q_end + first_q + i / 4 * EIGHT + i % 2) * k_all + k]);
#else
      return to_float(residual[y_begin - y_shift + (place_of(i) - out) + beside(i)]);
#endif
    };
    float v[TILES * 4], all = 0;
    uint32_t bad = 0;
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) all += sum[i / 4][i % 4];
    if (all != all)  // seldom
#pragma unroll
      for (int i = 0; i < TILES * 4; ++i)
        if (is_there(i) && sum[i / 4][i % 4] != sum[i / 4][i % 4]) bad |= 1u << i;
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) v[i] = finish.whole(arg, sum[i / 4][i % 4], 1, has_residual(arg) && is_there(i) ? residual_of(i) : -0.f);
    activate(arg, v);
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i)
      if (is_there(i)) place_of(i)[beside(i)] = from_float<data_t>(v[i]);
#pragma unroll 1
    for (; bad; bad &= bad - 1) {
      const int i = __ffs(bad) - 1;
      const float right = again(plane, of_x, row_of(i / 2 % 2), first_q + i / 4 * EIGHT + i % 2);
      float one[1] = {finish.whole(arg, right, 1, has_residual(arg) ? residual_of(i) : -0.f)};
      activate(arg, one);
      place_of(i)[beside(i)] = from_float<data_t>(one[0]);
    }
  }
  __syncthreads();

#if LAST
  for (int i = threadIdx.x; i < rows * (int)arg.columns * 4; i += THREADS) {
    const int pixel = i / 4, row = divided(pixel, arg.by_columns), column = pixel - row * (int)arg.columns, at = i % 4 * 4;
    if (y_column + column < q_stop && at < planes)
      store_word(y + (y_begin + row * q_end + y_column + column) * k_all + first_plane + at, *(const uint2*)(out + pixel * PIXEL + row * ROW_PAD + at));
  }
#else
  data_t* const to = y + (y_begin - y_shift);
  for (int i = threadIdx.x * EIGHT; i < y_shift + y_run; i += THREADS * EIGHT) {
    if (i >= y_shift && i + EIGHT <= y_shift + y_run) store_word(to + i, *(const uint4*)(out + i));
    else  // the rest of the vector belongs to others
      for (int e = max(y_shift - i, 0); e < min(EIGHT, y_shift + y_run - i); ++e) to[i + e] = out[i + e];
  }
#endif
}
