// grouped.cuh: what the kernels of channels-last grouped convolutions share: units of channels, windows of images.
#pragma once
#include "mma/async_copy.cuh"
#include "mma/fragments.cuh"

// A unit: up to 16 neighbouring channels of y, from `first` to `end`, of whole groups or of a part of one; `from` is the first channel of x that these
// groups read, rounded down to a multiple of `aligned`. `shape` has the members unit_groups, units_group, groups, read and written.
struct ChannelUnit {
  int first, end, from;
  template <class Shape> DEVICE ChannelUnit(const Shape& shape, int number, int aligned) {
    const Divided of(number, shape.units_group, shape.by_units_group);
    const int group = of.quotient * (int)shape.unit_groups;
    first = group * (int)shape.written + of.rest * 16;
    end = min(first + 16, min(group + (int)shape.unit_groups, (int)shape.groups) * (int)shape.written);
    from = group * (int)shape.read / aligned * aligned;
  }
};

// A part of an array that is loaded into shared memory, [image][row][column][channels]: zeros outside the images and past the last channel.
struct Window {
  int rows, height, width;     // rows of all images, and of one image; pixels of a row
  int chunks, pitch;           // 16 bytes of a pixel's channels; bytes from one pixel to the next in shared memory
  divider_t by_height, by_chunks;
  int n, h, w, pixel;          // the array: images, rows, columns, and chunks of 16 bytes of a pixel

  // Loads from `x`, from image `image`, row `h0`, column `w0` and chunk `c0` on. A warp takes rows; a thread takes one chunk of every together-th pixel.
  template <int warps> DEVICE void load(const uint4* x, int image, int h0, int w0, int c0, uint32_t to) const {
    const Divided of(threadIdx.x % 32, chunks, by_chunks);
    const int together = divided(32, by_chunks), c = c0 + of.rest;
    for (int row = threadIdx.x / 32; row < rows; row += warps) {
      const Divided at_row(row, height, by_height);
      const int i = image + at_row.quotient, y = h0 + at_row.rest;
      const bool there = c < pixel && i < n && (unsigned)y < (unsigned)h;
      const uint4* const from = x + (long long)((i * h + y) * w) * pixel + c;
      uint32_t at = to + (row * width + of.quotient) * pitch + of.rest * 16;
#pragma unroll 2
      for (int column = of.quotient; column < width; column += together, at += together * pitch) {
        if (of.quotient == together) break;  // left-over lanes
        const bool inside = there && (unsigned)(w0 + column) < (unsigned)w;
        copy_or_zero_by_lines(at, inside ? from + (long long)(w0 + column) * pixel : x, inside);
      }
    }
  }
};
