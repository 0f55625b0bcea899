// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Output of a benchmark: text for people, or one JSON object per line for programs.

#include <cstdio>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

#include "../../examples/common/text.hpp"
#include "machine.hpp"

namespace bench {

using examples::format;
using examples::grouped;
using examples::text_table;
using json = nlohmann::ordered_json;

/// Rounded to three decimal places: more would be noise.
inline double rounded(double value) { return std::round(value * 1000.0) / 1000.0; }

/// Records are written to `path`, one per line ("-": standard output, then without text). Text for people is
/// written to standard output.
class reporter {
 public:
  /// `silent`: never writes text; for all ranks but one.
  explicit reporter(const std::string& path, bool silent = false)
      : quiet_(silent || path == "-"), to_stdout_(path == "-") {
    if (to_stdout_) file_ = stdout;
    if (!to_stdout_ && !path.empty()) file_ = std::fopen(path.c_str(), "w");
    if (!path.empty() && file_ == nullptr) throw std::runtime_error("cannot write " + path);
  }
  reporter(const reporter&) = delete;
  reporter& operator=(const reporter&) = delete;
  ~reporter() {
    if (file_ != nullptr && !to_stdout_) std::fclose(file_);
  }

  void record(const json& object) {
    if (file_ == nullptr) return;
    std::fprintf(file_, "%s\n", object.dump().c_str());
    std::fflush(file_);
  }
  void text(const std::string& lines) const {
    if (quiet_) return;
    std::fputs(lines.c_str(), stdout);
    std::fflush(stdout);
  }

  void machine(int threads) const {
    text(format("%s, %s, flags %s; kernels %s, peak of %s; %d thread%s, fp32\n", processor_name().c_str(),
                __VERSION__, PUFFERFISH_BENCH_FLAGS, pufferfish::to_string(pufferfish::widest_isa()),
                pufferfish::to_string(processor_isa()), threads, threads == 1 ? "" : "s"));
  }

 private:
  bool quiet_, to_stdout_;
  std::FILE* file_ = nullptr;
};

}  // namespace bench
