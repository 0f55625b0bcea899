// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LowRankAttention`: multi-head attention whose four projections are each up * down, and `svd_factorize` of
/// a host's attention layer.
///
/// The concatenated projections of all heads are factorized, [heads * key x model] and so on, as the paper's
/// code does; heads are split after `up` (Wang et al., Pufferfish, MLSys 2021, section 2; its table of costs
/// counts factors for each head).

#include <memory>
#include <span>
#include <vector>

#include <pufferfish/lowrank/attention_core.hpp>
#include <pufferfish/lowrank/factorize.hpp>
#include <pufferfish/lowrank/shape_check.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// What a call of an attention layer on padded batches may say. What it points to lies in the memory of the
/// context's device and must stay as it is until the backward pass.
struct attention_call {
  bool causal = false;                               ///< as attention_mask
  std::span<const index_t> key_lengths;              ///< of each sequence; empty: all keys are real
  tensor_view<const unsigned char, 3> allowed = {};  ///< as attention_mask
};

namespace detail {

/// The rank-agnostic core of LowRankAttention.
template <class T>
class low_rank_attention {
 public:
  using value_type = T;
  using ranks_type = std::array<index_t, 4>;

  low_rank_attention(const attention_shape& shape, const ranks_type& ranks, bool bias)
      // In braces: the shape is checked before it is used.
      : core_{checked(shape), low_rank_linear<T>(shape.model, shape.key_width(), ranks[0], bias),
              low_rank_linear<T>(shape.model, shape.key_width(), ranks[1], bias),
              low_rank_linear<T>(shape.model, shape.value_width(), ranks[2], bias),
              low_rank_linear<T>(shape.value_width(), shape.model, ranks[3], bias)} {}

  const attention_shape& shape() const { return core_.shape(); }
  ranks_type ranks() const { return {query().rank(), key().rank(), value().rank(), output().rank()}; }

  /// The projections: LowRankLinear layers with down(), up(), bias(), to_dense().
  low_rank_linear<T>& query() { return core_.slots[0]; }
  low_rank_linear<T>& key() { return core_.slots[1]; }
  low_rank_linear<T>& value() { return core_.slots[2]; }
  low_rank_linear<T>& output() { return core_.slots[3]; }
  const low_rank_linear<T>& query() const { return core_.slots[0]; }
  const low_rank_linear<T>& key() const { return core_.slots[1]; }
  const low_rank_linear<T>& value() const { return core_.slots[2]; }
  const low_rank_linear<T>& output() const { return core_.slots[3]; }
  std::array<low_rank_linear<T>, 4>& projections() { return core_.slots; }
  const std::array<low_rank_linear<T>, 4>& projections() const { return core_.slots; }

  /// Probability with which training drops attention weights; 0 at first. Throws value_error.
  double dropout() const { return core_.dropout(); }
  void set_dropout(double probability) { core_.set_dropout(probability); }

  std::string describe() const {
    return message({"LowRankAttention ranks ", ranks()[0], ", ", ranks()[1], ", ", ranks()[2], ", ",
                    ranks()[3], ", ", shape().describe()});
  }

  /// Self attention. x, y: batch x tokens x model, dense; y does not overlap x. In training x must stay as it
  /// is until the backward pass. Queries that may see no key attend to nothing: y is the output projection of
  /// zeros. Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 3>& x, const tensor_view<T, 3>& y,
               const attention_call& call = {}) const {
    forward(ctx, x, x, y, call);
  }
  /// Cross attention: queries from x, keys and values from memory: batch x tokens of its own x model.
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

  /// Gradients from dy (shaped as y) to all factors and, unless they are null views, to x and to the memory;
  /// of self attention dx is both. They overlap nothing. Throws shape_error, and state_error without a
  /// forward pass in training mode.
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

  /// Self attention with a result of its own: convenient, allocates.
  tensor<T, 3> forward(context<device::cpu>& ctx, const tensor_view<const T, 3>& x,
                       const attention_call& call = {}) const {
    tensor<T, 3> y(x.shape());
    forward(ctx, x, y.view(), call);
    return y;
  }

  /// Random factors for training from scratch, as LowRankLinear's.
  void initialize(random_stream random) {
    for (std::size_t i = 0; i < 4; ++i) core_.slots[i].initialize(random.child(names[i]));
  }

  /// Multiply-accumulates of self attention over batch x tokens: projections and both products.
  index_t macs(index_t batch, index_t tokens) const {
    index_t total = batch * core_.product_macs(tokens, tokens);
    for (const low_rank_linear<T>& p : core_.slots) total += p.macs({batch, tokens, 1, p.in_features()});
    return total;
  }

  /// f(name, parameter) for each parameter, in execution order: "query.down.weight", "query.up.weight", ...
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
/// attention (m = x) or cross attention, masks, dropout on the weights. No residual connection and no
/// normalisation: those are the host's; MultiHeadAttention in nn has them.
///
/// `Rank` fixes the rank of all four in the type; with `dynamic_rank` they are constructor arguments.
template <class T, index_t Rank = dynamic_rank, class Device = device::cpu>
class LowRankAttention : public detail::low_rank_attention<T> {
  static_assert(Rank > 0, "pufferfish: LowRankAttention<T, Rank>: a static rank must be at least 1");
  static_assert(std::is_same_v<Device, device::cpu>,
                "pufferfish: LowRankAttention on this device needs the header of that device's back end");

 public:
  /// Throws shape_error, and rank_error unless Rank fits every matrix.
  explicit LowRankAttention(const attention_shape& shape, bool bias = false)
      : detail::low_rank_attention<T>(shape, {Rank, Rank, Rank, Rank}, bias) {}
};

template <class T>
class LowRankAttention<T, dynamic_rank, device::cpu> : public detail::low_rank_attention<T> {
 public:
  /// As above, with one rank for all, or those of query, key, value and output.
  LowRankAttention(const attention_shape& shape, index_t rank, bool bias = false)
      : LowRankAttention(shape, std::array<index_t, 4>{rank, rank, rank, rank}, bias) {}
  LowRankAttention(const attention_shape& shape, const std::array<index_t, 4>& ranks, bool bias = false)
      : detail::low_rank_attention<T>(shape, ranks, bias) {}
};

// svd_factorize for layers of kind attention: everything is four times what it is for a linear layer. Their
// layer_traits give `matrices(layer)`: query [heads key x model], key, value [heads value x model] and output
// [model x heads value], in this order; `heads(layer)`; optionally `biases(layer)`, four vectors or null
// views.

namespace detail {

template <class Layer>
inline constexpr bool is_attention = false;
template <has_layer_traits Layer>
inline constexpr bool is_attention<Layer> = layer_traits<Layer>::kind == layer_kind::attention;

template <class Dense>
requires(is_attention<Dense>) struct report_of<Dense> {
  using type = std::vector<factor_report>;
};

template <class Layer>
struct low_rank_attention_kind {
  static constexpr bool known = false;
};
template <class T, index_t Rank, class Device>
struct low_rank_attention_kind<LowRankAttention<T, Rank, Device>> {
  static constexpr bool known = true;
  static constexpr index_t rank = Rank;
};
template <class Layer>
concept low_rank_attention_layer = low_rank_attention_kind<Layer>::known;

template <class LowRank, class Dense>
constexpr bool check_attention_pair() {
  static_assert(is_attention<Dense>,
                "pufferfish: a LowRankAttention is made from a dense layer whose layer_traits have kind "
                "attention");
  if constexpr (is_attention<Dense>) {
    static_assert(std::is_same_v<parameter_t<typename LowRank::value_type>, weight_scalar_t<Dense>>,
                  "pufferfish: the dense and the low-rank layer have different scalars");
    return std::is_same_v<parameter_t<typename LowRank::value_type>, weight_scalar_t<Dense>>;
  }
  return false;
}

/// The shape that the traits' matrices have. Throws shape_error if they contradict each other.
template <class Dense>
attention_shape host_attention_shape(const Dense& dense, const std::string& name) {
  const auto matrices = layer_traits<Dense>::matrices(dense);
  const index_t heads = layer_traits<Dense>::heads(dense);
  const auto extent = [&](std::size_t i, std::size_t d) { return matrices[i].view.extent(d); };
  if (matrices.size() != 4 || heads < 1) {
    throw_error<shape_error>({name, ": layer_traits give ", matrices.size(), " matrices and ", heads,
                              " heads; an attention layer has four matrices and at least one head"});
  }
  const index_t model = extent(0, 1), keys = extent(0, 0), values = extent(2, 0);
  const bool fits = extent(1, 0) == keys && extent(1, 1) == model && extent(2, 1) == model &&
                    extent(3, 0) == model && extent(3, 1) == values && keys % heads == 0 &&
                    values % heads == 0;
  if (!fits) {
    throw_error<shape_error>({name, ": query ", matrices[0].view.shape(), ", key ", matrices[1].view.shape(),
                              ", value ", matrices[2].view.shape(), " and output ", matrices[3].view.shape(),
                              " of ", heads, " heads do not fit each other"});
  }
  return {model, heads, keys / heads, values / heads};
}

template <class Dense>
constexpr bool attention_has_biases = has_biases_trait<Dense>;

/// Factors of the four matrices, each with the rank that the policy chooses for it, or the given ones.
template <class Dense>
std::vector<factors<weight_scalar_t<Dense>>> attention_factors(const Dense& dense,
                                                               const std::array<rank_policy, 4>& policies,
                                                               const factorize_options& options) {
  using T = weight_scalar_t<Dense>;
  host_attention_shape(dense, options.name);
  std::vector<factors<T>> made;
  for (std::size_t i = 0; i < 4; ++i) {
    const auto named = layer_traits<Dense>::matrices(dense)[i];
    factorize_options own = options;
    own.name = options.name + "." + named.name;
    made.push_back(factorize_matrix<T>(tensor_view<const T, 2>(named.view), policies[i], own));
  }
  return made;
}

template <class Dense, class LowRank, class T>
void load_attention(const Dense& dense, const std::vector<factors<T>>& made, LowRank& layer) {
  for (std::size_t i = 0; i < 4; ++i) {
    auto& to = layer.projections()[i];
    copy(tensor_view<const T, 2>(made[i].down), to.down());
    copy(tensor_view<const T, 2>(made[i].up), to.up());
    if (!to.has_bias()) continue;
    tensor_view<const T, 1> bias;
    if constexpr (attention_has_biases<Dense>) bias = layer_traits<Dense>::biases(dense)[i].view;
    bias.is_null() ? void(std::fill_n(to.bias().data(), to.bias().size(), T{})) : copy(bias, to.bias());
  }
}

template <class Dense>
bool attention_wants_bias(const Dense& dense) {
  bool wanted = false;
  if constexpr (attention_has_biases<Dense>) {
    for (const auto& bias : layer_traits<Dense>::biases(dense)) wanted = wanted || !bias.view.is_null();
  }
  return wanted;
}

template <class T>
std::vector<factor_report> attention_reports(const std::vector<factors<T>>& made) {
  std::vector<factor_report> reports;
  for (const factors<T>& one : made) reports.push_back(one.report);
  return reports;
}

template <class LowRank, class Dense>
LowRank factorize_attention(const Dense& dense, const rank_policy& policy, const factorize_options& options,
                            std::vector<factor_report>* report) {
  const auto made = attention_factors(dense, {policy, policy, policy, policy}, options);
  const attention_shape shape = host_attention_shape(dense, options.name);
  const bool bias = attention_wants_bias(dense);
  auto layer = [&] {
    if constexpr (low_rank_attention_kind<LowRank>::rank == dynamic_rank) {
      return LowRank(shape,
                     std::array<index_t, 4>{made[0].rank(), made[1].rank(), made[2].rank(), made[3].rank()},
                     bias);
    } else {
      return LowRank(shape, bias);
    }
  }();
  load_attention(dense, made, layer);
  if (report != nullptr) *report = attention_reports(made);
  return layer;
}

}  // namespace detail

/// A LowRankAttention with a static rank from a dense attention layer. `report`, if given, receives the four
/// matrices' reports. Errors as factorize_matrix, naming the matrix, and shape_error if the traits contradict
/// themselves.
template <detail::low_rank_attention_layer LowRank, class Dense>
LowRank svd_factorize(const Dense& dense, const factorize_options& options = {},
                      detail::report_of_t<Dense>* report = nullptr) {
  if constexpr (detail::check_layer_traits<Dense>() && detail::check_attention_pair<LowRank, Dense>()) {
    constexpr index_t rank = detail::low_rank_attention_kind<LowRank>::rank;
    static_assert(rank != dynamic_rank,
                  "pufferfish: a layer with dynamic rank needs a rank policy: svd_factorize<L>(dense, "
                  "rank_ratio{0.25})");
    return detail::factorize_attention<LowRank>(dense, fixed_rank{rank}, options, report);
  }
}

/// A LowRankAttention with dynamic ranks, which `policy` chooses matrix by matrix. Otherwise as above.
template <detail::low_rank_attention_layer LowRank, class Dense>
LowRank svd_factorize(const Dense& dense, const rank_policy& policy, const factorize_options& options = {},
                      detail::report_of_t<Dense>* report = nullptr) {
  if constexpr (detail::check_layer_traits<Dense>() && detail::check_attention_pair<LowRank, Dense>()) {
    static_assert(detail::low_rank_attention_kind<LowRank>::rank == dynamic_rank,
                  "pufferfish: a layer with static rank takes no rank policy: svd_factorize<L>(dense)");
    return detail::factorize_attention<LowRank>(dense, policy, options, report);
  }
}

/// Of static rank `Rank`: svd_factorize<16>(dense).
template <index_t Rank, class Dense>
requires(detail::is_attention<Dense>) auto svd_factorize(const Dense& dense,
                                                         const factorize_options& options = {},
                                                         detail::report_of_t<Dense>* report = nullptr) {
  return svd_factorize<LowRankAttention<detail::weight_scalar_t<Dense>, Rank>>(dense, options, report);
}

/// Fills an existing layer, at the ranks it has. Throws shape_error, naming both shapes, if it is not of the
/// dense layer's shape or has no bias where that has one. The layer is unchanged if anything is thrown.
template <class Dense, detail::low_rank_attention_layer LowRank>
std::vector<factor_report> svd_factorize(const Dense& dense, LowRank& layer,
                                         const factorize_options& options = {}) {
  if constexpr (detail::check_layer_traits<Dense>() && detail::check_attention_pair<LowRank, Dense>()) {
    const attention_shape shape = detail::host_attention_shape(dense, options.name);
    if (shape != layer.shape() || (detail::attention_wants_bias(dense) && !layer.query().has_bias())) {
      detail::throw_error<shape_error>(
          {options.name, ": attention, ", shape.describe(),
           detail::attention_wants_bias(dense) ? ", with biases, does not fit " : ", does not fit ",
           layer.describe()});
    }
    const auto ranks = layer.ranks();
    const auto made = detail::attention_factors(
        dense, {fixed_rank{ranks[0]}, fixed_rank{ranks[1]}, fixed_rank{ranks[2]}, fixed_rank{ranks[3]}},
        options);
    detail::load_attention(dense, made, layer);
    return detail::attention_reports(made);
  }
}

PUFFERFISH_NAMESPACE_END
