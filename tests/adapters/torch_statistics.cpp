// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Statistics of libtorch's layers in training, against sums by hand and against those of this library's
// layers.

#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <pufferfish/adapters/torch/statistics.hpp>

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

TEST_SUITE_END();
