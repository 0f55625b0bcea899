// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Resident memory of this process, and its growth by some work.

#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace bench {

/// MiB; `field` is VmRSS (now) or VmHWM (maximum so far).
inline double resident_mib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) != 0) continue;
    std::istringstream text(line.substr(field.size() + 1));
    double kib = 0;
    text >> kib;
    return kib / 1024;
  }
  throw std::runtime_error("the system does not tell " + field);
}

/// MiB by which the peak memory of `body` exceeds the memory before it. Runs `body` in a process of its own,
/// so call it before starting threads.
template <class Body>
double resident_growth_mib(Body&& body) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe for measuring memory");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("no process for measuring memory");
  if (child == 0) {
    double growth = -1;
    try {
      const double before = resident_mib("VmRSS");
      body();
      growth = resident_mib("VmHWM") - before;
    } catch (...) {
    }
    const bool told = write(ends[1], &growth, sizeof growth) == static_cast<ssize_t>(sizeof growth);
    _exit(told ? 0 : 1);
  }
  close(ends[1]);
  double growth = -1;
  const bool told = read(ends[0], &growth, sizeof growth) == static_cast<ssize_t>(sizeof growth);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!told || growth < 0) throw std::runtime_error("the process that measures memory failed");
  return growth;
}

}  // namespace bench
