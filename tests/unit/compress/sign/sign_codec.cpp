// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <pufferfish/compress/sign/sign_codec.hpp>

#include "../../support/codec_support.hpp"

namespace {

using namespace codec_support;

TEST_CASE_TEMPLATE("sign_codec keeps the rules of codecs", T, float, double) {
  check_codec<sign_codec<T>>({});
}

TEST_CASE_TEMPLATE("sign_codec: the mean magnitude with every sign; the memory is what is left", T, float,
                   double) {
  cpu_context ctx;
  sign_codec<T> codec(vectors_of<T>({4}));
  std::vector<T> memory(4, T(0));
  const auto code = coded(codec, ctx, std::vector<T>{1, -3, 0, 2}, memory);
  CHECK(decoded(codec, ctx, code, 4) == std::vector<T>{1.5, -1.5, 1.5, 1.5});
  CHECK(memory == std::vector<T>{-0.5, -1.5, -1.5, 0.5});
  CHECK(code.size() == 4 + sizeof(T));
}

TEST_CASE("sign_codec: what is lost is the square norm without the squared sum of magnitudes over n") {
  cpu_context ctx;
  for (const index_t n : {1, 2, 31, 33, 1000, 40000}) {
    CAPTURE(n);
    sign_codec<double> codec(vectors_of<double>({3, n}));
    std::vector<double> values(static_cast<std::size_t>(n) + 3), memory(values.size(), 0.0);
    fill_normal(std::span<double>(values), 1.0, random_stream(3, 4));
    coded(codec, ctx, values, memory);
    double squares = 0, magnitudes = 0, lost = 0;
    for (std::size_t i = 3; i < values.size(); ++i) {
      squares += values[i] * values[i];
      magnitudes += std::abs(values[i]);
      lost += memory[i] * memory[i];
    }
    CHECK(lost == doctest::Approx(squares - magnitudes * magnitudes / static_cast<double>(n)).epsilon(1e-10));
  }
}

}  // namespace
