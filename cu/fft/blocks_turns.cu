// blocks_turns.cu: the rotations of transforms of one length: turns[i] = e^(-2 pi i * i / length).
//
// Mapping  thread -> a rotation.
// Memory   nothing is shared.
//
// By hand: nvcc -cubin -I cu cu/fft/blocks_turns.cu
#include "core/portable.cuh"
#include "fft/blocks.cuh"

KERNEL LAUNCH_BOUNDS(THREADS, 1) void fft_blocks_turns(GLOBAL_MEM wide_t* made, const BlocksArguments arg) {
  AFTER_LAST_LAUNCH
  const int i = (int)GID_0 * THREADS + LID_0, length = (int)arg.axis_length;
  if (i >= length) return;
  wide_t s, c;
  TURN(i * ((wide_t)2 / length), s, c)
  ((GLOBAL_MEM complex_t*)(made + arg.turns_axis))[i] = COMPLEX(c, -s);
}
