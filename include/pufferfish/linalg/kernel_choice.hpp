// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The choice among the algorithms of an operation on the CPU. By default the library's rules choose, by the
/// shape alone. A table of choices replaces the rules, by the environment variable PUFFERFISH_KERNEL_TABLE or
/// by the functions of the namespace kernel_choices:
///
/// - `builtin`, or the variable is unset: the rules.
/// - `measure`: the first call of an operation with a key (kernel_key) times each algorithm that can compute
///   the operation, on the caller's operands. The rules' choice is replaced only by an algorithm that takes
///   less than 0.95 of its time. The choice holds for all later calls in the process and is added to
///   kernel_choices::default_path(), which is read first.
/// - a path: the choices of that file, by the rules where the file has no row. Nothing is measured.
///
/// The variable is read at the first choice, unless a function has set the table before.
///
/// Different algorithms sum in different orders, so a table changes the last bits of results. Results with
/// the rules do not depend on the number of threads; those with a table may, since the number of threads is
/// part of a key. Processes that load the same file choose alike on machines with the same instruction set
/// and kernels, so the ranks of a job should load one file rather than measure.
///
/// \code
/// kernel_choices::measure();       // before the first steps; the choices are kept in this process only
/// train_some_steps();
/// kernel_choices::save("kernels.txt");
/// kernel_choices::load("kernels.txt");  // in all later runs
/// \endcode
///
/// Convolutions ask the table. The rules of matrix products lose at most a few percent (docs/kernels.md,
/// "What was tried"), so products do not ask. To join, an operation adds its algorithms to kernel_algorithm
/// and its name to choosing_operations (kernel_choice_file.hpp), and calls detail::choose_kernel.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/assert.hpp>
#include <pufferfish/core/function_ref.hpp>
#include <pufferfish/linalg/kernel_choice_file.hpp>
#include <pufferfish/linalg/kernel_report.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// True if choices may differ from the rules. True also until the first choice, which reads the environment.
inline std::atomic<bool>& asks_kernel_table() {
  static constinit std::atomic<bool> asks{true};
  return asks;
}

/// The table of the process. All members but the mutex are guarded by it.
struct kernel_choice_table {
  std::mutex mutex;
  kernel_choice_rows rows;
  bool measures = false;      // keys without a row are measured
  std::string path;           // file of the measured rows; empty: none
  bool initialized = false;   // the environment has been read or replaced by a call
  std::uint64_t version = 0;  // number of replacements

  /// The table of this process.
  static kernel_choice_table& here() {
    static kernel_choice_table table;
    return table;
  }
  /// Replaces the table.
  void reset(kernel_choice_rows new_rows, bool measure, std::string file) {
    rows = std::move(new_rows);
    measures = measure;
    path = std::move(file);
    initialized = true;
    ++version;
    asks_kernel_table().store(measures || !rows.empty(), std::memory_order_relaxed);
  }
};

/// Milliseconds of each candidate: the least of at least 3 runs after an untimed one, in turns. run(i) runs
/// candidate i. More rounds follow, up to 30, until the runs of a candidate have taken 5 ms on average.
PUFFERFISH_COLD inline std::vector<double> time_kernels(std::size_t candidates,
                                                        function_ref<void(std::size_t)> run) {
  using clock = std::chrono::steady_clock;
  const muted_reports muted;
  std::vector<double> least(candidates, std::numeric_limits<double>::infinity());
  double total = 0.0;
  for (std::size_t i = 0; i < candidates; ++i) run(i);
  for (int round = 0; round < 3 || (round < 30 && total < 5.0 * static_cast<double>(candidates)); ++round) {
    for (std::size_t i = 0; i < candidates; ++i) {
      const auto begin = clock::now();
      run(i);
      const double taken = std::chrono::duration<double, std::milli>(clock::now() - begin).count();
      least[i] = std::min(least[i], taken);
      total += taken;
    }
  }
  return least;
}

/// The measured choice among candidates, of which the first is the rules' choice.
PUFFERFISH_COLD inline kernel_choice measure_kernels(const std::vector<kernel_algorithm>& candidates,
                                                     function_ref<void(kernel_algorithm)> run) {
  const std::vector<double> least =
      time_kernels(candidates.size(), [&](std::size_t i) { run(candidates[i]); });
  kernel_choice choice;
  std::size_t best = 0;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (least[i] < (best == 0 ? 0.95 : 1.0) * least[best]) best = i;
    // Rounded to tenths of a microsecond, so that files stay readable.
    choice.times.push_back({algorithm_name(candidates[i]), std::round(least[i] * 1e4) / 1e4});
  }
  choice.chosen = algorithm_name(candidates[best]);
  return choice;
}

}  // namespace detail

/// Functions that set and read the process's table of kernel choices (the file's comment). Any thread may
/// call them; an operation that runs meanwhile uses the old table or the new one.
namespace kernel_choices {

/// The rules choose, as by default.
PUFFERFISH_COLD inline void builtin() {
  auto& table = detail::kernel_choice_table::here();
  const std::lock_guard lock(table.mutex);
  table.reset({}, false, {});
}

/// Each key is measured at its first use in this process. Rows of an earlier table are forgotten.
PUFFERFISH_COLD inline void measure() {
  auto& table = detail::kernel_choice_table::here();
  const std::lock_guard lock(table.mutex);
  table.reset({}, true, {});
}

/// As measure(), but the rows of the file, if it exists, are read first, and each measured row is added to
/// it at once. Several processes may use one file. Throws io_error, with path and line, if a row of the file
/// is malformed. An operation whose measured row cannot be written throws io_error before it computes
/// anything.
PUFFERFISH_COLD inline void measure(const std::string& path) {
  auto rows = detail::read_kernel_choices(path, true);
  auto& table = detail::kernel_choice_table::here();
  const std::lock_guard lock(table.mutex);
  table.reset(std::move(rows), true, path);
}

/// The rows of the file choose, and the rules where it has no row. Throws io_error, with path and line, if
/// the file cannot be read or a row is malformed. A row whose algorithm cannot compute its operation is
/// refused by the operation with value_error.
PUFFERFISH_COLD inline void load(const std::string& path) {
  auto rows = detail::read_kernel_choices(path, false);
  auto& table = detail::kernel_choice_table::here();
  const std::lock_guard lock(table.mutex);
  table.reset(std::move(rows), false, {});
}

/// The rows of the table.
PUFFERFISH_COLD inline std::map<kernel_key, kernel_choice> rows() {
  auto& table = detail::kernel_choice_table::here();
  const std::lock_guard lock(table.mutex);
  return table.rows;
}

/// Adds the rows of the table to a file. Rows of the file with other keys are kept. Throws io_error.
PUFFERFISH_COLD inline void save(const std::string& path) { detail::add_to_kernel_choice_file(path, rows()); }

/// Sets the choice for a key to the algorithm of this name (as in reports). Throws value_error if no
/// algorithm has the name; the operation throws value_error if the algorithm cannot compute it.
PUFFERFISH_COLD inline void choose(const kernel_key& key, const std::string& algorithm) {
  if (!detail::is_one_of(detail::kernel_algorithm_names, algorithm)) {
    detail::throw_error<value_error>({"kernel_choices: unknown algorithm '", algorithm, "'"});
  }
  auto& table = detail::kernel_choice_table::here();
  const std::lock_guard lock(table.mutex);
  table.rows[key] = {algorithm, {}, {}};
  table.reset(std::move(table.rows), table.measures, std::move(table.path));
}

/// The file of PUFFERFISH_KERNEL_TABLE=measure: pufferfish/kernels-v1-PROCESSOR.txt in the folder
/// $XDG_CACHE_HOME or else $HOME/.cache. The folders are created. Throws io_error if neither variable is set
/// or a folder cannot be created.
PUFFERFISH_COLD inline std::string default_path() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  const bool has_cache = cache != nullptr && *cache == '/';  // other paths are invalid by the XDG standard
  if (!has_cache && (home == nullptr || *home == '\0')) {
    detail::throw_error<io_error>(
        {"kernel_choices: neither XDG_CACHE_HOME nor HOME names a folder for the measured table"});
  }
  std::string folder = has_cache ? cache : std::string(home) + "/.cache";
  for (const char* part : {"", "/pufferfish"}) {
    folder += part;
    if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) {
      detail::throw_choice_file_error(folder, "cannot create the folder");
    }
  }
  return folder + "/kernels-v1-" + detail::processor_file_name() + ".txt";
}

}  // namespace kernel_choices

namespace detail {

/// Sets the table by PUFFERFISH_KERNEL_TABLE unless a call has set it. The caller holds no lock. Throws
/// io_error as kernel_choices::measure and kernel_choices::load; the next choice then tries again.
PUFFERFISH_COLD inline void read_kernel_table_variable() {
  const char* const value = std::getenv("PUFFERFISH_KERNEL_TABLE");
  const std::string wanted = value == nullptr || *value == '\0' ? "builtin" : value;
  const bool measures = wanted == "measure";
  const std::string path = measures ? kernel_choices::default_path() : wanted;
  kernel_choice_rows rows;
  if (wanted != "builtin") rows = read_kernel_choices(path, measures);
  auto& table = kernel_choice_table::here();
  const std::lock_guard lock(table.mutex);
  if (!table.initialized) table.reset(std::move(rows), measures, measures ? path : std::string());
}

/// The choice of the table among `candidates`, of which the first is the rules' choice; measured if the table
/// has no row and measures. run(algorithm) computes the operation into scratch memory.
PUFFERFISH_COLD inline kernel_algorithm ask_kernel_table(const kernel_key& key,
                                                         const std::vector<kernel_algorithm>& candidates,
                                                         function_ref<void(kernel_algorithm)> run) {
  auto& table = kernel_choice_table::here();
  std::unique_lock lock(table.mutex);
  if (!table.initialized) {
    lock.unlock();
    read_kernel_table_variable();
    lock.lock();
  }
  auto row = table.rows.find(key);
  if (row == table.rows.end()) {
    if (!table.measures || candidates.size() < 2) return candidates.front();
    // The operation may itself contain operations that ask the table.
    const std::uint64_t version = table.version;
    const std::string path = table.path;
    lock.unlock();
    kernel_choice measured = measure_kernels(candidates, run);
    if (!path.empty()) add_to_kernel_choice_file(path, {{key, measured}});
    lock.lock();
    if (table.version != version) {  // another table since then, which may not measure
      lock.unlock();
      return ask_kernel_table(key, candidates, run);
    }
    // Another thread may have measured the key meanwhile. Its row holds then.
    row = table.rows.emplace(key, std::move(measured)).first;
  }
  std::string names;
  for (const kernel_algorithm candidate : candidates) {
    if (row->second.chosen == algorithm_name(candidate)) return candidate;
    names += message({names.empty() ? "'" : ", '", algorithm_name(candidate), "'"});
  }
  const std::string& source = row->second.source;
  throw_error<value_error>({source, source.empty() ? "" : ": ", key.operation, "<", key.type, ">, ",
                            key.shape, ": the algorithm '", row->second.chosen,
                            "' cannot compute it; possible: ", names});
}

/// Chooses the algorithm of an operation on elements of T and reports it (kernel_report.hpp). `rule`: the
/// rules' choice. candidates() returns all algorithms that can compute the operation, `rule` among them;
/// describe() returns the shape as a text, and limits() what else limits the candidates, as a text after the
/// shape in the key. run(algorithm) computes the operation into scratch memory; it is called only to measure.
/// Costs a load and a branch, and those of the report, if no table is used. Errors: see
/// kernel_choices::load and kernel_choices::measure.
template <class T, class Candidates, class Describe, class Limits, class Run>
kernel_algorithm choose_kernel(const char* operation, int threads, kernel_algorithm rule,
                               const Candidates& candidates, const Describe& describe, const Limits& limits,
                               const Run& run) {
  kernel_algorithm chosen = rule;
  if (asks_kernel_table().load(std::memory_order_relaxed)) {
    std::vector<kernel_algorithm> possible = candidates();
    const auto first = std::find(possible.begin(), possible.end(), rule);
    PUFFERFISH_ASSERT(first != possible.end(), "the rules choose a candidate");
    std::rotate(possible.begin(), first, first + 1);
    chosen = ask_kernel_table({operation, scalar_name<T>(), describe() + limits(), threads, kernel_name()},
                              possible, run);
  }
  report_kernel<T>(operation, algorithm_name(chosen), describe);
  return chosen;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
