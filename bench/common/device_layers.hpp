// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Single layers on a device: the times of their passes, and the work that they must do at least.

#include <string>
#include <vector>

#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/nn/network.hpp>

#include "device_steps.hpp"
#include "timing.hpp"

namespace bench {

/// The layers of a model by name, in the model's order.
template <class T>
struct layer_finder final : pufferfish::layer_visitor<T, pufferfish::device::gpu> {
  using layer_type = pufferfish::any_layer<T, pufferfish::device::gpu>;
  struct found {
    std::string name;
    layer_type* layer;
  };
  void on_layer(const std::string& name, layer_type& layer) override { layers.push_back({name, &layer}); }
  std::vector<found> layers;
};

/// How layers are timed.
struct layer_timing {
  int repeats = 20, samples = 5;  ///< passes per measurement; measurements, of which the median is taken
  bool captured = true;           ///< passes are captured as one graph
};

template <class T>
pufferfish::layer_summary summary_of(const std::string& name,
                                     pufferfish::any_layer<T, pufferfish::device::gpu>& layer,
                                     const pufferfish::extents<4>& input) {
  const pufferfish::layer_cost cost = pufferfish::detail::cost_of_layer(name, layer, input, false);
  return {name, cost.description, input, layer.output_shape(input), cost.parameters, cost.macs};
}

/// Times forward and backward on random data; `first`: without a gradient of the input.
template <class T>
layer_time time_layer(pufferfish::gpu_context& ctx,
                      const pufferfish::any_layer<T, pufferfish::device::gpu>& layer,
                      const pufferfish::layer_summary& what, bool first, const layer_timing& how) {
  namespace pf = pufferfish;
  const index_t in = pf::volume<4>(what.input), out = pf::volume<4>(what.output);
  pf::memory_block<T> x(pf::gpu::device_memory(), in), dx(pf::gpu::device_memory(), first ? 0 : in);
  pf::memory_block<T> y(pf::gpu::device_memory(), out), dy(pf::gpu::device_memory(), out);
  fill_device(x.span(), 2);
  fill_device(dy.span(), 3);
  const pf::tensor_view<T, 4> to =
      first ? pf::tensor_view<T, 4>() : pf::tensor_view<T, 4>(dx.data(), what.input);
  pf::gpu::step_graph graph;
  graph.set_enabled(how.captured);
  const auto run = [&] {
    ctx.begin_step(0);
    graph.run(ctx, pf::gpu::step_graph::key(what.input), [&] {
      for (int i = 0; i < how.repeats; ++i) {
        layer.forward(ctx, {x.data(), what.input}, {y.data(), what.output});
        layer.backward(ctx, {dy.data(), what.output}, to);
      }
    });
  };
  for (int i = 0; i < 6; ++i) run();  // direct, captured, replayed
  pf::gpu::event start(pf::gpu::event_use::timing), end(pf::gpu::event_use::timing);
  std::vector<double> seconds;
  for (int i = 0; i < how.samples; ++i) {
    start.record(ctx.stream());
    run();
    end.record(ctx.stream());
    ctx.synchronize();
    seconds.push_back(end.seconds_since(start) / how.repeats);
  }
  const std::string& text = what.description;
  const double passes = first ? 2 : 3;
  // Forward: x, weights, y. Backward: x, dy and weights again, dx; the gradients, one float per weight.
  const auto elements = static_cast<double>((first ? 2 : 3) * in + 2 * out + 2 * what.parameters);
  const auto gradients = static_cast<double>(what.parameters);
  return {what.name, text.substr(0, text.find_first_of(" ,")), spread_of(seconds).median,
          passes * 2 * static_cast<double>(what.macs), elements * sizeof(T) + gradients * sizeof(float)};
}

}  // namespace bench
