// gemm_split_patch.cuh: FUSED_SPLIT, the converters of hopper/gemm_patch.cu. They read raw images and store their limbs in the ring of x.
//
// CONVERTERS warps do this: the first warpgroup's idle ones and a fourth warpgroup. Each takes some rows of 8 channels at a time, by tensor loads
// into raw_stages slots of its own, and a lane converts one pixel of them. A patch has a scale of its own, which is guessed from what is read
// first. If the extremes of the whole halo show that the guess was wrong, the halo is split again with their scale.
#pragma once
#include "core/limbs.cuh"

// ... and the converters split the halos of x.
DEVICE void convert(const CUtensorMap* map_x, const float* __restrict__ x, float* __restrict__ unit_scales, int* __restrict__ unit_flags,
                    const GemmPhase& shape, const Rings& rings, uint8_t* dynamic, float* scales) {
  const int slots = (int)shape.raw_stages, slot_bytes = 32 * (int)shape.raw_channel, halo_bytes = (int)shape.halo_bytes;
  const int run = (int)shape.raw_run, rounds = (int)shape.raw_rounds, slack = (int)shape.slack;
  __shared__ MagnitudeRange of_warps[2][2][CONVERTERS];  // by the stage of the ring of x
  const int warp = threadIdx.x / 32 < 4 ? threadIdx.x / 32 - 1 : threadIdx.x / 32 - 4 * CONSUMERS - 1, lane = threadIdx.x % 32;
  auto is_met = [&](int pixel) { return lane < run && pixel < (int)(shape.halo_w * shape.halo_h); };
  uint8_t* const x_ring = dynamic + (rings.x - shared_address(dynamic));
  const uint32_t raw = rings.raw + warp * slots * slot_bytes, arrived = rings.raw_full + warp * slots * 8;
  const Divided of_lane(lane, shape.halo_w, shape.by_halo_w);
  const uint8_t* const raw_pixel = dynamic + (raw - shared_address(dynamic)) + (of_lane.quotient * (int)shape.raw_pitch + of_lane.rest + (int)shape.raw_shift) * 4;

  // what is loaded next: item (run of rows, 8 channels) number next_round * CONVERTERS + warp of tile `next`
  int next = blockIdx.x, next_round = 0, row, column, unit;
  // `slot` holds the item that comes next; once that has been taken, the next load goes there. `parity` is that of the slot's round, after a first
  // round of loads alone
  int slot = 0, parity = 1;
  auto begin = [&] {
    const Tile of(shape, next);
    row = of.row + (int)shape.low_h;
    column = of.column + (int)(shape.low_w - shape.raw_shift);  // loads begin at multiples of 16 bytes
    unit = of.image(shape) * (int)shape.groups + of.group;
  };
  auto load = [&] {
    if (next < (int)shape.tiles && lane == 0) {
      const int item = next_round * CONVERTERS + warp;
      barrier_expect(arrived + 8 * slot, slot_bytes);
      load_box(raw + slot * slot_bytes, map_x, arrived + 8 * slot, column, row + item / 8 * (int)shape.raw_rows, item % 8 * 8, unit);
    }
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
    if (++next_round == rounds) {
      next_round = 0;
      next += gridDim.x;
      if (next < (int)shape.tiles) begin();
    }
  };
  // 8 channels of this lane's pixel of the item that comes next; undefined from lane `run` on
  auto take = [&](float(&v)[8]) {
    barrier_wait(arrived + 8 * slot, parity);
    const float* const of_slot = (const float*)(raw_pixel + slot * slot_bytes);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = of_slot[e * (int)shape.raw_channel];
  };
  // the extremes of all of a warp's lanes, to its entry of `room`
  auto together = [&](MagnitudeRange mine, MagnitudeRange(&room)[CONVERTERS]) {
    mine.over_warp();
    if (lane == 0) room[warp] = mine;
  };
  auto combined = [&](const MagnitudeRange(&room)[CONVERTERS]) {
    MagnitudeRange all = room[0];
#pragma unroll
    for (int i = 1; i < CONVERTERS; ++i) all.add(room[i]);
    return all;
  };

  // the extremes of the item that comes next, if there is a tile `number`: the scale of that tile is guessed from them
  auto sample = [&](int number) {
    MagnitudeRange found = {0, ~0u};
    if (number >= (int)shape.tiles) return found;
    float v[8];
    take(v);
    if (lane < run) found.add(v);
    return found;
  };

  prefetch_map(map_x);
  begin();
#pragma unroll 1
  for (int i = 0; i < slots; ++i) load();
  XPosition at;
  together(sample(blockIdx.x), of_warps[1][1]);
  named_barrier(3, 32 * CONVERTERS);
  int guess = combined(of_warps[1][1]).guess();
  for (int tile = blockIdx.x; tile < (int)shape.tiles; tile += gridDim.x, at.next(shape)) {
    // the first limbs of 8 channels of a pixel, swizzled as wgmma wants them; further limbs lie halo_bytes behind one another
    auto place = [&](int pixel, int chunk) { return x_ring + at.stage * LIMBS * halo_bytes + pixel * 128 + ((chunk ^ pixel % 8) << 4); };
    auto store = [&](const float(&v)[8], float scale, int pixel, int chunk) {
      uint32_t limbs[LIMBS][4];
      split<__half>(v, scale, limbs);
#pragma unroll
      for (int limb = 0; limb < LIMBS; ++limb) *(uint4*)(place(pixel, chunk) + limb * halo_bytes) = piece_of(limbs[limb]);
    };
    float scale = power_of_two(guess);
    MagnitudeRange found = {0, ~0u};
    barrier_wait(rings.x_empty + 8 * at.stage, at.parity ^ 1);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      float v[8];
      take(v);
      const int item = round * CONVERTERS + warp, pixel = item / 8 * run + lane;
      if (is_met(pixel)) {
        found.add(v);
        store(v, scale, pixel, item % 8);
      }
      // Every lane must have stored its limbs before the slot is loaded again: nothing orders TMA's writes after a lane's loads that were
      // issued and not yet used, which may wait for long behind the consumers' stores.
      __syncwarp();
      load();
    }
    together(found, of_warps[at.stage][0]);
    together(sample(tile + gridDim.x), of_warps[at.stage][1]);
    named_barrier(3, 32 * CONVERTERS);
    const MagnitudeRange all = combined(of_warps[at.stage][0]);
    const bool guessed = all.fits(guess, slack);
    if (!guessed && all.usable()) {
      const Tile of(shape, tile);
      const int channels = (int)shape.x_channels, high = (int)shape.x_h, wide = (int)shape.x_w;
      const float* const image = x + (of.image(shape) * (int)shape.groups + of.group) * ((long long)channels * high * wide);
      scale = all.scale();
#pragma unroll 1
      for (int item = warp; item < rounds * CONVERTERS; item += CONVERTERS) {
        const int pixel = item / 8 * run + lane;
        const Divided inside(pixel, shape.halo_w, shape.by_halo_w);
        const int at_h = of.row + (int)shape.low_h + inside.quotient, at_w = of.column + (int)shape.low_w + inside.rest;
        const bool there = (unsigned)at_h < (unsigned)high && (unsigned)at_w < (unsigned)wide;
        if (is_met(pixel)) {
          float v[8];
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const int c = item % 8 * 8 + e;
            v[e] = there && c < channels ? image[((long long)c * high + at_h) * wide + at_w] : 0;
          }
          store(v, scale, pixel, item % 8);
        }
      }
    }
    if (warp == 0 && lane == 0) {
      const Tile of(shape, tile);
      const int unit = of.group * (int)shape.tiles_pixels + of.patch;
      scales[at.stage] = unit_scales[unit] = 1 / scale;
      unit_flags[unit] = guessed ? all.flag(guess, slack) : all.flag(slack);
    }
    guess = combined(of_warps[at.stage][1]).guess();
    fence_for_bulk();
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.x_full + 8 * at.stage);
  }
}
