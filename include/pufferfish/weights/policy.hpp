// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `weight_policy`: the rules that choose which tensors of a weight file are factorized; and the decisions of
/// a plan.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/io/tensor_dtype.hpp>
#include <pufferfish/linalg/svd/svd.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/rank.hpp>
#include <pufferfish/lowrank/statistics/network_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Rules for the tensors of a file to factorize, and for their ranks. The default is the paper's: rank ratio
/// 1/4, the first and the last layer dense, embeddings dense.
///
/// \code
/// weight_policy policy;
/// policy.rank = energy_kept{0.9};
/// policy.exclude = [](const std::string& name) { return name.starts_with("decoder."); };
/// policy.threads = 4;
/// \endcode
struct weight_policy {
  rank_policy rank = rank_ratio{0.25};
  /// If not 0: upper bound of the number of floating-point elements in the new file. `allocate` then
  /// chooses the ranks and the weights that stay dense, and `rank` is unused. It compares components by
  /// predicted loss if there are `statistics`, otherwise by their share of the energy of their weight.
  index_t budget = 0;
  /// Number of floating-point elements outside of the file that count toward the budget, too.
  index_t parameters_elsewhere = 0;
  /// Number of layers at the start that stay dense. weight_plan defines the order of layers.
  index_t keep_first = 1;
  /// Whether the last layer stays dense.
  bool keep_last = true;
  /// If `include` is set, only weights for which it returns true are factorized. A weight for which `exclude`
  /// returns true stays dense.
  std::function<bool(const std::string&name)> include, exclude;
  /// Whether embeddings stay dense. An embedding for which `include` returns true is factorized either way.
  bool embeddings_dense = true;
  /// Ranks of embeddings; if not set, `rank` is used. Not allowed together with a budget.
  std::optional<rank_policy> embedding_rank;
  /// Marks further embeddings: a weight of two dimensions for which the function returns true is an
  /// embedding even if its name does not look like one (the table encoder.weight of a language model).
  std::function<bool(const std::string& name)> embedding;
  /// Whether the packed projections of query, key and value in attention, NAME.in_proj_weight, stay
  /// dense. PyTorch's MultiheadAttention cannot load factors of them.
  bool projections_dense = true;
  /// Returns the number of groups of the convolution with this weight, which a file does not
  /// record. Called for weights of four dimensions; not set: 1 group.
  std::function<index_t(const std::string& name)> groups;
  /// Statistics by weight name (see read_statistics), for truncations other than plain and for predicted
  /// losses. They must stay valid until the call that uses the policy returns, and must cover every weight
  /// that is factorized. A budget then compares predicted losses. nullptr: no statistics.
  const network_statistics* statistics = nullptr;
  /// Truncation of all weights. If not set: the most accurate one that the statistics of all weights allow.
  std::optional<truncation> truncate;
  svd_method method = svd_method::automatic;  ///< method of the decompositions of factorize_weights
  std::uint64_t seed = 0;                     ///< seed of randomized decompositions
  /// Number of tensors processed at once, each on its own thread, at least 1; the result does not depend on
  /// it.
  int threads = 1;
};

/// Name, dtype and shape of a tensor: all that a plan depends on besides the policy.
struct weight_tensor {
  std::string name;
  tensor_dtype dtype{};
  std::vector<index_t> shape;
};

/// Decision about one tensor. A factorized tensor consists of `parts` matrices of rows x cols, stacked by
/// rows, which all get the same rank. rows, cols and parts are set for all weight matrices, also for those
/// that stay dense because of their layer; the matrix of a convolution has in / g x height x width columns.
struct weight_decision {
  bool factorize = false;
  std::string reason;  ///< why the tensor stays dense; empty if it is factorized
  index_t layer = 0;   ///< number of the layer in the guessed order, from 1; 0: embedding, or no weight
  index_t parts = 1;   ///< gates of a recurrent layer, groups of a convolution, 3 packed projections; else 1
  index_t rows = 0;
  index_t cols = 0;
  bool embedding = false;      ///< an embedding table; detail::factor_shapes defines its factors' shapes
  std::size_t bias_of = npos;  ///< index of the weight whose bias this tensor is; npos: none
  static constexpr std::size_t npos = static_cast<std::size_t>(-1);
};

namespace detail {

/// Shapes of the factors NAME.down and NAME.up of a weight W.
///   parts matrices of rows x cols, stacked by rows: [parts rank][...] and [parts rows][rank][1]...,
///   where
///     `...` are the extents of W after the first; part p is the product of rows p rows .. of `up` and rows
///     p rank .. of `down`
///   embedding [vocabulary][width]: [vocabulary][rank] and [width][rank]; W = down up^T
/// Two consecutive layers have weights of these shapes: two linear layers; a convolution and a 1x1
/// convolution with the same number of groups; an embedding and a linear layer.
inline std::pair<std::vector<index_t>, std::vector<index_t>> factor_shapes(const std::vector<index_t>& shape,
                                                                           const weight_decision& decision,
                                                                           index_t rank) {
  if (decision.embedding) return {{shape[0], rank}, {shape[1], rank}};
  std::vector<index_t> down = shape, up{shape[0], rank};
  down[0] = decision.parts * rank;
  for (std::size_t d = 2; d < shape.size(); ++d) up.push_back(1);
  return {down, up};
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
