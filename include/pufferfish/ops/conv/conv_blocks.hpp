// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how direct convolutions use the micro-kernels of linalg/gemm. A micro-kernel computes one block
/// of the output: the rows of the block are pixels, the columns are a panel of output channels, a few vectors
/// wide.

#include <algorithm>
#include <cstddef>

#include <pufferfish/core/context.hpp>
#include <pufferfish/linalg/gemm/edge_tile.hpp>
#include <pufferfish/ops/conv/tap_axis.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

using pufferfish::detail::block_arguments;
using pufferfish::detail::block_tap;
using pufferfish::detail::kernel_list;
using pufferfish::detail::kernel_table;
using pufferfish::detail::moved;
using pufferfish::detail::product_result_t;
using pufferfish::detail::run_clipped;
using pufferfish::detail::run_rows;

/// The table of micro-kernels for elements of T and the widest instruction set of this machine.
template <class T>
const kernel_table<T>& conv_kernels() {
  static const kernel_table<T>& chosen = pufferfish::detail::kernels_for<T>(widest_isa());
  return chosen;
}

/// The cut of a number of vectors (of output channels) into panels of at most `widest` vectors: as few panels
/// as possible, with widths as equal as possible.
struct panel_cut {
  index_t vectors, panels;  ///< number of vectors in all panels together, number of panels
  panel_cut(index_t count, index_t widest) : vectors(count), panels((count + widest - 1) / widest) {}
  /// The vectors of a panel.
  range operator[](index_t panel) const { return {vectors * panel / panels, vectors * (panel + 1) / panels}; }
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
