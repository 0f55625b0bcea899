// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::LowRankLinear`: a torch::nn::Module that computes y = up (down x) + b.

#include <cmath>
#include <ostream>
#include <vector>

#include <pufferfish/adapters/torch/traits.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// Computes both products with this library's kernels. down: [in][rank], up: [rank][out], dense; x: dense,
/// any number of dimensions. t = x down, y = t up + bias. The backward pass computes dt = dy up^T, dup = t^T
/// dy, dbias = sum of dy over rows, ddown = x^T dt and dx = dt down^T, each only if autograd wants it. It
/// saves x, down, up, bias and t. A backward pass with create_graph uses libtorch's operations.
template <class T>
class low_rank_linear_function : public torch::autograd::Function<low_rank_linear_function<T>> {
  using context = torch::autograd::AutogradContext;
  using variables = torch::autograd::variable_list;

 public:
  /// Returns y and stores t = x down in `t`.
  static Tensor run(const Tensor& x, const Tensor& down, const Tensor& up, const Tensor& bias, Tensor& t) {
    std::vector<std::int64_t> shape = x.sizes().vec();
    shape.back() = down.size(1);
    t = torch::empty(shape, x.options());
    shape.back() = up.size(1);
    Tensor y = torch::empty(shape, x.options());
    cpu_context& ctx = thread_context();
    ops::linear_forward<T>(ctx, rows_of<T>(x), rows_of<T>(down), nullptr, rows_of<T>(t));
    ops::linear_forward<T>(ctx, rows_of<T>(t), rows_of<T>(up), bias.defined() ? bias.data_ptr<T>() : nullptr,
                           rows_of<T>(y));
    return y;
  }

  /// libtorch's interface of autograd functions: returns y and saves tensors for backward().
  static Tensor forward(context* kept, const Tensor& x, const Tensor& down, const Tensor& up,
                        const torch::optional<Tensor>& given_bias, const counters_ptr& counters) {
    kept->set_materialize_grads(false);
    const Tensor bias = given_bias.value_or(Tensor());
    Tensor t;
    const Tensor y = run(x, down, up, bias, t);
    kept->save_for_backward({x, down, up, bias, t});
    kept->saved_data["counters"] = c10::IValue::make_capsule(counters);
    return y;
  }

  /// Returns the gradients of x, down, up and bias in this order, undefined ones if they are not wanted, and
  /// an undefined tensor for `counters`.
  static variables backward(context* kept, const variables& from) {
    const variables saved = kept->get_saved_variables();
    const Tensor &x = saved[0], &down = saved[1], &up = saved[2], &bias = saved[3], &t = saved[4];
    if (!from[0].defined()) return variables(5);
    if (torch::GradMode::is_enabled()) {
      variables result = differentiable_backward({x, down, up, bias}, from, [&]() -> variables {
        const Tensor y = x.matmul(down).matmul(up);
        return {bias.defined() ? y + bias : y};
      });
      result.emplace_back();
      return result;
    }
    auto counters =
        c10::static_intrusive_pointer_cast<layout_counters>(kept->saved_data["counters"].toCapsule());
    const Tensor dy = in_order(from[0], torch::MemoryFormat::Contiguous, counters->gradients);
    const auto dy_rows = rows_of<T>(dy);
    cpu_context& ctx = thread_context();
    Tensor dx, ddown, dup, dbias;
    if (wants_input(*kept, saved, 2)) {
      dup = torch::empty_like(up);
      ops::linear_backward_weight<T>(ctx, rows_of<T>(t), dy_rows, rows_of<T>(dup), false);
    }
    if (wants_input(*kept, saved, 3)) {
      dbias = torch::empty_like(bias);
      ops::bias_gradient<T>(ctx, dy_rows, dbias.data_ptr<T>(), false);
    }
    if (wants_input(*kept, saved, 0) || wants_input(*kept, saved, 1)) {
      const Tensor dt = torch::empty_like(t);
      ops::linear_backward_input<T>(ctx, dy_rows, rows_of<T>(up), rows_of<T>(dt));
      if (wants_input(*kept, saved, 1)) {
        ddown = torch::empty_like(down);
        ops::linear_backward_weight<T>(ctx, rows_of<T>(x), rows_of<T>(dt), rows_of<T>(ddown), false);
      }
      if (wants_input(*kept, saved, 0)) {
        dx = torch::empty_like(x);
        ops::linear_backward_input<T>(ctx, rows_of<T>(dt), rows_of<T>(down), rows_of<T>(dx));
      }
    }
    return {dx, ddown, dup, dbias, Tensor()};
  }
};

/// Base of the low-rank modules: counts, and parameters that stay in the kernels' memory order.
template <class Derived>
class counted_module : public torch::nn::Cloneable<Derived> {
 public:
  /// How often the layer had to copy a tensor into the kernels' memory order.
  layout_statistics statistics() const { return counters_.own->read(); }

  /// Reads the parameters from an archive written by `save`, or from any other archive with the same names
  /// and shapes. Throws libtorch's c10::Error for missing names. Afterwards the parameters are in the
  /// kernels' memory order again.
  void load(torch::serialize::InputArchive& archive) override {
    torch::nn::Module::load(archive);
    const torch::NoGradGuard no_grad;
    for (Tensor& t : this->parameters(false)) t.set_data(kernel_ordered(t.data()));
  }

 protected:
  /// The counters, which nodes of autograd's graph share.
  const counters_ptr& counters() const { return counters_.own; }

 private:
  /// A copy of a module shares its parameters until reset() makes new ones (torch::nn::Cloneable),
  /// but has counters of its own.
  struct uncopied_counters {
    counters_ptr own = c10::make_intrusive<layout_counters>();

    uncopied_counters() = default;
    uncopied_counters(const uncopied_counters&) {}
    uncopied_counters& operator=(const uncopied_counters&) { return *this; }
    ~uncopied_counters() = default;
  };
  uncopied_counters counters_;
};

/// Base of modules with one pair of factors.
template <class Derived>
class low_rank_module : public counted_module<Derived> {
 public:
  Tensor down, up;  ///< parameters, registered as "down" and "up"
  Tensor bias;      ///< undefined for a layer without one

  /// The factors of the layer's matrices, in the order of its layer_traits.
  std::vector<factor_tensors> factors() const { return {{down, up}}; }
  /// The biases of the layer's matrices, in the order of factors(); undefined tensors for no bias.
  std::vector<Tensor> biases() const { return {bias}; }

 protected:
  /// Makes and registers factors of these shapes and a bias, whose elements are not initialized.
  void register_factors(torch::IntArrayRef down_shape, torch::IntArrayRef up_shape, bool with_bias) {
    down = this->register_parameter("down", empty_parameter(down_shape, {}));
    up = this->register_parameter("up", empty_parameter(up_shape, {}));
    bias = with_bias ? this->register_parameter("bias", torch::empty({up_shape[0]}))
                     : this->register_parameter("bias", Tensor(), false);
  }
};

}  // namespace detail

/// Sizes of a LowRankLinear, in the style of libtorch's options: LowRankLinearOptions(512, 256,
/// 64).bias(false).
struct LowRankLinearOptions {
  LowRankLinearOptions(std::int64_t in_features, std::int64_t out_features, std::int64_t rank)
      : in_features_(in_features), out_features_(out_features), rank_(rank) {}
  TORCH_ARG(std::int64_t, in_features);
  TORCH_ARG(std::int64_t, out_features);
  TORCH_ARG(std::int64_t, rank);
  TORCH_ARG(bool, bias) = true;
};

/// A linear layer of rank r: y = up (down x) + b, over the last dimension of x. Parameters: `down`
/// [rank][in], `up` [out][rank] and `bias` [out], the matrices with the strides of the kernels' memory order.
///
/// Dense float and double tensors on the CPU are computed by pufferfish's kernels, forward and backward; all
/// others by libtorch's operations. Everything that a backward pass needs is in autograd's saved variables,
/// so that a layer may be called several times before it, and graphs may be retained.
///
///     host_torch::LowRankLinear fc(512, 256, 64);                        // in, out, rank
///     torch::Tensor y = fc->forward(x);                                  // x: [..., 512], y: [..., 256]
///     torch::Tensor weight = fc->to_dense();                             // [256][512]
class LowRankLinearImpl : public detail::low_rank_module<LowRankLinearImpl> {
 public:
  /// Makes a layer with random weights. Throws rank_error unless 1 <= rank <= min(in, out).
  LowRankLinearImpl(std::int64_t in_features, std::int64_t out_features, std::int64_t rank,
                    bool with_bias = true)
      : LowRankLinearImpl(LowRankLinearOptions(in_features, out_features, rank).bias(with_bias)) {}
  explicit LowRankLinearImpl(const LowRankLinearOptions& given) : options(given) {
    check_rank(describe(), given.out_features(), given.in_features(), given.rank());
    reset();
  }

  /// Makes a module with the sizes and requires_grad of a dense layer, rank ranks.at(0), and random weights.
  LowRankLinearImpl(const torch::nn::LinearImpl& dense, const rank_list& ranks)
      : LowRankLinearImpl(dense.options.in_features(), dense.options.out_features(), ranks.at(0),
                          dense.bias.defined()) {
    detail::train_as(parameters(), {dense.weight, dense.weight, dense.bias});
  }

  /// The sizes that the constructor received. forward() and describe() read them; reset() makes parameters of
  /// these sizes.
  LowRankLinearOptions options;

  /// Makes new parameters with random values.
  void reset() override {
    register_factors({options.rank(), options.in_features()}, {options.out_features(), options.rank()},
                     options.bias());
    reset_parameters();
  }

  /// Initializes each factor as a linear layer of its own: uniform in +-1/sqrt(fan in).
  void reset_parameters() {
    detail::fill_uniform(down, 1.0 / std::sqrt(static_cast<double>(options.in_features())));
    detail::fill_uniform(up, 1.0 / std::sqrt(static_cast<double>(options.rank())));
    detail::fill_uniform(bias, 1.0 / std::sqrt(static_cast<double>(options.rank())));
  }

  /// Text for errors: rank and sizes.
  std::string describe() const {
    return detail::message(
        {"LowRankLinear rank ", options.rank(), ", ", options.in_features(), " -> ", options.out_features()});
  }

  /// Writes sizes and rank, as libtorch's modules do.
  void pretty_print(std::ostream& stream) const override {
    stream << "pufferfish::host_torch::LowRankLinear(in_features=" << options.in_features()
           << ", out_features=" << options.out_features() << ", rank=" << options.rank()
           << ", bias=" << (options.bias() ? "true" : "false") << ")";
  }

  /// Returns up (down x) + b: a tensor of x's shape with out_features as the last dimension. A tensor that is
  /// not contiguous is copied first. Throws shape_error if the last dimension of x is not in_features.
  Tensor forward(const Tensor& x) {
    if (x.dim() == 0 || x.size(-1) != options.in_features()) {
      detail::throw_error<shape_error>({describe(), ": input ", detail::shape_text(x),
                                        ": its last dimension must be ", options.in_features()});
    }
    if (!detail::is_ours(x) || x.scalar_type() != down.scalar_type() || !down.device().is_cpu()) {
      return torch::nn::functional::linear(torch::nn::functional::linear(x, down), up, bias);
    }
    return x.scalar_type() == torch::kFloat ? run<float>(x) : run<double>(x);
  }

  /// Computes up down, the dense layer's weight [out][in], without the bias. The result is differentiable.
  Tensor to_dense() const { return up.matmul(down).contiguous(); }

 private:
  // Computes in T, by the autograd function if a gradient is wanted, else without saving anything.
  template <class T>
  Tensor run(const Tensor& given) {
    using function = detail::low_rank_linear_function<T>;
    detail::layout_counters& counts = *counters();
    const Tensor x = detail::in_order(given, torch::MemoryFormat::Contiguous, counts.inputs);
    const Tensor d = detail::stored(down, detail::matrix_order, counts);
    const Tensor u = detail::stored(up, detail::matrix_order, counts);
    if (detail::wants_gradient(x, d, u, bias))
      return function::apply(x, d, u, detail::if_defined(bias), counters());
    Tensor t;
    return function::run(x, d, u, bias, t);
  }
};
TORCH_MODULE(LowRankLinear);

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
