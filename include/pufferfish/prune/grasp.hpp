// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `grasp_scores`, `prune_by_grasp`: pruning that preserves the gradient flow, by finite differences of
/// gradients. `balanced_halves`: class-balanced samples for the scores.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/host_work.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/prune/removal.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of grasp_scores and prune_by_grasp.
struct grasp_options {
  double share = 0.8;  ///< share of all prunable weights that are pruned afterwards, 0 .. 1, rounded down
  removal_rule rule = removal_rule::exact;  ///< treatment of ties; the reference program's is `but_last`
  /// True: draws new weights for linear layers (2 logical dimensions) to compute the scores, as the reference
  /// program does: normal with the standard deviation sqrt(2 / (in + out)) of Glorot and Bengio (AISTATS
  /// 2010). The network's own weights are restored afterwards.
  bool fresh_linear = false;
  std::uint64_t seed = 1;  ///< seed of the weights that fresh_linear draws
  double step = 1e-2;      ///< step of the finite differences, relative to the norm of the weights
};

namespace detail {

/// Copies an arena (one array of all values or gradients) from the memory of `source` to the host.
template <class T>
std::vector<T> read_arena(memory_source& source, std::span<const T> arena) {
  std::vector<T> here(arena.size());
  if (!here.empty()) source.to_host(here.data(), arena.data(), arena.size_bytes());
  return here;
}
/// Copies values from the host to an arena.
template <class T>
void write_arena(memory_source& source, const std::vector<T>& here, std::span<T> arena) {
  if (!here.empty()) source.from_host(arena.data(), here.data(), arena.size_bytes());
}

/// Guard whose destructor restores values and buffers of a store bit for bit and sets its gradients to zero.
template <class T>
class restored_arenas {
 public:
  /// Copies values and buffers. `source`: memory of the arenas.
  restored_arenas(parameter_store<T>& store, memory_source& source)
      : store_(&store),
        source_(&source),
        values_(read_arena<T>(source, store.values())),
        buffers_(read_arena<T>(source, store.buffers())) {}
  restored_arenas(const restored_arenas&) = delete;
  restored_arenas& operator=(const restored_arenas&) = delete;
  ~restored_arenas() {
    try {
      restore();
    } catch (const backend_error&) {  // a failed device, which the caller's next call reports as well
    }
  }

 private:
  /// Restores values and buffers, and sets the gradients to zero.
  void restore() {
    write_arena(*source_, values_, store_->values());
    write_arena(*source_, buffers_, store_->buffers());
    if (const auto all = store_->gradients(); !all.empty()) source_->fill_zero(all.data(), all.size_bytes());
    for (const auto& entry : store_->parameters()) {
      entry.thing->restart();
      entry.thing->set_gradient_origin(gradient_source::program);
    }
    store_->round();
  }

  parameter_store<T>* store_;
  memory_source* source_;
  std::vector<T> values_, buffers_;
};

/// Sets all elements that are pruned or not prunable to zero.
template <class T>
void keep_prunable(context<device::cpu>& ctx, const weight_mask& mask, std::span<T> values) {
  for (const masked_tensor& tensor : mask.tensors()) {
    if (!tensor.prunable) std::fill_n(values.begin() + tensor.offset, tensor.size, T(0));
  }
  mask.apply(ctx, values);
}

/// Euclidean norm, summed in double.
template <class T>
double norm_of(std::span<const T> values) {
  double squares = 0;
  for (const T value : values) squares += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(squares);
}

/// Draws weights for the linear layers: normal with variance 2 / (in + out).
template <class T>
void draw_linear_weights(const weight_mask& mask, std::uint64_t seed, std::span<T> values) {
  for (const masked_tensor& tensor : mask.tensors()) {
    if (!tensor.prunable || tensor.layout.dims != 2) continue;
    const double sides = static_cast<double>(tensor.layout.shape[0] + tensor.layout.shape[1]);
    fill_normal(
        values.subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.size)),
        std::sqrt(2.0 / sides), random_stream(seed, stream_id("grasp")).child(tensor.name));
  }
}

/// Step eps = step ||theta|| / ||g|| of the finite differences. Throws value_error if a norm is zero or not
/// finite.
inline double grasp_epsilon(double step, double weights, double gradient) {
  const double epsilon = step * weights / gradient;
  if (!(epsilon > 0.0 && std::isfinite(epsilon))) {
    throw_error<value_error>({"grasp_scores: step ", step, ", norm of the weights ", weights,
                              ", norm of the gradient ", gradient, ": all must be finite and above 0"});
  }
  return epsilon;
}

/// An unsigned integer that decreases as x increases; equal for +0 and -0.
template <class T>
bits_like<T> falling_key(T x) {
  constexpr bits_like<T> sign = ~(~bits_like<T>{0} >> 1);
  const auto bits = std::bit_cast<bits_like<T>>(x + T(0));
  return (bits & sign) != 0 ? bits : ~(bits | sign);
}

}  // namespace detail

/// Computes the scores of gradient signal preservation (GraSP). theta: the remaining weights of the prunable
/// tensors; g_0 and g_1: the gradients of the losses of two half batches; H_0 and H_1: the Hessians of these
/// losses:
///
///     g = g_0 + g_1;   h = H_0 g + H_1 g;   score = -theta x h   (element by element)
///     H_k g = (g_k(theta + eps g) - g_k(theta - eps g)) / (2 eps);   eps = step ||theta|| / ||g||
///
/// Six gradients are computed, and no layer needs a second derivative. The result is arranged as the arena;
/// it is 0 for elements that are pruned or not prunable. The published division by |sum of scores| is left
/// out, because it does not change the order.
///
/// gradient(which) runs a forward and a backward pass: it writes the gradient of the loss of half `which` (0
/// or 1) at the store's present values into the store's gradients. The published loss is the cross entropy of
/// the outputs divided by 200, of class-balanced samples (balanced_halves), with batch norm in training mode:
///
///     prune_by_grasp(ctx, net.store(), mask, [&](int which) {
///       net.forward(ctx, samples[which], outputs);
///       ...                                          // outputs / 200, loss, gradient of the outputs
///       net.backward(ctx, outputs_gradient);
///     });
///
/// Afterwards the values and buffers of the store, including the running statistics of batch norm, have their
/// old bits, also if `gradient` throws; the gradients are zero. Either all ranks score the same samples, or
/// one rank scores and broadcast_mask sends its mask to the others. Differences of gradients in float have
/// relative errors of about 1e-5.
///
/// The values are in the memory of the context's device, where `gradient` computes; a device's arenas are
/// copied to the host for the scores. Throws value_error if a norm or a score is not finite, or theta or g is
/// zero; state_error if the mask was made for other arenas or the values are on another device or in the
/// memory of a host framework.
/// Wang, Zhang and Grosse, "Picking winning tickets before training by preserving gradient flow", ICLR 2020.
///
/// Eight further arrays of the arena's length are allocated during the call. Exceptions of `gradient` are
/// passed on. Not collective.
template <class T, class Device, class Gradient>
std::vector<T> grasp_scores(context<Device>& ctx, parameter_store<T>& store, const weight_mask& mask,
                            Gradient&& gradient, const grasp_options& options = {}) {
  memory_source& source = memory_of<Device>::source();
  if (store.on_host() != source.on_host()) {
    PUFFERFISH_THROW(state_error(store.on_host()
                                     ? "grasp_scores: the values are on the host, the context is a device's"
                                     : "grasp_scores: the values are on a device: use a context of it"));
  }
  mask.check_store(store);
  if (static_cast<index_t>(store.values().size()) != mask.size()) {
    PUFFERFISH_THROW(state_error("grasp_scores: the values are in the memory of a host framework"));
  }
  const detail::restored_arenas<T> before(store, source);
  std::vector<T> theta = detail::read_arena<T>(source, store.values());
  if (options.fresh_linear) detail::draw_linear_weights(mask, options.seed, std::span(theta));
  std::vector<T> g(theta.size(), T(0)), scores(theta.size(), T(0)), moved(theta.size());
  const auto gradient_at = [&](double epsilon, int which) {
    for (std::size_t i = 0; i < theta.size(); ++i) {
      moved[i] = static_cast<T>(static_cast<double>(theta[i]) + epsilon * static_cast<double>(g[i]));
    }
    detail::write_arena(source, moved, store.values());
    store.round();
    gradient(which);
    return detail::read_arena<T>(source, store.gradients());
  };
  detail::host_work<Device> work;
  context<device::cpu>& host = work.of(ctx);
  std::vector<T> first = gradient_at(0.0, 0);
  std::ranges::transform(gradient_at(0.0, 1), first, g.begin(), [](T a, T b) { return a + b; });
  detail::keep_prunable(host, mask, std::span(g));
  std::vector<T> weights = theta;
  detail::keep_prunable(host, mask, std::span(weights));
  const double epsilon =
      detail::grasp_epsilon(options.step, detail::norm_of<T>(weights), detail::norm_of<T>(g));
  for (const int which : {0, 1}) {
    first = gradient_at(epsilon, which);
    const std::vector<T> second = gradient_at(-epsilon, which);
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] += first[i] - second[i];
  }
  detail::keep_prunable(host, mask, std::span(scores));
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] =
        static_cast<T>(-static_cast<double>(weights[i]) * static_cast<double>(scores[i]) / (2 * epsilon));
    if (!std::isfinite(scores[i])) {
      detail::throw_error<value_error>(
          {"grasp_scores: the score of element ", i, " of the arena is ", static_cast<double>(scores[i])});
    }
  }
  return scores;
}

/// Removes the weights of largest score from the mask until floor(share x prunable) weights are pruned in
/// all; of equal scores, those earlier in storage order. With another options.rule than `exact` the number
/// differs: see removal_rule. Returns the number of removed weights. The network's values are restored, not
/// masked: see mask_weights. Throws the errors of grasp_scores, and value_error unless 0 <= share <= 1; after
/// masked: see mask_weights. Throws the errors of grasp_scores, and value_error unless 0 <= share <= 1; after
/// an error the mask is unchanged.
///
/// \code
/// auto mask = std::make_shared<weight_mask>(net.store());
/// prune_by_grasp(ctx, net.store(), *mask, gradient, {.share = 0.8});  // gradient: see grasp_scores
/// mask_weights(ctx, *mask, net.store());
/// \endcode
template <class T, class Device, class Gradient>
index_t prune_by_grasp(context<Device>& ctx, parameter_store<T>& store, weight_mask& mask,
                       Gradient&& gradient, const grasp_options& options = {}) {
  detail::check_removal_share("prune_by_grasp", options.share);
  const std::vector<T> scores = grasp_scores(ctx, store, mask, gradient, options);
  return detail::remove_share(
      mask, options.share, removal_share::of_whole, removal_scope::global, options.rule,
      [&](std::size_t tensor, index_t element) {
        return detail::falling_key(scores[static_cast<std::size_t>(mask.tensors()[tensor].offset + element)]);
      });
}

/// Draws indices of `per_class` samples of each class, without replacement, split into two halves. The
/// first half has ceil(per_class / 2) samples of each class. labels[i] in 0 .. classes - 1 is the class of
/// sample i. The draw depends on the arguments alone. Throws value_error for a label out of range, for less
/// than 1 class or sample of a class and, naming the class, for one of fewer than `per_class` samples.
///
/// \code
/// // 5 + 5 samples of each of 10 classes
/// const auto [first, second] = balanced_halves<std::int32_t>(labels, 10, 10);
/// \endcode
template <class Label>
std::pair<std::vector<index_t>, std::vector<index_t>> balanced_halves(std::span<const Label> labels,
                                                                      index_t classes, index_t per_class,
                                                                      std::uint64_t seed = 1) {
  if (classes < 1 || per_class < 1) {
    detail::throw_error<value_error>({"balanced_halves: ", per_class, " samples of each of ", classes,
                                      " classes; both must be at least 1"});
  }
  std::vector<index_t> found(static_cast<std::size_t>(classes), 0);
  std::pair<std::vector<index_t>, std::vector<index_t>> halves;
  const random_stream random(seed, stream_id("balanced_halves"));
  for (const std::uint32_t sample : random_permutation(static_cast<index_t>(labels.size()), random)) {
    const auto label = static_cast<index_t>(labels[sample]);
    if (label < 0 || label >= classes) {
      detail::throw_error<value_error>(
          {"balanced_halves: sample ", sample, " is of class ", label, " of ", classes});
    }
    index_t& number = found[static_cast<std::size_t>(label)];
    if (number < per_class) (number % 2 == 0 ? halves.first : halves.second).push_back(sample);
    ++number;
  }
  for (std::size_t c = 0; c < found.size(); ++c) {
    if (found[c] < per_class) {
      detail::throw_error<value_error>(
          {"balanced_halves: class ", c, " has ", found[c], " samples, not ", per_class});
    }
  }
  return halves;
}

PUFFERFISH_NAMESPACE_END
