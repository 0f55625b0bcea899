// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The passes over messages, of all instruction sets that this machine has, against the scalar conversions and
// plain loops: bit for bit.
#include <doctest/doctest.h>

#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed/collectives/wire.hpp>

using namespace pufferfish;

namespace {

std::vector<isa> targets() {
  std::vector<isa> all;
  for (const isa target : all_isas) {
    if (isa_available(target)) all.push_back(target);
  }
  return all;
}

/// Both ends of every range of the formats, ties, and the neighbours of both; then numbers of random bits.
std::vector<float> awkward_floats() {
  std::vector<std::uint32_t> bits;
  for (const std::uint32_t edge :
       {0x00000000U, 0x00000001U, 0x007fffffU, 0x00800000U, 0x33000000U, 0x33800000U, 0x38000000U,
        0x387fc000U, 0x387fe000U, 0x387ff000U, 0x38800000U, 0x3f000000U, 0x3f800000U, 0x3f801000U,
        0x3f803000U, 0x3f808000U, 0x3f818000U, 0x477fe000U, 0x477fefffU, 0x477ff000U, 0x47800000U,
        0x7f7f0000U, 0x7f7f8000U, 0x7f7fffffU, 0x7f800000U, 0x7f800001U, 0x7fa00000U, 0x7fc00000U,
        0x7fffffffU, 0x7fc02000U, 0x7f802000U}) {
    for (const std::uint32_t around : {0xffffffffU, 0U, 1U}) {
      for (const std::uint32_t sign : {0U, 0x80000000U}) bits.push_back((edge + around) ^ sign);
    }
  }
  const random_stream random(3, 4);
  for (std::uint64_t i = 0; i < 200000; ++i) {
    bits.push_back(static_cast<std::uint32_t>(random.below(i, std::uint64_t{1} << 32)));
  }
  // Exponents of halves, where rounding is not just overflow.
  for (std::uint64_t i = 0; i < 200000; ++i) {
    const auto fraction = static_cast<std::uint32_t>(random.child("fraction").below(i, 1U << 23));
    const auto exponent = static_cast<std::uint32_t>(100 + random.child("exponent").below(i, 45));
    bits.push_back(fraction | exponent << 23 | static_cast<std::uint32_t>(i & 1U) << 31);
  }
  std::vector<float> floats(bits.size());
  std::memcpy(floats.data(), bits.data(), 4 * bits.size());
  return floats;
}

template <class Wire>
std::vector<Wire> all_patterns() {
  std::vector<Wire> all;
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    all.push_back(Wire::from_bits(static_cast<std::uint16_t>(bits)));
  }
  return all;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

TEST_CASE_TEMPLATE("floats to a narrow format: the bits of the scalar conversion, NaNs included", Wire,
                   bfloat16, float16) {
  const std::vector<float> given = awkward_floats();
  std::vector<Wire> expected, got(given.size());
  for (float value : given) expected.push_back(Wire(value));
  for (isa target : targets()) {
    CAPTURE(to_string(target));
    const auto kernel = PUFFERFISH_KERNEL(target, detail::wire_passes, narrow<Wire, float>);
    kernel(given.data(), got.data(), static_cast<index_t>(given.size()));
    CHECK(same_bits(got, expected));
    for (index_t count = 0; count < 40; ++count) {  // ends of loops, at any alignment
      std::vector<Wire> part(40, Wire::from_bits(7));
      kernel(given.data() + 3 * count, part.data() + 1, count);
      bool right = part[0].bits() == 7;
      for (index_t i = 1; i < 40; ++i) {
        const auto at = static_cast<std::size_t>(i);
        right = right && part[at].bits() ==
                             (i <= count ? expected[static_cast<std::size_t>(3 * count) + at - 1].bits() : 7);
      }
      CHECK(right);
    }
  }
}

TEST_CASE_TEMPLATE("all 2^16 patterns of a narrow format to floats: the bits of the scalar conversion", Wire,
                   bfloat16, float16) {
  const std::vector<Wire> given = all_patterns<Wire>();
  std::vector<float> expected, got(given.size());
  for (Wire value : given) expected.push_back(static_cast<float>(value));
  for (isa target : targets()) {
    CAPTURE(to_string(target));
    const auto kernel = PUFFERFISH_KERNEL(target, detail::wire_passes, widen_scaled<Wire, float>);
    // A product with 1 makes a signalling NaN quiet, as every operation does.
    kernel(given.data(), 1.0F, got.data(), static_cast<index_t>(given.size()));
    std::size_t right = 0;
    for (std::size_t i = 0; i < given.size(); ++i) {
      const auto have = std::bit_cast<std::uint32_t>(got[i]),
                 want = std::bit_cast<std::uint32_t>(expected[i]);
      right += have == want || (std::isnan(expected[i]) && have == (want | 0x400000U)) ? 1U : 0U;
    }
    CHECK(right == given.size());
  }
}

TEST_CASE_TEMPLATE("doubles by way of floats; sums and products with narrow numbers", T, float, double) {
  for (isa target : targets()) {
    CAPTURE(to_string(target));
    for (const index_t count : {0, 1, 2, 7, 8, 15, 16, 17, 33, 1000}) {
      std::vector<T> x(static_cast<std::size_t>(count)), y = x, sum = x, widened = x, added = x, scaled = x;
      fill_normal<T>(x, 1.0, {1, static_cast<std::uint64_t>(count)});
      fill_normal<T>(y, 1.0, {2, static_cast<std::uint64_t>(count)});
      const T third = T(1) / T(3);
      std::vector<float16> narrow_x, packed(x.size());
      for (T value : x) narrow_x.push_back(float16(static_cast<float>(value)));
      for (std::size_t i = 0; i < x.size(); ++i) {
        const T wide = static_cast<T>(static_cast<float>(narrow_x[i]));
        sum[i] = y[i] + wide;
        widened[i] = wide * third;
        added[i] = x[i] + y[i];
        scaled[i] = added[i] * third;
      }
      PUFFERFISH_KERNEL(target, detail::wire_passes, narrow<float16, T>)(x.data(), packed.data(), count);
      CHECK(same_bits(packed, narrow_x));
      std::vector<T> got = y;
      PUFFERFISH_KERNEL(target, detail::wire_passes, add_narrow<float16, T>)
      (packed.data(), got.data(), count);
      CHECK(same_bits(got, sum));
      PUFFERFISH_KERNEL(target, detail::wire_passes, widen_scaled<float16, T>)
      (packed.data(), third, got.data(), count);
      CHECK(same_bits(got, widened));
      got = y;
      PUFFERFISH_KERNEL(target, detail::wire_passes, add_before<T>)(x.data(), got.data(), count);
      CHECK(same_bits(got, added));
      got = y;
      PUFFERFISH_KERNEL(target, detail::wire_passes, add_before_scaled<T>)
      (x.data(), third, got.data(), count);
      CHECK(same_bits(got, scaled));
    }
  }
}

}  // namespace
