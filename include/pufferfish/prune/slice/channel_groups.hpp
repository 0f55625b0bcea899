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
#include <pufferfish/nn/layers/channel_select.hpp>
#include <pufferfish/nn/layers/dropout.hpp>
#include <pufferfish/nn/layers/flatten.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/layers/pooling.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/nn/switch/annealing.hpp>
#include <pufferfish/prune/slice/channel_mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A group of channels: the output channels of a layer that only one other layer reads. Removing channel c
/// removes row c of the producer's matrix, entry c of its bias and of the batch norms, and the inputs p
/// channels + c of the consumer, p = 0 .. pixels - 1.
///
/// A group with stream > 0 consists of the channels of a residual stream that the branch of a block reads.
/// Its producer is the ChannelSelect at the entry of the branch. slice_channels inserts that layer if the
/// branch has none, under the name "select" below the block's. Removing channel c removes entry c of the
/// layer's list, and the inputs of the consumer. The stream, the shortcut and the sum stay whole.
struct channel_group {
  std::string producer;            ///< a convolution or linear layer, dense or low-rank; or a ChannelSelect
  std::vector<std::string> norms;  ///< batch norms between producer and consumer
  std::string consumer;            ///< a convolution or linear layer, dense or low-rank
  index_t channels = 0;            ///< number of channels of the group
  index_t pixels = 1;              ///< number of inputs of the consumer per channel: above 1 after a Flatten
  bool convolution = false;        ///< whether the producer, or the consumer of a stream, is a convolution
  index_t stream = 0;              ///< number of channels of the residual stream; 0 for outputs of a layer
  /// Name of the batch norm that scales the channels: norms[0], or if a stream has none between producer and
  /// consumer, the last one before the block, in the stem or the previous block's branch. Empty: none.
  std::string scale;
};

/// Choice of the channel groups that channel_groups lists.
enum class group_choice {
  normed,  ///< convolutions with a batch norm, as in network slimming and Early-Bird tickets
  all,     ///< also convolutions without a batch norm, and linear layers
  select,  ///< `normed`, and the channels that branches read of a residual stream with a batch norm
  any      ///< `all`, and the channels that branches read of any residual stream
};

namespace detail {

/// Name of a ChannelSelect that slice_channels inserts, below the name of its block.
inline constexpr const char* select_name = "select";

/// Numbers of inputs and outputs of a layer whose outputs are the rows of one matrix.
struct product_size {
  index_t in = 0, out = 0;   ///< numbers of inputs and outputs
  bool convolution = false;  ///< whether the layer is a convolution
};

/// Sizes of a layer that can be sliced; nullopt for others: without weights, with several matrices (LSTM,
/// attention, groups), embeddings, and layers with a residual.
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

/// Finds the Sequential that a slot holds, or branch and shortcut of a Residual. For
/// layer.visit_layers(finder, name); `first` and `shortcut` are nullptr if there is none. Sequentials inside
/// the branch are passed over.
template <class T, class Device>
class sequence_finder final : public layer_visitor<T, Device> {
 public:
  using sequence = Sequential<T, Device>;

  void on_layer(const std::string&, any_layer<T, Device>&) override {}
  void on_sequence(const std::string& prefix, sequence& layers) override {
    if (first == nullptr) first = &layers;
    if (entered_) {
      shortcut = &layers;  // the shortcut of the slot's own block, which is visited last
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
  slot* scale = nullptr;                    // the batch norm called info.scale
  Sequential<T, Device>* branch = nullptr;  // branch of a residual block that reads the channels of a stream
  bool blocked = false;                     // whether a further layer reads the channels

  /// The ChannelSelect of a branch, or nullptr.
  const ChannelSelect<T>* select() const {
    return branch == nullptr || producer == nullptr ? nullptr : producer->template target<ChannelSelect<T>>();
  }
};

/// Follows the channels through a network. Channels that leave the network or a residual block, or that reach
/// a layer of an unknown kind stay; of those that enter a block, its branch may read a part.
template <class T, class Device>
class group_finder {
 public:
  using slot = any_layer<T, Device>;
  using found_groups = std::vector<group_slots<T, Device>>;

  /// The groups below a model's root, in execution order; none if the root is not a layer. The slots are
  /// valid until the model is modified. A group whose channels also reach another layer is left out.
  template <class Root>
  static found_groups find([[maybe_unused]] Root& root, group_choice choice) {
    group_finder finder;
    if constexpr (std::same_as<Root, slot>) finder.block(finder.walk(root, {}, {}));
    found_groups result;
    for (auto& group : finder.groups_) {
      if (!group.blocked && group.consumer != nullptr && wanted(group, choice)) {
        result.push_back(std::move(group));
      }
    }
    return result;
  }

 private:
  // The input of a layer: the group of its channels (index in groups_; none: channels that stay), and the
  // last batch norm that has scaled them.
  struct flow {
    std::ptrdiff_t group = none;
    slot* norm = nullptr;
    std::string norm_name = {};
  };
  static constexpr std::ptrdiff_t none = -1;

  // Whether group_choice lists the group.
  static bool wanted(const group_slots<T, Device>& group, group_choice choice) {
    if (choice == group_choice::any) return true;
    if (group.branch != nullptr && choice != group_choice::select) return false;
    return choice == group_choice::all || (group.info.convolution && group.scale != nullptr);
  }

  group_slots<T, Device>& at(const flow& in) { return groups_[static_cast<std::size_t>(in.group)]; }
  // Marks the group of these channels as one that cannot be sliced.
  void block(const flow& in) {
    if (in.group != none) at(in).blocked = true;
  }

  // Follows channels through the layers in order.
  flow walk(Sequential<T, Device>& layers, const std::string& prefix, flow in) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      in = walk(layers[i], join_name(prefix, layers.name(i)), in);
    }
    return in;
  }

  // Follows channels through one layer and returns the flow of its output.
  flow walk(slot& layer, const std::string& name, const flow& in) {
    sequence_finder<T, Device> inside;
    layer.visit_layers(inside, name);
    if (layer.template target<Residual<T, Device>>() != nullptr) {
      block(in);
      const flow out = walk(*inside.first, name, enter(*inside.first, name, inside.shortcut_prefix, in));
      block(out);
      block(walk(*inside.shortcut, inside.shortcut_prefix, {}));
      return {none, out.norm, out.norm_name};
    }
    if (inside.first != nullptr && inside.first->describe() == layer.describe()) {
      return walk(*inside.first, name, in);
    }
    if (inside.first == nullptr && passes_channels(layer) && !mixes_unknown(layer, in)) return in;
    if (in.group != none && at(in).producer == &layer) return in;  // the ChannelSelect of a branch
    if (const auto* norm = layer.template target<BatchNorm<T>>()) return pass_norm(layer, *norm, name, in);
    if (const auto size = product_of(layer)) return pass_product(layer, *size, name, in);
    block(in);
    return {};
  }

  // The channels that a branch reads. Their number is known only once a layer is found that fixes it.
  flow enter(Sequential<T, Device>& branch, const std::string& name, const std::string& shortcut,
             const flow& in) {
    group_slots<T, Device> group;
    group.branch = &branch;
    group.info.producer = join_name(name, select_name);
    if (!branch.empty() && branch[0].template target<ChannelSelect<T>>() != nullptr) {
      group.info.producer = join_name(name, branch.name(0));
      group.producer = &branch[0];
      group.info.channels = group.select()->out_channels();
      group.info.stream = group.select()->in_channels();
    } else {
      group.blocked = shortcut == group.info.producer;
      for (std::size_t i = 0; i < branch.size(); ++i) group.blocked |= branch.name(i) == select_name;
    }
    groups_.push_back(std::move(group));
    return {static_cast<std::ptrdiff_t>(groups_.size()) - 1, in.norm, in.norm_name};
  }
  // Whether a layer puts pixels among the channels of a branch before their number is known.
  bool mixes_unknown(const slot& layer, const flow& in) {
    return in.group != none && at(in).info.channels == 0 && layer.template target<Flatten<T>>() != nullptr;
  }
  // Sets the number of channels of a branch without a ChannelSelect, which reads the whole stream.
  void fix_channels(const flow& in, index_t channels) {
    if (at(in).info.channels == 0) at(in).info.channels = at(in).info.stream = channels;
  }

  // Adds the batch norm to the group of its channels. If it has another number of channels, as after a
  // Flatten of several pixels, the group cannot be sliced.
  flow pass_norm(slot& layer, const BatchNorm<T>& norm, const std::string& name, const flow& in) {
    flow out{in.group, &layer, name};
    if (in.group == none) return out;
    fix_channels(in, norm.channels());
    if (norm.channels() != at(in).info.channels) {
      block(in);
      out.group = none;
      return out;
    }
    at(in).info.norms.push_back(name);
    at(in).norms.push_back(&layer);
    return out;
  }

  // Sets the scale of a group. Outside a branch, a batch norm scales all channels of the stream.
  void set_scale(const flow& in) {
    auto& group = at(in);
    slot* const before = group.branch != nullptr && group.norms.empty() ? in.norm : nullptr;
    const bool fits =
        before != nullptr && before->template target<BatchNorm<T>>()->channels() == group.info.stream;
    group.scale = !group.norms.empty() ? group.norms[0] : fits ? before : nullptr;
    if (group.scale != nullptr) group.info.scale = fits ? in.norm_name : group.info.norms[0];
  }

  // Makes the layer the consumer of the channels that reach it, if its inputs are a multiple of them, and the
  // producer of a new group.
  flow pass_product(slot& layer, const product_size& size, const std::string& name, const flow& in) {
    if (in.group != none) fix_channels(in, size.in);
    if (in.group != none && size.in % at(in).info.channels == 0) {
      at(in).info.consumer = name;
      at(in).info.pixels = size.in / at(in).info.channels;
      at(in).consumer = &layer;
      if (at(in).branch != nullptr) at(in).info.convolution = size.convolution;
      set_scale(in);
    }
    group_slots<T, Device> group;
    group.info.producer = name;
    group.info.channels = size.out;
    group.info.convolution = size.convolution;
    group.producer = &layer;
    groups_.push_back(std::move(group));
    return {static_cast<std::ptrdiff_t>(groups_.size()) - 1};
  }

  found_groups groups_;
};

/// The groups of a const network; its slots may be read, not replaced.
template <class Root, class Device>
auto find_groups(const model<Root, Device>& net, group_choice choice) {
  return group_finder<typename Root::value_type, Device>::find(const_cast<Root&>(net.root()), choice);
}

}  // namespace detail

/// Lists the channel groups of a network, in execution order. A group is found where the outputs of a
/// convolution or linear layer pass only through batch norms, activations, pooling, dropout, Flatten and
/// Sequentials to one convolution or linear layer. So the inner channels of residual blocks are groups (bn1
/// of a basic block, bn1 and bn2 of a bottleneck), while channels that enter or leave a block, such as those
/// of the stem and of shortcuts, are not. group_choice::select adds those that the first convolution of a
/// block reads. A layer called "select" elsewhere in a block keeps the block's branch as it is. Dense and
/// low-rank layers count alike; layers of other libraries with layer_traits do, too. Convolutions with
/// several groups neither produce nor consume such channels.
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

/// Makes the mask that keeps all channels of these groups.
inline channel_mask whole_mask(const std::vector<channel_group>& groups) {
  channel_mask mask;
  for (const channel_group& group : groups) {
    mask.push_back({group.producer, std::vector<bool>(static_cast<std::size_t>(group.channels), true)});
  }
  return mask;
}

PUFFERFISH_NAMESPACE_END
