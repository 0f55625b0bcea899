// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Umbrella header for training on several processes with MPI. It includes the communicator concept, the
/// communicators `mpi::communicator` and `self` (a group of one process), gradient compressors, and the
/// gradient exchange that overlaps with the backward pass. It needs MPI's headers and library.
///
/// One step of data-parallel training, on every rank:
///
/// \code
/// mpi::environment environment(mpi::thread_level::serialized);
/// mpi::communicator comm(MPI_COMM_WORLD);
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm);  // collective
/// exchange.begin(ctx);
/// net.forward(ctx, x.view(), y.view());
/// net.backward(ctx, dy.view());  // buckets of gradients are sent while it runs
/// exchange.finish(ctx);          // every gradient is now the mean over the ranks
/// \endcode
///
/// Compressors and `self` need no MPI: <pufferfish/pufferfish.hpp> includes them without it.

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/micro_batches.hpp>
#include <pufferfish/distributed/mpi.hpp>
#include <pufferfish/distributed/mpi_environment.hpp>
#include <pufferfish/distributed/self.hpp>
#include <pufferfish/distributed/sum_statistics.hpp>
#include <pufferfish/distributed/tune.hpp>
