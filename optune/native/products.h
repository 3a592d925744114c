// Matrix products for CPUs with AVX-512, of words: a word is a number of fp32, or, with AVX-512 BF16, a pair of bf16
// numbers whose products are added together. Sums are fp32.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "arithmetic.h"

namespace {

// The words that products of a number's type take.
template <class Number>
struct Words;

template <>
struct Words<float> {
  typedef float Word;
  static const int64_t NUMBERS = 1;
};

template <>
struct Words<bf16> {
  typedef uint32_t Word;
  static const int64_t NUMBERS = 2;
};

inline __m512 spread(float word) { return _mm512_set1_ps(word); }
inline __m512 load(const float* words) { return _mm512_loadu_ps(words); }
inline __m512 add_product(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }

#if defined(__AVX512BF16__)

inline __m512bh spread(uint32_t word) { return (__m512bh)_mm512_set1_epi32((int)word); }
inline __m512bh load(const uint32_t* words) { return (__m512bh)_mm512_loadu_si512(words); }
inline __m512 add_product(__m512 sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }

#endif

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// sum[m][n] += over k: the word a[m * a_row + k * a_step] times the 16 words at b + k * b_step + n * b_column; at least
// one step.
template <int ROWS, int COLUMNS, class Word>
inline void multiply(const Word* a, int64_t a_row, int64_t a_step, const Word* b, int64_t b_column, int64_t b_step,
                     int64_t steps, __m512 (&sum)[ROWS][COLUMNS]) {
  do {
    decltype(load(b)) columns[COLUMNS];
    for (int n = 0; n < COLUMNS; n++) columns[n] = load(b + n * b_column);
    for (int m = 0; m < ROWS; m++) {
      auto row = spread(a[m * a_row]);
      for (int n = 0; n < COLUMNS; n++) sum[m][n] = add_product(sum[m][n], row, columns[n]);
    }
    a += a_step;
    b += b_step;
  } while (--steps > 0);
}

template <int ROWS, int COLUMNS>
inline void clear(__m512 (&sum)[ROWS][COLUMNS]) {
  for (int m = 0; m < ROWS; m++)
    for (int n = 0; n < COLUMNS; n++) sum[m][n] = _mm512_setzero_ps();
}

// For each pair of `padded` rows, `width` words of the number in both: of the first `count` rows of x, which lie `row`
// numbers apart, the first `columns`; 0 in what is behind them.
inline void pack_pairs(const bf16* x, int64_t row, int64_t count, int64_t padded, int64_t columns, int64_t width,
                       uint32_t* packed) {
  for (int64_t pair = 0; pair < padded; pair += 2) {
    const bf16 *first = x + pair * row, *second = first + row;
    uint32_t* place = packed + pair / 2 * width;
    int64_t filled = pair < count ? columns : 0;
    if (pair + 1 < count)
      for (int64_t i = 0; i < columns; i++) place[i] = first[i].bits | (uint32_t)second[i].bits << 16;
    else
      for (int64_t i = 0; i < filled; i++) place[i] = first[i].bits;
    memset(place + filled, 0, sizeof(uint32_t) * (width - filled));
  }
}

}  // namespace
