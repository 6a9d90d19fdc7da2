// ready.c: what stands behind a key, and its launches.
#include "launch.h"

const char READY[] = "pycuda_conv.runtime._launch.ready";

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
PyObject* find(PyObject* table, const Key* key) {
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
int perform(const Ready* r, uint64_t* buffers, PyObject** results, PyObject* like) {
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

PyMethodDef ready_methods[] = {
    {"ready", ready, METH_VARARGS, "ready(...): what call() finds behind a key."},
    {"limit", (PyCFunction)(void*)limit, METH_FASTCALL, "limit(ready, calls): after so many calls Python has to make one."},
    {0},
};
