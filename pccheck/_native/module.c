/* The Python face of the native data path: `pccheck._native`. Everything but module*.c knows no Python.
 *
 * The GIL is released around every wait, copy and read, and never waited for while a mutex is held. */
#include "module.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* -- arguments and errors -------------------------------------------------------------------------------------------*/

PyObject *raise_errno(int error) {
  if (error == EINVAL) return PyErr_Format(PyExc_ValueError, "the arguments contradict each other");
  if (error == ENOMEM) return PyErr_NoMemory();
  errno = error;
  return PyErr_SetFromErrno(PyExc_OSError);
}

/* Whether a buffer holds 64-bit numbers: whole ones of that size, or plain bytes. */
static bool holds_u64(const Py_buffer *view) {
  const char *format = view->format ? view->format : "B";
  if (*format == '@' || *format == '=' || *format == '<') format++;
  if (!format[0] || format[1] || view->len % 8) return false;
  return view->itemsize == 8 ? strchr("QLNqln", *format) != NULL : *format == 'B';
}

uint64_t *copy_u64s(PyObject *object, const char *name, size_t *count) {
  uint64_t *numbers = NULL;
  if (PyObject_CheckBuffer(object)) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_ND | PyBUF_FORMAT)) return NULL;
    if (!holds_u64(&view)) {
      PyErr_Format(PyExc_TypeError, "%s must hold 64-bit whole numbers", name);
    } else if (!(numbers = malloc((size_t)view.len + 8))) {
      PyErr_NoMemory();
    } else {
      if (view.len) memcpy(numbers, view.buf, (size_t)view.len);
      *count = (size_t)view.len / 8;
    }
    PyBuffer_Release(&view);
    return numbers;
  }
  Py_ssize_t length = PySequence_Size(object);
  if (length < 0) return NULL;
  if (!(numbers = malloc(((size_t)length + 1) * 8))) return (uint64_t *)(void *)PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < length; i++) {
    PyObject *item = PySequence_GetItem(object, i);
    numbers[i] = item ? PyLong_AsUnsignedLongLong(item) : 0;
    Py_XDECREF(item);
    if (PyErr_Occurred()) {
      free(numbers);
      return NULL;
    }
  }
  *count = (size_t)length;
  return numbers;
}

/* -- results of unknown length --------------------------------------------------------------------------------------*/

int add_text(text *t, const void *bytes, size_t count) {
  if (t->used + count > t->room) {
    size_t room = 2 * t->room + count;
    uint8_t *grown = realloc(t->bytes, room);
    if (!grown) {
      PyErr_NoMemory();
      return -1;
    }
    t->bytes = grown;
    t->room = room;
  }
  if (count) memcpy(t->bytes + t->used, bytes, count);
  t->used += count;
  return 0;
}

PyObject *end_text(text *t, bool whole) {
  PyObject *result = whole ? PyBytes_FromStringAndSize((const char *)t->bytes, (Py_ssize_t)t->used) : NULL;
  free(t->bytes);
  return result;
}

/* -- numbers in shared memory, addresses, digest --------------------------------------------------------------------*/

static _Atomic uint64_t *word_at(const Py_buffer *view, Py_ssize_t offset) {
  uint8_t *address = (uint8_t *)view->buf + offset;
  if (offset < 0 || offset > view->len - 8) {
    PyErr_Format(PyExc_IndexError, "no 64-bit number at %zd in a buffer of %zd bytes", offset, view->len);
  } else if ((uintptr_t)address % 8) {
    PyErr_Format(PyExc_ValueError, "the number at %zd is not aligned to 8 bytes in memory", offset);
  } else {
    return (_Atomic uint64_t *)(void *)address;
  }
  return NULL;
}

static PyObject *load64(PyObject *module, PyObject *args) {
  Py_buffer view;
  Py_ssize_t offset;
  (void)module;
  if (!PyArg_ParseTuple(args, "y*n", &view, &offset)) return NULL;
  _Atomic uint64_t *word = word_at(&view, offset);
  PyObject *result = word ? PyLong_FromUnsignedLongLong(atomic_load(word)) : NULL;
  PyBuffer_Release(&view);
  return result;
}

static PyObject *store64(PyObject *module, PyObject *args) {
  Py_buffer view;
  Py_ssize_t offset;
  PyObject *value;
  (void)module;
  if (!PyArg_ParseTuple(args, "w*nO", &view, &offset, &value)) return NULL;
  unsigned long long number = PyLong_AsUnsignedLongLong(value);
  _Atomic uint64_t *word = PyErr_Occurred() ? NULL : word_at(&view, offset);
  if (word) atomic_store(word, number);
  PyBuffer_Release(&view);
  return word ? Py_NewRef(Py_None) : NULL;
}

static PyObject *cas64(PyObject *module, PyObject *args) {
  Py_buffer view;
  Py_ssize_t offset;
  PyObject *expected, *value;
  (void)module;
  if (!PyArg_ParseTuple(args, "w*nOO", &view, &offset, &expected, &value)) return NULL;
  uint64_t before = PyLong_AsUnsignedLongLong(expected);
  uint64_t number = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(value);
  _Atomic uint64_t *word = PyErr_Occurred() ? NULL : word_at(&view, offset);
  bool swapped = word && atomic_compare_exchange_strong(word, &before, number);
  PyBuffer_Release(&view);
  return word ? PyBool_FromLong(swapped) : NULL;
}

static PyObject *buffer_addresses(PyObject *module, PyObject *sequence) {
  (void)module;
  PyObject *items = PySequence_List(sequence);
  Py_ssize_t count = items ? PyList_Size(items) : 0;
  PyObject *result = items ? PyBytes_FromStringAndSize(NULL, count * 8) : NULL;
  for (Py_ssize_t i = 0; result && i < count; i++) {
    Py_buffer view; /* PyBUF_SIMPLE asks for no format: dtypes that buffers cannot name have an address all the same */
    if (PyObject_GetBuffer(PyList_GetItem(items, i), &view, PyBUF_SIMPLE)) {
      Py_CLEAR(result);
      break;
    }
    uint64_t address = (uint64_t)(uintptr_t)view.buf;
    memcpy(PyBytes_AsString(result) + 8 * i, &address, 8);
    PyBuffer_Release(&view);
  }
  Py_XDECREF(items);
  return result;
}

static PyObject *xxh3_128(PyObject *module, PyObject *args) {
  Py_buffer view;
  uint8_t digest[PCC_DIGEST];
  (void)module;
  if (!PyArg_ParseTuple(args, "y*", &view)) return NULL;
  bool fits = view.len >= (Py_ssize_t)PCC_SHORTEST_LONG;
  if (fits) {
    Py_BEGIN_ALLOW_THREADS
    pcc_digest(view.buf, (size_t)view.len, digest);
    Py_END_ALLOW_THREADS
  }
  PyBuffer_Release(&view);
  if (!fits) return PyErr_Format(PyExc_ValueError, "inputs below %u bytes are for xxhash", PCC_SHORTEST_LONG);
  return PyBytes_FromStringAndSize((const char *)digest, PCC_DIGEST);
}

static PyObject *isa(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyUnicode_FromString(pcc_kernel_now()->name);
}

static PyObject *choose_isa(PyObject *module, PyObject *args) {
  const char *name;
  (void)module;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  if (pcc_kernel_choose(name)) return PyErr_Format(PyExc_ValueError, "this machine has no kernel \"%s\"", name);
  Py_RETURN_NONE;
}

/* -- module ---------------------------------------------------------------------------------------------------------*/

static PyMethodDef functions[] = {
    {"read_chunks", METHOD(read_chunks), METH_VARARGS | METH_KEYWORDS, NULL},
    {"copy_pieces", METHOD(copy_pieces), METH_VARARGS | METH_KEYWORDS, NULL},
    {"digest_pieces", METHOD(digest_pieces), METH_VARARGS | METH_KEYWORDS, NULL},
    {"describe_arrays", describe_arrays, METH_VARARGS, NULL},
    {"check_arrays", check_arrays, METH_VARARGS, NULL},
    {"hold_buffers", hold_buffers, METH_VARARGS, NULL},
    {"contents", contents, METH_O, NULL},
    {"file_status", file_status, METH_VARARGS, NULL},
    {"lock_file", lock_file, METH_VARARGS, NULL},
    {"load64", load64, METH_VARARGS, NULL},
    {"store64", store64, METH_VARARGS, NULL},
    {"cas64", cas64, METH_VARARGS, NULL},
    {"buffer_addresses", buffer_addresses, METH_O, NULL},
    {"xxh3_128", xxh3_128, METH_VARARGS, NULL},
    {"isa", isa, METH_NOARGS, NULL},
    {"choose_isa", choose_isa, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  pcc_kernel_choose("best");
  PyObject *errors = PyImport_ImportModule("pccheck.errors");
  if (!errors) return -1;
  state->closed_error = PyObject_GetAttrString(errors, "ClosedError");
  state->forked_error = PyObject_GetAttrString(errors, "ForkedError");
  Py_DECREF(errors);
  state->job_type = (PyTypeObject *)(void *)PyType_FromModuleAndSpec(module, &job_spec, NULL);
  state->layout_type = (PyTypeObject *)(void *)PyType_FromModuleAndSpec(module, &layout_spec, NULL);
  state->pipeline_type = (PyTypeObject *)(void *)PyType_FromModuleAndSpec(module, &pipeline_spec, NULL);
  state->hold_type = (PyTypeObject *)(void *)PyType_FromModuleAndSpec(module, &hold_spec, NULL);
  PyTypeObject *types[] = {state->job_type, state->layout_type, state->pipeline_type, state->hold_type};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    if (!types[i] || PyModule_AddType(module, types[i])) return -1;
  }
  return state->closed_error && state->forked_error ? 0 : -1;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  module_state *state = PyModule_GetState(module);
  Py_VISIT(state->job_type);
  Py_VISIT(state->layout_type);
  Py_VISIT(state->pipeline_type);
  Py_VISIT(state->hold_type);
  Py_VISIT(state->closed_error);
  Py_VISIT(state->forked_error);
  return 0;
}

static int module_clear(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  Py_CLEAR(state->job_type);
  Py_CLEAR(state->layout_type);
  Py_CLEAR(state->pipeline_type);
  Py_CLEAR(state->hold_type);
  Py_CLEAR(state->closed_error);
  Py_CLEAR(state->forked_error);
  return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native",       "The native data path.", sizeof(module_state), functions,
    module_slots,          module_traverse, module_clear,            NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
