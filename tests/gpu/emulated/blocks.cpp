// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Executes the blocks of a grid: threads are fibres. A thread that meets no barrier runs to its end on the
/// fibre that is there; only one that has to wait keeps its own.

#include "cuda.hpp"

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "device.hpp"
#include "fibre.hpp"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulated_device {

namespace {

constexpr int most_threads = 1024;
enum class state : unsigned char { fresh, running, ready, at_barrier, at_grid, in_warp, returned };

struct thread {
  state now;
  bool waited;  // for the work before the kernel
  fibre* on;    // while it waits
  site where;   // it waits
  // The warp operation that it waits in:
  unsigned mask;
  void* slot;
  void (*complete)(void* const*);
};

struct warp {
  unsigned live;     // lanes that have not returned
  unsigned waiting;  // lanes in a warp operation
};

// The block at work.
struct block_state {
  const char* name = nullptr;
  const operation* body = nullptr;
  int size = 0;
  unsigned disorder = 0;  // decides in which order threads start, leave barriers and go on
  int started = 0;
  int returned = 0;
  int arrived = 0;        // at the barrier
  int agreed = 0;         // of them, those whose predicate is not zero
  site barrier;           // where the first of them is
  unsigned barriers = 0;  // passed
  int result[2] = {};     // `agreed` of the last barriers, even and odd
  bool together = false;  // with all other blocks of the grid
  int at_grid = 0;        // threads at the barrier of the grid
  int current = -1;       // thread at work
  fibre* on = nullptr;    // its fibre
  thread threads[most_threads];
  warp warps[most_threads / 32];
  int ready[most_threads];  // threads that may go on: a ring
  unsigned ready_first = 0, ready_last = 0;
} block;

fibre host;
std::vector<fibre*> idle;

constexpr std::size_t shared_guard = 64;
constexpr unsigned char guard_byte = 0xa5;
alignas(128) unsigned char shared[most_shared_bytes + shared_guard];

uint3 index_of(int t) {
  const auto i = static_cast<unsigned>(t);
  return {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
}

void take(int t) {
  block.current = t;
  block.threads[t].now = state::running;
  threadIdx = index_of(t);
}

// A thread is queued after all others when a barrier releases it, and before them after a warp operation:
// a warp continues as long as it can, and its stacks stay in the cache.
void push_last(int t) {
  block.threads[t].now = state::ready;
  block.ready[block.ready_last++ % most_threads] = t;
}
void push_first(int t) {
  block.threads[t].now = state::ready;
  block.ready[--block.ready_first % most_threads] = t;
}

bool backwards() { return ((block.disorder >> block.barriers % 16) & 1U) != 0; }
int in_order(int i) { return backwards() ? block.size - 1 - i : i; }

[[noreturn]] void stuck() {
  int at_barrier = 0, at_grid = 0, in_warp = 0, example = 0;
  for (int t = 0; t < block.size; ++t) {
    at_barrier += block.threads[t].now == state::at_barrier;
    at_grid += block.threads[t].now == state::at_grid;
    in_warp += block.threads[t].now == state::in_warp;
  }
  const state shown = in_warp != 0 ? state::in_warp : at_barrier != 0 ? state::at_barrier : state::at_grid;
  while (block.threads[example].now != shown) ++example;
  take(example);
  char why[200];
  std::snprintf(why, sizeof why,
                "threads wait forever: of %d, %d are at a barrier, %d in a warp operation, %d have returned"
                ", %d are at the barrier of the grid",
                block.size, at_barrier, in_warp, block.returned, at_grid);
  misuse(why, block.threads[example].where);
}

// Lets the lanes of `mask` go on if all of them wait.
void try_complete(int first_of_warp, unsigned mask) {
  warp& w = block.warps[first_of_warp / 32];
  const unsigned lanes = mask & w.live;
  if (lanes == 0 || (w.waiting & lanes) != lanes) return;
  void* slots[32] = {};
  const thread* first = nullptr;
  for (int l = 0; l < 32; ++l) {
    if ((lanes >> l & 1U) == 0) continue;
    const thread& t = block.threads[first_of_warp + l];
    if (first == nullptr) first = &t;
    if (t.mask != mask) misuse("the lanes of a warp operation have different masks", t.where);
    if (t.where.line() != first->where.line() || t.complete != first->complete) {
      misuse("lanes of a warp meet in different operations", t.where);
    }
    slots[l] = t.slot;
  }
  first->complete(slots);
  w.waiting &= ~lanes;
  for (int l = 0; l < 32; ++l) {
    if ((lanes >> l & 1U) != 0 && first_of_warp + l != block.current) push_first(first_of_warp + l);
  }
}

void end_thread() {
  const int t = block.current, first_of_warp = t / 32 * 32;
  block.threads[t].now = state::returned;
  ++block.returned;
  warp& w = block.warps[t / 32];
  w.live &= ~(1U << t % 32);
  for (unsigned left = w.waiting; left != 0; left &= w.waiting) {
    const int lane = __builtin_ctz(left);
    left &= left - 1;
    try_complete(first_of_warp, block.threads[first_of_warp + lane].mask);
  }
}

void go_to(fibre& next) {
  fibre& self = *block.on;
  block.on = &next;
  self.switch_to(next);
}

void run_threads();

fibre& idle_fibre() {
  if (idle.empty()) return *new fibre(run_threads);
  fibre& f = *idle.back();
  idle.pop_back();
  return f;
}

// Leaves the fibre of a thread that waits or has returned for one that can go on. In the second case it
// returns when there is another thread to start.
void go_on(bool returned) {
  const bool fresh = block.started < block.size;
  const bool ready = block.ready_first != block.ready_last;
  if (fresh && (!ready || (block.disorder & 1U) != 0)) {
    if (!returned) go_to(idle_fibre());
    return;
  }
  if (!ready && block.returned < block.size) {
    if (block.at_grid == block.size) return go_to(host);  // until the other blocks are there
    stuck();
  }
  if (returned) idle.push_back(block.on);
  if (!ready) return go_to(host);
  const int t = block.ready[block.ready_first++ % most_threads];
  take(t);
  go_to(*block.threads[t].on);
}

void wait(state why) {
  thread& self = block.threads[block.current];
  self.now = why;
  self.on = block.on;
  go_on(false);
}

// What a fibre does.
void run_threads() {
  for (;;) {
    take(in_order(block.started++));
    (*block.body)();
    end_thread();
    go_on(true);
  }
}

void check_shared_guard(std::size_t shared_bytes) {
  for (std::size_t i = 0; i < shared_guard; ++i) {
    if (shared[shared_bytes + i] != guard_byte)
      misuse("something wrote past dynamic shared memory", site::current());
  }
}

// Runs the block to its end, or to its barrier of the grid.
void run_block(std::size_t shared_bytes) {
  std::memset(shared, 0xff, shared_bytes);
  std::memset(shared + shared_bytes, guard_byte, shared_guard);
  block.started = block.returned = block.arrived = block.agreed = 0;
  block.at_grid = 0;
  block.barriers = block.ready_first = block.ready_last = 0;
  for (int t = 0; t < block.size; ++t) {
    block.threads[t].now = state::fresh;
    block.threads[t].waited = false;
  }
  for (int t = 0; t < block.size; t += 32) {
    const int lanes = block.size - t;
    block.warps[t / 32] = {lanes >= 32 ? ~0U : (1U << lanes) - 1U, 0};
  }
  forget_copies();
  block.on = &host;
  go_to(idle_fibre());
  check_shared_guard(shared_bytes);
}

// Lets the threads of the block leave the barrier of the grid.
void resume_block(std::size_t shared_bytes) {
  block.at_grid = 0;
  ++block.barriers;
  for (int i = 0; i < block.size; ++i) push_last(in_order(i));
  const int t = block.ready[block.ready_first++ % most_threads];
  take(t);
  block.on = &host;
  go_to(*block.threads[t].on);
  check_shared_guard(shared_bytes);
}

}  // namespace

void grid_barrier(const site& where) {
  if (block.current < 0) misuse("a barrier outside of a kernel", where);
  if (!block.together) misuse("a barrier of the grid in a launch whose blocks do not all run at once", where);
  if (block.at_grid++ == 0) block.barrier = where;
  if (block.barrier.line() != where.line()) misuse("threads of a block meet in different barriers", where);
  block.threads[block.current].where = where;
  wait(state::at_grid);
}

votes block_barrier(bool predicate, const site& where) {
  if (block.current < 0) misuse("a barrier outside of a kernel", where);
  if (block.arrived++ == 0) block.barrier = where;
  if (block.barrier.line() != where.line()) misuse("threads of a block meet in different barriers", where);
  block.agreed += predicate ? 1 : 0;
  const unsigned generation = block.barriers;
  const int self = block.current;
  if (block.arrived < block.size) {
    block.threads[self].where = where;
    wait(state::at_barrier);
  } else {
    block.result[generation % 2] = block.agreed;
    block.arrived = block.agreed = 0;
    ++block.barriers;
    for (int i = 0; i < block.size; ++i) {
      if (in_order(i) != self) push_last(in_order(i));
    }
  }
  return {block.result[generation % 2], block.size};
}

void warp_exchange(unsigned mask, void* slot, void (*complete)(void* const*), const site& where) {
  if (block.current < 0) misuse("a warp operation outside of a kernel", where);
  const int self = block.current, lane = self % 32;
  if ((mask >> lane & 1U) == 0) misuse("a lane that is not in the mask of its warp operation", where);
  thread& t = block.threads[self];
  t.where = where;
  t.mask = mask;
  t.slot = slot;
  t.complete = complete;
  warp& w = block.warps[self / 32];
  w.waiting |= 1U << lane;
  try_complete(self - lane, mask);
  if ((w.waiting >> lane & 1U) != 0) wait(state::in_warp);
}

int lane() { return block.current % 32; }
int thread_of_block() { return block.current; }

void* dynamic_shared_memory() { return shared; }

void print_position() {
  if (block.name == nullptr) return;
  std::fprintf(stderr,
               "emulated device: in %s, grid %u x %u x %u of %u x %u x %u threads, block (%u, %u, %u)",
               block.name, gridDim.x, gridDim.y, gridDim.z, blockDim.x, blockDim.y, blockDim.z, blockIdx.x,
               blockIdx.y, blockIdx.z);
  if (block.current >= 0)
    std::fprintf(stderr, ", thread (%u, %u, %u)", threadIdx.x, threadIdx.y, threadIdx.z);
  std::fputc('\n', stderr);
}

void check_aligned16(const void* address, const site& where) {
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0) {
    misuse("an access of 16 bytes at an address that is no multiple of 16", where);
  }
}

void wait_for_earlier_work() { block.threads[block.current].waited = true; }

void check_waited(const site& where) {
  if (!block.threads[block.current].waited) misuse("a thread did not wait for earlier work", where);
}

void misuse(const char* why, const site& where) {
  std::fprintf(stderr, "emulated device: %s:%u: %s: %s\n", where.file_name(), where.line(),
               where.function_name(), why);
  print_position();
  std::abort();
}

namespace {

unsigned first_disorder() {
  const char* setting = std::getenv("PUFFERFISH_EMULATED_ORDER");
  return setting == nullptr ? 0x9e3779b9U : static_cast<unsigned>(std::strtoul(setting, nullptr, 10));
}

}  // namespace

namespace {

// Numbers of the blocks of a grid in a scrambled order.
class block_order {
 public:
  explicit block_order(dim3 blocks)
      : blocks_(blocks), plane_(std::uint64_t{blocks.x} * blocks.y), count_(plane_ * blocks.z) {
    // Any step that has no factor in common with their number visits all blocks.
    step_ = count_ * 5 / 8 + 1;
    while (std::gcd(step_, count_) != 1) ++step_;
    at_ = disorder_ % count_;
  }
  std::uint64_t count() const { return count_; }
  // Makes the next block the one at work, and returns its number.
  std::uint64_t next() {
    disorder_ = disorder_ * 1664525U + 1013904223U;
    at_ = (at_ + step_) % count_;
    blockIdx = {static_cast<unsigned>(at_ % blocks_.x), static_cast<unsigned>(at_ / blocks_.x % blocks_.y),
                static_cast<unsigned>(at_ / plane_)};
    return at_;
  }
  static unsigned disorder() { return disorder_ >> 8; }

 private:
  static unsigned disorder_;
  dim3 blocks_;
  std::uint64_t plane_, count_, step_ = 0, at_ = 0;
};
unsigned block_order::disorder_ = first_disorder();

// Runs the blocks of a grid by turns, from one barrier of the grid to the next, which all must reach. Static
// shared memory is common to all of them, so that such kernels must not have any.
void run_together(block_order& order, std::size_t shared_bytes) {
  struct suspended {
    block_state state;
    std::vector<unsigned char> memory;
  };
  std::vector<suspended> others(order.count());
  for (bool first = true;; first = false) {
    std::uint64_t waiting = 0;
    site where = site::current();
    for (std::uint64_t i = 0; i < order.count(); ++i) {
      suspended& own = others[order.next()];
      if (first) {
        block.disorder = block_order::disorder();
        run_block(shared_bytes);
      } else {
        block = own.state;
        std::memcpy(shared, own.memory.data(), own.memory.size());
        resume_block(shared_bytes);
      }
      if (block.returned == block.size) continue;
      ++waiting;
      where = block.barrier;
      own.state = block;
      own.memory.assign(shared, shared + shared_bytes + shared_guard);
    }
    if (waiting == 0) return;
    if (waiting != order.count())
      misuse("blocks wait forever: a barrier of the grid that not all reach", where);
  }
}

}  // namespace

void run_grid(const char* name, dim3 blocks, dim3 threads, std::size_t shared_bytes, bool together,
              const operation& body) {
  block.name = name;
  block.body = &body;
  block.size = static_cast<int>(threads.x * threads.y * threads.z);
  block.together = together;
  gridDim = blocks;
  blockDim = threads;
  block_order order(blocks);
  if (together) {
    run_together(order, shared_bytes);
  } else {
    for (std::uint64_t i = 0; i < order.count(); ++i) {
      order.next();
      block.disorder = block_order::disorder();
      run_block(shared_bytes);
    }
  }
  block.name = nullptr;
  block.current = -1;
}

cudaError_t launch(cudaStream_t stream, const char* name, dim3 blocks, dim3 threads, std::size_t shared_bytes,
                   bool together, std::function<void()> body) {
  const bool grid_fits = blocks.x - 1 < 0x7fffffffU && blocks.y - 1 < 65535 && blocks.z - 1 < 65535;
  const bool block_fits = threads.x - 1 < 1024 && threads.y - 1 < 1024 && threads.z - 1 < 64 &&
                          threads.x * threads.y * threads.z <= most_threads;
  if (!grid_fits || !block_fits) return cudaErrorInvalidConfiguration;
  if (shared_bytes > most_shared_bytes) return cudaErrorInvalidValue;
  // One block on each multiprocessor, as if it needed all of its shared memory.
  if (together && std::uint64_t{blocks.x} * blocks.y * blocks.z > multiprocessors) {
    return cudaErrorCooperativeLaunchTooLarge;
  }
  return submit(stream, name, [=, body = std::move(body)] {
    run_grid(name, blocks, threads, shared_bytes, together, body);
  });
}

}  // namespace emulated_device
