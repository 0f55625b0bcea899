// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A network and a context with static storage duration, filled when main runs: they are destroyed after every
// static object that was constructed in between. The test is that the program ends with status 0.
#include <memory>

#include <pufferfish/nn.hpp>

namespace {

struct globals {
  std::unique_ptr<pufferfish::cpu_context> context;
  std::unique_ptr<pufferfish::network<float>> net;
};
globals of_the_program;

}  // namespace

int main() {
  using namespace pufferfish;
  of_the_program.context = std::make_unique<cpu_context>(context_options{2, 0});
  of_the_program.net = std::make_unique<network<float>>(Sequential<float>().add("fc", Linear<float>(6, 3)));
  const tensor<float, 4> x({5, 1, 1, 6});
  tensor<float, 4> y({5, 1, 1, 3});
  of_the_program.net->forward(*of_the_program.context, x, y);
  return y(4, 0, 0, 2) == y(0, 0, 0, 2) ? 0 : 1;
}
