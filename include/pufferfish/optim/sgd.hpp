// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `SGD`: stochastic gradient descent with momentum, over whole arenas.

#include <algorithm>
#include <cmath>
#include <utility>

#include <pufferfish/ops/passes.hpp>
#include <pufferfish/optim/optimizer_target.hpp>

PUFFERFISH_NAMESPACE_BEGIN

struct sgd_options {
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;
  double weight_decay = 0.0;
  bool decay_all = false;  ///< also biases and normalisation parameters, as PyTorch does by default
};

namespace ops::reference {

/// One element of an SGD step, as PyTorch defines it; see SGD. `decay` is 0 where weight decay is off.
template <class T>
void sgd_element(T& value, T gradient, T& velocity, double lr, const sgd_options& options, double decay,
                 bool first_step) {
  const T g = gradient + static_cast<T>(decay) * value;
  T direction = g;
  if (options.momentum != 0.0) {
    const T momentum = static_cast<T>(options.momentum);
    velocity = first_step ? g : momentum * velocity + static_cast<T>(1.0 - options.dampening) * g;
    direction = options.nesterov ? g + momentum * velocity : velocity;
  }
  value -= static_cast<T>(lr) * direction;
}

}  // namespace ops::reference

/// With g = gradient + weight_decay value:
///     velocity = g at the first step, else momentum velocity + (1 - dampening) g
///     value -= lr velocity               (Nesterov: value -= lr (g + momentum velocity))
/// which is PyTorch's form (lr outside the velocity). Without momentum: value -= lr g.
template <class T>
class SGD {
 public:
  using value_type = T;

  /// Starts with a velocity of nothing. Throws shape_error if the target's parts do not fit each other,
  /// value_error for options out of range.
  SGD(optimizer_target<T> target, const sgd_options& options)
      : target_(std::move(target)), options_(options) {
    check(options_);
    target_.require_covered("SGD");
    cut_tasks();
    if (options_.momentum != 0.0) velocity_ = aligned_buffer<T>(static_cast<index_t>(target_.values.size()));
  }

  const sgd_options& options() const { return options_; }
  const optimizer_target<T>& target() const { return target_; }

  /// One step with the given learning rate over all parameters. Throws state_error if the network has changed
  /// its arenas, value_error for a learning rate that is not finite.
  void step(context<device::cpu>& ctx, double lr) {
    target_.require_current("SGD");
    if (!std::isfinite(lr)) {
      PUFFERFISH_THROW(value_error("SGD: learning rate " + std::to_string(lr) + " is not finite"));
    }
    const ops::detail::sgd_numbers<T> numbers = numbers_for(lr);
    T* velocity = options_.momentum != 0.0 ? velocity_.data() : nullptr;
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, sgd<T>);
    ctx.parallel_for(static_cast<index_t>(tasks_.size()), [&](index_t task, int) {
      const arena_segment& range = tasks_[static_cast<std::size_t>(task)];
      ops::detail::sgd_numbers<T> own = numbers;
      if (!range.decay) own.decay = T{};
      kernel(own, target_.gradients.data() + range.offset,
             velocity == nullptr ? nullptr : velocity + range.offset, target_.values.data() + range.offset,
             range.size);
    });
    ++steps_;
  }

  /// The state, for checkpoints: the velocity arena (empty without momentum; arranged as the values) and the
  /// number of steps taken.
  std::span<T> velocity() { return velocity_.span(); }
  std::span<const T> velocity() const { return velocity_.span(); }
  std::uint64_t steps() const { return steps_; }
  void set_steps(std::uint64_t steps) { steps_ = steps; }

 private:
  static void check(const sgd_options& o) {
    const bool valid = o.momentum >= 0.0 && std::isfinite(o.momentum) && std::isfinite(o.dampening) &&
                       o.weight_decay >= 0.0 && std::isfinite(o.weight_decay);
    if (!valid) {
      PUFFERFISH_THROW(value_error("SGD: momentum " + std::to_string(o.momentum) + ", dampening " +
                                   std::to_string(o.dampening) + ", weight decay " +
                                   std::to_string(o.weight_decay) + ": finite, none negative"));
    }
    if (o.nesterov && (o.momentum == 0.0 || o.dampening != 0.0)) {
      PUFFERFISH_THROW(value_error("SGD: Nesterov needs momentum (got " + std::to_string(o.momentum) +
                                   ") and no dampening (got " + std::to_string(o.dampening) + ")"));
    }
  }

  // Neighbours that decay alike are one range; ranges are cut into pieces of a size for one task.
  void cut_tasks() {
    constexpr index_t piece = 32768;
    std::vector<arena_segment> ranges;
    for (const arena_segment& segment : target_.segments) {
      const bool decay = segment.decay || options_.decay_all;
      if (ranges.empty() || ranges.back().decay != decay) ranges.push_back({segment.offset, 0, decay});
      ranges.back().size += segment.size;
    }
    for (const arena_segment& range : ranges) {
      for (index_t begin = 0; begin < range.size; begin += piece) {
        tasks_.push_back({range.offset + begin, std::min(piece, range.size - begin), range.decay});
      }
    }
  }

  ops::detail::sgd_numbers<T> numbers_for(double lr) const {
    const T momentum = static_cast<T>(options_.momentum);
    const bool first = steps_ == 0;  // the velocity is zero: weights of 0 and 1 make it g
    return {static_cast<T>(lr),
            static_cast<T>(options_.weight_decay),
            first ? T{} : momentum,
            first ? T{1} : static_cast<T>(1.0 - options_.dampening),
            options_.nesterov ? T{1} : T{},
            options_.nesterov ? momentum : T{1}};
  }

  optimizer_target<T> target_;
  sgd_options options_;
  std::vector<arena_segment> tasks_;
  aligned_buffer<T> velocity_;
  std::uint64_t steps_ = 0;
};

PUFFERFISH_NAMESPACE_END
