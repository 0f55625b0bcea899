// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `layer_input`: the size of a layer's input in a training pass. Convolutional networks trace it from
/// the shape of an image batch; other models count the rows that a row_observer sees in a training step.

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/row_observer.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The input of one layer in one pass.
struct layer_input {
  std::string name;
  /// NHWC. Rows of a fully connected layer: {rows, 1, 1, features}; sequences of a recurrent one: {steps,
  /// batch, 1, features}; tokens of an embedding: {tokens, 1, 1, width}.
  extents<4> shape{};
  /// Whether the backward pass computes the gradient of the input. False for the first layer of a network.
  bool gradient = true;
  /// Rows of the output layer that shares the embedding's table (tied weights); 0: none.
  index_t tied_rows = 0;
};

namespace detail {

/// Whether a layer has dense weight matrices.
template <class T, class Device>
bool is_dense(const any_layer<T, Device>& layer) {
  return !layer.weights({}).matrices.empty();
}

/// The parameter of a layer's first weight matrix, which the layer passes to a row_observer. nullptr: no
/// matrix.
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

/// The inputs of the dense layers of a network for `input`, the batch of one rank. Throws shape_error as
/// output_shape.
/// In execution order; the first layer of the network needs no gradient of its input. Reads shapes only.
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

/// Counts the rows that each weight processes in training passes, at no measurable cost:
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
  void on_rows(const void* weight, row_kind kind, const shown_rows& rows) override {
    rows_[{weight, static_cast<int>(kind)}] += rows.rows;
  }
  /// Number of rows of a kind that a weight has processed; `weight` as in row_observer.
  index_t rows(const void* weight, row_kind kind) const {
    const auto at = rows_.find({weight, static_cast<int>(kind)});
    return at == rows_.end() ? 0 : at->second;
  }

 private:
  std::map<std::pair<const void*, int>, index_t> rows_;
};

/// The inputs of dense fully connected layers, recurrent layers and embeddings of any model, from the rows
/// that `counter` has seen in `passes` training steps (the mean, rounded up). `steps` is the length of the
/// sequences of recurrent layers. Layers without rows are left out. Convolutions are left out, because a
/// number of rows does not determine height and width of images: see traced_inputs. Throws value_error
/// for a number below 1, and if the rows of a recurrent layer are not a multiple of `steps`.
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

/// The same without a training step, for a model such as lstm_lm in which each layer processes each token
/// of a segment once. A segment has `steps` steps of `batch` sequences. An embedding whose gradient has
/// several writers counts as tied to the output layer. Throws value_error for a number below 1.
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
