// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The dlib adapter against dlib itself: one file, since dlib takes its time to compile.

#include <pufferfish/adapters/dlib.hpp>
#include <pufferfish/distributed.hpp>
#include <pufferfish/distributed/mpi_environment.hpp>

#include <dlib/data_io.h>
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>

#include "../../examples/common/usage.hpp"

// The programs of the page, so that they compile; what they include is here already.
namespace dlib_mnist_plain {
#include "../../examples/dlib_mnist/plain.cpp"
}
namespace dlib_mnist_lowrank {
#include "../../examples/dlib_mnist/lowrank.cpp"
}

namespace pf = pufferfish;
using pf::index_t;

namespace {

template <long Channels>
using image = std::array<dlib::matrix<float>, static_cast<std::size_t>(Channels)>;

template <long Channels>
std::vector<image<Channels>> random_images(std::size_t count, long rows, long cols, std::uint64_t seed) {
  std::vector<image<Channels>> images(count);
  pf::random_stream random(seed, 1);
  for (auto& one : images) {
    for (auto& plane : one) {
      plane.set_size(rows, cols);
      std::vector<float> values(static_cast<std::size_t>(rows * cols));
      random = random.child("next");
      pf::fill_normal<float>(values, 1.0, random);
      std::copy(values.begin(), values.end(), &plane(0, 0));
    }
  }
  return images;
}

/// The largest difference, in units of the largest value.
double difference(const dlib::tensor& a, const dlib::tensor& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(a.host()[i]) - static_cast<double>(b.host()[i])));
    largest = std::max(largest, std::abs(static_cast<double>(b.host()[i])));
  }
  return largest > 0 ? worst / largest : worst;
}

dlib::resizable_tensor random_like(const dlib::tensor& shape, std::uint64_t seed) {
  dlib::resizable_tensor result;
  result.copy_size(shape);
  pf::fill_normal<float>({result.host(), result.size()}, 1.0, {seed, 1});
  return result;
}

template <class Layer>
void check_with_dlib(Layer layer) {
  const auto result = dlib::test_layer(layer);
  CAPTURE(result.log);
  CHECK(result.was_good);
}

template <long Channels>
using images_of = dlib::input<image<Channels>>;

// Two dlib layers, and the one of ours that is the same.
template <long Channels, long Out, long Rank, long Size, int Stride>
struct con_case {
  using pair = dlib::con<Out, 1, 1, 1, 1, dlib::con<Rank, Size, Size, Stride, Stride, images_of<Channels>>>;
  using ours = pf::low_rank_con<Out, Rank, Size, Size, Stride, Stride, images_of<Channels>>;
  static constexpr long channels = Channels;
};
template <long Channels, unsigned long Out, unsigned long Rank>
struct fc_case {
  using pair = dlib::fc<Out, dlib::fc_no_bias<Rank, images_of<Channels>>>;
  using ours = pf::low_rank_fc<Out, static_cast<long>(Rank), images_of<Channels>>;
  static constexpr long channels = Channels;
};

/// A view of a dlib tensor's floats as [out][in], stored [in][out], or in stored order.
template <class Case>
void compare_with_pair(long rows, long cols) {
  CAPTURE(rows);
  typename Case::pair pair;
  typename Case::ours ours;
  const auto samples = random_images<Case::channels>(5, rows, cols, 3);
  dlib::resizable_tensor x;
  ours.to_tensor(samples.begin(), samples.end(), x);
  pair.to_tensor(samples.begin(), samples.end(), x);
  ours.forward(x);
  pair.forward(x);
  auto& layer = ours.layer_details();
  auto& up_layer = dlib::layer<0>(pair).layer_details();
  auto& down_layer = dlib::layer<1>(pair).layer_details();

  const index_t out = layer.up().extent(0), rank = layer.rank();
  const auto down_view = [&](float* data) {
    if constexpr (requires { layer.shape(); }) {
      return pf::tensor_view<float, 4>(data, layer.down().shape());
    } else {
      const index_t in = layer.down().extent(1);
      return pf::tensor_view<float, 2>(data, {rank, in}, {1, rank});
    }
  };
  const auto up_view = [&](float* data) {
    if constexpr (requires { layer.shape(); }) {
      return pf::tensor_view<float, 2>(data, {out, rank});
    } else {
      return pf::tensor_view<float, 2>(data, {out, rank}, {1, out});
    }
  };
  pf::copy(layer.down(), down_view(down_layer.get_layer_params().host()));
  pf::copy(layer.up(), up_view(up_layer.get_layer_params().host()));
  const std::size_t bias_at = layer.get_layer_params().size() - static_cast<std::size_t>(out);
  pf::fill_normal<float>({layer.get_layer_params().host() + bias_at, static_cast<std::size_t>(out)}, 1.0,
                         {4, 4});
  std::copy_n(layer.get_layer_params().host() + bias_at, out,
              up_layer.get_layer_params().host() + out * rank);
  // dlib's first convolution has a bias: none here.
  const auto down_size = static_cast<std::size_t>(layer.down().size());
  for (std::size_t i = down_size; i < down_layer.get_layer_params().size(); ++i) {
    down_layer.get_layer_params().host()[i] = 0;
  }

  const dlib::tensor& y = ours.forward(x);
  CHECK(dlib::have_same_dimensions(y, pair.forward(x)));
  CHECK(difference(y, pair.get_output()) <= 1e-5);

  const auto dy = random_like(y, 6);
  ours.back_propagate_error(x, dy);
  pair.back_propagate_error(x, dy);
  CHECK(difference(ours.get_final_data_gradient(), pair.get_final_data_gradient()) <= 1e-5);
  const dlib::tensor& gradient = ours.get_parameter_gradient();
  const dlib::tensor& up_gradient = dlib::layer<0>(pair).get_parameter_gradient();
  dlib::resizable_tensor down_gradient = dlib::layer<1>(pair).get_parameter_gradient();
  dlib::resizable_tensor expected;
  expected.copy_size(gradient);
  // In our order.
  dlib::resizable_tensor own(gradient), theirs_up(up_gradient);
  pf::copy(down_view(down_gradient.host()), [&] {
    const auto at = layer.down();
    return decltype(at)(expected.host(), at.shape(), at.strides());
  }());
  pf::copy(up_view(theirs_up.host()),
           pf::tensor_view<float, 2>(expected.host() + down_size, {out, rank}, {1, out}));
  std::copy_n(up_gradient.host() + out * rank, out, expected.host() + bias_at);
  CHECK(difference(own, expected) <= 1e-5);
}

// A small trained-looking network, and twins of it.
template <typename S>
using block = dlib::max_pool<2, 2, 2, 2, dlib::relu<S>>;
using dense_net = dlib::loss_multiclass_log<dlib::fc<
    3,
    dlib::relu<dlib::fc<
        20, block<dlib::bn_con<dlib::con<12, 3, 3, 1, 1, block<dlib::con<6, 5, 5, 1, 1, images_of<2>>>>>>>>>>;
template <long ConRank, long FcRank>
using twin_net = dlib::loss_multiclass_log<
    dlib::fc<3, dlib::relu<pf::low_rank_fc<
                    20, FcRank,
                    block<dlib::bn_con<pf::low_rank_con<12, ConRank, 3, 3, 1, 1,
                                                        block<dlib::con<6, 5, 5, 1, 1, images_of<2>>>>>>>>>>;

struct labelled {
  std::vector<image<2>> images;
  std::vector<unsigned long> labels;
};
// Classes that differ in the brightness of a corner.
labelled make_set(std::size_t count) {
  labelled set{random_images<2>(count, 12, 12, 9), {}};
  for (std::size_t i = 0; i < count; ++i) {
    set.labels.push_back(i % 3);
    for (long r = 0; r < 4; ++r) {
      for (long c = 0; c < 4; ++c) set.images[i][0](r, c) += 2.0F * (static_cast<float>(i % 3) - 1.0F);
    }
  }
  return set;
}

template <class Net>
dlib::resizable_tensor outputs(Net& net, const labelled& set) {
  dlib::resizable_tensor x;
  net.to_tensor(set.images.begin(), set.images.end(), x);
  net.forward(x);
  return net.subnet().get_output();
}

template <class Net>
double loss_of(Net& net, const labelled& set) {
  return net.compute_loss(set.images.begin(), set.images.end(), set.labels.begin());
}

/// `steps` steps of gradient descent on all of a set.
template <class Net, class Solver>
void train(Net& net, const labelled& set, Solver solver, int steps) {
  std::vector<Solver> solvers(Net::num_computational_layers, solver);
  for (int i = 0; i < steps; ++i) {
    net.compute_parameter_gradients(set.images.begin(), set.images.end(), set.labels.begin());
    net.update_parameters(solvers, 0.02);
  }
}

}  // namespace

TEST_SUITE_BEGIN("layers");

TEST_CASE("adapters_dlib: dlib finds the gradients of low_rank_con right") {
  check_with_dlib(pf::low_rank_con_<3, 2, 3, 3, 1, 1>());
  check_with_dlib(pf::low_rank_con_<4, 1, 3, 3, 2, 2, 1, 1>());
  check_with_dlib(pf::low_rank_con_<5, 2, 2, 2, 2, 2>());
  check_with_dlib(pf::low_rank_con_<2, 2, 1, 1, 1, 1>());
  check_with_dlib(pf::low_rank_con_<3, 0, 2, 1, 1, 2, 1, 0>());
  check_with_dlib(pf::low_rank_con_<3, 2, 0, 0, 1, 1>());
  check_with_dlib(pf::low_rank_con_<2, 1, 0, 2, 1, 1>());
  pf::low_rank_con_<3, 2, 3, 3, 1, 1> no_bias;
  no_bias.disable_bias();
  check_with_dlib(no_bias);
}

TEST_CASE("adapters_dlib: dlib finds the gradients of low_rank_fc right") {
  check_with_dlib(pf::low_rank_fc_<7, 2, dlib::FC_HAS_BIAS>());
  check_with_dlib(pf::low_rank_fc_<1, 1, dlib::FC_HAS_BIAS>());
  check_with_dlib(pf::low_rank_fc_<9, 0, dlib::FC_HAS_BIAS>());
  check_with_dlib(pf::low_rank_fc_<5, 3, dlib::FC_NO_BIAS>());
}

TEST_CASE("adapters_dlib: outputs and gradients are those of two layers of dlib's") {
  compare_with_pair<con_case<4, 6, 3, 3, 1>>(9, 7);
  compare_with_pair<con_case<4, 6, 3, 3, 1>>(40, 33);
  compare_with_pair<con_case<1, 5, 2, 5, 2>>(28, 28);
  compare_with_pair<con_case<3, 16, 3, 1, 1>>(6, 6);
  compare_with_pair<con_case<3, 4, 2, 3, 1>>(3, 1);
  compare_with_pair<fc_case<2, 10, 4>>(6, 5);
  compare_with_pair<fc_case<1, 3, 1>>(1, 1);
}

TEST_CASE("adapters_dlib: a trained network at full rank is the same function") {
  dense_net dense;
  const labelled set = make_set(12);
  train(dense, set, dlib::sgd(), 3);
  const auto expected = outputs(dense, set);

  twin_net<12, 20> full(dense);
  CHECK(difference(outputs(full, set), expected) <= 1e-4);
  std::vector<pf::factor_report> reports;
  auto by_policy = pf::factorize_network<twin_net<0, 0>>(dense, pf::energy_kept{1.0}, &reports);
  CHECK(difference(outputs(by_policy, set), expected) <= 1e-4);
  REQUIRE(reports.size() == 2);
  CHECK(reports[0].name == "layer 3");
  CHECK(reports[0].rows == 20);
  CHECK(reports[0].cols == 12 * 3 * 3);
  CHECK(reports[1].rows == 12);
  CHECK(reports[1].cols == 6 * 9);

  // The type's rank, a quarter, and the policy's.
  twin_net<2, 0> small(dense);
  std::vector<index_t> ranks;
  const auto collect = [&](auto& net) {
    ranks.clear();
    dlib::visit_computational_layers(net, [&](const auto& layer) {
      if constexpr (requires { layer.rank(); }) ranks.push_back(layer.rank());
    });
  };
  collect(small);
  CHECK(ranks == std::vector<index_t>{5, 2});
  auto chosen = pf::factorize_network<twin_net<2, 0>>(dense, pf::fixed_rank{7});
  collect(chosen);
  CHECK(ranks == std::vector<index_t>{7, 7});
  // Its pieces are what svd_factors makes of the dense layers.
  const auto factors = pf::svd_factors(dlib::layer<3>(dense).layer_details(), pf::fixed_rank{7}).front();
  auto& low_rank = dlib::layer<3>(chosen).layer_details();
  const pf::tensor<float, 2> up(low_rank.up()), down(low_rank.down());
  CHECK(std::equal(up.flat().begin(), up.flat().end(), factors.up.flat().begin()));
  CHECK(std::equal(down.flat().begin(), down.flat().end(), factors.down.flat().begin()));
}

TEST_CASE("adapters_dlib: factors from statistics of a layer's inputs, as docs/embed_dlib.md shows") {
  dense_net dense;
  const labelled set = make_set(30);
  train(dense, set, dlib::sgd(), 3);
  const auto expected = outputs(dense, set);
  twin_net<12, 0> small(dense);  // the convolution at full rank
  const double plain = difference(outputs(small, set), expected);
  const std::vector<labelled> batches{set};
  // [statistics]
  auto& fc = dlib::layer<3>(dense);  // a dlib::fc_ of 20 outputs
  pf::layer_statistics seen;
  for (const labelled& batch : batches) {
    dense(batch.images);
    const dlib::tensor& x = fc.subnet().get_output();  // the layer's inputs, one row a sample
    const pf::tensor_view<const float, 2> rows(x.host(), {x.num_samples(), x.k() * x.nr() * x.nc()});
    if (seen.matrices.empty()) seen.matrices.emplace_back(20, rows.extent(1));
    seen.matrices[0].add_inputs(rows);
  }
  const auto made = pf::svd_factors(fc.layer_details(), pf::rank_ratio{0.25}, {.statistics = &seen}).front();
  auto& low_rank = dlib::layer<3>(small).layer_details();  // a low_rank_fc_ of the same rank
  copy(pf::tensor_view<const float, 2>(made.down), low_rank.down());
  copy(pf::tensor_view<const float, 2>(made.up), low_rank.up());
  dlib::tensor& parameters = low_rank.get_layer_params();
  for (std::size_t i = 0; i < low_rank.bias_size(); ++i) {  // the bias comes last
    parameters.host()[parameters.size() - 20 + i] += static_cast<float>(made.mean_error[i]);
  }
  // [statistics]
  CHECK(made.rank() == 5);
  CHECK(difference(outputs(small, set), expected) < plain);
}

TEST_CASE("adapters_dlib: training lowers the loss, with dlib's solvers and with ours") {
  const labelled set = make_set(30);
  const auto check = [&](auto solver) {
    twin_net<4, 5> net;
    const double before = loss_of(net, set);
    train(net, set, solver, 25);
    CHECK(loss_of(net, set) < 0.7 * before);
  };
  check(dlib::sgd(0.0005F, 0.9F));
  check(pf::bias_solver<dlib::sgd>(dlib::sgd(0.0005F, 0.9F)));

  // A factorized network trains on, in dlib's own trainer.
  dense_net dense;
  train(dense, set, dlib::sgd(), 2);
  twin_net<4, 5> net(dense);
  const double before = loss_of(net, set);
  dlib::dnn_trainer<twin_net<4, 5>, pf::bias_solver<dlib::sgd>> trainer(net, pf::bias_solver<dlib::sgd>());
  trainer.set_learning_rate(0.02);
  for (int i = 0; i < 15; ++i) trainer.train_one_step(set.images, set.labels);
  trainer.get_net();
  CHECK(loss_of(net, set) < before);
}

TEST_CASE("adapters_dlib: networks go to a file and back") {
  const labelled set = make_set(6);
  dense_net dense;
  train(dense, set, dlib::sgd(), 2);
  twin_net<4, 0> net(dense);
  const auto expected = outputs(net, set);
  dlib::layer<3>(net).layer_details().set_learning_rate_multiplier(3);
  std::stringstream file;
  dlib::serialize(net, file);
  // The rank comes from the file, as the numbers do.
  twin_net<4, 0> other;
  dlib::deserialize(other, file);
  CHECK(dlib::layer<3>(other).layer_details().get_learning_rate_multiplier() == 3);
  CHECK(difference(outputs(other, set), expected) == 0.0);
  train(other, set, dlib::sgd(), 1);

  SUBCASE("and from a dense network's file") {
    std::stringstream dense_file;
    dlib::serialize(dense, dense_file);
    twin_net<12, 20> full;
    dlib::deserialize(full, dense_file);
    CHECK(difference(outputs(full, set), outputs(dense, set)) <= 1e-4);
  }
  SUBCASE("before they have parameters too") {
    std::stringstream fresh_file;
    dlib::serialize(twin_net<4, 0>(), fresh_file);
    dlib::deserialize(other, fresh_file);
    CHECK(outputs(other, set).size() == 6 * 3);
  }
  SUBCASE("but not what is something else") {
    std::stringstream wrong;
    serialize(pf::low_rank_con_<3, 2, 3, 3, 1, 1>(), wrong);
    pf::low_rank_con_<3, 2, 5, 5, 1, 1> layer;
    CHECK_THROWS_AS(deserialize(layer, wrong), dlib::serialization_error);
    std::stringstream fc;
    serialize(pf::low_rank_fc_<3, 2, dlib::FC_HAS_BIAS>(), fc);
    CHECK_THROWS_AS(deserialize(layer, fc), dlib::serialization_error);
  }
}

TEST_CASE("adapters_dlib: a solver's multipliers reach the bias") {
  const labelled set = make_set(6);
  twin_net<4, 5> net;
  outputs(net, set);
  auto& layer = dlib::layer<7>(net).layer_details();
  const std::size_t bias = layer.bias_size();
  CHECK(bias == 12);
  const auto gradient = random_like(layer.get_layer_params(), 12);
  const std::size_t first = gradient.size() - bias;
  pf::bias_solver<dlib::sgd> ours(dlib::sgd(0.1F, 0.0F));
  dlib::sgd theirs(0.1F, 0.0F);
  layer.set_bias_learning_rate_multiplier(2);  // and no weight decay, as dlib has it
  const dlib::resizable_tensor step = ours(0.5F, layer, gradient), plain = theirs(0.5F, layer, gradient);
  for (std::size_t i = 0; i < step.size(); ++i) {
    const float expected = i < first ? plain.host()[i] : -0.5F * 2.0F * gradient.host()[i];
    CHECK(step.host()[i] == doctest::Approx(expected));
  }
  std::stringstream file;
  serialize(ours, file);
  pf::bias_solver<dlib::sgd> read;
  deserialize(read, file);
  CHECK(read.solver().get_weight_decay() == doctest::Approx(0.1));
}

TEST_CASE("adapters_dlib: options are those of dlib's layers") {
  dlib::con_<4, 3, 3, 2, 2> dense;
  dense.set_learning_rate_multiplier(2);
  dense.set_bias_weight_decay_multiplier(3);
  dense.disable_bias();
  const pf::low_rank_con_<4, 2, 3, 3, 2, 2> layer(dense);
  CHECK(layer.get_learning_rate_multiplier() == 2);
  CHECK(layer.get_bias_weight_decay_multiplier() == 3);
  CHECK(layer.bias_is_disabled());
  CHECK(layer.padding_y() == dense.padding_y());
  CHECK(layer.rank() == 2);
  for (const dlib::dpoint& p : {dlib::dpoint(0, 0), dlib::dpoint(7, 4)}) {
    CHECK(layer.map_input_to_output(p) == dense.map_input_to_output(p));
    CHECK(layer.map_output_to_input(p) == dense.map_output_to_input(p));
  }
  std::ostringstream text, xml;
  text << layer;
  CHECK(
      text.str() ==
      "low_rank_con\t (num_filters=4, rank=2, nr=3, nc=3, stride_y=2, stride_x=2, padding_y=0, padding_x=0) "
      "learning_rate_mult=2 weight_decay_mult=1 use_bias=false");
  to_xml(layer, xml);
  CHECK(xml.str().find("<low_rank_con num_filters='4' rank='2'") == 0);

  // Filters, outputs and ranks can be given at run time, until there are parameters.
  pf::low_rank_con_<4, 2, 3, 3, 1, 1> wide{dlib::num_con_outputs(9)};
  CHECK(wide.num_filters() == 9);
  pf::low_rank_fc_<4, 2, dlib::FC_HAS_BIAS> rows{dlib::num_fc_outputs(8)};
  CHECK(rows.get_num_outputs() == 8);
  rows.set_rank(3);
  CHECK(rows.rank() == 3);

  using net_type = pf::low_rank_fc<4, 2, images_of<1>>;
  net_type net;
  const auto samples = random_images<1>(2, 3, 3, 1);
  dlib::resizable_tensor x;
  net.to_tensor(samples.begin(), samples.end(), x);
  net.forward(x);
  const dlib::resizable_tensor before = net.get_output();
  CHECK_THROWS_AS(net.layer_details().set_rank(3), pf::state_error);
  CHECK_THROWS_AS(net.layer_details().set_num_outputs(3), pf::state_error);
  // The bias starts from zero.
  net.layer_details().disable_bias();
  CHECK(net.layer_details().get_layer_params().size() == 2 * (9 + 4));
  CHECK(difference(net.forward(x), before) == 0.0);
  net.layer_details().enable_bias();
  CHECK(net.layer_details().get_layer_params().size() == 2 * (9 + 4) + 4);
  CHECK(difference(net.forward(x), before) == 0.0);
}

TEST_CASE("adapters_dlib: transposes are counted, and one context serves a network") {
  const labelled set = make_set(4);
  twin_net<4, 5> net;
  const auto expected = outputs(net, set);
  auto& layer = dlib::layer<7>(net).layer_details();
  const std::size_t before = layer.layout_changes();
  outputs(net, set);
  CHECK(layer.layout_changes() == before + 2);
  net.compute_parameter_gradients(set.images.begin(), set.images.end(), set.labels.begin());
  CHECK(layer.layout_changes() == before + 2 + 2 + 3);
  layer.clean();
  pf::context_options options;
  options.threads = 2;
  const auto ctx = std::make_shared<pf::cpu_context>(options);
  pf::share_context(net, ctx);
  CHECK(difference(outputs(net, set), expected) == 0.0);
  CHECK(ctx->peak_bytes() > 0);
  const std::size_t allocations = ctx->system_allocations();
  outputs(net, set);
  CHECK(ctx->system_allocations() == allocations);
  CHECK(ctx->tape().empty());
  // One channel, or one pixel: nothing to transpose.
  pf::low_rank_con<3, 1, 5, 5, 1, 1, images_of<1>> grey;
  const auto samples = random_images<1>(2, 8, 8, 1);
  dlib::resizable_tensor x;
  grey.to_tensor(samples.begin(), samples.end(), x);
  grey.forward(x);
  CHECK(grey.layer_details().layout_changes() == 1);
}

TEST_CASE("adapters_dlib: errors name the layer and both shapes") {
  dlib::con_<4, 3, 3, 1, 1> fresh;
  CHECK_THROWS_WITH_AS(pf::svd_factors(fresh, pf::fixed_rank{1}),
                       "dlib::con_: no parameters yet: run its network once first", pf::state_error);
  pf::low_rank_con<4, 3, 1, 1, 1, 1, images_of<2>> net;
  const auto samples = random_images<2>(2, 8, 8, 1);
  dlib::resizable_tensor x;
  net.to_tensor(samples.begin(), samples.end(), x);
  CHECK_THROWS_AS(net.forward(x), pf::rank_error);
  CHECK_THROWS_AS((pf::low_rank_con_<4, 3, 3, 3, 1, 1>().set_num_filters(0)), pf::value_error);
}

TEST_CASE("adapters_dlib: the twin's type follows from the network's") {
  CHECK(std::is_same_v<pf::low_rank_twin<dense_net>, twin_net<0, 0>>);
  using every_layer = pf::low_rank_twin<dlib::fc<2, dlib::con<4, 3, 3, 2, 2, images_of<2>>>, 1, false>;
  CHECK(std::is_same_v<every_layer, pf::low_rank_fc<2, 0, pf::low_rank_con<4, 0, 3, 3, 2, 2, images_of<2>>>>);
  // Through tags and skips; kernels as large as their image stay.
  using residual = dlib::fc<
      2, dlib::con<
             3, 0, 0, 1, 1,
             dlib::add_prev1<dlib::con<6, 3, 3, 1, 1, dlib::tag1<dlib::con<6, 3, 3, 1, 1, images_of<2>>>>>>>;
  using residual_twin =
      dlib::fc<2, dlib::con<3, 0, 0, 1, 1,
                            dlib::add_prev1<pf::low_rank_con<
                                6, 0, 3, 3, 1, 1, dlib::tag1<dlib::con<6, 3, 3, 1, 1, images_of<2>>>>>>>;
  CHECK(std::is_same_v<pf::low_rank_twin<residual>, residual_twin>);
  CHECK(std::is_same_v<pf::low_rank_twin<images_of<2>>, images_of<2>>);

  const labelled set = make_set(6);
  dense_net dense;
  train(dense, set, dlib::sgd(), 2);
  pf::low_rank_twin<dense_net> twin(dense);
  CHECK(dlib::layer<3>(twin).layer_details().rank() == 5);
  CHECK(dlib::count_parameters(twin) < dlib::count_parameters(dense));
}

TEST_SUITE_END();

TEST_SUITE("exchange") {
  using small_net = dlib::loss_multiclass_log<
      dlib::fc<3, dlib::relu<pf::low_rank_fc<20, 5, block<dlib::con<6, 5, 5, 1, 1, images_of<2>>>>>>>;
  using shared_sgd = pf::distributed_solver<dlib::sgd, pf::mpi::communicator>;

  std::vector<float> parameters_of(small_net & net) {
    std::vector<float> all;
    dlib::visit_layer_parameters(net, [&](dlib::tensor& t) { all.insert(all.end(), t.begin(), t.end()); });
    return all;
  }
  small_net fresh_net(const labelled& set) {
    std::srand(5);  // dlib's initial values
    small_net net;
    loss_of(net, set);
    return net;
  }

  TEST_CASE("adapters_dlib: ranks that share a batch step as one with all of it") {
    pf::mpi::communicator comm(MPI_COMM_WORLD);
    const auto ranks = static_cast<std::size_t>(comm.size()), rank = static_cast<std::size_t>(comm.rank());
    const labelled all = make_set(6 * ranks);
    labelled mine;
    for (std::size_t i = rank; i < all.images.size(); i += ranks) {
      mine.images.push_back(all.images[i]);
      mine.labels.push_back(all.labels[i]);
    }
    small_net together = fresh_net(all), alone = together;
    train(together, mine, shared_sgd(dlib::sgd(0.0005F, 0.9F), comm), 4);
    train(alone, all, dlib::sgd(0.0005F, 0.9F), 4);
    const std::vector<float> ours = parameters_of(together), wanted = parameters_of(alone);
    double worst = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(ours[i]) - static_cast<double>(wanted[i])));
    }
    CHECK(worst <= 1e-5);
    CHECK_NOTHROW(pf::agree(comm, "parameters", pf::hasher().values(std::span<const float>(ours)).digest()));

    // In dlib's own trainer, whose solvers run in another thread.
    {
      dlib::dnn_trainer trainer(together, pf::distributed_solver(dlib::sgd(), comm));
      trainer.set_learning_rate(0.02);
      for (int i = 0; i < 5; ++i) trainer.train_one_step(mine.images, mine.labels);
      trainer.get_net();
    }
    const std::vector<float> after = parameters_of(together);
    CHECK(after != ours);
    CHECK_NOTHROW(pf::agree(comm, "parameters", pf::hasher().values(std::span<const float>(after)).digest()));
  }

  TEST_CASE("adapters_dlib: ranks with other parameters, and solvers without ranks, are refused") {
    pf::mpi::communicator comm(MPI_COMM_WORLD);
    const labelled set = make_set(6);
    small_net net = fresh_net(set);
    if (comm.rank() == 1) dlib::layer<1>(net).layer_details().get_layer_params().host()[0] += 1;
    if (comm.size() > 1) {
      CHECK_THROWS_AS(train(net, set, shared_sgd(dlib::sgd(), comm), 1), pf::state_error);
    } else {
      CHECK_NOTHROW(train(net, set, shared_sgd(dlib::sgd(), comm), 1));
    }
    std::stringstream file;
    serialize(shared_sgd(dlib::sgd(0.25F, 0.5F), comm), file);
    shared_sgd read;
    deserialize(read, file);
    CHECK(read.solver().get_momentum() == 0.5F);
    CHECK_THROWS_AS(train(net, set, read, 1), pf::state_error);
  }
}
