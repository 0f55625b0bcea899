// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Counts allocations. allocations.cpp replaces operator new, so only programs that want to count link it.

namespace bench {

/// Number of calls of operator new in this program so far.
long allocations();

}  // namespace bench
