// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::LowRankMultiheadAttention`: a torch::nn::Module that computes the function of
/// torch::nn::MultiheadAttention with low-rank projections.

#include <array>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include <pufferfish/adapters/torch/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// torch::nn::MultiheadAttention with low-rank projections: the submodules `query`, `key`, `value` and
/// `output`, each a LowRankLinear of its own rank. Parameters: `query.down` [rank][embed_dim], `query.up`
/// [embed_dim][rank], `query.bias` (if options.bias()), and so on. libtorch's operations compute the rest.
/// With Q, K, V the projections of q, k, v: y = output(softmax(Q K^T / sqrt(embed_dim / heads) + mask) V),
/// head by head.
///
///     host_torch::LowRankMultiheadAttention attention(torch::nn::MultiheadAttentionOptions(512, 8), 64);
///     auto [y, weights] = attention->forward(x, x, x);     // x: [steps][batch][512]
class LowRankMultiheadAttentionImpl : public torch::nn::Cloneable<LowRankMultiheadAttentionImpl> {
 public:
  /// Makes a module with one rank for all four projections (second form: one for each of query, key, value,
  /// output) and random weights. Throws value_error for a width that the heads do not divide and for options
  /// that low-rank attention does not have (kdim or vdim other than embed_dim, add_bias_kv, add_zero_attn),
  /// rank_error unless 1 <= rank <= embed_dim.
  LowRankMultiheadAttentionImpl(const torch::nn::MultiheadAttentionOptions& given, std::int64_t rank)
      : LowRankMultiheadAttentionImpl(given, rank_list(4, rank)) {}
  LowRankMultiheadAttentionImpl(const torch::nn::MultiheadAttentionOptions& given, const rank_list& ranks)
      : options(given), ranks_(ranks) {
    const std::int64_t width = given.embed_dim(), heads = given.num_heads();
    if (ranks.size() != 4) {
      detail::throw_error<value_error>(
          {describe(), ": ", pufferfish::detail::counted(ranks.size(), "rank"), " for 4 projections"});
    }
    if (heads < 1 || width % heads != 0) {
      detail::throw_error<value_error>({describe(), ": ", heads, " heads do not divide ", width});
    }
    if (given.kdim() != width || given.vdim() != width || given.add_bias_kv() || given.add_zero_attn()) {
      detail::throw_error<value_error>(
          {describe(), ": kdim, vdim, add_bias_kv and add_zero_attn are not for low-rank attention"});
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
      check_rank(describe() + ", " + names[i], width, width, ranks[i]);
    }
    reset();
  }
  /// Makes a module with the sizes and requires_grad of a dense layer, and random weights. `ranks`: of query,
  /// key, value, output.
  LowRankMultiheadAttentionImpl(const torch::nn::MultiheadAttentionImpl& dense, const rank_list& ranks)
      : LowRankMultiheadAttentionImpl(dense.options, ranks) {
    const Tensor &in = dense.in_proj_weight, &in_bias = dense.in_proj_bias, &out = dense.out_proj->weight;
    detail::train_as(parameters(),
                     {in, in, in_bias, in, in, in_bias, in, in, in_bias, out, out, dense.out_proj->bias});
  }

  torch::nn::MultiheadAttentionOptions options;  ///< sizes and dropout; not to be changed
  /// The four projections, each embed_dim -> rank -> embed_dim.
  LowRankLinear query{nullptr}, key{nullptr}, value{nullptr}, output{nullptr};

  /// The ranks of query, key, value and output.
  const rank_list& ranks() const { return ranks_; }

  /// The factors of query, key, value and output: the parameters themselves.
  std::vector<detail::factor_tensors> factors() const {
    return {
        {query->down, query->up}, {key->down, key->up}, {value->down, value->up}, {output->down, output->up}};
  }
  /// The biases of query, key, value and output; undefined tensors without biases.
  std::vector<Tensor> biases() const { return {query->bias, key->bias, value->bias, output->bias}; }

  /// Makes new projections with random values.
  void reset() override {
    const std::array places{&query, &key, &value, &output};
    for (std::size_t i = 0; i < places.size(); ++i) {
      const std::int64_t width = options.embed_dim();
      *places[i] = register_module(names[i], LowRankLinear(width, width, ranks_[i], options.bias()));
    }
  }

  /// Text for errors: width and number of heads.
  std::string describe() const {
    return detail::message(
        {"LowRankMultiheadAttention ", options.embed_dim(), ", ", options.num_heads(), " heads"});
  }

  /// Writes width, heads and ranks, as libtorch's modules do.
  void pretty_print(std::ostream& stream) const override {
    stream << "pufferfish::host_torch::LowRankMultiheadAttention(" << options.embed_dim()
           << ", heads=" << options.num_heads() << ", ranks=";
    for (std::size_t i = 0; i < ranks_.size(); ++i) stream << (i > 0 ? "/" : "") << ranks_[i];
    stream << ")";
  }

  /// Computes attention as torch::nn::MultiheadAttention does. q: steps x batch x embed_dim; k, v: sources x
  /// batch x embed_dim. key_padding_mask: batch x sources, true where a source is left out. attn_mask: steps
  /// x sources, added to the scores. Returns the output and the attention weights after dropout: batch x
  /// steps x sources, averaged over the heads, or batch x heads x steps x sources; undefined unless
  /// need_weights. Throws shape_error for tensors of other shapes, and value_error for a mask of another
  /// type.
  std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& key_padding_mask = {}, bool need_weights = true,
                                     const Tensor& attn_mask = {}, bool average_attn_weights = true) {
    check(q, k, v, key_padding_mask, attn_mask);
    const std::int64_t steps = q.size(0), batch = q.size(1), sources = k.size(0), heads = options.num_heads();
    const std::int64_t head = options.embed_dim() / heads;
    const auto by_head = [&](const Tensor& rows) {
      return rows.reshape({rows.size(0), batch * heads, head}).transpose(0, 1);
    };
    const Tensor scaled = query->forward(q) * (1.0 / std::sqrt(static_cast<double>(head)));
    Tensor weights = by_head(scaled).bmm(by_head(key->forward(k)).transpose(1, 2));
    if (attn_mask.defined()) weights = weights + attn_mask.unsqueeze(0);
    weights = weights.reshape({batch, heads, steps, sources});
    if (key_padding_mask.defined()) {
      weights = weights.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2),
                                    -std::numeric_limits<double>::infinity());
    }
    weights = torch::dropout(weights.softmax(-1), options.dropout(), is_training());
    const Tensor mixed =
        weights.reshape({batch * heads, steps, sources}).bmm(by_head(value->forward(v))).transpose(0, 1);
    const Tensor y = output->forward(mixed.reshape({steps, batch, options.embed_dim()}));
    if (!need_weights) return {y, Tensor()};
    return {y, average_attn_weights ? weights.mean(1) : weights};
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(Tensor())}, {4, torch::nn::AnyValue(true)},
                           {5, torch::nn::AnyValue(Tensor())}, {6, torch::nn::AnyValue(true)})

 private:
  static constexpr std::array names{"query", "key", "value", "output"};

  // Throws the errors of forward() for arguments that do not fit.
  void check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& padding,
             const Tensor& mask) const {
    if (q.dim() != 3 || q.size(2) != options.embed_dim() || k.dim() != 3 || k.sizes() != v.sizes() ||
        k.size(1) != q.size(1) || k.size(2) != q.size(2)) {
      detail::throw_error<shape_error>({describe(), ": query ", detail::shape_text(q), ", key ",
                                        detail::shape_text(k), " and value ", detail::shape_text(v),
                                        " are not [steps x batch x ", options.embed_dim(), "]"});
    }
    const auto check_mask = [&](const char* what, const Tensor& t, std::int64_t rows, bool is_bool) {
      if (!t.defined()) return;
      if (t.sizes() != torch::IntArrayRef({rows, k.size(0)})) {
        detail::throw_error<shape_error>({describe(), ": ", what, " ", detail::shape_text(t), " where [",
                                          rows, " x ", k.size(0), "] is wanted"});
      }
      if ((t.scalar_type() == torch::kBool) != is_bool) {
        detail::throw_error<value_error>({describe(), ": ", what, " is ", detail::kind_text(t), ", where ",
                                          is_bool ? "Bool" : "numbers to add", " are wanted"});
      }
    };
    check_mask("key_padding_mask", padding, q.size(1), true);
    check_mask("attn_mask", mask, q.size(0), false);
  }

  rank_list ranks_;
};
TORCH_MODULE(LowRankMultiheadAttention);

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
