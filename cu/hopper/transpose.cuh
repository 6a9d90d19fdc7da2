// transpose.cuh: a warp transposes a block of 32 x 32 float32 numbers where it lies in shared memory, rows of 128 bytes, swizzled as wgmma wants them.
#pragma once
#include "core/packed.cuh"
#include "mma/fragments.cuh"

DEVICE void store_vector(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// By quads of rows and of columns: a lane loads columns 4 a to 4 a + 3 of rows 4 p to 4 p + 3, and stores the rows of these columns. Quads (a, p) and (p, a)
// are exchanged, and a ^ p is the same for 8 lanes, so these touch each other's quads alone. Neither their loads nor their stores use a bank twice.
DEVICE void transpose_block(uint32_t block) {
  const int lane = threadIdx.x % 32, a = lane % 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int p = a ^ (lane / 8 + 4 * i);
    const uint32_t from = block + p * 512, chunk = a ^ p % 2 * 4, to = block + a * 512, chunk_to = p ^ a % 2 * 4;
    uint4 v[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) v[m] = load_vector(from + m * 128 + (chunk ^ m) * 16);
    __syncwarp();
    store_vector(to + chunk_to * 16, v[0].x, v[1].x, v[2].x, v[3].x);
    store_vector(to + 128 + (chunk_to ^ 1) * 16, v[0].y, v[1].y, v[2].y, v[3].y);
    store_vector(to + 256 + (chunk_to ^ 2) * 16, v[0].z, v[1].z, v[2].z, v[3].z);
    store_vector(to + 384 + (chunk_to ^ 3) * 16, v[0].w, v[1].w, v[2].w, v[3].w);
  }
}
