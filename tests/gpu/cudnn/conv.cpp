// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Convolutions by cuDNN: what our own kernels give, in every type; shapes that it does not take.
#include "../conv_cases.hpp"

#include <pufferfish/gpu/cudnn.hpp>

using namespace gpu_test;

namespace {

template <class T>
twin<T> narrow(const twin<float>& from) {
  const std::vector<float> values = from.fetched();
  return twin<T>(std::vector<T>(values.begin(), values.end()));
}
template <class T>
std::vector<float> wide(const twin<T>& from) {
  const std::vector<T> values = from.fetched();
  return std::vector<float>(values.begin(), values.end());
}

template <class T>
constexpr double tolerance = 4 * unit<T>;
// cuDNN may take one of Winograd's algorithms, which in float (fused multiply-add) loses one to two decimal
// digits to a direct sum. Products of TF32's 11 bits differ by 5e-4 and more.
template <>
constexpr double tolerance<float> = 1e-4;

template <class T>
struct results {
  std::vector<float> y, dx, dw;
};
/// All three passes, with a bias and sums onto what was there.
template <class T>
results<T> run(pf::gpu_context& ctx, const conv_case& c, bool more) {
  auto x = narrow<T>(c.input(1)), w = narrow<T>(c.weight(2)), dy = narrow<T>(c.output(3)),
       bias = narrow<T>(random_twin<float>(c.shape.out_channels, 4)), y = narrow<T>(c.output(5)),
       dx = narrow<T>(c.input(6));
  auto dw = c.weight(7);
  pf::ops::conv_forward<T>(ctx, c.shape, x.device_view(c.x()), w.device_data(),
                           more ? bias.device_data() : nullptr, y.device_view(c.y()));
  pf::ops::conv_backward_input<T>(ctx, c.shape, dy.device_view(c.y()), w.device_data(), dx.device_view(c.x()),
                                  more);
  pf::ops::conv_backward_weight<T>(ctx, c.shape, x.device_view(c.x()), dy.device_view(c.y()),
                                   dw.device_data(), more);
  return {wide(y), wide(dx), dw.fetched()};
}

template <class T>
void check(const conv_case& c) {
  pf::gpu_context ctx;
  pf::gpu::cudnn library(ctx);
  CHECK(library.deterministic());
  for (const bool more : {false, true}) {
    ctx.use(nullptr);
    const results<T> expected = run<T>(ctx, c, more);
    ctx.use(&library);
    const results<T> got = run<T>(ctx, c, more);
    CHECK(difference(got.y, expected.y) < tolerance<T>);
    CHECK(difference(got.dx, expected.dx) < tolerance<T>);
    CHECK(difference(got.dw, expected.dw) < tolerance<T>);
    const results<T> again = run<T>(ctx, c, more);
    CHECK(again.y == got.y);
    CHECK(again.dx == got.dx);
    CHECK(again.dw == got.dw);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("gpu cudnn: convolutions as by our own kernels", T, float, pf::gpu::bf16, pf::gpu::fp16) {
  check<T>(conv_case::of(pf::conv_shape::square(4, 6, 3, 1, 1), {2, 5, 4}));
  check<T>(conv_case::of(pf::conv_shape::square(3, 8, 3, 2, 1), {1, 7, 6}));
  pf::conv_shape shape = pf::conv_shape::square(8, 16, 3, 1, 0);
  shape.kernel = {2, 3};
  shape.stride = {1, 2};
  shape.padding = {0, 2};
  shape.dilation = {2, 1};
  check<T>(conv_case::of(shape, {2, 6, 5}));
  // The stand-in offers no algorithm for five channels. It refuses each that it offers for three (above) when
  // called.
  check<T>(conv_case::of(pf::conv_shape::square(5, 8, 3, 1, 1), {2, 4, 4}));
}
