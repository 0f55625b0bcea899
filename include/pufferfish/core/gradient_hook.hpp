// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_hook` and `gradient_listener`: how a context reports gradients that a backward pass has
/// completed.

#include <utility>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

class gradient_listener;

/// The slot for at most one listener in a context. A second registration replaces the first.
/// Layers call it in backward passes, through context::gradient_written, on the thread of the pass.
class gradient_hook {
 public:
  /// Type of a listener's function. `object` is the pointer passed at the registration, `parameter` the
  /// address of the parameter<T> whose gradient is complete, `id` its parameter<T>::id(). Ids are unique
  /// within one parameter_store only, so that a listener has to compare the address.
  using call_type = void (*)(void* object, const void* parameter, int id);

  gradient_hook() = default;
  gradient_hook(const gradient_hook&) = delete;
  gradient_hook& operator=(const gradient_hook&) = delete;
  ~gradient_hook();

  /// Tells the listener, if there is one, that the gradient of a parameter is complete; see call_type.
  void operator()(const void* parameter, int id) const {
    if (call_ != nullptr) call_(object_, parameter, id);
  }

 private:
  friend class gradient_listener;
  gradient_listener* listener_ = nullptr;
  call_type call_ = nullptr;
  void* object_ = nullptr;
};

/// A registration with a context's hook. It ends with the destruction of this object or with stop(). The hook
/// and the listener may be destroyed in any order. Only for the thread that runs the context's passes.
///
///     const gradient_listener listener = ctx.on_gradient_ready(&written, &object);
///     net.backward(ctx, dy);  // calls written(&object, parameter, id) for each complete gradient
class [[nodiscard]] gradient_listener {
 public:
  gradient_listener() = default;
  /// Registers call(object, parameter, id); see context::on_gradient_ready. `object` must exist until the
  /// registration ends; it is not owned. An exception of `call` leaves the backward pass.
  gradient_listener(gradient_hook& hook, gradient_hook::call_type call, void* object) : hook_(&hook) {
    if (hook.listener_ != nullptr) hook.listener_->hook_ = nullptr;
    hook.listener_ = this;
    hook.call_ = call;
    hook.object_ = object;
  }
  gradient_listener(gradient_listener&& other) noexcept : hook_(std::exchange(other.hook_, nullptr)) {
    if (hook_ != nullptr) hook_->listener_ = this;
  }
  gradient_listener& operator=(gradient_listener&& other) noexcept {
    if (this == &other) return *this;
    stop();
    hook_ = std::exchange(other.hook_, nullptr);
    if (hook_ != nullptr) hook_->listener_ = this;
    return *this;
  }
  ~gradient_listener() { stop(); }

  /// Ends the registration. A listener that was registered later with the same context stays registered.
  void stop() noexcept {
    if (hook_ == nullptr) return;
    hook_->listener_ = nullptr;
    hook_->call_ = nullptr;
    hook_ = nullptr;
  }

 private:
  friend class gradient_hook;
  gradient_hook* hook_ = nullptr;
};

inline gradient_hook::~gradient_hook() {
  if (listener_ != nullptr) listener_->hook_ = nullptr;
}

PUFFERFISH_NAMESPACE_END
