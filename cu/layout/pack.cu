// pack.cu: the operands of the implicit GEMM kernels: channels last, 16 bits, float32 as two fp16 limbs.
//
//   hi = fp16(x * s),  lo = fp16((x * s - hi) * 2^11): 22 bits of x, where s is a power of two
//
// Images are first packed with s = 2^GUESS, which holds magnitudes from 2^-23 to 2^6, and their extremes are noted on the way: reading them once more
// to find the best scale would cost half as much again. Once all of an image is packed, blocks look at the extremes. If the image did not fit, they
// pack it anew with the scale that brings its largest magnitude to [2^14, 2^15). The filter of an output channel gets that scale at once.
// Flags say what limbs cannot hold. Flag 1: an image or a channel of the filter has values 2^(28 + slack) below its largest, or smaller, which
// lose too many bits. recompute.cuh or direct/gemm.cu looks for results that may show it, and computes these in plain fp32. An image also has flag 1 if
// its guess was within 5 bits of the best scale and it has smaller values, as most gradients behind a batch norm do. Flag 2: it holds Inf or
// NaN, or its largest lies outside 2^-60 .. 2^60; everything that depends on it is computed in plain fp32.
// 16-bit images have no scale. If they are checked (RANGE_CHECK: windows, below), their flag is 2 if they hold Inf or NaN, else 0.
// Whether a tile's results are computed again for flag 1 depends on all images that the tile has pixels of. So with too_small = 2, for results that
// depend on their own image alone, flag 2 stands in its place.
// slack is half the bits of gemm k, which the rounding of a sum of that length may lose anyway. With one limb slack is 2, since its products may
// lose two bits of eleven.
//
// Mapping        filter_rows blocks (at first every other one) pack w: each one output channel m, or a part of a channel that does not fit
//                shared memory, or a channel for each of its warps if there are many short ones, or four that are neighbours in memory.
//                They write [m / 64][tap][block of b channels][limb][m % 64][b], rows of b = 64, 32 or 16 channels, swizzled as in shared
//                memory: 64 rows are one bulk copy. Rows and channels are filled up with zeros. If a stage takes several blocks, a block of
//                zeros behind each 64 rows' blocks fills up the last stage.
//                The other blocks pack some pixels x 8 * 2^chunk_bits channels of one image each, to [limb][image][pixel][channel].
//                A thread reads 8 channels of some pixels, VECTOR neighbours at once, and a warp 32 times as many. It transposes them to whole rows
//                of channels in shared memory, [limb][pixel][chunk of 8]; chunks are swizzled, so that neither side has bank conflicts.
//                Channels-last input needs no transposition, unless it is folded by single channels. Extremes go to packed_tiles[image][tile].
//                These blocks also set the tickets of the product that follows to zero.
//                With FILTER the images are the rows of a filter that is as large as images are (wgrad is a convolution with dy as the filter):
//                a block packs one tile of a row, to the filter's layout.
//                The last blocks settle the images, `slices` blocks each: they wait until all tiles of their image are packed (packed_tiles.cuh), write
//                its scale and flag, and pack a slice of its tiles again if the guess failed.
// Clusters  replace these last blocks for images of up to CLUSTER tiles. `each` neighbours in a cluster, a power of two, take one tile of an image each.
//          They exchange their extremes, so that each knows those of the image. The first writes scale and flag, and all pack again if they must.
// Border   BORDERED texts write images with a border of their own pixels: what is read of a pixel goes to all places that show it. The pixels of a box
//          are shown at their own place alone.
// Sampled  SAMPLE_SCALE is for gradients, whose magnitude cannot be guessed. Each block of an image looks at the same 256 elements, spread evenly,
//          and takes the power of two that brings the largest of them to [2^11, 2^12).
//
// Folding  packs the taps of the innermost axes as channels, if a tensor load can't make them (stride over 8, three channels) or few pixels
//          meet any (1x1 with a stride). Packed channel (tap, c) of pixel i is x[c] at i * stride - pad + tap * dilation. There are `folds` such
//          taps, fold_r and fold_s along r and s; 1 along an axis that is not folded.
// Windows  are for few channels. A packed pixel has the channels of fold_r rows. The pixels that a row of taps reads are contiguous, and a tensor
//          load takes them for one pixel of filter_s * window channels; the next such pixel begins a stride further.
// Groups   Each group starts at a multiple of group_chunks; zeros fill it up.
//
// By hand: nvcc -cubin -arch=sm_80 -I cu cu/layout/pack.cu
#ifndef IN
#define IN 32        // elements of x and w: 32 float, 16 half, 17 bfloat16
#define LIMBS 2      // 2: hi and lo; 1: hi alone, or 16-bit elements as they are
#define NHWC 0       // layout of x
#define VECTOR 4     // neighbouring pixels that are read at once, 1, 2 or 4: NCHW, not folded, planes of a multiple of VECTOR
#define EIGHTS 1     // a group of x has a multiple of 8 channels
#define RANGE_CHECK 1  // extremes are noted and flags written: for float, and for 16 bits if a window covers rows outside the filter
#define SAMPLE_SCALE 0  // the scale is guessed for each image, from a sample
#define FILTER 0     // x is a filter: its rows are the images, its taps the pixels
#define FOLDED 0     // taps are folded
#define CLUSTER 0    // 8: blocks of a cluster settle the scale of their image; 0: the launch's last blocks do
#endif
#ifndef BORDERED
#define BORDERED 0   // the packed image has a border
#endif
#if CLUSTER
#include "core/cluster.cuh"
#else
#include "core/packed_tiles.cuh"
#endif
#include "core/limbs.cuh"
#include "core/near_border.cuh"

#define TRANSPOSED (!NHWC || (FOLDED && !EIGHTS))  // a tile passes through shared memory

typedef element<IN> in_t;
typedef element<IN == 17 ? 17 : 16> limb_t;

constexpr int THREADS = 256, ITEMS = NHWC || FOLDED ? 2 : 4 / VECTOR;  // items of a thread: 8 channels of VECTOR pixels each
constexpr int ITEMS_BITS = ITEMS == 1 ? 8 : ITEMS == 2 ? 9 : 10;       // log2 of a block's items
constexpr int PIECES = VECTOR * ITEMS * THREADS;                       // pieces of a block's tile: 8 channels of a pixel each

// The arguments. by_n is the divisor n, prepared (division.cuh), n_bits its logarithm to base 2. All have 64 bits, so that the host can pack them
// without knowing types.
struct PackArguments {
  long long filter_rows, row_bits;                        // rows of the filter to pack, or parts of rows: all, or none; log2 of a block's rows:
                                                          // 0; 2: neighbours in memory; 3: one for each warp
  long long images, lines, by_lines;                      // images; and as many as are packed, of which some fill up a filter's rows
  long long tiles, by_tiles, tiles_c, by_tiles_c;         // tiles of an image; tiles of it side by side along the channels
  long long slices, by_slices;                            // blocks that settle an image; 0: none
  long long chunk_bits;                                   // log2 of a tile's chunks of 8 channels: 1, 2, 4, 8 or 16 chunks
  long long chunks_per_tap, chunks_per_tap_bits;  // chunks of each tap in a tile, the same for all taps; 0: a tile's chunks are neighbours in the packed image
  long long groups, group_chunks, by_group_chunks;        // groups, and packed chunks of one
  long long channels, by_channels;                        // channels of a group of x
  long long slack, too_small, each;                       // too_small: 2 if flag 2 stands for flag 1, see below; each: blocks of an image, with CLUSTER
  long long d, h, w;                                      // size of x
  long long x_image, x_group, x_channel, x_pixel;         // elements of x from one to the next
  long long packed_d, packed_h, by_packed_h, packed_w, by_packed_w;  // pixels of a packed image
  long long step_w, by_step_w, first_w, met_w;            // column w of an image is packed if bit (w + first_w) % step_w of met_w is set: no tap reads the others
  long long folds, fold_r, by_fold_r, fold_s, by_fold_s;  // folded taps; those along r and s
  long long stride_d, stride_h, stride_w;                 // strides of the folded taps
  long long pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w;
  long long rows_group, by_rows_group;                    // output channels of a group,
  long long padded_group, by_padded_group;                // and rows of the packed filter: blocks of 64
  long long w_group, w_m, w_c, w_tap;                     // elements of w from one group, m, c and tap to the next
  long long taps, all_taps, by_all_taps;                  // taps of the packed filter, and of w: tap * folds + folded tap counts through them
  long long piece_bits;                                   // log2 of the pieces of 8 channels in a row of a block of the packed filter: 8, 4 or 2 pieces
  long long channel_blocks, row_blocks;                   // blocks of a row; blocks of 64 rows: with one of zeros if they are short
  long long row_pieces, by_row_pieces;                    // pieces of a row
  long long fitting, by_fitting;                          // channels of a row of w that shared memory takes at a time; 0: the row does not pass through it
  long long part_pieces, by_part_pieces, parts, by_parts;  // of a row of w that is too long for shared memory: pieces of a block, and blocks
  long long window, by_window;                            // packed channels of a pixel with windows, or 0
  long long shift;                                        // rows of fold_r before the filter's first one
  long long packed_r, by_packed_r, filter_r, filter_s;    // taps of the packed filter along r; of w, along r and s
  long long tickets;                                      // tickets that are set to zero
  long long wide_d, wide_h, wide_w;                       // with BORDERED: size of the packed image with its border,
  long long before_d, before_h, before_w, after_d, after_h, after_w;  // the places of that before and behind the image,
  long long side_d, side_h, side_w, last_side_d, last_side_h, last_side_w;  // what they show (near_border.cuh),
  long long box_d, box_h, box_w, inside_d, inside_h, inside_w;        // the first pixel of the box, and its size
};

// Room to transpose a tile of an image, or the fitting channels of a filter's row, whichever a block packs.
extern __shared__ uint4 transpose_buffer[];

// The extremes over the block, for every thread.
__device__ MagnitudeRange over_block(MagnitudeRange mine) {
  __shared__ MagnitudeRange warps[THREADS / 32];
  mine.over_warp();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  MagnitudeRange all = warps[0];
  for (int i = 1; i < THREADS / 32; ++i) all.add(warps[i]);
  return all;
}

#if CLUSTER
// The extremes over the `each` blocks of the cluster from `first` on, which pack an image, for every thread of theirs. Before its end a block has to
// call cluster_wait: others may still read its extremes.
__device__ MagnitudeRange over_image(const MagnitudeRange& mine, int first, int each) {
  __shared__ alignas(8) MagnitudeRange of_block;
  const MagnitudeRange own = over_block(mine);
  if (threadIdx.x == 0) of_block = own;
  cluster_barrier();
  const uint2 words = load_two_of_rank(shared_address(&of_block), first + threadIdx.x % each);
  MagnitudeRange all = {words.x, words.y};
  all.over_warp();
  cluster_arrive();
  return all;
}
#endif

// where 16-byte piece `piece` of row `row` of the packed filter lies among the row's 8, 4 or 2 pieces, swizzled as in shared memory
__device__ int swizzled_piece(int row, int piece, int piece_bits) { return piece ^ (row >> (3 - piece_bits) & ((1 << piece_bits) - 1)); }

// The flag of what has values that are too small is 1 or 2, as the caller says.
DEVICE int flag_of(int flag, const PackArguments& shape) { return flag == 1 ? (int)shape.too_small : flag; }

// Loads elements of x as one word, or zeros; a condition in C would become one for each element. They are not read again, unless for other taps, so
// the L2 cache should rather keep what is written, which the products read next. Volatile, so that none moves before AFTER_LAST_LAUNCH.
#if FOLDED
#define READ_POLICY "evict_normal"
#else
#define READ_POLICY "evict_first"
#endif
DEVICE uint64_t read_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::" READ_POLICY ".b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void load_word(uint16_t& v, const void* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.nc.L2::cache_hint.b16 %0, [%1], %3;\n}"
      : "=&h"(v)
      : "l"(from), "r"((int)there), "l"(read_policy()));
}
DEVICE void load_word(uint32_t& v, const void* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.L2::cache_hint.b32 %0, [%1], %3;\n}"
      : "=&r"(v)
      : "l"(from), "r"((int)there), "l"(read_policy()));
}
DEVICE void load_word(uint2& v, const void* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n@p ld.global.nc.L2::cache_hint.v2.b32 {%0, %1}, [%2], %4;\n}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(from), "r"((int)there), "l"(read_policy()));
}
DEVICE void load_word(uint4& v, const void* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %6;\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"((int)there), "l"(read_policy()));
}

typedef typename WordOf<VECTOR * sizeof(in_t)>::type word_t;  // VECTOR neighbours of a channel
DEVICE in_t element_of(const word_t& v, int i) { return ((const in_t*)&v)[i]; }
#if IN != 32
// element i of two channels, side by side
DEVICE uint32_t pair_of(const word_t& a, const word_t& b, int i) {
  if (VECTOR == 1) return *(const uint16_t*)&a | (uint32_t) * (const uint16_t*)&b << 16;
  return __byte_perm(((const uint32_t*)&a)[i / 2], ((const uint32_t*)&b)[i / 2], i % 2 ? 0x7632 : 0x5410);
}
#endif

// Loads 8 channels, `apart` elements from one to the next.
DEVICE void read_channels(word_t (&v)[8], const in_t* __restrict__ x, long long apart, bool there) {
#if NHWC && EIGHTS
  uint4 raw[sizeof(in_t) / 2];  // they are neighbours
#pragma unroll
  for (int i = 0; i < (int)sizeof(in_t) / 2; ++i) load_word(raw[i], (const uint4*)x + i, there);
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = ((const word_t*)raw)[e];
#else
#pragma unroll
  for (int e = 0; e < 8; ++e) load_word(v[e], x + e * apart, there);
#endif
}

// Reads the 8 channels of `chunk` of VECTOR pixels of a packed image; zeros where there are none.
__device__ void read(word_t (&v)[8], const in_t* __restrict__ x, const PackArguments& shape, int pixel, int chunk, bool inner) {
  const Divided of_group(chunk, shape.group_chunks, shape.by_group_chunks);
  const int j0 = 8 * of_group.rest, channels = (int)shape.channels;
  const long long from_pixel = NHWC ? shape.x_pixel : 1, from_channel = NHWC ? 1 : shape.x_channel;
  x += of_group.quotient * shape.x_group;
#if FOLDED
  const Divided column(pixel, shape.packed_w, shape.by_packed_w), row(column.quotient, shape.packed_h, shape.by_packed_h);
  const int w0 = column.rest * (int)shape.stride_w - (int)shape.pad_w, h0 = row.rest * (int)shape.stride_h - (int)shape.pad_h;
  const int d0 = row.quotient * (int)shape.stride_d - (int)shape.pad_d;
  const Divided first(j0, channels, shape.by_channels), tap_s(first.quotient, shape.fold_s, shape.by_fold_s);
  const Divided tap_r(tap_s.quotient, shape.fold_r, shape.by_fold_r);
  int tap = first.quotient, c = first.rest, s = tap_s.rest, r = tap_r.rest, t = tap_r.quotient;
  // where the tap's pixel lies in a plane of x; -1 outside
  auto place = [&] {
    const int at_w = w0 + s * (int)shape.dilation_w, at_h = h0 + r * (int)shape.dilation_h, at_d = d0 + t * (int)shape.dilation_d;
    const bool ok =
        inner && tap < (int)shape.folds && (unsigned)at_w < (unsigned)shape.w && (unsigned)at_h < (unsigned)shape.h && (unsigned)at_d < (unsigned)shape.d;
    return ok ? (at_d * (int)shape.h + at_h) * (int)shape.w + at_w : -1;
  };
  int at = place();
#if EIGHTS
  read_channels(v, x + max(at, 0) * from_pixel + c * from_channel, from_channel, at >= 0);  // all channels are of one tap
#else
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    load_word(v[e], x + (at * from_pixel + c * from_channel), at >= 0);
    if (e < 7 && ++c == channels) {  // mostly at once for all lanes of a warp, which have one chunk
      c = 0;
      ++tap;
      next_tap(t, r, s, (int)shape.fold_r, (int)shape.fold_s);
      at = place();
    }
  }
#endif
#else
  x += pixel * from_pixel + j0 * from_channel;
#if EIGHTS
  read_channels(v, x, from_channel, inner && j0 < channels);
#else
#pragma unroll
  for (int e = 0; e < 8; ++e) load_word(v[e], x + e * from_channel, inner && j0 + e < channels);
#endif
#endif
}

// The image, or row of the filter, that line `line` is packed from; a group's rows are filled up to blocks of 64, and -1 is none. And the inverse.
__device__ int row_of(const PackArguments& shape, int line) {
  if (!FILTER) return line;
  const Divided of_group(line, shape.padded_group, shape.by_padded_group);
  return of_group.rest < (int)shape.rows_group ? of_group.quotient * (int)shape.rows_group + of_group.rest : -1;
}
__device__ int line_of(const PackArguments& shape, int row) {
  if (!FILTER) return row;
  const Divided of_group(row, shape.rows_group, shape.by_rows_group);
  return of_group.quotient * (int)shape.padded_group + of_group.rest;
}

// Packs one tile of an image, or with FILTER of a row of the filter, scaled; returns the extremes of what this thread read. The scale is
// asked for once all loads are issued.
template <class Scale>
__device__ MagnitudeRange pack_tile(const in_t* __restrict__ x, uint4* __restrict__ packed, const PackArguments& shape, long long image, int tile,
                                    const Scale& scale_of) {
  const int pixels = (int)(shape.packed_d * shape.packed_h * shape.packed_w), chunks = (int)(shape.groups * shape.group_chunks);
  const int bits = (int)shape.chunk_bits, mask = (1 << bits) - 1, per_tap = FOLDED && EIGHTS && !NHWC ? (int)shape.chunks_per_tap : 0;
  const Divided along(tile, shape.tiles_c, shape.by_tiles_c);
  const int first = per_tap ? along.rest * per_tap : along.rest << bits, pixel0 = along.quotient * (PIECES >> bits);
  // the packed chunk of the tile's chunk `at`; `chunks` or more if there is none
  auto chunk_of = [&](int at) {
    if (!per_tap) return first + at;
    const int tap = at >> (int)shape.chunks_per_tap_bits, c = first + (at & (per_tap - 1)), of_tap = (int)shape.channels / 8;
    return tap < (int)shape.folds && c < of_tap ? tap * of_tap + c : chunks;
  };
#if FILTER
  // pixels are taps, and images are rows, filled up to blocks of 64 with zeros; behind the taps lies the block of zeros
  const int piece_bits = (int)shape.piece_bits, from = row_of(shape, (int)image);
  const bool real = from >= 0;
  x += max(from, 0) * shape.x_image;
  const int row = (int)(image % 64), whole = pixels + (piece_bits < 3);
  packed += (image / 64 * shape.row_blocks * (LIMBS * 64) + row) << piece_bits;
  auto wanted = [&](int pixel, int chunk) { return pixel < whole && chunk < (pixel < pixels ? chunks : 1 << piece_bits); };
  auto store = [&](int pixel, int chunk, int limb, uint4 value) {
    const long long block = (long long)pixel * shape.channel_blocks + (chunk >> piece_bits);
    packed[((block * LIMBS + limb) * 64 << piece_bits) + swizzled_piece(row, chunk & ((1 << piece_bits) - 1), piece_bits)] = value;
  };
#else
  constexpr bool real = true;
  x += image * shape.x_image;
  const int places = BORDERED ? (int)(shape.wide_d * shape.wide_h * shape.wide_w) : pixels;  // of a packed image
  const long long limb_size = shape.images * places * (long long)chunks;
  packed += image * places * (long long)chunks;
  auto met = [&](int pixel) {
    if (FOLDED || BORDERED || shape.step_w == 1) return true;
    const int column = Divided(pixel, shape.packed_w, shape.by_packed_w).rest + (int)shape.first_w;
    return ((int)shape.met_w >> Divided(column, shape.step_w, shape.by_step_w).rest & 1) != 0;
  };
  auto wanted = [&](int pixel, int chunk) { return pixel < pixels && chunk < chunks && met(pixel); };
  auto store = [&](int place, int chunk, int limb, uint4 value) { packed[limb * limb_size + (long long)place * chunks + chunk] = value; };
#endif
#if BORDERED
  // stores the limbs of a chunk of a pixel, which `of` gives, wherever the pixel is shown
  auto store_limbs = [&](int pixel, int chunk, const auto& of) {
    const Divided column(pixel, shape.packed_w, shape.by_packed_w), row(column.quotient, shape.packed_h, shape.by_packed_h);
    const int w = column.rest, h = row.rest, d = row.quotient, wide_h = (int)shape.wide_h, wide_w = (int)shape.wide_w;
    auto store_at = [&](int place) {
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb) store(place, chunk, limb, of(limb));
    };
    if ((unsigned)(w - (int)shape.box_w) < (unsigned)shape.inside_w && (unsigned)(h - (int)shape.box_h) < (unsigned)shape.inside_h &&
        (unsigned)(d - (int)shape.box_d) < (unsigned)shape.inside_d) {
      store_at(((d + (int)shape.before_d) * wide_h + h + (int)shape.before_h) * wide_w + w + (int)shape.before_w);
      return;
    }
    const Shown of_d = shown_of(d, (int)shape.d, (int)shape.before_d, (int)shape.after_d, shape.side_d, shape.last_side_d);
    const Shown of_h = shown_of(h, (int)shape.h, (int)shape.before_h, (int)shape.after_h, shape.side_h, shape.last_side_h);
    const Shown of_w = shown_of(w, (int)shape.w, (int)shape.before_w, (int)shape.after_w, shape.side_w, shape.last_side_w);
#pragma unroll 1
    for (int a = 0; a < of_d.count; ++a)
#pragma unroll 1
      for (int b = 0; b < of_h.count; ++b)
#pragma unroll 1
        for (int c = 0; c < of_w.count; ++c) store_at((shown_place(of_d, a) * wide_h + shown_place(of_h, b)) * wide_w + shown_place(of_w, c));
  };
#else
  auto store_limbs = [&](int pixel, int chunk, const auto& of) {
#pragma unroll
    for (int limb = 0; limb < LIMBS; ++limb) store(pixel, chunk, limb, of(limb));
  };
#endif
  // A thread's items in the tile. Channels last: neighbouring threads take neighbouring chunks, so that they read and write
  // neighbouring bytes. Else they take neighbouring pixels, which are neighbours in x.
  auto place = [&](int i, int& inside, int& at) {
    const int item = threadIdx.x + i * THREADS;
    const int across = ITEMS * THREADS >> bits;  // a power of two
    inside = TRANSPOSED ? (item & (across - 1)) * VECTOR : item >> bits;
    at = TRANSPOSED ? item >> (ITEMS_BITS - bits) : item & mask;
  };
  word_t v[ITEMS][8];  // all loads are issued before the first value is used
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int inside, at;
    place(i, inside, at);
    read(v[i], x, shape, pixel0 + inside, chunk_of(at), real && pixel0 + inside < pixels && chunk_of(at) < chunks);
  }
  [[maybe_unused]] const float scale = scale_of();
  MagnitudeRange found = {0, ~0u};
#if TRANSPOSED
  auto& transposed = *(uint4(*)[LIMBS][PIECES])transpose_buffer;
  auto transposed_place = [&](int inside, int at) { return (inside << bits) + (at ^ (inside / VECTOR & mask)); };
#endif
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    int inside, at;
    place(i, inside, at);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      uint32_t limbs[LIMBS][4];
#if IN == 32 || RANGE_CHECK
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = to_float(element_of(v[i][e], j));
      if (RANGE_CHECK) found.add(values);
#endif
#if IN == 32
      split<limb_t>(values, scale, limbs);
#else
#pragma unroll
      for (int e = 0; e < 8; e += 2) limbs[0][e / 2] = pair_of(v[i][e], v[i][e + 1], j);
#endif
#if !TRANSPOSED
      if (wanted(pixel0 + inside, chunk_of(at))) store_limbs(pixel0 + inside, chunk_of(at), [&](int limb) { return piece_of(limbs[limb]); });
#else
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb) transposed[limb][transposed_place(inside + j, at)] = piece_of(limbs[limb]);
#endif
    }
  }
#if TRANSPOSED
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < PIECES; i += THREADS) {
    const int inside = i >> bits, at = i & mask;
    if (wanted(pixel0 + inside, chunk_of(at)))
      store_limbs(pixel0 + inside, chunk_of(at), [&](int limb) { return transposed[limb][transposed_place(inside, at)]; });
  }
#endif
  return found;
}

// Packs one row of a block of 64 by a block or, with row_bits 3, by each of its warps. scales[m] undoes the scale. Taps are mostly neighbours in w, and
// channels in the packed filter. So a row is transposed in shared memory, where a whole row mostly fits and is read once; else a block takes as many
// channels as fit.
__device__ void pack_filter(const in_t* __restrict__ w, uint4* __restrict__ packed, float* __restrict__ scales, int* __restrict__ flags,
                            const PackArguments& shape, int block) {
  constexpr int WIDE = 16 / sizeof(in_t);  // elements of 16 bytes
  const int channels = (int)shape.channels, fitting = (int)shape.fitting, all_taps = (int)shape.all_taps, all = channels * all_taps;
  const bool whole = fitting == channels, in_parts = !FOLDED && fitting > 0 && !whole, last = shape.w_tap != 1;  // last: taps are not neighbours in w
  const bool beside = last && shape.w_c == 1, by_warps = shape.row_bits == 3;  // beside: channels are neighbours in w
  const int threads = by_warps ? 32 : THREADS, thread = threadIdx.x % threads, warp = threadIdx.x / threads;  // of the threads that share a row
  float* const turn = (float*)transpose_buffer + warp * (all + (channels + 7) / 8);
  const Divided of_row(by_warps ? block * (THREADS / 32) + warp : block, shape.parts, shape.by_parts);
  const Divided of_group(of_row.quotient, shape.padded_group, shape.by_padded_group);
  const int part = of_row.rest, g = of_group.quotient, row = of_group.rest;
  const bool real = row < shape.rows_group;
  w += g * shape.w_group + row * shape.w_m;
  // where element `tap` of channel c lies in shared memory: with one more word every 8 channels, so that the reads of 8 channels use different banks
  auto place = [&](int c, int tap) { return c * all_taps + tap + c / 8; };
  // and in memory
  auto source = [&](int c, int tap) -> long long { return c * shape.w_c + tap * shape.w_tap; };
  // loads channels from c0 on into shared memory, and returns their extremes
  auto fetch = [&](int c0) {
    MagnitudeRange found = {0, ~0u};
    const int some = real ? max(min(fitting, channels - c0), 0) : 0, count = (last && some ? fitting : some) * all_taps;
    // element i of them, in the order of memory, is number `rest` along an inner axis: of taps, or of channels
    const int inner = last ? fitting : all_taps;
    const long long by_inner = last ? shape.by_fitting : shape.by_all_taps, outer_step = last ? shape.w_tap : shape.w_c;
    const long long inner_step = last ? shape.w_c : 1;
    auto take = [&](int i, const Divided& at, float v) {
      turn[last ? place(at.rest, at.quotient) : i + at.quotient / 8] = v;
      found.add(v, v);
    };
    const in_t* const from = w + source(c0, 0);
    // contiguous and aligned, so that 16 bytes are loaded at once
    const bool row_by_row = (last ? beside && whole && channels % WIDE == 0 : shape.w_c == all_taps) && (size_t)from % 16 == 0;
    const int vectors = row_by_row ? count / WIDE : 0;
    constexpr int VECTORS = IN == 32 ? 5 : 3, SINGLE = FOLDED ? 6 : IN == 32 ? 7 : 9;  // loads of a thread under way
    for (int first = thread; first < vectors; first += VECTORS * threads) {
      uint4 raw[VECTORS];
#pragma unroll
      for (int u = 0; u < VECTORS; ++u)
        if (first + u * threads < vectors) raw[u] = ((const uint4*)from)[first + u * threads];
#pragma unroll
      for (int u = 0; u < VECTORS; ++u) {
        if (first + u * threads >= vectors) break;
#pragma unroll
        for (int e = 0; e < WIDE; ++e) {
          const int i = (first + u * threads) * WIDE + e;
          take(i, Divided(i, inner, by_inner), to_float(((const in_t*)(raw + u))[e]));
        }
      }
    }
    for (int first = vectors * WIDE + thread; first < count; first += SINGLE * threads) {
      in_t raw[SINGLE];
#pragma unroll
      for (int u = 0; u < SINGLE; ++u) {
        const int i = first + u * threads;
        const Divided at(i, inner, by_inner);
        if (i < count && (!last || at.rest < some)) raw[u] = from[at.quotient * outer_step + at.rest * inner_step];
      }
#pragma unroll
      for (int u = 0; u < SINGLE; ++u) {
        const int i = first + u * threads;
        const Divided at(i, inner, by_inner);
        if (i < count && (!last || at.rest < some)) take(i, at, to_float(raw[u]));
      }
    }
    return found;
  };
  // adds the extremes of elements of the row that are not kept, channel by channel
  auto look = [&](MagnitudeRange& found, int first, int end) {
    if (IN != 32 || !real) return;
    const bool row_by_row = (beside || (!last && shape.w_c == all_taps)) && first % WIDE == 0 && (size_t)w % 16 == 0;
    const int vectors = row_by_row ? end / WIDE : first / WIDE;
#pragma unroll 2
    for (int i = first / WIDE + threadIdx.x; i < vectors; i += THREADS) {
      const float4 v = ((const float4*)w)[i];
      found.add(v.x, v.y);
      found.add(v.z, v.w);
    }
#pragma unroll 2
    for (int i = (row_by_row ? vectors * WIDE : first) + threadIdx.x; i < end; i += THREADS) {
      const Divided at(i, all_taps, shape.by_all_taps);
      const float v = to_float(w[beside ? i : source(at.quotient, at.rest)]);
      found.add(v, v);
    }
  };
  const int c0 = part * fitting;
  MagnitudeRange found = {0, ~0u};
  if (whole || in_parts) found = fetch(c0);
  if (!whole) {
    const bool around = in_parts && !last;  // of the channels that this block keeps; if channels are last, those are not contiguous
    look(found, 0, around ? min(c0 * all_taps, all) : all);
    if (around) look(found, min((c0 + fitting) * all_taps, all), all);
  }
  float scale = 1;
#if IN == 32
  if (by_warps) found.over_warp();
  else found = over_block(found);
  if (real) {
    scale = found.scale();
    if (thread == 0) {
      scales[g * shape.rows_group + row] = 1 / scale;
      flags[g * shape.rows_group + row] = flag_of(found.flag((int)shape.slack), shape);
    }
  }
#else
#if RANGE_CHECK
  if (real && thread == 0) {
    scales[g * shape.rows_group + row] = 1;
    flags[g * shape.rows_group + row] = 0;
  }
#endif
  if (!by_warps) __syncthreads();
#endif
  if (by_warps) __syncwarp();
  // 16 bytes at a time: a piece is 8 channels of a row of a block
  const int bits = (int)shape.piece_bits, mask = (1 << bits) - 1, blocks = (int)(shape.taps * shape.channel_blocks), r = row % 64;
  packed += (of_row.quotient / 64 * shape.row_blocks * (LIMBS * 64) + r) << bits;
  for (int i = (blocks * LIMBS << bits) + thread; i < (int)shape.row_blocks * LIMBS << bits; i += threads)
    packed[(i >> bits) * 64 * (mask + 1) + (i & mask)] = make_uint4(0, 0, 0, 0);
  const int first = in_parts ? c0 / 8 : 0, pieces = (int)(in_parts ? shape.part_pieces : shape.row_pieces);
  const long long by_pieces = in_parts ? shape.by_part_pieces : shape.by_row_pieces;
  for (int i = thread; i < (int)shape.taps * pieces; i += threads) {
    const Divided of_tap(i, pieces, by_pieces);
    const int tap = of_tap.quotient, piece = first + of_tap.rest;
    if (piece >= (int)shape.row_pieces) continue;
    // the piece's first element: channel, folded tap, its tap number in w; the step from one folded tap to the next, and which folded taps exist
    int c = piece * 8, fold = 0, from = tap, step = 1, least = 0, most = 1;
#if FOLDED
    if (shape.window) {
      const Divided of_column(c, shape.window, shape.by_window), of_slice(tap, shape.packed_r, shape.by_packed_r);
      const int rows = of_slice.rest * (int)shape.fold_r - (int)shape.shift;
      step = (int)shape.filter_s;
      from = (of_slice.quotient * (int)shape.filter_r + rows) * step + of_column.quotient;
      least = -rows;
      most = of_column.quotient < step ? min((int)shape.fold_r, (int)shape.filter_r - rows) : 0;
      c = of_column.rest;
    } else {
      from *= (int)shape.folds;
      most = (int)shape.folds;
    }
    const Divided of_fold(c, channels, shape.by_channels);
    fold = of_fold.quotient;
    c = of_fold.rest;
#endif
    float v[8];
#if FOLDED && !EIGHTS
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      v[e] = 0;
      if (real && fold >= least && fold < most) {
        const int of_w = from + fold * step;
        v[e] = whole ? turn[place(c, of_w)] : to_float(w[source(c, of_w)]);
      }
      if (++c == channels) {
        c = 0;
        ++fold;
      }
    }
#else
    // of one tap, and c is a multiple of 8
    const int there = real && fold >= least && fold < most ? channels - c : 0, of_w = from + fold * step;
    const float* const kept = turn + place(c - c0, of_w);
    const in_t* const in_memory = w + source(c, of_w);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = e >= there ? 0 : whole || in_parts ? kept[e * all_taps] : to_float(in_memory[e * shape.w_c]);
#endif
    uint32_t limbs[LIMBS][4];
    split<limb_t>(v, scale, limbs);
    uint4* const to = packed + ((tap * (int)shape.channel_blocks + (piece >> bits)) * (LIMBS * 64) << bits) + swizzled_piece(r, piece & mask, bits);
#pragma unroll
    for (int limb = 0; limb < LIMBS; ++limb) to[limb * 64 << bits] = piece_of(limbs[limb]);
  }
}

#if !FOLDED
// Packs four rows of a block of 64 that are neighbours in memory, as in dgrad of a filter with its channels last. A thread reads 4 channels of a tap
// of all four rows, 16 bytes at a time. It reads them twice, mostly from the caches, since the scales are known only after all are read.
__device__ void pack_four_rows(const in_t* __restrict__ w, uint4* __restrict__ packed, float* __restrict__ scales, int* __restrict__ flags,
                               const PackArguments& shape, int block) {
  constexpr int ROWS = 4, CHANNELS = 4;
  typedef typename WordOf<ROWS * sizeof(in_t)>::type row_word;
  const Divided of_group(ROWS * block, shape.padded_group, shape.by_padded_group);
  const int g = of_group.quotient, row = of_group.rest, r = row % 64;
  [[maybe_unused]] const int m = g * (int)shape.rows_group + row;
  const bool real = row < shape.rows_group;  // all four exist, or none
  w += g * shape.w_group + row;
  const int pieces = (int)shape.row_pieces, items = (int)shape.taps * pieces * 2;  // halves of pieces
  // the four rows' values of four channels of a tap, from c on; zeros past the last channel
  auto fetch = [&](in_t (&raw)[CHANNELS][ROWS], int tap, int c) {
    const in_t* from = w + tap * shape.w_tap + c * shape.w_c;
    const int there = real ? (int)shape.channels - c : 0;
#pragma unroll
    for (int e = 0; e < CHANNELS; ++e, from += shape.w_c) *(row_word*)raw[e] = e < there ? *(const row_word*)from : row_word();
  };
  __shared__ float scale[ROWS];
#if IN == 32
  MagnitudeRange found[ROWS] = {{0, ~0u}, {0, ~0u}, {0, ~0u}, {0, ~0u}};
  for (int i = threadIdx.x; i < items; i += THREADS) {
    const Divided of_tap(i / 2, pieces, shape.by_row_pieces);
    in_t raw[CHANNELS][ROWS];
    fetch(raw, of_tap.quotient, of_tap.rest * 8 + i % 2 * CHANNELS);
#pragma unroll
    for (int j = 0; j < ROWS; ++j)
#pragma unroll
      for (int e = 0; e < CHANNELS; e += 2) found[j].add(raw[e][j], raw[e + 1][j]);
  }
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    const MagnitudeRange all = over_block(found[j]);
    if (threadIdx.x == 0) {
      scale[j] = all.scale();
      if (real) {
        scales[m + j] = 1 / scale[j];
        flags[m + j] = flag_of(all.flag((int)shape.slack), shape);
      }
    }
    __syncthreads();  // over_block's room is used again
  }
#elif RANGE_CHECK
  if (real && threadIdx.x < ROWS) {
    scales[m + threadIdx.x] = 1;
    flags[m + threadIdx.x] = 0;
  }
#endif
  const int bits = (int)shape.piece_bits, mask = (1 << bits) - 1, blocks = (int)(shape.taps * shape.channel_blocks);
  packed += ROWS * block / 64 * shape.row_blocks * (LIMBS * 64) << bits;
  for (int i = (blocks * LIMBS << bits) + threadIdx.x; i < (int)shape.row_blocks * LIMBS << bits; i += THREADS)
#pragma unroll
    for (int j = 0; j < ROWS; ++j) packed[((i >> bits) * 64 + r + j) * (mask + 1) + (i & mask)] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < items; i += THREADS) {
    const Divided of_tap(i / 2, pieces, shape.by_row_pieces);
    const int tap = of_tap.quotient, piece = of_tap.rest;
    in_t raw[CHANNELS][ROWS];
    fetch(raw, tap, piece * 8 + i % 2 * CHANNELS);
    uint4* const to = packed + ((tap * (int)shape.channel_blocks + (piece >> bits)) * (LIMBS * 64) << bits);
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      float v[CHANNELS];
#pragma unroll
      for (int e = 0; e < CHANNELS; ++e) v[e] = to_float(raw[e][j]);
      uint32_t limbs[LIMBS][CHANNELS / 2];
      split<limb_t>(v, IN == 32 ? scale[j] : 1, limbs);
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb)
        ((uint2*)(to + (limb * 64 + r + j << bits) + swizzled_piece(r + j, piece & mask, bits)))[i % 2] = make_uint2(limbs[limb][0], limbs[limb][1]);
    }
  }
}
#endif

#if SAMPLE_SCALE
// An element of an image for each thread, spread evenly over channels and pixels.
__device__ float sample(const in_t* __restrict__ x, const PackArguments& shape, bool there) {
  const unsigned plane = (unsigned)(shape.d * shape.h * shape.w), c = threadIdx.x * (unsigned)(shape.groups * shape.channels) / THREADS;
  const unsigned pixel = __umulhi(threadIdx.x * 0x9e3779b9u, plane);  // multiples of the golden ratio
  uint32_t bits;
  const Divided channel(c, shape.channels, shape.by_channels);
  load_word(bits, x + (channel.quotient * shape.x_group + channel.rest * shape.x_channel + pixel * shape.x_pixel), there);
  return __uint_as_float(bits);
}
#endif

// Whether an image with the extremes `found`, packed with `scale` = 2^guess, has to be packed again; `scale` becomes the scale for that. With `notes`
// it writes the image's scale and flag.
__device__ bool settle(const MagnitudeRange& found, int guess, float& scale, const PackArguments& shape, int image, bool notes, float* __restrict__ x_scales,
                       int* __restrict__ x_flags) {
  if (IN != 32) guess = 0;
  const bool guessed = IN != 32 || found.fits(guess, (int)shape.slack);
  if (!guessed) scale = found.scale();
  if (notes) {
    x_scales[image] = 1 / scale;
    x_flags[image] = IN != 32 ? 2 * (found.largest >= INFINITE)
                              : flag_of(guessed ? found.flag(guess, (int)shape.slack) : found.flag((int)shape.slack), shape);
  }
  return !guessed && found.usable();
}

extern "C" __global__ void
#if CLUSTER
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, FOLDED ? 3 : 4)
    pack(const in_t* __restrict__ x, const in_t* __restrict__ w, uint4* __restrict__ x_packed, float* __restrict__ x_scales, int* __restrict__ x_flags,
#if !CLUSTER
         PackedTile* __restrict__ packed_tiles,
#endif
         uint4* __restrict__ w_packed, float* __restrict__ w_scales, int* __restrict__ w_flags, unsigned* __restrict__ tickets,
         const __grid_constant__ PackArguments shape) {
  const int settling = RANGE_CHECK && !CLUSTER ? (int)(shape.images * shape.slices) : 0, packing = gridDim.x - settling;
  const bool settles = (int)blockIdx.x >= packing;
  if (FILTER || !settles) { NEXT_LAUNCH_MAY_COME }  // the images are packed behind a filter that is packed as images are
  AFTER_LAST_LAUNCH
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < (int)shape.tickets; i += packing * THREADS) tickets[i] = 0;
  // filter rows are bound by latency, images by bandwidth: their blocks alternate while both remain
  constexpr int EACH = CLUSTER ? CLUSTER : 1;  // blocks that take a turn together
  const int filter_rows = (int)shape.filter_rows >> (int)shape.row_bits, turn = blockIdx.x / EACH, rank = blockIdx.x % EACH;
  const int filter_turns = (filter_rows + EACH - 1) / EACH, image_turns = packing / EACH - filter_turns;
  const bool turns = filter_turns <= image_turns && turn < 2 * filter_turns;
  const bool filter = turns ? turn % 2 == 0 : filter_turns > image_turns && turn < filter_turns;
  if (!FILTER && filter) {
    const int row = (turns ? turn / 2 : turn) * EACH + rank;
    if (row < filter_rows) {
#if !FOLDED
      if (shape.row_bits == 2) pack_four_rows(w, w_packed, w_scales, w_flags, shape, row);
      else
#endif
        pack_filter(w, w_packed, w_scales, w_flags, shape, row);
    }
    return;
  }
  const int number = turns ? turn / 2 : turn - filter_turns;
#if CLUSTER
  const int each = (int)shape.each, tile = rank % each, line = (number * CLUSTER + rank) / each;
  const bool some = line < (int)shape.lines && tile < (int)shape.tiles;  // else the block only takes part in its cluster's barriers
  const int image = some ? row_of(shape, line) : -1;
#else
  // neighbouring rows of a filter are packed side by side: they are neighbours in the packed filter
  const Divided of(number, FILTER ? shape.lines : shape.tiles, FILTER ? shape.by_lines : shape.by_tiles);
  int line = FILTER ? of.rest : of.quotient, tile = FILTER ? of.quotient : of.rest, end = tile + 1;
  int image = row_of(shape, line);
#if RANGE_CHECK
  const Divided of_image(blockIdx.x - packing, shape.slices, shape.by_slices);
  if (settles) {
    image = of_image.quotient;
    line = line_of(shape, image);
  }
#endif
#endif
  const bool real = image >= 0;
  int guess = GUESS;
#if SAMPLE_SCALE
  const float sampled = sample(x + max(image, 0) * shape.x_image, shape, real && !settles);
#endif
  auto guessed_scale = [&] {
#if SAMPLE_SCALE
    MagnitudeRange few = {0, ~0u};
    few.add(sampled, sampled);
    guess = over_block(few).guess();
    __syncthreads();  // over_block's room is used again
#endif
    return IN == 32 && real ? power_of_two(guess) : 1;
  };
#if CLUSTER
  MagnitudeRange found = {0, ~0u};
  float scale = 0;  // not guessed yet
  for (bool settled = false;; settled = true) {
    if (some) {
      const MagnitudeRange of_tile = pack_tile(x, x_packed, shape, line, tile, [&] {
        if (!settled) scale = guessed_scale();
        return scale;
      });
      if (!settled) found = of_tile;
    }
    if (settled) break;
    found = over_image(found, rank - tile, each);
    if (!settle(found, guess, scale, shape, image, tile == 0 && threadIdx.x == 0 && real, x_scales, x_flags)) break;
  }
  cluster_wait();
#else
  float scale = 0;  // not known yet
#if RANGE_CHECK
  __shared__ int first_guess;
  if (settles) {
    MagnitudeRange found = {0, ~0u};
    for (int i = threadIdx.x; i < (int)shape.tiles; i += THREADS) {
      const unsigned word = word_when_packed(packed_tiles + image * shape.tiles + i);
      found.add(extremes_of(word));
      if (SAMPLE_SCALE && i == 0) first_guess = guess_of(word);
    }
    found = over_block(found);
    if (SAMPLE_SCALE) guess = first_guess;
    scale = IN == 32 ? power_of_two(guess) : 1;
    const int slice = of_image.rest;
    if (shape.slices == 1) {
      for (int i = threadIdx.x; i < (int)shape.tiles; i += THREADS) clear_when_stored(packed_tiles + image * shape.tiles + i);
      __syncthreads();
    }
    if (!settle(found, guess, scale, shape, image, slice == 0 && threadIdx.x == 0, x_scales, x_flags)) return;
    tile = (int)(shape.tiles * slice / shape.slices);
    end = (int)(shape.tiles * (slice + 1) / shape.slices);
    if (shape.slices > 1) {
      for (int i = tile + threadIdx.x; i < end; i += THREADS) wait_until_stored(packed_tiles + image * shape.tiles + i);
      __syncthreads();
    }
  }
#endif
  [[maybe_unused]] MagnitudeRange found = {0, ~0u};
  for (; tile < end; ++tile) {
    found = pack_tile(x, x_packed, shape, line, tile, [&] { return settles ? scale : guessed_scale(); });
    if (settles) __syncthreads();  // the tile has left shared memory
  }
#if RANGE_CHECK
  if (settles || !real) return;
  --tile;
  found = over_block(found);
  if (threadIdx.x == 0) tell(packed_tiles + image * shape.tiles + tile, found, guess);
#endif
#endif
}
