// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `network`: a model from one tensor to another.

#include <string>
#include <vector>

#include <pufferfish/nn/containers/sequential.hpp>
#include <pufferfish/nn/model.hpp>

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
/// Sequential.
///
/// A network is a value: copies have arenas of their own. Passes are const and may run in several threads,
/// each with a context of its own, in inference only; training passes write the shared gradients and buffers.
///
/// \code
/// network<float> net(std::move(layers));  // a Sequential<float>
/// net.initialize(1);
/// cpu_context ctx({.threads = 2});
/// const tensor<float, 4> y = net.forward(ctx, images.view());  // inference
/// ctx.set_mode(run_mode::training);
/// ctx.begin_step(0);
/// net.forward(ctx, images.view(), logits.view());
/// net.backward(ctx, dlogits.view());  // fills net.store().gradients()
/// \endcode
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
  /// Throws shape_error that names the layer, and state_error if the network was moved from.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    root().forward(ctx, x, y);
  }
  /// Computes the output for a batch `x` into a newly allocated tensor in host memory, for networks on the
  /// CPU. In training the result must exist until the backward pass. Throws shape_error.
  tensor<T, 4> forward(context<Device>& ctx, const tensor_view<const T, 4>& x) const {
    tensor<T, 4> y(output_shape(x.shape()));
    forward(ctx, x, y.view());
    return y;
  }

  /// Computes from dy (shaped as y) the gradient arena, and dx (shaped as x) unless it is a null view.
  /// Gradients are overwritten by the first pass of a step and added to by further ones (see parameter and
  /// micro_batches). A context reports each completed gradient (context::on_gradient_ready). dx may be dy or
  /// x where the root's abilities allow it, and overlaps nothing else. Throws shape_error, and state_error
  /// without a forward pass in training mode.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                const tensor_view<T, 4>& dx = {}) const {
    root().backward(ctx, dy, dx);
  }

  /// The layers that are not containers, in execution order, with parameters and multiply-accumulates for
  /// this input. Throws a shape_error that names the first layer that does not fit.
  std::vector<layer_summary> summary(const extents<4>& input) const {
    struct summarizer final : layer_tracer<T, Device> {
      void on_trace(const std::string& name, const layer_type& layer, const extents<4>& in,
                    const extents<4>& out) override {
        index_t parameters = 0;
        detail::for_each_parameter(const_cast<layer_type&>(layer),
                                   [&](const std::string&, auto& p) { parameters += p.size(); });
        result.push_back({name, layer.describe(), in, out, parameters, layer.macs(in)});
      }
      std::vector<layer_summary> result;
    } tracer;
    root().trace(tracer, input);
    return std::move(tracer.result);
  }

  /// Multiply-accumulates of convolutions and matrix products in one forward pass.
  /// Throws shape_error if the input does not fit.
  index_t macs(const extents<4>& input) const { return root().macs(input); }
};

PUFFERFISH_NAMESPACE_END
