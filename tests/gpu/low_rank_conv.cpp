// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "conv_cases.hpp"

#include <pufferfish/gpu/runtime/graph.hpp>

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

/// A convolution to `rank` channels and a pointwise one from there to `out`.
struct low_rank_case {
  conv_case down;  ///< its out_channels are the rank
  index_t out;

  index_t rank() const { return down.shape.out_channels; }
  pf::extents<4> y() const { return {down.images, down.out_height, down.out_width, out}; }
  index_t pixels() const { return down.images * down.out_height * down.out_width; }
  twin<float> up(std::uint64_t stream, index_t shift) const {
    return random_twin<float>(rank() * out + shift, stream);
  }
  twin<float> result(std::uint64_t stream) const { return random_twin<float>(pixels() * out, stream); }
};

void check_forward(const low_rank_case& c, const kernels::low_rank_plan& plan, bool with_bias, bool keep,
                   index_t shift, double tolerance) {
  auto x = c.down.input(1), down = c.down.weight(2, shift), up = c.up(3, shift), t = c.down.output(4),
       y = c.result(5);
  auto bias = random_twin<float>(c.out, 6);
  const std::vector<float> before = t.host();
  const float* no_bias = nullptr;
  pf::ops::reference::conv_forward<float>(c.down.shape, x.host_view(c.down.x()),
                                          c.down.oihw(down.host_data() + shift), no_bias,
                                          t.host_view(c.down.y()));
  pf::ops::reference::linear_forward<float>(
      t.host_view<2>({c.pixels(), c.rank()}),
      pf::tensor_view<const float, 2>(up.host_data() + shift, {c.rank(), c.out}),
      with_bias ? bias.host_data() : no_bias, y.host_view<2>({c.pixels(), c.out}));
  kernels::low_rank_conv_forward<float>(gpu_context().stream(), c.down.geometry(), plan, x.device_data(),
                                        down.device_data() + shift, up.device_data() + shift,
                                        static_cast<int>(c.out), with_bias ? bias.device_data() : no_bias,
                                        keep ? t.device_data() : nullptr, y.device_data());
  CHECK(difference(y, 1.0) < tolerance);
  CHECK(difference(t.fetched(), keep ? t.host() : before, 1.0) < tolerance);
}

void check_backward(const low_rank_case& c, const kernels::low_rank_plan& plan, bool accumulate,
                    index_t shift, double tolerance) {
  const pf::extents<2> inner{c.pixels(), c.rank()}, outer{c.pixels(), c.out}, factor{c.rank(), c.out};
  auto t = c.down.output(1), dy = c.result(2), up = c.up(3, shift), dup = c.up(4, shift),
       dt = c.down.output(5);
  const auto up_of = [&](float* data) { return pf::tensor_view<float, 2>(data + shift, factor); };
  pf::reference_gemm{}.multiply<float>(dy.host_view(outer), pf::transpose(up_of(up.host_data())),
                                       dt.host_view(inner));
  pf::reference_gemm{}.multiply<float>(pf::transpose(t.host_view(inner)), dy.host_view(outer),
                                       up_of(dup.host_data()), accumulate);
  twin<float> partials(plan.scratch);
  kernels::low_rank_conv_backward_up<float>(
      gpu_context().stream(), plan, c.pixels(), static_cast<int>(c.rank()), static_cast<int>(c.out),
      t.device_data(), dy.device_data(), up.device_data() + shift, dup.device_data() + shift, accumulate,
      dt.device_data(), partials.device_data());
  CHECK(difference(dt, 1.0) < tolerance);
  CHECK(difference(dup, 1.0) < tolerance);
}

kernels::low_rank_plan backward_plan(const low_rank_case& c, bool tensor, int slices) {
  auto plan = kernels::plan_low_rank_backward(c.pixels(), c.rank(), c.out, tensor, sizeof(float));
  plan.slices = slices;
  plan.scratch = slices * c.rank() * c.out;
  return plan;
}

}  // namespace

TEST_CASE("gpu low-rank convolution: every block, by float units and tensor cores") {
  std::uint64_t round = 0;
  for (const index_t rank : {1, 7, 16, 20, 32, 33, 64}) {
    for (const bool tensor : {false, true}) {
      const bool odd = round % 2 == 1;
      const double tolerance = tensor ? 4e-3 : 1e-5;
      const low_rank_case c{
          conv_case::of(pf::conv_shape::square(odd ? 3 : 8, rank, 3, 1, 1), {2, 9, odd ? 10 : 8}),
          odd ? 65 : 72};
      CAPTURE(rank);
      CAPTURE(tensor);
      for (const int rows : {64, 128}) {
        CAPTURE(rows);
        kernels::low_rank_plan plan;
        plan.tensor = tensor;
        plan.rows = rows;
        check_forward(c, plan, rows == 64, odd == (rows == 64), odd ? 1 : 0, tolerance);
      }
      for (const int slices : {1, 2, 5})
        check_backward(c, backward_plan(c, tensor, slices), slices == 2, slices % 2, tolerance);
      ++round;
    }
  }
}

TEST_CASE("gpu low-rank convolution: random shapes, as plans have them") {
  picker pick(5);
  constexpr index_t channels[] = {1, 3, 5, 8, 16, 33, 64};
  int done = 0;
  for (int round = 0; round < 24; ++round) {
    const pf::conv_shape shape{channels[pick(0, 6)],     pick(1, 64),
                               {pick(1, 5), pick(1, 5)}, {pick(1, 3), pick(1, 3)},
                               {pick(0, 3), pick(0, 3)}, {pick(1, 2), pick(1, 2)}};
    const std::optional<conv_case> made = conv_case::find(shape, {pick(1, 3), pick(1, 11), pick(1, 11)});
    if (!made) continue;
    ++done;
    const low_rank_case c{*made, pick(1, 130)};
    const bool tensor = round % 3 == 2;
    const double tolerance = tensor ? 4e-3 : 1e-5;
    CAPTURE(round);
    CAPTURE(shape.describe());
    CAPTURE(c.out);
    check_forward(c, kernels::plan_low_rank_forward(c.down.geometry(), tensor), round % 2 == 0, true,
                  round % 2, tolerance);
    check_backward(c, kernels::plan_low_rank_backward(c.pixels(), c.rank(), c.out, tensor, sizeof(float)),
                   round % 2 == 1, round % 2, tolerance);
  }
  CHECK(done > 12);
}

TEST_CASE("gpu low-rank convolution: the operations, fused and not, and over no images") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  for (const auto& c : {low_rank_case{conv_case::of(pf::conv_shape::square(4, 6, 3, 1, 1), {2, 9, 9}), 20},
                        low_rank_case{conv_case::of(pf::conv_shape::square(2, 4, 3, 1, 1), {5, 32, 28}), 12},
                        low_rank_case{conv_case::of(pf::conv_shape::square(8, 70, 3, 2, 1), {2, 9, 9}), 80},
                        low_rank_case{conv_case::of(pf::conv_shape::square(4, 6, 3, 1, 1), {0, 9, 9}), 20}}) {
    CAPTURE(c.down.shape.describe());
    auto x = c.down.input(1), down = c.down.weight(2), up = c.up(3, 0), t = c.down.output(4), y = c.result(5);
    auto bias = random_twin<float>(c.out, 6), dy = c.result(7), dup = c.up(8, 0), dt = c.down.output(9);
    const pf::extents<2> factor{c.rank(), c.out};
    pf::ops::low_rank_conv_forward<float>(host, c.down.shape, x.host_view(c.down.x()), down.host_data(),
                                          up.host_view(factor), bias.host_data(), t.host_view(c.down.y()),
                                          y.host_view(c.y()));
    pf::ops::low_rank_conv_forward<float>(ctx, c.down.shape, x.device_view(c.down.x()), down.device_data(),
                                          up.device_view(factor), bias.device_data(),
                                          t.device_view(c.down.y()), y.device_view(c.y()));
    CHECK(difference(t, 1.0) < 1e-5);
    CHECK(difference(y, 1.0) < 1e-5);
    pf::ops::low_rank_conv_forward<float>(ctx, c.down.shape, x.device_view(c.down.x()), down.device_data(),
                                          up.device_view(factor), bias.device_data(), {},
                                          y.device_view(c.y()));
    CHECK(difference(y, 1.0) < 1e-5);
    for (const bool accumulate : {false, true}) {
      pf::ops::low_rank_conv_backward_up<float>(host, t.host_view(c.down.y()), dy.host_view(c.y()),
                                                up.host_view(factor), dup.host_view(factor), accumulate,
                                                dt.host_view(c.down.y()));
      pf::ops::low_rank_conv_backward_up<float>(ctx, t.device_view(c.down.y()), dy.device_view(c.y()),
                                                up.device_view(factor), dup.device_view(factor), accumulate,
                                                dt.device_view(c.down.y()));
      CHECK(difference(dt, 1.0) < 1e-5);
      CHECK(difference(dup, 1.0) < 1e-5);
    }
  }
}

TEST_CASE_TEMPLATE("gpu low-rank convolution: both gradients of weights in one call, with fewer launches", T,
                   float, pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context ctx;
  std::size_t saved = 0;
  for (const auto& c :
       {low_rank_case{conv_case::of(pf::conv_shape::square(4, 6, 3, 1, 1), {2, 9, 9}), 20},
        low_rank_case{conv_case::of(pf::conv_shape::square(16, 8, 3, 1, 1), {3, 20, 21}), 24},
        low_rank_case{conv_case::of(pf::conv_shape::square(64, 16, 3, 1, 1), {2, 16, 16}), 64},
        low_rank_case{conv_case::of(pf::conv_shape::square(16, 80, 3, 2, 1), {2, 9, 9}), 88},
        low_rank_case{conv_case::of(pf::conv_shape::square(16, 8, 1, 1, 0), {2, 9, 9}), 24},
        low_rank_case{conv_case::of(pf::conv_shape::square(4, 6, 3, 1, 1), {0, 9, 9}), 20}}) {
    CAPTURE(c.down.shape.describe());
    const pf::extents<2> factor{c.rank(), c.out};
    const index_t inner = c.pixels() * c.rank(), weights = c.down.shape.patch() * c.rank();
    stored<T> x(pf::volume<4>(c.down.x()), 1), t(inner, 2), dy(c.pixels() * c.out, 3),
        up(c.rank() * c.out, 4);
    for (const bool add : {false, true}) {
      std::vector<std::vector<float>> gradients;
      std::vector<std::size_t> operations;
      for (const bool together : {false, true}) {
        auto dup = random_twin<float>(c.rank() * c.out, 5), ddown = random_twin<float>(weights, 6);
        stored<T> dt(inner, 7);
        const auto work = [&] {
          const auto inputs = x.narrow.device_view(c.down.x()), inners = t.narrow.device_view(c.down.y()),
                     outers = dy.narrow.device_view(c.y()), to = dt.narrow.device_view(c.down.y());
          if (together) {
            return pf::ops::low_rank_conv_backward_weights<T>(
                ctx, c.down.shape, inputs, inners, outers, up.narrow.device_view(factor),
                {dup.device_data(), add}, to, {ddown.device_data(), add}, [](auto&& rest) { rest(); });
          }
          pf::ops::low_rank_conv_backward_up<T>(ctx, inners, outers, up.narrow.device_view(factor),
                                                dup.device_view(factor), add, to);
          pf::ops::conv_backward_weight<T>(ctx, c.down.shape, inputs, to, ddown.device_data(), add);
        };
        work();
        gradients.push_back(dup.fetched());
        gradients.push_back(ddown.fetched());
        pf::gpu::detail::stream_capture capture(ctx.stream());
        work();
        operations.push_back(capture.finish().operations());
      }
      CHECK(gradients[0] == gradients[2]);
      CHECK(gradients[1] == gradients[3]);
      CHECK(operations[1] <= operations[0]);
      saved += operations[0] - operations[1];
    }
  }
  CHECK(saved >= 4);
  const pf::extents<4> image{1, 4, 4, 2}, none{1, 4, 4, 3};
  stored<T> some(64, 8);
  CHECK_THROWS_AS(pf::ops::low_rank_conv_backward_weights<T>(
                      ctx, pf::conv_shape::square(2, 4, 3, 1, 1), some.narrow.device_view(image),
                      some.narrow.device_view(none), some.narrow.device_view(image),
                      some.narrow.device_view(pf::extents<2>{3, 2}), {}, some.narrow.device_view(none), {},
                      [](auto&&) { FAIL("computed"); }),
                  pf::shape_error);
}

TEST_CASE("gpu low-rank convolution: no outputs give a gradient of zero") {
  auto t = random_twin<float>(2 * 9 * 4, 1), dt = random_twin<float>(2 * 9 * 4, 2);
  twin<float> none(1);
  const pf::extents<4> inner{2, 3, 3, 4}, outer{2, 3, 3, 0};
  const pf::extents<2> factor{4, 0};
  std::fill(dt.host().begin(), dt.host().end(), 0.0F);
  pf::ops::low_rank_conv_backward_up<float>(gpu_context(), t.device_view(inner), none.device_view(outer),
                                            none.device_view(factor), none.device_view(factor), false,
                                            dt.device_view(inner));
  CHECK(difference(dt) == 0.0);
}
