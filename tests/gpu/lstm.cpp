// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Time steps of an LSTM on the device against the CPU's.
#include "support.hpp"

#include <pufferfish/gpu/ops/lstm.hpp>

using namespace gpu_test;

namespace {

struct step_case {
  index_t batch, hidden, gap;
};
constexpr step_case cases[] = {{0, 4, 0},   {1, 1, 0},   {3, 5, 2},  {20, 32, 0},
                               {7, 130, 1}, {7, 130, 2}, {3, 12, 0}, {2, 700, 4}};

}  // namespace

TEST_CASE("gpu lstm: one step forward and backward, with and without a state before and after") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 0;
  for (const step_case& c : cases) {
    CAPTURE(c.batch);
    CAPTURE(c.hidden);
    const index_t step = c.hidden + c.gap;
    const auto wide = [&](float* data) {
      return pf::tensor_view<float, 2>(data, {c.batch, 4 * c.hidden}, {4 * c.hidden + c.gap, 1});
    };
    const auto state = [&](float* data) {
      return pf::tensor_view<float, 2>(data, {c.batch, c.hidden}, {step, 1});
    };
    const pf::tensor_view<const float, 2> none;
    for (const bool given : {false, true}) {
      auto gates = random_twin<float>(c.batch * (4 * c.hidden + c.gap), ++stream);
      for (float& z : gates.host()) z *= 6.0F;  // saturated gates, too
      gates = twin<float>(gates.host());
      auto before = random_twin<float>(c.batch * step, ++stream),
           dy = random_twin<float>(c.batch * step, ++stream),
           dh = random_twin<float>(c.batch * step, ++stream),
           dc = random_twin<float>(c.batch * step, ++stream);
      twin<float> cell(c.batch * step), output(c.batch * step), dc_before(c.batch * step);
      pf::ops::lstm_forward<float>(host, wide(gates.host_data()), given ? state(before.host_data()) : none,
                                   state(cell.host_data()), state(output.host_data()));
      pf::ops::lstm_forward<float>(ctx, wide(gates.device_data()), given ? state(before.device_data()) : none,
                                   state(cell.device_data()), state(output.device_data()));
      CHECK(difference(gates) < 1e-6);
      CHECK(difference(cell) < 1e-6);
      CHECK(difference(output) < 1e-6);
      pf::ops::lstm_backward<float>(host, wide(gates.host_data()), given ? state(before.host_data()) : none,
                                    state(cell.host_data()), state(dy.host_data()),
                                    given ? state(dh.host_data()) : none,
                                    given ? state(dc.host_data()) : none, state(dc_before.host_data()));
      pf::ops::lstm_backward<float>(ctx, wide(gates.device_data()),
                                    given ? state(before.device_data()) : none, state(cell.device_data()),
                                    state(dy.device_data()), given ? state(dh.device_data()) : none,
                                    given ? state(dc.device_data()) : none, state(dc_before.device_data()));
      CHECK(difference(gates) < 1e-5);
      CHECK(difference(dc_before) < 1e-5);
    }
  }
  twin<float> small(6), other(8);
  CHECK_THROWS_AS(pf::ops::lstm_forward<float>(ctx, other.device_view<2>({1, 8}), {},
                                               small.device_view<2>({2, 3}), small.device_view<2>({2, 3})),
                  pf::shape_error);
  twin<float> gates(24);
  const auto state = small.device_view<2>({2, 3});
  CHECK_THROWS_AS(
      pf::ops::lstm_backward<float>(ctx, gates.device_view<2>({2, 12}), {}, state, state, {}, {}, {}),
      pf::shape_error);
}

TEST_CASE("gpu lstm: products step after step, one matrix and several on a diagonal") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 1000;
  for (const index_t groups : {1, 4}) {
    for (const bool transposed : {false, true}) {
      constexpr index_t batch = 5, depth = 7, columns = 12;
      const index_t group_step = groups == 1 ? 0 : transposed ? columns * depth : columns;
      const index_t row = transposed ? depth : groups * columns;
      auto a = random_twin<float>(batch * groups * depth, ++stream);
      auto b = random_twin<float>(groups * columns * depth, ++stream);
      auto c = random_twin<float>(batch * groups * columns, ++stream);
      const auto operand = [&](float* data) {
        return transposed ? pf::tensor_view<const float, 2>(data, {depth, columns}, {1, depth})
                          : pf::tensor_view<const float, 2>(data, {depth, columns}, {row, 1});
      };
      for (const bool add : {false, true}) {
        pf::scratch_frame frame(host.scratch()), on_device(ctx.scratch());
        const pf::ops::step_operand<float> mine(host, frame, operand(b.host_data()), 9, groups, group_step);
        const pf::ops::step_operand<float, pf::device::gpu> its(ctx, on_device, operand(b.device_data()), 9,
                                                                groups, group_step);
        mine.multiply(host, a.host_view<2>({batch, groups * depth}),
                      c.host_view<2>({batch, groups * columns}), add);
        its.multiply(ctx, a.device_view<2>({batch, groups * depth}),
                     c.device_view<2>({batch, groups * columns}), add);
        CHECK(difference(c, 1.0) < 1e-5);
      }
    }
  }
}
