// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `pruning_options`: when and how a training run prunes its network.

#include <memory>
#include <optional>
#include <string>

#include <pufferfish/compress/quantize/tern_codec.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/prune/mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Throws value_error with the name of a run's option and its value unless the value is valid.
template <class V>
void check_range(bool valid, const char* name, const V& value) {
  if (!valid) throw_error<value_error>({"run_options: ", name, " ", value, " is out of its range"});
}

}  // namespace detail

/// Rule for the weights to prune: those of smallest magnitude (prune_by_magnitude), or those whose removal
/// keeps the flow of gradients best (prune_by_grasp; needs a task with grasp_gradient, such as image_task).
enum class pruning_method { magnitude, grasp };

/// Name of the method, for reports.
constexpr const char* to_string(pruning_method method) {
  return method == pruning_method::magnitude ? "magnitude" : "GraSP";
}

/// Options of a run that prunes convolution and linear weights once, then trains the remaining weights and
/// exchanges only their gradients (compact_sum). A run that switches to low rank afterwards prunes the
/// factors, right after the switch. PacTrain: Wang, Wu, Li and Kutscher, DAC 2025. All ranks have the same
/// options.
struct pruning_options {
  pruning_method method = pruning_method::grasp;
  double ratio = 0.5;  ///< floor(ratio x prunable) weights are removed; in [0, 1)
  index_t epoch = 0;   ///< the run prunes at the start of this epoch, counted from 0
  /// Set: the remaining weights' gradients are sent as TernGrad codes. Empty: they are summed as they are.
  std::optional<tern_grad_options> ternary = std::nullopt;
  index_t samples = 10;        ///< samples of each class, for GraSP
  double temperature = 200.0;  ///< divisor of the network's outputs in GraSP's loss
  /// The mask of the run, from its first step on, as a level of lottery tickets needs it; for the dense
  /// network. The members above other than `ternary` are then unused. nullptr: the run makes a mask.
  std::shared_ptr<const weight_mask> mask = nullptr;

  /// Throws value_error, naming the option and its value, for a ratio outside 0 .. 1 or of 1, a negative
  /// epoch, fewer than 2 samples or a temperature not above 0. The last two are checked for both methods.
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

/// Text for logs: "ratio 0.5 by GraSP, 10 samples a class, temperature 200, at epoch 0"; with a given mask "a
/// mask of 3349306 of 11164352 weights, 0x0123456789abcdef".
inline std::string describe(const pruning_options& options) {
  std::string text;
  if (options.mask) {
    text = detail::message({"a mask of ", options.mask->kept(), " of ", options.mask->prunable(),
                            " weights, ", detail::hexadecimal(options.mask->digest())});
  } else {
    text = "ratio " + detail::exact_number(options.ratio) + " by " + to_string(options.method);
    if (options.method == pruning_method::grasp) {
      text += detail::message({", ", options.samples, " samples a class, temperature "}) +
              detail::exact_number(options.temperature);
    }
    text += detail::message({", at epoch ", options.epoch});
  }
  return options.ternary ? text + ", " + describe(*options.ternary) : text;
}

PUFFERFISH_NAMESPACE_END
