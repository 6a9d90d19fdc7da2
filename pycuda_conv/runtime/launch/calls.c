// calls.c: repeated calls: of one convolution, of its gradients, of several kernels.
#include "launch.h"

static const int BUFFER_OF[OPERANDS] = {INPUT, WEIGHT, BIAS, SCALE, RESIDUAL};  // operands in the order of call()'s arguments

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

PyMethodDef call_methods[] = {
    {"fold", (PyCFunction)(void*)fold, METH_FASTCALL, "fold(ready, expected, vector, ...): the row's result, or None."},
    {"again", (PyCFunction)(void*)again, METH_FASTCALL, "again(table, options, operand, ...): (what was found, result, ...) or None."},
    {"gradients", (PyCFunction)(void*)gradients, METH_FASTCALL, "gradients(ctx, saved, gradient): what the node's backward pass returns, or None."},
    {"call", (PyCFunction)(void*)call, METH_FASTCALL, "call(table, options, recorded, input, weight, bias, scale, residual, out): result or None."},
    {0},
};
