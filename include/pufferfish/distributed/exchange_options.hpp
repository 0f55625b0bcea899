// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Options and report of a gradient exchange.

#include <cstddef>
#include <cstdint>
#include <optional>

#include <pufferfish/distributed/exchange/exchange_plan.hpp>
#include <pufferfish/distributed/exchange/nonfinite.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// How messages make progress while layers compute.
enum class exchange_progress {
  automatic,  ///< `thread` if threads may use the communicator, else `calls`
  thread,     ///< a thread of the exchange, asleep while no bucket is ready
  /// Only the calls of layers whose gradients are ready (for MPI_THREAD_FUNNELED and below). Only the
  /// communicator's own sums overlap then; other algorithms and narrow wires run in finish, bucket by bucket,
  /// after the backward pass.
  calls,
};

/// Number format of the messages.
enum class exchange_wire {
  same,  ///< number format of the gradients
  bf16,  ///< half of a float's bytes: rounded to bfloat16, added in float (narrow_all_reduce)
  /// Gradients are sent as float16, which has eight times the precision of bf16. A gradient below 2^-25
  /// becomes 0, and a sum over the ranks of 65520 or more becomes infinity.
  fp16,
};

/// Name of the format, for reports and to compare ranks.
constexpr const char* to_string(exchange_wire wire) {
  return wire == exchange_wire::same ? "same" : wire == exchange_wire::bf16 ? "bf16" : "fp16";
}

/// Memory in which MPI finds the gradients of a device.
/// On the CPU only `staged` is valid; gradients are then exchanged in their arena, without staging.
enum class exchange_memory {
  staged,  ///< in the host's memory: a bucket is copied there and back
  /// Memory of the device: MPI gets device addresses. All ranks must choose it, and their MPI must report
  /// support. Sums are MPI's own. Not with narrow wires, compressors, checks for non-finite gradients and
  /// captured steps (gpu::nccl has all of these except compressors).
  device,
};

/// Name of the memory, for reports and to compare ranks.
constexpr const char* to_string(exchange_memory memory) {
  return memory == exchange_memory::staged ? "staged" : "device";
}

/// Options of gradient_exchange and rare_exchange. The buckets and rules of the plan, `algorithm`, `wire`,
/// `nonfinite`, `memory`, `local` and whether a thread makes progress are compared between the ranks, which
/// must have the same ones.
///
/// Constructors throw value_error on all ranks for
/// - an invalid plan (exchange_plan),
/// - `thread` if other threads may not use the communicator and there are several ranks,
/// - a compressor together with a narrow wire or `local`,
/// - compress_by_bucket with a compressor that has no part(), or that has states() while non-finite gradients
///   are looked for,
/// - exchange_memory::device with a compressor, a narrow wire, a check for non-finite gradients, `ring` or
///   `recursive_doubling`, a time limit that the program has set (mpi::communicator::set_timeout), or
///   gradients in the host's memory.
/// \code
///   exchange_options options;
///   options.wire = exchange_wire::bf16;
///   options.nonfinite = nonfinite_policy::skip;
///   gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, options);
/// \endcode
struct exchange_options {
  std::optional<exchange_plan> plan;  ///< nullopt: default_plan(number of ranks)
  exchange_progress progress = exchange_progress::automatic;
  /// automatic: by the plan; without a thread the communicator's own sum, the only one that overlaps then.
  all_reduce_algorithm algorithm = all_reduce_algorithm::automatic;
  exchange_wire wire = exchange_wire::same;
  nonfinite_policy nonfinite = nonfinite_policy::ignore;
  exchange_memory memory = exchange_memory::staged;
  /// True: a compressor encodes and sends each bucket as soon as its gradients are complete, while the
  /// backward pass still runs, on one thread of the exchange (exchange_progress). False: it handles all
  /// gradients after the backward pass, on all threads. Requires a compressor with part(), and
  /// nonfinite_policy::ignore if the compressor has states(), since these cannot be rolled back.
  bool compress_by_bucket = false;
  /// True: gradients stay those of each rank, and nothing is sent; for ranks that exchange parameters instead
  /// (rare_exchange).
  bool local = false;
};

/// Totals of an exchange since its construction or the last clear_report(), of this rank; times in
/// milliseconds of wall-clock time unless stated otherwise.
struct exchange_report {
  std::uint64_t steps = 0;          ///< all, with skipped ones
  std::uint64_t payload_bytes = 0;  ///< bytes of this rank's messages, over all steps
  std::uint64_t copied_bytes = 0;   ///< gradient bytes packed or unpacked; 0 without a narrow wire
  std::uint64_t skipped = 0;        ///< steps that nonfinite_policy::skip has left out
  /// Time between the end of the backward pass and the end of the exchange, without update_ms.
  double exposed_ms = 0.0;
  double update_ms = 0.0;     ///< time in the call-backs of finish
  double busy_ms = 0.0;       ///< time of the exchange's thread in its jobs
  double processor_ms = 0.0;  ///< processor time of that thread; 0 where the system has no clock
  double encode_ms = 0.0;     ///< time in the compressor
  double decode_ms = 0.0;
};

namespace detail {

constexpr bool is_narrow(exchange_wire wire) { return wire != exchange_wire::same; }
/// Bytes of one gradient in a message.
template <class T>
constexpr std::size_t wire_bytes(exchange_wire wire) {
  return is_narrow(wire) ? sizeof(std::uint16_t) : sizeof(T);
}
/// Whether gradients are checked for NaNs and infinities.
constexpr bool checks_finite(const exchange_options& options) {
  return options.nonfinite != nonfinite_policy::ignore;
}

}  // namespace detail

PUFFERFISH_NAMESPACE_END
