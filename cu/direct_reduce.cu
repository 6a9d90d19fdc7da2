// direct_reduce.cu: the second half of products that leave their sums in a workspace: parts of sums, or stride phases.
//
//   y[i] = bias[channel of i] + sum over split of parts[split][i], always in the same order; and the rest of epilogue.cuh
//
// Phases   in the gradient of the input a stride phase has every STEP_W-th column. Written in their places, its elements would be
//          parts of sectors of memory, each of which costs as much as a whole one. So a plane of parts holds one phase after
//          the other, without gaps, and here they find their places: [d % STEP_D][h % STEP_H][w % STEP_W][rest of d][of h][of w].
// Mapping  thread -> EACH elements of y, THREADS apart; GID_0 -> THREADS * EACH neighbours. Memory: registers only.
#include "portable.cuh"

#ifndef THREADS
#define THREADS 256
#define SPLIT_K 4
#define CHANNELS 64
#define OUT_SIZE 49
#define EACH 1
#define H 7
#define W 7
#define STEP_D 1
#define STEP_H 1
#define STEP_W 1
#define HAS_BIAS 0
#define HAS_SCALE 0
#define HAS_RESIDUAL 0
#define RELU 0
#endif

#define STEPS (STEP_D * STEP_H * STEP_W)

// where element `i` of y lies in a part
WITHIN_KERNEL long_t place(long_t i) {
  if (STEPS == 1) return i;
  const int inside = (int)(i % OUT_SIZE), d = inside / (H * W), h = inside / W % H, w = inside % W;
  const int phase = (d % STEP_D * STEP_H + h % STEP_H) * STEP_W + w % STEP_W;
  return i - inside + phase * (OUT_SIZE / STEPS) + (d / STEP_D * (H / STEP_H) + h / STEP_H) * (W / STEP_W) + w / STEP_W;
}

KERNEL LAUNCH_BOUNDS(THREADS, 1) void direct_reduce(const GLOBAL_MEM acc_t* RESTRICT parts, const GLOBAL_MEM data_t* RESTRICT bias,
                                                    const GLOBAL_MEM data_t* RESTRICT scale, const GLOBAL_MEM data_t* residual,
                                                    GLOBAL_MEM data_t* RESTRICT y, const long_t size) {
#pragma unroll
  for (int each = 0; each < EACH; ++each) {
    const long_t i = ((long_t)GID_0 * EACH + each) * THREADS + LID_0;
    if (i < size) {
      acc_t sum = 0;
#pragma unroll
      for (int split = 0; split < SPLIT_K; ++split) sum += parts[(index_t)split * (index_t)size + (index_t)place(i)];
      EPILOGUE(sum, LOAD(scale, (int)(i / OUT_SIZE % CHANNELS)), LOAD(bias, (int)(i / OUT_SIZE % CHANNELS)), LOAD(residual, (index_t)i))
      STORE(y, (index_t)i, sum);
    }
  }
}
