// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/fold_batch_norm.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/pooling.hpp>
#include <string>
#include <utility>
#include <vector>

namespace {

std::atomic<std::size_t> heap_requests{0};

void* counted_or_null(std::size_t bytes, std::size_t alignment) noexcept {
  ++heap_requests;
  return std::aligned_alloc(alignment,
                            (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
}

void* counted(std::size_t bytes, std::size_t alignment) {
  if (void* memory = counted_or_null(bytes, alignment)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// Every request of this program goes through these, so that a test can see who still allocates. Never inline:
// the compiler would warn of memory from `new` that goes to `free`.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) {
  return counted(bytes, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t a) {
  return counted(bytes, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, std::align_val_t a) {
  return counted(bytes, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return counted_or_null(bytes, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return counted_or_null(bytes, alignof(std::max_align_t));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace {

using namespace pufferfish;

/// Stem, a residual block with a shortcut, one without, a linear layer. Smooth where it is differentiable.
template <class T>
network<T> make_net(bool dropout = false) {
  Sequential<T> down, shortcut, flat, blocks, net;
  down.add("conv1", Conv<T>(conv_shape::square(6, 8, 3, 2, 1)));
  down.add("bn1", BatchNorm<T>(8));
  down.add("relu", ReLU<T>());
  down.add("conv2", Conv<T>(conv_shape::square(8, 8, 3, 1, 1)));
  shortcut.add(Conv<T>(conv_shape::square(6, 8, 1, 2)));
  flat.add("conv1", Conv<T>(conv_shape::square(8, 8, 3, 1, 1)));
  if (dropout) flat.add("drop", Dropout<T>(0.4));
  blocks.add(Residual<T>(down, shortcut));
  blocks.add(Residual<T>(flat, {}, false));
  net.add("stem", Conv<T>(conv_shape::square(3, 6, 3, 1, 1), true));
  net.add("layer1", std::move(blocks));
  net.add("pool", GlobalAvgPool<T>());
  net.add("fc", Linear<T>(8, 5));
  network<T> result{any_layer<T>(net)};
  result.initialize(3);
  return result;
}

constexpr extents<4> image{2, 6, 5, 3};

template <class T>
tensor<T, 4> random_tensor(const extents<4>& shape, std::uint64_t seed) {
  tensor<T, 4> x(shape);
  fill_normal(x.flat(), 1.0, random_stream(seed, 4));
  return x;
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}
template <class T>
bool same_bits(const tensor<T, 4>& a, const tensor<T, 4>& b) {
  return same_bits<T>(a.flat(), b.flat());
}

/// One forward and backward pass; output, input gradient and parameter gradients back to back.
template <class T>
std::vector<T> pass(const network<T>& net, cpu_context& ctx, std::uint64_t step) {
  ctx.set_mode(run_mode::training);
  ctx.begin_step(step);
  const tensor<T, 4> x = random_tensor<T>(image, 1);
  tensor<T, 4> y(net.output_shape(image)), dx(image);
  net.forward(ctx, x.view(), y.view());
  const tensor<T, 4> dy = random_tensor<T>(y.shape(), 2);
  net.backward(ctx, dy.view(), dx.view());
  std::vector<T> all(y.flat().begin(), y.flat().end());
  all.insert(all.end(), dx.flat().begin(), dx.flat().end());
  const auto gradients = const_cast<network<T>&>(net).store().gradients();
  all.insert(all.end(), gradients.begin(), gradients.end());
  return all;
}

TEST_CASE("network: a copy is bit-identical and independent") {
  network<float> net = make_net<float>();
  network<float> copy = net;
  CHECK(copy.structure() == net.structure());
  CHECK(same_bits<float>(copy.store().values(), net.store().values()));
  CHECK(same_bits<float>(copy.store().buffers(), net.store().buffers()));
  cpu_context ctx;
  CHECK(pass(net, ctx, 0) == pass(copy, ctx, 0));

  const std::vector<float> before(net.store().values().begin(), net.store().values().end());
  const tensor<float, 4> x = random_tensor<float>(image, 1);
  ctx.set_mode(run_mode::inference);
  const tensor<float, 4> y = net.forward(ctx, x.view());
  std::fill(copy.store().values().begin(), copy.store().values().end(), 0.25F);
  std::fill(copy.store().buffers().begin(), copy.store().buffers().end(), 3.0F);
  CHECK(same_bits<float>(net.store().values(), before));
  CHECK(same_bits(net.forward(ctx, x.view()), y));
  CHECK(!same_bits(copy.forward(ctx, x.view()), y));

  // The copy's layers look at the copy's arenas, and it outlives the original.
  copy = net;
  { const network<float> gone = std::move(net); }
  copy.for_each_layer([&](const std::string& name, const any_layer<float>& layer) {
    if (name != "fc") return;
    const float* first = copy.store().values().data();
    const float* weight = layer.target<Linear<float>>()->weight().data();
    CHECK(weight >= first);
    CHECK(weight < first + copy.parameter_count());
  });
  CHECK(same_bits(copy.forward(ctx, x.view()), y));
}

TEST_CASE("network: moving moves no layer and no arena") {
  network<float> net = make_net<float>();
  const float* values = net.store().values().data();
  const auto* entry = net.store().parameters()[0].thing;
  network<float> moved = std::move(net);
  CHECK(moved.store().values().data() == values);
  CHECK(moved.store().parameters()[0].thing == entry);
}

TEST_CASE("network: arenas are packed in reverse execution order") {
  network<float> net = make_net<float>();
  std::vector<std::string> names;
  index_t offset = 0;
  int id = 0;
  for (const auto& entry : net.store().parameters()) {
    names.push_back(entry.name);
    CHECK(entry.offset == offset);
    CHECK(entry.thing->id() == id++);
    CHECK(entry.thing->data() == net.store().values().data() + offset);
    CHECK(entry.thing->gradient_data() == net.store().gradients().data() + offset);
    offset += entry.thing->size();
  }
  CHECK(offset == net.parameter_count());
  CHECK(names == std::vector<std::string>{"fc.bias", "fc.weight", "layer1.1.conv1.weight",
                                          "layer1.0.shortcut.0.weight", "layer1.0.conv2.weight",
                                          "layer1.0.bn1.bias", "layer1.0.bn1.weight", "layer1.0.conv1.weight",
                                          "stem.bias", "stem.weight"});
  CHECK(net.store().buffer_entries().size() == 3);
  CHECK(net.store().buffer_entries()[0].name == "layer1.0.bn1.running_mean");
}

TEST_CASE("network: gradients become ready once each, in backward order") {
  network<double> net = make_net<double>();
  cpu_context ctx;
  std::vector<int> ready;
  const auto listener = ctx.on_gradient_ready(
      [](void* list, const void*, int id) { static_cast<std::vector<int>*>(list)->push_back(id); }, &ready);
  for (std::uint64_t step = 0; step < 2; ++step) {
    ready.clear();
    pass(net, ctx, step);
    std::vector<int> sorted = ready;
    std::sort(sorted.begin(), sorted.end());
    REQUIRE(sorted.size() == net.store().parameters().size());
    for (std::size_t i = 0; i < sorted.size(); ++i) CHECK(sorted[i] == static_cast<int>(i));
  }
}

TEST_CASE("network: the gradient is overwritten each step, and added up over micro-batches") {
  network<double> net = make_net<double>();
  cpu_context ctx;
  const std::vector<double> once = pass(net, ctx, 0);
  std::fill(net.store().gradients().begin(), net.store().gradients().end(), 1e300);
  CHECK(pass(net, ctx, 0) == once);

  for (const auto& entry : net.store().parameters()) entry.thing->set_writers(2);
  ctx.begin_step(0);
  const tensor<double, 4> x = random_tensor<double>(image, 1);
  const tensor<double, 4> dy = random_tensor<double>(net.output_shape(image), 2);
  tensor<double, 4> y(dy.shape());
  for (int micro = 0; micro < 2; ++micro) {
    net.forward(ctx, x.view(), y.view());
    net.backward(ctx, dy.view());
  }
  const auto gradients = net.store().gradients();
  const std::size_t first = once.size() - gradients.size();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    CHECK(gradients[i] == doctest::Approx(2.0 * once[first + i]).epsilon(1e-12));
  }
}

TEST_CASE("network: gradients agree with finite differences") {
  network<double> net = make_net<double>(true);
  cpu_context ctx({1, 11});
  const std::vector<double> all = pass(net, ctx, 7);
  const auto inputs = static_cast<std::size_t>(volume<4>(image));
  const std::size_t outputs = static_cast<std::size_t>(volume<4>(net.output_shape(image)));
  tensor<double, 4> x = random_tensor<double>(image, 1), y(net.output_shape(image));
  const tensor<double, 4> dy = random_tensor<double>(y.shape(), 2);
  const auto objective = [&] {
    ctx.begin_step(7);
    net.forward(ctx, x.view(), y.view());
    double sum = 0.0;
    for (std::size_t i = 0; i < outputs; ++i) sum += y.flat()[i] * dy.flat()[i];
    return sum;
  };
  const auto error_at = [&](double& value, double derivative) {
    const double kept = value, step = 1e-6;
    value = kept + step;
    const double above = objective();
    value = kept - step;
    const double below = objective();
    value = kept;
    return std::abs((above - below) / (2 * step) - derivative) / (1.0 + std::abs(derivative));
  };
  double worst = 0.0;
  for (std::size_t i = 0; i < inputs; i += 7)
    worst = std::max(worst, error_at(x.flat()[i], all[outputs + i]));
  for (std::size_t i = 0; i < net.store().values().size(); i += 13) {
    worst = std::max(worst, error_at(net.store().values()[i], all[outputs + inputs + i]));
  }
  CHECK(worst < 1e-7);
}

TEST_CASE("network: the same bits with any number of threads, and without an input gradient") {
  network<float> one = make_net<float>(true), three = one;
  cpu_context ctx({1, 5}), threads({3, 5});
  const std::vector<float> expected = pass(one, ctx, 4);
  CHECK(pass(three, threads, 4) == expected);
  CHECK(same_bits<float>(one.store().buffers(), three.store().buffers()));

  const std::vector<float> gradients(one.store().gradients().begin(), one.store().gradients().end());
  const tensor<float, 4> x = random_tensor<float>(image, 1);
  tensor<float, 4> y(one.output_shape(image));
  ctx.begin_step(4);
  one.forward(ctx, x.view(), y.view());
  one.backward(ctx, random_tensor<float>(y.shape(), 2).view());
  CHECK(same_bits<float>(one.store().gradients(), gradients));
  CHECK(ctx.tape().empty());
}

TEST_CASE("network: initial values are a function of the seed and each layer's name") {
  network<float> a = make_net<float>(), b = make_net<float>();
  CHECK(same_bits<float>(a.store().values(), b.store().values()));
  b.initialize(4);
  CHECK(!same_bits<float>(a.store().values(), b.store().values()));
  b.initialize(3);
  CHECK(same_bits<float>(a.store().values(), b.store().values()));
  // Two layers of one shape differ.
  Sequential<float> twins;
  twins.add("a", Linear<float>(4, 4)).add("b", Linear<float>(4, 4));
  network<float> pair{any_layer<float>(twins)};
  pair.initialize(1);
  const std::span<const float> values = pair.store().values();
  CHECK(!std::equal(values.begin(), values.begin() + 20, values.begin() + 20));
}

TEST_CASE("network: modify raises the generation and keeps the values") {
  network<float> net = make_net<float>();
  const std::uint64_t generation = net.generation();
  const std::vector<float> before(net.store().values().begin(), net.store().values().end());
  net.modify([](any_layer<float>&) {});
  CHECK(net.generation() == generation + 1);
  CHECK(same_bits<float>(net.store().values(), before));
  net.modify(
      [](any_layer<float>& root) { root.target<Sequential<float>>()->add("head", Linear<float>(5, 2)); });
  CHECK(net.generation() == generation + 2);
  CHECK(net.parameter_count() == static_cast<index_t>(before.size()) + 12);
  CHECK(net.output_shape(image) == extents<4>{2, 1, 1, 2});
  const std::span<const float> values = net.store().values();
  CHECK(same_bits<float>(values.subspan(12), before));
  const auto failing = [](any_layer<float>&) { throw value_error("no"); };
  CHECK_THROWS_AS(net.modify(failing), value_error);
  CHECK(net.generation() == generation + 2);
}

TEST_CASE("network: summary and MACs of images that do not fit name the layer and the extent") {
  const network<float> net = make_net<float>();
  const auto refused = [&](const extents<4>& input, const char* layer, const char* reason) {
    CHECK_THROWS_WITH_AS(net.macs(input), doctest::Contains(layer), shape_error);
    CHECK_THROWS_WITH_AS(net.summary(input), doctest::Contains(layer), shape_error);
    CHECK_THROWS_WITH_AS(net.macs(input), doctest::Contains(reason), shape_error);
  };
  refused({2, 6, 5, 4}, "stem: ", "it has 4 channels, not 3");
  refused({2, 3, 6, 5}, "stem: ", "it has 5 channels, not 3; NCHW images must be permuted");
  Sequential<float> layers;
  layers.add("first", Conv<float>(conv_shape::square(3, 4, 3, 1, 1)));
  layers.add("second", Conv<float>(conv_shape::square(4, 4, 5, 1, 0)));
  const network<float> narrow{any_layer<float>(std::move(layers))};
  CHECK_THROWS_WITH_AS(narrow.macs({1, 4, 6, 3}), doctest::Contains("second: "), shape_error);
  CHECK_THROWS_WITH_AS(narrow.summary({1, 4, 6, 3}),
                       doctest::Contains("an image of 4x6 is smaller than the kernel"), shape_error);
}

TEST_CASE("network: summary and MACs") {
  const network<float> net = make_net<float>();
  const std::vector<layer_summary> rows = net.summary(image);
  std::vector<std::string> names;
  index_t parameters = 0, macs = 0;
  for (const layer_summary& row : rows) {
    names.push_back(row.name);
    parameters += row.parameters;
    macs += row.macs;
  }
  CHECK(names == std::vector<std::string>{"stem", "layer1.0.conv1", "layer1.0.bn1", "layer1.0.relu",
                                          "layer1.0.conv2", "layer1.0.shortcut.0", "layer1.1.conv1", "pool",
                                          "fc"});
  CHECK(parameters == net.parameter_count());
  CHECK(macs == net.macs(image));
  // 6 x 5 pixels in the stem, 3 x 3 after the stem, two images.
  CHECK(macs == 2 * (30 * 27 * 6 + 9 * 54 * 8 + 9 * 72 * 8 + 9 * 6 * 8 + 9 * 72 * 8 + 8 * 5));
  CHECK(rows[0].input == image);
  CHECK(rows[1].output == extents<4>{2, 3, 3, 8});
  CHECK(rows[5].input == extents<4>{2, 6, 5, 6});
  CHECK(rows[0].parameters == 27 * 6 + 6);
  CHECK(rows[8].description == "Linear 8 -> 5");
}

TEST_CASE("network: shapes that do not fit name the layer") {
  const network<float> net = make_net<float>();
  try {
    net.output_shape({2, 6, 5, 4});
    CHECK(false);
  } catch (const shape_error& e) {
    const std::string text = e.what();
    CHECK(text.find("stem") != std::string::npos);
    CHECK(text.find("[2 x 6 x 5 x 4]") != std::string::npos);
  }
  Sequential<float> wrong, narrow, wide;
  wrong.add("a", Linear<float>(4, 3)).add("b", Linear<float>(4, 3));
  const network<float> bad{any_layer<float>(wrong)};
  CHECK_THROWS_AS(bad.output_shape({1, 1, 1, 4}), shape_error);
  narrow.add(Linear<float>(4, 3));
  wide.add(Linear<float>(4, 2));
  const Residual<float> torn(narrow, wide);
  CHECK_THROWS_AS(torn.output_shape({1, 1, 1, 4}), shape_error);
  cpu_context ctx;
  const tensor<float, 4> x(image);
  tensor<float, 4> y({2, 1, 1, 4});
  CHECK_THROWS_AS(net.forward(ctx, x.view(), y.view()), shape_error);
}

TEST_CASE("residual: shapes that do not fit, with and without a fused branch") {
  for (const bool fused : {false, true}) {
    CAPTURE(fused);
    const auto branch = [fused](index_t out) {
      Sequential<float> layers;
      layers.add(Linear<float>(4, out));
      if (fused) layers.add(BatchNorm<float>(out));
      return layers;
    };
    cpu_context ctx;
    ctx.set_mode(run_mode::training);
    ctx.begin_step(0);
    const tensor<float, 4> x({2, 3, 1, 4}), short_dy({2, 1, 1, 4});
    tensor<float, 4> wide({2, 3, 1, 6}), y(x.shape()), dx(x.shape()), long_dx({4, 3, 1, 4});
    const Residual<float> widens(branch(6)), keeps(branch(4)), with_shortcut(branch(4), branch(4));
    CHECK_THROWS_WITH_AS(
        widens.forward(ctx, x.view(), wide.view()),
        doctest::Contains("the shortcut is the identity, but y [2 x 3 x 1 x 6] is not shaped as x [2 x 3"),
        shape_error);
    CHECK(ctx.tape().empty());
    for (const Residual<float>* block : {&keeps, &with_shortcut}) {
      ctx.begin_step(0);
      block->forward(ctx, x.view(), y.view());
      CHECK_THROWS_AS(block->backward(ctx, short_dy.view(), dx.view()), shape_error);
      ctx.begin_step(0);
      block->forward(ctx, x.view(), y.view());
      CHECK_THROWS_WITH_AS(block->backward(ctx, y.view(), long_dx.view()),
                           doctest::Contains("dx [4 x 3 x 1 x 4] is not shaped as x [2 x 3 x 1 x 4]"),
                           shape_error);
    }
  }
}

TEST_CASE("sequential: without layers it checks its views, moved from it throws state_error") {
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  ctx.begin_step(0);
  Sequential<float> none;
  const tensor<float, 4> x = random_tensor<float>(image, 1);
  tensor<float, 4> y(image), other({1, 6, 5, 3}), wide({2, 6, 5, 4});
  none.forward(ctx, x.view(), y.view());
  CHECK(same_bits(x, y));
  none.backward(ctx, x.view(), {});
  none.backward(ctx, y.view(), y.view());
  CHECK(same_bits(x, y));
  CHECK_THROWS_AS(none.forward(ctx, x.view(), other.view()), shape_error);
  CHECK_THROWS_AS(none.backward(ctx, x.view(), other.view()), shape_error);
  const tensor_view<float, 4> strided = wide.view().slice(3, 0, 3), null(nullptr, image);
  CHECK_THROWS_WITH_AS(none.forward(ctx, x.view(), strided), doctest::Contains("sequential of 0: y"),
                       shape_error);
  CHECK_THROWS_WITH_AS(none.forward(ctx, null, y.view()), doctest::Contains("null view"), shape_error);
  CHECK_THROWS_AS(none.backward(ctx, x.view(), strided), shape_error);

  struct ignores final : layer_tracer<float, device::cpu> {
    void on_trace(const std::string&, const any_layer<float>&, const extents<4>&,
                  const extents<4>&) override {}
  } tracer;
  const Sequential<float> taken = std::move(none);
  CHECK_THROWS_AS(none.trace(tracer, image, ""), state_error);  // NOLINT(bugprone-use-after-move)
  CHECK_THROWS_AS(none.initialize({1, 1}), state_error);
  CHECK_THROWS_AS(static_cast<void>(none.macs(image)), state_error);
  CHECK(taken.macs(image) == 0);
}

TEST_CASE("network: empty batches, empty sequentials") {
  const network<float> net = make_net<float>();
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  ctx.begin_step(0);
  tensor<float, 4> x({0, 6, 5, 3}), y({0, 1, 1, 5}), dx(x.shape());
  net.forward(ctx, x.view(), y.view());
  net.backward(ctx, y.view(), dx.view());
  for (float g : const_cast<network<float>&>(net).store().gradients()) CHECK(g == 0.0F);
  const network<float> nothing{any_layer<float>(Sequential<float>())};
  CHECK(nothing.parameter_count() == 0);
  const tensor<float, 4> a = random_tensor<float>(image, 1);
  CHECK(same_bits(nothing.forward(ctx, a.view()), a));
}

TEST_CASE("residual: a NaN in either branch reaches the output") {
  Sequential<float> branch;
  branch.add(Linear<float>(2, 2));
  const Residual<float> block(branch);
  cpu_context ctx;
  tensor<float, 4> x({1, 1, 1, 2}), y({1, 1, 1, 2});
  x(0, 0, 0, 1) = std::numeric_limits<float>::quiet_NaN();
  block.forward(ctx, x.view(), y.view());
  CHECK(std::isnan(y(0, 0, 0, 1)));
}

TEST_CASE("network: nothing allocates from the second step on") {
  for (const bool hybrid : {false, true}) {
    for (const int threads : {1, 2}) {
      CAPTURE(hybrid);
      CAPTURE(threads);
      network<float> net = make_net<float>(true);
      if (hybrid) factorize(net, factorize_policy{});
      cpu_context ctx({threads, 1});
      const tensor<float, 4> x = random_tensor<float>(image, 1);
      tensor<float, 4> y(net.output_shape(image)), dx(image);
      std::size_t heap[4] = {}, arenas[4] = {};
      for (std::uint64_t step = 0; step < 4; ++step) {
        const std::size_t start = heap_requests;
        ctx.set_mode(run_mode::training);
        ctx.begin_step(step);
        net.forward(ctx, x.view(), y.view());
        net.backward(ctx, y.view(), dx.view());
        ctx.set_mode(run_mode::inference);
        net.forward(ctx, x.view(), y.view());
        heap[step] = heap_requests - start;
        arenas[step] = ctx.system_allocations();
      }
      CHECK(heap[0] > 0);
      CHECK(arenas[0] > 0);
      // The end of the first step may join what it asked for piece by piece.
      CHECK(heap[2] == 0);
      CHECK(heap[3] == 0);
      CHECK(arenas[3] == arenas[1]);
      CHECK(ctx.peak_bytes() > 0);
    }
  }
}

TEST_CASE("network: warm inference of a folded network asks for no memory and keeps nothing") {
  for (const int threads : {1, 2}) {
    network<float> net = make_net<float>();
    factorize(net, factorize_policy{});
    CHECK(fold_batch_norm(net).folded.size() == 1);
    cpu_context ctx({threads, 1});
    ctx.set_mode(run_mode::training);
    const tensor<float, 4> x = random_tensor<float>(image, 1);
    tensor<float, 4> y(net.output_shape(image));
    const auto infer = [&] {
      const mode_scope inference(ctx, run_mode::inference);
      net.forward(ctx, x.view(), y.view());
    };
    infer();
    infer();
    const std::size_t before = heap_requests, arenas = ctx.system_allocations();
    infer();
    CHECK(heap_requests == before);
    CHECK(ctx.system_allocations() == arenas);
    CHECK(ctx.tape().memory().peak_bytes() == 0);
    CHECK(ctx.training());
  }
}

}  // namespace
