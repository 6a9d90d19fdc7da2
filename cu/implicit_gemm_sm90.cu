// implicit_gemm_sm90.cu: convolution as a matrix product on Hopper's tensor cores, fp32 results from fp16 limbs.
//
//   y[n, k, pixel] = act(scale_n[n] * scale_k[k] * sum over taps and c of w[k, tap, c] * x[n, pixel + tap, c] + bias[k])
//   gemm m: output channel | gemm n: pixel (n,o,p,q) of the batch | gemm k: (tap, c), c fastest, in blocks of KC channels
//
// Both operands were packed by pack.cu: channels last, 16 bits, in LIMBS. PRODUCTS = 3 multiplies hi.hi, hi.lo and lo.hi:
// fp32 accuracy, because the tensor core's own sum, which truncates, is added into fp32 registers every 64 of k (promotion);
// the two cross products are 2^-11 of the result and stay in the tensor core. PRODUCTS = 1 takes the first limb alone, or
// arrays that have 16 bits to begin with. Method: Ootomo and Yokota, 2022 (doi 10.1177/10943420221090256).
//
// Mapping  block: persistent, one a multiprocessor; takes tiles blockIdx.x, + gridDim.x, ... of ROWS channels x PIXELS pixels.
//          Tile order, fastest first: channels, split, pixels, group: blocks that share pixels run together.
//          warpgroup 0: one thread, the producer, asks for the tiles of x and w by TMA. Two consumer warpgroups multiply:
//          64 channels x PIXELS each (ROWS = 128), or 64 channels x PIXELS / 2 (ROWS = 64).
// Shared   a ring of STAGES stages; a stage holds 64 of k: for each limb ROWS x 64 of w, then PIXELS x 64 of x, as sub-tiles of
//          KC channels whose rows of 2 * KC bytes are swizzled, as wgmma wants them. full[stage]: the bytes have arrived;
//          empty[stage]: the 8 consumer warps have read them. Behind the ring, for each consumer, a staging tile that turns
//          sums into rows of y: [64 channels][32 pixels], pitch 40, or [32 pixels][64 channels], pitch 68 (free of conflicts).
// x        TMA's im2col mode: one load fetches PIXELS consecutive output pixels, shifted by a tap, across rows and images;
//          padding, and what lies past the last image or channel, arrives as zeros.
// Split    splits > 1 cuts gemm k for problems of few tiles: each part goes to a workspace [splits][size of y] in fp32 and
//          direct_reduce.cu adds them in order.
// Phases   the gradient of the input is one launch a stride phase, each a stride-1 convolution with some of the taps
//          (tap_base, tap_*) that writes every out_h-th row and out_w-th column.
#ifndef ROWS
#define ROWS 128
#define PIXELS 128
#define STAGES 3
#define PRODUCTS 3
#define KC 64        // channels a load: 64, 32 or 16
#define RANK 2       // spatial axes of the loads
#define BF16 0       // the operands' type
#define OUT 32       // y: 32 float, 16 half, 17 bfloat16
#define SCALED 1     // there are scales
#define HAS_BIAS 1
#define NHWC 0       // layout of y
#define VEC 4        // elements of y a store; 4 needs them to be neighbours at a multiple of 4
#define DENSE 1      // pixel i of the launch is pixel i of y's plane
#define WGMMA_N 128  // pixels a consumer
#endif
#if BF16
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif
#include "wgmma.cuh"

constexpr int LIMBS = PRODUCTS == 3 ? 2 : 1, SUB_TILES = 64 / KC, SPAN = 2 * KC;
constexpr int A_BYTES = ROWS * 128, B_BYTES = PIXELS * 128, LIMB_BYTES = A_BYTES + B_BYTES, STAGE_BYTES = LIMBS * LIMB_BYTES;
constexpr int CONSUMERS = 2, CHUNK = 32, PIXEL_PITCH = 40, CHANNEL_PITCH = 68;
constexpr int STAGING = NHWC ? CHUNK * CHANNEL_PITCH : 64 * PIXEL_PITCH;  // floats
static_assert(WGMMA_N == (ROWS == 128 ? PIXELS : PIXELS / 2) && WGMMA_N % 8 == 0, "a consumer takes 64 channels");

#if OUT == 32
typedef float out_t;
DEVICE void store4(out_t* p, float4 v) { __stcs((float4*)p, v); }
DEVICE out_t to_out(float v) { return v; }
DEVICE float from_out(out_t v) { return v; }
#else
#if OUT == 16
typedef __half out_t;
DEVICE out_t to_out(float v) { return __float2half_rn(v); }
DEVICE float from_out(out_t v) { return __half2float(v); }
#else
typedef __nv_bfloat16 out_t;
DEVICE out_t to_out(float v) { return __float2bfloat16_rn(v); }
DEVICE float from_out(out_t v) { return __bfloat162float(v); }
#endif
DEVICE void store4(out_t* p, float4 v) {
  out_t four[4] = {to_out(v.x), to_out(v.y), to_out(v.z), to_out(v.w)};
  __stcs((uint2*)p, *(const uint2*)four);
}
#endif

// Everything about the problem that only moves addresses; 64 bits each so that the host can pack it without knowing types.
struct Shape {
  long long tiles, tiles_m, splits, tiles_pixels;       // how many tiles: all, along the channels, splits, along the pixels
  long long blocks, channel_blocks;                     // blocks of KC along gemm k, and how many of them belong to one tap
  long long rows_group, rows;                           // output channels of a group, and of all
  long long channels_group, channels;                   // packed input channels of a group, and of all
  long long tap_r, tap_s;                               // taps along r and s
  long long tap_base, tap_step_t, tap_step_r, tap_step_s;  // number in w of the first tap, and steps from one to the next
  long long dilation_d, dilation_h, dilation_w;         // offset in x from one tap to the next
  long long pixels, limb_images;                        // pixels of the launch; images to skip in x's map to reach the second limb
  long long load_plane, load_pq, load_q;                // pixels of an image, a slice and a row, as x is loaded
  long long stride_d, stride_h, stride_w, low_d, low_h, low_w;  // x of pixel (o, p, q), tap 0: o * stride_d + low_d and so on
  long long plane, pq, q;                               // pixels of an image, a slice and a row, as y is written
  long long out_size, out_base, out_d, out_h, out_w;    // elements of a plane of y, of the first pixel, and from one to the next
};

struct Tile {
  int m, pixel, group, split;
  DEVICE Tile(const Shape& shape, int tile) {
    m = tile % (int)shape.tiles_m * ROWS;
    tile /= (int)shape.tiles_m;
    split = tile % (int)shape.splits;
    tile /= (int)shape.splits;
    pixel = tile % (int)shape.tiles_pixels * PIXELS;
    group = tile / (int)shape.tiles_pixels;
  }
};

// stages of gemm k that a split takes: first to last
struct Range {
  int first, last;
  DEVICE Range(const Shape& shape, int split) {
    const int stages = ((int)shape.blocks + SUB_TILES - 1) / SUB_TILES, each = (stages + (int)shape.splits - 1) / (int)shape.splits;
    first = min(split * each, stages);
    last = min(first + each, stages);
  }
};

// The ring's position: which stage, and the parity of the round.
struct Position {
  int stage = 0, parity = 0;
  DEVICE void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

DEVICE void produce(const CUtensorMap* map_w, const CUtensorMap* map_x, const Shape& shape, uint32_t ring, uint32_t full, uint32_t empty) {
  prefetch_map(map_w);
  prefetch_map(map_x);
  Position at;
  for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x) {
    const Tile of(shape, tile);
    const Range range(shape, of.split);
    const int image = of.pixel / (int)shape.load_plane, inside = of.pixel % (int)shape.load_plane;
    const int w = inside % (int)shape.load_q * (int)shape.stride_w + (int)shape.low_w;
    const int h = inside % (int)shape.load_pq / (int)shape.load_q * (int)shape.stride_h + (int)shape.low_h;
    const int d = inside / (int)shape.load_pq * (int)shape.stride_d + (int)shape.low_d;
    const int row = of.group * (int)shape.rows_group + of.m, channel = of.group * (int)shape.channels_group;
    int block = range.first * SUB_TILES;
    int c = block % (int)shape.channel_blocks, tap = block / (int)shape.channel_blocks;
    int s = tap % (int)shape.tap_s, r = tap / (int)shape.tap_s % (int)shape.tap_r, t = tap / (int)(shape.tap_s * shape.tap_r);
    for (int step = range.first; step < range.last; ++step) {
      const uint32_t stage = ring + at.stage * STAGE_BYTES, arrived = full + 8 * at.stage;
      barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
      barrier_expect(arrived, STAGE_BYTES);
#pragma unroll
      for (int sub = 0; sub < SUB_TILES; ++sub) {
        // blocks past the end, to fill the last stage, are asked for past the last channel and are zeros
        const bool real = block < (int)shape.blocks;
        const int w_c = real ? c * KC : (int)shape.channels_group, x_c = real ? channel + c * KC : (int)shape.channels;
        const int w_tap = real ? (int)(shape.tap_base + t * shape.tap_step_t + r * shape.tap_step_r + s * shape.tap_step_s) : 0;
#pragma unroll
        for (int limb = 0; limb < LIMBS; ++limb) {
          const uint32_t to = stage + limb * LIMB_BYTES;
          load_tile(to + sub * ROWS * SPAN, map_w, arrived, w_c, w_tap, limb * (int)shape.rows + row);
          load_im2col<RANK>(to + A_BYTES + sub * PIXELS * SPAN, map_x, arrived, x_c, w, h, d, image + limb * (int)shape.limb_images,
                            real ? s * (int)shape.dilation_w : 0, real ? r * (int)shape.dilation_h : 0, real ? t * (int)shape.dilation_d : 0);
        }
        ++block;
        if (++c == (int)shape.channel_blocks) {
          c = 0;
          if (++s == (int)shape.tap_s) {
            s = 0;
            if (++r == (int)shape.tap_r) {
              r = 0;
              ++t;
            }
          }
        }
      }
      at.next();
    }
  }
}

// ---- a tile's sums, scaled and so on, to y. Through shared memory, so that warps write whole rows.

DEVICE int plane_offset(const Shape& shape, int inside) {
#if DENSE
  return inside;
#else
  return (int)(shape.out_base + inside / (int)shape.pq * shape.out_d + inside % (int)shape.pq / (int)shape.q * shape.out_h + inside % (int)shape.q * shape.out_w);
#endif
}

DEVICE void store_tile(float (&sum)[WGMMA_N / 2], const Shape& shape, const Tile& of, int consumer, float* staging, const float* scale_n,
                       const float* scale_k, const out_t* bias, out_t* y) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int m0 = of.m + (ROWS == 128 ? 64 * consumer : 0), pixel0 = of.pixel + (ROWS == 128 ? 0 : WGMMA_N * consumer);
  const int k0 = of.group * (int)shape.rows_group;
  y += (long long)of.split * ((shape.pixels / shape.plane) * shape.rows * shape.out_size);
#pragma unroll
  for (int base = 0; base < WGMMA_N; base += CHUNK) {
    const int width = WGMMA_N - base < CHUNK ? WGMMA_N - base : CHUNK;
    named_barrier(1 + consumer, 128);  // the last chunk has been read
#pragma unroll
    for (int i = 0; i < width / 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + lane / 4 + 8 * half, column = 8 * i + 2 * (lane % 4), at = 4 * (base / 8 + i) + 2 * half;
        if (NHWC) {
          staging[column * CHANNEL_PITCH + row] = sum[at];
          staging[(column + 1) * CHANNEL_PITCH + row] = sum[at + 1];
        } else {
          *(float2*)(staging + row * PIXEL_PITCH + column) = make_float2(sum[at], sum[at + 1]);
        }
      }
    named_barrier(1 + consumer, 128);
    constexpr int ACROSS = (NHWC ? 64 : CHUNK) / VEC, DOWN = NHWC ? CHUNK : 64;
#pragma unroll 4
    for (int i = 0; i < DOWN * ACROSS / 128; ++i) {
      const int across = thread % ACROSS * VEC, down = thread / ACROSS + i * (128 / ACROSS);
      const int column = NHWC ? down : across, row = NHWC ? across : down;
      const int pixel = pixel0 + base + column, m = m0 + row;
      if (column < width && pixel < (int)shape.pixels && m < (int)shape.rows_group) {
        const int image = pixel / (int)shape.plane, offset = plane_offset(shape, pixel % (int)shape.plane), k = k0 + m;
        const long long at = NHWC ? ((long long)image * shape.out_size + offset) * shape.rows + k
                                  : ((long long)image * shape.rows + k) * shape.out_size + offset;
        const float* from = staging + down * (NHWC ? CHANNEL_PITCH : PIXEL_PITCH) + across;
        float v[VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
          v[e] = from[e];
          if (SCALED) v[e] = v[e] * scale_n[image] * scale_k[NHWC ? k + e : k];
          if (HAS_BIAS) v[e] += from_out(bias[NHWC ? k + e : k]);
        }
#if VEC == 4
        store4(y + at, make_float4(v[0], v[1], v[2], v[3]));
#else
        y[at] = to_out(v[0]);
#endif
      }
    }
  }
}

// ---- the multiplication

DEVICE void consume(const Shape& shape, uint32_t ring, uint32_t full, uint32_t empty, int consumer, float* staging, const float* scale_n,
                    const float* scale_k, const out_t* bias, out_t* y) {
  const uint32_t a0 = ring + (ROWS == 128 ? 64 * SPAN * consumer : 0), b0 = ring + A_BYTES + (ROWS == 128 ? 0 : WGMMA_N * SPAN * consumer);
  Position at;
  float main[WGMMA_N / 2];  // hi.hi of one stage
#if PRODUCTS == 3
  float cross[WGMMA_N / 2], total[WGMMA_N / 2];
#endif
  // the products of one stage and one pair of limbs, 16 of k at a time
  auto multiply = [&](float(&d)[WGMMA_N / 2], int limb_a, int limb_b, bool fresh) {
    const uint64_t a = wgmma_descriptor<SPAN>(a0 + at.stage * STAGE_BYTES + limb_a * LIMB_BYTES);
    const uint64_t b = wgmma_descriptor<SPAN>(b0 + at.stage * STAGE_BYTES + limb_b * LIMB_BYTES);
#pragma unroll
    for (int k = 0; k < 64; k += 16) {
      const int sub = k / KC, inner = 2 * (k % KC);
      wgmma(d, a + (sub * ROWS * SPAN + inner) / 16, b + (sub * PIXELS * SPAN + inner) / 16, !(fresh && k == 0));
    }
  };
  for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x) {
    const Tile of(shape, tile);
    const Range range(shape, of.split);
#if PRODUCTS == 3
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) cross[i] = total[i] = 0;
    for (int step = range.first; step < range.last; ++step) {
      barrier_wait(full + 8 * at.stage, at.parity);
      wgmma_fence();
      multiply(main, 0, 0, true);
      wgmma_commit();
      multiply(cross, 0, 1, false);
      multiply(cross, 1, 0, false);
      wgmma_commit();
      wgmma_wait<1>();
      wgmma_arrived(main);
#pragma unroll
      for (int i = 0; i < WGMMA_N / 2; ++i) total[i] += main[i];
      wgmma_wait<0>();
      wgmma_arrived(cross);
      if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * at.stage);
      at.next();
    }
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) main[i] = fmaf(cross[i], 0x1p-11f, total[i]);
#else
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) main[i] = 0;
    int previous = -1;
    for (int step = range.first; step < range.last; ++step) {
      barrier_wait(full + 8 * at.stage, at.parity);
      wgmma_fence();
      multiply(main, 0, 0, false);
      wgmma_commit();
      wgmma_wait<1>();  // the stage before this one has been read
      if (previous >= 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * previous);
      previous = at.stage;
      at.next();
    }
    wgmma_wait<0>();
    wgmma_arrived(main);
    if (previous >= 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * previous);
#endif
    store_tile(main, shape, of, consumer, staging, scale_n, scale_k, bias, y);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    implicit_gemm_sm90(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x, const float* __restrict__ scale_n,
                       const float* __restrict__ scale_k, const out_t* __restrict__ bias, out_t* __restrict__ y,
                       const __grid_constant__ Shape shape) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const uint32_t ring = (shared_address(dynamic) + 1023) & ~1023u;  // swizzle patterns follow absolute addresses
  const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
  float* const staging = (float*)(dynamic + (ring - shared_address(dynamic)) + STAGES * STAGE_BYTES);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * CONSUMERS);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) produce(&map_w, &map_x, shape, ring, full, empty);
  } else {
    registers_up<232>();
    consume(shape, ring, full, empty, warpgroup - 1, staging + (warpgroup - 1) * STAGING, scale_n, scale_k, bias, y);
  }
}
