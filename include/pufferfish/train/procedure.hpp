// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `procedure`: the Pufferfish training procedure for image classifiers.

#include <memory>
#include <utility>

#include <pufferfish/train/image_task.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A training run (see training_run) of an image classifier.
/// \code
///   mpi::communicator comm(MPI_COMM_WORLD);
///   procedure<float, mpi::communicator> run(std::move(net), comm, train, test, options);
///   training_observer quiet;
///   run.run(quiet);
///   run.save("run.safetensors");
/// \endcode
template <class T, class Comm, class Device = device::cpu>
class procedure : public training_run<image_task<T, Device>, Comm> {
  using base = training_run<image_task<T, Device>, Comm>;

 public:
  using machine_options = typename base::machine_options;

  /// Prepares the training of a dense network on two sets of type image_set. Named sets must outlive the
  /// object; temporary ones, such as load_mnist_layout(folder, true) as an argument, are moved into it. If
  /// the images of a rank do not fit the network, that rank throws shape_error and all others throw
  /// value_error. Also throws the errors of training_run.
  template <detail::image_set_argument Train, detail::image_set_argument Test>
  procedure(network<T, Device> net, Comm& comm, Train&& train, Test&& test, const training_options& options,
            const machine_options& machine = {})
      : procedure(detail::all_or_none(comm, "procedure",
                                      [&] {
                                        return image_task<T, Device>(net, std::forward<Train>(train),
                                                                     std::forward<Test>(test), options,
                                                                     comm.rank(), comm.size());
                                      }),
                  std::move(net), comm, options, machine) {}

  /// Prepares the training with images from any source. Throws the errors of the other constructor and of the
  /// sources.
  procedure(network<T, Device> net, Comm& comm, std::shared_ptr<const image_source<T, Device>> train,
            std::shared_ptr<const image_source<T, Device>> test, const training_options& options,
            const machine_options& machine = {})
      : procedure(
            detail::all_or_none(
                comm, "procedure",
                [&] { return image_task<T, Device>(net, train, test, options, comm.rank(), comm.size()); }),
            std::move(net), comm, options, machine) {}

  /// Mean and deviation of the training set's channels, which evaluations of other images need (evaluate).
  const normalization& normalize() const { return base::task().normalize(); }

 private:
  // An rvalue reference, so that `task` is made from the network before the network is moved from.
  procedure(image_task<T, Device> task, network<T, Device>&& net, Comm& comm, const training_options& options,
            const machine_options& machine)
      : base(std::move(net), comm, std::move(task), options, machine) {}
};

PUFFERFISH_NAMESPACE_END
