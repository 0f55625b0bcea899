// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/ops/linear/linear.hpp>

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
