// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Reports of factorize_weights and merge_weights, and the work on the tensors of a file that both functions
/// share.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/parallel.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/io/safetensors_stream.hpp>
#include <pufferfish/linalg/gemm/double_product.hpp>
#include <pufferfish/lowrank/factorization/truncation.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Result of factorize_weights or merge_weights for one tensor. A tensor that was copied has rank 0 and equal
/// numbers of parameters; in the report of factorize_weights its `reason` says why it was copied.
struct weight_result {
  std::string name;             ///< name in the dense file
  tensor_dtype dtype{};         ///< element type in the file that was read
  std::vector<index_t> shape;   ///< shape of the dense tensor
  bool factorized = false;      ///< whether it was factorized, or in the report of merge_weights merged
  std::string reason;           ///< why the tensor was copied; empty if it was factorized
  index_t layer = 0;            ///< number of its layer; see weight_decision
  index_t rank = 0;             ///< rank of each matrix
  index_t parts = 1;            ///< number of matrices
  bool embedding = false;       ///< whether it is an embedding table; see weight_decision
  double kept_energy = 1.0;     ///< sum of kept sigma^2 / ||A||_F^2
  double relative_error = 0.0;  ///< ||A - up down||_F / ||A||_F with the factors rounded as in the file
  truncation kind = truncation::plain;  ///< what the truncation minimized
  double weighted_energy = 1.0;         ///< kept energy of the weighted matrix; see factor_report
  /// Predicted growth of the mean loss, to second order; NaN: no statistics of gradients.
  double predicted_loss = std::numeric_limits<double>::quiet_NaN();
  index_t parameters_before = 0;  ///< elements in the file that was read, if floating-point
  index_t parameters_after = 0;   ///< elements in the written file
  double seconds = 0.0;           ///< time of reading and computing; 0 if no factors were computed
};

/// Result of factorize_weights or merge_weights for a file. Parameters are elements of floating-point
/// tensors, so that integer buffers do not count. The numbers of the file are the sums of those of its
/// tensors.
///
/// \code
/// for (const weight_result& tensor : report.tensors) {
///   if (tensor.factorized) std::printf("%s: rank %td\n", tensor.name.c_str(), tensor.rank);
/// }
/// \endcode
struct weight_report {
  std::vector<weight_result> tensors;  ///< in the order of the file that was read
  index_t parameters_before = 0;
  index_t parameters_after = 0;
  double seconds = 0.0;  ///< wall-clock time of the whole call
};

/// Function called after each tensor, one call at a time, with the share of the work done, 0 .. 1. Tensors
/// come in the order in which they are written, by falling element size and cost, not in that of the file.
/// With several threads, any of them makes the calls. An exception thrown by the observer ends the call and
/// is rethrown to the caller; no file is written.
using weight_observer = std::function<void(const weight_result& tensor, double share)>;

namespace detail {

/// Size in bytes of the pieces in which an unchanged tensor is copied.
inline constexpr std::uint64_t copy_piece = std::uint64_t{1} << 20;

/// Wall-clock time since `start` in seconds.
inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Runs make(task) on `threads` threads, and finish(task, result) in the order of the tasks, one at a time,
/// on the thread that has completed the next missing result. So a file is written in order while later
/// tensors are computed. Results wait in memory for those of earlier tasks. The first exception is rethrown,
/// and no further finish is called after one of finish. Throws value_error for less than 1 thread.
template <class Result, class Make, class Finish>
void run_in_order(int threads, index_t tasks, const Make& make, const Finish& finish) {
  std::vector<std::optional<Result>> waiting(static_cast<std::size_t>(tasks));
  std::mutex mutex;
  std::size_t next = 0;
  bool broken = false;
  thread_pool(threads).run(tasks, [&](index_t task, int) {
    Result result = make(task);
    const std::lock_guard lock(mutex);
    waiting[static_cast<std::size_t>(task)] = std::move(result);
    while (!broken && next < waiting.size() && waiting[next]) {
      broken = true;  // stays true if finish throws
      finish(static_cast<index_t>(next), std::move(*waiting[next]));
      broken = false;
      waiting[next++].reset();
    }
  });
}

/// Computes up * down, [rows x rank] times [rank x cols], in blocks of 256 rows, with sums in double, and
/// passes each to visit(first_row, block), so that the whole product never needs memory. The block is valid
/// during the call.
template <class T, class Visit>
void visit_product(const tensor_view<const T, 2>& up, const tensor_view<const T, 2>& down,
                   const Visit& visit) {
  constexpr index_t block_rows = 256;
  for (index_t first = 0; first < up.extent(0); first += block_rows) {
    const index_t rows = std::min(block_rows, up.extent(0) - first);
    tensor<double, 2> block({rows, down.extent(1)});
    add_product_tn(transpose(up.slice(0, first, rows)), down, block);
    visit(first, std::as_const(block));
  }
}

/// Copies the bytes of a tensor into the tensor that `to` has begun, in pieces of copy_piece bytes.
inline void copy_tensor(const safetensors_reader& from, const tensor_place& place, safetensors_writer& to) {
  std::vector<std::uint8_t> piece;
  for (std::uint64_t at = 0; at < place.bytes; at += piece.size()) {
    piece.resize(static_cast<std::size_t>(std::min(copy_piece, place.bytes - at)));
    from.read(place, at, piece);
    to.write(piece);
  }
}

/// Order of work, as numbers of tensors: by falling element size, so that all tensors are aligned in the new
/// file; within a size by falling cost, so that no thread starts an expensive tensor last; of equal cost in
/// the order of the file.
inline std::vector<std::size_t> working_order(const std::vector<tensor_place>& tensors,
                                              const std::vector<double>& cost) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const std::size_t left = size_of(tensors[a].dtype), right = size_of(tensors[b].dtype);
    return left != right ? left > right : cost[a] > cost[b];
  });
  return order;
}

/// The result of a tensor that is copied: rank 0, equal numbers of parameters.
inline weight_result copied(const tensor_place& tensor) {
  weight_result result;
  result.name = tensor.name;
  result.dtype = tensor.dtype;
  result.shape = tensor.shape;
  result.parameters_before = result.parameters_after = is_floating(tensor.dtype) ? tensor.count() : 0;
  return result;
}

/// Upper bound of the number of bytes that a file's metadata take in a header.
inline std::size_t room_for_metadata(const safetensors_reader& file) {
  std::size_t room = 0;
  for (const auto& [key, value] : file.metadata()) room += safetensors_writer::room_for(key + value, 0);
  return room;
}

/// Reports the share of the work that is done (0 .. 1) to an observer, which must outlive the object.
class work_share {
 public:
  /// `cost`: of each tensor, in any unit. `observer` may be empty and must outlive the object.
  work_share(const std::vector<double>& cost, const weight_observer& observer)
      : all_(std::max(1.0, std::accumulate(cost.begin(), cost.end(), 0.0))), observer_(observer) {}
  /// Adds the cost of a finished tensor and calls the observer, if there is one, with the share done so far.
  void done(const weight_result& tensor, double cost) {
    done_ += cost;
    if (observer_) observer_(tensor, done_ / all_);
  }

 private:
  double all_, done_ = 0.0;
  const weight_observer& observer_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
