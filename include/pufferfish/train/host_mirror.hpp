// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: host access to elements in a device's memory, for rare operations such as checkpoints,
/// broadcasts and digests.

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/nn/model.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Gives the host access to an array in the memory of `source`: values() is the array itself if it is in host
/// memory, else a copy. The constructor waits for the device. T may be const.
template <class T>
class host_mirror {
  using value = std::remove_const_t<T>;

 public:
  /// Copies the elements `there` to the host, unless they are stored on the host. Both arguments must outlive
  /// the object.
  host_mirror(memory_source& source, std::span<T> there) : source_(&source), there_(there) {
    if (source.on_host()) return;
    copy_.resize(there.size());
    if (!copy_.empty()) source.to_host(copy_.data(), there.data(), there.size_bytes());
  }

  /// The elements on the host: the copy, or the elements themselves.
  std::span<T> values() { return source_->on_host() ? there_ : std::span<T>(copy_); }

  /// Writes the copy back to the elements. Does nothing if they are stored on the host.
  void send_back() requires(!std::is_const_v<T>) {
    if (!copy_.empty()) source_->from_host(there_.data(), copy_.data(), there_.size_bytes());
  }

 private:
  memory_source* source_;
  std::span<T> there_;
  std::vector<value> copy_;
};

/// Broadcasts an array from rank `root` to all ranks; the array is in the memory of `source`. Collective.
template <class Comm, class T>
void broadcast_from(Comm& comm, int root, memory_source& source, std::span<T> values) {
  if (comm.size() == 1) return;
  host_mirror<T> here(source, values);
  comm.broadcast(here.values(), root);
  if (comm.rank() != root) here.send_back();
}

/// Element type of a model's arenas.
template <class Model>
using stored_t = std::remove_cvref_t<decltype(std::declval<Model&>().store().values()[0])>;

}  // namespace detail

/// Digest of the parameters of this rank: equal bits have equal digests, on any device and on any rank, so
/// that agree() can compare ranks by it. Waits for the device. Local.
/// \code
///   agree(comm, "parameters", parameter_digest(run.net()));  // throws on all ranks if one has other bits
/// \endcode
template <class Root, class Device>
std::uint64_t parameter_digest(const model<Root, Device>& net) {
  using T = detail::stored_t<const model<Root, Device>>;
  detail::host_mirror<const T> here(memory_of<Device>::source(), net.store().values());
  return digest(std::span<const T>(here.values()));
}

PUFFERFISH_NAMESPACE_END
