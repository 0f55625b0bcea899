// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// All-reduce algorithms of the library over messages between pairs of ranks: a ring, recursive doubling, and
/// a direct exchange whose messages have 16-bit numbers.
///
/// The order of additions depends only on the number of ranks and the length. Every element is computed once
/// and copied, or computed alike by both partners, so that all ranks hold the same bits.
///
/// After a timeout_error messages may still arrive: values and scratch must then live as long as the
/// process (mpi::communicator::set_timeout).

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/distributed/collectives/message_stream.hpp>
#include <pufferfish/distributed/collectives/wire.hpp>
#include <pufferfish/distributed/communicator.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Requirements of these algorithms besides `communicator`: messages in order between pairs of ranks.
///   start_send(span<const T>, to), start_receive(span<T>, from)
/// return a collective_request; the memory belongs to the request until it is done, and T is trivially
/// copyable.
template <class C>
concept messenger = requires(C& comm, std::span<const std::byte> out, std::span<std::byte> in, int rank) {
  { comm.start_send(out, rank) } -> collective_request;
  { comm.start_receive(in, rank) } -> collective_request;
};

/// How the sum over p ranks is computed. With powers of two p the numbers below are exact. For other p
/// recursive doubling passes the whole length twice more: once to a partner before, once back after the
/// doubling.
enum class all_reduce_algorithm {
  automatic,           ///< by the length of the message, as an exchange_plan says
  library,             ///< the communicator's own
  ring,                ///< fewest bytes: 2 (p - 1) / p of the length per rank, 2 (p - 1) messages
  recursive_doubling,  ///< fewest messages: log2 p of the whole length
};

/// Name of the algorithm, as in the text of an exchange_plan.
constexpr const char* to_string(all_reduce_algorithm algorithm) {
  return algorithm == all_reduce_algorithm::automatic ? "automatic"
         : algorithm == all_reduce_algorithm::library ? "library"
         : algorithm == all_reduce_algorithm::ring    ? "ring"
                                                      : "recursive doubling";
}

namespace detail {

/// Returns part number `part` of a span that is cut into `parts` parts: elements n part / parts to n (part +
/// 1) / parts, rounded down. Their lengths differ by at most one.
template <class T>
std::span<T> part_of(std::span<T> all, std::size_t part, std::size_t parts) {
  const std::size_t begin = all.size() * part / parts, end = all.size() * (part + 1) / parts;
  return all.subspan(begin, end - begin);
}

/// Sends `out` to rank `to` while receiving into.size() elements from rank `from`: into = (received + into)
/// factor. `out` may be `into`, because a piece is sent before the sum replaces it. `scratch`: memory of the
/// pieces under way, resized to at most the length of `into`, and at most 15 MiB.
template <class C, class T>
void send_and_add(C& comm, std::span<const T> out, int to, std::span<T> into, int from,
                  std::vector<T>& scratch, T factor) {
  const piece_schedule<T> pieces(out.size(), into.size());
  check_not_given_up(comm);
  scratch.resize(pieces.room());
  const auto slot = [&](std::size_t i) { return pieces.slot(std::span<T>(scratch), i, pieces[i].receives); };
  stream_pieces(
      comm, pieces,
      [&](std::size_t i) {
        return addressed_span<const T>{out.subspan(pieces[i].begin, pieces[i].sends), to};
      },
      [&](std::size_t i) {
        return addressed_span<T>{slot(i), from};
      },
      [&](std::size_t i) {
        add_received<T>(slot(i), into.subspan(pieces[i].begin, pieces[i].receives), factor);
      });
}

}  // namespace detail

/// Replaces element i by `factor` times the sum of all ranks' elements i, in place: the sum is rounded, then
/// the product. Chunk c of p (elements n c / p .. n (c + 1) / p) of the sum is ((x_c + x_c+1) + ...) +
/// x_c+p-1 with ranks modulo p, formed on its way around the ring, multiplied where it is complete, and then
/// passed on (reduce-scatter and all-gather; Thakur, Rabenseifner, Gropp, IJHPCA 2005). `scratch` keeps the
/// pieces that are under way. Collective; throws the errors of start_send and start_receive. `values` has the
/// same length on all ranks. `scratch` is resized to at most the longest chunk, and at most 15 MiB, and its
/// contents are overwritten; it must not be the memory of `values`, and may be reused by later calls. With
/// one rank the values are only multiplied. Throws timeout_error if an earlier wait of the communicator has
/// timed out.
/// \code
///   std::vector<float> scratch;
///   const float share = 1.0F / static_cast<float>(comm.size());
///   ring_all_reduce(comm, std::span<float>(gradients), scratch, share);  // the mean over the ranks
/// \endcode
template <class C, class T>
void ring_all_reduce(C& comm, std::span<T> values, std::vector<T>& scratch,
                     std::type_identity_t<T> factor = T(1)) {
  const auto ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
  if (ranks == 1) return detail::scale_values(values, factor);
  const int next = static_cast<int>((me + 1) % ranks), before = static_cast<int>((me + ranks - 1) % ranks);
  const auto chunk = [&](std::size_t number) { return detail::part_of(values, number % ranks, ranks); };
  for (std::size_t step = 0; step + 1 < ranks; ++step) {
    const std::span<const T> out = chunk(me + ranks - step);
    const bool complete = step + 2 == ranks;
    detail::send_and_add(comm, out, next, chunk(me + ranks - step - 1), before, scratch,
                         complete ? factor : T(1));
  }
  for (std::size_t step = 0; step + 1 < ranks; ++step) {
    const std::span<const T> out = chunk(me + ranks - step + 1);
    detail::send_and_receive(comm, out, next, chunk(me + ranks - step), before);
  }
}

/// Replaces element i of `values` by `factor` times the sum of element i over all p ranks, by recursive
/// doubling. With q the largest power of two up to p, rank r + q (r < p - q) first sends its elements to rank
/// r, which adds them to its own. Then, for d = 1, 2, ..., q / 2, ranks r and r ^ d exchange their partial
/// sums and add them. At the end rank r sends the sum to rank r + q. `scratch` holds the pieces that are
/// under way. Requirements on lengths and scratch, and errors, are those of ring_all_reduce. Collective.
template <class C, class T>
void recursive_doubling_all_reduce(C& comm, std::span<T> values, std::vector<T>& scratch,
                                   std::type_identity_t<T> factor = T(1)) {
  const int ranks = comm.size(), me = comm.rank();
  if (ranks == 1) return detail::scale_values(values, factor);
  int power = 1;
  while (2 * power <= ranks) power *= 2;
  const std::span<const T> mine = values;
  if (me >= power) {
    detail::send_and_receive(comm, mine, me - power, std::span<T>(), me - power);
    return detail::send_and_receive(comm, std::span<const T>(), me - power, values, me - power);
  }
  // Sums of two are the same in either order.
  const bool has_extra = me + power < ranks;
  if (has_extra) {
    detail::send_and_add(comm, std::span<const T>(), me + power, values, me + power, scratch, T(1));
  }
  for (int distance = 1; distance < power; distance *= 2) {
    const int partner = me ^ distance;
    detail::send_and_add(comm, mine, partner, values, partner, scratch,
                         2 * distance == power ? factor : T(1));
  }
  if (has_extra) detail::send_and_receive(comm, mine, me + power, std::span<T>(), me + power);
}

/// Replaces element i of `values` by `factor` times the sum of element i over all p ranks, with messages of
/// the 16-bit type `Wire` (bfloat16 or float16), half the bytes of float. The n elements are cut into chunks
/// c = 0 .. p - 1. Every rank sends chunk c, rounded to Wire, directly to rank c. Rank c adds in T: its own
/// unrounded chunk, then those of ranks c - 1, c - 2, ... (modulo p). It rounds the sum to Wire and sends it
/// to all ranks. The messages of all ranks are under way at once, so the whole takes two delays of a message.
/// Collective.
/// Each rank sends 2 (p - 1) / p n elements of two bytes. The result on every rank, the owner of a chunk
/// included, has been rounded to Wire before the multiplication by `factor`. With Wire float16 elements or
/// sums of magnitude 65520 and more become infinities. With one rank nothing is rounded, only multiplied.
/// Requirements on lengths, and errors, are those of ring_all_reduce. `scratch` is resized to n / p elements
/// more, twice, and at most 15 MiB each time.
template <class Wire, class C, class T>
void narrow_all_reduce(C& comm, std::span<T> values, std::vector<Wire>& scratch,
                       std::type_identity_t<T> factor = T(1)) {
  const auto ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
  if (ranks == 1) return detail::scale_values(values, factor);
  const std::span<T> own = detail::part_of(values, me, ranks);
  // Message m is sent to the rank m + 1 after this one, and received from the rank m + 1 before it.
  const auto to = [&](std::size_t i, const auto& pieces) { return (me + 1 + pieces[i].pair) % ranks; };
  const auto from = [&](std::size_t i, const auto& pieces) {
    return (me + ranks - 1 - pieces[i].pair) % ranks;
  };
  const auto part = [&](std::size_t rank) { return detail::part_of(values, rank, ranks); };
  detail::piece_schedule<Wire> sums, results;
  for (std::size_t m = 0; m + 1 < ranks; ++m) {
    sums.add(part((me + 1 + m) % ranks).size(), own.size());
    results.add(own.size(), part((me + ranks - 1 - m) % ranks).size());
  }
  const std::size_t room = std::max(sums.room(), results.room());
  detail::check_not_given_up(comm);
  scratch.resize(own.size() + 2 * room);
  const std::span<Wire> sum = std::span<Wire>(scratch).first(own.size());
  const std::span<Wire> out = std::span<Wire>(scratch).subspan(own.size(), room);
  const std::span<Wire> in = std::span<Wire>(scratch).subspan(own.size() + room, room);
  const auto arriving = [&](std::size_t i, const auto& pieces) {
    return detail::addressed_span<Wire>{pieces.slot(in, i, pieces[i].receives),
                                        static_cast<int>(from(i, pieces))};
  };
  detail::stream_pieces(
      comm, sums,
      [&](std::size_t i) {
        const std::span<Wire> rounded = sums.slot(out, i, sums[i].sends);
        const std::span<const T> theirs = part(to(i, sums));
        detail::to_wire(theirs.subspan(sums[i].begin, sums[i].sends), rounded);
        return detail::addressed_span<const Wire>{rounded, static_cast<int>(to(i, sums))};
      },
      [&](std::size_t i) { return arriving(i, sums); },
      [&](std::size_t i) {
        detail::add_wire(std::span<const Wire>(arriving(i, sums).values),
                         own.subspan(sums[i].begin, sums[i].receives));
      });
  detail::to_wire(std::span<const T>(own), sum);
  detail::from_wire(std::span<const Wire>(sum), own, factor);
  detail::stream_pieces(
      comm, results,
      [&](std::size_t i) {
        return detail::addressed_span<const Wire>{sum.subspan(results[i].begin, results[i].sends),
                                                  static_cast<int>(to(i, results))};
      },
      [&](std::size_t i) { return arriving(i, results); },
      [&](std::size_t i) {
        detail::from_wire(std::span<const Wire>(arriving(i, results).values),
                          part(from(i, results)).subspan(results[i].begin, results[i].receives), factor);
      });
}

/// Replaces element i of `values` by `factor` times the rounded sum of all ranks' elements i, in place, by
/// the given algorithm; `library` adds in the communicator's order and does not use `scratch`. Throws
/// value_error for `automatic`, before any message is sent, and the errors of ring_all_reduce. Collective.
template <class C, class T>
void all_reduce_by(all_reduce_algorithm algorithm, C& comm, std::span<T> values, std::vector<T>& scratch,
                   std::type_identity_t<T> factor = T(1)) {
  switch (algorithm) {
    case all_reduce_algorithm::library:
      comm.all_reduce_sum(values);
      return detail::scale_values(values, factor);
    case all_reduce_algorithm::ring:
      return ring_all_reduce(comm, values, scratch, factor);
    case all_reduce_algorithm::recursive_doubling:
      return recursive_doubling_all_reduce(comm, values, scratch, factor);
    case all_reduce_algorithm::automatic:
      break;
  }
  PUFFERFISH_THROW(value_error("all_reduce_by: which algorithm is left to a plan that is not here"));
}

PUFFERFISH_NAMESPACE_END
