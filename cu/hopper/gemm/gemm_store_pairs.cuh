// gemm_store_pairs.cuh: INTERLEAVE_COLUMNS, the phases of even and odd columns written together.
//
// A block computes the same tile of two phases, one after the other. A thread has neighbours in y at the same place of its sums, so the sums of
// both phases become rows of y in shared memory.
#pragma once

#define IF_MAP_Y(...)
// bytes of a warp: a piece, and of all its sums
constexpr int INTERLEAVED_PIECE = 8 * CHUNK * 4, INTERLEAVED = 16 * WGMMA_N * 4 + INTERLEAVED_PIECE;
constexpr int STAGING = 4 * INTERLEAVED;  // bytes of a consumer

// Keeps the sums of a pair's first phase, or writes them with those of the second. A warp keeps one piece for each half of its channels and CHUNK
// pixels, behind one piece of free room: once a piece has been read, its own room and that before it hold rows of y.
template <class Phase>
DEVICE void store_tile(const float (&sum)[WGMMA_N / 2], const Rows& rows, const Phase& shape, int tile, int, const Output& output) {
  const int lane = threadIdx.x % 32, m = rows.m + threadIdx.x % 128 / 32 * 16;
  const bool second = tile % 2;
  uint8_t* const kept = output.staging + threadIdx.x % 128 / 32 * INTERLEAVED;
  out_t* const y = output.y + rows.split * shape.out_part + (rows.group * (int)shape.rows_group + m) * shape.out_row;
  __syncwarp();  // the last pair has been read
  for_all<(WGMMA_N + CHUNK - 1) / CHUNK>([&](auto chunk) {
    constexpr int base = decltype(chunk)::value * CHUNK, width = WGMMA_N - base < CHUNK ? WGMMA_N - base : CHUNK, SIZE = 8 * width * 4;
    const bool real = lane < width && rows.pixel + base + lane < rows.end;
    out_t* const to = y + (real ? output.offsets[base + lane] - 1 : 0);  // the second phase's offsets, which are those of odd columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint8_t* const piece = kept + INTERLEAVED_PIECE + base * 64 + half * SIZE;
      // neighbouring rows lie in different banks, 16 bytes by 16 bytes
      float4* const turned = (float4*)(piece - SIZE);
      auto place = [](int row, int at) { return row * (width / 2) + (width % 16 ? at : at ^ row % 2 * 4); };
      float value[width / 4];
      float2 before[width / 8];
#pragma unroll
      for (int i = 0; i < width / 8; ++i) {
        const int at = 4 * (base / 8 + i) + 2 * half;
        const float2 scale = SCALED ? *(const float2*)(output.scales + base + 8 * i + 2 * (lane % 4)) : make_float2(1, 1);
        value[2 * i] = rows.finish[half].shifted(shape, sum[at], scale.x * rows.scale_w[half]);
        value[2 * i + 1] = rows.finish[half].shifted(shape, sum[at + 1], scale.y * rows.scale_w[half]);
      }
      activate(shape, value);
#pragma unroll
      for (int i = 0; i < width / 8; ++i) {
        float2& slot = ((float2*)piece)[32 * i + lane];
        if (second) {
          before[i] = slot;
        } else {
          slot = make_float2(value[2 * i], value[2 * i + 1]);
        }
      }
      if (second) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < width / 8; ++i) turned[place(lane / 4, 4 * i + lane % 4)] = make_float4(before[i].x, value[2 * i], before[i].y, value[2 * i + 1]);
        __syncwarp();
#pragma unroll
        for (int row = 0; row < 8; ++row) {
          if (!real || m + 8 * half + row >= (int)shape.rows_group) continue;
          const float2 both = ((const float2*)(turned + place(row, lane / 2)))[lane % 2];
          store_rounded(to + (8 * half + row) * shape.out_row, {both.x, both.y});
        }
      }
    }
  });
}
