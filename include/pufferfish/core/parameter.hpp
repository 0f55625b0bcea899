// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `parameter<T>` (a trained tensor with its gradient) and `state_buffer<T>` (a kept tensor that is not
/// trained). Each owns its memory until a network binds it to a place in an arena.

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/tensor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// How frameworks and files see a stored tensor: extents in their order, strides (elements) onto our storage.
/// A convolution's weight lies as [kernel height][kernel width][in][out] and is seen as
/// [out][in][height][width].
struct logical_layout {
  int dims = 0;
  extents<4> shape{};
  extents<4> strides{};

  /// Elements. Throws shape_error as volume does.
  index_t size() const {
    const index_t result = detail::checked_volume(shape.data(), static_cast<std::size_t>(dims));
    if (result < 0) detail::bad_extents(shape.data(), static_cast<std::size_t>(dims));
    return result;
  }
  friend bool operator==(const logical_layout&, const logical_layout&) = default;

  /// A vector of n elements.
  static logical_layout vector(index_t n) { return {1, {n, 1, 1, 1}, {1, 0, 0, 0}}; }
  /// An [out][in] matrix whose storage is [in][out]: outputs innermost, as the kernels read it.
  static logical_layout matrix(index_t out, index_t in) { return {2, {out, in, 1, 1}, {1, out, 0, 0}}; }
  /// An OIHW kernel whose storage is HWIO.
  static logical_layout kernel(index_t out, index_t in, index_t height, index_t width) {
    const extents<4> stored = row_major<4>({height, width, in, out});
    return {4, {out, in, height, width}, {stored[3], stored[2], stored[0], stored[1]}};
  }
};

/// "[64 x 3 x 3 x 3]": the logical extents.
inline std::string to_string(const logical_layout& layout) {
  return detail::shape_text(layout.shape.data(), static_cast<std::size_t>(layout.dims));
}

namespace detail {

/// Elements that are either owned or lie in somebody's arena, on the host or on a device. A copy is always
/// deep, owned, and on the host; of elements on a device there is none (state_error): model::on_host brings
/// them.
template <class T>
class bindable_storage {
 public:
  explicit bindable_storage(index_t size) : own_(size), data_(own_.data()), size_(size) {}
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

  /// Moves the elements to `place`, on the host, and stays bound to it.
  void bind(T* place) {
    require_host("moved");
    std::copy_n(data_, size_, place);
    attach(place, false);
  }
  /// Gives up the elements for those that lie at `place`.
  void attach(T* place, bool on_device) {
    data_ = place;
    own_ = {};
    on_device_ = on_device;
  }

 private:
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

}  // namespace detail

namespace detail {

[[noreturn]] PUFFERFISH_COLD inline void parameter_moved_from(const logical_layout& layout) {
  throw_error<state_error>({"parameter ", to_string(layout),
                            ": was moved from: use the layer that it was moved to, or assign a new one"});
}
[[noreturn]] PUFFERFISH_COLD inline void no_rounded_copy() {
  throw_error<state_error>(
      {"parameter: a layer that computes in 16 bits belongs to no network that keeps rounded copies"});
}

}  // namespace detail

/// What the optimizer needs to know: biases and normalisation parameters are usually exempt from weight
/// decay.
enum class parameter_role { weight, bias, norm };

/// What the elements of a parameter's gradient are: see parameter::gradient_origin.
enum class gradient_source : unsigned char {
  program,   ///< zeros, or what the program has written into the arena; no layer has written it
  layer,     ///< written by a layer since the last exchange or optimizer step
  exchange,  ///< the result of an exchange, which no optimizer has used
  spent      ///< used by an optimizer's step
};

/// One trained tensor. A layer holds it as a member; `visit` shows it to the world by name.
///
/// Gradients: the first writer of a step overwrites, later ones add (`accumulate()` says which). The gradient
/// is ready when `writers` writes are done: one a backward pass, more for shared parameters and for several
/// micro-batches a step.
///
/// The gradient of a parameter that no layer has written since the last optimizer step is zero: the next
/// exchange sets this rank's part to zero before it sums, and an optimizer whose target was made from the
/// store does so before it updates. Weight decay and momentum go on. Two cases are left to the program. An
/// arena that no layer has ever written is taken as it is; and so are the gradients of a step in which no
/// layer has written any of the store's (a replayed graph), by optimizers and by exchanges on a device. A
/// program that writes single gradients by itself calls set_gradient_origin(gradient_source::layer).
template <class T>
class parameter {
 public:
  parameter(const logical_layout& layout, parameter_role role)
      : layout_(layout), role_(role), values_(layout.size()) {}

  /// One whose values lie at `values`, in stored order, in the memory of a host framework; they must outlive
  /// it. (A copy owns its values.)
  parameter(const logical_layout& layout, parameter_role role, T* values)
      : layout_(layout), role_(role), values_(values, layout.size()) {}

  const logical_layout& layout() const { return layout_; }
  parameter_role role() const { return role_; }
  index_t size() const { return values_.size(); }

  /// Whether its elements were moved to another parameter.
  bool is_moved_from() const { return values_.data() == nullptr && layout_.size() > 0; }

  /// Elements in stored order. These and logical() throw state_error if the parameter was moved from.
  T* data() { return checked(); }
  const T* data() const { return checked(); }
  std::span<T> values() { return {checked(), static_cast<std::size_t>(size())}; }
  std::span<const T> values() const { return {checked(), static_cast<std::size_t>(size())}; }

  /// The elements for a layer that computes in U: themselves, or where U has 16 bits the copies of them that
  /// the network's store keeps; state_error where no store does.
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
  /// Says where these copies are; nullptr: nowhere.
  void set_rounded(const void* place) { rounded_ = place; }

  /// The elements as frameworks see them (see logical_layout).
  tensor_view<T, 4> logical() { return {checked(), layout_.shape, layout_.strides}; }
  tensor_view<const T, 4> logical() const { return {checked(), layout_.shape, layout_.strides}; }

  /// The gradient in stored order; made on first use for a layer that no network has bound.
  T* gradient_data() const {
    if (gradient_ == nullptr) {
      own_gradient_ = aligned_buffer<T>(size());
      gradient_ = own_gradient_.data();
    }
    return gradient_;
  }
  std::span<T> gradient() const { return {gradient_data(), static_cast<std::size_t>(size())}; }
  tensor_view<T, 4> logical_gradient() const { return {gradient_data(), layout_.shape, layout_.strides}; }

  /// For a backward pass about to write the gradient: whether it must add to what is there.
  bool accumulate() const { return written_ > 0; }
  /// A backward pass has written. True if that was the step's last write: the gradient is ready.
  bool written() const {
    origin_ = gradient_source::layer;
    written_ = written_ + 1 >= writers_ * passes_ ? 0 : written_ + 1;
    return written_ == 0;
  }
  /// Number of writes per backward pass, >= 1.
  void set_writers(int writers) {
    writers_ = writers;
    written_ = 0;
  }
  int writers() const { return writers_; }
  /// Number of backward passes per step, >= 1: see micro_batches. Binding to an arena sets it to 1.
  void set_passes(int passes) {
    passes_ = passes;
    written_ = 0;
  }
  /// Number of writes since the step began; 0 after the step's last write.
  int writes() const { return written_; }
  /// Forgets the writes of an abandoned step.
  void restart() const { written_ = 0; }

  /// What the gradient's elements are. Kept by layers, exchanges and optimizers.
  gradient_source gradient_origin() const { return origin_; }
  void set_gradient_origin(gradient_source source) const { origin_ = source; }

  /// Position in the network's arenas, or -1.
  int id() const { return id_; }

  /// Whether the values are stored on a device, where the host must not touch them.
  bool on_device() const { return values_.on_device(); }

  /// Moves values and gradient to their places in a network's arenas. The places must outlive the binding.
  void bind(T* value_place, T* gradient_place, int id) {
    values_.bind(value_place);
    gradient_ = gradient_place;
    own_gradient_ = {};
    id_ = id;
    passes_ = 1;
    written_ = 0;
    origin_ = gradient_source::program;
  }

  /// Takes values and gradient of a host framework for its own, as they lie there in stored order; nothing is
  /// copied. The places must outlive the binding; the gradient's may be nullptr if it is never asked for.
  void attach(T* values, T* gradient, int id = -1, bool on_device = false) {
    values_.attach(values, on_device);
    gradient_ = gradient;
    own_gradient_ = {};
    id_ = id;
    passes_ = 1;
    written_ = 0;
    origin_ = gradient_source::program;
  }

  /// Takes values that lie elsewhere for its own; gradient and id stay.
  void relocate(T* values, bool on_device) { values_.attach(values, on_device); }

  /// Copies are deep, own their memory and belong to no network; the gradient is not copied.
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
template <class T>
class state_buffer {
 public:
  explicit state_buffer(index_t size) : values_(size) {}

  index_t size() const { return values_.size(); }
  T* data() const { return values_.data(); }
  std::span<T> values() const { return {values_.data(), static_cast<std::size_t>(size())}; }
  logical_layout layout() const { return logical_layout::vector(size()); }

  void bind(T* place) { values_.bind(place); }
  /// Takes values that lie elsewhere for its own.
  void relocate(T* values, bool on_device) { values_.attach(values, on_device); }
  bool on_device() const { return values_.on_device(); }

 private:
  detail::bindable_storage<T> values_;
};

PUFFERFISH_NAMESPACE_END
