// What a step does between its matrix products, in one pass over memory each, for CPUs.
//
// Compiled on the machine that uses it (see build.py), without a header of torch: tensors come as pointers to
// contiguous memory. Every function exists for fp32 and bf16, with the suffixes _float32 and _bfloat16. All arithmetic
// is fp32; a result is rounded where the plain formula in torch rounds it. What a thread computes depends on no other
// thread, and sums are split at fixed places, so that the number of threads changes no bit.
//
// D width, F inner features, H head_dim, Q queries of a tile, S keys of a tile, V vocabulary.

#include "arithmetic.h"

namespace {

template <class T>
float sum_of_squares(const T* x, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) sum += read(x[i]) * read(x[i]);
  return sum;
}

template <class T>
void rms_norm(const T* hidden, const T* weight, T* out, int64_t rows, int64_t D, float eps, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const T* x = hidden + row * D;
    T* y = out + row * D;
    float inverse = 1.0f / sqrtf(sum_of_squares(x, D) / (float)D + eps);
#pragma omp simd
    for (int64_t i = 0; i < D; i++) write(y + i, read(weight[i]) * round_to<T>(read(x[i]) * inverse));
  }
}

const int64_t ROWS_OF_A_SUM = 64;

// `sums` has a row of D for every ROWS_OF_A_SUM rows: what these add to the weight's gradient; null where it is not
// wanted.
template <class T>
void rms_norm_backward(const T* grad, const T* hidden, const T* weight, T* grad_hidden, float* sums, int64_t rows,
                       int64_t D, float eps, int64_t threads) {
  int64_t blocks = (rows + ROWS_OF_A_SUM - 1) / ROWS_OF_A_SUM;
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t block = 0; block < blocks; block++) {
    float* sum = sums ? sums + block * D : nullptr;
    if (sum) memset(sum, 0, sizeof(float) * D);
    int64_t end = (block + 1) * ROWS_OF_A_SUM < rows ? (block + 1) * ROWS_OF_A_SUM : rows;
    for (int64_t row = block * ROWS_OF_A_SUM; row < end; row++) {
      const T* x = hidden + row * D;
      const T* dy = grad + row * D;
      T* dx = grad_hidden + row * D;
      float inverse = 1.0f / sqrtf(sum_of_squares(x, D) / (float)D + eps);
      float inside = 0.0f;
#pragma omp simd reduction(+ : inside)
      for (int64_t i = 0; i < D; i++) inside += read(dy[i]) * read(weight[i]) * (read(x[i]) * inverse);
      inside /= (float)D;
#pragma omp simd
      for (int64_t i = 0; i < D; i++)
        write(dx + i, (read(dy[i]) * read(weight[i]) - read(x[i]) * inverse * inside) * inverse);
      if (sum) {
#pragma omp simd
        for (int64_t i = 0; i < D; i++) sum[i] += read(x[i]) * inverse * read(dy[i]);
      }
    }
  }
}

const int64_t ELEMENTS_OF_A_PART = 8192;

inline int64_t end_of_part(int64_t start, int64_t count) {
  return start + ELEMENTS_OF_A_PART < count ? start + ELEMENTS_OF_A_PART : count;
}

template <class T>
void swiglu(const T* gate, const T* up, T* out, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t start = 0; start < count; start += ELEMENTS_OF_A_PART) {
    int64_t end = end_of_part(start, count);
#pragma omp simd
    for (int64_t i = start; i < end; i++) {
      float g = read(gate[i]);
      write(out + i, round_to<T>(g * sigmoid(g)) * read(up[i]));
    }
  }
}

template <class T>
void swiglu_backward(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t count,
                     int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t start = 0; start < count; start += ELEMENTS_OF_A_PART) {
    int64_t end = end_of_part(start, count);
#pragma omp simd
    for (int64_t i = start; i < end; i++) {
      float g = read(gate[i]), dy = read(grad[i]), share = sigmoid(g);
      write(grad_up + i, dy * round_to<T>(g * share));
      write(grad_gate + i, round_to<T>(dy * read(up[i])) * share * (1.0f + g * (1.0f - share)));
    }
  }
}

// x * cos + swap_halves(x) * sin for `heads` heads a position; with `backward` its transpose. The tables have a row of
// H for every position, and begin again after `table_rows` positions.
template <class T>
void rotate(const T* x, const T* cosines, const T* sines, T* out, int64_t positions, int64_t table_rows, int64_t heads,
            int64_t H, int64_t backward, int64_t threads) {
  int64_t half = H / 2;
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t position = 0; position < positions; position++) {
    const T* c = cosines + position % table_rows * H;
    const T* s = sines + position % table_rows * H;
    for (int64_t head = 0; head < heads; head++) {
      const T* a = x + (position * heads + head) * H;
      T* y = out + (position * heads + head) * H;
      const T* first_sine = backward ? s + half : s;
      const T* second_sine = backward ? s : s + half;
#pragma omp simd
      for (int64_t i = 0; i < half; i++) {
        float first = read(a[i]), second = read(a[half + i]);
        write(y + i, round_to<T>(first * read(c[i])) + round_to<T>(second * read(first_sine[i])));
        write(y + half + i, round_to<T>(second * read(c[half + i])) + round_to<T>(first * read(second_sine[i])));
      }
    }
  }
}

// exp(scale * (x - its largest)) over [begin, end), 0 in the rest of `width`, in place; returns 1 over their sum.
inline float exponentials(float* x, int64_t begin, int64_t end, int64_t width, float scale) {
  float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
  for (int64_t i = begin; i < end; i++) largest = x[i] > largest ? x[i] : largest;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = begin; i < end; i++) {
    float e = exponential((x[i] - largest) * scale);
    x[i] = e;
    sum += e;
  }
  memset(x, 0, sizeof(float) * begin);
  memset(x + end, 0, sizeof(float) * (width - end));
  return 1.0f / sum;
}

// softmax over the keys that a query of a tile sees, 0 elsewhere, in place; and rounded into `rounded` where that is
// not null. A row of scores for each of `groups` x Q queries. The query's own key is number `offset` + query, and a
// window, where it is not 0, counts back from it.
template <class T>
void causal_softmax(float* scores, T* rounded, int64_t groups, int64_t Q, int64_t S, int64_t offset, int64_t window,
                    int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t row = 0; row < groups * Q; row++) {
    float* x = scores + row * S;
    int64_t end = offset + row % Q + 1;
    float inverse = exponentials(x, window > 0 && end > window ? end - window : 0, end, S, 1.0f);
#pragma omp simd
    for (int64_t i = 0; i < S; i++) x[i] *= inverse;
    if (rounded) {
#pragma omp simd
      for (int64_t i = 0; i < S; i++) write(rounded + row * S + i, x[i]);
    }
  }
}

// dscores = weights * (dweights - sum(weights * dweights)), over `grad` in place.
template <class T>
void softmax_backward(const float* weights, T* grad, int64_t rows, int64_t S, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const float* w = weights + row * S;
    T* g = grad + row * S;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < S; i++) sum += w[i] * read(g[i]);
#pragma omp simd
    for (int64_t i = 0; i < S; i++) write(g + i, w[i] * (read(g[i]) - sum));
  }
}

// exp(x - largest) * scale over V numbers, in place.
template <class T>
inline void softmax_in_place(T* x, int64_t V, float largest, float scale) {
#pragma omp simd
  for (int64_t i = 0; i < V; i++) write(x + i, exponential(read(x[i]) - largest) * scale);
}

// The cross-entropy of each row of logits, times its weight; with `needs_grad` the logits become their gradient. For
// each row `softmax`, where it is not null, gets its largest logit, and its weight over the sum of its exponentials.
template <class T>
void cross_entropy(T* logits, const int64_t* labels, const float* weights, float* losses, float* softmax, int64_t rows,
                   int64_t V, int64_t needs_grad, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    T* x = logits + row * V;
    float largest = -INFINITY, total = 0.0f, picked = read(x[labels[row]]);
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < V; i++) largest = read(x[i]) > largest ? read(x[i]) : largest;
    for (int64_t start = 0; start < V; start += 4096) {
      int64_t end = start + 4096 < V ? start + 4096 : V;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = start; i < end; i++) sum += exponential(read(x[i]) - largest);
      total += sum;
    }
    losses[row] = (logf(total) + largest - picked) * weights[row];
    float scale = weights[row] / total;
    if (softmax) {
      softmax[row * 2] = largest;
      softmax[row * 2 + 1] = scale;
    }
    if (needs_grad) {
      softmax_in_place(x, V, largest, scale);
      write(x + labels[row], exponential(picked - largest) * scale - weights[row]);
    }
  }
}

// The logits of V words, from number `first` on, become the gradient that cross_entropy makes of them.
template <class T>
void cross_entropy_gradient(T* logits, const int64_t* labels, const float* weights, const float* softmax, int64_t rows,
                            int64_t V, int64_t first, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    T* x = logits + row * V;
    float largest = softmax[row * 2], scale = softmax[row * 2 + 1];
    int64_t label = labels[row] - first;
    bool is_here = label >= 0 && label < V;
    float picked = is_here ? read(x[label]) : 0.0f;
    softmax_in_place(x, V, largest, scale);
    if (is_here) write(x + label, exponential(picked - largest) * scale - weights[row]);
  }
}

}  // namespace

#define FOR_DTYPE(T, NAME)                                                                                             \
  extern "C" void rms_norm_##NAME(const T* hidden, const T* weight, T* out, int64_t rows, int64_t D, float eps,        \
                                  int64_t threads) {                                                                   \
    rms_norm<T>(hidden, weight, out, rows, D, eps, threads);                                                           \
  }                                                                                                                    \
  extern "C" void rms_norm_backward_##NAME(const T* grad, const T* hidden, const T* weight, T* grad_hidden,            \
                                           float* sums, int64_t rows, int64_t D, float eps, int64_t threads) {         \
    rms_norm_backward<T>(grad, hidden, weight, grad_hidden, sums, rows, D, eps, threads);                              \
  }                                                                                                                    \
  extern "C" void swiglu_##NAME(const T* gate, const T* up, T* out, int64_t count, int64_t threads) {                  \
    swiglu<T>(gate, up, out, count, threads);                                                                          \
  }                                                                                                                    \
  extern "C" void swiglu_backward_##NAME(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up,          \
                                         int64_t count, int64_t threads) {                                             \
    swiglu_backward<T>(grad, gate, up, grad_gate, grad_up, count, threads);                                            \
  }                                                                                                                    \
  extern "C" void rotate_##NAME(const T* x, const T* cosines, const T* sines, T* out, int64_t positions,               \
                                int64_t table_rows, int64_t heads, int64_t H, int64_t backward, int64_t threads) {     \
    rotate<T>(x, cosines, sines, out, positions, table_rows, heads, H, backward, threads);                             \
  }                                                                                                                    \
  extern "C" void causal_softmax_##NAME(float* scores, T* rounded, int64_t groups, int64_t Q, int64_t S,               \
                                        int64_t offset, int64_t window, int64_t threads) {                             \
    causal_softmax<T>(scores, rounded, groups, Q, S, offset, window, threads);                                         \
  }                                                                                                                    \
  extern "C" void softmax_backward_##NAME(const float* weights, T* grad, int64_t rows, int64_t S, int64_t threads) {   \
    softmax_backward<T>(weights, grad, rows, S, threads);                                                              \
  }                                                                                                                    \
  extern "C" void cross_entropy_##NAME(T* logits, const int64_t* labels, const float* weights, float* losses,          \
                                       float* softmax, int64_t rows, int64_t V, int64_t needs_grad, int64_t threads) { \
    cross_entropy<T>(logits, labels, weights, losses, softmax, rows, V, needs_grad, threads);                          \
  }                                                                                                                    \
  extern "C" void cross_entropy_gradient_##NAME(T* logits, const int64_t* labels, const float* weights,                \
                                                const float* softmax, int64_t rows, int64_t V, int64_t first,          \
                                                int64_t threads) {                                                     \
    cross_entropy_gradient<T>(logits, labels, weights, softmax, rows, V, first, threads);                              \
  }

FOR_DTYPE(float, float32)
FOR_DTYPE(bf16, bfloat16)
