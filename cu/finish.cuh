// finish.cuh: epilogue.cuh for the kernels of the tensor cores.
//
// The launch's arguments say which of scale, bias, residual and activation there are, so one text serves all layers. With LAYER they are
// constants of the text, which takes far fewer instructions. What there is not is neutral: a scale of 1, a bias or a residual of -0, which
// changes no sum, not even one of -0. Left to itself, the compiler may join a product and a sum to one rounding where it likes. So those that
// are joined are written as fmaf, and either text gives the same bits.
#pragma once
#include "packed.cuh"

typedef float acc_t;
#include "activation.cuh"

// What there is: `arguments` has the members has_bias, has_scale, activation and slope, and has_residual unless that is a constant of every text.
#ifdef LAYER
#define OF_LAYER(NAME, argument) NAME
#else
#define OF_LAYER(NAME, argument) ((int)(argument))
#endif
template <class Arguments> DEVICE int has_scale([[maybe_unused]] const Arguments& arguments) { return OF_LAYER(HAS_SCALE, arguments.has_scale); }
template <class Arguments> DEVICE int has_bias([[maybe_unused]] const Arguments& arguments) { return OF_LAYER(HAS_BIAS, arguments.has_bias); }
template <class Arguments> DEVICE int activation([[maybe_unused]] const Arguments& arguments) { return OF_LAYER(ACTIVATION, arguments.activation); }
template <class Arguments> DEVICE int has_residual([[maybe_unused]] const Arguments& arguments) {
#ifdef HAS_RESIDUAL
  return HAS_RESIDUAL;
#else
  return (int)arguments.has_residual;
#endif
}

// The arguments of sums that nothing but a bias finishes. A neutral one takes the place of a bias that there is not. A text without LAYER that has
// a branch for these needs none of the others for each number.
template <class Arguments> struct Plain : Arguments {};
template <class Arguments> DEVICE int has_scale(const Plain<Arguments>&) { return 0; }
template <class Arguments> DEVICE int has_bias(const Plain<Arguments>&) { return 1; }
template <class Arguments> DEVICE int activation(const Plain<Arguments>&) { return 0; }
template <class Arguments> DEVICE int has_residual(const Plain<Arguments>&) { return 0; }
template <class Arguments> DEVICE bool is_plain(const Arguments& arguments) {
  return !has_scale(arguments) && !has_residual(arguments) && !activation(arguments);
}
template <class Arguments> DEVICE const Plain<Arguments>& as_plain(const Arguments& arguments) {
  return static_cast<const Plain<Arguments>&>(arguments);
}

// Scale and bias of an output channel, or what is neutral.
struct ScaleAndBias {
  float scale, bias;
  ScaleAndBias() = default;
  DEVICE ScaleAndBias(float scale, float bias) : scale(scale), bias(bias) {}
  template <class Arguments, class T>
  DEVICE ScaleAndBias(const Arguments& arguments, const T* scales, const T* biases, int k)
      : scale(has_scale(arguments) ? to_float(scales[k]) : 1), bias(has_bias(arguments) ? to_float(biases[k]) : -0.f) {}
  template <class Arguments, class T>  // asks whether there is a bias
  DEVICE ScaleAndBias(const Plain<Arguments>& arguments, const T* scales, const T* biases, int k)
      : ScaleAndBias(static_cast<const Arguments&>(arguments), scales, biases, k) {}
};

// What finishes the sums of a channel, but for the activation. `scaled`: they have a factor of their own.
template <bool scaled> struct Finish {
  ScaleAndBias of;
  // all but the residual
  template <class Arguments> DEVICE float shifted(const Arguments& arguments, float sum, float factor) const {
    if (!scaled) return fmaf(sum, of.scale, of.bias);
    const float v = fmaf(sum, factor, has_scale(arguments) ? -0.f : of.bias);
    return has_scale(arguments) ? fmaf(v, of.scale, of.bias) : v;
  }
  // all: without a bias the residual takes its place
  template <class Arguments> DEVICE float whole(const Arguments& arguments, float sum, float factor, float residual) const {
#if defined(HAS_RESIDUAL) && !HAS_RESIDUAL
    return shifted(arguments, sum, factor);
#else
    Finish first = *this;
    if (!has_bias(arguments)) first.of.bias = residual;
    const float v = first.shifted(arguments, sum, factor);
    return v + (has_bias(arguments) ? residual : -0.f);
#endif
  }
};

// The activation of finished sums, which are changed. It is one branch for all of them, and loads don't move across it.
template <class Arguments, int count> DEVICE void activate(const Arguments& arguments, float (&v)[count]) {
#if !MOMENTS  // of layers without an activation
  activate_some<count>(activation(arguments), __int_as_float((int)arguments.slope), v);
#endif
}
