// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
/// \file
/// libFuzzer harness of npz files. The first byte chooses what the rest is: an archive, or one array of an
/// archive whose checksums are right (stored, deflated), so that what lies behind them is reached. The parser
/// may accept or throw io_error; what it accepts must be consistent, and be the same when written and read
/// again.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/io/npz.hpp>

namespace {

using namespace pufferfish;

constexpr std::uint64_t limit = std::uint64_t{1} << 22;

void require(bool condition) {
  if (!condition) std::abort();
}

void try_file(const npz_file& file, const npz_options& options) {
  std::vector<tensor_entry> entries;
  std::size_t total = 0;
  for (const std::string& name : file.tensor_names()) {
    const tensor_info& info = file.tensor(name);
    std::size_t size = size_of(info.dtype);
    for (const index_t extent : info.shape) size *= static_cast<std::size_t>(extent);
    require(size == info.bytes.size());
    total += size;
    entries.push_back({name, info.dtype, info.shape, info.bytes});
  }
  require(total <= limit);
  const auto again = npz_file::parse(encode_npz(entries, options), "again");
  require(again.tensor_names().size() == entries.size());
  for (const tensor_entry& entry : entries) {
    const tensor_info& info = again.tensor(entry.name);
    require(info.dtype == entry.dtype && info.shape == entry.shape);
    require(std::equal(info.bytes.begin(), info.bytes.end(), entry.bytes.begin(), entry.bytes.end()));
  }
}

/// An archive with these bytes as its only array.
std::vector<std::uint8_t> archive_of(std::span<const std::uint8_t> array, bool compress) {
  std::vector<std::uint8_t> file;
  const auto sink = [&](std::span<const std::uint8_t> piece) {
    file.insert(file.end(), piece.begin(), piece.end());
  };
  detail::zip_writer writer(sink, false);
  detail::zip_entry entry;
  entry.name = "w.npy";
  entry.crc = detail::zip_crc(0, array);
  entry.size = entry.packed = array.size();
  if (compress) {
    const std::vector<std::uint8_t> packed = detail::deflate_for_zip(array, {}, "fuzz");
    entry.method = detail::zip_deflated;
    entry.packed = packed.size();
    writer.add(entry, {packed});
  } else {
    writer.add(entry, {array});
  }
  writer.finish();
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const unsigned kind = data[0] % 3;
  const std::span<const std::uint8_t> rest(data + 1, size - 1);
  try {
    std::vector<std::uint8_t> file =
        kind == 0 ? std::vector<std::uint8_t>(rest.begin(), rest.end()) : archive_of(rest, kind == 2);
    try_file(npz_file::parse(std::move(file), "fuzz", limit), {kind == 1, kind == 2});
  } catch (const io_error&) {
  }
  return 0;
}
