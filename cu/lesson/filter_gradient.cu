// filter_gradient.cu: the gradient by the filter: few results, each a very long sum.
//
//   dw[k,c,r,s] = sum over n,p,q of dy[n,k,p,q] * x[n,c,p+r,q+s]
//
// Mapping   block -> one element of dw; its 128 threads take pixels by turns, and add their sums in a tree.
// Memory    shared: 128 sums.
// Gains     a tree of seven steps rounds a sum seven times, where a chain of 128 rounds it 128 times. Its order is fixed.
//
// By hand: nvcc -cubin cu/lesson/filter_gradient.cu
//
// Question  The tree halves itself in place. Why does each step wait for the step before?
// Try       __syncthreads();  // the step before  ->
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

extern "C" __global__ void lesson_filter_gradient(const float* x, const float* dy, float* dw, const Sizes d) {
  __shared__ float sums[128];
  const int s = blockIdx.x % (int)d.s, r = blockIdx.x / (int)d.s % (int)d.r, c = blockIdx.x / (int)(d.s * d.r) % (int)d.c;
  const int k = blockIdx.x / (int)(d.s * d.r * d.c), pixels = (int)(d.p * d.q);
  float sum = 0;
  for (int i = threadIdx.x; i < d.n * pixels; i += 128) {
    const int n = i / pixels, p = i % pixels / (int)d.q, q = i % (int)d.q;
    sum += dy[(n * d.k + k) * pixels + i % pixels] * x[((n * d.c + c) * d.h + p + r) * d.w + q + s];
  }
  sums[threadIdx.x] = sum;
  for (int half = 64; half > 0; half /= 2) {
    __syncthreads();  // the step before
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dw[blockIdx.x] = sums[0];
}
