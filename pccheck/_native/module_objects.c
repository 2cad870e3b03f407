/* pccheck._native.contents: which objects are in some containers, without looking at one of them.
 *
 * Taking a reference to an object fetches it into the processor's cache: for thousands of objects that have not been
 * used for a while this takes longer than all that is asked about them. */
#include "module.h"

static int put_word(text *t, uint64_t word) { return add_text(t, &word, sizeof word); }

static int put_object(text *t, PyObject *object) { return put_word(t, (uint64_t)(uintptr_t)object); }

static int put_dict(text *t, PyObject *dict) {
  PyObject *key, *value;
  Py_ssize_t at = 0;
  if (put_word(t, (uint64_t)PyDict_Size(dict))) return -1;
  while (PyDict_Next(dict, &at, &key, &value)) {
    if (put_object(t, key) || put_object(t, value)) return -1;
  }
  return 0;
}

/* Nothing in here runs Python code, so that no container changes meanwhile. */
static int put_items(text *t, PyObject *container) {
  bool list = PyList_Check(container);
  Py_ssize_t count = list ? PyList_Size(container) : PyTuple_Size(container);
  if (put_word(t, (uint64_t)count)) return -1;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (put_object(t, list ? PyList_GetItem(container, i) : PyTuple_GetItem(container, i))) return -1;
  }
  return 0;
}

PyObject *contents(PyObject *module, PyObject *containers) {
  text t = {0};
  PyObject *all = PySequence_Tuple(containers);
  (void)module;
  bool whole = all != NULL;
  for (Py_ssize_t i = 0; whole && i < PyTuple_Size(all); i++) {
    PyObject *container = PyTuple_GetItem(all, i);
    if (PyList_Check(container) || PyTuple_Check(container)) {
      whole = put_items(&t, container) == 0;
    } else if (PyDict_CheckExact(container)) { /* a subclass may have an order of its own */
      whole = put_dict(&t, container) == 0;
    } else {
      PyErr_Format(PyExc_TypeError, "item %zd is no list, tuple or plain dict", i);
      whole = false;
    }
  }
  Py_XDECREF(all);
  return end_text(&t, whole);
}
