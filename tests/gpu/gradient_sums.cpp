// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Sums for the backward pass of a batch norm, which the kernel of the convolution after it collects while it
// computes the gradient of the convolution's input.
#include "conv_cases.hpp"

#include <cstring>
#include <deque>

#include <pufferfish/gpu.hpp>
#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>
#include <pufferfish/gpu/kernels/elementwise/relu_mask.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

using kernels::conv_tile;

/// The batch norm before a convolution, whose output is the convolution's input, and memory for its sums.
template <class T>
struct norm_case {
  index_t rows, channels;
  stored<T> x;
  twin<float> mean;
  twin<std::uint32_t> mask;
  twin<double> result;
  twin<float> parts;
  bool masks;

  norm_case(index_t r, index_t c, bool with_mask)
      : rows(r),
        channels(c),
        x(r * c, 11),
        mean(random_twin<float>(c, 12)),
        mask(words(r * c)),
        result(2 * c, -7.0),
        parts(kernels::moment_scratch(r, c)),
        masks(with_mask) {
    REQUIRE(kernels::moments_fit(r, c));
  }
  static std::vector<std::uint32_t> words(index_t bits) {
    std::vector<std::uint32_t> all;
    std::uint32_t word = 12345;
    for (index_t i = 0; i < bits; i += kernels::mask_word_bits) {
      all.push_back(word = word * 1664525U + 1013904223U);
    }
    return all;
  }
  kernels::gradient_sum_input<T> input() {
    return {x.narrow.device_data(), mean.device_data(), masks ? mask.device_data() : nullptr};
  }
  kernels::moment_workspace workspace() {
    return {result.device_data(), parts.device_data(), gpu_context().counters()};
  }

  /// Compares with sums in double over the gradient as it is stored.
  void check(const std::vector<T>& gradient) {
    const std::vector<double> found = result.fetched();
    for (index_t c = 0; c < channels; ++c) {
      double sum = 0.0, weighted = 0.0, size = 0.0, weighted_size = 0.0;
      for (index_t row = 0; row < rows; ++row) {
        const auto at = static_cast<std::size_t>(row * channels + c);
        if (masks && !kernels::mask_passes(mask.host().data(), row * channels + c)) continue;
        const auto g = static_cast<double>(static_cast<float>(gradient[at]));
        const double distance =
            static_cast<double>(x.wide.host()[at] - mean.host()[static_cast<std::size_t>(c)]);
        sum += g;
        size += std::abs(g);
        weighted += g * distance;
        weighted_size += std::abs(g * distance);
      }
      CAPTURE(c);
      REQUIRE(std::abs(found[static_cast<std::size_t>(c)] - sum) <= 2e-6 * size);
      REQUIRE(std::abs(found[static_cast<std::size_t>(channels + c)] - weighted) <= 2e-6 * weighted_size);
    }
  }
};

/// Calls compute(dx, workspace, norm), which computes the gradient dx of the input of `c`: without a
/// workspace, then twice with one. All must have the same bits, and the sums must be those over dx.
template <class T, class Compute>
void check_sums(const conv_case& c, bool add, bool masks, Compute compute) {
  CAPTURE(c.shape.describe());
  CAPTURE(c.images);
  CAPTURE(c.height);
  CAPTURE(c.width);
  CAPTURE(add);
  CAPTURE(masks);
  const index_t channels = c.shape.in_channels;
  norm_case<T> norm(c.x_size() / channels, channels, masks);
  const std::vector<T> start = stored<T>(c.x_size(), 5).narrow.host();
  twin<T> plain(start);
  compute(plain, kernels::moment_workspace(), kernels::gradient_sum_input<T>());
  const std::vector<T> expected = plain.fetched();
  std::vector<double> first;
  for (int round = 0; round < 2; ++round) {
    twin<T> dx(start);
    compute(dx, norm.workspace(), norm.input());
    REQUIRE(std::memcmp(dx.fetched().data(), expected.data(), expected.size() * sizeof(T)) == 0);
    norm.check(expected);
    if (round == 0) first = norm.result.fetched();
  }
  CHECK(std::memcmp(first.data(), norm.result.fetched().data(), first.size() * sizeof(double)) == 0);
}

template <class T>
void check_conv(const conv_case& c, const kernels::conv_plan& plan, bool add, bool masks) {
  CAPTURE(static_cast<int>(plan.tile));
  REQUIRE(kernels::gradient_sums_fit<T>(c.geometry(), plan));
  stored<T> dy(c.y_size(), 1), w(c.w_size(), 2);
  check_sums<T>(c, add, masks, [&](twin<T>& dx, const auto& to, const auto& norm) {
    kernels::conv_backward_input<T>(gpu_context().stream(), c.geometry(), plan, dy.narrow.device_data(),
                                    w.narrow.device_data(), dx.device_data(), add, nullptr, to, norm);
  });
}

template <class T>
void check_halo(index_t in, index_t out, const pf::extents<3>& images, index_t padding = 1) {
  const conv_case c = conv_case::of(pf::conv_shape::square(in, out, 3, 1, padding), images);
  const kernels::halo_plan plan = kernels::plan_halo_backward_input(c.geometry());
  REQUIRE(plan.fits);
  REQUIRE(kernels::halo_gradient_sums_fit(plan));
  stored<T> dy(c.y_size(), 1), w(c.w_size(), 2);
  for (const bool add : {false, true}) {
    check_sums<T>(c, add, in != 48, [&](twin<T>& dx, const auto& to, const auto& norm) {
      kernels::halo_backward_input<T>(gpu_context().stream(), c.geometry(), plan, dy.narrow.device_data(),
                                      w.narrow.device_data(), dx.device_data(), add, to, norm);
    });
  }
}

}  // namespace

TEST_CASE_TEMPLATE("gpu gradient sums: every block", T, pf::gpu::bf16, pf::gpu::fp16) {
  for (const conv_tile tile :
       {conv_tile::t128x128, conv_tile::t128x64, conv_tile::t64x64, conv_tile::t128x32, conv_tile::t256x16}) {
    const kernels::conv_plan plan{tile, true, 1, 0};
    check_conv<T>(conv_case::of(pf::conv_shape::square(72, 8, 1, 1, 0), {2, 17, 9}), plan, true, true);
    check_conv<T>(conv_case::of(pf::conv_shape::square(65, 3, 3, 1, 1), {1, 9, 10}), plan, false, true);
    check_conv<T>(conv_case::of(pf::conv_shape::square(1, 2, 2, 1, 0), {1, 2, 3}), plan, false, false);
    // More than one group of parts, the last one with one part of a few rows.
    check_conv<T>(conv_case::of(pf::conv_shape::square(8, 8, 1, 1, 0), {17, 11, 23}), plan, true, false);
  }
}

TEST_CASE("gpu gradient sums: random shapes, as plans have them") {
  picker pick(9);
  constexpr index_t channels[] = {1, 3, 8, 16, 33, 64};
  int done = 0;
  for (int round = 0; round < 20; ++round) {
    const pf::conv_shape shape{pick(1, 64), channels[pick(0, 5)],     {pick(1, 3), pick(1, 3)},
                               {1, 1},      {pick(0, 2), pick(0, 2)}, {pick(1, 2), pick(1, 2)}};
    const std::optional<conv_case> made = conv_case::find(shape, {pick(1, 9), pick(1, 15), pick(1, 15)});
    if (!made) continue;
    ++done;
    kernels::conv_plan plan = kernels::plan_conv_backward_input(made->geometry(), true, 8);
    plan.slices = 1;
    check_conv<pf::gpu::bf16>(*made, plan, round % 2 == 0, round % 4 < 2);
  }
  CHECK(done > 10);
}

TEST_CASE_TEMPLATE("gpu gradient sums: by warp groups", T, pf::gpu::bf16, pf::gpu::fp16) {
  if (!kernels::halo_available()) {
    MESSAGE("skipped: the device or the compiled kernels have no warp groups (-Dgpu_arch=sm_90a)");
    return;
  }
  for (const index_t columns : {16, 32, 64, 48, 128}) check_halo<T>(columns, 16, {2, 8, 16});
  check_halo<T>(32, 32, {3, 7, 7});  // a line and a column of each block do not exist
  check_halo<T>(64, 16, {1, 15, 16});
  check_halo<T>(16, 64, {1, 7, 8});
  check_halo<T>(64, 32, {1, 8, 8}, 2);
  check_halo<T>(32, 32, {1, 8, 8}, 0);
  // Blocks of four images, of which one or three exist.
  check_halo<T>(64, 16, {5, 4, 4});
  check_halo<T>(32, 16, {7, 4, 3});
  if (std::is_same_v<T, pf::gpu::fp16>) return;
  // More blocks of pixels than groups of warps on the device, and more than one group of parts.
  check_halo<T>(16, 16, {150, 16, 16});
}

TEST_CASE("gpu gradient sums: which kernels collect them") {
  const auto geometry = [](index_t kernel, index_t stride) {
    return conv_case::of(pf::conv_shape::square(64, 64, kernel, stride, kernel / 2), {2, 16, 16}).geometry();
  };
  CHECK(kernels::halo_gradient_sums_fit(kernels::plan_halo_backward_input(geometry(3, 1))));
  CHECK_FALSE(kernels::halo_gradient_sums_fit(kernels::plan_halo_backward_input(geometry(3, 2))));
  CHECK_FALSE(kernels::halo_gradient_sums_fit(kernels::plan_halo_backward_input(geometry(1, 2))));
  CHECK(kernels::gradient_sums_fit<pf::gpu::bf16>(geometry(3, 1), {conv_tile::t64x64, true, 1, 0}));
  CHECK_FALSE(kernels::gradient_sums_fit<pf::gpu::bf16>(geometry(3, 2), {conv_tile::t64x64, true, 1, 0}));
  CHECK_FALSE(kernels::gradient_sums_fit<pf::gpu::bf16>(geometry(3, 1), {conv_tile::t64x64, true, 2, 0}));
  CHECK_FALSE(kernels::gradient_sums_fit<float>(geometry(3, 1), {conv_tile::t64x64, true, 1, 0}));
}

namespace {

template <class T>
using layers = pf::Sequential<T, pf::device::gpu>;
template <class T>
using layer = pf::any_layer<T, pf::device::gpu>;

template <class T>
void append(std::vector<float>& to, const std::vector<T>& values) {
  for (const T value : values) to.push_back(static_cast<float>(value));
}

/// Networks one after another, each of which reads the output of the one before, and results of a step.
template <class T>
struct chain {
  std::vector<pf::network<T, pf::device::gpu>> networks;
  std::vector<float> input_gradient, gradients;
  std::size_t operations = 0;

  /// Makes a step, and captures another one.
  void run(const pf::extents<4>& input) {
    pf::gpu_context& ctx = gpu_context();
    std::vector<pf::extents<4>> shapes;
    std::deque<twin<T>> values, dys;
    const auto push = [&](const pf::extents<4>& shape) {
      shapes.push_back(shape);
      values.emplace_back(stored<T>(pf::volume<4>(shape), shapes.size() == 1 ? 1 : 2).narrow.host());
      dys.emplace_back(values.back().host());
    };
    push(input);
    for (const auto& net : networks) push(net.output_shape(shapes.back()));
    const auto step = [&] {
      for (std::size_t i = 0; i < networks.size(); ++i) {
        networks[i].forward(ctx, values[i].device_view(shapes[i]), values[i + 1].device_view(shapes[i + 1]));
      }
      for (std::size_t i = networks.size(); i-- > 0;) {
        networks[i].backward(ctx, dys[i + 1].device_view(shapes[i + 1]), dys[i].device_view(shapes[i]));
      }
    };
    ctx.begin_step(1);
    step();
    append(input_gradient, dys[0].fetched());
    // In the order of one arena: parameters of the last layers first.
    for (std::size_t i = networks.size(); i-- > 0;) {
      const std::span<const float> all = networks[i].store().gradients();
      std::vector<float> here(all.size());
      pf::gpu::device_memory().to_host(here.data(), all.data(), all.size_bytes());
      append(gradients, here);
    }
    ctx.begin_step(2);
    pf::gpu::detail::stream_capture capture(ctx.stream());
    step();
    operations = capture.finish().operations();
  }
};

/// The layers of both parts must compute the same in one Sequential as in two networks, with `saved` launches
/// fewer.
template <class T>
void check_chain(layers<T> first, layers<T> second, const pf::extents<4>& input, std::size_t saved) {
  CAPTURE(input[0]);
  CAPTURE(second[0].describe());
  if (sizeof(T) == 4) saved = 0;  // kernels for float collect no sums
  const pf::mode_scope<pf::device::gpu> training(gpu_context(), pf::run_mode::training);
  first.initialize({3, 1});
  second.initialize({3, 2});
  layers<T> all;
  for (const layers<T>* part : {&first, &second}) {
    for (std::size_t i = 0; i < part->size(); ++i) all.add((*part)[i]);
  }
  chain<T> apart, together;
  apart.networks.emplace_back(layer<T>(first));
  apart.networks.emplace_back(layer<T>(second));
  together.networks.emplace_back(layer<T>(all));
  apart.run(input);
  together.run(input);
  CHECK(difference(together.input_gradient, apart.input_gradient) < (sizeof(T) == 2 ? 2 * unit<T> : 1e-5));
  REQUIRE(together.gradients.size() == apart.gradients.size());
  CHECK(difference(together.gradients, apart.gradients) < (sizeof(T) == 2 ? 2 * unit<T> : 1e-5));
  CHECK(apart.operations - together.operations == saved);
}

pf::conv_shape square(index_t in, index_t out, index_t kernel = 3, index_t stride = 1) {
  return pf::conv_shape::square(in, out, kernel, stride, kernel / 2);
}

/// A residual block with two convolutions. `between`: channels after the first one.
template <class T>
layer<T> block(const pf::any_layer<T, pf::device::gpu>& first_conv, index_t channels, index_t between,
               bool relu = true) {
  layers<T> branch;
  branch.add("conv1", first_conv)
      .add("bn1", layer<T>(pf::BatchNorm<T>(between)))
      .add("relu", layer<T>(pf::ReLU<T>()))
      .add("conv2", layer<T>(pf::Conv<T>(square(between, channels))))
      .add("bn2", layer<T>(pf::BatchNorm<T>(channels)));
  return layer<T>(pf::Residual<T, pf::device::gpu>(std::move(branch), {}, relu));
}

}  // namespace

TEST_CASE_TEMPLATE("gpu gradient sums: a sequential saves the pass of a batch norm", T, float,
                   pf::gpu::bf16) {
  const auto pass = [](const auto& conv, const pf::extents<4>& input, bool relu, std::size_t saved) {
    layers<T> norm, second;
    norm.add("bn", layer<T>(pf::BatchNorm<T>(input[3])));
    if (relu) norm.add("relu", layer<T>(pf::ReLU<T>()));
    second.add("conv", layer<T>(conv));
    check_chain<T>(norm, second, input, saved);
  };
  // Float: more than 4,096 rows; 16 bits: more than 8,192.
  const index_t images = sizeof(T) == 2 ? 9 : 5;
  for (const bool relu : {true, false}) {
    // The first one also computes the norm (pending_norm.cpp).
    pass(pf::Conv<T>(square(32, 16)), {images, 32, 32, 32}, relu, 2);
    pass(pf::Conv<T>(square(7, 3), true), {images, 32, 32, 7}, relu, 1);
    pass(pf::LowRankConv<T>(square(64, 16), 16), {images, 32, 32, 64}, relu, 1);
    pass(pf::LowRankConv<T>(square(24, 8), 5), {images, 32, 32, 24}, relu, 1);
  }
  // By cuBLAS, by groups, with phases, and with few rows.
  pass(pf::Conv<T>(square(32, 16, 1)), {images, 32, 32, 32}, true, 0);
  pf::conv_shape grouped = square(32, 16);
  grouped.groups = 2;
  pass(pf::Conv<T>(grouped), {images, 32, 32, 32}, true, 0);
  pass(pf::Conv<T>(square(32, 16, 3, 2)), {images, 32, 32, 32}, true, 0);
  pass(pf::Conv<T>(square(32, 16)), {images - 1, 32, 32, 32}, true, 0);
}

TEST_CASE_TEMPLATE("gpu gradient sums: from one residual block to the one before", T, float, pf::gpu::bf16) {
  const index_t images = sizeof(T) == 2 ? 9 : 5;
  const pf::extents<4> input{images, 32, 32, 16};
  const layer<T> dense(pf::Conv<T>(square(16, 32))), low_rank(pf::LowRankConv<T>(square(16, 32), 16));
  for (const bool relu : {true, false}) {
    layers<T> first, second;
    first.add("block", block<T>(dense, 16, 32, relu));
    second.add("block", block<T>(low_rank, 16, 32, relu));
    check_chain<T>(first, second, input, 1);
  }
  // A block with a shortcut of its own reads the sums of its branch, but collects none.
  const auto projected = [&] {
    layers<T> branch, shortcut;
    branch.add("conv", dense).add("bn", layer<T>(pf::BatchNorm<T>(32)));
    shortcut.add("conv", layer<T>(pf::Conv<T>(square(16, 32, 1)))).add("bn", layer<T>(pf::BatchNorm<T>(32)));
    return layer<T>(pf::Residual<T, pf::device::gpu>(std::move(branch), std::move(shortcut)));
  }();
  layers<T> first, second;
  first.add("block", projected);
  second.add("block", block<T>(layer<T>(pf::Conv<T>(square(32, 16))), 32, 16));
  check_chain<T>(first, second, input, 1);
  layers<T> before, after;
  before.add("block", block<T>(dense, 16, 32));
  after.add("block", projected);
  check_chain<T>(before, after, input, 0);
}
