// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The choice among the algorithms of a convolution, by the rules and by a table.
#include <pufferfish/ops/conv/conv_choice.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#include <pufferfish/ops/conv/low_rank_conv.hpp>

#include "../../support/gradient_check.hpp"
#include "../../support/scratch_folder.hpp"

namespace {
using namespace test;
using ops::detail::kernel_algorithm;

/// Restores the rules at the end of a test.
struct builtin_afterwards {
  ~builtin_afterwards() { kernel_choices::builtin(); }
};

/// The results of all passes of a convolution; z: the second result of a low-rank convolution of one group.
template <class T>
struct results_of {
  tensor<T, 4> y, dx, z;
  tensor<parameter_t<T>, 4> dw;
};

/// A convolution with its operands.
template <class T>
struct instance {
  using G = parameter_t<T>;
  conv_shape shape;
  extents<4> input, output, up_output;
  bool has_bias, add;
  tensor<T, 4> x, dy, w, old_dx;
  tensor<T, 1> bias;
  tensor<T, 2> up;
  tensor<G, 4> old_dw;
  index_t depth;

  template <std::size_t N>
  static void draw(tensor<T, N>& to, std::uint64_t stream, std::uint64_t round) {
    std::vector<float> values(to.flat().size());
    fill_normal<float>(values, 1.0, {stream, round});
    std::ranges::transform(values, to.flat().begin(), [](float value) { return static_cast<T>(value); });
  }
  instance(const conv_shape& s, const extents<4>& in, std::uint64_t round)
      : shape(s),
        input(in),
        output(s.output(in, "conv")),
        up_output{output[0], output[1], output[2], 24},
        has_bias(round % 2 == 0),
        add(round % 3 == 0),
        x(in),
        dy(output),
        w({s.kernel.height, s.kernel.width, s.group_inputs(), s.out_channels}),
        old_dx(in),
        bias({s.out_channels}),
        up({s.out_channels, 24}),
        old_dw(w.shape()),
        depth(s.patch() + s.out_channels + output[0] * output[1] * output[2]) {
    draw(x, 1, round), draw(dy, 2, round), draw(w, 3, round), draw(bias, 4, round), draw(old_dx, 5, round);
    draw(up, 6, round);
    fill_normal<G>(old_dw.flat(), 1.0, {7, round});
  }
  results_of<T> empty() const {
    results_of<T> r{tensor<T, 4>(output), tensor<T, 4>(input), tensor<T, 4>(up_output),
                    tensor<G, 4>(w.shape())};
    copy(old_dx.view(), r.dx.view());
    copy(old_dw.view(), r.dw.view());
    return r;
  }
  /// All passes. z: a low-rank convolution's second result, of one group.
  results_of<T> run(cpu_context& ctx) const {
    results_of<T> r = empty();
    ops::conv_forward<T>(ctx, shape, x, w.data(), has_bias ? bias.data() : nullptr, r.y);
    ops::conv_backward_input<T>(ctx, shape, dy, w.data(), r.dx, add);
    ops::conv_backward_weight<T>(ctx, shape, x, dy, r.dw.data(), add);
    if (shape.groups == 1) {
      ops::low_rank_conv_forward<T>(ctx, shape, x, w.data(), up, nullptr, tensor_view<T, 4>(), r.z);
    }
    return r;
  }
};

/// The passes by ops::reference, in double.
template <class T>
results_of<double> expected(const instance<T>& a) {
  instance<double> wide(a.shape, a.input, 0);
  const auto widen = [](const auto& from, auto& to) {
    std::ranges::transform(from.flat(), to.flat().begin(), [](auto v) { return static_cast<double>(v); });
  };
  widen(a.x, wide.x), widen(a.dy, wide.dy), widen(a.w, wide.w), widen(a.old_dx, wide.old_dx);
  widen(a.bias, wide.bias), widen(a.up, wide.up), widen(a.old_dw, wide.old_dw);
  auto r = wide.empty();
  const tensor_view<const double, 4> weight = std::as_const(wide.w).view().permute({3, 2, 0, 1});
  tensor<double, 4> t(a.output);
  ops::reference::conv_forward<double>(a.shape, wide.x, weight, nullptr, t);
  for (index_t i = 0; i < t.size(); ++i) {
    const index_t pixel = i / a.shape.out_channels, o = i % a.shape.out_channels;
    r.y.data()[i] = t.data()[i] + (a.has_bias ? wide.bias.data()[o] : 0.0);
    for (index_t j = 0; j < 24; ++j) r.z.data()[pixel * 24 + j] += t.data()[i] * wide.up(o, j);
  }
  tensor<double, 4> dx(a.input);
  ops::reference::conv_backward_input<double>(a.shape, wide.dy, weight, dx);
  for (index_t i = 0; i < dx.size(); ++i) r.dx.data()[i] = dx.data()[i] + (a.add ? r.dx.data()[i] : 0.0);
  ops::reference::conv_backward_weight<double>(a.shape, wide.x, wide.dy, r.dw.view().permute({3, 2, 0, 1}),
                                               a.add);
  return r;
}

template <class A>
double error(const tensor<A, 4>& got, const tensor<double, 4>& want) {
  tensor<double, 4> wide(want.shape());
  std::ranges::transform(got.flat(), wide.flat().begin(), [](A value) { return static_cast<double>(value); });
  return largest_error(wide, want);
}

/// Compares results with expected(a). Results of 16 bits are rounded once; z twice, since t is stored,
/// and the error of z is that of t times the root of the number of sums in it.
template <class T>
void check(const instance<T>& a, const results_of<T>& got, const results_of<double>& want) {
  const double sums = (sizeof(T) == 8 ? 1e-14 : 1e-5) * std::sqrt(static_cast<double>(a.depth));
  const double rounding = sizeof(T) == 2 ? 0x1p-8 : 0.0;
  CHECK(error(got.y, want.y) < sums + rounding);
  CHECK(error(got.dx, want.dx) < sums + rounding);
  CHECK(error(got.dw, want.dw) < sums);
  if (a.shape.groups == 1) {
    const double terms = static_cast<double>(1 + a.shape.patch() * a.shape.out_channels);
    CHECK(error(got.z, want.z) < (sums + 2.0 * rounding) * std::sqrt(terms));
  }
}

template <class A>
bool same_bits(const tensor<A, 4>& a, const tensor<A, 4>& b) {
  return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.size()) * sizeof(A)) == 0;
}
template <class Results>
bool same_bits(const Results& a, const Results& b) {
  return same_bits(a.y, b.y) && same_bits(a.dx, b.dx) && same_bits(a.dw, b.dw) && same_bits(a.z, b.z);
}

/// Shapes for which each of the algorithms is possible, in turn; otherwise random.
conv_shape random_shape(picker& pick, std::uint64_t round, index_t lanes) {
  const index_t channels[] = {1, 3, 4, 8, 17, 32, 48};
  conv_shape s{channels[pick(0, 6)], channels[pick(0, 6)], {3, 3}, {1, 1}, {pick(0, 2), pick(0, 2)}};
  if (round % 4 == 1) s.kernel = {1, 1}, s.padding = {0, 0}, s.stride = {pick(1, 2), 2};
  if (round % 4 == 2) s.kernel = {pick(1, 4), pick(2, 4)}, s.stride = {pick(1, 3), pick(1, 3)};
  if (round % 4 == 3) s.dilation = {pick(1, 2), pick(1, 2)}, s.out_channels = 2 * lanes;
  return s;
}

TEST_CASE_TEMPLATE("convolution choices: each candidate against the reference, forced by the table", T, float,
                   double, bfloat16) {
  const builtin_afterwards restore;
  const scratch_folder folder;
  const std::string path = folder / "table.txt";
  cpu_context ctx({2, 0});
  picker pick(1);
  std::set<std::string> covered;
  int bits_differ = 0;
  const std::string type = pufferfish::detail::scalar_name<T>();
  for (std::uint64_t round = 0; round < 24; ++round) {
    const conv_shape shape = random_shape(pick, round, ops::detail::conv_kernels<parameter_t<T>>().lanes);
    const instance<T> a(shape, {pick(1, 5), pick(5, 12), pick(5, 12), shape.in_channels}, round);
    CAPTURE(shape.describe());
    CAPTURE(to_string<4>(a.input));
    const auto want = expected(a);
    kernel_choices::builtin();
    const auto by_rules = a.run(ctx);
    check(a, by_rules, want);

    // The call that measures has the results of the algorithms that it chooses.
    kernel_choices::measure();
    const auto measured = a.run(ctx);
    check(a, measured, want);
    const auto rows = kernel_choices::rows();
    std::filesystem::remove(path);
    kernel_choices::save(path);
    kernel_choices::load(path);
    CHECK(same_bits(measured, a.run(ctx)));

    for (const auto& item : rows) {
      const kernel_key& key = item.first;
      const kernel_choice& row = item.second;
      REQUIRE(row.times.size() > 1);
      CHECK(key.threads == 2);
      CHECK(key.isa == pufferfish::detail::kernel_name());
      CHECK(std::ranges::any_of(row.times, [&](const kernel_time& t) { return t.algorithm == row.chosen; }));
      if (key.type != type) continue;  // of a convolution that is widened to float
      for (const std::string_view name : pufferfish::detail::kernel_algorithm_names) {
        const std::string algorithm(name);
        CAPTURE(algorithm);
        kernel_choices::builtin();
        kernel_choices::choose(key, algorithm);
        const bool possible =
            std::ranges::any_of(row.times, [&](const kernel_time& t) { return t.algorithm == algorithm; });
        if (!possible) {
          CHECK(contains(error_text([&] { a.run(ctx); }), "'" + algorithm + "' cannot compute it"));
          continue;
        }
        const auto forced = a.run(ctx);
        check(a, forced, want);
        covered.insert(key.operation + ", " + algorithm);
        if (algorithm == row.times[0].algorithm) CHECK(same_bits(forced, by_rules));
        bits_differ += same_bits(forced, by_rules) ? 0 : 1;
      }
    }
  }
  std::set<std::string> all{"conv_forward, direct sums",
                            "conv_forward, few pixels, weight read in place",
                            "conv_forward, direct sums, images as one line",
                            "conv_backward_weight, direct sums",
                            "conv_backward_weight, kernel elements as rows of one product",
                            "conv_backward_weight, product of copied pixels"};
  const bool pairs = pufferfish::detail::pair_kernels() != nullptr;
  if (sizeof(T) == 2) all = {"conv_backward_weight, product of copied pixels"};
  for (const std::string pass : {"conv_forward", "conv_backward_input", "conv_backward_weight"}) {
    if (sizeof(T) != 8) all.insert(pass + ", Winograd tiles");
    if (sizeof(T) == 2) all.insert(pass + ", widened to float");
    if (sizeof(T) == 2 && pairs) all.insert(pass + ", direct sums of pairs");
    if (sizeof(T) == 4) all.insert(pass + ", direct sums");
  }
  CHECK(covered == all);
  CHECK(bits_differ > 0);
}

TEST_CASE("convolution choices: the example of docs/kernels.md") {
  const builtin_afterwards restore;
  const scratch_folder folder;
  const std::string path = folder / "kernels.txt";
  const instance<float> a(conv_shape::square(16, 16, 3, 1, 1), {2, 9, 9, 16}, 0);
  cpu_context ctx({1, 0});
  const auto train_some_steps = [&] { a.run(ctx); };
  // [table]
  kernel_choices::measure();  // in this process only; the file of the variable is not used
  train_some_steps();
  kernel_choices::save(path);  // adds the rows to a file
  kernel_choices::load(path);  // in later runs; builtin() returns to the rules
  // [table]
  CHECK(kernel_choices::rows().size() == 3);
}

TEST_CASE("convolution choices: groups and empty batches under a measured table") {
  const builtin_afterwards restore;
  cpu_context ctx({2, 0});
  conv_shape shape{24, 16, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 2};
  const instance<float> a(shape, {3, 9, 10, 24}, 0);
  kernel_choices::measure();
  check(a, a.run(ctx), expected(a));
  CHECK_FALSE(kernel_choices::rows().empty());  // of the convolution of one group

  shape.groups = 1;
  const instance<float> none(shape, {0, 9, 10, 24}, 3);
  kernel_choices::measure();
  check(none, none.run(ctx), expected(none));
  CHECK(kernel_choices::rows().empty());
}

TEST_CASE("convolution choices: threads that measure at the same time agree") {
  const builtin_afterwards restore;
  const instance<float> a(conv_shape::square(32, 32, 3, 1, 1), {4, 12, 12, 32}, 0);
  kernel_choices::measure();
  std::vector<results_of<float>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) {
    threads.emplace_back([&] {
      cpu_context ctx({1, 0});
      result = a.run(ctx);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) CHECK(same_bits(result, results[0]));
  check(a, results[0], expected(a));
}

TEST_CASE("convolution choices: what limits the candidates is part of the key") {
  const builtin_afterwards restore;
  const instance<float> a(conv_shape::square(32, 32, 3, 1, 1), {4, 12, 12, 32}, 0);
  const instance<bfloat16> with_bias(a.shape, a.input, 0), without(a.shape, a.input, 1);
  context_options options;
  options.threads = 1;
  cpu_context ctx(options);
  options.winograd = false;
  cpu_context direct(options);
  kernel_choices::measure();
  a.run(ctx);
  a.run(direct);  // the same shape, without Winograd tiles: direct sums only, so nothing to measure
  with_bias.run(ctx);
  without.run(ctx);
  int tiles = 0, biases = 0, pairs = 0;
  for (const auto& [key, row] : kernel_choices::rows()) {
    CHECK(key.shape.find("without Winograd") == std::string::npos);
    biases += key.shape.find(", bias") != std::string::npos ? 1 : 0;
    pairs += key.type == "bfloat16" && key.shape.ends_with(", pairs") ? 1 : 0;
    for (const kernel_time& time : row.times) tiles += time.algorithm == "Winograd tiles" ? 1 : 0;
  }
  CHECK(tiles > 0);
  const bool has_pairs = pufferfish::detail::pair_kernels() != nullptr;
  CHECK(biases == (has_pairs ? 1 : 0));
  CHECK((pairs > 0) == has_pairs);
}

TEST_CASE("convolution choices: the rules for known shapes") {
  context_options options;
  options.winograd = false;
  const cpu_context ctx, direct(options);
  struct known {
    conv_shape shape;
    extents<4> input;
    kernel_algorithm forward, backward_weight;
  };
  constexpr auto winograd = kernel_algorithm::winograd, few_pixels = kernel_algorithm::few_pixels,
                 joined_lines = kernel_algorithm::joined_lines, direct_sums = kernel_algorithm::direct,
                 thin = kernel_algorithm::thin, copied_pixels = kernel_algorithm::copied_pixels;
  const auto square = [](auto... n) { return conv_shape::square(n...); };
  const known cases[] = {{square(64, 64, 3, 1, 1), {128, 32, 32, 64}, winograd, winograd},
                         {square(512, 512, 3, 1, 1), {128, 4, 4, 512}, winograd, winograd},
                         {square(512, 512, 3, 1, 1), {1, 4, 4, 512}, few_pixels, direct_sums},
                         {square(64, 128, 3, 2, 1), {128, 32, 32, 64}, direct_sums, direct_sums},
                         {square(3, 64, 3, 1, 1), {128, 32, 32, 3}, direct_sums, thin},
                         {square(3, 64, 7, 2, 3), {8, 64, 64, 3}, direct_sums, thin},
                         {square(64, 128, 1, 2), {128, 32, 32, 64}, direct_sums, copied_pixels},
                         {square(256, 512, 1, 2), {128, 8, 8, 256}, joined_lines, copied_pixels},
                         {square(64, 16, 1), {128, 32, 32, 64}, joined_lines, direct_sums}};
  for (const known& k : cases) {
    CAPTURE(k.shape.describe());
    const extents<4> output = k.shape.output(k.input, "conv");
    CHECK(ops::detail::forward_rule<float>(ctx, k.shape, k.input, output) == k.forward);
    CHECK(ops::detail::backward_weight_rule<float>(ctx, k.shape, k.input, output) == k.backward_weight);
    CHECK(ops::detail::forward_rule<float>(direct, k.shape, k.input, output) != winograd);
    CHECK(ops::detail::forward_rule<double>(ctx, k.shape, k.input, output) != winograd);
  }
}

}  // namespace
