// The gradient of a head's weight in bf16 for CPUs with AVX-512 BF16: a sum over targets, in fp32 throughout.
//
// Rounded products of some targets at a time would have to be added to the sum by a pass of their own. Here the sum is
// what the products are made in. A thread works on some words of the vocabulary at a time, and the targets come in
// their order, so that the number of threads changes no bit.

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)

#include "products.h"

namespace {

const int64_t WORDS = 64;  // of the vocabulary, that a thread works on
const int64_t PAIRS = 256; // of targets, whose products are made before the sum is written
const int64_t WIDE = 64, NARROW = 16;  // features that are multiplied together
const int64_t GROUP = 4;               // words that are multiplied together with them

// sums[v][d] += over pairs, for `count` words v and 16 x COLUMNS features d.
template <int COLUMNS>
void add_products(const uint32_t* grads, int64_t count, const uint32_t* hidden, int64_t pairs, bool begins, float* sums,
                  int64_t row) {
  for (int64_t v = 0; v < count; v += GROUP) {
    __m512 sum[GROUP][COLUMNS];
    clear(sum);
    if (!begins)
      for (int m = 0; m < GROUP && v + m < count; m++)
        for (int n = 0; n < COLUMNS; n++) sum[m][n] = _mm512_loadu_ps(sums + (v + m) * row + n * 16);
    multiply(grads + v, 1, WORDS, hidden, 16, 16 * COLUMNS, pairs, sum);
    for (int m = 0; m < GROUP && v + m < count; m++)
      for (int n = 0; n < COLUMNS; n++) _mm512_storeu_ps(sums + (v + m) * row + n * 16, sum[m][n]);
  }
}

}  // namespace

// sum (V, D) += gradsᵀ (C, V) . hidden (C, D), or begins with it; D is a multiple of 16. `packed` has room for
// (C + 1) / 2 x D words.
extern "C" void add_outer_products_bfloat16(float* sum, const bf16* grads, const bf16* hidden, uint32_t* packed,
                                            int64_t C, int64_t V, int64_t D, int64_t begins, int64_t threads) {
  const int64_t pairs = (C + 1) / 2;
#pragma omp parallel num_threads((int)threads)
  {
    // Features side by side, as many as are multiplied together; pairs one below the other.
#pragma omp for schedule(static)
    for (int64_t block = 0; block < D; block += WIDE) {
      int64_t width = block + WIDE <= D ? WIDE : NARROW;
      for (int64_t d = block; d < block + WIDE && d < D; d += width)
        pack_pairs(hidden + d, D, C, 2 * pairs, width, width, packed + d * pairs);
    }
#pragma omp for schedule(dynamic)
    for (int64_t v = 0; v < V; v += WORDS) {
      uint32_t mine[PAIRS * WORDS];
      int64_t count = v + WORDS < V ? WORDS : V - v;
      for (int64_t k = 0; k < pairs; k += PAIRS) {
        int64_t some = k + PAIRS < pairs ? PAIRS : pairs - k;
        pack_pairs(grads + 2 * k * V + v, V, C - 2 * k, 2 * some, count, WORDS, mine);
        bool is_first = begins && k == 0;
        int64_t d = 0;
        for (; d + WIDE <= D; d += WIDE)
          add_products<4>(mine, count, packed + d * pairs + k * WIDE, some, is_first, sum + v * D + d, D);
        for (; d < D; d += NARROW)
          add_products<1>(mine, count, packed + d * pairs + k * NARROW, some, is_first, sum + v * D + d, D);
      }
    }
  }
}

#endif
