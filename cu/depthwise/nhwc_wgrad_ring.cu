// nhwc_wgrad_ring.cu: depthwise wgrad from channels-last arrays, for common filters.
//
//   w[k,r,s] = sum over n,p,q of y[n,p,q,k] * x[n, p*STRIDE - pad_h + r, q*STRIDE - pad_w + s, k]
//
// y is the gradient of the convolution's result. The sum over its pixels is cut into parts; direct/reduce.cu adds them in order.
//
// Mapping  block -> lanes_c threads along channels, a part of a warp, and lanes_u along units. A unit is TILE_Q columns of y in `rows` of its rows; units
//          are ordered image, strip of rows, columns. A block has one of `parts` of the units, of which each thread takes `rounds` one after another.
//          blockIdx.x = part * blocks of channels + channels.
//          thread -> V channels, 4 bytes. It walks down each of its units, a row of x each step, which meets up to TAPS rows of y.
// Memory   registers: TAPS * TAPS * V sums, with BLOCKED twice, and the rows of y that the next rows of x meet, as a ring. Shared: for each warp a
//          ring of rows of x and y, which arrive some steps before they are used, with zeros for what lies outside;
//          in the end sums of AT_ONCE taps of all threads.
// Edges    Rows of y above and below a strip, and columns past the last, are zeros, and are multiplied like all others. 0 x Inf of x is NaN,
//          so a sum that is not finite in the end is computed once more, without them.
// Border   BORDERED texts copy the pixel that stands outside of x.
// Limits   square filters, no dilation, a filter for each channel of x, pixels of a multiple of 16 bytes.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/depthwise/nhwc_wgrad_ring.cu
#ifndef TAPS
#define TYPE 17    // of x, y and w: 16 half, 17 bfloat16, 32 float
#define TAPS 7
#define STRIDE 1
#endif
#ifndef BORDERED
#define BORDERED 0
#endif
#include "mma/async_copy.cuh"
#include "core/near_border.cuh"

typedef element<TYPE> data_t;

constexpr int V = 4 / (int)sizeof(data_t), THREADS = 128, TILE_Q = 4, COLUMNS = (TILE_Q - 1) * STRIDE + TAPS;
constexpr int LIVE = (TAPS - 1) / STRIDE + 1;   // the most rows of y that a row of x meets
constexpr int TURN = LIVE * STRIDE;             // steps after which each row of y takes the place of the first
constexpr int PIXEL = 32 * 4, SLOT = (COLUMNS + TILE_Q) * PIXEL;  // bytes of a warp's channels; of a slot of its ring
constexpr int FITTING = 44 * 1024 / (THREADS / 32 * SLOT), SLOTS = FITTING < 8 ? FITTING : 8;
constexpr int COPIES = (COLUMNS + 3) / 4;       // a thread's copies of x, 16 bytes each: the lanes_c threads of a unit copy four pixels at once
constexpr int ALL = TAPS * TAPS, AT_ONCE = 25 < ALL ? 25 : ALL, PITCH = THREADS * V + 1;
constexpr bool BLOCKED = TYPE == 32 && TAPS < 7;  // a unit's sums, and those of a row's columns, are made separately: short sums lose less
constexpr int SUMS = ALL * V, BLOCKS = SUMS < 50 ? 4 : SUMS < 64 ? 3 : 2;  // blocks of a multiprocessor at once
static_assert(AT_ONCE * PITCH * 4 <= THREADS / 32 * SLOTS * SLOT, "the sums take the rings' place");

// by_n is the divisor n, prepared (division.cuh).
struct DepthwiseRingArguments {
  long long lanes_c, by_lanes_c, lanes_u, blocks_c, by_blocks_c, parts, rounds;
  long long units, tiles_q, by_tiles_q, strips, by_strips, rows;
  long long k, h, w, p, q, pad_h, pad_w;
  long long side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;  // with BORDERED: what stands outside of x (near_border.cuh)
};

// A unit's image, its first row and column of y, and how many of these are real.
struct Unit {
  int image, p0, q0, rows, columns;
  DEVICE Unit(const DepthwiseRingArguments& arg, int unit) {
    const Divided of_q(unit, arg.tiles_q, arg.by_tiles_q), of_p(of_q.quotient, arg.strips, arg.by_strips);
    const bool there = unit < (int)arg.units;
    image = of_p.quotient;
    p0 = of_p.rest * (int)arg.rows;
    q0 = of_q.rest * TILE_Q;
    rows = there ? min((int)arg.p - p0, (int)arg.rows) : 0;
    columns = there ? min((int)arg.q - q0, TILE_Q) : 0;
  }
};

DEVICE void unpack(float (&to)[V], uint32_t word) {
#if TYPE == 32
  to[0] = __uint_as_float(word);
#else
#if TYPE == 17
  to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xffff0000);  // one instruction each
#else
  const float2 both = __half22float2(*(const __half2*)&word);
  to[0] = both.x, to[1] = both.y;
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_nhwc_wgrad_ring(const data_t* __restrict__ x, const data_t* __restrict__ y, float* __restrict__ w,
                              const __grid_constant__ DepthwiseRingArguments arg) {
  AFTER_LAST_LAUNCH
  __shared__ alignas(16) uint32_t memory[THREADS / 32 * SLOTS * SLOT / 4];
  const Divided of_channels(blockIdx.x, arg.blocks_c, arg.by_blocks_c), of_lanes(threadIdx.x, arg.lanes_c, arg.by_lanes_c);
  const int part = of_channels.quotient, lanes_c = (int)arg.lanes_c, lanes_u = (int)arg.lanes_u, lane_u = of_lanes.quotient, lane_c = of_lanes.rest;
  const int channels = lanes_c * V, first_k = of_channels.rest * channels, k = (int)arg.k;
  const int h_end = (int)arg.h, w_end = (int)arg.w, x_row = w_end * k, y_row = (int)arg.q * k;
  // the pixel of a unit, and the channels, that this thread copies: 16 bytes of every fourth pixel
  const int lane = threadIdx.x % 32, fours = lanes_c / 4, pixel = lane_c / fours, four = lane_c % fours, copied = first_k + four * (4 * V);
  const uint32_t* const own = memory + threadIdx.x / 32 * (SLOTS * SLOT / 4) + lane;
  const uint32_t ring = shared_address(own - lane) + pixel * PIXEL + (lane - lane_c + four * 4) * 4;

  float sum[TAPS][TAPS][V] = {};
  [[maybe_unused]] float total[TAPS][TAPS][V] = {};
  for (int round = 0; round < (int)arg.rounds; ++round) {
    const Unit unit(arg, (part * (int)arg.rounds + round) * lanes_u + lane_u);
    const int steps = ((int)arg.rows - 1) * STRIDE + TAPS;  // the same for all threads of a warp
    const int h0 = unit.p0 * STRIDE - (int)arg.pad_h, w0 = unit.q0 * STRIDE - (int)arg.pad_w;
    const int real = unit.rows > 0 && copied < k;
#if !BORDERED
    const int h_stop = min(h0 + (unit.rows - 1) * STRIDE + TAPS, h_end);
    const data_t* from_x = x + (((long long)unit.image * h_end + h0) * x_row + (long long)(w0 + pixel) * k + copied);  // may lie far above the image
#endif
    const data_t* from_y = y + (((long long)unit.image * (int)arg.p + unit.p0) * y_row + (long long)(unit.q0 + pixel) * k + copied);
#if BORDERED
    int column[COPIES];  // offset of the pixel that stands at each of this thread's; negative if it is zero
#pragma unroll
    for (int j = 0; j < COPIES; ++j) column[j] = near_pixel(w0 + pixel + j * 4, w_end, arg.side_w, arg.last_side_w) * k;
    const data_t* const image = x + ((long long)unit.image * h_end * x_row + copied);
    const data_t* in_place = image + (long long)h0 * x_row;  // the row that nearly always stands in its place
    const int h_last = unit.rows > 0 ? h0 + (unit.rows - 1) * STRIDE + TAPS : h0;
#endif
    auto copy = [&](int i, bool of_y, uint32_t to) {  // row i of x and, if its first tap is met, of y
#if BORDERED
      bool row_of_x = real && h0 + i < h_last;
      const data_t* line = in_place;
      if ((unsigned)(h0 + i) >= (unsigned)h_end) {
        const int row = near_pixel(h0 + i, h_end, arg.side_h, arg.last_side_h);
        row_of_x = row_of_x && row >= 0;
        line = image + (long long)row * x_row;
      }
      in_place += x_row;
#pragma unroll
      for (int j = 0; j < COPIES; ++j)
        if (j * 4 + 3 < COLUMNS || j * 4 + pixel < COLUMNS) copy_or_zero_by_lines(to + j * 4 * PIXEL, line + column[j], row_of_x && column[j] >= 0);
#else
      const bool row_of_x = real && h0 + i >= 0 && h0 + i < h_stop;
#pragma unroll
      for (int j = 0; j < COPIES; ++j)
        if (j * 4 + 3 < COLUMNS || j * 4 + pixel < COLUMNS)
          copy_or_zero_by_lines(to + j * 4 * PIXEL, from_x + j * 4 * k, row_of_x && (unsigned)(w0 + pixel + j * 4) < (unsigned)w_end);
      from_x += x_row;
#endif
      if (of_y) {
        copy_or_zero_by_lines(to + COLUMNS * PIXEL, from_y, real && i < unit.rows * STRIDE && pixel < unit.columns);
        from_y += y_row;
      }
      copies_commit();
    };
    float grad[LIVE][TILE_Q][V] = {};  // row p of y is number p % LIVE
    int slot = 0, before = (SLOTS - 1) * SLOT;  // of the row that is read, and of the one before it
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) copy(i, i % STRIDE == 0, ring + i * SLOT);
    for (int i0 = 0; i0 < steps; i0 += TURN) {
#pragma unroll
      for (int turn = 0; turn < TURN; ++turn) {
        const int i = i0 + turn;
        if (i >= steps) break;
        copies_wait<SLOTS - 2>();
        __syncwarp();  // all lanes' copies of the row are there, and all have read the one before
        copy(i + SLOTS - 1, (turn + SLOTS - 1) % STRIDE == 0, ring + before);
        const uint32_t* const row = own + slot / 4;
        before = slot;
        slot = slot == (SLOTS - 1) * SLOT ? 0 : slot + SLOT;
        if (turn % STRIDE == 0)
#pragma unroll
          for (int j = 0; j < TILE_Q; ++j) unpack(grad[turn / STRIDE][j], row[(COLUMNS + j) * 32]);
#if BORDERED
        if (h0 + i >= h_last) continue;
#else
        if (h0 + i < 0 || h0 + i >= h_stop) continue;  // zeros
#endif
        float read[COLUMNS][V];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) unpack(read[j], row[j * 32]);
#pragma unroll
        for (int r = turn % STRIDE; r < TAPS; r += STRIDE)
#pragma unroll
          for (int s = 0; s < TAPS; ++s)
#pragma unroll
            for (int v = 0; v < V; ++v) {
              float some = BLOCKED ? 0 : sum[r][s][v];
#pragma unroll
              for (int j = 0; j < TILE_Q; ++j) some += grad[(turn / STRIDE + LIVE - r / STRIDE) % LIVE][j][v] * read[j * STRIDE + s][v];
              sum[r][s][v] = BLOCKED ? sum[r][s][v] + some : some;
            }
      }
    }
    if (BLOCKED)
#pragma unroll
      for (int i = 0; i < ALL * V; ++i) {
        total[i / V / TAPS][i / V % TAPS][i % V] += sum[i / V / TAPS][i / V % TAPS][i % V];
        sum[i / V / TAPS][i / V % TAPS][i % V] = 0;
      }
    copies_wait<0>();
    __syncwarp();
  }
  if (BLOCKED)
#pragma unroll
    for (int i = 0; i < ALL * V; ++i) sum[i / V / TAPS][i / V % TAPS][i % V] = total[i / V / TAPS][i / V % TAPS][i % V];

  bool finite = true;
#pragma unroll
  for (int i = 0; i < ALL * V; ++i) finite &= sum[i / V / TAPS][i / V % TAPS][i % V] - sum[i / V / TAPS][i / V % TAPS][i % V] == 0;
  if (!finite && first_k + lane_c * V < k) {
    for (int which = 0; which < ALL * V; ++which) {
      const int tap = which / V, r = tap / TAPS, s = tap % TAPS, channel = first_k + lane_c * V + which % V;
      float all = 0;
      for (int round = 0; round < (int)arg.rounds; ++round) {
        const Unit unit(arg, (part * (int)arg.rounds + round) * lanes_u + lane_u);
        for (int i = 0; i < unit.rows; ++i)
          for (int j = 0; j < unit.columns; ++j) {
            const int p = unit.p0 + i, q = unit.q0 + j;
            int row = p * STRIDE - (int)arg.pad_h + r, column = q * STRIDE - (int)arg.pad_w + s;
#if BORDERED
            row = near_pixel(row, h_end, arg.side_h, arg.last_side_h);
            column = near_pixel(column, w_end, arg.side_w, arg.last_side_w);
#endif
            if ((unsigned)row < (unsigned)h_end && (unsigned)column < (unsigned)w_end)
              all += to_float(y[((long long)unit.image * (int)arg.p + p) * y_row + (long long)q * k + channel]) *
                     to_float(x[((long long)unit.image * h_end + row) * x_row + (long long)column * k + channel]);
          }
      }
#pragma unroll
      for (int i = 0; i < ALL * V; ++i)
        if (i == which) sum[i / V / TAPS][i / V % TAPS][i % V] = all;
    }
  }

  float* const sums = (float*)memory;
#pragma unroll
  for (int first = 0; first < ALL; first += AT_ONCE) {
    constexpr int more = ALL % AT_ONCE == 0 ? AT_ONCE : ALL % AT_ONCE;
    const int count = first + AT_ONCE <= ALL ? AT_ONCE : more;
    __syncthreads();  // what was there has been read
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
      for (int v = 0; v < V; ++v) sums[i * PITCH + lane_u * channels + lane_c * V + v] = sum[(first + i) / TAPS][(first + i) % TAPS][v];
    __syncthreads();
    for (int i = threadIdx.x; i < count * channels; i += THREADS) {
      const int channel = i / count, tap = i - channel * count;
      if (first_k + channel >= k) break;
      float all = 0;
      for (int j = 0; j < lanes_u; ++j) all += sums[tap * PITCH + j * channels + channel];
      w[((long long)part * k + first_k + channel) * ALL + first + tap] = all;
    }
  }
}
