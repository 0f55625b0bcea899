// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#undef _FORTIFY_SOURCE  // its longjmp takes another stack for a corrupted one
#include "fibre.hpp"

#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated_device {

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t stack_bytes = 256 * 1024;
#else
constexpr std::size_t stack_bytes = 64 * 1024;
#endif
constexpr std::size_t guard_bytes = 64 * 1024;  // below it, where no access is allowed

fibre* newest = nullptr;  // which one begins

// Nothing but this in a function that may, for all the compiler knows, return twice.
__attribute__((noinline)) void initialize(ucontext_t* context) { getcontext(context); }

}  // namespace

fibre::fibre(void (*body)()) : body_(body), started_(false), size_(stack_bytes) {
  static unsigned count = 0;
  void* memory = mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, guard_bytes, PROT_NONE) != 0) {
    std::perror("emulated device: a stack");
    std::abort();
  }
  initialize(&first_);
  bottom_ = first_.uc_stack.ss_sp = static_cast<char*>(memory) + guard_bytes;
  // Stacks that begin at equal offsets would share a few lines of the cache.
  first_.uc_stack.ss_size = stack_bytes - count++ * 5 % 128 * 64;
  first_.uc_link = nullptr;
  makecontext(&first_, begin, 0);
}

void fibre::begin() {
  newest->arrive();
  newest->body_();
  std::abort();
}

void fibre::arrive() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_frames_, &previous_->bottom_, &previous_->size_);
#endif
}

#if defined(__x86_64__)
#define PUFFERFISH_SET_JUMP(registers) __builtin_setjmp(registers)
#define PUFFERFISH_JUMP(registers) __builtin_longjmp(registers, 1)
#else
#define PUFFERFISH_SET_JUMP(registers) _setjmp(registers)
#define PUFFERFISH_JUMP(registers) _longjmp(registers, 1)
#endif

// In a function of its own, for the compiler's jump leaves the one that it is in.
__attribute__((noinline, no_sanitize("address"))) void fibre::enter() {
  if (started_) PUFFERFISH_JUMP(registers_);
  started_ = true;
  newest = this;
  setcontext(&first_);
  std::abort();
}

__attribute__((noinline, no_sanitize("address"))) void fibre::switch_to(fibre& next) {
  if (&next == this) return;
  next.previous_ = this;
  if (PUFFERFISH_SET_JUMP(registers_) != 0) {
    arrive();
    return;
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_frames_, next.bottom_, next.size_);
#endif
  next.enter();
}

}  // namespace emulated_device
