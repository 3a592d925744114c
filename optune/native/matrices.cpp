// Matrix products for CPUs with AVX-512.
//
// Each number of a result is one chain of fused multiply-adds, in the order of k, whatever the other sizes and the
// number of threads are.

#if defined(__AVX512F__) && defined(__AVX512BW__)

#include <math.h>

#include <atomic>
#include <memory>

#include "products.h"

namespace {

const int64_t BLOCK = 16;           // lines that are packed side by side
const int64_t STRIPE = 64;          // rows of A that are packed at a time
const int64_t WHOLE = 768;          // words up to which k is in one piece
const int64_t DEPTH = 512;          // and those of the pieces of a longer one
const int64_t PANEL = 768 * 288;    // words of B that a thread keeps, most of its L2 cache
const int64_t WIDEST = 576, HIGHEST = 512, LARGEST = 128 * 1024;  // columns, rows and numbers of a task's result
const int64_t AHEAD = 8;            // words of which the memory is asked for before they are packed

// The size of as few equal parts as possible that hold at most `most`, in whole units.
inline int64_t share(int64_t count, int64_t most, int64_t unit) {
  return round_up(parts_of(count, parts_of(count, most)), unit);
}

inline __mmask32 first_halves(int64_t count) {
  return count >= 32 ? (__mmask32)-1 : count > 0 ? (__mmask32)((1u << count) - 1) : (__mmask32)0;
}

// The rows of A or the columns of B: each of the former is multiplied with each of the latter.
template <class Number>
struct Lines {
  const Number* numbers;
  int64_t next, step;  // numbers from one line to the next, and within a line; one of them is 1
  int64_t count, length;
};

// Blocks of lines; in a block, for each of `words` words from number k on, that of every line; 0 where there is none.
// pack_across takes lines whose numbers are neighbours, pack_along takes neighbouring lines.
template <class Number>
void pack_across(Lines<Number> lines, int64_t line, int64_t end, int64_t k, int64_t words, Word<Number>* packed) {
  for (; line < end; line += BLOCK)
    for (int64_t j = 0; j < words; j += 16) {
      int64_t first = k + j * Words<Number>::NUMBERS, some = least(16, words - j);
      __mmask32 read = first_halves((lines.length - first) * (int64_t)sizeof(Number) / 2);
      __m512i x[16];
      for (int64_t i = 0; i < 16; i++)
        x[i] = _mm512_maskz_loadu_epi16(line + i < lines.count ? read : 0,
                                        lines.numbers + (line + i) * lines.next + first);
      transpose(x);
      for (int i = 0; i < 16; i++)
        if (i < some) _mm512_storeu_si512(packed + i * BLOCK, x[i]);
      packed += some * BLOCK;
    }
}

inline void pack_along(Lines<float> lines, int64_t line, int64_t end, int64_t k, int64_t words, float* packed) {
  for (int64_t j = 0; j < words; j++, packed += BLOCK) {
    const float* from = lines.numbers + (k + j) * lines.step;
    for (int64_t i = line; i < end; i += BLOCK) {
      __builtin_prefetch(from + i + AHEAD * lines.step);
      _mm512_storeu_ps(packed + (i - line) * words, _mm512_maskz_loadu_ps(first_lanes(lines.count - i), from + i));
    }
  }
}

#if defined(__AVX512BF16__)

inline void pack_along(Lines<bf16> lines, int64_t line, int64_t end, int64_t k, int64_t words, uint32_t* packed) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i left = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(32)), 16));
  const __m512i right = _mm512_add_epi16(left, _mm512_set1_epi16(16));
  for (int64_t j = 0; j < words; j++, packed += BLOCK) {
    const bf16* from = lines.numbers + (k + 2 * j) * lines.step;
    bool is_pair = k + 2 * j + 1 < lines.length;
    for (int64_t i = line; i < end; i += 2 * BLOCK) {
      __builtin_prefetch(from + i + AHEAD * lines.step);
      __builtin_prefetch(from + i + (AHEAD + 1) * lines.step);
      __mmask32 there = first_halves(lines.count - i);
      __m512i first = _mm512_maskz_loadu_epi16(there, from + i);
      __m512i second = _mm512_maskz_loadu_epi16(is_pair ? there : 0, from + lines.step + i);
      _mm512_storeu_si512(packed + (i - line) * words, _mm512_permutex2var_epi16(first, left, second));
      if (i + BLOCK < end)
        _mm512_storeu_si512(packed + (i - line + BLOCK) * words, _mm512_permutex2var_epi16(first, right, second));
    }
  }
}

#endif

template <class Number>
__attribute__((noinline)) void pack(Lines<Number> lines, int64_t line, int64_t end, int64_t k, int64_t words,
                                    Word<Number>* packed) {
  if (lines.step == 1)
    pack_across(lines, line, end, k, words, packed);
  else
    pack_along(lines, line, end, k, words, packed);
}

// Asks for the memory of one of `parts` parts of what will be packed. By the instruction's name, as GCC drops calls of
// a function that does nothing but __builtin_prefetch.
template <class Number>
__attribute__((noinline)) void fetch(Lines<Number> lines, int64_t line, int64_t end, int64_t k, int64_t words,
                                     int64_t part, int64_t parts) {
  bool is_across = lines.step == 1;
  int64_t count = least(end, lines.count) - line, length = least(words * Words<Number>::NUMBERS, lines.length - k);
  int64_t rows = is_across ? count : length, width = is_across ? length : count;
  int64_t row = is_across ? lines.next : lines.step;
  const Number* first = lines.numbers + line * lines.next + k * lines.step;
  for (int64_t i = part * rows / parts; i < (part + 1) * rows / parts; i++)
    for (int64_t j = 0; j < width; j += 64 / sizeof(Number))
      asm volatile("prefetcht1 %0" : : "m"(first[i * row + j]));
}

inline void store(float* place, __m512 left, __m512 right, int64_t count) {
  _mm512_mask_storeu_ps(place, first_lanes(count), left);
  _mm512_mask_storeu_ps(place + 16, first_lanes(count - 16), right);
}

#if defined(__AVX512BF16__)

inline void store(bf16* place, __m512 left, __m512 right, int64_t count) {
  _mm512_mask_storeu_epi16(place, first_halves(count), (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

#endif

// GROUP x COLUMNS numbers of a result, of which `rows` x `columns` are wanted; they begin with `sums` if there are any.
// Stores wait for their memory one after the other, so all of it is asked for before.
template <class Word, class Result>
__attribute__((noinline)) void make_tile(const Word* a, const Word* b, int64_t words, int64_t rows, int64_t columns,
                                         const float* sums, int64_t sums_row, Result* to, int64_t to_row) {
  const __mmask16 left = first_lanes(columns), right = first_lanes(columns - 16);
  __m512 sum[GROUP][2];
#pragma GCC unroll 8
  for (int m = 0; m < GROUP; m++) {
    const float* place = sums + m * sums_row;
    bool is_there = sums && m < rows;
    sum[m][0] = _mm512_maskz_loadu_ps(is_there ? left : 0, place);
    sum[m][1] = _mm512_maskz_loadu_ps(is_there ? right : 0, place + 16);
  }
#pragma GCC unroll 8
  for (int m = 0; m < GROUP; m++)
    if (m < rows) {
      __builtin_prefetch(to + m * to_row, 1);
      if (sizeof(Result) == sizeof(float)) __builtin_prefetch(to + m * to_row + 16, 1);
      if (sums) {  // those of the next tile too
        __builtin_prefetch(sums + m * sums_row + COLUMNS);
        __builtin_prefetch(sums + m * sums_row + COLUMNS + 16);
      }
    }
  multiply(a, 1, BLOCK, b, words * BLOCK, BLOCK, words, sum);
#pragma GCC unroll 8
  for (int m = 0; m < GROUP; m++)
    if (m < rows) store(to + m * to_row, sum[m][0], sum[m][1], columns);
}

// The sizes of what a thread takes at a time.
struct Task {
  int64_t height, width, depth;
};

// Those with which all threads are ready first, by an estimate: packing a word takes about as long as multiplying it
// with 16 others, and packs of B serve several tasks if k is in one piece.
inline Task choose_task(int64_t rows, int64_t columns, int64_t words, int64_t threads) {
  const bool is_whole = words <= WHOLE;
  Task best = {0, 0, is_whole ? words : share(words, DEPTH, 16)};
  const int64_t widest = least(WIDEST, PANEL / best.depth / COLUMNS * COLUMNS);
  double shortest = INFINITY;
  for (int64_t highest = 32; highest <= HIGHEST; highest += highest < 128 ? 32 : 64) {
    int64_t height = share(rows, highest, BLOCK), down = parts_of(rows, height);
    for (int64_t most = COLUMNS; most <= widest; most += COLUMNS) {
      int64_t width = share(columns, most, COLUMNS), tasks = down * parts_of(columns, width);
      double one = height * width + 16.0 * (height + (is_whole ? width / 4 : width));
      double time = (parts_of(tasks, threads) + 0.1) * one;
      if (time >= shortest || (!is_whole && height * width > LARGEST)) continue;
      shortest = time;
      best.height = height, best.width = width;
    }
  }
  return best;
}

// Where a thread works, kept from product to product.
template <class Number>
struct Room {
  alignas(64) Word<Number> rows[WHOLE * STRIPE], columns[PANEL];
  alignas(64) float sums[LARGEST];
};

// c (M, N), rows c_row numbers apart, = A . B, or c += A . B. The length of A, which is that of B, is at least 1.
template <class Number, class Result>
struct Product {
  static constexpr bool IN_PLACE = sizeof(Result) == sizeof(float);  // sums lie in the result
  static constexpr int64_t NUMBERS = Words<Number>::NUMBERS;
  Lines<Number> a, b;
  Result* c;
  int64_t c_row, words;
  bool adds;
  Task size;

  int64_t tasks_down() const { return parts_of(a.count, size.height); }
  int64_t tasks() const { return tasks_down() * parts_of(b.count, size.width); }

  // One task; B's part of it is packed already if it is `packed`, the first column of the task before.
  void make(int64_t task, int64_t& packed, Room<Number>& room) const {
    int64_t top = task % tasks_down() * size.height, bottom = least(top + size.height, a.count);
    int64_t left = task / tasks_down() * size.width;
    for (int64_t j = 0; j < words; j += size.depth) {
      bool packs = size.depth < words || packed != left;
      packed = left;
      for (int64_t stripe = top; stripe < bottom; stripe += STRIPE)
        make_stripe(stripe, top, bottom, left, j, packs && stripe == top, room);
    }
  }

  // The products of some words, from number j on, for the rows of a stripe.
  void make_stripe(int64_t stripe, int64_t top, int64_t bottom, int64_t left, int64_t j, bool packs,
                   Room<Number>& room) const {
    const int64_t right = least(left + size.width, b.count), end = least(stripe + STRIPE, bottom);
    const int64_t k = j * NUMBERS, some = least(size.depth, words - j);
    const bool is_last = j + some == words;
    // The stripe that is likely to come next, and how many tiles there are to ask for its memory.
    const int64_t next = end < bottom || is_last ? end : top;
    const int64_t next_k = end < bottom ? k : is_last ? 0 : k + some * NUMBERS;
    const int64_t groups = parts_of(end - stripe, GROUP), tiles = groups * parts_of(right - left, COLUMNS);
    int64_t tile = 0;
    auto multiply_tile = [&](int64_t m, int64_t n) {
      fetch(a, next, next + STRIPE, next_k, some, tile++, tiles);
      const Word<Number>* row = room.rows + (m - stripe) / BLOCK * BLOCK * some + m % BLOCK;
      const Word<Number>* column = room.columns + (n - left) * some;
      Result* to = c + m * c_row + n;
      float* sums = IN_PLACE ? (float*)to : room.sums + (m - top) * size.width + n - left;
      const int64_t sums_row = IN_PLACE ? c_row : size.width;
      const float* before = j > 0 || adds ? sums : nullptr;
      if (is_last)
        make_tile(row, column, some, bottom - m, right - n, before, sums_row, to, c_row);
      else
        make_tile(row, column, some, bottom - m, right - n, before, sums_row, sums, sums_row);
    };
    pack(a, stripe, end, k, some, room.rows);
    if (!packs) {
      for (int64_t block = stripe; block < end; block += BLOCK)
        for (int64_t n = left; n < right; n += COLUMNS)
          for (int64_t m = block; m < block + BLOCK && m < end; m += GROUP) multiply_tile(m, n);
      return;
    }
    for (int64_t n = left; n < right; n += COLUMNS) {
      pack(b, n, n + COLUMNS, k, some, room.columns + (n - left) * some);
      for (int64_t m = stripe; m < end; m += GROUP) {
        if (n + COLUMNS < right) fetch(b, n + COLUMNS, n + 2 * COLUMNS, k, some, (m - stripe) / GROUP, groups);
        multiply_tile(m, n);
      }
    }
  }
};

template <class Number, class Result>
void multiply_matrices(Lines<Number> a, Lines<Number> b, Result* c, int64_t c_row, bool adds, int64_t threads) {
  if (a.count < 1 || b.count < 1) return;
  const int64_t MOST_QUEUES = 64, queues = least(threads, MOST_QUEUES);
  const int64_t words = parts_of(a.length, Words<Number>::NUMBERS);
  const Task size = choose_task(a.count, b.count, words, threads);
  const Product<Number, Result> product = {a, b, c, c_row, words, adds, size};
  const int64_t tasks = product.tasks();
  // Each thread begins with a queue of its own, for which it packs B seldom, and then helps the others.
  struct alignas(64) {
    std::atomic<int64_t> next;
  } queue[MOST_QUEUES];
  for (int64_t i = 0; i < queues; i++) queue[i].next = tasks * i / queues;
  std::atomic<int64_t> arrived{0};
#pragma omp parallel num_threads((int)threads)
  {
    static thread_local std::unique_ptr<Room<Number>> room;
    if (!room) room.reset(new Room<Number>);
    int64_t me = arrived++, packed = -1;
    for (int64_t turn = 0; turn < queues; turn++) {
      int64_t own = (me + turn) % queues;
      for (int64_t task; (task = queue[own].next++) < tasks * (own + 1) / queues;) product.make(task, packed, *room);
    }
  }
}

}  // namespace

// a (M, K), b (K, N): the numbers from one row of a, or column of b, to the next, and within it. c is rounded in the
// first; in the second, where `adds`, it is added to.
#define FOR_DTYPE(T, NAME)                                                                                             \
  extern "C" void multiply_matrices_##NAME(T* c, const T* a, const T* b, int64_t M, int64_t N, int64_t K,              \
                                           int64_t c_row, int64_t a_row, int64_t a_step, int64_t b_column,             \
                                           int64_t b_step, int64_t threads) {                                          \
    multiply_matrices<T, T>({a, a_row, a_step, M, K}, {b, b_column, b_step, N, K}, c, c_row, false, threads);          \
  }                                                                                                                    \
  extern "C" void sum_matrices_##NAME(float* c, const T* a, const T* b, int64_t M, int64_t N, int64_t K,               \
                                      int64_t c_row, int64_t a_row, int64_t a_step, int64_t b_column, int64_t b_step,  \
                                      int64_t adds, int64_t threads) {                                                 \
    multiply_matrices<T, float>({a, a_row, a_step, M, K}, {b, b_column, b_step, N, K}, c, c_row, adds, threads);       \
  }

FOR_DTYPE(float, float32)
#if defined(__AVX512BF16__)
FOR_DTYPE(bf16, bfloat16)
#endif

#endif
