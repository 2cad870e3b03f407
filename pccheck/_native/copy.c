/* Gather one chunk from the caller's memory and digest it in the same pass. */
#include "native.h"

#include <string.h>

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline uint64_t end_of(const pcc_piece *piece) { return piece->offset + piece->length; }

/* Bytes from..to of the byte space to `destination`; what no piece below `limit` covers becomes zeros. */
static void assemble(const pcc_piece *pieces, size_t count, size_t i, uint64_t from, uint64_t to, uint64_t limit,
                     uint8_t *destination) {
  memset(destination, 0, to - from);
  to = least(to, limit);
  for (; i < count && pieces[i].offset < to; i++) {
    uint64_t begin = pieces[i].offset > from ? pieces[i].offset : from, end = least(end_of(&pieces[i]), to);
    if (begin < end) memcpy(destination + (begin - from), pieces[i].address + (begin - pieces[i].offset), end - begin);
  }
}

/* Works in blocks of XXH3. A run of blocks inside one piece goes straight from the source; a block with a border or a
 * gap is put together on the stack first. Stores go past the caches where the destination allows it: the copy is next
 * read by the device or by nobody, and a plain store would read each line before writing it (measured: twice the time).
 */
void pcc_gather(const pcc_piece *pieces, size_t count, size_t first, const pcc_chunk *chunk, uint8_t *destination,
                uint8_t digest[PCC_DIGEST]) {
  const pcc_kernel *kernel = pcc_kernel_now();
  bool aligned = ((uintptr_t)destination & 31) == 0;
  void (*copy)(uint64_t *, uint8_t *, const uint8_t *, size_t) = aligned ? kernel->stream : kernel->copy;
  uint8_t block[PCC_BLOCK] __attribute__((aligned(64)));
  uint64_t acc[8], limit = chunk->start + chunk->data, last = chunk->start + chunk->stored - PCC_BLOCK;
  size_t i = first;
  pcc_digest_begin(acc);
  for (uint64_t at = chunk->start; at < last;) {
    while (i < count && end_of(&pieces[i]) <= at) i++;
    uint8_t *to = destination + (at - chunk->start);
    uint64_t inside = i < count && pieces[i].offset <= at ? least(least(end_of(&pieces[i]), limit), last) : 0;
    if (inside >= at + PCC_BLOCK) {
      size_t blocks = (inside - at) / PCC_BLOCK;
      copy(acc, to, pieces[i].address + (at - pieces[i].offset), blocks);
      at += blocks * PCC_BLOCK;
    } else {
      assemble(pieces, count, i, at, at + PCC_BLOCK, limit, block);
      copy(acc, to, block, 1);
      at += PCC_BLOCK;
    }
  }
  while (i < count && end_of(&pieces[i]) <= last) i++;
  assemble(pieces, count, i, last, last + PCC_BLOCK, limit, block);
  memcpy(destination + (last - chunk->start), block, PCC_BLOCK);
  pcc_digest_end(acc, block, PCC_BLOCK, chunk->stored, digest);
  pcc_store_fence();
}
