// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::statistics_recorder`: records statistics of a libtorch module's layers in training, for
/// factors that raise the loss less.

#include <ATen/record_function.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/factorize.hpp>
#include <pufferfish/adapters/torch/recorded_layers.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// The list of existing recorders; a program has one such object. libtorch calls plain functions, which find
/// the recorders in this list. All functions may be called from any thread.
class active_recorders {
 public:
  using list = std::vector<std::shared_ptr<recorded_layers>>;

  /// The only object.
  static active_recorders& get() {
    static active_recorders recorders;
    return recorders;
  }
  /// Adds a recorder. The first one registers the callbacks with libtorch; they are removed with the last
  /// one.
  void add(std::shared_ptr<recorded_layers> one);
  /// Removes a recorder that was added.
  void remove(const std::shared_ptr<recorded_layers>& one) {
    const std::lock_guard lock(mutex_);
    all_.erase(std::find(all_.begin(), all_.end(), one));
    if (all_.empty()) at::removeCallback(handle_);
  }
  /// The recorders at this time.
  list copy() {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  std::mutex mutex_;
  list all_;
  at::CallbackHandle handle_{};
};

/// While an object exists, libtorch computes LSTMs on the CPU by products and elementwise operations.
/// libtorch 2 otherwise uses oneDNN, which shows neither hidden states nor gradients of gates. The switch is
/// one for the program: operations of other threads may meanwhile run without oneDNN, too.
class lstm_by_products {
 public:
  /// Switches oneDNN off for the program, unless another object has done so.
  lstm_by_products() {
    const std::lock_guard lock(mutex());
    if (count()++ > 0) return;
    before() = at::globalContext().userEnabledMkldnn();
    at::globalContext().setUserEnabledMkldnn(false);
  }
  ~lstm_by_products() {
    const std::lock_guard lock(mutex());
    if (--count() == 0) at::globalContext().setUserEnabledMkldnn(before());
  }
  lstm_by_products(const lstm_by_products&) = delete;
  lstm_by_products& operator=(const lstm_by_products&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static int& count() {
    static int objects = 0;
    return objects;
  }
  static bool& before() {
    static bool enabled = true;
    return enabled;
  }
};

/// Two inputs of an operation, kept from its start: libtorch does not show inputs at its end.
struct operation_inputs final : at::ObserverContext {
  Tensor first, second;
  bool is_linear = false;
  std::optional<lstm_by_products> by_products;  ///< the operation is an LSTM, without `first` and `second`
};

/// Returns the positions of the two inputs of an operation that recorded_layers::see needs; {-1, -1}: the
/// operation is not recorded. libtorch 1 computes a linear layer by addmm or matmul; later versions by
/// linear, which calls these operations.
inline std::pair<int, int> wanted_inputs(std::string_view operation) {
  if (operation == "aten::addmm") return {1, 2};
  const bool two = operation == "aten::linear" || operation == "aten::conv2d" ||
                   operation == "aten::embedding" || operation == "aten::matmul";
  return two ? std::pair{0, 1} : std::pair{-1, -1};
}

/// Number of nested linear operations that this thread is in.
inline int& linear_depth() {
  static thread_local int depth = 0;
  return depth;
}

/// libtorch calls this function before each operation and end_operation after it, in the operation's thread.
/// Returns null for operations that are not recorded, among them those inside of a linear operation.
inline std::unique_ptr<at::ObserverContext> begin_operation(const at::RecordFunction& operation) {
  const std::string_view name = operation.name();
  if (name == "aten::lstm" && torch::GradMode::is_enabled()) {
    auto seen = std::make_unique<operation_inputs>();
    seen->by_products.emplace();
    return seen;
  }
  const auto [first, second] = wanted_inputs(name);
  if (first < 0 || linear_depth() > 0) return nullptr;
  const auto inputs = operation.inputs();
  const auto is_tensor = [&](int i) {
    const auto at = static_cast<std::size_t>(i);
    return at < inputs.size() && inputs[at].isTensor();
  };
  if (!is_tensor(first) || !is_tensor(second)) return nullptr;
  auto seen = std::make_unique<operation_inputs>();
  seen->first = inputs[static_cast<std::size_t>(first)].toTensor();
  seen->second = inputs[static_cast<std::size_t>(second)].toTensor();
  seen->is_linear = name == "aten::linear";
  if (seen->is_linear) ++linear_depth();
  return seen;
}

/// Passes the operation's inputs and its first output to all recorders, without recording a graph for their
/// work.
inline void end_operation(const at::RecordFunction& operation, at::ObserverContext* context) {
  auto* const seen = static_cast<operation_inputs*>(context);
  if (seen == nullptr) return;
  if (seen->by_products) return seen->by_products.reset();
  if (seen->is_linear) --linear_depth();
  const auto& outputs = operation.outputs();
  if (outputs.empty() || !outputs[0].isTensor()) return;
  const torch::NoGradGuard none;
  for (const auto& one : active_recorders::get().copy()) {
    one->see(operation.name(), seen->first, seen->second, outputs[0].toTensor());
  }
}

inline void active_recorders::add(std::shared_ptr<recorded_layers> one) {
  const std::lock_guard lock(mutex_);
  if (all_.empty()) {
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(begin_operation, end_operation)
                                        .needsInputs(true)
                                        .needsOutputs(true)
                                        .scopes({at::RecordScope::FUNCTION}));
  }
  all_.push_back(std::move(one));
}

/// Whether this libtorch passes inputs of operations to callbacks. A libtorch built without assertions does
/// not if the program has them: a check in the program's copy of at::RecordFunction then always fails.
inline bool shows_inputs() {
  static const bool shown = [] {
    const keep_random_state keep;
    torch::nn::Sequential probe{torch::nn::Linear(1, 1)};
    const auto layers = std::make_shared<recorded_layers>(*probe, 0, 0);
    active_recorders::get().add(layers);
    probe->forward(torch::ones({1, 1}));
    active_recorders::get().remove(layers);
    return !layers->statistics().layers.empty();
  }();
  return shown;
}

}  // namespace detail

/// While the object exists, it accumulates statistics of the layers below `root` that factorize can replace
/// (Linear, Conv2d, Embedding, LSTM, MultiheadAttention) in the caller's training passes: second moments of
/// outputs (of inputs unless these are more), and of the gradients of a loss that is a mean over the samples
/// of a batch.
///
///     host_torch::statistics_recorder seen(*net);
///     for (...) loss(net->forward(x), target).backward();         // some training steps
///     const network_statistics statistics = seen.statistics();
///     host_torch::factorize(*net, policy, &statistics);
///
/// Passes without gradients (torch::NoGradGuard) do not count. An LSTM layer has eight matrices, with the
/// rows that this library's LSTM shows a statistics_collector: the inputs and the states before each step,
/// and the gradients with respect to the gates' preactivations. A first state of zeros does not count. Only
/// LSTMs on the CPU are recorded; their training passes run without oneDNN meanwhile. Attention has four
/// matrices: query, key, value and output.
///
/// Not recorded: layers computed by other operations than a product, conv2d, lstm or embedding (a compiled or
/// scripted forward). A batch norm after a layer is not detected: set `normalized` of the layer's statistics
/// yourself if the batch norm's statistics are trained further. Memory: outputs x outputs doubles a matrix.
/// Any number of recorders may exist; meanwhile libtorch's operations are a little slower
/// (at::addGlobalCallback).
class statistics_recorder {
 public:
  /// Starts recording. `rows_of_step`: see statistics_options. `samples`: number of samples whose mean is the
  /// loss, if all passes have the same; 0: the first dimension of each layer's output. Sequences that begin
  /// with the dimension of the steps need `samples`: sequences, or tokens for a mean over tokens. Layers that
  /// are replaced later are no longer recorded. Throws value_error for a negative number, and state_error if
  /// libtorch does not pass inputs to this program: compile it with NDEBUG if libtorch was.
  explicit statistics_recorder(torch::nn::Module& root, index_t rows_of_step = 512, index_t samples = 0)
      : layers_(std::make_shared<detail::recorded_layers>(root, rows_of_step, samples)) {
    if (rows_of_step < 0 || samples < 0) {
      detail::throw_error<value_error>({"statistics_recorder: rows_of_step ", rows_of_step, ", samples ",
                                        samples, ": neither may be negative"});
    }
    if (!detail::shows_inputs()) {
      PUFFERFISH_THROW(state_error(
          "statistics_recorder: libtorch shows no inputs of operations; compile with -DNDEBUG, as it was"));
    }
    detail::active_recorders::get().add(layers_);
  }
  statistics_recorder(const statistics_recorder&) = delete;
  statistics_recorder& operator=(const statistics_recorder&) = delete;
  ~statistics_recorder() { detail::active_recorders::get().remove(layers_); }

  /// Statistics so far, of layers that a training pass has used, by the names that factorize uses.
  /// No pass may run meanwhile.
  network_statistics statistics() const { return layers_->statistics(); }

 private:
  std::shared_ptr<detail::recorded_layers> layers_;
};

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
