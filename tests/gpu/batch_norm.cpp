// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "conv_cases.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include <pufferfish/gpu/kernels/elementwise/relu_mask.hpp>
#include <pufferfish/gpu/ops/norm.hpp>
#include <pufferfish/gpu/ops/products.hpp>

using namespace gpu_test;

namespace {

// Whole vectors and not, one block and many, channels that no block of threads has a multiple of.
constexpr pf::extents<2> shapes[] = {{1, 1},     {2, 3},     {33, 16},  {300, 64}, {1000, 20},
                                     {129, 512}, {50, 1032}, {37, 257}, {9000, 8}, {4100, 3},
                                     {3, 4},     {600, 16},  {2049, 8}};

using mask_word = pf::ops::relu_mask<float>::word;

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// The bits of a device's mask, an element after the other.
std::vector<bool> bits_of(const std::vector<mask_word>& words, index_t size) {
  std::vector<bool> bits;
  const auto* from = reinterpret_cast<const std::uint32_t*>(words.data());
  for (index_t i = 0; i < size; ++i) bits.push_back(pf::gpu::kernels::mask_passes(from, i));
  return bits;
}

// The words of the CPU's mask with these bits.
std::vector<mask_word> cpu_words(const std::vector<bool>& bits, const pf::extents<2>& shape) {
  std::vector<mask_word> words(static_cast<std::size_t>(pf::ops::relu_mask<float>::size(shape)));
  const pf::ops::detail::wide_rows<float> rows(shape);
  for (index_t i = 0; i < shape[0] * shape[1]; ++i) {
    const index_t unit = i / rows.unit(), inside = i % rows.unit();
    const auto at = static_cast<std::size_t>(unit * rows.width + inside % rows.width);
    if (!bits[static_cast<std::size_t>(i)]) continue;
    words[at] = static_cast<mask_word>(static_cast<std::uint32_t>(words[at]) | 1U << (inside / rows.width));
  }
  return words;
}

// A matrix and the numbers of its channels, from a place that is a multiple of 16 bytes or not.
struct matrix_case {
  pf::extents<2> shape;
  index_t offset;
  twin<float> x, dy, y, weight, bias, mean, inv_std;

  matrix_case(const pf::extents<2>& s, index_t start, std::uint64_t stream)
      : shape(s),
        offset(start),
        x(random_twin<float>(s[0] * s[1] + 1, stream)),
        dy(random_twin<float>(s[0] * s[1] + 1, stream + 1)),
        y(random_twin<float>(s[0] * s[1] + 1, stream + 2)),
        weight(random_twin<float>(s[1], stream + 3)),
        bias(random_twin<float>(s[1], stream + 4)),
        mean(random_twin<float>(s[1], stream + 5)),
        inv_std(random_twin<float>(s[1], stream + 6)) {}

  pf::tensor_view<float, 2> host(twin<float>& of) const { return {of.host_data() + offset, shape}; }
  pf::tensor_view<float, 2> device(twin<float>& of) const { return {of.device_data() + offset, shape}; }
};

template <class F>
void for_all_cases(F&& test) {
  std::uint64_t stream = 0;
  for (const auto& shape : shapes) {
    for (const index_t offset : {0, 1}) {
      CAPTURE(shape[0]);
      CAPTURE(shape[1]);
      CAPTURE(offset);
      matrix_case c(shape, offset, stream);
      stream += 10;
      test(c);
    }
  }
}

}  // namespace

TEST_CASE("gpu batch norm: statistics, also of small deviations from a large mean") {
  pf::cpu_context host;
  for (const float shift : {0.0F, 1000.0F}) {
    for_all_cases([&](matrix_case& c) {
      if (c.shape[0] < 2) return;  // nothing deviates
      std::vector<float> values = c.x.host();
      for (float& value : values) value += shift;
      values[static_cast<std::size_t>(c.offset)] += 100.0F;
      twin<float> x(values), statistics(2 * c.shape[1]), batches(1, 41.0F);
      auto running_mean = random_twin<float>(c.shape[1], 3), running_var = random_twin<float>(c.shape[1], 4);
      const auto channels = static_cast<std::size_t>(c.shape[1]);
      for (const double momentum : {1.0, 0.1}) {
        std::vector<double> mean(channels), variance(channels);
        pf::ops::reference::batch_norm_statistics<float>(c.host(x), mean.data(), variance.data());
        pf::ops::batch_norm_use_batch<float>(host, mean.data(), variance.data(), c.shape[1], c.shape[0], 1e-5,
                                             momentum, statistics.host_data(), running_mean.host_data(),
                                             running_var.host_data(), batches.host_data());
        pf::ops::batch_norm_use_batch<float>(gpu_context(), c.device(x), 1e-5, momentum,
                                             statistics.device_data(), running_mean.device_data(),
                                             running_var.device_data(), batches.device_data());
        const std::vector<float> found = statistics.fetched(), moved = running_var.fetched();
        for (std::size_t i = 0; i < channels; ++i) {
          const std::size_t spread = channels + i;
          // Against a deviation of about 0.6, however large the mean.
          const auto at = static_cast<double>(statistics.host()[i]);
          REQUIRE(std::abs(static_cast<double>(found[i]) - at) < 3e-6 + 1.2e-7 * std::abs(at));
          REQUIRE(found[spread] == doctest::Approx(statistics.host()[spread]).epsilon(1e-5));
          REQUIRE(moved[i] == doctest::Approx(running_var.host()[i]).epsilon(1e-5));
        }
        CHECK(difference(running_mean) < 3e-6);
      }
      CHECK(batches.fetched()[0] == 43.0F);
    });
  }
}

TEST_CASE_TEMPLATE("gpu batch norm: statistics and normalization in one call", T, float, pf::gpu::bf16) {
  constexpr pf::extents<2> sizes[] = {{2, 8},    {33, 16},  {300, 64}, {513, 8},  {2048, 16}, {2049, 8},
                                      {4096, 8}, {4097, 8}, {8192, 8}, {8193, 8}, {40, 12}};
  pf::cpu_context host;
  const double rounding = sizeof(T) == 2 ? 8e-3 : 1e-5;
  for (const auto& shape : sizes) {
    for (const int variant : {0, 1, 2, 3}) {
      CAPTURE(shape[0]);
      CAPTURE(shape[1]);
      CAPTURE(variant);
      const bool addend = variant & 1, relu = variant & 2;
      const index_t size = shape[0] * shape[1], channels = shape[1];
      stored<T> x(size, 1), other(size, 2), y(size, 3);
      // A large mean, and a first row that is far from it.
      for (index_t i = 0; i < size; ++i) {
        const T value(static_cast<float>(x.narrow.host_data()[i]) + (i < channels ? 30.0F : 16.0F));
        x.narrow.host_data()[i] = value;
        x.wide.host_data()[i] = static_cast<float>(value);
      }
      twin<T> narrow(x.narrow.host());
      auto weight = random_twin<float>(channels, 5), bias = random_twin<float>(channels, 6);
      twin<float> statistics(2 * channels), batches(1, 4.0F), means(channels, 0.5F),
          variances(channels, 2.0F);
      std::vector<double> mean(static_cast<std::size_t>(channels)), variance(mean.size());
      pf::ops::reference::batch_norm_statistics<float>(x.wide.host_view(shape), mean.data(), variance.data());
      pf::ops::batch_norm_use_batch<float>(host, mean.data(), variance.data(), channels, shape[0], 1e-5, 0.1,
                                           statistics.host_data(), means.host_data(), variances.host_data(),
                                           batches.host_data());
      pf::ops::reference::batch_norm_apply<float>(
          x.wide.host_view(shape), statistics.host_data(), statistics.host_data() + channels,
          weight.host_data(), bias.host_data(),
          addend ? other.wide.host_view(shape) : pf::tensor_view<float, 2>(), relu, y.wide.host_view(shape));

      twin<mask_word> mask(pf::ops::relu_mask<T>::size(shape));
      pf::ops::norm_epilogue<T> epilogue;
      if (addend) epilogue.addend = other.narrow.device_view(shape);
      epilogue.relu = relu;
      if (relu) epilogue.mask.words = mask.device_data();
      twin<float> found(2 * channels), found_means(channels, 0.5F), found_variances(channels, 2.0F),
          found_batches(1, 4.0F);
      pf::ops::batch_norm_forward<T>(gpu_context(), narrow.device_view(shape), 1e-5, 0.1, found.device_data(),
                                     found_means.device_data(), found_variances.device_data(),
                                     found_batches.device_data(), weight.device_data(), bias.device_data(),
                                     y.narrow.device_view(shape), epilogue);
      CHECK(y.error() < rounding);
      CHECK(difference(found.fetched(), statistics.host(), 1.0) < 1e-5);
      CHECK(difference(found_means.fetched(), means.host(), 1.0) < 1e-6);
      CHECK(difference(found_variances.fetched(), variances.host(), 1.0) < 1e-5);
      CHECK(found_batches.fetched()[0] == 5.0F);
      if (!relu) continue;
      // Bits of results near 0 may differ by rounding.
      pf::ops::reference::batch_norm_apply<float>(
          x.wide.host_view(shape), statistics.host_data(), statistics.host_data() + channels,
          weight.host_data(), bias.host_data(),
          addend ? other.wide.host_view(shape) : pf::tensor_view<float, 2>(), false, y.wide.host_view(shape));
      const std::vector<bool> bits = bits_of(mask.fetched(), size);
      index_t wrong = 0, set = 0;
      for (std::size_t i = 0; i < bits.size(); ++i) {
        const float value = y.wide.host()[i];
        wrong += std::abs(value) > 1e-3F && bits[i] != (value > 0.0F) ? 1 : 0;
        set += bits[i] ? 1 : 0;
      }
      CHECK(wrong == 0);
      CHECK(set > 0);
      CHECK(set < size);
    }
  }
}

TEST_CASE(
    "gpu batch norm: in one call over the addend, from an address that is no multiple of 16, and with a "
    "NaN") {
  const pf::extents<2> shape{40, 8};
  const index_t size = shape[0] * shape[1];
  auto x = random_twin<float>(size + 1, 1), addend = random_twin<float>(size + 1, 2),
       y = random_twin<float>(size, 3);
  auto weight = random_twin<float>(8, 4), bias = random_twin<float>(8, 5);
  const auto forward = [&](const pf::tensor_view<const float, 2>& from, const pf::tensor_view<float, 2>& to,
                           const pf::tensor_view<const float, 2>& other) {
    twin<float> statistics(16), means(8), variances(8), batches(1);
    pf::ops::batch_norm_forward<float>(gpu_context(), from, 1e-5, 0.1, statistics.device_data(),
                                       means.device_data(), variances.device_data(), batches.device_data(),
                                       weight.device_data(), bias.device_data(), to, {other, false, {}});
  };
  // Shifted by one element, both matrices hold other numbers: so equal inputs are copied there.
  twin<float> shifted_x(size + 1), shifted_addend(size + 1);
  std::copy_n(x.host_data(), size, shifted_x.host_data() + 1);
  std::copy_n(addend.host_data(), size, shifted_addend.host_data() + 1);
  twin<float> over(std::vector<float>(addend.host())), unaligned_x(shifted_x.host()),
      unaligned_addend(shifted_addend.host()), unaligned_y(size + 1);
  forward(x.device_view(shape), y.device_view(shape), addend.device_view(shape));
  forward(x.device_view(shape), over.device_view(shape), over.device_view(shape));
  forward({unaligned_x.device_data() + 1, shape}, {unaligned_y.device_data() + 1, shape},
          {unaligned_addend.device_data() + 1, shape});
  const std::vector<float> expected = y.fetched(), in_place = over.fetched(),
                           unaligned = unaligned_y.fetched();
  for (std::size_t i = 0; i < static_cast<std::size_t>(size); ++i) {
    REQUIRE(in_place[i] == expected[i]);
    REQUIRE(unaligned[i + 1] == doctest::Approx(expected[i]).epsilon(1e-4));
  }

  std::vector<float> values = x.host();
  values[3] = std::numeric_limits<float>::quiet_NaN();
  twin<float> with(values);
  forward(with.device_view(shape), y.device_view(shape), {});
  const std::vector<float> found = y.fetched();
  for (std::size_t i = 0; i < static_cast<std::size_t>(size); ++i)
    CHECK(std::isnan(found[i]) == (i % 8 == 3));
}

TEST_CASE("gpu batch norm: what inference makes of statistics") {
  pf::cpu_context host;
  for (const index_t channels : {1, 7, 300}) {
    auto running_mean = random_twin<float>(channels, 3);
    twin<float> running_var(channels, 0.7F), statistics(2 * channels);
    pf::ops::batch_norm_use_running<float>(host, running_mean.host_data(), running_var.host_data(), channels,
                                           1e-3, statistics.host_data());
    pf::ops::batch_norm_use_running<float>(gpu_context(), running_mean.device_data(),
                                           running_var.device_data(), channels, 1e-3,
                                           statistics.device_data());
    CHECK(difference(statistics) < 1e-6);
  }
}

TEST_CASE("gpu batch norm: the normalisation followed by a sum, a relu and its mask") {
  for_all_cases([](matrix_case& c) {
    for (const int variant : {0, 1, 2, 3, 7, 11}) {
      const bool addend = variant & 1, relu = variant & 2, masked = variant & 4, over = variant & 8;
      CAPTURE(variant);
      pf::ops::reference::batch_norm_apply<float>(
          c.host(c.x), c.mean.host_data(), c.inv_std.host_data(), c.weight.host_data(), c.bias.host_data(),
          addend ? c.host(c.dy) : pf::tensor_view<float, 2>(), relu, c.host(c.y));
      twin<mask_word> mask(pf::ops::relu_mask<float>::size(c.shape));
      pf::ops::norm_epilogue<float> epilogue;
      if (addend) epilogue.addend = c.device(c.dy);
      epilogue.relu = relu;
      if (masked) epilogue.mask.words = mask.device_data();
      twin<float>& to = over ? c.dy : c.y;  // over the addend
      pf::ops::batch_norm_apply<float>(gpu_context(), c.device(c.x), c.mean.device_data(),
                                       c.inv_std.device_data(), c.weight.device_data(), c.bias.device_data(),
                                       c.device(to), epilogue);
      const std::vector<float> found = to.fetched();
      std::vector<float> expected(over ? c.dy.host() : c.y.host());
      std::copy_n(c.host(c.y).data(), c.host(c.y).size(), expected.data() + c.offset);
      CHECK(difference(found, expected) < 1e-6);
      if (!masked) continue;
      const std::vector<bool> bits = bits_of(mask.fetched(), c.shape[0] * c.shape[1]);
      bool same = true;
      for (std::size_t i = 0; i < bits.size(); ++i) {
        same = same && bits[i] == (found[i + static_cast<std::size_t>(c.offset)] > 0.0F);
      }
      CHECK(same);
    }
  });
}

TEST_CASE("gpu batch norm: a NaN stays, and passes the mask") {
  twin<float> x(std::vector<float>(64, -1.0F)), one(2, 1.0F), zero(2), y(64);
  x.host()[5] = std::numeric_limits<float>::quiet_NaN();
  twin<float> with(x.host());
  const pf::extents<2> shape{32, 2};
  twin<mask_word> mask(pf::ops::relu_mask<float>::size(shape));
  pf::ops::batch_norm_apply<float>(gpu_context(), with.device_view(shape), zero.device_data(),
                                   one.device_data(), one.device_data(), zero.device_data(),
                                   y.device_view(shape), {{}, true, {mask.device_data()}});
  const std::vector<bool> bits = bits_of(mask.fetched(), 64);
  for (std::size_t i = 0; i < 64; ++i) CHECK(bits[i] == (i == 5));
  CHECK(std::isnan(y.fetched()[5]));
}

TEST_CASE("gpu batch norm: gradients, with and without a mask, over dy and over x") {
  for_all_cases([](matrix_case& c) {
    for (const int variant : {0, 1, 2, 3, 4}) {
      const bool masked = variant & 1, over_dy = variant & 2, none = variant & 4;
      CAPTURE(variant);
      const auto size = static_cast<std::size_t>(pf::ops::relu_mask<float>::size(c.shape));
      twin<mask_word> on_device(std::vector<mask_word>(size, 0x5a1c3f07));
      twin<mask_word> on_host(cpu_words(bits_of(on_device.host(), c.shape[0] * c.shape[1]), c.shape));
      std::vector<double> dweight(static_cast<std::size_t>(c.shape[1])), dbias(dweight.size());
      twin<float> weight_gradient(c.shape[1]), bias_gradient(c.shape[1], 3.0F);
      twin<float> x(c.x.host()), dy(c.dy.host());
      twin<float>& to = over_dy ? dy : x;
      const pf::tensor_view<float, 2> null;
      pf::ops::relu_mask<float> mask;
      if (masked) mask.words = on_host.host_data();
      twin<float> dx(c.x.host());
      pf::ops::reference::batch_norm_backward<float>(c.host(x), c.host(dy), c.mean.host_data(),
                                                     c.inv_std.host_data(), c.weight.host_data(), mask,
                                                     dweight.data(), dbias.data(), c.host(dx));
      if (masked) mask.words = on_device.device_data();
      pf::ops::batch_norm_backward<float>(
          gpu_context(), c.device(x), c.device(dy), c.mean.device_data(), c.inv_std.device_data(),
          c.weight.device_data(), {weight_gradient.device_data()}, {bias_gradient.device_data(), true},
          none ? null : c.device(to), mask);
      for (std::size_t i = 0; i < dweight.size(); ++i) {
        weight_gradient.host()[i] = static_cast<float>(dweight[i]);
        bias_gradient.host()[i] = static_cast<float>(3.0 + dbias[i]);
      }
      CHECK(difference(weight_gradient, 1.0) < 1e-6);
      CHECK(difference(bias_gradient, 1.0) < 1e-6);
      if (none) continue;
      std::vector<float> expected(over_dy ? c.dy.host() : c.x.host());
      std::copy_n(c.host(dx).data(), c.host(dx).size(), expected.data() + c.offset);
      CHECK(difference(to.fetched(), expected) < 1e-6);
    }
  });
}

TEST_CASE_TEMPLATE("gpu batch norm: the gradient of an addend, over dy and beside it", T, float,
                   pf::gpu::bf16, pf::gpu::fp16) {
  std::uint64_t stream = 60;
  for (const auto& shape : {pf::extents<2>{33, 16}, {300, 20}, {2500, 8}, {9000, 8}, {9000, 3}, {2, 1}}) {
    CAPTURE(shape[0]);
    CAPTURE(shape[1]);
    const index_t size = shape[0] * shape[1], channels = shape[1];
    stored<T> x(size, stream++), dy(size, stream++);
    const auto words = static_cast<std::size_t>(pf::ops::relu_mask<T>::size(shape));
    twin<typename pf::ops::relu_mask<T>::word> mask(
        std::vector<typename pf::ops::relu_mask<T>::word>(words, static_cast<std::uint16_t>(0x5a1c)));
    const pf::ops::relu_mask<T> passes{mask.device_data()};
    auto numbers = random_twin<float>(3 * channels, stream++);
    float* const of = numbers.device_data();
    twin<T> expected(size), masked(size);
    pf::ops::masked_copy<T>(gpu_context(), dy.narrow.device_view(shape), passes, masked.device_view(shape));
    std::vector<float> gradients;
    for (const int variant : {0, 1, 2, 3}) {  // without it, beside dy, over dy, without dx
      CAPTURE(variant);
      twin<T> from(dy.narrow.host()), dx(size), beside(size);
      twin<float> dweight(channels), dbias(channels);
      twin<T>& other = variant == 2 ? from : beside;
      const pf::tensor_view<T, 2> null;
      pf::ops::batch_norm_backward<T>(gpu_context(), x.narrow.device_view(shape), from.device_view(shape), of,
                                      of + channels, of + 2 * channels, {dweight.device_data()},
                                      {dbias.device_data()}, variant == 3 ? null : dx.device_view(shape),
                                      passes, variant == 0 ? null : other.device_view(shape));
      if (variant == 0) {
        gradients = dweight.fetched();
        expected = twin<T>(dx.fetched());
        continue;
      }
      CHECK(dweight.fetched() == gradients);
      CHECK(same_bits(other.fetched(), masked.fetched()));
      if (variant != 3) CHECK(same_bits(dx.fetched(), expected.fetched()));
    }
  }
}

TEST_CASE("gpu batch norm: no rows") {
  twin<float> one(3, 1.0F);
  twin<float> sums(6, 5.0F);
  const pf::tensor_view<float, 2> none(one.device_data(), {0, 3});
  pf::ops::batch_norm_backward<float>(gpu_context(), none, none, one.device_data(), one.device_data(),
                                      one.device_data(), {sums.device_data()}, {sums.device_data() + 3, true},
                                      none);
  CHECK(sums.fetched() == std::vector<float>{0, 0, 0, 5, 5, 5});
  pf::ops::batch_norm_apply<float>(gpu_context(), none, one.device_data(), one.device_data(),
                                   one.device_data(), one.device_data(), none);
}

TEST_CASE("gpu sums: columns of a matrix with steps between rows") {
  for_all_cases([](matrix_case& c) {
    for (const bool add : {false, true}) {
      const index_t columns = c.shape[1], gap = c.offset * 3;
      auto x = random_twin<float>(c.shape[0] * (columns + gap) + 1, 99);
      const pf::extents<2> step{columns + gap, 1};
      pf::ops::reference::column_sums<float>({x.host_data(), c.shape, step}, c.bias.host_data(), add);
      pf::ops::column_sums<float>(gpu_context(), {x.device_data(), c.shape, step}, c.bias.device_data(), add);
      CHECK(difference(c.bias, 1.0) < 1e-6);
    }
  });
  twin<float> sums(2, 3.0F);
  pf::ops::column_sums<float>(gpu_context(), {sums.device_data(), {0, 2}}, sums.device_data(), true);
  CHECK(sums.fetched() == std::vector<float>(2, 3.0F));
  pf::ops::column_sums<float>(gpu_context(), {sums.device_data(), {0, 2}}, sums.device_data(), false);
  CHECK(sums.fetched() == std::vector<float>(2));
}
