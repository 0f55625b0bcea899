// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Batch norms of every network of the zoo folded, at full width: the same outputs.
#include <limits>

#include "../unit/support/fold_checks.hpp"

namespace {

using namespace test;

/// Networks of more parameters than `most` are left out.
template <class T>
void check_zoo(const factor_mode mode, index_t most) {
  for (const auto& model : zoo<T>()) {
    CAPTURE(model.name);
    CAPTURE(static_cast<int>(mode));
    // Small images do for those with global pooling, too.
    const extents<4> images{1, 32, 32, 3};
    network<T> net = model.make(mode);
    if (net.parameter_count() > most) continue;
    give_values(net);
    batch_norm_folding report;
    const double error = folding_error(net, images, report);
    CHECK(error <= fold_tolerance<T>);
    CHECK(report.kept.empty());
    CHECK(report.folded.size() >= 8);
  }
}

TEST_CASE("fold_batch_norm: every network of the zoo, hybrid, float") {
  check_zoo<float>(factor_mode::hybrid, std::numeric_limits<index_t>::max());
}

// The hybrid ones have layers of both kinds; of the others the smaller networks have all shapes.
TEST_CASE("fold_batch_norm: networks of the zoo, all modes") {
  for (const factor_mode mode : factor_modes) check_zoo<float>(mode, 12'000'000);
  check_zoo<double>(factor_mode::hybrid, 4'000'000);
}

}  // namespace
