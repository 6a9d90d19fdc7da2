// plane_store.cuh: from a consumer's sums, 64 channels x `pixels` pixels of an image, to NCHW y of 16 bits, by TMA, for hopper/planes.cu.
//
// A consumer has room for its results, in blocks of 64 channels x 64 pixels, rows of 128 bytes, swizzled: `results` times. With 2, TMA stores one
// half while the other is filled. Elements past the last pixel or channel are not stored.
#pragma once
#include "core/finish.cuh"
#include "hopper/ptx.cuh"

template <class data_t, int pixels, int results> struct PlaneStore {
  static constexpr int BLOCK = 64 * 128, BLOCKS = pixels / 64;
  const CUtensorMap* map_y;
  uint8_t* room;  // of the block's consumers
  const data_t *scale, *bias, *residual;
  int turn = 0;

  // Finishes and stores the sums of channels from `channel` on and pixels from `pixel` on.
  template <class Arguments> DEVICE void finish(const Arguments& arg, const float (&sum)[pixels / 2], int image, int channel, int pixel) {
    const int consumer = threadIdx.x / 128;
    uint8_t* const own = room + (consumer * results + turn) * BLOCKS * BLOCK;
    turn = (turn + 1) % results;
    auto fill = [&] {
      if (!has_scale(arg) && !has_bias(arg) && !has_residual(arg) && !activation(arg)) stage<true>(arg, sum, image, channel, pixel, own);
      else stage<false>(arg, sum, image, channel, pixel, own);
    };
    store_through_room<results - 1>(consumer, fill, [&] {
      for (int i = 0; i < BLOCKS; ++i)
        if (pixel + 64 * i < (int)arg.plane && channel < (int)arg.rows) store_box(map_y, shared_address(own + i * BLOCK), pixel + 64 * i, channel, image, 0);
    });
  }

  // Leaves finished sums in shared memory. A warp's lanes use all banks: eight rows, whose chunks of 16 bytes are swizzled. `plain`: without an epilogue.
  template <bool plain, class Arguments>
  DEVICE void stage(const Arguments& arg, const float (&sum)[pixels / 2], int image, int channel, int pixel, uint8_t* to) const {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + 8 * half, k = min(channel + own, (int)arg.rows - 1);
      Finish<false> finish;
      if (!plain) finish.of = ScaleAndBias(arg, scale, bias, k);
      const data_t* const added = residual + (image * arg.rows + k) * arg.plane;
#pragma unroll
      for (int i = 0; i < pixels / 8; i += 2) {
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const int at = pixel + 8 * (i + e / 2) + column;
          uint32_t pair = 0;
          if (!plain && has_residual(arg) && at < (int)arg.plane) pair = *(const uint32_t*)(added + at);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float one = sum[4 * (i + e / 2) + 2 * half + j];
            if (plain) v[e + j] = one;
            else v[e + j] = has_residual(arg) ? finish.whole(arg, one, 1, to_float(((const data_t*)&pair)[j])) : finish.shifted(arg, one, 1);
          }
        }
        if (!plain) activate(arg, v);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int eight = (i + e) % 8, block = (i + e) / 8;
          *(uint32_t*)(to + block * BLOCK + own * 128 + (eight ^ own % 8) * 16 + column * 2) = word_of<data_t>(v[2 * e], v[2 * e + 1]);
        }
      }
    }
  }
};
