// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Converts a safetensors file of weights to low-rank factors and back, without the network:
//   factorize_weights resnet50.safetensors small.safetensors --rank-ratio 0.25
//   factorize_weights small.safetensors dense.safetensors --merge

#include <charconv>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/weights/merge.hpp>

#include "common/weight_options.hpp"

namespace {

using namespace examples;

struct options : weight_options {
  std::optional<index_t> budget;
  bool factorize_embeddings = false;
  std::optional<index_t> embedding_rank;
  std::string embedding_names;
  bool factorize_projections = false;
  std::vector<std::string> groups;
  std::string method = "auto";
  bool merge = false;
  bool all = false;
};

/// The numbers of groups given by --groups, by names of weights. Throws value_error for text that is not
/// NAME=N and for a name that is not a weight of four dimensions in the input.
std::map<std::string, index_t> groups_of(const options& o) {
  std::map<std::string, index_t> groups;
  if (o.groups.empty()) return groups;
  std::map<std::string, std::size_t> dimensions;
  const pufferfish::safetensors_reader source(o.in);
  for (const auto& tensor : source.tensors()) dimensions.emplace(tensor.name, tensor.shape.size());
  for (const std::string& text : o.groups) {
    const auto refuse = [&](const std::string& why) {
      throw pufferfish::value_error("--groups " + pufferfish::detail::quote_name(text) + ": " + why);
    };
    const std::size_t equals = text.rfind('=');
    index_t count = 0;
    if (equals != std::string::npos) {
      const char* const end = text.data() + text.size();
      const auto [rest, problem] = std::from_chars(text.data() + equals + 1, end, count);
      if (problem != std::errc() || rest != end) count = 0;
    }
    if (count < 1) refuse("not NAME=N with a whole number N of at least 1");
    const std::string name = text.substr(0, equals);
    const auto found = dimensions.find(name);
    if (found == dimensions.end()) refuse(o.in + " has no tensor of this name");
    if (found->second != 4 || !pufferfish::detail::is_weight_name(name)) {
      refuse("only the weight of a convolution, NAME.weight with 4 dimensions, has groups; this tensor has " +
             std::to_string(found->second) + " dimensions");
    }
    if (!groups.emplace(name, count).second) refuse("this weight has a number of groups already");
  }
  return groups;
}

pufferfish::weight_policy policy_of(const options& o,
                                    const std::optional<pufferfish::network_statistics>& statistics) {
  pufferfish::weight_policy policy = examples::policy_of(o, statistics);
  policy.budget = o.budget.value_or(0);
  policy.embeddings_dense = !o.factorize_embeddings;
  if (o.embedding_rank) policy.embedding_rank = pufferfish::fixed_rank{*o.embedding_rank};
  policy.embedding = matcher("--embedding-names", o.embedding_names);
  policy.projections_dense = !o.factorize_projections;
  policy.groups = [groups = groups_of(o)](const std::string& name) {
    const auto found = groups.find(name);
    return found == groups.end() ? index_t{1} : found->second;
  };
  if (o.method == "gram") policy.method = pufferfish::svd_method::gram;
  if (o.method == "jacobi") policy.method = pufferfish::svd_method::jacobi;
  if (o.method == "randomized") policy.method = pufferfish::svd_method::randomized;
  return policy;
}

void work(const options& o) {
  const auto statistics = begin(o);
  const console out(0, o.json, progress_style::automatic);
  weight_report report;
  {
    bar show(out);
    const auto observer = [&show](const weight_result& tensor, double share) { show(tensor, share); };
    report = o.merge ? pufferfish::merge_weights(o.in, o.out, threads_for(o.threads, 1), observer)
                     : pufferfish::factorize_weights(o.in, o.out, policy_of(o, statistics), observer);
  }
  std::size_t count = 0;
  for (const weight_result& r : report.tensors) count += r.factorized ? 1 : 0;
  const table_options shown{o.merge, !o.statistics.empty(), o.all};
  out.write(table_of(shown, report));
  out.line(
      format("%zu weights %s: %s", count, o.merge ? "merged" : "factorized", sizes_text(report).c_str()));
  write_json(o.json, to_json(shown, o.in, o.out, report));
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Replaces the weight matrices of a file by low-rank factors, or factors by their products",
               "factorize_weights");
  app.add_option("input", o.in, "Weights: a safetensors file")->required();
  app.add_option("output", o.out, "The safetensors file to write")->required();
  CLI::Option* const budget =
      app.add_option("--budget", o.budget, "Ranks: the best for this number of parameters in the whole file")
          ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 60));
  std::vector<CLI::Option*> choices = add_choices(app, o, budget);
  CLI::Option* embeddings =
      app.add_flag("--factorize-embeddings", o.factorize_embeddings, "Factorize embeddings, too");
  CLI::Option* embedding_rank =
      app.add_option("--embedding-rank", o.embedding_rank, "Rank of embeddings; else as other matrices")
          ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 60))
          ->needs(embeddings)
          ->excludes(budget);
  CLI::Option* embedding_names =
      app.add_option("--embedding-names", o.embedding_names,
                     "Weights whose name matches this regex are embeddings, besides those with common names");
  CLI::Option* projections =
      app.add_flag("--factorize-projections", o.factorize_projections,
                   "Factorize attention's in_proj_weight, too; PyTorch's layer does not load its factors");
  CLI::Option* groups =
      app.add_option("--groups", o.groups,
                     "NAME=N: the convolution with the weight NAME has N groups; repeatable")
          ->type_name("NAME=N")
          ->expected(1)
          ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--svd", o.method, "How matrices are decomposed")
      ->check(CLI::IsMember({"auto", "gram", "jacobi", "randomized"}))
      ->capture_default_str();
  CLI::Option* merge = app.add_flag("--merge", o.merge, "The way back: factors become dense weights");
  choices.insert(choices.end(), {embeddings, embedding_rank, embedding_names, projections, groups});
  for (CLI::Option* other : choices) merge->excludes(other);
  app.add_flag("--all", o.all, "Show every tensor, not only weight matrices");
  add_output_options(app, o);
  return run_on_first(app, argc, argv, [&o] { work(o); });
}
