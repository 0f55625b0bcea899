// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `sparse_all_reduce`: sums of vectors of which each rank has few elements.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/distributed/collectives/all_reduce.hpp>
#include <pufferfish/distributed/collectives/block_exchange.hpp>
#include <pufferfish/distributed/collectives/sparse_algorithm.hpp>
#include <pufferfish/distributed/collectives/sparse_stream.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Report of a sparse_all_reduce.
struct sparse_all_reduce_report {
  sparse_algorithm algorithm = sparse_algorithm::automatic;  ///< the one that was chosen
  std::size_t sent_bytes = 0;  ///< of headers and bodies of streams that this rank has sent to other ranks
};

namespace detail {

/// Memory of messages under way. It is kept for good if a rank is lost while messages may still arrive.
struct sparse_buffers {
  std::array<std::uint64_t, 1> header_out{}, header_in{};
  std::vector<std::byte> out, in;
  rank_blocks headers_out, headers_in, blocks_out, blocks_in, sums;
};

/// Joins the streams of consecutive ranges. The result is dense if one of them is, or if there are more than
/// delta entries (sparse_stream).
template <class T>
sparse_stream<T> joined(std::vector<sparse_stream<T>> parts) {
  index_t length = 0;
  bool dense = false;
  for (const sparse_stream<T>& part : parts) {
    length += part.length();
    dense = dense || part.is_dense();
  }
  std::vector<std::int32_t> indices;
  std::vector<T> values;
  index_t begin = 0;
  for (sparse_stream<T>& part : parts) {
    if (dense) part.densify();
    for (const std::int32_t index : part.indices()) {
      indices.push_back(index + static_cast<std::int32_t>(begin));
    }
    values.insert(values.end(), part.values().begin(), part.values().end());
    begin += part.length();
  }
  return dense ? sparse_stream<T>::of_elements(values) : sparse_stream<T>(length, indices, values);
}

/// State of one sparse all-reduce over two or more ranks: by_doubling() or by_split() replaces `values` by
/// the sum. All arguments must outlive the object.
template <class C, class T>
class sparse_reduction {
 public:
  using stream = sparse_stream<T>;

  /// Refers to its arguments; sends nothing yet.
  sparse_reduction(C& comm, stream& values, sparse_buffers& buffers)
      : comm_(comm), values_(values), buffers_(buffers) {}

  /// Bytes of headers and bodies that this rank has sent so far.
  std::size_t sent_bytes() const { return sent_; }

  /// Adds the streams by recursive doubling, in the order of recursive_doubling_all_reduce.
  void by_doubling() {
    const int ranks = comm_.size(), me = comm_.rank();
    int power = 1;
    while (2 * power <= ranks) power *= 2;
    // Ranks from `power` on, the largest power of two up to the number of ranks, add their stream to that of
    // rank me - power before the first round, and receive the sum after the last one.
    if (me >= power) {
      exchange(me - power, true, false);
      values_ = exchange(me - power, false, true);
      return;
    }
    const bool has_extra = me + power < ranks;
    if (has_extra) values_.add(exchange(me + power, false, true));
    for (int distance = 1; distance < power; distance *= 2) values_.add(exchange(me ^ distance, true, true));
    if (has_extra) exchange(me + power, true, false);
  }

  /// Every rank sums one part (sum_of_own_part), then all gather the sums; `dense`: as dense streams.
  void by_split(bool dense) {
    stream sum = sum_of_own_part();
    if (dense) sum.densify();
    std::vector<std::uint64_t> headers(ranks());
    if (dense) {
      for (std::size_t r = 0; r < ranks(); ++r) headers[r] = stream::dense_header(size_of(r));
    } else {
      headers = comm_.all_gather(sum.header());
      sent_ += (ranks() - 1) * stream::header_bytes;
    }
    std::vector<std::size_t> lengths;
    for (std::size_t r = 0; r < ranks(); ++r) lengths.push_back(stream::body_bytes(size_of(r), headers[r]));
    const rank_blocks& all = gather(lengths, [&](std::span<std::byte> own) { sum.write_body(own); });
    std::vector<stream> parts;
    for (std::size_t r = 0; r < ranks(); ++r)
      parts.push_back(stream::from_body(size_of(r), headers[r], all[r]));
    values_ = joined(std::move(parts));
  }

  /// Number of ranks, and the number of this one.
  std::size_t ranks() const { return static_cast<std::size_t>(comm_.size()); }
  std::size_t me() const { return static_cast<std::size_t>(comm_.rank()); }
  /// First element of the part of rank r: n r / p.
  index_t begin_of(std::size_t rank) const {
    return values_.length() * static_cast<index_t>(rank) / static_cast<index_t>(ranks());
  }
  /// Number of elements of the part of rank r.
  index_t size_of(std::size_t rank) const { return begin_of(rank + 1) - begin_of(rank); }

  /// Computes the sum of this rank's part over all ranks, added in the order of the ranks.
  stream sum_of_own_part() {
    sparse_buffers& b = buffers_;
    const std::vector<std::size_t> header_lengths(ranks(), stream::header_bytes);
    b.headers_out.resize(header_lengths);
    b.headers_in.resize(header_lengths);
    std::vector<stream> parts;
    std::vector<std::size_t> lengths;
    for (std::size_t r = 0; r < ranks(); ++r) {
      parts.push_back(values_.part(begin_of(r), begin_of(r + 1)));
      lengths.push_back(parts[r].body_bytes());
      const std::uint64_t header = parts[r].header();
      std::memcpy(b.headers_out[r].data(), &header, sizeof header);
      if (r != me()) sent_ += stream::header_bytes + lengths[r];
    }
    exchange_blocks(comm_, b.headers_out, b.headers_in);
    b.blocks_out.resize(lengths);
    std::vector<std::uint64_t> headers(ranks());
    for (std::size_t r = 0; r < ranks(); ++r) {
      parts[r].write_body(b.blocks_out[r]);
      std::memcpy(&headers[r], b.headers_in[r].data(), sizeof headers[r]);
      lengths[r] = stream::body_bytes(size_of(me()), headers[r]);
    }
    b.blocks_in.resize(lengths);
    exchange_blocks(comm_, b.blocks_out, b.blocks_in);
    stream sum(size_of(me()));
    for (std::size_t r = 0; r < ranks(); ++r) {
      sum.add(stream::from_body(size_of(me()), headers[r], std::as_const(b.blocks_in)[r]));
    }
    return sum;
  }

  /// Gathers blocks of these lengths from all ranks; fill(block) writes this rank's block.
  template <class Fill>
  const rank_blocks& gather(const std::vector<std::size_t>& lengths, Fill&& fill) {
    buffers_.sums.resize(lengths);
    fill(buffers_.sums[me()]);
    gather_blocks(comm_, buffers_.sums);
    // Around the ring go all blocks but that of the next rank.
    sent_ += buffers_.sums.bytes().size() - lengths[(me() + 1) % ranks()];
    return buffers_.sums;
  }

 private:
  // Sends the stream to a rank, receives one from it, or both.
  // The header travels first, so that the receiver knows the length of the body.
  stream exchange(int partner, bool sends, bool receives) {
    sparse_buffers& b = buffers_;
    b.header_out[0] = values_.header();
    const std::size_t one = 1;
    send_and_receive(comm_, std::span<const std::uint64_t>(b.header_out).first(sends ? one : 0), partner,
                     std::span<std::uint64_t>(b.header_in).first(receives ? one : 0), partner);
    b.out.resize(sends ? values_.body_bytes() : 0);
    b.in.resize(receives ? stream::body_bytes(values_.length(), b.header_in[0]) : 0);
    if (sends) {
      values_.write_body(b.out);
      sent_ += stream::header_bytes + b.out.size();
    }
    send_and_receive(comm_, std::span<const std::byte>(b.out), partner, std::span<std::byte>(b.in), partner);
    return receives ? stream::from_body(values_.length(), b.header_in[0], b.in) : stream(values_.length());
  }

  C& comm_;
  stream& values_;
  sparse_buffers& buffers_;
  std::size_t sent_ = 0;
};

/// Finds the largest count of entries of all ranks. Throws shape_error on all ranks for streams of different
/// lengths. Collective.
template <class C, class T>
index_t largest_count(C& comm, const sparse_stream<T>& values) {
  const auto length = static_cast<std::uint64_t>(values.length());
  std::array<std::uint64_t, 3> largest{static_cast<std::uint64_t>(values.count()), length, ~length};
  comm.all_reduce_max(std::span<std::uint64_t>(largest));
  if (largest[1] != ~largest[2]) {
    throw_error<shape_error>({"sparse_all_reduce: streams of ", ~largest[2], " to ", largest[1],
                              " elements; this rank's has ", length});
  }
  return static_cast<index_t>(largest[0]);
}

}  // namespace detail

/// Replaces `values` by the sum over all ranks, the same bits and the same format on all of them. The order
/// of additions depends on the algorithm, the number of ranks and the formats of the streams: recursive
/// doubling adds as recursive_doubling_all_reduce does; the two split algorithms add part r of p (elements n
/// r / p to n (r + 1) / p) in the order of the ranks. Automatic: by the largest count of entries of all
/// ranks, see choose_sparse_algorithm; 24 bytes per rank travel to find it. Renggli et al., SparCML (SC
/// 2019).
///
/// An all-gather of streams of k entries sends (p - 1) k entries per rank. If the ranks' entries are drawn
/// independently, the split algorithms do not send less: few entries coincide, or the sum is dense.
///
/// Throws shape_error on all ranks for streams of different lengths, and the errors of start_send.
/// Collective. With one rank `values` stay as they are. After an exception they are undefined. The report is
/// that of this rank.
///
/// \code
///   sparse_stream<float> values(length, indices, entries);  // indices ascend, the ranks' need not be equal
///   const sparse_all_reduce_report report = sparse_all_reduce(comm, values);
///   values.add_to(elements);  // elements[i] += the sum over the ranks
/// \endcode
template <class C, class T>
sparse_all_reduce_report sparse_all_reduce(C& comm, sparse_stream<T>& values,
                                           const sparse_all_reduce_options& options = {}) {
  detail::check_communicator<C>();
  detail::check_not_given_up(comm);
  const index_t count = detail::largest_count(comm, values);
  sparse_all_reduce_report report;
  report.algorithm = choose_sparse_algorithm<T>(values.length(), count, comm.size(), options);
  if (comm.size() == 1) return report;
  const auto buffers = std::make_shared<detail::sparse_buffers>();
  const detail::kept_after_timeout<C> keeper(comm, buffers);
  detail::sparse_reduction<C, T> reduction(comm, values, *buffers);
  if (report.algorithm == sparse_algorithm::recursive_doubling) {
    reduction.by_doubling();
  } else {
    reduction.by_split(report.algorithm == sparse_algorithm::split_dense);
  }
  report.sent_bytes = reduction.sent_bytes();
  return report;
}

PUFFERFISH_NAMESPACE_END
