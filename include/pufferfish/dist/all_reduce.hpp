// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// All-reduce algorithms of our own over messages between pairs of ranks: a ring, recursive doubling, and a
/// direct exchange whose messages are narrower than the numbers they carry; and an all-gather.
///
/// Each adds in an order that depends on the number of ranks and the length alone, and every element is
/// computed once and copied, or computed alike by both partners: all ranks hold the same bits.

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/dist/communicator.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// What our algorithms ask of a group besides being a communicator: messages in order between pairs of ranks.
///   start_send(span<const T>, to), start_receive(span<T>, from)
/// return a collective_request; the memory belongs to the request until it is done, and T is trivially
/// copyable.
template <class C>
concept messenger = requires(C& comm, std::span<const std::byte> out, std::span<std::byte> in, int rank) {
  { comm.start_send(out, rank) } -> collective_request;
  { comm.start_receive(in, rank) } -> collective_request;
};

enum class all_reduce_algorithm {
  library,             ///< the communicator's own
  ring,                ///< least bytes: 2 (p - 1) / p of the length a rank, 2 (p - 1) messages
  recursive_doubling,  ///< fewest messages: log2 p of the whole length
};

constexpr const char* to_string(all_reduce_algorithm algorithm) {
  return algorithm == all_reduce_algorithm::library ? "library"
         : algorithm == all_reduce_algorithm::ring  ? "ring"
                                                    : "recursive doubling";
}

namespace detail {

/// Part `part` of `parts` of a span, as equal as can be.
template <class T>
std::span<T> part_of(std::span<T> all, std::size_t part, std::size_t parts) {
  const std::size_t begin = all.size() * part / parts, end = all.size() * (part + 1) / parts;
  return all.subspan(begin, end - begin);
}

/// Cuts a chunk into messages: while one is added, the next is on its way. Both sides cut alike.
template <class T>
struct message_cut {
  static constexpr std::size_t piece = (std::size_t{128} << 10) / sizeof(T);
  explicit message_cut(std::span<T> c) : chunk(c) {}
  std::span<T> chunk;
  std::size_t count() const { return (chunk.size() + piece - 1) / piece; }
  std::span<T> operator[](std::size_t i) const {
    return chunk.subspan(i * piece, std::min(piece, chunk.size() - i * piece));
  }
};

/// Sends `out` to `to` while receiving as much as `into` from `from`; adds what is received to `into`
/// (received + own). `scratch`: two messages.
template <class C, class T>
void send_and_add(C& comm, std::span<const T> out, int to, std::span<T> into, int from,
                  std::vector<T>& scratch) {
  const message_cut<const T> sends(out);
  const message_cut<T> receives(into);
  const std::size_t room = std::min(message_cut<T>::piece, std::max<std::size_t>(1, into.size()));
  scratch.resize(2 * room);
  const auto slot = [&](std::size_t i) {
    return std::span<T>(scratch.data() + i % 2 * room, receives[i].size());
  };
  decltype(comm.start_receive(into, from)) received;
  decltype(comm.start_send(out, to)) sent;
  if (receives.count() > 0) received = comm.start_receive(slot(0), from);
  for (std::size_t i = 0; i < std::max(sends.count(), receives.count()); ++i) {
    if (i < sends.count()) {
      sent.wait();
      sent = comm.start_send(sends[i], to);
    }
    if (i >= receives.count()) continue;
    received.wait();
    if (i + 1 < receives.count()) received = comm.start_receive(slot(i + 1), from);
    const std::span<const T> theirs = slot(i);
    const std::span<T> own = receives[i];
    for (std::size_t e = 0; e < own.size(); ++e) own[e] = theirs[e] + own[e];
  }
  sent.wait();
}

}  // namespace detail

/// Element i becomes the sum of all ranks' elements i, in place. Chunk c of p (elements n c / p .. n (c + 1)
/// / p) is ((x_c + x_c+1) + ...) + x_c+p-1 with ranks modulo p, formed on its way around the ring and then
/// passed on (reduce-scatter and all-gather; Thakur, Rabenseifner, Gropp, IJHPCA 2005). `scratch` keeps two
/// pieces of a chunk. Collective; errors as the messages.
template <class C, class T>
void ring_all_reduce(C& comm, std::span<T> values, std::vector<T>& scratch) {
  const auto ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
  if (ranks == 1) return;
  const int next = static_cast<int>((me + 1) % ranks), before = static_cast<int>((me + ranks - 1) % ranks);
  const auto chunk = [&](std::size_t number) { return detail::part_of(values, number % ranks, ranks); };
  for (std::size_t step = 0; step + 1 < ranks; ++step) {
    const std::span<const T> out = chunk(me + ranks - step);
    detail::send_and_add(comm, out, next, chunk(me + ranks - step - 1), before, scratch);
  }
  for (std::size_t step = 0; step + 1 < ranks; ++step) {
    auto received = comm.start_receive(chunk(me + ranks - step), before);
    auto sent = comm.start_send(std::span<const T>(chunk(me + ranks - step + 1)), next);
    received.wait();
    sent.wait();
  }
}

/// The same by recursive doubling: with q the largest power of two up to p, rank r + q (r < p - q) first
/// gives its elements to rank r, which adds them behind its own; then, for d = 1, 2, ..., q / 2, ranks r and
/// r ^ d exchange what they have and add it, the lower rank's first; at the end rank r + q gets the sum from
/// rank r. `scratch` keeps as many elements as there are. Collective.
template <class C, class T>
void recursive_doubling_all_reduce(C& comm, std::span<T> values, std::vector<T>& scratch) {
  const int ranks = comm.size(), me = comm.rank();
  if (ranks == 1) return;
  int power = 1;
  while (2 * power <= ranks) power *= 2;
  const std::span<const T> mine = values;
  if (me >= power) {
    comm.start_send(mine, me - power).wait();
    comm.start_receive(values, me - power).wait();
    return;
  }
  scratch.resize(values.size());
  const std::span<T> other = scratch;
  const bool has_extra = me + power < ranks;
  if (has_extra) {
    comm.start_receive(other, me + power).wait();
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += other[i];
  }
  for (int distance = 1; distance < power; distance *= 2) {
    const int partner = me ^ distance;
    auto received = comm.start_receive(other, partner);
    auto sent = comm.start_send(mine, partner);
    received.wait();
    sent.wait();
    if (partner > me) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = values[i] + other[i];
    } else {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = other[i] + values[i];
    }
  }
  if (has_extra) comm.start_send(mine, me + power).wait();
}

/// The same with messages of `Wire` (bfloat16 or float16), half the bytes of float: chunk c goes from every
/// rank to rank c at once, each element rounded to Wire; there own, unrounded, + c-1's + c-2's ... (modulo p)
/// are added in T; the sum, rounded once more, goes to all. Every rank ends with the rounded sum. `scratch`
/// keeps two chunks. Collective.
template <class Wire, class C, class T>
void narrow_all_reduce(C& comm, std::span<T> values, std::vector<Wire>& scratch) {
  const auto ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
  if (ranks == 1) return;
  const std::size_t largest = (values.size() + ranks - 1) / ranks;
  scratch.resize(2 * std::max<std::size_t>(1, largest));
  const std::size_t room = scratch.size() / 2;
  const auto out = [&](std::size_t count) { return std::span<Wire>(scratch.data(), count); };
  const auto in = [&](std::size_t count) { return std::span<Wire>(scratch.data() + room, count); };
  const std::span<T> own = detail::part_of(values, me, ranks);
  const auto pack = [](std::span<const T> from, std::span<Wire> to) {
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = static_cast<Wire>(static_cast<float>(from[i]));
  };
  for (std::size_t step = 1; step < ranks; ++step) {
    const std::size_t to = (me + step) % ranks, from = (me + ranks - step) % ranks;
    const std::span<const T> theirs = detail::part_of(values, to, ranks);
    auto received = comm.start_receive(in(own.size()), static_cast<int>(from));
    pack(theirs, out(theirs.size()));
    auto sent = comm.start_send(std::span<const Wire>(out(theirs.size())), static_cast<int>(to));
    received.wait();
    for (std::size_t i = 0; i < own.size(); ++i) own[i] += static_cast<T>(scratch[room + i]);
    sent.wait();
  }
  pack(own, out(own.size()));
  for (std::size_t i = 0; i < own.size(); ++i) own[i] = static_cast<T>(scratch[i]);
  for (std::size_t step = 1; step < ranks; ++step) {
    const std::size_t to = (me + step) % ranks, from = (me + ranks - step) % ranks;
    const std::span<T> theirs = detail::part_of(values, from, ranks);
    auto received = comm.start_receive(in(theirs.size()), static_cast<int>(from));
    auto sent = comm.start_send(std::span<const Wire>(out(own.size())), static_cast<int>(to));
    received.wait();
    for (std::size_t i = 0; i < theirs.size(); ++i) theirs[i] = static_cast<T>(scratch[room + i]);
    sent.wait();
  }
}

/// `blocks` holds as many equal blocks as there are ranks, block r that of rank r; every rank gives its own
/// and gets all. Around a ring: p - 1 messages of a block. Throws shape_error if the blocks cannot be equal.
/// Collective.
template <class C, class T>
void ring_all_gather(C& comm, std::span<T> blocks) {
  const auto ranks = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
  if (blocks.size() % ranks != 0) {
    detail::throw_error<shape_error>(
        {"ring_all_gather: ", blocks.size(), " elements are no equal blocks of ", ranks, " ranks"});
  }
  const int next = static_cast<int>((me + 1) % ranks), before = static_cast<int>((me + ranks - 1) % ranks);
  const auto block = [&](std::size_t number) { return detail::part_of(blocks, number % ranks, ranks); };
  for (std::size_t step = 0; step + 1 < ranks; ++step) {
    auto received = comm.start_receive(block(me + ranks - step - 1), before);
    auto sent = comm.start_send(std::span<const T>(block(me + ranks - step)), next);
    received.wait();
    sent.wait();
  }
}

PUFFERFISH_NAMESPACE_END
