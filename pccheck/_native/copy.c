/* Put one chunk together from the caller's memory and digest it in the same pass. */
#include "native.h"

#include <string.h>

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline uint64_t most(uint64_t a, uint64_t b) { return a > b ? a : b; }

static inline uint64_t end_of(const pcc_place *place) { return place->offset + place->length; }

/* Bytes from..to of the byte space to `destination`; what no piece below `limit` covers becomes zeros. */
static void assemble(const pcc_layout *layout, const uint8_t *const *addresses, size_t i, uint64_t from, uint64_t to,
                     uint64_t limit, uint8_t *destination) {
  const pcc_place *places = layout->places;
  memset(destination, 0, to - from);
  to = least(to, limit);
  for (; i < layout->count && places[i].offset < to; i++) {
    uint64_t begin = most(places[i].offset, from), end = least(end_of(&places[i]), to);
    if (begin < end) memcpy(destination + (begin - from), addresses[i] + (begin - places[i].offset), end - begin);
  }
}

/* Stores go past the caches where the destination allows it: the copy is next read by the device or by nobody, and a
 * plain store would read each line before writing it (measured: twice the time). */
static void (*copier_to(const uint8_t *destination))(uint64_t *, uint8_t *, const uint8_t *, size_t) {
  const pcc_kernel *kernel = pcc_kernel_now();
  return ((uintptr_t)destination & 31) == 0 ? kernel->stream : kernel->copy;
}

/* Works in blocks of XXH3. A run of blocks inside one piece goes straight from the source; a block with a border or a
 * gap is put together on the stack first. */
void pcc_gather(const pcc_layout *layout, const uint8_t *const *addresses, size_t c, uint8_t *destination,
                uint8_t digest[PCC_DIGEST]) {
  void (*copy)(uint64_t *, uint8_t *, const uint8_t *, size_t) = copier_to(destination);
  const pcc_chunk *chunk = &layout->chunks[c];
  const pcc_place *places = layout->places;
  uint8_t block[PCC_BLOCK] __attribute__((aligned(64)));
  uint64_t acc[8], limit = chunk->start + chunk->data, last = chunk->start + chunk->stored - PCC_BLOCK;
  size_t i = layout->first[c], count = layout->count;
  pcc_digest_begin(acc);
  for (uint64_t at = chunk->start; at < last;) {
    while (i < count && end_of(&places[i]) <= at) i++;
    uint8_t *to = destination + (at - chunk->start);
    uint64_t inside = i < count && places[i].offset <= at ? least(least(end_of(&places[i]), limit), last) : 0;
    if (inside >= at + PCC_BLOCK) {
      size_t blocks = (inside - at) / PCC_BLOCK;
      copy(acc, to, addresses[i] + (at - places[i].offset), blocks);
      at += blocks * PCC_BLOCK;
    } else {
      assemble(layout, addresses, i, at, at + PCC_BLOCK, limit, block);
      copy(acc, to, block, 1);
      at += PCC_BLOCK;
    }
  }
  while (i < count && end_of(&places[i]) <= last) i++;
  assemble(layout, addresses, i, last, last + PCC_BLOCK, limit, block);
  memcpy(destination + (last - chunk->start), block, PCC_BLOCK);
  pcc_digest_end(acc, block, PCC_BLOCK, chunk->stored, digest);
  pcc_store_fence();
}

void pcc_complete(const pcc_layout *layout, const uint8_t *const *addresses, size_t c, uint8_t *buffer,
                  uint8_t *destination, uint8_t digest[PCC_DIGEST]) {
  const pcc_chunk *chunk = &layout->chunks[c];
  const pcc_place *places = layout->places;
  uint64_t at = chunk->start, limit = chunk->start + chunk->data, acc[8];
  for (size_t i = layout->first[c]; i < layout->count && places[i].offset < limit; i++) {
    uint64_t begin = most(places[i].offset, chunk->start), end = least(end_of(&places[i]), limit);
    uint8_t *to = buffer + (begin - chunk->start);
    memset(buffer + (at - chunk->start), 0, begin - at);
    if (addresses[i]) memcpy(to, addresses[i] + (begin - places[i].offset), end - begin);
    at = end;
  }
  memset(buffer + (at - chunk->start), 0, chunk->start + chunk->stored - at);
  if (!destination) {
    pcc_digest(buffer, chunk->stored, digest);
    return;
  }
  size_t blocks = (chunk->stored - 1) / PCC_BLOCK, done = blocks * PCC_BLOCK;
  pcc_digest_begin(acc);
  copier_to(destination)(acc, destination, buffer, blocks);
  memcpy(destination + done, buffer + done, chunk->stored - done);
  pcc_digest_end(acc, buffer + done, chunk->stored - done, chunk->stored, digest);
  pcc_store_fence();
}
