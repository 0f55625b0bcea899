// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `parameter<T>`: a trained tensor with its gradient. `state_buffer<T>`: a tensor of a layer's state that is
/// not trained. Each owns its memory until a network binds it to a place in an arena.

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/tensor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// How frameworks and files index a stored tensor: extents in their order, and strides (in elements) into the
/// storage of this library. A convolution's weight is stored as [kernel height][kernel width][in][out]; its
/// logical layout is [out][in][height][width].
struct logical_layout {
  /// Number of dimensions: 1, 2 or 4 in this library. Dimensions from `dims` on have extent 1 and stride 0.
  int dims = 0;
  extents<4> shape{};
  extents<4> strides{};

  /// Number of elements. Throws shape_error as volume does.
  index_t size() const {
    const index_t result = detail::checked_volume(shape.data(), static_cast<std::size_t>(dims));
    if (result < 0) detail::bad_extents(shape.data(), static_cast<std::size_t>(dims));
    return result;
  }
  friend bool operator==(const logical_layout&, const logical_layout&) = default;

  /// Layout of a vector of n elements.
  static logical_layout vector(index_t n) { return {1, {n, 1, 1, 1}, {1, 0, 0, 0}}; }
  /// Layout of an [out][in] matrix stored as [in][out]: the output index is innermost, as the kernels expect.
  static logical_layout matrix(index_t out, index_t in) { return {2, {out, in, 1, 1}, {1, out, 0, 0}}; }
  /// Layout of an [out][in][height][width] kernel stored as [height][width][in][out].
  static logical_layout kernel(index_t out, index_t in, index_t height, index_t width) {
    const extents<4> stored = row_major<4>({height, width, in, out});
    return {4, {out, in, height, width}, {stored[3], stored[2], stored[0], stored[1]}};
  }
};

/// Text of the logical extents, such as "[64 x 3 x 3 x 3]".
inline std::string to_string(const logical_layout& layout) {
  return detail::shape_text(layout.shape.data(), static_cast<std::size_t>(layout.dims));
}

namespace detail {

/// Elements that are either owned or stored in an external arena, on the host or on a device. A copy is
/// always deep, owned, and on the host. Elements on a device cannot be copied this way (state_error);
/// model::on_host copies them to the host.
template <class T>
class bindable_storage {
 public:
  /// Owns `size` elements on the host, all zero.
  explicit bindable_storage(index_t size) : own_(size), data_(own_.data()), size_(size) {}
  /// Refers to `size` elements on the host that are stored at `place` and must outlive the binding.
  bindable_storage(T* place, index_t size) : data_(place), size_(size) {}
  bindable_storage(const bindable_storage& other) : bindable_storage(other.size_) {
    other.require_host("copied");
    std::copy_n(other.data_, size_, data_);
  }
  bindable_storage(bindable_storage&& other) noexcept
      : own_(std::move(other.own_)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        on_device_(std::exchange(other.on_device_, false)) {}
  bindable_storage& operator=(bindable_storage other) noexcept {
    std::swap(own_, other.own_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(on_device_, other.on_device_);
    return *this;
  }

  T* data() const { return data_; }
  index_t size() const { return size_; }
  bool on_device() const { return on_device_; }

  /// Copies the elements to `place` on the host, frees owned memory and refers to `place` from then on.
  void bind(T* place) {
    require_host("moved");
    std::copy_n(data_, size_, place);
    attach(place, false);
  }
  /// Drops the current elements and refers to the elements stored at `place`.
  void attach(T* place, bool on_device) {
    data_ = place;
    own_ = {};
    on_device_ = on_device;
  }

 private:
  /// Throws state_error for elements on a device. `what`: the refused action, in the error text.
  void require_host(const char* what) const {
    if (on_device_) {
      throw_error<state_error>({"parameter: ", size_, " elements on a device cannot be ", what,
                                " by the host: use model::on_host"});
    }
  }

  aligned_buffer<T> own_;
  T* data_;
  index_t size_;
  bool on_device_ = false;
};

/// Throws state_error for access to the elements of a moved-from parameter.
[[noreturn]] PUFFERFISH_COLD inline void parameter_moved_from(const logical_layout& layout) {
  throw_error<state_error>({"parameter ", to_string(layout),
                            ": was moved from: use the layer that it was moved to, or assign a new one"});
}
/// Throws state_error for parameter::as<U>() with a 16-bit type U, if no store keeps rounded copies.
[[noreturn]] PUFFERFISH_COLD inline void no_rounded_copy() {
  throw_error<state_error>(
      {"parameter: a layer that computes in 16 bits belongs to no network that keeps rounded copies"});
}

}  // namespace detail

/// Role of a parameter, for the optimizer: biases and normalisation parameters are usually
/// exempt from weight decay.
enum class parameter_role { weight, bias, norm };

/// Origin of the elements of a parameter's gradient; see parameter::gradient_origin.
enum class gradient_source : unsigned char {
  program,   ///< zeros or values that the program has written into the arena; no layer has written it
  layer,     ///< written by a layer since the last exchange or optimizer step
  exchange,  ///< the result of an exchange that no optimizer step has used yet
  spent      ///< used by an optimizer's step
};

/// One trained tensor. A layer holds it as a member; the layer's `visit` exposes it by name.
///
/// Gradients: the first write of a step overwrites the gradient, later writes add to it (`accumulate()` tells
/// which). The gradient is ready after `writers` x `passes` writes: one per backward pass by default, more
/// for shared parameters and for several micro-batches a step.
///
/// A gradient that no layer has written since the last optimizer step counts as zero: the next exchange
/// zeroes this rank's part before the sum, an optimizer whose target was made from the store zeroes it before
/// the update. Weight decay and momentum still apply. There are two exceptions. The gradients of an arena
/// that no layer has ever written are used as they are. In a step in which no layer has written any gradient
/// of the store (a replayed graph), optimizers, and exchanges on a device, use all of its gradients as they
/// are. A program that writes single gradients itself calls set_gradient_origin(gradient_source::layer).
///
/// Copies are deep, own their memory and belong to no network. After a move, the source throws state_error on
/// access to its elements. The gradient and its counters are mutable through a const parameter, because a
/// backward pass is const; one thread at a time may run backward passes that write the same parameter.
///
/// \code
/// parameter<float> weight(logical_layout::matrix(10, 64), parameter_role::weight);
/// // [out][in] = [10][64], stored as [64][10]
/// fill_uniform(weight.values(), -0.1, 0.1, {1, 1});
/// tensor_view<float, 4> view = weight.logical();  // view(o, i, 0, 0)
/// \endcode
template <class T>
class parameter {
 public:
  /// Makes a parameter that owns its values, all zero. Throws shape_error for a negative extent and for more
  /// bytes than index_t counts.
  parameter(const logical_layout& layout, parameter_role role)
      : layout_(layout), role_(role), values_(layout.size()) {}

  /// Makes a parameter whose values are stored at `values`, in stored order, in memory of a host framework.
  /// That memory must outlive the parameter. (A copy of the parameter owns its values.)
  parameter(const logical_layout& layout, parameter_role role, T* values)
      : layout_(layout), role_(role), values_(values, layout.size()) {}

  /// Shape and strides of the values in the frameworks' order of dimensions.
  const logical_layout& layout() const { return layout_; }
  parameter_role role() const { return role_; }
  index_t size() const { return values_.size(); }

  /// Whether the elements were moved to another parameter.
  bool is_moved_from() const { return values_.data() == nullptr && layout_.size() > 0; }

  /// Elements in stored order. data(), values() and logical() throw state_error for a moved-from parameter.
  T* data() { return checked(); }
  const T* data() const { return checked(); }
  std::span<T> values() { return {checked(), static_cast<std::size_t>(size())}; }
  std::span<const T> values() const { return {checked(), static_cast<std::size_t>(size())}; }

  /// The elements for a layer that computes in U: the elements themselves if U is T, else the 16-bit rounded
  /// copies kept by the network's store. Throws state_error if no store keeps such copies.
  template <class U>
  const U* as() const {
    if constexpr (std::is_same_v<U, T>) {
      return data();
    } else {
      static_assert(std::is_same_v<parameter_t<U>, T>,
                    "pufferfish: no layer computes so from such parameters");
      if (rounded_ == nullptr && size() > 0) detail::no_rounded_copy();
      return static_cast<const U*>(rounded_);
    }
  }
  /// Sets the address of the 16-bit copies; nullptr if there are none.
  void set_rounded(const void* place) { rounded_ = place; }

  /// The elements in the layout of frameworks (see logical_layout).
  /// Four dimensions for any layout; unused ones have extent 1. A view is valid until the parameter is bound,
  /// attached, relocated, moved or destroyed.
  tensor_view<T, 4> logical() { return {checked(), layout_.shape, layout_.strides}; }
  tensor_view<const T, 4> logical() const { return {checked(), layout_.shape, layout_.strides}; }

  /// The gradient in stored order. A parameter that no network has bound allocates its gradient, with zeros,
  /// on first use.
  T* gradient_data() const {
    if (gradient_ == nullptr) {
      own_gradient_ = aligned_buffer<T>(size());
      gradient_ = own_gradient_.data();
    }
    return gradient_;
  }
  /// The gradient in stored order, and its view in the layout of frameworks (logical_layout). Allocates as
  /// gradient_data does.
  std::span<T> gradient() const { return {gradient_data(), static_cast<std::size_t>(size())}; }
  tensor_view<T, 4> logical_gradient() const { return {gradient_data(), layout_.shape, layout_.strides}; }

  /// Whether the next gradient write of a backward pass must add to the present values (else it overwrites).
  bool accumulate() const { return written_ > 0; }
  /// Records a gradient write. Returns true if it was the last one of the step: the gradient is ready.
  bool written() const {
    origin_ = gradient_source::layer;
    written_ = written_ + 1 >= writers_ * passes_ ? 0 : written_ + 1;
    return written_ == 0;
  }
  /// Sets the number of gradient writes per backward pass, >= 1 (not checked). Resets the write count.
  void set_writers(int writers) {
    writers_ = writers;
    written_ = 0;
  }
  int writers() const { return writers_; }
  /// Sets the number of backward passes per step, >= 1 (see micro_batches), and resets the write count.
  /// Binding to an arena sets the number to 1.
  void set_passes(int passes) {
    passes_ = passes;
    written_ = 0;
  }
  /// Number of gradient writes since the step began; reset to 0 by the step's last write.
  int writes() const { return written_; }
  /// Resets the write count of an abandoned step.
  void restart() const { written_ = 0; }

  /// Origin of the gradient's elements. Updated by layers, exchanges and optimizers.
  gradient_source gradient_origin() const { return origin_; }
  void set_gradient_origin(gradient_source source) const { origin_ = source; }

  /// Number of the parameter in its network's store, or -1 without a store.
  int id() const { return id_; }

  /// Whether the values are stored on a device, where the host must not touch them.
  bool on_device() const { return values_.on_device(); }

  /// Moves values and gradient to places in a network's arenas. The places must outlive the binding.
  /// The values are copied to value_place, the gradient's elements are not copied. Throws state_error if the
  /// values are on a device.
  void bind(T* value_place, T* gradient_place, int id) {
    values_.bind(value_place);
    refer_to(gradient_place, id);
  }

  /// Refers to values and gradient in memory of a host framework, in stored order. Nothing is copied. The
  /// places must outlive the binding. `gradient` may be nullptr if the gradient is never accessed.
  void attach(T* values, T* gradient, int id = -1, bool on_device = false) {
    values_.attach(values, on_device);
    refer_to(gradient, id);
  }

  /// Refers to values stored at `values` from now on, without a copy; that memory must outlive the binding.
  /// Gradient and id are unchanged.
  void relocate(T* values, bool on_device) { values_.attach(values, on_device); }

  /// Copies are deep, own their memory and belong to no network. The gradient is not copied.
  parameter(const parameter& other)
      : layout_(other.layout_), role_(other.role_), values_(other.values_), writers_(other.writers_) {}
  parameter(parameter&&) noexcept = default;
  parameter& operator=(const parameter& other) {
    if (this != &other) *this = parameter(other);
    return *this;
  }
  parameter& operator=(parameter&&) noexcept = default;
  ~parameter() = default;

 private:
  // Refers to a gradient that no layer has written yet.
  void refer_to(T* gradient, int id) {
    gradient_ = gradient;
    own_gradient_ = {};
    id_ = id;
    passes_ = 1;
    written_ = 0;
    origin_ = gradient_source::program;
  }

  // Address of the values. Throws state_error for a parameter that was moved from.
  T* checked() const {
    if (is_moved_from()) detail::parameter_moved_from(layout_);
    return values_.data();
  }

  logical_layout layout_;
  parameter_role role_;
  detail::bindable_storage<T> values_;
  const void* rounded_ = nullptr;
  mutable aligned_buffer<T> own_gradient_;
  mutable T* gradient_ = nullptr;
  mutable int written_ = 0;
  mutable gradient_source origin_ = gradient_source::program;
  int writers_ = 1, passes_ = 1;
  int id_ = -1;
};

/// A tensor that belongs to the state of a layer but is not trained (running means and variances). Mutable
/// through a const layer, since a training-mode forward pass updates it.
/// Initially zeros. Copies are deep; copying throws state_error if the values are on a device.
template <class T>
class state_buffer {
 public:
  /// Owns `size` elements, all zero. Throws shape_error for a negative size.
  explicit state_buffer(index_t size) : values_(size) {}

  index_t size() const { return values_.size(); }
  T* data() const { return values_.data(); }
  std::span<T> values() const { return {values_.data(), static_cast<std::size_t>(size())}; }
  logical_layout layout() const { return logical_layout::vector(size()); }

  /// Copies the values to `place` on the host, which must outlive the binding, and refers to them there.
  void bind(T* place) { values_.bind(place); }
  /// Refers to values stored at `values` from now on, without a copy; that memory must outlive the binding.
  void relocate(T* values, bool on_device) { values_.attach(values, on_device); }
  bool on_device() const { return values_.on_device(); }

 private:
  detail::bindable_storage<T> values_;
};

PUFFERFISH_NAMESPACE_END
