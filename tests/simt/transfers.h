// transfers.h: of machine.cpp, what moves between global and shared memory behind the threads' backs: bulk and tensor loads and stores, cp.async.
#pragma once
#include "state.h"

namespace {
// ---- transfers

template <class F> void each_16(const Transfer& t, const F& f) {
  for (const Row& row : t.rows)
    for (int at = 0; at < t.bytes; at += 16) f(swizzled(row.place + at, t.span) / 16);
}

const char* name_of(const Transfer& t) { return t.kind == Transfer::STORE ? "a bulk store" : "a load"; }

void begin(Transfer&& t) {
  if (!current->block->waited && !(current->block->early && t.kind != Transfer::STORE)) simt::fail("%s before the launch waits for the one before it", name_of(t));
  if (t.kind == Transfer::LOAD) {
    Barrier& b = barrier_of(t.block, t.barrier);
    if (!b.fenced) simt::fail("a load to mbarrier %d, whose making no fence has told the hardware of", b.number);
  }
  for (const Row& row : t.rows) {
    host_address(t.block, row.place, t.bytes);
    if (t.kind != Transfer::COPY && row.place % 16) simt::fail("%s at %u, which is no multiple of 16", name_of(t), row.place);
  }
  each_16(t, [&](u32 at) {
    if (t.kind != Transfer::COPY && t.block->unfenced[at])
      simt::fail("%s of the 16 bytes at %u, which a thread wrote without a fence for bulk copies since", name_of(t), at * 16);
    if (t.kind == Transfer::STORE) {
      if (t.block->writes[at]) simt::fail("a bulk store of the 16 bytes at %u, which a load has not brought yet", at * 16);
      ++t.block->reads[at];
      return;
    }
    if (t.block->reads[at]) simt::fail("a load to the 16 bytes at %u, which a pending product or store still reads", at * 16);
    if (t.kind == Transfer::LOAD && t.block->writes[at]) simt::fail("a load to the 16 bytes at %u, which another load has not brought yet", at * 16);
    ++t.block->writes[at];
  });
  if (t.kind != Transfer::STORE)
    for (const Row& row : t.rows)
      for (int at = 0; at < t.bytes; at += 16) {
        const int unit = std::min(t.bytes - at, 16);
        memset(host_address(t.block, swizzled(row.place + at, t.span), unit), 0xff, unit);
      }
  ++t.by->under_way[t.kind];
  transfers.push_back(std::move(t));
}

void finish(size_t which) {
  const Transfer t = std::move(transfers[which]);
  transfers[which] = std::move(transfers.back());
  transfers.pop_back();
  --t.by->under_way[t.kind];
  each_16(t, [&](u32 at) { --(t.kind == Transfer::STORE ? t.block->reads : t.block->writes)[at]; });
  const int unit = std::min(t.bytes, 16);
  for (const Row& row : t.rows)
    for (int at = 0; at < t.bytes; at += unit) {
      char* const here = host_address(t.block, swizzled(row.place + at, t.span), unit);
      const int first = std::max(row.begin - at, 0), last = std::min(row.end - at, unit);
      if (t.kind == Transfer::STORE) {
        if (first < last) memcpy(row.memory + at + first, here + first, last - first);
        continue;
      }
      memset(here, 0, unit);
      if (first < last) memcpy(here + first, row.memory + at + first, last - first);
      if (t.rounds)
        for (int i = 0; i < unit; i += 4) {
          const u32 v = to_tf32(*(const float*)(here + i));
          memcpy(here + i, &v, 4);
        }
    }
  if (t.kind == Transfer::LOAD) {
    Barrier& b = barrier_of(t.block, t.barrier);
    b.bytes -= (long)t.rows.size() * t.bytes;
    check_phase(b);
  }
}

// finishes the transfers of a kind of this thread's that belong to groups before `last`
void finish_own(int kind, int last) {
  int left = current->under_way[kind];
  for (size_t i = 0; left;) {
    const bool own = transfers[i].kind == kind && transfers[i].by == current;
    left -= own;
    if (own && transfers[i].group < last) finish(i);
    else ++i;
  }
}

const Map& map_of(u64 at) {
  if (at % 64) simt::fail("a tensor map at %#lx, which is no multiple of 64", at);
  const Map* map;
  memcpy(&map, (const void*)at, 8);
  uint64_t magic;
  memcpy(&magic, (const char*)at + 8, 8);
  if (magic != MAGIC || map->magic != MAGIC) simt::fail("there is no tensor map at %#lx", at);
  return *map;
}

Transfer transfer_of(const Map& map, decltype(Transfer::LOAD) kind, u32 to, u32 barrier) {
  Transfer t;
  t.kind = kind;
  t.block = block_of(to);
  t.by = current;
  t.group = current->stores;
  t.barrier = barrier;
  t.span = map.span;
  t.rounds = map.rounds && kind == Transfer::LOAD;
  t.bytes = (map.im2col ? map.channels : map.box[0]) * map.size;
  if (to % 128) simt::fail("a tensor %s at %u of shared memory, which is no multiple of 128", kind == Transfer::LOAD ? "load" : "store", to);
  if (t.bytes % 16 || (map.span && t.bytes != map.span)) simt::fail("rows of %d bytes in a tensor map that swizzles over %d", t.bytes, map.span);
  return t;
}

// A box of a tensor map, from `place` on.
void boxed(Transfer& t, const Map& map, const Place& place, u32 to) {
  if (map.im2col || place.count != map.rank) simt::fail("a box of %d axes, of a tensor map of %d%s", place.count, map.rank, map.im2col ? " for im2col" : "");
  if (place.at[0] * map.size % 16)
    simt::fail("a box that begins %d bytes into a row: no multiple of 16, which an H200 takes for an illegal instruction", place.at[0] * map.size);
  int rows = 1;
  for (int axis = 1; axis < map.rank; ++axis) rows *= map.box[axis];
  for (int number = 0; number < rows; ++number) {
    Row row{to + number * t.bytes, map.base + (long)place.at[0] * map.size, 0, 0};
    bool there = true;
    for (int axis = 1, rest = number; axis < map.rank; rest /= map.box[axis++]) {
      const long at = place.at[axis] + (long)(rest % map.box[axis]);
      there = there && at >= 0 && at < map.sizes[axis];
      row.memory += at * map.strides[axis];
    }
    if (there) {
      row.begin = std::max<long>(0, -(long)place.at[0]) * map.size;
      row.end = std::min<long>(map.box[0], map.sizes[0] - place.at[0]) * map.size;
    }
    t.rows.push_back(row);
  }
}

// Output pixels from a base on, by strides, through a box that the corners describe, to the next row, plane and image; each is shifted by a tap's offsets.
void walked(Transfer& t, const Map& map, const Place& place, const Place& offsets, u32 to) {
  const int axes = map.rank - 2;
  if (!map.im2col || place.count != map.rank || offsets.count != axes)
    simt::fail("im2col of %d axes and %d offsets, of a tensor map of %d%s", place.count, offsets.count, map.rank, map.im2col ? "" : " for boxes");
  long at[3];
  for (int i = 0; i < axes; ++i) {
    at[i] = place.at[1 + i];
    const int most = axes == 1 ? 65535 : axes == 2 ? 255 : 31;
    if (offsets.at[i] < 0 || offsets.at[i] > most) simt::fail("offset %d along axis %d, which must be from 0 to %d", offsets.at[i], i, most);
    if (at[i] < map.lower[i] || at[i] > map.sizes[1 + i] - 1 + map.upper[i])
      simt::fail("base pixel %ld along axis %d lies outside its box, %d to %ld", at[i], i, map.lower[i], map.sizes[1 + i] - 1 + map.upper[i]);
  }
  long image = place.at[1 + axes];
  const int c = place.at[0];
  for (int pixel = 0; pixel < map.pixels; ++pixel) {
    Row row{to + pixel * t.bytes, map.base + (long)c * map.size + image * map.strides[1 + axes], 0, 0};
    bool there = image >= 0 && image < map.sizes[1 + axes];
    for (int i = 0; i < axes; ++i) {
      const long here = at[i] + offsets.at[i];
      there = there && here >= 0 && here < map.sizes[1 + i];
      row.memory += here * map.strides[1 + i];
    }
    if (there) {
      row.begin = std::max(0, -c) * map.size;
      row.end = std::min<long>(map.channels, map.sizes[0] - c) * map.size;
    }
    t.rows.push_back(row);
    int i = 0;
    for (; i < axes; ++i) {
      at[i] += map.step[i];
      if (at[i] <= map.sizes[1 + i] - 1 + map.upper[i]) break;
      at[i] = map.lower[i];
    }
    if (i == axes) ++image;
  }
}

}  // namespace

// ---- PTX

namespace ptx {

void bulk_load(u32 to, u64 from, u32 bytes, u32 barrier) {
  perhaps_yield();
  if (to % 16 || from % 16 || bytes % 16 || !bytes) simt::fail("a bulk load of %u bytes from %#lx to %u: all must be multiples of 16", bytes, from, to);
  Transfer t{Transfer::LOAD, nullptr, current, 0, barrier, 16, 0, false, {}};
  t.block = block_of(to);
  for (u32 at = 0; at < bytes; at += 16) t.rows.push_back({to + at, (char*)from + at, 0, 16});
  begin(std::move(t));
}
void bulk_store(u64 to, u32 from, u32 bytes) {
  perhaps_yield();
  if (from % 16 || to % 16 || bytes % 16 || !bytes) simt::fail("a bulk store of %u bytes from %u to %#lx: all must be multiples of 16", bytes, from, to);
  Transfer t{Transfer::STORE, current->block, current, current->stores, 0, 16, 0, false, {}};
  for (u32 at = 0; at < bytes; at += 16) t.rows.push_back({from + at, (char*)to + at, 0, 16});
  begin(std::move(t));
}
void tensor_load(u32 to, u64 map, Place place, u32 barrier) {
  perhaps_yield();
  const Map& of = map_of(map);
  Transfer t = transfer_of(of, Transfer::LOAD, to, barrier);
  boxed(t, of, place, to % OF_RANK);
  begin(std::move(t));
  perhaps_yield();
}
void tensor_load_im2col(u32 to, u64 map, Place place, u32 barrier, Place offsets) {
  perhaps_yield();
  const Map& of = map_of(map);
  Transfer t = transfer_of(of, Transfer::LOAD, to, barrier);
  walked(t, of, place, offsets, to % OF_RANK);
  begin(std::move(t));
  perhaps_yield();
}
void tensor_store(u64 map, Place place, u32 from) {
  perhaps_yield();
  const Map& of = map_of(map);
  Transfer t = transfer_of(of, Transfer::STORE, from, 0);
  boxed(t, of, place, from);
  begin(std::move(t));
}
void bulk_commit() { ++current->stores; }
void bulk_wait(int groups, bool) { finish_own(Transfer::STORE, current->stores - groups); }
void async_fence() {
  for (const u32 at : current->wrote) {
    --current->block->unfenced[at];
    current->has_written[at] = false;
  }
  current->wrote.clear();
}
void copy(u32 to, u64 from, int size, int some) {
  if (to % size || from % size) simt::fail("a copy of %d bytes from %#lx to %u: both must be multiples of that", size, from, to);
  Transfer t{Transfer::COPY, current->block, current, current->copies, 0, size, 0, false, {{to, (char*)from, 0, some}}};
  begin(std::move(t));
}
void copy_commit() { ++current->copies; }
void copy_wait(int groups) {
  finish_own(Transfer::COPY, current->copies - groups);
  perhaps_yield();
}
void check_map(u64 map) { map_of(map); }
void dependency_wait() { waited = current->block->waited = true; }
void reads_earlier() { early = current->block->early = true; }

}  // namespace ptx
