// turns.cu: the rotations of transforms: turns[i] = e^(-2 pi i * i / LENGTH), for two lengths.
//
// Mapping  thread -> a rotation.
// Memory   nothing is shared.
//
// By hand: nvcc -cubin -I cu cu/fft/turns.cu
#include "core/portable.cuh"
#include "fft/blocks.cuh"

KERNEL LAUNCH_BOUNDS(THREADS, TOGETHER) void fft_turns(GLOBAL_MEM wide_t* made, const BlocksArguments arg) {
  AFTER_LAST_LAUNCH
  const int at = (int)GID_0 * THREADS + LID_0, of_columns = at >= (int)arg.length_w, i = of_columns ? at - (int)arg.length_w : at;
  const int length = of_columns ? (int)arg.length_h : (int)arg.length_w;
  if (i >= length) return;
  wide_t s, c;
  TURN(i * ((wide_t)2 / length), s, c)
  ((GLOBAL_MEM complex_t*)(made + (of_columns ? arg.turns_h : arg.turns_w)))[i] = COMPLEX(c, -s);
}
