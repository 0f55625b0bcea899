// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: work of rank 0 for all ranks; and states that differ between ranks (a task's carried state, a
/// compressor's memory), gathered for the one checkpoint that rank 0 writes and scattered on resume.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/progress_record.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Replaces `mine` by its mean over all ranks, summed in double in the order of the ranks, so that the result
/// does not depend on the communicator's algorithm. Nothing has changed if it throws. Collective.
template <class T, class Comm>
void average_over_ranks(Comm& comm, std::span<T> mine) {
  if (comm.size() == 1 || mine.empty()) return;
  std::vector<T> one(mine.size());
  std::vector<double> sum(mine.size(), 0.0);
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (rank == comm.rank()) std::copy(mine.begin(), mine.end(), one.begin());
    comm.broadcast(std::span<T>(one), rank);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<double>(one[i]);
  }
  for (std::size_t i = 0; i < sum.size(); ++i) mine[i] = static_cast<T>(sum[i] / comm.size());
}

/// Runs `work` on rank 0 and returns its text on all ranks. If `work` throws anything, all ranks throw: rank
/// 0 the same exception, the others state_error with its text. So no rank waits for a broadcast that never
/// comes. Collective.
///
///     on_root(comm, [&] {
///       save_checkpoint(path, net);
///       return std::string();
///     });
template <class Comm, class Work>
std::string on_root(Comm& comm, Work&& work) {
  std::string text;
  local_failure mine;
  if (comm.rank() == 0) mine = failure_of([&] { text = work(); });
  std::uint64_t failed[1] = {mine.failure ? std::uint64_t{1} : std::uint64_t{0}};
  comm.broadcast(std::span<std::uint64_t>(failed), 0);
  text = broadcast_text(comm, mine.failure ? mine.text : text, 0);
  if (mine.failure) std::rethrow_exception(mine.failure);
  if (failed[0] != 0) throw_error<state_error>({"rank 0 failed: ", text});
  return text;
}

/// Returns, on all ranks, a fact of the checkpoint that rank 0 has open; empty if the file has none.
/// Collective.
template <class Comm>
std::string shared_fact(Comm& comm, const std::optional<checkpoint_file>& file, const char* name) {
  const bool there = file && file->facts().count(name) > 0;
  return broadcast_text(comm, there ? file->fact(name) : std::string(), 0);
}

/// Changes the network of every rank to the structure of rank 0's: which layers are low-rank, with which
/// ranks, and which have a batch norm between their factors or a residual. All networks had the same
/// structure before rank 0 changed its own. Collective.
template <class Comm, class Net>
void share_structure(Comm& comm, Net& net) {
  const bool root = comm.rank() == 0;
  const std::string layers = broadcast_text(comm, root ? ranks_to_text(low_rank_layers(net)) : "", 0);
  const std::string norms = broadcast_text(comm, root ? ranks_to_text(factor_norm_layers(net)) : "", 0);
  const std::string annealed = broadcast_text(comm, root ? ranks_to_text(annealed_layers(net)) : "", 0);
  if (root) return;
  const bool same_residuals = ranks_to_text(annealed_layers(net)) == annealed;
  if (!same_residuals) detach_residuals(net);
  if (ranks_to_text(factor_norm_layers(net)) != norms) apply_factor_norms(net, ranks_from_text(norms));
  if (ranks_to_text(low_rank_layers(net)) != layers) {
    if (!low_rank_layers(net).empty()) merge(net);  // ranks that have shrunk since
    apply_ranks(net, ranks_from_text(layers));
  }
  if (!same_residuals) apply_residuals(net, ranks_from_text(annealed));
}

/// Arrays that differ between ranks, for a checkpoint that calls them "name.0", "name.1", ... Only rank 0 has
/// memory for the arrays of all ranks. To save: gather(), then rank 0 writes list(). To resume: rank 0 reads
/// into list(), then scatter().
template <class T, class Comm>
class rank_states {
 public:
  /// `mine`: this rank's arrays, which must outlive the object. All ranks have the same number of arrays with
  /// the same names; lengths may differ. Collective.
  rank_states(Comm& comm, std::vector<named_state<T>> mine) : comm_(&comm), mine_(std::move(mine)) {
    const auto ranks = static_cast<std::size_t>(comm.size());
    sizes_.assign(mine_.size() * ranks, 0);
    for (std::size_t s = 0; s < mine_.size(); ++s) {
      sizes_[s * ranks + static_cast<std::size_t>(comm.rank())] =
          static_cast<std::int64_t>(mine_[s].values.size());
    }
    comm.all_reduce_sum(std::span<std::int64_t>(sizes_));
    all_.resize(sizes_.size());
    for (std::size_t i = 0; i < all_.size() && comm.rank() == 0; ++i) {
      all_[i].resize(static_cast<std::size_t>(sizes_[i]));
    }
  }

  /// Copies the arrays of all ranks to rank 0. Collective.
  void gather() {
    for_each([this](std::span<T> own, std::span<T> room, int rank) {
      if (rank == comm_->rank()) std::copy(own.begin(), own.end(), room.begin());
      comm_->broadcast(room, rank);
    });
  }
  /// Copies the arrays from rank 0 back to their ranks. Collective.
  void scatter() {
    for_each([this](std::span<T> own, std::span<T> room, int rank) {
      comm_->broadcast(room, 0);
      if (rank == comm_->rank()) std::copy(room.begin(), room.end(), own.begin());
    });
  }

  /// Appends the arrays that rank 0 writes or reads, except empty ones.
  void list(std::vector<named_state<T>>& to) {
    const auto ranks = static_cast<std::size_t>(comm_->size());
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (!all_[i].empty()) to.push_back({name_of(mine_[i / ranks].name, i % ranks), std::span<T>(all_[i])});
    }
  }

  /// Throws state_error if the file has such arrays of more ranks than this run has.
  void check_ranks(const checkpoint_file& file) const {
    for (const named_state<T>& state : mine_) {
      const std::string next = name_of(state.name, static_cast<std::size_t>(comm_->size()));
      for (const auto& [stored, size] : file.states()) {
        if (stored != next) continue;
        throw_error<state_error>({file.name(), ": has ", quote_name(next),
                                  ", of a rank that this run has not; ",
                                  "resume it with as many ranks as it had"});
      }
    }
  }

 private:
  // Name of a rank's array in the checkpoint: "name.rank".
  static std::string name_of(const std::string& name, std::size_t rank) {
    return name + "." + std::to_string(rank);
  }

  // Calls f(own, room, rank) for each array of each rank; `room` is rank 0's memory for the array, on other
  // ranks a buffer of the array's size.
  template <class F>
  void for_each(F&& f) {
    std::vector<T> passing;
    const auto ranks = static_cast<std::size_t>(comm_->size());
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (comm_->rank() != 0) passing.resize(static_cast<std::size_t>(sizes_[i]));
      f(mine_[i / ranks].values, comm_->rank() == 0 ? std::span<T>(all_[i]) : std::span<T>(passing),
        static_cast<int>(i % ranks));
    }
  }

  Comm* comm_;
  std::vector<named_state<T>> mine_;
  std::vector<std::int64_t> sizes_;  // number of elements of each array, rank by rank
  std::vector<std::vector<T>> all_;  // the arrays in the order of sizes_; empty except on rank 0
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
