// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `power_sgd_options`: the options of PowerSGD.

#include <cstdint>
#include <string>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The part of a step that a rank subtracts from its error memory.
enum class error_feedback {
  /// Subtracts the rank's own contribution, Q_own P^T. The memory stays bounded, and is zero if P represents
  /// a rank's gradient exactly.
  local,
  /// Subtracts the mean of all ranks' contributions, as the paper's program and PyTorch do. The results and
  /// the mean of all memories equal those of `local`, because all steps are linear, but the memory of a
  /// single rank grows like the square root of the number of steps.
  aggregated,
};

/// Options of power_sgd. For a matrix of rows x columns, rank (rows + columns) values are sent in place of
/// rows x columns values.
struct power_sgd_options {
  index_t rank = 2;  ///< at least 1; matrices with a smaller extent use that extent
  error_feedback feedback = error_feedback::local;
  /// Condition for compressing a matrix: rank (rows + columns) least_saving < rows columns; other matrices
  /// are sent whole. With 1, a matrix is compressed if this sends fewer values. 2 is PyTorch's default. With
  /// 0, all matrices are compressed.
  double least_saving = 1.0;
  std::uint64_t seed = 1;  ///< seed of the first Q, the same on all ranks
  /// Number of first steps, 0 .. start_step - 1, that send all gradients whole.
  std::uint64_t start_step = 0;
  /// Whether e is multiplied by a / b when the learning rate (exchange_place::learning_rate) changes from a
  /// to b. The parameters are then those of a memory in units of steps.
  bool rescale_memory = false;
};

/// The options as text: "PowerSGD, rank 2, local error feedback, least saving 1, seed 1", then the options
/// that are not at their defaults: ", from step 100, memory rescaled".
inline std::string describe(const power_sgd_options& options) {
  std::string text = detail::message({"PowerSGD, rank ", options.rank, ", ",
                                      options.feedback == error_feedback::local ? "local" : "aggregated",
                                      " error feedback, least saving ",
                                      detail::exact_number(options.least_saving), ", seed ", options.seed});
  if (options.start_step > 0) text += detail::message({", from step ", options.start_step});
  if (options.rescale_memory) text += ", memory rescaled";
  return text;
}

PUFFERFISH_NAMESPACE_END
