// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `read_statistics` and `write_statistics`: statistics of the inputs, outputs and gradients of a network's
/// weights, in a safetensors file of their own, so that a program in any language can measure them.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/io/safetensors.hpp>
#include <pufferfish/lowrank/statistics/network_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Shape of the tensor WEIGHT.part for a weight [outputs][inputs]; empty if there is no such part.
/// read_statistics lists the parts.
inline std::vector<index_t> statistics_shape(std::string_view part, index_t outputs, index_t inputs) {
  if (part == "counts") return {output_statistics::count_size};
  if (part == "input_moment") return {inputs, inputs};
  if (part == "input_sum" || part == "token_counts") return {inputs};
  if (part == "output_moment" || part == "gradient_moment" || part == "tied_moment") {
    return {outputs, outputs};
  }
  if (part == "output_sum" || part == "gradient_squares" || part == "output_scale") return {outputs};
  if (part == "normalized") return {1};
  return {};
}

/// Reads one tensor of statistics as double. Throws io_error, naming it, unless it exists and has shape
/// `shape` and finite elements.
inline std::vector<double> read_statistic(const safetensors_file& file, const std::string& name,
                                          const std::vector<index_t>& shape) {
  const tensor_info& info = file.tensor(name);
  if (info.shape != shape) {
    throw_error<io_error>({file.name(), ": tensor ", quote_name(name), " has shape ", shape_text(info.shape),
                           "; wanted is ", shape_text(shape)});
  }
  std::vector<double> values(static_cast<std::size_t>(info.count()));
  read_tensor_converted<double>(file, name, std::span<double>(values));
  for (const double value : values) {
    if (!std::isfinite(value)) {
      throw_error<io_error>(
          {file.name(), ": tensor ", quote_name(name), " has the element ", value, ", not a finite number"});
    }
  }
  return values;
}

/// Throws io_error, naming the tensor and the element, if a count, or a diagonal element of a moment, is
/// negative. `columns` is the last extent of the part; symmetry of moments is not checked.
inline void check_statistic(const safetensors_file& file, const std::string& name, std::string_view part,
                            const std::vector<double>& values, std::size_t columns) {
  std::size_t step = 0;
  if (part == "counts" || part == "token_counts" || part == "gradient_squares") step = 1;
  if (part.size() > 7 && part.substr(part.size() - 7) == "_moment") step = columns + 1;
  for (std::size_t i = 0; step > 0 && i < values.size(); i += step) {
    if (values[i] < 0.0) {
      throw_error<io_error>({file.name(), ": tensor ", quote_name(name), ": element ", i, " is ", values[i],
                             "; numbers of rows and sums of squares are not negative"});
    }
  }
}

}  // namespace detail

/// Reads the statistics of the weights of a network from a safetensors file, each under the name of
/// its weight. For a weight WEIGHT, taken as a matrix [outputs][inputs] (a convolution [out][in kh
/// kw], an embedding [width][vocabulary]), the file has
///
///     WEIGHT.size              I64 [2]   outputs, inputs; the only mandatory tensor of the weight
///     WEIGHT.counts            [7]       rows of outputs, of inputs (or tokens), of gradients, of the tied
///                                        layer; all rows seen, all samples, all rows of the tied layer
///     WEIGHT.output_moment     [outputs][outputs]   sum of y y^T
///     WEIGHT.output_sum        [outputs]            sum of y
///     WEIGHT.input_moment      [inputs][inputs]     sum of x x^T
///     WEIGHT.input_sum         [inputs]             sum of x
///     WEIGHT.token_counts      [inputs]             number of occurrences of each token
///     WEIGHT.gradient_moment   [outputs][outputs]   sum of samples^2 dy dy^T
///     WEIGHT.gradient_squares  [outputs]            diagonal of gradient_moment
///     WEIGHT.tied_moment       [outputs][outputs]   sum of h h^T of an output layer tied to an embedding
///     WEIGHT.normalized        [1]       not 0: layer_statistics::normalized
///     WEIGHT.output_scale      [outputs] layer_statistics::output_scale
///
/// in F64, F32, F16 or BF16. output_statistics defines the sums, for a loss that is the mean over the samples
/// of a batch. Throws io_error, naming file and tensor: for a file that cannot be read; for a tensor without
/// a size, of another shape or with an unknown name; for numbers that are not finite and negative counts.
///
/// All numbers are kept as double: a moment of n inputs or outputs takes 8 n^2 bytes. Parts that are absent
/// stay empty; which truncations they allow is decided by factorize_weights. The result refers to no file.
///
/// \code
/// const network_statistics statistics = read_statistics("statistics.safetensors");
/// weight_policy policy;
/// policy.statistics = &statistics;  // must outlive the call
/// factorize_weights("model.safetensors", "small.safetensors", policy);
/// \endcode
inline network_statistics read_statistics(const std::string& path) {
  using namespace detail;
  const safetensors_file file = safetensors_file::read(path);
  std::map<std::string, layer_statistics> by_weight;
  for (const std::string& name : file.tensor_names()) {
    const std::size_t dot = name.rfind('.');
    const std::string weight = name.substr(0, dot == std::string::npos ? 0 : dot);
    const std::string_view part = std::string_view(name).substr(weight.size() + (weight.empty() ? 0 : 1));
    if (weight.empty() || !file.contains(weight + ".size")) {
      throw_error<io_error>({path, ": tensor ", quote_name(name), ": there is no ",
                             quote_name(weight + ".size"), " with the size of its weight"});
    }
    layer_statistics& layer = by_weight[weight];
    if (layer.matrices.empty()) {
      std::int64_t size[2] = {};
      read_tensor<std::int64_t>(file, weight + ".size", std::span<std::int64_t>(size));
      constexpr std::int64_t most = std::int64_t{1} << 31;
      if (size[0] < 0 || size[1] < 0 || size[0] > most || size[1] > most) {
        throw_error<io_error>(
            {path, ": ", quote_name(weight), ": a weight of size ", size[0], " x ", size[1]});
      }
      layer.name = weight;
      layer.matrices.emplace_back(size[0], size[1]);
    }
    if (part == "size") continue;
    output_statistics& one = layer.matrices.front();
    const std::vector<index_t> shape = statistics_shape(part, one.outputs(), one.inputs());
    if (shape.empty()) {
      throw_error<io_error>(
          {path, ": tensor ", quote_name(name), ": ", quote_name(std::string(part)), " is no statistic"});
    }
    std::vector<double> values = read_statistic(file, name, shape);
    check_statistic(file, name, part, values, static_cast<std::size_t>(shape.back()));
    if (part == "normalized") {
      layer.normalized = values[0] != 0.0;
    } else if (part == "output_scale") {
      layer.output_scale = std::move(values);
    } else {
      one.make(std::string(part));
      for (const output_statistics::part& each : one.parts()) {
        if (part == each.name) std::copy(values.begin(), values.end(), each.values.begin());
      }
    }
  }
  network_statistics all;
  for (auto& [weight, layer] : by_weight) {
    const std::string missing = layer.matrices.front().missing();
    if (!missing.empty()) throw_error<io_error>({path, ": ", quote_name(weight), ": ", missing});
    all.layers.push_back(std::move(layer));
  }
  return all;
}

/// Writes the file that read_statistics reads, in F64, and WEIGHT.size in I64. Parts without values are left
/// out. Each layer of `statistics` must have the name of its weight. statistics.times are not written. Throws
/// value_error for a layer whose number of matrices is not 1, and the errors of write_safetensors. The
/// argument is taken by value, because parts() is not const.
///
/// \code
/// network_statistics statistics;
/// layer_statistics& layer = statistics.layers.emplace_back(output_statistics(outputs, inputs));
/// layer.name = "fc.weight";
/// layer.matrices.front().add_outputs(y);  // y: tensor_view<const double, 2>, rows of `outputs` numbers
/// write_statistics("statistics.safetensors", statistics);
/// \endcode
inline void write_statistics(const std::string& path, network_statistics statistics) {
  std::vector<tensor_entry> entries;
  std::deque<std::vector<std::int64_t>> sizes;
  std::deque<std::vector<double>> flags;
  const auto add = [&](const std::string& name, std::vector<index_t> shape, const auto& values) {
    using value = typename std::remove_cvref_t<decltype(values)>::value_type;
    tensor_entry& entry = entries.emplace_back();
    entry.name = name;
    entry.dtype = dtype_of_v<std::remove_const_t<value>>;
    entry.shape = std::move(shape);
    entry.bytes = {reinterpret_cast<const std::uint8_t*>(values.data()), values.size() * sizeof(value)};
  };
  for (layer_statistics& layer : statistics.layers) {
    if (layer.matrices.size() != 1) {
      detail::throw_error<value_error>({path, ": ", layer.name, " has statistics of ", layer.matrices.size(),
                                        " matrices; a file has those of whole weights"});
    }
    output_statistics& one = layer.matrices.front();
    const index_t outputs = one.outputs(), inputs = one.inputs();
    add(layer.name + ".size", {2}, sizes.emplace_back(std::vector<std::int64_t>{outputs, inputs}));
    for (const output_statistics::part& part : one.parts()) {
      if (part.values.empty()) continue;
      add(layer.name + "." + part.name, detail::statistics_shape(part.name, outputs, inputs), part.values);
    }
    if (layer.normalized) add(layer.name + ".normalized", {1}, flags.emplace_back(1, 1.0));
    if (!layer.output_scale.empty()) add(layer.name + ".output_scale", {outputs}, layer.output_scale);
  }
  write_safetensors(path, entries);
}

PUFFERFISH_NAMESPACE_END
