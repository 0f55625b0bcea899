// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <clocale>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/record_line.hpp>

#include "../support/comma_locale.hpp"

using namespace pufferfish::detail;

namespace {

using limits = std::numeric_limits<double>;

const std::vector<double> numbers{0.0,
                                  -0.0,
                                  0.1,
                                  -1.5,
                                  1.0 / 3,
                                  1e-9,
                                  1e300,
                                  255.0,
                                  1e23,
                                  5e-324,
                                  limits::max(),
                                  limits::min(),
                                  limits::infinity(),
                                  -limits::infinity()};

bool same_bits(double a, double b) { return a == b && std::signbit(a) == std::signbit(b); }

TEST_CASE("numbers: each form reads back, with the same bits, and is printf's in the C locale") {
  char text[400];
  for (const double value : numbers) {
    CAPTURE(value);
    for (const std::string& form : {shortest_number(value), exact_number(value), hexadecimal_number(value)}) {
      CAPTURE(form);
      double back = 7.0;
      REQUIRE(read_number(form, back));
      CHECK(same_bits(back, value));
    }
    for (int digits = 15; digits <= 17; ++digits) {
      std::snprintf(text, sizeof text, "%.*g", digits, value);
      if (std::strtod(text, nullptr) == value) break;
    }
    CHECK(exact_number(value) == text);
    std::snprintf(text, sizeof text, "%.17g", value);  // as versions before wrote it
    CHECK(shorten_numbers("a " + std::string(text) + ", b") == "a " + exact_number(value) + ", b");
    std::snprintf(text, sizeof text, "%.3f", value);
    CHECK(fixed_number(value, 3) == text);
    std::snprintf(text, sizeof text, "%a", value);
    double back = 7.0;
    REQUIRE(read_number(text, back));  // checkpoints of earlier versions have these
    CHECK(same_bits(back, value));
  }
  double nan = 0.0;
  REQUIRE(read_number(hexadecimal_number(limits::quiet_NaN()), nan));
  CHECK(std::isnan(nan));
  for (const char* bad :
       {"", "-", "--1", "+1", "0x", "0x-1p0", "1,5", "1.5 ", " 1.5", "1.5x", "1e999", "0x1p9999"}) {
    CAPTURE(bad);
    double kept = 3.0;
    CHECK_FALSE(read_number(bad, kept));
    CHECK(kept == 3.0);
  }
}

TEST_CASE("numbers: a locale with a decimal comma changes nothing") {
  std::vector<std::string> before;
  const auto forms = [](double value) {
    return shortest_number(value) + " " + exact_number(value) + " " + hexadecimal_number(value) + " " +
           fixed_number(value, 2) + " " + message({value});
  };
  for (const double value : numbers) before.push_back(forms(value));
  const comma_locale comma;
  if (!comma.is_set()) {
    MESSAGE("skipped: no locale with a decimal comma, and localedef cannot build one");
    return;
  }
  char text[40];
  std::snprintf(text, sizeof text, "%.1f", 0.5);
  REQUIRE(std::string(text) == "0,5");  // else this test could not fail
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    CHECK(forms(numbers[i]) == before[i]);
    double back = 7.0;
    REQUIRE(read_number(hexadecimal_number(numbers[i]), back));
    CHECK(same_bits(back, numbers[i]));
  }
  CHECK(message({0.5}) == "0.5");
}

TEST_CASE("names: any bytes are one word of one line, plain ones as they are") {
  for (const char* plain : {"conv1", "layer1.0.conv2", "a:hidden", "\xc3\xa9t\xc3\xa9", "x_-+*/()[]{}'`,;"}) {
    CHECK(quote_word(plain) == plain);
  }
  CHECK(quote_word("") == "\"\"");
  CHECK(quote_word("a b") == "\"a b\"");
  CHECK(quote_word("a\nb") == "\"a\\x0ab\"");
  CHECK(quote_word("\"\\") == "\"\\\"\\\\\"");
  std::vector<std::string> hostile{"",         " ",       "a b",       "a\nb",  "\"",      "\\",
                                   "\\x41",    "a\" 3 4", "layer x 1", "\t",    "\r\n",    "\x7f",
                                   "\xff\xfe", "#",       "a  b ",     " lead", "\xc2\xa0"};
  hostile.emplace_back("a\0b", 3);
  std::string every;
  for (int byte = 0; byte < 256; ++byte) every += static_cast<char>(byte);
  hostile.push_back(every);
  for (const std::string& name : hostile) {
    const std::string word = quote_word(name);
    CHECK(word.find('\n') == std::string::npos);
    std::string back = "?", second;
    int number = 0;
    CHECK(record_line(word + " 12 " + word).read(back, number, second).complete());
    CHECK(back == name);
    CHECK(second == name);
    CHECK(number == 12);
  }
}

TEST_CASE("record lines: what is not asked for, out of range or left over makes the line incomplete") {
  int small = 0;
  std::int64_t large = 0;
  std::uint64_t word = 0;
  bool flag = false;
  double real = 0.0;
  std::string name;
  CHECK(record_line("-3 9223372036854775807 18446744073709551615 1 0x1.8p+1 x")
            .read(small, large, word, flag, real, name)
            .complete());
  CHECK(small == -3);
  CHECK(word == std::numeric_limits<std::uint64_t>::max());
  CHECK(flag);
  CHECK(real == 3.0);
  for (const char* bad : {"", " 1", "1 ", "1  ", "1x", "x", "+1", "99999999999", "0x10", "1.0", "\"1\""}) {
    CAPTURE(bad);
    CHECK_FALSE(record_line(bad).read(small).complete());
  }
  for (const char* bad :
       {"", "\"", "\"a", "\"a\"b", "\"\\", "\"\\\"", "\"\\x4\"", "\"\\xg0\"", "\"\\n\"", "a b"}) {
    CAPTURE(bad);
    CHECK_FALSE(record_line(bad).read(name).complete());
  }
  CHECK_FALSE(record_line("9223372036854775808").read(large).complete());
  CHECK_FALSE(record_line("-1").read(word).complete());
  CHECK_FALSE(record_line("2").read(flag).complete());
  CHECK_FALSE(record_line("1").read(small, small).complete());
}

}  // namespace
