// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
/// \file
/// libFuzzer harness of weight files: planning a factorization, reading the lists of factors in the metadata,
/// finding and merging pairs of factors. Each may succeed or throw io_error. A merged weight must have as
/// many bytes as its shape says, and lists must be the same when written and read again. safetensors_reader
/// reads files only, so the input is written to a temporary file first.

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/io/file.hpp>
#include <pufferfish/io/safetensors_stream.hpp>
#include <pufferfish/weights/merge.hpp>

namespace {

using namespace pufferfish;

void require(bool condition) {
  if (!condition) std::abort();
}

/// Path of a file with these bytes, valid until the next call.
std::string file_of(std::span<const std::uint8_t> bytes) {
  static std::FILE* const file = std::tmpfile();
  require(file != nullptr);
  const int fd = ::fileno(file);
  require(::ftruncate(fd, 0) == 0);
  detail::write_all_at(fd, 0, bytes, "fuzz");
  return "/dev/fd/" + std::to_string(fd);
}

void try_plan(const safetensors_reader& source) {
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

void try_merge(const safetensors_reader& source) {
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
  const std::string path = file_of({data, size});
  try {
    const safetensors_reader source(path);
    try_plan(source);
    try_lists(source.metadata());
    try_merge(source);
  } catch (const io_error&) {
  }
  return 0;
}
