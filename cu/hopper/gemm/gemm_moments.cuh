// gemm_moments.cuh: the mean of each channel of a slice of y, one consumer's pixels of a tile, and the sum of squared deviations from it.
#pragma once

#if EMIT_MOMENTS
#define IF_MOMENTS(...) __VA_ARGS__
// Four lanes share a channel's pixels.
DEVICE void store_moments(const float (&sum)[WGMMA_N / 2], const Rows& rows, const GemmPhase& shape, const Output& output) {
  const int lane = threadIdx.x % 32, count = min(rows.end - rows.pixel, WGMMA_N);
  if (count <= 0) return;
  const int slice = rows.pixel / WGMMA_N;
  auto scale_of = [&](int pixel) { return SCALED ? output.scales[pixel] : 1; };
  bool alike = false;
  if (OUT == 32) {  // if all pixels are real and have one scale, which is common, the raw sums' moments are scaled at the end
    alike = count == WGMMA_N;
#pragma unroll
    for (int i = 0; i < WGMMA_N; i += 32) alike &= scale_of(min(i + lane, WGMMA_N - 1)) == scale_of(0);
    alike = __all_sync(~0u, alike);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = scale_of(0) * rows.scale_w[half];
    auto value = [&](int i, int e) {  // as it is stored
      return to_float(from_float<out_t>(rows.finish[half].shifted(shape, sum[4 * i + 2 * half + e], scale_of(8 * i + 2 * (lane % 4) + e) * rows.scale_w[half])));
    };
    const float first = __shfl_sync(~0u, alike ? sum[2 * half] : value(0, 0), lane & ~3);
    Deviations of, odd;  // two sums: an addition does not wait for the one before it
    auto add_all = [&](const auto& deviation) {
#pragma unroll
      for (int i = 0; i < WGMMA_N / 8; ++i) {
        of.add(deviation(i, 0));
        odd.add(deviation(i, 1));
      }
    };
    if (alike) add_all([&](int i, int e) { return sum[4 * i + 2 * half + e] - first; });
    else add_all([&](int i, int e) { return 8 * i + 2 * (lane % 4) + e < count ? value(i, e) - first : 0; });
    of.all += odd.all;
    of.squares += odd.squares;
    of.add_lanes<1, 4>();
    const int m = rows.m + (int)threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * half;
    if (lane % 4 == 0 && m < (int)shape.rows_group) {
      float mean = of.mean(first, count), square = of.off_mean(count);
      if (alike) {
        mean = rows.finish[half].shifted(shape, mean, factor);
        square *= factor;
        square *= factor;
        square *= rows.finish[half].of.scale * rows.finish[half].of.scale;
      }
      float* const to = output.moments + (long long)slice * 2 * shape.rows + rows.group * (int)shape.rows_group + m;
      to[0] = mean;
      to[shape.rows] = square;
    }
  }
}
#else
#define IF_MOMENTS(...)
#endif
