// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The training loop: data, the Pufferfish procedure, evaluation, checkpoints. Needs zlib and nlohmann-json;
/// MPI only if <pufferfish/distributed.hpp> is included too.

#include <pufferfish/dist/self.hpp>
#include <pufferfish/io/dataset.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/train/carry_state.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/estimate_norms.hpp>
#include <pufferfish/train/evaluate.hpp>
#include <pufferfish/train/loader.hpp>
#include <pufferfish/train/measure_statistics.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/procedure.hpp>
