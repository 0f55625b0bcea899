// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The program that README.md shows from the includes on: digits DIR, with examples/data/digits for DIR.

// [digits]
#include <cstdio>

#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/train.hpp>

int main(int, char** argv) {
  const auto train = pufferfish::load_mnist_layout(argv[1], true);
  const auto test = pufferfish::load_mnist_layout(argv[1], false);
  auto net = pufferfish::small_resnet<float>({.channels_in = 1, .classes = 10});
  net.initialize(1);
  pufferfish::training_options options;  // hybrid: dense epochs, SVD to a quarter of the rank, training on
  options.epochs = 8;
  options.warmup_epochs = 3;
  pufferfish::self alone;  // or an mpi::communicator
  pufferfish::procedure<float, pufferfish::self> run(std::move(net), alone, train, test, options);
  pufferfish::training_observer nobody;
  run.run(nobody);
  std::printf("%td parameters, %.2f %% right\n", run.net().parameter_count(),
              run.history().back().test_accuracy);
}
// [digits]
