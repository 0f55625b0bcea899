// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `optimizer_target`: what an optimizer works on: the arenas of a network, and which parts of them decay.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A range of the arenas, usually one parameter.
struct arena_segment {
  index_t offset = 0;
  index_t size = 0;
  bool decay = true;  ///< whether weight decay is meant for it: weights yes, biases and normalisation no
};

/// Values and gradients of a network, side by side, and when they stop being valid.
template <class T>
struct optimizer_target {
  std::span<T> values;
  std::span<const T> gradients;
  std::vector<arena_segment> segments;        ///< in order, without gaps, over all values
  const std::uint64_t* generation = nullptr;  ///< the network's counter of layouts; nullptr: never changes
  std::uint64_t expected_generation = 0;

  /// Throws state_error, naming `who`, if the network has got new arenas since.
  void require_current(const char* who) const {
    if (generation != nullptr && *generation != expected_generation) {
      PUFFERFISH_THROW(state_error(std::string(who) + ": made for generation " +
                                   std::to_string(expected_generation) + " of the network, which is now at " +
                                   std::to_string(*generation) +
                                   ": its parameters have moved; make a new optimizer"));
    }
  }

  /// Throws shape_error, naming `who`, unless gradients and segments cover the values exactly.
  void require_covered(const char* who) const {
    index_t end = 0;
    for (const arena_segment& segment : segments) {
      if (segment.offset != end || segment.size < 0) {
        PUFFERFISH_THROW(shape_error(std::string(who) + ": a segment of " + std::to_string(segment.size) +
                                     " elements at " + std::to_string(segment.offset) +
                                     ", where the last one ended at " + std::to_string(end)));
      }
      end += segment.size;
    }
    if (end != static_cast<index_t>(values.size()) || gradients.size() != values.size()) {
      PUFFERFISH_THROW(shape_error(std::string(who) + ": " + std::to_string(values.size()) + " values, " +
                                   std::to_string(gradients.size()) + " gradients, segments for " +
                                   std::to_string(end)));
    }
  }
};

/// The arenas of a network, parameter by parameter; only those of role weight decay. The store must outlive
/// the target.
template <class T>
optimizer_target<T> make_optimizer_target(parameter_store<T>& store) {
  optimizer_target<T> target{store.values(), store.gradients(), {}, &store.generation(), store.generation()};
  for (const auto& entry : store.parameters()) {
    target.segments.push_back(
        {entry.offset, entry.thing->size(), entry.thing->role() == parameter_role::weight});
  }
  return target;
}

PUFFERFISH_NAMESPACE_END
