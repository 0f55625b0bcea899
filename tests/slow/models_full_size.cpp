// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The networks of the zoo as they are: a training pass in every mode, and the switch of those for ImageNet.
#include "../unit/support/model_checks.hpp"

namespace {

using namespace test;

TEST_CASE("a training pass at full size") {
  for (const auto& model : zoo<float>()) {
    for (const factor_mode mode : factor_modes) {
      CAPTURE(model.name);
      CAPTURE(to_string(mode));
      network<float> net = model.make(mode);
      extents<4> images = model.image;
      images[0] = images[1] == 32 ? 2 : 1;
      check_training_pass(net, images, model.classes);
    }
  }
}

TEST_CASE("the switch at full size: the networks for ImageNet") {
  struct expected {
    const char* model;
    switch_counts counts;
  };
  // Per batch norm 5 entries, per convolution 1, fc 2; each factorized weight adds one.
  for (const expected& want :
       {expected{"resnet34", {218 + 6, 12, 212}}, expected{"resnet50", {330, 20, 310}},
        expected{"resnet101", {626 + 10, 20, 616}}, expected{"resnet152", {932 + 10, 20, 922}},
        expected{"wide_resnet50_2", {330, 20, 310}}}) {
    CAPTURE(want.model);
    const zoo_model<float>& model = zoo_model_called<float>(want.model);
    network<float> net = model.make(factor_mode::dense);
    const switch_counts counts = check_switch(net, model.hybrid());
    CHECK(counts.entries == want.counts.entries);
    CHECK(counts.factors == want.counts.factors);
    CHECK(counts.untouched == want.counts.untouched);
  }
}

}  // namespace
