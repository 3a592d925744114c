// Matrix products for CPUs with AVX-512, of words: a word is a number of fp32, or, with AVX-512 BF16, a pair of bf16
// numbers whose products are added together. Sums are fp32.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "arithmetic.h"

namespace {

const int64_t GROUP = 8;     // rows that are multiplied together with
const int64_t COLUMNS = 32;  // so many columns: of all shapes tried, none comes nearer to the peak in fp32

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

template <class Number>
using Word = typename Words<Number>::Word;

inline __m512 spread(float word) { return _mm512_set1_ps(word); }
inline __m512 load(const float* words) { return _mm512_loadu_ps(words); }
inline __m512 add_product(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }

#if defined(__AVX512BF16__)

inline __m512bh spread(uint32_t word) { return (__m512bh)_mm512_set1_epi32((int)word); }
inline __m512bh load(const uint32_t* words) { return (__m512bh)_mm512_loadu_si512(words); }
inline __m512 add_product(__m512 sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }

#endif

inline int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
inline int64_t round_up(int64_t count, int64_t to) { return parts_of(count, to) * to; }

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? (__mmask16)0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : (__mmask16)0;
}

// Rows become columns: each stage swaps one binary digit of a row's number with that of a lane.
inline void transpose(__m512i (&x)[16]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int digit = 1; digit < 16; digit *= 2) {
    __mmask16 is_set = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(digit));
    __m512i low = _mm512_mask_add_epi32(lane, is_set, lane, _mm512_set1_epi32(16 - digit));
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(digit));
    for (int i = 0; i < 16; i++)
      if (!(i & digit)) {
        __m512i first = x[i], second = x[i + digit];
        x[i] = _mm512_permutex2var_epi32(first, low, second);
        x[i + digit] = _mm512_permutex2var_epi32(first, high, second);
      }
  }
}

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
