// contexts.c: the driver's contexts, and which of them owns memory.
#include "launch.h"

enum { OWNER = 1 };  // CU_POINTER_ATTRIBUTE_CONTEXT

Driver cuda;

uint64_t current_id(void) {
  unsigned long long id;
  return cuda.id && !cuda.id(NULL, &id) ? id : 0;
}

// The context that owns the memory at an address; NULL where there is none, as for the host's memory.
void* owner_of(uint64_t address) {
  void* owner = NULL;
  return cuda.attribute && !cuda.attribute(&owner, OWNER, address) ? owner : NULL;
}

// What tells a context from all others: the number of the GPU whose primary one it is, or -1 and the id of the current one. -1 if it is neither.
int tell_context(void* context, long* gpu, uint64_t* id) {
  void* current;
  *id = 0, *gpu = primary_number(context);
  if (*gpu >= 0) return 0;
  return !context || cuda.get_current(&current) || current != context || !(*id = current_id()) ? -1 : 0;
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

PyMethodDef context_methods[] = {
    {"is_current", (PyCFunction)(void*)is_current, METH_FASTCALL, "is_current(cuCtxGetCurrent, context): bool."},
    {"drive", drive, METH_VARARGS, "drive(functions): the driver's, for contexts."},
    {"push", push, METH_O, "push(context): make it current."},
    {"pop", pop, METH_NOARGS, "pop(): make the context current that was so before."},
    {"primary", primary, METH_VARARGS, "primary(gpu, handle): a primary context."},
    {"other", other, METH_VARARGS, "other(id): a context that is no primary one."},
    {"doubtful", doubtful, METH_NOARGS, "doubtful(): whether a context is current that is no primary one."},
    {"has_id", has_id, METH_VARARGS, "has_id(id): whether the current context has it."},
    {"where", where, METH_O, "where(address): (gpu, 0) or (-1, id), the context that memory belongs to; or None."},
    {0},
};
