/* Checks of chunks that a device fills, and of many pieces at once; of native_driver.c, which it is a part of. */

typedef struct filler {
  pcc_pipeline *pipeline;
  pcc_job *job;
  const checkpoint *state;
  size_t filled;
} filler;

/* Every third piece lies on a device. */
static void move_to_device(const checkpoint *c, uint64_t *addresses) {
  for (size_t i = 0; i < c->piece_count; i++) addresses[i] = i % 3 == 2 ? 0 : c->addresses[i];
}

static void bring(const checkpoint *c, size_t chunk, uint8_t *buffer) {
  uint64_t from = c->chunks[chunk].start, to = from + c->chunks[chunk].data;
  memset(buffer, 0xa5, c->chunks[chunk].stored); /* what is not brought is not zero by chance */
  for (size_t i = 2; i < c->piece_count; i += 3) {
    uint64_t begin = c->places[i].offset, end = begin + c->places[i].length;
    if (begin < from) begin = from;
    if (end > to) end = to;
    if (begin < end) memcpy(buffer + (begin - from), c->space + begin, end - begin);
  }
}

/* What the thread that fills does: it takes a chunk more before it hands one back. */
static void *fill_all(void *raw) {
  filler *f = raw;
  int held = -1;
  while (pcc_fills_left(f->pipeline, f->job) || held >= 0) {
    int c = pcc_fill_take(f->pipeline, f->job, held < 0 ? pcc_now() + 1000000 : 0);
    if (c >= 0) bring(f->state, (size_t)c, pcc_fill_at(f->pipeline, f->job, (size_t)c));
    if (held >= 0) {
      int error = pcc_fill_done(f->pipeline, f->job, (size_t)held);
      CHECK(error == 0 || error == ECANCELED);
      if (error) CHECK(pcc_fill_drop(f->pipeline, f->job, (size_t)held, true) == 0);
      f->filled++;
    }
    held = c;
  }
  CHECK(pcc_fill_take(f->pipeline, f->job, SECONDS(60)) == -1);
  return NULL;
}

/* Jobs with and without fills in turn, over two buffers, to files or to mappings. */
static void check_fills(const char *folder, bool mapped) {
  enum { JOBS = 5 };
  static checkpoint c[JOBS];
  pcc_pipeline *p = NULL;
  pcc_job *jobs[JOBS];
  pthread_t threads[JOBS];
  filler fillers[JOBS];
  uint8_t *maps[JOBS];
  uint64_t addresses[MAX_PIECES];
  int fds[JOBS];
  CHECK(pcc_pipeline_open(&p, 2, CHUNK, 2, 2, 2, 1) == 0);
  for (int i = 0; i < JOBS; i++) {
    make(&c[i], 3 + random_below(MAX_PIECES - 3), 9000);
    fds[i] = new_file(folder, c[i].file_bytes);
    maps[i] = mmap(NULL, c[i].file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0);
    CHECK(maps[i] != MAP_FAILED);
    move_to_device(&c[i], addresses);
    bool fills = i != 2;
    pcc_sink sink = {.fd = fds[i], .alignment = 1};
    if (mapped) sink.mapping = maps[i], sink.mapping_bytes = c[i].file_bytes;
    CHECK(pcc_submit(p, c[i].layout, addresses, false, &sink, NULL, &jobs[i]) == EINVAL);
    CHECK(pcc_submit(p, c[i].layout, fills ? addresses : c[i].addresses, fills, &sink, c[i].space, &jobs[i]) == 0);
    fillers[i] = (filler){p, jobs[i], &c[i], 0};
    CHECK(pcc_thread(&threads[i], "filler", fill_all, &fillers[i]) == 0);
  }
  for (int i = 0; i < JOBS; i++) {
    size_t half = c[i].chunk_count / 2;
    CHECK(pcc_job_wait_first(p, jobs[i], half, SECONDS(60)) && pcc_job_wait_first(p, jobs[i], 0, 0));
    CHECK(pcc_job_wait_first(p, jobs[i], SIZE_MAX, SECONDS(60)));
    memset(c[i].memory, 0xff, c[i].memory_bytes);
    CHECK(pcc_job_wait(p, jobs[i], PCC_ENDED, SECONDS(60)) && pcc_job_failure(p, jobs[i]).error == 0);
    pthread_join(threads[i], NULL);
    verify(&c[i], jobs[i], fds[i], 1);
    pcc_job_release(p, jobs[i]);
    munmap(maps[i], c[i].file_bytes);
    close(fds[i]);
    drop(&c[i]);
  }
  CHECK(fillers[2].filled == 0 && fillers[0].filled > 0 && pcc_free_buffers(p) == 2);
  pcc_pipeline_refuse(p);
  CHECK(pcc_pipeline_idle(p, SECONDS(60)));
  pcc_pipeline_stop(p);
  pcc_pipeline_release(p);
}

/* Cancelled while it is filled; a buffer that is lost, and back only when the pipeline has been stopped. */
static void check_failed_fills(const char *folder) {
  checkpoint c;
  pcc_pipeline *p = NULL;
  pcc_job *job = NULL;
  pthread_t thread;
  uint64_t addresses[MAX_PIECES];
  CHECK(pcc_pipeline_open(&p, 3, CHUNK, 1, 1, 1, 1) == 0);
  make(&c, 150, 9000);
  move_to_device(&c, addresses);
  int fd = new_file(folder, c.file_bytes);
  pcc_sink sink = {.fd = fd, .alignment = 1};
  for (int round = 0; round < 6; round++) {
    CHECK(pcc_submit(p, c.layout, addresses, true, &sink, NULL, &job) == 0);
    filler f = {p, job, &c, 0};
    CHECK(pcc_thread(&thread, "filler", fill_all, &f) == 0);
    usleep((useconds_t)random_below(2000));
    pcc_job_cancel(p, job);
    CHECK(pcc_job_wait(p, job, PCC_CAPTURED, SECONDS(60)) && pcc_job_wait(p, job, PCC_ENDED, SECONDS(60)));
    pthread_join(thread, NULL);
    CHECK(pcc_free_buffers(p) == 3);
    pcc_job_release(p, job);
  }
  CHECK(pcc_submit(p, c.layout, addresses, true, &sink, NULL, &job) == 0);
  int chunk = pcc_fill_take(p, job, SECONDS(60));
  CHECK(chunk >= 0);
  uint8_t *late = pcc_fill_at(p, job, (size_t)chunk);
  pcc_fill_fail(p, job);
  CHECK(!pcc_job_wait(p, job, PCC_CAPTURED, 0) && pcc_fill_done(p, job, (size_t)chunk) == ECANCELED);
  CHECK(pcc_fill_drop(p, job, (size_t)chunk, false) == 0 && pcc_job_wait(p, job, PCC_ENDED, SECONDS(60)));
  CHECK(pcc_job_failure(p, job).operation == PCC_FILL && pcc_free_buffers(p) == 2);
  pcc_pipeline_refuse(p);
  pcc_pipeline_stop(p);
  pcc_pipeline_release(p);
  memset(late, 1, CHUNK); /* the device: its memory is still there */
  CHECK(pcc_fill_reclaim(p, job, (size_t)chunk) == 0 && pcc_fill_reclaim(p, job, (size_t)chunk) == EINVAL);
  pcc_job_release(p, job);
  close(fd);
  drop(&c);
}

static void check_pieces(void) {
  enum { BYTES = 24 << 20, PIECES = 700 };
  static pcc_move moves[PIECES];
  uint8_t *from = malloc(BYTES), *to = calloc(BYTES, 1), one[PCC_DIGEST], other[PCC_DIGEST], padded[256] = {0};
  for (size_t i = 0; i < BYTES; i++) from[i] = (uint8_t)(i * 2654435761u >> 13);
  for (size_t i = 0; i < PIECES; i++) {
    size_t first = i * (BYTES / PIECES), length = i % 7 ? BYTES / PIECES : 0;
    moves[i] = (pcc_move){from + first, to + first, length};
  }
  pcc_copy_pieces(moves, PIECES, 4);
  for (size_t i = 0; i < PIECES; i++) {
    CHECK(memcmp(moves[i].source, moves[i].target, moves[i].length) == 0);
    CHECK(i % 7 || moves[i].target[0] == 0);
  }
  memcpy(padded, from, 100);
  pcc_digest_piece(from, 100, one);
  pcc_digest(padded, sizeof padded, other);
  CHECK(memcmp(one, other, PCC_DIGEST) == 0);
  pcc_digest_piece(NULL, 0, one);
  free(from);
  free(to);
}
