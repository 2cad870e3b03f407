/* pccheck._native.contents: which objects are in some containers, without looking at one of them.
 *
 * Taking a reference to an object fetches it into the processor's cache: for thousands of objects that have not been
 * used for a while this takes longer than all that is asked about them. */
#include "module.h"

#include <stdlib.h>

typedef struct words {
  uint64_t *words;
  size_t used, room;
} words;

static int put(words *w, uint64_t word) {
  if (w->used == w->room) {
    size_t room = 2 * w->room + 64;
    uint64_t *grown = realloc(w->words, room * sizeof *grown);
    if (!grown) {
      PyErr_NoMemory();
      return -1;
    }
    w->words = grown;
    w->room = room;
  }
  w->words[w->used++] = word;
  return 0;
}

static int put_object(words *w, PyObject *object) { return put(w, (uint64_t)(uintptr_t)object); }

static int put_dict(words *w, PyObject *dict) {
  PyObject *key, *value;
  Py_ssize_t at = 0;
  if (put(w, (uint64_t)PyDict_Size(dict))) return -1;
  while (PyDict_Next(dict, &at, &key, &value)) {
    if (put_object(w, key) || put_object(w, value)) return -1;
  }
  return 0;
}

/* Nothing in here runs Python code, so that no container changes meanwhile. */
static int put_items(words *w, PyObject *container) {
  bool list = PyList_Check(container);
  Py_ssize_t count = list ? PyList_Size(container) : PyTuple_Size(container);
  if (put(w, (uint64_t)count)) return -1;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (put_object(w, list ? PyList_GetItem(container, i) : PyTuple_GetItem(container, i))) return -1;
  }
  return 0;
}

PyObject *contents(PyObject *module, PyObject *containers) {
  words w = {0};
  PyObject *result = NULL, *all = PySequence_Tuple(containers);
  (void)module;
  bool whole = all != NULL;
  for (Py_ssize_t i = 0; whole && i < PyTuple_Size(all); i++) {
    PyObject *container = PyTuple_GetItem(all, i);
    if (PyList_Check(container) || PyTuple_Check(container)) {
      whole = put_items(&w, container) == 0;
    } else if (PyDict_CheckExact(container)) { /* a subclass may have an order of its own */
      whole = put_dict(&w, container) == 0;
    } else {
      PyErr_Format(PyExc_TypeError, "item %zd is no list, tuple or plain dict", i);
      whole = false;
    }
  }
  if (whole) result = PyBytes_FromStringAndSize((const char *)w.words, (Py_ssize_t)(w.used * sizeof *w.words));
  free(w.words);
  Py_XDECREF(all);
  return result;
}
