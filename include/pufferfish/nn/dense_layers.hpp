// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The dense layers that kind_traits::make_dense makes.

#include <pufferfish/nn/conv.hpp>
#include <pufferfish/nn/embedding.hpp>
#include <pufferfish/nn/linear.hpp>
#include <pufferfish/nn/lstm.hpp>
