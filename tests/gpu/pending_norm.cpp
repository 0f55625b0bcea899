// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Batch norms that the convolution after them computes in shared memory: all bits must be those of two
// launches.
#include "conv_cases.hpp"

#include <cstring>
#include <deque>

#include <pufferfish/gpu.hpp>
#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

using bytes = std::vector<unsigned char>;

template <class T>
void append(bytes& to, const std::vector<T>& values) {
  const auto* from = reinterpret_cast<const unsigned char*>(values.data());
  to.insert(to.end(), from, from + values.size() * sizeof(T));
}

/// A batch norm and what it computes.
template <class T>
struct norm_case {
  index_t rows, channels;
  bool sums, relu, known;
  stored<T> z, addend;
  twin<float> weight, bias, statistics, running_mean, running_var, batches;
  twin<double> moments;
  twin<std::uint32_t> mask;
  twin<T> y;

  /// with_statistics: mean and inverse deviation are known, in place of the moments.
  norm_case(index_t r, index_t c, bool with_sum, bool with_relu, bool with_statistics)
      : rows(r),
        channels(c),
        sums(with_sum),
        relu(with_relu),
        known(with_statistics),
        z(r * c, 11),
        addend(r * c, 12),
        weight(random_twin<float>(c, 13)),
        bias(random_twin<float>(c, 14)),
        statistics(random_twin<float>(2 * c, 15)),
        running_mean(random_twin<float>(c, 16)),
        running_var(random_twin<float>(c, 17)),
        batches(1, 5.0F),
        moments(random_twin<double>(2 * c, 18)),
        mask((r * c + 31) / 32),
        y(r * c, static_cast<T>(-9.0F)) {
    std::vector<double> both = moments.host();
    for (index_t i = c; i < 2 * c; ++i) {
      double& squares = both[static_cast<std::size_t>(i)];
      squares = (1.5 + squares) * static_cast<double>(rows);
    }
    moments = twin<double>(both);
  }

  kernels::norm_request<T> request() {
    kernels::norm_request<T> r;
    r.m = {z.narrow.device_data(),
           statistics.device_data(),
           statistics.device_data() + channels,
           weight.device_data(),
           rows,
           channels};
    r.bias = bias.device_data();
    r.tail = {sums ? addend.narrow.device_data() : nullptr, relu, relu ? mask.device_data() : nullptr};
    r.y = y.device_data();
    if (!known) {
      r.batch = {moments.device_data(),
                 {1e-5, 0.1, statistics.device_data(), running_mean.device_data(), running_var.device_data(),
                  batches.device_data()}};
    }
    return r;
  }
  bytes results() const {
    bytes all;
    append(all, y.fetched());
    append(all, mask.fetched());
    append(all, batches.fetched());
    for (const auto* one : {&statistics, &running_mean, &running_var}) append(all, one->fetched());
    return all;
  }
};

/// Results of the convolution.
template <class T>
struct outputs {
  twin<T> y, t;
  twin<double> moments;
  bytes all() const {
    bytes all;
    append(all, y.fetched());
    append(all, t.fetched());
    append(all, moments.fetched());
    return all;
  }
};

/// A convolution by warp groups after a batch norm. out 0: dense.
template <class T>
void check_halo(index_t in, index_t columns, index_t out, const pf::extents<3>& images, bool sums, bool relu,
                bool known = false) {
  const conv_case c = conv_case::of(pf::conv_shape::square(in, columns, 3, 1, 1), images);
  CAPTURE(c.shape.describe());
  CAPTURE(out);
  CAPTURE(images[0]);
  CAPTURE(images[1]);
  CAPTURE(images[2]);
  CAPTURE(sums);
  CAPTURE(relu);
  CAPTURE(known);
  const auto up_columns = static_cast<int>(out);
  const kernels::halo_plan plan = out == 0 ? kernels::plan_halo_forward(c.geometry())
                                           : kernels::plan_halo_low_rank(c.geometry(), up_columns);
  REQUIRE(plan.fits);
  REQUIRE(kernels::halo_norm_fits(c.geometry(), plan, out, sums));
  const index_t channels = out == 0 ? columns : out, pixels = c.y_size() / columns;
  const bool collects = kernels::halo_moments_fit(plan, out == 0 ? plan.columns : out);
  stored<T> w(c.w_size(), 2), up(columns * std::max<index_t>(out, 1), 3);
  twin<float> parts(kernels::moment_scratch(pixels, channels));
  const auto compute = [&](const T* x, const kernels::norm_request<T>& norm) {
    outputs<T> result{twin<T>(pixels * channels), twin<T>(c.y_size()), twin<double>(2 * channels)};
    kernels::moment_workspace to;
    if (collects) to = {result.moments.device_data(), parts.device_data(), gpu_context().counters()};
    cudaStream_t stream = gpu_context().stream();
    if (out == 0) {
      kernels::halo_forward<T>(stream, c.geometry(), plan, x, w.narrow.device_data(), nullptr,
                               result.y.device_data(), to, norm);
    } else {
      kernels::halo_low_rank_forward<T>(stream, c.geometry(), plan, x, w.narrow.device_data(),
                                        up.narrow.device_data(), up_columns, nullptr, result.t.device_data(),
                                        result.y.device_data(), to, norm);
    }
    return result.all();
  };
  norm_case<T> apart(c.x_size() / in, in, sums, relu, known),
      together(c.x_size() / in, in, sums, relu, known);
  const kernels::norm_request<T> first = apart.request();
  kernels::norm_apply<T>(gpu_context().stream(), first.m, first.bias, first.tail, first.y, first.batch);
  const bytes expected = compute(apart.y.device_data(), {});
  const bytes found = compute(together.y.device_data(), together.request());
  CHECK(found == expected);
  CHECK(together.results() == apart.results());
}

bool has_groups() {
  if (kernels::halo_available()) return true;
  MESSAGE("skipped: the device or the compiled kernels have no warp groups (-Dgpu_arch=sm_90a)");
  return false;
}

}  // namespace

TEST_CASE_TEMPLATE("gpu pending norm: in a convolution by warp groups", T, pf::gpu::bf16, pf::gpu::fp16) {
  if (!has_groups()) return;
  check_halo<T>(64, 64, 0, {2, 16, 8}, true, true);
  check_halo<T>(32, 32, 0, {3, 7, 7}, true, true);  // a line and a column of each block do not exist
  check_halo<T>(64, 16, 64, {3, 8, 16}, true, true);
  check_halo<T>(48, 16, 128, {1, 15, 16}, false, true);  // three chunks of 16 channels
  if (std::is_same_v<T, pf::gpu::fp16>) return;
  check_halo<T>(128, 32, 128, {2, 8, 8}, true, true);
  check_halo<T>(16, 32, 64, {1, 8, 8}, true, false);
  // Two thread blocks compute the channels of a pixel.
  check_halo<T>(16, 128, 0, {2, 8, 7}, true, true);
  check_halo<T>(128, 128, 0, {1, 8, 8}, false, true);
  // Blocks of four images, of which one or three exist.
  check_halo<T>(64, 16, 0, {5, 4, 4}, true, true);
  check_halo<T>(32, 32, 0, {7, 4, 3}, false, true, true);
  check_halo<T>(16, 64, 0, {4, 4, 4}, true, false);
  // Known statistics, no ReLU.
  check_halo<T>(32, 16, 0, {1, 8, 8}, false, false, true);
  check_halo<T>(16, 32, 0, {1, 24, 8}, true, true, true);
  // More blocks of pixels than groups of warps on the device.
  check_halo<T>(16, 16, 0, {267, 8, 16}, true, true);
}

TEST_CASE("gpu pending norm: random shapes") {
  if (!has_groups()) return;
  picker pick(23);
  int done = 0;
  for (int round = 0; round < 16; ++round) {
    const index_t in = 16 * pick(1, 8), rank = index_t{16} << pick(0, 1),
                  out = pick(0, 1) == 0 ? 0 : 64 * pick(1, 2);
    const index_t columns = out == 0 ? index_t{16} << pick(0, 2) : rank;
    const bool sums = pick(0, 1) == 1, relu = pick(0, 3) > 0, known = pick(0, 3) == 0;
    const pf::extents<3> images{pick(1, 3), pick(6, 9), pick(6, 17)};
    const conv_case c = conv_case::of(pf::conv_shape::square(in, columns, 3, 1, 1), images);
    const kernels::halo_plan plan = out == 0
                                        ? kernels::plan_halo_forward(c.geometry())
                                        : kernels::plan_halo_low_rank(c.geometry(), static_cast<int>(out));
    if (!plan.fits || !kernels::halo_norm_fits(c.geometry(), plan, out, sums)) continue;
    ++done;
    check_halo<pf::gpu::bf16>(in, columns, out, images, sums, relu, known);
  }
  CHECK(done > 4);
}

TEST_CASE("gpu pending norm: which kernels compute it") {
  const auto geometry = [](index_t in, index_t out, index_t stride = 1, index_t padding = 1) {
    return conv_case::of(pf::conv_shape::square(in, out, 3, stride, padding), {2, 16, 16}).geometry();
  };
  const auto dense = [](const kernels::conv_geometry& g, bool sums) {
    return kernels::halo_norm_fits(g, kernels::plan_halo_forward(g), 0, sums);
  };
  CHECK(dense(geometry(64, 64), true));
  CHECK(dense(geometry(128, 128), false));
  CHECK_FALSE(dense(geometry(128, 128), true));  // no shared memory
  CHECK_FALSE(dense(geometry(64, 192), false));  // three thread blocks for each pixel
  CHECK_FALSE(dense(geometry(64, 64, 2), false));
  CHECK_FALSE(dense(geometry(64, 64, 1, 0), false));
  const auto pair = [](const kernels::conv_geometry& g, int out) {
    return kernels::halo_norm_fits(g, kernels::plan_halo_low_rank(g, out), out, true);
  };
  CHECK(pair(geometry(64, 16), 64));
  CHECK(pair(geometry(128, 32), 128));
  CHECK_FALSE(pair(geometry(64, 64), 64));  // no registers
}

namespace {

template <class T>
using layers = pf::Sequential<T, pf::device::gpu>;
template <class T>
using layer = pf::any_layer<T, pf::device::gpu>;

/// Networks one after another, each of which reads the output of the one before, and results of a step.
template <class T>
struct chain {
  std::vector<pf::network<T, pf::device::gpu>> networks;
  bytes forward, evaluated;
  std::vector<float> gradients;
  std::size_t operations = 0;

  /// `whole`: with an evaluation and a backward pass.
  void run(const pf::extents<4>& input, bool whole) {
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
    const auto pass = [&] {
      for (std::size_t i = 0; i < networks.size(); ++i) {
        networks[i].forward(ctx, values[i].device_view(shapes[i]), values[i + 1].device_view(shapes[i + 1]));
      }
    };
    if (whole) {
      const pf::mode_scope<pf::device::gpu> inference(ctx, pf::run_mode::inference);
      ctx.begin_step(0);
      pass();
      append(evaluated, values.back().fetched());
    }
    ctx.begin_step(1);
    pass();
    // Before the backward pass, whose gradients may overwrite outputs. Buffers: running statistics.
    append(forward, values.back().fetched());
    for (auto& net : networks) append(forward, on_host(net.store().buffers()));
    for (std::size_t i = networks.size(); i-- > 0 && whole;) {
      networks[i].backward(ctx, dys[i + 1].device_view(shapes[i + 1]), dys[i].device_view(shapes[i]));
      for (const float value : on_host(networks[i].store().gradients())) gradients.push_back(value);
    }
    if (whole) {
      for (const T value : dys[0].fetched()) gradients.push_back(static_cast<float>(value));
    }
    ctx.begin_step(2);
    pf::gpu::detail::stream_capture capture(ctx.stream());
    pass();
    operations = capture.finish().operations();
    ctx.begin_step(3);
  }
  static std::vector<float> on_host(std::span<const float> all) {
    std::vector<float> here(all.size());
    pf::gpu::device_memory().to_host(here.data(), all.data(), all.size_bytes());
    return here;
  }
};

/// The layers of both parts must compute the same in one Sequential as in two networks, with `saved` launches
/// of the forward pass fewer.
template <class T>
void check_chain(layers<T> first, layers<T> second, const pf::extents<4>& input, std::size_t saved,
                 bool whole = false) {
  CAPTURE(input[0]);
  CAPTURE(input[3]);
  CAPTURE(second[0].describe());
  if (sizeof(T) == 4 || !kernels::halo_available()) saved = 0;
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
  apart.run(input, whole);
  together.run(input, whole);
  CHECK(together.forward == apart.forward);
  CHECK(together.evaluated == apart.evaluated);
  REQUIRE(together.gradients.size() == apart.gradients.size());
  if (whole) CHECK(difference(together.gradients, apart.gradients) < (sizeof(T) == 2 ? 2 * unit<T> : 1e-5));
  CHECK(apart.operations - together.operations == saved);
}

pf::conv_shape square(index_t in, index_t out, index_t kernel = 3, index_t stride = 1) {
  return pf::conv_shape::square(in, out, kernel, stride, kernel / 2);
}

/// A residual block with two convolutions. `between`: channels after the first one.
template <class T>
layer<T> block(const layer<T>& first_conv, index_t channels, index_t between, bool relu) {
  layers<T> branch;
  branch.add("conv1", first_conv)
      .add("bn1", layer<T>(pf::BatchNorm<T>(between)))
      .add("relu", layer<T>(pf::ReLU<T>()))
      .add("conv2", layer<T>(pf::Conv<T>(square(between, channels))))
      .add("bn2", layer<T>(pf::BatchNorm<T>(channels)));
  return layer<T>(pf::Residual<T, pf::device::gpu>(std::move(branch), {}, relu));
}

}  // namespace

TEST_CASE_TEMPLATE("gpu pending norm: a sequential saves the launch of a batch norm", T, pf::gpu::bf16) {
  const auto pass = [](const auto& before, const auto& after, const pf::extents<4>& input, index_t channels,
                       bool relu, bool saves, bool whole = false) {
    layers<T> norm, second;
    norm.add("conv", layer<T>(before)).add("bn", layer<T>(pf::BatchNorm<T>(channels)));
    if (relu) norm.add("relu", layer<T>(pf::ReLU<T>()));
    second.add("conv", layer<T>(after));
    check_chain<T>(norm, second, input, saves ? 1 : 0, whole);
  };
  const index_t images = 9;  // more rows than one launch normalizes
  const pf::extents<4> input{images, 32, 32, 16}, odd{images, 31, 32, 16};
  const pf::Conv<T> conv(square(16, 16));
  pass(conv, pf::Conv<T>(square(16, 16), true), input, 16, true, true, true);
  pass(conv, pf::LowRankConv<T>(square(16, 64), 16), odd, 16, false, true);
  // A convolution without moments: the statistics are a launch of their own.
  pass(pf::Conv<T>(square(16, 16, 1)), pf::Conv<T>(square(16, 16)), input, 16, true, true);
  // By cuBLAS, and by groups.
  pass(conv, pf::Conv<T>(square(16, 16, 1)), input, 16, true, false);
  pf::conv_shape grouped = square(16, 16);
  grouped.groups = 2;
  pass(conv, pf::LowRankConv<T>(grouped, 3), input, 16, true, false);
}

TEST_CASE_TEMPLATE("gpu pending norm: from one residual block to the next", T, pf::gpu::bf16) {
  const index_t images = 9;
  const pf::extents<4> input{images, 32, 32, 16};
  const layer<T> dense(pf::Conv<T>(square(16, 16)));
  layers<T> first, second;
  first.add("block", block<T>(dense, 16, 16, false));
  second.add("conv", dense);
  check_chain<T>(first, second, input, 1);
  // A block with a shortcut of its own reads the norm's output twice, and its own sum ends with the pass.
  const auto projected = [&] {
    layers<T> branch, shortcut;
    branch.add("conv", dense).add("bn", layer<T>(pf::BatchNorm<T>(16)));
    shortcut.add("conv", layer<T>(pf::Conv<T>(square(16, 16, 1))));
    return layer<T>(pf::Residual<T, pf::device::gpu>(std::move(branch), std::move(shortcut)));
  }();
  layers<T> one, two;
  one.add("conv", dense).add("bn", layer<T>(pf::BatchNorm<T>(16)));
  two.add("projected", projected).add("conv", dense);
  check_chain<T>(one, two, input, 0);
}
