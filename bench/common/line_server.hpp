// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Protocol between bench/compare and the programs that it measures: one request per line, a JSON object
/// whose `work` says what to do; one answer per line. Candidates in different processes thus take turns, each
/// warm and with its memory allocated.

#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "peak.hpp"

namespace bench {

using request = nlohmann::json;
using answer = nlohmann::ordered_json;
using service = std::function<answer(const request&)>;

/// Answers requests until the input ends. An exception of a service becomes {"error": text}.
inline void serve(const std::map<std::string, service>& services) {
  for (std::string line; std::getline(std::cin, line);) {
    answer reply;
    try {
      const request asked = request::parse(line);
      const auto at = services.find(asked.at("work").get<std::string>());
      if (at == services.end()) throw std::runtime_error("no such work: " + asked.at("work").dump());
      reply = at->second(asked);
    } catch (const std::exception& e) {
      reply = {{"error", e.what()}};
    }
    std::cout << reply.dump() << std::endl;
  }
}

/// Calls `body` once untimed and `samples` times timed; returns {"ms": [...]}. `before` is not timed.
template <class Body, class Before>
answer timed(const request& asked, Body&& body, Before&& before) {
  const int samples = asked.value("samples", 3), warm_up = asked.value("warm_up", 1);
  std::vector<double> ms;
  for (int i = -warm_up; i < samples; ++i) {
    before();
    const auto start = clock::now();
    body();
    if (i >= 0) ms.push_back(seconds_since(start) * 1e3);
  }
  return {{"ms", ms}};
}
template <class Body>
answer timed(const request& asked, Body&& body) {
  return timed(asked, body, [] {});
}

/// Whether a request asks for numbers of bfloat16 instead of float.
inline bool wants_bf16(const request& asked) { return asked.value("precision", "float") == "bfloat16"; }

/// A matrix product as requests describe it: C (m x n) = A (m x k) B (k x n), or, transposed, A (k x
/// m)^T B, which is float also for A and B of bfloat16. All are row-major.
struct product {
  explicit product(const request& asked)
      : m(asked.at("m")),
        n(asked.at("n")),
        k(asked.at("k")),
        transposed(asked.value("transposed", false)),
        bf16(wants_bf16(asked)) {}
  std::ptrdiff_t m, n, k;
  bool transposed, bf16;
};

/// A convolution as requests describe it: square images, given stride and padding; rank 0 is dense.
struct convolution {
  explicit convolution(const request& asked)
      : in(asked.at("in")),
        out(asked.at("out")),
        rank(asked.value("rank", 0)),
        pixels(asked.at("pixels")),
        batch(asked.at("batch")),
        kernel(asked.value("kernel", 3)),
        stride(asked.value("stride", 1)),
        padding(asked.value("padding", 1)),
        bf16(wants_bf16(asked)) {}
  std::ptrdiff_t in, out, rank, pixels, batch, kernel, stride, padding;
  bool bf16;
};

}  // namespace bench
