// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support.hpp"

#include <limits>

#include <pufferfish/gpu/kernels/elementwise/relu_mask.hpp>
#include <pufferfish/gpu/ops/copy.hpp>
#include <pufferfish/gpu/ops/elementwise.hpp>

using namespace gpu_test;

namespace {

constexpr index_t sizes[] = {0, 1, 3, 4, 5, 31, 1000, 5003};
constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();

// Some elements of a twin from `offset` on: 16-byte aligned or not.
struct part {
  twin<float>& of;
  index_t offset, size;
  std::span<const float> host() const { return of.host_span().subspan(start(), count()); }
  std::span<float> host_out() const { return of.host_span().subspan(start(), count()); }
  std::span<const float> device() const { return of.device_span().subspan(start(), count()); }
  std::span<float> device_out() const { return of.device_span().subspan(start(), count()); }
  std::size_t start() const { return static_cast<std::size_t>(offset); }
  std::size_t count() const { return static_cast<std::size_t>(size); }
};

// Calls test(x, y, z) with random parts of all sizes, aligned and not.
template <class F>
void for_all_parts(F&& test) {
  std::uint64_t stream = 0;
  for (const index_t size : sizes) {
    for (const index_t offset : {0, 1}) {
      CAPTURE(size);
      CAPTURE(offset);
      auto x = random_twin<float>(size + 1, ++stream), y = random_twin<float>(size + 1, ++stream),
           z = random_twin<float>(size + 1, ++stream);
      test(part{x, offset, size}, part{y, offset, size}, part{z, 0, size});
    }
  }
}

template <pf::activation_kind Kind>
void check_activation() {
  for_all_parts([](const part& x, const part& y, const part& z) {
    // From far below to far above zero.
    std::vector<float> values(x.of.host());
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= i % 7 == 0 ? 30.0F : 4.0F;
    twin<float> wide(values);
    const part from{wide, x.offset, x.size};
    pf::ops::reference::activation_forward<float>(Kind, from.host(), y.host_out());
    pf::ops::activation_forward<Kind, float>(gpu_context(), from.device(), y.device_out());
    CHECK(difference(y.of) < 1e-6);
    const part& kept = pf::keeps_output(Kind) ? y : from;
    std::vector<float> same(pf::keeps_output(Kind) ? y.of.fetched() : wide.host());
    twin<float> both(same);
    const part kept_both{both, kept.offset, kept.size};
    pf::ops::reference::activation_backward<float>(Kind, kept_both.host(), z.host(), z.host_out());
    pf::ops::activation_backward<Kind, float>(gpu_context(), kept_both.device(), z.device(), z.device_out());
    CHECK(difference(z.of) < 3e-6);
  });
}

}  // namespace

TEST_CASE("gpu elementwise: relu and its gradient, to the bit; a NaN stays") {
  for_all_parts([](const part& x, const part& y, const part& z) {
    pf::ops::reference::relu_forward<float>(x.host(), y.host_out());
    pf::ops::relu_forward<float>(gpu_context(), x.device(), y.device_out());
    CHECK(y.of.fetched() == y.of.host());
    pf::ops::reference::relu_backward<float>(y.host(), z.host(), z.host_out());
    pf::ops::relu_backward<float>(gpu_context(), y.device(), z.device(), z.device_out());
    CHECK(z.of.fetched() == z.of.host());
  });
  twin<float> x(std::vector<float>{quiet_nan, -1.0F, -0.0F, 2.0F, quiet_nan});
  pf::ops::relu_forward<float>(gpu_context(), x.device_span(), x.device_span());
  CHECK(difference(x.fetched(), {quiet_nan, 0.0F, 0.0F, 2.0F, quiet_nan}) == 0.0);
}

TEST_CASE("gpu elementwise: activations and their slopes") {
  check_activation<pf::activation_kind::gelu>();
  check_activation<pf::activation_kind::gelu_tanh>();
  check_activation<pf::activation_kind::tanh>();
  check_activation<pf::activation_kind::sigmoid>();
}

TEST_CASE("gpu elementwise: activations of what is not finite") {
  const float infinity = std::numeric_limits<float>::infinity();
  twin<float> x(std::vector<float>{quiet_nan, infinity, 1e30F, -1e30F}), y(4);
  pf::ops::activation_forward<pf::activation_kind::gelu, float>(gpu_context(), x.device_span(),
                                                                y.device_span());
  CHECK(difference(y.fetched(), {quiet_nan, infinity, 1e30F, 0.0F}) == 0.0);
  twin<float> dy(4, 1.0F);
  pf::ops::activation_backward<pf::activation_kind::gelu, float>(gpu_context(), x.device_span(),
                                                                 dy.device_span(), y.device_span());
  CHECK(difference(y.fetched(), {quiet_nan, 1.0F, 1.0F, 0.0F}) == 0.0);
  pf::ops::activation_backward<pf::activation_kind::gelu_tanh, float>(gpu_context(), x.device_span(),
                                                                      dy.device_span(), y.device_span());
  CHECK(difference(y.fetched(), {quiet_nan, 1.0F, 1.0F, 0.0F}) == 0.0);
}

TEST_CASE("gpu elementwise: sums, with and without relu") {
  for_all_parts([](const part& x, const part& y, const part& z) {
    pf::ops::reference::add<float>(x.host(), y.host_out(), false);
    pf::ops::add<float>(gpu_context(), x.device(), y.device_out());
    CHECK(y.of.fetched() == y.of.host());
    pf::ops::reference::add<float>(x.host(), z.host_out(), true);
    pf::ops::add_relu<float>(gpu_context(), x.device(), z.device_out());
    CHECK(z.of.fetched() == z.of.host());
  });
}

TEST_CASE("gpu elementwise: fill, scale, copies") {
  for_all_parts([](const part& x, const part& y, const part& z) {
    pf::cpu_context host;
    pf::ops::fill<float>(host, y.host_out(), 2.5F);
    pf::ops::fill<float>(gpu_context(), y.device_out(), 2.5F);
    CHECK(y.of.fetched() == y.of.host());
    for (std::size_t i = 0; i < z.count(); ++i) z.host_out()[i] = 1.7F * x.host()[i];
    pf::ops::scale<float>(gpu_context(), 1.7F, x.device(), z.device_out());
    CHECK(z.of.fetched() == z.of.host());
    pf::ops::copy_elements<float>(host, x.host().data(), y.host_out().data(), x.size);
    pf::ops::copy_elements<float>(gpu_context(), x.device().data(), y.device_out().data(), x.size);
    CHECK(y.of.fetched() == y.of.host());
  });
}

TEST_CASE("gpu elementwise: masked copies and sums") {
  for_all_parts([](const part& x, const part& y, const part& z) {
    const pf::extents<2> shape{1, x.size};
    std::vector<std::int32_t> words(static_cast<std::size_t>(pf::ops::relu_mask<float>::size(shape)), -1);
    for (index_t i = 0; i < x.size; ++i) {
      if (x.host()[static_cast<std::size_t>(i)] > 0.2F) continue;
      words[static_cast<std::size_t>(i / 32)] &= static_cast<std::int32_t>(~(1U << (i % 32)));
    }
    twin<std::int32_t> mask(words);
    const pf::ops::relu_mask<float> device_mask{mask.device_data()};
    const auto bits = reinterpret_cast<const std::uint32_t*>(words.data());
    for (index_t i = 0; i < x.size; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const float value = pf::gpu::kernels::mask_passes(bits, i) ? x.host()[at] : 0.0F;
      CHECK((value == 0.0F) == (x.host()[at] <= 0.2F));
      y.host_out()[at] += value;
      z.host_out()[at] = value;
    }
    const pf::tensor_view<const float, 2> from(x.device().data(), shape);
    pf::ops::masked_add<float>(gpu_context(), from, device_mask, {y.device_out().data(), shape});
    CHECK(y.of.fetched() == y.of.host());
    pf::ops::masked_copy<float>(gpu_context(), from, device_mask, {z.device_out().data(), shape});
    CHECK(z.of.fetched() == z.of.host());
  });
}

TEST_CASE("gpu elementwise: dropout drops what the CPU's does, in every step and layer") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t step = 3;
  for_all_parts([&](const part& x, const part& y, const part& z) {
    ctx.begin_step(step);
    host.begin_step(step++);
    for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{7}, (std::uint64_t{1} << 40) + 18}) {
      const part& to = first == 7 ? z : y;
      pf::ops::dropout<float>(host, x.host(), to.host_out(), 0.3, host.next_random_stream(), first);
      pf::ops::dropout<float>(ctx, x.device(), to.device_out(), 0.3, ctx.next_random_stream(), first);
      CHECK(to.of.fetched() == to.of.host());
    }
    pf::ops::dropout<float>(host, x.host(), x.host_out(), 0.0, host.next_random_stream(), 1);
    pf::ops::dropout<float>(ctx, x.device(), x.device_out(), 0.0, ctx.next_random_stream(), 1);
    CHECK(x.of.fetched() == x.of.host());
  });
}

TEST_CASE("gpu elementwise: dropout of sequences, whatever part of the batch is here") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  ctx.begin_step(11);
  host.begin_step(11);
  struct shape {
    index_t steps, batch, width;
  };
  std::uint64_t stream = 500;
  for (const auto& [steps, batch, width] : {shape{0, 3, 8}, shape{1, 1, 1}, shape{3, 2, 5}, shape{4, 3, 33},
                                            shape{2, 70, 64}, shape{5, 2, 1500}}) {
    CAPTURE(width);
    auto x = random_twin<float>(steps * batch * width, ++stream);
    twin<float> y(x.size());
    const pf::extents<2> rows{steps * batch, width};
    const pf::ops::sequence_mask on_host{host.next_random_stream(), 0.4, steps, batch, 6};
    const pf::ops::sequence_mask on_device{ctx.next_random_stream(), 0.4, steps, batch, 6};
    pf::ops::sequence_dropout<float>(host, x.host_view(rows), on_host, y.host_view(rows));
    pf::ops::sequence_dropout<float>(ctx, x.device_view(rows), on_device, y.device_view(rows));
    CHECK(y.fetched() == y.host());
  }
}

TEST_CASE("gpu elementwise: 16-bit formats, rounded as on the host") {
  std::vector<float> values{
      0.0F,     -0.0F,    1.0F,          1.00390625F, 1.01171875F,   65504.0F,
      65519.0F, 65520.0F, 1e-8F,         6e-8F,       3.0517578e-5F, -6.1e-5F,
      3.4e38F,  1e-40F,   1.0009765625F, 2049.0F,     2051.0F,       std::numeric_limits<float>::infinity()};
  for (std::uint64_t i = 0; i < 3000; ++i) {
    values.push_back(static_cast<float>(
        std::ldexp(pf::random_stream(1, 2).uniform(i) - 0.5, static_cast<int>(i % 40) - 20)));
  }
  for (const index_t size : {index_t{0}, index_t{3}, static_cast<index_t>(values.size())}) {
    const auto count = static_cast<std::size_t>(size);
    twin<float> x(std::vector<float>(values.begin(), values.begin() + size)), back(size);
    twin<pf::bfloat16> brain(size);
    twin<pf::float16> ieee(size);
    const std::span<const float> from = x.device_span();
    pf::gpu::convert(gpu_context(), from, brain.device_span());
    pf::gpu::convert(gpu_context(), from, ieee.device_span());
    const auto brains = brain.fetched();
    const auto halves = ieee.fetched();
    bool same = true;
    for (std::size_t i = 0; i < count; ++i) {
      same = same && brains[i].bits() == pf::bfloat16(values[i]).bits() &&
             halves[i].bits() == pf::float16(values[i]).bits();
    }
    CHECK(same);
    pf::gpu::convert(gpu_context(), std::span<const pf::bfloat16>(brain.device_span()), back.device_span());
    for (std::size_t i = 0; i < count; ++i) back.host()[i] = brains[i];
    CHECK(difference(back) == 0.0);
    pf::gpu::convert(gpu_context(), std::span<const pf::float16>(ieee.device_span()), back.device_span());
    for (std::size_t i = 0; i < count; ++i) back.host()[i] = halves[i];
    CHECK(difference(back) == 0.0);
  }
  twin<float> x(std::vector<float>{quiet_nan});
  twin<pf::float16> ieee(1);
  pf::gpu::convert(gpu_context(), std::span<const float>(x.device_span()), ieee.device_span());
  CHECK(std::isnan(static_cast<float>(ieee.fetched()[0])));
}
