/* pccheck._native.Pipeline: threads, a buffer pool, and the jobs under way.
 *
 * The Pipeline keeps each Job until it has ended, and the Job keeps what its threads read: dropping either frees
 * nothing that is in use. */
#include "module.h"

#include <errno.h>
#include <stdlib.h>

#define ABANDON_NS 5000000000LL /* how long a dropped pipeline waits for a write that runs */

typedef struct PipelineObject {
  PyObject_HEAD
  pcc_pipeline *pipeline;
  PyObject *open; /* list of the Jobs that have not ended */
  int buffers;
  bool closed;
} PipelineObject;

static PyObject *pipeline_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"buffers", "buffer_bytes", "copiers", "writers", "writers_per_job", "retries", NULL};
  int buffers, copiers, writers, per_job, retries;
  Py_ssize_t buffer_bytes;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iniiii", names, &buffers, &buffer_bytes, &copiers, &writers, &per_job,
                                   &retries))
    return NULL;
  if (buffer_bytes < 0) return raise_errno(EINVAL);
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  PipelineObject *self = (PipelineObject *)(void *)allocate(type, 0);
  if (!self) return NULL;
  self->closed = true; /* until there is something to close */
  self->buffers = buffers;
  self->open = PyList_New(0);
  int error = ENOMEM;
  if (self->open)
    error = pcc_pipeline_open(&self->pipeline, buffers, (size_t)buffer_bytes, copiers, writers, per_job, retries);
  if (error) {
    Py_DECREF(self);
    return raise_errno(error);
  }
  self->closed = false;
  return (PyObject *)self;
}

/* Forget the jobs that have ended, and the sources of those that are captured. */
static int sweep(PipelineObject *self) {
  PyObject *after = PyList_New(0);
  if (!after) return -1;
  PyObject *before = self->open; /* not before: an allocation may collect garbage, and run code that comes here */
  for (Py_ssize_t i = 0; i < PyList_Size(before); i++) {
    JobObject *job = (JobObject *)(void *)PyList_GetItem(before, i);
    bool ended = pcc_job_wait(job->pipeline, job->job, PCC_ENDED, 0);
    if (!ended && PyList_Append(after, (PyObject *)job)) {
      Py_DECREF(after);
      return -1;
    }
  }
  self->open = after;
  for (Py_ssize_t i = 0; i < PyList_Size(before); i++) {
    JobObject *job = (JobObject *)(void *)PyList_GetItem(before, i);
    job_let_go(job, pcc_job_wait(job->pipeline, job->job, PCC_ENDED, 0));
  }
  Py_DECREF(before);
  return 0;
}

static void take_back(PipelineObject *self, int error) {
  module_state *state = PyType_GetModuleState(Py_TYPE((PyObject *)self));
  Py_ssize_t last = PyList_Size(self->open) - 1;
  PyList_SetSlice(self->open, last, last + 1, NULL);
  if (error == ESHUTDOWN) {
    PyErr_SetString(state->closed_error, "the pipeline is closed, or being closed");
  } else {
    raise_errno(error);
  }
}

/* Tell whoever fills it of a job; one that he did not hear of is cancelled. */
static int tell(PyObject *started, JobObject *job) {
  PyObject *told = PyObject_CallFunctionObjArgs(started, (PyObject *)job, NULL);
  if (told) {
    Py_DECREF(told);
    return 0;
  }
  PyObject *type, *value, *traceback; /* nothing that runs meanwhile may find an error set */
  PyErr_Fetch(&type, &value, &traceback);
  Py_BEGIN_ALLOW_THREADS
  pcc_job_cancel(job->pipeline, job->job);
  Py_END_ALLOW_THREADS
  PyErr_Restore(type, value, traceback);
  return -1;
}

/* Enlist the Job before it begins: from then on nobody but `sweep` can end its references. */
static PyObject *begin_job(PipelineObject *self, pcc_layout *layout, const uint64_t *addresses, PyObject *keep,
                           PyObject *mapping, pcc_sink sink, const uint8_t *prologue, PyObject *started) {
  module_state *state = PyType_GetModuleState(Py_TYPE((PyObject *)self));
  allocfunc allocate = (allocfunc)PyType_GetSlot(state->job_type, Py_tp_alloc);
  JobObject *job = (JobObject *)(void *)allocate(state->job_type, 0);
  if (!job) return NULL;
  job->keep = Py_NewRef(keep);
  if (mapping != Py_None) {
    if (PyObject_GetBuffer(mapping, &job->mapping, PyBUF_WRITABLE)) goto failed;
    sink.mapping = job->mapping.buf;
    sink.mapping_bytes = (uint64_t)job->mapping.len;
  }
  if (PyList_Append(self->open, (PyObject *)job)) goto failed;
  pcc_job *begun = NULL;
  int error = pcc_submit(self->pipeline, layout, addresses, started != Py_None, &sink, prologue, &begun);
  if (error) {
    take_back(self, error);
    goto failed;
  }
  job->pipeline = self->pipeline;
  job->job = begun;
  if (started == Py_None || tell(started, job) == 0) return (PyObject *)job;
failed:
  Py_DECREF(job);
  return NULL;
}

static PyObject *pipeline_submit(PipelineObject *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"layout",  "addresses", "keep",     "fd",      "mapping",
                          "alignment", "prologue",  "started", NULL};
  module_state *state = PyType_GetModuleState(Py_TYPE((PyObject *)self));
  PyObject *layout, *address_table, *keep, *mapping, *started = Py_None, *result = NULL;
  pcc_sink sink = {0};
  const char *prologue = NULL;
  Py_ssize_t prologue_bytes = 0;
  size_t count = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOiOIz#|O", names, state->layout_type, &layout, &address_table,
                                   &keep, &sink.fd, &mapping, &sink.alignment, &prologue, &prologue_bytes, &started) ||
      check_process((PyObject *)self, self->pipeline) || sweep(self))
    return NULL;
  if (prologue && prologue_bytes != PCC_PAGE)
    return PyErr_Format(PyExc_ValueError, "a prologue is one page of %u bytes, not %zd", PCC_PAGE, prologue_bytes);
  uint64_t *addresses = copy_u64s(address_table, "addresses", &count);
  pcc_layout *shape = ((LayoutObject *)(void *)layout)->layout;
  if (addresses && count != shape->given) {
    PyErr_Format(PyExc_ValueError, "there are %zu addresses for %zu pieces", count, shape->given);
  } else if (addresses) {
    result = begin_job(self, shape, addresses, keep, mapping, sink, (const uint8_t *)prologue, started);
  }
  free(addresses);
  return result;
}

/* Refuse new jobs and wait until none runs: 1 = so it is, 0 = time is up, -1 = error set. */
static int drain(PipelineObject *self, PyObject *args, bool stop) {
  PyObject *timeout = NULL;
  int64_t until;
  if (!PyArg_ParseTuple(args, "|O", &timeout) || parse_until(timeout, &until) ||
      check_process((PyObject *)self, self->pipeline))
    return -1;
  bool idle = false;
  pcc_pipeline_refuse(self->pipeline);
  for (;;) {
    int64_t slice = slice_until(until);
    Py_BEGIN_ALLOW_THREADS
    idle = pcc_pipeline_idle(self->pipeline, slice);
    if (idle && stop) pcc_pipeline_stop(self->pipeline);
    Py_END_ALLOW_THREADS
    if (idle || PyErr_CheckSignals() || (until != PCC_FOREVER && pcc_now() >= until)) break;
  }
  if (idle && stop) self->closed = true;
  return PyErr_Occurred() || (idle && sweep(self)) ? -1 : idle;
}

/* True = no job is left; False = time is up: running jobs go on, and draining may be tried again. */
static PyObject *pipeline_drain(PipelineObject *self, PyObject *args) {
  int idle = drain(self, args, false);
  return idle < 0 ? NULL : PyBool_FromLong(idle);
}

/* The same, and then the threads are stopped. */
static PyObject *pipeline_close(PipelineObject *self, PyObject *args) {
  int idle = drain(self, args, true);
  return idle < 0 ? NULL : PyBool_FromLong(idle);
}

static PyObject *pipeline_memory(PipelineObject *self, void *unused) {
  (void)unused;
  const pcc_pool *pool = &self->pipeline->pool;
  return Py_BuildValue("KK", (unsigned long long)(uintptr_t)pool->base,
                       (unsigned long long)self->buffers * pool->buffer_bytes);
}

static PyObject *pipeline_buffers(PipelineObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(self->buffers);
}

static PyObject *pipeline_free_buffers(PipelineObject *self, void *unused) {
  (void)unused;
  if (check_process((PyObject *)self, self->pipeline)) return NULL;
  return PyLong_FromLong(pcc_free_buffers(self->pipeline));
}

/* Dropped without close(): cancel, wait for the writes that run, and rather leak pool and sources than unmap them under
 * a thread that is stuck. In a forked child there is nothing to end. */
static void pipeline_dealloc(PipelineObject *self) {
  if (self->pipeline && !pcc_pipeline_foreign(self->pipeline)) {
    bool idle = true;
    if (!self->closed) {
      Py_BEGIN_ALLOW_THREADS
      pcc_pipeline_refuse(self->pipeline);
      pcc_pipeline_cancel_all(self->pipeline);
      idle = pcc_pipeline_idle(self->pipeline, pcc_now() + ABANDON_NS);
      if (idle) pcc_pipeline_stop(self->pipeline);
      Py_END_ALLOW_THREADS
    }
    if (idle) {
      Py_CLEAR(self->open);
      pcc_pipeline_release(self->pipeline);
    }
  } else if (!self->pipeline) {
    Py_CLEAR(self->open);
  }
  free_object((PyObject *)self);
}

static PyMethodDef pipeline_methods[] = {
    {"submit", METHOD(pipeline_submit), METH_VARARGS | METH_KEYWORDS, NULL},
    {"drain", METHOD(pipeline_drain), METH_VARARGS, NULL},
    {"close", METHOD(pipeline_close), METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef pipeline_getters[] = {
    {"buffers", (getter)(void (*)(void))pipeline_buffers, NULL, NULL, NULL},
    {"memory", (getter)(void (*)(void))pipeline_memory, NULL, NULL, NULL},
    {"free_buffers", (getter)(void (*)(void))pipeline_free_buffers, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot pipeline_slots[] = {{Py_tp_new, pipeline_new},
                                       {Py_tp_dealloc, pipeline_dealloc},
                                       {Py_tp_methods, pipeline_methods},
                                       {Py_tp_getset, pipeline_getters},
                                       {0, NULL}};
PyType_Spec pipeline_spec = {"pccheck._native.Pipeline", sizeof(PipelineObject), 0, Py_TPFLAGS_DEFAULT,
                             pipeline_slots};
