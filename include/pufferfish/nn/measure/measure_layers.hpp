// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `measure_layers`: measures the time of the forward and backward pass of single layers. Each layer is run
/// outside of its network, on an input of the shape that it has in the network, dense and at a few ranks.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/memory.hpp>
#include <pufferfish/lowrank/candidates.hpp>
#include <pufferfish/lowrank/statistics/layer_times.hpp>
#include <pufferfish/nn/measure/layer_inputs.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// How long the variants of a layer (dense, and low-rank at several ranks) are timed.
struct timing_options {
  int iterations = 11;  ///< of each variant; the result is the median of all but the first
  /// Limit in seconds for all iterations of a layer, or of a stage, together: no further iteration begins
  /// once they have taken longer. Two iterations are always made, of which the second counts.
  double seconds = 10.0;
};

namespace detail {

/// Throws value_error for fewer than two iterations and for a limit that is not positive. `who`: for the
/// text.
inline void check_timing(const char* who, const timing_options& options) {
  if (options.iterations >= 2 && options.seconds > 0.0) return;
  throw_error<value_error>({who, ": ", options.iterations, " iterations of which one is not counted, ",
                            options.seconds, " seconds: at least 2, and more than 0"});
}

/// Waits until a device has done all work of the context; on the CPU nothing is pending.
template <class Device>
void wait_for(context<Device>& ctx) {
  if constexpr (requires { ctx.synchronize(); }) ctx.synchronize();
}

/// Sets the context to training mode while passes are timed. The destructor restores mode, step and first
/// sample.
template <class Device>
class timed_scope {
 public:
  explicit timed_scope(context<Device>& ctx)
      : ctx_(ctx), mode_(ctx, run_mode::training), step_(ctx.step()), first_(ctx.first_sample()) {}
  ~timed_scope() { ctx_.begin_step(step_, first_); }
  timed_scope(const timed_scope&) = delete;
  timed_scope& operator=(const timed_scope&) = delete;

 private:
  context<Device>& ctx_;
  mode_scope<Device> mode_;
  std::uint64_t step_;
  index_t first_;
};

/// Median time of each of several passes, in milliseconds; of an even number of times, the mean of the two in
/// the middle. Each iteration runs every pass once, so that a slower phase of the machine slows all of them.
template <class Device>
std::vector<double> time_passes(context<Device>& ctx, const timing_options& options,
                                const std::vector<std::function<void()>>& passes) {
  using clock = std::chrono::steady_clock;
  const timed_scope scope(ctx);
  std::vector<std::vector<double>> times(passes.size());
  const clock::time_point begun = clock::now();
  for (int iteration = 0; iteration < options.iterations; ++iteration) {
    if (iteration >= 2 && std::chrono::duration<double>(clock::now() - begun).count() > options.seconds)
      break;
    for (std::size_t i = 0; i < passes.size(); ++i) {
      ctx.begin_step(static_cast<std::uint64_t>(iteration));
      wait_for(ctx);
      const clock::time_point start = clock::now();
      passes[i]();
      wait_for(ctx);
      if (iteration > 0)
        times[i].push_back(std::chrono::duration<double, std::milli>(clock::now() - start).count());
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& all : times) {
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    std::nth_element(all.begin(), middle, all.end());
    medians.push_back(all.size() % 2 == 1 ? *middle
                                          : 0.5 * (*middle + *std::max_element(all.begin(), middle)));
  }
  return medians;
}

/// A tensor with random elements, in the memory of a device (`Device`).
template <class T, class Device>
class random_block {
 public:
  /// Allocates and fills the tensor. `stream`: selects the random numbers, so that tensors differ.
  random_block(const extents<4>& shape, std::uint64_t stream)
      : shape_(shape), memory_(memory_of<Device>::source(), volume<4>(shape), uninitialized) {
    // 4099 random numbers, repeated, are random enough for a measurement of time.
    std::array<float, 4099> numbers{};
    fill_normal(std::span<float>(numbers), 1.0, random_stream(1, stream));
    std::vector<T> values(static_cast<std::size_t>(memory_.size()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(numbers[i % numbers.size()]);
    memory_.from_host(values);
  }
  tensor_view<T, 4> view() { return {memory_.data(), shape_}; }

 private:
  extents<4> shape_;
  memory_block<T> memory_;
};

/// Copies a layer into a network that consists of this layer. `ranks` empty: the copy is dense; otherwise it
/// is low-rank of these ranks, with random factors. `writers`: how often a backward pass writes each
/// gradient.
template <class T, class Device>
network<T, Device> layer_alone(const any_layer<T, Device>& layer, const rank_list& ranks, int writers) {
  any_layer<T, Device> copy = ranks.empty() ? layer : layer.twin(ranks);
  for_each_parameter(copy, [writers](const std::string&, auto& p) { p.set_writers(writers); });
  network<T, Device> alone(std::move(copy));
  if (!ranks.empty()) alone.initialize(1);
  return alone;
}

/// Runs the forward and backward pass of a layer or a stage at one input shape, on random inputs.
template <class T, class Device>
class layer_passes {
 public:
  /// Allocates input, output and their gradients. Without input.gradient, dx is not computed.
  layer_passes(context<Device>& ctx, const layer_input& input, const extents<4>& output)
      : ctx_(&ctx),
        x_(input.shape, 1),
        y_(output, 2),
        dy_(output, 3),
        dx_(input.gradient ? input.shape : none, 4) {}

  /// Runs both passes of `net`.
  void run(const network<T, Device>& net) {
    net.forward(*ctx_, x_.view(), y_.view());
    net.backward(*ctx_, dy_.view(), dx_.view().empty() ? tensor_view<T, 4>() : dx_.view());
  }

 private:
  static constexpr extents<4> none{0, 0, 0, 0};
  context<Device>* ctx_;
  random_block<T, Device> x_, y_, dy_, dx_;
};

/// Runs the forward and backward pass of an embedding: the lookup and, if the table is tied, the output layer
/// with its loss.
template <class T, class Device>
class embedding_passes {
 public:
  /// Draws the tokens, uniformly over the vocabulary, and allocates rows and gradients.
  embedding_passes(context<Device>& ctx, const layer_input& input, const token_layer<T, Device>& table)
      : ctx_(&ctx),
        rows_(input.shape[0]),
        tied_(input.tied_rows),
        y_({rows_, 1, 1, table.width()}, 1),
        h_({tied_, 1, 1, table.width()}, 2),
        dh_({tied_, 1, 1, table.width()}, 3),
        tokens_(memory_of<Device>::source(), std::max(rows_, tied_), uninitialized),
        results_(memory_of<Device>::source(), 2) {
    std::vector<std::int32_t> drawn;
    const random_stream random(1, 5);
    for (index_t i = 0; i < tokens_.size(); ++i) {
      drawn.push_back(static_cast<std::int32_t>(
          random.below(static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(table.vocabulary()))));
    }
    tokens_.from_host(drawn);
  }

  /// Runs the passes of `net`, a network of the embedding alone.
  void run(const network<T, Device>& net) {
    const token_layer<T, Device>& table = *net.root().tokens();
    const auto matrix = [](const tensor_view<T, 4>& v) {
      return tensor_view<T, 2>(v.data(), {v.extent(0), v.extent(3)});
    };
    const tensor_view<T, 2> y = matrix(y_.view());
    table.forward(*ctx_, tokens(rows_), y);
    if constexpr (!std::is_same_v<T, bfloat16>) {  // the CPU has no output layer in 16 bits
      if (tied_ > 0) output(table, matrix(h_.view()), matrix(dh_.view()));
    }
    table.backward(*ctx_, y);
  }

 private:
  // The first `count` tokens, in the memory of the device.
  std::span<const std::int32_t> tokens(index_t count) const {
    return {tokens_.data(), static_cast<std::size_t>(count)};
  }
  // Both passes of the tied output layer with its loss, over tied_ tokens.
  void output(const token_layer<T, Device>& table, const tensor_view<T, 2>& h, const tensor_view<T, 2>& dh) {
    scratch_frame frame(ctx_->scratch());
    const ops::output_layer<T> layer{table.output_rows(*ctx_, frame, h), table.rows(), nullptr, 1};
    T* const kept = frame.template take<T>(ops::output_loss_kept(*ctx_, layer));
    ops::output_loss_forward<T>(*ctx_, layer, tokens(tied_), {}, kept, results_.data());
    const tensor_view<T, 2> drows = table.output_row_gradient(frame, dh);
    ops::output_loss_backward<T>(*ctx_, layer, tokens(tied_), {}, static_cast<double>(tied_), kept,
                                 {drows, table.weight_gradient(), false, nullptr, false});
    table.output_backward(*ctx_, h, drows, dh);
  }

  context<Device>* ctx_;
  index_t rows_, tied_;
  random_block<T, Device> y_, h_, dh_;
  memory_block<std::int32_t> tokens_;
  memory_block<double> results_;
};

/// The ranks to measure: first an eighth of the full rank in all rank groups; then a quarter and a half in
/// one group at a time, with an eighth in the others.
inline std::vector<rank_list> measured_ranks(const std::vector<matrix_group>& groups) {
  const auto share = [](const matrix_group& group, index_t part) {
    return std::max<index_t>(1, std::min(group.size.rows, group.size.cols) / part);
  };
  rank_list base;
  for (const matrix_group& group : groups) base.push_back(share(group, 8));
  std::vector<rank_list> all{base};
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const index_t part : {4, 2}) {
      rank_list ranks = base;
      ranks[g] = share(groups[g], part);
      if (ranks != all.back() && ranks != base) all.push_back(ranks);
    }
  }
  return all;
}

/// Median milliseconds of a layer's passes: first of the dense layer, then for each entry of `ranks`, in
/// order.
template <class T, class Device>
std::vector<double> time_layer(context<Device>& ctx, const any_layer<T, Device>& layer,
                               const layer_input& input, const std::vector<rank_list>& ranks,
                               const timing_options& options) {
  std::vector<network<T, Device>> variants;
  variants.reserve(ranks.size() + 1);
  const int writers = input.tied_rows > 0 ? 2 : 1;
  variants.push_back(layer_alone(layer, {}, writers));
  for (const rank_list& one : ranks) variants.push_back(layer_alone(layer, one, writers));
  std::vector<std::function<void()>> passes;
  const auto time = [&](auto& pass) {
    for (const network<T, Device>& variant : variants)
      passes.emplace_back([&pass, &variant] { pass.run(variant); });
    return time_passes(ctx, options, passes);
  };
  if (const auto* table = layer.tokens()) {
    embedding_passes<T, Device> pass(ctx, input, *table);
    return time(pass);
  }
  layer_passes<T, Device> pass(ctx, input, layer.output_shape(input.shape));
  return time(pass);
}

/// Text that is equal for two layers if their passes do the same work: description, shapes, options of the
/// input.
template <class T, class Device>
std::string timing_key(const any_layer<T, Device>& layer, const layer_input& input) {
  std::string key = layer.describe();
  const layer_weights<parameter_t<T>> weights = layer.weights("");
  for (const auto& matrix : weights.matrices) key += message({" ", matrix.view.shape(), " ", matrix.group});
  if (layer.tokens() == nullptr) key += " " + to_string<4>(layer.output_shape(input.shape));
  return key + message({" ", input.shape, " ", input.gradient ? 1 : 0, " ", input.tied_rows, " ",
                        has_any(weights.biases) ? 1 : 0});
}

}  // namespace detail

/// Measures the forward and backward passes of all layers that `policy` would factorize at a low enough rank
/// (select_candidates). `inputs` has one entry for each of them, from traced_inputs, counted_inputs or
/// sequence_inputs, for the batch of one rank. Each layer is measured outside of its network: dense, and in
/// each rank group at an eighth, a quarter and a half of the full rank. fit_layer_time fits a linear model to
/// these times. Layers whose passes do the same work are measured once. Times are in milliseconds.
///
///     const auto inputs = traced_inputs(net, {batch, 32, 32, 3});
///     const layer_times times = measure_layers(net, inputs, policy, ctx, {.iterations = 5});
///
/// A single layer does not share passes with its neighbours (batch norm, ReLU), which it may do in its
/// network. This holds for the dense and the low-rank layer alike. The time of a tied embedding is that of
/// the lookup and of the output layer with its loss. On a device the host waits for every pass, so that times
/// include the latency of launches.
///
/// The network is not changed. `ctx` must be between two training steps, since its tape is cleared, and
/// should have the number of threads and the math mode of the run. Mode, step and first sample of `ctx` are
/// restored. Memory is needed for one layer at a time: for input, output and their gradients, and for the
/// parameters and their gradients of each variant. timing_options limits the duration of the measurement.
///
/// Times differ from run to run. In a distributed run rank 0 therefore measures, and the other ranks receive
/// its table as text (to_text()). Throws state_error, naming the layer, for a layer to measure without an
/// entry in `inputs`; value_error for fewer than two iterations or a time limit that is not positive, and for
/// an invalid policy (see select()).
template <class Root, class Device>
layer_times measure_layers(const model<Root, Device>& net, const std::vector<layer_input>& inputs,
                           const factorize_policy& policy, context<Device>& ctx,
                           const timing_options& options = {}) {
  detail::check_timing("measure_layers", options);
  layer_times result;
  net.read_on_host([&](const Root&) {
    const auto found = detail::find_slots(net);
    const std::vector<layer_choice> choices = select_candidates(found.layers, policy, "measure_layers");
    // Results by timing_key, for layers that do the same work as an earlier one.
    std::map<std::string, layer_time> known;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (!choices[i].factorize()) continue;
      const std::string& name = found.layers[i].name;
      const auto input = std::find_if(inputs.begin(), inputs.end(),
                                      [&](const layer_input& one) { return one.name == name; });
      if (input == inputs.end()) {
        PUFFERFISH_THROW(state_error("measure_layers: the list of inputs has none of layer " + name));
      }
      const auto& layer = *found.slots[i];
      const std::string key = detail::timing_key(layer, *input);
      auto at = known.find(key);
      if (at == known.end()) {
        const std::vector<rank_list> ranks = detail::measured_ranks(found.layers[i].groups);
        const std::vector<double> times = detail::time_layer(ctx, layer, *input, ranks, options);
        std::vector<rank_time> points;
        for (std::size_t r = 0; r < ranks.size(); ++r) points.push_back({ranks[r], times[r + 1]});
        at = known.emplace(key, fit_layer_time(name, times[0], points)).first;
      }
      result.layers.push_back(at->second);
      result.layers.back().name = name;
    }
  });
  return result;
}

PUFFERFISH_NAMESPACE_END
