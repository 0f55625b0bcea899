// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mpi::request`: a started sum or message of `mpi::communicator`; and the types and pieces in which MPI
/// takes arrays.

#include <pufferfish/distributed/mpi_calls.hpp>

#if defined(OPEN_MPI) && defined(__has_include)
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif
#endif

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/distributed/mpi_watch.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace mpi {

namespace detail {

/// MPI's name of the type T, which must be one of is_reducible_v.
template <class T>
MPI_Datatype datatype() {
  if constexpr (std::is_same_v<T, float>) {
    return MPI_FLOAT;
  } else if constexpr (std::is_same_v<T, double>) {
    return MPI_DOUBLE;
  } else if constexpr (std::is_signed_v<T>) {
    return sizeof(T) == 8 ? MPI_INT64_T : MPI_INT32_T;
  } else {
    return sizeof(T) == 8 ? MPI_UINT64_T : MPI_UINT32_T;
  }
}

/// Whether MPI reports that its calls accept memory of a CUDA device. MPI must be running.
inline bool takes_device_memory() {
  [[maybe_unused]] const auto turn = call_lock();
#if defined(MPIX_CUDA_AWARE_SUPPORT)
  return MPIX_Query_cuda_support() == 1;
#elif defined(MPIX_GPU_SUPPORT_CUDA)
  int supported = 0;
  return MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &supported) == MPI_SUCCESS && supported != 0;
#else
  return false;  // this MPI has no such query
#endif
}

/// Calls f(first, length) for pieces of at most `chunk` elements, in order. MPI counts elements in int, so
/// that longer arrays need several calls.
template <class T, class F>
void for_chunks(std::span<T> values, std::size_t chunk, const F& f) {
  for (std::size_t at = 0; at < values.size(); at += chunk) {
    f(values.data() + at, static_cast<int>(std::min(chunk, values.size() - at)));
  }
}

}  // namespace detail

/// A started sum or message. Move-only; see `collective_request`. May outlive its communicator, but not MPI.
/// The destructor of an unfinished request waits, since MPI can neither cancel a collective nor release its
/// memory earlier. It ignores MPI's errors; done() and wait() throw them (backend_error; the elements are
/// then undefined). After a timeout it does not wait; MPI may use the memory until the process ends.
/// A default-constructed request is done. done() makes progress and returns at once: it looks at no time
/// limit.
///
/// \code
/// mpi::request sum = comm.start_all_reduce_sum(values);  // values: std::span<float>; not to be accessed now
/// while (!sum.done()) compute_more();                    // or sum.wait()
/// \endcode
class request {
 public:
  request() = default;
  request(request&& other) noexcept
      : first_(std::exchange(other.first_, MPI_REQUEST_NULL)),
        rest_(std::move(other.rest_)),
        watch_(std::move(other.watch_)) {
    other.rest_.clear();
  }
  request& operator=(request&& other) noexcept {
    if (this == &other) return *this;
    finish();
    first_ = std::exchange(other.first_, MPI_REQUEST_NULL);
    rest_ = std::exchange(other.rest_, {});
    watch_ = std::move(other.watch_);
    return *this;
  }
  ~request() { finish(); }

  /// Whether the sum or message is complete; returns at once. Throws backend_error if MPI fails.
  bool done() {
    int first_done = 1;
    int rest_done = 1;
    if (first_ != MPI_REQUEST_NULL) {
      detail::call("MPI_Test", [&] { return MPI_Test(&first_, &first_done, MPI_STATUS_IGNORE); });
    }
    if (!rest_.empty()) {
      detail::call("MPI_Testall",
                   [&] { return MPI_Testall(rest_count(), rest_.data(), &rest_done, MPI_STATUSES_IGNORE); });
    }
    return first_done != 0 && rest_done != 0;
  }

  /// Waits until the sum or message is complete. Throws backend_error if MPI fails, and timeout_error if the
  /// wait takes longer than communicator::timeout(). After a timeout MPI may use the request's memory until
  /// the process ends (communicator::set_timeout).
  void wait() {
    if (!is_open()) return;
    watch_->until([this] { return done(); }, "a started transfer");
  }

 private:
  friend class communicator;
  explicit request(std::shared_ptr<detail::watch> watch) : watch_(std::move(watch)) {}

  // Whether a transfer was started and not completed.
  bool is_open() const { return first_ != MPI_REQUEST_NULL || !rest_.empty(); }
  int rest_count() const { return static_cast<int>(rest_.size()); }

  // Address for the handle of the next chunk, valid until the next call. The first handle needs no
  // allocation.
  MPI_Request* next() {
    if (!is_open()) return &first_;
    rest_.push_back(MPI_REQUEST_NULL);
    return &rest_.back();
  }

  // Waits in the destructor; errors are dropped there.
  void finish() noexcept {
    if (!is_open() || detail::is_finalized()) return;
    try {
      wait();
    } catch (...) {
      // The transfer will not end: its handle and memory are left to MPI.
      first_ = MPI_REQUEST_NULL;
    }
    rest_.clear();
  }

  MPI_Request first_ = MPI_REQUEST_NULL;  // handle of the first chunk
  std::vector<MPI_Request> rest_;         // handles of further chunks
  std::shared_ptr<detail::watch> watch_;  // nullptr: nothing was started
};

}  // namespace mpi

PUFFERFISH_NAMESPACE_END
