// gemm_store_tensor.cuh: TENSOR_STORE, sums to y by TMA, whole rows of channels. Their pitch is a multiple of 16 bytes.
#pragma once

#define IF_MAP_Y(...) __VA_ARGS__  // code that stands only in texts with a map of y
static_assert(NHWC && WGMMA_N % CHUNK == 0, "whole chunks of pixels");
constexpr int STAGING = 2 * CHUNK * 64 * (int)sizeof(out_t);  // bytes of a consumer: two tiles of CHUNK pixels x 64 channels, swizzled

// The byte at which 16-byte piece `piece` of row `row` lies in a tile of swizzled rows of 128 bytes.
DEVICE int swizzled(int row, int piece) { return row * 128 + ((piece ^ row % 8) << 4); }

// Stores a consumer's sums of CHUNK pixels from `base` on by TMA: its 128 threads fill a tile of `staging` together.
template <int base, class Phase>
DEVICE void store_chunk(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, int consumer, const Output& output) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  uint8_t* const tile = output.staging + base / CHUNK % 2 * (STAGING / 2);
  out_t added[CHUNK / 8][2][2] = {};
  // a warp reads 8 channels of 4 pixels at once, and the 8 channels next to them; all loads are issued before the first wait
  if (adds(shape)) {
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int m = rows.m + 16 * warp + lane / 4 + 8 * half, pixel = rows.pixel + base + 8 * i + 2 * (lane % 4) + e;
          if (m < (int)shape.rows_group && pixel < rows.end) added[i][half][e] = output.residual[pixel * shape.rows + rows.group * (int)shape.rows_group + m];
        }
  }
  auto fill = [&] {
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i) {
      float v[4];  // [half of the rows][neighbouring pixels]
      const int column = 8 * i + 2 * (lane % 4);
      const float2 scale = SCALED ? *(const float2*)(output.scales + base + column) : make_float2(1, 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * (base / 8 + i) + 2 * half;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          v[2 * half + e] =
              rows.finish[half].whole(shape, sum[at + e], (e ? scale.y : scale.x) * rows.scale_w[half], adds(shape) ? to_float(added[i][half][e]) : -0.f);
      }
      activate(shape, v);
#if OUT == 32
      // two boxes of 32 channels
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = 16 * warp + lane / 4 + 8 * half;
          *(float*)(tile + row / 32 * (CHUNK * 128) + swizzled(column + e, row % 32 / 4) + row % 4 * 4) = v[2 * half + e];
        }
#else
      // 8 x 8 blocks of 16-bit numbers, transposed, one row of 8 channels a lane
      const uint32_t packed[2] = {word_of(from_float<out_t>(v[0]), from_float<out_t>(v[1])), word_of(from_float<out_t>(v[2]), from_float<out_t>(v[3]))};
      store_transposed(shared_address(tile) + swizzled(8 * i + lane % 8, 2 * warp + lane / 8 % 2), packed);
#endif
    }
  };
  // the store before last has read this tile; if a consumer's chunks are odd in number, the first tile's last store is the very last one
  store_through_room<base == 0 && WGMMA_N / CHUNK % 2 ? 0 : 1>(consumer, fill, [&] {
#pragma unroll
    for (int part = 0; part < (int)sizeof(out_t) / 2; ++part)
      store_box(output.map_y, shared_address(tile) + part * CHUNK * 128, rows.m + part * 32, rows.group, rows.pixel + base, rows.split);
  });
}

// Stores a consumer's 64 channels of a tile.
template <class Phase>
DEVICE void store_tile(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, int, int consumer, const Output& output) {
  for_all<WGMMA_N / CHUNK>([&](auto chunk) { store_chunk<decltype(chunk)::value * CHUNK>(sum, rows, shape, consumer, output); });
}
