// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::local_training`: each rank trains alone with libtorch's optimizers; now and then the ranks
/// exchange the changes of the module's parameters.

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/parameters.hpp>
#include <pufferfish/compress/compression.hpp>
#include <pufferfish/distributed/rare_exchange.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// A rare_exchange of a module's parameters: each rank takes H = options.local_steps steps of any optimizer
/// alone, then an outer step uses the mean change of the ranks' parameters (DiLoCo; with fragments and a
/// delay, Streaming DiLoCo).
///
///     host_torch::local_training local(*net, comm, {.local_steps = 50});  // all have rank 0's parameters
///     torch::optim::AdamW optimizer(net->parameters());
///     for (...) {
///       optimizer.zero_grad();
///       loss(net->forward(part of this rank)).backward();
///       optimizer.step();
///       local.step_done();
///     }
///     local.synchronize();  // before an evaluation, a checkpoint or the end
///
/// The values of the trained parameters are moved into one arena, and the module's tensors become views of it
/// (Tensor::set_data). Optimizers hold these tensors, so they may have been made before. The arena lives as
/// long as a tensor uses it. Optimizer states and frozen parameters are not exchanged.
///
/// Trained parameters must be dense, on the CPU and of scalar T (float, or double as the second template
/// argument). One object per module, made anew after factorize(). Memory: theta, the outer momentum, the
/// changes and an unused arena of gradients, each of the parameters' size.
template <class Comm, class T = float>
class local_training {
 public:
  /// Module and communicator must outlive the object. Collective: sends rank 0's parameters and buffers
  /// to all ranks. Throws value_error, naming it, for a trained parameter that is not dense, not on the
  /// CPU or not of scalar T; state_error, on all ranks, if the ranks' modules, options or compressors
  /// differ; and the errors of rare_exchange's constructor.
  local_training(torch::nn::Module& module, Comm& comm, const rare_exchange_options& options = {},
                 const compression_options& compression = no_compression{})
      : module_(&module),
        comm_(&comm),
        ctx_(context_options{.threads = std::max(1, torch::get_num_threads())}) {
    agree_on_lines(comm, "local training", detail::describe_module(module));
    parameters_ = detail::trained_parameters<T>(module, user);
    detail::broadcast_module(comm, module);
    store_ = std::make_shared<parameter_store<T>>();
    // Copies the values: until now, `shown` referred to the tensors' memory.
    store_->pack([this](state_visitor<T>& visitor) {
      for (const auto& p : parameters_) visitor.on_parameter(p.name, *p.shown);
    });
    for (const auto& p : parameters_) move_into_arena(p);
    exchange_.emplace(*store_, comm, options, pufferfish::detail::all_or_none(comm, user, [&] {
      return new_compressor<T>(*store_, compression);
    }));
  }
  local_training(const local_training&) = delete;
  local_training& operator=(const local_training&) = delete;

  /// Performs the exchanges that are due; call it after each optimizer step of this rank. Collective. Throws
  /// the errors of rare_exchange::step_done, and state_error if a parameter's values are no longer in the
  /// arena: call restart() after torch::load or `to`.
  void step_done() {
    check_arena();
    exchange_->step_done(ctx_);
    mark_changed();
  }

  /// Exchanges all changes since the last exchange; afterwards parameters and buffers are equal on all ranks.
  /// Contiguous float and double buffers, such as batch-norm statistics, become their means over the ranks,
  /// others rank 0's. (Running averages are linear in the averaged values, so their mean here is the same as
  /// if they had been averaged at each exchange.) Collective. Throws the errors of step_done.
  void synchronize() {
    check_arena();
    exchange_->synchronize(ctx_);
    mark_changed();
    detail::average_buffers(*comm_, *module_);
  }

  /// Starts anew from rank 0's parameters and buffers, after a program has loaded or changed them; the outer
  /// momentum becomes 0. Collective. Throws state_error, on all ranks, if an exchange of any rank is under
  /// way (synchronize first), or a parameter has another scalar, shape or strides than before.
  void restart() {
    pufferfish::detail::all_or_none(*comm_, user, [this] {
      exchange_->restart();  // throws before anything has changed
      for (const auto& p : parameters_) p.check_layout(user);
    });
    for (const auto& p : parameters_) {
      if (is_in_arena(p)) continue;
      std::ranges::copy(detail::elements_of<T>(p.tensor), p.shown->values().begin());
      move_into_arena(p);
    }
    detail::broadcast_module(*comm_, *module_);
    exchange_->restart();
    mark_changed();
  }

  /// The exchange, for set_local_steps, set_epoch, spread, states, report and others. Valid for the life of
  /// this object.
  rare_exchange<T, Comm>& exchange() { return *exchange_; }
  const rare_exchange_report& report() const { return exchange_->report(); }

 private:
  static constexpr const char* user = "host_torch::local_training";

  // Whether the tensor still has its memory in the arena; set_data and load replace it.
  static bool is_in_arena(const detail::trained_parameter<T>& p) {
    return p.tensor.numel() == 0 || p.tensor.data_ptr() == p.shown->data();
  }
  // Throws state_error for a parameter whose memory is no longer that of the arena.
  void check_arena() const {
    for (const auto& p : parameters_) {
      if (is_in_arena(p)) continue;
      PUFFERFISH_THROW(state_error("host_torch::local_training: the values of " + p.name +
                                   " are in other memory than before; call restart() on all ranks"));
    }
  }
  // Lets the tensor use the parameter's memory in the arena, which the tensor keeps alive.
  void move_into_arena(const detail::trained_parameter<T>& p) {
    if (p.tensor.numel() > 0) Tensor(p.tensor).set_data(p.view_at(p.shown->data(), store_));
  }
  // Marks the parameters as changed: autograd then refuses backward passes of graphs that were made before
  // the exchange.
  void mark_changed() const {
    for (const auto& p : parameters_) p.changed();
  }

  torch::nn::Module* module_;
  Comm* comm_;
  cpu_context ctx_;  // not thread_context(), which the module's layers may use
  std::vector<detail::trained_parameter<T>> parameters_;
  std::shared_ptr<parameter_store<T>> store_;
  std::optional<rare_exchange<T, Comm>> exchange_;
};

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
