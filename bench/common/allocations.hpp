// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Counts allocations. allocations.cpp replaces operator new, so only programs that want to count link it.

namespace bench {

/// How often this program has asked operator new for memory so far.
long allocations();

}  // namespace bench
