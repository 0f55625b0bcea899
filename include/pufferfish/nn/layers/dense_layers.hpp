// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The dense layers that kind_traits::dense names.

#include <pufferfish/nn/layers/conv.hpp>
#include <pufferfish/nn/layers/embedding.hpp>
#include <pufferfish/nn/layers/linear.hpp>
#include <pufferfish/nn/layers/lstm.hpp>
