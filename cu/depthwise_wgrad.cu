// depthwise_wgrad.cu: depthwise wgrad from arrays in C order, 16 bits and float32.
//
//   w[k,r,s] = sum over n,p,q of y[n,k,p,q] * x[n, k / multiplier, p*STRIDE - pad_h + r, q*STRIDE - pad_w + s]
//
// y is the gradient of the convolution's result. The sum over its pixels is cut into parts; direct_reduce.cu adds them in order.
//
// Mapping  block -> a channel k and one of `parts` of its units. blockIdx.x = part * channels + k.
//          warp -> one unit after another, `rounds` in all: `rows` rows of y of lanes_q groups of 4 columns, in `planes` images.
//          thread -> 4 columns of an image. It walks down the unit, a row of x each step, which meets up to TAPS rows of y that it keeps.
// Memory   registers: TAPS * TAPS sums, and the rows of y that the next rows of x meet. Shared: for each warp a ring of rows of x and y, which
//          arrive some steps before they are used, with zeros for what lies outside; in the end the sums of all threads.
// Words    Rows are copied by words of 4 bytes. In 16 bits a row may begin in the middle of a word: then its words begin one element earlier, and a thread
//          shifts them once it has read them. The element before a row of x, which is the end of another row, becomes a zero there.
// Edges    Rows of y above and below a unit, and columns past the last, are zeros, and are multiplied like all others. 0 x Inf of x is NaN,
//          so a sum that is not finite in the end is computed once more, without them.
// Limits   square filters, no dilation.
//
// By hand: nvcc -cubin -arch=sm_80 cu/depthwise_wgrad.cu
#ifndef TAPS
#define TYPE 17  // of x, y and the result: 16 half, 17 bfloat16, 32 float
#define TAPS 7
#define STRIDE 1
#endif
#include "async_copy.cuh"

typedef element<TYPE> data_t;
typedef word<data_t[4]> vector_t;
constexpr int EACH = 4 / (int)sizeof(data_t);  // elements of a word

constexpr int THREADS = 128, WARPS = THREADS / 32, TILE_Q = 4;
constexpr int COLUMNS = (TILE_Q - 1) * STRIDE + TAPS;  // of x, which the taps of a thread's pixels of a row of y read
constexpr int VECTORS = (COLUMNS + EACH + 2) / 4;      // of four elements, which hold these columns wherever a row begins
constexpr int LIVE = (TAPS - 1) / STRIDE + 1;                                       // the most rows of y that a row of x meets
constexpr int TURN = LIVE * STRIDE;                   // steps after which each row of y takes the place of the first
// words of a slot of the ring
constexpr int SLOT = EACH == 1 ? STRIDE == 1 ? 384 : 512 : STRIDE == 1 ? 224 : 288, SLOTS = EACH == 1 ? STRIDE == 1 ? 6 : 5 : STRIDE == 1 ? 8 : 6;
constexpr int MOST_COPIES = (4 * STRIDE + 4) / EACH, COPIES_Y = EACH == 1 ? TILE_Q : TILE_Q / EACH + 1;
#if __CUDA_ARCH__ >= 900
constexpr int BLOCKS = EACH == 2 && TAPS == 7 && STRIDE == 2 ? 3 : 4;  // blocks of a multiprocessor at once: more would spill
#else
constexpr int BLOCKS = 3;  // before Hopper four would spill
#endif
constexpr bool ROWS_APART = TYPE == 32;               // a row's products are added separately: short sums lose less
constexpr int PARTS = 8;                              // threads that add a tap's sums

// Copies a word whose first element is number `first` of a row of `end` elements. Elements outside the row become zeros, except a first one before an
// element 0 that is the word's second.
DEVICE void copy_word(uint32_t to, const data_t* from, int first, int end, bool there) {
#if TYPE == 32
  copy_or_zero<4>(to, from, there && (unsigned)first < (unsigned)end);
#else
  const int bytes = there && first >= -1 && first < end ? first + 1 < end ? 4 : 2 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}

// COUNT elements from `words` on, without the first one if the row begins in the middle of a word. Element `lost` belongs to another row.
template <int COUNT> DEVICE void unpack_words(float (&to)[COUNT], const uint32_t* words, bool shifted, int lost) {
#if TYPE == 32
#pragma unroll
  for (int i = 0; i < COUNT; ++i) to[i] = __uint_as_float(words[i]);
#else
  const uint32_t selector = shifted ? 0x5432 : 0x3210, kept = shifted ? 0xffff : 0xffff0000;
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    uint32_t word = __byte_perm(words[i / 2], words[i + 1 < COUNT ? i / 2 + 1 : i / 2], selector);
    if (i / 2 == lost >> 1) word &= kept;
#if TYPE == 17
    const float2 both = make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));  // one instruction each
#else
    const float2 both = __half22float2(*(const __half2*)&word);
#endif
    to[i] = both.x;
    if (i + 1 < COUNT) to[i + 1] = both.y;
  }
#endif
}

// How the rows of a part of a plane lie in words. Row 0 of the part begins with element `first` of the array, which is element `first_w` of its row; the
// plane's rows have `width` elements. A thread's own elements of a row begin with element `own_w`.
struct RowWords {
  int first_odd, turns;   // whether row 0 begins in the middle of a word, and whether that changes from row to row
  int before, lost_odd;   // which of its elements lies before the plane's row, and which rows bring it along
  DEVICE RowWords(long long first, int width, int first_w, int own_w)
      : first_odd(EACH - 1 & (int)first), turns(EACH - 1 & width), before(-1 - own_w), lost_odd(first_w & 1 ^ 1) {}
  DEVICE int odd(int row) const { return first_odd ^ row & turns; }
  template <int COUNT> DEVICE void unpack(float (&to)[COUNT], const uint32_t* words, int row) const {
    unpack_words(to, words, odd(row) != 0, odd(row) == lost_odd ? before : -1);
  }
};

// by_n is the divisor n, prepared (division.cuh).
struct DepthwiseWgradPlanesArguments {
  long long channels, by_channels, multiplier, by_multiplier, parts, rounds;  // channels of y; blocks that share a channel; units of a warp
  long long lanes_q, by_lanes_q, planes, pitch, copies;                       // pitch: words of a row of x of an image in a slot; copies: of such a row, by a lane
  long long units, tiles_q, by_tiles_q, strips, by_strips, rows;
  long long n, h, w, p, q, pad_h, pad_w;
};

// A warp's unit, as one of its threads sees it.
struct Unit {
  int image, p0, q0, rows, columns;  // first row, this thread's first column; how many rows and columns are real
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
    depthwise_wgrad(const data_t* __restrict__ x, const data_t* __restrict__ y, void* __restrict__ dw, const __grid_constant__ DepthwiseWgradPlanesArguments arg) {
  AFTER_LAST_LAUNCH
  __shared__ alignas(16) uint32_t memory[WARPS * SLOTS * SLOT];
  float* const sums = (float*)memory;
  static_assert(TAPS * TAPS * THREADS <= WARPS * SLOTS * SLOT, "the sums take the rings' place");
  const Divided of_channel(blockIdx.x, arg.channels, arg.by_channels);
  const int k = of_channel.rest, part = of_channel.quotient, warp = threadIdx.x / 32;
  const int c = Divided(k, arg.multiplier, arg.by_multiplier).quotient, channels_x = Divided((int)arg.channels, arg.multiplier, arg.by_multiplier).quotient;
  const Divided of_plane(threadIdx.x % 32, arg.lanes_q, arg.by_lanes_q);
  const int plane = of_plane.quotient, lane = of_plane.rest, lanes = (int)arg.lanes_q, works = plane < (int)arg.planes;
  const int h_end = (int)arg.h, w_end = (int)arg.w, p_end = (int)arg.p, q_end = (int)arg.q;
  const int pitch_y = lanes * (TILE_Q / EACH) + (EACH == 1 ? 0 : 2);
  const int of_x = works ? plane * (int)arg.pitch : 0, of_y = (int)(arg.planes * arg.pitch) + (works ? plane * pitch_y : 0);
  const uint32_t* const own = memory + warp * (SLOTS * SLOT);
  const uint32_t ring = shared_address(own);

  float sum[TAPS][TAPS] = {};
  for (int round = 0; round < (int)arg.rounds; ++round) {
    const int number = (part * (int)arg.rounds + round) * WARPS + warp;
    const Unit unit(arg, number, plane, lane);
    const int steps = ((int)arg.rows - 1) * STRIDE + TAPS, h0 = unit.p0 * STRIDE - (int)arg.pad_h;
    const int h_stop = min(h0 + (unit.rows - 1) * STRIDE + TAPS, h_end);
    const int first_q = unit.q0 - lane * TILE_Q, first_w = first_q * STRIDE - (int)arg.pad_w;  // of the unit
    const int w0 = first_w + lane * EACH, q0 = first_q + lane * EACH;                          // the first elements that this lane copies
    const data_t* from_x = x + (((long long)unit.image * channels_x + c) * h_end + h0) * w_end + w0;
    const data_t* from_y = y + (((long long)unit.image * (int)arg.channels + k) * p_end + unit.p0) * q_end + q0;
    const RowWords words_x((((long long)unit.image * channels_x + c) * h_end + h0) * w_end + first_w, w_end, first_w, unit.q0 * STRIDE - (int)arg.pad_w);
    const RowWords words_y((((long long)unit.image * (int)arg.channels + k) * p_end + unit.p0) * q_end + first_q, q_end, first_q, unit.q0);
    auto copy = [&](int i, bool with_y, int slot) {  // row i of x and, if its first tap is met, of y
      const bool row_of_x = unit.there && h0 + i >= 0 && h0 + i < h_stop, row_of_y = unit.there && i < unit.rows * STRIDE;
      const uint32_t to_x = ring + (slot + of_x + lane) * 4, to_y = ring + (slot + of_y + lane) * 4;
      if (works) {
        const int odd = words_x.odd(i);
#pragma unroll
        for (int j = 0; j < MOST_COPIES; ++j)
          if (j < (int)arg.copies && lane + j * lanes < (int)arg.pitch)
            copy_word(to_x + j * lanes * 4, from_x + (j * lanes * EACH - odd), w0 + j * lanes * EACH - odd, w_end, row_of_x);
      }
      from_x += w_end;
      if (with_y) {
        if (works) {
          const int odd = words_y.odd(i / STRIDE);
#pragma unroll
          for (int j = 0; j < COPIES_Y; ++j)
            if (EACH == 1 || j < TILE_Q / EACH || lane == 0)
              copy_word(to_y + j * lanes * 4, from_y + (j * lanes * EACH - odd), q0 + j * lanes * EACH - odd, q_end, row_of_y);
        }
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
        const uint32_t* const now = own + slot;
        before = slot;
        slot = slot == (SLOTS - 1) * SLOT ? 0 : slot + SLOT;
        if (turn % STRIDE == 0) {
          vector_t words[EACH];
          words[0] = *((const vector_t*)(now + of_y) + lane);
          if (EACH == 2) words[EACH - 1] = *((const vector_t*)(now + of_y) + lane + 1);
          words_y.unpack(grad[turn / STRIDE], (const uint32_t*)words, i / STRIDE);
        }
        if (h0 + i < 0 || h0 + i >= h_stop) continue;  // zeros
        vector_t words[VECTORS];
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) words[j] = *((const vector_t*)(now + of_x) + lane * STRIDE + j);
        float read[COLUMNS];
        words_x.unpack(read, (const uint32_t*)words, i);
#pragma unroll
        for (int r = turn % STRIDE; r < TAPS; r += STRIDE)
#pragma unroll
          for (int s = 0; s < TAPS; ++s) {
            float some = ROWS_APART ? 0 : sum[r][s];
#pragma unroll
            for (int j = 0; j < TILE_Q; ++j) some += grad[(turn / STRIDE + LIVE - r / STRIDE) % LIVE][j] * read[j * STRIDE + s];
            sum[r][s] = ROWS_APART ? sum[r][s] + some : some;
          }
      }
    }
    copies_wait<0>();
    __syncwarp();
  }

  __syncthreads();  // the rings have been read
  bool finite = true;
#pragma unroll
  for (int i = 0; i < TAPS * TAPS; ++i) {
    const float v = works ? sum[i / TAPS][i % TAPS] : 0;
    sums[i * THREADS + threadIdx.x] = v;
    finite &= v - v == 0;
  }
  for (int i = finite ? TAPS * TAPS : 0; i < TAPS * TAPS; ++i) {
    const float v = sums[i * THREADS + threadIdx.x];
    if (v - v == 0) continue;
    float all = 0;
    for (int round = 0; round < (int)arg.rounds; ++round) {
      const Unit unit(arg, (part * (int)arg.rounds + round) * WARPS + warp, plane, lane);
      if (!unit.there) continue;
      for (int row = 0; row < unit.rows; ++row)
        for (int j = 0; j < unit.columns; ++j) {
          const int p = unit.p0 + row, q = unit.q0 + j, h = p * STRIDE - (int)arg.pad_h + i / TAPS, w = q * STRIDE - (int)arg.pad_w + i % TAPS;
          if ((unsigned)h < (unsigned)h_end && (unsigned)w < (unsigned)w_end)
            all += to_float(y[(((long long)unit.image * (int)arg.channels + k) * p_end + p) * q_end + q]) *
                   to_float(x[(((long long)unit.image * channels_x + c) * h_end + h) * w_end + w]);
        }
    }
    sums[i * THREADS + threadIdx.x] = all;
  }
  __syncthreads();
  for (int first = 0; first < TAPS * TAPS * PARTS; first += THREADS) {
    const int i = (first + (int)threadIdx.x) / PARTS;
    float all = 0;
    if (i < TAPS * TAPS) {  // in pairs; no two threads that read at once use the same bank
      const float4* const from = (const float4*)(sums + (first + threadIdx.x) * (THREADS / PARTS));
#pragma unroll
      for (int j = 0; j < THREADS / PARTS / 4; ++j) {
        const float4 v = from[(j + threadIdx.x / 2) % (THREADS / PARTS / 4)];
        all += (v.x + v.y) + (v.z + v.w);
      }
    }
#pragma unroll
    for (int half = 1; half < PARTS; half *= 2) all += __shfl_xor_sync(~0u, all, half);
    if (i >= TAPS * TAPS || threadIdx.x % PARTS != 0) continue;
    const long long to = ((long long)part * (int)arg.channels + k) * (TAPS * TAPS) + i;
    if (arg.parts == 1) ((data_t*)dw)[to] = from_float<data_t>(all);
    else ((float*)dw)[to] = all;
  }
}
