// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// The training examples' options for the exchange between ranks.

#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <nlohmann/json.hpp>

#include <pufferfish/prune/mask.hpp>
#include <pufferfish/train/options.hpp>

#include "add_choice.hpp"
#include "compressors.hpp"

namespace examples {

struct exchange_choice {
  std::string compress = "none";  // also bf16, fp16
  compressor_settings settings = {};
  pufferfish::compression_phase phase = pufferfish::compression_phase::both;
  bool by_bucket = false;
  bool tune = false;
  pufferfish::index_t local_steps = 0;  // 0: gradients are exchanged in every step
  pufferfish::rare_training rare = {};
  std::optional<pufferfish::pruning_method> prune = {};
  pufferfish::pruning_options pruning = {};
  bool ternary = false;
  double shrink_rank = 0.0;  // threshold; 0: ranks do not shrink
  pufferfish::index_t shrink_patience = pufferfish::shrink_rank_options().patience;
  double scale_sparsity = 0.0;
};

/// Adds --prune and its settings.
inline void add_pruning_options(CLI::App& app, exchange_choice& o) {
  using pufferfish::pruning_method;
  add_choice<std::optional<pruning_method>>(
      app, "--prune", o.prune,
      {{"none", std::nullopt}, {"grasp", pruning_method::grasp}, {"magnitude", pruning_method::magnitude}},
      "Remove weights once, and exchange the gradients of those that remain");
  app.add_option("--prune-ratio", o.pruning.ratio, "Share of the weights that are removed")
      ->capture_default_str();
  app.add_option("--prune-epoch", o.pruning.epoch, "At the start of this epoch, counted from 0")
      ->capture_default_str();
  app.add_flag("--prune-ternary", o.ternary, "Exchange TernGrad's signs of the remaining gradients");
  app.add_option(
         "--shrink-rank", o.shrink_rank,
         "After the switch, remove rank components whose contribution stays below this share of their "
         "layer's largest one; 0: none")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--shrink-patience", o.shrink_patience, "Epochs in a row in which a component must be small")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--scale-sparsity", o.scale_sparsity,
                 "Weight of the sum of the batch norms' |weight| in the loss; 0: none")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
}

/// Adds --local-steps and the settings of the outer loop.
inline void add_rare_options(CLI::App& app, exchange_choice& o) {
  pufferfish::rare_training& rare = o.rare;
  app.add_option("--local-steps", o.local_steps,
                 "Steps that every rank takes alone before ranks exchange the change of their parameters; 0: "
                 "gradients are exchanged in every step")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  app.add_option("--outer-rate", rare.outer_rate, "Learning rate of the exchanged change")
      ->capture_default_str();
  app.add_option("--outer-momentum", rare.outer_momentum, "Nesterov momentum of the exchanged change")
      ->capture_default_str();
  app.add_option("--outer-fragments", rare.fragments,
                 "Parts of the parameters, which are exchanged at times of their own")
      ->capture_default_str();
  app.add_option("--outer-delay", rare.delay, "Local steps that are taken while a fragment travels")
      ->capture_default_str();
  app.add_option("--outer-mixing", rare.mixing, "Share that the local values keep when a fragment arrives")
      ->capture_default_str();
  app.add_option("--local-steps-power", rare.power,
                 "p: --local-steps times (rate / --lr)^p; above 0: rare at high rates, frequent at the end")
      ->capture_default_str();
}

/// Adds --compress-... for each setting of a compressor.
inline void add_compressor_settings(CLI::App& app, compressor_settings& o) {
  using pufferfish::code_memory;
  using pufferfish::code_route;
  const char* const own = "the compressor's own";
  app.add_option("--compress-rank", o.rank, "Rank of PowerSGD's products, or of products with as many bytes")
      ->check(CLI::Range(1, 100000))
      ->default_str(own);
  app.add_option("--compress-ratio", o.ratio, "Share of the values that is sent")->default_str(own);
  app.add_option("--compress-bits", o.bits, "Of a value")->check(CLI::IsMember({2, 4, 8}))->default_str(own);
  app.add_option("--compress-bucket", o.bucket, "Values that share a norm")
      ->check(CLI::Range(1, 1 << 30))
      ->default_str(own);
  app.add_option("--compress-sparsity", o.sparsity, "Atoms of a tensor that are sent, in the mean")
      ->default_str(own);
  app.add_option("--compress-start-step", o.start_step, "Send gradients whole before this step")
      ->default_str(own);
  app.add_option("--compress-interval", o.interval,
                 "Accordion: compression of a matrix is decided after epochs 0, I, 2 I, ...")
      ->default_str(own);
  app.add_option("--compress-threshold", o.threshold,
                 "Accordion: relative change of a gradient's norm from which on a matrix is compressed less")
      ->default_str(own);
  add_choice<std::optional<code_route>>(
      app, "--compress-route", o.route,
      {{own, std::nullopt},
       {"gather", code_route::gather},
       {"two-hop", code_route::two_hop},
       {"sparse", code_route::sparse}},
      "All codes to all ranks, stripes to owners and means back, or sums of entries");
  add_choice<std::optional<code_memory>>(app, "--compress-memory", o.memory,
                                         {{own, std::nullopt},
                                          {"none", code_memory::none},
                                          {"feedback", code_memory::error_feedback},
                                          {"rescaled", code_memory::rescaled_error_feedback}},
                                         "Add what a code has lost to the next gradients");
}

/// Options of what travels between ranks, and when.
inline void add_wire_options(CLI::App& app, exchange_choice& o) {
  using pufferfish::compression_phase;
  std::vector<std::string> names{"bf16", "fp16"};
  for (const named_compressor& one : named_compressors()) names.push_back(one.name);
  app.add_option(
         "--compress", o.compress,
         "What travels instead of the gradients: halves of their bytes (bf16, fp16), or a compressor's codes")
      ->check(CLI::IsMember(names));
  add_compressor_settings(app, o.settings);
  add_choice<compression_phase>(app, "--compress-phase", o.phase,
                                {{"both", compression_phase::both},
                                 {"dense", compression_phase::dense},
                                 {"low-rank", compression_phase::low_rank}},
                                "Compress in all epochs, before the switch, or after it");
  app.add_flag("--compress-by-bucket", o.by_bucket,
               "Compress and send each bucket of gradients while the backward pass still runs");
  app.add_flag("--tune-exchange", o.tune,
               "Measure the network for some seconds first (12 s at 100 ms of delay), and choose messages "
               "and algorithms by that");
  add_rare_options(app, o);
}

inline void add_exchange_options(CLI::App& app, exchange_choice& o) {
  add_wire_options(app, o);
  add_pruning_options(app, o);
}

/// Applies the choice to run options whose clipping is set. Throws value_error for conflicting options.
inline void apply(const exchange_choice& o, pufferfish::run_options& r) {
  r.tune_exchange = o.tune;
  const bool wire = o.compress == "none" || o.compress == "bf16" || o.compress == "fp16";
  if (o.compress == "bf16") r.exchange.wire = pufferfish::exchange_wire::bf16;
  if (o.compress == "fp16") r.exchange.wire = pufferfish::exchange_wire::fp16;
  if (wire && o.phase != pufferfish::compression_phase::both) {
    pufferfish::detail::throw_error<pufferfish::value_error>(
        {"--compress-phase ", pufferfish::to_string(o.phase), " needs a compressor, and --compress is ",
         o.compress});
  }
  r.compression = compression_of(wire ? "none" : o.compress, o.settings, o.compress);
  r.phase_of_compression = o.phase;
  if (wire && o.by_bucket) {
    pufferfish::detail::throw_error<pufferfish::value_error>(
        {"--compress-by-bucket needs a compressor, and --compress is ", o.compress});
  }
  if (o.by_bucket && o.local_steps > 0) {
    pufferfish::detail::throw_error<pufferfish::value_error>(
        {"--compress-by-bucket with --local-steps ", o.local_steps, ", which exchanges no gradients"});
  }
  r.exchange.compress_by_bucket = o.by_bucket;
  if (o.local_steps > 0) {
    r.rare = o.rare;
    r.rare->local_steps = o.local_steps;
    r.rare->exchange.wire = r.exchange.wire;
  }
  r.scale_sparsity = o.scale_sparsity;
  if (o.shrink_rank > 0.0) {
    r.shrink_rank.emplace();
    r.shrink_rank->threshold = o.shrink_rank;
    r.shrink_rank->patience = o.shrink_patience;
  }
  if (o.prune) {
    r.pruning = o.pruning;
    r.pruning->method = *o.prune;
    if (o.ternary) r.pruning->ternary.emplace();
  }
  if (o.compress == "signum" && r.clip_norm > 0.0) {
    throw pufferfish::value_error(
        "--compress signum leaves signs, whose norm says nothing: it needs --clip-norm 0");
  }
}

/// Bytes and time per step of this rank's exchanges, since the start, the resumption or the switch.
template <class Run>
nlohmann::ordered_json exchange_json(const exchange_choice& o, const Run& run) {
  const pufferfish::exchange_report& report = run.exchange_done();
  const double steps = report.steps > 0 ? static_cast<double>(report.steps) : 1.0;
  const pufferfish::exchange_plan& plan = run.plan();
  nlohmann::ordered_json rules = nlohmann::ordered_json::array();
  for (const pufferfish::exchange_rule& rule : plan.rules) {
    rules.push_back(
        {{"up_to_bytes", rule.up_to_bytes}, {"algorithm", pufferfish::to_string(rule.algorithm)}});
  }
  nlohmann::ordered_json rare = nullptr;
  if (const auto done = run.rare_exchanges()) {
    const double local_steps = done->local_steps > 0 ? static_cast<double>(done->local_steps) : 1.0;
    rare = {{"options", describe(*run.options().rare)},
            {"local_steps", done->local_steps},
            {"outer_steps", done->outer_steps},
            {"payload_bytes_a_step", static_cast<double>(done->payload_bytes) / local_steps},
            {"exposed_ms", done->exposed_ms / local_steps},
            {"thread_busy_ms", done->busy_ms / local_steps}};
  }
  nlohmann::ordered_json pruning = nullptr;
  if (const pufferfish::weight_mask* const mask = run.pruned(); mask != nullptr) {
    pruning = {{"options", describe(*run.options().pruning)},
               {"kept", mask->kept()},
               {"prunable", mask->prunable()},
               {"parameters", mask->survivors()}};
  }
  nlohmann::ordered_json shrinking = nullptr;
  if (run.options().shrink_rank) shrinking = describe(*run.options().shrink_rank);
  return {{"compress", o.compress},
          {"by_bucket", o.by_bucket},
          {"rare", rare},
          {"pruning", pruning},
          {"shrink_rank", shrinking},
          {"scale_sparsity", run.options().scale_sparsity},
          {"compressor", pufferfish::describe(run.options().compression)},
          {"phase", pufferfish::to_string(run.options().phase_of_compression)},
          {"wire", pufferfish::to_string(run.options().exchange.wire)},
          {"payload_bytes", run.exchange_bytes()},
          {"exposed_ms", report.exposed_ms / steps},
          {"encode_ms", report.encode_ms / steps},
          {"decode_ms", report.decode_ms / steps},
          {"update_ms", report.update_ms / steps},
          {"thread_busy_ms", report.busy_ms / steps},
          {"thread_processor_ms", report.processor_ms / steps},
          {"plan",
           {{"bucket_bytes", plan.buckets.bytes},
            {"first_bucket_bytes", plan.buckets.first_bytes},
            {"algorithms", rules},
            {"measured_latency_us", 1e6 * plan.latency},
            {"measured_mbit_per_second", 8e-6 * plan.bytes_per_second}}}};
}

}  // namespace examples
