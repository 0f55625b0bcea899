// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <string>

#include <doctest/doctest.h>

#include "../../../../examples/text/unicode.hpp"

using namespace examples;

TEST_CASE("code points go to UTF-8 and back, all of them") {
  std::u32string all;
  for (char32_t c = 0; c <= 0x10ffff; ++c) {
    if (c < 0xd800 || c > 0xdfff) all += c;
  }
  const std::string text = encode_utf8(all);
  CHECK(text.size() == 0x80 + 2 * 0x780 + 3 * (0xf800 - 0x800) + 4 * 0x100000);
  CHECK(first_invalid_utf8(text) == text.size());
  CHECK(decode_utf8(text) == all);
}

TEST_CASE("what is no code point becomes the replacement character; bad UTF-8 is refused") {
  for (const char32_t c : {U'\xd800', U'\xdfff', static_cast<char32_t>(0x110000)}) {
    std::string text;
    append_utf8(text, c);
    CHECK(text == "\xef\xbf\xbd");
  }
  CHECK_THROWS_WITH_AS(decode_utf8("ab\xff"), "text is not UTF-8 at its byte 2", value_error);
  CHECK_THROWS_AS(to_lower("\xc3"), value_error);
}

TEST_CASE("classes") {
  struct row {
    char32_t code;
    char_class of;
  };
  for (const row& r : {row{U'a', char_class::letter},     {U'Z', char_class::letter},
                       {0xdf, char_class::letter},        {0x4e2d, char_class::letter},
                       {0x301, char_class::mark},         {U'0', char_class::number},
                       {0xbd, char_class::number},        {0x664, char_class::number},
                       {U'.', char_class::punctuation},   {0x2014, char_class::punctuation},
                       {0x201e, char_class::punctuation}, {U'$', char_class::symbol},
                       {0x20ac, char_class::symbol},      {0x1f600, char_class::symbol},
                       {U' ', char_class::space},         {U'\t', char_class::space},
                       {U'\n', char_class::space},        {0xa0, char_class::space},
                       {0x3000, char_class::space},       {0, char_class::control},
                       {0x7f, char_class::control},       {0xfeff, char_class::control},
                       {0x10ffff, char_class::control},   {0x110000, char_class::control}}) {
    CAPTURE(static_cast<std::uint32_t>(r.code));
    CHECK(class_of(r.code) == r.of);
  }
  // As many as Python's unicodedata counts.
  int letters = 0, symbols = 0;
  for (char32_t c = 0; c < 0x100; ++c) letters += class_of(c) == char_class::letter ? 1 : 0;
  for (char32_t c = 0; c < 0x100; ++c) symbols += class_of(c) == char_class::symbol ? 1 : 0;
  CHECK(letters == 117);
  CHECK(symbols == 25);
}

TEST_CASE("lower case") {
  CHECK(to_lower("") == "");
  CHECK(to_lower("Hello, WORLD 123 [Z]") == "hello, world 123 [z]");
  CHECK(to_lower("ÄÖÜ ẞ ß ÉÀ Ñ") == "äöü ß ß éà ñ");
  CHECK(to_lower("ΑΒΓ Я Ж Ա Ǆ Ÿ") == "αβγ я ж ա ǆ ÿ");
  CHECK(to_lower("İ") == "i\xcc\x87");
  CHECK(to_lower("ΟΔΟΣ Σ ΣΑΣ ΑΣ\xcc\x81 Α.Σ Α.ΣΑ") == "οδος σ σας ας\xcc\x81 α.ς α.σα");
  CHECK(lower_case(0x10400) == 0x10428);
  CHECK(lower_case(0x101) == 0x101);
  CHECK(lower_case(0x100) == 0x101);
  CHECK(lower_case(0x10ffff) == 0x10ffff);
  CHECK(is_upper_case(U'A'));
  CHECK(is_upper_case(0x130));
  CHECK_FALSE(is_upper_case(U'a'));
  CHECK_FALSE(is_upper_case(U'1'));
  int changed = 0;
  for (char32_t c = 0; c <= 0x10ffff; ++c) changed += lower_case(c) != c ? 1 : 0;
  CHECK(changed == 1432);  // as many as Python's str.lower changes to one other code point
}
