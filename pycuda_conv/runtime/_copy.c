// _copy.c: threads that copy between ordinary memory and page-locked buffers, without Python.
//
// The host bounds a call on ordinary arrays: one thread copies 6 GB/s, and a bus carries 55. Threads of Python do not add up, since they wait
// for the GIL between two copies, and so does the thread that launches. The threads here never take the GIL.
//
// A job copies some arrays in one direction. They are cut into parts and go through a ring of buffers: part k uses buffer k % slots.
//
//     up:   a thread copies a part to its buffer; send() copies the buffer to a GPU and records the buffer's event
//     down: receive() copies a part from a GPU to its buffer and records the event; a thread waits for that and copies the part to its place
//
// send() and receive() are called by the one thread that launches, for parts in their order. A thread waits for events only, never for the
// launching thread: it leaves what can't be done yet and looks for another job. The launching thread does a part itself if it would wait for
// it and no thread has begun it, so a job ends even without threads.
//
// A move is a job without buffers: boxes of host memory are copied to places in one array, by its rows. The caller works as the threads do.
//
// It is built without CUDA: Python passes the addresses of the driver's functions. It uses the limited API only, so one file serves Python 3.10
// and later.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { DIMENSIONS = 6, LANES = 64 };

typedef struct {  // a part of a host array; it is packed in its buffer, and on the GPU from `offset` on
  uint8_t* host;
  size_t offset, bytes, run;  // run: contiguous bytes
  int dimensions;             // axes of runs
  Py_ssize_t shape[DIMENSIONS], strides[DIMENSIONS];
} Part;

typedef struct {  // a part of a host array, and its place in another array, whose rows it takes from `first` on
  uint8_t *from, *to;
  size_t run;      // bytes that are contiguous in both
  int dimensions;  // axes of runs; along the first one lie the other array's rows
  Py_ssize_t first, shape[DIMENSIONS], from_strides[DIMENSIONS], to_strides[DIMENSIONS];
} Box;

typedef struct {
  int (*copy_in)(uint64_t, const void*, size_t, void*);
  int (*copy_out)(void*, uint64_t, size_t, void*);
  int (*create)(void**, unsigned);
  int (*destroy)(void*);
  int (*record)(void*, void*);
  int (*synchronize)(void*);
  int (*push)(void*);
  int (*pop)(void**);
} Driver;

typedef struct Job {
  struct Job* next;
  Driver driver;
  int up;
  Part* parts;
  Box* boxes;  // in a move, instead of parts: part k has `step` rows of all boxes
  Py_ssize_t box_count, step;
  Py_ssize_t count, slots, lanes;
  uint8_t* ring;
  size_t slot_bytes;
  void** contexts;  // of the lanes
  void** events;    // one for each buffer on each lane
  uint64_t* used;   // for each buffer, the lanes whose events have to come before it is used again
  uint8_t* done;    // for each part: it is in its buffer, or in its place
  Py_ssize_t begun;   // parts that were begun; they begin in their order
  Py_ssize_t issued;  // parts that were sent or received
  Py_ssize_t busy, most;  // threads at work on the job, and how many may be
  int error, closed;
  pthread_cond_t changed;
  PyObject* memory;  // the object that owns the memory of the ring and of the arrays
} Job;

static const char JOB[] = "pycuda_conv.runtime._copy.job";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static Job* jobs;  // in the order in which threads look at them: the one served last is at the end
static Py_ssize_t team;

static void* address_of(unsigned long long number) { return (void*)(uintptr_t)number; }

// ---- copies

static void copy_runs(const Part* part, int dimension, uint8_t* host, uint8_t** packed, int up) {
  if (dimension == part->dimensions) {
    if (up) memcpy(*packed, host, part->run);
    else memcpy(host, *packed, part->run);
    *packed += part->run;
    return;
  }
  for (Py_ssize_t i = 0; i < part->shape[dimension]; i++) copy_runs(part, dimension + 1, host + i * part->strides[dimension], packed, up);
}

// memcpy for memory that a GPU reads next. Stores around the cache don't fetch what they overwrite, which saves a third of the memory's work.
static void stream(uint8_t* to, const uint8_t* from, size_t n) {
#ifdef __SSE2__
  if (n >= 1024) {
    size_t head = -(uintptr_t)to & 63;
    memcpy(to, from, head);
    for (to += head, from += head, n -= head; n >= 64; to += 64, from += 64, n -= 64) {
      __m128i parts[4];
      for (int i = 0; i < 4; i++) parts[i] = _mm_loadu_si128((const __m128i*)from + i);
      for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i*)to + i, parts[i]);
    }
  }
#endif
  memcpy(to, from, n);
}

static void copy_box(const Box* box, int dimension, const uint8_t* from, uint8_t* to) {
  Py_ssize_t rows = box->shape[dimension], step = box->from_strides[dimension], to_step = box->to_strides[dimension];
  if (dimension < box->dimensions - 1) {
    for (Py_ssize_t i = 0; i < rows; i++) copy_box(box, dimension + 1, from + i * step, to + i * to_step);
  } else if (step == to_step && step == (Py_ssize_t)box->run) {
    stream(to, from, rows * box->run);
  } else {
    for (Py_ssize_t i = 0; i < rows; i++) stream(to + i * to_step, from + i * step, box->run);
  }
}

// Copy the rows of part k of all boxes.
static void move_part(const Job* job, Py_ssize_t k) {
  for (Py_ssize_t i = 0; i < job->box_count; i++) {
    Box box = job->boxes[i];
    Py_ssize_t low = k * job->step - box.first, high = low + job->step;
    if (low < 0) low = 0;
    if (high > box.shape[0]) high = box.shape[0];
    if (low >= high) continue;
    box.shape[0] = high - low;
    copy_box(&box, 0, box.from + low * box.from_strides[0], box.to + low * box.to_strides[0]);
  }
#ifdef __SSE2__
  _mm_sfence();  // before other threads hear of it
#endif
}

// Copy a part, once its buffer's events have come; without the lock. Returns the driver's error, or 0.
static int copy_part(Job* job, Py_ssize_t k, uint64_t used) {
  if (job->boxes) {
    move_part(job, k);
    return 0;
  }
  Py_ssize_t slot = k % job->slots;
  for (Py_ssize_t lane = 0; lane < job->lanes; lane++) {
    if (!(used >> lane & 1)) continue;
    void* context;
    int code = job->driver.push(job->contexts[lane]);
    if (code) return code;
    code = job->driver.synchronize(job->events[slot * job->lanes + lane]);
    job->driver.pop(&context);
    if (code) return code;
  }
  uint8_t* packed = job->ring + slot * job->slot_bytes;
  copy_runs(&job->parts[k], 0, job->parts[k].host, &packed, job->up);
  return 0;
}

// Whether the next part can be begun: on the way down it was received, on the way up the part before it in its buffer was sent.
static int ready(const Job* job) {
  if (job->error || job->begun >= job->count) return 0;
  return job->up ? !job->closed && job->begun < job->issued + job->slots : job->begun < job->issued;
}

// Put a job at the end of the queue.
static void enter(Job* job) {
  Job** place = &jobs;
  while (*place) place = &(*place)->next;
  *place = job, job->next = NULL;
}

// The place in the queue of the first job that a thread can work on, or the end of the queue.
static Job** find_work(void) {
  Job** place = &jobs;
  while (*place && !((*place)->busy < (*place)->most && ready(*place))) place = &(*place)->next;
  return place;
}

// Copy the next part. The lock is held before and after, not during the copy.
static void do_next(Job* job) {
  Py_ssize_t k = job->begun++, slot = k % job->slots;
  uint64_t used = job->used[slot];
  job->used[slot] = 0;
  job->busy++;
  if (*find_work()) pthread_cond_signal(&work);
  pthread_mutex_unlock(&lock);
  int code = copy_part(job, k, used);
  pthread_mutex_lock(&lock);
  job->busy--;
  job->done[k] = 1;
  if (code && !job->error) job->error = code;
  pthread_cond_broadcast(&job->changed);
}

// Wait for part k, or copy it in this thread; the lock is held. Returns 0 after an error, else 1.
static int await_part(Job* job, Py_ssize_t k) {
  while (!job->error && !job->done[k]) {
    if (job->begun <= k && ready(job)) do_next(job);
    else pthread_cond_wait(&job->changed, &lock);
  }
  return !job->error;
}

static void* run(void* nothing) {
  pthread_mutex_lock(&lock);
  for (;;) {
    Job** place = find_work();
    Job* job = *place;
    if (!job) {
      pthread_cond_wait(&work, &lock);
      continue;
    }
    *place = job->next;
    enter(job);
    do_next(job);
  }
  return nothing;
}

// ---- jobs

static void leave(Job* job) {
  for (Job** place = &jobs; *place; place = &(*place)->next)
    if (*place == job) {
      *place = job->next;
      return;
    }
}

// Wait until no thread works on the job; parts that were received reach their places first. Returns the error of a thread, or 0.
static int end(Job* job) {
  pthread_mutex_lock(&lock);
  job->closed = 1;
  while (job->busy || ready(job)) {
    if (ready(job)) do_next(job);
    else pthread_cond_wait(&job->changed, &lock);
  }
  leave(job);
  int code = job->error;
  pthread_mutex_unlock(&lock);
  for (Py_ssize_t i = 0; job->events && i < job->slots * job->lanes; i++) {
    if (job->events[i]) job->driver.destroy(job->events[i]);
    job->events[i] = NULL;
  }
  return code;
}

static void free_job(Job* job) {
  Py_BEGIN_ALLOW_THREADS
  end(job);
  Py_END_ALLOW_THREADS
  pthread_cond_destroy(&job->changed);
  Py_XDECREF(job->memory);
  PyMem_Free(job->parts);
  PyMem_Free(job->contexts);
  PyMem_Free(job->events);
  PyMem_Free(job->used);
  PyMem_Free(job->done);
  PyMem_Free(job);
}

static void forget(PyObject* capsule) { free_job(PyCapsule_GetPointer(capsule, JOB)); }

// Read an array: (address, bytes, run, shape of runs, strides, axis, step). It is cut every `step` rows of `axis`, or bytes of its one run.
static int read_array(PyObject* from, Part* whole, Py_ssize_t* axis, Py_ssize_t* step) {
  unsigned long long host;
  PyObject *shape, *strides;
  if (!PyArg_ParseTuple(from, "KnnO!O!nn", &host, &whole->bytes, &whole->run, &PyTuple_Type, &shape, &PyTuple_Type, &strides, axis, step)) return -1;
  whole->host = address_of(host);
  Py_ssize_t dimensions = PyTuple_Size(shape), runs = 1;
  if (dimensions > DIMENSIONS || PyTuple_Size(strides) != dimensions) return PyErr_SetString(PyExc_ValueError, "an array has too many dimensions"), -1;
  whole->dimensions = (int)dimensions;
  for (int i = 0; i < whole->dimensions; i++) {
    whole->shape[i] = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
    whole->strides[i] = PyLong_AsSsize_t(PyTuple_GetItem(strides, i));
    runs *= whole->shape[i];
  }
  if (PyErr_Occurred()) return -1;
  if (!whole->bytes || (size_t)runs * whole->run != whole->bytes || *step < 1 || *axis >= dimensions || (*axis < 0 && dimensions))
    return PyErr_SetString(PyExc_ValueError, "an array's runs are not its bytes"), -1;
  return 0;
}

// Count the parts of `arrays`, and write them to `parts` unless that is NULL.
static Py_ssize_t cut(PyObject* arrays, Part* parts) {
  Py_ssize_t count = 0;
  for (Py_ssize_t i = 0; i < PyTuple_Size(arrays); i++) {
    Part whole;
    Py_ssize_t axis, step;
    if (read_array(PyTuple_GetItem(arrays, i), &whole, &axis, &step)) return -1;
    Py_ssize_t rows = axis < 0 ? (Py_ssize_t)whole.bytes : whole.shape[axis], row = (Py_ssize_t)whole.bytes / rows;
    for (Py_ssize_t first = 0; first < rows; first += step, count++) {
      if (!parts) continue;
      Py_ssize_t taken = rows - first < step ? rows - first : step;
      Part* part = &parts[count];
      *part = whole;
      part->host += first * (axis < 0 ? 1 : whole.strides[axis]);
      part->offset = (size_t)(first * row), part->bytes = (size_t)(taken * row);
      if (axis < 0) part->run = part->bytes;
      else part->shape[axis] = taken;
    }
  }
  return count;
}

static int read_job(Job* job, const unsigned long long* functions, PyObject* arrays, PyObject* contexts) {
  job->driver.copy_in = (int (*)(uint64_t, const void*, size_t, void*))address_of(functions[0]);
  job->driver.copy_out = (int (*)(void*, uint64_t, size_t, void*))address_of(functions[1]);
  job->driver.create = (int (*)(void**, unsigned))address_of(functions[2]);
  job->driver.destroy = (int (*)(void*))address_of(functions[3]);
  job->driver.record = (int (*)(void*, void*))address_of(functions[4]);
  job->driver.synchronize = (int (*)(void*))address_of(functions[5]);
  job->driver.push = (int (*)(void*))address_of(functions[6]);
  job->driver.pop = (int (*)(void**))address_of(functions[7]);
  Py_ssize_t count = cut(arrays, NULL), lanes = PyTuple_Size(contexts);
  if (count < 0) return -1;
  if (job->slots < 1 || lanes < 1 || lanes > LANES) return PyErr_SetString(PyExc_ValueError, "a job needs buffers and lanes"), -1;
  job->parts = PyMem_Calloc(count + 1, sizeof *job->parts);
  job->contexts = PyMem_Calloc(lanes, sizeof *job->contexts);
  job->events = PyMem_Calloc(job->slots * lanes, sizeof *job->events);
  job->used = PyMem_Calloc(job->slots, sizeof *job->used);
  job->done = PyMem_Calloc(count + 1, 1);
  if (!job->parts || !job->contexts || !job->events || !job->used || !job->done) return PyErr_NoMemory(), -1;
  job->lanes = lanes;
  cut(arrays, job->parts);
  for (Py_ssize_t i = 0; i < count; i++)
    if (job->parts[i].bytes > job->slot_bytes) return PyErr_SetString(PyExc_ValueError, "a part is larger than its buffer"), -1;
  job->count = count;
  for (Py_ssize_t i = 0; i < lanes; i++) job->contexts[i] = PyLong_AsVoidPtr(PyTuple_GetItem(contexts, i));
  return PyErr_Occurred() ? -1 : 0;
}

static int create_events(Job* job) {
  for (Py_ssize_t lane = 0; lane < job->lanes; lane++) {
    void* context;
    int code = job->driver.push(job->contexts[lane]);
    if (code) return code;
    for (Py_ssize_t slot = 0; slot < job->slots && !code; slot++) code = job->driver.create(&job->events[slot * job->lanes + lane], 2);  // no timing
    job->driver.pop(&context);
    if (code) return code;
  }
  return 0;
}

// job(functions, up, arrays, ring, slot bytes, slots, contexts, most, memory) -> job, or the driver's error
//
// `memory` is any object; the job keeps it while threads may copy to it or from it.
static PyObject* make_job(PyObject* self, PyObject* args) {
  unsigned long long functions[8], ring;
  PyObject *arrays, *contexts, *memory;
  Job* job = PyMem_Calloc(1, sizeof *job);
  if (!job) return PyErr_NoMemory();
  pthread_cond_init(&job->changed, NULL);
  if (!PyArg_ParseTuple(args, "(KKKKKKKK)pO!KnnO!nO", &functions[0], &functions[1], &functions[2], &functions[3], &functions[4], &functions[5],
                        &functions[6], &functions[7], &job->up, &PyTuple_Type, &arrays, &ring, &job->slot_bytes, &job->slots, &PyTuple_Type, &contexts,
                        &job->most, &memory) ||
      (job->ring = address_of(ring), read_job(job, functions, arrays, contexts))) {
    free_job(job);
    return NULL;
  }
  Py_INCREF(memory);
  job->memory = memory;
  int code;
  Py_BEGIN_ALLOW_THREADS
  code = create_events(job);
  if (!code) {
    pthread_mutex_lock(&lock);
    enter(job);
    for (Py_ssize_t i = 0; job->up && i < job->most && i < job->count; i++) pthread_cond_signal(&work);
    pthread_mutex_unlock(&lock);
  }
  Py_END_ALLOW_THREADS
  if (code) {
    free_job(job);
    return PyLong_FromLong(code);
  }
  PyObject* capsule = PyCapsule_New(job, JOB, forget);
  if (!capsule) free_job(job);
  return capsule;
}

// send or receive(job, first, count, lane, address on the GPU, stream, whether it is a part's last copy) -> the driver's error, or 0
//
// It also returns the error of a thread.
static PyObject* issue(PyObject* args, int up) {
  PyObject* capsule;
  Py_ssize_t first, count, lane;
  unsigned long long at, stream;
  int last;
  if (!PyArg_ParseTuple(args, "OnnnKKp", &capsule, &first, &count, &lane, &at, &stream, &last)) return NULL;
  Job* job = PyCapsule_GetPointer(capsule, JOB);
  if (!job) return NULL;
  if (job->closed || job->up != up || first != job->issued || count < 0 || first + count > job->count || lane < 0 || lane >= job->lanes || (!last && count > 1)) {
    PyErr_SetString(PyExc_ValueError, "parts go in their order");
    return NULL;
  }
  int code = 0;
  Py_BEGIN_ALLOW_THREADS
  void* context;
  code = job->driver.push(job->contexts[lane]);
  int pushed = !code;
  for (Py_ssize_t k = first; k < first + count && !code; k++) {
    Py_ssize_t slot = k % job->slots;
    uint8_t* buffer = job->ring + slot * job->slot_bytes;
    pthread_mutex_lock(&lock);
    if (up ? !await_part(job, k) : k >= job->slots && !await_part(job, k - job->slots)) code = job->error;
    pthread_mutex_unlock(&lock);
    if (code) break;
    const Part* part = &job->parts[k];
    code = up ? job->driver.copy_in(at + part->offset, buffer, part->bytes, address_of(stream))
              : job->driver.copy_out(buffer, at + part->offset, part->bytes, address_of(stream));
    if (!code) code = job->driver.record(job->events[slot * job->lanes + lane], address_of(stream));
    if (code) break;
    pthread_mutex_lock(&lock);
    job->used[slot] |= (uint64_t)1 << lane;
    if (last) {
      job->issued = k + 1;
      if (ready(job)) pthread_cond_signal(&work);
    }
    pthread_mutex_unlock(&lock);
  }
  if (pushed) job->driver.pop(&context);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(code);
}

static PyObject* send(PyObject* self, PyObject* args) { return issue(args, 1); }
static PyObject* receive(PyObject* self, PyObject* args) { return issue(args, 0); }

// close(job) -> the error of a thread, or 0. After it no thread touches the job's memory.
static PyObject* close_job(PyObject* self, PyObject* capsule) {
  Job* job = PyCapsule_GetPointer(capsule, JOB);
  if (!job) return NULL;
  int code;
  Py_BEGIN_ALLOW_THREADS
  code = end(job);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(code);
}

// Read a box: (address, address of its place, first row, run, shape of runs, strides of runs at the address, at the place).
static int read_box(PyObject* from, Box* box) {
  unsigned long long source, target;
  PyObject *shape, *from_strides, *to_strides;
  if (!PyArg_ParseTuple(from, "KKnnO!O!O!", &source, &target, &box->first, &box->run, &PyTuple_Type, &shape, &PyTuple_Type, &from_strides, &PyTuple_Type,
                        &to_strides))
    return -1;
  box->from = address_of(source), box->to = address_of(target);
  Py_ssize_t dimensions = PyTuple_Size(shape);
  if (dimensions < 1 || dimensions > DIMENSIONS || PyTuple_Size(from_strides) != dimensions || PyTuple_Size(to_strides) != dimensions || box->first < 0)
    return PyErr_SetString(PyExc_ValueError, "a box has too few or too many dimensions"), -1;
  box->dimensions = (int)dimensions;
  for (int i = 0; i < box->dimensions; i++) {
    box->shape[i] = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
    box->from_strides[i] = PyLong_AsSsize_t(PyTuple_GetItem(from_strides, i));
    box->to_strides[i] = PyLong_AsSsize_t(PyTuple_GetItem(to_strides, i));
  }
  return PyErr_Occurred() ? -1 : 0;
}

// move(boxes, rows, step, most): copy boxes to their places in an array of `rows` rows, `step` rows at a time, by at most `most` threads
static PyObject* move(PyObject* self, PyObject* args) {
  PyObject* boxes;
  Py_ssize_t rows;
  Job job = {0};
  if (!PyArg_ParseTuple(args, "O!nnn", &PyTuple_Type, &boxes, &rows, &job.step, &job.most)) return NULL;
  job.box_count = PyTuple_Size(boxes);
  if (rows < 1 || job.step < 1) return PyErr_SetString(PyExc_ValueError, "a move needs rows"), NULL;
  job.count = (rows - 1) / job.step + 1;
  uint64_t used = 0;
  job.slots = 1, job.used = &used, job.issued = job.count;
  job.boxes = PyMem_Calloc(job.box_count + 1, sizeof *job.boxes);
  job.done = PyMem_Calloc(job.count, 1);
  int failed = !job.boxes || !job.done;
  if (failed) PyErr_NoMemory();
  for (Py_ssize_t i = 0; !failed && i < job.box_count; i++) failed = read_box(PyTuple_GetItem(boxes, i), &job.boxes[i]);
  if (!failed) {
    pthread_cond_init(&job.changed, NULL);
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&lock);
    enter(&job);
    for (Py_ssize_t i = 1; i < job.most && i < job.count; i++) pthread_cond_signal(&work);
    pthread_mutex_unlock(&lock);
    end(&job);
    Py_END_ALLOW_THREADS
    pthread_cond_destroy(&job.changed);
  }
  PyMem_Free(job.boxes);
  PyMem_Free(job.done);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

// threads(count) -> how many threads there are: at least `count`, or as many as could be started
static PyObject* threads(PyObject* self, PyObject* args) {
  Py_ssize_t count;
  if (!PyArg_ParseTuple(args, "n", &count)) return NULL;
  pthread_mutex_lock(&lock);
  while (team < count) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, NULL)) break;
    pthread_detach(thread);
    team++;
  }
  Py_ssize_t there = team;
  pthread_mutex_unlock(&lock);
  return PyLong_FromSsize_t(there);
}

static PyMethodDef methods[] = {
    {"job", make_job, METH_VARARGS, "job(functions, up, arrays, ring, slot bytes, slots, contexts, most, memory): a job, or the driver's error."},
    {"send", send, METH_VARARGS, "send(job, first, count, lane, address, stream, last): the error or 0."},
    {"receive", receive, METH_VARARGS, "receive(job, first, count, lane, address, stream, last): the error or 0."},
    {"close", close_job, METH_O, "close(job): the error or 0."},
    {"move", move, METH_VARARGS, "move(boxes, rows, step, most): copy boxes to their places in an array."},
    {"threads", threads, METH_VARARGS, "threads(count): how many there are then."},
    {0},
};
// A process may be forked by one thread while others copy. The child has none of these, so nothing else would give back the lock, end their
// jobs or wake up for new ones.
static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork(void) { pthread_mutex_unlock(&lock); }

static void after_fork_in_child(void) {
  const pthread_cond_t nobody_waits = PTHREAD_COND_INITIALIZER;
  for (Job* job = jobs; job; job = job->next) job->busy = 0, job->error = -1, job->changed = nobody_waits;
  jobs = NULL, team = 0, work = nobody_waits;
  pthread_mutex_unlock(&lock);
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy", "Threads that copy without Python.", 0, methods};
PyMODINIT_FUNC PyInit__copy(void) {
  static int told;
  if (!told) {
    if (pthread_atfork(before_fork, after_fork, after_fork_in_child)) return PyErr_NoMemory();
    told = 1;
  }
  return PyModule_Create(&module);
}
