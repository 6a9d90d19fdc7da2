// A libcuda that runs nothing and writes down what it is asked, for tests on machines without a GPU.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

char fake_log[1 << 22];
size_t fake_length;
int fake_failing = -1;  // the number of the call that fails, counted from 0
volatile int fake_blocked;  // launches wait while this is set
volatile int fake_waiting;  // how many do
static __thread void* contexts[64];  // a thread's, the current one last
static __thread int depth;

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
  if (fake_failing >= 0) code = fake_failing-- ? 0 : 719;  // CUDA_ERROR_LAUNCH_FAILED
  pthread_mutex_unlock(&lock);
  return code;
}

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
  if (parameters || extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4]) return 1;
  pthread_mutex_lock(&lock);
  NOTE("launch %p of %u %u %u, %u %u %u, %u on %p,", f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream);
  note_bytes(c->attributes, c->attribute_count * 72);
  NOTE(", takes");
  note_bytes(extra[1], *(size_t*)extra[3]);
  NOTE("\n");
  return noted();
}
int cuEventRecord(void* event, void* stream) { return pthread_mutex_lock(&lock), NOTE("record %p on %p\n", event, stream), noted(); }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) { return pthread_mutex_lock(&lock), NOTE("%p waits for %p, %u\n", stream, event, flags), noted(); }

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

static uintptr_t hash(const char* text, uintptr_t h) {
  for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3;
  return h & 0xffffffffffff;
}
int cuModuleLoadData(void** module, const char* image) { return *module = (void*)hash(image, 0xcbf29ce484222325), 0; }
int cuModuleGetFunction(void** f, void* module, const char* name) { return *f = (void*)hash(name, (uintptr_t)module), 0; }
int cuFuncGetParamInfo(void* f, size_t i, size_t* offset, size_t* size) { return *offset = 64, *size = 128, 0; }
int cuFuncGetAttribute(int* value, int which, void* f) { return *value = 32, 0; }
int cuFuncSetAttribute(void* f, int which, int value) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* f, int block, size_t shared) { return *blocks = 1, 0; }
int cuEventCreate(void** event, unsigned flags) {
  static uintptr_t last = 0x9000;
  return *event = (void*)(last += 16), 0;
}
int cuStreamIsCapturing(void* stream, int* state) { return *state = stream == (void*)0xca9, 0; }
int cuCtxGetCurrent(void** context) { return *context = depth ? contexts[depth - 1] : 0, 0; }
static void note_context(const char* what) { pthread_mutex_lock(&lock), NOTE("%s\n", what), pthread_mutex_unlock(&lock); }
int cuCtxPushCurrent_v2(void* context) { return note_context("push"), contexts[depth++] = context, 0; }
int cuCtxPopCurrent_v2(void** context) { return note_context("pop"), *context = contexts[--depth], 0; }
int cuGetErrorName(int code, const char** name) { return *name = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_INVALID_VALUE", 0; }
#define NOTHING(name) int name() { return 0; }
NOTHING(cuMemHostAlloc) NOTHING(cuMemFreeHost) NOTHING(cuPointerGetAttribute) NOTHING(cuStreamBeginCapture_v2) NOTHING(cuStreamEndCapture)
NOTHING(cuGraphLaunch) NOTHING(cuGraphInstantiateWithFlags) NOTHING(cuGraphDestroy) NOTHING(cuGraphExecDestroy)
