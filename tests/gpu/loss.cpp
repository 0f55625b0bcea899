// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support.hpp"

#include <limits>

#include <pufferfish/gpu/ops/loss.hpp>

using namespace gpu_test;

namespace {

twin<std::int32_t> random_labels(index_t rows, index_t classes) {
  std::vector<std::int32_t> labels;
  for (std::uint64_t m = 0; m < static_cast<std::uint64_t>(rows); ++m) {
    labels.push_back(
        static_cast<std::int32_t>(pf::random_stream(3, 4).below(m, static_cast<std::uint64_t>(classes))));
  }
  return twin<std::int32_t>(labels);
}

}  // namespace

TEST_CASE("gpu loss: softmax, cross entropy and the gradient") {
  std::uint64_t stream = 0;
  for (const pf::extents<2>& shape :
       {pf::extents<2>{1, 1}, pf::extents<2>{3, 10}, pf::extents<2>{700, 10}, pf::extents<2>{33, 257},
        pf::extents<2>{5, 1000}, pf::extents<2>{4, 3001}, pf::extents<2>{0, 10}}) {
    for (const auto& smoothing :
         {pf::label_smoothing{}, pf::label_smoothing{0.1, pf::smoothing_kind::all_classes},
          pf::label_smoothing{0.2, pf::smoothing_kind::wrong_classes}}) {
      CAPTURE(shape[0]);
      CAPTURE(shape[1]);
      auto values = random_twin<float>(shape[0] * shape[1], ++stream).host();
      for (float& value : values) value = std::round(value * 40.0F) * 0.25F;  // with equal ones
      twin<float> logits(values), dlogits(shape[0] * shape[1]);
      auto labels = random_labels(shape[0], shape[1]);
      twin<double> results(2, -1.0);
      const pf::loss_result expected = pf::ops::reference::softmax_cross_entropy<float>(
          logits.host_view(shape), labels.host_span(), smoothing, 13.0, dlogits.host_view(shape));
      const auto run = [&](const pf::tensor_view<float, 2>& to) {
        pf::ops::softmax_cross_entropy<float>(gpu_context(), logits.device_view(shape), labels.device_span(),
                                              smoothing, 13.0, to, results.device_data());
        CHECK(results.fetched()[0] == doctest::Approx(expected.loss_sum).epsilon(1e-6));
        CHECK(results.fetched()[1] == static_cast<double>(expected.correct));
      };
      run({});
      run(dlogits.device_view(shape));
      CHECK(difference(dlogits) < 1e-6);
      run(logits.device_view(shape));
      CHECK(difference(logits.fetched(), dlogits.host()) < 1e-6);
    }
  }
}

TEST_CASE("gpu loss: logits of any size, and what is not finite") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();
  const auto loss_of = [](const std::vector<float>& row, std::int32_t label) {
    twin<float> logits(row), gradient(logits.size());
    twin<std::int32_t> labels(std::vector<std::int32_t>{label});
    twin<double> results(2);
    const pf::extents<2> shape{1, logits.size()};
    pf::ops::softmax_cross_entropy<float>(gpu_context(), logits.device_view(shape), labels.device_span(), {},
                                          1.0, gradient.device_view(shape), results.device_data());
    return results.fetched();
  };
  CHECK(loss_of({3e38F, -3e38F, 0.0F}, 0) == std::vector<double>{0.0, 1.0});
  CHECK(loss_of({-infinity, 0.0F}, 1) == std::vector<double>{0.0, 1.0});
  CHECK(loss_of({-infinity, 0.0F}, 0)[0] == static_cast<double>(infinity));
  CHECK(std::isnan(loss_of({quiet_nan, 0.0F, 1.0F}, 1)[0]));
  CHECK(std::isnan(loss_of({0.0F, 1.0F, quiet_nan}, 1)[0]));
  CHECK(loss_of({0.0F, 1.0F, quiet_nan}, 1)[1] == 0.0);
  CHECK(std::isnan(loss_of({0.0F, infinity}, 1)[0]));
  CHECK(std::isnan(loss_of({0.0F, 1.0F}, 2)[0]));
  CHECK(std::isnan(loss_of({0.0F, 1.0F}, -1)[0]));
  CHECK(loss_of({0.0F, 1.0F}, -1)[1] == 0.0);
}

TEST_CASE("gpu loss: what is wrong with the arguments is said before anything is launched") {
  twin<float> logits(6);
  twin<std::int32_t> labels(2);
  twin<double> results(2);
  const pf::tensor_view<const float, 2> z = logits.device_view(pf::extents<2>{3, 2});
  const auto run = [&](std::size_t count, double epsilon, double normalizer, const pf::extents<2>& to) {
    pf::ops::softmax_cross_entropy<float>(gpu_context(), z, labels.device_span().first(count),
                                          {epsilon, pf::smoothing_kind::all_classes}, normalizer,
                                          logits.device_view(to), results.device_data());
  };
  CHECK_THROWS_AS(run(2, 0.0, 1.0, {3, 2}), pf::shape_error);
  const pf::tensor_view<const float, 2> two = z.slice(0, 0, 2);
  const auto with = [&](double epsilon, double normalizer, const pf::extents<2>& to) {
    pf::ops::softmax_cross_entropy<float>(gpu_context(), two, labels.device_span(),
                                          {epsilon, pf::smoothing_kind::all_classes}, normalizer,
                                          logits.device_view(to), results.device_data());
  };
  CHECK_THROWS_AS(with(1.0, 1.0, {2, 2}), pf::value_error);
  CHECK_THROWS_AS(with(0.0, 0.0, {2, 2}), pf::value_error);
  CHECK_THROWS_AS(with(0.0, 1.0, {2, 3}), pf::shape_error);
}
