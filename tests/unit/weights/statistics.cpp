// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/weights/merge.hpp>
#include <pufferfish/weights/statistics.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

std::mt19937 generator(5);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same in every run

/// Rows whose columns differ in size, so that the truncations differ.
tensor<double, 2> rows_of(index_t rows, index_t columns) {
  std::normal_distribution<double> normal;
  tensor<double, 2> result({rows, columns});
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < columns; ++j) {
      result(i, j) =
          (normal(generator) + 0.3) * std::exp(-4.0 * static_cast<double>(j) / static_cast<double>(columns));
    }
  }
  return result;
}

/// rows W^T + bias.
tensor<double, 2> outputs_of(const tensor<double, 2>& rows, const tensor<double, 2>& w, double bias = 0.0) {
  tensor<double, 2> y({rows.extent(0), w.extent(0)});
  for (index_t i = 0; i < y.extent(0); ++i) {
    for (index_t j = 0; j < y.extent(1); ++j) {
      y(i, j) = bias;
      for (index_t k = 0; k < w.extent(1); ++k) y(i, j) += rows(i, k) * w(j, k);
    }
  }
  return y;
}

/// Something of every part.
output_statistics full(index_t outputs, index_t inputs) {
  output_statistics one(outputs, inputs);
  one.add_outputs(tensor_view<const double, 2>(rows_of(9, outputs)));
  one.add_inputs(tensor_view<const double, 2>(rows_of(9, inputs)));
  one.add_gradients(tensor_view<const double, 2>(rows_of(9, outputs)), 3.0);
  one.add_tied_inputs(tensor_view<const double, 2>(rows_of(4, outputs)));
  if (inputs > 0) one.add_tokens(std::vector<std::int32_t>{0, static_cast<std::int32_t>(inputs - 1), 0});
  one.add_batch(9.0, 3.0, 4.0);
  return one;
}

layer_statistics named(const std::string& name, output_statistics one) {
  layer_statistics layer(std::move(one));
  layer.name = name;
  return layer;
}

bool same(output_statistics a, output_statistics b) {
  const auto left = a.parts(), right = b.parts();
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (!std::equal(left[i].values.begin(), left[i].values.end(), right[i].values.begin(),
                    right[i].values.end())) {
      return false;
    }
  }
  return a.outputs() == b.outputs() && a.inputs() == b.inputs();
}

/// A weight with its file of one tensor.
tensor<double, 2> save_weight(const std::string& path, const std::string& name, std::vector<index_t> shape,
                              const std::string& bias = {}, double shift = 0.0) {
  index_t cols = 1;
  for (std::size_t d = 1; d < shape.size(); ++d) cols *= shape[d];
  const tensor<double, 2> w = rows_of(shape[0], cols);
  std::vector<tensor_entry> entries(1);
  const auto bytes_of = [](const double* data, index_t count) {
    return std::span(reinterpret_cast<const std::uint8_t*>(data),
                     static_cast<std::size_t>(count) * sizeof(double));
  };
  entries[0].name = name;
  entries[0].dtype = tensor_dtype::f64;
  entries[0].shape = shape;
  entries[0].bytes = bytes_of(w.data(), w.size());
  const std::vector<double> b(static_cast<std::size_t>(shape[0]), shift);
  if (!bias.empty()) {
    entries.push_back(entries[0]);
    entries[1].name = bias;
    entries[1].shape = {shape[0]};
    entries[1].bytes = bytes_of(b.data(), shape[0]);
  }
  write_safetensors(path, entries);
  return w;
}

tensor<double, 2> read_factor(const std::string& path, const std::string& name) {
  const safetensors_file file = safetensors_file::read(path);
  const tensor_info& info = file.tensor(name);
  tensor<double, 2> factor({info.shape[0], info.shape[0] > 0 ? info.count() / info.shape[0] : 0});
  read_tensor<double>(file, name, std::span<double>(factor.data(), static_cast<std::size_t>(factor.size())));
  return factor;
}

/// mean over i and k of (e_i^T d_k)^2 with e_i = W x_i - up down x_i, plainly.
double two_sided_error(const tensor<double, 2>& w, const tensor<double, 2>& up, const tensor<double, 2>& down,
                       const tensor<double, 2>& x, const tensor<double, 2>& d) {
  tensor<double, 2> error({w.extent(0), w.extent(1)});
  for (index_t i = 0; i < w.extent(0); ++i) {
    for (index_t j = 0; j < w.extent(1); ++j) {
      error(i, j) = w(i, j);
      for (index_t r = 0; r < up.extent(1); ++r) error(i, j) -= up(i, r) * down(r, j);
    }
  }
  const tensor<double, 2> e = outputs_of(x, error);
  double sum = 0.0;
  for (index_t i = 0; i < e.extent(0); ++i) {
    for (index_t k = 0; k < d.extent(0); ++k) {
      double product = 0.0;
      for (index_t j = 0; j < e.extent(1); ++j) product += e(i, j) * d(k, j);
      sum += product * product;
    }
  }
  return sum / static_cast<double>(e.extent(0) * d.extent(0));
}

weight_policy everywhere() {
  weight_policy policy;
  policy.keep_first = 0;
  policy.keep_last = false;
  return policy;
}

}  // namespace

TEST_CASE("statistics of weights: a file has every part of them") {
  const scratch_folder folder;
  network_statistics all;
  all.layers = {named("b.weight", full(5, 7)), named("a.weight", full(1, 1)), named("c.weight", full(3, 0)),
                named("d.weight", output_statistics(4, 2))};
  all.layers[0].normalized = true;
  all.layers[1].output_scale = {0.5};
  write_statistics(folder / "s", all);
  const network_statistics read = read_statistics(folder / "s");
  REQUIRE(read.layers.size() == 4);
  for (const layer_statistics& layer : all.layers) {
    CAPTURE(layer.name);
    const layer_statistics* const other = read.find(layer.name);
    REQUIRE(other != nullptr);
    CHECK(same(layer.matrices[0], other->matrices[0]));
    CHECK(layer.normalized == other->normalized);
    CHECK(layer.output_scale == other->output_scale);
  }
  all.layers[0].matrices.emplace_back(5, 7);
  CHECK_THROWS_AS(write_statistics(folder / "t", all), value_error);
  CHECK(list(folder.path()) == std::vector<std::string>{"s"});
}

TEST_CASE("statistics of weights: a block of rows has the statistics of a matrix of its own") {
  const tensor<double, 2> y = rows_of(11, 6), dy = rows_of(11, 6), x = rows_of(11, 4);
  for (const auto& [first, rows] : std::vector<std::pair<index_t, index_t>>{{0, 6}, {2, 3}, {5, 1}, {6, 0}}) {
    output_statistics whole(6, 4), part(rows, 4);
    whole.add_outputs(tensor_view<const double, 2>(y));
    whole.add_inputs(tensor_view<const double, 2>(x));
    whole.add_gradients(tensor_view<const double, 2>(dy), 2.0);
    part.add_outputs(tensor_view<const double, 2>(y).slice(1, first, rows));
    part.add_inputs(tensor_view<const double, 2>(x));
    part.add_gradients(tensor_view<const double, 2>(dy).slice(1, first, rows), 2.0);
    const output_statistics block = whole.block(first, rows);
    const tensor<double, 2> moments[][2] = {{block.output_moment(), part.output_moment()},
                                            {block.gradient_moment(), part.gradient_moment()},
                                            {block.input_moment(), part.input_moment()}};
    for (const auto& [a, b] : moments) {
      REQUIRE(a.size() == b.size());
      for (index_t i = 0; i < a.size(); ++i) CHECK(a.data()[i] == doctest::Approx(b.data()[i]));
    }
    CHECK(block.output_mean() == part.output_mean());
  }
  const output_statistics whole(6, 4);
  for (const auto& [first, rows] :
       std::vector<std::pair<index_t, index_t>>{{-1, 2}, {5, 2}, {7, 0}, {0, -1}}) {
    CHECK_THROWS_AS(whole.block(first, rows), shape_error);
  }
}

TEST_CASE("statistics of weights: files that are refused") {
  const scratch_folder folder;
  const std::vector<std::int64_t> size{2, 3}, negative{2, -3}, whole(7, 1);
  const std::vector<double> numbers(16, 1.0);
  std::vector<double> odd(9, 1.0);
  const auto entry = [](const std::string& name, auto& values, std::vector<index_t> shape) {
    using value = typename std::remove_cvref_t<decltype(values)>::value_type;
    tensor_entry one;
    one.name = name;
    one.dtype = dtype_of_v<value>;
    std::size_t count = sizeof(value);
    for (const index_t extent : shape) count *= static_cast<std::size_t>(extent);
    one.shape = std::move(shape);
    one.bytes = {reinterpret_cast<const std::uint8_t*>(values.data()), count};
    return one;
  };
  const auto refused = [&](const std::vector<tensor_entry>& entries, const char* says) {
    write_safetensors(folder / "s", entries);
    const std::string text = io_error_of([&] { read_statistics(folder / "s"); });
    CAPTURE(text);
    CHECK(mentions(text, folder / "s"));
    CHECK(mentions(text, says));
  };
  refused({entry("a.weight.counts", numbers, {7})}, "there is no 'a.weight.size'");
  refused({entry("counts", numbers, {7})}, "'counts'");
  refused({entry("a.weight.size", numbers, {2})}, "dtype");
  refused({entry("a.weight.size", size, {1})}, "'a.weight.size'");
  refused({entry("a.weight.size", negative, {2})}, "2 x -3");
  const tensor_entry good = entry("a.weight.size", size, {2});
  refused({good, entry("a.weight.count", numbers, {7})}, "'count' is no statistic");
  refused({good, entry("a.weight.counts", numbers, {6})}, "wanted is [7]");
  refused({good, entry("a.weight.counts", whole, {7})}, "wanted");
  refused({good, entry("a.weight.output_moment", numbers, {3, 3})}, "wanted is [2 x 2]");
  refused({good, entry("a.weight.token_counts", numbers, {2})}, "'a.weight.token_counts'");
  for (const double bad : {std::numeric_limits<double>::infinity(), std::nan(""), -1.0}) {
    odd[4] = bad;
    refused({good, entry("a.weight.input_moment", odd, {3, 3})}, "'a.weight.input_moment'");
    refused({good, entry("a.weight.counts", odd, {7})}, "'a.weight.counts'");
  }
  // Counts of rows without their sums.
  const auto of = [&](std::size_t rows) {
    static std::vector<double> counts;
    counts.assign(7, 0.0);
    counts[rows] = 50.0;
    return entry("a.weight.counts", counts, {7});
  };
  refused({good, of(0)}, "'a.weight': 50 rows of outputs without output_moment");
  refused({good, of(0), entry("a.weight.output_moment", numbers, {2, 2})}, "outputs without output_sum");
  refused({good, of(1)}, "50 rows of inputs without input_moment or token_counts");
  refused({good, of(1), entry("a.weight.input_moment", numbers, {3, 3})}, "inputs without input_sum");
  refused({good, of(2)}, "gradients without gradient_moment or gradient_squares");
  refused({good, of(3)}, "without tied_moment");
  for (const char* part : {"gradient_moment", "gradient_squares"}) {
    const std::vector<index_t> shape =
        std::string(part) == "gradient_moment" ? std::vector<index_t>{2, 2} : std::vector<index_t>{2};
    write_safetensors(folder / "s",
                      std::vector{good, of(2), entry("a.weight." + std::string(part), numbers, shape)});
    CHECK(read_statistics(folder / "s").layers.front().matrices.front().has_gradients());
  }
  odd[4] = 1.0;
  odd[1] = -1.0;  // beside the diagonal
  write_safetensors(folder / "s", std::vector{good, entry("a.weight.input_moment", odd, {3, 3})});
  CHECK(read_statistics(folder / "s").layers.size() == 1);
  CHECK(mentions(io_error_of([&] { read_statistics(folder / "none"); }), "No such file"));
}

TEST_CASE("weights with statistics: factors lose the least of the loss, as predicted") {
  const scratch_folder folder;
  struct {
    const char* name;
    std::vector<index_t> shape;
    bool by_inputs;
    double bias;
  } const cases[] = {{"fc.weight", {12, 9}, true, 0.0},
                     {"fc.weight", {9, 12}, false, 0.7},
                     {"conv.weight", {8, 3, 2, 2}, true, 0.0},
                     {"conv.weight", {6, 5, 3, 1}, false, 0.0}};
  for (const auto& each : cases) {
    CAPTURE(each.name);
    const bool biased = each.bias != 0.0;
    const tensor<double, 2> w =
        save_weight(folder / "dense", each.name, each.shape, biased ? "fc.bias" : "", each.bias);
    const tensor<double, 2> x = rows_of(50, w.extent(1)), d = rows_of(50, w.extent(0));
    const tensor<double, 2> y = outputs_of(x, w, each.bias);
    output_statistics seen(w.extent(0), w.extent(1));
    each.by_inputs ? seen.add_inputs(tensor_view<const double, 2>(x))
                   : seen.add_outputs(tensor_view<const double, 2>(y));
    seen.add_gradients(tensor_view<const double, 2>(d), 1.0);
    seen.add_batch(50.0, 50.0);
    network_statistics all;
    all.layers = {named(each.name, seen)};
    write_statistics(folder / "seen", all);
    const network_statistics read = read_statistics(folder / "seen");

    weight_policy policy = everywhere();
    policy.rank = fixed_rank{2};
    policy.statistics = &read;
    double errors[3];
    for (const truncation kind : {truncation::plain, truncation::data_aware, truncation::two_sided}) {
      CAPTURE(to_string(kind));
      policy.truncate = kind;
      const weight_result result = factorize_weights(folder / "dense", folder / "low", policy).tensors.back();
      const std::string stem = std::string(each.name).substr(0, std::string(each.name).rfind('.'));
      const tensor<double, 2> up = read_factor(folder / "low", stem + ".up.weight");
      const tensor<double, 2> down = read_factor(folder / "low", stem + ".down.weight");
      REQUIRE(up.extent(1) == 2);
      double& error = errors[static_cast<std::size_t>(kind)];
      error = two_sided_error(w, up, down, x, d);
      CHECK(result.kind == kind);
      // Up to the small ridges that the moments get.
      CHECK(result.predicted_loss == doctest::Approx(0.5 * error).epsilon(0.02));
    }
    CHECK(errors[2] < errors[0]);
    CHECK(errors[2] < errors[1]);
    policy.truncate.reset();
    CHECK(factorize_weights(folder / "dense", folder / "low", policy).tensors.back().kind ==
          truncation::two_sided);
  }
}

TEST_CASE("weights with statistics: an embedding keeps what its frequent tokens need") {
  const scratch_folder folder;
  const tensor<double, 2> table = save_weight(folder / "dense", "wte.weight", {40, 6});
  output_statistics seen(6, 40);
  std::vector<std::int32_t> tokens;
  for (std::int32_t t = 0; t < 40; ++t)
    tokens.insert(tokens.end(), static_cast<std::size_t>(t % 7 == 0 ? 60 : 1), t);
  seen.add_tokens(tokens);
  network_statistics all;
  all.layers = {named("wte.weight", seen)};
  weight_policy policy = everywhere();
  policy.embeddings_dense = false;
  policy.rank = fixed_rank{2};
  const auto error_of = [&] {
    factorize_weights(folder / "dense", folder / "low", policy);
    const tensor<double, 2> down = read_factor(folder / "low", "wte.down.weight");
    const tensor<double, 2> up = read_factor(folder / "low", "wte.up.weight");
    REQUIRE(down.shape() == extents<2>{40, 2});
    REQUIRE(up.shape() == extents<2>{6, 2});
    double sum = 0.0;
    for (const std::int32_t t : tokens) {
      for (index_t j = 0; j < 6; ++j) {
        const double e = table(t, j) - down(t, 0) * up(j, 0) - down(t, 1) * up(j, 1);
        sum += e * e;
      }
    }
    return sum;
  };
  const double plain = error_of();
  policy.statistics = &all;
  CHECK(error_of() < 0.95 * plain);
}

TEST_CASE("weights with statistics: matrices of one weight, by the statistics of the whole") {
  const scratch_folder folder;
  const tensor<double, 2> w = save_weight(folder / "dense", "rnn.weight_hh_l0", {4 * 8, 8});
  const tensor<double, 2> x = rows_of(30, 8), d = rows_of(30, 32);
  output_statistics seen(32, 8);
  seen.add_inputs(tensor_view<const double, 2>(x));
  seen.add_gradients(tensor_view<const double, 2>(d), 1.0);
  layer_statistics parts;
  parts.name = "rnn.weight_hh_l0";
  for (index_t g = 0; g < 4; ++g) parts.matrices.push_back(seen.block(8 * g, 8));
  network_statistics whole, each;
  whole.layers = {named("rnn.weight_hh_l0", seen)};
  each.layers = {parts};
  weight_policy policy = everywhere();
  policy.rank = fixed_rank{2};
  policy.include = [](const std::string&) { return true; };
  policy.statistics = &whole;
  const weight_report one = factorize_weights(folder / "dense", folder / "a", policy);
  policy.statistics = &each;
  factorize_weights(folder / "dense", folder / "b", policy);
  REQUIRE(one.tensors.front().factorized);
  CHECK(one.tensors.front().parts == 4);
  CHECK(read_file(folder / "a") == read_file(folder / "b"));
  const tensor<double, 2> up = read_factor(folder / "a", "rnn.weight_hh_l0.up");
  const tensor<double, 2> down = read_factor(folder / "a", "rnn.weight_hh_l0.down");
  double sum = 0.0;
  for (index_t g = 0; g < 4; ++g) {
    const auto gate = [&](const tensor<double, 2>& all, index_t rows) {
      return tensor<double, 2>(tensor_view<const double, 2>(all).slice(0, g * rows, rows));
    };
    sum += two_sided_error(gate(w, 8), gate(up, 8), gate(down, 2), x,
                           tensor<double, 2>(tensor_view<const double, 2>(d).slice(1, 8 * g, 8)));
  }
  CHECK(one.tensors.front().predicted_loss == doctest::Approx(0.5 * sum).epsilon(0.02));
}

TEST_CASE("weights with statistics: a budget goes where the loss needs it") {
  const scratch_folder folder;
  const tensor<double, 2> a = rows_of(24, 20), b = rows_of(24, 20);
  std::vector<tensor_entry> entries(2);
  for (std::size_t i = 0; i < 2; ++i) {
    const tensor<double, 2>& w = i == 0 ? a : b;
    entries[i].name = i == 0 ? "a.weight" : "b.weight";
    entries[i].dtype = tensor_dtype::f64;
    entries[i].shape = {24, 20};
    entries[i].bytes = {reinterpret_cast<const std::uint8_t*>(w.data()),
                        static_cast<std::size_t>(w.size()) * 8};
  }
  write_safetensors(folder / "dense", entries);
  network_statistics all;
  for (const char* name : {"a.weight", "b.weight"}) {
    output_statistics seen(24, 20);
    seen.add_inputs(tensor_view<const double, 2>(rows_of(60, 20)));
    // The loss hardly depends on b.
    seen.add_gradients(tensor_view<const double, 2>(rows_of(60, 24)), name[0] == 'a' ? 1.0 : 1e-4);
    all.layers.push_back(named(name, seen));
  }
  weight_policy policy = everywhere();
  policy.budget = 500;
  const auto loss_of = [&](const weight_report& report) {
    CHECK(report.parameters_after <= 500);
    return report.tensors[0].rank;
  };
  const index_t before = loss_of(factorize_weights(folder / "dense", folder / "low", policy));
  policy.statistics = &all;
  for (const int threads : {1, 3}) {
    policy.threads = threads;
    const weight_report report =
        factorize_weights(folder / "dense", folder / (threads == 1 ? "one" : "three"), policy);
    CHECK(loss_of(report) > before);
    CHECK(report.tensors[1].rank <= 2);
  }
  CHECK(read_file(folder / "one") == read_file(folder / "three"));
  policy.budget = 960;
  const weight_report dense = factorize_weights(folder / "dense", folder / "low", policy);
  CHECK(dense.tensors[0].reason == "dense: fits");
  CHECK(read_file(folder / "low").size() >= read_file(folder / "dense").size());
}

TEST_CASE("weights with statistics: what is refused") {
  const scratch_folder folder;
  save_weight(folder / "dense", "fc.weight", {8, 8});
  weight_policy policy = everywhere();
  const auto refused = [&]<class Error>(Error, const char* says) {
    try {
      factorize_weights(folder / "dense", folder / "low", policy);
      FAIL("was not refused: ", std::string(says));
    } catch (const Error& e) {
      const std::string text = e.what();
      CAPTURE(text);
      CHECK(mentions(text, says));
    }
    CHECK(list(folder.path()) == std::vector<std::string>{"dense"});
  };
  policy.truncate = truncation::data_aware;
  refused(value_error(""), "a data-aware truncation needs statistics");
  policy.truncate.reset();
  network_statistics all;
  policy.statistics = &all;
  refused(value_error(""), "no statistics of 'fc.weight'");
  all.layers = {named("fc.weight", output_statistics(8, 8))};
  refused(value_error(""), "no statistics of 'fc.weight'");
  all.layers = {named("fc.weight", full(8, 8)), named("other.weight", full(8, 8))};
  refused(value_error(""), "'other.weight', which is no tensor of the file");
  all.layers = {named("fc.weight", full(9, 8))};
  refused(shape_error(""), "fc.weight");
  all.layers = {named("fc.weight", full(8, 9))};
  refused(shape_error(""), "fc.weight");
  all.layers = {named("fc.weight", full(8, 8))};
  all.layers[0].output_scale = {1.0, 2.0};
  refused(shape_error(""), "fc.weight: an output_scale of 2 numbers for a weight of 8 outputs");
  output_statistics outputs(8, 8);
  outputs.add_outputs(tensor_view<const double, 2>(rows_of(9, 8)));
  all.layers = {named("fc.weight", outputs)};
  policy.truncate = truncation::two_sided;
  refused(value_error(""), "needs statistics of gradients");
}
