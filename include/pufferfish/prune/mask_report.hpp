// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mask_report`: how many weights of each tensor remain.

#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Counts of a mask. Rows are the prunable tensors, in arena order.
///
/// \code
/// std::printf("%s", to_string(mask.report()).c_str());
/// \endcode
struct mask_report {
  struct row {
    std::string name;             ///< name of the parameter
    index_t kept = 0, total = 0;  ///< number of remaining weights, and of all weights
  };
  std::vector<row> rows;
  index_t kept = 0;        ///< number of remaining weights of all rows
  index_t total = 0;       ///< number of weights of all rows
  index_t unprunable = 0;  ///< number of parameters without a bit

  /// Number of parameters of the pruned network.
  index_t parameters() const { return kept + unprunable; }
};

/// Formats a report: a line "conv1.weight: 120 of 432 weights" for each row, then "all: 3349306 of 11164352
/// weights, 3358788 parameters".
inline std::string to_string(const mask_report& report) {
  std::string text;
  for (const mask_report::row& row : report.rows) {
    text += detail::message({row.name, ": ", row.kept, " of ", row.total, " weights\n"});
  }
  return text + detail::message({"all: ", report.kept, " of ", report.total, " weights, ",
                                 report.parameters(), " parameters\n"});
}

PUFFERFISH_NAMESPACE_END
