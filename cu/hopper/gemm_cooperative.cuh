// gemm_cooperative.cuh: the two consumers share each tile, of one product or of three.
//
// Three products: the tensor core's own sum truncates, so the kernel adds it to fp32 registers (total) every 64 of k: promotion. In NCHW a
// finished tile waits in `total` until the next tile's first stages are under way, and is stored beside them. Nothing can be promoted meanwhile,
// so of the second stage only a part is multiplied then.
#pragma once

constexpr bool OVERLAP = PRODUCTS == 3 && !TENSOR_STORE;  // one product's sums leave no registers for a second tile's
constexpr int EARLY = 2;  // stages of the next tile that three products multiply while a tile is stored

DEVICE void consume(const Shapes& shapes, const Rings& rings, int consumer, [[maybe_unused]] uint8_t* staging, float* scales,
                    [[maybe_unused]] long long* output_offsets, const float* scale_n, const float* scale_k, const out_t* bias, const out_t* scale,
                    const out_t* residual, const CUtensorMap* map_y, [[maybe_unused]] float* moments, out_t* y) {
  // where a consumer's share of w and x begins; an MN-major block of 64 channels takes as many bytes as 64 rows
  const uint32_t a0 = rings.stages + (BLOCK_M == 128 ? SUB_TILES * A_SUB * consumer : 0);
  const uint32_t b0 = rings.stages + A_BYTES + (BLOCK_M == 128 ? 0 : WGMMA_N * SPAN * consumer);
  Position at;  // the stage to multiply next
  float main[WGMMA_N / 2];
#if PRODUCTS == 3
  float cross[WGMMA_N / 2], total[WGMMA_N / 2];
#else
  auto& total = main;
#endif
  auto arrived = [&] {  // wait for the stage to multiply next
    rings.wait_full(at);
  };
  auto advance = [&] {
    at.next();
  };
  // where the stage that comes next lies
  struct Place {
    uint32_t w, x;
  };
  auto place = [&] {
    Place of;
    of.w = a0 + at.stage * STAGE_BYTES;
    of.x = b0 + at.stage * STAGE_BYTES;
    return of;
  };
  // the products of a stage and one pair of limbs
  auto multiply_limbs = [&](float(&d)[WGMMA_N / 2], const Place& of, int limb_a, int limb_b, bool fresh) {
    multiply(d, w_descriptor(of.w + limb_a * A_BLOCK), x_descriptor(of.x + limb_b * B_BYTES), fresh);
  };
  // give the stage that was multiplied `ago` stages ago (1 to 3) back to the producer
  auto give_back = [&](int ago) {
    if (threadIdx.x % 32 != 0) return;
    barrier_arrive(rings.empty + 8 * ((at.stage + STAGES - ago) % STAGES));
  };
  [[maybe_unused]] int stored = first_tile();  // the tile that total and rows belong to
  Rows rows(shapes.of[phase_of(shapes, stored)], Tile(shapes.of[phase_of(shapes, stored)], inside_phase(shapes, stored)), consumer, scale_k, scale, bias);
#if PRODUCTS == 3
  // Multiplies the first or second stage of a tile while `total` still holds the tile before. The second stage's main product and half of its
  // cross products are put off: a main sum over two stages would lose more to truncation, and nothing can be promoted yet.
  auto multiply_early = [&](auto number) {
    constexpr int n = decltype(number)::value;
    arrived();
    wgmma_fence();
    const Place of = place();
    if (n == 0) multiply_limbs(main, of, 0, 0, true);
    multiply_limbs(cross, of, 0, 1, n == 0);
    if (n == 0) multiply_limbs(cross, of, 1, 0, false);
    wgmma_commit();
    advance();
    if (n == 1) {  // the first stage may be loaded again while the tile before is stored
      wgmma_wait<1>();
      give_back(2);
    }
  };
  // where the tile's second stage lies, before the third one is multiplied
  auto second = [&] {
    const int stage = at.stage ? at.stage - 1 : STAGES - 1;
    Place of;
    of.w = a0 + stage * STAGE_BYTES;
    of.x = b0 + stage * STAGE_BYTES;
    return of;
  };
#else
  // multiplies the stage that comes next; `fresh` begins new sums
  auto multiply_stage = [&](bool fresh) {
    arrived();
    wgmma_fence();
    multiply_limbs(main, place(), 0, 0, fresh);
    wgmma_commit();
    advance();
  };
#endif
  auto store = [&] {
    const auto apart = y_apart(shapes, stored);
    store_sums(total, rows, shapes.of[phase_of(shapes, stored)], stored, consumer, staging, scales, output_offsets, residual + apart, map_y, moments, y + apart);
  };
  bool pending = false;  // total holds the tile before, which is not stored yet
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    prefetch_residual(shapes, next_tile(tile), consumer, residual);
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const Tile of(shape, inside_phase(shapes, tile));
    const Range range(shape, of);
    const bool any = range.first < range.last;
    int step = range.first;
    auto look_ahead = [&] {  // loads what this tile's stores need; the tile before has been stored
      rows = Rows(shape, of, consumer, scale_k, scale, bias);
      stored = tile;
      stage_output_offsets(rows, shape, consumer, scales, output_offsets, scale_n);
    };
#if PRODUCTS == 3
    if (MAY_ADD && !OVERLAP) {  // both are overwritten, but the compiler would keep their registers while the tile before is stored
#pragma unroll
      for (int i = 0; i < WGMMA_N / 2; ++i) main[i] = cross[i] = 0;
    }
    // two stages at once, while the tile before is stored; from then on total belongs to this tile
    for_all<EARLY>([&](auto number) {
      if (step < range.last) {
        multiply_early(number);
        ++step;
      }
    });
    if (OVERLAP && pending) store();
#endif
    look_ahead();
#if PRODUCTS == 3
    wgmma_wait<0>();
    wgmma_arrived(main);
    wgmma_arrived(cross);
    const int early = step - range.first;
    if (early == 1) give_back(1);
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) {
      total[i] = any ? main[i] : 0;
      cross[i] = any ? cross[i] : 0;
    }
    // Multiplies a stage and two pairs of limbs, or with `both` all three. The main sum is added to the total while the cross products are under way.
    auto multiply_and_add = [&](const Place& of, bool both) {
      wgmma_fence();
      multiply_limbs(main, of, 0, 0, true);
      wgmma_commit();
      if (both) multiply_limbs(cross, of, 0, 1, false);
      multiply_limbs(cross, of, 1, 0, false);
      wgmma_commit();
      if (both) advance();
      wgmma_wait<1>();
      wgmma_arrived(main);
#pragma unroll
      for (int i = 0; i < WGMMA_N / 2; ++i) total[i] += main[i];
      wgmma_wait<0>();
      wgmma_arrived(cross);
      give_back(1);
    };
    if (early == 2) multiply_and_add(second(), false);  // what multiply_early put off
    for (; step < range.last; ++step) {
      arrived();
      multiply_and_add(place(), true);
    }
    const Promoted promoted(range.last - range.first, 2048);
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) total[i] = fmaf(promoted.with_lost(cross[i], total[i], main[i]), 0x1p-11f, total[i]);
#else
    for (; step < range.last; ++step) {
      multiply_stage(step == range.first);
      wgmma_wait<1>();  // the stage before this one has been read
      if (step > range.first) give_back(2);
    }
    wgmma_wait<0>();
    wgmma_arrived(main);
    if (any) give_back(1);
    [[maybe_unused]] const float part = scaled(shape) ? lost_in(4 * (range.last - range.first)) : 0;  // 0 for 16-bit operands: their rounding hides what is lost
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) {
      total[i] = any ? main[i] : 0;
      if (SCALED) total[i] = with_lost(total[i], part);
    }
#endif
    pending = true;
    if (!OVERLAP) store();
  }
  if (OVERLAP && pending) store();
#if TENSOR_STORE
  if (threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive what is read from it
#endif
}
