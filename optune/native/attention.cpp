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

#include "tiles.h"
#include "weights.h"

extern "C" int omp_get_thread_num(void);

namespace {

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
template <class Number>
void multiply_features(Rows<Number> queries, Tile tile, const Word<Number>* keys, int64_t words, float* scores) {
  for (int64_t strip = 0; strip < tile.width; strip += COLUMNS) {
    int64_t row = strip + tile.begin - tile.first;  // the first query that sees a key of the strip
    row = row < 0 ? 0 : row;
    // The first ones see one block of the two.
    for (int64_t columns = 16; columns <= COLUMNS; columns += 16) {
      int64_t stop = columns == COLUMNS ? tile.rows : strip + tile.begin + 16 - tile.first;
      stop = stop < tile.rows ? stop : tile.rows;
      multiply_columns<Word<Number>>(
          {queries.words + row * queries.next, queries.next, 1, GROUP * queries.next, keys + strip * words, 16 * words,
           16, 0, (stop - row) / GROUP, words, 0, scores + row * tile.width + strip, tile.width, false},
          columns);
      row = stop > row ? stop : row;
    }
  }
}

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
void collect(const Word<Number>* weights, Tile tile, Rows<Number> from, int64_t H, float* sums) {
  const int64_t words = words_of<Number>(GROUP), steps = words_of<Number>(tile.rows), seen = tile.first - tile.begin;
  for (int64_t column = 0; column < H; column += COLUMNS) {
    int64_t columns = H - column < COLUMNS ? 16 : COLUMNS;
    multiply_columns<Word<Number>>({weights, 1, tile.width, GROUP, from.words + column, 16, from.next, 0, seen / GROUP,
                                    steps, 0, sums + column, H, true},
                                   columns);
    multiply_columns<Word<Number>>(
        {weights + seen, 1, tile.width, GROUP + words * tile.width, from.words + column, 16, from.next,
         words * from.next, tile.rows / GROUP, steps, -words, sums + seen * H + column, H, false},
        columns);
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
        Rows<Number> queries =
            take_rows(Head<Number>(query, position, task.head, N, H), tile, H, (Word<Number>*)mine);
        float* scores = mine + size * words;
        Number* weights = (Number*)(is_word<Number>() ? scores : scores + tile.rows * tile.width);
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
        Word<Number> *first = (Word<Number>*)mine, *second = first + size * words;
        float *weights = mine + 2 * size * words, *scores = weights + tile.rows * tile.width;
        float* rounded = scores + tile.rows * tile.width;
        Word<Number>* columns = (Word<Number>*)(is_word<Number>() ? weights : rounded);
        Head<Number> queries(query, position, task.head, N, H), grads(grad, position, task.head, N, H);
        Rows<Number> query_rows = take_rows(queries, tile, H, first);
        multiply_features(query_rows, tile, packed + place, words, weights);
        exponentiate(weights, tile, scale, window, inverses);
        Rows<Number> grad_rows = take_rows(grads, tile, H, is_word<Number>() ? second : first);
        multiply_features(grad_rows, tile, packed + part + place, words, scores);
        normalize_pairs(weights, tile, inverses, columns);
        collect(columns, tile, take_pairs(grads, grad_rows, tile, H, second), H, value_sum + tile.begin * H);
        columns = (Word<Number>*)(is_word<Number>() ? scores : rounded);
        Number* score_grads = (Number*)(is_word<Number>() ? scores : rounded + tile.rows * tile.width / 2);
        differentiate(weights, scores, tile, columns, score_grads);
        collect(columns, tile, take_pairs(queries, query_rows, tile, H, second), H, key_sum + tile.begin * H);
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
