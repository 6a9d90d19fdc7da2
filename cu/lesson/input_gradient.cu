// input_gradient.cu: the gradient by the input, which is the transposed convolution.
//
//   dx[n,c,h,v] = sum over k,r,s of dy[n,k,h-r,v-s] * w[k,c,r,s]
//
// Mapping   block -> 256 pixels of one plane (n,c) of dx; thread -> one pixel, which gathers what it fed.
// Memory    nothing is shared.
// Gains     each sum has one owner and one order. Written as a scatter, from pixels of dy, threads would add to one another's pixels with
//           atomics, and the last bits would change from run to run.
//
// By hand: nvcc -cubin cu/lesson/input_gradient.cu
//
// Question  A pixel near the edge meets fewer taps than others. What does a thread read that does not ask?
// Try       if (p >= 0 && p < d.p && q >= 0 && q < d.q)  ->  if (true)
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

extern "C" __global__ void lesson_input_gradient(const float* dy, const float* w, float* dx, const Sizes d) {
  const long long blocks = (d.h * d.w + 255) / 256, plane = blockIdx.x / blocks, pixel = (blockIdx.x % blocks) * 256 + threadIdx.x;
  const long long n = plane / d.c, c = plane % d.c, h = pixel / d.w, v = pixel % d.w;
  if (pixel >= d.h * d.w) return;
  float sum = 0;
  for (int k = 0; k < d.k; ++k)
    for (int r = 0; r < d.r; ++r)
      for (int s = 0; s < d.s; ++s) {
        const long long p = h - r, q = v - s;  // the pixel of dy that this tap fed from here
        if (p >= 0 && p < d.p && q >= 0 && q < d.q) sum += dy[((n * d.k + k) * d.p + p) * d.q + q] * w[((k * d.c + c) * d.r + r) * d.s + s];
      }
  dx[plane * d.h * d.w + pixel] = sum;
}
