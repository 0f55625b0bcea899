// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// How a gradient exchange goes about it, and what it tells of it.

#include <cstdint>
#include <optional>

#include <pufferfish/dist/exchange_plan.hpp>
#include <pufferfish/dist/nonfinite.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Who moves the messages while layers compute.
enum class exchange_progress {
  automatic,  ///< a thread where the communicator may be used from one, else calls
  thread,     ///< a thread of the exchange's own, asleep while no bucket is ready
  /// Nobody but the layers' calls when a gradient is ready (MPI_THREAD_FUNNELED and less). Only the
  /// communicator's own sums get on like that: what goes by our algorithms or a narrow wire is done in
  /// finish, bucket by bucket, after the backward pass.
  calls,
};

/// How gradients travel.
enum class exchange_wire {
  same,  ///< as they are
  bf16,  ///< half of a float's bytes: rounded to bfloat16, added in float (narrow_all_reduce)
  /// The same with float16: eight times bf16's precision, but a gradient below 2^-25 becomes zero, and a sum
  /// over the ranks of 65520 and more infinity.
  fp16,
};

constexpr const char* to_string(exchange_wire wire) {
  return wire == exchange_wire::same ? "same" : wire == exchange_wire::bf16 ? "bf16" : "fp16";
}

/// Where MPI finds the gradients of a device.
enum class exchange_memory {
  staged,  ///< in the host's memory: a bucket is copied there and back
  /// Where they are: MPI gets the device's addresses. All ranks must ask for it, and their MPI say that it
  /// can. Sums are MPI's own; no narrow wire, no compressor, no look at gradients that are not finite, and no
  /// captured steps (gpu::nccl has all but the compressor).
  device,
};

constexpr const char* to_string(exchange_memory memory) {
  return memory == exchange_memory::staged ? "staged" : "device";
}

struct exchange_options {
  std::optional<exchange_plan> plan;  ///< nothing: default_plan of the ranks
  exchange_progress progress = exchange_progress::automatic;
  /// Automatic: by the plan. Without a thread: the communicator's own, which alone overlaps there.
  all_reduce_algorithm algorithm = all_reduce_algorithm::automatic;
  exchange_wire wire = exchange_wire::same;
  nonfinite_policy nonfinite = nonfinite_policy::ignore;
  exchange_memory memory = exchange_memory::staged;
  /// A compressor encodes and sends each bucket as soon as its gradients are complete, on one thread of the
  /// exchange's (exchange_progress), while the backward pass still runs; else all gradients after it, on all
  /// threads. Not for every compressor (gradient_compressor's part()), and not with a nonfinite_policy but
  /// ignore: what a compressor has taken into its memory cannot be taken back.
  bool compress_by_bucket = false;
  /// Gradients stay those of each rank, and nothing travels: for ranks that exchange parameters instead
  /// (rare_exchange).
  bool local = false;
};

/// What an exchange has done since it was made (or since clear_report).
struct exchange_report {
  std::uint64_t steps = 0;
  std::uint64_t payload_bytes = 0;  ///< of one rank's gradients, as they travel, over all steps
  std::uint64_t copied_bytes = 0;   ///< gradient bytes packed or unpacked: none but for a narrow wire
  std::uint64_t skipped = 0;        ///< steps that nonfinite_policy::skip has left out
  /// Between the end of the backward pass and the end of the exchange, without update_ms.
  double exposed_ms = 0.0;
  double update_ms = 0.0;     ///< in the call-backs of finish
  double busy_ms = 0.0;       ///< of the thread in all-reduces
  double processor_ms = 0.0;  ///< processor time of the thread; 0 where the system does not tell
  double encode_ms = 0.0;     ///< of the compressor
  double decode_ms = 0.0;
};

PUFFERFISH_NAMESPACE_END
