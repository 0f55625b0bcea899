// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `TokenLoss`: the loss of language models and translators from logits. For a large vocabulary see
/// ops/loss/output_loss.hpp, which never has the logits in memory twice.

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/loss/token_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Cross entropy over tokens, with or without label smoothing; targets that are the padding do not count.
/// Keeps nothing between calls: loss and gradient come from one call.
///
/// The formulas of a row are those of SoftmaxCrossEntropy. A row whose target is options().padding has loss
/// and gradient 0. The result counts the other rows in `tokens`.
///
/// \code
/// const TokenLoss<float> loss({.padding = 1});
/// const token_loss_result found = loss(ctx, logits, targets, dlogits.view());
/// std::printf("perplexity %f", found.perplexity());
/// \endcode
template <class T>
class TokenLoss {
 public:
  using value_type = T;

  /// `options`: label smoothing, reduction, and the padding token, whose rows do not count.
  explicit TokenLoss(const token_loss_options& options = {}) : options_(options) {}

  const token_loss_options& options() const { return options_; }
  std::string describe() const { return "TokenLoss"; }

  /// Returns the loss of logits (tokens x vocabulary, dense) for one target per row. Writes its gradient,
  /// reduced as the options say, to dlogits (shaped as logits; may be logits; a null view: not wanted).
  /// Throws shape_error for views that are not dense and for sizes that differ; value_error, before anything
  /// is written, for a target that is neither in 0 .. vocabulary - 1 nor the padding, and for an epsilon of
  /// the smoothing outside [0, 1).
  token_loss_result operator()(context<device::cpu>& ctx, const tensor_view<const T, 2>& logits,
                               std::span<const std::int32_t> targets,
                               const tensor_view<T, 2>& dlogits = {}) const {
    const index_t tokens = ops::counted_tokens(targets, options_.padding);
    return (*this)(ctx, logits, targets, ops::loss_normalizer(options_, tokens), dlogits);
  }

  /// Computes the loss and its gradient divided by `normalizer`, instead of the divisor that the options
  /// give. If that is the number of tokens of the global batch / number of ranks, the mean of all ranks'
  /// gradients is the gradient of the mean loss. Also throws value_error for a normalizer that is not
  /// positive.
  token_loss_result operator()(context<device::cpu>& ctx, const tensor_view<const T, 2>& logits,
                               std::span<const std::int32_t> targets, double normalizer,
                               const tensor_view<T, 2>& dlogits) const {
    detail::check_dense(*this, "logits", logits);
    detail::check_dense_if_wanted(*this, "dlogits", dlogits);
    return ops::token_loss<T>(ctx, logits, targets, options_, normalizer, dlogits);
  }

 private:
  token_loss_options options_;
};

PUFFERFISH_NAMESPACE_END
