// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: a context for the part of an algorithm that the host computes, for any device.

#include <pufferfish/core/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Provides a CPU context for work on the host: of(ctx) returns ctx itself if it is a CPU context, else a
/// context that this object owns, with default options. The reference is valid as long as both.
///
///     host_work<Device> work;
///     copy_on_host(work.of(ctx), values);
template <class Device>
class host_work {
 public:
  context<device::cpu>& of(context<Device>&) { return own_; }

 private:
  context<device::cpu> own_;
};
template <>
class host_work<device::cpu> {
 public:
  context<device::cpu>& of(context<device::cpu>& ctx) { return ctx; }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
