// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LeNet on MNIST, with dlib alone (plain.cpp), and the same program with low-rank layers after the first
// epoch and on several ranks, which share each batch (lowrank.cpp): docs/embed_dlib.md shows the difference.
//   plain DIRECTORY [EPOCHS]     the directory holds the four files of MNIST, unpacked

#include <dlib/data_io.h>
#include <dlib/dnn.h>
#include <pufferfish/adapters/dlib.hpp>
#include <pufferfish/distributed/mpi_environment.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "../common/usage.hpp"

namespace {

using image = dlib::matrix<unsigned char>;
template <typename Subnet>
using pooled = dlib::max_pool<2, 2, 2, 2, dlib::relu<Subnet>>;
template <typename Subnet>
using stem = pooled<dlib::con<20, 5, 5, 1, 1, Subnet>>;
using lenet = dlib::loss_multiclass_log<
    dlib::fc<10, dlib::relu<dlib::fc<500, pooled<dlib::con<50, 5, 5, 1, 1, stem<dlib::input<image>>>>>>>>;

}  // namespace

int main(int argc, char** argv) try {
  if (const auto status = examples::usage_shown(argc, argv, 2, " [DIRECTORY [EPOCHS]]")) return *status;
  const pufferfish::mpi::environment environment(pufferfish::mpi::thread_level::serialized);
  pufferfish::mpi::communicator ranks(MPI_COMM_WORLD);
  const int epochs = argc > 2 ? std::atoi(argv[2]) : 4;
  std::vector<image> images, test_images;
  std::vector<unsigned long> labels, test_labels;
  dlib::load_mnist_dataset(argc > 1 ? argv[1] : "mnist", images, labels, test_images, test_labels);

  const auto right = [&](auto& net) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < test_images.size(); i += 500) {
      const std::vector<image> part(&test_images[i], &test_images[i] + 500);
      const std::vector<unsigned long> found = net(part);
      for (std::size_t k = 0; k < found.size(); ++k) count += found[k] == test_labels[i + k] ? 1U : 0U;
    }
    return 100.0 * static_cast<double>(count) / static_cast<double>(test_images.size());
  };

  // Epochs first to last - 1; the same batches of 64 for every network.
  const auto train = [&](auto& net, int first, int last) {
    dlib::dnn_trainer trainer(net, pufferfish::distributed_solver(dlib::sgd(0.0005F, 0.9F), ranks));
    trainer.set_iterations_without_progress_threshold(1000000);
    for (int epoch = first; epoch < last; ++epoch) {
      trainer.set_learning_rate(0.01 / (1 << epoch));
      dlib::rand random(epoch + 1);
      const std::size_t steps = images.size() / 64;
      const auto start = std::chrono::steady_clock::now();
      for (std::size_t step = 0; step < steps; ++step) {
        std::vector<image> batch;
        std::vector<unsigned long> classes;
        for (int i = 0; i < 64; ++i) {
          const std::size_t pick = random.get_random_32bit_number() % images.size();
          if (i % ranks.size() != ranks.rank()) continue;
          batch.push_back(images[pick]);
          classes.push_back(labels[pick]);
        }
        trainer.train_one_step(batch, classes);
      }
      trainer.get_net();  // waits for the last step
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
      const double percent = right(net);
      if (ranks.rank() != 0) continue;
      std::printf("epoch %d: %.2f %% right, %.2f ms a step, %zu parameters\n", epoch + 1, percent,
                  time.count() / static_cast<double>(steps), dlib::count_parameters(net));
    }
  };

  lenet net;
  train(net, 0, 1);
  pufferfish::low_rank_twin<lenet> small(net);
  train(small, 1, epochs);
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "dlib_mnist: %s\n", e.what());
  return 1;
}
