// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `summed_entries`: a compressor that sends some entries of every rank's gradients
/// and adds them up by a sparse all-reduce.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/codes/code_route.hpp>
#include <pufferfish/compress/codes/gathered_codes.hpp>
#include <pufferfish/distributed/collectives/sparse_stream.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A compressor for codecs whose codes are lists of entries. Computes the result of gathered_codes up to
/// rounding:
///
///     D_w = g_w + e_w;  result = (1 / p) (C(D_0) + ... + C(D_p-1));  e_w = D_w - C(D_w)
///
/// The entries of a rank are a sparse_stream over all tensors. sparse_all_reduce adds the streams and selects
/// its algorithm. Compared with a gather, fewer bytes are sent if many entries of different ranks coincide or
/// if the sum is dense; with entries at independent positions, as many as by a gather.
///
/// The codec must have a constructor from (std::vector<coded_tensor>, Codec::options_type) and
///     has_entries                   static constexpr bool: true
///     for_each_entry(code, f)       f(index, value) for the entries of a code, by ascending index; indices
///                                   count over all tensors
///
/// \code
/// const top_k_options options{.ratio = 0.01, .route = code_route::sparse};
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// \endcode
template <class Codec>
class summed_entries {
 public:
  using value_type = typename Codec::value_type;

  /// `tensors`: the tensors of the gradient arena. Throws value_error if they have 2^31 elements or more
  /// together. Other errors are those of Codec's constructor.
  summed_entries(std::vector<coded_tensor> tensors, const typename Codec::options_type& options,
                 code_memory memory)
      : tensors_(std::move(tensors)),
        options_(options),
        kind_(memory),
        codec_(tensors_, options),
        rate_(memory == code_memory::rescaled_error_feedback),
        stream_(coded_size(tensors_)) {
    if (memory != code_memory::none) memory_ = aligned_buffer<value_type>(stream_.length());
    code_.resize(codec_.most_bytes());
    sent_ = header_bytes +
            std::min(code_.size(), static_cast<std::size_t>(stream_.length()) * sizeof(value_type));
  }

  /// Whether part() makes compressors for parts of the arena, so that buckets can be compressed one by one.
  /// False if Codec::has_parts(options) is, because its codes depend on all tensors.
  bool has_parts() const { return detail::codes_have_parts<Codec>(options_); }
  /// A compressor of elements [begin, end) of the arena with a fresh memory of zeros.
  summed_entries part(index_t begin, index_t end) const {
    return {coded_parts(tensors_, begin, end), options_, kind_};
  }

  /// Number of rounds of messages in a step.
  int rounds() const { return 1; }

  /// Encodes D, sets the memory to D - C(D), and sends the entries of C(D) as `sparse`: dense if the entries
  /// are more than sparse_stream::most_entries(). `gradients` is not changed.
  compressor_message<value_type> encode(context<device::cpu>& ctx, const exchange_place& place, int,
                                        std::span<value_type> gradients) {
    rate_.rescale(ctx, place.learning_rate, {memory_.span()});
    const std::size_t length =
        codec_.encode(ctx, {place.rank, place.step, 0}, gradients, memory_.span(), code_);
    indices_.clear();
    values_.clear();
    codec_.for_each_entry(std::span<const std::byte>(code_).first(length),
                          [&](index_t index, value_type value) {
                            indices_.push_back(static_cast<std::int32_t>(index));
                            values_.push_back(value);
                          });
    stream_ = sparse_stream<value_type>(stream_.length(), indices_, values_);
    sent_ = header_bytes + stream_.body_bytes();
    compressor_message<value_type> message;
    message.sparse = &stream_;
    return message;
  }

  /// Overwrites all of `gradients` with 1 / p times the sum of the streams of all ranks.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int, std::span<value_type> gradients) {
    ops::fill(ctx, gradients, value_type(0));
    stream_.add_to(gradients);
    detail::scale_values(gradients, value_type(1) / static_cast<value_type>(place.ranks));
  }

  /// Bytes of this rank's last stream. Before the first one: the most bytes that a stream can have.
  index_t payload_bytes() const { return static_cast<index_t>(sent_); }

  /// States for checkpoints. With memory: "exchange.error", one value per element, different on every rank,
  /// and "exchange.memory_rate" if the memory is rescaled. Without memory: none.
  std::vector<compressor_state<value_type>> states() {
    if (kind_ == code_memory::none) return {};
    return rate_.after({{"exchange.error", memory_.span(), true}});
  }

  /// The codec's text, then the kind of memory and ", sparse sum".
  std::string describe() const {
    return codec_.describe() + ", " + to_string(kind_) + ", " + to_string(code_route::sparse);
  }

 private:
  static constexpr std::size_t header_bytes = sparse_stream<value_type>::header_bytes;

  std::vector<coded_tensor> tensors_;
  typename Codec::options_type options_;
  code_memory kind_;
  Codec codec_;
  detail::memory_rate<value_type> rate_;
  aligned_buffer<value_type> memory_;  // the memory e
  std::vector<std::byte> code_;
  std::vector<std::int32_t> indices_;  // the entries of the code, over all tensors
  std::vector<value_type> values_;
  sparse_stream<value_type> stream_;
  std::size_t sent_ = 0;
};

PUFFERFISH_NAMESPACE_END
