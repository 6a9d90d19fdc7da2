// epilogue.cuh: what becomes of a sum on its way to y, in the sum's own type: activation(sum * scale[k] + bias[k] + residual).
//
// HAS_SCALE, HAS_BIAS, HAS_RESIDUAL and RELU say what there is; an argument for what there is not is never read. Scale and bias
// belong to an output channel, the residual lies in memory as y does. It may be y itself: what stores an element of y is what
// read that element of the residual, before.
#pragma once

// in two halves, for kernels whose sums change hands in between
#define SCALE_AND_SHIFT(v, scale, bias) \
  {                                     \
    if (HAS_SCALE) (v) *= (scale);      \
    if (HAS_BIAS) (v) += (bias);        \
  }
#define ADD_AND_ACTIVATE(v, residual)      \
  {                                        \
    if (HAS_RESIDUAL) (v) += (residual);   \
    if (RELU && (v) < 0) (v) = 0; /* a NaN stays one */ \
  }
#define EPILOGUE(v, scale, bias, residual) \
  {                                        \
    SCALE_AND_SHIFT(v, scale, bias)        \
    ADD_AND_ACTIVATE(v, residual)          \
  }
