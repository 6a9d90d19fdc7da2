// gemm_recompute.cuh: blocks compute their flagged results once more in plain fp32: see "Mending" in hopper/gemm.cu.
#pragma once

// Flag 1: tiles of the block with a sum that may show what the limbs lost, a bit each; of a block's many tiles some share a bit. Other tiles are not
// looked at again, unless a flag is 2. With three products flag 1 is rare, and the registers that this takes cost more than it saves.
constexpr bool NOTES = PRODUCTS == 1;
constexpr int NOTED = 16;  // words
__shared__ unsigned noted[NOTED];
DEVICE unsigned noted_word(int tile) { return tile / gridDim.x / 32 % NOTED; }
DEVICE unsigned noted_bit(int tile) { return 1u << tile / gridDim.x % 32; }

DEVICE void clear_flags() {
  if (threadIdx.x == 0) any_flag = 0;
  if (NOTES && threadIdx.x < NOTED) noted[threadIdx.x] = 0;
}

// The consumers join the flags of all images and channels.
DEVICE void join_flags(const GemmPhase& shape, const int* __restrict__ x_flags, const int* __restrict__ w_flags) {
  const int images = divided((int)shape.pixels, shape.by_plane), rows = (int)shape.rows;
  int found = 0;
#pragma unroll 4
  for (int i = threadIdx.x - 128; i < max(images, rows); i += 128 * CONSUMERS) found |= x_flags[min(i, images - 1)] | w_flags[min(i, rows - 1)];
  if (found) atomicOr(&any_flag, found);
  if (NOTES) named_barrier(STORED, 128 * CONSUMERS);
}

// Notes a tile if a consumer has a sum in it, still scaled as the limbs are, that recompute.cuh would suspect. To find these sums here costs less than to
// read all results again. Gemm k counts what fills up its last block, too.
DEVICE void note_small_sums(const float (&sum)[WGMMA_N / 2], const Rows& rows, const GemmPhase& shape, int tile) {
  const float least = 2 * sqrtf((float)((int)shape.blocks * LOAD_CHANNELS));
  bool found = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float smallest = INFINITY;
#pragma unroll
    for (int i = 0; i < WGMMA_N / 8; ++i) smallest = fminf(smallest, fminf(fabsf(sum[4 * i + 2 * half]), fabsf(sum[4 * i + 2 * half + 1])));
    const bool real = rows.m + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4 + 8 * half < (int)shape.rows_group;
    found |= real && smallest < least;
  }
  if (__any_sync(~0u, found) && threadIdx.x % 32 == 0) atomicOr(noted + noted_word(tile), noted_bit(tile));
}

// Computes a tile that the block stored once more where its limbs did not fit. The consumers' warps share it.
__device__ __noinline__ void recompute_tile(const Shapes& shapes, int tile, const RecomputeFinish& what, const Recomputes& recomputes, RecomputeOperands operands,
                                       [[maybe_unused]] int* redone, out_t* y) {
  const int phase = phase_of(shapes, tile);
  const GemmPhase& shape = shapes.of[phase];
  const Tile of(shape, inside_phase(shapes, tile));
  const auto apart = y_apart(shapes, tile);
  y += apart;
  operands.residual += apart;
  operands.w += w_apart(shapes, tile);
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
#pragma unroll 1  // results are seldom computed again, and unrolled code would lengthen every compilation
  for (int strip = warp; strip < BLOCK_M / MENDED * ((BLOCK_N + 31) / 32); strip += 4 * CONSUMERS) {
    const int m = of.m + strip % (BLOCK_M / MENDED) * MENDED, inside = strip / (BLOCK_M / MENDED) * 32 + lane;
    if (m >= (int)shape.rows_group) continue;
    const int pixel = of.pixel + inside;
    const int recomputed = inside < BLOCK_N && pixel < of.end ? pixel : -1;
    [[maybe_unused]] const bool again = recompute_fp32<NHWC, DENSE>(shape, what, recomputes.arrays, recomputes.of[phase], operands, y, of.group, m, recomputed);
    if (EMIT_MOMENTS && redone && again && lane == 0) redone[blockIdx.x] = 1;
  }
}

__device__ __noinline__ void recompute_tiles(const Shapes& shapes, const Recomputes& recomputes, const RecomputeOperands& operands, int* redone, out_t* y) {
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    if (!NOTES || any_flag > 1 || noted[noted_word(tile)] & noted_bit(tile))
      recompute_tile(shapes, tile, RecomputeFinish(shapes.of[phase_of(shapes, tile)]), recomputes, operands, redone, y);
  }
}
