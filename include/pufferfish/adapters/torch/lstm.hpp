// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::LowRankLSTM`: a torch::nn::Module that computes the function of
/// torch::nn::LSTM with low-rank matrices.

#include <memory>
#include <mutex>
#include <ostream>
#include <tuple>
#include <utility>

#include <pufferfish/adapters/torch/linear.hpp>
#include <pufferfish/lowrank/layers/lstm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// A layer's sizes and counters, and the engines (pufferfish::LowRankLSTM) that compute it. One call at a
/// time uses an engine and attaches its tensors to it. Engines own no weights. Several passes may run at the
/// same time: each takes an idle engine, or makes a new one.
struct lstm_geometry : torch::CustomClassHolder {
  template <class T>
  using engine = pufferfish::LowRankLSTM<T>;

  /// An engine for one call; the destructor puts it back into the idle list.
  template <class T>
  class borrowed {
   public:
    explicit borrowed(lstm_geometry& from) : from_(from), engine_(from.take<T>()) {}
    ~borrowed() {
      const std::lock_guard lock(from_.mutex);
      std::get<idle_list<T>>(from_.idle).push_back(std::move(engine_));
    }
    borrowed(const borrowed&) = delete;
    borrowed& operator=(const borrowed&) = delete;
    engine<T>& operator*() { return *engine_; }
    engine<T>* operator->() { return engine_.get(); }

   private:
    lstm_geometry& from_;
    std::unique_ptr<engine<T>> engine_;
  };

  index_t input = 0, hidden = 0, input_rank = 0, hidden_rank = 0;
  counters_ptr counters;

 private:
  template <class T>
  using idle_list = std::vector<std::unique_ptr<engine<T>>>;

  // Removes an engine from the idle list, or makes one.
  template <class T>
  std::unique_ptr<engine<T>> take() {
    {
      const std::lock_guard lock(mutex);
      auto& list = std::get<idle_list<T>>(idle);
      if (!list.empty()) {
        auto one = std::move(list.back());
        list.pop_back();
        return one;
      }
    }
    return std::make_unique<engine<T>>(input, hidden, input_rank, hidden_rank);
  }

  std::mutex mutex;
  std::tuple<idle_list<float>, idle_list<double>> idle;
};
using lstm_geometry_ptr = c10::intrusive_ptr<lstm_geometry>;

/// Computes one layer with libtorch; arguments as in low_rank_lstm_function. Returns y, h, c. Differentiable
/// any number of times.
inline torch::autograd::variable_list reference_lstm(const torch::autograd::variable_list& in) {
  const Tensor &x = in[0], &bias = in[5];
  const std::int64_t hidden = in[7].size(1) / 4;
  const auto side = [&](const Tensor& rows, const Tensor& down, const Tensor& up) {
    const std::int64_t rank = up.size(0);
    return torch::einsum("mgr,rgh->mgh",
                         {rows.matmul(down).reshape({-1, 4, rank}), up.reshape({rank, 4, hidden})});
  };
  const std::int64_t steps = x.size(0), batch = x.size(1);
  Tensor z = side(x.reshape({steps * batch, x.size(2)}), in[3], in[4]).reshape({steps, batch, 4, hidden});
  if (bias.defined()) z = z + bias.reshape({4, hidden});
  Tensor h = in[1].defined() ? in[1] : torch::zeros({batch, hidden}, x.options());
  Tensor c = in[2].defined() ? in[2] : torch::zeros({batch, hidden}, x.options());
  std::vector<Tensor> all;
  for (std::int64_t step = 0; step < steps; ++step) {
    const Tensor gates = z[step] + side(h, in[6], in[7]);
    const Tensor i = gates.select(1, 0).sigmoid(), f = gates.select(1, 1).sigmoid();
    const Tensor g = gates.select(1, 2).tanh(), o = gates.select(1, 3).sigmoid();
    c = f * c + i * g;
    h = o * c.tanh();
    all.push_back(h);
  }
  return {steps > 0 ? torch::stack(all) : torch::empty({0, batch, hidden}, x.options()), h, c};
}

/// Computes one layer with this library's kernels. x: steps x batch x in; h, c: batch x hidden, or both
/// undefined; input side: down [in][4 rank], up [rank][4 hidden]; bias: 4 hidden or undefined; hidden side:
/// down, up. All are dense, with the gates side by side in each row. Returns y, h and c after the last step.
/// The backward pass always computes the gradients of all factors and the bias; those of x and of the first
/// state only if autograd wants them. A backward pass with create_graph uses reference_lstm.
template <class T>
class low_rank_lstm_function : public torch::autograd::Function<low_rank_lstm_function<T>> {
  using context = torch::autograd::AutogradContext;
  using variables = torch::autograd::variable_list;
  using engine = pufferfish::LowRankLSTM<T>;
  static constexpr std::size_t inputs = 8;

 public:
  /// `kept`: receives four tensors that the backward pass needs; nullptr: there will be no backward pass.
  /// `in`: x, h, c, input down, input up, bias, hidden down, hidden up.
  static variables run(const variables& in, lstm_geometry& geometry, variables* kept) {
    lstm_geometry::borrowed<T> layer(geometry);
    const Tensor& x = in[0];
    const std::int64_t steps = x.size(0), batch = x.size(1), rows = steps * batch, hidden = geometry.hidden;
    const variables out{torch::empty({steps, batch, hidden}, x.options()),
                        torch::empty({batch, hidden}, x.options()),
                        torch::empty({batch, hidden}, x.options())};
    const variables made{torch::empty({rows, layer->input_kept_width()}, x.options()),
                         torch::empty({rows, layer->hidden_kept_width()}, x.options()),
                         torch::empty({rows, 4 * hidden}, x.options()),
                         torch::empty({kept != nullptr ? rows : batch, hidden}, x.options())};
    const Tensor bias = in[5].defined() ? in[5] : torch::zeros({4 * hidden}, x.options());
    attach(*layer, in, bias, variables(5));
    layer->forward_keeping(thread_context(), sequence(x), views_of(in[1], in[2], made), sequence(out[0]),
                           {rows_of<T>(out[1]), rows_of<T>(out[2])});
    if (kept != nullptr) *kept = made;
    return out;
  }

  /// libtorch's interface of autograd functions: saves the inputs, the engine's four tensors and y.
  static variables forward(context* kept, const Tensor& x, const torch::optional<Tensor>& h,
                           const torch::optional<Tensor>& c, const Tensor& input_down, const Tensor& input_up,
                           const torch::optional<Tensor>& bias, const Tensor& hidden_down,
                           const Tensor& hidden_up, const lstm_geometry_ptr& geometry) {
    kept->set_materialize_grads(false);
    variables saved{x,        h.value_or(Tensor()),    c.value_or(Tensor()), input_down,
                    input_up, bias.value_or(Tensor()), hidden_down,          hidden_up};
    variables made;
    const variables out = run(saved, *geometry, &made);
    saved.insert(saved.end(), made.begin(), made.end());
    saved.push_back(out[0]);
    kept->save_for_backward(saved);
    kept->saved_data["geometry"] = c10::IValue::make_capsule(geometry);
    return out;
  }

  /// `from`: gradients of y, h and c, undefined ones count as zeros. Returns the gradients of the eight
  /// inputs, and none for `geometry`.
  static variables backward(context* kept, const variables& from) {
    const variables saved = kept->get_saved_variables();
    const variables in(saved.begin(), saved.begin() + inputs);
    if (!from[0].defined() && !from[1].defined() && !from[2].defined()) return variables(inputs + 1);
    if (torch::GradMode::is_enabled()) {
      variables result = differentiable_backward(in, from, [&] { return reference_lstm(in); });
      result.emplace_back();
      return result;
    }
    const auto geometry =
        c10::static_intrusive_pointer_cast<lstm_geometry>(kept->saved_data["geometry"].toCapsule());
    const Tensor &x = in[0], &y = saved.back();
    const auto dense = [&](const Tensor& t, const Tensor& like) {
      return t.defined() ? in_order(t, torch::MemoryFormat::Contiguous, geometry->counters->gradients)
                         : torch::zeros_like(like);
    };
    const Tensor dy = dense(from[0], y);
    // The backward pass overwrites the gates, which a retained graph needs again.
    variables made(saved.begin() + inputs, saved.end() - 1);
    made[2] = made[2].clone();

    variables out(inputs + 1);
    for (const std::size_t i : {3U, 4U, 6U, 7U}) out[i] = torch::empty_like(in[i]);
    const Tensor bias = in[5].defined() ? in[5] : torch::zeros({4 * geometry->hidden}, x.options());
    out[5] = torch::empty_like(bias);
    if (wants_input(*kept, in, 0)) out[0] = torch::empty_like(x);
    recurrent_state<const T> from_after;
    Tensor dh, dc;
    if (from[1].defined() || from[2].defined()) {
      const Tensor shape = torch::empty({x.size(1), geometry->hidden}, x.options());
      dh = dense(from[1], shape);
      dc = dense(from[2], shape);
      from_after = {rows_of<T>(dh), rows_of<T>(dc)};
    }
    recurrent_state<T> to_before;
    if (in[1].defined() && (wants_input(*kept, in, 1) || wants_input(*kept, in, 2))) {
      out[1] = torch::empty_like(in[1]);
      out[2] = torch::empty_like(in[2]);
      to_before = {rows_of<T>(out[1]), rows_of<T>(out[2])};
    }
    lstm_geometry::borrowed<T> layer(*geometry);
    attach(*layer, in, bias, {out[3], out[4], out[5], out[6], out[7]});
    layer->backward_kept(thread_context(), sequence(x), sequence(y), views_of(in[1], in[2], made),
                         sequence(dy), out[0].defined() ? sequence(out[0]) : tensor_view<T, 3>(), from_after,
                         to_before);
    if (!in[5].defined()) out[5] = Tensor();
    return out;
  }

 private:
  static tensor_view<T, 3> sequence(const Tensor& t) {
    return {t.data_ptr<T>(), {t.size(0), t.size(1), t.size(2)}};
  }
  // The tensors that the engine keeps between its passes, as views.
  static typename engine::kept_values views_of(const Tensor& h, const Tensor& c, const variables& made) {
    typename engine::kept_values kept;
    if (h.defined()) {
      kept.h_before = rows_of<T>(h);
      kept.c_before = rows_of<T>(c);
    }
    kept.input = rows_of<T>(made[0]);
    kept.hidden = rows_of<T>(made[1]);
    kept.gates = rows_of<T>(made[2]);
    kept.cells = rows_of<T>(made[3]);
    return kept;
  }
  /// Attaches the parameters' values and the places of their gradients, in the order of `visit`.
  static void attach(engine& layer, const variables& in, const Tensor& bias, const variables& gradients) {
    const variables values{in[3], in[4], bias, in[6], in[7]};
    std::size_t next = 0;
    layer.visit([&](const char*, parameter<T>& p) {
      T* gradient = gradients[next].defined() ? gradients[next].data_ptr<T>() : nullptr;
      p.attach(values[next].data_ptr<T>(), gradient);
      ++next;
    });
  }
};

}  // namespace detail

/// The rank of one layer's four input matrices, and that of its four hidden matrices.
struct lstm_ranks {
  std::int64_t input = 0;
  std::int64_t hidden = 0;
};

/// torch::nn::LSTM of one or more layers, with each gate's two matrices as products up down. Layer 0, 1, ...
/// has the parameters `weight_ih_l0_down` [4 rank][in], `weight_ih_l0_up` [4 hidden][rank], `bias_l0` [4
/// hidden] (if options.bias(); the sum of libtorch's two), `weight_hh_l0_down` and `weight_hh_l0_up`. The
/// gates i, f, g, o are stacked in the first dimension; strides are those of the kernels' memory order.
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
  /// Throws value_error for two directions or a projection, rank_error for a rank outside 1 .. min(in,
  /// hidden) on the input side or outside 1 .. hidden on the hidden side. Two forms: one rank for both sides
  /// of all layers, or a pair of ranks for each layer. Throws value_error for another number of pairs.
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
  /// A module with the sizes and requires_grad of a dense layer, and random weights. `ranks`: input and
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

  torch::nn::LSTMOptions options;

  /// The factors of all layers' matrices, each layer in the order of layer_traits.
  std::vector<detail::factor_tensors> factors() const {
    std::vector<detail::factor_tensors> all;
    for (const layer& l : layers_) {
      detail::append_factors(all, l.input_down, l.input_up, 4);
      detail::append_factors(all, l.hidden_down, l.hidden_up, 4);
    }
    return all;
  }
  /// The biases of all layers' gates.
  std::vector<Tensor> biases() const {
    std::vector<Tensor> all;
    for (const layer& l : layers_) {
      const auto gates = l.bias.defined() ? l.bias.detach().tensor_split(4) : std::vector<Tensor>(4);
      all.insert(all.end(), gates.begin(), gates.end());
    }
    return all;
  }

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

  /// Each factor of each gate is Xavier uniform; biases are zero.
  void reset_parameters() {
    const torch::NoGradGuard no_grad;
    for (layer& l : layers_) {
      for (Tensor* t : {&l.input_down, &l.input_up, &l.hidden_down, &l.hidden_up}) {
        detail::fill_uniform(*t, std::sqrt(6.0 / static_cast<double>(t->size(0) / 4 + t->size(1))));
      }
      if (l.bias.defined()) l.bias.zero_();
    }
  }

  std::string describe() const {
    return detail::message({"LowRankLSTM ", options.input_size(), " -> ", options.hidden_size()});
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "pufferfish::host_torch::LowRankLSTM(" << options.input_size() << ", " << options.hidden_size()
           << ", num_layers=" << options.num_layers() << ", ranks=";
    for (std::size_t l = 0; l < ranks_.size(); ++l) {
      stream << (l > 0 ? ", " : "") << ranks_[l].input << "/" << ranks_[l].hidden;
    }
    stream << ", bias=" << (options.bias() ? "true" : "false")
           << ", batch_first=" << (options.batch_first() ? "true" : "false") << ")";
  }

  /// As torch::nn::LSTM. input: steps x batch x in (batch x steps x in with batch_first); `before`: h and c,
  /// each layers x batch x hidden. Returns the output and the state after the last step. Throws shape_error.
  /// Dropout (options.dropout()) is applied between layers in training mode. Without `before` the state is
  /// zero. The returned state is layers x batch x hidden for h and for c.
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
  struct layer {
    Tensor input_down, input_up, bias, hidden_down, hidden_up;
    detail::lstm_geometry_ptr geometry;
  };

  static std::vector<lstm_ranks> pairs_of(const rank_list& ranks) {
    std::vector<lstm_ranks> pairs;
    for (std::size_t i = 0; i + 1 < ranks.size(); i += 2) pairs.push_back({ranks[i], ranks[i + 1]});
    return pairs;
  }
  std::int64_t input_size(std::size_t l) const {
    return l == 0 ? options.input_size() : options.hidden_size();
  }
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
