// rims_product.cu: the results of a convolution that a border changes, as layout/rims.cu computes them, for many channels on the tensor cores.
//
//   forward   y[result, k] = epilogue(sum over taps and c of x[pixel, c] * w[k, c, tap]), once more
//   ADDS      y[result, c] += sum over the places outside that show it, the taps and k of x[pixel, k] * w[k, c, tap]
//   ANEW      y[result, c] = that sum over all places that show it, once more
//   gemm m: result of the rims of all images | gemm n: channel of y in its group | gemm k: (place, tap, channel of x)
//
// Mapping  block -> 64 results x 64 channels. Results are in an order (rim.cuh) in which those of a block mostly have the same places and taps: it goes
//          through all, and skips those by which none of its results meets x.
//          warp -> 32 results x 16 channels.
// Memory   shared: STAGES stages of 128 bytes of channels of x for each result, and of w for each channel of y, 16 bytes apart for ldmatrix; and for each
//          place and tap which pixel of x each result meets. Later stages are on their way during a product: where 16 bytes of channels are neighbours
//          by asynchronous copies, else the next stage by registers.
// Order    with the launch before, which computes all results: this one's blocks may begin before that has ended, and wait for it before they store.
// Sums     PRODUCTS = 3: float32 numbers are split into two TF32 numbers, and three of their products added. After 128 bytes of channels the sum is added to
//          a float32 sum, because the tensor core truncates its own. What is not finite is summed once more in plain float32.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/mma/rims_product.cu
#ifndef TYPE
#define TYPE 16       // of the arrays: 32 float, 16 half, 17 bfloat16
#define PRODUCTS 1    // 3: float32 arithmetic
#define WIDE 0        // whether 16 bytes of channels are neighbours in memory: 1 of w, 2 of w and x
#endif
#define MOMENTS 0
#include "core/finish.cuh"
#include "core/tf32.cuh"
#include "mma/async_copy.cuh"
#include "mma/fragments.cuh"
typedef long long long_t;
#include "layout/rims.cuh"

constexpr int THREADS = 256, PIXELS = 64, CHANNELS = 64, LISTED = 64, STAGES = 3;
constexpr int PITCH = 144;  // bytes from row to row: 128, and 16 so that ldmatrix meets all banks
typedef element<TYPE> data_t;
constexpr int STEP = 128 / sizeof(data_t), IN_WORD = 4 / sizeof(data_t), IN_PIECE = 16 / sizeof(data_t);  // channels of a step, of a word, of 16 bytes
constexpr int STAGE_BYTES = (PIXELS + CHANNELS) * PITCH;
[[maybe_unused]] constexpr int LARGER = 4096;  // core/tf32.cuh

#include "mma/rim.cuh"

// Neighbours in gemm k that make a word, as they are loaded: at once, wherever they are, so that no load waits for another. `word` has zeros for those
// that are not there.
struct Loaded {
  data_t v[IN_WORD];
  DEVICE void load(const data_t* from, long long apart, int count, const data_t* anywhere) {
#pragma unroll
    for (int i = 0; i < IN_WORD; ++i) v[i] = *(i < count ? from + i * apart : anywhere);
  }
  DEVICE uint32_t word(int count) const {
#if TYPE == 32
    return __float_as_uint(count > 0 ? v[0] : 0.f);
#else
    return count > 1 ? word_of(v[0], v[1]) : count > 0 ? v[0].bits : 0;
#endif
  }
};

struct Sums {
  float of[2][2][4];  // sixteens of pixels, eights of channels
};

// The products of a step in shared memory, added to `sums`.
DEVICE void multiply_step(Sums& sums, uint32_t rows, uint32_t columns) {
  float main[2][2][4] = {}, cross[2][2][4] = {};
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    uint32_t a[2][4], b[4];
    load_matrices(a[0], rows + 32 * part);
    load_matrices(a[1], rows + 16 * PITCH + 32 * part);
    load_matrices(b, columns + 32 * part);
#if TYPE == 32 && PRODUCTS == 1
    const auto round = [](uint32_t& v) { v = to_tf32(__uint_as_float(v)); };
    each(a, round);
    each(b, round);
#endif
#if PRODUCTS == 3
    uint32_t a_low[2][4], b_low[4];
    const auto split = [](uint32_t& high, uint32_t& low) {
      const float v = __uint_as_float(high);
      high = to_tf32(v);
      low = to_tf32(__uint_as_float(tf32_rest<LARGER>(v, high)));
    };
    each(a, a_low, split);
    each(b, b_low, split);
#endif
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        multiply<data_t>(main[i][j], a[i], b[2 * j], b[2 * j + 1]);
#if PRODUCTS == 3
        multiply<data_t>(cross[i][j], a_low[i], b[2 * j], b[2 * j + 1]);
        multiply<data_t>(cross[i][j], a[i], b_low[2 * j], b_low[2 * j + 1]);
#endif
      }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.of[i][j][e] += PRODUCTS == 3 ? fmaf(cross[i][j][e], 1.f / LARGER, main[i][j][e]) : main[i][j][e];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    rims_product(const data_t* __restrict__ x, const data_t* __restrict__ w, const data_t* __restrict__ bias, const data_t* __restrict__ scale,
                 const data_t* __restrict__ residual, data_t* __restrict__ y, const __grid_constant__ RimsArguments arg) {
  READS_EARLIER
  extern __shared__ uint8_t dynamic[];
  __shared__ int met[LISTED][PIXELS], some[LISTED], listed[LISTED], most[3], found;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int tiles = (int)arg.tiles, tile = blockIdx.x % tiles, rest = blockIdx.x / tiles, tiles_n = ((int)arg.made + CHANNELS - 1) / CHANNELS;
  const int n0 = rest % tiles_n * CHANNELS, group = rest / tiles_n, all = (int)arg.rims * (int)arg.images;
  const int own = thread % PIXELS, own_row = tile * PIXELS + own;
  const Rim rim(arg, min(own_row, all - 1));
  if (thread < 3) most[thread] = 0;
  __syncthreads();
  if (thread < PIXELS) {
    atomicMax(&most[0], rim.of_d.count);
    atomicMax(&most[1], rim.of_h.count);
    atomicMax(&most[2], rim.of_w.count);
  }
  __syncthreads();
  const int places_w = most[2], places_h = most[1], taps_s = (int)arg.s, taps_r = (int)arg.r, taps_t = (int)arg.t;
  const int taps = taps_t * taps_r * taps_s, combinations = most[0] * places_h * places_w * taps, read = (int)arg.read;
  const long long first_read = (long long)group * read, of_group = GRADIENT ? first_read * arg.w_read : group * arg.made * arg.w_made;
  // what this thread loads: words of one row, or with wide loads 16 bytes of two
  const int word0 = thread / PIXELS, row = thread / 8, piece = thread % 8 * IN_PIECE;
  const uint32_t stages = shared_address(dynamic), to_row = row * PITCH + thread % 8 * 16;
#if WIDE == 2
  const data_t* images[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) images[i] = x + Rim(arg, min(tile * PIXELS + row + 32 * i, all - 1)).image * arg.x_image + first_read;
#else
  const data_t* const image = x + rim.image * arg.x_image + first_read * arg.x_channel;
  Loaded of_rows[8];
  int loaded_pixel, loaded_k0;
#endif
#if WIDE
  const data_t* const filter = w + of_group + (n0 + row) * arg.w_made;
#else
  const data_t* const filter = w + of_group + (n0 + own) * arg.w_made;
  const bool has_channel = n0 + own < (int)arg.made;
  Loaded of_columns[8];
#endif
  // Begins to load a step: its pieces to their stage, and its words to registers.
  auto load_pieces = [&](uint32_t stage, int slot, int tap, int k0) {
#if WIDE
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = n0 + row + 32 * i < (int)arg.made && k0 + piece < read;
      const data_t* const from = filter + 32 * i * arg.w_made + tap * arg.w_tap + k0 + piece;
      copy_or_zero<16>(stage + (PIXELS + 32 * i) * PITCH + to_row, there ? from : w, there);
    }
#endif
#if WIDE == 2
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pixel = met[slot][row + 32 * i];
      const bool there = pixel >= 0 && k0 + piece < read;
      copy_or_zero<16>(stage + 32 * i * PITCH + to_row, there ? images[i] + pixel * arg.x_pixel + k0 + piece : x, there);
    }
#endif
  };
  auto load_words = [&](int slot, [[maybe_unused]] int tap, int k0) {
#if WIDE < 2
    loaded_k0 = k0;
    loaded_pixel = met[slot][own];
    const data_t* const from = image + max(loaded_pixel, 0) * arg.x_pixel;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int channel = k0 + (word0 + 4 * i) * IN_WORD;
      of_rows[i].load(from + channel * arg.x_channel, arg.x_channel, loaded_pixel >= 0 ? read - channel : 0, x);
#if !WIDE
      of_columns[i].load(filter + tap * arg.w_tap + channel * arg.w_read, arg.w_read, has_channel ? read - channel : 0, w);
#endif
    }
#endif
  };
  auto store_words = [&]([[maybe_unused]] uint8_t* stage) {
#if WIDE < 2
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int channel = loaded_k0 + (word0 + 4 * i) * IN_WORD, to = own * PITCH + 4 * (word0 + 4 * i);
      *(uint32_t*)(stage + to) = of_rows[i].word(loaded_pixel >= 0 ? read - channel : 0);
#if !WIDE
      *(uint32_t*)(stage + PIXELS * PITCH + to) = of_columns[i].word(has_channel ? read - channel : 0);
#endif
    }
#endif
  };
  // a lane's row of the matrices that it loads
  const int m0 = warp % 2 * 32, c0 = warp / 2 * 16;
  const uint32_t from_rows = stages + (m0 + lane % 16) * PITCH + lane / 16 * 16;
  const uint32_t from_columns = stages + (PIXELS + c0 + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
  Sums sums = {};
#pragma unroll 1
  for (int first = 0; first < combinations; first += LISTED) {
    const int count = min(combinations - first, LISTED);
    if (thread < LISTED) some[thread] = 0;
    __syncthreads();
    for (int slot = thread / PIXELS; slot < count; slot += THREADS / PIXELS) {
      const int place = (first + slot) / taps, tap = first + slot - place * taps;
      const int line = place / places_w, c = place - line * places_w, a = line / places_h, b = line - a * places_h;
      const int tap_line = tap / taps_s, t = tap_line / taps_r;
      const int d = MET(rim.of_d, a, t, d), h = MET(rim.of_h, b, tap_line - t * taps_r, h), v = MET(rim.of_w, c, tap - tap_line * taps_s, w);
      const bool there = (GRADIENT != ADDS || place > 0) && (d | h | v) >= 0 && own_row < all;
      met[slot][own] = there ? (d * (int)arg.x_h + h) * (int)arg.x_w + v : -1;
      if (there) some[slot] = 1;
    }
    __syncthreads();
    if (warp == 0) {  // the slots by which some result meets x
      const unsigned low = __ballot_sync(~0u, some[lane]), high = __ballot_sync(~0u, some[lane + 32]), before = (1u << lane) - 1;
      if (some[lane]) listed[__popc(low & before)] = lane;
      if (some[lane + 32]) listed[__popc(low) + __popc(high & before)] = lane + 32;
      if (lane == 0) found = __popc(low) + __popc(high);
    }
    __syncthreads();
    const int steps = found * ((read + STEP - 1) / STEP);
    struct Place {  // of a step: its slot's number, and its first channel
      int number = 0, k0 = 0;
      DEVICE void next(int read) {
        k0 += STEP;
        number += k0 >= read;
        k0 = k0 < read ? k0 : 0;
      }
    } pieces, words;
    auto begin = [&](int step) {
      if (step < steps) {
        const int slot = listed[pieces.number];
        load_pieces(stages + step % STAGES * STAGE_BYTES, slot, (first + slot) % taps, pieces.k0);
        pieces.next(read);
      }
      copies_commit();
    };
    for (int step = 0; step < STAGES - 1; ++step) begin(step);
    if (steps) load_words(listed[0], (first + listed[0]) % taps, 0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int stage = step % STAGES;
      store_words(dynamic + stage * STAGE_BYTES);
      copies_wait<STAGES - 2>();
      __syncthreads();
      words.next(read);
      if (step + 1 < steps) load_words(listed[words.number], (first + listed[words.number]) % taps, words.k0);
      begin(step + STAGES - 1);
      multiply_step(sums, from_rows + stage * STAGE_BYTES, from_columns + stage * STAGE_BYTES);
    }
    __syncthreads();
  }
  AFTER_LAST_LAUNCH
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int number = tile * PIXELS + m0 + 16 * i + 8 * half + lane / 4;
      if (number >= all) continue;
      const Rim at(arg, number);
      const long long to = at.image * arg.y_image + at.pixel * arg.y_pixel;
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int channel = n0 + c0 + 8 * j + lane % 4 * 2 + e, k = group * (int)arg.made + channel;
          if (channel >= (int)arg.made) continue;
          float v[1] = {sums.of[i][j][2 * half + e]};
#if PRODUCTS == 3
          if (!(fabsf(v[0]) < INFINITY))
            v[0] = recompute_fp32(arg, x + at.image * arg.x_image + first_read * arg.x_channel, w + of_group + channel * arg.w_made, at);
#endif
          const long long element = to + k * arg.y_channel;
          if (GRADIENT == ADDS) {
            v[0] += to_float(y[element]);
          } else {
            const Finish<false> finish{ScaleAndBias(arg, scale, bias, k)};
            v[0] = finish.whole(arg, v[0], 1, has_residual(arg) ? to_float(residual[element]) : -0.f);
            activate(arg, v);
          }
          y[element] = from_float<data_t>(v[0]);
        }
    }
}
