// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Networks on a device from dense to low rank and back, without their weights leaving it. To the host go
/// singular values (those that rank policies and reports need), to the device the order of them.

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/gpu/conv.hpp>
#include <pufferfish/gpu/lstm.hpp>
#include <pufferfish/gpu/svd.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// A layer that no network holds yet, with its parameters on the device, where nothing is written.
template <class T>
class placed_layer {
 public:
  using layer_type = any_layer<T, device::gpu>;
  using value_type = parameter_t<T>;

  placed_layer(memory_source& memory, layer_type layer) : layer_(std::move(layer)) {
    struct collector final : state_visitor<value_type> {
      void on_parameter(const std::string&, parameter<value_type>& p) override { all.push_back(&p); }
      void on_buffer(const std::string&, state_buffer<value_type>&) override {}
      std::vector<parameter<value_type>*> all;
    } found;
    layer_.visit_state(found);
    index_t size = 0;
    for (const parameter<value_type>* p : found.all) size += p->size();
    values_ = memory_block<value_type>(memory, size, uninitialized);
    index_t offset = 0;
    for (parameter<value_type>* p : found.all) {
      p->relocate(values_.data() + offset, true);
      offset += p->size();
    }
  }

  layer_type& layer() { return layer_; }
  const layer_type& layer() const { return layer_; }

  /// Views of layers that are const are of const elements; these lie in memory of this object.
  template <std::size_t N>
  static tensor_view<value_type, N> writable(const tensor_view<const value_type, N>& view) {
    return {const_cast<value_type*>(view.data()), view.shape(), view.strides()};
  }

  /// The factors of each of a low-rank layer's matrices, in the order of layer_traits: down [rank][in][h][w],
  /// up [out][rank][1][1].
  struct factor_views {
    tensor_view<value_type, 4> down, up;
  };
  static std::vector<factor_views> factors_of(const layer_type& layer) {
    const auto kernel = [](const auto& view) {
      return writable(pufferfish::detail::as_kernel<value_type>(view));
    };
    std::vector<factor_views> result;
    if (const auto* conv = layer.low_rank_conv()) {
      result.push_back({kernel(conv->down()), kernel(conv->up())});
    } else if (const auto* linear = layer.low_rank_linear()) {
      result.push_back({kernel(linear->down()), kernel(linear->up())});
    } else if (const auto* lstm = layer.low_rank_lstm()) {
      for (index_t gate = 0; gate < lstm_gates; ++gate) {
        result.push_back({kernel(lstm->input_down(gate)), kernel(lstm->input_up(gate))});
      }
      for (index_t gate = 0; gate < lstm_gates; ++gate) {
        result.push_back({kernel(lstm->hidden_down(gate)), kernel(lstm->hidden_up(gate))});
      }
    }
    return result;
  }

  /// Its bias; an LSTM's is all gates'. A null view if there is none.
  static tensor_view<value_type, 1> bias_of(const layer_type& layer) {
    if (const auto* conv = layer.low_rank_conv()) return writable(conv->bias());
    if (const auto* linear = layer.low_rank_linear()) return writable(linear->bias());
    if (const auto* lstm = layer.low_rank_lstm()) return writable(lstm->bias());
    return {};
  }

 private:
  layer_type layer_;
  memory_block<value_type> values_;
};

/// What becomes of a chosen slot: nothing if it would grow.
template <class T>
struct device_factorization {
  std::string name;
  any_layer<T, device::gpu>* slot;
  std::optional<placed_layer<T>> layer;
  std::vector<factor_report> reports;

  double cost() const { return pufferfish::detail::cost_of(slot->weight_matrix()); }
};

/// Throws what `check` throws, with a layer's name before it.
template <class Check>
[[noreturn]] PUFFERFISH_COLD void refuse(const std::string& name, Check&& check) {
  try {
    check();
  } catch (const value_error& e) {
    PUFFERFISH_THROW(value_error(name + ": " + e.what()));
  }
  pufferfish::detail::throw_error<value_error>({name, ": svd: refused"});
}

/// Throws for the first element of a matrix on the device that is not finite what the CPU's svd throws.
template <class T>
[[noreturn]] PUFFERFISH_COLD void refuse_not_finite(context<device::gpu>& ctx,
                                                    const tensor_view<const T, 4>& weight,
                                                    const std::string& name) {
  index_t last = 0;
  for (std::size_t d = 0; d < 4; ++d) last += (weight.extent(d) - 1) * weight.stride(d);
  std::vector<T> values(static_cast<std::size_t>(last + 1));
  fetch<T>(ctx, weight.data(), values);
  const auto matrix =
      pufferfish::detail::unroll(tensor_view<const T, 4>(values.data(), weight.shape(), weight.strides()));
  refuse(name, [&] { pufferfish::detail::require_finite<T>(matrix); });
}

/// Makes low-rank layers of dense ones, as the CPU's svd_factorize does, computing in C.
template <class T, class C>
class layer_factorizer {
  using value_type = parameter_t<T>;

 public:
  layer_factorizer(context<device::gpu>& ctx, memory_source& memory, eigensolver& solver,
                   const factorize_policy& policy)
      : ctx_(ctx), memory_(memory), solver_(solver), policy_(policy) {}

  void run(device_factorization<T>& work) const {
    const matrix_size size = work.slot->weight_matrix();
    if (policy_.keep_dense_if_larger && largest_shrinking_rank(size.rows, size.cols) < 1) return;
    const layer_weights<value_type> weights = work.slot->weights(work.name);
    std::vector<decomposed> all = decompose(weights);
    const std::size_t sides = all.size() == 2 * lstm_gates ? 2 : 1;
    for (std::size_t side = 0; side < sides; ++side)
      give_one_rank(all, side * lstm_gates, all.size() / sides);
    for (const decomposed& one : all) work.reports.push_back(report(one));
    if (work.reports.size() == 1) work.reports[0].name = work.name;
    if (policy_.keep_dense_if_larger && !pufferfish::detail::shrinks(work.reports)) return;
    work.layer.emplace(memory_,
                       work.slot->low_rank_twin({all.front().rank, sides > 1 ? all.back().rank : 0}));
    const auto factors = placed_layer<T>::factors_of(work.layer->layer());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto& [down, up] = factors[i];
      all[i].svd.store(all[i].rank, down.data(), device_matrix<value_type>(down).layout, up.data(),
                       device_matrix<value_type>(up.permute({1, 0, 2, 3})).layout);
    }
    write_bias(weights.biases, placed_layer<T>::bias_of(work.layer->layer()));
  }

 private:
  struct decomposed {
    std::string name;
    index_t rows, columns;
    device_svd<C> svd;
    index_t rank;
  };

  std::vector<decomposed> decompose(const layer_weights<value_type>& weights) const {
    std::vector<decomposed> all;
    all.reserve(weights.matrices.size());
    for (const auto& [name, weight] : weights.matrices) {
      const bool several = weights.matrices.size() > 1;
      all.push_back(decompose(several ? weights.description + "." + name : weights.description, weight));
    }
    return all;
  }

  decomposed decompose(const std::string& name, const tensor_view<const value_type, 4>& weight) const {
    const device_matrix<value_type> a(weight);
    index_t rank = 0;
    if (!needs_spectrum(policy_.rank)) {
      rank = choose_rank(policy_.rank, a.rows(), a.columns(), {}, 0.0);
      check(name, a.rows(), a.columns(), rank);
    }
    if (policy_.method == svd_method::external)
      refuse(name, [&] { pufferfish::detail::check_svd_options({.method = policy_.method}); });
    const kernels::matrix_moments moments = measure(ctx_, a);
    if (!std::isfinite(moments.largest)) refuse_not_finite<value_type>(ctx_, weight, name);
    decomposed result{name, a.rows(), a.columns(), device_svd<C>(ctx_, memory_, solver_, a, moments), rank};
    if (policy_.method == svd_method::jacobi) result.svd.refine();
    choose(result);
    if (policy_.method == svd_method::automatic && result.svd.is_doubtful(result.rank)) {
      result.svd.refine();
      choose(result);
    }
    return result;
  }

  void choose(decomposed& of) const {
    const svd_result& spectrum = of.svd.spectrum();
    of.rank = choose_rank(policy_.rank, of.rows, of.columns, spectrum.singular_values, spectrum.squared_norm);
    check(of.name, of.rows, of.columns, of.rank);
  }

  void check(const std::string& name, index_t rows, index_t columns, index_t rank) const {
    check_rank(name, rows, columns, rank);
    if (!policy_.keep_dense_if_larger) check_shrinks(name, rows, columns, rank);
  }

  // The largest rank that the policy chose for any of them.
  void give_one_rank(std::vector<decomposed>& all, std::size_t first, std::size_t count) const {
    index_t rank = 0;
    for (std::size_t i = first; i < first + count; ++i) rank = std::max(rank, all[i].rank);
    for (std::size_t i = first; i < first + count; ++i) {
      if (all[i].rank == rank) continue;
      all[i].rank = rank;
      check(all[i].name, all[i].rows, all[i].columns, rank);
      if (policy_.method == svd_method::automatic && all[i].svd.is_doubtful(rank)) all[i].svd.refine();
    }
  }

  static factor_report report(const decomposed& one) {
    factor_report result =
        pufferfish::detail::truncation_report(one.svd.spectrum(), one.rows, one.columns, one.rank);
    result.name = one.name;
    return result;
  }

  // The dense layer's biases, one behind the other; those of an LSTM's hidden side are added to the input
  // side's.
  void write_bias(const std::vector<tensor_view<const value_type, 1>>& biases,
                  const tensor_view<value_type, 1>& to) const {
    if (to.is_null()) return;
    const std::size_t bytes = static_cast<std::size_t>(to.size()) * sizeof(value_type);
    gpu::check(cudaMemsetAsync(to.data(), 0, bytes, ctx_.stream()), "cudaMemsetAsync");
    index_t at = 0;
    for (const tensor_view<const value_type, 1>& bias : biases) {
      if (bias.is_null()) continue;
      kernels::copy_vector<value_type>(ctx_.stream(), bias.data(), bias.stride(0), to.data() + at,
                                       bias.size(), true);
      at = (at + bias.size()) % to.size();
    }
  }

  context<device::gpu>& ctx_;
  memory_source& memory_;
  eigensolver& solver_;
  const factorize_policy& policy_;
};

/// Puts layers into slots of a network and lays out new arenas; everything is as it was if memory for those
/// runs out. Each of `replaced` has a slot and an optional layer.
template <class Root, class Replacements>
void replace_layers(model<Root, device::gpu>& net, Replacements& replaced) {
  const auto swap_all = [&] {
    for (auto& one : replaced) {
      if (one.layer) std::swap(*one.slot, one.layer->layer());
    }
  };
  try {
    net.rearrange([&](Root&) { swap_all(); });
  } catch (...) {
    swap_all();
    throw;
  }
}

/// A dense layer of the same function as a low-rank one, on the device; nothing for another layer.
template <class T>
class layer_merger {
  using value_type = parameter_t<T>;

 public:
  layer_merger(context<device::gpu>& ctx, memory_source& memory) : ctx_(ctx), memory_(memory) {}

  std::optional<placed_layer<T>> operator()(const any_layer<T, device::gpu>& low_rank) const {
    std::optional<placed_layer<T>> result;
    if (const auto* conv = low_rank.low_rank_conv()) {
      result.emplace(memory_, Conv<T>(conv->shape(), conv->has_bias()));
    } else if (const auto* linear = low_rank.low_rank_linear()) {
      result.emplace(memory_, Linear<T>(linear->in_features(), linear->out_features(), linear->has_bias()));
    } else if (const auto* lstm = low_rank.low_rank_lstm()) {
      result.emplace(memory_, LSTM<T>(lstm->input_size(), lstm->hidden_size()));
    } else {
      return result;
    }
    const auto factors = placed_layer<T>::factors_of(low_rank);
    const layer_weights<value_type> weights = result->layer().weights({});
    for (std::size_t i = 0; i < factors.size(); ++i) {
      multiply_exactly<value_type>(ctx_, stored(tensor_view<const value_type, 4>(factors[i].down)),
                                   stored(tensor_view<const value_type, 4>(factors[i].up)),
                                   stored(placed_layer<T>::writable(weights.matrices[i].view)));
    }
    const value_type* bias = placed_layer<T>::bias_of(low_rank).data();
    for (const auto& to : weights.biases) {
      kernels::copy_vector<value_type>(ctx_.stream(), bias, 1, placed_layer<T>::writable(to).data(),
                                       to.size(), false);
      bias += to.size();
    }
    return result;
  }

 private:
  // The matrix [height width in][out] that a weight of ours is stored as.
  template <class U>
  static tensor_view<U, 2> stored(const tensor_view<U, 4>& kernel) {
    const index_t out = kernel.extent(0);
    return {
        kernel.data(), {kernel.extent(1) * kernel.extent(2) * kernel.extent(3), out}, {kernel.stride(1), 1}};
  }

  context<device::gpu>& ctx_;
  memory_source& memory_;
};

/// The device that is current, for a context of its own.
inline context_options options_of_current_device() {
  context_options options;
  gpu::check(cudaGetDevice(&options.device), "cudaGetDevice");
  return options;
}

}  // namespace detail
}  // namespace gpu

/// Replaces the layers that `policy` chooses by their low-rank factors on the device: the same ranks, factors
/// (up to rounding), structure and report as the CPU's factorize, with all other parameters and buffers
/// carried over bit for bit. policy.threads counts for nothing; svd_method::randomized is the whole
/// decomposition. Waits for the device; must not be captured.
///
/// Needs memory for new arenas beside the old ones, for the factors once more, and for about six matrices of
/// the size of the largest layer in what settings.compute says (for an LSTM, twenty-four of the size of one
/// gate's).
///
/// Errors as the CPU's, and backend_error; the network is unchanged if anything is thrown.
template <class Root>
factorization factorize(model<Root, device::gpu>& net, const factorize_policy& policy,
                        context<device::gpu>& ctx, const gpu::svd_settings& settings = {}) {
  using T = typename Root::value_type;
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // whatever stream the parameters came from
  factorization result;
  result.parameters_before = net.parameter_count();
  pufferfish::detail::slot_selector<T, device::gpu> selector;
  net.visit_layers(selector);
  gpu::stream_memory memory(ctx.stream());
  gpu::jacobi_eigensolver own;
  gpu::eigensolver& solver = settings.solver != nullptr ? *settings.solver : own;
  std::vector<gpu::detail::device_factorization<T>> work;
  for (const auto& found : selector.select(policy)) work.push_back({found.name, found.slot, {}, {}});
  for (const std::size_t i : pufferfish::detail::decomposition_order(work)) {
    auto& layer = work[i];
    if (settings.compute == gpu::precision::fp64) {
      gpu::detail::layer_factorizer<T, double>(ctx, memory, solver, policy).run(layer);
    } else {
      gpu::detail::layer_factorizer<T, float>(ctx, memory, solver, policy).run(layer);
    }
  }
  gpu::detail::replace_layers(net, work);
  for (auto& done : work) {
    if (done.layer) {
      result.add(done.name, done.slot->ranks(), std::move(done.reports));
    } else {
      result.kept_dense.push_back(done.name);
    }
  }
  result.parameters_after = net.parameter_count();
  return result;
}

/// The same in a context of its own on the current device.
template <class Root>
factorization factorize(model<Root, device::gpu>& net, const factorize_policy& policy) {
  context<device::gpu> ctx(gpu::detail::options_of_current_device());
  return factorize(net, policy, ctx);
}

/// Multiplies the factors of every low-rank layer out, on the device. New arenas, a new generation. Waits for
/// the device. Throws backend_error; the network is unchanged then.
template <class Root>
void merge(model<Root, device::gpu>& net, context<device::gpu>& ctx) {
  using T = typename Root::value_type;
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  gpu::stream_memory memory(ctx.stream());
  struct replacement {
    any_layer<T, device::gpu>* slot;
    std::optional<gpu::detail::placed_layer<T>> layer;
  };
  struct finder final : layer_visitor<T, device::gpu> {
    explicit finder(const gpu::detail::layer_merger<T>& m) : merged(m) {}
    void on_layer(const std::string&, any_layer<T, device::gpu>& slot) override {
      if (auto layer = merged(slot)) found.push_back({&slot, std::move(layer)});
    }
    const gpu::detail::layer_merger<T>& merged;
    std::vector<replacement> found;
  };
  const gpu::detail::layer_merger<T> merged(ctx, memory);
  finder visitor(merged);
  net.visit_layers(visitor);
  gpu::detail::replace_layers(net, visitor.found);
}

/// The same in a context of its own on the current device.
template <class Root>
void merge(model<Root, device::gpu>& net) {
  context<device::gpu> ctx(gpu::detail::options_of_current_device());
  merge(net, ctx);
}

PUFFERFISH_NAMESPACE_END
