// wgrad_positions.cuh: how hopper/wgrad.cu loads channels-last arrays: dy by boxes of neighbouring positions, x as the pixels that these meet by a tap.
//
// x comes by TMA's im2col mode: as many consecutive positions, shifted by a tap, across rows and images. Padding, and what lies behind the last position
// of either array, arrives as zeros.
#pragma once

// A tap's offsets in x, packed as the loads take them: along w in 16 bits, h in 8, d in 8.
struct Tap {
  uint32_t offsets;
  DEVICE void find(const WgradNhwcArguments& arg, int s, int r, int t) {
    offsets = s * (int)arg.dilation_w | r * (int)arg.dilation_h << 16 | t * (int)arg.dilation_d << 24;
  }
};

struct Loads {
  const Maps& maps;
  const WgradNhwcArguments& arg;
  const int spatial_dims = (int)arg.spatial_dims;
};

// The loads of a stage: BLOCK_K positions of CHANNELS channels.
struct StageLoads {
  const Loads& of;
  const int position;
  const LoadBase base;
  DEVICE StageLoads(const Loads& of, int step) : of(of), position(step * BLOCK_K), base(of.arg, position) {}
  // These load a block of channels, if it is `there`.
  DEVICE void load_dy(bool there, uint32_t to, uint32_t arrived, int channel) const {
    if (there) load_box(to, of.maps.dy, arrived, channel, position, 0);
  }
  DEVICE void load_x(bool there, uint32_t to, uint32_t arrived, int channel, const Tap& tap) const {
    if (there && of.spatial_dims == 0)
      load_box(to, of.maps.x, arrived, channel, position, 0);
    else if (there)
      load_im2col(of.spatial_dims, to, of.maps.x, arrived, channel, base, tap.offsets & 0xffff, tap.offsets >> 16 & 0xff, tap.offsets >> 24);
  }
};
