// blocks_rows.cu: the rows of pairs of blocks, or of filters, are transformed; what is known of them is noted. blocks.cuh says what pairs and transforms are.
//
//   spectrum[channel][pair] = transforms of all rows of the pair, times `gain`
//
// Beside it are noted, of each part of a pair, which is BATCH rows: the sum of squares, and in which of 64 segments of columns there is something but zeros, or
// a value that transforms can't take, Inf or NaN. Such values count as zeros here.
//
// Mapping  block -> BATCH rows of a pair of a channel; thread -> some columns of each pass. In the first pass neighbouring threads have neighbouring
//          pixels, in the last one neighbouring frequencies, which lie in another group of columns each eighth of the row.
// Memory   shared: the rows as complex numbers; sums of squares, and masks.
//
// By hand: nvcc -cubin -I cu cu/fft/blocks_rows.cu
#include "core/portable.cuh"
#include "fft/blocks.cuh"

// An element of an image, at a row and a column that its border may show; 0 outside, and if it is not `wanted`. A select, not a branch: several loads can be
// under way at once.
WITHIN_KERNEL acc_t element(const GLOBAL_MEM data_t* image, const BlocksArguments* arg, int wanted, int row, int column) {
  acc_t v = 0;
  row = SHOWN(row, h, arg);
  column = SHOWN(column, w, arg);
  if (wanted && (unsigned)row < (unsigned)arg->h && (unsigned)column < (unsigned)arg->w) v = LOAD(image, row * (int)arg->row_step + column * (int)arg->column_step);
  return v;
}

KERNEL LAUNCH_BOUNDS(THREADS, TOGETHER) void fft_blocks_rows(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM wide_t* RESTRICT rotations,
                                                             GLOBAL_MEM wide_t* made, const BlocksArguments arg) {
  AFTER_LAST_LAUNCH
  SHARED_NUMBERS
  LOCAL_MEM wide_t squares[THREADS], some_squares[32];
  LOCAL_MEM int masks[MASKS];
  const GLOBAL_MEM complex_t* turns = (const GLOBAL_MEM complex_t*)(rotations + arg.turns_w);
  const int at_pair = divided((int)GID_0, arg.by_parts), part = (int)GID_0 - at_pair * (int)arg.parts;  // the pair among those of all channels
  const int group = divided(at_pair, arg.by_pairs), pair = at_pair - group * (int)arg.pairs + (int)arg.first_pair;
  const int number0 = (int)arg.at_once * pair, alone = arg.at_once == 1 || number0 + 1 == (int)arg.all_blocks, number1 = alone ? number0 : number0 + 1;
  const Block block0 = block_of(&arg, number0), block1 = block_of(&arg, number1);
  const int plane = divided(part, arg.by_parts_of_plane), top = (part - plane * (int)arg.parts_of_plane) * BATCH;
  const int z0 = SHOWN((int)(arg.first_d + block0.plane * arg.used_d) + plane, d, &arg), z1 = SHOWN((int)(arg.first_d + block1.plane * arg.used_d) + plane, d, &arg);
  const int there0 = (unsigned)z0 < (unsigned)arg.d, there1 = !alone && (unsigned)z1 < (unsigned)arg.d;
  const GLOBAL_MEM data_t *image = x + (group * (index_t)arg.group_stride + (index_t)arg.start), *from0 = image, *from1 = image;
  if (there0) from0 += block0.image * (index_t)arg.image_stride + z0 * (index_t)arg.plane_step;
  if (there1) from1 += block1.image * (index_t)arg.image_stride + z1 * (index_t)arg.plane_step;
  const int length = (int)arg.length_w, q = (int)arg.eighth_w, linear = arg.linear != 0;
  const wide_t gain = BITS_TO_WIDE(arg.gain);
  if (LID_0 < MASKS) masks[LID_0] = 0;
  if (GID_0 == 0 && LID_0 == 0 && arg.resets) ((GLOBAL_MEM int*)(made + arg.count_at))[0] = 0;

  wide_t total = 0;
  int found[MASKS];
  EACH(i, MASKS) found[i] = 0;
  {
    const int row0 = (int)(arg.first_h + block0.row * arg.used_h), column0 = (int)(arg.first_w + block0.column * arg.used_w);
    const int row1 = (int)(arg.first_h + block1.row * arg.used_h), column1 = (int)(arg.first_w + block1.column * arg.used_w);
    const int step = linear ? (int)arg.length_h : 1, down = !linear;
    ALL(at, q * BATCH) {
      const int number = linear ? at / BATCH : divided(at, arg.by_eighth_w), lane = linear ? at % BATCH : number, j = linear ? number : at - number * q;
      const int bit = divided(j, arg.by_segment), row = (top + lane) * down, column = (top + lane) * !down + j * step;
      complex_t v[8];
      EACH(i, 8) {
        const acc_t re = element(from0, &arg, there0, row0 + row, column0 + column + i * q * step);
        const acc_t im = element(from1, &arg, there1, row1 + row, column1 + column + i * q * step);
        v[i] = COMPLEX(FITTING(re), FITTING(im));
        total += v[i].x * v[i].x + v[i].y * v[i].y;
        const int mask = 1 << (i % 4 * 8 + bit);
        found[i / 4] |= re == 0 ? 0 : mask;
        found[2 + i / 4] |= im == 0 ? 0 : mask;
        found[4 + i / 4] |= v[i].x == re ? 0 : mask;
        found[6 + i / 4] |= v[i].y == im ? 0 : mask;
        v[i] = SCALED(v[i], gain);
      }
      TRANSFORM(v, 8)
      EACH(i, 8) z[SLOT(j + i * q, lane)] = i ? times(v[i], turns[i * j]) : v[i];
    }
  }
  squares[LID_0] = total;
  local_barrier();
  EACH(i, MASKS) if (found[i]) OR_LOCAL(masks[i], found[i]);
  if (LID_0 < 32) {
    wide_t sum = 0;
    for (int i = LID_0; i < THREADS; i += 32) sum += squares[i];
    some_squares[LID_0] = sum;
  }
  local_barrier();
  middle_passes(z, turns, length, (int)arg.factors_w, (int)arg.count_w);
  if (LID_0 == 0) {
    wide_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += some_squares[i];
    made[arg.part_norms_at + GID_0] = sum;
  }
  if (LID_0 < MASKS) ((GLOBAL_MEM int*)(made + arg.masks_at))[GID_0 * (index_t)MASKS + LID_0] = masks[LID_0];

  GLOBAL_MEM complex_t* to = (GLOBAL_MEM complex_t*)(made + arg.to_at) + (at_pair * (long_t)arg.groups * arg.rows + part * BATCH) * BATCH;
  ALL(at, q * BATCH) {
    const int within = at % BATCH, lane = at / BATCH % BATCH, number = at / (BATCH * BATCH) * BATCH + within;
    complex_t v[8];
    EACH(i, 8) v[i] = z[SLOT(8 * number + i, lane)];
    TRANSFORM(v, 8)
    EACH(i, 8) to[(((i * q + number) / BATCH) * (long_t)arg.rows + lane) * BATCH + within] = v[i];
  }
}
