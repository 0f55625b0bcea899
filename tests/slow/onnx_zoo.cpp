// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Every network of the zoo at full width as an ONNX model, in every mode, against ONNX Runtime.
#include "../unit/support/fold_checks.hpp"
#include "../unit/support/onnx_runtime.hpp"

namespace {

using namespace test;

TEST_CASE("write_onnx: every network of the zoo at full width, dense, hybrid and low-rank") {
  for (const auto& model : zoo<float>()) {
    for (const factor_mode mode : factor_modes) {
      CAPTURE(model.name);
      CAPTURE(std::string(to_string(mode)));
      network<float> net = model.make(mode);
      give_values(net);
      runtime_cases cases;  // its folder holds one model at a time
      cases.add_network(std::string(model.name) + "-" + to_string(mode), net, {32, 32, 3});
      const double worst = cases.worst();
      CHECK(worst < 1e-4);
      if (worst < 0.0) return;
    }
  }
}

}  // namespace
