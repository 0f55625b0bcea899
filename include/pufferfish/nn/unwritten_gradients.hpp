// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: sets to zero the gradients of parameters that backward passes have stopped writing. Layers
/// overwrite gradients, so that nothing else would remove the values of an earlier step.

#include <algorithm>

#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// For an exchange, when the rank's own backward passes of a step are done and before their gradients are
/// summed: calls zero(offset, size) for each parameter that no layer has written since the last exchange or
/// optimizer step. Where no layer has ever written any gradient of the store, the program fills the arena
/// itself, and nothing is zeroed. `replays`: the passes may be a graph's, whose writes the host does not see;
/// then a step without any write counts as a replay of all.
template <class T, class Zero>
void zero_before_exchange(const parameter_store<T>& store, bool replays, Zero&& zero) {
  const auto any = [&](auto&& test) {
    return std::any_of(store.parameters().begin(), store.parameters().end(),
                       [&](const auto& entry) { return test(entry.thing->gradient_origin()); });
  };
  if (!any([](gradient_source s) { return s != gradient_source::program; })) return;
  const bool replayed = replays && !any([](gradient_source s) { return s == gradient_source::layer; });
  for (const auto& entry : store.parameters()) {
    const gradient_source source = entry.thing->gradient_origin();
    const bool old = source == gradient_source::exchange || source == gradient_source::spent;
    if (old && !replayed) zero(entry.offset, entry.thing->size());
    entry.thing->set_gradient_origin(gradient_source::exchange);
  }
}

/// The same for an optimizer. A step in which neither a layer nor an exchange has written any gradient since
/// the last one takes the arena as it is: the program has filled it, or has replayed a graph.
class zero_before_step {
 public:
  void begin() { looked_ = false; }

  /// Before the update of elements offset .. offset + size. Does nothing without a store.
  template <class T, class Zero>
  void use(const parameter_store<T>* store, index_t offset, index_t size, Zero&& zero) {
    if (store == nullptr) return;
    const auto& entries = store->parameters();
    if (!looked_) {
      looked_ = true;
      fresh_ = std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
        const gradient_source source = entry.thing->gradient_origin();
        return source == gradient_source::layer || source == gradient_source::exchange;
      });
    }
    if (!fresh_) return;
    auto entry = std::partition_point(entries.begin(), entries.end(),
                                      [=](const auto& e) { return e.offset < offset; });
    for (; entry != entries.end() && entry->offset < offset + size; ++entry) {
      const gradient_source source = entry->thing->gradient_origin();
      if (source == gradient_source::program) continue;
      if (source == gradient_source::spent) zero(entry->offset, entry->thing->size());
      entry->thing->set_gradient_origin(gradient_source::spent);
    }
  }

 private:
  bool looked_ = false;  // at the store, in this step
  bool fresh_ = false;   // whether any gradient has been written since the last step
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
