// grouped_nhwc.cu: grouped convolutions of channels-last arrays as they lie, on tensor cores that warps feed themselves, from Ampere on.
//
//   y[n, p, q, k] = sum over r, s, c of w[k, c, r, s] * x[n, p * stride_h + low_h + r * dilation_h, q * stride_w + low_w + s * dilation_w, first(k) + c]
//   and epilogue.cuh; first(k) is the first channel of k's group. dgrad is one such convolution, or one for each stride phase.
//
// Unit     up to 16 neighbouring channels of y, of whole groups or of a part of one, and the channels of x that these groups read, in steps of
//          32 bytes. Its filter is a matrix of 16 channels for each tap and step, with zeros for channels of x of other groups.
// Mapping  block -> `units` units, and every `blocks`-th tile of pixels. Order, fastest first: blocks of units, phases, tiles.
//          A tile is `images` x `rows` x `columns` pixels of y. Its columns, image after image, are taken in groups of 16.
//          warp -> jobs: a unit, a group of columns, ROWS rows of y. A product has 16 pixels of a row x 8 channels x 32 bytes of channels of x.
//          With TAPS_R > 1 a loaded row of x is multiplied with all taps of a column of the filter, for all rows of y that read it.
//          thread -> four neighbouring channels of two pixels of each row: column 2t + e of product j is channel 4t + 2j + e.
// Memory   shared: the units' filter as the products take it, [unit][step][tap][lane][4 words], made once for a block; two tiles of x with what
//          surrounds them, [image][row][column][channels], zeros outside the image. The next tile arrives while one is multiplied. 16 bytes
//          between pixels keep ldmatrix free of bank conflicts if stride_w is odd.
// Sums     float32, in registers: over steps, then columns of the filter, then its rows; with TAPS_R = 1 over its rows first.
// Zeros    Zeros fill up the filter's matrices, and 0 x Inf is NaN, in channels of other groups. So a sum that is NaN is
//          computed again, from the channels of its own group alone.
// Limits   fewer than 2^31 pixels of x and of y.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/mma/grouped_nhwc.cu
#ifndef TYPE
#define TYPE 17         // of all arrays: 32 float, multiplied as TF32, 16 half, 17 bfloat16
#define TAPS_R 3        // taps along r that share a load: all of them; 1: any number, one after the other
#define STRIDE_H 1      // if TAPS_R > 1; else an argument
#define PHASES 1        // phases of a launch: 1 or 4
#endif
#include "core/finish.cuh"
#include "mma/grouped.cuh"
#include "core/truncation.cuh"

typedef element<TYPE> data_t;

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 4;
constexpr int STEP = 32 / sizeof(data_t), PAIR = 4 / sizeof(data_t);  // channels of x in a step, and in a word
constexpr int ROWS_X = (ROWS - 1) * STRIDE_H + TAPS_R;    // rows of x that a job's rows of y read
static_assert(TAPS_R > 1 || STRIDE_H == 1, "TAPS_R = 1 goes from row to row as the arguments say");

// A phase of the launch. by_n is the divisor n, prepared (division.cuh).
struct GroupedPhase {
  long long unit_blocks, by_unit_blocks, blocks;           // blocks of units; blocks that share their units and phase
  long long tiles, tiles_p, by_tiles_p, tiles_q, by_tiles_q;  // all tiles; along rows and columns of y
  long long units, unit_groups;                            // units of a block: 1, 2, 4 or 8; groups of a unit, 1 if a group has several units
  long long units_group, by_units_group;                   // units of a group
  long long groups, read, written, by_written;             // groups; channels of a group of x, and of y
  long long steps, by_steps;                               // steps of a unit
  long long chunks, by_chunks, pitch;                      // 16-byte chunks of x for the units; bytes from one pixel to the next in shared memory
  long long images, rows, columns, by_columns;             // of a tile of y
  long long tile_h, by_tile_h, tile_w, rows_x;             // of x's tile: rows and columns of an image, rows of all images
  long long jobs_q, by_jobs_q, jobs;                       // jobs of a unit and tile: groups of columns, all
  long long n, c, h, w, pixel;                             // size of x; 16-byte words from one pixel to the next
  long long stride_h, stride_w, low_h, low_w, dilation_h, dilation_w;
  long long taps, tap_r, tap_s;                            // taps of the phase
  long long tap_base, tap_step_r, tap_step_s;              // number in w of the first tap, and steps from one to the next
  long long group_step, row_step, channel_step, tap_step;  // elements of w from one group, channel of y, channel of x, tap to the next
  long long k, p, q;                                       // channels and pixels of y, of the phase
  long long out_size, out_base, out_h, out_w, next_row;    // pixels of an image of y, the first pixel of the phase, and from one to the next; elements of out_h
  long long mixed;                                         // whether a unit's steps have channels of other groups
  long long has_bias, has_scale, has_residual, activation, slope;        // what finishes a sum; slope: a float's bits
};

struct Phases {
  GroupedPhase of[PHASES];
};

// ---- the filter

// Puts the filter of the units from `unit0` on into shared memory: a thread makes the same word of each tap's matrix.
DEVICE void lay_filter(const GroupedPhase& shape, int unit0, const data_t* __restrict__ w, uint32_t* filter) {
  const int taps = (int)shape.taps, tap_s = (int)shape.tap_s, all = (int)(shape.units * shape.steps) * 128;
  for (int i = threadIdx.x; i < all; i += THREADS) {
    const int lane = i / 4 % 32, column = lane / 8 * 4 + i / 2 % 2 * 2 + lane / 4 % 2;
    const Divided of(i / 128, shape.steps, shape.by_steps);
    const ChannelUnit unit(shape, unit0 + of.quotient, STEP / 2);
    const Divided row(min(unit.first + column, (int)shape.k - 1), shape.written, shape.by_written);
    // its first channel, counted in the group, which it may not belong to
    const int c = unit.from + of.rest * STEP + (i % 2 * 4 + lane % 4) * PAIR - row.quotient * (int)shape.read;
    const bool real = unit.first + column < unit.end;
    auto there = [&](int channel) { return real && (unsigned)channel < (unsigned)shape.read; };
    const data_t* from = w + row.quotient * shape.group_step + row.rest * shape.row_step + c * shape.channel_step + shape.tap_base * shape.tap_step;
    uint32_t* to = filter + of.quotient * (int)shape.steps * taps * 128 + of.rest * taps * 128 + i % 128;
    for (int r = 0; r < (int)shape.tap_r; ++r) {
      const data_t* at = from;
#pragma unroll 3
      for (int s = 0; s < tap_s; ++s, at += shape.tap_step_s * shape.tap_step, to += 128) {
#if TYPE == 32
        *to = there(c) ? to_tf32(*at) : 0;
#else
        const data_t zero = from_float<data_t>(0);
        *to = word_of(there(c) ? at[0] : zero, there(c + 1) ? at[shape.channel_step] : zero);
#endif
      }
      from += shape.tap_step_r * shape.tap_step;
    }
  }
}

// ---- tiles

// A tile's first image, row and column of y.
struct Tile {
  int image, p, q;
  DEVICE Tile(const GroupedPhase& shape, int tile) {
    const Divided of_q(tile, shape.tiles_q, shape.by_tiles_q), of_p(of_q.quotient, shape.tiles_p, shape.by_tiles_p);
    image = of_p.quotient * (int)shape.images;
    p = of_p.rest * (int)shape.rows;
    q = of_q.rest * (int)shape.columns;
  }
};

// Loads the tile's part of x, from channel `c0` on, to shared memory at `to`.
DEVICE void load_tile(const GroupedPhase& shape, const Tile& tile, int c0, const data_t* x, uint32_t to) {
  const Window window = {(int)shape.rows_x, (int)shape.tile_h, (int)shape.tile_w, (int)shape.chunks, (int)shape.pitch, shape.by_tile_h, shape.by_chunks,
                         (int)shape.n, (int)shape.h, (int)shape.w, (int)shape.pixel};
  const int h0 = tile.p * (int)shape.stride_h + (int)shape.low_h, w0 = tile.q * (int)shape.stride_w + (int)shape.low_w;
  window.load<WARPS>((const uint4*)x, tile.image, h0, w0, c0 / (STEP / 2), to);
}

// ---- results

// Whether neither is NaN, in one instruction.
DEVICE bool numbers(float a, float b) { return a <= b || a > b; }

// Computes the sum of pixel (p, q) of image n, channel `channel`, from its own group alone.
static __device__ __noinline__ float recompute_fp32(const GroupedPhase& shape, const data_t* x, const data_t* w, int n, int p, int q, int channel) {
  const Divided row(channel, shape.written, shape.by_written);
  const data_t* const of_row = w + row.quotient * shape.group_step + row.rest * shape.row_step;
  float sum = 0;
  for (int r = 0; r < (int)shape.tap_r; ++r)
    for (int s = 0; s < (int)shape.tap_s; ++s) {
      const int h = p * (int)shape.stride_h + (int)shape.low_h + r * (int)shape.dilation_h;
      const int v = q * (int)shape.stride_w + (int)shape.low_w + s * (int)shape.dilation_w;
      const bool there = (unsigned)h < (unsigned)shape.h && (unsigned)v < (unsigned)shape.w;
      const data_t* const from = x + (long long)((n * (int)shape.h + h) * (int)shape.w + v) * (int)shape.c + row.quotient * (int)shape.read;
      const data_t* const taps = of_row + (shape.tap_base + r * shape.tap_step_r + s * shape.tap_step_s) * shape.tap_step;
      for (int c = 0; c < (int)shape.read; ++c) sum = fmaf(there ? to_float(from[c]) : 0, to_float(taps[c * shape.channel_step]), sum);
    }
  return sum;
}

// ---- the multiplication

// A warp's work: a unit, and some rows and columns of it in each tile.
struct Worker {
  ChannelUnit unit;
  int channel;      // this thread's first channel of y
  uint32_t filter;  // the first matrix in shared memory, this lane's part
  int offset;       // bytes from a pixel of a tile to what this lane addresses of it
  Finish<false> finish[4];

  DEVICE Worker(const GroupedPhase& shape, int unit0, int number, uint32_t filters, const data_t* scales, const data_t* biases)
      : unit(shape, unit0 + number, STEP / 2) {
    const int lane = threadIdx.x % 32;
    channel = unit.first + lane % 4 * 4;
    filter = filters + (number * (int)(shape.steps * shape.taps) * 32 + lane) * 16;
    offset = (unit.from - ChannelUnit(shape, unit0, STEP / 2).from) * (int)sizeof(data_t) + lane / 16 * 16;
#pragma unroll
    for (int e = 0; e < 4; ++e) finish[e].of = ScaleAndBias(shape, scales, biases, min(channel + e, (int)shape.k - 1));
  }

  // Computes the sums of ROWS rows of 16 columns; `from` is this lane's pixel of the first row, in shared memory.
  DEVICE void multiply_rows(const GroupedPhase& shape, uint32_t from, float (&sums)[ROWS][2][4]) const {
    const int pitch = (int)shape.pitch, row_bytes = (int)shape.tile_w * pitch, tap_bytes = (int)shape.dilation_w * pitch;
    const int next_row = TAPS_R > 1 ? row_bytes : row_bytes * (int)shape.stride_h, tap_s = (int)shape.tap_s;
    uint32_t taps_at = filter;
    from += offset;
    for (int step = 0; step < (int)shape.steps; ++step, from += 32, taps_at += (TAPS_R - 1) * tap_s * 512) {
      for (int r0 = 0; r0 < (TAPS_R > 1 ? 1 : (int)shape.tap_r); ++r0) {
        uint32_t at = from + r0 * (int)shape.dilation_h * row_bytes;
        for (int s = 0; s < tap_s; ++s, at += tap_bytes, taps_at += 512) {
          uint4 b[TAPS_R];
#pragma unroll
          for (int r = 0; r < TAPS_R; ++r) b[r] = load_vector(taps_at + r * tap_s * 512);
#pragma unroll
          for (int i = 0; i < ROWS_X; ++i) {
            uint32_t a[4];
            load_matrices(a, at + i * next_row);
            if (TYPE == 32) {
#pragma unroll
              for (int e = 0; e < 4; ++e) a[e] = to_tf32(__uint_as_float(a[e]));
            }
#pragma unroll
            for (int r = 0; r < TAPS_R; ++r) {
              const int down = i - r;
              if (down < 0 || down % STRIDE_H || down / STRIDE_H >= ROWS) continue;
              multiply<data_t>(sums[down / STRIDE_H][0], a, b[r].x, b[r].y);
              multiply<data_t>(sums[down / STRIDE_H][1], a, b[r].z, b[r].w);
            }
          }
        }
      }
    }
  }

  // Finishes and stores the sums of ROWS pixels, one below the other; `rows` of them are real, the first one at element `at` of y.
  DEVICE void store(const GroupedPhase& shape, const float (&sums)[4 * ROWS], int rows, long long at, const data_t* residual, data_t* y) const {
    struct alignas(4 * sizeof(data_t)) Vector {
      data_t v[4];
    };
    Vector added[ROWS] = {};
    float v[4 * ROWS];
    const data_t* from = residual + at;
    data_t* to = y + at;
#pragma unroll
    for (int i = 0; i < ROWS; ++i, from += shape.next_row)
      if (has_residual(shape) && i < rows) added[i] = *(const Vector*)from;
#pragma unroll
    for (int i = 0; i < 4 * ROWS; ++i) v[i] = finish[i % 4].whole(shape, sums[i], 1, has_residual(shape) ? to_float(added[i / 4].v[i % 4]) : -0.f);
    if (activation(shape)) activate(shape, v);
#pragma unroll
    for (int i = 0; i < ROWS; ++i, to += shape.next_row) {
      Vector out;
#pragma unroll
      for (int e = 0; e < 4; ++e) out.v[e] = from_float<data_t>(v[4 * i + e]);
      if (i < rows) store_word(to, *(const word<Vector>*)&out);
    }
  }

  // Computes its part of a tile, which lies at `tile_x` in shared memory.
  DEVICE void compute(const GroupedPhase& shape, const Tile& tile, int job, uint32_t tile_x, const data_t* x, const data_t* w, const data_t* residual,
                      data_t* y) const {
    const int lane = threadIdx.x % 32, columns = (int)(shape.images * shape.columns);
    const Divided of_q(job, shape.jobs_q, shape.by_jobs_q);
    const int column0 = of_q.rest * 16, p0 = of_q.quotient * ROWS, rows = (int)shape.p - tile.p - p0;
    if (rows <= 0) return;
    const int named = column0 + lane % 16;
    const Divided from(named < columns ? named : 0, shape.columns, shape.by_columns);
    const int pixel = (from.quotient * (int)shape.tile_h + p0 * (int)shape.stride_h) * (int)shape.tile_w + from.rest * (int)shape.stride_w;
    float sums[ROWS][2][4] = {};
    multiply_rows(shape, tile_x + pixel * (int)shape.pitch, sums);

    if (channel >= unit.end) return;
    [[maybe_unused]] const float lost = lost_in((__CUDA_ARCH__ < 900 ? 2 : 1) * (int)(shape.steps * shape.taps));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = column0 + lane / 4 + 8 * half;
      const Divided at(column, shape.columns, shape.by_columns);
      const int n = tile.image + at.quotient, p = tile.p + p0, q = tile.q + at.rest;
      if (column >= columns || n >= (int)shape.n || q >= (int)shape.q) continue;
      float of_half[4 * ROWS];
      bool good = true;
#pragma unroll
      for (int i = 0; i < 4 * ROWS; ++i) {
        const float sum = sums[i / 4][i % 4 / 2][i % 2 + 2 * half];
        if (i % 2 == 0) good = good && numbers(sum, sums[i / 4][i % 4 / 2][i % 2 + 2 * half + 1]);
        of_half[i] = TYPE == 32 ? with_lost(sum, lost) : sum;  // the rounding to 16 bits hides it
      }
      if (shape.mixed && !good) {
        float some[4 * ROWS];
#pragma unroll
        for (int i = 0; i < 4 * ROWS; ++i) some[i] = of_half[i];
#pragma unroll 1
        for (int i = 0; i < 4 * min(rows, ROWS); ++i)
          if (some[i] != some[i]) some[i] = recompute_fp32(shape, x, w, n, p + i / 4, q, channel + i % 4);
#pragma unroll
        for (int i = 0; i < 4 * ROWS; ++i) of_half[i] = some[i];
      }
      const int place = n * (int)shape.out_size + (int)shape.out_base + p * (int)shape.out_h + q * (int)shape.out_w;
      store(shape, of_half, rows, (long long)place * (int)shape.k + channel, residual, y);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_nhwc(const data_t* __restrict__ x, const data_t* __restrict__ w, const data_t* __restrict__ bias, const data_t* __restrict__ scale,
                 const data_t* residual, data_t* __restrict__ y, const __grid_constant__ Phases phases) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(128) uint4 dynamic[];
  const Divided of_unit_block(blockIdx.x, phases.of[0].unit_blocks, phases.of[0].by_unit_blocks);
  const GroupedPhase& shape = phases.of[of_unit_block.quotient % PHASES];
  const int unit0 = of_unit_block.rest * (int)shape.units, first = of_unit_block.quotient / PHASES, next = (int)shape.blocks,
      c0 = ChannelUnit(shape, unit0, STEP / 2).from;
  const int filter_size = (int)(shape.units * shape.steps * shape.taps * 32), tile_size = (int)(shape.rows_x * shape.tile_w * shape.pitch);
  const uint32_t filter = shared_address(dynamic), tiles = filter + filter_size * 16;

  auto load = [&](int number, int slot) {
    if (number < (int)shape.tiles) load_tile(shape, Tile(shape, number), c0, x, tiles + slot * tile_size);
    copies_commit();
  };
  load(first, 0);
  lay_filter(shape, unit0, w, (uint32_t*)dynamic);
  const int warp = threadIdx.x / 32, units = (int)shape.units, beside = WARPS / units;  // warps of a unit
  const Worker worker(shape, unit0, warp % units, filter, scale, bias);
  int slot = 0;
  for (int number = first; number < (int)shape.tiles; number += next, slot ^= 1) {
    load(number + next, slot ^ 1);
    copies_wait<1>();
    __syncthreads();  // this tile has arrived for all, and the filter
    const Tile tile(shape, number);
    if (worker.unit.first < (int)shape.k)
      for (int job = warp / units; job < (int)shape.jobs; job += beside) worker.compute(shape, tile, job, tiles + slot * tile_size, x, w, residual, y);
    __syncthreads();  // all have read it: its place is filled next
  }
  copies_wait<0>();
}
