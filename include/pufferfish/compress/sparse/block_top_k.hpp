// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `block_top_k_codec`: sends the largest values of every block of a matrix, with two bits each. With error
/// feedback that decays, this is the codec of SparseLoCo.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/codes/code_fields.hpp>
#include <pufferfish/compress/sparse/block_top_k_options.hpp>
#include <pufferfish/compress/sparse/kth_largest.hpp>
#include <pufferfish/compress/sparse/matrix_blocks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Codes the values of largest magnitude of every block, with two bits each. With gradients g and memory e of
/// the earlier codes, D = g + decay e, and e becomes D - C(D). Tensors are cut into blocks of at most side^2
/// values (detail::matrix_blocks). In each block, of n values,
///
///     m = min(n, ceil(count n / side^2)) values of largest |D_i| are sent; of equal ones, the lower index;
///     C(D)_i = sign(D_i) h for sent values with |D_i| >= b, sign(D_i) l for other sent values,
///     0 for values that are not sent
///
/// where l <= h are the two levels with the least squared error of the m magnitudes, and b is the least
/// magnitude of level h (detail::best_levels). A value thus takes two bits: its sign and its level.
///
/// The code, without gaps, has for each block: l and h as T; the m indices in the block, row by row and
/// ascending, in fields of `index_bits()` bits (12 for a side of 64); m fields of two bits, of which the
/// lower one is set for h and the higher one for negative values. Both lists of fields end at whole bytes. A
/// block of 64 x 64 floats takes 120 bytes, 1 / 136.5 of its values.
///
/// Blockwise top-k with two bits a value, and the decay: Sarfi et al., "Communication efficient LLM
/// pre-training with SparseLoCo", 2025. The two levels, and blocks of other shapes for thin matrices, are
/// this library's choice.
///
/// Values that are not finite count as the largest of their block, and make both of its levels not finite.
/// Without memory the decay has no effect.
///
/// \code
/// block_top_k_options options{.side = 64, .count = 64};  // 64 of the 4096 values of a block
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// \endcode
template <class T>
class block_top_k_codec {
 public:
  using value_type = T;
  using options_type = block_top_k_options;
  static constexpr bool has_fixed_length = true;

  /// `tensors`: places and sizes of the coded tensors. Throws the errors of block_top_k_options::validate.
  explicit block_top_k_codec(std::vector<coded_tensor> tensors, const block_top_k_options& options = {})
      : options_((options.validate(), options)), tensors_(std::move(tensors)) {
    for (const detail::matrix_block& block : detail::matrix_blocks(tensors_, options_.side)) {
      const index_t whole = options_.side * options_.side;
      const index_t sent = (options_.count * block.size() + whole - 1) / whole;
      blocks_.push_back({block, sent, bytes_});
      bytes_ +=
          2 * sizeof(T) + detail::field_bytes(sent, index_bits()) + detail::field_bytes(sent, value_bits);
    }
  }

  /// Length of a code in bytes: per block 2 sizeof(T), and the two lists of fields, each rounded up to whole
  /// bytes.
  std::size_t most_bytes() const { return bytes_; }
  /// Number of bits of the index of a value in its block: ceil(log2(side^2)), at least 2.
  int index_bits() const {
    const auto last = static_cast<std::uint64_t>(options_.side * options_.side - 1);
    return std::max(2, static_cast<int>(std::bit_width(last)));
  }

  /// Writes the code of D = gradients + decay memory to `code`, and D - C(D) to the memory (see
  /// gradient_codec). `place` is ignored: the code is deterministic. Returns most_bytes().
  std::size_t encode(context<device::cpu>& ctx, const code_place&, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    ctx.parallel_for(static_cast<index_t>(blocks_.size()), [&](index_t task, int) {
      const coded_block& block = blocks_[static_cast<std::size_t>(task)];
      std::vector<T> values(static_cast<std::size_t>(block.shape.size()));
      take(block.shape, gradients, memory, values);
      encode_block(block, values, memory, code);
    });
    return bytes_;
  }

  /// Stores, adds or subtracts the decoded values; see gradient_codec. Throws value_error, with `to`
  /// unchanged, unless the code has most_bytes() bytes, and, naming the tensor, for indices that are not
  /// ascending or not in the block.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    detail::check_code_length("block_top_k_codec", code.size(), bytes_);
    const auto count = static_cast<index_t>(blocks_.size());
    ctx.parallel_for(count, [&](index_t task, int) {
      const coded_block& block = blocks_[static_cast<std::size_t>(task)];
      check_indices(block, indices_of(block, code));
    });
    ctx.parallel_for(count, [&](index_t task, int) {
      const coded_block& block = blocks_[static_cast<std::size_t>(task)];
      if (as == decode_as::values) clear(block.shape, to);
      put(block, indices_of(block, code), code, as, to);
    });
  }

  /// Text of the options on which codes depend. The class that sends the codes adds memory and route.
  std::string describe() const { return detail::describe_codes(options_); }

 private:
  static constexpr int value_bits = 2;
  static constexpr std::int32_t high_bit = 1, sign_bit = 2;

  // A block, and the position of its code.
  struct coded_block {
    detail::matrix_block shape;
    index_t sent;      // number of values sent
    std::size_t byte;  // first byte of its code
  };

  // First byte of a block's indices in a code, after its two levels.
  std::size_t index_byte(const coded_block& block) const { return block.byte + 2 * sizeof(T); }
  // First byte of a block's signs and levels in a code.
  std::size_t value_byte(const coded_block& block) const {
    return index_byte(block) + detail::field_bytes(block.sent, index_bits());
  }

  // Writes D of the block to `values` and to the memory. The product is rounded before the sum.
  void take(const detail::matrix_block& block, std::span<const T> gradients, std::span<T> memory,
            std::vector<T>& values) const {
    const T decay = static_cast<T>(options_.decay);
    T* to = values.data();
    for (index_t row = 0; row < block.rows; ++row, to += block.columns) {
      const index_t first = block.first + row * block.stride;
      std::copy_n(gradients.data() + first, block.columns, to);
      if (memory.empty()) continue;
      T* const kept = memory.data() + first;
      if (decay != T(1)) {
        for (index_t i = 0; i < block.columns; ++i) kept[i] *= decay;
      }
      for (index_t i = 0; i < block.columns; ++i) to[i] += kept[i];
      std::copy_n(to, block.columns, kept);
    }
  }

  // Writes the code of a block of values D, and subtracts C(D) from the memory where values are sent.
  void encode_block(const coded_block& block, const std::vector<T>& values, std::span<T> memory,
                    std::span<std::byte> code) const {
    const std::vector<std::int32_t> indices = largest(values, block.sent);
    const detail::magnitude_levels<T> levels = levels_of(values, indices);
    std::vector<std::int32_t> fields;
    for (const std::int32_t index : indices) {
      const T value = values[static_cast<std::size_t>(index)];
      fields.push_back((std::abs(value) >= levels.least_high ? high_bit : 0) + (value < T(0) ? sign_bit : 0));
      if (!memory.empty()) {
        memory[static_cast<std::size_t>(block.shape.place(index))] -=
            decoded(fields.back(), levels.low, levels.high);
      }
    }
    auto* const bytes = reinterpret_cast<std::uint8_t*>(code.data());
    detail::write_at(code, block.byte, levels.low);
    detail::write_at(code, block.byte + sizeof(T), levels.high);
    detail::pack_sums(index_bits(), indices.data(), 0, block.sent, bytes + index_byte(block));
    detail::pack_sums(value_bits, fields.data(), 0, block.sent, bytes + value_byte(block));
  }

  // The value of a field of two bits.
  static T decoded(std::int32_t field, T low, T high) {
    const T level = (field & high_bit) != 0 ? high : low;
    return (field & sign_bit) != 0 ? -level : level;
  }

  // Returns the indices, ascending, of the `sent` values of largest magnitude.
  static std::vector<std::int32_t> largest(const std::vector<T>& values, index_t sent) {
    std::vector<detail::bits_like<T>> keys(values.size());
    std::transform(values.begin(), values.end(), keys.begin(), [](T x) { return detail::magnitude_key(x); });
    index_t ties = sent;
    const auto kth = detail::kth_largest(keys, ties);
    std::vector<std::int32_t> indices;
    indices.reserve(static_cast<std::size_t>(sent));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto key = detail::magnitude_key(values[i]);
      if (key > kth || (key == kth && ties-- > 0)) indices.push_back(static_cast<std::int32_t>(i));
    }
    return indices;
  }

  // Finds the two levels of the sent values (detail::best_levels). Keys (detail::magnitude_key) are sorted
  // instead of magnitudes, since NaN has an order only as a key.
  static detail::magnitude_levels<T> levels_of(const std::vector<T>& values,
                                               const std::vector<std::int32_t>& indices) {
    std::vector<detail::bits_like<T>> keys;
    for (const std::int32_t i : indices) {
      keys.push_back(detail::magnitude_key(values[static_cast<std::size_t>(i)]));
    }
    std::sort(keys.begin(), keys.end());
    std::vector<T> ascending;
    for (const auto key : keys) ascending.push_back(std::bit_cast<T>(key));
    return detail::best_levels(ascending);
  }

  // Reads one field of `bits` bits for each sent value of a block.
  std::vector<std::int32_t> fields_at(const coded_block& block, std::span<const std::byte> code,
                                      std::size_t byte, int bits) const {
    std::vector<std::int32_t> fields(static_cast<std::size_t>(block.sent));
    detail::unpack_sums(bits, reinterpret_cast<const std::uint8_t*>(code.data()) + byte, 0, block.sent,
                        fields.data());
    return fields;
  }
  // Reads the indices of a block.
  std::vector<std::int32_t> indices_of(const coded_block& block, std::span<const std::byte> code) const {
    return fields_at(block, code, index_byte(block), index_bits());
  }

  // Throws value_error, naming the tensor, unless the indices ascend and are in the block.
  void check_indices(const coded_block& block, const std::vector<std::int32_t>& indices) const {
    const bool ascend =
        std::adjacent_find(indices.begin(), indices.end(), std::greater_equal<>()) == indices.end();
    if (ascend && indices.back() < block.shape.size()) return;
    detail::throw_error<value_error>({"block_top_k_codec: indices of ", tensors_[block.shape.tensor].name,
                                      " in a code are not ascending numbers from 0 to ",
                                      block.shape.size() - 1});
  }

  // Writes zeros to the values of a block.
  static void clear(const detail::matrix_block& block, std::span<T> to) {
    for (index_t row = 0; row < block.rows; ++row) {
      std::fill_n(to.data() + block.first + row * block.stride, block.columns, T(0));
    }
  }

  // Stores, adds or subtracts the sent values of a block.
  void put(const coded_block& block, const std::vector<std::int32_t>& indices,
           std::span<const std::byte> code, decode_as as, std::span<T> to) const {
    const T low = detail::read_at<T>(code, block.byte),
            high = detail::read_at<T>(code, block.byte + sizeof(T));
    const std::vector<std::int32_t> fields = fields_at(block, code, value_byte(block), value_bits);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      detail::put_decoded(as, decoded(fields[i], low, high),
                          to[static_cast<std::size_t>(block.shape.place(indices[i]))]);
    }
  }

  block_top_k_options options_;
  std::vector<coded_tensor> tensors_;
  std::vector<coded_block> blocks_;
  std::size_t bytes_ = 0;  // bytes of a code
};

/// Makes a compressor with block_top_k_codec for the gradients of `store`. Throws the errors of
/// block_top_k_options::validate, and value_error for the route `sparse`.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const block_top_k_options& options) {
  return make_coded_compressor<block_top_k_codec<T>>(store, options, options.memory, options.route);
}

PUFFERFISH_NAMESPACE_END
