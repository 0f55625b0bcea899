// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Umbrella header for training: data sets, evaluation, checkpoints, and the class `procedure`, which trains
/// a dense network, factorizes it and trains the low-rank network. It needs zlib and nlohmann-json; MPI only
/// if <pufferfish/distributed.hpp> is included too.
///
/// \code
/// const auto train = load_mnist_layout(folder, true), test = load_mnist_layout(folder, false);
/// auto net = small_resnet<float>({.channels_in = 1, .classes = 10});  // models/small_resnet.hpp
/// net.initialize(1);
/// self alone;  // communicator of a single process; or an mpi::communicator
/// procedure<float, self> run(std::move(net), alone, train, test, training_options{});
/// training_observer silent;
/// run.run(silent);  // dense epochs, factorization, low-rank epochs
/// \endcode

#include <pufferfish/distributed/self.hpp>
#include <pufferfish/io/dataset.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/prune/early_bird.hpp>
#include <pufferfish/train/carry_state.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/estimate_norms.hpp>
#include <pufferfish/train/evaluate.hpp>
#include <pufferfish/train/loader.hpp>
#include <pufferfish/train/lottery_file.hpp>
#include <pufferfish/train/measure_statistics.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/procedure.hpp>
