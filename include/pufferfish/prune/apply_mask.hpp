// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Functions that apply masks to networks and optimizers, send them to ranks and store them in checkpoints:
/// `mask_weights`, `mask_states`, `mask_gradients`, `prunable_except`, `broadcast_mask`, `mask_numbers`.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/compress/quantize/tern_codes.hpp>
#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/prune/arena_mask.hpp>
#include <pufferfish/prune/mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// A mask as it is applied to memory of a device: the mask itself on the CPU, else its bits on the device.
template <class Device>
using placed_mask =
    std::conditional_t<std::is_same_v<Device, device::cpu>, const weight_mask&, const arena_mask<Device>>;

}  // namespace detail

/// Sets pruned weights to 0. Needed once after the mask is made or changed: with masked gradients and states
/// the weights then stay 0 under SGD and Adam. The values must be in the memory of the context's device; on
/// the CPU they may also be in the memory of a host framework. Throws state_error if they are in other
/// memory, or if the mask was made for a network of other parameters. On a device, returns after the device
/// has finished.
template <class T, class Device>
void mask_weights(context<Device>& ctx, const weight_mask& mask, parameter_store<T>& store) {
  if (store.on_host() != memory_of<Device>::source().on_host()) {
    PUFFERFISH_THROW(state_error(store.on_host()
                                     ? "mask_weights: the values are on the host, the context is a device's"
                                     : "mask_weights: the values are on a device: use a context of it"));
  }
  mask.check_store(store);
  detail::placed_mask<Device> bits(mask);
  for (const auto& entry : store.parameters()) {
    if (entry.thing->size() > 0) bits.apply(ctx, entry.thing->values(), entry.offset);
  }
  store.round();
}

/// Sets the elements of an optimizer's states that belong to pruned weights to 0: in every non-empty span of
/// optimizer.states(), which has the order of the weights. Throws value_error if a span is longer than the
/// mask or, on the CPU, does not consist of whole tensors from the first one on.
template <class Optimizer, class Device>
void mask_states(context<Device>& ctx, const weight_mask& mask, Optimizer& optimizer) {
  detail::placed_mask<Device> bits(mask);
  for (auto& [name, values] : optimizer.states()) {
    if (!values.empty()) bits.apply(ctx, values);
  }
}

/// Sets gradients of pruned weights to 0. Call it in every step before an exchange, an error memory, momentum
/// or weight decay uses the gradients. Not needed if a compact_sum exchanges them: it sets them to 0 itself.
/// On a device use arena_mask::apply, since this function would copy the bits in every step. Throws
/// state_error if values and gradients are on a device, value_error if the arena's length is not that of
/// whole tensors of the mask. parameter_store::bring_to_host leaves the gradients on the device: that they
/// are not there is not checked.
///
/// \code
/// net.backward(ctx, dy.view());
/// mask_gradients(ctx, mask, net.store());
/// sgd.step(ctx, 0.02);
/// \endcode
template <class T>
void mask_gradients(context<device::cpu>& ctx, const weight_mask& mask, parameter_store<T>& store) {
  if (!store.on_host()) {
    PUFFERFISH_THROW(state_error("mask_gradients: the gradients are on a device: use arena_mask"));
  }
  mask.apply(ctx, store.gradients());
}

/// The choice is_prunable, except for the parameters and layers that `names` lists; a layer's name excludes
/// all its parameters ("fc": "fc.weight"). Throws value_error for a name that is neither a parameter's nor a
/// layer's. The result holds a copy of the names and no reference to the store.
///
/// \code
/// weight_mask mask(net.store(), prunable_except(net.store(), {"fc"}));
/// \endcode
template <class T>
prunable_choice prunable_except(const parameter_store<T>& store, std::vector<std::string> names) {
  const std::vector<coded_tensor> tensors = coded_tensors(store);
  for (const std::string& name : names) {
    if (std::none_of(tensors.begin(), tensors.end(), [&](const coded_tensor& tensor) {
          return detail::names_parameter(name, tensor.name);
        })) {
      detail::throw_error<value_error>({"prunable_except: there is no parameter or layer ", name});
    }
  }
  return [names = std::move(names)](const coded_tensor& tensor) {
    return is_prunable(tensor) && std::none_of(names.begin(), names.end(), [&](const std::string& name) {
             return detail::names_parameter(name, tensor.name);
           });
  };
}

/// Overwrites the mask of every rank with that of rank `root`. Collective. 8 bytes per word of bits are
/// broadcast. Throws state_error on all ranks, with the masks unchanged, unless the masks of all ranks are
/// for tensors of equal names, sizes and prunable flags; also the errors of the communicator.
template <class Comm>
void broadcast_mask(Comm& comm, weight_mask& mask, int root = 0) {
  std::string lines;
  for (const masked_tensor& tensor : mask.tensors()) {
    lines += detail::message({tensor.name, " of ", tensor.size, tensor.prunable ? ", prunable\n" : "\n"});
  }
  agree_on_lines(comm, "masks", lines);
  std::vector<std::uint64_t> words(mask.words().begin(), mask.words().end());
  comm.broadcast(std::span<std::uint64_t>(words), root);
  mask.set_words(words);
}

/// Encodes the bits as numbers of type T, for checkpoints, whose states are arrays of T. Each number is a
/// 16-bit whole number, which float holds exactly: four per word, lowest bits first. The result has 4
/// words().size() numbers.
template <class T>
std::vector<T> mask_numbers(const weight_mask& mask) {
  std::vector<T> numbers;
  numbers.reserve(4 * mask.words().size());
  for (const std::uint64_t word : mask.words()) {
    for (int shift = 0; shift < 64; shift += 16) numbers.push_back(static_cast<T>(word >> shift & 0xffffU));
  }
  return numbers;
}
/// Sets the bits from the numbers that mask_numbers has made. Throws value_error, without changing the mask,
/// for other numbers, and the errors of weight_mask::set_words.
template <class T>
void set_mask_numbers(weight_mask& mask, std::span<const T> numbers) {
  if (numbers.size() != 4 * mask.words().size()) {
    detail::throw_error<value_error>({"set_mask_numbers: ", numbers.size(), " numbers for a mask of ",
                                      4 * mask.words().size(), " times 16 bits"});
  }
  std::vector<std::uint64_t> words(mask.words().size(), 0);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const T number = numbers[i];
    if (!(number >= T(0) && number <= T(65535) && std::floor(number) == number)) {
      detail::throw_error<value_error>({"set_mask_numbers: ", static_cast<double>(number), " at position ", i,
                                        " is no whole number of 16 bits"});
    }
    words[i / 4] |= static_cast<std::uint64_t>(number) << i % 4 * 16;
  }
  mask.set_words(words);
}

PUFFERFISH_NAMESPACE_END
