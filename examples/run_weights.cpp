// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Runs a model of the zoo with the weights of a file, dense or factorized (factorize_weights), on arrays:
//   run_weights --model resnet50 small.safetensors images.safetensors logits.safetensors
// images.safetensors has `images` [N][H][W][C] in a floating-point type; logits.safetensors gets `logits`.

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <pufferfish/io/safetensors.hpp>
#include <pufferfish/models/weights.hpp>
#include <pufferfish/models/zoo.hpp>
#include <pufferfish/nn/factorize.hpp>

#include "common/session.hpp"

namespace {

using namespace pufferfish;

struct options {
  std::string model = "resnet50", weights, in, out;
  int threads = 0;
};

void run_weights(const options& o) {
  for (const std::string& input : {o.weights, o.in}) {
    std::error_code missing;
    if (std::filesystem::equivalent(o.out, input, missing)) {
      throw io_error(o.out + ": is an input, too; the logits need a file of their own");
    }
  }
  const auto& model = zoo_model_called<float>(o.model);
  network<float> net = model.make(factor_mode::dense);
  {
    const safetensors_file file = safetensors_file::read(o.weights);
    apply_ranks(net, factor_ranks(file));
    load_weights(net, file);
  }
  const safetensors_file arrays = safetensors_file::read(o.in);
  const std::vector<index_t>& shape = arrays.tensor("images").shape;
  if (shape.size() != 4) {
    throw io_error(o.in + ": images have " + std::to_string(shape.size()) + " dimensions, not [N][H][W][C]");
  }
  tensor<float, 4> images({shape[0], shape[1], shape[2], shape[3]});
  read_tensor_converted<float>(arrays, "images", images.flat());
  context_options machine;
  machine.threads = examples::threads_for(o.threads, 1);
  cpu_context ctx(machine);
  const tensor<float, 4> logits = std::as_const(net).forward(ctx, images.view());
  const std::vector<tensor_entry> results{
      make_tensor_entry("logits", {shape[0], logits.size() / std::max<index_t>(1, shape[0])}, logits.flat())};
  write_safetensors(o.out, results);
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Runs a model of the zoo with the weights of a file", "run_weights");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", o.model, "A convolutional model of the zoo");
  app.add_option("weights", o.weights, "Safetensors, dense or from factorize_weights")->required();
  app.add_option("input", o.in, "Safetensors with `images`")->required();
  app.add_option("output", o.out, "Safetensors; gets `logits`")->required();
  app.add_option("--threads", o.threads, "Threads; 0: all cores")->check(CLI::Range(0, 4096));
  return examples::run_on_first(app, argc, argv, [&o] { run_weights(o); });
}
