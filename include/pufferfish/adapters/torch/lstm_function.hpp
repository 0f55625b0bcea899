// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: one layer of a LowRankLSTM as a function of autograd, by this library's kernels or by libtorch's
/// operations.

#include <cstdint>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/tensor.hpp>
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
    /// Takes an idle engine of `from`, which must outlive the object.
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

  index_t input = 0, hidden = 0, input_rank = 0, hidden_rank = 0;  ///< sizes of the layer
  counters_ptr counters;                                           ///< of the module

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

  // Guards the lists. Engines are made outside of the lock.
  std::mutex mutex;
  std::tuple<idle_list<float>, idle_list<double>> idle;
};
/// Shared by the module and the graphs of its passes, which may outlive the module.
using lstm_geometry_ptr = c10::intrusive_ptr<lstm_geometry>;

/// Computes one layer with libtorch; arguments as in low_rank_lstm_function. Returns y, h, c. Differentiable
/// any number of times. z_t = W_i x_t + b + W_h h_(t-1); i, f, o = sigmoid of their quarters of z_t, g = tanh
/// of its quarter; c_t = f c_(t-1) + i g; h_t = o tanh(c_t).
inline torch::autograd::variable_list reference_lstm(const torch::autograd::variable_list& in) {
  const Tensor &x = in[0], &bias = in[5];
  const std::int64_t hidden = in[7].size(1) / 4;
  // rows down_g up_g for each gate g, as [m][4][hidden]: a gate has `rank` columns of `down`, and `hidden`
  // columns of `up`, of its own.
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
/// state only if autograd requests them. A backward pass with create_graph uses reference_lstm.
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
  // A contiguous tensor [steps][batch][features] as a view.
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
}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
