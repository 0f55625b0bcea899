// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The shortest way to an operation, for docs/architecture.md: y = max(x, 0)^2 with its gradient, as a plain
// reference, as kernels for every instruction set (added_operation.inc), and as a layer that calls them.
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;

namespace reference {
template <class T>
void square_forward(std::span<const T> x, std::span<T> y) {
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] < T{} ? T{} : x[i] * x[i];
}
template <class T>
void square_backward(std::span<const T> x, std::span<const T> dy, std::span<T> dx) {
  for (std::size_t i = 0; i < x.size(); ++i) dx[i] = x[i] < T{} ? T{} : T{2} * x[i] * dy[i];
}
}  // namespace reference

// A path from linalg/, the folder of for_each_target.inc. A header of the library writes <pufferfish/...>.
#define PUFFERFISH_KERNELS squares
#define PUFFERFISH_KERNEL_FILE "../../../tests/unit/ops/added_operation.inc"
#include <pufferfish/linalg/for_each_target.inc>

// The struct of the operation's folder, as in ops/device_ops.hpp. A header of gpu/ops specializes it.
template <class Device>
struct square_ops;

template <class T, class Device>
void square_forward(context<Device>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "square_forward: lengths differ");
  if constexpr (!ops::is_cpu<Device>) {
    square_ops<Device>::square_forward(ctx, x, y);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), squares, square<T>);
    ops::for_chunks(ctx, static_cast<index_t>(y.size()), [=](index_t begin, index_t end) {
      kernel(x.data() + begin, y.data() + begin, end - begin);
    });
  }
}
template <class T, class Device>
void square_backward(context<Device>& ctx, std::span<const T> x, std::span<const T> dy, std::span<T> dx) {
  PUFFERFISH_ASSERT(x.size() == dy.size() && dy.size() == dx.size(), "square_backward: lengths differ");
  if constexpr (!ops::is_cpu<Device>) {
    square_ops<Device>::square_backward(ctx, x, dy, dx);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), squares, slope<T>);
    ops::for_chunks(ctx, static_cast<index_t>(dx.size()), [=](index_t begin, index_t end) {
      kernel(x.data() + begin, dy.data() + begin, dx.data() + begin, end - begin);
    });
  }
}

class SquaredReLU {
 public:
  using value_type = double;
  std::string describe() const { return "SquaredReLU"; }
  extents<4> output_shape(const extents<4>& input) const { return input; }
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const double, 4>& x,
               const tensor_view<double, 4>& y) const {
    detail::check_forward(*this, x, y);
    if (ctx.training()) ctx.tape().push_value(*this, x);
    square_forward<double>(ctx, x.flat(), y.flat());
  }
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const double, 4>& dy,
                const tensor_view<double, 4>& dx) const {
    const auto x = ctx.tape().template pop_value<tensor_view<const double, 4>>(*this);
    detail::check_backward(*this, x.shape(), dy, dx);
    if (!dx.is_null()) square_backward<double>(ctx, x.flat(), dy.flat(), dx.flat());
  }
};

TEST_CASE_TEMPLATE("an added operation: every instruction set computes the bits of the reference", T, float,
                   double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    for (const std::size_t count : {0U, 1U, 3U, 16U, 33U, 200U}) {
      std::vector<T> x(count), dy(count), got(count), want(count);
      fill_normal<T>(x, 1.0, {1, 1});
      fill_normal<T>(dy, 1.0, {1, 2});
      if (count > 20) x[20] = std::numeric_limits<T>::quiet_NaN();
      PUFFERFISH_KERNEL(target, squares, square<T>)(x.data(), got.data(), static_cast<index_t>(count));
      reference::square_forward<T>(x, want);
      if (count > 20) CHECK(std::isnan(got[20]));
      if (count > 20) got[20] = want[20] = T{};
      CHECK(got == want);
      if (count > 20) x[20] = T{-1};
      PUFFERFISH_KERNEL(target, squares, slope<T>)
      (x.data(), dy.data(), got.data(), static_cast<index_t>(count));
      reference::square_backward<T>(x, dy, want);
      CHECK(got == want);
    }
  }
}

TEST_CASE("an added operation: its layer has the right gradient, with any number of threads") {
  CHECK(gradient_error(SquaredReLU(), {2, 3, 4, 5}) < gradient_tolerance);
  check_contract(SquaredReLU(), {2, 3, 4, 5});
  check_threads(SquaredReLU(), {2, 100, 100, 3});  // several chunks
}

}  // namespace
