// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The emulated device's memory. Every allocation has its own pages, which only the device may touch, and
/// ends (but for the rounding to 256 bytes) at a page without access; addresses are not used again. So an
/// access by the host, past the end or after the release is a fault at the instruction that does it.

#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.hpp"

namespace emulated_device {

namespace {

constexpr std::size_t device_bytes = std::size_t{4} << 30;
constexpr std::size_t alignment = 256;
constexpr unsigned char guard_byte = 0xa5;

struct allocation {
  std::size_t bytes = 0;
  unsigned char* pages = nullptr;  // without the two guard pages
  std::size_t page_bytes = 0;
  int device = 0;
};

using allocations = std::map<std::uintptr_t, allocation>;  // by address
allocations& device_memory() {
  static auto* all = new allocations;
  return *all;
}
allocations& freed_memory() {  // to explain faults
  static auto* all = new allocations;
  return *all;
}
std::map<std::uintptr_t, std::size_t>& pinned_memory() {
  static auto* all = new std::map<std::uintptr_t, std::size_t>;
  return *all;
}

// Where device memory has been so far.
std::uintptr_t lowest = ~std::uintptr_t{0}, highest = 0;
std::size_t used_bytes = 0;
int accesses = 0;
struct sigaction outer_handler;

std::uintptr_t number_of(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }
std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }
std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

// A file of NaNs. Large allocations are private copies of it: unwritten pages take no memory and no
// time.
constexpr std::size_t nan_bytes = std::size_t{4} << 20;
int nan_file() {
  static const int file = [] {
    const int made = memfd_create("emulated device", 0);
    const std::vector<unsigned char> nans(nan_bytes, 0xff);
    if (made >= 0 && write(made, nans.data(), nan_bytes) != static_cast<ssize_t>(nan_bytes)) return -1;
    return made;
  }();
  return file;
}

void fill_with_nans(const allocation& a) {
  if (a.page_bytes < nan_bytes || nan_file() < 0) {
    std::memset(a.pages, 0xff, a.page_bytes);
    return;
  }
  for (std::size_t from = 0; from < a.page_bytes; from += nan_bytes) {
    const std::size_t bytes = std::min(nan_bytes, a.page_bytes - from);
    if (mmap(a.pages + from, bytes, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_NORESERVE,
             nan_file(), 0) == MAP_FAILED) {
      std::perror("emulated device: mmap");
      std::abort();
    }
  }
}

void protect(const allocation& a, bool open) {
  mprotect(a.pages, a.page_bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void explain_fault(int, siginfo_t* info, void*) {
  const std::uintptr_t at = number_of(info->si_addr);
  const allocations::value_type* found = nullptr;
  for (const allocations* memory : {&freed_memory(), &device_memory()}) {
    for (const auto& candidate : *memory) {
      const std::uintptr_t from = number_of(candidate.second.pages) - page_size();
      if (at >= from && at < from + candidate.second.page_bytes + 2 * page_size()) found = &candidate;
    }
  }
  if (found == nullptr) {
    std::fprintf(stderr,
                 "emulated device: a fault at address %p: a pointer is wrong, or a stack may be full\n",
                 info->si_addr);
  } else {
    const allocation& a = found->second;
    std::fprintf(stderr, "emulated device: %s: address %p is byte %td of %zu bytes of device memory%s\n",
                 accesses == 0 ? "the host touched device memory" : "an access outside of device memory",
                 info->si_addr, static_cast<std::ptrdiff_t>(at - found->first), a.bytes,
                 freed_memory().count(found->first) != 0 ? " that were freed" : "");
  }
  print_position();
  sigaction(SIGSEGV, &outer_handler, nullptr);  // the access is repeated: now it ends the program
}

// Test frameworks install and remove handlers of their own.
void watch_faults() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == explain_fault) return;
  outer_handler = now;
  stack_t stack;
  sigaltstack(nullptr, &stack);
  if ((stack.ss_flags & SS_DISABLE) != 0) {  // a fault may be the overflow of a stack
    constexpr std::size_t size = 64 * 1024;
    stack.ss_sp = std::malloc(size);
    stack.ss_size = size;
    stack.ss_flags = 0;
    sigaltstack(&stack, nullptr);
  }
  struct sigaction mine = {};
  mine.sa_sigaction = explain_fault;
  mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &mine, nullptr);
}

void check_guards(std::uintptr_t start, const allocation& a) {
  const auto* memory = reinterpret_cast<const unsigned char*>(start);
  const unsigned char* end = a.pages + a.page_bytes;
  const auto broken = [&](const unsigned char* from, const unsigned char* to) {
    for (; from != to; ++from) {
      if (*from != guard_byte) return true;
    }
    return false;
  };
  if (broken(a.pages, memory) || broken(memory + a.bytes, end)) {
    std::fprintf(stderr, "emulated device: something wrote outside of %zu bytes of device memory at %p\n",
                 a.bytes, reinterpret_cast<void*>(start));
    std::abort();
  }
}

}  // namespace

access::access() {
  if (accesses++ != 0) return;
  watch_faults();
  for (const auto& [start, a] : device_memory()) protect(a, true);
}

access::~access() {
  if (--accesses != 0) return;
  for (const auto& [start, a] : device_memory()) protect(a, false);
}

void* allocate_device(std::size_t bytes) {
  watch_faults();
  if (bytes > device_bytes || used_bytes + bytes > device_bytes) return nullptr;
  const std::size_t page = page_size(), rounded = round_up(bytes, alignment);
  const std::size_t page_bytes = round_up(rounded, page);
  void* mapped =
      mmap(nullptr, page_bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  unsigned char* pages = static_cast<unsigned char*>(mapped) + page;
  unsigned char* memory = pages + (page_bytes - rounded);
  const allocation a{bytes, pages, page_bytes, current_device()};
  protect(a, true);
  fill_with_nans(a);
  std::memset(pages, guard_byte, static_cast<std::size_t>(memory - pages));
  std::memset(memory + bytes, guard_byte, rounded - bytes);
  if (accesses == 0) protect(a, false);
  device_memory()[number_of(memory)] = a;
  used_bytes += bytes;
  lowest = std::min(lowest, number_of(pages));
  highest = std::max(highest, number_of(pages) + page_bytes);
  return memory;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}
int device_of(const void* memory) {
  return std::prev(device_memory().upper_bound(number_of(memory)))->second.device;
}

bool is_device(const void* memory) {
  const std::uintptr_t at = number_of(memory);
  return at >= lowest && at < highest && kind_of(memory, 1) == kind::device;
}

bool free_device(void* memory) {
  const auto found = device_memory().find(number_of(memory));
  if (found == device_memory().end()) return false;
  const allocation a = found->second;
  {
    const access open;
    check_guards(found->first, a);
  }
  used_bytes -= a.bytes;
  freed_memory().insert(device_memory().extract(found));
  // Keeps the addresses and returns the pages to the system.
  mmap(a.pages, a.page_bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return true;
}

void check_guards() {
  const access open;
  for (const auto& [start, a] : device_memory()) check_guards(start, a);
}

void* allocate_pinned(std::size_t bytes) {
  void* memory = std::aligned_alloc(alignment, round_up(bytes == 0 ? 1 : bytes, alignment));
  if (memory == nullptr) return nullptr;
  std::memset(memory, 0xff, bytes);
  pin(memory, bytes);
  return memory;
}

bool free_pinned(void* memory) {
  if (!unpin(memory)) return false;
  std::free(memory);
  return true;
}

void pin(void* memory, std::size_t bytes) { pinned_memory()[number_of(memory)] = bytes; }
bool unpin(void* memory) { return pinned_memory().erase(number_of(memory)) != 0; }

kind kind_of(const void* memory, std::size_t bytes) {
  const std::uintptr_t at = number_of(memory);
  const auto after = device_memory().upper_bound(at);
  if (after != device_memory().begin()) {
    const auto& [start, a] = *std::prev(after);
    if (at < start + a.bytes) {
      if (bytes <= start + a.bytes - at) return kind::device;
      std::fprintf(stderr, "emulated device: %zu bytes from byte %zu of %zu bytes of device memory\n", bytes,
                   static_cast<std::size_t>(at - start), a.bytes);
      print_position();
      std::abort();
    }
  }
  const auto after_pinned = pinned_memory().upper_bound(at);
  if (after_pinned != pinned_memory().begin()) {
    const auto& [start, size] = *std::prev(after_pinned);
    if (at - start <= size && bytes <= size - (at - start)) return kind::pinned;
  }
  return kind::pageable;
}

std::size_t free_bytes() { return device_bytes - used_bytes; }
std::size_t total_bytes() { return device_bytes; }

}  // namespace emulated_device
