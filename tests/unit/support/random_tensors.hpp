// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What the tests of tensor files share: tensors to write, and the check that they were read.

#include <doctest/doctest.h>

#include <pufferfish/io/tensor_info.hpp>

#include "io_support.hpp"

namespace io_test {

/// Up to eleven tensors of the types in `types`, of up to four dimensions from 0 to 4, a third of them called
/// by `strange` besides their number; their bytes are below `values`.
struct random_tensors {
  template <class Types>
  random_tensors(std::mt19937& random, const Types& types, const std::string& strange, unsigned values) {
    const auto count = static_cast<unsigned>(random() % 12);
    for (unsigned t = 0; t < count; ++t) {
      pufferfish::tensor_entry entry;
      entry.name = "layer" + std::to_string(t) + (t % 3 == 0 ? strange : ".bias");
      entry.dtype = types[random() % types.size()].dtype;
      std::size_t size = size_of(entry.dtype);
      for (auto d = random() % 5; d > 0; --d) {
        entry.shape.push_back(static_cast<pufferfish::index_t>(random() % 5));
        size *= static_cast<std::size_t>(entry.shape.back());
      }
      storage.emplace_back(size);
      for (auto& b : storage.back()) b = static_cast<std::uint8_t>(random() % values);
      entries.push_back(entry);
    }
    for (unsigned t = 0; t < count; ++t) entries[t].bytes = storage[t];
  }

  std::vector<bytes> storage;
  std::vector<pufferfish::tensor_entry> entries;
};

/// A file holds these tensors and no others.
template <class File>
void check_tensors(const File& file, const std::vector<pufferfish::tensor_entry>& entries) {
  REQUIRE(file.tensor_names().size() == entries.size());
  for (const pufferfish::tensor_entry& entry : entries) {
    const pufferfish::tensor_info& info = file.tensor(entry.name);
    CHECK(info.dtype == entry.dtype);
    CHECK(info.shape == entry.shape);
    CHECK(bytes(info.bytes.begin(), info.bytes.end()) == bytes(entry.bytes.begin(), entry.bytes.end()));
  }
}

}  // namespace io_test
