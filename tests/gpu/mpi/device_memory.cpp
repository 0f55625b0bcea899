// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// exchange_memory::device, with an MPI that stands for one that takes a device's memory; parameters and
// statistics that go to all ranks.
#include "parameters.hpp"

#include <pufferfish/gpu/comm/collectives.hpp>

using namespace gpu_test;

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

/// Takes a device's memory in blocking sums.
class device_aware : public watched {
 public:
  using watched::watched;
  bool takes_device_memory() const { return takes; }
  template <class T>
  void all_reduce_sum(std::span<T> values) {
    cudaPointerAttributes where{};
    pf::gpu::check(cudaPointerGetAttributes(&where, values.data()), "cudaPointerGetAttributes");
    if (where.type != cudaMemoryTypeDevice) return watched::all_reduce_sum(values);
    ++device_sums;
    std::vector<T> host(values.size());
    pf::gpu::check(cudaMemcpy(host.data(), values.data(), values.size_bytes(), cudaMemcpyDeviceToHost),
                   "cudaMemcpy");
    watched::all_reduce_sum(std::span<T>(host));
    pf::gpu::check(cudaMemcpy(values.data(), host.data(), values.size_bytes(), cudaMemcpyHostToDevice),
                   "cudaMemcpy");
  }
  bool takes = true;
  std::atomic<int> device_sums{0};
};
static_assert(pf::communicator<device_aware>);

using exchange_type = pf::gradient_exchange<float, device_aware, pf::device::gpu>;

pf::exchange_options on_device() {
  pf::exchange_options options = small_buckets();
  options.memory = pf::exchange_memory::device;
  return options;
}

}  // namespace

TEST_CASE("exchange_memory::device: MPI gets the device's memory; the means are those of MPI's sums") {
  pf::mpi::communicator mpi(MPI_COMM_WORLD);
  device_aware comm(mpi);
  host_twin<float, pf::mpi::communicator> twin(mpi, by_library());
  for (auto progress : {pf::exchange_progress::thread, pf::exchange_progress::calls}) {
    pf::exchange_options options = on_device();
    options.progress = progress;
    pf::gpu_context ctx;
    odd_parameters<float> net(pf::gpu::device_memory());
    stream_buffer<float> source(net.size());
    exchange_type exchange(net.store, comm, options);
    comm.device_sums = 0;
    for (std::uint64_t step = 0; step < 5; ++step) {
      source.write(ctx, gradients_of<float>(net.size(), comm.rank(), step));
      exchange.begin(ctx);
      backward(ctx, net, source.data());
      CHECK(exchange.finish(ctx));
      CHECK(same_bits(read(ctx, std::span<const float>(net.store.gradients())), twin.step(step)));
    }
    CHECK(comm.device_sums == (comm.size() > 1 ? 5 * static_cast<int>(exchange.buckets().size()) : 0));
  }
}

TEST_CASE("exchange_memory::device: refused on all ranks where one rank's MPI does not take it") {
  pf::mpi::communicator mpi(MPI_COMM_WORLD);
  odd_parameters<float> net(pf::gpu::device_memory());
  device_aware comm(mpi);
  const int bad = comm.size() - 1;
  comm.takes = comm.rank() != bad;
  const std::string name = "rank " + std::to_string(bad) + " has an MPI that does not report support";
  CHECK_THROWS_WITH_AS(exchange_type(net.store, comm, on_device()), doctest::Contains(name.c_str()),
                       pf::backend_error);
  if (!mpi.takes_device_memory()) {
    using by_mpi = pf::gradient_exchange<float, pf::mpi::communicator, pf::device::gpu>;
    CHECK_THROWS_AS(by_mpi(net.store, mpi, on_device()), pf::backend_error);
  }
}

TEST_CASE("exchange_memory::device: loss scaling: all ranks skip together and have one scale") {
  pf::mpi::communicator mpi(MPI_COMM_WORLD);
  device_aware comm(mpi);
  const scaled_training got = train_scaled(comm, on_device(), false, 1024.0F);
  CHECK(got.scale == 512.0F);
  CHECK(got.steps == training_steps - 1);
  const scaled_training staged = train_scaled(mpi, by_library(), false, 1024.0F);
  CHECK(same_bits(got.values, staged.values));
}

TEST_CASE("exchange_memory::device: what has no meaning with it") {
  pf::mpi::communicator mpi(MPI_COMM_WORLD);
  device_aware comm(mpi);
  odd_parameters<float> net(pf::gpu::device_memory());
  const auto refused = [&](const pf::exchange_options& options, const char* why,
                           const pf::compression_options& compression = {}) {
    CHECK_THROWS_WITH_AS(exchange_type(net.store, comm, options, pf::new_compressor(net.store, compression)),
                         doctest::Contains(why), pf::value_error);
  };
  pf::exchange_options options = on_device();
  refused(options, "compressors work in the host's memory", pf::signum_options{});
  options.wire = pf::exchange_wire::bf16;
  refused(options, "a narrow wire rounds in the host's memory");
  options = on_device();
  options.nonfinite = pf::nonfinite_policy::skip;
  refused(options, "non-finite gradients");
  options = on_device();
  options.algorithm = pf::all_reduce_algorithm::ring;
  refused(options, "ring and recursive_doubling");
  odd_parameters<float> on_host(pf::host_memory());
  CHECK_THROWS_WITH_AS((pf::gradient_exchange<float, device_aware>(on_host.store, comm, on_device())),
                       doctest::Contains("no gradients on a device"), pf::value_error);
  // A rank that does not ask for it.
  if (comm.size() == 1) return;
  CHECK_THROWS_WITH_AS(exchange_type(net.store, comm, comm.rank() == 0 ? on_device() : small_buckets()),
                       doctest::Contains("memory device"), pf::state_error);
  // In captured steps.
  pf::gpu_context ctx;
  exchange_type exchange(net.store, comm, on_device());
  pf::gpu::step_graph graph;
  graph.run(ctx, 1, [] {});
  CHECK_THROWS_WITH_AS(graph.run(ctx, 1, [&] { exchange.begin(ctx); }),
                       doctest::Contains("exchange_memory::device in a captured step"), pf::state_error);
}

TEST_CASE("gpu collectives: copies and means of a device's memory by way of the host") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::gpu_context ctx;
  for (const std::size_t size : {0U, 1U, 5000U}) {
    stream_buffer<float> values(size);
    const std::span<float> all(values.data(), size);
    for (int root = 0; root < comm.size(); ++root) {
      values.write(ctx, gradients_of<float>(size, comm.rank(), 4));
      pf::gpu::broadcast(ctx, comm, all, root);
      CHECK(same_bits(values.read(ctx), gradients_of<float>(size, root, 4)));
    }
    const auto mine = gradients_of<float>(size, comm.rank(), 5);
    values.write(ctx, mine);
    pf::gpu::mean(ctx, comm, all);
    std::vector<float> expected = mine;
    pf::mean(comm, std::span<float>(expected));
    CHECK(same_bits(values.read(ctx), expected));
  }
  stream_buffer<float> values(1);
  CHECK_THROWS_AS(pf::gpu::broadcast(ctx, comm, std::span<float>(values.data(), 1), comm.size()),
                  pf::value_error);
}
