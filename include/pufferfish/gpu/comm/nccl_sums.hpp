// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: means of buckets in the memory of devices by NCCL, and the check for gradients that are not
/// finite, both in the order of a stream. Include <pufferfish/gpu/nccl.hpp>.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <pufferfish/distributed/exchange_options.hpp>
#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/nccl.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Sums buckets by NCCL. With a narrow wire, numbers are sent as by narrow_all_reduce, with the same bits as
/// result: every rank adds its part of the bucket in float, without rounding in between. The narrow sum has
/// three steps on one stream. Rank r owns part r of the bucket. (1) Every rank rounds its bucket to 16 bits
/// and sends part s to rank s. (2) The owner adds the parts of the other ranks, in the order of the distance
/// of their ranks, to its own unrounded part, and rounds the sum. (3) The owner sends the rounded sum to all
/// others, and every rank widens it and multiplies it by 1 / ranks.
template <class T, class Host>
class nccl_reducer {
 public:
  /// `longest_bucket`: elements. With a narrow wire, allocates 4 bytes for each of them, on the current
  /// device. Throws backend_error.
  nccl_reducer(nccl<Host>& comm, exchange_wire wire, index_t longest_bucket)
      : comm_(&comm), wire_(wire), ranks_(static_cast<std::size_t>(comm.size())) {
    if (!pufferfish::detail::is_narrow(wire) || ranks_ == 1) return;
    part_ = longest_bucket / comm.size() + 1;
    sent_ = memory_block<std::uint16_t>(device_memory(), longest_bucket, uninitialized);
    received_ = memory_block<std::uint16_t>(device_memory(), part_ * (comm.size() - 1), uninitialized);
  }

  /// Replaces each element of `values` by its mean over all ranks: the sum times the rounded 1 / ranks. The
  /// work is submitted to the stream. Collective; `values` has the same length on all ranks, at most
  /// longest_bucket. Throws the errors of gpu::nccl.
  void average(std::span<T> values, cudaStream_t stream) {
    if (ranks_ == 1) return;
    if (pufferfish::detail::is_narrow(wire_)) return average_narrow(values, stream);
    comm_->start_sum(values, stream);
    kernels::multiply(stream, values.data(), static_cast<index_t>(values.size()), factor());
  }

 private:
  T factor() const { return T(1) / static_cast<T>(comm_->size()); }

  // The three steps of the class comment. sent_ holds the rounded bucket, then the rounded sums of all parts;
  // received_ holds one part from each other rank.
  void average_narrow(std::span<T> values, cudaStream_t stream) {
    const auto me = static_cast<std::size_t>(comm_->rank());
    const auto format =
        wire_ == exchange_wire::bf16 ? kernels::wire_format::bf16 : kernels::wire_format::fp16;
    const std::span<std::uint16_t> sent = sent_.span().first(values.size());
    const auto part = [&](auto all, std::size_t rank) {
      return pufferfish::detail::part_of(all, rank % ranks_, ranks_);
    };
    const std::span<T> own = part(values, me);
    const std::span<std::uint16_t> sum = part(sent, me);
    const auto from_rank = [&](std::size_t step) {
      return received_.span().subspan((step - 1) * static_cast<std::size_t>(part_), own.size());
    };
    kernels::narrow(stream, format, values.data(), sent.data(), static_cast<index_t>(values.size()));
    for_messages(
        stream, [&](std::size_t to) { return part(sent, to); },
        [&](std::size_t, std::size_t step) { return from_rank(step); });
    kernels::add_narrow(stream, format, received_.data(), comm_->size() - 1, part_, own.data(), sum.data(),
                        static_cast<index_t>(own.size()), factor());
    for_messages(
        stream, [&](std::size_t) { return sum; },
        [&](std::size_t from, std::size_t) { return part(sent, from); });
    const std::size_t before = static_cast<std::size_t>(own.data() - values.data());
    const std::size_t after = before + own.size();
    kernels::widen(stream, format, sent.data(), values.data(), static_cast<index_t>(before), factor());
    kernels::widen(stream, format, sent.data() + after, values.data() + after,
                   static_cast<index_t>(values.size() - after), factor());
  }

  // Sends outgoing(to) to every other rank, `step` ranks ahead, and receives incoming(from, step) from it.
  template <class Outgoing, class Incoming>
  void for_messages(cudaStream_t stream, Outgoing&& outgoing, Incoming&& incoming) {
    const auto me = static_cast<std::size_t>(comm_->rank());
    comm_->start_messages(
        [&](auto&& send, auto&& receive) {
          for (std::size_t step = 1; step < ranks_; ++step) {
            const std::size_t to = (me + step) % ranks_, from = (me + ranks_ - step) % ranks_;
            send(outgoing(to), static_cast<int>(to));
            receive(incoming(from, step), static_cast<int>(from));
          }
        },
        stream);
  }

  nccl<Host>* comm_;
  exchange_wire wire_;
  std::size_t ranks_;
  index_t part_ = 0;  // most elements received from one rank
  memory_block<std::uint16_t> sent_, received_;
};

/// Decides, on the device, whether a step is skipped because of gradients that are not finite. found_[0] is
/// the position of the first such element of this rank's own gradients, found_[1] the smallest of all ranks
/// (rank in the upper bits), found_[2] that of the exchanged gradients; all_finite: none.
template <class T, class Host>
class nccl_finite_check {
 public:
  explicit nccl_finite_check(nccl<Host>& comm)
      : comm_(&comm), skip_(device_memory(), 1), found_(device_memory(), 3), on_host_(pinned_memory(), 2) {}

  /// Address, in device memory, of a flag that is 1 if the step is skipped.
  const int* skip() const { return skip_.data(); }

  // In the order of the stream: restart, find for all gradients, decide when they are exchanged.

  void restart(cudaStream_t stream) {
    gpu::check(cudaMemsetAsync(found_.data(), 0xff, 3 * sizeof(std::uint64_t), stream), "cudaMemsetAsync");
  }
  /// Searches this rank's own gradients, before they are exchanged, for elements that are not finite, and
  /// keeps the position of the first one on the device. `offset` is the position of gradients[0] in the
  /// gradient arena.
  void find(std::span<const T> gradients, index_t offset, cudaStream_t stream) {
    kernels::find_nonfinite(stream, gradients.data(), static_cast<index_t>(gradients.size()),
                            static_cast<std::uint64_t>(offset), found_.data());
  }
  /// Combines over all ranks what calls of find have found in the gradients before the exchange, searches
  /// `exchanged` (the gradients after it), and sets the flag skip() if either search found an element that is
  /// not finite. The positions are copied to the host. All work is submitted to the stream; collective.
  void decide(std::span<const T> exchanged, cudaStream_t stream) {
    kernels::tag_with_rank(stream, found_.data(), static_cast<std::uint64_t>(comm_->rank()),
                           found_.data() + 1);
    comm_->start_min(found_.span().subspan(1, 1), stream);
    kernels::find_nonfinite(stream, exchanged.data(), static_cast<index_t>(exchanged.size()), 0,
                            found_.data() + 2);
    kernels::decide_skip(stream, found_.data() + 1, 2, skip_.data());
    gpu::check(cudaMemcpyAsync(on_host_.data(), found_.data() + 1, 2 * sizeof(std::uint64_t),
                               cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync of non-finite positions to the host");
  }

  /// After the stream has executed decide(): the first gradient that is not finite, if any.
  template <class Store>
  std::optional<nonfinite_gradient> result(const Store& store) const {
    const std::uint64_t own = on_host_.data()[0], exchanged = on_host_.data()[1];
    if (own != kernels::all_finite) {
      return pufferfish::detail::name_nonfinite(store, static_cast<index_t>(own & 0xffffffffffU),
                                                static_cast<int>(own >> 40));
    }
    if (exchanged == kernels::all_finite) return std::nullopt;
    return pufferfish::detail::name_nonfinite(store, static_cast<index_t>(exchanged), -1);
  }

 private:
  nccl<Host>* comm_;
  memory_block<int> skip_;
  memory_block<std::uint64_t> found_;  // first in this rank's gradients, in all ranks', in the exchanged ones
  memory_block<std::uint64_t> on_host_;  // the last two, on the host
};

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
