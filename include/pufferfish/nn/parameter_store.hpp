// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `parameter_store`: the arenas of a network. Values, gradients and buffers are each stored in one piece, so
/// that an optimizer is one loop and a gradient bucket is a range.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/memory.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/move_mark.hpp>
#include <pufferfish/nn/arena_layout.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Collects the state of a visitable object and lays it out. Parameters are packed without padding in reverse
/// execution order: the order in which a backward pass finishes them, the same on every rank. The visited
/// objects keep pointers into the arenas: the store must live as long as they are used, and moves with them.
///
/// For layers that compute in 16 bits, the store also keeps rounded copies of the values in an
/// arena of their own, each aligned for vector loads. They are written whenever the store gets new
/// values, by the optimizer's step, and by round().
///
/// The arenas may be stored on a device. The host may then access the visited objects only between
/// bring_to_host() and send_back().
///
/// A model owns its store; programs need this class to give single layers arenas, and to read the layout. Not
/// safe for concurrent calls.
///
/// \code
/// Linear<float> layer(8, 5);
/// parameter_store<float> store;
/// store.pack([&](state_visitor<float>& visitor) {
///   layer.visit([&](const char* name, parameter<float>& p) { visitor.on_parameter(name, p); });
/// });
/// store.values();      // 45 elements: bias, then weight
/// store.gradients();   // arranged as the values, zero
/// store.generation();  // 1; optimizers and exchanges remember it
/// \endcode
template <class T>
class parameter_store {
 public:
  using parameter_entry = stored_entry<parameter<T>>;
  using buffer_entry = stored_entry<state_buffer<T>>;

  static_assert(rounded_format_of<T> == rounded_format::none,
                "pufferfish: parameters of layers that compute in 16 bits are floats: parameter_t");

  /// A store without a layout whose arenas will be in the host's memory, without 16-bit copies.
  parameter_store() : parameter_store(host_memory()) {}
  /// Takes arenas from `source`, which must outlive the store; 16-bit copies have the format `rounded`.
  explicit parameter_store(memory_source& source, rounded_format rounded = rounded_format::none)
      : source_(&source), format_(rounded) {}

  /// Lays out everything that `visit(state_visitor<T>&)` shows, keeping all values. Gradients start
  /// at zero. Raises the generation: pointers into the arenas of an older generation are invalid.
  /// Values stored on the arenas' device are copied by the device, others are sent to it. If memory
  /// runs out, nothing has changed. Throws value_error, with the name, if two objects have the same
  /// name, and state_error for a moved-from object.
  template <class Visit>
  void pack(Visit&& visit) {
    detail::arena_layout<T> found(visit);
    if (found.any_on_device()) return pack_on_device(std::move(found));
    const index_t size = found.parameter_size, lead = lead_of(found);
    memory_block<T> values(host_memory(), size), buffers(host_memory(), found.buffer_size);
    auto gradients = std::make_shared<memory_block<T>>(*source_, size, lead);
    int id = 0;
    for (const parameter_entry& entry : found.parameters) {
      entry.thing->bind(values.data() + entry.offset, gradients->data() + entry.offset, id++);
    }
    for (const buffer_entry& entry : found.buffers) entry.thing->bind(buffers.data() + entry.offset);
    parameters_ = std::move(found.parameters);
    buffer_entries_ = std::move(found.buffers);
    values_ = std::move(values);
    gradients_ = std::move(gradients);
    buffers_ = std::move(buffers);
    start_generation();
    make_rounded();
    if (source_->on_host()) return round();
    host_values_ = std::exchange(values_, memory_block<T>(*source_, size, uninitialized, lead));
    host_buffers_ = std::exchange(buffers_, memory_block<T>(*source_, found.buffer_size, uninitialized));
    on_host_ = true;
    send_back(true);
  }

  /// Forgets all entries, and raises the generation: the visited objects may be gone. The arenas stay,
  /// because objects that are left still refer to them.
  void abandon() noexcept {
    parameters_.clear();
    buffer_entries_.clear();
    ++generation_;
  }

  /// Whether the host may access the values now.
  bool on_host() const { return source_->on_host() || on_host_; }

  /// Copies values and buffers from the device to the host and binds all parameters and buffers of the store
  /// to the copies; gradients stay on the device. Throws state_error if the values are on the host already,
  /// and backend_error.
  void bring_to_host() {
    if (on_host()) detail::throw_error<state_error>({"parameter_store: the values are on the host already"});
    host_values_ = memory_block<T>(host_memory(), values_.size(), uninitialized);
    host_buffers_ = memory_block<T>(host_memory(), buffers_.size(), uninitialized);
    values_.to_host(host_values_.span());
    buffers_.to_host(host_buffers_.span());
    relocate(host_values_.data(), host_buffers_.data(), false);
    on_host_ = true;
  }

  /// Undoes bring_to_host and, if `changed`, copies the host's values to the device's arenas.
  /// To be called once after each bring_to_host. Copying may throw backend_error; the objects then refer to
  /// the device's arenas already.
  void send_back(bool changed) {
    relocate(values_.data(), buffers_.data(), true);
    on_host_ = false;
    if (changed) {
      values_.from_host(std::as_const(host_values_).span());
      buffers_.from_host(std::as_const(host_buffers_).span());
      round();
    }
    host_values_ = {};
    host_buffers_ = {};
  }

  /// pack() for gradients alone, of parameters whose values stay in the memory of a host framework. values()
  /// and buffers() are empty then. Throws the errors of pack().
  template <class Visit>
  void pack_gradients(Visit&& visit) {
    detail::arena_layout<T> found(visit);
    auto gradients = std::make_shared<memory_block<T>>(host_memory(), found.parameter_size);
    int id = 0;
    for (const parameter_entry& entry : found.parameters) {
      entry.thing->attach(entry.thing->data(), gradients->data() + entry.offset, id++);
    }
    parameters_ = std::move(found.parameters);
    buffer_entries_.clear();
    gradients_ = std::move(gradients);
    values_ = {};
    buffers_ = {};
    start_generation();
  }

  /// Number of elements of all parameters, and so of the gradients' arena.
  index_t size() const { return gradients_ ? gradients_->size() : 0; }

  /// The arenas: all values, all gradients, all buffers, each in one piece and in the memory of the source.
  /// Spans are valid until the next layout (see generation()); after bring_to_host the visited objects, not
  /// these spans, are on the host.
  std::span<T> values() { return values_.span(); }
  std::span<const T> values() const { return values_.span(); }
  std::span<T> gradients() { return gradients_ ? gradients_->span() : std::span<T>(); }
  std::span<T> buffers() { return buffers_.span(); }
  std::span<const T> buffers() const { return buffers_.span(); }
  /// Shares the ownership of the gradients' arena. An exchange needs it: after a new layout, or the
  /// end of the network, its messages to and from the old arena may still be under way.
  std::shared_ptr<const void> gradient_memory() const { return gradients_; }

  /// Arena of the 16-bit copies (nullptr: none), and the offset of a parameter's copy in it, by its id. Code
  /// other than the store and optimizers calls round() after writing values(); it waits for the device.
  void* rounded() { return rounded_.data(); }
  std::span<const std::uint16_t> rounded_values() const { return rounded_.span(); }
  index_t rounded_offset(int id) const { return rounded_offsets_[static_cast<std::size_t>(id)]; }
  rounded_format rounded_as() const { return format_; }
  void round() {
    if constexpr (std::is_same_v<T, float>) {
      for (std::size_t i = 0; i < rounded_offsets_.size(); ++i) {
        const parameter_entry& entry = parameters_[i];
        source_->round(format_, values_.data() + entry.offset, rounded_.data() + rounded_offsets_[i],
                       entry.thing->size());
      }
    }
  }

  /// All parameters in arena order, with their names and offsets; the position in the list is the parameter's
  /// id. buffer_entries(): the same for buffers.
  const std::vector<parameter_entry>& parameters() const { return parameters_; }
  const std::vector<buffer_entry>& buffer_entries() const { return buffer_entries_; }

  /// Number of backward passes per step: 1, unless micro_batches says otherwise. A new layout sets it to 1.
  int passes() const { return passes_; }
  /// Sets the number of backward passes per step of all parameters, and resets their write counts.
  void set_passes(int passes) {
    passes_ = passes;
    for (const parameter_entry& entry : parameters_) entry.thing->set_passes(passes);
  }

  /// Number of layouts so far. Objects that keep addresses in the arenas (optimizers, exchanges) compare this
  /// number, and throw if the arenas were laid out again.
  std::uint64_t generation() const { return generation_.value(); }
  /// The same number, for objects that may outlive the store: moving or destroying the store, as by an
  /// assignment to its model, raises it. Throws state_error if the store was moved from.
  std::shared_ptr<const std::uint64_t> shared_generation() const {
    if (is_moved_from()) detail::moved_from("parameter_store");
    return generation_.shared();
  }
  /// A store that was moved from has no arenas until the next pack.
  bool is_moved_from() const { return moved_.is_set(); }

 private:
  // Parameters have just been bound, which sets their number of passes to 1.
  void start_generation() {
    passes_ = 1;
    ++generation_;
    moved_.clear();
  }

  // pack() for objects of which some have values on the device. The new arenas are complete before an object
  // is bound to them.
  PUFFERFISH_COLD void pack_on_device(detail::arena_layout<T> found) {
    const index_t size = found.parameter_size, lead = lead_of(found);
    memory_block<T> values(*source_, size, uninitialized, lead),
        buffers(*source_, found.buffer_size, uninitialized);
    auto gradients = std::make_shared<memory_block<T>>(*source_, size, lead);
    gather(found.parameters, values_, values);
    gather(found.buffers, buffers_, buffers);
    int id = 0;
    for (const parameter_entry& entry : found.parameters) {
      entry.thing->attach(values.data() + entry.offset, gradients->data() + entry.offset, id++, true);
    }
    for (const buffer_entry& entry : found.buffers)
      entry.thing->relocate(buffers.data() + entry.offset, true);
    parameters_ = std::move(found.parameters);
    buffer_entries_ = std::move(found.buffers);
    values_ = std::move(values);
    gradients_ = std::move(gradients);
    buffers_ = std::move(buffers);
    host_values_ = {};
    host_buffers_ = {};
    on_host_ = false;
    start_generation();
    make_rounded();
    round();
  }

  // Copies the values of all entries to a new arena on a device. Entries that are neighbours both
  // in the old and in the new arena are copied at once.
  template <class Entry>
  void gather(const std::vector<Entry>& entries, const memory_block<T>& old, memory_block<T>& arena) {
    const auto was_in_arena = [&](const T* place) {
      return !std::less<>()(place, old.data()) && std::less<>()(place, old.data() + old.size());
    };
    for (std::size_t i = 0; i < entries.size();) {
      const bool on_device = entries[i].thing->on_device();
      const T* from = entries[i].thing->data();
      T* to = arena.data() + entries[i].offset;
      index_t count = entries[i].thing->size();
      const bool in_arena = was_in_arena(from);
      for (++i; i < entries.size() && in_arena && entries[i].thing->data() == from + count; ++i) {
        if (!was_in_arena(from + count)) break;
        count += entries[i].thing->size();
      }
      if (count == 0) continue;
      const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
      on_device ? source_->copy(to, from, bytes) : source_->from_host(to, from, bytes);
    }
  }

  // Lays out the 16-bit copies, each at a multiple of 64 elements; round() fills them.
  void make_rounded() {
    if (format_ == rounded_format::none) return;
    constexpr index_t boundary = 64;
    rounded_offsets_.clear();
    index_t end = 0;
    for (const parameter_entry& entry : parameters_) {
      rounded_offsets_.push_back(end);
      end += (entry.thing->size() + boundary - 1) / boundary * boundary;
    }
    rounded_ = memory_block<std::uint16_t>(*source_, end, uninitialized);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].thing->set_rounded(rounded_.data() + rounded_offsets_[i]);
    }
  }

  // Lets parameters and buffers refer to memory at these addresses, arranged like the arenas.
  void relocate(T* values, T* buffers, bool on_device) {
    for (const parameter_entry& entry : parameters_) entry.thing->relocate(values + entry.offset, on_device);
    for (const buffer_entry& entry : buffer_entries_)
      entry.thing->relocate(buffers + entry.offset, on_device);
  }

  // Elements before the first parameter of an arena, for the alignment of vector loads on a device.
  index_t lead_of(const detail::arena_layout<T>& found) const {
    return source_->on_host() ? 0 : found.device_lead();
  }

  std::vector<parameter_entry> parameters_;
  std::vector<buffer_entry> buffer_entries_;
  memory_source* source_;
  rounded_format format_ = rounded_format::none;
  memory_block<T> values_, buffers_;
  std::shared_ptr<memory_block<T>> gradients_;
  memory_block<std::uint16_t> rounded_;
  std::vector<index_t> rounded_offsets_;
  memory_block<T> host_values_, host_buffers_;  // while the device's values are on the host
  bool on_host_ = false;
  int passes_ = 1;
  detail::layout_count generation_;
  detail::move_mark moved_;
};

namespace detail {

/// Brings a store's values to the host unless they are there already, and undoes that in its destructor. If
/// the arenas are on a device, the host's changes are discarded unless keep() is called.
///
///     host_scope scope(net.store());  // the host may read and write values and buffers from here on
///     ...
///     scope.keep();                   // after writing: updates the device's arenas and the 16-bit copies
template <class T>
class host_scope {
 public:
  /// The store must outlive the object. Throws backend_error if the copy to the host fails.
  explicit host_scope(parameter_store<T>& store) : all_(store), store_(store.on_host() ? nullptr : &store) {
    if (store_ != nullptr) store_->bring_to_host();
  }
  host_scope(const host_scope&) = delete;
  host_scope& operator=(const host_scope&) = delete;
  ~host_scope() {
    if (store_ != nullptr) store_->send_back(false);
  }

  /// Copies the values back as the host has left them.
  void keep() {
    if (store_ != nullptr) return std::exchange(store_, nullptr)->send_back(true);
    all_.round();
  }
  /// Leaves the values on the host.
  void release() { store_ = nullptr; }

 private:
  parameter_store<T>& all_;
  parameter_store<T>* store_;
};

}  // namespace detail

PUFFERFISH_NAMESPACE_END
