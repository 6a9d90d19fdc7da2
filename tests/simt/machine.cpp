// machine.cpp: a multiprocessor of Hopper that runs kernels compiled by g++ behind device.h, as strictly as the hardware may ever be.
//
// Threads are fibers, the blocks of a cluster run side by side, clusters one after the other in a random
// order, or in theirs if some wait for others. A fiber runs until it waits; who is next is
// random, by a seed. What the hardware does behind the threads' backs, it does as late as it may, or earlier, at random: bulk and tensor loads come in any
// order, and what they go to is NaN meanwhile; stores read shared memory when they are waited for; wgmma reads its operands and writes its sums when a wait
// retires it, and until then the registers of its sums are NaN. Each warp waits for its own quarter of a product. Shared memory begins as NaN.
//
// Errors, beside wrong results:
//   an access outside shared memory, or outside a buffer, each of which ends before a page that cannot be touched; one that is not aligned as its type is
//   a barrier that was never made, or gets more arrivals than it counts
//   a load to what another load still brings, or a pending product or store still reads; a product or store of what a load still brings
//   a product, bulk store or load where a thread wrote and has not fenced since
//   global memory touched before the launch before has been waited for, but for what a kernel says that it reads earlier
//   products or stores that a thread ends without a wait for, loads that a block does
//   lanes or warps that multiply different operands; sums touched while a product is pending
//   a tensor map, box, corner, offset or alignment that the hardware refuses
//   a deadlock, with who waits for what; a launch that does not end
// Not noticed: races between threads that leave the right values in every order that was tried.
#include "products.h"
#include "state.h"
#include "transfers.h"

// ---- barriers

namespace ptx {

void mbarrier_init(u32 at, u32 count) {
  Block* block = current->block;
  if (at % 8) simt::fail("an mbarrier at %u, which is no multiple of 8", at);
  if (count < 1 || count >= 1 << 20) simt::fail("an mbarrier of %u arrivals", count);
  const uint64_t mark = MAGIC + at;
  memcpy(host_address(block, at, 8), &mark, 8);
  if (block->barriers.count(at)) simt::fail("an mbarrier is made twice at %u", at);
  Barrier& b = block->barriers[at];
  b.number = (int)block->barriers.size() - 1;
  b.count = count;
  b.pending = count;
  b.by = current;
  perhaps_yield();
}
void mbarrier_init_fence() {
  for (auto& [at, b] : current->block->barriers)
    if (b.by == current) b.fenced = true;
}
void mbarrier_arrive(u32 at, u32 count, long bytes) {
  perhaps_yield();
  Block* block = block_of(at);
  Barrier& b = barrier_of(block, at);
  b.bytes += bytes;
  if (b.bytes >= 1 << 20) simt::fail("mbarrier %d expects %ld bytes, more than it counts", b.number, b.bytes);
  if (b.pending < (long)count) simt::fail("mbarrier %d gets more than its %u arrivals in phase %lu", b.number, b.count, b.phase);
  b.pending -= count;
  check_phase(b);
  perhaps_yield();
}
bool mbarrier_try_wait(u32 at, u32 parity) {
  perhaps_yield();
  if (parity > 1) simt::fail("a wait for parity %u", parity);
  Barrier& b = barrier_of(current->block, at);
  while ((b.phase & 1) == parity) wait_in(b.waiting, "mbarrier", at, parity);
  return true;
}

static void arrive_named(int id, int threads, bool waits) {
  Block* block = current->block;
  if (id < 0 || id > 15 || threads % 32 || threads < 1 || threads > (int)blockDim.x) simt::fail("named barrier %d of %d threads", id, threads);
  NamedBarrier& b = block->named[id];
  if (b.there && b.threads != threads) simt::fail("named barrier %d of %d threads, which others say has %d", id, threads, b.threads);
  b.threads = threads;
  const int needed = id == 0 && threads == (int)blockDim.x ? block->live : threads;
  if (++b.there >= needed) {
    b.there = 0;
    wake(b.waiting);
    return;
  }
  if (waits) wait_in(b.waiting, "wait at named barrier %lu of %lu threads", id, threads);
}
void bar_sync(int id, int threads) {
  arrive_named(id, threads, true);
  perhaps_yield();
}
void bar_arrive(int id, int threads) {
  arrive_named(id, threads, false);
  perhaps_yield();
}

void cluster_arrive() {
  current->cluster_phase = cluster.phase + 1;
  if (++cluster.there < cluster.live) return;
  cluster.there = 0;
  ++cluster.phase;
  wake(cluster.waiting);
}
void cluster_wait() {
  if (!current->cluster_phase) simt::fail("waits at the cluster's barrier without an arrival");
  while (cluster.phase < current->cluster_phase) wait_in(cluster.waiting, "wait for the cluster, phase %lu", cluster.phase);
  current->cluster_phase = 0;
}
u32 map_rank(u32 address, u32 rank) {
  if (rank >= blocks.size()) simt::fail("mapa to block %u of a cluster of %zu", rank, blocks.size());
  return address % OF_RANK + (rank + 1) * OF_RANK;
}
void* shared(u32 address, u32 bytes, bool writes) {
  perhaps_yield();
  if (address % bytes) simt::fail("%u bytes at %u of shared memory", bytes, address);
  Block* block = block_of(address);
  void* const at = host_address(block, address, bytes);
  if (writes) written(block, address, bytes);
  return at;
}

}  // namespace ptx

namespace {

// ---- the scheduler

void end_of_thread() {
  Fiber* f = current;
  Block* block = f->block;
  f->done = true;
  if (!f->products.empty()) simt::fail("ends with products that it did not wait for");
  for (auto& t : transfers)
    if (t.by == f && t.kind == Transfer::STORE) simt::fail("ends with bulk stores that it did not wait for");
  finish_own(Transfer::COPY, INT32_MAX);
  --block->live;
  --cluster.live;
  NamedBarrier& all = block->named[0];
  if (all.there && all.there >= block->live) {
    all.there = 0;
    wake(all.waiting);
  }
  if (cluster.there && cluster.there >= cluster.live) {
    cluster.there = 0;
    ++cluster.phase;
    wake(cluster.waiting);
  }
  if (block->live) return;
  for (auto& t : transfers)
    if (t.block == block) simt::fail("the block ends with loads that nobody waited for");
  for (auto& of_group : block->of_warpgroups)
    for (int i = 0; i < 4; ++i) {
      const size_t warp = (&of_group - block->of_warpgroups.data()) * 4 + i;
      if (warp < block->warps.size() && (size_t)block->warps[warp]->issued != of_group.size())
        simt::fail("warp %zu of a warpgroup began %d products, another one %zu", warp, block->warps[warp]->issued, of_group.size());
    }
}

void fiber_main() {
  for (;;) {
    kernel->call(parameters);
    end_of_thread();
    leave();
  }
}

void resume(Fiber* f) {
  if (late) simt::fail("the launch does not end");
  if (f->block != live) {
    if (live) live->kept.assign(kernel->shared_begin, kernel->shared_begin + static_bytes);
    live = f->block;
    if (static_bytes) memcpy(kernel->shared_begin, live->kept.data(), static_bytes);
  }
  current = f;
  waited = f->block->waited;
  early = f->block->early;
  threadIdx = {(unsigned)f->thread, 0, 0};
  blockIdx = {(unsigned)f->block->number, 0, 0};
  simt::dynamic = f->block->dynamic;
  if (!_setjmp(scheduler)) {
    if (f->started) _longjmp(f->at, 1);
    f->started = true;
    setcontext(&f->start);
  }
  current = nullptr;
}

Fiber* next_fiber() {
  size_t which = chance(active.size());
  if (by_priority && chance(16)) {
    if (chance(64) == 0) active[which]->priority = chance(1 << 20);
    for (size_t i = 0; i < active.size(); ++i)
      if (active[i]->priority > active[which]->priority) which = i;
  }
  Warp* warp = active[which];
  const size_t lane = chance(4) ? warp->ready.size() - 1 : chance(warp->ready.size());
  Fiber* f = warp->ready[lane];
  warp->ready[lane] = warp->ready.back();
  warp->ready.pop_back();
  if (warp->ready.empty()) {
    warp->listed = false;
    active[which] = active.back();
    active.pop_back();
  }
  return f;
}

void deadlock() {
  std::string all = "deadlock:";
  for (auto& block : blocks) {
    std::string before;
    int first = -1, last = -1;
    auto say = [&] {
      if (first >= 0) all += "\n  block " + std::to_string(block->number) + ", threads " + std::to_string(first) + " to " + std::to_string(last) + ": " + before;
    };
    for (auto& warp : block->warps)
      for (Fiber* f : warp->lanes) {
        std::string text = "ended";
        if (!f->done) {
          char room[256];
          if (strstr(f->wait.what, "mbarrier")) {
            const Barrier& b = block->barriers.at((u32)f->wait.of[0]);
            snprintf(room, sizeof room, "wait for mbarrier %d at %lu, parity %lu; it has had %lu phases, and lacks %ld arrivals of %u and %ld bytes", b.number,
                     f->wait.of[0], f->wait.of[1], b.phase, b.pending, b.count, b.bytes);
          } else {
            snprintf(room, sizeof room, f->wait.what, f->wait.of[0], f->wait.of[1], f->wait.of[2]);
          }
          text = room;
        }
        if (text != before) {
          say();
          before = text;
          first = f->thread;
        }
        last = f->thread;
      }
    say();
  }
  snprintf(message, sizeof message, "%s", all.c_str());
  stop();
}

void make_fiber(size_t number) {
  if (number < fibers.size()) return;
  fibers.emplace_back(new Fiber);
  Fiber& f = *fibers.back();
  f.stack = (char*)mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  mprotect(f.stack, PAGE, PROT_NONE);
}
void prepare(Fiber& f) {  // for a first start
  getcontext(&f.start);
  f.start.uc_stack.ss_sp = f.stack + PAGE;
  f.start.uc_stack.ss_size = STACK;
  f.start.uc_link = nullptr;
  makecontext(&f.start, fiber_main, 0);
  f.started = false;
}

void free_blocks() {
  for (auto& block : blocks) munmap(block->memory, block->mapped);
  blocks.clear();
  active.clear();
  transfers.clear();
}

void make_block(int number, int threads, size_t first_fiber) {
  blocks.emplace_back(new Block);
  Block* block = blocks.back().get();
  block->number = number;
  block->live = threads;
  cluster.live += threads;
  block->kept.assign(static_bytes, (char)0xff);
  const size_t pages = (dynamic_bytes + kernel->align + PAGE - 1) / PAGE * PAGE;
  block->mapped = pages + 2 * PAGE;
  block->memory = (char*)mmap(nullptr, block->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memset(block->memory, 0xff, block->mapped);
  mprotect(block->memory, PAGE, PROT_NONE);
  mprotect(block->memory + PAGE + pages, PAGE, PROT_NONE);
  block->dynamic = (char*)((uintptr_t)(block->memory + PAGE + pages - dynamic_bytes) & ~(uintptr_t)(kernel->align - 1));
  const size_t units = (dynamic_begin + dynamic_bytes) / 16 + 1;
  block->reads.assign(units, 0);
  block->writes.assign(units, 0);
  block->unfenced.assign(units, 0);
  block->of_warpgroups.resize((threads + 127) / 128);
  for (int i = 0; i < threads; i += 32) {
    block->warps.emplace_back(new Warp);
    Warp* warp = block->warps.back().get();
    warp->block = block;
    warp->number = i / 32;
    warp->priority = chance(1 << 20);
    for (int lane = 0; lane < 32 && i + lane < threads; ++lane) {
      make_fiber(first_fiber + i + lane);
      Fiber* f = fibers[first_fiber + i + lane].get();
      f->block = block;
      f->warp = warp;
      f->thread = i + lane;
      f->lane = lane;
      f->done = false;
      f->last.reset();
      f->votes = 0;
      f->cluster_phase = 0;
      f->products.clear();
      f->sums.clear();
      f->committed = f->issued = f->copies = f->stores = 0;
      f->fenced = false;
      for (int& count : f->under_way) count = 0;
      f->wrote.clear();
      f->has_written.assign(units, false);
      if (!f->started) prepare(*f);
      warp->lanes.push_back(f);
      make_ready(f);
    }
  }
}

void run_cluster(int first, int threads) {
  live = nullptr;
  cluster = {};
  for (int rank = 0; rank < kernel->cluster; ++rank) make_block(first + rank, threads, rank * threads);
  for (;;) {
    while (!transfers.empty() && (active.empty() || chance(1000) < arrival_rate)) finish(chance(transfers.size()));
    if (active.empty()) break;
    resume(next_fiber());
  }
  for (auto& block : blocks)
    if (block->live) deadlock();
  free_blocks();
}

}  // namespace

// ---- ordinary loads and stores: g++ calls these before each one, as it would ThreadSanitizer's

static void touched_global(const char* at, size_t bytes, bool writes) {
  if (!waited && (writes || !early)) simt::fail("%s global memory before the launch waits for the one before it", writes ? "writes to" : "reads of");
  for (const Buffer& b : buffers)
    if (at >= b.begin && at + bytes <= b.begin + b.size) return;
  for (size_t i = 0; i < buffers.size(); ++i)
    if (at >= buffers[i].mapped && at < buffers[i].mapped + buffers[i].pages)
      simt::fail("%s %zu bytes at %td of buffer %zu, which has %zu", writes ? "writes" : "reads", bytes, at - buffers[i].begin, i, buffers[i].size);
}
// `align`: what the type promises
static inline void touched(const void* p, size_t bytes, size_t align, bool writes) {
  const char* at = (const char*)p;
  const bool global = (size_t)(at - arena) < ARENA, dynamic = (size_t)(at - simt::dynamic) < dynamic_bytes, fixed = (size_t)(at - kernel->shared_begin) < static_bytes;
  if (!global && !dynamic && !fixed) return;
  if ((size_t)at % align) simt::fail("%s %zu bytes at %p, which is no multiple of %zu", writes ? "writes" : "reads", bytes, p, align);
  if (global) touched_global(at, bytes, writes);
  else if (writes) written(current->block, dynamic ? dynamic_begin + (u32)(at - simt::dynamic) : RESERVED + (u32)(at - kernel->shared_begin), bytes);
}
#define TOUCHED(bytes)                                                                        \
  extern "C" void __tsan_read##bytes(void* at) { touched(at, bytes, bytes, false); }          \
  extern "C" void __tsan_write##bytes(void* at) { touched(at, bytes, bytes, true); }          \
  extern "C" void __tsan_unaligned_read##bytes(void* at) { touched(at, bytes, 1, false); }    \
  extern "C" void __tsan_unaligned_write##bytes(void* at) { touched(at, bytes, 1, true); }
TOUCHED(1)
TOUCHED(2)
TOUCHED(4)
TOUCHED(8)
TOUCHED(16)
extern "C" void __tsan_read_range(void* at, size_t bytes) { touched(at, bytes, 1, false); }
extern "C" void __tsan_write_range(void* at, size_t bytes) { touched(at, bytes, 1, true); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_vptr_update(void*, void*) {}

// ---- what __init__.py calls

// A buffer that ends, but for what 16 bytes need, before a page that cannot be touched.
extern "C" char* simt_allocate(size_t size) {
  const size_t pages = (size + PAGE - 1) / PAGE * PAGE;
  if (!arena) arena = (char*)mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  Buffer b{buffers.empty() ? arena : buffers.back().mapped + buffers.back().pages, nullptr, pages + 2 * PAGE, size};
  if (b.mapped + b.pages > arena + ARENA) return nullptr;
  if (pages) {
    mprotect(b.mapped + PAGE, pages, PROT_READ | PROT_WRITE);
    memset(b.mapped + PAGE, 0xff, pages);
  }
  b.begin = b.mapped + PAGE + pages - (size + 15) / 16 * 16;
  buffers.push_back(b);
  return b.begin;
}
extern "C" void simt_free() {
  if (arena) munmap(arena, ARENA);
  arena = nullptr;
  buffers.clear();
}

// Runs a kernel; what went wrong, or null.
extern "C" const char* simt_launch(const simt::Kernel* of, const char* with, size_t bytes, int grid, int threads, size_t dynamic, uint64_t seed) {
  if (!halves[1])
    for (int i = 0; i < 1 << 16; ++i) halves[i] = from_half((u16)i);
  kernel = of;
  parameters = with;
  chance_state = (seed + 1) * 0x9e3779b97f4a7c15;
  for (int i = 0; i < 8; ++i) chance(2);
  const uint32_t rates[] = {0, 2, 30, 1000};
  arrival_rate = rates[chance(4)];
  yield_rate = rates[chance(3)] * 5;
  by_priority = chance(2);
  static_bytes = of->shared_end - of->shared_begin;
  dynamic_bytes = dynamic;
  dynamic_begin = (u32)((RESERVED + static_bytes + of->align - 1) / of->align * of->align);
  blockDim = {(unsigned)threads, 1, 1};
  gridDim = {(unsigned)grid, 1, 1};
  current = nullptr;

  static char other_stack[1 << 16];
  stack_t given{}, before_stack;
  given.ss_sp = other_stack;
  given.ss_size = sizeof other_stack;
  sigaltstack(&given, &before_stack);
  const int numbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
  struct sigaction action{}, before[5];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 5; ++i) sigaction(numbers[i], &action, &before[i]);
  late = false;
  const itimerval limit{{SECONDS, 0}, {SECONDS, 0}}, none{};
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);

  const char* wrong = nullptr;
  if (sigsetjmp(failed, 1)) {
    wrong = message;
    current = nullptr;
    free_blocks();
    for (auto& f : fibers) {
      f->started = false;
      f->products.clear();
      f->sums.clear();
      f->last.reset();
    }
  } else {
    if (bytes != of->bytes) simt::fail("the kernel takes %zu bytes of parameters, but got %zu", of->bytes, bytes);
    if (grid < 1 || grid % of->cluster || threads < 1 || threads > 1024) simt::fail("a grid of %d blocks of %d threads, in clusters of %d", grid, threads, of->cluster);
    if (dynamic_begin - RESERVED + dynamic > MOST_SHARED) simt::fail("%zu bytes of shared memory", dynamic_begin - RESERVED + dynamic);
    std::vector<int> order;
    for (int i = 0; i < grid; i += of->cluster) order.push_back(i);
    for (size_t i = of->in_order ? 0 : order.size(); i > 1; --i) std::swap(order[i - 1], order[chance(i)]);
    for (const int first : order) run_cluster(first, threads);
    for (size_t i = 0; i < buffers.size(); ++i) {
      const Buffer& b = buffers[i];
      for (const char* at = b.mapped + PAGE; at < b.mapped + b.pages - PAGE; ++at) {
        if (at == b.begin) at += b.size;
        if (at < b.mapped + b.pages - PAGE && *at != (char)0xff) simt::fail("byte %td of buffer %zu, which has %zu, was written", at - b.begin, i, b.size);
      }
    }
  }
  setitimer(ITIMER_VIRTUAL, &none, nullptr);
  for (int i = 0; i < 5; ++i) sigaction(numbers[i], &before[i], nullptr);
  sigaltstack(&before_stack, nullptr);
  return wrong;
}
