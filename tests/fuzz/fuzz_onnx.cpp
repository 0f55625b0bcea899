// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
/// \file
/// libFuzzer harness of ONNX models: parsing, checking, finding weights, reading their elements and replacing
/// them by factors of rank 1. Each step may succeed or throw an error of the library. A model that ONNX's
/// checker accepts must be accepted again after the replacement.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include <pufferfish/adapters/onnx/external_data.hpp>
#include <pufferfish/adapters/onnx/rewriter.hpp>

namespace {

using namespace pufferfish;

void require(bool condition) {
  if (!condition) std::abort();
}

/// Factors of zeros for a weight that may be factorized.
void replace(detail::onnx_rewriter& rewriter, const detail::onnx_weight& weight) {
  const std::size_t size = size_of(*detail::floating_dtype(*weight.tensor));
  index_t cols = 1;
  for (std::size_t d = 1; d < weight.shape.size(); ++d) cols *= weight.shape[d];
  const index_t rows = weight.shape[0];
  detail::onnx_factor down{weight.groups, cols,
                           std::vector<std::uint8_t>(static_cast<std::size_t>(weight.groups * cols) * size)};
  detail::onnx_factor up{rows, 1, std::vector<std::uint8_t>(static_cast<std::size_t>(rows) * size)};
  rewriter.replace(weight, down, up);
}

void run(std::span<const std::uint8_t> bytes) {
  onnx::ModelProto model = detail::parse_onnx(bytes, "fuzz");
  detail::check_onnx_order(model.graph(), "fuzz");
  detail::external_places(model, "fuzz");
  const bool checked = detail::check_onnx(model, "fuzz");
  const detail::constant_map constants = detail::constants_of(model.graph());
  for (const auto& [name, tensor] : constants) {
    if (const auto dtype = detail::floating_dtype(*tensor)) detail::elements_of(*tensor, *dtype, "fuzz");
  }
  const std::vector<detail::onnx_weight> weights = detail::weight_finder(model, constants)();
  detail::onnx_rewriter rewriter(model);
  for (const detail::onnx_weight& one : weights) {
    // Empty matrices have no factors, and their other extent may be huge.
    const bool empty = one.tensor->dims_size() > 0 &&
                       std::count(one.tensor->dims().begin(), one.tensor->dims().end(), 0) > 0;
    if (one.reason.empty() && one.groups <= 64 && !empty) replace(rewriter, one);
  }
  rewriter();
  if (checked) require(detail::check_onnx(model, "fuzz"));
  detail::parse_onnx(detail::onnx_bytes(model, "fuzz"), "fuzz");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    run({data, size});
  } catch (const error&) {
  }
  return 0;
}
