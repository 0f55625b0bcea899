// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/linalg/isa.hpp>

#include <string>

#include <doctest/doctest.h>

namespace {
using namespace pufferfish;

TEST_CASE("isa: every instruction set has the name that reports and checkpoints show") {
  std::string names;
  for (const isa target : all_isas) names += std::string(to_string(target)) + ' ';
  CHECK(names == "portable neon avx2 avx512 ");
}

TEST_CASE("isa: the widest set is the last one that is available") {
  isa last = widest_isa();
  CHECK(isa_available(last));
  for (const isa target : all_isas) {
    if (isa_available(target)) last = target;
  }
  CHECK(last == widest_isa());
  const std::string name = detail::kernel_name();
  CHECK(name.substr(0, name.find(',')) == to_string(widest_isa()));
}

TEST_CASE("isa: NEON is the one target of aarch64, with fused multiply-add, and of no other processor") {
#if defined(__aarch64__)
  for (const isa target : all_isas) CHECK(isa_available(target) == (target == isa::neon));
  CHECK(detail::fuses_multiply_add());
#else
  CHECK(!isa_available(isa::neon));
#endif
}

}  // namespace
