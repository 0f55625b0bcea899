// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `insert_factor_norms`: inserts batch norms between the factors of low-rank convolutions after
/// the switch, without changing the network's function in inference.
///
/// A LowRankConv y = up t + b, t = down x, becomes a LowRankNormConv y = up BatchNorm(t) + b whose batch norm
/// starts with
///
///     running_mean = mean of t, running_var = variance of t     (over some batches)
///     weight = sqrt(running_var + eps), bias = running_mean
///
/// so that in inference BatchNorm(t) = t up to rounding. In training each batch is shifted and scaled to that
/// mean and variance, which changes the function by as much as batches differ from each other.
///
/// On one rank, one call does all:
///
///     insert_factor_norms(ctx, net, 20, [&](index_t k) { net.forward(ctx, batch(k), y); });
///
/// A distributed run uses three calls, and averages the statistics over ranks before the third:
///
///     observe_factors(net);                          // the function stays; t is measured
///     estimate_norms(ctx, net, 20, forward);         // see nn/norm_estimation.hpp
///     settle_factor_norms(net);                      // batch norms with these statistics

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/norm_estimation.hpp>
#include <pufferfish/nn/switch/moment_probe.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Layer visitor that collects the slots of a network that hold a LowRankNormConv.
template <class T, class Device>
class norm_conv_finder final : public layer_visitor<T, Device> {
 public:
  using layer_type = LowRankNormConv<T, Device>;
  struct place {
    std::string name;
    any_layer<T, Device>* slot;
    layer_type* layer;
  };

  void on_layer(const std::string& name, any_layer<T, Device>& slot) override {
    if (auto* layer = slot.template target<layer_type>()) all.push_back({name, &slot, layer});
  }

  std::vector<place> all;
};

/// Makes a low-rank convolution of the given ranks, with all parameters zero, of the shape of the dense or
/// low-rank convolution in `slot`. Returns nullopt for a layer of another kind. Throws rank_error for
/// impossible ranks.
template <class T, class Device>
std::optional<LowRankConv<T>> as_low_rank_conv(const any_layer<T, Device>& slot, const rank_list& ranks) {
  const any_layer<T, Device> twin = slot.twin(ranks);
  if (const auto* conv = twin.template target<LowRankConv<T>>()) return *conv;
  return std::nullopt;
}

/// Copies the factors and the bias of a convolution to those of another one of the same shape and ranks.
template <class P>
void copy_factors(const low_rank_parts<P>& from, const low_rank_parts<P>& to) {
  for (std::size_t g = 0; g < from.factors.size(); ++g) {
    copy(tensor_view<const P, 4>(from.factors[g].down), to.factors[g].down);
    copy(tensor_view<const P, 4>(from.factors[g].up), to.factors[g].up);
  }
  if (!to.biases[0].is_null()) copy(tensor_view<const P, 1>(from.biases[0]), to.biases[0]);
}

/// Throws rank_error, naming the layer, unless exactly one rank is given.
inline void check_one_rank(const layer_rank& layer) {
  if (layer.ranks.size() == 1) return;
  throw_error<rank_error>({layer.name, ": ", layer.ranks.size(), " ranks for a convolution, which has one"});
}

}  // namespace detail

/// The layers of a network that are of type LowRankNormConv, with their ranks, in execution order.
template <class Root, class Device>
std::vector<layer_rank> factor_norm_layers(const model<Root, Device>& net) {
  detail::norm_conv_finder<typename Root::value_type, Device> found;
  net.visit_layers(found);
  std::vector<layer_rank> result;
  for (const auto& place : found.all) result.push_back({place.name, place.layer->rank()});
  return result;
}

/// Turns each low-rank convolution on the main path into a LowRankNormConv with a probe in place of the batch
/// norm: an identity layer that measures mean and variance of down x in training passes. Outputs are
/// unchanged up to rounding. Shortcuts of residual blocks and other layers are unchanged. Returns the layers
/// that were turned, with their ranks. The caller then calls estimate_norms and settle_factor_norms.
/// Parameters move to new memory (optimizers of the old memory throw state_error when used).
template <class Root, class Device>
std::vector<layer_rank> observe_factors(model<Root, Device>& net) {
  using T = typename Root::value_type;
  std::vector<layer_rank> result;
  net.modify([&](Root& root) {
    detail::slot_finder<T, Device> found;
    root.visit_layers(found);
    std::vector<std::pair<any_layer<T, Device>*, LowRankNormConv<T, Device>>> made;
    for (std::size_t i = 0; i < found.slots.size(); ++i) {
      any_layer<T, Device>& slot = *found.slots[i];
      const rank_list ranks = slot.ranks();
      if (ranks.empty() || found.layers[i].place != layer_place::path) continue;
      const auto conv = detail::as_low_rank_conv(slot, ranks);
      if (!conv) continue;
      LowRankNormConv<T, Device> layer(conv->shape(), conv->rank(), conv->has_bias());
      detail::copy_factors(slot.low_rank(), layer.factors());
      layer[1] = any_layer<T, Device>(detail::moment_probe<T>(conv->shape().groups * conv->rank()));
      made.emplace_back(&slot, std::move(layer));
      result.push_back({found.layers[i].name, ranks});
    }
    for (auto& [slot, layer] : made) *slot = any_layer<T, Device>(std::move(layer));
  });
  return result;
}

/// Replaces each probe of observe_factors by a batch norm that has the probe's statistics, weight
/// sqrt(running_var + eps) and bias running_mean, so that inference gives the same outputs up to rounding.
/// Returns the number of layers. Parameters move to new memory (optimizers of the old memory throw
/// state_error when used). Throws state_error, naming the layer, if no training pass has run through a probe;
/// the network is unchanged then.
template <class Root, class Device>
index_t settle_factor_norms(model<Root, Device>& net) {
  using T = typename Root::value_type;
  index_t count = 0;
  net.modify([&](Root& root) {
    detail::norm_conv_finder<T, Device> found;
    root.visit_layers(found);
    const auto probe_of = [](auto& place) {
      return (*place.layer)[1].template target<detail::moment_probe<T>>();
    };
    for (const auto& place : found.all) {
      auto* const probe = probe_of(place);
      if (probe == nullptr || *detail::norm_buffers<parameter_t<T>>(*probe).batches > 0) continue;
      detail::throw_error<state_error>(
          {"settle_factor_norms: ", place.name, ": no training pass has measured it: estimate_norms first"});
    }
    for (const auto& place : found.all) {
      auto* const probe = probe_of(place);
      if (probe == nullptr) continue;
      (*place.layer)[1] = any_layer<T, Device>(detail::settled_norm(*probe));
      ++count;
    }
  });
  return count;
}

/// Undoes observe_factors: layers with a probe become low-rank convolutions again, with their current
/// parameters. Layers that settle_factor_norms has given a batch norm stay. Parameters move to new memory.
template <class Root, class Device>
void release_factors(model<Root, Device>& net) {
  using T = typename Root::value_type;
  net.modify([](Root& root) {
    detail::norm_conv_finder<T, Device> found;
    root.visit_layers(found);
    for (const auto& place : found.all) {
      LowRankNormConv<T, Device>& layer = *place.layer;
      if (layer[1].template target<detail::moment_probe<T>>() == nullptr) continue;
      LowRankConv<T> plain(layer.shape(), layer.rank(), layer.has_bias());
      detail::copy_factors(layer.factors(), detail::parts_of(plain));
      *place.slot = any_layer<T, Device>(std::move(plain));
    }
  });
}

namespace detail {

/// Guard whose destructor removes the probes of observe_factors from the network, unless keep() was called.
template <class Net>
class probe_guard {
 public:
  explicit probe_guard(Net& net) : net_(&net) {}
  probe_guard(const probe_guard&) = delete;
  probe_guard& operator=(const probe_guard&) = delete;
  ~probe_guard() {
    if (net_ == nullptr) return;
    PUFFERFISH_DETAIL_TRY { release_factors(*net_); }
    PUFFERFISH_DETAIL_CATCH_ALL {}  // no memory for other arenas: the probes stay
  }
  /// Keeps the layers as they are.
  void keep() { net_ = nullptr; }

 private:
  Net* net_;
};

}  // namespace detail

/// Inserts batch norms on one rank in three steps: observe_factors, estimate_norms over `passes` calls of
/// forward(k), settle_factor_norms. forward(k) runs one forward pass of `net` and returns nothing (or false
/// for a pass without samples). Costs `passes` forward passes in training mode. Other batch norms are
/// estimated as well. Returns the layers with their ranks. Parameters move to new memory (optimizers of the
/// old memory throw state_error when used). If one of the steps or forward(k) throws, the exception is passed
/// on and the layers are low-rank convolutions again, with the same parameters.
template <class Root, class Device, class Forward>
std::vector<layer_rank> insert_factor_norms(context<Device>& ctx, model<Root, Device>& net, index_t passes,
                                            Forward&& forward) {
  std::vector<layer_rank> layers = observe_factors(net);
  if (layers.empty()) return layers;
  detail::probe_guard<model<Root, Device>> guard(net);
  estimate_norms(ctx, net, passes, forward);
  settle_factor_norms(net);
  guard.keep();
  return layers;
}

/// Gives a network the structure, but not the values, that insert_factor_norms would give it: afterwards
/// exactly the layers in `layers` are of type LowRankNormConv, with the given ranks. Used on ranks of a
/// distributed run that receive the values from another rank, and before a checkpoint is loaded. A listed
/// layer may be a convolution, dense or low-rank, or a LowRankNormConv; a LowRankNormConv that is not listed
/// becomes a dense convolution. Parameters of layers that change are zero, and all parameters move to new
/// memory. Throws state_error for a name that is not such a layer or is listed twice, rank_error for
/// impossible ranks; the network is unchanged then.
template <class Root, class Device>
void apply_factor_norms(model<Root, Device>& net, const std::vector<layer_rank>& layers) {
  using T = typename Root::value_type;
  using layer = any_layer<T, Device>;
  net.rearrange([&](Root& root) {
    detail::norm_conv_finder<T, Device> norms;
    detail::slot_finder<T, Device> found;
    root.visit_layers(norms);
    root.visit_layers(found);
    std::vector<std::pair<layer*, layer>> replacements;
    std::vector<std::string> done;
    const auto listed = [&](const std::string& name) {
      return std::find_if(layers.begin(), layers.end(),
                          [&name](const layer_rank& one) { return one.name == name; });
    };
    for (const auto& place : norms.all) {
      const auto at = listed(place.name);
      const conv_shape& shape = place.layer->shape();
      const bool bias = place.layer->has_bias();
      if (at == layers.end()) {
        replacements.emplace_back(place.slot, Conv<T>(shape, bias));
      } else {
        done.push_back(place.name);
        detail::check_one_rank(*at);
        const bool has_probe = (*place.layer)[1].template target<BatchNorm<T>>() == nullptr;
        if (at->ranks == rank_list{place.layer->rank()} && !has_probe) continue;
        replacements.emplace_back(place.slot, LowRankNormConv<T, Device>(shape, at->rank(), bias));
      }
    }
    for (std::size_t i = 0; i < found.slots.size(); ++i) {
      const auto at = listed(found.layers[i].name);
      if (at == layers.end()) continue;
      const rank_list before = found.slots[i]->ranks();
      const std::size_t groups = before.empty() ? found.layers[i].groups.size() : before.size();
      if (groups != 1) continue;
      detail::check_one_rank(*at);
      const auto conv = detail::as_low_rank_conv(*found.slots[i], at->ranks);
      if (!conv) continue;
      done.push_back(at->name);
      replacements.emplace_back(found.slots[i],
                                LowRankNormConv<T, Device>(conv->shape(), at->rank(), conv->has_bias()));
    }
    for (const layer_rank& one : layers) {
      if (std::count(done.begin(), done.end(), one.name) == 0) {
        detail::throw_error<state_error>(
            {"apply_factor_norms: the network has no convolution called ", one.name});
      }
      if (&one != &*listed(one.name)) {
        detail::throw_error<state_error>(
            {"apply_factor_norms: the list has two entries for layer ", one.name});
      }
    }
    for (auto& [slot, replacement] : replacements) *slot = std::move(replacement);
  });
}

PUFFERFISH_NAMESPACE_END
