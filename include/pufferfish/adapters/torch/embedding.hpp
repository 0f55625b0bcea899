// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::LowRankEmbedding`: a torch::nn::Module that computes an embedding of rank r.

#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include <pufferfish/adapters/torch/traits.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// Sizes of a LowRankEmbedding.
struct LowRankEmbeddingOptions {
  LowRankEmbeddingOptions(std::int64_t num_embeddings, std::int64_t embedding_dim, std::int64_t rank)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim), rank_(rank) {}
  TORCH_ARG(std::int64_t, num_embeddings);
  TORCH_ARG(std::int64_t, embedding_dim);
  TORCH_ARG(std::int64_t, rank);
  /// Index of the padding token, as in torch::nn::Embedding: its row of `down` starts as zeros and gets no
  /// gradient.
  TORCH_ARG(torch::optional<std::int64_t>, padding_idx) = torch::nullopt;
};

/// An embedding of rank r, y = up down[token]: a row of a thin table, then a product with a matrix.
/// Parameters: `down` [num_embeddings][rank] and `up` [embedding_dim][rank]; the table of the dense layer is
/// down up^T.
///
///     host_torch::LowRankEmbedding word(host_torch::LowRankEmbeddingOptions(32000, 512, 64).padding_idx(0));
///     auto rows = word->forward(tokens);   // [..., 512]
///
/// Lookup and product are computed by libtorch's operations on every device, and autograd differentiates
/// them. Gradients are dense tensors. Positions of the padding token contribute to the gradient of `up`.
class LowRankEmbeddingImpl : public torch::nn::Cloneable<LowRankEmbeddingImpl> {
 public:
  /// Makes a layer with random weights. Throws rank_error unless
  /// 1 <= rank <= min(num_embeddings, embedding_dim).
  LowRankEmbeddingImpl(std::int64_t num_embeddings, std::int64_t embedding_dim, std::int64_t rank)
      : LowRankEmbeddingImpl(LowRankEmbeddingOptions(num_embeddings, embedding_dim, rank)) {}
  /// Makes a layer with random weights. A negative padding_idx counts from the end of the table; options then
  /// has the row's number. Throws the errors of the other constructor, and value_error for a padding_idx
  /// outside -num_embeddings .. num_embeddings - 1.
  explicit LowRankEmbeddingImpl(const LowRankEmbeddingOptions& given) : options(given) {
    const std::int64_t tokens = given.num_embeddings();
    check_rank(describe(), given.embedding_dim(), tokens, given.rank());
    if (given.padding_idx()) {
      const std::int64_t index = *given.padding_idx();
      if (index < -tokens || index >= tokens) {
        detail::throw_error<value_error>({describe(), ": padding_idx ", index, " is outside the vocabulary"});
      }
      options.padding_idx(index < 0 ? index + tokens : index);
    }
    reset();
  }
  /// Makes a module with the sizes and requires_grad of a dense layer, rank ranks.at(0), and random weights.
  LowRankEmbeddingImpl(const torch::nn::EmbeddingImpl& dense, const rank_list& ranks)
      : LowRankEmbeddingImpl(LowRankEmbeddingOptions(dense.options.num_embeddings(),
                                                     dense.options.embedding_dim(), ranks.at(0))
                                 .padding_idx(dense.options.padding_idx())) {
    detail::train_as(parameters(), {dense.weight, dense.weight});
  }

  LowRankEmbeddingOptions options;
  Tensor down, up;

  /// The factors of the layer's matrix, the transpose of the dense table, and no biases.
  std::vector<detail::factor_tensors> factors() const { return {{down.detach().t(), up}}; }
  std::vector<Tensor> biases() const { return {}; }

  /// Makes new parameters with random values.
  void reset() override {
    down = register_parameter("down", torch::empty({options.num_embeddings(), options.rank()}));
    up = register_parameter("up", torch::empty({options.embedding_dim(), options.rank()}));
    reset_parameters();
  }

  /// Sets random values: `down` is normal with variance 1, like libtorch's table; `up` is uniform with
  /// variance 1 / rank. The elements of the output then have variance 1.
  void reset_parameters() {
    const torch::NoGradGuard no_grad;
    down.normal_();
    if (options.padding_idx()) down[*options.padding_idx()].zero_();
    detail::fill_uniform(up, std::sqrt(3.0 / static_cast<double>(options.rank())));
  }

  std::string describe() const {
    return detail::message({"LowRankEmbedding rank ", options.rank(), ", ", options.num_embeddings(), " x ",
                            options.embedding_dim()});
  }

  /// Writes sizes, rank and padding, as libtorch's modules do.
  void pretty_print(std::ostream& stream) const override {
    stream << "pufferfish::host_torch::LowRankEmbedding(num_embeddings=" << options.num_embeddings()
           << ", embedding_dim=" << options.embedding_dim() << ", rank=" << options.rank();
    if (options.padding_idx()) stream << ", padding_idx=" << *options.padding_idx();
    stream << ")";
  }

  /// Returns the rows of `tokens` (int64 or int32, any shape [...]) as [..., embedding_dim]. Throws
  /// value_error for another type and, on the CPU, for a token outside the vocabulary. On the CPU the tokens
  /// are read twice more, for their minimum and maximum.
  Tensor forward(const Tensor& tokens) {
    if (tokens.scalar_type() != torch::kLong && tokens.scalar_type() != torch::kInt) {
      detail::throw_error<value_error>(
          {describe(), ": tokens are ", detail::kind_text(tokens), ", where Long or Int is wanted"});
    }
    if (tokens.device().is_cpu() && tokens.numel() > 0) {
      const std::int64_t least = tokens.min().item<std::int64_t>(), most = tokens.max().item<std::int64_t>();
      if (least < 0 || most >= options.num_embeddings()) {
        detail::throw_error<value_error>(
            {describe(), ": token ", least < 0 ? least : most, " is outside the vocabulary"});
      }
    }
    return torch::nn::functional::linear(torch::embedding(down, tokens, options.padding_idx().value_or(-1)),
                                         up);
  }

  /// Computes down up^T, the dense layer's table [num_embeddings][embedding_dim]. The result is
  /// differentiable.
  Tensor to_dense() const { return down.matmul(up.t()); }
};
TORCH_MODULE(LowRankEmbedding);

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
