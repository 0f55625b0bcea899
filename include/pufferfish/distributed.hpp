// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Training on several processes: the communicator concept, `self` for one process and `mpi::communicator`.
/// Needs MPI's headers and library.

#include <pufferfish/dist/communicator.hpp>
#include <pufferfish/dist/mpi.hpp>
#include <pufferfish/dist/self.hpp>
