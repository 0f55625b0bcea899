// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `translation_task`: the task of a training run that trains a Transformer to translate sentences.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/io/pair_batches.hpp>
#include <pufferfish/models/beam_search.hpp>
#include <pufferfish/models/transformer_decoding.hpp>
#include <pufferfish/train/training_run.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of a translation_task. With sum_gradients the learning rate must be chosen for gradients that are
/// proportional to the number of tokens of a batch.
struct translation_task_options {
  index_t batch = 256;         ///< number of pairs of sentences in a step, over all ranks
  index_t bucket_batches = 0;  ///< see pair_batch_options
  label_smoothing smoothing{0.1};
  /// True: gradient of the sum of the tokens' losses, as in the paper's code; false: gradient of their mean.
  bool sum_gradients = false;
  special_tokens special{};  ///< special.padding must be the model's padding
};

namespace detail {

/// Throws shape_error if a sentence is longer than the model's table of positions, value_error for a token
/// outside its vocabulary and for another padding than the model's.
inline void check_pairs(const std::string& who, const sentence_pairs& pairs, const special_tokens& special,
                        const transformer_options& model) {
  if (special.padding != model.padding) {
    throw_error<value_error>(
        {who, ": the model pads with token ", model.padding, ", batches with ", special.padding});
  }
  const std::int32_t added[] = {special.padding, special.begin, special.end};
  ops::check_tokens(who + ", padding, begin and end", added, model.vocabulary);
  const auto check = [&](const char* side, const id_lists& sentences, index_t marks) {
    if (sentences.longest() + marks > model.positions) {
      throw_error<shape_error>({who, ", ", side, ": sentences of up to ", sentences.longest() + marks,
                                " tokens for a table of ", model.positions, " positions"});
    }
    for (index_t i = 0; i < sentences.size(); ++i) {
      ops::check_tokens(
          [&] {
            return message({who, ", ", side, ", sentence ", i});
          },
          sentences[i], model.vocabulary);
    }
  };
  check("source", pairs.source, 2);  // two more tokens: begin and end
  check("target", pairs.target, 1);  // one more token: begin or end
}

/// Memory for a packed batch of sentence pairs on the device, followed by the number by which its gradients
/// are divided.
template <class Device>
class pairs_place {
  using parts = device_parts<Device>;

 public:
  /// Reserves memory for every batch of `source`. `model`: options of the model that reads the batches.
  pairs_place(const pair_batches& source, const transformer_options& model)
      : padding_(model.padding), positions_(model.positions), place_(room(source)) {}

  /// Packs a batch of a set that check_pairs has accepted. Returns the number of tokens that count for the
  /// loss. No rows of padding are added if a row_observer is registered with `ctx`: they would count in its
  /// statistics, and only captured graphs need them. Observed steps are never captured.
  index_t bring(context<Device>& ctx, const pair_batch& part, double normalizer) {
    const extents<2> sources{part.count, part.source_length}, targets{part.count, part.target_length};
    const token_matrix source(part.source.data(), sources), target(part.target.data(), targets),
        next(part.labels.data(), targets);
    const bool observed = ctx.rows().observer() != nullptr;
    const auto rows_of = [&](const token_matrix& ids) {
      const index_t tokens = count_tokens(ids, padding_);
      return observed ? tokens : parts::rows_of_tokens(tokens);
    };
    const pair_packing packing({part.count, rows_of(source), rows_of(target)});
    std::byte* const written = place_.write();
    const index_t counted =
        packing.write(written, source, target, next, padding_, ctx.first_sample(), positions_);
    std::memcpy(written + packing.bytes(), &normalizer, sizeof normalizer);
    const std::byte* const come = place_.bring(ctx, packing.bytes() + number_bytes);
    pairs_ = packing.in(come);
    normalizer_ = reinterpret_cast<const double*>(come + packing.bytes());
    return counted;
  }
  const packed_pairs& pairs() const { return pairs_; }
  const double* normalizer() const { return normalizer_; }

 private:
  static constexpr auto number_bytes = static_cast<index_t>(sizeof(double));

  static index_t room(const pair_batches& source) {
    const index_t pairs = source.max_local_batch();
    const auto rows_of = [pairs](index_t length) { return parts::rows_of_tokens(pairs * length); };
    return pair_packing({pairs, rows_of(source.max_source_length()), rows_of(source.max_target_length())})
               .bytes() +
           number_bytes;
  }

  std::int32_t padding_;
  index_t positions_;
  typename parts::input_place place_;
  packed_pairs pairs_;
  const double* normalizer_ = nullptr;
};

/// Copies logits from the device to the host in one copy, and converts those of 16 bits.
template <class T, class Device>
class logits_place {
 public:
  /// Reserves memory for `room` logits.
  explicit logits_place(index_t room)
      : place_(memory_of<Device>::source(), room, uninitialized), here_(static_cast<std::size_t>(room)) {}

  /// Calls write(view) for a view on the device, then copies the numbers to `logits`.
  template <class Write>
  void fill(const tensor_view<parameter_t<T>, 2>& logits, Write&& write) {
    write(tensor_view<T, 2>(place_.data(), logits.shape()));
    const auto count = static_cast<std::size_t>(logits.size());
    memory_of<Device>::source().to_host(here_.data(), place_.data(), count * sizeof(T));
    std::transform(here_.begin(), here_.begin() + static_cast<std::ptrdiff_t>(count), logits.data(),
                   [](T value) { return static_cast<parameter_t<T>>(value); });
  }

 private:
  memory_block<T> place_;
  std::vector<T> here_;
};
/// The form for float and double on the CPU, where logits are written in place.
template <class T>
requires(std::is_same_v<T, parameter_t<T>>) class logits_place<T, device::cpu> {
 public:
  explicit logits_place(index_t) {}
  template <class Write>
  void fill(const tensor_view<T, 2>& logits, Write&& write) {
    write(logits);
  }
};

}  // namespace detail

/// Mean negative log likelihood per token, without smoothing, of a translator on sentence pairs. Each rank
/// evaluates a part; all return the same result. `batch`: pairs per pass over all ranks. count is the number
/// of target tokens, the end tokens included; `correct` stays 0. The context's mode is restored. Throws the
/// errors of pair_batches, value_error for a token outside the model's vocabulary and if special.padding is
/// not the model's padding, and shape_error for sentences longer than the model's table of positions.
/// Collective.
template <class T, class Device, class Comm>
evaluation evaluate_translation(context<Device>& ctx, const model<transformer<T, Device>, Device>& net,
                                Comm& comm, const sentence_pairs& pairs, index_t batch,
                                const special_tokens& special = {}) {
  pair_batches source(
      pairs,
      {.batch = batch, .shuffle = false, .rank = comm.rank(), .ranks = comm.size(), .special = special});
  detail::check_pairs("evaluate_translation", pairs, special, net.root().options());
  const mode_scope<Device> inference(ctx, run_mode::inference);
  const index_t steps = source.steps_per_epoch();
  memory_block<double> results(memory_of<Device>::source(), steps * 2);  // the host reads them once
  detail::pairs_place<Device> place(source, net.root().options());
  std::int64_t tokens = 0;
  for (index_t step = 0; step < steps; ++step) {
    const pair_batch part = source.load(0, step);
    if (part.count == 0) continue;
    tokens += place.bring(ctx, part, 1.0);
    net.root().loss(ctx, place.pairs(), {}, results.data() + 2 * step);
  }
  return reduce(comm, {detail::sum_of_results(results).loss, 0, tokens});
}

/// Returns the best translation of each sentence (see beam_search), computed on this rank alone. Sentences
/// and translations have no begin and end tokens, as in sentence_pairs; those of both languages are
/// options.begin and options.end. Shorter sentences are padded with the model's padding.
/// The context's mode is restored.
/// `host`: context for the search over the logits, which runs on the host; for a model on the CPU it is ctx.
/// Throws shape_error for sentences longer than the model's table of positions.
/// result[i] belongs to sentences[i]; it is empty if the search has found nothing. All sentences are one
/// batch: memory is proportional to sentences x beam x vocabulary.
/// \code
///   const std::vector<std::vector<std::int32_t>> out = translate(ctx, net, sentences, beam_options{});
/// \endcode
template <class T, class Device>
std::vector<std::vector<std::int32_t>> translate(context<Device>& ctx, context<device::cpu>& host,
                                                 const model<transformer<T, Device>, Device>& net,
                                                 std::span<const std::span<const std::int32_t>> sentences,
                                                 const beam_options& options) {
  const auto count = static_cast<index_t>(sentences.size());
  std::vector<std::vector<std::int32_t>> result(sentences.size());
  if (count == 0) return result;
  std::size_t longest = 0;
  for (const auto& sentence : sentences) longest = std::max(longest, sentence.size() + 2);
  std::vector<std::int32_t> source(sentences.size() * longest, net.root().options().padding);
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    std::int32_t* to = source.data() + i * longest;
    *to++ = options.begin;
    *std::copy(sentences[i].begin(), sentences[i].end(), to) = options.end;
  }
  const mode_scope inference(ctx, run_mode::inference);
  transformer_decoding<T, Device> decoding(ctx, net.root(),
                                           {source.data(), {count, static_cast<index_t>(longest)}},
                                           options.beam, options.max_length);
  using number = parameter_t<T>;  // scalar of the search
  const index_t vocabulary = net.root().options().vocabulary;
  detail::logits_place<T, Device> place(count * options.beam * vocabulary);
  const auto found = beam_search<number>(
      host, count, vocabulary, options, [&](const beam_rows& rows, const tensor_view<number, 2>& logits) {
        place.fill(logits, [&](const tensor_view<T, 2>& there) {
          decoding.step(ctx, rows.tokens, rows.parents, rows.sentences, there);
        });
      });
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i].empty()) continue;
    result[i] = found[i].front().tokens;
    if (found[i].front().ended) result[i].pop_back();
  }
  return result;
}
/// Translates with a model on the CPU; arguments, result and errors are those of the form above.
template <class T>
std::vector<std::vector<std::int32_t>> translate(context<device::cpu>& ctx, const model<transformer<T>>& net,
                                                 std::span<const std::span<const std::int32_t>> sentences,
                                                 const beam_options& options) {
  return translate<T, device::cpu>(ctx, ctx, net, sentences, options);
}

/// Trains a Transformer on sentence pairs. An evaluation counts target tokens, and exp(loss()) is the
/// perplexity; during training the labels are smoothed.
///
/// On a device, a few rows of padding are added to the tokens of a batch, so that steps have few different
/// shapes; each shape is captured into a graph. Steps with a row_observer are not captured and have no rows
/// of padding, so that statistics contain the tokens only, as on the CPU.
/// \code
///   translation_task<float> task(net, train, test, {.batch = 256}, options.seed, comm.rank(), comm.size());
///   training_run<translation_task<float>, self> run(std::move(net), comm, std::move(task), options);
/// \endcode
template <class T, class Device = device::cpu>
class translation_task {
 public:
  using model_type = model<transformer<T, Device>, Device>;

  /// The sets must outlive the object. Throws the errors of pair_batches, value_error for a token outside the
  /// model's vocabulary and if options.special.padding is not the model's padding, and shape_error for
  /// sentences longer than its table of positions.
  translation_task(const model_type& net, const sentence_pairs& train, const sentence_pairs& test,
                   const translation_task_options& options, std::uint64_t seed, int rank, int ranks)
      : test_(&test),
        options_(options),
        shape_(net.root().options()),
        rank_(rank),
        ranks_(ranks),
        train_(train, batches(options, seed, rank, ranks)),
        place_(train_, net.root().options()) {
    detail::check_pairs("translation_task", train, options.special, shape_);
    detail::check_pairs("translation_task, test", test, options.special, shape_);
  }

  /// The place that the task was made for; a run compares it with its communicator.
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  index_t steps_per_epoch() const { return train_.steps_per_epoch(); }

  /// Loads this rank's part of the batch of epoch at.epoch, step at.step. The part may be empty.
  step_share load(context<Device>& ctx, const step_position& at) {
    const pair_batch part = train_.load(at.epoch, at.step);
    ctx.begin_step(at.total, part.first);
    // Gradients divided by this number have the mean over the global batch as their mean over ranks.
    place_.bring(ctx, part,
                 (options_.sum_gradients ? 1.0 : static_cast<double>(part.global_tokens)) / ranks_);
    const packed_pairs& pairs = place_.pairs();
    return {0, hasher()
                   .number(part.count)
                   .number(part.first)
                   .number(pairs.source.rows())
                   .number(pairs.target.rows())
                   .digest()};
  }

  /// Runs the forward and backward pass. results[0]: sum of the tokens' smoothed losses, results[1]: number
  /// of target tokens.
  void compute(context<Device>& ctx, model_type& net, double* results) {
    // A batch may be smaller than the number of ranks.
    if (place_.pairs().source.rows() == 0) return detail::compute_nothing(ctx, net, results);
    net.root().loss(ctx, place_.pairs(), options_.smoothing, results);
    net.root().backward(ctx, place_.normalizer());
  }

  evaluation step(context<Device>& ctx, model_type& net,
                  const step_position& at) requires(std::is_same_v<Device, device::cpu>) {
    return detail::step_at_once(*this, ctx, net, at);
  }

  /// Evaluates the model on the test set (evaluate_translation), without label smoothing. Collective.
  template <class Comm>
  evaluation test(context<Device>& ctx, const model_type& net, Comm& comm) {
    return evaluate_translation(ctx, net, comm, *test_, options_.batch, options_.special);
  }

  std::string describe() const {
    const special_tokens& special = options_.special;
    return detail::message({"batch ", options_.batch, "\nbucket batches ", options_.bucket_batches,
                            "\nlabel smoothing ", pufferfish::describe(options_.smoothing),
                            "\ngradients of the ", options_.sum_gradients ? "sum" : "mean", "\nheads ",
                            shape_.heads, " of ", shape_.key, " and ", shape_.value, "\ndropout ",
                            shape_.dropout, "\n"}) +
           detail::message({"padding, begin and end tokens ", special.padding, " ", special.begin, " ",
                            special.end, "\n"});
  }
  std::string data_lines() const { return data_line("training", train_.set()) + data_line("test", *test_); }

 private:
  static std::string data_line(const char* name, const sentence_pairs& set) {
    hasher all;
    for (index_t i = 0; i < set.size(); ++i) {
      const auto pair = static_cast<std::uint32_t>(i);
      all.number(set.source[pair].size()).values(set.source[pair]).values(set.target[pair]);
    }
    return detail::message(
        {name, " sentences ", set.size(), " pairs, digest ", detail::hexadecimal(all.digest()), "\n"});
  }

  static pair_batch_options batches(const translation_task_options& options, std::uint64_t seed, int rank,
                                    int ranks) {
    return {.batch = options.batch,
            .bucket_batches = options.bucket_batches,
            .seed = seed,
            .rank = rank,
            .ranks = ranks,
            .special = options.special};
  }

  const sentence_pairs* test_;
  translation_task_options options_;
  transformer_options shape_;  // the model's options, for describe()
  int rank_, ranks_;
  pair_batches train_;
  detail::pairs_place<Device> place_;
};

PUFFERFISH_NAMESPACE_END
