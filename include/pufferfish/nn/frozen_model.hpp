// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `frozen_model`: a model for inference only, which packs its weights once and not in every pass.

#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/nn/model.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Owns a model (network, model<Root>) whose values cannot change any more, and the packed forms of its
/// weights (packed_weights). On the CPU, the first pass packs each weight as its kernels need it; later
/// passes use these copies. Results are those of the model itself up to rounding, because kernels are chosen
/// for packed weights. A packed
/// form takes about as much memory as its weight, four times as much for 3x3 convolutions by Winograd tiles
/// (eight times as much as a bfloat16 weight); batches of different sizes may need different forms of one
/// weight. On a device, passes are those of the model.
///
/// Passes are const; several threads may run them, each with a context of its own. A frozen model can be
/// moved, not copied.
///
/// \code
/// fold_batch_norm(net);
/// const frozen_model served(std::move(net));
/// cpu_context ctx({.threads = 2});
/// const tensor<float, 4> y = served.forward(ctx, image.view());
/// \endcode
template <class Model>
class frozen_model {
 public:
  using device_type = typename Model::device_type;

  /// Takes over a model. Throws state_error if it was moved from.
  explicit frozen_model(Model model)
      : model_(std::move(model)), packed_(std::make_unique<packed_weights>(weights_of(model_.store()))) {}

  /// The model, for everything but changes.
  const Model& get() const { return model_; }

  /// Calls pass(const Model&), in which inference passes with `ctx` use the packed weights, and returns its
  /// result. Throws state_error if the context is in training mode, and the errors of `pass`.
  template <class Pass>
  decltype(auto) run(context<device_type>& ctx, Pass&& pass) const {
    if (ctx.training()) {
      detail::throw_error<state_error>(
          {"frozen_model: a pass in training mode; a frozen model is for inference"});
    }
    if constexpr (std::is_same_v<device_type, device::cpu>) {
      const packed_weights_scope scope(ctx, packed());
      return pass(model_);
    } else {
      return pass(model_);
    }
  }

  /// model.forward(ctx, arguments...), with the errors of that function and of run().
  template <class... Arguments>
  decltype(auto) forward(context<device_type>& ctx, Arguments&&... arguments) const {
    return run(ctx, [&](const Model& model) -> decltype(auto) {
      return model.forward(ctx, std::forward<Arguments>(arguments)...);
    });
  }

  /// Bytes of the packed forms so far.
  std::size_t packed_bytes() const { return packed().bytes(); }

  /// Returns the model, whose values may change again, and drops the packed forms.
  Model thaw() && {
    packed_.reset();
    return std::move(model_);
  }

 private:
  // Throws state_error if the object was moved from or thawed.
  packed_weights& packed() const {
    if (packed_ == nullptr) detail::moved_from("frozen_model");
    return *packed_;
  }

  // Where the layers' weights are: the values, and their 16-bit copies.
  template <class T>
  static std::vector<std::span<const std::byte>> weights_of(const parameter_store<T>& store) {
    if (!store.on_host()) return {};
    return {std::as_bytes(store.values()), std::as_bytes(store.rounded_values())};
  }

  Model model_;
  std::unique_ptr<packed_weights> packed_;
};

PUFFERFISH_NAMESPACE_END
