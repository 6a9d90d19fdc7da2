// finish.cuh: epilogue.cuh for the kernels of the tensor cores, where bias, scale and activation are arguments: one text serves all of them.
//
// What there is not is neutral: a scale of 1, a bias of -0, which no sum feels, not even one of -0. The multiplications and additions
// are named one by one, because the compiler may join a product and a sum to one rounding where it likes. A residual that there is not is -0, too.
#pragma once
#include "packed.cuh"

typedef float acc_t;
#include "activation.cuh"

// Scale and bias of an output channel, or what is neutral. `arguments` has the members has_bias, has_scale, has_residual, activation and slope.
struct ScaleAndBias {
  float scale, bias;
  ScaleAndBias() = default;
  template <class Arguments, class T>
  DEVICE ScaleAndBias(const Arguments& arguments, const T* scales, const T* biases, int k)
      : scale(arguments.has_scale ? to_float(scales[k]) : 1), bias(arguments.has_bias ? to_float(biases[k]) : -0.f) {}
};

// What finishes the sums of a channel, but for the activation. `scaled`: they have a factor of their own.
template <bool scaled> struct Finish {
  ScaleAndBias of;
  // all but the residual
  template <class Arguments> DEVICE float shifted(const Arguments& arguments, float sum, float factor) const {
    if (!scaled) return fmaf(sum, of.scale, of.bias);
    const float v = fmaf(sum, factor, arguments.has_scale ? -0.f : of.bias);
    return arguments.has_scale ? fmaf(v, of.scale, of.bias) : v;
  }
  // all: without a bias the residual takes its place
  template <class Arguments> DEVICE float whole(const Arguments& arguments, float sum, float factor, float residual) const {
    Finish first = *this;
    if (!arguments.has_bias) first.of.bias = residual;
    const float v = first.shifted(arguments, sum, factor);
    return v + (arguments.has_bias ? residual : -0.f);
  }
};

// The activation of finished sums, which are changed. It is one branch for all of them, and loads don't move across it.
template <class Arguments, int count> DEVICE void activate(const Arguments& arguments, float (&v)[count]) {
#if !MOMENTS  // of layers without an activation
  activate_some<count>((int)arguments.activation, __int_as_float((int)arguments.slope), v);
#endif
}
