// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_compressor`: what the gradient exchange asks of a scheme that sends less than the gradients, and
/// `any_compressor`, which holds one. `power_sgd` and `signum` (compress/) satisfy it.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Where a compressor works: this rank of how many, and how many exchanges it has done before this one.
struct exchange_place {
  int rank = 0;
  int ranks = 1;
  std::uint64_t step = 0;
};

/// What a round of an exchange sends, out of the compressor's own memory; either part may be empty. `sum`
/// becomes the sum over all ranks, in place. `blocks` are as many equal blocks of bytes as there are ranks;
/// the compressor has filled this rank's, the exchange brings the others'. Lengths are equal on all ranks.
template <class T>
struct compressor_message {
  std::span<T> sum;
  std::span<std::byte> blocks;
};

/// What a compressor carries from step to step. `of_rank`: it differs between ranks, and a checkpoint keeps
/// every rank's; otherwise it is the same on all.
template <class T>
struct compressor_state {
  std::string name;
  std::span<T> values;
  bool of_rank = false;
};

/// A scheme that turns every rank's gradients into their mean, or into what shall stand for it, and sends
/// less than the gradients. It sees the whole gradient arena after the backward pass, may treat each tensor
/// in its own way, and knows no communicator: it says what to send, in one or more rounds a step.
///   value_type                            float or double
///   rounds()                              how many a step has
///   encode(ctx, place, round, gradients)  a compressor_message: what round 0, 1, ... sends. `gradients` is
///                                         the whole arena, of this rank alone until decode writes it
///   decode(ctx, place, round, gradients)  takes what has come into the message. After the last round
///                                         `gradients` is the result, the same bits on all ranks
///   payload_bytes()                       what one rank gives to the collectives of a step, in bytes
///   states()                              its compressor_states; all spans together are all that it carries
///   describe()                            a line that tells it from others: ranks must agree on it. If the
///                                         result's bits depend on the machine, it says on what
/// Results depend on the gradients, the place and the state alone, not on the number of threads. Where a
/// gradient is not finite nothing is asked of the result but that it is not finite either (a sign can not
/// say so; see nonfinite_policy).
template <class C>
concept gradient_compressor = std::movable<C> &&
    requires(C& compressor, const C& observer, context<device::cpu>& ctx, const exchange_place& place,
             std::span<typename C::value_type> gradients) {
  { observer.rounds() } -> std::same_as<int>;
  { compressor.encode(ctx, place, 0, gradients) } -> std::same_as<compressor_message<typename C::value_type>>;
  compressor.decode(ctx, place, 0, gradients);
  { observer.payload_bytes() } -> std::same_as<index_t>;
  { compressor.states() } -> std::same_as<std::vector<compressor_state<typename C::value_type>>>;
  { observer.describe() } -> std::same_as<std::string>;
};

/// A compressor of gradients of type T.
template <class C, class T>
concept compressor_of = gradient_compressor<C> && std::same_as<typename C::value_type, T>;

/// Holds any compressor. The calls are virtual: a few a step.
template <class T>
class any_compressor {
 public:
  using value_type = T;

  template <class C>
  requires(!std::same_as<std::remove_cvref_t<C>, any_compressor>) any_compressor(C compressor) {
    constexpr bool fits = compressor_of<C, T>;
    static_assert(
        fits,
        "pufferfish: this argument must be a gradient compressor of the network's scalar, a class "
        "with the members listed in <pufferfish/dist/compressor.hpp>; or the options of one, such as "
        "power_sgd_options, with #include <pufferfish/compress/compression.hpp>");
    // Nothing else is instantiated, so that the message is the only error.
    if constexpr (fits) self_ = std::make_unique<model<C>>(std::move(compressor));
  }

  int rounds() const { return self_->rounds(); }
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                               std::span<T> gradients) {
    return self_->encode(ctx, place, round, gradients);
  }
  void decode(context<device::cpu>& ctx, const exchange_place& place, int round, std::span<T> gradients) {
    self_->decode(ctx, place, round, gradients);
  }
  index_t payload_bytes() const { return self_->payload_bytes(); }
  std::vector<compressor_state<T>> states() { return self_->states(); }
  std::string describe() const { return self_->describe(); }

 private:
  struct base {
    base() = default;
    base(const base&) = delete;
    base& operator=(const base&) = delete;
    virtual ~base() = default;
    virtual int rounds() const = 0;
    virtual compressor_message<T> encode(context<device::cpu>&, const exchange_place&, int, std::span<T>) = 0;
    virtual void decode(context<device::cpu>&, const exchange_place&, int, std::span<T>) = 0;
    virtual index_t payload_bytes() const = 0;
    virtual std::vector<compressor_state<T>> states() = 0;
    virtual std::string describe() const = 0;
  };

  template <class C>
  struct model final : base {
    explicit model(C&& c) : held(std::move(c)) {}
    int rounds() const override { return held.rounds(); }
    compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                                 std::span<T> gradients) override {
      return held.encode(ctx, place, round, gradients);
    }
    void decode(context<device::cpu>& ctx, const exchange_place& place, int round,
                std::span<T> gradients) override {
      held.decode(ctx, place, round, gradients);
    }
    index_t payload_bytes() const override { return held.payload_bytes(); }
    std::vector<compressor_state<T>> states() override { return held.states(); }
    std::string describe() const override { return held.describe(); }
    C held;
  };

  std::unique_ptr<base> self_;
};

/// Options of which `make_compressor(store, options)` makes a compressor for the arenas of a network:
/// power_sgd_options, signum_options and compression_options (compress/compression.hpp), or a type of the
/// user with such a function in its own namespace.
template <class Options, class T>
concept compressor_options = requires(const parameter_store<T>& store, const Options& options) {
  { make_compressor(store, options) } -> std::same_as<std::optional<any_compressor<T>>>;
};

PUFFERFISH_NAMESPACE_END
