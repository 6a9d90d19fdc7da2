// fourier.cu: a line convolved by Fourier transforms, for filters so long that sums take too long.
//
//   y[n,k,q] = sum over s of x[n,q+s] * w[k,s]: the spectrum of x times the conjugate one of w, transformed back. h = r = c = 1, S up to 128.
//
// Mapping   block -> 257 - S results of one line (n,k), from 256 samples; 128 threads, one for each pair of numbers of a step (Stockham's order).
// Memory    shared: two buffers of 256 complex numbers, between which the steps go to and fro.
// Gains     log2(256) steps a transform, whatever S is.
//
// By hand: nvcc -cubin cu/lesson/fourier.cu
//
// Question  256 samples give 256 numbers, and only 257 - S of them are results. What are the others?
// Try       i < results && begin + i < d.q  ->  begin + i < d.q
typedef struct Sizes {
  long long n, c, h, w, k, r, s, p, q;  // p = h - r + 1, q = w - s + 1: no padding, no stride
} Sizes;

__device__ void transform(float2* from, float2* to, float sign) {  // in eight steps: the result is where it began
  for (int length = 1; length < 256; length *= 2) {
    const int i = threadIdx.x, at = i % length, group = i / length;
    const float angle = sign * 3.14159265f * at / length, cosine = cosf(angle), sine = sinf(angle);
    __syncthreads();
    const float2 a = from[i], b = from[i + 128], turned = {b.x * cosine - b.y * sine, b.x * sine + b.y * cosine};
    to[group * 2 * length + at] = {a.x + turned.x, a.y + turned.y};
    to[group * 2 * length + at + length] = {a.x - turned.x, a.y - turned.y};
    float2* other = from;
    from = to, to = other;
  }
  __syncthreads();
}

extern "C" __global__ void lesson_fourier(const float* x, const float* w, float* y, const Sizes d) {
  __shared__ float2 line[256], filter[256], room[256];
  const int results = 257 - (int)d.s;
  const int parts = ((int)d.q + results - 1) / results, n = blockIdx.x / parts / (int)d.k, k = blockIdx.x / parts % (int)d.k;
  const int begin = blockIdx.x % parts * results;
  for (int i = threadIdx.x; i < 256; i += 128) {
    line[i] = {begin + i < d.w ? x[n * d.w + begin + i] : 0, 0};
    filter[i] = {i < d.s ? w[k * d.s + i] : 0, 0};
  }
  transform(line, room, -1);
  transform(filter, room, -1);
  for (int i = threadIdx.x; i < 256; i += 128) {
    const float2 a = line[i], b = filter[i];
    line[i] = {a.x * b.x + a.y * b.y, a.y * b.x - a.x * b.y};
  }
  transform(line, room, 1);
  for (int i = threadIdx.x; i < 256; i += 128)
    if (i < results && begin + i < d.q) y[(n * d.k + k) * d.q + begin + i] = line[i].x / 256;
}
