// blocks_columns.cu: transforms along the columns of what blocks_rows.cu made, or along the depth of volumes. blocks.cuh says what pairs are.
//
//   FORWARD   made = transforms
//   WHOLE     made[k][pair] = inverse transforms of (transforms * spectrum of filter k)
//   BACKWARD  made = inverse transforms
//
// One block of threads a pair, or a filter, also adds up the squares of its parts, of which blocks_rows.cu has made a sum each: the norm of a pair and
// of a filter. That of a filter with Inf or NaN is NaN.
//
// Mapping  block -> BATCH neighbouring lines of a pair of a channel; thread -> some numbers of each pass. Neighbouring threads have neighbouring lines.
// Memory   shared: the lines. The product, between the last pass and the first of the way back, takes place in registers.
//
// By hand: nvcc -cubin -I cu cu/fft/blocks_columns.cu
#include "core/portable.cuh"
#ifndef MODE
#define MODE 1
#define LINEAR 0
#endif
#include "fft/blocks.cuh"

#define FORWARD 0
#define WHOLE 1
#define BACKWARD 2
// what norm is noted
#define OF_PAIR 1
#define OF_FILTER 2

// The frequency of the rows' transforms that column number `column` has.
WITHIN_KERNEL int frequency_of(const BlocksArguments* arg, int column) {
  const int i = divided(column, arg->by_eighth_w), number = column - i * (int)arg->eighth_w;
  int place = 8 * number + i, size = (int)arg->eighth_w, frequency = place / size, weight = 8, factors = (int)arg->factors_w;
  place -= frequency * size;
  for (int count = (int)arg->count_w; count; --count, factors >>= 4) {
    size /= factors & 15;
    const int digit = place / size;
    place -= digit * size;
    frequency += weight * digit;
    weight *= factors & 15;
  }
  return frequency + weight * place;
}
// e^(-2 pi i row * frequency / (length_h * length_w))
WITHIN_KERNEL complex_t turn_of_line(const BlocksArguments* arg, int row, int frequency) {
  wide_t s, c;
  TURN((row * frequency) * ((wide_t)2 / (wide_t)(arg->length_h * arg->length_w)), s, c)
  return COMPLEX(c, -s);
}

KERNEL LAUNCH_BOUNDS(THREADS, TOGETHER) void fft_blocks_columns(const GLOBAL_MEM wide_t* read, const GLOBAL_MEM wide_t* RESTRICT filters,
                                                         const GLOBAL_MEM wide_t* RESTRICT rotations, GLOBAL_MEM wide_t* made, const BlocksArguments arg) {
  AFTER_LAST_LAUNCH
  SHARED_NUMBERS
  LOCAL_MEM wide_t squares[32];
  LOCAL_MEM int lost[32], frequencies[BATCH];
  const GLOBAL_MEM complex_t* turns = (const GLOBAL_MEM complex_t*)(rotations + arg.turns_axis);
  const int at_pair = divided((int)GID_0, arg.by_lines), rest = (int)GID_0 - at_pair * (int)arg.lines;
  const int columns = divided(rest, arg.by_lines_of_group), line = rest - columns * (int)arg.lines_of_group + (int)arg.first_line;
  const int length = (int)arg.axis_length, q = (int)arg.axis_eighth;
  const long_t apart = arg.apart, place = columns * arg.rows + line * arg.line_step, place_read = columns * arg.rows_read + line * arg.line_step;
#if MODE == WHOLE
  const int k = divided(at_pair, arg.by_pairs), group = divided(k, arg.by_per_group), source = group * (int)arg.pairs + at_pair - k * (int)arg.pairs;
  const int noted = arg.notes && rest == 0 && k == group * (int)arg.per_group;
#else
  const int source = at_pair, noted = arg.notes && rest == 0;
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
  if (LINEAR && LID_0 < BATCH) frequencies[LID_0] = frequency_of(&arg, columns * BATCH + LID_0);
  local_barrier();
  if (noted && LID_0 == 0) {
    wide_t sum = 0;
    int found = 0;
    for (int i = 0; i < 32; ++i) {
      sum += squares[i];
      found |= lost[i];
    }
    if (arg.notes == OF_FILTER) made[arg.filter_norms_at + source] = found ? NO_NUMBER : sqrt(sum);
    else made[arg.norms_at + source] = sqrt(sum);
  }

  const GLOBAL_MEM complex_t* from = (const GLOBAL_MEM complex_t*)(read + arg.from_at) + (source * (long_t)arg.groups * arg.rows_read + place_read) * BATCH;
  GLOBAL_MEM complex_t* to = (GLOBAL_MEM complex_t*)(made + arg.to_at) + (at_pair * (long_t)arg.groups * arg.rows + place) * BATCH;
#if MODE != BACKWARD
  ALL(at, q * BATCH) {
    const int lane = at % BATCH, j = at / BATCH;
    complex_t v[8];
    EACH(i, 8) {
      v[i] = COMPLEX(0, 0);
      if (MODE == WHOLE || j + i * q < (int)arg.there) v[i] = from[(j + i * q) * apart * BATCH + lane];
    }
    if (LINEAR) EACH(i, 8) v[i] = times(v[i], turn_of_line(&arg, j + i * q, frequencies[lane]));
    TRANSFORM(v, 8)
    EACH(i, 8) z[SLOT(j + i * q, lane)] = i ? times(v[i], turns[i * j]) : v[i];
  }
  local_barrier();
  middle_passes(z, turns, length, (int)arg.axis_factors, (int)arg.axis_count);
#endif
#if MODE == WHOLE
  const GLOBAL_MEM complex_t* filter = (const GLOBAL_MEM complex_t*)(filters + arg.filters_at) + (k * (long_t)arg.groups * arg.rows + place) * BATCH;
#endif
  ALL(at, q * BATCH) {
    const int lane = at % BATCH, number = at / BATCH;
    complex_t v[8];
#if MODE == BACKWARD
    EACH(i, 8) v[i] = from[(i * q + number) * apart * BATCH + lane];
#else
    EACH(i, 8) v[i] = z[SLOT(8 * number + i, lane)];
    TRANSFORM(v, 8)
#endif
#if MODE == FORWARD
    EACH(i, 8) to[(i * q + number) * apart * BATCH + lane] = v[i];
#else
#if MODE == WHOLE
    EACH(i, 8) v[i] = times(v[i], filter[(i * q + number) * apart * BATCH + lane]);
#endif
    TRANSFORM_BACK(v, 8)
    EACH(i, 8) z[SLOT(8 * number + i, lane)] = v[i];
#endif
  }
#if MODE != FORWARD
  local_barrier();
  middle_passes_back(z, turns, length, (int)arg.axis_factors, (int)arg.axis_count);
  ALL(at, q * BATCH) {
    const int lane = at % BATCH, j = at / BATCH;
    complex_t v[8];
    EACH(i, 8) {
      v[i] = z[SLOT(j + i * q, lane)];
      if (i) v[i] = times_conjugate(v[i], turns[i * j]);
    }
    TRANSFORM_BACK(v, 8)
    if (LINEAR) EACH(i, 8) v[i] = times_conjugate(v[i], turn_of_line(&arg, j + i * q, frequencies[lane]));
    EACH(i, 8) if (j + i * q >= (int)arg.needed) to[(j + i * q) * apart * BATCH + lane] = v[i];
  }
#endif
}
