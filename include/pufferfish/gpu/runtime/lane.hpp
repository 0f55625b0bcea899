// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: a stream of a context with everything that its work must not share with other streams.

#include <pufferfish/core/arena.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>
#include <pufferfish/gpu/runtime/blas.hpp>
#include <pufferfish/gpu/runtime/memory.hpp>
#include <pufferfish/gpu/runtime/stream.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// A stream of the current device with its own scratch memory, cuBLAS workspace, and zeroed counters for
/// kernels whose last block continues (kernels::column_workspace).
struct lane {
  /// Throws backend_error. `deterministic`: see gpu::blas.
  explicit lane(bool deterministic)
      : memory(stream.handle()),
        scratch(memory),
        blas(stream.handle(), deterministic),
        counters(device_memory(), kernels::most_column_counters) {}

  gpu::stream stream;
  stream_memory memory;
  stack_arena scratch;
  gpu::blas blas;
  memory_block<unsigned> counters;
};

/// A second lane, whose work begins after a point of the first one, and is waited for by the first one.
struct side_lane : lane {
  using lane::lane;

  /// Later work of this lane starts after all work that is in `main` now.
  void fork_from(const lane& main) {
    forked.record(main.stream.handle());
    stream.wait_for(forked);
  }
  /// Later work of `main` starts after all work that is in this lane now.
  void join(const lane& main) {
    joined.record(stream.handle());
    main.stream.wait_for(joined);
  }

  event forked, joined;
};

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
