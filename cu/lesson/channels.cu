// channels.cu: a value of x meets eight filters.
//
//   y[n,k,p,q] = sum over c,r,s of x[n,c,p+r,q+s] * w[k,c,r,s]
//
// Mapping   block -> 128 pixels of eight planes (n,k), k = 8i .. 8i+7; thread -> one pixel of all eight.
// Memory    eight sums in a thread's registers; the eight weights of a tap are the same for all threads, so they come by way of one read each.
// Gains     x is read an eighth as often as by a thread for each pixel.
//
// By hand: nvcc -cubin cu/lesson/channels.cu
//
// Question  Registers have no addresses. Where do the sums go if the loop over them is a loop in the machine code, too?
// Try       #pragma unroll  ->  #pragma unroll 1
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

extern "C" __global__ void lesson_channels(const float* x, const float* w, float* y, const Sizes d) {
  const int pixels = (int)(d.p * d.q), blocks = (pixels + 127) / 128, eights = (int)(d.k + 7) / 8;
  const int pixel = blockIdx.x % blocks * 128 + threadIdx.x, k0 = blockIdx.x / blocks % eights * 8, n = blockIdx.x / blocks / eights;
  const int p = pixel / (int)d.q, q = pixel % (int)d.q, taps = (int)(d.c * d.r * d.s);
  if (pixel >= pixels) return;
  float sums[8] = {};
  for (int c = 0; c < d.c; ++c)
    for (int r = 0; r < d.r; ++r)
      for (int s = 0; s < d.s; ++s) {
        const float value = x[((n * d.c + c) * d.h + p + r) * d.w + q + s];
        const float* weight = w + (k0 * d.c + c) * d.r * d.s + r * d.s + s;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (k0 + i < d.k) sums[i] += value * weight[i * taps];
      }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (k0 + i < d.k) y[(n * d.k + k0 + i) * pixels + pixel] = sums[i];
}
