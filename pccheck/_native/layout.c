/* Layouts: where pieces lie in a checkpoint's byte space and which chunks they make. Checked once, then never changed,
 * so that a job costs no more than a copy of its addresses. */
#include "native.h"

#include <errno.h>
#include <stdlib.h>

void pcc_layout_release(pcc_layout *layout) {
  if (atomic_fetch_sub(&layout->refs, 1) > 1) return;
  free(layout->places);
  free(layout->kept);
  free(layout->chunks);
  free(layout->first);
  free(layout);
}

/* Places must be sorted, disjoint and whole; empty ones are left out, wherever they lie. */
static int take_places(pcc_layout *layout, const pcc_place *places, size_t count) {
  uint64_t end = 0;
  layout->given = count;
  layout->places = malloc((count + 1) * sizeof *places);
  layout->kept = malloc((count + 1) * sizeof *layout->kept);
  if (!layout->places || !layout->kept) return ENOMEM;
  for (size_t i = 0; i < count; i++) {
    const pcc_place *place = &places[i];
    if (place->length == 0) continue;
    if (place->offset < end || place->length > UINT64_MAX / 2 - place->offset) return EINVAL;
    end = place->offset + place->length;
    layout->kept[layout->count] = i;
    layout->places[layout->count++] = *place;
  }
  return 0;
}

static int take_chunks(pcc_layout *layout, const pcc_chunk *chunks, size_t count) {
  uint64_t end = 0, limit = UINT64_MAX / 2;
  layout->chunk_count = count;
  layout->chunks = malloc((count + 1) * sizeof *chunks);
  layout->first = malloc((count + 1) * sizeof *layout->first);
  if (!layout->chunks || !layout->first) return ENOMEM;
  if (count >= INT32_MAX) return EINVAL;
  for (size_t c = 0, i = 0; c < count; c++) {
    const pcc_chunk *chunk = &chunks[c];
    if (chunk->start < end || chunk->stored == 0 || chunk->stored % PCC_PAGE || chunk->data > chunk->stored ||
        chunk->start > limit || chunk->file_offset % PCC_PAGE || chunk->stored > limit ||
        chunk->file_offset > limit - chunk->stored)
      return EINVAL;
    end = chunk->start + chunk->data;
    while (i < layout->count && layout->places[i].offset + layout->places[i].length <= chunk->start) i++;
    layout->chunks[c] = *chunk;
    layout->first[c] = i;
    if (chunk->stored > layout->longest) layout->longest = chunk->stored;
    uint64_t file_end = chunk->file_offset + chunk->stored;
    if (file_end > layout->file_bytes) layout->file_bytes = file_end;
  }
  return 0;
}

int pcc_layout_open(pcc_layout **out, const pcc_place *places, size_t count, const pcc_chunk *chunks,
                    size_t chunk_count) {
  pcc_layout *layout = calloc(1, sizeof *layout);
  if (!layout) return ENOMEM;
  atomic_init(&layout->refs, 1);
  int error = take_places(layout, places, count);
  if (!error) error = take_chunks(layout, chunks, chunk_count);
  if (error) {
    pcc_layout_release(layout);
    return error;
  }
  *out = layout;
  return 0;
}
