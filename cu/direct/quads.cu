// quads.cu: float32 convolutions of few channels on plain cores: a thread keeps quads, four neighbouring pixels of a row, of eight channels.
//
//   y[n,k,o,p,q] = sum over c,t,r,s of x[n, g*cg + c, o*stride_d + low_d + t*dilation_d, p*stride_h + low_h + r*dilation_h, q*STRIDE + low_w + s]
//                                      * w[k,c,t,r,s],   g = k / kg
//
// direct/batched.cu loads a number of x for eight multiplications. Here the pixels of a quad share what they read: for a row of taps a thread loads
// a run of neighbours once, by vectors, and keeps it in registers for all the taps. Two quads share the filter's numbers too. Nothing is packed or
// split, so there is one launch.
//
// Sizes    They are arguments; S and STRIDE, along w, are defined. With LAYER, the layer's epilogue is constant.
// Mapping  block -> a tile of y, `rows` x `quads` quads of a slice of an image, times 8 channels for each channel warp, all of one group;
//          blockIdx.x = (((image * o + slice) * tiles down + tile down) * tiles across + tile across) * k_tiles + k tile.
//          warp -> 8 channels, and 32 * QUADS quads; the lanes are neighbouring quads.
// Memory   shared: two buffers, which are filled and multiplied in turn. A buffer has some planes (the slices of x that the tile reads, of some
//          channels): the filter's numbers, [plane][r][s][channel], and the patch of x, [plane][row][phase][quad][4]. In a patch columns that are
//          STRIDE apart are neighbours, so that a quad reads vectors. Copies into one buffer are under way while the other is multiplied.
//          In the end sums pass through it if rows of y are no multiple of four.
//
// By hand: nvcc -cubin -arch=sm_90 -I cu cu/direct/quads.cu
#ifndef S
#define S 7
#define STRIDE 2
#define QUADS 2  // of a thread
#endif
#define MOMENTS 0
#include "mma/async_copy.cuh"
#include "core/finish.cuh"

constexpr int THREADS = 128, CHANNELS = 8;     // channels: of a thread
constexpr int PHASES = S < STRIDE ? S : STRIDE;  // columns modulo STRIDE that a tap reads
constexpr int TURNED = QUADS * 128;              // numbers of shared memory in which a warp transposes sums, if rows of y do not begin at vectors
constexpr int PAD = 4;                           // numbers behind the channels of a tap, so that copies use every bank once

// by_n is the divisor n, prepared (division.cuh).
struct DirectQuadsArguments {
  long long k_tiles, by_k_tiles, tiles_w, by_tiles_w, tiles_h, by_tiles_h, out_d, by_out_d;  // blocks along the grid's axes
  long long groups, group_tiles, by_group_tiles, cg, kg;   // k tiles of a group; channels of x and y of a group
  long long rows, quads, by_quads;                         // of a tile
  long long channel_shift;                                 // log2 of a block's warps with channels of their own
  long long planes, at_once;                               // channels of x times slices of the filter: all, and those of a buffer
  long long slices, by_slices, taps_r, taps, by_taps;      // of the filter: slices, rows of one, taps of one
  long long w_group, w_k, w_c, tap_first, tap_step;        // strides of the filter, in elements; its first tap, and the step to the next
  long long patch, patch_columns, by_patch_columns;        // numbers of a plane's patch, and of a row of it, as they are loaded
  long long phase, pitch, room;                            // numbers of shared memory of a phase, a row, a plane
  long long filter, buffer;                                // numbers of shared memory of the filter's planes, and of a buffer
  long long depth, height, width, p, q;                    // sizes of x and of y
  long long stride_d, stride_h, low_d, low_h, low_w, dilation_d, dilation_h;
  long long wide;                                          // whether rows of y begin at multiples of four elements
  long long has_bias, has_scale, has_residual, activation, slope;
};

// A block's tile.
struct Place {
  int image, slice, p, q, group, k;  // k: the block's first channel in the group
  DEVICE Place(const DirectQuadsArguments& arg) {
    const Divided of_k(blockIdx.x, arg.k_tiles, arg.by_k_tiles), of_w(of_k.quotient, arg.tiles_w, arg.by_tiles_w);
    const Divided of_h(of_w.quotient, arg.tiles_h, arg.by_tiles_h), of_d(of_h.quotient, arg.out_d, arg.by_out_d);
    const Divided of_group(of_k.rest, arg.group_tiles, arg.by_group_tiles);
    image = of_d.quotient, slice = of_d.rest, p = of_h.rest * (int)arg.rows, q = of_w.rest * (int)arg.quads * 4;
    group = of_group.quotient, k = of_group.rest << (int)arg.channel_shift + 3;
  }
};

// Starts the copies of `count` planes from `first` on into a buffer.
DEVICE void start(const DirectQuadsArguments& arg, const Place& tile, const float* x, const float* w, uint32_t buffer, int first, int count) {
  // the filter: lanes are 8 neighbouring taps of 4 channels
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, taps = (int)arg.taps, channels = CHANNELS << (int)arg.channel_shift;
  for (int tap = warp * 8 + lane % 8; tap < count * taps; tap += THREADS / 4) {
    const Divided of_plane(tap, arg.taps, arg.by_taps), of_channel(first + of_plane.quotient, arg.slices, arg.by_slices);
    const int number = (int)arg.tap_first + (of_channel.rest * taps + of_plane.rest) * (int)arg.tap_step;
    const float* const of_tap = w + tile.group * (int)arg.w_group + tile.k * (int)arg.w_k + of_channel.quotient * (int)arg.w_c + number;
    for (int channel = lane / 8; channel < channels; channel += 4) {
      const bool there = tile.k + channel < (int)arg.kg;
      copy_or_zero<4>(buffer + 4 * (tap * (channels + PAD) + channel), there ? of_tap + channel * (int)arg.w_k : w, there);
    }
  }
  // the patch: each thread copies the same places of every plane
  const int d0 = tile.slice * (int)arg.stride_d + (int)arg.low_d, h0 = tile.p * (int)arg.stride_h + (int)arg.low_h, w0 = tile.q * STRIDE + (int)arg.low_w;
  const int plane = (int)arg.height * (int)arg.width;
  for (int i = threadIdx.x; i < (int)arg.patch; i += THREADS) {
    const Divided of_row(i, arg.patch_columns, arg.by_patch_columns);
    const int h = h0 + of_row.quotient, column = w0 + of_row.rest, phase = of_row.rest % STRIDE;
    if (phase >= PHASES) continue;
    const bool inside = (unsigned)h < (unsigned)arg.height && (unsigned)column < (unsigned)arg.width;
    const int from = h * (int)arg.width + column;
    uint32_t to = buffer + 4 * ((int)arg.filter + of_row.quotient * (int)arg.pitch + phase * (int)arg.phase + of_row.rest / STRIDE);
    for (int j = 0; j < count; ++j) {
      const Divided of_channel(first + j, arg.slices, arg.by_slices);
      const int d = d0 + of_channel.rest * (int)arg.dilation_d;
      const bool there = inside && (unsigned)d < (unsigned)arg.depth;
      const int c = (tile.image * (int)arg.groups + tile.group) * (int)arg.cg + of_channel.quotient;
      copy_or_zero<4>(to, there ? x + (c * (int)arg.depth + d) * plane + from : x, there);
      to += 4 * (int)arg.room;
    }
  }
  copies_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, QUADS == 1 ? 5 : 4)
    direct_quads(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, const float* __restrict__ scale,
                 const float* residual, float* __restrict__ y, const __grid_constant__ DirectQuadsArguments arg) {
  AFTER_LAST_LAUNCH
  extern __shared__ __align__(16) float dynamic[];
  const Place tile(arg);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, shift = (int)arg.channel_shift, mine = (warp & (1 << shift) - 1) * CHANNELS;
  const int pitch_w = (CHANNELS << shift) + PAD, tap_rows = (int)arg.taps_r;

  // this thread's quads: their rows and columns in the tile, and the offset of their first vector in a plane's patch
  int row[QUADS], quad[QUADS], at[QUADS];
  bool used[QUADS];
#pragma unroll
  for (int i = 0; i < QUADS; ++i) {
    const int number = ((i << 2 - shift) + (warp >> shift)) * 32 + lane;
    used[i] = number < (int)(arg.rows * arg.quads);
    const Divided of_row(used[i] ? number : 0, arg.quads, arg.by_quads);
    row[i] = of_row.quotient, quad[i] = of_row.rest;
    at[i] = row[i] * (int)(arg.stride_h * arg.pitch) + 4 * quad[i];
  }

  float sum[CHANNELS][QUADS][4] = {};
  const int planes = (int)arg.planes, at_once = (int)arg.at_once;
  start(arg, tile, x, w, shared_address(dynamic), 0, min(at_once, planes));
  for (int first = 0, parity = 0; first < planes; first += at_once, parity ^= 1) {
    copies_wait<0>();
    __syncthreads();  // all copies have arrived, and all threads have read the other buffer
    const int next = first + at_once;
    if (next < planes) start(arg, tile, x, w, shared_address(dynamic + (parity ^ 1) * (int)arg.buffer), next, min(at_once, planes - next));
    const float* of_w = dynamic + parity * (int)arg.buffer + mine;
    const float* of_x = dynamic + parity * (int)arg.buffer + (int)arg.filter;
    for (int plane = 0; plane < min(at_once, planes - first); ++plane) {
      const float* x_row = of_x;
      for (int r = 0; r < tap_rows; ++r) {
        for_all<PHASES>([&](auto number) {
          constexpr int phase = decltype(number)::value, TAPS = (S - phase + STRIDE - 1) / STRIDE, VECTORS = 1 + (TAPS + 2) / 4;
          float v[QUADS][4 * VECTORS];
#pragma unroll
          for (int i = 0; i < QUADS; ++i)
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) *(float4*)(v[i] + 4 * j) = *(const float4*)(x_row + at[i] + phase * (int)arg.phase + 4 * j);
#pragma unroll
          for (int tap = 0; tap < TAPS; ++tap) {
            float weights[CHANNELS];
#pragma unroll
            for (int j = 0; j < CHANNELS; j += 4) *(float4*)(weights + j) = *(const float4*)(of_w + (phase + tap * STRIDE) * pitch_w + j);
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k)
#pragma unroll
              for (int i = 0; i < QUADS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[k][i][e] = fmaf(v[i][tap + e], weights[k], sum[k][i][e]);
          }
        });
        of_w += S * pitch_w;
        x_row += (int)(arg.dilation_h * arg.pitch);
      }
      of_x += (int)arg.room;
    }
  }

  // stores to y
  const int plane = (int)arg.p * (int)arg.q, channels = (int)(arg.groups * arg.kg), first_channel = tile.group * (int)arg.kg + tile.k + mine;
  // the offset of a quad's first pixel in a slice of y; and from one channel's slice to the next channel's
  const auto place_of = [&](int row, int quad) { return (tile.p + row) * (int)arg.q + tile.q + 4 * quad; };
  const int apart = (int)arg.out_d * plane;
  const int slice = ((tile.image * channels + first_channel) * (int)arg.out_d + tile.slice) * plane;
  const auto channel_finish = [&](int k) {
    Finish<false> finish;
    finish.of = ScaleAndBias(arg, scale, bias, first_channel + k);
    return finish;
  };
  const int of_group = min((int)arg.kg - tile.k - mine, CHANNELS);
  if (arg.wide) {
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) {
      if (k >= of_group) break;
      const Finish<false> finish = channel_finish(k);
#pragma unroll
      for (int i = 0; i < QUADS; ++i) {
        if (!used[i] || tile.p + row[i] >= (int)arg.p || tile.q + 4 * quad[i] >= (int)arg.q) continue;
        const int to = k * apart + place_of(row[i], quad[i]);
        float4 added = make_float4(-0.f, -0.f, -0.f, -0.f);
        if (has_residual(arg)) added = *(const float4*)(residual + slice + to);
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = finish.whole(arg, sum[k][i][e], 1, ((float*)&added)[e]);
        activate(arg, v);
        store_word(y + slice + to, *(const uint4*)v);
      }
    }
    return;
  }
  // A warp transposes its sums in shared memory, so that neighbouring lanes write neighbouring pixels.
  __syncthreads();  // all threads have read the last buffer
  float* const turned = dynamic + warp * TURNED;
  int places[QUADS][4];  // offsets of this lane's pixels, or -1
#pragma unroll
  for (int i = 0; i < QUADS; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int number = ((i << 2 - shift) + (warp >> shift)) * 32 + (e * 32 + lane) / 4;
      const Divided of_row(number, arg.quads, arg.by_quads);
      const bool inside = number < (int)(arg.rows * arg.quads) && tile.p + of_row.quotient < (int)arg.p && tile.q + 4 * of_row.rest + lane % 4 < (int)arg.q;
      places[i][e] = inside ? place_of(of_row.quotient, of_row.rest) + lane % 4 : -1;
    }
#pragma unroll
  for (int k = 0; k < CHANNELS; ++k) {
    if (k >= of_group) break;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) *(float4*)(turned + i * 128 + 4 * lane) = make_float4(sum[k][i][0], sum[k][i][1], sum[k][i][2], sum[k][i][3]);
    __syncwarp();
    const Finish<false> finish = channel_finish(k);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      float v[4], added[4] = {-0.f, -0.f, -0.f, -0.f};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (has_residual(arg) && places[i][e] >= 0) added[e] = residual[slice + k * apart + places[i][e]];
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = finish.whole(arg, turned[i * 128 + e * 32 + lane], 1, added[e]);
      activate(arg, v);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (places[i][e] >= 0) y[slice + k * apart + places[i][e]] = v[e];
    }
    __syncwarp();
  }
}
