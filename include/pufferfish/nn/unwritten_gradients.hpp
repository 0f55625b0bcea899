// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: sets to zero the gradients of parameters that backward passes have stopped writing. Layers
/// overwrite gradients, so that nothing else would remove the values of an earlier step.

#include <algorithm>

#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// To be called by an exchange after the rank's own backward passes of a step, before gradients are
/// summed: calls zero(offset, size) for each parameter that no layer has written since the last exchange
/// or optimizer step. If no layer has ever written any gradient of the store, the program fills the
/// arena itself, and nothing is zeroed. `replays`: the passes may be replays of a graph, whose writes
/// the host does not see; a step without any write then counts as a replay that writes all gradients.
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

/// Throws state_error, naming the optimizer and the first such parameter, if some but not all gradient writes
/// of a step have been made: the gradient is that of a part of the step, and later steps would go on from it.
template <class T>
void require_whole_gradients(const char* optimizer, const parameter_store<T>& store) {
  for (const auto& entry : store.parameters()) {
    const int writes = entry.thing->writes();
    if (writes == 0) continue;
    throw_error<state_error>({optimizer, ": ", entry.name, " has had ", writes, " of ",
                              entry.thing->writers() * store.passes(),
                              " gradient writes of this step; make the others, or call "
                              "micro_batches::restart before a new step"});
  }
}

/// Before an optimizer's step, zeroes gradients that were not written in the last backward pass. If neither a
/// layer nor an exchange has written any gradient since the last step, the arena is used unchanged: the
/// program has filled it, or has replayed a graph.
///
///     unwritten.begin();                                 // each step
///     unwritten.use(store, offset, size, zero);          // before elements are updated
class zero_before_step {
 public:
  /// Begins a step.
  void begin() { looked_ = false; }

  /// To be called before elements offset .. offset + size are updated. Does nothing without a store.
  template <class T, class Zero>
  void use(const parameter_store<T>* store, index_t offset, index_t size, Zero&& zero) {
    if (store == nullptr || !is_fresh(*store)) return;
    const auto& entries = store->parameters();
    auto entry = std::partition_point(entries.begin(), entries.end(),
                                      [=](const auto& e) { return e.offset < offset; });
    for (; entry != entries.end() && entry->offset < offset + size; ++entry) {
      const gradient_source source = entry->thing->gradient_origin();
      if (source == gradient_source::program) continue;
      if (source == gradient_source::spent) zero(entry->offset, entry->thing->size());
      entry->thing->set_gradient_origin(gradient_source::spent);
    }
  }

  /// To be called before a term that no layer computes is added to the gradient of a parameter of the
  /// store: calls zero(offset, size) if the gradient is that of an earlier step, and marks the gradient as
  /// one that the optimizer's step has to use. In a step without any write the gradient stays as it is.
  template <class T, class Zero>
  void prepare(const parameter_store<T>& store, const stored_entry<parameter<T>>& entry, Zero&& zero) {
    if (!is_fresh(store)) return;
    if (entry.thing->gradient_origin() == gradient_source::spent) zero(entry.offset, entry.thing->size());
    // With this origin the optimizer uses the gradient, and the next exchange counts it as an old one, which
    // the exchange zeroes unless a layer has written it since.
    entry.thing->set_gradient_origin(gradient_source::exchange);
  }

 private:
  // Whether a layer or an exchange has written any gradient since the last step; tested once per step.
  template <class T>
  bool is_fresh(const parameter_store<T>& store) {
    if (looked_) return fresh_;
    looked_ = true;
    const auto& entries = store.parameters();
    fresh_ = std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
      const gradient_source source = entry.thing->gradient_origin();
      return source == gradient_source::layer || source == gradient_source::exchange;
    });
    return fresh_;
  }

  bool looked_ = false;  // fresh_ is known for this step
  bool fresh_ = false;   // whether any gradient has been written since the last step
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
