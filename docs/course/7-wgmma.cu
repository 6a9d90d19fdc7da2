// 7-wgmma.cu: the first product on Hopper's tensor cores: y[m, n] = sum over k of a[m, k] * b[n, k], of 16-bit numbers.
//
// wgmma is an instruction of a warpgroup, 128 threads. It multiplies 64 rows of a with BLOCK_N rows of b, 16 of k, which it reads from shared memory, and adds to
// registers. It runs beside the threads: they issue some, commit them, and wait.
//
// Mapping  block -> 64 rows x BLOCK_N columns of y; its 128 threads are the warpgroup.
// Shared   64 of k of 64 rows of a, then of BLOCK_N rows of b: rows of 128 bytes. wgmma reads eight rows at once. So that these lie in different
//          banks, the 16 bytes number i of row r lie at place i ^ r % 8: the rows are swizzled.
// Sums     sums[4 * i + 2 * h + e] of a thread is row 16 * warp + lane / 4 + 8 * h, column 8 * i + 2 * (lane % 4) + e.
#ifndef BLOCK_N
#define BLOCK_N 128
#define TYPE 16  // 16 half, 17 bfloat16
#endif
#define WGMMA_N BLOCK_N
#include "hopper/wgmma.cuh"

typedef element<TYPE> data_t;

struct Product {
  long long m, n, k, tiles_m;  // rows of a and of b; their numbers, a multiple of 8; tiles along m
};

// Copies 64 of k, from number `k` on, of `rows` rows from row `row` on. Zeros take the place of what there is not.
DEVICE void copy_rows(uint8_t* to, const data_t* from, int rows, int row, int all_rows, int k, int all_k) {
  for (int i = threadIdx.x; i < 8 * rows; i += 128) {
    const int r = i / 8, piece = i % 8;
    const bool there = row + r < all_rows && k + 8 * piece < all_k;
    *(uint4*)(to + 128 * r + 16 * (piece ^ r % 8)) = there ? *(const uint4*)(from + (long long)(row + r) * all_k + k + 8 * piece) : make_uint4(0, 0, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(128)
    first_wgmma(const data_t* __restrict__ a, const data_t* __restrict__ b, const float* __restrict__ bias, float* __restrict__ y,
                const __grid_constant__ Product arg) {
  extern __shared__ uint8_t dynamic[];
  uint8_t* const own_a = dynamic + (-shared_address(dynamic) & 1023);  // swizzled rows begin at a multiple of 1024 bytes
  uint8_t* const own_b = own_a + 64 * 128;
  const int row = blockIdx.x % (int)arg.tiles_m * 64, column = blockIdx.x / (int)arg.tiles_m * BLOCK_N;
  AFTER_LAST_LAUNCH  // a launch begins while the one before it ends: only now is what that has written there
  float sums[BLOCK_N / 2];
  for (int k = 0; k < (int)arg.k; k += 64) {
    copy_rows(own_a, a, 64, row, (int)arg.m, k, (int)arg.k);
    copy_rows(own_b, b, BLOCK_N, column, (int)arg.n, k, (int)arg.k);
    fence_for_bulk();  // wgmma reads shared memory by another way than threads do
    __syncthreads();
    const uint64_t of_a = wgmma_descriptor<128>(shared_address(own_a)), of_b = wgmma_descriptor<128>(shared_address(own_b));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma<TYPE, 0, 0>(sums, of_a + 2 * i, of_b + 2 * i, k > 0 || i > 0);  // 16 of k are 32 bytes; an address counts in 16 bytes
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();  // all have read what the next copies overwrite
  }
  wgmma_arrived(sums);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) {
    const int m = row + threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8, n = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (m >= (int)arg.m || n >= (int)arg.n) continue;
    float sum = sums[i];
    // exercise: add bias[n]
    y[(long long)m * arg.n + n] = sum;
  }
}
