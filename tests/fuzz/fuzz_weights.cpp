// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
/// \file
/// libFuzzer harness of weight files: planning a factorization, reading the lists of factors in the metadata,
/// finding and merging pairs of factors. Each may succeed or throw io_error. A merged weight must have as
/// many bytes as its shape says, and lists must be the same when written and read again.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/io/safetensors.hpp>
#include <pufferfish/weights/merge.hpp>

namespace {

using namespace pufferfish;

void require(bool condition) {
  if (!condition) std::abort();
}

class parsed_source final : public tensor_source {
 public:
  explicit parsed_source(safetensors_file file) : file_(std::move(file)) {
    for (const std::string& name : file_.tensor_names()) {
      const tensor_info& info = file_.tensor(name);
      places_.push_back({name, info.dtype, info.shape, 0, info.bytes.size()});
    }
  }
  const std::string& name() const override { return file_.name(); }
  const std::vector<tensor_place>& tensors() const override { return places_; }
  const safetensors_metadata& metadata() const override { return file_.metadata(); }
  void read(const tensor_place& tensor, std::uint64_t from, std::span<std::uint8_t> out) const override {
    const std::span<const std::uint8_t> bytes = file_.tensor(tensor.name).bytes;
    require(from <= bytes.size() && out.size() <= bytes.size() - from);
    if (!out.empty()) std::memcpy(out.data(), bytes.data() + from, out.size());
  }

 private:
  safetensors_file file_;
  std::vector<tensor_place> places_;
};

void try_plan(const tensor_source& source) {
  std::vector<weight_tensor> tensors;
  for (const tensor_place& t : source.tensors()) tensors.push_back({t.name, t.dtype, t.shape});
  weight_policy policy;
  policy.keep_first = 0;
  policy.keep_last = policy.embeddings_dense = policy.projections_dense = false;
  for (std::size_t i = 0; const weight_decision& d : weight_plan(tensors, policy)) {
    require(!d.factorize || d.parts * d.rows * d.cols == source.tensors()[i].count());
    ++i;
  }
}

void try_lists(const safetensors_metadata& metadata) {
  const detail::factor_lists lists = detail::factor_lists::read(metadata, "fuzz");
  safetensors_metadata again = metadata;
  lists.write(again, "again");
  const detail::factor_lists read = detail::factor_lists::read(again, "again");
  require(read.ranks == lists.ranks && read.parts == lists.parts && read.embeddings == lists.embeddings);
}

void try_merge(const tensor_source& source) {
  for (const detail::factor_pair& pair : detail::pair_finder(source)()) {
    double work = static_cast<double>(pair.rank);
    for (const index_t extent : pair.shape) work *= static_cast<double>(extent);
    if (work > 1e6) continue;  // a few bytes of factors may have a large product
    const tensor_place& down = source.tensors()[pair.down];
    const auto bytes = detail::merge_pair<float>(source, pair);
    require(bytes.size() == static_cast<std::size_t>(detail::count_of(pair.shape)) * size_of(down.dtype));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const parsed_source source(safetensors_file::parse({data, data + size}, "fuzz"));
    try_plan(source);
    try_lists(source.metadata());
    try_merge(source);
  } catch (const io_error&) {
  }
  return 0;
}
