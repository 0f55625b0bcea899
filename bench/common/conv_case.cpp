// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "conv_case.hpp"

#include <pufferfish/core/random.hpp>
#include <pufferfish/lowrank/layers/conv.hpp>
#include <pufferfish/nn/network.hpp>

#include <utility>

namespace bench {
namespace {

namespace pf = pufferfish;

/// Random input and gradient, and memory for the results.
template <class T>
struct conv_data {
  conv_data(const conv_shape& shape, const extents<4>& input)
      : x(input), y(shape.output(input, "conv_case")), dy(y.shape()), dx(input) {
    pf::fill_normal(x.flat(), 1.0, pf::random_stream(7, 1));
    pf::fill_normal(dy.flat(), 1.0, pf::random_stream(7, 2));
  }
  pf::tensor<T, 4> x, y, dy, dx;
};

template <class T>
class dense final : public conv_case {
 public:
  dense(pf::cpu_context& ctx, const conv_shape& shape, const extents<4>& input)
      : conv_case(shape, 0, input),
        ctx_(ctx),
        shape_(shape),
        data_(shape, input),
        w_(shape.patch() * shape.out_channels),
        dw_(w_.size()) {
    pf::fill_normal(w_.span(), 0.05, pf::random_stream(7, 3));
  }
  void forward() override {
    pf::ops::conv_forward<T>(ctx_, shape_, data_.x, w_.data(), nullptr, data_.y.view());
  }
  void grad_weight() override {
    pf::ops::conv_backward_weight<T>(ctx_, shape_, data_.x, data_.dy, dw_.data(), false);
  }
  void grad_input() override {
    pf::ops::conv_backward_input<T>(ctx_, shape_, data_.dy, w_.data(), data_.dx.view());
  }
  void backward() override {
    grad_weight();
    grad_input();
  }

 private:
  pf::cpu_context& ctx_;
  conv_shape shape_;
  conv_data<T> data_;
  pf::aligned_buffer<T> w_;
  pf::aligned_buffer<pf::parameter_t<T>> dw_;
};

/// Layer: a LowRankConv of any kind. It is in a network, which keeps the copies of its weights in bfloat16.
template <class Layer>
class low_rank final : public conv_case {
  using T = typename Layer::value_type;

 public:
  low_rank(pf::cpu_context& ctx, Layer layer, const extents<4>& input)
      : conv_case(layer.shape(), layer.rank(), input),
        ctx_(ctx),
        data_(layer.shape(), input),
        net_(pf::any_layer<T>(std::move(layer))) {
    net_.initialize(7);
    ctx_.set_mode(pf::run_mode::training);
  }
  void forward() override {
    ctx_.begin_step(0);
    net_.forward(ctx_, data_.x.view(), data_.y.view());
  }
  void prepare_backward() override { forward(); }
  void grad_weight() override { net_.backward(ctx_, data_.dy.view()); }
  void backward() override { net_.backward(ctx_, data_.dy.view(), data_.dx.view()); }

 private:
  pf::cpu_context& ctx_;
  conv_data<T> data_;
  pf::network<T> net_;
};

template <class Layer>
std::unique_ptr<conv_case> make_low_rank(pf::cpu_context& ctx, Layer layer, const extents<4>& input) {
  return std::make_unique<low_rank<Layer>>(ctx, std::move(layer), input);
}

}  // namespace

std::unique_ptr<conv_case> dense_case(pf::cpu_context& ctx, const conv_shape& shape, const extents<4>& input,
                                      bool bf16) {
  if (bf16) return std::make_unique<dense<pf::bfloat16>>(ctx, shape, input);
  return std::make_unique<dense<float>>(ctx, shape, input);
}

std::unique_ptr<conv_case> dynamic_case(pf::cpu_context& ctx, const conv_shape& shape, index_t rank,
                                        const extents<4>& input, bool bf16) {
  if (bf16) return make_low_rank(ctx, pf::LowRankConv<pf::bfloat16>(shape, rank), input);
  return make_low_rank(ctx, pf::LowRankConv<float>(shape, rank), input);
}

std::unique_ptr<conv_case> static_case(pf::cpu_context& ctx, const conv_shape& shape, index_t rank,
                                       const extents<4>& input) {
  switch (rank) {
    case 16:
      return make_low_rank(ctx, pf::LowRankConv<float, 16>(shape), input);
    case 32:
      return make_low_rank(ctx, pf::LowRankConv<float, 32>(shape), input);
    case 64:
      return make_low_rank(ctx, pf::LowRankConv<float, 64>(shape), input);
    case 128:
      return make_low_rank(ctx, pf::LowRankConv<float, 128>(shape), input);
    default:
      return nullptr;
  }
}

}  // namespace bench
