// wgrad_regions.cuh: how hopper/wgrad.cu loads an image with a border of its own pixels: region by region.
//
// The first region is all positions, with zeros around x. Then single rows and columns of dy at its sides come once more: their taps that meet places outside
// have the offsets of the pixels that stand there, and the others load zeros. In these regions dy is loaded as x is. Each region has maps of its own.
#pragma once

// A region of positions. Its maps see its own part of dy, and of x what its taps may meet.
struct WgradRegion : LoadedPixels {
  long long end;                                // stages up to its last one
  long long offsets_d, offsets_h, offsets_w;    // of each tap in x: bytes
};

struct Regions {
  WgradRegion of[BORDERED];
};

// A tap's number along each axis.
struct Tap {
  int s, r, t;
  DEVICE void find(const WgradNhwcArguments&, int along_w, int along_h, int along_d) { s = along_w, r = along_h, t = along_d; }
};

// The number of a position's pixel along each axis of its region.
struct InRegion {
  int image, w, h, d;
  DEVICE InRegion(const WgradRegion& region, int position) {
    const Divided plane(position, region.load_plane, region.by_load_plane), slice(plane.rest, region.load_pq, region.by_load_pq);
    const Divided row(slice.rest, region.load_q, region.by_load_q);
    image = plane.quotient, w = row.rest, h = row.quotient, d = slice.quotient;
  }
};

// Which region a step is in; steps come in their order.
struct Loads {
  const Maps& maps;
  const WgradNhwcArguments& arg;
  const Regions& regions;
  const int spatial_dims = (int)arg.spatial_dims;
  int number = 0, begin = 0, end = (int)regions.of[0].end;  // of the region; its stages are [begin, end)
  DEVICE const WgradRegion& region_of(int step) {
    while (step >= end) {
      begin = end;
      end = (int)regions.of[++number].end;
    }
    return regions.of[number];
  }
};

// The loads of a stage: BLOCK_K positions of CHANNELS channels.
struct StageLoads {
  const Loads& of;
  const WgradRegion& region;
  const int step;
  const InRegion pixel;
  const LoadBase base;
  DEVICE StageLoads(Loads& of, int step)
      : of(of), region(of.region_of(step)), step(step), pixel(region, (step - of.begin) * BLOCK_K), base(region, (step - of.begin) * BLOCK_K) {}
  // These load a block of channels, if it is `there`.
  DEVICE void load_dy(bool there, uint32_t to, uint32_t arrived, int channel) const {
    if (there && of.number == 0)
      load_box(to, of.maps.dy, arrived, channel, step * BLOCK_K, 0);
    else if (there)
      load_im2col(of.spatial_dims, to, of.maps.dy + of.number, arrived, channel, pixel, 0, 0, 0);
  }
  // A tap's byte of a region's offsets.
  DEVICE static int offset(long long offsets, int tap) { return (int)(offsets >> 8 * tap) & 255; }
  DEVICE void load_x(bool there, uint32_t to, uint32_t arrived, int channel, const Tap& tap) const {
    if (there)
      load_im2col(of.spatial_dims, to, of.maps.x + of.number, arrived, channel, base, offset(region.offsets_w, tap.s), offset(region.offsets_h, tap.r),
                  offset(region.offsets_d, tap.t));
  }
};
