// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// ONNX models of networks against ONNX Runtime, which Python runs (onnx_run.py).

#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/adapters/onnx.hpp>
#include <pufferfish/io/safetensors.hpp>

#include "scratch_folder.hpp"

namespace test {

using namespace pufferfish;

/// An entry for write_safetensors that refers to the elements of a tensor.
template <class T, std::size_t N>
tensor_entry entry_of(const std::string& name, const tensor<T, N>& values) {
  const auto flat = values.flat();
  return {name,
          dtype_of_v<T>,
          {values.shape().begin(), values.shape().end()},
          {reinterpret_cast<const std::uint8_t*>(flat.data()), flat.size_bytes()}};
}

/// Images N x H x W x C as [N][C][H][W] of float.
template <class T>
tensor<float, 4> channels_first(const tensor<T, 4>& images) {
  return tensor<float, 4>(tensor_view<const T, 4>(images).permute({0, 3, 1, 2}));
}

/// Models in a folder, with inputs and the outputs that ONNX Runtime must compute for them.
class runtime_cases {
 public:
  std::string path_of(const std::string& model) const { return folder_ / (model + ".onnx"); }
  const scratch_folder& folder() const { return folder_; }

  /// Adds a case of `model`: inputs by name, and the expected elements of each output.
  void add(const std::string& model, const std::vector<tensor_entry>& inputs,
           std::map<std::string, std::vector<double>> outputs) {
    const std::string stem = model + "." + std::to_string(cases_.size());
    write_safetensors(folder_ / (stem + ".in.safetensors"), inputs);
    cases_.push_back({stem, std::move(outputs)});
  }

  /// Adds a network and its outputs for random images, batches of 1 and of 7.
  template <class T>
  void add_network(const std::string& model, network<T>& net, const extents<3>& image) {
    write_onnx(path_of(model), net, {.image = image});
    cpu_context ctx;
    for (const index_t batch : {index_t{1}, index_t{7}}) {
      tensor<T, 4> x({batch, image[0], image[1], image[2]});
      fill_normal<T>(x.flat(), 1.0, {3, 1});
      const tensor<float, 4> y = channels_first(net.forward(ctx, x));
      const tensor<float, 4> input = channels_first(x);
      add(model, {entry_of("input", input)}, {{"output", {y.flat().begin(), y.flat().end()}}});
    }
  }

  /// Runs all cases and returns the largest difference of an output, in units of the largest output of its
  /// case (at least 1); -1 if there is no ONNX Runtime.
  double worst() const {
    const char* const source = std::getenv("PUFFERFISH_SOURCE_DIR");
    REQUIRE(source != nullptr);
    const std::string command =
        "python3 '" + std::string(source) + "/tests/unit/support/onnx_run.py' '" + folder_.path() + "'";
    const int status = std::system(command.c_str());
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
      MESSAGE("not compared with ONNX Runtime: python3 has no package onnxruntime");
      return -1.0;
    }
    REQUIRE(status == 0);
    double all = 0.0;
    for (const one& each : cases_) {
      const std::string& stem = each.stem;
      CAPTURE(stem);
      const safetensors_file got = safetensors_file::read(folder_ / (stem + ".out.safetensors"));
      double worst = 0.0, largest = 1.0;
      for (const auto& [name, wanted] : each.outputs) {
        std::vector<double> have(wanted.size());
        read_tensor_converted<double>(got, name, std::span<double>(have));
        for (std::size_t i = 0; i < wanted.size(); ++i) {
          worst = std::max(worst, std::isfinite(have[i]) ? std::abs(have[i] - wanted[i]) : 1e30);
          largest = std::max(largest, std::abs(wanted[i]));
        }
      }
      all = std::max(all, worst / largest);
    }
    MESSAGE(cases_.size() << " cases in ONNX Runtime, largest difference " << all);
    return all;
  }

 private:
  struct one {
    std::string stem;
    std::map<std::string, std::vector<double>> outputs;
  };
  scratch_folder folder_;
  std::vector<one> cases_;
};

}  // namespace test
