/* What the files of the Python face share. Python.h is included here and nowhere else (limited API of 3.11). */
#ifndef PCCHECK_MODULE_H
#define PCCHECK_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "native.h"

#define SLICE_NS 100000000LL /* between two looks for Ctrl-C */
#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

typedef struct module_state {
  PyTypeObject *job_type, *layout_type, *pipeline_type, *hold_type;
  PyObject *closed_error, *forked_error; /* of pccheck.errors */
} module_state;

/* module.c */
PyObject *raise_errno(int error);
uint64_t *copy_u64s(PyObject *object, const char *name, size_t *count); /* malloc'ed; NULL with an error set */

typedef struct text { /* begins as {0} */
  uint8_t *bytes;
  size_t used, room;
} text;

int add_text(text *t, const void *bytes, size_t count); /* -1 with an error set */
PyObject *end_text(text *t, bool whole);                /* free it; give its bytes, NULL unless it is whole */

/* module_job.c */
typedef struct JobObject {
  PyObject_HEAD
  pcc_pipeline *pipeline; /* NULL until submitted */
  pcc_job *job;
  PyObject *keep;
  Py_buffer mapping; /* .obj NULL: none */
} JobObject;

extern PyType_Spec job_spec;
int check_process(PyObject *self, pcc_pipeline *pipeline); /* -1 with ForkedError set */
int parse_until(PyObject *timeout, int64_t *until);
int64_t slice_until(int64_t until);
void job_let_go(JobObject *self, bool ended); /* drop what the threads are done with */
void free_object(PyObject *self);             /* the end of every tp_dealloc */

/* module_pipeline.c */
extern PyType_Spec pipeline_spec;

/* module_fill.c */
PyObject *job_fills_left(JobObject *self, PyObject *unused);
PyObject *job_take_fill(JobObject *self, PyObject *args);
PyObject *job_fill_done(JobObject *self, PyObject *args);
PyObject *job_drop_fill(JobObject *self, PyObject *args);
PyObject *job_reclaim(JobObject *self, PyObject *args);
PyObject *job_fail_fill(JobObject *self, PyObject *unused);

/* module_layout.c */
typedef struct LayoutObject {
  PyObject_HEAD
  pcc_layout *layout;
} LayoutObject;

extern PyType_Spec layout_spec;

/* module_pieces.c */
PyObject *copy_pieces(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *digest_pieces(PyObject *module, PyObject *args, PyObject *kwargs);

/* module_dlpack.c */
#define DLPACK_MAJOR 1

typedef struct dl_tensor { /* DLPack 1.3: https://dmlc.github.io/dlpack/latest/c_api.html */
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} dl_tensor;

static inline char *first_element(const dl_tensor *t) { return t->data ? (char *)t->data + t->byte_offset : NULL; }

PyObject *describe_arrays(PyObject *module, PyObject *args);
PyObject *check_arrays(PyObject *module, PyObject *args);

/* module_hold.c */
extern PyType_Spec hold_spec;
PyObject *hold_buffers(PyObject *module, PyObject *args);

/* module_objects.c */
PyObject *contents(PyObject *module, PyObject *containers);

/* module_files.c */
PyObject *file_status(PyObject *module, PyObject *args);
PyObject *lock_file(PyObject *module, PyObject *args);

/* module_read.c */
PyObject *read_chunks(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
