// packed_tiles.cuh: what the blocks that pack an image tell those that settle its scale, in the same launch.
//
// A tile has two words. Workspace comes as it is, so a word says something only if its upper bits are a mark: 16 that make it a NaN that no arithmetic
// makes, as floats of 32 or of 16 bits, and the launch's number. So a launch takes no notice of what a call that was broken off has left. In a graph
// that number may stay what it is, so the launch behind, which multiplies, clears the words; where one block settles an image, it does so itself.
//
// Who waits has to have a higher block number than those it waits for: blocks come to the multiprocessors in their order, so these have come before, as
// CUB's scans have it too.
#pragma once
#include "limbs.cuh"

struct alignas(16) PackedTile {
  unsigned long long extremes, stored;
};
constexpr unsigned long long MARK = 0xfff5d3a96b2e91c7, NUMBERED = (1ull << 48) - 1, TILE_BITS = (1 << 26) - 1;

// The mark of this launch's words: its upper 38 bits, where the lower ones say something.
DEVICE unsigned long long launch_mark() {
  unsigned long long number;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
  return MARK ^ (number << 26 & NUMBERED) ^ (number >> 22 & TILE_BITS);
}

// Exponents are all that counts of extremes: 9 bits of each. What the scale was guessed to be, 8 bits, stands beside them.
DEVICE unsigned long long tile_word(const MagnitudeRange& of, int guess) {
  const unsigned largest = of.largest && of.largest < 1 << 22 ? 1 : of.largest >> 22, smallest = max((min(of.smallest, 0x7ffffffeu) + 1) >> 22, 1u);
  return (launch_mark() & ~TILE_BITS) | (unsigned)(guess + 128) << 18 | largest << 9 | smallest;
}
DEVICE MagnitudeRange extremes_of(unsigned word) { return {(word >> 9 & 0x1ff) << 22, ((word & 0x1ff) << 22) - 1}; }
DEVICE int guess_of(unsigned word) { return (int)(word >> 18 & 0xff) - 128; }

// What a word says in these bits, when the others are the mark.
DEVICE unsigned awaited(const unsigned long long* word, unsigned long long bits) {
  const unsigned long long mark = launch_mark() & ~bits;
  for (;;) {
    unsigned long long found;
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(found) : "l"(word) : "memory");
    if ((found & ~bits) == mark) return (unsigned)(found & bits);
    __nanosleep(20);
  }
}
DEVICE unsigned word_when_packed(const PackedTile* tile) { return awaited(&tile->extremes, TILE_BITS); }
DEVICE void wait_until_stored(const PackedTile* tile) { awaited(&tile->stored, 0); }

DEVICE void clear_when_stored(PackedTile* tile) {
  wait_until_stored(tile);
  *(uint4*)tile = make_uint4(0, 0, 0, 0);
}
// By one thread, behind a barrier of the block.
DEVICE void tell(PackedTile* tile, const MagnitudeRange& extremes, int guess) {
  *(volatile unsigned long long*)&tile->extremes = tile_word(extremes, guess);
  __threadfence();
  *(volatile unsigned long long*)&tile->stored = launch_mark();
}
