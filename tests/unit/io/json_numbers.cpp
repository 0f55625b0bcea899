// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <limits>
#include <string>

#include <doctest/doctest.h>

#include <pufferfish/io/json_numbers.hpp>

using namespace pufferfish;
using namespace io_test;

TEST_CASE("json_numbers: round trips keep order, names and numbers") {
  const named_numbers pairs{{"layer1.0.conv2", 16},
                            {"a \"quoted\" \\ name\n", 0},
                            {"", 1},
                            {"\xc3\xa9", std::numeric_limits<index_t>::max()}};
  CHECK(parse_json_numbers(encode_json_numbers(pairs, "t"), "t") == pairs);
  CHECK(encode_json_numbers({}, "t") == "{}");
  CHECK(parse_json_numbers("{}", "t").empty());
  CHECK(encode_json_numbers({{"a", 1}, {"b", 2}}, "t") == "{\"a\":1,\"b\":2}");
  CHECK(parse_json_numbers("{ \"b\" : 2 , \"a\" : 1 }", "t") == named_numbers{{"b", 2}, {"a", 1}});
  CHECK(mentions(io_error_of([] { encode_json_numbers({{"\xff", 1}}, "file 7"); }), "file 7"));
}

TEST_CASE("json_numbers: anything else is refused, naming the place") {
  const std::string nul("{\"a\":1}\0", 8);
  for (const std::string& bad : {std::string(),
                                 std::string("{"),
                                 std::string("[]"),
                                 std::string("3"),
                                 std::string(" {}"),
                                 std::string("{\"a\"}"),
                                 std::string("{\"a\":}"),
                                 std::string("{\"a\":-1}"),
                                 std::string("{\"a\":1.0}"),
                                 std::string("{\"a\":9223372036854775808}"),
                                 std::string("{\"a\":99999999999999999999}"),
                                 std::string("{\"a\":true}"),
                                 std::string("{\"a\":null}"),
                                 std::string("{\"a\":\"1\"}"),
                                 std::string("{\"a\":[1]}"),
                                 std::string("{\"a\":{}}"),
                                 std::string("{\"a\":1,\"a\":2}"),
                                 std::string("{\"a\":1}{}"),
                                 std::string("{\"\xff\":1}"),
                                 nul}) {
    CAPTURE(bad);
    CHECK(mentions(io_error_of([&] { parse_json_numbers(bad, "the list"); }), "the list"));
  }
  // Deep nesting is refused at its first level.
  const std::string deep = "{\"a\":" + std::string(200000, '[');
  CHECK(mentions(io_error_of([&] { parse_json_numbers(deep, "x"); }), "array"));
  const std::string good = "{\"layer\":12,\"other\":3}";
  CHECK(accepted_prefixes(to_bytes(good), [](const bytes& b) { parse_json_numbers(to_text(b), "x"); }) == 0);
}
