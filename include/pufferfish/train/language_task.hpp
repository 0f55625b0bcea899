// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `language_task`: prediction of the next token of a text as the task of a training run.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/io/token_streams.hpp>
#include <pufferfish/nn/measure/layer_inputs.hpp>
#include <pufferfish/train/training_run.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of a language_task: sizes of the batches of training and test.
struct language_task_options {
  index_t streams = 20;       ///< parallel pieces of the training text, over all ranks: the global batch
  index_t segment = 35;       ///< tokens of each stream per step
  index_t test_streams = 10;  ///< parallel pieces of the test text; the state is carried over
};

namespace detail {

/// Memory in which a pass reads a segment: the inputs, then the targets.
template <class Device>
class segment_place {
  using view = tensor_view<const std::int32_t, 2>;

 public:
  /// Allocates memory for segments of up to `tokens` tokens.
  explicit segment_place(index_t tokens) : place_(2 * tokens * size) {}

  /// Copies the segment to the memory of the device. Does nothing for an empty segment.
  void bring(context<Device>& ctx, const token_segment& part) {
    const extents<2> shape{part.length, part.streams};
    const std::size_t bytes = part.inputs.size_bytes();
    if (bytes == 0) return;
    std::byte* const written = place_.write();
    std::memcpy(written, part.inputs.data(), bytes);
    std::memcpy(written + bytes, part.targets.data(), bytes);
    const std::byte* const come = place_.bring(ctx, 2 * static_cast<index_t>(bytes));
    inputs_ = view(reinterpret_cast<const std::int32_t*>(come), shape);
    targets_ = view(reinterpret_cast<const std::int32_t*>(come + bytes), shape);
  }
  /// The tokens of the segment and those to be predicted, [length][streams], in the memory of the device.
  const view& inputs() const { return inputs_; }
  const view& targets() const { return targets_; }

 private:
  static constexpr auto size = static_cast<index_t>(sizeof(std::int32_t));

  typename device_parts<Device>::input_place place_;
  view inputs_, targets_;
};

}  // namespace detail

/// Evaluates a language model on a text: loss() of the result is the mean negative log likelihood per token.
/// Each rank runs its own streams; all ranks get the same result. count is the number of predicted tokens,
/// `correct` stays 0. `streams`: parallel pieces of the text over all ranks, limited to half of the number of
/// tokens; `segment`: tokens of a stream per pass. The state is carried over from segment to segment.
/// Restores the context's mode. Throws value_error for a text of fewer than two tokens, and for `streams` or
/// `segment` below 1. Collective.
/// \code
///   const evaluation seen = evaluate_language(ctx, net, comm, text, 10, 35);
///   std::printf("perplexity %.2f\n", std::exp(seen.loss()));
/// \endcode
template <class Root, class Device, class Comm>
evaluation evaluate_language(context<Device>& ctx, const model<Root, Device>& net, Comm& comm,
                             std::span<const std::int32_t> text, index_t streams, index_t segment) {
  streams = std::min<index_t>(streams, std::max<index_t>(1, static_cast<index_t>(text.size()) / 2));
  token_streams source(text, {streams, segment, comm.rank(), comm.size()});
  typename Root::state_type state = net.root().make_state(source.local_streams());
  const mode_scope<Device> inference(ctx, run_mode::inference);
  const index_t steps = source.local_streams() > 0 ? source.steps_per_epoch() : 0;
  // One pair of results per segment, so that the host reads the device once.
  memory_block<double> results(memory_of<Device>::source(), 2 * steps);
  detail::segment_place<Device> place(source.longest_segment() * source.local_streams());
  for (index_t step = 0; step < steps; ++step) {
    const token_segment part = source.load(step);
    place.bring(ctx, part);
    net.root().loss(ctx, place.inputs(), place.targets(), state, results.data() + 2 * step);
  }
  const detail::result_sums sum = detail::sum_of_results(results);
  return reduce(comm, {sum.loss, 0, sum.second});
}

/// Trains a language model on a text cut into streams (see token_streams) by truncated backpropagation
/// through time. The state is carried from segment to segment within an epoch. Evaluations count tokens;
/// exp(loss()) is the perplexity.
///
///     language_task<lstm_lm<float>> task(net, train_text, test_text, {}, 0, 1);
///
/// Root is lstm_lm or a class with the same members: options().vocabulary, options().dropout, state_type,
/// make_state, loss and backward.
template <class Root, class Device = device::cpu>
class language_task {
  using T = typename Root::value_type;

 public:
  using model_type = model<Root, Device>;

  /// Prepares a task for rank `rank` of `ranks`. The texts must outlive the object. Throws value_error for a
  /// token outside the model's vocabulary and for a test text of less than two tokens, and the errors of
  /// token_streams.
  language_task(const model_type& net, std::span<const std::int32_t> train,
                std::span<const std::int32_t> test, const language_task_options& options, int rank, int ranks)
      : train_text_(train),
        test_(test),
        options_(options),
        dropout_(net.root().options().dropout),
        rank_(rank),
        ranks_(ranks),
        train_(train, {options.streams, options.segment, rank, ranks}),
        place_(train_.longest_segment() * train_.local_streams()),
        state_(net.root().make_state(train_.local_streams())) {
    ops::check_tokens("language_task", train, net.root().options().vocabulary);
    ops::check_tokens("language_task, test text", test, net.root().options().vocabulary);
    if (test.size() < 2) {
      detail::throw_error<value_error>(
          {"language_task: a test text of ", test.size(), " tokens has nothing to predict; it needs two"});
    }
  }

  /// The place that the task was made for; a run compares it with its communicator.
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  /// Number of segments of a stream.
  index_t steps_per_epoch() const { return train_.steps_per_epoch(); }

  /// Loads this rank's streams of segment at.step; the first segment of an epoch resets the carried state.
  step_share load(context<Device>& ctx, const step_position& at) {
    const token_segment part = train_.load(at.step);
    global_tokens_ = part.length * part.global_streams;
    if (part.starts) state_.reset(ctx);
    ctx.begin_step(at.total, part.first);
    place_.bring(ctx, part);
    return {0, hasher().number(part.length).digest()};
  }

  /// Runs the forward and backward pass. results[0]: sum of the tokens' losses, results[1]: number of tokens.
  /// A rank without streams sets its gradients to zero.
  void compute(context<Device>& ctx, model_type& net, double* results) {
    // There may be more ranks than streams.
    if (train_.local_streams() == 0) return detail::compute_nothing(ctx, net, results);
    net.root().loss(ctx, place_.inputs(), place_.targets(), state_, results);
    // With this divisor the mean over ranks is the gradient of the mean loss over the global batch's tokens.
    net.root().backward(ctx, static_cast<double>(global_tokens_) / ranks_);
  }

  /// Loads a segment and computes its gradients: load(), then compute(). Returns the losses of this rank's
  /// streams.
  evaluation step(context<Device>& ctx, model_type& net,
                  const step_position& at) requires(std::is_same_v<Device, device::cpu>) {
    return detail::step_at_once(*this, ctx, net, at);
  }

  /// Inputs of a dense network's layers in a step, for budgets in milliseconds.
  std::vector<layer_input> layer_inputs(const model_type& net) const {
    return sequence_inputs(net, options_.segment, std::max<index_t>(1, train_.local_streams()));
  }

  /// Evaluates the model on the test text (evaluate_language). Collective.
  template <class Comm>
  evaluation test(context<Device>& ctx, const model_type& net, Comm& comm) {
    return evaluate_language(ctx, net, comm, test_, options_.test_streams, options_.segment);
  }

  /// Lines of the options that decide the training besides the network, to compare ranks and checkpoints.
  std::string describe() const {
    return detail::message({"streams ", options_.streams, "\nsegment ", options_.segment, "\ntest streams ",
                            options_.test_streams, "\ndropout ", dropout_, "\n"});
  }
  /// Lines that tell the two texts from others: lengths and digests.
  std::string data_lines() const { return data_line("training", train_text_) + data_line("test", test_); }
  /// The recurrent state of this rank's streams, on the device of the model; for checkpoints.
  std::span<T> carried() { return state_.memory().span(); }

 private:
  // Line of one text.
  static std::string data_line(const char* name, std::span<const std::int32_t> text) {
    return detail::message({name, " text ", text.size(), " tokens, digest ",
                            detail::hexadecimal(hasher().values(text).digest()), "\n"});
  }

  std::span<const std::int32_t> train_text_, test_;
  language_task_options options_;
  double dropout_;  // the model's dropout probability, for describe()
  int rank_, ranks_;
  token_streams train_;
  detail::segment_place<Device> place_;
  typename Root::state_type state_;
  index_t global_tokens_ = 0;  // number of tokens of the loaded step, over all ranks
};

PUFFERFISH_NAMESPACE_END
