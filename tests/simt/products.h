// products.h: of machine.cpp, the tensor cores: wgmma, mma, the loads and stores of their matrices, and numbers of 16 bits.
#pragma once
#include "state.h"

namespace {
// An operand in shared memory, as its descriptor says; `turned`: rows along m or n instead of k. CUTLASS's canonical layouts (cute/arch/mma_sm90_desc.hpp).
struct Tile {
  u32 start, lead, stride;
  int span, size;
  bool turned;
  Tile(u64 d, int size, bool turned) : start((d & 0x3fff) << 4), lead((d >> 16 & 0x3fff) << 4), stride((d >> 32 & 0x3fff) << 4), size(size), turned(turned) {
    const int mode = d >> 62;
    span = mode == 0 ? 16 : mode == 1 ? 128 : mode == 2 ? 64 : 32;
    if (d >> 49 & 7) simt::fail("a wgmma descriptor with a base offset, which this machine does not know");
    if (turned && size != 2) simt::fail("wgmma takes operands of 16 bits alone with rows along m or n");
  }
  // of 16 neighbouring bytes: of row i from k on, or of k from row i on
  u32 address(int i, int k) const {
    const int each = 16 / size;
    u32 at = start;
    if (turned) {
      if (span == 16) at += k % 8 * 16 + i / 8 * stride + k / 8 * lead;
      else at += i % (span / 2) * 2 + i / (span / 2) * lead + k % 8 * span + k / 8 * stride;
    } else if (span == 16) {
      at += i % 8 * 16 + i / 8 * stride + k / each * lead;
    } else {
      at += i % 8 * span + i / 8 * stride + k * size;
    }
    return swizzled(at, span);
  }
  template <class F> void each_unit(int first, int rows, int ks, const F& f) const {
    const int each = 16 / size;
    if (turned) {
      for (int k = 0; k < ks; ++k)
        for (int i = first; i < first + rows; i += 8) f(i, k);
    } else {
      for (int i = first; i < first + rows; ++i)
        for (int k = 0; k < ks; k += each) f(i, k);
    }
  }
};

double number_of(const char* at, Operand type) {
  if (type == TF32) {
    u32 bits;
    memcpy(&bits, at, 4);
    return __uint_as_float(bits & 0xffffe000);
  }
  u16 bits;
  memcpy(&bits, at, 2);
  return type == F16 ? halves[bits] : from_bfloat16(bits);
}

struct Numbers {  // [k][row]
  double of[16][256];
};

void read(Block* block, const Tile& tile, Operand type, int first, int rows, int ks, Numbers& to) {
  tile.each_unit(first, rows, ks, [&](int i, int k) {
    const char* const at = host_address(block, tile.address(i, k), 16);
    for (int e = 0; e < 16 / tile.size; ++e) to.of[tile.turned ? k : k + e][(tile.turned ? i + e : i) - first] = number_of(at + e * tile.size, type);
  });
}

template <class F> void each_read(const Product& p, int quarter, const F& f) {
  const int size = p.type == TF32 ? 4 : 2;
  if (!p.a_in_registers) {
    const Tile a(p.a, size, p.turned_a);
    a.each_unit(16 * quarter, 16, p.k, [&](int i, int k) { f(a.address(i, k)); });
  }
  const Tile b(p.b, size, p.turned_b);
  b.each_unit(0, p.n, p.k, [&](int i, int k) { f(b.address(i, k)); });
}

#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
void multiply(const Numbers& a, const Numbers& b, int n, int k, double (*sum)[256]) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < n; ++column) sum[row][column] = 0;
    for (int i = 0; i < k; ++i) {
      const double factor = a.of[i][row];
      for (int column = 0; column < n; ++column) sum[row][column] += factor * b.of[i][column];
    }
  }
}

bool same(const Product& a, const Product& b) {
  return a.n == b.n && a.k == b.k && a.type == b.type && a.a == b.a && a.b == b.b && a.a_in_registers == b.a_in_registers && a.accumulate == b.accumulate &&
         a.turned_a == b.turned_a && a.turned_b == b.turned_b;
}

constexpr u32 PENDING = 0x7fc0dead;  // what registers hold that a product will write

// A warp's oldest product: 16 rows of it.
void retire(Warp* warp) {
  const Product p = warp->lanes[0]->products.front().product;
  static Numbers a, b;
  static double sum[16][256];
  const int size = p.type == TF32 ? 4 : 2, quarter = warp->number % 4;
  for (Fiber* f : warp->lanes) {
    if (f->products.empty() || !same(f->products.front().product, p)) simt::fail("the lanes of warp %d differ in what they multiply", warp->number);
    if (!p.a_in_registers) continue;
    const u32(&v)[4] = f->products.front().product.registers;
    for (int i = 0; i < 4; ++i) {
      const int row = f->lane / 4 + i % 2 * 8;
      if (p.type == TF32) a.of[f->lane % 4 + i / 2 * 4][row] = number_of((const char*)&v[i], TF32);
      else
        for (int e = 0; e < 2; ++e) a.of[f->lane % 4 * 2 + i / 2 * 8 + e][row] = number_of((const char*)&v[i] + 2 * e, p.type);
    }
  }
  if (!p.a_in_registers) read(warp->block, Tile(p.a, size, p.turned_a), p.type, 16 * quarter, 16, p.k, a);
  read(warp->block, Tile(p.b, size, p.turned_b), p.type, 0, p.n, p.k, b);
  multiply(a, b, p.n, p.k, sum);
  each_read(p, quarter, [&](u32 at) { --warp->block->reads[at / 16]; });
  for (Fiber* f : warp->lanes) {
    Sums& to = *f->products.front().sums;
    f->products.pop_front();
    for (int i = 0; i < p.n / 2; ++i) {
      const double more = sum[f->lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + f->lane % 4 * 2 + i % 2];
      to.values[i] = (float)(p.accumulate ? to.values[i] + more : more);
    }
    if (--to.pending) continue;
    for (int i = 0; i < p.n / 2; ++i) {
      if (__float_as_uint(*to.registers[i]) != PENDING) simt::fail("thread %d wrote sum %d while a product of it was pending", f->thread, i);
      *to.registers[i] = to.values[i];
    }
  }
}

}  // namespace

namespace ptx {

// ---- wgmma

void wgmma_fence() { current->fenced = true; }
void wgmma_commit() { ++current->committed; }
void wgmma(float* const* sums, int count, const Product& product) {
  Fiber* f = current;
  Warp* warp = f->warp;
  if (!f->fenced) simt::fail("a product before wgmma.fence");
  if (product.n % 8 || product.n < 8 || product.n > 256 || count != product.n / 2) simt::fail("a product of %d columns with %d sums", product.n, count);
  if (f->issued++ == warp->issued) {  // the first lane to be here
    auto& of_group = warp->block->of_warpgroups[warp->number / 4];
    if ((size_t)warp->issued == of_group.size()) of_group.push_back(product);
    if (!same(of_group[warp->issued], product)) simt::fail("product %d of this warp is not that of the other warps of its warpgroup", warp->issued);
    ++warp->issued;
    each_read(product, warp->number % 4, [&](u32 at) {
      host_address(warp->block, at, 16);
      if (warp->block->unfenced[at / 16]) simt::fail("a product of the 16 bytes at %u, which a thread wrote without a fence for wgmma since", at / 16 * 16);
      if (warp->block->writes[at / 16]) simt::fail("a product of the 16 bytes at %u, which a load has not brought yet", at / 16 * 16);
      ++warp->block->reads[at / 16];
    });
  }
  Sums* to = nullptr;
  for (auto& one : f->sums)
    if (one->registers[0] == sums[0]) to = one.get();
  if (!to) {
    f->sums.emplace_back(new Sums);
    to = f->sums.back().get();
    to->registers.assign(sums, sums + count);
  }
  if (!to->pending) {
    to->registers.assign(sums, sums + count);
    to->values.resize(count);
    for (int i = 0; i < count; ++i) {
      to->values[i] = *sums[i];
      *sums[i] = __uint_as_float(PENDING);
    }
  } else if (to->registers != std::vector<float*>(sums, sums + count)) {
    simt::fail("a product over some of the sums of a pending one");
  }
  ++to->pending;
  f->products.push_back({product, to, f->committed});
}
void wgmma_wait(int groups) {
  current->fenced = false;
  Warp* warp = current->warp;
  simt::meet(~0u, "wgmma.wait_group", groups, [&] {
    for (Fiber* f : warp->lanes)
      if (f->committed != current->committed || f->last->brought[f->lane] != (unsigned)groups)
        simt::fail("the lanes of warp %d wait for different products", warp->number);
    while (!warp->lanes[0]->products.empty() && warp->lanes[0]->products.front().group < current->committed - groups) retire(warp);
  });
}

// ---- the warp's matrices

static void rows_of(u32 row, const char* what) { simt::exchange(~0u, row, current->lane, what); }
void load_matrices(u32* const* to, int count, u32 row, bool turned) {
  rows_of(row, "ldmatrix");
  const int lane = current->lane;
  for (int i = 0; i < count; ++i) {
    u16 v[2];
    for (int e = 0; e < 2; ++e) {
      const int line = turned ? lane % 4 * 2 + e : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + e;
      const u32 at = (u32)simt::gathered(8 * i + line);
      if (at % 16) simt::fail("ldmatrix of a row at %u, which is no multiple of 16", at);
      memcpy(&v[e], host_address(current->block, at, 16) + 2 * column, 2);
    }
    memcpy(to[i], v, 4);
  }
  simt::meet(~0u, "ldmatrix's end");
}
void store_matrices(u32 row, const u32* from, int count, bool turned) {
  rows_of(row, "stmatrix");
  const int lane = current->lane;
  for (int i = 0; i < count; ++i)
    for (int e = 0; e < 2; ++e) {
      const int line = turned ? lane % 4 * 2 + e : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + e;
      const u32 at = (u32)simt::gathered(8 * i + line);
      if (at % 16) simt::fail("stmatrix of a row at %u, which is no multiple of 16", at);
      memcpy(host_address(current->block, at, 16) + 2 * column, (const char*)&from[i] + 2 * e, 2);
      written(current->block, at, 16);
    }
  simt::meet(~0u, "stmatrix's end");
}
// What the lanes bring to a product: each finds the others' by their addresses, until all are through.
struct Fragments {
  const void *a, *b;
};
template <class T> static const T* registers_of(int lane, const void* Fragments::*which) { return (const T*)(((const Fragments*)simt::gathered(lane))->*which); }
struct Registers {
  float* const* d;
  const u32 *a, *b;
};
// The last lane multiplies for all of them.
template <int EACH> static void mma_of(float* const* d, const u32* a, const u32* b, Operand type) {  // EACH: numbers of a register
  const Registers own{d, a, b};
  simt::meet(~0u, "mma", (unsigned long long)&own, [&] {
    double rows[16][8 * EACH], columns[8 * EACH][8], sums[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Registers& of = *(const Registers*)simt::gathered(lane);
      for (int half = 0; half < 2; ++half)
        for (int e = 0; e < EACH; ++e) {
          const int k = (half * 4 + lane % 4) * EACH + e;
          for (int lower = 0; lower < 2; ++lower) rows[lane / 4 + 8 * lower][k] = number_of((const char*)&of.a[half * 2 + lower] + 4 / EACH * e, type);
          columns[k][lane / 4] = number_of((const char*)&of.b[half] + 4 / EACH * e, type);
        }
      for (int i = 0; i < 4; ++i) sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = *of.d[i];
    }
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 8 * EACH; ++k)
        for (int column = 0; column < 8; ++column) sums[row][column] += rows[row][k] * columns[k][column];
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) *((const Registers*)simt::gathered(lane))->d[i] = (float)sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  });
}
void mma(float* const* d, const u32* a, const u32* b, Operand type) {  // m16n8k16, of TF32 m16n8k8: 32 bytes of k
  if (type == TF32) mma_of<1>(d, a, b, type);
  else mma_of<2>(d, a, b, type);
}
void mma_f64(double* const* d, int m, int k, const double* a, const double* b) {  // m8n8k4, m16n8k16
  const Fragments own{a, b};
  const int lane = current->lane;
  simt::exchange(~0u, (unsigned long long)&own, lane, "mma");
  for (int i = 0; i < m / 4; ++i)
    for (int j = 0; j < k; ++j) {
      const double row = registers_of<double>(lane / 4 * 4 + j % 4, &Fragments::a)[j / 4 * (m / 8) + i / 2];
      *d[i] = fma(row, registers_of<double>((lane % 4 * 2 + i % 2) * 4 + j % 4, &Fragments::b)[j / 4], *d[i]);
    }
  simt::meet(~0u, "mma's end");
}

// ---- 16-bit floats

float from_half(u16 v) {
  const u32 sign = (u32)(v >> 15) << 31, exponent = v >> 10 & 31, rest = v & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | rest << 13);
  const float size = exponent ? ldexpf((float)(1024 + rest), (int)exponent - 25) : ldexpf((float)rest, -24);
  return __uint_as_float(sign | __float_as_uint(size));
}
u16 to_half(float v) {
  const u32 bits = __float_as_uint(v), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 0x477ff000) return (u16)(sign | 0x7c00);
  if (size < 0x38800000) {  // subnormal: steps of 2^-24; adding 0.5 rounds to them
    return (u16)(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000));
  }
  const u32 rounded = size + 0xfff + (size >> 13 & 1);
  return (u16)(sign | (rounded - 0x38000000) >> 13);
}

}  // namespace ptx
