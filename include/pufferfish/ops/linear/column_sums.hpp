// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Column sums of a matrix, which are the gradient of a bias, and the conversion of sums in double to a
/// gradient in the parameter's type.

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// The definition: sums_n = sum_m x_mn, or with `add` sums_n += sum_m x_mn. Each sum is computed in double
/// and rounded once. x: M x N, any strides; sums: N elements that do not overlap x.
template <class T>
void column_sums(const tensor_view<const T, 2>& x, T* sums, bool add) {
  for (index_t n = 0; n < x.extent(1); ++n) {
    double sum = add ? static_cast<double>(sums[n]) : 0.0;
    for (index_t m = 0; m < x.extent(0); ++m) sum += static_cast<double>(x(m, n));
    sums[n] = static_cast<T>(sum);
  }
}

}  // namespace reference

/// sums_n = sum_m x_mn, or with `add` sums_n += sum_m x_mn. x: M x N, contiguous rows, any row stride; sums:
/// N elements that do not overlap x. Each column is summed in double and rounded once. For M = 0 the sums are
/// 0 (with `add`: unchanged).
///
/// On the CPU, a sum is computed from the first row to the last. A task sums 512 columns, so a matrix of at
/// most 512 columns is summed by one thread; bias_gradient (linear.hpp) splits the rows among threads
/// instead. On a device, the order of the additions depends on the shape and on whether x is aligned to 16
/// bytes. At most 16 rows are summed in float before they are added to a sum in double.
///
/// \code
/// ops::column_sums<float>(ctx, dz, dbias, false);
/// \endcode
template <class T, class Device>
void column_sums(context<Device>& ctx, const tensor_view<const T, 2>& x, parameter_t<T>* sums, bool add) {
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::column_sums(ctx, x, sums, add);
  } else {
    constexpr index_t piece = 512;
    const index_t rows = x.extent(0), columns = x.extent(1);
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, column_sums<T>);
    ctx.parallel_for((columns + piece - 1) / piece, [&](index_t task, int) {
      const index_t begin = task * piece, count = std::min(piece, columns - begin);
      double wide[piece];
      for (index_t i = 0; i < count; ++i) wide[i] = add ? static_cast<double>(sums[begin + i]) : 0.0;
      kernel(x.data() + begin, rows, count, x.stride(0), wide);
      for (index_t i = 0; i < count; ++i) sums[begin + i] = static_cast<parameter_t<T>>(wide[i]);
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, column_sums);

/// Destination of the gradient of a small parameter, in the memory of the context's device. The gradient
/// overwrites `data`, or is added to it if `add` is set. `data` is not owned.
template <class T>
struct sum_target {
  T* data = nullptr;
  bool add = false;
};

/// to_i = sums_i, or with to.add to_i += sums_i, computed in double and rounded once. Used by passes that
/// compute the gradient of a small parameter as a by-product. sums and to.data: `size` elements each, in host
/// memory. Runs in the calling thread.
template <class T>
void store_sums(const double* sums, const sum_target<T>& to, index_t size) {
  for (index_t i = 0; i < size; ++i) {
    to.data[i] = static_cast<T>(to.add ? static_cast<double>(to.data[i]) + sums[i] : sums[i]);
  }
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
