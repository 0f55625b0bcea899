// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::LowRankLSTM`: a torch::nn::Module that computes the function of
/// torch::nn::LSTM with low-rank matrices.

#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/linear.hpp>
#include <pufferfish/adapters/torch/lstm_function.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// The rank of one layer's four input matrices, and that of its four hidden matrices.
struct lstm_ranks {
  std::int64_t input = 0;   ///< rank of weight_ih of each gate
  std::int64_t hidden = 0;  ///< rank of weight_hh of each gate
};

/// torch::nn::LSTM of one or more layers, with each gate's two matrices as products up down. Layer 0, 1, ...
/// has the parameters `weight_ih_l0_down` [4 rank][in], `weight_ih_l0_up` [4 hidden][rank], `bias_l0` [4
/// hidden] (if options.bias(); the sum of libtorch's two), `weight_hh_l0_down` and `weight_hh_l0_up`. The
/// gates i, f, g, o are stacked in the first dimension. In memory the first dimension of each matrix is
/// contiguous (stride 1), the order of the kernels; save and load by name work as for any tensor.
///
/// Dense float and double tensors on the CPU are computed by pufferfish's kernels, forward and backward; all
/// others by libtorch's operations. Packed sequences are not supported.
///
///     host_torch::LowRankLSTM lstm(torch::nn::LSTMOptions(64, 128).num_layers(2), 16);        // rank 16
///     auto [y, state] = lstm->forward(x);                  // x: [steps][batch][64], y: [steps][batch][128]
///     auto [next, after] = lstm->forward(more, state);
class LowRankLSTMImpl : public detail::counted_module<LowRankLSTMImpl> {
  using state = std::tuple<Tensor, Tensor>;

 public:
  /// Makes a module with random weights and one rank for both sides of all layers (second form: a pair of
  /// ranks for each layer). Throws value_error for two directions, a projection or another number of pairs,
  /// rank_error for a rank outside 1 .. min(in, hidden) on the input side or outside 1 .. hidden on the
  /// hidden side.
  LowRankLSTMImpl(const torch::nn::LSTMOptions& given, std::int64_t rank)
      : LowRankLSTMImpl(given, std::vector<lstm_ranks>(static_cast<std::size_t>(given.num_layers()),
                                                       lstm_ranks{rank, rank})) {}
  LowRankLSTMImpl(const torch::nn::LSTMOptions& given, const std::vector<lstm_ranks>& layer_ranks)
      : options(given), ranks_(layer_ranks) {
    if (given.bidirectional() || given.proj_size() != 0) {
      detail::throw_error<value_error>({describe(), ": two directions and projections have no factors here"});
    }
    if (ranks_.size() != static_cast<std::size_t>(given.num_layers())) {
      detail::throw_error<value_error>(
          {describe(), ": ", ranks_.size(), " pairs of ranks for ", given.num_layers(), " layers"});
    }
    for (std::size_t l = 0; l < ranks_.size(); ++l) {
      const std::string name = detail::message({describe(), ", layer ", l});
      check_rank(name + ", input side", given.hidden_size(), input_size(l), ranks_[l].input);
      check_rank(name + ", hidden side", given.hidden_size(), given.hidden_size(), ranks_[l].hidden);
    }
    reset();
  }
  /// Makes a module with the sizes and requires_grad of a dense layer, and random weights. `ranks`: input and
  /// hidden side of layer 0, of layer 1, ...
  LowRankLSTMImpl(const torch::nn::LSTMImpl& dense, const rank_list& ranks)
      : LowRankLSTMImpl(dense.options, pairs_of(ranks)) {
    using traits = detail::module_traits<torch::nn::LSTMImpl>;
    std::vector<Tensor> from;
    for (std::int64_t l = 0; l < options.num_layers(); ++l) {
      const Tensor input = traits::tensor(dense, l, 0), hidden = traits::tensor(dense, l, 1);
      const Tensor bias = options.bias() ? traits::tensor(dense, l, 2) : Tensor();
      from.insert(from.end(), {input, input, bias, hidden, hidden});
    }
    detail::train_as(parameters(), from);
  }

  torch::nn::LSTMOptions options;  ///< sizes, number of layers, dropout; not to be changed

  /// The factors of all layers' matrices, each layer in the order of layer_traits: gates i, f, g, o of the
  /// input side, then those of the hidden side. They share the parameters' memory and are detached from
  /// autograd.
  std::vector<detail::factor_tensors> factors() const {
    std::vector<detail::factor_tensors> all;
    for (const layer& l : layers_) {
      detail::append_factors(all, l.input_down, l.input_up, 4);
      detail::append_factors(all, l.hidden_down, l.hidden_up, 4);
    }
    return all;
  }
  /// The biases of all layers' gates i, f, g, o; undefined tensors without biases.
  std::vector<Tensor> biases() const {
    std::vector<Tensor> all;
    for (const layer& l : layers_) {
      const auto gates = l.bias.defined() ? l.bias.detach().tensor_split(4) : std::vector<Tensor>(4);
      all.insert(all.end(), gates.begin(), gates.end());
    }
    return all;
  }

  /// The ranks of each layer.
  const std::vector<lstm_ranks>& ranks() const { return ranks_; }

  /// Makes new parameters with random values, for each layer in the order of the class comment.
  void reset() override {
    layers_.clear();
    const std::int64_t gates = 4 * options.hidden_size();
    for (std::size_t l = 0; l < ranks_.size(); ++l) {
      const std::string suffix = "_l" + std::to_string(l);
      const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
        return register_parameter(name, detail::empty_parameter({rows, columns}, {}));
      };
      layer made;
      made.input_down = add("weight_ih" + suffix + "_down", 4 * ranks_[l].input, input_size(l));
      made.input_up = add("weight_ih" + suffix + "_up", gates, ranks_[l].input);
      if (options.bias()) made.bias = register_parameter("bias" + suffix, torch::empty({gates}));
      made.hidden_down = add("weight_hh" + suffix + "_down", 4 * ranks_[l].hidden, options.hidden_size());
      made.hidden_up = add("weight_hh" + suffix + "_up", gates, ranks_[l].hidden);
      made.geometry = c10::make_intrusive<detail::lstm_geometry>();
      made.geometry->input = input_size(l);
      made.geometry->hidden = options.hidden_size();
      made.geometry->input_rank = ranks_[l].input;
      made.geometry->hidden_rank = ranks_[l].hidden;
      made.geometry->counters = counters();
      layers_.push_back(made);
    }
    reset_parameters();
  }

  /// Sets random values: each factor of each gate is Xavier uniform; biases are zero.
  void reset_parameters() {
    const torch::NoGradGuard no_grad;
    for (layer& l : layers_) {
      for (Tensor* t : {&l.input_down, &l.input_up, &l.hidden_down, &l.hidden_up}) {
        detail::fill_uniform(*t, std::sqrt(6.0 / static_cast<double>(t->size(0) / 4 + t->size(1))));
      }
      if (l.bias.defined()) l.bias.zero_();
    }
  }

  /// Text for errors: "LowRankLSTM in -> hidden".
  std::string describe() const {
    return detail::message({"LowRankLSTM ", options.input_size(), " -> ", options.hidden_size()});
  }

  /// Writes sizes, ranks and options, as libtorch's modules do.
  void pretty_print(std::ostream& stream) const override {
    stream << "pufferfish::host_torch::LowRankLSTM(" << options.input_size() << ", " << options.hidden_size()
           << ", num_layers=" << options.num_layers() << ", ranks=";
    for (std::size_t l = 0; l < ranks_.size(); ++l) {
      stream << (l > 0 ? ", " : "") << ranks_[l].input << "/" << ranks_[l].hidden;
    }
    stream << ", bias=" << (options.bias() ? "true" : "false")
           << ", batch_first=" << (options.batch_first() ? "true" : "false") << ")";
  }

  /// Computes the sequence of hidden states, as torch::nn::LSTM does. `input` has the shape
  /// [steps][batch][input_size], or [batch][steps][input_size] with options.batch_first(); the output has the
  /// same order, with hidden_size values per step. `before` is the initial state (h, c), each
  /// [layers][batch][hidden_size]; without it the state is zero. Returns the output and the state (h, c)
  /// after the last step. In training mode dropout (options.dropout()) is applied between layers. Throws
  /// shape_error if a shape does not match.
  std::tuple<Tensor, state> forward(const Tensor& input, torch::optional<state> before = {}) {
    const std::int64_t batch_dimension = options.batch_first() ? 0 : 1;
    if (input.dim() != 3 || input.size(2) != options.input_size()) {
      detail::throw_error<shape_error>({describe(), ": input ", detail::shape_text(input),
                                        " is not a sequence of three dimensions, the last one ",
                                        options.input_size()});
    }
    if (before) {
      check_state(std::get<0>(*before), input.size(batch_dimension));
      check_state(std::get<1>(*before), input.size(batch_dimension));
    }
    Tensor x = options.batch_first() ? input.transpose(0, 1) : input;
    std::vector<Tensor> h, c;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const auto at = static_cast<std::int64_t>(l);
      const auto result = run_layer(layers_[l], x, before ? std::get<0>(*before)[at] : Tensor(),
                                    before ? std::get<1>(*before)[at] : Tensor());
      x = result[0];
      h.push_back(result[1]);
      c.push_back(result[2]);
      if (l + 1 < layers_.size()) x = torch::dropout(x, options.dropout(), is_training());
    }
    return {options.batch_first() ? x.transpose(0, 1) : x, state{torch::stack(h), torch::stack(c)}};
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::optional<std::tuple<Tensor, Tensor>>())})

 private:
  // Parameters of one layer, and what its passes share.
  struct layer {
    Tensor input_down, input_up, bias, hidden_down, hidden_up;
    detail::lstm_geometry_ptr geometry;
  };

  // The list input, hidden, input, hidden, ... as pairs.
  static std::vector<lstm_ranks> pairs_of(const rank_list& ranks) {
    std::vector<lstm_ranks> pairs;
    for (std::size_t i = 0; i + 1 < ranks.size(); i += 2) pairs.push_back({ranks[i], ranks[i + 1]});
    return pairs;
  }
  // Number of inputs of layer l.
  std::int64_t input_size(std::size_t l) const {
    return l == 0 ? options.input_size() : options.hidden_size();
  }
  // Throws shape_error unless t is [layers][batch][hidden].
  void check_state(const Tensor& t, std::int64_t batch) const {
    if (t.dim() != 3 || t.size(0) != options.num_layers() || t.size(1) != batch ||
        t.size(2) != options.hidden_size()) {
      detail::throw_error<shape_error>({describe(), ": a state ", detail::shape_text(t), " where [",
                                        options.num_layers(), " x ", batch, " x ", options.hidden_size(),
                                        "] is wanted"});
    }
  }

  // Computes one layer by this library's kernels if all tensors are float or double on the CPU and of one
  // scalar, else by libtorch.
  torch::autograd::variable_list run_layer(const layer& l, const Tensor& x, const Tensor& h,
                                           const Tensor& c) {
    detail::layout_counters& counts = *counters();
    const auto contiguous = [&](const Tensor& t) {
      return t.defined() ? detail::in_order(t, torch::MemoryFormat::Contiguous, counts.inputs) : t;
    };
    const auto stored = [&](const Tensor& t) { return detail::stored(t, detail::matrix_order, counts); };
    const torch::autograd::variable_list in{contiguous(x),         contiguous(h),      contiguous(c),
                                            stored(l.input_down),  stored(l.input_up), l.bias,
                                            stored(l.hidden_down), stored(l.hidden_up)};
    for (const Tensor& t : in) {
      if (t.defined() && (!detail::is_ours(t) || t.scalar_type() != x.scalar_type())) {
        return detail::reference_lstm(in);
      }
    }
    return x.scalar_type() == torch::kFloat ? run<float>(in, l) : run<double>(in, l);
  }
  // Computes one layer in T, by the autograd function if a gradient is wanted, else without saving anything.
  template <class T>
  static torch::autograd::variable_list run(const torch::autograd::variable_list& in, const layer& l) {
    using function = detail::low_rank_lstm_function<T>;
    if (!detail::wants_gradient(in[0], in[1], in[2], in[3], in[4], in[5], in[6], in[7])) {
      return function::run(in, *l.geometry, nullptr);
    }
    return function::apply(in[0], detail::if_defined(in[1]), detail::if_defined(in[2]), in[3], in[4],
                           detail::if_defined(in[5]), in[6], in[7], l.geometry);
  }

  std::vector<lstm_ranks> ranks_;
  std::vector<layer> layers_;
};
TORCH_MODULE(LowRankLSTM);

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
