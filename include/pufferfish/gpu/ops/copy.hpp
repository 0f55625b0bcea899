// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The operations of ops/copy/ on a device. Operands are in memory of the context's device. The functions
/// launch kernels in the context's stream and do not wait. A failed launch throws backend_error.

#include <cstddef>
#include <span>

#include <pufferfish/gpu/kernels/copy/elements.hpp>
#include <pufferfish/gpu/kernels/copy/groups.hpp>
#include <pufferfish/gpu/kernels/elementwise/elementwise.hpp>
#include <pufferfish/gpu/kernels/step.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/ops/copy/columns.hpp>
#include <pufferfish/ops/copy/keep_marked.hpp>
#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/copy/upload.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Device implementation of the functions of ops/copy/, where shapes and errors are described. Each function
/// is one kernel, except upload().
template <>
struct copy_ops<device::gpu> {
  /// to_m = from_(places[m]) for each row m of `to`; to_m = from_m if `places` is null. `places` is an array
  /// in the device's memory.
  template <class T>
  static void gather_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from,
                          const index_t* places, const tensor_view<T, 2>& to) {
    if (places == nullptr) {
      return gpu::kernels::copy_groups<T>(ctx.stream(), 1, to.extent(0), to.extent(1),
                                          gpu::detail::rows_of(from), 0, gpu::detail::rows_of(to), 0);
    }
    gpu::kernels::gather_rows<T>(ctx.stream(), gpu::detail::rows_of(from), places, to.extent(0), to.extent(1),
                                 gpu::detail::rows_of(to));
  }

  /// to_(places[m]) = from_m for each row m of `from`. `places` is an array of distinct numbers in the
  /// device's memory.
  template <class T>
  static void scatter_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from,
                           const index_t* places, const tensor_view<T, 2>& to) {
    gpu::kernels::scatter_rows<T>(ctx.stream(), gpu::detail::rows_of(from), places, from.extent(0),
                                  to.extent(1), gpu::detail::rows_of(to));
  }

  /// to(m, j) = from(m, columns[j]); NaN for a column number out of range.
  template <class T>
  static void gather_columns(context<device::gpu>& ctx, const tensor_view<const T, 2>& from,
                             const parameter_t<T>* columns, const tensor_view<T, 2>& to) {
    gpu::kernels::gather_columns<T>(ctx.stream(), gpu::detail::rows_of(from), from.extent(1), columns,
                                    to.extent(1), to.extent(0), gpu::detail::rows_of(to));
  }

  /// Sets `to` to 0 unless `add` is set, then adds from(m, j) to to(m, columns[j]). Column numbers out of
  /// range are ignored.
  template <class T>
  static void scatter_columns(context<device::gpu>& ctx, const tensor_view<const T, 2>& from,
                              const parameter_t<T>* columns, const tensor_view<T, 2>& to, bool add) {
    gpu::kernels::scatter_columns<T>(ctx.stream(), gpu::detail::rows_of(from), columns, from.extent(1),
                                     to.extent(0), to.extent(1), gpu::detail::rows_of(to), add);
  }

  /// Sets all elements of x to 0; elements between the rows are not written.
  template <class T>
  static void clear_rows(context<device::gpu>& ctx, const tensor_view<T, 2>& x) {
    gpu::kernels::fill_rows<T>(ctx.stream(), nullptr, x.data(), x.extent(0), x.extent(1), x.stride(0));
  }

  /// Sets to +0 the elements of x whose bit in `words`, counted from bit `first` on, is clear.
  template <class T>
  static void keep_marked(context<device::gpu>& ctx, const std::uint64_t* words, index_t first,
                          std::span<T> x) {
    gpu::kernels::keep_marked<T>(ctx.stream(), words, first, x.data(), static_cast<index_t>(x.size()));
  }

  /// y_i = factor x_i; y may be x.
  template <class T>
  static void scale(context<device::gpu>& ctx, parameter_t<T> factor, std::span<const T> x, std::span<T> y) {
    gpu::kernels::scale<T>(ctx.stream(), factor, x.data(), y.data(), static_cast<index_t>(y.size()));
  }

  /// Copies `count` elements from pageable host memory (`written`) to the device (`place`). CUDA has read
  /// `written` when the call returns, so the caller may change the host memory. Throws backend_error if the
  /// copy fails.
  template <class V>
  static void upload(context<device::gpu>& ctx, const V* written, V* place, index_t count) {
    gpu::check(cudaMemcpyAsync(place, written, static_cast<std::size_t>(count) * sizeof(V),
                               cudaMemcpyHostToDevice, ctx.stream()),
               "cudaMemcpyAsync of notes to the device");
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
