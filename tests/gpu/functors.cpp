// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What kernels compute, by itself: the function objects under another library's loops, on the host.
#include <doctest/doctest.h>

#include <span>
#include <vector>

#include <thrust/execution_policy.h>
#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/zip_iterator.h>
#include <thrust/transform.h>

#include <pufferfish/core/random.hpp>
#include <pufferfish/gpu/kernels/elementwise/elementwise_functors.hpp>
#include <pufferfish/gpu/kernels/elementwise/layer_dropout.hpp>
#include <pufferfish/gpu/kernels/optim/optimizer_functors.hpp>
#include <pufferfish/gpu/kernels/random.hpp>
#include <pufferfish/gpu/kernels/recurrent/lstm_functors.hpp>
#include <pufferfish/ops/elementwise/activation.hpp>
#include <pufferfish/ops/elementwise/relu.hpp>
#include <pufferfish/ops/recurrent/lstm.hpp>
#include <pufferfish/optim/adam.hpp>
#include <pufferfish/optim/sgd.hpp>

namespace pf = pufferfish;
namespace kernels = pufferfish::gpu::kernels;

namespace {

using values = std::vector<float>;

values random_values(std::uint64_t stream, double from = -5.0) {
  values result(1000);
  pf::fill_uniform(std::span<float>(result), from, 5.0, pf::random_stream(1, stream));
  return result;
}

template <class F>
values mapped(const values& x, F f) {
  values y(x.size());
  thrust::transform(thrust::seq, x.begin(), x.end(), y.begin(), f);
  return y;
}
template <class F>
values mapped(const values& x, const values& z, F f) {
  values y(x.size());
  thrust::transform(thrust::seq, x.begin(), x.end(), z.begin(), y.begin(), f);
  return y;
}

void check_close(const values& found, const values& expected) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    CHECK(static_cast<double>(found[i]) ==
          doctest::Approx(static_cast<double>(expected[i])).epsilon(1e-5).scale(0.1));
  }
}

template <pf::activation_kind Kind, kernels::activation Same>
void check_activation() {
  const values x = random_values(1), dy = random_values(2);
  values y(x.size()), dx(x.size());
  pf::ops::reference::activation_forward<float>(Kind, x, y);
  check_close(mapped(x, kernels::activation_of<Same>()), y);
  const values& kept = pf::keeps_output(Kind) ? y : x;
  pf::ops::reference::activation_backward<float>(Kind, kept, dy, dx);
  check_close(mapped(kept, dy, kernels::activation_gradient_of<Same>()), dx);
}

}  // namespace

TEST_CASE("kernels' functors: relu, sums, activations") {
  const values x = random_values(3), dy = random_values(4);
  values y(x.size()), dx(x.size());
  pf::ops::reference::relu_forward<float>(x, y);
  CHECK(mapped(x, kernels::relu_of()) == y);
  pf::ops::reference::relu_backward<float>(y, dy, dx);
  CHECK(mapped(y, dy, kernels::relu_gradient_of()) == dx);
  CHECK(mapped(mapped(x, dy, kernels::sum_of()), kernels::relu_of()) ==
        mapped(x, dy, kernels::relu_of_sum()));
  check_activation<pf::activation_kind::gelu, kernels::activation::gelu>();
  check_activation<pf::activation_kind::gelu_tanh, kernels::activation::gelu_tanh>();
  check_activation<pf::activation_kind::tanh, kernels::activation::tanh>();
  check_activation<pf::activation_kind::sigmoid, kernels::activation::sigmoid>();
}

TEST_CASE("kernels' functors: steps of SGD and Adam") {
  for (const bool decays : {false, true}) {
    const pf::sgd_options sgd{0.9, 0.1, false, 0.01};
    const pf::adam_options adam{0.9, 0.99, 1e-8, 0.01};
    values x = random_values(5), velocity = random_values(6), first = random_values(7),
           second = random_values(8, 0.1);
    const values gradient = random_values(9);
    values expected = x, expected_velocity = velocity, by_adam = x, expected_by_adam = x, m = first,
           v = second;
    for (std::size_t i = 0; i < x.size(); ++i) {
      pf::ops::reference::sgd_element(expected[i], gradient[i], expected_velocity[i], 0.1, sgd,
                                      decays ? 0.01 : 0.0, false);
      pf::ops::reference::adam_element(expected_by_adam[i], gradient[i], m[i], v[i], 0.1, adam,
                                       decays ? 0.01 : 0.0, 5);
    }
    const kernels::sgd_element sgd_step{kernels::sgd_numbers_of({0.9, 0.1, 0.01, false}, 5, 0.1), true};
    const kernels::adam_element adam_step{kernels::adam_numbers_of({0.9, 0.99, 1e-8, 0.01, true}, 5, 0.1)};
    const auto all = thrust::make_zip_iterator(x.begin(), velocity.begin(), by_adam.begin(), first.begin(),
                                               second.begin(), gradient.begin());
    thrust::for_each(thrust::seq, all, all + static_cast<std::ptrdiff_t>(x.size()), [&](auto&& element) {
      const float g = thrust::get<5>(element);
      sgd_step(thrust::get<0>(element), thrust::get<1>(element), g, decays);
      adam_step(thrust::get<2>(element), thrust::get<3>(element), thrust::get<4>(element), g, decays);
    });
    check_close(x, expected);
    check_close(velocity, expected_velocity);
    check_close(by_adam, expected_by_adam);
    check_close(first, m);
    check_close(second, v);
  }
}

TEST_CASE("kernels' functors: random numbers are the library's") {
  const pf::random_stream random(0x123456789abcdefU, 0xfedcba987654321U);
  const kernels::random_key key{random.seed(), random.stream()};
  for (const std::uint64_t base : {std::uint64_t{0}, std::uint64_t{1} << 35}) {
    for (std::uint64_t i = base; i < base + 200; ++i) {
      CHECK(kernels::random_word(key, i) == random.word(i));
      CHECK(kernels::random_below(key, i, 9) == random.below(i, 9));
    }
  }
  CHECK(kernels::substream_of(17, 4) == pf::substream(17, 4));
  for (const std::uint64_t position : {std::uint64_t{0}, std::uint64_t{12}, (std::uint64_t{1} << 34) + 24}) {
    const kernels::random_run<4> run = kernels::random_words<4>(key, position);
    for (int i = 0; i < 4; ++i) CHECK(run[i] == random.word(position + static_cast<std::uint64_t>(i)));
    CHECK(kernels::random_words<1>(key, position + 3)[0] == random.word(position + 3));
  }
}

TEST_CASE("kernels' functors: an LSTM's time step") {
  constexpr pf::index_t hidden = 250;
  values gates = random_values(11), before = random_values(12), dy = random_values(13),
         dc = random_values(14);
  const values z = gates;
  for (values* row : {&before, &dy, &dc}) row->resize(hidden);
  const auto row = [](values& numbers) {
    return pf::tensor_view<float, 2>(numbers.data(), {1, static_cast<pf::index_t>(numbers.size())});
  };
  values cell(hidden), output(hidden), dbefore = dc;
  pf::ops::reference::lstm_forward<float>(row(gates), row(before), row(cell), row(output));
  values differentiated = gates;
  pf::ops::reference::lstm_backward<float>(row(differentiated), row(before), row(cell), row(dy), {}, row(dc),
                                           row(dbefore));
  values activations(4 * hidden), gradients(4 * hidden), cells(hidden), outputs(hidden), dc_before(hidden);
  const auto at = [](const values& all, std::size_t j) {
    return kernels::lstm_gates_of<float>{all[j], all[hidden + j], all[2 * hidden + j], all[3 * hidden + j]};
  };
  const auto put = [](const kernels::lstm_gates_of<float>& one, std::size_t j, values& all) {
    all[j] = one.i;
    all[hidden + j] = one.f;
    all[2 * hidden + j] = one.g;
    all[3 * hidden + j] = one.o;
  };
  const auto all = thrust::make_counting_iterator(std::size_t{0});
  thrust::for_each(thrust::seq, all, all + hidden, [&](std::size_t j) {
    const auto step = kernels::lstm_step_forward(at(z, j), before[j]);
    put(step.gates, j, activations);
    cells[j] = step.cell;
    outputs[j] = step.output;
    const auto back = kernels::lstm_step_backward(step.gates, before[j], step.cell, dy[j], dc[j]);
    put(back.gates, j, gradients);
    dc_before[j] = back.before;
  });
  check_close(activations, gates);
  check_close(cells, cell);
  check_close(outputs, output);
  check_close(gradients, differentiated);
  check_close(dc_before, dbefore);
}
