// packed_tiles.cuh: what the blocks that pack an image tell those that settle its scale, in the same launch.
//
// A tile has two words. The workspace is not cleared first, so a word counts only if its upper bits are a mark: 16 bits that make it a NaN that no
// arithmetic yields, as floats of 32 or of 16 bits, and the launch's number. So a launch ignores what a call that was aborted has left. In a graph the
// launch's number may repeat, so the launch behind, which multiplies, clears the words; if one block settles an image, that block clears them.
//
// A block that waits must have a higher number than the blocks it waits for: blocks start in the order of their numbers, so those have started before.
// CUB's scans rely on the same order.
// CUB's scans have it too.
#pragma once
#include "core/limbs.cuh"

struct alignas(16) PackedTile {
  unsigned long long extremes, stored;
};
constexpr unsigned long long MARK = 0xfff5d3a96b2e91c7, NUMBERED = (1ull << 48) - 1, TILE_BITS = (1 << 26) - 1;

// The mark of this launch's words: their upper 38 bits.
DEVICE unsigned long long launch_mark() {
  unsigned long long number;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
  return MARK ^ (number << 26 & NUMBERED) ^ (number >> 22 & TILE_BITS);
}

// A tile's word: the extremes as 9 bits each, of which only the exponents count, and the guessed scale's exponent in 8 bits.
DEVICE unsigned long long tile_word(const MagnitudeRange& of, int guess) {
  const unsigned largest = of.largest && of.largest < 1 << 22 ? 1 : of.largest >> 22, smallest = max((min(of.smallest, 0x7ffffffeu) + 1) >> 22, 1u);
  return (launch_mark() & ~TILE_BITS) | (unsigned)(guess + 128) << 18 | largest << 9 | smallest;
}
DEVICE MagnitudeRange extremes_of(unsigned word) { return {(word >> 9 & 0x1ff) << 22, ((word & 0x1ff) << 22) - 1}; }
DEVICE int guess_of(unsigned word) { return (int)(word >> 18 & 0xff) - 128; }

// Waits until the word's other bits are the mark, and returns `bits` of it.
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
// Called by one thread, behind a barrier of the block.
DEVICE void tell(PackedTile* tile, const MagnitudeRange& extremes, int guess) {
  *(volatile unsigned long long*)&tile->extremes = tile_word(extremes, guess);
  __threadfence();
  *(volatile unsigned long long*)&tile->stored = launch_mark();
}
