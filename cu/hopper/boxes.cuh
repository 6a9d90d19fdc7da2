// boxes.cuh: tiles of hopper/dense.cu whose pixels are a box of columns, rows, slices and images. TMA loads a box a little faster than as many pixels of rows
// one behind the other.
#pragma once
#include "hopper/ptx.cuh"
#define BOXES  // place_of() in pixel_store.cuh knows them

DEVICE bool boxed(const Phase& shape) { return shape.box_n != 0; }
// Where a pixel of a tile that is a box lies; in an image that does not exist if it is none of the box.
struct InBox {
  int image, d, h, w;
  DEVICE InBox(const Phase& shape, int pixel) {
    const Divided row(pixel / BLOCK_M, shape.boxes_w, shape.by_boxes_w), slice(row.quotient, shape.boxes_h, shape.by_boxes_h);
    const Divided of_image(slice.quotient, shape.boxes_d, shape.by_boxes_d);
    const Divided own_row(pixel % BLOCK_M, shape.box_w, shape.by_box_w), own_slice(own_row.quotient, shape.box_h, shape.by_box_h);
    const Divided own_image(own_slice.quotient, shape.box_d, shape.by_box_d);
    w = row.rest * (int)shape.box_w + own_row.rest;
    h = slice.rest * (int)shape.box_h + own_slice.rest;
    d = of_image.rest * (int)shape.box_d + own_image.rest;
    image = own_image.quotient < (int)shape.box_n ? of_image.quotient * (int)shape.box_n + own_image.quotient : (int)shape.images;
  }
  // pixels of a box
  static DEVICE int count(const Phase& shape) { return (int)(shape.box_w * shape.box_h * shape.box_d * shape.box_n); }
  // the pixel's offset in y, in pixels; -1 if there is none
  DEVICE int place(const Phase& shape) const {
    const bool real = w < (int)shape.q && h < (int)shape.height && d < (int)shape.depth && image < (int)shape.images;
    return real ? image * (int)shape.out_size + (int)(shape.out_base + d * shape.out_d + h * shape.out_h + w * shape.out_w) : -1;
  }
  // loads the box of x that begins here, shifted by a tap
  DEVICE void load(const Phase& shape, uint32_t to, const CUtensorMap* map, uint32_t barrier, int c, int s, int r, int t) const {
    const int x = w + (int)shape.low_w + s, y = h + (int)shape.low_h + r;
    if ((int)shape.spatial_dims == 3) load_box(to, map, barrier, c, x, y, d + (int)shape.low_d + t, image);
    else load_box(to, map, barrier, c, x, y, image);
  }
};
