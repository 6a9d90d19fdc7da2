// gemm_promoted.cuh: three products, hi.hi, hi.lo and lo.hi, of tiles that the two consumers share; or two, where x has one limb. While a finished tile
// waits in `total` and is stored, only a part of the next tile's second stage is multiplied: a main sum over two stages would lose more to truncation.
#pragma once

constexpr bool OVERLAP = !TENSOR_STORE;

DEVICE void consume(const Shapes& shapes, const Rings& rings, int consumer, const Factors& factors, const Output& output) {
  // where a consumer's share of w and x begins in a stage
  const uint32_t w = BLOCK_M == 128 ? SUB_TILES * A_SUB * consumer : 0, x = A_BYTES + (BLOCK_M == 128 ? 0 : WGMMA_N * SPAN * consumer);
  Position at;  // the stage to multiply next
  float main[WGMMA_N / 2], cross[WGMMA_N / 2], total[WGMMA_N / 2];
  int stored = first_tile();  // the tile that total and rows belong to
  Rows rows(shapes.of[phase_of(shapes, stored)], Tile(shapes.of[phase_of(shapes, stored)], inside_phase(shapes, stored)), consumer, factors);
  bool pending = false;  // total holds the tile before, which is not stored yet
  // the products of a stage and one pair of limbs
  auto multiply_limbs = [&](float(&sums)[WGMMA_N / 2], uint32_t stage, int limb_w, int limb_x, bool fresh) {
    multiply(sums, w_descriptor(stage + w + limb_w * A_BLOCK), x_descriptor(stage + x + limb_x * B_BYTES), fresh);
  };
  // Multiplies the first or second stage of a tile while `total` still holds the tile before.
  auto multiply_early = [&](bool second) {
    rings.wait_full(at);
    wgmma_fence();
    const uint32_t stage = rings.stage(at);
    if (!second) multiply_limbs(main, stage, 0, 0, true);
    if (X_LIMBS == 2) multiply_limbs(cross, stage, 0, 1, !second);
    if (!second) multiply_limbs(cross, stage, 1, 0, X_LIMBS == 1);
    wgmma_commit();
    at.next();
    if (second) {  // the first stage may be loaded again while the tile before is stored
      wgmma_wait<1>();
      rings.give_back(at, 2);
    }
  };
  // Multiplies a stage and two pairs of limbs, or with `both` all three. The main sum is added to the total while the cross products are under way.
  auto multiply_and_add = [&](uint32_t stage, bool both) {
    wgmma_fence();
    multiply_limbs(main, stage, 0, 0, true);
    wgmma_commit();
    if (X_LIMBS == 2 && both) multiply_limbs(cross, stage, 0, 1, false);
    multiply_limbs(cross, stage, 1, 0, false);
    wgmma_commit();
    if (both) at.next();
    wgmma_wait<1>();
    wgmma_arrived(main);
    each(total, main, [](float& sum, float more) { sum += more; });
    wgmma_wait<0>();
    wgmma_arrived(cross);
    rings.give_back(at, 1);
  };
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    prefetch_residual(shapes, next_tile(tile), consumer, output.residual);
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const Tile of(shape, inside_phase(shapes, tile));
    const StageRange range = range_of(shape, of);
    const int stages = range.count();
    if (MAY_ADD && !OVERLAP) {  // both are overwritten, but the compiler would keep their registers while the tile before is stored
      clear(main);
      clear(cross);
    }
    if (stages > 0) multiply_early(false);
    if (stages > 1) multiply_early(true);
    if (OVERLAP && pending) store_sums(total, rows, shapes, stored, consumer, output);
    // from here on total, and what the stores need, belong to this tile
    rows = Rows(shape, of, consumer, factors);
    stored = tile;
    stage_output_offsets(rows, shape, consumer, factors, output);
    wgmma_wait<0>();
    wgmma_arrived(main);
    wgmma_arrived(cross);
    if (stages == 1) rings.give_back(at, 1);
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) {
      total[i] = stages > 0 ? main[i] : 0;
      cross[i] = stages > 0 ? cross[i] : 0;
    }
    if (stages > 1) multiply_and_add(rings.stage(at.before()), false);  // what multiply_early put off
    for (int step = 2; step < stages; ++step) {
      rings.wait_full(at);
      multiply_and_add(rings.stage(at), true);
    }
    const Promoted promoted(stages, 2048);
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) total[i] = fmaf(promoted.with_lost(cross[i], total[i], main[i]), 0x1p-11f, total[i]);
    pending = true;
    if (!OVERLAP) store_sums(total, rows, shapes, stored, consumer, output);
  }
  if (OVERLAP && pending) store_sums(total, rows, shapes, stored, consumer, output);
  if (TENSOR_STORE && threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive what is read from it
}
