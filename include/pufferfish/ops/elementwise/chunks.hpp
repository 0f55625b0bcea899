// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Splits elementwise work into tasks that are large enough to amortize the start of a task.
///
/// Conventions of all operations of namespace ops. The headers of this folder state only what differs.
///
/// - T is float, double or, on the CPU, bfloat16. On a device, T may also be one of its 16-bit types.
///   Parameters, their gradients and statistics then have the type parameter_t of T. Results of 16 bits are
///   computed in float and rounded once, unless the comment of the operation says otherwise.
/// - Views, spans and pointers refer to memory of the caller, on the context's device. An operation keeps
///   none of them after it has finished.
/// - A view is dense if its elements are contiguous, last index fastest. It has contiguous rows if its last
///   stride is 1; the other strides are then arbitrary.
/// - Outputs overlap no other argument, unless the comment of the operation allows it. "May be x" means the
///   same elements with the same strides, not a partial overlap.
/// - Temporary memory comes from ctx.scratch() and is released on return.
/// - CPU: the result is complete on return and has the same bits for any number of threads of the context. A
///   context may be used by one thread at a time. A task that runs in a context of several threads must not
///   call operations on this context: thread_pool::run throws state_error.
/// - GPU: the program includes <pufferfish/gpu.hpp>. A call enqueues work on ctx.stream() and may return
///   before the work has finished; a graph may capture it, unless the comment of the operation says
///   otherwise. The host cannot read arrays in device memory, so their values are not checked. A failed CUDA
///   call throws backend_error.
/// - shape_error and value_error are thrown where a comment says so. Other requirements are checked by
///   PUFFERFISH_ASSERT, which aborts, or are not checked. Where a view must be dense, tensor_view::flat() or
///   reshape() may detect that it is not, and throws shape_error.
/// - Namespace ops::reference defines the results: plain loops in one thread, without a context, for tests.

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>

#include <pufferfish/core/context.hpp>
#include <pufferfish/ops/device_ops.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Calls f(begin, end) for consecutive pieces of 0 .. size - 1, of 16384 elements each (the last may be
/// shorter). Several threads of `ctx` call f at the same time, so f must write only elements of its own
/// piece. The boundaries depend on `size` alone. An exception of f is rethrown.
///
/// \code
/// ops::for_chunks(ctx, size, [=](index_t begin, index_t end) {
///   for (index_t i = begin; i < end; ++i) y[i] = x[i] * x[i];
/// });
/// \endcode
template <class F>
void for_chunks(context<device::cpu>& ctx, index_t size, F&& f) {
  constexpr index_t chunk = 16384;
  ctx.parallel_for((size + chunk - 1) / chunk,
                   [&](index_t task, int) { f(task * chunk, std::min(size, (task + 1) * chunk)); });
}

/// Calls f(begin, end), or f(begin, end, worker) if f takes the number of the thread, in parallel, for
/// consecutive ranges of rows of about 16384 elements each, but of at least one row. f must write only its
/// own rows, and an exception of f is rethrown. The boundaries depend on `rows` and `columns` alone. If an
/// element costs more than in a cheap pass, pass a multiple of the number of columns as `columns`.
template <class F>
void for_row_chunks(context<device::cpu>& ctx, index_t rows, index_t columns, F&& f) {
  const index_t count = std::max<index_t>(1, 16384 / std::max<index_t>(1, columns));
  ctx.parallel_for((rows + count - 1) / count, [&](index_t task, int worker) {
    const index_t begin = task * count, end = std::min(rows, begin + count);
    if constexpr (std::is_invocable_v<F&, index_t, index_t, int>) {
      f(begin, end, worker);
    } else {
      f(begin, end);
    }
  });
}

/// to_i = from_i for i in 0 .. size - 1; dense arrays that do not overlap. `size` may be 0.
template <class T, class Device>
void copy_elements(context<Device>& ctx, const T* from, T* to, index_t size) {
  if (size == 0) return;
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::copy_elements(ctx, from, to, size);
  } else {
    for_chunks(ctx, size,
               [&](index_t begin, index_t end) { std::copy(from + begin, from + end, to + begin); });
  }
}

/// y_i = value for all elements of y.
template <class T, class Device>
void fill(context<Device>& ctx, std::span<T> y, T value) {
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::fill(ctx, y, value);
  } else {
    for_chunks(ctx, static_cast<index_t>(y.size()),
               [=](index_t begin, index_t end) { std::fill(y.data() + begin, y.data() + end, value); });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, fill);

namespace detail {

/// Whether a result of `size` elements in rows of `width` elements is better written past the caches. The
/// result must have at least `large` bytes: it would be evicted before its next use, and reading its cache
/// lines before writing them would be a waste. Address and rows must be aligned to the vectors of any
/// instruction set (64 bytes).
template <class T>
bool streams_past_cache(const T* to, index_t size, index_t width, index_t large = index_t{4} << 20) {
  constexpr index_t vector = 64, bytes = static_cast<index_t>(sizeof(T));
  return size * bytes >= large && width * bytes % vector == 0 &&
         reinterpret_cast<std::uintptr_t>(to) % static_cast<std::uintptr_t>(vector) == 0;
}

}  // namespace detail
}  // namespace ops
PUFFERFISH_NAMESPACE_END
