/* pccheck._native.describe_arrays and check_arrays: what DLPack tells of many arrays, in one call.
 *
 * The structs are those of the DLPack specification, version 1.3: https://dmlc.github.io/dlpack/latest/c_api.html. A
 * description is a buffer of `known_array`s, each followed by its shape, its strides, and the answer to each question,
 * a byte. */
#include "module.h"

#include <string.h>

#define AHEAD 24      /* arrays: how far ahead memory is asked for that would else be waited for, one by one */
#define MAX_AXES 4096 /* far beyond what any framework has: keeps sums of sizes small */
#define MAX_QUESTIONS 8

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

typedef struct question { /* an attribute of the class, or a method without arguments: is it so, of an array? */
  PyObject *descriptor;
  descrgetfunc get;
  PyCFunction call; /* of a method: without a bound method for each array; NULL: an attribute */
} question;

typedef struct asking {
  PyTypeObject *cls, *seen; /* seen: the class, or subclass, of the array that was asked last */
  int (*ask)(void *object, dl_tensor *out);
  PyObject *arrays; /* a tuple of ours: asking may run code that changes the caller's list */
  Py_ssize_t count;
  question questions[MAX_QUESTIONS];
  int asked;             /* of them */
  const uint64_t *looks; /* of each array, memory that the framework will look at; a guess, and no more than that */
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

static bool is_ours(const asking *a, PyObject *array, Py_ssize_t i) {
  if (Py_TYPE(array) == a->cls || PyType_IsSubtype(Py_TYPE(array), a->cls)) return true;
  PyErr_Format(PyExc_TypeError, "item %zd is no %R", i, a->cls);
  return false;
}

/* Find how a question is asked of all arrays, by asking for it on the first. A method is called as the C function that
 * it is: to be bound to each array, or called by way of the class, takes a fifth of the time of all questions. */
static int add_question(asking *a, PyObject *name) {
  if (a->asked == MAX_QUESTIONS) {
    PyErr_Format(PyExc_ValueError, "at most %d questions can be asked", MAX_QUESTIONS);
    return -1;
  }
  PyObject *first = PyTuple_GetItem(a->arrays, 0), *descriptor = PyObject_GetAttr((PyObject *)a->cls, name);
  if (!descriptor) return -1;
  question *q = &a->questions[a->asked++];
  *q = (question){.descriptor = descriptor, .get = (descrgetfunc)PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get)};
  if (!q->get) {
    PyErr_Format(PyExc_TypeError, "%R of %R is the same for all", name, a->cls);
    return -1;
  }
  if (!PyCallable_Check(descriptor)) return 0;
  PyObject *bound = q->get(descriptor, first, (PyObject *)Py_TYPE(first));
  if (!bound) return -1;
  if (PyObject_TypeCheck(bound, &PyCFunction_Type) && PyCFunction_GetFlags(bound) == METH_NOARGS)
    q->call = PyCFunction_GetFunction(bound);
  else
    PyErr_Format(PyExc_TypeError, "%R of %R is no native method without arguments", name, a->cls);
  Py_DECREF(bound);
  return q->call ? 0 : -1;
}

static void end(asking *a) {
  while (a->asked > 0) Py_DECREF(a->questions[--a->asked].descriptor);
  Py_CLEAR(a->arrays);
}

static int begin(asking *a, PyObject *cls, PyObject *arrays, PyObject *names) {
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
  bool whole = !names || !a->count || is_ours(a, PyTuple_GetItem(a->arrays, 0), 0);
  for (Py_ssize_t n = 0; whole && names && a->count && n < PyTuple_Size(names); n++)
    whole = add_question(a, PyTuple_GetItem(names, n)) == 0;
  if (!whole) end(a);
  return whole ? 0 : -1;
}

/* Have the processor fetch what the arrays to come are made of: all of it was driven out of its caches since the last
 * checkpoint, and waiting for each in turn takes two thirds of the time. An array's object holds a pointer to what the
 * framework has of it, as its first field. What that in turn points to the caller may know (of a tensor its storage: a
 * third of the time). Fetching never faults, whatever the address. */
static void look_ahead(const asking *a, Py_ssize_t i) {
#if defined(__GNUC__)
  if (i + 2 * AHEAD < a->count) __builtin_prefetch(PyTuple_GetItem(a->arrays, i + 2 * AHEAD));
  if (a->looks && i + AHEAD < a->count) {
    const char *there = (const char *)(uintptr_t)a->looks[i + AHEAD];
    __builtin_prefetch(there);
    __builtin_prefetch(there + 63);
  }
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
  if (!is_ours(a, array, i)) return -1;
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

/* Answer a question about an array that was asked already: 1 or 0, -1 with an error set. */
static int answer(const question *q, PyObject *array) {
  PyObject *told = q->call ? q->call(array, NULL) : q->get(q->descriptor, array, (PyObject *)Py_TYPE(array));
  int is = told ? PyObject_IsTrue(told) : -1;
  Py_XDECREF(told);
  return is;
}

static known_array known_of(const dl_tensor *t) {
  return (known_array){t->device_type, t->device_id, t->ndim, t->type_code, t->type_bits, t->type_lanes};
}

static size_t axes_bytes(int32_t ndim) { return (size_t)ndim * sizeof(int64_t); }

/* -- the two functions ----------------------------------------------------------------------------------------------*/

PyObject *describe_arrays(PyObject *module, PyObject *args) {
  PyObject *cls, *arrays, *names = NULL;
  asking a;
  text out = {0};
  (void)module;
  if (!PyArg_ParseTuple(args, "OO|O!", &cls, &arrays, &PyTuple_Type, &names) || begin(&a, cls, arrays, names))
    return NULL;
  bool whole = true;
  for (Py_ssize_t i = 0; whole && i < a.count; i++) {
    dl_tensor t;
    whole = ask(&a, i, &t) == 0;
    if (!whole) break;
    known_array known = known_of(&t);
    size_t axes = axes_bytes(t.ndim);
    whole = !add_text(&out, &known, sizeof known) && !add_text(&out, t.shape, axes) && !add_text(&out, t.strides, axes);
    for (int q = 0; whole && q < a.asked; q++) {
      int is = answer(&a.questions[q], PyTuple_GetItem(a.arrays, i));
      uint8_t byte = (uint8_t)is;
      whole = is >= 0 && !add_text(&out, &byte, 1);
    }
  }
  end(&a);
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

/* Likewise with the answers about it: 1 or 0, -1 with an error set. */
static int answers_go_on(const asking *a, Py_ssize_t i, const Py_buffer *description, size_t *at) {
  const uint8_t *known = description->buf;
  for (int q = 0; q < a->asked; q++, ++*at) {
    int is = answer(&a->questions[q], PyTuple_GetItem(a->arrays, i));
    if (is < 0) return -1;
    if (*at >= (size_t)description->len || known[*at] != is) return 0;
  }
  return 1;
}

PyObject *check_arrays(PyObject *module, PyObject *args) {
  PyObject *cls, *arrays, *names = NULL, *result = NULL;
  Py_buffer description, addresses, looks = {0};
  asking a;
  size_t at = 0;
  (void)module;
  if (!PyArg_ParseTuple(args, "OOy*w*|O!y*", &cls, &arrays, &description, &addresses, &PyTuple_Type, &names,
                        &looks))
    return NULL;
  if (begin(&a, cls, arrays, names) == 0) {
    Py_ssize_t i = 0;
    bool fits = addresses.len == a.count * 8, asked = true;
    if (looks.len == a.count * 8) a.looks = looks.buf;
    if (!fits) PyErr_Format(PyExc_ValueError, "%zd bytes do not hold %zd addresses", addresses.len, a.count);
    for (; fits && i < a.count; i++) {
      dl_tensor t;
      look_ahead(&a, i);
      asked = ask(&a, i, &t) == 0;
      if (!asked || !goes_on(&description, &at, &t)) break;
      int same = answers_go_on(&a, i, &description, &at);
      asked = same >= 0;
      if (same <= 0) break;
      uint64_t address = (uint64_t)(uintptr_t)first_element(&t);
      memcpy((uint8_t *)addresses.buf + 8 * i, &address, 8);
    }
    if (fits && asked) result = PyLong_FromSsize_t(i == a.count && at == (size_t)description.len ? -1 : i);
    end(&a);
  }
  if (looks.obj) PyBuffer_Release(&looks);
  PyBuffer_Release(&description);
  PyBuffer_Release(&addresses);
  return result;
}
