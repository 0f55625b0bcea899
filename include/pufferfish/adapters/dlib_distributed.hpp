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
#include <pufferfish/dist/communicator.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// One of dlib's solvers that steps by the mean of all ranks' gradients: every rank trains with images of its
/// own, as many as the others', and all networks stay the same, bit for bit. For a trainer:
///
///     dlib::dnn_trainer trainer(net, distributed_solver(dlib::sgd(), communicator));
///
/// dlib steps after the whole backward pass, so nothing overlaps: a step takes as much longer as all layers'
/// all-reduces do. The trainer calls solvers in a thread of its own: MPI must be there for it
/// (thread_level::serialized), and no one else may use the communicator until the trainer is waited for
/// (get_net).
template <class Solver, class Comm>
class distributed_solver {
 public:
  /// Without a communicator, as dlib makes solvers to read them from a file: its call throws state_error. So
  /// a trainer that has been read (set_synchronization_file) does not train alone without a word.
  distributed_solver() = default;
  /// `comm` must outlive all copies.
  distributed_solver(const Solver& solver, Comm& comm) : solver_(solver), comm_(&comm) {
    detail::check_communicator<Comm>();
  }

  /// The step of a layer's parameters, as dlib's solvers give it. Collective. Throws state_error without a
  /// communicator, and on its first call, on all ranks, if they have other parameters in this layer.
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
