// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Ranks as threads of one process, joined by links with a delay and a rate in simulated time. Every rank has
/// a simulated clock, which only communication advances, so that times do not depend on the machine.

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../../threads/thread_ranks.hpp"

namespace delayed_ranks {

namespace pf = pufferfish;

/// Clock of the calling thread's rank.
struct simulated_clock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<simulated_clock>;
  static constexpr bool is_steady = true;

  static inline thread_local std::int64_t nanoseconds = 0;
  static inline thread_local double speed = 1.0;  ///< seconds that the clock shows in a simulated second
  static time_point now() {
    return time_point(duration(static_cast<std::int64_t>(static_cast<double>(nanoseconds) * speed)));
  }
};

/// A link between two ranks, the same in both directions.
struct simulated_link {
  double delay = 0.0;  ///< seconds, one way
  double bytes_per_second = 1e9;
  bool slow_start = false;  ///< whether a window limits the bytes under way, as TCP does at the start
  /// The communicator's own all-reduce: its delay and transfer time, as multiples of those of its messages.
  double library_delay = 1.0, library_transfer = 1.0;

  std::int64_t delay_ns() const { return static_cast<std::int64_t>(delay * 1e9); }
  std::int64_t transfer_ns(std::size_t bytes) const {
    return static_cast<std::int64_t>(static_cast<double>(bytes) / bytes_per_second * 1e9);
  }
};

/// Receive whose end sets the rank's clock to the arrival of the message. Sends are done from the start.
class request {
 public:
  request() = default;
  request(thread_ranks::request time, thread_ranks::request message, std::unique_ptr<std::int64_t> arrival)
      : arrival_(std::move(arrival)), time_(std::move(time)), message_(std::move(message)) {}
  request(request&&) noexcept = default;
  request& operator=(request&& other) noexcept {
    wait();
    arrival_ = nullptr;
    time_ = std::move(other.time_);
    message_ = std::move(other.message_);
    arrival_ = std::move(other.arrival_);
    return *this;
  }
  ~request() { wait(); }

  bool done() {
    if (arrival_ == nullptr) return true;
    if (!time_.done() || !message_.done()) return false;
    wait();
    return true;
  }
  void wait() {
    if (arrival_ == nullptr) return;
    time_.wait();
    message_.wait();
    simulated_clock::nanoseconds = std::max(simulated_clock::nanoseconds, *arrival_);
    arrival_ = nullptr;
  }

 private:
  std::unique_ptr<std::int64_t> arrival_;  ///< nullptr: done
  thread_ranks::request time_, message_;
};

/// One rank's end of a group. Collectives take as long as ceil(log2 p) messages of their length, one after
/// the other; the all-reduce leaves the values as they are.
class communicator {
 public:
  communicator(thread_ranks::communicator& threads, const simulated_link& cable)
      : threads_(threads), link_(cable), peers_(static_cast<std::size_t>(threads.size())) {}
  int rank() const { return threads_.rank(); }
  int size() const { return threads_.size(); }

  /// Collectives that this rank has called, in order, each with its bytes.
  const std::string& calls() const { return calls_; }

  template <class T>
  void all_reduce_sum(std::span<T> values) {
    collective("sum", values.size_bytes(), link_.library_delay, link_.library_transfer);
  }
  template <class T>
  thread_ranks::request start_all_reduce_sum(std::span<T> values) {
    all_reduce_sum(values);
    return {};
  }
  template <class T>
  void all_reduce_min(std::span<T> values) {
    threads_.all_reduce_min(values);
    collective("min", values.size_bytes());
  }
  template <class T>
  void all_reduce_max(std::span<T> values) {
    threads_.all_reduce_max(values);
    collective("max", values.size_bytes());
  }
  template <class T>
  std::vector<T> all_gather(const T& value) {
    std::vector<T> all = threads_.all_gather(value);
    collective("gather", sizeof(T));
    return all;
  }
  template <class T>
  void broadcast(std::span<T> values, int root) {
    threads_.broadcast(values, root);
    collective("broadcast", values.size_bytes());
  }
  void broadcast_bytes(std::span<std::byte> bytes, int root) { broadcast(bytes, root); }
  void barrier() { collective("barrier", 0); }

  template <class T>
  request start_send(std::span<const T> values, int to) {
    if (values.empty()) return {};
    peer& other = peers_[static_cast<std::size_t>(to)];
    other.free = std::max(other.free, simulated_clock::nanoseconds);
    std::size_t bytes = values.size_bytes();
    while (bytes > 0) {
      const std::size_t segment = std::min<std::size_t>(bytes, 14600);
      if (link_.slow_start) other.wait_for_window(segment);
      other.free += link_.transfer_ns(segment);
      if (link_.slow_start) other.sent.emplace_back(other.free + 2 * link_.delay_ns(), segment);
      bytes -= segment;
    }
    const std::int64_t arrival = other.free + link_.delay_ns();
    static_cast<void>(threads_.start_send(std::span<const std::int64_t>(&arrival, 1), to));
    static_cast<void>(threads_.start_send(values, to));
    return {};
  }
  template <class T>
  request start_receive(std::span<T> values, int from) {
    if (values.empty()) return {};
    auto arrival = std::make_unique<std::int64_t>(0);
    thread_ranks::request time = threads_.start_receive(std::span<std::int64_t>(arrival.get(), 1), from);
    thread_ranks::request message = threads_.start_receive(values, from);
    return {std::move(time), std::move(message), std::move(arrival)};
  }

 private:
  struct peer {
    std::int64_t free = 0;  ///< when the link to this rank has sent all earlier messages
    std::deque<std::pair<std::int64_t, std::size_t>>
        sent;  ///< unanswered segments: time of the answer, bytes
    std::size_t unanswered = 0;
    std::size_t window = 14600;  ///< most unanswered bytes; grows by the answered bytes

    /// Sets `free` to the time at which a segment may be sent.
    void wait_for_window(std::size_t segment) {
      while (!sent.empty() && (sent.front().first <= free || unanswered + segment > window)) {
        free = std::max(free, sent.front().first);
        unanswered -= sent.front().second;
        window += sent.front().second;
        sent.pop_front();
      }
      unanswered += segment;
    }
  };

  /// Sets the clock to the end of a collective, which begins when the last rank has called it.
  void collective(const char* name, std::size_t bytes, double delay = 1.0, double transfer = 1.0) {
    calls_ += std::string(name) + " " + std::to_string(bytes) + "\n";
    std::int64_t begin = simulated_clock::nanoseconds;
    threads_.all_reduce_max(std::span<std::int64_t>(&begin, 1));
    const auto messages = static_cast<double>(std::bit_width(static_cast<unsigned>(size() - 1)));
    const double took = delay * static_cast<double>(link_.delay_ns()) +
                        transfer * static_cast<double>(link_.transfer_ns(bytes));
    simulated_clock::nanoseconds = begin + static_cast<std::int64_t>(messages * took);
  }

  thread_ranks::communicator& threads_;
  simulated_link link_;
  std::vector<peer> peers_;
  std::string calls_;
};

static_assert(pf::communicator<communicator> && pf::messenger<communicator>);

/// Runs body(comm) once a rank, each on a thread of its own with a clock that starts at 0, in a group whose
/// links are all like `cable`. See thread_ranks::run for exceptions.
template <class Body>
void run(int ranks, const simulated_link& cable, const Body& body) {
  thread_ranks::run(ranks, [&](thread_ranks::communicator& of_threads) {
    simulated_clock::nanoseconds = 0;
    simulated_clock::speed = 1.0;
    communicator comm(of_threads, cable);
    body(comm);
  });
}

}  // namespace delayed_ranks
