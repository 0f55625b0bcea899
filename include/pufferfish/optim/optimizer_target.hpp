// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `optimizer_target`: the arrays (arenas) of values and gradients that an optimizer updates, and the
/// segments of them that weight decay applies to. Segments must cover the values without gaps:
///
/// \code
/// auto target = make_optimizer_target(net.store());  // a network's arenas
///
/// optimizer_target<float> own{values, gradients};     // any two spans of one length
/// own.segments = {{.offset = 0, .size = 800}, {.offset = 800, .size = 10, .decay = false}};
/// SGD<float> optimizer(own, {.weight_decay = 1e-4});
/// \endcode

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A range of the arrays (arenas) of values and gradients, usually one parameter. Offset and size are in
/// elements.
struct arena_segment {
  index_t offset = 0;
  index_t size = 0;
  bool decay = true;    ///< whether weight decay applies by default: not to biases and normalisation
  index_t rounded = 0;  ///< offset of its 16-bit copies in the arena of these copies
  /// Excludes the segment from weight decay, whatever the optimizer's options say, because another term of
  /// the loss decays it (see frobenius_decay).
  bool exempt = false;
};

/// The arrays that an optimizer updates, without ownership: they must exist as long as an optimizer uses the
/// target. Values and gradients have one length and do not overlap. `generation` detects that a network has
/// moved its parameters to other arrays (factorize() and merge() do): the spans are not valid any more then.
template <class T>
struct optimizer_target {
  std::span<T> values;
  std::span<const T> gradients;
  std::vector<arena_segment> segments;  ///< sorted by offset, without gaps, covering all values
  /// The network's layout counter; nullptr: the layout is constant.
  std::shared_ptr<const std::uint64_t> generation = nullptr;
  std::uint64_t expected_generation = 0;
  void* rounded = nullptr;  ///< 16-bit copies of the values, updated by each step (parameter_store::rounded)
  rounded_format rounded_as = rounded_format::none;
  /// The store of the gradients, if the optimizer shall zero gradients that layers have stopped writing (see
  /// parameter). nullptr: gradients are used as they are.
  parameter_store<T>* store = nullptr;

  /// Throws state_error, naming `who`, if the network's parameters have moved to new memory since the target
  /// was made, or if the network was assigned another value or destroyed.
  void require_current(const char* who) const {
    if (generation != nullptr && *generation != expected_generation) {
      PUFFERFISH_THROW(state_error(std::string(who) + ": made for generation " +
                                   std::to_string(expected_generation) + " of the network, which is now at " +
                                   std::to_string(*generation) +
                                   ": its parameters have moved or are gone; make a new optimizer"));
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

namespace detail {

/// An optimizer's tasks: the segments of a target, cut into pieces of at most `piece` elements. No piece
/// crosses a segment's end, so steps over ranges of whole segments compute the same as one step over all.
class arena_tasks {
 public:
  /// Cuts the segments into pieces of at most `piece` elements. `decay_all`: also parameters without weight
  /// decay get it.
  arena_tasks(const std::vector<arena_segment>& segments, bool decay_all, index_t piece) {
    for (const arena_segment& segment : segments) {
      for (index_t begin = 0; begin < segment.size; begin += piece) {
        tasks_.push_back({segment.offset + begin, std::min(piece, segment.size - begin),
                          (segment.decay || decay_all) && !segment.exempt, segment.rounded + begin});
      }
    }
  }

  /// Sorted by offset.
  const std::vector<arena_segment>& tasks() const { return tasks_; }

  /// Returns the tasks of elements offset .. offset + size - 1: the index of the first task and their number.
  /// Throws value_error, naming `who`, unless the elements are whole segments.
  struct task_range {
    index_t first, count;
  };
  task_range tasks_of(const char* who, index_t offset, index_t size) const {
    const auto from = [this](index_t element) {
      return std::partition_point(tasks_.begin(), tasks_.end(),
                                  [=](const arena_segment& task) { return task.offset < element; });
    };
    const auto first = from(offset), last = from(offset + size);
    const index_t begins = first == tasks_.end() ? end_of_all() : first->offset;
    const index_t ends = first == last ? begins : (last - 1)->offset + (last - 1)->size;
    if (size < 0 || (size > 0 && (begins != offset || ends != offset + size))) {
      throw_error<value_error>({who, ": elements ", offset, " .. ", offset + size,
                                " are no whole parameters of ", end_of_all(), " elements"});
    }
    return {first - tasks_.begin(), last - first};
  }

 private:
  // End of the last task.
  index_t end_of_all() const { return tasks_.empty() ? 0 : tasks_.back().offset + tasks_.back().size; }

  std::vector<arena_segment> tasks_;
};

}  // namespace detail

/// Makes the target for the arrays of a network's store, with one segment per parameter. Weight decay applies
/// to parameters whose role is `weight`, not to biases and normalisation. From this call on the store must
/// stay at its address. Throws state_error if the store's contents have been moved to another store. When the
/// network moves its parameters to new arrays (factorize, merge, ...), is assigned another value or is
/// destroyed, the target becomes invalid: the optimizer's next step throws state_error.
template <class T>
optimizer_target<T> make_optimizer_target(parameter_store<T>& store) {
  if (store.is_moved_from()) detail::moved_from("make_optimizer_target: the parameter_store");
  optimizer_target<T> target{
      store.values(),  store.gradients(),  {},    store.shared_generation(), store.generation(),
      store.rounded(), store.rounded_as(), &store};
  for (const auto& entry : store.parameters()) {
    target.segments.push_back({entry.offset, entry.thing->size(),
                               entry.thing->role() == parameter_role::weight,
                               store.rounded() == nullptr ? 0 : store.rounded_offset(entry.thing->id())});
  }
  return target;
}

PUFFERFISH_NAMESPACE_END
