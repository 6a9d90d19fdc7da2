// finish.cuh: the epilogue (epilogue.cuh) of the tensor-core kernels.
//
// The launch's arguments say which of scale, bias, residual and activation there are, so one text serves all layers. With LAYER they are
// constants of the text, which takes far fewer instructions. A missing one is neutral: a scale of 1, a bias or a residual of -0, which
// changes no sum, not even one of -0. The compiler may join a product and a sum to one rounding where it likes. So those that are joined are
// written as fmaf, and both texts give the same bits. Scale and bias of a channel are of the layer's type, or both float: has_scale is 2 then.
#pragma once
#include "core/packed.cuh"

typedef float acc_t;
#include "core/activation.cuh"

// Whether a launch has each: `arguments` has the members has_bias, has_scale, activation and slope, and has_residual unless that is a constant of every text.
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

// Arguments of sums that have at most a bias; a missing bias is the neutral one. A text without LAYER that branches to these once needs no other branch
// for each number.
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

// Whether scale and bias are float where the layer's type is not.
template <class T, class Arguments> DEVICE bool of_floats(const Arguments& arguments) { return sizeof(T) < 4 && has_scale(arguments) == 2; }

// Scale and bias of an output channel; neutral ones if the layer has none.
struct ScaleAndBias {
  float scale, bias;
  ScaleAndBias() = default;
  DEVICE ScaleAndBias(float scale, float bias) : scale(scale), bias(bias) {}
  template <class Arguments, class T>
  DEVICE ScaleAndBias(const Arguments& arguments, const T* scales, const T* biases, int k)
      : scale(of_floats<T>(arguments) ? ((const float*)scales)[k] : has_scale(arguments) ? to_float(scales[k]) : 1),
        bias(!has_bias(arguments) ? -0.f : of_floats<T>(arguments) ? ((const float*)biases)[k] : to_float(biases[k])) {}
  template <class Arguments, class T>  // tests whether there is a bias
  DEVICE ScaleAndBias(const Plain<Arguments>& arguments, const T* scales, const T* biases, int k)
      : ScaleAndBias(static_cast<const Arguments&>(arguments), scales, biases, k) {}
};

// Finishes the sums of a channel, but for the activation. `scaled`: sums have a factor of their own.
template <bool scaled> struct Finish {
  ScaleAndBias of;
  // all but the residual
  template <class Arguments> DEVICE float shifted(const Arguments& arguments, float sum, float factor) const {
    if (!scaled) return fmaf(sum, of.scale, of.bias);
    const float v = fmaf(sum, factor, has_scale(arguments) ? -0.f : of.bias);
    return has_scale(arguments) ? fmaf(v, of.scale, of.bias) : v;
  }
  // with the residual, which takes the place of a missing bias
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

// Applies the activation to finished sums, in place. One branch serves all of them, and loads do not move across it.
template <class Arguments, int count> DEVICE void activate(const Arguments& arguments, float (&v)[count]) {
#if !MOMENTS  // layers whose moments are emitted have no activation
  activate_some<count>(activation(arguments), __int_as_float((int)arguments.slope), v);
#endif
}
