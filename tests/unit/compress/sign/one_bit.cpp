// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <map>

#include <pufferfish/compress/sign/one_bit.hpp>

#include "../../support/codec_support.hpp"
#include "../../support/resnet18_tensors.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace codec_support;

constexpr one_bit_cell both_cells[] = {one_bit_cell::output_unit, one_bit_cell::tensor};

template <class T>
std::vector<T> normal_values(index_t size, std::uint64_t stream) {
  std::vector<T> values(static_cast<std::size_t>(size));
  fill_normal(std::span<T>(values), 1.0, random_stream(5, stream));
  return values;
}

/// The output unit of a stored element, from the layout's strides alone.
index_t output_unit(const logical_layout& layout, index_t position) {
  const auto n = [](index_t i) { return static_cast<std::size_t>(i); };
  std::vector<index_t> axes;
  for (index_t axis = 0; axis < layout.dims; ++axis) axes.push_back(axis);
  std::sort(axes.begin(), axes.end(),
            [&](index_t a, index_t b) { return layout.strides[n(a)] > layout.strides[n(b)]; });
  index_t unit = 0;
  for (const index_t axis : axes) {
    if (layout.shape[n(axis)] == 1) continue;
    if (axis == 0) unit = position / layout.strides[0];
    position %= layout.strides[n(axis)];
  }
  return unit;
}

/// What a code must decode to, and the cells of its values in the order in which they are touched.
struct plain_code {
  std::vector<double> values;
  std::size_t cells = 0;
};
template <class T>
plain_code plain_one_bit(const std::vector<coded_tensor>& tensors, one_bit_cell cell,
                         const std::vector<T>& d) {
  plain_code code{std::vector<double>(d.size()), 0};
  for (const coded_tensor& tensor : tensors) {
    struct sums {
      double plus = 0, minus = 0, positives = 0, negatives = 0;
    };
    std::map<index_t, sums> cells;
    const auto cell_of = [&](index_t i) {
      const bool units = cell == one_bit_cell::output_unit && tensor.layout.dims > 1;
      return units ? output_unit(tensor.layout, tensor.first + i) : 0;
    };
    const auto at = [&](index_t i) { return static_cast<std::size_t>(tensor.offset + i); };
    for (index_t i = 0; i < tensor.size; ++i) {
      const auto value = static_cast<double>(d[at(i)]);
      sums& s = cells[cell_of(i)];
      (value < 0 ? s.minus : s.plus) += value;
      (value < 0 ? s.negatives : s.positives) += 1;
    }
    for (index_t i = 0; i < tensor.size; ++i) {
      const sums& s = cells[cell_of(i)];
      code.values[at(i)] = d[at(i)] < T(0) ? s.minus / s.negatives : s.plus / s.positives;
    }
    code.cells += cells.size();
  }
  return code;
}

std::vector<coded_tensor> tensors_of_all_kinds() {
  return tensors_of({logical_layout::kernel(70, 40, 3, 3),
                     logical_layout::vector(33),
                     logical_layout::matrix(10, 513),
                     {2, {501, 65, 1, 1}, {65, 1, 0, 0}},
                     logical_layout::kernel(32, 64, 3, 3),
                     logical_layout::matrix(2049, 90),
                     {2, {700, 3, 1, 1}, {3, 1, 0, 0}},
                     logical_layout::vector(50001),
                     // Output units neither innermost nor outermost.
                     {3, {6, 7, 50, 1}, {50, 300, 1, 0}},
                     logical_layout::matrix(1, 400),
                     logical_layout::matrix(17, 1),
                     {2, {90, 1, 1, 1}, {1, 1, 0, 0}}});
}

TEST_CASE_TEMPLATE("one_bit_codec keeps the rules of codecs", T, float, double) {
  for (const one_bit_cell cell : both_cells) check_codec<one_bit_codec<T>>({cell});
}

TEST_CASE_TEMPLATE("one_bit_codec: the mean of each sign; the memory is what is left", T, float, double) {
  cpu_context ctx;
  one_bit_codec<T> codec(vectors_of<T>({4}));
  std::vector<T> memory(4, T(0));
  const auto code = coded(codec, ctx, std::vector<T>{1, 3, -2, 0}, memory);
  const auto mean = static_cast<T>(4.0 / 3.0);
  CHECK(decoded(codec, ctx, code, 4) == std::vector<T>{mean, mean, -2, mean});
  CHECK(memory == std::vector<T>{T(1) - mean, T(3) - mean, 0, -mean});
  CHECK(code.size() == 4 + 2 * sizeof(T));
  CHECK(detail::read_at<std::uint32_t>(code, 0) == 4U);
  CHECK(detail::read_at<T>(code, 4) == mean);
  CHECK(detail::read_at<T>(code, 4 + sizeof(T)) == T(-2));
}

TEST_CASE("one_bit_codec: a sign that no value has decodes to nothing; the sign of zero is plus") {
  cpu_context ctx;
  one_bit_codec<float> codec(vectors_of<float>({3, 3, 1, 1}));
  std::vector<float> none;
  const auto code = coded(codec, ctx, {-1, -2, -6, 0, -0.0F, 0, -5, 0}, none);
  CHECK(decoded(codec, ctx, code, 8) == std::vector<float>{-3, -3, -3, 0, 0, 0, -5, 0});
  CHECK(detail::read_at<std::uint32_t>(code, 0) == 0b01000111U);
  CHECK(detail::read_at<float>(code, 4) == 0.0F);
}

TEST_CASE_TEMPLATE("one_bit_codec: values and cells are those of the plain form, in stripes too", T, float,
                   double) {
  cpu_context ctx;
  const std::vector<coded_tensor> all = tensors_of_all_kinds();
  const index_t size = coded_size(all);
  const std::vector<T> values = normal_values<T>(size, 1);
  const double tolerance = sizeof(T) == 4 ? 3e-7 : 1e-13;
  for (const one_bit_cell cell : both_cells) {
    for (const int stripes : {1, 2, 5, 64}) {
      CAPTURE(to_string(cell));
      CAPTURE(stripes);
      for (int s = 0; s < stripes; ++s) {
        const stripe_range range = stripe_of(size, s, stripes);
        const auto parts = coded_parts(all, range.begin, range.end);
        const std::vector<T> d(values.begin() + range.begin, values.begin() + range.end);
        const plain_code wanted = plain_one_bit(parts, cell, d);
        one_bit_codec<T> codec(parts, {cell});
        std::vector<T> memory(d.size(), T(0));
        const auto code = coded(codec, ctx, d, memory);
        CHECK(code.size() == (d.size() + 31) / 32 * 4 + wanted.cells * 2 * sizeof(T));
        const std::vector<T> found = decoded(codec, ctx, code, range.size());
        CHECK(largest_difference<T>(found, wanted.values) < tolerance);
      }
    }
  }
}

TEST_CASE("one_bit_codec: cells of a whole tensor are sent in the order of output units") {
  cpu_context ctx;
  // Stored [in][out] and [out][in].
  for (const logical_layout& layout : {logical_layout::matrix(3, 4), {2, {3, 4, 1, 1}, {4, 1, 0, 0}}}) {
    one_bit_codec<double> codec(tensors_of({layout}));
    std::vector<double> d(12), none;
    for (index_t out = 0; out < 3; ++out) {
      for (index_t in = 0; in < 4; ++in) {
        d[static_cast<std::size_t>(out * layout.strides[0] + in * layout.strides[1])] =
            (in % 2 == 0 ? 1.0 : -0.5) * static_cast<double>(10 * out + 1);
      }
    }
    const auto code = coded(codec, ctx, d, none);
    for (std::size_t out = 0; out < 3; ++out) {
      CHECK(detail::read_at<double>(code, 4 + 16 * out) == static_cast<double>(10 * out + 1));
      CHECK(detail::read_at<double>(code, 12 + 16 * out) == -0.5 * static_cast<double>(10 * out + 1));
    }
  }
}

TEST_CASE_TEMPLATE("one_bit_codec: the memory of each sign of a cell sums to zero", T, float, double) {
  cpu_context ctx;
  const logical_layout layout = logical_layout::kernel(24, 100, 3, 3);
  one_bit_codec<T> codec(tensors_of({layout}));
  const std::vector<T> d = normal_values<T>(layout.size(), 2);
  std::vector<T> memory(d.size(), T(0));
  coded(codec, ctx, d, memory);
  std::vector<double> sums(48, 0.0), magnitudes(48, 0.0);
  for (std::size_t i = 0; i < d.size(); ++i) {
    const std::size_t sign = i % 24 * 2 + (d[i] < T(0) ? 1 : 0);
    sums[sign] += static_cast<double>(memory[i]);
    magnitudes[sign] += std::abs(static_cast<double>(memory[i]));
  }
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-14;
  for (std::size_t i = 0; i < 48; ++i) {
    CHECK(std::abs(sums[i]) < tolerance * magnitudes[i]);
    CHECK(magnitudes[i] > 100.0);
  }
}

/// Every compiled form of the kernels against plain loops.
template <class T, class Add, class Subtract, class Put>
void check_rows(const Add& add, const Subtract& subtract, const Put& put) {
  for (const index_t columns : {0, 1, 3, 8, 15, 17, 31, 32, 33, 64, 100, 129}) {
    for (const index_t rows : {0, 1, 2, 7}) {
      CAPTURE(columns);
      CAPTURE(rows);
      const auto n = static_cast<std::size_t>(columns);
      const std::vector<T> x = normal_values<T>(rows * columns, static_cast<std::uint64_t>(columns + 1));
      std::vector<double> found(3 * n, 0.5), wanted(3 * n, 0.5);
      add(x.data(), rows, columns, found.data(), found.data() + columns, found.data() + 2 * columns);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const bool negative = x[i] < T(0);
        wanted[i % n + (negative ? n : 0)] += static_cast<double>(x[i]);
        wanted[i % n + 2 * n] += negative ? 1.0 : 0.0;
      }
      CHECK(found == wanted);
      const std::vector<T> plus = normal_values<T>(columns, 8), minus = normal_values<T>(columns, 9);
      std::vector<T> left = x, wanted_left = x;
      subtract(left.data(), rows, columns, plus.data(), minus.data());
      for (std::size_t i = 0; i < x.size(); ++i) wanted_left[i] -= x[i] < T(0) ? minus[i % n] : plus[i % n];
      CHECK(left == wanted_left);
      for (const index_t shift : {0, 1, 31}) {
        std::vector<std::uint32_t> words(x.size() / 32 + 2, 0);
        std::vector<T> values(x.size()), put_values(x.size(), T(3)), added = x, subtracted = x;
        for (std::size_t i = 0; i < x.size(); ++i) {
          const std::size_t bit = i + static_cast<std::size_t>(shift);
          words[bit / 32] |= static_cast<std::uint32_t>(x[i] < T(0)) << bit % 32;
          values[i] = x[i] < T(0) ? minus[i % n] : plus[i % n];
        }
        put(decode_as::values, words.data(), shift, rows, columns, plus.data(), minus.data(),
            put_values.data());
        put(decode_as::addition, words.data(), shift, rows, columns, plus.data(), minus.data(), added.data());
        put(decode_as::subtraction, words.data(), shift, rows, columns, plus.data(), minus.data(),
            subtracted.data());
        CHECK(put_values == values);
        std::size_t right = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
          right += added[i] == x[i] + values[i] && subtracted[i] == x[i] - values[i] ? 1U : 0U;
        }
        CHECK(right == x.size());
      }
    }
  }
}

template <class T, class Add, class Subtract>
void check_runs(const Add& add, const Subtract& subtract) {
  for (const index_t count : {0, 1, 3, 7, 8, 9, 33, 1000, 1001}) {
    CAPTURE(count);
    const std::vector<T> x = normal_values<T>(count, 3);
    double found[3] = {0.5, 0.5, 0.5}, wanted[3] = {0.5, 0.5, 0.5};
    add(x.data(), count, found, found + 1, found + 2);
    std::vector<T> left = x, wanted_left = x;
    subtract(left.data(), count, T(0.25), T(-0.75));
    for (std::size_t i = 0; i < x.size(); ++i) {
      wanted[x[i] < T(0) ? 1 : 0] += static_cast<double>(x[i]);
      wanted[2] += x[i] < T(0) ? 1.0 : 0.0;
      wanted_left[i] -= x[i] < T(0) ? T(-0.75) : T(0.25);
    }
    CHECK(found[0] == doctest::Approx(wanted[0]).epsilon(1e-13));
    CHECK(found[1] == doctest::Approx(wanted[1]).epsilon(1e-13));
    CHECK(found[2] == wanted[2]);
    CHECK(left == wanted_left);
  }
}

TEST_CASE_TEMPLATE("one_bit_codec: kernels of all instruction sets equal plain loops", T, float, double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    namespace d = pufferfish::detail;
    check_rows<T>(PUFFERFISH_KERNEL(target, d::one_bit_passes, add_rows<T>),
                  PUFFERFISH_KERNEL(target, d::one_bit_passes, subtract_rows<T>),
                  PUFFERFISH_KERNEL(target, d::one_bit_passes, put_rows<T>));
    check_runs<T>(PUFFERFISH_KERNEL(target, d::one_bit_passes, add_run<T>),
                  PUFFERFISH_KERNEL(target, d::one_bit_passes, subtract_run<T>));
  }
}

TEST_CASE("one_bit_codec: threads change no bit of large tensors") {
  cpu_context one, three({3, 0});
  const std::vector<coded_tensor> all = tensors_of_all_kinds();
  const std::vector<float> values = normal_values<float>(coded_size(all), 4);
  for (const one_bit_cell cell : both_cells) {
    one_bit_codec<float> codec(all, {cell}), threaded(all, {cell});
    std::vector<float> memory(values.size(), 0.0F), memory_of_threaded = memory;
    for (int step = 0; step < 3; ++step) {
      CHECK(same_bits(coded(codec, one, values, memory), coded(threaded, three, values, memory_of_threaded)));
      CHECK(same_bits(memory, memory_of_threaded));
    }
  }
}

TEST_CASE("one_bit_codec: bytes of ResNet-18") {
  const auto bytes = [](bool hybrid, one_bit_cell cell) {
    return one_bit_codec<float>(resnet18_tensors::resnet18_tensors(hybrid), {cell}).most_bytes();
  };
  CHECK(bytes(false, one_bit_cell::output_unit) == 1435524);
  CHECK(bytes(false, one_bit_cell::tensor) == 1397212);
  CHECK(bytes(true, one_bit_cell::output_unit) == 463236);
  CHECK(bytes(true, one_bit_cell::tensor) == 417612);
}

TEST_CASE("one_bit_codec: codes of a wrong length are refused") {
  cpu_context ctx;
  one_bit_codec<float> codec(vectors_of<float>({40}));
  std::vector<float> to(40);
  for (const std::size_t length : {0U, 15U, 17U}) {
    CHECK_THROWS_WITH_AS(codec.decode(ctx, std::vector<std::byte>(length), decode_as::values, to),
                         doctest::Contains("not 16"), value_error);
  }
}

using simulated = rank_simulation::simulated_ranks<any_compressor<float>>;

simulated ranks_of(const odd_parameters<float>& net, int count, const one_bit_options& options) {
  return simulated(count, [&](int) { return new_compressor(net.store, options); });
}

std::vector<std::vector<float>> gradients_of_ranks(const odd_parameters<float>& net, std::size_t count,
                                                   std::uint64_t step) {
  std::vector<std::vector<float>> result;
  for (std::size_t w = 0; w < count; ++w) {
    const std::vector<double> values = gradients_of(net.store, static_cast<int>(w), step);
    result.emplace_back(values.begin(), values.end());
  }
  return result;
}

TEST_CASE("1-bit SGD: two hops on one rank are two gathers, one after the other") {
  odd_parameters<float> net;
  cpu_context ctx;
  for (const code_memory memory : {code_memory::error_feedback, code_memory::none}) {
    simulated hops = ranks_of(net, 1, {one_bit_cell::output_unit, memory, code_route::two_hop});
    simulated first = ranks_of(net, 1, {one_bit_cell::output_unit, memory});
    simulated second = ranks_of(net, 1, {one_bit_cell::output_unit, memory});
    for (std::uint64_t step = 0; step < 5; ++step) {
      auto one = gradients_of_ranks(net, 1, step), two = one;
      hops.step(ctx, one);
      first.step(ctx, two);
      second.step(ctx, two);
      CHECK(same_bits(one[0], two[0]));
    }
  }
}

TEST_CASE("1-bit SGD: ranks agree, and what was applied and what is left are the gradients") {
  odd_parameters<float> net;
  cpu_context ctx;
  const std::size_t size = net.store.gradients().size();
  for (const one_bit_cell cell : both_cells) {
    for (const code_route route : {code_route::gather, code_route::two_hop}) {
      for (const int count : {2, 3, 4}) {
        CAPTURE(count);
        CAPTURE(to_string(route));
        simulated ranks = ranks_of(net, count, {cell, code_memory::error_feedback, route});
        std::vector<double> sum(size, 0.0), applied(size, 0.0);
        for (std::uint64_t step = 0; step < 50; ++step) {
          auto gradients = gradients_of_ranks(net, ranks.size(), step);
          for (const auto& one : gradients) {
            for (std::size_t i = 0; i < size; ++i) sum[i] += one[i] / static_cast<double>(count);
          }
          ranks.step(ctx, gradients);
          CHECK(rank_simulation::ranks_agree(gradients));
          for (std::size_t i = 0; i < size; ++i) applied[i] += gradients[0][i];
        }
        for (std::size_t w = 0; w < ranks.size(); ++w) {
          const auto states = ranks[w].states();
          for (std::size_t i = 0; i < size; ++i)
            applied[i] += states[0].values[i] / static_cast<double>(count);
          if (route == code_route::gather) continue;
          const auto stripe = static_cast<std::size_t>(
              stripe_of(static_cast<index_t>(size), static_cast<int>(w), count).begin);
          for (std::size_t i = 0; i < states[1].values.size(); ++i)
            applied[stripe + i] += states[1].values[i];
        }
        CHECK(largest_difference<double>(sum, applied) < 1e-4);
      }
    }
  }
}

TEST_CASE("1-bit SGD: options are told apart") {
  CHECK(describe(one_bit_options{}) == "1-bit, a cell per output unit, error feedback, gather");
  CHECK(describe(one_bit_options{one_bit_cell::tensor, code_memory::none, code_route::two_hop}) ==
        "1-bit, a cell per tensor, no memory, two hops");
  odd_parameters<float> net;
  CHECK(new_compressor(net.store, one_bit_options{}).describe() !=
        new_compressor(net.store, one_bit_options{one_bit_cell::tensor}).describe());
}

}  // namespace
