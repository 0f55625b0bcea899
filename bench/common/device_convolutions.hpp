// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Convolutions on a device one by one, by both kinds of the library's kernels.

#include "line_server.hpp"

namespace bench {

/// Times the 3 x 3 convolutions of stride 1 of ResNet-18 with `batch` images in bf16: `gathered`, by the
/// kernels for all shapes, and `groups`, by those of warp groups, in microseconds; 0 where a kind does not
/// have the shape. `difference` of the results: of their norms, relative. `tiny`: a few channels and pixels.
answer time_convolutions(const request& asked);

}  // namespace bench
