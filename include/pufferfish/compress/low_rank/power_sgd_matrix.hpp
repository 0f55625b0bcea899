// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the products of PowerSGD for one matrix. See power_sgd.hpp for the formulas.

#include <algorithm>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/gemm/native_gemm.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/linalg/svd/orthonormal_rows.hpp>
#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A parameter viewed as a matrix, as it is stored in the arena: element (i, j) is at offset + i columns + j.
struct power_sgd_shape {
  index_t offset = 0, rows = 0, columns = 0;
  /// Number of elements.
  index_t size() const { return rows * columns; }

  /// The matrix of a parameter with this layout. Vectors and parameters without elements have no rows.
  static power_sgd_shape of(const logical_layout& layout, index_t offset) {
    if (layout.dims < 2 || layout.size() == 0) return {offset, 0, 0};
    // The innermost extent: the outputs or, for an embedding, its width.
    const auto last = static_cast<std::size_t>(layout.dims - 1);
    const index_t columns = layout.strides[0] == 1      ? layout.shape[0]
                            : layout.strides[last] == 1 ? layout.shape[last]
                                                        : layout.shape[0];
    return {offset, layout.size() / columns, columns};
  }
  /// Largest rank of the matrix: its smaller extent.
  index_t largest_rank() const { return std::min(rows, columns); }
};

/// Views of the buffers of one matrix in a step. d, q and p do not overlap. Their memory belongs to
/// power_sgd.
template <class T>
struct power_sgd_matrix {
  tensor_view<T, 2> d;  ///< D, rows x columns: e, and D between the rounds
  tensor_view<T, 2> q;  ///< Q, rows x rank
  tensor_view<T, 2> p;  ///< rank x columns: the columns of P are stored as rows

  /// d += gradient, then p = d^T q. Rows are multiplied while they are in the cache. `gradient` has rows x
  /// columns elements and does not overlap d.
  void sum_rows(context<device::cpu>& ctx, const T* gradient) const {
    const auto add = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, add<T>);
    const index_t columns = d.extent(1);
    T* const to = d.data();
    ops::detail::multiply_transposed<T>(ctx, q, d, p, false, [=](index_t first, index_t count, int) {
      add(gradient + first * columns, to + first * columns, count * columns);
    });
  }

  /// Makes the columns of P orthonormal, in double. Every rank has the same sum and gets the same bits.
  void orthonormalize() const {
    tensor<double, 2> wide(p.shape());
    std::copy_n(p.data(), p.size(), wide.data());
    orthonormalize_rows(wide.view());
    std::transform(wide.data(), wide.data() + wide.size(), p.data(),
                   [](double value) { return static_cast<T>(value); });
  }

  /// q = d p, then with `local` d -= q p^T. The tiles of rows depend on the shape alone. Workspace: packed
  /// copies of p and -p from the context's scratch memory.
  void take_rows(context<device::cpu>& ctx, bool local) const {
    const index_t rows = d.extent(0), columns = d.extent(1), rank = q.extent(1);
    const index_t tile = std::max<index_t>(24, (index_t{1} << 16) / columns);
    scratch_frame frame(ctx.scratch());
    const auto forth = gemm_operand<T>::prepare(
        transpose(p), frame.take<T>(gemm_operand<T>::storage_size(columns, rank)), rows);
    const tensor_view<T, 2> minus = frame.take<T>(p.shape());
    std::transform(p.data(), p.data() + p.size(), minus.data(), [](T value) { return -value; });
    const auto back =
        gemm_operand<T>::prepare(minus, frame.take<T>(gemm_operand<T>::storage_size(rank, columns)), rows);
    ctx.parallel_for((rows + tile - 1) / tile, [&](index_t task, int) {
      const index_t first = task * tile, count = std::min(tile, rows - first);
      forth.multiply(d.slice(0, first, count), q.slice(0, first, count), false);
      if (local) back.multiply(q.slice(0, first, count), d.slice(0, first, count), true);
    });
  }

  /// result = q p^T, with rows x columns elements. `result` does not overlap the views.
  void reconstruct(context<device::cpu>& ctx, T* result) const {
    ops::linear_forward<T>(ctx, q, p, nullptr, tensor_view<T, 2>(result, d.shape()));
  }

  /// d -= sent. `sent` has rows x columns elements and does not overlap d.
  void take_from_memory(context<device::cpu>& ctx, const T* sent) const {
    T* const to = d.data();
    ops::for_chunks(ctx, d.size(), [=](index_t begin, index_t end) {
      for (index_t i = begin; i < end; ++i) to[i] -= sent[i];
    });
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
