// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `compression_options`: the compressor of a training run's exchange and its options.

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <pufferfish/core/message.hpp>
#include <pufferfish/distributed/compressor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of an exchange without a compressor: gradients are sent as they are, or in a narrower format
/// (exchange_wire), while the backward pass still runs.
struct no_compression {};

/// Text and compressor of "no compression".
inline std::string describe(const no_compression&) { return "none"; }
template <class T>
std::optional<any_compressor<T>> new_compressor(const parameter_store<T>&, const no_compression&) {
  return std::nullopt;
}

/// Holds the options of a compressor, of any type O whose namespace has
///   describe(options)               in a line, for logs and to tell runs apart
///   new_compressor(store, options)  an any_compressor<T>, for a parameter_store<T> of float, double or both
/// and, if they apply,
///   O::brings_momentum              the compressor has a momentum of its own, in place of the optimizer's
///   options.brings_weight_decay()   whether the compressor has a weight decay in place of the optimizer's
/// Copies share the held options. The library's, such as power_sgd_options, are in the headers of compress/.
/// \code
///   compression_options compression = power_sgd_options{.rank = 4};
///   std::optional<any_compressor<float>> compressor = compression.make(net.store());
/// \endcode
class compression_options {
 public:
  /// Makes options without a compressor, as no_compression does.
  compression_options() = default;
  compression_options(no_compression) {}
  template <class O>
  requires(compressor_options<O, float> || compressor_options<O, double>) compression_options(O options)
      : held_(std::make_shared<const model<O>>(std::move(options))) {}

  /// Whether there is a compressor.
  explicit operator bool() const { return held_ != nullptr; }

  /// Whether the compressor has a momentum in place of the optimizer's; false without options.
  bool brings_momentum() const { return held_ && held_->brings_momentum(); }
  /// Whether the compressor has a weight decay in place of the optimizer's; false without options.
  bool brings_weight_decay() const { return held_ && held_->brings_weight_decay(); }

  /// Text of the held options by their describe(); "none" without options.
  std::string text() const { return held_ ? held_->text() : "none"; }

  /// Makes a new compressor for the store's arenas; nullopt without options. Throws value_error, naming the
  /// options, if they have no new_compressor for gradients of type T, and the errors of new_compressor.
  template <class T>
  std::optional<any_compressor<T>> make(const parameter_store<T>& store) const {
    if (!held_) return std::nullopt;
    return held_->make(store);
  }

 private:
  // The options, whatever their type.
  struct base {
    base() = default;
    base(const base&) = delete;
    base& operator=(const base&) = delete;
    virtual ~base() = default;
    virtual bool brings_momentum() const = 0;
    virtual bool brings_weight_decay() const = 0;
    virtual std::string text() const = 0;
    virtual any_compressor<float> make(const parameter_store<float>&) const = 0;
    virtual any_compressor<double> make(const parameter_store<double>&) const = 0;
  };

  // Options of type O. make() throws value_error if O has no new_compressor for the scalar.
  template <class O>
  struct model final : base {
    explicit model(O&& o) : options(std::move(o)) {}
    bool brings_momentum() const override {
      if constexpr (requires { options.brings_momentum; }) return options.brings_momentum;
      return false;
    }
    bool brings_weight_decay() const override {
      if constexpr (requires { options.brings_weight_decay(); }) return options.brings_weight_decay();
      return false;
    }
    std::string text() const override { return describe(options); }
    any_compressor<float> make(const parameter_store<float>& store) const override { return made(store); }
    any_compressor<double> make(const parameter_store<double>& store) const override { return made(store); }

    template <class T>
    any_compressor<T> made(const parameter_store<T>& store) const {
      if constexpr (compressor_options<O, T>) {
        return new_compressor(store, options);
      } else {
        detail::throw_error<value_error>(
            {"compression ", text(), ": no new_compressor for gradients of ", sizeof(T), " bytes"});
      }
    }
    O options;
  };

  std::shared_ptr<const base> held_;
};

template <std::same_as<compression_options> O>
std::string describe(const O& options) {
  return options.text();
}

/// Makes a new compressor for the arenas of a network; nullopt for no_compression. Throws the errors of
/// new_compressor for the held options, and value_error if they have none for gradients of type T.
template <class T, std::same_as<compression_options> O>
std::optional<any_compressor<T>> new_compressor(const parameter_store<T>& store, const O& options) {
  return options.make(store);
}

PUFFERFISH_NAMESPACE_END
