// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: long messages in both directions at once, cut into pieces.
///
/// MPI libraries announce a long message and send it when the receiver has answered. Open MPI has one TCP
/// connection between two ranks, so the answer waits behind all that is already on its way in the other
/// direction: of two ranks that send to each other, the second begins when the first has finished, and the
/// exchange takes twice as long. Pieces that are short enough to go unannounced (below 64 KiB over TCP) do
/// not wait for anybody, and with some of them under way the link stays full.

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Pieces of each direction that are started before the first of them is waited for.
inline constexpr std::size_t pieces_under_way = 8;

/// How a span of that many T travels: both sides cut alike.
template <class T>
class piece_cut {
 public:
  static constexpr std::size_t most = (std::size_t{60} << 10) / sizeof(T);  ///< elements of a piece

  explicit piece_cut(std::size_t size) : size_(size) {}
  std::size_t count() const { return (size_ + most - 1) / most; }
  /// Of the longest piece, at least 1: what a buffer of one piece must hold.
  std::size_t longest() const { return std::clamp<std::size_t>(size_, 1, most); }
  template <class U>
  std::span<U> operator()(std::span<U> all, std::size_t piece) const {
    return all.subspan(piece * most, std::min(most, size_ - piece * most));
  }
  /// Where piece `piece` lies in a buffer of `pieces_under_way` pieces.
  template <class U>
  std::span<U> slot(std::span<U> buffer, std::size_t piece) const {
    return buffer.subspan(piece % pieces_under_way * longest(), std::min(most, size_ - piece * most));
  }

 private:
  std::size_t size_;
};

/// Sends `sends` pieces to rank `to` while it receives `receives` pieces from rank `from`, in order.
///   outgoing(i)  piece i to send, a span of const. It stays as it is until piece i + pieces_under_way is
///                asked for, or `arrived` is called for a later piece.
///   incoming(i)  where piece i goes, a span
///   arrived(i)   is called when piece i has come, and piece i of those to send has left
template <class C, class Outgoing, class Incoming, class Arrived>
void stream_pieces(C& comm, std::size_t sends, int to, Outgoing&& outgoing, std::size_t receives, int from,
                   Incoming&& incoming, Arrived&& arrived) {
  using request = decltype(comm.start_send(outgoing(std::size_t{}), to));
  std::array<request, pieces_under_way> sent, received;
  const auto start_receive = [&](std::size_t i) {
    if (i < receives) received[i % pieces_under_way] = comm.start_receive(incoming(i), from);
  };
  const auto start_send = [&](std::size_t i) {
    if (i < sends) sent[i % pieces_under_way] = comm.start_send(outgoing(i), to);
  };
  for (std::size_t i = 0; i < pieces_under_way; ++i) start_receive(i);
  for (std::size_t i = 0; i < pieces_under_way; ++i) start_send(i);
  for (std::size_t i = 0; i < std::max(sends, receives); ++i) {
    received[i % pieces_under_way].wait();
    sent[i % pieces_under_way].wait();
    if (i < receives) arrived(i);
    start_receive(i + pieces_under_way);
    start_send(i + pieces_under_way);
  }
}

/// Sends `out` to rank `to` while `in` is filled from rank `from`.
template <class C, class T>
void send_and_receive(C& comm, std::span<const T> out, int to, std::span<T> in, int from) {
  const piece_cut<T> sends(out.size()), receives(in.size());
  stream_pieces(
      comm, sends.count(), to, [&](std::size_t i) { return sends(out, i); }, receives.count(), from,
      [&](std::size_t i) { return receives(in, i); }, [](std::size_t) {});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
