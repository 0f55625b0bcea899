// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `shared_tern_grad`: TernGrad with scalers that all ranks share, so that sums are small whole numbers.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/quantize/tern_codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Returns the smallest float that is at least x, limited to the largest float; infinity if x is not finite.
template <class T>
float float_above(T x) {
  if (!std::isfinite(x)) return std::numeric_limits<float>::infinity();
  if (x >= static_cast<T>(std::numeric_limits<float>::max())) return std::numeric_limits<float>::max();
  const auto rounded = static_cast<float>(x);
  return static_cast<T>(rounded) < x ? std::nextafter(rounded, std::numeric_limits<float>::infinity())
                                     : rounded;
}

}  // namespace detail

/// TernGrad with shared scalers. Each tensor has, on rank w of p with gradient g_w and its standard deviation
/// sigma_w, the bound c_w = clip sigma_w; c_w = max_i |g_w,i| if that is zero. Then
///
///     s = min(max_w c_w, max_w,i |g_w,i|)
///     k_w,i = sign(g_w,i) with probability min(1, |g_w,i| / s), else 0
///     result_i = (k_0,i + ... + k_p-1,i) (s / p)
///
/// First an all-reduce computes the maxima over the ranks of two floats per tensor, and the sums of the
/// parameters that options.skip names, whose result is their mean. For T = double the floats are rounded up.
///
/// Route `gather`: the k_w of all tensors are sent to all ranks, in fields of 2 bits. Route `two_hop`: all
/// ranks send the k_w of stripe r (stripe_of, over the values that are not sent whole) to rank r, in fields
/// of 2 bits; then rank r sends p plus their sums to all ranks, in fields of ceil(log2(2 p + 1)) bits. Sums
/// of signs are exact, so both routes have the same bits. For p = 2 a rank sends more bytes by two hops than
/// by a gather, from p = 3 on fewer: (1 + b / 2) / p times as many, with b bits of a sum.
///
/// Wen, Xu, Yan, Wu, Wang, Chen and Li, TernGrad (NIPS 2017), scaler sharing.
/// In the reference program s = max_w c_w.
///
/// The state is empty: TernGrad has no error memory. new_compressor(store, tern_grad_options{}) makes this
/// class.
///
/// \code
/// const tern_grad_options options{.skip = {"fc"}, .route = code_route::two_hop};  // "fc" is sent whole
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// \endcode
template <class T>
class shared_tern_grad {
 public:
  using value_type = T;

  /// `tensors`: the tensors of the whole arena. options.shared_scaler has no effect. Throws value_error for
  /// the route `sparse`, for a clip that is negative or not finite, and for a name in options.skip that is
  /// not the name of a parameter or layer.
  shared_tern_grad(const std::vector<coded_tensor>& tensors, const tern_grad_options& options)
      : shared_tern_grad(options, tensors) {
    detail::check_tern_route("shared_tern_grad", options.route);
    detail::check_tern_skips(options.skip, tensors);
  }

  /// Prepares the buffers for rank `rank` of `ranks`, 0 <= rank < ranks.
  void start(int rank, int ranks) {
    const auto count = static_cast<std::size_t>(ranks);
    if (options_.route == code_route::gather) {
      codes_of_ranks_.resize(std::vector<std::size_t>(count, codes_.code_bytes()));
      return;
    }
    sum_bits_ = static_cast<int>(std::bit_width(2U * static_cast<unsigned>(ranks)));
    std::vector<std::size_t> fields, sums;
    for (int r = 0; r < ranks; ++r) {
      const index_t size = stripe_of(codes_.chunks().size(), r, ranks).size();
      fields.push_back(detail::field_bytes(size, codes_.bits));
      sums.push_back(detail::field_bytes(size, sum_bits_));
    }
    stripe_ = stripe_of(codes_.chunks().size(), rank, ranks).size();
    out_.resize(fields);
    codes_of_ranks_.resize(std::vector<std::size_t>(count, fields[static_cast<std::size_t>(rank)]));
    sums_.resize(sums);
  }

  /// Makes a compressor of elements [begin, end) of the arena, with stripes of its own if it has two hops.
  /// Its result for these elements has the bits that this object's result has.
  shared_tern_grad part(index_t begin, index_t end) const {
    return {options_, coded_parts(tensors_, begin, end)};
  }

  /// Number of rounds of messages in a step: 2 by gather, 3 by two hops.
  int rounds() const { return options_.route == code_route::gather ? 2 : 3; }

  /// Prepares the message of a round. Round 0: maxima of the bounds of all tensors, and sums of the values
  /// that are sent whole. Round 1: codes, gathered or sent to the owners of stripes. Round 2, by two hops:
  /// the gathered sums of stripes. `gradients` is not changed.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                               std::span<T> gradients) {
    compressor_message<T> message;
    if (round == 0) {
      find_maxima(ctx, gradients);
      message.sum = whole_;
      message.maxima = maxima_;
    } else if (round == 2) {
      message.gathered = &sums_;
    } else {
      const bool gathers = options_.route == code_route::gather;
      const auto me = static_cast<std::size_t>(place.rank);
      const code_place from{place.rank, place.step, 0};
      // Stripes fill whole bytes: their blocks together are the code of all values.
      codes_.encode(ctx, detail::code_streams(options_.seed, "tern_grad", from, codes_.coded()), scalers_,
                    gradients.data(), gathers ? codes_of_ranks_[me].data() : out_[0].data());
      message.gathered = gathers ? &codes_of_ranks_ : nullptr;
      message.to_ranks = gathers ? nullptr : &out_;
      message.from_ranks = gathers ? nullptr : &codes_of_ranks_;
    }
    return message;
  }

  /// Reads the received message of a round; the last round overwrites `gradients` with the result. Throws
  /// value_error for an invalid field of a code or an impossible sum; `gradients` is then unspecified.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int round, std::span<T> gradients) {
    if (round == 0) return take_maxima();
    if (round == 1 && detail::has_invalid_tern(codes_of_ranks_.bytes())) {
      PUFFERFISH_THROW(value_error("shared_tern_grad: a field 11 in a code"));
    }
    if (round == 1 && options_.route == code_route::two_hop) return add_up(ctx, place);
    const T share = T(1) / static_cast<T>(place.ranks);
    put_whole(share, gradients);
    put_sums(ctx, place.ranks, share, gradients.data());
  }

  /// Bytes that this rank contributes to a step: codes (by two hops also the sums of its stripe), 8 bytes per
  /// coded tensor for the maxima, and the values that are sent whole.
  index_t payload_bytes() const {
    const std::size_t codes = options_.route == code_route::gather
                                  ? codes_.code_bytes()
                                  : out_.bytes().size() + detail::field_bytes(stripe_, sum_bits_);
    return static_cast<index_t>(codes + 2 * codes_.coded().size() * sizeof(float) +
                                whole_.size() * sizeof(T));
  }

  /// States for checkpoints: none.
  std::vector<compressor_state<T>> states() { return {}; }

  /// Text of the options.
  std::string describe() const { return pufferfish::describe(options_); }

 private:
  using sums_of_piece = std::int32_t[detail::field_piece];

  // Checks neither the route nor the names in options.skip: a part does not have all tensors.
  shared_tern_grad(const tern_grad_options& options, std::vector<coded_tensor> tensors)
      : options_(options), tensors_(std::move(tensors)), codes_(tensors_, options.clip, options.skip) {
    options_.shared_scaler = true;
    whole_.resize(static_cast<std::size_t>(codes_.whole_size()));
    start(0, 1);
  }

  // Computes this rank's bounds of all coded tensors and copies the values that are sent whole.
  void find_maxima(context<device::cpu>& ctx, std::span<const T> gradients) {
    maxima_.clear();
    for (const detail::tern_bounds<T>& bounds : codes_.bounds(ctx, gradients.data())) {
      maxima_.push_back(detail::float_above(bounds.clip));
      maxima_.push_back(detail::float_above(bounds.largest));
    }
    codes_.for_each_whole([&](index_t position, index_t size, index_t first) {
      std::copy_n(gradients.begin() + position, size, whole_.begin() + first);
    });
  }

  // Computes the scalers from the maxima over all ranks.
  void take_maxima() {
    scalers_.clear();
    for (std::size_t t = 0; t < maxima_.size(); t += 2) {
      scalers_.push_back(static_cast<T>(std::min(maxima_[t], maxima_[t + 1])));
    }
  }

  // Sums the levels of all ranks, for the values [begin, end) of the codes that this rank has received.
  void add_codes(index_t begin, index_t end, sums_of_piece& sums) const {
    const auto unpack = PUFFERFISH_KERNEL(widest_isa(), detail::field_passes, unpack_fields);
    const auto ternary = PUFFERFISH_KERNEL(widest_isa(), detail::field_passes, ternary_fields);
    const auto add = PUFFERFISH_KERNEL(widest_isa(), detail::field_passes, add_levels);
    alignas(64) std::uint8_t fields[detail::field_piece];
    std::fill_n(sums, end - begin, 0);
    for (std::size_t rank = 0; rank < codes_of_ranks_.count(); ++rank) {
      const auto* const code = reinterpret_cast<const std::uint8_t*>(codes_of_ranks_[rank].data());
      unpack(codes_.bits, code + begin * codes_.bits / 8, end - begin, fields);
      ternary(fields, end - begin);
      add(reinterpret_cast<const std::int8_t*>(fields), sums, end - begin);
    }
  }

  // Packs the sums of this rank's stripe.
  void add_up(context<device::cpu>& ctx, const exchange_place& place) {
    auto* const to = reinterpret_cast<std::uint8_t*>(sums_[static_cast<std::size_t>(place.rank)].data());
    constexpr index_t piece = detail::field_piece;
    ctx.parallel_for((stripe_ + piece - 1) / piece, [&](index_t task, int) {
      const index_t begin = task * piece, end = std::min(stripe_, begin + piece);
      sums_of_piece sums;
      add_codes(begin, end, sums);
      detail::pack_sums(sum_bits_, sums, place.ranks, end - begin, to + begin * sum_bits_ / 8);
    });
  }

  // Computes `to`, sums of levels times scaler times share, for all coded tensors. Throws value_error for an
  // impossible sum.
  void put_sums(context<device::cpu>& ctx, int ranks, T share, T* to) const {
    const auto scaled = PUFFERFISH_KERNEL(widest_isa(), detail::field_passes, scaled_levels<T, std::int32_t>);
    const bool gathers = options_.route == code_route::gather;
    const auto* const from = gathers ? nullptr : reinterpret_cast<const std::uint8_t*>(sums_.bytes().data());
    codes_.chunks().for_each(
        ctx, [&](index_t begin, index_t end, std::span<const detail::tensor_part> parts, std::size_t) {
          for (index_t at = begin; at < end; at += detail::field_piece) {
            const index_t last = std::min(end, at + detail::field_piece);
            sums_of_piece sums;
            if (gathers) {
              add_codes(at, last, sums);
            } else if (!detail::unpack_sums(sum_bits_, from + at * sum_bits_ / 8, ranks, last - at, sums)) {
              PUFFERFISH_THROW(value_error("shared_tern_grad: a sum of signs above the number of ranks"));
            }
            detail::for_each_part(parts, at, last, [&](const detail::tensor_part& part) {
              scaled(sums + (part.begin - at), scalers_[part.tensor] * share, to + codes_.position(part),
                     part.size());
            });
          }
        });
  }

  // Writes the means of the values that are sent whole.
  void put_whole(T share, std::span<T> gradients) const {
    codes_.for_each_whole([&](index_t position, index_t size, index_t first) {
      for (index_t i = 0; i < size; ++i) {
        gradients[static_cast<std::size_t>(position + i)] =
            whole_[static_cast<std::size_t>(first + i)] * share;
      }
    });
  }

  tern_grad_options options_;
  std::vector<coded_tensor> tensors_;
  detail::tern_codes<T> codes_;
  std::vector<float> maxima_;   // of each coded tensor: clip sigma, largest magnitude
  std::vector<T> scalers_;      // s of each coded tensor
  std::vector<T> whole_;        // values that are sent whole, then their sums
  rank_blocks codes_of_ranks_;  // gather: of all values; two hops: of this rank's stripe
  rank_blocks out_, sums_;      // two hops: codes for all ranks, sums of all stripes
  index_t stripe_ = 0;          // values of this rank's stripe
  int sum_bits_ = 0;
};

PUFFERFISH_NAMESPACE_END
