// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies rows of a layer on a device to the host, for a statistics_collector.

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <pufferfish/gpu/runtime/error.hpp>
#include <pufferfish/nn/measure/collect_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Copies rows from the device, after all work that has been launched. A copy is valid until the next call of
/// the same function. Must not be captured into a graph.
template <class T>
class host_rows<T, device::gpu> {
 public:
  using value_type = parameter_t<T>;

  /// Returns a dense host copy of a matrix in device memory: shape[0] rows of shape[1] contiguous elements of
  /// T, with `stride` elements from row to row. 16-bit elements are widened to float. Throws backend_error.
  tensor_view<const value_type, 2> operator()(const void* data, const extents<2>& shape, index_t stride) {
    values_.resize(static_cast<std::size_t>(shape[0] * shape[1]));
    if constexpr (std::is_same_v<T, value_type>) {
      fetch(values_.data(), data, shape, stride);
    } else {
      narrow_.resize(values_.size());
      fetch(narrow_.data(), data, shape, stride);
      for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<value_type>(narrow_[i]);
    }
    return {values_.data(), shape};
  }

  /// Returns a host copy of `count` consecutive 32-bit numbers in device memory. A call of this function does
  /// not invalidate the copy of operator(), nor the reverse. Throws backend_error.
  std::span<const std::int32_t> tokens(const void* data, index_t count) {
    tokens_.resize(static_cast<std::size_t>(count));
    fetch(tokens_.data(), data, {count, 1}, 1);
    return tokens_;
  }

 private:
  template <class U>
  static void fetch(U* to, const void* from, const extents<2>& shape, index_t stride) {
    gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (shape[0] == 0 || shape[1] == 0) return;
    const auto width = static_cast<std::size_t>(shape[1]) * sizeof(U);
    const std::size_t pitch = shape[0] == 1 ? width : static_cast<std::size_t>(stride) * sizeof(U);
    gpu::check(cudaMemcpy2D(to, width, from, pitch, width, static_cast<std::size_t>(shape[0]),
                            cudaMemcpyDeviceToHost),
               "cudaMemcpy2D");
  }

  std::vector<value_type> values_;
  std::vector<T> narrow_;
  std::vector<std::int32_t> tokens_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
