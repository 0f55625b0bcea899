// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `merge_weights` is the inverse of factorize_weights: it writes a file of dense weights, under their old
/// names, from a file of factors.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
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

/// A pair of factors in a file, and the weight that they replace. The weight is up down, or down up^T for an
/// embedding; with parts, each part is the product of its rows of `up` and its rows of `down`.
/// `factor_shapes` defines the shapes.
struct factor_pair {
  std::string name;              ///< name of the weight that the factors replace
  std::size_t down = 0, up = 0;  ///< numbers of the two tensors in the file
  std::vector<index_t> shape;    ///< shape of that weight
  /// Number of matrices that are stacked by rows in `up`; `down` has `rank` rows for each.
  index_t parts = 1;
  index_t rank = 0;        ///< of each part
  bool embedding = false;  ///< whether the weight is down up^T
};

/// Recognizes, by their shapes, factors of matrices that are stacked by rows; nullopt for other shapes. Their
/// number is down.shape[0] / rank: 1 for a linear layer, the groups of a convolution, 1, 3 or 4 gates of a
/// recurrent layer, 3 packed projections. `down` and `up` must have the same number of extents, 2 or 4, and
/// up.shape[1] is the rank.
inline std::optional<factor_pair> stacked_pair(const tensor_place& down, const tensor_place& up,
                                               const std::string& weight) {
  const index_t rank = up.shape[1];
  if (down.shape[0] % rank != 0) return std::nullopt;
  factor_pair pair{weight, 0, 0, down.shape, down.shape[0] / rank, rank, false};
  const index_t parts = pair.parts;
  const bool one = parts == 1, three = parts == 3;
  if (is_weight_name(weight)) {
    if (!one && down.shape.size() != 4) return std::nullopt;
  } else if (down.shape.size() != 2 ||
             !(last_of(weight) == packed_projections ? three : one || three || parts == 4)) {
    return std::nullopt;
  }
  if (parts == 0 || up.shape[0] % parts != 0) return std::nullopt;
  for (std::size_t k = 2; k < up.shape.size(); ++k) {
    if (up.shape[k] != 1) return std::nullopt;
  }
  pair.shape[0] = up.shape[0];
  return pair;
}

/// Recognizes, by their shapes, factors of an embedding: `down` [vocabulary][rank] and `up` [width][rank];
/// nullopt for other shapes. Does not look for a bias: pair_of rejects pairs with one.
inline std::optional<factor_pair> embedding_pair(const tensor_place& down, const tensor_place& up,
                                                 const std::string& weight) {
  if (down.shape.size() != 2 || !is_weight_name(weight) || down.shape[1] != up.shape[1]) return std::nullopt;
  return factor_pair{weight, 0, 0, {down.shape[0], up.shape[0]}, 1, up.shape[1], true};
}

/// Whether the factors have fewer parameters than the weight; factors made by factorize_weights always do.
/// Two layers of a network that happen to be called `down` and `up` often do not.
inline bool shrinks(const factor_pair& pair) {
  index_t cols = 1;
  for (std::size_t k = 1; k < pair.shape.size(); ++k) cols *= pair.shape[k];
  return pair.rank <= largest_shrinking_rank(pair.shape[0] / pair.parts, cols);
}

/// Name of the weight to which the factor `down` of this name belongs: "a.down.weight" -> "a.weight",
/// "a.weight_ih_l0.down" -> "a.weight_ih_l0"; "" for other names.
inline std::string weight_of_down(const std::string& name) {
  if (is_weight_name(name)) {
    const std::string_view stem = stem_of(name);
    if (stem != "down" && !stem.ends_with(".down")) return "";
    return joined(stem_of(stem), "weight");
  }
  if (!name.ends_with(".down")) return "";
  const std::string_view weight = stem_of(name), last = last_of(weight);
  return last == packed_projections || !recurrent_name(last).first.empty() ? std::string(weight) : "";
}

/// Function object that finds the pairs of factors of a file. The file must outlive the object. Each call
/// reads the names, shapes and metadata again, but no elements.
class pair_finder {
 public:
  /// Lists the file's tensors by name.
  explicit pair_finder(const safetensors_reader& file) : file_(file), tensors_(file.tensors()) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) by_name_.emplace(tensors_[i].name, i);
  }

  /// Returns the pairs that the metadata list. In a file without such metadata, written by another
  /// program, a pair is recognized by its names and shapes; a convolution of more than one group or
  /// an embedding only if the factors are smaller than the weight. Throws io_error if the metadata
  /// list factors that are not in the file.
  std::vector<factor_pair> operator()() const {
    std::vector<factor_pair> pairs;
    if (!factor_lists::listed(file_.metadata())) {
      for (const tensor_place& tensor : tensors_) {
        const std::string weight = weight_of_down(tensor.name);
        std::optional<factor_pair> pair = pair_of(weight, false);
        if (!pair) pair = pair_of(weight, true);
        if (!pair) continue;
        const bool by_shape_alone = pair->embedding || (pair->parts > 1 && is_weight_name(weight));
        if (!by_shape_alone || shrinks(*pair)) pairs.push_back(std::move(*pair));
      }
      return pairs;
    }
    const factor_lists lists = factor_lists::read(file_.metadata(), file_.name());
    for (const auto& [weight, rank] : lists.ranks) {
      const bool embedding = lists.embeddings.count(weight) > 0;
      std::optional<factor_pair> pair = pair_of(weight, embedding);
      const auto parts = lists.parts.find(weight);
      if (!pair || pair->rank != rank || (parts != lists.parts.end() && parts->second != pair->parts)) {
        const std::string matrices =
            parts == lists.parts.end() ? "" : std::to_string(parts->second) + " matrices of ";
        throw_error<io_error>({file_.name(), ": ", quote_name(weight), " should have factors of ",
                               embedding ? "an embedding of " : matrices, "rank ", rank,
                               ", by the file's metadata; there are none"});
      }
      pairs.push_back(std::move(*pair));
    }
    return pairs;
  }

 private:
  /// The factors of a weight, if the file has both and their shapes and dtypes fit: two or four extents,
  /// equal floating-point dtypes, rank at least 1. A pair with the tensor NAME.up.bias is no embedding, and
  /// one with NAME.down.bias, two layers of a host, is none at all.
  std::optional<factor_pair> pair_of(const std::string& weight, bool embedding) const {
    if (weight.empty()) return std::nullopt;
    const auto down = by_name_.find(factor_name(weight, "down")),
               up = by_name_.find(factor_name(weight, "up"));
    if (down == by_name_.end() || up == by_name_.end()) return std::nullopt;
    const tensor_place &d = tensors_[down->second], &u = tensors_[up->second];
    const std::size_t dims = d.shape.size();
    if (d.dtype != u.dtype || !is_floating(d.dtype) || u.shape.size() != dims || (dims != 2 && dims != 4)) {
      return std::nullopt;
    }
    if (u.shape[1] == 0) return std::nullopt;
    if (by_name_.count(joined(joined(stem_of(weight), "down"), "bias")) > 0) return std::nullopt;
    if (embedding && by_name_.count(joined(joined(stem_of(weight), "up"), "bias")) > 0) return std::nullopt;
    std::optional<factor_pair> pair = embedding ? embedding_pair(d, u, weight) : stacked_pair(d, u, weight);
    if (!pair) return std::nullopt;
    pair->down = down->second;
    pair->up = up->second;
    return pair;
  }

  const safetensors_reader& file_;
  const std::vector<tensor_place>& tensors_;
  std::map<std::string, std::size_t> by_name_;
};

/// Number of elements of a tensor of this shape; 1 for a scalar.
inline index_t count_of(const std::vector<index_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), index_t{1}, std::multiplies<>());
}

/// Computes the elements of the merged weight, as bytes in the dtype of its factors: up down of every part,
/// one after the other, or down up^T of an embedding. T is the type to which the factors are converted; sums
/// are double.
template <class T>
std::vector<std::uint8_t> merge_pair(const safetensors_reader& file, const factor_pair& pair) {
  const tensor_place &first = file.tensors()[pair.down], &second = file.tensors()[pair.up];
  const tensor<T, 2> down = read_matrix<T>(file, first, first.shape[0]);
  const tensor<T, 2> up = read_matrix<T>(file, second, second.shape[0]);
  const tensor_view<const T, 2> d(down), u(up);
  std::vector<std::uint8_t> bytes;
  bytes.reserve(static_cast<std::size_t>(count_of(pair.shape)) * size_of(first.dtype));
  const auto append = [&](index_t, const tensor<double, 2>& block) {
    append_floating<double>(first.dtype, {block.data(), static_cast<std::size_t>(block.size())}, bytes);
  };
  if (pair.embedding) {
    visit_product<T>(d, transpose(u), append);
    return bytes;
  }
  const index_t rows = pair.shape[0] / pair.parts;
  for (index_t p = 0; p < pair.parts; ++p) {
    visit_product<T>(u.slice(0, p * rows, rows), d.slice(0, p * pair.rank, pair.rank), append);
  }
  return bytes;
}

}  // namespace detail

/// Writes the tensors of the file `in` to the file `out`, with every pair of factors replaced by their
/// product, under the name and in the shape of the weight that factorize_weights replaced. Products are
/// summed in double and stored in the dtype of the factors. The pairs are those listed in the file's
/// metadata; without such a list, a pair is recognized by its names and shapes. The report has a merged
/// weight at the position of its first factor, with no truncation error. NAME.up.bias becomes NAME.bias
/// again; the lists of factors are removed from the metadata. All other tensors are copied bit for bit.
///
/// The result has the shapes of the file before factorize_weights, but each merged weight has only the rank
/// of its factors: the part that the truncation discarded is lost. `threads` weights are multiplied at the
/// same time; the result does not depend on the number.
///
/// Throws io_error if a file cannot be read or written, if the list in the metadata is invalid or names
/// factors that are not in the file, or if a merged weight has the name of another tensor; value_error if
/// threads < 1. After an error, `out` is unchanged. `out` may be `in`. The observer is called as in
/// factorize_weights, but not for the second factor of a pair.
///
/// \code
/// const auto show = [](const weight_result& tensor, double share) {
///   std::printf("%3.0f %% %s\n", 100.0 * share, tensor.name.c_str());
/// };
/// merge_weights("small.safetensors", "dense.safetensors", 4, show);  // 4 threads
/// \endcode
inline weight_report merge_weights(const std::string& in, const std::string& out, int threads = 1,
                                   const weight_observer& observer = {}) {
  using namespace detail;
  const auto start = std::chrono::steady_clock::now();
  const safetensors_reader source(in);
  const std::vector<tensor_place>& tensors = source.tensors();
  const std::vector<factor_pair> pairs = pair_finder(source)();
  std::map<std::string, std::string> biases;  // names of biases: NAME.up.bias -> NAME.bias
  std::map<std::size_t, const factor_pair*> pair_of;
  std::set<std::size_t> second;
  for (const factor_pair& pair : pairs) {
    pair_of.emplace(pair.down, &pair);
    second.insert(pair.up);
    if (!is_weight_name(pair.name) || pair.embedding) continue;
    const std::string_view stem = stem_of(pair.name);
    biases.emplace(joined(joined(stem, "up"), "bias"), joined(stem, "bias"));
  }

  weight_report report;
  std::vector<double> cost(tensors.size(), 0.0);
  std::vector<std::size_t> row(tensors.size(), 0);
  std::size_t room = 64;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    weight_result r = copied(tensors[i]);
    report.parameters_before += r.parameters_before;
    room += safetensors_writer::room_for(tensors[i].name, tensors[i].shape.size());
    row[i] = report.tensors.size();
    if (second.count(i) > 0) continue;
    if (const auto found = pair_of.find(i); found != pair_of.end()) {
      const factor_pair& pair = *found->second;
      r.name = pair.name;
      r.shape = pair.shape;
      r.factorized = true;
      r.rank = pair.rank;
      r.parts = pair.parts;
      r.parameters_before += tensors[pair.up].count();
      r.embedding = pair.embedding;
      r.parameters_after = count_of(pair.shape);
      cost[i] = static_cast<double>(r.parameters_after) * static_cast<double>(pair.rank);
    } else if (const auto bias = biases.find(r.name); bias != biases.end()) {
      r.name = bias->second;
    }
    report.parameters_after += r.parameters_after;
    report.tensors.push_back(std::move(r));
  }
  room += room_for_metadata(source);
  work_share share(cost, observer);
  const std::vector<std::size_t> order = working_order(tensors, cost);
  safetensors_writer sink(out, room);

  struct merged_bytes {
    std::vector<std::uint8_t> bytes;
    double seconds = 0.0;
  };
  const auto make = [&](index_t task) {
    merged_bytes made;
    const auto found = pair_of.find(order[static_cast<std::size_t>(task)]);
    if (found == pair_of.end()) return made;
    const auto begun = std::chrono::steady_clock::now();
    const bool wide = tensors[found->first].dtype == tensor_dtype::f64;
    made.bytes = (wide ? &merge_pair<double> : &merge_pair<float>)(source, *found->second);
    made.seconds = seconds_since(begun);
    return made;
  };
  const auto finish = [&](index_t task, const merged_bytes& made) {
    const std::size_t i = order[static_cast<std::size_t>(task)];
    if (second.count(i) > 0) return;
    weight_result& r = report.tensors[row[i]];
    sink.begin(r.name, r.dtype, r.shape);
    if (r.factorized) {
      sink.write(made.bytes);
    } else {
      copy_tensor(source, tensors[i], sink);
    }
    r.seconds = made.seconds;
    share.done(r, cost[i]);
  };
  run_in_order<merged_bytes>(threads, static_cast<index_t>(order.size()), make, finish);

  safetensors_metadata metadata = source.metadata();
  metadata.erase("pufferfish.digest");  // of a checkpoint's tensors (train/checkpoint.hpp)
  factor_lists::erase(metadata);
  sink.commit(metadata);
  report.seconds = seconds_since(start);
  return report;
}

PUFFERFISH_NAMESPACE_END
