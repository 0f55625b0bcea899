// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::distributed`: averages the gradients of any torch::nn::Module over all ranks
/// during the backward pass.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/parameters.hpp>
#include <pufferfish/compress/compression.hpp>
#include <pufferfish/distributed/exchange.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// Calls a function after autograd has added a gradient to a parameter.
class gradient_hook final : public torch::autograd::FunctionPostHook {
 public:
  explicit gradient_hook(std::function<void()> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    call_();
    return outputs;
  }

 private:
  std::function<void()> call_;
};

}  // namespace detail

/// Averages the gradients of a module over all ranks of a communicator, bucket by bucket during the backward
/// pass (gradient_exchange), as DistributedDataParallel does in Python.
///
///     mpi::communicator comm(MPI_COMM_WORLD);
///     host_torch::distributed parallel(*net, comm);    // all ranks now have rank 0's parameters
///     torch::optim::SGD optimizer(net->parameters(), 0.1);
///     for (...) {
///       optimizer.zero_grad();
///       loss(net->forward(part of this rank)).backward();
///       parallel.finish();                             // every .grad is the mean over the ranks
///       optimizer.step();
///     }
///
/// Every .grad is a view of one arena, laid out in reverse order of registration, so that autograd adds to
/// the memory that is sent. If .grad is replaced (zero_grad(true), the default since libtorch 2, makes it
/// undefined), the new gradient is copied into the arena and the view restored; copied_gradients() counts
/// these copies. Frozen parameters are not exchanged.
///
/// Trained parameters must be dense, on the CPU and of scalar T (float, or double as the second template
/// argument). Between the first gradient of a step and finish() no other code may use the communicator. Make
/// the object before or after the optimizers, and anew after factorize(). The hooks are called during
/// backward(). The destructor removes the hooks; .grad then still refers to the arena, which lives as long as
/// a tensor uses it.
template <class Comm, class T = float>
class distributed {
 public:
  using make_compressor_function = std::function<std::optional<any_compressor<T>>(const parameter_store<T>&)>;

  /// Module and communicator must outlive the object. Collective: sends rank 0's parameters and buffers to
  /// all ranks. Throws value_error, naming it, for a trained parameter that is not dense, not on the CPU or
  /// not of scalar T; state_error, on all ranks, if the ranks' modules, options or compressors differ.
  distributed(torch::nn::Module& module, Comm& comm, const exchange_options& options = {},
              const compression_options& compression = no_compression{})
      : distributed(module, comm, options, compressor_of_options(compression)) {}

  /// Makes the object with the options and with a compressor that the function `compressor` makes.
  distributed(torch::nn::Module& module, Comm& comm, const exchange_options& options,
              const make_compressor_function& compressor)
      : module_(&module),
        comm_(&comm),
        ctx_(context_options{.threads = std::max(1, torch::get_num_threads())}),
        options_(options),
        compressor_(compressor) {
    agree_on_lines(comm, "distributed module", detail::describe_module(module));
    for (auto& p : detail::trained_parameters<T>(module, "host_torch::distributed")) {
      members_.push_back({std::move(p)});
    }
    broadcast();
    store_ = std::make_shared<arena>();
    store_->pack_gradients([this](state_visitor<T>& visitor) {
      for (member& m : members_) visitor.on_parameter(m.name, *m.shown);
    });
    // From now on, the members are in the order of the arena.
    std::reverse(members_.begin(), members_.end());
    for (member& m : members_) add_view(m);
    exchange_ = new_exchange(options, compressor);
    // From here on nothing throws: the hooks refer to this object.
    for (std::size_t i = 0; i < members_.size(); ++i) add_hook(members_[i], i);
  }
  distributed(const distributed&) = delete;
  distributed& operator=(const distributed&) = delete;
  ~distributed() {
    for (member& m : members_) m.node->del_post_hook(m.hook);
  }

  /// Waits until every gradient is the mean over all ranks. Gradients that no backward pass has written are
  /// averaged as zeros. Also starts the exchange of a step in which no gradient was written. Work of the
  /// compressor runs in this call, unless exchange_options::compress_by_bucket is set. Returns false, on all
  /// ranks, if the step must be left out. Collective. Throws the errors of gradient_exchange::finish.
  bool finish() {
    if (!running_) begin();
    running_ = false;
    const torch::NoGradGuard no_grad;
    for (member& m : members_) {
      if (!m.ready) {
        put_into_arena(m);
        // .grad holds the module's gradient: zeros, or the sum of the passes under accumulate().
        m.shown->set_gradient_origin(gradient_source::layer);
      }
      m.ready = false;
    }
    return exchange_->finish(ctx_);
  }

  /// While the returned object exists, backward passes only add to this rank's gradients: for all but the
  /// last micro-batch of a step. (The mean is over ranks; divide losses by the number of micro-batches.) The
  /// scope refers to this object, which must outlive it.
  ///
  ///     {
  ///       const auto scope = parallel.accumulate();
  ///       loss(net->forward(first_half)).backward();         // adds to this rank's .grad
  ///     }
  ///     loss(net->forward(second_half)).backward();          // starts the exchange
  ///     parallel.finish();
  [[nodiscard]] auto accumulate() {
    struct scope {
      explicit scope(bool& quiet) : quiet_(quiet), before_(std::exchange(quiet, true)) {}
      ~scope() { quiet_ = before_; }
      scope(const scope&) = delete;
      scope& operator=(const scope&) = delete;

     private:
      bool& quiet_;
      bool before_;
    };
    return scope(quiet_);
  }

  /// Sends rank 0's parameters and buffers to all ranks, after rank 0 has loaded a checkpoint. Collective.
  ///
  ///     if (comm.rank() == 0) torch::load(net, "run.pt");
  ///     parallel.broadcast();
  void broadcast() { detail::broadcast_module(*comm_, *module_); }

  /// Averages contiguous float and double buffers on the CPU over the ranks; all others become rank 0's. Call
  /// it before an evaluation or a checkpoint of a network with batch norms: during training, their statistics
  /// are each rank's own. Collective.
  void average_buffers() { detail::average_buffers(*comm_, *module_); }

  /// Replaces the exchange: from the next step on, it has these options and this compressor, as in a new
  /// object. The compressor begins without memory and report() at 0; the step count goes on. Views, hooks
  /// and parameters stay. Collective. Throws state_error during a step, and the errors of the constructor;
  /// the exchange then stays as it was.
  void set_exchange(const exchange_options& options,
                    const compression_options& compression = no_compression{}) {
    set_exchange(options, compressor_of_options(compression));
  }
  /// Changes the options of the exchange, and uses a compressor that the function `compressor` makes.
  void set_exchange(const exchange_options& options, const make_compressor_function& compressor) {
    if (running_) {
      PUFFERFISH_THROW(state_error("host_torch::distributed: set_exchange during a step; finish() it first"));
    }
    auto made = new_exchange(options, compressor);
    made->set_steps(exchange_->steps());
    exchange_ = std::move(made);
    options_ = options;
    compressor_ = compressor;
  }
  /// The exchange's options and compressor, as passed by the caller.
  const exchange_options& options() const { return options_; }
  const make_compressor_function& compressor() const { return compressor_; }

  /// Number of gradients that were not written to the arena directly but copied there.
  std::int64_t copied_gradients() const { return copied_; }
  const exchange_report& report() const { return exchange_->report(); }
  /// The exchange of the gradients; the reference is valid until the next set_exchange.
  gradient_exchange<T, Comm>& exchange() { return *exchange_; }
  torch::nn::Module& module() const { return *module_; }
  Comm& comm() const { return *comm_; }
  /// The store whose arena holds the gradients; its parameters refer to the module's present values. Throws
  /// state_error, naming it, for a parameter whose scalar, shape or strides have changed.
  const parameter_store<T>& store() const {
    for (const member& m : members_) m.follow("host_torch::distributed");
    return *store_;
  }

 private:
  using arena = parameter_store<T>;

  // A trained parameter, its gradient in the arena, and its hook in autograd's graph.
  struct member : detail::trained_parameter<T> {
    Tensor view{};  // the parameter's gradient in the arena
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const Tensor&>())) node{};
    std::uintptr_t hook = 0;
    bool ready = false;
  };

  static make_compressor_function compressor_of_options(const compression_options& compression) {
    return [compression](const parameter_store<T>& store) { return new_compressor<T>(store, compression); };
  }

  // Makes an exchange of the store. Collective.
  std::unique_ptr<gradient_exchange<T, Comm>> new_exchange(const exchange_options& options,
                                                           const make_compressor_function& compressor) {
    return std::make_unique<gradient_exchange<T, Comm>>(
        *store_, *comm_, options,
        pufferfish::detail::all_or_none(*comm_, "distributed module", [&] { return compressor(*store_); }));
  }

  // Makes .grad a view of the arena, with the values that it had.
  void add_view(member& m) {
    // The view keeps the arena alive: a parameter may outlive this object.
    m.view = m.view_at(m.shown->gradient_data(), store_);
    const Tensor before = m.tensor.grad();
    if (before.defined()) m.view.copy_(before);
    m.tensor.mutable_grad() = m.view;
  }

  // Calls gradient_added when autograd has added up the gradient of a parameter.
  void add_hook(member& m, std::size_t number) {
    // A leaf has one node that adds up its gradients; the node runs once per backward pass.
    m.node = torch::autograd::impl::grad_accumulator(m.tensor);
    m.hook = m.node->add_post_hook(
        std::make_unique<detail::gradient_hook>([this, number] { gradient_added(members_[number]); }));
  }

  // Begins the exchange of a step: at its first gradient, or in finish() if there was none.
  void begin() {
    exchange_->begin(ctx_);
    running_ = true;
  }

  // Called by the hook after autograd has added to .grad: the gradient is complete for this step. Throws
  // state_error for a second one.
  void gradient_added(member& m) {
    if (quiet_) return;
    if (m.ready) {
      PUFFERFISH_THROW(state_error("host_torch::distributed: a second gradient of " + m.name +
                                   " before finish(): run all but the last backward pass of a step under "
                                   "accumulate()"));
    }
    if (!running_) begin();
    put_into_arena(m);
    m.ready = true;
    ctx_.gradient_written(*m.shown);
  }

  // Makes .grad the view again if the program has replaced it; its values are copied, an undefined one counts
  // as 0.
  void put_into_arena(member& m) {
    Tensor& gradient = m.tensor.mutable_grad();
    if (gradient.defined() && gradient.data_ptr() == m.view.data_ptr()) return;
    const torch::NoGradGuard no_grad;
    if (gradient.defined()) {
      m.view.copy_(gradient);
      ++copied_;
    } else {
      m.view.zero_();
    }
    gradient = m.view;
  }

  torch::nn::Module* module_;
  Comm* comm_;
  cpu_context ctx_;  // not thread_context(), which the module's layers may use
  std::vector<member> members_;
  std::shared_ptr<arena> store_;
  exchange_options options_;
  make_compressor_function compressor_;
  std::unique_ptr<gradient_exchange<T, Comm>> exchange_;
  bool running_ = false, quiet_ = false;
  std::int64_t copied_ = 0;
};

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
