/* pccheck._native.Layout: the tables of a checkpoint's byte space, checked once for many jobs. Immutable. */
#include "module.h"

#include <errno.h>
#include <stdlib.h>

static PyObject *layout_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"pieces", "chunks", NULL};
  PyObject *piece_table, *chunk_table;
  size_t pieces = 0, chunks = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &piece_table, &chunk_table)) return NULL;
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  LayoutObject *self = (LayoutObject *)(void *)allocate(type, 0);
  if (!self) return NULL;
  uint64_t *piece = copy_u64s(piece_table, "pieces", &pieces);
  uint64_t *chunk = piece ? copy_u64s(chunk_table, "chunks", &chunks) : NULL;
  if (chunk) {
    int error = pieces % 2 || chunks % 4 ? EINVAL : 0;
    if (!error)
      error = pcc_layout_open(&self->layout, (const pcc_place *)(void *)piece, pieces / 2,
                              (const pcc_chunk *)(void *)chunk, chunks / 4);
    if (error) raise_errno(error);
  }
  free(piece);
  free(chunk);
  if (!self->layout) Py_CLEAR(self);
  return (PyObject *)self;
}

static void layout_dealloc(LayoutObject *self) {
  if (self->layout) pcc_layout_release(self->layout);
  free_object((PyObject *)self);
}

static PyType_Slot layout_slots[] = {{Py_tp_new, layout_new}, {Py_tp_dealloc, layout_dealloc}, {0, NULL}};
PyType_Spec layout_spec = {"pccheck._native.Layout", sizeof(LayoutObject), 0, Py_TPFLAGS_DEFAULT, layout_slots};
