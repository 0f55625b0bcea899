// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
/// \file
/// libFuzzer harness of safetensors files. The parser may accept or throw io_error; what it accepts must be
/// consistent, and be the same when written and read again.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include <pufferfish/io/safetensors.hpp>

namespace {

using namespace pufferfish;

void require(bool condition) {
  if (!condition) std::abort();
}

void try_file(const safetensors_file& file) {
  std::vector<tensor_entry> entries;
  for (const std::string& name : file.tensor_names()) {
    const tensor_info& info = file.tensor(name);
    std::size_t size = size_of(info.dtype);
    for (const index_t extent : info.shape) size *= static_cast<std::size_t>(extent);
    require(size == info.bytes.size());
    std::vector<double> values(static_cast<std::size_t>(info.count()));
    (void)detail::convert_floating<double>(info.dtype, info.bytes, values);
    entries.push_back({name, info.dtype, info.shape, info.bytes});
  }
  const auto again = safetensors_file::parse(encode_safetensors(entries, file.metadata()), "again");
  require(again.tensor_names().size() == entries.size());
  require(again.metadata() == file.metadata());
  for (const tensor_entry& entry : entries) {
    const tensor_info& info = again.tensor(entry.name);
    require(info.dtype == entry.dtype && info.shape == entry.shape);
    require(std::equal(info.bytes.begin(), info.bytes.end(), entry.bytes.begin(), entry.bytes.end()));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    try_file(safetensors_file::parse({data, data + size}, "fuzz"));
  } catch (const io_error&) {
  }
  return 0;
}
