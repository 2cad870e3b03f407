/* pccheck._native.read_chunks: parallel reads into a buffer of the caller, without the GIL. */
#include "module.h"

#include <stdlib.h>

static pcc_read *make_reads(const Py_buffer *destination, PyObject *places, PyObject *offsets, PyObject *lengths,
                            const char *digests, Py_ssize_t digest_bytes, size_t *count) {
  size_t n[3] = {0, 0, 0};
  uint64_t *at = copy_u64s(places, "destination_offsets", &n[0]);
  uint64_t *from = at ? copy_u64s(offsets, "file_offsets", &n[1]) : NULL;
  uint64_t *length = from ? copy_u64s(lengths, "lengths", &n[2]) : NULL;
  uint64_t room = (uint64_t)destination->len;
  pcc_read *reads = NULL;
  if (!length) goto done;
  if (n[0] != n[1] || n[0] != n[2] || (digests && (size_t)digest_bytes != n[0] * PCC_DIGEST)) {
    PyErr_SetString(PyExc_ValueError, "offsets, lengths and digests must be of the same number of chunks");
    goto done;
  }
  if (!(reads = calloc(n[0] + 1, sizeof *reads))) {
    PyErr_NoMemory();
    goto done;
  }
  for (size_t i = 0; i < n[0]; i++) {
    if (at[i] > room || length[i] > room - at[i] || from[i] > INT64_MAX - length[i] ||
        (digests && length[i] < PCC_SHORTEST_LONG)) {
      PyErr_Format(PyExc_ValueError, "chunk %zu does not fit the destination, or is too short to have a digest", i);
      free(reads);
      reads = NULL;
      goto done;
    }
    reads[i] = (pcc_read){(uint8_t *)destination->buf + at[i], from[i], length[i],
                          digests ? (const uint8_t *)digests + i * PCC_DIGEST : NULL, 0};
  }
  *count = n[0];
done:
  free(at);
  free(from);
  free(length);
  return reads;
}

static PyObject *list_failed(const pcc_read *reads, size_t count) {
  PyObject *failed = PyList_New(0);
  for (size_t i = 0; failed && i < count; i++) {
    if (!reads[i].error) continue;
    PyObject *entry = Py_BuildValue("ni", (Py_ssize_t)i, reads[i].error < 0 ? 0 : reads[i].error);
    if (!entry || PyList_Append(failed, entry)) Py_CLEAR(failed);
    Py_XDECREF(entry);
  }
  return failed;
}

static PyObject *run_reads(int fd, unsigned alignment, pcc_read *reads, size_t count, int threads) {
  pcc_reading *reading;
  int error = count ? pcc_reading_start(&reading, fd, alignment, reads, count, threads) : 0;
  if (error) return raise_errno(error);
  for (bool over = count == 0; !over;) {
    Py_BEGIN_ALLOW_THREADS
    over = pcc_reading_wait(reading, pcc_now() + SLICE_NS);
    Py_END_ALLOW_THREADS
    bool interrupted = !over && PyErr_CheckSignals();
    if (over || interrupted) {
      Py_BEGIN_ALLOW_THREADS
      pcc_reading_end(reading, interrupted);
      Py_END_ALLOW_THREADS
    }
    if (interrupted) return NULL;
  }
  return list_failed(reads, count);
}

PyObject *read_chunks(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"fd",      "destination", "destination_offsets", "file_offsets", "lengths",
                          "digests", "threads",     "alignment",           NULL};
  int fd, threads;
  unsigned alignment;
  PyObject *places, *offsets, *lengths, *result = NULL;
  Py_buffer destination, digests;
  size_t count = 0;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iw*OOOz*iI", names, &fd, &destination, &places, &offsets, &lengths,
                                   &digests, &threads, &alignment))
    return NULL;
  pcc_read *reads = make_reads(&destination, places, offsets, lengths, digests.buf, digests.len, &count);
  if (reads) result = run_reads(fd, alignment, reads, count, threads);
  free(reads);
  PyBuffer_Release(&destination);
  if (digests.obj) PyBuffer_Release(&digests);
  return result;
}
