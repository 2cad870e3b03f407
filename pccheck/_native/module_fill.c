/* The methods of pccheck._native.Job for the thread that fills chunks from devices. Only `take_fill` may wait. */
#include "module.h"

#include <errno.h>

PyObject *job_fills_left(JobObject *self, PyObject *unused) {
  (void)unused;
  if (check_process((PyObject *)self, self->pipeline)) return NULL;
  return PyLong_FromSize_t(pcc_fills_left(self->pipeline, self->job));
}

PyObject *job_take_fill(JobObject *self, PyObject *args) {
  PyObject *timeout;
  int64_t until;
  if (!PyArg_ParseTuple(args, "O", &timeout) || parse_until(timeout, &until) ||
      check_process((PyObject *)self, self->pipeline))
    return NULL;
  int chunk = pcc_fill_take(self->pipeline, self->job, 0);
  if (chunk < 0 && pcc_now() < until) {
    Py_BEGIN_ALLOW_THREADS
    chunk = pcc_fill_take(self->pipeline, self->job, until);
    Py_END_ALLOW_THREADS
  }
  if (chunk < 0) Py_RETURN_NONE;
  uint8_t *address = pcc_fill_at(self->pipeline, self->job, (size_t)chunk);
  return Py_BuildValue("iKK", chunk, (unsigned long long)(uintptr_t)address,
                       (unsigned long long)self->job->layout->chunks[chunk].stored);
}

static PyObject *fill_result(int error, Py_ssize_t chunk) {
  if (error) return PyErr_Format(PyExc_ValueError, "chunk %zd is not one that this call may be made for", chunk);
  Py_RETURN_NONE;
}

PyObject *job_fill_done(JobObject *self, PyObject *args) {
  Py_ssize_t chunk;
  if (!PyArg_ParseTuple(args, "n", &chunk) || check_process((PyObject *)self, self->pipeline)) return NULL;
  int error = pcc_fill_done(self->pipeline, self->job, (size_t)chunk);
  if (error == ECANCELED) Py_RETURN_FALSE;
  return error ? fill_result(error, chunk) : Py_NewRef(Py_True);
}

/* The rest may end the job, and so close its file, which may flush: not under the GIL. */
PyObject *job_drop_fill(JobObject *self, PyObject *args) {
  Py_ssize_t chunk;
  int reusable, error;
  if (!PyArg_ParseTuple(args, "np", &chunk, &reusable) || check_process((PyObject *)self, self->pipeline)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  error = pcc_fill_drop(self->pipeline, self->job, (size_t)chunk, reusable);
  Py_END_ALLOW_THREADS
  return fill_result(error, chunk);
}

PyObject *job_reclaim(JobObject *self, PyObject *args) {
  Py_ssize_t chunk;
  int error;
  if (!PyArg_ParseTuple(args, "n", &chunk) || check_process((PyObject *)self, self->pipeline)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  error = pcc_fill_reclaim(self->pipeline, self->job, (size_t)chunk);
  Py_END_ALLOW_THREADS
  return fill_result(error, chunk);
}

PyObject *job_fail_fill(JobObject *self, PyObject *unused) {
  (void)unused;
  if (check_process((PyObject *)self, self->pipeline)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  pcc_fill_fail(self->pipeline, self->job);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}
