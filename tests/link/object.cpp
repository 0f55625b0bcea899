// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Compiled once for each object, with OBJECT naming its namespace. Uses the same templates with the same
// arguments in all of them: if they shared a symbol, the linker would keep the code of one for both.

#include "object.hpp"

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/lowrank.hpp>
#include <string>

#define OBJECT_STRING2(name) #name
#define OBJECT_STRING(name) OBJECT_STRING2(name)

namespace OBJECT {
namespace {

using namespace pufferfish;

double checksum_of_tensors() {
  tensor<float, 2> a({5, 7});
  for (index_t i = 0; i < 5; ++i) {
    for (index_t j = 0; j < 7; ++j) a(i, j) = static_cast<float>(i * 7 + j);
  }
  const tensor<double, 2> transposed(transpose(tensor_view<const float, 2>(a)));
  double sum = 0;
  for (index_t j = 0; j < 7; ++j) {
    for (index_t i = 0; i < 5; ++i) sum += transposed(j, i) * static_cast<double>(j + 2 * i);
  }
  return sum + static_cast<double>(static_cast<float>(bfloat16(3.14159F)));
}

// A dense layer's life: factorized, forward, backward. The same to rounding whatever the instruction set.
double checksum_of_layers() {
  tensor<float, 2> weight({24, 40});
  fill_normal(weight.flat(), 1.0, {3, 1});
  const auto made = factorize_matrix<float>(weight, fixed_rank{8});
  LowRankConv<float, 8> conv(conv_shape::square(40, 24, 1), true);
  copy(made.down_oihw(), conv.down());
  copy(made.up_oihw(), conv.up());
  tensor<float, 4> x({2, 5, 5, 40});
  fill_normal(x.flat(), 1.0, {3, 2});
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  const tensor<float, 4> y = conv.forward(ctx, x);
  const tensor<float, 4> dx = conv.backward(ctx, y);
  double sum = 0;
  for (float value : dx.flat()) sum += static_cast<double>(value) * static_cast<double>(value);
  return sum;
}

}  // namespace

void throw_shape_error() { tensor<float, 1> impossible({-1}); }

bool catches(void (*thrower)()) {
  try {
    thrower();
  } catch (const shape_error& caught) {
    return std::string(caught.what()).find("-1") != std::string::npos;
  } catch (...) {
  }
  return false;
}

object_report run() {
  object_report report;
  report.abi = OBJECT_STRING(PUFFERFISH_ABI_NAMESPACE);
  report.assert_level = PUFFERFISH_ASSERT_LEVEL;
  report.checksum = checksum_of_tensors();
  report.layers = checksum_of_layers();
  report.caught_own = catches(&throw_shape_error);
  return report;
}

}  // namespace OBJECT
