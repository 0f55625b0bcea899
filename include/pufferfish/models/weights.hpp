// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `load_weights`: reads a model's parameters and buffers by name from a safetensors file of another program.
/// Checkpoints of this library hold more (the ranks, the optimizer's state): see train/checkpoint.hpp.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/io/safetensors.hpp>
#include <pufferfish/lowrank/selection.hpp>
#include <pufferfish/models/file_names.hpp>
#include <pufferfish/nn/model.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Reads a tensor of `count` elements, converted to T, in the file's order. I64 is allowed, for PyTorch's
/// batch counters.
template <class T>
aligned_buffer<T> converted_tensor(const safetensors_file& file, const std::string& name, index_t count) {
  aligned_buffer<T> values(count);
  if (file.tensor(name).dtype == tensor_dtype::i64) {
    aligned_buffer<std::int64_t> integers(count);
    read_tensor<std::int64_t>(file, name, integers.span());
    std::transform(integers.data(), integers.data() + count, values.data(),
                   [](std::int64_t i) { return static_cast<T>(i); });
  } else {
    read_tensor_converted<T>(file, name, values.span());
  }
  return values;
}

/// Returns NAME for a name NAME.`ending`, "" for `ending` itself, and nullopt for any other name.
inline std::optional<std::string> stem_before(const std::string& name, std::string_view ending) {
  if (name == ending) return "";
  const std::string dotted = "." + std::string(ending);
  if (name.size() == dotted.size() || !name.ends_with(dotted)) return std::nullopt;
  return name.substr(0, name.size() - dotted.size());
}

/// Throws io_error unless tensor `name` has this shape and a dtype that converted_tensor supports.
inline void check_convertible(const safetensors_file& file, const std::string& name,
                              const std::vector<index_t>& shape, index_t count) {
  const tensor_info& info = file.tensor(name);
  // A counter may be a scalar or a vector of one.
  if (info.shape != shape && !(count == 1 && info.count() == 1)) {
    const bool factor = stem_before(name, "down.weight") || stem_before(name, "up.weight") ||
                        stem_before(name, "down") || stem_before(name, "up");
    throw_error<io_error>({file.name(), ": tensor ", quote_name(name), " has shape ", shape_text(info.shape),
                           ", the model's has ", shape_text(shape),
                           factor ? "; the ranks of file and model must be the same: see apply_ranks" : ""});
  }
  if (!is_floating(info.dtype) && info.dtype != tensor_dtype::i64) {
    throw_error<io_error>({file.name(), ": tensor ", quote_name(name), " has dtype ", to_string(info.dtype),
                           ", not F32, F64, F16, BF16 or I64"});
  }
}

/// Advice for the end of an error if names differ because a layer is low-rank in the file and dense in the
/// model, or the other way round; otherwise an empty text. Both lists must be sorted. At most ten layers are
/// listed.
inline std::string factor_advice(const safetensors_file& file, const std::vector<std::string>& missing,
                                 const std::vector<std::string>& unexpected) {
  const auto in = [](const std::vector<std::string>& names, const std::string& name) {
    return std::binary_search(names.begin(), names.end(), name);
  };
  const auto joined_name = [](const std::string& stem, const char* last) {
    return stem.empty() ? last : stem + "." + last;
  };
  std::string factorized, dense;
  int listed = 0;
  for (const std::string& name : unexpected) {
    std::optional<std::string> stem =
        stem_before(name, "down.weight");  // layers; factors of an LSTM weight W are W.down and W.up
    const bool whole = stem.has_value();
    if (!whole) stem = stem_before(name, "down");
    const std::string up = stem ? joined_name(*stem, whole ? "up.weight" : "up") : "";
    if (stem && in(missing, whole ? joined_name(*stem, "weight") : *stem) && in(unexpected, up)) {
      const std::vector<index_t>& shape = file.tensor(up).shape;
      if (++listed > 10) continue;
      factorized += (factorized.empty() ? "" : ", ") + quote_name(*stem) + " of rank " +
                    std::to_string(shape.size() < 2 ? 0 : shape[1]);
    }
    stem = stem_before(name, "weight");
    if (stem && dense.empty() && in(missing, joined_name(*stem, "down.weight"))) dense = quote_name(*stem);
    if (dense.empty() && in(missing, name + ".down")) dense = quote_name(name);
  }
  if (listed > 10) factorized += " and " + std::to_string(listed - 10) + " more";
  if (!factorized.empty()) {
    factorized = "; the file has low-rank factors where the model is dense (" + factorized +
                 "): call apply_ranks(net, ranks) with these ranks before load_weights";
  }
  if (!dense.empty()) {
    dense =
        "; the model is low-rank where the file is dense (" + dense +
        "): load the file into the dense model and factorize that, or factorize the file (factorize_weights)";
  }
  return factorized + dense;
}

}  // namespace detail

/// Returns the layers that are low-rank in a file, i.e. that have NAME.down.weight and NAME.up.weight,
/// with their ranks, for apply_ranks. Finds linear layers, convolutions and embeddings, not LSTMs.
/// The rank of a layer is the second extent of NAME.up.weight; 0 if that tensor has fewer than two
/// dimensions, which apply_ranks refuses. Layers are in the order of the file's names.
inline std::vector<layer_rank> factor_ranks(const safetensors_file& file) {
  std::vector<layer_rank> ranks;
  for (const std::string& name : file.tensor_names()) {
    const std::optional<std::string> layer = detail::stem_before(name, "up.weight");
    if (!layer || layer->empty() || !file.contains(*layer + ".down.weight")) continue;
    const std::vector<index_t>& shape = file.tensor(name).shape;
    ranks.push_back({*layer, shape.size() < 2 ? 0 : shape[1]});
  }
  return ranks;
}

/// Fills a model from the tensors with the names of its parameters and buffers: weights as
/// [out][in] or [out][in][height][width]; F32, F64, F16 or BF16, converted to the scalar of the
/// model's parameters (scalar_cast); I64 for counters. The names are PyTorch's (docs/models.md).
/// The factors of a low-rank layer are NAME.down.weight and NAME.up.weight, and the model must be
/// low-rank there already (apply_ranks). The model may be on a device.
///
/// Throws io_error, listing names, if the file lacks a tensor (except for batch norms' num_batches_tracked,
/// which old files lack) or has one that the model lacks, and for other shapes or dtypes; the model is then
/// unchanged. If only the structure differs, the error names the layers, their ranks and apply_ranks.
///
/// Tensors are read one after the other, so that the file and one converted tensor are in memory besides the
/// model.
///
/// \code
/// const safetensors_file file = safetensors_file::read("resnet18.safetensors");
/// network<float> net = resnet18<float>();
/// apply_ranks(net, factor_ranks(file));  // for files with low-rank layers
/// load_weights(net, file);
/// \endcode
///
/// The arenas stay, so that optimizers and exchanges of the model stay valid; a device's 16-bit copies are
/// updated. In a distributed run every rank loads the file, or one rank loads it and broadcasts
/// store().values() and store().buffers().
template <class Root, class Device>
void load_weights(model<Root, Device>& net, const safetensors_file& file) {
  using T = parameter_t<typename Root::value_type>;
  detail::name_difference names = detail::compare_names(
      net.store(), file,
      [&](const std::string& name) {
        return !file.contains(name) && name.find("num_batches_tracked") == std::string::npos;
      },
      [](const std::string&) { return false; });
  if (!names.empty()) {
    std::sort(names.missing.begin(), names.missing.end());
    std::sort(names.unexpected.begin(), names.unexpected.end());
    detail::throw_error<io_error>({file.name(), ": the file is of another model",
                                   detail::factor_advice(file, names.missing, names.unexpected),
                                   names.text("model")});
  }
  detail::for_each_entry(net.store(), [&](const auto& entry) {
    if (!file.contains(entry.name)) return;
    detail::check_convertible(file, entry.name, detail::shape_of(entry.thing->layout()), entry.thing->size());
  });

  net.on_host([&](Root&) {
    for (const auto& entry : net.store().parameters()) {
      parameter<T>& p = *entry.thing;
      const aligned_buffer<T> values = detail::converted_tensor<T>(file, entry.name, p.size());
      copy(tensor_view<const T, 4>(values.data(), p.layout().shape), p.logical());
    }
    for (const auto& entry : net.store().buffer_entries()) {
      if (!file.contains(entry.name)) continue;
      const auto values = detail::converted_tensor<T>(file, entry.name, entry.thing->size());
      std::copy_n(values.data(), values.size(), entry.thing->data());
    }
  });
}

PUFFERFISH_NAMESPACE_END
