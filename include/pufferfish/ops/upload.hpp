// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What the host has written on its way to the device that reads it.

#include <algorithm>

#include <pufferfish/core/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Where the host writes the `count` elements that upload() will bring to `place`, in the memory of the
/// context's device: there itself if it can, else in memory of `notes`, a frame of the context's
/// host_scratch().
template <class V>
V* upload_buffer(context<device::cpu>&, scratch_frame&, V* place, index_t) {
  return place;
}
template <class V>
V* upload_buffer(context<device::gpu>&, scratch_frame& notes, V*, index_t count) {
  return notes.take<V>(count);
}

/// place = written, `count` elements from ordinary memory of the host, which may change when this returns, to
/// the memory of the context's device. On the CPU they may be the same.
template <class V>
void upload(context<device::cpu>&, const V* written, V* place, index_t count) {
  if (written != place) std::copy_n(written, count, place);
}
/// The device's form: <pufferfish/gpu.hpp>. Not for steps that a graph captures: it would copy the same
/// numbers at every replay.
template <class V>
void upload(context<device::gpu>& ctx, const V* written, V* place, index_t count);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
