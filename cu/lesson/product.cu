// product.cu: an implicit matrix product. The windows of x are a matrix that nobody stores.
//
//   y[k][pixel] = sum over i of w[k][i] * window[i][pixel],  i = (c,r,s): window[i][pixel] = x[n,c,p+r,q+s]
//
// Mapping   block -> 64 filters x 64 pixels of one image; 256 threads, each with 4 x 4 sums.
// Memory    shared: 8 steps of i at a time, of 64 filters and of 64 pixels. Sums are in registers.
// Gains     a thread reads 4 + 4 numbers for 16 multiplications; before, it read two for one.
//
// By hand: nvcc -cubin cu/lesson/product.cu
//
// Question  A step ends with a barrier, though all threads have what they need by then. Who must wait for whom?
// Try       __syncthreads();  // all have read it  ->
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

extern "C" __global__ void lesson_product(const float* x, const float* w, float* y, const Sizes d) {
  __shared__ float filters[8][64], windows[8][64];
  const int pixels = (int)(d.p * d.q), across = (pixels + 63) / 64, down = (int)(d.k + 63) / 64, sum_length = (int)(d.c * d.r * d.s);
  const int k0 = blockIdx.x / across % down * 64, pixel0 = blockIdx.x % across * 64, n = blockIdx.x / across / down;
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  float sums[4][4] = {};
  for (int i0 = 0; i0 < sum_length; i0 += 8) {
    for (int j = threadIdx.x; j < 512; j += 256) {
      const int i = i0 + j / 64, k = k0 + j % 64, pixel = pixel0 + j % 64;
      const int c = i / (int)(d.r * d.s), r = i / (int)d.s % (int)d.r, s = i % (int)d.s;
      filters[j / 64][j % 64] = i < sum_length && k < d.k ? w[k * sum_length + i] : 0;
      windows[j / 64][j % 64] =
          i < sum_length && pixel < pixels ? x[((n * d.c + c) * d.h + pixel / (int)d.q + r) * d.w + pixel % (int)d.q + s] : 0;
    }
    __syncthreads();  // all is there
    for (int step = 0; step < 8; ++step)
#pragma unroll
      for (int a = 0; a < 4; ++a)
#pragma unroll
        for (int b = 0; b < 4; ++b) sums[a][b] += filters[step][row + a] * windows[step][column + b];
    __syncthreads();  // all have read it
  }
#pragma unroll
  for (int a = 0; a < 4; ++a)
#pragma unroll
    for (int b = 0; b < 4; ++b)
      if (k0 + row + a < d.k && pixel0 + column + b < pixels) y[(n * d.k + k0 + row + a) * pixels + pixel0 + column + b] = sums[a][b];
}
