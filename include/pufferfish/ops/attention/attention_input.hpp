// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Operands of scaled dot-product attention: the matrices q, k and v, the rows of each sequence, the mask,
/// and the dropout of attention weights.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <pufferfish/core/message.hpp>
#include <pufferfish/ops/attention/token_runs.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The rules that determine which keys a query may see. If both rules are set, a key must satisfy both. By
/// default a query sees all keys.
///
///     attention_mask mask;
///     mask.causal = true;  // a language model: no token sees a later one
///     // One mask [length][length] for all sequences:
///     mask.allowed = {bytes.data(), {sequences, length, length}, {0, length, 1}};
struct attention_mask {
  /// Whether query i of n sees only the keys 0 .. i + (m - n) of m keys, so that the last query sees all
  /// keys.
  bool causal = false;
  /// Explicit mask: a key is visible if allowed(sequence, query, key) != 0, where queries and keys are
  /// numbered within their sequence. Its extents are at least the number of sequences, the largest number of
  /// queries and the largest number of keys of a sequence. A dimension of stride 0 shares one entry among all
  /// its indices, for example one mask for all sequences. With a null view (the default) all keys are
  /// visible.
  tensor_view<const unsigned char, 3> allowed;
};

/// Dropout of attention weights. The position of a weight in the random stream depends on its sequence
/// number, head, query, key and the number of keys of its sequence, but not on the rest of the batch. If
/// first_sequence is the number of the first sequence in the global batch, a rank or a part of a batch
/// therefore draws its part of the mask of the global batch.
struct attention_dropout {
  double probability = 0.0;          ///< probability to drop a weight, in [0, 1)
  random_stream random{0, 0};        ///< stream of the layer and step
  std::uint64_t first_sequence = 0;  ///< number of the first sequence in the global batch

  /// Whether any weight may be dropped.
  bool drops() const { return probability > 0.0; }
  /// Factor of weights that are kept.
  double scale() const { return 1.0 / (1.0 - probability); }
  /// The random stream of one head of one sequence. The weight of query i and key j in a sequence with m keys
  /// has position i * m + j.
  random_stream of_head(index_t sequence, index_t heads, index_t head) const {
    const std::uint64_t number =
        (first_sequence + static_cast<std::uint64_t>(sequence)) * static_cast<std::uint64_t>(heads) +
        static_cast<std::uint64_t>(head);
    return {random.seed(), substream(random.stream(), number)};
  }
};

namespace ops {

/// Operands of attention. With d = depth(), head h of q and k consists of columns h d .. h d + d - 1 of heads
/// d columns. With e = value_depth(), head h of v consists of columns h e .. h e + e - 1 of heads e columns;
/// e may differ from d. A row is a token; `queries` and `keys` tell which rows form a sequence. q, k and v
/// may be columns of one matrix. All memory belongs to the caller and is on the context's device.
template <class T>
struct attention_input {
  tensor_view<const T, 2> q;  ///< q, k, v: rows contiguous, any row stride
  tensor_view<const T, 2> k, v;
  token_runs queries, keys;  ///< both with the same number of sequences
  index_t heads = 1;         ///< number of heads; divides the columns of q, k and v
  attention_mask mask;
  attention_dropout dropout;

  /// Number d of columns of a head of q and k.
  index_t depth() const { return q.extent(1) / heads; }
  /// Number e of columns of a head of v.
  index_t value_depth() const { return v.extent(1) / heads; }
  /// Factor 1 / sqrt(d) of the scores.
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(std::max<index_t>(1, depth()))); }
  /// Number of keys that the causal rule lets query i of sequence s see, keys 0 .. visible - 1.
  /// `mask.allowed` may hide some of these, too.
  index_t visible(index_t s, index_t i) const {
    const index_t m = keys.count[s];
    return mask.causal ? std::clamp<index_t>(i + 1 + m - queries.count[s], 0, m) : m;
  }
};

namespace detail {

/// Throws shape_error, naming the sequence, if a sequence has rows outside 0 .. rows - 1. `what`: "queries"
/// or "keys".
inline void check_runs(const char* what, const token_runs& runs, index_t rows) {
  for (index_t s = 0; s < runs.sequences; ++s) {
    if (runs.first[s] < 0 || runs.count[s] < 0 || runs.first[s] + runs.count[s] > rows) {
      pufferfish::detail::throw_error<shape_error>({"attention: sequence ", s, " has ", what, " in rows ",
                                                    runs.first[s], " .. ", runs.first[s] + runs.count[s] - 1,
                                                    " of ", rows});
    }
  }
}

/// Throws shape_error unless the shapes and the numbers of sequences fit each other and the output. Does not
/// read the arrays of row numbers, so it may be called for operands in device memory.
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

/// Throws shape_error unless all sequences are within the rows of their matrices and the mask covers all
/// sequences, queries and keys. Reads the arrays of row numbers, so it may be called on the CPU only.
template <class T>
void check_attention_runs(const attention_input<T>& in) {
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

}  // namespace detail
}  // namespace ops
PUFFERFISH_NAMESPACE_END
