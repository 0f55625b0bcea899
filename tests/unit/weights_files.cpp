// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "io_support.hpp"

#include <algorithm>
#include <cmath>
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

template <class File>
std::vector<double> values_of(const File& file, const std::string& name) {
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
  for (const index_t budget : {dense, dense / 2, dense / 3}) {
    CAPTURE(budget);
    policy.budget = budget;
    report = factorize_weights(folder / "dense", folder / "low", policy);
    CHECK(report.parameters_after <= budget);
    CHECK(report.parameters_after > budget * 9 / 10 - dense / 4);
    CHECK(result_of(report, "a.weight").rank >= 3);
    CHECK(result_of(report, "c.weight").rank >= 7);
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

TEST_CASE("npz in and out") {
  const scratch_folder folder;
  const weights network = small_network(tensor_dtype::f32);
  network.save(folder / "dense");
  write_npz(folder / "dense.npz", network.entries(), {true});
  weight_policy policy;
  policy.rank = rank_ratio{0.5};
  factorize_weights(folder / "dense", folder / "low", policy);
  factorize_weights(folder / "dense.npz", folder / "low.npz", policy);
  const safetensors_file one = safetensors_file::read(folder / "low");
  const npz_file other = npz_file::read(folder / "low.npz");
  CHECK(other.tensor_names().size() == one.tensor_names().size());
  for (const std::string& name : one.tensor_names()) {
    CAPTURE(name);
    const auto a = one.tensor(name).bytes, b = other.tensor(name).bytes;
    CHECK(bytes(a.begin(), a.end()) == bytes(b.begin(), b.end()));
  }
  merge_weights(folder / "low.npz", folder / "again.npz");
  CHECK(npz_file::read(folder / "again.npz").tensor("layer1.conv2.weight").shape ==
        std::vector<index_t>{24, 16, 3, 3});
  small_network(tensor_dtype::bf16).save(folder / "brain");
  CHECK(mentions(io_error_of([&] { factorize_weights(folder / "brain", folder / "brain.npz", policy); }),
                 "NumPy has no dtype for BF16"));
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
