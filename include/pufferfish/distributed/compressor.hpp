// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_compressor`: requirements of the gradient exchange on a scheme that sends less than the
/// gradients. `any_compressor` holds one. `power_sgd` and `signum` (compress/) satisfy it.

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
#include <pufferfish/distributed/collectives/block_exchange.hpp>
#include <pufferfish/distributed/collectives/sparse_stream.hpp>
#include <pufferfish/distributed/exchange/bucket.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Position of a compressor's call: its rank, the number of ranks, and the number of exchanges before it.
/// Epoch and epoch_rate are those of the last call of gradient_exchange::set_epoch. learning_rate is the rate
/// by which the result of this step is multiplied: that of the last call of set_epoch or set_rate. In a
/// rare_exchange it is rare_exchange_options::outer_rate.
/// `epoch` counts from 0. 0 <= rank < ranks.
struct exchange_place {
  int rank = 0;
  int ranks = 1;
  std::uint64_t step = 0;
  index_t epoch = 0;
  double learning_rate = 0.0;
  double epoch_rate = 0.0;
};

/// The data that one round of an exchange sends. All parts are memory of the compressor, and each may be
/// absent. All ranks send the same parts; lengths are equal on all ranks except that of `own`.
template <class T>
struct compressor_message {
  /// Replaced by the sum over all ranks, element by element.
  std::span<T> sum = {};
  /// Replaced by the maximum over all ranks, element by element. No element may be NaN.
  std::span<float> maxima = {};
  /// Blocks of which every rank gets all. The compressor has set their lengths and filled the block of this
  /// rank; the exchange fills the others. Different ranks' blocks may have different lengths.
  rank_blocks* gathered = nullptr;
  /// The block of this rank, if sends_length is set: no other rank knows its length. The exchange then sets
  /// the lengths of `gathered` and fills all blocks. This costs 8 more bytes per rank.
  std::span<const std::byte> own = {};
  bool sends_length = false;
  /// Block r of `to_ranks` goes to rank r, block r of `from_ranks` comes from rank r. The compressor has set
  /// the lengths of both (exchange_blocks).
  const rank_blocks* to_ranks = nullptr;
  rank_blocks* from_ranks = nullptr;
  /// Replaced by the sum over all ranks (sparse_all_reduce), the same bits on all of them. The compressor has
  /// filled it. Its length is equal on all ranks; its number of entries may differ.
  sparse_stream<T>* sparse = nullptr;

  /// Number of bytes that rank `rank` passes to collectives in this round. Blocks for the rank itself in
  /// `to_ranks` count, though they are only copied.
  std::size_t payload_bytes(int rank) const {
    std::size_t bytes = sum.size_bytes() + maxima.size_bytes();
    if (sends_length) {
      bytes += own.size();
    } else if (gathered != nullptr) {
      bytes += gathered->size(static_cast<std::size_t>(rank));
    }
    if (sparse != nullptr) bytes += sparse_stream<T>::header_bytes + sparse->body_bytes();
    return bytes + (to_ranks == nullptr ? 0 : to_ranks->bytes().size());
  }
};

/// State that a compressor carries from step to step. `of_rank`: the state differs between ranks, and a
/// checkpoint stores that of every rank; otherwise it is equal on all ranks.
template <class T>
struct compressor_state {
  std::string name;
  std::span<T> values;
  bool of_rank = false;
};

/// A scheme that replaces every rank's gradients by their mean, or by a substitute for it, and sends less
/// than the gradients. It works on the whole gradient arena after the backward pass and may treat each tensor
/// in its own way. It uses no communicator: in one or more rounds per step it returns the data to send.
///   value_type                            float or double
///   rounds()                              number of rounds of a step
///   encode(ctx, place, round, gradients)  a compressor_message: what round 0, 1, ... sends. `gradients` is
///                                         the whole arena, of this rank alone until decode writes it
///   decode(ctx, place, round, gradients)  uses what the message has received. After the last round
///                                         `gradients` is the result, the same bits on all ranks
///   payload_bytes()                       bytes that one rank passes to the collectives of a step
///   states()                              its compressor_states, which together are its whole state
///   describe()                            a line that identifies the scheme, equal on all ranks. If the
///                                         result's bits depend on the machine, the line says on what
/// and, if it has them,
///   start(rank, ranks)                    called once by the exchange, before everything else
///   part(begin, end)                      a fresh compressor of the elements [begin, end) of the arena, a
///                                         range of whole tensors; for schemes whose scales and selections
///                                         are of single tensors or short runs, so that parts do what the
///                                         whole does. Random numbers depend on names. Sums may be rounded
///                                         otherwise, and runs begin anew at `begin`
///   has_parts()                           false if these options allow no part()
///   pack()                                for results that depend on some elements only and are 0 elsewhere:
///                                         returns the positions of these elements, ascending, from the
///                                         first element of the range on. Later calls of encode and decode
///                                         get an array of these elements alone. Payload and result
///                                         are the same
///   is_mean()                             with pack(): whether the result is the mean of these elements
/// Results depend only on the gradients, the place and the state, not on the number of threads. If a gradient
/// is not finite, the only requirement is that the result is not finite either (signs cannot show it; see
/// nonfinite_policy).
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

/// Holds any compressor, whole or split into one compressor for every bucket of the arena. Its few calls per
/// step are virtual.
/// Move-only; a moved-from object must not be used. `part` of encode and decode is not checked.
/// \code
///   any_compressor<float> compressor = new_compressor(net.store(), power_sgd_options{.rank = 4});
///   gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, std::move(compressor));
/// \endcode
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
        "with the members listed in <pufferfish/distributed/compressor.hpp>; or the options of one, such as "
        "power_sgd_options of <pufferfish/compress/low_rank/power_sgd.hpp>, for which there is "
        "new_compressor(store, "
        "options)");
    // Nothing else is instantiated, so that the message is the only error.
    if constexpr (fits) {
      parts_.push_back(std::make_unique<model<C>>(std::move(compressor)));
      description_ = parts_.front()->describe();
    }
  }

  /// Replaces the compressor by a fresh one for each bucket. Does nothing if it is already split into these
  /// buckets. Throws value_error for a compressor without parts, state_error if it is split into others.
  void split(const std::vector<gradient_bucket>& buckets) {
    if (buckets.empty()) return;
    if (is_split()) {
      if (buckets == buckets_) return;
      PUFFERFISH_THROW(state_error("compressor " + description_ + " is split into other buckets"));
    }
    if (!parts_.front()->has_parts()) {
      PUFFERFISH_THROW(value_error("compressor " + description_ + " cannot work bucket by bucket"));
    }
    const std::unique_ptr<base> whole = std::move(parts_.front());
    parts_.clear();
    for (const gradient_bucket& b : buckets) parts_.push_back(whole->part(b.offset, b.offset + b.size));
    buckets_ = buckets;
    description_ += ", bucket by bucket";
    started_ = {-1, 0};
  }
  /// Whether split() has cut the compressor into buckets.
  bool is_split() const { return !buckets_.empty(); }

  /// Whether the compressor has pack(); see gradient_compressor.
  bool can_pack() const { return parts_.front()->can_pack(); }
  /// Whether the result of packed elements is the mean over the ranks.
  bool is_mean() const { return parts_.front()->is_mean(); }
  /// Calls pack() of every part; see gradient_compressor. The compressor must have it.
  std::vector<std::vector<std::int32_t>> pack() {
    std::vector<std::vector<std::int32_t>> places;
    for (const auto& part : parts_) places.push_back(part->pack());
    return places;
  }

  /// Calls the compressor's start(rank, ranks), if it has one. Later calls with the same numbers do nothing,
  /// so that spans of states() stay valid.
  void start(int rank, int ranks) {
    if (std::pair(rank, ranks) == std::exchange(started_, std::pair(rank, ranks))) return;
    for (const auto& part : parts_) part->start(rank, ranks);
  }
  /// Number of rounds of a step; if split, of every bucket.
  int rounds() const { return parts_.front()->rounds(); }
  /// Prepares the message of a round; see gradient_compressor. If split, by the compressor of bucket `part`;
  /// `gradients` are then those of the bucket.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                               std::span<T> gradients, std::size_t part = 0) {
    return parts_[part]->encode(ctx, place, round, gradients);
  }
  /// Uses what the message of a round has received, with arguments as those of encode. After the last round
  /// `gradients` is overwritten by the result.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int round, std::span<T> gradients,
              std::size_t part = 0) {
    parts_[part]->decode(ctx, place, round, gradients);
  }
  /// Bytes that one rank passes to the collectives of a step; if split, the sum over the buckets.
  index_t payload_bytes() const {
    index_t bytes = 0;
    for (const auto& part : parts_) bytes += part->payload_bytes();
    return bytes;
  }
  /// States of the compressor for checkpoints. If split, those of all buckets, with ".0", ".1", ... appended
  /// to the names. The spans refer to memory of this object.
  std::vector<compressor_state<T>> states() {
    std::vector<compressor_state<T>> all;
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      for (compressor_state<T>& state : parts_[p]->states()) {
        if (is_split()) state.name += detail::message({".", p});
        all.push_back(std::move(state));
      }
    }
    return all;
  }
  std::string describe() const { return is_split() ? description_ : parts_.front()->describe(); }

 private:
  // A compressor, whatever its type; members as in any_compressor.
  struct base {
    base() = default;
    base(const base&) = delete;
    base& operator=(const base&) = delete;
    virtual ~base() = default;
    virtual void start(int rank, int ranks) = 0;
    virtual int rounds() const = 0;
    virtual compressor_message<T> encode(context<device::cpu>&, const exchange_place&, int, std::span<T>) = 0;
    virtual void decode(context<device::cpu>&, const exchange_place&, int, std::span<T>) = 0;
    virtual index_t payload_bytes() const = 0;
    virtual std::vector<compressor_state<T>> states() = 0;
    virtual std::string describe() const = 0;
    virtual bool has_parts() const = 0;
    virtual std::unique_ptr<base> part(index_t begin, index_t end) const = 0;
    virtual bool can_pack() const = 0;
    virtual bool is_mean() const = 0;
    virtual std::vector<std::int32_t> pack() = 0;
  };

  // A compressor of type C. start() does nothing if C has none; part() returns null without C::part.
  template <class C>
  struct model final : base {
    explicit model(C&& c) : held(std::move(c)) {}
    void start([[maybe_unused]] int rank, [[maybe_unused]] int ranks) override {
      if constexpr (requires { held.start(rank, ranks); }) held.start(rank, ranks);
    }
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
    // An inherited part() returns the base class and does not count.
    static constexpr bool splits = requires(const C& one) {
      { one.part(index_t{}, index_t{}) } -> std::same_as<C>;
    };
    bool has_parts() const override {
      if constexpr (requires { held.has_parts(); }) return splits && held.has_parts();
      return splits;
    }
    std::unique_ptr<base> part([[maybe_unused]] index_t begin, [[maybe_unused]] index_t end) const override {
      if constexpr (splits) {
        return std::make_unique<model<C>>(held.part(begin, end));
      } else {
        return nullptr;
      }
    }
    static constexpr bool packs = requires(C & one) { one.pack(); };
    bool can_pack() const override { return packs; }
    bool is_mean() const override {
      if constexpr (packs) return held.is_mean();
      return false;
    }
    std::vector<std::int32_t> pack() override {
      if constexpr (packs) return held.pack();
      return {};
    }
    C held;
  };

  std::vector<std::unique_ptr<base>> parts_;  // the whole, or one for each bucket
  std::vector<gradient_bucket> buckets_;      // empty: not split
  std::string description_;
  std::pair<int, int> started_{-1, 0};  // rank, ranks
};

/// Options from which `new_compressor(store, options)` makes an any_compressor, or an empty std::optional,
/// for the arenas of a network: those of the library's compressors, each in the header of its compressor,
/// compression_options, or a type of the user with such a function in its own namespace.
template <class Options, class T>
concept compressor_options = requires(const parameter_store<T>& store, const Options& options) {
  { new_compressor(store, options) } -> std::convertible_to<std::optional<any_compressor<T>>>;
};

PUFFERFISH_NAMESPACE_END
