// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: ends the compilation of a program without exceptions, for headers that need them.

#include <pufferfish/core/config.hpp>

#if !PUFFERFISH_EXCEPTIONS
#error \
    "pufferfish: training, exchanges of gradients, devices and host adapters need exceptions: leave out -fno-exceptions (lowrank.hpp and nn.hpp do without)"
// Ends the compilation, so that nothing hides the error above.
#include <pufferfish/stopped_by_the_error_above>
#endif
