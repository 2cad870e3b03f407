/* pccheck._native.copy_pieces and digest_pieces: many small pieces in one call, without the GIL. */
#include "module.h"

#include <stdlib.h>

static bool same_count(size_t a, size_t b) {
  if (a != b) PyErr_SetString(PyExc_ValueError, "addresses, lengths and targets must be of the same number");
  return a == b;
}

static bool has_place(uint64_t address, uint64_t length) {
  if (address || !length) return true;
  PyErr_SetString(PyExc_ValueError, "a piece with bytes has the address 0");
  return false;
}

PyObject *copy_pieces(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"addresses", "lengths", "targets", "threads", NULL};
  PyObject *sources, *sizes, *places;
  size_t n[3] = {0, 0, 0};
  int threads;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOi", names, &sources, &sizes, &places, &threads)) return NULL;
  if (threads < 1 || threads > PCC_MAX_THREADS)
    return PyErr_Format(PyExc_ValueError, "threads must be from 1 to %d, not %d", PCC_MAX_THREADS, threads);
  uint64_t *source = copy_u64s(sources, "addresses", &n[0]);
  uint64_t *length = source ? copy_u64s(sizes, "lengths", &n[1]) : NULL;
  uint64_t *target = length ? copy_u64s(places, "targets", &n[2]) : NULL;
  pcc_move *moves = NULL;
  if (target && same_count(n[0], n[1]) && same_count(n[0], n[2]) && !(moves = malloc((n[0] + 1) * sizeof *moves)))
    PyErr_NoMemory();
  for (size_t i = 0; moves && i < n[0]; i++) {
    moves[i] = (pcc_move){(const uint8_t *)(uintptr_t)source[i], (uint8_t *)(uintptr_t)target[i], length[i]};
    if (!has_place(source[i], length[i]) || !has_place(target[i], length[i])) {
      free(moves);
      moves = NULL;
    }
  }
  free(source);
  free(length);
  free(target);
  if (!moves) return NULL;
  Py_BEGIN_ALLOW_THREADS
  pcc_copy_pieces(moves, n[0], threads);
  Py_END_ALLOW_THREADS
  free(moves);
  Py_RETURN_NONE;
}

PyObject *digest_pieces(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"addresses", "lengths", NULL};
  PyObject *sources, *sizes, *result = NULL;
  size_t n[2] = {0, 0};
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &sources, &sizes)) return NULL;
  uint64_t *source = copy_u64s(sources, "addresses", &n[0]);
  uint64_t *length = source ? copy_u64s(sizes, "lengths", &n[1]) : NULL;
  bool sound = length && same_count(n[0], n[1]);
  for (size_t i = 0; sound && i < n[0]; i++) sound = has_place(source[i], length[i]);
  if (sound) result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n[0] * PCC_DIGEST));
  if (result) {
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < n[0]; i++)
      pcc_digest_piece((const uint8_t *)(uintptr_t)source[i], length[i], out + i * PCC_DIGEST);
    Py_END_ALLOW_THREADS
  }
  free(source);
  free(length);
  return result;
}
