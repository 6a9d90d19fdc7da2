// halo.cu: a block reads what its pixels need once, into shared memory.
//
//   y[n,k,p,q] = sum over c,r,s of x[n,c,p+r,q+s] * w[k,c,r,s]
//
// Mapping   block -> a tile of 16 x 16 pixels of one plane (n,k); thread -> one pixel.
// Memory    shared: the tile with its halo, (16+R-1) x (16+S-1) values of one channel at a time. Filters of up to 8 x 8.
// Gains     each value of x is read from memory a little more than K times, not K R S times. Alone that is no gain on today's GPUs, whose L1 cache
//           does the same: it pays where a thread then makes several pixels of what it has read (direct/tile.cu).
//
// By hand: nvcc -cubin cu/lesson/halo.cu
//
// Question  Threads load values that other threads use. What may a thread read if it does not wait for them?
// Try       __syncthreads();  // all is there  ->
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

extern "C" __global__ void lesson_halo(const float* x, const float* w, float* y, const Sizes d) {
  __shared__ float tile[23 * 23];
  const int across = (int)(d.q + 15) / 16, down = (int)(d.p + 15) / 16, plane = blockIdx.x / (across * down);
  const int p0 = blockIdx.x / across % down * 16, q0 = blockIdx.x % across * 16, n = plane / (int)d.k, k = plane % (int)d.k;
  const int row = threadIdx.x / 16, column = threadIdx.x % 16, width = 16 + (int)d.s - 1, values = width * (16 + (int)d.r - 1);
  float sum = 0;
  for (int c = 0; c < d.c; ++c) {
    for (int i = threadIdx.x; i < values; i += 256) {
      const int h = p0 + i / width, v = q0 + i % width;  // past the image nothing counts: no pixel of the result meets it
      tile[i] = h < d.h && v < d.w ? x[((n * d.c + c) * d.h + h) * d.w + v] : 0;
    }
    __syncthreads();  // all is there
    for (int r = 0; r < d.r; ++r)
      for (int s = 0; s < d.s; ++s) sum += tile[(row + r) * width + column + s] * w[((k * d.c + c) * d.r + r) * d.s + s];
    __syncthreads();  // all have read it
  }
  if (p0 + row < d.p && q0 + column < d.q) y[(plane * d.p + p0 + row) * d.q + q0 + column] = sum;
}
