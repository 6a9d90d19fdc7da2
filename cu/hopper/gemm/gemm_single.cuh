// gemm_single.cuh: one product, of tiles that the two consumers share.
#pragma once

DEVICE void consume(const Shapes& shapes, const Rings& rings, int consumer, const Factors& factors, const Output& output) {
  // where a consumer's share of w and x begins in a stage; an MN-major block of 64 channels takes as many bytes as 64 rows
  const uint32_t w = BLOCK_M == 128 ? SUB_TILES * A_SUB * consumer : 0, x = A_BYTES + (BLOCK_M == 128 ? 0 : WGMMA_N * SPAN * consumer);
  Position at;
  float sums[1][WGMMA_N / 2];
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    prefetch_residual(shapes, next_tile(tile), consumer, output.residual);
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const Tile of(shape, inside_phase(shapes, tile));
    const StageRange range = range_of(shape, of);
    const Rows rows(shape, of, consumer, factors);  // while the first stages arrive
    stage_output_offsets(rows, shape, consumer, factors, output);
    multiply_stages<1>(rings, at, range.first, range.last, sums, [&](uint32_t stage, bool fresh) {
      wgmma_fence();
      multiply(sums[0], w_descriptor(stage + w), x_descriptor(stage + x), fresh);
    });
    const bool any = range.count() > 0;
    if (any) rings.give_back(at, 1);
    end_sums<SCALED>(sums, any, scaled(shape) ? lost_in(4 * range.count()) : 0);
    store_sums(sums[0], rows, shapes, tile, consumer, output);
  }
  if (TENSOR_STORE && threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive what is read from it
}
