// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `dgc`: deep gradient compression, which sends the largest entries of the accumulated momentum.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/compress/codes/tensor_chunks.hpp>
#include <pufferfish/compress/sparse/dgc_options.hpp>
#include <pufferfish/compress/sparse/entry_blocks.hpp>
#include <pufferfish/compress/sparse/sampled_selector.hpp>
#include <pufferfish/compress/sparse/select_largest.hpp>
#include <pufferfish/optim/clip.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The kernels of dgc.inc, in place; g is factor times the gradient.
///   accumulate(nesterov, m, factor, gradient, u, v, count)
///       u = m u + g; v += u                 Nesterov: u = m (u + g); v += u + g
///   add_momentum(nesterov, m, mean, u, to, count)
///       u = m u + mean; to = u              Nesterov: u = m (u + mean); to = u + mean
///   add_decay(nesterov, m, d, values, b, to, count)
///       b = m b + values; to += d b         Nesterov: to += d (values + m b), with the new b
#define PUFFERFISH_KERNELS dgc_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/sparse/dgc.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// Deep gradient compression (Lin, Han, Mao, Wang and Dally, ICLR 2018): accumulates gradients with momentum
/// on each rank and sends the largest entries. With momentum m and the gradient g_w of rank w of p ranks,
/// scaled by min(1, (tau / sqrt(p)) / ||g_w||) if clip_norm is tau > 0:
///
///     matrices (two or more dimensions), u_w and v_w zero at the start, on each rank:
///       u_w = m u_w + g_w;  v_w = v_w + u_w        (Nesterov: u_w = m (u_w + g_w);  v_w = v_w + u_w + g_w)
///       the k = ceil(rho n) entries of largest |v_w| are sent; they and those of u_w become zero
///       G = (1 / p) times the sum of the entries of all ranks, added in the order of the ranks
///     vectors:
///       M = mean of g_w over all ranks;  u = m u + M;  G = u           (Nesterov: u = m (u + M);  G = u + M)
///     parameters with weight decay d, w their values:
///       b = m b + w;  result = G + d b                            (Nesterov: result = G + d (w + m b))
///
/// rho is dgc_ratio of the epoch, n the number of elements of a tensor. In the line for weight decay, w
/// without an index are the parameters' values; b and u are zero at the start. The optimizer uses the result
/// as the gradient: use SGD without momentum and without weight decay. Without factor masking the sent
/// entries of u_w are not set to zero.
///
/// A step has one round. The message has a sum of the vectors, and gathered blocks of equal length with all
/// values, then all indices (32-bit integers, ascending, local to their tensor), tensors in the order of the
/// arena. With half_values values are sent as float16 of at most 65504, and v_w keeps the rounding error.
/// With a sampled threshold fewer than k entries may be selected; blocks are then padded with entries of the
/// index n, which decode ignores. With code_route::sparse a sparse all-reduce adds the entries of all ranks,
/// in the order of sparse_all_reduce.
///
/// The store must outlive the object if there is weight decay.
///
/// The number k changes with the epoch: call gradient_exchange::set_epoch at the start of every epoch if
/// warmup_epochs is above 0. State: u, v, and with weight decay b, one value per element each. With clip_norm
/// exchange_options::compress_by_bucket is refused: ||g_w|| is the norm of all gradients, which is known only
/// after the backward pass.
///
/// \code
/// dgc_options options{.ratio = 0.001, .momentum = 0.9, .warmup_epochs = 4};
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// exchange.set_epoch(0, learning_rate);  // the number k follows from the epoch
/// \endcode
template <class T>
class dgc {
 public:
  using value_type = T;

  /// Makes the compressor for all parameters of a store, with u = v = b = 0. Throws value_error for options
  /// out of range (dgc_options::validate) and, naming the tensor, for a tensor of 2^31 elements or more; with
  /// code_route::sparse also for an arena of 2^31 elements or more.
  dgc(const parameter_store<T>& store, const dgc_options& options)
      : dgc(&store, coded_tensors(store), places_in(store, options), options) {}

  /// Whether part() may be called: false if clip_norm is above 0, since clipping needs the norm of all
  /// gradients.
  bool has_parts() const { return options_.clip_norm == 0.0; }
  /// Makes a compressor of elements [begin, end) of the arena with u = v = b = 0. With weight decay the store
  /// must outlive the result.
  dgc part(index_t begin, index_t end) const {
    std::vector<tensor_place> places;
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      if (tensors_[t].offset >= begin && tensors_[t].offset < end) places.push_back(places_[t]);
    }
    return {store_, coded_parts(tensors_, begin, end), std::move(places), options_};
  }

  /// Number of rounds of messages in a step.
  int rounds() const { return 1; }

  /// Updates u and v of matrices, selects and removes the entries to send, and writes the gradients of
  /// vectors to the sum. `gradients` is not changed.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int,
                               std::span<T> gradients) {
    set_epoch(place.epoch);
    rank_blocks& codes = entries_.blocks(is_summed() ? 1 : at(place.ranks));
    accumulate(ctx, clip_factor(ctx, place.ranks, gradients), gradients.data());
    const std::size_t block = is_summed() ? 0 : at(place.rank);
    options_.sampled ? select_by(sampled_, ctx, block) : select_by(exact_, ctx, block);
    compressor_message<T> message;
    message.sum = sum_.span();
    if (is_summed()) {
      message.sparse = &stream_;
    } else {
      message.gathered = &codes;
    }
    return message;
  }

  /// Overwrites `gradients` with the result and updates u of vectors and b. Throws value_error, naming tensor
  /// and rank, for indices that are not ascending or not in their tensor. Throws state_error if weight decay
  /// needs values that are not on the host.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int, std::span<T> gradients) {
    if (is_summed()) {
      ops::fill(ctx, gradients, T(0));
      stream_.add_to(gradients);
    } else {
      entries_.read(ctx, "dgc", tensors_);
    }
    const T factor = T(1) / static_cast<T>(place.ranks);
    detail::scale_values(sum_.span(), factor);
    chunks_.for_each(ctx, [&](index_t, index_t, std::span<const detail::tensor_part> parts, std::size_t) {
      for (const detail::tensor_part& part : parts) {
        if (is_matrix(tensors_[part.tensor])) {
          const std::span<T> to = gradients.subspan(at(part.begin), at(part.size()));
          if (!is_summed()) add_entries(part, gradients);
          detail::scale_values(to, factor);
        } else {
          add_momentum(part, gradients.data());
        }
        if (places_[part.tensor].decays) add_decay(part, gradients.data());
      }
    });
  }

  /// Bytes that this rank contributes to a step in the epoch of the last encode; before the first encode: in
  /// epoch 0.
  index_t payload_bytes() const {
    return static_cast<index_t>(sent_) + sum_.size() * static_cast<index_t>(sizeof(T));
  }

  /// States for checkpoints: "exchange.momentum" (u) and "exchange.accumulated" (v), different on every rank;
  /// with weight decay also "exchange.decayed" (b), equal on all ranks.
  std::vector<compressor_state<T>> states() {
    std::vector<compressor_state<T>> result{{"exchange.momentum", u_.span(), true},
                                            {"exchange.accumulated", v_.span(), true}};
    if (decayed_.size() > 0) result.push_back({"exchange.decayed", decayed_.span(), false});
    return result;
  }

  /// Text of the options, and of how momenta of vectors are rounded: every rank computes these by itself.
  std::string describe() const {
    return pufferfish::describe(options_) + (detail::fuses_multiply_add() ? ", fused multiply-add" : "");
  }

 private:
  // The position of a vector in the sum (matrices: -1), and the number of its parameter in the store.
  struct tensor_place {
    index_t in_sum = 0;
    std::size_t parameter = 0;
    bool decays = false;
  };

  dgc(const parameter_store<T>* store, std::vector<coded_tensor> tensors, std::vector<tensor_place> places,
      const dgc_options& options)
      : options_((options.validate(), options)),
        store_(store),
        tensors_(std::move(tensors)),
        places_(std::move(places)),
        chunks_(tensors_),
        entries_(options.half_values, options.sampled),
        exact_("dgc", tensors_),
        sampled_("dgc", tensors_),
        u_(coded_size(tensors_)),
        v_(coded_size(tensors_)) {
    if (is_summed()) stream_ = sparse_stream<T>(u_.size());
    index_t vectors = 0;
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      places_[t].in_sum = is_matrix(tensors_[t]) ? -1 : vectors;
      if (!is_matrix(tensors_[t])) vectors += tensors_[t].size;
    }
    sum_ = aligned_buffer<T>(vectors);
    if (options.weight_decay > 0.0) decayed_ = aligned_buffer<T>(u_.size());
    set_epoch(0);
  }

  // Finds the parameters of coded_tensors(store); positions in the sum are set by the constructor.
  static std::vector<tensor_place> places_in(const parameter_store<T>& store, const dgc_options& options) {
    std::vector<tensor_place> places;
    for (std::size_t id = 0; id < store.parameters().size(); ++id) {
      const auto& parameter = *store.parameters()[id].thing;
      if (parameter.size() == 0) continue;
      const bool is_decayed = options.decay_all || parameter.role() == parameter_role::weight;
      places.push_back({.parameter = id, .decays = options.weight_decay > 0.0 && is_decayed});
    }
    return places;
  }

  static std::size_t at(index_t i) { return static_cast<std::size_t>(i); }
  bool is_summed() const { return options_.route == code_route::sparse; }
  static bool is_matrix(const coded_tensor& tensor) { return tensor.layout.dims >= 2; }
  // Sets the number of entries of each matrix for the epoch, and the bytes to send.
  void set_epoch(index_t epoch) {
    if (epoch == epoch_) return;
    epoch_ = epoch;
    std::vector<index_t> counts;
    for (const coded_tensor& tensor : tensors_) {
      const double entries = std::ceil(dgc_ratio(options_, epoch) * static_cast<double>(tensor.size));
      counts.push_back(is_matrix(tensor) ? std::min(tensor.size, static_cast<index_t>(entries)) : 0);
    }
    entries_.resize(detail::entry_lists(counts));
    sent_ = entries_.block_bytes();
    if (is_summed()) sent_ = stream_.header_bytes + std::min(sent_, at(u_.size()) * sizeof(T));
  }

  // Computes the factor of the gradients, min(1, (tau / sqrt(p)) / ||g||); 1 if clip_norm (tau) is 0.
  T clip_factor(context<device::cpu>& ctx, int ranks, std::span<const T> gradients) const {
    if (options_.clip_norm == 0.0) return T(1);
    const double most = options_.clip_norm / std::sqrt(static_cast<double>(ranks));
    const double norm = gradient_norm<T>(ctx, gradients);
    return norm > most ? static_cast<T>(most / norm) : T(1);
  }

  // Updates u and v of matrices, and writes the gradients of vectors to the sum.
  void accumulate(context<device::cpu>& ctx, T factor, const T* gradients) {
    const auto take = PUFFERFISH_KERNEL(widest_isa(), detail::dgc_passes, accumulate<T>);
    const auto scale = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, scale<T>);
    const T momentum = static_cast<T>(options_.momentum);
    chunks_.for_each(ctx, [&](index_t, index_t, std::span<const detail::tensor_part> parts, std::size_t) {
      for (const detail::tensor_part& part : parts) {
        const T* const from = gradients + part.begin;
        if (is_matrix(tensors_[part.tensor])) {
          take(options_.nesterov, momentum, factor, from, u_.data() + part.begin, v_.data() + part.begin,
               part.size());
        } else {
          scale(factor, from, in_sum(part), part.size());
        }
      }
    });
  }
  // Address of a part of a vector in the sum.
  T* in_sum(const detail::tensor_part& part) {
    return sum_.data() + places_[part.tensor].in_sum + part.begin - tensors_[part.tensor].offset;
  }

  // Writes the selected entries into a block or the stream, and removes them from u and v.
  template <class Selector>
  void select_by(Selector& selector, context<device::cpu>& ctx, std::size_t block) {
    selector.select(ctx, entries_.lists(), v_.span());
    const std::span<const T> sent = entries_.write(block, selector.values(), selector.indices());
    if (is_summed()) {
      stream_ = detail::stream_of_lists<T>(tensors_, entries_.lists(), selector.indices(), sent);
      sent_ = stream_.header_bytes + stream_.body_bytes();
    }
    const std::int32_t* const indices = selector.indices().data();
    entries_.lists().for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      T* const u = u_.data() + tensors_[t].offset;
      T* const v = v_.data() + tensors_[t].offset;
      for (index_t i = begin; i < end && indices[i] < tensors_[t].size; ++i) {
        v[indices[i]] = options_.half_values ? v[indices[i]] - sent[at(i)] : T(0);
        if (options_.factor_masking) u[indices[i]] = T(0);
      }
    });
  }

  // Overwrites a part of a matrix's gradients with the sum of the entries of all ranks.
  void add_entries(const detail::tensor_part& part, std::span<T> gradients) const {
    const index_t offset = tensors_[part.tensor].offset;
    std::fill_n(gradients.data() + part.begin, part.size(), T(0));
    entries_.add(part.tensor, part.begin - offset, part.end - offset, gradients.data() + offset);
  }
  // Updates u of a part of a vector, and writes the result to its gradients.
  void add_momentum(const detail::tensor_part& part, T* gradients) {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::dgc_passes, add_momentum<T>);
    kernel(options_.nesterov, static_cast<T>(options_.momentum), in_sum(part), u_.data() + part.begin,
           gradients + part.begin, part.size());
  }
  // Updates b of a part of a tensor, and adds the weight decay to its gradients.
  void add_decay(const detail::tensor_part& part, T* gradients) {
    const auto& parameter = *store_->parameters()[places_[part.tensor].parameter].thing;
    if (parameter.on_device()) {
      PUFFERFISH_THROW(state_error("dgc: weight decay needs the values of parameters on the host"));
    }
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::dgc_passes, add_decay<T>);
    kernel(options_.nesterov, static_cast<T>(options_.momentum), static_cast<T>(options_.weight_decay),
           parameter.data() + (part.begin - tensors_[part.tensor].offset), decayed_.data() + part.begin,
           gradients + part.begin, part.size());
  }

  dgc_options options_;
  const parameter_store<T>* store_;
  std::vector<coded_tensor> tensors_;
  std::vector<tensor_place> places_;
  detail::tensor_chunks chunks_;
  detail::entry_blocks<T> entries_;  // lists of the epoch's lengths; empty for vectors
  largest_selector<T> exact_;
  sampled_selector<T> sampled_;
  sparse_stream<T> stream_;  // entries to send with code_route::sparse
  std::size_t sent_ = 0;     // bytes of entries that are sent
  index_t epoch_ = -1;
  aligned_buffer<T> u_, v_, decayed_;  // u, v and b
  aligned_buffer<T> sum_;              // values of all vectors
};

/// Makes a dgc compressor for the gradients of `store`. Throws the errors of dgc's constructor. The store
/// must outlive the compressor if there is weight decay.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const dgc_options& options) {
  return dgc<T>(store, options);
}

PUFFERFISH_NAMESPACE_END
