// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: ONNX models in files. Parsing, serialization and the checks of a model are those of Debian's
/// libonnx-dev and libprotobuf-dev; every failure becomes an io_error that names the file.

#ifndef ONNX_NAMESPACE
#define ONNX_NAMESPACE onnx
#endif
#ifndef ONNX_ML
#define ONNX_ML 1
#endif
// MAP_TYPE is an enumerator of ONNX and a macro of <sys/mman.h>.
#pragma push_macro("MAP_TYPE")
#undef MAP_TYPE
#include <onnx/checker.h>
#include <onnx/onnx_pb.h>
#pragma pop_macro("MAP_TYPE")

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/file.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Largest protobuf message. Larger models store their tensors as external data, in files of their own.
inline constexpr std::uint64_t onnx_message_limit = std::numeric_limits<std::int32_t>::max();

/// Version of the operator set "ai.onnx" that a model imports; 0: none.
inline std::int64_t opset_of(const onnx::ModelProto& model) {
  for (const auto& import : model.opset_import()) {
    if (import.domain().empty() || import.domain() == "ai.onnx") return import.version();
  }
  return 0;
}

/// The latest version of "ai.onnx" that the installed ONNX library can check.
inline std::int64_t newest_checked_opset() {
  return onnx::OpSchemaRegistry::DomainToVersionRange::Instance().Map().at("").second;
}

/// Text about a node for errors: its name, else its first output, with the operator.
inline std::string describe_node(const onnx::NodeProto& node) {
  const std::string name = !node.name().empty()     ? node.name()
                           : node.output_size() > 0 ? node.output(0)
                                                    : std::string();
  return quote_name(name) + " (" + node.op_type().substr(0, 80) + ")";
}

/// Throws io_error unless every input of a node of the main graph is an input of the graph, an initializer or
/// an output of an earlier node, and no value has two producers. A graph with a cycle has no such order.
/// ONNX's checker requires the same, but not of models whose opset it does not know.
inline void check_onnx_order(const onnx::GraphProto& graph, const std::string& path) {
  constexpr const char* unknown =
      ", which no input, initializer or earlier node gives; nodes must be in topological order, and a graph "
      "has no cycles";
  std::set<std::string> known;
  for (const auto& one : graph.input()) known.insert(one.name());
  for (const auto& one : graph.initializer()) known.insert(one.name());
  for (const auto& one : graph.sparse_initializer()) known.insert(one.values().name());
  for (const auto& node : graph.node()) {
    for (const std::string& name : node.input()) {
      if (name.empty() || known.count(name) > 0) continue;
      throw_error<io_error>({path, ": node ", describe_node(node), " reads ", quote_name(name), unknown});
    }
    for (const std::string& name : node.output()) {
      if (name.empty() || known.insert(name).second) continue;
      throw_error<io_error>(
          {path, ": node ", describe_node(node), " writes ", quote_name(name), ", which exists already"});
    }
  }
  for (const auto& one : graph.output()) {
    if (known.count(one.name()) > 0) continue;
    throw_error<io_error>({path, ": output ", quote_name(one.name()), " of the graph has no producer"});
  }
}

/// Runs ONNX's checker on the model and returns true; external data are looked for in the folder of `path`.
/// For a model of a newer opset than newest_checked_opset() calls only check_onnx_order and returns false.
/// Throws io_error with the checker's text.
inline bool check_onnx(const onnx::ModelProto& model, const std::string& path) {
  if (!model.has_graph() || model.ir_version() < 1) throw_error<io_error>({path, ": no ONNX model"});
  check_onnx_order(model.graph(), path);
  if (opset_of(model) > newest_checked_opset()) return false;
  PUFFERFISH_DETAIL_TRY {
    onnx::checker::CheckerContext context;
    context.set_ir_version(static_cast<int>(model.ir_version()));
    std::unordered_map<std::string, int> opsets;
    for (const auto& import : model.opset_import()) {
      opsets[import.domain() == "ai.onnx" ? "" : import.domain()] = static_cast<int>(import.version());
    }
    // Before version 3 of the format, models do not name an operator set: it is version 1.
    if (opsets.empty() && model.ir_version() < 3) opsets[""] = 1;
    context.set_opset_imports(std::move(opsets));
    context.set_model_dir(split_path(path).first);
    const onnx::checker::LexicalScopeContext scope;
    onnx::checker::check_graph(model.graph(), context, scope);
  }
  PUFFERFISH_DETAIL_CATCH(std::exception, e) {
    throw_error<io_error>({path, ": ONNX's checker: ", std::string(e.what()).substr(0, 2000)});
  }
  return true;
}

/// Parses bytes as a model. `path` names them in errors. Throws io_error for bytes that are no model: another
/// format, whose name the text contains if it is a known one, or a model that was cut off. The model is not
/// checked: see check_onnx.
inline onnx::ModelProto parse_onnx(std::span<const std::uint8_t> bytes, const std::string& path) {
  onnx::ModelProto model;
  const bool parsed =
      bytes.size() <= onnx_message_limit &&
      model.ParsePartialFromArray(static_cast<const void*>(bytes.data()), static_cast<int>(bytes.size()));
  if (!parsed || !model.has_graph() || model.ir_version() < 1) {
    throw_error<io_error>({path, ": no ONNX model, or one that was cut off",
                           foreign_format(bytes.subspan(0, std::min(bytes.size(), format_bytes)))});
  }
  return model;
}

/// Reads a model, without its external data. Throws io_error for a file that cannot be read or is above 2 GiB
/// (external data do not count), and the errors of parse_onnx.
inline onnx::ModelProto read_onnx_model(const std::string& path) {
  return parse_onnx(read_file(path, onnx_message_limit), path);
}

/// Serializes a model. Throws io_error, naming `path`, for a message above 2 GiB.
inline std::vector<std::uint8_t> onnx_bytes(const onnx::ModelProto& model, const std::string& path) {
  const std::size_t size = model.ByteSizeLong();
  if (size > onnx_message_limit) {
    throw_error<io_error>({path, ": a model of ", size, " bytes; ONNX allows 2 GiB besides external data"});
  }
  std::vector<std::uint8_t> bytes(size);
  if (!model.SerializePartialToArray(bytes.data(), static_cast<int>(size))) {
    throw_error<io_error>({path, ": the model cannot be serialized"});
  }
  return bytes;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
