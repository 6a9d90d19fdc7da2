// columns.cu: the columns of filters are transformed, or those of pairs of blocks, multiplied, and transformed back. blocks.cuh says what pairs are.
//
//   FORWARD  spectrum[filter] = transforms of the columns that rows.cu made
//   WHOLE    made[k][pair] = inverse transforms of (transforms of the columns * spectrum of filter k)
//
// One block a pair, or a filter, also adds up the squares of its parts, of which rows.cu has made a sum each: the norm of a pair and of a filter. That of a filter
// with Inf or NaN is NaN.
//
// Mapping  block -> BATCH columns of a pair of a channel of the result; thread -> some numbers of each pass. Neighbouring threads have neighbouring columns.
// Memory   shared: the columns. The product, between the last pass and the first of the way back, takes place in registers.
//
// By hand: nvcc -cubin -I cu cu/fft/columns.cu
#include "core/portable.cuh"
#ifndef MODE
#define MODE 1
#endif
#include "fft/blocks.cuh"

#define FORWARD 0
#define WHOLE 1

KERNEL LAUNCH_BOUNDS(THREADS, TOGETHER) void fft_columns(const GLOBAL_MEM wide_t* read, const GLOBAL_MEM wide_t* RESTRICT filters, const GLOBAL_MEM wide_t* RESTRICT rotations,
                                                  GLOBAL_MEM wide_t* made, const BlocksArguments arg) {
  AFTER_LAST_LAUNCH
  SHARED_NUMBERS
  LOCAL_MEM wide_t squares[32];
  LOCAL_MEM int lost[32];
  const GLOBAL_MEM complex_t* turns = (const GLOBAL_MEM complex_t*)(rotations + arg.turns_h);
  const int at_pair = divided((int)GID_0, arg.by_groups), columns = (int)GID_0 - at_pair * (int)arg.groups;
  const int length = (int)arg.length_h, q = (int)arg.eighth_h;
#if MODE == FORWARD
  const int source = at_pair, noted = columns == 0;
#else
  const int k = divided(at_pair, arg.by_pairs), group = divided(k, arg.by_per_group), source = group * (int)arg.pairs + at_pair - k * (int)arg.pairs;
  const int noted = columns == 0 && k == group * (int)arg.per_group;
#endif
  if (noted && LID_0 < 32) {
    wide_t sum = 0;
    int found = 0;
    const long_t first = source * (long_t)arg.parts;
    const GLOBAL_MEM int* masks = (const GLOBAL_MEM int*)(read + arg.masks_at);
    for (int i = LID_0; i < (int)arg.parts; i += 32) {
      sum += read[arg.part_norms_at + first + i];
      for (int word = MASKS / 2; word < MASKS; ++word) found |= masks[(first + i) * MASKS + word];
    }
    squares[LID_0] = sum;
    lost[LID_0] = found;
  }

  const GLOBAL_MEM complex_t* from = (const GLOBAL_MEM complex_t*)(read + arg.rows_at) + (source * (long_t)arg.groups + columns) * arg.rows * BATCH;
  ALL(at, q * BATCH) {
    const int lane = at % BATCH, j = at / BATCH;
    complex_t v[8];
#if MODE == FORWARD
    EACH(i, 8) {
      v[i] = COMPLEX(0, 0);
      if (j + i * q < (int)arg.rows) v[i] = from[(j + i * q) * BATCH + lane];
    }
#else
    EACH(i, 8) v[i] = from[(j + i * q) * BATCH + lane];
#endif
    TRANSFORM(v, 8)
    EACH(i, 8) z[SLOT(j + i * q, lane)] = i ? times(v[i], turns[i * j]) : v[i];
  }
  local_barrier();
  if (noted && LID_0 == 0) {
    wide_t sum = 0;
    int found = 0;
    for (int i = 0; i < 32; ++i) {
      sum += squares[i];
      found |= lost[i];
    }
#if MODE == FORWARD
    made[arg.filter_norms_at + source] = found ? NO_NUMBER : sqrt(sum);
#else
    made[arg.norms_at + source] = sqrt(sum);
#endif
  }
  middle_passes(z, turns, length, (int)arg.factors_h, (int)arg.count_h);
#if MODE == FORWARD
  GLOBAL_MEM complex_t* to = (GLOBAL_MEM complex_t*)(made + arg.filters_at) + (long_t)GID_0 * length * BATCH;
#else
  const GLOBAL_MEM complex_t* filter = (const GLOBAL_MEM complex_t*)(filters + arg.filters_at) + (k * (long_t)arg.groups + columns) * length * BATCH;
#endif
  ALL(at, q * BATCH) {
    const int lane = at % BATCH, number = at / BATCH;
    complex_t v[8];
    EACH(i, 8) v[i] = z[SLOT(8 * number + i, lane)];
    TRANSFORM(v, 8)
#if MODE == FORWARD
    EACH(i, 8) to[i * q * BATCH + at] = v[i];
#else
    EACH(i, 8) v[i] = times(v[i], filter[i * q * BATCH + at]);
    TRANSFORM_BACK(v, 8)
    EACH(i, 8) z[SLOT(8 * number + i, lane)] = v[i];
#endif
  }
#if MODE == WHOLE
  local_barrier();
  middle_passes_back(z, turns, length, (int)arg.factors_h, (int)arg.count_h);
  GLOBAL_MEM complex_t* to = (GLOBAL_MEM complex_t*)(made + arg.made_at) + (at_pair * (long_t)arg.groups + columns) * length * BATCH;
  ALL(at, q * BATCH) {
    const int lane = at % BATCH, j = at / BATCH;
    complex_t v[8];
    EACH(i, 8) {
      v[i] = z[SLOT(j + i * q, lane)];
      if (i) v[i] = times_conjugate(v[i], turns[i * j]);
    }
    TRANSFORM_BACK(v, 8)
    EACH(i, 8) if (j + i * q >= (int)arg.r - 1) to[(j + i * q) * BATCH + lane] = v[i];
  }
#endif
}
