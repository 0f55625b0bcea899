// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::zero_tracker`: leaves the gradients of zero weights out of the exchange, for programs that
/// prune a libtorch module with masks of their own.

#include <memory>
#include <utility>

#include <pufferfish/adapters/torch/distributed.hpp>
#include <pufferfish/adapters/torch/prune.hpp>
#include <pufferfish/prune/mask_tracker.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// Watches the zeros of a module's weights. Once all ranks have had the same zeros for options.steps updates
/// (5 by default; 1 is enough if the program's mask never changes), `parallel` exchanges the gradients of the
/// other weights only (compact_sum). If the zeros of any rank change, all ranks return to the full exchange
/// in the next step. The program keeps its own mask:
///
///     host_torch::distributed parallel(*net, comm);
///     host_torch::zero_tracker zeros(parallel);
///     for (...) {
///       ...
///       parallel.finish();
///       optimizer.step();
///       apply_my_mask(*net);   // sets pruned weights to 0
///       zeros.update();        // all-reduces 16 bytes
///     }
///
/// In a compact step the gradient of a zero weight is 0. A weight that was 0 for options.steps updates by
/// chance thus stays 0 until something other than its gradient changes it. See mask_tracker. Do not call
/// parallel.set_exchange while such an object exists: the object's next change of the exchange would replace
/// yours.
template <class Comm, class T = float>
class zero_tracker {
 public:
  /// Watches prunable_weights. `parallel` must outlive the object; its present exchange, including a
  /// compressor, is the full one. Throws value_error for 0 steps.
  explicit zero_tracker(distributed<Comm, T>& parallel, const mask_tracker_options& options = {})
      : zero_tracker(parallel, prunable_weights(parallel.module()), options) {}
  /// Makes a tracker of the tensors that `choice` selects.
  zero_tracker(distributed<Comm, T>& parallel, const prunable_choice& choice,
               const mask_tracker_options& options = {})
      : parallel_(&parallel),
        full_(parallel.options()),
        full_compressor_(parallel.compressor()),
        tracker_(weight_mask(parallel.store(), choice), options) {}

  /// Decides about the next exchange. Call it on all ranks in each step, after the optimizer's step. Makes a
  /// new exchange only if the decision or the mask has changed (distributed::set_exchange). Collective.
  /// Throws the errors of distributed::store and distributed::set_exchange.
  void update() {
    tracker_.observe(detail::thread_context(), parallel_->store());
    tracker_.agree(parallel_->comm());
    std::shared_ptr<const weight_mask> next = tracker_.compact() ? tracker_.mask() : nullptr;
    if (next && next->survivors() == next->size()) next = nullptr;  // nothing to leave out
    if (next == mask_) return;
    if (next) {
      parallel_->set_exchange(compact_options(full_), compact_sum_options{next});
    } else {
      parallel_->set_exchange(full_, full_compressor_);
    }
    mask_ = std::move(next);
  }

  /// The mask of the next exchange; nullptr if it is a full one.
  const std::shared_ptr<const weight_mask>& mask() const { return mask_; }
  /// Counts of exchanges. A step in which no weight is 0 counts as compact, although all gradients are sent.
  const mask_tracker_counters& counters() const { return tracker_.counters(); }

 private:
  distributed<Comm, T>* parallel_;
  exchange_options full_;
  typename distributed<Comm, T>::make_compressor_function full_compressor_;
  mask_tracker tracker_;
  std::shared_ptr<const weight_mask> mask_;
};

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
