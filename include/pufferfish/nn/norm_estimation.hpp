// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `norm_estimation`: new running statistics for all batch norms of a network, as means over forward passes.
/// After a layer has been replaced by low-rank factors, the statistics of the batch norms that follow it are
/// those of the old outputs.

#include <optional>
#include <string_view>
#include <type_traits>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/nn/model.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// While the object exists, forward passes given to pass() set the running statistics of each batch norm that
/// they run through. After pass k = 0, 1, .. they are, channel by channel,
///
///     running_mean = (mean_0 + .. + mean_k) / (k + 1)
///     running_var = (variance_0 + .. + variance_k) / (k + 1)
///
/// with mean and unbiased variance of the batch that the batch norm saw in each pass. Earlier
/// statistics have no influence. Pass k runs with context::norm_momentum 1 / (k + 1), which makes
/// the exponential average of BatchNorm this mean.
///
///     {
///       norm_estimation estimation(ctx);
///       for (const auto& batch : batches) estimation.pass([&] { net.forward(ctx, batch, y); });
///     }
///
/// The passes run in training mode: batch norms normalise by the batch, dropout drops. num_batches_tracked
/// rises by one per pass, as in training. Parameters and gradients do not change. The destructor restores
/// the context's mode, momentum and place among the random streams, and leaves the tape empty. Passes may
/// call context::begin_step; without it they draw further streams of the current step.
///
/// Statistics are those of the batches of this process. A distributed run averages the buffers over its ranks
/// afterwards. A batch norm that runs several times in one pass gives its last batch more weight.
template <class Device>
class norm_estimation {
 public:
  /// Throws state_error if the context's tape is not empty: a backward pass that still has to run would find
  /// no tape.
  explicit norm_estimation(context<Device>& ctx)
      : ctx_(checked(ctx)),
        mode_(ctx, run_mode::training),
        momentum_(ctx.norm_momentum()),
        place_(ctx.random_place()) {}
  norm_estimation(const norm_estimation&) = delete;
  norm_estimation& operator=(const norm_estimation&) = delete;
  ~norm_estimation() {
    ctx_.tape().clear();
    ctx_.set_norm_momentum(momentum_);
    ctx_.return_to(place_);
  }

  /// Runs one forward pass: forward(), which returns nothing, or false if there were no samples (a rank with
  /// an empty share of a batch). Such a pass does not count. If forward() throws, batch norms before the
  /// failure have counted the pass and the others have not.
  template <class Forward>
  void pass(Forward&& forward) {
    ctx_.set_norm_momentum(1.0 / static_cast<double>(passes_ + 1));
    bool has_samples = true;
    if constexpr (std::is_void_v<decltype(forward())>) {
      forward();
    } else {
      has_samples = forward();
    }
    ctx_.tape().clear();
    if (has_samples) ++passes_;
  }

  /// Number of passes that count.
  index_t passes() const { return passes_; }

 private:
  // Returns the context. Throws state_error if its tape is not empty: passes of the estimation clear it.
  static context<Device>& checked(context<Device>& ctx) {
    if (!ctx.tape().empty()) {
      detail::throw_error<state_error>({"norm_estimation: the context's tape has ", ctx.tape().entries(),
                                        " entries of a forward pass: run its backward pass first, or clear "
                                        "the tape"});
    }
    return ctx;
  }

  context<Device>& ctx_;
  mode_scope<Device> mode_;
  std::optional<double> momentum_;
  random_place place_;
  index_t passes_ = 0;
};

/// Whether the model has running statistics: a buffer called running_mean.
template <class Root, class Device>
bool has_batch_norm(const model<Root, Device>& net) {
  constexpr std::string_view name = "running_mean", below = ".running_mean";
  for (const auto& entry : net.store().buffer_entries()) {
    if (entry.name == name || std::string_view(entry.name).ends_with(below)) return true;
  }
  return false;
}

/// Calls forward(k) for k = 0 .. passes - 1 in a norm_estimation and returns the number of passes that count.
/// forward() runs one forward pass of `net` and returns nothing, or false for a pass without samples. Does
/// nothing and returns 0 for a model without batch norms. Throws value_error unless passes > 0, else as
/// norm_estimation and forward().
template <class Root, class Device, class Forward>
index_t estimate_norms(context<Device>& ctx, const model<Root, Device>& net, index_t passes,
                       Forward&& forward) {
  if (passes < 1) {
    detail::throw_error<value_error>({"estimate_norms: ", passes, " passes; at least one is needed"});
  }
  if (!has_batch_norm(net)) return 0;
  norm_estimation<Device> estimation(ctx);
  for (index_t k = 0; k < passes; ++k) {
    estimation.pass([&] { return forward(k); });
  }
  return estimation.passes();
}

PUFFERFISH_NAMESPACE_END
