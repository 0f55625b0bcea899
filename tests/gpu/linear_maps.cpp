// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Several linear maps at once on the device: results as of single maps on the CPU, and numbers of launches.
#include "support.hpp"

#include <array>

#include <pufferfish/gpu.hpp>
#include <pufferfish/lowrank/layers/attention.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/nn/layers/attention.hpp>

using namespace gpu_test;

namespace {

using pf::device::gpu;

// A few maps of one x with `rows` rows. Operands of map i have the place i distance in their memory if
// distances are equal; otherwise the last one is further away.
struct maps_case {
  index_t rows, in;
  std::vector<index_t> out;
  bool equal, bias, add;
  bool mixed = false;  // the last gradient of a weight is added, or not, against the others
};

struct operands {
  operands(const maps_case& c, std::uint64_t stream)
      : at(c),
        widest(*std::max_element(c.out.begin(), c.out.end())),
        x(random_twin<float>(c.rows * c.in, stream)),
        w(random_twin<float>(memory(c.in * widest), stream + 1)),
        bias(random_twin<float>(memory(widest), stream + 2)),
        y(random_twin<float>(memory(c.rows * widest), stream + 3)),
        dw(random_twin<float>(memory(c.in * widest), stream + 4)),
        dx(random_twin<float>(c.rows * c.in, stream + 5)),
        dxs(random_twin<float>(memory(c.rows * c.in), stream + 6)) {}

  index_t count() const { return static_cast<index_t>(at.out.size()); }
  // The distance of two maps' operands of `size` elements, and the memory for all.
  static index_t distance(index_t size) { return size + 5; }
  index_t memory(index_t size) const { return (count() + 1) * distance(size); }
  index_t place(index_t i, index_t size) const {
    return i * distance(size) + (at.equal || i + 1 < count() ? 0 : 3);
  }
  pf::tensor_view<float, 2> part(twin<float>& all, bool device, index_t i, index_t rows, index_t columns,
                                 index_t size) const {
    return {(device ? all.device_data() : all.host_data()) + place(i, size), {rows, columns}};
  }
  pf::extents<2> x_shape() const { return {at.rows, at.in}; }

  template <class Device>
  void run(pf::context<Device>& ctx) {
    constexpr bool device = std::is_same_v<Device, gpu>;
    const auto xs = device ? x.device_view(x_shape()) : x.host_view(x_shape());
    std::vector<pf::ops::linear_map<float>> forward;
    std::vector<pf::ops::weight_gradient_map<float>> weights;
    std::vector<pf::ops::input_gradient_map<float>> inputs;
    for (index_t i = 0; i < count(); ++i) {
      const index_t out = at.out[static_cast<std::size_t>(i)];
      const auto wi = part(w, device, i, at.in, out, at.in * widest);
      const auto yi = part(y, device, i, at.rows, out, at.rows * widest);
      const float* const b = (device ? bias.device_data() : bias.host_data()) + place(i, widest);
      forward.push_back({xs, wi, at.bias ? b : nullptr, yi});
      weights.push_back({xs, yi, part(dw, device, i, at.in, out, at.in * widest),
                         (at.mixed && i + 1 == count()) != at.add});
      inputs.push_back({yi, wi, part(dxs, device, i, at.rows, at.in, at.rows * at.in)});
    }
    const auto to = device ? dx.device_view(x_shape()) : dx.host_view(x_shape());
    const auto count_of = [&](auto&& work) {
      work();
      if constexpr (device) {
        ctx.synchronize();
        pf::gpu::detail::stream_capture capture(ctx.stream());
        work();
        launches.push_back(capture.finish().operations());
      }
    };
    count_of([&] { pf::ops::linear_maps_forward<float>(ctx, forward); });
    count_of([&] { pf::ops::linear_maps_backward_weight<float>(ctx, weights); });
    count_of([&] { pf::ops::linear_maps_backward_input<float>(ctx, inputs); });
    count_of([&] { pf::ops::linear_maps_backward_sum<float>(ctx, inputs, to, at.add); });
  }

  maps_case at;
  index_t widest;
  twin<float> x, w, bias, y, dw, dx, dxs;
  std::vector<std::size_t> launches;
};

}  // namespace

TEST_CASE("gpu linear maps: as single maps, of equal and different shapes") {
  pf::gpu_context ctx;
  pf::cpu_context host;
  picker pick(3);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const index_t count = pick(1, 4), width = pick(1, 40);
    maps_case c{round % 7 == 0 ? round % 2 == 0 ? index_t{0} : index_t{1} : pick(2, 50),
                pick(1, 33),
                {},
                pick(0, 3) != 0,
                pick(0, 3) == 0,
                pick(0, 1) != 0};
    bool same = c.equal || count == 2;
    for (index_t i = 0; i < count; ++i) c.out.push_back(width);
    if (pick(0, 3) == 0) c.out.back() = pick(1, 40);
    same = same && c.out.back() == width;
    c.mixed = round % 5 == 0;
    CAPTURE(round);
    CAPTURE(count);
    CAPTURE(c.rows);
    CAPTURE(c.equal);
    CAPTURE(c.bias);
    operands all(c, 100 * round);
    all.run(host);
    all.run(ctx);
    CHECK(difference(all.y, 1.0) < 1e-5);
    CHECK(difference(all.dw, 1.0) < 1e-5);
    CHECK(difference(all.dxs, 1.0) < 1e-5);
    CHECK(difference(all.dx, 1.0) < 1e-5);
    if (c.rows == 0 || c.bias || c.mixed) continue;
    const auto singles = static_cast<std::size_t>(count);
    // Of three maps or more, the sum is a batch and an addition.
    const std::size_t batches = same ? 1 : count == 1 ? 1 : count == 2 ? 2 : 2;
    CHECK(all.launches ==
          std::vector<std::size_t>{batches, batches, batches, same && count > 2 ? std::size_t{2} : singles});
  }
}

TEST_CASE("gpu linear maps: large sums are added product by product") {
  CHECK(pf::gpu::detail::sum_in_batch({}, 3, 1e6));
  CHECK_FALSE(pf::gpu::detail::sum_in_batch({}, 3, 1e7));
  CHECK_FALSE(pf::gpu::detail::sum_in_batch({}, 2, 1.0));
}

TEST_CASE("gpu linear maps: sums of 16-bit products are rounded once more") {
  pf::gpu_context ctx;
  using T = pf::gpu::bf16;
  constexpr index_t rows = 24, in = 16, out = 8, count = 3;
  stored<T> dy(count * rows * out, 1), w(count * in * out, 2), dx(rows * in, 3);
  for (const bool add : {false, true}) {
    pf::cpu_context host;
    std::vector<float> expected(static_cast<std::size_t>(rows * in), 0.0F);
    const pf::tensor_view<float, 2> sum(expected.data(), {rows, in});
    if (add) std::copy_n(dx.wide.host_data(), rows * in, expected.data());
    std::vector<pf::ops::input_gradient_map<T>> maps;
    for (index_t i = 0; i < count; ++i) {
      pf::ops::linear_backward_input<float>(host, {dy.wide.host_data() + i * rows * out, {rows, out}},
                                            {w.wide.host_data() + i * in * out, {in, out}}, sum, true);
      maps.push_back({{dy.narrow.device_data() + i * rows * out, {rows, out}},
                      {w.narrow.device_data() + i * in * out, {in, out}}});
    }
    twin<T> result(dx.narrow.host());
    pf::ops::linear_maps_backward_sum<T>(ctx, maps, {result.device_data(), {rows, in}}, add);
    std::vector<float> got;
    for (const T value : result.fetched()) got.push_back(static_cast<float>(value));
    // Three products and their sum, each rounded to 8 bits.
    CHECK(difference(got, expected) < 3 * unit<T>);
  }
}

TEST_CASE("gpu linear maps: a ReLU's gradient with the gradient of the bias before it") {
  pf::gpu_context ctx;
  pf::cpu_context host;
  picker pick(5);
  for (std::uint64_t round = 0; round < 40; ++round) {
    const pf::extents<2> shape{round == 0 ? 0 : pick(1, 300), pick(1, 70)};
    const bool in_place = round % 2 == 0, add = round % 3 == 0;
    CAPTURE(round);
    const index_t size = shape[0] * shape[1];
    auto y = random_twin<float>(size, 10 * round), dy = random_twin<float>(size, 10 * round + 1),
         dz = random_twin<float>(size, 10 * round + 2), db = random_twin<float>(shape[1], 10 * round + 3);
    twin<float>& to = in_place ? dy : dz;
    pf::ops::relu_bias_gradient<float>(host, y.host_view(shape), dy.host_view(shape), to.host_view(shape),
                                       db.host_data(), add);
    pf::ops::relu_bias_gradient<float>(ctx, y.device_view(shape), dy.device_view(shape),
                                       to.device_view(shape), db.device_data(), add);
    CHECK(to.fetched() == to.host());
    CHECK(difference(db, 1.0) < 1e-5);
  }
  const pf::extents<2> shape{2, 8};
  auto y = random_twin<float>(16, 1), db = random_twin<float>(8, 2);
  CHECK_THROWS_AS(pf::ops::relu_bias_gradient<float>(ctx, y.device_view(shape), y.device_view<2>({1, 8}),
                                                     y.device_view(shape), db.device_data(), false),
                  pf::shape_error);
}

namespace {

using ranks = std::array<index_t, 4>;  // of queries, keys, values and outputs; 0: dense

template <class T, class Device>
using attention_net = pf::model<pf::MultiHeadAttention<T, Device>, Device>;

template <class T, class Device>
attention_net<T, Device> make_attention(const pf::attention_shape& shape, const ranks& low) {
  pf::attention_options options;
  options.shape = shape;
  attention_net<T, Device> net{pf::MultiHeadAttention<T, Device>(options)};
  std::vector<pf::layer_rank> list;
  for (std::size_t i = 0; i < low.size(); ++i) {
    if (low[i] > 0) list.push_back({pf::MultiHeadAttention<T, Device>::names[i], low[i]});
  }
  pf::apply_ranks(net, list);
  return net;
}

// Sequences of queries and of the memory, with rows of no sequence.
constexpr index_t query_rows = 11, memory_rows = 14;

// Inputs and results of passes of an attention layer.
struct attention_run {
  explicit attention_run(index_t width)
      : columns(width),
        x(random_twin<float>(query_rows * width, 1)),
        memory(random_twin<float>(memory_rows * width, 2)),
        dy(random_twin<float>(query_rows * width, 3)),
        y(random_twin<float>(query_rows * width, 4)),
        dx(random_twin<float>(query_rows * width, 5)),
        dmemory(random_twin<float>(memory_rows * width, 6)),
        first(std::vector<index_t>{0, 6, 11}),
        count(std::vector<index_t>{5, 4, 0}),
        memory_first(std::vector<index_t>{0, 3, 12}),
        memory_count(std::vector<index_t>{3, 9, 1}) {}

  template <class Device>
  void operator()(pf::context<Device>& ctx, const attention_net<float, Device>& net, bool cross,
                  bool add_memory = false) {
    constexpr bool device = std::is_same_v<Device, gpu>;
    const auto of = [&](twin<float>& all, index_t rows) {
      return device ? all.device_view<2>({rows, columns}) : all.host_view<2>({rows, columns});
    };
    const auto runs_of = [&](twin<index_t>& f, twin<index_t>& c) {
      return pf::token_runs{3, device ? f.device_data() : f.host_data(),
                            device ? c.device_data() : c.host_data()};
    };
    const pf::token_runs queries = runs_of(first, count), keys = runs_of(memory_first, memory_count);
    const auto xs = of(x, query_rows), ms = of(memory, memory_rows);
    net.root().forward(ctx, xs, cross ? ms : xs, {queries, cross ? keys : queries, {}}, of(y, query_rows));
    net.root().backward(ctx, of(dy, query_rows), of(dx, query_rows),
                        cross ? of(dmemory, memory_rows) : pf::tensor_view<float, 2>(), add_memory);
  }

  index_t columns;
  twin<float> x, memory, dy, y, dx, dmemory;
  twin<index_t> first, count, memory_first, memory_count;
};

std::vector<float> gradients_of(attention_net<float, gpu>& net) {
  const std::span<float> all = net.store().gradients();
  std::vector<float> result(all.size());
  pf::gpu::device_memory().to_host(result.data(), all.data(), all.size_bytes());
  return result;
}

}  // namespace

TEST_CASE("gpu linear maps: attention, dense and low-rank, to itself and to a memory") {
  pf::gpu_context ctx;
  pf::cpu_context host;
  host.set_mode(pf::run_mode::training);
  ctx.set_mode(pf::run_mode::training);
  struct attention_case {
    pf::attention_shape shape;
    ranks low;
    std::size_t products, cross_products;  // launches of products and of their sums
  };
  // Dense, to itself: projections, output; gradients of their weights; of the output's and the projections'
  // input, where a sum of three products is a batch and a sum. To a memory: queries are apart, and the
  // gradients of keys and values are added one after the other.
  for (const attention_case& c : std::vector<attention_case>{
           {pf::attention_shape::split(16, 2), {0, 0, 0, 0}, 2 + 2 + 3, 3 + 3 + 4},
           {pf::attention_shape::split(16, 2), {4, 4, 4, 4}, 4 + 4 + 5, 6 + 4 + 4 + 5},
           {pf::attention_shape::split(16, 2), {4, 4, 3, 4}, 0, 0},
           {pf::attention_shape::split(16, 2), {3, 4, 5, 2}, 0, 0},
           {pf::attention_shape::split(16, 2), {4, 0, 4, 4}, 0, 0},
           {{16, 2, 8, 5}, {0, 0, 0, 0}, 0, 0},
           {{16, 2, 8, 5}, {4, 4, 4, 4}, 0, 0}}) {
    CAPTURE(c.low[0]);
    CAPTURE(c.low[1]);
    CAPTURE(c.low[2]);
    CAPTURE(c.shape.value);
    auto host_net = make_attention<float, pf::device::cpu>(c.shape, c.low);
    auto net = make_attention<float, gpu>(c.shape, c.low);
    host_net.initialize(4);
    pf::copy_state(host_net, net);
    for (const bool cross : {false, true}) {
      CAPTURE(cross);
      attention_run run(16);
      for (const bool add : {false, true}) {
        host.begin_step(3);
        ctx.begin_step(3);
        run(host, host_net, cross, add);
        run(ctx, net, cross, add);
        CHECK(ctx.tape().empty());
        CHECK(difference(run.y) < 1e-5);
        CHECK(difference(run.dx) < 1e-5);
        CHECK(difference(run.dmemory) < 1e-5);
        const std::span<const float> all = host_net.store().gradients();
        CHECK(difference(gradients_of(net), {all.begin(), all.end()}) < 1e-5);
      }
      // Captured: the same bits, and the expected launches besides those of attention (2) and the norm (2).
      const std::vector<float> y = run.y.fetched(), dx = run.dx.fetched(), direct = gradients_of(net);
      ctx.synchronize();
      pf::gpu::step_graph graph;
      for (std::uint64_t step = 0; step < 5; ++step) {
        ctx.begin_step(3);
        graph.run(ctx, pf::gpu::step_graph::key(index_t{1}), [&] { run(ctx, net, cross, false); });
      }
      CHECK(run.y.fetched() == y);
      CHECK(run.dx.fetched() == dx);
      CHECK(gradients_of(net) == direct);
      CHECK(graph.replays() > 0);
      const std::size_t products = cross ? c.cross_products : c.products;
      if (products != 0) CHECK(graph.operations() == products + 4);
    }
  }
}

TEST_CASE("gpu linear maps: low-rank attention that stands alone, with biases and separate gradients") {
  pf::gpu_context ctx;
  pf::cpu_context host;
  host.set_mode(pf::run_mode::training);
  ctx.set_mode(pf::run_mode::training);
  const pf::attention_shape shape{12, 2, 4, 4};
  const pf::extents<3> xs{3, 5, 12};
  for (const bool bias : {false, true}) {
    CAPTURE(bias);
    pf::LowRankAttention<float> mine(shape, 3, bias);
    pf::LowRankAttention<float, pf::dynamic_rank, gpu> its(shape, 3, bias);
    mine.initialize({2, 7});
    its.initialize({2, 7});
    auto x = random_twin<float>(pf::volume<3>(xs), 1), y = random_twin<float>(x.size(), 2),
         dy = random_twin<float>(x.size(), 3), dx = random_twin<float>(x.size(), 4),
         dmemory = random_twin<float>(x.size(), 5);
    for (int variant = 0; variant < 4; ++variant) {
      CAPTURE(variant);
      // Of one input: one gradient, separate ones, and each of them alone.
      const auto pass = [&](auto& layer, auto& where, const auto& of) {
        const pf::tensor_view<float, 3> none, first = variant == 2 ? none : of(dx),
                                              second = variant == 0   ? first
                                                       : variant == 3 ? none
                                                                      : of(dmemory);
        where.begin_step(1);
        layer.forward(where, of(x), of(x), of(y), {});
        layer.backward(where, of(dy), first, second);
      };
      pass(mine, host, [&](twin<float>& all) { return all.host_view(xs); });
      pass(its, ctx, [&](twin<float>& all) { return all.device_view(xs); });
      CHECK(ctx.tape().empty());
      CHECK(difference(y) < 1e-5);
      CHECK(difference(dx) < 1e-5);
      CHECK(difference(dmemory) < 1e-5);
      std::vector<float> expected, got(its.store().gradients().size());
      mine.visit([&](const char*, auto& p) {
        expected.insert(expected.begin(), p.gradient().begin(), p.gradient().end());
      });
      pf::gpu::device_memory().to_host(got.data(), its.store().gradients().data(),
                                       got.size() * sizeof(float));
      CHECK(difference(got, expected) < 1e-5);
    }
  }
}
