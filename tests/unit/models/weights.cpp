// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// load_weights: dtypes, files that factorize_weights wrote, and what is said where a file does not fit.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/mlp.hpp>
#include <pufferfish/models/weights.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/weights/merge.hpp>

#include "../support/io_support.hpp"

using namespace pufferfish;
using namespace io_test;

namespace {

const mlp_options options{24, {32, 28}, 5};

/// A network's parameters as a file of one dtype.
class weights_of_dtype {
 public:
  template <class Model>
  weights_of_dtype(Model& net, tensor_dtype dtype) {
    const auto& all = net.store().parameters();
    bytes_.reserve(all.size());
    for (const auto& entry : all) {
      const logical_layout& layout = entry.thing->layout();
      const tensor<double, 4> ordered(entry.thing->logical());
      tensor_entry& made = entries.emplace_back();
      made.name = entry.name;
      made.dtype = dtype;
      made.shape.assign(layout.shape.begin(), layout.shape.begin() + layout.dims);
      detail::append_floating<double>(dtype, ordered.flat(), bytes_.emplace_back());
      made.bytes = bytes_.back();
    }
  }
  std::vector<tensor_entry> entries;

 private:
  std::vector<bytes> bytes_;
};

network<double> random_network() {
  network<double> net = mlp<double>(options);
  net.initialize(3);
  return net;
}

double rounded(double value, tensor_dtype dtype) {
  if (dtype == tensor_dtype::f32) return static_cast<double>(scalar_cast<float>(value));
  if (dtype == tensor_dtype::f16) return static_cast<double>(scalar_cast<float16>(value));
  if (dtype == tensor_dtype::bf16) return static_cast<double>(scalar_cast<bfloat16>(value));
  return value;
}

constexpr tensor_dtype dtypes[] = {tensor_dtype::f32, tensor_dtype::f64, tensor_dtype::f16,
                                   tensor_dtype::bf16};

TEST_CASE_TEMPLATE("load_weights: F32, F64, F16 and BF16", T, float, double) {
  network<double> source = random_network();
  for (const tensor_dtype dtype : dtypes) {
    CAPTURE(to_string(dtype));
    const weights_of_dtype file(source, dtype);
    network<T> net = mlp<T>(options);
    load_weights(net, safetensors_file::parse(encode_safetensors(file.entries), "x"));
    const auto have = net.store().values();
    const auto want = source.store().values();
    REQUIRE(have.size() == want.size());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < have.size(); ++i) wrong += have[i] != static_cast<T>(rounded(want[i], dtype));
    CHECK(wrong == 0);
  }
}

weight_policy everywhere(index_t rank) {
  weight_policy policy;
  policy.keep_first = 0;
  policy.keep_last = false;
  policy.rank = fixed_rank{rank};
  return policy;
}

TEST_CASE("load_weights: files that factorize_weights wrote, of every dtype") {
  const scratch_folder folder;
  network<double> source = random_network();
  for (const tensor_dtype dtype : dtypes) {
    CAPTURE(to_string(dtype));
    const std::string dense = folder / "dense.safetensors", small = folder / "small.safetensors",
                      merged = folder / "merged.safetensors";
    write_safetensors(dense, weights_of_dtype(source, dtype).entries);
    factorize_weights(dense, small, everywhere(4));
    const safetensors_file file = safetensors_file::read(small);
    CHECK(file.tensor("fc2.down.weight").dtype == dtype);
    network<float> net = mlp<float>(options);
    apply_ranks(net, {{"fc1", 4}, {"fc2", 4}, {"fc3", 4}});
    load_weights(net, file);
    std::vector<float> down(4 * 32);
    read_tensor_converted<float>(file, "fc2.down.weight", std::span(down));
    for (const auto& entry : net.store().parameters()) {
      if (entry.name != "fc2.down.weight") continue;
      for (index_t i = 0; i < 4; ++i) {
        for (index_t j = 0; j < 32; ++j) {
          CHECK(entry.thing->logical()(i, j, 0, 0) == down[static_cast<std::size_t>(i * 32 + j)]);
        }
      }
    }
    merge_weights(small, merged);
    network<float> whole = mlp<float>(options);
    load_weights(whole, safetensors_file::read(merged));
    CHECK(whole.store().values().size() == source.store().values().size());
  }
}

TEST_CASE(
    "load_weights: a language model factorized as a file is the one factorized in memory, table and all") {
  const scratch_folder folder;
  const std::string dense = folder / "dense", small = folder / "small", merged = folder / "merged";
  const auto make = [] { return model<lstm_lm<double>>(lstm_lm<double>({40, 16, 2, 0.0})); };
  model<lstm_lm<double>> net = make();
  net.initialize(7);
  write_safetensors(dense, weights_of_dtype(net, tensor_dtype::f64).entries);
  weight_policy of_file = everywhere(3);
  of_file.embeddings_dense = false;
  of_file.embedding_rank = fixed_rank{5};
  of_file.embedding = [](const std::string& name) { return name == "encoder.weight"; };
  factorize_weights(dense, small, of_file);

  factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  policy.rank = of_file.rank;
  policy.embeddings_dense = false;
  policy.embedding_rank = of_file.embedding_rank;
  const factorization done = factorize(net, policy);
  REQUIRE(done.low_rank.size() == 3);
  model<lstm_lm<double>> loaded = make();
  apply_ranks(loaded, done.ranks());
  load_weights(loaded, safetensors_file::read(small));
  model<lstm_lm<double>> again = make();
  merge_weights(small, merged);
  load_weights(again, safetensors_file::read(merged));

  const std::vector<std::int32_t> tokens{3, 39, 0, 17, 5, 5};
  const auto logits_of = [&](const model<lstm_lm<double>>& of) {
    cpu_context ctx;
    tensor<double, 2> logits({6, 40});
    lstm_lm_state<double> state(2, 2, 16);
    of.root().forward(ctx, tensor_view<const std::int32_t, 2>(tokens.data(), {3, 2}), state, logits);
    return std::vector<double>(logits.data(), logits.data() + logits.size());
  };
  const std::vector<double> want = logits_of(net);
  for (const auto* other : {&loaded, &again}) {
    const std::vector<double> have = logits_of(*other);
    for (std::size_t i = 0; i < want.size(); ++i) CHECK(have[i] == doctest::Approx(want[i]).epsilon(1e-9));
  }
}

TEST_CASE("load_weights: factors into a dense network, and the other way, say what to call") {
  const scratch_folder folder;
  network<double> source = random_network();
  const std::string dense = folder / "dense.safetensors", small = folder / "small.safetensors";
  write_safetensors(dense, weights_of_dtype(source, tensor_dtype::f32).entries);
  weight_policy policy = everywhere(4);
  policy.exclude = [](const std::string& name) { return name.find("fc1") == 0; };
  factorize_weights(dense, small, policy);
  const safetensors_file factors = safetensors_file::read(small), whole = safetensors_file::read(dense);

  network<double> net = random_network();
  const std::vector<double> before(net.store().values().begin(), net.store().values().end());
  std::string text = io_error_of([&] { load_weights(net, factors); });
  CHECK(mentions(text,
                 "low-rank factors where the model is dense ('fc2' of rank 4, 'fc3' of rank 4): call "
                 "apply_ranks(net, ranks) with these ranks before load_weights"));
  CHECK(std::equal(before.begin(), before.end(), net.store().values().begin()));
  apply_ranks(net, {{"fc2", 4}, {"fc3", 4}});
  load_weights(net, factors);

  text = io_error_of([&] { load_weights(net, whole); });
  CHECK(mentions(text, "the model is low-rank where the file is dense ('fc2')"));
  CHECK(!mentions(text, "apply_ranks"));

  network<double> other = random_network();
  apply_ranks(other, {{"fc2", 3}, {"fc3", 4}});
  text = io_error_of([&] { load_weights(other, factors); });
  CHECK(mentions(text,
                 "has shape [28 x 4], the model's has [28 x 3]; the ranks of file and model must be the "
                 "same: see apply_ranks"));
}

}  // namespace
