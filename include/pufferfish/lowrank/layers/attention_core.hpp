// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: multi-head attention between four projections of any type: low-rank factors, or layers
/// that a network may replace.

#include <array>
#include <string>
#include <utility>

#include <pufferfish/core/context.hpp>
#include <pufferfish/lowrank/layers/layer_group.hpp>
#include <pufferfish/ops/attention/attention.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Widths of an attention layer: inputs and outputs have `model` elements, queries and keys heads * key
/// elements, values heads * value elements.
struct attention_shape {
  index_t model = 512;
  index_t heads = 8;
  index_t key = 64;
  index_t value = 64;

  /// Heads that divide the model's width among them: key = value = model / heads.
  /// Rounds down if `heads` does not divide `model`. Widths are 0, which validate() rejects, if `heads` is
  /// not positive.
  static attention_shape split(index_t model, index_t heads) {
    const index_t width = heads > 0 ? model / heads : 0;
    return {model, heads, width, width};
  }
  /// Number of rows of the query and key matrices: all heads side by side.
  index_t key_width() const { return heads * key; }
  /// Number of rows of the value matrix: all heads side by side.
  index_t value_width() const { return heads * value; }
  friend bool operator==(const attention_shape&, const attention_shape&) = default;

  std::string describe() const {
    return detail::message({"width ", model, ", ", heads, " heads of ", key, " and ", value});
  }
  /// Throws shape_error, naming `who`, unless all sizes are positive.
  void validate(const char* who) const {
    if (model < 1 || heads < 1 || key < 1 || value < 1) {
      detail::throw_error<shape_error>({who, ": ", describe(), ": all must be positive"});
    }
  }
};

/// A batch of sequences: the rows of the queries and of the keys of each sequence, and the mask of the
/// keys that a query may attend to. The batch does not own its arrays: they must exist unchanged until the
/// end of the backward pass.
struct attention_batch {
  token_runs queries;
  token_runs keys;  ///< for self attention: the same as queries
  attention_mask mask;
};

namespace detail {

/// Calls a projection of type Slot. Primary template: layers with forward, backward and backward_add.
template <class Slot>
struct projection {
  template <class T, class Device>
  static void forward(context<Device>& ctx, const Slot& slot, const tensor_view<const T, 2>& x,
                      const tensor_view<T, 2>& y) {
    slot.forward(ctx, x, y);
  }
  template <class T, class Device>
  static void backward(context<Device>& ctx, const Slot& slot, const tensor_view<const T, 2>& dy,
                       const tensor_view<T, 2>& dx, bool add) {
    add ? slot.backward_add(ctx, dy, dx) : slot.backward(ctx, dy, dx);
  }
  /// See projection_group.
  template <class T, class Device>
  static bool forward_group(context<Device>& ctx, layer_group<Slot> slots, const tensor_view<const T, 2>& x,
                            std::span<const tensor_view<T, 2>> ys) {
    Slot::forward_group(ctx, slots, x, ys);
    return true;
  }
  template <class T, class Device>
  static bool backward_group(context<Device>& ctx, layer_group<Slot> slots,
                             std::span<const tensor_view<const T, 2>> dys,
                             std::span<const group_gradient<T>> to) {
    Slot::backward_group(ctx, slots, dys, to);
    return true;
  }
};

/// Passes of several projections of one input. Forward passes run from the last slot to the first, backward
/// passes from the first to the last. A device computes equal products of all slots in one launch if
/// projection<Slot> has passes of groups for the layers in the slots: its functions forward_group and
/// backward_group return whether they have computed the pass; both return the same.
template <class T, class Slot>
struct projection_group {
  template <class Device>
  static void forward(context<Device>& ctx, layer_group<Slot> slots, const tensor_view<const T, 2>& x,
                      std::span<const tensor_view<T, 2>> ys) {
    if constexpr (!ops::is_cpu<Device>) {
      if (projection<Slot>::template forward_group<T>(ctx, slots, x, ys)) return;
    }
    for (std::size_t i = slots.size(); i-- > 0;) {
      projection<Slot>::template forward<T>(ctx, *slots[i], x, ys[i]);
    }
  }
  template <class Device>
  static void backward(context<Device>& ctx, layer_group<Slot> slots,
                       std::span<const tensor_view<const T, 2>> dys, std::span<const group_gradient<T>> to) {
    if constexpr (!ops::is_cpu<Device>) {
      if (projection<Slot>::template backward_group<T>(ctx, slots, dys, to)) return;
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
      projection<Slot>::template backward<T>(ctx, *slots[i], dys[i], to[i].dx,
                                             to[i].add && !to[i].dx.is_null());
    }
  }
};

/// y = output(attention(query(x), key(memory), value(memory))).
/// A forward pass in training keeps q, k, v, the heads' outputs and the attention weights on the tape.
template <class T, class Slot>
class attention_core {
 public:
  attention_core(const attention_shape& shape, Slot q, Slot k, Slot v, Slot o)
      : slots{std::move(q), std::move(k), std::move(v), std::move(o)}, shape_(shape) {}

  /// The projections of queries, keys, values and the output, in this order.
  std::array<Slot, 4> slots;

  const attention_shape& shape() const { return shape_; }
  std::string describe() const { return "attention, " + shape_.describe(); }

  /// Dropout probability of attention weights in training; initially 0.
  double dropout() const { return dropout_; }
  /// Sets the dropout probability. Throws value_error outside [0, 1).
  void set_dropout(double probability) {
    if (!(probability >= 0.0 && probability < 1.0)) {
      throw_error<value_error>({"attention: dropout probability ", probability, " is not in [0, 1)"});
    }
    dropout_ = probability;
  }

  /// x: rows of the queries; memory: rows of the keys (x itself for self attention); y: shaped like x. All
  /// are dense, with `model` columns. y must not overlap x or memory. x and memory must not change until the
  /// backward pass. For rows that belong to no sequence, y is the output projection of zeros.
  /// Throws shape_error if the shapes do not fit, and whatever the projections throw.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& memory,
               const attention_batch& batch, const tensor_view<T, 2>& y) const {
    check(x.shape(), memory.shape(), y.shape());
    scratch_frame frame(ctx.scratch());
    const group_block<T> projected = projections_of(x.extent(0), memory.extent(0));
    const auto take = [&](index_t size) {
      return ctx.training() ? ctx.tape().template push<T>(size) : frame.take<T>(size);
    };
    T* const block = take(projected.size());
    const tensor_view<T, 2> v = projected.at(block, 0), k = projected.at(block, 1),
                            q = projected.at(block, 2);
    const tensor_view<T, 2> heads(take(q.extent(0) * shape_.value_width()),
                                  {q.extent(0), shape_.value_width()});
    taped kept;
    kept.in = input(ctx, q, k, v, batch);
    kept.weights = nullptr;
    if (ctx.training()) {
      kept.weights = ctx.tape().template push<parameter_t<T>>(ops::attention_kept_size(ctx, kept.in));
    }
    kept.x = x;
    kept.memory = memory;
    kept.heads = heads;
    const std::array<tensor_view<T, 2>, 3> to{v, k, q};
    const std::size_t grouped = group_size(x, memory);
    if (grouped < 3) projection<Slot>::template forward<T>(ctx, slots[0], x, q);
    group::forward(ctx, group_slots(grouped), memory, std::span(to).first(grouped));
    ops::attention_forward<T>(ctx, kept.in, heads, kept.weights);
    projection<Slot>::template forward<T>(ctx, slots[3], heads, y);
    if (ctx.training()) ctx.tape().push_value(*this, kept);
  }

  /// Inference with given keys and values (a cache): `keys` rows x heads key, `values` rows x heads value,
  /// the outputs of the key and value projections. The context must be in inference mode, which is not
  /// checked. y: shaped like x, must not overlap any input. Throws shape_error.
  template <class Device>
  void forward_cached(context<Device>& ctx, const tensor_view<const T, 2>& x,
                      const tensor_view<const T, 2>& keys, const tensor_view<const T, 2>& values,
                      const attention_batch& batch, const tensor_view<T, 2>& y) const {
    check(x.shape(), x.shape(), y.shape());
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> q = frame.take<T>(extents<2>{x.extent(0), shape_.key_width()});
    const tensor_view<T, 2> heads = frame.take<T>(extents<2>{x.extent(0), shape_.value_width()});
    projection<Slot>::template forward<T>(ctx, slots[0], x, q);
    ops::attention_forward<T>(ctx, input(ctx, q, keys, values, batch), heads, nullptr);
    projection<Slot>::template forward<T>(ctx, slots[3], heads, y);
  }

  /// Computes from dy the gradients of the projections, dx and dmemory. dx and dmemory are dense and are
  /// overwritten or, with add and add_memory, added to; a null view is skipped. For self attention pass dx as
  /// dmemory, too; `add_memory` is ignored then.
  /// Throws state_error without a forward pass in training mode, shape_error if dy or a gradient does not
  /// fit.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx,
                bool add, const tensor_view<T, 2>& dmemory, bool add_memory) const {
    const auto kept = ctx.tape().template pop_value<taped>(*this);
    check(kept.x.shape(), kept.memory.shape(), dy.shape());
    scratch_frame frame(ctx.scratch());
    const group_block<T> projected = projections_of(kept.x.extent(0), kept.memory.extent(0));
    T* const block = frame.take<T>(projected.size());
    const tensor_view<T, 2> dv = projected.at(block, 0), dk = projected.at(block, 1),
                            dq = projected.at(block, 2);
    const tensor_view<T, 2> dheads = frame.take<T>(kept.heads.shape());
    projection<Slot>::template backward<T>(ctx, slots[3], dy, dheads, false);
    ops::attention_backward<T>(ctx, kept.in, kept.weights, dheads, dq, dk, dv, kept.heads);
    const bool one = dx.data() == dmemory.data();
    const std::array<tensor_view<const T, 2>, 3> of{dv, dk, dq};
    const std::array<group_gradient<T>, 3> to{
        {{dmemory, one ? add : add_memory}, {dmemory, true}, {dx, one || add}}};
    const std::size_t grouped = group_size(kept.x, kept.memory);
    group::backward(ctx, group_slots(grouped), std::span(of).first(grouped), std::span(to).first(grouped));
    if (grouped < 3)
      projection<Slot>::template backward<T>(ctx, slots[0], dq, dx, !dx.is_null() && (one || add));
    ctx.tape().template pop<parameter_t<T>>(ops::attention_kept_size(ctx, kept.in));
    ctx.tape().template pop<T>(kept.heads.shape());
    ctx.tape().template pop<T>(projected.size());
  }

  /// Multiply-accumulates of both attention products for one sequence, without the projections.
  index_t product_macs(index_t queries, index_t keys) const {
    return queries * keys * (shape_.key_width() + shape_.value_width());
  }

 private:
  struct taped {
    ops::attention_input<T> in;
    parameter_t<T>* weights;
    tensor_view<const T, 2> x, memory, heads;
  };

  using group = projection_group<T, Slot>;

  // Number of projections that read the memory: values and keys and, in self attention, queries.
  static std::size_t group_size(const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& memory) {
    return x.data() == memory.data() && x.shape() == memory.shape() ? 3 : 2;
  }
  // The first `count` of the slots of values, keys and queries, the order of the backward pass. In the arena
  // of a network, parameters have this order.
  struct slot_list {
    std::array<const Slot*, 3> slots;
    std::size_t count;
    operator layer_group<Slot>() const { return {slots.data(), count}; }
  };
  slot_list group_slots(std::size_t count) const { return {{&slots[2], &slots[1], &slots[0]}, count}; }
  // Matrices of values, keys and queries, in this order.
  group_block<T> projections_of(index_t rows, index_t memory_rows) const {
    group_block<T> block;
    block.push(memory_rows, shape_.value_width());
    block.push(memory_rows, shape_.key_width());
    block.push(rows, shape_.key_width());
    return block;
  }

  // Collects the operands of the attention products. Draws a random stream if weights are dropped.
  template <class Device>
  ops::attention_input<T> input(context<Device>& ctx, const tensor_view<const T, 2>& q,
                                const tensor_view<const T, 2>& k, const tensor_view<const T, 2>& v,
                                const attention_batch& batch) const {
    ops::attention_input<T> in{q, k, v, batch.queries, batch.keys, shape_.heads, batch.mask, {}};
    if (ctx.training() && dropout_ > 0.0) {
      in.dropout = {dropout_, ctx.next_random_stream(), static_cast<std::uint64_t>(ctx.first_sample())};
    }
    return in;
  }

  void check(const extents<2>& x, const extents<2>& memory, const extents<2>& y) const {
    if (x[1] != shape_.model || memory[1] != shape_.model || y != x) {
      throw_error<shape_error>(
          {describe(), ": queries ", x, " and keys ", memory, " do not fit each other or the output ", y});
    }
  }

  attention_shape shape_;
  double dropout_ = 0.0;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
