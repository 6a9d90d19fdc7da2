// state.h: of machine.cpp, what there is: threads, warps, blocks, barriers, what is under way; who waits, who goes on; shared memory and its addresses.
#pragma once
#include "device.h"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

Index threadIdx, blockIdx, blockDim, gridDim;
char* simt::dynamic;

namespace {
using namespace ptx;

constexpr u32 RESERVED = 1024, MOST_SHARED = 227 * 1024;  // bytes before a block's shared memory, and in it
constexpr size_t STACK = 128 * 1024, PAGE = 4096;
constexpr u32 OF_RANK = 1u << 24;  // an address of rank r in a cluster: + (r + 1) * OF_RANK

// ---- errors and chance

char message[8192];
sigjmp_buf failed;
uint64_t chance_state;

uint32_t chance(uint32_t below) {
  chance_state ^= chance_state << 13;
  chance_state ^= chance_state >> 7;
  chance_state ^= chance_state << 17;
  return (uint32_t)((chance_state >> 11) % below);
}

// ---- threads

struct Block;
struct Warp;
struct Fiber;

struct Wait {
  const char* what;  // with three numbers in it
  unsigned long of[3];
};

struct Meeting {  // of the lanes of a warp
  unsigned mask, there = 0;
  const char* what;
  unsigned long long brought[32];
  std::vector<Fiber*> waiting;
};

struct Sums {  // of a thread, that wgmma is making
  std::vector<float*> registers;
  std::vector<float> values;
  int pending = 0;
};
struct Issued {
  Product product;
  Sums* sums;
  int group;
};

struct Fiber {
  jmp_buf at;
  ucontext_t start;
  char* stack = nullptr;
  bool started = false, done = false;
  Block* block;
  Warp* warp;
  int thread, lane;
  Wait wait;
  std::shared_ptr<Meeting> last;
  int votes = 0;
  unsigned long cluster_phase = 0;
  // wgmma
  std::deque<Issued> products;
  std::vector<std::unique_ptr<Sums>> sums;
  int committed = 0, issued = 0;
  bool fenced = false;
  int copies = 0, stores = 0;  // committed groups of cp.async, and of bulk stores
  int under_way[3] = {};       // transfers of each kind
  std::vector<u32> wrote;      // of which 16 bytes this thread has written some since it fenced for bulk copies and wgmma last
  std::vector<bool> has_written;
};

struct Warp {
  Block* block;
  int number, issued = 0;
  unsigned priority;
  bool listed = false;
  std::vector<Fiber*> ready, lanes;
  std::vector<std::shared_ptr<Meeting>> meetings;
};

struct Barrier {
  int number;
  u32 count;
  long pending, bytes = 0;
  unsigned long phase = 0;
  bool fenced = false;
  Fiber* by;
  std::vector<Fiber*> waiting;
};
struct NamedBarrier {
  int threads = 0, there = 0;
  std::vector<Fiber*> waiting;
};
struct Cluster {
  int live = 0, there = 0;
  unsigned long phase = 0;
  std::vector<Fiber*> waiting;
};
struct Block {
  int number, live;
  std::vector<char> kept;  // static shared memory, while another block runs
  char *memory, *dynamic;  // dynamic shared memory, before a page that cannot be touched
  size_t mapped;
  std::unordered_map<u32, Barrier> barriers;
  NamedBarrier named[16];
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::vector<Product>> of_warpgroups;
  std::vector<uint16_t> reads, writes, unfenced;  // of each 16 bytes: by pending products and stores; by loads under way; by threads that have not fenced since
  int votes[3] = {};
  bool waited = false;  // for the launch before
  bool early = false;   // whether it reads before that what the launch before doesn't write
};

// ---- what goes on behind the threads' backs

struct Row {
  u32 place;
  char* memory;
  int begin, end;  // bytes that lie inside the array; the others are zeros, or are not stored
};
struct Transfer {
  enum { LOAD, COPY, STORE } kind;
  Block* block;
  Fiber* by;
  int group;
  u32 barrier;
  int bytes, span;  // of a row; over which it is swizzled
  bool rounds;
  std::vector<Row> rows;
};

// A tensor map, as __init__.py writes it; innermost axis first.
struct Map {
  uint64_t magic;
  char* base;
  int64_t sizes[5], strides[5];  // strides in bytes
  int32_t box[5], lower[3], upper[3], step[3];
  int32_t rank, size, span, im2col, channels, pixels, rounds;
};
constexpr uint64_t MAGIC = 0x7e4507a9c0ffee11;

struct Buffer {
  char *mapped, *begin;
  size_t pages, size;
};

// ---- the state of a launch

const simt::Kernel* kernel;
const char* parameters;
size_t static_bytes, dynamic_bytes;
u32 dynamic_begin;  // its address
Block* live;        // whose static shared memory lies where the kernel's text has it
Fiber* current;
bool waited, early;  // of its block
jmp_buf scheduler;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<std::unique_ptr<Block>> blocks;  // of a cluster
Cluster cluster;
std::vector<Warp*> active;
std::vector<Transfer> transfers;
std::vector<Buffer> buffers;
char* arena;  // in which they lie
constexpr size_t ARENA = 1ul << 32;
uint32_t arrival_rate, yield_rate;
bool by_priority;
volatile bool late;  // time is up
constexpr int SECONDS = 120;
float halves[1 << 16];

[[noreturn]] void stop() { siglongjmp(failed, 1); }

std::string who(const Fiber* f) { return "thread " + std::to_string(f->thread) + " of block " + std::to_string(f->block->number); }

void on_signal(int number, siginfo_t* info, void*) {
  const char* at = (const char*)info->si_addr;
  if (number == SIGVTALRM && !late) {  // the scheduler will see it, unless a thread never comes back
    late = true;
    return;
  }
  const std::string thread = current ? who(current) + ": " : "";
  if (number == SIGVTALRM) {
    snprintf(message, sizeof message, "%sruns for ever", thread.c_str());
    stop();
  }
  if (number != SIGSEGV && number != SIGBUS) {
    snprintf(message, sizeof message, "%ssignal %d (%s)", thread.c_str(), number, strsignal(number));
    stop();
  }
  std::string where = "an address that is in none of the launch's buffers";
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (at >= b.mapped && at < b.mapped + b.pages)
      where = std::to_string(at - b.begin) + " bytes from the start of buffer " + std::to_string(i) + ", which has " + std::to_string(b.size);
  }
  for (auto& b : blocks)
    if (at >= b->memory && at < b->memory + b->mapped)
      where = std::to_string(at - b->dynamic) + " bytes from the start of a block's dynamic shared memory, which has " + std::to_string(dynamic_bytes);
  snprintf(message, sizeof message, "%saccess outside memory: %s (%p)", thread.c_str(), where.c_str(), at);
  stop();
}

void make_ready(Fiber* f) {
  Warp* warp = f->warp;
  warp->ready.push_back(f);
  if (!warp->listed) {
    warp->listed = true;
    active.push_back(warp);
  }
}
void wake(std::vector<Fiber*>& waiting) {
  for (Fiber* f : waiting) make_ready(f);
  waiting.clear();
}
void leave() {  // to the scheduler
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}
void wait_in(std::vector<Fiber*>& waiting, const char* what, unsigned long a = 0, unsigned long b = 0, unsigned long c = 0) {
  current->wait = {what, {a, b, c}};
  waiting.push_back(current);
  leave();
}
void perhaps_yield() {
  if (chance(1000) >= yield_rate) return;
  make_ready(current);
  leave();
}

// ---- shared memory

Block* block_of(u32& address) {
  const u32 rank = address / OF_RANK;
  if (rank == 0) return current->block;
  address %= OF_RANK;
  if (rank > blocks.size()) simt::fail("an address of block %u of a cluster of %zu", rank - 1, blocks.size());
  Block* block = blocks[rank - 1].get();
  if (block->live == 0) simt::fail("access to the shared memory of block %d, which has ended", block->number);
  return block;
}

char* host_address(Block* block, u32 address, size_t bytes) {
  if (address >= RESERVED && address + bytes <= RESERVED + static_bytes)
    return (block == live ? kernel->shared_begin : block->kept.data()) + (address - RESERVED);
  if (address >= dynamic_begin && address + bytes <= dynamic_begin + dynamic_bytes) return block->dynamic + (address - dynamic_begin);
  simt::fail("%zu bytes at %u are outside shared memory: %zu bytes from %u on, %zu from %u on", bytes, address, static_bytes, RESERVED, dynamic_bytes, dynamic_begin);
}

u32 swizzled(u32 address, int span) {
  return address ^ (address >> 7 & (span == 128 ? 7 : span == 64 ? 3 : span == 32 ? 1 : 0)) << 4;
}

Barrier& barrier_of(Block* block, u32 address) {
  auto found = block->barriers.find(address);
  if (found == block->barriers.end()) simt::fail("there is no mbarrier at %u", address);
  uint64_t there;
  memcpy(&there, host_address(block, address, 8), 8);
  if (there != MAGIC + address) simt::fail("mbarrier %d, at %u, was written over", found->second.number, address);
  return found->second;
}

void check_phase(Barrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  ++b.phase;
  b.pending = b.count;
  wake(b.waiting);
}

// A thread's ordinary store to shared memory.
void written(Block* block, u32 address, size_t bytes) {
  for (u32 at = address / 16; at <= (address + bytes - 1) / 16; ++at) {
    if (block->writes[at]) simt::fail("writes to the 16 bytes at %u, which a load has not brought yet", at * 16);
    if (block->reads[at]) simt::fail("writes to the 16 bytes at %u, which a pending product or store still reads", at * 16);
    if (block != current->block || current->has_written[at]) continue;
    current->has_written[at] = true;
    current->wrote.push_back(at);
    ++block->unfenced[at];
  }
}

}  // namespace

// ---- what device.h declares

namespace simt {
void fail(const char* what, ...) {
  std::string before = current ? who(current) + ": " : "";
  size_t at = snprintf(message, sizeof message, "%s", before.c_str());
  va_list values;
  va_start(values, what);
  vsnprintf(message + at, sizeof message - at, what, values);
  va_end(values);
  stop();
}
unsigned shared_address(const void* p) {
  const char *at = (const char*)p, *first = current->block->dynamic;
  if (at >= kernel->shared_begin && at < kernel->shared_end) return RESERVED + (u32)(at - kernel->shared_begin);
  if (at >= first && at <= first + dynamic_bytes) return dynamic_begin + (u32)(at - first);
  fail("%p is no address of the block's shared memory", p);
}

// the lane's meeting with the others of the mask; `last`: what the last one does before all go on
template <class F> void meet(unsigned mask, const char* what, unsigned long long mine, const F& last) {
  Warp* warp = current->warp;
  if (!(mask >> current->lane & 1)) fail("%s with a mask, %#x, that this lane is not in", what, mask);
  std::shared_ptr<Meeting> meeting;
  size_t which = 0;
  for (; which < warp->meetings.size(); ++which) {
    const Meeting& one = *warp->meetings[which];
    if (one.mask == mask && !(one.there >> current->lane & 1) && (one.what == what || !strcmp(one.what, what))) break;
  }
  if (which == warp->meetings.size()) {
    warp->meetings.push_back(std::make_shared<Meeting>());
    warp->meetings.back()->mask = mask;
    warp->meetings.back()->what = what;
  }
  meeting = warp->meetings[which];
  meeting->there |= 1u << current->lane;
  meeting->brought[current->lane] = mine;
  current->last = meeting;
  if (meeting->there == mask) {
    warp->meetings.erase(warp->meetings.begin() + which);
    last();
    wake(meeting->waiting);
    return;
  }
  std::vector<Fiber*>& waiting = meeting->waiting;
  meeting.reset();  // nothing to destroy in a thread that may never go on
  current->wait = {"wait for the other lanes in %s", {(unsigned long)what}};
  waiting.push_back(current);
  leave();
}
void meet(unsigned mask, const char* what) {
  meet(mask, what, 0, [] {});
}
unsigned long long exchange(unsigned mask, unsigned long long mine, int from, const char* what) {
  meet(mask, what, mine, [] {});
  if (!(mask >> (from & 31) & 1)) fail("%s from lane %d, which is not in the mask %#x", what, from, mask);
  return current->last->brought[from & 31];
}
unsigned long long gathered(int lane) { return current->last->brought[lane]; }
int block_sum(int v) {
  const int turn = current->votes++ % 3;
  Block* block = current->block;
  block->votes[turn] += v;
  bar_sync(0, (int)blockDim.x);
  block->votes[(turn + 2) % 3] = 0;  // of the turn before, which all have read
  return block->votes[turn];
}
}  // namespace simt
