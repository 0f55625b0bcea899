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

/// Elements of T that are sent to a rank, or the place of elements that are received from it.
template <class T>
struct addressed_span {
  std::span<T> values;
  int rank;
};

/// The pieces of messages of elements of T that a rank sends and receives, one pair of messages after the
/// other. Both directions of a pair begin with the same piece, however long the pairs before were: ranks that
/// exchange pairs in corresponding order cannot block each other.
template <class T>
class piece_schedule {
 public:
  static constexpr std::size_t most = (std::size_t{60} << 10) / sizeof(T);  ///< elements of a full piece

  /// A piece: elements begin .. begin + sends - 1 of the outgoing message of pair `pair`, and elements begin
  /// .. begin + receives - 1 of the incoming one. 0 elements: no piece in this direction.
  struct piece {
    std::size_t pair, begin, sends, receives;
  };

  piece_schedule() = default;
  /// A schedule of one pair of messages.
  piece_schedule(std::size_t sends, std::size_t receives) { add(sends, receives); }

  /// Adds a pair of messages of these lengths, in elements.
  void add(std::size_t sends, std::size_t receives) {
    for (std::size_t begin = 0; begin < std::max(sends, receives); begin += most) {
      const auto part = [begin](std::size_t size) { return std::min(most, size - std::min(begin, size)); };
      pieces_.push_back({pairs_, begin, part(sends), part(receives)});
      longest_ = std::max({longest_, part(sends), part(receives)});
    }
    ++pairs_;
  }

  /// Number of pieces.
  std::size_t size() const { return pieces_.size(); }
  const piece& operator[](std::size_t i) const { return pieces_[i]; }

  /// Number of pieces of a direction that may be under way at the same time.
  std::size_t window() const { return std::min(size(), pieces_under_way); }
  /// Number of elements of a buffer for these pieces.
  std::size_t room() const { return window() * longest_; }
  /// The memory of `elements` elements of piece i in a buffer of room() elements.
  template <class U>
  std::span<U> slot(std::span<U> buffer, std::size_t i, std::size_t elements) const {
    return buffer.subspan(i % pieces_under_way * longest_, elements);
  }

 private:
  std::vector<piece> pieces_;
  std::size_t pairs_ = 0, longest_ = 0;
};

/// Sends and receives the pieces of a schedule in order, with up to pieces_under_way of each direction under
/// way:
///   outgoing(i)  addressed_span<const T> of piece i, if it is sent. The memory must not change until
///                outgoing(i + pieces_under_way) or `arrived` for a later piece is called.
///   incoming(i)  addressed_span<T> of piece i, if it is received
///   arrived(i)   called when piece i has been received, and sent, for each piece that is received
/// Returns when all pieces were sent and received. Throws the errors of start_send and start_receive, and
/// timeout_error if a wait times out.
template <class C, class T, class Outgoing, class Incoming, class Arrived>
void stream_pieces(C& comm, const piece_schedule<T>& pieces, Outgoing&& outgoing, Incoming&& incoming,
                   Arrived&& arrived) {
  using request = decltype(comm.start_send(std::span<const T>(), 0));
  std::vector<request> sent(pieces.window()), received(pieces.window());
  const auto start_receive = [&](std::size_t i) {
    if (i >= pieces.size() || pieces[i].receives == 0) return;
    const addressed_span<T> to = incoming(i);
    received[i % pieces_under_way] = comm.start_receive(to.values, to.rank);
  };
  const auto start_send = [&](std::size_t i) {
    if (i >= pieces.size() || pieces[i].sends == 0) return;
    const addressed_span<const T> from = outgoing(i);
    sent[i % pieces_under_way] = comm.start_send(from.values, from.rank);
  };
  for (std::size_t i = 0; i < pieces_under_way; ++i) start_receive(i);
  for (std::size_t i = 0; i < pieces_under_way; ++i) start_send(i);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].receives > 0) received[i % pieces_under_way].wait();
    if (pieces[i].sends > 0) sent[i % pieces_under_way].wait();
    if (pieces[i].receives > 0) arrived(i);
    start_receive(i + pieces_under_way);
    start_send(i + pieces_under_way);
  }
}

/// Sends `out` to rank `to` while `in` is filled from rank `from`.
template <class C, class T>
void send_and_receive(C& comm, std::span<const T> out, int to, std::span<T> in, int from) {
  const piece_schedule<T> pieces(out.size(), in.size());
  stream_pieces(
      comm, pieces,
      [&](std::size_t i) {
        return addressed_span<const T>{out.subspan(pieces[i].begin, pieces[i].sends), to};
      },
      [&](std::size_t i) {
        return addressed_span<T>{in.subspan(pieces[i].begin, pieces[i].receives), from};
      },
      [](std::size_t) {});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
