// fold_norms.cu: batch normalisation by given statistics as a factor and a summand of a convolution, for NORMS norms in one launch.
//
//   folded[start + k] = gamma[k] / sqrt(var[k] + eps) = a[k],   folded[start + channels + k] = (bias[k] - mean[k]) * a[k] + beta[k]
//
// Mapping  thread -> a channel of a norm; GID_0 -> THREADS channels, `blocks` of them for each norm.
// Memory   registers only. Addresses and sizes are arguments: in OpenCL, where a struct holds no addresses, of one norm. A vector whose
//          address is 0 is missing: its numbers are 1, or 0.
//
// By hand: nvcc -cubin -I cu cu/nn/fold_norms.cu
#include "core/portable.cuh"

#ifndef NORMS
#define NORMS 1
#endif
#ifndef THREADS
#define THREADS 128
#endif

// `types`: a bit for each vector, in the order of Vectors: 1 if it has the arrays' type, 0 if it has that of the sums. eps: an acc_t's bits.
struct FoldedNorm {
  long_t channels, start, eps, types;
};
struct FoldedNorms {
  struct FoldedNorm of[NORMS];
};

#ifdef __OPENCL_VERSION__
#define VECTORS \
  const GLOBAL_MEM data_t *gamma, const GLOBAL_MEM data_t *beta, const GLOBAL_MEM data_t *mean, const GLOBAL_MEM data_t *var, const GLOBAL_MEM data_t *bias
#define VECTORS_OF(norm)
#define CONSTANT
#else
struct Vectors {
  const data_t* of[NORMS][5];  // gamma, beta, mean, var, and the convolution's bias
};
#define VECTORS const __grid_constant__ Vectors vectors
#define VECTORS_OF(norm)                                                                                                            \
  const data_t *const gamma = vectors.of[norm][0], *const beta = vectors.of[norm][1], *const mean = vectors.of[norm][2];            \
  const data_t *const var = vectors.of[norm][3], *const bias = vectors.of[norm][4];
#define CONSTANT __grid_constant__
#endif

KERNEL LAUNCH_BOUNDS(THREADS, 1) void fold_norms(
    VECTORS, GLOBAL_MEM acc_t* RESTRICT folded, const CONSTANT struct FoldedNorms norms, const long_t blocks) {
  NEXT_LAUNCH_MAY_COME
  AFTER_LAST_LAUNCH
  const int number = (int)(GID_0 / blocks), k = (int)(GID_0 - number * blocks) * THREADS + LID_0;
  VECTORS_OF(number)
  const int channels = (int)norms.of[number].channels, types = (int)norms.of[number].types;
  if (k >= channels) return;
#define NUMBER(vector, bit, missing) (!(vector) ? (acc_t)(missing) : types >> (bit) & 1 ? LOAD(vector, k) : ((const GLOBAL_MEM acc_t*)(vector))[k])
  const acc_t factor = NUMBER(gamma, 0, 1) / sqrt(NUMBER(var, 3, 0) + BITS_TO_ACC(norms.of[number].eps));
  GLOBAL_MEM acc_t* const to = folded + norms.of[number].start;
  to[k] = factor;
  to[channels + k] = (NUMBER(bias, 4, 0) - NUMBER(mean, 2, 0)) * factor + NUMBER(beta, 1, 0);
}
