// A libcuda that runs no kernel and writes down what it is asked, for tests on machines without a GPU.
//
// It keeps contexts as the driver does. Each module, function, stream, event and block of memory belongs to the context that was current when it was
// made, and goes with it. The handle of a context that is gone is given to the next one; ids are never used twice. A handle that is dead, or belongs
// to another context than the current one, is refused with 400 and counted. Memory is the host's, so copies really copy.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
enum { GPUS = 8, CONTEXTS = 1024, DEPTH = 64, BLOCKS = 1 << 16, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, DEAD = 400, GONE = 709, FAILED = 719 };
enum { OF_MODULE = 0x10, OF_STREAM = 0x20, OF_EVENT = 0x30 };  // where handles of a kind begin, in the bits above those of their numbers

char fake_log[1 << 22];
size_t fake_length;
int fake_failing = -1;      // the number of the call that fails, counted from 0
volatile int fake_blocked;  // launches wait while this is set
volatile int fake_waiting;  // how many do
int fake_strict;            // whether calls that need a current context fail without one
int fake_gpus = 1;
long fake_dead, fake_foreign;  // how many handles were refused, because their context is gone, or another one is current
size_t fake_total = (size_t)1 << 40, fake_used;  // bytes of a GPU's memory; those in use

typedef struct {
  u64 id;  // 0: none has this handle
  int gpu, primary, uses;
} Context;
static Context contexts[CONTEXTS];  // a handle is the address of one of these
static Context* primaries[GPUS];
static u64 last_id;
static __thread struct {
  Context* context;
  u64 id;
} stack[DEPTH];  // a thread's, the current one last
static __thread int depth;
static struct {
  char* start;
  size_t bytes;
  u64 id;  // 0: it belongs to no context
  int gpu, locked;
} blocks[BLOCKS];
static int block_count;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define NOTE(...) (fake_length += sprintf(fake_log + fake_length, __VA_ARGS__))

static void note_bytes(const void* from, size_t n) {
  const unsigned char* bytes = from;
  for (size_t i = 0; i < n; i++) {
    fake_log[fake_length++] = ' ';
    fake_log[fake_length++] = "0123456789abcdef"[bytes[i] >> 4];
    fake_log[fake_length++] = "0123456789abcdef"[bytes[i] & 15];
  }
}

static int noted(void) {  // under the lock
  int code = 0;
  if (fake_length > sizeof fake_log - (1 << 16)) abort();
  if (fake_failing >= 0) code = fake_failing-- ? 0 : FAILED;
  pthread_mutex_unlock(&lock);
  return code;
}

// ---- contexts

static int lives(const Context* c, u64 id) { return c >= contexts && c < contexts + CONTEXTS && c->id && (!id || c->id == id); }
static u64 current_id(void) { return depth && lives(stack[depth - 1].context, stack[depth - 1].id) ? stack[depth - 1].id : 0; }

static Context* of_id(u64 id) {
  for (int i = 0; i < CONTEXTS; i++)
    if (contexts[i].id == id) return &contexts[i];
  return NULL;
}

static Context* made(int gpu, int primary) {
  Context* c = of_id(0);  // the handle that was given back last is the lowest free one in most tests
  if (!c) abort();
  *c = (Context){++last_id, gpu, primary, 1};
  return c;
}

static void end(Context* c) {
  for (int i = 0; i < block_count; i++)
    if (blocks[i].id == c->id && blocks[i].bytes) {
      fake_used -= blocks[i].bytes;
      memset(blocks[i].start, 0xdd, blocks[i].bytes);
      blocks[i].bytes = 0;
    }
  if (c->primary) primaries[c->gpu] = NULL;
  c->id = 0;
}

// Whether the context of a handle that has its id in the upper bits is the current one. Handles that tests invent have none.
static int check(const void* handle) {
  const u64 id = (u64)(uintptr_t)handle >> 48;
  if (fake_strict && !current_id()) return NO_CONTEXT;
  if (!id) return 0;
  if (!of_id(id)) return __sync_fetch_and_add(&fake_dead, 1), DEAD;
  if (current_id() && id != current_id()) return __sync_fetch_and_add(&fake_foreign, 1), DEAD;
  return 0;
}

static void* handle(int kind, u64 number) { return (void*)(uintptr_t)(current_id() << 48 | (u64)kind << 40 | (number & 0xffffffffff)); }

static void note_context(const char* what) { pthread_mutex_lock(&lock), NOTE("%s\n", what), pthread_mutex_unlock(&lock); }
static void put(Context* c) { stack[depth].context = c, stack[depth++].id = c->id; }
int cuCtxGetCurrent(void** context) { return *context = depth ? stack[depth - 1].context : NULL, 0; }
int cuCtxSetCurrent(void* context) {
  if (depth) depth--;
  if (context) put(context);
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  if (!lives(context, 0)) return __sync_fetch_and_add(&fake_dead, 1), DEAD;
  if (depth == DEPTH) abort();
  return note_context("push"), put(context), 0;
}
int cuCtxPopCurrent_v2(void** context) {
  if (!depth) return NO_CONTEXT;
  note_context("pop");
  depth--;
  if (context) *context = stack[depth].context;
  return 0;
}
int cuCtxGetId(void* context, u64* id) {
  if (context) return lives(context, 0) ? (*id = ((Context*)context)->id, 0) : (__sync_fetch_and_add(&fake_dead, 1), DEAD);
  if (!depth) return NO_CONTEXT;
  return (*id = current_id()) ? 0 : GONE;
}
int cuCtxGetDevice(int* gpu) { return current_id() ? (*gpu = stack[depth - 1].context->gpu, 0) : NO_CONTEXT; }
int cuCtxGetApiVersion(void* context, unsigned* version) { return *version = 3020, 0; }
int cuCtxCreate_v4(void** context, void* how, unsigned flags, int gpu) {
  pthread_mutex_lock(&lock);
  Context* c = made(gpu, 0);
  pthread_mutex_unlock(&lock);
  return put(c), *context = c, 0;
}
int cuCtxCreate_v2(void** context, unsigned flags, int gpu) { return cuCtxCreate_v4(context, NULL, flags, gpu); }
int cuCtxAttach(void** context, unsigned flags) { return current_id() ? (*context = stack[depth - 1].context, stack[depth - 1].context->uses++, 0) : NO_CONTEXT; }
int cuCtxDetach(void* context) {
  Context* c = context;
  if (!lives(c, 0)) return __sync_fetch_and_add(&fake_dead, 1), DEAD;
  pthread_mutex_lock(&lock);
  if (depth && stack[depth - 1].context == c && c->uses == 1) depth--;
  if (!--c->uses) end(c);
  return pthread_mutex_unlock(&lock), 0;
}
int cuCtxDestroy_v2(void* context) { return lives(context, 0) ? (((Context*)context)->uses = 1, cuCtxDetach(context)) : DEAD; }
int cuDevicePrimaryCtxRetain(void** context, int gpu) {
  pthread_mutex_lock(&lock);
  if (primaries[gpu])
    primaries[gpu]->uses++;
  else
    primaries[gpu] = made(gpu, 1);
  return pthread_mutex_unlock(&lock), *context = primaries[gpu], 0;
}
int cuDevicePrimaryCtxRelease_v2(int gpu) {
  pthread_mutex_lock(&lock);
  if (primaries[gpu] && !--primaries[gpu]->uses) end(primaries[gpu]);
  return pthread_mutex_unlock(&lock), 0;
}
int cuDevicePrimaryCtxGetState(int gpu, unsigned* flags, int* active) { return *flags = 0, *active = primaries[gpu] != NULL, 0; }
int fake_living(void) {  // contexts that are not primary ones
  int count = 0;
  for (int i = 0; i < CONTEXTS; i++) count += contexts[i].id && !contexts[i].primary;
  return count;
}

// ---- kernels, streams and events

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned attribute_count;
} Config;

int cuLaunchKernelEx(const Config* c, void* f, void** parameters, void** extra) {
  if (fake_blocked) {
    __sync_fetch_and_add(&fake_waiting, 1);
    while (fake_blocked) usleep(100);
    __sync_fetch_and_add(&fake_waiting, -1);
    return 0;
  }
  const int wrong = check(f) ? DEAD : check(c->stream);
  if (wrong) return wrong;
  if (parameters || extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4]) return INVALID;
  pthread_mutex_lock(&lock);
  NOTE("launch %p of %u %u %u, %u %u %u, %u on %p,", f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream);
  note_bytes(c->attributes, c->attribute_count * 72);
  NOTE(", takes");
  note_bytes(extra[1], *(size_t*)extra[3]);
  NOTE("\n");
  return noted();
}
int cuEventRecord(void* event, void* stream) {
  const int wrong = check(event) ? DEAD : check(stream);
  return wrong ? wrong : (pthread_mutex_lock(&lock), NOTE("record %p on %p\n", event, stream), noted());
}
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  const int wrong = check(event) ? DEAD : check(stream);
  return wrong ? wrong : (pthread_mutex_lock(&lock), NOTE("%p waits for %p, %u\n", stream, event, flags), noted());
}
static u64 next(void) {
  static u64 last = 0x5000;
  return __sync_add_and_fetch(&last, 16);
}
static int make(void** place, int kind) { return fake_strict && !current_id() ? NO_CONTEXT : (*place = handle(kind, next()), 0); }
int cuStreamCreate(void** stream, unsigned flags) { return make(stream, OF_STREAM); }
int cuEventCreate(void** event, unsigned flags) { return make(event, OF_EVENT); }
int cuStreamDestroy_v2(void* stream) { return check(stream); }
int cuEventDestroy_v2(void* event) { return of_id((u64)(uintptr_t)event >> 48) ? 0 : check(event); }
int cuStreamSynchronize(void* stream) { return check(stream); }
int cuStreamQuery(void* stream) { return check(stream); }
int cuEventSynchronize(void* event) { return check(event); }
int cuEventQuery(void* event) { return check(event); }
int cuEventElapsedTime_v2(float* ms, void* first, void* second) { return *ms = 1, check(first); }
int cuEventElapsedTime(float* ms, void* first, void* second) { return *ms = 1, check(first); }
int cuStreamIsCapturing(void* stream, int* state) { return *state = stream == (void*)0xca9, check(stream); }
int cuStreamGetCtx(void* stream, void** context) {
  Context* c = of_id((u64)(uintptr_t)stream >> 48);
  if ((uintptr_t)stream >> 48 && !c) return __sync_fetch_and_add(&fake_dead, 1), DEAD;
  return *context = (uintptr_t)stream >> 48 ? c : depth ? stack[depth - 1].context : NULL, 0;
}

static int encode(uint64_t* map, int kind, int type, uint32_t rank, uint64_t address, const uint64_t* sizes, const uint64_t* strides) {
  memset(map, 0, 128);
  map[0] = address, map[1] = kind, map[2] = type, map[3] = rank;
  memcpy(map + 4, sizes, 8 * rank), memcpy(map + 9, strides, 8 * (rank - 1));
  return 0;
}
int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, uint64_t address, const uint64_t* sizes, const uint64_t* strides) {
  return encode(map, 1, type, rank, address, sizes, strides);
}
int cuTensorMapEncodeIm2col(uint64_t* map, int type, uint32_t rank, uint64_t address, const uint64_t* sizes, const uint64_t* strides) {
  return encode(map, 2, type, rank, address, sizes, strides);
}

static u64 hash(const char* text, u64 h) {
  for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3;
  return h;
}
int cuModuleLoadData(void** module, const char* image) {
  return fake_strict && !current_id() ? NO_CONTEXT : (*module = handle(OF_MODULE, hash(image, 0xcbf29ce484222325)), 0);
}
int cuModuleGetFunction(void** f, void* module, const char* name) {
  const int wrong = check(module);
  return wrong ? wrong : (*f = handle(OF_MODULE, hash(name, (uintptr_t)module & 0xffffffffff)), 0);
}
int cuFuncGetParamInfo(void* f, size_t i, size_t* offset, size_t* size) { return *offset = 64, *size = 128, check(f); }
int cuFuncGetAttribute(int* value, int which, void* f) { return *value = 32, check(f); }
int cuFuncSetAttribute(void* f, int which, int value) { return check(f); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* f, int block, size_t shared) { return *blocks = 1, check(f); }

// ---- memory

static int block_at(u64 address) {
  for (int i = block_count - 1; i >= 0; i--)
    if (blocks[i].bytes && (u64)(uintptr_t)blocks[i].start <= address && address < (u64)(uintptr_t)blocks[i].start + blocks[i].bytes) return i;
  return -1;
}

// A block of memory of the current context; of none where `id` is 0.
int fake_alloc(u64* address, size_t bytes, u64 id, int gpu, int locked) {
  void* start;
  pthread_mutex_lock(&lock);
  const int full = fake_used + bytes > fake_total;
  if (!full && !posix_memalign(&start, 512, bytes) && block_count < BLOCKS) {
    blocks[block_count].start = start, blocks[block_count].bytes = bytes, blocks[block_count].id = id;
    blocks[block_count].gpu = gpu, blocks[block_count++].locked = locked;
    fake_used += bytes;
    *address = (u64)(uintptr_t)start;
  }
  pthread_mutex_unlock(&lock);
  return full ? NO_MEMORY : 0;
}
static int of_current(u64* address, size_t bytes, int locked) {
  return current_id() ? fake_alloc(address, bytes, current_id(), stack[depth - 1].context->gpu, locked) : NO_CONTEXT;
}
int cuMemAlloc_v2(u64* address, size_t bytes) { return of_current(address, bytes, 0); }
int cuMemAllocManaged(u64* address, size_t bytes, unsigned flags) { return of_current(address, bytes, 0); }
int cuMemHostAlloc(void** address, size_t bytes, unsigned flags) { return of_current((u64*)address, bytes, 1); }
static int give_back(u64 address) {
  int code = INVALID;
  pthread_mutex_lock(&lock);
  const int i = block_at(address);
  if (i >= 0 && (u64)(uintptr_t)blocks[i].start == address) {
    if (blocks[i].id && blocks[i].id != current_id())
      fake_foreign++, code = DEAD;
    else
      fake_used -= blocks[i].bytes, blocks[i].bytes = 0, free(blocks[i].start), code = 0;
  } else
    fake_dead++;
  return pthread_mutex_unlock(&lock), code;
}
int cuMemFree_v2(u64 address) { return give_back(address); }
int cuMemFreeHost(void* address) { return give_back((u64)(uintptr_t)address); }
int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = fake_total > fake_used ? fake_total - fake_used : 0, *total = fake_total, current_id() ? 0 : NO_CONTEXT; }
int cuMemHostGetDevicePointer_v2(u64* address, void* host, unsigned flags) { return *address = (u64)(uintptr_t)host, 0; }
int cuPointerGetAttribute(void* value, int which, u64 address) {
  pthread_mutex_lock(&lock);
  const int i = block_at(address);
  if (i >= 0 && which == 9) *(int*)value = blocks[i].gpu;
  if (i >= 0 && which == 2) *(unsigned*)value = blocks[i].locked ? 1 : 2;
  if (i >= 0 && which == 1) *(void**)value = blocks[i].id ? of_id(blocks[i].id) : NULL;
  return pthread_mutex_unlock(&lock), i < 0 ? INVALID : 0;
}

// Whether memory that a copy reads or writes is there, in the current context.
static int reach(u64 address, size_t bytes) {
  const int i = block_at(address);
  if (!current_id()) return NO_CONTEXT;
  if (i < 0 || (u64)(uintptr_t)blocks[i].start + blocks[i].bytes < address + bytes) return __sync_fetch_and_add(&fake_dead, 1), INVALID;
  if (!blocks[i].locked && blocks[i].id && blocks[i].id != current_id()) return __sync_fetch_and_add(&fake_foreign, 1), DEAD;
  return 0;
}
static int copied(u64 target, u64 source, size_t bytes, u64 on_gpu, void* stream) {
  const int wrong = check(stream) ? DEAD : reach(on_gpu, bytes);
  return wrong ? wrong : (memcpy((void*)(uintptr_t)target, (void*)(uintptr_t)source, bytes), 0);
}
int cuMemcpyHtoDAsync_v2(u64 target, void* source, size_t n, void* stream) { return copied(target, (u64)(uintptr_t)source, n, target, stream); }
int cuMemcpyDtoHAsync_v2(void* target, u64 source, size_t n, void* stream) { return copied((u64)(uintptr_t)target, source, n, source, stream); }
int cuMemcpyDtoDAsync_v2(u64 target, u64 source, size_t n, void* stream) { return copied(target, source, n, target, stream); }
int cuMemcpyHtoD_v2(u64 target, void* source, size_t n) { return cuMemcpyHtoDAsync_v2(target, source, n, NULL); }
int cuMemcpyDtoH_v2(void* target, u64 source, size_t n) { return cuMemcpyDtoHAsync_v2(target, source, n, NULL); }
int cuMemcpyDtoD_v2(u64 target, u64 source, size_t n) { return cuMemcpyDtoDAsync_v2(target, source, n, NULL); }
int cuMemsetD8Async(u64 target, unsigned char value, size_t n, void* stream) {
  const int wrong = check(stream) ? DEAD : reach(target, n);
  return wrong ? wrong : (memset((void*)(uintptr_t)target, value, n), 0);
}
typedef struct {  // CUDA_MEMCPY2D
  size_t source_x, source_y;
  int source_type;
  const char* source_host;
  u64 source;
  void* source_array;
  size_t source_pitch, target_x, target_y;
  int target_type;
  char* target_host;
  u64 target;
  void* target_array;
  size_t target_pitch, width, height;
} Copy2D;
int cuMemcpy2DAsync_v2(const Copy2D* c, void* stream) {
  const char* from = c->source_type == 1 ? c->source_host : (char*)(uintptr_t)c->source;
  char* to = c->target_type == 1 ? c->target_host : (char*)(uintptr_t)c->target;
  from += c->source_y * c->source_pitch + c->source_x, to += c->target_y * c->target_pitch + c->target_x;
  for (size_t y = 0; y < c->height; y++) memcpy(to + y * c->target_pitch, from + y * c->source_pitch, c->width);
  return check(stream);
}

// ---- the rest

int cuInit(unsigned flags) {
  const char* gpus = getenv("FAKE_GPUS");
  if (gpus) fake_gpus = atoi(gpus);
  return 0;
}
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = fake_gpus, 0; }
int cuDeviceGet(int* gpu, int ordinal) { return *gpu = ordinal, ordinal < fake_gpus ? 0 : 101; }
int cuDeviceGetName(char* name, int n, int gpu) { return strncpy(name, "NVIDIA H200", n), 0; }
int cuDeviceComputeCapability(int* major, int* minor, int gpu) { return *major = 9, *minor = 0, 0; }
int cuDeviceGetAttribute(int* value, int which, int gpu) {
  // MAX_THREADS_PER_BLOCK, MULTIPROCESSOR_COUNT, L2_CACHE_SIZE, MAX_THREADS_PER_MULTIPROCESSOR, COMPUTE_CAPABILITY_MAJOR and _MINOR,
  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, WARP_SIZE
  static const int known[][2] = {{1, 1024}, {16, 132}, {38, 50 << 20}, {39, 2048}, {75, 9}, {76, 0}, {97, 227 << 10}, {10, 32}};
  *value = 1;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i][0] == which) *value = known[i][1];
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  return *name = code == FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : code == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE", 0;
}
int cuGetErrorString(int code, const char** text) { return cuGetErrorName(code, text); }
#define NOTHING(name) int name() { return 0; }
NOTHING(cuStreamBeginCapture_v2) NOTHING(cuStreamEndCapture) NOTHING(cuGraphLaunch) NOTHING(cuGraphInstantiateWithFlags) NOTHING(cuGraphDestroy)
NOTHING(cuGraphExecDestroy) NOTHING(cuMemHostRegister_v2) NOTHING(cuMemHostUnregister)
