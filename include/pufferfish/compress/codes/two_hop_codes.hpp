// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `two_hop_codes`: a compressor that sends codes of stripes to the stripes' owners,
/// which send codes of the means to all ranks.

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/codes/code_route.hpp>
#include <pufferfish/compress/codes/gathered_codes.hpp>
#include <pufferfish/compress/codes/summed_entries.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Stripe number `stripe` of an array of `size` elements that is cut into `count` stripes: the elements
/// [stripe S, (stripe + 1) S) with S = 32 ceil(size / (32 count)), so that the sign bits of a stripe fill
/// whole 32-bit words. The last stripes may be shorter or empty. Requires 0 <= stripe < count.
struct stripe_range {
  index_t begin = 0, end = 0;
  /// Number of elements; 0 for an empty stripe.
  index_t size() const { return end - begin; }
};
/// Stripe number `stripe` of `count` stripes of an array of `size` elements; see stripe_range.
inline stripe_range stripe_of(index_t size, int stripe, int count) {
  const index_t words = (size + 31) / 32, length = 32 * ((words + count - 1) / count);
  return {std::min(size, stripe * length), std::min(size, (stripe + 1) * length)};
}

/// A compressor that averages codes in two hops. The gradient array is cut into one stripe per rank; rank r
/// owns stripe r. In hop 1 every rank sends the code of each stripe to its owner; in hop 2 every owner sends
/// the code of the stripe's mean to all ranks. On p ranks, with gradients g_w and memory e_w on rank w,
/// memory E_r of the owner of stripe r (all zero at the start), and C(D) the values that the codec's code of
/// D decodes to, where each tensor's part in a stripe is coded like a tensor of its own:
///
///     hop 1:  D_w = g_w + e_w; C(D_w) of stripe r is sent to rank r; e_w = D_w - C(D_w)
///     hop 2:  V = (1 / p) (C(D_0) + ... + C(D_p-1)) + E_r on rank r; C(V) is sent to all; E_r = V - C(V)
///     result: C(V) of all stripes, the same bits on all ranks
///
/// Without memory e and E stay zero. On three or more ranks each rank sends fewer bytes than by a gather:
/// about 2 codes instead of p - 1. With error feedback and a code of signs: DoubleSqueeze (Tang et al., ICML
/// 2019).
///
/// The codec must have a fixed length, and a constructor from (std::vector<coded_tensor>,
/// Codec::options_type).
///
/// Stripes depend on the number of ranks: the memories of a checkpoint fit only runs on the same number of
/// ranks. With exchange_options::compress_by_bucket each bucket is cut into stripes, so that all ranks own
/// equal parts of it. On several ranks the parts of tensors that are coded together are then different ones.
/// On one rank the gradients are coded twice.
///
/// \code
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {},
///                                                      sign_codec_options{.route = code_route::two_hop});
/// \endcode
template <class Codec>
class two_hop_codes {
 public:
  using value_type = typename Codec::value_type;
  static_assert(Codec::has_fixed_length,
                "pufferfish: both ends of a two-hop exchange must know the lengths of codes");

  /// Makes a compressor for the tensors of the gradient array. Until start(rank, ranks) is called, which
  /// gradient_exchange does, the object works for a group of one rank. `memory`: whether errors are fed back.
  /// Throws the errors of Codec's constructor.
  two_hop_codes(std::vector<coded_tensor> tensors, const typename Codec::options_type& options,
                code_memory memory)
      : tensors_(std::move(tensors)), options_(options), kind_(memory) {
    start(0, 1);
  }

  /// Prepares the object for rank `rank` of `ranks`, 0 <= rank < ranks, and sets the memories to zero. Spans
  /// of states() become invalid. Throws the errors of Codec's constructor.
  void start(int rank, int ranks) {
    const index_t size = coded_size(tensors_);
    stripes_.clear();
    codecs_.clear();
    std::vector<std::size_t> lengths;
    for (int r = 0; r < ranks; ++r) {
      const stripe_range stripe = stripes_.emplace_back(stripe_of(size, r, ranks));
      codecs_.emplace_back(coded_parts(tensors_, stripe.begin, stripe.end), options_);
      lengths.push_back(codecs_.back().most_bytes());
    }
    const auto me = static_cast<std::size_t>(rank);
    out_.resize(lengths);
    in_.resize(std::vector<std::size_t>(lengths.size(), lengths[me]));
    means_.resize(lengths);
    mean_ = aligned_buffer<value_type>(stripes_[me].size());
    if (kind_ == code_memory::none) return;
    rate_ = detail::memory_rate<value_type>(kind_ == code_memory::rescaled_error_feedback);
    memory_ = aligned_buffer<value_type>(size);
    owner_memory_ = aligned_buffer<value_type>(stripes_[me].size());
  }

  /// Whether part() makes compressors for parts of the arena, so that buckets can be compressed one by one.
  /// False if Codec::has_parts(options) is, because its codes depend on all tensors.
  bool has_parts() const { return detail::codes_have_parts<Codec>(options_); }
  /// A compressor of elements [begin, end) of the arena, cut into stripes of their own, with fresh memories
  /// of zeros.
  two_hop_codes part(index_t begin, index_t end) const {
    return {coded_parts(tensors_, begin, end), options_, kind_};
  }

  /// Number of rounds of messages in a step.
  int rounds() const { return 2; }

  /// Round 0 codes all stripes of the gradients (to_ranks, from_ranks), round 1 the mean of this rank's
  /// stripe (gathered). Ranks and rank must be those of start. `gradients` is not changed.
  compressor_message<value_type> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                                        std::span<value_type> gradients) {
    const auto me = static_cast<std::size_t>(place.rank);
    const code_place from{place.rank, place.step, round};
    compressor_message<value_type> message;
    if (round == 0) {
      rate_.rescale(ctx, place.learning_rate, {memory_.span(), owner_memory_.span()});
      for (std::size_t r = 0; r < stripes_.size(); ++r) {
        codecs_[r].encode(ctx, from, part(gradients, r),
                          kind_ != code_memory::none ? part(memory_.span(), r) : none(), out_[r]);
      }
      message.to_ranks = &out_;
      message.from_ranks = &in_;
    } else {
      codecs_[me].encode(ctx, from, mean_.span(), owner_memory_.span(), means_[me]);
      message.gathered = &means_;
    }
    return message;
  }

  /// Round 0 averages the codes received for this rank's stripe, round 1 overwrites `gradients` with the
  /// result. Throws the errors of Codec::decode.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int round,
              std::span<value_type> gradients) {
    if (round == 0) {
      const Codec& own = codecs_[static_cast<std::size_t>(place.rank)];
      for (std::size_t w = 0; w < in_.count(); ++w) {
        own.decode(ctx, std::as_const(in_)[w], w == 0 ? decode_as::values : decode_as::addition,
                   mean_.span());
      }
      detail::scale_values(mean_.span(), value_type(1) / static_cast<value_type>(place.ranks));
      return;
    }
    for (std::size_t r = 0; r < stripes_.size(); ++r) {
      codecs_[r].decode(ctx, std::as_const(means_)[r], decode_as::values, part(gradients, r));
    }
  }

  /// Number of bytes of all codes of hop 1 and of this rank's code of hop 2.
  index_t payload_bytes() const { return static_cast<index_t>(out_.bytes().size() + in_.size(0)); }

  /// States for checkpoints. With memory: "exchange.error" (e, length of the arena) and
  /// "exchange.owner_error" (E, length of this rank's stripe), different on every rank, and
  /// "exchange.memory_rate" if memories are rescaled. Without memory: none.
  std::vector<compressor_state<value_type>> states() {
    if (kind_ == code_memory::none) return {};
    return rate_.after(
        {{"exchange.error", memory_.span(), true}, {"exchange.owner_error", owner_memory_.span(), true}});
  }

  /// The codec's text, then ", two hops" and the kind of memory: "sign and norm, two hops, error feedback at
  /// both".
  std::string describe() const {
    return codecs_[0].describe() + ", two hops, " + to_string(kind_) +
           (kind_ == code_memory::none ? "" : " at both");
  }

 private:
  static std::span<value_type> none() { return {}; }
  // The values of one stripe.
  std::span<value_type> part(std::span<value_type> all, std::size_t stripe) const {
    const stripe_range& range = stripes_[stripe];
    return all.subspan(static_cast<std::size_t>(range.begin), static_cast<std::size_t>(range.size()));
  }

  std::vector<coded_tensor> tensors_;
  typename Codec::options_type options_;
  code_memory kind_;
  std::vector<stripe_range> stripes_;
  std::vector<Codec> codecs_;                // codec of each stripe
  rank_blocks out_, in_, means_;             // codes sent and received in hop 1, codes of hop 2
  aligned_buffer<value_type> mean_;          // mean of this rank's stripe
  aligned_buffer<value_type> memory_;        // the memory e
  aligned_buffer<value_type> owner_memory_;  // the owner's memory E
  detail::memory_rate<value_type> rate_;
};

/// Makes a compressor for the gradients of a store: gathered_codes, two_hop_codes or summed_entries of the
/// codec, depending on `route`. Throws value_error for the route `two_hop` if codes have no fixed length, and
/// for `sparse` if codes are not lists of entries; the text names the codec and the route. Other errors are
/// those of Codec's constructor; for `sparse` also those of summed_entries.
template <class Codec, class T>
any_compressor<T> make_coded_compressor(const parameter_store<T>& store,
                                        const typename Codec::options_type& options, code_memory memory,
                                        code_route route = code_route::gather) {
  std::vector<coded_tensor> tensors = coded_tensors(store);
  if constexpr (Codec::has_fixed_length) {
    if (route == code_route::two_hop) return two_hop_codes<Codec>(std::move(tensors), options, memory);
  }
  if constexpr (requires { Codec::has_entries; }) {
    if (route == code_route::sparse) return summed_entries<Codec>(std::move(tensors), options, memory);
  }
  if (route != code_route::gather) {
    detail::throw_error<value_error>(
        {Codec(tensors, options).describe(), ": codes cannot travel by ", to_string(route)});
  }
  return gathered_codes<Codec>(std::move(tensors), options, memory);
}

PUFFERFISH_NAMESPACE_END
