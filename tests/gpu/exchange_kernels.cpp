// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support.hpp"

#include <cstring>
#include <limits>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/gpu/kernels/comm/exchange.hpp>

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

/// Numbers of every size, among them what is not one.
template <class T>
std::vector<T> numbers_of_all_sizes(std::size_t count) {
  std::vector<T> values(count);
  pf::fill_normal(std::span<T>(values), 1.0, pf::random_stream(3, count));
  for (std::size_t i = 0; i < count; ++i) {
    values[i] *= static_cast<T>(std::ldexp(1.0, static_cast<int>(i * 37 % 290) - 150));
  }
  const T special[] = {T(0),
                       -T(0),
                       T(65504),
                       T(65519.99),
                       T(65520),
                       -T(65536),
                       T(0x1p-24),
                       T(0x1p-25),
                       T(0x1.8p-25),
                       T(0x1p-14),
                       T(0x1.ffcp-15),
                       T(1.00390625),
                       T(1.01171875),
                       std::numeric_limits<T>::infinity(),
                       -std::numeric_limits<T>::infinity(),
                       std::numeric_limits<T>::quiet_NaN()};
  for (std::size_t i = 0; i < std::size(special) && i < count; ++i) values[count - 1 - i] = special[i];
  return values;
}

template <class Wire, class T>
void check_wire(kernels::wire_format format, std::size_t count) {
  pf::gpu_context& ctx = gpu_context();
  const auto size = static_cast<index_t>(count);
  twin<T> values(numbers_of_all_sizes<T>(count));
  twin<std::uint16_t> bits(size);
  kernels::narrow(ctx.stream(), format, values.device_data(), bits.device_data(), size);
  std::vector<std::uint16_t> expected(count);
  const std::vector<std::uint16_t> got = bits.fetched();
  for (std::size_t i = 0; i < count; ++i) {
    expected[i] = Wire(static_cast<float>(values.host()[i])).bits();
    // Which NaN is the device's to choose.
    const bool both_nan =
        std::isnan(values.host()[i]) && std::isnan(static_cast<float>(Wire::from_bits(got[i])));
    if (both_nan) expected[i] = got[i];
  }
  CHECK(got == expected);
  const T factor = T(1) / T(3);
  kernels::widen(ctx.stream(), format, bits.device_data(), values.device_data(), size, factor);
  const std::vector<T> wide = values.fetched();
  std::size_t right = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const T e = static_cast<T>(static_cast<float>(Wire::from_bits(expected[i]))) * factor;
    right += wide[i] == e || (std::isnan(wide[i]) && std::isnan(e)) ? 1U : 0U;
  }
  CHECK(right == count);
}

}  // namespace

TEST_CASE("gpu exchange kernels: narrow formats have the bits of the host's") {
  for (const std::size_t count : {0U, 1U, 7U, 1000U, 70001U}) {
    check_wire<pf::bfloat16, float>(kernels::wire_format::bf16, count);
    check_wire<pf::float16, float>(kernels::wire_format::fp16, count);
  }
  check_wire<pf::bfloat16, double>(kernels::wire_format::bf16, 1000);
  check_wire<pf::float16, double>(kernels::wire_format::fp16, 1000);
}

TEST_CASE("gpu exchange kernels: numbers on the wire are added in float, in order, and rounded once") {
  pf::gpu_context& ctx = gpu_context();
  for (const index_t size : {0, 1, 300, 5001}) {
    for (const int others : {0, 1, 3}) {
      const index_t step = size + 2;
      auto own = random_twin<float>(size, static_cast<std::uint64_t>(size) + 1);
      auto sent = random_twin<float>(others * step, static_cast<std::uint64_t>(size) + 2);
      std::vector<std::uint16_t> bits(static_cast<std::size_t>(sent.size()));
      for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = pf::bfloat16(sent.host()[i]).bits();
      twin<std::uint16_t> messages(bits), sums(size);
      kernels::add_narrow(ctx.stream(), kernels::wire_format::bf16, messages.device_data(), others, step,
                          own.device_data(), sums.device_data(), size, 0.25F);
      for (index_t i = 0; i < size; ++i) {
        float sum = own.host()[static_cast<std::size_t>(i)];
        for (int other = 0; other < others; ++other) {
          sum +=
              static_cast<float>(pf::bfloat16::from_bits(bits[static_cast<std::size_t>(other * step + i)]));
        }
        const pf::bfloat16 rounded(sum);
        sums.host()[static_cast<std::size_t>(i)] = rounded.bits();
        own.host()[static_cast<std::size_t>(i)] = static_cast<float>(rounded) * 0.25F;
      }
      CHECK(sums.fetched() == sums.host());
      CHECK(own.fetched() == own.host());
    }
  }
}

TEST_CASE("gpu exchange kernels: factors, unaligned too; the first number that is not finite; who skips") {
  pf::gpu_context& ctx = gpu_context();
  for (const index_t size : {0, 1, 6, 4097}) {
    for (const index_t offset : {0, 1, 3}) {
      auto x = random_twin<float>(size + offset, static_cast<std::uint64_t>(size) + 9);
      kernels::multiply(ctx.stream(), x.device_data() + offset, size, 1.0F / 3.0F);
      for (index_t i = offset; i < size + offset; ++i) x.host()[static_cast<std::size_t>(i)] *= 1.0F / 3.0F;
      CHECK(x.fetched() == x.host());
    }
  }
  constexpr index_t size = 70001;
  const auto first_of = [&](std::vector<std::pair<index_t, double>> bad) {
    auto x = random_twin<double>(size, 5);
    for (const auto& [at, value] : bad) x.host()[static_cast<std::size_t>(at)] = value;
    twin<double> now(x.host());
    twin<std::uint64_t> first(1, kernels::all_finite);
    kernels::find_nonfinite(ctx.stream(), now.device_data(), size, 1000, first.device_data());
    return first.fetched()[0];
  };
  const double infinite = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(first_of({}) == kernels::all_finite);
  CHECK(first_of({{0, nan}, {1, nan}}) == 1000);
  CHECK(first_of({{70000, infinite}}) == 71000);
  CHECK(first_of({{66000, nan}, {40000, -infinite}, {69999, nan}}) == 41000);
  CHECK(first_of({{5, 1e300}}) == kernels::all_finite);

  twin<std::uint64_t> found(std::vector<std::uint64_t>{41000, kernels::all_finite, kernels::all_finite});
  twin<int> skip(1, 5);
  kernels::tag_with_rank(ctx.stream(), found.device_data(), 3, found.device_data());
  kernels::decide_skip(ctx.stream(), found.device_data(), 3, skip.device_data());
  CHECK(found.fetched()[0] == (std::uint64_t{3} << 40 | 41000U));
  CHECK(skip.fetched()[0] == 1);
  kernels::tag_with_rank(ctx.stream(), found.device_data() + 1, 3, found.device_data());
  kernels::decide_skip(ctx.stream(), found.device_data(), 3, skip.device_data());
  CHECK(found.fetched()[0] == kernels::all_finite);
  CHECK(skip.fetched()[0] == 0);
  twin<int> flags(std::vector<int>{0, 7});
  kernels::join_flag(ctx.stream(), flags.device_data(), skip.device_data());
  CHECK(skip.fetched()[0] == 0);
  kernels::join_flag(ctx.stream(), flags.device_data() + 1, skip.device_data());
  CHECK(skip.fetched()[0] == 1);
  kernels::join_flag(ctx.stream(), flags.device_data(), skip.device_data());
  CHECK(skip.fetched()[0] == 1);
}
