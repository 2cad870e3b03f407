/* XXH3-128 of inputs longer than 240 bytes, written from the public specification of XXH3 (seed 0, default secret).
 *
 * Two kernels: plain C, and AVX2 chosen at run time. AVX-512 was measured and gained nothing over AVX2; plain C that
 * the compiler vectorises by itself reaches half. */
#include "native.h"

#include <errno.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_AVX2 1
#endif

#define STRIPE 64u
#define STRIPES (PCC_BLOCK / STRIPE)

static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87U, PRIME64_2 = 0xC2B2AE3D27D4EB4FU;
static const uint64_t PRIME64_3 = 0x165667B19E3779F9U, PRIME64_4 = 0x85EBCA77C2B2AE63U;
static const uint64_t PRIME64_5 = 0x27D4EB2F165667C5U, PRIME_MX1 = 0x165667919E3779F9U;

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

#define SCRAMBLE_SECRET (SECRET + sizeof SECRET - STRIPE)
#define LAST_STRIPE_SECRET (SECRET + sizeof SECRET - STRIPE - 7)
#define LOW_MERGE_SECRET (SECRET + 11)
#define HIGH_MERGE_SECRET (SECRET + sizeof SECRET - STRIPE - 11)

static inline uint64_t read64(const uint8_t *p) { /* little-endian, any alignment */
  uint64_t v;
  memcpy(&v, p, sizeof v);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  v = __builtin_bswap64(v);
#endif
  return v;
}

/* -- plain C --------------------------------------------------------------------------------------------------------*/

static inline void stripe_c(uint64_t *acc, const uint8_t *input, const uint8_t *secret) {
  for (int i = 0; i < 8; i++) {
    uint64_t lane = read64(input + 8 * i), keyed = lane ^ read64(secret + 8 * i);
    acc[i ^ 1] += lane;
    acc[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
  }
}

static inline void block_c(uint64_t *acc, const uint8_t *input) {
  for (size_t n = 0; n < STRIPES; n++) stripe_c(acc, input + STRIPE * n, SECRET + 8 * n);
  for (int i = 0; i < 8; i++) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(SCRAMBLE_SECRET + 8 * i)) * PRIME32_1;
}

static void absorb_c(uint64_t *acc, const uint8_t *source, size_t blocks) {
  for (; blocks; blocks--, source += PCC_BLOCK) block_c(acc, source);
}

static void copy_c(uint64_t *acc, uint8_t *destination, const uint8_t *source, size_t blocks) {
  for (; blocks; blocks--, source += PCC_BLOCK, destination += PCC_BLOCK) {
    memcpy(destination, source, PCC_BLOCK);
    block_c(acc, destination); /* of the copy: the source may change meanwhile */
  }
}

static const pcc_kernel PLAIN = {"c", absorb_c, copy_c, copy_c};

/* -- AVX2 -----------------------------------------------------------------------------------------------------------*/

#ifdef HAVE_AVX2
#define AVX2 __attribute__((target("avx2")))
#define PREFETCH 512 /* bytes ahead; prefetching behind the end of a source is harmless */

enum store { NO_STORE, STORE, STREAM };

AVX2 static inline void put(uint8_t *destination, __m256i low, __m256i high, enum store store) {
  __m256i *d = (__m256i *)(void *)destination;
  if (store == STORE) {
    _mm256_storeu_si256(d, low);
    _mm256_storeu_si256(d + 1, high);
  } else if (store == STREAM) {
    _mm256_stream_si256(d, low);
    _mm256_stream_si256(d + 1, high);
  }
}

/* What goes past the caches is not read again soon either: so it is fetched to drive out as little as may be of what a
 * trainer has there. */
AVX2 __attribute__((always_inline)) static inline void fetch(const uint8_t *source, const enum store store) {
  if (store == STREAM)
    _mm_prefetch((const char *)source + PREFETCH, _MM_HINT_NTA);
  else
    _mm_prefetch((const char *)source + PREFETCH, _MM_HINT_T0);
}

AVX2 static inline __m256i mix(__m256i acc, __m256i lanes, __m256i secret) {
  __m256i keyed = _mm256_xor_si256(lanes, secret);
  __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(lanes, 0x4E))); /* lanes i ^ 1 */
}

AVX2 static inline __m256i scramble(__m256i acc, __m256i secret) {
  const __m256i prime = _mm256_set1_epi32((int)0x9E3779B1U); /* PRIME32_1 */
  acc = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), secret);
  __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

#define LOAD(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))

AVX2 __attribute__((always_inline)) static inline void blocks_avx2(uint64_t *acc, uint8_t *destination,
                                                                   const uint8_t *source, size_t blocks,
                                                                   const enum store store) {
  __m256i a0 = LOAD(acc), a1 = LOAD(acc + 4);
  for (; blocks; blocks--) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 4
#endif
    for (size_t n = 0; n < STRIPES; n++) {
      fetch(source, store);
      __m256i low = LOAD(source), high = LOAD(source + 32);
      put(destination, low, high, store);
      a0 = mix(a0, low, LOAD(SECRET + 8 * n));
      a1 = mix(a1, high, LOAD(SECRET + 8 * n + 32));
      source += STRIPE;
      if (store != NO_STORE) destination += STRIPE;
    }
    a0 = scramble(a0, LOAD(SCRAMBLE_SECRET));
    a1 = scramble(a1, LOAD(SCRAMBLE_SECRET + 32));
  }
  _mm256_storeu_si256((__m256i *)(void *)acc, a0);
  _mm256_storeu_si256((__m256i *)(void *)(acc + 4), a1);
}

AVX2 static void absorb_avx2(uint64_t *acc, const uint8_t *source, size_t blocks) {
  blocks_avx2(acc, NULL, source, blocks, NO_STORE);
}

AVX2 static void copy_avx2(uint64_t *acc, uint8_t *destination, const uint8_t *source, size_t blocks) {
  blocks_avx2(acc, destination, source, blocks, STORE);
}

AVX2 static void stream_avx2(uint64_t *acc, uint8_t *destination, const uint8_t *source, size_t blocks) {
  blocks_avx2(acc, destination, source, blocks, STREAM);
}

static const pcc_kernel WIDE = {"avx2", absorb_avx2, copy_avx2, stream_avx2};
#endif

/* -- choice ---------------------------------------------------------------------------------------------------------*/

static _Atomic(const pcc_kernel *) chosen = &PLAIN;

const pcc_kernel *pcc_kernel_now(void) { return atomic_load_explicit(&chosen, memory_order_relaxed); }

int pcc_kernel_choose(const char *name) {
  bool best = strcmp(name, "best") == 0;
#ifdef HAVE_AVX2
  __builtin_cpu_init();
  if ((best || strcmp(name, WIDE.name) == 0) && __builtin_cpu_supports("avx2")) {
    atomic_store(&chosen, &WIDE);
    return 0;
  }
#endif
  if (!best && strcmp(name, PLAIN.name) != 0) return ENOTSUP;
  atomic_store(&chosen, &PLAIN);
  return 0;
}

void pcc_store_fence(void) {
#ifdef HAVE_AVX2
  _mm_sfence();
#endif
}

/* -- begin, end, whole ----------------------------------------------------------------------------------------------*/

void pcc_digest_begin(uint64_t acc[8]) {
  const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
  memcpy(acc, start, sizeof start);
}

static uint64_t merge(const uint64_t acc[8], const uint8_t *secret, uint64_t hash) {
  __extension__ typedef unsigned __int128 wide;
  for (int i = 0; i < 4; i++) {
    wide product = (wide)(acc[2 * i] ^ read64(secret + 16 * i)) * (acc[2 * i + 1] ^ read64(secret + 16 * i + 8));
    hash += (uint64_t)product ^ (uint64_t)(product >> 64);
  }
  hash = (hash ^ (hash >> 37)) * PRIME_MX1;
  return hash ^ (hash >> 32);
}

static void put_big_endian(uint8_t *out, uint64_t value) {
  for (int i = 7; i >= 0; i--, value >>= 8) out[i] = (uint8_t)value;
}

void pcc_digest_end(uint64_t acc[8], const uint8_t *last, size_t length, uint64_t total, uint8_t out[PCC_DIGEST]) {
  size_t stripes = (length - 1) / STRIPE;
  for (size_t n = 0; n < stripes; n++) stripe_c(acc, last + STRIPE * n, SECRET + 8 * n);
  stripe_c(acc, last + length - STRIPE, LAST_STRIPE_SECRET);
  put_big_endian(out, merge(acc, HIGH_MERGE_SECRET, ~(total * PRIME64_2)));
  put_big_endian(out + 8, merge(acc, LOW_MERGE_SECRET, total * PRIME64_1));
}

void pcc_digest(const uint8_t *input, size_t length, uint8_t out[PCC_DIGEST]) {
  uint64_t acc[8];
  size_t blocks = (length - 1) / PCC_BLOCK; /* the last block, even a whole one, is absorbed by pcc_digest_end */
  pcc_digest_begin(acc);
  pcc_kernel_now()->absorb(acc, input, blocks);
  pcc_digest_end(acc, input + blocks * PCC_BLOCK, length - blocks * PCC_BLOCK, length, out);
}
