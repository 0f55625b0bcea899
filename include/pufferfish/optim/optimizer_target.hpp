// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `optimizer_target`: what an optimizer works on: the arenas of a network, and which parts of them decay.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/lowrank/shape_check.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A range of the arenas, usually one parameter.
struct arena_segment {
  index_t offset = 0;
  index_t size = 0;
  bool decay = true;    ///< whether weight decay is meant for it: weights yes, biases and normalisation no
  index_t rounded = 0;  ///< where its copies in 16 bits begin, in an arena of those
  /// No weight decay, whatever the optimizer's options say: another term of the loss decays the segment (see
  /// frobenius_decay).
  bool exempt = false;
};

/// Values and gradients of a network, side by side, and when they stop being valid.
template <class T>
struct optimizer_target {
  std::span<T> values;
  std::span<const T> gradients;
  std::vector<arena_segment> segments;        ///< in order, without gaps, over all values
  const std::uint64_t* generation = nullptr;  ///< the network's counter of layouts; nullptr: never changes
  std::uint64_t expected_generation = 0;
  void* rounded = nullptr;  ///< copies of the values that a step renews (parameter_store::rounded)
  rounded_format rounded_as = rounded_format::none;
  /// Where the gradients are, if an optimizer shall set those to zero that layers have stopped writing (see
  /// parameter); nullptr: gradients are taken as they are.
  parameter_store<T>* store = nullptr;

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

namespace detail {

/// An optimizer's work: the segments of a target, cut into pieces of a size for one task. No piece crosses a
/// segment's end, so a step over ranges of whole segments takes the very steps of one over everything.
class arena_tasks {
 public:
  arena_tasks(const std::vector<arena_segment>& segments, bool decay_all, index_t piece = 32768) {
    for (const arena_segment& segment : segments) {
      for (index_t begin = 0; begin < segment.size; begin += piece) {
        tasks_.push_back({segment.offset + begin, std::min(piece, segment.size - begin),
                          (segment.decay || decay_all) && !segment.exempt, segment.rounded + begin});
      }
    }
  }

  /// In order of their offsets.
  const std::vector<arena_segment>& tasks() const { return tasks_; }

  /// The tasks of elements offset .. offset + size, from number `first` on. Throws value_error, naming `who`,
  /// unless these are whole segments.
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

  /// Calls f(task) for them.
  template <class F>
  void run(context<device::cpu>& ctx, const char* who, index_t offset, index_t size, F&& f) const {
    const task_range range = tasks_of(who, offset, size);
    ctx.parallel_for(range.count,
                     [&](index_t task, int) { f(tasks_[static_cast<std::size_t>(range.first + task)]); });
  }

 private:
  index_t end_of_all() const { return tasks_.empty() ? 0 : tasks_.back().offset + tasks_.back().size; }

  std::vector<arena_segment> tasks_;
};

}  // namespace detail

/// The arenas of a network, parameter by parameter; only those of role weight decay. The store must outlive
/// the target and stay where it is. Throws state_error if it was moved from.
template <class T>
optimizer_target<T> make_optimizer_target(parameter_store<T>& store) {
  if (store.is_moved_from()) detail::moved_from("make_optimizer_target: the parameter_store");
  optimizer_target<T> target{
      store.values(),  store.gradients(),  {},    &store.generation(), store.generation(),
      store.rounded(), store.rounded_as(), &store};
  for (const auto& entry : store.parameters()) {
    target.segments.push_back({entry.offset, entry.thing->size(),
                               entry.thing->role() == parameter_role::weight,
                               store.rounded() == nullptr ? 0 : store.rounded_offset(entry.thing->id())});
  }
  return target;
}

PUFFERFISH_NAMESPACE_END
