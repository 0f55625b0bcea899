// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Convolutions over images, for tests of the device's convolutions.
#pragma once

#include <optional>

#include <pufferfish/gpu/ops/conv.hpp>

#include "support.hpp"

namespace gpu_test {

struct conv_case {
  pf::conv_shape shape;
  index_t images, height, width;
  index_t out_height, out_width;

  /// Nothing where the kernel does not fit the images.
  static std::optional<conv_case> find(const pf::conv_shape& shape, const pf::extents<3>& images) {
    const auto length = [](index_t in, index_t kernel, index_t stride, index_t padding, index_t dilation) {
      return pf::conv_shape::output_length(in, kernel, stride, padding, dilation);
    };
    const index_t out_height = length(images[1], shape.kernel.height, shape.stride.height,
                                      shape.padding.height, shape.dilation.height);
    const index_t out_width =
        length(images[2], shape.kernel.width, shape.stride.width, shape.padding.width, shape.dilation.width);
    if (out_height < 1 || out_width < 1) return std::nullopt;
    return conv_case{shape, images[0], images[1], images[2], out_height, out_width};
  }
  static conv_case of(const pf::conv_shape& shape, const pf::extents<3>& images) {
    return find(shape, images).value();
  }

  pf::extents<4> x() const { return {images, height, width, shape.in_channels}; }
  pf::extents<4> y() const { return {images, out_height, out_width, shape.out_channels}; }
  index_t x_size() const { return pf::volume<4>(x()); }
  index_t y_size() const { return pf::volume<4>(y()); }
  index_t w_size() const { return shape.patch() * shape.out_channels; }

  pf::gpu::kernels::conv_geometry geometry() const {
    return pf::gpu::detail::geometry_of("test", shape, x(), y());
  }

  twin<float> input(std::uint64_t stream) const { return random_twin<float>(x_size(), stream); }
  twin<float> output(std::uint64_t stream) const { return random_twin<float>(y_size(), stream); }
  twin<float> weight(std::uint64_t stream, index_t shift = 0) const {
    return random_twin<float>(w_size() + shift, stream);
  }

  /// A stored weight as references see it.
  template <class T>
  pf::tensor_view<T, 4> oihw(T* stored) const {
    const pf::tensor_view<T, 4> hwio(
        stored, {shape.kernel.height, shape.kernel.width, shape.group_inputs(), shape.out_channels});
    return hwio.permute({3, 2, 0, 1});
  }
};

}  // namespace gpu_test
