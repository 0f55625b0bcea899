// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Parity with PyTorch: small LSTM language models and Transformers, dense, hybrid and low-rank, trained.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/nn/token_loss.hpp>
#include <pufferfish/optim/adam.hpp>
#include <pufferfish/optim/clip.hpp>
#include <pufferfish/optim/sgd.hpp>

#include "../support/golden.hpp"

namespace {

using namespace golden;

constexpr std::uint64_t steps_of_training = 20;

template <class T>
using matrix = tensor<T, 2>;

template <class T>
double error_of(results& golden, const std::string& name, const matrix<T>& ours) {
  return golden.error_of(name, std::span<const T>(ours.flat()));
}

/// sequences.py's language_model_case: three streams of ten tokens over and over, in segments of five.
template <class T>
void check_language_model(const std::string& name, const std::vector<layer_rank>& ranks) {
  CAPTURE(name);
  constexpr index_t vocabulary = 23, width = 12, steps = 5, batch = 3, period = 10;
  results golden(name);
  auto net = make_lstm_lm<T>({vocabulary, width, 2, 0.0});
  apply_ranks(net, ranks);
  set_values(net);
  matrix<std::int32_t> text({2 * period, batch});
  const hashed numbers("text");
  for (std::size_t i = 0; i < text.flat().size(); ++i) {
    text.flat()[i] =
        static_cast<std::int32_t>((numbers[i % (period * batch)] + 1.0) * (double{vocabulary} / 2.0));
  }
  const tensor_view<const std::int32_t, 2> all = text;
  cpu_context ctx({2, 1});
  ctx.set_mode(run_mode::training);
  SGD<T> optimizer(make_optimizer_target(net.store()), sgd_options{});
  auto state = net.root().make_state(batch);
  matrix<T> logits({steps * batch, vocabulary});
  const auto segment = [&](std::uint64_t number, index_t shift) {
    return all.slice(0, static_cast<index_t>(number) * steps % period + shift, steps);
  };
  const auto loss_of = [&](std::uint64_t number) {
    ctx.begin_step(number);
    return net.root().loss(ctx, segment(number, 0), segment(number, 1), state).mean_loss();
  };
  const auto inferred_logits = [&](std::uint64_t number) {
    cpu_context inference({2, 1});
    auto own = state;
    net.root().forward(inference, segment(number, 0), own, logits.view());
  };
  for (std::uint64_t step = 0; step < steps_of_training; ++step) {
    if (step == 0) inferred_logits(0);
    const double loss = loss_of(step);
    net.root().backward(ctx, double{steps * batch});
    if (step == 0) {
      CHECK(error_of(golden, "logits", logits) < tolerance<T>);
      CHECK(golden.error_of("loss", loss) < tolerance<T>);
      golden.check_state(net);
    }
    // PyTorch divides by norm + 1e-6 where it clips.
    const double norm = gradient_norm<T>(ctx, net.store().gradients());
    clip_gradient_norm<T>(ctx, net.store().gradients(), 0.25 * norm / (norm + 1e-6));
    optimizer.step(ctx, 6.0);
  }
  CHECK(golden.error_of("loss_after", loss_of(steps_of_training)) < tolerance_after<T>);
  inferred_logits(steps_of_training + 1);
  CHECK(error_of(golden, "eval.logits", logits) < tolerance_after<T>);
  golden.check_all_used();
}

TEST_CASE_TEMPLATE("LSTM language model: forward, loss, gradients, training are PyTorch's", T, float,
                   double) {
  check_language_model<T>("lstm_lm", {});
  check_language_model<T>("lstm_lm_hybrid", {{"rnn.1", 3, 2}});
  // The paper's: a quarter of full rank.
  check_language_model<T>("lstm_lm_lowrank", {{"rnn.0", 3, 3}, {"rnn.1", 3, 3}});
}

matrix<std::int32_t> padded(const std::vector<std::vector<std::int32_t>>& sentences) {
  std::size_t longest = 0;
  for (const auto& sentence : sentences) longest = std::max(longest, sentence.size());
  matrix<std::int32_t> ids({static_cast<index_t>(sentences.size()), static_cast<index_t>(longest)});
  std::fill(ids.flat().begin(), ids.flat().end(), 1);
  for (std::size_t s = 0; s < sentences.size(); ++s) {
    std::copy(sentences[s].begin(), sentences[s].end(), ids.data() + s * longest);
  }
  return ids;
}

/// sequences.py's transformer_case: four pairs of sentences, label smoothing, Adam.
template <class T>
void check_transformer(const std::string& name, bool hybrid) {
  CAPTURE(name);
  results golden(name);
  transformer_options options;
  options.vocabulary = 29;
  options.width = 16;
  options.hidden = 32;
  options.layers = 2;
  options.heads = 4;
  options.key = 4;
  options.value = 5;
  options.positions = 12;
  options.dropout = 0.0;
  options.padding = 1;
  auto net = make_transformer<T>(options);
  if (hybrid) apply_ranks(net, planned_ranks(net, transformer_policy()));
  set_values(net);
  const auto source = padded({{4, 5, 6, 3}, {7, 3}, {8, 9, 10, 11, 12, 28, 3}, {14}}),
             target = padded({{2, 5, 5, 20}, {2, 12, 4, 6, 0, 27}, {2}, {2, 25, 13}}),
             next = padded({{5, 5, 20, 3}, {12, 4, 6, 0, 27, 3}, {3}, {25, 13, 3}});
  cpu_context ctx({2, 1}), inference({2, 1});
  ctx.set_mode(run_mode::training);
  adam_options adam;
  adam.beta2 = 0.98;
  adam.eps = 1e-4;
  Adam<T> optimizer(make_optimizer_target(net.store()), adam);
  matrix<T> logits({net.root().output_rows(target), options.vocabulary});
  const auto loss_of = [&](std::uint64_t step) {
    ctx.begin_step(step);
    return net.root().loss(ctx, source, target, next, {0.1, smoothing_kind::wrong_classes}).loss_sum;
  };
  net.root().forward(inference, source, target, logits.view());
  CHECK(error_of(golden, "logits", logits) < tolerance<T>);
  for (std::uint64_t step = 0; step < steps_of_training; ++step) {
    const double loss = loss_of(step);
    net.root().backward(ctx, 1.0);
    if (step == 0) {
      CHECK(golden.error_of("loss", loss) < tolerance<T>);
      golden.check_state(net);
    }
    optimizer.step(ctx, 0.002);
  }
  CHECK(golden.error_of("loss_after", loss_of(steps_of_training)) < tolerance_after<T>);
  net.root().forward(inference, source, target, logits.view());
  CHECK(error_of(golden, "eval.logits", logits) < tolerance_after<T>);
  golden.check_all_used();
}

TEST_CASE_TEMPLATE("Transformer: forward, loss, gradients, training are PyTorch's", T, float, double) {
  check_transformer<T>("transformer", false);
  check_transformer<T>("transformer_hybrid", true);
}

}  // namespace
