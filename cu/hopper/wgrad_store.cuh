// wgrad_store.cuh: from the sums of a tile of hopper/wgrad.cu, in shared memory, to dw or to a part of it. A warp writes every WARPS-th row.
#pragma once

// Where a channel of x belongs: its number in its group, and the rows of the tile that belong to that group.
struct Own {
  int channel, first, end;
  DEVICE Own(const WgradNhwcArguments& arg, const Tile& of, int c) {
    const Divided group(c, arg.own_columns, arg.by_own_columns);
    channel = group.rest;
    first = group.quotient * (int)arg.own_rows - of.row;
    end = min(first + (int)arg.own_rows, BLOCK_M);
  }
};

// Stores [k][tap][c], a part or dw: a lane has EACH neighbouring channels of each block of columns, and LANES lanes fill a block's row.
template <int EACH, class T>
DEVICE void store_rows(const float* sums, const WgradNhwcArguments& arg, const Tile& of, T* to) {
  constexpr int LANES = CHANNELS / EACH, ROWS = 32 / LANES;  // lanes of a block's row; rows of a warp at once
  const int lane = threadIdx.x % 32 % LANES, rows = min(BLOCK_M, (int)arg.rows - of.row);
  const long long pitch = arg.taps * arg.own_columns;
  for (int i = 0; i < of.x_blocks; ++i) {
    const Column column(arg, of.block + i);
    const int c = column.channel + EACH * lane;
    if (c >= (int)arg.columns) continue;
    const Own own(arg, of, c);
    T* const at = to + (of.pack * arg.rows + of.row) * pitch + column.tap * arg.own_columns + own.channel;
#pragma unroll 4
    for (int down = threadIdx.x / LANES; down < rows; down += WARPS * ROWS) {
      const auto sum = *(const Vec<float, EACH>*)(sums + down * PITCH + CHANNELS * i + EACH * lane);
      if (down >= own.first && down < own.end) store_rounded(at + down * pitch, sum.v);
    }
  }
}

// The same by 16 bytes, if a group's channels are a multiple of that.
template <class T> DEVICE void store_rows(const float* sums, const WgradNhwcArguments& arg, const Tile& of, T* to) {
  constexpr int WIDE = 16 / sizeof(T);
  if (arg.own_columns % WIDE == 0)
    store_rows<WIDE>(sums, arg, of, to);
  else
    store_rows<CHANNELS / 32>(sums, arg, of, to);
}

// Stores [k][c][tap]: neighbouring lanes have the same channel of the tile's blocks of columns, which are neighbouring taps of it.
DEVICE void store_taps(const float* sums, const WgradNhwcArguments& arg, const Tile& of, data_t* dw) {
  const int lane = threadIdx.x % 32, rows = min(BLOCK_M, (int)arg.rows - of.row);
  const long long pitch = arg.taps * arg.own_columns;
  for (int first = lane; first < BLOCK_N; first += 32) {
    const int block = first % X_BLOCKS, inside = first / X_BLOCKS;
    const Column column(arg, of.block + block);
    const int c = column.channel + inside;
    if (block >= of.x_blocks || c >= (int)arg.columns) continue;
    const Own own(arg, of, c);
    data_t* const at = dw + (of.pack * arg.rows + of.row) * pitch + own.channel * arg.taps + column.tap;
#pragma unroll 4
    for (int down = threadIdx.x / 32; down < rows; down += WARPS)
      if (down >= own.first && down < own.end) at[down * pitch] = from_float<data_t>(sums[down * PITCH + CHANNELS * block + inside]);
  }
}
