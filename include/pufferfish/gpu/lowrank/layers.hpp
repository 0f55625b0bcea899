// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Low-rank layers outside of a network, with their parameters on a device: `LowRankConv<T, Rank,
/// device::gpu>`, and likewise the other kinds, with the same constructors as on the CPU. The constructors
/// throw backend_error without a device.
///
/// A rank that is known at run time is `dynamic_rank`. With T = gpu::bf16 or gpu::fp16 the layer computes in
/// 16 bits, and its parameters are floats.
///
///     LowRankConv<float, dynamic_rank, device::gpu> layer(shape, rank, true);  // true: with a bias
///     layer.initialize(random_stream(4, 1));
///     layer.forward(ctx, x, y);                                                // views of device memory
///     SGD<float, device::gpu> optimizer(make_optimizer_target(layer.store()), sgd_options{});

#include <string>
#include <type_traits>
#include <utility>

#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/lowrank/layers/layer_storage.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// A layer whose parameters and gradients are stored in device memory. Its views (down(), up(), bias()) are
/// of that memory: the host may access them only within on_host and read_on_host. The parameters belong to
/// the device that is current at construction. A copy has its own parameters on the device that is current at
/// the copy; copying waits for the device, and moves are copies. Functions that wait for the device (on_host,
/// read_on_host, initialize, to_dense and copies) must not be captured.
template <class Layer>
class resident : public Layer {
 public:
  using value_type = typename Layer::value_type;
  /// Type of parameters and gradients.
  using P = parameter_t<value_type>;

  /// Throws the errors of Layer's constructor, and backend_error.
  template <class... Arguments>
  requires(std::is_constructible_v<Layer, Arguments...>) explicit resident(Arguments&&... arguments)
      : Layer(std::forward<Arguments>(arguments)...) {
    place();
  }
  resident(const resident& other) : Layer(other.on_host_copy()) { place(); }
  resident& operator=(const resident& other) {
    if (this == &other) return *this;
    Layer copy = other.on_host_copy();
    Layer::operator=(std::move(copy));
    store_ = made_store();
    place();
    return *this;
  }
  ~resident() = default;

  /// Calls change(layer) with the parameters on the host, for reading and writing. They are copied back to
  /// the device unless `change` throws. Waits for the device. Throws backend_error, and whatever `change`
  /// throws.
  template <class Change>
  void on_host(Change&& change) {
    pufferfish::detail::host_scope<P> scope(store_);
    change(static_cast<Layer&>(*this));
    scope.keep();
  }
  /// Calls look(layer) with the parameters on the host, for reading only. Nothing is copied back. Waits for
  /// the device. Throws backend_error, and whatever `look` throws.
  template <class Look>
  void read_on_host(Look&& look) const {
    const pufferfish::detail::host_scope<P> scope(store_);
    look(static_cast<const Layer&>(*this));
  }

  /// Parameters and gradients of the layer, in device memory, for an optimizer (make_optimizer_target) or a
  /// gradient exchange between processes. The layer owns the store. Assigning to the layer replaces the
  /// arrays, so optimizers made before the assignment must not be used.
  parameter_store<P>& store() { return store_; }

  /// Initializes the parameters with the numbers that Layer::initialize draws on the CPU. Waits for the
  /// device. Throws backend_error.
  void initialize(random_stream random) {
    on_host([&](Layer& layer) { layer.initialize(random); });
  }
  /// Returns the dense layer of the product of the factors, on the host. Waits for the device. Throws
  /// backend_error.
  auto to_dense() const {
    decltype(std::declval<const Layer&>().to_dense()) dense;
    read_on_host([&](const Layer& layer) { dense = layer.to_dense(); });
    return dense;
  }

 private:
  Layer on_host_copy() const {
    const pufferfish::detail::host_scope<P> scope(store_);
    return static_cast<const Layer&>(*this);
  }

  void place() {
    store_.pack([this](state_visitor<P>& visitor) {
      const std::string no_prefix;
      this->visit(pufferfish::detail::named_forwarder<P>{visitor, no_prefix});
    });
  }
  static parameter_store<P> made_store() {
    return parameter_store<P>(device_memory(), rounded_format_of<value_type>);
  }
  mutable parameter_store<P> store_ = made_store();
};

}  // namespace detail
}  // namespace gpu

template <>
struct layer_storage<device::gpu> {
  template <class Layer>
  using type = gpu::detail::resident<Layer>;
};

PUFFERFISH_NAMESPACE_END
