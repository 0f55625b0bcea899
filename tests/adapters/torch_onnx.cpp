// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Modules of libtorch as ONNX models: against libtorch in ONNX Runtime where there is one, names, and
// refusals.

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include <pufferfish/adapters/torch/export_onnx.hpp>
#include <pufferfish/adapters/torch/factorize.hpp>

#include "torch_common.hpp"

#include "../unit/support/onnx_runtime.hpp"

TEST_SUITE_BEGIN("onnx");

namespace {

namespace nn = torch::nn;

std::vector<double> elements_of(const Tensor& t) {
  const Tensor all = t.detach().to(torch::kDouble).contiguous();
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

/// A container that can be an element of another one.
struct StackImpl : nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  Tensor forward(const Tensor& x) { return SequentialImpl::forward(x); }
};
TORCH_MODULE(Stack);

/// Exports a module, and adds its outputs in eval mode for random inputs whose free axes have lengths 1
/// and 7.
template <class Module, class Forward>
void add(test::runtime_cases& cases, const std::string& name, Module& module,
         const ht::onnx_export_options& options, Forward&& forward, torch::Dtype dtype = torch::kFloat) {
  CAPTURE(name);
  ht::export_onnx(module, cases.path_of(name), options);
  const torch::NoGradGuard none;
  const bool training = module.is_training();
  module.eval();
  for (const std::int64_t free : {1, 7}) {
    std::vector<std::int64_t> shape;
    for (const ht::onnx_axis& axis : options.shape) {
      shape.push_back(std::holds_alternative<pf::index_t>(axis) ? std::get<pf::index_t>(axis) : free);
    }
    const Tensor x = options.tokens ? torch::randint(0, 13, shape, torch::kLong) : torch::randn(shape);
    const Tensor y = forward(options.tokens ? x : x.to(dtype));
    const auto bytes = static_cast<std::size_t>(x.numel()) * static_cast<std::size_t>(x.element_size());
    cases.add(name,
              {{"input",
                options.tokens ? pf::dtype_of_v<std::int64_t> : pf::dtype_of_v<float>,
                {shape.begin(), shape.end()},
                {static_cast<const std::uint8_t*>(x.data_ptr()), bytes}}},
              {{"output", elements_of(y)}});
  }
  module.train(training);
}
void add(test::runtime_cases& cases, const std::string& name, nn::Sequential& net,
         const std::vector<ht::onnx_axis>& shape, torch::Dtype dtype = torch::kFloat) {
  add(
      cases, name, *net, {.shape = shape, .forms = {ht::sequence_form<StackImpl>()}},
      [&](const Tensor& x) { return net->forward(x); }, dtype);
}

/// A convolutional network with nested containers, slots and running statistics that are not those of the
/// start.
nn::Sequential images() {
  Stack body(nn::Conv2d(nn::Conv2dOptions(8, 12, {3, 5}).stride({2, 1}).padding({1, 2}).groups(4)),
             nn::BatchNorm2d(12), nn::LeakyReLU(), nn::Dropout2d(),
             ht::Conv2d(nn::Conv2dOptions(12, 16, 3).padding(torch::kSame).dilation(2).bias(false)),
             nn::BatchNorm2d(nn::BatchNorm2dOptions(16).affine(false)), nn::GELU(),
             nn::AvgPool2d(nn::AvgPool2dOptions(3).stride(2).padding(1)));
  nn::Sequential net;
  net->push_back("conv1", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)));
  net->push_back("relu", nn::ReLU());
  net->push_back("pool", nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  net->push_back("body", body);
  net->push_back("adaptive", nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions({2, 4})));
  net->push_back("flatten", nn::Flatten());
  net->push_back("norm", nn::BatchNorm1d(16 * 2 * 4));
  net->push_back("fc", ht::Linear(16 * 2 * 4, 24));
  net->push_back("tanh", nn::Tanh());
  net->push_back("dropout", nn::Dropout());
  net->push_back("head", nn::Linear(nn::LinearOptions(24, 10).bias(false)));
  net->forward(3 * torch::randn({9, 3, 16, 16}) + 1);
  return net;
}

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// y = x + relu(fc(x)), a class of a program's own.
struct BlockImpl : nn::Module {
  ht::Linear fc{nullptr};
  BlockImpl() { fc = register_module("fc", ht::Linear(8, 8)); }
  Tensor forward(const Tensor& x) { return x + fc->forward(x).relu(); }
};
TORCH_MODULE(Block);

ht::export_form block_form() {
  return ht::export_form_of<BlockImpl>(
      [](ht::onnx_exporter& to, const std::string& path, const BlockImpl& m, const ht::onnx_tensor& x) {
        const ht::onnx_tensor y = to.node("Relu", path + ".relu", to.write(path + ".fc", *m.fc, x));
        return ht::onnx_tensor{to.graph().node("Add", path + ".add", {x.name, y.name}), x.shape};
      });
}

}  // namespace

TEST_CASE("export_onnx: images, dense and factorized, of floats and of doubles") {
  torch::manual_seed(51);
  test::runtime_cases cases;
  nn::Sequential net = images();
  const auto before = net->named_buffers()["norm.running_mean"].clone();
  add(cases, "dense", net, {"batch", 3, 16, 16});
  CHECK(net->is_training());
  CHECK(torch::equal(before, net->named_buffers()["norm.running_mean"]));
  CHECK(ht::factorize(*net, everything(pf::rank_ratio{0.5})).low_rank.size() >= 4);
  add(cases, "low", net, {"batch", 3, 16, 16});
  net->to(torch::kDouble);
  add(cases, "double", net, {"batch", 3, 16, 16}, torch::kDouble);
  nn::Sequential pools(
      nn::AvgPool2d(nn::AvgPool2dOptions(3).padding(1).stride(1).count_include_pad(false)),
      nn::MaxPool2d(nn::MaxPool2dOptions({2, 3}).stride({2, 1}).dilation({1, 2}).ceil_mode(true)),
      nn::Sigmoid(), nn::LayerNorm(nn::LayerNormOptions({4, 5})),
      nn::AdaptiveMaxPool2d(nn::AdaptiveMaxPool2dOptions({2, torch::nullopt})),
      nn::Flatten(nn::FlattenOptions().start_dim(2)), nn::Softmax(1));
  add(cases, "pools", pools, {"batch", 5, 8, 9});
  nn::Sequential global(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)),
                        nn::Flatten(nn::FlattenOptions().start_dim(0).end_dim(1)), nn::Identity());
  add(cases, "global", global, {"batch", 5, "height", "width"});
  CHECK(cases.worst() < 1e-4);
}

TEST_CASE("export_onnx: rows, tokens and LSTMs") {
  torch::manual_seed(52);
  test::runtime_cases cases;
  nn::Sequential rows(ht::Linear(6, 12), nn::GELU(nn::GELUOptions().approximate("tanh")),
                      nn::LayerNorm(nn::LayerNormOptions({12})), nn::Linear(12, 4), nn::LogSoftmax(-1));
  nn::Sequential words(nn::Embedding(13, 8), nn::Linear(8, 3));
  nn::LSTM lstm(nn::LSTMOptions(6, 5).num_layers(2));
  nn::Sequential last(nn::Linear(6, 7), nn::LSTM(nn::LSTMOptions(7, 5).bias(false).batch_first(true)));
  const auto first_of = [](const auto& result) { return std::get<0>(result); };
  using result = std::tuple<Tensor, std::tuple<Tensor, Tensor>>;
  for (const bool low : {false, true}) {
    const std::string suffix = low ? "-low" : "";
    if (low) {
      for (nn::Sequential* net : {&rows, &words, &last}) {
        pf::factorize_policy policy = everything(pf::fixed_rank{2});
        policy.embeddings_dense = false;
        ht::factorize(**net, policy);
      }
    }
    add(cases, "rows" + suffix, rows, {"batch", 6});
    add(cases, "steps" + suffix, rows, {"batch", "steps", 6});
    add(cases, "words" + suffix, *words, {.shape = {"batch", "steps"}, .tokens = true},
        [&](const Tensor& x) { return words->forward(x); });
    add(cases, "last" + suffix, *last, {.shape = {"batch", "steps", 6}},
        [&](const Tensor& x) { return first_of(last->forward<result>(x)); });
  }
  add(cases, "lstm", *lstm, {.shape = {"steps", "batch", 6}},
      [&](const Tensor& x) { return first_of(lstm->forward(x)); });
  ht::LowRankLSTM low(nn::LSTMOptions(6, 5).num_layers(2), 3);
  low->named_parameters()["bias_l1"].detach().normal_();
  add(cases, "lstm-low", *low, {.shape = {"steps", "batch", 6}},
      [&](const Tensor& x) { return first_of(low->forward(x)); });
  CHECK(cases.worst() < 1e-4);
}

TEST_CASE("export_onnx: names are libtorch's, and a low-rank layer is two nodes") {
  torch::manual_seed(53);
  scratch_folder folder;
  nn::Sequential net = images();
  const std::string path = folder / "net.onnx";
  for (const bool low : {false, true}) {
    CAPTURE(low);
    if (low) ht::factorize(*net, everything(pf::rank_ratio{0.25}));
    // [export]
    const ht::onnx_export_options options{.shape = {"batch", 3, 16, 16},
                                          .forms = {ht::sequence_form<StackImpl>()}};
    ht::export_onnx(*net, path, options);
    // [export]
    const onnx::ModelProto model = pf::detail::read_onnx_model(path);
    CHECK(pf::detail::opset_of(model) == 13);
    CHECK(model.graph().input(0).type().tensor_type().shape().dim(0).dim_param() == "batch");
    const pf::detail::constant_map constants = pf::detail::constants_of(model.graph());
    for (const auto& one : net->named_parameters()) {
      CAPTURE(one.key());
      REQUIRE(constants.count(one.key()) == 1);
      CHECK(pf::detail::shape_of(*constants.at(one.key())) == one.value().sizes().vec());
    }
    CHECK(constants.count("body.1.running_var") == 1);
    std::map<std::string, std::string> nodes;
    for (const auto& node : model.graph().node()) nodes.emplace(node.name(), node.op_type());
    CHECK(nodes.count("body.4") == (low ? 0 : 1));
    CHECK(nodes["body.4.down"] == (low ? "Conv" : ""));
    CHECK(nodes["fc.up"] == (low ? "Gemm" : ""));
    CHECK(nodes["body.1"] == "BatchNormalization");
    CHECK(nodes.count("dropout") == 0);
  }
}

TEST_CASE("export_onnx: a module of the program's own") {
  torch::manual_seed(54);
  test::runtime_cases cases;
  nn::Sequential net(nn::Linear(4, 8), Block(), Block());
  const ht::onnx_export_options options{.shape = {"batch", 4}, .forms = {block_form()}};
  add(cases, "blocks", *net, options, [&](const Tensor& x) { return net->forward(x); });
  CHECK(ht::factorize(*net, everything(pf::fixed_rank{2})).low_rank.size() == 3);
  add(cases, "blocks-low", *net, options, [&](const Tensor& x) { return net->forward(x); });
  CHECK(cases.worst() < 1e-4);
}

TEST_CASE("export_onnx: what has no form is refused by path and type, and the file stays") {
  scratch_folder folder;
  const std::string path = folder / "net.onnx";
  std::ofstream(path) << "old";
  const auto refused = [&](const nn::Module& m, const std::vector<ht::onnx_axis>& shape,
                           bool tokens = false) {
    const std::string text = error_of([&] {
      ht::export_onnx(m, path, {.shape = shape, .tokens = tokens, .forms = {ht::sequence_form<StackImpl>()}});
    });
    CHECK(text_of(path) == "old");
    return text;
  };
  nn::Sequential net(nn::Conv2d(3, 4, 3), Stack(nn::ReLU(), nn::Conv3d(4, 4, 3)));
  CHECK(
      refused(*net, {"batch", 3, 8, 8}) ==
      "export_onnx: module '1.1' (torch::nn::Conv3dImpl) has no form in ONNX; onnx_export_options::forms may "
      "define one");
  CHECK(contains(refused(BlockImpl(), {"batch", 8}), "the root module"));
  CHECK(contains(refused(BlockImpl(), {"batch", 8}), "BlockImpl) has no form"));
  nn::Sequential function(nn::Functional(torch::relu));
  CHECK(contains(refused(*function, {"batch", 8}), "module '0' (torch::nn::FunctionalImpl)"));
  nn::Sequential circular(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1).padding_mode(torch::kCircular)));
  CHECK(contains(refused(*circular, {"batch", 3, 8, 8}), "'0' (torch::nn::Conv2dImpl): pads with"));
  nn::Sequential partial(nn::MaxPool2d(nn::MaxPool2dOptions(2).ceil_mode(true)));
  CHECK(contains(refused(*partial, {"batch", 3, 8, 9}), "ceil_mode"));
  nn::Sequential adaptive(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(3)));
  CHECK(contains(refused(*adaptive, {"batch", 3, 9, 8}), "3 pixels, which do not divide 8"));
  nn::Sequential batch(nn::BatchNorm1d(nn::BatchNorm1dOptions(8).track_running_stats(false)));
  CHECK(contains(refused(*batch, {"batch", 8}), "no running statistics"));
  nn::LSTM both(nn::LSTMOptions(4, 3).bidirectional(true));
  CHECK(contains(refused(*both, {"steps", "batch", 4}), "two directions"));
  nn::Sequential words(nn::Embedding(nn::EmbeddingOptions(9, 4).max_norm(1.0)));
  CHECK(contains(refused(*words, {"batch", "steps"}), "set onnx_export_options::tokens"));
  CHECK(contains(refused(*words, {"batch", "steps"}, true), "max_norm"));
  nn::Sequential fc(nn::Linear(4, 3), nn::Linear(4, 3));
  CHECK(refused(*fc, {"batch", 4}) ==
        "export_onnx: module '1' (torch::nn::LinearImpl): input [batch x 3] where extent -1 is 4");
  CHECK(contains(refused(*fc, {"batch", 4}, true), "tokens [batch x 4]"));
  CHECK(contains(refused(*net, {"batch", 3, "height", 8}), "where extent 2 is a number"));
  CHECK(contains(refused(*fc, {}), "the input has no shape"));
  nn::Linear plain(4, 3);
  plain->bias = torch::zeros({3}, torch::kByte);
  CHECK(contains(refused(*plain, {"batch", 4}), "'bias' is Byte on cpu"));
}

TEST_SUITE_END();
