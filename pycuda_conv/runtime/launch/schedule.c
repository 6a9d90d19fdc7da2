// schedule.c: rows of launches, and how one call makes all of them. launch.h says what a schedule is.
#include "launch.h"

enum { LAUNCH, RECORD, WAIT };  // kinds of operations
enum { MAP_BYTES = 128, USUAL_BYTES = 4096 };

typedef struct {  // where in the parameters an address goes, or the tensor map of an address
  Py_ssize_t at, buffer;
  uint64_t offset;
} Place;

typedef struct {
  Place place;
  PyObject* encode;  // address -> the map's bytes
  uint64_t address;  // the address of the map in the parameters; no array lies at 0
} Map;
struct Operation {
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
};

const char SCHEDULE[] = "pycuda_conv.runtime._launch.schedule";

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

// The handle of a stream: 0 for None, which is the default stream; an int itself; that of a stream of PyCUDA.
int stream_of(PyObject* object, void** to) {
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

// Make all operations without the GIL. Returns 0; or the driver's error, with the number of the operation that failed; or -1 with Python's error set.
int make_all(Schedule* s, const uint64_t* buffers, void* const* streams, void* event, Py_ssize_t* failed) {
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
int streams_of(const Schedule* s, PyObject* own, void** streams, void** event) {
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

PyMethodDef schedule_methods[] = {
    {"prepare", prepare, METH_VARARGS, "prepare(functions, operations): a schedule for launch()."},
    {"launch", (PyCFunction)(void*)launch, METH_FASTCALL, "launch(schedule, buffers, stream, own): None, or the error and the operation."},
    {0},
};
