// grouped_nhwc_wgrad.cu: grouped wgrad from 16-bit channels-last arrays as they lie, on tensor cores.
//
//   dw[k, c, r, s] = sum over n, p, q of dy[n, p, q, k] * x[n, p * stride_h - pad_h + r * dilation_h, q * stride_w - pad_w + s * dilation_w, first(k) + c]
//   first(k) is the first channel of k's group
//
// Unit     16 neighbouring channels of dy, of whole groups or of a part of one, and the channels of x that these groups read, in steps of 16. A
//          product has 16 channels of dy x 8 of x; products of channels of different groups are not stored.
// Mapping  block -> `units` units, TAPS taps, and every `parts`-th tile of pixels. Order, fastest first: blocks of units, taps, parts.
//          A tile is `images` x `rows` x `columns` pixels of dy. Its columns, image after image, are taken in groups of 16.
//          warp -> a step of a unit, and some of the rows: a product sums 16 pixels of a row. In the end one warp of each step adds the others' sums.
// Memory   shared: 32 bytes of zeros for missing pixels; two tiles of x, with what surrounds them, and of dy, [image][row][column][channels],
//          zeros outside the images. The next tile arrives while one is multiplied. An odd number of 16 bytes between pixels keeps ldmatrix free of bank
//          conflicts. In the end the warps' sums take the tiles' place.
// Sums     float32, in registers. Each part is stored like dw, and direct/reduce.cu adds them in order; a single one is dw.
// Limits   fewer than 2^31 pixels of x and of dy, and elements of dw.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/mma/grouped_nhwc_wgrad.cu
#ifndef TYPE
#define TYPE 17  // of x, dy and dw: 16 half, 17 bfloat16
#define TAPS 9   // of a block
#define WHOLE 0  // whether the sums are dw, or else a part of it
#endif
#include "mma/grouped.cuh"

typedef element<TYPE> data_t;
typedef element<WHOLE ? TYPE : 32> out_t;

constexpr int THREADS = 256, WARPS = THREADS / 32, ALIGNED = 8;

// by_n is the divisor n, prepared (division.cuh).
struct GroupedWgradArguments {
  long long unit_blocks, by_unit_blocks, tap_blocks, by_tap_blocks, parts;  // blocks of units; blocks of TAPS taps; parts of the sum
  long long tiles, tiles_p, by_tiles_p, tiles_q, by_tiles_q;      // all tiles; along rows and columns of dy
  long long units, unit_groups, units_group, by_units_group;      // units of a block, groups of a unit, units of a group
  long long groups, read, written, by_written;                    // groups; channels of a group of x, and of dy
  long long units_all, steps, by_steps, jobs, by_jobs, beside;     // all units; steps of a unit, of a block; warps of a step
  long long images, rows, by_rows, columns, by_columns, columns_all;  // images, rows and columns of a tile of dy; columns of all images
  long long chunks_y, by_chunks_y, pitch_y, rows_y;               // of dy: 16-byte chunks for the units, bytes from pixel to pixel, rows of a tile
  long long chunks_x, by_chunks_x, pitch_x, rows_x;               // the same of x
  long long tile_h, by_tile_h, tile_w;                            // rows and columns of x that an image's part of a tile reads
  long long n, h, w, pixel_x, p, q, pixel_y;                      // sizes of x and dy; 16-byte words of a pixel
  long long stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  long long taps, tap_s, by_tap_s, size;                          // taps of the filter; elements of dw
};

// four matrices of 8 pixels x 8 channels, transposed: lane l addresses pixel l % 8 of matrix l / 8 and gets two pixels of channel l / 4 of each
DEVICE void load_turned(uint32_t (&v)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from) : "memory");
}

// A tile's first image, row and column of dy.
struct Tile {
  int image, p, q;
  DEVICE Tile(const GroupedWgradArguments& arg, int tile) {
    const Divided of_q(tile, arg.tiles_q, arg.by_tiles_q), of_p(of_q.quotient, arg.tiles_p, arg.by_tiles_p);
    image = of_p.quotient * (int)arg.images;
    p = of_p.rest * (int)arg.rows;
    q = of_q.rest * (int)arg.columns;
  }
};

// Loads a tile of both arrays, from channel `x0` of x and `y0` of dy on.
DEVICE void load_tile(const GroupedWgradArguments& arg, const Tile& tile, int x0, int y0, const uint4* x, const uint4* dy, uint32_t to_x, uint32_t to_y) {
  const Window of_x = {(int)arg.rows_x, (int)arg.tile_h, (int)arg.tile_w, (int)arg.chunks_x, (int)arg.pitch_x, arg.by_tile_h, arg.by_chunks_x,
                       (int)arg.n, (int)arg.h, (int)arg.w, (int)arg.pixel_x};
  const Window of_y = {(int)arg.rows_y, (int)arg.rows, (int)arg.columns, (int)arg.chunks_y, (int)arg.pitch_y, arg.by_rows, arg.by_chunks_y,
                       (int)arg.n, (int)arg.p, (int)arg.q, (int)arg.pixel_y};
  const int h0 = tile.p * (int)arg.stride_h - (int)arg.pad_h, w0 = tile.q * (int)arg.stride_w - (int)arg.pad_w;
  of_x.load<WARPS>(x, tile.image, h0, w0, x0 / ALIGNED, to_x);
  of_y.load<WARPS>(dy, tile.image, tile.p, tile.q, y0 / ALIGNED, to_y);
}

// A warp's sums: for each tap, two products of 8 channels of x.
typedef float Sums[TAPS][2][4];

// Adds a tile to them. `tile_x` and `tile_y` are the unit's first channels in shared memory, `offsets` the bytes from a pixel of x to the taps.
DEVICE void multiply_tile(const GroupedWgradArguments& arg, const Tile& tile, int first_row, uint32_t zeros, uint32_t tile_x, uint32_t tile_y,
                          const int (&offsets)[TAPS], Sums& sums) {
  const int lane = threadIdx.x % 32, half = lane / 8 % 2 * 16, rows = min((int)arg.rows, (int)arg.p - tile.p);
  const int row_x = (int)(arg.stride_h * arg.tile_w * arg.pitch_x), row_y = (int)(arg.columns * arg.pitch_y);
  for (int column0 = 0; column0 < (int)arg.columns_all; column0 += 16) {
    const int column = column0 + lane % 8 + lane / 16 * 8;  // the pixel that this lane addresses
    const Divided at(column, arg.columns, arg.by_columns);
    const bool there = column < (int)arg.columns_all && tile.image + at.quotient < (int)arg.n && tile.q + at.rest < (int)arg.q;
    const int pixel_x = (at.quotient * (int)arg.tile_h + first_row * (int)arg.stride_h) * (int)arg.tile_w + at.rest * (int)arg.stride_w;
    const int pixel_y = (at.quotient * (int)arg.rows + first_row) * (int)arg.columns + at.rest;
    uint32_t from_x = tile_x + pixel_x * (int)arg.pitch_x + half, from_y = tile_y + pixel_y * (int)arg.pitch_y + half;
    for (int row = first_row; row < rows; row += (int)arg.beside, from_x += (int)arg.beside * row_x, from_y += (int)arg.beside * row_y) {
      uint32_t a[4];
      load_turned(a, there ? from_y : zeros);
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        uint32_t b[4];
        load_turned(b, there ? from_x + offsets[tap] : zeros);
        multiply<data_t>(sums[tap][0], a, b[0], b[2]);
        multiply<data_t>(sums[tap][1], a, b[1], b[3]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_nhwc_wgrad(const uint4* __restrict__ x, const uint4* __restrict__ dy, out_t* __restrict__ dw,
                       const __grid_constant__ GroupedWgradArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(128) uint4 dynamic[];
  const Divided of_unit_block(blockIdx.x, arg.unit_blocks, arg.by_unit_blocks), of_taps(of_unit_block.quotient, arg.tap_blocks, arg.by_tap_blocks);
  const int unit0 = of_unit_block.rest * (int)arg.units, tap0 = of_taps.rest * TAPS, part = of_taps.quotient, count = min(TAPS, (int)arg.taps - tap0);
  const ChannelUnit first(arg, unit0, ALIGNED);
  const int size_x = (int)(arg.rows_x * arg.tile_w * arg.pitch_x), size_y = (int)(arg.rows_y * arg.columns * arg.pitch_y);
  const uint32_t zeros = shared_address(dynamic), tiles = zeros + 32;
  if (threadIdx.x < 2) dynamic[threadIdx.x] = make_uint4(0, 0, 0, 0);

  // this warp's step, and which of its warps it is
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Divided of_job(warp, arg.jobs, arg.by_jobs), of_unit(of_job.rest, arg.steps, arg.by_steps);
  const ChannelUnit unit(arg, unit0 + of_unit.quotient, ALIGNED);
  const bool works = of_job.quotient < (int)arg.beside && unit0 + of_unit.quotient < (int)arg.units_all;
  const int channel_x = unit.from + of_unit.rest * 16;
  int offsets[TAPS];
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) {
    const Divided row(min(tap0 + tap, (int)arg.taps - 1), arg.tap_s, arg.by_tap_s);  // a missing tap repeats the last one, and is not stored
    offsets[tap] = (row.quotient * (int)(arg.dilation_h * arg.tile_w) + row.rest * (int)arg.dilation_w) * (int)arg.pitch_x;
  }

  auto load = [&](int number, int slot) {
    const uint32_t to = tiles + slot * (size_x + size_y);
    if (number < (int)arg.tiles) load_tile(arg, Tile(arg, number), first.from, first.first, x, dy, to, to + size_x);
    copies_commit();
  };
  Sums sums = {};
  load(part, 0);
  int slot = 0;
  for (int number = part; number < (int)arg.tiles; number += (int)arg.parts, slot ^= 1) {
    load(number + (int)arg.parts, slot ^ 1);
    copies_wait<1>();
    __syncthreads();  // this tile has arrived for all
    const uint32_t tile_x = tiles + slot * (size_x + size_y), tile_y = tile_x + size_x;
    if (works)
      multiply_tile(arg, Tile(arg, number), of_job.quotient, zeros, tile_x + (channel_x - first.from) * 2, tile_y + (unit.first - first.first) * 2,
                    offsets, sums);
    __syncthreads();  // all have read it: its place is filled next
  }
  copies_wait<0>();

  // the first warp of each step adds the others' sums, one after the other
  float* const left = (float*)dynamic + of_job.rest * (TAPS * 8 * 32) + lane;
  for (int other = 1; other < (int)arg.beside; ++other) {
    __syncthreads();
    if (works && of_job.quotient == other) {
#pragma unroll
      for (int i = 0; i < TAPS * 8; ++i) left[32 * i] = sums[i / 8][i / 4 % 2][i % 4];
    }
    __syncthreads();
    if (works && of_job.quotient == 0) {
#pragma unroll
      for (int i = 0; i < TAPS * 8; ++i) sums[i / 8][i / 4 % 2][i % 4] += left[32 * i];
    }
  }
  if (!works || of_job.quotient > 0) return;
  dw += part * arg.size;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int k = unit.first + lane / 4 + 8 * (e / 2);
    if (k >= unit.end) continue;
    const int group_from = divided(k, arg.by_written) * (int)arg.read;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = channel_x + 8 * j + lane % 4 * 2 + e % 2 - group_from;
      if ((unsigned)c >= (unsigned)arg.read) continue;
      out_t* const to = dw + ((long long)k * (int)arg.read + c) * (int)arg.taps + tap0;
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap)
        if (tap < count) to[tap] = from_float<out_t>(sums[tap][j][e]);
    }
  }
}
