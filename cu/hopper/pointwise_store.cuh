// pointwise_store.cuh: from the sums of a tile of hopper/pointwise.cu, in registers, to y, and the moments of what is stored.
#pragma once

constexpr bool PLAIN = MOMENTS || WGRAD;  // there is no residual and no activation

// A thread's sums of a column, its rows in the order of v; finished if PLAIN.
DEVICE void sums_of(const PointwiseProduct& shape, float (&v)[2 * BLOCKS], const Sums& sum, int i, int e, const Finish<false>& of) {
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float found = sum[block][4 * i + 2 * half + e];
      v[2 * block + half] = PLAIN ? of.shifted(shape, found, 1) : found;
    }
}
// Finishes them; `added` is the residual, or -0.
DEVICE void finish(const PointwiseProduct& shape, float (&v)[2 * BLOCKS], const Finish<false>& of, const float (&added)[2 * BLOCKS]) {
  if constexpr (!PLAIN) {
#pragma unroll
    for (int row = 0; row < 2 * BLOCKS; ++row) v[row] = of.whole(shape, v[row], 1, added[row]);
    activate(shape, v);
  }
}

#if MOMENTS
// 8 lanes share a channel's pixels.
DEVICE void store_moments(const float (&v)[2 * BLOCKS], const bool (&counted)[2 * BLOCKS], int count, bool real, float* to, int columns) {
  const int lane = threadIdx.x % 32;
  const float first = __shfl_sync(~0u, v[0], lane % 4);
  Deviations of;
#pragma unroll
  for (int row = 0; row < 2 * BLOCKS; ++row) of.add(counted[row] ? v[row] - first : 0);
  of.add_lanes<4, 32>();
  if (lane < 4 && real) {
    to[0] = of.mean(first, count);
    to[columns] = of.off_mean(count);
  }
}
#endif

DEVICE void store(const Sums& sum, const Tile& of, const PointwiseProduct& shape, const float* bias, const float* scale, const float* residual,
                  [[maybe_unused]] float* moments, float* y) {
  const int lane = threadIdx.x % 32, r = lane / 4, columns = (int)shape.columns;
  const int own = threadIdx.x / 32 - 4, warp = PIXEL_QUADS ? of.row * (int)shape.busy + own : of.row * WARPS + own, column0 = of.column + 2 * (lane % 4);
  const Divided box(warp, shape.boxes, shape.by_boxes);  // NCHW: image and box
  const bool any = !PIXEL_QUADS || (own < (int)shape.busy && box.quotient < (int)shape.rows);  // whether this warp has pixels
  long long at[2 * BLOCKS];  // offsets in y of a thread's rows in the order of finish, without the column's part
  bool counted[2 * BLOCKS];
  if (PIXEL_QUADS) {
    const int pixel = box.rest * 32 + 4 * four(r);
    counted[0] = counted[1] = counted[2] = counted[3] = any && pixel < (int)shape.plane;
    at[0] = box.quotient * shape.row_step + pixel;
  } else {
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
      const int row = warp * WARP_ROWS + 8 * i + r;
      counted[i] = row < (int)shape.rows;
      at[i] = row * shape.row_step;
    }
  }
  y += of.split * shape.size;
#if MOMENTS
  const int begin = PIXEL_QUADS ? box.rest * 32 : warp * WARP_ROWS, end = PIXEL_QUADS ? (int)shape.plane : (int)shape.rows;
  const int count = any ? min(end - begin, WARP_ROWS) : 0;
#endif
  constexpr int BATCH = 8;  // loads under way at once; more would spill
  Finish<false> of_column[BATCH];
#pragma unroll
  for (int i = 0; i < BLOCK_N / 8; ++i) {
    if (i % (BATCH / 2) == 0)
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int column = min(column0 + 8 * (i + j / 2) + j % 2, columns - 1);
        of_column[j].of = ScaleAndBias(shape, scale, bias, column);
      }
    float v[2][2 * BLOCKS], added[2][2 * BLOCKS];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums_of(shape, v[e], sum, i, e, of_column[(2 * i + e) % BATCH]);
#if MOMENTS
      const int column = column0 + 8 * i + e;
      if (count > 0) store_moments(v[e], counted, count, column < columns, moments + (long long)warp * 2 * columns + column, columns);
#endif
#pragma unroll
      for (int row = 0; row < 2 * BLOCKS; ++row) added[e][row] = -0.f;
    }
    const bool adds = !PLAIN && has_residual(shape), has_left = column0 + 8 * i < columns, has_right = column0 + 8 * i + 1 < columns;
    const long long left = (column0 + 8 * i) * shape.column_step, right = left + shape.column_step;
#if !WGRAD && !NHWC
    if (adds && counted[0]) {
      if (has_left) *(float4*)added[0] = *(const float4*)(residual + at[0] + left);
      if (has_right) *(float4*)added[1] = *(const float4*)(residual + at[0] + right);
    }
#else
#pragma unroll
    for (int row = 0; row < 2 * BLOCKS; ++row) {
      if (!adds || !counted[row] || !has_left) continue;
      if (shape.pairs) {
        const float2 both = *(const float2*)(residual + at[row] + left);
        added[0][row] = both.x, added[1][row] = both.y;
      } else {
        added[0][row] = residual[at[row] + left];
        if (has_right) added[1][row] = residual[at[row] + right];
      }
    }
#endif
#pragma unroll
    for (int e = 0; e < 2; ++e) finish(shape, v[e], of_column[(2 * i + e) % BATCH], added[e]);
#if !WGRAD && !NHWC
    if (counted[0] && has_left) store_word(y + at[0] + left, *(const uint4*)v[0]);
    if (counted[0] && has_right) store_word(y + at[0] + right, *(const uint4*)v[1]);
#else
#pragma unroll
    for (int row = 0; row < 2 * BLOCKS; ++row) {
      if (!counted[row] || !has_left) continue;
      if (shape.pairs) {
        const float both[2] = {v[0][row], v[1][row]};
        store_word(y + at[row] + left, *(const uint2*)both);
      } else {
        y[at[row] + left] = v[0][row];
        if (has_right) y[at[row] + right] = v[1][row];
      }
    }
#endif
  }
}
