// wgrad_flipped.cuh: what flipped tiles of hopper/wgrad.cu do with their sums.
#pragma once

// A channel of dy as it is loaded is (fold, channel), where innermost taps were folded into channels.
struct FlippedArguments {
  long long own, by_own, folds;                               // channels of dy, and how many taps are folded into a loaded channel
  long long out_k, out_tap, out_c;                            // elements from one k, tap and c to the next, of dw or of a part
  long long pixels, plane, by_plane, pq, by_pq, q, by_q;      // pixels of x: all, of an image, a slice and a row
  long long d, h, w, low_d, low_h, low_w;                     // size of dy; tap 0 of pixel o of x reads pixel o + low_d of dy, and so on
  long long tap_r, by_tap_r, tap_s, by_tap_s, apart_d, apart_h, apart_w;  // taps along r and s; pixels from one tap to the next
  long long folded_axes, dense, thin, size_d, size_h, size_w;  // axes folded; loaded channels of x and of dy; loaded size of dy
};

// Computes one sum of this block's run without pixels outside dy: for channel `row` of x, loaded channel `channel` of dy, and tap `tap` of all.
DEVICE float recompute_fp32(const FlippedArguments& flip, const StageRange& range, const data_t* x, const data_t* dy, int row, int channel, int tap) {
  const Divided s_of(tap, flip.tap_s, flip.by_tap_s), r_of(s_of.quotient, flip.tap_r, flip.by_tap_r);
  const int end = min(range.last * BLOCK_K, (int)flip.pixels);
  float sum = 0;
  for (int at = range.first * BLOCK_K; at < end; ++at) {
    const Divided image(at, flip.plane, flip.by_plane), slice(image.rest, flip.pq, flip.by_pq), line(slice.rest, flip.q, flip.by_q);
    const int d = slice.quotient + (int)flip.low_d + r_of.quotient * (int)flip.apart_d;
    int h = line.quotient + (int)flip.low_h + r_of.rest * (int)flip.apart_h, w = line.rest + (int)flip.low_w + s_of.rest * (int)flip.apart_w;
    if ((unsigned)d >= (unsigned)flip.d || (unsigned)h >= (unsigned)flip.h || (unsigned)w >= (unsigned)flip.w) continue;
    if (flip.folded_axes > 1) h = line.quotient;
    if (flip.folded_axes > 0) w = line.rest;
    const long long met = ((image.quotient * flip.size_d + d) * flip.size_h + h) * flip.size_w + w;
    sum = fmaf(to_float(x[(long long)at * flip.dense + row]), to_float(dy[met * flip.thin + channel]), sum);
    if (sum != sum) break;
  }
  return sum;
}

// Stores flipped tiles: a lane has a row and four neighbouring columns at once, a warp 32 rows.
template <class T>
DEVICE void store_flipped(const float* sums, const WgradNhwcArguments& arg, const FlippedArguments& flip, const Tile& of, const StageRange& range,
                          const data_t* x, const data_t* dy, T* to) {
  const int rows = min(BLOCK_M, (int)arg.rows - of.row);
  for (int first = threadIdx.x / 32 * 4; first < of.x_blocks * CHANNELS; first += 4 * WARPS) {
    const Column column(arg, of.block + first / CHANNELS);
    const int channel = column.channel + first % CHANNELS;
    for (int row = threadIdx.x % 32; row < rows; row += 32) {
      T* const at = to + (of.row + row) * flip.out_c;
      const float4 four = *(const float4*)(sums + row * PITCH + first);
      auto store = [&](int e, float sum, bool again = false) {
        const Divided fold(channel + e, flip.own, flip.by_own);
        const int tap = column.tap * (int)flip.folds + fold.quotient, taps = (int)(arg.taps * flip.folds);
        if (fold.quotient >= (int)flip.folds) return;  // past the last channel
        if (again && !(fabsf(sum) <= 3.4e38f)) sum = recompute_fp32(flip, range, x, dy, of.row + row, channel + e, tap);
        at[fold.rest * flip.out_k + (taps - 1 - tap) * flip.out_tap] = from_float<T>(sum);
      };
      if (fabsf(four.x) + fabsf(four.y) + fabsf(four.z) + fabsf(four.w) <= 3.4e38f) {
        store(0, four.x);
        store(1, four.y);
        store(2, four.z);
        store(3, four.w);
      } else {
#pragma unroll 1
        for (int e = 0; e < 4; ++e) store(e, sums[row * PITCH + first + e], true);
      }
    }
  }
}
