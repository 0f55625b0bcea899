// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <string>

/// What each object shows of itself. No type of the library but its exceptions may cross: all others belong
/// to an ABI namespace, and naming one here would not link.
struct object_report {
  std::string abi;          // the name of its ABI namespace
  int assert_level = -1;    // the level it was compiled with
  double checksum = 0;      // over what it computed: the same in every object
  double layers = 0;        // likewise, to rounding: kernels of another instruction set add in another order
  bool caught_own = false;  // it caught what it threw itself
};

namespace light {
object_report run();
void throw_shape_error();
bool catches(void (*thrower)());
}  // namespace light

namespace full {
object_report run();
void throw_shape_error();
bool catches(void (*thrower)());
}  // namespace full

// As full, with OpenMP's threads.
namespace openmp {
object_report run();
void throw_shape_error();
bool catches(void (*thrower)());
}  // namespace openmp

// Header-only, and with separate kernels.
namespace joined {
object_report run();
}  // namespace joined

namespace separate {
object_report run();
bool catches(void (*thrower)());
}  // namespace separate
