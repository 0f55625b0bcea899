// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::statistics_recorder`: records statistics of a libtorch module's layers in training, for
/// factors that raise the loss less.

#include <ATen/record_function.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/factorize.hpp>
#include <pufferfish/nn/measure/collect_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// A tensor as float or double rows on the CPU; dimension `dimension`, of size `columns`, becomes the last.
/// The result is a copy unless the tensor has this form already.
inline Tensor as_rows(const Tensor& t, std::int64_t dimension, std::int64_t columns) {
  Tensor rows = t.detach().movedim(dimension, -1).reshape({-1, columns}).to(torch::kCPU);
  if (rows.scalar_type() != torch::kDouble) rows = rows.to(torch::kFloat);
  return rows.contiguous();
}

/// The sums of one recorder. Passes run on several threads: autograd calls hooks on threads of its own.
/// mutex_ guards the map of weights; each layer has a mutex for its sums.
class recorded_layers {
 public:
  recorded_layers(torch::nn::Module& root, index_t rows_of_step) : rows_of_step_(rows_of_step) {
    for (const module_place& place : place_finder(root).places) add(place);
  }

  /// Called after an operation. `first` and `second`: its input and the weight, or the weight transposed by
  /// aten::t; for an embedding, the weight and the tokens; for aten::t, the weight twice.
  void see(std::string_view operation, const Tensor& first, const Tensor& second, const Tensor& outputs) {
    const bool table = operation == "aten::embedding";
    const std::shared_ptr<recorded> layer = find(table ? first : second);
    if (layer == nullptr || layer->table != table) return;
    if (operation == "aten::t") return alias(layer, outputs);
    if (!outputs.requires_grad()) return;  // no training pass
    const std::int64_t dimension = operation == "aten::conv2d" ? 1 : -1;
    const double samples = outputs.dim() > 1 ? static_cast<double>(outputs.size(0)) : 1.0;
    {
      const std::lock_guard lock(layer->mutex);
      output_statistics& seen = layer->seen;
      seen.add_batch(static_cast<double>(outputs.numel()) / static_cast<double>(seen.outputs()), samples);
      ++layer->turn;
      if (table) {
        const Tensor tokens = second.detach().to(torch::kCPU, torch::kInt).contiguous();
        seen.add_tokens({tokens.data_ptr<std::int32_t>(), static_cast<std::size_t>(tokens.numel())});
      } else if (operation != "aten::conv2d" && seen.inputs() <= seen.outputs()) {
        sample(*layer, rows_of_step_, as_rows(first, -1, seen.inputs()),
               [&](const auto& x) { seen.add_inputs(x); });
      } else {
        // The bias is added after a matmul.
        const bool later = operation == "aten::matmul" && layer->bias.defined();
        sample(*layer, rows_of_step_,
               as_rows(later ? outputs + layer->bias : outputs, dimension, seen.outputs()),
               [&](const auto& y) { seen.add_outputs(y); });
      }
    }
    outputs.register_hook([layer, dimension, samples, most = rows_of_step_](const Tensor& gradient) {
      const torch::NoGradGuard none;
      const std::lock_guard lock(layer->mutex);
      sample(*layer, most, as_rows(gradient, dimension, layer->seen.outputs()),
             [&](const auto& dy) { layer->seen.add_gradients(dy, samples); });
    });
  }

  /// Statistics of the layers that have been used. A grouped convolution has one matrix for each group.
  network_statistics statistics() const {
    network_statistics all;
    for (const auto& layer : layers_) {
      const std::lock_guard lock(layer->mutex);
      if (!layer->seen.has_rows()) continue;
      layer_statistics one(layer->seen);
      one.name = layer->name;
      if (layer->groups > 1) {
        const index_t rows = layer->seen.outputs() / layer->groups;
        one.matrices.clear();
        for (index_t g = 0; g < layer->groups; ++g) one.matrices.push_back(layer->seen.block(g * rows, rows));
      }
      all.layers.push_back(std::move(one));
    }
    return all;
  }

 private:
  struct recorded {
    std::string name;
    bool table = false;
    index_t groups = 1;
    output_statistics seen;
    Tensor bias, transposed;  // of a linear layer
    std::uint64_t turn = 0;
    mutable std::mutex mutex;
  };

  std::shared_ptr<recorded> find(const Tensor& weight) {
    const std::lock_guard lock(mutex_);
    const auto found = by_weight_.find(weight.unsafeGetTensorImpl());
    return found == by_weight_.end() ? nullptr : found->second;
  }
  // Registers the transposed weight in place of the last one, so that find() finds the layer by it. The
  // tensor is kept, so that no other tensor gets its address.
  void alias(const std::shared_ptr<recorded>& layer, const Tensor& transposed) {
    const std::lock_guard lock(mutex_);
    if (layer->transposed.defined()) by_weight_.erase(layer->transposed.unsafeGetTensorImpl());
    layer->transposed = transposed;
    by_weight_[transposed.unsafeGetTensorImpl()] = layer;
  }

  // Registers a place's layer by the address of its weight, if it is a Linear, Conv2d or Embedding.
  void add(const module_place& place) {
    auto layer = std::make_shared<recorded>();
    layer->name = place.name;
    Tensor weight;
    if (const auto* linear = exactly<torch::nn::LinearImpl>(*place.layer)) {
      weight = linear->weight;
      layer->bias = linear->bias.defined() ? linear->bias.detach() : linear->bias;
    }
    if (const auto* conv = exactly<torch::nn::Conv2dImpl>(*place.layer)) {
      weight = conv->weight;
      layer->groups = conv->options.groups();
    }
    if (const auto* embedding = exactly<torch::nn::EmbeddingImpl>(*place.layer)) {
      weight = embedding->weight;
      layer->table = true;
    }
    if (!weight.defined()) return;
    const std::int64_t rows = weight.size(0), columns = rows == 0 ? 0 : weight.numel() / rows;
    layer->seen = layer->table ? output_statistics(columns, rows) : output_statistics(rows, columns);
    by_weight_[weight.unsafeGetTensorImpl()] = layer;
    layers_.push_back(std::move(layer));
  }

  // Calls add(view) with evenly spaced rows; does nothing for layers wider than largest_moment.
  template <class Add>
  static void sample(const recorded& layer, index_t most, const Tensor& rows, const Add& add) {
    const index_t columns = rows.size(1);
    if (columns > output_statistics::largest_moment) return;
    const pufferfish::detail::row_sample part =
        pufferfish::detail::sample_rows(rows.size(0), columns, most, layer.turn);
    const auto with = [&](auto scalar) {
      using T = decltype(scalar);
      add(tensor_view<const T, 2>(rows.data_ptr<T>() + part.first * columns, {part.rows, columns},
                                  {part.step * columns, 1}));
    };
    rows.scalar_type() == torch::kDouble ? with(double()) : with(float());
  }

  index_t rows_of_step_;
  std::mutex mutex_;  // of by_weight_
  std::vector<std::shared_ptr<recorded>> layers_;
  std::map<const void*, std::shared_ptr<recorded>> by_weight_;
};

/// The existing recorders. libtorch calls plain functions, which find the recorders in this list. One object
/// for the program. All functions may be called from any thread.
class active_recorders {
 public:
  using list = std::vector<std::shared_ptr<recorded_layers>>;

  static active_recorders& get() {
    static active_recorders recorders;
    return recorders;
  }
  /// The first recorder registers the callbacks, the last one removes them.
  void add(std::shared_ptr<recorded_layers> one);
  void remove(const std::shared_ptr<recorded_layers>& one) {
    const std::lock_guard lock(mutex_);
    all_.erase(std::find(all_.begin(), all_.end(), one));
    if (all_.empty()) at::removeCallback(handle_);
  }
  list copy() {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  std::mutex mutex_;
  list all_;
  at::CallbackHandle handle_{};
};

/// Two inputs of an operation, kept from its start: libtorch does not show inputs at its end.
struct operation_inputs final : at::ObserverContext {
  Tensor first, second;
  bool is_linear = false;
};

/// Positions of the inputs that `see` needs; {-1, -1}: the operation is not recorded. libtorch 1 computes a
/// linear layer by t and addmm or matmul; later ones by linear, which calls these operations.
inline std::pair<int, int> wanted_inputs(std::string_view operation) {
  if (operation == "aten::t") return {0, 0};
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
  const auto* const seen = static_cast<const operation_inputs*>(context);
  if (seen == nullptr) return;
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
    const auto layers = std::make_shared<recorded_layers>(*probe, 0);
    active_recorders::get().add(layers);
    probe->forward(torch::ones({1, 1}));
    active_recorders::get().remove(layers);
    return !layers->statistics().layers.empty();
  }();
  return shown;
}

}  // namespace detail

/// While the object exists, it accumulates statistics of the Linear, Conv2d and Embedding layers below `root`
/// in the caller's training passes: second moments of outputs (of inputs where these are fewer), and of the
/// gradients of a loss that is a mean over the samples of a batch.
///
///     host_torch::statistics_recorder seen(*net);
///     for (...) loss(net->forward(x), target).backward();         // some training steps
///     const network_statistics statistics = seen.statistics();
///     host_torch::factorize(*net, policy, &statistics);
///
/// Passes without gradients (torch::NoGradGuard) do not count. The first dimension of a layer's output must
/// be that of the samples. Not recorded: layers inside torch::nn::LSTM and MultiheadAttention, and layers
/// computed by other operations than a product, conv2d or embedding (a compiled or scripted forward). A batch
/// norm after a layer is not detected: set `normalized` of the layer's statistics yourself if the batch
/// norm's statistics are trained further. Memory: outputs x outputs doubles a layer. Any number of recorders
/// may exist; meanwhile libtorch's operations are a little slower (at::addGlobalCallback).
class statistics_recorder {
 public:
  /// `rows_of_step`: the most rows of a layer that one pass counts, evenly spaced, but never fewer than the
  /// layer has outputs; 0: all rows. Layers that are replaced later are no longer recorded. Throws
  /// state_error if libtorch does not pass inputs to this program: compile it with NDEBUG if libtorch was.
  explicit statistics_recorder(torch::nn::Module& root, index_t rows_of_step = 512)
      : layers_(std::make_shared<detail::recorded_layers>(root, rows_of_step)) {
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
