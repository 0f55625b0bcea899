// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The program that README.md shows from the includes on: train_digits DIR, with examples/data/digits for DIR.

// [digits]
#include <cstdio>
#include <exception>
#include <string>

#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/train.hpp>

int main(int argc, char** argv) try {
  const std::string folder = argc == 2 ? argv[1] : "";
  if (folder.empty() || folder[0] == '-') {
    std::puts("usage: train_digits DIR");
    return folder == "--help" ? 0 : 2;
  }
  const auto train = pufferfish::load_mnist_layout(folder, true);
  const auto test = pufferfish::load_mnist_layout(folder, false);
  auto net = pufferfish::small_resnet<float>({.channels_in = 1, .classes = 10});
  net.initialize(1);
  pufferfish::training_options options;  // hybrid: dense epochs, SVD to a quarter of the rank, training on
  options.epochs = 8;
  options.warmup_epochs = 3;
  options.switching.statistics_steps = 20;  // the last 20 dense steps measure what the loss depends on
  pufferfish::self alone;                   // or an mpi::communicator
  pufferfish::procedure<float, pufferfish::self> run(std::move(net), alone, train, test, options);
  pufferfish::training_observer silent;
  run.run(silent);
  std::printf("%td parameters, %.2f %% right\n", run.net().parameter_count(),
              run.history().back().test_accuracy);
} catch (const std::exception& error) {
  std::fprintf(stderr, "train_digits: %s\n", error.what());
  return 1;
}
// [digits]
