// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `sum_over_ranks`: adds the statistics of a network's layers over the ranks of a program with a training
/// loop of its own.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/lowrank/statistics/network_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

using named_sums = std::vector<std::pair<std::string, output_statistics*>>;

/// Returns, for each part of each sum, in order: 1 if memory is allocated for the part, else 0.
inline std::vector<std::int64_t> present_parts(const named_sums& sums) {
  std::vector<std::int64_t> present;
  for (const auto& [name, one] : sums) {
    for (const auto& part : one->parts()) present.push_back(part.values.empty() ? 0 : 1);
  }
  return present;
}
/// Allocates the parts of sums whose entry in `present` is not 0 and fills them with zeros. Returns false if
/// the number of entries of `present` is not the number of parts.
inline bool make_parts(const named_sums& sums, const std::vector<std::int64_t>& present) {
  std::size_t at = 0;
  for (const auto& [name, one] : sums) {
    for (const auto& part : one->parts()) {
      if (at == present.size()) return false;
      if (present[at++] != 0) one->make(part.name);
    }
  }
  return at == present.size();
}
/// Allocates on all ranks the parts that any rank has, since a rank without samples has none. Collective.
template <class Comm>
std::vector<std::int64_t> level_parts(Comm& comm, const named_sums& sums) {
  std::vector<std::int64_t> present = present_parts(sums);
  comm.all_reduce_max(std::span<std::int64_t>(present));
  make_parts(sums, present);
  return present;
}

/// Copies all sums to one array, in order.
inline std::vector<double> join(const named_sums& sums) {
  std::vector<double> all;
  for (const auto& [name, one] : sums) {
    for (const auto& part : one->parts()) all.insert(all.end(), part.values.begin(), part.values.end());
  }
  return all;
}
/// Copies the elements of an array to all sums: the inverse of join(), whose result has the length of `all`.
inline void split(const std::vector<double>& all, const named_sums& sums) {
  auto from = all.begin();
  for (const auto& [name, one] : sums) {
    for (const auto& part : one->parts()) {
      const auto end = from + static_cast<std::ptrdiff_t>(part.values.size());
      std::copy(from, end, part.values.begin());
      from = end;
    }
  }
}

/// Replaces the sums of every rank by their sum over all ranks, in one all-reduce. All ranks have the same
/// matrices in the same order. Collective.
template <class Comm>
void sum_parts(Comm& comm, const named_sums& sums) {
  if (comm.size() == 1) return;
  level_parts(comm, sums);
  std::vector<double> all = join(sums);
  comm.all_reduce_sum(std::span<double>(all));
  split(all, sums);
}

/// Returns a line for each matrix: the layer's name, the matrix's number in the layer, outputs and inputs.
inline std::string matrix_lines(const network_statistics& statistics) {
  std::string lines;
  for (const layer_statistics& layer : statistics.layers) {
    for (std::size_t i = 0; i < layer.matrices.size(); ++i) {
      lines += quote_word(layer.name) + message({" matrix ", i, ", ", layer.matrices[i].outputs(), " x ",
                                                 layer.matrices[i].inputs(), "\n"});
    }
  }
  return lines;
}

}  // namespace detail

/// Replaces all sums of `statistics` by the sums over all ranks. Truncations and budgets then weigh the rows
/// of all ranks, as if one rank had computed the global batches. training_run calls this itself.
///
/// \code
/// network_statistics seen = collector.statistics();  // of the samples of this rank
/// sum_over_ranks(comm, seen);                        // of all samples
/// if (comm.rank() == 0) made = factorize(net, policy, &seen);
/// \endcode
///
/// All ranks must have the same layers with matrices of the same sizes, in the same order. A rank without
/// samples may have empty sums. `normalized`, `output_scale` and `times` stay those of the rank.
///
/// Bits: all ranks end with the same sums, bit for bit. They are those of one rank with all samples up to
/// rounding in double, because the order of the additions depends on the number of ranks. With one rank
/// nothing changes.
///
/// Collective: an all-gather of 8 bytes a rank, an all-reduce of 9 integers for each matrix, and one
/// all-reduce of all sums, outputs^2 + outputs doubles for each moment. Throws state_error on all ranks,
/// naming the first difference, if layers or sizes differ; `statistics` is unchanged then. Also throws the
/// errors of the communicator.
template <class Comm>
void sum_over_ranks(Comm& comm, network_statistics& statistics) {
  agree_on_lines(comm, "list of statistics", detail::matrix_lines(statistics));
  detail::named_sums sums;
  for (layer_statistics& layer : statistics.layers) {
    for (output_statistics& one : layer.matrices) sums.emplace_back(layer.name, &one);
  }
  detail::sum_parts(comm, sums);
}

PUFFERFISH_NAMESPACE_END
