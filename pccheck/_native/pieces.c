/* Many small pieces in one call: copied, or digested each by itself. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

#define THREAD_BYTES ((uint64_t)8 << 20) /* below this, starting another thread costs more than it saves */
#define STEP_BYTES ((uint64_t)1 << 20)   /* what a thread takes at once, about */
#define SHORT_BYTES 256u                 /* shorter pieces are digested with zeros up to this length */

typedef struct copying {
  const pcc_move *moves;
  size_t count;
  atomic_size_t next;
} copying;

/* Take runs of moves until none is left: threads that come late, or not at all, only leave more to the others. */
static void *copy_some(void *raw) {
  copying *c = raw;
  for (;;) {
    size_t first = atomic_load(&c->next), end = first;
    uint64_t bytes = 0;
    do {
      for (end = first, bytes = 0; end < c->count && bytes < STEP_BYTES; end++) bytes += c->moves[end].length;
      if (end == first) return NULL;
    } while (!atomic_compare_exchange_weak(&c->next, &first, end));
    for (size_t i = first; i < end; i++) {
      if (c->moves[i].length) memcpy(c->moves[i].target, c->moves[i].source, c->moves[i].length);
    }
  }
}

void pcc_copy_pieces(const pcc_move *moves, size_t count, int threads) {
  copying c = {.moves = moves, .count = count};
  pthread_t others[PCC_MAX_THREADS];
  uint64_t bytes = 0;
  int started = 0;
  atomic_init(&c.next, 0);
  for (size_t i = 0; i < count; i++) bytes += moves[i].length;
  while (started < threads - 1 && started < PCC_MAX_THREADS && bytes / THREAD_BYTES > (uint64_t)started + 1 &&
         pcc_thread(&others[started], "pccheck-copy", copy_some, &c) == 0)
    started++;
  copy_some(&c);
  for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
}

void pcc_digest_piece(const uint8_t *address, size_t length, uint8_t out[PCC_DIGEST]) {
  uint8_t padded[SHORT_BYTES] = {0};
  if (length >= SHORT_BYTES) {
    pcc_digest(address, length, out);
    return;
  }
  if (length) memcpy(padded, address, length);
  pcc_digest(padded, SHORT_BYTES, out);
}
