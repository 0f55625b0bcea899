// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Which plan of cuDNN computes a convolution, as the stand-in tells (its engines: stand_in.cpp).
#include "../conv_cases.hpp"

#include <string>

#include <pufferfish/gpu/cudnn.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>

using namespace gpu_test;

namespace {

using cudnn_stand_in::told;

conv_case case_of(index_t channels) {
  return conv_case::of(pf::conv_shape::square(channels, 6, 3, 1, 1), {2, 5, 4});
}

/// Forgets earlier executions, runs f and returns the engines that f has executed.
template <class F>
std::vector<int> engines_of(F&& f) {
  told() = {};
  f();
  std::vector<int> engines;
  for (const cudnn_stand_in::execution& e : told().executions) engines.push_back(e.engine);
  return engines;
}

template <class T>
struct operands {
  explicit operands(const conv_case& of)
      : c(of),
        x(narrowed(c.input(1))),
        w(narrowed(c.weight(2))),
        y(narrowed(c.output(3))),
        dx(narrowed(c.input(4))) {}

  void forward(pf::gpu_context& ctx) {
    pf::ops::conv_forward<T>(ctx, c.shape, x.device_view(c.x()), w.device_data(), nullptr,
                             y.device_view(c.y()));
    ctx.synchronize();
  }
  void backward_input(pf::gpu_context& ctx, bool add) {
    pf::ops::conv_backward_input<T>(ctx, c.shape, y.device_view(c.y()), w.device_data(),
                                    dx.device_view(c.x()), add);
    ctx.synchronize();
  }
  void backward_weight(pf::gpu_context& ctx, twin<float>& dw, bool add) {
    pf::ops::conv_backward_weight<T>(ctx, c.shape, x.device_view(c.x()), y.device_view(c.y()),
                                     dw.device_data(), add);
    ctx.synchronize();
  }

  conv_case c;
  twin<T> x, w, y, dx;

 private:
  static twin<T> narrowed(const twin<float>& from) {
    const std::vector<float> values = from.fetched();
    return twin<T>(std::vector<T>(values.begin(), values.end()));
  }
};

template <class T>
void check_first(const pf::gpu::context_options& options, int engine) {
  pf::gpu_context ctx(options);
  pf::gpu::cudnn library(ctx);
  ctx.use(&library);
  operands<T> o(case_of(4));
  twin<float> dw = o.c.weight(5);
  CHECK(engines_of([&] { o.forward(ctx); }) == std::vector<int>{engine});
  CHECK(told().questions == 1);
  CHECK(told().executions[0].result == o.y.device_data());
  CHECK(engines_of([&] { o.forward(ctx); }) == std::vector<int>{engine});
  CHECK(told().questions == 0);  // a shape is asked about once
  for (const bool add : {false, true}) {
    CHECK(engines_of([&] { o.backward_input(ctx, add); }) == std::vector<int>{engine});
    CHECK(told().questions == 1);
    CHECK(told().executions[0].result == o.dx.device_data());
    CHECK(engines_of([&] { o.backward_weight(ctx, dw, add); }) == std::vector<int>{engine});
    CHECK(told().questions == (add ? 0 : 1));  // both are one graph: the sum is our own kernel's
  }
}

}  // namespace

TEST_CASE("gpu cudnn: a deterministic context uses the first candidate") {
  check_first<float>({}, 6);                                  // neither 0 .. 3, by their notes, nor 4, nor 5
  check_first<float>({.math = pf::gpu::math_mode::tf32}, 3);  // tensor cores are allowed
  check_first<pf::gpu::bf16>({}, 3);
  check_first<pf::gpu::fp16>({}, 3);
}

TEST_CASE("gpu cudnn: another context uses the fastest of four candidates") {
  pf::gpu_context ctx({.deterministic = false}), plain;
  pf::gpu::cudnn library(ctx);
  ctx.use(&library);
  operands<float> o(case_of(4)), expected(case_of(4));
  twin<float> dw = o.c.weight(5), expected_dw = o.c.weight(5);
  const std::vector<int> trials{0, 0, 0, 0, 6, 6, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8, 8};
  const auto check_trials = [&](const void* result, auto&& run) {
    CHECK(engines_of(run) == trials);
    for (std::size_t i = 0; i + 1 < told().executions.size(); ++i) {
      if (result != nullptr) CHECK(told().executions[i].result != result);
    }
    if (result != nullptr) CHECK(told().executions.back().result == result);
  };
  check_trials(o.y.device_data(), [&] { o.forward(ctx); });
  expected.forward(plain);
  CHECK(difference(o.y.fetched(), expected.y.fetched()) < 1e-5);
  for (const bool add : {false, true}) {
    check_trials(o.dx.device_data(), [&] { o.backward_input(ctx, add); });
    expected.backward_input(plain, add);
    CHECK(difference(o.dx.fetched(), expected.dx.fetched()) < 1e-5);
    if (!add) {
      check_trials(nullptr, [&] { o.backward_weight(ctx, dw, true); });
      expected.backward_weight(plain, expected_dw, true);
      CHECK(difference(dw.fetched(), expected_dw.fetched()) < 1e-5);
    }
  }
  // Chosen: no more trials.
  CHECK(engines_of([&] { o.forward(ctx); }) == std::vector<int>{8});
  CHECK(engines_of([&] { o.backward_input(ctx, true); }) == std::vector<int>{8});
}

TEST_CASE("gpu cudnn: no trials while the stream is captured") {
  pf::gpu_context ctx({.deterministic = false}), plain;
  pf::gpu::cudnn library(ctx);
  ctx.use(&library);
  operands<float> o(case_of(4)), expected(case_of(4));
  const auto forward = [&] {
    pf::ops::conv_forward<float>(ctx, o.c.shape, o.x.device_view(o.c.x()), o.w.device_data(), nullptr,
                                 o.y.device_view(o.c.y()));
  };
  { static_cast<void>(pf::scratch_frame(ctx.scratch()).take<std::byte>(1 << 16)); }
  pf::gpu::detail::executable_graph graph;
  REQUIRE(engines_of([&] {
            pf::gpu::detail::stream_capture capture(ctx.stream());
            forward();
            graph = capture.finish();
          }) == std::vector<int>{0});
  CHECK(told().executions[0].captured);
  graph.launch(ctx.stream());
  ctx.synchronize();
  expected.forward(plain);
  CHECK(difference(o.y.fetched(), expected.y.fetched()) < 1e-5);
  CHECK(engines_of(forward) ==
        std::vector<int>{0});  // the plan of the captured call is the plan of the shape
}

TEST_CASE("gpu cudnn: shapes that cuDNN refuses are asked about once") {
  pf::gpu_context ctx;
  pf::gpu::cudnn library(ctx);
  ctx.use(&library);
  for (const index_t channels : {3, 5, 7}) {
    CAPTURE(channels);
    operands<float> o(case_of(channels));
    CHECK(engines_of([&] { o.forward(ctx); }).empty());
    CHECK(told().questions == (channels == 7 ? 0 : 1));  // the graph is refused before a question
    CHECK(engines_of([&] { o.forward(ctx); }).empty());
    CHECK(told().questions == 0);
  }
}

TEST_CASE("gpu cudnn: failures name the convolution, at every call") {
  for (const bool deterministic : {true, false}) {
    pf::gpu_context ctx({.deterministic = deterministic});
    pf::gpu::cudnn library(ctx);
    ctx.use(&library);
    operands<float> o(case_of(11));
    twin<float> dw = o.c.weight(5);
    const std::string of =
        " of a convolution from [2 x 5 x 4 x 11] to [2 x 5 x 4 x 6] by [3 x 3 x 11 x 6]: failed in the "
        "stand-in";
    for (int call = 0; call < 2; ++call) {
      CHECK_THROWS_WITH_AS(o.forward(ctx), ("gpu::cudnn: output" + of).c_str(), pf::backend_error);
      CHECK_THROWS_WITH_AS(o.backward_input(ctx, true), ("gpu::cudnn: gradient of the input" + of).c_str(),
                           pf::backend_error);
      CHECK_THROWS_WITH_AS(o.backward_weight(ctx, dw, false),
                           ("gpu::cudnn: gradient of the weight" + of).c_str(), pf::backend_error);
    }
  }
}
