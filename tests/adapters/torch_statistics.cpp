// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Statistics of libtorch's layers in training, against sums by hand and against those of this library's
// layers.

#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <pufferfish/adapters/torch/statistics.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/nn/layers/attention.hpp>

#include "torch_common.hpp"

TEST_SUITE_BEGIN("statistics");

namespace {

/// Layers of every kind that is recorded, with a grouped convolution and tokens.
struct Recorded : torch::nn::Module {
  ht::Embedding table{nullptr};
  ht::Conv2d conv{nullptr};
  torch::nn::Sequential fcs;
  Recorded() {
    table = register_module("table", ht::Embedding(40, 12));
    conv = register_module("conv", ht::Conv2d(torch::nn::Conv2dOptions(4, 16, 3).padding(1).groups(2)));
    fcs->push_back(torch::nn::Linear(16 + 12, 20));
    fcs->push_back(torch::nn::ReLU());
    fcs->push_back(torch::nn::Linear(20, 30));
    register_module("fcs", fcs);
  }
  Tensor forward(const Tensor& images, const Tensor& tokens) {
    const Tensor x = conv->forward(images).relu().mean({2, 3});
    return fcs->forward(torch::cat({x, table->forward(tokens).sum(1)}, 1));
  }
};

std::shared_ptr<Recorded> copy_of(const Recorded& net) {
  auto copy = std::make_shared<Recorded>();
  const torch::NoGradGuard none;
  const auto from = net.named_parameters();
  for (auto& p : copy->named_parameters()) p.value().copy_(from[p.key()]);
  return copy;
}

Tensor as_tensor(const pf::tensor<double, 2>& moment) {
  return torch::from_blob(const_cast<double*>(moment.data()), {moment.extent(0), moment.extent(1)},
                          torch::kDouble)
      .clone();
}
double moment_difference(const pf::tensor<double, 2>& ours, const Tensor& theirs) {
  return difference(as_tensor(ours), theirs.detach().to(torch::kDouble));
}

}  // namespace

TEST_CASE("statistics_recorder: sums are those of the tensors, and factors lose the least of the loss") {
  torch::manual_seed(31);
  auto net = std::make_shared<Recorded>();
  const std::int64_t samples = 24;
  const Tensor images = torch::randn({samples, 4, 5, 5}), tokens = torch::randint(0, 40, {samples, 3});
  const Tensor labels = torch::randint(0, 30, {samples});
  const auto loss_of = [&](Recorded& of) {
    return torch::nn::functional::cross_entropy(of.forward(images, tokens), labels);
  };
  pf::network_statistics seen;
  {
    const ht::statistics_recorder recorder(*net, 0);
    {
      const torch::NoGradGuard none;
      loss_of(*net);  // does not count
    }
    loss_of(*net).backward();
    seen = recorder.statistics();
  }
  loss_of(*net).backward();  // nor what comes after it
  net->zero_grad();
  CHECK(seen.layers.size() == 4);

  // The same by hand: outputs with their gradients.
  const Tensor y = net->conv->forward(images);
  y.retain_grad();
  const Tensor words = net->table->forward(tokens);
  words.retain_grad();
  const Tensor joined = torch::cat({y.relu().mean({2, 3}), words.sum(1)}, 1);
  torch::nn::functional::cross_entropy(net->fcs->forward(joined), labels).backward();
  const auto rows_of = [](const Tensor& t) { return t.movedim(1, -1).reshape({-1, t.size(1)}); };
  const pf::layer_statistics* const conv = seen.find("conv");
  REQUIRE(conv != nullptr);
  REQUIRE(conv->matrices.size() == 2);
  for (std::int64_t g = 0; g < 2; ++g) {
    const Tensor part = rows_of(y.detach()).slice(1, 8 * g, 8 * g + 8);
    const Tensor gradient = rows_of(y.grad()).slice(1, 8 * g, 8 * g + 8) * samples;
    const pf::output_statistics& one = conv->matrices[static_cast<std::size_t>(g)];
    CHECK(moment_difference(one.output_moment(), part.t().matmul(part) / part.size(0)) < 1e-5);
    CHECK(moment_difference(one.gradient_moment(), gradient.t().matmul(gradient) / part.size(0)) < 1e-5);
    CHECK(one.rows_of_sample() == 25.0);
  }
  const pf::layer_statistics* const table = seen.find("table");
  REQUIRE(table != nullptr);
  const Tensor gradient = words.grad().reshape({-1, 12}) * samples;
  CHECK(moment_difference(table->matrices[0].gradient_moment(),
                          gradient.t().matmul(gradient) / gradient.size(0)) < 1e-5);
  CHECK(table->matrices[0].token_shares()[static_cast<std::size_t>(tokens[0][0].item<std::int64_t>())] >
        1.4 / (72.0 + 20.0));
  const pf::layer_statistics* const fc = seen.find("fcs.2");
  REQUIRE(fc != nullptr);
  CHECK(fc->matrices[0].has_inputs());  // 20 inputs are fewer than 30 outputs

  // What the report predicts is least for two-sided factors, and the loss itself says the same.
  double predicted[3] = {}, losses[3] = {};
  for (const pf::truncation kind :
       {pf::truncation::plain, pf::truncation::data_aware, pf::truncation::two_sided}) {
    auto copy = copy_of(*net);
    pf::factorize_policy policy = everything(pf::rank_ratio{0.4});
    policy.embeddings_dense = false;
    policy.truncate = kind;
    const ht::factorization report = ht::factorize(*copy, policy, &seen);
    CHECK(report.low_rank.size() == 4);
    const auto k = static_cast<std::size_t>(kind);
    predicted[k] = report.predicted_loss();
    const Tensor lost = loss_of(*copy) - loss_of(*net);
    losses[k] = std::abs(lost.item<double>());
  }
  CAPTURE(losses[0]);
  CAPTURE(losses[2]);
  CHECK(predicted[2] < predicted[0]);
  CHECK(predicted[2] < predicted[1]);
}

TEST_CASE("docs: a recorder in a libtorch program") {
  torch::manual_seed(33);
  auto net = std::make_shared<Recorded>();
  const auto train_step = [&] {
    const Tensor y = net->forward(torch::randn({16, 4, 5, 5}), torch::randint(0, 40, {16, 3}));
    torch::nn::functional::cross_entropy(y, torch::randint(0, 30, {16})).backward();
  };
  // [recorder]
  pf::network_statistics seen;
  {
    const ht::statistics_recorder recorder(*net);  // one line before some training steps
    for (int step = 0; step < 20; ++step) train_step();
    seen = recorder.statistics();
  }
  pf::factorize_policy policy;
  policy.budget.emplace();
  policy.budget->fraction = 0.8;  // of the parameters, where they save most of the loss
  const ht::factorization report = ht::factorize(*net, policy, &seen);
  // [recorder]
  CHECK(static_cast<double>(report.parameters_after) <= 0.8 * static_cast<double>(report.parameters_before));
}

TEST_CASE("factorize: one budget for a tree of modules, by statistics") {
  torch::manual_seed(32);
  auto net = std::make_shared<Recorded>();
  pf::network_statistics seen;
  {
    const ht::statistics_recorder recorder(*net);
    for (int step = 0; step < 3; ++step) {
      const Tensor y = net->forward(torch::randn({16, 4, 5, 5}), torch::randint(0, 40, {16, 3}));
      torch::nn::functional::cross_entropy(y, torch::randint(0, 30, {16})).backward();
    }
    seen = recorder.statistics();
  }
  pf::factorize_policy policy = everything(pf::rank_ratio{0.25});
  policy.embeddings_dense = false;
  policy.budget.emplace();
  policy.budget->fraction = 0.6;
  auto one = copy_of(*net);
  const ht::factorization report = ht::factorize(*one, policy, &seen);
  CHECK(static_cast<double>(report.parameters_after) <= 0.6 * static_cast<double>(report.parameters_before));
  CHECK(static_cast<double>(report.parameters_after) > 0.5 * static_cast<double>(report.parameters_before));
  CHECK(report.rows.size() == 4);
  policy.threads = 3;
  auto other = copy_of(*net);
  CHECK((ht::factorize(*other, policy, &seen).low_rank == report.low_rank));
  // A list of ranks is taken as it is.
  pf::factorize_policy listed = everything(pf::rank_ratio{0.25});
  listed.embeddings_dense = false;
  listed.ranks = report.low_rank;
  auto third = copy_of(*net);
  CHECK((ht::factorize(*third, listed).low_rank == report.low_rank));
  // Without statistics a budget goes by the weights themselves; with those of some layers it cannot.
  auto fourth = copy_of(*net);
  CHECK(ht::factorize(*fourth, policy).parameters_after <= report.parameters_before * 6 / 10);
  seen.layers.pop_back();
  CHECK(contains(error_of([&] { ht::factorize(*net, policy, &seen); }), "one budget for"));
  policy.budget.reset();
  policy.truncate = pf::truncation::two_sided;
  const std::string text = error_of([&] { ht::factorize(*net, policy, &seen); });
  CHECK(contains(text, "needs statistics"));
  CHECK(contains(text, "fcs.2"));
}

namespace {

Tensor randn(torch::IntArrayRef shape) { return torch::randn(shape, torch::kDouble); }

/// A sequence steps x batch x features in the form of this library's networks.
pf::tensor_view<const double, 4> sequence_of(const Tensor& t) {
  return {t.data_ptr<double>(), {t.size(0), t.size(1), 1, t.size(2)}};
}
pf::tensor_view<double, 4> writable(const Tensor& t) {
  return {t.data_ptr<double>(), {t.size(0), t.size(1), 1, t.size(2)}};
}
void assign(const pf::tensor_view<double, 2>& to, const Tensor& from) {
  for (pf::index_t i = 0; i < to.extent(0); ++i) {
    for (pf::index_t j = 0; j < to.extent(1); ++j) to(i, j) = from.index({i, j}).item<double>();
  }
}

/// libtorch's LSTM "rnn", and one LSTM of this library for each of its layers with the same numbers.
struct lstm_twins {
  torch::nn::LSTM theirs;
  torch::nn::Sequential net;
  pf::network<double> ours;
  pf::cpu_context ctx;

  explicit lstm_twins(const torch::nn::LSTMOptions& options) : theirs(options), ours(make(options)) {
    theirs->to(torch::kDouble);
    net->push_back("rnn", theirs);
    for (std::size_t l = 0; l < static_cast<std::size_t>(options.num_layers()); ++l) {
      auto& layer = *slots()[l]->target<pf::LSTM<double>>();
      const auto all = theirs->all_weights();
      assign(layer.input_weight(), all[4 * l]);
      assign(layer.hidden_weight(), all[4 * l + 1]);
      const Tensor bias = (all[4 * l + 2] + all[4 * l + 3]).detach();
      for (pf::index_t i = 0; i < bias.size(0); ++i) layer.bias()(i) = bias[i].item<double>();
    }
  }
  std::vector<pf::any_layer<double>*> slots() { return pf::detail::find_slots(ours).slots; }

  /// A training pass of both.
  void pass(const Tensor& x, const Tensor& dy) {
    std::get<0>(theirs->forward(x)).backward(dy);
    const Tensor y = torch::empty_like(dy);
    ctx.set_mode(pf::run_mode::training);
    ctx.begin_step(0);
    ours.forward(ctx, sequence_of(x), writable(y));
    ours.backward(ctx, sequence_of(dy));
  }

 private:
  static pf::network<double> make(const torch::nn::LSTMOptions& options) {
    pf::Sequential<double> layers;
    for (std::int64_t l = 0; l < options.num_layers(); ++l) {
      layers.add(
          "l" + std::to_string(l),
          pf::LSTM<double>(l == 0 ? options.input_size() : options.hidden_size(), options.hidden_size()));
    }
    return pf::network<double>(std::move(layers));
  }
};

double moment_difference(const pf::tensor<double, 2>& a, const pf::tensor<double, 2>& b) {
  return moment_difference(a, as_tensor(b));
}
void check_same(const pf::output_statistics& a, const pf::output_statistics& b) {
  CHECK(a.has_inputs() == b.has_inputs());
  CHECK(moment_difference(a.output_moment(), b.output_moment()) < 1e-9);
  CHECK(moment_difference(a.input_moment(), b.input_moment()) < 1e-9);
  CHECK(moment_difference(a.gradient_moment(), b.gradient_moment()) < 1e-9);
  CHECK(a.rows_of_sample() == doctest::Approx(b.rows_of_sample()));
}
void check_same(const pf::factorization& a, const pf::factorization& b) {
  REQUIRE(a.low_rank.size() == b.low_rank.size());
  for (std::size_t i = 0; i < a.low_rank.size(); ++i) CHECK(a.low_rank[i].ranks == b.low_rank[i].ranks);
  REQUIRE(a.layers.size() == b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    CHECK(a.layers[i].predicted_loss == doctest::Approx(b.layers[i].predicted_loss).epsilon(1e-6));
  }
}

/// Mean of samples^2 r^T r over the rows r.
Tensor moment_of(const Tensor& rows, double samples = 1.0) {
  const Tensor flat = rows.detach().reshape({-1, rows.size(-1)}) * samples;
  return flat.t().matmul(flat) / flat.size(0);
}

}  // namespace

TEST_CASE("statistics_recorder: an LSTM has the statistics and the factors of this library's LSTMs") {
  for (const pf::index_t rows_of_step : {0, 7}) {
    torch::manual_seed(41);
    lstm_twins twins(torch::nn::LSTMOptions(12, 16).num_layers(2));
    pf::factorize_policy policy = everything(pf::energy_kept{0.5});
    pf::statistics_collector<double> collector(twins.ours, policy, {rows_of_step});
    pf::network_statistics theirs;
    {
      const ht::statistics_recorder recorder(*twins.net, rows_of_step, 10);
      for (int step = 0; step < 3; ++step) {
        const pf::observed_scope watching(twins.ctx, collector);
        twins.pass(randn({20, 10, 12}), randn({20, 10, 16}));
        collector.end_step(10.0);
        const torch::NoGradGuard none;
        twins.theirs->forward(randn({4, 2, 12}));  // does not count
      }
      theirs = recorder.statistics();
    }
    const pf::network_statistics ours = collector.statistics();
    REQUIRE(theirs.layers.size() == 1);
    CHECK(theirs.layers[0].name == "rnn");
    REQUIRE(theirs.layers[0].matrices.size() == 16);
    for (std::size_t i = 0; i < 16; ++i) {
      CAPTURE(i);
      check_same(theirs.layers[0].matrices[i], ours.layers[i / 8].matrices[i % 8]);
    }
    CHECK(at::globalContext().userEnabledMkldnn());
    // Without a state before, the hidden side has no input at the first step.
    CHECK(theirs.layers[0].matrices[3].rows_of_sample() == 20.0);
    CHECK(theirs.layers[0].matrices[4].rows_of_sample() == 19.0);

    const pf::factorization our_report = pf::factorize(twins.ours, policy, &ours);
    const ht::factorization report = ht::factorize(*twins.net, policy, &theirs);
    REQUIRE(report.low_rank.size() == 2);
    CHECK(report.low_rank[1].name == "rnn.l1");
    check_same(report, our_report);
    CHECK(std::isfinite(report.predicted_loss()));
    const Tensor x = randn({5, 3, 12}), y = torch::empty({5, 3, 16}, torch::kDouble);
    twins.ctx.set_mode(pf::run_mode::inference);
    twins.ours.forward(twins.ctx, sequence_of(x), writable(y));
    auto* made = twins.net->ptr(0)->as<ht::LowRankLSTMImpl>();
    REQUIRE(made != nullptr);
    CHECK(difference(std::get<0>(made->forward(x)), y) < 1e-8);
  }
}

TEST_CASE("statistics_recorder: an LSTM with a state, and ranks from a budget") {
  torch::manual_seed(42);
  lstm_twins twins(torch::nn::LSTMOptions(12, 16));
  pf::factorize_policy policy = everything(pf::rank_ratio{0.25});
  policy.budget.emplace();
  policy.budget->parameters = 1100;
  pf::statistics_collector<double> collector(twins.ours, policy, {0});
  const Tensor x = randn({6, 4, 12}), dy = randn({6, 4, 16}), h = randn({1, 4, 16}), c = randn({1, 4, 16});
  pf::network_statistics theirs;
  {
    const ht::statistics_recorder recorder(*twins.net, 0);
    std::get<0>(twins.theirs->forward(x, std::tuple(h, c))).backward(dy);
    theirs = recorder.statistics();
  }
  const Tensor y = torch::empty_like(dy);
  const auto view = [](const Tensor& t) {
    return pf::tensor_view<double, 3>(t.data_ptr<double>(), {t.size(0), t.size(1), t.size(2)});
  };
  const auto rows = [](const Tensor& t) {
    return pf::tensor_view<const double, 2>(t.data_ptr<double>(), {t.size(1), t.size(2)});
  };
  {
    const pf::observed_scope watching(twins.ctx, collector);
    twins.ctx.set_mode(pf::run_mode::training);
    twins.ctx.begin_step(0);
    twins.slots()[0]->forward_sequence(twins.ctx, view(x), {rows(h), rows(c)}, view(y), {});
    twins.slots()[0]->backward_sequence(twins.ctx, view(dy), {});
  }
  collector.end_step(6.0);  // the first dimension of libtorch's output
  const pf::network_statistics ours = collector.statistics();
  REQUIRE(theirs.layers.size() == 1);
  for (std::size_t i = 0; i < 8; ++i) {
    check_same(theirs.layers[0].matrices[i], ours.layers[0].matrices[i]);
    CHECK(theirs.layers[0].matrices[i].rows_of_sample() == 4.0);
  }
  const pf::factorization report = pf::factorize(twins.ours, policy, &ours);
  CHECK(report.low_rank.size() == 1);
  policy.budget->parameters = 1100 + 64;  // libtorch counts a second bias before the factorization
  check_same(ht::factorize(*twins.net, policy, &theirs), report);
}

TEST_CASE("statistics_recorder: LSTMs with other options, packed sequences and several passes") {
  torch::manual_seed(43);
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(5, 4).bias(false).batch_first(true));
  torch::nn::Sequential net;
  net->push_back("rnn", lstm);
  net->push_back("both", torch::nn::LSTM(torch::nn::LSTMOptions(5, 4).bidirectional(true)));
  net->push_back("projected", torch::nn::LSTM(torch::nn::LSTMOptions(5, 4).proj_size(2)));
  const auto others = [&](const Tensor& x) {
    std::get<0>((*net)[1]->as<torch::nn::LSTM>()->forward(x)).sum().backward();
    std::get<0>((*net)[2]->as<torch::nn::LSTM>()->forward(x)).sum().backward();
  };
  const Tensor x = torch::randn({3, 7, 5}), more = torch::randn({2, 7, 5});
  {
    const ht::statistics_recorder recorder(*net, 0);
    others(x);
    CHECK(recorder.statistics().layers.empty());
    const Tensor y = std::get<0>(lstm->forward(x)), second = std::get<0>(lstm->forward(more));
    std::get<0>(lstm->forward(x));  // no backward pass
    (y.sum() + second.sum()).backward();
    const pf::network_statistics seen = recorder.statistics();
    REQUIRE(seen.layers.size() == 1);
    const std::vector<pf::output_statistics>& matrices = seen.layers[0].matrices;
    CHECK(moment_difference(matrices[2].input_moment(), moment_of(torch::cat({x, more}))) < 1e-5);
    const Tensor before = torch::cat({y, second}).slice(1, 0, 6);
    CHECK(moment_difference(matrices[6].input_moment(), moment_of(before)) < 1e-5);
    CHECK(matrices[0].rows_of_sample() == 7.0);
    CHECK(matrices[4].rows_of_sample() == 6.0);
  }
  {
    const ht::statistics_recorder recorder(*net, 0);
    const auto packed = torch::nn::utils::rnn::pack_padded_sequence(x, torch::tensor({7, 4, 2}), true);
    const auto result = std::get<0>(lstm->forward_with_packed_input(packed));
    result.data().sum().backward();
    const pf::network_statistics seen = recorder.statistics();
    REQUIRE(seen.layers.size() == 1);
    CHECK(moment_difference(seen.layers[0].matrices[0].input_moment(), moment_of(packed.data())) < 1e-5);
    // The states before: all but the last ones of the three sequences.
    const Tensor padded = std::get<0>(torch::nn::utils::rnn::pad_packed_sequence(result, true));
    const Tensor states =
        torch::cat({padded[0].slice(0, 0, 6), padded[1].slice(0, 0, 3), padded[2].slice(0, 0, 1)});
    CHECK(moment_difference(seen.layers[0].matrices[4].input_moment(), moment_of(states)) < 1e-5);
  }
}

TEST_CASE("statistics_recorder: attention has the statistics and the factors of this library's layers") {
  torch::manual_seed(44);
  const std::int64_t width = 12, tokens = 9, batch = 2;
  torch::nn::MultiheadAttention theirs(torch::nn::MultiheadAttentionOptions(width, 3).bias(false));
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({width}).eps(1e-6));
  theirs->to(torch::kDouble);
  norm->to(torch::kDouble);
  torch::nn::Sequential net;
  net->push_back("att", theirs);
  const auto forward = [&](auto& attention, const Tensor& x) {
    return norm->forward(x + std::get<0>(attention.forward(x, x, x)));
  };
  pf::Sequential<double> layers;
  layers.add("att", pf::MultiHeadAttention<double>(
                        {pf::attention_shape::split(width, 3), /*dropout=*/0.0, /*attention_dropout=*/0.0}));
  pf::network<double> ours(std::move(layers));
  const auto found = pf::detail::find_slots(ours).slots;
  REQUIRE(found.size() == 4);
  const std::vector<Tensor> packed = theirs->in_proj_weight.detach().chunk(3);
  for (std::size_t i = 0; i < 4; ++i) {
    assign(found[i]->target<pf::Linear<double>>()->weight(), i < 3 ? packed[i] : theirs->out_proj->weight);
  }
  pf::factorize_policy policy = everything(pf::energy_kept{0.4});
  pf::statistics_collector<double> collector(ours, policy, {0});
  pf::cpu_context ctx;
  const Tensor x = randn({tokens, batch, width}), dy = randn({tokens, batch, width});
  // Ours: batch x tokens.
  const auto turned = [](const Tensor& t) { return t.transpose(0, 1).contiguous(); };
  const auto images = [](const Tensor& t) {
    return pf::tensor_view<double, 4>(t.data_ptr<double>(), {t.size(0), t.size(1), 1, t.size(2)});
  };
  const Tensor our_x = turned(x), our_dy = turned(dy), our_y = torch::empty_like(our_x);
  {
    const pf::observed_scope watching(ctx, collector);
    ctx.set_mode(pf::run_mode::training);
    ctx.begin_step(0);
    ours.forward(ctx, images(our_x), images(our_y));
    ours.backward(ctx, images(our_dy));
  }
  collector.end_step(static_cast<double>(batch));
  const pf::network_statistics seen = collector.statistics();
  pf::network_statistics recorded;
  {
    const ht::statistics_recorder recorder(*net, 0, batch);
    const Tensor y = forward(*theirs, x);
    CHECK(difference(turned(y.detach()), our_y) < 1e-9);
    y.backward(dy);
    recorded = recorder.statistics();
  }
  REQUIRE(recorded.layers.size() == 1);
  REQUIRE(recorded.layers[0].matrices.size() == 4);
  REQUIRE(seen.layers.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    // Of a square matrix, our layer records the outputs W x, the recorder the inputs x.
    const pf::output_statistics &inputs = recorded.layers[0].matrices[i],
                                &outputs = seen.layers[i].matrices[0];
    const Tensor w = i < 3 ? packed[i] : theirs->out_proj->weight.detach();
    const Tensor moment = as_tensor(inputs.input_moment());
    CHECK(moment_difference(outputs.output_moment(), w.matmul(moment).matmul(w.t())) < 1e-9);
    CHECK(moment_difference(outputs.gradient_moment(), inputs.gradient_moment()) < 1e-9);
    CHECK(inputs.rows_of_sample() == outputs.rows_of_sample());
  }
  const pf::factorization our_report = pf::factorize(ours, policy, &seen);
  const ht::factorization report = ht::factorize(*net, policy, &recorded);
  REQUIRE(report.low_rank.size() == 1);
  REQUIRE(report.layers.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(report.low_rank[0].ranks[i] == our_report.low_rank[i].ranks[0]);
    CHECK(report.layers[i].predicted_loss ==
          doctest::Approx(our_report.layers[i].predicted_loss).epsilon(1e-6));
  }
  ctx.set_mode(pf::run_mode::inference);
  ours.forward(ctx, images(our_x), images(our_y));
  auto* made = net->ptr(0)->as<ht::LowRankMultiheadAttentionImpl>();
  REQUIRE(made != nullptr);
  CHECK(difference(turned(forward(*made, x)), our_y) < 1e-8);
}

TEST_CASE("statistics_recorder: attention to other rows, and attention without factors") {
  torch::manual_seed(45);
  torch::nn::MultiheadAttention attention(8, 2);
  torch::nn::Sequential net;
  net->push_back("att", attention);
  net->push_back("wide",
                 torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).kdim(4).vdim(4)));
  const Tensor q = torch::randn({5, 3, 8}), k = torch::randn({7, 3, 8}), v = torch::randn({7, 3, 8});
  // One pass over q and k, one over q, k and v, one of q alone.
  const std::vector<std::tuple<Tensor, Tensor, Tensor>> passes{{q, k, k}, {q, k, v}, {q, q, q}};
  const ht::statistics_recorder recorder(*net, 0, 3);
  for (const auto& [a, b, c] : passes) std::get<0>(attention->forward(a, b, c)).sum().backward();
  const Tensor narrow = torch::randn({7, 3, 4});
  std::get<0>((*net)[1]->as<torch::nn::MultiheadAttention>()->forward(q, narrow, narrow)).sum().backward();
  const pf::network_statistics seen = recorder.statistics();
  REQUIRE(seen.layers.size() == 1);
  const std::vector<pf::output_statistics>& matrices = seen.layers[0].matrices;
  REQUIRE(matrices.size() == 4);
  CHECK(moment_difference(matrices[0].input_moment(), moment_of(q)) < 1e-5);
  CHECK(moment_difference(matrices[1].input_moment(), moment_of(torch::cat({k, k, q}))) < 1e-5);
  CHECK(moment_difference(matrices[2].input_moment(), moment_of(torch::cat({k, v, q}))) < 1e-5);
  CHECK(matrices[0].rows_of_sample() == 5.0);
  CHECK(matrices[1].rows_of_sample() == doctest::Approx(19.0 / 3.0));
  // Each gradient of the outputs is 1, times 3 samples.
  CHECK(moment_difference(matrices[3].gradient_moment(), torch::full({8, 8}, 9.0)) < 1e-5);
}

namespace {

struct Words : torch::nn::Module {
  ht::Embedding table{nullptr};
  ht::LSTM rnn{nullptr};
  ht::MultiheadAttention attention{nullptr};
  ht::Linear decoder{nullptr};
  Words() {
    table = register_module("table", ht::Embedding(50, 16));
    rnn = register_module("rnn", ht::LSTM(torch::nn::LSTMOptions(16, 24).num_layers(2)));
    attention = register_module("attention", ht::MultiheadAttention(24, 2));
    decoder = register_module("decoder", ht::Linear(24, 50));
  }
  Tensor loss(const Tensor& tokens) {
    const Tensor y = std::get<0>(rnn->forward(table->forward(tokens)));
    const Tensor z = decoder->forward(std::get<0>(attention->forward(y, y, y)));
    return torch::nn::functional::cross_entropy(z.slice(0, 0, -1).reshape({-1, 50}),
                                                tokens.slice(0, 1).flatten());
  }
};

}  // namespace

TEST_CASE("factorize: one budget for the embedding, LSTM, attention and decoder of a language model") {
  torch::manual_seed(46);
  auto net = std::make_shared<Words>();
  const auto train_step = [&] { net->loss(torch::randint(0, 50, {12, 8})).backward(); };
  const ht::statistics_recorder recorder(*net, 512, 11 * 8);  // the loss is the mean over 11 x 8 tokens
  for (int step = 0; step < 5; ++step) train_step();
  const pf::network_statistics seen = recorder.statistics();
  CHECK(seen.layers.size() == 4);
  pf::factorize_policy policy = everything(pf::rank_ratio{0.25});
  policy.embeddings_dense = false;
  double predicted[2] = {};
  for (const pf::truncation kind : {pf::truncation::plain, pf::truncation::two_sided}) {
    const auto copy = std::make_shared<Words>();
    const torch::NoGradGuard none;
    const auto from = net->named_parameters();
    for (auto& p : copy->named_parameters()) p.value().copy_(from[p.key()]);
    policy.truncate = kind;
    const ht::factorization report = ht::factorize(*copy, policy, &seen);
    CHECK(report.low_rank.size() == 5);
    predicted[kind == pf::truncation::plain ? 0 : 1] = report.predicted_loss();
  }
  CHECK(predicted[1] < predicted[0]);
  policy.truncate.reset();
  policy.budget.emplace();
  policy.budget->fraction = 0.5;
  const ht::factorization report = ht::factorize(*net, policy, &seen);
  CHECK(static_cast<double>(report.parameters_after) <= 0.5 * static_cast<double>(report.parameters_before));
  CHECK((net->rnn->low_rank() != nullptr));
  CHECK((net->attention->low_rank() != nullptr));
}

TEST_CASE("statistics: what does not fit is refused") {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(8, 8).num_layers(2));
  const pf::layer_statistics half(std::vector<pf::output_statistics>(8, pf::output_statistics(8, 8)));
  pf::factorize_options options;
  options.name = "rnn";
  options.statistics = &half;
  CHECK(contains(error_of([&] { ht::low_rank(*lstm, pf::fixed_rank{2}, options); }),
                 "rnn: statistics of 8 matrices for 2 layers of 8"));
  CHECK(contains(error_of([&] { ht::statistics_recorder(*lstm, 512, -3); }), "rows_of_step 512, samples -3"));
}

TEST_SUITE_END();
