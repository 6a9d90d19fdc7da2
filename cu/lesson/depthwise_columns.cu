// depthwise_columns.cu: a filter of 3 x 3 for each channel, with channels last. No matrix product: memory is the limit.
//
//   y[n,p,q,c] = sum over r,s of x[n,p+r,q+s,c] * w[c,r,s]
//
// Mapping   block -> 128 neighbouring (q,c) of one image; thread -> one column of one channel, which it walks down. Neighbouring threads have
//           neighbouring channels, which are neighbours in memory.
// Memory    nine weights and the sums of the three rows that are under way, in registers.
// Gains     a thread reads each of its rows once. All sums that need the row are there.
//
// By hand: nvcc -cubin cu/lesson/depthwise_columns.cu
//
// Question  Three sums are under way. Which of them is finished when a row has been added to all three?
// Try       y[((n * d.p + row - 2) * d.q + q) * d.c + c] = oldest;  ->  y[((n * d.p + row - 2) * d.q + q) * d.c + c] = middle;
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

extern "C" __global__ void lesson_depthwise_columns(const float* x, const float* w, float* y, const Sizes d) {
  const int columns = (int)(d.q * d.c), blocks = (columns + 127) / 128, n = blockIdx.x / blocks;
  const int own = blockIdx.x % blocks * 128 + threadIdx.x, q = own / (int)d.c, c = own % (int)d.c;
  if (own >= columns) return;
  float weight[9], oldest = 0, middle = 0, newest = 0;
  for (int i = 0; i < 9; ++i) weight[i] = w[c * 9 + i];
  for (int row = 0; row < d.h; ++row) {
    for (int s = 0; s < 3; ++s) {
      const float value = x[((n * d.h + row) * d.w + q + s) * d.c + c];
      oldest += value * weight[6 + s];  // the row is this result's last one
      middle += value * weight[3 + s];
      newest += value * weight[s];
    }
    if (row >= 2) y[((n * d.p + row - 2) * d.q + q) * d.c + c] = oldest;
    oldest = middle, middle = newest, newest = 0;
  }
}
