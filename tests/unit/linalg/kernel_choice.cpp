// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The table of kernel choices and its files; tests/unit/ops/conv/conv_choice.cpp has the operations that ask
// it.
#include <pufferfish/linalg/kernel_choice.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include <doctest/doctest.h>

#include "../support/child_process.hpp"
#include "../support/scratch_folder.hpp"

namespace {
using namespace pufferfish;
using detail::kernel_algorithm;

void write_text(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Text of the Error that f throws, or "" if it throws none.
template <class Error, class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const Error& failure) {
    return failure.what();
  }
  return "";
}

/// What choose_kernel chooses among direct sums (the rule) and Winograd tiles for a shape on 2 threads, and
/// the runs of each candidate. A run of direct sums takes `direct_ms`.
struct outcome {
  kernel_algorithm chosen;
  std::map<kernel_algorithm, int> runs;
};
outcome choose(const std::string& shape, double direct_ms = 0.0) {
  outcome result{};
  const auto candidates = [] {
    return std::vector<kernel_algorithm>{kernel_algorithm::winograd, kernel_algorithm::direct};
  };
  result.chosen = detail::choose_kernel<float>(
      "conv_forward", 2, kernel_algorithm::direct, candidates, [&] { return shape; },
      [] { return std::string(); },
      [&](kernel_algorithm algorithm) {
        ++result.runs[algorithm];
        using clock = std::chrono::steady_clock;
        const auto begin = clock::now();
        const double ms = algorithm == kernel_algorithm::direct ? direct_ms : 0.5;
        while (std::chrono::duration<double, std::milli>(clock::now() - begin).count() < ms) continue;
      });
  return result;
}

kernel_key key_of(const std::string& shape) {
  return {"conv_forward", "float", shape, 2, detail::kernel_name()};
}

/// Restores the rules at the end of a test.
struct builtin_afterwards {
  ~builtin_afterwards() { kernel_choices::builtin(); }
};

TEST_CASE("kernel choices: the rules choose unless a table has a row, and nothing is run then") {
  const builtin_afterwards restore;
  kernel_choices::builtin();
  CHECK_FALSE(detail::asks_kernel_table());
  CHECK(choose("a").chosen == kernel_algorithm::direct);
  kernel_choices::choose(key_of("a"), "Winograd tiles");
  CHECK(choose("a").chosen == kernel_algorithm::winograd);
  CHECK(choose("a").runs.empty());
  CHECK(choose("b").chosen == kernel_algorithm::direct);
  CHECK(choose("b").runs.empty());
  kernel_choices::builtin();
  CHECK(choose("a").chosen == kernel_algorithm::direct);
}

TEST_CASE("kernel choices: algorithms that cannot compute the operation, or do not exist, are refused") {
  const builtin_afterwards restore;
  kernel_choices::builtin();
  kernel_choices::choose(key_of("a"), "direct sums of pairs");
  CHECK(error_of<value_error>([] { choose("a"); }) ==
        "conv_forward<float>, a: the algorithm 'direct sums of pairs' cannot compute it; possible: 'direct "
        "sums', 'Winograd tiles'");
  CHECK(error_of<value_error>([] { kernel_choices::choose(key_of("a"), "magic"); }) ==
        "kernel_choices: unknown algorithm 'magic'");
}

TEST_CASE("kernel choices: measuring runs each candidate at the first use and keeps the faster one") {
  const builtin_afterwards restore;
  kernel_choices::measure();
  const outcome slow = choose("slow", 2.0), again = choose("slow", 0.0);
  CHECK(slow.chosen == kernel_algorithm::winograd);
  CHECK(slow.runs.at(kernel_algorithm::direct) >= 4);
  CHECK(slow.runs.at(kernel_algorithm::winograd) == slow.runs.at(kernel_algorithm::direct));
  CHECK(again.chosen == kernel_algorithm::winograd);
  CHECK(again.runs.empty());
  CHECK(choose("fast", 0.1).chosen == kernel_algorithm::direct);
  const auto rows = kernel_choices::rows();
  REQUIRE(rows.size() == 2);
  const kernel_choice& row = rows.at(key_of("slow"));
  CHECK(row.chosen == "Winograd tiles");
  REQUIRE(row.times.size() == 2);
  CHECK(row.times[0].algorithm == "direct sums");  // the rule's choice is first
  CHECK(row.times[0].milliseconds >= 2.0);
  CHECK(row.times[1].milliseconds >= 0.5);
  CHECK(row.times[1].milliseconds < row.times[0].milliseconds);
}

TEST_CASE("kernel choices: a measurement enters no row in a table that has replaced its own") {
  kernel_choices::measure();
  int runs = 0;
  const auto chosen = detail::choose_kernel<float>(
      "conv_forward", 2, kernel_algorithm::direct,
      [] {
        return std::vector<kernel_algorithm>{kernel_algorithm::winograd, kernel_algorithm::direct};
      },
      [] { return std::string("replaced"); }, [] { return std::string(); },
      [&](kernel_algorithm) {
        if (++runs == 1) kernel_choices::builtin();
      });
  CHECK(chosen == kernel_algorithm::direct);
  CHECK(runs > 1);
  CHECK(kernel_choices::rows().empty());
}

TEST_CASE("kernel choices: a table that is saved and loaded chooses alike") {
  const builtin_afterwards restore;
  const scratch_folder folder;
  const std::string path = folder / "table.txt";
  kernel_choices::measure();
  choose("convolution 3 -> 4, input [1 x 2 x 3 x 3]", 2.0);
  choose("b", 0.1);
  const auto before = kernel_choices::rows();
  kernel_choices::save(path);
  kernel_choices::builtin();
  kernel_choices::load(path);
  const auto after = kernel_choices::rows();
  REQUIRE(after.size() == before.size());
  long long line = 2;  // after the comment
  for (auto a = after.begin(), b = before.begin(); a != after.end(); ++a, ++b, ++line) {
    CHECK(a->first == b->first);
    CHECK(a->second.chosen == b->second.chosen);
    CHECK(a->second.source == path + ":" + std::to_string(line));
    REQUIRE(a->second.times.size() == b->second.times.size());
    for (std::size_t i = 0; i < b->second.times.size(); ++i) {
      CHECK(a->second.times[i].algorithm == b->second.times[i].algorithm);
      CHECK(a->second.times[i].milliseconds == b->second.times[i].milliseconds);
    }
  }
  CHECK(choose("convolution 3 -> 4, input [1 x 2 x 3 x 3]").chosen == kernel_algorithm::winograd);
  CHECK(choose("no row").runs.empty());  // a loaded table does not measure
  CHECK(choose("no row").chosen == kernel_algorithm::direct);
  // Saving again keeps the rows of other keys and replaces those of the same.
  kernel_choices::builtin();
  kernel_choices::choose(key_of("b"), "Winograd tiles");
  kernel_choices::save(path);
  kernel_choices::load(path);
  CHECK(kernel_choices::rows().size() == 2);
  CHECK(choose("b").chosen == kernel_algorithm::winograd);
}

TEST_CASE("kernel choices: malformed files are refused with file and line") {
  const builtin_afterwards restore;
  kernel_choices::builtin();
  const scratch_folder folder;
  const std::string path = folder / "table.txt";
  const std::string good = "conv_forward | float | s | 2 | avx512 | direct sums | direct sums: 1.5";
  const std::pair<std::string, std::string> cases[] = {
      {"conv_forward | float | s | 2 | avx512", "not a row of a table of kernel choices: '"},
      {good + " | more", "not a row of a table of kernel choices: '"},
      {"conv | float | s | 2 | avx512 | direct sums", "unknown operation 'conv'"},
      {"conv_forward | half | s | 2 | avx512 | direct sums", "unknown type 'half'"},
      {"conv_forward | float |  | 2 | avx512 | direct sums", "no shape in the row"},
      {"conv_forward | float | s | 0 | avx512 | direct sums", "not a number of threads: '0'"},
      {"conv_forward | float | s | 2x | avx512 | direct sums", "not a number of threads: '2x'"},
      {"conv_forward | float | s | 2 |  | direct sums", "no instruction set in the row"},
      {"conv_forward | float | s | 2 | avx512 | magic", "unknown algorithm 'magic'"},
      {"conv_forward | float | s | 2 | avx512 | direct sums | magic: 1", "unknown algorithm 'magic'"},
      {"conv_forward | float | s | 2 | avx512 | direct sums | direct sums: fast", "not a name and a time: '"},
      {"conv_forward | float | s | 2 | avx512 | direct sums | direct sums", "not a name and a time: '"},
      {good, "a second row for '" + good + "'"}};
  for (const auto& malformed : cases) {
    const std::string& line = malformed.first;
    const std::string& text = malformed.second;
    CAPTURE(line);
    write_text(path, "# comment\n\n" + good + "\n" + line + "\n");
    CHECK(has(error_of<io_error>([&] { kernel_choices::load(path); }), path + ":4: " + text));
    CHECK(has(error_of<io_error>([&] { kernel_choices::measure(path); }), path + ":4: " + text));
    CHECK(has(error_of<io_error>([&] { kernel_choices::save(path); }), path + ":4: " + text));
    CHECK_FALSE(detail::asks_kernel_table());  // the table is as before
  }
  write_text(path, good + "\n# comment\n\n");
  kernel_choices::load(path);
  CHECK(kernel_choices::rows().size() == 1);
  CHECK(has(error_of<io_error>([&] { kernel_choices::load(folder / "none"); }), "cannot open the table"));
  CHECK(has(error_of<io_error>([&] { kernel_choices::load(folder.path()); }), folder.path() + ": cannot"));
  // A row whose algorithm cannot compute its operation is refused at the call.
  write_text(path, "# c\nconv_forward | float | s | 2 | " + std::string(detail::kernel_name()) +
                       " | direct sums of pairs\n");
  kernel_choices::load(path);
  CHECK(has(error_of<value_error>([] { choose("s"); }), path + ":2: conv_forward<float>, s: the algorithm"));
}

TEST_CASE("kernel choices: processes that measure into one file lose no rows") {
  const builtin_afterwards restore;
  const scratch_folder folder;
  const std::string path = folder / "table.txt";
  constexpr int processes = 4, shapes = 12;
  std::vector<pid_t> children;
  for (int process = 0; process < processes; ++process) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    ::alarm(60);
    kernel_choices::measure(path);
    for (int i = 0; i < shapes; ++i) choose("shape " + std::to_string(process * shapes + i), 0.1);
    _exit(0);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  kernel_choices::load(path);
  CHECK(kernel_choices::rows().size() == processes * shapes);
  CHECK(::access((path + ".tmp").c_str(), F_OK) != 0);
  // A process that measures later reads the rows first.
  kernel_choices::measure(path);
  CHECK(choose("shape 0", 9.0).runs.empty());
}

TEST_CASE("kernel choices: a measured row that cannot be written is an error at every call") {
  const builtin_afterwards restore;
  const scratch_folder folder;
  kernel_choices::measure(folder / "no folder/table.txt");
  for (int round = 0; round < 2; ++round) {
    CHECK(has(error_of<io_error>([] { choose("a"); }), "no folder/table.txt.lock: cannot create"));
  }
}

/// What choose(shape) chooses, in a child process with this environment, or the text of its error.
std::string with_environment(const std::map<std::string, std::string>& variables, const std::string& shape,
                             double direct_ms) {
  return text_of_child([&] {
    for (const char* name : {"PUFFERFISH_KERNEL_TABLE", "XDG_CACHE_HOME", "HOME"}) ::unsetenv(name);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    detail::kernel_choice_table::here().initialized = false;  // as in a new process
    detail::asks_kernel_table() = true;
    try {
      return std::string(detail::algorithm_name(choose(shape, direct_ms).chosen));
    } catch (const io_error& failure) {
      return std::string(failure.what());
    }
  });
}

TEST_CASE("kernel choices: the environment variable") {
  const scratch_folder folder;
  const std::string home = folder.path(), table = "PUFFERFISH_KERNEL_TABLE";
  CHECK(with_environment({}, "a", 2.0) == "direct sums");
  CHECK(with_environment({{table, "builtin"}}, "a", 2.0) == "direct sums");
  CHECK(with_environment({{table, ""}}, "a", 2.0) == "direct sums");
  CHECK(has(with_environment({{table, "measure"}}, "a", 2.0), "neither XDG_CACHE_HOME nor HOME"));

  CHECK(with_environment({{table, "measure"}, {"HOME", home}}, "a", 2.0) == "Winograd tiles");
  const std::string path = home + "/.cache/pufferfish/kernels-v1-" + detail::processor_file_name() + ".txt";
  CHECK(has(text_of(path), "conv_forward | float | a | 2 | "));
  // The next process reads the file instead of measuring.
  CHECK(with_environment({{table, "measure"}, {"HOME", home}}, "a", 0.0) == "Winograd tiles");
  CHECK(with_environment({{table, "measure"}, {"HOME", home}}, "b", 0.1) == "direct sums");
  CHECK(has(text_of(path), "conv_forward | float | b | 2 | "));

  const std::string cache = folder / "cache";
  CHECK(with_environment({{table, "measure"}, {"HOME", home}, {"XDG_CACHE_HOME", cache}}, "a", 0.1) ==
        "direct sums");
  CHECK(has(text_of(cache + "/pufferfish/kernels-v1-" + detail::processor_file_name() + ".txt"), "| a |"));

  CHECK(with_environment({{table, path}}, "a", 0.0) == "Winograd tiles");
  CHECK(with_environment({{table, path}}, "no row", 2.0) == "direct sums");
  CHECK(has(with_environment({{table, home + "/none"}}, "a", 0.0), home + "/none: cannot open the table"));
}

TEST_CASE("kernel choices: the processor's name is fit for a file name") {
  const std::string name = detail::processor_file_name();
  CHECK_FALSE(name.empty());
  CHECK(name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-") ==
        std::string::npos);
}

}  // namespace
