// blocks_results.cu: the rows of pairs of blocks are transformed back: results, which are checked, finished and stored. blocks.cuh says what pairs are.
//
//   y = epilogue(inverse transforms of the rows that blocks_columns.cu made)
//
// The error of a transform is at most u * log2(numbers of a block) times the norms of the pair and of the filter, with u = 2^-53. `limit` times both
// norms is 2^24 times that. A result of at least so much is right to half of a float's rounding, and is stored. So is one whose window, the pixels that
// it is computed from, has nothing but zeros, as 0. The others go onto a list for blocks_sums.cu, with what the transform gives. Where the list is full,
// they are summed here.
//
// Mapping  block -> BATCH rows of results of a pair of a channel; thread -> some numbers of each pass. In the first pass neighbouring threads have neighbouring
//          frequencies, in the last one neighbouring results.
// Memory   shared: the rows; the masks of the parts that windows reach.
//
// By hand: nvcc -cubin -I cu cu/fft/blocks_results.cu
#include "core/portable.cuh"
#include "fft/blocks.cuh"

#define COLUMN_OF(pixel) (linear ? divided(pixel, arg.by_length_h) : (pixel))  // of a row
#define RESIDUAL_IF(there, at) ((there) ? RESIDUAL_AT(at) : NOTHING)

KERNEL LAUNCH_BOUNDS(THREADS, TOGETHER) void fft_blocks_results(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                                                                const GLOBAL_MEM data_t* RESTRICT bias,
                                                                const GLOBAL_MEM data_t* RESTRICT scale, const GLOBAL_MEM data_t* residual,
                                                                GLOBAL_MEM data_t* y, const GLOBAL_MEM wide_t* read,
                                                                const GLOBAL_MEM wide_t* RESTRICT packed, GLOBAL_MEM wide_t* list,
                                                                const BlocksArguments arg) {
  AFTER_LAST_LAUNCH
  SHARED_NUMBERS
  LOCAL_MEM int masks[MASKS];
  const GLOBAL_MEM complex_t* turns = (const GLOBAL_MEM complex_t*)(packed + arg.turns_w);
  const int at_pair = divided((int)GID_0, arg.by_result_parts), rest = (int)GID_0 - at_pair * (int)arg.result_parts;
  const int z_of = divided(rest, arg.by_result_parts_of_plane), top = (rest - z_of * (int)arg.result_parts_of_plane) * BATCH;
  const int channel = divided(at_pair, arg.by_pairs), group = divided(channel, arg.by_per_group), in_launch = at_pair - channel * (int)arg.pairs;
  const int number0 = 2 * (in_launch + (int)arg.first_pair), alone = number0 + 1 == (int)arg.all_blocks, number1 = alone ? number0 : number0 + 1;
  const Block block0 = block_of(&arg, number0), block1 = block_of(&arg, number1);
  const int p = (int)arg.p, width = (int)arg.q, used_d = (int)arg.used_d, used_h = (int)arg.used_h, used_w = (int)arg.used_w, linear = arg.linear != 0;
  const int t = (int)arg.t, r = (int)arg.r, s = (int)arg.s;
  // results of this plane: rows and columns
  const int there0 = block0.plane * used_d + z_of < (int)arg.o, there1 = !alone && block1.plane * used_d + z_of < (int)arg.o;
  const int rows0 = there0 ? linear ? (int)arg.length_h : SMALLER(used_h, p - block0.row * used_h) : 0, columns0 = SMALLER(used_w, width - block0.column * used_w);
  const int rows1 = there1 ? linear ? (int)arg.length_h : SMALLER(used_h, p - block1.row * used_h) : 0, columns1 = SMALLER(used_w, width - block1.column * used_w);
  if (top >= rows0 && top >= rows1) return;
  const int length = (int)arg.length_w, q = (int)arg.eighth_w, source = group * (int)arg.pairs + in_launch, length_h = (int)arg.length_h;
  if (LID_0 < MASKS) masks[LID_0] = 0;

  const long_t first_row = at_pair * (long_t)arg.groups * arg.rows + (z_of + t - 1) * length_h;
  const GLOBAL_MEM complex_t* from = (const GLOBAL_MEM complex_t*)(read + arg.from_at) + first_row * BATCH;
  ALL(at, q * BATCH) {
    const int within = at % BATCH, lane = at / BATCH % BATCH, number = at / (BATCH * BATCH) * BATCH + within;
    const int row = SMALLER(r - 1 + top + lane, length_h - 1);  // those behind the end are not stored
    complex_t v[8];
    EACH(i, 8) v[i] = from[(((i * q + number) / BATCH) * (long_t)arg.rows + row) * BATCH + within];
    TRANSFORM_BACK(v, 8)
    EACH(i, 8) z[SLOT(8 * number + i, lane)] = v[i];
  }
  local_barrier();
  {  // of all parts that windows of these rows reach
    const int of_plane = (int)arg.parts_of_plane, first = linear ? 0 : top / BATCH;
    const int words = ((linear ? of_plane : SMALLER((top + BATCH + r - 2) / BATCH + 1, of_plane)) - first) * MASKS;
    for (int plane = z_of; plane < z_of + t; ++plane) {
      const GLOBAL_MEM int* of_parts = (const GLOBAL_MEM int*)(read + arg.masks_at) + (source * (long_t)arg.parts + plane * of_plane + first) * MASKS;
      ALL(at, words) if (of_parts[at]) OR_LOCAL(masks[at % MASKS], of_parts[at]);
    }
  }
  local_barrier();
  middle_passes_back(z, turns, length, (int)arg.factors_w, (int)arg.count_w);

  EPILOGUE_FLAGS
  const acc_t factor = SCALE_OF(channel), summand = BIAS_OF(channel);
  const wide_t of_filter = packed[arg.filter_norms_at + channel], limit = BITS_TO_WIDE(arg.limit) * of_filter * read[arg.norms_at + source];
  const int fits = of_filter == of_filter, lost = (masks[4] | masks[5] | masks[6] | masks[7]) != 0;
  const int some_zeros = (masks[0] & masks[1] & (alone ? -1 : masks[2] & masks[3])) != -1;
  const int row_step = linear ? 0 : width;  // from a row's results to the next row's
  const index_t corner0 = ((block0.image * (index_t)arg.k + channel) * (index_t)arg.o + block0.plane * used_d + z_of) * (p * width) +
                          ((block0.row * used_h * width) + top * row_step + block0.column * used_w);
  const index_t corner1 = ((block1.image * (index_t)arg.k + channel) * (index_t)arg.o + block1.plane * used_d + z_of) * (p * width) +
                          ((block1.row * used_h * width) + top * row_step + block1.column * used_w);
  const int doubted = !fits || lost || (some_zeros && !(limit > 0));  // then no result is taken without a look at its window
  ALL(at, q * BATCH) {
    const int number = linear ? at / BATCH : divided(at, arg.by_eighth_w), lane = linear ? at % BATCH : number, j = linear ? number : at - number * q;
    complex_t v[8];
    EACH(i, 8) {
      v[i] = z[SLOT(j + i * q, lane)];
      if (i) v[i] = times_conjugate(v[i], turns[i * j]);
    }
    TRANSFORM_BACK(v, 8)
    // the circular convolution is right from its column s - 1 on
    const int step = linear ? length_h : 1, apart = q * step, column0 = (linear ? top + lane : 0) + j * step - (s - 1);
    const int in_row0 = top + lane < rows0, in_row1 = top + lane < rows1;
    unsigned off = 0;
    EACH(i, 8) {
      const int column = column0 + i * apart, in_range0 = in_row0 && (unsigned)column < (unsigned)columns0;
      const int in_range1 = in_row1 && (unsigned)column < (unsigned)columns1;
      const int right0 = !doubted && fabs(v[i].x) >= limit, right1 = !doubted && fabs(v[i].y) >= limit;
      off |= (unsigned)(in_range0 && !right0) << 2 * i | (unsigned)(in_range1 && !right1) << (2 * i + 1);
      const index_t at0 = corner0 + (lane * row_step + column), at1 = corner1 + (lane * row_step + column);
      acc_t both[2] = {(acc_t)v[i].x, (acc_t)v[i].y};
      FINISH(both[0], factor, summand, RESIDUAL_IF(in_range0 && right0, at0))
      FINISH(both[1], factor, summand, RESIDUAL_IF(in_range1 && right1, at1))
      ACTIVATE(both, 2)
      if (in_range0 && right0) STORE(y, at0, both[0]);
      if (in_range1 && right1) STORE(y, at1, both[1]);
    }
    if (!off) continue;

    EACH(i, 8) z[SLOT(j + i * q, lane)] = v[i];
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      if (!(off >> i & 1)) continue;
      const complex_t both = z[SLOT(j + i / 2 * q, lane)];
      const int column = column0 + i / 2 * apart, second = i % 2;
      const index_t to = (second ? corner1 : corner0) + (lane * row_step + column);
      double value = fits ? second ? both.y : both.x : NO_NUMBER;
      int right = 0;
      if (fits && (some_zeros || lost)) {
        const mask_t window = SEGMENTS_FROM_TO(divided(COLUMN_OF(column), arg.by_segment), divided(COLUMN_OF(column + s - 1), arg.by_segment));
        const LOCAL_MEM_POINTER int* of_block = masks + 2 * second;
        const mask_t there = (mask_t)(unsigned)of_block[1] << 32 | (unsigned)of_block[0], out = (mask_t)(unsigned)of_block[5] << 32 | (unsigned)of_block[4];
        if (out & window) value = NO_NUMBER;
        else if (!(there & window)) value = 0, right = 1;
      }
      right |= fabs(value) >= limit;
      if (!right) {
        const int entry = NEXT_OF((GLOBAL_MEM int*)(list + arg.count_at));
        if (entry < (int)arg.most) {
          GLOBAL_MEM wide_t* listed = list + arg.list_at + entry * (long_t)ENTRY;
          listed[0] = value;
          listed[1] = limit;
          ((GLOBAL_MEM long_t*)listed)[2] = to;
          continue;
        }
        const Block block = second ? block1 : block0;
        const GLOBAL_MEM data_t* image = x + (block.image * (index_t)arg.image_stride + group * (index_t)arg.group_stride);
        const GLOBAL_MEM data_t* filter = w + (group * (index_t)arg.f_group + (channel - group * (int)arg.per_group) * (index_t)arg.f_written);
        const int front = (int)arg.first_d + block.plane * used_d + z_of, first_row = (int)arg.first_h + (linear ? 0 : block.row * used_h + top + lane);
        const int first_column = (int)arg.first_w + block.column * used_w + column;
        const double enough = MAY_BE_ZERO(value, limit) ? NO_NUMBER : limit;
        double total = 0, magnitude = 0;
        for (int share = 0; share < SUMMANDS && !right; ++share) {
          const Sum sum = share_of_sum(image, filter, &arg, front, first_row, first_column, share, enough);
          total += sum.total;
          magnitude += sum.magnitude;
          right = sum.magnitude >= enough;
        }
        if (!right && !(magnitude >= enough)) value = total;
      }
      acc_t one = (acc_t)value;
      FINISH(one, factor, summand, RESIDUAL_AT(to))
      ACTIVATE(&one, 1)
      STORE(y, to, one);
    }
  }
}
