// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `function_ref`: a reference to any callable of a given signature.

#include <memory>
#include <type_traits>
#include <utility>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

template <class Signature>
class function_ref;

/// Parameter type of functions that call back. Unlike a template parameter it lets the function be compiled
/// once for all callables; unlike std::function it never allocates. The callable must outlive the reference,
/// as an argument does until the called function returns.
///
/// \code
/// void for_each_row(index_t rows, function_ref<void(index_t)> f);
/// for_each_row(10, [&](index_t row) { sum += x[row]; });
/// \endcode
template <class Result, class... Arguments>
class function_ref<Result(Arguments...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, function_ref> &&
           std::is_invocable_r_v<Result, F&, Arguments...>)
      function_ref(F&& f)  // NOLINT(google-explicit-constructor,bugprone-forwarding-reference-overload)
      : object_(address_of(f)), call_([](void* object, Arguments... arguments) -> Result {
          if constexpr (std::is_void_v<Result>) {
            static_cast<void>((*as<F>(object))(std::forward<Arguments>(arguments)...));
          } else {
            return (*as<F>(object))(std::forward<Arguments>(arguments)...);
          }
        }) {}

  Result operator()(Arguments... arguments) const {
    return call_(object_, std::forward<Arguments>(arguments)...);
  }

 private:
  // Functions have no object, so their addresses are converted, as POSIX allows.
  template <class F>
  static void* address_of(F& f) {
    if constexpr (std::is_function_v<F>) {
      return reinterpret_cast<void*>(&f);
    } else {
      return const_cast<void*>(static_cast<const void*>(std::addressof(f)));
    }
  }
  template <class F>
  static auto* as(void* object) {
    using callable = std::remove_reference_t<F>;
    if constexpr (std::is_function_v<callable>) {
      return reinterpret_cast<callable*>(object);
    } else {
      return static_cast<callable*>(object);
    }
  }

  void* object_;
  Result (*call_)(void*, Arguments...);
};

PUFFERFISH_NAMESPACE_END
