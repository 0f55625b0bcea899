// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `slice_channels`: removes channels from a network. `mask_channels`: sets them to zero instead.

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/prune/slice/layer_slices.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Result of slice_channels: the layers that have changed, and numbers of channels and parameters.
struct channel_slicing {
  /// A group that lost channels.
  struct row {
    std::string layer;              ///< name of the layer that produces the channels
    index_t before = 0, after = 0;  ///< numbers of channels
  };
  std::vector<row> rows;  ///< the groups that lost channels, in execution order
  /// Names of low-rank layers that are dense now, because the smaller matrix cannot have their rank.
  std::vector<std::string> made_dense;
  index_t parameters_before = 0, parameters_after = 0;  ///< numbers of parameters of the whole network
};

/// Number of output channels of a layer, or of channels that the branch of a residual block reads.
struct layer_width {
  std::string layer;     ///< name of the layer or of the ChannelSelect
  index_t channels = 0;  ///< number of channels
  friend bool operator==(const layer_width&, const layer_width&) = default;
};

namespace detail {

/// A channel group of the network, and its marks in a mask.
template <class T, class Device>
struct marked_group {
  group_slots<T, Device> group;
  const std::vector<bool>* keep;
};

/// The groups of a model that a mask lists. Throws state_error, naming the layer, for a listed layer that
/// produces no group, value_error for a layer that is listed twice, for a wrong number of marks, and if no
/// channel remains.
template <class T, class Device>
std::vector<marked_group<T, Device>> find_marked(std::vector<group_slots<T, Device>> groups,
                                                 const channel_mask& mask) {
  std::vector<marked_group<T, Device>> result;
  for (auto& group : groups) {
    for (const channel_marks& marks : mask) {
      if (marks.layer != group.info.producer) continue;
      if (marks.channels() != group.info.channels) {
        throw_error<value_error>(
            {marks.layer, ": ", marks.channels(), " marks for ", group.info.channels, " channels"});
      }
      if (marks.kept() == 0) {
        throw_error<value_error>({marks.layer, ": none of its ", marks.channels(),
                                  " channels would remain: the network needs at least one"});
      }
      result.push_back({std::move(group), &marks.keep});
      break;
    }
  }
  for (const channel_marks& marks : mask) {
    if (std::count_if(mask.begin(), mask.end(), [&](const auto& one) { return one.layer == marks.layer; }) >
        1) {
      throw_error<value_error>({marks.layer, ": the mask lists this layer twice"});
    }
    if (std::none_of(result.begin(), result.end(),
                     [&](const auto& one) { return one.group.info.producer == marks.layer; })) {
      throw_error<state_error>({marks.layer,
                                ": the network has no layer of this name whose channels can be "
                                "removed (see channel_groups)"});
    }
  }
  return result;
}

/// The layers of a network that replace others, all made before any is replaced, so that an error leaves the
/// network unchanged. Call add() for each group, then apply().
template <class T, class Device>
class slice_plan {
 public:
  using slot = any_layer<T, Device>;

  /// Adds a group of which the marked channels remain. Reads values, on the host.
  void add(const group_slots<T, Device>& group, const std::vector<bool>& keep) {
    const std::vector<index_t> channels = marked(keep);
    for (slot* norm : group.norms) {
      auto& old = *norm->template target<BatchNorm<T>>();
      made_.emplace_back(norm, sliced_norm(old, static_cast<index_t>(channels.size()), &channels));
    }
    part_of(group.consumer, group.info.consumer).in = marked(keep, group.info.pixels);
    if (group.branch == nullptr) {
      part_of(group.producer, group.info.producer).out = channels;
    } else if (group.select() == nullptr) {
      read(group, channels);
    } else {
      const std::vector<index_t> old = group.select()->channels();
      std::vector<index_t> of_stream;
      for (const index_t c : channels) of_stream.push_back(old[static_cast<std::size_t>(c)]);
      read(group, of_stream);
    }
  }
  /// Adds a group that gets this number of channels. Its parameters are set to their initial constants.
  void add(const group_slots<T, Device>& group, index_t channels) {
    for (slot* norm : group.norms) {
      const auto& old = *norm->template target<BatchNorm<T>>();
      made_.emplace_back(norm, BatchNorm<T>(channels, old.eps(), old.momentum()));
    }
    part_of(group.consumer, group.info.consumer).new_in = channels * group.info.pixels;
    if (group.branch == nullptr) {
      part_of(group.producer, group.info.producer).new_out = channels;
    } else if (channels == group.info.stream) {
      whole_.push_back(group.branch);
    } else {
      read(group, marked(std::vector<bool>(static_cast<std::size_t>(channels), true)));
    }
  }

  /// Makes the remaining layers, then replaces all. Returns the names of layers that were low-rank and are
  /// dense now. Nothing has changed if it throws.
  std::vector<std::string> apply() {
    std::vector<std::string> made_dense;
    for (part& one : parts_) {
      made_.emplace_back(one.at, made(one));
      if (!one.at->ranks().empty() && made_.back().second.ranks().empty()) made_dense.push_back(one.name);
    }
    for (auto& [at, layer] : made_) *at = std::move(layer);
    // Branches change last, since this moves their slots.
    for (auto& [branch, layer] : selected_) branch->insert(0, select_name, std::move(layer));
    for (Sequential<T, Device>* branch : whole_) branch->erase(0);
    return made_dense;
  }

 private:
  // Inputs and outputs of a layer: lists of those that remain, or numbers above 0. If neither is set, all
  // remain.
  struct part {
    slot* at;
    std::string name;
    std::vector<index_t> in, out;
    index_t new_in = 0, new_out = 0;
  };
  // Gives a branch a ChannelSelect for these channels of the stream.
  void read(const group_slots<T, Device>& group, const std::vector<index_t>& of_stream) {
    ChannelSelect<T> layer(group.info.stream, of_stream);
    if (group.select() != nullptr) {
      made_.emplace_back(group.producer, std::move(layer));
    } else {
      selected_.emplace_back(group.branch, std::move(layer));
    }
  }
  // The changes of a layer, which may be consumer of one group and producer of another.
  part& part_of(slot* at, const std::string& name) {
    for (part& one : parts_) {
      if (one.at == at) return one;
    }
    return parts_.emplace_back(part{at, name, {}, {}});
  }
  // Makes the new layer of a part.
  static slot made(part& one) {
    if (one.new_in == 0 && one.new_out == 0) {
      return sliced(*one.at, one.name, one.in.empty() ? nullptr : &one.in,
                    one.out.empty() ? nullptr : &one.out);
    }
    const product_size size = *product_of(*one.at);
    return resized(*one.at, one.name, one.new_in > 0 ? one.new_in : size.in,
                   one.new_out > 0 ? one.new_out : size.out);
  }

  std::vector<part> parts_;
  std::vector<std::pair<slot*, slot>> made_;  // slots, and the layers that replace theirs
  std::vector<std::pair<Sequential<T, Device>*, slot>> selected_;
  std::vector<Sequential<T, Device>*> whole_;  // branches that lose their ChannelSelect
};

}  // namespace detail

/// Removes the channels without a mark from the network: rows of their producers, entries of biases and batch
/// norms, inputs of their consumers (channel_group). All other values and buffers are copied bit for bit, and
/// names stay. A branch that is to read fewer channels of a residual stream gets a ChannelSelect, or a
/// shorter list in the one it has. Where the removed channels are zero after the batch norm and activation
/// (mask_channels), outputs and gradients of the remaining parameters stay the same up to rounding, in
/// training and inference.
///
/// Low-rank layers keep their rank; one whose smaller matrix cannot have that rank becomes dense. A sliced
/// network can be factorized, merged and sliced again like any other. Parameters move to new memory:
/// optimizers and exchanges made before throw state_error from now on; sliced_values carries optimizer states
/// over. Every rank of a distributed run slices by an equal mask.
///
/// Throws state_error, naming the layer, for a layer in the mask that is the producer of no channel group,
/// value_error for a wrong number of marks, a layer that is listed twice and a layer without a remaining
/// channel, rank_error for a LowRankNormConv that cannot keep its rank; the network is unchanged then.
///
/// \code
/// channel_mask mask = prune_channels(norm_scales(net), {.share = 0.5});
/// const channel_slicing done = slice_channels(net, mask);
/// SGD<float> optimizer(make_optimizer_target(net.store()), options);
/// \endcode
template <class Root, class Device>
channel_slicing slice_channels(model<Root, Device>& net, const channel_mask& mask) {
  using T = typename Root::value_type;
  channel_slicing report;
  report.parameters_before = net.parameter_count();
  net.modify([&](Root& root) {
    detail::slice_plan<T, Device> plan;
    for (const auto& [group, keep] :
         detail::find_marked(detail::group_finder<T, Device>::find(root, group_choice::any), mask)) {
      const index_t after = std::count(keep->begin(), keep->end(), true);
      if (after == group.info.channels) continue;
      report.rows.push_back({group.info.producer, group.info.channels, after});
      plan.add(group, *keep);
    }
    report.made_dense = plan.apply();
  });
  report.parameters_after = net.parameter_count();
  return report;
}

/// Sets the channels without a mark to zero, so that the network computes the function that slice_channels
/// would leave. Zeroed are weight and bias of the batch norms of each channel, or without a batch norm the
/// row of the producer and its bias; for channels of a residual stream, the inputs of the consumer. Serves to
/// compare both and to try a mask. Throws the errors of slice_channels.
template <class Root, class Device>
void mask_channels(model<Root, Device>& net, const channel_mask& mask) {
  using T = typename Root::value_type;
  using P = parameter_t<T>;
  net.on_host([&](Root& root) {
    for (const auto& [group, keep] :
         detail::find_marked(detail::group_finder<T, Device>::find(root, group_choice::any), mask)) {
      for (index_t c = 0; c < group.info.channels; ++c) {
        if ((*keep)[static_cast<std::size_t>(c)]) continue;
        for (index_t p = 0; p < group.info.pixels && group.branch != nullptr; ++p) {
          detail::clear_input(*group.consumer, p * group.info.channels + c);
        }
        if (group.branch != nullptr) continue;
        for (auto* norm : group.norms) {
          const detail::norm_buffers<P> of(*norm->template target<BatchNorm<T>>());
          of.weight[c] = of.bias[c] = P{};
        }
        if (group.norms.empty()) detail::clear_output(*group.producer, c);
      }
    }
  });
}

/// Converts an array that has one element for each parameter element of `before`, in storage order (an
/// optimizer's state, for example), to the storage order after change(copy of before), which slices the copy.
/// `change` must only copy and leave out values: for a layer that becomes dense (channel_slicing::made_dense)
/// the result has no meaning. Throws shape_error for another number of values; exceptions of `change` are
/// passed on. CPU only.
///
/// \code
/// const network<float> before = net;
/// slice_channels(net, mask);
/// SGD<float> fresh(make_optimizer_target(net.store()), options);
/// std::ranges::copy(sliced_values<float>(before, old.velocity(), [&](auto& n) { slice_channels(n, mask); }),
///                   fresh.velocity().begin());
/// fresh.set_steps(old.steps());
/// \endcode
template <class T, class Root, class Change>
std::vector<T> sliced_values(const model<Root, device::cpu>& before, std::span<const T> values,
                             Change&& change) {
  if (static_cast<index_t>(values.size()) != before.parameter_count()) {
    detail::throw_error<shape_error>(
        {"sliced_values: ", values.size(), " values for ", before.parameter_count(), " parameters"});
  }
  auto copy = before;
  std::ranges::copy(values, copy.store().values().begin());
  change(copy);
  const std::span<const T> result = std::as_const(copy.store()).values();
  return {result.begin(), result.end()};
}

/// The widths of all channel groups of a network (group_choice::any), in execution order. They describe the
/// changes of slice_channels to the structure of the model: apply_widths(other, layer_widths(net)) gives
/// another network of the model the same structure.
template <class Root, class Device>
std::vector<layer_width> layer_widths(const model<Root, Device>& net) {
  std::vector<layer_width> result;
  for (const channel_group& group : channel_groups(net, group_choice::any)) {
    result.push_back({group.producer, group.channels});
  }
  return result;
}

/// Gives a network the structure that slice_channels would give it: the listed layers get these numbers of
/// output channels, fewer or more than they have. Parameters of layers that change are zero, and all
/// parameters move to new memory. A ChannelSelect passes the first channels of its stream, and is removed if
/// it were to pass all of them. Used on ranks of a distributed run that receive the values from another rank,
/// and before a checkpoint is loaded. Throws state_error for a layer that does not produce a channel group,
/// value_error for a number below 1 or above the channels of a stream, rank_error for a LowRankNormConv that
/// cannot keep its rank; the network is unchanged then.
template <class Root, class Device>
void apply_widths(model<Root, Device>& net, const std::vector<layer_width>& widths) {
  using T = typename Root::value_type;
  net.rearrange([&](Root& root) {
    detail::slice_plan<T, Device> plan;
    const auto groups = detail::group_finder<T, Device>::find(root, group_choice::any);
    for (const layer_width& width : widths) {
      const auto at = std::find_if(groups.begin(), groups.end(),
                                   [&](const auto& group) { return group.info.producer == width.layer; });
      if (at == groups.end()) {
        detail::throw_error<state_error>(
            {width.layer, ": the network has no layer of this name whose channels can be removed"});
      }
      const index_t stream = at->info.stream;
      if (width.channels < 1 || (stream > 0 && width.channels > stream)) {
        detail::throw_error<value_error>({width.layer, ": ", width.channels, " channels, not at least 1",
                                          stream > 0 ? detail::message({" and at most ", stream}) : ""});
      }
      if (at->info.channels != width.channels) plan.add(*at, width.channels);
    }
    plan.apply();
  });
}

PUFFERFISH_NAMESPACE_END
