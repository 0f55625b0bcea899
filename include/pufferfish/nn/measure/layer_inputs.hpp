// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `layer_input`: the shape of a layer's input in a training pass. For convolutional networks it is traced
/// from the shape of an image batch. For other models it is the number of rows that a row_observer counted in
/// a training step.

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/row_observer.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The input of one layer in one training pass.
struct layer_input {
  std::string name;  ///< of the layer
  /// NHWC extents of an image batch. Other inputs are stored as {rows, 1, 1, features} for a fully connected
  /// layer, {steps, batch, 1, features} for a recurrent layer and {tokens, 1, 1, width} for an embedding.
  extents<4> shape{};
  /// Whether the backward pass computes the gradient of the input. False for the first layer of a network.
  bool gradient = true;
  /// Number of rows (tokens) in the input of the output layer that shares the embedding's table (tied
  /// weights). 0 if no output layer shares it.
  index_t tied_rows = 0;
};

namespace detail {

/// Whether a layer has dense weight matrices.
template <class T, class Device>
bool is_dense(const any_layer<T, Device>& layer) {
  return !layer.weights({}).matrices.empty();
}

/// The parameter that holds the layer's first weight matrix. Its address is the `weight` that the layer
/// passes to row_observer::on_rows. nullptr for a layer without a matrix.
template <class T, class Device>
const parameter<parameter_t<T>>* weight_of(any_layer<T, Device>& layer) {
  const parameter<parameter_t<T>>* found = nullptr;
  for_each_parameter(layer, [&](const std::string&, const auto& p) {
    if (found == nullptr && p.layout().dims > 1) found = &p;
  });
  return found;
}

/// Number of features of an input row of a fully connected layer.
template <class T, class Device>
index_t row_width(any_layer<T, Device>& layer) {
  return layer.first_matrix().cols;
}

}  // namespace detail

/// The inputs of the dense layers of `net` in a pass over an image batch with NHWC extents `input` (the batch
/// of one rank), in execution order. The first layer of the network needs no gradient of its input. Only
/// shapes are read. Throws shape_error if a layer does not accept the shape of its input.
template <class T, class Device>
std::vector<layer_input> traced_inputs(const network<T, Device>& net, const extents<4>& input) {
  struct tracer final : layer_tracer<T, Device> {
    void on_trace(const std::string& name, const any_layer<T, Device>& layer, const extents<4>& in,
                  const extents<4>&) override {
      if (detail::is_dense(layer)) inputs.push_back({name, in, !first, 0});
      first = false;
    }
    std::vector<layer_input> inputs;
    bool first = true;
  } trace;
  net.root().trace(trace, input);
  return std::move(trace.inputs);
}

/// Row observer that counts the rows that each weight processes in training passes, at no measurable cost:
///
///     row_counter rows;
///     {
///       const observed_scope counted(ctx, rows);
///       ...  // one training step of the model
///     }
///     const auto inputs = counted_inputs(net, rows, 1, steps of a sequence);
/// Not safe for passes in several threads at once.
class row_counter final : public row_observer {
 public:
  /// Adds the number of rows that a layer reports. `weight`: address of the layer's weight parameter.
  void on_rows(const void* weight, row_kind kind, const shown_rows& rows) override {
    rows_[{weight, static_cast<int>(kind)}] += rows.rows;
  }
  /// Number of rows of kind `kind` counted for the parameter at address `weight`; 0 if none were reported.
  index_t rows(const void* weight, row_kind kind) const {
    const auto at = rows_.find({weight, static_cast<int>(kind)});
    return at == rows_.end() ? 0 : at->second;
  }

 private:
  std::map<std::pair<const void*, int>, index_t> rows_;
};

/// The inputs of dense fully connected layers, recurrent layers and embeddings of any model, from the rows
/// that `counter` has counted in `passes` training steps (the mean over the steps, rounded up). `steps` is
/// the length of the sequences of recurrent layers. Layers without rows are left out. Convolutions are left
/// out, too, because a number of rows does not determine height and width of images (see traced_inputs).
/// Throws value_error if passes < 1 or steps < 1, or if the rows of a recurrent layer are not a multiple of
/// `steps`.
template <class Root, class Device>
std::vector<layer_input> counted_inputs(const model<Root, Device>& net, const row_counter& counter,
                                        index_t passes = 1, index_t steps = 1) {
  if (passes < 1 || steps < 1) {
    detail::throw_error<value_error>(
        {"counted_inputs: ", passes, " passes over sequences of ", steps, " steps"});
  }
  std::vector<layer_input> inputs;
  const auto found = detail::find_slots(net);
  for (std::size_t i = 0; i < found.slots.size(); ++i) {
    auto& slot = *found.slots[i];
    const std::string& name = found.layers[i].name;
    if (!detail::is_dense(slot)) continue;
    const void* const weight = detail::weight_of(slot);
    const auto rows = [&](row_kind kind) { return (counter.rows(weight, kind) + passes - 1) / passes; };
    if (const auto* table = slot.tokens()) {
      const index_t tokens = rows(row_kind::token), tied = rows(row_kind::tied_input);
      if (tokens + tied > 0) inputs.push_back({name, {tokens, 1, 1, table->width()}, true, tied});
      continue;
    }
    // Layers report rows of inputs or of outputs, but always the rows of output gradients.
    const index_t count = rows(row_kind::output_gradient);
    if (count == 0) continue;
    if (slot.recurrent() == nullptr) {
      inputs.push_back({name, {count, 1, 1, detail::row_width(slot)}, true, 0});
      continue;
    }
    if (count % steps != 0) {
      detail::throw_error<value_error>({"counted_inputs: ", name, " has ", count,
                                        " rows in a pass, which are not sequences of ", steps, " steps"});
    }
    inputs.push_back({name, {steps, count / steps, 1, slot.recurrent()->input_size()}, true, 0});
  }
  return inputs;
}

/// The inputs of dense layers, computed without a training step, for a model in which each layer processes
/// each token of a segment once (such as lstm_lm). A segment is `steps` time steps of `batch` sequences. An
/// embedding whose gradient is written several times in a backward pass counts as tied to the output layer.
/// Throws value_error if steps < 1 or batch < 1.
template <class Root, class Device>
std::vector<layer_input> sequence_inputs(const model<Root, Device>& net, index_t steps, index_t batch) {
  if (steps < 1 || batch < 1) {
    detail::throw_error<value_error>({"sequence_inputs: ", steps, " steps of ", batch, " sequences"});
  }
  std::vector<layer_input> inputs;
  const auto found = detail::find_slots(net);
  for (std::size_t i = 0; i < found.slots.size(); ++i) {
    auto& slot = *found.slots[i];
    const std::string& name = found.layers[i].name;
    if (!detail::is_dense(slot)) continue;
    if (const auto* table = slot.tokens()) {
      const index_t tied = table->table().writers() > 1 ? steps * batch : 0;
      inputs.push_back({name, {steps * batch, 1, 1, table->width()}, true, tied});
    } else if (slot.recurrent() != nullptr) {
      inputs.push_back({name, {steps, batch, 1, slot.recurrent()->input_size()}, true, 0});
    } else {
      inputs.push_back({name, {steps * batch, 1, 1, detail::row_width(slot)}, true, 0});
    }
  }
  return inputs;
}

PUFFERFISH_NAMESPACE_END
