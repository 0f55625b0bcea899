// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: which layers of a Sequential share a pass, and where the tensors between them are stored.

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/nn/containers/any_layer.hpp>
#include <pufferfish/nn/containers/inner_places.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A layer and its name, which is unique in the Sequential.
template <class T, class Device>
struct named_layer {
  std::string name;
  any_layer<T, Device> layer;
};

/// The layers of a Sequential, divided into groups that run as one: a layer, or a layer and the ReLU that it
/// applies itself. Decides which outputs are kept, recomputed or overwritten. `training`: the mode of the
/// pass (training for a backward pass). Refers to the list of layers, which must outlive it.
template <class T, class Device>
class sequence_plan {
 public:
  sequence_plan(const std::vector<named_layer<T, Device>>& layers, bool training)
      : layers_(layers), training_(training) {}

  /// Number of layers.
  std::size_t size() const { return layers_.size(); }

  /// Layers begin .. end - 1, which run as one: a layer, or a layer that fuses with the ReLU after it.
  struct group {
    std::size_t begin, end;
    bool relu;
  };
  /// The group whose first layer is layer `begin`.
  group starting_at(std::size_t begin) const {
    const bool relu = fused_at(begin);
    return {begin, std::min(size(), begin + (relu ? 2 : 1)), relu};
  }
  /// The group whose last layer is layer `end` - 1; an empty group for end = 0.
  group ending_at(std::size_t end) const {
    const bool relu = end >= 2 && fused_at(end - 2);
    return {end - std::min<std::size_t>(end, relu ? 2 : 1), end, relu};
  }

  /// The layer whose passes compute a group.
  const any_layer<T, Device>& leader(const group& g) const { return layers_[g.begin].layer; }

  /// State, on the tape, of the output of an inner group in a training step.
  struct output_state {
    T* kept = nullptr;  ///< address on the tape if the output is kept
    forward_record<T> record;
  };

  /// Whether the leader's backward pass reads its output. With a ReLU the layer's own output is never
  /// written.
  bool reads_output(const group& g) const { return !g.relu && leader(g).abilities().reads_output; }

  /// Whether the output of an inner group is kept on the tape; if not, is_recomputed tells whether
  /// it is recomputed. A layer whose own input may have moved by then does not recompute.
  bool is_kept(const group& g) const {
    return reads_output(g) || (leader(starting_at(g.end)).abilities().reads_input && !is_recomputed(g));
  }
  /// Whether the backward pass recomputes the output of an inner group, which is then not kept. Never on a
  /// device, where recomputing costs more time than the saved memory is worth.
  bool is_recomputed(const group& g) const {
    if (!std::is_same_v<Device, device::cpu> || g.end == size() || reads_output(g)) return false;
    const layer_abilities writer = leader(g).abilities(), reader = leader(starting_at(g.end)).abilities();
    return writer.recomputes && !writer.input_may_move && reader.reads_input && reader.input_may_move;
  }
  /// Whether the group before `g` is recomputed, so that g's backward pass reads a recomputed input.
  bool reads_recomputed(const group& g) const { return g.begin > 0 && is_recomputed(ending_at(g.begin)); }

  /// Whether the first group computes the moments of its output for the second one.
  bool moments_pass(const group& writer, const group& reader) const {
    return !writer.relu && !is_recomputed(writer) && reader.begin < size() &&
           leader(writer).abilities().gives_moments && leader(reader).abilities().takes_moments;
  }

  /// Whether the first group may leave its batch norm to the second one, on a device in training.
  bool norm_passes(const group& norm, const group& reader) const {
    return training_ && !std::is_same_v<Device, device::cpu> && reader.begin < reader.end &&
           leader(norm).abilities().gives_pending_norm && leader(reader).abilities().takes_pending_norm;
  }
  /// The batch norm that group `norm` may leave to the group after it, with memory from `frame`; none unless
  /// norm_passes. `shapes`: as in place_outputs.
  std::optional<ops::pending_norm<T>> pending_after(const group& norm, const extents<4>* shapes,
                                                    scratch_frame& frame) const {
    if (!norm_passes(norm, starting_at(norm.end))) return std::nullopt;
    return ops::pending_norm<T>(frame, shapes[norm.end][3]);
  }

  /// Of the operations `asked` of all groups, those of group g, with its record if that is needed. `norm`:
  /// the norm whose output g reads, `left`: pending_after(g). `outputs`: nullptr in inference.
  forward_fusion<T> fusion_of(const group& g, const forward_fusion<T>& asked,
                              std::optional<ops::pending_norm<T>>& norm,
                              std::optional<ops::pending_norm<T>>& left, output_state* outputs) const {
    forward_fusion<T> own = asked.of_layer(g.begin == 0, g.end == size());
    if (outputs != nullptr && needs_record(g)) own.record = &outputs[g.end].record;
    if (norm) own.norm_of_x = &*norm;
    if (left) own.pending = &*left;
    return own;
  }

  /// Whether the backward pass of the second group collects sums over its dx for the first group, on a
  /// device.
  bool sums_pass(const group& norm, const group& reader) const {
    return !std::is_same_v<Device, device::cpu> && norm.begin < norm.end && reader.begin < reader.end &&
           leader(norm).abilities().takes_gradient_sums && leader(reader).abilities().gives_gradient_sums;
  }
  /// The sums that the backward pass of `reader` collects for the group before it, with memory from `frame`;
  /// none unless sums_pass.
  std::optional<ops::gradient_sums<T>> sums_for(const group& reader, const output_state* outputs,
                                                scratch_frame& frame) const {
    if (!sums_pass(ending_at(reader.begin), reader)) return std::nullopt;
    const forward_record<T>& record = outputs[reader.begin].record;
    return ops::gradient_sums<T>(frame, rows_of(record.x), record.statistics, record.mask);
  }
  /// Whether the backward pass needs the record of an inner group.
  bool needs_record(const group& g) const { return is_recomputed(g) || sums_pass(g, starting_at(g.end)); }

  /// Chooses the memory of each layer's output: the tape if the output is needed in the backward pass.
  /// Otherwise the memory of the next output, if the layer between works in place, or one of two blocks in
  /// turn. The last output is y. `shapes`: of the input and of each layer's output. `outputs`: notes on the
  /// tape for place_gradients, which are filled here; nullptr in inference.
  inner_places<T> place_outputs(context<Device>& ctx, scratch_frame& frame, scratch_frame& notes,
                                const extents<4>* shapes, output_state* outputs, T* y) const {
    inner_places<T> places(frame, notes, size());
    places.put(size(), y);
    if (outputs != nullptr) std::fill_n(outputs, size() + 1, output_state{});
    for (group g = ending_at(size()); g.begin > 0; g = ending_at(g.begin)) {
      const index_t elements = volume<4>(shapes[g.begin]);
      if (outputs != nullptr && is_kept(ending_at(g.begin))) {
        outputs[g.begin].kept = ctx.tape().template push<T>(elements);
        places.put(g.begin, outputs[g.begin].kept);
      } else if (leader(g).abilities().output_in_place) {
        places.stay(g.begin, elements);
      } else {
        places.next(g.begin, elements);
      }
    }
    places.take_blocks();
    return places;
  }

  /// Places of gradients: over the output that a gradient belongs to, if the layers allow it. Otherwise dx
  /// overwrites dy if the layer can (memory that is only written must be fetched first), or gradients use two
  /// blocks in turn. The caller owns the outermost dy; it is overwritten with dx only if `over_dy` is set.
  /// `parallel`: layers read their x for the gradients of their weights while they compute dx.
  inner_places<T> place_gradients(scratch_frame& frame, scratch_frame& notes, const extents<4>* shapes,
                                  const output_state* outputs, T* over_dy, bool parallel) const {
    inner_places<T> places(frame, notes, size());
    places.put(size(), over_dy);
    bool may_stay = over_dy != nullptr;
    for (group g = ending_at(size()); g.begin > 0; g = ending_at(g.begin)) {
      const layer_abilities can = leader(g).abilities();
      T* const x = outputs[g.begin].kept;
      const bool over_input = can.gradient_over_input && !(parallel && can.input_may_move);
      if (over_input && x != nullptr && !reads_output(ending_at(g.begin))) {
        places.put(g.begin, x);
      } else if (may_stay && can.gradient_in_place && !reads_recomputed(g)) {
        places.stay(g.begin, volume<4>(shapes[g.begin]));
      } else {
        places.next(g.begin, volume<4>(shapes[g.begin]));
      }
      may_stay = true;
    }
    places.take_blocks();
    return places;
  }

 private:
  // Whether layer i applies the ReLU after it.
  bool fused_at(std::size_t i) const {
    return i + 1 < size() && layers_[i + 1].layer.abilities().is_relu &&
           layers_[i].layer.abilities().fuses_when(training_);
  }

  const std::vector<named_layer<T, Device>>& layers_;
  bool training_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
