// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What the layers of a network are given in one training pass: from the shapes that an input of a network
/// has on its way, or from the rows that a model's own pass shows.

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
  /// Whether the backward pass computes the gradient of the input: not for the network's first layer.
  bool gradient = true;
  /// Of an embedding whose table is also the matrix of an output layer: rows of that layer.
  index_t tied_rows = 0;
};

namespace detail {

/// Whether a layer has dense weight matrices.
template <class T, class Device>
bool is_dense(const any_layer<T, Device>& layer) {
  return !layer.weights({}).matrices.empty();
}

/// The parameter of a layer's (first) weight matrix: what the layer names where it shows rows. nullptr: none.
template <class T, class Device>
const parameter<parameter_t<T>>* weight_of(any_layer<T, Device>& layer) {
  struct finder final : state_visitor<parameter_t<T>> {
    void on_parameter(const std::string&, parameter<parameter_t<T>>& p) override {
      if (found == nullptr && p.layout().dims > 1) found = &p;
    }
    void on_buffer(const std::string&, state_buffer<parameter_t<T>>&) override {}
    const parameter<parameter_t<T>>* found = nullptr;
  } visitor;
  layer.visit_state(visitor);
  return visitor.found;
}

/// How many numbers a row of the input of a layer of rows has.
template <class T, class Device>
index_t row_width(any_layer<T, Device>& layer) {
  return layer.first_matrix().cols;
}

}  // namespace detail

/// The inputs of a network's dense layers for an input of the network: a batch of one rank. Throws
/// shape_error as output_shape.
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

/// Counts the rows that weights meet in training passes. Costs nothing beside them:
///
///     row_counter rows;
///     { const observed_scope counted(ctx, rows); one training step of the model; }
///     const auto inputs = counted_inputs(net, rows, 1, steps of a sequence);
class row_counter final : public row_observer {
 public:
  void on_rows(const void* weight, row_kind kind, const shown_rows& rows) override {
    rows_[{weight, static_cast<int>(kind)}] += rows.rows;
  }
  /// All rows of this kind that the weight has met.
  index_t rows(const void* weight, row_kind kind) const {
    const auto at = rows_.find({weight, static_cast<int>(kind)});
    return at == rows_.end() ? 0 : at->second;
  }

 private:
  std::map<std::pair<const void*, int>, index_t> rows_;
};

/// The inputs of the dense fully connected and recurrent layers and embeddings of a model of any kind, from
/// the rows that `counter` has seen in `passes` training steps (a mean, rounded up). Sequences of recurrent
/// layers have `steps` steps. Layers that have met no row are left out, and so are convolutions, whose images
/// rows do not tell: for those see traced_inputs. Throws value_error for numbers below 1, or where a
/// recurrent layer's rows are not a multiple of the steps.
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
    const index_t count = rows(row_kind::input);
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

/// The same for a model all of whose layers meet each token of a segment of `steps` steps of `batch`
/// sequences once, such as lstm_lm, without a pass of it. Of an embedding that several passes write, the
/// table counts as tied to the output.
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
