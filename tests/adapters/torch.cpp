// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The libtorch adapter against libtorch itself. One file: compiling libtorch's headers takes longer than
// ours.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <sstream>
#include <string>

#include <pufferfish/adapters/torch.hpp>
#include <pufferfish/distributed.hpp>
#include <pufferfish/distributed/mpi_environment.hpp>

#include "torch_common.hpp"

#include "../../examples/common/usage.hpp"

// The programs of the page, so that they compile; what they include is here already. libtorch's interface
// mixes signs.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
namespace torch_mnist_plain {
#include "../../examples/torch_mnist/plain.cpp"
}
namespace torch_mnist_lowrank {
#include "../../examples/torch_mnist/lowrank.cpp"
}
#pragma GCC diagnostic pop

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

double tolerance(torch::Dtype dtype) { return dtype == torch::kFloat ? 1e-5 : 1e-12; }

/// Random sizes.
class dice {
 public:
  explicit dice(unsigned seed) : engine_(seed) {}
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  bool coin() { return between(0, 1) == 1; }

 private:
  std::mt19937 engine_;
};

std::vector<Tensor> gradients_of(const std::vector<Tensor>& leaves) {
  std::vector<Tensor> found;
  for (const Tensor& t : leaves)
    found.push_back(t.defined() && t.grad().defined() ? t.grad().clone() : Tensor());
  return found;
}
void clear_gradients(const std::vector<Tensor>& leaves) {
  for (const Tensor& t : leaves) {
    if (t.defined()) t.mutable_grad() = Tensor();
  }
}

/// Runs `ours` and `theirs` (of the same leaves) forward and back and compares everything.
template <class Ours, class Theirs>
void compare(const std::vector<Tensor>& leaves, double most, Ours&& ours, Theirs&& theirs) {
  const Tensor y = ours();
  const Tensor dy = torch::randn_like(y);
  clear_gradients(leaves);
  y.backward(dy, /*retain_graph=*/true);
  const auto once = gradients_of(leaves);
  // Again through the same graph: everything is added.
  y.backward(dy);
  const auto twice = gradients_of(leaves);
  clear_gradients(leaves);
  const Tensor expected = theirs();
  expected.backward(dy);
  const auto reference = gradients_of(leaves);
  clear_gradients(leaves);
  CHECK(difference(y, expected) <= most);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    CAPTURE(i);
    CHECK(difference(once[i], reference[i]) <= most);
    if (once[i].defined()) CHECK(difference(twice[i], 2 * once[i]) <= 1e-6);
  }
}

std::vector<Tensor> parameters_and(const torch::nn::Module& m, const Tensor& x) {
  std::vector<Tensor> all = m.parameters();
  all.push_back(x);
  return all;
}

/// Gives a weight the given rank, so that its factors are the weight itself.
void make_rank(Tensor& weight, std::int64_t rank) {
  const torch::NoGradGuard no_grad;
  const std::int64_t rows = weight.size(0), columns = weight.numel() / rows;
  weight.copy_(
      (torch::randn({rows, rank}, weight.options()).matmul(torch::randn({rank, columns}, weight.options())) /
       std::sqrt(static_cast<double>(columns)))
          .reshape(weight.sizes()));
}

}  // namespace

TEST_SUITE_BEGIN("layers");

TEST_CASE("layer_traits show libtorch's weights") {
  torch::manual_seed(1);
  torch::nn::Linear linear(12, 7);
  const auto factors = pf::svd_factors(*linear, pf::fixed_rank{3}).front();
  CHECK(factors.report.rows == 7);
  CHECK(factors.report.cols == 12);
  const auto layer = pf::svd_factorize<3>(*linear);
  CHECK(layer.bias()(5) == linear->bias[5].item<float>());

  torch::nn::Conv2d conv(
      torch::nn::Conv2dOptions(4, 6, {3, 5}).stride({2, 1}).padding({1, 2}).dilation({1, 2}));
  conv->to(torch::kDouble);
  const pf::conv_shape shape = pf::layer_traits<torch::nn::Conv2dImpl>::shape(*conv);
  CHECK((shape == pf::conv_shape{4, 6, {3, 5}, {2, 1}, {1, 2}, {1, 2}}));
  const auto low_rank = pf::svd_factorize<pf::LowRankConv<double>>(ht::of<double>(*conv), pf::fixed_rank{6},
                                                                   {.allow_growth = true});
  double worst = 0;
  const auto dense = low_rank.to_dense();
  for (pf::index_t o = 0; o < 6; ++o) {
    for (pf::index_t k = 0; k < 5; ++k) {
      worst = std::max(worst, std::abs(dense(o, 1, 2, k) - conv->weight.index({o, 1, 2, k}).item<double>()));
    }
  }
  CHECK(worst < 1e-12);

  torch::nn::LSTM lstm(torch::nn::LSTMOptions(5, 4).num_layers(2));
  std::vector<pf::factor_report> reports;
  const auto second = pf::svd_factorize<pf::LowRankLSTM<float>>(ht::of<float>(*lstm, 1), pf::fixed_rank{4},
                                                                {.allow_growth = true}, &reports);
  CHECK(reports.size() == 8);
  CHECK(reports[2].name == "layer.weight_ig");
  CHECK(second.input_size() == 4);
  const auto all = lstm->all_weights();
  const Tensor both = all[6] + all[7];
  for (pf::index_t i = 0; i < 16; ++i) CHECK(second.bias()(i) == both[i].item<float>());
  CHECK(std::abs(second.input_to_dense()(9, 2) - all[4].index({9, 2}).item<float>()) < 1e-5F);

  torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(8, 2));
  const auto projections =
      pf::svd_factorize<pf::LowRankAttention<float>>(*attention, pf::fixed_rank{8}, {.allow_growth = true});
  CHECK(projections.shape().heads == 2);
  const auto key = projections.key().to_dense();
  CHECK(std::abs(key(3, 5) - attention->in_proj_weight.index({11, 5}).item<float>()) < 1e-5F);
  const auto out = projections.output().to_dense();
  CHECK(std::abs(out(3, 5) - attention->out_proj->weight.index({3, 5}).item<float>()) < 1e-5F);
}

TEST_CASE("layer_traits show each group of a convolution and the table of an embedding") {
  torch::manual_seed(14);
  torch::nn::Conv2d groups(torch::nn::Conv2dOptions(6, 8, 3).groups(2));
  const auto made = pf::svd_factors(*groups, pf::fixed_rank{3});
  REQUIRE(made.size() == 2);
  CHECK(made[1].report.rows == 4);
  CHECK(made[1].report.cols == 27);
  CHECK(made[1].report.name == "layer.weight[1]");
  const auto low_rank =
      pf::svd_factorize<pf::LowRankConv<float>>(*groups, pf::fixed_rank{4}, {.allow_growth = true});
  CHECK(low_rank.shape().groups == 2);
  const auto dense = low_rank.to_dense();
  CHECK(std::abs(dense(6, 2, 1, 0) - groups->weight.index({6, 2, 1, 0}).item<float>()) < 1e-5F);

  torch::nn::Embedding words(torch::nn::EmbeddingOptions(30, 6).padding_idx(2));
  const auto table =
      pf::svd_factorize<pf::LowRankEmbedding<float>>(*words, pf::fixed_rank{6}, {.allow_growth = true});
  CHECK(table.vocabulary() == 30);
  CHECK(table.padding() == 2);
  CHECK(std::abs(table.to_dense()(17, 3) - words->weight.index({17, 3}).item<float>()) < 1e-5F);
  words->to(torch::kDouble);
  CHECK(pf::svd_factors(ht::of<double>(*words), pf::rank_ratio{0.5}).front().rank() == 3);
}

TEST_CASE("layer_traits refuse what they cannot show") {
  torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(9, 4).sparse(true));
  const std::string refused = error_of([&] { pf::svd_factors(*sparse, pf::fixed_rank{1}); });
  CHECK(contains(refused, "torch::nn::Embedding 9 x 4"));
  CHECK(contains(refused, "sparse gradients"));
  torch::nn::Embedding bounded(torch::nn::EmbeddingOptions(9, 4).max_norm(1.0));
  CHECK(contains(error_of([&] { pf::svd_factors(*bounded, pf::fixed_rank{1}); }), "max_norm"));
  torch::nn::Embedding scaled(torch::nn::EmbeddingOptions(9, 4).scale_grad_by_freq(true));
  CHECK(contains(error_of([&] { pf::svd_factors(*scaled, pf::fixed_rank{1}); }), "scale_grad_by_freq"));
  torch::nn::Linear linear(4, 4);
  linear->to(torch::kDouble);
  const std::string wrong = error_of([&] { pf::svd_factors(*linear, pf::fixed_rank{1}); });
  CHECK(contains(wrong, "torch::nn::Linear 4 -> 4"));
  CHECK(contains(wrong, "Double on cpu"));
  linear->to(torch::kHalf);
  CHECK(contains(error_of([&] { pf::svd_factors(ht::of<double>(*linear), pf::fixed_rank{1}); }), "Half"));

  torch::nn::Conv2d circular(torch::nn::Conv2dOptions(4, 4, 3).padding(1).padding_mode(torch::kCircular));
  CHECK(contains(error_of([&] { pf::svd_factors(*circular, pf::fixed_rank{1}); }), "else than zeros"));
  torch::nn::Conv2d uneven(torch::nn::Conv2dOptions(4, 4, 2).padding(torch::kSame));
  CHECK(contains(error_of([&] { pf::svd_factors(*uneven, pf::fixed_rank{1}); }), "`same`"));
  torch::nn::Conv2d same(torch::nn::Conv2dOptions(4, 4, 3).padding(torch::kSame).dilation(2));
  CHECK((pf::layer_traits<torch::nn::Conv2dImpl>::shape(*same).padding == pf::size2{2, 2}));

  torch::nn::LSTM lstm(torch::nn::LSTMOptions(5, 4).num_layers(2));
  CHECK(contains(error_of([&] { pf::svd_factors(*lstm, pf::fixed_rank{1}); }), "say which"));
  CHECK(
      contains(error_of([&] { pf::svd_factors(ht::of<float>(*lstm, 2), pf::fixed_rank{1}); }), "no layer 2"));
  torch::nn::LSTM both(torch::nn::LSTMOptions(5, 4).bidirectional(true));
  CHECK(contains(error_of([&] { pf::svd_factors(*both, pf::fixed_rank{1}); }), "two directions"));
  torch::nn::MultiheadAttention wide(torch::nn::MultiheadAttentionOptions(8, 2).kdim(4).vdim(4));
  CHECK(contains(error_of([&] { pf::svd_factors(ht::of<float>(*wide), pf::fixed_rank{1}); }),
                 "MultiheadAttention"));
}

TEST_CASE("LowRankLinear: outputs and gradients are those of two linear layers") {
  torch::manual_seed(2);
  dice sizes(2);
  for (int round = 0; round < 24; ++round) {
    const auto dtype = round % 2 == 0 ? torch::kFloat : torch::kDouble;
    const std::int64_t in = sizes.between(1, 150), out = sizes.between(1, 150);
    const std::int64_t rank = sizes.between(1, std::min(in, out));
    ht::LowRankLinear layer(in, out, rank, sizes.coin());
    layer->to(dtype);
    std::vector<std::int64_t> shape{sizes.between(1, 200), in};
    if (sizes.coin()) shape.insert(shape.begin(), sizes.between(1, 3));
    if (round == 5) shape = {in};
    if (round == 6) shape = {0, in};
    Tensor x = torch::randn(shape, dtype);
    if (round % 5 == 4 && x.dim() == 2) x = torch::randn({in, shape[0]}, dtype).t();
    x.requires_grad_();
    if (round % 3 == 2) layer->up.set_requires_grad(false);
    CAPTURE(layer->describe());
    CAPTURE(x.sizes());
    compare(
        parameters_and(*layer, x), tolerance(dtype), [&] { return layer->forward(x); },
        [&] {
          return torch::nn::functional::linear(torch::nn::functional::linear(x, layer->down), layer->up,
                                               layer->bias);
        });
    const torch::NoGradGuard no_grad;
    CHECK(difference(layer->forward(x), torch::nn::functional::linear(x, layer->to_dense(), layer->bias)) <=
          tolerance(dtype));
  }
}

TEST_CASE("LowRankConv2d: outputs and gradients are those of two convolutions") {
  torch::manual_seed(3);
  dice sizes(3);
  for (int round = 0; round < 40; ++round) {
    const auto dtype = round % 2 == 0 ? torch::kFloat : torch::kDouble;
    const pf::size2 kernel{sizes.between(1, 4), sizes.between(1, 4)};
    const pf::size2 stride{sizes.between(1, 3), sizes.between(1, 3)};
    const pf::size2 padding{sizes.between(0, 2), sizes.between(0, 2)};
    const pf::size2 dilation{sizes.between(1, 2), sizes.between(1, 2)};
    const std::int64_t in = sizes.between(1, 40), out = sizes.between(1, 40);
    const std::int64_t rank = sizes.between(1, std::min(out, in * kernel.height * kernel.width));
    pf::conv_shape shape{in, out, kernel, stride, padding, dilation};
    // Every fourth: the common case, in float by Winograd's algorithm.
    if (round % 4 == 0) shape = pf::conv_shape::square(in, out, 3, 1, 1);
    ht::LowRankConv2d layer(shape, std::min<std::int64_t>(rank, shape.patch()), sizes.coin());
    layer->to(dtype);
    const bool channels_last = sizes.coin();
    Tensor x = torch::randn(
        {sizes.between(round == 7 ? 0 : 1, 3), in, sizes.between(8, 14), sizes.between(8, 14)}, dtype);
    if (channels_last) x = x.contiguous(torch::MemoryFormat::ChannelsLast);
    x.requires_grad_();
    CAPTURE(layer->describe());
    CAPTURE(x.sizes());
    const auto plain = [&] {
      return torch::conv2d(torch::conv2d(x, layer->down, {}, {shape.stride.height, shape.stride.width},
                                         {shape.padding.height, shape.padding.width},
                                         {shape.dilation.height, shape.dilation.width}),
                           layer->up, layer->bias);
    };
    compare(
        parameters_and(*layer, x), tolerance(dtype), [&] { return layer->forward(x); }, plain);
    CHECK(layer->forward(x).is_contiguous(torch::MemoryFormat::ChannelsLast));
    if (channels_last) CHECK(layer->statistics().input_copies == 0);
    if (!channels_last && in > 1 && x.numel() > 0) CHECK(layer->statistics().input_copies == 2);
    CHECK(layer->statistics().parameter_copies == 0);
  }
}

TEST_CASE("LowRankConv2d: grouped and depthwise convolutions are those of libtorch") {
  torch::manual_seed(15);
  dice sizes(15);
  for (int round = 0; round < 24; ++round) {
    const auto dtype = round % 2 == 0 ? torch::kFloat : torch::kDouble;
    const std::int64_t groups = sizes.between(1, 6), wide = sizes.between(1, 9);
    pf::conv_shape shape{groups * sizes.between(1, 5),
                         groups * wide,
                         {sizes.between(1, 3), sizes.between(1, 3)},
                         {sizes.between(1, 2), sizes.between(1, 2)},
                         {sizes.between(0, 2), sizes.between(0, 2)},
                         {sizes.between(1, 2), sizes.between(1, 2)},
                         groups};
    if (round % 4 == 3) shape.in_channels = groups;  // depthwise
    const std::int64_t rank = sizes.between(1, std::min(shape.group_outputs(), shape.patch()));
    ht::LowRankConv2d layer(shape, rank, sizes.coin());
    layer->to(dtype);
    Tensor x = torch::randn({sizes.between(round == 6 ? 0 : 1, 3), shape.in_channels, 9, 8}, dtype);
    if (sizes.coin()) x = x.contiguous(torch::MemoryFormat::ChannelsLast);
    x.requires_grad_();
    CAPTURE(layer->describe());
    CAPTURE(x.sizes());
    compare(
        parameters_and(*layer, x), tolerance(dtype), [&] { return layer->forward(x); },
        [&] {
          return torch::nn::functional::conv2d(x, layer->to_dense(),
                                               torch::nn::functional::Conv2dFuncOptions()
                                                   .bias(layer->bias)
                                                   .stride({shape.stride.height, shape.stride.width})
                                                   .padding({shape.padding.height, shape.padding.width})
                                                   .dilation({shape.dilation.height, shape.dilation.width})
                                                   .groups(groups));
        });
    const torch::NoGradGuard no_grad;
    const Tensor y = layer->forward(x);
    const Tensor other = layer->forward(x.to(torch::kFloat).to(dtype));  // the path without gradients
    CHECK(difference(other, y) <= 1e-5);
    CHECK(layer->statistics().parameter_copies == 0);
  }

  // From libtorch's own layers: the groups of full rank compute the same, and gradients reach the input.
  for (const std::int64_t groups : {2, 4, 8}) {
    torch::nn::Conv2d dense(torch::nn::Conv2dOptions(8, 24, 3).padding(1).stride(2).groups(groups));
    dense->to(torch::kDouble);
    const ht::LowRankConv2d made = ht::low_rank(
        *dense, pf::fixed_rank{std::min<std::int64_t>(24 / groups, 72 / groups)}, {.allow_growth = true});
    Tensor x = torch::randn({2, 8, 7, 6}, torch::kDouble).requires_grad_();
    CHECK(difference(made->to_dense(), dense->weight) < 1e-12);
    compare(
        {x}, 1e-12, [&] { return ht::LowRankConv2d(made)->forward(x); }, [&] { return dense->forward(x); });
  }
}

TEST_CASE("LowRankEmbedding: outputs and gradients are those of the dense product") {
  torch::manual_seed(16);
  dice sizes(16);
  for (int round = 0; round < 16; ++round) {
    const auto dtype = round % 2 == 0 ? torch::kFloat : torch::kDouble;
    const std::int64_t tokens = sizes.between(1, 60), width = sizes.between(1, 40);
    ht::LowRankEmbeddingOptions options(tokens, width, sizes.between(1, std::min(tokens, width)));
    const bool padded = sizes.coin();
    const std::int64_t padding = sizes.between(0, tokens - 1);
    if (padded) options.padding_idx(sizes.coin() ? padding : padding - tokens);
    ht::LowRankEmbedding layer(options);
    layer->to(dtype);
    std::vector<std::int64_t> shape{sizes.between(0, 20)};
    if (sizes.coin()) shape.push_back(sizes.between(1, 4));
    if (round == 3) shape.clear();
    const Tensor text = torch::randint(tokens, shape, round % 3 == 0 ? torch::kInt : torch::kLong);
    CAPTURE(layer->describe());
    compare(
        layer->parameters(), tolerance(dtype), [&] { return layer->forward(text); },
        [&] {
          // Row padding of the thin table is a constant.
          Tensor down = layer->down;
          if (padded) {
            const Tensor rows = torch::arange(tokens).unsqueeze(1) == padding;
            down = torch::where(rows, down.detach(), down);
          }
          return down.matmul(layer->up.t()).index_select(0, text.flatten().to(torch::kLong)).reshape([&] {
            shape.push_back(width);
            auto all = shape;
            shape.pop_back();
            return all;
          }());
        });
    if (padded) CHECK(layer->down[padding].abs().max().item<double>() == 0.0);
  }

  // From libtorch's own layer at full rank.
  torch::nn::Embedding dense(torch::nn::EmbeddingOptions(40, 7).padding_idx(3));
  dense->weight.set_requires_grad(false);
  const ht::LowRankEmbedding made = ht::low_rank(*dense, pf::fixed_rank{7}, {.allow_growth = true});
  const Tensor text = torch::randint(40, {5, 6}, torch::kLong);
  CHECK(difference(ht::LowRankEmbedding(made)->forward(text), dense->forward(text)) < 1e-5);
  CHECK((made->options.padding_idx() == 3));
  CHECK(made->down[3].abs().max().item<double>() == 0.0);
  CHECK_FALSE(made->down.requires_grad());
  CHECK(ht::LowRankEmbedding(made)->forward(text.to(torch::kInt)).sizes() == torch::IntArrayRef({5, 6, 7}));
  const auto twin = std::dynamic_pointer_cast<ht::LowRankEmbeddingImpl>(made->clone());
  CHECK(torch::equal(twin->forward(text), ht::LowRankEmbedding(made)->forward(text)));
}

TEST_CASE("LowRankMultiheadAttention: outputs, weights and gradients are libtorch's") {
  torch::manual_seed(17);
  dice sizes(17);
  for (int round = 0; round < 16; ++round) {
    const auto dtype = round % 2 == 0 ? torch::kFloat : torch::kDouble;
    const std::int64_t heads = sizes.between(1, 4), width = heads * sizes.between(1, 8);
    const std::int64_t steps = sizes.between(1, 7), sources = sizes.between(1, 7),
                       batch = sizes.between(1, 3);
    const auto options = torch::nn::MultiheadAttentionOptions(width, heads).bias(sizes.coin());
    pf::rank_list ranks;
    for (int i = 0; i < 4; ++i) ranks.push_back(sizes.between(1, width));
    ht::LowRankMultiheadAttention layer(options, ranks);
    layer->to(dtype);
    torch::nn::MultiheadAttention dense(options);
    dense->to(dtype);
    {
      const torch::NoGradGuard no_grad;
      dense->in_proj_weight.copy_(
          torch::cat({layer->query->to_dense(), layer->key->to_dense(), layer->value->to_dense()}));
      dense->out_proj->weight.copy_(layer->output->to_dense());
      if (options.bias()) {
        dense->in_proj_bias.copy_(torch::cat({layer->query->bias, layer->key->bias, layer->value->bias}));
        dense->out_proj->bias.copy_(layer->output->bias);
      }
    }
    Tensor q = torch::randn({steps, batch, width}, dtype).requires_grad_();
    Tensor k = torch::randn({sources, batch, width}, dtype).requires_grad_();
    Tensor v = torch::randn({sources, batch, width}, dtype).requires_grad_();
    if (round % 4 == 1) v = k;
    const bool same = round % 4 == 2;
    if (same) k = v = q;
    const std::int64_t seen = same ? steps : sources;
    Tensor padding, mask;
    if (sizes.coin()) {
      padding = torch::rand({batch, seen}) < 0.3;
      padding.select(1, 0).fill_(false);
    }
    if (sizes.coin()) mask = torch::randn({steps, seen}, dtype);
    const bool average = sizes.coin();
    CAPTURE(layer->describe());
    const auto together = [](const std::tuple<Tensor, Tensor>& result) {
      return torch::cat({std::get<0>(result).flatten(), std::get<1>(result).flatten()});
    };
    compare(
        {q, k, v}, 3 * tolerance(dtype),
        [&] { return together(layer->forward(q, k, v, padding, true, mask, average)); },
        [&] { return together(dense->forward(q, k, v, padding, true, mask, average)); });
    CHECK_FALSE(std::get<1>(layer->forward(q, k, v, padding, false)).defined());

    // The way there and back: the dense layer's matrices have these ranks.
    const ht::LowRankMultiheadAttention made = ht::low_rank(
        *dense, pf::fixed_rank{*std::max_element(ranks.begin(), ranks.end())}, {.allow_growth = true});
    CHECK(difference(made->key->to_dense(), layer->key->to_dense()) <= 10 * tolerance(dtype));
    CHECK(difference(together(ht::LowRankMultiheadAttention(made)->forward(q, k, v, padding, true, mask)),
                     together(dense->forward(q, k, v, padding, true, mask))) <= 10 * tolerance(dtype));
  }

  // Dropout acts in training only.
  ht::LowRankMultiheadAttention layer(torch::nn::MultiheadAttentionOptions(8, 2).dropout(0.5), 3);
  const Tensor x = torch::randn({6, 2, 8});
  const auto zeros = [&] { return (std::get<1>(layer->forward(x, x, x)) == 0).sum().item<std::int64_t>(); };
  CHECK(zeros() > 0);
  layer->eval();
  CHECK(zeros() == 0);
}

TEST_CASE("LowRankConv2d: channels last goes through without a copy") {
  torch::manual_seed(4);
  torch::nn::Sequential net;
  net->push_back(ht::LowRankConv2d(torch::nn::Conv2dOptions(8, 16, 3).padding(1), 4));
  net->push_back(torch::nn::BatchNorm2d(16));
  net->push_back(torch::nn::ReLU(torch::nn::ReLUOptions(true)));
  net->push_back(ht::LowRankConv2d(torch::nn::Conv2dOptions(16, 8, 3).padding(1), 4));
  const auto count = [&](std::size_t i) { return net->ptr<ht::LowRankConv2dImpl>(i)->statistics(); };
  net->forward(torch::randn({2, 8, 10, 10}).contiguous(torch::MemoryFormat::ChannelsLast))
      .pow(2)
      .sum()
      .backward();
  CHECK(count(0).input_copies == 0);
  CHECK(count(0).gradient_copies == 0);
  CHECK(count(3).input_copies == 0);
  net->forward(torch::randn({2, 8, 10, 10})).pow(2).sum().backward();
  CHECK(count(0).input_copies == 1);
  CHECK(count(3).input_copies == 0);
  // Gradients have the parameters' strides: autograd keeps them as they are.
  for (const Tensor& p : net->parameters()) {
    for (std::int64_t d = 0; d < p.dim(); ++d) CHECK((p.size(d) == 1 || p.grad().stride(d) == p.stride(d)));
  }

  auto& layer = *net->ptr<ht::LowRankConv2dImpl>(0);
  const Tensor x = torch::randn({8, 10, 10});
  CHECK((layer.forward(x).sizes() == torch::IntArrayRef({16, 10, 10})));
  {
    const torch::NoGradGuard no_grad;
    layer.down.set_data(layer.down.contiguous());
  }
  layer.forward(x);
  CHECK(layer.statistics().parameter_copies == 1);
}

TEST_CASE("LowRankLSTM: outputs and gradients are libtorch's") {
  torch::manual_seed(5);
  dice sizes(5);
  for (int round = 0; round < 20; ++round) {
    const auto dtype = round % 2 == 0 ? torch::kFloat : torch::kDouble;
    const std::int64_t in = sizes.between(1, 40), hidden = sizes.between(1, 40);
    const std::int64_t layers = sizes.between(1, 2), steps = sizes.between(1, 7), batch = sizes.between(1, 5);
    const bool batch_first = sizes.coin(), with_state = sizes.coin(), bias = round % 5 != 4;
    const auto options =
        torch::nn::LSTMOptions(in, hidden).num_layers(layers).batch_first(batch_first).bias(bias);
    const std::int64_t rank = sizes.between(1, std::min(in, hidden));
    ht::LowRankLSTM layer(options, rank);
    layer->to(dtype);
    auto p = layer->named_parameters();
    if (bias) {
      const torch::NoGradGuard no_grad;
      for (auto& one : p) {
        if (contains(one.key(), "bias")) one.value().normal_();
      }
    }
    const Tensor x = torch::randn(batch_first ? std::vector<std::int64_t>{batch, steps, in}
                                              : std::vector<std::int64_t>{steps, batch, in},
                                  dtype)
                         .requires_grad_();
    const Tensor h = torch::randn({layers, batch, hidden}, dtype).requires_grad_();
    const Tensor c = torch::randn({layers, batch, hidden}, dtype).requires_grad_();
    torch::optional<std::tuple<Tensor, Tensor>> state;
    if (with_state) state = std::make_tuple(h, c);
    CAPTURE(layer->describe());
    // y, h and c, or only some of them, get gradients.
    const auto together = [&](const std::tuple<Tensor, std::tuple<Tensor, Tensor>>& result) {
      const auto& [y, after] = result;
      std::vector<Tensor> parts{y.flatten()};
      if (round % 3 != 0) parts.push_back(std::get<0>(after).flatten());
      if (round % 3 != 1) parts.push_back(std::get<1>(after).flatten());
      return torch::cat(parts);
    };
    std::vector<Tensor> leaves = parameters_and(*layer, x);
    leaves.push_back(h);
    leaves.push_back(c);
    // The dense layer, whose weights are functions of the factors.
    const auto dense = [&](const std::string& name) {
      std::vector<Tensor> gates;
      for (std::int64_t gate = 0; gate < 4; ++gate) {
        gates.push_back(p[name + "_up"].chunk(4, 0)[static_cast<std::size_t>(gate)].matmul(
            p[name + "_down"].chunk(4, 0)[static_cast<std::size_t>(gate)]));
      }
      return torch::cat(gates);
    };
    const auto theirs = [&] {
      std::vector<Tensor> weights;
      for (std::int64_t l = 0; l < layers; ++l) {
        const std::string suffix = "_l" + std::to_string(l);
        weights.push_back(dense("weight_ih" + suffix));
        weights.push_back(dense("weight_hh" + suffix));
        if (bias) {
          weights.push_back(p["bias" + suffix]);
          weights.push_back(torch::zeros_like(p["bias" + suffix]));
        }
      }
      const Tensor zeros = torch::zeros({layers, batch, hidden}, dtype);
      const auto [y, after_h, after_c] = torch::lstm(x, {with_state ? h : zeros, with_state ? c : zeros},
                                                     weights, bias, layers, 0.0, true, false, batch_first);
      return together({y, std::make_tuple(after_h, after_c)});
    };
    compare(
        leaves, tolerance(dtype), [&] { return together(layer->forward(x, state)); }, theirs);
    const torch::NoGradGuard no_grad;
    CHECK(difference(together(layer->forward(x, state)), theirs()) <= tolerance(dtype));
  }
}

TEST_CASE("a layer may run several times before it runs back") {
  torch::manual_seed(6);
  ht::LowRankLinear layer(9, 9, 4);
  ht::LowRankLSTM lstm(torch::nn::LSTMOptions(9, 9), 3);
  const Tensor x = torch::randn({5, 2, 9}).requires_grad_();
  const auto twice = [&](const auto& f) { return f(torch::tanh(f(x))); };
  compare(
      parameters_and(*layer, x), 1e-5,
      [&] { return twice([&](const Tensor& t) { return layer->forward(t); }); },
      [&] {
        return twice([&](const Tensor& t) {
          return torch::nn::functional::linear(t, layer->up.matmul(layer->down), layer->bias);
        });
      });
  auto p = lstm->named_parameters();
  compare(
      parameters_and(*lstm, x), 1e-5,
      [&] { return twice([&](const Tensor& t) { return std::get<0>(lstm->forward(t)); }); },
      [&] {
        return twice([&](const Tensor& t) {
          return ht::detail::reference_lstm({t,
                                             {},
                                             {},
                                             p["weight_ih_l0_down"].t(),
                                             p["weight_ih_l0_up"].t(),
                                             p["bias_l0"],
                                             p["weight_hh_l0_down"].t(),
                                             p["weight_hh_l0_up"].t()})[0];
        });
      });
}

TEST_CASE("results do not depend on the number of threads") {
  torch::manual_seed(7);
  ht::LowRankConv2d layer(pf::conv_shape::square(16, 24, 3, 1, 1), 6, true);
  const Tensor x = torch::randn({4, 16, 12, 12}).requires_grad_();
  std::vector<Tensor> first;
  for (const int threads : {1, 2}) {
    torch::set_num_threads(threads);
    const auto leaves = parameters_and(*layer, x);
    clear_gradients(leaves);
    layer->forward(x).pow(2).sum().backward();
    if (threads == 1) first = gradients_of(leaves);
    const auto now = gradients_of(leaves);
    // The sum is libtorch's; everything after the sum is ours.
    for (std::size_t i = 0; i < now.size(); ++i) CHECK(torch::equal(now[i], first[i]));
  }
  torch::set_num_threads(1);
}

TEST_CASE("gradients of gradients") {
  torch::manual_seed(8);
  const auto check = [](const std::vector<Tensor>& leaves, const auto& ours, const auto& theirs) {
    const auto second = [&](const auto& f) {
      const Tensor y = f();
      const auto first =
          torch::autograd::grad({y.pow(3).sum()}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/true);
      Tensor norm = torch::zeros({}, y.options());
      for (const Tensor& t : first) norm = norm + t.pow(2).sum();
      return torch::autograd::grad({norm}, leaves);
    };
    const auto a = second(ours), b = second(theirs);
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(difference(a[i], b[i]) < 1e-10);
  };
  ht::LowRankLinear linear(6, 5, 3);
  linear->to(torch::kDouble);
  Tensor x = torch::randn({4, 6}, torch::kDouble).requires_grad_();
  check(
      parameters_and(*linear, x), [&] { return linear->forward(x); },
      [&] { return torch::nn::functional::linear(x, linear->to_dense(), linear->bias); });
  ht::LowRankConv2d conv(pf::conv_shape::square(3, 5, 3, 2, 1), 2, true);
  conv->to(torch::kDouble);
  x = torch::randn({2, 3, 6, 6}, torch::kDouble).requires_grad_();
  check(
      parameters_and(*conv, x), [&] { return conv->forward(x); },
      [&] { return torch::conv2d(x, conv->to_dense(), conv->bias, 2, 1); });
  ht::LowRankConv2d grouped(torch::nn::Conv2dOptions(4, 6, 3).padding(1).groups(2), 2);
  grouped->to(torch::kDouble);
  x = torch::randn({2, 4, 5, 5}, torch::kDouble).requires_grad_();
  check(
      parameters_and(*grouped, x), [&] { return grouped->forward(x); },
      [&] { return torch::conv2d(x, grouped->to_dense(), grouped->bias, 1, 1, 1, 2); });
}

TEST_CASE("other scalars go by libtorch's operations") {
  torch::manual_seed(9);
  ht::LowRankConv2d conv(pf::conv_shape::square(4, 6, 3, 1, 1), 3, true);
  ht::LowRankLinear linear(8, 6, 3);
  ht::LowRankLSTM lstm(torch::nn::LSTMOptions(8, 6), 3);
  const Tensor image = torch::randn({1, 4, 5, 5}), rows = torch::randn({3, 2, 8});
  const Tensor a = conv->forward(image), b = linear->forward(rows), c = std::get<0>(lstm->forward(rows));
  conv->to(torch::kBFloat16);
  linear->to(torch::kBFloat16);
  lstm->to(torch::kBFloat16);
  CHECK(difference(conv->forward(image.to(torch::kBFloat16)).to(torch::kFloat), a) < 0.03);
  ht::LowRankConv2d grouped(torch::nn::Conv2dOptions(4, 6, 3).groups(2), 3);
  const Tensor in_groups = grouped->forward(image);
  grouped->to(torch::kBFloat16);
  CHECK(difference(grouped->forward(image.to(torch::kBFloat16)).to(torch::kFloat), in_groups) < 0.03);
  CHECK(difference(linear->forward(rows.to(torch::kBFloat16)).to(torch::kFloat), b) < 0.03);
  CHECK(difference(std::get<0>(lstm->forward(rows.to(torch::kBFloat16))).to(torch::kFloat), c) < 0.03);
  linear->forward(rows.to(torch::kBFloat16)).sum().backward();
  CHECK((linear->down.grad().scalar_type() == torch::kBFloat16));
}

TEST_CASE("layers refuse what does not fit") {
  CHECK(contains(error_of([] { ht::LowRankLinear(8, 4, 5); }), "rank 5 of a 4 x 8 matrix"));
  CHECK(contains(error_of([] { ht::LowRankConv2d(torch::nn::Conv2dOptions(4, 4, 3).groups(3), 1); }),
                 "groups 3"));
  CHECK(contains(error_of([] { ht::LowRankConv2d(torch::nn::Conv2dOptions(4, 4, 3).groups(2), 3); }),
                 "rank 3 of a 2 x 18 matrix"));
  CHECK(contains(error_of([] { ht::LowRankEmbedding(8, 4, 5); }), "LowRankEmbedding rank 5, 8 x 4"));
  CHECK(contains(
      error_of([] { ht::LowRankEmbedding layer(ht::LowRankEmbeddingOptions(8, 4, 2).padding_idx(8)); }),
      "padding_idx 8"));
  const auto look_up = [](const Tensor& tokens) {
    return error_of([&] { ht::LowRankEmbedding(8, 4, 2)->forward(tokens); });
  };
  CHECK(contains(look_up(torch::tensor({1, 8}, torch::kLong)), "token 8 is outside"));
  CHECK(contains(look_up(torch::tensor({-1, 3}, torch::kInt)), "token -1 is outside"));
  CHECK(contains(look_up(torch::randn({2})), "tokens are Float"));
  using attention_options = torch::nn::MultiheadAttentionOptions;
  CHECK(contains(error_of([] { ht::LowRankMultiheadAttention(attention_options(8, 3), 2); }), "3 heads"));
  CHECK(contains(error_of([] { ht::LowRankMultiheadAttention(attention_options(8, 2), 9); }), "query"));
  CHECK(contains(error_of([] { ht::LowRankMultiheadAttention(attention_options(8, 2).kdim(4).vdim(4), 2); }),
                 "kdim"));
  const auto attend = [](const Tensor& padding, const Tensor& mask) {
    return error_of([&] {
      const Tensor x = torch::randn({3, 2, 8});
      ht::LowRankMultiheadAttention(attention_options(8, 2), 2)->forward(x, x, x, padding, true, mask);
    });
  };
  CHECK(contains(attend(torch::zeros({3, 2}, torch::kBool), {}), "key_padding_mask [3 x 2] where [2 x 3]"));
  CHECK(contains(attend({}, torch::zeros({3, 3}, torch::kBool)), "attn_mask is Bool"));
  CHECK(contains(error_of([] {
                   ht::LowRankMultiheadAttention(attention_options(8, 2), 2)
                       ->forward(torch::randn({3, 2, 8}), torch::randn({3, 1, 8}), torch::randn({3, 1, 8}));
                 }),
                 "key [3 x 1 x 8]"));
  CHECK(contains(error_of([] { ht::LowRankConv2d(torch::nn::Conv2dOptions(4, 8, 1), 5); }), "rank 5"));
  CHECK(contains(error_of([] { ht::LowRankLSTM(torch::nn::LSTMOptions(4, 8), 5); }), "layer 0, input side"));
  CHECK(contains(error_of([] { ht::LowRankLSTM(torch::nn::LSTMOptions(4, 8).bidirectional(true), 2); }),
                 "two directions"));
  CHECK(contains(error_of([] { ht::LowRankLinear(8, 4, 2)->forward(torch::randn({3, 7})); }), "[3 x 7]"));
  CHECK(
      contains(error_of([] {
                 ht::LowRankConv2d(torch::nn::Conv2dOptions(4, 8, 3), 2)->forward(torch::randn({1, 5, 8, 8}));
               }),
               "LowRankConv2d rank 2"));
  CHECK(contains(error_of([] {
                   ht::LowRankLSTM(torch::nn::LSTMOptions(4, 8), 2)->forward(torch::randn({3, 4}));
                 }),
                 "LowRankLSTM 4 -> 8"));
  CHECK(contains(error_of([] {
                   ht::LowRankLSTM(torch::nn::LSTMOptions(4, 8), 2)
                       ->forward(torch::randn({3, 2, 4}),
                                 std::make_tuple(torch::randn({1, 3, 8}), torch::randn({1, 3, 8})));
                 }),
                 "a state [1 x 3 x 8] where [1 x 2 x 8]"));
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("modules");

namespace {

/// libtorch's Sequential cannot be in another one: its forward is a template.
struct BlockImpl : torch::nn::SequentialImpl {
  Tensor forward(Tensor x) { return torch::nn::SequentialImpl::forward(x); }
};
TORCH_MODULE(Block);

/// A network as people write them: a typed slot, a Sequential with names, a list, a dictionary, a shared
/// layer.
struct Nested : torch::nn::Module {
  ht::Conv2d stem{nullptr};
  torch::nn::Sequential body{nullptr};
  torch::nn::ModuleList list{nullptr};
  torch::nn::ModuleDict dict{nullptr};
  ht::Linear head{nullptr};

  Nested() {
    stem = register_module("stem", ht::Conv2d(torch::nn::Conv2dOptions(3, 16, 3).padding(1)));
    Block block;
    block->push_back("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1).bias(false)));
    block->push_back("norm", torch::nn::BatchNorm2d(32));
    body = register_module("body", torch::nn::Sequential());
    body->push_back("block", block);
    body->push_back("relu", torch::nn::ReLU());
    list = register_module("list", torch::nn::ModuleList());
    list->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(32, 32, 3).stride(2)));
    const std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> items{
        {"fc", std::make_shared<torch::nn::LinearImpl>(32 * 9, 40)}};
    dict = register_module("dict", torch::nn::ModuleDict(items));
    head = register_module("head", ht::Linear(40, 30));
  }

  Tensor forward(Tensor x) {
    x = body->forward(torch::relu(stem->forward(x)));
    x = run<torch::nn::Conv2dImpl, ht::LowRankConv2dImpl>(*list->ptr(0), x);
    x = run<torch::nn::LinearImpl, ht::LowRankLinearImpl>(*dict["fc"], torch::relu(x).flatten(1));
    return head->forward(torch::relu(x));
  }

  template <class Dense, class LowRank>
  static Tensor run(torch::nn::Module& m, const Tensor& x) {
    return m.as<Dense>() != nullptr ? m.as<Dense>()->forward(x) : m.as<LowRank>()->forward(x);
  }
};

std::vector<std::string> names_of(const torch::nn::Module& m) { return m.named_parameters().keys(); }

}  // namespace

TEST_CASE("factorize replaces the layers of a nested module in place") {
  torch::manual_seed(10);
  auto net = std::make_shared<Nested>();
  for (auto& p : net->named_parameters()) {
    if (p.value().dim() > 1) make_rank(p.value(), 4);
  }
  net->to(torch::kDouble);
  net->eval();
  net->dict["fc"]->as<torch::nn::LinearImpl>()->weight.set_requires_grad(false);
  const Tensor x = torch::randn({2, 3, 8, 8}, torch::kDouble);
  const Tensor before = net->forward(x);
  const Tensor random_before = at::detail::getDefaultCPUGenerator().get_state().clone();

  const ht::factorization report = ht::factorize(*net, everything(pf::fixed_rank{4}));
  CHECK(difference(net->forward(x), before) < 1e-5);  // the weights were rounded to float
  CHECK(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), random_before));
  const std::vector<std::string> expected{"stem.down",
                                          "stem.up",
                                          "stem.bias",
                                          "body.block.conv.down",
                                          "body.block.conv.up",
                                          "body.block.norm.weight",
                                          "body.block.norm.bias",
                                          "list.0.down",
                                          "list.0.up",
                                          "list.0.bias",
                                          "dict.fc.down",
                                          "dict.fc.up",
                                          "dict.fc.bias",
                                          "head.down",
                                          "head.up",
                                          "head.bias"};
  CHECK(names_of(*net) == expected);
  CHECK(report.layers.size() == 5);
  CHECK(report.kept.empty());
  REQUIRE(report.low_rank.size() == 5);
  CHECK(report.low_rank[1].name == "body.block.conv");
  CHECK(report.layers[1].name == "body.block.conv");
  CHECK(report.layers[1].rows == 32);
  CHECK(report.layers[1].cols == 144);
  CHECK(report.layers[1].kept_energy > 0.999999);
  CHECK(report.parameters.size() == expected.size());
  std::int64_t after = 0;
  for (const Tensor& p : report.parameters) after += p.numel();
  CHECK(report.parameters_after == after);
  CHECK(report.parameters_before > report.parameters_after);
  for (const Tensor& p : net->parameters()) CHECK((p.scalar_type() == torch::kDouble));
  const auto named = net->named_parameters();
  CHECK_FALSE(named["dict.fc.down"].requires_grad());
  CHECK(named["dict.fc.bias"].requires_grad());
  CHECK_FALSE(net->stem->low_rank()->is_training());
  net->train();
  CHECK(net->stem->low_rank()->is_training());

  // It trains.
  torch::optim::SGD optimizer(report.parameters, torch::optim::SGDOptions(0.001).momentum(0.9));
  const Tensor target = torch::randn({2, 30}, torch::kDouble);
  double first = 0, last = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    const Tensor loss = torch::mse_loss(net->forward(x), target);
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  CHECK(last < 0.98 * first);

  // Once more: all of it is low-rank by now.
  const ht::factorization again = ht::factorize(*net, everything(pf::fixed_rank{2}));
  CHECK(again.layers.empty());
  CHECK(again.parameters_after == again.parameters_before);
}

TEST_CASE("factorize follows the policy") {
  torch::manual_seed(11);
  auto net = std::make_shared<Nested>();
  std::vector<std::string> asked;
  pf::factorize_policy policy;  // the first and the last layer stay dense
  policy.rank = pf::rank_ratio{0.25};
  policy.threads = 2;
  policy.also_if = [&](const std::string& name, pf::matrix_size size) {
    asked.push_back(name + " " + std::to_string(size.rows) + "x" + std::to_string(size.cols));
    return name != "list.0";
  };
  const ht::factorization report = ht::factorize(*net, policy);
  CHECK((asked == std::vector<std::string>{"body.block.conv 32x144", "list.0 32x288", "dict.fc 40x288"}));
  REQUIRE(report.low_rank.size() == 2);
  CHECK((report.low_rank[0] == pf::layer_rank{"body.block.conv", 8}));
  CHECK((report.low_rank[1] == pf::layer_rank{"dict.fc", 10}));
  CHECK((net->stem->dense() != nullptr));

  torch::nn::Sequential thin;
  thin->push_back(torch::nn::Linear(2, 2));
  const ht::factorization kept = ht::factorize(*thin, everything(pf::fixed_rank{1}));
  CHECK((kept.kept_dense == std::vector<std::string>{"0"}));
  REQUIRE(kept.kept.size() == 1);
  CHECK(contains(kept.kept[0].reason, "no fewer parameters"));
  pf::factorize_policy strict = everything(pf::fixed_rank{1});
  strict.keep_dense_if_larger = false;
  CHECK_THROWS_AS(ht::factorize(*thin, strict), pf::rank_error);
  CHECK((thin->ptr(0)->as<torch::nn::Linear>() != nullptr));
}

TEST_CASE("factorize says what it cannot replace") {
  struct Typed : torch::nn::Module {
    torch::nn::Linear fc{nullptr};
    Typed() { fc = register_module("fc", torch::nn::Linear(64, 64)); }
  };
  Typed typed;
  const std::string text = error_of([&] { ht::factorize(typed, everything(pf::fixed_rank{4})); });
  CHECK(contains(text, "fc: a member of another type than a slot holds it"));

  // A registered module without another owner.
  struct Untyped : torch::nn::Module {
    Untyped() { register_module("fc", torch::nn::Linear(64, 64)); }
  };
  Untyped untyped;
  CHECK(ht::factorize(untyped, everything(pf::fixed_rank{4})).low_rank.size() == 1);
  CHECK((names_of(untyped) == std::vector<std::string>{"fc.down", "fc.up", "fc.bias"}));

  torch::nn::Sequential net;
  net->push_back("depthwise", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 16, 3).groups(16)));
  net->push_back(
      "circular",
      torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 16, 3).padding(1).padding_mode(torch::kCircular)));
  net->push_back("typed", std::make_shared<Nested>());
  net->push_back("both", torch::nn::LSTM(torch::nn::LSTMOptions(16, 16).bidirectional(true)));
  torch::nn::Linear twice(64, 64);
  net->push_back("once", twice);
  net->push_back("again", twice);
  net->push_back("attention", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(64, 4)));
  struct Tied : torch::nn::Module {
    explicit Tied(const Tensor& weight) { register_parameter("weight", weight); }
  };
  torch::nn::Linear output(32, 64);
  net->push_back("output", output);
  net->register_module("tied", std::make_shared<Tied>(output->weight));
  const ht::factorization report = ht::factorize(*net, everything(pf::rank_ratio{0.25}));
  const auto reason = [&](const std::string& name) {
    for (const auto& kept : report.kept) {
      if (kept.name == name) return kept.reason;
    }
    return std::string();
  };
  CHECK(contains(reason("depthwise"), "no fewer parameters"));
  CHECK(contains(reason("circular"), "else than zeros"));
  CHECK(contains(reason("both"), "two directions"));
  CHECK(reason("attention").empty());
  CHECK((net->ptr(6)->as<ht::LowRankMultiheadAttentionImpl>() != nullptr));
  CHECK(contains(reason("output"), "another module"));
  CHECK((net->ptr(4).get() == net->ptr(5).get()));
  CHECK((net->ptr(4)->as<ht::LowRankLinearImpl>() != nullptr));

  torch::nn::Sequential broken;
  broken->push_back(torch::nn::Linear(64, 64));
  {
    const torch::NoGradGuard no_grad;
    broken->ptr(0)->as<torch::nn::Linear>()->weight[3][4] = std::nan("");
  }
  const std::string not_finite = error_of([&] { ht::factorize(*broken, everything(pf::fixed_rank{4})); });
  CAPTURE(not_finite);
  CHECK(contains(not_finite, "0 (linear 64 -> 64): "));
  CHECK(contains(not_finite, "not a number"));
}

TEST_CASE("factorize makes low-rank LSTMs, and half precision stays") {
  torch::manual_seed(12);
  torch::nn::Sequential net;
  net->push_back(torch::nn::LSTM(torch::nn::LSTMOptions(24, 32).num_layers(2).batch_first(true)));
  auto parameters = net->named_parameters();
  for (auto& p : parameters) {
    if (p.value().dim() < 2) continue;
    for (Tensor gate : p.value().data().chunk(4, 0)) make_rank(gate, 5);
  }
  const Tensor x = torch::randn({3, 6, 24});
  using result = std::tuple<Tensor, std::tuple<Tensor, Tensor>>;
  const auto before = net->forward<result>(x);
  const ht::factorization report = ht::factorize(*net, everything(pf::fixed_rank{5}));
  CHECK(report.layers.size() == 16);
  REQUIRE(report.low_rank.size() == 2);
  CHECK((report.low_rank[1] == pf::layer_rank{"0.l1", 5, 5}));
  const auto after = net->forward<result>(x);
  CHECK(difference(std::get<0>(after), std::get<0>(before)) < 1e-5);
  CHECK(difference(std::get<1>(std::get<1>(after)), std::get<1>(std::get<1>(before))) < 1e-5);

  torch::nn::Linear half(32, 32);
  half->to(torch::kBFloat16);
  const ht::LowRankLinear made = ht::low_rank(*half, pf::fixed_rank{4});
  CHECK((made->up.scalar_type() == torch::kBFloat16));
  CHECK(torch::equal(made->bias, half->bias));
  struct Halves : torch::nn::Module {
    torch::nn::ModuleList all{nullptr};
    Halves() {
      all = register_module("all", torch::nn::ModuleList());
      all->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 16, 3).groups(2)));
      all->push_back(torch::nn::Embedding(40, 16));
      all->push_back(torch::nn::MultiheadAttention(16, 2));
      all->push_back(torch::nn::LSTM(16, 16));
      to(torch::kBFloat16);
    }
  };
  Halves halves;
  pf::factorize_policy policy = everything(pf::fixed_rank{3});
  policy.embeddings_dense = false;
  CHECK(ht::factorize(halves, policy).low_rank.size() == 4);
  for (const Tensor& p : halves.parameters()) CHECK((p.scalar_type() == torch::kBFloat16));
  const auto words = halves.all[1]->as<ht::LowRankEmbeddingImpl>();
  CHECK((words->forward(torch::tensor({3, 4}, torch::kLong)).scalar_type() == torch::kBFloat16));
  std::vector<pf::factor_report> reports;
  const ht::LowRankConv2d conv = ht::low_rank(*torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3)),
                                              pf::energy_kept{0.5}, {.name = "stem"}, &reports);
  CHECK(reports.at(0).name == "stem");
  CHECK(reports.at(0).kept_energy >= 0.5);
  CHECK(conv->rank() == reports.at(0).rank);
}

TEST_CASE("factorize replaces embeddings, attention and grouped convolutions in slots and containers") {
  struct Model : torch::nn::Module {
    ht::Embedding words{nullptr};
    ht::MultiheadAttention attention{nullptr};
    torch::nn::Sequential head{nullptr};
    Model() {
      words = register_module("words", ht::Embedding(torch::nn::EmbeddingOptions(60, 16).padding_idx(0)));
      attention = register_module("attention", ht::MultiheadAttention(16, 4));
      head = register_module("head", torch::nn::Sequential());
      head->push_back("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 16, 3).padding(1).groups(2)));
    }
    Tensor forward(const Tensor& tokens) {
      const Tensor x = words->forward(tokens);
      const Tensor y = std::get<0>(attention->forward(x, x, x));
      return head->forward(y.permute({1, 2, 0}).unsqueeze(-1));
    }
  };
  torch::manual_seed(18);
  Model net;
  for (auto& p : net.named_parameters()) {
    if (p.value().dim() < 2) continue;
    if (contains(p.key(), "in_proj")) {
      for (Tensor part : p.value().data().chunk(3, 0)) make_rank(part, 3);
    } else if (contains(p.key(), "conv")) {
      for (Tensor part : p.value().data().chunk(2, 0)) make_rank(part, 3);
    } else {
      make_rank(p.value(), 3);
    }
  }
  net.attention->dense()->in_proj_weight.set_requires_grad(false);
  {
    const torch::NoGradGuard no_grad;
    net.words->dense()->weight[0].zero_();
    net.attention->dense()->in_proj_bias.normal_();
    net.attention->dense()->out_proj->bias.normal_();
  }
  const Tensor tokens = torch::randint(60, {7, 2}, torch::kLong);
  const Tensor before = net.forward(tokens);
  const std::vector<std::string> dense_names = names_of(net);
  CHECK((dense_names[1] == "attention.in_proj_weight"));
  CHECK((dense_names[3] == "attention.out_proj.weight"));

  // Embeddings stay dense unless the policy says otherwise, and are not numbered.
  pf::factorize_policy policy = everything(pf::fixed_rank{4});
  policy.embedding_rank = pf::fixed_rank{3};
  pf::factorize_policy inner = policy;
  inner.first_layer = 2;
  std::vector<std::string> asked;
  inner.also_if = [&](const std::string& name, pf::matrix_size) {
    asked.push_back(name);
    return false;
  };
  CHECK(ht::factorize(net, inner).low_rank.empty());
  CHECK((asked == std::vector<std::string>{"head.conv"}));
  CHECK(names_of(net) == dense_names);

  policy.embeddings_dense = false;
  const ht::factorization report = ht::factorize(net, policy);
  REQUIRE(report.low_rank.size() == 3);
  CHECK((report.low_rank[0] == pf::layer_rank{"words", 3}));
  CHECK((report.low_rank[1] == pf::layer_rank{"attention", 4, 4, 4, 4}));
  CHECK((report.low_rank[2] == pf::layer_rank{"head.conv", 4}));
  CHECK(report.layers.size() == 7);
  CHECK(report.layers[2].name == "attention.key");
  CHECK(report.layers[6].name == "head.conv.weight[1]");
  CHECK(difference(net.forward(tokens), before) < 1e-5);
  const std::vector<std::string> expected{"words.down",           "words.up",
                                          "attention.query.down", "attention.query.up",
                                          "attention.query.bias", "attention.key.down",
                                          "attention.key.up",     "attention.key.bias",
                                          "attention.value.down", "attention.value.up",
                                          "attention.value.bias", "attention.output.down",
                                          "attention.output.up",  "attention.output.bias",
                                          "head.conv.down",       "head.conv.up",
                                          "head.conv.bias"};
  CHECK(names_of(net) == expected);
  const auto named = net.named_parameters();
  CHECK_FALSE(named["attention.key.up"].requires_grad());
  CHECK(named["attention.key.bias"].requires_grad());
  CHECK(named["attention.output.up"].requires_grad());
  CHECK(named["words.down"][0].abs().max().item<double>() == 0.0);
  CHECK(report.parameters_after < report.parameters_before);

  // A slot of attention is cloned, saved and loaded with its projections.
  const auto copy = std::dynamic_pointer_cast<ht::MultiheadAttentionImpl>(net.attention->clone());
  const Tensor x = torch::randn({3, 2, 16});
  const Tensor y = std::get<0>(net.attention->forward(x, x, x));
  CHECK(torch::equal(std::get<0>(copy->forward(x, x, x)), y));
  CHECK((copy->parameters()[0].data_ptr() != net.attention->parameters()[0].data_ptr()));
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& p : copy->parameters()) p.normal_();
  }
  std::stringstream file;
  torch::save(net.attention, file);
  ht::MultiheadAttention target(copy);
  torch::load(target, file);
  CHECK(torch::equal(std::get<0>(target->forward(x, x, x)), y));

  // An embedding whose table is also an output layer's weight keeps it.
  struct Tied : torch::nn::Module {
    torch::nn::ModuleList all{nullptr};
    Tied() {
      all = register_module("all", torch::nn::ModuleList());
      all->push_back(torch::nn::Embedding(60, 16));
      torch::nn::Linear out(torch::nn::LinearOptions(16, 60).bias(false));
      out->weight = out->register_parameter("tied", all[0]->as<torch::nn::Embedding>()->weight);
      all->push_back(out);
    }
  };
  Tied tied;
  const ht::factorization kept = ht::factorize(tied, policy);
  CHECK(kept.low_rank.empty());
  REQUIRE(kept.kept.size() == 2);
  CHECK(contains(kept.kept[0].reason, "another module"));
}

TEST_CASE("modules are saved, loaded, cloned and printed") {
  torch::manual_seed(13);
  const auto make = [](unsigned seed) {
    torch::manual_seed(seed);
    auto net = std::make_shared<Nested>();
    ht::factorize(*net, everything(pf::fixed_rank{4}));
    net->eval();
    return net;
  };
  const auto net = make(1), other = make(2);
  const Tensor x = torch::randn({2, 3, 8, 8});
  const Tensor y = net->forward(x);
  CHECK(difference(other->forward(x), y) > 1e-3);
  std::stringstream file;
  torch::save(net, file);
  auto target = other;
  torch::load(target, file);
  CHECK(torch::equal(other->forward(x), y));
  CHECK(other->stem->low_rank()->statistics().parameter_copies == 0);

  // Numbers in the usual order are taken, and laid out as the kernels want them.
  ht::LowRankConv2d from(torch::nn::Conv2dOptions(6, 8, 3), 3), to(torch::nn::Conv2dOptions(6, 8, 3), 3);
  {
    const torch::NoGradGuard no_grad;
    from->down.set_data(from->down.contiguous());
  }
  std::stringstream usual;
  torch::save(from, usual);
  torch::load(to, usual);
  const Tensor image = torch::randn({1, 6, 5, 5});
  CHECK(torch::equal(to->forward(image), from->forward(image)));
  CHECK(to->statistics().parameter_copies == 0);
  CHECK(from->statistics().parameter_copies == 1);

  // Copies have parameters and counts of their own.
  const auto copy = std::dynamic_pointer_cast<ht::LowRankConv2dImpl>(from->clone());
  CHECK(torch::equal(copy->forward(image), to->forward(image)));
  CHECK((copy->down.data_ptr() != from->down.data_ptr()));
  CHECK(from->statistics().input_copies == 1);
  const auto slot = std::dynamic_pointer_cast<ht::LinearImpl>(net->head->clone());
  CHECK((slot->low_rank() != nullptr));
  CHECK(torch::equal(slot->low_rank()->up, net->head->low_rank()->up));
  CHECK((slot->parameters()[0].data_ptr() == slot->low_rank()->down.data_ptr()));
  const auto lstm = ht::LowRankLSTM(torch::nn::LSTMOptions(6, 8).num_layers(2), 3);
  const auto twin = std::dynamic_pointer_cast<ht::LowRankLSTMImpl>(lstm->clone());
  const Tensor rows = torch::randn({4, 2, 6});
  CHECK(torch::equal(std::get<0>(twin->forward(rows)), std::get<0>(ht::LowRankLSTM(lstm)->forward(rows))));

  std::ostringstream text;
  text << *net << lstm;
  CHECK(contains(text.str(), "(stem): pufferfish::host_torch::LowRankConv2d("));
  CHECK(contains(text.str(), "LowRankLinear(in_features=40, out_features=30, rank=4, bias=true)"));
  CHECK(contains(text.str(), "ranks=3/3, 3/3"));
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("exchange");

namespace {

/// A mixed network: layers of libtorch and of ours, a tied and an unused parameter.
struct Mixed : torch::nn::Module {
  torch::nn::Conv2d conv{nullptr};
  ht::Conv2d low{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear fc{nullptr}, unused{nullptr};
  bool use_all = true;

  Mixed() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 12, 3).padding(1)));
    low = register_module("low", ht::Conv2d(torch::nn::Conv2dOptions(12, 20, 3).stride(2)));
    norm = register_module("norm", torch::nn::BatchNorm2d(20));
    fc = register_module("fc", torch::nn::Linear(20, 6));
    unused = register_module("unused", torch::nn::Linear(6, 6));
  }
  Tensor forward(Tensor x) {
    x = torch::relu(low->forward(torch::relu(conv->forward(x))));
    x = fc->forward(x.mean(torch::IntArrayRef{2, 3}));
    return use_all ? unused->forward(x) : x;
  }
};

std::shared_ptr<Mixed> make_mixed(torch::Dtype dtype, unsigned seed) {
  torch::manual_seed(seed);
  auto net = std::make_shared<Mixed>();
  ht::factorize(*net, everything(pf::fixed_rank{4}));
  net->to(dtype);
  net->norm->weight.set_requires_grad(false);  // frozen
  return net;
}

/// This rank's part of a batch of 4 images a rank.
Tensor part_of(const Tensor& batch, int rank) { return batch.slice(0, 4 * rank, 4 * rank + 4); }

template <class T>
bool same_everywhere(pf::mpi::communicator& comm, const std::vector<Tensor>& tensors) {
  std::uint64_t digest = 0;
  for (const Tensor& t : tensors) {
    const Tensor c = t.contiguous();
    digest =
        digest * 31 + pf::digest(std::span<const T>(c.data_ptr<T>(), static_cast<std::size_t>(c.numel())));
  }
  bool same = true;
  for (const std::uint64_t other : comm.all_gather(digest)) same = same && other == digest;
  return same;
}

std::vector<Tensor> trained(const torch::nn::Module& m) {
  std::vector<Tensor> found;
  for (const Tensor& t : m.parameters()) {
    if (t.requires_grad()) found.push_back(t);
  }
  return found;
}

}  // namespace

TEST_CASE("gradients of parts of a batch become those of the whole") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (const auto progress : {pf::exchange_progress::automatic, pf::exchange_progress::calls}) {
    for (const bool to_nothing : {false, true}) {
      auto net = make_mixed(torch::kDouble, 1 + static_cast<unsigned>(comm.rank()));  // all become rank 0's
      auto whole = make_mixed(torch::kDouble, 1);
      pf::exchange_options options;
      options.progress = progress;
      options.plan = pf::default_plan(comm.size());
      options.plan->buckets = {512, 1024};
      ht::distributed<pf::mpi::communicator, double> parallel(*net, comm, options);
      CHECK(parallel.exchange().buckets().size() > 3);
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      torch::optim::SGD reference(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 4; ++step) {
        torch::manual_seed(100 + static_cast<unsigned>(step));
        const Tensor x = torch::randn({4 * comm.size(), 3, 9, 9}, torch::kDouble);
        net->use_all = whole->use_all = step != 2;
        net->zero_grad(to_nothing);
        whole->zero_grad(
            false);  // the default since libtorch 2 would spare unused parameters momentum's step
        net->forward(part_of(x, comm.rank())).pow(2).mean().backward();
        CHECK(parallel.finish());
        whole->forward(x).pow(2).mean().backward();
        const auto ours = trained(*net), theirs = trained(*whole);
        for (std::size_t i = 0; i < ours.size(); ++i) {
          CAPTURE(i);
          const Tensor expected =
              theirs[i].grad().defined() ? theirs[i].grad() : torch::zeros_like(theirs[i]);
          CHECK(difference(ours[i].grad(), expected) < 1e-10);
        }
        optimizer.step();
        reference.step();
        CHECK(same_everywhere<double>(comm, net->parameters()));
      }
      if (comm.size() > 1) {
        std::int64_t elements = 0;
        for (const Tensor& t : trained(*net)) elements += t.numel();
        CHECK(parallel.report().payload_bytes == 4 * sizeof(double) * static_cast<std::uint64_t>(elements));
      }
      // Gradients that zero_grad() only zeroes stay in the arena, and autograd adds to them there.
      if (!to_nothing) CHECK(parallel.copied_gradients() == 0);
      if (to_nothing) CHECK(parallel.copied_gradients() > 0);
      CHECK_FALSE(net->norm->weight.grad().defined());
    }
  }
}

TEST_CASE("micro-batches are added up before they are exchanged") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto net = make_mixed(torch::kFloat, 3), whole = make_mixed(torch::kFloat, 3);
  ht::distributed parallel(*net, comm);
  torch::manual_seed(7);
  const Tensor x = torch::randn({4 * comm.size(), 3, 9, 9});
  const Tensor mine = part_of(x, comm.rank());
  net->zero_grad();
  {
    const auto quiet = parallel.accumulate();
    (net->forward(mine.slice(0, 0, 2)).pow(2).mean() / 2).backward();
  }
  (net->forward(mine.slice(0, 2, 4)).pow(2).mean() / 2).backward();
  parallel.finish();
  whole->forward(x).pow(2).mean().backward();
  const auto ours = trained(*net), theirs = trained(*whole);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    CAPTURE(i);
    const Tensor expected = theirs[i].grad().defined() ? theirs[i].grad() : torch::zeros_like(theirs[i]);
    CHECK(difference(ours[i].grad(), expected) < 1e-5);
  }

  // Two passes of one step that are both meant to be the last.
  net->forward(mine).pow(2).mean().backward();
  std::string text = "nothing thrown";
  try {
    net->forward(mine).pow(2).mean().backward();
  } catch (const std::exception& e) {
    text = e.what();
  }
  CHECK(contains(text, "accumulate()"));
  parallel.finish();
}

TEST_CASE("a gradient that only an accumulated pass has written is exchanged as it is") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  ht::distributed parallel(*net, comm);
  const Tensor x = torch::ones({2, 3}), hidden = torch::ones({2, 4});
  for (int step = 0; step < 3; ++step) {
    net->zero_grad(false);
    {
      const auto quiet = parallel.accumulate();
      net->forward(x).sum().backward();
    }
    net->children()[1]->as<torch::nn::Linear>()->forward(hidden).sum().backward();
    const Tensor before = trained(*net)[0].grad().clone();
    parallel.finish();
    CHECK(before.abs().sum().item<float>() > 0.0F);
    CHECK(difference(trained(*net)[0].grad(), before) < 1e-6);
  }
}

TEST_CASE("compressors, narrow wires and buffers") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  torch::manual_seed(8);
  const Tensor x = torch::randn({4 * comm.size(), 3, 9, 9});
  const auto after_a_step = [&](const pf::exchange_options& options,
                                const pf::compression_options& compression) {
    auto net = make_mixed(torch::kFloat, 3);
    std::vector<Tensor> gradients;
    {
      ht::distributed parallel(*net, comm, options, compression);
      net->forward(part_of(x, comm.rank())).pow(2).mean().backward();
      parallel.finish();
    }
    for (const Tensor& t : trained(*net)) gradients.push_back(t.grad().clone());  // they outlive the object
    CHECK(same_everywhere<float>(comm, gradients));
    // Without the object, autograd only adds.
    net->forward(part_of(x, comm.rank())).pow(2).mean().backward();
    return gradients;
  };
  const auto plain = after_a_step({}, pf::no_compression{});
  pf::power_sgd_options whole;
  whole.rank = 1000;
  whole.least_saving = 0;
  const auto full_rank = after_a_step({}, whole);
  pf::exchange_options narrow;
  narrow.wire = pf::exchange_wire::bf16;
  const auto rounded = after_a_step(narrow, pf::no_compression{});
  after_a_step({}, pf::power_sgd_options{});
  const auto signs = after_a_step({}, pf::signum_options{});
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CHECK(difference(rounded[i], plain[i]) < 0.05);
    CHECK(full_rank[i].isfinite().all().item<bool>());
    CHECK(signs[i].isfinite().all().item<bool>());
  }

  auto net = make_mixed(torch::kFloat, 3);
  ht::distributed parallel(*net, comm);
  {
    const torch::NoGradGuard no_grad;
    net->norm->running_mean.fill_(static_cast<double>(comm.rank()));
  }
  const Tensor count = net->register_buffer("count", torch::full({2}, comm.rank() + 5, torch::kLong));
  parallel.average_buffers();
  CHECK(net->norm->running_mean[0].item<float>() == doctest::Approx((comm.size() - 1) / 2.0));
  CHECK(count[1].item<std::int64_t>() == 5);
}

TEST_CASE("what cannot be exchanged is refused on all ranks") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  auto doubles = make_mixed(torch::kDouble, 3);
  CHECK(contains(error_of([&] { ht::distributed parallel(*doubles, comm); }), "Double on cpu"));
  if (comm.size() > 1) {
    torch::nn::Linear different(4, 4 + comm.rank());
    CHECK(contains(error_of([&] { ht::distributed parallel(*different, comm); }),
                   "distributed module differs"));
  }
  pf::self alone;
  torch::nn::Linear one(4, 4);
  ht::distributed parallel(*one, alone);
  one->forward(torch::randn({2, 4})).sum().backward();
  CHECK(parallel.finish());
}

TEST_SUITE_END();
