// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `key_value_cache`: keys and values that attention keeps of the tokens decoded so far.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/ops/attention/token_runs.hpp>
#include <pufferfish/ops/copy/upload.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Keys and values of the tokens decoded so far, for rows that are extended token by token, in the memory of
/// a device. Rows may be duplicated and dropped between steps, as in beam search; only duplicates are copied.
/// One thread at a time may use a cache.
///
/// Every row has the same length. Row i of length() tokens is stored in one run of consecutive rows of keys()
/// and values(), whose place is not a function of i: see runs().
///
/// \code
/// key_value_cache<float> cache(beam, max_length, shape.key_width(), shape.value_width());
/// cache.start(1);                              // one row without tokens
/// layer.step(ctx, x.view(), cache, y.view());  // MultiHeadAttention::step appends a token
/// cache.reorder(ctx, parents);                 // rows survive, are duplicated, or are dropped
/// \endcode
template <class T, class Device = device::cpu>
class key_value_cache {
 public:
  key_value_cache() = default;
  /// Room for `rows` rows of `capacity` tokens: rows * capacity * (key_width + value_width) elements. start()
  /// must be called before the first token. Throws shape_error for a negative number of rows, and for others
  /// below 1.
  key_value_cache(index_t rows, index_t capacity, index_t key_width, index_t value_width)
      : capacity_(checked(rows, capacity, key_width, value_width)),
        keys_(rows * capacity, key_width),
        values_(rows * capacity, value_width),
        used_(static_cast<std::size_t>(rows), false) {}

  /// Number of rows (sequences) in use.
  index_t rows() const { return static_cast<index_t>(first_.size()); }
  /// Number of tokens stored for each row.
  index_t length() const { return length_; }
  /// Largest number of tokens of a row.
  index_t capacity() const { return capacity_; }

  /// Starts with `rows` rows without tokens. Throws shape_error for a negative number, and if there is no
  /// room for that many.
  void start(index_t rows) {
    if (rows < 0 || rows > static_cast<index_t>(used_.size())) {
      detail::throw_error<shape_error>(
          {"key_value_cache: ", rows, " rows where there is room for ", used_.size()});
    }
    length_ = 0;
    first_.resize(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < first_.size(); ++i) first_[i] = static_cast<index_t>(i) * capacity_;
  }

  /// New row i is a copy of old row parents[i]. Throws shape_error for a missing parent, or too many rows.
  /// The cache is unchanged if the call throws shape_error.
  void reorder(context<Device>& ctx, std::span<const std::int32_t> parents) {
    if (parents.size() > used_.size()) {
      detail::throw_error<shape_error>(
          {"key_value_cache: ", parents.size(), " rows where there is room for ", used_.size()});
    }
    for (const std::int32_t parent : parents) {
      if (parent < 0 || parent >= rows()) {
        detail::throw_error<shape_error>({"key_value_cache: parent ", parent, " of ", rows(), " rows"});
      }
    }
    // The first child of a row reuses its place; further children are copied to free places.
    std::fill(used_.begin(), used_.end(), false);
    next_.assign(parents.size(), -1);
    for (std::size_t i = 0; i < parents.size(); ++i) {
      const index_t place = first_[static_cast<std::size_t>(parents[i])];
      if (used_[static_cast<std::size_t>(place / capacity_)]) continue;
      used_[static_cast<std::size_t>(place / capacity_)] = true;
      next_[i] = place;
    }
    std::size_t free = 0;
    for (std::size_t i = 0; i < parents.size(); ++i) {
      if (next_[i] >= 0) continue;
      while (used_[free]) ++free;
      used_[free] = true;
      next_[i] = static_cast<index_t>(free) * capacity_;
      const index_t parent = first_[static_cast<std::size_t>(parents[i])];
      keys_.copy(ctx, parent, next_[i], length_);
      values_.copy(ctx, parent, next_[i], length_);
    }
    first_.swap(next_);
  }

  /// Appends one token to every row: row i of `keys` and of `values` to row i of the cache. Throws
  /// shape_error if the number of rows or a width differs, or if the cache is full.
  void append(context<Device>& ctx, const tensor_view<const T, 2>& keys,
              const tensor_view<const T, 2>& values) {
    if (keys.extent(0) != rows() || length_ >= capacity_) {
      detail::throw_error<shape_error>({"key_value_cache: token ", length_ + 1, " of ", capacity_, ", for ",
                                        keys.extent(0), " of ", rows(), " rows"});
    }
    scratch_frame frame(ctx.scratch());
    const index_t* const places = bring(ctx, frame, rows(), [&](index_t* written) {
      for (index_t i = 0; i < rows(); ++i) written[i] = first_[static_cast<std::size_t>(i)] + length_;
    });
    ops::scatter_rows<T>(ctx, keys, places, keys_.view());
    ops::scatter_rows<T>(ctx, values, places, values_.view());
    ++length_;
  }

  /// All rows of keys in memory, unused ones included: rows * capacity rows of key_width. runs() tells which
  /// rows belong to which sequence.
  tensor_view<const T, 2> keys() const { return keys_.view(); }
  /// All rows of values in memory, unused ones included: rows * capacity rows of value_width, placed as
  /// keys().
  tensor_view<const T, 2> values() const { return values_.view(); }

  /// For each row, the range of its tokens in keys() and values(); the arrays are taken from the frame.
  /// The runs are valid until the next call that changes the cache or the frame ends.
  token_runs runs(context<Device>& ctx, scratch_frame& frame) const {
    const index_t* const places = bring(ctx, frame, 2 * rows(), [&](index_t* written) {
      std::copy(first_.begin(), first_.end(), written);
      std::fill_n(written + rows(), rows(), length_);
    });
    return {rows(), places, places + rows()};
  }

 private:
  // Returns the capacity.
  static index_t checked(index_t rows, index_t capacity, index_t key_width, index_t value_width) {
    if (rows < 0 || capacity < 1 || key_width < 1 || value_width < 1) {
      detail::throw_error<shape_error>({"key_value_cache: ", rows, " rows of ", capacity,
                                        " tokens, keys of width ", key_width, ", values of width ",
                                        value_width});
    }
    return capacity;
  }

  /// Matrix in the memory of the device.
  class block {
   public:
    block() = default;
    block(index_t rows, index_t width)
        : rows_(rows), width_(width), memory_(memory_of<Device>::source(), rows * width, uninitialized) {}

    tensor_view<T, 2> view() { return {memory_.data(), {rows_, width_}}; }
    tensor_view<const T, 2> view() const { return {memory_.data(), {rows_, width_}}; }
    void copy(context<Device>& ctx, index_t from, index_t to, index_t rows) {
      ops::copy_elements<T>(ctx, memory_.data() + from * width_, memory_.data() + to * width_, rows * width_);
    }

   private:
    index_t rows_ = 0, width_ = 0;
    memory_block<T> memory_;
  };

  // Uploads the `count` numbers that write(buffer) stores on the host; returns their address on the device.
  template <class Write>
  static const index_t* bring(context<Device>& ctx, scratch_frame& frame, index_t count, Write&& write) {
    auto* const place = frame.take<index_t>(count);  // before `notes`, which may use the same arena
    scratch_frame notes(ctx.host_scratch());
    auto* const written = ops::upload_buffer(ctx, notes, place, count);
    write(written);
    ops::upload(ctx, written, place, count);
    return place;
  }

  index_t capacity_ = 0, length_ = 0;
  block keys_, values_;
  std::vector<index_t> first_, next_;
  std::vector<bool> used_;
};

PUFFERFISH_NAMESPACE_END
