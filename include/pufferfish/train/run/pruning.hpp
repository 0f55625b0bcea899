// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the mask of a training run that prunes its network (run_options::pruning).

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/prune/apply_mask.hpp>
#include <pufferfish/prune/compact_sum.hpp>
#include <pufferfish/prune/grasp.hpp>
#include <pufferfish/prune/magnitude.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/progress_record.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The pruning of a run: when the mask is made, the mask, and its form in checkpoints. Without
/// run_options::pruning all calls do nothing.
template <class T>
class run_pruning {
 public:
  static constexpr const char* fact =
      "training.mask";  ///< name of the number of remaining weights in a checkpoint
  static constexpr const char* state = "pruning.mask";  ///< name of the mask's array in a checkpoint

  /// Copies the options. There is no mask before prune() or restore().
  explicit run_pruning(const run_options& options) : options_(options.pruning) {}

  /// True if the caller must call prune() now. Once a mask exists, this is false. A mask given in the options
  /// is due at once; otherwise pruning is due at the start of the first epoch from pruning_options::epoch on.
  bool is_due(const training_record& at) const {
    return options_ && !mask_ && (options_->mask || (at.step == 0 && at.epoch >= options_->epoch));
  }
  /// Makes the mask, the same on all ranks, and sets the pruned weights and their optimizer states to 0.
  /// Collective: all ranks throw if one of them throws an error of prune_by_magnitude or prune_by_grasp.
  template <class Parts>
  void prune(const Parts& run) {
    auto mask = std::make_shared<weight_mask>(whole(run.net.store()));
    all_or_none(run.comm, "training_run", [&] { choose(run, *mask); });
    broadcast_mask(run.comm, *mask);
    mask_weights(run.ctx, *mask, run.net.store());
    mask_states(run.ctx, *mask, run.optimizer);
    mask_ = std::move(mask);
  }
  /// Drops the mask, which belongs to arenas that move at the switch.
  void forget() { mask_.reset(); }

  /// The mask, or nullptr before the pruning.
  const weight_mask* mask() const { return mask_.get(); }
  /// Options of the exchange of the remaining weights' gradients; nullopt without a mask.
  std::optional<compact_sum_options> exchange() const {
    if (!mask_) return std::nullopt;
    return compact_sum_options{mask_, options_->ternary};
  }

  // States for checkpoints, which store the mask as an array of numbers and, as a fact, the number of
  // remaining weights; the fact says that there is a mask.

  /// The mask as numbers of T, 16 bits of the mask in each (mask_numbers); empty without a mask.
  std::vector<T> numbers() const { return mask_ ? mask_numbers<T>(*mask_) : std::vector<T>(); }
  /// Allocates the numbers of a mask for these arenas.
  std::vector<T> room(const parameter_store<T>& store) const { return mask_numbers<T>(whole(store)); }
  /// Restores the mask from rank 0's numbers; no numbers: no mask. Collective.
  template <class Comm>
  void restore(Comm& comm, const parameter_store<T>& store, std::vector<T>& numbers) {
    mask_.reset();
    if (numbers.empty()) return;
    comm.broadcast(std::span<T>(numbers), 0);
    auto mask = std::make_shared<weight_mask>(whole(store));
    set_mask_numbers<T>(*mask, numbers);
    mask_ = std::move(mask);
  }

 private:
  // The mask before a weight is pruned, or the given mask.
  weight_mask whole(const parameter_store<T>& store) const {
    return options_ && options_->mask ? *options_->mask : weight_mask(store);
  }

  // Chooses the pruned weights by the method of the options, on every rank by itself.
  template <class Parts>
  void choose(const Parts& run, weight_mask& mask) const {
    parameter_store<T>& store = run.net.store();
    if (options_->mask) {
      mask.check_store(store);
    } else if (options_->method == pruning_method::magnitude) {
      run.net.read_on_host([&](const auto&) { prune_by_magnitude(mask, store, {.share = options_->ratio}); });
    } else if constexpr (requires { run.task.grasp_gradient(run.ctx, run.net, 0, index_t{}, double{}); }) {
      prune_by_grasp(run.ctx, store, mask,
                     [&](int which) {
                       run.task.grasp_gradient(run.ctx, run.net, which, options_->samples,
                                               options_->temperature);
                     },
                     {.share = options_->ratio});
    } else {
      PUFFERFISH_THROW(value_error("pruning by GraSP: the task has no grasp_gradient; use magnitude"));
    }
  }

  std::optional<pruning_options> options_;
  std::shared_ptr<const weight_mask> mask_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
