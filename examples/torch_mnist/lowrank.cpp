// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A small convolutional network on MNIST, in plain libtorch (plain.cpp), and the same program with its layers
// low-rank from the second epoch on and on several ranks (lowrank.cpp): docs/embed_torch.md shows the
// difference.

#include <torch/torch.h>
#include <pufferfish/adapters/torch.hpp>
#include <pufferfish/distributed/mpi_environment.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "../common/usage.hpp"

torch::nn::Sequential make_net() {
  torch::nn::Sequential net;
  net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 32, 3).padding(1)));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(32, 64, 3).padding(1)));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::MaxPool2d(2));
  net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(64, 128, 3).padding(1)));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::MaxPool2d(2));
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(128 * 7 * 7, 256));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(256, 10));
  return net;
}

auto mnist(const std::string& folder, torch::data::datasets::MNIST::Mode mode) {
  return torch::data::datasets::MNIST(folder, mode)
      .map(torch::data::transforms::Normalize<>(0.1307, 0.3081))
      .map(torch::data::transforms::Stack<>());
}

double accuracy(torch::nn::Sequential& net, const std::string& folder) {
  const torch::NoGradGuard no_grad;
  auto images = torch::data::make_data_loader(mnist(folder, torch::data::datasets::MNIST::Mode::kTest), 500);
  std::int64_t right = 0;
  for (auto& batch : *images) {
    right += net->forward(batch.data).argmax(1).eq(batch.target).sum().item<std::int64_t>();
  }
  return static_cast<double>(right) / 100.0;
}

int main(int argc, char** argv) try {
  if (const auto status = examples::usage_shown(argc, argv, 2, " [DIRECTORY [EPOCHS]]")) return *status;
  const std::string folder = argc > 1 ? argv[1] : "mnist";
  const int epochs = argc > 2 ? std::atoi(argv[2]) : 4;
  const pufferfish::mpi::environment environment(pufferfish::mpi::thread_level::serialized);
  pufferfish::mpi::communicator ranks(MPI_COMM_WORLD);
  torch::manual_seed(1);
  torch::nn::Sequential net = make_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  const torch::data::samplers::DistributedRandomSampler order(60000, ranks.size(), ranks.rank());
  const auto train = torch::data::datasets::MNIST::Mode::kTrain;
  auto images = torch::data::make_data_loader(mnist(folder, train), order, 64 / ranks.size());
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    if (epoch == 2) pufferfish::host_torch::renew(optimizer, pufferfish::host_torch::factorize(*net));
    pufferfish::host_torch::distributed parallel(*net, ranks);
    const auto start = std::chrono::steady_clock::now();
    int steps = 0;
    for (auto& batch : *images) {
      optimizer.zero_grad();
      torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target).backward();
      parallel.finish();
      optimizer.step();
      ++steps;
    }
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    const double right = accuracy(net, folder);
    if (ranks.rank() != 0) continue;
    std::printf("epoch %d: %.2f %% right, %.2f ms a step\n", epoch, right, time.count() / steps);
  }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "torch_mnist: %s\n", e.what());
  return 1;
}
