// pixel.cu: a thread for each pixel of the result.
//
//   y[n,k,p,q] = sum over c,r,s of x[n,c,p+r,q+s] * w[k,c,r,s]
//
// Mapping   block -> 256 pixels of one plane (n,k); thread -> one pixel. Neighbouring threads read and write neighbours.
// Memory    nothing is shared: a thread reads C R S values of x and as many of w, through the caches.
// Wastes    each value of x is read K R S times.
//
// By hand: nvcc -cubin cu/lesson/pixel.cu
//
// Question  The last block of a plane has more threads than pixels. What do these do if nobody asks them?
// Try       if (pixel < d.p * d.q)  ->  if (true)
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

extern "C" __global__ void lesson_pixel(const float* x, const float* w, float* y, const Sizes d) {
  const long long blocks = (d.p * d.q + 255) / 256, plane = blockIdx.x / blocks;  // of one plane; which plane
  const long long pixel = (blockIdx.x % blocks) * 256 + threadIdx.x, n = plane / d.k, k = plane % d.k;
  if (pixel < d.p * d.q) {
    const long long p = pixel / d.q, q = pixel % d.q;
    float sum = 0;
    for (int c = 0; c < d.c; ++c)
      for (int r = 0; r < d.r; ++r)
        for (int s = 0; s < d.s; ++s) sum += x[((n * d.c + c) * d.h + p + r) * d.w + q + s] * w[((k * d.c + c) * d.r + r) * d.s + s];
    y[plane * d.p * d.q + pixel] = sum;
  }
}
