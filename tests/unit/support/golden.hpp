// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What PyTorch computed (tests/golden/make.py, which says what is in the files), and how to compare with it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/io/safetensors.hpp>
#include <pufferfish/nn/model.hpp>

namespace golden {

using namespace pufferfish;

/// How far a tensor may be from PyTorch's in double, relative to its norm.
template <class T>
inline constexpr double tolerance = sizeof(T) == 4 ? 1e-4 : 1e-9;
/// The same after some steps of training.
template <class T>
inline constexpr double tolerance_after = sizeof(T) == 4 ? 1e-3 : 1e-8;

/// The numbers of cases.py's `hashed`: in [-1, 1), 24 bits.
class hashed {
 public:
  explicit hashed(std::string_view name) {
    for (const char c : name) seed_ = (seed_ ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  }
  double operator[](std::uint64_t i) const {
    std::uint64_t z = seed_ + i * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z = z ^ (z >> 31);
    return static_cast<double>(z >> 40) / 8388608.0 - 1.0;
  }

 private:
  std::uint64_t seed_ = 0xCBF29CE484222325ULL;
};

/// Calls f(element, i) for the elements as PyTorch counts them: row by row of the view.
template <class T, class F>
void for_each_element(const tensor_view<T, 4>& view, F&& f) {
  std::uint64_t i = 0;
  for (index_t a = 0; a < view.extent(0); ++a) {
    for (index_t b = 0; b < view.extent(1); ++b) {
      for (index_t c = 0; c < view.extent(2); ++c) {
        for (index_t d = 0; d < view.extent(3); ++d) f(view(a, b, c, d), i++);
      }
    }
  }
}

template <class T>
void fill_hashed(const std::string& name, const tensor_view<T, 4>& view) {
  const hashed numbers(name);
  for_each_element(view, [&](T& element, std::uint64_t i) { element = static_cast<T>(numbers[i]); });
}

/// A parameter's value: cases.py's `initial_value`. `batch_norm`: it belongs to one.
template <class T>
void set_value(const std::string& name, parameter<T>& p, bool batch_norm) {
  const hashed numbers(name);
  const bool is_scale = name.size() >= 6 && name.compare(name.size() - 6, 6, "weight") == 0;
  const double fan_in = static_cast<double>(p.size() / std::max<index_t>(1, p.layout().shape[0]));
  const double centre = is_scale ? 1.0 : batch_norm ? 2.0 : 0.0;
  for_each_element(p.logical(), [&](T& element, std::uint64_t i) {
    const double u = numbers[i];
    element = static_cast<T>(p.layout().dims > 1                ? u * std::sqrt(3.0 / fan_in)
                             : p.role() == parameter_role::norm ? 0.25 * u + centre
                                                                : 0.125 * u);
  });
}

template <class Root, class Device>
void set_values(model<Root, Device>& net) {
  const auto layer_of = [](const std::string& name) {
    const std::size_t dot = name.rfind('.');
    return dot == std::string::npos ? "" : name.substr(0, dot);
  };
  std::vector<std::string> batch_norms;
  for (const auto& entry : net.store().buffer_entries()) batch_norms.push_back(layer_of(entry.name));
  for (const auto& entry : net.store().parameters()) {
    const bool found =
        std::find(batch_norms.begin(), batch_norms.end(), layer_of(entry.name)) != batch_norms.end();
    set_value(entry.name, *entry.thing, found);
  }
}

/// NCHW images as the NHWC that we want.
template <class T>
tensor<T, 4> hashed_images(const std::string& name, const extents<4>& nhwc) {
  tensor<T, 4> x(nhwc);
  fill_hashed(name, x.view().permute({0, 3, 1, 2}));
  return x;
}

/// One case of make.py. `used`: the tensors that were compared, so that none is forgotten.
class results {
 public:
  explicit results(const std::string& name)
      : file_(safetensors_file::read(folder() + "/tests/golden/" + name + ".safetensors")) {}

  const safetensors_file& file() const { return file_; }

  std::vector<double> values(const std::string& tensor) {
    used_.push_back(tensor);
    const tensor_info& info = file_.tensor(tensor);
    std::vector<double> result(static_cast<std::size_t>(info.count()));
    if (info.dtype == tensor_dtype::i64) {
      std::vector<std::int64_t> integers(result.size());
      read_tensor<std::int64_t>(file_, tensor, integers);
      result.assign(integers.begin(), integers.end());
    } else {
      read_tensor_converted<double>(file_, tensor, result);
    }
    return result;
  }

  /// ||ours - theirs|| / ||theirs|| over the elements that the file has, and the error of the norm where it
  /// has not all; infinite if the shapes differ. Where theirs are zeros, ||ours|| / `scale`.
  template <class T>
  double error_of(const std::string& tensor, const tensor_view<T, 4>& ours, double scale = 1.0) {
    const std::vector<double> theirs = values(tensor);
    std::vector<double> all;
    for_each_element(ours,
                     [&](const T& element, std::uint64_t) { all.push_back(static_cast<double>(element)); });
    const bool samples = file_.contains("norm." + tensor);
    if (samples ? all.size() <= theirs.size() : all.size() != theirs.size()) return HUGE_VAL;
    double difference = 0.0, norm = 0.0, our_norm = 0.0;
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      const double a = all[i * all.size() / theirs.size()], b = theirs[i];
      difference += (a - b) * (a - b);
      norm += b * b;
    }
    for (const double a : all) our_norm += a * a;
    if (!(norm > 0.0)) return std::sqrt(our_norm) / scale;
    const double error = std::sqrt(difference / norm);
    if (!samples) return error;
    const double their_norm = values("norm." + tensor)[0];
    return std::max(error, std::abs(std::sqrt(our_norm) - their_norm) / their_norm);
  }
  template <class T>
  double error_of(const std::string& tensor, std::span<const T> ours) {
    return error_of(tensor,
                    tensor_view<const T, 4>(ours.data(), {1, 1, 1, static_cast<index_t>(ours.size())}));
  }
  double error_of(const std::string& tensor, double ours) {
    return error_of(tensor, std::span<const double>(&ours, 1));
  }

  /// Gradients of all parameters of a model and its buffers, against "gradient.NAME" and "buffer.NAME".
  template <class Root, class Device>
  void check_state(model<Root, Device>& net) {
    using T = typename Root::value_type;
    double scale = 0.0;
    for (const T g : net.store().gradients()) scale += static_cast<double>(g) * static_cast<double>(g);
    for (const auto& entry : net.store().parameters()) {
      CAPTURE(entry.name);
      CHECK(error_of("gradient." + entry.name, entry.thing->logical_gradient(), std::sqrt(scale)) <
            tolerance<T>);
    }
    for (const auto& entry : net.store().buffer_entries()) {
      CAPTURE(entry.name);
      CHECK(error_of("buffer." + entry.name, std::span<const T>(entry.thing->values())) < tolerance<T>);
    }
  }

  /// All that the file holds has been compared: it has no parameter that the model lacks.
  void check_all_used() const {
    std::vector<std::string> left = file_.tensor_names();
    for (const std::string& name : used_) std::erase(left, name);
    CHECK(left == std::vector<std::string>());
  }

 private:
  static std::string folder() {
    const char* const root = std::getenv("PUFFERFISH_SOURCE_DIR");
    return root != nullptr ? root : ".";
  }

  safetensors_file file_;
  std::vector<std::string> used_;
};

}  // namespace golden
