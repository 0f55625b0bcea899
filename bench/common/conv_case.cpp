// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "conv_case.hpp"

#include <pufferfish/core/random.hpp>
#include <pufferfish/lowrank/layers/conv.hpp>

#include <utility>

namespace bench {
namespace {

namespace pf = pufferfish;

/// Random input and gradient, and memory for the results.
struct conv_data {
  conv_data(const conv_shape& shape, const extents<4>& input)
      : x(input), y(shape.output(input, "conv_case")), dy(y.shape()), dx(input) {
    pf::fill_normal(x.flat(), 1.0, pf::random_stream(7, 1));
    pf::fill_normal(dy.flat(), 1.0, pf::random_stream(7, 2));
  }
  pf::tensor<float, 4> x, y, dy, dx;
};

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
    pf::ops::conv_forward<float>(ctx_, shape_, data_.x, w_.data(), nullptr, data_.y.view());
  }
  void grad_weight() override {
    pf::ops::conv_backward_weight<float>(ctx_, shape_, data_.x, data_.dy, dw_.data(), false);
  }
  void grad_input() override {
    pf::ops::conv_backward_input<float>(ctx_, shape_, data_.dy, w_.data(), data_.dx.view());
  }
  void backward() override {
    grad_weight();
    grad_input();
  }

 private:
  pf::cpu_context& ctx_;
  conv_shape shape_;
  conv_data data_;
  pf::aligned_buffer<float> w_, dw_;
};

/// Layer: a LowRankConv of any kind.
template <class Layer>
class low_rank final : public conv_case {
 public:
  low_rank(pf::cpu_context& ctx, Layer layer, const extents<4>& input)
      : conv_case(layer.shape(), layer.rank(), input),
        ctx_(ctx),
        layer_(std::move(layer)),
        data_(layer_.shape(), input) {
    layer_.initialize(pf::random_stream(7, 3));
    ctx_.set_mode(pf::run_mode::training);
  }
  void forward() override {
    ctx_.begin_step(0);
    layer_.forward(ctx_, data_.x.view(), data_.y.view());
  }
  void prepare_backward() override { forward(); }
  void grad_weight() override { layer_.backward(ctx_, data_.dy.view(), pf::tensor_view<float, 4>()); }
  void backward() override { layer_.backward(ctx_, data_.dy.view(), data_.dx.view()); }

 private:
  pf::cpu_context& ctx_;
  Layer layer_;
  conv_data data_;
};

template <class Layer>
std::unique_ptr<conv_case> make_low_rank(pf::cpu_context& ctx, Layer layer, const extents<4>& input) {
  return std::make_unique<low_rank<Layer>>(ctx, std::move(layer), input);
}

}  // namespace

std::unique_ptr<conv_case> dense_case(pf::cpu_context& ctx, const conv_shape& shape,
                                      const extents<4>& input) {
  return std::make_unique<dense>(ctx, shape, input);
}

std::unique_ptr<conv_case> dynamic_case(pf::cpu_context& ctx, const conv_shape& shape, index_t rank,
                                        const extents<4>& input) {
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
