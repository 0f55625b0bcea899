// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: long messages in both directions at once, cut into pieces.
///
/// MPI libraries announce a long message and send it when the receiver has answered. Open MPI has one TCP
/// connection between two ranks, so the answer is sent after all data that is already queued in the other
/// direction: of two ranks that send to each other, the second begins when the first has finished, and the
/// exchange takes twice as long. Pieces short enough to be sent without an answer (below 64 KiB over TCP)
/// avoid that. A rank sends pieces without waiting for those of the other direction as long as no more than
/// pieces_under_way of them are under way: the link stays full if they are more bytes than it carries within
/// its delay.

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Largest number of pieces under way in each direction: 15 MiB, what 1 Gbit/s carries in 126 ms. Eight would
/// do in a local network; on a link of 1 Gbit/s and 100 ms, a ring sums 16 MiB of two ranks in a tenth of the
/// time that it takes with eight.
inline constexpr std::size_t pieces_under_way = 256;

/// Cuts a span of `size` elements of T into pieces, alike on both sides.
template <class T>
class piece_cut {
 public:
  static constexpr std::size_t most = (std::size_t{60} << 10) / sizeof(T);  ///< elements of a full piece

  /// Cuts `size` elements; any memory of that length can be cut afterwards.
  explicit piece_cut(std::size_t size) : size_(size) {}
  /// Number of pieces: ceil(size / most).
  std::size_t count() const { return (size_ + most - 1) / most; }
  /// Elements of the longest piece, at least 1: the length of a buffer for one piece.
  std::size_t longest() const { return std::clamp<std::size_t>(size_, 1, most); }
  /// Number of elements of a buffer for the pieces that are under way at the same time, at least 1.
  std::size_t room() const { return std::clamp<std::size_t>(count(), 1, pieces_under_way) * longest(); }
  /// Returns the elements of piece `piece` of `all`, which has `size` elements.
  template <class U>
  std::span<U> operator()(std::span<U> all, std::size_t piece) const {
    return all.subspan(piece * most, std::min(most, size_ - piece * most));
  }
  /// Returns the memory of piece `piece` in a buffer of room() elements.
  template <class U>
  std::span<U> slot(std::span<U> buffer, std::size_t piece) const {
    return buffer.subspan(piece % pieces_under_way * longest(), std::min(most, size_ - piece * most));
  }

 private:
  std::size_t size_;
};

/// Sends `sends` pieces to rank `to` while it receives `receives` pieces from rank `from`, in order, with up
/// to pieces_under_way of each under way:
///   outgoing(i)  piece i to send, a span of const. It must not change until outgoing(i + pieces_under_way)
///                or `arrived` for a later piece is called.
///   incoming(i)  span that receives piece i
///   arrived(i)   called when piece i has been received and outgoing piece i has been sent
/// Returns when all pieces were sent and received. Throws the errors of start_send and start_receive, and
/// timeout_error if a wait times out.
template <class C, class Outgoing, class Incoming, class Arrived>
void stream_pieces(C& comm, std::size_t sends, int to, Outgoing&& outgoing, std::size_t receives, int from,
                   Incoming&& incoming, Arrived&& arrived) {
  using request = decltype(comm.start_send(outgoing(std::size_t{}), to));
  std::vector<request> sent(std::min(sends, pieces_under_way)),
      received(std::min(receives, pieces_under_way));
  const auto start_receive = [&](std::size_t i) {
    if (i < receives) received[i % pieces_under_way] = comm.start_receive(incoming(i), from);
  };
  const auto start_send = [&](std::size_t i) {
    if (i < sends) sent[i % pieces_under_way] = comm.start_send(outgoing(i), to);
  };
  for (std::size_t i = 0; i < pieces_under_way; ++i) start_receive(i);
  for (std::size_t i = 0; i < pieces_under_way; ++i) start_send(i);
  for (std::size_t i = 0; i < std::max(sends, receives); ++i) {
    if (i < receives) received[i % pieces_under_way].wait();
    if (i < sends) sent[i % pieces_under_way].wait();
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
