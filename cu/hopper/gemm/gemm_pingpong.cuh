// gemm_pingpong.cuh: the consumers take whole tiles in turn, so that one multiplies while the other stores.
#pragma once

static_assert(PRODUCTS == 1 && BLOCK_M == 128 && !INTERLEAVE_COLUMNS, "a consumer has all sums of a tile");

DEVICE void consume(const Shapes& shapes, const Rings& rings, int consumer, const Factors& factors, const Output& output) {
  Position at;
  float sums[2][WGMMA_N / 2];
  bool mine = consumer == 0;
  int parity = consumer == 0;  // the first turn is free
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile), mine = !mine) {
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const Tile of(shape, inside_phase(shapes, tile));
    const StageRange range = range_of(shape, of);
    if (!mine) {
      at.skip(range.count());
      continue;
    }
    prefetch_residual(shapes, tile, consumer, output.residual);
    barrier_wait(rings.turn + 8 * consumer, parity);
    parity ^= 1;
    for (int step = range.first; step < range.last; ++step) {
      const uint32_t stage = rings.stage(at);
      rings.wait_full(at);
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply(sums[half], w_descriptor(stage + half * SUB_TILES * A_SUB), x_descriptor(stage + A_BYTES), step == range.first);
      rings.commit<1>(at, step > range.first);
    }
    if (threadIdx.x % 32 == 0) barrier_arrive(rings.turn + 8 * (1 - consumer));  // before the last products are done
    wgmma_wait<0>();
    wgmma_arrived(sums);
    const bool any = range.count() > 0;
    if (any) rings.give_back(at, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      end_sums<SCALED>(sums[half], any, lost_in(4 * range.count()));
      const Rows rows(shape, of, half, factors);
      if (half == 0) stage_output_offsets(rows, shape, consumer, factors, output);
      store_sums(sums[half], rows, shapes, tile, consumer, output);
    }
  }
  if (TENSOR_STORE && threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive what is read from it
}
