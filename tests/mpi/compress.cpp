// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed.hpp>
#include <pufferfish/nn.hpp>

#include "../unit/support/compress_support.hpp"

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

using namespace compress_support;

template <class T>
using exchange_of = gradient_exchange<T, mpi::communicator>;

bool same_on_all_ranks(mpi::communicator& comm, std::uint64_t mine) {
  const std::vector<std::uint64_t> all = comm.all_gather(mine);
  return std::all_of(all.begin(), all.end(), [&](std::uint64_t other) { return other == all[0]; });
}

template <class T>
std::vector<std::vector<double>> gradients_of_all(const parameter_store<T>& store, int ranks,
                                                  std::uint64_t step) {
  std::vector<std::vector<double>> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(gradients_of(store, rank, step));
  return all;
}

template <class T>
bool exchange_step(exchange_of<T>& exchange, cpu_context& ctx, odd_parameters<T>& net, int rank,
                   std::uint64_t step) {
  exchange.begin(ctx);
  set_gradients(net.store, rank, step);
  return exchange.finish(ctx);
}

// Byte i of the block that rank `from` has for rank `to`; blocks for all ranks: to = -1.
std::byte byte_of(int from, int to, std::size_t i) {
  return static_cast<std::byte>((1000 * from + 77 * to + static_cast<int>(i % 251)) % 256);
}
void fill_block(std::span<std::byte> block, int from, int to) {
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = byte_of(from, to, i);
}
std::size_t wrong_bytes(std::span<const std::byte> block, int from, int to) {
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < block.size(); ++i) wrong += block[i] == byte_of(from, to, i) ? 0U : 1U;
  return wrong;
}
// Lengths of all kinds: none, one byte, several pieces; `salt` varies them.
std::size_t length_of(int from, int to, int salt) {
  const std::size_t lengths[] = {0, 1, 61441, 5, 300007};
  return lengths[static_cast<std::size_t>(3 * from + to + 1 + salt) % 5];
}

TEST_CASE("gather_blocks: all ranks get all blocks, of any length, known to all or to their rank alone") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const auto me = static_cast<std::size_t>(comm.rank());
  for (int salt = 0; salt < 5; ++salt) {
    std::vector<std::size_t> lengths;
    for (int rank = 0; rank < comm.size(); ++rank) lengths.push_back(length_of(rank, -1, salt));
    rank_blocks known(lengths), sent;
    fill_block(known[me], comm.rank(), -1);
    const std::vector<std::byte> own(known[me].begin(), known[me].end());
    gather_blocks(comm, known);
    gather_blocks(comm, own, sent);
    REQUIRE(sent.count() == lengths.size());
    for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
      CHECK(wrong_bytes(known[rank], static_cast<int>(rank), -1) == 0);
      CHECK(sent.size(rank) == lengths[rank]);
      CHECK(wrong_bytes(sent[rank], static_cast<int>(rank), -1) == 0);
    }
  }
  rank_blocks odd(std::vector<std::size_t>(static_cast<std::size_t>(comm.size()) + 1, 4));
  CHECK_THROWS_WITH_AS(gather_blocks(comm, odd), doctest::Contains("blocks for"), shape_error);
}

TEST_CASE("exchange_blocks: every rank gets the blocks that are for it") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const int me = comm.rank();
  // The last blocks: ranks with more pieces than may be under way, for the next rank only, and ranks with
  // few.
  const auto length = [&](int from, int to, int salt) {
    if (salt < 5) return length_of(from, to, salt);
    return from % 2 == 0 && (from + 1) % comm.size() == to ? std::size_t{16000001} : std::size_t{5};
  };
  for (int salt = 0; salt < 6; ++salt) {
    std::vector<std::size_t> out_lengths, in_lengths;
    for (int rank = 0; rank < comm.size(); ++rank) {
      out_lengths.push_back(length(me, rank, salt));
      in_lengths.push_back(length(rank, me, salt));
    }
    rank_blocks out(out_lengths), in(in_lengths);
    for (int rank = 0; rank < comm.size(); ++rank) fill_block(out[static_cast<std::size_t>(rank)], me, rank);
    exchange_blocks(comm, out, in);
    for (int rank = 0; rank < comm.size(); ++rank) {
      CHECK(wrong_bytes(in[static_cast<std::size_t>(rank)], rank, me) == 0);
    }
  }
  const std::vector<std::size_t> lengths(static_cast<std::size_t>(comm.size()), 3);
  rank_blocks out(lengths), in(std::vector<std::size_t>(lengths.size(), 4));
  CHECK_THROWS_WITH_AS(exchange_blocks(comm, out, in), doctest::Contains("has 3 bytes, and room for 4"),
                       shape_error);
}

TEST_CASE("PowerSGD over the ranks is what its formulas say; what is sent and what is left are the mean") {
  mpi::communicator comm(MPI_COMM_WORLD);
  for (const auto feedback : {error_feedback::local, error_feedback::aggregated}) {
    for (const index_t rank : {1, 3, 99}) {
      CAPTURE(rank);
      const power_sgd_options options{rank, feedback, rank == 99 ? 0.0 : 1.0, 3};
      odd_parameters<double> net;
      cpu_context ctx;
      exchange_of<double> exchange(net.store, comm, {}, new_compressor(net.store, options));
      serial_power_sgd<double> serial(net.store, options, comm.size(), exchange.states()[1].values);
      const auto size = net.store.values().size();
      std::vector<double> given(size, 0.0), taken(size, 0.0);
      for (std::uint64_t step = 0; step < 6; ++step) {
        const auto all = gradients_of_all(net.store, comm.size(), step);
        exchange_step(exchange, ctx, net, comm.rank(), step);
        const std::span<const double> got = net.store.gradients();
        CHECK(largest_difference(got, serial.step(all)) < 1e-9);
        CHECK(same_on_all_ranks(comm, digest(got)));
        const auto mean = mean_of(all);
        if (rank == 99) CHECK(largest_difference(got, mean) < 1e-11);
        for (std::size_t i = 0; i < size; ++i) {
          given[i] += mean[i];
          taken[i] += got[i];
        }
      }
      CHECK(largest_difference<double>(exchange.states()[0].values,
                                       serial.memory()[static_cast<std::size_t>(comm.rank())]) < 1e-9);
      std::vector<double> left(exchange.states()[0].values.begin(), exchange.states()[0].values.end());
      mean(comm, std::span<double>(left));
      for (std::size_t i = 0; i < size; ++i) taken[i] += left[i];
      CHECK(largest_difference<double>(taken, given) < 1e-11);
      if (comm.size() > 1) {
        CHECK(exchange.report().payload_bytes == 6 * static_cast<std::uint64_t>(exchange.payload_bytes()));
      }
    }
  }
}

TEST_CASE("Signum over the ranks is the majority's sign, and nothing where there is none") {
  mpi::communicator comm(MPI_COMM_WORLD);
  odd_parameters<double> net;
  cpu_context ctx;
  exchange_of<double> exchange(net.store, comm, {}, new_compressor<double>(net.store, signum_options{}));
  serial_signum serial(0.9);
  for (std::uint64_t step = 0; step < 8; ++step) {
    exchange_step(exchange, ctx, net, comm.rank(), step);
    const auto expected = serial.step(gradients_of_all(net.store, comm.size(), step));
    CHECK(largest_difference<double>(net.store.gradients(), expected) == 0.0);
    const bool ties = std::any_of(expected.begin(), expected.end(), [](double e) { return e == 0.0; });
    CHECK(ties == (comm.size() % 2 == 0));
  }
  if (comm.size() > 1) {
    CHECK(exchange.report().payload_bytes == 8 * static_cast<std::uint64_t>(exchange.payload_bytes()));
  }
}

TEST_CASE("Signum: values whose gradient is zero move by the learning rate and back, alike on all ranks") {
  mpi::communicator comm(MPI_COMM_WORLD);
  odd_parameters<float> net;
  cpu_context ctx;
  exchange_of<float> exchange(net.store, comm, {}, new_compressor<float>(net.store, signum_options{}));
  SGD<float> optimizer(make_optimizer_target(net.store), {});
  constexpr float rate = 1.0F / 1024;
  const std::span<float> values = net.store.values();
  std::fill(values.begin(), values.end(), 0.5F);
  const auto touched = [](std::size_t i) { return i % 3 == 0; };
  for (std::uint64_t step = 0; step < 10; ++step) {
    exchange.begin(ctx);
    set_gradients(net.store, comm.rank(), step);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!touched(i)) net.store.gradients()[i] = i % 2 == 0 ? 0.0F : -0.0F;
    }
    exchange.finish(ctx);
    optimizer.step(ctx, static_cast<double>(rate));
    CHECK(same_on_all_ranks(comm, digest(std::span<const float>(values))));
    int moved = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float expected = step % 2 == 0 ? 0.5F - rate : 0.5F;
      if (!touched(i) && values[i] != expected) ++moved;
    }
    CHECK(moved == 0);
  }
}

TEST_CASE("float16 messages: means to their rounding; what overflows is seen, not hidden") {
  mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  odd_parameters<float> net;
  cpu_context ctx;
  exchange_options options;
  options.wire = exchange_wire::fp16;
  options.nonfinite = nonfinite_policy::skip;
  exchange_of<float> exchange(net.store, comm, options);
  CHECK(exchange_step(exchange, ctx, net, comm.rank(), 1));
  const auto expected = mean_of(gradients_of_all(net.store, comm.size(), 1));
  CHECK(largest_difference<float>(net.store.gradients(), expected) < 4e-3);
  CHECK(same_on_all_ranks(comm, digest(std::span<const float>(net.store.gradients()))));
  CHECK(exchange.report().payload_bytes == 2 * net.store.values().size());
  exchange.begin(ctx);
  std::fill(net.store.gradients().begin(), net.store.gradients().end(), 6e4F);
  CHECK_FALSE(exchange.finish(ctx));
  CHECK((exchange.nonfinite() && exchange.nonfinite()->rank == -1));
}

network<float> small_net(index_t parts) {
  Sequential<float> layers;
  layers.add("conv1", Conv<float>(conv_shape::square(3, 8, 3, 1, 1), true));
  if (parts == 1) layers.add("bn1", BatchNorm<float>(8));
  layers.add("relu1", ReLU<float>());
  layers.add("conv2", Conv<float>(conv_shape::square(8, 12, 3, 2, 1), true));
  layers.add("pool", GlobalAvgPool<float>());
  layers.add("fc", Linear<float>(12, 5));
  network<float> net{any_layer<float>(std::move(layers))};
  net.initialize(4);
  return net;
}

/// One pass on `count` samples from `first` of this rank's batch of a step.
void pass(network<float>& net, cpu_context& ctx, int rank, std::uint64_t step, index_t first, index_t count) {
  tensor<float, 4> x({4, 6, 6, 3}), dy({4, 1, 1, 5}), y({4, 1, 1, 5});
  fill_normal(x.flat(), 1.0, random_stream(step + 1, static_cast<std::uint64_t>(rank)));
  fill_normal(dy.flat(), 1.0, random_stream(step + 1, static_cast<std::uint64_t>(rank) + 100));
  net.forward(ctx, x.view().slice(0, first, count), y.view().slice(0, first, count));
  net.backward(ctx, dy.view().slice(0, first, count));
}

TEST_CASE("parameters are bit-identical on all ranks after each of 50 steps, whatever travels") {
  mpi::communicator comm(MPI_COMM_WORLD);
  std::vector<std::pair<compression_options, exchange_wire>> all = {
      {no_compression{}, exchange_wire::same},
      {power_sgd_options{1, error_feedback::local, 1.0, 1}, exchange_wire::same},
      {power_sgd_options{4, error_feedback::aggregated, 1.0, 1}, exchange_wire::same},
      {signum_options{}, exchange_wire::same},
      {no_compression{}, exchange_wire::bf16},
      {no_compression{}, exchange_wire::fp16}};
  bool ring = false;
  for (const auto& way : all) {
    CAPTURE(describe(way.first));
    exchange_options options;
    options.wire = way.second;
    if (ring) options.algorithm = all_reduce_algorithm::ring;
    ring = !ring;
    network<float> net = small_net(1);
    exchange_of<float> exchange(net.store(), comm, options, new_compressor(net.store(), way.first));
    SGD<float> optimizer(make_optimizer_target(net.store()), {0.9, 0.0, false, 1e-4, false});
    cpu_context ctx({1 + comm.rank() % 2, 0});
    ctx.set_mode(run_mode::training);
    int different = 0;
    for (std::uint64_t step = 0; step < 50; ++step) {
      ctx.begin_step(step);
      exchange.begin(ctx);
      pass(net, ctx, comm.rank(), step, 0, 4);
      exchange.finish(ctx);
      optimizer.step(ctx, 0.01);
      different += same_on_all_ranks(comm, digest(std::span<const float>(net.store().values()))) ? 0 : 1;
    }
    CHECK(different == 0);
  }
}

TEST_CASE("micro-batches, one exchange: that of the whole batch") {
  mpi::communicator comm(MPI_COMM_WORLD);
  exchange_options options;
  options.plan.emplace().buckets = {100, 1000};
  network<float> net = small_net(4);
  exchange_of<float> exchange(net.store(), comm, options);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  const auto step = [&](index_t parts) {
    micro_batches passes(net.store(), static_cast<int>(parts));
    ctx.begin_step(0);
    for (index_t part = 0; part < parts; ++part) {
      if (part == parts - 1) exchange.begin(ctx);
      pass(net, ctx, comm.rank(), 3, part * 4 / parts, 4 / parts);
    }
    exchange.finish(ctx);
    return std::vector<double>(net.store().gradients().begin(), net.store().gradients().end());
  };
  const std::vector<double> whole = step(1);
  for (const index_t parts : {2, 4}) CHECK(largest_difference<double>(step(parts), whole) < 1e-5);
}

TEST_CASE("a rank with another compressor or policy is told so by name") {
  mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  odd_parameters<float> net;
  const bool last = comm.rank() == comm.size() - 1;
  const power_sgd_options power{last ? 4 : 2, error_feedback::local, 1.0, 1};
  const std::string name = "rank " + std::to_string(comm.size() - 1) + " has \"compressor PowerSGD, rank 4";
  CHECK_THROWS_WITH_AS(exchange_of<float>(net.store, comm, {}, new_compressor<float>(net.store, power)),
                       doctest::Contains(name.c_str()), state_error);
  const compression_options other = last ? compression_options(signum_options{}) : compression_options();
  CHECK_THROWS_WITH_AS(exchange_of<float>(net.store, comm, {}, new_compressor(net.store, other)),
                       doctest::Contains("\"compressor Signum"), state_error);
  exchange_options options;
  options.nonfinite = last ? nonfinite_policy::skip : nonfinite_policy::stop;
  CHECK_THROWS_WITH_AS(exchange_of<float>(net.store, comm, options),
                       doctest::Contains("non-finite gradients stop"), state_error);
}

/// PowerSGD of a rank whose processor has other instruction sets.
struct on_another_processor : power_sgd<float> {
  using power_sgd<float>::power_sgd;
  std::string describe() const {
    const std::string here = std::string(detail::kernel_name()) + " kernels",
                      text = power_sgd<float>::describe();
    CHECK(text.find(here) != std::string::npos);
    return text.substr(0, text.find(here)) + "older kernels";
  }
};

TEST_CASE("PowerSGD on ranks with other instruction sets is refused, naming both") {
  mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  odd_parameters<float> net;
  const auto make = [&]() -> std::optional<any_compressor<float>> {
    if (comm.rank() != comm.size() - 1) return new_compressor<float>(net.store, power_sgd_options{});
    return on_another_processor(net.store, power_sgd_options{});
  };
  const std::string last = "rank " + std::to_string(comm.size() - 1) + " has \"compressor PowerSGD";
  CHECK_THROWS_WITH_AS(exchange_of<float>(net.store, comm, {}, make()), doctest::Contains(last.c_str()),
                       state_error);
  CHECK_THROWS_WITH_AS(exchange_of<float>(net.store, comm, {}, make()), doctest::Contains("older kernels"),
                       state_error);
  const std::string others = std::string(detail::kernel_name()) + " kernels";
  CHECK_THROWS_WITH_AS(exchange_of<float>(net.store, comm, {}, make()), doctest::Contains(others.c_str()),
                       state_error);
}

TEST_CASE("a NaN on one rank is named on all, and all skip or stop") {
  mpi::communicator comm(MPI_COMM_WORLD);
  odd_parameters<float> net;
  cpu_context ctx;
  const int bad = comm.size() - 1;
  const auto spoilt_step = [&](exchange_of<float>& exchange) {
    exchange.begin(ctx);
    set_gradients(net.store, comm.rank(), 1);
    if (comm.rank() == bad) net.store.gradients().back() = std::numeric_limits<float>::quiet_NaN();
    return exchange.finish(ctx);
  };
  const std::string name = "p0 is not finite at element 10 on rank " + std::to_string(bad);
  for (const compression_options& compression :
       {compression_options(), compression_options(power_sgd_options{}),
        compression_options(signum_options{})}) {
    CAPTURE(describe(compression));
    exchange_options options;
    options.nonfinite = nonfinite_policy::skip;
    exchange_of<float> skipping(net.store, comm, options, new_compressor(net.store, compression));
    CHECK_FALSE(spoilt_step(skipping));
    CHECK(skipping.report().skipped == 1);
    CHECK((skipping.nonfinite() && to_string(*skipping.nonfinite()).find(name) != std::string::npos));
    CHECK(exchange_step(skipping, ctx, net, comm.rank(), 2));
    CHECK(skipping.report().skipped == 1);
    CHECK(detail::find_nonfinite(std::span<const float>(net.store.gradients())) < 0);
    options.nonfinite = nonfinite_policy::stop;
    exchange_of<float> stopping(net.store, comm, options, new_compressor(net.store, compression));
    CHECK_THROWS_WITH_AS(spoilt_step(stopping), doctest::Contains(name.c_str()), value_error);
  }
}

}  // namespace
