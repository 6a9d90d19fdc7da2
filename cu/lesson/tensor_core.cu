// tensor_core.cu: the same product by a warp's tensor core (Ampere and later), in float16 with sums in float32.
//
//   y[k][pixel] = sum over i of w[k][i] * window[i][pixel],  i = (c,r,s): window[i][pixel] = x[n,c,p+r,q+s]
//
// Mapping   block -> one warp: 16 filters x 8 pixels of one image. mma.sync multiplies 16 of i at once. Lane l, with g = l / 4 and t = l % 4, brings
//           filters g and g + 8 at i = 2t, 2t+1, 2t+8, 2t+9, and pixel g at the same four; it gets filters g, g + 8 of pixels 2t, 2t+1.
// Memory    nothing is shared: a lane loads its own elements, and rounds them to float16.
// Gains     one instruction of a warp is 2,048 multiplications. What this kernel waits for are its loads: rings and TMA come next.
//
// By hand: nvcc -cubin cu/lesson/tensor_core.cu
//
// Question  The sum is seldom a multiple of 16 long. Both sides are 0 past its end; why does one side not suffice?
// Try       i < sum_length ? window(i) : 0.f  ->  i < sum_length ? window(i) : 1.f / 0.f
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

__device__ unsigned two_halves(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

extern "C" __global__ void lesson_tensor_core(const float* x, const float* w, float* y, const Sizes d) {
  const int pixels = (int)(d.p * d.q), across = (pixels + 7) / 8, down = (int)(d.k + 15) / 16, sum_length = (int)(d.c * d.r * d.s);
  const int k0 = blockIdx.x / across % down * 16, pixel0 = blockIdx.x % across * 8, n = blockIdx.x / across / down;
  const int g = threadIdx.x / 4, t = threadIdx.x % 4, pixel = pixel0 + g;
  auto window = [&](int i) {
    const int c = i / (int)(d.r * d.s), r = i / (int)d.s % (int)d.r, s = i % (int)d.s;
    return pixel < pixels ? x[((n * d.c + c) * d.h + pixel / (int)d.q + r) * d.w + pixel % (int)d.q + s] : 0.f;
  };
  auto filter_at = [&](int k, int i) { return k < d.k && i < sum_length ? w[k * sum_length + i] : 0.f; };
  auto window_at = [&](int i) { return i < sum_length ? window(i) : 0.f; };
  float sums[4] = {};
  for (int i0 = 2 * t; i0 < sum_length + 2 * t; i0 += 16) {
    unsigned a[4], b[2];
    for (int j = 0; j < 4; ++j) {  // filters g, g + 8, and both 8 of i further
      const int k = k0 + g + j % 2 * 8, i = i0 + j / 2 * 8;
      a[j] = two_halves(filter_at(k, i), filter_at(k, i + 1));
    }
    for (int j = 0; j < 2; ++j) b[j] = two_halves(window_at(i0 + 8 * j), window_at(i0 + 8 * j + 1));
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  for (int j = 0; j < 4; ++j) {
    const int k = k0 + g + j / 2 * 8, own = pixel0 + 2 * t + j % 2;
    if (k < d.k && own < pixels) y[(n * d.k + k) * pixels + own] = sums[j];
  }
}
