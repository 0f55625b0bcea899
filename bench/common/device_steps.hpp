// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Training steps on a device, by name, for bench_gpu_step. device_images.cpp has the networks over images,
/// device_sequences.cpp those over sequences.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>

namespace bench {

using pufferfish::index_t;

/// Choice of a step.
struct device_case {
  std::string network;  ///< resnet18, vgg19, resnet50, lstm, transformer
  /// "dense", or "hybrid": factorized as in the paper (for the LSTM, all layers).
  std::string mode = "dense";
  index_t batch = 0;               ///< images, sequences of 35 tokens, pairs of 30 + 30 tokens
  std::string precision = "fp32";  ///< or tf32, bf16
  bool captured = true;            ///< replayed as a CUDA graph
  bool cudnn = false;              ///< dense convolutions by cuDNN
  bool parallel = false;           ///< gpu::context_options::parallel_gradients
  bool tiny = false;               ///< a few channels and small images, to test that it works at all
};

/// Times of a single layer, forward and backward on random data.
struct layer_time {
  std::string name, kind;
  double seconds = 0;
  double flops = 0;
  double bytes = 0;  ///< that passes must read and write at least, if no cache keeps anything
};

/// A network in training on random data in the memory of the device. Optimizers and everything else in a step
/// are those of make_training_step (networks.hpp).
class device_step {
 public:
  virtual ~device_step() = default;

  /// The version of cuDNN; 0 if it is not built in: device_case::cudnn then has no effect.
  static std::size_t cudnn_version();

  /// Enqueues a step in the context's stream.
  void run() {
    ctx_.begin_step(number_++);
    prepare();
    graph_.run(ctx_, pufferfish::gpu::step_graph::key(index_t{1}), [this] { work(); });
  }
  pufferfish::gpu_context& context() { return ctx_; }
  bool captured() const { return graph_.enabled(); }
  /// Kernels, copies and fills of the captured part of a step; 0 if it is not captured.
  std::size_t operations() const { return graph_.operations(); }

  virtual index_t parameters() const = 0;
  virtual std::string items() const = 0;
  /// Multiply-accumulates of convolutions and products in a forward pass.
  virtual double macs() const = 0;
  /// Times each layer that has a weight matrix alone; `repeats` passes per measurement, median of `samples`.
  virtual std::vector<layer_time> layers(int repeats, int samples) = 0;

 protected:
  explicit device_step(const device_case& which) : ctx_(options(which)) {
    graph_.set_enabled(which.captured);
    ctx_.set_mode(pufferfish::run_mode::training);
  }
  /// The part of a step that comes first and is not captured.
  virtual void prepare() = 0;
  virtual void work() = 0;

  pufferfish::gpu_context ctx_;
  pufferfish::gpu::step_graph graph_;

 private:
  static pufferfish::gpu::context_options options(const device_case& which) {
    using pufferfish::gpu::math_mode;
    // As PyTorch, which is not asked for reproducible bits either.
    return {.seed = 1,
            .math = which.precision == "tf32" ? math_mode::tf32 : math_mode::fp32,
            .deterministic = false,
            .parallel_gradients = which.parallel};
  }

  std::uint64_t number_ = 0;
};

/// cuDNN for a context, or nullptr if it is not built in (device_step::cudnn_version).
std::unique_ptr<pufferfish::gpu::conv_library> make_cudnn(const pufferfish::gpu_context& ctx);

/// Return nullptr for networks of the other file.
std::unique_ptr<device_step> make_device_image_step(const device_case& which);
std::unique_ptr<device_step> make_device_sequence_step(const device_case& which);

/// Throws std::runtime_error for unknown names.
inline std::unique_ptr<device_step> make_device_step(const device_case& which) {
  if (which.mode != "dense" && which.mode != "hybrid") {
    throw std::runtime_error("no mode is called " + which.mode);
  }
  if (which.precision != "fp32" && which.precision != "tf32" && which.precision != "bf16") {
    throw std::runtime_error("nothing is measured in " + which.precision);
  }
  if (auto step = make_device_image_step(which)) return step;
  if (auto step = make_device_sequence_step(which)) return step;
  throw std::runtime_error("no network is called " + which.network);
}

/// Normal random numbers in device memory: the same 2^20 numbers, repeated.
template <class T>
void fill_device(std::span<T> values, std::uint64_t stream) {
  std::vector<float> some(std::min<std::size_t>(values.size(), std::size_t{1} << 20));
  pufferfish::fill_normal(std::span<float>(some), 1.0, pufferfish::random_stream(5, stream));
  std::vector<T> rounded;
  for (const float value : some) rounded.push_back(static_cast<T>(value));
  while (!values.empty()) {
    const std::size_t part = std::min(values.size(), rounded.size());
    pufferfish::gpu::device_memory().from_host(values.data(), rounded.data(), part * sizeof(T));
    values = values.subspan(part);
  }
}

}  // namespace bench
