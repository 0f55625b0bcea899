// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The library's version (semantic versioning). A test compares it with Meson's `project(version:)`.

#define PUFFERFISH_VERSION_MAJOR 0
#define PUFFERFISH_VERSION_MINOR 1
#define PUFFERFISH_VERSION_PATCH 0

/// The library's version as one number that can be compared: major * 10000 + minor * 100 + patch.
#define PUFFERFISH_VERSION \
  (PUFFERFISH_VERSION_MAJOR * 10000 + PUFFERFISH_VERSION_MINOR * 100 + PUFFERFISH_VERSION_PATCH)

#define PUFFERFISH_VERSION_STRING "0.1.0"
