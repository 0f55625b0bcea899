// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Copies an array from host memory to the memory of a device. On the CPU nothing needs to be copied, so that
/// one code serves all devices:
///
/// \code
/// scratch_frame notes(ctx.host_scratch());
/// index_t* const written = ops::upload_buffer(ctx, notes, place, count);
/// for (index_t i = 0; i < count; ++i) written[i] = numbers[i];
/// ops::upload(ctx, written, place, count);
/// \endcode

#include <algorithm>

#include <pufferfish/ops/device_ops.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Buffer for `count` elements that the host writes and upload() copies to `place`, an address in the memory
/// of the context's device. On the CPU the buffer is `place` itself. On the GPU the buffer is memory of
/// `notes`, a frame of the context's host_scratch(), and is released with this frame. The elements are not
/// initialized.
template <class V, class Device>
V* upload_buffer(context<Device>&, scratch_frame& notes, V* place, index_t count) {
  if constexpr (is_cpu<Device>) return place;
  return notes.take<V>(count);
}

/// Copies `count` elements from ordinary host memory (`written`) to the memory of the context's device
/// (`place`). The host memory may change after the return. On the CPU both addresses may be the same;
/// otherwise the arrays do not overlap. Steps that a graph captures must not call this function, because
/// every replay would copy from the same address.
template <class V, class Device>
void upload(context<Device>& ctx, const V* written, V* place, index_t count) {
  if (count == 0) return;
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::upload(ctx, written, place, count);
  } else {
    if (written != place) std::copy_n(written, count, place);
  }
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
