// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LowRankAttention`: multi-head attention with four low-rank projections up * down.
///
/// The concatenated projections of all heads are factorized as one matrix, [heads * key x model] and so on,
/// as in the paper's code. Heads are split after `up`. (Wang et al., Pufferfish, MLSys 2021, section 2. The
/// cost table of the paper counts separate factors per head.)

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <type_traits>

#include <pufferfish/lowrank/layers/attention_core.hpp>
#include <pufferfish/lowrank/layers/linear.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of one call of an attention layer on padded batches. The arrays are in the memory of the context's
/// device and must not change until the backward pass.
/// A key must satisfy all rules that are set.
struct attention_call {
  bool causal = false;                               ///< as in attention_mask
  std::span<const index_t> key_lengths;              ///< number of keys of each sequence; empty: no padding
  tensor_view<const unsigned char, 3> allowed = {};  ///< as in attention_mask
};

namespace detail {

/// The implementation of LowRankAttention for any ranks.
template <class T>
class low_rank_attention {
 public:
  using value_type = T;
  static constexpr auto low_rank_kind = layer_kind::attention;
  using ranks_type = std::array<index_t, 4>;

  /// All factors and biases are zero. `ranks`: of query, key, value and output. Throws shape_error for an
  /// invalid shape, and rank_error unless 1 <= rank <= min(rows, cols) for each matrix: query and key [heads
  /// key x model], value [heads value x model], output [model x heads value].
  low_rank_attention(const attention_shape& shape, const ranks_type& ranks, bool bias)
      // In braces: the shape is checked before it is used.
      : core_{checked(shape), low_rank_linear<T>(shape.model, shape.key_width(), ranks[0], bias),
              low_rank_linear<T>(shape.model, shape.key_width(), ranks[1], bias),
              low_rank_linear<T>(shape.model, shape.value_width(), ranks[2], bias),
              low_rank_linear<T>(shape.value_width(), shape.model, ranks[3], bias)} {}

  const attention_shape& shape() const { return core_.shape(); }
  bool is_moved_from() const { return query().is_moved_from(); }
  ranks_type ranks() const { return {query().rank(), key().rank(), value().rank(), output().rank()}; }

  /// Low-rank projections of queries, keys, values and the output, [heads key x model] and so on. The
  /// references are valid as long as the layer is neither destroyed nor moved.
  low_rank_linear<T>& query() { return core_.slots[0]; }
  low_rank_linear<T>& key() { return core_.slots[1]; }
  low_rank_linear<T>& value() { return core_.slots[2]; }
  low_rank_linear<T>& output() { return core_.slots[3]; }
  const low_rank_linear<T>& query() const { return core_.slots[0]; }
  const low_rank_linear<T>& key() const { return core_.slots[1]; }
  const low_rank_linear<T>& value() const { return core_.slots[2]; }
  const low_rank_linear<T>& output() const { return core_.slots[3]; }
  /// All four projections, in the order query, key, value, output.
  std::array<low_rank_linear<T>, 4>& projections() { return core_.slots; }
  const std::array<low_rank_linear<T>, 4>& projections() const { return core_.slots; }

  /// Dropout probability of attention weights in training; initially 0.
  double dropout() const { return core_.dropout(); }
  /// Sets the dropout probability. Throws value_error outside [0, 1). Masks depend on the context's seed,
  /// step and first_sample, and on the position of a weight, not on the number of threads.
  void set_dropout(double probability) { core_.set_dropout(probability); }

  std::string describe() const {
    return message({"LowRankAttention ranks ", ranks()[0], ", ", ranks()[1], ", ", ranks()[2], ", ",
                    ranks()[3], ", ", shape().describe()});
  }

  /// Self attention. x, y: batch x tokens x model, dense; y is overwritten and must not overlap x. In
  /// training, x and the arrays of `call` must not change until the backward pass. A query without any
  /// visible key has a zero attention result, so its y is the output projection of zeros.
  ///
  /// Throws shape_error, naming the layer, for views that do not fit or are not dense, for another number of
  /// key_lengths than sequences, for a length outside 0 .. tokens (on the CPU), and for a mask `allowed` that
  /// is too small; state_error for a moved-from layer.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 3>& x, const tensor_view<T, 3>& y,
               const attention_call& call = {}) const {
    forward(ctx, x, x, y, call);
  }
  /// Cross attention: queries from x, keys and values from `memory` (batch x own number of tokens x model,
  /// dense). y has the shape of x and must not overlap x or `memory`. Lengths and masks are those of the
  /// tokens of `memory`.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 3>& x, const tensor_view<const T, 3>& memory,
               const tensor_view<T, 3>& y, const attention_call& call) const {
    check_not_moved(query());
    check(x.shape(), memory.shape(), y.shape(), call.key_lengths.size());
    check_dense(*this, "x", x);
    check_dense(*this, "the memory", memory);
    check_dense(*this, "y", y);
    if constexpr (std::is_same_v<Device, device::cpu>) check_lengths(call, memory.extent(1));
    scratch_frame frame(ctx.scratch());
    const index_t sequences = x.extent(0);
    auto* rows = ctx.training() ? ctx.tape().template push<index_t>(4 * sequences)
                                : frame.take<index_t>(4 * sequences);
    const index_t* const lengths = call.key_lengths.empty() ? nullptr : call.key_lengths.data();
    const attention_batch batch{
        ops::make_runs(ctx, sequences, x.extent(1), nullptr, rows, rows + sequences),
        ops::make_runs(ctx, sequences, memory.extent(1), lengths, rows + 2 * sequences, rows + 3 * sequences),
        {call.causal, call.allowed}};
    core_.forward(ctx, flat(x), flat(memory), batch, flat(y));
    if (ctx.training()) ctx.tape().push_value(*this, sequences);
  }

  /// Computes from dy (shaped like y) the gradients of all factors and biases and, unless they are null
  /// views, dx (shaped like x) and dmemory (shaped like the memory). dx and dmemory are overwritten;
  /// parameter gradients are overwritten, or added to if parameter::accumulate() is true. For self attention,
  /// dx is the sum of both. The views must not overlap.
  ///
  /// Throws shape_error, and state_error without a forward pass in training mode. After an exception the tape
  /// still has a part of this pass: clear it (context::begin_step).
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 3>& dy, const tensor_view<T, 3>& dx) const {
    backward(ctx, dy, dx, dx);
  }
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 3>& dy, const tensor_view<T, 3>& dx,
                const tensor_view<T, 3>& dmemory) const {
    const auto sequences = ctx.tape().template pop_value<index_t>(*this);
    check_not_moved(query());
    check_dense(*this, "dy", dy);
    check_dense_if_wanted(*this, "dx", dx);
    check_dense_if_wanted(*this, "dmemory", dmemory);
    core_.backward(ctx, flat(dy), flat(dx), false, flat(dmemory), false);
    ctx.tape().template pop<index_t>(4 * sequences);
  }

  /// Self attention of x [batch][length][width], with a newly allocated result of the same shape. Throws the
  /// errors of the overload that writes to y.
  tensor<T, 3> forward(context<device::cpu>& ctx, const tensor_view<const T, 3>& x,
                       const attention_call& call = {}) const {
    tensor<T, 3> y(x.shape());
    forward(ctx, x, y.view(), call);
    return y;
  }
  tensor<T, 3> backward(context<device::cpu>& ctx, const tensor_view<const T, 3>& dy) const {
    tensor<T, 3> dx(dy.shape());
    backward(ctx, dy, dx.view());
    return dx;
  }

  /// Draws random factors for training from scratch, each projection as LowRankLinear::initialize does.
  void initialize(random_stream random) {
    for (std::size_t i = 0; i < 4; ++i) core_.slots[i].initialize(random.child(names[i]));
  }

  /// Multiply-accumulates of self attention over batch x tokens: projections and both attention products.
  /// The attention products count all pairs of tokens, masked or not: batch tokens^2 heads (key + value).
  index_t macs(index_t batch, index_t tokens) const {
    index_t total = batch * core_.product_macs(tokens, tokens);
    for (const low_rank_linear<T>& p : core_.slots) total += p.macs({batch, tokens, 1, p.in_features()});
    return total;
  }

  /// Calls f(name, parameter) for each parameter, in execution order: "query.down.weight", "query.up.weight",
  /// ...
  template <class F>
  void visit(F&& f) {
    for (std::size_t i = 0; i < 4; ++i) {
      core_.slots[i].visit([&](const char* name, parameter<parameter_t<T>>& p) {
        const std::string full = message({names[i], ".", name});
        f(full.c_str(), p);
      });
    }
  }

  static constexpr std::array<const char*, 4> names{"query", "key", "value", "output"};

 private:
  static const attention_shape& checked(const attention_shape& shape) {
    shape.validate("LowRankAttention");
    return shape;
  }
  template <class U>
  static tensor_view<U, 2> flat(const tensor_view<U, 3>& view) {
    return view.reshape(extents<2>{view.extent(0) * view.extent(1), view.extent(2)});
  }
  void check(const extents<3>& x, const extents<3>& memory, const extents<3>& y, std::size_t lengths) const {
    if (x[0] != memory[0] || y != x) {
      throw_error<shape_error>(
          {describe(), ": queries ", x, " and keys ", memory, " do not fit each other or the output ", y});
    }
    if (lengths != 0 && static_cast<index_t>(lengths) != x[0]) {
      throw_error<shape_error>({describe(), ": ", lengths, " lengths of keys for ", x[0], " sequences"});
    }
  }
  void check_lengths(const attention_call& call, index_t most) const {
    for (const index_t length : call.key_lengths) {
      if (length < 0 || length > most) {
        throw_error<shape_error>({describe(), ": ", length, " keys of a sequence where there are ", most});
      }
    }
  }

  attention_core<T, low_rank_linear<T>> core_;
};

}  // namespace detail

/// Multi-head attention y = W_o concat_h(softmax(Q_h K_h^T / sqrt(key)) V_h) with Q = W_q x, K = W_k m, V =
/// W_v m, where each of the four matrices is up * down (Wang et al., Pufferfish, MLSys 2021, section 2). Self
/// W_v m, where each of the four matrices is up * down (Wang et al., Pufferfish, MLSys 2021, section 2). The
/// layer computes self attention (m = x) or cross attention, with masks and dropout of the attention weights.
/// Residual connections and normalisation are left to the caller; MultiHeadAttention in nn includes them.
///
/// `Rank` fixes the rank of all four in the type; with `dynamic_rank` the ranks are constructor arguments.
/// The weights number the sum of rank (rows + cols) over the four matrices. T is float, double or bfloat16;
/// on a device also gpu::bf16 and gpu::fp16, with float parameters.
///
/// \code
/// cpu_context ctx;
/// LowRankAttention<float> layer({512, 8, 64, 64}, 128);  // model, heads, key, value; rank
/// layer.initialize({1, 1});
/// tensor<float, 3> x({4, 20, 512});      // batch x tokens x model
/// const auto y = layer.forward(ctx, x);  // self attention; masks: attention_call
/// \endcode
///
/// Copies are deep and belong to no network; gradients are not copied. The layer must not be moved between a
/// forward pass in training and its backward pass. Inference passes in different contexts may share the
/// layer; backward passes of one layer must not run at the same time.
template <class T, index_t Rank = dynamic_rank, class Device = device::cpu>
class LowRankAttention : public detail::stored_layer<detail::low_rank_attention, T, Device> {
  using base = detail::stored_layer<detail::low_rank_attention, T, Device>;
  PUFFERFISH_DETAIL_LOW_RANK_LAYER(LowRankAttention);

  /// The layer with all parameters zero, by default without biases. Throws shape_error for an invalid shape,
  /// and rank_error unless Rank fits every matrix.
  explicit LowRankAttention(const attention_shape& shape,
                            bool bias = false) requires(detail::has_rank<T, Rank, Device>)
      : base(shape, std::array<index_t, 4>{Rank, Rank, Rank, Rank}, bias) {}
  /// The layer with all parameters zero and one rank for all matrices, or the ranks of query, key, value and
  /// output. Throws shape_error for an invalid shape, rank_error for a rank that does not fit its matrix.
  LowRankAttention(const attention_shape& shape, index_t rank,
                   bool bias = false) requires(detail::takes_rank<T, Rank, Device>)
      : LowRankAttention(shape, std::array<index_t, 4>{rank, rank, rank, rank}, bias) {}
  LowRankAttention(const attention_shape& shape, const std::array<index_t, 4>& ranks,
                   bool bias = false) requires(detail::takes_rank<T, Rank, Device>)
      : base(shape, ranks, bias) {}
};

PUFFERFISH_NAMESPACE_END
