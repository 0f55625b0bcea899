// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/core/packed_weights.hpp>

#include <doctest/doctest.h>

#include <span>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/error.hpp>

namespace {

using namespace pufferfish;

TEST_CASE("packed_weights: forms are kept for their own memory only, and not after an error") {
  std::vector<float> weights(100, 1.0F), others(100, 2.0F);
  packed_weights packed(std::as_bytes(std::span<const float>(weights)));
  CHECK(packed.contains(weights.data()));
  CHECK(packed.contains(weights.data() + 99));
  CHECK_FALSE(packed.contains(weights.data() + 100));
  CHECK_FALSE(packed.contains(others.data()));

  cpu_context ctx;
  int calls = 0;
  const auto doubled = [&](const float* from) {
    scratch_frame frame(ctx.scratch());
    return ctx.packed<float>(frame, {from, "doubled", {100}}, 100, [&](float* to) {
      ++calls;
      for (int i = 0; i < 100; ++i) to[i] = 2.0F * from[i];
    })[7];
  };
  const auto fails = [&](float*) { throw value_error("no"); };
  {
    const packed_weights_scope scope(ctx, packed);
    CHECK_THROWS_AS(packed.get<float>({weights.data(), "doubled", {100}}, 100, fails), value_error);
    CHECK(packed.bytes() == 0);
    CHECK(doubled(weights.data()) == 2.0F);
    CHECK(doubled(others.data()) == 4.0F);
    CHECK(packed.bytes() == 400);
    const int first_calls = calls;
    CHECK(doubled(weights.data()) == 2.0F);
    CHECK(calls == first_calls + (PUFFERFISH_ASSERT_LEVEL > 1 ? 1 : 0));  // level 2 compares
    const mode_scope training(ctx, run_mode::training);
    CHECK(ctx.packed(weights.data()) == nullptr);
  }
  CHECK(ctx.packed(weights.data()) == nullptr);
  const int before = calls;
  doubled(weights.data());
  CHECK(calls == before + 1);
}

}  // namespace
