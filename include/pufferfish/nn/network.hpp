// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `network`: a model from one tensor to another.

#include <string>
#include <vector>

#include <pufferfish/nn/model.hpp>
#include <pufferfish/nn/sequential.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// One computing layer of a network with its shapes for a given input.
struct layer_summary {
  std::string name;
  std::string description;
  extents<4> input{};
  extents<4> output{};
  index_t parameters = 0;
  index_t macs = 0;  ///< of convolutions and matrix products
};

/// A network from one image (or vector) batch to another: a model whose root is a layer, usually a
/// sequential.
template <class T, class Device = device::cpu>
class network : public model<any_layer<T, Device>, Device> {
  using base = model<any_layer<T, Device>, Device>;

 public:
  using layer_type = any_layer<T, Device>;
  using base::base;
  using base::root;

  /// NHWC extents of the output for an input. Throws shape_error that names the layer.
  extents<4> output_shape(const extents<4>& input) const { return root().output_shape(input); }

  /// x, y: NHWC, dense; y has output_shape(x) and does not overlap x. In training mode x and y stay as they
  /// are until the backward pass.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    root().forward(ctx, x, y);
  }
  /// The same with a newly allocated result.
  tensor<T, 4> forward(context<Device>& ctx, const tensor_view<const T, 4>& x) const {
    tensor<T, 4> y(output_shape(x.shape()));
    forward(ctx, x, y.view());
    return y;
  }

  /// Computes from dy (shaped as y) the gradient arena, and dx (shaped as x) unless it is a null view.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                const tensor_view<T, 4>& dx = {}) const {
    root().backward(ctx, dy, dx);
  }

  /// The computing layers in execution order, with parameters and multiply-accumulates for this input.
  std::vector<layer_summary> summary(const extents<4>& input) const {
    struct summarizer final : layer_tracer<T, Device> {
      void on_trace(const std::string& name, const layer_type& layer, const extents<4>& in,
                    const extents<4>& out) override {
        counter count;
        const_cast<layer_type&>(layer).visit_state(count);
        result.push_back({name, layer.describe(), in, out, count.parameters, layer.macs(in)});
      }
      std::vector<layer_summary> result;
    } tracer;
    root().trace(tracer, input);
    return std::move(tracer.result);
  }

  /// Multiply-accumulates of convolutions and matrix products in one forward pass.
  index_t macs(const extents<4>& input) const { return root().macs(input); }

 private:
  struct counter final : state_visitor<parameter_t<T>> {
    void on_parameter(const std::string&, parameter<parameter_t<T>>& p) override { parameters += p.size(); }
    void on_buffer(const std::string&, state_buffer<parameter_t<T>>&) override {}
    index_t parameters = 0;
  };
};

PUFFERFISH_NAMESPACE_END
