// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include <doctest/doctest.h>

#include <pufferfish/weights/merge.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

using shape_list = std::vector<std::pair<std::string, std::vector<index_t>>>;

std::map<std::string, weight_decision> plan_of(const shape_list& shapes, const weight_policy& policy = {}) {
  std::vector<weight_tensor> tensors;
  for (const auto& [name, shape] : shapes) tensors.push_back({name, tensor_dtype::f32, shape});
  const std::vector<weight_decision> plan = weight_plan(tensors, policy);
  std::map<std::string, weight_decision> result;
  for (std::size_t i = 0; i < tensors.size(); ++i) result.emplace(tensors[i].name, plan[i]);
  return result;
}

weight_policy everywhere() {
  weight_policy policy;
  policy.keep_first = 0;
  policy.keep_last = false;
  return policy;
}

index_t count_of(const std::vector<index_t>& shape) {
  index_t count = 1;
  for (const index_t extent : shape) count *= extent;
  return count;
}

/// Tensors with random numbers, to be written.
class weights {
 public:
  explicit weights(unsigned seed) : random_(seed) {}

  void add(const std::string& name, tensor_dtype dtype, const std::vector<index_t>& shape,
           index_t inner = 0) {
    const index_t rows = shape.empty() ? 1 : shape[0], count = count_of(shape);
    const index_t cols = rows > 0 ? count / rows : 0;
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(random_);
    if (inner > 0) {  // of that rank, exactly but for rounding
      std::vector<float> left(static_cast<std::size_t>(rows * inner)),
          right(static_cast<std::size_t>(inner * cols));
      for (float& value : left) value = normal(random_);
      for (float& value : right) value = normal(random_);
      for (index_t i = 0; i < rows; ++i) {
        for (index_t j = 0; j < cols; ++j) {
          float sum = 0.0F;
          for (index_t k = 0; k < inner; ++k) {
            sum +=
                left[static_cast<std::size_t>(i * inner + k)] * right[static_cast<std::size_t>(k * cols + j)];
          }
          values[static_cast<std::size_t>(i * cols + j)] = sum;
        }
      }
    }
    tensor_entry& entry = entries_.emplace_back();
    entry.name = name;
    entry.dtype = dtype;
    entry.shape = shape;
    if (detail::is_floating(dtype)) {
      detail::append_floating<float>(dtype, values, bytes_.emplace_back());
    } else {
      bytes_.emplace_back(static_cast<std::size_t>(count) * size_of(dtype), std::uint8_t{7});
    }
  }

  std::vector<tensor_entry> entries() const {
    std::vector<tensor_entry> result = entries_;
    for (std::size_t i = 0; i < result.size(); ++i) result[i].bytes = bytes_[i];
    return result;
  }
  void save(const std::string& path) const { write_safetensors(path, entries(), {{"format", "pt"}}); }

 private:
  std::mt19937 random_;
  std::vector<tensor_entry> entries_;
  std::vector<bytes> bytes_;
};

std::vector<double> values_of(const safetensors_file& file, const std::string& name) {
  std::vector<double> values(static_cast<std::size_t>(file.tensor(name).count()));
  read_tensor_converted<double>(file, name, values);
  return values;
}

/// ||a - b|| / ||a||
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double lost = 0.0, all = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    lost += (a[i] - b[i]) * (a[i] - b[i]);
    all += a[i] * a[i];
  }
  return all > 0.0 ? std::sqrt(lost / all) : std::sqrt(lost);
}

const weight_result& result_of(const weight_report& report, const std::string& name) {
  const auto at = std::find_if(report.tensors.begin(), report.tensors.end(),
                               [&](const weight_result& r) { return r.name == name; });
  REQUIRE(at != report.tensors.end());
  return *at;
}

weights small_network(tensor_dtype dtype) {
  weights w(5);
  w.add("conv1.weight", dtype, {16, 3, 3, 3});
  w.add("layer1.conv2.weight", dtype, {24, 16, 3, 3});
  w.add("layer1.conv2.bias", dtype, {24});
  w.add("layer1.bn.weight", dtype, {24});
  w.add("layer1.bn.num_batches_tracked", tensor_dtype::i64, {});
  w.add("layer2.weight", dtype, {40, 32});
  w.add("rnn.weight_ih_l0", dtype, {4 * 20, 36});
  w.add("rnn.weight_hh_l0", dtype, {4 * 20, 20});
  w.add("rnn.bias_ih_l0", dtype, {4 * 20});
  w.add("fc.weight", dtype, {10, 40});
  w.add("fc.bias", dtype, {10});
  return w;
}

}  // namespace

TEST_CASE("weight plan: matrices, convolutions, and what is neither") {
  auto plan = plan_of({{"a.weight", {64, 64}},
                       {"a.bias", {64}},
                       {"b.weight", {64, 32, 3, 3}},
                       {"norm.weight", {64}},
                       {"depthwise.weight", {64, 1, 3, 3}},
                       {"tiny.weight", {2, 2}},
                       {"conv3d.weight", {8, 8, 3, 3, 3}},
                       {"conv1d.weight", {64, 64, 3}},
                       {"wte.weight", {1000, 64}},
                       {"model.embed_tokens.weight", {1000, 64}},
                       {"emb.word_embeddings.weight", {1000, 64}},
                       {"time_embedding.linear_1.weight", {64, 64}},
                       {"attn.in_proj_weight", {192, 64}},
                       {"position", {64, 64}},
                       {"none.weight", {0, 64}},
                       {"weight", {64, 64}}},
                      everywhere());
  for (const char* name : {"a.weight", "b.weight", "time_embedding.linear_1.weight", "weight"}) {
    CAPTURE(name);
    CHECK(plan[name].factorize);
    CHECK(plan[name].reason.empty());
  }
  CHECK(plan["b.weight"].rows == 64);
  CHECK(plan["b.weight"].cols == 288);
  CHECK(plan["a.bias"].bias_of == 0);
  CHECK(plan["norm.weight"].reason == "1 dimension");
  CHECK(mentions(plan["depthwise.weight"].reason, "depthwise"));
  CHECK(mentions(plan["tiny.weight"].reason, "not be smaller"));
  CHECK(mentions(plan["none.weight"].reason, "not be smaller"));
  CHECK(plan["conv3d.weight"].reason == "5 dimensions");
  CHECK(plan["conv1d.weight"].reason == "3 dimensions");
  for (const char* name : {"wte.weight", "model.embed_tokens.weight", "emb.word_embeddings.weight"}) {
    CHECK(plan[name].reason == "an embedding");
  }
  CHECK(plan["attn.in_proj_weight"].reason == "packed projections");
  CHECK(plan["position"].reason == "not a weight");
  const weight_tensor integers{"a.weight", tensor_dtype::i8, {64, 64}};
  CHECK(weight_plan({&integers, 1}, {})[0].reason == "dtype I8");
}

TEST_CASE("weight plan: first and last layers") {
  const shape_list resnet{{"fc.weight", {100, 64}},
                          {"layer1.10.conv.weight", {64, 64, 1, 1}},
                          {"layer1.2.conv.weight", {64, 64, 1, 1}},
                          {"conv1.weight", {64, 32, 7, 7}}};
  auto plan = plan_of(resnet);
  CHECK(plan["conv1.weight"].layer == 1);
  CHECK(plan["layer1.2.conv.weight"].layer == 2);
  CHECK(plan["layer1.10.conv.weight"].layer == 3);
  CHECK(plan["fc.weight"].layer == 4);
  CHECK(plan["conv1.weight"].reason == "the first layer");
  CHECK(plan["fc.weight"].reason == "the last layer");
  CHECK(plan["layer1.2.conv.weight"].factorize);
  weight_policy policy;
  policy.keep_first = 2;
  policy.keep_last = false;
  plan = plan_of(resnet, policy);
  CHECK(plan["layer1.2.conv.weight"].reason == "among the first layers");
  CHECK(plan["fc.weight"].factorize);
  // Both sides of a recurrent layer are one layer.
  plan = plan_of({{"rnn.weight_ih_l0", {256, 64}},
                  {"rnn.weight_hh_l0", {256, 64}},
                  {"rnn.weight_ih_l1", {256, 64}},
                  {"rnn.weight_hh_l1", {256, 64}},
                  {"decoder.weight", {100, 64}}});
  CHECK(plan["rnn.weight_hh_l0"].reason == "the first layer");
  CHECK(plan["rnn.weight_ih_l1"].factorize);
  CHECK(plan["decoder.weight"].reason == "the last layer");
  for (const index_t keep : {-1, 4, 9}) {  // all four of them, or more, are no first ones
    policy.keep_first = keep;
    CHECK_THROWS_AS(plan_of(resnet, policy), value_error);
  }
  policy.keep_first = 1;
  policy.parameters_elsewhere = -5;
  CHECK_THROWS_WITH_AS(plan_of(resnet, policy), doctest::Contains("parameters_elsewhere -5"), value_error);
}

TEST_CASE("weight plan: gates") {
  auto plan = plan_of({{"lstm.weight_ih_l0", {4 * 32, 48}},
                       {"lstm.weight_hh_l0", {4 * 32, 32}},
                       {"gru.weight_ih_l0_reverse", {3 * 32, 48}},
                       {"gru.weight_hh_l0_reverse", {3 * 32, 32}},
                       {"cell.weight_ih", {32, 48}},
                       {"cell.weight_hh", {32, 32}},
                       {"proj.weight_ih_l0", {4 * 32, 48}},
                       {"proj.weight_hh_l0", {4 * 32, 16}},
                       {"proj.weight_hr_l0", {16, 32}},
                       {"lone.weight_ih_l0", {128, 48}},
                       {"odd.weight_ih_l0", {64, 48}},
                       {"odd.weight_hh_l0", {64, 32}}},
                      everywhere());
  CHECK(plan["lstm.weight_ih_l0"].parts == 4);
  CHECK(plan["lstm.weight_ih_l0"].rows == 32);
  CHECK(plan["lstm.weight_ih_l0"].cols == 48);
  CHECK(plan["gru.weight_hh_l0_reverse"].parts == 3);
  CHECK(plan["cell.weight_ih"].parts == 1);
  CHECK(plan["proj.weight_hh_l0"].parts == 4);
  CHECK(plan["proj.weight_hr_l0"].reason == "not a weight");
  CHECK(mentions(plan["lone.weight_ih_l0"].reason, "without its other side"));
  CHECK(mentions(plan["odd.weight_hh_l0"].reason, "unknown kind"));
}

TEST_CASE("weight plan: names that are chosen, and names that are taken") {
  weight_policy policy = everywhere();
  policy.include = [](const std::string& name) { return name != "a.weight"; };
  policy.exclude = [](const std::string& name) { return name == "b.weight"; };
  auto plan = plan_of({{"a.weight", {64, 64}},
                       {"b.weight", {64, 64}},
                       {"c.weight", {64, 64}},
                       {"c.bias", {63}},
                       {"d.weight", {64, 64}},
                       {"d.down.weight", {64, 64}},
                       {"e.down.weight", {16, 64}},
                       {"e.up.weight", {64, 16}},
                       {"wte.weight", {64, 64}}},
                      policy);
  CHECK(plan["a.weight"].reason == "not included");
  CHECK(plan["b.weight"].reason == "excluded");
  CHECK(mentions(plan["c.weight"].reason, "bias does not fit"));
  CHECK(mentions(plan["d.weight"].reason, "names are taken"));
  CHECK(plan["d.down.weight"].factorize);
  CHECK(plan["e.down.weight"].reason == "a factor already");
  CHECK(plan["e.up.weight"].reason == "a factor already");
  CHECK(plan["wte.weight"].factorize);
}

TEST_CASE("weight plan: groups of convolutions") {
  weight_policy policy = everywhere();
  policy.rank = fixed_rank{3};
  policy.groups = [](const std::string& name) { return index_t{name == "a.weight" ? 4 : 1}; };
  const shape_list shapes{{"a.weight", {48, 12, 3, 3}},
                          {"a.bias", {48}},
                          {"b.weight", {48, 12, 3, 3}},
                          {"c.weight", {48, 1, 3, 3}},
                          {"d.weight", {4, 4}}};
  auto plan = plan_of(shapes, policy);
  CHECK(plan["a.weight"].factorize);
  CHECK(plan["a.weight"].parts == 4);
  CHECK(plan["a.weight"].rows == 12);
  CHECK(plan["a.weight"].cols == 108);
  CHECK(plan["a.bias"].bias_of == 0);
  CHECK(plan["b.weight"].parts == 1);
  CHECK(plan["b.weight"].rows == 48);
  // The rank counts for each group's matrix: 11 x (12 + 108) numbers are more than 12 x 108.
  policy.rank = fixed_rank{11};
  plan = plan_of(shapes, policy);
  CHECK(plan["a.weight"].reason == "factors would not be smaller");
  CHECK(plan["b.weight"].factorize);
  policy.groups = [](const std::string&) { return index_t{48}; };
  plan = plan_of(shapes, policy);
  CHECK(mentions(plan["c.weight"].reason, "depthwise"));
  CHECK(mentions(plan["a.weight"].reason, "not be smaller"));
  for (const index_t groups : {index_t{0}, index_t{-2}, index_t{5}, index_t{96}}) {
    CAPTURE(groups);
    policy.groups = [groups](const std::string&) { return groups; };
    std::string refusal;
    try {
      plan_of(shapes, policy);
    } catch (const value_error& e) {
      refusal = e.what();
    }
    CHECK(mentions(refusal, "a.weight: 48 output channels cannot be divided into " + std::to_string(groups)));
  }
}

TEST_CASE("weight plan: embeddings are no layers, and have ranks of their own") {
  const shape_list shapes{{"model.embed_tokens.weight", {200, 48}},
                          {"model.encoder.weight", {200, 48}},
                          {"model.layers.0.weight", {64, 64}},
                          {"model.layers.1.weight", {64, 64}},
                          {"lm_head.weight", {200, 48}}};
  weight_policy policy;
  auto plan = plan_of(shapes, policy);
  CHECK(plan["model.embed_tokens.weight"].reason == "an embedding");
  CHECK(plan["model.embed_tokens.weight"].embedding);
  CHECK(plan["model.embed_tokens.weight"].layer == 0);
  CHECK(plan["model.encoder.weight"].layer == 1);
  CHECK(plan["model.layers.0.weight"].factorize);
  policy.embeddings_dense = false;
  policy.embedding = [](const std::string& name) { return name == "model.encoder.weight"; };
  plan = plan_of(shapes, policy);
  for (const char* name : {"model.embed_tokens.weight", "model.encoder.weight"}) {
    CAPTURE(name);
    CHECK(plan[name].factorize);
    CHECK(plan[name].embedding);
    CHECK(plan[name].layer == 0);
    CHECK(plan[name].rows == 200);
    CHECK(plan[name].cols == 48);
  }
  CHECK(plan["model.layers.0.weight"].reason == "the first layer");
  CHECK(plan["lm_head.weight"].reason == "the last layer");  // with the table's numbers or not
  CHECK(!plan["lm_head.weight"].embedding);
  policy.embedding_rank = fixed_rank{39};
  CHECK(mentions(plan_of(shapes, policy)["model.encoder.weight"].reason, "not be smaller"));
  policy.embedding_rank = fixed_rank{38};
  CHECK(plan_of(shapes, policy)["model.encoder.weight"].factorize);
  policy.budget = 30000;
  CHECK_THROWS_AS(plan_of(shapes, policy), value_error);
  policy.budget = 0;
  policy.exclude = [](const std::string& name) { return name == "model.encoder.weight"; };
  CHECK(plan_of(shapes, policy)["model.encoder.weight"].reason == "excluded");
  policy.include = policy.exclude;
  CHECK(plan_of(shapes, policy)["model.embed_tokens.weight"].reason == "not included");
}

TEST_CASE("weight plan: a fixed rank that some matrices cannot have") {
  weight_policy policy = everywhere();
  policy.rank = fixed_rank{20};
  policy.embedding_rank = fixed_rank{20};
  policy.embeddings_dense = false;
  auto plan = plan_of({{"a.weight", {64, 64}},
                       {"token_type_embeddings.weight", {2, 64}},
                       {"word_embeddings.weight", {500, 64}},
                       {"rnn.weight_ih_l0", {4 * 64, 64}},
                       {"rnn.weight_hh_l0", {4 * 64, 64}},
                       {"thin.weight_ih_l0", {4 * 64, 3}},
                       {"thin.weight_hh_l0", {4 * 64, 64}},
                       {"z.weight", {8, 8}}},
                      policy);
  for (const char* name : {"a.weight", "word_embeddings.weight", "rnn.weight_ih_l0", "thin.weight_hh_l0"}) {
    CAPTURE(name);
    CHECK(plan[name].factorize);
  }
  for (const char* name : {"token_type_embeddings.weight", "thin.weight_ih_l0", "z.weight"}) {
    CAPTURE(name);
    CHECK(plan[name].reason == "factors would not be smaller");
  }
  CHECK(plan["thin.weight_ih_l0"].layer == plan["thin.weight_hh_l0"].layer);
  CHECK(plan["z.weight"].layer == 4);
  policy.rank = fixed_rank{0};
  CHECK_THROWS_AS(plan_of({{"a.weight", {64, 64}}}, policy), rank_error);
}

TEST_CASE("weight plan: packed projections") {
  weight_policy policy = everywhere();
  const shape_list shapes{{"a.in_proj_weight", {96, 32}},  {"a.in_proj_bias", {96}},
                          {"a.out_proj.weight", {32, 32}}, {"b.in_proj_weight", {96, 48}},
                          {"c.in_proj_weight", {96, 32}},  {"c.in_proj_weight.up", {96, 4}},
                          {"in_proj_weight", {96, 32}}};
  auto plan = plan_of(shapes, policy);
  CHECK(plan["a.in_proj_weight"].reason == "packed projections");
  policy.include = [](const std::string& name) { return mentions(name, "in_proj_weight"); };
  CHECK(plan_of(shapes, policy)["a.in_proj_weight"].reason == "packed projections");
  policy.include = {};
  policy.projections_dense = false;
  plan = plan_of(shapes, policy);
  for (const char* name : {"a.in_proj_weight", "in_proj_weight"}) {
    CHECK(plan[name].factorize);
    CHECK(plan[name].parts == 3);
    CHECK(plan[name].rows == 32);
    CHECK(plan[name].cols == 32);
  }
  CHECK(plan["a.in_proj_bias"].bias_of == weight_decision::npos);
  CHECK(plan["a.out_proj.weight"].factorize);
  CHECK(mentions(plan["b.in_proj_weight"].reason, "unknown kind"));
  CHECK(mentions(plan["c.in_proj_weight"].reason, "names are taken"));
}

TEST_CASE("a file of every dtype is factorized and merged") {
  const scratch_folder folder;
  for (const tensor_dtype dtype :
       {tensor_dtype::f32, tensor_dtype::f64, tensor_dtype::f16, tensor_dtype::bf16}) {
    CAPTURE(to_string(dtype));
    const weights network = small_network(dtype);
    network.save(folder / "dense");
    weight_policy policy;
    policy.rank = rank_ratio{0.5};
    int calls = 0;
    double share = 0.0;
    const weight_report report =
        factorize_weights(folder / "dense", folder / "low", policy, [&](const weight_result&, double now) {
          ++calls;
          CHECK(now >= share);
          share = now;
        });
    CHECK(calls == 11);
    CHECK(share == doctest::Approx(1.0));
    const safetensors_file dense = safetensors_file::read(folder / "dense");
    const safetensors_file low = safetensors_file::read(folder / "low");
    CHECK(low.metadata().at("format") == "pt");
    CHECK(mentions(low.metadata().at("pufferfish.low_rank"), "\"layer1.conv2.weight\":12"));
    CHECK(low.tensor("layer1.conv2.down.weight").shape == std::vector<index_t>{12, 16, 3, 3});
    CHECK(low.tensor("layer1.conv2.up.weight").shape == std::vector<index_t>{24, 12, 1, 1});
    CHECK(low.tensor("layer1.conv2.up.weight").dtype == dtype);
    CHECK(values_of(low, "layer1.conv2.up.bias") == values_of(dense, "layer1.conv2.bias"));
    CHECK(!low.contains("layer1.conv2.weight"));
    CHECK(!low.contains("layer1.conv2.bias"));
    CHECK(low.tensor("layer2.down.weight").shape == std::vector<index_t>{16, 32});
    CHECK(low.tensor("layer2.up.weight").shape == std::vector<index_t>{40, 16});
    CHECK(low.tensor("rnn.weight_ih_l0.down").shape == std::vector<index_t>{4 * 10, 36});
    CHECK(low.tensor("rnn.weight_ih_l0.up").shape == std::vector<index_t>{4 * 20, 10});
    CHECK(low.contains("rnn.weight_hh_l0"));  // half its rank is no gain
    CHECK(values_of(low, "conv1.weight") == values_of(dense, "conv1.weight"));
    CHECK(values_of(low, "fc.bias") == values_of(dense, "fc.bias"));
    CHECK(low.tensor("layer1.bn.num_batches_tracked").dtype == tensor_dtype::i64);
    index_t after = 0;
    for (const std::string& name : low.tensor_names()) {
      if (detail::is_floating(low.tensor(name).dtype)) after += low.tensor(name).count();
    }
    CHECK(report.parameters_after == after);
    CHECK(report.parameters_after < report.parameters_before);

    const weight_report merged = merge_weights(folder / "low", folder / "again", 2);
    CHECK(merged.parameters_before == report.parameters_after);
    CHECK(merged.parameters_after == report.parameters_before);
    const safetensors_file again = safetensors_file::read(folder / "again");
    CHECK(again.metadata() == dense.metadata());
    CHECK(again.tensor_names().size() == dense.tensor_names().size());
    const double rounding = dtype == tensor_dtype::bf16 ? 4e-3 : dtype == tensor_dtype::f16 ? 1e-3 : 1e-6;
    for (const std::string& name : dense.tensor_names()) {
      CAPTURE(name);
      CHECK(again.tensor(name).shape == dense.tensor(name).shape);
      CHECK(again.tensor(name).dtype == dense.tensor(name).dtype);
      if (!detail::is_floating(dense.tensor(name).dtype)) continue;
      const weight_result& r = result_of(report, name);
      const double error = distance(values_of(dense, name), values_of(again, name));
      CHECK(error == doctest::Approx(r.relative_error).epsilon(0.01).scale(rounding));
      if (r.factorized)
        CHECK(r.relative_error == doctest::Approx(std::sqrt(1.0 - r.kept_energy)).epsilon(0.02));
    }
    // What another program has saved since has no metadata of ours: names and shapes tell.
    std::vector<tensor_entry> entries;
    for (const std::string& name : low.tensor_names()) {
      const tensor_info& info = low.tensor(name);
      entries.push_back({name, info.dtype, info.shape, info.bytes});
    }
    write_safetensors(folder / "plain", entries, {{"format", "pt"}});
    merge_weights(folder / "plain", folder / "again2");
    const safetensors_file plain = safetensors_file::read(folder / "again2");
    CHECK(plain.tensor_names().size() == again.tensor_names().size());
    for (const std::string& name : again.tensor_names()) {
      const auto a = again.tensor(name).bytes, b = plain.tensor(name).bytes;
      CHECK(bytes(a.begin(), a.end()) == bytes(b.begin(), b.end()));
    }
  }
}

TEST_CASE("the result does not depend on the number of threads, and a file may replace itself") {
  const scratch_folder folder;
  small_network(tensor_dtype::f32).save(folder / "dense");
  weight_policy policy;
  policy.rank = energy_kept{0.7};
  factorize_weights(folder / "dense", folder / "one", policy);
  for (const int threads : {2, 3, 7}) {
    policy.threads = threads;
    factorize_weights(folder / "dense", folder / "many", policy);
    CHECK(read_file(folder / "many") == read_file(folder / "one"));
  }
  factorize_weights(folder / "dense", folder / "dense", policy);
  CHECK(read_file(folder / "dense") == read_file(folder / "one"));
}

TEST_CASE("energy and budget choose the ranks") {
  const scratch_folder folder;
  weights w(9);
  w.add("a.weight", tensor_dtype::f32, {48, 64}, 3);
  w.add("b.weight", tensor_dtype::f32, {48, 64});
  w.add("b.bias", tensor_dtype::f32, {48});
  w.add("c.weight", tensor_dtype::f32, {48, 64}, 7);
  w.add("lstm.weight_ih_l0", tensor_dtype::f32, {4 * 32, 64}, 5);
  w.add("lstm.weight_hh_l0", tensor_dtype::f32, {4 * 32, 32}, 2);
  w.save(folder / "dense");
  weight_policy policy = everywhere();
  policy.rank = energy_kept{0.999999};
  weight_report report = factorize_weights(folder / "dense", folder / "low", policy);
  CHECK(result_of(report, "a.weight").rank == 3);
  CHECK(result_of(report, "c.weight").rank == 7);
  CHECK(result_of(report, "lstm.weight_ih_l0").rank == 5);
  CHECK(result_of(report, "lstm.weight_hh_l0").rank == 2);
  CHECK(result_of(report, "b.weight").reason == "factors would not be smaller");
  CHECK(!result_of(report, "b.weight").factorized);
  // Its bias stays with it, though the plan could not know.
  CHECK(safetensors_file::read(folder / "low").contains("b.bias"));

  policy.rank = rank_ratio{0.25};
  const index_t dense = report.parameters_before;
  for (const index_t budget : {dense * 3 / 5, dense / 2, dense / 3}) {
    CAPTURE(budget);
    policy.budget = budget;
    report = factorize_weights(folder / "dense", folder / "low", policy);
    CHECK(report.parameters_after <= budget);
    CHECK(report.parameters_after > budget * 9 / 10 - dense / 4);
    CHECK(result_of(report, "a.weight").kept_energy > 0.999999);
    CHECK(result_of(report, "c.weight").kept_energy > 0.999999);
  }
  policy.budget = 100;
  std::string refusal;
  try {
    factorize_weights(folder / "dense", folder / "low", policy);
  } catch (const value_error& e) {
    refusal = e.what();
  }
  const std::string wanted = "the smallest possible budget is ";
  REQUIRE(mentions(refusal, "dense: a budget of 100 parameters is too small: tensors that stay have "));
  REQUIRE(mentions(refusal, wanted));
  CHECK(list(folder.path()).size() == 2);
  policy.budget = std::stoll(refusal.substr(refusal.find(wanted) + wanted.size()));
  CHECK(factorize_weights(folder / "dense", folder / "low", policy).parameters_after == policy.budget);
  --policy.budget;
  CHECK_THROWS_AS(factorize_weights(folder / "dense", folder / "low", policy), value_error);
}

namespace {

/// up[row] . down[column], with both given row by row: the plain form of a product of factors.
double row_product(const std::vector<double>& a, index_t a_row, const std::vector<double>& b, index_t b_row,
                   index_t length) {
  double sum = 0.0;
  for (index_t k = 0; k < length; ++k) {
    sum += a[static_cast<std::size_t>(a_row * length + k)] * b[static_cast<std::size_t>(b_row * length + k)];
  }
  return sum;
}

/// The dense weight of stacked factors, down [parts rank][cols] and up [parts rows][rank], number by number.
std::vector<double> stacked_product(const std::vector<double>& down, const std::vector<double>& up,
                                    index_t parts, index_t rows, index_t cols, index_t rank) {
  std::vector<double> dense;
  for (index_t i = 0; i < parts * rows; ++i) {
    for (index_t j = 0; j < cols; ++j) {
      double sum = 0.0;
      for (index_t k = 0; k < rank; ++k) {
        sum += up[static_cast<std::size_t>(i * rank + k)] *
               down[static_cast<std::size_t>(((i / rows) * rank + k) * cols + j)];
      }
      dense.push_back(sum);
    }
  }
  return dense;
}

/// Copies a file without its metadata, as another program would save it.
void save_without_metadata(const std::string& from, const std::string& to) {
  const safetensors_file file = safetensors_file::read(from);
  std::vector<tensor_entry> entries;
  for (const std::string& name : file.tensor_names()) {
    const tensor_info& info = file.tensor(name);
    entries.push_back({name, info.dtype, info.shape, info.bytes});
  }
  write_safetensors(to, entries, {{"format", "pt"}});
}

/// Names in a file are in the order of writing, which the size of elements and the work decide.
std::vector<std::string> sorted_names(const std::string& path) {
  std::vector<std::string> names = safetensors_file::read(path).tensor_names();
  std::sort(names.begin(), names.end());
  return names;
}

void check_same_tensors(const std::string& a, const std::string& b) {
  const safetensors_file one = safetensors_file::read(a), other = safetensors_file::read(b);
  CHECK(one.tensor_names() == other.tensor_names());
  for (const std::string& name : one.tensor_names()) {
    CAPTURE(name);
    REQUIRE(other.contains(name));
    CHECK(one.tensor(name).shape == other.tensor(name).shape);
    const auto p = one.tensor(name).bytes, q = other.tensor(name).bytes;
    CHECK(bytes(p.begin(), p.end()) == bytes(q.begin(), q.end()));
  }
}

}  // namespace

TEST_CASE("grouped convolutions: a matrix per group, there and back") {
  const scratch_folder folder;
  std::mt19937 random(11);
  const auto draw = [&](index_t least, index_t most) {
    return std::uniform_int_distribution<index_t>(least, most)(random);
  };
  for (const tensor_dtype dtype :
       {tensor_dtype::f32, tensor_dtype::f64, tensor_dtype::f16, tensor_dtype::bf16}) {
    for (int trial = 0; trial < 4; ++trial) {
      const index_t groups = draw(2, 5), rows = draw(9, 14), in = draw(6, 9), height = draw(1, 3),
                    width = draw(2, 3), rank = draw(1, 3), out = groups * rows, cols = in * height * width;
      CAPTURE(to_string(dtype));
      CAPTURE(groups);
      CAPTURE(rows);
      CAPTURE(cols);
      CAPTURE(rank);
      weights w(static_cast<unsigned>(trial));
      w.add("conv.weight", dtype, {out, in, height, width});
      w.add("conv.bias", dtype, {out});
      w.save(folder / "dense");
      weight_policy policy = everywhere();
      policy.rank = fixed_rank{rank};
      policy.groups = [groups](const std::string&) { return groups; };
      const weight_report report = factorize_weights(folder / "dense", folder / "low", policy);
      const weight_result& result = result_of(report, "conv.weight");
      REQUIRE(result.factorized);
      CHECK(result.parts == groups);
      CHECK(result.parameters_after == groups * rank * (rows + cols));
      const safetensors_file dense = safetensors_file::read(folder / "dense");
      const safetensors_file low = safetensors_file::read(folder / "low");
      CHECK(low.tensor("conv.down.weight").shape == std::vector<index_t>{groups * rank, in, height, width});
      CHECK(low.tensor("conv.up.weight").shape == std::vector<index_t>{out, rank, 1, 1});
      CHECK(low.contains("conv.up.bias"));
      CHECK(low.metadata().at("pufferfish.low_rank.parts") ==
            "{\"conv.weight\":" + std::to_string(groups) + "}");
      // Every group's factors are the best of its own matrix, whatever the other groups are.
      const std::vector<double> down = values_of(low, "conv.down.weight"),
                                up = values_of(low, "conv.up.weight"),
                                whole = values_of(dense, "conv.weight");
      const std::vector<double> product = stacked_product(down, up, groups, rows, cols, rank);
      CHECK(distance(whole, product) == doctest::Approx(result.relative_error).epsilon(1e-5));
      double kept = 0.0;
      for (index_t g = 0; g < groups; ++g) {
        tensor<double, 2> matrix({rows, cols});
        std::copy_n(whole.begin() + g * rows * cols, rows * cols, matrix.data());
        const factors<double> alone = factorize_matrix<double>(matrix.view(), fixed_rank{rank}, {});
        kept += alone.report.squared_norm - alone.report.truncation_error * alone.report.truncation_error;
      }
      double norm2 = 0.0;
      for (const double value : whole) norm2 += value * value;
      CHECK(result.kept_energy == doctest::Approx(kept / norm2).epsilon(1e-5));

      merge_weights(folder / "low", folder / "again");
      const safetensors_file again = safetensors_file::read(folder / "again");
      CHECK(again.metadata() == dense.metadata());
      CHECK(again.tensor("conv.weight").shape == dense.tensor("conv.weight").shape);
      const double rounding = dtype == tensor_dtype::bf16 ? 4e-3 : dtype == tensor_dtype::f16 ? 1e-3 : 1e-6;
      CHECK(distance(product, values_of(again, "conv.weight")) < rounding);
      CHECK(values_of(again, "conv.bias") == values_of(dense, "conv.bias"));
      save_without_metadata(folder / "low", folder / "plain");
      merge_weights(folder / "plain", folder / "again2");
      check_same_tensors(folder / "again", folder / "again2");
    }
  }
}

TEST_CASE("embeddings: W = down up^T, there and back") {
  const scratch_folder folder;
  for (const tensor_dtype dtype :
       {tensor_dtype::f32, tensor_dtype::f64, tensor_dtype::f16, tensor_dtype::bf16}) {
    for (const index_t vocabulary : {index_t{300}, index_t{37}, index_t{20}}) {  // the last: wider than high
      constexpr index_t width = 31, rank = 5;
      CAPTURE(to_string(dtype));
      CAPTURE(vocabulary);
      weights w(static_cast<unsigned>(vocabulary));
      w.add("table.weight", dtype, {vocabulary, width});
      w.add("wte.weight", dtype, {vocabulary, width}, rank);
      w.add("lm_head.weight", dtype, {vocabulary, width});
      w.save(folder / "dense");
      weight_policy policy = everywhere();
      policy.rank = fixed_rank{4};
      policy.embedding_rank = fixed_rank{rank};
      policy.embeddings_dense = false;
      policy.embedding = [](const std::string& name) { return name == "table.weight"; };
      policy.threads = 2;
      const weight_report report = factorize_weights(folder / "dense", folder / "low", policy);
      const safetensors_file dense = safetensors_file::read(folder / "dense");
      const safetensors_file low = safetensors_file::read(folder / "low");
      CHECK(low.metadata().at("pufferfish.low_rank") ==
            "{\"lm_head.weight\":4,\"table.weight\":5,\"wte.weight\":5}");
      CHECK(low.metadata().at("pufferfish.low_rank.embeddings") == "{\"table.weight\":5,\"wte.weight\":5}");
      CHECK(low.metadata().count("pufferfish.low_rank.parts") == 0);
      CHECK(low.tensor("lm_head.down.weight").shape == std::vector<index_t>{4, width});
      CHECK(low.tensor("lm_head.up.weight").shape == std::vector<index_t>{vocabulary, 4});
      merge_weights(folder / "low", folder / "again");
      const safetensors_file again = safetensors_file::read(folder / "again");
      const double rounding = dtype == tensor_dtype::bf16 ? 4e-3 : dtype == tensor_dtype::f16 ? 1e-3 : 1e-6;
      for (const char* stem : {"table", "wte"}) {
        CAPTURE(stem);
        const std::string name = std::string(stem) + ".weight";
        const weight_result& result = result_of(report, name);
        CHECK(result.embedding);
        CHECK(result.parameters_after == rank * (vocabulary + width));
        const std::string down = std::string(stem) + ".down.weight", up = std::string(stem) + ".up.weight";
        CHECK(low.tensor(down).shape == std::vector<index_t>{vocabulary, rank});
        CHECK(low.tensor(up).shape == std::vector<index_t>{width, rank});
        const std::vector<double> thin = values_of(low, down), wide = values_of(low, up);
        std::vector<double> product;
        for (index_t i = 0; i < vocabulary; ++i) {
          for (index_t j = 0; j < width; ++j) product.push_back(row_product(thin, i, wide, j, rank));
        }
        const double error = distance(values_of(dense, name), product);
        CHECK(error == doctest::Approx(result.relative_error).epsilon(1e-4).scale(rounding));
        if (name == "wte.weight") CHECK(error < 4.0 * rounding);  // its rank is 5
        if (name == "table.weight") CHECK(error > 0.3);
        CHECK(again.tensor(name).shape == std::vector<index_t>{vocabulary, width});
        CHECK(distance(product, values_of(again, name)) < rounding);
      }
      // Without metadata, shapes tell tables from matrices.
      save_without_metadata(folder / "low", folder / "plain");
      merge_weights(folder / "plain", folder / "again2");
      check_same_tensors(folder / "again", folder / "again2");
    }
  }
}

TEST_CASE("embeddings and groups share a budget with other weights") {
  const scratch_folder folder;
  weights w(23);
  w.add("wte.weight", tensor_dtype::f32, {400, 40}, 6);
  w.add("conv.weight", tensor_dtype::f32, {48, 12, 3, 3});
  w.add("fc.weight", tensor_dtype::f32, {64, 64}, 9);
  w.save(folder / "dense");
  weight_policy policy = everywhere();
  policy.embeddings_dense = false;
  policy.groups = [](const std::string& name) { return index_t{name == "conv.weight" ? 4 : 1}; };
  policy.budget = 6 * 440 + 9 * 128 + 5 * 4 * (12 + 108);
  const weight_report report = factorize_weights(folder / "dense", folder / "low", policy);
  CHECK(report.parameters_after <= policy.budget);
  CHECK(result_of(report, "wte.weight").rank == 6);
  CHECK(result_of(report, "fc.weight").rank >= 9);
  CHECK(result_of(report, "conv.weight").rank >= 4);
  merge_weights(folder / "low", folder / "again");
  CHECK(safetensors_file::read(folder / "again").tensor("conv.weight").shape ==
        std::vector<index_t>{48, 12, 3, 3});
}

TEST_CASE("packed projections: three matrices of one rank, there and back") {
  const scratch_folder folder;
  weights w(7);
  w.add("attn.in_proj_weight", tensor_dtype::f32, {3 * 24, 24});
  w.add("attn.in_proj_bias", tensor_dtype::f32, {3 * 24});
  w.add("attn.out_proj.weight", tensor_dtype::f32, {24, 24});
  w.add("attn.out_proj.bias", tensor_dtype::f32, {24});
  w.save(folder / "dense");
  weight_policy policy = everywhere();
  factorize_weights(folder / "dense", folder / "low", policy);
  CHECK(safetensors_file::read(folder / "low").contains("attn.in_proj_weight"));
  policy.projections_dense = false;
  const weight_report report = factorize_weights(folder / "dense", folder / "low", policy);
  const weight_result& result = result_of(report, "attn.in_proj_weight");
  REQUIRE(result.factorized);
  CHECK(result.parts == 3);
  const safetensors_file dense = safetensors_file::read(folder / "dense");
  const safetensors_file low = safetensors_file::read(folder / "low");
  CHECK(low.tensor("attn.in_proj_weight.down").shape == std::vector<index_t>{3 * 6, 24});
  CHECK(low.tensor("attn.in_proj_weight.up").shape == std::vector<index_t>{3 * 24, 6});
  CHECK(values_of(low, "attn.in_proj_bias") == values_of(dense, "attn.in_proj_bias"));
  CHECK(low.contains("attn.out_proj.up.bias"));
  const std::vector<double> product = stacked_product(values_of(low, "attn.in_proj_weight.down"),
                                                      values_of(low, "attn.in_proj_weight.up"), 3, 24, 24, 6);
  CHECK(distance(values_of(dense, "attn.in_proj_weight"), product) ==
        doctest::Approx(result.relative_error).epsilon(1e-5));
  merge_weights(folder / "low", folder / "again");
  const safetensors_file again = safetensors_file::read(folder / "again");
  CHECK(sorted_names(folder / "again") == sorted_names(folder / "dense"));
  CHECK(again.metadata() == dense.metadata());
  CHECK(distance(product, values_of(again, "attn.in_proj_weight")) < 1e-6);
  save_without_metadata(folder / "low", folder / "plain");
  merge_weights(folder / "plain", folder / "again2");
  check_same_tensors(folder / "again", folder / "again2");
}

TEST_CASE("factorize, merge: the digest of a checkpoint's numbers is not copied to a file of other numbers") {
  const scratch_folder folder;
  weights w(3);
  w.add("a.weight", tensor_dtype::f32, {40, 32});
  w.add("b.weight", tensor_dtype::f32, {40, 32});
  const safetensors_metadata metadata{{"fact", "kept"}, {"pufferfish.digest", "0x0123456789abcdef"}};
  write_safetensors(folder / "dense", w.entries(), metadata);
  weight_policy policy;
  policy.rank = rank_ratio{0.25};
  factorize_weights(folder / "dense", folder / "low", policy);
  const safetensors_file low = safetensors_file::read(folder / "low");
  CHECK(low.metadata().count("pufferfish.low_rank") == 1);
  CHECK(low.metadata().count("fact") == 1);
  CHECK(low.metadata().count("pufferfish.digest") == 0);
  weights factors(4);
  factors.add("a.down.weight", tensor_dtype::f32, {4, 32});
  factors.add("a.up.weight", tensor_dtype::f32, {40, 4});
  write_safetensors(folder / "factors", factors.entries(), metadata);
  merge_weights(folder / "factors", folder / "merged");
  const safetensors_file merged = safetensors_file::read(folder / "merged");
  CHECK(merged.contains("a.weight"));
  CHECK(merged.metadata() == safetensors_metadata{{"fact", "kept"}});
}

TEST_CASE("merge: metadata decide, and must be those of the factors") {
  const scratch_folder folder;
  weights w(3);
  w.add("conv.down.weight", tensor_dtype::f32, {4 * 2, 6, 3, 3});
  w.add("conv.up.weight", tensor_dtype::f32, {4 * 10, 2, 1, 1});
  w.add("wte.down.weight", tensor_dtype::f32, {50, 4});
  w.add("wte.up.weight", tensor_dtype::f32, {20, 4});
  const auto save = [&](const std::string& ranks, const std::string& parts, const std::string& embeddings) {
    safetensors_metadata metadata{{"pufferfish.low_rank", ranks}};
    if (!parts.empty()) metadata["pufferfish.low_rank.parts"] = parts;
    if (!embeddings.empty()) metadata["pufferfish.low_rank.embeddings"] = embeddings;
    write_safetensors(folder / "low", w.entries(), metadata);
  };
  const auto error = [&](const std::string& ranks, const std::string& parts, const std::string& embeddings) {
    save(ranks, parts, embeddings);
    return io_error_of([&] { merge_weights(folder / "low", folder / "again"); });
  };
  const std::string both = R"({"conv.weight":2,"wte.weight":4})";
  save(both, R"({"conv.weight":4})", R"({"wte.weight":4})");
  merge_weights(folder / "low", folder / "again");
  safetensors_file again = safetensors_file::read(folder / "again");
  CHECK(again.metadata().empty());
  CHECK(again.tensor("conv.weight").shape == std::vector<index_t>{40, 6, 3, 3});
  CHECK(again.tensor("wte.weight").shape == std::vector<index_t>{50, 20});
  // Only what is listed is merged; without `parts`, the shapes tell the groups.
  save(R"({"conv.weight":2})", "", "");
  merge_weights(folder / "low", folder / "again");
  again = safetensors_file::read(folder / "again");
  CHECK(again.contains("conv.weight"));
  CHECK(again.contains("wte.down.weight"));

  CHECK(mentions(error(both, "", ""), "'wte.weight' should have factors of rank 4"));
  CHECK(mentions(error(both, "", R"({"wte.weight":5})"), "'wte.weight' has 5; pufferfish.low_rank has 4"));
  CHECK(mentions(error(both, "", R"({"x":5})"), "'x' has 5; pufferfish.low_rank has no such name"));
  CHECK(mentions(error(both, R"({"x":5})", ""), "'x' has 5; pufferfish.low_rank has no such name"));
  CHECK(mentions(error(both, R"({"conv.weight":0})", ""), "at least one matrix"));
  CHECK(mentions(error(both, R"({"wte.weight":2})", R"({"wte.weight":4})"), "a table is one matrix"));
  CHECK(mentions(error(R"({"conv.weight":2})", R"({"conv.weight":2})", ""),
                 "'conv.weight' should have factors of 2 matrices of rank 2"));
  CHECK(mentions(error(both, "[]", ""), "pufferfish.low_rank.parts"));
  CHECK(mentions(error(R"({"conv.weight":2})", "", R"({"conv.weight":2})"), "of an embedding of rank 2"));

  // Pairs by shapes alone: not where the factors are larger than the weight, or a table would have a bias.
  weights odd(5);
  odd.add("a.down.weight", tensor_dtype::f32, {12, 2, 1, 1});
  odd.add("a.up.weight", tensor_dtype::f32, {12, 3, 1, 1});
  odd.add("b.down.weight", tensor_dtype::f32, {50, 4});
  odd.add("b.up.weight", tensor_dtype::f32, {20, 4});
  odd.add("b.up.bias", tensor_dtype::f32, {20});
  odd.add("c.down.weight", tensor_dtype::f32, {6, 5});
  odd.add("c.up.weight", tensor_dtype::f32, {7, 5});
  odd.add("d.down.weight", tensor_dtype::f32, {0, 5});
  odd.add("d.up.weight", tensor_dtype::f32, {7, 0});
  odd.add("e.in_proj_weight.down", tensor_dtype::f32, {8, 16});
  odd.add("e.in_proj_weight.up", tensor_dtype::f32, {32, 2});
  odd.save(folder / "odd");
  merge_weights(folder / "odd", folder / "same");
  check_same_tensors(folder / "odd", folder / "same");
}

TEST_CASE("merge: two layers of a host that are called down and up, with biases, are no factors") {
  const scratch_folder folder;
  weights w(3);
  w.add("adapter.down.weight", tensor_dtype::f32, {4, 16});
  w.add("adapter.down.bias", tensor_dtype::f32, {4});
  w.add("adapter.up.weight", tensor_dtype::f32, {16, 4});
  w.add("adapter.up.bias", tensor_dtype::f32, {16});
  write_safetensors(folder / "host", w.entries(), {});
  merge_weights(folder / "host", folder / "again");
  const safetensors_file again = safetensors_file::read(folder / "again");
  CHECK(again.tensor("adapter.down.bias").shape == std::vector<index_t>{4});
  CHECK(again.tensor("adapter.down.weight").shape == std::vector<index_t>{4, 16});
  CHECK(again.tensor("adapter.up.weight").shape == std::vector<index_t>{16, 4});
}

TEST_CASE("factors are added to those that a file has already") {
  const scratch_folder folder;
  weights w(29);
  w.add("conv.weight", tensor_dtype::f32, {48, 12, 3, 3});
  w.add("wte.weight", tensor_dtype::f32, {200, 40});
  w.add("fc.weight", tensor_dtype::f32, {64, 64});
  w.save(folder / "dense");
  weight_policy policy = everywhere();
  policy.groups = [](const std::string& name) { return index_t{name == "conv.weight" ? 4 : 1}; };
  policy.exclude = [](const std::string& name) { return name == "fc.weight"; };
  factorize_weights(folder / "dense", folder / "low", policy);
  policy.exclude = {};
  policy.embeddings_dense = false;
  factorize_weights(folder / "low", folder / "low", policy);
  const safetensors_file low = safetensors_file::read(folder / "low");
  CHECK(low.metadata().at("pufferfish.low_rank") == R"({"conv.weight":3,"fc.weight":16,"wte.weight":10})");
  CHECK(low.metadata().at("pufferfish.low_rank.parts") == R"({"conv.weight":4})");
  merge_weights(folder / "low", folder / "again");
  CHECK(sorted_names(folder / "again") == sorted_names(folder / "dense"));
}

TEST_CASE("docs: weight files") {
  const scratch_folder folder;
  const std::string in = folder / "in", out = folder / "out", back = folder / "back";
  small_network(tensor_dtype::f32).save(in);
  // [library]
  weight_policy policy;            // the first and the last layer stay dense
  policy.rank = energy_kept{0.8};  // or rank_ratio{0.25}; or policy.budget = 10'000'000;
  policy.exclude = [](const std::string& name) { return name.find("downsample") != name.npos; };
  policy.threads = 2;  // does not change the result
  const weight_report report = factorize_weights(in, out, policy);
  merge_weights(out, back);
  // [library]
  CHECK(result_of(report, "layer2.weight").kept_energy >= 0.8);
  CHECK(safetensors_file::read(back).tensor_names().size() == report.tensors.size());
}

TEST_CASE("files that cannot be factorized or merged") {
  const scratch_folder folder;
  weights w(1);
  w.add("a.weight", tensor_dtype::f32, {32, 32});
  std::vector<tensor_entry> entries = w.entries();
  bytes broken(entries[0].bytes.begin(), entries[0].bytes.end());
  std::fill_n(broken.begin() + 4, 4, std::uint8_t{0xff});
  entries[0].bytes = broken;
  write_safetensors(folder / "nan", entries);
  try {
    factorize_weights(folder / "nan", folder / "low", everywhere());
    FAIL("a NaN was factorized");
  } catch (const value_error& e) {
    CHECK(mentions(e.what(), "a.weight"));
    CHECK(mentions(e.what(), "not a number"));
  }
  weight_policy policy = everywhere();
  policy.budget = 1000;
  CHECK_THROWS_AS(factorize_weights(folder / "nan", folder / "low", policy), value_error);
  CHECK(
      mentions(io_error_of([&] { factorize_weights(folder / "none", folder / "low", {}); }), "No such file"));
  CHECK(list(folder.path()) == std::vector<std::string>{"nan"});

  // An archive of arrays, by its first local header.
  const std::string archive =
      "PK\x03\x04" + std::string(22, '\0') + "\x0c" + std::string(3, '\0') + "a.weight.npy";
  write_file_atomically(folder / "dense.npz", to_bytes(archive));
  const std::string converts =
      "numpy.load(FILE).items()}, \"FILE.safetensors\") converts it (docs/weight_files.md)";
  CHECK(mentions(io_error_of([&] { factorize_weights(folder / "dense.npz", folder / "low", everywhere()); }),
                 converts));
  CHECK(mentions(io_error_of([&] { merge_weights(folder / "dense.npz", folder / "low"); }), converts));
  CHECK(!std::filesystem::exists(folder / "low"));

  // Metadata that promises factors which are not there, or of another rank.
  w.save(folder / "dense");
  for (const char* text : {"{\"a.weight\":4}", "{\"b\":1}", "[]", "{\"a.weight\":-1}", "x"}) {
    CAPTURE(text);
    write_safetensors(folder / "bad", w.entries(), {{"pufferfish.low_rank", text}});
    CHECK(mentions(io_error_of([&] { merge_weights(folder / "bad", folder / "low"); }), folder / "bad"));
  }
  weights pair(2);
  pair.add("a.down.weight", tensor_dtype::f32, {4, 8});
  pair.add("a.up.weight", tensor_dtype::f32, {8, 5});
  pair.add("u.down.weight", tensor_dtype::f32, {4, 8});
  pair.save(folder / "unlike");
  merge_weights(folder / "unlike", folder / "same");  // no pairs: copied
  CHECK(read_file(folder / "same").size() >= read_file(folder / "unlike").size());
  CHECK(safetensors_file::read(folder / "same").contains("a.up.weight"));
  // A pair whose dense name is taken.
  pair = weights(3);
  pair.add("a.down.weight", tensor_dtype::f32, {4, 8});
  pair.add("a.up.weight", tensor_dtype::f32, {8, 4});
  pair.add("a.weight", tensor_dtype::f32, {8, 8});
  pair.save(folder / "taken");
  CHECK(
      mentions(io_error_of([&] { merge_weights(folder / "taken", folder / "low"); }), "'a.weight' is taken"));
}
