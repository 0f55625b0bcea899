// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `self`: the communicator of a program that runs as a single process.

#include <cstddef>
#include <span>
#include <vector>

#include <pufferfish/distributed/communicator.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A group of one process. Every collective leaves the memory as it is (the sum of one rank's elements) and
/// compiles to nothing; types and roots are checked as in a larger group, so that code tried with `self` also
/// runs with MPI. Holds no state: copies are the same group, and any thread may use it.
/// \code
///   self comm;
///   gradient_exchange<float, self> exchange(net.store(), comm);  // sends nothing
/// \endcode
class self {
 public:
  /// A collective_request that is done from the start.
  class request {
   public:
    request() = default;
    request(request&&) noexcept {}
    request& operator=(request&&) noexcept { return *this; }
    ~request() = default;

    /// Always true; wait() returns at once.
    bool done() { return true; }
    void wait() {}
  };

  /// The only rank is 0.
  constexpr int rank() const { return 0; }
  constexpr int size() const { return 1; }

  /// The sum, minimum and maximum of one rank's elements are the elements.
  template <class T>
  void all_reduce_sum(std::span<T>) {
    detail::check_reducible<T>();
  }
  template <class T>
  void all_reduce_min(std::span<T>) {
    detail::check_reducible<T>();
  }
  template <class T>
  void all_reduce_max(std::span<T>) {
    detail::check_reducible<T>();
  }
  /// Returns a request that is done.
  template <class T>
  request start_all_reduce_sum(std::span<T>) {
    detail::check_reducible<T>();
    return {};
  }

  /// Leaves the elements as they are. Throws value_error unless root is 0.
  template <class T>
  void broadcast(std::span<T>, int root) {
    detail::check_broadcastable<T>();
    detail::check_root("self: broadcast", root, 1);
  }
  /// Leaves the bytes as they are. Throws value_error unless root is 0.
  void broadcast_bytes(std::span<std::byte>, int root) {
    detail::check_root("self: broadcast_bytes", root, 1);
  }

  /// Returns a list of the only rank's value.
  template <class T>
  std::vector<T> all_gather(const T& value) {
    detail::check_gatherable<T>();
    return std::vector<T>(1, value);
  }

  /// Returns at once.
  void barrier() {}

  /// Throws value_error, since there is no other rank; so does start_receive.
  template <class T>
  request start_send(std::span<const T>, int to) {
    detail::check_root("self: start_send", to == 0 ? -1 : to, 1);
    return {};
  }
  template <class T>
  request start_receive(std::span<T>, int from) {
    detail::check_root("self: start_receive", from == 0 ? -1 : from, 1);
    return {};
  }
};

static_assert(communicator<self>);

PUFFERFISH_NAMESPACE_END
