// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// ONNX models, by Debian's libonnx-dev and libprotobuf-dev: `write_onnx` and `read_onnx` for networks of
/// this library. docs/onnx.md explains them.

#include <pufferfish/adapters/onnx/factorize.hpp>
#include <pufferfish/adapters/onnx/network_file.hpp>
#include <pufferfish/adapters/onnx/sequence_file.hpp>
