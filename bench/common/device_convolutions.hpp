// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Convolutions on a device one by one, by both kinds of the library's kernels.

#include "line_server.hpp"

namespace bench {

/// Times the 3 x 3 convolutions of stride 1 of ResNet-18 with `batch` images in bf16: `gathered`, by the
/// kernels for all shapes, and `groups`, by those of warp groups, in microseconds; 0 where these do not have
/// the shape or the device. `difference`: norm of the difference of the results over the norm of the first.
/// Low-rank layers have a row for both factors in one pass where their kernel has the shape. `tiny`: a few
/// channels and pixels.
answer time_convolutions(const request& asked);

}  // namespace bench
