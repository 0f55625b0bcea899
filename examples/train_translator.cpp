// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Trains a Transformer to translate German into English (Multi30k), dense or by the Pufferfish procedure,
// alone or on many ranks, and scores its translations of the test set by BLEU:
//   mpirun -n 2 build/examples/train_translator --data DIR --layers 3 --width 256 --mode hybrid
//     --checkpoint run.safetensors --resume --json results.json

#include <optional>

#include "common/kept_run.hpp"
#include "common/report.hpp"
#include "common/text_data.hpp"
#include "common/training.hpp"
#include "text/bleu.hpp"

#include <pufferfish/train/translation_task.hpp>

namespace {

using namespace examples;
template <class T, class Device>
using translator = typename pufferfish::translation_task<T, Device>::model_type;

struct options : common_options {
  translation_options text;
  pufferfish::transformer_options shape;
  procedure_options procedure;
  index_t dense_layers = 1;
  index_t bucket_batches = 20;
  std::string schedule = "noam";
  index_t noam_warmup = 1000;
  double smoothing = 0.1;
  double clip_norm = 0.0;
  pufferfish::beam_options beam;
  index_t show = 3;
  std::uint64_t seed = 1;
  exchange_choice exchange;
  checkpoint_options checkpoints;
};

void add_options(CLI::App& app, options& o) {
  o.batch = 128;
  o.lr = 1.0;
  o.shape.width = 256;
  o.shape.hidden = 1024;
  o.shape.layers = 3;
  o.shape.key = o.shape.value = 32;
  add_common_options(app, o,
                     {"Folder of Multi30k: train, val and test_2016_flickr, each .de and .en",
                      "Pairs of sentences a step, over all ranks",
                      "Factor of noam's learning rate, or cosine's highest learning rate"});
  app.get_option("--data")->required();
  add_device_options(app, o.device);
  app.add_option("--width", o.shape.width, "Of embeddings and blocks")->check(CLI::Range(1, 65536));
  app.add_option("--hidden", o.shape.hidden, "Of the feed-forward blocks")->check(CLI::Range(1, 65536));
  app.add_option("--layers", o.shape.layers, "Of each stack")->check(CLI::Range(1, 64));
  app.add_option("--heads", o.shape.heads, "Of each attention")->check(CLI::Range(1, 256));
  app.add_option("--dropout", o.shape.dropout, "Of embeddings, blocks and attention weights")
      ->check(CLI::Range(0.0, 0.99));
  app.add_option("--embedding-deviation", o.shape.embedding_deviation,
                 "Of the words' initial values; 0: Xavier's, as in the paper's code")
      ->check(check_not_negative);
  app.add_option("--min-count", o.text.minimum_count, "Rarer words become <unk>")
      ->check(CLI::Range(1, 1000000));
  app.add_option("--vocabulary", o.text.maximum_words, "Most words; 0: all")->check(CLI::Range(0, 100000000));
  app.add_option("--max-length", o.text.max_length, "Longest sentence, in words")->check(CLI::Range(1, 190));
  add_procedure_options(app, o.procedure);
  add_embedding_options(app, o.procedure);
  app.add_option("--dense-layers", o.dense_layers, "Layers of each stack that stay dense")
      ->check(CLI::Range(0, 64));
  app.add_option("--bucket-batches", o.bucket_batches,
                 "Number of batches whose pairs are sorted by length at a time; 0: none")
      ->check(CLI::Range(0, 100000));
  app.add_option("--schedule", o.schedule,
                 "Of the learning rate: noam rises, then falls like 1 / sqrt(step); cosine rises, then falls "
                 "to zero")
      ->check(CLI::IsMember({"noam", "cosine"}));
  app.add_option("--noam-warmup", o.noam_warmup, "Steps until the learning rate is at its highest")
      ->check(CLI::Range(1, 10000000));
  app.add_option("--label-smoothing", o.smoothing, "Share spread over all other words")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--clip-norm", o.clip_norm, "Largest gradient norm; 0: any")->check(check_not_negative);
  app.add_option("--beam", o.beam.beam, "Hypotheses of a sentence when translating")
      ->check(CLI::Range(1, 1000));
  app.add_option("--length-penalty", o.beam.length_penalty, "Alpha of beam search; 0: none");
  app.add_option("--show", o.show, "Translations to show")->check(CLI::Range(0, 1000));
  app.add_option("--seed", o.seed, "Of everything random");
  add_exchange_options(app, o.exchange);
  add_checkpoint_options(app, o.checkpoints);
}

nlohmann::ordered_json options_json(const options& o, int ranks) {
  return {{"mode", pufferfish::to_string(o.procedure.mode)},
          {"width", o.shape.width},
          {"hidden", o.shape.hidden},
          {"layers", o.shape.layers},
          {"heads", o.shape.heads},
          {"dropout", o.shape.dropout},
          {"embedding_deviation", o.shape.embedding_deviation},
          {"rank_ratio", o.procedure.rank_ratio},
          {"factorized_embeddings", embeddings_json(o.procedure)},
          {"switch_rate", o.procedure.switch_rate},
          {"restart_rate", restarts(o.procedure)},
          {"switch", switch_json(o.procedure, o)},
          {"dense_layers", o.dense_layers},
          {"epochs", o.epochs},
          {"warmup_epochs", o.warmup_epochs},
          {"noam_warmup", o.noam_warmup},
          {"schedule", o.schedule},
          {"rate_factor", o.lr},
          {"label_smoothing", o.smoothing},
          {"batch", o.batch},
          {"beam", o.beam.beam},
          {"length_penalty", o.beam.length_penalty},
          {"seed", o.seed},
          {"ranks", ranks},
          {"threads", threads_for(o.threads, ranks)},
          {"device", o.device.device},
          {"precision", o.device.precision}};
}

/// A training run with its checkpoints, on one of the ranks; its network computes in T.
template <class T, class Device, class Comm>
class job {
 public:
  job(const options& o, Comm& comm)
      : o_(o),
        comm_(comm),
        out_(comm.rank(), o.json, o.progress),
        data_(load_translation_data(o.data, o.text)),
        run_(initial_model(), comm, make_task(), recipe(), machine()),
        kept_(o.checkpoints, run_, comm, out_) {}

  /// Returns the exit status.
  int train() {
    if (comm_.rank() == 0) check_files(o_.checkpoints, {o_.json, o_.plot});
    const costs before = costs_now();
    out_.line(format("Transformer on Multi30k: %td pairs, vocabulary %td; %s parameters, %s; %s, %s each",
                     data_.train.size(), data_.words.size(), grouped(before.parameters).c_str(),
                     pufferfish::to_string(o_.procedure.mode), counted(comm_.size(), "rank").c_str(),
                     counted(threads_for(o_.threads, comm_.size()), "thread").c_str()));
    for (const std::string& note : switch_notes(o_.procedure, o_, run_)) out_.line(note);
    run_display shown(out_, "transformer", o_.batch, o_.procedure.explain, {"pairs", true});
    const run_end end = kept_.train(shown);
    std::optional<bleu_score> bleu;
    if (end.finished) bleu = score();
    finish(before, bleu, end);
    return end.exit_status();
  }

 private:
  using task = pufferfish::translation_task<T, Device>;
  using run_type = pufferfish::training_run<task, Comm>;

  pufferfish::transformer_options shape() const {
    pufferfish::transformer_options result = o_.shape;
    result.vocabulary = data_.words.size();
    result.padding = translation_tokens::padding;
    if (result.width % result.heads != 0) {
      throw pufferfish::value_error("a width of " + std::to_string(result.width) + " is not a multiple of " +
                                    std::to_string(result.heads) + " heads");
    }
    result.key = result.value = result.width / result.heads;
    return result;
  }

  translator<T, Device> initial_model() const {
    check_epochs(o_, o_.procedure);
    const pufferfish::transformer_options sizes = shape();
    check_embeddings(o_.procedure, "the embedding", sizes.vocabulary, sizes.width);
    translator<T, Device> net{pufferfish::transformer<T, Device>(sizes)};
    net.initialize(o_.seed);
    return net;
  }

  task make_task() const {
    pufferfish::translation_task_options t;
    t.batch = o_.batch;
    t.bucket_batches = o_.bucket_batches;
    t.smoothing.epsilon = o_.smoothing;
    return task(initial_model(), data_.train, data_.valid, t, o_.seed, comm_.rank(), comm_.size());
  }

  pufferfish::run_options recipe() const {
    pufferfish::run_options r;
    r.factorize = pufferfish::transformer_policy(o_.dense_layers);
    apply(o_.procedure, o_, r);
    const index_t steps_per_epoch = (data_.train.size() + o_.batch - 1) / o_.batch;
    const auto steps = static_cast<double>(steps_per_epoch);
    const auto warmup = static_cast<double>(o_.noam_warmup);
    if (o_.schedule == "noam") {
      r.learning_rate = 1.0;
      r.rate_schedule = pufferfish::noam({static_cast<double>(o_.shape.width), warmup, o_.lr}, steps);
    } else {
      r.learning_rate = o_.lr;
      r.rate_schedule = pufferfish::linear_warmup(warmup / steps, 0.0,
                                                  pufferfish::cosine(schedule_epochs(o_, o_.procedure)));
    }
    pufferfish::adam_options adam;
    adam.beta2 = 0.98;
    adam.eps = 1e-9;
    r.optimizer = adam;
    r.clip_norm = o_.clip_norm;
    r.seed = o_.seed;
    apply(o_.exchange, r);
    return r;
  }

  auto machine() const {
    return machine_of(Device{}, o_.device, threads_for(o_.threads, comm_.size()), comm_.rank());
  }

  costs costs_now() const {
    return {run_.net().parameter_count(), run_.net().root().cost(20, 20).total().macs, run_.exchange_bytes()};
  }

  /// BLEU of the test set: every rank translates its share.
  bleu_score score() {
    pufferfish::cpu_context host({threads_for(o_.threads, comm_.size()), o_.seed});
    bleu_options how;
    how.lower_case = o_.text.lower_case;
    bleu counter(how);
    pufferfish::beam_options beam = o_.beam;
    beam.max_length = o_.text.max_length;
    beam.begin = translation_tokens::begin;
    beam.end = translation_tokens::end;
    beam.forbidden = {translation_tokens::padding, translation_tokens::begin};
    constexpr index_t at_once = 32;
    const index_t all = data_.test.size();
    const index_t end = all * (comm_.rank() + 1) / comm_.size();
    for (index_t first = all * comm_.rank() / comm_.size(); first < end; first += at_once) {
      std::vector<std::span<const std::int32_t>> sentences;
      for (index_t i = first; i < std::min(end, first + at_once); ++i) {
        sentences.push_back(data_.test.source[static_cast<std::uint32_t>(i)]);
      }
      const auto found =
          pufferfish::translate(run_.machine(), host, run_.net(), std::span(std::as_const(sentences)), beam);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const auto line = static_cast<std::size_t>(first) + i;
        const std::string text = data_.text(found[i]);
        counter.add(text, data_.test_references[line]);
        if (comm_.rank() == 0 && static_cast<index_t>(line) < o_.show) {
          shown_.push_back({text, data_.test_references[line]});
        }
      }
    }
    signature_ = counter.signature();
    comm_.all_reduce_sum(counter.counts());
    return counter.score();
  }

  void finish(const costs& before, const std::optional<bleu_score>& bleu, const run_end& end) {
    if (comm_.rank() != 0) return;
    const costs after = costs_now();
    for (const auto& [text, reference] : shown_) out_.line("  " + text + "\n    (" + reference + ")");
    if (bleu) {
      out_.line(format(
          "test BLEU %.2f (%s); validation perplexity %.2f; %s parameters, %s bytes a step; parameters %s",
          bleu->score, signature_.c_str(), std::exp(run_.history().back().test_loss),
          grouped(after.parameters).c_str(), grouped(after.bytes_per_step).c_str(),
          digest_text(run_.net()).c_str()));
    }
    write_json(o_.json, document(before, after, bleu, end));
    const curve c = to_curve("transformer", run_.history(), facts_of(run_, before.bytes_per_step), true);
    const std::string drawn = plot_curves(o_.plot, "Transformer on Multi30k", {c}, true);
    if (!drawn.empty()) out_.line(drawn);
  }

  nlohmann::ordered_json document(const costs& before, const costs& after,
                                  const std::optional<bleu_score>& bleu, const run_end& end) const {
    nlohmann::ordered_json j;
    j["options"] = options_json(o_, comm_.size());
    j["vocabulary"] = data_.words.size();
    j["bleu"] = nullptr;
    if (bleu) j["bleu"] = bleu->score;
    j["bleu_signature"] = signature_;
    kept_.add_results(j, before, after, o_.exchange, end, true);
    return j;
  }

  const options& o_;
  Comm& comm_;
  console out_;
  translation_data data_;
  run_type run_;
  kept_run<run_type, Comm> kept_;
  std::vector<std::pair<std::string, std::string>> shown_;
  std::string signature_;
};

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Trains a Transformer to translate, dense or by the Pufferfish procedure", "train_translator");
  add_options(app, o);
  return run(app, argc, argv, [&](auto& comm) {
    return on_device(o.device, comm.rank(), [&](auto device, auto number) {
      return job<decltype(number), decltype(device), std::decay_t<decltype(comm)>>(o, comm).train();
    });
  });
}
