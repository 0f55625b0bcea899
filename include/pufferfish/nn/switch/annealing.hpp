// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Annealed truncation: the part of a weight that a truncation drops fades out over several steps, instead of
/// vanishing at once.
///
/// A layer with weight W that became a low-rank layer with factors `up` and `down` computes, for a share s
/// that falls from 1 to 0,
///
///     y = up down x + b + s R x,   R = W - up down
///
/// R is frozen: its gradient is neither computed nor exchanged. At s = 1 the network has the
/// function of the dense one. Detaching the residuals removes the cost of the products with R.
///
///     const auto dense = net;
///     factorize(net, policy);
///     attach_residuals(net, dense);
///     for (...) { set_residual_share(net, residual_share(step, steps)); ... }   // training steps
///     detach_residuals(net);

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/ops/conv/conv.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Throws value_error unless the share of a residual is in 0 .. 1.
inline void check_share(double share) {
  if (!(share >= 0.0 && share <= 1.0)) {
    throw_error<value_error>({"the share of a residual, ", share, ", is not in 0 .. 1"});
  }
}

}  // namespace detail

/// Layer y = inner(x) + s R x. `inner` is a low-rank convolution or linear layer, R the residual (dense
/// weight minus product of the factors) and s its share. R and s are buffers, so that checkpoints and
/// broadcasts contain them. The factors are trained, R is not. Parameters have the names of the inner layer's
/// parameters. A product with R costs as much as the dense layer, in both passes; at s = 0 it is left out.
/// merge() multiplies out the factors and drops R. Passes run on the CPU only.
template <class T, class Device = device::cpu>
class AnnealedLayer {
 public:
  using value_type = T;
  using layer_type = any_layer<T, Device>;

  /// Wraps `inner`, a low-rank layer. `shape` is the shape of the dense convolution that it approximates; for
  /// a linear layer, of the equivalent convolution with a 1x1 kernel. The residual R is initially zero, its
  /// share s is 1.
  AnnealedLayer(layer_type inner, const conv_shape& shape)
      : inner_(std::move(inner)), shape_(shape), residual_(shape.patch() * shape.out_channels), share_(1) {
    *share_.data() = parameter_t<T>(1);
  }

  /// The low-rank layer.
  const layer_type& inner() const { return inner_; }
  /// The residual R, stored [height][width][in / groups][out]. The caller may write it.
  std::span<parameter_t<T>> residual() { return residual_.values(); }
  /// The share s of the residual, initially 1.
  double share() const { return static_cast<double>(*share_.data()); }
  /// Sets the share s of the residual. It is rounded to the precision of the parameters. Throws value_error
  /// unless it is in 0 .. 1.
  void set_share(double share) {
    detail::check_share(share);
    *share_.data() = static_cast<parameter_t<T>>(share);
  }

  /// Text of the inner layer, with ", annealed".
  std::string describe() const { return inner_.describe() + ", annealed"; }
  /// NHWC extents of the output. Throws the shape_error of the inner layer.
  extents<4> output_shape(const extents<4>& input) const { return inner_.output_shape(input); }

  /// y = inner(x) + s R x, with residual R and share s. x and y have the shapes of the inner layer's input
  /// and output; throws shape_error if they do not fit. Uses scratch of the size of y and of R.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    inner_.forward(ctx, x, y);
    if (share() == 0.0) return;
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 4> part = frame.template take<T>(y.shape());
    ops::conv_forward<T>(ctx, shape_, x, scaled(frame), nullptr, part);
    ops::add<T>(ctx, part.flat(), y.flat());
  }
  /// dx = (dx of the inner layer) + s R^T dy, with residual R and share s. Gradients of parameters are those
  /// of the inner layer; R has none. dx may be a null view if it is not wanted; otherwise it must not overlap
  /// dy. Throws shape_error and state_error under the conditions of the inner layer.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    inner_.backward(ctx, dy, dx);
    if (share() == 0.0 || dx.is_null()) return;
    scratch_frame frame(ctx.scratch());
    ops::conv_backward_input<T>(ctx, shape_, dy, scaled(frame), dx, true);
  }
  /// What the inner layer needs for its backward pass; outputs and gradients are not computed in place.
  layer_abilities abilities() const {
    layer_abilities result;
    result.reads_input = inner_.abilities().reads_input;
    result.reads_output = inner_.abilities().reads_output;
    return result;
  }

  /// Visits the inner layer's parameters and buffers, then R and s as the buffers "residual" and
  /// "residual_share".
  void visit_state(state_visitor<parameter_t<T>>& visitor, const std::string& prefix) {
    inner_.visit_state(visitor, prefix);
    visitor.on_buffer(detail::join_name(prefix, "residual"), residual_);
    visitor.on_buffer(detail::join_name(prefix, "residual_share"), share_);
  }
  /// Initializes the inner layer; R and s stay.
  void initialize(random_stream random) { inner_.initialize(random); }
  /// Number of multiply-accumulates of the inner layer plus, unless s = 0, those of the product with R.
  index_t macs(const extents<4>& input) const {
    const extents<4> output = output_shape(input);
    const index_t pixels = output[0] * output[1] * output[2];
    return inner_.macs(input) + (share() == 0.0 ? 0 : pixels * residual_.size());
  }

  /// The factors of the inner layer (see any_layer).
  low_rank_parts<parameter_t<T>> low_rank() { return inner_.low_rank(); }
  /// The twin of the inner layer at other ranks (see any_layer).
  layer_type twin(const rank_list& ranks, std::optional<bool> bias) const { return inner_.twin(ranks, bias); }

 private:
  // s R in memory of the frame, in the type of the passes.
  const T* scaled(scratch_frame& frame) const {
    T* const weights = frame.template take<T>(residual_.size());
    const auto share = static_cast<T>(*share_.data());
    std::transform(residual_.data(), residual_.data() + residual_.size(), weights,
                   [share](parameter_t<T> r) { return static_cast<T>(share * static_cast<T>(r)); });
    return weights;
  }

  layer_type inner_;
  conv_shape shape_;
  state_buffer<parameter_t<T>> residual_, share_;
};

/// The share s of the residual after `done` of `steps` training steps: (1 + cos(pi done / steps)) / 2 for
/// done < steps, then 0. It is 1 for done <= 0 and 1/2 after half of the steps. Throws value_error if steps
/// < 1, and for a NaN.
inline double residual_share(double done, double steps) {
  if (!(steps >= 1.0) || std::isnan(done)) {
    detail::throw_error<value_error>({"residual_share: after ", done, " of ", steps, " steps"});
  }
  if (done >= steps) return 0.0;
  return 0.5 * (1.0 + std::cos(std::numbers::pi * std::max(done, 0.0) / steps));
}

namespace detail {

/// Copies the matrices of a layer into one array with the layout of AnnealedLayer::residual(),
/// [height][width][in / groups][out]. Empty for a layer without matrices.
template <class P>
std::vector<P> stored_weight(const std::vector<weight_matrix<const P>>& matrices) {
  index_t outputs = 0, size = 0, first = 0;
  for (const auto& one : matrices) {
    outputs += one.view.extent(0);
    size += one.view.size();
  }
  std::vector<P> result(static_cast<std::size_t>(size));
  for (const auto& one : matrices) {
    const index_t pixel = one.view.extent(1) * outputs;
    copy(one.view, tensor_view<P, 4>(result.data() + first, one.view.shape(),
                                     {1, outputs, one.view.extent(3) * pixel, pixel}));
    first += one.view.extent(0);
  }
  return result;
}

/// Layer visitor that collects the slots of a network that hold an AnnealedLayer.
template <class T, class Device>
class annealed_finder final : public layer_visitor<T, Device> {
 public:
  struct place {
    std::string name;
    any_layer<T, Device>* slot;
    AnnealedLayer<T, Device>* layer;
  };
  void on_layer(const std::string& name, any_layer<T, Device>& slot) override {
    if (auto* const layer = slot.template target<AnnealedLayer<T, Device>>()) {
      all.push_back({name, &slot, layer});
    }
  }
  std::vector<place> all;
};

/// Throws shape_error unless the matrices of a layer called `name` have the same sizes in both networks.
template <class P>
void check_same_weights(const std::string& name, const std::vector<weight_matrix<const P>>& net,
                        const std::vector<weight_matrix<const P>>& dense) {
  for (std::size_t i = 0; i < std::min(net.size(), dense.size()); ++i) {
    if (net[i].view.shape() == dense[i].view.shape()) continue;
    throw_error<shape_error>({"attach_residuals: ", name, " is ", net[i].view.shape(), " in the network and ",
                              dense[i].view.shape(), " in the dense network"});
  }
  if (net.size() != dense.size()) {
    throw_error<shape_error>({"attach_residuals: ", name, " has ", net.size(),
                              " matrices in the network and ", dense.size(), " in the dense network"});
  }
}

/// Compares the names of the layers of the network and of the dense network. If they differ, throws a
/// shape_error that names the first difference.
PUFFERFISH_COLD inline void check_same_layers(const std::vector<layer_info>& net,
                                              const std::vector<layer_info>& dense) {
  if (net.size() != dense.size()) {
    throw_error<shape_error>({"attach_residuals: the network has ", net.size(),
                              " layers with weights, the dense network ", dense.size()});
  }
  for (std::size_t i = 0; i < net.size(); ++i) {
    if (net[i].name != dense[i].name) {
      throw_error<shape_error>({"attach_residuals: layer ", i, " is ", net[i].name, " in the network and ",
                                dense[i].name, " in the dense network"});
    }
  }
}

/// The annealed layers of a network, in execution order.
template <class Net>
auto find_annealed(Net& net) {
  annealed_finder<typename Net::value_type, typename Net::device_type> found;
  net.visit_layers(found);
  return std::move(found.all);
}

}  // namespace detail

/// The annealed layers of a network and the ranks of their factors, in execution order.
template <class Root, class Device>
std::vector<layer_rank> annealed_layers(const model<Root, Device>& net) {
  std::vector<layer_rank> result;
  for (const auto& place : detail::find_annealed(net)) result.push_back({place.name, place.slot->ranks()});
  return result;
}

/// Gives a network the structure that attach_residuals() would give it, with residuals of zero: afterwards
/// exactly the layers in `layers` are annealed. Used on ranks of a distributed run that receive the values
/// from another rank, and before a checkpoint is loaded. Parameters keep their values, but move to new memory
/// (optimizers of the old memory throw state_error when used). Throws state_error for a name that is not a
/// low-rank convolution or linear layer with the given ranks; the network is unchanged then.
template <class Root>
void apply_residuals(model<Root, device::cpu>& net, const std::vector<layer_rank>& layers) {
  using T = typename Root::value_type;
  using layer = any_layer<T, device::cpu>;
  net.modify([&](Root& root) {
    detail::annealed_finder<T, device::cpu> annealed;
    detail::slot_finder<T, device::cpu> found;
    root.visit_layers(annealed);
    root.visit_layers(found);
    std::vector<std::pair<layer*, layer>> replacements;
    const auto is_listed = [&layers](const std::string& name) {
      return std::any_of(layers.begin(), layers.end(),
                         [&](const layer_rank& one) { return one.name == name; });
    };
    for (const auto& place : annealed.all) {
      if (!is_listed(place.name)) replacements.emplace_back(place.slot, place.layer->inner());
    }
    for (const layer_rank& one : layers) {
      const auto at = std::find_if(found.layers.begin(), found.layers.end(),
                                   [&](const layer_info& info) { return info.name == one.name; });
      const auto refuse = [&one](const char* why) {
        detail::throw_error<state_error>({"apply_residuals: ", one.name, " is no low-rank layer", why});
      };
      if (at == found.layers.end()) refuse(" of the network");
      layer& slot = *found.slots[static_cast<std::size_t>(at - found.layers.begin())];
      if (slot.ranks().empty() || slot.ranks() != one.ranks) refuse(" of these ranks");
      if (slot.template target<AnnealedLayer<T>>() != nullptr) continue;
      const auto geometry = slot.geometry();
      if (!geometry) refuse(" that has one matrix");
      replacements.emplace_back(&slot, AnnealedLayer<T>(slot, *geometry));
    }
    for (auto& [slot, replacement] : replacements) *slot = std::move(replacement);
  });
}
/// Form for a network on a GPU, where annealed layers do not exist: does nothing for an empty list, and
/// throws value_error for any other list.
template <class Root>
void apply_residuals(model<Root, device::gpu>&, const std::vector<layer_rank>& layers) {
  if (!layers.empty()) {
    detail::throw_error<value_error>(
        {"apply_residuals: ", layers.front().name, ": annealed layers compute on the CPU only"});
  }
}

/// Attaches the residual R = W - up down to each convolution and linear layer, on the main path or a
/// shortcut, that is low-rank in `net`. W is the weight of that layer in `dense`, the network before its
/// factorization. Recurrent layers and embeddings stay unchanged. Returns the annealed layers with their
/// ranks. Parameters keep their order and values, but move to new memory (optimizers of the old memory throw
/// state_error when used). Throws shape_error unless net and dense have layers with weights or factors of the
/// same sizes under the same names; net is unchanged then.
template <class Root>
std::vector<layer_rank> attach_residuals(model<Root, device::cpu>& net, model<Root, device::cpu> dense) {
  using T = typename Root::value_type;
  model<Root, device::cpu> merged = net;
  if (!low_rank_layers(net).empty()) merge(merged);
  const auto before = detail::find_slots(dense), after = detail::find_slots(merged),
             factors = detail::find_slots(net);
  detail::check_same_layers(factors.layers, before.layers);
  std::vector<layer_rank> layers;
  std::vector<std::vector<parameter_t<T>>> residuals;
  for (std::size_t i = 0; i < factors.slots.size(); ++i) {
    if (factors.slots[i]->ranks().empty() || factors.layers[i].place == layer_place::embedding) continue;
    if (!after.slots[i]->geometry()) continue;
    auto residual = detail::stored_weight(before.slots[i]->weights({}).matrices);
    const auto product = detail::stored_weight(after.slots[i]->weights({}).matrices);
    if (residual.empty()) continue;
    detail::check_same_weights(factors.layers[i].name, after.slots[i]->weights({}).matrices,
                               before.slots[i]->weights({}).matrices);
    std::transform(residual.begin(), residual.end(), product.begin(), residual.begin(), std::minus<>());
    layers.push_back({factors.layers[i].name, factors.slots[i]->ranks()});
    residuals.push_back(std::move(residual));
  }
  apply_residuals(net, layers);
  const auto made = detail::find_annealed(net);
  for (std::size_t i = 0; i < made.size(); ++i) {
    std::copy(residuals[i].begin(), residuals[i].end(), made[i].layer->residual().begin());
  }
  return layers;
}

/// Sets the share s of the residual of all annealed layers of a network; a network without annealed layers is
/// unchanged. Parameters stay in their memory, so that optimizers remain valid. Throws value_error unless the
/// share is in 0 .. 1.
template <class Root, class Device>
void set_residual_share(model<Root, Device>& net, double share) {
  detail::check_share(share);
  for (const auto& place : detail::find_annealed(net)) place.layer->set_share(share);
}

/// Drops the residuals, whatever their share is: annealed layers become plain low-rank layers. Parameters
/// keep their order and values, but move to new memory (optimizers of the old memory throw state_error when
/// used).
template <class Root, class Device>
void detach_residuals(model<Root, Device>& net) {
  apply_residuals(net, {});
}

PUFFERFISH_NAMESPACE_END
