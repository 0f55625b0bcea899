// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Low-rank layers, and the factorization of dense layers into low-rank ones. This is the header for an
/// existing code base. Needs only the standard library.
///
/// \code
/// const LowRankLinear<float> layer = svd_factorize<LowRankLinear<float>>(dense, rank_ratio{0.25});
/// \endcode
///
/// `dense` is a dense layer of <pufferfish/nn.hpp>, or a layer of any type for which the program specializes
/// the template layer_traits (lowrank/traits.hpp).

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/error.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/core/version.hpp>
#include <pufferfish/lowrank/budget/budget.hpp>
#include <pufferfish/lowrank/budget/rank_table.hpp>
#include <pufferfish/lowrank/factorization/factorize.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/factorization/truncation.hpp>
#include <pufferfish/lowrank/kinds.hpp>
#include <pufferfish/lowrank/rank.hpp>
#include <pufferfish/lowrank/statistics/network_statistics.hpp>
#include <pufferfish/lowrank/traits.hpp>
