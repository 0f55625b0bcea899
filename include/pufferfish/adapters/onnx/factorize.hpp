// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `factorize_onnx` replaces the weights of an ONNX model by low-rank factors, without the network. Policies,
/// budgets, statistics and decompositions are those of factorize_weights.

#include <stdlib.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <pufferfish/adapters/onnx/external_data.hpp>
#include <pufferfish/adapters/onnx/rewriter.hpp>
#include <pufferfish/weights/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Report of factorize_onnx. `tensors` lists the constants that nodes use as weights, in the order of the
/// nodes; the sums of parameters are those of all floating-point constants of the main graph.
struct onnx_report : weight_report {
  /// Whether ONNX's checker has seen both models. false: their opset is newer than the installed library.
  bool checked = false;
};

namespace detail {

/// Makes a new folder named `near`.work-XXXXXX and removes it in the destructor. The constructor throws
/// io_error if the folder cannot be made.
class work_folder {
 public:
  explicit work_folder(const std::string& near) : path_(near + ".work-XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) throw_system_error(path_, "cannot create", errno);
  }
  work_folder(const work_folder&) = delete;
  work_folder& operator=(const work_folder&) = delete;
  ~work_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  /// Path of the file `name` in the folder.
  std::string operator/(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// Writes the weights of a model to a weight file that factorize_weights reads, in a temporary folder in that
/// of the new model, which the destructor removes. Weight i is called "<i> NAME.matrix.weight", with i of six
/// digits: the order of the names is the order of the nodes, and no name looks like an embedding's.
class onnx_weight_file {
 public:
  /// Writes the weights that may be factorized as [out][in] or [out][in / groups][kernel elements][1], and
  /// their biases as [out]. `near`: path of the new model. `path`: path of the old model, whose external data
  /// are read. `weights` must outlive the object. Throws io_error if a file cannot be written or read.
  onnx_weight_file(const std::string& near, const std::vector<onnx_weight>& weights,
                   const constant_map& constants, const std::string& path)
      : folder_(near), weights_(weights) {
    std::size_t room = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) room += 2 * safetensors_writer::room_for(key(i), 4);
    safetensors_writer writer(dense(), room);
    for (const std::size_t size : {8U, 4U, 2U}) {
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const onnx_weight& one = weights[i];
        const auto dtype = floating_dtype(*one.tensor);
        if (!one.reason.empty() || size_of(*dtype) != size) continue;
        writer.begin(key(i), *dtype, one.shape);
        if (one.transposed) {
          writer.write(
              transposed_bytes(elements_of(*one.tensor, *dtype, path), one.shape[1], one.shape[0], size));
        } else {
          visit_elements(*one.tensor, *dtype, path, [&](auto piece) { writer.write(piece); });
        }
        if (one.bias.empty()) continue;
        const onnx::TensorProto& bias = *constants.at(one.bias);
        writer.begin(stem(i) + ".bias", *dtype, {one.shape[0]});
        visit_elements(bias, *dtype, path, [&](auto piece) { writer.write(piece); });
      }
    }
    writer.commit();
  }

  /// Path of the written weights.
  std::string dense() const { return folder_ / "dense.safetensors"; }
  /// Path to which factorize_weights writes the factors; in the same folder.
  std::string factors() const { return folder_ / "factors.safetensors"; }
  /// Name of weight i in the weight file.
  std::string key(std::size_t i) const { return stem(i) + ".weight"; }
  /// Name of weight i in the weight file without its ending ".weight".
  std::string stem(std::size_t i) const {
    const std::string number = std::to_string(i);
    return std::string(number.size() < 6 ? 6 - number.size() : 0, '0') + number + " " + weights_[i].name +
           ".matrix";
  }
  /// Number of the weight that is called `key` in the weight file.
  std::size_t number_of(const std::string& key) const {
    std::size_t number = 0;
    std::from_chars(key.data(), key.data() + key.size(), number);
    return number;
  }
  /// Returns a text with the names of the model in place of those of the weight file.
  std::string in_names_of_model(std::string text, const std::string& path) const {
    const auto replace = [&](const std::string& from, const std::string& to) {
      for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size()) {
        text.replace(at, from.size(), to);
      }
    };
    replace(dense(), path);
    for (std::size_t i = 0; i < weights_.size(); ++i) replace(key(i), weights_[i].name);
    return text;
  }

 private:
  work_folder folder_;
  const std::vector<onnx_weight>& weights_;
};

/// Converts the caller's policy, whose names are those of the model, to a policy for the weight file.
struct onnx_policy {
  weight_policy policy;
  network_statistics statistics;

  onnx_policy(const weight_policy& given, const std::vector<onnx_weight>& weights,
              const onnx_weight_file& file, const constant_map& constants)
      : policy(given) {
    const auto by_model_name = [&](const auto& function) {
      return [&, function](const std::string& key) { return function(weights[file.number_of(key)].name); };
    };
    if (given.include) policy.include = by_model_name(given.include);
    if (given.exclude) policy.exclude = by_model_name(given.exclude);
    policy.embedding = {};
    policy.groups = [&](const std::string& key) { return weights[file.number_of(key)].groups; };
    if (given.statistics == nullptr) return;
    std::map<std::string, std::string> keys;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (weights[i].reason.empty()) keys.emplace(weights[i].name, file.key(i));
    }
    for (const layer_statistics& layer : given.statistics->layers) {
      const auto key = keys.find(layer.name);
      if (key == keys.end() && constants.count(layer.name) > 0) continue;  // the weight is not replaced
      statistics.layers.push_back(layer);
      if (key != keys.end()) statistics.layers.back().name = key->second;
    }
    policy.statistics = &statistics;
  }
  onnx_policy(const onnx_policy&) = delete;
  onnx_policy& operator=(const onnx_policy&) = delete;
};

/// Calls factorize_weights from file.dense() to file.factors(). Its errors are thrown again with the names of
/// the model in place of those of the weight file, and with `path` as the name of the file.
inline weight_report factorize_file(const onnx_weight_file& file, const weight_policy& policy,
                                    const std::string& path, const weight_observer& observer) {
  const auto text = [&](const error& e) { return file.in_names_of_model(e.what(), path); };
  PUFFERFISH_DETAIL_TRY { return factorize_weights(file.dense(), file.factors(), policy, observer); }
  PUFFERFISH_DETAIL_CATCH(value_error, e) { throw_error<value_error>({text(e)}); }
  PUFFERFISH_DETAIL_CATCH(shape_error, e) { throw_error<shape_error>({text(e)}); }
  PUFFERFISH_DETAIL_CATCH(rank_error, e) { throw_error<rank_error>({text(e)}); }
}

/// Fills the entries of the report, in the order of the weights.
inline void fill_report(onnx_report& report, const std::vector<onnx_weight>& weights,
                        const onnx_weight_file& file, const weight_report& made) {
  for (const onnx_weight& one : weights) {
    weight_result& r = report.tensors.emplace_back();
    r.name = one.name;
    r.shape = shape_of(*one.tensor);
    r.reason = one.reason;
    if (const auto dtype = floating_dtype(*one.tensor)) {
      r.dtype = *dtype;
      r.parameters_before = r.parameters_after =
          static_cast<index_t>(*tensor_bytes(*dtype, r.shape) / size_of(*dtype));
    }
  }
  for (const weight_result& from : made.tensors) {
    if (from.name.ends_with(".bias")) continue;
    const std::size_t i = file.number_of(from.name);
    weight_result& to = report.tensors[i];
    const std::vector<index_t> shape = to.shape;
    to = from;
    to.name = weights[i].name;
    to.shape = shape;
  }
}

}  // namespace detail

/// Writes the ONNX model `in` to `out`, with the constant weights that the policy chooses replaced by factors
/// of rank r, and the nodes that use them by two nodes each:
///
///   Conv of g groups, W [out][in / g][k...]  Conv with [g r][in / g][k...], Conv with [out][r][1...]
///   Gemm, W [out][in] or its transpose       Gemm with [r][in], Gemm with [out][r]
///   MatMul x W^T or W x                      MatMul, MatMul
///   LSTM, GRU, RNN, input side [1][out][in]  MatMul with [in][r], then the node with [1][out][r]
///
/// The factors of a weight NAME.weight are called NAME.down.weight and NAME.up.weight, of other names
/// NAME.down and NAME.up; those of a node NODE.down and NODE.up. Biases move to the second node. The hidden
/// side of recurrent layers, layers of two directions, transposed convolutions, embeddings, weights in
/// subgraphs, weights that other nodes use as well, and inputs with a default value stay; the report says
/// why. A weight of several nodes is factorized once. Everything else is left as it is, also fields that the
/// installed ONNX library does not know.
///
/// `policy` has the meaning that it has for factorize_weights; names are those of constants, layers are in
/// the order of the nodes, the budget counts all floating-point constants of the main graph, and groups are
/// those of the nodes. Statistics have the names of constants, too; of x W^T and W x, outputs and inputs are
/// those of W [out][in].
///
/// If `in` has external data, so has `out`, in the file OUT.data. Temporary weight files are written to a
/// folder OUT.work-XXXXXX, which is removed. ONNX's checker runs on both models, unless their opset is newer
/// than the installed library.
///
/// Throws io_error for a file that is not a model, has cycles, missing or wrong external data, tensors whose
/// elements do not fit their shapes, or that the checker refuses, and if `out` cannot be written; also throws
/// the errors of factorize_weights. After an error, `out` is unchanged, but an OUT.data of an earlier
/// model may be replaced. `out` may be `in` if there are no external data.
///
/// \code
/// weight_policy policy;
/// policy.rank = rank_ratio{0.25};
/// const onnx_report report = factorize_onnx("resnet50.onnx", "small.onnx", policy);
/// \endcode
inline onnx_report factorize_onnx(const std::string& in, const std::string& out, const weight_policy& policy,
                                  const weight_observer& observer = {}) {
  using namespace detail;
  const auto start = std::chrono::steady_clock::now();
  onnx::ModelProto model = read_onnx_model(in);
  check_onnx_order(model.graph(), in);
  const std::vector<external_place> places = external_places(model, in);
  onnx_report report;
  const constant_map constants = constants_of(model.graph());
  for (const auto& [name, tensor] : constants) {
    const auto dtype = floating_dtype(*tensor);
    if (dtype)
      report.parameters_before += static_cast<index_t>(byte_size(*tensor, *dtype, in) / size_of(*dtype));
  }
  report.checked = check_onnx(model, in);
  const std::vector<onnx_weight> weights = weight_finder(model, constants)();
  const onnx_weight_file file(out, weights, constants, in);
  onnx_policy inner(policy, weights, file, constants);
  inner.policy.parameters_elsewhere = report.parameters_before;
  const safetensors_reader written(file.dense());
  for (const tensor_place& one : written.tensors()) inner.policy.parameters_elsewhere -= one.count();
  const weight_report made = factorize_file(file, inner.policy, in, observer);
  fill_report(report, weights, file, made);
  report.parameters_after = report.parameters_before - made.parameters_before + made.parameters_after;

  const safetensors_reader factors(file.factors());
  std::map<std::string, const tensor_place*> by_name;
  for (const tensor_place& one : factors.tensors()) by_name.emplace(one.name, &one);
  const auto factor = [&](std::size_t i, const char* side) {
    const tensor_place& place = *by_name.at(factor_name(file.key(i), side));
    onnx_factor one{place.shape[0], place.shape[0] == 0 ? 0 : place.count() / place.shape[0],
                    std::vector<std::uint8_t>(static_cast<std::size_t>(place.bytes))};
    factors.read(place, 0, one.bytes);
    return one;
  };
  onnx_rewriter rewriter(model);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (report.tensors[i].factorized) rewriter.replace(weights[i], factor(i, "down"), factor(i, "up"));
  }
  const std::set<std::string> external = rewriter();
  check_onnx(model, in);
  if (!places.empty()) {
    data_file_writer data(out, places);
    for_each_constant(*model.mutable_graph(), [&](onnx::TensorProto& one) {
      if (is_external(one)) {
        data.copy(one, place_of(one, *external_bytes(one, in), in));
      } else if (external.count(one.name()) > 0) {
        data.move(one);
      }
    });
    const std::vector<std::uint8_t> bytes = onnx_bytes(model, out);
    atomic_writer writer(out);
    writer.write(bytes);
    data.commit();
    writer.commit();
  } else {
    write_file_atomically(out, onnx_bytes(model, out));
  }
  report.seconds = seconds_since(start);
  return report;
}

PUFFERFISH_NAMESPACE_END
