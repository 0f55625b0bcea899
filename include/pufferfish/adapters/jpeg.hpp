// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Training images in folders of JPEG files, by libjpeg-turbo (Debian: libturbojpeg0-dev; link with
/// -lturbojpeg). docs/training.md explains them.

#include <pufferfish/adapters/jpeg/folder_images.hpp>
