// _launch.c: all launches of a schedule, made by one call from Python.
//
// The module knows three things: a launch of a kernel, the recording of the event on a stream, and a stream's wait for the event.
// A schedule is a row of those. prepare() copies everything that stays the same from call to call; launch() fills in the buffers'
// addresses and the stream, releases the GIL and calls the driver. runtime/cuda.py describes schedules, and does the same in Python
// where this module is missing.
//
// Nothing of CUDA is needed to build it: Python passes the addresses of the driver's functions.
// Only the limited API is used, so that one file serves Python 3.10 and later.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

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
enum { MAP_BYTES = 128, STREAMS = 8, USUAL_BYTES = 4096 };

typedef struct {  // where in the parameters an address goes, or a tensor map of it
  Py_ssize_t at, buffer;
  uint64_t offset;
} Place;

typedef struct {
  Place place;
  PyObject* encode;  // address -> the map's bytes
  uint64_t address;  // of the map that the parameters hold; no array lies at 0
} Map;

typedef struct {
  int kind;
  Py_ssize_t stream;  // 0: the caller's; others: side streams
  void* function;
  LaunchConfig config;
  uint8_t* parameters;
  size_t bytes;
  Py_ssize_t room;  // where in a call's own memory the parameters go
  Place* places;
  Map* maps;
  Py_ssize_t place_count, map_count;
} Operation;

typedef struct {
  LaunchKernelEx launch;
  EventRecord record;
  StreamWaitEvent wait;
  Operation* operations;
  Py_ssize_t count, streams, bytes;
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
  if (place->buffer >= 0 && place->at >= 0 && (size_t)(place->at + room) <= bytes) return 0;
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
    op->room = s->bytes;
    s->bytes += (Py_ssize_t)((op->bytes + 63) & ~(size_t)63);
  }
  PyObject* capsule = PyCapsule_New(s, SCHEDULE, forget);
  if (capsule) return capsule;
failed:
  free_schedule(s);
  return NULL;
}

// The integer that an object is, as CUDA's handles and addresses are; objects with __index__ are integers.
static int number(PyObject* object, uint64_t* to) {
  *to = PyLong_AsUnsignedLongLongMask(object);
  return *to == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

// A stream: None is the default one, an int is a handle, PyCUDA's streams have one.
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

static int place_of(const Place* place, PyObject* buffers, uint64_t* to) {
  PyObject* buffer = PyTuple_GetItem(buffers, place->buffer);
  if (!buffer || number(buffer, to)) return -1;
  *to += place->offset;
  return 0;
}

// Write the parameters of a launch to `room`. Other threads may do so too whenever Python runs, which it does in `encode`: so
// each call has its own memory, and a map goes to the schedule's and the call's at once.
static int fill(Operation* op, PyObject* buffers, uint8_t* room) {
  uint64_t address;
  memcpy(room, op->parameters, op->bytes);
  for (Py_ssize_t i = 0; i < op->place_count; i++) {
    if (place_of(&op->places[i], buffers, &address)) return -1;
    memcpy(room + op->places[i].at, &address, sizeof address);
  }
  for (Py_ssize_t i = 0; i < op->map_count; i++) {
    Map* map = &op->maps[i];
    uint8_t *kept = op->parameters + map->place.at, *ours = room + map->place.at;
    if (place_of(&map->place, buffers, &address)) return -1;
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

// 0, or the driver's error, with the number of the operation that failed.
static int run(const Schedule* s, uint8_t* room, void* const* streams, void* event, Py_ssize_t* failed) {
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
    } else {
      code = s->wait(streams[op->stream], event, 0);
    }
    if (code) {
      *failed = i;
      return code;
    }
  }
  return 0;
}

// launch(schedule, buffers, stream, own) -> None, or (the driver's error, the number of the operation that failed)
//
// `own`: the calling thread's event and side streams; None where the schedule needs none.
static PyObject* launch(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n != 4) return PyErr_Format(PyExc_TypeError, "launch takes 4 arguments, got %zd", n);
  Schedule* s = PyCapsule_GetPointer(args[0], SCHEDULE);
  void *event = NULL, *streams[STREAMS];
  Py_ssize_t known = 1, failed = 0;
  if (!s || stream_of(args[2], &streams[0])) return NULL;
  if (args[3] != Py_None) {
    uint64_t handle;
    PyObject* first = PyTuple_GetItem(args[3], 0);
    if (!first || number(first, &handle)) return NULL;
    event = address_of(handle);
    for (; known < STREAMS && known < PyTuple_Size(args[3]); known++) {
      if (number(PyTuple_GetItem(args[3], known), &handle)) return NULL;
      streams[known] = address_of(handle);
    }
  }
  if (s->streams > known) return PyErr_Format(PyExc_ValueError, "the schedule takes %zd streams, got %zd", s->streams, known);
  PyObject* buffers = PySequence_Tuple(args[1]);
  if (!buffers) return NULL;
  union {
    uint8_t bytes[USUAL_BYTES];
    long double aligned;
  } usual;
  uint8_t* room = s->bytes <= USUAL_BYTES ? usual.bytes : PyMem_Malloc(s->bytes);
  PyObject* result = NULL;
  if (!room) {
    PyErr_NoMemory();
    goto done;
  }
  for (Py_ssize_t i = 0; i < s->count; i++)
    if (s->operations[i].kind == LAUNCH && fill(&s->operations[i], buffers, room + s->operations[i].room)) goto done;
  int code;
  // a launch waits where the driver's queue is full, maybe for a callback that needs the GIL
  Py_BEGIN_ALLOW_THREADS
  code = run(s, room, streams, event, &failed);
  Py_END_ALLOW_THREADS
  result = code ? Py_BuildValue("(in)", code, failed) : Py_BuildValue("");
done:
  if (room != usual.bytes) PyMem_Free(room);
  Py_DECREF(buffers);
  return result;
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

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, "prepare(functions, operations): a schedule for launch()."},
    {"launch", (PyCFunction)(void*)launch, METH_FASTCALL, "launch(schedule, buffers, stream, own): None, or the error and the operation."},
    {"is_current", (PyCFunction)(void*)is_current, METH_FASTCALL, "is_current(cuCtxGetCurrent, context): bool."},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launch", "Launches of whole schedules.", 0, methods};
PyMODINIT_FUNC PyInit__launch(void) { return PyModule_Create(&module); }
