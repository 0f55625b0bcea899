// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/ops/linear/linear.hpp>
#include <pufferfish/ops/linear/linear_maps.hpp>
#include <pufferfish/ops/linear/relu_bias.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

template <class T, std::size_t N>
tensor<T, N> random_tensor(const extents<N>& shape, random_stream random) {
  tensor<T, N> result(shape);
  fill_normal<T>(result.flat(), 1.0, random);
  return result;
}

template <class T>
void check_against_reference(cpu_context& ctx, index_t rows, index_t in, index_t out, std::uint64_t round) {
  CAPTURE(rows);
  CAPTURE(in);
  CAPTURE(out);
  // Sums of up to `rows` or `in` or `out` products of normal numbers.
  const double tolerance = (sizeof(T) == 4 ? 3e-6 : 1e-14) * std::sqrt(static_cast<double>(rows + in + out));
  const auto x = random_tensor<T, 2>({rows, in}, {1, round}), w = random_tensor<T, 2>({in, out}, {2, round}),
             dy = random_tensor<T, 2>({rows, out}, {3, round});
  const auto bias = random_tensor<T, 1>({out}, {4, round});
  const bool with_bias = round % 2 == 0, accumulate = round % 3 == 0;
  const T* b = with_bias ? bias.data() : nullptr;

  tensor<T, 2> y({rows, out}), y2({rows, out});
  ops::linear_forward<T>(ctx, x, w, b, y);
  ops::reference::linear_forward<T>(x, w, b, y2.view());
  CHECK(largest_error(y, y2) < tolerance);

  tensor<T, 2> dx({rows, in}), dx2({rows, in});
  ops::linear_backward_input<T>(ctx, dy, w, dx);
  reference_gemm{}.multiply<T>(dy.view(), transpose(w.view()), dx2.view());
  CHECK(largest_error(dx, dx2) < tolerance);

  tensor<T, 2> dw = random_tensor<T, 2>({in, out}, {5, round}), before = dw, dw2({in, out});
  ops::linear_backward_weight<T>(ctx, x, dy, dw, accumulate);
  reference_gemm{}.multiply<T>(transpose(x.view()), dy.view(), dw2.view());
  if (accumulate) {
    for (std::size_t i = 0; i < dw2.flat().size(); ++i) dw2.flat()[i] += before.flat()[i];
  }
  CHECK(largest_error(dw, dw2) < tolerance);

  tensor<T, 1> db = random_tensor<T, 1>({out}, {6, round}), db2 = db;
  ops::bias_gradient<T>(ctx, dy, db.data(), accumulate);
  for (index_t n = 0; n < out; ++n) {
    double sum = accumulate ? static_cast<double>(db2(n)) : 0.0;
    for (index_t m = 0; m < rows; ++m) sum += static_cast<double>(dy(m, n));
    db2(n) = static_cast<T>(sum);
  }
  CHECK(largest_error(db, db2) < tolerance);
}

TEST_CASE_TEMPLATE("linear operations: fast against reference over random shapes", T, float, double) {
  cpu_context ctx({2, 0});
  picker pick(1);
  for (std::uint64_t round = 0; round < 120; ++round) {
    check_against_reference<T>(ctx, pick(0, 70), pick(1, 70), pick(1, 70), round);
  }
  // Rows enough for several tiles and splits; thin in one direction or the other.
  check_against_reference<T>(ctx, 5000, 33, 16, 0);
  check_against_reference<T>(ctx, 1537, 7, 130, 3);
  check_against_reference<T>(ctx, 600, 200, 1, 4);
  check_against_reference<T>(ctx, 1, 300, 257, 5);
  // Products that copy their weight, gradients that copy their input.
  for (std::uint64_t round = 6; round < 12; ++round) {
    check_against_reference<T>(ctx, pick(96, 300), pick(32, 90), pick(1, 130), round);
  }
  check_against_reference<T>(ctx, 129, 40, 513, 12);
  check_against_reference<T>(ctx, 131, 1100, 515, 13);
  check_against_reference<T>(ctx, 100, 40, 513, 14);
}

TEST_CASE("linear operations: nothing in, nothing out, no crash") {
  cpu_context ctx({2, 0});
  for (std::uint64_t round = 0; round < 6; ++round) {
    check_against_reference<float>(ctx, 0, 5, 3, round);
    check_against_reference<float>(ctx, 4, 5, 0, round);
    check_against_reference<double>(ctx, 4, 0, 3, round);
  }
}

template <class T, std::size_t N>
std::vector<T> values_of(const tensor<T, N>& t) {
  return {t.flat().begin(), t.flat().end()};
}

TEST_CASE_TEMPLATE("linear operations: several maps at once have the bits of single maps", T, float, double) {
  cpu_context ctx({2, 0});
  picker pick(8);
  for (std::uint64_t round = 0; round < 30; ++round) {
    const index_t rows = round == 0 ? 0 : pick(1, 60), in = pick(1, 30);
    const bool add = round % 2 == 0;
    const auto x = random_tensor<T, 2>({rows, in}, {1, round});
    auto dx = random_tensor<T, 2>({rows, in}, {2, round}), dx2 = dx;
    std::vector<tensor<T, 2>> w, dy, y, y2, dw, dw2, dxs, dxs2;
    std::vector<tensor<T, 1>> bias;
    for (index_t i = 0; i < pick(1, 4); ++i) {
      const index_t out = pick(1, 20);
      const std::uint64_t stream = 10 * round + static_cast<std::uint64_t>(i);
      w.push_back(random_tensor<T, 2>({in, out}, {3, stream}));
      dy.push_back(random_tensor<T, 2>({rows, out}, {4, stream}));
      y.push_back(tensor<T, 2>({rows, out}));
      dw.push_back(random_tensor<T, 2>({in, out}, {5, stream}));
      dxs.push_back(tensor<T, 2>({rows, in}));
      bias.push_back(random_tensor<T, 1>({out}, {6, stream}));
    }
    y2 = y;
    dw2 = dw;
    dxs2 = dxs;
    std::vector<ops::linear_map<T>> forward;
    std::vector<ops::weight_gradient_map<T>> weights;
    std::vector<ops::input_gradient_map<T>> inputs;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const T* const b = i % 2 == 0 ? nullptr : bias[i].data();
      forward.push_back({x.view(), w[i].view(), b, y[i].view()});
      weights.push_back({x.view(), dy[i].view(), dw[i].view(), add});
      inputs.push_back({dy[i].view(), w[i].view(), dxs[i].view()});
      ops::linear_forward<T>(ctx, x, w[i], b, y2[i]);
      ops::linear_backward_weight<T>(ctx, x, dy[i], dw2[i], add);
      ops::linear_backward_input<T>(ctx, dy[i], w[i], dxs2[i]);
      ops::linear_backward_input<T>(ctx, dy[i], w[i], dx2, add || i > 0);
    }
    ops::linear_maps_forward<T>(ctx, forward);
    ops::linear_maps_backward_weight<T>(ctx, weights);
    ops::linear_maps_backward_input<T>(ctx, inputs);
    ops::linear_maps_backward_sum<T>(ctx, inputs, dx, add);
    for (std::size_t i = 0; i < w.size(); ++i) {
      CHECK(same_bits(values_of(y[i]), values_of(y2[i])));
      CHECK(same_bits(values_of(dw[i]), values_of(dw2[i])));
      CHECK(same_bits(values_of(dxs[i]), values_of(dxs2[i])));
    }
    CHECK(same_bits(values_of(dx), values_of(dx2)));
    // Of no maps, the sum is zero.
    ops::linear_maps_backward_sum<T>(ctx, {}, dx, true);
    CHECK(same_bits(values_of(dx), values_of(dx2)));
    ops::linear_maps_backward_sum<T>(ctx, {}, dx, false);
    for (const T value : dx.flat()) CHECK(value == T{});
  }
}

TEST_CASE_TEMPLATE("linear operations: a ReLU's gradient and that of the bias before it", T, float, double) {
  cpu_context ctx({2, 0});
  picker pick(9);
  for (std::uint64_t round = 0; round < 20; ++round) {
    const extents<2> shape{round == 0 ? 0 : pick(1, 600), pick(1, 30)};
    const auto y = random_tensor<T, 2>(shape, {1, round}), dy = random_tensor<T, 2>(shape, {2, round});
    tensor<T, 2> dz = dy, dz2(shape);
    auto db = random_tensor<T, 1>({shape[1]}, {3, round}), db2 = db;
    const bool accumulate = round % 2 == 0;
    ops::relu_bias_gradient<T>(ctx, y, dz.view(), dz.view(), db.data(), accumulate);
    ops::relu_backward<T>(ctx, y.flat(), dy.flat(), dz2.flat());
    ops::bias_gradient<T>(ctx, dz2, db2.data(), accumulate);
    CHECK(same_bits(values_of(dz), values_of(dz2)));
    CHECK(same_bits(values_of(db), values_of(db2)));
  }
  tensor<float, 2> y({2, 3}), other({2, 4});
  CHECK(contains(
      error_text([&] { ops::relu_bias_gradient<float>(ctx, y, y.view(), other.view(), nullptr, false); }),
      "[2 x 4]"));
}

void check_threads(index_t rows, index_t in, index_t out) {
  const auto x = random_tensor<float, 2>({rows, in}, {1, 1}), w = random_tensor<float, 2>({in, out}, {1, 2}),
             dy = random_tensor<float, 2>({rows, out}, {1, 3});
  const auto run = [&](int threads) {
    cpu_context ctx({threads, 0});
    tensor<float, 2> y({rows, out}), dx({rows, in}), dw({in, out});
    tensor<float, 1> db({out});
    ops::linear_forward<float>(ctx, x, w, nullptr, y);
    ops::linear_backward_input<float>(ctx, dy, w, dx);
    ops::linear_backward_weight<float>(ctx, x, dy, dw, false);
    ops::bias_gradient<float>(ctx, dy, db.data(), false);
    std::vector<float> all(y.flat().begin(), y.flat().end());
    for (const auto& part : {dx.flat(), dw.flat(), db.flat()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const auto one = run(1);
  CHECK(same_bits(one, run(2)));
  CHECK(same_bits(one, run(3)));
}

TEST_CASE("linear operations: the same bits for any number of threads") {
  check_threads(3000, 65, 31);
  check_threads(3000, 20, 31);
  check_threads(300, 70, 520);
}

TEST_CASE("linear operations: errors name the shapes") {
  cpu_context ctx;
  tensor<float, 2> x({4, 5}), w({6, 3}), y({4, 3}), w2({5, 3}), y2({5, 3});
  std::string text = error_text([&] { ops::linear_forward<float>(ctx, x, w, nullptr, y); });
  CHECK(contains(text, "linear_forward"));
  CHECK(contains(text, "[4 x 5]"));
  CHECK(contains(text, "[6 x 3]"));
  CHECK_THROWS_AS(ops::linear_forward<float>(ctx, x, w2, nullptr, y2), shape_error);
  CHECK_THROWS_AS(ops::linear_backward_input<float>(ctx, y, w, x), shape_error);
  text = error_text([&] { ops::linear_backward_weight<float>(ctx, x, y, w, false); });
  CHECK(contains(text, "linear_backward_weight"));
}

}  // namespace
