// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Trains an LSTM language model on WikiText-2 or any text, dense or by the Pufferfish procedure, alone or on
// many ranks, and writes text with it:
//   mpirun -n 2 build/examples/train_language_model --data DIR --width 400 --vocabulary 8000 --mode hybrid
//     --checkpoint run.safetensors --resume --json results.json --sample 50

#include <optional>

#include "common/kept_run.hpp"
#include "common/language.hpp"
#include "common/report.hpp"
#include "common/training.hpp"

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/train/language_task.hpp>

namespace {

using namespace examples;
template <class T, class Device>
using language_model = pufferfish::model<pufferfish::lstm_lm<T, Device>, Device>;

struct options : common_options {
  language_options text;
  index_t width = 400;
  index_t layers = 2;
  double dropout = 0.4;
  procedure_options procedure;
  double clip_norm = 0.25;
  std::string schedule = "plateau";
  double divisor = 4.0;
  double lr_warmup = 0.05;
  std::uint64_t seed = 1;
  exchange_choice exchange;
  checkpoint_options checkpoints;
  sample_options sample;
};

void add_options(CLI::App& app, options& o) {
  o.batch = 20;
  o.lr = 20.0;
  o.procedure.switch_rate = 0.5;
  add_common_options(app, o,
                     {"A text file; or the folder of WikiText-2, or of train.txt, valid.txt and test.txt",
                      "Streams of text that a step reads, over all ranks"});
  app.get_option("--data")->required();
  add_device_options(app, o.device);
  add_language_options(app, o.text);
  app.add_option("--width", o.width, "Of the embedding and of each layer")->check(CLI::Range(1, 65536));
  app.add_option("--layers", o.layers, "LSTM layers")->check(CLI::Range(1, 64));
  app.add_option("--dropout", o.dropout, "Around every layer")->check(CLI::Range(0.0, 0.99));
  add_procedure_options(app, o.procedure);
  add_embedding_options(app, o.procedure);
  app.add_option("--clip-norm", o.clip_norm, "Largest gradient norm; 0: any")->check(check_not_negative);
  app.add_option("--schedule", o.schedule,
                 "Of the learning rate: divided when the loss gets no better, or up and half a "
                 "cosine to zero")
      ->check(CLI::IsMember({"plateau", "cosine"}));
  app.add_option("--divide-rate", o.divisor, "By what plateau divides the rate; 1: it stays")
      ->check(check_positive);
  app.add_option("--lr-warmup", o.lr_warmup, "Epochs in which cosine first rises")->check(check_not_negative);
  app.add_option("--seed", o.seed, "Of everything random");
  add_exchange_options(app, o.exchange);
  add_checkpoint_options(app, o.checkpoints);
  add_sample_options(app, o.sample);
  refuse_without_effect(
      app, {{"--divide-rate", "--schedule", "plateau"}, {"--lr-warmup", "--schedule", "cosine"}});
}

pufferfish::run_options recipe(const options& o) {
  pufferfish::run_options r;
  r.factorize = pufferfish::lstm_lm_policy();
  apply(o.procedure, o, r);
  r.learning_rate = o.lr;
  if (o.schedule == "cosine") {
    r.rate_schedule =
        pufferfish::linear_warmup(o.lr_warmup, 0.0, pufferfish::cosine(schedule_epochs(o, o.procedure)));
  } else if (o.divisor > 1.0) {
    r.rate_plateau.emplace(o.divisor);
  }
  r.optimizer = pufferfish::sgd_options{};
  r.clip_norm = o.clip_norm;
  r.seed = o.seed;
  apply(o.exchange, r);
  return r;
}

nlohmann::ordered_json options_json(const options& o, int ranks) {
  return {{"mode", pufferfish::to_string(o.procedure.mode)},
          {"width", o.width},
          {"layers", o.layers},
          {"dropout", o.dropout},
          {"vocabulary", o.text.vocabulary},
          {"segment", o.text.segment},
          {"rank_ratio", o.procedure.rank_ratio},
          {"factorized_embeddings", embeddings_json(o.procedure)},
          {"switch_rate", o.procedure.switch_rate},
          {"restart_rate", restarts(o.procedure)},
          {"switch", switch_json(o.procedure, o)},
          {"epochs", o.epochs},
          {"warmup_epochs", o.warmup_epochs},
          {"learning_rate", o.lr},
          {"schedule", o.schedule == "cosine" ? recipe(o).rate_schedule.describe() : o.schedule},
          {"divide_rate", o.divisor},
          {"clip_norm", o.clip_norm},
          {"batch", o.batch},
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
        data_(load_language_data(o.data, o.text.corpus(), o.text.shares)),
        run_(initial_model(), comm, make_task(), recipe(o), machine()),
        kept_(o.checkpoints, run_, comm, out_) {}

  /// Returns the exit status.
  int train() {
    if (comm_.rank() == 0) check_files(o_.checkpoints, {o_.json, o_.plot});
    const costs before = costs_now();
    out_.line(
        format("LSTM on %s: %td tokens, vocabulary %td; %s parameters, %s MACs a token, %s; %s, %s each",
               data_.name.c_str(), static_cast<index_t>(data_.corpus.train.size()), data_.corpus.codec.size(),
               grouped(before.parameters).c_str(), grouped(before.macs).c_str(),
               pufferfish::to_string(o_.procedure.mode), counted(comm_.size(), "rank").c_str(),
               counted(threads_for(o_.threads, comm_.size()), "thread").c_str()));
    for (const std::string& note : switch_notes(o_.procedure, o_, run_)) out_.line(note);
    run_display shown(out_, "lstm", o_.batch * o_.text.segment, o_.procedure.explain, {"tokens", true});
    const run_end end = kept_.train(shown);
    std::optional<double> perplexity;
    if (end.finished) {
      perplexity = std::exp(pufferfish::evaluate_language(run_.machine(), run_.net(), comm_,
                                                          std::span(std::as_const(data_.corpus.test)),
                                                          o_.text.eval_streams, o_.text.segment)
                                .loss());
    }
    finish(before, perplexity, end);
    return end.exit_status();
  }

 private:
  using task = pufferfish::language_task<pufferfish::lstm_lm<T, Device>, Device>;
  using run_type = pufferfish::training_run<task, Comm>;

  template <class V = T, class Where = Device>
  language_model<V, Where> initial_model() const {
    check_epochs(o_, o_.procedure);
    pufferfish::lstm_lm_options shape;
    shape.vocabulary = data_.corpus.codec.size();
    shape.width = o_.width;
    shape.layers = o_.layers;
    shape.dropout = o_.dropout;
    check_embeddings(o_.procedure, "the embedding", shape.vocabulary, shape.width);
    language_model<V, Where> net{pufferfish::lstm_lm<V, Where>(shape)};
    net.initialize(o_.seed);
    return net;
  }

  task make_task() const {
    pufferfish::language_task_options t;
    t.streams = o_.batch;
    t.segment = o_.text.segment;
    t.test_streams = o_.text.eval_streams;
    return task(initial_model(), data_.corpus.train, data_.corpus.valid, t, comm_.rank(), comm_.size());
  }

  auto machine() const {
    return machine_of(Device{}, o_.device, threads_for(o_.threads, comm_.size()), comm_.rank());
  }

  costs costs_now() const {
    return {run_.net().parameter_count(), run_.net().root().cost().total().macs, run_.exchange_bytes()};
  }

  void finish(const costs& before, std::optional<double> perplexity, const run_end& end) {
    if (comm_.rank() != 0) return;
    const costs after = costs_now();
    if (perplexity) {
      out_.line(format("test perplexity %.2f; %s parameters, %s MACs a token, %s bytes a step; parameters %s",
                       *perplexity, grouped(after.parameters).c_str(), grouped(after.macs).c_str(),
                       grouped(after.bytes_per_step).c_str(), digest_text(run_.net()).c_str()));
    }
    write_json(o_.json, document(before, after, perplexity, end));
    const curve c = to_curve("lstm", run_.history(), facts_of(run_, before.bytes_per_step), true);
    const std::string drawn = plot_curves(o_.plot, "LSTM on " + data_.name, {c}, true);
    if (!drawn.empty()) out_.line(drawn);
    if (end.finished && o_.sample.tokens > 0) out_.write(sample() + "\n");
  }

  /// Text generated by the trained model.
  std::string sample() {
    pufferfish::cpu_context ctx({threads_for(o_.threads, comm_.size()), o_.seed});
    const auto net = on_host(run_.net(), initial_model<float, pufferfish::device::cpu>());
    pufferfish::lstm_lm_state<float> state = net.root().make_state(1);
    return write_sample<float>(
        data_.corpus.codec, o_.sample, [&](std::int32_t token, std::span<float> logits) {
          const std::int32_t tokens[] = {token};
          net.root().next(ctx, tokens, state, {logits.data(), {1, static_cast<index_t>(logits.size())}});
        });
  }

  nlohmann::ordered_json document(const costs& before, const costs& after, std::optional<double> perplexity,
                                  const run_end& end) const {
    nlohmann::ordered_json j;
    j["options"] = options_json(o_, comm_.size());
    j["data"] = data_.name;
    j["vocabulary"] = data_.corpus.codec.size();
    j["test_perplexity"] = nullptr;
    if (perplexity) j["test_perplexity"] = *perplexity;
    kept_.add_results(j, before, after, o_.exchange, end, true);
    return j;
  }

  const options& o_;
  Comm& comm_;
  console out_;
  language_data data_;
  run_type run_;
  kept_run<run_type, Comm> kept_;
};

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Trains an LSTM language model, dense or by the Pufferfish procedure", "train_language_model");
  add_options(app, o);
  return run(app, argc, argv, [&](auto& comm) {
    return on_device(o.device, comm.rank(), [&](auto device, auto number) {
      return job<decltype(number), decltype(device), std::decay_t<decltype(comm)>>(o, comm).train();
    });
  });
}
