// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The recurrent state of an `lstm_lm`.

#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/nn/layers/lstm.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Hidden state and cell of every layer for a batch of sequences, carried from one segment to the next in the
/// memory of the device. A value type that starts with zeros. Copying waits for the device. A state has 2 *
/// layers * batch * width elements. layer() of a state that was moved from throws state_error.
///
///     auto state = net.root().make_state(20);             // net: model<lstm_lm<float>>; 20 sequences
///     net.root().loss(ctx, tokens, targets, state);       // the state is that after the last token now
///     state.reset(ctx);                                   // for another text
template <class T, class Device = device::cpu>
class lstm_lm_state {
 public:
  /// Makes a state of zeros. `batch`: number of sequences; `width`: hidden features of a layer.
  lstm_lm_state(index_t layers, index_t batch, index_t width)
      : shape_{2 * layers, batch, width}, values_(memory_of<Device>::source(), volume<3>(shape_)) {}
  lstm_lm_state(const lstm_lm_state& other)
      : shape_(other.shape_), values_(memory_of<Device>::source(), volume<3>(shape_), uninitialized) {
    std::vector<T> copy(static_cast<std::size_t>(values_.size()));
    other.values_.to_host(copy);
    values_.from_host(copy);
  }
  lstm_lm_state(lstm_lm_state&&) noexcept = default;
  lstm_lm_state& operator=(lstm_lm_state other) noexcept {
    shape_ = other.shape_;
    values_ = std::move(other.values_);
    return *this;
  }
  ~lstm_lm_state() = default;

  /// Number of layers.
  index_t layers() const { return shape_[0] / 2; }
  /// Number of sequences.
  index_t batch() const { return shape_[1]; }
  /// Hidden state and cell of layer i, [batch][width] each: views of this object's memory.
  recurrent_state<T> layer(index_t i) { return {matrix(2 * i), matrix(2 * i + 1)}; }

  /// Sets the state to zero, for the start of a new text.
  void reset(context<Device>& ctx) { ops::fill<T>(ctx, values_.span(), T{}); }

  /// Memory of the whole state, for checkpoints: layer by layer, hidden state, then cell.
  memory_block<T>& memory() { return values_; }
  /// Elements of memory() on the CPU.
  std::span<T> values() requires(std::is_same_v<Device, device::cpu>) { return values_.span(); }
  /// Sets the state to zero, on the CPU without a context.
  void reset() requires(std::is_same_v<Device, device::cpu>) {
    std::fill(values().begin(), values().end(), T{});
  }

 private:
  // Matrix i of the state: hidden state and cell of layer i / 2. Throws state_error after a move.
  tensor_view<T, 2> matrix(index_t i) {
    if (values_.data() == nullptr && volume<3>(shape_) > 0) detail::moved_from("lstm_lm_state");
    return {values_.data() + i * shape_[1] * shape_[2], {shape_[1], shape_[2]}};
  }

  extents<3> shape_;
  memory_block<T> values_;
};

PUFFERFISH_NAMESPACE_END
