// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `module_kinds`, the table of dense and low-rank modules, and `host_torch::low_rank`, which makes a
/// low-rank module from a dense one by singular value decomposition.

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/attention.hpp>
#include <pufferfish/adapters/torch/conv.hpp>
#include <pufferfish/adapters/torch/embedding.hpp>
#include <pufferfish/adapters/torch/lstm.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// A dense libtorch module, which has module_traits, and the low-rank module that replaces it. The low-rank
/// class has a constructor (const Dense&, const rank_list&), `factors()` and `biases()`. `holder` is the type
/// that TORCH_MODULE has made of the low-rank class.
template <class Dense, class Holder>
struct module_kind {
  using dense = Dense;
  using holder = Holder;
  using low_rank = typename Holder::ContainedType;
};

/// Every kind of module that can be factorized. To add a kind, add a line here.
using module_kinds = std::tuple<
    module_kind<torch::nn::LinearImpl, LowRankLinear>, module_kind<torch::nn::Conv2dImpl, LowRankConv2d>,
    module_kind<torch::nn::EmbeddingImpl, LowRankEmbedding>, module_kind<torch::nn::LSTMImpl, LowRankLSTM>,
    module_kind<torch::nn::MultiheadAttentionImpl, LowRankMultiheadAttention>>;

/// Calls call(kind) for each module_kind (each supported type of dense module) in turn until a call returns
/// true. Returns whether one did.
template <class Call>
bool any_kind(Call&& call) {
  return std::apply([&](const auto&... kind) { return (call(kind) || ...); }, module_kinds{});
}

/// The kind of a dense module or of a class derived from libtorch's module. `find_kind<Dense>::type` is the
/// module_kind; there is no `type` for a module that is of no kind.
template <class Dense, class Kinds = module_kinds>
struct find_kind;
template <class Dense, class First, class... Rest>
struct find_kind<Dense, std::tuple<First, Rest...>>
    : std::conditional_t<std::derived_from<Dense, typename First::dense>, std::type_identity<First>,
                         find_kind<Dense, std::tuple<Rest...>>> {};
template <class Dense>
struct find_kind<Dense, std::tuple<>> {};

/// Keeps libtorch's random state (of the default CPU generator) and restores it in the destructor.
/// Constructing a module draws random weights, which must not change the program's random numbers if the
/// module is then filled with factors.
class keep_random_state {
 public:
  keep_random_state() : generator_(at::detail::getDefaultCPUGenerator()), state_(generator_.get_state()) {}
  ~keep_random_state() { generator_.set_state(state_); }
  keep_random_state(const keep_random_state&) = delete;
  keep_random_state& operator=(const keep_random_state&) = delete;

 private:
  at::Generator generator_;
  Tensor state_;
};

/// A dense module's decomposition, and the function that builds the low-rank module from it.
struct decomposition {
  std::vector<factor_report> reports;                         ///< of each matrix
  std::vector<layer_rank> ranks;                              ///< one; for an LSTM, one for each layer
  std::function<std::shared_ptr<torch::nn::Module>()> build;  ///< makes the module
};

/// The weights of one layer of a module, as views, and their factors.
template <class T>
struct layer_factors {
  layer_weights<T> weights;
  std::vector<factors<T>> made;
};

/// Returns layer `layer` of a low-rank module of `layers` layers, as views for writing factors. Tensors with
/// fewer than four dimensions get trailing dimensions of size 1. The views write to the tensors' memory.
template <class T>
low_rank_parts<T> parts_of(const std::vector<factor_tensors>& factors, const std::vector<Tensor>& biases,
                           std::size_t layer, std::size_t layers) {
  const auto writable = [](Tensor t) {
    while (t.dim() < 4) t = t.unsqueeze(-1);
    const auto view = view_of<T, 4>(t);
    return tensor_view<T, 4>(t.data_ptr<T>(), view.shape(), view.strides());
  };
  low_rank_parts<T> parts;
  const std::size_t matrices = factors.size() / layers, vectors = biases.size() / layers;
  for (std::size_t i = layer * matrices; i < (layer + 1) * matrices; ++i) {
    parts.factors.push_back({{}, 0, writable(factors[i].down), writable(factors[i].up)});
  }
  for (std::size_t i = layer * vectors; i < (layer + 1) * vectors; ++i) {
    const Tensor& t = biases[i];
    parts.biases.push_back(t.defined() ? tensor_view<T, 1>(t.data_ptr<T>(), {t.size(0)})
                                       : tensor_view<T, 1>());
  }
  return parts;
}

/// Options for layer `layer` of a module of several layers: with the layer's name and its matrices'
/// statistics. The options of a module of one layer are those of the module.
class options_of_layer {
 public:
  /// Makes the options for one layer. Throws shape_error for statistics of another number of matrices.
  template <class Module>
  options_of_layer(const Module& module, const factorize_options& given, std::int64_t layer)
      : options(given) {
    const std::int64_t layers = module_traits<Module>::layers(module);
    if (layers == 1) return;
    options.name += ".l" + std::to_string(layer);
    if (given.statistics == nullptr) return;
    const std::vector<output_statistics>& all = given.statistics->matrices;
    const auto each = static_cast<std::int64_t>(module_traits<Module>::weights(module, layer).size());
    if (static_cast<std::int64_t>(all.size()) != layers * each) {
      throw_error<shape_error>(
          {given.name, ": statistics of ", all.size(), " matrices for ", layers, " layers of ", each});
    }
    own_.matrices.assign(all.begin() + layer * each, all.begin() + (layer + 1) * each);
    options.statistics = &own_;
  }
  options_of_layer(const options_of_layer&) = delete;
  options_of_layer& operator=(const options_of_layer&) = delete;

  factorize_options options;  ///< refer to this object

 private:
  layer_statistics own_;
};

/// Calls call(source, T()). `source` is the module itself if its weights are float or double on the CPU, else
/// a float copy on the CPU; T is the scalar of its weights. In the first case `source` does not own the
/// module.
template <class Dense, class Call>
auto with_numbers(const Dense& dense, Call&& call) {
  const Tensor weight = dense.parameters().front();
  if (!is_ours(weight)) {
    const auto copy = std::dynamic_pointer_cast<Dense>(dense.clone(torch::Device(torch::kCPU)));
    copy->to(torch::kFloat);
    return call(std::shared_ptr<const Dense>(copy), float());
  }
  const std::shared_ptr<const Dense> source(std::shared_ptr<void>(), &dense);
  return weight.scalar_type() == torch::kFloat ? call(source, float()) : call(source, double());
}

/// How much each singular component of a module's weights reduces the approximation error: the numbers from
/// which a budget over several layers chooses ranks. `groups` has one list of these gains for each set of
/// matrices that must have one rank; the layers of an LSTM follow one another. `kind` is the decomposition to
/// which the gains apply.
struct layer_gains {
  /// Gains in descending order, one list for each set of matrices with one rank.
  std::vector<std::vector<double>> groups;
  truncation kind = truncation::plain;
};
/// Decomposes the module's weights but builds no module. options.truncate is ignored: the kind of truncation
/// follows from options.statistics. Throws the errors of low_rank for the module and the statistics.
template <class Dense>
layer_gains gains_of(const Dense& dense, factorize_options options) {
  using kind = typename find_kind<Dense>::type;
  options.truncate.reset();
  return with_numbers(dense, [&](const auto& source, auto scalar) {
    using T = decltype(scalar);
    const typename kind::dense& module = *source;
    const std::int64_t layers = module_traits<typename kind::dense>::layers(module);
    layer_gains result;
    for (std::int64_t l = 0; l < layers; ++l) {
      const options_of_layer own(module, options, l);
      const pufferfish::detail::layer_truncation<T> one(
          pufferfish::detail::weights_of(of<T>(module, l), own.options.name), own.options);
      for (std::vector<double>& gains : one.gains()) result.groups.push_back(std::move(gains));
      result.kind = one.kind();
    }
    return result;
  });
}

/// Decomposes `source`, whose weights are of type T on the CPU, at choice.ranks or, if that list is empty, by
/// choice.rank. The low-rank module gets the device, scalar and requires_grad of `dense`. Nothing is built
/// yet: the reports and ranks are known, and result.build() makes the module. `dense` must live until then.
template <class T, class Dense>
decomposition decompose_as(const std::shared_ptr<const Dense>& source, const Dense& dense,
                           const layer_choice& choice, const factorize_options& options) {
  using kind = typename find_kind<Dense>::type;
  using traits = module_traits<typename kind::dense>;
  decomposition result;
  auto all = std::make_shared<std::vector<layer_factors<T>>>();
  rank_list ranks;
  const std::int64_t layers = traits::layers(dense);
  for (std::int64_t l = 0; l < layers; ++l) {
    const typename kind::dense& module = *source;
    const options_of_layer layer(module, options, l);
    const factorize_options& own = layer.options;
    layer_factors<T> one{pufferfish::detail::weights_of(of<T>(module, l), own.name), {}};
    const std::size_t before = ranks.size();
    const auto fixed = pufferfish::detail::fixed_ranks(
        std::span(choice.ranks).subspan(std::min(before, choice.ranks.size())));
    one.made = pufferfish::detail::factorize_weights(
        one.weights, fixed.empty() ? std::span(&choice.rank, 1) : std::span(fixed), own);
    for (const factors<T>& f : one.made) result.reports.push_back(f.report);
    result.ranks.emplace_back(own.name, pufferfish::detail::ranks_of(one.weights, one.made));
    ranks.insert(ranks.end(), result.ranks.back().ranks.begin(), result.ranks.back().ranks.end());
    all->push_back(std::move(one));
  }
  result.build = [source, all, ranks, &dense]() -> std::shared_ptr<torch::nn::Module> {
    auto module =
        std::make_shared<typename kind::low_rank>(static_cast<const typename kind::dense&>(dense), ranks);
    module->to(scalar_of<T>());
    const auto factors = module->factors();
    const auto biases = module->biases();
    for (std::size_t l = 0; l < all->size(); ++l) {
      const layer_factors<T>& one = (*all)[l];
      pufferfish::detail::store_factors(one.made, one.weights.biases,
                                        parts_of<T>(factors, biases, l, all->size()));
    }
    const Tensor like = dense.parameters().front();
    module->to(like.device(), like.scalar_type());
    return module;
  };
  return result;
}

/// Decomposes a module of any kind (decompose_as), whatever its scalar and device. `dense` must live until
/// the module is built.
template <class Dense>
decomposition decompose(const Dense& dense, const layer_choice& choice, const factorize_options& options) {
  return with_numbers(dense, [&](const auto& source, auto scalar) {
    return decompose_as<decltype(scalar)>(source, dense, choice, options);
  });
}

}  // namespace detail

/// Makes a low-rank module from a dense one (Linear, Conv2d, Embedding, LSTM, MultiheadAttention). `policy`
/// chooses the rank; up down is the best approximation of that rank (factorize_matrix). Scalar, device and
/// requires_grad of the parameters and the training mode are those of the dense module. The two biases of an
/// LSTM are added up. `reports`, if given, receives a report for each matrix. options.statistics are those of
/// all matrices, the layers of an LSTM one after another.
///
///     host_torch::LowRankConv2d conv = host_torch::low_rank(*dense_conv, rank_ratio{0.25});
///
/// Throws value_error for a module that has no factors (see traits.hpp) or a weight that is not finite,
/// shape_error for statistics of another layer, rank_error for an impossible rank or one that does not make
/// the layer smaller (unless options.allow_growth). `dense` is not changed, and the result shares no memory
/// with it. libtorch's random numbers are not changed. Weights that are not float or double on the CPU are
/// decomposed as a float copy there.
template <class Dense, class Kind = typename detail::find_kind<Dense>::type>
typename Kind::holder low_rank(const Dense& dense, const rank_policy& policy, factorize_options options = {},
                               std::vector<factor_report>* reports = nullptr) {
  const detail::keep_random_state keep;
  const typename Kind::dense& module = dense;
  if (options.name == factorize_options{}.name) {
    options.name = detail::module_traits<typename Kind::dense>::describe(module);
  }
  layer_choice choice;
  choice.rank = policy;
  detail::decomposition made = detail::decompose(module, choice, options);
  auto low_rank = std::dynamic_pointer_cast<typename Kind::low_rank>(made.build());
  low_rank->train(dense.is_training());
  if (reports != nullptr) *reports = std::move(made.reports);
  return typename Kind::holder(std::move(low_rank));
}

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
