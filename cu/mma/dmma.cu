// dmma.cu: float64 convolutions on the tensor cores (DMMA) of Ampere and Hopper, from arrays as they lie.
//
//   y[m, pixel] = activation(scale[m] * sum over k of A[m, k] * B[k, pixel] + bias[m] + residual[m, pixel])
//   gemm m: output channel of the group | gemm n: pixel (n,o,p,q) of the batch | gemm k: (c,t,r,s), or (t,r,s,c) with channels_inside
//   A[m, (c,t,r,s)]     = w[w_base + g*w_group + m*w_row + c*w_channel + t*w_t + r*w_r + s*w_s]
//   B[(c,t,r,s), pixel] = x[n, g, c, o*stride_d - pad_d + t*dilation_d, p*stride_h - pad_h + r*dilation_h, q*stride_w - pad_w + s*dilation_w]
//
// The product is direct/gemm.cu's with other arithmetic: chains of IEEE fused multiply-adds, as on the plain cores, at up to four times their rate. With
// CHAINS a chain has 64 products, and chains are added up. Nothing is scaled or split, so Inf, NaN and subnormal numbers need no path of their own.
// As there, dgrad is a launch for each stride phase, and wgrad exchanges images and channels. But here one launch
// computes neighbouring phases that read the same pixels: they count as channels, `phases` for each of y. If neither rows of k nor rows of
// channels are contiguous in the filter (several taps with channels last, or dgrad), dmma_filter packs it before.
//
// Mapping  block -> BLOCK_M channels x BLOCK_N pixels; blockIdx.x = ((pixel tile * groups + g) * splits + split) * tiles_m + m tile: blocks
//          that share pixels are neighbours. warp -> WARP_M x WARP_N of these, as fragments of 16 x 8.
// Loads    cp.async copies 16 or 8 bytes, or zeros for what lies outside. Apart from a pixel's corner and a channel's row, an element's offset in x and
//          w depends on k alone: a thread for each k of a stage writes a table of these, STAGES stages ahead. With ONE_TAP
//          there is no table: k is the channel. Stages past the last one are copied as zeros, so that the loop needs no branches.
// Products A warp multiplies slices of 8 k, one column of fragments after the other. It reads fragments AHEAD columns ahead, across slices and
//          stages: the next stage's first reads go beside this one's last products, behind the stage's one barrier. So the products keep
//          the tensor cores busy with one or two warps a scheduler.
// Memory   shared: a ring of STAGES stages of BLOCK_K of k: with 16 of k, 8 KB for 64 channels and about as much for 64 pixels. A lies as rows of k,
//          whose chunks of 32 bytes are at chunk ^ row % 4 (A_IN_ROWS_OF_K), or as rows of channels, BLOCK_M + 4 apart. B lies as rows of k,
//          too (B_IN_ROWS_OF_K), or as rows of pixels, BLOCK_N + 4 apart. So the 4 rows and 4 k that half a warp reads at once, 8 bytes a lane,
//          are in 32 different banks, and each element arrives in the register where the instruction wants it.
// Registers  32 or 64 sums of 8 bytes a thread, and 24 numbers of fragments; with CHAINS 32 sums of the current chain and 32 totals.
// Split    splits > 1 cuts the sum over k: every part goes to a workspace [splits][size of y], and direct/reduce.cu adds them in order.
//
// By hand: nvcc -cubin -arch=sm_90 -I cu cu/mma/dmma.cu
#ifndef BLOCK_M
#define BLOCK_M 64
#define BLOCK_N 64
#define WARP_M 32
#define WARP_N 32
#define SLICES 2        // of 8 k, in a stage
#define STAGES 4
#define MIN_BLOCKS 2
#define CHAINS 1        // sums are cut into chains
#define A_IN_ROWS_OF_K 1  // w is copied along k, or else along the channels of y, whichever are neighbours in it
#define A_VEC 2         // elements of A in a copy: 2 if they are neighbours in w, and all such pairs begin at 16 bytes
#define B_IN_ROWS_OF_K 0  // x is copied along k, whose elements are neighbours in it, or else along pixels
#define B_VEC 1         // elements of B in a copy
#define ONE_TAP 0       // k is the channel alone, and no pixel reads outside an image
#endif
#include "mma/async_copy.cuh"

typedef double acc_t;
#include "core/activation.cuh"

typedef long long long_t;

struct DmmaArguments {
  long_t pixels;                                // pixels of all images: gemm n
  long_t rows;                                  // output channels of a group: gemm m
  long_t reduction;                             // gemm k: channels of a group times taps; 0 in a phase without taps
  long_t groups, splits, split_steps, tiles_m;  // split_steps: stages of a part of a split sum
  long_t channels_inside;                       // whether the channel is the innermost part of k, or else the tap
  long_t inner, rs, s;                          // the extent of the innermost part; r*s and s of the filter
  long_t by_inner, by_rs, by_s;                 // these as divisors
  long_t opq, pq, q;                            // pixels of an image, of a plane, of a row of the result
  long_t by_opq, by_pq, by_q;                   // these as divisors
  long_t d, h, w;                               // size of an image of x
  long_t stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w;
  long_t w_base, w_group, w_row, w_channel, w_t, w_r, w_s;  // strides of the filter, in elements
  long_t x_image, x_group, x_channel, x_pixel;
  long_t y_image, y_group, y_channel, y_pixel;
  long_t y_base, y_d, y_h, y_w;                 // offsets in a plane of y: of the phase's first pixel, and from one pixel to the next
  long_t phases, phases_hw, phases_w;           // neighbouring phases, those of a plane and of a row: channel m here is channel m / phases of y
  long_t by_phases, by_phases_hw, by_phases_w;  // these as divisors
  long_t phase_d, phase_h, phase_w;             // elements of y from one phase to the next
  long_t size;                                  // elements of y, and of a part of a split sum
  long_t pairs;                                 // whether two neighbouring columns are neighbours in y too, at multiples of 16 bytes
  long_t has_scale, has_bias, has_residual, activation, slope;  // what finishes a sum; slope: a double's bits
};

constexpr int BLOCK_K = 8 * SLICES, WARPS_M = BLOCK_M / WARP_M, WARPS_N = BLOCK_N / WARP_N, THREADS = 32 * WARPS_M * WARPS_N;
constexpr int PROMOTION = 8 / SLICES;                                        // stages of a chain
constexpr int ROW = 8 * BLOCK_K;                                             // bytes of a row of k
constexpr int B_PITCH = 8 * (BLOCK_N + 4);                                   // bytes of a row of pixels
constexpr int A_PITCH = 8 * (BLOCK_M + 4);                                   // bytes of a row of channels
constexpr int A_BYTES = A_IN_ROWS_OF_K ? BLOCK_M * ROW : BLOCK_K * A_PITCH, B_BYTES = B_IN_ROWS_OF_K ? BLOCK_N * ROW : BLOCK_K * B_PITCH;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int OUTSIDE = -(1 << 30);                                          // a coordinate outside every image
constexpr int FRAGMENTS_M = WARP_M / 16, FRAGMENTS_N = WARP_N / 8;
constexpr int QUADS = 2, PLACES = SLICES * FRAGMENTS_N;                      // a slice's k by four; a stage's places: a column of fragments in a slice
constexpr int AHEAD = FRAGMENTS_N < 4 ? 1 : 3;                               // places by which fragments are read before they are multiplied
constexpr int TABLES = STAGES <= 4 ? 4 : 8;
static_assert(WARP_M % 16 == 0 && WARP_N % 8 == 0, "fragments are 16 x 8");
static_assert(PLACES % (AHEAD + 1) == 0 && FRAGMENTS_N > AHEAD, "fragments have the same registers in every stage");
static_assert(STAGES >= 3 && STAGES <= TABLES, "a stage is copied two before it is read; tables of all are written at once");
static_assert(BLOCK_M % 16 == 0 && BLOCK_N % 16 == 0, "rows of channels and of pixels meet all banks");
static_assert(STAGE_BYTES % 128 == 0, "pieces of a row keep their places");

struct Tables {
  int4 x[TABLES][BLOCK_K];  // offset in x; d, h, w
  int w[TABLES][BLOCK_K];   // offset in w, or -1
  int4 corner[BLOCK_N];  // of a pixel: offset in x, and d, h, w, of its first tap
  int y[BLOCK_N];       // a pixel's offset in y, or -1
};

// Copies `bytes` bytes, or zeros. An address of 16 bytes must be a multiple of 16, even if nothing is read.
template <int bytes> DEVICE void copy(uint32_t to, const double* from, bool there) {
  copy_or_zero<bytes>(to, bytes == 16 ? (const void*)((unsigned long long)from & ~15ull) : from, there);
}

DEVICE int4 load4(uint32_t at) {
  int4 v;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
DEVICE void load(int& a, uint32_t at) { asm volatile("ld.shared.s32 %0, [%1];" : "=r"(a) : "r"(at)); }
DEVICE void load(double& a, uint32_t at) { asm volatile("ld.shared.f64 %0, [%1];" : "=d"(a) : "r"(at)); }

// The offset of element k of a row of k.
DEVICE int in_row(int row, int k) { return row * ROW + ((k / 4 ^ row % 4) << 5) + k % 4 * 8; }
// The address of the same k `rows` rows below `at`, an address by in_row for one of the first rows; `rows` is a multiple of their number.
DEVICE uint32_t below(uint32_t at, int rows) { return (at ^ (rows % 4 << 5)) + rows * ROW; }

// d += a b for 16 rows, 8 columns and a slice of k; a[half of the rows][k], b[k].
DEVICE void multiply(double (&d)[4], const double (&a)[2][QUADS], const double (&b)[QUADS]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
               : "d"(a[0][0]), "d"(a[1][0]), "d"(a[0][1]), "d"(a[1][1]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
  for (int k = 0; k < QUADS; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                   : "+d"(d[2 * half]), "+d"(d[2 * half + 1])
                   : "d"(a[half][k]), "d"(b[k]));
#endif
}

// Writes the table's entry of k. Nothing is copied from `end` on.
DEVICE void tabulate(const DmmaArguments& p, int k, int end, int4& of_x, int& of_w) {
  const int outer = divided(k, p.by_inner), inner = k - outer * (int)p.inner;
  const int c = p.channels_inside ? inner : outer, tap = p.channels_inside ? outer : inner;
  const int t = divided(tap, p.by_rs), rs = tap - t * (int)p.rs, r = divided(rs, p.by_s), s = rs - r * (int)p.s;
  const int d = t * (int)p.dilation_d, h = r * (int)p.dilation_h, w = s * (int)p.dilation_w;
  const bool some = k < end;
  of_x = make_int4(c * (int)p.x_channel + ((d * (int)p.h + h) * (int)p.w + w) * (int)p.x_pixel, some ? d : OUTSIDE, h, w);
  of_w = some ? (int)p.w_base + c * (int)p.w_channel + t * (int)p.w_t + r * (int)p.w_r + s * (int)p.w_s : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    dmma(const double* __restrict__ x, const double* __restrict__ w, const double* __restrict__ bias, const double* __restrict__ scale,
         const double* residual, double* y, const __grid_constant__ DmmaArguments p) {
  extern __shared__ __align__(128) uint8_t ring_memory[];
  __shared__ Tables tables;
  const uint32_t ring = shared_address(ring_memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, c = lane % 4;
  int block = blockIdx.x;
  const int m0 = block % (int)p.tiles_m * BLOCK_M;
  block /= (int)p.tiles_m;
  const int split = block % (int)p.splits;
  block /= (int)p.splits;
  const int g = block % (int)p.groups, pixel0 = block / (int)p.groups * BLOCK_N;

  // the offset of pixel i of the tile in y, or -1, and the corner of what it reads
  auto place = [&](int i, int4& corner, int& of_y) {
    const int pixel = pixel0 + i, n = divided(pixel, p.by_opq), opq = pixel - n * (int)p.opq;
    const int o = divided(opq, p.by_pq), pq = opq - o * (int)p.pq, row = divided(pq, p.by_q), column = pq - row * (int)p.q;
    const int d = o * (int)p.stride_d - (int)p.pad_d, h = row * (int)p.stride_h - (int)p.pad_h, v = column * (int)p.stride_w - (int)p.pad_w;
    const int at = n * (int)p.x_image + g * (int)p.x_group + ((d * (int)p.h + h) * (int)p.w + v) * (int)p.x_pixel;
    const bool some = pixel < (int)p.pixels;
    corner = make_int4(at, some ? d : OUTSIDE, h, v);
    const int in_plane = (int)p.y_base + o * (int)p.y_d + row * (int)p.y_h + column * (int)p.y_w;
    of_y = some ? n * (int)p.y_image + g * (int)p.y_group + in_plane * (int)p.y_pixel : -1;
  };
  const int steps = ((int)p.reduction + BLOCK_K - 1) / BLOCK_K, first = split * (int)p.split_steps;
  const int count = max(0, min(steps - first, (int)p.split_steps)), end = min((int)p.reduction, (first + count) * BLOCK_K);
#if !ONE_TAP
  for (int i = thread; i < BLOCK_N; i += THREADS) place(i, tables.corner[i], tables.y[i]);
  auto write_table = [&](int step, int i) {
    tabulate(p, (first + step) * BLOCK_K + i, end, tables.x[step % TABLES][i], tables.w[step % TABLES][i]);
  };
  for (int i = thread; i < STAGES * BLOCK_K; i += THREADS) write_table(i / BLOCK_K, i % BLOCK_K);
  __syncthreads();
#endif

  // this thread's copies: always the same k of a stage, of every so many rows; or some rows of k, of one channel or pixel each, or two
#if A_IN_ROWS_OF_K
  constexpr int A_COLUMNS = BLOCK_K / A_VEC, A_APART = THREADS / A_COLUMNS, A_COPIES = BLOCK_M / A_APART;
  static_assert((A_APART == 2 || A_APART % 4 == 0) && BLOCK_M % A_APART == 0, "below");
  const int a_k = thread % A_COLUMNS * A_VEC, a_row = thread / A_COLUMNS;
  const uint32_t to_a = ring + in_row(a_row, a_k);
#else
  constexpr int A_COLUMNS = BLOCK_M / A_VEC, A_COPIES = BLOCK_K * BLOCK_M / A_VEC / THREADS;
  static_assert(THREADS % A_COLUMNS == 0, "a thread has one channel, or two neighbours");
  const int a_row = thread % A_COLUMNS * A_VEC, a_k = thread / A_COLUMNS * A_COPIES;
  const uint32_t to_a = ring + a_k * A_PITCH + a_row * 8;
#endif
  const double* const w_row = w + (ONE_TAP ? p.w_base : 0) + (long_t)g * p.w_group + (long_t)(m0 + a_row) * p.w_row;
#if A_IN_ROWS_OF_K
  const long_t w_apart = A_APART * p.w_row;
#endif
  const int rows = (int)p.rows - m0 - a_row;  // from this thread's first row on

  constexpr int B_COPIES = BLOCK_K * BLOCK_N / B_VEC / THREADS;
#if B_IN_ROWS_OF_K
  constexpr int B_COLUMNS = BLOCK_K / B_VEC, B_APART = THREADS / B_COLUMNS;  // pixels from one of a thread's copies to the next
  static_assert((B_APART == 2 || B_APART % 4 == 0) && BLOCK_N % B_APART == 0, "below");
  const int b_k = thread % B_COLUMNS * B_VEC, b_pixel = thread / B_COLUMNS;
  const uint32_t to_b = ring + A_BYTES + in_row(b_pixel, b_k), corners = shared_address(tables.corner + b_pixel);
#else
  constexpr int B_COLUMNS = BLOCK_N / B_VEC;
  static_assert(THREADS % B_COLUMNS == 0, "a thread has one pixel, or two neighbours");
  const int b_pixel = thread % B_COLUMNS * B_VEC, b_k = thread / B_COLUMNS * B_COPIES;
  const uint32_t to_b = ring + A_BYTES + b_k * B_PITCH + b_pixel * 8;
#if ONE_TAP
  int4 corner;
  int of_y;
  place(b_pixel, corner, of_y);
#else
  const int4 corner = tables.corner[b_pixel];
#endif
  const double* const x_pixel = x + corner.x;
#endif

  // The copies of a stage to the ring's slot at `at`, in parts, one for each place: a part's table entries are read before the place's products,
  // and its copies are issued after them.
  constexpr int A_PART = (A_COPIES + PLACES - 1) / PLACES, B_PART = (B_COPIES + PLACES - 1) / PLACES;
#if ONE_TAP
  static_assert(!B_IN_ROWS_OF_K, "pixels are copied along a row");
  [[maybe_unused]] const int w_channel = (int)p.w_channel;
  const int x_channel = (int)p.x_channel;
  const bool there = corner.y != OUTSIDE;
  auto look_up = [&](int, int) {};
  auto fetch = [&](int step, uint32_t at, int part) {
    const int k = (first + step) * BLOCK_K;
#pragma unroll
    for (int i = part * A_PART; i < min((part + 1) * A_PART, A_COPIES); ++i) {
#if A_IN_ROWS_OF_K
      copy<8 * A_VEC>(below(to_a + at, i * A_APART), w_row + (k + a_k) + i * w_apart, k + a_k < end && i * A_APART < rows);
#else
      copy<8 * A_VEC>(to_a + at + i * A_PITCH, w_row + (long_t)(k + a_k + i) * w_channel, k + a_k + i < end && 0 < rows);
#endif
    }
#pragma unroll
    for (int i = part * B_PART; i < min((part + 1) * B_PART, B_COPIES); ++i)
      copy<8 * B_VEC>(to_b + at + i * B_PITCH, x_pixel + (k + b_k + i) * x_channel, there && k + b_k + i < end);
  };
#else
  const uint32_t tables_w = shared_address(tables.w[0] + a_k), tables_x = shared_address(tables.x[0] + b_k);
  auto inside = [&](const int4& at, const int4& tap) {
    return (unsigned)(at.y + tap.y) < (unsigned)p.d && (unsigned)(at.z + tap.z) < (unsigned)p.h && (unsigned)(at.w + tap.w) < (unsigned)p.w;
  };
  int of_w[A_IN_ROWS_OF_K ? 1 : A_PART];
  [[maybe_unused]] int4 tap, of_x[B_PART];
  auto look_up = [&](int step, int part) {
    const uint32_t of_step = tables_x + step % TABLES * (BLOCK_K * 16), of_step_w = tables_w + step % TABLES * (BLOCK_K * 4);
    if (part == 0) {
#if A_IN_ROWS_OF_K
      load(of_w[0], of_step_w);
#endif
#if B_IN_ROWS_OF_K
      tap = load4(of_step);
#endif
    }
#if !A_IN_ROWS_OF_K
#pragma unroll
    for (int i = part * A_PART; i < min((part + 1) * A_PART, A_COPIES); ++i) load(of_w[i - part * A_PART], of_step_w + i * 4);
#endif
#pragma unroll
    for (int i = part * B_PART; i < min((part + 1) * B_PART, B_COPIES); ++i)
#if B_IN_ROWS_OF_K
      of_x[i - part * B_PART] = load4(corners + i * B_APART * 16);
#else
      of_x[i - part * B_PART] = load4(of_step + i * 16);
#endif
  };
  auto fetch = [&](int, uint32_t at, int part) {
#pragma unroll
    for (int i = part * A_PART; i < min((part + 1) * A_PART, A_COPIES); ++i) {
#if A_IN_ROWS_OF_K
      copy<8 * A_VEC>(below(to_a + at, i * A_APART), w_row + of_w[0] + i * w_apart, of_w[0] >= 0 && i * A_APART < rows);
#else
      const int of = of_w[i - part * A_PART];
      copy<8 * A_VEC>(to_a + at + i * A_PITCH, w_row + of, of >= 0 && 0 < rows);
#endif
    }
#pragma unroll
    for (int i = part * B_PART; i < min((part + 1) * B_PART, B_COPIES); ++i) {
      const int4& of = of_x[i - part * B_PART];
#if B_IN_ROWS_OF_K
      copy<8 * B_VEC>(below(to_b + at, i * B_APART), x + of.x + tap.x, inside(of, tap));
#else
      copy<8 * B_VEC>(to_b + at + i * B_PITCH, x_pixel + of.x, inside(corner, of));
#endif
    }
  };
#endif

  AFTER_LAST_LAUNCH
  for (int step = 0; step < STAGES - 1; ++step) {
#pragma unroll
    for (int part = 0; part < PLACES; ++part) {
      look_up(step, part);
      fetch(step, step * STAGE_BYTES, part);
    }
    copies_commit();
  }
#if ONE_TAP  // while the first copies arrive
  for (int i = thread; i < BLOCK_N; i += THREADS) {
    int4 ignored;
    place(i, ignored, tables.y[i]);
  }
#endif

  double sum[FRAGMENTS_M][FRAGMENTS_N][4];
#if CHAINS
  double total[FRAGMENTS_M][FRAGMENTS_N][4];
#else
  auto& total = sum;
#endif
#pragma unroll
  for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][j][e] = total[i][j][e] = 0;
  auto promote = [&](int j) {  // a longer chain would lose more
#if CHAINS
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[i][j][e] += sum[i][j][e];
        sum[i][j][e] = 0;
      }
#endif
  };

  const int warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;
  uint32_t of_a[SLICES * QUADS], of_b[SLICES * QUADS];  // offsets of k = 4 i + c of a stage in the warp's first rows
#pragma unroll
  for (int i = 0; i < SLICES * QUADS; ++i) {
    const int k = 4 * i + c;
    of_a[i] = ring + (A_IN_ROWS_OF_K ? in_row(warp_m + group, k) : k * A_PITCH + (warp_m + group) * 8);
    of_b[i] = ring + A_BYTES + (B_IN_ROWS_OF_K ? in_row(warp_n + group, k) : k * B_PITCH + (warp_n + group) * 8);
  }
  // A stage's fragments are read AHEAD places before they are multiplied, so its last products go beside the next stage's first reads.
  double a[2][FRAGMENTS_M][2][QUADS], b[AHEAD + 1][QUADS];
  auto read_a = [&](int slice, uint32_t slot) {
#pragma unroll
    for (int i = 0; i < 2 * FRAGMENTS_M; ++i)
#pragma unroll
      for (int k = 0; k < QUADS; ++k) load(a[slice % 2][i / 2][i % 2][k], of_a[slice * QUADS + k] + slot + i * 8 * (A_IN_ROWS_OF_K ? ROW : 8));
  };
  auto read_b = [&](int place, uint32_t slot) {
#pragma unroll
    for (int k = 0; k < QUADS; ++k)
      load(b[place % (AHEAD + 1)][k], of_b[place / FRAGMENTS_N * QUADS + k] + slot + place % FRAGMENTS_N * 8 * (B_IN_ROWS_OF_K ? ROW : 8));
  };
  copies_wait<STAGES - 2>();
  __syncthreads();
  read_a(0, 0);
#pragma unroll
  for (int place = 0; place < AHEAD; ++place) read_b(place, 0);
  uint32_t slot = 0, next = STAGE_BYTES, free = (STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
  for (int step = 0; step < count; ++step) {
#pragma unroll
    for (int place = 0; place < PLACES; ++place) {
      const int slice = place / FRAGMENTS_N, j = place % FRAGMENTS_N;
      if (place == PLACES - AHEAD) {
#if !ONE_TAP
        if (thread < BLOCK_K) write_table(step + STAGES, thread);
#endif
        copies_wait<STAGES - 3>();
        __syncthreads();
      }
      if (j == FRAGMENTS_N - AHEAD) read_a((slice + 1) % SLICES, slice == SLICES - 1 ? next : slot);
      read_b((place + AHEAD) % PLACES, place + AHEAD < PLACES ? slot : next);
      look_up(step + STAGES - 1, place);
      if (slice == 0 && step % PROMOTION == 0) promote(j);
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) multiply(sum[i][j], a[slice % 2][i], b[place % (AHEAD + 1)]);
      fetch(step + STAGES - 1, free, place);
    }
    copies_commit();
    free = slot;
    slot = next;
    next = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
  }
#pragma unroll
  for (int j = 0; j < FRAGMENTS_N; ++j) promote(j);

  // A lane has row `group` of each block of 8 rows, and columns 2 c and 2 c + 1 of each fragment: neighbours of a row of pixels.
  y += split * p.size;
  const int channels = divided((int)p.rows, p.by_phases);
  auto store = [&](auto finish) {
#pragma unroll
    for (int i = 0; i < 2 * FRAGMENTS_M; ++i) {
      const int m = m0 + warp_m + i * 8 + group;
      if (m >= (int)p.rows) continue;
      const int of_group = divided(m, p.by_phases), phase = m - of_group * (int)p.phases;
      const int of_d = divided(phase, p.by_phases_hw), hw = phase - of_d * (int)p.phases_hw, of_h = divided(hw, p.by_phases_w);
      const int channel = g * channels + of_group;
      const int of_row = of_group * (int)p.y_channel + of_d * (int)p.phase_d + of_h * (int)p.phase_h + (hw - of_h * (int)p.phases_w) * (int)p.phase_w;
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
        const int2 at = *(const int2*)&tables.y[warp_n + j * 8 + 2 * c];
        double2 v = make_double2(total[i / 2][j][i % 2 * 2], total[i / 2][j][i % 2 * 2 + 1]);
        if (at.x >= 0) finish(v.x, channel, at.x + of_row);
        if (at.y >= 0) finish(v.y, channel, at.y + of_row);
        if (p.pairs) {
          if (at.x >= 0) *(double2*)(y + at.x + of_row) = v;
        } else {
          if (at.x >= 0) y[at.x + of_row] = v.x;
          if (at.y >= 0) y[at.y + of_row] = v.y;
        }
      }
    }
  };
  if (!(p.has_scale || p.has_bias || p.has_residual || p.activation)) {
    store([](double&, int, int) {});
  } else {
    store([&](double& v, int channel, int at) {
      if (p.has_scale) v *= scale[channel];
      if (p.has_bias) v += bias[channel];
      if (p.has_residual) v += residual[at];
      ACTIVATE_SOME((int)p.activation, __longlong_as_double(p.slope), &v, 1)
    });
  }
}

struct DmmaFilterArguments {
  long_t rows, rows_group;                      // output channels, and those of a group
  long_t channels, taps, taps_rs, taps_s;       // channels of a packed row; taps, and those of a plane and of a row
  long_t phases, phases_hw, phases_w;           // neighbouring phases, which are rows of an output channel
  long_t to;                                    // offset of the first element in `packed`
  long_t w_base, w_group, w_row, w_channel, w_t, w_r, w_s;  // strides of the filter as it is given, in elements
  long_t w_phase_d, w_phase_h, w_phase_w;       // elements from one phase's first tap to the next one's
};

// Packs the filter as rows of k with the channels innermost: packed[row][phase][tap][channel]. A thread -> an element.
extern "C" __global__ void dmma_filter(const double* __restrict__ w, double* __restrict__ packed, const __grid_constant__ DmmaFilterArguments p) {
  AFTER_LAST_LAUNCH
  const long_t i = (long_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int channels = (int)p.channels, taps = (int)p.taps, phases = (int)p.phases;
  const int k_row = (int)(i / channels / taps), row = k_row / phases;
  if (row >= (int)p.rows) return;
  const int channel = (int)(i % channels), tap = (int)(i / channels % taps), phase = k_row % phases, group = row / (int)p.rows_group;
  const int t = tap / (int)p.taps_rs, rs = tap % (int)p.taps_rs, d = phase / (int)p.phases_hw, hw = phase % (int)p.phases_hw;
  packed[p.to + i] = w[p.w_base + group * p.w_group + row % (int)p.rows_group * p.w_row + channel * p.w_channel + t * p.w_t + rs / (int)p.taps_s * p.w_r +
                       rs % (int)p.taps_s * p.w_s + d * p.w_phase_d + hw / (int)p.phases_w * p.w_phase_h + hw % (int)p.phases_w * p.w_phase_w];
}
