// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <pufferfish/core/config.hpp>
#include <string>

TEST_CASE("version: the header, its numbers and the build system agree") {
  const std::string numbers = std::to_string(PUFFERFISH_VERSION_MAJOR) + "." +
                              std::to_string(PUFFERFISH_VERSION_MINOR) + "." +
                              std::to_string(PUFFERFISH_VERSION_PATCH);
  CHECK(numbers == PUFFERFISH_VERSION_STRING);
  CHECK(numbers == PUFFERFISH_MESON_VERSION);
  CHECK(PUFFERFISH_VERSION ==
        PUFFERFISH_VERSION_MAJOR * 10000 + PUFFERFISH_VERSION_MINOR * 100 + PUFFERFISH_VERSION_PATCH);
}

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

TEST_CASE("version: the ABI namespace carries version and assertion level") {
  const std::string name = TEXT(PUFFERFISH_ABI_NAMESPACE);
  const std::string start = "v" + std::to_string(PUFFERFISH_VERSION_MAJOR) + "_" +
                            std::to_string(PUFFERFISH_VERSION_MINOR) + "_a" +
                            std::to_string(PUFFERFISH_ASSERT_LEVEL) + "_";
  CHECK(name.substr(0, start.size()) == start);
  CHECK(name.size() > start.size());
}
