// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: cuts work on the gradients of many tensors into chunks that fit into a core's cache. The chunks
/// do not depend on the number of threads.

#include <algorithm>
#include <span>
#include <vector>

#include <pufferfish/compress/codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The elements of one tensor inside one chunk: [begin, end) of all coded values.
struct tensor_part {
  std::size_t tensor = 0;
  index_t begin = 0, end = 0;
  /// Number of elements.
  index_t size() const { return end - begin; }
};

/// Chunk c has the values [c chunk_size, (c + 1) chunk_size): whole 32-bit words of one bit per value. Parts
/// are in the order of the values; a tensor has one part in each chunk that it overlaps.
class tensor_chunks {
 public:
  /// Number of values of a chunk; the last chunk may be shorter.
  static constexpr index_t chunk_size = 16384;

  /// The tensors are a list as coded_tensors returns it: ascending offsets without gaps. Copies no values.
  explicit tensor_chunks(const std::vector<coded_tensor>& tensors) : size_(coded_size(tensors)) {
    firsts_.assign(static_cast<std::size_t>(count()) + 1, 0);
    std::size_t chunk = 0;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const index_t end = tensors[t].offset + tensors[t].size;
      for (index_t begin = tensors[t].offset; begin < end;) {
        const index_t next = std::min(end, (begin / chunk_size + 1) * chunk_size);
        for (; chunk < static_cast<std::size_t>(begin / chunk_size); ++chunk)
          firsts_[chunk + 1] = parts_.size();
        parts_.push_back({t, begin, next});
        begin = next;
      }
    }
    for (; chunk < static_cast<std::size_t>(count()); ++chunk) firsts_[chunk + 1] = parts_.size();
  }

  /// Number of coded values.
  index_t size() const { return size_; }
  /// Number of chunks.
  index_t count() const { return (size_ + chunk_size - 1) / chunk_size; }
  /// The parts of all chunks, in the order of the values.
  std::span<const tensor_part> parts() const { return parts_; }

  /// Calls f(begin, end, parts, first) for every chunk: the chunk's range, its parts, and the number of its
  /// first part among all parts. Chunks run on all threads.
  template <class F>
  void for_each(context<device::cpu>& ctx, F&& f) const {
    ctx.parallel_for(count(), [&](index_t chunk, int) {
      const auto c = static_cast<std::size_t>(chunk);
      f(chunk * chunk_size, std::min(size_, (chunk + 1) * chunk_size),
        std::span(parts_).subspan(firsts_[c], firsts_[c + 1] - firsts_[c]), firsts_[c]);
    });
  }

 private:
  index_t size_;
  std::vector<tensor_part> parts_;
  std::vector<std::size_t> firsts_;  // the number of each chunk's first part
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
