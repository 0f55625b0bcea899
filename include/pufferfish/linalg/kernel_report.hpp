// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Which algorithm and which kernels an operation has used on the CPU: with the environment variable
/// PUFFERFISH_KERNEL_REPORT=1, a program prints a line on its standard error when it first runs an operation
/// with a shape, such as
///
/// \code
/// pufferfish: product<float>, [200 x 40] times [40 x 8]: rows in place, weight in panels, avx512
/// \endcode
///
/// Convolutions and products report; the second factor of a float low-rank convolution, which is multiplied
/// in the same tasks, does not. A 16-bit operation that is computed in float reports the float operation,
/// too.

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Whether operations are reported: whether PUFFERFISH_KERNEL_REPORT was 1 at the first call. Tests change
/// it.
inline bool& reports_kernels() {
  static bool wanted = [] {
    const char* const value = std::getenv("PUFFERFISH_KERNEL_REPORT");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return wanted;
}

/// Number of muted_reports objects of this thread.
inline int& report_mutes() {
  static thread_local int mutes = 0;
  return mutes;
}

/// While an object exists, its thread reports nothing: operations run to be timed (kernel_choice.hpp).
struct muted_reports {
  muted_reports() { ++report_mutes(); }
  muted_reports(const muted_reports&) = delete;
  muted_reports& operator=(const muted_reports&) = delete;
  ~muted_reports() { --report_mutes(); }
};

/// Prints the parts as a line, unless the same line has been printed before. Any thread may call this.
PUFFERFISH_COLD inline void print_once(std::initializer_list<message_part> parts) {
  static std::mutex mutex;
  static std::set<std::string> printed;
  const std::string line = message(parts);
  const std::lock_guard lock(mutex);
  if (printed.insert(line).second) std::fprintf(stderr, "pufferfish: %s\n", line.c_str());
}

/// "float", "double" or "bfloat16".
template <class T>
constexpr const char* scalar_name() {
  return sizeof(T) == 2 ? "bfloat16" : sizeof(T) == 4 ? "float" : "double";
}

/// Reports an operation on elements of T: its name, its shape in words, and the algorithm that it uses.
/// describe() returns the shape as a text; it is called only if a report is wanted.
template <class T, class Describe>
void report_kernel(const char* operation, const char* algorithm, Describe&& describe) {
  if (!reports_kernels() || report_mutes() > 0) return;
  print_once({operation, "<", scalar_name<T>(), ">, ", describe(), ": ", algorithm, ", ", kernel_name()});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
