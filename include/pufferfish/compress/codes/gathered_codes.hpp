// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gathered_codes`: a compressor that gathers the codes of every rank's gradients on
/// all ranks, with or without error feedback.

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/codec.hpp>
#include <pufferfish/compress/codes/memory_rate.hpp>
#include <pufferfish/distributed/collectives/wire.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Whether a rank adds the error of its last code to its next gradients. A memory takes one value per element
/// of the arena on every rank. Biased codecs (signs, top-k) need it; unbiased ones are used without.
enum class code_memory {
  none,            ///< errors of codes are lost
  error_feedback,  ///< the memory keeps the error in units of gradients
  /// The memory keeps the error as with error_feedback, and is multiplied by a / b when the learning rate of
  /// steps (exchange_place) changes from a to b. The parameters are then those of a memory in units of steps.
  rescaled_error_feedback,
};

/// The kind of memory as text: "no memory", "error feedback" or "rescaled error feedback".
constexpr const char* to_string(code_memory memory) {
  return memory == code_memory::none             ? "no memory"
         : memory == code_memory::error_feedback ? "error feedback"
                                                 : "rescaled error feedback";
}

/// A compressor that gathers the codes of all ranks on all ranks. With gradient g_w and memory e_w on rank w
/// (zero at the start) and the codec's code C:
///
///     D_w = g_w + e_w;  result = (1 / p) (C(D_0) + ... + C(D_p-1));  e_w = D_w - C(D_w)
///
/// Without memory e_w stays zero. Codes are added in the order of the ranks, in T, and the sum is multiplied
/// by 1 / p rounded, so that all ranks get the same bits. Error feedback: Seide et al., INTERSPEECH 2014;
/// Karimireddy et al., ICML 2019, algorithm 2, with the memory in units of gradients. The codec must have a
/// constructor from (std::vector<coded_tensor>, Codec::options_type).
///
/// Cost: the object holds the codes of all p ranks, and decode decodes p codes, so its time grows in
/// proportion to p; two_hop_codes decodes two arenas' worth of codes per rank.
///
/// \code
/// gathered_codes<sign_codec<float>> compressor(coded_tensors(store), {}, code_memory::error_feedback);
/// any_compressor<float> any = std::move(compressor);  // the form that gradient_exchange takes
/// \endcode
template <class Codec>
class gathered_codes {
 public:
  using value_type = typename Codec::value_type;

  /// `tensors`: the tensors of the gradient arena. Throws the errors of Codec's constructor.
  gathered_codes(std::vector<coded_tensor> tensors, const typename Codec::options_type& options,
                 code_memory memory)
      : tensors_(std::move(tensors)),
        options_(options),
        kind_(memory),
        codec_(tensors_, options),
        rate_(memory == code_memory::rescaled_error_feedback) {
    if (memory != code_memory::none) memory_ = aligned_buffer<value_type>(coded_size(tensors_));
  }

  /// Whether part() makes compressors for parts of the arena, so that buckets can be compressed one by one.
  /// False if Codec::has_parts(options) is, because its codes depend on all tensors.
  bool has_parts() const { return detail::codes_have_parts<Codec>(options_); }
  /// A compressor of elements [begin, end) of the arena with a fresh memory of zeros.
  gathered_codes part(index_t begin, index_t end) const {
    return {coded_parts(tensors_, begin, end), options_, kind_};
  }

  /// Number of rounds of messages in a step.
  int rounds() const { return 1; }

  /// Encodes D into the block of this rank and sets the memory to D - C(D). The message has `gathered`; if
  /// codes have no fixed length, also `own` and sends_length. The round is ignored.
  compressor_message<value_type> encode(context<device::cpu>& ctx, const exchange_place& place, int,
                                        std::span<value_type> gradients) {
    const code_place from{place.rank, place.step, 0};
    const auto ranks = static_cast<std::size_t>(place.ranks), me = static_cast<std::size_t>(place.rank);
    compressor_message<value_type> message;
    message.gathered = &codes_;
    rate_.rescale(ctx, place.learning_rate, {memory_.span()});
    if constexpr (Codec::has_fixed_length) {
      if (codes_.count() != ranks) codes_.resize(std::vector<std::size_t>(ranks, codec_.most_bytes()));
      codec_.encode(ctx, from, gradients, memory_.span(), codes_[me]);
    } else {
      own_.resize(codec_.most_bytes());
      const std::size_t length = codec_.encode(ctx, from, gradients, memory_.span(), own_);
      sent_ = length;
      message.own = std::span<const std::byte>(own_).first(length);
      message.sends_length = true;
    }
    return message;
  }

  /// Overwrites `gradients` with the mean of the decoded codes of all ranks. Throws the errors of
  /// Codec::decode if a rank has sent bytes that are not a code; `gradients` is then unspecified.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int, std::span<value_type> gradients) {
    for (std::size_t rank = 0; rank < codes_.count(); ++rank) {
      codec_.decode(ctx, std::as_const(codes_)[rank], rank == 0 ? decode_as::values : decode_as::addition,
                    gradients);
    }
    if (place.ranks > 1)
      detail::scale_values(gradients, value_type(1) / static_cast<value_type>(place.ranks));
  }

  /// Number of bytes of a code. If the codec has no fixed length: the bytes of the last code or, before the
  /// first one, expected_bytes() if the codec has that member, else most_bytes().
  index_t payload_bytes() const {
    if (sent_ > 0) return static_cast<index_t>(sent_);
    if constexpr (requires { codec_.expected_bytes(); }) return static_cast<index_t>(codec_.expected_bytes());
    return static_cast<index_t>(codec_.most_bytes());
  }

  /// States for checkpoints. With memory: "exchange.error", one value per element of the arena, different on
  /// every rank, and, if the memory is rescaled, "exchange.memory_rate", the last learning rate, equal on all
  /// ranks. Without memory: none.
  std::vector<compressor_state<value_type>> states() {
    if (kind_ == code_memory::none) return {};
    return rate_.after({{"exchange.error", memory_.span(), true}});
  }

  /// The codec's text, then the kind of memory: "QSGD, 4 bits, buckets of 512, L2 norm, seed 1, no memory".
  std::string describe() const { return codec_.describe() + ", " + to_string(kind_); }

 private:
  std::vector<coded_tensor> tensors_;
  typename Codec::options_type options_;
  code_memory kind_;
  Codec codec_;
  aligned_buffer<value_type> memory_;  // the memory e
  detail::memory_rate<value_type> rate_;
  std::vector<std::byte> own_;  // this rank's code, if codes have no fixed length
  std::size_t sent_ = 0;        // length of the last code in own_
  rank_blocks codes_;
};

PUFFERFISH_NAMESPACE_END
