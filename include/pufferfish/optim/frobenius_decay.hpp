// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `frobenius_decay`: weight decay of the products of factors, in place of weight decay of each factor.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/memory.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>
#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/linear/wide_product.hpp>
#include <pufferfish/optim/optimizer_target.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of frobenius_decay.
struct frobenius_options {
  double strength = 0.0;  ///< lambda of the penalty lambda/2 ||up down||_F^2; 0: no decay
  /// False: the penalty's gradient is added to the factors' gradients, as SGD and Adam do with weight decay.
  /// True: learning rate times the penalty's gradient is subtracted from the factors, as AdamW does.
  bool decoupled = false;

  /// Throws value_error unless the strength is finite and not negative.
  void validate() const {
    if (strength >= 0.0 && std::isfinite(strength)) return;
    detail::throw_error<value_error>(
        {"frobenius_decay: strength ", strength, " must be finite, not negative"});
  }
};

namespace ops::reference {

/// The definition: with W = up down, up_gradient += lambda W down^T and down_gradient += lambda up^T W, the
/// gradient of lambda/2 ||W||_F^2. up: out x r, down: r x in, gradients shaped as their factors; all sums in
/// double, over the whole out x in product.
template <class T>
void add_frobenius_decay(const tensor_view<const T, 2>& up, const tensor_view<const T, 2>& down,
                         double lambda, const tensor_view<T, 2>& up_gradient,
                         const tensor_view<T, 2>& down_gradient) {
  const index_t out = up.extent(0), rank = up.extent(1), in = down.extent(1);
  tensor<double, 2> product({out, in});
  for (index_t i = 0; i < out; ++i) {
    for (index_t j = 0; j < in; ++j) {
      for (index_t k = 0; k < rank; ++k) {
        product(i, j) += static_cast<double>(up(i, k)) * static_cast<double>(down(k, j));
      }
    }
  }
  for (index_t k = 0; k < rank; ++k) {
    for (index_t i = 0; i < out; ++i) {
      double sum = 0.0;
      for (index_t j = 0; j < in; ++j) sum += product(i, j) * static_cast<double>(down(k, j));
      up_gradient(i, k) = static_cast<T>(static_cast<double>(up_gradient(i, k)) + lambda * sum);
    }
    for (index_t j = 0; j < in; ++j) {
      double sum = 0.0;
      for (index_t i = 0; i < out; ++i) sum += product(i, j) * static_cast<double>(up(i, k));
      down_gradient(k, j) = static_cast<T>(static_cast<double>(down_gradient(k, j)) + lambda * sum);
    }
  }
}

}  // namespace ops::reference

namespace detail {

/// One factor of a matrix as a tall matrix with `rank` columns: `up` itself, or the transpose of `down`.
struct tall_factor {
  std::size_t entry;    ///< index in the store of the parameter that holds it
  index_t offset;       ///< of its first element, in the arenas
  extents<2> shape;     ///< rows x rank
  extents<2> strides;   ///< one of them is 1, unless the other extent is at most 1
  index_t gram;         ///< offset of its own Gram matrix in grams_
  index_t others_gram;  ///< offset of the other factor's Gram matrix in grams_
};

/// Returns the view [n][a][b][c] as a matrix of n rows and a * b * c columns; the columns are sorted by
/// address. Throws shape_error, naming `who`, if the columns are not equally spaced, or neither rows nor
/// columns are contiguous.
template <class T>
tensor_view<T, 2> rows_in_memory(const std::string& who, const tensor_view<T, 4>& view) {
  std::array<std::pair<index_t, index_t>, 3> dims;  // stride, extent
  for (std::size_t d = 0; d < 3; ++d) dims[d] = {view.stride(d + 1), view.extent(d + 1)};
  std::sort(dims.begin(), dims.end());
  index_t columns = 1, step = 1;
  bool even = true;
  for (const auto& [stride, extent] : dims) {
    if (extent == 1) continue;
    if (columns == 1) step = stride;
    even = even && stride == step * columns;
    columns *= extent;
  }
  const bool dense = step == 1 || columns <= 1 || view.stride(0) == 1 || view.extent(0) <= 1;
  if (!view.empty() && (!even || !dense)) {
    throw_error<shape_error>({who, ": a factor ", view.shape(), " with strides ", view.strides(),
                              " is no matrix with adjacent rows or columns"});
  }
  return {view.data(), {view.extent(0), columns}, {view.stride(0), step}};
}

}  // namespace detail

/// Frobenius decay (Khodak et al.: "Initialization and regularization of factorized neural layers", ICLR
/// 2021, section 4): the penalty lambda/2 ||up down||_F^2 for each factorized matrix of a network, in place
/// of lambda/2 (||up||_F^2 + ||down||_F^2). (The minimum of the latter over all factorizations of a product
/// is lambda times the product's nuclear norm.) Gradients:
///     of up:    lambda up (down down^T)
///     of down:  lambda (up^T up) down
/// Both are computed from two r x r products: a matrix out x in costs 2 r^2 (out + in) multiply-adds, and the
/// out x in product is never formed.
///
///     frobenius_decay decay(net, {1e-4});
///     auto target = make_optimizer_target(net.store());
///     decay.exempt(target);                       // no separate weight decay of the factors
///     SGD<float> optimizer(std::move(target), options);
///     ...                                         // each step: gradients, exchange, clipping; then
///     optimizer.begin_step(ctx, lr);
///     decay.begin_step(ctx, lr);
///     for (each bucket) {
///       decay.add(ctx, bucket.offset, bucket.size);
///       optimizer.step_range(ctx, bucket.offset, bucket.size);
///     }
///
/// A low-rank layer with several matrices (LSTM, attention, grouped convolution) has one penalty per matrix.
/// Batch norms after a layer, biases and dense layers are not affected.
///
/// A factor decays even in a step in which no layer has written its gradient: the old gradient is zeroed
/// first, by the rules that optimizers follow (see parameter). A program that fills the whole gradient arena
/// itself must fill it anew in each step.
///
/// On device::gpu (<pufferfish/gpu.hpp>) the host never waits for the device, and begin_step and add may be
/// captured into a graph. `decoupled` is refused there, because a skipped step must not change anything.
template <class T, class Device = device::cpu>
class frobenius_decay {
 public:
  using value_type = T;

  /// Finds the low-rank layers of the network, which must outlive this object and stay at its address. Throws
  /// value_error for options out of range; state_error, naming the layer, for factors that are not stored in
  /// the network's arenas; shape_error for factors whose memory is not laid out as a matrix.
  template <class Root>
  frobenius_decay(model<Root, Device>& net, const frobenius_options& options)
      : options_(checked(options)), store_(&net.store()), layout_(net.store().shared_generation()) {
    const auto found = detail::find_slots(net);
    index_t size = 0;
    for (std::size_t i = 0; i < found.slots.size(); ++i) {
      for (const factor_views<T>& pair : found.slots[i]->low_rank().factors) {
        const std::string who = "frobenius_decay: " + found.layers[i].name + "." + pair.name;
        const index_t rank = pair.up.extent(1), first = size, second = size + rank * rank;
        add_factor(who, detail::rows_in_memory(who, pair.up), first, second);
        add_factor(who, transpose(detail::rows_in_memory(who, pair.down)), second, first);
        size += 2 * rank * rank;
      }
    }
    std::stable_sort(factors_.begin(), factors_.end(),
                     [](const auto& a, const auto& b) { return a.entry < b.entry; });
    grams_ = memory_block<T>(memory_of<Device>::source(), size, uninitialized);
  }

  const frobenius_options& options() const { return options_; }
  /// Number of factorized matrices.
  index_t matrices() const { return static_cast<index_t>(factors_.size() / 2); }

  /// Switches off the optimizer's own weight decay of all factors, sgd_options::decay_all included. The
  /// target must be made from the network's store and not yet be used by an optimizer. Throws state_error if
  /// the target has no segment with a factor's offset and size.
  void exempt(optimizer_target<T>& target) const {
    for (const detail::tall_factor& factor : factors_) {
      const auto& entry = store_->parameters()[factor.entry];
      const auto at = std::find_if(target.segments.begin(), target.segments.end(), [&](const auto& s) {
        return s.offset == entry.offset && s.size == entry.thing->size();
      });
      if (at == target.segments.end()) {
        detail::throw_error<state_error>({"frobenius_decay: the target has no segment of ",
                                          entry.thing->size(), " elements at ", entry.offset, " for ",
                                          entry.name});
      }
      at->exempt = true;
    }
  }

  /// Begins a step: computes the r x r products from the current factors. `lr` is the step's learning rate,
  /// which decoupled decay uses. Throws state_error if the network's parameters have moved to new memory
  /// since the construction, value_error for a learning rate that is not finite.
  void begin_step(context<Device>& ctx, double lr) {
    if (layout_.changed()) {
      detail::throw_error<state_error>({"frobenius_decay: made for generation ", layout_.then(),
                                        " of the network, which is now at ", layout_.now(),
                                        ": its factors have moved or are gone; make a new frobenius_decay"});
    }
    if (!std::isfinite(lr)) {
      detail::throw_error<value_error>({"frobenius_decay: learning rate ", lr, " is not finite"});
    }
    unwritten_.begin();
    begun_ = true;
    if (options_.strength == 0.0) return;
    for (const detail::tall_factor& factor : factors_) {
      const tensor_view<const T, 2> x = view(factor, std::as_const(*store_).values().data());
      ops::wide_product<T>(ctx, transpose(x), x, gram(factor.gram, factor.shape[1]));
    }
    const double factor = options_.decoupled ? -lr * options_.strength : options_.strength;
    ops::scale<T>(ctx, static_cast<T>(factor), grams_.span(), grams_.span());
  }

  /// Adds the decay of the factors in elements offset .. offset + size. Call it before the optimizer's
  /// step_range of these elements and before any other change of their values in this step, with each
  /// parameter in exactly one range per step. The order and number of ranges and the number of threads do not
  /// change a bit of the result. Throws value_error if a factor's parameter is only partly in the range, and
  /// state_error before the first begin_step.
  void add(context<Device>& ctx, index_t offset, index_t size) {
    if (!begun_) detail::throw_error<state_error>({"frobenius_decay: add before the first begin_step"});
    if (options_.strength == 0.0) return;
    T* const to = options_.decoupled ? store_->values().data() : store_->gradients().data();
    for (std::size_t i = first_from(offset); i < factors_.size(); ++i) {
      const detail::tall_factor& factor = factors_[i];
      const auto& entry = store_->parameters()[factor.entry];
      if (entry.offset >= offset + size) break;
      if (entry.offset < offset || entry.offset + entry.thing->size() > offset + size) {
        detail::throw_error<value_error>({"frobenius_decay: elements ", offset, " .. ", offset + size,
                                          " cut the parameter ", entry.name, ", elements ", entry.offset,
                                          " .. ", entry.offset + entry.thing->size()});
      }
      if (!options_.decoupled && (i == 0 || factors_[i - 1].entry != factor.entry)) {
        unwritten_.prepare(*store_, entry, [&](index_t first, index_t count) {
          ops::clear_rows<T>(ctx, tensor_view<T, 2>(to + first, {1, count}));
        });
      }
      add_product(ctx, factor, to);
    }
  }

 private:
  // Returns the options. Throws value_error if one is out of range, or for a decoupled decay on a device.
  static const frobenius_options& checked(const frobenius_options& options) {
    options.validate();
    if (options.decoupled && !memory_of<Device>::source().on_host()) {
      PUFFERFISH_THROW(value_error("frobenius_decay: decoupled decay is not available on a device"));
    }
    return options;
  }

  // Appends a factor after finding the parameter that stores it. Throws state_error, naming `who`, if none
  // does.
  void add_factor(const std::string& who, const tensor_view<T, 2>& tall, index_t gram, index_t others_gram) {
    const auto& entries = store_->parameters();
    const auto at = std::find_if(entries.begin(), entries.end(), [&](const auto& entry) {
      const T* const begin = entry.thing->data();
      return begin != nullptr && !std::less<>()(tall.data(), begin) &&
             std::less<>()(tall.data(), begin + entry.thing->size());
    });
    if (at == entries.end()) {
      PUFFERFISH_THROW(state_error(who + ": the factors are not stored in the network's arenas"));
    }
    factors_.push_back({static_cast<std::size_t>(at - entries.begin()),
                        at->offset + (tall.data() - at->thing->data()), tall.shape(), tall.strides(), gram,
                        others_gram});
  }

  // Index of the first factor whose parameter ends after `offset`.
  std::size_t first_from(index_t offset) const {
    const auto at = std::partition_point(factors_.begin(), factors_.end(), [&](const auto& factor) {
      const auto& entry = store_->parameters()[factor.entry];
      return entry.offset + entry.thing->size() <= offset;
    });
    return static_cast<std::size_t>(at - factors_.begin());
  }

  // A factor in an arena, as a tall matrix; and the memory of its Gram matrix.
  template <class U>
  static tensor_view<U, 2> view(const detail::tall_factor& factor, U* arena) {
    return {arena + factor.offset, factor.shape, factor.strides};
  }
  tensor_view<T, 2> gram(index_t begin, index_t rank) { return {grams_.data() + begin, {rank, rank}}; }

  // target += x gram; the Gram matrix is symmetric and scaled. wide_product needs a result with dense rows.
  void add_product(context<Device>& ctx, const detail::tall_factor& factor, T* to) {
    const tensor_view<T, 2> target = view(factor, to);
    const tensor_view<const T, 2> other = gram(factor.others_gram, factor.shape[1]);
    tensor_view<const T, 2> x = view(factor, std::as_const(*store_).values().data());
    scratch_frame frame(ctx.scratch());
    if (options_.decoupled) {  // target and x are the same memory
      const tensor_view<T, 2> copied = frame.template take<T>(x.shape());
      copy(x, copied);
      x = copied;
    }
    if (target.stride(1) == 1 || target.extent(1) <= 1) {
      ops::wide_product<T>(ctx, x, other, target, true);
    } else {
      ops::wide_product<T>(ctx, other, transpose(x), transpose(target), true);
    }
  }

  frobenius_options options_;
  parameter_store<T>* store_;
  detail::layout_watch layout_;
  std::vector<detail::tall_factor> factors_;  // in the order of the arenas
  memory_block<T> grams_;                     // scaled by the strength (decoupled: -lr strength)
  detail::zero_before_step unwritten_;
  bool begun_ = false;  // begin_step was called
};

template <class Root, class Device>
frobenius_decay(model<Root, Device>&, const frobenius_options&)
    -> frobenius_decay<typename model<Root, Device>::parameter_type, Device>;

PUFFERFISH_NAMESPACE_END
