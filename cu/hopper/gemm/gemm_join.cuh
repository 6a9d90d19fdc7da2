// gemm_join.cuh: the blocks of a product add the parts of split sums themselves, by tickets: see "Split" in hopper/gemm.cu.
#pragma once

// Adds and finishes the parts of a tile. A thread takes VEC neighbours at a time, and RUNS such vectors at once: their loads wait for memory
// together.
DEVICE void add_parts(const GemmPhase& shape, const JoinArguments& join, const Tile& of, const float* parts, const out_t* bias, const out_t* scale,
                      const float* residual, float* y) {
  constexpr int ACROSS = (NHWC ? BLOCK_M : BLOCK_N) / VEC, ALL = BLOCK_M * BLOCK_N / VEC, APART = 128 * CONSUMERS, RUNS = VEC == 4 ? 4 : 8;
  typedef Vec<float, VEC> Vector;
  for (int first = threadIdx.x - 128; first < ALL; first += RUNS * APART) {
    long long at[RUNS];  // offsets in y; -1 where there is nothing
    int k[RUNS];
    float v[RUNS][VEC] = {};
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const int i = first + run * APART, across = i % ACROSS * VEC, down = i / ACROSS;
      const int m = of.m + (NHWC ? across : down), pixel = of.pixel + (NHWC ? down : across);
      k[run] = of.group * (int)shape.rows_group + m;
      const Divided of_image(pixel, shape.plane, shape.by_plane);
      const long long inside = plane_offset<DENSE>(shape, of_image.rest);
      at[run] = NHWC ? (of_image.quotient * shape.out_size + inside) * shape.rows + k[run] : of_image.quotient * shape.out_image + k[run] * shape.out_row + inside;
      if (i >= ALL || m >= (int)shape.rows_group || pixel >= of.end) at[run] = -1;
    }
    const float* from = parts;
#pragma unroll 2
    for (int part = 0; part < (int)shape.splits; ++part) {
      float more[RUNS][VEC];
#pragma unroll
      for (int run = 0; run < RUNS; ++run)
        if (at[run] >= 0) {
          if constexpr (VEC == 4) *(float4*)more[run] = __ldcg((const float4*)(from + at[run]));
          else more[run][0] = __ldcg(from + at[run]);
        }
#pragma unroll
      for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int e = 0; e < VEC; ++e) v[run][e] += more[run][e];
      from += shape.out_part;
    }
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      if (at[run] < 0) continue;
      Vector added = {}, out;
      if (has_residual(join)) added = *(const Vector*)(residual + at[run]);
#pragma unroll
      for (int e = 0; e < VEC; ++e) {
        const Finish<false> finish{ScaleAndBias(join, scale, bias, k[run] + (NHWC ? e : 0))};
        v[run][e] = finish.whole(join, v[run][e], 1, has_residual(join) ? added.v[e] : -0.f);
      }
      activate(join, v[run]);
#pragma unroll
      for (int e = 0; e < VEC; ++e) out.v[e] = v[run][e];
      *(Vector*)(y + at[run]) = out;
    }
  }
}

struct JoinOperands {
  const float* parts;
  unsigned* tickets;
  const void *bias, *scale, *residual;
  void* y;
};

// Adds the parts of those tiles whose last part this block stored. Only the consumers' threads come here, once all that they stored is visible.
__device__ __noinline__ void join_tiles(const Shapes& shapes, const JoinArguments& join, const JoinOperands& operands, const Recomputes& recomputes,
                                        const RecomputeOperands& flagged) {
  __shared__ bool last;
  __threadfence();
  named_barrier(STORED, 128 * CONSUMERS);
  for (int tile = first_tile(); tile < all_tiles(shapes); tile = next_tile(tile)) {
    const int number = inside_phase(shapes, tile), turns = all_tiles(shapes) / (int)shapes.of[0].tiles;
    const GemmPhase& shape = shapes.of[phase_of(shapes, tile)];
    const Tile of(shape, number);
    const Divided down(number, shape.tiles_m, shape.by_tiles_m);
    const int whole = (divided(down.quotient, shape.by_splits) * (int)shape.tiles_m + down.rest) * turns + turn_of(shapes, tile);
    if (threadIdx.x == 128) last = atomicInc(operands.tickets + whole, (unsigned)shape.splits - 1) == (unsigned)shape.splits - 1;
    named_barrier(STORED, 128 * CONSUMERS);
    const bool mine = last;
    if (mine) {
      __threadfence();
      const auto apart = y_apart(shapes, tile);
      add_parts(shape, join, of, operands.parts + apart, (const out_t*)operands.bias, (const out_t*)operands.scale, (const out_t*)operands.residual + apart,
                (out_t*)operands.y + apart);
    }
    named_barrier(STORED, 128 * CONSUMERS);
    if (mine && any_flag) recompute_tile(shapes, tile, RecomputeFinish(join), recomputes, flagged, nullptr, (out_t*)operands.y);
  }
}
