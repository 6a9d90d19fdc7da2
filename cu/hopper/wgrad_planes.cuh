// wgrad_planes.cuh: how hopper/wgrad.cu loads NCHW arrays, for 1x1 filters without stride: a row of a stage is BLOCK_K pixels of a channel of an image.
#pragma once

struct Tap {
  DEVICE void find(const WgradNhwcArguments&, int, int, int) {}
};

struct Loads {
  const Maps& maps;
  const WgradNhwcArguments& arg;
};

// The loads of a stage, which lies in one image; zeros fill up an image's last stage.
struct StageLoads {
  const Loads& of;
  int image, pixel;
  DEVICE StageLoads(const Loads& of, int step) : of(of) {
    const Divided of_image(step, of.arg.image_stages, of.arg.by_image_stages);
    image = of_image.quotient;
    pixel = of_image.rest * BLOCK_K;
  }
  // These load a block of channels, if it is `there`.
  DEVICE void load_dy(bool there, uint32_t to, uint32_t arrived, int channel) const {
    if (there) load_box(to, of.maps.dy, arrived, pixel, channel, image);
  }
  DEVICE void load_x(bool there, uint32_t to, uint32_t arrived, int channel, const Tap&) const {
    if (there) load_box(to, of.maps.x, arrived, pixel, channel, image);
  }
};
