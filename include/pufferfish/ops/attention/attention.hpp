// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Scaled dot-product attention over heads, with its gradients. The plain form is reference_attention.hpp.
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
/// aligned_buffer<float> kept(ops::attention_kept_size(ctx, in));
/// ops::attention_forward<float>(ctx, in, y, kept.data());
/// ops::attention_backward<float>(ctx, in, kept.data(), dy, dq, dk, dv);
/// \endcode

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include <pufferfish/linalg/gemm/native_gemm.hpp>
#include <pufferfish/ops/attention/attention_input.hpp>
#include <pufferfish/ops/attention/reference_attention.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// An integer of the size of T: the type of a lane in the result of a vector comparison.
template <class T>
using lane_word = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

#define PUFFERFISH_KERNELS attentions
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/attention/attention.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Row length of the stored attention weights: `keys` rounded up to whole vectors of 64 bytes, the widest
/// vectors of any target.
template <class T>
constexpr index_t weight_row(index_t keys) {
  constexpr index_t widest = 64 / static_cast<index_t>(sizeof(T));
  return (keys + widest - 1) / widest * widest;
}

/// Scratch of one thread, which works on one head of one sequence at a time; sized for the longest sequence.
/// Elements have the type P = parameter_t<T>: heads of 16-bit elements are converted to float, multiplied,
/// and rounded once. With n queries, m keys, head widths d (of q and k) and e (of v), D = max(d, e) and R =
/// weight_row(m), the numbers of elements are: left max(n, m) * D, right D * R (for a 16-bit T at least n *
/// D), scores n * R, used n * R (0 in a forward pass without dropout); `storage` holds operands packed for
/// matrix products.
template <class T>
struct attention_scratch {
  using P = parameter_t<T>;
  P *left, *right, *scores, *used, *storage;
  std::uint32_t* words;

  /// Takes the scratch of one thread from `frame`. `words` holds the random words of one head, for dropout in
  /// the forward pass; it is one row longer than that, because the kernel loads whole vectors.
  static attention_scratch take(scratch_frame& frame, const attention_input<T>& in, bool backward) {
    const index_t n = in.queries.most(), m = in.keys.most(), row = weight_row<P>(m);
    const index_t deep = std::max(in.depth(), in.value_depth());
    const auto size = [](index_t depth, index_t columns) {
      return gemm_operand<P>::storage_size(depth, columns);
    };
    attention_scratch result{};
    result.left = frame.take<P>(std::max(n, m) * deep);
    result.right = frame.take<P>(deep * (is_narrow<T> ? std::max(n, row) : row));
    result.scores = frame.take<P>(n * row);
    result.used = frame.take<P>(backward || in.dropout.drops() ? n * row : 0);
    result.storage = frame.take<P>(std::max({size(deep, row), size(m, deep), size(n, deep)}));
    result.words = frame.take<std::uint32_t>(in.dropout.drops() && !backward ? n * m + row : 0);
    return result;
  }

  /// to = a b, the matrix product.
  void multiply(const tensor_view<const P, 2>& a, const tensor_view<const P, 2>& b,
                const tensor_view<P, 2>& to) const {
    gemm_operand<P>::prepare(b, storage, a.extent(0)).multiply(a, to, false);
  }
  /// to = a b for rows `to` of a head. If they are narrow, the product is computed in `right`, which b must
  /// not use, and rounded.
  void multiply_head(const tensor_view<const P, 2>& a, const tensor_view<const P, 2>& b,
                     const tensor_view<T, 2>& to) const {
    if constexpr (is_narrow<T>) {
      multiply(a, b, {right, to.shape()});
      PUFFERFISH_KERNEL(widest_isa(), attentions, copy_rows<P, T>)
      (right, to.extent(0), to.extent(1), to.extent(1), P{1}, to.data(), to.stride(0));
    } else {
      multiply(a, b, to);
    }
  }

  /// Copies the rows of a head, multiplied by `factor`, contiguously into `left`. Returns the view of the
  /// copy.
  tensor_view<const P, 2> dense(const tensor_view<const T, 2>& rows, double factor) const {
    PUFFERFISH_KERNEL(widest_isa(), attentions, copy_rows<T, P>)
    (rows.data(), rows.extent(0), rows.extent(1), rows.stride(0), static_cast<P>(factor), left,
     rows.extent(1));
    return {left, rows.shape()};
  }
  /// The rows of a head as operand of a product: the rows themselves or, if they are narrow, a copy in
  /// `left`.
  tensor_view<const P, 2> operand(const tensor_view<const T, 2>& rows) const {
    if constexpr (is_narrow<T>) {
      return dense(rows, 1.0);
    } else {
      return rows;
    }
  }

  /// Copies the transpose of `rows` into `right`, each row of the transpose padded with zeros to whole
  /// vectors. Returns the view of the padded transpose.
  tensor_view<const P, 2> transposed(const tensor_view<const T, 2>& rows) const {
    const index_t length = weight_row<P>(rows.extent(0));
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

/// places[s] = offset of the attention weights of sequence s among all kept weights, which are stored
/// [head][query][padded key] for each sequence. Returns the number of kept weights. places may be nullptr.
template <class T>
index_t place_weights(const attention_input<T>& in, index_t* places) {
  index_t at = 0;
  for (index_t s = 0; s < in.queries.sequences; ++s) {
    if (places != nullptr) places[s] = at;
    at += in.heads * in.queries.count[s] * weight_row<parameter_t<T>>(in.keys.count[s]);
  }
  return at;
}

/// Turns the scores of one head of one sequence into weights. `kept` receives the softmax weights, with
/// the sign of dropped weights flipped; `used` receives the factors of the values. See weights_row.
template <class T>
void make_weights(const attention_input<T>& in, index_t s, index_t head, const attention_scratch<T>& scratch,
                  parameter_t<T>* kept, parameter_t<T>* used) {
  using P = parameter_t<T>;
  const index_t n = in.queries.count[s], m = in.keys.count[s], row = weight_row<P>(m);
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), attentions, weights_row<P>);
  const bool drops = in.dropout.drops();
  if (drops) {
    const random_stream random = in.dropout.of_head(s, in.heads, head);
    PUFFERFISH_KERNEL(widest_isa(), dropouts, random_words)
    (random.seed(), random.stream(), 0, n * m, scratch.words);
  }
  for (index_t i = 0; i < n; ++i) {
    P* const scores = scratch.scores + i * row;
    const index_t visible = in.visible(s, i);
    if (!in.mask.allowed.is_null()) {
      for (index_t j = 0; j < visible; ++j) {
        if (in.mask.allowed(s, i, j) == 0) scores[j] = -std::numeric_limits<P>::infinity();
      }
    }
    kernel(scores, visible, row, drops ? scratch.words + i * m : nullptr,
           dropout_threshold(in.dropout.probability), static_cast<P>(in.dropout.scale()), kept + i * row,
           used + i * row);
  }
}

/// Computes attention_forward on the CPU, one task for each head of each sequence.
template <class T>
void attend_heads(context<device::cpu>& ctx, const attention_input<T>& in, const tensor_view<T, 2>& y,
                  parameter_t<T>* kept) {
  using P = parameter_t<T>;
  scratch_frame frame(ctx.scratch());
  auto* scratch = frame.take<attention_scratch<T>>(ctx.threads());
  for (int t = 0; t < ctx.threads(); ++t) {
    scratch[t] = attention_scratch<T>::take(frame, in, false);
  }
  auto* places = frame.take<index_t>(in.queries.sequences);
  place_weights(in, places);
  ctx.parallel_for(in.queries.sequences * in.heads, [&](index_t task, int worker) {
    const index_t s = task / in.heads, head = task % in.heads;
    const index_t n = in.queries.count[s], m = in.keys.count[s], row = weight_row<P>(m);
    const attention_scratch<T>& own = scratch[worker];
    const auto to = head_rows(y, in.queries, s, head, in.heads);
    if (to.empty()) return;
    const auto q = head_rows(in.q, in.queries, s, head, in.heads);
    const auto k = head_rows(in.k, in.keys, s, head, in.heads);
    const auto v = head_rows(in.v, in.keys, s, head, in.heads);
    own.multiply(own.dense(q, in.scale()), own.transposed(k), {own.scores, {n, row}});
    P* const weights = kept == nullptr ? own.scores : kept + places[s] + head * n * row;
    P* const used = in.dropout.drops() ? own.used : weights;
    make_weights(in, s, head, own, weights, used);
    own.multiply_head({used, {n, m}, {row, 1}}, own.operand(v), to);
  });
}

/// Computes attention_backward on the CPU, one task for each head of each sequence.
template <class T>
void attend_heads_backward(context<device::cpu>& ctx, const attention_input<T>& in,
                           const parameter_t<T>* kept, const tensor_view<const T, 2>& dy,
                           const tensor_view<T, 2>& dq, const tensor_view<T, 2>& dk,
                           const tensor_view<T, 2>& dv) {
  using P = parameter_t<T>;
  scratch_frame frame(ctx.scratch());
  auto* scratch = frame.take<attention_scratch<T>>(ctx.threads());
  for (int t = 0; t < ctx.threads(); ++t) {
    scratch[t] = attention_scratch<T>::take(frame, in, true);
  }
  auto* places = frame.take<index_t>(in.queries.sequences);
  place_weights(in, places);
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), attentions, weights_gradient_row<P>);
  ctx.parallel_for(in.queries.sequences * in.heads, [&](index_t task, int worker) {
    const index_t s = task / in.heads, head = task % in.heads;
    const index_t n = in.queries.count[s], m = in.keys.count[s], row = weight_row<P>(m);
    const attention_scratch<T>& own = scratch[worker];
    const auto q = head_rows(in.q, in.queries, s, head, in.heads);
    const auto k = head_rows(in.k, in.keys, s, head, in.heads);
    const auto v = head_rows(in.v, in.keys, s, head, in.heads);
    const auto g = own.dense(head_rows(dy, in.queries, s, head, in.heads), 1.0);
    own.multiply(g, own.transposed(v), {own.scores, {n, row}});
    const P* const weights = kept + places[s] + head * n * row;
    for (index_t i = 0; i < n; ++i) {
      kernel(weights + i * row, row, in.dropout.drops(), static_cast<P>(in.dropout.scale()),
             static_cast<P>(in.scale()), own.used + i * row, own.scores + i * row);
    }
    const P* const used = in.dropout.drops() ? own.used : weights;
    const tensor_view<const P, 2> dscores(own.scores, {n, m}, {row, 1});
    own.multiply_head(transpose(tensor_view<const P, 2>(used, {n, m}, {row, 1})), g,
                      head_rows(dv, in.keys, s, head, in.heads));
    own.multiply_head(dscores, own.dense(k, 1.0), head_rows(dq, in.queries, s, head, in.heads));
    own.multiply_head(transpose(dscores), own.dense(q, 1.0), head_rows(dk, in.keys, s, head, in.heads));
  });
}

}  // namespace detail

/// Number of elements that attention_forward keeps for attention_backward. On the CPU: the attention weights
/// of all heads, for each query one row of the sequence's keys rounded up to 64 bytes, which grows with the
/// square of the sequence length. On a device: one number for each query and head.
template <class T, class Device>
index_t attention_kept_size(context<Device>&, const attention_input<T>& in) {
  return is_cpu<Device> ? detail::place_weights(in, nullptr) : in.heads * in.q.extent(0);
}
/// Deprecated form for the CPU.
template <class T>
[[deprecated("pass the context: attention_kept_size(ctx, in)")]] index_t attention_kept_size(
    const attention_input<T>& in) {
  return detail::place_weights(in, nullptr);
}

/// y_i = sum_j dropout(p_ij) v_j for each head of each sequence. p_i is the softmax of q_i k_j / sqrt(d) over
/// the keys j that the mask lets query i see (Vaswani et al.: "Attention is all you need", NIPS 2017, section
/// 3.2). A query that may see no key gets zeros, as does every query of a sequence without keys.
///
/// y: rows of q by columns of v, contiguous rows, overlaps no input; rows of no sequence become zeros.
/// `kept`: attention_kept_size elements in training; nullptr in inference, which turns dropout off. Sequences
/// may share keys, not queries. All operands are in memory of the context's device. Finite scores of any size
/// are safe; a NaN among the visible scores of a query makes its output NaN. Throws shape_error if the
/// shapes, or on the CPU the runs or the mask, do not fit; a device does not check these.
///
/// On the CPU each pair of sequence and head is one task, so the result has the same bits for any number of
/// threads. Scratch of each thread: a matrix of scores of the longest sequence, and copies of its operands. A
/// device computes scores and weights in float and never stores them.
template <class T, class Device>
void attention_forward(context<Device>& ctx, attention_input<T> in, const tensor_view<T, 2>& y,
                       parameter_t<T>* kept) {
  detail::check_attention_shapes(in, y.shape());
  if constexpr (is_cpu<Device>) detail::check_attention_runs(in);
  if (kept == nullptr) in.dropout = {};
  // The kernels of a device clear rows themselves, unless there is no sequence.
  if (is_cpu<Device> || in.queries.sequences == 0) clear_rows_outside<T>(ctx, in.queries, y);
  if (y.empty() || in.queries.sequences == 0) return;
  if constexpr (!is_cpu<Device>) {
    attention_ops<Device>::attention_forward(ctx, in, y, kept);
  } else {
    detail::attend_heads<T>(ctx, in, y, kept);
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, attention_forward);

/// Gradients dq, dk, dv of q, k, v, with their shapes, from the gradient dy of y (formulas:
/// reference::attention_backward). Rows are contiguous; the outputs are overwritten and overlap nothing. They
/// may be columns of one matrix. Rows of no sequence become zeros. `in`, `kept`: as in the forward pass,
/// but sequences must not share keys. y: the output of the forward pass, which a device needs; the CPU only
/// checks its shape. Throws shape_error as attention_forward, and if a gradient does not have the shape of
/// its operand. Scratch on a device: heads x (rows of q) floats.
template <class T, class Device>
void attention_backward(context<Device>& ctx, const attention_input<T>& in, const parameter_t<T>* kept,
                        const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dq,
                        const tensor_view<T, 2>& dk, const tensor_view<T, 2>& dv,
                        const tensor_view<const T, 2>& y = {}) {
  detail::check_attention_shapes(in, dy.shape());
  if (!is_cpu<Device> || !y.is_null()) detail::check_attention_shapes(in, y.shape());
  if constexpr (is_cpu<Device>) detail::check_attention_runs(in);
  detail::check_attention_gradients(in, dq.shape(), dk.shape(), dv.shape());
  if (is_cpu<Device> || in.queries.sequences == 0) {
    clear_rows_outside<T>(ctx, in.queries, dq);
    clear_rows_outside<T>(ctx, in.keys, dk);
    clear_rows_outside<T>(ctx, in.keys, dv);
  }
  if (in.queries.sequences == 0) return;
  if constexpr (!is_cpu<Device>) {
    attention_ops<Device>::attention_backward(ctx, in, kept, dy, dq, dk, dv, y);
  } else {
    detail::attend_heads_backward<T>(ctx, in, kept, dy, dq, dk, dv);
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, attention_backward);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
