// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cstring>
#include <set>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed/collectives/sparse_stream.hpp>

namespace {

using namespace pufferfish;

template <class T>
std::vector<T> elements_of(const sparse_stream<T>& stream) {
  std::vector<T> result(static_cast<std::size_t>(stream.length()), T(0));
  stream.add_to(result);
  return result;
}

template <class T>
bool same(const sparse_stream<T>& a, const sparse_stream<T>& b) {
  const auto equal = [](const auto& x, const auto& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size_bytes()) == 0);
  };
  return a.length() == b.length() && a.is_dense() == b.is_dense() && equal(a.indices(), b.indices()) &&
         equal(a.values(), b.values());
}

/// A stream with `count` entries at random indices; every fifth value is 0, every seventh -0.
template <class T>
sparse_stream<T> random_stream_of(index_t length, index_t count, std::uint64_t seed) {
  const random_stream random(seed, 5);
  std::set<std::int32_t> chosen;
  for (std::uint64_t i = 0; static_cast<index_t>(chosen.size()) < count; ++i) {
    chosen.insert(static_cast<std::int32_t>(random.below(i, static_cast<std::uint64_t>(length))));
  }
  const std::vector<std::int32_t> indices(chosen.begin(), chosen.end());
  std::vector<T> values;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    values.push_back(i % 5 == 0 ? T(0) : i % 7 == 0 ? -T(0) : static_cast<T>(random.normal(i)));
  }
  return {length, indices, values};
}

template <class T>
sparse_stream<T> through_bytes(const sparse_stream<T>& stream) {
  std::vector<std::byte> body(stream.body_bytes());
  stream.write_body(body);
  return sparse_stream<T>::from_body(stream.length(), stream.header(), body);
}

TEST_CASE("sparse_stream: header and body are the documented bytes") {
  const std::vector<std::int32_t> indices = {1, 4};
  const std::vector<float> values = {2.0F, 0.0F};
  const sparse_stream<float> stream(5, indices, values);
  CHECK_FALSE(stream.is_dense());
  CHECK(stream.header() == std::uint64_t{2} << 32);
  std::vector<std::byte> body(stream.body_bytes());
  REQUIRE(body.size() == 16);
  stream.write_body(body);
  CHECK(std::memcmp(body.data(), indices.data(), 8) == 0);
  CHECK(std::memcmp(body.data() + 8, values.data(), 8) == 0);

  const sparse_stream<float> dense = sparse_stream<float>::of_elements(values);
  CHECK(dense.header() == (std::uint64_t{2} << 32 | 1U));
  CHECK(dense.body_bytes() == 8);
  CHECK(dense.count() == 2);
  CHECK(dense.indices().empty());
}

TEST_CASE_TEMPLATE("sparse_stream: bytes and back; parts", T, float, double) {
  for (const index_t length : {0, 1, 2, 9, 1000}) {
    for (const index_t count : {index_t{0}, length / 7, length / 2, length}) {
      CAPTURE(length);
      CAPTURE(count);
      const auto stream = random_stream_of<T>(length, count, 3);
      CHECK(same(stream, through_bytes(stream)));
      const std::vector<T> all = elements_of(stream);
      for (const index_t begin : {index_t{0}, length / 3, length}) {
        const index_t end = begin + (length - begin) / 2;
        const auto part = stream.part(begin, end);
        CHECK(part.length() == end - begin);
        CHECK(elements_of(part) == std::vector<T>(all.begin() + begin, all.begin() + end));
        CHECK(same(part, through_bytes(part)));
        CHECK((part.is_dense() || part.count() <= part.most_entries()));
      }
    }
  }
}

TEST_CASE("sparse_stream: dense from delta + 1 entries on") {
  // Half of the elements in float, two thirds in double.
  CHECK(sparse_stream<float>(10).most_entries() == 5);
  CHECK(sparse_stream<float>(11).most_entries() == 5);
  CHECK(sparse_stream<double>(9).most_entries() == 6);
  for (const index_t length : {2, 3, 10, 101}) {
    const index_t delta = length / 2;
    CAPTURE(length);
    CHECK_FALSE(random_stream_of<float>(length, delta, 1).is_dense());
    CHECK(random_stream_of<float>(length, delta + 1, 1).is_dense());
    // The bytes of either format are what the rule compares.
    CHECK(random_stream_of<float>(length, delta, 1).body_bytes() <= static_cast<std::size_t>(4 * length));
  }
}

TEST_CASE_TEMPLATE("sparse_stream: sums of all formats, overlapping, disjoint, empty and full", T, float,
                   double) {
  constexpr index_t length = 120;
  const index_t delta = sparse_stream<T>(length).most_entries();
  for (const index_t a : {index_t{0}, index_t{1}, delta / 2, delta, length}) {
    for (const index_t b : {index_t{0}, index_t{3}, delta / 2, delta / 2 + 1, delta, length}) {
      CAPTURE(a);
      CAPTURE(b);
      const auto left = random_stream_of<T>(length, a, 1), right = random_stream_of<T>(length, b, 2);
      auto sum = left, reversed = right;
      sum.add(right);
      reversed.add(left);
      CHECK(same(sum, reversed));
      CHECK(sum.is_dense() == (a + b > delta));
      std::vector<T> wanted = elements_of(left);
      right.add_to(wanted);
      CHECK(elements_of(sum) == wanted);
    }
  }
}

TEST_CASE("sparse_stream: the bound counts common entries twice") {
  const std::vector<std::int32_t> indices = {0, 1, 2};
  const std::vector<float> values = {1, 2, 3};
  sparse_stream<float> six(12, indices, values), five(10, indices, values);
  six.add(six);
  CHECK_FALSE(six.is_dense());
  CHECK(six.count() == 3);
  five.add(five);
  CHECK(five.is_dense());
  CHECK(elements_of(five) == std::vector<float>{2, 4, 6, 0, 0, 0, 0, 0, 0, 0});
}

TEST_CASE("sparse_stream: explicit zeros stay, and a dense stream stays dense") {
  const std::vector<std::int32_t> one = {1}, three = {3};
  const std::vector<float> plus = {2.5F}, minus = {-2.5F}, zero = {0.0F};
  sparse_stream<float> sum(8, one, plus);
  sum.add(sparse_stream<float>(8, one, minus));
  sum.add(sparse_stream<float>(8, three, zero));
  REQUIRE(sum.count() == 2);
  CHECK(sum.indices()[0] == 1);
  CHECK(sum.indices()[1] == 3);
  CHECK(sum.values()[0] == 0.0F);
  auto dense = sparse_stream<float>::of_elements(std::vector<float>(8, 0.0F));
  dense.add(sum);
  CHECK(dense.is_dense());
  CHECK(dense.part(2, 8).is_dense());
  sum.add(dense);
  CHECK(sum.is_dense());
}

TEST_CASE("sparse_stream: what is no stream is refused") {
  using stream = sparse_stream<float>;
  const std::vector<float> two = {1, 2};
  const auto made = [&](index_t length, std::vector<std::int32_t> indices) {
    return stream(length, indices, two);
  };
  CHECK_NOTHROW(made(9, {0, 8}));
  CHECK_THROWS_AS(made(9, {1, 1}), value_error);
  CHECK_THROWS_AS(made(9, {2, 1}), value_error);
  CHECK_THROWS_AS(made(9, {-1, 1}), value_error);
  CHECK_THROWS_WITH(made(9, {1, 9}), doctest::Contains("index 9 after 1 of 9"));
  CHECK_THROWS_AS(made(9, {1}), shape_error);
  CHECK_THROWS_AS(stream(-1), value_error);
  CHECK_THROWS_WITH(stream(index_t{1} << 31), doctest::Contains("length 2147483648"));
  CHECK_NOTHROW(stream((index_t{1} << 31) - 1));

  const stream good = made(9, {0, 8});
  std::vector<std::byte> body(good.body_bytes());
  good.write_body(body);
  CHECK_NOTHROW(stream::from_body(9, good.header(), body));
  CHECK_THROWS_AS(stream::from_body(8, good.header(), body), value_error);  // index 8
  CHECK_THROWS_AS(stream::from_body(9, good.header(), std::span(body).first(15)), value_error);
  CHECK_THROWS_AS(stream::from_body(9, good.header() | 2U, body), value_error);
  CHECK_THROWS_AS(stream::from_body(9, std::uint64_t{5} << 32, std::vector<std::byte>(40)), value_error);
  CHECK_THROWS_AS(stream::from_body(9, std::uint64_t{8} << 32 | 1U, std::vector<std::byte>(32)), value_error);
  std::swap_ranges(body.begin(), body.begin() + 4, body.begin() + 4);
  CHECK_THROWS_AS(stream::from_body(9, good.header(), body), value_error);

  stream sum(9);
  CHECK_THROWS_AS(sum.add(stream(8)), shape_error);
  std::vector<float> shorter(8);
  CHECK_THROWS_AS(sum.add_to(shorter), shape_error);
  CHECK_THROWS_AS(sum.part(-1, 2), value_error);
  CHECK_THROWS_AS(sum.part(3, 2), value_error);
  CHECK_THROWS_AS(sum.part(3, 10), value_error);
}

}  // namespace
