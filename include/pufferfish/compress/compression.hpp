// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// All gradient compressors of the library. Each compressor has an options struct. gradient_exchange,
/// run_options and new_compressor(store, options) take this struct and construct the compressor:
///
/// \code
/// mpi::communicator comm(MPI_COMM_WORLD);
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, power_sgd_options{.rank = 2});
/// exchange.begin(ctx);   // in every step: before the forward pass
/// exchange.finish(ctx);  // after the backward pass: the gradients are the compressor's result
/// \endcode
///
/// A compressor uses no communicator; calls of its members are local, and the exchange calls them in the same
/// order on all ranks. Calls on one object must not overlap. The spans and pointers of a compressor_message
/// refer to memory of the compressor: they are valid until its next encode, and the object must not be moved
/// before decode.
///
/// Rules for all compressors that this header includes: encode leaves `gradients` unchanged and updates the
/// error memory or the momentum; decode overwrites `gradients`. The result has the same bits on all ranks and
/// for every number of threads.

#include <pufferfish/compress/accordion/accordion.hpp>
#include <pufferfish/compress/atomo/atomo.hpp>
#include <pufferfish/compress/atomo/entry_atomo.hpp>
#include <pufferfish/compress/low_rank/power_sgd.hpp>
#include <pufferfish/compress/quantize/qsgd.hpp>
#include <pufferfish/compress/quantize/stochastic_binary.hpp>
#include <pufferfish/compress/quantize/tern_grad.hpp>
#include <pufferfish/compress/sign/one_bit.hpp>
#include <pufferfish/compress/sign/sign_codec.hpp>
#include <pufferfish/compress/sign/signum.hpp>
#include <pufferfish/compress/sign/two_hop_signum.hpp>
#include <pufferfish/compress/sparse/block_top_k.hpp>
#include <pufferfish/compress/sparse/dgc.hpp>
#include <pufferfish/compress/sparse/random_k.hpp>
#include <pufferfish/compress/sparse/top_k.hpp>
#include <pufferfish/distributed/compression_options.hpp>
