// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `pruning_options`: when and how a training run prunes its network.

#include <optional>
#include <string>

#include <pufferfish/compress/tern_codec.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Which weights go: those of smallest magnitude (prune_by_magnitude), or those without which gradients flow
/// best (prune_by_grasp; of tasks that have grasp_gradient, such as images).
enum class pruning_method { magnitude, grasp };

constexpr const char* to_string(pruning_method method) {
  return method == pruning_method::magnitude ? "magnitude" : "GraSP";
}

/// A run prunes convolution and linear weights once, trains the others on, and exchanges their gradients
/// alone (compact_sum). A run that switches to low rank afterwards prunes the factors once more, right after
/// the switch. PacTrain: Wang, Wu, Li and Kutscher, DAC 2025.
struct pruning_options {
  pruning_method method = pruning_method::grasp;
  double ratio = 0.5;  ///< floor(ratio x prunable) weights are removed; 0 to below 1
  index_t epoch = 0;   ///< at the start of this epoch, counted from 0
  /// TernGrad of the survivors' gradients in place of their sum.
  std::optional<tern_grad_options> ternary = std::nullopt;
  index_t samples = 10;        ///< of each class, for GraSP
  double temperature = 200.0;  ///< by which GraSP's loss divides the network's outputs

  /// Throws value_error, naming the option and its value.
  void validate() const {
    if (!(ratio >= 0.0 && ratio < 1.0)) {
      detail::throw_error<value_error>({"pruning: ratio ", ratio, " is not in 0 .. 1, below 1"});
    }
    if (epoch < 0) detail::throw_error<value_error>({"pruning: epoch ", epoch, " is negative"});
    if (samples < 2) detail::throw_error<value_error>({"pruning: ", samples, " samples of a class, not 2"});
    if (!(temperature > 0.0)) {
      detail::throw_error<value_error>({"pruning: temperature ", temperature, " is not above 0"});
    }
  }
};

/// "ratio 0.5 by GraSP, 10 samples a class, temperature 200, at epoch 0".
inline std::string describe(const pruning_options& options) {
  std::string text = "ratio " + detail::exact_number(options.ratio) + " by " + to_string(options.method);
  if (options.method == pruning_method::grasp) {
    text += detail::message({", ", options.samples, " samples a class, temperature "}) +
            detail::exact_number(options.temperature);
  }
  text += detail::message({", at epoch ", options.epoch});
  return options.ternary ? text + ", " + describe(*options.ternary) : text;
}

PUFFERFISH_NAMESPACE_END
