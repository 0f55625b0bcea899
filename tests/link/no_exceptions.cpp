// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Compiled with -fno-exceptions and -fno-rtti: layers and networks work, and an error prints its text and
// aborts.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>

#include <pufferfish/pufferfish.hpp>

namespace {

using namespace pufferfish;

int failures = 0;

void check(bool good, const char* what) {
  if (good) return;
  std::printf("wrong: %s\n", what);
  ++failures;
}

// What f() prints to the standard error before it aborts; "it returned" if it does not.
template <class F>
std::string last_words(const F& f) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    ::dup2(ends[1], 2);
    f();
    _exit(0);
  }
  ::close(ends[1]);
  std::string text;
  char part[256];
  for (ssize_t count = 0; (count = ::read(ends[0], part, sizeof part)) > 0;) {
    text.append(part, static_cast<std::size_t>(count));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? text : "it returned";
}

void train_a_network() {
  network<float> net(Sequential<float>()
                         .add("conv", Conv<float>(conv_shape::square(3, 8, 3, 1, 1)))
                         .add("norm", BatchNorm<float>(8))
                         .add("relu", ReLU<float>())
                         .add("flat", Flatten<float>())
                         .add("fc", LowRankLinear<float>(128, 5, 2)));
  net.initialize(1);
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x({6, 4, 4, 3}), y({6, 1, 1, 5});
  fill_normal(x.flat(), 1.0, {1, 1});
  net.forward(ctx, x, y);
  net.backward(ctx, y);
  const auto& layers = *net.root().target<Sequential<float>>();
  bool moved = false;
  for (const float gradient : net.store().gradients()) moved = moved || gradient != 0.0F;
  check(moved, "a network has gradients");
  check(layers[0].target<Conv<float>>() != nullptr, "target finds the layer's type");
  check(layers[0].target<ReLU<float>>() == nullptr, "target finds no other type");
  check(layers[4].target<LowRankLinear<float>>() != nullptr, "target finds a low-rank layer");
  ctx.set_mode(run_mode::inference);
  const tensor<float, 4> before = [&] {
    net.forward(ctx, x, y);
    return y;
  }();
  check(fold_batch_norm(net).folded.size() == 1, "visitors see sequences");
  net.forward(ctx, x, y);
  for (index_t i = 0; i < y.size(); ++i) {
    const float difference = y.data()[i] - before.data()[i];
    check(difference < 1e-4F && difference > -1e-4F, "a folded network computes the same");
  }
}

}  // namespace

int main() {
  check(mlp<float>({.inputs = 4, .hidden = {8}, .classes = 3}).parameter_count() == 67,
        "the models are there");
  train_a_network();
  const std::string shape = last_words([] { tensor<float, 2> impossible({3, -1}); });
  check(shape == "pufferfish: negative extent in [3 x -1]\n", shape.c_str());
  const std::string in_task = last_words([] {
    thread_pool(3).run(8, [](index_t task, int) {
      if (task == 5) tensor<float, 1> impossible({-7});
    });
  });
  check(in_task == "pufferfish: negative extent in [-7]\n", in_task.c_str());
  return failures == 0 ? 0 : 1;
}
