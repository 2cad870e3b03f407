/* pccheck._native.hold_buffers: keeps the memory of many arrays as it is, and tells where it lies, in one call.
 *
 * One object holds them all. A memoryview of each would be an object that the garbage collector looks after: thousands
 * of them, made by every save, set off collections of the whole program's objects, in the thread that trains. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

#define ON_HOST 1 /* kDLCPU */

typedef struct HoldObject { /* not looked after by the garbage collector: arrays know nothing of who holds them */
  PyObject_HEAD
  Py_ssize_t taken;
  Py_buffer *views; /* of arrays, or of capsules */
} HoldObject;

/* -- DLPack's capsules: for dtypes that the buffer protocol has no name for -----------------------------------------*/

typedef struct dl_managed { /* up to DLPack 0.8 */
  dl_tensor tensor;
} dl_managed;

typedef struct dl_versioned { /* from 1.0 on */
  uint32_t major, minor;
  void *context;
  void (*deleter)(struct dl_versioned *self);
  uint64_t flags;
  dl_tensor tensor;
} dl_versioned;

static const dl_tensor *tensor_in(PyObject *capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) return &((dl_managed *)PyCapsule_GetPointer(capsule, "dltensor"))->tensor;
  if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) return NULL;
  const dl_versioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
  return versioned->major == DLPACK_MAJOR ? &versioned->tensor : NULL;
}

static bool in_c_order(const dl_tensor *t) {
  int64_t expected = 1;
  if (t->ndim < 0 || (t->ndim && !t->shape)) return false;
  for (int32_t i = 0; i < t->ndim; i++)
    if (!t->shape[i]) return true;
  for (int32_t i = t->ndim; t->strides && i-- > 0;) {
    if (t->shape[i] != 1 && t->strides[i] != expected) return false;
    expected *= t->shape[i];
  }
  return true;
}

static int take_capsule(PyObject *capsule, Py_ssize_t i, Py_buffer *view) {
  const dl_tensor *t = tensor_in(capsule);
  if (!t || t->device_type != ON_HOST || !in_c_order(t)) {
    PyErr_Format(PyExc_BufferError, "item %zd is no unused DLPack capsule of host memory in C order", i);
    return -1;
  }
  /* The view refers to the capsule, whose end lets go. */
  return PyBuffer_FillInfo(view, capsule, first_element(t), 0, 1, PyBUF_SIMPLE);
}

/* -- all of them ----------------------------------------------------------------------------------------------------*/

static int take(PyObject *object, Py_ssize_t i, Py_buffer *view) {
  if (PyCapsule_CheckExact(object)) return take_capsule(object, i, view);
  if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS)) return -1;
  if (PyBuffer_IsContiguous(view, 'C')) return 0;
  PyBuffer_Release(view);
  PyErr_Format(PyExc_BufferError, "item %zd is not laid out in C order", i);
  return -1;
}

static int take_all(HoldObject *self, PyObject *objects, Py_ssize_t count, uint8_t *addresses) {
  self->views = malloc(((size_t)count + 1) * sizeof *self->views);
  if (!self->views) {
    PyErr_NoMemory();
    return -1;
  }
  for (; self->taken < count; self->taken++) {
    Py_buffer *view = &self->views[self->taken];
    if (take(PyTuple_GetItem(objects, self->taken), self->taken, view)) return -1;
    uint64_t address = (uint64_t)(uintptr_t)view->buf;
    memcpy(addresses + 8 * self->taken, &address, 8);
  }
  return 0;
}

PyObject *hold_buffers(PyObject *module, PyObject *args) {
  PyObject *sequence;
  Py_buffer addresses;
  if (!PyArg_ParseTuple(args, "Ow*", &sequence, &addresses)) return NULL;
  PyTypeObject *type = ((module_state *)PyModule_GetState(module))->hold_type;
  HoldObject *self = NULL;
  PyObject *objects = PySequence_Tuple(sequence); /* asking waits, and other threads may change the caller's list */
  Py_ssize_t count = objects ? PyTuple_Size(objects) : 0;
  if (objects && addresses.len != count * 8) {
    PyErr_Format(PyExc_ValueError, "%zd bytes do not hold %zd addresses", addresses.len, count);
  } else if (objects && (self = PyObject_New(HoldObject, type))) {
    self->taken = 0;
    self->views = NULL;
    if (take_all(self, objects, count, addresses.buf)) Py_CLEAR(self); /* which releases what was taken */
  }
  Py_XDECREF(objects);
  PyBuffer_Release(&addresses);
  return (PyObject *)self;
}

static void hold_dealloc(HoldObject *self) {
  while (self->taken > 0) PyBuffer_Release(&self->views[--self->taken]);
  free(self->views);
  free_object((PyObject *)self);
}

static Py_ssize_t hold_length(HoldObject *self) { return self->taken; }

static PyType_Slot hold_slots[] = {{Py_tp_dealloc, hold_dealloc}, {Py_sq_length, hold_length}, {0, NULL}};
PyType_Spec hold_spec = {"pccheck._native.Hold", sizeof(HoldObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hold_slots};
