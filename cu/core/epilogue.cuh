// epilogue.cuh: what finishes a sum on its way to y, in the sum's own type: activation(sum * scale[k] + bias[k] + residual).
//
// Scale and bias belong to an output channel. The residual has y's layout and may be y itself: the thread that stores an element of y
// has read that element of the residual before. The launch's arguments, `arg`, say which of the three there are; with LAYER they are constants.
// A missing one is never read. It counts as a factor of 1 or a summand of -0, which change no bit. On CUDA the product and the first summand
// are rounded together; the first is the bias, or without one the residual. The code spells that out. Left to the compiler, it would depend on how
// the branches on the arguments are compiled, and a text with LAYER would give other bits.
//
// Scale and bias have the arrays' type. With a has_scale of 2 both have that of the sums.
#pragma once

#define EPILOGUE_FLAGS                                                                                            \
  const int has_scale = OF_LAYER(HAS_SCALE, has_scale), has_bias = OF_LAYER(HAS_BIAS, has_bias);                  \
  const int has_residual = OF_LAYER(HAS_RESIDUAL, has_residual), activation = OF_LAYER(ACTIVATION, activation);   \
  const acc_t slope = BITS_TO_ACC(arg.slope);
#define NOTHING ((acc_t)-0.0f)
#if DTYPE == 16 || DTYPE == 17
#define OF_CHANNEL(vector, channel) (has_scale == 2 ? ((const GLOBAL_MEM acc_t*)(vector))[channel] : LOAD(vector, channel))
#else
#define OF_CHANNEL(vector, channel) LOAD(vector, channel)
#endif
#define SCALE_OF(channel) (has_scale ? OF_CHANNEL(scale, channel) : (acc_t)1)
#define BIAS_OF(channel) (has_bias ? OF_CHANNEL(bias, channel) : NOTHING)
#define RESIDUAL_AT(at) (has_residual ? LOAD(residual, at) : NOTHING)
// all but the activation
#define FINISH(v, scale_, bias_, residual_)                    \
  {                                                            \
    SCALE_AND_ADD(v, scale_, has_bias ? (bias_) : (residual_)) \
    (v) += has_bias ? (residual_) : NOTHING;                   \
  }
// Whether sums have at most a bias: sum + BIAS_OF(channel) has the same bits then, in far fewer instructions.
#define PLAIN (!(has_scale | has_residual | activation))
// applies the activation to v[0], ... v[count - 1], which are finished otherwise
#define ACTIVATE(v, count) ACTIVATE_SOME(activation, slope, v, count)
#define FINISH_AT(v, channel, at)                             \
  {                                                           \
    const acc_t residual_ = RESIDUAL_AT(at);                  \
    FINISH(v, SCALE_OF(channel), BIAS_OF(channel), residual_) \
    ACTIVATE(&(v), 1)                                         \
  }
