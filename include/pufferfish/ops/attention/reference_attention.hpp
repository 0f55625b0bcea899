// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The definition of attention and its gradients in plain loops, for tests.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/ops/attention/attention_input.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::reference {

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

/// Writes zeros to the rows of x that belong to no sequence.
template <class T>
void clear_other_rows(const token_runs& runs, const tensor_view<T, 2>& x) {
  for (index_t row = 0; row < x.extent(0); ++row) {
    bool inside = false;
    for (index_t s = 0; s < runs.sequences; ++s) {
      inside = inside || (row >= runs.first[s] && row < runs.first[s] + runs.count[s]);
    }
    for (index_t c = 0; c < x.extent(1) && !inside; ++c) x(row, c) = T{};
  }
}

/// y_i = sum over keys j of dropout(weight_ij) v_j, head by head; see ops::attention_forward. Rows that
/// belong to no sequence become zeros.
template <class T>
void attention_forward(const attention_input<T>& in, const tensor_view<T, 2>& y) {
  clear_other_rows(in.queries, y);
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
/// belong to no sequence become zeros.
template <class T>
void attention_backward(const attention_input<T>& in, const tensor_view<const T, 2>& dy,
                        const tensor_view<T, 2>& dq, const tensor_view<T, 2>& dk,
                        const tensor_view<T, 2>& dv) {
  clear_other_rows(in.queries, dq);
  clear_other_rows(in.keys, dk);
  clear_other_rows(in.keys, dv);
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

}  // namespace ops::reference
PUFFERFISH_NAMESPACE_END
