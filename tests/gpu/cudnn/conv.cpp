// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Convolutions by cuDNN: as by the built-in kernels, in every type; shapes that cuDNN does not take.
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
// cuDNN may use one of Winograd's algorithms, which in float (fused multiply-add) loses one to two decimal
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
void check_case(pf::gpu_context& ctx, pf::gpu::cudnn& library, const conv_case& c) {
  for (const bool more : {false, true}) {
    ctx.use(nullptr);
    const results<T> expected = run<T>(ctx, c, more);
    ctx.use(&library);
    const results<T> got = run<T>(ctx, c, more);
    CHECK(difference(got.y, expected.y) < tolerance<T>);
    CHECK(difference(got.dx, expected.dx) < tolerance<T>);
    CHECK(difference(got.dw, expected.dw) < tolerance<float>);  // float, also from 16-bit operands
    if (!ctx.deterministic()) continue;
    const results<T> again = run<T>(ctx, c, more);
    CHECK(again.y == got.y);
    CHECK(again.dx == got.dx);
    CHECK(again.dw == got.dw);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("gpu cudnn: convolutions as by the built-in kernels", T, float, pf::gpu::bf16,
                   pf::gpu::fp16) {
  for (const bool deterministic : {true, false}) {
    CAPTURE(deterministic);
    pf::gpu_context ctx({.deterministic = deterministic});
    pf::gpu::cudnn library(ctx);
    CHECK(library.deterministic() == deterministic);
    const auto check = [&](const conv_case& c) { check_case<T>(ctx, library, c); };
    check(conv_case::of(pf::conv_shape::square(4, 6, 3, 1, 1), {2, 5, 4}));
    if (!deterministic) continue;  // there every plan is chosen among four, which cuDNN takes long to build
    check(conv_case::of(pf::conv_shape::square(8, 8, 3, 2, 1), {1, 7, 6}));
    pf::conv_shape shape = pf::conv_shape::square(8, 16, 3, 1, 0);
    shape.kernel = {2, 3};
    shape.stride = {1, 2};
    shape.padding = {0, 2};
    shape.dilation = {2, 1};
    check(conv_case::of(shape, {2, 6, 5}));
    // The stand-in has no plan, no engine and no graph for these numbers of input channels.
    for (const index_t channels : {3, 5, 7}) {
      check(conv_case::of(pf::conv_shape::square(channels, 8, 3, 1, 1), {2, 4, 4}));
    }
  }
}

TEST_CASE_TEMPLATE("gpu cudnn: random shapes", T, float, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context ctx;
  pf::gpu::cudnn library(ctx);
  picker pick(13);
  constexpr index_t channels[] = {1, 2, 4, 8, 9, 16};
  int done = 0;
  for (int round = 0; round < 16; ++round) {
    const pf::conv_shape shape{channels[pick(0, 5)],     channels[pick(0, 5)],     {pick(1, 5), pick(1, 5)},
                               {pick(1, 3), pick(1, 3)}, {pick(0, 3), pick(0, 3)}, {pick(1, 2), pick(1, 2)}};
    const std::optional<conv_case> made = conv_case::find(shape, {pick(1, 3), pick(1, 9), pick(1, 9)});
    if (!made) continue;
    ++done;
    CAPTURE(shape.describe());
    CAPTURE(made->images);
    CAPTURE(made->height);
    CAPTURE(made->width);
    check_case<T>(ctx, library, *made);
  }
  CHECK(done > 8);
}

TEST_CASE("gpu cudnn: operands that are not aligned") {
  pf::gpu_context ctx;
  pf::gpu::cudnn library(ctx);
  const conv_case c = conv_case::of(pf::conv_shape::square(4, 6, 3, 1, 1), {2, 5, 4});
  twin<float> x = random_twin<float>(c.x_size() + 1, 1), w = c.weight(2), y(c.y_size()), expected(c.y_size());
  const pf::tensor_view<const float, 4> shifted(x.device_data() + 1, c.x());
  const auto run = [&](twin<float>& to) {
    pf::ops::conv_forward<float>(ctx, c.shape, shifted, w.device_data(), nullptr, to.device_view(c.y()));
  };
  run(expected);
  ctx.use(&library);
  run(y);
  CHECK(y.fetched() == expected.fetched());
}
