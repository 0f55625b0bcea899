// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The measured networks by name: their convolutions, whole training steps, and inference. networks.cpp has
/// the networks over images, sequences.cpp those over sequences.

#include <memory>
#include <string>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/nn/parameter_store.hpp>

#include "roofline.hpp"

namespace bench {

/// All networks, and those over images, which have convolutions.
std::vector<std::string> network_names();
std::vector<std::string> image_network_names();

/// The batch of a step in the paper's training.
index_t default_batch(const std::string& network);

/// The modes of a network that are measured by default, dense first.
std::vector<std::string> default_modes(const std::string& network);

/// One convolution of a network; layers of one shape are one entry.
struct conv_layer {
  std::string name;  ///< of the first layer of this shape
  conv_shape shape;
  extents<4> input;    ///< NHWC, N = 1
  int count = 0;       ///< layers of this shape
  int factorized = 0;  ///< layers of this shape that the paper factorizes

  /// A quarter of a group's full rank.
  index_t rank() const { return std::max<index_t>(1, std::min(shape.group_outputs(), shape.patch()) / 4); }
};

/// The different convolutions of a network, in order of first execution.
std::vector<conv_layer> conv_layers(const std::string& network);

/// A network in training: one call is one whole step (forward, loss, backward, optimizer) on random data.
/// Over images: SGD with momentum 0.9 and weight decay 1e-4. `lstm`: dropout 0.65, the gradient clipped to a
/// norm of 0.25, SGD. `transformer`: dropout 0.1, label smoothing 0.1, Adam.
class training_step {
 public:
  virtual ~training_step() = default;
  virtual void run() = 0;
  virtual index_t parameters() const = 0;
  /// "128 images"
  virtual std::string items() const = 0;
  /// Tokens per step over all sequences, source and target; 0 for images.
  virtual index_t tokens() const = 0;
  /// A bound: the sum of the least times of the convolutions, three passes each (two for the first layer);
  /// for sequences, of three passes of all products. The rest of a step counts as 0.
  virtual double least_seconds(double peak, const bandwidth& b) const = 0;
  /// Bytes held by tape and scratch, and the number of their allocations from the system.
  virtual std::size_t working_bytes() const = 0;
  virtual std::size_t working_allocations() const = 0;
};

/// A training step over images in parts, so that a gradient exchange can run in between.
class image_training_step : public training_step {
 public:
  virtual pufferfish::cpu_context& context() = 0;
  virtual pufferfish::parameter_store<float>& store() = 0;
  virtual void forward() = 0;  ///< and the loss
  virtual void backward() = 0;
  /// The optimizer's step, by ranges of whole parameters; each parameter must be in exactly one range.
  virtual void begin_update() = 0;
  virtual void update(index_t offset, index_t size) = 0;
  void run() final {
    forward();
    backward();
    begin_update();
    update(0, static_cast<index_t>(store().gradients().size()));
  }
};

/// mode: "dense"; "hybrid": factorize() with the paper's choice of layers; "lowrank", for sequences: all
/// layers but embedding and output factorized (for the LSTM, this is the paper's choice);
/// "hybrid_recompute", for images: hybrid, with the activations between factors recomputed in the
/// backward pass instead of kept; "dense_direct", "hybrid_direct", for images: without Winograd. batch:
/// images, sequences of 35 tokens (lstm), pairs of 30 + 30 tokens (transformer). Throws
/// std::runtime_error for unknown names.
std::unique_ptr<training_step> make_training_step(const std::string& network, const std::string& mode,
                                                  index_t batch, int threads);

/// The same for networks over images.
std::unique_ptr<image_training_step> make_image_step(const std::string& network, const std::string& mode,
                                                     index_t batch, int threads);

/// The same for the networks of sequences.cpp; nullptr for other names.
std::unique_ptr<training_step> make_sequence_step(const std::string& network, const std::string& mode,
                                                  index_t batch, int threads);

/// A network over images in inference: one call is one forward pass over random data.
class inference {
 public:
  virtual ~inference() = default;
  virtual void run() = 0;
  virtual index_t parameters() const = 0;
  /// A bound: the sum of the least times of the convolutions.
  virtual double least_seconds(double peak, const bandwidth& b) const = 0;
};

/// mode: "dense" or "hybrid". form: "trained"; "folded": batch norms are folded into the layers before them;
/// "frozen": folded, and weights are packed once (frozen_model).
std::unique_ptr<inference> make_inference(const std::string& network, const std::string& mode,
                                          const std::string& form, index_t batch, int threads);

/// Seconds that factorize() takes to make the network hybrid: decompositions and new arenas.
double switch_seconds(const std::string& network, int threads);

}  // namespace bench
