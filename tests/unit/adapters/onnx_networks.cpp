// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Networks as ONNX models and back: against ONNX Runtime where there is one, and by reading the files again.
#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include <pufferfish/models/mlp.hpp>
#include <pufferfish/models/weights.hpp>
#include <pufferfish/nn/merge.hpp>

#include "../support/fold_checks.hpp"
#include "../support/onnx_runtime.hpp"

namespace {

using namespace test;

/// y = x^2, a layer that the library does not know.
struct Square {
  using value_type = float;
  std::string describe() const { return "Square"; }
  extents<4> output_shape(const extents<4>& input) const { return input; }
  template <class Device>
  void forward(context<Device>&, const tensor_view<const float, 4>& x, const tensor_view<float, 4>& y) const {
    for (std::size_t i = 0; i < x.flat().size(); ++i) y.flat()[i] = x.flat()[i] * x.flat()[i];
  }
  template <class Device>
  void backward(context<Device>&, const tensor_view<const float, 4>&, const tensor_view<float, 4>&) const {}
};

}  // namespace

template <>
struct pufferfish::onnx_form<Square> {
  static onnx_value write(onnx_walk<float>& to, const std::string& name, Square&, const onnx_value& x) {
    return to.with(x, to.graph().node("Mul", name, {x.name, x.name}));
  }
};

namespace {

/// The networks of the zoo, narrow.
template <class T>
std::map<std::string, network<T>> narrow_zoo() {
  std::map<std::string, network<T>> all;
  const vgg_options vgg{.classes = 10, .width = 8};
  const imagenet_resnet_options wide{.classes = 11, .width = 8};
  all.emplace("vgg11_bn", vgg11<T>(vgg));
  all.emplace("vgg19_bn", vgg19<T>(vgg));
  all.emplace("vgg19_lth", vgg19_lth<T>(vgg));
  all.emplace("resnet18_cifar", resnet18<T>({.width = 8}));
  all.emplace("resnet18_cifar_stem_bn", resnet18<T>({.stem_norm = true, .width = 8}));
  all.emplace("resnet34", resnet34<T>(wide));
  all.emplace("resnet50", resnet50<T>(wide));
  all.emplace("resnet101", resnet101<T>(wide));
  all.emplace("resnet152", resnet152<T>(wide));
  all.emplace("wide_resnet50_2", wide_resnet50_2<T>(wide));
  return all;
}

TEST_CASE("write_onnx: the networks of the zoo, dense, hybrid, low-rank, merged and folded") {
  runtime_cases cases;
  const extents<3> image{32, 32, 3};
  for (auto& [key, net] : narrow_zoo<float>()) {
    const std::string& name = key;
    CAPTURE(name);
    const zoo_model<float>& model = zoo_model_called<float>(name);
    give_values(net);
    cases.add_network(name + "-dense", net, image);
    network<float> low = net;
    factorize(low, model.lowrank());
    factorize(net, model.hybrid());
    cases.add_network(name + "-hybrid", net, image);
    cases.add_network(name + "-lowrank", low, image);
    if (!name.starts_with("resnet18")) continue;
    fold_batch_norm(low);
    cases.add_network(name + "-folded", low, image);
    merge(net);
    cases.add_network(name + "-merged", net, image);
  }
  network<float> norms = resnet34<float>({.classes = 11, .width = 8, .factor_bn = true});
  give_values(norms);
  cases.add_network("resnet34-factor_bn", norms, image);
  CHECK(cases.worst() < 1e-4);
}

TEST_CASE("write_onnx: every other layer, and columns after a Flatten") {
  runtime_cases cases;
  const auto add = [&](const std::string& name, Sequential<float> layers, const extents<3>& image) {
    CAPTURE(name);
    network<float> net{any_layer<float>(std::move(layers))};
    give_values(net);
    cases.add_network(name, net, image);
  };
  for (const bool low : {false, true}) {
    network<float> vgg = small_vgg<float>({.image = {12, 20}, .width = 4, .hidden = 24});
    network<float> many = mlp<float>({.inputs = 5 * 4 * 3, .hidden = {24}, .classes = 5});
    for (auto* net : {&vgg, &many}) {
      give_values(*net);
      if (low) factorize(*net, {.first_layer = 1, .last_layer_dense = false});
    }
    cases.add_network(low ? "vgg-low" : "vgg", vgg, {12, 20, 3});
    cases.add_network(low ? "mlp-low" : "mlp", many, {5, 4, 3});
  }
  Sequential<float> activations;
  activations.add("gelu", GELU<float>())
      .add("pool", AvgPool<float>(3, 2, 1, false))
      .add("gelu_tanh", GELUTanh<float>())
      .add("pool2", AvgPool<float>(3, 1, 1))
      .add("tanh", Tanh<float>())
      .add("norm", LayerNorm<float>(6))
      .add("pointwise", Linear<float>(6, 8))
      .add("sigmoid", Sigmoid<float>());
  add("activations", activations, {9, 7, 6});
  Sequential<float> columns;
  columns.add("flatten", Flatten<float>())
      .add("norm", BatchNorm<float>(3 * 2 * 4))
      .add("layer_norm", LayerNorm<float>(3 * 2 * 4))
      .add("back", Conv<float>(conv_shape::square(3 * 2 * 4, 6, 1), true))
      .add("square", Square());
  CHECK_THROWS_WITH_AS(
      add("columns", columns, {3, 2, 4}),
      "write_onnx: layer 'square' (Square) has no form in ONNX; onnx_options::forms may define one",
      value_error);
  Sequential<float> plain = columns;
  plain.erase(4);
  add("columns", plain, {3, 2, 4});
  Sequential<float> selected;
  selected.add("channels", ChannelSelect<float>(4, {0, 2, 3}))
      .add("flatten", Flatten<float>())
      .add("columns", ChannelSelect<float>(3 * 2 * 3, {1, 5, 6, 17}))
      .add("fc", Linear<float>(4, 3));
  any_layer<float> kept(selected);
  network<float> select(kept);
  select.initialize(1);
  cases.add_network("selected", select, {3, 2, 4});
  Sequential<float> flat;
  flat.add("flatten", Flatten<float>()).add("relu", ReLU<float>());
  add("flat", flat, {3, 2, 4});
  conv_shape groups{8, 12, {3, 5}, {2, 1}, {1, 0}, {1, 2}, 4};
  Sequential<float> grouped;
  grouped.add("dense", Conv<float>(groups, true))
      .add("low", LowRankConv<float>(conv_shape{12, 8, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 2}, 3, true));
  add("grouped", grouped, {11, 13, 8});
  CHECK(cases.worst() < 1e-4);
}

TEST_CASE("write_onnx: a layer of the program's own, and a network of doubles") {
  runtime_cases cases;
  Sequential<float> layers;
  layers.add("square", Square()).add("fc", Linear<float>(4, 3));
  network<float> net{any_layer<float>(layers)};
  give_values(net);
  write_onnx(cases.path_of("own"), net, {.image = {1, 1, 4}, .forms = {onnx_form_of<Square>()}});
  const tensor<float, 4> x({2, 1, 1, 4});
  fill_normal<float>(const_cast<tensor<float, 4>&>(x).flat(), 1.0, {3, 1});
  cpu_context ctx;
  const tensor<float, 4> y = net.forward(ctx, x);
  cases.add("own", {entry_of("input", channels_first(x))}, {{"output", {y.flat().begin(), y.flat().end()}}});
  network<double> wide = small_resnet<double>({.width = 4});
  give_values(wide);
  cases.add_network("double", wide, {16, 16, 3});
  CHECK(cases.worst() < 1e-4);
}

TEST_CASE("write_onnx: names, two nodes a factorized layer, a free batch") {
  scratch_folder folder;
  network<float> net = small_resnet<float>({.width = 8});
  give_values(net);
  factorize(net, {});
  write_onnx(folder / "net.onnx", net, {.image = {16, 16, 3}});
  const onnx::ModelProto model = detail::read_onnx_model(folder / "net.onnx");
  CHECK(detail::opset_of(model) == onnx_opset);
  const auto nodes_called = [&](const std::string& name) {
    return std::count_if(model.graph().node().begin(), model.graph().node().end(),
                         [&](const onnx::NodeProto& node) { return node.name() == name; });
  };
  for (const layer_rank& one : planned_ranks(small_resnet<float>({.width = 8}), {})) {
    CAPTURE(one.name);
    CHECK(nodes_called(one.name) == 0);
    CHECK(nodes_called(one.name + ".down") == 1);
    CHECK(nodes_called(one.name + ".up") == 1);
  }
  const detail::constant_map constants = detail::constants_of(model.graph());
  for (const auto& entry : net.store().parameters()) {
    CAPTURE(entry.name);
    REQUIRE(constants.count(entry.name) == 1);
    CHECK(detail::shape_of(*constants.at(entry.name)) == detail::shape_of(entry.thing->layout()));
  }
  CHECK(model.graph().input(0).type().tensor_type().shape().dim(0).dim_param() == "batch");
}

TEST_CASE("the program of the page") {
  scratch_folder folder;
  const std::string path = folder / "net.onnx";
  network<float> net = small_resnet<float>({.width = 8});
  net.initialize(1);
  // [write]
  factorize(net, {.rank = rank_ratio{0.25}});
  write_onnx(path, net, {.image = {32, 32, 3}});  // input [batch][3][32][32], output [batch][10]
  // [write]
  network<float> other = net;
  other.initialize(2);
  // [read]
  read_onnx(path, other, {.image = {32, 32, 3}});  // by the names and shapes of its parameters
  // [read]
  CHECK(std::ranges::equal(net.store().values(), other.store().values()));
  // [factorize]
  weight_policy policy;            // the first and the last layer stay dense
  policy.rank = energy_kept{0.9};  // or rank_ratio{0.25}; or policy.budget = 10'000'000;
  const onnx_report report = factorize_onnx(path, folder / "small.onnx", policy);
  // [factorize]
  CHECK(report.checked);
}

TEST_CASE("read_onnx: every weight comes back, and errors name the parameter and both shapes") {
  scratch_folder folder;
  const std::string path = folder / "net.onnx";
  for (const bool low : {false, true}) {
    network<float> net = small_vgg<float>({.image = {12, 20}, .width = 4, .hidden = 24});
    give_values(net, 5);
    if (low) factorize(net, {.first_layer = 1});
    write_onnx(path, net, {.image = {12, 20, 3}});
    network<float> other = net;
    give_values(other, 6);
    read_onnx(path, other, {.image = {12, 20, 3}});
    for (const auto& entry : net.store().parameters()) {
      CAPTURE(entry.name);
      for (const auto& same : other.store().parameters()) {
        if (same.name == entry.name) CHECK(std::ranges::equal(entry.thing->values(), same.thing->values()));
      }
    }
  }
  network<float> net = small_vgg<float>({.image = {12, 20}, .width = 4, .hidden = 24});
  const std::string stored = folder / "stored.onnx";
  give_values(net);
  write_onnx(stored, net, {.image = {12, 20, 3}});
  onnx::ModelProto model = detail::read_onnx_model(stored);
  for (auto& one : *model.mutable_graph()->mutable_initializer()) {
    auto& node = *model.mutable_graph()->add_node();
    node.set_op_type("Identity");
    node.add_input(one.name() + "_stored");
    node.add_output(one.name());
    one.set_name(node.input(0));
  }
  write_file_atomically(stored, detail::onnx_bytes(model, stored));
  network<float> same = net;
  give_values(same, 6);
  read_onnx(stored, same, {.image = {12, 20, 3}});
  CHECK(std::ranges::equal(net.store().values(), same.store().values()));
  network<float> wider = small_vgg<float>({.image = {12, 20}, .width = 4, .hidden = 25});
  give_values(wider);
  const network<float> before = wider;
  CHECK_THROWS_WITH_AS(
      read_onnx(path, wider, {.image = {12, 20, 3}}),
      (path + ": the model has no constant 'features.0.weight', which the network has with "
              "shape [4 x 3 x 3 x 3], and in the order of use none of another name is input 1 "
              "of Conv and has this shape")
          .c_str(),
      io_error);
  write_onnx(path, net, {.image = {12, 20, 3}});
  CHECK_THROWS_WITH_AS(read_onnx(path, wider, {.image = {12, 20, 3}}),
                       (path + ": 'classifier.1.bias' has shape [24], the network's has [25]").c_str(),
                       io_error);
  CHECK(std::ranges::equal(before.store().values(), wider.store().values()));
}

/// Gives the constants of a stored model that `renames` chooses other names, "c0", "c1", ..., and turns their
/// order in the file around.
void rename_constants(const std::string& path, const std::function<bool(const std::string&)>& renames) {
  onnx::ModelProto model = detail::read_onnx_model(path);
  auto& graph = *model.mutable_graph();
  std::map<std::string, std::string> names;
  for (auto& one : *graph.mutable_initializer()) {
    if (!detail::floating_dtype(one) || !renames(one.name())) continue;
    const std::string name = "c" + std::to_string(names.size());
    names[one.name()] = name;
    one.set_name(name);
  }
  for (auto& node : *graph.mutable_node()) {
    for (auto& input : *node.mutable_input()) {
      if (names.count(input) > 0) input = names.at(input);
    }
  }
  std::reverse(graph.mutable_initializer()->begin(), graph.mutable_initializer()->end());
  write_file_atomically(path, detail::onnx_bytes(model, path));
}

TEST_CASE("read_onnx: weights of other names come back by their order of use") {
  scratch_folder folder;
  const std::string path = folder / "net.onnx";
  const onnx_options<float> options{.image = {16, 16, 3}};
  network<float> net = small_resnet<float>({.width = 4});
  give_values(net, 5);
  for (const bool low : {false, true}) {
    for (const bool all : {false, true}) {
      CAPTURE(low);
      CAPTURE(all);
      write_onnx(path, net, options);
      rename_constants(path, [&](const std::string& name) { return all || name.find("conv") != name.npos; });
      network<float> other = net;
      other.initialize(7);
      read_onnx(path, other, options);
      for (const auto& entry : net.store().parameters()) {
        CAPTURE(entry.name);
        for (const auto& same : other.store().parameters()) {
          if (same.name == entry.name) CHECK(std::ranges::equal(entry.thing->values(), same.thing->values()));
        }
      }
    }
    if (!low) factorize(net, {});
  }
}

TEST_CASE("read_onnx: an order that does not say which constant is meant is refused, with both names") {
  scratch_folder folder;
  const std::string path = folder / "net.onnx";
  const onnx_options<float> options{.image = {1, 1, 6}};
  const auto made = [](std::vector<index_t> hidden) {
    network<float> net = mlp<float>({.inputs = 6, .hidden = std::move(hidden), .classes = 5});
    give_values(net, 5);
    return net;
  };
  write_onnx(path, made({24, 24}), options);
  rename_constants(path, [](const std::string&) { return true; });
  network<float> narrow = made({24});
  const network<float> before = narrow;
  CHECK_THROWS_WITH_AS(read_onnx(path, narrow, options),
                       doctest::Contains("it may be 'c0' or 'c2' of shape [24]"), io_error);
  network<float> other = made({24, 24, 24});
  CHECK_THROWS_WITH_AS(read_onnx(path, other, options),
                       doctest::Contains("in the order of use none of another name"), io_error);
  CHECK(std::ranges::equal(before.store().values(), narrow.store().values()));
  // Gemm without transB has the weight transposed, which the shape of a square matrix does not show.
  network<float> square = made({6, 6});
  write_onnx(path, square, options);
  rename_constants(path, [](const std::string&) { return true; });
  onnx::ModelProto model = detail::read_onnx_model(path);
  for (auto& node : *model.mutable_graph()->mutable_node()) node.clear_attribute();
  write_file_atomically(path, detail::onnx_bytes(model, path));
  CHECK_THROWS_WITH_AS(read_onnx(path, square, options), doctest::Contains("input 1 of Gemm with transB"),
                       io_error);
}

}  // namespace
