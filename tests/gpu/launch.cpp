// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What all kernels share, and the calls of the runtime that the library is built on.
#include "support.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/gpu/kernels/overlap.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>

#include "launch_kernels.hpp"

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

void checked(cudaError_t status) { pf::gpu::check(status, "the call"); }

}  // namespace

TEST_CASE("launch: grid-stride loops by vectors, aligned and not, of any size") {
  pf::gpu_context& ctx = gpu_context();
  for (const index_t size : {0, 1, 3, 4, 257, 1000, 20011}) {
    for (const index_t offset : {0, 1, 3}) {
      auto x = random_twin<float>(size + offset, 1), y = twin<float>(size + offset, 0.0F);
      kernels::test_scale(ctx.stream(), x.device_data() + offset, y.device_data() + offset, size, 3.0F);
      for (index_t i = offset; i < size + offset; ++i) y.host_data()[i] = 3.0F * x.host_data()[i];
      CHECK(difference(y) == 0.0);
    }
  }
}

TEST_CASE("launch: what cannot be launched throws and names the launcher") {
  pf::gpu_context& ctx = gpu_context();
  auto x = twin<float>(8, 1.0F), y = twin<float>(8, 2.0F);
  const auto text_of = [&](int threads, index_t bytes) -> std::string {
    try {
      kernels::test_reverse(ctx.stream(), x.device_data(), y.device_data(), 1, threads, bytes);
    } catch (const pf::backend_error& e) {
      return e.what();
    }
    return "";
  };
  CHECK(text_of(2048, 4 * 2048).find("test_reverse: launch of 1 x 1 x 1 blocks of 2048") == 0);
  CHECK(text_of(8, 1 << 20).find("test_reverse") == 0);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(text_of(8, 32).empty());
  kernels::test_reverse(ctx.stream(), x.device_data(), y.device_data(), 0, 8, 32);  // nothing to do
  CHECK(y.fetched() == std::vector<float>(8, 1.0F));
}

TEST_CASE_TEMPLATE("launch: sums and maxima over a block", T, float, double) {
  pf::gpu_context& ctx = gpu_context();
  for (const int threads : {32, 64, 256, 1024}) {
    for (const index_t columns : {1, 31, 1000}) {
      const index_t rows = 7;
      auto x = random_twin<T>(rows * columns, 2);
      auto sums = twin<T>(rows), maxima = twin<T>(rows);
      kernels::test_row_sums<T>(ctx.stream(), x.device_data(), sums.device_data(), maxima.device_data(), rows,
                                columns, threads);
      for (index_t row = 0; row < rows; ++row) {
        const T* values = x.host_data() + row * columns;
        double sum = 0;
        for (index_t i = 0; i < columns; ++i) sum += static_cast<double>(values[i]);
        sums.host_data()[row] = static_cast<T>(sum);
        maxima.host_data()[row] = *std::max_element(values, values + columns);
      }
      CHECK(difference(sums) < (sizeof(T) == 4 ? 2e-6 : 1e-14));
      CHECK(difference(maxima) == 0.0);
      const std::vector<T> first = sums.fetched();
      kernels::test_row_sums<T>(ctx.stream(), x.device_data(), sums.device_data(), maxima.device_data(), rows,
                                columns, threads);
      CHECK(sums.fetched() == first);
    }
  }
}

TEST_CASE("launch: a maximum over values of which one is no number is no number") {
  pf::gpu_context& ctx = gpu_context();
  for (const std::size_t where : {std::size_t{0}, std::size_t{77}, std::size_t{99}}) {
    std::vector<float> values(100, 1.0F);
    values[where] = NAN;
    twin<float> x(values), sums(1), maxima(1);
    kernels::test_row_sums<float>(ctx.stream(), x.device_data(), sums.device_data(), maxima.device_data(), 1,
                                  100, 64);
    CHECK(std::isnan(maxima.fetched()[0]));
  }
}

TEST_CASE("launch: shared memory up to more than 48 KB") {
  pf::gpu_context& ctx = gpu_context();
  for (const index_t bytes : {1024, 48 * 1024, 96 * 1024}) {
    auto x = random_twin<float>(5 * 256, 3);
    auto y = twin<float>(5 * 256);
    kernels::test_reverse(ctx.stream(), x.device_data(), y.device_data(), 5, 256, bytes);
    for (index_t i = 0; i < 5 * 256; ++i) y.host_data()[i] = x.host_data()[i / 256 * 256 + 255 - i % 256];
    CHECK(difference(y) == 0.0);
  }
}

TEST_CASE("launch: shuffles and votes of a warp") {
  pf::gpu_context& ctx = gpu_context();
  twin<int> y(8 * 32);
  kernels::test_warp(ctx.stream(), y.device_data());
  for (int lane = 0; lane < 32; ++lane) {
    int* expected = y.host_data() + lane;
    expected[0] = 5;
    expected[32] = lane / 8 * 8 + (lane + 3) % 8;
    expected[2 * 32] = lane ^ 9;
    expected[3 * 32] = lane % 16 + 6 < 16 ? lane + 6 : lane;
    expected[4 * 32] = lane % 16 >= 6 ? lane - 6 : lane;
    expected[5 * 32] = 0x49249249;
    expected[6 * 32] = 2;
    expected[7 * 32] = lane < 16 ? lane ^ 1 : 16;
  }
  CHECK(y.fetched() == y.host());
}

TEST_CASE("launch: counts over threads, and indices in three dimensions") {
  pf::gpu_context& ctx = gpu_context();
  twin<int> counts(5, 0);
  kernels::test_counts(ctx.stream(), counts.device_data(), 6, 96);
  CHECK(counts.fetched() == std::vector<int>{6 * 96, 48, 1, 0, 1});
  twin<int> y(24 * 24, 0);
  kernels::test_indices(ctx.stream(), y.device_data());
  for (int i = 0; i < 24 * 24; ++i) y.host()[static_cast<std::size_t>(i)] = i;
  CHECK(y.fetched() == y.host());
}

TEST_CASE("launch: copies to shared memory in the background") {
  pf::gpu_context& ctx = gpu_context();
  for (const int tiles : {1, 2, 3, 9}) {
    const index_t size = tiles * 256;
    auto x = random_twin<float>(size, 4);
    twin<float> y(size);
    twin<int> mask(tiles);
    std::vector<int> bits;
    for (int n = 0; n < tiles; ++n) bits.push_back(n % 4 != 1);
    mask = twin<int>(bits);
    kernels::test_async_copies(ctx.stream(), x.device_data(), mask.device_data(), y.device_data(), tiles);
    for (index_t i = 0; i < size; ++i) y.host_data()[i] = i / 256 % 4 != 1 ? x.host_data()[i] : 0.0F;
    CHECK(difference(y) == 0.0);
  }
}

namespace {

// Numbers of a kind as the device stores them, and their values.
struct operand {
  std::vector<std::uint32_t> words;
  std::vector<double> values;
};

operand random_operand(int kind, index_t rows, std::uint64_t stream) {
  const index_t depth = kind == 0 ? 8 : 16;
  std::vector<float> numbers(static_cast<std::size_t>(rows * depth));
  pf::fill_uniform(std::span<float>(numbers), -1.0, 1.0, pf::random_stream(7, stream));
  operand result;
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (kind == 0) {
      const auto bits = std::bit_cast<std::uint32_t>(numbers[i]);
      result.words.push_back(bits);
      result.values.push_back(static_cast<double>(std::bit_cast<float>((bits + 0x1000U) & 0xffffe000U)));
      continue;
    }
    const pf::bfloat16 wide(numbers[i]);
    const pf::float16 narrow(numbers[i]);
    const std::uint32_t bits = kind == 1 ? wide.bits() : narrow.bits();
    result.values.push_back(
        static_cast<double>(kind == 1 ? static_cast<float>(wide) : static_cast<float>(narrow)));
    word = i % 2 == 0 ? bits : word | bits << 16;
    if (i % 2 == 1) result.words.push_back(word);
  }
  return result;
}

}  // namespace

TEST_CASE("launch: products by tensor cores") {
  pf::gpu_context& ctx = gpu_context();
  for (int kind = 0; kind < 3; ++kind) {
    for (const bool by_load_matrices : {false, true}) {
      const operand a = random_operand(kind, 16, 5), b = random_operand(kind, 8, 6);
      twin<std::uint32_t> left(a.words), right(b.words);
      auto c = random_twin<float>(16 * 8, 7);
      kernels::test_mma(ctx.stream(), kind, by_load_matrices, left.device_data(), right.device_data(),
                        c.device_data());
      const std::size_t depth = a.values.size() / 16;
      for (std::size_t i = 0; i < 16; ++i) {
        for (std::size_t j = 0; j < 8; ++j) {
          double sum = static_cast<double>(c.host()[i * 8 + j]);
          for (std::size_t k = 0; k < depth; ++k) sum += a.values[i * depth + k] * b.values[j * depth + k];
          c.host()[i * 8 + j] = static_cast<float>(sum);
        }
      }
      CHECK(difference(c) < 1e-6);
    }
  }
}

TEST_CASE("launch: blocks transposed on their way from shared memory") {
  pf::gpu_context& ctx = gpu_context();
  std::vector<std::uint16_t> numbers(32 * 8);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::uint16_t>(i * 7 + 1);
  twin<std::uint16_t> x(numbers);
  twin<std::uint32_t> y(32 * 4);
  kernels::test_transposed(ctx.stream(), x.device_data(), y.device_data());
  for (std::size_t lane = 0; lane < 32; ++lane) {
    for (std::size_t block = 0; block < 4; ++block) {
      const auto at = [&](std::size_t row) {
        return std::uint32_t{numbers[(block * 8 + row) * 8 + lane / 4]};
      };
      y.host()[lane * 4 + block] = at(lane % 4 * 2) | at(lane % 4 * 2 + 1) << 16;
    }
  }
  CHECK(y.fetched() == y.host());
}

// ---------------------------------------------------------------------------------------------------------
// Streams, events, graphs

TEST_CASE("runtime: a graph reads what memory holds when it is replayed") {
  pf::gpu_context& ctx = gpu_context();
  twin<float> x(1, 1.0F), y(1, 0.0F);
  const cudaStream_t stream = ctx.stream();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  checked(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  kernels::test_add_scalar(stream, x.device_data(), y.device_data());
  kernels::test_scale(stream, y.device_data(), y.device_data(), 1, 2.0F);
  checked(cudaStreamEndCapture(stream, &graph));
  CHECK(y.fetched()[0] == 0.0F);
  checked(cudaGraphInstantiate(&executable, graph, 0));
  checked(cudaGraphDestroy(graph));
  checked(cudaGraphLaunch(executable, stream));
  CHECK(y.fetched()[0] == 2.0F);
  kernels::test_scale(stream, x.device_data(), x.device_data(), 1, 5.0F);
  for (int i = 0; i < 2; ++i) checked(cudaGraphLaunch(executable, stream));
  CHECK(y.fetched()[0] == 38.0F);
  checked(cudaGraphExecDestroy(executable));
}

namespace {

// Runs the work `times` times, directly or as replays of one capture.
template <class Work>
void run_or_replay(bool captured, int times, Work work) {
  const cudaStream_t stream = gpu_context().stream();
  if (!captured) {
    for (int i = 0; i < times; ++i) work();
    return;
  }
  pf::gpu::detail::stream_capture capture(stream);
  work();
  pf::gpu::detail::executable_graph graph = capture.finish();
  for (int i = 0; i < times; ++i) graph.launch(stream);
}

// Calls f(captured) with overlapping launches and without.
template <class F>
void for_each_way(F f) {
  for (const bool overlap : {true, false}) {
    kernels::overlap_launches(overlap);
    for (const bool captured : {false, true}) {
      CAPTURE(overlap);
      CAPTURE(captured);
      f(captured);
    }
  }
  kernels::overlap_launches(false);
}

constexpr index_t rotated = 300 * kernels::rotate_threads;  // more blocks than an H100 runs at once
constexpr index_t rotate_by = 31 * kernels::rotate_threads + 7;

// The values 0, 1, 2, ... after `links` rotations.
std::vector<float> after_links(index_t links) {
  std::vector<float> values;
  for (index_t i = 0; i < rotated; ++i) {
    values.push_back(static_cast<float>((i + links * rotate_by) % rotated + links));
  }
  return values;
}

}  // namespace

TEST_CASE("launch: a chain of kernels, each of which reads what the one before has written") {
  const cudaStream_t stream = gpu_context().stream();
  constexpr index_t links = 200, copies = links / 8;
  for_each_way([&](bool captured) {
    twin<float> x(after_links(0)), y(rotated);
    const int times = captured ? 3 : 1;
    run_or_replay(captured, times, [&] {
      float *from = x.device_data(), *to = y.device_data();
      for (index_t n = 0; n < links; ++n, std::swap(from, to)) {
        if (n % 8 == 5) {
          checked(cudaMemcpyAsync(to, from, rotated * sizeof(float), cudaMemcpyDeviceToDevice, stream));
        } else {
          const auto order = n % 8 == 3 ? kernels::start_order::by_stream : kernels::start_order::by_itself;
          kernels::test_rotate(stream, order, from, to, rotated, rotate_by);
        }
      }
    });
    CHECK(x.fetched() == after_links(times * (links - copies)));
  });
}

TEST_CASE("launch: kernels that depend on kernels of two streams") {
  const cudaStream_t stream = gpu_context().stream();
  pf::gpu::stream other;
  pf::gpu::event forked, joined;
  constexpr index_t rounds = 10;
  for_each_way([&](bool captured) {
    twin<float> x(after_links(0)), y(rotated), left(rotated), right(rotated);
    const int times = captured ? 3 : 1;
    run_or_replay(captured, times, [&] {
      const auto rotate = [](cudaStream_t on, twin<float>& from, twin<float>& to) {
        kernels::test_rotate(on, kernels::start_order::by_itself, from.device_data(), to.device_data(),
                             rotated, rotate_by);
      };
      for (index_t n = 0; n < rounds; ++n) {
        rotate(stream, x, y);
        forked.record(stream);
        other.wait_for(forked);
        rotate(other.handle(), y, right);
        joined.record(other.handle());
        rotate(stream, y, left);
        checked(cudaStreamWaitEvent(stream, joined.handle(), 0));
        kernels::test_mean(stream, left.device_data(), right.device_data(), x.device_data(), rotated);
      }
    });
    CHECK(x.fetched() == after_links(times * rounds * 2));
  });
}

TEST_CASE("runtime: what must wait breaks a capture") {
  pf::gpu_context& ctx = gpu_context();
  const cudaStream_t stream = ctx.stream();
  cudaGraph_t graph = nullptr;
  checked(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
  CHECK(graph == nullptr);
  checked(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 8) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
  static_cast<void>(cudaGetLastError());
  ctx.synchronize();
}

TEST_CASE("runtime: a stream waits for an event of another") {
  pf::gpu_context& ctx = gpu_context();
  pf::gpu::stream other;
  pf::gpu::event written;
  twin<float> x(1000, 1.0F), y(1000), z(1000);
  kernels::test_scale(ctx.stream(), x.device_data(), y.device_data(), 1000, 2.0F);
  written.record(ctx.stream());
  other.wait_for(written);
  kernels::test_scale(other.handle(), y.device_data(), z.device_data(), 1000, 2.0F);
  other.synchronize();
  CHECK(written.reached());
  CHECK(z.fetched() == std::vector<float>(1000, 4.0F));
}

TEST_CASE("runtime: copies from and to pinned memory") {
  pf::gpu_context& ctx = gpu_context();
  pf::memory_block<float> host(pf::gpu::pinned_memory(), 100, pf::uninitialized);
  std::fill(host.span().begin(), host.span().end(), 1.5F);
  twin<float> x(100);
  const auto stream = ctx.stream();
  checked(cudaMemcpyAsync(x.device_data(), host.data(), 400, cudaMemcpyHostToDevice, stream));
  kernels::test_scale(stream, x.device_data(), x.device_data(), 100, 2.0F);
  checked(cudaMemcpyAsync(host.data(), x.device_data(), 400, cudaMemcpyDeviceToHost, stream));
  pf::gpu::event done;
  done.record(stream);
  while (!done.reached()) {
  }
  CHECK(host.data()[99] == 3.0F);
}
