// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `memory_rate`, which rescales the memory of error feedback when the learning rate changes.

#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/distributed/compressor.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Rescales a memory e in units of gradients: e is multiplied by a / b when the learning rate changes from a
/// to b. The parameters are then those of a memory lr e in units of steps, which is the published form of
/// error feedback (Karimireddy et al., ICML 2019): b (g + (a / b) e) = b g + a e. A learning rate of 0, which
/// an exchange has before a learning rate is set, changes nothing and is not remembered.
template <class T>
class memory_rate {
 public:
  /// An object that never rescales.
  memory_rate() = default;
  /// `rescales`: false for an object that never rescales.
  explicit memory_rate(bool rescales) : last_(rescales ? 1 : 0) {}

  /// Multiplies the memories by last rate / learning_rate and remembers the rate; to be called before they
  /// are used in a step with this learning rate. The memories stay as they are in the first step with a rate
  /// above 0, for an unchanged rate, and if the object never rescales.
  void rescale(context<device::cpu>& ctx, double learning_rate,
               std::initializer_list<std::span<T>> memories) {
    const auto rate = static_cast<T>(learning_rate);
    if (last_.size() == 0 || !(rate > T(0))) return;
    const T before = std::exchange(*last_.data(), rate);
    if (!(before > T(0)) || before == rate) return;
    const T factor = before / rate;
    const auto scale = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, scale<T>);
    for (const std::span<T> memory : memories) {
      T* const values = memory.data();
      ops::for_chunks(ctx, static_cast<index_t>(memory.size()), [=](index_t begin, index_t end) {
        scale(factor, values + begin, values + begin, end - begin);
      });
    }
  }

  /// Returns `states` followed by the state "exchange.memory_rate", the last learning rate, which is equal on
  /// all ranks. An object that never rescales returns `states` unchanged.
  std::vector<compressor_state<T>> after(std::vector<compressor_state<T>> states) {
    if (last_.size() > 0) states.push_back({"exchange.memory_rate", last_.span(), false});
    return states;
  }

 private:
  aligned_buffer<T> last_;  // last learning rate, 0 before the first step; empty if memories stay unscaled
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
