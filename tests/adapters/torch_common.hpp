// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// doctest beside libtorch, and helpers of the tests of the libtorch adapter.

#include <string>

#include <pufferfish/adapters/torch/tensor.hpp>
#include <pufferfish/nn/factorize.hpp>

// libtorch's headers bring glog's macros, which end the program.
#undef CHECK
#undef CHECK_EQ
#undef CHECK_NE
#undef CHECK_LE
#undef CHECK_LT
#undef CHECK_GE
#undef CHECK_GT
#include <doctest/doctest.h>

namespace pf = pufferfish;
namespace ht = pufferfish::host_torch;
using torch::Tensor;

/// Largest difference over largest element; 0 for two empty tensors.
inline double difference(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined() ? 0.0 : 1e9;
  if (a.sizes() != b.sizes()) return 1e9;
  if (a.numel() == 0) return 0.0;
  const double scale = b.abs().max().item().toDouble();
  return (a - b).abs().max().item().toDouble() / (scale > 0.0 ? scale : 1.0);
}

/// Factorizes all layers, whatever their place.
inline pf::factorize_policy everything(const pf::rank_policy& rank) {
  pf::factorize_policy policy;
  policy.rank = rank;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  return policy;
}

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const pf::error& e) {
    return e.what();
  }
  return "nothing thrown";
}
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
