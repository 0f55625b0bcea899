// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Cuts sums over the rows of a matrix into parts. The parts depend on the shape alone, and with them the
/// scratch memory. The order of the additions also depends on the number of columns that a thread reads at
/// once (columns.cuh).

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Memory of the device for sums over columns. parts: column_scratch doubles. counters: most_column_counters
/// numbers, all zero; they are zero again when the sums are complete. Work of one stream shares the counters.
struct column_workspace {
  double* parts;
  unsigned* counters;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Number of parts of consecutive rows; 1 without rows. A part has at least 8192 elements of 128 columns (or
/// of all columns, if there are fewer). All blocks together are at most about 256, so that they can run at
/// the same time: two on each of 132 multiprocessors, as the registers for eight columns per thread allow.
inline index_t row_parts(index_t rows, index_t columns) {
  if (rows <= 0 || columns <= 0) return 1;
  const index_t across = (columns + 127) / 128, side = columns < 128 ? columns : 128;
  const index_t least = (8192 + side - 1) / side;  // rows of a part
  const index_t most = across >= 256 ? 1 : 256 / across, wanted = (rows + least - 1) / least;
  return wanted < most ? wanted : most;
}

/// The first row of a part; for part = parts, the number of rows.
PUFFERFISH_HOST_DEVICE inline index_t part_begin(index_t rows, index_t parts, index_t part) {
  const index_t whole = rows / parts, rest = rows % parts;
  return part * whole + (part < rest ? part : rest);
}

/// Number of doubles of scratch memory for sums of `quantities` numbers per column.
inline index_t column_scratch(index_t rows, index_t columns, index_t quantities) {
  return quantities * row_parts(rows, columns) * columns;
}

/// Number of consecutive parts whose sums one block adds up. The sums of such groups are then added up in the
/// same way.
inline constexpr index_t grouped_parts = 16;

/// Number of counters of the last_block.cuh kind that sums over columns use if a block has `across` columns
/// or more: one for each group of parts and one for all groups, for each tile of columns. Never more than
/// most_column_counters.
inline index_t column_counters(index_t rows, index_t columns, index_t across) {
  const index_t parts = row_parts(rows, columns);
  if (parts == 1) return 0;
  return (columns + across - 1) / across * ((parts + grouped_parts - 1) / grouped_parts + 1);
}
inline constexpr index_t most_column_counters = 2048;

PUFFERFISH_KERNELS_END
