// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../../../../examples/text/tokenizer.hpp"
#include "../../../../examples/text/detokenizer.hpp"
#include "../../../../examples/text/lines.hpp"
#include "../../support/io_support.hpp"
#include "../../support/real_data.hpp"

#include <doctest/doctest.h>

using namespace examples;
using namespace io_test;

namespace {

std::string english(std::string_view text) { return tokenizer().line(text); }
std::string german(std::string_view text) { return tokenizer({.of = language::german}).line(text); }

/// Without white space, and without '@', which joints have around them.
std::string bare(std::string_view text) {
  std::u32string result;
  for (const char32_t c : decode_utf8(text)) {
    if (class_of(c) != char_class::space && c != '@') result += c;
  }
  return encode_utf8(result);
}

std::string around(std::string_view text, language of) { return detokenize(tokenizer({.of = of})(text), of); }

std::string random_text(std::mt19937& random) {
  static const std::vector<std::string> parts{"a",        "B",    "word",     "Ärger",
                                              "don't",    "it's", "1",        "42",
                                              "3.5",      ".",    ",",        "!",
                                              "?",        "...",  "-",        "--",
                                              "'",        "\"",   "(",        ")",
                                              "„",        "“",    "’",        "/",
                                              "@",        "#",    "&",        "%",
                                              "$",        "€",    "z",        "U.",
                                              "S.",       "Dr.",  " ",        " ",
                                              "  ",       "\t",   "_",        ":",
                                              ";",        "😀",    "\xcc\x81", "\xe2\x80\x8d",
                                              "中",       "n't",  "'s",       "www.",
                                              "x.de",     "@-@",  "é",        "\xc2\xa0",
                                              "\xc2\xad", "–",    "...."};
  std::string text;
  for (auto i = random() % 12; i > 0; --i) text += parts[random() % parts.size()];
  return text;
}

}  // namespace

TEST_CASE("English") {
  struct row {
    const char *text, *tokens;
  };
  for (const row& r : {
           row{"", ""},
           {" \t\n ", ""},
           {"Hello", "Hello"},
           {"Hello, world!", "Hello , world !"},
           {"Two men, one dog; they run.", "Two men , one dog ; they run ."},
           {"I don't, can't, won’t.", "I do n't , ca n't , wo n’t ."},
           {"It's the dogs' owner's", "It 's the dogs ' owner 's"},
           {"they'd've I'm we'll you're", "they 'd 've I 'm we 'll you 're"},
           {"o'clock O'Neil rock'n'roll", "o'clock O'Neil rock'n'roll"},
           {"the 1990's", "the 1990 's"},
           {"a T-shirt and a 20-year-old", "a T @-@ shirt and a 20 @-@ year @-@ old"},
           {"black/white, and/or", "black @/@ white , and @/@ or"},
           {"a man - tall -- runs---off", "a man - tall -- runs --- off"},
           {"1,000.50 at 10:30, 24/7, 1/2", "1,000.50 at 10:30 , 24/7 , 1/2"},
           {"Mr. Smith and Dr. J. R. Jones, etc.", "Mr. Smith and Dr. J. R. Jones , etc."},
           {"in the U.S. and the U.S.A., e.g. here", "in the U.S. and the U.S.A. , e.g. here"},
           {"This is plan B.", "This is plan B ."},
           {"He said \"no\".", "He said \" no \" ."},
           {"'quoted'", "' quoted '"},
           {"wait... what?!", "wait ... what ? !"},
           {"x.n't", "x.n't"},
           {"word.Another (in brackets)", "word . Another ( in brackets )"},
           {"$5.00, 50% of £3", "$ 5.00 , 50 % of £ 3"},
           {"R&B by AT&T & co", "R&B by AT&T & co"},
           {"see www.example.com, or http://x.org/a?b=c.", "see www.example.com , or http://x.org/a?b=c ."},
           {"mail me.too@mail.example.org!", "mail me.too@mail.example.org !"},
           {"#tag @name, 5 @ 3 #1", "#tag @name , 5 @ 3 # 1"},
           {"snake_case x_1", "snake_case x_1"},
           {".5 -5 1990–1995", ".5 -5 1990 @–@ 1995"},
           {"“curly” ‘quotes’", "“ curly ” ‘ quotes ’"},
           {"cafe\xcc\x81 co\xc2\xadop", "cafe\xcc\x81 co\xc2\xadop"},
           {"👍🏽 👩\xe2\x80\x8d🔬!", "👍 🏽 👩\xe2\x80\x8d🔬 !"},
           {"中文 字", "中文 字"},
           {"a\xc2\xa0"
            "b",
            "a b"},
           {"it 's @-@ n't", "it 's @-@ n't"},
       }) {
    CHECK(english(r.text) == r.tokens);
  }
}

TEST_CASE("German") {
  struct row {
    const char *text, *tokens;
  };
  for (const row& r : {
           row{"Zwei junge Männer, im Freien.", "Zwei junge Männer , im Freien ."},
           {"z.B. am 3. Mai, d.h. bald usw.", "z.B. am 3. Mai , d.h. bald usw."},
           {"Er wurde 1990. Dann kam Nr. 5.", "Er wurde 1990 . Dann kam Nr. 5 ."},
           {"Damen- und Herrenrad", "Damen- und Herrenrad"},
           {"ein rot-weißes T-Shirt", "ein rot @-@ weißes T @-@ Shirt"},
           {"ein „Stop“-Schild", "ein „ Stop “ @-@ Schild"},
           {"Gitarre-, Banjo- und -helm", "Gitarre- , Banjo- und -helm"},
           {"Wie geht's? So'n Tag", "Wie geht 's ? So'n Tag"},
           {"1.000,50 € um 10.30 Uhr", "1.000,50 € um 10.30 Uhr"},
           {"Straßen, ÄÖÜ!", "Straßen , ÄÖÜ !"},
       }) {
    CHECK(german(r.text) == r.tokens);
  }
  CHECK(english("am 3. Mai") == "am 3 . Mai");
}

TEST_CASE("lower case") {
  CHECK(tokenizer({.lower_case = true}).line("Mr. Smith's T-SHIRT, ÄÖ") == "mr. smith 's t @-@ shirt , äö");
}

TEST_CASE("text that is not UTF-8 is refused") {
  CHECK_THROWS_WITH_AS(tokenizer()("ab \xff"), "text is not UTF-8 at its byte 3", value_error);
  CHECK_THROWS_AS(detokenize(std::vector<std::string>{"\xff"}, language::english), value_error);
}

TEST_CASE("nothing but white space is lost, and tokens give themselves again: random text") {
  std::mt19937 random(3);
  for (int round = 0; round < 20000; ++round) {
    const std::string text = random_text(random);
    for (const language of : {language::english, language::german}) {
      const tokenizer cut({.of = of});
      const std::vector<std::string> tokens = cut(text);
      CAPTURE(text);
      REQUIRE(bare(cut.line(text)) == bare(text));
      for (const std::string& token : tokens) {
        REQUIRE_FALSE(token.empty());
        REQUIRE(split_words(token).size() == 1);
      }
      (void)detokenize(tokens, of);
    }
  }
}

TEST_CASE("gigantic chunks take linear time") {
  for (const std::string part :
       {"a", "a-", "-", ".", "a@", "a.", "'s", "1,", "@", "\xcc\x81", "a's", "n't", "#a", "z.n't ", "://"}) {
    std::string text;
    while (text.size() < 1000000) text += part;
    const std::vector<std::string> tokens = tokenizer()(text);
    CHECK_FALSE(tokens.empty());
  }
}

TEST_CASE("detokenize") {
  for (const char* text :
       {"Hello, world!", "He said \"no\" (twice).", "I don't know: it's the dogs' owner's.",
        "a T-shirt, black/white", "$5 or 50% of it...", "wait - what?", "“curly” quotes", "'single' ones",
        "in 1990–1995"}) {
    CHECK(around(text, language::english) == text);
  }
  for (const char* text :
       {"ein „Stop“-Schild, z.B. am 3. Mai.", "Damen- und Herrenrad", "»so« oder so", "Wie geht's?"}) {
    CHECK(around(text, language::german) == text);
  }
  using strings = std::vector<std::string>;
  CHECK(detokenize(strings{}, language::english).empty());
  CHECK(detokenize(strings{"", "a", ""}, language::english) == "a");
  CHECK(detokenize(strings{"1", "@,@", "000", "@.@", "5"}, language::english) == "1,000.5");
  CHECK(detokenize(strings{",", "\"", "(", "@-@"}, language::english) == ", \"(-");
}

TEST_CASE("Multi30k goes there and back") {
  const std::string folder = real_data("multi30k", "val.de");
  if (folder.empty()) return;
  for (const language of : {language::english, language::german}) {
    const std::string path = folder + (of == language::english ? "/val.en" : "/val.de");
    const std::vector<std::string> lines =
        read_lines(pufferfish::detail::is_regular_file(path) ? path : path + ".gz");
    int same = 0;
    for (const std::string& line : lines) {
      const tokenizer cut({.of = of});
      const std::string tokens = cut.line(line);
      CHECK(cut.line(tokens) == tokens);
      same += detokenize(cut(line), of) == line ? 1 : 0;
    }
    CHECK(lines.size() == 1014);
    CHECK(same >= 1000);
  }
}
