// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Exchanges of byte blocks whose lengths differ: an all-gather, and an exchange in which every rank has a
/// block for every other rank.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/distributed/collectives/message_stream.hpp>
#include <pufferfish/distributed/communicator.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// One block of bytes per rank, stored one after the other. The lengths may differ and may be zero.
/// Indices are those of the ranks, 0 to count() - 1, and are not checked. Spans stay valid until the next
/// resize.
/// \code
///   std::vector<std::size_t> lengths(static_cast<std::size_t>(comm.size()), 16);  // bytes, of any value
///   rank_blocks blocks(lengths);
///   std::ranges::fill(blocks[static_cast<std::size_t>(comm.rank())], std::byte{1});
///   gather_blocks(comm, blocks);  // now blocks[r] is what rank r has filled
/// \endcode
class rank_blocks {
 public:
  rank_blocks() = default;
  /// Makes one block for each length, in bytes.
  explicit rank_blocks(std::span<const std::size_t> lengths) { resize(lengths); }

  /// Sets the length of every block. The bytes are undefined afterwards.
  void resize(std::span<const std::size_t> lengths) {
    offsets_.assign(1, 0);
    for (const std::size_t length : lengths) offsets_.push_back(offsets_.back() + length);
    bytes_.resize(offsets_.back());
  }

  /// Number of blocks.
  std::size_t count() const { return offsets_.size() - 1; }
  /// Length of a block in bytes.
  std::size_t size(std::size_t rank) const { return offsets_[rank + 1] - offsets_[rank]; }
  /// The bytes of a block.
  std::span<std::byte> operator[](std::size_t rank) {
    return std::span<std::byte>(bytes_).subspan(offsets_[rank], size(rank));
  }
  std::span<const std::byte> operator[](std::size_t rank) const {
    return std::span<const std::byte>(bytes_).subspan(offsets_[rank], size(rank));
  }
  /// A block as 32-bit words. Its offset and its length must be multiples of four bytes.
  std::span<std::uint32_t> words(std::size_t rank) {
    return {reinterpret_cast<std::uint32_t*>(bytes_.data() + offsets_[rank]), size(rank) / 4};
  }
  /// The bytes of all blocks, one block after the other.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::size_t> offsets_{0};
};

namespace detail {

/// Throws shape_error unless there is one block per rank.
template <class C>
void check_blocks(const char* caller, const C& comm, const rank_blocks& blocks) {
  if (blocks.count() == static_cast<std::size_t>(comm.size())) return;
  throw_error<shape_error>(
      {caller, ": ", counted(blocks.count(), "block"), " for ", counted(comm.size(), "rank")});
}

}  // namespace detail

/// Gathers a block of every rank on all ranks: a rank fills its own block before the call, and the call fills
/// the others. All ranks must have set the same lengths. Messages form a ring: each rank sends p - 1 blocks
/// to the next rank. Throws shape_error unless there is one block per rank, and the errors of start_send and
/// start_receive. Collective.
/// A rank sends all bytes except those of the next rank's block. Lengths that differ between ranks are not
/// detected: messages then do not fit together.
template <class C>
void gather_blocks(C& comm, rank_blocks& blocks) {
  detail::check_communicator<C>();
  detail::check_blocks("gather_blocks", comm, blocks);
  const auto ranks = blocks.count(), me = static_cast<std::size_t>(comm.rank());
  const int next = static_cast<int>((me + 1) % ranks), before = static_cast<int>((me + ranks - 1) % ranks);
  for (std::size_t step = 0; step + 1 < ranks; ++step) {
    const std::span<const std::byte> out = blocks[(me + ranks - step) % ranks];
    detail::send_and_receive(comm, out, next, blocks[(me + ranks - step - 1) % ranks], before);
  }
}

/// Gathers the blocks of all ranks on all ranks, if each rank knows only the length of its own block, `own`.
/// The lengths are exchanged first, 8 bytes per rank. `all` is resized, and on return has the blocks of all
/// ranks. `own` must not be a part of `all`. Errors are those of gather_blocks(comm, blocks).
template <class C>
void gather_blocks(C& comm, std::span<const std::byte> own, rank_blocks& all) {
  detail::check_communicator<C>();
  const std::vector<std::uint64_t> lengths = comm.all_gather(static_cast<std::uint64_t>(own.size()));
  all.resize(std::vector<std::size_t>(lengths.begin(), lengths.end()));
  std::copy(own.begin(), own.end(), all[static_cast<std::size_t>(comm.rank())].begin());
  gather_blocks(comm, all);
}

/// Sends block r of `out` to rank r and receives block r of `in` from rank r. Both sides have set the
/// lengths: block r of this rank's `in` is as long as this rank's block in `out` of rank r. The messages of
/// all ranks are under way at once, first those to the next rank and from the rank before. `out` and `in` are
/// different objects. Throws shape_error unless both have one block per rank and this rank's own blocks are
/// equally long, and the errors of start_send and start_receive. Collective. A rank sends the bytes of `out`
/// except its own block, which is copied. Lengths that do not match between a sender and a receiver are not
/// detected.
/// \code
///   const std::vector<std::size_t> lengths(static_cast<std::size_t>(comm.size()), 8);
///   rank_blocks out(lengths), in(lengths);     // fill out[r] for each rank r
///   exchange_blocks(comm, out, in);            // in[r] is what rank r had in out[this rank]
/// \endcode
template <class C>
void exchange_blocks(C& comm, const rank_blocks& out, rank_blocks& in) {
  detail::check_communicator<C>();
  detail::check_blocks("exchange_blocks", comm, out);
  detail::check_blocks("exchange_blocks", comm, in);
  const auto ranks = out.count(), me = static_cast<std::size_t>(comm.rank());
  if (out.size(me) != in.size(me)) {
    detail::throw_error<shape_error>({"exchange_blocks: the block of rank ", comm.rank(), " for itself has ",
                                      out.size(me), " bytes, and room for ", in.size(me)});
  }
  std::copy(out[me].begin(), out[me].end(), in[me].begin());
  const auto to = [&](std::size_t pair) { return (me + 1 + pair) % ranks; };
  const auto from = [&](std::size_t pair) { return (me + ranks - 1 - pair) % ranks; };
  detail::piece_schedule<std::byte> pieces;
  for (std::size_t pair = 0; pair + 1 < ranks; ++pair) pieces.add(out.size(to(pair)), in.size(from(pair)));
  detail::stream_pieces(
      comm, pieces,
      [&](std::size_t i) {
        const auto& [pair, begin, sends, receives] = pieces[i];
        return detail::addressed_span<const std::byte>{out[to(pair)].subspan(begin, sends),
                                                       static_cast<int>(to(pair))};
      },
      [&](std::size_t i) {
        const auto& [pair, begin, sends, receives] = pieces[i];
        return detail::addressed_span<std::byte>{in[from(pair)].subspan(begin, receives),
                                                 static_cast<int>(from(pair))};
      },
      [](std::size_t) {});
}

PUFFERFISH_NAMESPACE_END
