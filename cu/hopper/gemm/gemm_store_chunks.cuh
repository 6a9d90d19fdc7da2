// gemm_store_chunks.cuh: sums to y through shared memory, CHUNK pixels at a time, for any layout and any phase.
#pragma once

#define IF_MAP_Y(...)
constexpr int STAGING = 4 * 32 * 20 * 4;  // bytes of a consumer: a tile of each warp

// Stores a warp's sums of CHUNK pixels from `base` on: its part of shared memory transposes them, so that neighbours are written together.
template <int base, class Phase> DEVICE void store_chunk(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, const Output& output) {
  float* const staging = (float*)output.staging + threadIdx.x % 128 / 32 * (32 * 20);
  const out_t* residual = output.residual;
  out_t* y = output.y;
  constexpr int PITCH = NHWC ? 20 : 40;
  constexpr int width = WGMMA_N - base < CHUNK ? WGMMA_N - base : CHUNK;
  const int lane = threadIdx.x % 32;
  __syncwarp();  // the last chunk has been read
#pragma unroll
  for (int i = 0; i < width / 8; ++i) {
    const int column = 8 * i + 2 * (lane % 4);
    const float2 scale = SCALED ? *(const float2*)(output.scales + base + column) : make_float2(1, 1);
    float v[4];  // [half of the rows][neighbouring pixels]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (base / 8 + i) + 2 * half;
      v[2 * half] = rows.finish[half].shifted(shape, sum[at], scale.x * rows.scale_w[half]);
      v[2 * half + 1] = rows.finish[half].shifted(shape, sum[at + 1], scale.y * rows.scale_w[half]);
    }
    if (!MAY_ADD) activate(shape, v);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (NHWC) {
        staging[column * PITCH + row] = v[2 * half];
        staging[(column + 1) * PITCH + row] = v[2 * half + 1];
      } else {
        *(float2*)(staging + row * PITCH + column) = make_float2(v[2 * half], v[2 * half + 1]);
      }
    }
  }
  __syncwarp();
  constexpr int ACROSS = (NHWC ? 16 : CHUNK) / VEC, DOWN = NHWC ? CHUNK : 16, STEP = 32 / ACROSS;
  const int across = lane % ACROSS * VEC, down = lane / ACROSS, pixel0 = rows.pixel + base;
  const int m0 = rows.m + threadIdx.x % 128 / 32 * 16, k0 = rows.group * (int)shape.rows_group + m0;  // this warp's channels
  y += rows.split * shape.out_part;
  typedef Vec<out_t, VEC> Vector;
#if NHWC
  const int last = m0 + across < (int)shape.rows_group ? min(width, rows.end - pixel0) : 0;
  const int first = k0 + across;
#else
  const int pixel = pixel0 + across;
  const int last = across < width && pixel < rows.end ? (int)shape.rows_group - m0 : 0;
  const Divided of_image(pixel, shape.plane, shape.by_plane);
  const long long first = of_image.quotient * shape.out_image + (k0 + down) * shape.out_row + plane_offset<DENSE>(shape, of_image.rest);
#endif
  y += first;
  residual += first;
  auto place = [&](int i) -> long long {  // offset of this thread's vector number i
#if NHWC
    const int pixel = pixel0 + down + i * STEP;
    if (DENSE) return pixel * shape.rows;
    const Divided of_image(pixel, shape.plane, shape.by_plane);
    return (of_image.quotient * shape.out_size + plane_offset<DENSE>(shape, of_image.rest)) * shape.rows;
#else
    return i * STEP * shape.out_row;
#endif
  };
  // loads of the residual under way together: they take the registers of sums that have gone to shared memory; more would spill
  constexpr int COUNT = DOWN / STEP, MOST = DENSE ? 8 : 4, BATCH = COUNT < MOST ? COUNT : MOST;
  Vector added[BATCH] = {};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (adds(shape) && i % BATCH == 0)
#pragma unroll
      for (int j = i; j < i + BATCH; ++j) added[j - i] = down + j * STEP < last ? *(const Vector*)(residual + place(j)) : Vector();
    const float* const from = staging + (down + i * STEP) * PITCH + across;
    float v[VEC];
#pragma unroll
    for (int e = 0; e < VEC; ++e) v[e] = MAY_ADD ? from[e] + (adds(shape) ? to_float(added[i % BATCH].v[e]) : -0.f) : from[e];
    if (MAY_ADD) activate(shape, v);
    if (down + i * STEP < last) store_rounded(y + place(i), v);
  }
}

// Stores a consumer's 64 channels of a tile.
template <class Phase> DEVICE void store_tile(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, int, int, const Output& output) {
  for_all<(WGMMA_N + CHUNK - 1) / CHUNK>([&](auto chunk) { store_chunk<decltype(chunk)::value * CHUNK>(sum, rows, shape, output); });
}
