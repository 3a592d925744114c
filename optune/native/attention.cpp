// Causal attention in bf16 for CPUs with AVX-512 BF16, whose dot products take pairs of bf16 numbers and sum in fp32.
//
// The work goes in tiles of queries against the keys that they see. Scores, softmax and all sums are fp32; weights, and
// the gradients of scores, are rounded to bf16 once, as operands of the next product. Nothing but the inputs is kept
// for backward, which makes the tiles again. A thread works on one head of one segment at a time and shares no sum with
// another, so that the number of threads changes no bit.
//
// Queries, keys, values and their gradients lie as (rows, T, heads, H), contiguous. A segment is four numbers: its row,
// its first position, its length, and how many keys the segments before it have with each one's length rounded up to
// STRIP. Formulas: FlashAttention (arXiv 2205.14135), without its running softmax, because a tile holds all keys of its
// queries.

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)

#include <math.h>

#include "products.h"

extern "C" int omp_get_thread_num(void);

namespace {

const int64_t STRIP = 64;  // keys whose scores are made together
const int64_t LARGEST_TILE = 64;

// One head of a tensor (T, heads, H), as words of two numbers.
struct Head {
  const uint32_t* words;
  int64_t row;  // words from one position to the next
  Head(const bf16* tensor, int64_t position, int64_t head, int64_t heads, int64_t H)
      : words((const uint32_t*)(tensor + (position * heads + head) * H)), row(heads * H / 2) {}
};

// For products over H: blocks of 16 keys; in a block, for each pair of features, that of every key.
void pack_features(Head keys, int64_t count, int64_t H, uint32_t* packed) {
  for (int64_t block = 0; block < round_up(count, STRIP); block += 16)
    for (int64_t i = 0; i < 16; i++) {
      uint32_t* place = packed + block * (H / 2) + i;
      const uint32_t* key = keys.words + (block + i) * keys.row;
      for (int64_t j = 0; j < H / 2; j++) place[j * 16] = block + i < count ? key[j] : 0;
    }
}

// For products over positions: for each pair of positions, H words of the feature at both.
void pack_positions(Head from, int64_t count, int64_t padded, int64_t H, uint32_t* packed) {
  pack_pairs((const bf16*)from.words, 2 * from.row, count, padded, H, H, packed);
}

// `count` positions as they are, followed by zeros.
void copy_positions(Head from, int64_t count, int64_t padded, int64_t H, uint32_t* copied) {
  for (int64_t i = 0; i < count; i++) memcpy(copied + i * (H / 2), from.words + i * from.row, sizeof(uint32_t) * H / 2);
  memset(copied + count * (H / 2), 0, sizeof(uint32_t) * (padded - count) * (H / 2));
}

// Some queries of a segment and the strips of keys that they see.
struct Tile {
  int64_t first, count, rows;  // queries; rows are rounded up
  int64_t begin, width;        // keys, whole strips
  Tile(int64_t start, int64_t size, int64_t length, int64_t window) {
    first = start;
    count = start + size < length ? size : length - start;
    rows = round_up(count, GROUP);
    begin = window > 0 && start + 1 > window ? (start + 1 - window) / STRIP * STRIP : 0;
    width = round_up(start + count, STRIP) - begin;
  }
  // Before which key the queries of a group see all that they see, the first of them being `row`.
  int64_t end(int64_t row) const { return first + row + GROUP - begin; }
  // The same in whole blocks of 16 keys. What lies behind is neither made nor read.
  int64_t seen(int64_t row) const {
    int64_t seen = round_up(end(row / GROUP * GROUP), 16);
    return seen < width ? seen : width;
  }
};

template <int COLUMNS>
inline void multiply_blocks(const uint32_t* queries, const uint32_t* keys, int64_t H, float* scores, int64_t width) {
  __m512 sum[GROUP][COLUMNS];
  clear(sum);
  multiply(queries, H / 2, 1, keys, 16 * (H / 2), 16, H / 2, sum);
  for (int m = 0; m < GROUP; m++)
    for (int n = 0; n < COLUMNS; n++) _mm512_storeu_ps(scores + m * width + n * 16, sum[m][n]);
}

// scores[q][s] of the keys that each group of queries sees: queries (rows, H / 2 words) against keys from
// pack_features.
void multiply_features(const uint32_t* queries, Tile tile, const uint32_t* keys, int64_t H, float* scores) {
  for (int64_t strip = 0; strip < tile.width; strip += STRIP)
    for (int64_t row = 0; row < tile.rows; row += GROUP) {
      const uint32_t *some = queries + row * (H / 2), *block = keys + strip * (H / 2);
      float* place = scores + row * tile.width + strip;
      int64_t blocks = (tile.seen(row) - strip) / 16;
      if (blocks >= 4)
        multiply_blocks<4>(some, block, H, place, tile.width);
      else if (blocks == 3)
        multiply_blocks<3>(some, block, H, place, tile.width);
      else if (blocks == 2)
        multiply_blocks<2>(some, block, H, place, tile.width);
      else if (blocks == 1)
        multiply_blocks<1>(some, block, H, place, tile.width);
    }
}

inline void store_rounded(bf16* place, __m512 sum) {
  _mm256_storeu_si256((__m256i*)place, (__m256i)_mm512_cvtneps_pbh(sum));
}

// out[q] = scale * weights[q] . from, for `count` rows of H; weights are rows of `width` keys, `from` is of
// pack_positions.
template <int COLUMNS>
void mix_columns(const uint32_t* weights, Tile tile, const uint32_t* from, int64_t H, float scale, bf16* out,
                 int64_t out_row) {
  for (int64_t row = 0; row < tile.count; row += GROUP) {
    __m512 sum[GROUP][COLUMNS];
    clear(sum);
    multiply(weights + row * (tile.width / 2), tile.width / 2, 1, from, 16, H, tile.end(row) / 2, sum);
    for (int m = 0; m < GROUP && row + m < tile.count; m++)
      for (int n = 0; n < COLUMNS; n++)
        store_rounded(out + (row + m) * out_row + n * 16, _mm512_mul_ps(sum[m][n], _mm512_set1_ps(scale)));
  }
}

void mix(const uint32_t* weights, Tile tile, const uint32_t* from, int64_t H, float scale, bf16* out,
         int64_t out_row) {
  int64_t column = 0;
  for (; column + 64 <= H; column += 64)
    mix_columns<4>(weights, tile, from + column, H, scale, out + column, out_row);
  for (; column < H; column += 16) mix_columns<1>(weights, tile, from + column, H, scale, out + column, out_row);
}

// sums[s] += over the queries that see s: weights . from, for `width` rows of H. Weights are pairs of queries, `width`
// words each.
template <int COLUMNS>
void collect_columns(const uint32_t* weights, Tile tile, const uint32_t* from, int64_t H, float* sums) {
  for (int64_t row = 0; row < tile.width; row += GROUP) {
    int64_t ahead = row - (tile.first - tile.begin), skipped = ahead > 0 ? ahead / 2 : 0;
    int64_t steps = tile.rows / 2 - skipped;
    if (steps <= 0) break;
    __m512 sum[GROUP][COLUMNS];
    for (int m = 0; m < GROUP; m++)
      for (int n = 0; n < COLUMNS; n++) sum[m][n] = _mm512_loadu_ps(sums + (row + m) * H + n * 16);
    multiply(weights + skipped * tile.width + row, 1, tile.width, from + skipped * H, 16, H, steps, sum);
    for (int m = 0; m < GROUP; m++)
      for (int n = 0; n < COLUMNS; n++) _mm512_storeu_ps(sums + (row + m) * H + n * 16, sum[m][n]);
  }
}

void collect(const uint32_t* weights, Tile tile, const uint32_t* from, int64_t H, float* sums) {
  int64_t column = 0;
  for (; column + 64 <= H; column += 64) collect_columns<4>(weights, tile, from + column, H, sums + column);
  for (; column < H; column += 16) collect_columns<1>(weights, tile, from + column, H, sums + column);
}

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
  for (int64_t i = begin; i < end; i += 16) {
    __mmask16 there = end - i < 16 ? (__mmask16)((1u << (end - i)) - 1) : (__mmask16)0xffff;
    largest = _mm512_mask_max_ps(largest, there, largest, _mm512_maskz_loadu_ps(there, x + i));
  }
  __m512 scales = _mm512_set1_ps(scale), highest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int64_t i = begin; i < end; i += 16) {
    __mmask16 there = end - i < 16 ? (__mmask16)((1u << (end - i)) - 1) : (__mmask16)0xffff;
    __m512 e = exponential(_mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, x + i), highest), scales));
    _mm512_mask_storeu_ps(x + i, there, e);
    sum = _mm512_mask_add_ps(sum, there, sum, e);
  }
  memset(x, 0, sizeof(float) * begin);
  memset(x + end, 0, sizeof(float) * (width - end));
  return 1.0f / _mm512_reduce_add_ps(sum);
}

// What softmax(scale * scores) is of, in place: exponentials over the keys that each query sees, 0 elsewhere; and for
// each query 1 over their sum.
void exponentiate(float* scores, Tile tile, float scale, int64_t window, float* inverses) {
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

inline __m512i rounded(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

inline void store_pair(uint32_t* place, __m512i first, __m512i second) {
  _mm512_storeu_si512(place, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
}

// Weights as rows for mix().
void round_rows(const float* scores, Tile tile, const float* inverses, bf16* rows) {
  for (int64_t row = 0; row < tile.rows; row++) {
    __m512 inverse = _mm512_set1_ps(inverses[row]);
    int64_t start = row * tile.width;
    for (int64_t i = start; i < start + tile.seen(row); i += 16)
      store_rounded(rows + i, _mm512_mul_ps(_mm512_loadu_ps(scores + i), inverse));
  }
}

// Weights, in place, and as pairs of queries for collect().
void round_pairs(float* scores, Tile tile, const float* inverses, uint32_t* pairs) {
  for (int64_t row = 0; row < tile.rows; row += 2) {
    float *first = scores + row * tile.width, *second = first + tile.width;
    __m512 first_inverse = _mm512_set1_ps(inverses[row]), second_inverse = _mm512_set1_ps(inverses[row + 1]);
    uint32_t* place = pairs + row / 2 * tile.width;
    for (int64_t i = 0; i < tile.seen(row); i += 16) {
      __m512 x = _mm512_mul_ps(_mm512_loadu_ps(first + i), first_inverse);
      __m512 y = _mm512_mul_ps(_mm512_loadu_ps(second + i), second_inverse);
      _mm512_storeu_ps(first + i, x);
      _mm512_storeu_ps(second + i, y);
      store_pair(place + i, rounded(x), rounded(y));
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

// The gradients of scores, weights * (grads - sum(weights * grads)), as pairs of queries and as rows.
void differentiate(const float* weights, const float* grads, Tile tile, uint32_t* pairs, bf16* rows) {
  for (int64_t row = 0; row < tile.rows; row += 2) {
    const float *w = weights + row * tile.width, *g = grads + row * tile.width;
    const float *v = w + tile.width, *h = g + tile.width;
    int64_t seen = tile.seen(row);
    __m512 first_sum = dot(w, g, seen), second_sum = dot(v, h, seen);
    uint32_t* place = pairs + row / 2 * tile.width;
    bf16 *first = rows + row * tile.width, *second = first + tile.width;
    for (int64_t i = 0; i < seen; i += 16) {
      __m512i x = rounded(score_gradient(w + i, g + i, first_sum));
      __m512i y = rounded(score_gradient(v + i, h + i, second_sum));
      store_pair(place + i, x, y);
      _mm256_storeu_si256((__m256i*)(first + i), _mm512_cvtepi32_epi16(x));
      _mm256_storeu_si256((__m256i*)(second + i), _mm512_cvtepi32_epi16(y));
    }
  }
}

struct Segment {
  int64_t row, start, length, before;
};

// One head of a segment, of `heads` that each of them has.
struct Task {
  Segment segment;
  int64_t head, length;
  Task(const Segment* segments, int64_t number, int64_t heads)
      : segment(segments[number / heads]), head(number % heads), length(segment.length) {}
  // Its first position, of those of all rows.
  int64_t position(int64_t T) const { return segment.row * T + segment.start; }
  // Its first key, where those of all segments lie one after another, head by head; `groups` heads share one.
  int64_t key(int64_t padded, int64_t groups = 1) const { return head / groups * padded + segment.before; }
};

}  // namespace

// A tile has `size` queries, a multiple of GROUP and at most LARGEST_TILE. Segments have `padded` keys together. Memory
// to work in, see optune/models/native_attention.py: `packed` has two parts of K x padded x H / 2 words, `scratch` has
// `scratch_size` floats for each thread.
extern "C" void causal_attention_bfloat16(const bf16* query, const bf16* key, const bf16* value, bf16* out,
                                          const Segment* segments, int64_t count, uint32_t* packed, int64_t padded,
                                          float* scratch, int64_t scratch_size, int64_t T, int64_t N, int64_t K,
                                          int64_t H, int64_t size, int64_t window, int64_t threads) {
  float scale = 1.0f / sqrtf((float)H);
  int64_t part = padded * (H / 2);  // words of a packed head
#pragma omp parallel num_threads((int)threads)
  {
    float *mine = scratch + omp_get_thread_num() * scratch_size, inverses[LARGEST_TILE];
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < count * K; number++) {
      Task task(segments, number, K);
      int64_t place = task.key(padded) * (H / 2);
      Head keys(key, task.position(T), task.head, K, H), values(value, task.position(T), task.head, K, H);
      pack_features(keys, task.length, H, packed + place);
      pack_positions(values, task.length, round_up(task.length, STRIP), H, packed + K * part + place);
    }
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < count * N; number++) {
      Task task(segments, number, N);
      int64_t place = task.key(padded, N / K) * (H / 2);
      for (int64_t start = 0; start < task.length; start += size) {
        Tile tile(start, size, task.length, window);
        int64_t position = task.position(T) + start;
        uint32_t* queries = (uint32_t*)mine;
        float* scores = mine + size * (H / 2);
        bf16* weights = (bf16*)(scores + tile.rows * tile.width);
        copy_positions(Head(query, position, task.head, N, H), tile.count, tile.rows, H, queries);
        multiply_features(queries, tile, packed + place + tile.begin * (H / 2), H, scores);
        exponentiate(scores, tile, scale, window, inverses);
        round_rows(scores, tile, inverses, weights);
        mix((const uint32_t*)weights, tile, packed + K * part + place + tile.begin * (H / 2), H, 1.0f,
            out + (position * N + task.head) * H, N * H);
      }
    }
  }
}

// Here `packed` has three parts, and `sums` 2 x N x padded x H floats.
extern "C" void causal_attention_backward_bfloat16(const bf16* grad, const bf16* query, const bf16* key,
                                                   const bf16* value, bf16* grad_query, bf16* grad_key,
                                                   bf16* grad_value, const Segment* segments, int64_t count,
                                                   uint32_t* packed, int64_t padded, float* sums, float* scratch,
                                                   int64_t scratch_size, int64_t T, int64_t N, int64_t K, int64_t H,
                                                   int64_t size, int64_t window, int64_t threads) {
  float scale = 1.0f / sqrtf((float)H);
  int64_t part = padded * (H / 2), groups = N / K;
  float *key_sums = sums, *value_sums = sums + N * padded * H;
#pragma omp parallel num_threads((int)threads)
  {
    float *mine = scratch + omp_get_thread_num() * scratch_size, inverses[LARGEST_TILE];
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < count * K; number++) {
      Task task(segments, number, K);
      int64_t place = task.key(padded) * (H / 2);
      Head keys(key, task.position(T), task.head, K, H), values(value, task.position(T), task.head, K, H);
      pack_features(keys, task.length, H, packed + place);
      pack_features(values, task.length, H, packed + K * part + place);
      pack_positions(keys, task.length, round_up(task.length, STRIP), H, packed + 2 * K * part + place);
    }
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < count * N; number++) {
      Task task(segments, number, N);
      int64_t place = task.key(padded, groups) * (H / 2);
      float* key_sum = key_sums + task.key(padded) * H;
      float* value_sum = value_sums + task.key(padded) * H;
      memset(key_sum, 0, sizeof(float) * round_up(task.length, STRIP) * H);
      memset(value_sum, 0, sizeof(float) * round_up(task.length, STRIP) * H);
      for (int64_t start = 0; start < task.length; start += size) {
        Tile tile(start, size, task.length, window);
        int64_t position = task.position(T) + start, all = tile.rows * tile.width;
        // Rows are read as operands over H, pairs of rows as operands over queries.
        uint32_t *rows = (uint32_t*)mine, *pairs = rows + size * (H / 2);
        float *weights = mine + size * H, *scores = weights + all;
        uint32_t* words = (uint32_t*)(scores + all);
        int64_t at = tile.begin * (H / 2);
        Head queries(query, position, task.head, N, H), grads(grad, position, task.head, N, H);
        copy_positions(queries, tile.count, tile.rows, H, rows);
        multiply_features(rows, tile, packed + place + at, H, weights);
        exponentiate(weights, tile, scale, window, inverses);
        copy_positions(grads, tile.count, tile.rows, H, rows);
        multiply_features(rows, tile, packed + K * part + place + at, H, scores);
        round_pairs(weights, tile, inverses, words);
        pack_positions(grads, tile.count, tile.rows, H, pairs);
        collect(words, tile, pairs, H, value_sum + tile.begin * H);
        differentiate(weights, scores, tile, words, (bf16*)(words + all / 2));
        pack_positions(queries, tile.count, tile.rows, H, pairs);
        collect(words, tile, pairs, H, key_sum + tile.begin * H);
        mix(words + all / 2, tile, packed + 2 * K * part + place + at, H, scale,
            grad_query + (position * N + task.head) * H, N * H);
      }
    }
    // The heads that share a key head, always in the same order.
#pragma omp for schedule(static)
    for (int64_t number = 0; number < count * K; number++) {
      Task task(segments, number, K);
      for (int64_t i = 0; i < task.length; i++)
        for (int which = 0; which < 2; which++) {
          const float* from = (which ? value_sums : key_sums) + (task.head * groups * padded + task.segment.before + i) * H;
          bf16* place = (which ? grad_value : grad_key) + ((task.position(T) + i) * K + task.head) * H;
          float factor = which ? 1.0f : scale;
#pragma omp simd
          for (int64_t h = 0; h < H; h++) {
            float sum = 0.0f;
            for (int64_t g = 0; g < groups; g++) sum += from[g * padded * H + h];
            write(place + h, sum * factor);
          }
        }
    }
  }
}

#endif
