// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `qsgd_codec`: rounds values at random to a few fractions of their bucket's norm.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/compress/quantize/stochastic_rounding.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Norm by which qsgd_codec scales the values of a bucket: Euclidean norm, or largest magnitude.
enum class qsgd_norm { l2, max };

/// Options of qsgd_codec.
struct qsgd_options {
  int bits = 4;          ///< bits of a value, sign included: 2, 4 or 8
  index_t bucket = 512;  ///< consecutive values that share a norm; at least 1
  qsgd_norm norm = qsgd_norm::l2;
  code_route route = code_route::gather;  ///< gather or two_hop, which rounds the mean at random again
  std::uint64_t seed = 1;                 ///< the draws also depend on step, rank, hop and parameter
};

/// Text of the options for messages, such as "QSGD, 4 bits, buckets of 512, L2 norm, seed 1, gather".
inline std::string describe(const qsgd_options& options) {
  return detail::message({"QSGD, ", options.bits, " bits, buckets of ", options.bucket,
                          options.norm == qsgd_norm::l2 ? ", L2 norm, seed " : ", largest magnitude, seed ",
                          options.seed, ", ", to_string(options.route)});
}

/// Quantizes gradients stochastically to a few levels. All N values of D, one tensor after the other, are cut
/// into buckets of d values (options.bucket); the last bucket may be shorter. With b bits per value
/// (options.bits) there are the levels 0 .. s, s = 2^(b-1) - 1. For a bucket whose norm (options.norm: L2, or
/// the largest magnitude) is v:
///
///     a_i = s |D_i| / v;  l_i = floor(a_i) + 1 with probability a_i - floor(a_i), else floor(a_i)
///     C(D)_i = sign(D_i) l_i v / s
///
/// The expected value of C(D) is D. With the L2 norm the expected value of ||C(D) - D||^2 is at most min(d /
/// s^2, sqrt(d) / s) ||D||^2. A bucket of zeros is coded as zeros.
///
/// The code: N fields of b bits, field i in the bits [b i, b i + b) of a little-endian stream of bytes, sign
/// (1: negative) in the field's highest bit, l_i in the others; then the norms of all buckets as T. Sums of
/// squares are taken in double. For T = double, values whose squares overflow make the result NaN.
///
/// Alistarh, Grubic, Li, Tomioka and Vojnovic, QSGD (NIPS 2017), with fields of a fixed width in place of
/// Elias codes.
///
/// A bucket with a value that is not finite decodes to values that are not finite. Fewer bits or longer
/// buckets send fewer bytes and have a larger variance; the norms take sizeof(T) / d bytes per value.
///
/// \code
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, qsgd_options{.bits = 8});
/// \endcode
template <class T>
class qsgd_codec {
 public:
  using value_type = T;
  using options_type = qsgd_options;
  static constexpr bool has_fixed_length = true;

  /// `tensors`: places and sizes of the coded tensors. Throws value_error unless bits is 2, 4 or 8 and bucket
  /// is at least 1.
  explicit qsgd_codec(std::vector<coded_tensor> tensors, const qsgd_options& options = {})
      : options_(checked(options)), tensors_(std::move(tensors)), chunks_(tensors_) {
    norms_.resize(static_cast<std::size_t>(bucket_end(chunks_.size())));
  }

  /// Length of a code of N values in bytes: ceil(b N / 8) + sizeof(T) ceil(N / d).
  std::size_t most_bytes() const { return level_bytes() + norms_.size() * sizeof(T); }

  /// Writes the code of D = gradients + memory to `code`, and D - C(D) to the memory (see gradient_codec).
  /// Equal arguments give equal codes. Returns most_bytes().
  std::size_t encode(context<device::cpu>& ctx, const code_place& place, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    const T* const values = detail::values_to_code(ctx, gradients, memory);
    const auto round = PUFFERFISH_KERNEL(widest_isa(), detail::rounding_passes, round_levels<T>);
    // If buckets fill whole chunks, their values are still in the cache when they are rounded.
    const bool in_chunks = detail::tensor_chunks::chunk_size % options_.bucket == 0;
    if (!in_chunks) {
      const auto buckets = static_cast<index_t>(norms_.size());
      const index_t a_task = std::max<index_t>(1, detail::tensor_chunks::chunk_size / options_.bucket);
      ctx.parallel_for((buckets + a_task - 1) / a_task, [&](index_t task, int) {
        find_norms(values, task * a_task, std::min(buckets, (task + 1) * a_task));
      });
    }
    detail::encode_fields(
        ctx, chunks_, tensors_, detail::code_streams(options_.seed, "qsgd", place, tensors_), options_.bits,
        code.data(),
        [&](index_t begin, index_t end) {
          if (in_chunks) find_norms(values, begin / options_.bucket, bucket_end(end));
        },
        [&](const detail::tensor_part& part, bool whole, const std::uint32_t* words, std::uint8_t* fields) {
          bool decided = true;
          for_each_bucket(part, [&](std::size_t bucket, index_t first, index_t begin, index_t count) {
            const T norm = norms_[bucket];
            decided &= norm == T(0) ? detail::no_fields(fields + first, count)
                                    : round(whole, values + begin, words + first, {most(), norm}, most(),
                                            options_.bits, fields + first, count);
          });
          return decided;
        });
    std::ranges::copy(std::as_bytes(std::span(norms_)), code.data() + level_bytes());
    if (!memory.empty()) decode(ctx, code, decode_as::subtraction, memory);
    return most_bytes();
  }

  /// Writes the values of a code to `to`, which has the length of the arena, or adds them, as `as` says.
  /// Every code of most_bytes() bytes is valid, whatever its bits. Throws value_error for another length,
  /// with `to` unchanged.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    detail::check_code_length("qsgd_codec", code.size(), most_bytes());
    const auto signed_fields = PUFFERFISH_KERNEL(widest_isa(), detail::field_passes, signed_fields);
    detail::decode_fields(
        ctx, chunks_, options_.bits, code.data(),
        [&](std::uint8_t* fields, index_t count) { signed_fields(options_.bits, fields, count); },
        [&](const detail::tensor_part& part, const std::int8_t* levels) {
          for_each_bucket(part, [&](std::size_t bucket, index_t first, index_t begin, index_t count) {
            const T step = detail::read_at<T>(code, level_bytes() + bucket * sizeof(T)) / most();
            detail::put_levels(as, levels + first, step, to.data() + begin, count);
          });
        });
  }

  /// Text of the options on which codes depend. The class that sends the codes adds the route.
  std::string describe() const {
    const std::string whole = pufferfish::describe(options_);
    return whole.substr(0, whole.rfind(','));
  }

 private:
  // Returns the options. Throws value_error if one is out of its range.
  static const qsgd_options& checked(const qsgd_options& options) {
    if (options.bits != 2 && options.bits != 4 && options.bits != 8) {
      detail::throw_error<value_error>({"qsgd: ", options.bits, " bits, not 2, 4 or 8"});
    }
    if (options.bucket < 1) {
      detail::throw_error<value_error>({"qsgd: buckets of ", options.bucket, " values, not at least 1"});
    }
    return options;
  }

  T most() const { return static_cast<T>((1 << (options_.bits - 1)) - 1); }  // the highest level
  // Number of bytes of the fields of a code, before the norms.
  std::size_t level_bytes() const { return detail::field_bytes(chunks_.size(), options_.bits); }
  // Number of buckets that the values before `end` touch.
  index_t bucket_end(index_t end) const { return end == 0 ? 0 : (end - 1) / options_.bucket + 1; }

  // Writes the norms of buckets first .. last - 1.
  void find_norms(const T* values, index_t first, index_t last) {
    const auto squares = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, sum_of_squares<T>);
    const auto range = PUFFERFISH_KERNEL(widest_isa(), detail::rounding_passes, range_of<T>);
    for (index_t bucket = first; bucket < last; ++bucket) {
      const index_t begin = bucket * options_.bucket;
      const index_t count = std::min(options_.bucket, chunks_.size() - begin);
      norms_[static_cast<std::size_t>(bucket)] =
          options_.norm == qsgd_norm::max ? detail::largest_magnitude(range(values + begin, count))
                                          : static_cast<T>(std::sqrt(squares(values + begin, count)));
    }
  }

  // Calls f(bucket, first, begin, count) for every bucket that the part touches. The bucket has `count`
  // values of the part. The first of them is value `first` of the part and value `begin` of all tensors.
  template <class F>
  void for_each_bucket(const detail::tensor_part& part, F&& f) const {
    for (index_t begin = part.begin; begin < part.end;) {
      const index_t bucket = begin / options_.bucket;
      const index_t end = std::min(part.end, (bucket + 1) * options_.bucket);
      f(static_cast<std::size_t>(bucket), begin - part.begin, begin, end - begin);
      begin = end;
    }
  }

  qsgd_options options_;
  std::vector<coded_tensor> tensors_;
  detail::tensor_chunks chunks_;
  std::vector<T> norms_;  // norms of all buckets
};

/// Makes a QSGD compressor for the gradients of `store`, without error memory. Throws value_error for bits or
/// bucket out of range and for the route `sparse`.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const qsgd_options& options) {
  return make_coded_compressor<qsgd_codec<T>>(store, options, code_memory::none, options.route);
}

PUFFERFISH_NAMESPACE_END
