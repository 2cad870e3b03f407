/* pccheck._native.describe_arrays and check_arrays: what DLPack tells of many arrays, in one call.
 *
 * The structs are those of the DLPack specification, version 1.3: https://dmlc.github.io/dlpack/latest/c_api.html. A
 * description is a buffer of `known_array`s, each followed by its shape and then its strides. */
#include "module.h"

#include <string.h>

#define AHEAD 8       /* arrays: how far ahead memory is asked for that would else be waited for, one by one */
#define MAX_AXES 4096 /* far beyond what any framework has: keeps sums of sizes small */

typedef struct dl_exchange_header {
  uint32_t major, minor;
  struct dl_exchange_header *older;
} dl_exchange_header;

typedef struct dl_exchange {
  dl_exchange_header header;
  void (*allocate)(void), (*export_owned)(void), (*import_owned)(void); /* of other types, and not called here */
  int (*export_borrowed)(void *object, dl_tensor *out);
  void (*current_stream)(void);
} dl_exchange;

typedef struct known_array { /* all of a dl_tensor but its address: without padding, so that it is compared as bytes */
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
} known_array;

typedef struct asking {
  PyTypeObject *cls, *seen; /* seen: the class, or subclass, of the array that was asked last */
  int (*ask)(void *object, dl_tensor *out);
  PyObject *arrays; /* a tuple of ours: asking may run code that changes the caller's list */
  Py_ssize_t count;
  bool has_body; /* instances are larger than the head that all objects have */
} asking;

static int find_function(asking *a) {
  PyObject *capsule = PyObject_GetAttrString((PyObject *)a->cls, "__dlpack_c_exchange_api__");
  if (!capsule) return -1;
  const dl_exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule); /* the table stays for as long as the process does: so it is specified */
  while (api && api->header.major > DLPACK_MAJOR) api = (const dl_exchange *)(const void *)api->header.older;
  if (PyErr_Occurred()) return -1;
  if (!api || api->header.major != DLPACK_MAJOR || !api->export_borrowed) {
    PyErr_Format(PyExc_BufferError, "%R does not lend its arrays by DLPack %d", a->cls, DLPACK_MAJOR);
    return -1;
  }
  a->ask = api->export_borrowed;
  return 0;
}

static int begin(asking *a, PyObject *cls, PyObject *arrays) {
  if (!PyType_Check(cls)) {
    PyErr_SetString(PyExc_TypeError, "the first argument must be the class of the arrays");
    return -1;
  }
  *a = (asking){.cls = (PyTypeObject *)(void *)cls};
  PyObject *size = PyObject_GetAttrString(cls, "__basicsize__");
  a->has_body = size && PyLong_AsSsize_t(size) >= (Py_ssize_t)(sizeof(PyObject) + sizeof(void *));
  Py_XDECREF(size);
  if (PyErr_Occurred() || find_function(a) || !(a->arrays = PySequence_Tuple(arrays))) return -1;
  a->count = PyTuple_Size(a->arrays);
  return 0;
}

/* Have the processor fetch what the arrays to come are made of: all of it was driven out of its caches since the last
 * checkpoint, and waiting for each in turn takes two thirds of the time. An array's object holds a pointer to what the
 * framework has of it, as its first field. Fetching never faults, whatever the address. */
static void look_ahead(const asking *a, Py_ssize_t i) {
#if defined(__GNUC__)
  if (i + 2 * AHEAD < a->count) __builtin_prefetch(PyTuple_GetItem(a->arrays, i + 2 * AHEAD));
  PyObject *next = i + AHEAD < a->count ? PyTuple_GetItem(a->arrays, i + AHEAD) : NULL;
  if (next && Py_TYPE(next) == a->seen) {
    const char *body;
    memcpy(&body, (const char *)next + sizeof(PyObject), sizeof body);
    __builtin_prefetch(body);
    __builtin_prefetch(body + 64);
    __builtin_prefetch(body + 128);
  }
#else
  (void)a, (void)i;
#endif
}

static int ask(asking *a, Py_ssize_t i, dl_tensor *out) {
  PyObject *array = PyTuple_GetItem(a->arrays, i);
  if (Py_TYPE(array) != a->cls && !PyType_IsSubtype(Py_TYPE(array), a->cls)) {
    PyErr_Format(PyExc_TypeError, "item %zd is no %R", i, a->cls);
    return -1;
  }
  a->seen = a->has_body ? Py_TYPE(array) : NULL;
  *out = (dl_tensor){0};
  if (a->ask(array, out)) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_BufferError, "item %zd cannot be lent", i);
    return -1;
  }
  if (out->ndim < 0 || out->ndim > MAX_AXES || (out->ndim && (!out->shape || !out->strides))) {
    PyErr_Format(PyExc_BufferError, "item %zd has no shape or no strides", i);
    return -1;
  }
  return 0;
}

static known_array known_of(const dl_tensor *t) {
  return (known_array){t->device_type, t->device_id, t->ndim, t->type_code, t->type_bits, t->type_lanes};
}

static size_t axes_bytes(int32_t ndim) { return (size_t)ndim * sizeof(int64_t); }

/* -- the two functions ----------------------------------------------------------------------------------------------*/

PyObject *describe_arrays(PyObject *module, PyObject *args) {
  PyObject *cls, *arrays;
  asking a;
  text out = {0};
  (void)module;
  if (!PyArg_ParseTuple(args, "OO", &cls, &arrays) || begin(&a, cls, arrays)) return NULL;
  bool whole = true;
  for (Py_ssize_t i = 0; whole && i < a.count; i++) {
    dl_tensor t;
    whole = ask(&a, i, &t) == 0;
    if (!whole) break;
    known_array known = known_of(&t);
    size_t axes = axes_bytes(t.ndim);
    whole = !add_text(&out, &known, sizeof known) && !add_text(&out, t.shape, axes) && !add_text(&out, t.strides, axes);
  }
  Py_DECREF(a.arrays);
  return end_text(&out, whole);
}

/* Whether a description goes on at `*at` with this array; then `*at` is behind it. */
static bool goes_on(const Py_buffer *description, size_t *at, const dl_tensor *t) {
  const uint8_t *here = (const uint8_t *)description->buf + *at;
  size_t axes = axes_bytes(t->ndim), size = sizeof(known_array) + 2 * axes;
  known_array known = known_of(t);
  if ((size_t)description->len - *at < size || memcmp(here, &known, sizeof known)) return false;
  here += sizeof known;
  if (axes && (memcmp(here, t->shape, axes) || memcmp(here + axes, t->strides, axes))) return false;
  *at += size;
  return true;
}

PyObject *check_arrays(PyObject *module, PyObject *args) {
  PyObject *cls, *arrays, *result = NULL;
  Py_buffer description, addresses;
  asking a;
  size_t at = 0;
  (void)module;
  if (!PyArg_ParseTuple(args, "OOy*w*", &cls, &arrays, &description, &addresses)) return NULL;
  if (begin(&a, cls, arrays) == 0) {
    Py_ssize_t i = 0;
    bool fits = addresses.len == a.count * 8, asked = true;
    if (!fits) PyErr_Format(PyExc_ValueError, "%zd bytes do not hold %zd addresses", addresses.len, a.count);
    for (; fits && i < a.count; i++) {
      dl_tensor t;
      look_ahead(&a, i);
      asked = ask(&a, i, &t) == 0;
      if (!asked || !goes_on(&description, &at, &t)) break;
      uint64_t address = (uint64_t)(uintptr_t)first_element(&t);
      memcpy((uint8_t *)addresses.buf + 8 * i, &address, 8);
    }
    if (fits && asked) result = PyLong_FromSsize_t(i == a.count && at == (size_t)description.len ? -1 : i);
    Py_DECREF(a.arrays);
  }
  PyBuffer_Release(&description);
  PyBuffer_Release(&addresses);
  return result;
}
