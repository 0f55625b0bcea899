// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// After a timeout MPI may still write what it was given: a late rank's messages must not meet memory that has
// been freed. Freed blocks are kept here, filled with a pattern that any write would change.
#include <doctest/doctest.h>

#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <pufferfish/distributed.hpp>
#include <pufferfish/nn.hpp>

namespace pf = pufferfish;

namespace {

/// Blocks that were freed while it was on, by their address and size.
class quarantine {
 public:
  static constexpr unsigned char pattern = 0xa5;

  static void take(void* memory) noexcept {
    if (memory == nullptr) return;
    const std::size_t number = on_ ? count_.fetch_add(1) : most;
    if (number >= most) return std::free(memory);
    const std::size_t size = malloc_usable_size(memory);
    std::memset(memory, pattern, size);
    blocks_[number] = {static_cast<unsigned char*>(memory), size};
  }
  static void turn(bool on) { on_ = on; }
  static std::size_t blocks() { return std::min<std::size_t>(count_, most); }

  /// Bytes of kept blocks that were written after they were freed.
  static std::size_t spoilt_bytes() {
    std::size_t spoilt = 0;
    for (std::size_t b = 0; b < blocks(); ++b) {
      for (std::size_t i = 0; i < blocks_[b].size; ++i) spoilt += blocks_[b].memory[i] != pattern ? 1U : 0U;
    }
    return spoilt;
  }

 private:
  struct block {
    unsigned char* memory;
    std::size_t size;
  };
  static constexpr std::size_t most = 100000;
  static inline std::array<block, most> blocks_{};
  static inline std::atomic<std::size_t> count_{0};
  static inline std::atomic<bool> on_{false};
};

void* allocate(std::size_t bytes, std::size_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), std::max<std::size_t>(bytes, 1)) != 0) {
    throw std::bad_alloc();
  }
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t a) {
  return allocate(bytes, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t bytes, std::align_val_t a) {
  return allocate(bytes, static_cast<std::size_t>(a));
}
void operator delete(void* memory) noexcept { quarantine::take(memory); }
void operator delete[](void* memory) noexcept { quarantine::take(memory); }
void operator delete(void* memory, std::size_t) noexcept { quarantine::take(memory); }
void operator delete[](void* memory, std::size_t) noexcept { quarantine::take(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { quarantine::take(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { quarantine::take(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { quarantine::take(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { quarantine::take(memory); }

namespace {

constexpr double timeout = 0.4;

/// Lets MPI take what comes.
void let_messages_come(pf::mpi::communicator& other) {
  other.barrier();
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(200)) {
    int flag = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, 99, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
  }
  other.barrier();
}

/// Calls `work(comm, linger)` on all ranks; linger() makes the last one come long after the others have given
/// up. Whatever those free then must stay as it was.
template <class Work>
void check_late(const std::string& name, Work&& work) {
  CAPTURE(name);
  pf::mpi::communicator all(MPI_COMM_WORLD);
  if (all.size() == 1) return;
  const bool late = all.rank() == all.size() - 1;
  auto comm = std::make_unique<pf::mpi::communicator>(MPI_COMM_WORLD);
  std::string text = "nothing was thrown";
  try {
    work(*comm, [&] {
      comm->set_timeout(timeout);
      quarantine::turn(!late);
      if (late) std::this_thread::sleep_for(std::chrono::duration<double>(3 * timeout));
    });
  } catch (const pf::timeout_error& e) {
    text = e.what();
  }
  CAPTURE(text);
  // The late rank may find that all of the others' messages have come.
  CHECK((late || text.find(" did not ") != std::string::npos));
  CHECK((late || comm->broken()));
  comm.reset();
  let_messages_come(all);
  quarantine::turn(false);
  CHECK((late || quarantine::blocks() > 0));
  CHECK(quarantine::spoilt_bytes() == 0);
}

/// An exchange that the last rank finishes late.
void check_late_exchange(const std::string& name, const pf::exchange_options& options,
                         const pf::compression_options& compression = {}) {
  check_late(name, [&](pf::mpi::communicator& comm, const auto& linger) {
    pf::Sequential<float> layers;
    layers.add("fc1", pf::Linear<float>(60, 200));
    layers.add("fc2", pf::Linear<float>(200, 60));
    auto net = std::make_unique<pf::network<float>>(pf::any_layer<float>(std::move(layers)));
    pf::gradient_exchange<float, pf::mpi::communicator> exchange(
        net->store(), comm, options, pf::new_compressor<float>(net->store(), compression));
    pf::cpu_context ctx;
    const std::span<float> gradients = net->store().gradients();
    std::fill(gradients.begin(), gradients.end(), static_cast<float>(comm.rank() + 1));
    exchange.begin(ctx);
    linger();
    exchange.finish(ctx);
  });
}

}  // namespace

TEST_CASE("collectives that wait: memory that was given up on the way out stays as it is") {
  check_late("all_reduce_sum", [](pf::mpi::communicator& comm, const auto& linger) {
    std::vector<float> values(5000, 1.0F);
    linger();
    comm.all_reduce_sum(std::span(values));
  });
  check_late("broadcast", [](pf::mpi::communicator& comm, const auto& linger) {
    std::vector<float> values(5000, 1.0F);
    linger();
    comm.broadcast(std::span(values), comm.size() - 1);
  });
}

TEST_CASE("exchanges: gradients and buffers of one that was given up stay as they are") {
  pf::exchange_options options;
  options.plan.emplace().buckets = {4000, 40000};
  options.algorithm = pf::all_reduce_algorithm::ring;
  check_late_exchange("ring, thread", options);
  options.wire = pf::exchange_wire::bf16;
  check_late_exchange("bf16", options);
  options.wire = pf::exchange_wire::same;
  check_late_exchange("PowerSGD", options, pf::power_sgd_options{.rank = 8});
  options.progress = pf::exchange_progress::calls;
  options.algorithm = pf::all_reduce_algorithm::library;
  check_late_exchange("MPI's own, calls", options);
}
