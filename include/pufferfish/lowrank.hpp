// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Low-rank layers and the factorization that makes them from dense ones: what an existing code base
/// includes. Needs the standard library and nothing else.

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/error.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/core/version.hpp>
#include <pufferfish/lowrank/budget.hpp>
#include <pufferfish/lowrank/factorize.hpp>
#include <pufferfish/lowrank/factors.hpp>
#include <pufferfish/lowrank/kinds.hpp>
#include <pufferfish/lowrank/output_statistics.hpp>
#include <pufferfish/lowrank/rank.hpp>
#include <pufferfish/lowrank/rank_table.hpp>
#include <pufferfish/lowrank/traits.hpp>
#include <pufferfish/lowrank/truncation.hpp>
