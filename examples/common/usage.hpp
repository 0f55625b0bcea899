// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Command lines of programs that have no options of their own. Needs only the standard library.

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

namespace examples {

/// Checks the command line of a program that takes up to `most` arguments and the option --help. Empty if the
/// program should run. Otherwise the usage was printed, and the value is the exit status: 0 after --help, 2
/// after an unknown option or too many arguments. `arguments` is printed directly after the program's
/// name.
inline std::optional<int> usage_shown(int argc, char** argv, int most, const char* arguments) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  const bool help = argc == 2 && (first == "--help" || first == "-h");
  if (!help && argc - 1 <= most && first.substr(0, 1) != "-") return {};
  const std::string_view path = argc > 0 ? argv[0] : "";
  const std::string program(path.substr(path.rfind('/') + 1));
  std::fprintf(help ? stdout : stderr, "usage: %s%s\n", program.c_str(), arguments);
  return help ? 0 : 2;
}

}  // namespace examples
