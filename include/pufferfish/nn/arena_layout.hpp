// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The layout of the arenas of a parameter_store: which tensor is stored where.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/parameter.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/containers/layer_visitors.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A named tensor of a parameter_store, and its offset in the arena, in elements. `Thing` is parameter<T> or
/// state_buffer<T>; the object belongs to a layer.
template <class Thing>
struct stored_entry {
  /// Name of the tensor in its model, such as "layer1.0.conv1.weight".
  std::string name;
  Thing* thing;
  index_t offset;
};

namespace detail {

/// Throws value_error, with the name, if two names are equal.
PUFFERFISH_COLD inline void check_distinct(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw_error<value_error>({"parameter_store: two parameters or buffers are called \"", *twice,
                              "\": give the layers that hold them different names"});
  }
}

/// Counts the layouts of a store. Moving or destroying the store counts as a new layout, so that objects made
/// for its old layout detect the change. They share the number, and may read it after the store is gone.
class layout_count {
 public:
  layout_count() = default;
  layout_count(const layout_count&) = delete;
  layout_count(layout_count&& other) noexcept : value_(std::move(other.value_)) { raise(value()); }
  layout_count& operator=(const layout_count&) = delete;
  /// The count becomes larger than both counts, so that users of either layout detect the change.
  layout_count& operator=(layout_count&& other) noexcept {
    const std::uint64_t before = value();
    raise(before);
    value_ = std::move(other.value_);
    raise(std::max(before, value()));
    return *this;
  }
  ~layout_count() { raise(value()); }

  /// The number of layouts; 0 after a move from this object.
  std::uint64_t value() const { return value_ == nullptr ? 0 : *value_; }
  /// The number, shared; nullptr after a move from this object.
  const std::shared_ptr<std::uint64_t>& shared() const { return value_; }
  /// Counts a new layout.
  void operator++() {
    if (value_ == nullptr) value_ = std::make_shared<std::uint64_t>(0);
    ++*value_;
  }

 private:
  // Sets the number, if there is one, to above + 1.
  void raise(std::uint64_t above) {
    if (value_ != nullptr) *value_ = above + 1;
  }

  std::shared_ptr<std::uint64_t> value_ = std::make_shared<std::uint64_t>(0);
};

/// A layout of a store, for objects that keep addresses in its arenas. May outlive the store.
class layout_watch {
 public:
  explicit layout_watch(std::shared_ptr<const std::uint64_t> count) : now_(std::move(count)), then_(*now_) {}
  /// Whether the store has another layout since the construction, was moved from, or is gone.
  bool changed() const { return *now_ != then_; }
  /// Throws state_error, by the name of the exchange, if the layout has changed.
  void require_unchanged(const char* exchange) const {
    if (changed()) {
      throw_error<state_error>({exchange, ": the network has new arenas; make a new exchange"});
    }
  }
  /// The number of layouts now, and at the construction.
  std::uint64_t now() const { return *now_; }
  std::uint64_t then() const { return then_; }

 private:
  std::shared_ptr<const std::uint64_t> now_;
  std::uint64_t then_;
};

/// State visitor that collects the parameters and buffers of a model and assigns their places in the arenas:
/// parameters in the reverse of the visit's order, which is the order in which a backward pass completes
/// their gradients; buffers in the visit's order; both without gaps.
template <class T>
class arena_layout final : public state_visitor<T> {
 public:
  /// The entries of the two arenas, with ascending offsets.
  std::vector<stored_entry<parameter<T>>> parameters;
  std::vector<stored_entry<state_buffer<T>>> buffers;
  index_t parameter_size = 0, buffer_size = 0;  ///< elements of the arenas

  /// Collects what `visit(state_visitor<T>&)` shows. Throws value_error, with the name, if two objects have
  /// the same name, and state_error for a moved-from parameter.
  template <class Visit>
  explicit arena_layout(const Visit& visit) {
    visit(*this);
    std::vector<std::string> names;
    for (const auto& entry : parameters) names.push_back(entry.name);
    for (const auto& entry : buffers) names.push_back(entry.name);
    check_distinct(std::move(names));
    std::reverse(parameters.begin(), parameters.end());
    parameter_size = place(parameters);
    buffer_size = place(buffers);
  }

  /// Records a parameter; offsets are assigned when all are known. Throws state_error if it was moved from.
  void on_parameter(const std::string& name, parameter<T>& p) override {
    if (p.is_moved_from()) moved_from("parameter_store: the layer of " + name);
    parameters.push_back({name, &p, 0});
  }
  void on_buffer(const std::string& name, state_buffer<T>& b) override { buffers.push_back({name, &b, 0}); }

  /// Whether a parameter or buffer is stored on a device.
  bool any_on_device() const {
    const auto lies_there = [](const auto& entry) { return entry.thing->on_device(); };
    return std::any_of(parameters.begin(), parameters.end(), lies_there) ||
           std::any_of(buffers.begin(), buffers.end(), lies_there);
  }

  /// Start of a device's arena, in elements from a 16-byte boundary, that aligns the parameters with most
  /// elements. Parameters are packed, so one of odd size (the bias of ten classes, which comes first)
  /// misaligns all that follow for the 16-byte vector loads of a device.
  index_t device_lead() const {
    constexpr index_t vector = 16 / static_cast<index_t>(sizeof(T));
    // gain[k]: number of elements of the parameters that are aligned if the arena starts k elements after a
    // boundary.
    std::array<index_t, static_cast<std::size_t>(vector)> gain{};
    for (const auto& entry : parameters) {
      gain[static_cast<std::size_t>((vector - entry.offset % vector) % vector)] += entry.thing->size();
    }
    return std::max_element(gain.begin(), gain.end()) - gain.begin();
  }

 private:
  // Assigns offsets from 0 on, and returns the sum of the sizes.
  template <class Entries>
  static index_t place(Entries& entries) {
    index_t offset = 0;
    for (auto& entry : entries) {
      entry.offset = offset;
      offset += entry.thing->size();
    }
    return offset;
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
