// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Low-rank layers that stand alone, outside of a network, with their parameters on a device:
/// `LowRankConv<T, Rank, device::gpu>`, and LowRankLinear, LowRankLSTM and LowRankAttention alike.

#include <string>
#include <utility>

#include <pufferfish/gpu/context.hpp>
#include <pufferfish/lowrank/attention.hpp>
#include <pufferfish/lowrank/factorize.hpp>
#include <pufferfish/lowrank/lstm.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// A layer whose parameters and gradients lie in device memory. Its views (down(), up(), bias()) are of that
/// memory: the host reads and writes them within on_host only.
template <class Layer>
class resident : public Layer {
 public:
  using value_type = typename Layer::value_type;
  /// Of parameters and gradients.
  using P = parameter_t<value_type>;

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

  /// Calls change(layer) while the host may read and write its parameters; what it writes goes to the device
  /// unless it throws. Waits for the device.
  template <class Change>
  void on_host(Change&& change) {
    pufferfish::detail::host_scope<P> scope(store_);
    change(static_cast<Layer&>(*this));
    scope.keep();
  }
  /// The same for a look that changes nothing.
  template <class Look>
  void read_on_host(Look&& look) const {
    const pufferfish::detail::host_scope<P> scope(store_);
    look(static_cast<const Layer&>(*this));
  }

  /// The values and gradients, on the device, for an optimizer (make_optimizer_target) or an exchange.
  parameter_store<P>& store() { return store_; }

  void initialize(random_stream random) {
    on_host([&](Layer& layer) { layer.initialize(random); });
  }
  auto to_dense() const {
    decltype(std::declval<const Layer&>().to_dense()) dense;
    read_on_host([&](const Layer& layer) { dense = layer.to_dense(); });
    return dense;
  }

 protected:
  explicit resident(Layer layer) : Layer(std::move(layer)) { place(); }

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

template <class T, index_t Rank>
requires(detail::layer_scalar<T, device::gpu>) class LowRankConv<T, Rank, device::gpu>
    : public gpu::detail::resident<detail::low_rank_conv<T>> {
  static_assert(Rank > 0, "pufferfish: LowRankConv<T, Rank>: a static rank must be at least 1");

 public:
  /// As on the CPU; backend_error without a device.
  explicit LowRankConv(const conv_shape& shape, bool bias = false)
      : gpu::detail::resident<detail::low_rank_conv<T>>(detail::low_rank_conv<T>(shape, Rank, bias)) {}
};

template <class T>
requires(detail::layer_scalar<T, device::gpu>) class LowRankConv<T, dynamic_rank, device::gpu>
    : public gpu::detail::resident<detail::low_rank_conv<T>> {
 public:
  LowRankConv(const conv_shape& shape, index_t rank, bool bias = false)
      : gpu::detail::resident<detail::low_rank_conv<T>>(detail::low_rank_conv<T>(shape, rank, bias)) {}
};

template <class T, index_t Rank>
requires(detail::layer_scalar<T, device::gpu>) class LowRankLinear<T, Rank, device::gpu>
    : public gpu::detail::resident<detail::low_rank_linear<T>> {
  static_assert(Rank > 0, "pufferfish: LowRankLinear<T, Rank>: a static rank must be at least 1");

 public:
  /// As on the CPU; backend_error without a device.
  LowRankLinear(index_t in, index_t out, bool bias = true)
      : gpu::detail::resident<detail::low_rank_linear<T>>(detail::low_rank_linear<T>(in, out, Rank, bias)) {}
};

template <class T>
requires(detail::layer_scalar<T, device::gpu>) class LowRankLinear<T, dynamic_rank, device::gpu>
    : public gpu::detail::resident<detail::low_rank_linear<T>> {
 public:
  LowRankLinear(index_t in, index_t out, index_t rank, bool bias = true)
      : gpu::detail::resident<detail::low_rank_linear<T>>(detail::low_rank_linear<T>(in, out, rank, bias)) {}
};

template <class T, index_t Rank>
requires(detail::layer_scalar<T, device::gpu>) class LowRankLSTM<T, Rank, device::gpu>
    : public gpu::detail::resident<detail::low_rank_lstm<T>> {
  static_assert(Rank > 0, "pufferfish: LowRankLSTM<T, Rank>: a static rank must be at least 1");

 public:
  /// As on the CPU; backend_error without a device.
  LowRankLSTM(index_t input, index_t hidden)
      : gpu::detail::resident<detail::low_rank_lstm<T>>(detail::low_rank_lstm<T>(input, hidden, Rank, Rank)) {
  }
};

template <class T>
requires(detail::layer_scalar<T, device::gpu>) class LowRankLSTM<T, dynamic_rank, device::gpu>
    : public gpu::detail::resident<detail::low_rank_lstm<T>> {
 public:
  LowRankLSTM(index_t input, index_t hidden, index_t input_rank, index_t hidden_rank)
      : gpu::detail::resident<detail::low_rank_lstm<T>>(
            detail::low_rank_lstm<T>(input, hidden, input_rank, hidden_rank)) {}
};

template <class T, index_t Rank>
requires(detail::layer_scalar<T, device::gpu>) class LowRankAttention<T, Rank, device::gpu>
    : public gpu::detail::resident<detail::low_rank_attention<T>> {
  static_assert(Rank > 0, "pufferfish: LowRankAttention<T, Rank>: a static rank must be at least 1");

 public:
  /// As on the CPU; backend_error without a device.
  explicit LowRankAttention(const attention_shape& shape, bool bias = false)
      : gpu::detail::resident<detail::low_rank_attention<T>>(
            detail::low_rank_attention<T>(shape, {Rank, Rank, Rank, Rank}, bias)) {}
};

template <class T>
requires(detail::layer_scalar<T, device::gpu>) class LowRankAttention<T, dynamic_rank, device::gpu>
    : public gpu::detail::resident<detail::low_rank_attention<T>> {
 public:
  LowRankAttention(const attention_shape& shape, index_t rank, bool bias = false)
      : LowRankAttention(shape, std::array<index_t, 4>{rank, rank, rank, rank}, bias) {}
  LowRankAttention(const attention_shape& shape, const std::array<index_t, 4>& ranks, bool bias = false)
      : gpu::detail::resident<detail::low_rank_attention<T>>(
            detail::low_rank_attention<T>(shape, ranks, bias)) {}
};

PUFFERFISH_NAMESPACE_END
