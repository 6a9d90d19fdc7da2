// shapes.cuh: arguments that several kernels take. by_n is the divisor n, prepared (division.cuh). A kernel's struct of arguments derives from those it needs;
// they come first, in that order, then its own.
#pragma once

// Where the loads of an output pixel begin: the pixels of an image, a slice and a row, as the loads count them; x of pixel (o, p, q), tap 0, is
// o * stride_d + low_d and so on.
struct LoadedPixels {
  long long load_plane, by_load_plane, load_pq, by_load_pq, load_q, by_load_q;
  long long stride_d, stride_h, stride_w, low_d, low_h, low_w;
};

// Where pixels of y are written: the pixels of an image, a slice and a row of the phase; those of a plane of y, the phase's first one, and from one to
// the next along each axis.
struct WrittenPixels {
  long long plane, by_plane, pq, by_pq, q, by_q;
  long long out_size, out_base, out_d, out_h, out_w;
};

// The walk over gemm k, (tap, channels): blocks of channels of a tap; taps along r and s; the number in the filter of the first tap, and steps from one
// to the next; the offset in x from one to the next.
struct WalkedTaps {
  long long channel_blocks, by_channel_blocks, tap_r, by_tap_r, tap_s, by_tap_s;
  long long tap_base, tap_step_t, tap_step_r, tap_step_s, dilation_d, dilation_h, dilation_w;
};

// What finishes a sum (finish.cuh); slope: a float's bits.
struct Finishing {
  long long has_bias, has_scale, has_residual, activation, slope;
};
