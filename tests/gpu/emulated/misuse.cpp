// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What the emulated device finds that a device lets pass, or hangs on. Compiled with cuda.hpp in front.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmath>

#include <string>
#include <vector>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/gpu/kernels/gemm/async_copy.cuh>
#include <pufferfish/gpu/kernels/grid_barrier.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/runtime/memory.hpp>
#include <pufferfish/gpu/runtime/stream.hpp>

using namespace pufferfish::gpu_kernels;
namespace pf = pufferfish;

namespace {

// What a process that does this prints; "survived" and that, where it ends well.
template <class F>
std::string last_words(F f) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    dup2(open("/dev/null", O_WRONLY), 1);  // what the test framework says of it
    close(ends[0]);
    f();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[256];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) != 0) ? text : "survived " + text;
}

bool has(const std::string& text, const std::string& part) {
  const bool found = text.find("survived") != 0 && text.find(part) != std::string::npos;
  if (!found) MESSAGE(text);
  return found;
}

struct floats {
  explicit floats(std::size_t n) : size(n) { cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(float)); }
  ~floats() { cudaFree(data); }
  floats(const floats&) = delete;
  floats& operator=(const floats&) = delete;
  std::vector<float> get() const {
    std::vector<float> values(size);
    cudaMemcpy(values.data(), data, size * sizeof(float), cudaMemcpyDeviceToHost);
    return values;
  }
  float* data = nullptr;
  std::size_t size;
};

__global__ void some_return_kernel() {
  if (threadIdx.x < 8) return;
  __syncthreads();
}
__global__ void two_barriers_kernel() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void absent_lane_kernel(int* y) { *y = __shfl_xor_sync(0xffffffffU, 1, 16); }
__global__ void masks_kernel() { __syncwarp(threadIdx.x == 3 ? 0xfU : 0xffffffffU); }
__global__ void not_in_mask_kernel() { __syncwarp(1U << threadIdx.x & 7U); }
__global__ void barrier_in_warp_kernel() {
  if (threadIdx.x < 4) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}
__global__ void some_wait_kernel(grid_dependency earlier, int lanes) {
  if (static_cast<int>(threadIdx.x) < lanes) earlier.wait();
}
__global__ void write_kernel(float* x, index_t i) { x[i] = 1.0F; }
__global__ void write_shared_kernel(index_t i) { dynamic_shared<float>()[i] = 1.0F; }
__global__ void read_shared_kernel(float* x) {
  x[threadIdx.x] = dynamic_shared<float>()[threadIdx.x];
  __syncthreads();
  dynamic_shared<float>()[threadIdx.x] = 1.0F;
}
__global__ void load_vector_kernel(float* x) { store_vector(x, load_vector(x + 1)); }
__global__ void copy_kernel(const float* x, float* y) {
  copy_async<4>(dynamic_shared<float>(), x);
  commit_copies();
  y[0] = *dynamic_shared<float>();
  wait_for_copies<0>();
  y[1] = *dynamic_shared<float>();
}
__global__ void overflow_kernel(float* x, int depth) {
  volatile float some[1024];
  for (volatile float& value : some) value = 1.0F;
  if (depth < 1000) overflow_kernel(x, depth + 1);
  x[0] = some[depth];
}

// Blocks below `those` and their threads below `threads` meet; then each block writes the sum of the numbers
// that all blocks wrote before.
__global__ void grid_barrier_kernel(grid_dependency earlier, float* sums, unsigned blocks, unsigned those,
                                    unsigned threads) {
  earlier.wait();
  grid_barrier barrier(nullptr);
  if (sums != nullptr && threadIdx.x == 0) sums[blockIdx.x] = static_cast<float>(blockIdx.x);
  if (blockIdx.x >= those || threadIdx.x >= threads) return;
  barrier.wait();
  float sum = 0.0F;
  for (unsigned b = 0; b < blocks && sums != nullptr; ++b) sum += sums[b];
  barrier.wait();
  if (sums != nullptr && threadIdx.x == 0) sums[blockIdx.x] = sum;
  barrier.finish();
}

}  // namespace

TEST_CASE("emulated device: threads that wait for others in vain") {
  CHECK(has(last_words([] {
              launch(nullptr, {1, 64}, some_return_kernel);
            }),
            "threads wait forever: of 64, 56 are at a barrier, 0 in a warp operation, 8 have returned"));
  CHECK(has(last_words([] { launch(nullptr, {1, 64}, two_barriers_kernel); }), "different barriers"));
  CHECK(has(last_words([] { launch(nullptr, {1, 64}, barrier_in_warp_kernel); }), "threads wait forever"));
  const std::string text = last_words([] { launch(nullptr, {{1, 5}, 64}, some_return_kernel); });
  CHECK(has(text, "misuse.cpp"));
  CHECK(has(text, "some_return_kernel"));
  CHECK(has(text, "grid 1 x 5 x 1 of 64 x 1 x 1 threads, block (0, "));
}

TEST_CASE("emulated device: barriers of a grid") {
  const auto together = [](unsigned blocks, unsigned those) {
    launch_together(nullptr, {blocks, 64}, grid_barrier_kernel, static_cast<float*>(nullptr), blocks, those,
                    64U);
  };
  floats sums(7);
  launch_together(nullptr, {7, 64}, grid_barrier_kernel, sums.data, 7U, 7U, 64U);
  for (const float sum : sums.get()) CHECK(sum == 21.0F);
  CHECK(has(last_words([&] { together(5, 4); }), "a barrier of the grid that not all reach"));
  CHECK(
      has(last_words([] {
            launch_together(nullptr, {3, 64}, grid_barrier_kernel, static_cast<float*>(nullptr), 3U, 3U, 63U);
          }),
          "threads wait forever"));
  CHECK(has(last_words([] {
              launch(nullptr, {3, 64}, grid_barrier_kernel, static_cast<float*>(nullptr), 3U, 3U, 64U);
            }),
            "do not all run at once"));
  CHECK_THROWS_AS(together(133, 133), pf::backend_error);
}

TEST_CASE("emulated device: threads that do not wait for earlier launches") {
  CHECK(last_words([] { launch(nullptr, {3, 64}, some_wait_kernel, 64); }) == "survived ");
  const std::string text = last_words([] { launch(nullptr, {3, 64}, some_wait_kernel, 63); });
  CHECK(has(text, "a thread did not wait for earlier work"));
  CHECK(has(text, "thread (63, 0, 0)"));
}

TEST_CASE("emulated device: warp operations without some lanes") {
  floats y(1);
  CHECK(has(last_words([&] {
              launch(nullptr, {1, 16}, absent_lane_kernel, reinterpret_cast<int*>(y.data));
            }),
            "a shuffle from a lane that does not take part"));
  CHECK(has(last_words([] { launch(nullptr, {1, 32}, masks_kernel); }), "emulated device"));
  CHECK(has(last_words([] { launch(nullptr, {1, 32}, not_in_mask_kernel); }), "not in the mask"));
}

TEST_CASE("emulated device: accesses outside of memory") {
  floats x(100);
  const auto write = [&](index_t i) {
    launch(nullptr, {1, 1}, write_kernel, x.data, i);
    cudaDeviceSynchronize();
  };
  CHECK(has(last_words([&] { write(100); }), "something wrote outside of 400 bytes"));
  CHECK(has(last_words([&] { write(-1); }), "something wrote outside of 400 bytes"));
  CHECK(has(last_words([&] { write(200); }), "byte 800 of 400 bytes of device memory"));
  CHECK(has(last_words([&] {
              launch(nullptr, {1, 1, 64}, write_shared_kernel, 16);
            }),
            "past dynamic shared memory"));
  CHECK(has(last_words([&] {
              cudaFree(x.data);
              write(0);
            }),
            "that were freed"));
  CHECK(has(last_words([&] { launch(nullptr, {1, 1}, load_vector_kernel, x.data); }), "no multiple of 16"));
  CHECK(has(last_words([&] { launch(nullptr, {1, 1}, overflow_kernel, x.data, 0); }), "a stack may be full"));
}

TEST_CASE("emulated device: a write past the end of a scratch block, with red zones and without") {
  // What a process says in which a kernel writes element i of the first of two blocks of n floats.
  const auto write = [](bool red_zones, pf::index_t n, pf::index_t i) {
    return last_words([=] {
      pf::stack_arena::red_zones() = red_zones;
      pf::stack_arena arena(pf::gpu::device_memory());
      for (int step = 0; step < 3; ++step) {
        const pf::scratch_frame frame(arena);
        auto* const first =
            reinterpret_cast<float*>(arena.allocate(static_cast<std::size_t>(n) * sizeof(float)));
        cudaMemset(arena.allocate(static_cast<std::size_t>(n) * sizeof(float)), 0, 4);
        launch(nullptr, {1, 1}, write_kernel, first, i);
        cudaDeviceSynchronize();
      }
    });
  };
  // Multiples of what arenas round up to. A block that ends where a page does is protected, another is
  // checked at a wait.
  for (const pf::index_t n : {48, 64}) {
    CAPTURE(n);
    for (const bool red_zones : {false, true}) CHECK(write(red_zones, n, n - 1) == "survived ");
    CHECK(write(false, n, n) == "survived ");  // into the next block
    CHECK(has(write(true, n, n),
              n == 48 ? "something wrote outside of 192 bytes" : "byte 256 of 256 bytes of device memory"));
  }
}

TEST_CASE("arenas with red zones give the same addresses in every step") {
  pf::stack_arena::red_zones() = true;
  pf::stack_arena arena(pf::gpu::device_memory());
  pf::stack_arena::red_zones() = false;
  std::vector<std::byte*> first;
  for (int step = 0; step < 3; ++step) {
    std::vector<std::byte*> now;
    pf::scratch_frame frame(arena);
    for (const pf::index_t bytes : {100, 100, 5000}) {
      now.push_back(frame.take<std::byte>(bytes));
      const pf::scratch_frame inner(arena);
      now.push_back(arena.allocate(static_cast<std::size_t>(3 * bytes)));
    }
    if (step == 0) first = now;
    CHECK(now == first);
    CHECK(arena.system_allocations() == 6);
  }
}

TEST_CASE("emulated device: the host's accesses to device memory") {
  floats x(100);
  CHECK(has(last_words([&] { x.data[3] = 1.0F; }), "the host touched device memory: address"));
  std::vector<float> host(101);
  CHECK(cudaMemcpy(host.data(), x.data, 400, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(x.data, host.data(), 400, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue);
  CHECK(has(last_words([&] { cudaMemcpy(host.data(), x.data, 404, cudaMemcpyDeviceToHost); }),
            "404 bytes from byte 0 of 400 bytes of device memory"));
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("emulated device: unwritten memory is full of NaNs") {
  floats x(1000), large(3 << 20);
  CHECK(std::isnan(x.get()[999]));
  CHECK(std::isnan(large.get()[(3 << 20) - 1]));
  launch(nullptr, {5, 64, 256}, read_shared_kernel, x.data);
  CHECK(std::isnan(x.get()[63]));
  cudaMemset(x.data, 0, 4);
  launch(nullptr, {1, 1, 4}, copy_kernel, x.data, x.data + 1);
  CHECK(std::isnan(x.get()[1]));
  CHECK(x.get()[2] == 0.0F);
}

TEST_CASE("emulated device: a stream does nothing before a wait") {
  floats x(1);
  pf::gpu::stream stream;
  cudaMemset(x.data, 0, 4);
  launch(stream.handle(), {1, 1}, write_kernel, x.data, 0);
  CHECK(x.get()[0] == 0.0F);
  stream.synchronize();
  CHECK(x.get()[0] == 1.0F);
  // Pinned memory is read when the copy comes, other memory before the call returns.
  pf::memory_block<float> pinned(pf::gpu::pinned_memory(), 1, pf::uninitialized);
  float pageable = 3.0F;
  *pinned.data() = 3.0F;
  cudaMemcpyAsync(x.data, &pageable, 4, cudaMemcpyHostToDevice, stream.handle());
  pageable = 4.0F;
  stream.synchronize();
  CHECK(x.get()[0] == 3.0F);
  cudaMemcpyAsync(x.data, pinned.data(), 4, cudaMemcpyHostToDevice, stream.handle());
  *pinned.data() = 4.0F;
  stream.synchronize();
  CHECK(x.get()[0] == 4.0F);
}

TEST_CASE("device memory is set to zero after the work that streams have") {
  pf::gpu::stream stream;
  pf::memory_block<float> x(pf::gpu::device_memory(), 1);
  pf::gpu::stream_memory of_stream(stream.handle());
  for (pf::memory_source* source : {&pf::gpu::device_memory(), static_cast<pf::memory_source*>(&of_stream)}) {
    launch(stream.handle(), {1, 1}, write_kernel, x.data(), 0);
    source->fill_zero(x.data(), sizeof(float));
    float value = -1.0F;
    x.to_host({&value, 1});
    CHECK(value == 0.0F);
  }
}

TEST_CASE("emulated device: branches of a capture that are not joined") {
  pf::gpu::stream first, second;
  pf::gpu::event forked, joined;
  floats x(1);
  for (const bool join : {true, false}) {
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(first.handle(), cudaStreamCaptureModeGlobal) == cudaSuccess);
    forked.record(first.handle());
    second.wait_for(forked);
    launch(second.handle(), {1, 1}, write_kernel, x.data, 0);
    joined.record(second.handle());
    if (join) first.wait_for(joined);
    CHECK(cudaStreamEndCapture(first.handle(), &graph) ==
          (join ? cudaSuccess : cudaErrorStreamCaptureUnjoined));
    if (graph != nullptr) CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    static_cast<void>(cudaGetLastError());
  }
}

TEST_CASE("emulated device: a graph that is destroyed while a launch of it has not ended") {
  floats x(1);
  const auto destroy = [&](bool wait) {
    return last_words([&, wait] {
      pf::gpu::stream stream;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal);
      launch(stream.handle(), {1, 1}, write_kernel, x.data, 0);
      cudaStreamEndCapture(stream.handle(), &graph);
      cudaGraphInstantiate(&executable, graph, 0);
      cudaGraphDestroy(graph);
      cudaGraphLaunch(executable, stream.handle());
      if (wait) stream.synchronize();
      cudaGraphExecDestroy(executable);
    });
  };
  CHECK(destroy(true) == "survived ");
  CHECK(has(destroy(false), "a graph is destroyed while a launch of it has not ended"));
}
