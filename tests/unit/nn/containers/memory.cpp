// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What containers keep of a forward pass, what they write again, and where gradients go: the same bits as
// with everything kept.
#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/layers/pooling.hpp>
#include <pufferfish/nn/network.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

template <class T>
bool same_bits(const tensor<T, 4>& a, const tensor<T, 4>& b) {
  return test::same_bits(std::vector<T>(a.flat().begin(), a.flat().end()),
                         std::vector<T>(b.flat().begin(), b.flat().end()));
}
using test::same_bits;

/// A layer that saves passes as L does, but wants its input and output kept and its gradients apart.
template <class L>
class Keeping {
 public:
  using value_type = typename L::value_type;
  using T = value_type;
  using view = tensor_view<T, 4>;
  using const_view = tensor_view<const T, 4>;
  static constexpr bool is_relu = requires { L::is_relu; };
  static constexpr bool takes_moments = requires { L::takes_moments; };
  static constexpr bool gradient_in_place = requires { L::gradient_in_place; };

  explicit Keeping(const L& layer) : layer_(layer) {}
  std::string describe() const { return layer_.describe(); }
  extents<4> output_shape(const extents<4>& input) const { return layer_.output_shape(input); }
  void forward(cpu_context& ctx, const const_view& x, const view& y) const { layer_.forward(ctx, x, y); }
  void backward(cpu_context& ctx, const const_view& dy, const view& dx) const {
    layer_.backward(ctx, dy, dx);
  }
  void forward_with_epilogue(
      cpu_context& ctx, const const_view& x, const view& y,
      const ops::output_epilogue<T>& epilogue) const requires detail::epilogue_layer<T, L, device::cpu> {
    layer_.forward_with_epilogue(ctx, x, y, epilogue);
  }
  void forward_fused(cpu_context& ctx, const const_view& x, const view& y,
                     const forward_fusion<T>& fusion) const requires detail::fusing_layer<T, L, device::cpu> {
    layer_.forward_fused(ctx, x, y, fusion);
  }
  void backward_masked(cpu_context& ctx, const const_view& dy, const view& dx, const ops::relu_mask<T>& mask)
      const requires detail::masking_layer<T, L, device::cpu> {
    layer_.backward_masked(ctx, dy, dx, mask);
  }
  void backward_add(cpu_context& ctx, const const_view& dy,
                    const view& dx) const requires detail::adding_layer<T, L, device::cpu> {
    layer_.backward_add(ctx, dy, dx);
  }
  void visit_state(state_visitor<T>& visitor, const std::string& prefix) {
    any_state(layer_, visitor, prefix);
  }
  void initialize(random_stream random) {
    if constexpr (requires { layer_.initialize(random); }) layer_.initialize(random);
  }

 private:
  static void any_state(L& layer, state_visitor<T>& visitor, const std::string& prefix) {
    if constexpr (requires { layer.visit_state(visitor, prefix); }) {
      layer.visit_state(visitor, prefix);
    } else if constexpr (requires { layer.visit(detail::named_forwarder<T>{visitor, prefix}); }) {
      layer.visit(detail::named_forwarder<T>{visitor, prefix});
    }
  }

  L layer_;
};

template <class T, bool Keep, class L>
any_layer<T> made(const L& layer) {
  if constexpr (Keep) {
    return any_layer<T>(Keeping<L>(layer));
  } else {
    return any_layer<T>(layer);
  }
}

constexpr index_t channels = 5;
constexpr extents<4> image{3, 6, 5, channels};

/// Random layers that keep the shape, some of them containers.
template <class T, bool Keep>
Sequential<T> random_chain(picker& pick, index_t length, int depth) {
  Sequential<T> chain;
  for (index_t i = 0; i < length; ++i) {
    switch (pick(0, depth > 0 ? 12 : 10)) {
      case 0:
      case 1:
        chain.add(made<T, Keep>(Conv<T>(conv_shape::square(channels, channels, 3, 1, 1), true)));
        break;
      case 2:
        chain.add(made<T, Keep>(Conv<T>(conv_shape::square(channels, channels, 1))));
        break;
      case 3: {
        LowRankConv<T> conv(conv_shape::square(channels, channels, 3, 1, 1), 2);
        conv.set_recompute(pick(0, 1) == 1);
        chain.add(made<T, Keep>(conv));
        break;
      }
      case 4:
        chain.add(made<T, Keep>(BatchNorm<T>(channels)));
        break;
      case 5:
      case 6:
        chain.add(made<T, Keep>(BatchNorm<T>(channels))).add(made<T, Keep>(ReLU<T>()));
        break;
      case 7:
        chain.add(made<T, Keep>(ReLU<T>()));
        break;
      case 8:
        chain.add(pick(0, 1) == 0 ? made<T, Keep>(Tanh<T>()) : made<T, Keep>(GELU<T>()));
        break;
      case 9:
        chain.add(made<T, Keep>(Dropout<T>(0.3)));
        break;
      case 10:
        chain.add(pick(0, 1) == 0 ? made<T, Keep>(MaxPool<T>(3, 1, 1)) : made<T, Keep>(AvgPool<T>(3, 1, 1)));
        break;
      case 11:
        chain.add(random_chain<T, Keep>(pick, pick(0, 3), depth - 1));
        break;
      default: {
        const bool relu = pick(0, 1) == 1;
        Sequential<T> branch = random_chain<T, Keep>(pick, pick(1, 4), depth - 1), shortcut;
        if (pick(0, 2) > 0) branch.add(made<T, Keep>(BatchNorm<T>(channels)));
        if (pick(0, 2) == 0) shortcut = random_chain<T, Keep>(pick, pick(1, 2), depth - 1);
        chain.add(made<T, Keep>(Residual<T>(branch, shortcut, relu)));
      }
    }
  }
  return chain;
}

template <class T>
network<T> network_of(const Sequential<T>& chain) {
  network<T> net{any_layer<T>(chain)};
  net.initialize(3);
  int k = 0;  // weights and biases of the norms that are not 1 and 0
  for (const auto& entry : net.store().parameters()) {
    if (entry.thing->role() != parameter_role::norm) continue;
    for (T& value : entry.thing->values()) value += static_cast<T>(0.1 * (++k % 7) - 0.2);
  }
  return net;
}
template <class T, bool Keep>
network<T> random_network(std::uint64_t seed) {
  picker pick(seed);
  const index_t length = pick(1, 7);
  return network_of(random_chain<T, Keep>(pick, length, 2));
}

struct memory {
  std::size_t tape = 0, scratch = 0;
};

/// Outputs, input gradients, parameter gradients and buffers of two steps, one without dx, and of inference.
template <class T>
std::vector<T> pass(network<T>& net, const extents<4>& shape, int threads, memory* used = nullptr) {
  cpu_context ctx({threads, 5});
  tensor<T, 4> x(shape), y(net.output_shape(shape)), dy(y.shape()), dx(shape);
  fill_normal<T>(x.flat(), 1.0, {1, 1});
  fill_normal<T>(dy.flat(), 1.0, {1, 2});
  const tensor<T, 4> x_before = x, dy_before = dy;
  std::vector<T> all;
  const auto keep = [&all](std::span<const T> values) {
    all.insert(all.end(), values.begin(), values.end());
  };
  ctx.set_mode(run_mode::training);
  for (std::uint64_t step = 0; step < 2; ++step) {
    ctx.begin_step(step);
    net.forward(ctx, x.view(), y.view());
    if (used != nullptr) used->tape = ctx.tape().memory().in_use();
    keep(std::as_const(y).flat());
    net.backward(ctx, dy.view(), step == 0 ? tensor_view<T, 4>() : dx.view());
    CHECK(ctx.tape().empty());
    CHECK(ctx.scratch().in_use() == 0);
    keep(net.store().gradients());
  }
  if (used != nullptr) used->scratch = ctx.scratch().peak_bytes();
  keep(std::as_const(dx).flat());
  keep(net.store().buffers());
  ctx.set_mode(run_mode::inference);
  net.forward(ctx, x.view(), y.view());
  keep(std::as_const(y).flat());
  CHECK(ctx.tape().empty());
  CHECK(same_bits(x, x_before));
  CHECK(same_bits(dy, dy_before));
  return all;
}

TEST_CASE_TEMPLATE("random chains: the same bits as with everything kept, on any number of threads", T, float,
                   double) {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    CAPTURE(seed);
    network<T> net = random_network<T, false>(seed), kept = random_network<T, true>(seed), again = net;
    memory ours, theirs;
    const std::vector<T> result = pass(net, image, 1, &ours);
    CHECK(same_bits(result, pass(kept, image, 1, &theirs)));
    CHECK(same_bits(result, pass(again, image, 3)));
    CHECK(ours.tape <= theirs.tape);
  }
}

TEST_CASE("random chains: gradients against finite differences") {
  int compared = 0, wrong = 0;
  for (std::uint64_t seed = 200; seed < 240; ++seed) {
    network<double> net = random_network<double, false>(seed);
    cpu_context ctx({1, 5});
    ctx.set_mode(run_mode::training);
    tensor<double, 4> x(image), y(image), dy(image), dx(image);
    fill_normal<double>(x.flat(), 1.0, {1, 1});
    fill_normal<double>(dy.flat(), 1.0, {1, 2});
    const auto objective = [&] {
      ctx.begin_step(0);
      net.forward(ctx, x.view(), y.view());
      double sum = 0.0;
      for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * dy.flat()[i];
      return sum;
    };
    objective();
    net.backward(ctx, dy.view(), dx.view());
    const std::vector<double> gradients(net.store().gradients().begin(), net.store().gradients().end());
    int here = 0;
    const auto compare = [&](double& value, double gradient) {
      const double slope = slope_at(value, objective);
      ++compared;
      if (!(std::abs(slope - gradient) / (1.0 + std::abs(slope)) < 1e-5)) ++here;
    };
    for (std::size_t i = 0; i < x.flat().size(); i += 29) compare(x.flat()[i], dx.flat()[i]);
    for (std::size_t i = 0; i < gradients.size(); i += 37) compare(net.store().values()[i], gradients[i]);
    CAPTURE(seed);
    CHECK(here <= 2);  // a step may cross a kink
    wrong += here;
  }
  CHECK(wrong * 100 <= compared);
}

/// Elements on the tape or in scratch, rounded as the arenas do.
std::size_t bytes_of(index_t elements) {
  const std::size_t bytes = static_cast<std::size_t>(elements) * sizeof(float);
  return (bytes + memory_alignment - 1) / memory_alignment * memory_alignment;
}

template <bool Keep>
Sequential<float> block_branch(bool low_rank) {
  const conv_shape shape = conv_shape::square(16, 16, 3, 1, 1);
  const auto conv = [&] {
    return low_rank ? made<float, Keep>(LowRankConv<float>(shape, 4)) : made<float, Keep>(Conv<float>(shape));
  };
  Sequential<float> branch;
  branch.add(conv()).add(made<float, Keep>(BatchNorm<float>(16))).add(made<float, Keep>(ReLU<float>()));
  branch.add(conv()).add(made<float, Keep>(BatchNorm<float>(16)));
  return branch;
}

TEST_CASE("memory of a step: residual blocks keep neither the inner batch norm's output nor gradients") {
  const extents<4> shape{4, 16, 16, 16};
  const std::size_t activation = bytes_of(volume<4>(shape));
  for (const bool low_rank : {false, true}) {
    Sequential<float> ours, theirs;
    for (int i = 0; i < 3; ++i) {
      ours.add(Residual<float>(block_branch<false>(low_rank)));
      theirs.add(made<float, true>(Residual<float>(block_branch<true>(low_rank))));
    }
    network<float> net = network_of(ours), kept = network_of(theirs);
    memory mine, all;
    CHECK(same_bits(pass(net, shape, 1, &mine), pass(kept, shape, 1, &all)));
    CHECK(all.tape - mine.tape == 3 * activation);
    // Before: two gradients between the blocks, two in a block. Now: one, and one which is the recomputed
    // input first.
    CHECK(all.scratch - mine.scratch > 2 * activation - 4096);
  }
}

TEST_CASE("memory of a step: a chain of convolutions keeps their outputs; unread values are not kept") {
  const extents<4> shape{4, 16, 16, 16};
  const std::size_t activation = bytes_of(volume<4>(shape));
  const auto chain = [](auto keep) {
    constexpr bool all = decltype(keep)::value;
    Sequential<float> net;
    net.add(made<float, all>(Conv<float>(conv_shape::square(16, 16, 3, 1, 1))));
    net.add(made<float, all>(ReLU<float>()));  // reads its output: its input is dropped
    for (int i = 0; i < 3; ++i) {
      net.add(made<float, all>(Conv<float>(conv_shape::square(16, 16, 3, 1, 1))));
      net.add(made<float, all>(BatchNorm<float>(16)));
      net.add(made<float, all>(ReLU<float>()));  // all but the last: written again for the next convolution
    }
    net.add(made<float, all>(GlobalAvgPool<float>()));  // reads nothing
    return network_of(net);
  };
  network<float> net = chain(std::false_type()), kept = chain(std::true_type());
  memory mine, all;
  CHECK(same_bits(pass(net, shape, 1, &mine), pass(kept, shape, 1, &all)));
  CHECK(all.tape - mine.tape == 4 * activation);
  CHECK(mine.scratch <= all.scratch);
}

/// Fails in its backward pass when told to.
struct Failing {
  using value_type = float;
  static constexpr bool reads_output = false;
  const bool* fails;
  std::string describe() const { return "Failing"; }
  extents<4> output_shape(const extents<4>& input) const { return input; }
  void forward(cpu_context& ctx, const tensor_view<const float, 4>& x, const tensor_view<float, 4>& y) const {
    ops::copy_elements(ctx, x.data(), y.data(), x.size());
  }
  void backward(cpu_context& ctx, const tensor_view<const float, 4>& dy,
                const tensor_view<float, 4>& dx) const {
    if (*fails) throw std::runtime_error("failed");
    if (!dx.is_null()) ops::copy_elements(ctx, dy.data(), dx.data(), dx.size());
  }
};

TEST_CASE("an exception in a backward pass leaves the context usable") {
  bool fails = false;
  Sequential<float> branch, chain;
  branch.add(Conv<float>(conv_shape::square(channels, channels, 3, 1, 1))).add(Failing{&fails});
  branch.add(BatchNorm<float>(channels)).add(ReLU<float>());
  branch.add(Conv<float>(conv_shape::square(channels, channels, 3, 1, 1))).add(BatchNorm<float>(channels));
  chain.add(Residual<float>(branch)).add(Residual<float>(branch));
  network<float> net = network_of(chain);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x(image), y(image), dx(image), dx2(image);
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  const auto step = [&](tensor<float, 4>& to) {
    ctx.begin_step(0);
    net.forward(ctx, x.view(), y.view());
    net.backward(ctx, y.view(), to.view());
  };
  step(dx);
  fails = true;
  CHECK_THROWS_AS(step(dx2), std::runtime_error);
  fails = false;
  CHECK(ctx.scratch().in_use() == 0);
  step(dx2);
  CHECK(same_bits(dx, dx2));
  CHECK(ctx.tape().empty());
}

TEST_CASE("a step without its forward pass in training mode is told so") {
  Sequential<float> chain;
  chain.add(Conv<float>(conv_shape::square(channels, channels, 1))).add(BatchNorm<float>(channels));
  network<float> net = network_of(chain);
  cpu_context ctx;
  tensor<float, 4> x(image), y(image);
  net.forward(ctx, x.view(), y.view());
  CHECK_THROWS_AS(net.backward(ctx, y.view()), state_error);
}

TEST_CASE_TEMPLATE("BatchNorm: an output written again has the same bits", T, float, double) {
  for (const extents<4>& shape :
       {extents<4>{3, 6, 5, 5}, extents<4>{2, 17, 31, 64}, extents<4>{0, 4, 4, 3}}) {
    for (const bool relu : {false, true}) {
      cpu_context ctx({2, 0});
      ctx.set_mode(run_mode::training);
      BatchNorm<T> norm(shape[3]);
      tensor<T, 4> x(shape), y(shape), again(shape);
      fill_normal<T>(x.flat(), 1.0, {1, 1});
      if (x.size() > 0) x.flat()[7] = std::numeric_limits<T>::quiet_NaN();
      std::vector<typename ops::relu_mask<T>::word> words(
          static_cast<std::size_t>(ops::relu_mask<T>::size({shape[0] * shape[1] * shape[2], shape[3]})));
      forward_record<T> record;
      forward_fusion<T> fusion;
      fusion.relu = relu;
      if (relu) fusion.mask.words = words.data();
      fusion.record = &record;
      norm.forward_fused(ctx, x.view(), y.view(), fusion);
      norm.recompute(ctx, record, again.view());
      CHECK(same_bits(y, again));
      tensor<T, 4> other({1, 1, 1, shape[3]});
      CHECK_THROWS_AS(norm.recompute(ctx, record, other.view()), shape_error);
      ctx.tape().clear();
    }
  }
}

TEST_CASE_TEMPLATE("dx in the place of x: the same bits", T, float, double) {
  const auto check = [](auto layer, const extents<4>& shape) {
    layer.initialize(random_stream(1, 2));
    cpu_context ctx({2, 0});
    ctx.set_mode(run_mode::training);
    tensor<T, 4> x(shape), y(layer.output_shape(shape)), dy(y.shape()), dx(shape);
    fill_normal<T>(x.flat(), 1.0, {1, 1});
    fill_normal<T>(dy.flat(), 1.0, {1, 2});
    const auto gradients = [&](const tensor_view<T, 4>& to) {
      layer.forward(ctx, x.view(), y.view());
      layer.backward(ctx, dy.view(), to);
      std::vector<T> all;
      for (auto* p : parameters_of(layer)) {
        all.insert(all.end(), p->gradient().begin(), p->gradient().end());
      }
      return all;
    };
    const std::vector<T> apart = gradients(dx.view());
    CHECK(same_bits(apart, gradients(x.view())));
    CHECK(same_bits(x, dx));
  };
  for (const index_t stride : {1, 2}) {
    check(Conv<T>(conv_shape::square(6, 9, 3, stride, 1), true), {3, 9, 8, 6});
    check(Conv<T>(conv_shape::square(6, 9, 1, stride)), {3, 9, 8, 6});
    check(LowRankConv<T>(conv_shape::square(6, 9, 3, stride, 1), 3, true), {3, 9, 8, 6});
    check(Conv<T>(conv_shape::square(40, 48, 3, stride, 1)), {40, 4, 4, 40});
  }
  check(BatchNorm<T>(6), {3, 9, 8, 6});
  check(BatchNorm<T>(64), {5, 16, 16, 64});
}

}  // namespace
