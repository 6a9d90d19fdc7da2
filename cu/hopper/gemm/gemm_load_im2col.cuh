// gemm_load_im2col.cuh: the producer of hopper/gemm.cu. One thread loads the stages of w and x, tap by tap.
#pragma once
#include "hopper/taps.cuh"

template <int spatial_dims>
DEVICE void produce_by(const uint8_t* w, [[maybe_unused]] const CUtensorMap* map_w, const Maps& maps, const Shapes& shapes, const Rings& rings) {
  if (WITH_MAP_W) prefetch_map(map_w);
#pragma unroll
  for (int phase = 0; phase < PHASES; ++phase) prefetch_map(maps.of + phase);
  Position at;
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const CUtensorMap* const map_x = maps.of + phase_of(shapes, tile);
    const Tile of(shape, inside_phase(shapes, tile));
    const StageRange range = range_of(shape, of);
    const LoadBase base(shape, of.pixel);
    const int channel = of.group * (int)shape.channels_group, limb_images = (int)shape.limb_images;
    const int blocks = (int)shape.blocks, channel_blocks = (int)shape.channel_blocks;
    const long long w_block = shape.row_blocks * A_SUB;  // bytes of 64 rows
    [[maybe_unused]] const long long w_next = next_rows(of, shape) ? w_block : 0;
    [[maybe_unused]] const uint8_t* const w_tile = w + (of.group * shape.blocks_group + of.m / 64) * w_block;
    int block = range.first * SUB_TILES;
    Taps walk(shape, block, taps_apart(shapes, tile));
    fill_stages(rings, at, range.first, range.last, [&](int, uint32_t stage, uint32_t arrived) {
      barrier_expect(arrived, STAGE_BYTES);
#pragma unroll
      for (int sub = 0; sub < SUB_TILES; ++sub) {
        // blocks past the end fill the last stage: with the zeros at the end of w, and with channels of x past the last one, which arrive as zeros
        const bool real = SUB_TILES == 1 || block < blocks;
        const uint8_t* const from = w_tile + (real ? (long long)walk.tap * channel_blocks + walk.c : shape.row_blocks - 1) * A_SUB;
#pragma unroll
        for (int rows = 0; rows < BLOCK_M / 64; ++rows)
          if (W_MN_MAJOR) {
            load_box(stage + rows * A_SUB, map_w, arrived, of.m + 64 * rows, walk.tap, channel + walk.c * LOAD_CHANNELS);
          } else if (WITH_MAP_W && shape.w_lies) {
            load_box(stage + (rows * SUB_TILES + sub) * A_SUB, map_w, arrived, real ? walk.c * LOAD_CHANNELS : (int)shape.channels, walk.tap,
                     of.group * (int)shape.rows_group + of.m + 64 * rows);
          } else {
            load_bytes(stage + (rows * SUB_TILES + sub) * A_SUB, from + rows * w_next, A_SUB, arrived);
          }
#pragma unroll
        for (int limb = 0; limb < X_LIMBS; ++limb)
          load_im2col<spatial_dims>(stage + A_BYTES + limb * B_BYTES + sub * BLOCK_N * SPAN, map_x, arrived,
                            real ? channel + walk.c * LOAD_CHANNELS : (int)shape.channels, base.w, base.h, base.d,
                            base.image + limb * limb_images, real ? walk.x_s : 0, real ? walk.x_r : 0, real ? walk.x_t : 0);
        ++block;
        walk.next();
      }
    });
  }
}
DEVICE void produce(const uint8_t* w, const CUtensorMap* map_w, const Maps& maps, const Shapes& shapes, const Rings& rings) {
  const int spatial_dims = (int)shapes.of[0].spatial_dims;
  if (spatial_dims == 1) produce_by<1>(w, map_w, maps, shapes, rings);
  if (spatial_dims == 2) produce_by<2>(w, map_w, maps, shapes, rings);
  if (spatial_dims == 3) produce_by<3>(w, map_w, maps, shapes, rings);
}
