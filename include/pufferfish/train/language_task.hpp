// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `language_task`: predicting the next token of a text, as a task of a training run.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/io/token_streams.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/train/training_run.hpp>

PUFFERFISH_NAMESPACE_BEGIN

struct language_task_options {
  index_t streams = 20;       ///< parallel pieces of the training text, over all ranks: the global batch
  index_t segment = 35;       ///< tokens of a stream in a step
  index_t test_streams = 10;  ///< of the test text; its state is carried too
};

/// Mean negative log likelihood per token and its exponential, of a language model on a text. All ranks get
/// the same; each goes through its own streams. The context's mode is put back. Collective.
template <class T, class Comm>
evaluation evaluate_language(context<device::cpu>& ctx, const model<lstm_lm<T>>& net, Comm& comm,
                             std::span<const std::int32_t> text, index_t streams, index_t segment) {
  streams = std::min<index_t>(streams, std::max<index_t>(1, static_cast<index_t>(text.size()) / 2));
  token_streams source(text, {streams, segment, comm.rank(), comm.size()});
  lstm_lm_state<T> state = net.root().make_state(source.local_streams());
  const mode_scope inference(ctx, run_mode::inference);
  evaluation local;
  for (index_t step = 0; step < source.steps_per_epoch() && source.local_streams() > 0; ++step) {
    const token_segment part = source.load(step);
    const extents<2> shape{part.length, part.streams};
    const token_loss_result loss =
        net.root().loss(ctx, {part.inputs.data(), shape}, {part.targets.data(), shape}, state);
    local.loss_sum += loss.loss_sum;
    local.count += loss.tokens;
  }
  return reduce(comm, local);
}

/// A language model on a text cut into streams (see token_streams): truncated backpropagation through time,
/// the state carried from segment to segment of an epoch. An evaluation counts tokens; exp(loss()) is the
/// perplexity.
template <class T>
class language_task {
 public:
  using model_type = model<lstm_lm<T>>;

  /// The texts must outlive the object. Throws value_error for a token outside the model's vocabulary, a test
  /// text of less than two tokens, and as token_streams.
  language_task(const model_type& net, std::span<const std::int32_t> train,
                std::span<const std::int32_t> test, const language_task_options& options, int rank, int ranks)
      : train_text_(train),
        test_(test),
        options_(options),
        ranks_(ranks),
        train_(train, {options.streams, options.segment, rank, ranks}),
        state_(net.root().make_state(train_.local_streams())) {
    ops::check_tokens("language_task", train, net.root().options().vocabulary);
    ops::check_tokens("language_task, test text", test, net.root().options().vocabulary);
    if (test.size() < 2) {
      detail::throw_error<value_error>(
          {"language_task: a test text of ", test.size(), " tokens has nothing to predict; it needs two"});
    }
  }

  index_t steps_per_epoch() const { return train_.steps_per_epoch(); }

  evaluation step(context<device::cpu>& ctx, model_type& net, const step_position& at) {
    const token_segment part = train_.load(at.step);
    if (part.starts) state_.reset();
    ctx.begin_step(at.total, part.first);
    if (part.streams == 0) {
      // More ranks than streams: this one's gradient is zero.
      std::fill(net.store().gradients().begin(), net.store().gradients().end(), T{});
      return {};
    }
    const extents<2> shape{part.length, part.streams};
    const token_loss_result loss =
        net.root().loss(ctx, {part.inputs.data(), shape}, {part.targets.data(), shape}, state_);
    // The mean over ranks of gradients divided like this is that of the mean over the global batch's tokens.
    net.root().backward(ctx, static_cast<double>(part.length * part.global_streams) / ranks_);
    return {loss.loss_sum, 0, loss.tokens};
  }

  template <class Comm>
  evaluation test(context<device::cpu>& ctx, const model_type& net, Comm& comm) {
    return evaluate_language(ctx, net, comm, test_, options_.test_streams, options_.segment);
  }

  std::string describe() const {
    return detail::message({"streams ", options_.streams, "\nsegment ", options_.segment,
                            "\ntraining tokens ", train_text_.size(), "\n"});
  }
  std::string data_lines() const {
    return "training text " + detail::hexadecimal(hasher().values(train_text_).digest()) + "\n";
  }
  std::span<T> carried() { return state_.values(); }

 private:
  std::span<const std::int32_t> train_text_, test_;
  language_task_options options_;
  int ranks_;
  token_streams train_;
  lstm_lm_state<T> state_;
};

PUFFERFISH_NAMESPACE_END
