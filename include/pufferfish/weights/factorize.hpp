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
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/parallel.hpp>
#include <pufferfish/io/safetensors_stream.hpp>
#include <pufferfish/lowrank/budget/budget.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/factorization/layer_truncation.hpp>
#include <pufferfish/weights/metadata.hpp>
#include <pufferfish/weights/plan.hpp>
#include <pufferfish/weights/weight_matrices.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Outcome for one tensor. A tensor that was copied has rank 0 and equal numbers of parameters; in the report
/// of factorize_weights its `reason` says why.
struct weight_result {
  std::string name;  ///< name in the dense file
  tensor_dtype dtype{};
  std::vector<index_t> shape;
  bool factorized = false;      ///< or merged, in the report of merge_weights
  std::string reason;           ///< why the tensor was copied
  index_t layer = 0;            ///< see weight_decision
  index_t rank = 0;             ///< of each matrix
  index_t parts = 1;            ///< number of matrices
  bool embedding = false;       ///< see weight_decision
  double kept_energy = 1.0;     ///< sum of kept sigma^2 / ||A||_F^2
  double relative_error = 0.0;  ///< ||A - up down||_F / ||A||_F with the factors rounded as in the file
  truncation kind = truncation::plain;
  double weighted_energy = 1.0;  ///< see factor_report
  /// Predicted growth of the mean loss, to second order; NaN: no statistics of gradients.
  double predicted_loss = std::numeric_limits<double>::quiet_NaN();
  index_t parameters_before = 0;
  index_t parameters_after = 0;
  double seconds = 0.0;  ///< of reading and computing; 0 if no factors were computed
};

/// Outcome for a file. Parameters are elements of floating-point tensors, so that integer buffers do not
/// count. The numbers of the file are the sums of those of its tensors.
///
/// \code
/// for (const weight_result& tensor : report.tensors) {
///   if (tensor.factorized) std::printf("%s: rank %td\n", tensor.name.c_str(), tensor.rank);
/// }
/// \endcode
struct weight_report {
  std::vector<weight_result> tensors;  ///< in the order of the file that was read
  index_t parameters_before = 0;
  index_t parameters_after = 0;
  double seconds = 0.0;  ///< wall-clock time of the whole call
};

/// Called after each tensor, one call at a time, with the share of the work done, 0 .. 1. Tensors come in the
/// order in which they are written, by falling element size and cost, not in that of the file. With several
/// threads, any of them makes the calls. An exception thrown by the observer ends the call and is rethrown to
/// the caller; no file is written.
using weight_observer = std::function<void(const weight_result& tensor, double share)>;

namespace detail {

/// Size in bytes of the pieces in which an unchanged tensor is copied.
inline constexpr std::uint64_t copy_piece = std::uint64_t{1} << 20;

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Runs make(task) on `threads` threads, and finish(task, result) in the order of the tasks, one at a time,
/// on the thread that has completed the next missing result. Results wait in memory for those of earlier
/// tasks. The first exception is rethrown, and no further finish is called after one of finish. Throws
/// value_error for less than 1 thread.
template <class Result, class Make, class Finish>
void run_in_order(int threads, index_t tasks, const Make& make, const Finish& finish) {
  std::vector<std::optional<Result>> waiting(static_cast<std::size_t>(tasks));
  std::mutex mutex;
  std::size_t next = 0;
  bool broken = false;
  thread_pool(threads).run(tasks, [&](index_t task, int) {
    Result result = make(task);
    const std::lock_guard lock(mutex);
    waiting[static_cast<std::size_t>(task)] = std::move(result);
    while (!broken && next < waiting.size() && waiting[next]) {
      broken = true;  // stays true if finish throws
      finish(static_cast<index_t>(next), std::move(*waiting[next]));
      broken = false;
      waiting[next++].reset();
    }
  });
}

/// Computes up * down, [rows x rank] times [rank x cols], in blocks of 256 rows, with sums in double, and
/// passes each to visit(first_row, block). The block is valid during the call.
template <class T, class Visit>
void visit_product(const tensor_view<const T, 2>& up, const tensor_view<const T, 2>& down,
                   const Visit& visit) {
  constexpr index_t block_rows = 256;
  for (index_t first = 0; first < up.extent(0); first += block_rows) {
    const index_t rows = std::min(block_rows, up.extent(0) - first);
    tensor<double, 2> block({rows, down.extent(1)});
    add_product_tn(transpose(up.slice(0, first, rows)), down, block);
    visit(first, std::as_const(block));
  }
}

/// Factors of a tensor, as bytes in the dtype of the file.
struct made_factors {
  std::vector<std::uint8_t> down, up;
  weight_result result;
};

/// Reads the matrices of a weight and factorizes them in T. All parts get the largest of the ranks that
/// rank_of chooses for them. If factors of this rank have no fewer parameters than the matrices, the result
/// has no factors, and its reason says so. `result`: the entry of the report with name, dtype and shape.
/// Errors are those of weight_matrices, its make and choose_rank.
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

/// Shapes of the factors NAME.down and NAME.up of a weight W.
///   parts matrices of rows x cols, stacked by rows: [parts rank][...] and [parts rows][rank][1]...,
///   where
///     `...` are the extents of W after the first; part p is the product of rows p rows .. of `up` and rows
///     p rank .. of `down`
///   embedding [vocabulary][width]: [vocabulary][rank] and [width][rank]; W = down up^T
/// Two consecutive layers have weights of these shapes: two linear layers; a convolution and a 1x1
/// convolution with the same number of groups; an embedding and a linear layer.
inline std::pair<std::vector<index_t>, std::vector<index_t>> factor_shapes(const std::vector<index_t>& shape,
                                                                           const weight_decision& decision,
                                                                           index_t rank) {
  if (decision.embedding) return {{shape[0], rank}, {shape[1], rank}};
  std::vector<index_t> down = shape, up{shape[0], rank};
  down[0] = decision.parts * rank;
  for (std::size_t d = 2; d < shape.size(); ++d) up.push_back(1);
  return {down, up};
}

/// Copies the bytes of a tensor into the tensor that `to` has begun, in pieces of copy_piece bytes.
inline void copy_tensor(const safetensors_reader& from, const tensor_place& place, safetensors_writer& to) {
  std::vector<std::uint8_t> piece;
  for (std::uint64_t at = 0; at < place.bytes; at += piece.size()) {
    piece.resize(static_cast<std::size_t>(std::min(copy_piece, place.bytes - at)));
    from.read(place, at, piece);
    to.write(piece);
  }
}

/// Order of work, as numbers of tensors: by falling element size, so that all tensors are aligned in the new
/// file; within a size by falling cost, so that no thread starts an expensive tensor last; of equal cost in
/// the order of the file.
inline std::vector<std::size_t> working_order(const std::vector<tensor_place>& tensors,
                                              const std::vector<double>& cost) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const std::size_t left = size_of(tensors[a].dtype), right = size_of(tensors[b].dtype);
    return left != right ? left > right : cost[a] > cost[b];
  });
  return order;
}

/// Number of parameters of all factors if every rank is 1: the least that factorization can reach.
inline index_t least_parameters(const std::vector<weight_decision>& plan) {
  index_t least = 0;
  for (const weight_decision& d : plan) least += d.factorize ? d.parts * (d.rows + d.cols) : 0;
  return least;
}

/// Truncation of all weights: the policy's, else the most exact one that all their statistics allow.
/// Throws value_error, naming the weight, if statistics are missing or belong to no tensor of the file.
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
    const layer_statistics* const seen = policy.statistics->find(tensors[i].name);
    factorize_options options;
    options.statistics = seen;
    const truncation own = chosen_truncation(options);
    if (own == truncation::plain) {
      throw_error<value_error>({"factorize_weights: no statistics of ", quote_name(tensors[i].name),
                                "; exclude it, or measure it, too"});
    }
    most = std::min(most, own);
  }
  return policy.truncate.value_or(most);
}

/// Ranks with which the floating-point elements of the file stay within the policy's budget. Rank 0: the
/// weight stays dense, and its reason is written to `report`. gains[i]: weight_matrices::gains of tensor i.
/// `fixed`: elements of the tensors that stay. The budget must be at least `fixed` + least_parameters(plan).
/// Each weight is one layer of `allocate`, whose errors are passed on.
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
  budget_options options;
  options.floor = 1;
  const std::vector<budget_choice> choices = allocate(layers, rest, budget, options);
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
/// and as weight_plan and choose_rank; shape_error for statistics of a matrix of another size. After an
/// error, `out` is unchanged. `out` may be the same file as `in`.
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
  std::size_t room = 256;  // keys of the metadata
  index_t fixed = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const weight_decision& d = plan[i];
    weight_result& r = report.tensors.emplace_back();
    r.name = tensors[i].name;
    r.dtype = tensors[i].dtype;
    r.shape = tensors[i].shape;
    r.reason = d.reason;
    r.layer = d.layer;
    r.parts = d.parts;
    r.embedding = d.embedding;
    r.parameters_before = r.parameters_after = is_floating(r.dtype) ? tensors[i].count() : 0;
    report.parameters_before += r.parameters_before;
    if (!d.factorize) fixed += r.parameters_before;
    if (d.factorize) {
      cost[i] = static_cast<double>(d.rows) * static_cast<double>(d.cols) * static_cast<double>(d.parts) *
                static_cast<double>(std::min(d.rows, d.cols));
    }
    // Room for the tensor or its two factors, and for two entries in the metadata.
    room += 4 * safetensors_writer::room_for(tensors[i].name + ".down.weight", tensors[i].shape.size());
  }
  for (const auto& [key, value] : source.metadata()) room += safetensors_writer::room_for(key + value, 0);
  const double all = std::max(1.0, std::accumulate(cost.begin(), cost.end(), 0.0));
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

  double done = 0.0;
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
    done += cost[i];
    if (observer) observer(report.tensors[i], done / all);
  };
  run_in_order<made_factors>(policy.threads, static_cast<index_t>(order.size()), make, finish);

  safetensors_metadata metadata = source.metadata();
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
