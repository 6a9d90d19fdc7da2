// launch.h: what the parts of the launcher in C share. The parts are, in the order to read them:
//
// schedule.c  rows of launches, and how one call makes all of them
// turns.c     who has the interpreter's lock (the GIL) while the driver launches
// contexts.c  the driver's contexts, and which of them owns memory
// keys.c      a call written as bytes, and what is asked of torch and of PyCUDA's arrays for that
// ready.c     what stands behind a key, and its launches
// calls.c     repeated calls: of one convolution, of its gradients, of several kernels
// module.c    the module
//
// Schedules. A schedule is a row of three kinds of operations: a launch of a kernel, the recording of the event on a stream, and a stream's
// wait for the event. prepare() copies everything that stays the same from call to call. launch() fills in the buffers' addresses and the
// stream, releases the GIL and calls the driver. runtime/launcher.py describes schedules, and does the same in Python where this module is missing.
//
// Calls. Its options and the shapes, strides, types and GPU of its tensors decide a convolution of torch's tensors. key() writes all of that as
// bytes. For each key a dict holds the decision that ready() made: the schedule, how to make the result, the context. call() writes the key,
// looks it up, asks torch whether anything is unusual, allocates and launches. For all that is unusual or unknown it returns None; then Python
// makes the call, and may remember it for the next time: repeat.py. again() does the same for several kernels in a row with one or more results,
// such as a pass of a fused layer.
//
// Threads. A call releases the GIL around all its launches, because those wait where the driver's queue is full, maybe for a callback that
// needs the GIL. A call releases it once, and threads that make call after call take turns: take_again(). Questions to torch, and memory, go
// through functions that keep the GIL. Of the objects that a call makes, torch releases the GIL only to free the result.
//
// It is built without CUDA: Python passes the addresses of the driver's functions. It uses the limited API only, so one file serves Python 3.10
// and later.
#ifndef PYCUDA_CONV_LAUNCH_H
#define PYCUDA_CONV_LAUNCH_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

// Names that the parts share are not the library's: calls among the parts then are as direct as in one file.
#if defined(__GNUC__)
#pragma GCC visibility push(hidden)
#endif

// ---- module.c: what Python calls, part by part

extern PyMethodDef schedule_methods[], context_methods[], key_methods[], ready_methods[], call_methods[];

// ---- numbers

static inline void* address_of(unsigned long long number) { return (void*)(uintptr_t)number; }

// The integer of an object, such as a handle or an address of CUDA; objects with __index__ have one.
static inline int number(PyObject* object, uint64_t* to) {
  *to = PyLong_AsUnsignedLongLongMask(object);
  return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

// ---- schedule.c

typedef struct {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared;
  void* stream;
  const void* attributes;
  uint32_t attribute_count;
} LaunchConfig;

typedef int (*LaunchKernelEx)(const LaunchConfig*, void*, void**, void**);
typedef int (*EventRecord)(void*, void*);
typedef int (*StreamWaitEvent)(void*, void*, unsigned);

enum { STREAMS = 8, BUFFERS = 2048 };

typedef struct Operation Operation;

typedef struct {
  LaunchKernelEx launch;
  EventRecord record;
  StreamWaitEvent wait;
  Operation* operations;
  Py_ssize_t count, streams, buffers, bytes;
} Schedule;

extern const char SCHEDULE[];  // the name of its capsules

int stream_of(PyObject* object, void** to);
int streams_of(const Schedule* s, PyObject* own, void** streams, void** event);
int make_all(Schedule* s, const uint64_t* buffers, void* const* streams, void* event, Py_ssize_t* failed);

// ---- turns.c

int can_take_turns(void);
PyThreadState* let_go(void);
void take_again(PyThreadState* state);

// ---- contexts.c

typedef int (*GetCurrent)(void**);
typedef int (*PointerAttribute)(void*, int, uint64_t);
typedef int (*GetId)(void*, unsigned long long*);

enum { GPUS = 64, OTHERS = 64 };

// The driver's functions, and the contexts that Python knows: primary ones by their handles, which stay as long as the process runs, and others
// by their ids. A new context may get the handle of one that is gone, but never its id.
typedef struct {
  GetCurrent get_current, pop;
  int (*push)(void*);
  PointerAttribute attribute;
  GetId id;
  void* primaries[GPUS];  // by the GPU's number
  uint64_t others[OTHERS];
  int next;  // where the next id goes
} Driver;

extern Driver cuda;

static inline int primary_number(const void* context) {
  for (int i = 0; i < GPUS; i++)
    if (context && cuda.primaries[i] == context) return i;
  return -1;
}

uint64_t current_id(void);
void* owner_of(uint64_t address);
int tell_context(void* context, long* gpu, uint64_t* id);

// ---- keys.c

enum { OPERANDS = 5, KEY_BYTES = 2048, MOST_RESULTS = 4 };

// DLPack's structures, as version 1 of its header has them.
typedef struct {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct Managed {
  uint32_t major, minor;
  void* context;
  void (*free)(struct Managed*);
  uint64_t flags;
  DLTensor tensor;
} Managed;

typedef int (*Allocate)(DLTensor*, Managed**, void*, void (*)(void*, const char*, const char*));

typedef struct {
  uint32_t major, minor;
  void* previous;
  Allocate allocate;
  void *managed_from_object, *managed_to_object;
  int (*tensor_from_object)(void*, DLTensor*);
  void* current_stream;
} DLPackExchange;

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2, DLPACK_UINT = 1 };

// Functions and names of torch's, set once by learn().
typedef struct {
  PyObject *tensor, *parameter;                                                  // the classes whose objects are plain tensors
  PyObject *pointer, *strides, *ordinal, *marked, *made_in_inference;            // functions of a tensor; marked: negated on reading, say
  PyObject *differentiates, *announce;                                           // is_grad_enabled(); tells of a write to tensors
  PyObject *states, *levels;                                                     // functions that are true if something is unusual; a dict
  PyObject *name_shape, *name_type, *name_requires_grad, *name_level, *name_needs, *name_again, *name_known;
  long least;  // the lowest ordinal of a GPU
  int (*read)(void*, DLTensor*);  // a tensor's description, where torch offers such a function; NULL where it has to be asked piece by piece
  Allocate allocate;              // memory without a Python object, where torch offers that; otherwise NULL
} Torch;

// The class of PyCUDA's arrays, and the names of what is read of them, set once by learn_arrays().
typedef struct {
  PyObject *type, *name_memory, *name_shape, *name_strides, *name_type, *name_known;
} Arrays;

extern Torch torch;
extern Arrays arrays;
extern int stopped;  // in a forked child

typedef struct {
  uint64_t words[KEY_BYTES / 8];
  size_t used;
} Key;

static inline int is_array(PyObject* object) { return arrays.type && (PyObject*)Py_TYPE(object) == arrays.type; }

static inline long place_of(const DLTensor* t) { return t->device_type == DLPACK_CUDA ? t->device_id : -1; }

int is_true(PyObject* function, PyObject* object);
int pointer_of(PyObject* tensor, uint64_t* to, long* place);
int address_in(PyObject* memory, uint64_t* address);
int put_call(Key* key, PyObject* options, PyObject* const* tensors, Py_ssize_t n, uint64_t* addresses);
PyObject* key_bytes(const Key* key);

// ---- ready.c

enum { ROW_BUFFERS = 32 };
enum { INPUT, WEIGHT, BIAS, RESULT, WORKSPACE, PACKED, SCALE, RESIDUAL };  // buffers

typedef struct {  // a function with its arguments: (function, tuple, dict or None)
  PyObject *function, *args, *keywords;
} Maker;

typedef struct {
  PyObject *schedule, *own;  // own() -> the calling thread's event and side streams; None where the schedule needs none
  PyObject *stream, *ordinal, *failed, *recorded, *kept;
  void* context;
  Maker results[MOST_RESULTS], workspace;
  Py_ssize_t operands, result_count;
  int64_t left;  // calls until Python has to make one, because it counts them or has better kernels; below 0: any number
  int64_t workspace_bytes;
  long place;       // the GPU's number
  uint64_t packed, packed_at;  // the packed filter's address, or its offset in the workspace
  uint64_t operand_bytes[OPERANDS], result_bytes;
} Ready;

extern const char READY[];  // the name of its capsules

PyObject* find(PyObject* table, const Key* key);
int perform(const Ready* r, uint64_t* buffers, PyObject** results, PyObject* like);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#endif
