// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Parity with PyTorch: the layers of language models and translators, their losses, clipping, Adam.
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/layers/attention.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/attention.hpp>
#include <pufferfish/nn/layers/embedding.hpp>
#include <pufferfish/nn/layers/feed_forward.hpp>
#include <pufferfish/nn/layers/lstm.hpp>
#include <pufferfish/nn/layers/positional_encoding.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/nn/token_loss.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>
#include <pufferfish/optim/adam.hpp>
#include <pufferfish/optim/clip.hpp>

#include "../support/golden.hpp"

namespace {

using namespace golden;

constexpr std::int32_t padding = 1;
const std::vector<std::int32_t> targets{3, 1, 0, 10, 1, 5, 5, 2, 9};

template <class T, std::size_t N>
tensor<T, N> hashed_tensor(const std::string& name, const extents<N>& shape, double scale = 1.0) {
  tensor<T, N> result(shape);
  const hashed numbers(name);
  for (std::size_t i = 0; i < result.flat().size(); ++i) {
    result.flat()[i] = static_cast<T>(scale * numbers[i]);
  }
  return result;
}

/// What the file has under a prefix.
template <class T>
class part {
 public:
  part(results& golden, std::string prefix) : golden_(&golden), prefix_(std::move(prefix)) {}

  template <std::size_t N>
  void check(const std::string& name, const tensor<T, N>& ours) {
    check(name, ours.flat());
  }
  void check(const std::string& name, std::span<const T> ours) { require_small(prefix_ + name, ours); }
  void check(const std::string& name, double ours) { require_small(prefix_ + name, ours); }
  void check_gradient(const std::string& name, const parameter<T>& p) {
    require_small(prefix_ + "gradient." + name, p.logical_gradient());
  }

 private:
  template <class Values>
  void require_small(const std::string& name, const Values& ours) {
    CAPTURE(name);
    CHECK(golden_->error_of(name, ours) < tolerance<T>);
  }

  results* golden_;
  std::string prefix_;
};

using pufferfish::detail::for_each_parameter;

template <class Layer>
void give_values(Layer& layer) {
  for_each_parameter(layer, [](const std::string& name, auto& p) { set_value(name, p, false); });
}
template <class Layer, class T>
void check_gradients(part<T> golden, Layer& layer) {
  for_each_parameter(layer, [&](const std::string& name, auto& p) { golden.check_gradient(name, p); });
}

struct training_context : cpu_context {
  training_context() : cpu_context({2, 1}) {
    set_mode(run_mode::training);
    begin_step(0);
  }
};

template <class T>
void low_rank_slots(auto& block, index_t rank) {
  struct replacer final : layer_visitor<T, device::cpu> {
    void on_layer(const std::string&, any_layer<T>& slot) override { slot = slot.twin({rank}); }
    index_t rank = 0;
  } visitor;
  visitor.rank = rank;
  block.visit_layers(visitor, "");
}

TEST_CASE_TEMPLATE("layers of rows: outputs and gradients are PyTorch's", T, float, double) {
  results golden("row_layers");
  const auto check = [&](const std::string& name, any_layer<T> layer, const extents<4>& shape,
                         double scale = 1.0) {
    part<T> own(golden, name + ".");
    give_values(layer);
    const tensor<T, 4> x = hashed_tensor<T>("input", shape, scale);
    tensor<T, 4> y(layer.output_shape(shape)), dx(shape);
    const tensor<T, 4> dy = hashed_tensor<T>("output_gradient", y.shape());
    training_context ctx;
    layer.forward(ctx, x.view(), y.view());
    layer.backward(ctx, dy.view(), dx.view());
    own.check("output", y);
    own.check("input_gradient", dx);
    check_gradients(own, layer);
  };
  FeedForward<T> dense({8, 13, 0.0, 1e-6}), low_rank(dense);
  low_rank_slots<T>(low_rank, 2);
  check("gelu", GELU<T>(), {5, 1, 1, 7}, 4.0);
  check("gelu_tanh", GELUTanh<T>(), {5, 1, 1, 7}, 4.0);
  check("tanh", Tanh<T>(), {5, 1, 1, 7}, 4.0);
  check("sigmoid", Sigmoid<T>(), {5, 1, 1, 7}, 4.0);
  check("layer_norm", LayerNorm<T>(9), {2, 3, 1, 9});
  check("layer_norm_eps", LayerNorm<T>(9, 0.1), {4, 1, 1, 9});
  check("positional_encoding", PositionalEncoding<T>(7, 11), {2, 6, 1, 7});
  check("feed_forward", dense, {2, 3, 1, 8});
  check("low_rank_feed_forward", low_rank, {2, 3, 1, 8});
  check("low_rank_linear_no_bias", LowRankLinear<T>(8, 5, 3, false), {4, 1, 1, 8});
  golden.check_all_used();
}

/// Three steps, then two from the state that they left; gradients go all the way back.
template <class Layer, class T = typename Layer::value_type>
void check_lstm(part<T> golden, Layer layer) {
  give_values(layer);
  for_each_parameter(layer, [](const std::string&, auto& p) { p.set_writers(2); });
  const tensor<T, 3> x = hashed_tensor<T>("input", extents<3>{5, 3, 4}),
                     dy = hashed_tensor<T>("output_gradient", extents<3>{5, 3, 6});
  tensor<T, 3> y({5, 3, 6}), dx(x.shape());
  const extents<2> shape{3, 6};
  tensor<T, 2> h = hashed_tensor<T>("h_before", shape), c = hashed_tensor<T>("c_before", shape),
               dh = hashed_tensor<T>("h_gradient", shape), dc = hashed_tensor<T>("c_gradient", shape);
  const recurrent_state<T> state{h, c}, gradient{dh, dc};
  training_context ctx;
  layer.forward(ctx, x.view().slice(0, 0, 3), state, y.view().slice(0, 0, 3), state);
  layer.forward(ctx, x.view().slice(0, 3, 2), state, y.view().slice(0, 3, 2), state);
  layer.backward(ctx, dy.view().slice(0, 3, 2), dx.view().slice(0, 3, 2), gradient, gradient);
  layer.backward(ctx, dy.view().slice(0, 0, 3), dx.view().slice(0, 0, 3), gradient, gradient);
  golden.check("output", y);
  golden.check("h", h);
  golden.check("c", c);
  golden.check("input_gradient", dx);
  golden.check("h_before_gradient", dh);
  golden.check("c_before_gradient", dc);
  check_gradients(golden, layer);
}

TEST_CASE_TEMPLATE("LSTM, LowRankLSTM: two segments and the way back are PyTorch's", T, float, double) {
  results golden("lstm");
  check_lstm(part<T>(golden, "lstm."), LSTM<T>(4, 6));
  check_lstm(part<T>(golden, "low_rank_lstm."), LowRankLSTM<T>(4, 6, 2, 3));
  golden.check_all_used();
}

/// How sequences.py's attention layers are called: two sequences of four tokens, or of five in a memory.
template <class T>
struct attention_data {
  explicit attention_data(bool cross) : memory_tokens(cross ? 5 : 4) {}

  index_t memory_tokens;
  extents<3> shape{2, 4, 8}, memory_shape{2, memory_tokens, 8};
  tensor<T, 3> x = hashed_tensor<T>("input", shape), memory = hashed_tensor<T>("memory", memory_shape),
               dy = hashed_tensor<T>("output_gradient", shape), y{shape}, dx{shape}, dmemory{memory_shape};

  void check(part<T>& golden) const {
    golden.check("output", y);
    golden.check("input_gradient", dx);
    if (memory_tokens == 5) golden.check("memory_gradient", dmemory);
  }
};

template <class T>
void check_block(results& golden, const std::string& name, const MultiHeadAttention<T>& given,
                 std::vector<index_t> lengths, bool causal = false, bool cross = false) {
  MultiHeadAttention<T> layer = given;
  give_values(layer);
  attention_data<T> data(cross);
  const std::vector<index_t> first{0, 4}, count{4, 4}, key_first{0, data.memory_tokens};
  const attention_batch batch{
      {2, first.data(), count.data()}, {2, key_first.data(), lengths.data()}, {causal, {}}};
  const auto rows = [](auto& t) { return t.view().reshape(extents<2>{t.size() / 8, 8}); };
  training_context ctx;
  const auto& x = std::as_const(data.x);
  layer.forward(ctx, rows(x), cross ? rows(std::as_const(data.memory)) : rows(x), batch, rows(data.y));
  layer.backward(ctx, rows(std::as_const(data.dy)), rows(data.dx), rows(data.dmemory));
  part<T> own(golden, name + ".");
  data.check(own);
  check_gradients(own, layer);
}

template <class T>
void check_bare(results& golden, const std::string& name, const attention_call& call, bool cross = false) {
  LowRankAttention<T> layer({8, 2, 3, 5}, 2, true);
  give_values(layer);
  attention_data<T> data(cross);
  training_context ctx;
  layer.forward(ctx, data.x, cross ? data.memory : data.x, data.y.view(), call);
  if (cross) {
    layer.backward(ctx, data.dy, data.dx.view(), data.dmemory.view());
  } else {
    layer.backward(ctx, data.dy, data.dx.view());
  }
  part<T> own(golden, "bare_low_rank_attention." + name + ".");
  data.check(own);
  check_gradients(own, layer);
}

TEST_CASE_TEMPLATE("attention, dense and low rank: masks and cross attention are PyTorch's", T, float,
                   double) {
  results golden("attention");
  attention_options wide{{8, 2, 3, 5}, 0.0, 0.0, 1e-6}, split = wide;
  split.shape = attention_shape::split(8, 2);
  MultiHeadAttention<T> low_rank(wide);
  low_rank_slots<T>(low_rank, 2);
  const std::vector<std::pair<std::string, MultiHeadAttention<T>>> blocks{
      {"attention", MultiHeadAttention<T>(split)},
      {"attention_wide_values", MultiHeadAttention<T>(wide)},
      {"low_rank_attention", low_rank}};
  for (const auto& [name, block] : blocks) {
    check_block(golden, name + ".all", block, {4, 4});
    check_block(golden, name + ".causal", block, {4, 4}, true);
    check_block(golden, name + ".padding", block, {3, 1});
    check_block(golden, name + ".cross", block, {5, 2}, false, true);
  }
  const std::vector<index_t> lengths{3, 1}, memory_lengths{5, 2};
  check_bare<T>(golden, "all", {});
  check_bare<T>(golden, "causal", {true, {}, {}});
  check_bare<T>(golden, "padding", {false, lengths, {}});
  check_bare<T>(golden, "cross", {false, memory_lengths, {}}, true);
  tensor<unsigned char, 3> allowed({2, 4, 4});
  const hashed numbers("allowed");
  for (std::size_t i = 0; i < allowed.flat().size(); ++i) {
    allowed.flat()[i] = i % 4 == 0 || numbers[i] <= 0.0;
  }
  check_bare<T>(golden, "allowed", {false, {}, allowed});
  golden.check_all_used();
}

TEST_CASE_TEMPLATE("token losses: values and gradients are PyTorch's", T, float, double) {
  results golden("token_loss");
  const tensor<T, 2> logits = hashed_tensor<T>("logits", extents<2>{9, 11}, 6.0);
  const auto check = [&](const std::string& name, const token_loss_options& options) {
    cpu_context ctx({2, 1});
    tensor<T, 2> dlogits(logits.shape());
    const token_loss_result loss = TokenLoss<T>(options)(ctx, logits, targets, dlogits);
    part<T> own(golden, name + ".");
    own.check("loss", options.reduction == loss_reduction::sum ? loss.loss_sum : loss.mean_loss());
    own.check("gradient", dlogits);
  };
  constexpr auto wrong = smoothing_kind::wrong_classes;
  check("nll", {});
  check("nll_padding", {{0.0, wrong}, padding, loss_reduction::mean});
  check("smoothed_sum", {{0.1, wrong}, padding, loss_reduction::sum});
  check("smoothed_mean", {{0.1, wrong}, padding, loss_reduction::mean});
  check("smoothed_all_classes", {{0.1, smoothing_kind::all_classes}, padding, loss_reduction::mean});
  golden.check_all_used();
}

/// An embedding of 11 tokens and width 7, alone and with an output layer tied to it.
template <class T, class Table>
void check_embedding(results& golden, Table table) {
  const std::vector<std::int32_t> tokens{4, 0, 4, padding, 2, 4, 6, padding, 10};
  give_values(table);
  training_context ctx;
  tensor<T, 2> rows({9, 7}), drows(rows.shape()), logits({9, 11});
  table.forward(ctx, tokens, rows.view());
  const tensor<T, 2> drow = hashed_tensor<T>("output_gradient", rows.shape());
  table.backward(ctx, drow);
  part<T> alone(golden, "embedding.");
  alone.check("output", rows);
  check_gradients(alone, table);

  table.tie();
  const tensor<T, 2> shift = hashed_tensor<T>("shift", rows.shape());
  const tensor<T, 1> bias = hashed_tensor<T>("bias", extents<1>{11});
  tensor<T, 1> dbias({11});
  table.forward(ctx, tokens, rows.view());
  for (std::size_t i = 0; i < rows.flat().size(); ++i) rows.flat()[i] += shift.flat()[i];
  scratch_frame frame(ctx.scratch());
  const ops::output_layer<T> output{table.output_rows(ctx, frame, rows), table.rows(), bias.data(), T{0.5}};
  ops::output_logits<T>(ctx, output, logits.view());
  T* const kept = ctx.tape().push<T>(ops::output_loss_kept(ctx, output));
  const token_loss_options how{{0.1, smoothing_kind::wrong_classes}, padding, loss_reduction::sum};
  const token_loss_result loss = ops::output_loss_forward<T>(ctx, output, targets, how, kept);
  ctx.tape().pop<T>(ops::output_loss_kept(ctx, output));
  const tensor_view<T, 2> to = table.output_row_gradient(frame, drows.view());
  ops::output_loss_backward<T>(
      ctx, output, targets, how, 1.0, kept,
      {to, table.weight_gradient(), table.table().accumulate(), dbias.data(), false});
  table.output_backward(ctx, rows, to, drows.view());
  table.backward(ctx, drows);
  part<T> tied(golden, "tied.");
  tied.check("logits", logits);
  tied.check("loss", loss.loss_sum);
  tied.check("rows_gradient", drows);
  tied.check("gradient.bias", dbias);
  check_gradients(tied, table);
  golden.check_all_used();
}

TEST_CASE_TEMPLATE("Embedding, and an output layer tied to it: PyTorch's", T, float, double) {
  results golden("embedding");
  check_embedding<T>(golden, Embedding<T>(11, 7, padding));
}

TEST_CASE_TEMPLATE("LowRankEmbedding, and an output layer tied to it: PyTorch's", T, float, double) {
  results golden("low_rank_embedding");
  check_embedding<T>(golden, LowRankEmbedding<T>(11, 7, 3, padding));
}

TEST_CASE_TEMPLATE("Adam, AdamW: five steps are PyTorch's", T, float, double) {
  results golden("optimizers");
  const auto check = [&](const std::string& name, const adam_options& options) {
    tensor<T, 1> values = hashed_tensor<T>("values", extents<1>{40}), gradient({40});
    Adam<T> adam({values.flat(), gradient.flat(), {{0, 40, true}}, nullptr, 0}, options);
    cpu_context ctx({2, 1});
    for (int step = 0; step < 5; ++step) {
      const tensor<T, 1> now = hashed_tensor<T>("gradient " + std::to_string(step), extents<1>{40});
      std::copy(now.flat().begin(), now.flat().end(), gradient.flat().begin());
      adam.step(ctx, 0.01);
    }
    part<T> own(golden, name + ".");
    own.check("values", values);
    own.check("first", adam.first_moment());
    own.check("second", adam.second_moment());
  };
  check("adam", {0.9, 0.98, 1e-4, 0.0, false, false});
  check("adam_decay", {0.9, 0.999, 1e-4, 0.1, false, false});
  check("adamw", {0.9, 0.999, 1e-4, 0.1, true, false});
  golden.check_all_used();
}

TEST_CASE_TEMPLATE("clip_gradient_norm: PyTorch's, but for what that adds to the norm", T, float, double) {
  results golden("clipping");
  for (const auto& [name, largest] : {std::pair{"clipped.", 0.25}, std::pair{"not_clipped.", 100.0}}) {
    tensor<T, 1> gradient = hashed_tensor<T>("gradient", extents<1>{40});
    cpu_context ctx({2, 1});
    const double norm = gradient_norm<T>(ctx, gradient.flat());
    // PyTorch divides by norm + 1e-6, "for numerical stability".
    const clip_result result = clip_gradient_norm<T>(ctx, gradient.flat(), largest * norm / (norm + 1e-6));
    part<T> own(golden, name);
    own.check("norm", result.norm);
    own.check("gradient", gradient);
    CHECK(result.clipped == (largest < norm));
  }
  golden.check_all_used();
}

}  // namespace
