// depthwise_wgrad.cu: the gradient of a depthwise convolution's filter, of float32 arrays in C order.
//
//   w[k,r,s] = sum over n,p,q of y[n,k,p,q] * x[n, k / multiplier, p*STRIDE - pad_h + r, q*STRIDE - pad_w + s]
//
// y is the gradient of the convolution's result. The sum over its pixels is cut into parts; direct_reduce.cu adds them in order.
//
// Mapping  block -> a channel k and one of `parts` of its units. blockIdx.x = part * channels + k.
//          warp -> one unit after another, `rounds` in all: `rows` rows of y of lanes_q groups of 4 columns, in `planes` images.
//          thread -> 4 columns of an image. It walks down the unit, a row of x a step, which meets up to TAPS kept rows of y.
// Memory   registers: TAPS * TAPS sums, and the rows of y that the next rows of x meet. Shared: of every warp a ring of rows of x and y, which
//          arrive some steps before they are needed, with zeros for what lies outside; in the end the sums of all threads.
// Edges    Rows of y above and below a unit, and columns behind the last, are zeros, and are multiplied like all others. An Inf of x may meet such a
//          zero. So a sum that is not finite in the end is added up once more, without them.
// Limits   square filters, no dilation.
//
// By hand: nvcc -cubin -arch=sm_80 cu/depthwise_wgrad.cu
#ifndef TAPS
#define TAPS 7
#define STRIDE 1
#endif
#include "async_copy.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, TILE_Q = 4;
constexpr int COLUMNS = (TILE_Q - 1) * STRIDE + TAPS, VECTORS = (COLUMNS + 3) / 4;  // of x, that a row of a thread's pixels of y meets
constexpr int LIVE = (TAPS - 1) / STRIDE + 1;                                       // rows of y that a row of x meets, at the most
constexpr int TURN = LIVE * STRIDE;                   // steps after which each row of y is where the first was
constexpr int SLOT = STRIDE == 1 ? 384 : 512, SLOTS = STRIDE == 1 ? 6 : 5;  // floats of a slot of the ring
constexpr int MOST_COPIES = 4 * STRIDE + 4;
#if __CUDA_ARCH__ >= 900
constexpr int BLOCKS = 4;                             // of a multiprocessor at once
#else
constexpr int BLOCKS = 3;                             // before Hopper four would spill
#endif
constexpr int PARTS = 8;                              // in which a tap's sums are added first

// by_n is the divisor n, prepared (division.cuh).
struct DepthwiseWgradPlanesArguments {
  long long channels, by_channels, multiplier, by_multiplier, parts, rounds;  // channels of y
  long long lanes_q, by_lanes_q, planes, pitch, copies;                       // pitch: floats of a row of x of an image in a slot; copies: of a lane, of it
  long long units, tiles_q, by_tiles_q, strips, by_strips, rows;
  long long n, h, w, p, q, pad_h, pad_w;
};

// A unit of a warp, as one of its threads sees it.
struct Unit {
  int image, p0, q0, rows, columns;  // first row, this thread's first column; how many rows and columns there are
  bool there;
  DEVICE Unit(const DepthwiseWgradPlanesArguments& arg, int unit, int plane, int lane) {
    const Divided of_q(unit, arg.tiles_q, arg.by_tiles_q), of_p(of_q.quotient, arg.strips, arg.by_strips);
    image = of_p.quotient * (int)arg.planes + plane;
    p0 = of_p.rest * (int)arg.rows;
    q0 = (of_q.rest * (int)arg.lanes_q + lane) * TILE_Q;
    there = unit < (int)arg.units && image < (int)arg.n && plane < (int)arg.planes;
    rows = min((int)arg.p - p0, (int)arg.rows);
    columns = there ? max(min((int)arg.q - q0, TILE_Q), 0) : 0;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_wgrad(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ dw, const __grid_constant__ DepthwiseWgradPlanesArguments arg) {
  AFTER_LAST_LAUNCH
  __shared__ alignas(16) float memory[WARPS * SLOTS * SLOT];
  static_assert(TAPS * TAPS * THREADS <= WARPS * SLOTS * SLOT, "the sums take the rings' place");
  const Divided of_channel(blockIdx.x, arg.channels, arg.by_channels);
  const int k = of_channel.rest, part = of_channel.quotient, warp = threadIdx.x / 32;
  const int c = Divided(k, arg.multiplier, arg.by_multiplier).quotient, channels_x = Divided((int)arg.channels, arg.multiplier, arg.by_multiplier).quotient;
  const Divided of_plane(threadIdx.x % 32, arg.lanes_q, arg.by_lanes_q);
  const int plane = of_plane.quotient, lane = of_plane.rest, lanes = (int)arg.lanes_q, works = plane < (int)arg.planes;
  const int h_end = (int)arg.h, w_end = (int)arg.w, p_end = (int)arg.p, q_end = (int)arg.q;
  const int of_x = works ? plane * (int)arg.pitch : 0, of_y = (int)(arg.planes * arg.pitch) + (works ? plane * lanes * TILE_Q : 0);
  float* const own = memory + warp * (SLOTS * SLOT);
  const uint32_t ring = shared_address(own);

  float sum[TAPS][TAPS] = {};
  for (int round = 0; round < (int)arg.rounds; ++round) {
    const int number = (part * (int)arg.rounds + round) * WARPS + warp;
    const Unit unit(arg, number, plane, lane);
    const int steps = ((int)arg.rows - 1) * STRIDE + TAPS, h0 = unit.p0 * STRIDE - (int)arg.pad_h;
    const int h_stop = min(h0 + (unit.rows - 1) * STRIDE + TAPS, h_end);
    const int w0 = (unit.q0 - lane * TILE_Q) * STRIDE - (int)arg.pad_w + lane, q0 = unit.q0 - lane * TILE_Q + lane;  // the first that this lane copies
    const float* from_x = x + (((long long)unit.image * channels_x + c) * h_end + h0) * w_end + w0;
    const float* from_y = y + (((long long)unit.image * (int)arg.channels + k) * p_end + unit.p0) * q_end + q0;
    auto copy = [&](int i, bool with_y, int slot) {  // row i of x and, if its first tap is met, of y
      const bool row_of_x = unit.there && h0 + i >= 0 && h0 + i < h_stop, row_of_y = unit.there && i < unit.rows * STRIDE;
      const uint32_t to_x = ring + (slot + of_x + lane) * 4, to_y = ring + (slot + of_y + lane) * 4;
      if (works)
#pragma unroll
        for (int j = 0; j < MOST_COPIES; ++j)
          if (j < (int)arg.copies && lane + j * lanes < (int)arg.pitch)
            copy_or_zero<4>(to_x + j * lanes * 4, from_x + j * lanes, row_of_x && (unsigned)(w0 + j * lanes) < (unsigned)w_end);
      from_x += w_end;
      if (with_y) {
        if (works)
#pragma unroll
          for (int j = 0; j < TILE_Q; ++j) copy_or_zero<4>(to_y + j * lanes * 4, from_y + j * lanes, row_of_y && q0 + j * lanes < q_end);
        from_y += q_end;
      }
      copies_commit();
    };
    float grad[LIVE][TILE_Q] = {};  // row p of y is number p % LIVE
    int slot = 0, before = (SLOTS - 1) * SLOT;  // of the row that is read, and of the one before it
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) copy(i, i % STRIDE == 0, i * SLOT);
    for (int i0 = 0; i0 < steps; i0 += TURN) {
#pragma unroll
      for (int turn = 0; turn < TURN; ++turn) {
        const int i = i0 + turn;
        if (i >= steps) break;
        copies_wait<SLOTS - 2>();
        __syncwarp();  // all lanes' copies of the row are there, and all have read the one before
        copy(i + SLOTS - 1, (turn + SLOTS - 1) % STRIDE == 0, before);
        const float* const now = own + slot;
        before = slot;
        slot = slot == (SLOTS - 1) * SLOT ? 0 : slot + SLOT;
        if (turn % STRIDE == 0) {
          const float4 v = *((const float4*)(now + of_y) + lane);
          float(&to)[TILE_Q] = grad[turn / STRIDE];
          to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
        if (h0 + i < 0 || h0 + i >= h_stop) continue;  // zeros
        float4 read[VECTORS];
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) read[j] = *((const float4*)(now + of_x) + lane * STRIDE + j);
#pragma unroll
        for (int r = turn % STRIDE; r < TAPS; r += STRIDE)
#pragma unroll
          for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
            for (int s = 0; s < TAPS; ++s) sum[r][s] += grad[(turn / STRIDE + LIVE - r / STRIDE) % LIVE][j] * ((const float*)read)[j * STRIDE + s];
      }
    }
    copies_wait<0>();
    __syncwarp();
  }

  __syncthreads();  // the rings have been read
#pragma unroll
  for (int i = 0; i < TAPS * TAPS; ++i) {
    float v = works ? sum[i / TAPS][i % TAPS] : 0;
    memory[i * THREADS + threadIdx.x] = v;
  }
  for (int i = 0; i < TAPS * TAPS; ++i) {
    const float v = memory[i * THREADS + threadIdx.x];
    if (v - v == 0) continue;
    float all = 0;
    for (int round = 0; round < (int)arg.rounds; ++round) {
      const Unit unit(arg, (part * (int)arg.rounds + round) * WARPS + warp, plane, lane);
      if (!unit.there) continue;
      for (int row = 0; row < unit.rows; ++row)
        for (int j = 0; j < unit.columns; ++j) {
          const int p = unit.p0 + row, q = unit.q0 + j, h = p * STRIDE - (int)arg.pad_h + i / TAPS, w = q * STRIDE - (int)arg.pad_w + i % TAPS;
          if ((unsigned)h < (unsigned)h_end && (unsigned)w < (unsigned)w_end)
            all += y[(((long long)unit.image * (int)arg.channels + k) * p_end + p) * q_end + q] *
                   x[(((long long)unit.image * channels_x + c) * h_end + h) * w_end + w];
        }
    }
    memory[i * THREADS + threadIdx.x] = all;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TAPS * TAPS * PARTS; i += THREADS) {
    float some = 0;
    for (int j = 0; j < THREADS / PARTS; ++j) some += memory[i * (THREADS / PARTS) + (j + threadIdx.x) % (THREADS / PARTS)];
    memory[i * (THREADS / PARTS)] = some;  // nobody else reads these
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TAPS * TAPS; i += THREADS) {
    float all = 0;
    for (int j = 0; j < PARTS; ++j) all += memory[i * THREADS + j * (THREADS / PARTS)];
    dw[((long long)part * (int)arg.channels + k) * (TAPS * TAPS) + i] = all;
  }
}
