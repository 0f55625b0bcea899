// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <limits>

#include <doctest/doctest.h>

#include <pufferfish/io/safetensors_stream.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

/// A file from any header text and data.
bytes assemble(std::string_view header, const bytes& data = {}) {
  const std::uint64_t length = header.size();
  bytes file(8 + header.size() + data.size());  // sized at once: g++ 12 warns about inserting here
  std::memcpy(file.data(), &length, 8);
  std::copy(header.begin(), header.end(), file.begin() + 8);
  std::copy(data.begin(), data.end(), file.end() - static_cast<std::ptrdiff_t>(data.size()));
  return file;
}

/// The error of parsing a header with `data_size` bytes of data; "" if it is accepted.
std::string problem(std::string_view header, std::size_t data_size = 0) {
  return io_error_of(
      [&] { safetensors_file::parse(assemble(header, bytes(data_size)), "some.safetensors"); });
}

std::string one(const std::string& fields) { return R"({"w":{)" + fields + "}}"; }

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return one(R"("dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets);
}

/// Up to eleven random tensors of all dtypes, of up to four dimensions from 0 to 4. A third of the names need
/// escapes in JSON.
struct random_tensors {
  explicit random_tensors(std::mt19937& random) {
    const auto count = static_cast<unsigned>(random() % 12);
    for (unsigned t = 0; t < count; ++t) {
      tensor_entry entry;
      entry.name = "layer" + std::to_string(t) + (t % 3 == 0 ? ".w\"\\\n\xc3\xa4" : ".bias");
      entry.dtype = detail::dtype_table[random() % detail::dtype_table.size()].dtype;
      std::size_t size = size_of(entry.dtype);
      for (auto d = random() % 5; d > 0; --d) {
        entry.shape.push_back(static_cast<index_t>(random() % 5));
        size *= static_cast<std::size_t>(entry.shape.back());
      }
      storage.emplace_back(size);
      for (auto& b : storage.back()) b = static_cast<std::uint8_t>(random() % 256);
      entries.push_back(entry);
    }
    for (unsigned t = 0; t < count; ++t) entries[t].bytes = storage[t];
  }

  std::vector<bytes> storage;
  std::vector<tensor_entry> entries;
};

/// Checks that a file holds these tensors and no others.
void check_tensors(const safetensors_file& file, const std::vector<tensor_entry>& entries) {
  REQUIRE(file.tensor_names().size() == entries.size());
  for (const tensor_entry& entry : entries) {
    const tensor_info& info = file.tensor(entry.name);
    CHECK(info.dtype == entry.dtype);
    CHECK(info.shape == entry.shape);
    CHECK(bytes(info.bytes.begin(), info.bytes.end()) == bytes(entry.bytes.begin(), entry.bytes.end()));
  }
}

void parse_or_throw(const bytes& b) {
  const safetensors_file file = safetensors_file::parse(b, "x");
  std::size_t total = 0;
  for (const std::string& name : file.tensor_names()) {
    const tensor_info& info = file.tensor(name);
    std::size_t count = 1;
    for (const index_t extent : info.shape) count *= static_cast<std::size_t>(extent);
    if (count * size_of(info.dtype) != info.bytes.size()) throw std::logic_error("shape does not fit");
    for (const std::uint8_t byte : info.bytes) total += byte;  // a sanitizer sees a span outside the file
  }
  if (total > 255 * b.size()) throw std::logic_error("impossible");
}

}  // namespace

TEST_CASE("the bytes of a safetensors file are the documented ones") {
  const float values[2] = {1.0F, -2.0F};
  const std::vector<tensor_entry> entries{make_tensor_entry("w", {2}, std::span(values))};
  const std::string text = to_text(encode_safetensors(entries, {{"k", "v"}}));
  const std::string header =
      R"({"__metadata__":{"k":"v"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  CHECK(text.substr(8, padded.size()) == padded);
  CHECK(text.size() == 8 + padded.size() + 8);
  CHECK(static_cast<unsigned char>(text[0]) == padded.size());
  CHECK(to_bytes(text.substr(text.size() - 8)) == bytes{0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0});
  CHECK(padded.size() % 8 == 0);
}

TEST_CASE("round trip of every type, with random shapes") {
  const scratch_folder folder;
  std::mt19937 random(3);
  for (int round = 0; round < 40; ++round) {
    random_tensors made(random);
    const safetensors_metadata metadata =
        round % 2 ? safetensors_metadata{}
                  : safetensors_metadata{{"", "empty"}, {"quote\"", "line\n\xe2\x82\xac"}};
    write_safetensors(folder / "a", made.entries, metadata);
    const safetensors_file file = safetensors_file::read(folder / "a");
    CHECK(file.metadata() == metadata);
    check_tensors(file, made.entries);
    // The caller's order does not matter, and the form in memory is the file's.
    const bytes written = read_file(folder / "a");
    std::shuffle(made.entries.begin(), made.entries.end(), random);
    CHECK(encode_safetensors(made.entries, metadata) == written);
  }
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
}

TEST_CASE("elements are aligned within the file") {
  const std::uint8_t small[3] = {1, 2, 3};
  const double wide[2] = {1, 2};
  const float middle[1] = {3};
  const std::vector<tensor_entry> entries{make_tensor_entry("a", {3}, std::span(small)),
                                          make_tensor_entry("b", {2}, std::span(wide)),
                                          make_tensor_entry("c", {}, std::span(middle))};
  const bytes encoded = encode_safetensors(entries);
  const safetensors_file file = safetensors_file::parse(encoded, "x");
  CHECK(file.tensor_names() == std::vector<std::string>{"b", "c", "a"});
  std::uint64_t header = 0;
  std::memcpy(&header, encoded.data(), 8);
  CHECK((8 + header) % 8 == 0);
}

TEST_CASE("read_tensor demands type and size; conversion is asked for") {
  const float f32[3] = {0.1F, -1e30F, 3.0F};
  const double f64[3] = {0.1, 1e300, -2.5};
  const bfloat16 bf16[2] = {bfloat16(1.5F), bfloat16(-3.0F)};
  const std::int64_t i64[1] = {-(std::int64_t{1} << 60)};
  const std::vector<tensor_entry> entries{
      make_tensor_entry("f32", {3}, std::span(f32)), make_tensor_entry("f64", {3, 1}, std::span(f64)),
      make_tensor_entry("bf16", {2}, std::span(bf16)), make_tensor_entry("i64", {}, std::span(i64)),
      make_tensor_entry("none", {0, 5}, std::span<const float>())};
  const safetensors_file file = safetensors_file::parse(encode_safetensors(entries), "some.safetensors");
  float single[3];
  double twice[3];
  read_tensor<float>(file, "f32", single);
  CHECK(std::memcmp(single, f32, sizeof f32) == 0);
  read_tensor<double>(file, "f64", twice);
  CHECK(std::memcmp(twice, f64, sizeof f64) == 0);
  std::int64_t integer[1];
  read_tensor<std::int64_t>(file, "i64", integer);
  CHECK(integer[0] == i64[0]);
  read_tensor(file, "none", std::span<float>());

  const std::string type = io_error_of([&] { read_tensor<float>(file, "f64", single); });
  CHECK(mentions(type, "some.safetensors"));
  CHECK(mentions(type, "'f64' has dtype F64; wanted is F32"));
  const std::string size = io_error_of([&] { read_tensor<float>(file, "f32", std::span(single).first(2)); });
  CHECK(mentions(size, "[3]"));
  CHECK(mentions(size, "wanted are 2"));
  CHECK(mentions(io_error_of([&] { read_tensor<float>(file, "nope", single); }),
                 "no tensor 'nope' among its 5"));

  read_tensor_converted<double>(file, "f32", twice);
  CHECK(twice[0] == static_cast<double>(0.1F));
  read_tensor_converted<float>(file, "f64", single);
  CHECK(single[0] == 0.1F);
  CHECK(std::isinf(single[1]));
  CHECK(single[2] == -2.5F);
  read_tensor_converted<float>(file, "f32", single);
  CHECK(std::memcmp(single, f32, sizeof f32) == 0);
  read_tensor_converted<float>(file, "bf16", std::span(single).first(2));
  CHECK(single[1] == -3.0F);
  bfloat16 brain[3];
  read_tensor_converted<bfloat16>(file, "f32", brain);
  CHECK(brain[0].bits() == bfloat16(0.1F).bits());
  CHECK(mentions(io_error_of([&] { read_tensor_converted<float>(file, "i64", std::span(single).first(1)); }),
                 "I64; wanted is F32"));
}

TEST_CASE("a moved file keeps its tensors") {
  const float f32[3] = {1, 2, 3};
  const std::vector<tensor_entry> entries{make_tensor_entry("w", {3}, std::span(f32))};
  safetensors_file first = safetensors_file::parse(encode_safetensors(entries), "x");
  const safetensors_file second = std::move(first);
  float out[3] = {};
  read_tensor<float>(second, "w", out);
  CHECK(out[2] == 3);
  CHECK(second.contains("w"));
  CHECK(!second.contains("v"));
  static_assert(!std::is_copy_constructible_v<safetensors_file>);
}

TEST_CASE("the writer refuses bad entries and creates no file") {
  const scratch_folder folder;
  const float f32[2] = {1, 2};
  const auto write = [&](std::vector<tensor_entry> entries, const safetensors_metadata& metadata = {}) {
    write_safetensors(folder / "a", entries, metadata);
  };
  const auto entry = [&](std::string name, std::vector<index_t> shape) {
    return make_tensor_entry(std::move(name), std::move(shape), std::span(f32));
  };
  CHECK(mentions(io_error_of([&] { write({entry("w", {2}), entry("w", {2})}); }), "'w' is taken"));
  CHECK(mentions(io_error_of([&] { write({entry("__metadata__", {2})}); }), "taken"));
  CHECK(mentions(io_error_of([&] { write({entry("\xff", {2})}); }), "not UTF-8"));
  CHECK(mentions(io_error_of([&] { write({}, {{"k", "\xc3"}}); }), "not UTF-8"));
  CHECK_THROWS_AS(write({entry("w", {3})}), shape_error);
  CHECK_THROWS_AS(write({entry("w", {-2, -1})}), shape_error);
  CHECK_THROWS_AS(write({entry("w", std::vector<index_t>(65, 1))}), shape_error);
  CHECK_THROWS_AS(write({entry("w", {0, index_t{1} << 40, index_t{1} << 40})}), shape_error);
  CHECK(list(folder.path()).empty());
  write({});
  CHECK(safetensors_file::read(folder / "a").tensor_names().empty());
}

TEST_CASE("what the format allows") {
  CHECK(problem("{}").empty());
  CHECK(problem("{}      ").empty());
  CHECK(problem(R"({"__metadata__":{}})").empty());
  CHECK(problem(tensor("F32", "[]", "[0,4]"), 4).empty());
  CHECK(problem(tensor("F32", "[0]", "[0,0]")).empty());
  CHECK(problem(tensor("F8_E4M3", "[2,3]", "[0,6]"), 6).empty());
  CHECK(
      problem(
          R"({"a":{"data_offsets":[4,8],"shape":[1],"dtype":"F32"},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
          8)
          .empty());
}

// The kinds of hostile files, one by one.

TEST_CASE("safetensors, hostile: lengths beyond the file") {
  const auto of = [](bytes b) { return io_error_of([&] { safetensors_file::parse(std::move(b), "x"); }); };
  CHECK(mentions(of({}), "0 bytes are too few"));
  CHECK(mentions(of(bytes(7)), "7 bytes are too few"));
  CHECK(mentions(of(bytes(8)), "is not a JSON object"));
  CHECK(mentions(of(bytes(8, 0xff)), "18446744073709551615"));
  bytes long_header = assemble("{}");
  long_header[0] = 3;
  CHECK(mentions(of(long_header), "header of 3 bytes, but the file has 2"));
}

TEST_CASE("safetensors, hostile: huge headers") {
  const auto of = [](bytes b) { return io_error_of([&] { safetensors_file::parse(std::move(b), "x"); }); };
  // Above the cap of 100 MB although the file is that long.
  bytes huge = assemble("{" + std::string(100'000'000, ' '));
  CHECK(mentions(of(std::move(huge)), "100000001"));
}

TEST_CASE("safetensors, hostile: bad JSON") {
  for (const char* text : {"",
                           " ",
                           " {}",
                           "[]",
                           "null",
                           "1",
                           "\"w\"",
                           "\xef\xbb\xbf{}",
                           "{",
                           "}",
                           "{}}",
                           "{}{}",
                           "{} x",
                           "{\"w\"}",
                           "{\"w\":}",
                           "{,}",
                           "{\"w\":{}",
                           "{'w':{}}",
                           "// c\n{}",
                           "{}// c",
                           "{\"\xff\":{}}",
                           "{\"\\ud800\":{}}",
                           "{\"w\":{\"shape\":[1,]}}",
                           "{\"w\":{\"shape\":[NaN]}}"}) {
    CAPTURE(text);
    CHECK(mentions(problem(text), "some.safetensors"));
  }
  CHECK(mentions(problem(std::string_view("{}\0 ", 4)), "is not a JSON object"));
  CHECK(mentions(problem(R"({"w":1})"), "number where none"));
  CHECK(mentions(problem(R"({"w":null})"), "null"));
  CHECK(mentions(problem(R"({"w":true})"), "boolean"));
  CHECK(mentions(problem(R"({"w":"x"})"), "string where none"));
  CHECK(mentions(problem(R"({"w":[]})"), "array where none"));
  CHECK(mentions(problem(R"({"w":{}})"), "'w' lacks"));
  CHECK(mentions(problem(R"({"w":{"dtype":"F32","shape":[]}})"), "lacks"));
  CHECK(mentions(problem(one(R"("dtype":"F32","shape":[],"data_offsets":[0,4],"more":1)"), 4),
                 "number where none"));
  CHECK(mentions(problem(one(R"("dtype":"F32","dtype":"F32")")), "two dtypes"));
  CHECK(mentions(problem(one(R"("shape":[],"shape":[])")), "array where none"));
  CHECK(mentions(problem(one(R"("shape":[[]])")), "array where none"));
  CHECK(mentions(problem(one(R"("shape":[{}])")), "object where none"));
  CHECK(mentions(problem(one(R"("shape":{})")), "object where none"));
  CHECK(mentions(problem(R"({"__metadata__":{"k":1}})"), "number where none"));
  CHECK(mentions(problem(R"({"__metadata__":{"k":{}}})"), "object where none"));
  CHECK(mentions(problem(R"({"__metadata__":[]})"), "array where none"));
  // Depth bombs, and names that would fill a log.
  CHECK(mentions(problem(std::string(1'000'000, '{')), "some.safetensors"));
  CHECK(mentions(problem("{\"w\":" + std::string(1'000'000, '[')), "array where none"));
  CHECK(mentions(problem(one("\"shape\":" + std::string(1'000'000, '['))), "array where none"));
  const std::string loud = problem("{\"" + std::string(100'000, 'n') + "\\u001b[31m\":{}}");
  CHECK(loud.size() < 300);
  CHECK(mentions(problem("{\"\\u001b[31m\":{}}"), "'?[31m'"));
}

TEST_CASE("safetensors, hostile: duplicate names") {
  CHECK(mentions(problem(R"({"__metadata__":{"k":"a","k":"b"}})"), "'k' twice"));
  CHECK(mentions(problem(R"({"__metadata__":{},"__metadata__":{}})"), "metadata twice"));
  const std::string empty_tensor = R"("w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  CHECK(mentions(problem("{" + empty_tensor + "," + empty_tensor + "}"), "'w' is there twice"));
  CHECK(mentions(
      problem(
          R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"\u0077":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})"),
      "twice"));
}

TEST_CASE("safetensors, hostile: dtypes and shapes") {
  CHECK(mentions(problem(tensor("F31", "[1]", "[0,4]"), 4), "'w' has the unknown dtype 'F31'"));
  CHECK(mentions(problem(tensor("f32", "[1]", "[0,4]"), 4), "unknown dtype"));
  CHECK(mentions(problem(tensor("F32", "[-1]", "[0,4]"), 4), "negative number -1"));
  CHECK(mentions(problem(tensor("F32", "[1.0]", "[0,4]"), 4), "'1.0'"));
  CHECK(mentions(problem(tensor("F32", "[1e400]", "[0,4]"), 4), "some.safetensors"));
  CHECK(mentions(problem(tensor("F32", "[99999999999999999999]", "[0,4]"), 4), "no integer below 2^64"));
  CHECK(
      mentions(problem(tensor("F32", "[18446744073709551615]", "[0,4]"), 4), "extent 18446744073709551615"));
  CHECK(mentions(problem(tensor("F32", "[9223372036854775807]", "[0,4]"), 4), "too many"));
  // 2^62 * 4 and 2^32 * 2^32 are 0 modulo 2^64.
  CHECK(mentions(problem(tensor("F32", "[4611686018427387904]", "[0,0]")), "too many"));
  CHECK(mentions(problem(tensor("U8", "[4294967296,4294967296]", "[0,0]")), "too many"));
  CHECK(mentions(problem(tensor("U8", "[0,4294967296,4294967296]", "[0,0]")), "too many"));
  std::string ones = "[1";
  for (int d = 1; d < 64; ++d) ones += ",1";
  CHECK(problem(tensor("U8", ones + "]", "[0,1]"), 1).empty());
  CHECK(mentions(problem(tensor("U8", ones + ",1]", "[0,1]"), 1), "more than 64"));
}

TEST_CASE("safetensors, hostile: offsets beyond the file") {
  CHECK(mentions(problem(tensor("F32", "[1]", "[0]"), 4), "fewer than two"));
  CHECK(mentions(problem(tensor("F32", "[1]", "[]"), 4), "fewer than two"));
  CHECK(mentions(problem(tensor("F32", "[1]", "[0,4,8]"), 4), "more than two"));
  CHECK(
      mentions(problem(tensor("F32", "[1]", "[4,0]"), 4), "'w' at bytes 4 to 0 is not within the data of 4"));
  CHECK(mentions(problem(tensor("F32", "[1]", "[0,8]"), 4), "0 to 8 is not within the data of 4"));
  CHECK(mentions(problem(tensor("F32", "[1]", "[0,18446744073709551615]"), 4), "not within"));
  CHECK(mentions(problem(tensor("F32", "[1]", "[18446744073709551612,0]"), 4), "not within"));
  CHECK(mentions(problem(tensor("F32", "[1]", "[0,-4]"), 4), "negative"));
}

TEST_CASE("safetensors, hostile: more promised than held") {
  CHECK(mentions(problem(tensor("F32", "[2]", "[0,4]"), 4), "shape [2], which needs 8 bytes"));
  CHECK(mentions(problem(tensor("F64", "[1]", "[0,4]"), 4), "dtype F64"));
  CHECK(mentions(problem(tensor("F32", "[1]", "[4,8]"), 8), "leaves a hole"));
  CHECK(mentions(problem(tensor("F32", "[1]", "[0,4]"), 5), "end at byte 4 of 5"));
  CHECK(mentions(problem("{}", 1), "end at byte 0 of 1"));
}

TEST_CASE("safetensors, hostile: overlapping tensors") {
  const std::string a = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)";
  CHECK(mentions(problem(a + R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6),
                 "'b' at bytes 2 to 6 overlaps"));
  CHECK(mentions(problem(a + R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4), "overlaps"));
  CHECK(mentions(problem(a + R"("b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}})", 6), "hole"));
  CHECK(mentions(problem(a + R"("b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", 4), "overlaps"));
}

TEST_CASE("files of other formats are recognised, and the error says what to do") {
  using namespace std::string_literals;
  const scratch_folder folder;
  const auto zip_of = [](const std::string& name) {
    std::string text = "PK\x03\x04"s + std::string(22, '\0');
    text += static_cast<char>(name.size());
    return text + std::string(3, '\0') + name + std::string(200, 'x');
  };
  const std::string torch =
      "this looks like a .pt or .pth file of PyTorch, not safetensors; in Python, "
      "safetensors.torch.save_file(torch.load(FILE";
  const std::string numpy =
      "this looks like an .npz file of NumPy, not safetensors; in Python, "
      "safetensors.numpy.save_file({n: a.copy() for n, a in numpy.load(FILE).items()}, \"FILE.safetensors\")";
  const std::pair<std::string, std::string> cases[] = {
      {zip_of("archive/data.pkl"), torch},
      {zip_of("resnet18/data.pkl"), torch},
      {zip_of("weight.npy"), numpy},
      {zip_of("module.model.layers.11.self_attention.query_projection.weight.npy"), numpy},
      {zip_of("letter.txt"), "this looks like a zip archive, not safetensors; .npz files of NumPy and .pt"},
      {"\x80\x02\x8a\nl\xfc\x9c"
       "F\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."s,
       torch},
      {"\x80\x04K\x01."s, torch},
      {"\x1f\x8b\x08\0\0\0\0\0"s + std::string(600'000, 'x'), "this looks like a gzip file"},
      {"\x93NUMPY\x01\0v\0{'descr': '<f4'"s, "this looks like an .npy file of NumPy"},
      {"\x89HDF\r\n\x1a\n\0"s, "this looks like an HDF5 file"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
       "this looks like a pointer of Git LFS"},
      {"{\"metadata\": {\"total_size\": 1}, \"weight_map\": {}}", "this looks like JSON, not safetensors"},
      {"{}", "this looks like JSON"},
      {"[1, 2, 3]\n", "this looks like JSON"},
  };
  for (const auto& one : cases) {
    const std::string& says = one.second;  // not a structured binding: clang 14 cannot capture it
    CAPTURE(says);
    const std::string path = folder / "x";
    write_file_atomically(path, to_bytes(one.first));
    const std::string whole = io_error_of([&] { safetensors_file::read(path); });
    CHECK(mentions(whole, path + ": "));
    CHECK(mentions(whole, says));
    CHECK(io_error_of([&] { safetensors_reader reader(path); }) == whole);
  }
  for (const char* text : {"Weights of the model\n", "epoch,loss\n1,0.5\n"}) {
    CAPTURE(text);
    const std::string path = folder / "x";
    write_file_atomically(path, to_bytes(text));
    const std::string whole = io_error_of([&] { safetensors_file::read(path); });
    CHECK(whole == path + ": not a safetensors file");
    CHECK(io_error_of([&] { safetensors_reader reader(path); }) == whole);
  }
  // What is damaged only, or says nothing, is given no other name.
  bytes cut = assemble("{\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}");
  cut.resize(20);
  for (const bytes& b : {cut, bytes(100, 0xff), to_bytes("hello, world")}) {
    const std::string text = io_error_of([&] { safetensors_file::parse(b, "x"); });
    CHECK(!text.empty());
    CHECK(!mentions(text, "looks like"));
  }
}

TEST_CASE("a safetensors file cut anywhere, or damaged") {
  const float f32[3] = {1, 2, 3};
  const std::uint8_t u8[2] = {4, 5};
  const std::vector<tensor_entry> entries{make_tensor_entry("weight", {3, 1}, std::span(f32)),
                                          make_tensor_entry("b", {2}, std::span(u8))};
  bytes good = encode_safetensors(entries, {{"epoch", "3"}});
  CHECK(accepted_prefixes(good, parse_or_throw) == 0);
  CHECK(refused_damaged(good, 8000, 41, parse_or_throw) > 4000);
  good.push_back(0);
  CHECK(mentions(io_error_of([&] { parse_or_throw(good); }), "of 15 bytes of data"));
}

TEST_CASE("files that cannot be read or written") {
  const scratch_folder folder;
  CHECK(mentions(io_error_of([&] { safetensors_file::read(folder / "none"); }), "No such file"));
  CHECK(mentions(io_error_of([&] { safetensors_file::read(folder.path()); }), "Is a directory"));
  const std::vector<double> values(4000, 1.0);
  const std::vector<tensor_entry> entries{make_tensor_entry("w", {4000}, std::span(values))};
  write_safetensors(folder / "a", entries);
  const bytes old = read_file(folder / "a");
  CHECK(mentions(io_error_of([&] { safetensors_file::read(folder / "a", 32000); }), "limit of 32000"));
  CHECK(mentions(io_error_of([&] { write_safetensors(folder.path(), entries); }), "Is a directory"));

  // A disk that fills up in the middle of a tensor.
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit unlimited{};
  ::getrlimit(RLIMIT_FSIZE, &unlimited);
  rlimit limited = unlimited;
  limited.rlim_cur = 20000;
  ::setrlimit(RLIMIT_FSIZE, &limited);
  const std::string text = io_error_of([&] { write_safetensors(folder / "a", entries, {{"epoch", "4"}}); });
  ::setrlimit(RLIMIT_FSIZE, &unlimited);
  std::signal(SIGXFSZ, handler);
  CHECK(mentions(text, folder / "a"));
  CHECK(mentions(text, "32000 bytes: File too large"));
  CHECK(read_file(folder / "a") == old);
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
}

TEST_CASE("read tensor by tensor, and written so") {
  const scratch_folder folder;
  const double f64[2] = {1, 2};
  const float f32[6] = {0, 1, 2, 3, 4, 5};
  const std::vector<tensor_entry> entries{make_tensor_entry("a", {2, 3}, std::span(f32)),
                                          make_tensor_entry("b", {2}, std::span(f64)),
                                          make_tensor_entry("none", {0}, std::span<const float>())};
  write_safetensors(folder / "a", entries, {{"k", "v"}});
  const safetensors_reader reader(folder / "a");
  CHECK(reader.metadata() == safetensors_metadata{{"k", "v"}});
  CHECK(reader.size() == read_file(folder / "a").size());
  REQUIRE(reader.tensors().size() == 3);
  CHECK(reader.tensors()[0].name == "b");
  const tensor_place& a = reader.tensors()[1];
  CHECK(a.shape == std::vector<index_t>{2, 3});
  CHECK(a.count() == 6);
  bytes part(8);
  reader.read(a, 16, part);
  float four[2];
  std::memcpy(four, part.data(), 8);
  CHECK(four[1] == 5.0F);
  CHECK_THROWS_AS(reader.read(a, 20, part), value_error);
  CHECK_THROWS_AS(reader.read(a, std::numeric_limits<std::uint64_t>::max(), part), value_error);

  const bytes whole = read_file(folder / "a");
  const auto copy_to = [&](const std::string& path, std::size_t room) {
    safetensors_writer writer(path, room);
    for (const tensor_place& tensor : reader.tensors()) {
      const std::size_t number = writer.begin("late", tensor.dtype, tensor.shape);
      for (std::uint64_t at = 0; at < tensor.bytes; at += 8) {
        reader.read(tensor, at, part);
        writer.write(part);
      }
      writer.rename(number, tensor.name);
    }
    writer.commit(reader.metadata());
  };
  std::size_t room = safetensors_writer::room_for("kv", 0);
  for (const tensor_place& tensor : reader.tensors()) {
    room += safetensors_writer::room_for(tensor.name, tensor.shape.size());
  }
  copy_to(folder / "b", room);
  const safetensors_file copy = safetensors_file::read(folder / "b");
  CHECK(copy.metadata() == reader.metadata());
  CHECK(copy.tensor_names() == safetensors_file::parse(whole, "x").tensor_names());
  float back[6];
  read_tensor<float>(copy, "a", back);
  CHECK(std::memcmp(back, f32, sizeof f32) == 0);
  CHECK(mentions(io_error_of([&] { copy_to(folder / "c", 0); }), "where room was left for"));

  const std::string none = folder / "d";
  {
    safetensors_writer writer(none, 1000);
    (void)writer.begin("w", tensor_dtype::f32, {2});
    CHECK_THROWS_AS(writer.write(bytes(9)), shape_error);
    writer.write(bytes(7));
    CHECK_THROWS_AS((void)writer.begin("v", tensor_dtype::f32, {2}), shape_error);
    CHECK_THROWS_AS(writer.commit(), shape_error);
    writer.write(bytes(1));
    (void)writer.begin("w", tensor_dtype::f32, {0});
    CHECK(mentions(io_error_of([&] { writer.commit(); }), "'w' is taken"));
    CHECK_THROWS_AS((void)writer.begin("v", tensor_dtype::f32, {-1}), shape_error);
  }
  CHECK(list(folder.path()).size() == 2);

  // What the whole reader refuses, this one refuses: its header is checked by the same code.
  for (std::size_t n = 0; n < whole.size(); ++n) {
    write_file_atomically(folder / "cut", std::span(whole).first(n));
    CHECK(mentions(io_error_of([&] { safetensors_reader{folder / "cut"}; }), folder / "cut"));
  }
  CHECK(mentions(io_error_of([&] { safetensors_reader{folder / "nothing"}; }), "No such file"));
  CHECK(mentions(io_error_of([&] { safetensors_reader{folder.path()}; }), "Is a directory"));
  CHECK(mentions(io_error_of([&] { safetensors_reader{"/dev/null"}; }), "a device, not a file"));
  // A file that shrinks while it is read.
  write_file_atomically(folder / "cut", whole);
  const safetensors_reader shrinking(folder / "cut");
  CHECK(::truncate((folder / "cut").c_str(), static_cast<off_t>(whole.size() - 4)) == 0);
  CHECK(mentions(io_error_of([&] { shrinking.read(shrinking.tensors()[1], 16, part); }), "too early"));
}

TEST_CASE("halves convert, and are told by their C++ type") {
  const float16 halves[2] = {float16(1.5F), float16(-0.25F)};
  const std::vector<tensor_entry> entries{make_tensor_entry("h", {2}, std::span(halves))};
  const safetensors_file file = safetensors_file::parse(encode_safetensors(entries), "x");
  CHECK(file.tensor("h").dtype == tensor_dtype::f16);
  float single[2];
  read_tensor_converted<float>(file, "h", single);
  CHECK(single[1] == -0.25F);
  float16 same[2];
  read_tensor<float16>(file, "h", same);
  CHECK(same[0].bits() == halves[0].bits());
}

TEST_CASE("dtypes: names, sizes, order of the table") {
  for (std::size_t i = 0; i < detail::dtype_table.size(); ++i) {
    const detail::dtype_row& row = detail::dtype_table[i];
    CHECK(static_cast<std::size_t>(row.dtype) == i);
    CHECK(parse_dtype(to_string(row.dtype)) == row.dtype);
    CHECK(size_of(row.dtype) == row.size);
  }
  CHECK(!parse_dtype("F4"));
  CHECK(dtype_of_v<float> == tensor_dtype::f32);
  CHECK(size_of(dtype_of_v<bfloat16>) == sizeof(bfloat16));
}
