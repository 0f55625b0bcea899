// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `coded_sparse_all_reduce`: sums sparse vectors and sends the dense result as codes.

#include <cstddef>
#include <memory>
#include <vector>

#include <pufferfish/compress/codec.hpp>
#include <pufferfish/distributed/collectives/sparse_all_reduce.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sums the sparse vectors of all ranks, as sparse_all_reduce does by sparse_algorithm::split_dense; the
/// owner of part r of p sends a code of its part's sum. Every rank, also the owner, decodes the codes of all
/// parts: `values` becomes C(sum), dense, the same bits on all ranks. On one rank values become C(values).
/// With an unbiased codec the result is unbiased. Renggli et al., SparCML (SC 2019), use buckets of 1024
/// values and 2, 4 or 8 bits:
///
///     coded_sparse_all_reduce<qsgd_codec<float>>(comm, ctx, step, stream, {.bits = 4, .bucket = 1024});
///
/// `step` is the training step, for codecs that draw random numbers. The codec must have a fixed length; it
/// codes each part as one tensor. The call is collective. Throws shape_error on all ranks for streams of
/// different lengths. Other errors are those of the communicator and of Codec's constructor.
///
/// Returns split_dense and the number of bytes that this rank has sent. No argument may be used by another
/// thread during the call; `step` and `options` must be equal on all ranks, which is not checked.
template <class Codec, class C, class T>
sparse_all_reduce_report coded_sparse_all_reduce(C& comm, context<device::cpu>& ctx, std::uint64_t step,
                                                 sparse_stream<T>& values,
                                                 const typename Codec::options_type& options) {
  static_assert(Codec::has_fixed_length, "pufferfish: all ranks must know the lengths of codes");
  detail::check_communicator<C>();
  detail::check_not_given_up(comm);
  detail::largest_count(comm, values);
  const auto buffers = std::make_shared<detail::sparse_buffers>();
  const detail::kept_after_timeout<C> keeper(comm, buffers);
  detail::sparse_reduction<C, T> reduction(comm, values, *buffers);
  std::vector<Codec> codecs;
  std::vector<std::size_t> lengths;
  for (std::size_t r = 0; r < reduction.ranks(); ++r) {
    const index_t size = reduction.size_of(r);
    std::vector<coded_tensor> part;
    if (size > 0) {
      part.push_back(
          {"sum", logical_layout::vector(values.length()), 0, size, reduction.begin_of(r), stream_id("sum")});
    }
    codecs.emplace_back(std::move(part), options);
    lengths.push_back(codecs.back().most_bytes());
  }
  sparse_stream<T> sum = reduction.sum_of_own_part();
  sum.densify();
  const rank_blocks& codes = reduction.gather(lengths, [&](std::span<std::byte> own) {
    codecs[reduction.me()].encode(ctx, {comm.rank(), step, 1}, sum.values(), {}, own);
  });
  std::vector<T> result(static_cast<std::size_t>(values.length()));
  for (std::size_t r = 0; r < reduction.ranks(); ++r) {
    codecs[r].decode(ctx, codes[r], decode_as::values,
                     std::span<T>(result).subspan(static_cast<std::size_t>(reduction.begin_of(r)),
                                                  static_cast<std::size_t>(reduction.size_of(r))));
  }
  values = sparse_stream<T>::of_elements(result);
  return {sparse_algorithm::split_dense, reduction.sent_bytes()};
}

PUFFERFISH_NAMESPACE_END
