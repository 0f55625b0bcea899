// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What docs/models.md shows, and the recipes. The marked parts stand there word for word.
#include <doctest/doctest.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/models/recipes.hpp>
#include <pufferfish/models/weights.hpp>
#include <pufferfish/models/zoo.hpp>
#include <pufferfish/nn/fold_batch_norm.hpp>
#include <pufferfish/nn/frozen_model.hpp>

namespace {

using namespace pufferfish;

TEST_CASE("docs: building a model") {
  // clang-format off
  // [zoo]
  network<float> net = resnet18<float>();         // or vgg19, resnet50, wide_resnet50_2, ...
  net.initialize(1);
  factorize(net, resnet18_policy());              // the switch: SVDs of what the paper factorizes

  network<float> scratch = resnet18<float>();     // low rank from random factors, without an SVD
  apply_ranks(scratch, planned_ranks(scratch, resnet18_low_rank_policy()));
  scratch.initialize(1);

  const auto& model = zoo_model_called<float>("wide_resnet50_2");
  const layer_cost cost = model.cost(model.make(factor_mode::hybrid)).total();
  // [zoo]
  // clang-format on
  CHECK(net.parameter_count() == 3336138);
  CHECK(low_rank_layers(scratch).size() == 16);
  CHECK(cost.parameters == 40047400);
}

TEST_CASE("docs: choosing ranks") {
  network<float> net = resnet18<float>({.width = 16});
  net.initialize(1);
  // clang-format off
  // [policy]
  factorize_policy policy;         // the paper's: rank_ratio{0.25}, last layer and shortcuts dense
  policy.rank = energy_kept{0.9};  // or fixed_rank{16}, parameter_budget{100000}, parameter_fraction{0.5}
  policy.first_layer = 10;         // layers 1 .. 9 stay dense, counted in execution order without shortcuts
  policy.also_if = [](const std::string&, matrix_size size) { return size.rows >= 128; };
  const factorization done = factorize(net, policy);
  for (const factor_report& layer : done.layers) {
    std::printf("%s: rank %td, keeps %.3f\n", layer.name.c_str(), layer.rank, layer.kept_energy);
  }
  // [policy]
  // clang-format on
  // Stage 4 has 128 channels; its four convolutions are random, so 0.9 of the energy is most of the rank.
  CHECK(done.layers.size() + done.kept_dense.size() == 4);
  for (const factor_report& layer : done.layers) CHECK(layer.kept_energy >= 0.9);

  network<float> other = resnet18<float>({.width = 16});
  other.initialize(1);
  // clang-format off
  // [budget]
  factorize_policy shared;
  shared.budget.emplace();
  shared.budget->fraction = 0.4;  // of the parameters; also parameters, macs, mac_fraction, bytes, milliseconds
  const factorization by_budget = factorize(other, shared);
  std::printf("%s", rank_table(by_budget.rows).c_str());  // each layer: rank, cost, predicted loss, why
  // [budget]
  // clang-format on
  CHECK(static_cast<double>(by_budget.parameters_after) <=
        0.4 * static_cast<double>(by_budget.parameters_before));
}

void load_resnet50() {
  // [weights]
  network<float> net = resnet50<float>();
  load_weights(net, safetensors_file::read("resnet50.safetensors"));
  // [weights]
}

TEST_CASE("docs: inference") {
  network<float> net = resnet18<float>({.width = 8});
  net.initialize(1);
  factorize(net, resnet18_policy());
  tensor<float, 4> images({2, 32, 32, 3}), kept({2, 1, 1, 10}), logits(kept.shape());
  fill_normal(images.flat(), 1.0, random_stream(5, 1));
  cpu_context before;
  before.set_mode(run_mode::inference);
  net.forward(before, images.view(), kept.view());
  // clang-format off
  // [inference]
  const batch_norm_folding done = fold_batch_norm(net);  // done.kept names those that no layer could take over
  const frozen_model served(std::move(net));             // packs the weights once, in the first pass
  cpu_context context;                                   // inference: running statistics, no dropout
  served.forward(context, images.view(), logits.view());
  // [inference]
  // clang-format on
  CHECK(done.kept.empty());
  for (index_t i = 0; i < logits.size(); ++i) {
    CHECK(logits.flat()[static_cast<std::size_t>(i)] ==
          doctest::Approx(kept.flat()[static_cast<std::size_t>(i)]).epsilon(1e-4));
  }
}

TEST_CASE("docs: weights by name") { CHECK_THROWS_AS(load_resnet50(), io_error); }

TEST_CASE("recipes: the paper's schedules") {
  // [recipe]
  image_recipe mine = cifar_recipe();
  mine.epochs = 100;
  mine.warmup_epochs = 27;
  mine.milestones = {50, 83};
  const schedule rate = mine.rate_schedule();  // factors of mine.learning_rate
  // [recipe]
  CHECK(rate(49.9) == 1.0);
  CHECK(rate(50.0) == doctest::Approx(0.1));
  CHECK(rate(99.0) == doctest::Approx(0.01));

  CHECK(cifar_recipe().rate_schedule()(149.5) == 1.0);
  CHECK(cifar_recipe().rate_schedule()(250.0) == doctest::Approx(0.01));
  CHECK(cifar_recipe().optimizer.decay_all);
  CHECK(imagenet_recipe().rate_schedule()(80.0) == doctest::Approx(0.001));
  CHECK_FALSE(imagenet_recipe().optimizer.decay_all);
  CHECK(imagenet_recipe().smoothing.kind == smoothing_kind::wrong_classes);
  CHECK(lottery_ticket_recipe().warmup_epochs == 50);
  // 0.1, 0.4, 0.7, 1.0, 1.3, 1.6 at epochs 0 .. 5.
  const distributed_image_recipe many = distributed_cifar_recipe();
  for (int epoch = 0; epoch <= 5; ++epoch) {
    CHECK(many.learning_rate * many.rate_schedule()(epoch) == doctest::Approx(0.1 + 0.3 * epoch));
  }
  CHECK(many.rate_schedule()(150.0) == doctest::Approx(0.1));
  CHECK(wikitext2_recipe().epochs == 40);
  // The rate at the end of 400 epochs of 114 steps.
  CHECK(multi30k_recipe().rate(400 * 114) == doctest::Approx(8.8e-5).epsilon(0.01));
}

}  // namespace
