// pixel_store.cuh: from the sums of a tile of pixels x channels to channels-last y, for hopper/pixel_tiles.cuh, and the moments of what is stored.
#pragma once

// Where sums go, and what finishes them; `moments` is null if they are not asked for.
struct Result {
  const data_t *scale, *bias, *residual;
  data_t* y;
  float* moments;
  DEVICE Result further(long long apart) const { return {scale, bias, residual + apart, y + apart, moments}; }
};

// The pixel of y that pixel `pixel` of the phase is; -1 past the end.
DEVICE int place_of(const Phase& shape, int pixel) {
  if (pixel >= (int)shape.pixels) return -1;
#ifdef BOXES
  if (boxed(shape)) return InBox(shape, pixel).place(shape);
#endif
  const Divided of_image(pixel, shape.plane, shape.by_plane);
  return of_image.quotient * (int)shape.out_size + plane_offset<false>(shape, of_image.rest);
}

// How channels of y are written. SINGLE: one at a time. VEC_4: four neighbours at once. RUN: if all channels of a pixel are in one chunk and pixels
// are contiguous, neighbours of a warp's whole run of pixels. BYTES_16: 16 bytes at once, from the registers of the sums.
enum StoreMode { SINGLE, VEC_4, RUN, BYTES_16 };
// Stores four neighbouring channels of y.
struct Vec4 {
  int first, count;  // channels that exist
  Finish<false> finish[4];
  DEVICE Vec4(const Phase& shape, int channel, const Result& to) : first(channel), count(min((int)shape.rows - channel, 4)) {
#pragma unroll
    for (int e = 0; e < 4; ++e) finish[e].of = ScaleAndBias(shape, to.scale, to.bias, min(first + e, (int)shape.rows - 1));
  }
  DEVICE void store(const Phase& shape, int place, const float (&sum)[4], const Result& to) const {
    typedef Vec<data_t, 4> Vector;
    const bool there = place >= 0 && count > 0, wide = (int)shape.store_mode % 2 == 1;  // VEC_4 or BYTES_16; no branch, so that several stores are issued at once
    const long long at = place * shape.rows + first;
    const bool added_to = MAY_ADD && has_residual(shape);
    Vector added = {}, out;
    float v[4];
    if (added_to && wide && there) added = *(const Vector*)(to.residual + at);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (added_to && !wide && there && e < count) added.v[e] = to.residual[at + e];
      v[e] = finish[e].whole(shape, sum[e], 1, added_to ? to_float(added.v[e]) : -0.f);
    }
    activate(shape, v);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      out.v[e] = from_float<data_t>(v[e]);
      if (!wide && there && e < count) to.y[at + e] = out.v[e];
    }
    if (wide && there) store_word(to.y + at, *(const word<Vector>*)&out);
  }
};

// Stores a warp's staging tile to a run of y, from pixel `pixel` on: a lane takes two neighbours at a time, whichever pixels they belong to.
DEVICE void store_run(const float* staging, const Phase& shape, int pixel, const Result& to) {
  const int count = min(16, (int)shape.pixels - pixel) * (int)shape.rows;
  const long long first = (long long)pixel * shape.rows;  // 16 pixels begin at a multiple of 32 bytes
  const bool added_to = MAY_ADD && has_residual(shape);
  for (int i = threadIdx.x % 32 * 2; i < count; i += 64) {
    float v[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Divided of_pixel(min(i + e, count - 1), shape.rows, shape.by_rows);
      Finish<false> finish;
      finish.of = ScaleAndBias(shape, to.scale, to.bias, of_pixel.rest);
      const float added = added_to && i + e < count ? to_float(to.residual[first + i + e]) : -0.f;
      v[e] = finish.whole(shape, staging[of_pixel.quotient * PITCH + of_pixel.rest], 1, added);
    }
    activate(shape, v);
    if (i + 1 < count) store_rounded(to.y + first + i, v);
    else to.y[first + i] = from_float<data_t>(v[0]);
  }
}

#if EMIT_MOMENTS
#define IF_MOMENTS(...) __VA_ARGS__  // code that stands only in texts that can emit moments
// Notes the moments of a chunk, where store_runs() does not: a lane has channel `channel` of its warp's 16 pixels, and one of the consumer's warps combines those of all four.
// `staged_moments` is [warp][mean, squares][channel], and another one for each second chunk, so that one barrier a chunk is enough.
DEVICE void emit_moments(const float* staging, const Phase& shape, const Tile& of, int chunk, int channel, float* staged_moments, const Result& result) {
  const int consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, pixel = of.pixel + 64 * consumer;
  const bool real = channel < (int)shape.rows;
  Finish<false> finish;
  finish.of = ScaleAndBias(shape, result.scale, result.bias, real ? channel : 0);
  auto count_of = [&](int number) { return max(min((int)shape.pixels - pixel - 16 * number, 16), 0); };
  auto value = [&](int row) { return to_float(from_float<data_t>(finish.shifted(shape, staging[row * PITCH + lane], 1))); };  // as it is stored
  const float first = value(0);
  Deviations own;
  const int count = count_of(warp);
#pragma unroll 4
  for (int row = 0; row < count; ++row) own.add(value(row) - first);
  staged_moments[warp * 2 * CHUNK + lane] = own.mean(first, max(count, 1));
  staged_moments[(warp * 2 + 1) * CHUNK + lane] = own.off_mean(max(count, 1));
  named_barrier(1 + consumer, 128);
  if (warp != chunk % 4 || count_of(0) == 0 || !real) return;
  float mean = staged_moments[lane], squares = staged_moments[CHUNK + lane];
#pragma unroll
  for (int other = 1; other < 4; ++other) {
    const int before = count_of(0) == 16 ? 16 * other : count_of(0), more = count_of(other);
    if (more == 0) continue;
    const float off = staged_moments[other * 2 * CHUNK + lane] - mean, share = (float)more / (before + more);
    mean = fmaf(off, share, mean);
    squares += fmaf(off * off, before * share, staged_moments[(other * 2 + 1) * CHUNK + lane]);
  }
  float* const to = result.moments + (long long)(pixel / 64) * 2 * shape.rows + channel;
  to[0] = mean;
  to[shape.rows] = squares;
}
#else
#define IF_MOMENTS(...)
#endif

// Exchanges words of two lanes whose numbers differ in the bit `beside`: the lower lane then has both lanes' a, the upper one both lanes' b.
DEVICE void swap_words(uint32_t& a, uint32_t& b, int beside) {
  const bool upper = threadIdx.x & beside;
  const uint32_t got = __shfl_xor_sync(~0u, upper ? a : b, beside);
  a = upper ? got : a;
  b = upper ? b : got;
}

// A row of sums as wgmma leaves it to four lanes, exchanged between them into runs of 16 bytes; turn() is its own inverse.
constexpr int EIGHTS = 8 / (int)sizeof(data_t);  // groups of 8 columns in a run; a lane has two neighbours of each
struct alignas(16) Run {
  uint32_t words[4];
  DEVICE void turn() {
    if (EIGHTS == 4) {
      swap_words(words[0], words[1], 1);
      swap_words(words[2], words[3], 1);
      swap_words(words[0], words[2], 2);
      swap_words(words[1], words[3], 2);
    } else {
      swap_words(words[0], words[2], 1);
      swap_words(words[1], words[3], 1);
    }
  }
  // the first channel of this lane's run, counted from that of the four lanes
  static DEVICE int channel() { return threadIdx.x % 4 * 8 - (EIGHTS == 2 ? threadIdx.x % 4 / 2 * 12 : 0); }
};

// Where the runs of a lane lie, in rows of its warp's lower and upper half: their pixels' first runs.
struct RunPlaces {
  int first;  // channel
  long long at[2];
  bool there[2];
  DEVICE RunPlaces(const Phase& shape, const Tile& of) : first(of.channel + Run::channel()) {
    const int own = place_of(shape, of.pixel + threadIdx.x / 32 * 16 + threadIdx.x % 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = __shfl_sync(~0u, own, threadIdx.x % 32 / 4 + 8 * half);
      there[half] = place >= 0;
      at[half] = place * shape.rows + first;
    }
  }
  // whether the group of columns that begins at `base` has channels of this lane
  DEVICE bool real(const Phase& shape, int base) const { return first + base < (int)shape.rows; }
  DEVICE void load(Run (&to)[2], const Phase& shape, const data_t* from, int base) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) to[half] = there[half] && real(shape, base) ? *(const Run*)(from + at[half] + base) : Run();
  }
};

// A residual's groups of columns that are loaded before the products: each load takes as long as memory does, and the loads of a group must not wait
// for the stores of the one before, which may go to the same array. Only texts that know that there is a residual have the registers.
constexpr int GROUP = 8 * EIGHTS, GROUPS = BLOCK_N / GROUP;
#if defined(LAYER) && CLUSTER == 1
constexpr int EARLY = !MAY_ADD || !HAS_RESIDUAL ? 0 : BLOCK_N > 160 ? 1 : GROUPS < 4 ? GROUPS : 4;
#else
constexpr int EARLY = 0;
#endif
struct Early {
  Run of[EARLY ? EARLY : 1][2];
  DEVICE void load(const Phase& shape, const Tile& of_tile, const data_t* residual) {
    if (!EARLY || (int)shape.store_mode != BYTES_16) return;
    const RunPlaces places(shape, of_tile);
#pragma unroll
    for (int i = 0; i < EARLY; ++i) places.load(of[i], shape, residual, i * GROUP);
  }
};

// The sum of values, and that of their squared deviations from the mean.
struct Spread {
  float sum, squares;
  // of two sets of `each` values together
  template <int each> static DEVICE Spread of(const Spread& a, const Spread& b) {
    const float apart = a.sum - b.sum;
    return {a.sum + b.sum, fmaf(apart * (0.5f / each), apart, a.squares + b.squares)};
  }
};
// Two lanes whose numbers differ in the bit `beside` combine `count` channels, of `each` values in a lane. The lower one keeps the first half of them.
template <int count, int each, int beside> DEVICE void combine_lanes(Spread* own) {
  const bool upper = threadIdx.x & beside;
#pragma unroll
  for (int i = 0; i < (count + 1) / 2; ++i) {
    const Spread kept = upper ? own[i + count / 2] : own[i], given = upper ? own[i] : own[i + count / 2];
    own[i] = Spread::of<each>(kept, {__shfl_xor_sync(~0u, given.sum, beside), __shfl_xor_sync(~0u, given.squares, beside)});
  }
}
// Of a warp's 16 pixels of a group of columns, rows that have not been turned yet, each lane finds the spread of one channel.
DEVICE void note_spreads(const Run (&rows)[2], Spread* spreads) {
  constexpr int OWN = 2 * EIGHTS;
  Spread own[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i)
    own[i] = Spread::of<1>({to_float(((const data_t*)rows[0].words)[i]), 0}, {to_float(((const data_t*)rows[1].words)[i]), 0});
  combine_lanes<OWN, 2, 16>(own);
  combine_lanes<OWN / 2, 4, 8>(own);
  combine_lanes<OWN / 4, 8, 4>(own);
  const int lane = threadIdx.x % 32;
  spreads[lane % 4 * 2 + (EIGHTS == 4 ? lane / 8 * 8 + lane / 4 % 2 : lane / 16 * 8 + lane / 8 % 2)] = own[0];
}
// Writes the moments of a slice all of whose pixels exist. Each warp has noted its pixels' spreads in its staging tile.
DEVICE void emit_spreads(const float* staging, const Phase& shape, const Tile& of, const Result& to) {
  const int consumer = threadIdx.x / 128;
  named_barrier(1 + consumer, 128);
  for (int column = threadIdx.x % 128; column < min(BLOCK_N, (int)shape.rows - of.channel); column += 128) {
    auto noted = [&](int warp) { return ((const Spread*)(staging + (warp - (int)threadIdx.x / 32 % 4) * (16 * PITCH)))[column]; };
    const Spread all = Spread::of<32>(Spread::of<16>(noted(0), noted(1)), Spread::of<16>(noted(2), noted(3)));
    float* const at = to.moments + (long long)(of.pixel / 64 + consumer) * 2 * shape.rows + of.channel + column;
    at[0] = all.sum / 64;
    at[shape.rows] = all.squares;
  }
  named_barrier(1 + consumer, 128);  // the staging tiles may be written again
}

// Stores a consumer's sums of a tile from registers, where 16 bytes of y belong to one pixel. `plain`: without an epilogue. `of_channels` has
// scale and bias of two neighbouring channels in each element, from the tile's first on. `early` has the residual's first groups. `spreads`: what is
// stored leaves its spreads there, for emit_spreads().
template <bool plain>
DEVICE void store_runs(const float (&sum)[BLOCK_N / 2], const Phase& shape, const Tile& of, const float4* of_channels, [[maybe_unused]] Early& early,
                       [[maybe_unused]] Spread* spreads, const Result& to) {
  constexpr int AT_ONCE = BLOCK_N > 192 ? 2 : 2 * EIGHTS;  // as many as registers hold
  static_assert(BLOCK_N % GROUP == 0, "runs of 16 bytes");
  const bool added_to = !plain && MAY_ADD && has_residual(shape);
  const RunPlaces places(shape, of);
  for_all<GROUPS>([&](auto group) {
    constexpr int base = decltype(group)::value * GROUP;
    Run added[2] = {}, out[2];
    if (added_to) {
      if constexpr (EARLY > 0) {
        Run(&waiting)[2] = early.of[decltype(group)::value % EARLY];
        added[0] = waiting[0];
        added[1] = waiting[1];
        if (base + EARLY * GROUP < BLOCK_N) places.load(waiting, shape, to.residual, base + EARLY * GROUP);
      } else {
        places.load(added, shape, to.residual, base);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) added[half].turn();
    }
    for_all<2 * EIGHTS / AT_ONCE>([&](auto part) {
      constexpr int from = decltype(part)::value * AT_ONCE;
      Finish<false> finish[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i += 2) {
        const float4 two = plain ? make_float4(1, -0.f, 1, -0.f) : of_channels[(base + (from + i) / 2 * 8) / 2 + threadIdx.x % 4];
        finish[i].of = ScaleAndBias(two.x, two.y);
        finish[i + 1].of = ScaleAndBias(two.z, two.w);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const float one = sum[(base / 8 + (from + i) / 2) * 4 + 2 * half + i % 2];
          if (plain) v[i] = one;
          else v[i] = added_to ? finish[i].whole(shape, one, 1, to_float(((const data_t*)added[half].words)[from + i])) : finish[i].shifted(shape, one, 1);
        }
        if (!plain) activate(shape, v);
#if TYPE == 32
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) out[half].words[from + i] = __float_as_uint(v[i]);
#else
#pragma unroll
        for (int i = 0; i < AT_ONCE; i += 2) out[half].words[(from + i) / 2] = word_of<data_t>(v[i], v[i + 1]);
#endif
      }
    });
    if (EMIT_MOMENTS && plain && spreads) note_spreads(out, spreads + base);
#pragma unroll
    for (int half = 0; half < 2; ++half) out[half].turn();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (places.there[half] && places.real(shape, base)) store_word(to.y + places.at[half] + base, *(const uint4*)out[half].words);
  });
}

// Whether sums are stored as they are.
DEVICE bool stores_plainly(const Phase& shape) {
  return !has_scale(shape) && !has_bias(shape) && !(MAY_ADD && has_residual(shape)) && !activation(shape);
}

// Leaves scale and bias of a tile's channels in a warp's staging tile, where store_runs() reads them. `staged` is the first of the channels whose
// numbers lie there.
DEVICE void stage_finish(float* staging, int& staged, const Phase& shape, const Tile& of, const Result& to) {
  static_assert(BLOCK_N / 2 * 4 <= 16 * PITCH, "they fit a staging tile");
  if (staged == of.channel || (int)shape.store_mode != BYTES_16 || stores_plainly(shape)) return;
  staged = of.channel;
  __syncwarp();  // what lies there has been read
#pragma unroll
  for (int i = threadIdx.x % 32; i < BLOCK_N / 2; i += 32) {
    const int channel = min(of.channel + 2 * i, (int)shape.rows - 2);  // 16 bytes of channels, so their number is even
    const ScaleAndBias one(shape, to.scale, to.bias, channel), next(shape, to.scale, to.bias, channel + 1);
    ((float4*)staging)[i] = make_float4(one.scale, one.bias, next.scale, next.bias);
  }
  __syncwarp();
}

// Stores a consumer's sums of a tile, through its warps' staging tiles or from registers. After stage_finish(), whose numbers are gone if moments are
// emitted, and Early::load().
DEVICE void store_sums(const float (&sum)[BLOCK_N / 2], const Phase& shape, const Tile& of, float* staging, [[maybe_unused]] int& staged,
                       Early& early, [[maybe_unused]] float* staged_moments, const Result& to) {
  const bool as_runs = (int)shape.store_mode == BYTES_16;
  if (as_runs) {
    const bool plain = stores_plainly(shape), notes = plain && to.moments && of.pixel + (int)threadIdx.x / 128 * 64 + 64 <= (int)shape.pixels;
    if (plain) store_runs<true>(sum, shape, of, nullptr, early, notes ? (Spread*)staging : nullptr, to);
    else store_runs<false>(sum, shape, of, (const float4*)staging, early, nullptr, to);
    if (!EMIT_MOMENTS || !to.moments) return;
    if (notes) return emit_spreads(staging, shape, of, to);
    staged = -1;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own = place_of(shape, of.pixel + 16 * warp + lane % 16);
  for_all<BLOCK_N / CHUNK>([&](auto chunk) {
    constexpr int base = decltype(chunk)::value * CHUNK;
    __syncwarp();  // the last chunk has been read
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * (base / 8 + i) + 2 * half;
        *(float2*)(staging + (lane / 4 + 8 * half) * PITCH + 8 * i + 2 * (lane % 4)) = make_float2(sum[at], sum[at + 1]);
      }
    __syncwarp();
    if (BLOCK_N == CHUNK && (int)shape.store_mode == RUN) {
      store_run(staging, shape, of.pixel + 16 * warp, to);
    } else if (!as_runs) {
      const Vec4 four(shape, of.channel + base + 4 * (lane % 8), to);
      constexpr int BATCH = BLOCK_N > 160 ? 1 : 4;  // fours of rows that are read before the first of them is written, as registers allow
#pragma unroll(BATCH == 1 ? 1 : 4)
      for (int down = 0; down < 16; down += 4 * BATCH) {
        float4 v[BATCH];
        int place[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          const int row = down + 4 * i + lane / 8;
          v[i] = *(const float4*)(staging + row * PITCH + 4 * (lane % 8));
          place[i] = __shfl_sync(~0u, own, row);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) four.store(shape, place[i], {v[i].x, v[i].y, v[i].z, v[i].w}, to);
      }
    }
    IF_MOMENTS(if (to.moments) emit_moments(staging, shape, of, base / CHUNK, of.channel + base + lane, staged_moments + base / CHUNK % 2 * 8 * CHUNK, to);)
  });
}

#if CLUSTER > 1
// Adds this block's rows of the tile, once all blocks have left their sums.
DEVICE void add_parts(const Phase& shape, const Tile& of, uint32_t sums, const Result& to) {
  constexpr int ROWS = BLOCK_M / CLUSTER, ACROSS = BLOCK_N / 4;
  for (int i = threadIdx.x; i < ROWS * ACROSS; i += CONSUMER_THREADS) {
    const int row = cluster_rank() * ROWS + i / ACROSS, column = i % ACROSS * 4;
    const Vec4 four(shape, of.channel + column, to);
    const float4 v = add_of_ranks(sums + (row * SUMS_PITCH + column) * 4);
    four.store(shape, place_of(shape, of.pixel + row), {v.x, v.y, v.z, v.w}, to);
  }
}
#endif
