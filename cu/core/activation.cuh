// activation.cuh: a layer's activation of finished sums: one text for all kernels, in CUDA C++ and OpenCL C.
//
//   RELU        v where it is not below 0, else 0
//   RELU6       the same, and 6 where it is above
//   LEAKY_RELU  v where it is not below 0, else slope * v
//   HARDSWISH   v * min(max(v + 3, 0), 6) / 6
//   SILU        v * s(v),                      s(z) = 1 / (1 + exp(-z))
//   GELU        v / 2 * (1 + erf(v / sqrt(2)))
//   GELU_TANH   v / 2 * (1 + tanh(u)), which is v * s(2u),  u = sqrt(2 / pi) * (v + 0.044715 v^3)
//
// A NaN stays one. `acc_t`, the type, is defined before this is included.
//
// With LAYER the activation's number is a constant, and its instructions stand where the numbers are finished. Without it the number is an argument of
// the launch, and the kernel's own text has ReLU alone. The others are in a function that is called, one branch away, the same for all
// threads: inlined for each number they would multiply the kernel's text. A call takes registers beside those in use, and each further call makes it
// harder to find some, so kernels pass several numbers at once. Calls take long: with them 1x1 layers of a MobileNet took ten times as long on an H200.
#pragma once

enum { NO_ACTIVATION, RELU, RELU6, LEAKY_RELU, HARDSWISH, SILU, GELU, GELU_TANH };  // problem.py's ACTIVATIONS, in its order

#ifdef __OPENCL_VERSION__
#define ACTIVATION_INLINE static inline
#define INVERSE(v) (1 / (v))
#define AT_MOST_6(v) ((v) > 6 ? 6 : (v))
#else
#define ACTIVATION_INLINE static __device__ __forceinline__
// for numbers from 1 to 2, of which one instruction gives the inverse to an ulp
ACTIVATION_INLINE float inverse(float v) { return __fdividef(1, v); }
ACTIVATION_INLINE double inverse(double v) { return 1 / v; }
#define INVERSE inverse
// the lesser of v and 6; a NaN stays one
ACTIVATION_INLINE double at_most_6(double v) { return v > 6 ? 6 : v; }
ACTIVATION_INLINE float at_most_6(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float kept;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(kept) : "f"(v), "f"(6.f));
  return kept;
#else
  return v > 6 ? 6 : v;
#endif
}
#define AT_MOST_6 at_most_6
#if (defined(DTYPE) && DTYPE < 32) || (!defined(DTYPE) && defined(TYPE) && TYPE < 32)
#define BRIEF  // results of 16 bits: a relative error of 1e-6, and 0 for what is nearly 0
#endif
#endif

// The normal distribution at v, given e = exp(-v^2 / 2); and the exponential function.
#ifdef BRIEF  // by formula 7.1.26 of Abramowitz and Stegun, within 1e-7
#define EXP __expf
ACTIVATION_INLINE float normal(float v, float e) {
  const float t = __fdividef(1, fmaf(fabs(v), 0.2316418904f, 1));
  const float series = fmaf(t, fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f), 0.127414796f);
  const float beyond = t * series * e;
  return v < 0 ? beyond : 1 - beyond;
}
#define NORMAL normal
#else
#define EXP exp
#define NORMAL(v, e) ((acc_t)0.5 * (1 + erf((v) * (acc_t)0.70710678118654752440)))
#endif

// The activations beyond ReLU, of `count` numbers, a constant. Each branch is taken once, so the numbers' chains of instructions run side by side.
ACTIVATION_INLINE void beyond_relu(int kind, acc_t slope, acc_t* v, int count) {
#define EACH _Pragma("unroll") for (int i = 0; i < count; ++i)
  if (kind == RELU6) {
    EACH {
      const acc_t kept = AT_MOST_6(v[i]);
      v[i] = kept < 0 ? 0 : kept;
    }
  } else if (kind == LEAKY_RELU) {
    EACH v[i] = v[i] < 0 ? v[i] * slope : v[i];
  } else if (kind == HARDSWISH) {
    EACH {
      const acc_t above = AT_MOST_6(v[i] + 3), kept = above < 0 ? 0 : above;
      v[i] *= kept * (acc_t)(1 / 6.);
    }
  } else if (kind == GELU) {
    EACH v[i] *= NORMAL(v[i], EXP(v[i] * v[i] * (acc_t)-0.5));
  } else if (kind == SILU || kind == GELU_TANH) {
    EACH {
      const acc_t z = kind == SILU ? v[i] : (acc_t)1.59576912160573071176 * (v[i] + (acc_t)0.044715 * v[i] * v[i] * v[i]);
#ifdef BRIEF
      v[i] = __fdividef(v[i], 1 + __expf(-z));
#else
      const acc_t e = exp(-fabs(z)), s = INVERSE(1 + e);  // at most 1, so that nothing overflows
      v[i] *= z < 0 ? e * s : s;
#endif
    }
  }
#undef EACH
}

// The gradients g behind these activations become those in front of them, at the numbers v; at a kink, torch's value. Where the derivative is 0, so is the
// gradient, even of an infinity. A kernel that needs this is compiled for it.
ACTIVATION_INLINE void pass_beyond_relu(int kind, acc_t slope, acc_t* g, acc_t* v, int count) {
#define EACH _Pragma("unroll") for (int i = 0; i < count; ++i)
// the derivative of v * s(z), s(z) + v * s(z) * s(-z) * z': s is the larger of the two s, at least 1/2, and what has no factor of 0 may be infinite
#define OF_SIGMOID(z, rate)                                                                        \
  {                                                                                                \
    const acc_t e = EXP(-fabs(z)), s = INVERSE(1 + e), other = e * s, both = s * other * (rate); \
    v[i] = ((z) < 0 ? other : s) + (other > 0 ? v[i] * both : 0);                                  \
  }
  if (kind == RELU6) {
    EACH g[i] = v[i] <= 0 || v[i] >= 6 ? 0 : g[i];
    return;
  }
  if (kind == LEAKY_RELU) {
    EACH v[i] = v[i] > 0 ? 1 : slope;
  } else if (kind == HARDSWISH) {
    EACH v[i] = v[i] <= -3 ? 0 : v[i] >= 3 ? 1 : v[i] * (acc_t)(1 / 3.) + (acc_t)0.5;
  } else if (kind == GELU) {
    EACH {
      const acc_t e = EXP(v[i] * v[i] * (acc_t)-0.5);
      v[i] = NORMAL(v[i], e) + (e > 0 ? v[i] * e * (acc_t)0.39894228040143267794 : 0);
    }
  } else if (kind == SILU) {
    EACH OF_SIGMOID(v[i], 1)
  } else if (kind == GELU_TANH) {
    EACH {
      const acc_t squared = v[i] * v[i] * (acc_t)0.044715, z = (acc_t)1.59576912160573071176 * (v[i] + squared * v[i]);
      OF_SIGMOID(z, (acc_t)1.59576912160573071176 * (1 + 3 * squared))
    }
  }
  EACH g[i] = v[i] == 0 ? 0 : g[i] * v[i];
#undef OF_SIGMOID
#undef EACH
}

// ACTIVATE_SOME(kind, slope, v, count) changes v[0], ... v[count - 1]; count is a constant.
#ifdef __OPENCL_VERSION__
static inline void activate_some(int kind, acc_t slope, acc_t* v, int count) {
  if (kind > RELU) {
    beyond_relu(kind, slope, v, count);
  } else if (kind) {
    for (int i = 0; i < count; ++i) v[i] = v[i] < 0 ? 0 : v[i];
  }
}
#define ACTIVATE_SOME(kind, slope, v, count) activate_some(kind, slope, v, count);
#else
template <int count> ACTIVATION_INLINE void relu_or_nothing(int kind, acc_t* v) {
#pragma unroll
  for (int i = 0; i < count; ++i) v[i] = kind && v[i] < 0 ? 0 : v[i];
}
#ifdef LAYER
template <int count> ACTIVATION_INLINE void activate_some(int kind, acc_t slope, acc_t* v) {
  if (kind > RELU) beyond_relu(kind, slope, v, count);
  else relu_or_nothing<count>(kind, v);
}
#else
template <int count> struct Numbers {
  acc_t v[count];
};
template <int count> static __device__ __noinline__ Numbers<count> call_beyond_relu(int kind, acc_t slope, Numbers<count> numbers) {
  beyond_relu(kind, slope, numbers.v, count);
  return numbers;
}
template <int count> ACTIVATION_INLINE void activate_some(int kind, acc_t slope, acc_t* v) {
  if (__builtin_expect(kind > RELU, 0)) {
#if HAS_RESIDUAL || defined(TWO_AT_ONCE)  // other values of such a kernel take the registers
    constexpr int AT_ONCE = count % 2 == 0 ? 2 : 1;
#else
    constexpr int AT_ONCE = count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
#endif
#pragma unroll
    for (int first = 0; first < count; first += AT_ONCE) {
      Numbers<AT_ONCE> some;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) some.v[i] = v[first + i];
      some = call_beyond_relu(kind, slope, some);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) v[first + i] = some.v[i];
    }
  } else {
    relu_or_nothing<count>(kind, v);
  }
}
#endif
#define ACTIVATE_SOME(kind, slope, v, count) activate_some<count>(kind, slope, v);
#endif
