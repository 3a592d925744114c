// What attention is cut into: heads, tiles of queries and the keys that they see, and how these lie in memory as
// operands of products.

#pragma once

#include "products.h"

namespace {

const int64_t STRIP = 64;  // keys are packed in whole strips
const int64_t LARGEST_TILE = 64;

// Whether numbers are words, so that scores and weights are operands as they lie.
template <class Number>
constexpr bool is_word() {
  return Words<Number>::NUMBERS == 1;
}

template <class Number>
inline int64_t words_of(int64_t numbers) {
  return numbers / Words<Number>::NUMBERS;
}

// One head of a tensor (T, heads, H).
template <class Number>
struct Head {
  const Number* numbers;
  int64_t row;  // numbers from one position to the next
  Head(const Number* tensor, int64_t position, int64_t head, int64_t heads, int64_t H)
      : numbers(tensor + (position * heads + head) * H), row(heads * H) {}
};

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

// Rows of words, `next` words apart.
template <class Number>
struct Rows {
  const Word<Number>* words;
  int64_t next;
};

// A tile's queries where they lie, or where they are not whole groups, copied with zeros behind them.
template <class Number>
Rows<Number> take_rows(Head<Number> from, Tile tile, int64_t H, Word<Number>* room) {
  if (tile.count == tile.rows) return {(const Word<Number>*)from.numbers, words_of<Number>(from.row)};
  copy_positions(from, tile.count, tile.rows, H, room);
  return {room, words_of<Number>(H)};
}

// The same for products over queries.
inline Rows<float> take_pairs(Head<float>, Rows<float> rows, Tile, int64_t, float*) { return rows; }

inline Rows<bf16> take_pairs(Head<bf16> from, Rows<bf16>, Tile tile, int64_t H, uint32_t* room) {
  pack_positions(from, tile.count, tile.rows, H, room);
  return {room, H};
}

}  // namespace
