// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the rows of the table of kernel choices (kernel_choice.hpp) and the files that store them. POSIX
/// only. A file is text, with one row a line:
///
/// \code
/// # operation | type | shape | threads | instruction set | chosen | milliseconds, built-in choice first
/// conv_forward | float | convolution 64 -> 64, ... | 2 | avx512 | direct sums | Winograd tiles: 2.1; ...
/// \endcode
///
/// Lines that are empty or begin with # are comments. The last field may be left out.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The arguments of a choice among algorithms: equal keys have equal choices.
struct kernel_key {
  std::string operation;  ///< "conv_forward", "conv_backward_input" or "conv_backward_weight"
  std::string type;       ///< "float", "double" or "bfloat16"
  std::string shape;      ///< as the kernel report prints it, and what else limits the choice
  int threads = 1;        ///< threads of the context
  std::string isa;        ///< name of the instruction set, as the kernel report prints it
  friend bool operator==(const kernel_key&, const kernel_key&) = default;
  friend bool operator<(const kernel_key& a, const kernel_key& b) {
    return std::tie(a.operation, a.type, a.shape, a.threads, a.isa) <
           std::tie(b.operation, b.type, b.shape, b.threads, b.isa);
  }
};

/// The measured time of one algorithm.
struct kernel_time {
  std::string algorithm;
  double milliseconds = 0.0;
};

/// A row of the table of kernel choices.
struct kernel_choice {
  std::string chosen;              ///< name of the algorithm, as the kernel report prints it
  std::vector<kernel_time> times;  ///< of all candidates, the built-in choice first; empty if not measured
  std::string source;              ///< "PATH:LINE" of a row that was read from a file, else empty
};

namespace detail {

/// The algorithms among which operations choose; names: kernel_algorithm_names.
enum class kernel_algorithm : unsigned char {
  winograd,
  few_pixels,
  joined_lines,
  direct,
  thin,
  copied_pixels,
  pairs,
  widened,
  depthwise,
  group_blocks
};

/// Names of the algorithms in reports and tables, in the order of kernel_algorithm.
inline constexpr std::array<std::string_view, 10> kernel_algorithm_names{
    "Winograd tiles",
    "few pixels, weight read in place",
    "direct sums, images as one line",
    "direct sums",
    "kernel elements as rows of one product",
    "product of copied pixels",
    "direct sums of pairs",
    "widened to float",
    "depthwise sums",
    "blocks of groups"};

/// Name of an algorithm.
constexpr const char* algorithm_name(kernel_algorithm algorithm) {
  return kernel_algorithm_names[static_cast<std::size_t>(algorithm)].data();
}

/// The operations that ask the table.
inline constexpr std::array<std::string_view, 3> choosing_operations{"conv_forward", "conv_backward_input",
                                                                     "conv_backward_weight"};

/// A table: one row for each key.
using kernel_choice_rows = std::map<kernel_key, kernel_choice>;

/// True if `text` is an element of `list`.
template <class List>
bool is_one_of(const List& list, std::string_view text) {
  for (const std::string_view item : list) {
    if (item == text) return true;
  }
  return false;
}

/// The parts of a text between separators.
PUFFERFISH_COLD inline std::vector<std::string_view> split_text(std::string_view text,
                                                                std::string_view separator) {
  std::vector<std::string_view> parts;
  for (std::size_t end = 0; (end = text.find(separator)) != text.npos;) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + separator.size());
  }
  parts.push_back(text);
  return parts;
}

/// A row as a line of a file, with its end.
PUFFERFISH_COLD inline std::string kernel_choice_line(const kernel_key& key, const kernel_choice& choice) {
  std::string line = message({key.operation, " | ", key.type, " | ", key.shape, " | ", key.threads, " | ",
                              key.isa, " | ", choice.chosen});
  const char* before = " | ";
  for (const kernel_time& time : choice.times) {
    line += message({before, time.algorithm, ": ", time.milliseconds});
    before = "; ";
  }
  return line + "\n";
}

/// Adds the row of a line to `rows`; `source`: "PATH:LINE". Throws io_error, with the source in its text, if
/// the line has another form, names an unknown operation, type or algorithm, or repeats a key.
PUFFERFISH_COLD inline void read_kernel_choice(std::string_view line, const std::string& source,
                                               kernel_choice_rows& rows) {
  const std::vector<std::string_view> fields = split_text(line, " | ");
  const auto refuse = [&](std::string_view what, std::string_view text) {
    throw_error<io_error>({source, ": ", what, " '", text, "'"});
  };
  if (fields.size() != 6 && fields.size() != 7) refuse("not a row of a table of kernel choices:", line);
  if (!is_one_of(choosing_operations, fields[0])) refuse("unknown operation", fields[0]);
  constexpr std::array<std::string_view, 3> types{"float", "double", "bfloat16"};
  if (!is_one_of(types, fields[1])) refuse("unknown type", fields[1]);
  if (fields[2].empty()) refuse("no shape in the row", line);
  int threads = 0;
  const auto [end, problem] = std::from_chars(fields[3].data(), fields[3].data() + fields[3].size(), threads);
  if (problem != std::errc() || end != fields[3].data() + fields[3].size() || threads < 1) {
    refuse("not a number of threads:", fields[3]);
  }
  if (fields[4].empty()) refuse("no instruction set in the row", line);
  if (!is_one_of(kernel_algorithm_names, fields[5])) refuse("unknown algorithm", fields[5]);
  kernel_choice choice{std::string(fields[5]), {}, source};
  if (fields.size() == 7) {
    for (const std::string_view item : split_text(fields[6], "; ")) {
      const std::size_t name = item.find(": ");
      double milliseconds = 0.0;
      if (name == item.npos || !read_number(item.substr(name + 2), milliseconds)) {
        refuse("not a name and a time:", item);
      }
      if (!is_one_of(kernel_algorithm_names, item.substr(0, name))) {
        refuse("unknown algorithm", item.substr(0, name));
      }
      choice.times.push_back({std::string(item.substr(0, name)), milliseconds});
    }
  }
  kernel_key key{std::string(fields[0]), std::string(fields[1]), std::string(fields[2]), threads,
                 std::string(fields[4])};
  if (!rows.emplace(std::move(key), std::move(choice)).second) refuse("a second row for", line);
}

/// Throws io_error with the path, `what` and the system's reason in errno.
[[noreturn]] PUFFERFISH_COLD inline void throw_choice_file_error(const std::string& path, const char* what) {
  throw_error<io_error>({path, ": ", what, ": ", std::generic_category().message(errno)});
}

/// The rows of a file; no rows if `may_be_missing` and the file does not exist. Throws io_error if the file
/// cannot be read or a line is refused (read_kernel_choice).
PUFFERFISH_COLD inline kernel_choice_rows read_kernel_choices(const std::string& path, bool may_be_missing) {
  kernel_choice_rows rows;
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) {
    if (may_be_missing && errno == ENOENT) return rows;
    throw_choice_file_error(path, "cannot open the table of kernel choices");
  }
  std::string text;
  char part[4096];
  for (std::size_t count = 0; (count = std::fread(part, 1, sizeof part, file)) > 0;) text.append(part, count);
  const bool failed = std::ferror(file) != 0;
  const int reason = errno;
  std::fclose(file);
  errno = reason;
  if (failed) throw_choice_file_error(path, "cannot read the table of kernel choices");
  long long number = 0;
  for (const std::string_view line : split_text(text, "\n")) {
    ++number;
    if (line.empty() || line.front() == '#') continue;
    read_kernel_choice(line, message({path, ":", number}), rows);
  }
  return rows;
}

/// Adds rows to a file in one step: a reader sees the old rows or the old and the new ones. Rows of the file
/// with other keys are kept, those with the same keys are replaced. A lock ("PATH.lock") lets one process at
/// a time do so, so that no rows of another process are lost. Throws io_error.
PUFFERFISH_COLD inline void add_to_kernel_choice_file(const std::string& path,
                                                      const kernel_choice_rows& rows) {
  struct file_lock {
    int fd;
    ~file_lock() {
      if (fd >= 0) ::close(fd);
    }
  };
  const file_lock lock{::open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)};
  if (lock.fd < 0) throw_choice_file_error(path + ".lock", "cannot create");
  while (::flock(lock.fd, LOCK_EX) != 0) {
    if (errno != EINTR) throw_choice_file_error(path + ".lock", "cannot lock");
  }
  kernel_choice_rows all = read_kernel_choices(path, true);
  for (const auto& [key, choice] : rows) all.insert_or_assign(key, choice);
  std::string text =
      "# operation | type | shape | threads | instruction set | chosen | milliseconds, built-in choice "
      "first\n";
  for (const auto& [key, choice] : all) text += kernel_choice_line(key, choice);
  const std::string temporary = path + ".tmp";  // of the process that holds the lock
  std::FILE* const file = std::fopen(temporary.c_str(), "we");
  if (file == nullptr) throw_choice_file_error(temporary, "cannot create");
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed || ::rename(temporary.c_str(), path.c_str()) != 0) {
    const int reason = errno;
    ::unlink(temporary.c_str());
    errno = reason;
    throw_choice_file_error(path, "cannot write the table of kernel choices");
  }
}

/// Name of this machine's processor for a file name: letters, digits and single '-', from the line `model
/// name` (x86) or `CPU part` (aarch64) of /proc/cpuinfo, or "unknown".
PUFFERFISH_COLD inline std::string processor_file_name() {
  std::string text, name;
  if (std::FILE* const file = std::fopen("/proc/cpuinfo", "re")) {
    char part[4096];
    text.append(part, std::fread(part, 1, sizeof part, file));
    std::fclose(file);
  }
  for (const std::string_view line : split_text(text, "\n")) {
    if (!name.empty() || (!line.starts_with("model name") && !line.starts_with("CPU part"))) continue;
    for (const char c : line.substr(std::min(line.size(), line.find(':') + 1))) {
      const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
      if (plain) name += c;
      if (!plain && !name.empty() && name.back() != '-') name += '-';
    }
  }
  while (!name.empty() && name.back() == '-') name.pop_back();
  return name.empty() ? "unknown" : name;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
