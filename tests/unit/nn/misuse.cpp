// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What every kind of layer does with views that are not dense, with backward passes in the wrong order, and
// once it was moved from: an error that names the layer, or the right result.
#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/micro_batches.hpp>
#include <pufferfish/distributed/self.hpp>
#include <pufferfish/lowrank/layers/attention.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/nn/layers/attention.hpp>
#include <pufferfish/nn/layers/embedding.hpp>
#include <pufferfish/nn/layers/feed_forward.hpp>
#include <pufferfish/nn/layers/layer_norm.hpp>
#include <pufferfish/nn/layers/positional_encoding.hpp>
#include <pufferfish/nn/token_loss.hpp>
#include <pufferfish/optim/frobenius_decay.hpp>
#include <pufferfish/optim/sgd.hpp>
#include <pufferfish/prune/scale_sparsity.hpp>

#include "../support/small_transformer.hpp"

namespace {

using namespace pufferfish;

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const error& e) {
    return e.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

enum class form { dense, permuted, padded, null };

/// A view of a shape and its memory, filled with the same numbers in every form.
template <std::size_t N>
class placed {
 public:
  placed(const extents<N>& shape, form how, std::uint64_t seed) {
    if (how == form::permuted) {
      extents<N> order_shape{};
      std::array<std::size_t, N> order{};
      for (std::size_t d = 0; d < N; ++d) {
        order_shape[d] = shape[N - 1 - d];
        order[d] = N - 1 - d;
      }
      memory_ = tensor<float, N>(order_shape);
      view_ = memory_.view().permute(order);
    } else if (how != form::null) {
      extents<N> wide = shape;
      if (how == form::padded) wide[N - 1] += 3;
      memory_ = tensor<float, N>(wide);
      view_ = memory_.view().slice(N - 1, 0, shape[N - 1]);
    } else {
      view_ = tensor_view<float, N>(nullptr, shape);
    }
    if (how == form::null) return;
    tensor<float, N> values(shape);
    fill_uniform(values.flat(), 0.25, 1.0, random_stream{seed, 1});
    copy(std::as_const(values).view(), view_);
  }

  const tensor_view<float, N>& view() const { return view_; }
  tensor_view<const float, N> read() const { return view_; }
  /// Whether the form is another than the dense one for this shape.
  bool differs() const { return view_.is_null() || !view_.is_contiguous(); }
  std::vector<float> values() const {
    const tensor<float, N> dense{read()};
    return {dense.flat().begin(), dense.flat().end()};
  }

 private:
  tensor<float, N> memory_;
  tensor_view<float, N> view_;
};

template <class L>
L initialized(L layer) {
  if constexpr (requires { layer.initialize(random_stream{1, 2}); }) layer.initialize(random_stream{1, 2});
  return layer;
}

/// Null views mean something to it: no residual, a state of zeros.
template <class L>
concept takes_null = L::takes_null;

constexpr form wrong_forms[] = {form::permuted, form::padded, form::null};

/// One of x, y, dy, dx at a time in each form that is not dense.
template <std::size_t N, class L>
void check_views(const L& given, const extents<N>& in, const extents<N>& out) {
  const L layer = initialized(given);
  struct results {
    std::vector<float> y, dx;
  };
  const auto run = [&](form x_form, form y_form, form dy_form, form dx_form, bool training) {
    cpu_context ctx;
    ctx.set_mode(training ? run_mode::training : run_mode::inference);
    ctx.begin_step(1);
    const placed<N> x(in, x_form, 1), y(out, y_form, 2), dy(out, dy_form, 3), dx(in, dx_form, 4);
    try {
      layer.forward(ctx, x.read(), y.view());
    } catch (...) {
      CHECK(ctx.tape().empty());  // a refused pass keeps nothing
      throw;
    }
    results found{y.values(), {}};
    if (!training) return found;
    layer.backward(ctx, dy.read(), dx.view());
    CHECK(ctx.tape().empty());
    if (dx_form != form::null) found.dx = dx.values();
    return found;
  };
  const form dense = form::dense;
  for (const bool training : {true, false}) {
    const results expected = run(dense, dense, dense, dense, training);
    for (const form how : wrong_forms) {
      for (int which = 0; which < (training ? 4 : 2); ++which) {
        if (how == form::null && takes_null<L>) continue;
        if (!placed<N>(which == 0 || which == 3 ? in : out, how, 1).differs()) continue;
        CAPTURE(given.describe());
        CAPTURE(static_cast<int>(how));
        CAPTURE(which);
        CAPTURE(training);
        results found;
        const std::string text = error_of([&] {
          found = run(which == 0 ? how : dense, which == 1 ? how : dense, which == 2 ? how : dense,
                      which == 3 ? how : dense, training);
        });
        if (which == 3 && how == form::null) {
          CHECK(text.empty());  // not wanted
        } else if (text.empty()) {
          CHECK(found.y == expected.y);
          CHECK(found.dx == expected.dx);
        } else {
          CAPTURE(text);
          CHECK(contains(text, given.describe() + ": "));
          CHECK(contains(text, how == form::null ? "null view" : "has strides ("));
        }
      }
    }
  }
}

/// Two layers that look alike, backward in both orders.
template <std::size_t N, class L>
void check_order(const L& given, const extents<N>& in, const extents<N>& out) {
  CAPTURE(given.describe());
  const L first = initialized(given), second = initialized(given);
  const placed<N> x(in, form::dense, 1), y(out, form::dense, 2), dy(out, form::dense, 3),
      dx(in, form::dense, 4);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  ctx.begin_step(1);
  first.forward(ctx, x.read(), y.view());
  second.forward(ctx, x.read(), y.view());
  CHECK_THROWS_AS(first.backward(ctx, dy.read(), dx.view()), state_error);
  const std::string text = error_of([&] { first.backward(ctx, dy.read(), dx.view()); });
  CHECK(contains(text, given.describe() + ": backward"));
  CHECK(contains(text, "opposite order"));
  // The tape is as it was: the right order still works.
  second.backward(ctx, dy.read(), dx.view());
  first.backward(ctx, dy.read(), dx.view());
  CHECK(ctx.tape().empty());
  CHECK_THROWS_AS(first.backward(ctx, dy.read(), dx.view()), state_error);
}

struct state_counter final : state_visitor<float> {
  void on_parameter(const std::string&, parameter<float>& p) override { found += p.values().size(); }
  void on_buffer(const std::string&, state_buffer<float>& b) override { found += b.values().size(); }
  std::size_t found = 0;
};

/// A layer that was moved from: an error that names it unless it has nothing that could be moved.
template <std::size_t N, class L>
void check_moved(const L& given, const extents<N>& in, const extents<N>& out) {
  CAPTURE(given.describe());
  L layer = initialized(given);
  const placed<N> x(in, form::dense, 1), y(out, form::dense, 2), dy(out, form::dense, 3),
      dx(in, form::dense, 4);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  ctx.begin_step(1);
  layer.forward(ctx, x.read(), y.view());
  const std::vector<float> expected = y.values();
  const L to = std::move(layer);
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  const std::string backward = error_of([&] { layer.backward(ctx, dy.read(), dx.view()); });
  ctx.begin_step(1);
  const std::string forward = error_of([&] { layer.forward(ctx, x.read(), y.view()); });
  if (forward.empty()) {
    CHECK(backward.empty());
    CHECK(y.values() == expected);
  } else {
    CHECK(contains(forward, "moved from"));
    CHECK(contains(backward, "moved"));
    if constexpr (requires(state_counter & visitor) { layer.visit_state(visitor, std::string()); }) {
      state_counter visitor;
      CHECK(contains(error_of([&] { layer.visit_state(visitor, std::string()); }), "moved from"));
    }
  }
  ctx.begin_step(1);
  to.forward(ctx, x.read(), y.view());
  CHECK(y.values() == expected);
  // Another layer in its place.
  layer = to;
  // NOLINTEND(bugprone-use-after-move)
  ctx.begin_step(1);
  layer.forward(ctx, x.read(), y.view());
  CHECK(y.values() == expected);
}

template <std::size_t N, class L>
void check_all(const L& layer, const extents<N>& in, const extents<N>& out) {
  check_views<N>(layer, in, out);
  check_order<N>(layer, in, out);
  check_moved<N>(layer, in, out);
}
template <class L>
void check_images(const L& layer, const extents<4>& in) {
  check_all<4>(layer, in, layer.output_shape(in));
}

// Other forms of passes under the names of forward and backward.

template <class L>
struct adding : L {
  using L::L;
  adding(L layer) : L(std::move(layer)) {}
  void backward(cpu_context& ctx, const auto& dy, const auto& dx) const {
    dx.is_null() ? L::backward(ctx, dy, dx) : L::backward_add(ctx, dy, dx);
  }
};

template <class L>
struct token_table {
  L table{7, 6};
  std::vector<std::int32_t> tokens{3, 1, 4, 1, 5};
  std::string describe() const { return table.describe(); }
  void forward(cpu_context& ctx, const tensor_view<const float, 2>&, const tensor_view<float, 2>& y) const {
    table.forward(ctx, tokens, y);
  }
  void backward(cpu_context& ctx, const tensor_view<const float, 2>& dy, const tensor_view<float, 2>&) const {
    table.backward(ctx, dy);
  }
};

struct norm_of_sum {
  static constexpr bool takes_null = true;
  LayerNorm<float> norm{6};
  std::string describe() const { return norm.describe(); }
  void forward(cpu_context& ctx, const tensor_view<const float, 2>& x, const tensor_view<float, 2>& y) const {
    if (ctx.training()) sum = tensor<float, 2>({x.extent(0), x.extent(1)});
    norm.forward_sum(ctx, ctx.training() ? sum.view() : y, x, {}, y);
  }
  void backward(cpu_context& ctx, const tensor_view<const float, 2>& dy,
                const tensor_view<float, 2>& dx) const {
    norm.backward_sum(ctx, dy, dx, {});
  }
  mutable tensor<float, 2> sum{};
};

/// Attention of five fixed queries to a memory, which is the input here.
struct attention_to {
  MultiHeadAttention<float> inner{attention_options{{6, 2, 3, 4}, 0.0, 0.0}};
  tensor<float, 2> queries{{5, 6}};
  std::array<index_t, 2> runs{0, 5};
  std::string describe() const { return inner.describe(); }
  void initialize(random_stream random) { inner.initialize(random); }
  void forward(cpu_context& ctx, const tensor_view<const float, 2>& x, const tensor_view<float, 2>& y) const {
    const token_runs all{1, runs.data(), runs.data() + 1};
    inner.forward(ctx, std::as_const(queries).view(), x, {all, all, {}}, y);
  }
  void backward(cpu_context& ctx, const tensor_view<const float, 2>& dy,
                const tensor_view<float, 2>& dx) const {
    inner.backward(ctx, dy, {}, dx);
  }
};

/// Its member functions for images only, under one name.
template <class L>
struct rows_of_block {
  L inner;
  std::string describe() const { return inner.describe(); }
  void initialize(random_stream random) { inner.initialize(random); }
  void forward(cpu_context& ctx, const tensor_view<const float, 2>& x, const tensor_view<float, 2>& y) const {
    inner.forward(ctx, x, y);
  }
  void backward(cpu_context& ctx, const tensor_view<const float, 2>& dy,
                const tensor_view<float, 2>& dx) const {
    inner.backward(ctx, dy, dx);
  }
};

/// A recurrent layer that starts from zeros.
template <class L>
struct from_zeros {
  L inner;
  std::string describe() const { return inner.describe(); }
  void initialize(random_stream random) { inner.initialize(random); }
  void forward(cpu_context& ctx, const tensor_view<const float, 3>& x, const tensor_view<float, 3>& y) const {
    inner.forward(ctx, x, {}, y);
  }
  void backward(cpu_context& ctx, const tensor_view<const float, 3>& dy,
                const tensor_view<float, 3>& dx) const {
    inner.backward(ctx, dy, dx);
  }
};

/// An LSTM whose input is a state. Without the state's gradient there is nothing to compare: dx is left
/// alone.
struct state_reader {
  static constexpr bool takes_null = true;
  LSTM<float> inner{4, 6};
  tensor<float, 3> x{{2, 3, 4}}, y{{2, 3, 6}};
  std::string describe() const { return inner.describe(); }
  void initialize(random_stream random) { inner.initialize(random); }
  void forward(cpu_context& ctx, const tensor_view<const float, 2>& h,
               const tensor_view<float, 2>& to) const {
    const tensor_view<float, 3> own(const_cast<float*>(y.data()), y.shape());
    inner.forward(ctx, x.view(), {h, h}, own, {to, to});
  }
  void backward(cpu_context& ctx, const tensor_view<const float, 2>& dh,
                const tensor_view<float, 2>& dx) const {
    const tensor<float, 3> dy({2, 3, 6});
    if (dx.is_null()) return inner.backward(ctx, dy.view(), {}, {dh, dh}, {});
    inner.backward(ctx, dy.view(), {}, {dh, dh}, {dx, dx});
  }
};

/// A layer that is not the library's and takes any view for a dense one.
struct Twice {
  using value_type = float;
  std::string describe() const { return "Twice"; }
  extents<4> output_shape(const extents<4>& input) const { return input; }
  void forward(cpu_context& ctx, const tensor_view<const float, 4>& x, const tensor_view<float, 4>& y) const {
    for (index_t i = 0; i < x.size(); ++i) y.data()[i] = 2.0F * x.data()[i];
    if (ctx.training()) ctx.tape().push_value(*this, 1);
  }
  void backward(cpu_context& ctx, const tensor_view<const float, 4>& dy,
                const tensor_view<float, 4>& dx) const {
    ctx.tape().pop_value<int>(*this);
    if (dx.is_null()) return;
    for (index_t i = 0; i < dx.size(); ++i) dx.data()[i] = 2.0F * dy.data()[i];
  }
};

Sequential<float> block(bool relu) {
  Sequential<float> layers;
  layers.add(Conv<float>(conv_shape::square(3, 4, 3, 1, 1)));
  layers.add(BatchNorm<float>(4));
  if (relu) layers.add(ReLU<float>());
  layers.add(LowRankConv<float, dynamic_rank>(conv_shape::square(4, 3, 3, 1, 1), 2));
  return layers;
}
Sequential<float> normed(index_t in, index_t out) {
  Sequential<float> layers;
  layers.add(Conv<float>(conv_shape::square(in, out, 1)));
  layers.add(BatchNorm<float>(out));
  return layers;
}

constexpr extents<4> images{2, 5, 4, 3};

}  // namespace

TEST_CASE("misuse: convolutions, low-rank ones, and layers of rows") {
  const conv_shape three = conv_shape::square(3, 5, 3, 1, 1), strided = conv_shape::square(3, 5, 3, 2, 1),
                   one = conv_shape::square(3, 5, 1);
  for (const conv_shape& shape : {three, strided, one}) {
    check_images(Conv<float>(shape, true), images);
    check_images(LowRankConv<float, dynamic_rank>(shape, 2, true), images);
    LowRankConv<float, 2> recomputing(shape);
    recomputing.set_recompute(true);
    check_images(recomputing, images);
    check_images(adding<Conv<float>>(Conv<float>(shape)), images);
    check_images(any_layer<float>(Conv<float>(shape)), images);
  }
  check_images(LowRankNormConv<float>(three, 2), images);
  check_all<2>(Linear<float>(6, 5), {7, 6}, {7, 5});
  check_all<2>(LowRankLinear<float, 3>(6, 5), {7, 6}, {7, 5});
  check_all<2>(adding<LowRankLinear<float, dynamic_rank>>(LowRankLinear<float, dynamic_rank>(6, 5, 2)),
               {7, 6}, {7, 5});
  check_all<2>(adding<Linear<float>>(Linear<float>(6, 5)), {7, 6}, {7, 5});
  check_images(any_layer<float>(Linear<float>(3, 5)), images);
  check_images(any_layer<float>(LowRankLinear<float, 2>(3, 5)), images);
  check_all<2>(token_table<Embedding<float>>{}, {5, 6}, {5, 6});
  check_all<2>(token_table<LowRankEmbedding<float, 3>>{}, {5, 6}, {5, 6});
}

TEST_CASE("misuse: activations, norms, pooling, dropout") {
  check_images(ReLU<float>(), images);
  check_images(GELU<float>(), images);
  check_images(GELUTanh<float>(), images);
  check_images(Tanh<float>(), images);
  check_images(Sigmoid<float>(), images);
  check_images(Dropout<float>(0.5), images);
  check_images(Flatten<float>(), images);
  check_images(BatchNorm<float>(3), images);
  check_images(ChannelSelect<float>(3, {0, 2}), images);
  check_images(LayerNorm<float>(3), images);
  check_all<2>(norm_of_sum{}, {5, 6}, {5, 6});
  check_images(MaxPool<float>(2), images);
  check_images(AvgPool<float>(2), images);
  check_images(GlobalAvgPool<float>(), images);
  check_images(PositionalEncoding<float>(3, 20), images);
}

TEST_CASE("misuse: recurrent layers and attention, as sequences, rows and images") {
  check_images(LSTM<float>(4, 6), {3, 2, 1, 4});
  check_images(LowRankLSTM<float, dynamic_rank>(4, 6, 2, 3), {3, 2, 1, 4});
  check_all<3>(from_zeros<LSTM<float>>{LSTM<float>(4, 6)}, {3, 2, 4}, {3, 2, 6});
  check_all<3>(from_zeros<LowRankLSTM<float, 2>>{LowRankLSTM<float, 2>(4, 6)}, {3, 2, 4}, {3, 2, 6});
  check_all<2>(state_reader{}, {3, 6}, {3, 6});
  check_all<3>(LowRankAttention<float, 2>(attention_shape{6, 2, 3, 4}), {3, 5, 6}, {3, 5, 6});
  check_images(MultiHeadAttention<float>(attention_options{{6, 2, 3, 4}}), {2, 3, 2, 6});
  check_all<2>(attention_to{}, {5, 6}, {5, 6});
  check_images(FeedForward<float>(feed_forward_options{6, 10}), {2, 3, 2, 6});
  check_all<2>(rows_of_block<FeedForward<float>>{FeedForward<float>(feed_forward_options{6, 10})}, {5, 6},
               {5, 6});
}

TEST_CASE("misuse: containers, fused or not, and layers from elsewhere") {
  for (const bool relu : {true, false}) {
    check_images(block(relu), images);
    check_images(Residual<float>(block(relu), {}, relu), images);
    check_images(Residual<float>(normed(3, 3), {}, relu), images);
    check_images(Residual<float>(normed(3, 4), normed(3, 4), relu), images);
  }
  check_images(any_layer<float>(block(true)), images);
  check_images(any_layer<float>(Twice{}), images);
  const network<float> net{any_layer<float>(block(true))};
  struct net_layer {
    network<float> net;
    std::string describe() const { return net.root().describe(); }
    void forward(cpu_context& ctx, const tensor_view<const float, 4>& x,
                 const tensor_view<float, 4>& y) const {
      net.forward(ctx, x, y);
    }
    void backward(cpu_context& ctx, const tensor_view<const float, 4>& dy,
                  const tensor_view<float, 4>& dx) const {
      net.backward(ctx, dy, dx);
    }
  };
  check_all<4>(net_layer{net}, images, images);
}

TEST_CASE("misuse: losses of strided logits") {
  cpu_context ctx;
  const std::vector<std::int32_t> labels{1, 0, 2};
  for (const form how : {form::permuted, form::padded}) {
    const placed<4> images_of(extents<4>{3, 1, 1, 4}, form::dense, 1);
    const placed<4> odd(extents<4>{3, 1, 1, 4}, how, 1);
    const placed<2> rows({3, 4}, form::dense, 1), odd_rows({3, 4}, how, 1);
    const SoftmaxCrossEntropy<float> classes;
    const TokenLoss<float> tokens;
    for (const std::string& text :
         {error_of([&] { classes(ctx, odd.read(), labels, 1.0, images_of.view()); }),
          error_of([&] { classes(ctx, images_of.read(), labels, 1.0, odd.view()); })}) {
      CHECK(contains(text, "SoftmaxCrossEntropy: "));
    }
    for (const std::string& text :
         {error_of([&] { tokens(ctx, odd_rows.read(), labels, 1.0, rows.view()); }),
          error_of([&] { tokens(ctx, rows.read(), labels, 1.0, odd_rows.view()); })}) {
      CHECK(contains(text, "TokenLoss: "));
    }
  }
}

TEST_CASE("misuse: models of tokens") {
  const auto options = test::small_transformer();
  const transformer<float> translator(options);
  lstm_lm_options small;
  small.vocabulary = 7;
  small.width = 4;
  small.dropout = 0.0;
  const lstm_lm<float> language(small), other(small);
  auto state = language.make_state(2);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  const tensor<std::int32_t, 2> ids({3, 2});
  const tensor_view<const std::int32_t, 2> tokens = ids.view(), turned(ids.data(), {3, 2}, {1, 3});
  for (const form how : wrong_forms) {
    const placed<2> logits({6, 7}, how, 1), words({6, 13}, how, 1), right({6, 7}, form::dense, 1),
        right_words({6, 13}, form::dense, 1);
    const auto refused = [&](const std::string& name, auto&& pass) {
      ctx.begin_step(1);
      const std::string text = error_of(pass);
      CAPTURE(text);
      CHECK(contains(text, name));
      CHECK(contains(text, how == form::null ? "null view" : "has strides"));
    };
    refused(language.describe(), [&] { language.forward(ctx, tokens, state, logits.view()); });
    refused(translator.describe(), [&] { translator.forward(ctx, tokens, tokens, words.view()); });
    refused(language.describe(), [&] {
      language.forward(ctx, tokens, state, right.view());
      language.backward(ctx, logits.read());
    });
    refused(translator.describe(), [&] {
      translator.forward(ctx, tokens, tokens, right_words.view());
      translator.backward(ctx, words.read());
    });
  }
  const auto refused = [&](auto&& pass) { return contains(error_of(pass), "has strides"); };
  const label_smoothing none;
  CHECK(refused([&] { language.loss(ctx, turned, tokens, state); }));
  CHECK(refused([&] { language.loss(ctx, tokens, turned, state); }));
  CHECK(refused([&] { (void)translator.output_rows(turned); }));
  CHECK(refused([&] { translator.loss(ctx, turned, tokens, tokens, none); }));
  CHECK(refused([&] { translator.loss(ctx, tokens, turned, tokens, none); }));
  CHECK(refused([&] { translator.loss(ctx, tokens, tokens, turned, none); }));

  ctx.begin_step(1);
  auto other_state = other.make_state(2);
  language.loss(ctx, tokens, tokens, state);
  other.loss(ctx, tokens, tokens, other_state);
  CHECK(contains(error_of([&] { language.backward(ctx, 1.0); }), language.describe() + ": backward"));
  other.backward(ctx, 1.0);
  language.backward(ctx, 1.0);

  lstm_lm<float> moving(small);
  transformer<float> moving_too(options);
  const lstm_lm<float> to = std::move(moving);
  const transformer<float> there = std::move(moving_too);
  const auto state_to = std::move(other_state);
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  CHECK(contains(error_of([&] { moving.loss(ctx, tokens, tokens, state); }), "lstm_lm of 2 layers"));
  CHECK(contains(error_of([&] { moving_too.loss(ctx, tokens, tokens, tokens, none); }),
                 "transformer of 2 + 2"));
  CHECK(contains(error_of([&] { language.loss(ctx, tokens, tokens, other_state); }), "lstm_lm_state"));
  // NOLINTEND(bugprone-use-after-move)
}

TEST_CASE("misuse: models, stores and optimizers of what was moved away") {
  const auto is_refused = [](auto&& use) {
    CHECK_THROWS_AS(use(), state_error);
    return contains(error_of(use), "moved from");
  };
  cpu_context ctx;
  network<float> net{any_layer<float>(block(true))};
  SGD<float> optimizer(make_optimizer_target(net.store()), sgd_options{});
  network<float> to = std::move(net);
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  CHECK(net.is_moved_from());
  CHECK(is_refused([&] { (void)net.root(); }));
  CHECK(is_refused([&] { (void)net.output_shape(images); }));
  CHECK(is_refused([&] { (void)net.store(); }));
  CHECK(is_refused([&] { (void)net.structure(); }));
  CHECK(is_refused([&] { net.initialize(1); }));
  CHECK(is_refused([&] { (void)network<float>(std::as_const(net)); }));
  optimizer.step(ctx, 0.1);  // moving a model moves no arena
  net = to;
  CHECK(net.structure() == to.structure());

  Sequential<float> layers = block(true);
  const Sequential<float> elsewhere = std::move(layers);
  CHECK(is_refused([&] { (void)layers.output_shape(images); }));
  CHECK(is_refused([&] { const network<float> made{any_layer<float>(layers)}; }));
  layers.add(ReLU<float>());
  CHECK(layers.output_shape(images) == images);

  any_layer<float> layer{ReLU<float>()};
  const any_layer<float> there = std::move(layer);
  CHECK(is_refused([&] { (void)layer.describe(); }));
  CHECK(is_refused([&] { (void)any_layer<float>(std::as_const(layer)); }));
  CHECK(layer.target<ReLU<float>>() == nullptr);

  Conv<float> conv(conv_shape::square(3, 4, 3));
  parameter_store<float> store;
  const auto visit = [&](state_visitor<float>& visitor) {
    conv.visit([&](const char* name, parameter<float>& p) { visitor.on_parameter(name, p); });
  };
  store.pack(visit);
  SGD<float> early(make_optimizer_target(store), sgd_options{});
  parameter_store<float> kept = std::move(store);
  CHECK(is_refused([&] { (void)make_optimizer_target(store); }));
  CHECK_THROWS_WITH_AS(early.step(ctx, 0.1), doctest::Contains("made for generation 1"), state_error);
  CHECK(kept.values().size() == 108);
  const Conv<float> gone = std::move(conv);
  CHECK(contains(error_of([&] { store.pack(visit); }), "the layer of weight: was moved from"));
  CHECK(is_refused([&] { (void)conv.weight(); }));
  // NOLINTEND(bugprone-use-after-move)
}

/// Calls step() after `net` was assigned another value, and after its end.
template <class Make>
void check_outlives_network(const Make& make) {
  for (const bool assigned : {true, false}) {
    CAPTURE(assigned);
    std::optional<network<float>> net(any_layer<float>(block(true)));
    auto user = make(*net);
    assigned ? void(*net = network<float>{any_layer<float>(block(true))}) : net.reset();
    CHECK_THROWS_AS(user(), state_error);
  }
}

TEST_CASE("misuse: optimizers and exchanges of a network that was assigned to, or is gone") {
  cpu_context ctx;
  check_outlives_network([&](network<float>& net) {
    return [&ctx, sgd = SGD<float>(make_optimizer_target(net.store()), sgd_options{})]() mutable {
      sgd.step(ctx, 0.1);
    };
  });
  check_outlives_network([&](network<float>& net) {
    return [&ctx, decay = frobenius_decay<float>(net, {.strength = 0.1})]() mutable {
      decay.begin_step(ctx, 0.1);
    };
  });
  check_outlives_network([](network<float>& net) {
    return [added = scale_sparsity<float>(net.store(), 0.1)]() mutable { added.add(); };
  });
  self comm;
  check_outlives_network([&](network<float>& net) {
    auto exchange = std::make_shared<gradient_exchange<float, self>>(net.store(), comm);
    return [&ctx, exchange] { exchange->begin(ctx); };
  });
  // Its destructor only.
  std::optional<network<float>> net(any_layer<float>(block(true)));
  const micro_batches<float> batches(net->store(), 2);
  net.reset();
}

/// Passes of `layer` over x whose results overlap their inputs. `y_may`, `dx_may`: whether they may be the
/// same memory.
template <class L>
void check_overlap(const L& layer, index_t width, bool y_may, bool dx_may) {
  CAPTURE(layer.describe());
  cpu_context ctx;
  tensor<float, 4> memory({3, 2, 2, width}), other({2, 2, 2, width});
  const extents<4> shape = other.shape();
  const tensor_view<float, 4> x(memory.data(), shape), shifted(memory.data() + 1, shape);
  const auto overlaps = [&](const tensor_view<float, 4>& y) {
    return contains(error_of([&] { layer.forward(ctx, tensor_view<const float, 4>(x), y); }), "overlaps");
  };
  CHECK(overlaps(shifted));
  CHECK(overlaps(x) == !y_may);
  CHECK_FALSE(overlaps(other.view()));
  const mode_scope training(ctx, run_mode::training);
  const tensor_view<const float, 4> dy(memory.data(), shape);
  for (const tensor_view<float, 4>& dx : {x, shifted}) {
    const tensor<float, 4> input(shape);
    layer.forward(ctx, tensor_view<const float, 4>(input), other.view());
    const std::string text = error_of([&] { layer.backward(ctx, dy, dx); });
    const bool allowed = dx_may && dx.data() == x.data();
    CHECK(contains(text, "overlaps") == !allowed);
  }
}

TEST_CASE("misuse: results that overlap their inputs") {
  check_overlap(Conv<float>(conv_shape::square(3, 3, 3, 1, 1)), 3, false, false);
  check_overlap(LowRankConv<float>(conv_shape::square(3, 3, 3, 1, 1), 1), 3, false, false);
  check_overlap(any_layer<float>{Linear<float>(3, 3)}, 3, false, false);
  check_overlap(any_layer<float>{LowRankLinear<float>(3, 3, 1)}, 3, false, false);
  check_overlap(ReLU<float>(), 3, true, true);
  check_overlap(GELU<float>(), 3, true, true);

  check_overlap(BatchNorm<float>(3), 3, false, true);
  check_overlap(PositionalEncoding<float>(3, 20), 3, true, true);
  Sequential<float> layers;
  layers.add(Conv<float>(conv_shape::square(3, 3, 3, 1, 1))).add(ReLU<float>());
  cpu_context ctx;
  tensor<float, 4> x({1, 2, 2, 3});
  for (const any_layer<float>& container :
       {any_layer<float>(layers), any_layer<float>(Residual<float>(layers))}) {
    CHECK(contains(error_of([&] { container.forward(ctx, std::as_const(x).view(), x.view()); }), "overlaps"));
  }

  // What the derivative is computed from must stay in training.
  const mode_scope training(ctx, run_mode::training);
  CHECK(
      contains(error_of([&] { GELU<float>().forward(ctx, std::as_const(x).view(), x.view()); }), "overlaps"));
  CHECK(error_of([&] { Tanh<float>().forward(ctx, std::as_const(x).view(), x.view()); }).empty());
}

TEST_CASE("misuse: shapes with negative extents") {
  const extents<4> negative{-2, 8, 8, 3};
  const auto refused = [&](const auto& layer) {
    CAPTURE(layer.describe());
    for (const std::string& text : {error_of([&] { (void)layer.macs(negative); }), error_of([&] {
                                      (void)any_layer<float>(layer).output_shape(negative);
                                    })}) {
      CHECK(contains(text, layer.describe()));
      CHECK(contains(text, "[-2 x 8 x 8 x 3]"));
      CHECK(contains(text, "negative"));
    }
  };
  refused(Conv<float>(conv_shape::square(3, 4, 3, 1, 1)));
  refused(LowRankConv<float>(conv_shape::square(3, 4, 3, 1, 1), 1));
  refused(Linear<float>(3, 4));
  refused(LowRankLinear<float>(3, 4, 1));
  CHECK(contains(error_of([&] { (void)Conv<float>(conv_shape::square(3, 4, 3)).output_shape(negative); }),
                 "negative number of images"));
  const network<float> net{any_layer<float>(ReLU<float>())};
  CHECK_THROWS_AS((void)net.macs(negative), shape_error);
  CHECK_THROWS_AS((void)net.output_shape({2, 8, -8, 3}), shape_error);
}

TEST_CASE("misuse: two layers, parameters or branches of one name") {
  Sequential<float> layers;
  layers.add("conv", ReLU<float>()).add(ReLU<float>());
  CHECK_THROWS_WITH_AS(layers.add("conv", Tanh<float>()),
                       doctest::Contains("sequential: layers 0 and 2 are both called \"conv\""), value_error);
  layers.add("3", ReLU<float>());
  CHECK_THROWS_AS(layers.add(ReLU<float>()), value_error);  // whose number is a name already
  CHECK(layers.size() == 3);

  Sequential<float> branch;
  branch.add("shortcut", Conv<float>(conv_shape::square(3, 4, 1)));
  CHECK_THROWS_WITH_AS(Residual<float>(branch, normed(3, 4)), doctest::Contains("\"shortcut\""), value_error);
  CHECK_NOTHROW(Residual<float>(branch, normed(3, 4), true, "skip"));
  CHECK_NOTHROW(Residual<float>{branch});

  // A change that leaves two parameters of one name: what was made for the network before throws.
  network<float> net{any_layer<float>(Sequential<float>().add("conv", BatchNorm<float>(3)))};
  cpu_context ctx;
  SGD<float> optimizer(make_optimizer_target(net.store()), {});
  const std::uint64_t generation = net.generation();
  CHECK_THROWS_AS(net.modify([](any_layer<float>& root) {
    Sequential<float> both, one;
    one.add("b", BatchNorm<float>(3));
    both.add("a", one).add("a.b", BatchNorm<float>(3));
    root = std::move(both);
  }),
                  value_error);
  CHECK(net.generation() != generation);
  CHECK_THROWS_AS(optimizer.step(ctx, 0.1), state_error);
  CHECK(net.store().parameters().empty());

  // Names that become one only when they are joined.
  Sequential<float> inner, outer;
  inner.add("conv", BatchNorm<float>(3));
  outer.add("a", inner).add("a.conv", BatchNorm<float>(3));
  CHECK_THROWS_WITH_AS(network<float>(any_layer<float>(outer)), doctest::Contains("\"a.conv.bias\""),
                       value_error);
}
