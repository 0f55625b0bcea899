// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Converts networks on a device from dense to low rank and back. Weights that are decomposed on the device
/// stay there: singular values are copied to the host, and their order to the device.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/gpu/linalg/svd.hpp>
#include <pufferfish/gpu/lowrank/placed_layer.hpp>
#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// Calls check(), and throws the value_error that it throws with `name` and ": " before the message. If
/// check() returns, throws a value_error with the message "svd: refused".
template <class Check>
[[noreturn]] PUFFERFISH_COLD void refuse(const std::string& name, Check&& check) {
  try {
    check();
  } catch (const value_error& e) {
    pufferfish::detail::throw_error<value_error>({name, ": ", e.what()});
  }
  pufferfish::detail::throw_error<value_error>({name, ": svd: refused"});
}

/// Throws the value_error of the CPU's svd() for the first element of `weight` that is not finite. Copies the
/// weight to the host, because it is in device memory.
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

/// Makes low-rank layers of dense ones, as the CPU's svd_factorize does.
template <class T>
class layer_factorizer {
  using value_type = parameter_t<T>;

 public:
  layer_factorizer(context<device::gpu>& ctx, memory_source& memory, eigensolver& solver,
                   const factorize_policy& policy)
      : ctx_(ctx), memory_(memory), solver_(solver), policy_(policy) {}

  /// Factorizes the layer work.slot, called `name` in errors; `rank` is the policy for all its matrices.
  /// Fills work.reports, and work.layer unless the policy keeps the dense layer. The slot's layer is not
  /// changed. Throws value_error for an element that is not finite, rank_error for an impossible rank,
  /// backend_error.
  void run(const std::string& name, const rank_policy& rank, slot_replacement<T>& work) const {
    const layer_weights<value_type> weights = work.slot->weights(name);
    std::vector<decomposed> all;
    all.reserve(weights.matrices.size());
    for (std::size_t i = 0; i < weights.matrices.size(); ++i) all.push_back(decompose(weights, i, rank));
    const rank_list ranks = give_ranks(weights, all);
    for (std::size_t i = 0; i < all.size(); ++i) {
      work.reports.push_back(pufferfish::detail::truncation_report(all[i].svd.spectrum(), all[i].rows,
                                                                   all[i].columns, all[i].rank));
      work.reports.back().name = weights.name_of(i);
    }
    if (policy_.keep_dense_if_larger && !pufferfish::detail::shrinks(work.reports)) return;
    work.layer.emplace(memory_, work.slot->twin(ranks));
    const low_rank_parts<value_type> parts = work.layer->layer().low_rank();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto& [part, group, down, up] = parts.factors[i];
      all[i].svd.store(all[i].rank, down.data(), device_matrix<value_type>(down).layout, up.data(),
                       device_matrix<value_type>(up.permute({1, 0, 2, 3})).layout);
    }
    write_biases(weights.biases, parts.biases);
  }

 private:
  struct decomposed {
    std::string name;
    index_t rows, columns;
    device_svd svd;
    index_t rank;
  };

  // Decomposes matrix i of a layer and chooses its rank. A rank that needs no spectrum is checked before the
  // decomposition. With svd_method::automatic, the host decomposes the matrix again if the chosen rank keeps
  // a singular value that is too small for the Gram matrix. Throws value_error for an element that is not
  // finite, and the errors of check().
  decomposed decompose(const layer_weights<value_type>& weights, std::size_t i,
                       const rank_policy& rank_of) const {
    const std::string name = weights.describe(i);
    const tensor_view<const value_type, 4>& weight = weights.matrices[i].view;
    const device_matrix<value_type> a(weight);
    index_t rank = 0;
    if (!needs_spectrum(rank_of)) {
      rank = choose_rank(rank_of, a.rows(), a.columns(), {}, 0.0);
      check(name, a.rows(), a.columns(), rank);
    }
    if (policy_.method == svd_method::external)
      refuse(name, [&] { pufferfish::detail::check_svd_options({.method = policy_.method}); });
    const kernels::matrix_moments moments = measure(ctx_, a);
    if (!std::isfinite(moments.largest)) refuse_not_finite<value_type>(ctx_, weight, name);
    decomposed result{name, a.rows(), a.columns(), device_svd(ctx_, memory_, a, moments), rank};
    result.svd.by_gram(solver_);
    choose(rank_of, result);
    if (policy_.method == svd_method::automatic && result.svd.is_doubtful(result.rank)) {
      result.svd.by_host();
      choose(rank_of, result);
    }
    return result;
  }

  // Sets the rank that the policy gives for the spectrum. Throws the errors of check().
  void choose(const rank_policy& rank_of, decomposed& of) const {
    const svd_result& spectrum = of.svd.spectrum();
    of.rank = choose_rank(rank_of, of.rows, of.columns, spectrum.singular_values, spectrum.squared_norm);
    check(of.name, of.rows, of.columns, of.rank);
  }

  // Throws rank_error for an impossible rank, and, if layers must shrink, for one whose factors are no
  // smaller.
  void check(const std::string& name, index_t rows, index_t columns, index_t rank) const {
    check_rank(name, rows, columns, rank);
    if (!policy_.keep_dense_if_larger) check_shrinks(name, rows, columns, rank);
  }

  // Returns the rank of each rank group (matrices of a layer that share one rank): the largest rank that the
  // policy chose for a matrix of the group. Sets it for all matrices of the group.
  rank_list give_ranks(const layer_weights<value_type>& weights, std::vector<decomposed>& all) const {
    rank_list ranks;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t group = weights.matrices[i].group;
      ranks.resize(std::max(ranks.size(), group + 1));
      ranks[group] = std::max(ranks[group], all[i].rank);
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      const index_t rank = ranks[weights.matrices[i].group];
      if (all[i].rank == rank) continue;
      all[i].rank = rank;
      check(all[i].name, all[i].rows, all[i].columns, rank);
      if (policy_.method == svd_method::automatic && all[i].svd.is_doubtful(rank)) all[i].svd.by_host();
    }
    return ranks;
  }

  // Dense bias i is copied to bias i of the low-rank layer, bit for bit; if there is a dense bias i +
  // to.size(), it is added. Biases without a dense counterpart become zeros.
  void write_biases(const std::vector<named_view<const value_type, 1>>& from,
                    const std::vector<tensor_view<value_type, 1>>& to) const {
    for (std::size_t i = 0; i < to.size(); ++i) {
      const tensor_view<value_type, 1>& target = to[i];
      if (target.is_null()) continue;
      bool written = false;
      for (std::size_t j = i; j < from.size(); j += to.size()) {
        const tensor_view<const value_type, 1>& bias = from[j].view;
        if (bias.is_null()) continue;
        kernels::copy_vector<value_type>(ctx_.stream(), bias.data(), bias.stride(0), target.data(),
                                         target.size(), written);
        written = true;
      }
      if (written) continue;
      const std::size_t bytes = static_cast<std::size_t>(target.size()) * sizeof(value_type);
      gpu::check(cudaMemsetAsync(target.data(), 0, bytes, ctx_.stream()), "cudaMemsetAsync");
    }
  }

  context<device::gpu>& ctx_;
  memory_source& memory_;
  eigensolver& solver_;
  const factorize_policy& policy_;
};

/// View of a convolution's weight [out][in][height][width], of this library's layers, as the matrix [height
/// width in][out] in which it is stored.
template <class T>
tensor_view<const T, 2> stored(const tensor_view<const T, 4>& kernel) {
  return {kernel.data(),
          {kernel.extent(1) * kernel.extent(2) * kernel.extent(3), kernel.extent(0)},
          {kernel.stride(1), kernel.stride(0)}};
}

/// Returns a dense layer on the device that computes the function of `low_rank`: its weights are the products
/// of the factors. Throws backend_error, and the errors of `memory`.
template <class T>
placed_layer<T> merged(context<device::gpu>& ctx, memory_source& memory,
                       any_layer<T, device::gpu>& low_rank) {
  using value_type = parameter_t<T>;
  const low_rank_parts<value_type> parts = low_rank.low_rank();
  placed_layer<T> result(memory, low_rank.twin({}));
  const layer_weights<value_type> weights = result.layer().weights({});
  for (std::size_t i = 0; i < parts.factors.size(); ++i) {
    multiply_exactly<value_type>(ctx, stored<value_type>(parts.factors[i].down),
                                 stored<value_type>(parts.factors[i].up),
                                 pufferfish::detail::writable(stored(weights.matrices[i].view)));
  }
  for (std::size_t i = 0; i < parts.biases.size(); ++i) {
    const tensor_view<value_type, 1>& bias = parts.biases[i];
    if (bias.is_null()) continue;
    kernels::copy_vector<value_type>(ctx.stream(), bias.data(), bias.stride(0),
                                     pufferfish::detail::writable(weights.biases[i].view).data(), bias.size(),
                                     false);
  }
  return result;
}

/// Options of a new context on the current device.
inline context_options options_of_current_device() {
  context_options options;
  gpu::check(cudaGetDevice(&options.device), "cudaGetDevice");
  return options;
}

}  // namespace detail
}  // namespace gpu

/// Replaces the layers that `policy` chooses by their low-rank factors on the device. Ranks, factors (up to
/// rounding), structure and report are those of factorize() for a network on the CPU. All other parameters
/// and buffers are carried over bit for bit. settings.solver computes the eigenvectors of the Gram matrices.
/// Waits for the device; must not be captured.
///
/// policy.method: `automatic` and `gram` decompose by the Gram matrix, on the device. With `automatic`, a
/// matrix of which a kept singular value is below 1e-6 of the first is copied to the host and decomposed
/// again by the CPU's `jacobi` in the calling thread. `randomized` computes the whole decomposition, like
/// `gram`. policy.threads is ignored in these cases.
///
/// Without a solver, and with `jacobi`, statistics, a budget or a list of ranks, all weights are copied to
/// the host, which decomposes them like the CPU's factorize() with policy.threads (by default 1) threads: 294
/// ms for ResNet-18 with 16 threads of an Intel Xeon. With cuSOLVER on an H100: 42 ms (docs/gpu.md).
///
/// With a solver: needs memory for new arenas and the old ones, for a second copy of the factors, and for
/// about six matrices of the size of the largest one in double (for an LSTM, twenty-four of the size of one
/// gate's).
///
/// Throws the errors of the CPU's factorize(), and backend_error; the network is unchanged if an exception is
/// thrown.
///
///     gpu::cusolver_eigensolver solver;                           // <pufferfish/gpu/cusolver.hpp>
///     const factorization done = factorize(net, policy, ctx, {.solver = &solver});
///     SGD<float, device::gpu> optimizer(make_optimizer_target(net.store()), options);  // the arenas are new
template <class Root>
factorization factorize(model<Root, device::gpu>& net, const factorize_policy& policy,
                        context<device::gpu>& ctx, const gpu::svd_settings& settings = {},
                        const network_statistics* statistics = nullptr) {
  using T = typename Root::value_type;
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // parameters may be from any stream
  if (settings.solver == nullptr || policy.method == svd_method::jacobi || statistics != nullptr ||
      policy.budget || policy.ranks) {
    return pufferfish::detail::factorize_on_host(net, policy, statistics);
  }
  factorization result;
  result.parameters_before = net.parameter_count();
  const auto found = pufferfish::detail::find_slots(net);
  std::vector<layer_choice> choices = select(found.layers, policy);
  gpu::stream_memory memory(ctx.stream());
  std::vector<gpu::detail::slot_replacement<T>> work;
  for (any_layer<T, device::gpu>* slot : found.slots) work.push_back({slot, {}, {}});
  for (const std::size_t i : pufferfish::detail::decomposition_order(found.layers)) {
    if (!choices[i].factorize()) continue;
    gpu::detail::layer_factorizer<T>(ctx, memory, *settings.solver, policy)
        .run(found.layers[i].name, choices[i].rank, work[i]);
  }
  gpu::detail::replace_layers(net, work);
  for (std::size_t i = 0; i < work.size(); ++i) {
    if (work[i].layer) {
      result.add(found.layers[i].name, work[i].slot->ranks(), std::move(work[i].reports));
    } else if (choices[i].factorize() || choices[i].reason == dense_because::growth) {
      result.kept_dense.push_back(found.layers[i].name);
    }
  }
  result.rows = pufferfish::detail::share_budget(found.layers, choices, {}, nullptr, result.parameters_before,
                                                 pufferfish::detail::no_gains);
  add_reports(result.rows, result.layers);
  result.parameters_after = net.parameter_count();
  return result;
}

/// Calls factorize(net, policy, ctx) with a new context on the current device. The weights are decomposed on
/// the host, because there is no solver. Throws the same errors as that function.
template <class Root>
factorization factorize(model<Root, device::gpu>& net, const factorize_policy& policy) {
  context<device::gpu> ctx(gpu::detail::options_of_current_device());
  return factorize(net, policy, ctx);
}

/// Replaces every low-rank layer by the dense layer of the product of its factors, on the device. The network
/// gets new arenas and a new generation (model::generation), so optimizers and graphs must be made again.
/// Waits for the device. Throws backend_error; the network is unchanged then.
template <class Root>
void merge(model<Root, device::gpu>& net, context<device::gpu>& ctx) {
  using T = typename Root::value_type;
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  gpu::stream_memory memory(ctx.stream());
  std::vector<gpu::detail::slot_replacement<T>> work;
  for (any_layer<T, device::gpu>* slot : pufferfish::detail::find_slots(net).slots) {
    if (!slot->ranks().empty()) work.push_back({slot, gpu::detail::merged(ctx, memory, *slot), {}});
  }
  gpu::detail::replace_layers(net, work);
}

/// Calls merge(net, ctx) with a new context on the current device. Throws backend_error; the network is
/// unchanged then.
template <class Root>
void merge(model<Root, device::gpu>& net) {
  context<device::gpu> ctx(gpu::detail::options_of_current_device());
  merge(net, ctx);
}

PUFFERFISH_NAMESPACE_END
