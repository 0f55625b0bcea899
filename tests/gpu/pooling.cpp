// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support.hpp"

#include <limits>

#include <pufferfish/gpu/ops/pooling.hpp>

using namespace gpu_test;

namespace {

struct pool_case {
  pf::extents<4> input;
  pf::pool_shape shape;
};

// Side by side, overlapping, padded, with gaps, not square; whole vectors of channels and not.
const pool_case cases[] = {
    {{2, 8, 8, 8}, pf::pool_shape::square(2, 2)},    {{1, 1, 1, 1}, pf::pool_shape::square(1, 1)},
    {{3, 7, 9, 3}, pf::pool_shape::square(3, 2, 1)}, {{2, 6, 5, 20}, pf::pool_shape::square(3, 1, 1)},
    {{1, 11, 10, 4}, pf::pool_shape::square(2, 3)},  {{2, 9, 6, 5}, {{3, 2}, {2, 1}, {1, 0}}},
    {{5, 16, 16, 36}, pf::pool_shape::square(2, 2)}, {{0, 4, 4, 4}, pf::pool_shape::square(2, 2)},
};

struct named {
  std::string describe() const { return "pool"; }
};

// Few different values, so that many windows have several largest.
twin<float> few_values(index_t size, std::uint64_t stream) {
  auto values = random_twin<float>(size, stream).host();
  for (float& value : values) value = std::round(value * 3.0F);
  return twin<float>(values);
}

template <class F>
void for_all_cases(F&& test) {
  std::uint64_t stream = 0;
  for (const auto& [input, shape] : cases) {
    for (const index_t offset : {0, 1}) {
      CAPTURE(input[1]);
      CAPTURE(input[3]);
      CAPTURE(offset);
      const pf::extents<4> output = shape.output(input, named());
      auto x = few_values(pf::volume<4>(input) + 1, ++stream);
      auto dy = random_twin<float>(pf::volume<4>(output) + 1, ++stream);
      twin<float> y(pf::volume<4>(output) + 1), dx(pf::volume<4>(input) + 1);
      const auto host = [&](twin<float>& of, const pf::extents<4>& s) {
        return pf::tensor_view<float, 4>(of.host_data() + offset, s);
      };
      const auto device = [&](twin<float>& of, const pf::extents<4>& s) {
        return pf::tensor_view<float, 4>(of.device_data() + offset, s);
      };
      test(shape, host(x, input), host(y, output), host(dy, output), host(dx, input), device(x, input),
           device(y, output), device(dy, output), device(dx, input), [&] {
             CHECK(difference(y) < 1e-6);
             CHECK(difference(dx) < 1e-6);
           });
    }
  }
}

}  // namespace

TEST_CASE("gpu pooling: maxima and where they came from") {
  for_all_cases([](const pf::pool_shape& shape, auto x, auto y, auto dy, auto dx, auto device_x,
                   auto device_y, auto device_dy, auto device_dx, auto&& check) {
    pf::ops::reference::max_pool_forward<float>(shape, x, y);
    pf::ops::reference::max_pool_backward<float>(shape, x, dy, dx);
    pf::ops::max_pool_forward<float>(gpu_context(), shape, device_x, device_y);
    pf::ops::max_pool_backward<float>(gpu_context(), shape, device_x, device_y, device_dy, device_dx);
    check();
  });
}

TEST_CASE("gpu pooling: averages with and without padding") {
  for (const bool count_padding : {false, true}) {
    for_all_cases([&](const pf::pool_shape& shape, auto x, auto y, auto dy, auto dx, auto device_x,
                      auto device_y, auto device_dy, auto device_dx, auto&& check) {
      pf::ops::reference::average_pool_forward<float>(shape, count_padding, x, y);
      pf::ops::reference::average_pool_backward<float>(shape, count_padding, dy, dx);
      pf::ops::average_pool_forward<float>(gpu_context(), shape, count_padding, device_x, device_y);
      pf::ops::average_pool_backward<float>(gpu_context(), shape, count_padding, device_dy, device_dx);
      check();
    });
  }
}

TEST_CASE("gpu pooling: a NaN is the largest, and gets no gradient") {
  constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::size_t place : {0U, 1U, 3U}) {
    std::vector<float> values{1.0F, 2.0F, 3.0F, 4.0F};
    values[place] = quiet_nan;
    twin<float> x(values), y(1), dy(1, 1.0F), dx(4, 7.0F);
    const pf::extents<4> input{1, 2, 2, 1}, output{1, 1, 1, 1};
    const auto shape = pf::pool_shape::square(2, 2);
    pf::ops::max_pool_forward<float>(gpu_context(), shape, x.device_view(input), y.device_view(output));
    CHECK(std::isnan(y.fetched()[0]));
    pf::ops::max_pool_backward<float>(gpu_context(), shape, x.device_view(input), y.device_view(output),
                                      dy.device_view(output), dx.device_view(input));
    CHECK(dx.fetched() == std::vector<float>(4));
  }
}

TEST_CASE("gpu pooling: averages over whole images") {
  std::uint64_t stream = 300;
  for (const pf::extents<4>& shape :
       {pf::extents<4>{1, 1, 1, 1}, pf::extents<4>{3, 4, 4, 512}, pf::extents<4>{2, 7, 7, 132},
        pf::extents<4>{5, 2, 3, 3}, pf::extents<4>{2, 40, 31, 33}, pf::extents<4>{0, 2, 2, 4}}) {
    for (const index_t offset : {0, 1}) {
      CAPTURE(shape[3]);
      CAPTURE(offset);
      const pf::extents<4> output{shape[0], 1, 1, shape[3]};
      auto x = random_twin<float>(pf::volume<4>(shape) + 1, ++stream);
      auto y = random_twin<float>(pf::volume<4>(output) + 1, ++stream);
      pf::ops::reference::global_average_forward<float>({x.host_data() + offset, shape},
                                                        {y.host_data() + offset, output});
      pf::ops::global_average_forward<float>(gpu_context(), {x.device_data() + offset, shape},
                                             {y.device_data() + offset, output});
      CHECK(difference(y, 1.0) < 1e-6);
      pf::ops::reference::global_average_backward<float>({y.host_data() + offset, output},
                                                         {x.host_data() + offset, shape});
      pf::ops::global_average_backward<float>(gpu_context(), {y.device_data() + offset, output},
                                              {x.device_data() + offset, shape});
      CHECK(difference(x, 1.0) < 1e-6);
    }
  }
}
