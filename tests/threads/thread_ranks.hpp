// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Ranks as threads of one process: a communicator whose messages are copies in memory. ThreadSanitizer sees
/// all ranks of such a group at once, which it cannot with processes, and no MPI library is in its way.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <pufferfish/distributed/collectives/all_reduce.hpp>
#include <pufferfish/distributed/communicator.hpp>

namespace thread_ranks {

namespace pf = pufferfish;

/// Messages from one rank to another, numbered in the order in which they are sent. Receivers draw numbers in
/// the order in which they ask, so that several receives may be under way.
class channel {
 public:
  void send(std::span<const std::byte> message) {
    const std::lock_guard lock(mutex_);
    messages_.emplace(sent_++, std::vector<std::byte>(message.begin(), message.end()));
    arrived_.notify_all();
  }
  std::uint64_t draw_number() {
    const std::lock_guard lock(mutex_);
    return drawn_++;
  }
  bool has(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    return messages_.count(number) > 0;
  }
  std::vector<std::byte> take(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [&] { return messages_.count(number) > 0; });
    std::vector<std::byte> message = std::move(messages_.at(number));
    messages_.erase(number);
    return message;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::uint64_t, std::vector<std::byte>> messages_;
  std::uint64_t sent_ = 0;
  std::uint64_t drawn_ = 0;
};

/// Channels between all ranks: one set for messages between pairs, one for collectives.
class group {
 public:
  explicit group(int size)
      : size_(size), channels_(2 * static_cast<std::size_t>(size) * static_cast<std::size_t>(size)) {}
  int size() const { return size_; }
  channel& pair(int from, int to) { return channels_[index(from, to)]; }
  channel& collective(int from, int to) { return channels_[channels_.size() / 2 + index(from, to)]; }

 private:
  std::size_t index(int from, int to) const {
    return static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) + static_cast<std::size_t>(to);
  }
  int size_;
  std::vector<channel> channels_;
};

/// A receive, or a collective's receives from all ranks with what is to be done with them.
class request {
 public:
  using part = std::pair<channel*, std::uint64_t>;
  using combine = void (*)(std::vector<std::vector<std::byte>>&&, std::span<std::byte>);

  request() = default;
  request(std::vector<part> parts, std::span<std::byte> into, combine how)
      : parts_(std::move(parts)), into_(into), how_(how) {}
  request(request&& other) noexcept
      : parts_(std::exchange(other.parts_, {})), into_(other.into_), how_(other.how_) {}
  request& operator=(request&& other) noexcept {
    if (this == &other) return *this;
    wait();
    parts_ = std::exchange(other.parts_, {});
    into_ = other.into_;
    how_ = other.how_;
    return *this;
  }
  ~request() { wait(); }

  bool done() {
    const auto has_come = [](const part& p) { return p.first->has(p.second); };
    if (!std::all_of(parts_.begin(), parts_.end(), has_come)) return false;
    wait();
    return true;
  }
  void wait() {
    if (parts_.empty()) return;
    std::vector<std::vector<std::byte>> messages;
    for (const auto& [from, number] : parts_) messages.push_back(from->take(number));
    parts_.clear();
    how_(std::move(messages), into_);
  }

 private:
  std::vector<part> parts_;
  std::span<std::byte> into_;
  combine how_ = nullptr;
};

/// One rank's end of a group (the concepts pufferfish::communicator and messenger). Sums add in the order of
/// the ranks, so all ranks hold the same bits.
class communicator {
 public:
  communicator(group& ranks, int rank) : group_(&ranks), rank_(rank) {}
  int rank() const { return rank_; }
  int size() const { return group_->size(); }
  bool usable_from_threads() const { return true; }
  /// Number of messages that this rank has sent, to itself included. Other threads may read it.
  int sent() const { return sent_.load(); }

  template <class T>
  [[nodiscard]] request start_all_reduce_sum(std::span<T> values) {
    return start_all_reduce(values, &combined<T, sum>);
  }
  template <class T>
  void all_reduce_sum(std::span<T> values) {
    start_all_reduce_sum(values).wait();
  }
  template <class T>
  void all_reduce_min(std::span<T> values) {
    start_all_reduce(values, &combined<T, min>).wait();
  }
  template <class T>
  void all_reduce_max(std::span<T> values) {
    start_all_reduce(values, &combined<T, max>).wait();
  }
  template <class T>
  std::vector<T> all_gather(const T& value) {
    std::vector<T> all(static_cast<std::size_t>(size()));
    send_to_all(std::as_bytes(std::span(&value, 1)));
    request(from_all(), std::as_writable_bytes(std::span(all)), &joined).wait();
    return all;
  }
  template <class T>
  void broadcast(std::span<T> values, int root) {
    broadcast_bytes(std::as_writable_bytes(values), root);
  }
  void broadcast_bytes(std::span<std::byte> bytes, int root) {
    pf::detail::check_root("thread_ranks: broadcast", root, size());
    if (bytes.empty()) return;
    if (rank_ == root) send_to_all(bytes);
    channel& from = group_->collective(root, rank_);
    request({{&from, from.draw_number()}}, bytes, &joined).wait();
  }
  void barrier() { static_cast<void>(all_gather(0)); }

  template <class T>
  [[nodiscard]] request start_send(std::span<const T> values, int to) {
    if (values.empty()) return {};
    ++sent_;
    group_->pair(rank_, to).send(std::as_bytes(values));
    return {};
  }
  template <class T>
  [[nodiscard]] request start_receive(std::span<T> values, int from) {
    if (values.empty()) return {};
    channel& messages = group_->pair(from, rank_);
    return {{{&messages, messages.draw_number()}}, std::as_writable_bytes(values), &joined};
  }

 private:
  struct sum {
    template <class T>
    T operator()(T a, T b) const {
      return a + b;
    }
  };
  struct min {
    template <class T>
    T operator()(T a, T b) const {
      return std::min(a, b);
    }
  };
  struct max {
    template <class T>
    T operator()(T a, T b) const {
      return std::max(a, b);
    }
  };

  static void joined(std::vector<std::vector<std::byte>>&& messages, std::span<std::byte> into) {
    for (const std::vector<std::byte>& message : messages) {
      std::memcpy(into.data(), message.data(), message.size());
      into = into.subspan(message.size());
    }
  }
  template <class T, class Operation>
  static void combined(std::vector<std::vector<std::byte>>&& messages, std::span<std::byte> into) {
    const std::size_t count = into.size() / sizeof(T);
    std::vector<T> result(count), one(count);
    for (std::size_t rank = 0; rank < messages.size(); ++rank) {
      std::memcpy(one.data(), messages[rank].data(), into.size());
      for (std::size_t i = 0; i < count; ++i) {
        result[i] = rank == 0 ? one[i] : Operation()(result[i], one[i]);
      }
    }
    std::memcpy(into.data(), result.data(), into.size());
  }

  template <class T>
  request start_all_reduce(std::span<T> values, request::combine how) {
    if (values.empty()) return {};
    send_to_all(std::as_bytes(values));
    return {from_all(), std::as_writable_bytes(values), how};
  }
  void send_to_all(std::span<const std::byte> bytes) {
    sent_ += size();
    for (int to = 0; to < size(); ++to) group_->collective(rank_, to).send(bytes);
  }
  std::vector<request::part> from_all() {
    std::vector<request::part> parts;
    for (int from = 0; from < size(); ++from) {
      channel& messages = group_->collective(from, rank_);
      parts.emplace_back(&messages, messages.draw_number());
    }
    return parts;
  }

  group* group_;
  int rank_;
  std::atomic<int> sent_{0};
};

static_assert(pf::communicator<communicator> && pf::messenger<communicator>);

/// Runs body(comm) once a rank, each on a thread of its own, and rethrows the first exception in the order of
/// the ranks. A rank that throws while others wait for it hangs the test: bodies throw on all ranks or none.
template <class Body>
void run(int ranks, const Body& body) {
  group all(ranks);
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        communicator comm(all, rank);
        body(comm);
      } catch (...) {
        failures[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace thread_ranks
