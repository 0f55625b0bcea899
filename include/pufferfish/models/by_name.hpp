// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Models by name, for programs whose users choose one: the small models and those of the zoo.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/models/mlp.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/models/zoo.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A model with options derived from the extents of its images (NHWC; N is unused) and its classes.
template <class T, class Device>
struct named_model {
  std::string_view name;                                                 ///< argument of make_model
  network<T, Device> (*make)(const extents<4>& image, index_t classes);  ///< makes it, parameters zero
};

/// A small_resnet for images of these extents, with default options otherwise.
template <class T, class Device>
network<T, Device> default_small_resnet(const extents<4>& image, index_t classes) {
  return small_resnet<T, Device>({.channels_in = image[3], .classes = classes});
}

/// A small_vgg for images of these extents, with default options otherwise.
template <class T, class Device>
network<T, Device> default_small_vgg(const extents<4>& image, index_t classes) {
  return small_vgg<T, Device>({.image = {image[1], image[2]}, .channels_in = image[3], .classes = classes});
}

/// An mlp for images of these extents, with default options otherwise.
template <class T, class Device>
network<T, Device> default_mlp(const extents<4>& image, index_t classes) {
  return mlp<T, Device>({.inputs = image[1] * image[2] * image[3], .classes = classes});
}

/// The small models, sorted by name.
template <class T, class Device>
inline constexpr std::array<named_model<T, Device>, 3> named_models{{
    {"mlp", &default_mlp<T, Device>},
    {"small-resnet", &default_small_resnet<T, Device>},
    {"small-vgg", &default_small_vgg<T, Device>},
}};

}  // namespace detail

/// Sorted names of the models that adapt to any image size.
inline std::vector<std::string> small_model_names() {
  std::vector<std::string> names;
  for (const auto& model : detail::named_models<float, device::cpu>) names.emplace_back(model.name);
  return names;
}

/// All names that make_model accepts, sorted.
inline std::vector<std::string> model_names() {
  std::vector<std::string> names = small_model_names();
  for (const auto& model : zoo<float>()) names.emplace_back(model.name);
  std::sort(names.begin(), names.end());
  return names;
}

namespace detail {

/// Makes the network called `name`, with all parameters zero. Throws value_error, listing all names.
template <class T, class Device>
network<T, Device> dense_model(std::string_view name, const extents<4>& image, index_t classes) {
  for (const named_model<T, Device>& model : named_models<T, Device>) {
    if (model.name == name) return model.make(image, classes);
  }
  for (const zoo_model<T, Device>& model : zoo<T, Device>()) {
    if (model.name == name) return model.dense(image[3], classes);
  }
  std::string known;
  for (const std::string& other : model_names()) known += (known.empty() ? "" : ", ") + other;
  throw_error<value_error>({"no model is called ", std::string(name), "; there are ", known});
}

}  // namespace detail

/// Makes a dense network by name, with parameters initialized from `seed`. `image`: NHWC extents of
/// its inputs (N does not matter). Throws value_error, listing all names, for an unknown name;
/// value_error or shape_error if the model does not support such images.
///
/// The small models take their options' defaults except for the image and the classes. The models of the zoo
/// take channels and classes; their image sizes are those of zoo_model::image, or any that the strides allow.
///
/// \code
/// network<float> net = make_model<float>("small-resnet", {1, 28, 28, 1}, 10, 1);
/// for (const std::string& name : model_names()) std::puts(name.c_str());
/// \endcode
template <class T, class Device = device::cpu>
network<T, Device> make_model(std::string_view name, const extents<4>& image, index_t classes,
                              std::uint64_t seed) {
  network<T, Device> net = detail::dense_model<T, Device>(name, image, classes);
  net.output_shape(image);
  net.initialize(seed);
  return net;
}

PUFFERFISH_NAMESPACE_END
