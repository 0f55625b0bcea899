// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The way back from factorize.hpp: a file with factors becomes one with dense weights under their old
/// names.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/weights/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A pair of factors in a file.
struct factor_pair {
  std::string name;  ///< of the weight they replace
  std::size_t down = 0, up = 0;
  std::vector<index_t> shape;
  index_t parts = 1;
  index_t rank = 0;
};

/// The weight that two tensors are the factors of, if their shapes and dtypes fit.
inline std::optional<factor_pair> paired(const std::vector<tensor_place>& tensors, std::size_t down,
                                         std::size_t up, const std::string& weight) {
  const tensor_place& d = tensors[down];
  const tensor_place& u = tensors[up];
  const std::size_t dims = d.shape.size();
  if (d.dtype != u.dtype || !is_floating(d.dtype) || u.shape.size() != dims || (dims != 2 && dims != 4)) {
    return std::nullopt;
  }
  factor_pair pair{weight, down, up, d.shape, 1, u.shape[1]};
  if (!is_weight_name(weight)) {  // the gates of a recurrent layer
    if (dims != 2 || pair.rank == 0 || d.shape[0] % pair.rank != 0) return std::nullopt;
    pair.parts = d.shape[0] / pair.rank;
    if ((pair.parts != 1 && pair.parts != 3 && pair.parts != 4) || u.shape[0] % pair.parts != 0) {
      return std::nullopt;
    }
  } else if (d.shape[0] != pair.rank) {
    return std::nullopt;
  }
  for (std::size_t k = 2; k < dims; ++k) {
    if (u.shape[k] != 1) return std::nullopt;
  }
  pair.shape[0] = u.shape[0];
  return pair;
}

/// "a.down.weight" -> "a.weight", "a.weight_ih_l0.down" -> "a.weight_ih_l0"; "" for what is no first factor.
inline std::string weight_of_down(const std::string& name) {
  if (is_weight_name(name)) {
    const std::string_view stem = stem_of(name);
    if (stem != "down" && !ends_with(stem, ".down")) return "";
    return joined(stem_of(stem), "weight");
  }
  if (!ends_with(name, ".down")) return "";
  const std::string_view weight = stem_of(name), stem = stem_of(weight);
  const std::string_view last = weight.substr(stem.empty() ? 0 : stem.size() + 1);
  return recurrent_name(last).first.empty() ? "" : std::string(weight);
}

/// All pairs of a file: those that its metadata name, or, where there is none (another program has written
/// the file since), those whose names and shapes are those of factors. Throws io_error if the metadata names
/// what is not there.
inline std::vector<factor_pair> find_pairs(const tensor_source& file) {
  const std::vector<tensor_place>& tensors = file.tensors();
  std::map<std::string, std::size_t> by_name;
  for (std::size_t i = 0; i < tensors.size(); ++i) by_name.emplace(tensors[i].name, i);
  std::vector<factor_pair> pairs;
  const auto add = [&](const std::string& weight) {
    const auto down = by_name.find(factor_name(weight, "down")), up = by_name.find(factor_name(weight, "up"));
    if (down == by_name.end() || up == by_name.end()) return false;
    std::optional<factor_pair> pair = paired(tensors, down->second, up->second, weight);
    if (pair) pairs.push_back(std::move(*pair));
    return pair.has_value();
  };
  const auto listed = file.metadata().find(std::string(low_rank_key));
  if (listed == file.metadata().end()) {
    for (const tensor_place& tensor : tensors) {
      const std::string weight = weight_of_down(tensor.name);
      if (!weight.empty()) add(weight);
    }
    return pairs;
  }
  for (const auto& [weight, rank] :
       parse_json_numbers(listed->second, file.name() + ": metadata " + listed->first)) {
    if (add(weight) && pairs.back().rank == rank) continue;
    PUFFERFISH_THROW(io_error(file.name() + ": " + quote_name(weight) + " should have factors of rank " +
                              std::to_string(rank) + ", by the file's metadata; there are none"));
  }
  return pairs;
}

template <class T>
std::vector<std::uint8_t> merge_pair(const tensor_source& file, const factor_pair& pair) {
  const tensor_place& place = file.tensors()[pair.down];
  const index_t rows = pair.shape[0] / pair.parts;
  const tensor<T, 2> down = read_matrix<T>(file, place, pair.parts * pair.rank);
  const tensor<T, 2> up = read_matrix<T>(file, file.tensors()[pair.up], pair.shape[0]);
  std::vector<std::uint8_t> bytes;
  bytes.reserve(static_cast<std::size_t>(pair.shape[0] * down.extent(1)) * size_of(place.dtype));
  for (index_t p = 0; p < pair.parts; ++p) {
    visit_product<T>(
        tensor_view<const T, 2>(up).slice(0, p * rows, rows),
        tensor_view<const T, 2>(down).slice(0, p * pair.rank, pair.rank),
        [&](index_t, const tensor<double, 2>& block) {
          append_floating<double>(place.dtype, {block.data(), static_cast<std::size_t>(block.size())}, bytes);
        });
  }
  return bytes;
}

}  // namespace detail

/// Writes to `out` the tensors of `in` with every pair of factors multiplied out, under the names that
/// factorize_weights replaced. Sums are double, the dtype is the factors'. Which pairs: those that the file's
/// metadata names; all that look like pairs where it names none. Throws io_error for files, and for metadata
/// that names what is not there; then `out` has not changed. In the report, each merged weight stands where
/// its first factor stood; its error is not known here.
inline weight_report merge_weights(const std::string& in, const std::string& out, int threads = 1,
                                   const weight_observer& observer = {}) {
  using namespace detail;
  const auto start = std::chrono::steady_clock::now();
  const std::unique_ptr<tensor_source> source = open_tensor_source(in);
  const std::vector<tensor_place>& tensors = source->tensors();
  const std::vector<factor_pair> pairs = find_pairs(*source);
  std::map<std::string, std::string> biases;  // NAME.up.bias -> NAME.bias
  std::map<std::size_t, const factor_pair*> pair_of;
  std::set<std::size_t> second;
  for (const factor_pair& pair : pairs) {
    pair_of.emplace(pair.down, &pair);
    second.insert(pair.up);
    if (!is_weight_name(pair.name)) continue;
    const std::string_view stem = stem_of(pair.name);
    biases.emplace(joined(joined(stem, "up"), "bias"), joined(stem, "bias"));
  }

  weight_report report;
  std::vector<double> cost(tensors.size(), 0.0);
  std::vector<std::size_t> row(tensors.size(), 0);
  std::size_t room = 64;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const index_t count = is_floating(tensors[i].dtype) ? tensors[i].count() : 0;
    report.parameters_before += count;
    room += safetensors_writer::room_for(tensors[i].name, tensors[i].shape.size());
    row[i] = report.tensors.size();
    if (second.count(i) > 0) continue;
    weight_result& r = report.tensors.emplace_back();
    r.name = tensors[i].name;
    r.dtype = tensors[i].dtype;
    r.shape = tensors[i].shape;
    r.parameters_before = r.parameters_after = count;
    if (const auto found = pair_of.find(i); found != pair_of.end()) {
      const factor_pair& pair = *found->second;
      r.name = pair.name;
      r.shape = pair.shape;
      r.factorized = true;
      r.rank = pair.rank;
      r.parts = pair.parts;
      r.parameters_before += tensors[pair.up].count();
      r.parameters_after = pair.rank == 0 ? 0 : pair.shape[0] * (count / tensors[i].shape[0]);
      cost[i] = static_cast<double>(pair.shape[0]) * static_cast<double>(count);
    } else if (const auto bias = biases.find(r.name); bias != biases.end()) {
      r.name = bias->second;
    }
    report.parameters_after += r.parameters_after;
  }
  for (const auto& [key, value] : source->metadata()) room += safetensors_writer::room_for(key + value, 0);
  const double all = std::max(1.0, std::accumulate(cost.begin(), cost.end(), 0.0));
  const std::vector<std::size_t> order = working_order(tensors, cost);
  const auto sink = open_tensor_sink(out, room);

  struct merged_bytes {
    std::vector<std::uint8_t> bytes;
    double seconds = 0.0;
  };
  double done = 0.0;
  const auto make = [&](index_t task) {
    merged_bytes made;
    const auto found = pair_of.find(order[static_cast<std::size_t>(task)]);
    if (found == pair_of.end()) return made;
    const auto begun = std::chrono::steady_clock::now();
    const bool wide = tensors[found->first].dtype == tensor_dtype::f64;
    made.bytes = (wide ? &merge_pair<double> : &merge_pair<float>)(*source, *found->second);
    made.seconds = seconds_since(begun);
    return made;
  };
  const auto finish = [&](index_t task, const merged_bytes& made) {
    const std::size_t i = order[static_cast<std::size_t>(task)];
    if (second.count(i) > 0) return;
    weight_result& r = report.tensors[row[i]];
    sink->begin(r.name, r.dtype, r.shape);
    if (r.factorized) {
      sink->write(made.bytes);
    } else {
      copy_tensor(*source, tensors[i], *sink);
    }
    r.seconds = made.seconds;
    done += cost[i];
    if (observer) observer(r, done / all);
  };
  run_in_order<merged_bytes>(threads, static_cast<index_t>(order.size()), make, finish);

  safetensors_metadata metadata = source->metadata();
  metadata.erase(std::string(low_rank_key));
  sink->commit(metadata);
  report.seconds = seconds_since(start);
  return report;
}

PUFFERFISH_NAMESPACE_END
