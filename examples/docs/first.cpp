// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The first program of docs/start.md, which shows all from the include on.

// [first]
#include <pufferfish/lowrank.hpp>

#include <cstdio>

int main() {
  namespace pf = pufferfish;
  pf::tensor<float, 2> weight({512, 512});  // what a layer of yours has learned: [out][in]
  pf::fill_normal<float>(weight.flat(), 0.05, {1, 1});

  const auto made = pf::factorize_matrix<float>(weight, pf::rank_ratio{0.25});
  std::printf("rank %td: %td weights become %td, %.1f %% of the energy is kept\n", made.report.rank,
              made.report.parameters_before, made.report.parameters_after, 100 * made.report.kept_energy);

  pf::LowRankLinear<float> layer(512, 512, made.report.rank);
  copy(pf::tensor_view<const float, 2>(made.down), layer.down());
  copy(pf::tensor_view<const float, 2>(made.up), layer.up());
  pf::cpu_context context;
  const pf::tensor<float, 2> x({8, 512});
  const auto y = layer.forward(context, x);  // up * (down * x): half of the multiplications
  std::printf("%td x %td\n", y.extent(0), y.extent(1));
}
// [first]
