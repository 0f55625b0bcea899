// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Factorization on a device: matrices and whole networks, against the host's.
#include "support.hpp"

#include <string>

#include <pufferfish/gpu.hpp>
#include <pufferfish/gpu/cusolver.hpp>
#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/mlp.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/models/vgg.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;

/// Bytes that have been copied from host to device or back; only the emulated device counts them.
extern "C" std::size_t emulated_device_copied_bytes() __attribute__((weak));

namespace {

using pf::device::gpu;

std::size_t copied_bytes() {
  return emulated_device_copied_bytes != nullptr ? emulated_device_copied_bytes() : 0;
}

// ---------------------------------------------------------------------------------------------------------
// Matrices

// rows x columns of uniform numbers, row i times decay^i; of rank `rank` if that is not 0.
std::vector<float> random_matrix(index_t rows, index_t columns, index_t rank, double decay,
                                 std::uint64_t stream) {
  const auto uniform = [&](index_t size, std::uint64_t s) {
    std::vector<double> values(static_cast<std::size_t>(size));
    pf::fill_uniform(std::span<double>(values), -1.0, 1.0, pf::random_stream(17, s));
    return values;
  };
  std::vector<double> a = uniform(rows * columns, 2 * stream);
  if (rank > 0) {
    const std::vector<double> left = uniform(rows * rank, 2 * stream),
                              right = uniform(rank * columns, 2 * stream + 1);
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < columns; ++j) {
        double sum = 0.0;
        for (index_t k = 0; k < rank; ++k) {
          sum +=
              left[static_cast<std::size_t>(i * rank + k)] * right[static_cast<std::size_t>(k * columns + j)];
        }
        a[static_cast<std::size_t>(i * columns + j)] = sum;
      }
    }
  }
  std::vector<float> result;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto row = static_cast<double>(static_cast<index_t>(i) / columns);
    result.push_back(static_cast<float>(a[i] * std::pow(decay, row)));
  }
  return result;
}

// || A - up down ||, Frobenius.
double truncation_error(const std::vector<float>& a, const std::vector<float>& down,
                        const std::vector<float>& up, index_t rows, index_t columns, index_t rank) {
  double sum = 0.0;
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < columns; ++j) {
      double value = static_cast<double>(a[static_cast<std::size_t>(i * columns + j)]);
      for (index_t k = 0; k < rank; ++k) {
        value -= static_cast<double>(up[static_cast<std::size_t>(i * rank + k)]) *
                 static_cast<double>(down[static_cast<std::size_t>(k * columns + j)]);
      }
      sum += value * value;
    }
  }
  return std::sqrt(sum);
}

struct matrix_errors {
  double down, up, truncation, values;
};

// The factors of rank `rank` by the device against those by the host: beside their largest elements;
// truncation errors beside the norm of the matrix; singular values beside the first.
matrix_errors compare(pf::gpu::eigensolver& solver, const std::vector<float>& a, index_t rows,
                      index_t columns, index_t rank) {
  const pf::tensor_view<const float, 2> host(a.data(), {rows, columns});
  const auto expected = pf::factorize_matrix<float>(host, pf::fixed_rank{rank}, {.allow_growth = true});
  const pf::svd_result values = pf::svd(host, {.method = pf::svd_method::jacobi});
  pf::gpu_context& ctx = gpu_context();
  twin<float> matrix(a), down(rank * columns, NAN), up(rows * rank, NAN);
  const pf::gpu::detail::device_matrix<float> weight(
      pf::tensor_view<const float, 2>(matrix.device_data(), {rows, columns}));
  pf::gpu::stream_memory memory(ctx.stream());
  pf::gpu::detail::device_svd svd(ctx, memory, weight, pf::gpu::detail::measure(ctx, weight));
  svd.by_gram(solver);
  if (svd.is_doubtful(rank)) svd.by_host();
  CHECK(!svd.is_doubtful(rank));
  using pf::gpu::detail::device_matrix;
  const auto down_view = down.device_view<2>({rank, columns}), up_view = up.device_view<2>({rows, rank});
  svd.store(rank, down_view.data(), device_matrix<float>(down_view).layout, up_view.data(),
            device_matrix<float>(transpose(up_view)).layout);
  matrix_errors e{};
  const auto flat = [](const pf::tensor<float, 2>& t) {
    return std::vector<float>(t.data(), t.data() + t.size());
  };
  e.down = difference(down.fetched(), flat(expected.down));
  e.up = difference(up.fetched(), flat(expected.up));
  const double norm = std::sqrt(values.squared_norm) + 1e-300;
  e.truncation = std::abs(truncation_error(a, down.fetched(), up.fetched(), rows, columns, rank) -
                          truncation_error(a, flat(expected.down), flat(expected.up), rows, columns, rank)) /
                 norm;
  for (std::size_t i = 0; i < values.singular_values.size(); ++i) {
    const double difference = std::abs(svd.spectrum().singular_values[i] - values.singular_values[i]);
    e.values = std::max(e.values, difference / (values.singular_values.front() + 1e-300));
  }
  CHECK(svd.spectrum().squared_norm == doctest::Approx(values.squared_norm).epsilon(1e-12));
  return e;
}

template <class Check>
void with_solver(const Check& check) {
  pf::gpu::cusolver_eigensolver solver;
  check(solver);
}

}  // namespace

TEST_CASE("gpu factorize: matrices square, tall, wide, of one row and of one column") {
  with_solver([](pf::gpu::eigensolver& solver) {
    std::uint64_t stream = 0;
    for (const auto& [rows, columns] : {std::pair<index_t, index_t>{1, 1},
                                        {1, 9},
                                        {9, 1},
                                        {7, 7},
                                        {30, 12},
                                        {12, 30},
                                        {70, 33},
                                        {33, 200},
                                        {66, 90}}) {
      CAPTURE(rows);
      CAPTURE(columns);
      const std::vector<float> a = random_matrix(rows, columns, 0, 0.97, ++stream);
      for (const index_t rank : {index_t{1}, (std::min(rows, columns) + 3) / 4, std::min(rows, columns)}) {
        CAPTURE(rank);
        const matrix_errors found = compare(solver, a, rows, columns, rank);
        CHECK(found.down < 1e-6);
        CHECK(found.up < 1e-6);
        CHECK(found.truncation < 1e-6);
        CHECK(found.values < 1e-14);
      }
    }
  });
}

TEST_CASE("gpu factorize: deficient and zero matrices, spectra of many orders of magnitude") {
  with_solver([](pf::gpu::eigensolver& solver) {
    const auto check = [&](const std::vector<float>& a, index_t rows, index_t columns, index_t rank) {
      CAPTURE(rows);
      CAPTURE(rank);
      const matrix_errors found = compare(solver, a, rows, columns, rank);
      CHECK(found.down < 1e-5);
      CHECK(found.up < 1e-5);
      CHECK(found.truncation < 1e-6);
      CHECK(found.values < 1e-7);  // zeros are the root of rounding unless they are kept
    };
    check(random_matrix(40, 25, 4, 1.0, 1), 40, 25, 4);
    check(random_matrix(20, 50, 1, 1.0, 2), 20, 50, 1);
    check(random_matrix(20, 33, 0, 0.3, 4), 20, 33, 20);
    check(std::vector<float>(60), 6, 10, 3);
    std::vector<float> huge = random_matrix(6, 9, 0, 1.0, 5), tiny = huge;
    for (float& value : huge) value *= 1e37F;
    for (float& value : tiny) value *= 1e-37F;
    check(huge, 6, 9, 2);
    check(tiny, 6, 9, 2);
    // Beyond the rank of the matrix there is nothing to agree on but the product.
    const std::vector<float> flat = random_matrix(40, 25, 4, 1.0, 3);
    CHECK(compare(solver, flat, 40, 25, 9).truncation < 1e-6);
  });
}

// ---------------------------------------------------------------------------------------------------------
// Networks

namespace {

template <class Model>
std::vector<float> state_of(const Model& net) {
  std::vector<float> result;
  net.read_on_host([&](const auto&) {
    for (const auto& entry : net.store().parameters()) {
      result.insert(result.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
    for (const auto& entry : net.store().buffer_entries()) {
      result.insert(result.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
  });
  return result;
}

// Parameter by parameter: factors to `tolerance` of their largest element, all else bit for bit.
template <class HostModel, class DeviceModel>
void check_same_state(const HostModel& host_net, const DeviceModel& net, double tolerance) {
  REQUIRE(host_net.structure() == net.structure());
  const std::vector<float> got = state_of(net), expected = state_of(host_net);
  std::size_t offset = 0;
  const auto check = [&](const std::string& name, index_t size) {
    CAPTURE(name);
    const auto count = static_cast<std::size_t>(size);
    const bool factor = name.find(".down") != std::string::npos ||
                        name.find(".up.weight") != std::string::npos ||
                        name.find("_ih.up") != std::string::npos || name.find("_hh.up") != std::string::npos;
    const double found = difference(std::span<const float>(got).subspan(offset, count),
                                    std::span<const float>(expected).subspan(offset, count));
    CHECK(found <= (factor ? tolerance : 0.0));
    offset += count;
  };
  for (const auto& entry : host_net.store().parameters()) check(entry.name, entry.thing->size());
  for (const auto& entry : host_net.store().buffer_entries()) check(entry.name, entry.thing->size());
}

void check_same_report(const pf::factorization& got, const pf::factorization& expected, double tolerance) {
  CHECK(got.low_rank == expected.low_rank);
  CHECK(got.kept_dense == expected.kept_dense);
  CHECK(got.parameters_before == expected.parameters_before);
  CHECK(got.parameters_after == expected.parameters_after);
  REQUIRE(got.layers.size() == expected.layers.size());
  for (std::size_t i = 0; i < got.layers.size(); ++i) {
    const pf::factor_report &a = got.layers[i], &b = expected.layers[i];
    CHECK(a.name == b.name);
    CHECK(a.rows == b.rows);
    CHECK(a.cols == b.cols);
    CHECK(a.rank == b.rank);
    CHECK(a.parameters_before == b.parameters_before);
    CHECK(a.parameters_after == b.parameters_after);
    CHECK(a.macs_before == b.macs_before);
    CHECK(a.macs_after == b.macs_after);
    CHECK(std::abs(a.squared_norm - b.squared_norm) <= 1e-12 * b.squared_norm);
    CHECK(std::abs(a.kept_energy - b.kept_energy) <= tolerance);
    CHECK(std::abs(a.relative_error - b.relative_error) <= tolerance);
    CHECK(std::abs(a.truncation_error - b.truncation_error) <= tolerance * std::sqrt(b.squared_norm));
  }
  CHECK(std::abs(got.kept_energy() - expected.kept_energy()) <= tolerance);
}

// What a switch may copy between host and device: singular values and their order, a norm and a largest
// element of each matrix, the solver's status.
std::size_t bytes_of_reports(const pf::factorization& of) {
  std::size_t bytes = 0;
  for (const pf::factor_report& layer : of.layers) {
    const auto order = static_cast<std::size_t>(std::min(layer.rows, layer.cols));
    bytes += order * 12 + 16 + 4;
  }
  return bytes;
}

// The device's switch of a network of the same numbers is the host's, to rounding with cuSOLVER and bit for
// bit without a solver. `net` ends as the one that cuSOLVER's eigenvectors make.
template <class HostModel, class DeviceModel>
void check_switch(HostModel& host_net, DeviceModel& net, const pf::factorize_policy& policy) {
  const pf::factorization expected = pf::factorize(host_net, policy);
  DeviceModel second = net;
  check_same_report(pf::factorize(second, policy, gpu_context()), expected, 0.0);
  check_same_state(host_net, second, 0.0);

  pf::gpu::cusolver_eigensolver cusolver;
  const std::size_t start = copied_bytes();
  const pf::factorization got = pf::factorize(net, policy, gpu_context(), {.solver = &cusolver});
  CHECK(copied_bytes() - start <= bytes_of_reports(got));
  CHECK(got.low_rank.size() > 0);
  check_same_report(got, expected, 1e-9);
  check_same_state(host_net, net, 1e-6);
}

pf::small_resnet_options resnet_options() {
  pf::small_resnet_options options;
  options.width = 8;
  options.stages = 2;
  return options;
}

struct resnet_pair {
  resnet_pair()
      : host_net(pf::small_resnet<float>(resnet_options())),
        net(pf::small_resnet<float, gpu>(resnet_options())) {
    host_net.initialize(5);
    // Statistics that are not all the same.
    pf::fill_uniform(host_net.store().buffers(), 0.5, 1.5, pf::random_stream(3, 1));
    pf::copy_state(host_net, net);
  }
  pf::network<float> host_net;
  pf::network<float, gpu> net;
};

}  // namespace

TEST_CASE(
    "gpu factorize: the switch of a residual network is the host's, and nothing but spectra leaves the "
    "device") {
  const pf::rank_policy ranks[] = {pf::rank_ratio{0.25}, pf::energy_kept{0.8}, pf::parameter_fraction{0.4},
                                   pf::parameter_budget{100}, pf::fixed_rank{2}};
  for (const pf::rank_policy& rank : ranks) {
    resnet_pair pair;
    pf::factorize_policy policy;
    policy.rank = rank;
    policy.shortcuts_dense = false;
    const std::uint64_t before = pair.net.generation();
    check_switch(pair.host_net, pair.net, policy);
    CHECK(pf::low_rank_layers(pair.net).size() == 5);
    CHECK(pair.net.generation() == before + 1);
    for (const auto& entry : pair.net.store().parameters()) CHECK(entry.thing->on_device());
    const std::span<const float> gradients = pair.net.store().gradients();
    std::vector<float> zeros(gradients.size(), 1.0F);
    pf::gpu::device_memory().to_host(zeros.data(), gradients.data(), gradients.size_bytes());
    CHECK(std::all_of(zeros.begin(), zeros.end(), [](float g) { return g == 0.0F; }));
    // The network runs as the host's does.
    const pf::extents<4> input{2, 8, 8, 3}, output{2, 1, 1, 10};
    auto x = random_twin<float>(pf::volume<4>(input), 1), y = random_twin<float>(20, 2);
    pf::cpu_context host;
    pair.host_net.forward(host, x.host_view(input), y.host_view(output));
    pair.net.forward(gpu_context(), x.device_view(input), y.device_view(output));
    CHECK(difference(y) < 1e-4);
  }
}

TEST_CASE("gpu factorize: by Jacobi's method, bit for bit the host's") {
  resnet_pair pair;
  pf::factorize_policy policy;
  policy.method = pf::svd_method::jacobi;
  const pf::factorization expected = pf::factorize(pair.host_net, policy);
  check_same_report(pf::factorize(pair.net, policy, gpu_context()), expected, 0.0);
  check_same_state(pair.host_net, pair.net, 0.0);
}

TEST_CASE("gpu factorize: singular values too small for the Gram matrix are the host's if they are kept") {
  with_solver([](pf::gpu::eigensolver& solver) {
    resnet_pair pair;
    // Row i of a weight of 16 rows times 0.01^i, so that singular value 4 is about 1e-6 of the first, and
    // number 8 about 1e-14.
    for (const auto& entry : pair.host_net.store().parameters()) {
      if (entry.name != "layer2.0.conv1.weight") continue;
      const auto weight = entry.thing->logical();
      for (index_t i = 0; i < weight.extent(0); ++i) {
        for (index_t j = 0; j < weight.extent(1); ++j) {
          for (index_t y = 0; y < weight.extent(2); ++y) {
            for (index_t x = 0; x < weight.extent(3); ++x) {
              weight(i, j, y, x) *= static_cast<float>(std::pow(0.01, static_cast<double>(i)));
            }
          }
        }
      }
    }
    pf::copy_state(pair.host_net, pair.net);
    pf::factorize_policy policy;
    policy.rank = pf::rank_ratio{0.5};
    const pf::factorization expected = pf::factorize(pair.host_net, policy);
    check_same_report(pf::factorize(pair.net, policy, gpu_context(), {.solver = &solver}), expected, 1e-9);
    check_same_state(pair.host_net, pair.net, 1e-6);
  });
}

// docs/gpu.md shows a part of it.
TEST_CASE("gpu factorize: by cuSOLVER") {
  auto [host_net, net] = resnet_pair();
  const pf::factorize_policy policy;
  pf::gpu_context& ctx = gpu_context();
  // [settings]
  pf::gpu::cusolver_eigensolver cusolver;  // <pufferfish/gpu/cusolver.hpp>, -lcusolver
  const pf::factorization result = pf::factorize(net, policy, ctx, {.solver = &cusolver});
  // [settings]
  check_same_report(result, pf::factorize(host_net, policy), 1e-9);
  check_same_state(host_net, net, 1e-6);
}

TEST_CASE("gpu factorize: linear layers, biases, layers that would grow") {
  const pf::mlp_options options{20, {24, 3, 16}, 5};
  pf::network<float> host_net = pf::mlp<float>(options);
  pf::network<float, gpu> net = pf::mlp<float, gpu>(options);
  host_net.initialize(2);
  pf::copy_state(host_net, net);
  pf::factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  policy.rank = pf::rank_ratio{0.6};
  check_switch(host_net, net, policy);
}

TEST_CASE("gpu factorize: an LSTM language model, gate by gate") {
  const pf::lstm_lm_options options{37, 12, 2, 0.0};
  for (const pf::rank_policy& rank :
       {pf::rank_policy(pf::rank_ratio{0.25}), pf::rank_policy(pf::energy_kept{0.5})}) {
    auto host_net = pf::make_lstm_lm<float>(options);
    auto net = pf::make_lstm_lm<float, gpu>(options);
    host_net.initialize(3);
    pf::fill_uniform(host_net.store().values(), -1.0, 1.0, pf::random_stream(4, 2));  // biases, too
    pf::copy_state(host_net, net);
    pf::factorize_policy policy = pf::lstm_lm_policy();
    policy.rank = rank;
    check_switch(host_net, net, policy);
    pf::merge(host_net);
    pf::merge(net);
    REQUIRE(host_net.structure() == net.structure());
    CHECK(difference(state_of(net), state_of(host_net)) < 1e-5);
  }
}

TEST_CASE("gpu factorize: VGG, bottlenecks with the shortcut of their stage, and a Transformer") {
  const auto check = [](auto host_net, auto net, const pf::factorize_policy& policy) {
    host_net.initialize(6);
    if (!host_net.store().buffers().empty()) {
      pf::fill_uniform(host_net.store().buffers(), 0.5, 1.5, pf::random_stream(3, 1));
    }
    pf::copy_state(host_net, net);
    check_switch(host_net, net, policy);
  };
  pf::vgg_options vgg;
  vgg.width = 2;
  check(pf::vgg19<float>(vgg), pf::vgg19<float, gpu>(vgg), pf::vgg19_policy());
  pf::imagenet_resnet_options resnet;
  resnet.width = 2;
  resnet.classes = 5;
  check(pf::resnet50<float>(resnet), pf::resnet50<float, gpu>(resnet), pf::resnet50_policy());
  pf::transformer_options transformer;
  transformer.vocabulary = 20;
  transformer.width = 12;
  transformer.hidden = 24;
  transformer.layers = 2;
  transformer.heads = 2;
  transformer.key = transformer.value = 5;
  check(pf::model<pf::transformer<float>>{pf::transformer<float>(transformer)},
        pf::model<pf::transformer<float, gpu>, gpu>{pf::transformer<float, gpu>(transformer)},
        pf::transformer_policy());
}

TEST_CASE("gpu factorize: grouped convolutions group by group, biases bit for bit") {
  const auto make = [](auto on_device) {
    using Device = decltype(on_device);
    const auto grouped = [](index_t in, index_t out, index_t groups) {
      pf::conv_shape shape = pf::conv_shape::square(in, out, 3, 1, 1);
      shape.groups = groups;
      return shape;
    };
    pf::Sequential<float, Device> layers;
    layers.add("stem", pf::Conv<float>(grouped(4, 8, 1)));
    layers.add("grouped", pf::Conv<float>(grouped(8, 24, 2), true));
    layers.add("depthwise", pf::Conv<float>(grouped(24, 24, 24)));
    layers.add("four", pf::Conv<float>(grouped(24, 32, 4), true));
    layers.add("pointwise", pf::Conv<float>(pf::conv_shape::square(32, 20, 1)));
    return pf::network<float, Device>{pf::any_layer<float, Device>(layers)};
  };
  for (const pf::rank_policy& rank :
       {pf::rank_policy(pf::rank_ratio{0.25}), pf::rank_policy(pf::energy_kept{0.6})}) {
    pf::network<float> host_net = make(pf::device::cpu{});
    pf::network<float, gpu> net = make(gpu{});
    host_net.initialize(4);
    for (const auto& entry : host_net.store().parameters()) {
      if (entry.name == "four.bias") entry.thing->values()[3] = -0.0F;
    }
    pf::copy_state(host_net, net);
    pf::factorize_policy policy;
    policy.rank = rank;
    check_switch(host_net, net, policy);
    const auto made = pf::low_rank_layers(net);
    REQUIRE(made.size() == 2);
    CHECK(made[0].name == "grouped");
    CHECK(made[1].name == "four");
    net.on_host([&](auto&) {
      for (const auto& entry : net.store().parameters()) {
        if (entry.name == "four.up.bias") CHECK(std::signbit(entry.thing->values()[3]));
      }
    });
    pf::merge(host_net);
    pf::merge(net, gpu_context());
    REQUIRE(host_net.structure() == net.structure());
    CHECK(difference(state_of(net), state_of(host_net)) < 1e-5);
  }
}

TEST_CASE("gpu factorize: embeddings of an LSTM language model and of a Transformer") {
  const auto check = [](auto host_net, auto net, pf::factorize_policy policy) {
    host_net.initialize(3);
    pf::fill_uniform(host_net.store().values(), -1.0, 1.0, pf::random_stream(4, 2));
    pf::copy_state(host_net, net);
    policy.embeddings_dense = false;
    policy.embedding_rank = pf::fixed_rank{5};
    const auto planned = pf::planned_ranks(net, policy);
    check_switch(host_net, net, policy);
    CHECK(pf::low_rank_layers(net) == planned);
    CHECK(planned.front().ranks == pf::rank_list{5});
    pf::merge(host_net);
    pf::merge(net, gpu_context());
    REQUIRE(host_net.structure() == net.structure());
    CHECK(difference(state_of(net), state_of(host_net)) < 1e-5);
  };
  const pf::lstm_lm_options options{37, 12, 2, 0.0};
  check(pf::model<pf::lstm_lm<float>>{pf::lstm_lm<float>(options)},
        pf::model<pf::lstm_lm<float, gpu>, gpu>{pf::lstm_lm<float, gpu>(options)}, pf::lstm_lm_policy());
  pf::transformer_options transformer;
  transformer.vocabulary = 40;
  transformer.width = 12;
  transformer.hidden = 24;
  transformer.layers = 2;
  transformer.heads = 2;
  transformer.key = transformer.value = 5;
  check(pf::model<pf::transformer<float>>{pf::transformer<float>(transformer)},
        pf::model<pf::transformer<float, gpu>, gpu>{pf::transformer<float, gpu>(transformer)},
        pf::transformer_policy());
}

TEST_CASE("gpu factorize: merging is the host's, and stays on the device") {
  resnet_pair pair;
  pf::factorize(pair.host_net, {});
  pf::factorize(pair.net, {});
  const std::size_t start = copied_bytes();
  pf::merge(pair.host_net);
  pf::merge(pair.net, gpu_context());
  CHECK(copied_bytes() - start < 100);
  REQUIRE(pair.net.structure() == pair.host_net.structure());
  CHECK(difference(state_of(pair.net), state_of(pair.host_net)) < 1e-5);
}

TEST_CASE("gpu factorize: grouped convolutions, group by group, and depthwise ones, which would grow") {
  const auto make = [](auto device) {
    using device_type = decltype(device);
    const auto shape = [](index_t in, index_t out, index_t groups) {
      pf::conv_shape result = pf::conv_shape::square(in, out, 3, 1, 1);
      result.groups = groups;
      return result;
    };
    pf::Sequential<float, device_type> layers;
    layers.add("stem", pf::Conv<float>(shape(3, 24, 1), false));
    layers.add("grouped", pf::Conv<float>(shape(24, 36, 3), true));
    layers.add("depthwise", pf::Conv<float>(shape(36, 36, 36), false));
    layers.add("second", pf::Conv<float>(shape(36, 32, 4), false));
    layers.add("pool", pf::GlobalAvgPool<float>());
    layers.add("fc", pf::Linear<float>(32, 5));
    return pf::network<float, device_type>{pf::any_layer<float, device_type>(std::move(layers))};
  };
  pf::network<float> host_net = make(pf::device::cpu{});
  pf::network<float, gpu> net = make(gpu{});
  host_net.initialize(3);
  pf::copy_state(host_net, net);
  pf::factorize_policy policy;
  policy.rank = pf::rank_ratio{0.25};
  check_switch(host_net, net, policy);
  pf::merge(host_net);
  pf::merge(net, gpu_context());
  REQUIRE(net.structure() == host_net.structure());
  CHECK(difference(state_of(net), state_of(host_net)) < 1e-5);
}

TEST_CASE("gpu factorize: a structure from another rank leaves all other numbers where they are") {
  resnet_pair pair;
  const std::vector<pf::layer_rank> ranks = pf::planned_ranks(pair.net, {});
  pf::apply_ranks(pair.host_net, ranks);
  pf::apply_ranks(pair.net, ranks);
  check_same_state(pair.host_net, pair.net, 0.0);
}

TEST_CASE("gpu factorize: what is refused is refused as by the host, and leaves the network as it was") {
  resnet_pair pair;
  const auto message_of = [](auto&& work) -> std::string {
    try {
      work();
    } catch (const pf::error& e) {
      return e.what();
    }
    return "no error";
  };
  const auto both = [&](const pf::factorize_policy& policy) {
    const std::uint64_t before = pair.net.generation();
    pf::gpu::cusolver_eigensolver cusolver;
    const std::string got =
        message_of([&] { pf::factorize(pair.net, policy, gpu_context(), {.solver = &cusolver}); });
    CHECK(got == message_of([&] { pf::factorize(pair.net, policy); }));
    CHECK(got == message_of([&] { pf::factorize(pair.host_net, policy); }));
    CHECK(pair.net.generation() == before);
    check_same_state(pair.host_net, pair.net, 0.0);
    return got;
  };
  pf::factorize_policy policy;
  policy.rank = pf::fixed_rank{99};
  CHECK(both(policy).find("rank 99") != std::string::npos);
  policy.rank = pf::rank_ratio{1.0};
  policy.keep_dense_if_larger = false;
  CHECK(both(policy).find("would need") != std::string::npos);
  policy = {};
  policy.rank = pf::energy_kept{1.5};
  CHECK(both(policy).find("1.5") != std::string::npos);
  policy = {};
  policy.method = pf::svd_method::external;
  both(policy);
  const auto spoil = [](auto& net) {
    net.on_host([&](auto&) {
      for (const auto& entry : net.store().parameters()) {
        if (entry.name == "layer2.0.conv1.weight") entry.thing->logical()(3, 1, 2, 0) = INFINITY;
      }
    });
  };
  spoil(pair.host_net);
  spoil(pair.net);
  CHECK(both({}).find("infinite") != std::string::npos);
}
