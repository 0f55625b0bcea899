// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <bit>
#include <limits>

#include <pufferfish/compress/quantize/stochastic_rounding.hpp>

#include "../../support/rounding_support.hpp"

namespace {

using namespace rounding_support;

/// Lengths around the widths of vectors, and a whole piece.
const std::vector<index_t> lengths = {0,  1,  2,  3,  5,  7,  8,   9,   15,   16,
                                      17, 31, 33, 63, 64, 65, 127, 130, 1023, 2048};

std::vector<std::uint8_t> random_fields(index_t count, unsigned bound, std::uint64_t stream) {
  const random_stream random(9, stream);
  std::vector<std::uint8_t> fields(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < fields.size(); ++i)
    fields[i] = static_cast<std::uint8_t>(random.below(i, bound));
  return fields;
}

TEST_CASE("fields: packed and unpacked, bit by bit, for every rest of a byte") {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    const auto pack = PUFFERFISH_KERNEL(target, detail::field_passes, pack_fields);
    const auto unpack = PUFFERFISH_KERNEL(target, detail::field_passes, unpack_fields);
    for (const int bits : {1, 2, 4, 8}) {
      for (index_t extra = 0; extra < 8; ++extra) {
        for (const index_t length : lengths) {
          const index_t count = std::min(detail::field_piece, length + extra);
          CAPTURE(bits);
          CAPTURE(count);
          alignas(64) std::uint8_t fields[detail::field_piece + 1], back[detail::field_piece + 1];
          const auto wanted = random_fields(count, 1U << bits, static_cast<std::uint64_t>(count));
          std::copy(wanted.begin(), wanted.end(), fields);
          const std::size_t bytes = detail::field_bytes(count, bits);
          std::vector<std::uint8_t> code(bytes + 1, 0xa5);
          pack(bits, fields, count, code.data());
          CHECK(code[bytes] == 0xa5);
          std::size_t right = 0;
          for (index_t i = 0; i < count; ++i) {
            right += detail::field_at(code.data(), bits, i) == wanted[static_cast<std::size_t>(i)] ? 1U : 0U;
          }
          CHECK(right == wanted.size());
          const index_t used = count * bits % 8;
          const int unused = used == 0 ? 0 : code[bytes - 1] >> used;
          CHECK(unused == 0);
          if (bits == 1) continue;
          back[count] = 0x5a;
          unpack(bits, code.data(), count, back);
          CHECK(std::equal(wanted.begin(), wanted.end(), back));
          CHECK(back[count] == 0x5a);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("fields: levels, their sums and products", T, float, double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    const auto sign = PUFFERFISH_KERNEL(target, detail::field_passes, signed_fields);
    const auto ternary = PUFFERFISH_KERNEL(target, detail::field_passes, ternary_fields);
    const auto add = PUFFERFISH_KERNEL(target, detail::field_passes, add_levels);
    const auto scale = PUFFERFISH_KERNEL(target, detail::field_passes, scaled_levels<T, std::int8_t>);
    const auto scale_sums = PUFFERFISH_KERNEL(target, detail::field_passes, scaled_levels<T, std::int32_t>);
    for (const index_t count : lengths) {
      CAPTURE(count);
      const auto size = static_cast<std::size_t>(count);
      std::vector<T> products(size), sum_products(size);
      std::vector<std::int32_t> sums(size, 1000);
      for (const int bits : {2, 4, 8}) {
        const auto fields = random_fields(count, 1U << bits, 3);
        auto levels = fields;
        sign(bits, levels.data(), count);
        const auto* const signed_levels = reinterpret_cast<const std::int8_t*>(levels.data());
        const std::vector<std::int32_t> before = sums;
        add(signed_levels, sums.data(), count);
        scale(signed_levels, T(0.3), products.data(), count);
        scale_sums(sums.data(), T(0.7), sum_products.data(), count);
        std::size_t right = 0;
        for (std::size_t i = 0; i < size; ++i) {
          const int magnitude = fields[i] & ((1 << (bits - 1)) - 1);
          const int level = fields[i] >> (bits - 1) != 0 ? -magnitude : magnitude;
          right += signed_levels[i] == level && sums[i] == before[i] + level &&
                           products[i] == static_cast<T>(level) * T(0.3) &&
                           sum_products[i] == static_cast<T>(sums[i]) * T(0.7)
                       ? 1U
                       : 0U;
        }
        CHECK(right == size);
      }
      const auto fields = random_fields(count, 3, 4);
      auto levels = fields;
      ternary(levels.data(), count);
      std::size_t right = 0;
      for (std::size_t i = 0; i < size; ++i) {
        const int level = fields[i] == 2 ? -1 : fields[i];
        right += static_cast<std::int8_t>(levels[i]) == level ? 1U : 0U;
      }
      CHECK(right == size);
    }
  }
}

TEST_CASE("fields: decoded levels are stored, added and subtracted, products rounded first") {
  const std::vector<std::int8_t> levels = {3, -7, 0, 127, -1, 2, 5};
  const std::vector<float> before = {0.1F, 0.7F, -3.0F, 1e-3F, 5.0F, 0.3F, 1.0F};
  const auto count = static_cast<index_t>(levels.size());
  std::vector<float> values(levels.size()), sums = before, differences = before;
  detail::put_levels(decode_as::values, levels.data(), 0.1F, values.data(), count);
  detail::put_levels(decode_as::addition, levels.data(), 0.1F, sums.data(), count);
  detail::put_levels(decode_as::subtraction, levels.data(), 0.1F, differences.data(), count);
  for (std::size_t i = 0; i < levels.size(); ++i) {
    volatile float product = static_cast<float>(levels[i]) * 0.1F;
    CHECK(values[i] == product);
    CHECK(sums[i] == before[i] + product);
    CHECK(differences[i] == before[i] - product);
  }
}

TEST_CASE("sums of any width: packed and unpacked; sums that are too large are noticed") {
  for (const std::int32_t most : {1, 2, 3, 4, 7, 8, 15, 16, 63, 64, 127, 128, 300, 70000}) {
    const auto bits = static_cast<int>(std::bit_width(2U * static_cast<unsigned>(most)));
    for (const index_t count : lengths) {
      CAPTURE(most);
      CAPTURE(count);
      const random_stream random(4, static_cast<std::uint64_t>(most));
      const auto size = static_cast<std::size_t>(count);
      std::vector<std::int32_t> sums(size), back(size + 1, 77);
      for (std::size_t i = 0; i < size; ++i) {
        sums[i] = static_cast<std::int32_t>(random.below(i, 2 * static_cast<std::uint64_t>(most) + 1)) - most;
      }
      const std::size_t bytes = detail::field_bytes(count, bits);
      std::vector<std::uint8_t> code(bytes + 1, 0xa5);
      detail::pack_sums(bits, sums.data(), most, count, code.data());
      CHECK(code[bytes] == 0xa5);
      CHECK(detail::unpack_sums(bits, code.data(), most, count, back.data()));
      CHECK(std::equal(sums.begin(), sums.end(), back.begin()));
      CHECK(back[size] == 77);
      // Bit by bit.
      for (std::size_t i = 0; i < size; i += 5) {
        std::int32_t field = 0;
        for (std::size_t b = 0; b < static_cast<std::size_t>(bits); ++b) {
          const std::size_t at = i * static_cast<std::size_t>(bits) + b;
          field |= (code[at / 8] >> at % 8 & 1) << b;
        }
        REQUIRE(field == sums[i] + most);
      }
      if (count == 0) continue;
      std::fill(code.begin(), code.end(), std::uint8_t{0xff});
      const bool all_ones_is_a_sum = (1 << bits) - 1 <= 2 * most;
      CHECK(detail::unpack_sums(bits, code.data(), most, count, back.data()) == all_ones_is_a_sum);
    }
  }
}

TEST_CASE("draws: runs from any position are those of draw_at, in halves and whole") {
  const random_stream random(21, 23);
  detail::draws_of_run draws;
  for (const std::uint64_t first : {0U, 1U, 31U, 32U, 63U, 64U, 100U, 4095U, 1000001U}) {
    for (const index_t count : lengths) {
      CAPTURE(first);
      CAPTURE(count);
      const auto right = [&](const std::uint32_t* words, int shift) {
        index_t found = 0;
        for (index_t i = 0; i < count; ++i) {
          const std::uint32_t draw = detail::draw_at(random, first + static_cast<std::uint64_t>(i));
          found += words[i] == draw >> shift ? 1 : 0;
        }
        return found;
      };
      CHECK(right(draws.upper_halves(random, first, count), 16) == count);
      CHECK(right(draws.whole(random, first, count), 0) == count);
    }
  }
}

TEST_CASE("draws: all bits are even") {
  const random_stream random(3, 1);
  constexpr int count = 20000;
  int ones[32] = {};
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint32_t draw = detail::draw_at(random, i);
    for (int bit = 0; bit < 32; ++bit) ones[bit] += static_cast<int>(draw >> bit & 1U);
  }
  for (const int found : ones) CHECK(std::abs(found - count / 2) < 5 * std::sqrt(count / 4.0));
}

/// Values of all kinds, and draws of which some are at the edge of the value's probability.
template <class T>
struct rounding_inputs {
  std::vector<T> values;
  std::vector<std::uint32_t> draws, halves;

  template <class Scaled>
  rounding_inputs(index_t count, T limit, T lowest, Scaled&& scaled) : values(normal_values<T>(count, 8)) {
    const random_stream random(6, 7);
    const T special[] = {T(0), -T(0), limit, -limit, limit * T(1.5), -limit * T(1.0000001), limit * T(1e-12)};
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i % 5 == 4) values[i] = special[i / 5 % std::size(special)];
      values[i] = std::max(values[i], lowest);
      const auto bound = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(static_cast<std::uint64_t>(scaled(values[i])), 0xffffffffU));
      const auto step = static_cast<std::uint32_t>(i % 3) - 1U;  // -1, 0, 1
      draws.push_back(i % 4 == 0 ? bound + step : random.word(i));
      halves.push_back(draws.back() >> 16);
    }
  }
};

/// Compares a kernel that rounds with the plain form, with whole draws and with their upper halves.
/// kernel(whole, count, x, words, fields), plain(x, draw), scaled(x): 2^32 times the probability. No value is
/// below `lowest`.
template <class T, class Kernel, class Plain, class Scaled>
void check_rounding(T limit, T lowest, Kernel&& kernel, Plain&& plain, Scaled&& scaled) {
  for (const index_t count : lengths) {
    CAPTURE(count);
    const rounding_inputs<T> in(count, limit, lowest, scaled);
    const auto size = static_cast<std::size_t>(count);
    std::vector<std::uint8_t> fields(size + 1, 0x77), wanted(size);
    for (std::size_t i = 0; i < size; ++i)
      wanted[i] = static_cast<std::uint8_t>(plain(in.values[i], in.draws[i]));
    CHECK(kernel(true, count, in.values.data(), in.draws.data(), fields.data()));
    CHECK(std::equal(wanted.begin(), wanted.end(), fields.begin()));
    CHECK(fields[size] == 0x77);
    // One value at a time, the upper half decides or says that it does not.
    bool all = true;
    for (std::size_t i = 0; i < size; ++i) {
      std::uint8_t field = 0x77;
      const bool decided = kernel(false, 1, &in.values[i], &in.halves[i], &field);
      REQUIRE(decided != undecided(scaled(in.values[i]), in.draws[i]));
      if (decided) REQUIRE(field == wanted[i]);
      all = all && decided;
    }
    std::fill(fields.begin(), fields.end(), std::uint8_t{0x77});
    CHECK(kernel(false, count, in.values.data(), in.halves.data(), fields.data()) == all);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < size; ++i) {
      wrong += fields[i] != wanted[i] && !undecided(scaled(in.values[i]), in.draws[i]) ? 1U : 0U;
    }
    CHECK(wrong == 0);
    CHECK(fields[size] == 0x77);
  }
}

TEST_CASE_TEMPLATE("roundings: kernels of all instruction sets do what the plain forms do", T, float,
                   double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    const auto levels = PUFFERFISH_KERNEL(target, detail::rounding_passes, round_levels<T>);
    const auto ternary = PUFFERFISH_KERNEL(target, detail::rounding_passes, round_ternary<T>);
    const auto binary = PUFFERFISH_KERNEL(target, detail::rounding_passes, round_binary<T>);
    for (const T limit :
         {T(2.25), T(1e-3), std::numeric_limits<T>::min(), std::numeric_limits<T>::max() / 4}) {
      CAPTURE(limit);
      for (const int bits : {2, 4, 8}) {
        CAPTURE(bits);
        const auto most = static_cast<T>((1 << (bits - 1)) - 1);
        check_rounding<T>(
            limit, std::numeric_limits<T>::lowest(),
            [&](bool whole, index_t count, const T* x, const std::uint32_t* words, std::uint8_t* fields) {
              return levels(whole, x, words, {most, limit}, most, bits, fields, count);
            },
            [&](T x, std::uint32_t draw) { return plain_level_field(x, limit, bits, draw); },
            [&](T x) { return level_of(x, limit, most).scaled; });
      }
      check_rounding<T>(
          limit, std::numeric_limits<T>::lowest(),
          [&](bool whole, index_t count, const T* x, const std::uint32_t* words, std::uint8_t* fields) {
            return ternary(whole, x, words, {T(0x1p32), limit}, limit, fields, count);
          },
          [&](T x, std::uint32_t draw) { return plain_ternary_field(x, limit, draw); },
          [&](T x) { return plain_share(std::abs(x), limit); });
      const T low = -limit / 2;
      check_rounding<T>(
          limit, low,
          [&](bool whole, index_t count, const T* x, const std::uint32_t* words, std::uint8_t* fields) {
            return binary(whole, x, words, {T(0x1p32), limit - low}, low, limit, fields, count);
          },
          [&](T x, std::uint32_t draw) { return plain_binary_field(x, low, limit, draw); },
          [&](T x) { return plain_share(x - low, limit - low); });
    }
  }
}

TEST_CASE_TEMPLATE("ranges and moments", T, float, double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    const auto range = PUFFERFISH_KERNEL(target, detail::rounding_passes, range_of<T>);
    const auto moments = PUFFERFISH_KERNEL(target, detail::rounding_passes, moments_of<T>);
    for (const index_t count : lengths) {
      CAPTURE(count);
      std::vector<T> values = normal_values<T>(count, 2);
      double sum = 0, squares = 0;
      for (const T value : values) {
        sum += static_cast<double>(value) - 0.25;
        squares += (static_cast<double>(value) - 0.25) * (static_cast<double>(value) - 0.25);
      }
      const detail::value_moments found = moments(values.data(), T(0.25), count);
      CHECK(found.sum == doctest::Approx(sum).epsilon(1e-12));
      CHECK(found.squares == doctest::Approx(squares).epsilon(1e-12));
      if (count == 0) continue;
      const auto [low, high] = std::minmax_element(values.begin(), values.end());
      const detail::value_range<T> found_range = range(values.data(), count);
      CHECK(found_range.low == *low);
      CHECK(found_range.high == *high);
      CHECK(detail::largest_magnitude(found_range) == std::max(-*low, *high));
      for (const T spoiled : {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(),
                              -std::numeric_limits<T>::infinity()}) {
        for (const std::size_t at : {std::size_t{0}, values.size() / 2, values.size() - 1}) {
          std::vector<T> bad = values;
          bad[at] = spoiled;
          const detail::value_range<T> none = range(bad.data(), count);
          CHECK(std::isnan(none.low));
          CHECK(std::isnan(none.high));
          CHECK(std::isnan(detail::largest_magnitude(none)));
        }
      }
    }
    const std::vector<T> equal(1000, T(0.1));
    const detail::value_moments none = moments(equal.data(), T(0.1), 1000);
    CHECK(none.sum == 0.0);
    CHECK(none.squares == 0.0);
  }
}

}  // namespace
