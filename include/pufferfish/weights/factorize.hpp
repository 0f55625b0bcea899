// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `factorize_weights` writes a file of factors from a safetensors file of weights, without the network.
/// plan.hpp chooses the weights; this header reads, factorizes and writes them, tensor by tensor.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/parallel.hpp>
#include <pufferfish/io/safetensors_stream.hpp>
#include <pufferfish/lowrank/budget/budget.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/factorization/layer_truncation.hpp>
#include <pufferfish/weights/file_work.hpp>
#include <pufferfish/weights/metadata.hpp>
#include <pufferfish/weights/plan.hpp>
#include <pufferfish/weights/weight_matrices.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// Factors of one tensor, as bytes in the dtype of the file.
struct made_factors {
  std::vector<std::uint8_t> down, up;
  weight_result result;
};

/// Reads the matrices of a weight and factorizes them in T. All parts get the largest of the ranks that
/// rank_of chooses for them. If factors of this rank have no fewer parameters than the matrices, the result
/// has no factors, and result.reason says so. `result`: the entry of the report, with name, dtype and shape
/// set. Throws the errors of weight_matrices and its members, and of choose_rank.
template <class T>
made_factors factorize_tensor(const safetensors_reader& file, const weight_task& task,
                              const weight_policy& policy, const rank_policy& rank_of, weight_result result) {
  const weight_decision& decision = task.decision;
  const weight_matrices<T> matrices(file, task, policy);
  std::vector<factors<T>> made;
  index_t rank = 0;
  for (index_t p = 0; p < decision.parts; ++p) {
    made.push_back(matrices.make(p, rank_of));
    rank = std::max(rank, made.back().rank());
  }
  made_factors out;
  out.result = std::move(result);
  if (rank > largest_shrinking_rank(decision.rows, decision.cols)) {
    out.result.reason = "factors would not be smaller";
    return out;
  }
  double kept = 0.0, weighted = 0.0, norm2 = 0.0, lost2 = 0.0, predicted = 0.0;
  for (index_t p = 0; p < decision.parts; ++p) {
    factors<T>& one = made[static_cast<std::size_t>(p)];
    // The factors of all parts are one tensor, so all parts get the largest of their ranks.
    if (one.rank() != rank) one = matrices.make(p, fixed_rank{rank});
    // Replaces the factor's elements by their rounded values, so that the reported error is that of the file.
    const auto store = [&](tensor<T, 2>& factor, std::vector<std::uint8_t>& bytes) {
      const std::size_t begin = bytes.size();
      const std::span<T> elements(factor.data(), static_cast<std::size_t>(factor.size()));
      append_floating<T>(task.place.dtype, elements, bytes);
      convert_floating<T>(task.place.dtype, std::span(bytes).subspan(begin), elements);
    };
    tensor<T, 2> width_by_rank;
    if (decision.embedding) {
      width_by_rank = tensor<T, 2>(transpose(tensor_view<const T, 2>(one.down)));
      store(one.up, out.down);
      store(width_by_rank, out.up);
    } else {
      store(one.down, out.down);
      store(one.up, out.up);
    }
    const tensor_view<const T, 2> down = decision.embedding
                                             ? transpose(tensor_view<const T, 2>(width_by_rank))
                                             : tensor_view<const T, 2>(one.down);
    visit_product<T>(one.up, down, [&](index_t first, const tensor<double, 2>& block) {
      for (index_t i = 0; i < block.extent(0); ++i) {
        const T* wanted = matrices.part(p).data() + (first + i) * decision.cols;
        const double* have = block.data() + i * decision.cols;
        for (index_t j = 0; j < decision.cols; ++j) {
          const double lost = static_cast<double>(wanted[j]) - have[j];
          lost2 += lost * lost;
        }
      }
    });
    norm2 += one.report.squared_norm;
    kept += one.report.squared_norm * one.report.kept_energy;
    weighted += one.report.squared_norm * one.report.weighted_energy;
    predicted += one.report.predicted_loss;
  }
  out.result.factorized = true;
  out.result.rank = rank;
  out.result.kind = task.kind;
  out.result.kept_energy = norm2 > 0.0 ? kept / norm2 : 1.0;
  out.result.weighted_energy = norm2 > 0.0 ? weighted / norm2 : 1.0;
  out.result.relative_error = norm2 > 0.0 ? std::sqrt(lost2 / norm2) : 0.0;
  out.result.predicted_loss = predicted;
  out.result.parameters_after = decision.parts * factor_parameters(decision.rows, decision.cols, rank);
  return out;
}

/// Number of parameters of all factors if every rank is 1: the smallest number that factorization can reach.
inline index_t least_parameters(const std::vector<weight_decision>& plan) {
  index_t least = 0;
  for (const weight_decision& d : plan) least += d.factorize ? d.parts * (d.rows + d.cols) : 0;
  return least;
}

/// Returns the truncation of all weights: that of the policy, else the most accurate one that the statistics
/// of all weights allow. Throws value_error, naming the weight, if statistics are missing or belong to no
/// tensor of the file.
inline truncation truncation_of(const std::vector<tensor_place>& tensors,
                                const std::vector<weight_decision>& plan, const weight_policy& policy) {
  if (policy.statistics == nullptr) {
    if (policy.truncate.value_or(truncation::plain) == truncation::plain) return truncation::plain;
    throw_error<value_error>(
        {"factorize_weights: a ", to_string(*policy.truncate), " truncation needs statistics"});
  }
  for (const layer_statistics& layer : policy.statistics->layers) {
    if (std::none_of(tensors.begin(), tensors.end(),
                     [&](const tensor_place& one) { return one.name == layer.name; })) {
      throw_error<value_error>(
          {"factorize_weights: statistics of ", quote_name(layer.name), ", which is no tensor of the file"});
    }
  }
  truncation most = truncation::two_sided;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (!plan[i].factorize) continue;
    factorize_options options;
    options.statistics = policy.statistics->find(tensors[i].name);
    const truncation own = chosen_truncation(options);
    if (own == truncation::plain) {
      throw_error<value_error>({"factorize_weights: no statistics of ", quote_name(tensors[i].name),
                                "; exclude it, or measure it, too"});
    }
    most = std::min(most, own);
  }
  return policy.truncate.value_or(most);
}

/// Returns ranks with which the floating-point elements of the file stay within the policy's budget. Rank 0:
/// the weight stays dense, and its reason is written to `report`. gains[i]: weight_matrices::gains of tensor
/// i. `fixed`: elements of the tensors that stay. The budget must be at least `fixed` +
/// least_parameters(plan). Each weight is one layer of `allocate`, whose errors are passed on.
inline std::vector<index_t> ranks_for_budget(const std::vector<weight_decision>& plan,
                                             std::vector<std::vector<double>> gains, index_t fixed,
                                             const weight_policy& policy, weight_report& report) {
  std::vector<budget_layer> layers;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (!plan[i].factorize) continue;
    budget_layer& layer = layers.emplace_back();
    layer.name = report.tensors[i].name;
    budget_group& group = layer.groups.emplace_back();
    group.size = {plan[i].rows, plan[i].cols};
    group.count = plan[i].parts;
    group.gains = std::move(gains[i]);
    places.push_back(i);
  }
  network_cost rest;
  rest.parameters = static_cast<double>(fixed);
  network_budget budget;
  budget.parameters = policy.budget;
  const std::vector<budget_choice> choices = allocate(layers, rest, budget, {.floor = 1});
  std::vector<index_t> ranks(plan.size(), 0);
  for (std::size_t k = 0; k < choices.size(); ++k) {
    if (!choices[k].dense()) ranks[places[k]] = choices[k].ranks.front();
    if (choices[k].dense()) report.tensors[places[k]].reason = to_string(choices[k].reason);
  }
  return ranks;
}

}  // namespace detail

/// Writes the tensors of the file `in` to the file `out`, with those that weight_plan chooses replaced by
/// their factors of rank r, in the same dtype:
///   NAME.weight [out][in]              -> NAME.down.weight [r][in], NAME.up.weight [out][r]
///   NAME.weight [out][in/g][h][w]      -> NAME.down.weight [g r][in/g][h][w], NAME.up.weight [out][r][1][1]
///   NAME.weight [vocabulary][width]    -> NAME.down.weight [vocabulary][r], NAME.up.weight [width][r]
///   NAME.bias of one of the first two  -> NAME.up.bias
///   NAME.weight_ih_l0 [gates h][in]    -> NAME.weight_ih_l0.down [gates r][in], .up [gates h][r]
///   NAME.in_proj_weight [3 m][m]       -> NAME.in_proj_weight.down [3 r][m], .up [3 m][r]
/// All other tensors and the metadata are copied bit for bit. The lists of factor_lists, which merge_weights
/// reads, are added to the metadata.
///
/// A matrix A is replaced by up down, which minimizes ||A - up down||_F among all products of rank r if the
/// truncation is plain (see truncation for the others; the randomized method is near-optimal). F64 weights
/// are factorized in double, all others in float; factors are rounded to the dtype of the file.
///
/// Cost: in proportion to rows cols min(rows, cols) per matrix of rows x cols, less with the randomized
/// method. With a budget every matrix is read and decomposed twice: once for the gains of its components,
/// once for the factors. Matrices of one weight whose rank is below the largest of its matrices are also
/// decomposed twice. policy.threads weights are processed at once, each with its matrices in memory; report
/// and file do not depend on the number, except for the times.
///
/// Both files are safetensors, whatever their names. Only the matrices in work and the factors that are not
/// written yet are in memory. Throws io_error if a file cannot be read or written, if `in` has another format
/// (the text says how to convert the common ones), or if its metadata have invalid lists of factors. Throws
/// value_error for a matrix with an element that is not finite, for a budget that is too small, for
/// statistics that are needed but missing or that belong to no tensor of the file, for less than 1 thread,
/// and the errors of weight_plan and choose_rank; shape_error for statistics of a matrix of another size.
/// After an error, `out` is unchanged. `out` may be the same file as `in`.
///
/// \code
/// weight_policy policy;
/// policy.rank = rank_ratio{0.25};
/// policy.threads = 4;
/// const weight_report report = factorize_weights("resnet50.safetensors", "small.safetensors", policy);
/// // report.parameters_after floating-point elements of report.parameters_before
/// \endcode
inline weight_report factorize_weights(const std::string& in, const std::string& out,
                                       const weight_policy& policy, const weight_observer& observer = {}) {
  using namespace detail;
  const auto start = std::chrono::steady_clock::now();
  const safetensors_reader source(in);
  const std::vector<tensor_place>& tensors = source.tensors();
  std::vector<weight_tensor> seen;
  for (const tensor_place& t : tensors) seen.push_back({t.name, t.dtype, t.shape});
  const std::vector<weight_decision> plan = weight_plan(seen, policy);
  const truncation kind = truncation_of(tensors, plan, policy);

  weight_report report;
  std::vector<double> cost(tensors.size(), 0.0);
  std::size_t room = 256;  // bytes of the header; at first for the keys of the metadata
  index_t fixed = policy.parameters_elsewhere;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const weight_decision& d = plan[i];
    weight_result& r = report.tensors.emplace_back(copied(tensors[i]));
    r.reason = d.reason;
    r.layer = d.layer;
    r.parts = d.parts;
    r.embedding = d.embedding;
    report.parameters_before += r.parameters_before;
    if (!d.factorize) fixed += r.parameters_before;
    if (d.factorize) {
      cost[i] = static_cast<double>(d.rows) * static_cast<double>(d.cols) * static_cast<double>(d.parts) *
                static_cast<double>(std::min(d.rows, d.cols));
    }
    // Room for the tensor or its two factors, and for two entries in the metadata.
    room += 4 * safetensors_writer::room_for(tensors[i].name + ".down.weight", tensors[i].shape.size());
  }
  room += room_for_metadata(source);
  work_share share(cost, observer);
  const std::vector<std::size_t> order = working_order(tensors, cost);
  const index_t least = fixed + least_parameters(plan);
  if (policy.budget > 0 && policy.budget < least) {
    throw_error<value_error>(
        {in, ": a budget of ", policy.budget, " parameters is too small: tensors that stay have ", fixed,
         ", factors of rank 1 take ", least - fixed, "; the smallest possible budget is ", least});
  }
  safetensors_writer sink(out, room);

  std::vector<weight_task> tasks;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tasks.push_back({tensors[i], plan[i], nullptr, kind, {}});
    if (policy.statistics != nullptr) tasks[i].statistics = policy.statistics->find(tensors[i].name);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (policy.statistics == nullptr || plan[i].bias_of == weight_decision::npos) continue;
    if (!is_floating(tensors[i].dtype)) continue;
    const tensor<double, 2> bias = read_matrix<double>(source, tensors[i], 1);
    tasks[plan[i].bias_of].bias.assign(bias.data(), bias.data() + bias.size());
  }

  const auto wide = [&](std::size_t i) { return tensors[i].dtype == tensor_dtype::f64; };
  std::vector<index_t> ranks(tensors.size(), 0);
  if (policy.budget > 0) {
    std::vector<std::vector<double>> gains(tensors.size());
    thread_pool(policy.threads).run(static_cast<index_t>(order.size()), [&](index_t task, int) {
      const std::size_t i = order[static_cast<std::size_t>(task)];
      if (!plan[i].factorize) return;
      gains[i] = wide(i) ? weight_matrices<double>(source, tasks[i], policy).gains()
                         : weight_matrices<float>(source, tasks[i], policy).gains();
    });
    ranks = ranks_for_budget(plan, std::move(gains), fixed, policy, report);
  }

  std::vector<std::size_t> written(tensors.size(), 0);
  const auto make = [&](index_t task) {
    const std::size_t i = order[static_cast<std::size_t>(task)];
    made_factors made;
    made.result = report.tensors[i];
    if (!plan[i].factorize || (policy.budget > 0 && ranks[i] == 0)) return made;
    const auto begun = std::chrono::steady_clock::now();
    const rank_policy rank_of =
        policy.budget > 0 ? rank_policy(fixed_rank{ranks[i]}) : rank_policy_of(policy, plan[i]);
    const auto run = wide(i) ? &factorize_tensor<double> : &factorize_tensor<float>;
    made = run(source, tasks[i], policy, rank_of, std::move(made.result));
    made.result.seconds = seconds_since(begun);
    return made;
  };
  const auto finish = [&](index_t task, made_factors made) {
    const std::size_t i = order[static_cast<std::size_t>(task)];
    const tensor_place& place = tensors[i];
    if (made.result.factorized) {
      const auto [down, up] = factor_shapes(place.shape, plan[i], made.result.rank);
      sink.begin(factor_name(place.name, "down"), place.dtype, down);
      sink.write(made.down);
      sink.begin(factor_name(place.name, "up"), place.dtype, up);
      sink.write(made.up);
    } else {
      written[i] = sink.begin(place.name, place.dtype, place.shape);
      copy_tensor(source, place, sink);
    }
    report.tensors[i] = std::move(made.result);
    share.done(report.tensors[i], cost[i]);
  };
  run_in_order<made_factors>(policy.threads, static_cast<index_t>(order.size()), make, finish);

  safetensors_metadata metadata = source.metadata();
  metadata.erase("pufferfish.digest");  // of a checkpoint's tensors (train/checkpoint.hpp)
  factor_lists lists = factor_lists::read(metadata, in);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const weight_result& r = report.tensors[i];
    report.parameters_after += r.parameters_after;
    if (r.factorized) lists.add(r.name, r.rank, r.parts, r.embedding);
    // Only now is it known whether a weight has been factorized.
    if (plan[i].bias_of != weight_decision::npos && report.tensors[plan[i].bias_of].factorized) {
      sink.rename(written[i], joined(joined(stem_of(r.name), "up"), "bias"));
    }
  }
  lists.write(metadata, out);
  sink.commit(metadata);
  report.seconds = seconds_since(start);
  return report;
}

PUFFERFISH_NAMESPACE_END
