// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `distributed_solver`: training a dlib network on several ranks.

#include <algorithm>
#include <iosfwd>
#include <istream>
#include <ostream>
#include <span>
#include <string>

#include <dlib/dnn.h>

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/distributed/communicator.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Wraps one of dlib's solvers so that it steps by the mean of all ranks' gradients. Every rank trains with
/// images of its own, equally many on all ranks; all networks stay equal, bit for bit. For a trainer:
///
///     dlib::dnn_trainer trainer(net, distributed_solver(dlib::sgd(), communicator));
///
/// dlib calls solvers after the whole backward pass, so the exchange does not overlap with it: the time of
/// all layers' all-reduces is added to each step. The trainer calls solvers in a thread of its own. MPI must
/// support this (thread_level::serialized), and no other thread may use the communicator until the program
/// has waited for the trainer (get_net). With another number of images on some rank the mean is that of the
/// ranks' gradients, not of all images. A trainer makes one copy of the solver per layer; all copies use one
/// communicator, and all ranks must step the same layers in the same order.
template <class Solver, class Comm>
class distributed_solver {
 public:
  /// Has no communicator: dlib makes such solvers to read them from a file. Its call throws state_error, so
  /// that a trainer that was read from a file (set_synchronization_file) does not silently train alone.
  distributed_solver() = default;
  /// `comm` must outlive all copies.
  distributed_solver(const Solver& solver, Comm& comm) : solver_(solver), comm_(&comm) {
    detail::check_communicator<Comm>();
  }

  /// Averages a layer's gradient over all ranks and returns the wrapped solver's step of the parameters for
  /// this mean. Collective. With one rank the gradient is used unchanged. Throws state_error without a
  /// communicator; at the first call also, on all ranks, if the layer's parameters differ between ranks; and
  /// the errors of the communicator. The result refers to memory of the wrapped solver.
  template <class Layer>
  const ::dlib::tensor& operator()(float learning_rate, const Layer& layer, const ::dlib::tensor& gradient) {
    if (comm_ == nullptr) {
      PUFFERFISH_THROW(
          state_error("distributed_solver: it has no communicator: made without one or read from a file"));
    }
    if (comm_->size() == 1) return solver_(learning_rate, layer, gradient);
    if (!compared_) compare(layer.get_layer_params());
    mean_.copy_size(gradient);
    std::copy_n(gradient.host(), gradient.size(), mean_.host());
    mean(*comm_, std::span<float>(mean_.host(), mean_.size()));
    return solver_(learning_rate, layer, static_cast<const ::dlib::tensor&>(mean_));
  }

  /// The wrapped solver.
  const Solver& solver() const { return solver_; }

  /// A file holds the solver without the communicator.
  friend void serialize(const distributed_solver& item, std::ostream& out) {
    using ::dlib::serialize;
    serialize(item.solver_, out);
  }
  friend void deserialize(distributed_solver& item, std::istream& in) {
    using ::dlib::deserialize;
    deserialize(item.solver_, in);
  }
  friend std::ostream& operator<<(std::ostream& out, const distributed_solver& item) {
    return out << item.solver_;
  }

 private:
  // Compares the digests of the layer's parameters over the ranks, once for each copy of the solver.
  // Collective.
  void compare(const ::dlib::tensor& parameters) {
    const std::span<const float> values(parameters.host(), parameters.size());
    agree(*comm_, detail::message({"dlib layer of ", values.size(), " parameters"}),
          hasher().values(values).digest());
    compared_ = true;
  }

  Solver solver_;
  Comm* comm_ = nullptr;
  ::dlib::resizable_tensor mean_;
  bool compared_ = false;
};

PUFFERFISH_NAMESPACE_END
