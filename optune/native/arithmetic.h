// Numbers of 32 and 16 bits, and what both source files compute with them.

#pragma once

#include <stdint.h>
#include <string.h>
#include <math.h>

namespace {

struct bf16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline float read(float x) { return x; }
inline float read(bf16 x) { return of_bits((uint32_t)x.bits << 16); }

inline void write(float* place, float x) { *place = x; }

// To the nearest, ties to even; NaN stays NaN.
inline void write(bf16* place, float x) {
  uint32_t bits = bits_of(x);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  place->bits = (uint16_t)(x != x ? 0x7fc0u : rounded);
}

template <class T>
inline float round_to(float x) {
  T rounded;
  write(&rounded, x);
  return read(rounded);
}

// Within 2 units in the last place; 0 below the smallest normal number. Cody-Waite reduction by ln 2, then a
// polynomial of degree 6 on |r| <= ln(2) / 2.
inline float exponential(float x) {
  float bounded = x > 88.0f ? 88.0f : x;
  bounded = bounded < -87.0f ? -87.0f : bounded;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  float shifted = bounded * 1.44269504f + magic;
  float n = shifted - magic;
  float r = bounded - n * 0.693145752f;
  r = r - n * 1.42860682e-6f;
  float p = 1.38888889e-3f;
  p = p * r + 8.33333377e-3f;
  p = p * r + 4.16666679e-2f;
  p = p * r + 1.66666672e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  float scaled = of_bits(bits_of(p) + ((bits_of(shifted) - bits_of(magic)) << 23));
  scaled = x < -87.0f ? 0.0f : scaled;
  return x != x ? x : scaled;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace
