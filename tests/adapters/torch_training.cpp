// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Pruning and rare exchanges of libtorch's modules.

#include <cmath>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/adapters/torch/factorize.hpp>
#include <pufferfish/adapters/torch/local_training.hpp>
#include <pufferfish/adapters/torch/prune.hpp>
#include <pufferfish/adapters/torch/zero_tracker.hpp>
#include <pufferfish/distributed.hpp>

#include "torch_common.hpp"

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

/// Layers of libtorch and of ours.
struct Small : torch::nn::Module {
  torch::nn::Conv2d conv{nullptr};
  ht::Conv2d low{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear fc{nullptr};

  Small() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)));
    low = register_module("low", ht::Conv2d(torch::nn::Conv2dOptions(8, 12, 3).stride(2)));
    norm = register_module("norm", torch::nn::BatchNorm2d(12));
    dropout = register_module("dropout", torch::nn::Dropout(0.0));
    fc = register_module("fc", torch::nn::Linear(12, 5));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = norm->forward(low->forward(torch::relu(conv->forward(x))));
    return fc->forward(dropout->forward(torch::tanh(y).mean(torch::IntArrayRef{2, 3})));
  }
};

std::shared_ptr<Small> make_small(torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(11);
  auto net = std::make_shared<Small>();
  pf::factorize_policy policy;
  policy.rank = pf::fixed_rank{4};
  policy.first_layer = 2;
  ht::factorize(*net, policy);
  net->to(dtype);
  return net;
}

/// This rank's images of a step, 4 a rank.
Tensor images(const pf::mpi::communicator& comm, int step, torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(100 + static_cast<unsigned>(step));
  return torch::randn({4 * comm.size(), 3, 7, 7}, dtype).slice(0, 4 * comm.rank(), 4 * comm.rank() + 4);
}
Tensor loss_of(Small& net, const Tensor& x) { return net.forward(x).pow(2).mean(); }

/// Whether rank 0's numbers are on all ranks.
bool same_everywhere(pf::mpi::communicator& comm, const std::vector<Tensor>& tensors) {
  std::uint64_t digest = 0;
  for (const Tensor& t : tensors) {
    const Tensor own = t.detach().to(torch::kDouble).contiguous();
    const std::span<const double> values(own.data_ptr<double>(), static_cast<std::size_t>(own.numel()));
    digest = 31 * digest + pf::digest(values);
  }
  bool same = true;
  for (const std::uint64_t other : comm.all_gather(digest)) same = same && other == digest;
  return same;
}

/// Equal bits on one or two ranks, where sums have one order; else up to rounding.
bool agree(const pf::mpi::communicator& comm, const Tensor& a, const Tensor& b) {
  return comm.size() <= 2 ? torch::equal(a, b) : difference(a, b) < 1e-4;
}

std::vector<std::string> prunable_names(const ht::module_mask<>& mask) {
  std::vector<std::string> names;
  for (const auto& row : mask.report().rows) names.push_back(row.name);
  return names;
}

/// Places of the pruned elements of a parameter, in its shape: 1 where the weight remains.
Tensor kept_places(const pf::weight_mask& mask, const std::string& name, const Tensor& like) {
  Tensor kept = torch::ones_like(like.detach());
  for (std::size_t t = 0; t < mask.tensors().size(); ++t) {
    if (mask.tensors()[t].name != name) continue;
    for (pf::index_t i = 0; i < mask.tensors()[t].size; ++i) {
      if (!mask.keeps(t, i)) kept.data_ptr<float>()[i] = 0.0F;  // ones_like keeps strides
    }
  }
  return kept;
}

}  // namespace

TEST_SUITE_BEGIN("pruning");

namespace {

struct Many : torch::nn::Module {
  torch::nn::Embedding table{torch::nn::EmbeddingOptions(9, 6)}, free{torch::nn::EmbeddingOptions(9, 6)};
  torch::nn::Linear tied{torch::nn::LinearOptions(6, 9).bias(false)};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({4, 6})};
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(6, 5)};
  torch::nn::MultiheadAttention attention{torch::nn::MultiheadAttentionOptions(6, 2).add_bias_kv(true)};
  ht::Linear slot{6, 6};
  ht::LowRankEmbedding low{ht::LowRankEmbeddingOptions(9, 6, 2)};
  Tensor own;

  Many() {
    register_module("table", table);
    register_module("free", free);
    register_module("tied", tied);
    tied->weight = tied->register_parameter("again", table->weight);
    register_module("norm", norm);
    register_module("lstm", lstm);
    register_module("attention", attention);
    register_module("slot", slot);
    register_module("low", low);
    own = register_parameter("own", torch::ones({3, 3}));
  }
};

}  // namespace

TEST_CASE("weights of convolutions and linear matrices have bits") {
  auto net = make_small();
  CHECK(prunable_names(ht::module_mask(*net)) ==
        std::vector<std::string>{"fc.weight", "low.up", "low.down", "conv.weight"});
  net->conv->weight.set_requires_grad(false);
  const ht::module_mask<> frozen(*net);
  CHECK(prunable_names(frozen) == std::vector<std::string>{"fc.weight", "low.up", "low.down"});
  CHECK(frozen.mask()->size() == 12 * 5 + 5 + 2 * 12 + 12 + 12 * 4 + 4 * 8 * 9 + 8);

  Many many;
  const auto names = prunable_names(ht::module_mask(many));
  CHECK(std::set<std::string>(names.begin(), names.end()) ==
        std::set<std::string>{"tied.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0",
                              "attention.in_proj_weight", "attention.out_proj.weight", "slot.weight"});
  const ht::module_mask<> chosen(many, [all = ht::prunable_weights(many)](const pf::coded_tensor& tensor) {
    return tensor.name == "own" || (all(tensor) && tensor.name.rfind("lstm", 0) == 0);
  });
  CHECK(prunable_names(chosen) == std::vector<std::string>{"lstm.weight_hh_l0", "lstm.weight_ih_l0", "own"});
}

TEST_CASE("magnitude: counts, ties and layers") {
  torch::nn::Sequential net(torch::nn::Linear(4, 2), torch::nn::Linear(2, 3));
  const torch::NoGradGuard no_grad;
  const Tensor first = net->parameters()[0], last = net->parameters()[2];
  first.copy_(torch::tensor({1.0, -2.0, 3.0, -4.0, 5.0, 6.0, 7.0, 8.0}).reshape({2, 4}));
  last.copy_(torch::tensor({0.5, -3.0, 3.0, -9.0, 0.0, -0.0}).reshape({3, 2}));
  ht::module_mask mask(*net);
  CHECK(mask.mask()->prunable() == 14);
  CHECK(mask.mask()->survivors() == 14 + 5);
  const auto before = mask.mask();
  // Of the three weights of magnitude 3, those of the later layer are earlier in the arena.
  CHECK(mask.prune_by_magnitude({.share = 0.5}) == 7);
  CHECK(before->kept() == 14);
  CHECK(mask.mask()->kept() == 7);
  CHECK(torch::equal(last, torch::tensor({0.5, -3.0, 3.0, -9.0, 0.0, -0.0}).reshape({3, 2})));
  mask.apply();
  CHECK(torch::equal(last, torch::tensor({0.0, 0.0, 0.0, -9.0, 0.0, 0.0}).reshape({3, 2})));
  CHECK(torch::equal(first, torch::tensor({0.0, 0.0, 3.0, -4.0, 5.0, 6.0, 7.0, 8.0}).reshape({2, 4})));
  CHECK(mask.prune_by_magnitude({.share = 0.3, .of = pf::removal_share::of_remaining}) == 3);
  CHECK(mask.report().rows[1].kept == 3);
  CHECK(contains(error_of([&] { mask.prune_by_magnitude({.share = 1.5}); }), "1.5"));

  ht::module_mask layers(*net);
  layers.prune_by_magnitude({.share = 0.5, .scope = pf::removal_scope::layers});
  CHECK(layers.report().rows[0].kept == 3);
  CHECK(layers.report().rows[1].kept == 4);

  // The bits follow the memory: a weight with other strides has its zeros at the same places of its matrix.
  ht::module_mask stored(*net);
  stored.from_tensor(mask.to_tensor());
  CHECK(*stored.mask() == *mask.mask());
  CHECK(contains(error_of([&] { stored.from_tensor(torch::zeros({1}, torch::kLong)); }), "words"));
  first.set_data(first.t().contiguous().t());
  CHECK(contains(error_of([&] { mask.apply(); }), "strides have changed"));
}

TEST_CASE("GraSP: the mask is that of exact products, and the module is as before") {
  auto net = make_small(torch::kDouble);
  const torch::nn::functional::CrossEntropyFuncOptions mean;
  Tensor x[2], labels[2];
  torch::manual_seed(5);
  for (int half = 0; half < 2; ++half) {
    x[half] = torch::randn({10, 3, 7, 7}, torch::kDouble);
    labels[half] = torch::arange(10) % 5;
  }
  const auto loss = [&](int half) {
    return torch::nn::functional::cross_entropy(net->forward(x[half]) / 200, labels[half], mean);
  };
  ht::module_mask<double> mask(*net);
  // -theta x H g by differentiation of libtorch's own gradients. Layers of ours go by libtorch's operations.
  std::vector<Tensor> weights, g, h;
  for (const auto& p : net->named_parameters()) {
    const auto rows = mask.report().rows;
    if (std::any_of(rows.begin(), rows.end(), [&](const auto& row) { return row.name == p.key(); })) {
      weights.push_back(p.value());
    }
  }
  for (int half = 0; half < 2; ++half) {
    const auto part = torch::autograd::grad({loss(half)}, weights);
    for (std::size_t i = 0; i < weights.size(); ++i) half == 0 ? g.push_back(part[i]) : void(g[i] += part[i]);
  }
  for (int half = 0; half < 2; ++half) {
    const auto graph = torch::autograd::grad({loss(half)}, weights, {}, torch::nullopt, true);
    Tensor product = torch::zeros({}, torch::kDouble);
    for (std::size_t i = 0; i < weights.size(); ++i) product = product + (graph[i] * g[i]).sum();
    const auto part = torch::autograd::grad({product}, weights);
    for (std::size_t i = 0; i < weights.size(); ++i) half == 0 ? h.push_back(part[i]) : void(h[i] += part[i]);
  }
  std::vector<Tensor> scores;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    scores.push_back((-weights[i].detach() * h[i]).reshape({-1}));
  }
  const Tensor all = torch::cat(scores);
  const std::int64_t removed = all.numel() * 7 / 10;
  const Tensor sorted = std::get<0>(all.sort(0, /*descending=*/true));
  const double limit = (sorted[removed - 1].item<double>() + sorted[removed].item<double>()) / 2;

  std::vector<Tensor> before;
  for (const Tensor& t : net->parameters()) before.push_back(t.detach().clone());
  for (const Tensor& t : net->buffers()) before.push_back(t.clone());
  CHECK(mask.prune_by_grasp(loss, {.share = 0.7, .step = 1e-6}) == removed);
  std::vector<Tensor> after = net->parameters();
  for (const Tensor& t : net->buffers()) after.push_back(t);
  for (std::size_t i = 0; i < after.size(); ++i) CHECK(torch::equal(after[i].detach(), before[i]));
  for (const Tensor& t : net->parameters()) CHECK_FALSE(t.grad().defined());
  mask.apply();
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Tensor kept = weights[i].detach().ne(0).reshape({-1});
    wrong += kept.ne(scores[i] < limit).sum().item<std::int64_t>();
  }
  CHECK(wrong <= 2);  // two neighbours of the limit, by the error of the differences

  // Each gradient has the same dropout, so that differences are those of the weights.
  net->dropout->options.p(0.5);
  ht::module_mask<double> once(*net), twice(*net);
  once.prune_by_grasp(loss, {.share = 0.5, .step = 1e-6});
  twice.prune_by_grasp(loss, {.share = 0.5, .step = 2e-6});
  std::int64_t differ = 0;
  for (std::size_t w = 0; w < once.mask()->words().size(); ++w) {
    differ += std::popcount(once.mask()->words()[w] ^ twice.mask()->words()[w]);
  }
  CHECK(differ <= 4);
  CHECK(contains(error_of([&] { once.prune_by_grasp(loss, {.fresh_linear = true}); }), "fresh_linear"));
  const auto kept = once.mask();
  CHECK_THROWS(once.prune_by_grasp([](int) -> Tensor { throw std::runtime_error("no samples"); }));
  CHECK((once.mask() == kept));
}

namespace {

/// Trains with the optimizer before and after pruning; then weights and states are 0 where they must be.
template <class Optimizer, class Options>
void stays_zero(const Options& options, int states) {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_small();
  Optimizer optimizer(net->parameters(), options);
  const auto train = [&](auto& parallel, int steps) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      loss_of(*net, images(comm, step)).backward();
      parallel.finish();
      optimizer.step();
    }
  };
  {
    ht::distributed parallel(*net, comm);
    train(parallel, 3);
  }
  ht::module_mask pruned(*net);
  pruned.prune_by_magnitude({.share = 0.7});
  pruned.apply(optimizer);
  ht::distributed parallel(*net, comm, ht::compact_options(), pf::compact_sum_options{pruned.mask()});
  train(parallel, 200);
  CHECK(same_everywhere(comm, net->parameters()));
  for (const auto& p : net->named_parameters()) {
    CAPTURE(p.key());
    const Tensor gone = kept_places(*pruned.mask(), p.key(), p.value()).eq(0);
    CHECK(p.value().detach().masked_select(gone).abs().sum().item<float>() == 0.0F);
    CHECK(p.value().detach().masked_select(gone.logical_not()).ne(0).any().item<bool>());
    int defined = 0;
    for (const Tensor& state : ht::detail::states_of(optimizer, p.value())) {
      if (!state.defined()) continue;
      ++defined;
      CHECK(state.masked_select(gone).abs().sum().template item<float>() == 0.0F);
      CHECK(state.masked_select(gone.logical_not()).ne(0).any().template item<bool>());
    }
    CHECK(defined == states);
  }
  const auto report = pruned.report();
  CHECK(report.kept == report.total - report.total * 7 / 10);
}

}  // namespace

TEST_CASE("pruned weights are exactly 0 after 200 steps with momentum and weight decay") {
  using namespace torch::optim;
  stays_zero<SGD>(SGDOptions(0.05).momentum(0.9).weight_decay(1e-2), 1);
  stays_zero<SGD>(SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(1e-2), 1);
  stays_zero<Adam>(AdamOptions(1e-3).weight_decay(1e-2).amsgrad(true), 3);
  stays_zero<AdamW>(AdamWOptions(1e-3).weight_decay(1e-2), 2);
  stays_zero<RMSprop>(RMSpropOptions(1e-3).momentum(0.9).weight_decay(1e-2).centered(true), 3);
  stays_zero<Adagrad>(AdagradOptions(1e-2).initial_accumulator_value(0.1).weight_decay(1e-2), 1);
}

TEST_CASE("without an exchange gradients are masked by a call, and an unknown optimizer is refused") {
  auto net = make_small();
  ht::module_mask pruned(*net);
  pruned.prune_by_magnitude({.share = 0.5});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  pruned.apply(optimizer);
  pruned.mask_gradients();  // there are none
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss_of(*net, torch::randn({2, 3, 7, 7})).backward();
    {
      const torch::NoGradGuard no_grad;
      net->conv->weight.mutable_grad().mul_(INFINITY);  // not finite, 0 x infinity included
      const Tensor other = torch::empty_strided({8, 3, 3, 3}, {1, 8, 24, 72});
      other.copy_(net->conv->weight.grad());
      net->conv->weight.mutable_grad() = other;
    }
    pruned.mask_gradients();
    const Tensor gone = kept_places(*pruned.mask(), "conv.weight", net->conv->weight).eq(0);
    CHECK(net->conv->weight.grad().masked_select(gone).eq(0).all().item<bool>());
    CHECK_FALSE(net->conv->weight.grad().isfinite().all().item<bool>());
    net->conv->weight.mutable_grad() = torch::zeros_like(net->conv->weight.detach());
    optimizer.step();
  }
  for (const auto& p : net->named_parameters()) {
    const Tensor gone = kept_places(*pruned.mask(), p.key(), p.value()).eq(0);
    CHECK(p.value().detach().masked_select(gone).abs().sum().item<float>() == 0.0F);
  }
  torch::optim::LBFGS other(net->parameters());
  using key = std::remove_cvref_t<decltype(other.state().begin()->first)>;
  other.state()[ht::detail::state_key<key>(net->fc->weight)] =
      std::make_unique<torch::optim::LBFGSParamState>();
  CHECK(contains(error_of([&] { pruned.apply(other); }), "unknown kind"));
}

TEST_CASE("a compact exchange leaves the bits of a full exchange of masked gradients") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (const auto progress : {pf::exchange_progress::automatic, pf::exchange_progress::calls}) {
    for (const double share : {0.0, 0.6, 1.0}) {
      CAPTURE(share);
      auto net = make_small(), plain = make_small();
      ht::module_mask pruned(*net), same(*plain);
      pruned.prune_by_magnitude({.share = share});
      same.prune_by_magnitude({.share = share});
      pruned.apply();
      same.apply();
      pf::exchange_options options;
      options.progress = progress;
      options.plan = pf::default_plan(comm.size());
      options.plan->buckets = {256, 512};
      ht::distributed full(*plain, comm, options);
      ht::distributed compact(*net, comm, ht::compact_options(options),
                              pf::compact_sum_options{pruned.mask()});
      CHECK(compact.exchange().buckets().size() > 3);
      CHECK(compact.exchange().payload_bytes() == 4 * pruned.mask()->survivors());
      for (int step = 0; step < 3; ++step) {
        const Tensor x = images(comm, step);
        net->zero_grad(false);
        plain->zero_grad(false);
        loss_of(*net, x).backward();
        compact.finish();
        {
          const auto quiet = full.accumulate();
          loss_of(*plain, x).backward();
        }
        same.mask_gradients();
        full.finish();
        const auto ours = net->parameters(), theirs = plain->parameters();
        for (std::size_t i = 0; i < ours.size(); ++i) {
          CAPTURE(i);
          CHECK(agree(comm, ours[i].grad(), theirs[i].grad()));
        }
        CHECK(same_everywhere(comm, {net->conv->weight.grad(), net->fc->weight.grad()}));
        if (share < 1.0) CHECK(net->conv->weight.grad().ne(0).any().item<bool>());
        if (share == 1.0) CHECK(net->conv->weight.grad().eq(0).all().item<bool>());
      }
    }
  }
}

TEST_CASE("ranks with other masks are refused, and a broadcast makes masks equal") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_small();
  ht::module_mask pruned(*net);
  pruned.prune_by_magnitude({.share = comm.rank() == 0 ? 0.5 : 0.6});
  ht::distributed parallel(*net, comm);
  const auto use = [&] { parallel.set_exchange({}, pf::compact_sum_options{pruned.mask()}); };
  if (comm.size() > 1) CHECK(contains(error_of(use), "mask"));
  CHECK_FALSE(parallel.options().compress_by_bucket);
  // The exchange is as before.
  loss_of(*net, images(comm, 0)).backward();
  CHECK(parallel.finish());
  CHECK(net->conv->weight.grad().ne(0).all().item<bool>());
  pruned.broadcast(comm);
  CHECK(pruned.mask()->kept() == pruned.mask()->prunable() - pruned.mask()->prunable() / 2);
  use();
  CHECK(parallel.exchange().steps() == 1);
  net->zero_grad();
  loss_of(*net, images(comm, 0)).backward();
  CHECK(contains(error_of(use), "during a step"));
  CHECK(parallel.finish());
  CHECK(net->conv->weight.grad().eq(0).any().item<bool>());
  net->fc->weight.set_data(torch::zeros({5, 12}).t().contiguous().t());
  CHECK(contains(error_of([&] { static_cast<void>(parallel.store()); }), "fc.weight"));
}

namespace {

/// A program's own masks of two layers, by products.
struct own_masks {
  Tensor conv, fc;

  explicit own_masks(const Small& net)
      : conv(net.conv->weight.detach().abs().gt(0.1).to(torch::kFloat)),
        fc(net.fc->weight.detach().abs().gt(0.1).to(torch::kFloat)) {}
  void apply(Small& net) const {
    const torch::NoGradGuard no_grad;
    net.conv->weight.mul_(conv);
    net.fc->weight.mul_(fc);
  }
};

}  // namespace

TEST_CASE("zero_tracker: full exchanges until all ranks have the same zeros, and after a mismatch") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const bool is_last = comm.rank() == comm.size() - 1;
  auto net = make_small(), plain = make_small();
  const own_masks masks(*net);
  ht::distributed parallel(*net, comm), full(*plain, comm);
  ht::zero_tracker zeros(parallel, {.steps = 3});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD reference(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const std::int64_t largest = net->fc->weight.abs().argmax().item<std::int64_t>();
  std::vector<bool> compact, expected;
  for (int step = 0; step < 30; ++step) {
    compact.push_back(zeros.mask() != nullptr);
    const Tensor x = images(comm, step);
    net->zero_grad(false);
    plain->zero_grad(false);
    loss_of(*net, x).backward();
    parallel.finish();
    loss_of(*plain, x).backward();
    full.finish();
    const Tensor gone = masks.conv.eq(0);
    CHECK(net->conv->weight.grad().masked_select(gone).eq(0).all().item<bool>() == compact.back());
    CHECK(agree(comm, net->conv->weight.grad().mul(masks.conv), plain->conv->weight.grad().mul(masks.conv)));
    optimizer.step();
    reference.step();
    masks.apply(*net);
    masks.apply(*plain);
    if (is_last && (step == 8 || (comm.size() > 1 && step >= 16 && step <= 22))) {
      const torch::NoGradGuard no_grad;
      net->fc->weight.view({-1})[largest].zero_();
      plain->fc->weight.view({-1})[largest].zero_();
    }
    const auto ours = net->parameters(), theirs = plain->parameters();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      CHECK(agree(comm, ours[i].detach(), theirs[i].detach()));
    }
    zeros.update();
  }
  // One weight is 0 on the last rank alone after step 8, and not after step 9. With several ranks it is 0
  // there from step 16 to step 22: all ranks are ready with different zeros after steps 19 and 22.
  for (int step = 0; step < 30; ++step) {
    const bool third = step >= 27 || (comm.size() == 1 && step > 16);
    expected.push_back((step >= 4 && step <= 8) || (step >= 13 && step <= 16) || third);
  }
  CHECK(compact == expected);
  CHECK(zeros.counters().resets == (comm.size() == 1 ? 0 : 2));
  CHECK(zeros.counters().compact + zeros.counters().full == 30);
  CHECK(parallel.exchange().steps() == 30);
  CHECK(zeros.mask()->kept() < zeros.mask()->prunable());
}

TEST_CASE("zero_tracker: without zeros the exchange stays the full one, with its compressor") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_small();
  ht::distributed parallel(*net, comm, {}, pf::signum_options{});
  ht::zero_tracker zeros(parallel, {.steps = 1});
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  const auto train_step = [&](int step) {
    net->zero_grad(false);
    loss_of(*net, images(comm, step)).backward();
    parallel.finish();
    optimizer.step();
  };
  const auto signs = [&] {  // 0: as many ranks have one sign as the other
    const Tensor size = net->fc->weight.grad().abs();
    return size.eq(1).logical_or(size.eq(0)).all().item<bool>();
  };
  for (int step = 0; step < 3; ++step) {
    train_step(step);
    zeros.update();
    CHECK(signs());
  }
  CHECK(zeros.counters().compact == 2);
  CHECK((zeros.mask() == nullptr));
  const own_masks masks(*net);
  for (int step = 3; step < 6; ++step) {
    masks.apply(*net);
    zeros.update();
    CHECK((zeros.mask() != nullptr) == (step > 3));
    train_step(step);
    CHECK(signs() == (step == 3));
  }
  {
    const torch::NoGradGuard no_grad;
    net->fc->weight.fill_(1);
  }
  zeros.update();
  CHECK((zeros.mask() == nullptr));
  train_step(6);
  CHECK(signs());
}

TEST_CASE("docs: pruned modules on several ranks") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_small();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  {
    // [pruning]
    ht::module_mask pruned(*net);
    pruned.prune_by_magnitude({.share = 0.8});
    pruned.apply(optimizer);  // pruned weights and their momentum are 0
    ht::distributed parallel(*net, comm, ht::compact_options(), pf::compact_sum_options{pruned.mask()});
    // [pruning]
    CHECK(pruned.report().kept == pruned.report().total - pruned.report().total * 4 / 5);
  }
  const own_masks masks(*net);
  int step = 0;
  const auto backward = [&] { loss_of(*net, images(comm, step++)).backward(); };
  const auto apply_my_mask = [&](Small& to) { masks.apply(to); };
  // [zeros]
  ht::distributed parallel(*net, comm);
  ht::zero_tracker zeros(parallel);
  for (int i = 0; i < 20; ++i) {
    optimizer.zero_grad();
    backward();
    parallel.finish();
    optimizer.step();
    apply_my_mask(*net);
    zeros.update();
  }
  // [zeros]
  CHECK((zeros.mask() != nullptr));
  CHECK(zeros.counters().compact == 15);
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("local");

namespace {

std::vector<Tensor> values_of(const torch::nn::Module& m) {
  std::vector<Tensor> all;
  for (const Tensor& t : m.parameters()) all.push_back(t.detach().clone());
  return all;
}

Tensor mean_over(pf::mpi::communicator& comm, const Tensor& t) {
  Tensor sum = t.detach().to(torch::kDouble).contiguous();
  if (sum.data_ptr() == t.data_ptr()) sum = sum.clone();
  comm.all_reduce_sum(std::span<double>(sum.data_ptr<double>(), static_cast<std::size_t>(sum.numel())));
  return (sum / comm.size()).to(t.scalar_type());
}

}  // namespace

TEST_CASE("one local step and outer rate 1 average the parameters") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_small(), plain = make_small();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));  // before
  torch::optim::SGD reference(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  ht::local_training local(*net, comm, {.local_steps = 1, .outer_rate = 1.0, .outer_momentum = 0.0});
  for (int step = 0; step < 5; ++step) {
    const Tensor x = images(comm, step);
    for (auto* one : {net.get(), plain.get()}) {
      one->zero_grad();
      loss_of(*one, x).backward();
    }
    optimizer.step();
    reference.step();
    local.step_done();
    CHECK(same_everywhere(comm, net->parameters()));
    const auto ours = net->parameters(), theirs = plain->parameters();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      const torch::NoGradGuard no_grad;
      theirs[i].copy_(mean_over(comm, theirs[i]));
      CHECK(difference(ours[i], theirs[i]) < 1e-5);
    }
  }
  CHECK(local.report().local_steps == 5);
  CHECK(local.exchange().is_synchronized());
}

TEST_CASE("four local steps of Adam and an outer Nesterov step are those of a plain program") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_small(torch::kDouble), plain = make_small(torch::kDouble);
  if (comm.rank() > 0) {
    const torch::NoGradGuard no_grad;
    net->conv->weight.mul_(2);  // all get rank 0's
  }
  ht::local_training<pf::mpi::communicator, double> local(
      *net, comm, {.local_steps = 4, .outer_rate = 0.7, .outer_momentum = 0.9});
  torch::optim::Adam optimizer(net->parameters(), 1e-2), reference(plain->parameters(), 1e-2);
  std::vector<Tensor> theta = values_of(*plain), velocity;
  for (const Tensor& t : theta) velocity.push_back(torch::zeros_like(t));
  for (int step = 1; step <= 14; ++step) {
    const Tensor x = images(comm, step, torch::kDouble);
    for (auto* one : {net.get(), plain.get()}) {
      one->zero_grad();
      loss_of(*one, x).backward();
    }
    optimizer.step();
    reference.step();
    local.step_done();
    if (step == 14) local.synchronize();  // in the middle of a round
    const auto ours = net->parameters(), theirs = plain->parameters();
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      if (step % 4 == 0 || step == 14) {
        const Tensor change = mean_over(comm, theta[i] - theirs[i]);
        velocity[i] = 0.9 * velocity[i] + change;
        theta[i] -= 0.7 * (change + 0.9 * velocity[i]);
        theirs[i].copy_(theta[i]);
      }
      CHECK(difference(ours[i], theirs[i]) < 1e-8);
    }
  }
  CHECK(same_everywhere(comm, net->parameters()));
  CHECK(same_everywhere(comm, net->buffers()));
  CHECK(difference(net->norm->running_mean, mean_over(comm, plain->norm->running_mean)) < 1e-8);
  CHECK(local.exchange().outer_steps() == 4);
}

TEST_CASE("fragments, delays, compressors and pruned weights") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (const bool compressed : {false, true}) {
    auto net = make_small();
    ht::module_mask pruned(*net);
    pruned.prune_by_magnitude({.share = 0.6});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    pruned.apply(optimizer);
    pf::compression_options compression;
    if (compressed) compression = pf::compact_sum_options{pruned.mask()};
    ht::local_training local(*net, comm, {.local_steps = 4, .fragments = 3, .delay = 1}, compression);
    pruned.apply(optimizer);  // in the arena
    if (compressed) CHECK(local.exchange().payload_bytes() == 4 * pruned.mask()->survivors());
    for (int step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      loss_of(*net, images(comm, step)).backward();
      pruned.mask_gradients();
      optimizer.step();
      local.step_done();
    }
    local.synchronize();
    CHECK(same_everywhere(comm, net->parameters()));
    for (const auto& p : net->named_parameters()) {
      const Tensor gone = kept_places(*pruned.mask(), p.key(), p.value()).eq(0);
      CHECK(p.value().detach().masked_select(gone).abs().sum().item<float>() == 0.0F);
    }
  }
}

TEST_CASE("values that have left the arena come back by restart, and outlive the object") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_small(), other = make_small();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  {
    const torch::NoGradGuard no_grad;
    other->fc->weight.fill_(comm.rank() + 2.0);
  }
  std::vector<Tensor> before;
  {
    ht::local_training local(*net, comm, {.local_steps = 2});
    ht::distributed parallel(*net, comm);  // shows the values where they are now
    std::stringstream file;
    torch::save(other, file);
    torch::load(net, file);
    CHECK(contains(error_of([&] { local.step_done(); }), "restart()"));
    local.restart();
    CHECK(parallel.store().parameters()[1].thing->values()[0] == 2.0F);
    CHECK(net->fc->weight.eq(2).all().item<bool>());
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      net->fc->forward(torch::ones({1, 12})).sum().backward();
      parallel.finish();
      optimizer.step();
      local.step_done();
    }
    // theta - 0.7 (D + 0.9 D), D = 0.2
    CHECK(net->fc->weight[0][0].item<float>() == doctest::Approx(2 - 0.7 * 1.9 * 0.2));
    CHECK(same_everywhere(comm, net->parameters()));
    before = values_of(*net);
  }
  const auto after = net->parameters();
  for (std::size_t i = 0; i < after.size(); ++i) CHECK(torch::equal(after[i], before[i]));
  auto doubles = make_small(torch::kDouble);
  CHECK(contains(error_of([&] { ht::local_training refused(*doubles, comm); }), "Double on cpu"));
  CHECK(
      contains(error_of([&] { ht::local_training refused(*net, comm, {.local_steps = 0}); }), "local_steps"));
}

TEST_CASE("docs: local steps") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_small();
  torch::optim::AdamW optimizer(net->parameters());
  int step = 0;
  const auto backward = [&] { loss_of(*net, images(comm, step++)).backward(); };
  // [local]
  ht::local_training local(*net, comm, {.local_steps = 10});
  for (int i = 0; i < 20; ++i) {
    optimizer.zero_grad();
    backward();
    optimizer.step();
    local.step_done();  // every tenth one exchanges
  }
  local.synchronize();  // before an evaluation or a checkpoint
  // [local]
  CHECK(local.report().outer_steps == 2);
  CHECK(same_everywhere(comm, net->parameters()));
}

TEST_SUITE_END();
