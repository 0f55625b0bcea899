// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the outer parameters of a rare_exchange together with the parameters of this rank, on any
/// device.

#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include <pufferfish/core/host_work.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/distributed/exchange/outer_parameters.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The outer_parameters of a store, whose values are the `values` of the base class. The host computes. For a
/// store on a device the object has a copy of the values on the host, and copies fragments there and back,
/// which waits for the device. The store must outlive the object and keep its arenas.
template <class T, class Device>
class outer_values : public outer_parameters<T> {
  using outer = outer_parameters<T>;

 public:
  /// Throws an Error unless the values are in the memory of Device.
  template <class Error>
  static void check_place(const parameter_store<T>& store) {
    if (store.on_host() != copies) return;
    PUFFERFISH_THROW(Error(copies ? "rare_exchange: the parameters are on the host, not on its device"
                                  : "rare_exchange: the parameters are on a device"));
  }

  /// Sets theta = the store's values, v = 0. To be called before all other members.
  void start(parameter_store<T>& store, const rare_exchange_options& options) {
    store_ = &store;
    if (copies) copy_.resize(store.values().size());
    static_cast<outer&>(*this) = outer(fetch_all(), options);
  }
  /// Sets theta = the store's values, v = 0.
  void restart() { outer::restart(fetch_all()); }

  /// The context for work on the host.
  context<device::cpu>& host(context<Device>& ctx) { return work_.of(ctx); }

  /// Computes to = theta - values for the elements of a fragment, whose values are copied from the device
  /// first.
  void subtract(context<Device>& ctx, const gradient_bucket& fragment, std::span<T> to) {
    fetch(fragment);
    outer::subtract(host(ctx), fragment, values(), to);
  }
  /// Makes the outer step of a fragment and mixes its result into the values: see outer_parameters::step.
  /// Values of a device are read only if `mixing` is not 0.
  void step(context<Device>& ctx, const gradient_bucket& fragment, std::span<T> change, double mixing) {
    if (mixing != 0.0) fetch(fragment);
    outer::step(host(ctx), fragment, change, values(), mixing);
    send(fragment);
  }
  /// Sets values = theta for the elements of a fragment, on the device, too.
  void adopt(context<Device>& ctx, const gradient_bucket& fragment) {
    outer::adopt(host(ctx), fragment, values());
    send(fragment);
  }

 private:
  static constexpr bool copies = !std::is_same_v<Device, device::cpu>;

  // The values on the host: the copy of a device's values, or the store's own.
  std::span<T> values() { return copies ? std::span<T>(copy_) : store_->values(); }
  // Copies a fragment of the values from the device to the host.
  void fetch(const gradient_bucket& fragment) {
    if (!copies || fragment.size == 0) return;
    const std::span<T> to = part(copy_, fragment);
    memory_of<Device>::source().to_host(to.data(), part(store_->values(), fragment).data(), to.size_bytes());
  }
  // Copies a fragment of the values from the host to the device.
  void send(const gradient_bucket& fragment) {
    if (copies && fragment.size > 0) {
      const std::span<T> from = part(copy_, fragment);
      memory_of<Device>::source().from_host(part(store_->values(), fragment).data(), from.data(),
                                            from.size_bytes());
    }
    store_->round();  // of 16-bit networks
  }
  // Copies all values from the device to the host.
  std::span<T> fetch_all() {
    fetch({0, static_cast<index_t>(store_->values().size()), 0, 0});
    return values();
  }
  static std::span<T> part(std::span<T> all, const gradient_bucket& fragment) {
    return all.subspan(static_cast<std::size_t>(fragment.offset), static_cast<std::size_t>(fragment.size));
  }

  parameter_store<T>* store_ = nullptr;
  std::vector<T> copy_;  // of a device's values
  host_work<Device> work_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
