// repeats.cuh: repeats of a stride phase of dgrad: phases that read the same pixels of x, each with the next tap for the next pixel of y. A filter that
// is as large as its stride has no other phases. A launch is told of the first phase, and how far its repeats are apart.
#pragma once
#include "core/packed.cuh"

struct Repeats {
  long long phases, by_phases, turns, by_turns;      // phases that take turns, tile by tile; the same with their repeats
  long long along_r, by_along_r, along_s, by_along_s;  // repeats along r and s
  long long tap_t, tap_r, tap_s;                     // taps of the packed filter from one repeat to the next along t, r and s;
  long long y_t, y_r, y_s, w_t, w_r, w_s;            // elements of y from one to the next, and elements of w
};

DEVICE long long apart(const Repeats& of, int repeat, long long t, long long r, long long s) {
  const Divided row(repeat, of.along_s, of.by_along_s), slice(row.quotient, of.along_r, of.by_along_r);
  return slice.quotient * t + slice.rest * r + row.rest * s;
}
DEVICE int taps_apart(const Repeats& of, int repeat) { return (int)apart(of, repeat, of.tap_t, of.tap_r, of.tap_s); }
DEVICE long long y_apart(const Repeats& of, int repeat) { return apart(of, repeat, of.y_t, of.y_r, of.y_s); }
DEVICE long long w_apart(const Repeats& of, int repeat) { return apart(of, repeat, of.w_t, of.w_r, of.w_s); }
