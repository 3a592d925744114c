// Matrix products in bf16 for CPUs with AVX-512 BF16, whose dot products take pairs of bf16 numbers and sum in fp32.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "arithmetic.h"

namespace {

const int64_t GROUP = 4;  // rows that are multiplied together

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// sum[m][n] += over k: the pair a[m * a_row + k * a_step] times the 16 pairs at b + k * b_step + n * b_column.
template <int COLUMNS>
inline void multiply(const uint32_t* a, int64_t a_row, int64_t a_step, const uint32_t* b, int64_t b_column,
                     int64_t b_step, int64_t steps, __m512 (&sum)[GROUP][COLUMNS]) {
  for (int64_t k = 0; k < steps; k++) {
    __m512bh columns[COLUMNS];
    for (int n = 0; n < COLUMNS; n++) columns[n] = (__m512bh)_mm512_loadu_si512(b + k * b_step + n * b_column);
    for (int m = 0; m < GROUP; m++) {
      __m512bh row = (__m512bh)_mm512_set1_epi32((int)a[m * a_row + k * a_step]);
      for (int n = 0; n < COLUMNS; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], row, columns[n]);
    }
  }
}

template <int COLUMNS>
inline void clear(__m512 (&sum)[GROUP][COLUMNS]) {
  for (int m = 0; m < GROUP; m++)
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
