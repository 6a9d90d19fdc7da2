// keys.c: a call written as bytes, and what is asked of torch and of PyCUDA's arrays for that.
#include "launch.h"

enum { AXES = 8, DEPTH = 4 };

Torch torch;
Arrays arrays;
int stopped;

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
int is_true(PyObject* function, PyObject* object) {
  PyObject* answer = PyObject_CallFunctionObjArgs(function, object, NULL);
  const int truth = answer ? (answer == Py_False || answer == Py_None ? 0 : PyObject_IsTrue(answer)) : -1;
  Py_XDECREF(answer);
  return truth;
}

int pointer_of(PyObject* tensor, uint64_t* to, long* place) {
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

// The address of an array's memory, which is an integer or an object that stands for one. -1 for an array without memory.
int address_in(PyObject* memory, uint64_t* address) {
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
int put_call(Key* key, PyObject* options, PyObject* const* tensors, Py_ssize_t n, uint64_t* addresses) {
  key->used = 0;
  if (n > BUFFERS || put_option(key, options, DEPTH)) return -1;
  if (n && is_array(tensors[0])) return put_arrays(key, tensors, n, addresses);
  if (!torch.tensor) return -1;
  for (Py_ssize_t i = 0; i < n; i++)
    if (put_tensor(key, tensors[i], &addresses[i])) return -1;
  return 0;
}

PyObject* key_bytes(const Key* key) { return PyBytes_FromStringAndSize((const char*)key->words, (Py_ssize_t)(8 * key->used)); }

// key(options, tensor, ...) -> bytes, or None for an unusual call; the tensors of call() are its operands and `out`
static PyObject* key(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n < 1) return PyErr_Format(PyExc_TypeError, "key takes options and tensors");
  uint64_t addresses[BUFFERS];
  Key key;
  if (!put_call(&key, args[0], args + 1, n - 1, addresses)) return key_bytes(&key);
  PyErr_Clear();
  return Py_BuildValue("");
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

PyMethodDef key_methods[] = {
    {"learn", learn, METH_VARARGS, "learn(...): what is asked of torch."},
    {"learn_arrays", learn_arrays, METH_O, "learn_arrays(GPUArray): the class of PyCUDA's arrays."},
    {"key", (PyCFunction)(void*)key, METH_FASTCALL, "key(options, tensor, ...): bytes or None."},
    {"stop", stop, METH_NOARGS, "stop(): call() answers None from now on."},
    {0},
};
