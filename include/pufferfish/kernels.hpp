// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Compiles the library's large templates, for float and double, in the source file that includes this
/// header. All other source files of the program are then compiled with -DPUFFERFISH_SEPARATE_KERNELS, which
/// takes a fraction of the time of header-only use (core/separate.hpp):
///
/// \code
/// // kernels.cpp: the only source file that includes this header
/// #include <pufferfish/kernels.hpp>
/// \endcode
///
/// All source files of the program need the same compiler flags and the same PUFFERFISH_ASSERT_LEVEL, because
/// they exchange the library's C++ objects. If no source file includes this header, the linker reports the
/// undefined symbol a_source_file_must_include_pufferfish_kernels_hpp.
///
/// The component `kernels` of the library's CMake, pkg-config and Meson packages adds such a source file and
/// defines PUFFERFISH_SEPARATE_KERNELS for the program's other files (docs/start.md). The source file can be
/// compiled in parts, on several processors: once for each of the parts linalg, conv, dense, sequence and
/// train, with -DPUFFERFISH_COMPILE_PARTS -DPUFFERFISH_COMPILE_linalg and so on.

#ifdef PUFFERFISH_SEPARATE_FUNCTION
#error "pufferfish: <pufferfish/kernels.hpp> must be the first header of the library in its source file"
#endif
#define PUFFERFISH_COMPILE_KERNELS

#include <pufferfish/lowrank.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/ops/elementwise/sequence_dropout.hpp>
#include <pufferfish/ops/embedding/positions.hpp>
#include <pufferfish/ops/loss/log_sum_exp.hpp>
#include <pufferfish/ops/loss/output_layer.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>
#include <pufferfish/ops/loss/token_loss.hpp>
#include <pufferfish/ops/norm/layer_norm.hpp>
#include <pufferfish/optim/clip.hpp>
