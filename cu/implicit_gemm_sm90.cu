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
//          empty[stage]: the 8 consumer warps have read them. Behind the ring, for each consumer, BUFFERS staging tiles of
//          CHUNK pixels x 64 channels that turn sums into rows of y, and the scales of its pixels.
// y        TENSOR_STORE = 1: rows are written by TMA from the staging tiles while the next tile is multiplied; needs rows of y
//          whose pitch is a multiple of 16 bytes. Else warps write them, VEC elements a thread.
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
#define TENSOR_STORE 1
#define BUFFERS 2    // staging tiles of a consumer
#define CHUNK 32     // pixels of a staging tile: 32, 16 or 8, a divisor of WGMMA_N with TENSOR_STORE
#define VEC 1        // elements of y that a thread writes at once: 1, 2 or 4; they must be neighbours at a multiple of VEC
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
constexpr int CONSUMERS = 2, PIXEL_PITCH = 36, CHANNEL_PITCH = 68;  // in floats; spread rows over the banks
static_assert(WGMMA_N == (ROWS == 128 ? PIXELS : PIXELS / 2) && WGMMA_N % 8 == 0, "a consumer takes 64 channels");

#if OUT == 32
typedef float out_t;
DEVICE out_t to_out(float v) { return v; }
DEVICE float from_out(out_t v) { return v; }
#elif OUT == 16
typedef __half out_t;
DEVICE out_t to_out(float v) { return __float2half_rn(v); }
DEVICE float from_out(out_t v) { return __half2float(v); }
#else
typedef __nv_bfloat16 out_t;
DEVICE out_t to_out(float v) { return __float2bfloat16_rn(v); }
DEVICE float from_out(out_t v) { return __bfloat162float(v); }
#endif

// a staging tile: as TMA reads it, or floats with a pitch
constexpr int STAGING_BYTES = TENSOR_STORE ? 64 * CHUNK * (int)sizeof(out_t) : 4 * (NHWC ? CHUNK * CHANNEL_PITCH : 64 * PIXEL_PITCH);
struct Staging {
  alignas(1024) uint8_t tiles[BUFFERS][STAGING_BYTES];
  float scales[SCALED ? WGMMA_N : 1];
};

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

// ---- a tile's sums, scaled and so on, to y

DEVICE int plane_offset(const Shape& shape, int inside) {
#if DENSE
  return inside;
#else
  return (int)(shape.out_base + inside / (int)shape.pq * shape.out_d + inside % (int)shape.pq / (int)shape.q * shape.out_h + inside % (int)shape.q * shape.out_w);
#endif
}

// What a thread needs to finish its sums: the scales and biases of its two channels, and its share of the pixels' scales.
// Loaded before the sums are, used after.
struct Finish {
  float scale[2], bias[2], pixels[(WGMMA_N + 127) / 128];
  DEVICE Finish(const Shape& shape, int channel, int pixel0, const float* scale_n, const float* scale_k, const out_t* bias_k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = min(channel + 8 * half, (int)shape.rows - 1);
      scale[half] = SCALED ? scale_k[k] : 1;
      bias[half] = HAS_BIAS ? from_out(bias_k[k]) : 0;
    }
#if SCALED
#pragma unroll
    for (int i = 0; i < (WGMMA_N + 127) / 128; ++i) {
      const int pixel = min(pixel0 + i * 128 + (int)threadIdx.x % 128, (int)shape.pixels - 1);
      pixels[i] = scale_n[pixel / (int)shape.plane];
    }
#endif
  }
};

// the byte of a swizzled tile with rows of `span` bytes where 16-byte piece `piece` of a row lies
DEVICE int swizzled(int row, int piece, int span) {
  return row * span + ((piece ^ (span == 128 ? row % 8 : span == 64 ? row / 2 % 4 : row / 4 % 2)) << 4);
}

// The chunk of pixels from `base` on, and those behind it: the sums are in registers, so their numbers must be constants.
template <int base>
DEVICE void store_chunks(float (&sum)[WGMMA_N / 2], const Finish& finish, const Shape& shape, const Tile& of, int consumer, int m0, int pixel,
                         Staging& staging, const CUtensorMap* map_y, out_t* y) {
  constexpr int width = WGMMA_N - base < CHUNK ? WGMMA_N - base : CHUNK;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  uint8_t* const tile = staging.tiles[base / CHUNK % BUFFERS];
#if TENSOR_STORE
  if (thread == 0) bulk_wait_read<BUFFERS - 1>();  // the tile's last chunk has been read
#endif
  named_barrier(1 + consumer, 128);
#pragma unroll
  for (int i = 0; i < width / 8; ++i) {
    float v[2][2];  // [half of the rows][neighbouring pixels]
    const int column = 8 * i + 2 * (lane % 4);
    const float2 scale = SCALED ? *(const float2*)(staging.scales + base + column) : make_float2(1, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (base / 8 + i) + 2 * half;
      v[half][0] = sum[at] * (scale.x * finish.scale[half]) + finish.bias[half];
      v[half][1] = sum[at + 1] * (scale.y * finish.scale[half]) + finish.bias[half];
    }
#if TENSOR_STORE && OUT != 32
    // 8 x 8 blocks of 16-bit numbers, turned for channels last, one row of 16 bytes a lane
    const uint32_t packed[2] = {pack2(to_out(v[0][0]), to_out(v[0][1])), pack2(to_out(v[1][0]), to_out(v[1][1]))};
    const int half = lane / 8 % 2, row = lane % 8;
    const int place = NHWC ? swizzled(8 * i + row, 2 * warp + half, 128) : swizzled(16 * warp + 8 * half + row, i, 2 * CHUNK);
    store_blocks<NHWC>(shared_address(tile) + place, packed);
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp + lane / 4 + 8 * half;
#if TENSOR_STORE && NHWC
#pragma unroll
      for (int e = 0; e < 2; ++e)
        *(float*)(tile + row / 32 * (CHUNK * 128) + swizzled(column + e, row % 32 / 4, 128) + row % 4 * 4) = v[half][e];
#elif TENSOR_STORE
      *(float2*)(tile + swizzled(row, column / 4, 4 * CHUNK) + column % 4 * 4) = make_float2(v[half][0], v[half][1]);
#elif NHWC
      ((float*)tile)[column * CHANNEL_PITCH + row] = v[half][0];
      ((float*)tile)[(column + 1) * CHANNEL_PITCH + row] = v[half][1];
#else
      *(float2*)((float*)tile + row * PIXEL_PITCH + column) = make_float2(v[half][0], v[half][1]);
#endif
    }
#endif
  }
#if TENSOR_STORE
  fence_for_bulk();
#endif
  named_barrier(1 + consumer, 128);
#if TENSOR_STORE
  if (thread == 0) {
#if NHWC
#pragma unroll
    for (int part = 0; part < (int)sizeof(out_t) / 2; ++part)
      store_box(map_y, shared_address(tile) + part * CHUNK * 128, m0 + part * 32, of.group, pixel, of.split);
#else
    // a box for every image that the chunk meets; what lies outside an image is not written
    int image = pixel / (int)shape.plane;
    for (int start = pixel % (int)shape.plane; start > -CHUNK; start -= (int)shape.plane, ++image)
      store_box(map_y, shared_address(tile), start, m0, image * (int)(shape.rows / shape.rows_group) + of.group, of.split);
#endif
    bulk_commit();
  }
#else
  constexpr int ACROSS = (NHWC ? 64 : CHUNK) / VEC, DOWN = NHWC ? CHUNK : 64;
  const int across = thread % ACROSS * VEC, k0 = of.group * (int)shape.rows_group + m0;
  out_t* const to = y + (long long)of.split * ((shape.pixels / shape.plane) * shape.rows * shape.out_size);
#if NHWC
  const bool inside = m0 + across < shape.rows_group;
#else
  const bool inside = across < width && pixel + across < shape.pixels;
  const int image = (pixel + across) / (int)shape.plane, offset = plane_offset(shape, (pixel + across) % (int)shape.plane);
#endif
#pragma unroll 8
  for (int i = 0; i < DOWN * ACROSS / 128; ++i) {
    const int down = thread / ACROSS + i * (128 / ACROSS);
#if NHWC
    const bool ok = inside && down < width && pixel + down < shape.pixels;
    const int image = (pixel + down) / (int)shape.plane, offset = plane_offset(shape, (pixel + down) % (int)shape.plane);
    const long long at = ((long long)image * shape.out_size + offset) * shape.rows + k0 + across;
#else
    const bool ok = inside && m0 + down < shape.rows_group;
    const long long at = ((long long)image * shape.rows + k0 + down) * shape.out_size + offset;
#endif
    const float* const from = (const float*)tile + down * (NHWC ? CHANNEL_PITCH : PIXEL_PITCH) + across;
    struct alignas(VEC * sizeof(out_t)) Vector { out_t v[VEC]; } vector;
#pragma unroll
    for (int e = 0; e < VEC; ++e) vector.v[e] = to_out(from[e]);
    if (ok) *(Vector*)(to + at) = vector;
  }
#endif
  if constexpr (base + CHUNK < WGMMA_N)
    store_chunks<base + CHUNK>(sum, finish, shape, of, consumer, m0, pixel + CHUNK, staging, map_y, y);
}

DEVICE void store_tile(float (&sum)[WGMMA_N / 2], const Finish& finish, const Shape& shape, const Tile& of, int consumer, Staging& staging,
                       const CUtensorMap* map_y, out_t* y) {
#if SCALED
#pragma unroll
  for (int i = threadIdx.x % 128; i < WGMMA_N; i += 128) staging.scales[i] = finish.pixels[i / 128];
#endif
  const int m0 = of.m + (ROWS == 128 ? 64 * consumer : 0), pixel0 = of.pixel + (ROWS == 128 ? 0 : WGMMA_N * consumer);
  store_chunks<0>(sum, finish, shape, of, consumer, m0, pixel0, staging, map_y, y);
}

// ---- the multiplication

DEVICE void consume(const Shape& shape, uint32_t ring, uint32_t full, uint32_t empty, int consumer, Staging& staging, const float* scale_n,
                    const float* scale_k, const out_t* bias, const CUtensorMap* map_y, out_t* y) {
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
    const int channel = of.group * (int)shape.rows_group + of.m + (ROWS == 128 ? 64 * consumer : 0) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const Finish finish(shape, channel, of.pixel + (ROWS == 128 ? 0 : WGMMA_N * consumer), scale_n, scale_k, bias);
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
#ifdef NOSTORE
    if (main[0] == 12345.f)
#endif
    store_tile(main, finish, shape, of, consumer, staging, map_y, y);
  }
#if TENSOR_STORE
  if (threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive what is read from it
#endif
}

extern "C" __global__ void __launch_bounds__(384, 1)
    implicit_gemm_sm90(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x,
#if TENSOR_STORE
                       const __grid_constant__ CUtensorMap map_y,
#endif
                       const float* __restrict__ scale_n, const float* __restrict__ scale_k, const out_t* __restrict__ bias,
                       out_t* __restrict__ y, const __grid_constant__ Shape shape) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barriers[2 * STAGES];
  const uint32_t ring = (shared_address(dynamic) + 1023) & ~1023u;  // swizzle patterns follow absolute addresses
  const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
  Staging* const staging = (Staging*)(dynamic + (ring - shared_address(dynamic)) + STAGES * STAGE_BYTES);
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
#if TENSOR_STORE
    const CUtensorMap* const to = &map_y;
#else
    const CUtensorMap* const to = nullptr;
#endif
    consume(shape, ring, full, empty, warpgroup - 1, staging[warpgroup - 1], scale_n, scale_k, bias, to, y);
  }
}
