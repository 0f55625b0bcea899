// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/random_tensors.hpp"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include <doctest/doctest.h>

#include <pufferfish/io/npz.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

/// An .npy array from any dictionary and elements.
bytes npy(std::string_view dictionary, const bytes& elements, int major = 1) {
  bytes file = to_bytes("\x93NUMPY");
  file.push_back(static_cast<std::uint8_t>(major));
  file.push_back(0);
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) {
    file.push_back(static_cast<std::uint8_t>((dictionary.size() >> (8 * i)) & 0xff));
  }
  for (const char c : dictionary) file.push_back(static_cast<std::uint8_t>(c));
  for (const std::uint8_t byte : elements) file.push_back(byte);
  return file;
}

std::string dictionary(const std::string& descr, const std::string& shape, bool fortran = false) {
  return "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") +
         ", 'shape': " + shape + ", }\n";
}

struct file_entry {
  std::string name;
  bytes content;
  bool packed = false;
};

/// An archive of any entries.
bytes archive(const std::vector<file_entry>& entries, bool wide = false) {
  bytes file;
  const auto sink = [&](std::span<const std::uint8_t> piece) {
    file.insert(file.end(), piece.begin(), piece.end());
  };
  detail::zip_writer writer(sink, wide);
  for (const file_entry& from : entries) {
    detail::zip_entry entry;
    entry.name = from.name;
    entry.crc = detail::zip_crc(0, from.content);
    entry.size = entry.packed = from.content.size();
    if (from.packed) {
      const bytes packed = detail::deflate_for_zip(from.content, {}, "x");
      entry.method = detail::zip_deflated;
      entry.packed = packed.size();
      writer.add(entry, {packed});
    } else {
      writer.add(entry, {from.content});
    }
  }
  writer.finish();
  return file;
}

bytes archive_of(const std::string& text, const bytes& elements, int major = 1) {
  return archive({{"w.npy", npy(text, elements, major)}});
}

/// The error of parsing; "" if the file is accepted.
std::string problem(bytes file, std::uint64_t limit = default_tensor_file_limit) {
  return io_error_of([&] { npz_file::parse(std::move(file), "some.npz", limit); });
}
std::string problem_of(const std::string& text, std::size_t elements, int major = 1) {
  return problem(archive_of(text, bytes(elements), major));
}

/// Where the n-th directory entry begins.
std::size_t central(const bytes& file, int n = 0) {
  const bytes signature{0x50, 0x4b, 1, 2};
  auto at = file.begin();
  for (int i = 0; i <= n; ++i) {
    at = std::search(at + (i > 0 ? 1 : 0), file.end(), signature.begin(), signature.end());
  }
  return static_cast<std::size_t>(at - file.begin());
}

/// The file with an integer of some bytes put at an offset.
bytes with_number(bytes file, std::size_t at, std::uint64_t value, int size) {
  for (int i = 0; i < size; ++i) {
    file[at + static_cast<std::size_t>(i)] = static_cast<std::uint8_t>((value >> (8 * i)) & 0xff);
  }
  return file;
}

bytes floats(std::initializer_list<float> values) {
  bytes result(4 * values.size());
  std::memcpy(result.data(), values.begin(), result.size());
  return result;
}

std::vector<float> read_floats(const npz_file& file, std::string_view name) {
  std::vector<float> values(static_cast<std::size_t>(file.tensor(name).count()));
  read_tensor<float>(file, name, values);
  return values;
}

void parse_or_throw(const bytes& b) {
  const npz_file file = npz_file::parse(b, "x", 1 << 20);
  std::size_t total = 0;
  for (const std::string& name : file.tensor_names()) {
    const tensor_info& info = file.tensor(name);
    std::size_t count = 1;
    for (const index_t extent : info.shape) count *= static_cast<std::size_t>(extent);
    if (count * size_of(info.dtype) != info.bytes.size()) throw std::logic_error("shape does not fit");
    for (const std::uint8_t byte : info.bytes) total += byte;  // a sanitizer sees a span outside the file
  }
  if (total == std::numeric_limits<std::size_t>::max()) throw std::logic_error("impossible");
}

}  // namespace

TEST_CASE("npz: the bytes of an array are NumPy's") {
  const float values[2] = {1.0F, -2.0F};
  const std::vector<tensor_entry> entries{make_tensor_entry("w", {2}, std::span(values))};
  const std::string text = to_text(encode_npz(entries));
  const std::size_t array = 30 + 5;  // local header and name
  CHECK(text.substr(30, 5) == "w.npy");
  CHECK(text.substr(array, 10) == std::string("\x93NUMPY\x01\0\x76\0", 10));
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
  CHECK(text.substr(array + 10, header.size()) == header);
  CHECK(text[array + 127] == '\n');
  CHECK(to_bytes(text.substr(array + 128, 8)) == bytes{0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0});
  CHECK(to_bytes(text.substr(array + 136, 4)) == bytes{0x50, 0x4b, 1, 2});
}

TEST_CASE("npz: round trip of every type, with random shapes, stored and deflated, with 32 and 64 bits") {
  const scratch_folder folder;
  std::mt19937 random(3);
  for (int round = 0; round < 48; ++round) {
    random_tensors made(random, detail::npy_types, "/w\"\\\xc3\xa4", round % 3 ? 256 : 2);
    const npz_options options{round % 2 == 1, round % 4 >= 2};
    write_npz(folder / "a", made.entries, options);
    check_tensors(npz_file::read(folder / "a"), made.entries);
    // The caller's order does not matter, and the form in memory is the file's.
    const bytes written = read_file(folder / "a");
    std::shuffle(made.entries.begin(), made.entries.end(), random);
    CHECK(encode_npz(made.entries, options) == written);
  }
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
}

TEST_CASE("npz: Fortran's order and big-endian numbers are read as what they mean") {
  const bytes by_columns = floats({0, 3, 1, 4, 2, 5});  // of [[0, 1, 2], [3, 4, 5]]
  npz_file file = npz_file::parse(archive_of(dictionary("<f4", "(2, 3)", true), by_columns), "x");
  CHECK(file.tensor("w").shape == std::vector<index_t>{2, 3});
  CHECK(read_floats(file, "w") == std::vector<float>{0, 1, 2, 3, 4, 5});

  bytes three(24 * 2);
  for (index_t i = 0; i < 2; ++i) {
    for (index_t j = 0; j < 3; ++j) {
      for (index_t k = 0; k < 4; ++k) {
        const index_t column_major = i + 2 * (j + 3 * k), value = 100 * i + 10 * j + k;
        three[static_cast<std::size_t>(2 * column_major)] = static_cast<std::uint8_t>(value >> 8);
        three[static_cast<std::size_t>(2 * column_major + 1)] = static_cast<std::uint8_t>(value & 0xff);
      }
    }
  }
  file = npz_file::parse(archive_of(dictionary(">i2", "(2, 3, 4)", true), three), "x");
  std::vector<std::int16_t> values(24);
  read_tensor<std::int16_t>(file, "w", values);
  CHECK(values[0] == 0);
  CHECK(values[1] == 1);
  CHECK(values[4] == 10);
  CHECK(values[23] == 123);

  file = npz_file::parse(archive_of(dictionary(">f8", "(1,)"), {0x3f, 0xf8, 0, 0, 0, 0, 0, 0}), "x");
  std::vector<double> wide(1);
  read_tensor<double>(file, "w", wide);
  CHECK(wide[0] == 1.5);
  file = npz_file::parse(archive_of(dictionary(">c8", "()"), {0x3f, 0x80, 0, 0, 0x40, 0, 0, 0}), "x");
  const std::span<const std::uint8_t> complex = file.tensor("w").bytes;
  CHECK(bytes(complex.begin(), complex.end()) == floats({1, 2}));
  // One byte has no order.
  CHECK(problem_of(dictionary(">u1", "(3,)"), 3).empty());
  CHECK(problem_of(dictionary("|b1", "(3,)"), 3).empty());
  // Halves convert.
  file = npz_file::parse(archive_of(dictionary("<f2", "(2,)"), {0, 0x3c, 0, 0xc2}), "x");
  std::vector<float> single(2);
  read_tensor_converted<float>(file, "w", single);
  CHECK(single == std::vector<float>{1.0F, -3.0F});
}

TEST_CASE("npz: what the format allows") {
  CHECK(problem(archive({})).empty());
  CHECK(problem(archive({}, true)).empty());
  const std::string wanted = dictionary("<f4", "(1,)");
  CHECK(problem_of(wanted, 4, 1).empty());
  CHECK(problem_of(wanted, 4, 2).empty());
  CHECK(problem_of(wanted, 4, 3).empty());
  CHECK(problem_of(dictionary("<f4", "()"), 4).empty());
  CHECK(problem_of(dictionary("<f4", "( 0 , 7 )"), 0).empty());
  CHECK(problem_of("{\"shape\":(1,),\"descr\":\"<f4\",\"fortran_order\":True}", 4).empty());
  // A comment at the end, and an archive with checksum and sizes behind the data.
  bytes comment = archive_of(wanted, bytes(4));
  comment[comment.size() - 2] = 3;
  for (int i = 0; i < 3; ++i) comment.push_back(0x50);
  CHECK(problem(comment).empty());
  bytes streamed = archive_of(wanted, bytes(4));
  streamed[6] |= 8;
  streamed = with_number(with_number(with_number(streamed, 14, 0, 4), 18, 0, 4), 22, 0, 4);
  CHECK(problem(streamed).empty());
}

// The kinds of hostile files, one by one. safetensors.cpp has the same for its format.

TEST_CASE("npz, hostile: lengths beyond the file") {
  const bytes good = archive_of(dictionary("<f4", "(2,)"), bytes(8));
  REQUIRE(problem(good).empty());
  const std::size_t at = central(good), end = good.size() - 22;
  CHECK(mentions(problem({}), "0 bytes without a zip archive's end record"));
  CHECK(mentions(problem(bytes(1000)), "without a zip"));
  CHECK(mentions(problem(with_number(good, end + 12, 1000, 4)), "zip directory of 1000 bytes"));
  CHECK(mentions(problem(with_number(good, end + 16, 0xffffffff, 4)), "at byte 4294967295"));
  CHECK(mentions(problem(with_number(with_number(good, end + 8, 9, 2), end + 10, 9, 2)),
                 "cannot have 9 entries"));
  CHECK(mentions(problem(with_number(good, end + 8, 9, 2)), "in several parts"));
  CHECK(mentions(problem(with_number(good, at + 28, 60000, 2)), "longer than the directory"));
  CHECK(mentions(problem(with_number(good, at + 30, 60000, 2)), "longer than the directory"));
  CHECK(mentions(problem(with_number(good, at + 42, 0x7fffffff, 4)), "no local header at byte 2147483647"));
  CHECK(mentions(problem(with_number(with_number(good, at + 20, 9000, 4), at + 24, 9000, 4)),
                 "of 9000 bytes at byte 0 goes beyond the data"));
  CHECK(mentions(problem(with_number(good, 28, 60000, 2)), "goes beyond the data"));
  const bytes wide = archive({{"w.npy", npy(dictionary("<f4", "(2,)"), bytes(8))}}, true);
  REQUIRE(problem(wide).empty());
  const std::size_t locator = wide.size() - 22 - 20, end64 = locator - 56;
  CHECK(mentions(problem(with_number(wide, locator + 8, ~std::uint64_t{0}, 8)), "64-bit end record"));
  CHECK(mentions(problem(with_number(wide, end64 + 40, ~std::uint64_t{0}, 8)), "18446744073709551615"));
  CHECK(mentions(problem(with_number(wide, end64 + 48, ~std::uint64_t{0}, 8)), "18446744073709551615"));
  CHECK(mentions(problem(with_number(with_number(wide, end64 + 24, ~std::uint64_t{0}, 8), end64 + 32,
                                     ~std::uint64_t{0}, 8)),
                 "cannot have 18446744073709551615"));
  const std::size_t extra = central(wide) + 46 + 5 + 4;
  CHECK(mentions(problem(with_number(wide, extra, ~std::uint64_t{0}, 8)),
                 "promises 18446744073709551615 bytes and holds"));
  CHECK(mentions(problem(with_number(wide, extra, 1000, 8)), "promises 1000 bytes and holds"));
  CHECK(mentions(problem(with_number(wide, extra + 16, ~std::uint64_t{0}, 8)), "no local header"));
  CHECK(mentions(problem(with_number(wide, extra - 2, 8, 2)), "64-bit field of 8 bytes"));
}

TEST_CASE("npz, hostile: overlapping entries") {
  const bytes content = npy(dictionary("<f4", "(2,)"), bytes(8));
  const bytes good = archive({{"a.npy", content}, {"a.npy", content}});
  // Two directory entries for one local entry.
  CHECK(mentions(problem(with_number(good, central(good, 1) + 42, 0, 4)),
                 "'a.npy' at byte 0 overlaps 'a.npy'"));
  // An entry within another's data: the small one's header is data of the large one.
  const bytes inner = archive({{"b.npy", content}});
  bytes whole = inner;
  whole.resize(central(inner));
  const bytes outer = archive({{"a.npy", whole}, {"b.npy", content}});
  CHECK(mentions(problem(with_number(outer, central(outer, 1) + 42, 30 + 5, 4)),
                 "'b.npy' at byte 35 overlaps 'a.npy'"));
}

TEST_CASE("npz, hostile: huge headers") {
  const std::string wanted = dictionary("<f4", "(2,)");
  CHECK(mentions(problem_of(std::string(70000, ' ') + wanted, 8, 2), "npy header of 70"));
  bytes lying = npy(wanted, bytes(8), 2);
  lying = with_number(lying, 8, 0xffffffff, 4);
  CHECK(mentions(problem(archive({{"w.npy", lying}})), "npy header of 4294967295 bytes, but there are"));
  lying = with_number(npy(wanted, bytes(8)), 8, 0xffff, 2);
  CHECK(mentions(problem(archive({{"w.npy", lying}})), "npy header of 65535 bytes"));
  CHECK(mentions(problem(archive({{"w.npy", {}}})), "0 bytes that are no npy array"));
  CHECK(mentions(problem(archive({{"w.npy", to_bytes(std::string_view("\x93NUMPY\x02\0ab", 10))}})),
                 "ends within its npy header"));
}

TEST_CASE("npz, hostile: headers that are no dictionary") {
  const std::string tail = ", 'fortran_order': False, 'shape': (1,)}";
  const std::vector<std::string> bad{
      "",
      " ",
      "{",
      "{}",
      "None",
      "[",
      "{'descr'",
      "{'descr':",
      "{'descr': '<f4",
      "{'descr': '<f4'" + tail + "}",
      "{'descr': '<f4'" + tail + " x",
      "{'descr': '<f4'}",
      "{'descr': '<f4', 'descr': '<f4'" + tail,
      "{'other': 1, 'descr': '<f4'" + tail,
      "{descr: '<f4'" + tail,
      "{'descr' '<f4'" + tail,
      "{'descr': None" + tail,
      "{'descr': ''" + tail,
      "{'descr': '<'" + tail,
      "{,'descr': '<f4'" + tail,
      "{'descr': '<f4'" + tail.substr(0, tail.size() - 1) + ",,}",
      "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
      "{'descr': '<f4', 'fortran_order': Falsch, 'shape': (1,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': 1}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': [1]}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1,,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1.0,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': ((1,),)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
      std::string(60000, '{'),
      std::string(60000, '('),
      "{'descr': '" + std::string(60000, 'f')};
  for (const std::string& text : bad) {
    CAPTURE(text);
    const std::string said = problem_of(text, 4);
    CHECK(mentions(said, "some.npz: array 'w.npy': the npy header"));
    CHECK(said.size() < 300);
  }
  CHECK(mentions(problem_of(dictionary("<f4", "(1,)"), 4, 4), "npy version 4.0"));
  CHECK(mentions(problem_of(dictionary("<f4", "(1,)"), 4, 0), "npy version 0.0"));
  bytes other = npy(dictionary("<f4", "(1,)"), bytes(4));
  other[1] = 'M';
  CHECK(mentions(problem(archive({{"w.npy", other}})), "no npy array"));
  CHECK(mentions(problem(archive({{"w.txt", other}})), "is no .npy file"));
  CHECK(mentions(problem(archive({{"\xff.npy", other}})), "not UTF-8"));
}

TEST_CASE("npz, hostile: dtypes and shapes") {
  for (const char* type :
       {"<f3", "f4", "=f4", "|f4", "<F4", "<f16", "<c16", "|O", "O", "<U4", "|S4", "<M8", "|V4", "?"}) {
    CAPTURE(type);
    CHECK(mentions(problem_of(dictionary(type, "(1,)"), 4), "has the dtype '" + std::string(type) + "'"));
  }
  CHECK(mentions(problem_of("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 4),
                 "is of records"));
  CHECK(mentions(problem_of(dictionary("<f4", "(2,)"), 4), "shape [2] need 8 bytes, there are 4"));
  CHECK(mentions(problem_of(dictionary("<f4", "(1,)"), 5), "need 4 bytes, there are 5"));
  CHECK(mentions(problem_of(dictionary("<f4", "(4611686018427387904,)"), 0), "too many"));
  CHECK(mentions(problem_of(dictionary("|u1", "(4294967296, 4294967296)"), 0), "too many"));
  CHECK(mentions(problem_of(dictionary("|u1", "(0, 4294967296, 4294967296)"), 0), "too many"));
  std::string ones = "(1";
  for (int d = 1; d < 64; ++d) ones += ",1";
  CHECK(problem_of(dictionary("|u1", ones + ")"), 1).empty());
  CHECK(mentions(problem_of(dictionary("|u1", ones + ",1)"), 1), "more than 64"));
}

TEST_CASE("npz, hostile: duplicate names") {
  const bytes content = npy(dictionary("<f4", "(2,)"), bytes(8));
  CHECK(mentions(problem(archive({{"a.npy", content}, {"b.npy", content}, {"a.npy", content}})),
                 "'a.npy' is there twice"));
  // The directory has one name, the entry itself another.
  bytes renamed = archive({{"a.npy", content}, {"b.npy", content}});
  renamed[central(renamed, 1) + 46] = 'a';
  CHECK(mentions(problem(renamed), "is another one in its local header"));
}

TEST_CASE("npz, hostile: more promised than held") {
  const bytes zeros(1 << 20);
  const std::string shape = "(" + std::to_string(zeros.size()) + ",)";
  const bytes content = npy(dictionary("|u1", shape), zeros);
  const bytes good = archive({{"w.npy", content, true}});
  REQUIRE(good.size() < 4096);
  CHECK(problem(good).empty());
  CHECK(mentions(problem(good, 1 << 19), "promise more than the limit of 524288 bytes"));
  const bytes two = archive({{"v.npy", content, true}, {"w.npy", content, true}});
  CHECK(problem(two, std::uint64_t{1} << 22).empty());
  CHECK(mentions(problem(two, 3 << 19), "promise more than the limit"));
  // Sizes in both headers; what is held is as before.
  const auto promising = [&](std::uint64_t size) {
    return with_number(with_number(good, 22, size, 4), central(good) + 24, size, 4);
  };
  CHECK(mentions(problem(promising(0xfffffff0)), "promises 4294967280 bytes and holds"));
  CHECK(mentions(problem(promising(content.size() + 1)), "but promises"));
  CHECK(mentions(problem(promising(content.size() - 1)), "holds more than the"));
  CHECK(mentions(problem(promising(10)), "holds more than the 10 bytes it promises"));
  // Deflate's end within the data, and data that ends within deflate's.
  const auto holding = [&](std::uint64_t packed) {
    return with_number(with_number(good, 18, packed, 4), central(good) + 20, packed, 4);
  };
  const std::uint64_t packed = detail::zip_number<4>(good, 18);
  CHECK(mentions(problem(holding(packed - 1)), "ends within its data"));
  CHECK(mentions(problem(holding(packed + 1)), "goes beyond the data"));
  const bytes plain = archive({{"w.npy", npy(dictionary("<f4", "(2,)"), bytes(8))}});
  CHECK(mentions(problem(with_number(plain, central(plain) + 24, 100000, 4)), "promises 100000 bytes"));
}

TEST_CASE("npz: other archives, wrong checksums, encryption") {
  const bytes good = archive_of(dictionary("<f4", "(2,)"), bytes(8));
  const std::size_t at = central(good);
  bytes flipped = good;
  flipped[at - 1] ^= 1;  // the last element's last byte
  CHECK(mentions(problem(flipped), "'w.npy' is corrupt: its checksum is"));
  CHECK(mentions(problem(with_number(good, at + 8, 0x0801, 2)), "encrypted"));
  CHECK(mentions(problem(with_number(with_number(good, at + 10, 14, 2), 8, 14, 2)), "method 14"));
  bytes deflated = archive({{"w.npy", npy(dictionary("<f4", "(2,)"), bytes(8)), true}});
  deflated[30 + 5 + 3] ^= 0xff;
  CHECK(!problem(deflated).empty());
}

TEST_CASE("an npz file cut anywhere, or damaged") {
  const float f32[3] = {1, 2, 3};
  const std::uint8_t u8[2] = {4, 5};
  const std::vector<tensor_entry> entries{make_tensor_entry("weight", {3, 1}, std::span(f32)),
                                          make_tensor_entry("b", {2}, std::span(u8))};
  for (const npz_options options : {npz_options{}, npz_options{true, false}, npz_options{false, true}}) {
    const bytes good = encode_npz(entries, options);
    CHECK(accepted_prefixes(good, parse_or_throw) == 0);
    CHECK(refused_damaged(good, 4000, 41, parse_or_throw) > 2000);
  }
}

TEST_CASE("npz: the writer refuses bad entries and creates no file") {
  const scratch_folder folder;
  const float f32[2] = {1, 2};
  const auto write = [&](std::vector<tensor_entry> entries) { write_npz(folder / "a", entries); };
  const auto entry = [&](std::string name, std::vector<index_t> shape) {
    return make_tensor_entry(std::move(name), std::move(shape), std::span(f32));
  };
  CHECK(mentions(io_error_of([&] { write({entry("w", {2}), entry("w", {2})}); }), "'w' is taken"));
  CHECK(mentions(io_error_of([&] { write({entry("\xff", {2})}); }), "not UTF-8"));
  CHECK(mentions(io_error_of([&] { write({entry(std::string(70000, 'a'), {2})}); }), "too long"));
  CHECK_THROWS_AS(write({entry("w", {3})}), shape_error);
  CHECK_THROWS_AS(write({entry("w", {-2, -1})}), shape_error);
  const bfloat16 brain[1] = {bfloat16(1.0F)};
  CHECK(mentions(io_error_of([&] { write({make_tensor_entry("w", {1}, std::span(brain))}); }),
                 "NumPy has no dtype for BF16"));
  CHECK(list(folder.path()).empty());
  write({});
  CHECK(npz_file::read(folder / "a").tensor_names().empty());
}

TEST_CASE("npz: files that cannot be read or written, and moved ones") {
  const scratch_folder folder;
  CHECK(mentions(io_error_of([&] { npz_file::read(folder / "none"); }), "No such file"));
  CHECK(mentions(io_error_of([&] { npz_file::read(folder.path()); }), "Is a directory"));
  const float f32[3] = {1, 2, 3};
  const std::vector<tensor_entry> entries{make_tensor_entry("w", {3}, std::span(f32))};
  write_npz(folder / "a", entries);
  CHECK(mentions(io_error_of([&] { npz_file::read(folder / "a", 100); }), "limit of 100"));
  CHECK(mentions(io_error_of([&] { write_npz(folder.path(), entries); }), "Is a directory"));
  for (const bool compress : {false, true}) {
    npz_file first = npz_file::parse(encode_npz(entries, {compress}), "x");
    const npz_file second = std::move(first);
    CHECK(read_floats(second, "w") == std::vector<float>{1, 2, 3});
    CHECK(mentions(io_error_of([&] { (void)second.tensor("v"); }), "no array 'v' among its 1"));
    double wide[3];
    CHECK(mentions(io_error_of([&] { read_tensor<double>(second, "w", wide); }), "F32; wanted is F64"));
    read_tensor_converted<double>(second, "w", wide);
    CHECK(wide[2] == 3.0);
  }
  static_assert(!std::is_copy_constructible_v<npz_file>);
}

namespace {

/// Runs a Python program with arguments; false where there is no Python with NumPy.
bool run_python(const std::string& program, const std::string& arguments) {
  for (const std::string python : {"python3", "/usr/bin/python3"}) {
    if (std::system(("exec " + python + " -c 'import numpy' 2>/dev/null").c_str()) != 0) continue;
    const int status = std::system(("exec " + python + " " + program + " " + arguments).c_str());
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    return true;
  }
  MESSAGE("skipped: there is no python3 with NumPy");
  return false;
}

}  // namespace

TEST_CASE("npz: what NumPy writes is read, with every dtype, order and version") {
  const scratch_folder folder;
  const std::string program = folder / "write.py";
  write_file_atomically(program, to_bytes(R"(
import io, sys, zipfile
import numpy as np
types = "b1 u1 i1 <u2 <i2 <f2 <u4 <i4 <f4 <u8 <i8 <f8 >u2 >i2 >f2 >u4 >i4 >f4 >u8 >i8 >f8".split()
arrays = {}
for n, t in enumerate(types):
    a = (np.arange(24).reshape(2, 3, 4) % (2 if t == "b1" else 24)).astype(t)
    arrays[f"c{n}"] = a
    arrays[f"f{n}"] = np.asfortranarray(a)
arrays["scalar"] = np.float64(0.5)
arrays["none"] = np.zeros((0, 3), np.float32)
np.savez(sys.argv[1], **arrays)
np.savez_compressed(sys.argv[2], **arrays)
with zipfile.ZipFile(sys.argv[3], "w", zipfile.ZIP_DEFLATED) as z:
    for version in (1, 2, 3):
        b = io.BytesIO()
        np.lib.format.write_array(b, np.arange(24.0, dtype="<f4").reshape(2, 3, 4), (version, 0))
        z.writestr(f"v{version}.npy", b.getvalue())
)"));
  const std::array<std::string, 3> files{folder / "a.npz", folder / "b.npz", folder / "c.npz"};
  if (!run_python(program, files[0] + " " + files[1] + " " + files[2])) return;
  for (int f = 0; f < 2; ++f) {
    const npz_file file = npz_file::read(files[static_cast<std::size_t>(f)]);
    CHECK(file.tensor_names().size() == 44);
    CHECK(file.tensor("none").shape == std::vector<index_t>{0, 3});
    CHECK(file.tensor("scalar").shape.empty());
    double half[1];
    read_tensor<double>(file, "scalar", half);
    CHECK(half[0] == 0.5);
    for (const std::string& name : file.tensor_names()) {
      if (name == "none" || name == "scalar") continue;
      CAPTURE(name);
      const tensor_info& info = file.tensor(name);
      CHECK(info.shape == std::vector<index_t>{2, 3, 4});
      for (std::size_t i = 0; i < 24; ++i) {
        const std::uint8_t* from = info.bytes.data() + i * size_of(info.dtype);
        double value = -1.0;
        std::vector<double> one(1);
        if (detail::convert_floating<double>(info.dtype, {from, size_of(info.dtype)}, one)) {
          value = one[0];
        } else {
          std::uint64_t number = 0;
          std::memcpy(&number, from, size_of(info.dtype));
          value = static_cast<double>(number);
        }
        CHECK(value == static_cast<double>(info.dtype == tensor_dtype::boolean ? i % 2 : i));
      }
    }
  }
  const npz_file versions = npz_file::read(files[2]);
  CHECK(versions.tensor_names() == std::vector<std::string>{"v1", "v2", "v3"});
  for (const std::string& name : versions.tensor_names()) CHECK(read_floats(versions, name)[23] == 23.0F);
}

TEST_CASE("npz: NumPy reads what is written here") {
  const scratch_folder folder;
  const std::string program = folder / "read.py";
  write_file_atomically(program, to_bytes(R"(
import sys, zipfile
import numpy as np
for path in sys.argv[1:]:
    assert zipfile.ZipFile(path).testzip() is None
    with np.load(path, allow_pickle=False) as f:
        assert sorted(f.files) == ["a/b", "e", "i", "s", "\u00e4"], f.files
        assert f["a/b"].dtype == np.float32 and f["a/b"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert f["s"].shape == () and f["s"] == 2.5 and f["s"].dtype == np.float64
        assert f["e"].shape == (0, 2) and f["i"].dtype == np.int64 and f["i"].tolist() == [-1]
        assert f["\u00e4"].dtype == np.float16 and f["\u00e4"].tolist() == [1.5]
)"));
  const float f32[6] = {0, 1, 2, 3, 4, 5};
  const double f64[1] = {2.5};
  const std::int64_t i64[1] = {-1};
  const float16 f16[1] = {float16(1.5F)};
  const std::vector<tensor_entry> entries{
      make_tensor_entry("a/b", {2, 3}, std::span(f32)), make_tensor_entry("s", {}, std::span(f64)),
      make_tensor_entry("e", {0, 2}, std::span<const float>()), make_tensor_entry("i", {1}, std::span(i64)),
      make_tensor_entry("\xc3\xa4", {1}, std::span(f16))};
  std::string arguments;
  for (int i = 0; i < 4; ++i) {
    const std::string path = folder / (std::to_string(i) + ".npz");
    write_npz(path, entries, {i % 2 == 1, i >= 2});
    arguments += " " + path;
  }
  run_python(program, arguments);
}
