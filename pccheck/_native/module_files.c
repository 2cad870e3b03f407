/* pccheck._native.file_status and lock_file: what an open file of a local file system answers at once.
 *
 * The GIL is kept meanwhile. To give it up and get it back from a trainer of small operations takes far longer than the
 * answer, and has the trainer wait, too, many times a checkpoint. */
#include "module.h"

#include <sys/file.h>
#include <sys/stat.h>

PyObject *file_status(PyObject *module, PyObject *args) {
  int fd;
  struct stat found;
  (void)module;
  if (!PyArg_ParseTuple(args, "i", &fd)) return NULL;
  if (fstat(fd, &found)) return PyErr_SetFromErrno(PyExc_OSError);
  return Py_BuildValue("LKKK", (long long)found.st_size, (unsigned long long)found.st_nlink,
                       (unsigned long long)found.st_dev, (unsigned long long)found.st_ino);
}

PyObject *lock_file(PyObject *module, PyObject *args) {
  int fd, how;
  (void)module;
  if (!PyArg_ParseTuple(args, "ii", &fd, &how)) return NULL;
  return flock(fd, how | LOCK_NB) ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}
