// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::distributed`: the gradients of any torch::nn::Module, averaged over all ranks while its
/// backward pass still runs.

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/tensor.hpp>
#include <pufferfish/compress/compression.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/dist/exchange.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// A tensor's elements in the order of its memory. It must be dense.
template <class T>
std::span<T> elements_of(const Tensor& t) {
  return {t.data_ptr<T>(), static_cast<std::size_t>(t.numel())};
}

/// A tensor as a compressor may see it: a matrix of outputs and everything else where one of them is
/// innermost in memory, else a vector.
inline logical_layout layout_of(const Tensor& t) {
  const std::int64_t size = t.numel();
  if (t.dim() >= 2 && size > 0) {
    const std::int64_t out = t.size(0), rest = size / out;
    if (t.stride(0) == 1) return {2, {out, rest, 1, 1}, {1, out, 0, 0}};
    if (t.stride(0) == rest) return {2, {out, rest, 1, 1}, {rest, 1, 0, 0}};
  }
  return logical_layout::vector(size);
}

/// One line a tensor, by which ranks find out that their modules differ.
inline std::string describe_tensor(const std::string& name, const Tensor& t) {
  std::string text =
      pufferfish::detail::quote_word(name) + " " + shape_text(t) + " " + kind_text(t) + ", strides";
  for (const std::int64_t stride : t.strides()) text.append(" ").append(std::to_string(stride));
  return text + (t.requires_grad() ? ", trained\n" : "\n");
}

/// Called when autograd has added a gradient to a parameter.
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

/// Averages the gradients of a module over all ranks of a communicator, bucket by bucket, while autograd
/// still computes (gradient_exchange): what DistributedDataParallel does in Python.
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
/// Every .grad is a view into one arena, laid out in reverse order of registration: autograd adds to it where
/// messages leave from. Where somebody replaces it (zero_grad(true), the default since libtorch 2, sets it to
/// nothing), the new gradient is copied there and the view put back: copied_gradients() counts. Frozen
/// parameters take no part.
///
/// Dense parameters on the CPU, all of scalar T (float, or double as the second template argument). Between
/// the first gradient of a step and finish() no one else may use the communicator. Made after optimizers or
/// before them, but anew after factorize().
template <class Comm, class T = float>
class distributed {
 public:
  using make_compressor_function = std::function<std::optional<any_compressor<T>>(const parameter_store<T>&)>;

  /// Module and communicator must outlive the object. Collective: gives all ranks rank 0's parameters and
  /// buffers. Throws value_error, naming the parameter, for one that is not dense, not on the CPU or not of
  /// scalar T; state_error, on all ranks, if their modules, options or compressors differ.
  distributed(torch::nn::Module& module, Comm& comm, const exchange_options& options = {},
              const compression_options& compression = no_compression{})
      : distributed(module, comm, options, [compression](const parameter_store<T>& store) {
          return new_compressor<T>(store, compression);
        }) {}

  /// With a compressor of the caller's.
  distributed(torch::nn::Module& module, Comm& comm, const exchange_options& options,
              const make_compressor_function& compressor)
      : module_(&module),
        comm_(&comm),
        ctx_(context_options{.threads = std::max(1, torch::get_num_threads())}) {
    std::string refused;
    agree_on_lines(comm, "distributed module", take_parameters(refused));
    if (!refused.empty()) PUFFERFISH_THROW(value_error(refused));
    broadcast();
    store_ = std::make_shared<arena>();
    store_->pack_gradients([this](state_visitor<T>& visitor) {
      for (member& m : members_) visitor.on_parameter(m.name, *m.shown);
    });
    // From now on in the order of the arena.
    std::reverse(members_.begin(), members_.end());
    for (member& m : members_) add_view(m);
    exchange_.emplace(
        *store_, comm, options,
        pufferfish::detail::all_or_none(comm, "distributed module", [&] { return compressor(*store_); }));
    // Nothing throws from here on: hooks call this object.
    for (std::size_t i = 0; i < members_.size(); ++i) add_hook(members_[i], i);
  }
  distributed(const distributed&) = delete;
  distributed& operator=(const distributed&) = delete;
  ~distributed() {
    for (member& m : members_) m.node->del_post_hook(m.hook);
  }

  /// Waits until every gradient is the mean over all ranks, those that no backward pass has written included
  /// (as zeros). Collective. Returns and throws as gradient_exchange::finish: false, on all ranks, if the
  /// step must be left out.
  bool finish() {
    if (!running_) begin();
    running_ = false;
    const torch::NoGradGuard no_grad;
    for (member& m : members_) {
      if (!m.ready) {
        put_into_arena(m);
        // What .grad holds is what the module's gradients are: zeros, or the sum of accumulate()'s passes.
        m.shown->set_gradient_origin(gradient_source::layer);
      }
      m.ready = false;
    }
    return exchange_->finish(ctx_);
  }

  /// While the returned object lives, backward passes only add to this rank's gradients: for all but the last
  /// of several micro-batches a step. (The mean is over ranks; divide losses by the number of micro-batches.)
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

  /// Gives all ranks rank 0's parameters and buffers: after one has loaded a checkpoint. Collective.
  void broadcast() {
    const torch::NoGradGuard no_grad;
    for (const Tensor& t : module_->parameters()) broadcast(t);
    for (const Tensor& t : module_->buffers()) broadcast(t);
  }

  /// Gives all ranks the mean of their buffers, where those are of float or double, and rank 0's of all
  /// others: before an evaluation or a checkpoint of a network with batch norms, whose statistics are each
  /// rank's own in training. Collective.
  void average_buffers() {
    const torch::NoGradGuard no_grad;
    for (const Tensor& t : module_->buffers()) {
      if (!detail::is_ours(t) || !t.is_contiguous()) {
        broadcast(t);
      } else if (t.scalar_type() == torch::kFloat) {
        average(detail::elements_of<float>(t));
      } else {
        average(detail::elements_of<double>(t));
      }
    }
  }

  /// Gradients that were not written where they are sent from.
  std::int64_t copied_gradients() const { return copied_; }
  const exchange_report& report() const { return exchange_->report(); }
  gradient_exchange<T, Comm>& exchange() { return *exchange_; }
  const parameter_store<T>& store() const { return *store_; }

 private:
  using arena = parameter_store<T>;

  struct member {
    std::string name;
    Tensor tensor;
    std::unique_ptr<parameter<T>> shown;  // what the exchange sees of it
    Tensor view{};                        // its place in the arena
    decltype(torch::autograd::impl::grad_accumulator(tensor)) node{};
    std::uintptr_t hook = 0;
    bool ready = false;
  };

  // Fills members_ in the order of registration. Returns what all ranks must have alike; `refused` says what
  // cannot be exchanged: only when all ranks know that they have the same may they throw.
  std::string take_parameters(std::string& refused) {
    std::string lines;
    std::set<const void*> seen;
    for (const auto& p : module_->named_parameters()) {
      const Tensor& t = p.value();
      lines += detail::describe_tensor(p.key(), t);
      if (!t.requires_grad() || !seen.insert(t.unsafeGetTensorImpl()).second) continue;
      if (!detail::is_ours(t) || t.scalar_type() != detail::scalar_of<T>() ||
          !t.is_non_overlapping_and_dense()) {
        if (!refused.empty()) continue;
        refused = detail::message({"host_torch::distributed: ", p.key(), " is ", detail::kind_text(t),
                                   ", where a dense tensor of ", c10::toString(detail::scalar_of<T>()),
                                   " on cpu is wanted"});
        continue;
      }
      members_.push_back(
          {p.key(), t,
           std::make_unique<parameter<T>>(detail::layout_of(t), parameter_role::weight, t.data_ptr<T>())});
    }
    for (const auto& b : module_->named_buffers()) lines += detail::describe_tensor(b.key(), b.value());
    return lines;
  }

  void add_view(member& m) {
    // The view keeps the arena alive: a parameter may outlive this object.
    m.view = torch::from_blob(
        m.shown->gradient_data(), m.tensor.sizes(), m.tensor.strides(), [keep = store_](void*) {},
        m.tensor.options().requires_grad(false));
    const Tensor before = m.tensor.grad();
    if (before.defined()) m.view.copy_(before);
    m.tensor.mutable_grad() = m.view;
  }

  void add_hook(member& m, std::size_t number) {
    // Leaves have one node that adds up their gradients; it runs once a backward pass.
    m.node = torch::autograd::impl::grad_accumulator(m.tensor);
    m.hook = m.node->add_post_hook(
        std::make_unique<detail::gradient_hook>([this, number] { gradient_added(members_[number]); }));
  }

  void begin() {
    exchange_->begin(ctx_);
    running_ = true;
  }

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

  void broadcast(const Tensor& t) {
    if (t.numel() == 0) return;
    Tensor dense = t.is_non_overlapping_and_dense() ? t : t.contiguous();
    if (!dense.is_cpu()) dense = dense.cpu();
    comm_->broadcast_bytes({static_cast<std::byte*>(dense.data_ptr()), dense.nbytes()}, 0);
    if (dense.data_ptr() != t.data_ptr()) Tensor(t).copy_(dense);
  }

  template <class U>
  void average(std::span<U> values) {
    comm_->all_reduce_sum(values);
    for (U& value : values) value /= static_cast<U>(comm_->size());
  }

  torch::nn::Module* module_;
  Comm* comm_;
  cpu_context ctx_;  // of its own: layers of ours run in the thread's
  std::vector<member> members_;
  std::shared_ptr<arena> store_;
  std::optional<gradient_exchange<T, Comm>> exchange_;
  bool running_ = false, quiet_ = false;
  std::int64_t copied_ = 0;
};

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
