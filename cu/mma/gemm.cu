// gemm.cu: convolution as a matrix product on tensor cores that warps feed themselves, from Ampere on.
//
//   y[n, k, pixel] = scale_n[n] * scale_k[k] * sum over taps and c of w[k, tap, c] * x[n, pixel + tap, c], and epilogue.cuh
//   gemm m: output channel | gemm n: pixel (n,o,p,q) of the batch | gemm k: (tap, c), c fastest, in chunks of 8 channels
//
// pack.cu packed both operands: channels last, 16 bits, in LIMBS. PRODUCTS = 3 multiplies hi.hi, hi.lo and lo.hi for fp32 accuracy: the
// tensor core's own sum truncates, so the kernel adds it to fp32 registers every 32 of k (promotion);
// the two cross products are 2^-11 of the result and stay in the tensor core. PRODUCTS = 1 multiplies the first limb alone, or
// arrays that have 16 bits to begin with. hopper/gemm.cu is the same for GPUs whose tensor cores read shared memory.
//
// Mapping  block -> a tile of BLOCK_M channels x BLOCK_N pixels. Order, fastest first: channels, split, pixels, group.
//          Eight warps, WARPS_M x WARPS_N, of WARP_M channels x WARP_N pixels each: m16n8k16 products, [MT][NT] of them.
//          Loads: thread -> chunk % 4 of every step, of the rows thread / 4 + 64 * i of the w tile and of the x tile.
//          A pixel's offset in x is found once; each step adds its tap and checks whether that lies in the image.
// Memory   shared: STAGES stages of 32 of k; a stage holds, for each limb, BLOCK_M rows of w, then BLOCK_N rows of x, of 4 chunks
//          (64 bytes) each. Chunk c of row r lies at c ^ (r / 2 % 4): 8 rows of one chunk, which ldmatrix reads at once, use
//          every bank once. cp.async fills stages ahead of their use, with zeros for padding and past the end.
//          In the end the stages' bytes transpose sums into rows of y: for each warp 16 rows of channels of a pixel, or the reverse.
// Split    splits > 1 cuts gemm k for problems of few tiles: each part goes to a workspace [splits][size of y] in fp32 and
//          direct/reduce.cu adds them in order.
// Phases   dgrad is one launch for each stride phase, a stride-1 convolution with some of the taps
//          (tap_base, tap_*) that writes every out_h-th row and out_w-th column.
// Limits   fewer than 2^31 pixels of y and blocks, fewer than 2^32 chunks in w and in a limb of x.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/mma/gemm.cu
#ifndef BLOCK_M
#define BLOCK_M 128  // 64 or 128
#define BLOCK_N 128  // 64 or 128; 256 with 128 rows and one product
#define STAGES 3     // 2 or more
#define PRODUCTS 3   // 3 or 1
#define BF16 0       // the operands' type
#define OUT 32       // y: 32 float, 16 half, 17 bfloat16
#define NHWC 0       // layout of y
#define VEC 1        // elements of y that a thread writes at once: 1 or 4; they must be neighbours at a multiple of VEC
#define DENSE 1      // pixel i of the launch is pixel i of y's plane
#endif
#include "mma/async_copy.cuh"
#include "core/finish.cuh"
#include "mma/fragments.cuh"
#include "core/truncation.cuh"

constexpr bool SCALED = OUT == 32 && !BF16;  // operands may have scales: limbs have them; sums of 16-bit operands in parts do not
constexpr int LIMBS = PRODUCTS == 3 ? 2 : 1, THREADS = 256;
constexpr int WARPS_M = BLOCK_M == 128 && BLOCK_N == 64 ? 4 : 2, WARPS_N = 8 / WARPS_M;
constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N, MT = WARP_M / 16, NT = WARP_N / 8;
constexpr int A_BYTES = BLOCK_M * 64, B_BYTES = BLOCK_N * 64, LIMB_BYTES = A_BYTES + B_BYTES, STAGE_BYTES = LIMBS * LIMB_BYTES;
constexpr int BLOCKS = MT * NT <= (PRODUCTS == 3 ? 4 : 16) ? 2 : 1;  // blocks for which a multiprocessor has registers
static_assert(BLOCK_M % 64 == 0 && BLOCK_N % 64 == 0, "a thread loads whole rows, 64 apart");
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "a product has 16 channels, a piece of the result 16 pixels");

// a warp's tile goes to y in pieces of 16 rows: of pixels if channels are last, else of channels
constexpr int ACROSS = NHWC ? WARP_M : WARP_N, PIECES = (NHWC ? WARP_N : WARP_M) / 16;
constexpr int PITCH = ACROSS + (NHWC ? 4 : 8);  // floats; no bank conflicts when sums are stored there
static_assert(8 * 16 * PITCH * 4 <= STAGES * STAGE_BYTES, "the stages' bytes hold a piece for each warp");

typedef element<OUT> out_t;
typedef element<BF16 ? 17 : 16> limb_t;  // of w and x

// A phase of the problem. by_n is the divisor n, prepared (division.cuh).
struct GemmPhase {
  long long tiles_m, by_tiles_m;                           // tiles along the channels of a group
  long long splits, by_splits, split_stages;               // splits of gemm k; steps of 32 of gemm k in one
  long long tiles_pixels, by_tiles_pixels;                 // tiles along the pixels
  long long chunks, chunks_group, by_chunks_group;         // chunks of gemm k, and of a group's channels,
  long long chunks_pixel;                                  // of a pixel of x
  long long rows_group, rows;                              // output channels of a group, and of all groups
  long long blocks_group, channel_blocks, w_block;         // of w: blocks of 64 rows of a group, of channels of a tap; chunks of 64 rows
  long long piece_bits;                                    // log2 of the chunks of a row of such a block: 8, 4 or 2 chunks
  long long x_limb;                                        // chunks from one limb of x to the other
  long long tap_r, by_tap_r, tap_s, by_tap_s;              // taps along r and s
  long long tap_base, tap_step_t, tap_step_r, tap_step_s;  // number in w of the first tap, and steps from one to the next
  long long size_d, size_h, size_w;                        // size of x
  long long stride_d, stride_h, stride_w;                  // x of pixel (o, p, q), tap 0: o * stride_d + low_d and so on
  long long low_d, low_h, low_w;
  long long dilation_d, dilation_h, dilation_w;            // offset in x from one tap to the next
  long long pixels, plane, by_plane;                       // pixels of the launch, an image,
  long long pq, by_pq, q, by_q;                            // a slice and a row, as y is written
  long long out_size, out_base, out_d, out_h, out_w;       // elements of a plane of y, of the first pixel, and from one to the next
  long long out_image, out_row;                            // elements of y from one image, and from one channel, to the next; NCHW
  long long out_part;                                      // and from one part of a split sum to the next
  long long scaled;                                        // whether there are scales: SCALED
  long long x_tiles;                                       // tiles of x to clear, and 2^32 times those of w, which was packed as images are
  long long has_bias, has_scale, has_residual, activation, slope;        // what finishes a sum; slope: a float's bits
};

// ---- loads

// The place of this thread's next loads in gemm k.
struct Cursor {
  int chunk, c, s, r, t;  // chunk of gemm k; chunk of the tap's channels; the tap
  DEVICE Cursor(const GemmPhase& shape, int step) {
    chunk = 4 * step + threadIdx.x % 4;
    const Divided tap(chunk, shape.chunks_group, shape.by_chunks_group), row(tap.quotient, shape.tap_s, shape.by_tap_s);
    const Divided slice(row.quotient, shape.tap_r, shape.by_tap_r);
    c = tap.rest;
    s = row.rest;
    r = slice.rest;
    t = slice.quotient;
  }
  DEVICE void next(const GemmPhase& shape) {
    chunk += 4;
    c += 4;
    while (c >= (int)shape.chunks_group) {  // more than once if a tap has fewer than 4 chunks
      c -= (int)shape.chunks_group;
      next_tap(t, r, s, (int)shape.tap_r, (int)shape.tap_s);
    }
  }
};

// Where the first tap of a pixel lies in x; it may be outside. Unsigned: what lies before the image counts as past its end.
struct alignas(16) Corner {
  unsigned d, h, w, pixel;  // its place in the image; and the pixel in all of x
  DEVICE void find(const GemmPhase& shape, int at) {
    const Divided of_image(at, shape.plane, shape.by_plane), slice(of_image.rest, shape.pq, shape.by_pq), row(slice.rest, shape.q, shape.by_q);
    const unsigned image = of_image.quotient;
    d = slice.quotient * (unsigned)shape.stride_d + (unsigned)shape.low_d;
    h = row.quotient * (unsigned)shape.stride_h + (unsigned)shape.low_h;
    w = row.rest * (unsigned)shape.stride_w + (unsigned)shape.low_w;
    pixel = ((image * (unsigned)shape.size_d + d) * (unsigned)shape.size_h + h) * (unsigned)shape.size_w + w;
    if (at >= (int)shape.pixels) w = 1u << 31;  // outside for every tap
  }
};

// Loads one stage: this thread's chunk of its rows, zeros from chunk `end` of gemm k on. w0 is the first chunk of the tile's rows of w, and the next
// 64 rows begin w_next further; x0 is the first of the group's channels of a pixel.
DEVICE void load(uint32_t stage, const Cursor& k, int end, const uint4* w, unsigned w0, unsigned w_next, const uint4* x, unsigned x0, const Corner* corners,
                 const GemmPhase& shape) {
  const int row = threadIdx.x / 4;
  const uint32_t to = stage + row * 64 + (threadIdx.x % 4 ^ row / 2 % 4) * 16;
  const int tap = (int)shape.tap_base + k.t * (int)shape.tap_step_t + k.r * (int)shape.tap_step_r + k.s * (int)shape.tap_step_s;
  // w is [64 rows][tap][block of channels][limb][row][pieces], whose rows pack.cu swizzles as hopper/gemm.cu wants them
  const int shift = (int)shape.piece_bits, piece = (k.c ^ row >> (3 - shift)) & ((1 << shift) - 1);
  const unsigned w_chunk = w0 + ((tap * (int)shape.channel_blocks + (k.c >> shift)) * (LIMBS * 64) << shift) + (row << shift) + piece;
  const bool real = k.chunk < end;
#pragma unroll
  for (int i = 0; i < BLOCK_M / 64; ++i) {
    const unsigned from = real ? w_chunk + i * w_next : 0;
#pragma unroll
    for (int limb = 0; limb < LIMBS; ++limb) copy_or_zero_by_lines(to + limb * LIMB_BYTES + i * 64 * 64, w + from + (limb * 64 << shift), real);
  }
  const unsigned d = k.t * (unsigned)shape.dilation_d, h = k.r * (unsigned)shape.dilation_h, v = k.s * (unsigned)shape.dilation_w;
  const unsigned step = (d * (unsigned)shape.size_h + h) * (unsigned)shape.size_w + v;
#pragma unroll
  for (int i = 0; i < BLOCK_N / 64; ++i) {
    const Corner at = corners[row + 64 * i];
    const bool ok = real && at.d + d < (unsigned)shape.size_d && at.h + h < (unsigned)shape.size_h && at.w + v < (unsigned)shape.size_w;
    const unsigned from = ok ? (at.pixel + step) * (unsigned)shape.chunks_pixel + x0 + k.c : 0;
#pragma unroll
    for (int limb = 0; limb < LIMBS; ++limb) copy_or_zero_by_lines(to + limb * LIMB_BYTES + A_BYTES + i * 64 * 64, x + limb * shape.x_limb + from, ok);
  }
}

// ---- the multiplication

struct Sums {
  float total[MT][NT][4];
#if PRODUCTS == 3
  float cross[MT][NT][4];
#endif
};

// Multiplies one stage. `a` and `b`: the offsets from the stage's start of this lane's first m16k16 of w and first n8k32 of x.
DEVICE void multiply_stage(Sums& sums, uint32_t a, uint32_t b) {
  uint32_t x[LIMBS][NT][4];
#pragma unroll
  for (int limb = 0; limb < LIMBS; ++limb)
#pragma unroll
    for (int j = 0; j < NT; ++j) load_matrices(x[limb][j], b + limb * LIMB_BYTES + j * 8 * 64);
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    uint32_t w[LIMBS][2][4];
#pragma unroll
    for (int limb = 0; limb < LIMBS; ++limb)
#pragma unroll
      for (int half = 0; half < 2; ++half) load_matrices(w[limb][half], (a ^ half * 32) + limb * LIMB_BYTES + i * 16 * 64);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#if PRODUCTS == 3
      float main[4] = {};  // hi.hi of this stage
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply<limb_t>(main, w[0][half], x[0][j][2 * half], x[0][j][2 * half + 1]);
        multiply<limb_t>(sums.cross[i][j], w[0][half], x[1][j][2 * half], x[1][j][2 * half + 1]);
        multiply<limb_t>(sums.cross[i][j], w[1][half], x[0][j][2 * half], x[0][j][2 * half + 1]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.total[i][j][e] += main[e];
#else
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply<limb_t>(sums.total[i][j], w[0][half], x[0][j][2 * half], x[0][j][2 * half + 1]);
#endif
    }
  }
}

// ---- a warp's sums, scaled and finished, to y; through shared memory, so that it writes neighbours together

// `m0` and `pixel0` are the warp's first channel in the group and first pixel, `k0` is the group's first channel
DEVICE void store(const float (&sums)[MT][NT][4], const GemmPhase& shape, int m0, int k0, int pixel0, float* staging, const float* scale_n,
                  const float* scale_k, const out_t* bias, const out_t* scale, const out_t* residual, out_t* y) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
    __syncwarp();  // the last piece has been read
#pragma unroll
    for (int i = 0; i < (NHWC ? MT : 1); ++i)
#pragma unroll
      for (int j = 0; j < (NHWC ? 2 : NT); ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * i + lane / 4 + 8 * half, column = 8 * j + 2 * (lane % 4);
          const float* const sum = sums[NHWC ? i : piece][NHWC ? 2 * piece + j : j] + 2 * half;
          if (NHWC) {
            staging[column * PITCH + row] = sum[0];
            staging[(column + 1) * PITCH + row] = sum[1];
          } else {
            *(float2*)(staging + row * PITCH + column) = make_float2(sum[0], sum[1]);
          }
        }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * ACROSS / VEC; i += 32) {
      const int across = i % (ACROSS / VEC) * VEC, down = i / (ACROSS / VEC);
      const int pixel = pixel0 + (NHWC ? 16 * piece + down : across), m = m0 + (NHWC ? across : 16 * piece + down);
      if (pixel < (int)shape.pixels && m < (int)shape.rows_group) {
        const Divided of_image(pixel, shape.plane, shape.by_plane);
        const int image = of_image.quotient, offset = plane_offset<DENSE>(shape, of_image.rest), k = k0 + m;
        const long long at = NHWC ? (image * shape.out_size + offset) * shape.rows + k : image * shape.out_image + k * shape.out_row + offset;
        struct alignas(VEC * sizeof(out_t)) Vector { out_t v[VEC]; } vector, added;
        if (has_residual(shape)) added = *(const Vector*)(residual + at);
        float v[VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
          const int channel = NHWC ? k + e : k;
          const Finish<SCALED> finish{ScaleAndBias(shape, scale, bias, channel)};
          const float factor = SCALED && shape.scaled ? scale_n[image] * scale_k[channel] : 1;
          v[e] = finish.whole(shape, staging[down * PITCH + across + e], factor, has_residual(shape) ? to_float(added.v[e]) : -0.f);
        }
        activate(shape, v);
#pragma unroll
        for (int e = 0; e < VEC; ++e) vector.v[e] = from_float<out_t>(v[e]);
        *(Vector*)(y + at) = vector;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    mma_gemm(const uint4* __restrict__ w, const uint4* __restrict__ x, const float* __restrict__ scale_n,
                       const float* __restrict__ scale_k, const out_t* __restrict__ bias, const out_t* __restrict__ scale,
                       const out_t* residual, out_t* __restrict__ y, uint4* __restrict__ x_tiles, uint4* __restrict__ w_tiles,
                       const __grid_constant__ GemmPhase shape) {
  AFTER_LAST_LAUNCH
  clear_packed_tiles(x_tiles, (int)shape.x_tiles, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
  clear_packed_tiles(w_tiles, (int)(shape.x_tiles >> 32), blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS);
  extern __shared__ __align__(128) uint4 dynamic[];
  const uint32_t ring = shared_address(dynamic);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;

  // the tile
  const Divided across(blockIdx.x, shape.tiles_m, shape.by_tiles_m), part(across.quotient, shape.splits, shape.by_splits);
  const Divided along(part.quotient, shape.tiles_pixels, shape.by_tiles_pixels);
  const int m0 = across.rest * BLOCK_M, split = part.rest, pixel0 = along.rest * BLOCK_N, group = along.quotient;
  const unsigned w0 = (group * (unsigned)shape.blocks_group + m0 / 64) * (unsigned)shape.w_block, x0 = group * (unsigned)shape.chunks_group;
  // without a next block the first 64 rows are loaded once more: sums of missing rows are not stored
  const unsigned w_next = m0 / 64 + 1 < (int)shape.blocks_group ? (unsigned)shape.w_block : 0;
  __shared__ Corner corners[BLOCK_N];
  if (threadIdx.x < BLOCK_N) corners[threadIdx.x].find(shape, pixel0 + threadIdx.x);
  __syncthreads();

  // its steps of 32 of gemm k
  const int all = ((int)shape.chunks + 3) / 4, each = (int)shape.split_stages;
  const int first = min(split * each, all), last = min(first + each, all), end = min(4 * last, (int)shape.chunks);
  Cursor next(shape, first);
  auto load_next = [&](int slot) {
    load(ring + slot * STAGE_BYTES, next, end, w, w0, w_next, x, x0, corners, shape);
    copies_commit();
    next.next(shape);
  };
#pragma unroll
  for (int slot = 0; slot < STAGES - 1; ++slot) load_next(slot);

  const int a_row = lane % 16, b_row = lane % 8;
  const uint32_t a = ring + (warp_m + a_row) * 64 + (lane / 16 ^ a_row / 2 % 4) * 16;
  const uint32_t b = ring + A_BYTES + (warp_n + b_row) * 64 + (lane / 8 ^ b_row / 2) * 16;
  Sums sums = {};
  int slot = 0;
  for (int step = first; step < last; ++step) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // this step has arrived for all; all have read the step before, whose place is filled now
    load_next(slot == 0 ? STAGES - 1 : slot - 1);
    multiply_stage(sums, a + slot * STAGE_BYTES, b + slot * STAGE_BYTES);
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }
  // Ampere and Ada add 16 of k in two steps, and truncate a bit more
  [[maybe_unused]] constexpr float PROMOTED = (__CUDA_ARCH__ < 900 ? 0.70e-7f : 0.58e-7f) * 16 / 15;
  [[maybe_unused]] const float lost = PRODUCTS == 3 ? 2048 * PROMOTED : lost_in((__CUDA_ARCH__ < 900 ? 4 : 2) * (last - first));
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& total = sums.total[i][j][e];
#if PRODUCTS == 3
        total = fmaf(with_lost(sums.cross[i][j][e], total, lost), 0x1p-11f, total);
#else
        if (SCALED && shape.scaled) total = with_lost(total, lost);
#endif
      }
  copies_wait<0>();
  __syncthreads();
  store(sums.total, shape, m0 + warp_m, group * (int)shape.rows_group, pixel0 + warp_n, (float*)dynamic + warp * 16 * PITCH, scale_n, scale_k, bias, scale, residual,
        y + split * shape.out_part);
}
