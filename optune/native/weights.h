// From scores to weights and from their gradients back, for the tiles of `tiles.h`: rows of `width` numbers, of which
// each query sees its own part.

#pragma once

#include <math.h>

#include "tiles.h"

namespace {

// As `exponential`: 2^n is multiplied in by an instruction that knows subnormal numbers, 0 and NaN. Far below its
// range, where nothing is left of r, x is bounded; the second operand of the maximum is the one whose NaN stays.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-1000.0f), x);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860682e-6f), r);
  __m512 p = _mm512_set1_ps(1.38888889e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.33333377e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.16666679e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.66666672e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// exp(scale * (x - its largest)) over [begin, end), 0 in the rest of `width` keys, in place; returns 1 over their sum.
float exponentials(float* x, int64_t begin, int64_t end, int64_t width, float scale) {
  __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  const int64_t whole = begin + (end - begin) / 16 * 16;
  const __mmask16 there = first_lanes(end - whole);
  for (int64_t i = begin; i < whole; i += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(x + i));
  largest = _mm512_mask_max_ps(largest, there, largest, _mm512_maskz_loadu_ps(there, x + whole));
  __m512 scales = _mm512_set1_ps(scale), highest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int64_t i = begin; i < whole; i += 16) {
    __m512 e = exponential(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), highest), scales));
    _mm512_storeu_ps(x + i, e);
    sum = _mm512_add_ps(sum, e);
  }
  __m512 e = exponential(_mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, x + whole), highest), scales));
  _mm512_mask_storeu_ps(x + whole, there, e);
  sum = _mm512_mask_add_ps(sum, there, sum, e);
  memset(x, 0, sizeof(float) * begin);
  memset(x + end, 0, sizeof(float) * (width - end));
  return 1.0f / _mm512_reduce_add_ps(sum);
}

// What softmax(scale * scores) is of, in place: exponentials over the keys that each query sees, 0 elsewhere; and for
// each query 1 over their sum.
__attribute__((noinline)) void exponentiate(float* scores, Tile tile, float scale, int64_t window, float* inverses) {
  for (int64_t row = 0; row < tile.rows; row++) {
    float* x = scores + row * tile.width;
    int64_t end = tile.first + row + 1, begin = window > 0 && end > window ? end - window : 0;
    if (row < tile.count)
      inverses[row] = exponentials(x, begin - tile.begin, end - tile.begin, tile.seen(row), scale);
    else {
      memset(x, 0, sizeof(float) * tile.seen(row));
      inverses[row] = 0.0f;
    }
  }
}

inline void store(float* place, __m512 x) { _mm512_storeu_ps(place, x); }

// 16 numbers of two rows, those of a query and the next one, as words of collect().
inline void store_words(float*, __m512, __m512) {}

#if defined(__AVX512BF16__)

inline void store(bf16* place, __m512 x) { _mm256_storeu_si256((__m256i*)place, (__m256i)_mm512_cvtneps_pbh(x)); }

inline void store_words(uint32_t* place, __m512 first, __m512 second) {
  __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
  __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
  _mm512_storeu_si512(place, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

#endif

// Weights as rows for mix().
template <class Number>
void normalize(const float* scores, Tile tile, const float* inverses, Number* rows) {
  for (int64_t row = 0; row < tile.rows; row++) {
    __m512 inverse = _mm512_set1_ps(inverses[row]);
    int64_t start = row * tile.width;
    for (int64_t i = start; i < start + tile.seen(row); i += 16)
      store(rows + i, _mm512_mul_ps(_mm512_loadu_ps(scores + i), inverse));
  }
}

// Weights, in place, and as words of queries for collect().
template <class Word>
void normalize_pairs(float* scores, Tile tile, const float* inverses, Word* pairs) {
  for (int64_t row = 0; row < tile.rows; row += 2) {
    float *first = scores + row * tile.width, *second = first + tile.width;
    __m512 first_inverse = _mm512_set1_ps(inverses[row]), second_inverse = _mm512_set1_ps(inverses[row + 1]);
    Word* place = pairs + row / 2 * tile.width;
    for (int64_t i = 0; i < tile.seen(row); i += 16) {
      __m512 x = _mm512_mul_ps(_mm512_loadu_ps(first + i), first_inverse);
      __m512 y = _mm512_mul_ps(_mm512_loadu_ps(second + i), second_inverse);
      store(first + i, x);
      store(second + i, y);
      store_words(place + i, x, y);
    }
  }
}

// The sum of x * y over a multiple of 16.
inline __m512 dot(const float* x, const float* y, int64_t count) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(y + i), sum);
  return _mm512_set1_ps(_mm512_reduce_add_ps(sum));
}

inline __m512 score_gradient(const float* weights, const float* grads, __m512 sum) {
  return _mm512_mul_ps(_mm512_loadu_ps(weights), _mm512_sub_ps(_mm512_loadu_ps(grads), sum));
}

// The gradients of scores, weights * (grads - sum(weights * grads)), as words of queries and as rows.
template <class Number>
void differentiate(const float* weights, const float* grads, Tile tile, Word<Number>* pairs, Number* rows) {
  for (int64_t row = 0; row < tile.rows; row += 2) {
    const float *w = weights + row * tile.width, *g = grads + row * tile.width;
    const float *v = w + tile.width, *h = g + tile.width;
    int64_t seen = tile.seen(row);
    __m512 first_sum = dot(w, g, seen), second_sum = dot(v, h, seen);
    Word<Number>* place = pairs + row / 2 * tile.width;
    Number *first = rows + row * tile.width, *second = first + tile.width;
    for (int64_t i = 0; i < seen; i += 16) {
      __m512 x = score_gradient(w + i, g + i, first_sum), y = score_gradient(v + i, h + i, second_sum);
      store_words(place + i, x, y);
      store(first + i, x);
      store(second + i, y);
    }
  }
}

}  // namespace
