// _launch.c: makes all launches of a schedule in one call from Python, and repeated calls of the package in one call.
//
// Schedules. A schedule is a row of three kinds of operations: a launch of a kernel, the recording of the event on a stream, and a stream's
// wait for the event. prepare() copies everything that stays the same from call to call. launch() fills in the buffers' addresses and the
// stream, releases the GIL and calls the driver. runtime/launcher.py describes schedules, and does the same in Python where this module is missing.
//
// Calls. Its options and the shapes, strides, types and GPU of its tensors decide a convolution of torch's tensors. key() writes all of that as
// bytes. For each key a dict holds the decision that ready() made: the schedule, how to make the result, the context. call() writes the key,
// looks it up, asks torch whether anything is unusual, allocates and launches. For all that is unusual or unknown it returns None; then Python
// makes the call, and may remember it for the next time: quick.py. again() does the same for several kernels in a row with one or more results,
// such as a pass of a fused layer.
//
// Threads. A call releases the GIL around all its launches, because those wait where the driver's queue is full, maybe for a callback that
// needs the GIL. A call releases it once, and threads that make call after call take turns: take_again(). Questions to torch, and memory, go
// through functions that keep the GIL. Of the objects that a call makes, torch releases the GIL only to free the result.
//
// It is built without CUDA: Python passes the addresses of the driver's functions. It uses the limited API only, so one file serves Python 3.10
// and later.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared;
  void* stream;
  const void* attributes;
  uint32_t attribute_count;
} LaunchConfig;

typedef int (*LaunchKernelEx)(const LaunchConfig*, void*, void**, void**);
typedef int (*EventRecord)(void*, void*);
typedef int (*StreamWaitEvent)(void*, void*, unsigned);
typedef int (*GetCurrent)(void**);

enum { LAUNCH, RECORD, WAIT };  // kinds of operations
enum { MAP_BYTES = 128, STREAMS = 8, BUFFERS = 2048, ROW_BUFFERS = 32, USUAL_BYTES = 4096 };

typedef struct {  // where in the parameters an address goes, or the tensor map of an address
  Py_ssize_t at, buffer;
  uint64_t offset;
} Place;

typedef struct {
  Place place;
  PyObject* encode;  // address -> the map's bytes
  uint64_t address;  // the address of the map in the parameters; no array lies at 0
} Map;

typedef struct {
  int kind;
  Py_ssize_t stream;  // 0: the caller's; others: side streams
  void* function;
  LaunchConfig config;
  uint8_t* parameters;
  size_t bytes;
  Py_ssize_t room;  // offset of the parameters in a call's own memory
  Place* places;
  Map* maps;
  Py_ssize_t place_count, map_count;
} Operation;

typedef struct {
  LaunchKernelEx launch;
  EventRecord record;
  StreamWaitEvent wait;
  Operation* operations;
  Py_ssize_t count, streams, buffers, bytes;
} Schedule;

static const char SCHEDULE[] = "pycuda_conv.runtime._launch.schedule";

static void* address_of(unsigned long long number) { return (void*)(uintptr_t)number; }

static void free_schedule(Schedule* s) {
  for (Py_ssize_t i = 0; s->operations && i < s->count; i++) {
    Operation* op = &s->operations[i];
    for (Py_ssize_t m = 0; op->maps && m < op->map_count; m++) Py_XDECREF(op->maps[m].encode);
    PyMem_Free(op->maps);
    PyMem_Free(op->places);
    PyMem_Free(op->parameters);
  }
  PyMem_Free(s->operations);
  PyMem_Free(s);
}

static void forget(PyObject* capsule) { free_schedule(PyCapsule_GetPointer(capsule, SCHEDULE)); }

static int check_place(const Place* place, Py_ssize_t room, size_t bytes) {
  if (place->buffer >= 0 && place->buffer < BUFFERS && place->at >= 0 && (size_t)(place->at + room) <= bytes) return 0;
  PyErr_SetString(PyExc_ValueError, "a place lies outside of the parameters");
  return -1;
}

// A launch: (0, stream, function, grid, block, shared, attributes, attribute count, parameters, places, maps)
static int read_launch(PyObject* from, Operation* op) {
  unsigned long long function, attributes;
  unsigned grid, block, shared, attribute_count;
  const char* parameters;
  Py_ssize_t bytes;
  PyObject *places, *maps;
  if (!PyArg_ParseTuple(from, "inKIIIKIy#O!O!", &op->kind, &op->stream, &function, &grid, &block, &shared, &attributes, &attribute_count,
                        &parameters, &bytes, &PyTuple_Type, &places, &PyTuple_Type, &maps))
    return -1;
  op->function = address_of(function);
  op->config = (LaunchConfig){{grid, 1, 1}, {block, 1, 1}, shared, NULL, address_of(attributes), attribute_count};
  op->bytes = (size_t)bytes;
  op->place_count = PyTuple_Size(places), op->map_count = PyTuple_Size(maps);
  op->parameters = PyMem_Calloc(op->bytes + 1, 1);
  op->places = PyMem_Calloc(op->place_count + 1, sizeof *op->places);
  op->maps = PyMem_Calloc(op->map_count + 1, sizeof *op->maps);
  if (!op->parameters || !op->places || !op->maps) return PyErr_NoMemory(), -1;
  memcpy(op->parameters, parameters, op->bytes);
  for (Py_ssize_t i = 0; i < op->place_count; i++) {
    Place* place = &op->places[i];
    unsigned long long offset;
    if (!PyArg_ParseTuple(PyTuple_GetItem(places, i), "nnK", &place->at, &place->buffer, &offset)) return -1;
    place->offset = offset;
    if (check_place(place, sizeof(uint64_t), op->bytes)) return -1;
  }
  for (Py_ssize_t i = 0; i < op->map_count; i++) {
    Map* map = &op->maps[i];
    unsigned long long offset;
    if (!PyArg_ParseTuple(PyTuple_GetItem(maps, i), "nnKO", &map->place.at, &map->place.buffer, &offset, &map->encode)) {
      map->encode = NULL;
      return -1;
    }
    Py_INCREF(map->encode);
    map->place.offset = offset;
    if (check_place(&map->place, MAP_BYTES, op->bytes)) return -1;
  }
  return 0;
}

// prepare((cuLaunchKernelEx, cuEventRecord, cuStreamWaitEvent), operations) -> schedule
//
// Operations are launches, recordings (1, stream) and waits (2, stream).
static PyObject* prepare(PyObject* self, PyObject* args) {
  unsigned long long launch, record, wait;
  PyObject* operations;
  if (!PyArg_ParseTuple(args, "(KKK)O!", &launch, &record, &wait, &PyTuple_Type, &operations)) return NULL;
  Schedule* s = PyMem_Calloc(1, sizeof *s);
  if (!s) return PyErr_NoMemory();
  s->launch = (LaunchKernelEx)address_of(launch);
  s->record = (EventRecord)address_of(record);
  s->wait = (StreamWaitEvent)address_of(wait);
  s->count = PyTuple_Size(operations);
  s->operations = PyMem_Calloc(s->count + 1, sizeof *s->operations);
  if (!s->operations) {
    PyErr_NoMemory();
    goto failed;
  }
  for (Py_ssize_t i = 0; i < s->count; i++) {
    PyObject* from = PyTuple_GetItem(operations, i);
    Operation* op = &s->operations[i];
    if (PyTuple_Check(from) && PyTuple_Size(from) == 2) {
      if (!PyArg_ParseTuple(from, "in", &op->kind, &op->stream)) goto failed;
    } else if (!PyTuple_Check(from) || read_launch(from, op)) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "operations must be tuples");
      goto failed;
    }
    if (op->kind < LAUNCH || op->kind > WAIT || (op->kind == LAUNCH) != (op->parameters != NULL) || op->stream < 0 || op->stream >= STREAMS) {
      PyErr_SetString(PyExc_ValueError, "an operation is of no known kind, or on a stream that is none");
      goto failed;
    }
    if (op->stream >= s->streams) s->streams = op->stream + 1;
    for (Py_ssize_t j = 0; j < op->place_count; j++)
      if (op->places[j].buffer >= s->buffers) s->buffers = op->places[j].buffer + 1;
    for (Py_ssize_t j = 0; j < op->map_count; j++)
      if (op->maps[j].place.buffer >= s->buffers) s->buffers = op->maps[j].place.buffer + 1;
    op->room = s->bytes;
    s->bytes += (Py_ssize_t)((op->bytes + 63) & ~(size_t)63);
  }
  PyObject* capsule = PyCapsule_New(s, SCHEDULE, forget);
  if (capsule) return capsule;
failed:
  free_schedule(s);
  return NULL;
}

// The integer of an object, such as a handle or an address of CUDA; objects with __index__ have one.
static int number(PyObject* object, uint64_t* to) {
  *to = PyLong_AsUnsignedLongLongMask(object);
  return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

// The handle of a stream: 0 for None, which is the default stream; an int itself; that of a stream of PyCUDA.
static int stream_of(PyObject* object, void** to) {
  uint64_t handle = 0;
  int code = 0;
  if (PyLong_Check(object)) {
    code = number(object, &handle);
  } else if (object != Py_None) {
    PyObject* found = PyObject_GetAttrString(object, "handle");
    code = found ? number(found, &handle) : -1;
    Py_XDECREF(found);
  }
  *to = address_of(handle);
  return code;
}

// Write the parameters of a launch to `room`. Other threads may do so too whenever Python runs, as it does in `encode`. So each call has its own
// memory, and a map goes to the schedule's memory and the call's at once.
static int fill(Operation* op, const uint64_t* buffers, uint8_t* room) {
  memcpy(room, op->parameters, op->bytes);
  for (Py_ssize_t i = 0; i < op->place_count; i++) {
    const uint64_t address = buffers[op->places[i].buffer] + op->places[i].offset;
    memcpy(room + op->places[i].at, &address, sizeof address);
  }
  for (Py_ssize_t i = 0; i < op->map_count; i++) {
    Map* map = &op->maps[i];
    uint8_t *kept = op->parameters + map->place.at, *ours = room + map->place.at;
    const uint64_t address = buffers[map->place.buffer] + map->place.offset;
    if (address == map->address) {
      memcpy(ours, kept, MAP_BYTES);
      continue;
    }
    PyObject* number = PyLong_FromUnsignedLongLong(address);
    PyObject* encoded = number ? PyObject_CallFunctionObjArgs(map->encode, number, NULL) : NULL;
    char* bytes;
    Py_ssize_t n;
    Py_XDECREF(number);
    if (!encoded || PyBytes_AsStringAndSize(encoded, &bytes, &n) || n != MAP_BYTES) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a tensor map has 128 bytes");
      Py_XDECREF(encoded);
      return -1;
    }
    memcpy(ours, bytes, MAP_BYTES);
    memcpy(kept, bytes, MAP_BYTES);
    map->address = address;
    Py_DECREF(encoded);
  }
  return 0;
}

// Make the operations. Returns 0, or the driver's error with the number of the operation that failed. After an error the caller's stream waits for
// the side streams: what was launched may still use memory that it gives back.
static int run(const Schedule* s, uint8_t* room, void* const* streams, void* event, Py_ssize_t* failed) {
  unsigned forked = 0;  // a bit for each side stream that the caller's does not wait for yet
  int recorded = 0;     // the stream whose work the event stands for
  for (Py_ssize_t i = 0; i < s->count; i++) {
    const Operation* op = &s->operations[i];
    int code;
    if (op->kind == LAUNCH) {
      LaunchConfig config = op->config;
      config.stream = streams[op->stream];
      size_t bytes = op->bytes;
      // CU_LAUNCH_PARAM_BUFFER_POINTER and where, CU_LAUNCH_PARAM_BUFFER_SIZE and where, CU_LAUNCH_PARAM_END
      void* extra[] = {(void*)1, room + op->room, (void*)2, &bytes, NULL};
      code = s->launch(&config, op->function, NULL, extra);
    } else if (op->kind == RECORD) {
      code = s->record(event, streams[op->stream]);
      recorded = op->stream;
    } else {
      code = s->wait(streams[op->stream], event, 0);
      if (!code) forked = op->stream ? forked | 1u << op->stream : forked & ~(1u << recorded);
    }
    if (code) {
      for (int side = 1; side < STREAMS; side++)
        if (forked >> side & 1 && !s->record(event, streams[side])) s->wait(streams[0], event, 0);
      *failed = i;
      return code;
    }
  }
  return 0;
}

// ---- the GIL while the driver launches

#if defined(_MSC_VER)
#include <intrin.h>
typedef volatile long Flag;
#define SET(flag, value) _InterlockedExchange(flag, value)
#define TAKE(flag) (_InterlockedCompareExchange(flag, 1, 0) == 0)
#define ADD(flag, value) _InterlockedExchangeAdd(flag, value)
#define PAUSE() _ReadWriteBarrier()
typedef volatile int64_t Number;
#define GET(number) (number)
#define PUT(number, value) ((number) = (value))
#define THREAD_LOCAL __declspec(thread)
#else
typedef int Flag;
typedef int64_t Number;
#define GET(number) __atomic_load_n(&(number), __ATOMIC_RELAXED)
#define PUT(number, value) __atomic_store_n(&(number), value, __ATOMIC_RELAXED)
#define THREAD_LOCAL __thread
#define SET(flag, value) __atomic_store_n(flag, value, __ATOMIC_RELEASE)
#define TAKE(flag) (__atomic_load_n(flag, __ATOMIC_RELAXED) == 0 && __atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE) == 0)
#define ADD(flag, value) __atomic_fetch_add(flag, value, __ATOMIC_RELAXED)
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __atomic_signal_fence(__ATOMIC_SEQ_CST)
#endif
#endif

// Threads take turns. To hand over the GIL at each call takes longer than a launch: the next thread sleeps and has to be woken, and the objects
// move to its core. So for a turn one thread takes the GIL back after each of its launches. The other threads, back from their launches, wait
// without the GIL. One of them is awake and has the next turn; the rest sleep for `next_turn`. A waiting thread holds that lock, but never while
// the driver is called. Every wait ends by the clock, so no signal can be missed: when the turn is over, when its thread has not been back from
// a launch for a while, or when that thread waits for the driver.
//
// A thread may also release the GIL elsewhere in its turn. One does while it waits for torch's engine, which launches a backward pass from
// another thread. A thread that has the GIL then takes the turn at once if no other thread waits for it.
enum {
  TURN_NS = 200000,   // length of a turn, while others wait
  AWAY_NS = 20000,    // a thread that was not back from a launch for so long does something else
  LAUNCH_NS = 10000,  // a longer launch waits for the driver
};

static Flag turn = 1;                 // number of the turn
static Flag on_the_way;               // 0 while a thread that has released the GIL is in a launch; 1 from when it takes the GIL back
static Flag waiting;                  // number of threads that wait for their turn
static int is_back;                   // whether the thread that launched last has had the GIL again; read and written with the GIL
static Flag met;                      // number of times that threads came back from launches in their turns
static Number begun;                  // when the turn began
static THREAD_LOCAL long own_turn;    // the last turn of this thread
static PyThread_type_lock next_turn;  // its holder has the next turn

static int64_t now(void) {
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Whether the time from `since` to `until` is at most `most`; 0 also where the clock was set back in between.
static int lasts(int64_t since, int64_t until, int64_t most) { return until - since >= 0 && until - since <= most; }

static void take_turn(void) {
  own_turn = ADD(&turn, 1) + 1;
  PUT(begun, now());
}

static PyThreadState* let_go(void) {
  if (is_back && GET(turn) != own_turn && !GET(waiting)) take_turn();
  is_back = 0;
  PyThreadState* state = PyEval_SaveThread();
  SET(&on_the_way, 0);
  return state;
}

// Wait until the turn is over, or its thread does something else or waits for the driver.
static void wait_for_turn(void) {
  int64_t t = now(), last = t;
  long before = -1;
  for (;;) {
    const int launching = !GET(on_the_way);
    const long found = 2L * GET(met) + launching;
    if (found != before) before = found, last = t;
    if (launching && !(lasts(GET(begun), t, TURN_NS) && lasts(last, t, LAUNCH_NS)) && TAKE(&on_the_way)) return;
    if (!launching && !lasts(last, t, AWAY_NS)) return;
    for (int i = 0; i < 8; i++) PAUSE();
    t = now();
  }
}

static void take_again(PyThreadState* state) {
  if (GET(turn) == own_turn && TAKE(&on_the_way)) {
    ADD(&met, 1);
    PyEval_RestoreThread(state);
  } else {
    ADD(&waiting, 1);
    PyThread_acquire_lock(next_turn, 1);
    wait_for_turn();
    take_turn();
    PyThread_release_lock(next_turn);
    ADD(&waiting, -1);
    PyEval_RestoreThread(state);
    SET(&on_the_way, 1);
  }
  is_back = 1;
}

// Make all operations without the GIL. Returns 0; or the driver's error, with the number of the operation that failed; or -1 with Python's error set.
static int make_all(Schedule* s, const uint64_t* buffers, void* const* streams, void* event, Py_ssize_t* failed) {
  union {
    uint8_t bytes[USUAL_BYTES];
    long double aligned;
  } usual;
  uint8_t* room = s->bytes <= USUAL_BYTES ? usual.bytes : PyMem_Malloc(s->bytes);
  int code = -1;
  if (!room) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < s->count; i++)
    if (s->operations[i].kind == LAUNCH && fill(&s->operations[i], buffers, room + s->operations[i].room)) goto done;
  PyThreadState* state = let_go();
  code = run(s, room, streams, event, failed);
  take_again(state);
done:
  if (room != usual.bytes) PyMem_Free(room);
  return code;
}

// The calling thread's event and side streams, from `own`; the schedule needs none if that is None.
static int streams_of(const Schedule* s, PyObject* own, void** streams, void** event) {
  Py_ssize_t known = 1;
  if (own != Py_None) {
    uint64_t handle;
    PyObject* first = PyTuple_GetItem(own, 0);
    if (!first || number(first, &handle)) return -1;
    *event = address_of(handle);
    for (; known < STREAMS && known < PyTuple_Size(own); known++) {
      if (number(PyTuple_GetItem(own, known), &handle)) return -1;
      streams[known] = address_of(handle);
    }
  }
  if (s->streams <= known) return 0;
  PyErr_Format(PyExc_ValueError, "the schedule takes %zd streams, got %zd", s->streams, known);
  return -1;
}

// launch(schedule, buffers, stream, own) -> None, or (the driver's error, the number of the operation that failed)
static PyObject* launch(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n != 4) return PyErr_Format(PyExc_TypeError, "launch takes 4 arguments, got %zd", n);
  Schedule* s = PyCapsule_GetPointer(args[0], SCHEDULE);
  void *event = NULL, *streams[STREAMS];
  Py_ssize_t failed = 0;
  uint64_t addresses[BUFFERS];
  if (!s || stream_of(args[2], &streams[0]) || streams_of(s, args[3], streams, &event)) return NULL;
  PyObject* buffers = PySequence_Tuple(args[1]);
  if (!buffers) return NULL;
  int wrong = 0;
  if (PyTuple_Size(buffers) < s->buffers) {
    PyErr_Format(PyExc_IndexError, "the schedule takes %zd buffers, got %zd", s->buffers, PyTuple_Size(buffers));
    wrong = 1;
  }
  for (Py_ssize_t i = 0; !wrong && i < s->buffers; i++) wrong = number(PyTuple_GetItem(buffers, i), &addresses[i]);
  Py_DECREF(buffers);
  const int code = wrong ? -1 : make_all(s, addresses, streams, event, &failed);
  if (code < 0) return NULL;
  return code ? Py_BuildValue("(in)", code, failed) : Py_BuildValue("");
}

// is_current(cuCtxGetCurrent, context) -> whether the context is the calling thread's current one
static PyObject* is_current(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  uint64_t function, context;
  void* current = NULL;
  if (n != 2) return PyErr_Format(PyExc_TypeError, "is_current takes 2 arguments, got %zd", n);
  if (number(args[0], &function) || number(args[1], &context)) return NULL;
  const int code = ((GetCurrent)address_of(function))(&current);
  return PyBool_FromLong(!code && current == address_of(context));
}

// ---- contexts

typedef int (*PointerAttribute)(void*, int, uint64_t);
typedef int (*GetId)(void*, unsigned long long*);

enum { GPUS = 64, OTHERS = 64, OWNER = 1 };  // OWNER: CU_POINTER_ATTRIBUTE_CONTEXT

// The driver's functions, and the contexts that Python knows: primary ones by their handles, which stay as long as the process runs, and others
// by their ids. A new context may get the handle of one that is gone, but never its id.
static struct {
  GetCurrent get_current, pop;
  int (*push)(void*);
  PointerAttribute attribute;
  GetId id;
  void* primaries[GPUS];  // by the GPU's number
  uint64_t others[OTHERS];
  int next;  // where the next id goes
} cuda;

static int primary_number(const void* context) {
  for (int i = 0; i < GPUS; i++)
    if (context && cuda.primaries[i] == context) return i;
  return -1;
}

static uint64_t current_id(void) {
  unsigned long long id;
  return cuda.id && !cuda.id(NULL, &id) ? id : 0;
}

// The context that owns the memory at an address; NULL where there is none, as for the host's memory.
static void* owner_of(uint64_t address) {
  void* owner = NULL;
  return cuda.attribute && !cuda.attribute(&owner, OWNER, address) ? owner : NULL;
}

// What tells a context from all others: the number of the GPU whose primary one it is, or -1 and the id of the current one. -1 if it is neither.
static int tell_context(void* context, long* gpu, uint64_t* id) {
  void* current;
  *id = 0, *gpu = primary_number(context);
  if (*gpu >= 0) return 0;
  return !context || cuda.get_current(&current) || current != context || !(*id = current_id()) ? -1 : 0;
}

// drive(cuCtxGetCurrent, cuCtxPushCurrent, cuCtxPopCurrent, cuPointerGetAttribute, cuCtxGetId or 0)
static PyObject* drive(PyObject* self, PyObject* args) {
  unsigned long long get_current, push, pop, attribute, id;
  if (!PyArg_ParseTuple(args, "KKKKK", &get_current, &push, &pop, &attribute, &id)) return NULL;
  if (cuda.get_current != (GetCurrent)address_of(get_current)) memset(&cuda, 0, sizeof cuda);  // another driver, as tests have
  cuda.get_current = (GetCurrent)address_of(get_current), cuda.pop = (GetCurrent)address_of(pop);
  cuda.push = (int (*)(void*))address_of(push);
  cuda.attribute = (PointerAttribute)address_of(attribute);
  cuda.id = (GetId)address_of(id);
  return Py_BuildValue("");
}

static PyObject* checked(const char* what, int code) {
  return code ? PyErr_Format(PyExc_RuntimeError, "%s failed (%d)", what, code) : Py_BuildValue("");
}

// push(context): make it current
static PyObject* push(PyObject* self, PyObject* context) {
  uint64_t handle;
  return number(context, &handle) ? NULL : checked("cuCtxPushCurrent", cuda.push(address_of(handle)));
}

// pop(): make the context current that was so before
static PyObject* pop(PyObject* self, PyObject* nothing) {
  void* context;
  return checked("cuCtxPopCurrent", cuda.pop(&context));
}

// primary(number of a GPU, handle): its primary context
static PyObject* primary(PyObject* self, PyObject* args) {
  int gpu;
  unsigned long long handle;
  if (!PyArg_ParseTuple(args, "iK", &gpu, &handle)) return NULL;
  if (gpu >= 0 && gpu < GPUS) cuda.primaries[gpu] = address_of(handle);
  return Py_BuildValue("");
}

// other(id): a context that is no primary one
static PyObject* other(PyObject* self, PyObject* args) {
  unsigned long long id;
  if (!PyArg_ParseTuple(args, "K", &id)) return NULL;
  cuda.others[cuda.next++ % OTHERS] = id;
  return Py_BuildValue("");
}

// doubtful() -> whether a context is current that is no primary one, as far as Python knows
static PyObject* doubtful(PyObject* self, PyObject* nothing) {
  void* current = NULL;
  return PyBool_FromLong(!cuda.get_current(&current) && current && primary_number(current) < 0);
}

// has_id(id) -> whether the current context has that id
static PyObject* has_id(PyObject* self, PyObject* args) {
  unsigned long long id;
  if (!PyArg_ParseTuple(args, "K", &id)) return NULL;
  return PyBool_FromLong(id && current_id() == id);
}

// where(address) -> (number of the GPU whose primary context has the memory, 0) or (-1, id of the current context, which has it); None where Python
// has to find out
static PyObject* where(PyObject* self, PyObject* pointer) {
  uint64_t address, id;
  long gpu;
  if (number(pointer, &address)) return NULL;
  if (tell_context(owner_of(address), &gpu, &id)) return Py_BuildValue("");
  for (int i = 0; gpu < 0 && i < OTHERS; i++)
    if (cuda.others[i] == id) return Py_BuildValue("lK", gpu, (unsigned long long)id);
  return gpu < 0 ? Py_BuildValue("") : Py_BuildValue("lK", gpu, 0ULL);
}

// ---- calls

enum { OPERANDS = 5, AXES = 8, KEY_BYTES = 2048, DEPTH = 4, MOST_RESULTS = 4 };
enum { INPUT, WEIGHT, BIAS, RESULT, WORKSPACE, PACKED, SCALE, RESIDUAL };       // buffers
static const int BUFFER_OF[OPERANDS] = {INPUT, WEIGHT, BIAS, SCALE, RESIDUAL};  // operands in the order of call()'s arguments

static const char READY[] = "pycuda_conv.runtime._launch.ready";

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
static struct {
  PyObject *tensor, *parameter;                                                  // the classes whose objects are plain tensors
  PyObject *pointer, *strides, *ordinal, *marked, *made_in_inference;            // functions of a tensor; marked: negated on reading, say
  PyObject *differentiates, *announce;                                           // is_grad_enabled(); tells of a write to tensors
  PyObject *states, *levels;                                                     // functions that are true if something is unusual; a dict
  PyObject *name_shape, *name_type, *name_requires_grad, *name_level, *name_needs, *name_again, *name_known;
  long least;  // the lowest ordinal of a GPU
  int (*read)(void*, DLTensor*);  // a tensor's description, where torch offers such a function; NULL where it has to be asked piece by piece
  Allocate allocate;              // memory without a Python object, where torch offers that; otherwise NULL
} torch;
static int stopped;  // in a forked child

typedef struct {
  uint64_t words[KEY_BYTES / 8];
  size_t used;
} Key;

static int put(Key* key, uint64_t word) {
  if (key->used == KEY_BYTES / 8) return -1;
  key->words[key->used++] = word;
  return 0;
}

// An option: None, an integer, a float, a word, or a row of those. -1 for anything else, for which an exception may be set.
static int put_option(Key* key, PyObject* value, int depth) {
  if (value == Py_None) return put(key, 'N');
  if (PyLong_CheckExact(value)) {
    const long long number = PyLong_AsLongLong(value);
    return (number == -1 && PyErr_Occurred()) || put(key, 'I') || put(key, (uint64_t)number) ? -1 : 0;
  }
  if (PyFloat_CheckExact(value)) {
    const double number = PyFloat_AsDouble(value);
    uint64_t word;
    memcpy(&word, &number, sizeof word);
    return put(key, 'F') || put(key, word) ? -1 : 0;
  }
  if (PyUnicode_CheckExact(value)) {
    Py_ssize_t n;
    const char* text = PyUnicode_AsUTF8AndSize(value, &n);
    if (!text || n > 64 || put(key, 'U') || put(key, (uint64_t)n)) return -1;
    for (Py_ssize_t i = 0; i < n; i += 8) {
      uint64_t word = 0;
      memcpy(&word, text + i, n - i < 8 ? (size_t)(n - i) : 8);
      if (put(key, word)) return -1;
    }
    return 0;
  }
  const int list = PyList_Check(value);
  if (!depth || (!list && !PyTuple_Check(value))) return -1;
  const Py_ssize_t n = list ? PyList_Size(value) : PyTuple_Size(value);
  if (put(key, 'T') || put(key, (uint64_t)n)) return -1;
  for (Py_ssize_t i = 0; i < n; i++)
    if (put_option(key, list ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i), depth - 1)) return -1;
  return 0;
}

static int put_row(Key* key, PyObject* row) {
  if (!row || !PyTuple_Check(row) || PyTuple_Size(row) > AXES || put(key, (uint64_t)PyTuple_Size(row))) return -1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(row); i++) {
    const long long number = PyLong_AsLongLong(PyTuple_GetItem(row, i));
    if ((number == -1 && PyErr_Occurred()) || put(key, (uint64_t)number)) return -1;
  }
  return 0;
}

// Whether `function(object)` is true; -1 with an exception.
static int is_true(PyObject* function, PyObject* object) {
  PyObject* answer = PyObject_CallFunctionObjArgs(function, object, NULL);
  const int truth = answer ? (answer == Py_False || answer == Py_None ? 0 : PyObject_IsTrue(answer)) : -1;
  Py_XDECREF(answer);
  return truth;
}

static long place_of(const DLTensor* t) { return t->device_type == DLPACK_CUDA ? t->device_id : -1; }

static int pointer_of(PyObject* tensor, uint64_t* to, long* place) {
  DLTensor t;
  if (torch.read) {
    if (torch.read(tensor, &t)) return -1;
    *to = (uint64_t)(uintptr_t)t.data + t.byte_offset;
    *place = place_of(&t);
    return 0;
  }
  PyObject* answer = PyObject_CallFunctionObjArgs(torch.ordinal, tensor, NULL);
  *place = answer ? PyLong_AsLong(answer) : -1;
  Py_XDECREF(answer);
  answer = PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(torch.pointer, tensor, NULL);
  const int code = answer ? number(answer, to) : -1;
  Py_XDECREF(answer);
  return code;
}

// put_tensor() for a plain tensor that torch describes by `read`.
static int put_read_tensor(Key* key, PyObject* tensor, uint64_t* address) {
  DLTensor t;
  if (torch.read(tensor, &t) || t.ndim > AXES || !t.strides || is_true(torch.marked, tensor)) return -1;
  const long ordinal = place_of(&t);
  const size_t words = 3 + 2 * (size_t)t.ndim;
  if (ordinal < torch.least || key->used + words + 1 > KEY_BYTES / 8) return -1;
  *address = (uint64_t)(uintptr_t)t.data + t.byte_offset;
  if (!*address) return -1;  // a storage that was freed; arrays without elements are not convolved
  uint64_t* to = key->words + key->used;
  to[0] = 'A' | (uint64_t)(*address % 16) << 8 | (uint64_t)t.ndim << 16;
  to[1] = (uint64_t)ordinal;
  to[2] = (uint64_t)t.code << 32 | (uint64_t)t.bits << 16 | t.lanes;
  memcpy(to + 3, t.shape, 8 * (size_t)t.ndim);
  memcpy(to + 3 + t.ndim, t.strides, 8 * (size_t)t.ndim);
  key->used += words;
  return 0;
}

// Write a tensor, or None, to the key: shape, strides, type, GPU and whether it is aligned; and its address. -1 if it is not a plain one.
static int put_tensor(Key* key, PyObject* tensor, uint64_t* address) {
  *address = 0;
  if (tensor == Py_None) return put(key, 'N');
  PyObject* type = (PyObject*)Py_TYPE(tensor);
  if (type != torch.tensor && type != torch.parameter) return -1;
  if (torch.read) return put_read_tensor(key, tensor, address);
  long ordinal;
  if (pointer_of(tensor, address, &ordinal) || !*address || ordinal < torch.least || is_true(torch.marked, tensor)) return -1;
  PyObject* dtype = PyObject_GetAttr(tensor, torch.name_type);
  if (!dtype) return -1;
  Py_DECREF(dtype);  // dtypes live for ever
  if (put(key, 'A') || put(key, (uint64_t)ordinal) || put(key, (uint64_t)(uintptr_t)dtype)) return -1;
  PyObject* answer = PyObject_GetAttr(tensor, torch.name_shape);
  int code = put_row(key, answer);
  Py_XDECREF(answer);
  if (code) return -1;
  answer = PyObject_CallFunctionObjArgs(torch.strides, tensor, NULL);
  code = put_row(key, answer);
  Py_XDECREF(answer);
  return code || put(key, *address % 16) ? -1 : 0;
}

// The class of PyCUDA's arrays, and the names of what is read of them, set once by learn_arrays().
static struct {
  PyObject *type, *name_memory, *name_shape, *name_strides, *name_type, *name_known;
} arrays;

static int is_array(PyObject* object) { return arrays.type && (PyObject*)Py_TYPE(object) == arrays.type; }

// The address of an array's memory, which is an integer or an object that stands for one. -1 for an array without memory.
static int address_in(PyObject* memory, uint64_t* address) {
  PyObject* number = memory && memory != Py_None ? PyNumber_Long(memory) : NULL;
  *address = number ? PyLong_AsUnsignedLongLongMask(number) : 0;
  Py_XDECREF(number);
  return *address && !PyErr_Occurred() ? 0 : -1;
}

// The number that stands for a context in keys: that of the GPU for its primary one, or one made of the id of the current one. -1 if it is neither.
static int64_t context_number(void* context) {
  uint64_t id;
  long gpu;
  return tell_context(context, &gpu, &id) ? -1 : gpu >= 0 ? gpu : (int64_t)(GPUS + id);
}

// The number of the context in which an array's memory lies. To ask the driver takes more than a microsecond. So the array keeps the answer,
// together with the object of its memory: the answer holds for as long as that is the array's.
static int64_t context_of(PyObject* array, PyObject* memory, uint64_t address) {
  PyObject* known = PyObject_GetAttr(array, arrays.name_known);
  int64_t number = -1;
  PyErr_Clear();
  if (known && PyTuple_Check(known) && PyTuple_Size(known) == 2 && PyTuple_GetItem(known, 0) == memory) {
    number = PyLong_AsLongLong(PyTuple_GetItem(known, 1));
  } else if ((number = context_number(owner_of(address))) >= 0) {
    PyObject* answer = Py_BuildValue("(OL)", memory, (long long)number);
    if (answer) PyObject_SetAttr(array, arrays.name_known, answer);
    Py_XDECREF(answer);
    PyErr_Clear();
  }
  Py_XDECREF(known);
  return number;
}

// Write one of PyCUDA's arrays, or None, to the key: shape, strides, type and whether it is aligned; and its address and context. -1 if it is
// anything else, or lies in another context than the arrays before.
static int put_array(Key* key, PyObject* array, uint64_t* address, int64_t* context) {
  *address = 0;
  if (array == Py_None) return put(key, 'N');
  PyObject* memory = is_array(array) ? PyObject_GetAttr(array, arrays.name_memory) : NULL;
  const int64_t number = memory && !address_in(memory, address) ? context_of(array, memory, *address) : -1;
  Py_XDECREF(memory);
  if (number < 0 || (*context >= 0 && number != *context)) return -1;
  *context = number;
  PyObject* found = PyObject_GetAttr(array, arrays.name_type);
  int code = found && !put(key, 'G') && !put(key, (uint64_t)(uintptr_t)found) && !put(key, *address % 16) ? 0 : -1;
  Py_XDECREF(found);  // what stands behind the key keeps the type
  PyObject* const names[] = {arrays.name_shape, arrays.name_strides};
  for (int i = 0; !code && i < 2; i++) {
    found = PyObject_GetAttr(array, names[i]);
    code = put_row(key, found);
    Py_XDECREF(found);
  }
  return code;
}

static int put_arrays(Key* key, PyObject* const* given, Py_ssize_t n, uint64_t* addresses) {
  int64_t context = -1;
  for (Py_ssize_t i = 0; i < n; i++)
    if (put_array(key, given[i], &addresses[i], &context)) return -1;
  if (context >= GPUS && (uint64_t)context != GPUS + current_id()) return -1;  // it is gone, or not current
  return put(key, (uint64_t)context);
}

// Write the key of a call with these tensors, and their addresses.
static int put_call(Key* key, PyObject* options, PyObject* const* tensors, Py_ssize_t n, uint64_t* addresses) {
  key->used = 0;
  if (n > BUFFERS || put_option(key, options, DEPTH)) return -1;
  if (n && is_array(tensors[0])) return put_arrays(key, tensors, n, addresses);
  if (!torch.tensor) return -1;
  for (Py_ssize_t i = 0; i < n; i++)
    if (put_tensor(key, tensors[i], &addresses[i])) return -1;
  return 0;
}

static PyObject* key_bytes(const Key* key) { return PyBytes_FromStringAndSize((const char*)key->words, (Py_ssize_t)(8 * key->used)); }

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

static void free_ready(Ready* r) {
  PyObject* all[] = {
      r->schedule, r->own, r->stream, r->ordinal, r->failed, r->recorded, r->kept, r->workspace.function, r->workspace.args,
      r->workspace.keywords,
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) Py_XDECREF(all[i]);
  for (Py_ssize_t i = 0; i < MOST_RESULTS; i++) {
    Py_XDECREF(r->results[i].function);
    Py_XDECREF(r->results[i].args);
    Py_XDECREF(r->results[i].keywords);
  }
  PyMem_Free(r);
}

static void forget_ready(PyObject* capsule) { free_ready(PyCapsule_GetPointer(capsule, READY)); }

static int read_maker(PyObject* from, Maker* to) {
  if (from == Py_None) return 0;
  Maker found;
  if (!PyArg_ParseTuple(from, "OO!O", &found.function, &PyTuple_Type, &found.args, &found.keywords)) return -1;
  if (found.keywords == Py_None) found.keywords = NULL;
  Py_INCREF(found.function), Py_INCREF(found.args), Py_XINCREF(found.keywords);
  *to = found;
  return 0;
}

// ready(schedule, own, context, (stream, ordinal, place), failed, operands, results,
//       workspace, workspace_bytes, (packed, packed_at), operand_bytes, result_bytes, recorded, kept) -> what stands behind a key
//
// `stream(ordinal)` is the current stream, or `stream` is None for the default one; `failed(error, operation)` raises. Each of `results`, and the workspace, is (function, args,
// keywords); the workspace is None if it has no bytes. `recorded` is None or a list. Its one member tells torch of a call, as
// (input, weight, bias, (result,)) -> result; it may put another function in its place.
// `operands`: 0 for a convolution, whose buffers are those of plans. Otherwise the buffers are so many operands, the results and the workspace.
static PyObject* ready(PyObject* self, PyObject* args) {
  PyObject *schedule, *own, *stream, *ordinal, *failed, *results, *workspace, *recorded, *kept;
  unsigned long long context, packed, packed_at, bytes[OPERANDS], result_bytes;
  long place;
  long long workspace_bytes;
  Py_ssize_t operands;
  if (!PyArg_ParseTuple(args, "OOK(OOl)OnO!OL(KK)(KKKKK)KOO", &schedule, &own, &context, &stream, &ordinal,
                        &place, &failed, &operands, &PyTuple_Type, &results, &workspace, &workspace_bytes, &packed, &packed_at, &bytes[0],
                        &bytes[1], &bytes[2], &bytes[3], &bytes[4], &result_bytes, &recorded, &kept))
    return NULL;
  const Schedule* s = PyCapsule_GetPointer(schedule, SCHEDULE);
  if (!s) return NULL;
  const Py_ssize_t count = PyTuple_Size(results), most = operands ? operands + count + 2 : RESIDUAL + 1;  // the last one is always at 0
  if (count < 1 || count > MOST_RESULTS || operands < 0 || most > BUFFERS || s->buffers > most)
    return PyErr_Format(PyExc_ValueError, "the schedule takes %zd buffers, a call with %zd results has %zd", s->buffers, count, most);
  Ready* r = PyMem_Calloc(1, sizeof *r);
  if (!r) return PyErr_NoMemory();
  PyObject* given[] = {schedule, own, stream, ordinal, failed, recorded, kept};
  PyObject** places[] = {&r->schedule, &r->own, &r->stream, &r->ordinal, &r->failed, &r->recorded, &r->kept};
  for (size_t i = 0; i < sizeof given / sizeof *given; i++) Py_INCREF(given[i]), *places[i] = given[i];
  r->context = address_of(context);
  r->place = place, r->workspace_bytes = workspace_bytes;
  r->operands = operands, r->result_count = count, r->left = -1;
  r->packed = packed, r->packed_at = packed_at, r->result_bytes = result_bytes;
  for (int i = 0; i < OPERANDS; i++) r->operand_bytes[i] = bytes[i];
  int wrong = read_maker(workspace, &r->workspace);
  for (Py_ssize_t i = 0; !wrong && i < count; i++) wrong = read_maker(PyTuple_GetItem(results, i), &r->results[i]);
  PyObject* capsule = wrong ? NULL : PyCapsule_New(r, READY, forget_ready);
  if (!capsule) free_ready(r);
  return capsule;
}

// limit(what ready() made, calls): after so many calls Python has to make one
static PyObject* limit(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n != 2) return PyErr_Format(PyExc_TypeError, "limit takes 2 arguments, got %zd", n);
  Ready* r = PyCapsule_GetPointer(args[0], READY);
  const long long calls = r ? PyLong_AsLongLong(args[1]) : -1;
  if (PyErr_Occurred()) return NULL;
  r->left = calls;
  return Py_BuildValue("");
}

// What the table has for the key if the call may be repeated: then it counts the call and returns a new reference. NULL with or without an exception
// if Python has to make the call. The table loses what may not be repeated again.
static PyObject* find(PyObject* table, const Key* key) {
  PyObject* bytes = key_bytes(key);
  PyObject* found = bytes ? PyDict_GetItemWithError(table, bytes) : NULL;
  if (found && found != Py_None) {
    Ready* r = PyCapsule_GetPointer(PyTuple_Check(found) ? PyTuple_GetItem(found, 0) : found, READY);
    if (!r || !r->left) {
      if (r) PyDict_DelItem(table, bytes);
      found = NULL;
    } else if (r->left > 0) {
      r->left--;
    }
  } else {
    found = NULL;
  }
  Py_XINCREF(found);  // another thread may empty the table
  Py_XDECREF(bytes);
  return found;
}

// Make a tensor on GPU `place`, and get its address. NULL with an exception; or without one, if the tensor was made elsewhere.
static PyObject* make(const Maker* maker, long place, uint64_t* address) {
  PyObject* made = PyObject_Call(maker->function, maker->args, maker->keywords);
  long found;
  if (made && (pointer_of(made, address, &found) || found != place)) Py_CLEAR(made);
  return made;
}

// Make one of PyCUDA's arrays by a function of one that is like it, and get its address. NULL with an exception.
static PyObject* make_array(const Maker* maker, PyObject* like, uint64_t* address) {
  PyObject* made = PyObject_CallFunctionObjArgs(maker->function, like, NULL);
  PyObject* memory = made ? PyObject_GetAttr(made, arrays.name_memory) : NULL;
  if (made && address_in(memory, address)) Py_CLEAR(made);
  Py_XDECREF(memory);
  return made;
}

// Make memory by a function of the number of bytes, and get its address. NULL with an exception.
static PyObject* make_memory(const Maker* maker, uint64_t* address) {
  PyObject* made = PyObject_Call(maker->function, maker->args, NULL);
  PyObject* found = made ? PyNumber_Long(made) : NULL;
  *address = found ? PyLong_AsUnsignedLongLongMask(found) : 0;
  Py_XDECREF(found);
  if (PyErr_Occurred()) Py_CLEAR(made);
  return made;
}

static void ignore(void* context, const char* kind, const char* message) {}

// Memory on GPU `place`; NULL where torch has none or does not offer the function. A Python object would take longer, and torch releases the
// GIL when it frees one.
static Managed* borrow(long place, int64_t bytes) {
  DLTensor like = {NULL, place < 0 ? DLPACK_CPU : DLPACK_CUDA, place < 0 ? 0 : (int32_t)place, 1, DLPACK_UINT, 8, 1, &bytes, NULL, 0};
  Managed* made = NULL;
  return torch.allocate && !torch.allocate(&like, &made, NULL, ignore) ? made : NULL;
}

// Make the results that are missing, and launch on the current stream with the operands in `buffers`. `like` is the input if that is one of
// PyCUDA's arrays, else NULL. Returns 0; or -1 with an exception, or without one where Python has to make the call.
static int perform(const Ready* r, uint64_t* buffers, PyObject** results, PyObject* like) {
  PyObject *workspace = NULL, *own = NULL, *answer = NULL;
  Managed* scratch = NULL;
  void *current = NULL, *event = NULL, *streams[STREAMS];
  Py_ssize_t failed = 0;
  int code = -1;
  const Py_ssize_t first = r->operands ? r->operands : RESULT, last = first + r->result_count;
  Schedule* s = PyCapsule_GetPointer(r->schedule, SCHEDULE);
  int pushed = cuda.get_current(&current) || current != r->context;
  // While a program's own context is current, torch works there: Python looks where its memory lies. PyCUDA's arrays were looked at.
  if (!like && pushed && current && primary_number(current) < 0) return -1;
  const int refused = pushed ? cuda.push(r->context) : 0;
  if (refused) {
    PyErr_Format(PyExc_RuntimeError, "cuCtxPushCurrent failed (%d)", refused);
    pushed = 0;
    goto done;
  }
  if (r->stream == Py_None)
    streams[0] = NULL;
  else if (!(answer = PyObject_CallFunctionObjArgs(r->stream, r->ordinal, NULL)) || stream_of(answer, &streams[0]))
    goto done;
  own = r->own;
  if (own == Py_None)
    Py_INCREF(own);
  else if (!(own = PyObject_CallFunctionObjArgs(own, NULL)))
    goto done;
  if (streams_of(s, own, streams, &event)) goto done;
  for (Py_ssize_t i = first; i < last; i++) {
    PyObject** result = &results[i - first];
    const Maker* maker = &r->results[i - first];
    if (!*result && !(*result = like ? make_array(maker, like, &buffers[i]) : make(maker, r->place, &buffers[i]))) goto done;
  }
  if (r->workspace_bytes && like) {
    if (!(workspace = make_memory(&r->workspace, &buffers[last]))) goto done;
  } else if (r->workspace_bytes && (scratch = borrow(r->place, r->workspace_bytes)))
    buffers[last] = (uint64_t)(uintptr_t)scratch->tensor.data + scratch->tensor.byte_offset;
  else if (r->workspace_bytes && !(workspace = make(&r->workspace, r->place, &buffers[last])))
    goto done;
  if (!r->operands) buffers[PACKED] = r->packed ? r->packed : buffers[WORKSPACE] + r->packed_at;
  code = make_all(s, buffers, streams, event, &failed);
  if (code > 0) {
    PyObject* nothing = PyObject_CallFunction(r->failed, "in", code, failed);  // raises
    Py_XDECREF(nothing);
    if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "a launch failed (%d)", code);
  }
done:
  for (Py_ssize_t i = 0; code && i < r->result_count; i++) Py_CLEAR(results[i]);
  if (scratch) scratch->free(scratch);
  Py_XDECREF(workspace);
  Py_XDECREF(own);
  Py_XDECREF(answer);
  if (pushed) cuda.pop(&current);
  return code ? -1 : 0;
}

// A convolution of operands at these addresses, written to `out` unless that is NULL. Returns the result, or NULL as for perform().
static PyObject* make_call(const Ready* r, const uint64_t* operands, PyObject* out, uint64_t out_address, PyObject* like) {
  uint64_t buffers[ROW_BUFFERS] = {0};
  PyObject* results[MOST_RESULTS] = {out};
  for (int i = 0; i < OPERANDS; i++) buffers[BUFFER_OF[i]] = operands[i];
  buffers[RESULT] = out_address;
  Py_XINCREF(out);
  return perform(r, buffers, results, like) ? NULL : results[0];
}

// Whether a mode, a transform or the like has to know of the call. -1 with an exception.
static int is_unusual(void) {
  const Py_ssize_t n = PyTuple_Size(torch.states);
  for (Py_ssize_t i = 0; i < n; i++) {
    const int truth = is_true(PyTuple_GetItem(torch.states, i), NULL);
    if (truth) return truth;
  }
  PyObject* level = PyDict_GetItemWithError(torch.levels, torch.name_level);
  return !level || PyLong_AsLong(level) >= 0;
}

// Whether torch has to give gradients of a result of these tensors. -1 with an exception.
static int is_differentiated(PyObject* const* tensors, int n) {
  for (int i = 0; i < n; i++) {
    if (tensors[i] == Py_None) continue;
    PyObject* flag = PyObject_GetAttr(tensors[i], torch.name_requires_grad);
    if (!flag) return -1;
    Py_DECREF(flag);
    if (flag == Py_True) return is_true(torch.differentiates, NULL);
  }
  return 0;
}

// Whether the result may be written to `out`; if so, torch is told of the write. -1 with an exception.
static int is_writable(const Ready* r, const uint64_t* operands, PyObject* out, uint64_t address) {
  for (int i = 0; i < OPERANDS; i++)
    if (operands[i] && operands[i] < address + r->result_bytes && address < operands[i] + r->operand_bytes[i]) return 0;
  if (is_array(out)) return 1;
  const int truth = is_true(torch.made_in_inference, out);
  if (truth) return truth < 0 ? -1 : 0;
  PyObject* nothing = PyObject_CallFunctionObjArgs(torch.announce, out, NULL);
  Py_XDECREF(nothing);
  return nothing ? 1 : -1;
}

// call(table, options, recorded, input, weight, bias, scale, residual, out) -> the result, or None where Python has to make the call
//
// `recorded`: torch already knows of the call.
static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n != 9) return PyErr_Format(PyExc_TypeError, "call takes 9 arguments, got %zd", n);
  PyObject *const *tensors = args + 3, *result = NULL, *found = NULL;
  uint64_t addresses[OPERANDS + 1];
  Key key;
  if (stopped || PyDict_Size(args[0]) <= 0 || put_call(&key, args[1], tensors, OPERANDS + 1, addresses)) goto unusual;
  if (!(found = find(args[0], &key))) goto unusual;
  const Ready* r = PyCapsule_GetPointer(found, READY);
  PyObject* out = tensors[OPERANDS] == Py_None ? NULL : tensors[OPERANDS];
  PyObject* like = is_array(tensors[0]) ? tensors[0] : NULL;
  const int told = args[2] == Py_True || like ? 0 : is_unusual() ? -1 : is_differentiated(tensors, OPERANDS + 1);
  if (told < 0 || (told && (out || r->recorded == Py_None))) goto unknown;
  if (out) {
    const int writable = is_writable(r, addresses, out, addresses[OPERANDS]);
    if (!writable) goto unknown;
    if (writable < 0) {
      Py_DECREF(found);
      return NULL;
    }
  }
  result = make_call(r, addresses, out, addresses[OPERANDS], like);
  if (!result && !PyErr_Occurred()) goto unknown;
  if (result && told) {
    PyObject *made = Py_BuildValue("(N)", result), *tell = PyList_GetItem(r->recorded, 0);
    Py_XINCREF(tell);
    result = made && tell ? PyObject_CallFunctionObjArgs(tell, tensors[0], tensors[1], tensors[2], made, NULL) : NULL;
    Py_XDECREF(tell);
    Py_XDECREF(made);
  }
  Py_DECREF(found);
  return result;
unknown:
  Py_DECREF(found);
unusual:
  PyErr_Clear();
  return Py_BuildValue("");
}

// key(options, tensor, ...) -> bytes, or None for an unusual call; the tensors of call() are its operands and `out`
static PyObject* key(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n < 1) return PyErr_Format(PyExc_TypeError, "key takes options and tensors");
  uint64_t addresses[BUFFERS];
  Key key;
  if (!put_call(&key, args[0], args + 1, n - 1, addresses)) return key_bytes(&key);
  PyErr_Clear();
  return Py_BuildValue("");
}

// Make a call of two operands that torch need not know of.
static PyObject* call_of(PyObject* table, PyObject* options, PyObject* first, PyObject* second) {
  PyObject* const args[] = {table, options, Py_False, first, second, Py_None, Py_None, Py_None, Py_None};
  return call(NULL, args, sizeof args / sizeof *args);
}

static PyObject* again(PyObject* self, PyObject* const* args, Py_ssize_t n);

// gradients(ctx, saved, gradient of the result) -> the result of torch's backward node, or None where Python has to compute it
//
// `ctx` belongs to a function of (again, first, second, bias, result). `saved` are the operands that it saved, or None for one that is not
// needed. Python asks for them, because they may be asked for once only: torch.utils.checkpoint gives none a second time.
// ctx.again.known is (table, options of both gradients, table of calls, options of one gradient, of the other, whether the result's gradient
// goes before the first operand).
static PyObject* gradients(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n != 3) return PyErr_Format(PyExc_TypeError, "gradients takes 3 arguments, got %zd", n);
  PyObject *made = NULL, *dx = NULL, *dw = NULL, *const saved = args[1];
  if (!torch.tensor) return Py_BuildValue("");
  PyObject *needs = PyObject_GetAttr(args[0], torch.name_needs), *own = needs ? PyObject_GetAttr(args[0], torch.name_again) : NULL;
  PyObject* known = own ? PyObject_GetAttr(own, torch.name_known) : NULL;
  int usual = known && PyTuple_Check(needs) && PyTuple_Size(needs) == 5 && PyTuple_Check(known) && PyTuple_Size(known) == 6;
  usual = usual && PyTuple_GetItem(needs, 3) == Py_False && is_true(torch.differentiates, NULL) == 0;
  if (usual && PyTuple_Check(saved) && PyTuple_Size(saved) == 2) {
    const int by_first = PyTuple_GetItem(needs, 1) == Py_True, by_second = PyTuple_GetItem(needs, 2) == Py_True;
    PyObject *first = PyTuple_GetItem(saved, 0), *second = PyTuple_GetItem(saved, 1), *grad = args[2];
    const int before = PyTuple_GetItem(known, 5) == Py_True;
    if (by_first && by_second) {
      PyObject* const of_both[] = {PyTuple_GetItem(known, 0), PyTuple_GetItem(known, 1), first, second, grad};
      made = again(self, of_both, sizeof of_both / sizeof *of_both);
      if (made && made != Py_None) {
        dx = PyTuple_GetItem(made, 1), dw = PyTuple_GetItem(made, 2);
        Py_INCREF(dx), Py_INCREF(dw);
      }
    } else if (by_first) {
      made = dx = call_of(PyTuple_GetItem(known, 2), PyTuple_GetItem(known, 3), grad, second);
      Py_XINCREF(dx);
    } else if (by_second) {
      made = dw = call_of(PyTuple_GetItem(known, 2), PyTuple_GetItem(known, 4), before ? grad : first, before ? first : grad);
      Py_XINCREF(dw);
    }
  }
  Py_XDECREF(needs), Py_XDECREF(own), Py_XDECREF(known);
  PyObject* result = NULL;
  if (made && made != Py_None) result = PyTuple_Pack(5, Py_None, dx ? dx : Py_None, dw ? dw : Py_None, Py_None, Py_None);
  else if (!PyErr_Occurred()) result = Py_BuildValue("");
  Py_XDECREF(dx), Py_XDECREF(dw), Py_XDECREF(made);
  return result;
}

// again(table, options, operand, ...) -> (the table's object for the key, result, ...), or None where Python has to make the call
//
// The object is made by ready(), or is a tuple whose first item is.
static PyObject* again(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n < 2) return PyErr_Format(PyExc_TypeError, "again takes a table, options and operands");
  uint64_t buffers[ROW_BUFFERS] = {0};
  PyObject *results[MOST_RESULTS] = {NULL}, *found = NULL, *all = NULL;
  Key key;
  const int small = n - 2 + MOST_RESULTS + 2 <= ROW_BUFFERS;
  if (small && !stopped && PyDict_Size(args[0]) > 0 && !put_call(&key, args[1], args + 2, n - 2, buffers) && !is_unusual()) found = find(args[0], &key);
  PyErr_Clear();
  if (!found) return Py_BuildValue("");
  const Ready* r = PyCapsule_GetPointer(PyTuple_Check(found) ? PyTuple_GetItem(found, 0) : found, READY);
  if (r->operands != n - 2) {
    PyErr_Format(PyExc_TypeError, "the row has %zd operands, got %zd", r->operands, n - 2);
    Py_DECREF(found);
    return NULL;
  }
  if (perform(r, buffers, results, NULL)) {
    Py_DECREF(found);
    return PyErr_Occurred() ? NULL : Py_BuildValue("");
  }
  all = PyTuple_New(1 + r->result_count);
  if (all) PyTuple_SetItem(all, 0, found);  // it takes the reference
  for (Py_ssize_t i = 0; i < r->result_count; i++) {
    if (all)
      PyTuple_SetItem(all, 1 + i, results[i]);
    else
      Py_DECREF(results[i]);
  }
  if (!all) Py_DECREF(found);
  return all;
}

// ---- what Python calls first

// The address of a vector that has so many elements of a type and lies on GPU `place`, as `expected` says: elements << 16 | DLPack's code << 8 | bits.
static int vector_of(PyObject* vector, int64_t expected, long place, uint64_t* address) {
  DLTensor t;
  *address = 0;
  if (vector == Py_None) return expected ? -1 : 0;
  PyObject* type = (PyObject*)Py_TYPE(vector);
  if ((type != torch.tensor && type != torch.parameter) || torch.read(vector, &t) || t.ndim != 1 || place_of(&t) != place) return -1;
  if ((t.shape[0] << 16 | (int64_t)t.code << 8 | t.bits) != expected || (t.shape[0] > 1 && t.strides && t.strides[0] != 1)) return -1;
  *address = (uint64_t)(uintptr_t)t.data + t.byte_offset;
  return *address ? 0 : -1;
}

// fold(ready, expected, vector, ...) -> the result of a row of launches on many vectors, or None where Python has to make the call
//
// `expected` are bytes: an int64 for each vector, as vector_of() reads it. No key is written: a row of its own is asked for.
static PyObject* fold(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  const Ready* r = n > 2 ? PyCapsule_GetPointer(args[0], READY) : NULL;
  char* bytes;
  Py_ssize_t size;
  if (!r || PyBytes_AsStringAndSize(args[1], &bytes, &size)) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "fold takes what ready() made, bytes and vectors");
    return NULL;
  }
  if (size != 8 * (n - 2) || r->operands != n - 2 || r->result_count != 1 || n - 2 + 3 > BUFFERS)
    return PyErr_Format(PyExc_ValueError, "the row has %zd operands, got %zd", r->operands, n - 2);
  uint64_t buffers[BUFFERS];
  PyObject* results[MOST_RESULTS] = {NULL};
  int unusual = stopped || !torch.read;
  for (Py_ssize_t i = 0; !unusual && i < n - 2; i++) {
    int64_t expected;
    memcpy(&expected, bytes + 8 * i, sizeof expected);
    unusual = vector_of(args[2 + i], expected, r->place, &buffers[i]);
  }
  PyErr_Clear();
  for (int i = 0; i < 3; i++) buffers[n - 2 + i] = 0;
  if (!unusual && !perform(r, buffers, results, NULL)) return results[0];
  return PyErr_Occurred() ? NULL : Py_BuildValue("");
}

// learn((Tensor, Parameter), (data_ptr, stride, get_device, marked, is_inference), is_grad_enabled, increment_version, states, levels,
//       least, exchange)
//
// `exchange`: the capsule of DLPack's functions for tensors, or None.
static PyObject* learn(PyObject* self, PyObject* args) {
  PyObject *given[11], *exchange;
  long least;
  if (!PyArg_ParseTuple(args, "(OO)(OOOOO)OOO!O!lO", &given[0], &given[1], &given[2], &given[3], &given[4], &given[5], &given[6], &given[7],
                        &given[8], &PyTuple_Type, &given[9], &PyDict_Type, &given[10], &least, &exchange))
    return NULL;
  PyObject** places[] = {
      &torch.tensor, &torch.parameter, &torch.pointer, &torch.strides, &torch.ordinal, &torch.marked, &torch.made_in_inference,
      &torch.differentiates, &torch.announce, &torch.states, &torch.levels,
  };
  torch.name_shape = PyUnicode_InternFromString("shape"), torch.name_type = PyUnicode_InternFromString("dtype");
  torch.name_requires_grad = PyUnicode_InternFromString("requires_grad"), torch.name_level = PyUnicode_InternFromString("_current_level");
  torch.name_needs = PyUnicode_InternFromString("needs_input_grad");
  torch.name_again = PyUnicode_InternFromString("again"), torch.name_known = PyUnicode_InternFromString("known");
  if (PyErr_Occurred()) return NULL;
  for (int i = 0; i < 11; i++) {
    PyObject* before = *places[i];
    Py_INCREF(given[i]);
    *places[i] = given[i];
    Py_XDECREF(before);
  }
  torch.least = least;
  torch.read = NULL, torch.allocate = NULL;
  if (exchange != Py_None) {
    const DLPackExchange* found = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    if (!found) return NULL;
    if (found->major == 1) torch.read = found->tensor_from_object, torch.allocate = found->allocate;
  }
  return Py_BuildValue("");
}

// learn_arrays(GPUArray): the class of PyCUDA's arrays
static PyObject* learn_arrays(PyObject* self, PyObject* type) {
  arrays.name_memory = PyUnicode_InternFromString("gpudata"), arrays.name_shape = PyUnicode_InternFromString("shape");
  arrays.name_strides = PyUnicode_InternFromString("strides"), arrays.name_type = PyUnicode_InternFromString("dtype");
  arrays.name_known = PyUnicode_InternFromString("_pycuda_conv_context");
  if (PyErr_Occurred()) return NULL;
  PyObject* before = arrays.type;
  Py_INCREF(type);
  arrays.type = type;
  Py_XDECREF(before);
  return Py_BuildValue("");
}

// stop(): from now on call() returns None for everything
static PyObject* stop(PyObject* self, PyObject* nothing) {
  stopped = 1;
  return Py_BuildValue("");
}

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, "prepare(functions, operations): a schedule for launch()."},
    {"launch", (PyCFunction)(void*)launch, METH_FASTCALL, "launch(schedule, buffers, stream, own): None, or the error and the operation."},
    {"is_current", (PyCFunction)(void*)is_current, METH_FASTCALL, "is_current(cuCtxGetCurrent, context): bool."},
    {"drive", drive, METH_VARARGS, "drive(functions): the driver's, for contexts."},
    {"push", push, METH_O, "push(context): make it current."},
    {"pop", pop, METH_NOARGS, "pop(): make the context current that was so before."},
    {"primary", primary, METH_VARARGS, "primary(gpu, handle): a primary context."},
    {"other", other, METH_VARARGS, "other(id): a context that is no primary one."},
    {"doubtful", doubtful, METH_NOARGS, "doubtful(): whether a context is current that is no primary one."},
    {"has_id", has_id, METH_VARARGS, "has_id(id): whether the current context has it."},
    {"where", where, METH_O, "where(address): (gpu, 0) or (-1, id), the context that memory belongs to; or None."},
    {"fold", (PyCFunction)(void*)fold, METH_FASTCALL, "fold(ready, expected, vector, ...): the row's result, or None."},
    {"learn", learn, METH_VARARGS, "learn(...): what is asked of torch."},
    {"learn_arrays", learn_arrays, METH_O, "learn_arrays(GPUArray): the class of PyCUDA's arrays."},
    {"key", (PyCFunction)(void*)key, METH_FASTCALL, "key(options, tensor, ...): bytes or None."},
    {"again", (PyCFunction)(void*)again, METH_FASTCALL, "again(table, options, operand, ...): (what was found, result, ...) or None."},
    {"gradients", (PyCFunction)(void*)gradients, METH_FASTCALL, "gradients(ctx, saved, gradient): what the node's backward pass returns, or None."},
    {"ready", ready, METH_VARARGS, "ready(...): what call() finds behind a key."},
    {"limit", (PyCFunction)(void*)limit, METH_FASTCALL, "limit(ready, calls): after so many calls Python has to make one."},
    {"call", (PyCFunction)(void*)call, METH_FASTCALL, "call(table, options, recorded, input, weight, bias, scale, residual, out): result or None."},
    {"stop", stop, METH_NOARGS, "stop(): call() answers None from now on."},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launch", "Launches of whole schedules, and calls that were made before.", 0, methods};
PyMODINIT_FUNC PyInit__launch(void) {
  if (!next_turn && !(next_turn = PyThread_allocate_lock())) return PyErr_NoMemory();
  return PyModule_Create(&module);
}
