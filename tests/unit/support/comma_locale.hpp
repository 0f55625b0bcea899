// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <clocale>
#include <cstdlib>
#include <string>

#include "scratch_folder.hpp"

/// While an object of it lives, the process has a locale whose decimal separator is a comma, if the machine
/// has one or can build one.
class comma_locale {
 public:
  comma_locale() {
    for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "de_DE", "fr_FR.UTF-8"}) {
      if (set(name)) return;
    }
    const std::string command =
        "localedef -i de_DE -f UTF-8 '" + (folder_ / "de_DE.UTF-8") + "' > /dev/null 2>&1";
    if (std::system(command.c_str()) != 0) return;
    ::setenv("LOCPATH", folder_.path().c_str(), 1);
    set("de_DE.UTF-8");
  }
  comma_locale(const comma_locale&) = delete;
  comma_locale& operator=(const comma_locale&) = delete;
  ~comma_locale() {
    std::setlocale(LC_ALL, "C");
    ::unsetenv("LOCPATH");
  }
  bool is_set() const { return set_; }

 private:
  bool set(const char* name) {
    set_ = std::setlocale(LC_ALL, name) != nullptr && std::string(std::localeconv()->decimal_point) == ",";
    return set_;
  }

  scratch_folder folder_;
  bool set_ = false;
};
