// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `compact_sum`: averages the gradients of unpruned weights over the ranks, as values or as TernGrad codes.

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/quantize/tern_grad.hpp>
#include <pufferfish/prune/survivor_lists.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of compact_sum.
struct compact_sum_options {
  std::shared_ptr<const weight_mask> mask;  ///< mask, the same on all ranks; not nullptr
  /// Set: TernGrad codes of the survivors are sent instead of their values. With own scalers (shared_scaler =
  /// false), a step has one round and sends 2 bits per survivor and one scaler per tensor.
  std::optional<tern_grad_options> ternary = std::nullopt;
};

/// Text for logs: "compact sum of survivors", "compact sum of survivors, TernGrad, clip 2.5, seed 1, own
/// scalers, gather". The text does not depend on the mask; compact_sum::describe() contains the mask's
/// digest.
inline std::string describe(const compact_sum_options& options) {
  const std::string text = "compact sum of survivors";
  return options.ternary ? text + ", " + describe(*options.ternary) : text;
}

/// Gradient compressor that averages over p ranks only the gradients of weights that are not pruned
/// (survivors). With gradient g_w on rank w and mask m (1 for all elements that may not be pruned):
///
///     result_i = (1 / p) (g_0,i + ... + g_p-1,i) where m_i = 1, else 0
///
/// Only the elements with m_i = 1 are sent, gathered in storage order into one array. All ranks have the same
/// mask, so no indices are sent: 4 bytes per survivor (8 for double). A gradient_exchange compares
/// describe(), which contains the mask's digest, between ranks. The result is that of an exchange without
/// compressor of masked gradients; its bits are equal if the order of additions depends neither on the length
/// of a message nor on the position of an element in the message. Gradients of pruned weights have no
/// influence, even if they are not finite. No error memory is kept. Source: Wang, Wu, Li and Kutscher:
/// "PacTrain", DAC 2025.
///
/// With `ternary`, TernGrad codes of the survivors are sent instead of their values. Tensors without
/// survivors are left out, and random numbers are counted by the position among the survivors of a tensor.
///
/// The constructor makes lists of survivors from the mask: 4 bytes per survivor of a tensor that has pruned
/// elements. A later change of the mask needs a new object. The object shares the ownership of the mask. For
/// gradients on a device, survivors are gathered and scattered on the device if the exchange works by buckets
/// (exchange_options::compress_by_bucket) and does not look for non-finite gradients; then only survivors are
/// copied to the host and back. Without `ternary`, gpu::nccl sums them on the devices.
///
/// \code
/// auto mask = std::make_shared<weight_mask>(net.store());
/// prune_by_magnitude(*mask, net.store(), {.share = 0.8});
/// mask_weights(ctx, *mask, net.store());
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, compact_sum_options{mask});
/// \endcode
template <class T>
class compact_sum {
 public:
  using value_type = T;

  /// Makes the compressor for all parameters of a network. Throws value_error if options.mask is nullptr, for
  /// the route `sparse` in `ternary`, for a name in ternary.skip that is neither a parameter's nor a layer's,
  /// and for a tensor of 2^31 elements or more, which the text names.
  explicit compact_sum(compact_sum_options options)
      : compact_sum(options, 0, options.mask ? options.mask->size() : 0) {}

  /// Makes the compact sum of elements [begin, end) of the arena, for an exchange by buckets: encode and
  /// decode then get the gradients of these elements only. Throws value_error if the range cuts a tensor.
  compact_sum part(index_t begin, index_t end) const { return compact_sum(options_, begin, end); }

  /// Prepares TernGrad for rank `rank` of `ranks` (see gradient_compressor). Does nothing without `ternary`.
  void start(int rank, int ranks) {
    if (ternary_) ternary_->start(rank, ranks);
  }
  int rounds() const { return ternary_ ? ternary_->rounds() : 1; }

  /// Returns the positions of the survivors in the range; later calls of encode and decode get survivors
  /// alone (see gradient_compressor). Throws value_error for a range of 2^31 elements or more.
  std::vector<std::int32_t> pack() {
    std::vector<std::int32_t> places = survivors_.positions();
    packed_ = true;
    values_ = {};
    return places;
  }
  bool is_mean() const { return !ternary_; }

  /// Round 0 gathers the survivors of this rank. The message is their sum, or that of TernGrad. `gradients`
  /// is not changed. Throws value_error unless there is one gradient for each element of [begin, end), kept
  /// or pruned; after pack(), for each survivor.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                               std::span<T> gradients) {
    const index_t expected = packed_ ? survivors_.survivors() : survivors_.size();
    if (static_cast<index_t>(gradients.size()) != expected) {
      detail::throw_error<value_error>(
          {"compact_sum: ", gradients.size(), " gradients for a range of ", expected, " elements"});
    }
    if (round == 0 && !packed_) {
      survivors_.gather(ctx, std::as_const(gradients).data(), values_.data());
    }
    const std::span<T> values = packed_ ? gradients : values_.span();
    if (ternary_) return ternary_->encode(ctx, place, round, values);
    compressor_message<T> message;
    message.sum = values;
    return message;
  }

  /// After the last round, overwrites all gradients of the range: the result for survivors, +0 for all
  /// others. Throws the errors of TernGrad's decode.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int round, std::span<T> gradients) {
    if (ternary_) ternary_->decode(ctx, place, round, packed_ ? gradients : values_.span());
    if (round + 1 < rounds()) return;
    const T factor = ternary_ ? T(1) : T(1) / static_cast<T>(place.ranks);
    if (packed_) return detail::scale_values(gradients, factor);
    survivors_.scatter(ctx, std::as_const(values_).data(), factor, gradients.data());
  }

  /// Bytes that this rank sends: sizeof(T) per survivor; with `ternary`, the bytes of TernGrad for the
  /// survivors.
  index_t payload_bytes() const {
    return ternary_ ? ternary_->payload_bytes() : survivors_.survivors() * static_cast<index_t>(sizeof(T));
  }

  std::vector<compressor_state<T>> states() { return {}; }

  /// Text for logs: "compact sum of 3358788 of 11173834 values, mask 0x0123456789abcdef", followed by
  /// TernGrad's options.
  std::string describe() const {
    std::string text = detail::message({"compact sum of ", survivors_.survivors(), " of ", survivors_.size(),
                                        " values, mask ", detail::hexadecimal(options_.mask->digest())});
    return options_.ternary ? text + ", " + pufferfish::describe(*options_.ternary) : text;
  }

  /// Number of survivors in the range.
  index_t survivors() const { return survivors_.survivors(); }

 private:
  // For the bucket of elements begin .. end - 1.
  compact_sum(const compact_sum_options& options, index_t begin, index_t end)
      : options_(options), survivors_(checked(options), begin, end), values_(survivors_.survivors()) {
    if (options.ternary) ternary_.emplace(make_ternary(begin, end));
  }

  // Throws value_error without a mask, for the route `sparse` and for a name in ternary.skip that is unknown.
  static const weight_mask& checked(const compact_sum_options& options) {
    if (!options.mask) PUFFERFISH_THROW(value_error("compact_sum: the options have no mask"));
    if (options.ternary) {
      const auto& tensors = options.mask->tensors();
      detail::check_tern_route("compact_sum", options.ternary->route);
      detail::check_tern_skips(options.ternary->skip, {tensors.begin(), tensors.end()});
    }
    return *options.mask;
  }

  // Lists the survivors of each tensor as a vector; the vectors are stored without gaps.
  std::vector<coded_tensor> survivor_tensors(index_t begin, index_t end) const {
    std::vector<coded_tensor> result;
    const auto [first, last] = options_.mask->tensor_range(begin, end);
    for (std::size_t t = first; t < last; ++t) {
      const masked_tensor& tensor = options_.mask->tensors()[t];
      if (tensor.kept == 0) continue;
      result.push_back({tensor.name, logical_layout::vector(tensor.kept), survivors_.lists().first(t - first),
                        tensor.kept, 0, tensor.stream});
    }
    return result;
  }

  // Makes TernGrad for the survivors of the range. Names in `skip` of tensors outside the range, or without
  // survivors, are dropped, since TernGrad refuses names that it does not find.
  any_compressor<T> make_ternary(index_t begin, index_t end) const {
    std::vector<coded_tensor> tensors = survivor_tensors(begin, end);
    tern_grad_options options = *options_.ternary;
    std::erase_if(options.skip, [&](const std::string& name) {
      return std::none_of(tensors.begin(), tensors.end(), [&](const coded_tensor& tensor) {
        return detail::names_parameter(name, tensor.name);
      });
    });
    if (options.shared_scaler) return shared_tern_grad<T>(tensors, options);
    if (options.route == code_route::two_hop) {
      return two_hop_codes<tern_codec<T>>(std::move(tensors), options, code_memory::none);
    }
    return gathered_codes<tern_codec<T>>(tensors, options, code_memory::none);
  }

  compact_sum_options options_;
  detail::survivor_lists survivors_;
  aligned_buffer<T> values_;  // survivors of this rank, then their sum or TernGrad's result
  std::optional<any_compressor<T>> ternary_;
  bool packed_ = false;  // true after pack(): gradients are survivors alone, and values_ is empty
};

/// Makes a compact_sum for a network's store. Throws state_error if the mask was made for a network of other
/// parameters, and the errors of compact_sum's constructor.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const compact_sum_options& options) {
  compact_sum<T> made(options);
  options.mask->check_store(store);
  return made;
}

PUFFERFISH_NAMESPACE_END
