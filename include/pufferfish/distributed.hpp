// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Training on several processes: the communicator concept, `self` for one process, `mpi::communicator`,
/// gradient compressors, and the gradient exchange that overlaps with the backward pass. Needs the
/// headers and library of MPI.

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/dist/communicator.hpp>
#include <pufferfish/dist/exchange.hpp>
#include <pufferfish/dist/micro_batches.hpp>
#include <pufferfish/dist/mpi.hpp>
#include <pufferfish/dist/mpi_environment.hpp>
#include <pufferfish/dist/self.hpp>
#include <pufferfish/dist/tune.hpp>
