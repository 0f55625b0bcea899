// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// fail-args: -fno-exceptions
// expected-error: need exceptions: leave out -fno-exceptions
// last-error: stopped_by_the_error_above

#include <pufferfish/distributed/exchange.hpp>
