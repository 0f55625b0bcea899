// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// factorize_onnx: which nodes become pairs, what stays as it is, external data, and models that are refused.
#include <filesystem>
#include <fstream>

#include <pufferfish/nn/merge.hpp>

#include "../support/fold_checks.hpp"
#include "../support/onnx_runtime.hpp"

namespace {

using namespace test;
using detail::onnx_model_of;
using ints = std::vector<std::int64_t>;

/// `parts` products of random matrices of this rank, one below the other: [rows][cols] each.
std::vector<float> low_rank_values(index_t rows, index_t cols, index_t rank, std::uint64_t seed,
                                   index_t parts = 1) {
  std::vector<float> all;
  for (index_t p = 0; p < parts; ++p) {
    tensor<float, 2> up({rows, rank}), down({rank, cols});
    fill_normal<float>(up.flat(), 0.5, {seed, static_cast<std::uint64_t>(2 * p)});
    fill_normal<float>(down.flat(), 0.5, {seed, static_cast<std::uint64_t>(2 * p + 1)});
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < cols; ++j) {
        float sum = 0.0F;
        for (index_t k = 0; k < rank; ++k) sum += up(i, k) * down(k, j);
        all.push_back(sum);
      }
    }
  }
  return all;
}

onnx_attribute integer(const char* name, std::int64_t value) { return {name, value}; }

/// One layer of each role, with weights of ranks 2, 3, 4, 2, 3, 2, 2, 3.
onnx::ModelProto every_role() {
  onnx_graph<float> g;
  const auto weight = [&](const std::string& name, const std::vector<index_t>& shape, index_t rows,
                          index_t cols, index_t rank, index_t parts = 1) {
    return g.constant(name, shape,
                      low_rank_values(rows, cols, rank, static_cast<std::uint64_t>(rank), parts));
  };
  const auto vector = [&](const std::string& name, index_t size) {
    return g.constant(name, {size}, low_rank_values(size, 1, 1, 9));
  };
  const auto shaped = [&](const std::string& x, const ints& shape) {
    return g.node("Reshape", "reshape",
                  {x, g.constant("shape", {static_cast<index_t>(shape.size())}, shape)});
  };
  g.input("x", onnx::TensorProto::FLOAT, {std::string("batch"), 12});
  std::string x = g.node("MatMul", "product", {"x", weight("product.weight", {12, 40}, 12, 40, 2)});
  x = g.node("Gemm", "scaled", {x, weight("scaled.weight", {40, 30}, 40, 30, 3), vector("scaled.bias", 30)},
             {{"alpha", 0.5F}, {"beta", 2.0F}});
  x = g.node("Gemm", "gemm", {x, weight("gemm.weight", {24, 30}, 24, 30, 4), vector("gemm.bias", 24)},
             {integer("transB", 1)});
  x = g.node("Transpose", "turn", {x});
  x = g.node("MatMul", "applied", {weight("applied", {24, 24}, 24, 24, 2), x});
  x = shaped(g.node("Transpose", "turn", {x}), {0, 4, 6});
  x = g.node("Conv", "line", {x, weight("line.weight", {16, 4, 3}, 16, 12, 3), vector("line.bias", 16)},
             {{"pads", ints{1, 1}}});
  x = shaped(x, {0, 16, 3, 2});
  x = g.node("Conv", "grouped", {x, weight("grouped.weight", {24, 8, 3, 2}, 12, 48, 2, 2)},
             {integer("group", 2), {"strides", ints{2, 1}}, {"auto_pad", std::string("SAME_UPPER")}});
  x = g.node("GlobalAveragePool", "pool", {x});
  x = shaped(x, {1, -1, 24});
  x = g.nodes("LSTM", "recurrent",
              {x, weight("recurrent.w", {1, 32, 24}, 32, 24, 2), weight("recurrent.r", {1, 32, 8}, 32, 8, 8)},
              {integer("hidden_size", 8)}, 2)[1];
  x = shaped(x, {-1, 8});
  const std::string shared = weight("shared", {8, 8}, 8, 8, 3);
  x = g.node("MatMul", "first", {g.node("MatMul", "second", {x, shared}), shared});
  g.output("y", x, onnx::TensorProto::FLOAT, {std::string("batch"), 8});
  return onnx_model_of(g, "test");
}

void write(const std::string& path, const onnx::ModelProto& model) {
  write_file_atomically(path, detail::onnx_bytes(model, path));
}

weight_policy every_weight() {
  weight_policy policy;
  policy.rank = energy_kept{1.0 - 1e-9};
  policy.keep_first = 0;
  policy.keep_last = false;
  return policy;
}

/// Adds the model at `path` to the cases, with random inputs x [3][12].
void add_case(runtime_cases& cases, const std::string& name) {
  tensor<float, 2> x({3, 12});
  fill_normal<float>(x.flat(), 1.0, {4, 4});
  cases.add(name, {entry_of("x", x)}, {});
}

/// The largest difference between outputs `y` of two models; 0 without ONNX Runtime.
double difference(const runtime_cases& cases, const std::string& a, const std::string& b) {
  double worst = 0.0;
  std::vector<float> one(24), other(24);
  read_tensor(safetensors_file::read(cases.folder() / (a + ".out.safetensors")), "y", std::span<float>(one));
  read_tensor(safetensors_file::read(cases.folder() / (b + ".out.safetensors")), "y",
              std::span<float>(other));
  for (std::size_t i = 0; i < one.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(one[i]) - static_cast<double>(other[i])));
  return worst;
}

std::set<std::string> files_of(const scratch_folder& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    names.insert(entry.path().filename());
  return names;
}

/// Moves the tensors of at least 64 bytes to a file of external data in the folder of `path`, and writes
/// the model.
void write_external(const std::string& path, onnx::ModelProto model) {
  detail::data_file_writer data(path, {});
  for (auto& tensor : *model.mutable_graph()->mutable_initializer()) {
    if (tensor.raw_data().size() >= 64) data.move(tensor);
  }
  data.commit();
  write(path, model);
}

TEST_CASE("factorize_onnx: every role becomes a pair of nodes, and the outputs stay") {
  runtime_cases cases;
  write(cases.path_of("dense"), every_role());
  write_external(cases.path_of("external"), every_role());
  const onnx_report report = factorize_onnx(cases.path_of("dense"), cases.path_of("low"), every_weight());
  CHECK(report.checked);
  const std::map<std::string, index_t> ranks{
      {"product.weight", 2}, {"scaled.weight", 3},  {"gemm.weight", 4}, {"applied", 2},
      {"line.weight", 3},    {"grouped.weight", 2}, {"recurrent.w", 2}, {"shared", 3}};
  CHECK(report.tensors.size() == ranks.size());
  for (const weight_result& one : report.tensors) {
    CAPTURE(one.name);
    CAPTURE(one.reason);
    CHECK(one.factorized);
    CHECK(one.rank == ranks.at(one.name));
    CHECK(one.parts == (one.name == "grouped.weight" ? 2 : 1));
    CHECK(one.relative_error < 1e-5);
  }
  CHECK(report.parameters_after < report.parameters_before);
  index_t stored = 0;
  const onnx::ModelProto low = detail::read_onnx_model(cases.path_of("low"));
  for (const auto& tensor : low.graph().initializer()) {
    if (tensor.data_type() == onnx::TensorProto::FLOAT)
      stored += static_cast<index_t>(tensor.raw_data().size() / 4);
  }
  CHECK(stored == report.parameters_after);
  CHECK(low.graph().node_size() == every_role().graph().node_size() + 9);

  factorize_onnx(cases.path_of("external"), cases.path_of("external-low"), every_weight());
  CHECK(std::filesystem::exists(cases.folder() / "external-low.onnx.data"));
  for (const char* name : {"dense", "external", "external-low", "low"}) add_case(cases, name);
  if (cases.worst() < 0.0) return;
  CHECK(difference(cases, "dense.0", "external.1") == 0.0);
  CHECK(difference(cases, "dense.0", "low.3") < 1e-5);
  CHECK(difference(cases, "low.3", "external-low.2") == 0.0);
}

TEST_CASE("factorize_onnx: a network whose weights have low rank") {
  runtime_cases cases;
  network<float> net = small_resnet<float>({.width = 16});
  give_values(net);
  factorize(net, {.rank = fixed_rank{4}});
  merge(net);
  cases.add_network("dense", net, {16, 16, 3});
  weight_policy policy;
  policy.rank = fixed_rank{4};
  policy.exclude = [](const std::string& name) { return name.find("shortcut") != name.npos; };
  const onnx_report report = factorize_onnx(cases.path_of("dense"), cases.path_of("dense"), policy);
  std::map<std::string, std::string> reasons;
  for (const weight_result& one : report.tensors) reasons[one.name] = one.factorized ? "" : one.reason;
  CHECK(reasons.at("conv1.weight") == "the first layer");
  CHECK(reasons.at("fc.weight") == "the last layer");
  CHECK(reasons.at("layer2.0.shortcut.0.weight") == "excluded");
  CHECK(reasons.at("layer2.0.conv1.weight") == "");
  CHECK(cases.worst() < 1e-5);
}

TEST_CASE("factorize_onnx: what is not factorized stays byte for byte, with unknown fields") {
  scratch_folder folder;
  onnx::ModelProto model = every_role();
  model.mutable_unknown_fields()->AddLengthDelimited(1000, "from the future");
  auto* const property = model.add_metadata_props();
  property->set_key("who");
  property->set_value("test");
  model.mutable_graph()->mutable_node(1)->set_doc_string("kept");
  write(folder / "in.onnx", model);
  weight_policy policy = every_weight();
  policy.include = [](const std::string& name) { return name == "gemm.weight" || name == "line.weight"; };
  const onnx_report report = factorize_onnx(folder / "in.onnx", folder / "out.onnx", policy);
  const onnx::ModelProto out = detail::read_onnx_model(folder / "out.onnx");
  std::map<std::string, std::string> before, after;
  const auto collect = [](const onnx::ModelProto& from, std::map<std::string, std::string>& to) {
    for (const auto& one : from.graph().node()) to["node " + one.name()] = one.SerializeAsString();
    for (const auto& one : from.graph().initializer()) to["tensor " + one.name()] = one.SerializeAsString();
    onnx::ModelProto rest = from;
    rest.clear_graph();
    to["rest"] = rest.SerializeAsString();
  };
  collect(model, before);
  collect(out, after);
  for (const char* name : {"gemm", "line"}) {
    CHECK(before.erase(std::string("node ") + name) == 1);
    CHECK(before.erase(std::string("tensor ") + name + ".weight") == 1);
    for (const char* side : {".down", ".up"}) {
      CHECK(after.erase(std::string("node ") + name + side) == 1);
      CHECK(after.erase(std::string("tensor ") + name + side + ".weight") == 1);
    }
  }
  CHECK(before == after);
}

TEST_CASE("factorize_onnx: constants of nodes, of version 3, of several uses, and what is left alone") {
  scratch_folder folder;
  onnx_graph<float> g;
  const auto weight = [&](const char* name) {
    return g.constant(name, {16, 16}, low_rank_values(16, 16, 2, 3));
  };
  g.input("x", onnx::TensorProto::FLOAT, {std::string("batch"), 16});
  std::string x = g.node("MatMul", "a", {"x", weight("a")});
  const std::string twice = weight("twice");
  x = g.node("Add", "add", {g.node("MatMul", "b", {x, twice}), g.node("ReduceSum", "sum", {twice})});
  x = g.node("Gemm", "c", {g.node("MatMul", "d", {x, weight("both")}), "both"});
  x = g.node("MatMul", "e", {x, "in_node"});
  g.output("y", x, onnx::TensorProto::FLOAT, {std::string("batch"), 16});
  onnx::GraphProto& graph = g.proto();
  onnx::NodeProto constant;
  constant.set_op_type("Constant");
  constant.add_output("in_node");
  auto& value = *constant.add_attribute();
  value.set_name("value");
  value.set_type(onnx::AttributeProto::TENSOR);
  *value.mutable_t() = graph.initializer(0);
  value.mutable_t()->clear_name();
  *graph.add_node() = constant;
  for (int i = graph.node_size() - 1; i > 0; --i) graph.mutable_node()->SwapElements(i, i - 1);
  onnx::ModelProto model = onnx_model_of(g, "test");
  for (const bool old : {false, true}) {
    CAPTURE(old);
    if (old) {
      model.set_ir_version(3);
      for (const auto& one : model.graph().initializer()) {
        auto& info = *model.mutable_graph()->add_input();
        info.set_name(one.name());
        auto& type = *info.mutable_type()->mutable_tensor_type();
        type.set_elem_type(one.data_type());
        for (const auto extent : one.dims()) type.mutable_shape()->add_dim()->set_dim_value(extent);
      }
    }
    write(folder / "in.onnx", model);
    const onnx_report report = factorize_onnx(folder / "in.onnx", folder / "out.onnx", every_weight());
    std::map<std::string, std::string> reasons;
    for (const weight_result& one : report.tensors) reasons[one.name] = one.factorized ? "" : one.reason;
    CHECK(reasons == std::map<std::string, std::string>{{"a", ""},
                                                        {"twice", "used by other nodes, too"},
                                                        {"both", "used by nodes of several kinds"},
                                                        {"in_node", ""}});
    const onnx::ModelProto out = detail::read_onnx_model(folder / "out.onnx");
    CHECK(out.graph().initializer_size() == 2 + 4);
    CHECK(out.graph().input_size() == (old ? 7 : 1));
    CHECK(out.graph().node_size() == model.graph().node_size() + 2 - 1);
  }
}

TEST_CASE("factorize_onnx: budgets and statistics") {
  scratch_folder folder;
  write(folder / "in.onnx", every_role());
  weight_policy policy = every_weight();
  policy.budget = 3000;
  const onnx_report report = factorize_onnx(folder / "in.onnx", folder / "out.onnx", policy);
  CHECK(report.parameters_after <= 3000);
  CHECK(report.parameters_before > 3000);
  policy.budget = 10;
  CHECK_THROWS_WITH(factorize_onnx(folder / "in.onnx", folder / "out.onnx", policy),
                    doctest::Contains("in.onnx: a budget of 10 parameters is too small"));
  network_statistics statistics;
  layer_statistics& layer = statistics.layers.emplace_back(output_statistics(40, 12));
  layer.name = "product.weight";
  tensor<double, 2> rows({50, 12});
  fill_normal<double>(rows.flat(), 1.0, {8, 8});
  layer.matrices.front().add_inputs(tensor_view<const double, 2>(rows));
  weight_policy measured = every_weight();
  measured.rank = fixed_rank{1};
  measured.statistics = &statistics;
  CHECK_THROWS_WITH_AS(factorize_onnx(folder / "in.onnx", folder / "out.onnx", measured),
                       "factorize_weights: no statistics of 'scaled.weight'; exclude it, or measure it, too",
                       value_error);
  measured.include = [](const std::string& name) { return name == "product.weight"; };
  const onnx_report seen = factorize_onnx(folder / "in.onnx", folder / "out.onnx", measured);
  CHECK(seen.tensors[0].kind == truncation::data_aware);
  CHECK(seen.tensors[0].factorized);
  statistics.layers.front().name = "nothing";
  CHECK_THROWS_AS(factorize_onnx(folder / "in.onnx", folder / "out.onnx", measured), value_error);
}

TEST_CASE("factorize_onnx: models that are refused leave no file") {
  scratch_folder folder;
  const std::string in = folder / "in.onnx", out = folder / "out.onnx";
  const auto refuses = [&](const onnx::ModelProto& model, const std::string& why) {
    CAPTURE(why);
    write(in, model);
    const std::set<std::string> before = files_of(folder);
    CHECK_THROWS_WITH_AS(factorize_onnx(in, out, every_weight()), doctest::Contains(why.c_str()), io_error);
    CHECK(files_of(folder) == before);
  };
  onnx::ModelProto model = every_role();
  model.mutable_graph()->mutable_node()->SwapElements(0, 1);
  refuses(model, "nodes must be in topological order, and a graph has no cycles");
  model = every_role();
  model.mutable_graph()->mutable_node(0)->set_input(0, model.graph().node(1).output(0));
  refuses(model, "node 'product' (MatMul) reads 'scaled.output'");
  model = every_role();
  model.mutable_graph()->mutable_node(1)->set_output(0, model.graph().node(0).output(0));
  refuses(model, "which exists already");
  model = every_role();
  model.mutable_graph()->mutable_node(0)->set_op_type("NoSuchOperator");
  refuses(model, "ONNX's checker: ");
  model = every_role();
  model.mutable_graph()->mutable_initializer(0)->mutable_raw_data()->pop_back();
  refuses(model, "tensor 'product.weight' of shape [12 x 40] has 1919 bytes of elements, not 1920");
  model = every_role();
  model.mutable_graph()->mutable_initializer(0)->set_dims(0, -12);
  refuses(model, "tensor 'product.weight' cannot have shape");
  model = every_role();
  model.mutable_graph()->mutable_initializer(0)->set_dims(0, std::int64_t{1} << 62);
  refuses(model, "tensor 'product.weight' cannot have shape");

  write_external(in, every_role());
  const onnx::ModelProto external = detail::read_onnx_model(in);
  const auto with_location = [&](const std::string& location) {
    onnx::ModelProto changed = external;
    changed.mutable_graph()->mutable_initializer(0)->mutable_external_data(0)->set_value(location);
    return changed;
  };
  refuses(with_location("missing.data"), "external data of tensor 'product.weight': there is no file");
  for (const char* location : {"", "/etc/passwd", "../in.onnx.data", "a/../../b"}) {
    refuses(with_location(location), "is not a file in the folder of the model");
  }
  onnx::ModelProto length = external;
  length.mutable_graph()->mutable_initializer(0)->mutable_external_data(2)->set_value("17");
  refuses(length, "17 bytes, where shape and type need 1920");
  length.mutable_graph()->mutable_initializer(0)->mutable_external_data(2)->set_value("many");
  refuses(length, "'many' is no number");
  std::filesystem::resize_file(folder / "in.onnx.data", 2000);
  refuses(external, "has 2000 bytes; read are");

  const std::vector<std::uint8_t> bytes = detail::onnx_bytes(every_role(), in);
  for (std::size_t size = 0; size < bytes.size(); size += 97) {
    write_file_atomically(in, std::span(bytes).first(size));
    CHECK_THROWS_AS(factorize_onnx(in, out, every_weight()), io_error);
  }
  write_file_atomically(in, std::span(bytes));
  CHECK_THROWS_AS(factorize_onnx(in, folder / "no/out.onnx", every_weight()), io_error);
  CHECK_THROWS_AS(factorize_onnx(folder / "none.onnx", out, every_weight()), io_error);
  CHECK(files_of(folder) == std::set<std::string>{"in.onnx", "in.onnx.data"});
}

TEST_CASE("factorize_onnx: external data are not overwritten while they are read") {
  scratch_folder folder;
  write_external(folder / "in.onnx", every_role());
  CHECK_THROWS_WITH_AS(factorize_onnx(folder / "in.onnx", folder / "in.onnx", every_weight()),
                       doctest::Contains("has external data of the model that is read"), io_error);
  onnx::ModelProto newer = every_role();
  newer.mutable_opset_import(0)->set_version(detail::newest_checked_opset() + 1);
  write(folder / "newer.onnx", newer);
  CHECK_FALSE(factorize_onnx(folder / "newer.onnx", folder / "newer.onnx", every_weight()).checked);
}

TEST_CASE(
    "factorize_onnx: Gemm keeps its third input in old opsets, and nodes that lack inputs are left alone") {
  scratch_folder folder;
  onnx_graph<float> g;
  g.input("x", onnx::TensorProto::FLOAT, {std::string("batch"), 12});
  const std::string weight = g.constant("weight", {12, 40}, low_rank_values(12, 40, 2, 1));
  const std::string bias = g.constant("bias", {40}, low_rank_values(40, 1, 1, 2));
  g.output("y", g.node("Gemm", "gemm", {"x", weight, bias}), onnx::TensorProto::FLOAT,
           {std::string("batch"), 40});
  onnx::ModelProto model = onnx_model_of(g, "test");
  for (const std::int64_t opset : {9, 11}) {
    CAPTURE(opset);
    model.mutable_opset_import(0)->set_version(opset);
    write(folder / "in.onnx", model);
    const onnx_report report = factorize_onnx(folder / "in.onnx", folder / "out.onnx", every_weight());
    CHECK(report.checked);
    const onnx::ModelProto made = detail::read_onnx_model(folder / "out.onnx");
    REQUIRE(made.graph().node_size() == 3);  // the last one names the output
    CHECK(made.graph().node(0).input_size() == (opset < 11 ? 3 : 2));
    CHECK(made.graph().node(1).input(2) == bias);
  }
  model.mutable_opset_import(0)->set_version(detail::newest_checked_opset() + 1);
  for (const char* const op : {"MatMul", "Gemm"}) {
    onnx::NodeProto& node = *model.mutable_graph()->mutable_node(0);
    node.set_op_type(op);
    node.clear_input();
    node.add_input(weight);
    write(folder / "one.onnx", model);
    for (const weight_result& one :
         factorize_onnx(folder / "one.onnx", folder / "kept.onnx", every_weight()).tensors)
      CHECK_FALSE(one.factorized);
  }
}

}  // namespace
