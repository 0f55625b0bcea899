// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `channel_groups`: finds the channels of a network that can be removed, with all layers that hold a part of
/// them.

#include <concepts>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/flatten.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/layers/pooling.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/nn/switch/annealing.hpp>
#include <pufferfish/prune/slice/channel_mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The output channels of a layer that only one other layer reads. Removing channel c removes row c of the
/// producer's matrix, entry c of its bias and of the batch norms, and the inputs p channels + c of the
/// consumer, p = 0 .. pixels - 1.
struct channel_group {
  std::string producer;            ///< a convolution or linear layer, dense or low-rank
  std::vector<std::string> norms;  ///< batch norms between producer and consumer
  std::string consumer;            ///< a convolution or linear layer, dense or low-rank
  index_t channels = 0;
  index_t pixels = 1;        ///< inputs of the consumer per channel: above 1 after a Flatten
  bool convolution = false;  ///< whether the producer is a convolution
};

/// Which channel groups are listed.
enum class group_choice {
  normed,  ///< convolutions with a batch norm: those of network slimming and Early-Bird tickets
  all      ///< also convolutions without a batch norm, and linear layers
};

namespace detail {

/// Inputs and outputs of a layer whose outputs are the rows of one matrix.
struct product_size {
  index_t in = 0, out = 0;
  bool convolution = false;
};

/// nullopt for layers that cannot be sliced: without weights, with several matrices (LSTM, attention,
/// groups), embeddings, and layers with a residual.
template <class T, class Device>
std::optional<product_size> product_of(any_layer<T, Device>& layer) {
  if (layer.template target<AnnealedLayer<T, Device>>() != nullptr) return std::nullopt;
  if (const auto* conv = layer.template target<LowRankNormConv<T, Device>>()) {
    if (conv->shape().groups > 1) return std::nullopt;
    return product_size{conv->shape().in_channels, conv->shape().out_channels, true};
  }
  const auto weights = layer.weights({});
  if (weights.rows_are_outputs && weights.matrices.size() == 1) {
    const auto& view = weights.matrices[0].view;
    return product_size{view.extent(1), view.extent(0), weights.convolution};
  }
  const auto parts = layer.low_rank();
  if (parts.rows_are_outputs && parts.factors.size() == 1) {
    const any_layer<T, Device> twin = std::as_const(layer).twin(layer.ranks());
    return product_size{parts.factors[0].down.extent(1), parts.factors[0].up.extent(0),
                        twin.template target<LowRankConv<T>>() != nullptr};
  }
  return std::nullopt;
}

/// Whether a layer treats each channel by itself and maps channels of zeros to zeros.
template <class T, class Device>
bool passes_channels(const any_layer<T, Device>& layer) {
  const auto is = [&]<class... Layers>(std::type_identity<Layers>...) {
    return ((layer.template target<Layers>() != nullptr) || ...);
  };
  return is(std::type_identity<ReLU<T>>(), std::type_identity<GELU<T>>(), std::type_identity<GELUTanh<T>>(),
            std::type_identity<Tanh<T>>(), std::type_identity<Dropout<T>>(), std::type_identity<MaxPool<T>>(),
            std::type_identity<AvgPool<T>>(), std::type_identity<GlobalAvgPool<T>>(),
            std::type_identity<Flatten<T>>());
}

/// Finds the Sequential that a slot holds, or branch and shortcut of a Residual.
template <class T, class Device>
class sequence_finder final : public layer_visitor<T, Device> {
 public:
  using sequence = Sequential<T, Device>;

  void on_layer(const std::string&, any_layer<T, Device>&) override {}
  void on_sequence(const std::string& prefix, sequence& layers) override {
    if (first == nullptr) first = &layers;
    if (entered_) {
      shortcut = &layers;  // of the slot's own block: its shortcut is visited last
      shortcut_prefix = prefix;
    }
    entered_ = false;
  }
  void enter_shortcut() override { entered_ = depth_++ == 0; }
  void leave_shortcut() override { --depth_; }

  sequence *first = nullptr, *shortcut = nullptr;
  std::string shortcut_prefix;

 private:
  int depth_ = 0;
  bool entered_ = false;
};

/// A channel group with the slots of its layers.
template <class T, class Device>
struct group_slots {
  using slot = any_layer<T, Device>;
  channel_group info;
  slot* producer = nullptr;
  std::vector<slot*> norms;
  slot* consumer = nullptr;
  bool blocked = false;  // something else reads the channels
};

/// Follows the channels through a network. Channels that enter or leave a residual block, that leave the
/// network, or that reach a layer of an unknown kind stay.
template <class T, class Device>
class group_finder {
 public:
  using slot = any_layer<T, Device>;
  using found_groups = std::vector<group_slots<T, Device>>;

  /// The groups below a model's root, in execution order; none if the root is not a layer. The slots are
  /// valid until the model is modified.
  template <class Root>
  static found_groups find([[maybe_unused]] Root& root, group_choice choice) {
    group_finder finder;
    if constexpr (std::same_as<Root, slot>) finder.block(finder.walk(root, {}, none));
    found_groups result;
    for (auto& group : finder.groups_) {
      const bool wanted =
          choice == group_choice::all || (group.info.convolution && !group.info.norms.empty());
      if (!group.blocked && group.consumer != nullptr && wanted) result.push_back(std::move(group));
    }
    return result;
  }

 private:
  // Index in groups_ of the group whose channels flow; none: channels that stay.
  using flow = std::ptrdiff_t;
  static constexpr flow none = -1;

  group_slots<T, Device>& at(flow group) { return groups_[static_cast<std::size_t>(group)]; }
  void block(flow group) {
    if (group != none) at(group).blocked = true;
  }

  flow walk(Sequential<T, Device>& layers, const std::string& prefix, flow in) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      in = walk(layers[i], join_name(prefix, layers.name(i)), in);
    }
    return in;
  }

  flow walk(slot& layer, const std::string& name, flow in) {
    sequence_finder<T, Device> inside;
    layer.visit_layers(inside, name);
    if (layer.template target<Residual<T, Device>>() != nullptr) {
      block(in);
      block(walk(*inside.first, name, none));
      block(walk(*inside.shortcut, inside.shortcut_prefix, none));
      return none;
    }
    if (inside.first != nullptr && inside.first->describe() == layer.describe()) {
      return walk(*inside.first, name, in);
    }
    if (inside.first == nullptr && passes_channels(layer)) return in;
    if (const auto* norm = layer.template target<BatchNorm<T>>()) return pass_norm(layer, *norm, name, in);
    if (const auto size = product_of(layer)) return pass_product(layer, *size, name, in);
    block(in);
    return none;
  }

  flow pass_norm(slot& layer, const BatchNorm<T>& norm, const std::string& name, flow in) {
    if (in == none) return none;
    if (norm.channels() != at(in).info.channels) {
      block(in);
      return none;
    }
    at(in).info.norms.push_back(name);
    at(in).norms.push_back(&layer);
    return in;
  }

  flow pass_product(slot& layer, const product_size& size, const std::string& name, flow in) {
    if (in != none && size.in % at(in).info.channels == 0) {
      at(in).info.consumer = name;
      at(in).info.pixels = size.in / at(in).info.channels;
      at(in).consumer = &layer;
    }
    group_slots<T, Device> group;
    group.info.producer = name;
    group.info.channels = size.out;
    group.info.convolution = size.convolution;
    group.producer = &layer;
    groups_.push_back(std::move(group));
    return static_cast<flow>(groups_.size()) - 1;
  }

  found_groups groups_;
};

/// The groups of a const network; its slots may be read, not replaced.
template <class Root, class Device>
auto find_groups(const model<Root, Device>& net, group_choice choice) {
  return group_finder<typename Root::value_type, Device>::find(const_cast<Root&>(net.root()), choice);
}

}  // namespace detail

/// The channel groups of a network, in execution order. A group is found where the outputs of a convolution
/// or linear layer pass only through batch norms, activations, pooling, dropout, Flatten and Sequentials to
/// one convolution or linear layer. So the inner channels of residual blocks are groups (bn1 of a basic
/// block, bn1 and bn2 of a bottleneck), while channels that enter or leave a block, such as those of the stem
/// and of shortcuts, are not. Dense and low-rank layers count alike; layers of other libraries with
/// layer_traits do, too. Convolutions with several groups neither produce nor consume such channels.
///
/// \code
/// for (const channel_group& group : channel_groups(net)) {
///   std::printf("%s: %td channels\n", group.producer.c_str(), group.channels);
/// }
/// \endcode
template <class Root, class Device>
std::vector<channel_group> channel_groups(const model<Root, Device>& net,
                                          group_choice choice = group_choice::normed) {
  std::vector<channel_group> result;
  for (auto& group : detail::find_groups(net, choice)) result.push_back(std::move(group.info));
  return result;
}

/// The mask that keeps all channels of these groups.
inline channel_mask whole_mask(const std::vector<channel_group>& groups) {
  channel_mask mask;
  for (const channel_group& group : groups) {
    mask.push_back({group.producer, std::vector<bool>(static_cast<std::size_t>(group.channels), true)});
  }
  return mask;
}

PUFFERFISH_NAMESPACE_END
