// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <limits>

#include <pufferfish/nn/layers/channel_select.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// Ascending channel numbers: each of 0 .. channels - 1 with probability 1/2, at least the last one.
std::vector<index_t> some_channels(index_t channels, std::uint64_t stream) {
  const random_stream random(5, stream);
  std::vector<index_t> list;
  for (index_t c = 0; c < channels; ++c) {
    const bool kept = random.uniform(static_cast<std::uint64_t>(c)) < 0.5;
    if (kept || (list.empty() && c + 1 == channels)) list.push_back(c);
  }
  return list;
}

template <class T>
tensor_view<T, 2> columns_of(tensor<T, 2>& wide, index_t count) {
  return wide.view().slice(1, 1, count);
}

TEST_CASE_TEMPLATE("columns: gathered and scattered as by the reference, with gaps between rows", T, float,
                   double) {
  cpu_context ctx({2, 0});
  std::uint64_t stream = 0;
  for (const extents<2> shape : {extents<2>{0, 3}, {1, 1}, {5, 7}, {33, 64}, {3, 1101}, {900, 48}}) {
    CAPTURE(shape[0]);
    CAPTURE(shape[1]);
    const std::vector<index_t> list = some_channels(shape[1], ++stream);
    std::vector<T> numbers;
    for (const index_t c : list) numbers.push_back(static_cast<T>(c) + T(0.2));  // are rounded
    std::vector<T> exact(list.begin(), list.end());
    const auto count = static_cast<index_t>(list.size());
    tensor<T, 2> x({shape[0], shape[1] + 2}), y({shape[0], count + 3});
    fill_normal<T>(x.flat(), 1.0, {1, ++stream});
    fill_normal<T>(y.flat(), 1.0, {1, ++stream});
    tensor<T, 2> wanted = y;
    const tensor_view<T, 2> whole = columns_of(x, shape[1]), part = columns_of(y, count);
    ops::gather_columns<T>(ctx, whole, numbers.data(), part);
    ops::reference::gather_columns<T>(whole, exact.data(), columns_of(wanted, count));
    CHECK(largest_error(y, wanted) == 0.0);
    for (const bool add : {false, true}) {
      wanted = x;
      ops::scatter_columns<T>(ctx, part, numbers.data(), whole, add);
      ops::reference::scatter_columns<T>(part, exact.data(), columns_of(wanted, shape[1]), add);
      CHECK(largest_error(x, wanted) == 0.0);
    }
  }
  tensor<T, 2> x({2, 3}), y({2, 1}), other({3, 1});
  for (const T bad : {T(3), T(-1), std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()}) {
    CHECK_THROWS_AS(ops::gather_columns<T>(ctx, x, &bad, y), value_error);
    CHECK_THROWS_AS(ops::scatter_columns<T>(ctx, y, &bad, x, true), value_error);
  }
  const T zero{};
  CHECK_THROWS_AS(ops::gather_columns<T>(ctx, x, &zero, other), shape_error);
}

TEST_CASE("ChannelSelect: passes the listed channels; gradient, contract, threads") {
  const ChannelSelect<double> layer(7, {1, 2, 6});
  CHECK(layer.describe() == "ChannelSelect 3 of 7");
  CHECK(layer.channels() == std::vector<index_t>{1, 2, 6});
  CHECK(layer.output_shape({2, 3, 4, 7}) == extents<4>{2, 3, 4, 3});
  CHECK(gradient_error(layer, {2, 2, 3, 7}) < gradient_tolerance);
  CHECK(gradient_error(ChannelSelect<double>(1, {0}), {3, 1, 1, 1}) < gradient_tolerance);
  check_contract(ChannelSelect<float>(5, {0, 4}), {2, 2, 3, 5});
  check_contract(ChannelSelect<float>(5, {0, 4}), {0, 2, 3, 5});
  check_threads(ChannelSelect<float>(33, some_channels(33, 1)), {5, 19, 21, 33});
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tensor<double, 4> x({2, 3, 4, 7}), y({2, 3, 4, 3}), dx(x.shape()), sum(x.shape());
  fill_normal<double>(x.flat(), 1.0, {1, 1});
  fill_normal<double>(sum.flat(), 1.0, {1, 2});
  const tensor<double, 4> before = sum;
  layer.forward(ctx, x, y);
  layer.backward(ctx, y, dx.view());
  layer.forward(ctx, x, y);
  layer.backward_add(ctx, y, sum.view());
  for (std::size_t i = 0; i < x.flat().size(); ++i) {
    const bool passes = i % 7 == 1 || i % 7 == 2 || i % 7 == 6;
    CHECK(dx.flat()[i] == (passes ? x.flat()[i] : 0.0));
    CHECK(sum.flat()[i] == before.flat()[i] + dx.flat()[i]);
  }
}

TEST_CASE("ChannelSelect: errors") {
  using list = std::vector<index_t>;
  for (const list& bad : {list{}, list{1, 1}, list{2, 1}, list{-1}, list{7}}) {
    CHECK_THROWS_AS(ChannelSelect<float>(7, bad), value_error);
  }
  CHECK_THROWS_AS(ChannelSelect<float>(0, {0}), shape_error);
  CHECK_THROWS_AS(ChannelSelect<float>((index_t{1} << 24) + 1, {0}), shape_error);
  ChannelSelect<float> layer(3, {0, 2});
  const std::string text = error_text([&] { layer.output_shape({1, 1, 1, 4}); });
  CHECK(contains(text, "ChannelSelect 2 of 3: input [1 x 1 x 1 x 4] (NHWC) has 4 channels, not 3"));
  layer.visit([](const char*, auto& buffer) { buffer.data()[1] = 3.0F; });
  CHECK_THROWS_AS(layer.channels(), value_error);
}

}  // namespace
