// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Scaled dot-product attention over heads, with its gradients: the plain reference and the fast CPU form.
///
/// Tokens are rows; sequences are runs of rows. One operation therefore serves padded batches, batches
/// without padding, and key/value caches that are only partly filled.
///
/// \code
/// ops::attention_input<float> in;
/// in.q = q;  // rows x (heads * depth)
/// in.k = k;
/// in.v = v;
/// in.queries = in.keys = {sequences, first.data(), count.data()};
/// in.heads = 8;
/// in.mask.causal = true;
/// aligned_buffer<float> kept(ops::attention_kept_size(in));
/// ops::attention_forward<float>(ctx, in, y, kept.data());
/// ops::attention_backward<float>(ctx, in, kept.data(), dy, dq, dk, dv);
/// \endcode

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include <pufferfish/core/separate.hpp>
#include <pufferfish/linalg/gemm/native_gemm.hpp>
#include <pufferfish/ops/attention/token_runs.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Which keys a query may see. If both rules are set, a key must satisfy both. The default: all keys.
struct attention_mask {
  /// Query i of n sees keys 0 .. i + (m - n) of m: the last query sees all of them.
  bool causal = false;
  /// A key is visible if allowed(sequence, query, key) != 0. Queries and keys are numbered within a sequence.
  /// Extents: at least the sequences, the most queries and the most keys of a sequence of the input. Stride 0
  /// shares a row. Null view: all keys.
  tensor_view<const unsigned char, 3> allowed;
};

/// Dropout of attention weights. The position of a weight in the random stream depends on its sequence
/// number, head, query, key and the number of keys of its sequence, but not on the rest of the batch. Ranks
/// and parts of a batch therefore draw the masks of the whole batch if first_sequence is the number of their
/// first sequence in it.
struct attention_dropout {
  double probability = 0.0;  ///< in [0, 1); 0: none
  random_stream random{0, 0};
  std::uint64_t first_sequence = 0;

  bool drops() const { return probability > 0.0; }
  double scale() const { return 1.0 / (1.0 - probability); }
  /// The stream of one head of one sequence. Weight (query i, key j) of a sequence with m keys has position i
  /// m + j.
  random_stream of_head(index_t sequence, index_t heads, index_t head) const {
    const std::uint64_t number =
        (first_sequence + static_cast<std::uint64_t>(sequence)) * static_cast<std::uint64_t>(heads) +
        static_cast<std::uint64_t>(head);
    return {random.seed(), substream(random.stream(), number)};
  }
};

namespace ops {

/// Operands of attention. Head h of q and k is columns h d .. h d + d - 1 of heads * d columns. Head h of v
/// is columns h e .. h e + e - 1 of heads * e columns; e may differ from d. q, k and v may be columns of one
/// matrix. Views, runs and mask refer to the caller's memory, on the context's device.
template <class T>
struct attention_input {
  tensor_view<const T, 2> q;  ///< q, k, v: rows contiguous, any row stride
  tensor_view<const T, 2> k, v;
  token_runs queries, keys;  ///< both with the same number of sequences
  index_t heads = 1;
  attention_mask mask;
  attention_dropout dropout;

  /// Columns of a head of q and k (d), columns of a head of v (e), and the factor 1 / sqrt(d) of the scores.
  index_t depth() const { return q.extent(1) / heads; }
  index_t value_depth() const { return v.extent(1) / heads; }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(std::max<index_t>(1, depth()))); }
  /// Query i of sequence s sees no keys but 0 .. visible - 1; `mask.allowed` may hide some of these, too.
  index_t visible(index_t s, index_t i) const {
    const index_t m = keys.count[s];
    return mask.causal ? std::clamp<index_t>(i + 1 + m - queries.count[s], 0, m) : m;
  }
};

namespace reference {

/// Weights of query i of one head, before dropout: softmax over the keys that the mask allows, 0 for the
/// other keys; all 0 if the mask allows no key. `weights`: one element for each key of the sequence.
template <class T>
void attention_weights(const attention_input<T>& in, index_t s, index_t head, index_t i, double* weights) {
  const index_t m = in.keys.count[s], d = in.depth();
  double largest = -HUGE_VAL, sum = 0.0;
  for (index_t j = 0; j < m; ++j) {
    const bool seen = j < in.visible(s, i) && (in.mask.allowed.is_null() || in.mask.allowed(s, i, j) != 0);
    double score = 0.0;
    for (index_t c = head * d; c < (head + 1) * d; ++c) {
      score += static_cast<double>(in.q(in.queries.first[s] + i, c)) *
               static_cast<double>(in.k(in.keys.first[s] + j, c));
    }
    weights[j] = seen ? score * in.scale() : -HUGE_VAL;
    largest = std::max(largest, weights[j]);
  }
  for (index_t j = 0; j < m; ++j) {
    weights[j] = weights[j] == -HUGE_VAL ? 0.0 : std::exp(weights[j] - largest);
    sum += weights[j];
  }
  for (index_t j = 0; j < m; ++j) weights[j] = sum > 0.0 ? weights[j] / sum : 0.0;
}

/// Dropout factor of the weight of query i and key j: 1 / (1 - probability) if kept, 0 if dropped.
template <class T>
double attention_kept(const attention_input<T>& in, index_t s, index_t head, index_t i, index_t j) {
  if (!in.dropout.drops()) return 1.0;
  const auto position = static_cast<std::uint64_t>(i * in.keys.count[s] + j);
  const random_stream random = in.dropout.of_head(s, in.heads, head);
  return dropped(random, position, dropout_threshold(in.dropout.probability)) ? 0.0 : in.dropout.scale();
}

/// y = sum over keys of dropout(weight) value, head by head; see the fast form.
template <class T>
void attention_forward(const attention_input<T>& in, const tensor_view<T, 2>& y) {
  const index_t e = in.value_depth();
  tensor<double, 1> weights({in.keys.most()});
  for (index_t s = 0; s < in.queries.sequences; ++s) {
    for (index_t head = 0; head < in.heads; ++head) {
      for (index_t i = 0; i < in.queries.count[s]; ++i) {
        attention_weights(in, s, head, i, weights.data());
        for (index_t c = head * e; c < (head + 1) * e; ++c) {
          double sum = 0.0;
          for (index_t j = 0; j < in.keys.count[s]; ++j) {
            sum += weights(j) * attention_kept(in, s, head, i, j) *
                   static_cast<double>(in.v(in.keys.first[s] + j, c));
          }
          y(in.queries.first[s] + i, c) = static_cast<T>(sum);
        }
      }
    }
  }
}

/// The gradients of attention_forward. With weights p_ij, dropout factors c_ij (attention_kept) and g_ij =
/// c_ij dy_i v_j: dv_j = sum_i p_ij c_ij dy_i; the gradient of score ij is s_ij = p_ij (g_ij - sum_k p_ik
/// g_ik); dq_i = scale sum_j s_ij k_j, dk_j = scale sum_i s_ij q_i, with scale = 1 / sqrt(d). Rows that
/// belong to no sequence are not written.
template <class T>
void attention_backward(const attention_input<T>& in, const tensor_view<const T, 2>& dy,
                        const tensor_view<T, 2>& dq, const tensor_view<T, 2>& dk,
                        const tensor_view<T, 2>& dv) {
  const index_t d = in.depth(), e = in.value_depth(), most = in.keys.most();
  tensor<double, 1> weights({most}), slopes({most});
  tensor<double, 2> dkeys({most, d}), dvalues({most, e});
  for (index_t s = 0; s < in.queries.sequences; ++s) {
    const index_t m = in.keys.count[s], query0 = in.queries.first[s], key0 = in.keys.first[s];
    for (index_t head = 0; head < in.heads; ++head) {
      std::fill(dkeys.flat().begin(), dkeys.flat().end(), 0.0);
      std::fill(dvalues.flat().begin(), dvalues.flat().end(), 0.0);
      for (index_t i = 0; i < in.queries.count[s]; ++i) {
        attention_weights(in, s, head, i, weights.data());
        double mean = 0.0;
        for (index_t j = 0; j < m; ++j) {
          const double kept = attention_kept(in, s, head, i, j);
          slopes(j) = 0.0;
          for (index_t c = 0; c < e; ++c) {
            const auto g = static_cast<double>(dy(query0 + i, head * e + c));
            slopes(j) += kept * g * static_cast<double>(in.v(key0 + j, head * e + c));
            dvalues(j, c) += weights(j) * kept * g;
          }
          mean += weights(j) * slopes(j);
        }
        for (index_t c = 0; c < d; ++c) {
          double sum = 0.0;
          for (index_t j = 0; j < m; ++j) {
            const double dscore = weights(j) * (slopes(j) - mean) * in.scale();
            sum += dscore * static_cast<double>(in.k(key0 + j, head * d + c));
            dkeys(j, c) += dscore * static_cast<double>(in.q(query0 + i, head * d + c));
          }
          dq(query0 + i, head * d + c) = static_cast<T>(sum);
        }
      }
      for (index_t j = 0; j < m; ++j) {
        for (index_t c = 0; c < d; ++c) dk(key0 + j, head * d + c) = static_cast<T>(dkeys(j, c));
        for (index_t c = 0; c < e; ++c) dv(key0 + j, head * e + c) = static_cast<T>(dvalues(j, c));
      }
    }
  }
}

}  // namespace reference

namespace detail {

/// An integer of the size of T: the type of a lane in the result of a vector comparison.
template <class T>
using lane_word = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

#define PUFFERFISH_KERNELS attentions
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/attention/attention.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Row length of the stored weights: `keys` rounded up to whole vectors of 64 bytes, the widest kind.
template <class T>
constexpr index_t weight_row(index_t keys) {
  constexpr index_t widest = 64 / static_cast<index_t>(sizeof(T));
  return (keys + widest - 1) / widest * widest;
}

/// Throws shape_error, naming the sequence, if a run is not within `rows` rows. `what`: "queries" or "keys".
inline void check_runs(const char* what, const token_runs& runs, index_t rows) {
  for (index_t s = 0; s < runs.sequences; ++s) {
    if (runs.first[s] < 0 || runs.count[s] < 0 || runs.first[s] + runs.count[s] > rows) {
      pufferfish::detail::throw_error<shape_error>({"attention: sequence ", s, " has ", what, " in rows ",
                                                    runs.first[s], " .. ", runs.first[s] + runs.count[s] - 1,
                                                    " of ", rows});
    }
  }
}

/// Checks that read only shapes and sequence counts, not the arrays of the token runs.
template <class T>
void check_attention_shapes(const attention_input<T>& in, const extents<2>& y) {
  const extents<2>&q = in.q.shape(), &k = in.k.shape(), &v = in.v.shape();
  if (in.heads < 1 || q[1] % std::max<index_t>(1, in.heads) != 0 || q[1] != k[1] || v[1] % in.heads != 0 ||
      v[0] != k[0] || y[0] != q[0] || y[1] != v[1] || in.queries.sequences != in.keys.sequences) {
    pufferfish::detail::throw_error<shape_error>({"attention: queries ", q, ", keys ", k, ", values ", v,
                                                  " of ", in.heads, " heads and ", in.queries.sequences,
                                                  " and ", in.keys.sequences,
                                                  " sequences do not fit each other or the output ", y});
  }
}

/// All checks of attention on the CPU: shapes, runs within the rows of their matrices, and a mask that covers
/// all sequences, queries and keys. Throws shape_error.
template <class T>
void check_attention(const attention_input<T>& in, const extents<2>& y) {
  check_attention_shapes(in, y);
  check_runs("queries", in.queries, in.q.extent(0));
  check_runs("keys", in.keys, in.k.extent(0));
  const extents<3>& allowed = in.mask.allowed.shape();
  if (!in.mask.allowed.is_null() &&
      (allowed[0] < in.queries.sequences || allowed[1] < in.queries.most() || allowed[2] < in.keys.most())) {
    pufferfish::detail::throw_error<shape_error>(
        {"attention: a mask ", allowed, " for ", in.queries.sequences, " sequences of up to ",
         in.queries.most(), " queries and ", in.keys.most(), " keys"});
  }
}

/// Throws shape_error unless the gradients have the shapes of q, k and v.
template <class T>
void check_attention_gradients(const attention_input<T>& in, const extents<2>& dq, const extents<2>& dk,
                               const extents<2>& dv) {
  if (dq != in.q.shape() || dk != in.k.shape() || dv != in.v.shape()) {
    pufferfish::detail::throw_error<shape_error>({"attention: queries ", in.q.shape(), ", keys ",
                                                  in.k.shape(), ", values ", in.v.shape(), ", gradients ", dq,
                                                  ", ", dk, ", ", dv});
  }
}

/// Elements that multiply_packed needs for a right operand of this depth.
template <class T>
index_t packed_size(index_t depth) {
  constexpr index_t columns = 64 / static_cast<index_t>(sizeof(T));
  return gemm_operand<T>::prepare({nullptr, {depth, columns}}, nullptr, 1).left_storage_size();
}

/// Scratch of one thread, which works on one head of one sequence at a time; fits the longest sequence.
/// Elements, with n queries, m keys, deep = max(d, e) and row = weight_row(m): left max(n, m) deep, right
/// deep row, scores n row, used n row (with dropout or in the backward pass), and storage for packed
/// operands.
template <class T>
struct attention_scratch {
  T *left, *right, *scores, *used, *storage, *packed;
  std::uint32_t* words;

  /// Takes the scratch of one thread from `frame`. `words` are random words of a head, for dropout in the
  /// forward pass, rounded up by a row because vectors of them are loaded.
  static attention_scratch take(scratch_frame& frame, const attention_input<T>& in, bool backward) {
    const index_t n = in.queries.most(), m = in.keys.most(), row = weight_row<T>(m);
    const index_t deep = std::max(in.depth(), in.value_depth());
    const auto size = [](index_t depth, index_t columns) {
      return gemm_operand<T>::storage_size(depth, columns);
    };
    attention_scratch result{};
    result.left = frame.take<T>(std::max(n, m) * deep);
    result.right = frame.take<T>(deep * row);
    result.scores = frame.take<T>(n * row);
    result.used = frame.take<T>(backward || in.dropout.drops() ? n * row : 0);
    result.storage = frame.take<T>(std::max({size(deep, row), size(m, deep), size(n, deep)}));
    result.packed = frame.take<T>(packed_size<T>(std::max({deep, m, n})));
    result.words = frame.take<std::uint32_t>(in.dropout.drops() && !backward ? n * m + row : 0);
    return result;
  }

  /// to = a b.
  void multiply(const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                const tensor_view<T, 2>& to) const {
    const auto operand = gemm_operand<T>::prepare(b, storage, a.extent(0));
    operand.pays_to_pack(a.extent(0)) ? operand.multiply_packed(a, to, false, packed)
                                      : operand.multiply(a, to, false);
  }

  /// Copies the rows of a head, times `factor`, contiguously into `left`.
  tensor_view<const T, 2> dense(const tensor_view<const T, 2>& rows, double factor) const {
    PUFFERFISH_KERNEL(widest_isa(), attentions, copy_rows<T>)
    (rows.data(), rows.extent(0), rows.extent(1), rows.stride(0), static_cast<T>(factor), left);
    return {left, rows.shape()};
  }

  /// Copies the transpose of `rows` into `right`; its rows are padded with zeros to whole vectors.
  tensor_view<const T, 2> transposed(const tensor_view<const T, 2>& rows) const {
    const index_t length = weight_row<T>(rows.extent(0));
    PUFFERFISH_KERNEL(widest_isa(), attentions, copy_transposed<T>)
    (rows.data(), rows.extent(0), rows.extent(1), rows.stride(0), length, right);
    return {right, {rows.extent(1), length}};
  }
};

/// View of the rows of one head of one sequence.
template <class T>
tensor_view<T, 2> head_rows(const tensor_view<T, 2>& all, const token_runs& runs, index_t s, index_t head,
                            index_t heads) {
  const index_t depth = all.extent(1) / heads;
  return all.slice(0, runs.first[s], runs.count[s]).slice(1, head * depth, depth);
}

/// places[s] = offset of the kept weights of sequence s: [head][query][padded key]. Returns their number.
template <class T>
index_t place_weights(const attention_input<T>& in, index_t* places) {
  index_t at = 0;
  for (index_t s = 0; s < in.queries.sequences; ++s) {
    if (places != nullptr) places[s] = at;
    at += in.heads * in.queries.count[s] * weight_row<T>(in.keys.count[s]);
  }
  return at;
}

/// Turns the scores of one head of one sequence into weights. `kept` receives the softmax weights, with
/// the sign of dropped weights flipped; `used` receives the factors of the values. See weights_row.
template <class T>
void make_weights(const attention_input<T>& in, index_t s, index_t head, const attention_scratch<T>& scratch,
                  T* kept, T* used) {
  const index_t n = in.queries.count[s], m = in.keys.count[s], row = weight_row<T>(m);
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), attentions, weights_row<T>);
  const bool drops = in.dropout.drops();
  if (drops) {
    const random_stream random = in.dropout.of_head(s, in.heads, head);
    PUFFERFISH_KERNEL(widest_isa(), dropouts, random_words)
    (random.seed(), random.stream(), 0, n * m, scratch.words);
  }
  for (index_t i = 0; i < n; ++i) {
    T* const scores = scratch.scores + i * row;
    const index_t visible = in.visible(s, i);
    if (!in.mask.allowed.is_null()) {
      for (index_t j = 0; j < visible; ++j) {
        if (in.mask.allowed(s, i, j) == 0) scores[j] = -std::numeric_limits<T>::infinity();
      }
    }
    kernel(scores, visible, row, drops ? scratch.words + i * m : nullptr,
           dropout_threshold(in.dropout.probability), static_cast<T>(in.dropout.scale()), kept + i * row,
           used + i * row);
  }
}

}  // namespace detail

/// Elements that attention_forward keeps for attention_backward: on the CPU, the weights of all heads, for
/// each query one row of the sequence's keys rounded up to 64 bytes. Quadratic in the length of the
/// sequences.
template <class T>
index_t attention_kept_size(const attention_input<T>& in) {
  return detail::place_weights(in, nullptr);
}
template <class T>
index_t attention_kept_size(context<device::cpu>&, const attention_input<T>& in) {
  return attention_kept_size(in);
}
/// The GPU keeps one number for each query and head.
template <class T>
index_t attention_kept_size(context<device::gpu>&, const attention_input<T>& in) {
  return in.heads * in.q.extent(0);
}

/// y_i = sum_j dropout(p_ij) v_j for each head of each sequence. p_i is the softmax of q_i k_j / sqrt(d) over
/// the keys j that the mask lets query i see (Vaswani et al.: "Attention is all you need", NIPS 2017, section
/// 3.2). A query that may see no key gets zeros, as does every query of a sequence without keys.
///
/// y: rows of q by columns of v, contiguous rows, overlaps no input; rows of no sequence are not written
/// (clear_rows_outside). `kept`: attention_kept_size elements in training; nullptr in inference, which turns
/// dropout off. Sequences may share keys, not queries. Each pair of sequence and head is one task, so the
/// result has the same bits for any number of threads. Scratch of each thread: a matrix of scores of the
/// longest sequence, and copies of its operands. Finite scores of any size are safe; a NaN among the visible
/// scores of a query makes its output NaN. Throws shape_error if the shapes, the runs or the mask do not fit.
template <class T>
void attention_forward(context<device::cpu>& ctx, attention_input<T> in, const tensor_view<T, 2>& y,
                       T* kept) {
  detail::check_attention(in, y.shape());
  if (kept == nullptr) in.dropout = {};
  if (y.empty() || in.queries.sequences == 0) return;
  scratch_frame frame(ctx.scratch());
  auto* scratch = frame.take<detail::attention_scratch<T>>(ctx.threads());
  for (int t = 0; t < ctx.threads(); ++t) {
    scratch[t] = detail::attention_scratch<T>::take(frame, in, false);
  }
  auto* places = frame.take<index_t>(in.queries.sequences);
  detail::place_weights(in, places);
  ctx.parallel_for(in.queries.sequences * in.heads, [&](index_t task, int worker) {
    const index_t s = task / in.heads, head = task % in.heads;
    const index_t n = in.queries.count[s], m = in.keys.count[s], row = detail::weight_row<T>(m);
    const detail::attention_scratch<T>& own = scratch[worker];
    const auto to = detail::head_rows(y, in.queries, s, head, in.heads);
    if (to.empty()) return;
    const auto q = detail::head_rows(in.q, in.queries, s, head, in.heads);
    const auto k = detail::head_rows(in.k, in.keys, s, head, in.heads);
    const auto v = detail::head_rows(in.v, in.keys, s, head, in.heads);
    own.multiply(own.dense(q, in.scale()), own.transposed(k), {own.scores, {n, row}});
    T* const weights = kept == nullptr ? own.scores : kept + places[s] + head * n * row;
    T* const used = in.dropout.drops() ? own.used : weights;
    detail::make_weights(in, s, head, own, weights, used);
    own.multiply({used, {n, m}, {row, 1}}, v, to);
  });
}
PUFFERFISH_SEPARATE_FUNCTION(sequence, attention_forward);

/// GPU overload: <pufferfish/gpu.hpp>. Checks only shapes and numbers of sequences: not that the runs are
/// within the rows, nor the extents of the mask.
template <class T>
void attention_forward(context<device::gpu>& ctx, attention_input<T> in, const tensor_view<T, 2>& y,
                       parameter_t<T>* kept);

/// Gradients dq, dk, dv of q, k, v, with their shapes, from the gradient dy of y (formulas:
/// reference::attention_backward). Rows are contiguous; the outputs are overwritten and overlap nothing. They
/// may be columns of one matrix. Rows of no sequence are not written. `in`, `kept`: as in the forward pass,
/// but sequences must not share keys. y: the output of the forward pass; unused on the CPU. Throws
/// shape_error as attention_forward, and if a gradient does not have the shape of its operand.
template <class T>
void attention_backward(context<device::cpu>& ctx, const attention_input<T>& in, const T* kept,
                        const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dq,
                        const tensor_view<T, 2>& dk, const tensor_view<T, 2>& dv,
                        const tensor_view<const T, 2>& = {}) {
  detail::check_attention(in, dy.shape());
  detail::check_attention_gradients(in, dq.shape(), dk.shape(), dv.shape());
  if (in.queries.sequences == 0) return;
  scratch_frame frame(ctx.scratch());
  auto* scratch = frame.take<detail::attention_scratch<T>>(ctx.threads());
  for (int t = 0; t < ctx.threads(); ++t) {
    scratch[t] = detail::attention_scratch<T>::take(frame, in, true);
  }
  auto* places = frame.take<index_t>(in.queries.sequences);
  detail::place_weights(in, places);
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::attentions, weights_gradient_row<T>);
  ctx.parallel_for(in.queries.sequences * in.heads, [&](index_t task, int worker) {
    const index_t s = task / in.heads, head = task % in.heads;
    const index_t n = in.queries.count[s], m = in.keys.count[s], row = detail::weight_row<T>(m);
    const detail::attention_scratch<T>& own = scratch[worker];
    const auto q = detail::head_rows(in.q, in.queries, s, head, in.heads);
    const auto k = detail::head_rows(in.k, in.keys, s, head, in.heads);
    const auto v = detail::head_rows(in.v, in.keys, s, head, in.heads);
    const auto g = own.dense(detail::head_rows(dy, in.queries, s, head, in.heads), 1.0);
    own.multiply(g, own.transposed(v), {own.scores, {n, row}});
    const T* const weights = kept + places[s] + head * n * row;
    for (index_t i = 0; i < n; ++i) {
      kernel(weights + i * row, row, in.dropout.drops(), static_cast<T>(in.dropout.scale()),
             static_cast<T>(in.scale()), own.used + i * row, own.scores + i * row);
    }
    const T* const used = in.dropout.drops() ? own.used : weights;
    const tensor_view<const T, 2> dscores(own.scores, {n, m}, {row, 1});
    own.multiply(transpose(tensor_view<const T, 2>(used, {n, m}, {row, 1})), g,
                 detail::head_rows(dv, in.keys, s, head, in.heads));
    own.multiply(dscores, own.dense(k, 1.0), detail::head_rows(dq, in.queries, s, head, in.heads));
    own.multiply(transpose(dscores), own.dense(q, 1.0), detail::head_rows(dk, in.keys, s, head, in.heads));
  });
}
PUFFERFISH_SEPARATE_FUNCTION(sequence, attention_backward);
/// GPU overload: <pufferfish/gpu.hpp>. It needs y.
template <class T>
void attention_backward(context<device::gpu>& ctx, const attention_input<T>& in, const parameter_t<T>* kept,
                        const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dq,
                        const tensor_view<T, 2>& dk, const tensor_view<T, 2>& dv,
                        const tensor_view<const T, 2>& y);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
