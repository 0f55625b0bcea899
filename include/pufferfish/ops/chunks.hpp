// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Splits elementwise work into tasks that are large enough to pay for their start.

#include <algorithm>
#include <cstdint>
#include <span>

#include <pufferfish/core/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Calls f(begin, end) for consecutive pieces of 0 .. size - 1, in
/// parallel. The boundaries of the pieces depend on `size` alone.
template <class F>
void for_chunks(context<device::cpu>& ctx, index_t size, F&& f) {
  constexpr index_t chunk = 16384;
  ctx.parallel_for((size + chunk - 1) / chunk,
                   [&](index_t task, int) { f(task * chunk, std::min(size, (task + 1) * chunk)); });
}

/// Calls f(begin, end), in parallel, for consecutive ranges of rows of about 16384 elements each.
template <class F>
void for_row_chunks(context<device::cpu>& ctx, index_t rows, index_t columns, F&& f) {
  const index_t count = std::max<index_t>(1, 16384 / std::max<index_t>(1, columns));
  ctx.parallel_for((rows + count - 1) / count,
                   [&](index_t task, int) { f(task * count, std::min(rows, (task + 1) * count)); });
}

/// to = from, element by element; dense arrays of `size` elements that do not overlap.
template <class T>
void copy_elements(context<device::cpu>& ctx, const T* from, T* to, index_t size) {
  for_chunks(ctx, size, [&](index_t begin, index_t end) { std::copy(from + begin, from + end, to + begin); });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void copy_elements(context<device::gpu>& ctx, const T* from, T* to, index_t size);

/// y_i = value.
template <class T>
void fill(context<device::cpu>& ctx, std::span<T> y, T value) {
  T* to = y.data();
  for_chunks(ctx, static_cast<index_t>(y.size()),
             [=](index_t begin, index_t end) { std::fill(to + begin, to + end, value); });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void fill(context<device::gpu>& ctx, std::span<T> y, T value);

namespace detail {

/// True if a result of `size` elements in rows of `width` is better written past the caches. It must be
/// at least 4 MiB: it would be evicted before its next use, and reading its lines before writing them
/// would be a waste. Address and rows must be aligned to the vectors of any instruction set (64 bytes).
template <class T>
bool streams_past_cache(const T* to, index_t size, index_t width) {
  constexpr index_t large = index_t{4} << 20, vector = 64, bytes = static_cast<index_t>(sizeof(T));
  return size * bytes >= large && width * bytes % vector == 0 &&
         reinterpret_cast<std::uintptr_t>(to) % static_cast<std::uintptr_t>(vector) == 0;
}

}  // namespace detail
}  // namespace ops
PUFFERFISH_NAMESPACE_END
