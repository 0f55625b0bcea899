// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A network built layer by layer, trained by hand, measured, factorized, trained on with compressed
// gradients, saved and loaded: docs/network.md shows the parts between markers.

#include "../common/usage.hpp"

// [includes]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/train.hpp>

namespace pf = pufferfish;
// [includes]

namespace {

/// Four classes of 8 x 24 images in noise: a bright band at one of four heights.
void draw(std::uint64_t step, pf::tensor<float, 4>& x, std::vector<std::int32_t>& labels) {
  pf::fill_normal<float>(x.flat(), 1.0, pf::random_stream(7, step));
  for (std::size_t n = 0; n < labels.size(); ++n) {
    labels[n] = static_cast<std::int32_t>(n % 4);
    for (std::size_t i = 0; i < 48; ++i) x.flat()[n * 192 + 48 * (n % 4) + i] += 0.5F;
  }
}

// [custom]
/// y = weight * x, one learned factor a channel.
class Scale {
 public:
  using value_type = float;
  using view = pf::tensor_view<float, 4>;  // images x height x width x channels, dense
  using const_view = pf::tensor_view<const float, 4>;

  explicit Scale(pf::index_t channels)
      : weight_(pf::logical_layout::vector(channels), pf::parameter_role::norm) {}

  std::string describe() const { return "Scale " + std::to_string(weight_.size()); }
  pf::extents<4> output_shape(const pf::extents<4>& input) const {
    if (input[3] == weight_.size()) return input;
    throw pf::shape_error(describe() + ": the input has " + std::to_string(input[3]) + " channels");
  }
  void forward(pf::cpu_context& ctx, const const_view& x, const view& y) const {
    for (pf::index_t i = 0; i < x.size(); ++i) y.data()[i] = weight_.data()[i % weight_.size()] * x.data()[i];
    if (ctx.training()) ctx.tape().push_value(*this, x);  // a view: x itself is not copied
  }
  void backward(pf::cpu_context& ctx, const const_view& dy, const view& dx) const {
    const auto x = ctx.tape().pop_value<const_view>(*this);
    float* const gradient = weight_.gradient_data();
    if (!weight_.accumulate()) std::fill_n(gradient, weight_.size(), 0.0F);  // the step's first pass
    for (pf::index_t i = 0; i < x.size(); ++i) {
      const pf::index_t channel = i % weight_.size();
      gradient[channel] += dy.data()[i] * x.data()[i];
      if (!dx.is_null()) dx.data()[i] = weight_.data()[channel] * dy.data()[i];
    }
    ctx.gradient_written(weight_);  // an exchange may send it now
  }

  template <class F>
  void visit(F&& f) {
    f("weight", weight_);
  }
  void initialize(pf::random_stream) { std::fill_n(weight_.data(), weight_.size(), 1.0F); }

 private:
  pf::parameter<float> weight_;
};
// [custom]

// [any]
pf::any_layer<float> activation(const std::string& name) {
  if (name == "tanh") return pf::Tanh<float>();
  return pf::ReLU<float>();
}
// [any]

// [build]
pf::network<float> make_network(const std::string& nonlinearity) {
  const pf::conv_shape wide{.in_channels = 1,
                            .out_channels = 16,
                            .kernel = {3, 7},  // height, width
                            .stride = {1, 2},
                            .padding = {1, 3}};
  const pf::conv_shape square = pf::conv_shape::square(16, 16, 3, 1, 1);  // kernel 3, stride 1, padding 1

  pf::Sequential<float> branch;
  branch.add("conv1", pf::Conv<float>(square))
      .add("bn1", pf::BatchNorm<float>(16))
      .add("act", activation(nonlinearity))
      .add("conv2", pf::Conv<float>(square))
      .add("bn2", pf::BatchNorm<float>(16));

  pf::Sequential<float> layers;
  layers
      .add("stem", pf::Conv<float>(wide, true))  // with a bias
      .add("scale", Scale(16))
      .add("act", activation(nonlinearity))
      .add("block", pf::Residual<float>(std::move(branch)))
      .add("flat", pf::Flatten<float>())
      .add("hidden", pf::Linear<float>(8 * 12 * 16, 32))
      .add("act2", activation(nonlinearity))
      .add("out", pf::Linear<float>(32, 4));
  return pf::network<float>(std::move(layers));
}
// [build]

void print_layers(const pf::network<float>& net) {
  // [summary]
  for (const pf::layer_summary& layer : net.summary({1, 8, 24, 1})) {
    std::printf("%-12s %-60s %6td parameters %8td multiply-adds\n", layer.name.c_str(),
                layer.description.c_str(), layer.parameters, layer.macs);
  }
  // [summary]
}

// [train]
/// Trains from step `first` up to step `last`; the last loss.
double train(pf::network<float>& net, pf::cpu_context& ctx, std::uint64_t first, std::uint64_t last) {
  pf::SGD<float> sgd(pf::make_optimizer_target(net.store()), {.momentum = 0.9});
  const pf::SoftmaxCrossEntropy<float> loss;
  pf::tensor<float, 4> x({32, 8, 24, 1}), y(net.output_shape(x.shape())), dy(y.shape());
  std::vector<std::int32_t> labels(32);
  double mean = 0.0;
  const pf::mode_scope training(ctx, pf::run_mode::training);  // until the function's end
  for (std::uint64_t step = first; step < last; ++step) {
    draw(step, x, labels);
    ctx.begin_step(step);
    net.forward(ctx, x.view(), y.view());
    mean = loss(ctx, y.view(), labels, 32, dy.view()).mean_loss();  // gradients of the mean over 32 images
    net.backward(ctx, dy.view());
    sgd.step(ctx, 0.02);  // the learning rate
  }
  return mean;
}
// [train]

// [measure]
/// Statistics of the layers that the policy factorizes, from 20 training passes.
pf::network_statistics measure(const pf::network<float>& net, pf::cpu_context& ctx,
                               const pf::factorize_policy& policy) {
  pf::self comm;  // or an mpi::communicator
  pf::statistics_collector<float> collector(net, policy);
  const pf::SoftmaxCrossEntropy<float> loss;
  pf::tensor<float, 4> x({32, 8, 24, 1}), y(net.output_shape(x.shape())), dy(y.shape());
  std::vector<std::int32_t> labels(32);
  const pf::mode_scope training(ctx, pf::run_mode::training);
  for (std::uint64_t step = 0; step < 20; ++step) {
    draw(step, x, labels);
    ctx.begin_step(step);
    {
      const pf::observed_scope watching(ctx, collector);  // layers show it their rows in both passes
      net.forward(ctx, x.view(), y.view());
      loss(ctx, y.view(), labels, 32, dy.view());
      net.backward(ctx, dy.view());
    }
    collector.end_step(32);  // the loss was the mean over 32 images
  }
  pf::network_statistics seen = collector.statistics();
  pf::sum_over_ranks(comm, seen);
  return seen;
}
// [measure]

/// The predicted increase of the loss by the factorization of a network that was trained for 40 steps.
double predicted_increase(pf::network<float> net, pf::cpu_context& ctx) {
  train(net, ctx, 0, 40);
  const pf::factorize_policy policy;
  // [aware]
  const pf::network_statistics seen = measure(net, ctx, policy);
  const pf::factorization made = pf::factorize(net, policy, &seen);
  std::printf("the loss is predicted to increase by %.4f\n", made.predicted_loss());
  // [aware]
  return made.predicted_loss();
}

// [compress]
/// The same with PowerSGD between the gradients and the optimizer.
double train_compressed(pf::network<float>& net, pf::cpu_context& ctx, std::uint64_t first,
                        std::uint64_t last) {
  pf::self comm;  // or an mpi::communicator
  pf::gradient_exchange<float, pf::self> exchange(net.store(), comm, {}, pf::power_sgd_options{.rank = 2});
  pf::SGD<float> sgd(pf::make_optimizer_target(net.store()), {.momentum = 0.9});
  // [compress]
  const pf::SoftmaxCrossEntropy<float> loss;
  pf::tensor<float, 4> x({32, 8, 24, 1}), y(net.output_shape(x.shape())), dy(y.shape());
  std::vector<std::int32_t> labels(32);
  double mean = 0.0;
  const pf::mode_scope training(ctx, pf::run_mode::training);
  for (std::uint64_t step = first; step < last; ++step) {
    draw(step, x, labels);
    // [exchanged]
    ctx.begin_step(step);
    exchange.begin(ctx);
    net.forward(ctx, x.view(), y.view());
    mean = loss(ctx, y.view(), labels, 32, dy.view()).mean_loss();
    net.backward(ctx, dy.view());
    exchange.finish(ctx);  // the gradients are now what the compressor makes of all ranks'
    sgd.step(ctx, 0.02);
    // [exchanged]
  }
  std::printf("PowerSGD: %td bytes a step instead of %td\n", exchange.payload_bytes(),
              4 * net.parameter_count());
  return mean;
}

/// Bytes of a step with a compressor that is chosen at run time.
pf::index_t bytes_with(pf::network<float>& net, const pf::compression_options& chosen) {
  pf::self comm;
  // [make]
  auto compressor = pf::new_compressor(net.store(), chosen);  // empty for no_compression
  pf::gradient_exchange<float, pf::self> exchange(net.store(), comm, {}, std::move(compressor));
  // [make]
  return exchange.payload_bytes();
}

/// The largest difference between a sequence in one piece and in two with the state carried over.
float carried_state() {
  // [lstm]
  pf::cpu_context ctx;
  pf::LSTM<float> lstm(8, 16);
  lstm.initialize(pf::random_stream(1, 1));
  pf::tensor<float, 3> x({10, 3, 8}), y({10, 3, 16});  // steps x batch x features
  pf::fill_normal<float>(x.flat(), 1.0, pf::random_stream(1, 2));
  pf::tensor<float, 2> h({3, 16}), c({3, 16});  // batch x hidden, zeros
  const pf::recurrent_state<float> state{h.view(), c.view()};
  for (pf::index_t first = 0; first < 10; first += 5) {  // two segments of one sequence
    lstm.forward(ctx, x.view().slice(0, first, 5), state, y.view().slice(0, first, 5), state);
  }
  // [lstm]
  pf::tensor<float, 3> whole(y.shape());
  lstm.forward(ctx, x.view(), {}, whole.view());
  float worst = 0.0F;
  for (std::size_t i = 0; i < y.flat().size(); ++i) {
    worst = std::max(worst, std::abs(y.flat()[i] - whole.flat()[i]));
  }
  return worst;
}

bool run(const std::string& file) {
  // [main]
  pf::cpu_context ctx({.threads = 2});
  pf::network<float> net = make_network("relu");
  net.initialize(1);  // every value is a function of this seed and the layer's name
  // [main]
  print_layers(net);
  const pf::index_t before = net.parameter_count();
  const double increase = predicted_increase(net, ctx);
  // [switch]
  const double dense = train(net, ctx, 0, 40);
  pf::factorize_policy policy;  // a quarter of the full rank; the first and the last layer stay dense
  const pf::factorization made = pf::factorize(net, policy);
  for (const pf::factor_report& layer : made.layers) {
    std::printf("%s: rank %td keeps %.2f of the energy\n", layer.name.c_str(), layer.rank, layer.kept_energy);
  }
  const double low_rank = train(net, ctx, 40, 80);  // a new optimizer: the arenas are new
  // [switch]
  const double compressed = train_compressed(net, ctx, 80, 120);
  std::printf("loss %.3f dense, %.3f low-rank, %.3f with PowerSGD; %td of %td parameters\n", dense, low_rank,
              compressed, net.parameter_count(), before);

  // [files]
  pf::save_checkpoint(file, net, {}, {{"classes", "4"}});
  const pf::checkpoint_file saved = pf::open_checkpoint(file);
  pf::network<float> again =
      make_network("relu");  // dense; restore factorizes what is factorized in the file
  saved.restore(again);
  std::printf("%s classes, %td parameters\n", saved.fact("classes").c_str(), again.parameter_count());
  // [files]
  std::remove(file.c_str());

  // [infer]
  pf::tensor<float, 4> images({2, 8, 24, 1});
  const pf::tensor<float, 4> logits = again.forward(ctx, images.view());  // 2 x 1 x 1 x 4
  // [infer]
  const pf::tensor<float, 4> expected = net.forward(ctx, images.view());
  const bool equal = std::equal(logits.flat().begin(), logits.flat().end(), expected.flat().begin());
  const pf::index_t whole = bytes_with(net, pf::no_compression{});
  const bool smaller = bytes_with(net, pf::power_sgd_options{.rank = 1}) < whole &&
                       bytes_with(net, pf::signum_options{}) < whole / 30;
  // Losses begin at 1.39, the logarithm of 4.
  return equal && smaller && increase > 0.0 && increase < 1.0 && dense < 0.6 && low_rank < 0.6 &&
         compressed < 0.6 && made.layers.size() == 3 && carried_state() < 1e-6F;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto status = examples::usage_shown(
      argc, argv, 1, " [FILE]\n  Trains a network of its own; writes it to FILE and removes it again.");
  if (status) return *status;
  return run(argc > 1 ? argv[1] : "own_network.safetensors") ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "own_network: %s\n", error.what());
  return 1;
}
