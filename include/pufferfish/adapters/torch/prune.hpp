// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::module_mask`: a mask of the remaining weights of a libtorch module. Keeps pruned weights at 0
/// while libtorch's optimizers train the module.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/parameters.hpp>
#include <pufferfish/adapters/torch/prunable.hpp>
#include <pufferfish/distributed/exchange_options.hpp>
#include <pufferfish/prune/apply_mask.hpp>
#include <pufferfish/prune/compact_sum.hpp>
#include <pufferfish/prune/grasp.hpp>
#include <pufferfish/prune/magnitude.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// Keeps the values of a module's trained parameters and of all its buffers, and restores them in the
/// destructor.
template <class T>
class restored_module {
 public:
  /// Copies the values of the parameters and of the module's buffers.
  restored_module(const torch::nn::Module& module, const std::vector<trained_parameter<T>>& parameters) {
    const torch::NoGradGuard no_grad;
    for (const auto& p : parameters) kept_.emplace_back(p.tensor, p.tensor.detach().clone());
    for (const Tensor& t : module.buffers()) kept_.emplace_back(t, t.detach().clone());
  }
  restored_module(const restored_module&) = delete;
  restored_module& operator=(const restored_module&) = delete;
  ~restored_module() {
    const torch::NoGradGuard no_grad;
    for (auto& [tensor, before] : kept_) tensor.copy_(before);
  }

 private:
  std::vector<std::pair<Tensor, Tensor>> kept_;
};

/// Computes the gradients of a module's loss at the values of an arena, into that arena's gradients. One
/// backward pass per call of compute().
template <class T>
class arena_gradients {
 public:
  /// `copies` are the trained parameters after the arena has taken copies of their values.
  explicit arena_gradients(const std::vector<trained_parameter<T>>& copies) : copies_(&copies) {
    for (const trained_parameter<T>& p : copies) tensors_.push_back(p.tensor);
  }

  /// Computes the gradients of `loss(which)`, a tensor of one element. Uses the same random numbers in every
  /// call, so that differences of gradients do not depend on dropout. Does not change .grad of the module's
  /// tensors and does not call hooks on them. A parameter that the loss does not depend on gets zeros.
  template <class Loss>
  void compute(const Loss& loss, int which) const {
    for (const trained_parameter<T>& p : *copies_) {
      std::ranges::copy(std::as_const(*p.shown).values(), elements_of<T>(p.tensor).begin());
      p.changed();
    }
    std::vector<Tensor> found;
    {
      const keep_random_state keep;
      const torch::AutoGradMode enabled(true);
      found = torch::autograd::grad({loss(which)}, tensors_, {}, torch::nullopt, false, true);
    }
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor place = (*copies_)[i].view_at((*copies_)[i].shown->gradient_data(), nullptr);
      found[i].defined() ? place.copy_(found[i]) : place.zero_();
    }
  }

 private:
  const std::vector<trained_parameter<T>>* copies_;
  std::vector<Tensor> tensors_;
};

}  // namespace detail

/// Returns the options of an exchange of the remaining weights' gradients (compact_sum): those of a full
/// exchange, but compressed bucket by bucket during the backward pass, and not rounded to 16 bits.
inline exchange_options compact_options(exchange_options full = {}) {
  full.compress_by_bucket = true;
  full.wire = exchange_wire::same;
  return full;
}

/// A mask of the weights of a module's convolutions and linear matrices: one bit each, set where the
/// weight remains. A new mask keeps everything. To prune a network after some training, and train the
/// remaining weights on all ranks:
///
///     host_torch::module_mask pruned(*net);
///     pruned.prune_by_magnitude({.share = 0.8});
///     pruned.apply(optimizer);                       // pruned weights and their momentum are 0
///     host_torch::distributed parallel(*net, comm, host_torch::compact_options(),
///                                      compact_sum_options{pruned.mask()});
///
/// The exchange sends the gradients of the remaining weights only and sets all others to 0, so that the
/// optimizer's steps keep pruned weights at exactly 0, with any momentum and weight decay. A program that
/// does not exchange gradients calls mask_gradients() between backward() and step() instead.
///
/// Frozen parameters are not part of the mask. The order of the bits is that of the arena of `distributed`:
/// parameters in reverse order of registration, elements in the order of memory. Of equal weights, those
/// earlier in this order are pruned first. Ranks with equal weights get equal masks; otherwise broadcast()
/// makes the masks equal. A mask is valid for one set of parameters: after factorize(), make a new one, which
/// has bits for the factors of low-rank modules.
///
/// PacTrain: Wang, Wu, Li and Kutscher, DAC 2025.
///
/// One thread at a time uses an object. prune_*, broadcast and from_tensor change the mask only; apply() and
/// mask_gradients() change tensors.
template <class T = float>
class module_mask {
 public:
  /// Makes a mask of prunable_weights(module) that keeps all weights. The module must outlive the object.
  /// Throws value_error, naming it, for a trained parameter that is not dense, not on the CPU or not of
  /// scalar T.
  explicit module_mask(torch::nn::Module& module) : module_mask(module, prunable_weights(module)) {}
  /// Makes the mask of the tensors that `choice` selects; their names are those of module.named_parameters().
  module_mask(torch::nn::Module& module, const prunable_choice& choice)
      : module_(&module), parameters_(detail::trained_parameters<T>(module, user)) {
    std::erase_if(parameters_, [](const auto& p) { return p.tensor.numel() == 0; });
    std::reverse(parameters_.begin(), parameters_.end());
    parameter_store<T> store;
    show_values(store);
    mask_ = std::make_shared<const weight_mask>(store, choice);
  }

  /// The present bits. Later changes of the mask make a new weight_mask, so that an exchange made with this
  /// one does not change; pass the new mask to distributed::set_exchange.
  const std::shared_ptr<const weight_mask>& mask() const { return mask_; }
  mask_report report() const { return mask_->report(); }

  /// Applies pufferfish::prune_by_magnitude to the module: prunes weights of smallest |w| until floor(share x
  /// prunable) are pruned in all, or as the options say. Returns the number of removed weights. The values do
  /// not change: see apply(). Throws value_error unless 0 <= share <= 1; state_error if a parameter's scalar,
  /// shape or strides have changed.
  index_t prune_by_magnitude(const magnitude_options& options = {}) {
    follow();
    parameter_store<T> store;
    show_values(store);
    return change([&](weight_mask& mask) { return pufferfish::prune_by_magnitude(mask, store, options); });
  }

  /// Applies pufferfish::prune_by_grasp: removes the weights of largest score -theta x H g. `loss(which)`
  /// runs a forward pass and returns the loss of half batch 0 or 1, a tensor of one element:
  ///
  ///     pruned.prune_by_grasp([&](int half) {
  ///       return torch::nn::functional::cross_entropy(net->forward(images[half]) / 200, labels[half]);
  ///     }, {.share = 0.8});
  ///
  /// The samples should be class-balanced (balanced_halves) and the module in training mode. Computes six
  /// gradients, each with the same random numbers. Afterwards parameters and buffers have their old bits,
  /// also if `loss` throws; .grad does not change. Either all ranks score the same samples, or broadcast()
  /// must be called afterwards. Needs memory for ten arrays of the parameters' size. Throws the errors of
  /// prune_by_magnitude; value_error if a norm or a score is not finite, and for fresh_linear, because the
  /// mask does not distinguish linear layers from convolutions.
  template <class Loss>
  index_t prune_by_grasp(const Loss& loss, const grasp_options& options = {}) {
    if (options.fresh_linear) {
      PUFFERFISH_THROW(
          value_error("host_torch::module_mask: grasp_options::fresh_linear is not possible for "
                      "modules of libtorch"));
    }
    follow();
    auto copies = detail::trained_parameters<T>(*module_, user);
    std::erase_if(copies, [](const auto& p) { return p.tensor.numel() == 0; });
    parameter_store<T> store;
    store.pack([&](state_visitor<T>& visitor) {
      for (const auto& p : copies) visitor.on_parameter(p.name, *p.shown);
    });
    const detail::restored_module<T> before(*module_, copies);
    const detail::arena_gradients<T> gradients(copies);
    return change([&](weight_mask& mask) {
      return pufferfish::prune_by_grasp(
          detail::thread_context(), store, mask, [&](int which) { gradients.compute(loss, which); }, options);
    });
  }

  /// Sends the mask of rank `root` to all ranks. Collective. Throws the errors of the communicator and of
  /// pufferfish::broadcast_mask.
  template <class Comm>
  void broadcast(Comm& comm, int root = 0) {
    change([&](weight_mask& mask) {
      broadcast_mask(comm, mask, root);
      return 0;
    });
  }

  /// Sets pruned weights to 0. Call it once after the mask has changed or values have been loaded. Throws
  /// state_error as prune_by_magnitude.
  void apply() {
    follow();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (apply_to(i, parameters_[i].tensor.detach())) parameters_[i].changed();
    }
  }
  /// Sets pruned weights to 0, and also the optimizer's state of these weights: momentum and means of SGD,
  /// Adam, AdamW, RMSprop and Adagrad. Throws value_error for the state of another optimizer, and state_error
  /// as prune_by_magnitude.
  void apply(torch::optim::Optimizer& optimizer) {
    std::vector<std::vector<Tensor>> states;
    for (const auto& p : parameters_) states.push_back(detail::states_of(optimizer, p.tensor));
    apply();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      for (const Tensor& state : states[i]) apply_to(i, state);
    }
  }

  /// Sets .grad to 0 where the weight is pruned, also where .grad is NaN. Call it in each step before the
  /// optimizer's, unless a compact_sum has exchanged the gradients. Undefined gradients stay undefined. Not
  /// collective.
  void mask_gradients() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) apply_to(i, parameters_[i].tensor.grad());
  }

  /// Returns the bits of the pruning mask (one bit per weight) as a tensor of 64-bit integers, which can be
  /// saved with the module.
  Tensor to_tensor() const {
    const auto words = mask_->words();
    Tensor bits = torch::empty({static_cast<std::int64_t>(words.size())}, torch::kLong);
    if (!words.empty()) std::memcpy(bits.data_ptr(), words.data(), words.size_bytes());
    return bits;
  }
  /// Reads the bits that to_tensor has returned for a module of the same parameters. Throws value_error,
  /// without changing the mask, for another number of words or for bits set after the last element of a
  /// parameter.
  void from_tensor(const Tensor& bits) {
    const Tensor own = bits.to(torch::kCPU, torch::kLong).contiguous();
    std::vector<std::uint64_t> words(static_cast<std::size_t>(own.numel()));
    if (!words.empty()) std::memcpy(words.data(), own.data_ptr(), words.size() * sizeof(std::uint64_t));
    change([&](weight_mask& mask) {
      mask.set_words(words);
      return 0;
    });
  }

 private:
  static constexpr const char* user = "host_torch::module_mask";

  // Makes `store` refer to the module's values in place, in the order of the arena.
  void show_values(parameter_store<T>& store) const {
    store.pack_gradients([this](state_visitor<T>& visitor) {
      for (auto p = parameters_.rbegin(); p != parameters_.rend(); ++p) {
        visitor.on_parameter(p->name, *p->shown);
      }
    });
  }

  // Lets the store refer to the tensors' present memory.
  void follow() const {
    for (const auto& p : parameters_) p.follow(user);
  }

  // Applies work(mask) to a copy of the mask, which then replaces it.
  template <class Work>
  index_t change(const Work& work) {
    auto changed = std::make_shared<weight_mask>(*mask_);
    const index_t removed = work(*changed);
    mask_ = std::move(changed);
    return removed;
  }

  // Zeroes pruned elements of a tensor of parameter i's shape. Returns whether the parameter has bits.
  bool apply_to(std::size_t i, const Tensor& values) const {
    const masked_tensor& place = mask_->tensors()[i];
    if (!place.prunable || !values.defined()) return false;
    const torch::NoGradGuard no_grad;
    const Tensor& like = parameters_[i].tensor;
    const bool in_place = detail::can_be_shown<T>(values) && values.strides() == like.strides();
    const Tensor ordered = in_place ? values : torch::empty_like(like).copy_(values);
    mask_->apply(detail::thread_context(), detail::elements_of<T>(ordered), place.offset);
    if (!in_place) Tensor(values).copy_(ordered);
    return true;
  }

  torch::nn::Module* module_;
  std::vector<detail::trained_parameter<T>> parameters_;  // with elements, in the order of the arena
  std::shared_ptr<const weight_mask> mask_;
};

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
