// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <filesystem>
#include <pufferfish/core/error.hpp>
#include <pufferfish/io/file.hpp>
#include <pufferfish/io/image_folder.hpp>
#include <string>
#include <vector>

#include "../support/scratch_folder.hpp"

namespace {

using namespace pufferfish;

TEST_CASE("image folder: classes and files have the order of their names, and other files are left out") {
  const scratch_folder place;
  for (const char* name : {"b", "a/deeper", ".hidden"}) std::filesystem::create_directories(place / name);
  for (const char* name :
       {"b/2.jpg", "b/10.JPG", "a/x.jpeg", "a/notes.txt", "a/.jpg", "a/deeper/y.jpg", "z.jpg"}) {
    write_file_atomically(place / name, {});
  }
  const image_folder found = list_image_folder(place.path());
  CHECK(found.classes == std::vector<std::string>{"a", "b"});
  CHECK(found.files == std::vector<std::string>{"a/x.jpeg", "b/10.JPG", "b/2.jpg"});
  CHECK(found.labels == std::vector<std::int32_t>{0, 1, 1});
  CHECK(read_file(found.path(2)).empty());
}

TEST_CASE("image folder: a missing folder, one without classes and an empty class are refused by name") {
  const scratch_folder place;
  CHECK_THROWS_WITH_AS(list_image_folder(place / "nowhere"), doctest::Contains("nowhere: cannot list"),
                       io_error);
  CHECK_THROWS_WITH_AS(list_image_folder(place.path()), doctest::Contains("no folder below it"), io_error);
  std::filesystem::create_directory(place / "empty");
  write_file_atomically(place / "empty/a.png", {});
  CHECK_THROWS_WITH_AS(list_image_folder(place.path()),
                       doctest::Contains("empty: no file whose name ends in .jpg or .jpeg"), io_error);
}

}  // namespace
