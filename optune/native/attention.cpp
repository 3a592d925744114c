// Causal attention for CPUs with AVX-512: in fp32, and in bf16 where there is AVX-512 BF16, whose dot products take
// pairs of numbers.
//
// The work goes in tiles of queries against the keys that they see. Scores, softmax and all sums are fp32; in bf16,
// weights and the gradients of scores are rounded once, as operands of the next product. Nothing but the inputs is kept
// for backward, which makes the tiles again. A thread works on one head of one segment at a time and shares no sum with
// another, so that the number of threads changes no bit.
//
// Queries, keys, values and their gradients lie as (rows, T, heads, H), contiguous. A segment is four numbers: its row,
// its first position, its length, and how many keys the segments before it have with each one's length rounded up to
// STRIP. Formulas: FlashAttention (arXiv 2205.14135), without its running softmax, because a tile holds all keys of its
// queries.

#if defined(__AVX512F__)

#include <math.h>

#include "products.h"

extern "C" int omp_get_thread_num(void);

namespace {

const int64_t STRIP = 64;  // keys are packed in whole strips
const int64_t LARGEST_TILE = 64;
const int64_t GROUP = 8;     // rows that are multiplied together with
const int64_t COLUMNS = 32;  // so many columns: of all shapes tried, none comes nearer to the peak in fp32

template <class Number>
using Word = typename Words<Number>::Word;

// Whether numbers are words, so that scores and weights are operands as they lie.
template <class Number>
constexpr bool is_word() {
  return Words<Number>::NUMBERS == 1;
}

template <class Number>
inline int64_t words_of(int64_t numbers) {
  return numbers / Words<Number>::NUMBERS;
}

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? (__mmask16)0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : (__mmask16)0;
}

// One head of a tensor (T, heads, H).
template <class Number>
struct Head {
  const Number* numbers;
  int64_t row;  // numbers from one position to the next
  Head(const Number* tensor, int64_t position, int64_t head, int64_t heads, int64_t H)
      : numbers(tensor + (position * heads + head) * H), row(heads * H) {}
};

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

// For products over H: blocks of 16 keys; in a block, for each of `words`, that of every key. Keys lie `row` words
// apart.
__attribute__((noinline)) void pack_features(const uint32_t* keys, int64_t row, int64_t count, int64_t words,
                                             uint32_t* packed) {
  for (int64_t block = 0; block < round_up(count, STRIP); block += 16)
    for (int64_t j = 0; j < words; j += 16) {
      int there = first_lanes(count - block), read = first_lanes(words - j);
      __m512i x[16];
      for (int i = 0; i < 16; i++)
        x[i] = _mm512_maskz_loadu_epi32((__mmask16)((there >> i & 1) * read), keys + (block + i) * row + j);
      transpose(x);
      uint32_t* place = packed + block * words + j * 16;
      for (int i = 0; i < 8; i++) _mm512_storeu_si512(place + i * 16, x[i]);
      if (words - j < 16) break;
      for (int i = 8; i < 16; i++) _mm512_storeu_si512(place + i * 16, x[i]);
    }
}

template <class Number>
inline void pack_features(Head<Number> keys, int64_t count, int64_t H, Word<Number>* packed) {
  pack_features((const uint32_t*)keys.numbers, words_of<Number>(keys.row), count, words_of<Number>(H),
                (uint32_t*)packed);
}

// `count` positions as they are, followed by zeros.
template <class Number>
void copy_positions(Head<Number> from, int64_t count, int64_t padded, int64_t H, Word<Number>* copied) {
  Number* place = (Number*)copied;
  for (int64_t i = 0; i < count; i++) memcpy(place + i * H, from.numbers + i * from.row, sizeof(Number) * H);
  memset(place + count * H, 0, sizeof(Number) * (padded - count) * H);
}

// For products over positions: for each word of positions, its H features.
inline void pack_positions(Head<float> from, int64_t count, int64_t padded, int64_t H, float* packed) {
  copy_positions(from, count, padded, H, packed);
}

__attribute__((noinline)) void pack_positions(Head<bf16> from, int64_t count, int64_t padded, int64_t H,
                                              uint32_t* packed) {
  pack_pairs(from.numbers, from.row, count, padded, H, H, packed);
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

// The same of a tile's queries, which lie as `rows` already.
inline const float* pair_positions(Head<float>, Tile, int64_t, const float* rows, float*) { return rows; }

inline const uint32_t* pair_positions(Head<bf16> from, Tile tile, int64_t H, const uint32_t*, uint32_t* room) {
  pack_positions(from, tile.count, tile.rows, H, room);
  return room;
}

const float ZEROS[COLUMNS] = {};

// What is multiplied: groups of rows, one after another, with one or two blocks of 16 columns.
template <class Word>
struct Products {
  const Word* rows;
  int64_t row, row_step, next_rows;  // words from one row to the next; from one term of its sums; from one group
  const Word* blocks;
  int64_t block, block_step, next_blocks;  // the same
  int64_t groups, steps, next_steps;       // terms of the first group's sums, and how many more each next one has
  float* sums;
  int64_t width;  // floats from one row of sums to the next
  bool adds;      // to what lies there
};

template <int BLOCKS, class Word>
__attribute__((noinline)) void multiply_groups(const Products<Word>& products) {
  Products<Word> p = products;
  const float* start = p.adds ? p.sums : ZEROS;
  int64_t start_width = p.adds ? p.width : 0;
  for (int64_t group = 0; group < p.groups; group++) {
    __m512 sum[GROUP][BLOCKS];
    for (int m = 0; m < GROUP; m++)
      for (int n = 0; n < BLOCKS; n++) sum[m][n] = _mm512_loadu_ps(start + m * start_width + n * 16);
    multiply(p.rows, p.row, p.row_step, p.blocks, p.block, p.block_step, p.steps, sum);
    for (int m = 0; m < GROUP; m++)
      for (int n = 0; n < BLOCKS; n++) _mm512_storeu_ps(p.sums + m * p.width + n * 16, sum[m][n]);
    p.rows += p.next_rows;
    p.blocks += p.next_blocks;
    p.steps += p.next_steps;
    p.sums += GROUP * p.width;
    start += GROUP * start_width;
  }
}

template <class Word>
inline void multiply_columns(const Products<Word>& products, int64_t columns) {
  if (products.groups <= 0) return;
  if (columns > 16)
    multiply_groups<2>(products);
  else
    multiply_groups<1>(products);
}

// scores[q][s] of the keys that each group of queries sees: queries of `words` against keys from pack_features.
template <class Word>
void multiply_features(const Word* queries, Tile tile, const Word* keys, int64_t words, float* scores) {
  for (int64_t strip = 0; strip < tile.width; strip += COLUMNS) {
    int64_t row = strip + tile.begin - tile.first;  // the first query that sees a key of the strip
    row = row < 0 ? 0 : row;
    // The first ones see one block of the two.
    for (int64_t columns = 16; columns <= COLUMNS; columns += 16) {
      int64_t stop = columns == COLUMNS ? tile.rows : strip + tile.begin + 16 - tile.first;
      stop = stop < tile.rows ? stop : tile.rows;
      multiply_columns<Word>({queries + row * words, words, 1, GROUP * words, keys + strip * words, 16 * words, 16, 0,
                              (stop - row) / GROUP, words, 0, scores + row * tile.width + strip, tile.width, false},
                             columns);
      row = stop > row ? stop : row;
    }
  }
}

inline void store(float* place, __m512 x) { _mm512_storeu_ps(place, x); }

// out[q] = scale * weights[q] . from, for `count` rows of H; weights are rows of `width` keys, `from` is of
// pack_positions.
template <class Number>
void mix(const Number* weights, Tile tile, const Word<Number>* from, int64_t H, float scale, Number* out,
         int64_t out_row) {
  float sums[LARGEST_TILE * COLUMNS];
  const int64_t width = words_of<Number>(tile.width), words = words_of<Number>(GROUP);
  for (int64_t column = 0; column < H; column += COLUMNS) {
    int64_t columns = H - column < COLUMNS ? 16 : COLUMNS;
    multiply_columns<Word<Number>>(
        {(const Word<Number>*)weights, width, 1, GROUP * width, from + column, 16, H, 0, tile.rows / GROUP,
         words_of<Number>(tile.end(0)), words, sums, COLUMNS, false},
        columns);
    for (int64_t row = 0; row < tile.count; row++)
      for (int64_t i = 0; i < columns; i += 16)
        store(out + row * out_row + column + i,
              _mm512_mul_ps(_mm512_loadu_ps(sums + row * COLUMNS + i), _mm512_set1_ps(scale)));
  }
}

// sums[s] over the queries that see s: weights . from, for `width` rows of H; added to what earlier tiles left there,
// which are keys before the first query. Weights are words of queries, `width` to each.
template <class Number>
void collect(const Word<Number>* weights, Tile tile, const Word<Number>* from, int64_t H, float* sums) {
  const int64_t words = words_of<Number>(GROUP), steps = words_of<Number>(tile.rows), seen = tile.first - tile.begin;
  for (int64_t column = 0; column < H; column += COLUMNS) {
    int64_t columns = H - column < COLUMNS ? 16 : COLUMNS;
    multiply_columns<Word<Number>>({weights, 1, tile.width, GROUP, from + column, 16, H, 0, seen / GROUP, steps, 0,
                                    sums + column, H, true},
                                   columns);
    multiply_columns<Word<Number>>({weights + seen, 1, tile.width, GROUP + words * tile.width, from + column, 16, H,
                                    words * H, tile.rows / GROUP, steps, -words, sums + seen * H + column, H, false},
                                   columns);
  }
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
    __mmask16 there = first_lanes(end - i);
    largest = _mm512_mask_max_ps(largest, there, largest, _mm512_maskz_loadu_ps(there, x + i));
  }
  __m512 scales = _mm512_set1_ps(scale), highest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int64_t i = begin; i < end; i += 16) {
    __mmask16 there = first_lanes(end - i);
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

// A tile has `size` queries, a multiple of GROUP and at most LARGEST_TILE. Segments have `padded` keys together. Memory
// to work in, see optune/models/native_attention.py: `packed` has two parts of K x padded x H numbers, `scratch` has
// `scratch_size` floats for each thread.
template <class Number>
void attend(const Number* query, const Number* key, const Number* value, Number* out, const Segment* segments,
            int64_t count, Word<Number>* packed, int64_t padded, float* scratch, int64_t scratch_size, int64_t T,
            int64_t N, int64_t K, int64_t H, int64_t size, int64_t window, int64_t threads) {
  float scale = 1.0f / sqrtf((float)H);
  int64_t words = words_of<Number>(H), part = K * padded * words;
#pragma omp parallel num_threads((int)threads)
  {
    float *mine = scratch + omp_get_thread_num() * scratch_size, inverses[LARGEST_TILE];
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < count * K; number++) {
      Task task(segments, number, K);
      int64_t place = task.key(padded) * words;
      Head<Number> keys(key, task.position(T), task.head, K, H), values(value, task.position(T), task.head, K, H);
      pack_features(keys, task.length, H, packed + place);
      pack_positions(values, task.length, round_up(task.length, STRIP), H, packed + part + place);
    }
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < count * N; number++) {
      Task task(segments, number, N);
      for (int64_t start = 0; start < task.length; start += size) {
        Tile tile(start, size, task.length, window);
        int64_t position = task.position(T) + start, place = (task.key(padded, N / K) + tile.begin) * words;
        Word<Number>* queries = (Word<Number>*)mine;
        float* scores = mine + size * words;
        Number* weights = (Number*)(is_word<Number>() ? scores : scores + tile.rows * tile.width);
        copy_positions(Head<Number>(query, position, task.head, N, H), tile.count, tile.rows, H, queries);
        multiply_features(queries, tile, packed + place, words, scores);
        exponentiate(scores, tile, scale, window, inverses);
        normalize(scores, tile, inverses, weights);
        mix(weights, tile, packed + part + place, H, 1.0f, out + (position * N + task.head) * H, N * H);
      }
    }
  }
}

// Here `packed` has three parts, and `sums` 2 x N x padded x H floats.
template <class Number>
void attend_backward(const Number* grad, const Number* query, const Number* key, const Number* value,
                     Number* grad_query, Number* grad_key, Number* grad_value, const Segment* segments, int64_t count,
                     Word<Number>* packed, int64_t padded, float* sums, float* scratch, int64_t scratch_size, int64_t T,
                     int64_t N, int64_t K, int64_t H, int64_t size, int64_t window, int64_t threads) {
  float scale = 1.0f / sqrtf((float)H);
  int64_t words = words_of<Number>(H), part = K * padded * words, groups = N / K;
  float *key_sums = sums, *value_sums = sums + N * padded * H;
#pragma omp parallel num_threads((int)threads)
  {
    float *mine = scratch + omp_get_thread_num() * scratch_size, inverses[LARGEST_TILE];
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < count * K; number++) {
      Task task(segments, number, K);
      int64_t place = task.key(padded) * words;
      Head<Number> keys(key, task.position(T), task.head, K, H), values(value, task.position(T), task.head, K, H);
      pack_features(keys, task.length, H, packed + place);
      pack_features(values, task.length, H, packed + part + place);
      pack_positions(keys, task.length, round_up(task.length, STRIP), H, packed + 2 * part + place);
    }
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < count * N; number++) {
      Task task(segments, number, N);
      float* key_sum = key_sums + task.key(padded) * H;
      float* value_sum = value_sums + task.key(padded) * H;
      for (int64_t start = 0; start < task.length; start += size) {
        Tile tile(start, size, task.length, window);
        int64_t position = task.position(T) + start, place = (task.key(padded, groups) + tile.begin) * words;
        // Rows are read as operands over H, words of rows as operands over queries.
        Word<Number> *query_rows = (Word<Number>*)mine, *room = query_rows + size * words;
        Word<Number>* grad_rows = is_word<Number>() ? room : query_rows;
        float *weights = mine + 2 * size * words, *scores = weights + tile.rows * tile.width;
        float* rounded = scores + tile.rows * tile.width;
        Word<Number>* columns = (Word<Number>*)(is_word<Number>() ? weights : rounded);
        Head<Number> queries(query, position, task.head, N, H), grads(grad, position, task.head, N, H);
        copy_positions(queries, tile.count, tile.rows, H, query_rows);
        multiply_features(query_rows, tile, packed + place, words, weights);
        exponentiate(weights, tile, scale, window, inverses);
        copy_positions(grads, tile.count, tile.rows, H, grad_rows);
        multiply_features(grad_rows, tile, packed + part + place, words, scores);
        normalize_pairs(weights, tile, inverses, columns);
        collect<Number>(columns, tile, pair_positions(grads, tile, H, grad_rows, room), H, value_sum + tile.begin * H);
        columns = (Word<Number>*)(is_word<Number>() ? scores : rounded);
        Number* score_grads = (Number*)(is_word<Number>() ? scores : rounded + tile.rows * tile.width / 2);
        differentiate(weights, scores, tile, columns, score_grads);
        collect<Number>(columns, tile, pair_positions(queries, tile, H, query_rows, room), H, key_sum + tile.begin * H);
        mix(score_grads, tile, packed + 2 * part + place, H, scale, grad_query + (position * N + task.head) * H, N * H);
      }
    }
    // The heads that share a key head, always in the same order.
#pragma omp for schedule(static)
    for (int64_t number = 0; number < count * K; number++) {
      Task task(segments, number, K);
      for (int64_t i = 0; i < task.length; i++)
        for (int which = 0; which < 2; which++) {
          int64_t first = task.head * groups * padded + task.segment.before + i;
          const float* from = (which ? value_sums : key_sums) + first * H;
          Number* place = (which ? grad_value : grad_key) + ((task.position(T) + i) * K + task.head) * H;
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

}  // namespace

#define FOR_DTYPE(Number, NAME)                                                                                        \
  extern "C" void causal_attention_##NAME(                                                                             \
      const Number* query, const Number* key, const Number* value, Number* out, const Segment* segments,               \
      int64_t count, Word<Number>* packed, int64_t padded, float* scratch, int64_t scratch_size, int64_t T,            \
      int64_t N, int64_t K, int64_t H, int64_t size, int64_t window, int64_t threads) {                                \
    attend<Number>(query, key, value, out, segments, count, packed, padded, scratch, scratch_size, T, N, K, H, size,   \
                   window, threads);                                                                                   \
  }                                                                                                                    \
  extern "C" void causal_attention_backward_##NAME(                                                                    \
      const Number* grad, const Number* query, const Number* key, const Number* value, Number* grad_query,             \
      Number* grad_key, Number* grad_value, const Segment* segments, int64_t count, Word<Number>* packed,              \
      int64_t padded, float* sums, float* scratch, int64_t scratch_size, int64_t T, int64_t N, int64_t K, int64_t H,   \
      int64_t size, int64_t window, int64_t threads) {                                                                 \
    attend_backward<Number>(grad, query, key, value, grad_query, grad_key, grad_value, segments, count, packed,        \
                            padded, sums, scratch, scratch_size, T, N, K, H, size, window, threads);                   \
  }

FOR_DTYPE(float, float32)
#if defined(__AVX512BF16__)
FOR_DTYPE(bf16, bfloat16)
#endif

#endif
