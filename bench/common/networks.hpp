// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The networks that are measured, by name: the convolutions in them, and whole training steps, inference.
/// Those over images are in networks.cpp, those over sequences in sequences.cpp.

#include <memory>
#include <string>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/nn/parameter_store.hpp>

#include "roofline.hpp"

namespace bench {

/// All of them, and those over images: the ones with convolutions.
std::vector<std::string> network_names();
std::vector<std::string> image_network_names();

/// What a step of the paper's training works on.
index_t default_batch(const std::string& network);

/// The forms of a network that are measured unless others are asked for, dense first.
std::vector<std::string> default_modes(const std::string& network);

/// One convolution of a network; layers of one shape are one entry.
struct conv_layer {
  std::string name;  ///< of the first layer of this shape
  conv_shape shape;
  extents<4> input;    ///< NHWC, N = 1
  int count = 0;       ///< layers of this shape
  int factorized = 0;  ///< of them, how many the paper factorizes

  /// A quarter of a group's full rank.
  index_t rank() const { return std::max<index_t>(1, std::min(shape.group_outputs(), shape.patch()) / 4); }
};

/// The different convolutions of a network, in the order in which they run first.
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
  /// Tokens of all sequences of a step, source and target; 0 for images.
  virtual index_t tokens() const = 0;
  /// The sum of the least times of its convolutions, three passes each (two for the first layer); over
  /// sequences, three passes of all products. What else a step does counts as nothing.
  virtual double least_seconds(double peak, const bandwidth& b) const = 0;
  /// Bytes that tape and scratch hold, and how often they asked the system for them.
  virtual std::size_t working_bytes() const = 0;
  virtual std::size_t working_allocations() const = 0;
};

/// A training step over images, part by part, for whoever puts a gradient exchange in between.
class image_training_step : public training_step {
 public:
  virtual pufferfish::cpu_context& context() = 0;
  virtual pufferfish::parameter_store<float>& store() = 0;
  virtual void forward() = 0;  ///< and the loss
  virtual void backward() = 0;
  /// The optimizer's step, in ranges of whole parameters; each is to be in one.
  virtual void begin_update() = 0;
  virtual void update(index_t offset, index_t size) = 0;
  void run() final {
    forward();
    backward();
    begin_update();
    update(0, static_cast<index_t>(store().gradients().size()));
  }
};

/// mode: "dense"; "hybrid": factorize() with the paper's choice of layers; "lowrank", over sequences: with
/// all layers but embedding and output (for the LSTM that is the paper's choice); "hybrid_recompute", over
/// images: hybrid with the activations between factors computed again in the backward pass instead of kept;
/// "dense_direct", "hybrid_direct", over images: without Winograd.
/// batch: images, sequences of 35 tokens (lstm), pairs of 30 + 30 tokens (transformer). Throws
/// std::runtime_error for names that are none.
std::unique_ptr<training_step> make_training_step(const std::string& network, const std::string& mode,
                                                  index_t batch, int threads);

/// The same for networks over images.
std::unique_ptr<image_training_step> make_image_step(const std::string& network, const std::string& mode,
                                                     index_t batch, int threads);

/// The same for the networks of sequences.cpp; nullptr if it has none of that name.
std::unique_ptr<training_step> make_sequence_step(const std::string& network, const std::string& mode,
                                                  index_t batch, int threads);

/// A network over images in inference: one call is one forward pass over random data.
class inference {
 public:
  virtual ~inference() = default;
  virtual void run() = 0;
  virtual index_t parameters() const = 0;
  /// The sum of the least times of its convolutions.
  virtual double least_seconds(double peak, const bandwidth& b) const = 0;
};

/// mode: "dense" or "hybrid". folded: without batch norms, which the layers before them have taken over.
std::unique_ptr<inference> make_inference(const std::string& network, const std::string& mode, bool folded,
                                          index_t batch, int threads);

/// Seconds that factorize() takes to turn the network from dense to hybrid: decompositions and new arenas.
double switch_seconds(const std::string& network, int threads);

}  // namespace bench
