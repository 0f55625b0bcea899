// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `sparse_stream`: a vector that is stored as indices and values while few of its elements are set, and as
/// all of its elements from then on.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/distributed/collectives/wire.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A vector of `length` elements. Elements that no entry names are zero. It is sparse while its entries are
/// at most
///
///     delta = length sizeof(T) / (sizeof(int32) + sizeof(T)),  rounded down (float: length / 2),
///
/// Above delta, indices and values take more bytes than all elements, and the vector is dense. A dense stream
/// stays dense. An entry may have the value 0. Renggli et al., SparCML (SC 2019).
///
/// As bytes: uint32 format (0 sparse, 1 dense), uint32 count of the entries (dense: the length); then,
/// sparse, the indices as int32, ascending, and the values as T; dense, all elements as T.
/// T is float or double.
/// \code
///   const std::vector<std::int32_t> indices = {0, 1, 2};
///   const std::vector<float> values = {1, 2, 3};
///   sparse_stream<float> stream(10, indices, values);
///   stream.add(stream);  // dense: 6 entries are more than delta = 5
/// \endcode
template <class T>
class sparse_stream {
 public:
  using value_type = T;
  static constexpr std::size_t header_bytes = sizeof(std::uint64_t);  ///< format and count

  /// Makes a stream of zeros, without entries. Throws value_error unless 0 <= length < 2^31.
  explicit sparse_stream(index_t length = 0) : length_(length) {
    if (length < 0 || length > index_t{std::numeric_limits<std::int32_t>::max()}) {
      detail::throw_error<value_error>({"sparse_stream: length ", length, " is outside 0 .. 2^31 - 1"});
    }
  }

  /// Makes a stream from entries in ascending order of their indices, each index once. The stream is dense if
  /// there are more than most_entries(). Throws shape_error for different numbers of indices and values,
  /// value_error for indices that are not ascending or outside the vector.
  sparse_stream(index_t length, std::span<const std::int32_t> indices, std::span<const T> values)
      : sparse_stream(length) {
    if (indices.size() != values.size()) {
      detail::throw_error<shape_error>(
          {"sparse_stream: ", indices.size(), " indices and ", values.size(), " values"});
    }
    check_indices(indices);
    indices_.assign(indices.begin(), indices.end());
    values_.assign(values.begin(), values.end());
    if (count() > most_entries()) densify();
  }

  /// Makes a dense stream of these elements. Throws value_error from 2^31 elements on.
  static sparse_stream of_elements(std::span<const T> elements) {
    sparse_stream result(static_cast<index_t>(elements.size()));
    result.dense_ = true;
    result.values_.assign(elements.begin(), elements.end());
    return result;
  }

  index_t length() const { return length_; }  ///< number of elements of the vector
  bool is_dense() const { return dense_; }    ///< whether all elements are stored
  /// Number of entries; the length if dense.
  index_t count() const { return static_cast<index_t>(values_.size()); }
  /// delta: the largest number of entries of a sparse stream.
  index_t most_entries() const {
    constexpr index_t value = sizeof(T), index = sizeof(std::int32_t);
    return length_ * value / (index + value);
  }
  /// Indices of the entries; empty if dense.
  std::span<const std::int32_t> indices() const { return indices_; }
  /// Values of the entries; if dense all elements.
  std::span<const T> values() const { return values_; }

  /// Makes the stream dense. Elements become 0 + value, so that no sum depends on the sign of a zero.
  void densify() {
    if (dense_) return;
    std::vector<T> elements(static_cast<std::size_t>(length_), T(0));
    scatter(elements);
    become_dense(std::move(elements));
  }

  /// Computes *this += other, element by element; the sum of two values has the same bits in either order.
  /// Two sparse streams give a sparse stream if their entries together, common ones counted twice, are at
  /// most delta, else a dense one. `other` may be *this. Throws shape_error for different lengths. Cost: the
  /// entries of both for two sparse streams, else up to `length` elements.
  void add(const sparse_stream& other) {
    if (other.length_ != length_) {
      detail::throw_error<shape_error>(
          {"sparse_stream: adds ", other.length_, " elements to ", length_, " elements"});
    }
    if (dense_ && other.dense_) {
      detail::add_received<T>(other.values_, values_);
    } else if (dense_ || other.dense_) {
      std::vector<T> sum = dense_ ? std::move(values_) : other.values_;
      (dense_ ? other : *this).scatter(sum);
      become_dense(std::move(sum));
    } else if (count() + other.count() <= most_entries()) {
      merge(other);
    } else {
      std::vector<T> sum(place(length_), T(0));
      scatter(sum);
      other.scatter(sum);
      become_dense(std::move(sum));
    }
  }

  /// Copies the elements begin .. end - 1 to a stream of their own, whose indices count from `begin`. A part
  /// of a sparse stream is dense if its entries are more than its own delta. Throws value_error unless 0 <=
  /// begin <= end <= length.
  sparse_stream part(index_t begin, index_t end) const {
    if (begin < 0 || begin > end || end > length_) {
      detail::throw_error<value_error>(
          {"sparse_stream: part ", begin, " .. ", end, " of ", length_, " elements"});
    }
    if (dense_) return of_elements(std::span(values_).subspan(place(begin), place(end - begin)));
    sparse_stream result(end - begin);
    const std::size_t first = first_from(begin), last = first_from(end);
    for (std::size_t i = first; i < last; ++i) {
      result.indices_.push_back(indices_[i] - static_cast<std::int32_t>(begin));
    }
    result.values_.assign(values_.data() + first, values_.data() + last);
    if (result.count() > result.most_entries()) result.densify();
    return result;
  }

  /// Adds the vector to `to`, element by element. Throws shape_error unless `to` has the vector's length.
  /// `to` must not be this stream's own memory.
  void add_to(std::span<T> to) const {
    if (to.size() != place(length_)) {
      detail::throw_error<shape_error>({"sparse_stream: adds ", length_, " elements to ", to.size()});
    }
    dense_ ? detail::add_received<T>(values_, to) : scatter(to);
  }

  /// Number of bytes of the stream after the 8 bytes of its header.
  std::size_t body_bytes() const {
    return indices_.size() * sizeof(std::int32_t) + values_.size() * sizeof(T);
  }
  /// The first 8 bytes of the stream as a little-endian number.
  std::uint64_t header() const {
    return dense_ ? dense_header(length_) : static_cast<std::uint64_t>(values_.size()) << 32;
  }
  /// The header of a dense stream of `length` elements.
  static std::uint64_t dense_header(index_t length) { return 1U | static_cast<std::uint64_t>(length) << 32; }
  /// Writes the bytes after the header to `to`, which has body_bytes() bytes.
  void write_body(std::span<std::byte> to) const {
    const std::size_t before = indices_.size() * sizeof(std::int32_t);
    if (before > 0) std::memcpy(to.data(), indices_.data(), before);
    if (!values_.empty()) std::memcpy(to.data() + before, values_.data(), values_.size() * sizeof(T));
  }
  /// Number of bytes after the given header of a stream of `length` elements. Throws value_error for an
  /// invalid header: another format, more than delta entries, a dense stream of another length.
  static std::size_t body_bytes(index_t length, std::uint64_t header) {
    const auto format = static_cast<std::uint32_t>(header), count = static_cast<std::uint32_t>(header >> 32);
    const index_t most = sparse_stream(length).most_entries();
    const bool valid = format == 0 ? index_t{count} <= most : format == 1 && index_t{count} == length;
    if (!valid) {
      detail::throw_error<value_error>({"sparse_stream: a header of format ", format, " and ", count,
                                        " entries for ", length, " elements"});
    }
    return count * (sizeof(T) + (format == 0 ? sizeof(std::int32_t) : 0));
  }
  /// Reads a stream from its header and body. Throws value_error for an invalid header, for another number of
  /// bytes, and for indices that are not ascending or outside the vector.
  static sparse_stream from_body(index_t length, std::uint64_t header, std::span<const std::byte> body) {
    const std::size_t wanted = body_bytes(length, header);
    if (body.size() != wanted) {
      detail::throw_error<value_error>({"sparse_stream: ", body.size(), " bytes, not ", wanted});
    }
    sparse_stream result(length);
    const auto count = static_cast<std::size_t>(header >> 32);
    result.dense_ = (header & 1U) != 0;
    result.indices_.resize(result.dense_ ? 0 : count);
    result.values_.resize(count);
    const std::size_t before = result.indices_.size() * sizeof(std::int32_t);
    if (before > 0) std::memcpy(result.indices_.data(), body.data(), before);
    if (count > 0) std::memcpy(result.values_.data(), body.data() + before, count * sizeof(T));
    result.check_indices(result.indices_);
    return result;
  }

 private:
  static constexpr std::size_t place(index_t i) { return static_cast<std::size_t>(i); }

  // Throws value_error unless the indices ascend and are in 0 .. length - 1.
  void check_indices(std::span<const std::int32_t> indices) const {
    index_t before = -1;
    for (const std::int32_t index : indices) {
      if (index <= before || index >= length_) {
        detail::throw_error<value_error>(
            {"sparse_stream: index ", index, " after ", before, " of ", length_});
      }
      before = index;
    }
  }
  // Position of the first entry whose index is at least `index`.
  std::size_t first_from(index_t index) const {
    return place(std::lower_bound(indices_.begin(), indices_.end(), index) - indices_.begin());
  }
  // Adds the entries to the elements of `to`.
  void scatter(std::span<T> to) const {
    for (std::size_t i = 0; i < indices_.size(); ++i) to[place(indices_[i])] += values_[i];
  }
  // Replaces the entries by these elements.
  void become_dense(std::vector<T> elements) {
    dense_ = true;
    values_ = std::move(elements);
    indices_ = {};
  }

  // Adds a sparse stream to this one, which stays sparse. Sums of common indices may be 0 and stay entries.
  void merge(const sparse_stream& other) {
    std::vector<std::int32_t> indices;
    std::vector<T> values;
    indices.reserve(indices_.size() + other.indices_.size());
    values.reserve(indices.capacity());
    const auto take = [&](std::int32_t index, T value) {
      indices.push_back(index);
      values.push_back(value);
    };
    constexpr std::int32_t none = std::numeric_limits<std::int32_t>::max();  // no index is as large
    std::size_t i = 0, j = 0;
    while (i < indices_.size() || j < other.indices_.size()) {
      const std::int32_t mine = i < indices_.size() ? indices_[i] : none;
      const std::int32_t theirs = j < other.indices_.size() ? other.indices_[j] : none;
      if (mine == theirs) {
        take(mine, values_[i++] + other.values_[j++]);
      } else if (mine < theirs) {
        take(mine, values_[i++]);
      } else {
        take(theirs, other.values_[j++]);
      }
    }
    indices_ = std::move(indices);
    values_ = std::move(values);
  }

  index_t length_;
  bool dense_ = false;
  std::vector<std::int32_t> indices_;  // of the entries; empty if dense
  std::vector<T> values_;              // of the entries; if dense all elements
};

PUFFERFISH_NAMESPACE_END
