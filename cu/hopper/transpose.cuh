// transpose.cuh: a warp transposes a block of 32 x 32 float32 numbers where it lies in shared memory, rows of 128 bytes, swizzled as wgmma wants them.
#pragma once
#include "core/packed.cuh"
#include "mma/fragments.cuh"

DEVICE void store_vector(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// By quads of rows and of columns: a lane loads columns 4 a to 4 a + 3 of rows 4 p to 4 p + 3, and stores the rows of these columns. Quads (a, p) and (p, a)
// are exchanged, and a ^ p is the same for 8 lanes, so these touch each other's quads alone. Neither their loads nor their stores use a bank twice.
// A lane has two quads; it loads `at_once` of them before it stores one, as registers allow.
template <int at_once> DEVICE void transpose_block(uint32_t block) {
  const int lane = threadIdx.x % 32, a = lane % 8;
#pragma unroll
  for (int first = 0; first < 2; first += at_once) {
    uint4 v[at_once][4];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int p = a ^ (lane / 8 + 4 * (first + i));
#pragma unroll
      for (int m = 0; m < 4; ++m) v[i][m] = load_vector(block + p * 512 + m * 128 + (a ^ p % 2 * 4 ^ m) * 16);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const uint32_t to = block + a * 512, chunk = a ^ (lane / 8 + 4 * (first + i)) ^ a % 2 * 4;
      store_vector(to + chunk * 16, v[i][0].x, v[i][1].x, v[i][2].x, v[i][3].x);
      store_vector(to + 128 + (chunk ^ 1) * 16, v[i][0].y, v[i][1].y, v[i][2].y, v[i][3].y);
      store_vector(to + 256 + (chunk ^ 2) * 16, v[i][0].z, v[i][1].z, v[i][2].z, v[i][3].z);
      store_vector(to + 384 + (chunk ^ 3) * 16, v[i][0].w, v[i][1].w, v[i][2].w, v[i][3].w);
    }
  }
}
