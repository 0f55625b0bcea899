// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// That the shared checks can fail: a layer with a mistake of each kind.
#include "support/gradient_check.hpp"

namespace {
using namespace test;

/// y = w x^2 with one weight; `wrong` spoils a gradient.
enum class mistake { none, input, weight };

struct Square {
  using value_type = double;
  mistake wrong = mistake::none;
  parameter<double> weight{logical_layout::vector(1), parameter_role::weight};

  extents<4> output_shape(const extents<4>& input) const { return input; }
  void forward(cpu_context& ctx, const tensor_view<const double, 4>& x,
               const tensor_view<double, 4>& y) const {
    for (std::size_t i = 0; i < x.flat().size(); ++i)
      y.flat()[i] = weight.data()[0] * x.flat()[i] * x.flat()[i];
    if (ctx.training()) ctx.tape().push_value(*this, x);
  }
  void backward(cpu_context& ctx, const tensor_view<const double, 4>& dy,
                const tensor_view<double, 4>& dx) const {
    const auto x = ctx.tape().pop_value<tensor_view<const double, 4>>(*this);
    double sum = weight.accumulate() ? weight.gradient_data()[0] : 0.0;
    for (std::size_t i = 0; i < x.flat().size(); ++i) {
      sum += dy.flat()[i] * x.flat()[i] * x.flat()[i];
      const double slope = 2.0 * weight.data()[0] * x.flat()[i] * (wrong == mistake::input ? 1.0001 : 1.0);
      if (!dx.is_null()) dx.flat()[i] = slope * dy.flat()[i];
    }
    weight.gradient_data()[0] = wrong == mistake::weight ? sum + 0.001 : sum;
    ctx.gradient_written(weight);
  }
  template <class F>
  void visit(F&& f) {
    f("weight", weight);
  }
};

TEST_CASE("gradient_check: passes a right layer, sees a wrong gradient of input or weight") {
  CHECK(gradient_error(Square{}, {2, 2, 2, 3}) < gradient_tolerance);
  CHECK(gradient_error(Square{mistake::input}, {2, 2, 2, 3}) > gradient_tolerance);
  CHECK(gradient_error(Square{mistake::weight}, {2, 2, 2, 3}) > gradient_tolerance);
  check_threads(Square{}, {2, 2, 2, 3});
  check_contract(Square{}, {2, 2, 2, 3});
}

}  // namespace
