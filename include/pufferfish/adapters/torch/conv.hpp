// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::LowRankConv2d`: a torch::nn::Module that computes a convolution of rank r.

#include <array>
#include <vector>

#include <pufferfish/adapters/torch/linear.hpp>
#include <pufferfish/ops/conv/low_rank_conv.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// The geometry of the convolution `down`, whose out_channels are groups * rank, and the layer's counters.
struct conv_geometry : torch::CustomClassHolder {
  conv_shape shape;       ///< of `down`
  counters_ptr counters;  ///< of the module
};
using geometry_ptr = c10::intrusive_ptr<conv_geometry>;

/// Computes a convolution without bias by libtorch. x: NCHW, weight: [out][in / groups][height][width].
inline Tensor torch_conv(const conv_shape& shape, const Tensor& x, const Tensor& weight) {
  return torch::conv2d(x, weight, {}, {shape.stride.height, shape.stride.width},
                       {shape.padding.height, shape.padding.width},
                       {shape.dilation.height, shape.dilation.width}, shape.groups);
}

/// Computes both convolutions by libtorch. down: [groups rank][in / groups][height][width],
/// up: [out][rank][1][1].
inline Tensor torch_low_rank_conv(const conv_shape& shape, const Tensor& x, const Tensor& down,
                                  const Tensor& up, const Tensor& bias) {
  constexpr std::array<std::int64_t, 2> ones{1, 1}, zeros{0, 0};
  return torch::conv2d(torch_conv(shape, x, down), up, bias, torch::IntArrayRef(ones),
                       torch::IntArrayRef(zeros), torch::IntArrayRef(ones), shape.groups);
}

/// Computes both convolutions with this library's kernels. x: NCHW in channels-last memory; down:
/// [height][width][in / groups][groups rank], up: [rank][out], dense. The result is channels last. t =
/// x * down, y = t up + bias. The backward pass computes dt = dy up^T and dup in one pass, then ddown and dx
/// from dt, as far as autograd wants them. It saves x, down, up, bias and t. A backward pass with
/// create_graph uses libtorch's operations.
template <class T>
class low_rank_conv_function : public torch::autograd::Function<low_rank_conv_function<T>> {
  using context = torch::autograd::AutogradContext;
  using variables = torch::autograd::variable_list;

 public:
  /// Returns y. The activation between the factors is stored in `t`, unless `t` is nullptr.
  static Tensor run(const Tensor& x, const Tensor& down, const Tensor& up, const Tensor& bias,
                    const conv_geometry& geometry, Tensor* t) {
    const auto images = images_of<T>(x);
    const extents<4> inner = geometry.shape.output(images.shape(), "LowRankConv2d");
    const auto options = x.options().memory_format(torch::MemoryFormat::ChannelsLast);
    Tensor y = torch::empty({inner[0], up.size(1), inner[1], inner[2]}, options);
    tensor_view<T, 4> kept;
    if (t != nullptr) {
      *t = torch::empty({inner[0], inner[3], inner[1], inner[2]}, options);
      kept = images_of<T>(*t);
    }
    const T* const b = bias.defined() ? bias.data_ptr<T>() : nullptr;
    if (geometry.shape.groups > 1) {
      ops::grouped_low_rank_conv_forward<T>(thread_context(), geometry.shape, images, down.data_ptr<T>(),
                                            up.data_ptr<T>(), b, kept, images_of<T>(y));
    } else {
      ops::low_rank_conv_forward<T>(thread_context(), geometry.shape, images, down.data_ptr<T>(),
                                    rows_of<T>(up), b, kept, images_of<T>(y));
    }
    return y;
  }

  /// Returns y and saves tensors for backward(): libtorch's interface of autograd functions.
  static Tensor forward(context* kept, const Tensor& x, const Tensor& down, const Tensor& up,
                        const torch::optional<Tensor>& given_bias, const geometry_ptr& geometry) {
    kept->set_materialize_grads(false);
    const Tensor bias = given_bias.value_or(Tensor());
    Tensor t;
    const Tensor y = run(x, down, up, bias, *geometry, &t);
    kept->save_for_backward({x, down, up, bias, t});
    kept->saved_data["geometry"] = c10::IValue::make_capsule(geometry);
    return y;
  }

  /// Returns the gradients of x, down, up and bias in this order, undefined ones if they are not wanted, and
  /// an undefined tensor for `geometry`.
  static variables backward(context* kept, const variables& from) {
    const variables saved = kept->get_saved_variables();
    const Tensor &x = saved[0], &down = saved[1], &up = saved[2], &bias = saved[3], &t = saved[4];
    if (!from[0].defined()) return variables(5);
    const auto geometry =
        c10::static_intrusive_pointer_cast<conv_geometry>(kept->saved_data["geometry"].toCapsule());
    const conv_shape& shape = geometry->shape;
    if (torch::GradMode::is_enabled()) {
      variables result = differentiable_backward({x, down, up, bias}, from, [&]() -> variables {
        return {torch_low_rank_conv(shape, x, down.permute(kernel_shape), up.t().unsqueeze(-1).unsqueeze(-1),
                                    bias)};
      });
      result.emplace_back();
      return result;
    }
    const Tensor dy = in_order(from[0], torch::MemoryFormat::ChannelsLast, geometry->counters->gradients);
    const auto images = images_of<T>(x), dy_images = images_of<T>(dy);
    cpu_context& ctx = thread_context();
    Tensor dx, ddown, dup, dbias;
    const bool wants_x = wants_input(*kept, saved, 0), wants_down = wants_input(*kept, saved, 1);
    if (wants_x || wants_down || wants_input(*kept, saved, 2)) {
      dup = torch::empty_like(up);
      const Tensor dt = torch::empty_like(t);
      if (shape.groups > 1) {
        ops::grouped_low_rank_conv_backward_up<T>(ctx, shape.groups, images_of<T>(t), dy_images,
                                                  up.data_ptr<T>(), dup.template data_ptr<T>(), false,
                                                  images_of<T>(dt));
      } else {
        ops::low_rank_conv_backward_up<T>(ctx, images_of<T>(t), dy_images, rows_of<T>(up), rows_of<T>(dup),
                                          false, images_of<T>(dt));
      }
      const auto dt_images = images_of<T>(dt);
      if (wants_down) {
        ddown = torch::empty_like(down);
        ops::conv_backward_weight<T>(ctx, shape, images, dt_images, ddown.template data_ptr<T>(), false);
      }
      if (wants_x) {
        dx = torch::empty(x.sizes(), x.options().memory_format(torch::MemoryFormat::ChannelsLast));
        ops::conv_backward_input<T>(ctx, shape, dt_images, down.data_ptr<T>(), images_of<T>(dx));
      }
      if (!wants_input(*kept, saved, 2)) dup = Tensor();
    }
    if (wants_input(*kept, saved, 3)) {
      dbias = torch::empty_like(bias);
      ops::bias_gradient<T>(ctx, ops::detail::as_rows(dy_images), dbias.template data_ptr<T>(), false);
    }
    return {dx, ddown, dup, dbias, Tensor()};
  }
};

}  // namespace detail

/// A convolution whose weight, unrolled to out x (in kernel height kernel width), is the product up down:
/// `down` is the same convolution with `rank` output channels and no bias, `up` a 1x1 convolution with the
/// bias (Wang et al., Pufferfish, MLSys 2021, section 2). With groups, each group's matrix [out / groups][in
/// / groups kernel height kernel width] has factors of rank `rank`, and both convolutions have these groups.
/// Parameters: `down` [groups rank][in / groups][height][width], `up` [out][rank][1][1] and `bias` [out],
/// with the strides of the kernels' memory order.
///
/// Dense float and double tensors on the CPU are computed by pufferfish's kernels, forward and backward:
/// without a copy if they are channels last, else with one (statistics() counts them). The result is channels
/// last. All other tensors are computed by libtorch's operations.
///
///     host_torch::LowRankConv2d conv(torch::nn::Conv2dOptions(64, 128, 3).padding(1), 16);     // rank 16
///     torch::Tensor y = conv->forward(x.contiguous(torch::MemoryFormat::ChannelsLast));
class LowRankConv2dImpl : public detail::low_rank_module<LowRankConv2dImpl> {
 public:
  /// Makes a layer with random weights. Throws value_error for options that conv_shape has no fields for
  /// (padding other than zeros), rank_error unless 1 <= rank <= min(out / groups, in / groups kernel height
  /// kernel width).
  LowRankConv2dImpl(const torch::nn::Conv2dOptions& given, std::int64_t rank)
      : LowRankConv2dImpl(detail::shape_of(given, "LowRankConv2d"), rank, given.bias()) {}
  /// Makes a layer from the geometry of the dense convolution. Throws shape_error for a geometry that is not
  /// valid (conv_shape::validate), and rank_error as the other constructor.
  LowRankConv2dImpl(const conv_shape& dense, std::int64_t rank, bool with_bias)
      : shape_(dense), rank_(rank), with_bias_(with_bias) {
    dense.validate("LowRankConv2d");
    check_rank("LowRankConv2d, " + dense.describe(), dense.group_outputs(), dense.patch(), rank);
    reset();
  }
  /// Makes a module with the sizes and requires_grad of a dense layer, rank ranks.at(0), and random weights.
  LowRankConv2dImpl(const torch::nn::Conv2dImpl& dense, const rank_list& ranks)
      : LowRankConv2dImpl(detail::module_traits<torch::nn::Conv2dImpl>::shape(dense), ranks.at(0),
                          dense.bias.defined()) {
    detail::train_as(parameters(), {dense.weight, dense.weight, dense.bias});
  }

  /// The geometry of the dense convolution.
  const conv_shape& shape() const { return shape_; }
  /// The rank of each group's matrix.
  std::int64_t rank() const { return rank_; }

  /// Makes new parameters with random values.
  void reset() override {
    geometry_ = c10::make_intrusive<detail::conv_geometry>();
    geometry_->shape = shape_;
    geometry_->shape.out_channels = shape_.groups * rank_;
    geometry_->counters = counters();
    register_factors(
        {shape_.groups * rank_, shape_.group_inputs(), shape_.kernel.height, shape_.kernel.width},
        {shape_.out_channels, rank_, 1, 1}, with_bias_);
    reset_parameters();
  }

  /// Initializes each factor as a convolution of its own: uniform in +-1/sqrt(fan in).
  void reset_parameters() {
    detail::fill_uniform(down, 1.0 / std::sqrt(static_cast<double>(shape_.patch())));
    detail::fill_uniform(up, 1.0 / std::sqrt(static_cast<double>(rank_)));
    detail::fill_uniform(bias, 1.0 / std::sqrt(static_cast<double>(rank_)));
  }

  /// Text for errors: rank and geometry.
  std::string describe() const {
    return detail::message({"LowRankConv2d rank ", rank_, ", ", shape_.describe()});
  }

  /// Writes geometry and rank, as libtorch's modules do.
  void pretty_print(std::ostream& stream) const override {
    stream << "pufferfish::host_torch::LowRankConv2d(" << shape_.describe() << ", rank=" << rank_
           << ", bias=" << (with_bias_ ? "true" : "false") << ")";
  }

  /// Computes the convolution of x, [batch][in][height][width] or without the batch dimension. Throws
  /// shape_error for other shapes.
  Tensor forward(const Tensor& x) {
    if (x.dim() == 3) return forward(x.unsqueeze(0)).squeeze(0);
    if (x.dim() != 4) {
      detail::throw_error<shape_error>(
          {describe(), ": input ", detail::shape_text(x), " is not [batch x channels x height x width]"});
    }
    shape_.output(extents<4>{x.size(0), x.size(2), x.size(3), x.size(1)},
                  *this);  // throws if it does not fit
    if (!detail::is_ours(x) || x.scalar_type() != down.scalar_type() || !down.device().is_cpu()) {
      return detail::torch_low_rank_conv(geometry_->shape, x, down, up, bias);
    }
    return x.scalar_type() == torch::kFloat ? run<float>(x) : run<double>(x);
  }

  /// Computes the products up down of the groups: the dense convolution's weight
  /// [out][in / groups][height][width], without the bias. The result is differentiable.
  Tensor to_dense() const {
    return up.reshape({shape_.groups, shape_.group_outputs(), rank_})
        .bmm(down.reshape({shape_.groups, rank_, shape_.patch()}))
        .reshape({shape_.out_channels, shape_.group_inputs(), shape_.kernel.height, shape_.kernel.width});
  }

  /// The factors of each group's matrix. They share the parameters' memory and are detached from autograd.
  std::vector<detail::factor_tensors> factors() const {
    std::vector<detail::factor_tensors> all;
    detail::append_factors(all, down, up, shape_.groups);
    return all;
  }

 private:
  // Computes in T, by the autograd function if a gradient is wanted, else without saving anything.
  template <class T>
  Tensor run(const Tensor& given) {
    using function = detail::low_rank_conv_function<T>;
    detail::layout_counters& counts = *counters();
    const Tensor x = detail::in_order(given, torch::MemoryFormat::ChannelsLast, counts.inputs);
    const Tensor d = detail::stored(down, detail::kernel_order, counts);
    const Tensor u = detail::stored(up.flatten(1), detail::matrix_order, counts);
    if (detail::wants_gradient(x, d, u, bias))
      return function::apply(x, d, u, detail::if_defined(bias), geometry_);
    return function::run(x, d, u, bias, *geometry_, nullptr);
  }

  conv_shape shape_;
  std::int64_t rank_;
  bool with_bias_;
  detail::geometry_ptr geometry_;
};
TORCH_MODULE(LowRankConv2d);

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
